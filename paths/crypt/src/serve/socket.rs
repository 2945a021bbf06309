//! A client's socket: bytes in and out without waiting, by vectors.
use std::io::{self, IoSlice, IoSliceMut};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{SendAncillaryBuffer, SendFlags};

/// A stream socket that does not wait.
#[derive(Debug)]
pub(super) struct Socket(OwnedFd);

/// What became of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Moved {
    /// So many bytes.
    Bytes(usize),
    /// It would have to wait.
    NotNow,
    /// The other side is gone, or says no more.
    Ended,
}

impl Socket {
    pub(super) fn unix(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self(stream.into()))
    }

    pub(super) fn tcp(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Self(stream.into()))
    }

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

    /// Says that nothing more will come.
    pub(super) fn end_sending(&self) {
        // It may be gone already: then nobody is there to be told.
        let _ = rustix::net::shutdown(&self.0, rustix::net::Shutdown::Write);
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
