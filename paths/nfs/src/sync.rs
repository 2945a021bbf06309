//! Locks whose state is whole between any two statements, so that a panic of another thread leaves nothing half done.
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Takes a lock.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for a change of what a lock protects.
pub(crate) fn wait<'a, T>(change: &Condvar, locked: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    change.wait(locked).unwrap_or_else(PoisonError::into_inner)
}
