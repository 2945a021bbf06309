//! A descriptor that one thread signals and another waits for (`eventfd(2)`).
use crate::Errno;
use rustix::event::EventfdFlags;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// A counter behind a descriptor. A read of 8 bytes waits until it is not 0, takes it, and sets it to 0.
///
/// ```
/// use std::io::Read;
/// let event = pagemill_os::Event::new().unwrap();
/// event.signal();
/// event.signal();
/// let mut count = [0; 8];
/// std::fs::File::from(event.into_fd()).read_exact(&mut count)?;
/// assert_eq!(u64::from_ne_bytes(count), 2);
/// # std::io::Result::Ok(())
/// ```
#[derive(Debug)]
pub struct Event(OwnedFd);

impl Event {
    /// One that is 0.
    ///
    /// # Errors
    /// The system's: `EMFILE` or `ENFILE` if too many files are open.
    pub fn new() -> Result<Self, Errno> {
        rustix::event::eventfd(0, EventfdFlags::CLOEXEC).map(Self).map_err(Errno::of)
    }

    /// Adds 1, which ends the wait of a reader.
    pub fn signal(&self) {
        // Waits only beyond 2^64 - 2 signals, and fails only if interrupted then.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// The descriptor alone.
    pub fn into_fd(self) -> OwnedFd {
        self.0
    }
}

impl AsFd for Event {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
