//! One sync of a disk at a time.
//!
//! The system tells of what it could not write back to one sync. The next one succeeds, and its success may be seen by a
//! thread before the failure is seen by another. So a sync begins when the one before it is over and its failure, if it had
//! one, is noted (D1 in `disk`). A thread that must not wait is woken when it may try again.
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Whether one is under way, and who waits.
#[derive(Debug, Default)]
pub(super) struct Syncs {
    state: Mutex<State>,
    over: Condvar,
}

#[derive(Debug, Default)]
struct State {
    is_taken: bool,
    /// Of those that do not wait themselves: what wakes them.
    waiting: Vec<Arc<OwnedFd>>,
}

/// The right to sync, until it is dropped.
#[derive(Debug)]
pub(super) struct Turn(Arc<Syncs>);

impl Syncs {
    /// Nothing that is done with the lock held can panic.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no other is under way.
    pub(super) fn wait(self: &Arc<Self>) -> Turn {
        let state = self.over.wait_while(self.state(), |state| state.is_taken);
        state.unwrap_or_else(PoisonError::into_inner).is_taken = true;
        Turn(Arc::clone(self))
    }

    /// None while another is under way; the event `wake` is then raised when that is over.
    pub(super) fn try_begin(self: &Arc<Self>, wake: &Arc<OwnedFd>) -> Option<Turn> {
        let mut state = self.state();
        if !std::mem::replace(&mut state.is_taken, true) {
            return Some(Turn(Arc::clone(self)));
        }
        if !state.waiting.iter().any(|waiting| Arc::ptr_eq(waiting, wake)) {
            state.waiting.push(Arc::clone(wake));
        }
        None
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.is_taken = false;
        for wake in state.waiting.drain(..) {
            // Full means that its thread is going to look anyhow.
            let _ = rustix::io::write(&wake, &1u64.to_ne_bytes());
        }
        self.0.over.notify_one();
    }
}
