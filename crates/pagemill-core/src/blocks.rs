//! Blocks of an order: taken whole, given back whole, or split into pages.
//!
//! Orders 0 to 8 lie within a pageblock: a run of bits, reserved by the count as single frames are (I1). Orders 9 and up are whole
//! pageblocks: their bits stay set, and their entry says that they are out (I3). See [`crate::buddy`] for the invariants.
use crate::area::{Entry, aligned_runs, best_runs, bits_of_runs, run_mask};
use crate::error::MisuseKind;
use crate::index::{Class, UNUSED};
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use crate::{Buddy, Mobility, Order, PAGEBLOCK_FRAMES, PageblockId, Pfn};
use Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};

impl Buddy<'_> {
    /// Takes one block of `order` from a pageblock of `mobility`, or an unused one, if `floor` frames stay free.
    pub fn alloc_block(&self, order: Order, mobility: Mobility, floor: u32) -> Option<Pfn> {
        self.alloc_any(order, Some(mobility), floor)
    }

    /// Takes one block of `order` from a pageblock of any mobility: the single attempt of C3.6.
    pub fn steal_block(&self, order: Order, floor: u32) -> Option<Pfn> {
        self.alloc_any(order, None, floor)
    }

    fn alloc_any(&self, order: Order, mobility: Option<Mobility>, floor: u32) -> Option<Pfn> {
        let frames = order.frames() as usize;
        let claim = self.claim(frames, floor)?;
        let pfn = match order {
            _ if claim.frames < frames => None,
            _ if order >= Order::PAGEBLOCK => self.alloc_large(order, mobility.unwrap_or(Mobility::Unmovable)),
            _ => self.alloc_small(order, mobility),
        };
        self.settle(claim, if pfn.is_some() { frames } else { 0 });
        pfn
    }

    /// Takes up to `want` blocks of `order`, which is 8 at most, from pageblocks of `mobility` or unused ones, as long as `floor` frames stay
    /// free. Blocks of one word are taken together: `emit` gets the word's first frame, and a bit for each block's first frame.
    /// Returns how many: none of a larger order.
    ///
    /// ```
    /// # use pagemill_core::{Mobility, Order, Pfn, Buddy, BuddyMetadata, atomic::{AtomicU32, AtomicU64}};
    /// # let need = BuddyMetadata::for_frames(512);
    /// # let bits: Vec<AtomicU64> = (0..need.words).map(|_| AtomicU64::new(0)).collect();
    /// # let areas: Vec<AtomicU32> = (0..need.areas).map(|_| AtomicU32::new(0)).collect();
    /// let buddy = Buddy::new(Pfn::new(0), 512, &bits, &areas).unwrap();
    /// let mut words = Vec::new();
    /// let order = Order::new(4)?;
    /// assert_eq!(buddy.take_blocks(order, 5, Mobility::Unmovable, 0, &mut |first, blocks| words.push((first, blocks))), 5);
    /// assert_eq!(words, [(Pfn::new(0), 0x0001_0001_0001_0001), (Pfn::new(64), 1)]);
    /// # Ok::<(), pagemill_core::Invalid>(())
    /// ```
    pub fn take_blocks(
        &self,
        order: Order,
        want: usize,
        mobility: Mobility,
        floor: u32,
        emit: &mut impl FnMut(Pfn, u64),
    ) -> usize {
        if order >= Order::PAGEBLOCK {
            return 0;
        }
        let frames = order.frames() as usize;
        let most = want.min(self.managed_frames() as usize / frames);
        let Some(claim) = self.claim(most * frames, floor) else { return 0 };
        let taken = self.take_small(order, (claim.frames / frames) as u32, Some(mobility), emit);
        self.settle(claim, taken as usize * frames);
        taken as usize
    }

    /// Orders 0 to 8: within pageblocks.
    fn take_small(&self, order: Order, want: u32, mobility: Option<Mobility>, emit: &mut impl FnMut(Pfn, u64)) -> u32 {
        let mut left = want;
        for class in mobility.into_iter().flat_map(|wanted| Class::best_fit(wanted, order.frames()).chain([UNUSED])) {
            let mut from = PageblockId::FIRST;
            while left > 0
                && let Some(block) = self.index.next(class, from)
            {
                from = block.offset(1);
                left -= self.take_in(block, order, left, mobility, emit);
            }
        }
        // Blocks that CPUs are bound to, and blocks missing in the index: look at all of them before saying "exhausted".
        let mut blocks = self.blocks();
        while left > 0
            && let Some(block) = blocks.next()
        {
            left -= self.take_in(block, order, left, mobility, emit);
        }
        want - left
    }

    /// One block of order 0 to 8.
    fn alloc_small(&self, order: Order, mobility: Option<Mobility>) -> Option<Pfn> {
        let mut found = None;
        self.take_small(order, 1, mobility, &mut |first, run| found = Some(first.offset(run.trailing_zeros())));
        found
    }

    /// The first place in the pageblock that has a run of this order: the index of a group of as many words as a block has.
    fn first_with_run(&self, block: PageblockId, order: Order) -> Option<usize> {
        let (span, in_word) = ((order.frames() as usize).div_ceil(64), order.get().min(6));
        let is_run = |group: &[AtomicU64]| group.iter().all(|word| aligned_runs(word.load(Relaxed), in_word) != 0);
        self.words_of(block).chunks(span).position(is_run)
    }

    fn take_in(
        &self,
        block: PageblockId,
        order: Order,
        want: u32,
        mobility: Option<Mobility>,
        emit: &mut impl FnMut(Pfn, u64),
    ) -> u32 {
        if self.is_withheld(block) { 0 } else { self.take_runs(block, order, want, mobility, emit) }
    }

    /// Takes up to `want` blocks of one pageblock; none if it is of another mobility than `mobility`.
    fn take_runs(
        &self,
        block: PageblockId,
        order: Order,
        want: u32,
        mobility: Option<Mobility>,
        emit: &mut impl FnMut(Pfn, u64),
    ) -> u32 {
        let (frames, in_word) = (order.frames(), order.get().min(6));
        // Looks before it reserves: most blocks of a fragmented buddy have no run of this order.
        let Some(first) = self.first_with_run(block, order) else { return 0 };
        let reserved = self.reserve(block, frames, want.saturating_mul(frames), mobility);
        let most = reserved / frames;
        let mut left = most;
        let span = (frames as usize).div_ceil(64);
        if reserved == PAGEBLOCK_FRAMES {
            let runs = if span == 1 { aligned_runs(!0, in_word) } else { 1 };
            if self.take_whole(block, span, |first| emit(first, runs)) {
                return most;
            }
        }
        for (i, group) in self.words_of(block).chunks(span).enumerate().skip(first) {
            if left == 0 {
                break;
            }
            let runs = claim_runs(group, in_word, left);
            if runs != 0 {
                emit(self.first_of_word(block.first_word().offset(i * span)), runs);
                // As in `Giving::put`: a word is one block, and needs no counting.
                left -= if in_word == 6 { 1 } else { runs.count_ones() };
            }
        }
        // The part that is no whole block, and blocks that other threads took first or that have no run.
        let surplus = reserved - (most - left) * frames;
        if surplus > 0 {
            self.raise(block, surplus);
        }
        most - left
    }

    /// Orders 9 and up: whole pageblocks.
    fn alloc_large(&self, order: Order, mobility: Mobility) -> Option<Pfn> {
        let span = (order.frames() / PAGEBLOCK_FRAMES) as usize;
        let head = Entry::whole(order, mobility);
        let mut found = if span == 1 { self.find_span(1, head) } else { None };
        if found.is_none() {
            // For a single pageblock too: the thread with the lock may be about to give back pageblocks that it took in vain.
            self.large.take(self.sleep);
            found = self.find_span(span, head);
            self.large.release(self.sleep);
        }
        found.map(|block| self.first_of(block))
    }

    fn find_span(&self, span: usize, head: Entry) -> Option<PageblockId> {
        let mut from = PageblockId::FIRST;
        while let Some(block) = self.index.next(UNUSED, from) {
            let first = self.next_aligned(block, span);
            if let Some(found) = self.claim_span(first, span, head) {
                return Some(found);
            }
            from = block.offset(1).max(first);
        }
        // All of them, as in `take_small`.
        let first = self.next_aligned(PageblockId::FIRST, span);
        (first.as_usize()..self.areas.len())
            .step_by(span)
            .find_map(|first| self.claim_span(PageblockId::new(first), span, head))
    }

    /// Claims `span` whole pageblocks from `first` on, or none of them.
    fn claim_span(&self, first: PageblockId, span: usize, head: Entry) -> Option<PageblockId> {
        // Looks before it claims: pageblocks that are claimed in vain are hidden from other requests meanwhile.
        let is_unused = |area: &AtomicU32| Entry(area.load(Relaxed)).free() == PAGEBLOCK_FRAMES;
        let is_whole = self.areas.get(first.as_usize()..)?.get(..span)?.iter().all(is_unused);
        if !is_whole || first.run(span).any(|block| self.is_withheld(block)) {
            return None;
        }
        let part = |block| if block == first { head } else { Entry::TAIL_OF_WHOLE };
        let taken = first.run(span).find(|&block| !self.claim_whole(block, part(block)));
        match taken {
            None => Some(first),
            Some(taken) => {
                first.run(taken.as_usize() - first.as_usize()).for_each(|block| {
                    self.release_whole(block, part(block));
                });
                None
            }
        }
    }

    /// Withholds a pageblock: from now on only [`take_withheld`](Self::take_withheld) and
    /// [`take_withheld_run`](Self::take_withheld_run) take from it, so that a block or run of `frames` becomes whole in it, at a
    /// multiple of `align` frames.
    /// Chooses the one with the most free frames of the pageblocks behind `from`, or of all if none of those will do. Requests
    /// that have begun to take from it go on. Returns its number; none if no pageblock can have so many. One pageblock is
    /// withheld at a time.
    pub fn withhold(&self, frames: u32, align: u32, from: PageblockId) -> Option<PageblockId> {
        let (frames, align) = (frames.max(1), align.max(1));
        let fits = |block: &PageblockId| {
            let entry = Entry(self.area(*block).load(Relaxed));
            !entry.is_whole() && entry.free() > 0 && self.could_have(*block, frames, align)
        };
        let free_of = |block: &PageblockId| Entry(self.area(*block).load(Relaxed)).free();
        let behind = self.blocks().skip(from.as_usize() + 1).filter(fits).max_by_key(free_of);
        let block = behind.or_else(|| self.blocks().filter(fits).max_by_key(free_of))?;
        self.withheld.store(block.as_entry(), Relaxed);
        Some(block)
    }

    /// Whether the pageblock has so many neighbouring frames from a multiple of `align` on, none of them absent.
    fn could_have(&self, block: PageblockId, frames: u32, align: u32) -> bool {
        let mut run = 0;
        (0..self.frames_of(block)).any(|at| {
            let absent = self.absent_in(block.first_word().offset(at as usize / 64));
            let is_cut = absent >> (at % 64) & 1 != 0 || (run == 0 && at % align != 0);
            run = if is_cut { 0 } else { run + 1 };
            run >= frames
        })
    }

    /// Takes a block of `order` from the withheld pageblock, if it has one and `floor` frames stay free. A whole pageblock becomes
    /// `mobility`'s if it is split.
    pub fn take_withheld(&self, order: Order, mobility: Mobility, floor: u32) -> Option<Pfn> {
        let block = PageblockId::from_entry(self.withheld.load(Relaxed))?;
        let frames = order.frames() as usize;
        let claim = self.claim(frames, floor)?;
        let pfn = match order {
            _ if claim.frames < frames || order > Order::PAGEBLOCK => None,
            Order::PAGEBLOCK => {
                let is_taken = self.claim_whole(block, Entry::whole(order, mobility));
                is_taken.then(|| self.first_of(block))
            }
            _ => {
                let mut found = None;
                let mut emit = |first: Pfn, run: u64| found = Some(first.offset(run.trailing_zeros()));
                self.take_runs(block, order, 1, None, &mut emit);
                found
            }
        };
        self.settle(claim, if pfn.is_some() { frames } else { 0 });
        pfn
    }

    /// Free frames of the withheld pageblock.
    pub fn withheld_frames(&self) -> u32 {
        let block = PageblockId::from_entry(self.withheld.load(Relaxed));
        block.map_or(0, |block| Entry(self.area(block).load(Relaxed)).free())
    }

    /// Withholds no pageblock any more.
    pub fn end_withholding(&self) {
        self.withheld.store(0, Relaxed);
    }

    /// Relaxed: a request that looked before goes on with the pageblock. The claimant tries again until the block is whole.
    pub(crate) fn is_withheld(&self, block: PageblockId) -> bool {
        self.withheld.load(Relaxed) == block.as_entry()
    }

    fn claim_whole(&self, block: PageblockId, whole: Entry) -> bool {
        let area = &self.area(block);
        let mut entry = Entry(area.load(Relaxed));
        self.note_use(block);
        while entry.free() == PAGEBLOCK_FRAMES {
            // SeqCst as in `reserve`. A bound block is taken too: its CPU finds it empty and binds another.
            match area.compare_exchange_weak(entry.0, whole.0, SeqCst, Relaxed) {
                Ok(_) => {
                    self.file(block, Class::of(entry, PAGEBLOCK_FRAMES), None);
                    return true;
                }
                Err(now) => entry = Entry(now),
            }
        }
        false
    }

    /// False: another thread released it before.
    fn release_whole(&self, block: PageblockId, whole: Entry) -> bool {
        // SeqCst: the next owner, in `claim_whole` or `reserve`, sees what this one wrote; and see `file`.
        let unused = Entry::unused(PAGEBLOCK_FRAMES);
        let is_released = self.area(block).compare_exchange(whole.0, unused.0, SeqCst, Relaxed).is_ok();
        if is_released {
            self.file(block, None, Some(UNUSED));
        }
        is_released
    }

    /// Gives one block of `order` back. Returns whether it completed a [closed](Self::close) buddy.
    ///
    /// # Errors
    /// The misuse that its bits or entry show; nothing is changed then. If two threads free one block at once, at least one of them
    /// gets an error, and the block is free once.
    pub fn free_block(&self, pfn: Pfn, order: Order) -> Result<bool, MisuseKind> {
        self.check_in_zone(pfn, order)?;
        let block = self.block_of(pfn);
        if order >= Order::PAGEBLOCK {
            let is_absent = self.absent_in(self.word_of(pfn)) & 1 != 0;
            let head =
                self.check_whole(block, order).map_err(|kind| if is_absent { MisuseKind::Foreign } else { kind })?;
            // The thread that released the first pageblock releases the others.
            if !self.release_whole(block, head) {
                return Err(MisuseKind::DoubleFree);
            }
            let span = (order.frames() / PAGEBLOCK_FRAMES) as usize;
            block.run(span).skip(1).for_each(|block| {
                self.release_whole(block, Entry::TAIL_OF_WHOLE);
            });
            return Ok(self.add_free(order.frames() as usize));
        }
        let first = self.word_of(pfn);
        let span = (order.frames() as usize).div_ceil(64);
        let mask = run_mask(order.get().min(6)) << (pfn.as_u32() % 64);
        let words = (0..span).map(|at| first.offset(at));
        if words.clone().any(|word| self.absent_in(word) & mask != 0) {
            return Err(MisuseKind::Foreign);
        }
        if words.clone().any(|word| self.bits[word.as_usize()].load(Relaxed) & mask != 0) {
            return Err(MisuseKind::DoubleFree);
        }
        // Only bits that were clear count: another thread may be freeing the same block.
        let freed = words.map(|word| (mask & !self.set_bits(word, mask)).count_ones()).sum();
        let mut is_complete = false;
        if freed > 0 {
            self.raise(block, freed);
            is_complete = self.add_free(freed as usize);
        }
        if freed == order.frames() { Ok(is_complete) } else { Err(MisuseKind::DoubleFree) }
    }

    /// Makes single pages of a block that is handed out; each is given back on its own from then on (C2.1). Whole pageblocks become
    /// pageblocks of the mobility that the block was asked for with.
    ///
    /// # Errors
    /// As [`free_block`](Self::free_block).
    pub fn split_block(&self, pfn: Pfn, order: Order) -> Result<(), MisuseKind> {
        self.check_in_zone(pfn, order)?;
        if order < Order::PAGEBLOCK {
            return Ok(());
        }
        let first = self.block_of(pfn);
        let mobility = self.check_whole(first, order)?.mobility();
        self.note_kind(mobility);
        for block in first.run((order.frames() / PAGEBLOCK_FRAMES) as usize) {
            self.words_of(block).iter().for_each(|word| word.store(0, Relaxed));
            // Release pairs with the Acquire in `reserve`: no thread sees a count before the cleared words.
            self.area(block).store(Entry::in_use(0, mobility).0, Release);
        }
        Ok(())
    }

    /// The entry of the first pageblock of a block of this order.
    fn check_whole(&self, block: PageblockId, order: Order) -> Result<Entry, MisuseKind> {
        let entry = Entry(self.area(block).load(Acquire));
        match entry.whole_order() {
            Some(0) => Err(MisuseKind::DoubleFree), // On its way to the system.
            Some(handed_out) if handed_out == order.get() => Ok(entry),
            Some(handed_out) => Err(MisuseKind::WrongOrder { handed_out, freed: order.get() }),
            None if entry.is_whole() => Err(MisuseKind::Inside),
            None => Err(MisuseKind::DoubleFree),
        }
    }

    /// Refuses a page that is not handed out: absent, free, or in a block that is handed out whole. Or outside of the span.
    pub(crate) fn check_page_out(&self, pfn: Pfn) -> Result<(), MisuseKind> {
        self.check_in_zone(pfn, Order::ZERO)?;
        let entry = Entry(self.area(self.block_of(pfn)).load(Acquire));
        match entry.whole_order() {
            _ if self.absent_in(self.word_of(pfn)) >> (pfn.as_u32() % 64) & 1 != 0 => Err(MisuseKind::Foreign),
            Some(0) => Err(MisuseKind::DoubleFree), // On its way to the system.
            Some(handed_out) if pfn.is_aligned_to(Order::PAGEBLOCK) => {
                Err(MisuseKind::WrongOrder { handed_out, freed: 0 })
            }
            _ if entry.is_whole() => Err(MisuseKind::Inside),
            _ if self.is_free(pfn) => Err(MisuseKind::DoubleFree),
            _ => Ok(()),
        }
    }

    pub(crate) fn check_in_zone(&self, pfn: Pfn, order: Order) -> Result<(), MisuseKind> {
        let (start, frames) = (self.start().as_u32(), u64::from(self.spanned_frames()));
        let is_inside = pfn.as_u32() >= start && u64::from(pfn.as_u32() - start) + u64::from(order.frames()) <= frames;
        match (is_inside, pfn.is_aligned_to(order)) {
            (false, _) => Err(MisuseKind::Foreign),
            (true, false) => Err(MisuseKind::Inside),
            (true, true) => Ok(()),
        }
    }
}

/// Clears up to `most` runs of 2^in_word bits in `group`'s only word, or all words of a larger group. Returns where they begin.
#[inline]
fn claim_runs(group: &[AtomicU64], in_word: u8, most: u32) -> u64 {
    if let [word] = group {
        let mut bits = word.load(Relaxed);
        loop {
            let runs = best_runs(bits, in_word, most);
            if runs == 0 {
                return 0;
            }
            // AcqRel as in `take_from`.
            match word.compare_exchange_weak(bits, bits & !bits_of_runs(runs, in_word), AcqRel, Relaxed) {
                Ok(_) => return runs,
                Err(now) => bits = now,
            }
        }
    }
    for (i, word) in group.iter().enumerate() {
        if word.compare_exchange(!0, 0, AcqRel, Relaxed).is_err() {
            // Release as in `set_bits`: the thread that takes these again sees what was written before.
            group[..i].iter().for_each(|word| word.store(!0, Release));
            return 0;
        }
    }
    1
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::{BuddyMetadata, Sleep};
    use std::vec::Vec;

    #[test]
    fn a_request_for_a_large_block_sleeps_while_another_one_searches() {
        static SLEPT: AtomicU32 = AtomicU32::new(0);
        static WOKEN: AtomicU32 = AtomicU32::new(0);
        // The other one shares the CPU: it goes on, and lets go, when this one sleeps and not before.
        let sleep = Sleep {
            wait: |word, _| {
                SLEPT.fetch_add(1, Relaxed);
                word.store(0, Release);
            },
            wake: |_| _ = WOKEN.fetch_add(1, Relaxed),
        };
        const FRAMES: u32 = 2048;
        let need = BuddyMetadata::for_frames(FRAMES);
        let bits: Vec<AtomicU64> = (0..need.words).map(|_| AtomicU64::new(0)).collect();
        let areas: Vec<AtomicU32> = (0..need.areas).map(|_| AtomicU32::new(0)).collect();
        let buddy = Buddy::new(Pfn::new(0), FRAMES, &bits, &areas).unwrap().sleeping(sleep);
        assert!(buddy.large.try_take());
        assert_eq!(buddy.alloc_block(Order::new(10).unwrap(), Mobility::Unmovable, 0), Some(Pfn::new(0)));
        // Once each: a thread that waited for the lock wakes the next waiter.
        assert_eq!((SLEPT.load(Relaxed), WOKEN.load(Relaxed)), (1, 1));
        assert!(buddy.large.try_take());
    }
}
