//! Waiting for several sockets at once, and writing to one without a signal: what the standard library has no door to.
use core::marker::PhantomData;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// One descriptor that [`poll`] looks at, and what it found.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct Polled<'fd>(libc::pollfd, PhantomData<BorrowedFd<'fd>>);

impl<'fd> Polled<'fd> {
    /// Waits until `fd` can be read, written, or has ended, which is always waited for.
    pub fn new(fd: &'fd impl AsFd, is_to_read: bool, is_to_write: bool) -> Self {
        let read = if is_to_read { libc::POLLIN } else { 0 };
        let write = if is_to_write { libc::POLLOUT } else { 0 };
        let fd = fd.as_fd().as_raw_fd();
        Self(libc::pollfd { fd, events: read | write, revents: 0 }, PhantomData)
    }
    /// It can be read or written, as was asked for.
    pub fn is_ready(&self) -> bool {
        self.0.revents & (libc::POLLIN | libc::POLLOUT) != 0
    }
    /// The other end is gone, or the descriptor is broken.
    pub fn has_ended(&self) -> bool {
        self.0.revents & (libc::POLLHUP | libc::POLLERR | libc::POLLNVAL) != 0
    }
}

/// Sleeps until something has happened to one of them, or the time is over; rounded up to milliseconds, and without
/// an end if there is none. A signal may end it early.
///
/// ```
/// # #[cfg(not(miri))] {
/// use std::io::Write;
/// use std::os::unix::net::UnixStream;
/// use pagemill_os::{Polled, poll};
/// let (mut here, there) = UnixStream::pair()?;
/// here.write_all(b"!")?;
/// let mut both = [Polled::new(&here, true, false), Polled::new(&there, true, false)];
/// poll(&mut both, None)?;
/// assert_eq!(both.map(|polled| polled.is_ready()), [false, true]);
/// # }
/// # Ok::<(), std::io::Error>(())
/// ```
///
/// # Errors
/// What the system says: no memory, or more descriptors than a process may have.
pub fn poll(polled: &mut [Polled<'_>], time: Option<Duration>) -> io::Result<()> {
    let ms = time.map_or(-1, |time| time.as_nanos().div_ceil(1_000_000).min(i32::MAX as u128) as i32);
    // SAFETY: a `Polled` is a `pollfd` (transparent), and the slice says how many there are.
    let found = unsafe { libc::poll(polled.as_mut_ptr().cast(), polled.len() as libc::nfds_t, ms) };
    match io::Error::last_os_error() {
        error if found < 0 && error.kind() != io::ErrorKind::Interrupted => Err(error),
        _ => Ok(()),
    }
}

/// Writes as much as the socket takes. If the other end is gone that is an error, and no SIGPIPE, which would end a
/// process that does not ignore it.
///
/// ```
/// # #[cfg(not(miri))] {
/// use std::os::unix::net::UnixStream;
/// let (here, there) = UnixStream::pair()?;
/// assert_eq!(pagemill_os::send(&here, b"pages")?, 5);
/// drop(there);
/// assert_eq!(pagemill_os::send(&here, b"pages").unwrap_err().kind(), std::io::ErrorKind::BrokenPipe);
/// # }
/// # Ok::<(), std::io::Error>(())
/// ```
///
/// # Errors
/// As [`std::io::Write::write`].
pub fn send(stream: &UnixStream, bytes: &[u8]) -> io::Result<usize> {
    // SAFETY: reads the slice, whose length is given.
    let sent = unsafe { libc::send(stream.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), libc::MSG_NOSIGNAL) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

#[cfg(all(test, not(any(loom, miri))))]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_whose_other_end_is_gone_has_ended() {
        let (here, there) = UnixStream::pair().unwrap();
        let (reader, writer) = io::pipe().unwrap();
        let ended = || {
            let mut both = [Polled::new(&here, false, false), Polled::new(&writer, false, false)];
            poll(&mut both, Some(Duration::ZERO)).unwrap();
            both.map(|polled| polled.has_ended())
        };
        assert_eq!(ended(), [false, false]);
        drop(there);
        assert_eq!(ended(), [true, false]);
        // The system calls this one an error, and no end.
        drop(reader);
        assert_eq!(ended(), [true, true]);
    }
}
