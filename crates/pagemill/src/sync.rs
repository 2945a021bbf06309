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
