//! The first thing that is found wrong, noted by whoever finds it: a thread, a signal handler, or the allocator's hook.
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU32, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::sync::{Mutex, PoisonError};

use pagemill_model::Breach;

const NOTHING: u32 = 0;
const WRITING: u32 = 1;
const FOUND: u32 = 2;

/// See the [module](self).
pub(super) struct Found {
    state: AtomicU32,
    breach: UnsafeCell<Option<Breach>>,
    said: Mutex<Option<String>>,
}

// SAFETY: `breach` is written by whoever moved `state` from NOTHING to WRITING, once, and read after FOUND.
unsafe impl Sync for Found {}

impl Found {
    pub(super) const fn new() -> Self {
        Self { state: AtomicU32::new(NOTHING), breach: UnsafeCell::new(None), said: Mutex::new(None) }
    }

    /// Notes a breach, without a lock: also in a signal handler.
    pub(super) fn note(&self, breach: Breach) {
        if self.state.compare_exchange(NOTHING, WRITING, Relaxed, Relaxed).is_ok() {
            // SAFETY: only one gets here, and nobody reads before FOUND.
            unsafe { *self.breach.get() = Some(breach) };
            // Release pairs with the Acquire in `first`.
            self.state.store(FOUND, Release);
        }
    }

    /// Notes what a thread says. Not in a signal handler.
    pub(super) fn say(&self, what: String) {
        self.said.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(what);
    }

    /// What was found first, if something was.
    pub(super) fn first(&self) -> Option<String> {
        // Acquire pairs with the Release in `note`.
        if self.state.load(Acquire) == FOUND {
            // SAFETY: written before FOUND, and never again.
            return unsafe { *self.breach.get() }.map(|breach| breach.to_string());
        }
        self.said.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
