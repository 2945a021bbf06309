//! What a request must find, and where: the rules of C3.6 to C3.8, on numbers.
//!
//! A request for many blocks goes through its zones in bulk, the nearest first, and takes from each the blocks above the low mark
//! in pageblocks of its mobility. If it finds none that way, or fewer than it must get, it tries blocks one by one: one block, or
//! until it has the number that it must get, or with `RETRY_MAYFAIL` until it has all or one attempt fails. These come from any
//! zone that may serve it, down to the mark that its flags reach, and from any pageblock. The allowed set, its nodemask and its
//! policy determine its zones and their order.
//!
//! If the lists were drained and all pageblocks have one mobility, all this is exact: how many blocks come, and from which zone.
//! Frames on lists, or an unknown mobility, make it an interval.
use crate::Ledger;
use crate::expect::{Bounds, Expect};
use crate::machine::Piece;
use crate::request::Request;
use pagemill::{Gfp, InvalidRequest, NodeId, NodeMask, Policy};

/// A piece of memory of the allocator, and its free frames.
#[derive(Clone, Debug)]
pub(crate) struct Zone {
    pub(crate) piece: Piece,
    pub(crate) expect: Expect,
    pub(crate) is_retired: bool,
    /// The caller brought it, and the system takes no part of it back.
    pub(crate) is_brought: bool,
}

impl Zone {
    /// The number of frames that stay free after every attempt.
    pub(crate) fn floor(&self, gfp: Gfp) -> usize {
        self.floors(gfp).1
    }
    /// The number of frames that stay free in bulk, and after every attempt that the flags allow.
    pub(crate) fn floors(&self, gfp: Gfp) -> (usize, usize) {
        let marks = self.piece.marks;
        let reserve = if gfp.contains(Gfp::DMA32) { 0 } else { marks.lowmem_reserve };
        let min = if gfp.contains(Gfp::ATOMIC) { marks.min - marks.min / 2 } else { marks.min };
        ((marks.low + reserve) as usize, (min + reserve) as usize)
    }
}

/// All memory, and the rules for its use.
#[derive(Clone, Debug)]
pub(crate) struct Zones {
    pub(crate) zones: Vec<Zone>,
    pub(crate) distances: Vec<Vec<u8>>,
    pub(crate) allowed: NodeMask,
    pub(crate) policy: Policy,
    /// The node that took the last turn, if it is known.
    pub(crate) turn: Option<NodeId>,
}

/// What is known about a request before it is made.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// The number of blocks that it gets.
    pub(crate) bounds: Bounds,
    /// The number of blocks from each zone, if it is determined.
    pub(crate) of_zone: Option<Vec<usize>>,
    /// Whether each zone may serve it.
    pub(crate) may_have: Vec<bool>,
    /// The preferred node; none if nodes take turns.
    pub(crate) wanted: Option<NodeId>,
    /// If nodes take turns for it and each has enough: those nodes, and the node of the first block if it is known.
    pub(crate) divided: Option<(NodeMask, Option<NodeId>)>,
    /// Whether its last attempt finds nothing, if that is determined.
    pub(crate) is_in_vain: Option<bool>,
}

/// One zone, from the view of one request.
#[derive(Clone, Copy)]
struct Has {
    frames: usize,
    own: usize,
    any: usize,
    low: usize,
    min: usize,
}

/// The number of blocks that are missing, and of those the number that must come.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    pub(crate) missing: usize,
    pub(crate) needed: usize,
}

/// Frames that may come back meanwhile, or that the marks do not protect.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hidden<'h> {
    /// Frames on lists, of each zone.
    pub(crate) listed: &'h [usize],
    /// Frames in the cache, of each zone.
    pub(crate) cached: &'h [usize],
    /// Acquisitions fail, or other threads use the allocator: every lower bound is nothing.
    pub(crate) is_unsure: bool,
}

impl Zones {
    pub(crate) fn in_use(&self) -> impl Iterator<Item = &Zone> {
        self.zones.iter().filter(|zone| !zone.is_retired)
    }
    /// The nodes that have memory.
    pub(crate) fn populated(&self) -> NodeMask {
        self.in_use().map(|zone| zone.piece.node).collect()
    }
    /// The zone of this frame.
    pub(crate) fn at(&mut self, frame: usize) -> Option<(usize, &mut Zone)> {
        self.zones.iter_mut().enumerate().find(|(_, zone)| zone.expect.has(frame))
    }
    pub(crate) fn has_dma32(&self) -> bool {
        self.in_use().any(|zone| zone.piece.is_dma32)
    }

    /// The zones in use, in the order in which a request tries them that prefers `from`: by distance, then by number in a circle;
    /// on each node ordinary memory first, then memory below 4 GiB; then in the order in which they were added.
    fn zonelist(&self, from: NodeId) -> Vec<usize> {
        let mut list: Vec<usize> = (0..self.zones.len()).filter(|&at| !self.zones[at].is_retired).collect();
        let distance = |node: NodeId| {
            let listed = self.distances.get(from.get()).and_then(|row| row.get(node.get()));
            listed.copied().unwrap_or(if from == node { 10 } else { 20 })
        };
        list.sort_by_key(|&at| {
            let piece = &self.zones[at].piece;
            let turn = (piece.node.get() + NodeId::COUNT_MAX - from.get()) % NodeId::COUNT_MAX;
            (distance(piece.node), turn, piece.is_dma32)
        });
        list
    }

    /// What `request` must find on node `here`, with so many blocks missing.
    pub(crate) fn plan(
        &self,
        ledger: &Ledger,
        request: &Request,
        here: NodeId,
        wanted: Wanted,
        hidden: Hidden<'_>,
    ) -> Plan {
        let policy = request.how.place.policy().unwrap_or(self.policy);
        let wanted = if request.tries_for_all() { Wanted { needed: wanted.missing, ..wanted } } else { wanted };
        let (gfp, nodes) = (request.gfp, request.how.place.nodes().and(self.allowed).and(policy.nodes()));
        let from = policy.first(here);
        let is_divided = matches!(policy, Policy::Interleave(_));
        let may_have = |zone: &Zone| {
            !zone.is_retired
                && nodes.contains(zone.piece.node)
                && (zone.piece.is_dma32 || !gfp.contains(Gfp::DMA32))
                && (zone.piece.node == from || is_divided || !gfp.contains(Gfp::THISNODE))
        };
        let may_have: Vec<bool> = self.zones.iter().map(may_have).collect();
        let list: Vec<usize> = self.zonelist(from).into_iter().filter(|&at| may_have[at]).collect();
        // Bulk stays on the nearest node that may serve it, unless the request may wait.
        let nearest = list.first().map(|&at| self.zones[at].piece.node);
        let is_far = gfp.may_wait() && !gfp.contains(Gfp::THISNODE);
        let is_in_bulk = |at: &usize| is_far || Some(self.zones[*at].piece.node) == nearest;
        let bulk: Vec<usize> = list.iter().copied().filter(is_in_bulk).collect();

        let has_marks = list.iter().any(|&at| self.zones[at].floors(gfp).0 > 0);
        let is_empty = hidden.listed.iter().all(|&listed| listed == 0);
        let is_exposed = is_empty || (gfp.may_wait() && !has_marks);
        let frames = request.order.pages().get();
        let has = |is_least: bool| -> Vec<Has> {
            let one = |(at, zone): (usize, &Zone)| {
                let own = zone.expect.own(ledger, gfp, request.order, hidden.listed[at] > 0 && !is_exposed);
                let hidden = if is_least && !is_exposed { hidden.listed[at] } else { 0 };
                let (low, min) = zone.floors(gfp);
                Has {
                    frames: zone.expect.free() - hidden,
                    own: if is_least { own.low } else { own.high }.saturating_sub(hidden),
                    any: zone.expect.any(ledger, request.order).saturating_sub(hidden),
                    low,
                    min,
                }
            };
            self.zones.iter().enumerate().map(one).collect()
        };
        let is_alone = self.in_use().count() == 1;
        let ways = Ways { list: &list, bulk: &bulk, is_alone, frames };
        let (least, most) = (ways.walk(&has(true), wanted), ways.walk(&has(false), wanted));
        let sum = |of_zone: &[usize]| of_zone.iter().sum::<usize>();
        let mut bounds = Bounds { low: sum(&least.of_zone), high: sum(&most.of_zone) };
        // Lists may have pages below the marks, and divided requests have an order of their own.
        if (!is_exposed && has_marks) || (is_divided && !is_far) {
            let all = |zones: &[Has]| list.iter().map(|&at| zones[at].any).sum::<usize>();
            bounds.high = wanted.missing.min(all(&has(false)));
        }
        if is_divided && (!is_far || gfp.contains(Gfp::THISNODE)) {
            bounds.low = bounds.low.min(wanted.needed.max(1));
        }
        // The zone of the blocks may depend on what lists hold, even if their number does not.
        let is_told = list.iter().all(|&at| {
            let own = self.zones[at].expect.own(ledger, gfp, request.order, false);
            own.low == own.high
        });
        let is_sure = is_told && is_empty && !is_divided && bounds.low == bounds.high;
        let among = self.among(request);
        let divided = self.has_shares(among, &has(true), &ways, wanted.missing);
        let mut plan = Plan {
            is_in_vain: is_sure.then_some(least.is_in_vain),
            of_zone: is_sure.then_some(least.of_zone),
            divided: (divided && is_empty).then(|| (among, self.turn.and_then(|turn| among.next_after(turn)))),
            wanted: nearest.filter(|_| !is_divided),
            bounds,
            may_have,
        };
        if is_divided && gfp.contains(Gfp::THISNODE) {
            plan.bounds.low = 0;
        }
        plan.reclaim(request, &ways, &has(false), wanted, hidden.cached);
        if hidden.is_unsure {
            plan = Plan { of_zone: None, divided: None, is_in_vain: None, ..plan };
            plan.bounds.low = 0;
        }
        plan
    }

    /// Why no state of the allocator could serve a request on node `here` that needs so many blocks at once.
    pub(crate) fn refusal(&self, request: &Request, here: NodeId, blocks: usize) -> Option<InvalidRequest> {
        let policy = request.how.place.policy().unwrap_or(self.policy);
        let is_here_only = request.gfp.contains(Gfp::THISNODE) && !matches!(policy, Policy::Interleave(_));
        let only = if is_here_only { NodeMask::only(policy.first(here)) } else { NodeMask::ALL };
        let nodes = request.how.place.nodes().and(policy.nodes()).and(only);
        let is_of_them = |zone: &&Zone| nodes.contains(zone.piece.node);
        if !self.zones.iter().any(|zone| is_of_them(&zone)) {
            return Some(InvalidRequest::NoSuchNode { nodes: nodes.as_bits() });
        }
        let is_reached = |zone: &&Zone| zone.piece.is_dma32 || !request.gfp.contains(Gfp::DMA32);
        let mut mine = self.in_use().filter(is_of_them).filter(is_reached).peekable();
        mine.peek()?;
        let frames = request.order.pages().get();
        let most = mine.map(|zone| zone.piece.pages.saturating_sub(zone.floor(request.gfp)) / frames).sum();
        (blocks > most).then_some(InvalidRequest::MoreThanManaged { blocks, order: request.order.get(), most })
    }

    /// The nodes that take turns for a request.
    fn among(&self, request: &Request) -> NodeMask {
        let nodes = request.how.place.nodes().and(self.allowed).and(self.populated());
        match request.how.place.policy().unwrap_or(self.policy) {
            Policy::Interleave(among) => among.and(nodes),
            _ => NodeMask::NONE,
        }
    }
    /// Records a request for `n` blocks: each block took a turn.
    pub(crate) fn take_turns(&mut self, request: &Request, n: usize) {
        let among = self.among(request);
        // Whole rounds end at the node where they began, except before the first turn.
        for _ in 0..n.checked_sub(1).and_then(|n| n.checked_rem(among.count())).map_or(0, |n| n + 1) {
            self.turn = self.turn.and_then(|turn| among.next_after(turn));
        }
    }

    /// Whether each of the nodes has its share above the low marks.
    fn has_shares(&self, among: NodeMask, has: &[Has], ways: &Ways<'_>, missing: usize) -> bool {
        let share = missing.div_ceil(among.count().max(1));
        let of_node = |node| {
            let zones = ways.list.iter().filter(|&&at| self.zones[at].piece.node == node);
            zones.map(|&at| has[at].in_bulk(ways.frames)).sum::<usize>()
        };
        !among.is_empty() && missing > 0 && among.iter().all(|node| of_node(node) >= share)
    }
}

impl Has {
    /// Blocks above the low mark, of the request's mobility.
    fn in_bulk(&self, frames: usize) -> usize {
        self.own.min(self.frames.saturating_sub(self.low) / frames)
    }
}

/// The zones that a request tries, in order.
struct Ways<'w> {
    list: &'w [usize],
    bulk: &'w [usize],
    /// Whether there is only one zone: then its lists are drained and other mobilities tried above the low mark too.
    is_alone: bool,
    /// The frames of one block.
    frames: usize,
}

struct Walked {
    of_zone: Vec<usize>,
    is_in_vain: bool,
}

impl Ways<'_> {
    fn walk(&self, zones: &[Has], wanted: Wanted) -> Walked {
        let mut of_zone = vec![0; zones.len()];
        let mut left = wanted.missing;
        if wanted.missing > 1 {
            for &at in self.bulk {
                of_zone[at] = zones[at].in_bulk(self.frames).min(left);
                left -= of_zone[at];
            }
        }
        let got = wanted.missing - left;
        let mut singles = left.min(wanted.needed.saturating_sub(got).max(usize::from(got == 0)));
        let mut tries = |limit: fn(&Has) -> (usize, usize)| {
            for &at in self.list {
                let (blocks, floor) = limit(&zones[at]);
                let room = blocks.min(zones[at].frames.saturating_sub(floor) / self.frames);
                let more = room.saturating_sub(of_zone[at]).min(singles);
                of_zone[at] += more;
                singles -= more;
            }
        };
        tries(|zone| (zone.own, zone.low));
        if self.is_alone {
            tries(|zone| (zone.any, zone.low));
        }
        tries(|zone| (zone.own, zone.min));
        tries(|zone| (zone.any, zone.min));
        Walked { of_zone, is_in_vain: singles > 0 }
    }
}

impl Plan {
    /// Adds what reclaim may bring.
    fn reclaim(&mut self, request: &Request, ways: &Ways<'_>, zones: &[Has], wanted: Wanted, cached: &[usize]) {
        use crate::request::Ends::Alone;
        let mine: usize = ways.list.iter().map(|&at| cached[at]).sum();
        let is_asked = request.gfp.may_wait() && request.how.ends == Alone && cached.iter().any(|&cached| cached > 0);
        if !is_asked || self.is_in_vain == Some(false) {
            return;
        }
        // Reclaim serves one block at a time: no more than must come, or one.
        let single = wanted.needed.max(self.bounds.high + 1).min(wanted.missing);
        let has_marks = ways.list.iter().any(|&at| zones[at].low > 0);
        // One round of reclaim brings 64 pages, and there may be only one.
        let total = cached.iter().sum::<usize>();
        let is_of_use = mine == total || total <= 64;
        if ways.frames == 1 && !has_marks && is_of_use && self.is_in_vain == Some(true) {
            // The whole cache comes back, as long as each round brings pages.
            let total = (self.bounds.high + mine).min(single.max(self.bounds.high));
            self.bounds = Bounds { low: total, high: total };
        } else {
            self.bounds.high = (self.bounds.high + mine).min(single.max(self.bounds.high));
        }
        (self.of_zone, self.is_in_vain, self.divided) = (None, None, None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::Ask;
    use crate::request::{Ends, How, Place, node_of};
    use pagemill::{Mobility, Order, Watermarks};

    fn zones(pieces: &[(usize, usize, u32)]) -> (Ledger, Zones) {
        let mut first = 0;
        let zone = |&(node, pages, min): &(usize, usize, u32)| {
            let numbers = first..first + pages;
            first = numbers.end;
            let marks = Watermarks::above(min);
            let piece = Piece { node: node_of(node), is_dma32: false, marks, pages };
            Zone { piece, expect: Expect::new(numbers), is_retired: false, is_brought: false }
        };
        let zones = pieces.iter().map(zone).collect();
        let distances = vec![vec![10, 20, 30], vec![20, 10, 30], vec![30, 30, 10]];
        let range = 1 << 30..(1 << 30) + first * pagemill::PAGE_SIZE;
        (Ledger::over(&[range]), Zones { zones, distances, allowed: NodeMask::ALL, policy: Policy::Local, turn: None })
    }

    fn plan(of: &(Ledger, Zones), gfp: Gfp, order: Order, ask: Ask) -> Plan {
        let how = How { is_drained: true, is_dma32: false, place: Place::Anywhere, ends: Ends::Alone, account: None };
        let wanted = Wanted { missing: ask.most(), needed: ask.least() };
        let none = vec![0; of.1.zones.len()];
        let hidden = Hidden { listed: &none, cached: &none, is_unsure: false };
        of.1.plan(&of.0, &Request { gfp, order, ask, how }, node_of(1), wanted, hidden)
    }

    fn brings(of: &(Ledger, Zones), gfp: Gfp, ask: Ask) -> Vec<usize> {
        plan(of, gfp, Order::ZERO, ask).of_zone.unwrap()
    }

    #[test]
    fn a_bulk_request_leaves_other_mobilities_alone_unless_it_finds_nothing_else() {
        let mut of = zones(&[(0, 600, 0)]);
        let (unmovable, movable) = (Gfp::KERNEL, Gfp::KERNEL | Gfp::MOVABLE);
        assert_eq!(brings(&of, movable, Ask::UpTo(999)), [600]);
        of.1.zones[0].expect.take(512, Order::ZERO, Some(Mobility::Unmovable)).unwrap();
        assert_eq!(brings(&of, unmovable, Ask::UpTo(999)), [599]);
        assert_eq!(brings(&of, movable, Ask::UpTo(999)), [512]);
        assert_eq!(brings(&of, movable | Gfp::RETRY_MAYFAIL, Ask::UpTo(999)), [599]);
        assert_eq!(brings(&of, movable, Ask::AtLeast(500, 999)), [512]);
        assert_eq!(brings(&of, movable, Ask::AtLeast(520, 999)), [520]);
        let mut of = zones(&[(0, 512, 0)]);
        of.1.zones[0].expect.take(0, Order::ZERO, Some(Mobility::Unmovable)).unwrap();
        assert_eq!(brings(&of, movable, Ask::UpTo(999)), [1]);
    }

    #[test]
    fn bulk_stays_above_low_and_single_pages_above_min() {
        let of = zones(&[(1, 600, 100)]);
        assert_eq!(brings(&of, Gfp::NOWAIT, Ask::UpTo(999)), [600 - 125]);
        assert_eq!(brings(&of, Gfp::NOWAIT | Gfp::RETRY_MAYFAIL, Ask::UpTo(999)), [500]);
        assert_eq!(brings(&of, Gfp::NOWAIT, Ask::Exact(999)), [500]);
        assert_eq!(brings(&of, Gfp::ATOMIC, Ask::Exact(999)), [550]);
        let three = Order::new(3).unwrap();
        assert_eq!(plan(&of, Gfp::NOWAIT, three, Ask::UpTo(99)).of_zone, Some(vec![475 / 8]));
    }

    #[test]
    fn requests_that_may_wait_go_on_with_the_next_node() {
        let of = zones(&[(0, 100, 0), (1, 100, 0), (2, 100, 0)]);
        assert_eq!(brings(&of, Gfp::KERNEL, Ask::UpTo(250)), [100, 100, 50]);
        assert_eq!(brings(&of, Gfp::NOWAIT, Ask::UpTo(250)), [0, 100, 0]);
        assert_eq!(brings(&of, Gfp::NOWAIT | Gfp::RETRY_MAYFAIL, Ask::UpTo(250)), [100, 100, 50]);
        assert_eq!(brings(&of, Gfp::KERNEL | Gfp::THISNODE, Ask::UpTo(250)), [0, 100, 0]);
        let is_in_vain = |gfp| plan(&of, gfp | Gfp::THISNODE, Order::ZERO, Ask::UpTo(250)).is_in_vain;
        assert_eq!(is_in_vain(Gfp::KERNEL), Some(false));
        assert_eq!(is_in_vain(Gfp::KERNEL | Gfp::RETRY_MAYFAIL), Some(true));
    }
}
