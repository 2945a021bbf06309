//! Sleeping until a folio's word changes: readers of a page that is being read, writers of one that is locked.
//!
//! Threads sleep in one of a few rows, which the folio's number chooses. A thread sets `WAITERS` in the word under the
//! lock of its row, and looks again before it sleeps. Whoever makes the change that it waits for clears `WAITERS` by
//! the same step or later, and if it was set wakes the row under the same lock. So no thread sleeps over its change.
use super::folio::{Folio, Number, State, WAITERS};
use crate::sync::{Condvar, Mutex, MutexGuard};
use core::time::Duration;
use std::sync::PoisonError;

/// The transfers of a cache that are under way, and threads that have taken room for pages and not put them into their
/// places yet. A thread that lacks room waits for the next one to end.
#[derive(Default)]
pub(super) struct UnderWay {
    counts: Mutex<(u64, u64)>,
    ended: Condvar,
}

impl UnderWay {
    fn counts(&self) -> MutexGuard<'_, (u64, u64)> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
    pub(super) fn begin(&self) {
        self.counts().0 += 1;
    }
    pub(super) fn end(&self) {
        self.counts().1 += 1;
        self.ended.notify_all();
    }
    /// How many have ended.
    pub(super) fn ended(&self) -> u64 {
        self.counts().1
    }
    /// Sleeps until more than `before` have ended, but not if none is under way, and no longer than `patience`.
    pub(super) fn wait_for_another(&self, before: u64, patience: Duration) -> Waited {
        let mut counts = self.counts();
        while counts.1 == before {
            if counts.0 == counts.1 {
                return Waited::NoneUnderWay;
            }
            let (back, over) = self.ended.wait_timeout(counts, patience).unwrap_or_else(PoisonError::into_inner);
            counts = back;
            if over.timed_out() && counts.1 == before {
                return Waited::TooLong;
            }
        }
        Waited::Ended
    }
}

/// How a wait for a transfer ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Waited {
    Ended,
    NoneUnderWay,
    TooLong,
}

/// Threads that wait for different folios seldom share a row.
const ROWS: usize = if cfg!(any(loom, shuttle)) { 2 } else { 64 };

pub(super) struct Waits {
    rows: Box<[(Mutex<()>, Condvar)]>,
}

impl Waits {
    pub(super) fn new() -> Self {
        Self { rows: (0..ROWS).map(|_| (Mutex::new(()), Condvar::new())).collect() }
    }

    /// Sleeps until the word is as `is_over` wants it, and returns it. The caller has pinned the folio.
    pub(super) fn wait(&self, number: Number, folio: &Folio, is_over: impl Fn(State) -> bool) -> State {
        let (lock, changed) = &self.rows[number.get() as usize % ROWS];
        let mut held = lock.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let state = folio.set(WAITERS);
            if is_over(state) {
                // `WAITERS` stays: others may sleep for another change. At worst somebody wakes nobody.
                return state;
            }
            held = changed.wait(held).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Wakes those who wait for a folio, after its word was changed; `before` is the word before the change.
    #[inline]
    pub(super) fn wake(&self, number: Number, folio: &Folio, before: State) {
        if before.has(WAITERS) {
            self.wake_row(number, folio);
        }
    }
    #[cold]
    fn wake_row(&self, number: Number, folio: &Folio) {
        let (lock, changed) = &self.rows[number.get() as usize % ROWS];
        let held = lock.lock().unwrap_or_else(PoisonError::into_inner);
        folio.clear(WAITERS);
        changed.notify_all();
        drop(held);
    }
}
