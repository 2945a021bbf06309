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
mod loom_page_cache_folio;
#[cfg(loom)]
mod loom_page_cache_index;
#[cfg(loom)]
mod loom_page_pool;
#[cfg(loom)]
mod loom_ring;
#[cfg(loom)]
mod loom_waits;
// The source files of `pagemill` that models include expect these here.
#[cfg(loom)]
use loom_page_pool::{handle, mempool};
#[cfg(loom)]
use loom_waits::sync;
#[cfg(not(any(loom, miri)))]
mod memory;
#[cfg(not(any(loom, miri)))]
mod numa;
#[cfg(not(loom))]
mod stack;
