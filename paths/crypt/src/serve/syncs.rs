//! One sync of a disk at a time.
//!
//! The system reports a failed write-back to one sync only. The next sync succeeds, and one thread may see that success
//! before another thread sees the failure. So a sync begins only when the one before is over and its failure, if any,
//! is noted (D1 in `disk`). A thread that must not block is woken when it may try again.
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Whether a sync is under way, and which threads wait.
#[derive(Debug, Default)]
pub(super) struct Syncs {
    state: Mutex<State>,
    over: Condvar,
}

#[derive(Debug, Default)]
struct State {
    is_taken: bool,
    /// Events of threads that do not block, which wake them.
    waiting: Vec<Arc<OwnedFd>>,
}

/// The right to sync, until it is dropped.
#[derive(Debug)]
pub(super) struct Turn(Arc<Syncs>);

impl Syncs {
    /// No code panics while it holds the lock.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no other sync is under way.
    pub(super) fn wait(self: &Arc<Self>) -> Turn {
        let state = self.over.wait_while(self.state(), |state| state.is_taken);
        state.unwrap_or_else(PoisonError::into_inner).is_taken = true;
        Turn(Arc::clone(self))
    }

    /// `None` while another sync is under way; then `wake` is raised when that is over.
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
            // If the counter is full, its thread is awake anyway.
            let _ = rustix::io::write(&wake, &1u64.to_ne_bytes());
        }
        self.0.over.notify_one();
    }
}
