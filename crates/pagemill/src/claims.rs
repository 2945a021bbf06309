//! Claims: how memory is collected for a request that others overtake (C3.20, ADR 29).
//!
//! A request that waits for many pages would never be served while others take each page as it is freed. So the head of
//! a line (`wait.rs`) that was overtaken often *claims* memory: freed memory is kept for it. All other requests use
//! memory that was free before, and freed memory beyond the claim. An allocator has one claim at a time.
//!
//! - A request for single pages, or for several blocks, claims a *number* of frames. Each free counts its frames
//!   towards the claim before they become free ([`Zone::claim_freed`](crate::zone::Zone::claim_freed)). For all other
//!   requests the zone's floor rises by that many frames ([`Zone::floor`](crate::zone::Zone::floor)).
//! - A request for one block of order 1 to 9 claims a *pageblock*. The zone withholds it
//!   ([`pagemill_core::Buddy::withhold`]): no other request takes a frame of it until the block is whole.
//!
//! While the claimant makes an attempt, [`IS_CLAIMANT`] is set on its thread, and the claim does not count against it.
//! A claim ends with its request's wait. It also ends, for a while, if nothing was added to it for `PATIENCE`
//! (`claim.rs`): the threads that own the missing pages may need a page before they can free theirs. If its request makes no
//! attempt for twice as long, another request that may wait, or background reclaim, ends it: the claimant may be a task that
//! is not polled any more.
//!
//! This file holds what an allocator stores of its claim. `zone/claimed.rs` has what a zone does with it, and
//! `claim.rs` the claimant's part. All of it is atomics; no lock is taken.
//!
//! # Invariant
//! - Q1 At most what the claimant lacks is claimed of a zone, and nothing once the claim has ended.
//! - Q2 A claim is ended once: by the request that makes its number, which is odd, an even one. Only then is the next one
//!   admitted.
use core::cell::Cell;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::Acquire, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// The claim of an allocator, if it has one.
#[derive(Debug)]
pub(crate) struct Claims {
    /// Admits one claimant, from before its claim begins until after it has ended.
    pub(crate) is_held: AtomicBool,
    /// Low half: how many frames are still to be counted towards the claim. High half, times 2^32: the claim's number,
    /// odd while there is a claim. A late free may count its frames when its claim has ended; by the number they are
    /// told apart from the next claim's.
    pub(crate) wanted: AtomicU64,
    /// The nodes that those frames may be on, and whether they must lie below 4 GiB. Stored before `wanted`.
    pub(crate) nodes: AtomicU64,
    pub(crate) is_dma32: AtomicBool,
    /// The time of the claimant's last attempt, in milliseconds since `start`. Stored before `wanted`.
    attempted: AtomicU64,
    start: Instant,
}

impl Default for Claims {
    fn default() -> Self {
        let (no, zero) = (|| AtomicBool::new(false), || AtomicU64::new(0));
        let (is_held, is_dma32) = (no(), no());
        Self { is_held, wanted: zero(), nodes: zero(), is_dma32, attempted: zero(), start: Instant::now() }
    }
}

pub(crate) const NUMBER: u32 = 32;

thread_local! {
    /// Whether this thread is making an attempt for the request that has the claim. Read only while something is
    /// claimed.
    pub(crate) static IS_CLAIMANT: Cell<bool> = const { Cell::new(false) };
}

impl Claims {
    /// The number of the claim, or the even number between two claims.
    pub(crate) fn number(&self) -> u32 {
        // Acquire pairs with the Release in `Claim::begin`: what was stored before `wanted` is this claim's.
        (self.wanted.load(Acquire) >> NUMBER) as u32
    }

    /// The claimant makes an attempt.
    pub(crate) fn note_attempt(&self, now: Instant) {
        // The maximum, since a claimant whose claim was just ended may come late with this.
        self.attempted.fetch_max(self.since_start(now), Relaxed);
    }

    /// The number of the claim, if its request made no attempt for so long.
    pub(crate) fn idle_number(&self, now: Instant, patience: Duration) -> Option<u32> {
        let number = self.number();
        let idle_for = self.since_start(now).saturating_sub(self.attempted.load(Relaxed));
        (number % 2 == 1 && u128::from(idle_for) >= patience.as_millis()).then_some(number)
    }

    fn since_start(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.start).as_millis() as u64
    }

    /// In a forked child no request waits.
    pub(crate) fn forget_after_fork(&self) {
        self.wanted.store(0, Relaxed);
        self.is_held.store(false, Relaxed);
    }
}
