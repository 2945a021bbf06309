//! The tests of `pagemill` by its public interface: one program, since linking one for each file takes longer than running
//! them. Plain `cargo test` runs them as threads of one process; see `own_process.rs`.
#[cfg(not(any(miri, shuttle, feature = "trace")))]
#[macro_use]
#[path = "../../../tests/own_process.rs"]
mod own_process;

/// `cfg-if`'s, as far as it is needed here. rustfmt knows it by name, and formats the files that it names.
macro_rules! cfg_if {
    (if #[cfg($this:meta)] { $($here:item)* } else { $($else:item)* }) => {
        $(#[cfg($this)] $here)*
        $(#[cfg(not($this))] $else)*
    };
}

// A model checker's atomics work in its models alone, and miri starts no process, maps no file and takes its time: each has
// tests that are made for it. With the trace on there is one test to run, and the others have run without it.
cfg_if! {
    if #[cfg(any(miri, shuttle, feature = "trace"))] {
        #[cfg(feature = "trace")]
        mod one_page;
        #[cfg(miri)]
        mod miri_dma_pool;
        #[cfg(miri)]
        mod miri_ends;
        #[cfg(miri)]
        mod miri_page_pool;
        #[cfg(miri)]
        mod miri_portable;
        #[cfg(shuttle)]
        mod shuttle_mempool;
        #[cfg(shuttle)]
        mod shuttle_page_cache;
    } else {
        mod common;

        mod accounts;
        mod async_waits;
        mod buf_ring;
        mod close;
        mod contig;
        #[cfg(feature = "cuda")]
        mod device_cuda;
        mod device_rings;
        mod device_vfio;
        mod depot;
        mod devices;
        mod dma_pool;
        mod drain;
        mod ecosystem;
        mod ends;
        mod fork_and_locks;
        mod forms;
        mod give_back;
        mod list_policy;
        mod memory;
        mod mempool;
        mod miri_dma_pool;
        mod miri_ends;
        mod miri_page_pool;
        mod miri_portable;
        mod mixed_kinds;
        mod model;
        mod model_nodes;
        mod nodes;
        mod page_cache;
        mod page_cache_adversary;
        mod page_cache_contents;
        mod page_cache_pages;
        mod page_cache_sharing;
        mod page_pool;
        mod placement;
        mod pooled;
        mod pressure;
        mod races;
        mod refused;
        #[cfg(any(feature = "compio", feature = "monoio", feature = "tokio-uring"))]
        mod runtimes;
        mod sandbox;
        mod shortfalls;
        mod shrinkers;
        mod signals;
        mod stack;
        mod waits;
        mod waits_and_lists;

        // Without frame states no child of a fork goes on, and no misuse is seen.
        mod fork;
        mod fork_short;
        mod in_motion;
        mod memory_limit;
        mod misuse;
    }
}
