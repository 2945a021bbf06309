//! The options of a request: its nodes, how long it tries, the account that it is charged to.
use crate::op::Ask;
use crate::unit::Unit;
use core::fmt;
use pagemill::{Account, AtLeast, Bulk, Cancel, Gfp, NodeId, NodeMask, Order, PageCount, Policy};
use std::sync::LazyLock;
use std::time::Duration;

/// A request for one block, or for many.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Its flags.
    pub gfp: Gfp,
    /// The order of its blocks.
    pub order: Order,
    /// The number of blocks.
    pub ask: Ask,
    /// The other options. For a single request only whether the lists are drained first.
    pub how: How,
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { gfp, order, ask, how } = self;
        let base = match (gfp.may_wait(), gfp.may_io(), gfp.may_fs(), gfp.contains(Gfp::ATOMIC)) {
            (true, true, true, _) => "KERNEL",
            (true, true, false, _) => "NOFS",
            (true, false, ..) => "NOIO",
            (false, _, _, true) => "ATOMIC",
            (false, ..) => "NOWAIT",
        };
        write!(f, "{base}")?;
        let flags = [
            ("MOVABLE", Gfp::MOVABLE),
            ("RECLAIMABLE", Gfp::RECLAIMABLE),
            ("ZERO", Gfp::ZERO),
            ("DMA32", Gfp::DMA32),
            ("THISNODE", Gfp::THISNODE),
            ("NORETRY", Gfp::NORETRY),
            ("RETRY_MAYFAIL", Gfp::RETRY_MAYFAIL),
        ];
        let set = flags.iter().filter(|(_, flag)| gfp.contains(*flag));
        set.into_iter().try_for_each(|(name, _)| write!(f, "|{name}"))?;
        write!(f, " {ask:?} of order {}, {how:?}", order.get())
    }
}

/// See [`Request::how`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct How {
    /// All lists are drained first, so that the result depends only on the frames that are out.
    pub is_drained: bool,
    /// Memory below 4 GiB, if there is any.
    pub is_dma32: bool,
    /// Its nodes.
    pub place: Place,
    /// The limit of its waiting and reclaim.
    pub ends: Ends,
    /// The pages of the account that is charged.
    pub account: Option<usize>,
}

/// The nodes from which a request takes its pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// Those of the allocator's policy.
    Anywhere,
    /// Those of the allocator's policy, within a nodemask.
    Among(NodeMask),
    /// Bound to these nodes.
    Bind(NodeMask),
    /// This node first.
    Preferred(usize),
    /// This node first, and only these nodes.
    PreferredAmong(usize, NodeMask),
    /// These nodes in turn.
    Interleave(NodeMask),
    /// Only this node.
    Exactly(usize),
}

impl Place {
    pub(crate) fn among(self, nodes: NodeMask) -> Self {
        match self {
            Self::Preferred(node) => Self::PreferredAmong(node, nodes),
            other => other,
        }
    }

    /// The policy, if it sets one.
    pub(crate) fn policy(self) -> Option<Policy> {
        match self {
            Self::Anywhere | Self::Among(_) => None,
            Self::Bind(nodes) => Some(Policy::Bind(nodes)),
            Self::Interleave(nodes) => Some(Policy::Interleave(nodes)),
            Self::Preferred(node) | Self::PreferredAmong(node, _) | Self::Exactly(node) => {
                Some(Policy::Preferred(node_of(node)))
            }
        }
    }
    /// The nodemask.
    pub(crate) fn nodes(self) -> NodeMask {
        match self {
            Self::Among(nodes) | Self::PreferredAmong(_, nodes) => nodes,
            Self::Exactly(node) => NodeMask::only(node_of(node)),
            _ => NodeMask::ALL,
        }
    }
}

pub(crate) fn node_of(id: usize) -> NodeId {
    NodeId::new(id).unwrap_or(NodeId::ZERO)
}

/// An event that ends a waiting request before its rounds are over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ends {
    /// None.
    Alone,
    /// A deadline that has passed.
    Expired,
    /// A token that is cancelled already.
    Cancelled,
    /// A token that is cancelled already, and a deadline far away.
    CancelledBeforeDeadline,
}

impl Request {
    /// Whether it may be served in part and yet tries for all blocks.
    pub(crate) fn tries_for_all(&self) -> bool {
        self.ask.least() == 0 && self.gfp.contains(Gfp::RETRY_MAYFAIL)
    }
    /// The bulk request: `up_to(n)` asks as `at_least(0, n)` does, and `exact(n)` as `at_least(n, n)`.
    pub(crate) fn bulk<'a, T: Unit>(&self, account: &'a Account) -> Bulk<'a, AtLeast, T> {
        self.describe(Bulk::at_least(self.ask.least(), self.ask.most()), account)
    }

    /// A request for so many, with the rest of what this one says.
    pub(crate) fn describe<'a, N, T: Unit>(&self, bulk: Bulk<'a, N, T>, account: &'a Account) -> Bulk<'a, N, T> {
        static CANCELLED: LazyLock<Cancel> = LazyLock::new(|| {
            let cancel = Cancel::new();
            cancel.cancel();
            cancel
        });
        let mut bulk = T::of_order(bulk, self.order).gfp(self.gfp).nodes(self.how.place.nodes());
        if let Some(policy) = self.how.place.policy() {
            bulk = bulk.policy(policy);
        }
        if matches!(self.how.ends, Ends::Expired) {
            bulk = bulk.timeout(Duration::ZERO);
        }
        if matches!(self.how.ends, Ends::CancelledBeforeDeadline) {
            bulk = bulk.timeout(Duration::from_secs(3600));
        }
        if self.is_cancelled() {
            bulk = bulk.cancel(&CANCELLED);
        }
        if self.how.account.is_some() {
            bulk = bulk.gfp(self.gfp | Gfp::ACCOUNT).account(account);
        }
        bulk
    }

    /// The account that it is charged to.
    pub(crate) fn account(&self) -> Account {
        Account::new(PageCount::new(self.how.account.unwrap_or(0)))
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        matches!(self.how.ends, Ends::Cancelled | Ends::CancelledBeforeDeadline)
    }
}
