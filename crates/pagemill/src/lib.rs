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
//! [`Bulk`]); an empty list gets a batch from the zone, and the zone takes it from the pageblock that the CPU is
//! bound to. Going back, it returns to the list of the CPU that frees it, and from a full list to the zone.
//!
//! # What the memory of this crate is for
//! For each page: 1.1 bits for free and used, 1 byte of state (misuse detection), 4 bytes of list link; all of it
//! outside of the pages and committed when first touched.
//!
//! # Interrupted callers
//! A signal handler may allocate single pages and bulk requests of order 0 with [`Gfp::NOWAIT`] or [`Gfp::ATOMIC`],
//! and free (C2.5).
#![warn(missing_docs)]

mod account;
mod allocator;
mod arena;
mod builder;
mod bulk;
mod fault;
mod fork;
mod free;
mod handle;
mod list;
mod memory;
mod misuse;
mod nodes;
mod path;
mod reclaim;
mod registry;
mod run;
mod seeing;
mod slow;
mod stats;
mod wait;

pub use account::Account;
pub use allocator::{Allocator, StillOut, self_test};
pub use builder::Builder;
pub use bulk::{Bulk, Delivered, Filled, Shortfall};
pub use fault::Faults;
pub use free::{free_pages_bulk_raw, free_raw};
pub use handle::{Block, Owned, Page, Pages, free_pages_bulk};
pub use list::{BlockList, List, PageList};
pub use memory::{ArenaId, Memory};
pub use misuse::on_misuse;
pub use pagemill_core::{
    BuddyInfo, CpuId, Error, Exhausted, Gfp, Invalid, Misuse, MisuseKind, Mobility, NodeId, NodeMask, Order, PAGE_SIZE,
    PageCount, Pfn, Policy, Watermarks, ZoneKind,
};
pub use pagemill_sys::{Backend, restarts};
pub use reclaim::{Registered, Shrink, Shrinker, ShrinkerDoes};
pub use run::Run;
pub use seeing::{FIGURES, Figure, FigureKind, Sample, Snapshot, prometheus};
#[cfg(feature = "top")]
pub use seeing::{StatsServer, serve_stats};
#[cfg(feature = "metrics")]
pub use seeing::{describe_metrics, record_metrics};
pub use stats::{BuddyDump, Census, Stats, VmStat, ZoneInfo};
pub use wait::Cancel;
