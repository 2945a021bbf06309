//! Pages in bulk: four forms over one engine (C3.1).
//!
//! [`request`] is what a caller says and gets, [`engine`] where the frames come from; here each prepared batch goes where
//! the form wants it: into an array's empty slots, to the tail of a list, to a function, into runs.
use crate::allocator::Allocator;
use crate::free::free_word;
use crate::handle::{Owned, Pages, TENTATIVE, slots_as_words};
use crate::list::List;
use crate::run::{Run, Runs};
use pagemill_core::{Error, Invalid, PAGE_SHIFT, PAGE_SIZE};
use pagemill_sys::Batch;

mod engine;
mod request;

pub use request::{Bulk, Delivered, Filled, Shortfall};

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
        let words = slots_as_words(slots);
        if let [word @ 0, ..] = words
            && request.is_one_page()
            && let Some(inner) = self.nodes().here()
            && let Some(pfn) = inner.pop_one(request.gfp)
        {
            // One page goes the single path. The rest is a call, so that this is short where it is inlined and the
            // request need not be written to memory.
            *word = inner.arena.addr_of(pfn);
            return Ok(Filled { added: 1, occupied: 1, first_hole: 1, shortfall: None });
        }
        self.fill_array(request, words, T::ANY_ORDER)
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
        request.check(self.nodes(), T::ANY_ORDER)?;
        let mut fresh = list.empty_like(request.order)?;
        let blocks = self.bulk(&request, request.most, |arena, batch, run| fresh.push_batch(arena, batch, run));
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
        request.check(self.nodes(), T::ANY_ORDER)?;
        if request.least > 0 {
            return Err(Invalid::CallbackWants.into());
        }
        let order = usize::from(request.order.get());
        let blocks = self.bulk(&request, request.most, |arena, batch, run| {
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
        request.check(self.nodes(), T::ANY_ORDER)?;
        let mut fresh = Runs::new(runs, request.order);
        let blocks = self.bulk(&request, request.most, |arena, batch, run| {
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
    #[inline(never)]
    fn fill_array(&self, request: Bulk<'_>, words: &mut [usize], is_any_order: bool) -> Result<Filled, Error> {
        request.check(self.nodes(), is_any_order)?;
        let n = request.most;
        let slots = words.len();
        let words = words.get_mut(..n).ok_or(Invalid::ArrayTooShort { slots, count: n })?;
        let (added, first_hole) = self.fill(&request, words);
        if first_hole == n {
            return Ok(Filled { added, occupied: n, first_hole, shortfall: None });
        }
        let occupied = request.fell_short(words, added)?;
        Ok(Filled { added, occupied, first_hole, shortfall: self.shortfall(&request, occupied) })
    }

    /// The array form, on the words behind the slots. Returns how many it filled, and the first hole that is left; if
    /// those are fewer slots than the request must have, it has emptied them again.
    #[inline]
    fn fill(&self, request: &Bulk<'_>, words: &mut [usize]) -> (usize, usize) {
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
