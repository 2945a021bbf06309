//! The process: how many forks it is from the first one, and sections that no fork meets halfway.
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use pagemill_os::Sections;

/// Forks between the first process and this one.
static GENERATION: AtomicU64 = AtomicU64::new(0);

#[inline]
pub(crate) fn generation() -> u64 {
    GENERATION.load(Relaxed)
}

/// In the child of a fork: its generation.
pub(crate) fn begin_generation() {
    GENERATION.fetch_add(1, Relaxed);
}

/// Sections that no fork may meet halfway.
pub(crate) static SECTIONS: Sections = Sections::new();

/// Until it is dropped, no fork begins. Many threads may have one at once, and none has two.
#[derive(Debug)]
pub(crate) struct NoFork(());

/// Goes before a lock is taken that a child has to find free, with what it guards whole.
#[inline]
pub(crate) fn no_fork() -> NoFork {
    SECTIONS.enter();
    NoFork(())
}

impl Drop for NoFork {
    #[inline]
    fn drop(&mut self) {
        SECTIONS.leave();
    }
}
