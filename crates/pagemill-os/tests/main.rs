//! The tests of `pagemill-os` by its public interface, in one program.
#[cfg(not(any(loom, miri)))]
#[macro_use]
#[path = "../../../tests/own_process.rs"]
mod own_process;

// Loom's atomics work in its models alone: there are tests for it, and no others. Miri maps no files and knows no nodes.
#[cfg(not(loom))]
mod drain;
#[cfg(loom)]
mod loom_lists;
#[cfg(loom)]
mod loom_locks;
#[cfg(loom)]
mod loom_waits;
// Where the file of `pagemill` looks for it that `loom_waits` tries.
#[cfg(loom)]
use loom_waits::sync;
#[cfg(not(any(loom, miri)))]
mod memory;
#[cfg(not(any(loom, miri)))]
mod numa;
#[cfg(not(loom))]
mod stack;
