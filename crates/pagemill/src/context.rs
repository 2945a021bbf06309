//! The parameters of a request for one block: flags, order, nodes, policy, how long it waits. A bulk request has one such
//! context for all its blocks.
//!
//! It stands between a request's public form (`path.rs`, `bulk/`) and the walk over the zones: the walk and the slow path read it, and
//! nothing below them does. It is plain data without locks.
use crate::shared::Lack;
use crate::wait::Patience;
use crate::zone::Zone;
use crate::zones::Zones;
use pagemill_core::{Gfp, NodeId, NodeMask, Order, Policy};

/// What a request may allocate, and from which zones.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AllocContext<'c> {
    pub(crate) gfp: Gfp,
    pub(crate) order: Order,
    /// The number of neighbouring pages that it needs; 0 for a request for blocks of `order`.
    pub(crate) run: usize,
    /// How far the request goes for one of its blocks.
    pub(crate) effort: Effort,
    /// Nodes that the caller allows. The allocator's allowed set applies as well, and is read again at every step.
    pub(crate) nodes: NodeMask,
    pub(crate) policy: Policy,
    pub(crate) patience: Patience<'c>,
}

/// How far a request goes for one block, as far as its flags allow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Effort {
    /// It takes a free block or none.
    Take,
    /// It also calls shrinkers. It does not wait, since it already holds other blocks (C3.20).
    Reclaim,
    /// It also waits.
    Wait,
}

impl<'c> AllocContext<'c> {
    /// The context of a request that specifies only its flags and order.
    pub(crate) fn plain(zones: &Zones, gfp: Gfp, order: Order) -> Self {
        let (policy, patience) = (zones.policy(), Patience::default());
        Self { gfp, order, run: 0, effort: Effort::Wait, nodes: NodeMask::ALL, policy, patience }
    }

    /// The context of a request for a run of `n` neighbouring pages that specifies only its flags.
    pub(crate) fn of_run(zones: &Zones, gfp: Gfp, n: usize) -> Self {
        Self { run: n, ..Self::plain(zones, gfp, Order::ZERO) }
    }

    /// The number of frames of one block, or of the run.
    pub(crate) fn frames(&self) -> usize {
        if self.run > 0 { self.run } else { self.order.frames() as usize }
    }

    /// What the request lacks while it needs `blocks` blocks at once, or its run. `from` is the node that it prefers.
    pub(crate) fn lack(&self, from: NodeId, blocks: usize) -> Lack {
        let only = match self.policy {
            // The preferred node changes with each request, so it does not tell kinds of request apart.
            Policy::Interleave(_) => NodeMask::ALL,
            _ if self.gfp.contains(Gfp::THISNODE) => NodeMask::only(from),
            _ => NodeMask::ALL,
        };
        let nodes = self.nodes.and(self.policy.nodes()).and(only);
        let (is_run, is_dma32) = (self.run > 0, self.gfp.contains(Gfp::DMA32));
        Lack { order: self.order, blocks: if is_run { self.run } else { blocks }, is_run, nodes, is_dma32 }
    }

    /// The nodes that its blocks come from in turn; empty unless the policy is interleave.
    pub(crate) fn among(&self, zones: &Zones) -> NodeMask {
        match self.policy {
            Policy::Interleave(among) => among.and(self.nodes).and(zones.allowed()).and(zones.populated()),
            _ => NodeMask::NONE,
        }
    }

    /// Whether it waits as long as it says even if nothing promises that memory will be freed.
    pub(crate) fn is_endless(&self) -> bool {
        self.gfp.contains(Gfp::NOFAIL) || self.patience.deadline.is_some()
    }

    /// The preferred node, for `n` blocks. With the interleave policy, each block takes one turn. `THISNODE` without a
    /// policy means the node of the caller's CPU.
    pub(crate) fn first_node(&self, zones: &Zones, n: usize) -> NodeId {
        zones.take_turns(self.among(zones), n).unwrap_or_else(|| self.policy.first(zones.node()))
    }

    /// Whether the request may take memory of this zone now.
    #[inline]
    pub(crate) fn allows(&self, zones: &Zones, from: NodeId, zone: &Zone) -> bool {
        let allowed = zones.allowed().and(self.nodes).and(self.policy.nodes());
        allowed.contains(zone.node())
            && zone.kind().serves(self.gfp)
            && !zone.is_retired()
            && (zone.node() == from || !self.gfp.contains(Gfp::THISNODE))
    }
}
