//! Sections that many threads are in at once, and a thread that holds them back: it waits until none is under way, and keeps new
//! ones out from then on. It does so because it forks, because a device pins memory, or because an arena ends.
//!
//! # Invariants
//! - S1 When `hold_back` returns, the sections that began before it are over, and none begins before `let_in`.
//! - S2 The thread in `hold_back` sleeps on `count`, which the end of each section changes; the last one wakes it.
//! - S3 A thread that is kept out reads `opened`, looks whether it is still kept out, and then sleeps while `opened` is what it
//!   read. `let_in` lets sections in first and changes `opened` then. So the thread sees the one or the other.
//!
//! # Order of locks
//! A thread takes all other locks that it needs before it calls `hold_back`, and no section takes a lock that such a thread
//! holds. So every section ends, and so does the wait.
use crate::sleep::{wait, wake_all};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use pagemill_core::atomic::AtomicU32;

/// This bit: they are held back. The bits below count those under way: no system has so many threads.
const HELD: u32 = 1 << 31;

/// See the [module](self).
///
/// ```
/// let sections = pagemill_os::Sections::new();
/// sections.enter();
/// sections.leave();
/// sections.hold_back();
/// assert!(!sections.try_enter());
/// sections.let_in();
/// assert!(sections.try_enter());
/// ```
#[derive(Debug)]
pub struct Sections {
    count: AtomicU32,
    /// Times that they were let in again.
    opened: AtomicU32,
}

impl Sections {
    /// None is under way.
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        Self { count: AtomicU32::new(0), opened: AtomicU32::new(0) }
    }
    /// None is under way.
    #[cfg(loom)]
    pub fn new() -> Self {
        Self { count: AtomicU32::new(0), opened: AtomicU32::new(0) }
    }

    /// Begins one, when they are not held back. [`leave`](Self::leave) ends it.
    #[inline]
    pub fn enter(&self) {
        // Acquire pairs with the Release in `let_in`.
        if self.count.fetch_add(1, Acquire) >= HELD {
            self.enter_later();
        }
    }

    #[cold]
    fn enter_later(&self) {
        loop {
            self.leave();
            loop {
                // Acquire pairs with the Release in `let_in` (S3).
                let opened = self.opened.load(Acquire);
                if self.count.load(Relaxed) < HELD {
                    break;
                }
                wait(&self.opened, opened);
            }
            // Acquire as in `enter`.
            if self.count.fetch_add(1, Acquire) < HELD {
                return;
            }
        }
    }

    /// Begins one unless they are held back. Never waits.
    #[inline]
    pub fn try_enter(&self) -> bool {
        // Acquire as in `enter`.
        self.count.fetch_update(Acquire, Relaxed, |count| (count < HELD).then_some(count + 1)).is_ok()
    }

    /// Ends one. Never waits, and does not touch its memory after the last one's end: that may be gone by then.
    #[inline]
    pub fn leave(&self) {
        // Release pairs with the Acquire in `hold_back`.
        if self.count.fetch_sub(1, Release) == HELD + 1 {
            wake_all(&self.count);
        }
    }

    /// None begins from now on, and those under way are over when it returns. By one thread at a time.
    pub fn hold_back(&self) {
        // Acquire, here and below, pairs with the Release in `leave`.
        let mut count = self.count.fetch_or(HELD, Acquire) | HELD;
        while count != HELD {
            wait(&self.count, count);
            count = self.count.load(Acquire);
        }
    }

    /// Those that were held back begin, and others.
    pub fn let_in(&self) {
        // Release pairs with the Acquire in `enter`.
        self.count.fetch_and(!HELD, Release);
        // Release pairs with the Acquire in `enter_later`.
        self.opened.fetch_add(1, Release);
        // Without asking whether anybody sleeps: what they were held back for took many times as long.
        wake_all(&self.opened);
    }

    /// In the child of a fork: none is under way, and nobody holds them back.
    pub fn forget_after_fork(&self) {
        self.count.store(0, Release);
    }
}

impl Default for Sections {
    fn default() -> Self {
        Self::new()
    }
}
