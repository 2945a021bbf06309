//! The array form: finds the empty slots and fills them.
use super::request::{Delivered, Filled, Request};
use crate::allocator::Allocator;
use crate::error::{Error, InvalidRequest};
use crate::free::{free_word, give_away};
use crate::handle::{Block, Owned, slots_as_words};
use crate::list::List;
use crate::registry;
use crate::word::{TENTATIVE, addr_of_word, word_of};
use crate::zone::Zone;
use core::mem::MaybeUninit;
use pagemill_core::{Exhausted, Gfp, Order, Pfn};
use pagemill_os::{Batch, are_empty, empty_slots, fill_pages, find_empty};

/// Longest array whose empty slots are found before they are filled: 16 masks of 64 slots.
pub(super) const SLOTS_MAX: usize = 1024;

impl Allocator {
    #[inline(never)]
    pub(super) fn fill_array(
        &self,
        mut request: Request<'_>,
        words: &mut [usize],
        is_fresh: bool,
    ) -> Result<Filled, Error> {
        request.begin(self.zones())?;
        let n = request.most;
        let slots = words.len();
        let words = words.get_mut(..n).ok_or(InvalidRequest::ArrayTooShort { slots, count: n })?;
        let occupied = if request.least == 0 || is_fresh { 0 } else { words.iter().filter(|&&word| word != 0).count() };
        let (needed, mut got) = (request.least.saturating_sub(occupied), 0);
        let served = self.all_or_wait(&mut request, needed, |request| {
            let filled = match request.is_populated() {
                true => self.fill_populated(request, words),
                false => self.fill(request, words, if is_fresh { Holes::all(n) } else { Holes::of(words) }),
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

    /// Fills all empty slots of an array of at most [`SLOTS_MAX`], if they are at most a batch and the list has as many pages. Returns
    /// how many it filled. `RAW`: with raw pointers.
    #[inline(never)]
    pub(super) fn fill_batch<const RAW: bool>(&self, gfp: Gfp, words: &mut [usize]) -> Option<usize> {
        // Flags that contradict each other are refused even where no slot is empty: by the general way.
        let zone = if gfp.is_plain() { self.zones().here()? } else { return None };
        if words.len() > Batch::CAPACITY {
            // If the first 64 slots are empty, usually more than a batch is missing.
            let is_sparse = !are_empty(&words[..Batch::CAPACITY]);
            return if is_sparse { Self::fill_holes::<{ SLOTS_MAX / 64 }, RAW>(zone, gfp, words) } else { None };
        }
        if !are_empty(words) {
            return Self::fill_holes::<1, RAW>(zone, gfp, words);
        }
        let filled = zone.fill_empty(gfp, words)?;
        if RAW {
            zone.give_away_pages(filled);
        }
        Some(filled.len())
    }

    /// The same for an array with some full slots.
    #[inline(never)]
    fn fill_holes<const MASKS: usize, const RAW: bool>(
        zone: &'static Zone,
        gfp: Gfp,
        words: &mut [usize],
    ) -> Option<usize> {
        let mut masks = [0; MASKS];
        let (missing, mut batch) = (find_empty(words, &mut masks), Batch::new());
        match missing {
            0 => return Some(0),
            1 => batch.push(zone.pop_one(gfp)?.1.as_u32()), // One page is no bulk call.
            2..=Batch::CAPACITY => _ = zone.pop_batch(gfp, missing, &mut batch)?,
            _ => return None,
        }
        let zero = zone.addr_of_pfn_zero();
        let mut pfns = batch.as_pfns().iter();
        for (words, mut holes) in words.chunks_mut(64).zip(masks) {
            while holes != 0
                && let Some(&pfn) = pfns.next()
            {
                let word = &mut words[holes.trailing_zeros() as usize];
                *word = word_of(zero, pfn);
                if RAW {
                    zone.give_away_pages(std::slice::from_ref(word));
                }
                holes &= holes - 1;
            }
        }
        Some(missing)
    }

    #[inline(never)]
    pub(super) fn extend_array_by_batch<T: Owned>(&self, gfp: Gfp, n: usize, slots: &mut Vec<Option<T>>) -> bool {
        let Some(zone) = self.zones().here() else { return false };
        slots.reserve(n);
        let before = slots.len();
        let fresh = &mut slots.spare_capacity_mut()[..n];
        // SAFETY: a slot has the layout of a word, as `slots_as_words` asserts.
        let words = unsafe { core::slice::from_raw_parts_mut(fresh.as_mut_ptr().cast::<MaybeUninit<usize>>(), n) };
        let are_filled = zone.pop_words(gfp, words).is_some();
        if are_filled {
            // SAFETY: each slot has the word of a page that is marked as handed out and that nobody else has.
            unsafe { slots.set_len(before + n) };
        }
        are_filled
    }

    #[inline(never)]
    pub(super) fn extend_array<T: Owned>(
        &self,
        request: Request<'_>,
        slots: &mut Vec<Option<T>>,
    ) -> Result<Delivered, Error> {
        let (n, before) = (request.most, slots.len());
        if n > self.zones().all().iter().map(|zone| zone.frames()).sum() {
            // More slots than all zones have frames are not made.
            let mut blocks = List::new();
            let delivered = self.extend_list(request, &mut blocks)?;
            slots.extend(blocks.map(Some));
            return Ok(delivered);
        }
        slots.resize_with(before + n, || None);
        let filled = self.fill_array(request, &mut slots_as_words(slots)[before..], true);
        let (blocks, shortfall) = filled.as_ref().map_or((0, None), |filled| (filled.added, filled.shortfall));
        slots.truncate(before + blocks);
        filled.map(|_| Delivered { blocks, shortfall })
    }

    #[inline(never)]
    pub(super) fn fill_array_raw(&self, mut request: Request<'_>, words: &mut [usize]) -> Result<Filled, Error> {
        // Checks the request as the caller made it: below, its counts change to those of the empty slots.
        request.begin(self.zones())?;
        let (n, slots) = (request.most, words.len());
        let words = words.get_mut(..n).ok_or(InvalidRequest::ArrayTooShort { slots, count: n })?;
        if are_empty(words) {
            let slots = BecomeRaw { order: request.order, words };
            return self.fill_array(request, slots.words, true);
        }
        let occupied = words.iter().filter(|&&word| word != 0).count();
        (request.most, request.least) = (n - occupied, request.least.saturating_sub(occupied));
        let mut blocks = List::<Block>::new();
        let delivered = self.extend_list(request, &mut blocks).map_err(|error| match error {
            Error::Exhausted(short) => {
                Exhausted { wanted: short.wanted + occupied, got: short.got + occupied, ..short }.into()
            }
            other => other,
        });
        let Delivered { blocks: added, shortfall } = delivered?;
        for (word, block) in words.iter_mut().filter(|word| **word == 0).zip(blocks) {
            *word = block.into_raw().0.expose_provenance();
        }
        let first_hole = words.iter().position(|&word| word == 0).unwrap_or(n);
        Ok(Filled { added, occupied: occupied + added, first_hole, shortfall })
    }

    /// The array form, on the words behind the slots. Returns how many slots it filled, and the first one that is still empty. If
    /// the request must have more, it has emptied those slots again.
    #[inline]
    fn fill(&self, request: &Request<'_>, words: &mut [usize], mut holes: Holes) -> (usize, usize) {
        let n = words.len();
        let missing = holes.missing;
        if missing == 0 {
            return (0, n);
        }
        // A request that keeps all or nothing marks the slots that it fills, to tell them from those that were full.
        let mark = if request.least > 0 { TENTATIVE } else { 0 };
        let low = usize::from(request.order.get()) | mark;
        let mut tentative = Tentative { words, is_kept: mark == 0 };
        let added = self.bulk(request, missing, mark != 0, |zone, batch| {
            holes.fill(tentative.words, batch.as_pfns(), zone.addr_of_pfn_zero() | low);
        });
        if mark != 0 && n - missing + added >= request.least {
            tentative.keep();
        }
        drop(tentative);
        let first_hole = if added == missing { n } else { words.iter().position(|&word| word == 0).unwrap_or(n) };
        (added, first_hole)
    }
}

/// An array that was empty, filled with the words of handles to blocks of one order. Dropping this turns them into raw pointers,
/// also when the request unwinds.
struct BecomeRaw<'w> {
    words: &'w mut [usize],
    order: Order,
}

impl Drop for BecomeRaw<'_> {
    fn drop(&mut self) {
        let filled = self.words.iter().position(|&word| word == 0).unwrap_or(self.words.len());
        for words in self.words[..filled].chunks_mut(Batch::CAPACITY) {
            match registry::recent(words[0]) {
                Some((zone, _)) if self.order == Order::ZERO && zone.has_pages(words) => zone.give_away_pages(words),
                _ => words.iter_mut().for_each(|word| {
                    *word = addr_of_word(*word);
                    give_away(*word, self.order);
                }),
            }
        }
    }
}

/// The slots of an array request. Unless `is_kept`, dropping this empties the marked slots again, also when the request unwinds.
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
            // It was prepared a moment ago, so the free is not refused.
            let _ = free_word(core::mem::take(word) & !TENTATIVE);
        }
    }
}

/// Empty slots of an array that are still to be filled, in ascending order.
struct Holes {
    missing: usize,
    /// All slots from `at` on are empty.
    are_all: bool,
    /// The empty ones of the 64 slots from `at` on.
    mask: u64,
    at: usize,
}

impl Holes {
    /// For `n` slots, all of them empty.
    fn all(n: usize) -> Self {
        Self { missing: n, are_all: true, mask: 0, at: 0 }
    }

    fn of(words: &[usize]) -> Self {
        if are_empty(words) {
            return Self::all(words.len());
        }
        let count = |chunk| empty_slots(chunk).count_ones() as usize;
        let missing = words.chunks(64).map(count).sum();
        Self { missing, are_all: false, mask: empty_slots(&words[..words.len().min(64)]), at: 0 }
    }

    /// Fills one slot for each block; there are enough empty ones. `zero` is the word of frame 0: its address, order and mark.
    #[inline(always)]
    fn fill(&mut self, words: &mut [usize], mut pfns: &[Pfn], zero: usize) {
        if self.are_all {
            fill_pages(&mut words[self.at..self.at + pfns.len()], pfns, zero);
            self.at += pfns.len();
            return;
        }
        while let Some((&pfn, rest)) = pfns.split_first() {
            while self.mask == 0 {
                self.at += 64;
                let end = words.len().min(self.at + 64);
                self.mask = empty_slots(&words[self.at..end]);
            }
            words[self.at + self.mask.trailing_zeros() as usize] = word_of(zero, pfn);
            self.mask &= self.mask - 1;
            pfns = rest;
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{Allocator, Bulk, Memory, Mobility, Order, Page};
    use pagemill_core::{FrameState, Pfn};

    #[test]
    fn a_small_array_filled_from_the_list_counts_as_one_bulk_call() {
        let allocator = Allocator::builder().memory(Memory::anonymous(1024)).cpus(1, || 0).build().unwrap();
        drop(allocator.alloc_page(crate::Gfp::KERNEL).unwrap()); // The list has pages.
        let calls = || allocator.stats().bulk_alloc.iter().sum::<u64>();
        let (before, mut slots) = (calls(), [const { None::<Page> }; 4]);
        allocator.alloc_pages_bulk_array(Bulk::exact(4), &mut slots).unwrap();
        assert_eq!(calls(), before + 1);
        slots[1] = None;
        assert_eq!(allocator.alloc_pages_bulk_array(Bulk::exact(4), &mut slots).unwrap().added, 1);
        assert_eq!(calls(), before + 1, "one page is no bulk call");
    }

    /// The second page from the top is out: the section takes nothing, and the general way quarantines that page.
    #[test]
    fn a_small_array_that_meets_a_page_that_somebody_has_is_filled_all_the_same() {
        let allocator = Allocator::builder().memory(Memory::anonymous(1024)).cpus(1, || 0).build().unwrap();
        let zone = allocator.zones().first();
        drop(allocator.alloc_page(crate::Gfp::KERNEL).unwrap()); // The list has pages.
        let list = allocator.zones().first().lists().list_here(Mobility::Unmovable);
        let top: Vec<Pfn> = list.frames().map(Pfn::new).collect();
        let taken = top[top.len() - 2];
        zone.set_state(taken, FrameState::raw(Order::ZERO));
        let mut slots: [Option<Page>; 4] = [const { None }; 4];
        let filled = allocator.alloc_pages_bulk_array(Bulk::exact(4), &mut slots).unwrap();
        assert_eq!((filled.added, filled.occupied, filled.first_hole), (4, 4, 4));
        assert!(slots.iter().flatten().all(|page| page.addr() != zone.addr_of(taken)));
        let stats = allocator.stats();
        assert_eq!(stats.allocated - stats.freed, 4 + 1, "four pages, and the one that was put aside");
        drop(slots);
        allocator.drain();
        assert_eq!(allocator.validate().unwrap().quarantined, 1);
    }
}
