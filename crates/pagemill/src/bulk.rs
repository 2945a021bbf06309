//! Pages in bulk: four forms over one engine (C3.1).
//!
//! The engine takes frames in batches of at most 64 (one exclusive section each, C3.5), prepares each batch outside
//! of the section (C3.9) and hands it to the form's sink: slots of an array, the tail of a list, a function, runs.
//! Requests of at most [`ListPolicy::LARGE`] pages are served from the CPU's list and refill it; larger ones pass it
//! by, since they would only empty it.
use crate::allocator::{Allocator, Inner};
use crate::free::free_word;
use crate::handle::{Owned, Pages, TENTATIVE, slots_as_words};
use crate::list::List;
use crate::run::{Run, Runs};
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::{Error, Exhausted, Gfp, Invalid, ListPolicy, Order, PAGE_SHIFT, PAGE_SIZE};
use pagemill_sys::Batch;
use pagemill_sys::lists::BulkCall;

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
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bulk {
    least: usize,
    most: usize,
    gfp: Gfp,
    order: Order,
}

impl Bulk {
    /// The most blocks that one request names, as in the kernel's interface.
    pub const COUNT_MAX: usize = i32::MAX as usize;

    /// Up to `n`; fewer are no error.
    #[inline]
    pub const fn up_to(n: usize) -> Self {
        Self { least: 0, most: n, gfp: Gfp::KERNEL, order: Order::ZERO }
    }
    /// Up to `n`, at least `k`; fewer than `k` are an error, and then nothing is delivered.
    #[inline]
    pub const fn at_least(k: usize, n: usize) -> Self {
        Self { least: k, most: n, gfp: Gfp::KERNEL, order: Order::ZERO }
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

    #[inline]
    fn check<T: Owned>(self) -> Result<(), Invalid> {
        if self.most > Self::COUNT_MAX {
            return Err(Invalid::CountTooLarge { count: self.most, max: Self::COUNT_MAX });
        }
        if self.least > self.most {
            return Err(Invalid::AtLeastAboveUpTo { at_least: self.least, up_to: self.most });
        }
        if !T::ANY_ORDER && self.order != Order::ZERO {
            return Err(Invalid::OrderOfPages { order: self.order.get() });
        }
        self.gfp.check()
    }

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
    /// The zone has no more.
    Exhausted {
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

#[inline]
fn shortfall(wanted: usize, got: usize) -> Option<Shortfall> {
    if got < wanted { Some(Shortfall::Exhausted { missing: wanted - got }) } else { None }
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
    pub fn alloc_pages_bulk_array<T: Owned>(&self, request: Bulk, slots: &mut [Option<T>]) -> Result<Filled, Error> {
        request.check::<T>()?;
        let n = request.most;
        if n > slots.len() {
            return Err(Invalid::ArrayTooShort { slots: slots.len(), count: n }.into());
        }
        let words = slots_as_words(&mut slots[..n]);
        if let [word @ 0] = words
            && request.order == Order::ZERO
            && let Some(pfn) = self.inner().pop_one(request.gfp)
        {
            // One page goes the single path, without the engine's table of a batch.
            *word = self.inner().arena.addr_of(pfn);
            return Ok(Filled { added: 1, occupied: 1, first_hole: 1, shortfall: None });
        }
        self.inner().fill(request, words)
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
    pub fn alloc_pages_bulk_list<T: Owned>(&self, request: Bulk, list: &mut List<T>) -> Result<Delivered, Error> {
        request.check::<T>()?;
        let inner = self.inner();
        let mut fresh = list.empty_like(request.order)?;
        let blocks = inner.bulk(request, request.most, |batch, run| fresh.push_batch(inner.arena, batch, run));
        if blocks < request.least {
            return Err(request.missed(blocks)); // What there is goes back with `fresh`.
        }
        list.append(&mut fresh)?;
        Ok(Delivered { blocks, shortfall: shortfall(request.most, blocks) })
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
        request: Bulk,
        mut each: impl FnMut(T),
    ) -> Result<Delivered, Error> {
        request.check::<T>()?;
        if request.least > 0 {
            return Err(Invalid::CallbackWants.into());
        }
        let inner = self.inner();
        let (zero, order) = (inner.arena.addr_of_zero(), usize::from(request.order.get()));
        let blocks = inner.bulk(request, request.most, |batch, run| {
            if let Some(first) = run {
                let next = word_of(zero, first);
                let mut undelivered = Pages { next, end: next + batch.len() * PAGE_SIZE };
                while undelivered.next != undelivered.end {
                    let word = undelivered.next;
                    undelivered.next += PAGE_SIZE;
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
        Ok(Delivered { blocks, shortfall: shortfall(request.most, blocks) })
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
    pub fn alloc_pages_bulk_runs<T: Owned>(&self, request: Bulk, runs: &mut Vec<Run<T>>) -> Result<Delivered, Error> {
        request.check::<T>()?;
        let inner = self.inner();
        let zero = inner.arena.addr_of_zero();
        let mut fresh = Runs::new(runs, request.order);
        let blocks = inner.bulk(request, request.most, |batch, run| fresh.push_batch(zero, batch, run));
        if blocks < request.least {
            fresh.undo();
            return Err(request.missed(blocks));
        }
        Ok(Delivered { blocks, shortfall: shortfall(request.most, blocks) })
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

impl Inner {
    /// The array form, on the words behind the slots.
    #[inline]
    fn fill(&self, request: Bulk, words: &mut [usize]) -> Result<Filled, Error> {
        let n = words.len();
        let is_empty = words.iter().fold(0, |any, &word| any | word) == 0;
        let missing = if is_empty { n } else { words.iter().filter(|&&word| word == 0).count() };
        if missing == 0 {
            return Ok(Filled { added: 0, occupied: n, first_hole: n, shortfall: None });
        }
        // All or nothing marks what it fills, so that it can be told from what was there.
        let mark = if request.least > 0 { TENTATIVE } else { 0 };
        let (zero, low) = (self.arena.addr_of_zero(), usize::from(request.order.get()) | mark);
        let mut at = 0;
        let added = self.bulk(request, missing, |batch, run| {
            at = if is_empty {
                fill_empty(words, at, batch, run, zero, low)
            } else {
                fill_holes(words, at, batch, zero, low)
            };
        });
        let occupied = n - missing + added;
        if mark != 0 {
            self.settle(words, occupied >= request.least);
            if occupied < request.least {
                return Err(request.missed(occupied));
            }
        }
        let first_hole = if occupied == n { n } else { words.iter().position(|&word| word == 0).unwrap_or(n) };
        Ok(Filled { added, occupied, first_hole, shortfall: shortfall(n, occupied) })
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

    /// The engine: takes up to `missing` blocks and hands them to `sink` in prepared batches. Returns how many.
    #[inline]
    fn bulk(&self, request: Bulk, missing: usize, mut sink: impl FnMut(&Batch, Option<u32>)) -> usize {
        if missing == 0 {
            return 0;
        }
        if missing == 1
            && request.order == Order::ZERO
            && let Some(pfn) = self.pop_one(request.gfp)
        {
            // One page goes the single path.
            let mut one = Batch::new();
            one.push(pfn);
            sink(&one, Some(pfn));
            return 1;
        }
        let (gfp, mobility) = (request.gfp, request.gfp.mobility());
        let mut got = 0;
        let mut batch = Batch::new();
        if request.order == Order::ZERO && missing > 1 && missing <= ListPolicy::LARGE {
            while got < missing {
                batch.clear();
                self.lists.pop_n(mobility, missing - got, &mut batch);
                if batch.is_empty() {
                    break;
                }
                let run = self.prepare(&mut batch, gfp, mobility);
                got += batch.len();
                sink(&batch, run);
            }
        }
        if got < missing {
            // What an array holds already counts.
            let needed = request.least.saturating_sub(request.most - missing);
            got += self.bulk_slow(request, missing - got, needed.saturating_sub(got), &mut sink);
        }
        if got > 1 {
            self.lists.count_bulk(BulkCall::Alloc, got);
        }
        got
    }

    /// What the list does not have: up to `missing`, and at least `needed` if that is possible.
    #[cold]
    #[inline(never)]
    fn bulk_slow(
        &self,
        request: Bulk,
        missing: usize,
        needed: usize,
        sink: &mut dyn FnMut(&Batch, Option<u32>),
    ) -> usize {
        let gfp = request.gfp;
        let mut got = match request.order {
            Order::ZERO if missing == 1 => 0,
            Order::ZERO => self.bulk_zone(gfp, missing, sink),
            order => self.bulk_blocks(gfp, order, missing, sink),
        };
        if got < missing && missing > 1 && request.order == Order::ZERO && gfp.may_wait() && self.drain_all() > 0 {
            got += self.bulk_zone(gfp, missing - got, sink);
        }
        // The single path, for one block (C3.6, C3.8), or until the least number is reached. It alone may take from
        // pageblocks of another mobility.
        let mut is_tried = false;
        while got < missing && (got < needed || !is_tried) {
            is_tried = true;
            let one = match request.order {
                Order::ZERO => self.take_one(gfp),
                order => self.steal_block(gfp, order),
            };
            let Some(pfn) = one else { break };
            if missing > 1 {
                self.stats_here().fallbacks.fetch_add(1, Relaxed);
            }
            let mut one = Batch::new();
            one.push(pfn);
            sink(&one, None);
            got += 1;
        }
        if got < missing {
            self.count_shortfall();
        }
        got
    }

    /// Order 0 from pageblocks of the request's mobility.
    fn bulk_zone(&self, gfp: Gfp, missing: usize, sink: &mut dyn FnMut(&Batch, Option<u32>)) -> usize {
        self.check_generation();
        let mobility = gfp.mobility();
        let mut got = 0;
        let mut batch = Batch::new();
        while got < missing {
            batch.clear();
            let want = (missing - got).min(Batch::CAPACITY);
            let taken = if missing > ListPolicy::LARGE {
                let cpu = self.lists.cpu(self.lists.here());
                let bound = &cpu.lists[mobility.index()].bound;
                let taken = self.take_from_zone(bound, want, mobility, &mut batch);
                cpu.stats.direct_out.fetch_add(taken as u64, Relaxed);
                taken
            } else {
                self.refill(mobility, want, &mut batch)
            };
            if taken == 0 {
                // Refills put more on the list than they delivered: that comes before "exhausted".
                self.lists.pop_n(mobility, want, &mut batch);
                if batch.is_empty() {
                    break;
                }
            }
            let run = self.prepare(&mut batch, gfp, mobility);
            got += batch.len();
            sink(&batch, run);
        }
        got
    }

    /// Blocks above order 0, one by one (C3.11).
    fn bulk_blocks(&self, gfp: Gfp, order: Order, missing: usize, sink: &mut dyn FnMut(&Batch, Option<u32>)) -> usize {
        let mut got = 0;
        let mut batch = Batch::new();
        while got < missing
            && let Some(pfn) = self.take_block(gfp, order)
        {
            batch.push(pfn);
            got += 1;
            if batch.room() == 0 {
                sink(&batch, None);
                batch.clear();
            }
        }
        if !batch.is_empty() {
            sink(&batch, None);
        }
        got
    }
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
