//! The allocation policy of Pagemill, on frame numbers alone.
//!
//! This crate decides *which* frame: it never touches a page, asks no operating system, allocates nothing and holds
//! no `unsafe`. Its user (the crate `pagemill` in a process, or a kernel) lends it the metadata and
//! turns its numbers into memory.
//!
//! # In a kernel
//!
//! A kernel brings
//! - its **memory map**: any iterator of [`MemoryRange`]s. [`MemoryMap`] makes whole frames of them, whatever the firmware wrote;
//! - **memory for metadata**: 2.1 bits a frame for a [`Buddy`] with holes, which [`MemoryMap::carve`] finds in the map itself. Per-CPU lists
//!   take one bit more, and 6 KiB a CPU;
//! - its **guard**: "nobody else on this CPU" ([`ThisCpu`]).
//!
//! It gets frame numbers: the frame n has the physical address n * 4096. Any CPU and any interrupt may allocate and free. Below, from the
//! table of a real machine to pages on two CPUs:
//!
//! ```
//! use pagemill_core::{
//!     Buddy, BuddyMetadata, CpuId, FrameRange, Lock, MemoryMap, MemoryRange, Misuse, Mobility, Pcp, PcpLists, Pfn, Sleep, ThisCpu,
//!     kept_words_for,
//! };
//! # use pagemill_core::atomic::{AtomicU32, AtomicU64};
//!
//! // The e820 table of QEMU's machine q35 with 4 GiB: start, length, type (1 is usable memory).
//! const E820: [(u64, u64, u32); 10] = [
//!     (0x0000_0000, 0x0009_fc00, 1),
//!     (0x0009_fc00, 0x0000_0400, 2), // the BIOS's data: the usable range before it ends inside a page
//!     (0x000f_0000, 0x0001_0000, 2), // the BIOS
//!     (0x0010_0000, 0x7fed_f000, 1),
//!     (0x7ffd_f000, 0x0002_1000, 2), // ACPI tables
//!     (0xb000_0000, 0x1000_0000, 2), // the configuration space of PCI devices
//!     (0xfed1_c000, 0x0000_4000, 2),
//!     (0xfeff_c000, 0x0000_4000, 2),
//!     (0xfffc_0000, 0x0004_0000, 2),
//!     (0x1_0000_0000, 0x8000_0000, 1),
//! ];
//!
//! /// The guard. A kernel turns interrupts off for the section; a lock that is tried once does as well.
//! struct Cpus([Lock; 2]);
//! impl ThisCpu for Cpus {
//!     fn exclusive<R>(&self, section: impl FnOnce(CpuId) -> R) -> Option<R> {
//!         let cpu = 0; // A kernel asks the processor.
//!         self.0[cpu].try_take().then(|| {
//!             let result = section(CpuId::new(cpu as u32));
//!             self.0[cpu].release(Sleep::SPIN);
//!             result
//!         })
//!     }
//! }
//! type Pages<'m> = Pcp<'m, Cpus, 508>;
//! fn alloc_page(pages: &Pages<'_>) -> Option<Pfn> {
//!     pages.alloc(Mobility::Unmovable, 0)
//! }
//! fn free_page(pages: &Pages<'_>, page: Pfn) -> Result<(), Misuse> {
//!     pages.free(page)
//! }
//!
//! let image = MemoryRange::reserved(0x10_0000, 0x40_0000); // the kernel's own
//! let table = E820.map(|(start, bytes, kind)| MemoryRange { start, bytes, is_usable: kind == 1 }).into_iter().chain([image]);
//! let mut storage = [FrameRange::EMPTY; 16];
//! let mut map = MemoryMap::new(table, &mut storage)?;
//! assert_eq!(map.ranges().iter().map(|range| range.frames()).collect::<Vec<_>>(), [0x9f, 0x7fadf, 0x80000]);
//!
//! // One zone for all of it, holes included. `spans(0)` would be a zone for each range.
//! let span = map.spans(u32::MAX).next().ok_or("no usable memory")?;
//! let metadata = map.carve(BuddyMetadata::for_span(span).pages()).ok_or("no range for the metadata")?;
//! # let need = BuddyMetadata::for_span(span);
//! # assert_eq!((metadata.end(), span.end()), (Pfn::new(0x18_0000), Pfn::new(0x18_0000)));
//! # let words: Vec<AtomicU64> = (0..need.words).map(|_| AtomicU64::new(0)).collect();
//! # let areas: Vec<AtomicU32> = (0..need.areas).map(|_| AtomicU32::new(0)).collect();
//! # let kept: Vec<AtomicU64> = (0..kept_words_for(span.end().as_u32())).map(|_| AtomicU64::new(0)).collect();
//! // `words` and `areas` are the memory at `metadata.address()`, zeroed. `kept` and `lists` may be carved or static.
//! let buddy = Buddy::over(span, &map, &words, &areas)?;
//! let lists = [const { PcpLists::new() }; 2];
//! let pages = Pcp::new(&buddy, &lists, &kept, Cpus([Lock::new(), Lock::new()]))?;
//!
//! let page = alloc_page(&pages).ok_or("no free page")?;
//! free_page(&pages, page)?;
//! assert!(free_page(&pages, page).is_err(), "a double free");
//! assert!(free_page(&pages, Pfn::new(0xb0000)).is_err(), "a page of a hole");
//! // An initrd that is known later: its frames must still be free.
//! assert_eq!(buddy.reserve_range(FrameRange::covering(0x7000_0000, 0x12_3456)?)?, 0x124);
//! # Ok::<(), Box<dyn core::error::Error>>(())
//! ```
//!
//! # The buddy alone
//!
//! Read in the order of a request going down: [`Gfp`] and the units say what is asked, [`ListPolicy`] how much moves
//! between a per-CPU list and the buddy, [`Buddy`] which pageblock serves, and its words which bits of it.
//!
//! ```
//! use pagemill_core::{BoundBlock, Giving, Mobility, Order, Pfn, Buddy, BuddyMetadata, atomic::{AtomicU32, AtomicU64}};
//!
//! // A kernel would lend memory of its own; here it is two vectors, for 1024 frames from frame 0.
//! let need = BuddyMetadata::for_frames(1024);
//! let bits: Vec<AtomicU64> = (0..need.words).map(|_| AtomicU64::new(0)).collect();
//! let areas: Vec<AtomicU32> = (0..need.areas).map(|_| AtomicU32::new(0)).collect();
//! let buddy = Buddy::new(Pfn::new(0), 1024, &bits, &areas).unwrap();
//!
//! let bound = BoundBlock::new();
//! let mut frames = Vec::new();
//! let got = buddy.take(&bound, 100, Mobility::Unmovable, 0, &mut |first, mask| {
//!     frames.extend((0..64).filter(|bit| mask >> bit & 1 == 1).map(|bit| first.offset(bit)));
//! });
//! assert_eq!((got, frames.len(), buddy.free_frames()), (100, 100, 924));
//!
//! let mut giving = Giving::to(&buddy);
//! frames.iter().for_each(|&pfn| giving.give(pfn));
//! assert_eq!(giving.finish().doubles, 0);
//! buddy.unbind(&bound);
//! assert_eq!(buddy.alloc_block(Order::PAGEBLOCK, Mobility::Unmovable, 0), Some(Pfn::new(0)));
//! ```
#![no_std]
#![forbid(unsafe_code)]

#[cfg(any(test, loom, feature = "trace"))]
extern crate std;

/// Marks a step of `docs/one-page.md`. It expands to nothing except in the test that compares the document with a trace.
#[doc(hidden)]
#[macro_export]
macro_rules! step {
    ($name:literal) => {
        #[cfg(feature = "trace")]
        $crate::trace::step($name);
    };
}

mod area;
mod blocks;
mod buddy;
mod contig;
mod error;
mod gfp;
mod give;
mod handful;
mod holes;
mod idle;
mod index;
mod lock;
mod map;
mod marks;
mod nodes;
mod pcp;
mod policy;
mod state;
mod sync;
#[cfg(feature = "trace")]
#[doc(hidden)]
pub mod trace;
mod units;
mod used;
mod validate;

pub use buddy::{BoundBlock, Buddy, BuddyMetadata};
pub use error::{Exhausted, Invalid, Misuse, MisuseKind, Shortfall, Why};
pub use gfp::{Gfp, Mobility};
pub use give::{Given, Giving, WordTable};
pub use handful::Handful;
pub use idle::{Part, Tick, Unused};
pub use lock::{Lock, Sleep};
pub use map::{FrameRange, MapError, MemoryMap, MemoryRange};
pub use marks::{Level, Watermarks};
pub use nodes::{NodeId, NodeMask, Policy, ZoneKind, interleave_share, zonelist_place};
pub use pcp::{Pcp, PcpLists, ThisCpu, kept_words_for};
pub use policy::{ListPolicy, SlowEvent};
pub use state::FrameState;
pub(crate) use units::WordId;
pub use units::{CpuId, Order, PAGE_SHIFT, PAGE_SIZE, PAGEBLOCK_FRAMES, PageCount, PageblockId, Pfn};
pub use used::use_words_for;
pub use validate::{BuddyCensus, BuddyInfo, Misfit};

/// The atomics that the buddy's metadata is made of: the core ones, or loom's when the models run.
pub mod atomic {
    pub use crate::sync::{AtomicU32, AtomicU64};
}
