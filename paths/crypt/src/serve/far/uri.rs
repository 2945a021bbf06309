//! The address of a far end: a URI as libnbd and QEMU read it, and connecting there.
//!
//! `nbd://HOST[:PORT]/EXPORT` and `nbd+unix:///EXPORT?socket=PATH`; with `nbds` in place of `nbd`, by TLS. Then
//! `tls-certificates=FOLDER` has the authority's certificate, `ca-cert.pem`, and, for a server that asks for one, the
//! client's own, `client-cert.pem` and `client-key.pem`. `tls-hostname=NAME` is the name in the server's certificate,
//! if it is not HOST.
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with, sockopt};

use crate::Error;
use crate::nbd::client::{self, Agreed};
use crate::serve::socket::{Moved, Socket};
use crate::serve::tls::{Pem, TlsClient};

/// The port of NBD.
const PORT: u16 = 10809;
/// Time for connecting and agreeing.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// How long bytes may be unacknowledged before a connection counts as lost.
const UNACKNOWLEDGED: Duration = Duration::from_secs(120);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Host {
    Tcp(String, u16),
    Unix(PathBuf),
}

/// Where a far end is, and which of its exports.
#[derive(Clone, Debug)]
pub(super) struct FarUri {
    host: Host,
    export: String,
    tls: Option<TlsClient>,
}

/// The schemes, and whether they are by TLS and by a socket of this machine.
const SCHEMES: [(&str, bool, bool); 4] =
    [("nbd://", false, false), ("nbds://", true, false), ("nbd+unix://", false, true), ("nbds+unix://", true, true)];

/// Whether `text` names a far end rather than a file.
pub(crate) fn is_uri(text: &str) -> bool {
    SCHEMES.iter().any(|(scheme, ..)| text.starts_with(scheme))
}

/// Whether both name one export of one server, as far as their texts tell.
pub(crate) fn is_same_far(one: &str, other: &str) -> bool {
    let place = |text: &str| {
        let (Parts { host, export, .. }, ..) = Parts::new(text).ok()?;
        let host = match host {
            Host::Tcp(name, port) => Host::Tcp(name.to_ascii_lowercase(), port),
            Host::Unix(path) => Host::Unix(path.canonicalize().unwrap_or(path)),
        };
        Some((host, export))
    };
    place(one).is_some_and(|one| Some(one) == place(other))
}

impl FarUri {
    /// Reads it, and the certificates that it names.
    pub(super) fn new(text: &str) -> Result<Self, Error> {
        let (parts, certificates, hostname) =
            Parts::new(text).map_err(|why| Error::Request(format!("{text}: {why}")))?;
        let Parts { host, export, by_tls } = parts;
        let tls = match (by_tls, certificates) {
            (false, _) => None,
            (true, None) => {
                let why = "say whom to trust with ?tls-certificates=FOLDER, which has ca-cert.pem";
                return Err(Error::Request(format!("{text}: {why}")));
            }
            (true, Some(folder)) => {
                let name = match (&host, hostname) {
                    (_, Some(name)) => name,
                    (Host::Tcp(host, _), None) => host.clone(),
                    (Host::Unix(_), None) => "localhost".to_owned(),
                };
                Some(certified(&folder, &name)?)
            }
        };
        Ok(Self { host, export, tls })
    }

    /// Connects, and agrees on the export.
    pub(super) fn connect(&self) -> io::Result<(Socket, Agreed)> {
        let until = Instant::now() + HANDSHAKE;
        let mut socket = match &self.host {
            Host::Unix(path) => Socket::unix(connect_unix(path)?)?,
            Host::Tcp(host, port) => {
                let mut refused = io::Error::other("the name has no address");
                let addresses = (host.as_str(), *port).to_socket_addrs();
                let mut addresses = addresses.map_err(|error| io::Error::new(io::ErrorKind::NotFound, error))?;
                let found = addresses.find_map(|address| {
                    let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
                    TcpStream::connect_timeout(&address, left).map_err(|error| refused = error).ok()
                });
                let socket = Socket::tcp(found.ok_or(refused)?)?;
                // Its machine may be gone while it owes acknowledgements.
                sockopt::set_tcp_user_timeout(&socket, UNACKNOWLEDGED.as_millis() as u32)?;
                socket
            }
        };
        let mut patient = Patient { socket: &mut socket, until };
        client::greet(&mut patient, self.tls.is_some())?;
        if let Some(tls) = &self.tls {
            patient.socket.start_tls_to(tls)?;
        }
        let agreed = client::go(&mut patient, &self.export)?;
        Ok((socket, agreed))
    }
}

/// Connects within [`HANDSHAKE`]: it waits while a far end that hangs accepts nobody and has no room for those who wait.
fn connect_unix(path: &std::path::Path) -> io::Result<UnixStream> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(HANDSHAKE))?;
    match rustix::net::connect(&socket, &SocketAddrUnix::new(path)?) {
        Err(rustix::io::Errno::AGAIN) => Err(io::ErrorKind::TimedOut.into()),
        connected => Ok(connected.map(|()| UnixStream::from(socket))?),
    }
}

fn certified(folder: &std::path::Path, name: &str) -> Result<TlsClient, Error> {
    let read = |file: &str| {
        let path = folder.join(file);
        let shown = path.display().to_string();
        std::fs::read(&path)
            .map(|text| (shown.clone(), zeroize::Zeroizing::new(text)))
            .map_err(|error| Error::io(shown, error))
    };
    let authority = read("ca-cert.pem")?;
    let own = match folder.join("client-cert.pem").exists() {
        true => Some((read("client-cert.pem")?, read("client-key.pem")?)),
        false => None,
    };
    fn pem((from, text): &(String, zeroize::Zeroizing<Vec<u8>>)) -> Pem<'_> {
        Pem { from, text }
    }
    TlsClient::new(pem(&authority), own.as_ref().map(|(chain, key)| (pem(chain), pem(key))), name)
}

#[derive(Debug, PartialEq, Eq)]
struct Parts {
    host: Host,
    export: String,
    by_tls: bool,
}

impl Parts {
    /// With the folder of certificates and the name in the server's, if they are given.
    fn new(text: &str) -> Result<(Self, Option<PathBuf>, Option<String>), String> {
        let scheme = SCHEMES.iter().find(|(scheme, ..)| text.starts_with(scheme));
        let Some(&(scheme, by_tls, by_unix)) = scheme else { return Err("not a URI of NBD".to_owned()) };
        let rest = &text[scheme.len()..];
        if rest.contains('#') {
            return Err("a # has to be written %23".to_owned());
        }
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (host, export) = rest.split_once('/').unwrap_or((rest, ""));
        let (mut socket, mut certificates, mut hostname) = (None, None, None);
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let value = decoded(value)?;
            match key {
                "socket" => socket = Some(PathBuf::from(value)),
                "tls-certificates" if by_tls => certificates = Some(PathBuf::from(value)),
                "tls-hostname" if by_tls => hostname = Some(value),
                _ => {
                    return Err(format!(
                        "{key}: known are socket with nbd+unix, tls-certificates and tls-hostname with nbds"
                    ));
                }
            }
        }
        let host = match (by_unix, socket) {
            (true, Some(path)) if host.is_empty() => Host::Unix(path),
            (true, Some(_)) => return Err("a socket of this machine has no host: write three slashes".to_owned()),
            (true, None) => return Err("name the socket with ?socket=PATH".to_owned()),
            (false, Some(_)) => return Err("a socket goes with nbd+unix:// or nbds+unix://".to_owned()),
            (false, None) => address(host)?,
        };
        Ok((Self { host, export: decoded(export)?, by_tls }, certificates, hostname))
    }
}

/// `HOST`, `HOST:PORT`, `[ADDRESS]` or `[ADDRESS]:PORT`.
fn address(text: &str) -> Result<Host, String> {
    let (host, port) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, "")) => (host, None),
        Some((host, port)) => (host, Some(port.strip_prefix(':').ok_or("after ] comes :PORT")?)),
        None => text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port))),
    };
    let port = port.map_or(Ok(PORT), |port| port.parse().map_err(|_| format!("{port} is not a port")))?;
    match host {
        "" => Err("name a host, as nbd://localhost".to_owned()),
        _ if host.contains('@') => Err("NBD has no users: leave out what is before @".to_owned()),
        _ => Ok(Host::Tcp(host.to_owned(), port)),
    }
}

/// A text with its %XX replaced.
fn decoded(text: &str) -> Result<String, String> {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        bytes.push(if byte == b'%' {
            let digit = |at: usize| after.get(at).and_then(|&digit| char::from(digit).to_digit(16));
            let (Some(high), Some(low)) = (digit(0), digit(1)) else {
                return Err("after % come two digits".to_owned());
            };
            rest = &after[2..];
            (16 * high + low) as u8
        } else {
            byte
        });
    }
    match String::from_utf8(bytes) {
        Ok(text) if !text.contains('\0') => Ok(text),
        _ => Err("it is not a text in UTF-8".to_owned()),
    }
}

/// Blocking calls on a socket, up to a time.
struct Patient<'a> {
    socket: &'a mut Socket,
    until: Instant,
}

impl Patient<'_> {
    fn until_done(&mut self, mut act: impl FnMut(&mut Socket) -> Moved, waits_for: PollFlags) -> io::Result<usize> {
        loop {
            match act(self.socket) {
                Moved::Bytes(count) => return Ok(count),
                Moved::Ended => return Err(self.socket.ended()),
                Moved::NotNow => {}
            }
            let left = self.until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let mut events = waits_for;
            events.set(PollFlags::OUT, waits_for.contains(PollFlags::OUT) || self.socket.has_unsent());
            let left = rustix::time::Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            match poll(&mut [PollFd::from_borrowed_fd(self.socket.as_fd(), events)], Some(&left)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            if self.socket.has_unsent() && self.socket.flush() == Moved::Ended {
                return Err(self.socket.ended());
            }
        }
    }
}

impl Read for Patient<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.until_done(|socket| socket.receive(&mut [IoSliceMut::new(bytes)]), PollFlags::IN)
    }
}

impl Write for Patient<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.until_done(|socket| socket.send(&[IoSlice::new(bytes)]), PollFlags::OUT)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uris_name_a_host_or_a_socket_and_an_export() {
        let tcp = |host: &str, port| Host::Tcp(host.to_owned(), port);
        let unix = |path: &str| Host::Unix(PathBuf::from(path));
        for (text, host, export) in [
            ("nbd://localhost", tcp("localhost", 10809), ""),
            ("nbd://10.0.0.1:99/", tcp("10.0.0.1", 99), ""),
            ("nbd://[::1]/a/b", tcp("::1", 10809), "a/b"),
            ("nbds://[::1]:5/a%20b?tls-hostname=x", tcp("::1", 5), "a b"),
            ("nbd+unix:///?socket=/run/a%3Fb", unix("/run/a?b"), ""),
            ("nbds+unix:///disk?socket=s&tls-certificates=/c", unix("s"), "disk"),
        ] {
            let (parts, ..) = Parts::new(text).unwrap();
            let by_tls = text.starts_with("nbds");
            assert_eq!(parts, Parts { host, export: export.to_owned(), by_tls }, "{text}");
        }
        let (_, certificates, name) = Parts::new("nbds://h/?tls-certificates=/c&tls-hostname=n").unwrap();
        assert_eq!((certificates, name), (Some(PathBuf::from("/c")), Some("n".to_owned())));
    }

    #[test]
    fn one_far_end_has_several_spellings() {
        for (one, other, is_same) in [
            ("nbd://host", "nbds://HOST:10809/?tls-hostname=x", true),
            ("nbd://[::1]/a%20b", "nbd://[::1]:10809/a b", true),
            ("nbd+unix:///?socket=/dev/../dev/null", "nbd+unix:///?socket=/dev/null", true),
            ("nbd+unix:///a?socket=/no/such", "nbd+unix:///a?socket=/no/such", true),
            ("nbd://host/a", "nbd://host/b", false),
            ("nbd://host/a", "nbd://host:1/a", false),
            ("nbd+unix:///?socket=/dev/null", "nbd+unix:///?socket=/dev/zero", false),
            ("disk.img", "disk.img", false),
        ] {
            assert_eq!(is_same_far(one, other), is_same, "{one} {other}");
        }
    }

    #[test]
    fn uris_that_make_no_sense_are_refused() {
        for text in [
            "nbd://",
            "nbd:///export",
            "nbd://host:/",
            "nbd://host:65536/",
            "nbd://user@host/",
            "nbd://[::1]x/",
            "nbd://host/%4",
            "nbd://host/%ff",
            "nbd://host/%00",
            "nbd://host/#part",
            "nbd://host/?socket=/s",
            "nbd://host/?tls-certificates=/c",
            "nbd+unix:///disk",
            "nbd+unix://host/?socket=/s",
            "http://host/",
        ] {
            assert!(Parts::new(text).is_err(), "{text}");
        }
        assert!(is_uri("nbd+unix:///") && !is_uri("nbd.img") && !is_uri("./nbd://x") && !is_uri("nbd:host:10809"));
        let untrusted = FarUri::new("nbds://host/").unwrap_err();
        assert!(untrusted.to_string().contains("tls-certificates"), "{untrusted}");
    }
}
