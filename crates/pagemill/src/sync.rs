//! Locks, atomics and threads of those parts that a model checker drives: pools and their waits. Built with `--cfg shuttle`
//! they are [shuttle](https://docs.rs/shuttle)'s, where `park_timeout` never times out, so that nothing but a wake-up ends
//! a wait, and one that is lost is found.
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
