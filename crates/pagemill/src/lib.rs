//! Pages in bulk: the Linux kernel's bulk page allocators as a library.
//!
//! A program that needs hundreds of aligned pages an operation asks for them in one call, and gives them back in one:
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
//! // A list; all of it or nothing.
//! let mut list = PageList::new();
//! pages.alloc_pages_bulk_list(Bulk::exact(256), &mut list)?;
//! # Ok::<(), pagemill::Error>(())
//! ```
//!
//! # The way of a request
//! A page comes from the CPU's list if it has one ([`alloc_page`](Allocator::alloc_page), the forms in
//! [`Bulk`]); an empty list gets a batch from a depot or from the zone, and the zone takes it from the pageblock that the CPU is
//! bound to. Going back, it returns to the list of the CPU that frees it, and from a full list to a depot
//! if another CPU asked for pages last, else to the zone.
//!
//! # When memory is short
//! An arena without [`Watermarks`] gives all it has. A request that may wait ([`Gfp::KERNEL`], `NOIO`, `NOFS`) asks each
//! registered [`Shrinker`] for pages; with [`Bulk::timeout`] it then waits that long for some to come back, with
//! [`Gfp::NOFAIL`] for ever, and a [`Cancel`] ends it. What comes back short says why: [`Why`]. A program that needs
//! memory in order to free memory, as a disk's driver does, keeps enough for one operation in a [`Mempool`]. [`Faults`] try what
//! a program does then.
//!
//! # What the memory of this crate is for
//! For each page: 1.1 bits for free and used, 1 byte of state (misuse detection), 4 bytes of list link; for each arena and
//! CPU that there may be 32 KiB of lists, and 64 KiB of depots between them. All of it lies outside of the pages and is committed when first touched: a CPU
//! that no thread runs on costs address space.
//!
//! # Features
//! All are off unless said.
//! - `cuda`: `Cuda`, by which a GPU reaches memory; the driver is loaded when it is asked for.
//! - `full-states`: what a handle owns is marked too, as in debug builds: two stores a page, which show a fault of Pagemill's own
//!   that hands a page out twice. Misuse of raw pointers is detected without it (C2.4).
//! - `trace`: records the steps of a request, for Pagemill's own tests.
//!
//! # Interrupted callers
//! A signal handler may allocate single pages and bulk requests of order 0 with [`Gfp::NOWAIT`] or [`Gfp::ATOMIC`],
//! and free (C2.5). In an optimised build for x86-64 that takes at most 2 KiB of stack for a page and 4 KiB for 64 in bulk,
//! allocated or freed. The system's own frame for the signal comes on top (`sysconf(_SC_MINSIGSTKSZ)`); more pages at once
//! take more.
#![warn(missing_docs)]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

/// What the front page says of lists.
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
mod list;
mod memory;
mod mempool;
mod misuse;
mod path;
#[cfg(all(test, not(any(miri, shuttle))))]
#[path = "../../../tests/patience.rs"]
mod patience;
mod populate;
mod process;
mod reclaim;
mod registry;
mod run;
mod shared;
mod shutting;
mod slow;
mod stats;
mod sync;
mod topology;
mod wait;
mod walk;
mod weak;
mod word;
mod zone;
mod zones;

pub use account::Account;
pub use allocator::{Allocator, StillOut, self_test};
pub use arenas::{ArenaId, ArenaInfo};
pub use background::Registered;
pub use build_error::BuildError;
pub use builder::Builder;
pub use bulk::{AtLeast, Bulk, Delivered, Exact, Filled, UpTo};
#[cfg(feature = "cuda")]
pub use device::Cuda;
pub use device::{Device, DeviceAddr, DeviceError, DeviceMap, FixedBuffers, Identity, Mapped, Physical, Umem, VfioMap};
pub use dma_pool::{BlocksOut, DmaBlock, DmaPool, DmaPoolStats};
pub use error::{Error, InvalidRequest};
pub use fault::Faults;
pub use free::{free_pages_bulk_raw, free_raw};
pub use handle::{Block, Owned, Page, Pages, free_pages_bulk};
pub use list::{BlockList, List, PageList};
pub use memory::Memory;
pub use mempool::{ElementsOut, Mempool, MempoolStats, PageSource, Pair, Source};
pub use misuse::{foreign_frees, on_misuse};
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
