//! The engine under the four forms: frames in batches of at most 64 (one exclusive section each, C3.5), each prepared
//! outside of its section (C3.9).
//!
//! Requests of at most [`ListPolicy::LARGE`] pages are served from the CPU's list and refill it; larger ones pass it by,
//! since they would only empty it. What the list does not have comes from the zones, the nearest first, above their low
//! marks; then the single path is tried, for one block or until the request has what it must have (C3.6, C3.8).
use crate::allocator::{Allocator, Inner};
use crate::arena::Arena;
use crate::bulk::request::{Bulk, Shortfall};
use crate::nodes::Nodes;
use crate::reclaim;
use crate::slow::Ask;
use crate::wait::Cancel;
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::{Gfp, Level, ListPolicy, NodeId, Order, Policy, interleave_share};
use pagemill_sys::Batch;
use pagemill_sys::lists::BulkCall;

impl Allocator {
    /// The engine: takes up to `missing` blocks and hands them to `sink` in prepared batches, each of one arena. Returns
    /// how many. The sink is called in one place and its address goes nowhere, so that what it keeps can stay in
    /// registers.
    #[inline]
    pub(super) fn bulk(
        &self,
        request: &Bulk<'_>,
        missing: usize,
        mut sink: impl FnMut(&Arena, &Batch, Option<u32>),
    ) -> usize {
        let missing = if request.gfp.contains(Gfp::ACCOUNT) { request.charge(missing) } else { missing };
        let (gfp, mobility) = (request.gfp, request.gfp.mobility());
        let here = if request.order == Order::ZERO && missing <= ListPolicy::LARGE && request.is_anywhere() {
            self.nodes().here()
        } else {
            None
        };
        let mut list = here;
        let mut slow = None;
        let mut got = 0;
        let mut batch = Batch::new();
        while got < missing {
            batch.clear();
            if let Some(inner) = list {
                inner.lists.pop_n(mobility, missing - got, &mut batch);
            }
            let (arena, run) = match list {
                Some(inner) if !batch.is_empty() => (inner.arena, inner.prepare(&mut batch, gfp, mobility)),
                _ => {
                    list = None;
                    // What an array holds already counts.
                    let needed = request.least.saturating_sub(request.most - missing + got);
                    match self.bulk_slow(
                        request,
                        slow.get_or_insert_with(|| Slow::new(missing)),
                        missing - got,
                        needed,
                        &mut batch,
                    ) {
                        Some(found) => found,
                        None => break,
                    }
                }
            };
            got += batch.len();
            if request.is_populated {
                arena.populate(batch.as_slice(), request.order);
            }
            sink(arena, &batch, run);
        }
        if got > 1 {
            self.count_bulk(here, got);
        }
        if request.gfp.contains(Gfp::ACCOUNT) {
            request.refund(missing - got);
        }
        got
    }

    #[inline]
    fn count_bulk(&self, here: Option<&Inner>, got: usize) {
        here.unwrap_or_else(|| self.nodes().first()).lists.count_bulk(BulkCall::Alloc, got);
    }

    /// The next batch from further down than the list, prepared, and its arena; none if that is all. `left` blocks are
    /// still wanted, `needed` of them badly.
    #[cold]
    #[inline(never)]
    fn bulk_slow(
        &self,
        request: &Bulk<'_>,
        slow: &mut Slow,
        left: usize,
        needed: usize,
        batch: &mut Batch,
    ) -> Option<(&'static Arena, Option<u32>)> {
        let nodes = self.nodes();
        let ask = request.ask(nodes);
        loop {
            match slow.stage {
                Stage::Begin if slow.is_single => slow.stage = Stage::Single { is_tried: false },
                Stage::Begin => slow.begin(nodes, &ask),
                Stage::Zone { at, is_drained } => match self.batch_of(slow, &ask, at, left, batch) {
                    (Some(found), _) => return Some(found),
                    (None, true) => {}
                    (None, false) if slow.has_next(nodes, &ask, at) => {
                        slow.stage = Stage::Zone { at: at + 1, is_drained };
                    }
                    (None, false) if slow.turns_left > 0 => slow.next_turn(nodes, &ask),
                    (None, false) => {
                        let may_drain = !is_drained && ask.gfp.may_wait();
                        slow.stage = if may_drain && nodes.drain_all() > 0 {
                            Stage::Zone { at: 0, is_drained: true }
                        } else {
                            Stage::Single { is_tried: false }
                        };
                    }
                },
                // The single path, for one block (C3.6, C3.8), or until the least number is reached. It alone may take
                // from pageblocks of another mobility.
                Stage::Single { is_tried: true } if needed == 0 => slow.stage = Stage::Over,
                Stage::Single { .. } => {
                    let Ok(Some((arena, pfn))) = nodes.take_one(&ask, || self.weak()) else {
                        slow.stage = Stage::Over;
                        continue;
                    };
                    slow.stage = Stage::Single { is_tried: true };
                    arena.stats_here().fallbacks.fetch_add(u64::from(!slow.is_single), Relaxed);
                    batch.push(pfn);
                    return Some((arena.arena, None));
                }
                Stage::Over => {
                    nodes.count_shortfall();
                    return None;
                }
            }
        }
    }

    /// A batch from the zone at place `at` of the request's zonelist, above its low mark; else, may there be more?
    fn batch_of(
        &self,
        slow: &mut Slow,
        ask: &Ask<'_>,
        at: usize,
        left: usize,
        batch: &mut Batch,
    ) -> (Option<(&'static Arena, Option<u32>)>, bool) {
        let nodes = self.nodes();
        let Some(&inner) = nodes.zonelist(slow.from).get(at) else { return (None, false) };
        let left = left.min(slow.share);
        if left == 0 || !ask.allows(nodes, slow.from, inner) {
            return (None, false);
        }
        let (run, is_more) = match ask.order {
            Order::ZERO => inner.batch_of_zone(ask.gfp, left, slow.is_large, batch),
            _ => (None, inner.batch_of_blocks(ask, left, batch)),
        };
        if batch.is_empty() {
            return (None, is_more);
        }
        slow.share -= batch.len().min(slow.share);
        nodes.count_node(ask, slow.from, inner, batch.len() * ask.order.frames() as usize);
        if slow.share == 0 {
            slow.next_turn(nodes, ask);
        }
        (Some((inner.arena, run)), true)
    }

    /// Why a request brought fewer than it asked for, if it did.
    #[inline]
    pub(super) fn shortfall(&self, request: &Bulk<'_>, got: usize) -> Option<Shortfall> {
        if got < request.most { Some(self.why(request, request.most - got)) } else { None }
    }

    #[cold]
    #[inline(never)]
    fn why(&self, request: &Bulk<'_>, missing: usize) -> Shortfall {
        let nodes = self.nodes();
        let ask = request.ask(nodes);
        let from = nodes.node();
        let mut zones = nodes.zonelist(from).iter().filter(|arena| ask.allows(nodes, arena.node, arena)).peekable();
        if request.cancel.is_some_and(Cancel::is_cancelled) {
            Shortfall::Cancelled { missing }
        } else if ask.gfp.may_wait() && reclaim::is_reclaiming() {
            Shortfall::Reclaiming { missing }
        } else if request.account.is_some_and(|account| account.is_full(ask.order.frames() as usize))
            && request.gfp.contains(Gfp::ACCOUNT)
        {
            Shortfall::Account { missing }
        } else if zones.peek().is_none() {
            Shortfall::NotAllowed { missing }
        } else if zones.any(|arena| arena.marks.floor(ask.gfp, Level::Min) > 0 && arena.zone.free_frames() > 0) {
            Shortfall::BelowMark { missing }
        } else {
            Shortfall::Exhausted { missing }
        }
    }
}

impl Inner {
    /// A batch of order 0 from pageblocks of the request's mobility; may there be more?
    fn batch_of_zone(&self, gfp: Gfp, left: usize, is_large: bool, batch: &mut Batch) -> (Option<u32>, bool) {
        self.check_generation();
        let mobility = gfp.mobility();
        let want = left.min(Batch::CAPACITY);
        let taken = if is_large {
            if self.is_refused_by_fault(gfp) {
                return (None, false);
            }
            let cpu = self.lists.cpu(self.lists.here());
            let bound = &cpu.lists[mobility.index()].bound;
            let taken = self.take_from_zone(bound, want, mobility, self.marks.floor(gfp, Level::Low), batch);
            cpu.stats.direct_out.fetch_add(taken as u64, Relaxed);
            taken
        } else {
            self.refill(gfp, Level::Low, want, batch)
        };
        if taken == 0 {
            // Refills put more on the list than they delivered: that comes before "exhausted".
            self.lists.pop_n(mobility, want, batch);
            if batch.is_empty() {
                return (None, false);
            }
        }
        (self.prepare(batch, gfp, mobility), true)
    }

    /// A batch of blocks above order 0, taken one by one (C3.11); may there be more?
    fn batch_of_blocks(&self, ask: &Ask<'_>, left: usize, batch: &mut Batch) -> bool {
        while batch.len() < left.min(Batch::CAPACITY) {
            let Some(pfn) = self.take_block(ask.gfp, ask.order, Level::Low) else { return false };
            batch.push(pfn);
        }
        true
    }
}

/// How far down a bulk request has gone.
#[derive(Debug)]
struct Slow {
    stage: Stage,
    /// It is for one block: the single path alone serves it, and no fallback is counted.
    is_single: bool,
    /// It goes past the lists.
    is_large: bool,
    /// The node whose zonelist it walks.
    from: NodeId,
    /// What it may still take there before it is another node's turn.
    share: usize,
    /// Divided among nodes: how many blocks and nodes that were, and how many turns are left.
    most: usize,
    turns: usize,
    turns_left: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// The CPU's list has no more.
    Begin,
    /// Pageblocks of the request's mobility in the zone at place `at`, again if all lists were drained for it.
    Zone { at: usize, is_drained: bool },
    /// One by one, as a single request goes.
    Single { is_tried: bool },
    /// There is no more.
    Over,
}

impl Slow {
    #[inline]
    fn new(missing: usize) -> Self {
        Self {
            stage: Stage::Begin,
            is_single: missing == 1,
            is_large: missing > ListPolicy::LARGE,
            from: NodeId::ZERO,
            share: usize::MAX,
            most: missing,
            turns: 0,
            turns_left: 0,
        }
    }

    /// Leaves the list for the zones.
    fn begin(&mut self, nodes: &Nodes, ask: &Ask<'_>) {
        if let Policy::Interleave(among) = ask.policy {
            self.turns = nodes.populated().and(among).and(ask.nodes).and(nodes.allowed()).count();
            self.turns_left = self.turns;
        }
        self.next_turn(nodes, ask);
    }

    /// Goes on with the next node of a divided request, for its share; with the rest from wherever it may be when all
    /// had their turn.
    fn next_turn(&mut self, nodes: &Nodes, ask: &Ask<'_>) {
        self.stage = Stage::Zone { at: 0, is_drained: false };
        self.from = ask.first_node(nodes);
        self.share = usize::MAX;
        if self.turns_left > 0 {
            self.share = interleave_share(self.most, self.turns, self.turns - self.turns_left);
            self.turns_left -= 1;
        }
    }

    /// Does the request go on with the next zone? Those of its own node always; others with flags that may wait.
    fn has_next(&self, nodes: &Nodes, ask: &Ask<'_>, at: usize) -> bool {
        let zones = nodes.zonelist(self.from);
        match (zones.get(at), zones.get(at + 1)) {
            (Some(this), Some(next)) => {
                next.node == this.node || (ask.gfp.may_wait() && !ask.gfp.contains(Gfp::THISNODE))
            }
            _ => false,
        }
    }
}
