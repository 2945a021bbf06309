//! Sections that many threads run at once, and that one thread can hold back: it keeps new ones from starting, and waits until
//! the running ones are over. It does so to fork, to pin memory for a device, or to end an arena.
//!
//! # Invariants
//! - S1 When `hold_back` returns, all sections that began before are over, and none begins until `let_in`.
//! - S2 The thread in `hold_back` sleeps on `count`. The end of each section changes `count`, and the last one wakes the
//!   thread.
//! - S3 A thread that is kept out reads `opened`, checks again that it is kept out, and sleeps while `opened` has the value
//!   that it read. `let_in` first lets sections in and then changes `opened`. So the thread sees at least one of the two
//!   changes.
//!
//! # Order of locks
//! A thread takes all other locks that it needs before it calls `hold_back`, and no section takes a lock that such a thread
//! holds. So every section ends, and so does the wait.
use crate::sleep::{wait, wake_all};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use pagemill_core::atomic::AtomicU32;

/// This bit says that sections are held back. The bits below count running sections: no system has that many threads.
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
    /// How often `let_in` ran.
    opened: AtomicU32,
}

impl Sections {
    /// No section is running.
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        Self { count: AtomicU32::new(0), opened: AtomicU32::new(0) }
    }
    /// No section is running.
    #[cfg(loom)]
    pub fn new() -> Self {
        Self { count: AtomicU32::new(0), opened: AtomicU32::new(0) }
    }

    /// Begins a section; sleeps while sections are held back. [`leave`](Self::leave) ends it.
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

    /// Begins a section unless sections are held back. Never waits.
    #[inline]
    pub fn try_enter(&self) -> bool {
        // Acquire as in `enter`.
        self.count.fetch_update(Acquire, Relaxed, |count| (count < HELD).then_some(count + 1)).is_ok()
    }

    /// Ends a section. Never waits, and does not touch this object's memory after the last section's end, when it may be freed.
    #[inline]
    pub fn leave(&self) {
        // Release pairs with the Acquire in `hold_back`.
        if self.count.fetch_sub(1, Release) == HELD + 1 {
            wake_all(&self.count);
        }
    }

    /// Keeps new sections from starting, and returns when the running ones are over. For one thread at a time.
    pub fn hold_back(&self) {
        // Acquire, here and below, pairs with the Release in `leave`.
        let mut count = self.count.fetch_or(HELD, Acquire) | HELD;
        while count != HELD {
            wait(&self.count, count);
            count = self.count.load(Acquire);
        }
    }

    /// Lets sections begin again.
    pub fn let_in(&self) {
        // Release pairs with the Acquire in `enter`.
        self.count.fetch_and(!HELD, Release);
        // Release pairs with the Acquire in `enter_later`.
        self.opened.fetch_add(1, Release);
        // Without checking whether a thread sleeps: the wake-up costs little beside a fork, a pin or the end of an arena.
        wake_all(&self.opened);
    }

    /// To be called in the child of a fork: no section is running, and nothing holds them back.
    pub fn forget_after_fork(&self) {
        self.count.store(0, Release);
    }
}

impl Default for Sections {
    fn default() -> Self {
        Self::new()
    }
}
