//! Pages in bulk: four forms over one engine (C3.1).
//!
//! The engine takes frames in batches of at most 64 (one exclusive section each, C3.5), prepares each batch outside
//! of the section (C3.9) and hands it to the form's sink: slots of an array, the tail of a list, a function, runs.
//! Requests of at most [`ListPolicy::LARGE`] pages are served from the CPU's list and refill it; larger ones pass it
//! by, since they would only empty it.
use crate::account::Account;
use crate::allocator::{Allocator, Inner};
use crate::arena::Arena;
use crate::free::free_word;
use crate::handle::{Owned, Pages, TENTATIVE, slots_as_words};
use crate::list::List;
use crate::nodes::Nodes;
use crate::run::{Run, Runs};
use crate::slow::Ask;
use crate::wait::{Cancel, Patience};
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::{
    Error, Exhausted, Gfp, Invalid, Level, ListPolicy, NodeId, NodeMask, Order, PAGE_SHIFT, PAGE_SIZE, PageCount,
    Policy, interleave_share,
};
use pagemill_sys::Batch;
use pagemill_sys::lists::BulkCall;
use std::time::{Duration, Instant};

/// A bulk request: how many, of what order, and what it may do for them.
///
/// Counts are of blocks of the request's order. In the array form they are of *occupied slots* among the first n,
/// as the kernel's array form counts.
///
/// ```
/// use pagemill::{Bulk, Gfp, Order};
/// let request = Bulk::at_least(16, 64).gfp(Gfp::NOWAIT).order(Order::new(2)?);
/// # let _ = request;
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Bulk<'a> {
    least: usize,
    most: usize,
    gfp: Gfp,
    order: Order,
    nodes: NodeMask,
    policy: Option<Policy>,
    deadline: Option<Instant>,
    cancel: Option<&'a Cancel>,
    account: Option<&'a Account>,
}

impl<'a> Bulk<'a> {
    /// The most blocks that one request names, as in the kernel's interface.
    pub const COUNT_MAX: usize = i32::MAX as usize;

    /// Up to `n`; fewer are no error.
    #[inline]
    pub const fn up_to(n: usize) -> Self {
        Self::at_least(0, n)
    }
    /// Up to `n`, at least `k`; fewer than `k` are an error, and then nothing is delivered.
    #[inline]
    pub const fn at_least(k: usize, n: usize) -> Self {
        Self {
            least: k,
            most: n,
            gfp: Gfp::KERNEL,
            order: Order::ZERO,
            nodes: NodeMask::ALL,
            policy: None,
            deadline: None,
            cancel: None,
            account: None,
        }
    }
    /// All `n`, or an error and nothing.
    #[inline]
    pub const fn exact(n: usize) -> Self {
        Self::at_least(n, n)
    }
    /// What the request may do; [`Gfp::KERNEL`] unless said.
    #[inline]
    #[must_use]
    pub const fn gfp(self, gfp: Gfp) -> Self {
        Self { gfp, ..self }
    }
    /// The order of its blocks; 0 unless said.
    #[inline]
    #[must_use]
    pub const fn order(self, order: Order) -> Self {
        Self { order, ..self }
    }

    /// Only from these nodes; every node unless said. With one node and `THISNODE` this is the node-exact form (C3.12).
    #[inline]
    #[must_use]
    pub const fn nodes(self, nodes: NodeMask) -> Self {
        Self { nodes, ..self }
    }
    /// Where to look for memory; the allocator's policy unless said.
    #[inline]
    #[must_use]
    pub const fn policy(self, policy: Policy) -> Self {
        Self { policy: Some(policy), ..self }
    }
    /// From this node alone, or fewer (C3.12: the node-exact form).
    ///
    /// ```
    /// use pagemill::{Allocator, Bulk, NodeId, PageList};
    /// let mut list = PageList::new();
    /// Allocator::global().alloc_pages_bulk_list(Bulk::up_to(64).exact_node(NodeId::ZERO), &mut list)?;
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    #[inline]
    #[must_use]
    pub const fn exact_node(self, node: NodeId) -> Self {
        self.policy(Policy::Preferred(node)).nodes(NodeMask::only(node))
    }
    /// A request that may wait does so for this long at most, also where nothing promises that memory comes back. Unless
    /// said it waits while shrinkers may bring something, a bounded number of rounds.
    #[must_use]
    pub fn deadline(self, after: Duration) -> Self {
        // What lies beyond the clock's end is no deadline, but a wait that only `cancel` ends.
        Self { deadline: Some(Instant::now().checked_add(after).unwrap_or_else(far)), ..self }
    }
    /// Ends the request's wait when `cancel` says so.
    #[inline]
    #[must_use]
    pub const fn cancel(self, cancel: &'a Cancel) -> Self {
        Self { cancel: Some(cancel), ..self }
    }
    /// The account that a request with [`Gfp::ACCOUNT`] is charged to.
    #[inline]
    #[must_use]
    pub const fn account(self, account: &'a Account) -> Self {
        Self { account: Some(account), ..self }
    }

    /// Does it take memory wherever a plain request does?
    #[inline]
    fn is_anywhere(&self) -> bool {
        self.policy.is_none() && self.nodes.as_bits() == NodeMask::ALL.as_bits()
    }

    fn ask(&self, nodes: &Nodes) -> Ask<'a> {
        Ask {
            gfp: self.gfp,
            order: self.order,
            nodes: self.nodes,
            policy: self.policy.unwrap_or(nodes.policy()),
            patience: Patience { deadline: self.deadline, cancel: self.cancel },
        }
    }

    #[inline]
    fn check<T: Owned>(self, nodes: &Nodes) -> Result<(), Error> {
        let is_usual =
            self.least <= self.most && self.most <= Self::COUNT_MAX && self.order == Order::ZERO && self.gfp.is_plain();
        if is_usual { Ok(()) } else { self.check_each(nodes, T::ANY_ORDER) }
    }

    #[cold]
    #[inline(never)]
    fn check_each(self, nodes: &Nodes, is_any_order: bool) -> Result<(), Error> {
        if self.most > Self::COUNT_MAX {
            return Err(Invalid::CountTooLarge { count: self.most, max: Self::COUNT_MAX }.into());
        }
        if self.least > self.most {
            return Err(Invalid::AtLeastAboveUpTo { at_least: self.least, up_to: self.most }.into());
        }
        if !is_any_order && self.order != Order::ZERO {
            return Err(Invalid::OrderOfPages { order: self.order.get() }.into());
        }
        if self.gfp.contains(Gfp::ACCOUNT) && self.account.is_none() {
            return Err(Invalid::NoAccount.into());
        }
        nodes.check(self.gfp)
    }

    /// How many slots are occupied after an array request that left holes and filled `added`; an error if it had to take
    /// those back.
    #[cold]
    #[inline(never)]
    fn fell_short(self, words: &[usize], added: usize) -> Result<usize, Error> {
        let occupied = words.iter().filter(|&&word| word != 0).count();
        if occupied < self.least { Err(self.missed(occupied + added)) } else { Ok(occupied) }
    }

    #[cold]
    fn missed(self, got: usize) -> Error {
        Exhausted { wanted: self.least, got, order: self.order.get() }.into()
    }
}

/// Why a request came back with fewer than it asked for (C3.4).
///
/// ```
/// use pagemill::{Allocator, Bulk, PageList, Shortfall};
/// let allocator = Allocator::builder().pages(10).build()?;
/// let mut list = PageList::new();
/// let delivered = allocator.alloc_pages_bulk_list(Bulk::up_to(64), &mut list)?;
/// assert_eq!((delivered.blocks, delivered.shortfall), (10, Some(Shortfall::Exhausted { missing: 54 })));
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Shortfall {
    /// The zones have no more.
    Exhausted {
        /// How many blocks are missing.
        missing: usize,
    },
    /// What they have lies below the mark that the request's flags reach down to.
    BelowMark {
        /// How many blocks are missing.
        missing: usize,
    },
    /// No node that the request names is allowed, or has memory.
    NotAllowed {
        /// How many blocks are missing.
        missing: usize,
    },
    /// The request's account has no more.
    Account {
        /// How many blocks are missing.
        missing: usize,
    },
    /// The request was cancelled.
    Cancelled {
        /// How many blocks are missing.
        missing: usize,
    },
}

/// What a list, callback or runs request brought.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Delivered {
    /// Blocks delivered by this call (pages, for order 0).
    pub blocks: usize,
    /// Why not more.
    pub shortfall: Option<Shortfall>,
}

/// What an array request brought (C3.2), over the array's first n slots.
///
/// ```
/// use pagemill::{Allocator, Bulk, Page};
/// let mut slots: [Option<Page>; 8] = [const { None }; 8];
/// slots[1] = Some(Allocator::global().alloc_page(pagemill::Gfp::KERNEL)?);
/// let filled = Allocator::global().alloc_pages_bulk_array(Bulk::up_to(6), &mut slots)?;
/// assert_eq!((filled.added, filled.occupied, filled.first_hole), (5, 6, 6)); // of six slots: full
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Filled {
    /// Slots that this call filled.
    pub added: usize,
    /// Slots that are occupied now.
    pub occupied: usize,
    /// The first empty slot, n if there is none. All before it are occupied.
    pub first_hole: usize,
    /// Why some are still empty.
    pub shortfall: Option<Shortfall>,
}

impl Allocator {
    /// Fills the empty slots among the first n of `slots`, in ascending order (the array form). n is the request's
    /// count. Slots from n on are neither read nor written.
    ///
    /// # Errors
    /// [`Error::Invalid`]; [`Error::Exhausted`] where the request names a least number that it did not reach. The
    /// array is as it was then.
    ///
    /// ```
    /// use pagemill::{Allocator, Bulk, Page};
    /// let mut slots: Vec<Option<Page>> = (0..64).map(|_| None).collect();
    /// let filled = Allocator::global().alloc_pages_bulk_array(Bulk::exact(64), &mut slots)?;
    /// assert_eq!(filled.occupied, 64);
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    #[inline]
    pub fn alloc_pages_bulk_array<T: Owned>(
        &self,
        request: Bulk<'_>,
        slots: &mut [Option<T>],
    ) -> Result<Filled, Error> {
        let nodes = self.nodes();
        request.check::<T>(nodes)?;
        let n = request.most;
        if n > slots.len() {
            return Err(Invalid::ArrayTooShort { slots: slots.len(), count: n }.into());
        }
        let words = slots_as_words(&mut slots[..n]);
        if let [word @ 0] = words
            && request.order == Order::ZERO
            && request.is_anywhere()
            && let Some(inner) = nodes.here()
            && let Some(pfn) = inner.pop_one(request.gfp)
        {
            // One page goes the single path, without the engine's table of a batch.
            *word = inner.arena.addr_of(pfn);
            return Ok(Filled { added: 1, occupied: 1, first_hole: 1, shortfall: None });
        }
        // Two words in registers come back from where the work is. What the caller sees is made of them here, where it
        // need not be written to memory: copied from there, it would wait for those stores.
        let (added, first_hole) = self.fill(request, words);
        if first_hole == n {
            return Ok(Filled { added, occupied: n, first_hole, shortfall: None });
        }
        let occupied = request.fell_short(words, added)?;
        Ok(Filled { added, occupied, first_hole, shortfall: self.shortfall(&request, occupied) })
    }

    /// Adds blocks to the tail of a list, which need not be empty (the list form).
    ///
    /// # Errors
    /// As [`alloc_pages_bulk_array`](Self::alloc_pages_bulk_array); the list is as it was then. Also if the list
    /// holds blocks of another order.
    ///
    /// ```
    /// use pagemill::{Allocator, Bulk, PageList};
    /// let mut list = PageList::new();
    /// let delivered = Allocator::global().alloc_pages_bulk_list(Bulk::up_to(64), &mut list)?;
    /// assert_eq!((delivered.blocks, list.len()), (64, 64));
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    #[inline]
    pub fn alloc_pages_bulk_list<T: Owned>(&self, request: Bulk<'_>, list: &mut List<T>) -> Result<Delivered, Error> {
        request.check::<T>(self.nodes())?;
        let mut fresh = list.empty_like(request.order)?;
        let blocks = self.bulk(request, request.most, |arena, batch, run| fresh.push_batch(arena, batch, run));
        if blocks < request.least {
            return Err(request.missed(blocks)); // What there is goes back with `fresh`.
        }
        list.append(&mut fresh)?;
        Ok(Delivered { blocks, shortfall: self.shortfall(&request, blocks) })
    }

    /// Hands each block to a function, which owns it from then on (the callback form). The function may allocate; if
    /// it unwinds, what it was not given goes back.
    ///
    /// # Errors
    /// [`Error::Invalid`], also for requests that name a least number: what was handed over cannot be taken back.
    ///
    /// ```
    /// use pagemill::{Allocator, Bulk, Page};
    /// let mut kept: Vec<Page> = Vec::new();
    /// let delivered = Allocator::global().alloc_pages_bulk_callback(Bulk::up_to(64), |page| kept.push(page))?;
    /// assert_eq!((delivered.blocks, kept.len()), (64, 64));
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    #[inline]
    pub fn alloc_pages_bulk_callback<T: Owned>(
        &self,
        request: Bulk<'_>,
        mut each: impl FnMut(T),
    ) -> Result<Delivered, Error> {
        request.check::<T>(self.nodes())?;
        if request.least > 0 {
            return Err(Invalid::CallbackWants.into());
        }
        let order = usize::from(request.order.get());
        let blocks = self.bulk(request, request.most, |arena, batch, run| {
            let zero = arena.addr_of_zero();
            if let Some(first) = run {
                let next = word_of(zero, first);
                let mut undelivered = Pages { next, end: next + batch.len() * PAGE_SIZE };
                for word in (next..undelivered.end).step_by(PAGE_SIZE) {
                    undelivered.next = word + PAGE_SIZE;
                    // SAFETY: the engine prepared the page, and it goes to `each` alone.
                    each(unsafe { T::from_word(word) });
                }
                return;
            }
            let mut undelivered = Undelivered { zero, order, pfns: batch.as_slice() };
            while let Some((&pfn, rest)) = undelivered.pfns.split_first() {
                undelivered.pfns = rest;
                // SAFETY: as above.
                each(unsafe { T::from_word(undelivered.word(pfn)) });
            }
        });
        Ok(Delivered { blocks, shortfall: self.shortfall(&request, blocks) })
    }

    /// Delivers contiguous runs, neighbouring blocks merged (the runs form): what an I/O vector wants.
    ///
    /// # Errors
    /// As [`alloc_pages_bulk_list`](Self::alloc_pages_bulk_list); `runs` is as it was then.
    ///
    /// ```
    /// use pagemill::{Allocator, Bulk, Run, Page};
    /// let mut runs: Vec<Run<Page>> = Vec::new();
    /// let delivered = Allocator::global().alloc_pages_bulk_runs(Bulk::up_to(256), &mut runs)?;
    /// assert_eq!(runs.iter().map(Run::len).sum::<usize>(), delivered.blocks);
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    #[inline]
    pub fn alloc_pages_bulk_runs<T: Owned>(
        &self,
        request: Bulk<'_>,
        runs: &mut Vec<Run<T>>,
    ) -> Result<Delivered, Error> {
        request.check::<T>(self.nodes())?;
        let mut fresh = Runs::new(runs, request.order);
        let blocks = self.bulk(request, request.most, |arena, batch, run| {
            fresh.push_batch(arena.addr_of_zero(), batch, run);
        });
        if blocks < request.least {
            fresh.undo();
            return Err(request.missed(blocks));
        }
        Ok(Delivered { blocks, shortfall: self.shortfall(&request, blocks) })
    }
}

/// Frames of a batch that a callback has not been given: they go back if it unwinds.
struct Undelivered<'b> {
    zero: usize,
    order: usize,
    pfns: &'b [u32],
}

impl Undelivered<'_> {
    #[inline]
    fn word(&self, pfn: u32) -> usize {
        word_of(self.zero, pfn) | self.order
    }
}

impl Drop for Undelivered<'_> {
    #[inline]
    fn drop(&mut self) {
        if !self.pfns.is_empty() {
            for &pfn in self.pfns {
                // It was prepared a moment ago: nothing to refuse.
                let _ = free_word(self.word(pfn));
            }
        }
    }
}

/// The word of the page with this number, where number 0 would be at `zero`.
#[inline]
pub(crate) fn word_of(zero: usize, pfn: u32) -> usize {
    zero.wrapping_add((pfn as usize) << PAGE_SHIFT)
}

impl Allocator {
    /// The array form, on the words behind the slots. Returns how many it filled, and the first hole that is left; if
    /// those are fewer slots than the request must have, it has emptied them again.
    #[inline]
    fn fill(&self, request: Bulk<'_>, words: &mut [usize]) -> (usize, usize) {
        let n = words.len();
        let is_empty = words.iter().fold(0, |any, &word| any | word) == 0;
        let missing = if is_empty { n } else { words.iter().filter(|&&word| word == 0).count() };
        if missing == 0 {
            return (0, n);
        }
        // All or nothing marks what it fills, so that it can be told from what was there.
        let mark = if request.least > 0 { TENTATIVE } else { 0 };
        let low = usize::from(request.order.get()) | mark;
        let mut at = 0;
        let added = self.bulk(request, missing, |arena, batch, run| {
            let zero = arena.addr_of_zero();
            at = if is_empty {
                fill_empty(words, at, batch, run, zero, low)
            } else {
                fill_holes(words, at, batch, zero, low)
            };
        });
        if mark != 0 {
            self.settle(words, n - missing + added >= request.least);
        }
        let first_hole = if added == missing { n } else { words.iter().position(|&word| word == 0).unwrap_or(n) };
        (added, first_hole)
    }

    /// Ends an all-or-nothing array request: keeps what it filled, or takes it back.
    #[inline]
    fn settle(&self, words: &mut [usize], is_kept: bool) {
        if is_kept {
            words.iter_mut().for_each(|word| *word &= !TENTATIVE);
            return;
        }
        for word in words.iter_mut().filter(|word| **word & TENTATIVE != 0) {
            // It was prepared a moment ago: nothing to refuse.
            let _ = free_word(core::mem::take(word) & !TENTATIVE);
        }
    }

    /// The engine: takes up to `missing` blocks and hands them to `sink` in prepared batches, each of one arena. Returns
    /// how many. The sink is called in one place and its address goes nowhere, so that what it keeps can stay in
    /// registers.
    #[inline]
    fn bulk(&self, request: Bulk<'_>, missing: usize, mut sink: impl FnMut(&Arena, &Batch, Option<u32>)) -> usize {
        let missing = if request.gfp.contains(Gfp::ACCOUNT) { request.charge(missing) } else { missing };
        let (gfp, mobility) = (request.gfp, request.gfp.mobility());
        let here = if request.order == Order::ZERO && missing <= ListPolicy::LARGE && request.is_anywhere() {
            self.nodes().here()
        } else {
            None
        };
        let mut list = here;
        let mut slow = Slow::new(missing);
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
                    match self.bulk_slow(&request, &mut slow, missing - got, needed, &mut batch) {
                        Some(found) => found,
                        None => break,
                    }
                }
            };
            got += batch.len();
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
    fn shortfall(&self, request: &Bulk<'_>, got: usize) -> Option<Shortfall> {
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
        } else if request.account.is_some_and(|account| account.is_full()) && request.gfp.contains(Gfp::ACCOUNT) {
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

impl Bulk<'_> {
    #[cold]
    fn charge(&self, missing: usize) -> usize {
        let frames = self.order.frames() as usize;
        let granted = self.account.map_or(0, |account| account.charge_up_to(missing * frames, frames) / frames);
        // What must come and cannot be paid for: nothing is taken.
        let needed = self.least.saturating_sub(self.most - missing);
        if granted < needed {
            self.refund(granted);
            return 0;
        }
        granted
    }
    #[cold]
    fn refund(&self, blocks: usize) {
        if let Some(account) = self.account {
            account.uncharge(PageCount::new(blocks * self.order.frames() as usize));
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

fn far() -> Instant {
    Instant::now() + Duration::from_secs(86_400 * 365 * 30)
}

/// Fills the slots from `at` on, all of which are empty. Returns the next slot.
#[inline]
fn fill_empty(words: &mut [usize], at: usize, batch: &Batch, run: Option<u32>, zero: usize, low: usize) -> usize {
    let pfns = batch.as_slice();
    let slots = &mut words[at..at + pfns.len()];
    if let Some(first) = run {
        let first = word_of(zero, first) | low;
        slots.iter_mut().zip(0..).for_each(|(slot, i)| *slot = first + (i << PAGE_SHIFT));
    } else {
        slots.iter_mut().zip(pfns).for_each(|(slot, &pfn)| *slot = word_of(zero, pfn) | low);
    }
    at + pfns.len()
}

/// Fills holes from slot `at` on, of which there are enough. Returns the slot behind the last one filled.
#[inline]
fn fill_holes(words: &mut [usize], mut at: usize, batch: &Batch, zero: usize, low: usize) -> usize {
    for &pfn in batch.as_slice() {
        while words[at] != 0 {
            at += 1;
        }
        words[at] = word_of(zero, pfn) | low;
        at += 1;
    }
    at
}
