//! Signals that end the program, or that it is to load something again.
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::low_level::pipe;

/// A descriptor that becomes readable when the program should end.
pub(super) fn signals() -> io::Result<UnixStream> {
    of(&[SIGTERM, SIGINT])
}

/// A server's: one for its end and one for SIGHUP, which ends it as well unless it `reloads`. A SIGHUP that was ignored
/// at the start (`nohup`) stays ignored unless it has something to load again.
pub(super) fn of_server(reloads: bool) -> io::Result<(UnixStream, Option<UnixStream>)> {
    // With this, a write beyond the limit of a file's size fails, and does not end the program.
    signal_hook::flag::register(SIGXFSZ, Arc::default())?;
    match reloads {
        true => Ok((signals()?, Some(of(&[SIGHUP])?))),
        false if is_ignored(SIGHUP) => Ok((signals()?, None)),
        false => Ok((of(&[SIGTERM, SIGINT, SIGHUP])?, None)),
    }
}

/// A descriptor that gets a byte for each of these signals. It never ends.
fn of(signals: &[i32]) -> io::Result<UnixStream> {
    let (stop, signalled) = UnixStream::pair()?;
    for &signal in signals {
        pipe::register(signal, signalled.try_clone()?)?;
    }
    Ok(stop)
}

fn is_ignored(signal: i32) -> bool {
    // SAFETY: the call reads the signal's action and changes nothing; an all-zero sigaction is valid memory for it.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &mut action) == 0 && action.sa_sigaction == libc::SIG_IGN
    }
}
