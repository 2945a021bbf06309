//! Which service threads wait for events. There are more threads than CPUs, because procedures wait for disks. If all of them
//! waited for events, then each event of a burst would wake another one, where a thread that is about to finish could serve it
//! without any thread being woken.
//!
//! So a thread is *active* while it waits for events, or serves requests that are quick as a rule. There are about as many
//! active threads as CPUs. A thread leaves before it serves a request that may wait, and joins again afterwards; those that find
//! no place are in reserve.
//!
//! # Invariants
//! - W1 `active` is at most `most`.
//! - W2 If no thread waits for events, then `most` are active, or none is in reserve, or the one that left last is about to wake
//!   one: a thread that takes an event looks at `active` after it is no longer `polling`, and one that leaves looks at `polling`
//!   after it is no longer `active`. Both are `SeqCst`, so of two threads that do it at once one sees what the other did.
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Condvar, Mutex};

use super::lock;
use crate::sync::wait;

pub(super) struct Crew {
    most: usize,
    polling: AtomicUsize,
    /// Changed under the lock alone.
    active: AtomicUsize,
    reserve: Mutex<Reserve>,
    change: Condvar,
}

#[derive(Default)]
struct Reserve {
    waiting: usize,
    /// Threads in reserve that have been made active, and do not know it yet.
    called: usize,
    is_over: bool,
}

/// A thread's place among the active ones.
#[must_use = "it is for `leave`"]
pub(super) struct Place(());

impl Crew {
    pub(super) fn new(most: usize) -> Self {
        Self {
            most,
            polling: AtomicUsize::new(0),
            active: AtomicUsize::new(0),
            reserve: Mutex::default(),
            change: Condvar::new(),
        }
    }
    /// Waits for a place. `None`: the server stops.
    pub(super) fn join(&self) -> Option<Place> {
        let mut reserve = lock(&self.reserve);
        if reserve.is_over {
            return None;
        }
        if self.active.load(SeqCst) < self.most {
            self.active.fetch_add(1, SeqCst);
            return Some(Place(()));
        }
        reserve.waiting += 1;
        while reserve.called == 0 && !reserve.is_over {
            reserve = wait(&self.change, reserve);
        }
        if reserve.is_over {
            return None;
        }
        reserve.called -= 1;
        Some(Place(()))
    }
    /// Leaves for what may take long.
    pub(super) fn leave(&self, place: Place) {
        let Place(()) = place;
        let reserve = lock(&self.reserve);
        self.active.fetch_sub(1, SeqCst);
        drop(reserve);
        if self.polling.load(SeqCst) == 0 {
            self.call();
        }
    }
    /// Waits for an event.
    pub(super) fn poll<T>(&self, _: &Place, wait: impl FnOnce() -> T) -> T {
        self.polling.fetch_add(1, SeqCst);
        let event = wait();
        let was_last = self.polling.fetch_sub(1, SeqCst) == 1;
        if was_last && self.active.load(SeqCst) < self.most {
            self.call();
        }
        event
    }
    /// Makes a thread of the reserve active, if there is a place and a thread.
    fn call(&self) {
        let mut reserve = lock(&self.reserve);
        if reserve.waiting > 0 && self.active.load(SeqCst) < self.most {
            reserve.waiting -= 1;
            reserve.called += 1;
            self.active.fetch_add(1, SeqCst);
            self.change.notify_one();
        }
    }
    /// Ends all waits in reserve.
    pub(super) fn stop(&self) {
        lock(&self.reserve).is_over = true;
        self.change.notify_all();
    }
}
