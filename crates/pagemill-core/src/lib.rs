//! The allocation policy of Pagemill, on frame numbers alone.
//!
//! This crate decides *which* frame: it never touches a page, asks no operating system, allocates nothing and holds
//! no `unsafe`. Its user (the crate `pagemill` in a process, or a kernel) lends it the metadata and
//! turns its numbers into memory.
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

/// Marks a step of `docs/one-page.md`. Nothing, but for the test that holds the document against the code.
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
mod error;
mod gfp;
mod give;
mod handful;
mod idle;
mod index;
mod lock;
mod marks;
mod nodes;
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
pub use marks::{Level, Watermarks};
pub use nodes::{NodeId, NodeMask, Policy, ZoneKind, interleave_share, zonelist_place};
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
