//! What a request claims that others overtook often (C3.20).
//!
//! It stands beside the lines of those who wait (`wait.rs`); an allocator has one claim at a time. A request for single pages, or for several blocks, claims a number: frames that are freed from then on
//! are counted to it ([`Nodes::claim_freed`]) and lie above nobody else's mark ([`Inner::floor`]) until it takes them. A
//! request for one block of an order up to 9 claims a pageblock: nobody else takes anything of that until the block is
//! whole. What was free before stays everybody's. A claim that gets no further for [`PATIENCE`] ends, and may begin again after
//! as long: it may lack just those pages that others cannot free before they have got some.
//!
//! # Invariant
//! - Q1 What is claimed of a zone is at most what the claimant lacks, and none once its claim has ended.
use crate::allocator::Inner;
use crate::nodes::Nodes;
use crate::slow::Lack;
use core::cell::Cell;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use pagemill_core::{Gfp, Level, NodeMask, Order, Pfn};
use std::time::{Duration, Instant};

/// A claim that nothing was added to for so long ends, and so long it is before the next one.
const PATIENCE: Duration = Duration::from_secs(1);

/// The claim of an allocator, if there is one.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    is_held: AtomicBool,
    /// Frames that are still to be counted to it, and the nodes that they may be of.
    wanted: AtomicUsize,
    nodes: AtomicU64,
}

thread_local! {
    /// Does this thread try to take what it has claimed? Looked at only where something is claimed.
    static IS_CLAIMANT: Cell<bool> = const { Cell::new(false) };
}

impl Claims {
    /// In the child of a fork nobody waits.
    pub(crate) fn forget_after_fork(&self) {
        self.wanted.store(0, Relaxed);
        self.is_held.store(false, Relaxed);
    }
}

impl Nodes {
    /// Counts `frames` to whoever claims some, before they are free: so nobody else finds them there.
    #[inline]
    pub(crate) fn claim_freed(&self, arena: &Inner, frames: impl FnOnce() -> usize) {
        if self.claims.wanted.load(Relaxed) > 0 {
            self.count_to_claim(arena, frames());
        }
    }

    #[cold]
    fn count_to_claim(&self, arena: &Inner, n: usize) {
        if !NodeMask::from_bits(self.claims.nodes.load(Relaxed)).contains(arena.node) {
            return;
        }
        let less = |wanted: usize| Some(wanted.saturating_sub(n));
        let before = self.claims.wanted.fetch_update(Relaxed, Relaxed, less).unwrap_or(0);
        arena.claimed.fetch_add(before.min(n) as u32, Relaxed);
    }
}

impl Inner {
    /// How many frames must stay when a request with these flags takes some: what its marks keep, and what is claimed.
    pub(crate) fn floor(&self, gfp: Gfp, level: Level) -> u32 {
        let kept = self.marks.floor(gfp, level);
        match self.claimed.load(Relaxed).saturating_add(self.zone.withheld_frames()) {
            0 => kept,
            _ if IS_CLAIMANT.get() => kept,
            claimed => kept.saturating_add(claimed),
        }
    }
}

impl Inner {
    /// A block of the pageblock that is withheld for this request.
    pub(crate) fn take_withheld(&self, order: Order, floor: u32) -> Option<Pfn> {
        let is_for_this = self.zone.withheld_frames() >= order.frames() && IS_CLAIMANT.get();
        if is_for_this { self.zone.take_withheld(order, floor) } else { None }
    }
}

/// What a request that waits has claimed, or will.
#[derive(Debug)]
pub(crate) struct Claim<'n> {
    nodes: &'n Nodes,
    lack: Lack,
    is_held: bool,
    /// How many frames it has, at most so far, and since when; or when it ended.
    best: usize,
    since: Option<Instant>,
    /// The pageblock, and its arena; the last one after the claim has ended.
    block: Option<(&'static Inner, usize)>,
}

impl<'n> Claim<'n> {
    /// None yet.
    pub(crate) fn new(nodes: &'n Nodes, lack: Lack) -> Self {
        Self { nodes, lack, is_held: false, best: 0, since: None, block: None }
    }

    /// One try, by what it has claimed if it was overtaken often.
    pub(crate) fn attempt<T>(&mut self, is_overtaken: bool, attempt: impl FnOnce() -> Option<T>) -> Option<T> {
        let has_rested = self.since.is_none_or(|since| since.elapsed() >= PATIENCE);
        if self.is_held && self.frames() > self.best {
            (self.best, self.since) = (self.frames(), Some(Instant::now()));
        } else if self.is_held && has_rested {
            self.end();
        } else if !self.is_held && is_overtaken && has_rested {
            self.begin();
        }
        if !self.is_held {
            return attempt();
        }
        struct Over;
        impl Drop for Over {
            fn drop(&mut self) {
                IS_CLAIMANT.set(false);
            }
        }
        IS_CLAIMANT.set(true);
        let _over = Over;
        attempt()
    }

    /// How many frames it has.
    fn frames(&self) -> usize {
        match self.block {
            Some((arena, _)) => arena.zone.withheld_frames() as usize,
            None => self.nodes.all().iter().map(|arena| arena.claimed.load(Relaxed) as usize).sum(),
        }
    }

    fn begin(&mut self) {
        let claims = &self.nodes.claims;
        // Acquire pairs with the Release in `end`: what was claimed before is none any more.
        if self.lack.order() > Order::PAGEBLOCK
            || claims.is_held.compare_exchange(false, true, Acquire, Relaxed).is_err()
        {
            return;
        }
        (self.is_held, self.best, self.since) = (true, 0, Some(Instant::now()));
        if self.lack.is_one_block() {
            let last = self.block.take();
            let arenas = self.nodes.all().iter().copied().filter(|arena| self.lack.is_served_by(arena));
            let from = |arena: &Inner| last.filter(|(of, _)| core::ptr::eq(*of, arena)).map_or(0, |(_, block)| block);
            self.block =
                arenas.filter_map(|arena| Some((arena, arena.zone.withhold(self.lack.order(), from(arena))?))).next();
        } else {
            claims.nodes.store(self.lack.nodes().as_bits(), Relaxed);
            claims.wanted.store(self.lack.frames(), Relaxed);
        }
    }

    fn end(&mut self) {
        (self.is_held, self.since) = (false, Some(Instant::now()));
        self.nodes.claims.wanted.store(0, Relaxed);
        for arena in self.nodes.all() {
            arena.claimed.store(0, Relaxed);
            arena.zone.end_withholding();
        }
        // Release pairs with the Acquire in `begin`.
        self.nodes.claims.is_held.store(false, Release);
        self.nodes.waits.note_free(&|_| true);
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        if self.is_held {
            self.end();
        }
    }
}
