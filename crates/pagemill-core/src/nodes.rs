//! Where a request looks for memory: nodes, kinds of zones, and the order in which zones are tried (C3.7).
//!
//! It works on numbers alone, so tests can simulate a machine of 8 nodes and 64 CPUs.
use crate::Gfp;
use core::fmt;

/// A NUMA node's number, 0 to 63.
///
/// ```
/// use pagemill_core::NodeId;
/// assert_eq!(NodeId::new(3).map(NodeId::get), Some(3));
/// assert_eq!(NodeId::new(64), None);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct NodeId(u8);

impl NodeId {
    /// How many nodes there can be.
    pub const COUNT_MAX: usize = 64;
    /// The first node, and the only one where a system says nothing of nodes.
    pub const ZERO: Self = Self(0);

    /// Node `id`, if there can be one.
    pub const fn new(id: usize) -> Option<Self> {
        if id < Self::COUNT_MAX { Some(Self(id as u8)) } else { None }
    }
    /// Its number.
    #[inline]
    pub const fn get(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node {}", self.0)
    }
}

/// A set of nodes: the kernel's `nodemask_t`.
///
/// ```
/// use pagemill_core::{NodeId, NodeMask};
/// let both: NodeMask = [0, 2].into_iter().filter_map(NodeId::new).collect();
/// assert!(both.contains(NodeId::ZERO) && !both.contains(NodeId::new(1).unwrap()));
/// assert_eq!(both.iter().count(), 2);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct NodeMask(u64);

impl NodeMask {
    /// Every node.
    pub const ALL: Self = Self(u64::MAX);
    /// None.
    pub const NONE: Self = Self(0);

    /// One node.
    pub const fn only(node: NodeId) -> Self {
        Self(1 << node.0)
    }
    /// Whether this node is in the set.
    #[inline]
    pub const fn contains(self, node: NodeId) -> bool {
        self.0 >> node.0 & 1 == 1
    }
    /// Whether the set is empty.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }
    /// Nodes that are in both sets.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
    /// How many nodes are in it.
    pub const fn count(self) -> usize {
        self.0.count_ones() as usize
    }
    /// Its nodes, in ascending order.
    pub fn iter(self) -> impl Iterator<Item = NodeId> {
        (0..Self::NODES).map(NodeId).filter(move |&node| self.contains(node))
    }
    /// The node that follows `node` in the set, going round.
    pub fn next_after(self, node: NodeId) -> Option<NodeId> {
        let after = self.0.rotate_right(u32::from(node.0) + 1);
        if after == 0 { None } else { Some(NodeId((node.0 + 1 + after.trailing_zeros() as u8) % Self::NODES)) }
    }
    /// As one word, bit n for node n.
    pub const fn as_bits(self) -> u64 {
        self.0
    }
    /// From [`as_bits`](Self::as_bits).
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    const NODES: u8 = NodeId::COUNT_MAX as u8;
}

impl FromIterator<NodeId> for NodeMask {
    fn from_iter<I: IntoIterator<Item = NodeId>>(nodes: I) -> Self {
        nodes.into_iter().fold(Self::NONE, |mask, node| Self(mask.0 | Self::only(node).0))
    }
}

/// The property that a zone's frames share beside their node.
///
/// ```
/// use pagemill_core::{Gfp, ZoneKind};
/// assert!(ZoneKind::Dma32.serves(Gfp::KERNEL | Gfp::DMA32) && !ZoneKind::Normal.serves(Gfp::DMA32));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[repr(u8)]
pub enum ZoneKind {
    /// Any frame.
    #[default]
    Normal = 0,
    /// Frames whose device addresses lie below 4 GiB, as their arena declares.
    Dma32 = 1,
}

impl ZoneKind {
    /// Its name, as the kernel writes it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Normal => "Normal",
            Self::Dma32 => "DMA32",
        }
    }
    /// Whether a request with these flags may take frames of it.
    #[inline]
    pub const fn serves(self, gfp: Gfp) -> bool {
        matches!(self, Self::Dma32) || !gfp.contains(Gfp::DMA32)
    }
}

/// Where requests of an allocator, or one request, look for memory: the kernel's memory policies.
///
/// ```
/// use pagemill_core::{NodeId, NodeMask, Policy};
/// let near = NodeId::new(1).unwrap();
/// assert_eq!(Policy::Local.nodes(), NodeMask::ALL);
/// assert_eq!(Policy::Preferred(near).first(NodeId::ZERO), near);
/// assert_eq!(Policy::Bind(NodeMask::only(near)).nodes(), NodeMask::only(near));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Policy {
    /// The node of the caller's CPU, then the others, the nearest first.
    #[default]
    Local,
    /// This node, then the others, the nearest first.
    Preferred(NodeId),
    /// These nodes alone, the nearest to the caller's first.
    Bind(NodeMask),
    /// These nodes in turn; a bulk request is divided among them. If a node has too little, the others give more.
    Interleave(NodeMask),
}

impl Policy {
    /// Whether its set of nodes is empty.
    pub const fn is_of_none(self) -> bool {
        matches!(self, Self::Bind(NodeMask::NONE) | Self::Interleave(NodeMask::NONE))
    }
    /// The nodes that it allows.
    pub const fn nodes(self) -> NodeMask {
        match self {
            Self::Bind(nodes) => nodes,
            _ => NodeMask::ALL,
        }
    }
    /// The node to look at first, for a caller on `here`. That of an interleaved request is chosen by turn.
    pub const fn first(self, here: NodeId) -> NodeId {
        match self {
            Self::Preferred(node) => node,
            _ => here,
        }
    }
}

/// The place of a zone in the zonelist of requests that prefer node `from`: smaller comes first. The nearest nodes first,
/// among equally near ones the next by number, so that neighbours do not all fall back on the same one; on each node
/// `Normal` before `Dma32`, since some requests can use only `Dma32`.
///
/// ```
/// use pagemill_core::{NodeId, ZoneKind, zonelist_place};
/// let [a, b] = [0, 1].map(|id| NodeId::new(id).unwrap());
/// let own = |kind| zonelist_place(a, a, kind, 10);
/// assert!(own(ZoneKind::Normal) < own(ZoneKind::Dma32));
/// assert!(own(ZoneKind::Dma32) < zonelist_place(a, b, ZoneKind::Normal, 20));
/// ```
pub const fn zonelist_place(from: NodeId, node: NodeId, kind: ZoneKind, distance: u8) -> u32 {
    let turn = (node.get() + NodeId::COUNT_MAX - from.get()) % NodeId::COUNT_MAX;
    (distance as u32) << 16 | (turn as u32) << 8 | kind as u32
}

/// How many of `n` blocks the node at place `at` of `nodes` gets, when they are divided: the first nodes get the
/// remainder.
///
/// ```
/// use pagemill_core::interleave_share;
/// assert_eq!([0, 1, 2, 3].map(|at| interleave_share(64, 4, at)), [16; 4]);
/// assert_eq!([0, 1, 2].map(|at| interleave_share(5, 3, at)), [2, 2, 1]);
/// ```
pub const fn interleave_share(n: usize, nodes: usize, at: usize) -> usize {
    n / nodes + (at < n % nodes) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_go_round() {
        let mask: NodeMask = [1, 5, 63].into_iter().filter_map(NodeId::new).collect();
        let mut node = NodeId::ZERO;
        let seen: std::vec::Vec<usize> = (0..4)
            .map(|_| {
                node = mask.next_after(node).unwrap();
                node.get()
            })
            .collect();
        assert_eq!(seen, [1, 5, 63, 1]);
        assert_eq!(NodeMask::NONE.next_after(node), None);
        assert_eq!(NodeMask::only(node).next_after(node), Some(node));
    }

    #[test]
    fn shares_add_up() {
        for n in 0..200 {
            for nodes in 1..9 {
                let shares = (0..nodes).map(|at| interleave_share(n, nodes, at));
                assert_eq!(shares.sum::<usize>(), n);
            }
        }
    }
}
