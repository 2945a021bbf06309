//! What a service of systemd says and is given: `sd_notify(3)` and `sd_listen_fds(3)`, by their documented protocols.
//!
//! A process that was not started by systemd, or whose parent was, finds no socket to say it to and no descriptors.
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener};
use std::time::Duration;

use rustix::net::{AddressFamily, SocketType, sockopt};

use crate::Error;
use crate::serve::Listener;

/// The first descriptor that is passed.
const FIRST: i32 = 3;
/// The most that are taken.
const MOST: i32 = 64;
/// How long a message may wait for systemd to take it.
const PATIENCE: Duration = Duration::from_secs(5);

/// Tells systemd a state, such as `READY=1`, if this process is one of its services. What goes wrong is logged: a service
/// that systemd does not hear of still serves.
pub(super) fn notify(state: &str) {
    let Some(to) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let sent = (|| {
        let address = match to.as_bytes() {
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
            [b'/', ..] => SocketAddr::from_pathname(&to)?,
            _ => return Err(io::Error::other("neither a path nor an abstract name")),
        };
        let socket = UnixDatagram::unbound()?;
        socket.set_write_timeout(Some(PATIENCE))?;
        socket.send_to_addr(state.as_bytes(), &address)
    })();
    if let Err(why) = sent {
        tracing::warn!(name: "systemd not told", %why, state = state.lines().next(), "could not tell systemd (NOTIFY_SOCKET)");
    }
}

/// The state while a service loads its configuration again; `READY=1` ends it.
pub(super) fn notify_reloading() {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let us = now.tv_sec * 1_000_000 + now.tv_nsec / 1000;
    notify(&format!("RELOADING=1\nMONOTONIC_USEC={us}\nSTATUS=loading the certificates again"));
}

/// A listening socket that systemd has passed, and its name in the `.socket` unit.
#[derive(Debug)]
pub(super) struct Passed {
    pub(super) listener: Listener,
    pub(super) name: String,
}

/// Takes the sockets that systemd has passed to this process, and unsets their variables. None if it has passed none.
/// Called once, before the program starts a thread.
///
/// # Errors
/// [`Error::Request`] for a descriptor that is no listening stream socket.
pub(super) fn passed() -> Result<Vec<Passed>, Error> {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<i32>().ok());
    // For another process: this one has inherited the variables, and not the descriptors.
    if number("LISTEN_PID") != Some(std::process::id().cast_signed()) {
        return Ok(Vec::new());
    }
    let (count, names) = (std::env::var("LISTEN_FDS"), std::env::var("LISTEN_FDNAMES").unwrap_or_default());
    for name in ["LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"] {
        // SAFETY: systemd, or what plays it, has just started this program: the variable has this process's number. The
        // program has one thread until the subcommand starts others, so nobody reads the environment meanwhile.
        unsafe { std::env::remove_var(name) };
    }
    let count = count.unwrap_or_default();
    let Some(count) = count.parse().ok().filter(|count| (0..=MOST).contains(count)) else {
        let why = format!("LISTEN_FDS={}: a number of sockets up to {MOST} is expected", count.escape_debug());
        return Err(Error::Request(why));
    };
    let mut names = names.split(':');
    (FIRST..FIRST + count).map(|fd| take(fd, names.next().unwrap_or_default())).collect()
}

fn take(fd: i32, name: &str) -> Result<Passed, Error> {
    let unfit = |why: &str| {
        let name = name.escape_debug();
        Error::Request(format!(
            "descriptor {fd} ({name}) of LISTEN_FDS {why}: name ListenStream= with a path or an address, and Accept=no, in \
             the .socket unit"
        ))
    };
    // SAFETY: it only reads the descriptor's flags; where there is none it fails.
    if unsafe { libc::fcntl(fd, libc::F_GETFD) } == -1 {
        return Err(unfit("is not open"));
    }
    // SAFETY: it is open, and by the protocol it is this process's; variables are unset, so that nobody takes it twice.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC).map_err(|error| unfit(&error.to_string()))?;
    match sockopt::socket_type(&fd) {
        Ok(SocketType::STREAM) => {}
        Ok(_) => return Err(unfit("is no stream socket")),
        Err(_) => return Err(unfit("is no socket")),
    }
    if !sockopt::socket_acceptconn(&fd).is_ok_and(|accepts| accepts) {
        return Err(unfit("does not listen"));
    }
    let listener = match sockopt::socket_domain(fd.as_fd()) {
        Ok(AddressFamily::UNIX) => Listener::Unix(UnixListener::from(fd)),
        Ok(AddressFamily::INET | AddressFamily::INET6) => Listener::Tcp(TcpListener::from(fd)),
        _ => return Err(unfit("is neither a Unix socket nor TCP")),
    };
    Ok(Passed { listener, name: name.to_owned() })
}
