//! Pages in bulk: four forms over one engine (C3.1).
//!
//! [`request`] is what a caller says and gets, [`engine`] where the frames come from; here each prepared batch goes where
//! the form wants it: into an array's empty slots, to the tail of a list, to a function, into runs.
//!
//! What serves one page is inlined always, the rest is a call: where the compiler chose, a program with many calls had none of
//! it inlined, and each wrote its request and its result to memory (2 ns of 14).
use crate::allocator::Allocator;
use crate::arena::Arena;
use crate::free::free_word;
use crate::handle::{Owned, Pages, TENTATIVE, slots_as_words};
use crate::list::List;
use crate::run::{Run, Runs};
use pagemill_core::{Error, Gfp, Invalid, PAGE_SHIFT, PAGE_SIZE};
use pagemill_sys::lists::BulkCall;
use pagemill_sys::{Batch, are_empty, fill_neighbours};

mod engine;
mod populate;
mod request;

use engine::Taking;
use request::FEW;
pub(crate) use request::from_now;
pub use request::{Bulk, Delivered, Filled};

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
    #[inline(always)]
    pub fn alloc_pages_bulk_array<T: Owned>(
        &self,
        request: Bulk<'_>,
        slots: &mut [Option<T>],
    ) -> Result<Filled, Error> {
        let words = slots_as_words(slots);
        if let [word @ 0, ..] = words
            && let Some((arena, pfn)) = self.one_page(&request)
        {
            *word = arena.addr_of(pfn);
            return Ok(Filled { added: 1, occupied: 1, first_hole: 1, shortfall: None });
        }
        self.fill_array(Bulk { ..request }, words, T::ANY_ORDER)
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
    #[inline(always)]
    pub fn alloc_pages_bulk_list<T: Owned>(&self, request: Bulk<'_>, list: &mut List<T>) -> Result<Delivered, Error> {
        if list.takes_pages()
            && let Some((_, pfn)) = self.one_page(&request)
        {
            list.push_frame(pfn);
            return Ok(Delivered { blocks: 1, shortfall: None });
        }
        self.extend_list(Bulk { ..request }, list)
    }

    #[inline(never)]
    fn extend_list<T: Owned>(&self, mut request: Bulk<'_>, list: &mut List<T>) -> Result<Delivered, Error> {
        if list.takes_pages()
            && let Some((arena, first)) = self.one_run(&request)
        {
            list.push_run(arena, first, request.most);
            return Ok(Delivered { blocks: request.most, shortfall: None });
        }
        request.begin(self.nodes(), T::ANY_ORDER)?;
        list.check_order(request.order)?;
        let (needed, mut got) = (request.least, 0);
        let served = self.all_or_wait(&mut request, needed, |request| {
            let mut fresh = List::of_order(request.order);
            if request.is_populated() {
                fresh = self.populated(request);
                got = fresh.len();
            } else {
                got = self.bulk(request, request.most, true, |arena, batch, run| fresh.push_batch(arena, batch, run));
            }
            // What there is goes back with `fresh`.
            request.keeps(got, needed).then_some(fresh)
        });
        let Some(mut fresh) = served? else { return Err(request.missed(self, got)) };
        list.append(&mut fresh)?;
        self.delivered(&request, got)
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
        if request.least == 0
            && let Some((arena, pfn)) = self.one_page(&request)
        {
            // SAFETY: the page is marked as handed out, and it goes to `each` alone.
            each(unsafe { T::from_word(arena.addr_of(pfn)) });
            return Ok(Delivered { blocks: 1, shortfall: None });
        }
        if request.least == 0
            && let Some((arena, first)) = self.one_run(&request)
        {
            let next = arena.addr_of(first);
            deliver(&mut Pages { next, end: next + request.most * PAGE_SIZE }, &mut each);
            return Ok(Delivered { blocks: request.most, shortfall: None });
        }
        let mut request = Bulk { ..request };
        request.begin(self.nodes(), T::ANY_ORDER)?;
        if request.least > 0 {
            return Err(Invalid::CallbackWants.into());
        }
        if request.is_populated() {
            let list = self.populated(&mut request);
            let blocks = list.len();
            let mut undelivered = Rest { blocks: list, request: &request };
            for block in undelivered.blocks.by_ref() {
                each(block);
            }
            drop(undelivered);
            return self.delivered(&request, blocks);
        }
        let order = usize::from(request.order.get());
        let (mut taking, mut slow, mut batch) = (Taking::new(self, &request, request.most, false), None, Batch::new());
        while let Some((arena, run)) = taking.next(&mut slow, &mut batch) {
            let zero = arena.addr_of_zero();
            if let Some(first) = run {
                let next = word_of(zero, first);
                let pages = Pages { next, end: next + batch.len() * PAGE_SIZE };
                deliver(&mut Rest { blocks: pages, request: &request }.blocks, &mut each);
                continue;
            }
            let mut undelivered = Undelivered { zero, order, pfns: batch.as_slice(), request: &request };
            while let Some((&pfn, rest)) = undelivered.pfns.split_first() {
                undelivered.pfns = rest;
                // SAFETY: as above.
                each(unsafe { T::from_word(undelivered.word(pfn)) });
            }
        }
        let blocks = taking.end();
        self.delivered(&request, blocks)
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
    #[inline(always)]
    pub fn alloc_pages_bulk_runs<T: Owned>(
        &self,
        request: Bulk<'_>,
        runs: &mut Vec<Run<T>>,
    ) -> Result<Delivered, Error> {
        if let Some((arena, pfn)) = self.one_page(&request) {
            runs.push(Run::of_page(arena.addr_of(pfn)));
            return Ok(Delivered { blocks: 1, shortfall: None });
        }
        self.extend_runs(Bulk { ..request }, runs)
    }

    #[inline(never)]
    fn extend_runs<T: Owned>(&self, mut request: Bulk<'_>, runs: &mut Vec<Run<T>>) -> Result<Delivered, Error> {
        let mut fresh = Runs::new(runs, request.order);
        if let Some((arena, first)) = self.one_run(&request) {
            fresh.extend(arena.addr_of(first), request.most);
            return Ok(Delivered { blocks: request.most, shortfall: None });
        }
        request.begin(self.nodes(), T::ANY_ORDER)?;
        let (needed, mut got) = (request.least, 0);
        let served = self.all_or_wait(&mut request, needed, |request| {
            got = if request.is_populated() {
                self.populated(request).map(|block| fresh.push(block)).count()
            } else {
                self.bulk(request, request.most, false, |arena, batch, run| {
                    fresh.push_batch(arena.addr_of_zero(), batch, run);
                })
            };
            let is_kept = request.keeps(got, needed);
            if !is_kept {
                fresh.undo();
            }
            is_kept.then_some(())
        });
        if served?.is_none() {
            return Err(request.missed(self, got));
        }
        self.delivered(&request, got)
    }
}

impl Allocator {
    /// One page, for a request that a plain single one would serve (C3.3): the single path, inlined. What else there may be to
    /// do is a call with a copy of the request, so that the request is written to memory there alone.
    #[inline(always)]
    fn one_page(&self, request: &Bulk<'_>) -> Option<(&'static Arena, u32)> {
        if request.is_one_page() { self.nodes().here()?.pop_one(request.gfp) } else { None }
    }

    /// All pages of a request for a batch at most, if they lie on the list in order: the first.
    #[inline(always)]
    fn one_run(&self, request: &Bulk<'_>) -> Option<(&'static Arena, u32)> {
        if request.is_one_batch() { self.nodes().here()?.pop_run(request.gfp, request.most) } else { None }
    }
}

/// Hands pages that are marked as handed out to a function. If it unwinds, those that it has not been given stay. Inlined
/// always, as all that calls the function: what that keeps stays in registers only if its address goes nowhere.
#[inline(always)]
fn deliver<T: Owned>(pages: &mut Pages, each: &mut impl FnMut(T)) {
    for word in (pages.next..pages.end).step_by(PAGE_SIZE) {
        pages.next = word + PAGE_SIZE;
        // SAFETY: the page is handed out and nobody's, and it goes to `each` alone.
        each(unsafe { T::from_word(word) });
    }
}

/// Frames of a batch that a callback has not been given: they go back if it unwinds.
struct Undelivered<'b> {
    zero: usize,
    order: usize,
    pfns: &'b [u32],
    request: &'b Bulk<'b>,
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
            self.request.refund(self.pfns.len());
            for &pfn in self.pfns {
                // It was prepared a moment ago: nothing to refuse.
                let _ = free_word(self.word(pfn));
            }
        }
    }
}

/// Blocks that a callback has not been given: if it unwinds they go back, and are not paid for.
struct Rest<'r, I: Iterator> {
    blocks: I,
    request: &'r Bulk<'r>,
}

impl<I: Iterator> Drop for Rest<'_, I> {
    #[inline]
    fn drop(&mut self) {
        let left = self.blocks.size_hint().0;
        if left > 0 {
            self.request.refund(left);
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
    fn fill_array(&self, mut request: Bulk<'_>, words: &mut [usize], is_any_order: bool) -> Result<Filled, Error> {
        let n = request.most;
        if request.is_one_batch()
            && let Some(words) = words.get_mut(..n)
        {
            if n <= FEW {
                if let Some(added) = self.fill_few(request.gfp, words) {
                    return Ok(Filled { added, occupied: n, first_hole: n, shortfall: None });
                }
            } else if are_empty(words)
                && let Some((arena, first)) = self.one_run(&request)
            {
                fill_neighbours(words, arena.addr_of(first));
                return Ok(Filled { added: n, occupied: n, first_hole: n, shortfall: None });
            }
        }
        request.begin(self.nodes(), is_any_order)?;
        let n = request.most;
        let slots = words.len();
        let words = words.get_mut(..n).ok_or(Invalid::ArrayTooShort { slots, count: n })?;
        let occupied = if request.least == 0 { 0 } else { words.iter().filter(|&&word| word != 0).count() };
        let (needed, mut got) = (request.least.saturating_sub(occupied), 0);
        let served = self.all_or_wait(&mut request, needed, |request| {
            let filled = match request.is_populated() {
                true => self.fill_populated(request, words),
                false => self.fill(request, words),
            };
            got = filled.0;
            request.keeps(got, needed).then_some(filled)
        });
        let Some((added, first_hole)) = served? else { return Err(request.missed(self, occupied + got)) };
        if first_hole == n {
            return Ok(Filled { added, occupied: n, first_hole, shortfall: None });
        }
        let occupied = words.iter().filter(|&&word| word != 0).count();
        Ok(Filled { added, occupied, first_hole, shortfall: self.shortfall(&request, occupied, added)? })
    }

    /// All holes of a small array by the single path, page by page, which costs less than a batch. Returns how many those were;
    /// none, and the array as it was, if the list has too few.
    #[inline]
    fn fill_few(&self, gfp: Gfp, words: &mut [usize]) -> Option<usize> {
        let inner = self.nodes().here()?;
        // What is taken and given back again is counted, so that is for those alone whom somebody overtakes.
        if inner.lists.list_here(gfp.mobility()).len() < words.len() {
            return None;
        }
        let mut filled = 0u32;
        // The last first: given back in the array's order, the frames lie on the list as they did.
        for i in (0..words.len()).rev() {
            if words[i] != 0 {
                continue;
            }
            let Some((arena, pfn)) = inner.pop_one(gfp) else {
                let back = words.iter_mut().enumerate().filter(|(i, _)| filled >> i & 1 == 1);
                // They were prepared a moment ago: nothing to refuse.
                back.for_each(|(_, word)| _ = free_word(core::mem::take(word)));
                return None;
            };
            words[i] = arena.addr_of(pfn);
            filled |= 1 << i;
        }
        let added = filled.count_ones() as usize;
        if added > 0 {
            inner.lists.count_bulk(BulkCall::Alloc, added);
        }
        Some(added)
    }

    /// The array form, on the words behind the slots. Returns how many it filled, and the first hole that is left; if
    /// those are fewer slots than the request must have, it has emptied them again.
    #[inline]
    fn fill(&self, request: &Bulk<'_>, words: &mut [usize]) -> (usize, usize) {
        let n = words.len();
        let is_empty = are_empty(words);
        let missing = if is_empty { n } else { words.iter().filter(|&&word| word == 0).count() };
        if missing == 0 {
            return (0, n);
        }
        // All or nothing marks what it fills, so that it can be told from what was there.
        let mark = if request.least > 0 { TENTATIVE } else { 0 };
        let low = usize::from(request.order.get()) | mark;
        let mut at = 0;
        let mut tentative = Tentative { words, is_kept: mark == 0 };
        let added = self.bulk(request, missing, mark != 0, |arena, batch, run| {
            let (words, zero) = (&mut *tentative.words, arena.addr_of_zero());
            at = if is_empty {
                fill_empty(words, at, batch, run, zero, low)
            } else {
                fill_holes(words, at, batch, zero, low)
            };
        });
        if mark != 0 && n - missing + added >= request.least {
            tentative.keep();
        }
        drop(tentative);
        let first_hole = if added == missing { n } else { words.iter().position(|&word| word == 0).unwrap_or(n) };
        (added, first_hole)
    }
}

/// The slots of an array request, all or nothing unless `is_kept`: what it fills is marked, and taken back in the end if
/// that is not what it must have, or if it unwinds.
struct Tentative<'w> {
    words: &'w mut [usize],
    is_kept: bool,
}

impl Tentative<'_> {
    #[inline]
    fn keep(&mut self) {
        self.words.iter_mut().for_each(|word| *word &= !TENTATIVE);
        self.is_kept = true;
    }
}

impl Drop for Tentative<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.is_kept {
            return;
        }
        for word in self.words.iter_mut().filter(|word| **word & TENTATIVE != 0) {
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
        fill_neighbours(slots, word_of(zero, first) | low);
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

#[cfg(test)]
#[cfg(not(feature = "detection-off"))]
mod tests {
    use crate::{Allocator, Bulk, Memory, Mobility, Order, Page};
    use pagemill_core::FrameState;

    #[test]
    fn a_small_array_filled_from_the_list_counts_as_one_bulk_call() {
        let allocator = Allocator::builder().memory(Memory::anonymous(1024)).cpus(1, || 0).build().unwrap();
        drop(allocator.alloc_page(crate::Gfp::KERNEL).unwrap()); // The list has pages.
        let calls = || allocator.stats().bulk_alloc.iter().sum::<u64>();
        let (before, mut slots) = (calls(), [const { None::<Page> }; 4]);
        allocator.alloc_pages_bulk_array(Bulk::exact(4), &mut slots).unwrap();
        assert_eq!(calls(), before + 1);
    }

    /// Somebody has the second page from the top, which was freed twice: the first one is in the array by then.
    #[test]
    fn a_small_array_that_meets_a_page_that_somebody_has_is_filled_all_the_same() {
        let allocator = Allocator::builder().memory(Memory::anonymous(1024)).cpus(1, || 0).build().unwrap();
        let arena = allocator.nodes().first().arena;
        drop(allocator.alloc_page(crate::Gfp::KERNEL).unwrap()); // The list has pages.
        let list = allocator.nodes().first().lists.list_here(Mobility::Unmovable);
        let top: Vec<u32> = list.frames().collect();
        let taken = top[top.len() - 2];
        arena.set_state(taken, FrameState::handed_out(Order::ZERO, Mobility::Unmovable));
        let mut slots: [Option<Page>; 4] = [const { None }; 4];
        let filled = allocator.alloc_pages_bulk_array(Bulk::exact(4), &mut slots).unwrap();
        assert_eq!((filled.added, filled.occupied, filled.first_hole), (4, 4, 4));
        assert!(slots.iter().flatten().all(|page| page.addr() != arena.addr_of(taken)));
        let stats = allocator.stats();
        assert_eq!(stats.allocated - stats.freed, 4 + 1, "four pages, and the one that was put aside");
        drop(slots);
        allocator.drain();
        let census = allocator.validate().unwrap();
        assert_eq!((census.handed_out, census.quarantined), (0, 1));
    }
}
