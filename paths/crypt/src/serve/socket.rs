//! A client's socket: non-blocking vectored reads and writes, in plain or through TLS once that has begun.
use std::fmt;
use std::io::{self, IoSlice, IoSliceMut};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendFlags, sockopt};

use super::tls::{self, TlsClient, TlsServer, TlsSession};

/// TCP keep-alive: the idle time before the first probe, the time between probes, and their number. A client whose
/// machine or network is gone is disconnected after two minutes. For a client that is only paused, its system answers.
const KEEP_IDLE: Duration = Duration::from_secs(60);
const KEEP_INTERVAL: Duration = Duration::from_secs(10);
const KEEP_COUNT: u32 = 6;
/// Bytes that a local client may leave in its socket; the system gives less where its limit (`net.core.wmem_max`) is less.
/// With its default, a fifth of this, the sender is woken several times for a long answer (ADR 21). TCP finds its own.
const UNTAKEN: usize = 1 << 20;

/// A non-blocking stream socket.
#[derive(Debug)]
pub(super) struct Socket {
    raw: Raw,
    peer: Peer,
    tls: Option<Box<TlsSession>>,
}

/// The other side, for the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Peer {
    /// A process of this machine.
    Process {
        pid: i32,
        uid: u32,
    },
    Address(SocketAddr),
    /// The system does not say; it is gone.
    Unknown,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process { pid, uid } => write!(f, "pid {pid} of uid {uid}"),
            Self::Address(address) => address.fmt(f),
            Self::Unknown => f.write_str("unknown"),
        }
    }
}

/// The result of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Moved {
    /// It moved this many bytes.
    Bytes(usize),
    /// It would block.
    NotNow,
    /// The other side is gone, or has ended its side.
    Ended,
}

impl Socket {
    pub(super) fn unix(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        sockopt::set_socket_send_buffer_size(&stream, UNTAKEN)?;
        let peer = sockopt::socket_peercred(&stream)
            .map_or(Peer::Unknown, |who| Peer::Process { pid: who.pid.as_raw_nonzero().get(), uid: who.uid.as_raw() });
        Ok(Self { raw: Raw(stream.into()), peer, tls: None })
    }

    pub(super) fn tcp(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        sockopt::set_socket_keepalive(&stream, true)?;
        sockopt::set_tcp_keepidle(&stream, KEEP_IDLE)?;
        sockopt::set_tcp_keepintvl(&stream, KEEP_INTERVAL)?;
        sockopt::set_tcp_keepcnt(&stream, KEEP_COUNT)?;
        let peer = stream.peer_addr().map_or(Peer::Unknown, Peer::Address);
        Ok(Self { raw: Raw(stream.into()), peer, tls: None })
    }

    pub(super) fn peer(&self) -> Peer {
        self.peer
    }

    /// Why TLS failed, if it did.
    pub(super) fn tls_failure(&self) -> Option<String> {
        self.tls.as_ref()?.why().map(ToString::to_string)
    }

    /// Starts TLS with the next byte, both ways. False if there is no memory for it.
    pub(super) fn start_tls(&mut self, server: &TlsServer) -> bool {
        self.tls = TlsSession::new(server).map(Box::new);
        self.tls.is_some()
    }

    /// Starts TLS with a far end.
    pub(super) fn start_tls_to(&mut self, far: &TlsClient) -> io::Result<()> {
        self.tls = Some(Box::new(TlsSession::to_far(far).map_err(io::Error::other)?));
        Ok(())
    }

    /// Why the other side is gone.
    pub(super) fn ended(&self) -> io::Error {
        match self.tls.as_ref().and_then(|tls| tls.why()) {
            Some(why) => io::Error::other(format!("TLS: {why}{}", tls::advice(why))),
            None => io::ErrorKind::ConnectionAborted.into(),
        }
    }

    pub(super) fn receive(&mut self, vector: &mut [IoSliceMut<'_>]) -> Moved {
        match &mut self.tls {
            None => self.raw.receive(vector),
            Some(tls) => tls.receive(&self.raw, vector),
        }
    }

    pub(super) fn send(&mut self, vector: &[IoSlice<'_>]) -> Moved {
        match &mut self.tls {
            None => self.raw.send(vector),
            Some(tls) => tls.send(&self.raw, vector),
        }
    }

    /// Whether there are received bytes that epoll does not know of.
    pub(super) fn has_received(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.pending() > 0)
    }

    /// Whether bytes that were sent are still here.
    pub(super) fn has_unsent(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.has_unsent())
    }

    /// Sends those.
    pub(super) fn flush(&mut self) -> Moved {
        self.tls.as_mut().map_or(Moved::Bytes(0), |tls| tls.flush(&self.raw))
    }

    /// Ends the sending side.
    pub(super) fn end_sending(&mut self) {
        if let Some(tls) = &mut self.tls {
            tls.say_goodbye(&self.raw);
        }
        // This fails if the client is gone, which is fine.
        let _ = rustix::net::shutdown(&self.raw.0, rustix::net::Shutdown::Write);
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.raw.0.as_fd()
    }
}

/// The socket itself.
#[derive(Debug)]
pub(super) struct Raw(OwnedFd);

impl Raw {
    pub(super) fn receive(&self, vector: &mut [IoSliceMut<'_>]) -> Moved {
        loop {
            return match rustix::io::readv(&self.0, vector) {
                Ok(0) => Moved::Ended,
                Ok(n) => Moved::Bytes(n),
                Err(rustix::io::Errno::INTR) => continue,
                Err(rustix::io::Errno::AGAIN) => Moved::NotNow,
                Err(_) => Moved::Ended,
            };
        }
    }

    pub(super) fn send(&self, vector: &[IoSlice<'_>]) -> Moved {
        loop {
            let mut none = SendAncillaryBuffer::default();
            return match rustix::net::sendmsg(&self.0, vector, &mut none, SendFlags::NOSIGNAL) {
                Ok(n) => Moved::Bytes(n),
                Err(rustix::io::Errno::INTR) => continue,
                Err(rustix::io::Errno::AGAIN) => Moved::NotNow,
                Err(_) => Moved::Ended,
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn dead_tcp_clients_are_found_by_keep_alive() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let _client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let socket = Socket::tcp(listener.accept().unwrap().0).unwrap();
        assert!(sockopt::socket_keepalive(&socket).unwrap());
        let idle = sockopt::tcp_keepidle(&socket).unwrap();
        let asked = sockopt::tcp_keepintvl(&socket).unwrap() * sockopt::tcp_keepcnt(&socket).unwrap();
        assert_eq!(idle + asked, Duration::from_secs(120));
    }
}
