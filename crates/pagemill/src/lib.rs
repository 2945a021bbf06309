//! Pages in bulk: the Linux kernel's bulk page allocators as a library.
//!
//! A program that needs hundreds of aligned pages for each operation allocates them in one call and frees them in one:
//!
//! ```
//! use pagemill::{Allocator, Bulk, Gfp, Page, PageList, free_pages_bulk};
//!
//! let pages = Allocator::global();
//!
//! // One page. It is freed when it is dropped.
//! let mut page = pages.alloc_page(Gfp::KERNEL)?;
//! page[..5].copy_from_slice(b"hello");
//!
//! // An array with holes: only the empty slots are filled.
//! let mut slots: [Option<Page>; 64] = [const { None }; 64];
//! slots[7] = Some(page);
//! let filled = pages.alloc_pages_bulk_array(Bulk::up_to(64), &mut slots)?;
//! assert_eq!((filled.added, filled.occupied), (63, 64));
//! assert_eq!(free_pages_bulk(&mut slots), 64);
//!
//! // A list. This request is served in full or not at all.
//! let mut list = PageList::new();
//! pages.alloc_pages_bulk_list(Bulk::exact(256), &mut list)?;
//! # Ok::<(), pagemill::Error>(())
//! ```
//!
//! # How a request is served
//! A request takes pages from the list of the CPU that it runs on ([`alloc_page`](Allocator::alloc_page), and the forms
//! in [`Bulk`]). An empty list is refilled with a batch, from a depot or from the zone; the zone takes the batch from
//! the pageblock that it has bound to this CPU. A freed page goes to the list of the CPU that frees it. From a full
//! list, pages move to a depot if another CPU asked for pages last, and to the zone otherwise.
//!
//! # Calls that sleep
//! A request sleeps only if its flags say that it may: [`Gfp::KERNEL`] (the default), `NOIO` or
//! `NOFS`. It sleeps only where too little is free, and then only if a shrinker is registered, another request waits for
//! the same, or it has a timeout or [`Gfp::NOFAIL`]. [`Gfp::NOWAIT`] and [`Gfp::ATOMIC`] never sleep: on a thread that
//! serves many connections ask with one of these, or await the request: [`Allocator::alloc_bulk_async`] and
//! [`Mempool::take_async`] wait in the same lines, on any executor, without putting the thread to sleep. A deadline is then
//! the runtime's timeout around the future, which gives back everything when it is dropped. No poll calls a shrinker:
//! background reclaim or [`Allocator::reclaim_step`] does. `Mempool` sleeps where its reserve is empty, under the same
//! flags. Frees never sleep. Building an allocator, `add_memory`, `retire`, `drain` and `validate` may wait for locks.
//!
//! # When memory is short
//! An arena without [`Watermarks`] can be used up to its last page. A request that may wait ([`Gfp::KERNEL`], `NOIO`,
//! `NOFS`) first asks each registered [`Shrinker`] to free pages, and may wait a fraction of a second; with [`Bulk::timeout`] it waits
//! until the timeout ends, with [`Gfp::NOFAIL`] for as long as it takes; a [`Cancel`] ends either wait. A request that
//! delivers less than it was asked for gives the reason: [`Why`]. A program that needs memory in order to free memory,
//! such as a disk driver, keeps enough for one operation in a [`Mempool`]. [`Faults`] make requests fail on purpose, so
//! that a program's handling of short memory can be tested.
//!
//! # Files
//! A [`PageCache`] keeps pages of files ([`CachedFile`]), with a limit of its own and, by `O_DIRECT`, past the system's cache:
//! for servers of files, volumes or objects. It reads ahead from any [`Backing`], writes back, and lends pages ([`Lent`])
//! that a socket sends without a copy. Memory that is short elsewhere comes from it: it is a [`Shrinker`].
//!
//! # Programs to start from
//! In the folder `examples` of this crate, each run by `cargo run --release -p pagemill --example NAME`:
//! - `hello`, `array_with_holes`, `callback_iovec`, `runs`: the forms of a request.
//! - `uring_server`: an echo server over io_uring with thousands of connections in 400 pages. It receives into a
//!   [`BufRing`], sends from [`FixedBuffers`], and stops reading at the low watermark.
//! - `cache`: a cache that threads share, as large as memory allows, with a [`Shrinker`].
//! - `kv_blocks`: blocks of a language model's cache, shared by sequences and swapped out under pressure.
//! - `pressure`, `mempool`: watermarks, waiting, faults on purpose, and a reserve.
//!
//! The longer ones can be read at [`programs`].
//!
//! # Memory overhead
//! Each page costs 1.1 bits for its free state, 1 byte to detect misuse, and 4 bytes of list link. Each arena costs 32
//! KiB of lists for each possible CPU and 64 KiB of depots between CPUs. All of it lies outside the pages and is
//! committed on first touch: a CPU on which no thread runs costs only address space.
//!
//! # Features
//! All features are off by default.
//! - `bytes`: `From` of [`Page`], [`Block`] and [`Run`] for `bytes::Bytes`, without a copy.
//! - `compio`, `monoio`, `tokio-uring`: [`Page`], [`Block`], [`Run`] and [`Pooled`] as buffers of that runtime (its `IoBuf`
//!   and `IoBufMut`). With `compio`, [`Allocator`] is a `compio_driver::BufferAllocator`.
//! - `cuda`: the type `Cuda`, which maps memory for a GPU. The driver is loaded when the map is created.
//! - `full-states`: also marks each page that a handle owns, as in debug builds. It costs two stores a page, and detects
//!   a bug in Pagemill itself that hands one page out twice. Misuse of raw pointers is detected without this feature
//!   (C2.4).
//! - `object_store`: the type `ObjectBacking`, with which a page cache reads objects of a store (S3, HTTP and others). Its
//!   tokio runtime is the program's.
//! - `trace`: records the steps of a request, for Pagemill's own tests.
//! - `uring`: a [`FileBacking`] transfers through an io_uring: its function `with_ring`.
//!
//! # Signal handlers
//! A signal handler may allocate single pages, make bulk requests of order 0 with [`Gfp::NOWAIT`] or [`Gfp::ATOMIC`],
//! and free (C2.5). In an optimised build for x86-64, a single page takes at most 2 KiB of stack and a bulk call for 64
//! pages at most 4 KiB, for allocating and for freeing. Larger bulk calls take more. The system's own signal frame
//! (`sysconf(_SC_MINSIGSTKSZ)`) comes on top.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![warn(missing_docs)]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

/// The front page says that lists take 32 KiB.
const _: () = assert!(size_of::<pagemill_os::lists::CpuLists>() == 32 << 10);

mod account;
mod allocator;

mod arenas;
mod background;
mod build_error;
mod builder;
mod bulk;
mod claim;
mod claims;
mod context;
mod device;
mod dma_pool;
mod error;
mod fault;
#[cfg(all(test, not(any(miri, shuttle))))]
#[path = "../../../tests/fifo.rs"]
mod fifo;
mod free;
mod give_back;
mod handle;
mod idle;
mod in_flight;
mod list;
mod memory;
mod mempool;
mod misuse;
mod page_cache;
mod page_pool;
mod path;
#[cfg(all(test, not(any(miri, shuttle))))]
#[path = "../../../tests/patience.rs"]
mod patience;
mod populate;
mod process;
mod reclaim;
mod registry;
mod run;
#[cfg(any(feature = "compio", feature = "monoio", feature = "tokio-uring"))]
mod runtimes;
mod shared;
mod shutting;
mod slow;
mod stats;
mod sync;
mod tasks;
mod topology;
mod wait;
mod walk;
mod weak;
mod word;
mod zone;
mod zones;

/// The longer programs of the folder `examples`, to read.
#[cfg(all(doc, not(doctest)))]
pub mod programs {
    #[doc = concat!("```ignore\n", include_str!("../examples/uring_server.rs"), "```")]
    pub mod uring_server {}

    #[doc = concat!("```ignore\n", include_str!("../examples/cache.rs"), "```")]
    pub mod cache {}

    #[doc = concat!("```ignore\n", include_str!("../examples/kv_blocks.rs"), "```")]
    pub mod kv_blocks {}
}

pub use account::Account;
pub use allocator::{Allocator, StillOut, self_test};
pub use arenas::{ArenaId, ArenaInfo};
pub use background::Registered;
pub use build_error::BuildError;
pub use builder::Builder;
pub use bulk::{AtLeast, Bulk, Delivered, Exact, Filled, UpTo};
#[cfg(feature = "cuda")]
pub use device::Cuda;
pub use device::{
    BufRing, Device, DeviceAddr, DeviceError, DeviceMap, FixedBuffers, Identity, Mapped, Physical, Piece, Umem, VfioMap,
};
pub use dma_pool::{BlocksOut, DmaBlock, DmaPool, DmaPoolStats, WeakDmaPool};
pub use error::{Error, InvalidRequest};
pub use fault::Faults;
pub use free::{free_pages_bulk_raw, free_raw};
pub use handle::{Block, Owned, Page, Pages, free_pages_bulk};
pub use in_flight::InFlight;
pub use list::{BlockList, List, PageList};
pub use memory::Memory;
pub use mempool::{
    BlockMempool, ElementsOut, Mempool, MempoolStats, PageMempool, PageSource, Pair, PoolRef, Pooled, Source,
};
pub use misuse::{foreign_frees, on_misuse};
#[cfg(feature = "object_store")]
pub use page_cache::ObjectBacking;
pub use page_cache::{
    Advice, Backing, CachedFile, FileBacking, FileOptions, Lent, LentSender, PageCache, PageCacheBuilder,
    PageCacheInfo, PageCacheStats, ReadTransfer, ReadaheadDecision, WriteTransfer, page_caches,
};
pub use page_pool::{Ending, Frag, PagePool, PagePoolHome, PagePoolInfo, PagePoolStats, PoolPage, page_pools};
pub use pagemill_core::{
    BuddyInfo, CpuId, Exhausted, Gfp, Invalid, Misfit, Misuse, MisuseKind, Mobility, NodeId, NodeMask, Order,
    PAGE_SIZE, PageCount, Pfn, Policy, Shortfall, Watermarks, Why, ZoneKind,
};
pub use pagemill_os::{Backend, BackendName, restarts};
pub use populate::Populated;
pub use reclaim::{Shrink, Shrinker, ShrinkerDoes};
pub use run::{Run, free_pages_bulk_runs};
pub use stats::{BuddyDump, Census, CountedBy, Counter, ListInfo, Stats, VmStat, ZoneInfo};
pub use wait::Cancel;
pub use weak::WeakAllocator;
