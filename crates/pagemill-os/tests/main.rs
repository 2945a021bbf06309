//! The tests of `pagemill-os`, on its public interface, in one program.
#[cfg(not(any(loom, miri)))]
#[macro_use]
#[path = "../../../tests/own_process.rs"]
mod own_process;

// Loom's atomics work only inside its models, so under loom only the tests for it are built. Miri maps no files and knows no
// nodes.
#[cfg(not(loom))]
mod drain;
#[cfg(loom)]
mod loom_lists;
#[cfg(loom)]
mod loom_locks;
#[cfg(loom)]
mod loom_ring;
#[cfg(loom)]
mod loom_waits;
// The source files of `pagemill` that `loom_waits` and `loom_ring` include expect it here.
#[cfg(loom)]
use loom_waits::sync;
#[cfg(not(any(loom, miri)))]
mod memory;
#[cfg(not(any(loom, miri)))]
mod numa;
#[cfg(not(loom))]
mod stack;
