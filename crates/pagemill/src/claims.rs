//! Claims: how memory comes together for a request that others overtake (C3.20, ADR 29).
//!
//! A request that waits for much would never be served while others take each page as it comes back. So the head of a line
//! (`wait.rs`) that was overtaken often *claims* memory: what comes back is kept for it. Everyone else goes on with what was
//! free before, and with what comes back beyond the claim. An allocator has one claim at a time.
//!
//! - A request for single pages, or for several blocks, claims a *number* of frames. Each free counts its frames to the claim
//!   before they are free ([`Zone::claim_freed`](crate::zone::Zone::claim_freed)). For all others that many frames lie below the mark ([`Zone::floor`](crate::zone::Zone::floor)).
//! - A request for one block of order 1 to 9 claims a *pageblock*. The zone withholds that ([`pagemill_core::Buddy::withhold`]):
//!   nobody else takes anything of it until the block is whole.
//!
//! While the claimant tries, [`IS_CLAIMANT`] is set on its thread, and what it has claimed does not count against it. A claim
//! ends with its request's wait. It also ends, for a while, when nothing was added to it for `PATIENCE` (`claim.rs`): the threads that have
//! the missing pages may need a page before they can free theirs.
//!
//! What an allocator knows of its claim stands here, what a zone does with it in `zone/claimed.rs`, and the claimant's part in
//! `claim.rs`.
//!
//! # Invariant
//! - Q1 What is claimed of a zone is at most what the claimant lacks, and none once its claim has ended.
use core::cell::Cell;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// The claim of an allocator, if there is one.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    pub(crate) is_held: AtomicBool,
    /// Below: how many frames are still to be counted to the claim. Above, times 2^32: the claim's number. A free that is late
    /// may count when its claim has ended; by the number its frames are not taken for the next claim's.
    pub(crate) wanted: AtomicU64,
    /// The nodes that those frames may be of, and whether they must lie below 4 GiB; stored before `wanted`.
    pub(crate) nodes: AtomicU64,
    pub(crate) is_dma32: AtomicBool,
}

pub(crate) const NUMBER: u32 = 32;

thread_local! {
    /// Does this thread try to take what its request has claimed? Read only where something is claimed.
    pub(crate) static IS_CLAIMANT: Cell<bool> = const { Cell::new(false) };
}

impl Claims {
    /// In the child of a fork nobody waits.
    pub(crate) fn forget_after_fork(&self) {
        self.wanted.store(0, Relaxed);
        self.is_held.store(false, Relaxed);
    }
}
