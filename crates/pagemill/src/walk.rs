//! The walk over the zones of a request, for one block or for many.
//!
//! A pass visits the zones of one node's zonelist, the nearest first, and takes blocks from pageblocks of the request's mobility.
//! When these have no more, a request that may wait drains all per-CPU lists and makes another pass. A walk for one block then
//! makes a third pass, in which it may take from pageblocks of another mobility. A walk for many does not: a bulk request that got
//! nothing continues with a walk for one block (`bulk/engine.rs`), which also visits other nodes where the request may not wait.
//!
//! A policy may divide a request among nodes: the walk then passes over one node's zonelist after the other, for a share each.
//!
//! A pass keeps the zonelist that it began with. Retiring a zone publishes another one, in which all later zones stand one place
//! earlier: a pass that changed over would skip one.
use crate::context::AllocContext;
use crate::zone::{PageblockFrames, Zone};
use crate::zones::Zones;
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::{Gfp, Level, NodeId, NodeMask, Policy, interleave_share};
use pagemill_os::Batch;

#[derive(Debug)]
pub(crate) struct Walk<'n> {
    /// The node whose zonelist is walked.
    pub(crate) from: NodeId,
    /// This pass's zonelist.
    zonelist: &'n [&'static Zone],
    /// The watermarks that it stays above.
    level: Level,
    /// Blocks that it is for.
    most: usize,
    /// The current zone's place in the zonelist, and the pass.
    at: usize,
    pass: Pass,
    /// Blocks that it may still take from this node before the next node's turn.
    share: usize,
    /// The nodes that the request is divided among, if it is. Each has two turns; `turns_left` are still to come.
    among: NodeMask,
    turns_left: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Pass {
    /// Blocks of pageblocks of the request's mobility.
    Own,
    /// The same, after per-CPU lists were drained.
    Drained,
    /// Blocks of pageblocks of another mobility.
    Steal,
}

impl<'n> Walk<'n> {
    /// A walk for one block, over the zonelist of node `from`.
    #[inline]
    pub(crate) fn for_one(zones: &'n Zones, from: NodeId, level: Level) -> Self {
        let (zonelist, among) = (zones.zonelist(from), NodeMask::NONE);
        Self { from, zonelist, level, most: 1, at: 0, pass: Pass::Own, share: usize::MAX, among, turns_left: 0 }
    }

    /// A walk for up to `most` blocks above the low watermarks.
    #[inline]
    pub(crate) fn for_many(zones: &'n Zones, context: &AllocContext<'_>, most: usize) -> Self {
        let among = context.among(zones);
        let mut walk = Self::for_one(zones, context.first_node(zones, most), Level::Low);
        walk.most = most;
        if !among.is_empty() {
            walk.turns_left = 2 * among.count() - 1;
            walk.share = interleave_share(most, among.count(), 0);
            walk.among = among;
        }
        walk
    }

    /// Begins again with the first pass.
    pub(crate) fn again(&mut self, zones: &'n Zones) {
        self.begin_pass(zones, Pass::Own);
    }

    fn begin_pass(&mut self, zones: &'n Zones, pass: Pass) {
        (self.zonelist, self.at, self.pass) = (zones.zonelist(self.from), 0, pass);
    }

    /// Takes the next blocks, `left` at most, into `batch`, which is empty, and prepares them. Returns their zone; none at the end
    /// of the walk. `past_list` holds the frames that a large request, which goes past the lists, has in hand: it is no field, so
    /// that a request for one page does not have it on its stack.
    pub(crate) fn next(
        &mut self,
        zones: &'n Zones,
        context: &AllocContext<'_>,
        left: usize,
        mut past_list: Option<&mut PageblockFrames>,
        batch: &mut Batch,
    ) -> Option<&'static Zone> {
        let (gfp, order) = (context.gfp, context.order);
        loop {
            let left = left.min(self.share);
            if let Some(&zone) = self.zonelist.get(self.at)
                && left > 0
                && context.allows(zones, self.from, zone)
            {
                let may_have_more = match self.pass {
                    pass if context.run > 0 => zone.take_run(gfp, context.run, self.level, pass == Pass::Steal, batch),
                    Pass::Steal => zone.steal(gfp, order, self.level, batch),
                    _ => zone.take_batch(gfp, order, self.level, left, past_list.as_deref_mut(), batch),
                };
                if !batch.is_empty() {
                    self.share -= batch.len().min(self.share);
                    zone.shut_lists_below_low();
                    zones.count_node(context, self.from, zone, batch.len() * context.frames());
                    if self.share == 0 {
                        self.next_turn(zones);
                    }
                    return Some(zone);
                }
                if may_have_more {
                    continue; // The zone refused all that it took: look again.
                }
            }
            if !self.goes_on(zones, context) {
                return None;
            }
        }
    }

    /// Moves to the next zone. False at the end of the walk.
    fn goes_on(&mut self, zones: &'n Zones, context: &AllocContext<'_>) -> bool {
        if self.has_next(zones, context) {
            self.at += 1;
            return true;
        }
        if self.turns_left > 0 {
            self.next_turn(zones);
            return true;
        }
        // Where there are several zones, a request for one block tries lower watermarks before it drains lists.
        let is_over = self.most == 1 && self.level == Level::Low && zones.all().len() > 1;
        let pass = match self.pass {
            _ if is_over => return false,
            Pass::Own if context.gfp.may_wait() && self.drain(zones, context) > 0 => Pass::Drained,
            Pass::Own | Pass::Drained if self.most == 1 => Pass::Steal,
            _ => return false,
        };
        self.begin_pass(zones, pass);
        true
    }

    fn drain(&self, zones: &Zones, context: &AllocContext<'_>) -> usize {
        self.zonelist.iter().filter(|zone| context.allows(zones, self.from, zone)).map(|zone| zone.drain_all()).sum()
    }

    /// Whether this pass visits another zone. A walk for one block visits all. A walk for many visits the zones of the nearest
    /// node that the request may use, and those of other nodes if the request may wait.
    fn has_next(&self, zones: &Zones, context: &AllocContext<'_>) -> bool {
        let Some(next) = self.zonelist.get(self.at + 1) else { return false };
        let nearest = || self.zonelist.iter().position(|zone| context.allows(zones, self.from, zone));
        self.most == 1
            || nearest().is_some_and(|nearest| {
                let is_near = self.at < nearest || next.node() == self.zonelist[nearest].node();
                is_near || (context.gfp.may_wait() && !context.gfp.contains(Gfp::THISNODE))
            })
    }

    /// Moves a divided request to the next node, for that node's share; on a node's second turn for all that is missing.
    fn next_turn(&mut self, zones: &'n Zones) {
        let count = self.among.count();
        self.from = self.among.next_after(self.from).unwrap_or(self.from);
        self.again(zones);
        self.share = match (2 * count).checked_sub(self.turns_left) {
            Some(at) if at < count => interleave_share(self.most, count, at),
            _ => usize::MAX,
        };
        self.turns_left = self.turns_left.saturating_sub(1);
    }
}

impl Zones {
    /// Counts pages of `zone` for a request that wanted them from node `from` (C3.13). Hits are not counted: they are the pages
    /// that are no misses.
    fn count_node(&self, context: &AllocContext<'_>, from: NodeId, zone: &Zone, pages: usize) {
        if self.waits.is_awaited() {
            self.waits.note_served();
        }
        let pages = pages as u64;
        // A node that cannot serve the request cannot be missed: the nearest node that can takes its place.
        let nearest = || self.zonelist(from).iter().find(|zone| context.allows(self, from, zone));
        let wanted = if zone.node() == from { from } else { nearest().map_or(from, |zone| zone.node()) };
        if zone.node() != wanted {
            zone.stats_here().numa_miss.fetch_add(pages, Relaxed);
            if let Some(wanted) = self.zonelist(wanted).first() {
                wanted.stats_here().numa_foreign.fetch_add(pages, Relaxed);
            }
        } else if matches!(context.policy, Policy::Interleave(_)) {
            zone.stats_here().numa_interleave.fetch_add(pages, Relaxed);
        }
    }
}
