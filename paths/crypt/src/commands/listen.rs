//! The address of a server: a TCP address, or a Unix socket with a name.
//!
//! A socket stays when its process is killed, and the next server replaces it. While a server finds that nobody answers
//! there and binds its own socket, another server must not do the same: it would remove the first one's socket. So both
//! steps are done under a lock (I1): a file beside the socket, which exists only for that moment.
use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use clap::Args;
use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};

use super::systemd::{self, Passed};
use super::{need_folder, shown};
use crate::Error;
use crate::serve::Listener;

/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;
/// The longest name of a socket: the system's structure also has a zero byte.
const LONGEST: usize = size_of::<libc::sockaddr_un>() - std::mem::offset_of!(libc::sockaddr_un, sun_path) - 1;
const OURS: Mode = Mode::RUSR.union(Mode::WUSR);

#[derive(Args, Debug)]
#[group(required = true, multiple = false)]
pub(super) struct Place {
    /// Serve on a unix socket of this name; only this user may connect
    #[arg(long, value_name = "PATH")]
    unix: Option<PathBuf>,

    /// Serve on this address and port, as 127.0.0.1:10809
    #[arg(long, value_name = "ADDR", value_parser = address)]
    pub(super) tcp: Option<SocketAddr>,

    /// Serve on the sockets of a systemd .socket unit (LISTEN_FDS)
    #[arg(long)]
    activated: bool,
}

impl Place {
    /// The sockets that systemd has passed. Called once, before the program starts a thread.
    pub(super) fn passed(&self) -> Result<Vec<Passed>, Error> {
        let passed = systemd::passed()?;
        match (self.activated, passed.is_empty()) {
            (true, true) => Err(Error::Request(
                "--activated, and systemd has passed no socket (LISTEN_FDS): start it by its .socket unit, or name a place \
                 with --unix or --tcp"
                    .to_owned(),
            )),
            (false, false) => Err(Error::Request(
                "systemd has passed sockets, on which nobody would answer: say --activated in place of --unix or --tcp, or \
                 remove the .socket unit"
                    .to_owned(),
            )),
            _ => Ok(passed),
        }
    }

    /// Refuses a name that can't be a socket's.
    pub(super) fn check(&self) -> Result<(), Error> {
        let Some(path) = &self.unix else { return Ok(()) };
        let name = shown(path);
        Err(Error::Request(match fs::symlink_metadata(path) {
            _ if path.is_dir() => format!("{name} is a directory: name a socket in it, as {name}/pagemill.sock"),
            Ok(there) if !there.file_type().is_socket() => {
                format!("{name} is not a socket: name another one")
            }
            _ if SocketAddrUnix::new(path).is_err() => {
                let len = path.as_os_str().len();
                format!(
                    "the name {name} is {len} bytes long, and a socket's has {LONGEST} at most: choose a shorter one, or \
                     change to its folder and leave that out"
                )
            }
            _ => return need_folder(path),
        }))
    }
}

pub(super) fn address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| "an address in numbers and a port, as 127.0.0.1:10809 or [::1]:10809".to_owned())
}

/// A listening socket, and the name that is removed when it is dropped.
pub(super) struct Listening {
    pub(super) listener: Listener,
    pub(super) uri: String,
    _file: SocketFile,
}

/// The sockets that systemd has passed; without them the one that `place` says.
pub(super) fn listen_all(place: &Place, passed: Vec<Passed>, scheme: &str) -> Result<Vec<Listening>, Error> {
    if passed.is_empty() {
        let (listener, file, uri) = listen(place, scheme)?;
        return Ok(vec![Listening { listener, uri, _file: file }]);
    }
    let named = |Passed { listener, name }| {
        let uri = match &listener {
            Listener::Unix(listener) => {
                let address = listener.local_addr().map_err(|error| Error::io(name, error))?;
                let path = address.as_pathname().map_or("(abstract)".to_owned(), shown);
                format!("{scheme}+unix:///?socket={path}")
            }
            Listener::Tcp(listener) => {
                format!("{scheme}://{}", listener.local_addr().map_err(|error| Error::io(name, error))?)
            }
        };
        Ok(Listening { listener, uri, _file: SocketFile(None) })
    };
    passed.into_iter().map(named).collect()
}

/// The listener, the name of its socket, which is removed when dropped, and its URI.
pub(super) fn listen(place: &Place, scheme: &str) -> Result<(Listener, SocketFile, String), Error> {
    if let Some(path) = &place.unix {
        let (listener, file) = listen_unix(path).map_err(|error| Error::io(shown(path), error))?;
        let place = format!("{scheme}+unix:///?socket={}", shown(path));
        return Ok((Listener::Unix(listener), file, place));
    }
    let Some(address) = place.tcp else { unreachable!("one of the two is given") };
    let listener = TcpListener::bind(address).map_err(|error| Error::io(address.to_string(), error))?;
    let address = listener.local_addr().map_err(|error| Error::io(address.to_string(), error))?;
    Ok((Listener::Tcp(listener), SocketFile(None), format!("{scheme}://{address}")))
}

/// A socket that nobody else may open: it gets its mode before it gets its name.
fn listen_unix(path: &Path) -> io::Result<(UnixListener, SocketFile)> {
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None)?;
    rustix::io::fcntl_setfd(&socket, rustix::io::FdFlags::CLOEXEC)?;
    rustix::fs::fchmod(&socket, OURS)?;
    let address = SocketAddrUnix::new(path)?;
    let _lock = NameLock::take(path)?;
    match rustix::net::bind(&socket, &address) {
        Err(rustix::io::Errno::ADDRINUSE) => {
            make_room(path)?;
            rustix::net::bind(&socket, &address)?;
        }
        bound => bound?,
    }
    let file = SocketFile(Some((path.to_owned(), identity(path)?)));
    // Until it listens it looks like a stale socket, so it listens before it gets its name, too.
    rustix::net::listen(&socket, BACKLOG)?;
    Ok((socket.into(), file))
}

/// Removes a stale socket.
fn make_room(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(there) if there.file_type().is_socket() => {}
        Ok(_) => return Err(in_use("there is a file of that name, which is no socket")),
        Err(error) => return gone(error),
    }
    match UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path).or_else(gone),
        _ => Err(in_use("another process answers there already")),
    }
}

/// Its process has removed it meanwhile.
fn gone(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
}

fn in_use(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::AddrInUse, format!("the address is in use: {why}"))
}

/// The lock for making a socket of some name.
struct NameLock {
    path: PathBuf,
    /// Locked until it is closed.
    _file: File,
}

impl NameLock {
    fn take(socket: &Path) -> io::Result<Self> {
        let mut path = OsString::from(socket);
        path.push(".lock");
        let path = PathBuf::from(path);
        loop {
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let file = File::from(rustix::fs::open(&path, flags, OURS)?);
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Err(in_use("another process is about to serve there")),
                Err(TryLockError::Error(error)) => return Err(error),
            }
            // The process that had the lock removes its file, perhaps between our opening and locking it. Then this
            // lock protects nothing.
            let own = file.metadata()?;
            if identity(&path).is_ok_and(|there| there == [own.dev(), own.ino()]) {
                return Ok(Self { path, _file: file });
            }
        }
    }
}

impl Drop for NameLock {
    fn drop(&mut self) {
        // If the file stays, it is not locked, and the next server uses it.
        let _ = fs::remove_file(&self.path);
    }
}

/// The socket's name, which is removed when the server ends, unless another socket has that name by then.
pub(super) struct SocketFile(Option<(PathBuf, [u64; 2])>);

impl Drop for SocketFile {
    fn drop(&mut self) {
        if let Some((path, own)) = &self.0
            && identity(path).is_ok_and(|there| there == *own)
        {
            // If the socket stays, the next server replaces it.
            let _ = fs::remove_file(path);
        }
    }
}

/// The identity of the file with this name.
fn identity(path: &Path) -> io::Result<[u64; 2]> {
    let there = fs::symlink_metadata(path)?;
    Ok([there.dev(), there.ino()])
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn a_server_removes_only_its_own_socket() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let place = Place { unix: Some(path.clone()), tcp: None, activated: false };
        let (_first, its_file, _) = listen(&place, "nbd").unwrap();
        // Somebody removes the name, and another server takes it.
        fs::remove_file(&path).unwrap();
        let (_second, others_file, _) = listen(&place, "nbd").unwrap();
        drop(its_file);
        UnixStream::connect(&path).unwrap();
        drop(others_file);
        assert!(!path.exists());
    }

    #[test]
    fn of_servers_started_at_once_one_gets_the_socket() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        for round in 0..300 {
            // A stale socket, or none; and a stale lock file.
            if round % 3 > 0 {
                drop(UnixListener::bind(&path).unwrap());
            }
            if round % 2 > 0 {
                File::create(folder.path().join("socket.lock")).unwrap();
            }
            let start = Barrier::new(4);
            let started: Vec<_> = std::thread::scope(|scope| {
                let begin = || {
                    start.wait();
                    listen_unix(&path)
                };
                let threads: Vec<_> = (0..4).map(|_| scope.spawn(begin)).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            let (have, have_not): (Vec<_>, Vec<_>) = started.into_iter().partition(Result::is_ok);
            let refusals: Vec<_> = have_not.into_iter().map(|refused| refused.err().unwrap()).collect();
            assert_eq!(have.len(), 1, "round {round}: {refusals:?}");
            assert!(refusals.iter().all(|error| error.kind() == io::ErrorKind::AddrInUse), "{refusals:?}");
            UnixStream::connect(&path).unwrap();
            drop(have);
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "round {round}: all is gone");
        }
    }
}
