//! Being told to end.
use std::io;
use std::os::unix::net::UnixStream;

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::low_level::pipe;

/// A descriptor that is readable once the program is to end.
pub(super) fn signals() -> io::Result<UnixStream> {
    let (stop, signalled) = UnixStream::pair()?;
    for signal in [SIGTERM, SIGINT] {
        pipe::register(signal, signalled.try_clone()?)?;
    }
    Ok(stop)
}
