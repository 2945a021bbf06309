//! The slow path of one block: zone by zone down to the marks, then reclaim, then waiting (C3.6).
//!
//! Cold and out of line as a whole. Bulk requests come here for one block at a time, when nothing is left in bulk.
use crate::allocator::Inner;
use crate::nodes::Nodes;
use crate::reclaim::{self, WeakAllocator};
use crate::wait::{Cancel, Patience};
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::{Error, Exhausted, Gfp, Invalid, Level, NodeId, NodeMask, Order, Policy, Why, step};

/// What a request may have, and from where.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ask<'c> {
    pub(crate) gfp: Gfp,
    pub(crate) order: Order,
    /// Nodes that the caller allows; the allocator's allowed set is looked at besides, at every step.
    pub(crate) nodes: NodeMask,
    pub(crate) policy: Policy,
    pub(crate) patience: Patience<'c>,
}

impl<'c> Ask<'c> {
    /// For a request that says nothing but its flags.
    pub(crate) fn plain(nodes: &Nodes, gfp: Gfp, order: Order) -> Self {
        Self { gfp, order, nodes: NodeMask::ALL, policy: nodes.policy(), patience: Patience::default() }
    }

    /// The nodes that its blocks come from in turn; none where they don't.
    pub(crate) fn among(&self, nodes: &Nodes) -> NodeMask {
        match self.policy {
            Policy::Interleave(among) => among.and(self.nodes).and(nodes.allowed()).and(nodes.populated()),
            _ => NodeMask::NONE,
        }
    }

    /// The node to begin with, for `n` blocks: where they come from nodes in turn, each takes one. `THISNODE` without
    /// another word is that of the caller's CPU.
    pub(crate) fn first_node(&self, nodes: &Nodes, n: usize) -> NodeId {
        nodes.take_turns(self.among(nodes), n).unwrap_or_else(|| self.policy.first(nodes.node()))
    }

    /// May it have memory of this arena, just now?
    #[inline]
    pub(crate) fn allows(&self, nodes: &Nodes, from: NodeId, arena: &Inner) -> bool {
        let allowed = nodes.allowed().and(self.nodes).and(self.policy.nodes());
        allowed.contains(arena.node)
            && arena.kind.serves(self.gfp)
            && !arena.is_retired()
            && (arena.node == from || !self.gfp.contains(Gfp::THISNODE))
    }
}

/// Rounds of reclaim that leave a request unserved, whatever shrinkers say that they freed, before it stands in line, and
/// there once more before it gives up: as many as the kernel's `MAX_RECLAIM_RETRIES`.
const ROUNDS: u32 = 16;
/// How often a request looks again for frames that others have in their hands, on the way between a list and the zone:
/// at once at first, then every 50 us, 20 ms in all, in which even a thread that was preempted with frames in its hands
/// runs again.
const TURNS: u32 = 400;
const AT_ONCE: u32 = 32;

/// A block, and the arena it is of.
pub(crate) type Taken = (&'static Inner, u32);

impl Nodes {
    /// The address of one page, for a request that its CPU's list could not serve.
    #[cold]
    #[inline(never)]
    pub(crate) fn alloc_page_slow(&self, gfp: Gfp, owner: impl Fn() -> WeakAllocator) -> Result<usize, Error> {
        step!("Nodes::alloc_page_slow");
        self.alloc_block(&Ask::plain(self, gfp, Order::ZERO), owner)
    }

    /// The address of one block.
    pub(crate) fn alloc_block(&self, ask: &Ask<'_>, owner: impl Fn() -> WeakAllocator) -> Result<usize, Error> {
        self.check(ask.gfp)?;
        if ask.gfp.contains(Gfp::ACCOUNT) {
            return Err(Invalid::NoAccount.into());
        }
        if let Some((arena, pfn)) = self.take_one(ask, ask.first_node(self, 1), &owner)? {
            return Ok(arena.arena.addr_of(pfn));
        }
        self.count_shortfall();
        Err(Exhausted { wanted: 1, got: 0, order: ask.order.get(), why: self.why(ask) }.into())
    }

    /// Why a request got no more (C3.4).
    #[cold]
    pub(crate) fn why(&self, ask: &Ask<'_>) -> Why {
        let from = ask.policy.first(self.node());
        let zones = || self.zonelist(from).iter().filter(|arena| ask.allows(self, from, arena));
        let floor = |arena: &Inner| arena.marks.floor(ask.gfp, Level::Min) as usize;
        let is_enough = |arena: &Inner| arena.zone.free_frames() >= floor(arena) + ask.order.frames() as usize;
        if ask.patience.cancel.is_some_and(Cancel::is_cancelled) {
            Why::Cancelled
        } else if ask.gfp.may_wait() && reclaim::is_reclaiming() {
            Why::Reclaiming
        } else if zones().next().is_none() {
            Why::NotAllowed
        } else if self.has_failed_on_purpose(ask.gfp) && zones().any(|arena| is_enough(arena)) {
            Why::Fault
        } else if ask.gfp.may_wait() && ask.patience.is_over() {
            Why::TimedOut
        } else if zones().any(|arena| floor(arena) > 0 && arena.zone.free_frames() > 0) {
            Why::BelowMark
        } else {
            Why::Exhausted
        }
    }

    /// A request came back short.
    #[cold]
    pub(crate) fn count_shortfall(&self) {
        self.first().stats_here().shortfalls.fetch_add(1, Relaxed);
    }

    /// One block by every means that the request's flags allow, from node `from` on. Marked as handed out, zeroed if
    /// asked for.
    ///
    /// # Errors
    /// [`Invalid::ReclaimInShrinker`]: a request that may reclaim, from inside a shrinker.
    pub(crate) fn take_one(
        &self,
        ask: &Ask<'_>,
        from: NodeId,
        owner: &dyn Fn() -> WeakAllocator,
    ) -> Result<Option<Taken>, Error> {
        step!("Nodes::take_one");
        if !ask.gfp.may_wait() {
            return Ok(self.try_levels(ask, from, None));
        }
        if reclaim::is_reclaiming() {
            return Err(Invalid::ReclaimInShrinker.into());
        }
        // Nobody overtakes who waits.
        if !self.waits.is_awaited()
            && let Some(taken) = self.try_levels(ask, from, Some(owner))
        {
            return Ok(Some(taken));
        }
        Ok(self.take_by_reclaim(ask, from).or_else(|| self.take_by_waiting(ask, from)))
    }

    /// What lies above the low marks, then what lies above those that the flags reach down to; `owner` is told to
    /// [`wake`](reclaim::Reclaim::wake).
    fn try_levels(&self, ask: &Ask<'_>, from: NodeId, owner: Option<&dyn Fn() -> WeakAllocator>) -> Option<Taken> {
        let has_marks = self.all().iter().any(|arena| arena.marks.low > 0);
        if has_marks && let Some(taken) = self.try_zones(ask, from, Level::Low) {
            return Some(taken);
        }
        if has_marks {
            self.reclaim.wake(owner);
        }
        self.try_zones(ask, from, Level::Min)
    }

    /// Every zone of the list: pages of the request's mobility; then all lists drained, if it may wait; then pageblocks of
    /// another mobility.
    fn try_zones(&self, ask: &Ask<'_>, from: NodeId, level: Level) -> Option<Taken> {
        let own = |arena: &&'static Inner| Some((*arena, arena.take_own(ask, level)?));
        let zones = || self.zonelist(from).iter().filter(|arena| ask.allows(self, from, arena)).copied();
        let taken = zones().find_map(|arena| own(&arena)).or_else(|| {
            if level == Level::Low && self.all().len() > 1 {
                return None; // Another zone comes before a drain.
            }
            let drained: usize = if ask.gfp.may_wait() { zones().map(|arena| arena.drain_all()).sum() } else { 0 };
            let again = if drained > 0 { zones().find_map(|arena| own(&arena)) } else { None };
            again.or_else(|| zones().find_map(|arena| Some((arena, arena.steal_other(ask, level)?))))
        });
        taken.inspect(|(arena, _)| {
            arena.shut_lists_below_low();
            self.count_node(ask, from, arena, ask.order.frames() as usize);
        })
    }

    /// Counts pages of `arena` that a request got that wanted them of node `from` (C3.13): hits are what is left.
    pub(crate) fn count_node(&self, ask: &Ask<'_>, from: NodeId, arena: &Inner, pages: usize) {
        let pages = pages as u64;
        // A node that cannot serve it cannot be missed: the nearest that can stands for it.
        let wanted =
            self.zonelist(from).iter().find(|arena| ask.allows(self, from, arena)).map_or(from, |first| first.node);
        if arena.node != wanted {
            arena.stats_here().numa_miss.fetch_add(pages, Relaxed);
            if let Some(wanted) = self.zonelist(wanted).first() {
                wanted.stats_here().numa_foreign.fetch_add(pages, Relaxed);
            }
        } else if matches!(ask.policy, Policy::Interleave(_)) {
            arena.stats_here().numa_interleave.fetch_add(pages, Relaxed);
        }
    }

    /// Rounds of direct reclaim, each followed by another try.
    fn take_by_reclaim(&self, ask: &Ask<'_>, from: NodeId) -> Option<Taken> {
        if self.waits.is_awaited() || !self.reclaim.has_shrinkers() {
            return None;
        }
        let rounds = if ask.gfp.contains(Gfp::NORETRY) { 1 } else { ROUNDS };
        for _ in 0..rounds {
            if ask.patience.is_over() {
                break;
            }
            let came = self.reclaim.direct(ask.gfp, ask.order.frames() as usize);
            // What came back may stand on lists, or in blocks of another mobility.
            if let Some(taken) = self.try_levels(ask, from, None) {
                return Some(taken);
            }
            if came == 0 {
                break; // Now it is a matter of time: others come first if they came first.
            }
        }
        None
    }

    /// Waits for its turn: for as long as the request says, as long as shrinkers may still bring something, or as
    /// frames are under way in others' hands.
    fn take_by_waiting(&self, ask: &Ask<'_>, from: NodeId) -> Option<Taken> {
        let is_endless = ask.gfp.contains(Gfp::NOFAIL) || ask.patience.deadline.is_some();
        if ask.gfp.contains(Gfp::NORETRY) && !is_endless {
            return None;
        }
        let has_shrinkers = self.reclaim.has_shrinkers();
        if !is_endless && !has_shrinkers && !self.waits.is_awaited() {
            return self.take_from_others_hands(ask, from);
        }
        let rounds = if ask.gfp.contains(Gfp::RETRY_MAYFAIL) { 4 * ROUNDS } else { ROUNDS };
        self.shut_lists();
        let _opens = OpensLists(self);
        self.waits.wait(&ask.patience, (!is_endless).then_some(rounds), || {
            // Whoever stopped waiting just then may have opened them.
            self.shut_lists();
            if has_shrinkers {
                self.reclaim.direct(ask.gfp, ask.order.frames() as usize);
            }
            self.try_levels(ask, from, None)
        })
    }

    fn take_from_others_hands(&self, ask: &Ask<'_>, from: NodeId) -> Option<Taken> {
        if ask.order != Order::ZERO || self.faults.get().is_some() {
            return None; // Single frames under way make no block; and what is refused on purpose stays so.
        }
        let is_under_way = || self.all().iter().any(|arena| arena.has_frames_under_way(ask.gfp));
        for turn in 0..TURNS {
            if !is_under_way() || ask.patience.is_over() {
                return None;
            }
            if turn < AT_ONCE {
                std::thread::yield_now();
            } else {
                std::thread::sleep(core::time::Duration::from_micros(50));
            }
            if let Some(taken) = self.try_levels(ask, from, None) {
                return Some(taken);
            }
        }
        None
    }

    /// What is freed from now on goes to the zones, where the first of those who wait finds it.
    fn shut_lists(&self) {
        self.all().iter().for_each(|arena| arena.shut_lists());
    }
}

/// When a wait is over, however it ends: a shrinker may have unwound.
struct OpensLists<'n>(&'n Nodes);

impl Drop for OpensLists<'_> {
    fn drop(&mut self) {
        self.0.all().iter().for_each(|arena| arena.open_lists());
    }
}

impl Inner {
    /// One block of the request's mobility: from the list or the zone.
    fn take_own(&self, ask: &Ask<'_>, level: Level) -> Option<u32> {
        match ask.order {
            Order::ZERO => self.take_page(ask.gfp, level),
            order => self.take_block(ask.gfp, order, level),
        }
    }
    /// One block from a pageblock of another mobility.
    fn steal_other(&self, ask: &Ask<'_>, level: Level) -> Option<u32> {
        match ask.order {
            Order::ZERO => self.steal_page(ask.gfp, level),
            order => self.steal_block(ask.gfp, order, level),
        }
    }
}
