//! A pool with a reserve, so that requests make progress even when memory is exhausted (the kernel's `mempool`).
//!
//! A storage path that frees memory by writing it out must not wait for memory to do so. It keeps enough elements for
//! one operation in reserve, takes from them when the page allocator has none, and waits for earlier operations to
//! return theirs, which needs no memory.
//!
//! # The way of a request (C5.2)
//! [`Mempool::get`] asks the [`Source`] without waiting, and takes what is missing from the reserve. If that is not
//! enough, it does both again, now with reclaim. Then it waits for its turn, and tries again whenever elements are
//! freed or 10 ms have passed.
//!
//! # Invariants
//! - M1 At most `min_nr` unclaimed elements are in the reserve. (A callback that unwound may leave some more there, and
//!   so may a thread of the parent in a forked child.) Elements that are freed while the reserve is not full go into it
//!   (C5.5).
//! - M2 A request takes its remainder from the reserve in full or not at all: it claims it in one section, and only if
//!   no request waits or it is the first in line (C5.3).
//! - M3 No request waits for more than `min_nr` elements.
//!
//! Progress follows: a request that took elements of the reserve has all its elements. So its owner continues and frees
//! them, until the reserve is full; then the first waiting request is served. Elements that a waiting request holds
//! already came from the source, so the reserve does not lack them.
//!
//! # Locks
//! The reserve's lock is held only to move element handles. No source, callback or other lock is entered under it, and
//! it is never held together with the lock of the lines in [`crate::wait`]. No fork begins while it is held
//! ([`no_fork`](crate::sync::no_fork)), so a child finds it free and the reserve consistent. In a forked child, the first call that takes the
//! lock forgets the waits and claims of the parent's threads.
//!
//! The decisions and their evidence: `docs/adr/0022-the-pool.md`.
mod awaited;
mod outgoing;
mod pool;
mod pooled;
mod source;
mod stats;
mod take;
mod want;

pub use pool::{BlockMempool, ElementsOut, Mempool, PageMempool};
pub use pooled::{PoolRef, Pooled};
pub use source::{PageSource, Pair, Source};
pub use stats::MempoolStats;
