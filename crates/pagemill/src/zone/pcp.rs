//! The per-CPU lists: one page and batches, from this CPU's list and back to it. This is the fast path, inlined into the caller: one
//! section, one state, one address. If the list cannot serve, [`refill`](Zone::refill) and [`overflow`](Zone::overflow) do, cold and
//! out of line (C3.15).
//!
//! This file also shuts and opens the lists; while they are shut, freed pages go to the buddy (`shutting.rs`).
use super::body::Zone;
use super::states::FULL;
use crate::shutting;
use core::mem::MaybeUninit;
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::{FrameState, Gfp, Level, Pfn};
use pagemill_os::lists::BulkCall;
use pagemill_os::{Batch, CpuStats, List};

impl Zone {
    /// This CPU's counters.
    pub(crate) fn stats_here(&self) -> &CpuStats {
        &self.lists.cpu(self.lists.here()).stats
    }

    /// The fast path: a frame of this CPU's list and its zone, marked for a handle; none if the slow path must look.
    #[inline]
    pub(crate) fn pop_one(&'static self, gfp: Gfp) -> Option<(&'static Zone, Pfn)> {
        if !gfp.is_plain() {
            return None;
        }
        let pfn = Pfn::new(self.lists.pop(gfp.mobility())?);
        // The state of most frames is only read.
        let is_usual = !FULL && self.state(pfn) == FrameState::SAFE;
        if is_usual || self.hand_out_other(pfn) { Some((self, pfn)) } else { None }
    }

    /// Marks a frame that was never handed out, or, with full states, any frame. A frame that has an owner is quarantined.
    #[cold]
    #[inline(never)]
    fn hand_out_other(&self, pfn: Pfn) -> bool {
        let is_free = self.hand_out(pfn);
        if !is_free {
            self.quarantine(pfn);
        }
        is_free
    }

    /// The same for `n` frames, at most a batch, all or none. Counts a bulk call.
    #[inline(always)]
    pub(crate) fn pop_batch(&'static self, gfp: Gfp, n: usize, batch: &mut Batch) -> Option<&'static Zone> {
        if !gfp.is_plain() || !self.lists.pop_all(gfp.mobility(), n, batch) {
            return None;
        }
        self.hand_out_batch(batch, |pfn| self.quarantine(pfn));
        if batch.len() < n {
            self.return_sound(batch);
            return None;
        }
        self.lists.count_bulk(BulkCall::Alloc, n);
        Some(self)
    }

    /// Fills at most a batch of words with those of pages for handles, if the list has as many pages and all were handed out before.
    /// Counts a bulk call. If it returns none, the contents of the words are meaningless.
    #[inline(always)]
    pub(crate) fn pop_words<'w>(&self, gfp: Gfp, words: &'w mut [MaybeUninit<usize>]) -> Option<&'w [usize]> {
        let (mobility, n) = (gfp.mobility(), words.len());
        // SAFETY: every frame on the lists is the arena's, and has a state there.
        let mut pop = || unsafe { self.lists.pop_words(mobility, words, self.addr_of_pfn_zero(), self.states()) };
        if !gfp.is_plain() || !(pop() || self.reload_from_depot(mobility, n) && pop()) {
            return None;
        }
        // SAFETY: all are filled.
        let words = unsafe { core::slice::from_raw_parts(words.as_ptr().cast::<usize>(), n) };
        self.hand_out_safe(words);
        self.lists.count_bulk(BulkCall::Alloc, n);
        Some(words)
    }

    /// The same with empty slots, which are empty again if the list has too few pages.
    #[inline(always)]
    pub(crate) fn fill_empty<'w>(&self, gfp: Gfp, words: &'w mut [usize]) -> Option<&'w [usize]> {
        let slots = core::ptr::from_mut(words);
        // SAFETY: what is written to them is initialised.
        let filled = self.pop_words(gfp, unsafe { &mut *(slots as *mut [MaybeUninit<usize>]) });
        if filled.is_none() {
            // SAFETY: exclusively borrowed for 'w, and what borrowed them again has ended.
            unsafe { (*slots).fill(0) };
        }
        filled
    }

    /// Puts the frames of a short batch back.
    #[cold]
    #[inline(never)]
    fn return_sound(&self, batch: &mut Batch) {
        // They were marked a moment ago, so their free is not refused.
        batch.as_pfns().iter().filter(|&&pfn| self.mark_page_free::<false>(pfn)).for_each(|&pfn| self.put_back(pfn));
        batch.clear();
    }

    /// Puts a page that is marked as free on the list of this CPU.
    #[inline(always)]
    pub(crate) fn put_back(&self, pfn: Pfn) {
        let mobility = self.mobility_of(pfn);
        if !self.lists.push(mobility, pfn.as_u32()) {
            self.overflow_one(mobility, pfn);
        }
    }

    /// Opens the lists, or shuts them while a request waits, the zone is low, or it is retired. Called after each change of these: see
    /// `shutting.rs`.
    pub(crate) fn settle_lists(&self) {
        if !self.opening.try_enter() {
            return; // No handle is left: see `leave`.
        }
        let set = |is_open| self.lists.lists().for_each(if is_open { List::open } else { List::shut });
        shutting::settle(|| self.goes_past_lists(), set);
        // Nothing of the zone may be touched from here on: see `leave`.
        self.opening.leave();
    }

    /// Whether freed pages go to the buddy, where every CPU finds them, and not to a list.
    pub(crate) fn goes_past_lists(&self) -> bool {
        self.is_retired() || self.is_low.load(Relaxed) || self.shared.waits.is_awaited()
    }

    /// Called after pages were handed out. Below the low watermark the lists are shut until the zone is above the high one: freed pages
    /// refill the reserve, and on a list any request could take them.
    pub(crate) fn shut_lists_below_low(&self) {
        let low = self.marks.floor(Gfp::NOWAIT, Level::Low) as usize;
        if low > 0 && self.buddy.free_frames() < low && !self.is_low.swap(true, Relaxed) {
            self.settle_lists();
        }
    }

    /// Opens the lists if the zone is above its high watermark. The caller owns a page, so the zone stays.
    pub(crate) fn open_lists_above_high(&self) {
        let high = (self.marks.high as usize).saturating_add(self.marks.lowmem_reserve as usize);
        if self.is_low.load(Relaxed) && self.buddy.free_frames() >= high {
            self.is_low.store(false, Relaxed);
            self.settle_lists();
        }
    }
}
