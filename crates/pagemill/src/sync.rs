//! The locks, atomics and threads of the parts that a model checker runs: pools, waits and the page cache.
//!
//! With `--cfg shuttle` they are those of [shuttle](https://docs.rs/shuttle). Its `park_timeout` never times out, so
//! only a wake-up ends a wait, and a lost wake-up shows as a deadlock. Its threads share one thread of the system's, so
//! a variable that each of them has is declared by the `thread_local` of this module.
#[cfg(shuttle)]
pub(crate) use shuttle::{
    sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, fence},
    sync::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard},
    thread::{Thread, current, park, park_timeout},
    thread_local,
};
#[cfg(not(shuttle))]
pub(crate) use std::{
    sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, fence},
    sync::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard},
    thread::{Thread, current, park, park_timeout},
    thread_local,
};

pub(crate) use crate::process::{NoFork, Stamp, no_fork};
use core::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Calls code of the program on a thread of ours. Its panic has been reported already, and does not end the thread. Nor
/// does the drop of what it panicked with, which may panic too.
pub(crate) fn survive<T>(work: impl FnOnce() -> T) -> Option<T> {
    let payload = match catch_unwind(AssertUnwindSafe(work)) {
        Ok(done) => return Some(done),
        Err(payload) => payload,
    };
    if let Err(again) = catch_unwind(AssertUnwindSafe(|| drop(payload)))
        && !(again.is::<&str>() || again.is::<String>())
    {
        mem::forget(again); // Its drop may bring the like for ever.
    }
    None
}

/// Lets other threads run, at turn 0, 1, and so on of waiting for one of them: at once at first, then for 50 us.
#[cfg(not(shuttle))]
pub(crate) fn let_others_on(turn: u32) {
    const AT_ONCE: u32 = 32;
    match turn {
        0..AT_ONCE => std::thread::yield_now(),
        _ => std::thread::sleep(core::time::Duration::from_micros(50)),
    }
}

/// A model has no time.
#[cfg(shuttle)]
pub(crate) fn let_others_on(_turn: u32) {
    shuttle::thread::yield_now();
}

/// A cell that one thread at a time has. Models have loom's, which checks that.
#[derive(Debug)]
pub(crate) struct UnsafeCell<T>(core::cell::UnsafeCell<T>);

impl<T> UnsafeCell<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(core::cell::UnsafeCell::new(value))
    }
    #[inline]
    pub(crate) fn with_mut<R>(&self, change: impl FnOnce(*mut T) -> R) -> R {
        change(self.0.get())
    }
}
