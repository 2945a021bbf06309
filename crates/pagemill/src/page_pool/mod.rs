//! Pages that circulate between a consumer and those it hands them to (the kernel's `page_pool`).
//!
//! A receive path takes millions of pages a second and gets nearly all of them back. The pool keeps them: the consumer
//! takes a page from a cache that nobody else touches, and whoever drops the page puts it into a ring, from which the
//! consumer fills its cache again.
//!
//! # The way of a page
//! [`PagePool::alloc`] takes from the cache of 128. An empty cache is filled with up to 64 pages of the ring, else with
//! up to 64 of the source, by one bulk request (C7.4). [`PoolPage`] is the handle; dropping it on any thread puts the
//! page into the ring, or back to the source if the ring is full. The consumer's own [`put`](PagePool::put) puts it
//! into the cache.
//!
//! # The end
//! A pool has a count: one for each page that it has from its source, wherever the page is, and one for the consumer.
//! Only requests of the source and pages that leave the pool change it. The consumer's end empties the cache and the
//! ring; a page that is returned later goes to the source. Whoever takes the last one off the count ends what is
//! shared (C7.5).
//!
//! # Invariants
//! - P1 A page is at one place: in the cache, in the ring, in a handle, or with the source.
//! - P2 What is shared exists as long as any page of the pool is not with the source. A thread that returns a page
//!   touches it only before the page can be taken off the count (R2 in `ring.rs`).
//! - P3 One thread at a time takes from the ring: the one that has the [`PagePool`].
//!
//! # Forks
//! The child has a copy of the pool, and uses up what is in its cache and its ring. A page that a thread of the parent
//! was just putting into the ring is passed over there, and lost. Pages that are returned in the child go to the
//! source. Where parent and child share the memory (a memfd), both would hand out the same pages: such a pool must not
//! be used in the child, which the types do not prevent.
//!
//! # Locks
//! Only the list of pools has a lock (`record.rs`). The end of a pool waits for threads that are just putting pages
//! into the ring.
mod cache;
mod frag;
mod page;
mod pool;
mod raw;
mod record;
mod ring;
mod shared;
mod stats;

pub use frag::Frag;
pub use page::PoolPage;
pub use pool::PagePool;
pub use raw::PagePoolHome;
pub use record::{Ending, PagePoolInfo, page_pools};
pub use stats::PagePoolStats;
