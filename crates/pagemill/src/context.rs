//! What a request for one block says, or a bulk request for each of its blocks: flags, order, nodes, policy, how long it waits.
use crate::shared::Lack;
use crate::wait::Patience;
use crate::zone::Zone;
use crate::zones::Zones;
use pagemill_core::{Gfp, NodeId, NodeMask, Order, Policy};

/// What a request may have, and from where.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AllocContext<'c> {
    pub(crate) gfp: Gfp,
    pub(crate) order: Order,
    /// How far one block of it may go.
    pub(crate) effort: Effort,
    /// Nodes that the caller allows; the allocator's allowed set is looked at besides, at every step.
    pub(crate) nodes: NodeMask,
    pub(crate) policy: Policy,
    pub(crate) patience: Patience<'c>,
}

/// How far a request goes for one block, where its flags allow it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Effort {
    /// It takes what there is.
    Take,
    /// It has shrinkers called too. It has other blocks in hand, and so does not wait (C3.20).
    Reclaim,
    /// It waits too.
    Wait,
}

impl<'c> AllocContext<'c> {
    /// For a request that says nothing but its flags.
    pub(crate) fn plain(zones: &Zones, gfp: Gfp, order: Order) -> Self {
        let (policy, patience) = (zones.policy(), Patience::default());
        Self { gfp, order, effort: Effort::Wait, nodes: NodeMask::ALL, policy, patience }
    }

    /// What it lacks while it needs `blocks` blocks at once; `from` is the node that it begins with.
    pub(crate) fn lack(&self, from: NodeId, blocks: usize) -> Lack {
        let only = match self.policy {
            Policy::Interleave(_) => NodeMask::ALL, // The turn moves on with each request: it tells no kinds apart.
            _ if self.gfp.contains(Gfp::THISNODE) => NodeMask::only(from),
            _ => NodeMask::ALL,
        };
        let nodes = self.nodes.and(self.policy.nodes()).and(only);
        Lack { order: self.order, blocks, nodes, is_dma32: self.gfp.contains(Gfp::DMA32) }
    }

    /// The nodes that its blocks come from in turn; none where they don't.
    pub(crate) fn among(&self, zones: &Zones) -> NodeMask {
        match self.policy {
            Policy::Interleave(among) => among.and(self.nodes).and(zones.allowed()).and(zones.populated()),
            _ => NodeMask::NONE,
        }
    }

    /// Does it wait for as long as it says, also where nothing promises that memory comes back?
    pub(crate) fn is_endless(&self) -> bool {
        self.gfp.contains(Gfp::NOFAIL) || self.patience.deadline.is_some()
    }

    /// The node to begin with, for `n` blocks: where they come from nodes in turn, each takes one. `THISNODE` without
    /// another word is that of the caller's CPU.
    pub(crate) fn first_node(&self, zones: &Zones, n: usize) -> NodeId {
        zones.take_turns(self.among(zones), n).unwrap_or_else(|| self.policy.first(zones.node()))
    }

    /// May it have memory of this arena, just now?
    #[inline]
    pub(crate) fn allows(&self, zones: &Zones, from: NodeId, zone: &Zone) -> bool {
        let allowed = zones.allowed().and(self.nodes).and(self.policy.nodes());
        allowed.contains(zone.node)
            && zone.kind.serves(self.gfp)
            && !zone.is_retired()
            && (zone.node == from || !self.gfp.contains(Gfp::THISNODE))
    }
}
