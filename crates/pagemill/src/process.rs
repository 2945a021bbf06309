//! This process and the ones that it was forked from: stamps that tell them apart, and sections that no fork interrupts.
//!
//! The child of a fork inherits copies of everything, but threads, locked memory, a device's mappings and the like stay the
//! parent's. So whatever belongs to one process has a [`Stamp`], and is asked before use if it is inherited. A stamp is right
//! once the fork hooks are registered (`registry::watch`).
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use pagemill_os::Sections;

/// Forks between the first process and this one. Relaxed everywhere: a fork's child changes it on its only thread, and starts
/// others later.
static GENERATION: AtomicU64 = AtomicU64::new(0);

/// The process in which something was made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stamp(u64);

impl Stamp {
    /// The first process, for a constant that is renewed before use.
    pub(crate) const FIRST: Self = Self(0);

    /// This process.
    #[inline]
    pub(crate) fn here() -> Self {
        Self(GENERATION.load(Relaxed))
    }

    /// Whether it was made before this process was forked.
    #[inline]
    pub(crate) fn is_inherited(self) -> bool {
        self.0 != Self::here().0
    }

    /// Makes it this process's. Returns whether it was inherited.
    pub(crate) fn renew(&mut self) -> bool {
        core::mem::replace(self, Self::here()).is_inherited()
    }
}

/// A [`Stamp`] that threads share. It orders no other access: what it stands for has a lock of its own.
#[derive(Debug)]
pub(crate) struct AtomicStamp(AtomicU64);

impl AtomicStamp {
    /// This process.
    pub(crate) fn here() -> Self {
        Self(AtomicU64::new(Stamp::here().0))
    }

    /// No process, until it is renewed.
    pub(crate) const fn never() -> Self {
        Self(AtomicU64::new(u64::MAX))
    }

    /// Whether it was made before this process was forked.
    #[inline]
    pub(crate) fn is_inherited(&self) -> bool {
        Stamp(self.0.load(Relaxed)).is_inherited()
    }

    /// Makes it this process's.
    pub(crate) fn renew(&self) {
        self.0.store(Stamp::here().0, Relaxed);
    }
}

/// In the child of a fork: makes every stamp of its parent an inherited one.
pub(crate) fn begin_generation() {
    GENERATION.fetch_add(1, Relaxed);
}

/// Sections that no fork interrupts.
pub(crate) static SECTIONS: Sections = Sections::new();

/// Until it is dropped, no fork begins. Many threads may have one at once; a thread has one at most.
#[derive(Debug)]
pub(crate) struct NoFork(());

/// Call it before taking a lock that a child must find free, with the data under it whole.
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
