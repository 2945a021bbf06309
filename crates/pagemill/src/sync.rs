//! The locks, atomics and threads of the parts that a model checker runs: pools and waits.
//!
//! With `--cfg shuttle` they are those of [shuttle](https://docs.rs/shuttle). Its `park_timeout` never times out, so
//! only a wake-up ends a wait, and a lost wake-up shows as a deadlock.
#[cfg(shuttle)]
pub(crate) use shuttle::{
    sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, fence},
    sync::{Mutex, MutexGuard},
    thread::{Thread, current, park, park_timeout},
};
#[cfg(not(shuttle))]
pub(crate) use std::{
    sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, fence},
    sync::{Mutex, MutexGuard},
    thread::{Thread, current, park, park_timeout},
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
