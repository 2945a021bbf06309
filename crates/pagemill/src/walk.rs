//! The walk over the zones of a request, for one block or for many.
//!
//! Zone after zone, the nearest first, it takes blocks from pageblocks of the request's mobility. When these have no more, it has
//! all lists drained, if the request may wait, and visits the zones again. A walk for one block then takes one from pageblocks of
//! another mobility. A walk for many leaves that, and zones of other nodes where its request may not wait, to a walk for one, which
//! its request begins when it got nothing (`bulk/engine.rs`).
//!
//! Where a policy divides a request among nodes, it walks over one node's zonelist after the other, each for its share.
use crate::context::AllocContext;
use crate::zone::{PageblockFrames, Zone};
use crate::zones::Zones;
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::{Gfp, Level, NodeId, NodeMask, Policy, interleave_share};
use pagemill_os::Batch;

#[derive(Debug)]
pub(crate) struct BulkWalk {
    /// The node whose zonelist it walks.
    pub(crate) from: NodeId,
    /// What zones keep from it.
    level: Level,
    /// How many blocks it is for.
    most: usize,
    /// The zone's place in the list, and why it is visited.
    at: usize,
    round: Round,
    /// What it may still take of this node before it is another one's turn.
    share: usize,
    /// Divided among these nodes, if any; `turns_left` of them have theirs yet, twice each.
    among: NodeMask,
    turns_left: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Round {
    /// Blocks of pageblocks of the request's mobility.
    Own,
    /// Again, after lists were drained.
    Drained,
    /// Blocks of other pageblocks.
    Steal,
}

impl BulkWalk {
    /// For one block, from a node on.
    pub(crate) fn for_one(from: NodeId, level: Level) -> Self {
        Self { from, level, most: 1, at: 0, round: Round::Own, share: usize::MAX, among: NodeMask::NONE, turns_left: 0 }
    }

    /// For up to `most` blocks above the low marks.
    pub(crate) fn for_many(zones: &Zones, context: &AllocContext<'_>, most: usize) -> Self {
        let among = context.among(zones);
        let mut walk = Self::for_one(context.first_node(zones, most), Level::Low);
        walk.most = most;
        if !among.is_empty() {
            walk.turns_left = 2 * among.count() - 1;
            walk.share = interleave_share(most, among.count(), 0);
            walk.among = among;
        }
        walk
    }

    /// Visits the zones from the first one on again.
    pub(crate) fn again(&mut self) {
        (self.at, self.round) = (0, Round::Own);
    }

    /// The next blocks, `left` at most, prepared, into `batch`, which is empty; and their zone. None if that is all. `past_list` is
    /// what a large request, which goes past the lists, has in hand: apart, so that it is on no single request's stack.
    pub(crate) fn next(
        &mut self,
        zones: &Zones,
        context: &AllocContext<'_>,
        left: usize,
        mut past_list: Option<&mut PageblockFrames>,
        batch: &mut Batch,
    ) -> Option<&'static Zone> {
        let (gfp, order) = (context.gfp, context.order);
        loop {
            let left = left.min(self.share);
            if let Some(&zone) = zones.zonelist(self.from).get(self.at)
                && left > 0
                && context.allows(zones, self.from, zone)
            {
                let may_have_more = match self.round {
                    Round::Steal => zone.steal(gfp, order, self.level, batch),
                    _ => zone.take_batch(gfp, order, self.level, left, past_list.as_deref_mut(), batch),
                };
                if !batch.is_empty() {
                    self.share -= batch.len().min(self.share);
                    zone.shut_lists_below_low();
                    zones.count_node(context, self.from, zone, batch.len() * order.frames() as usize);
                    if self.share == 0 {
                        self.next_turn();
                    }
                    return Some(zone);
                }
                if may_have_more {
                    continue; // All that it took was put aside.
                }
            }
            if !self.goes_on(zones, context) {
                return None;
            }
        }
    }

    /// Goes on with the next zone, if there is one.
    fn goes_on(&mut self, zones: &Zones, context: &AllocContext<'_>) -> bool {
        if self.has_next(zones, context) {
            self.at += 1;
            return true;
        }
        if self.turns_left > 0 {
            self.next_turn();
            return true;
        }
        // Another level comes before a drain, where there are several zones.
        let is_over = self.most == 1 && self.level == Level::Low && zones.all().len() > 1;
        self.round = match self.round {
            _ if is_over => return false,
            Round::Own if context.gfp.may_wait() && self.drain(zones, context) > 0 => Round::Drained,
            Round::Own | Round::Drained if self.most == 1 => Round::Steal,
            _ => return false,
        };
        self.at = 0;
        true
    }

    fn drain(&self, zones: &Zones, context: &AllocContext<'_>) -> usize {
        let zonelist = zones.zonelist(self.from).iter();
        zonelist.filter(|zone| context.allows(zones, self.from, zone)).map(|zone| zone.drain_all()).sum()
    }

    /// Is the next zone visited, too? For one block always. For many those of the nearest node that the request may have memory
    /// of, and others if it may wait.
    fn has_next(&self, zones: &Zones, context: &AllocContext<'_>) -> bool {
        let zonelist = zones.zonelist(self.from);
        let Some(next) = zonelist.get(self.at + 1) else { return false };
        let nearest = || zonelist.iter().position(|zone| context.allows(zones, self.from, zone));
        self.most == 1
            || nearest().is_some_and(|nearest| {
                let is_near = self.at < nearest || next.node == zonelist[nearest].node;
                is_near || (context.gfp.may_wait() && !context.gfp.contains(Gfp::THISNODE))
            })
    }

    /// Goes on with the next node of a divided request, for its share; in the second round with whatever is missing.
    fn next_turn(&mut self) {
        let count = self.among.count();
        self.again();
        self.from = self.among.next_after(self.from).unwrap_or(self.from);
        self.share = match (2 * count).checked_sub(self.turns_left) {
            Some(at) if at < count => interleave_share(self.most, count, at),
            _ => usize::MAX,
        };
        self.turns_left = self.turns_left.saturating_sub(1);
    }
}

impl Zones {
    /// Counts pages of `zone` that a request got that wanted them of node `from` (C3.13): hits are what is left.
    fn count_node(&self, context: &AllocContext<'_>, from: NodeId, zone: &Zone, pages: usize) {
        if self.waits.is_awaited() {
            self.waits.note_served();
        }
        let pages = pages as u64;
        // A node that cannot serve it cannot be missed: the nearest that can stands for it.
        let wanted =
            self.zonelist(from).iter().find(|zone| context.allows(self, from, zone)).map_or(from, |first| first.node);
        if zone.node != wanted {
            zone.stats_here().numa_miss.fetch_add(pages, Relaxed);
            if let Some(wanted) = self.zonelist(wanted).first() {
                wanted.stats_here().numa_foreign.fetch_add(pages, Relaxed);
            }
        } else if matches!(context.policy, Policy::Interleave(_)) {
            zone.stats_here().numa_interleave.fetch_add(pages, Relaxed);
        }
    }
}
