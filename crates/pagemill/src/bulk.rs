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
    fn check<T: Owned>(self) -> Result<(), Error> {
        let is_usual =
            self.least <= self.most && self.most <= Self::COUNT_MAX && self.order == Order::ZERO && self.gfp.is_plain();
        if is_usual { Ok(()) } else { self.check_each(T::ANY_ORDER).map_err(Error::from) }
    }

    #[cold]
    #[inline(never)]
    fn check_each(self, is_any_order: bool) -> Result<(), Invalid> {
        if self.most > Self::COUNT_MAX {
            return Err(Invalid::CountTooLarge { count: self.most, max: Self::COUNT_MAX });
        }
        if self.least > self.most {
            return Err(Invalid::AtLeastAboveUpTo { at_least: self.least, up_to: self.most });
        }
        if !is_any_order && self.order != Order::ZERO {
            return Err(Invalid::OrderOfPages { order: self.order.get() });
        }
        self.gfp.check()
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
        // Two words in registers come back from where the work is. What the caller sees is made of them here, where it
        // need not be written to memory: copied from there, it would wait for those stores.
        let (added, first_hole) = self.inner().fill(request, words);
        if first_hole == n {
            return Ok(Filled { added, occupied: n, first_hole, shortfall: None });
        }
        let occupied = request.fell_short(words, added)?;
        Ok(Filled { added, occupied, first_hole, shortfall: shortfall(n, occupied) })
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
    /// The array form, on the words behind the slots. Returns how many it filled, and the first hole that is left; if
    /// those are fewer slots than the request must have, it has emptied them again.
    #[inline]
    fn fill(&self, request: Bulk, words: &mut [usize]) -> (usize, usize) {
        let n = words.len();
        let is_empty = words.iter().fold(0, |any, &word| any | word) == 0;
        let missing = if is_empty { n } else { words.iter().filter(|&&word| word == 0).count() };
        if missing == 0 {
            return (0, n);
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

    /// The engine: takes up to `missing` blocks and hands them to `sink` in prepared batches. Returns how many. The sink
    /// is called in one place and its address goes nowhere, so that what it keeps can stay in registers.
    #[inline]
    fn bulk(&self, request: Bulk, missing: usize, mut sink: impl FnMut(&Batch, Option<u32>)) -> usize {
        let (gfp, mobility) = (request.gfp, request.gfp.mobility());
        let mut stage = Stage::first(request.order, missing);
        let mut got = 0;
        let mut batch = Batch::new();
        while got < missing {
            batch.clear();
            if matches!(stage, Stage::List { .. }) {
                self.lists.pop_n(mobility, missing - got, &mut batch);
            }
            let run = if batch.is_empty() {
                // What an array holds already counts.
                let needed = request.least.saturating_sub(request.most - missing + got);
                let run = self.bulk_slow(request, &mut stage, missing - got, needed, &mut batch);
                if batch.is_empty() {
                    break;
                }
                run
            } else {
                self.prepare(&mut batch, gfp, mobility)
            };
            got += batch.len();
            sink(&batch, run);
        }
        if got > 1 {
            self.lists.count_bulk(BulkCall::Alloc, got);
        }
        got
    }

    /// The next batch from further down than the list, prepared; empty if that is all. `left` blocks are still wanted,
    /// `needed` of them badly. Returns the first frame if all follow each other.
    #[cold]
    #[inline(never)]
    fn bulk_slow(
        &self,
        request: Bulk,
        stage: &mut Stage,
        left: usize,
        needed: usize,
        batch: &mut Batch,
    ) -> Option<u32> {
        let (gfp, order) = (request.gfp, request.order);
        loop {
            match *stage {
                Stage::List { is_single: true } => *stage = Stage::Single { is_fallback: false, is_tried: false },
                Stage::List { .. } => *stage = Stage::Zone { is_large: false, is_drained: false },
                Stage::Zone { is_large, is_drained } => {
                    let (run, is_dry) = match order {
                        Order::ZERO => self.batch_of_zone(gfp, left, is_large, batch),
                        order => (None, self.batch_of_blocks(gfp, order, left, batch)),
                    };
                    if !batch.is_empty() {
                        return run;
                    }
                    if is_dry {
                        let may_drain = !is_drained && order == Order::ZERO && gfp.may_wait();
                        *stage = if may_drain && self.drain_all() > 0 {
                            Stage::Zone { is_large, is_drained: true }
                        } else {
                            Stage::Single { is_fallback: true, is_tried: false }
                        };
                    }
                }
                // The single path, for one block (C3.6, C3.8), or until the least number is reached. It alone may take
                // from pageblocks of another mobility.
                Stage::Single { is_tried: true, .. } if needed == 0 => *stage = Stage::Over,
                Stage::Single { is_fallback, .. } => {
                    let one = match order {
                        Order::ZERO => self.take_one(gfp),
                        order => self.steal_block(gfp, order),
                    };
                    let Some(pfn) = one else {
                        *stage = Stage::Over;
                        continue;
                    };
                    *stage = Stage::Single { is_fallback, is_tried: true };
                    self.stats_here().fallbacks.fetch_add(u64::from(is_fallback), Relaxed);
                    batch.push(pfn);
                    return None;
                }
                Stage::Over => {
                    self.count_shortfall();
                    return None;
                }
            }
        }
    }

    /// A batch of order 0 from pageblocks of the request's mobility; is there no more?
    fn batch_of_zone(&self, gfp: Gfp, left: usize, is_large: bool, batch: &mut Batch) -> (Option<u32>, bool) {
        self.check_generation();
        let mobility = gfp.mobility();
        let want = left.min(Batch::CAPACITY);
        let taken = if is_large {
            let cpu = self.lists.cpu(self.lists.here());
            let bound = &cpu.lists[mobility.index()].bound;
            let taken = self.take_from_zone(bound, want, mobility, batch);
            cpu.stats.direct_out.fetch_add(taken as u64, Relaxed);
            taken
        } else {
            self.refill(mobility, want, batch)
        };
        if taken == 0 {
            // Refills put more on the list than they delivered: that comes before "exhausted".
            self.lists.pop_n(mobility, want, batch);
            if batch.is_empty() {
                return (None, true);
            }
        }
        (self.prepare(batch, gfp, mobility), false)
    }

    /// A batch of blocks above order 0, taken one by one (C3.11); are there no more?
    fn batch_of_blocks(&self, gfp: Gfp, order: Order, left: usize, batch: &mut Batch) -> bool {
        while batch.len() < left.min(Batch::CAPACITY) {
            let Some(pfn) = self.take_block(gfp, order) else { return true };
            batch.push(pfn);
        }
        false
    }
}

/// How far down a bulk request has gone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// The CPU's list; what comes after it for a request of one page is the single path alone.
    List { is_single: bool },
    /// Pageblocks of the request's mobility: past the list if it is large, again if all lists were drained for it.
    Zone { is_large: bool, is_drained: bool },
    /// One by one, as a single request goes; a fallback unless it is one.
    Single { is_fallback: bool, is_tried: bool },
    /// There is no more.
    Over,
}

impl Stage {
    /// Where a request for so many blocks begins.
    #[inline]
    fn first(order: Order, missing: usize) -> Self {
        if order == Order::ZERO && missing <= ListPolicy::LARGE {
            Self::List { is_single: missing == 1 }
        } else {
            Self::Zone { is_large: order == Order::ZERO, is_drained: false }
        }
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
