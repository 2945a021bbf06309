//! A lock of one word, whose waiters sleep where there is a system to sleep in.
//!
//! A thread that spins for a lock, or yields, keeps a holder of lower priority on its own CPU from ever releasing it. So a waiter looks
//! a few dozen times and then sleeps, in a way that the user of this crate injects ([`Sleep`]).
//!
//! # Invariants
//! - K1 At most one thread is between a `take` (or a `try_take` that returned true) and the `release`.
//! - K2 While a thread sleeps, the word is `AWAITED`, or a thread that was woken is about to set it to that. Each release of an
//!   `AWAITED` lock wakes one thread, which sets `AWAITED` again, whether or not others still sleep. So no wake-up is lost.
use crate::sync::{AtomicU32, Ordering, spin_wait};
use Ordering::{Acquire, Relaxed, Release};

/// How a thread sleeps until another one changes a word.
#[derive(Clone, Copy, Debug)]
pub struct Sleep {
    /// Sleeps if the word still has this value, until it is woken. May return at any time, for no reason.
    pub wait: fn(&AtomicU32, u32),
    /// Wakes one thread that sleeps on the word; safe in a signal handler.
    pub wake: fn(&AtomicU32),
}

impl Sleep {
    /// Spins instead of sleeping: for a system with nothing below this crate, where each holder has a CPU of its own.
    pub const SPIN: Self = Self { wait: |_, _| spin_wait(), wake: |_| {} };
}

const FREE: u32 = 0;
const HELD: u32 = 1;
/// Held, and a thread may be asleep.
const AWAITED: u32 = 2;

/// Turns before a waiter sleeps: about as long as a short section takes on another CPU.
const TURNS: u32 = if cfg!(loom) { 0 } else { 40 };

/// A lock. Zeroed memory is a free one. Taking and releasing are one atomic operation each while no thread waits.
///
/// ```
/// use pagemill_core::{Lock, Sleep};
/// let lock = Lock::new();
/// lock.take(Sleep::SPIN);
/// assert!(!lock.try_take());
/// lock.release(Sleep::SPIN);
/// assert!(lock.try_take());
/// ```
#[repr(transparent)]
#[derive(Debug)]
pub struct Lock(AtomicU32);

impl Lock {
    /// A free lock.
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        Self(AtomicU32::new(FREE))
    }
    /// A free lock.
    #[cfg(loom)]
    pub fn new() -> Self {
        Self(AtomicU32::new(FREE))
    }

    /// Takes it if it is free. It never waits, so a signal handler may call this.
    #[inline]
    pub fn try_take(&self) -> bool {
        // Acquire pairs with the Release in `release`: the last holder's writes are visible.
        self.0.compare_exchange(FREE, HELD, Acquire, Relaxed).is_ok()
    }

    /// Takes it, once its holder has released it.
    #[inline]
    pub fn take(&self, sleep: Sleep) {
        if !self.try_take() {
            self.take_slowly(sleep);
        }
    }

    #[cold]
    fn take_slowly(&self, sleep: Sleep) {
        for _ in 0..TURNS {
            spin_wait();
            if self.0.load(Relaxed) == FREE && self.try_take() {
                return;
            }
        }
        // Acquire as in `try_take`.
        while self.0.swap(AWAITED, Acquire) != FREE {
            (sleep.wait)(&self.0, AWAITED);
        }
    }

    /// Releases it. The word is not touched after that: the thread that takes the lock next may free its memory.
    #[inline]
    pub fn release(&self, sleep: Sleep) {
        // Release pairs with the Acquire in `try_take` and `take_slowly`.
        if self.0.swap(FREE, Release) == AWAITED {
            (sleep.wake)(&self.0);
        }
    }

    /// In the child of a fork: frees it. Its holder and its waiters do not exist there.
    pub fn free_after_fork(&self) {
        self.0.store(FREE, Release);
    }
}

impl Default for Lock {
    fn default() -> Self {
        Self::new()
    }
}
