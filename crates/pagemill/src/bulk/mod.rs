//! Pages in bulk: four forms over one engine (C3.1); the array form has two variants.
//!
//! [`request`] has the parameters and the results of a request, [`engine`] takes the frames, batch by batch. Each form puts the
//! prepared batches where it wants them: `array.rs` into an array's empty slots; this file to the tail of a list (`list.rs`), into
//! runs (`run.rs`), or to a function.
//!
//! The path of one page is always inlined; all else is a call. Where the compiler chose, a program with many calls had none of them
//! inlined, and each call wrote its request and its result to memory (2 ns of 14).
use crate::allocator::Allocator;
use crate::error::{Error, InvalidRequest};
use crate::free::{free_word, give_away};
use crate::handle::{Block, Owned, slots_as_words};
use crate::list::List;
use crate::run::{Run, Runs};
use crate::word::word_of;
use crate::zone::Zone;
use core::mem::MaybeUninit;
use pagemill_core::{Gfp, Order, Pfn};
use pagemill_os::Batch;

mod array;
mod awaited;
mod engine;
mod populate;
mod request;

use array::SLOTS_MAX;
use engine::Taking;
pub(crate) use request::Request;
pub(crate) use request::from_now;
pub use request::{AtLeast, Bulk, Delivered, Exact, Filled, UpTo};

impl Allocator {
    /// Fills the empty slots among the first n of `slots`, in ascending order (the array form). n is the request's count, which may
    /// be 0. Slots from n on are neither read nor written. A least number counts the slots that are occupied already.
    ///
    /// # Errors
    /// [`Error::Exhausted`]: the request did not reach its least number. [`Error::Invalid`]: the array has fewer than n slots, the
    /// request asks for more blocks than there can be, its least number is above n, or its flags contradict each other. The array is
    /// then unchanged.
    ///
    /// ```
    /// use pagemill::{Allocator, Bulk, Page};
    /// let mut slots: Vec<Option<Page>> = (0..64).map(|_| None).collect();
    /// let filled = Allocator::global().alloc_pages_bulk_array(Bulk::exact(64), &mut slots)?;
    /// assert_eq!(filled.occupied, 64);
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    #[inline(always)]
    pub fn alloc_pages_bulk_array<N, T: Owned>(
        &self,
        request: Bulk<'_, N, T>,
        slots: &mut [Option<T>],
    ) -> Result<Filled, Error> {
        let request = &request.request;
        let words = slots_as_words(slots);
        if let [word @ 0, ..] = words
            && let Some((zone, pfn)) = self.one_page(request)
        {
            *word = zone.addr_of(pfn);
            return Ok(Filled { added: 1, occupied: 1, first_hole: 1, shortfall: None });
        }
        // Only the values that this path needs are read: the whole request in memory would be 12 words written and as many read.
        let n = request.most;
        if request.is_of_pages(SLOTS_MAX)
            && let Some(words) = words.get_mut(..n)
            && let Some(added) = self.fill_batch::<false>(request.gfp, words)
        {
            return Ok(Filled { added, occupied: n, first_hole: n, shortfall: None });
        }
        self.fill_array(Request { ..*request }, words, false)
    }

    /// Adds up to n slots to an array's end and fills them (C3.19). It does not read the slots that are there, and adds as many as
    /// blocks came. n is the request's count. [`free_pages_bulk`](crate::free_pages_bulk) empties slots and leaves them there: clear
    /// the array before it grows again.
    ///
    /// # Errors
    /// As [`alloc_pages_bulk_array`](Self::alloc_pages_bulk_array); `slots` is then unchanged.
    ///
    /// # Panics
    /// There is no memory for the array.
    ///
    /// ```
    /// use pagemill::{Allocator, Bulk, Page, free_pages_bulk};
    /// let mut slots: Vec<Option<Page>> = Vec::new();
    /// let delivered = Allocator::global().alloc_pages_bulk_array_fresh(Bulk::up_to(64), &mut slots)?;
    /// assert_eq!((delivered.blocks, slots.len()), (64, 64));
    /// assert_eq!(free_pages_bulk(&mut slots), 64);
    /// slots.clear();
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    #[inline]
    pub fn alloc_pages_bulk_array_fresh<N, T: Owned>(
        &self,
        request: Bulk<'_, N, T>,
        slots: &mut Vec<Option<T>>,
    ) -> Result<Delivered, Error> {
        let request = &request.request;
        let n = request.most;
        if request.is_one_batch() && self.extend_array_by_batch(request.gfp, n, slots) {
            return Ok(Delivered { blocks: n, shortfall: None });
        }
        self.extend_array(Request { ..*request }, slots)
    }

    /// Fills the null slots among the first n of `slots`, as [`alloc_pages_bulk_array`](Self::alloc_pages_bulk_array) does, with raw
    /// pointers. Each is given away as by [`into_raw`](crate::Block::into_raw): the caller must free it, by
    /// [`free_raw`](crate::free_raw) or [`free_pages_bulk_raw`](crate::free_pages_bulk_raw) with the request's order. Values of other
    /// slots are not looked at.
    ///
    /// # Errors
    /// As [`alloc_pages_bulk_array`](Self::alloc_pages_bulk_array); the array is then unchanged.
    ///
    /// ```
    /// use pagemill::{Allocator, Bulk, Order, free_pages_bulk_raw};
    /// let mut slots = [std::ptr::null_mut(); 64];
    /// let filled = Allocator::global().alloc_pages_bulk_array_raw(Bulk::exact(64), &mut slots)?;
    /// assert_eq!((filled.added, filled.occupied), (64, 64));
    /// // SAFETY: the pages are ours, and nothing looks at them from here on.
    /// assert_eq!(unsafe { free_pages_bulk_raw(&mut slots, Order::ZERO) }, Ok(64));
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    #[inline(always)]
    pub fn alloc_pages_bulk_array_raw<N>(
        &self,
        request: Bulk<'_, N, Block>,
        slots: &mut [*mut u8],
    ) -> Result<Filled, Error> {
        let request = &request.request;
        let n = request.most;
        // SAFETY: pointers and addresses have one layout; what is written is the address of a page, or 0.
        let words = unsafe { core::slice::from_raw_parts_mut(slots.as_mut_ptr().cast::<usize>(), slots.len()) };
        if let [word @ 0, ..] = words
            && let Some((zone, pfn)) = self.one_page(request)
        {
            *word = zone.addr_of(pfn);
            give_away(*word, Order::ZERO);
            return Ok(Filled { added: 1, occupied: 1, first_hole: 1, shortfall: None });
        }
        if request.is_of_pages(SLOTS_MAX)
            && let Some(words) = words.get_mut(..n)
            && let Some(added) = self.fill_batch::<true>(request.gfp, words)
        {
            return Ok(Filled { added, occupied: n, first_hole: n, shortfall: None });
        }
        self.fill_array_raw(Request { ..*request }, words)
    }

    /// Fills the first n of `slots` with raw pointers, as [`alloc_pages_bulk_array_raw`](Self::alloc_pages_bulk_array_raw) does, and
    /// does not read them before (C3.19). Slots that get no block become null; slots from n on stay as they are.
    ///
    /// # Errors
    /// As [`alloc_pages_bulk_array`](Self::alloc_pages_bulk_array). The first n slots are then null, unless they are too few.
    ///
    /// ```
    /// use core::mem::MaybeUninit;
    /// use pagemill::{Allocator, Bulk, Order, free_pages_bulk_raw};
    /// let mut slots = [const { MaybeUninit::uninit() }; 64];
    /// let filled = Allocator::global().alloc_pages_bulk_array_raw_fresh(Bulk::exact(64), &mut slots)?;
    /// assert_eq!(filled.added, 64);
    /// // SAFETY: all slots are filled, and nothing looks at the pages from here on.
    /// assert_eq!(unsafe { free_pages_bulk_raw(&mut slots.map(|slot| slot.assume_init()), Order::ZERO) }, Ok(64));
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    #[inline(always)]
    pub fn alloc_pages_bulk_array_raw_fresh<N>(
        &self,
        request: Bulk<'_, N, Block>,
        slots: &mut [MaybeUninit<*mut u8>],
    ) -> Result<Filled, Error> {
        let request = &request.request;
        let n = request.most;
        // SAFETY: pointers and addresses have one layout; what is written is the address of a page, or 0.
        let words =
            unsafe { core::slice::from_raw_parts_mut(slots.as_mut_ptr().cast::<MaybeUninit<usize>>(), slots.len()) };
        if request.is_one_batch()
            && let Some(words) = words.get_mut(..n)
            && let Some(zone) = self.zones().here()
            && let Some(words) = zone.pop_words(request.gfp, words)
        {
            zone.give_away_pages(words);
            return Ok(Filled { added: n, occupied: n, first_hole: n, shortfall: None });
        }
        let slots = words.len();
        let words = words.get_mut(..n).ok_or(InvalidRequest::ArrayTooShort { slots, count: n })?;
        words.fill(MaybeUninit::new(0));
        // SAFETY: all of them were initialised just now.
        let words = unsafe { core::slice::from_raw_parts_mut(words.as_mut_ptr().cast::<usize>(), n) };
        self.fill_array_raw(Request { ..*request }, words)
    }

    /// Adds blocks to the tail of a list, which may have some already (the list form).
    ///
    /// # Errors
    /// As [`alloc_pages_bulk_array`](Self::alloc_pages_bulk_array), and if the list has blocks of another order. The list is then
    /// unchanged.
    ///
    /// ```
    /// use pagemill::{Allocator, Bulk, PageList};
    /// let mut list = PageList::new();
    /// let delivered = Allocator::global().alloc_pages_bulk_list(Bulk::up_to(64), &mut list)?;
    /// assert_eq!((delivered.blocks, list.len()), (64, 64));
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    #[inline(always)]
    pub fn alloc_pages_bulk_list<N, T: Owned>(
        &self,
        request: Bulk<'_, N, T>,
        list: &mut List<T>,
    ) -> Result<Delivered, Error> {
        let request = &request.request;
        if list.takes_pages()
            && let Some((_, pfn)) = self.one_page(request)
        {
            list.push_frame(pfn);
            return Ok(Delivered { blocks: 1, shortfall: None });
        }
        let n = request.most;
        if request.is_one_batch() && list.takes_pages() && self.extend_list_by_batch(request.gfp, n, list) {
            return Ok(Delivered { blocks: n, shortfall: None });
        }
        self.extend_list(Request { ..*request }, list)
    }

    #[inline(never)]
    fn extend_list_by_batch<T: Owned>(&self, gfp: Gfp, n: usize, list: &mut List<T>) -> bool {
        let mut batch = Batch::new();
        let found = self.zones().here().and_then(|zone| zone.pop_batch(gfp, n, &mut batch));
        if let Some(zone) = found {
            list.push_pages(zone, &batch);
        }
        found.is_some()
    }

    #[inline(never)]
    fn extend_list<T: Owned>(&self, mut request: Request<'_>, list: &mut List<T>) -> Result<Delivered, Error> {
        request.begin(self.zones())?;
        list.check_order(request.order)?;
        let (needed, mut got) = (request.least, 0);
        let served = self.all_or_wait(&mut request, needed, |request| self.take_list(request, needed, &mut got));
        let Some(mut fresh) = served? else { return Err(request.missed(self, got)) };
        list.append(&mut fresh)?;
        self.delivered(&request, got)
    }

    /// One attempt of the list form. Says how many blocks it `got`. If they are fewer than `needed`, they go back.
    #[inline(always)]
    fn take_list<T: Owned>(&self, request: &mut Request<'_>, needed: usize, got: &mut usize) -> Option<List<T>> {
        let mut fresh = List::of_order(request.order);
        if request.is_populated() {
            fresh = self.populated(request);
            *got = fresh.len();
        } else {
            *got = self.bulk(request, request.most, true, |zone, batch| fresh.push_batch(zone, batch));
        }
        // If it keeps none, they go back with `fresh`.
        request.keeps(*got, needed).then_some(fresh)
    }

    /// Hands each block to a function, which owns it from then on (the callback form). The function may allocate; if it unwinds,
    /// the blocks that it was not given go back. The form takes [`UpTo`] alone: blocks that it handed over cannot be taken back if
    /// too few come.
    ///
    /// # Errors
    /// [`Error::Invalid`], as for [`alloc_pages_bulk_list`](Self::alloc_pages_bulk_list).
    ///
    /// ```
    /// use pagemill::{Allocator, Bulk, Page};
    /// let mut kept: Vec<Page> = Vec::new();
    /// let delivered = Allocator::global().alloc_pages_bulk_callback(Bulk::up_to(64), |page| kept.push(page))?;
    /// assert_eq!((delivered.blocks, kept.len()), (64, 64));
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    /// ```compile_fail,E0308
    /// # use pagemill::{Allocator, Bulk, Page};
    /// Allocator::global().alloc_pages_bulk_callback(Bulk::exact(64), |page: Page| drop(page));
    /// ```
    #[inline]
    pub fn alloc_pages_bulk_callback<T: Owned>(
        &self,
        request: Bulk<'_, UpTo, T>,
        mut each: impl FnMut(T),
    ) -> Result<Delivered, Error> {
        let request = &request.request;
        if let Some((zone, pfn)) = self.one_page(request) {
            // SAFETY: the page is marked as handed out, and it goes to `each` alone.
            each(unsafe { T::from_word(zone.addr_of(pfn)) });
            return Ok(Delivered { blocks: 1, shortfall: None });
        }
        let mut batch = Batch::new();
        if request.is_one_batch()
            && let Some(zone) = self.take_batch(request.gfp, request.most, &mut batch)
        {
            let zero = zone.addr_of_pfn_zero();
            Undelivered { zero, order: 0, pfns: batch.as_pfns(), request }.deliver(&mut each);
            return Ok(Delivered { blocks: request.most, shortfall: None });
        }
        let mut request = Request { ..*request };
        request.begin(self.zones())?;
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
        let (mut taking, mut slow) = (Taking::new(self, &request, request.most, false), None);
        while let Some(zone) = taking.next(&mut slow, &mut batch) {
            let zero = zone.addr_of_pfn_zero();
            Undelivered { zero, order, pfns: batch.as_pfns(), request: &request }.deliver(&mut each);
        }
        let blocks = taking.end();
        self.delivered(&request, blocks)
    }

    /// Delivers contiguous runs, neighbouring blocks merged, as an I/O vector wants them (the runs form).
    ///
    /// # Errors
    /// As [`alloc_pages_bulk_list`](Self::alloc_pages_bulk_list); `runs` is then unchanged.
    ///
    /// ```
    /// use pagemill::{Allocator, Bulk, Run, Page};
    /// let mut runs: Vec<Run<Page>> = Vec::new();
    /// let delivered = Allocator::global().alloc_pages_bulk_runs(Bulk::up_to(256), &mut runs)?;
    /// assert_eq!(runs.iter().map(Run::len).sum::<usize>(), delivered.blocks);
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    #[inline(always)]
    pub fn alloc_pages_bulk_runs<N, T: Owned>(
        &self,
        request: Bulk<'_, N, T>,
        runs: &mut Vec<Run<T>>,
    ) -> Result<Delivered, Error> {
        let request = &request.request;
        if let Some((zone, pfn)) = self.one_page(request) {
            runs.push(Run::of_page(zone.addr_of(pfn)));
            return Ok(Delivered { blocks: 1, shortfall: None });
        }
        let n = request.most;
        if request.is_one_batch() && self.extend_runs_by_batch(request.gfp, n, runs) {
            return Ok(Delivered { blocks: n, shortfall: None });
        }
        self.extend_runs(Request { ..*request }, runs)
    }

    #[inline(never)]
    fn extend_runs_by_batch<T: Owned>(&self, gfp: Gfp, n: usize, runs: &mut Vec<Run<T>>) -> bool {
        let mut batch = Batch::new();
        let found = self.zones().here().and_then(|zone| zone.pop_batch(gfp, n, &mut batch));
        if let Some(zone) = found {
            Runs::new(runs, Order::ZERO).push_batch(zone.addr_of_pfn_zero(), &batch);
        }
        found.is_some()
    }

    #[inline(never)]
    fn extend_runs<T: Owned>(&self, mut request: Request<'_>, runs: &mut Vec<Run<T>>) -> Result<Delivered, Error> {
        let mut fresh = Runs::new(runs, request.order);
        request.begin(self.zones())?;
        let (needed, mut got) = (request.least, 0);
        let served = self.all_or_wait(&mut request, needed, |request| {
            got = if request.is_populated() {
                self.populated(request).map(|block| fresh.push(block)).count()
            } else {
                self.bulk(request, request.most, false, |zone, batch| fresh.push_batch(zone.addr_of_pfn_zero(), batch))
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
    /// One page, for a request that a plain single request can stand for (C3.3): that path, inlined. All other paths are calls with a
    /// copy of the request, so that only they write the request to memory.
    #[inline(always)]
    fn one_page(&self, request: &Request<'_>) -> Option<(&'static Zone, Pfn)> {
        if request.is_one_page() { self.zones().here()?.pop_one(request.gfp) } else { None }
    }

    /// All pages of a request for at most one batch, if the list has as many.
    #[inline(never)] // Keeps the code of each callback small.
    fn take_batch(&self, gfp: Gfp, n: usize, batch: &mut Batch) -> Option<&'static Zone> {
        self.zones().here()?.pop_batch(gfp, n, batch)
    }
}

/// Frames of a batch that the callback was not given. They go back if it unwinds.
struct Undelivered<'b> {
    zero: usize,
    order: usize,
    pfns: &'b [Pfn],
    request: &'b Request<'b>,
}

impl Undelivered<'_> {
    #[inline]
    fn word(&self, pfn: Pfn) -> usize {
        word_of(self.zero, pfn) | self.order
    }

    /// Hands the frames to a function. Always inlined, as its callers are: the function's variables stay in registers only if no
    /// pointer to them is kept.
    #[inline(always)]
    fn deliver<T: Owned>(mut self, each: &mut impl FnMut(T)) {
        while let Some((&pfn, rest)) = self.pfns.split_first() {
            self.pfns = rest;
            // SAFETY: the block is marked as handed out, nobody else has it, and it goes to `each` alone.
            each(unsafe { T::from_word(self.word(pfn)) });
        }
    }
}

impl Drop for Undelivered<'_> {
    #[inline]
    fn drop(&mut self) {
        if !self.pfns.is_empty() {
            self.request.refund(self.pfns.len());
            for &pfn in self.pfns {
                // It was prepared a moment ago, so the free is not refused.
                let _ = free_word(self.word(pfn));
            }
        }
    }
}

/// Blocks that the callback was not given. If it unwinds they go back and are taken off the account.
struct Rest<'r, I: Iterator> {
    blocks: I,
    request: &'r Request<'r>,
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
