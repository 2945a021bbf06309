//! The per-CPU lists: the way of one page, and of a batch, out and in again. This is the fast path: inlined into the caller, one
//! section, one state, one address. What it does not serve goes to [`refill`](Zone::refill) and [`overflow`](Zone::overflow), cold
//! and out of line (C3.15).
//!
//! Here is also when lists are shut, so that freed pages go to the zone (`shutting.rs`).
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

    /// The fast path: a frame of this CPU's list and its self, for a handle; none where there is more to do.
    #[inline]
    pub(crate) fn pop_one(&'static self, gfp: Gfp) -> Option<(&'static Zone, Pfn)> {
        if !gfp.is_plain() {
            return None;
        }
        let pfn = Pfn::new(self.lists.pop(gfp.mobility())?);
        // The usual case only looks.
        let is_usual = !FULL && self.state(pfn) == FrameState::SAFE;
        if is_usual || self.hand_out_other(pfn) { Some((self, pfn)) } else { None }
    }

    /// A frame that was never handed out, or, with full states, any; one that somebody has is put aside.
    #[cold]
    #[inline(never)]
    fn hand_out_other(&self, pfn: Pfn) -> bool {
        let is_free = self.hand_out(pfn);
        if !is_free {
            self.quarantine(pfn);
        }
        is_free
    }

    /// The same for `n` frames, at most a batch's worth, all or none; counted as a bulk call.
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

    /// Fills words, a batch's worth at most, with those of pages for handles, if the list has as many and all were handed out before;
    /// counted as a bulk call. None: what stands in the words means nothing.
    #[inline(always)]
    pub(crate) fn pop_words<'w>(&self, gfp: Gfp, words: &'w mut [MaybeUninit<usize>]) -> Option<&'w [usize]> {
        let (mobility, n) = (gfp.mobility(), words.len());
        // SAFETY: every frame on the lists is the arena's, and has a state there.
        let mut pop = || unsafe { self.lists.pop_words(mobility, words, self.addr_of_zero(), self.states()) };
        if !gfp.is_plain() || !(pop() || self.reload_from_depot(mobility, n) && pop()) {
            return None;
        }
        // SAFETY: all are filled.
        let words = unsafe { core::slice::from_raw_parts(words.as_ptr().cast::<usize>(), n) };
        self.hand_out_safe(words);
        self.lists.count_bulk(BulkCall::Alloc, n);
        Some(words)
    }

    /// The same with slots that are empty, and are so again if there are too few.
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

    /// Puts frames back of which too few were sound.
    #[cold]
    #[inline(never)]
    fn return_sound(&self, batch: &mut Batch) {
        // They are a handle's as of a moment ago: nothing to refuse.
        batch.as_pfns().iter().filter(|&&pfn| self.comes_back::<false>(pfn)).for_each(|&pfn| self.put_back(pfn));
        batch.clear();
    }

    /// A page comes back, whose state says so already: onto the list of the CPU that frees it.
    #[inline(always)]
    pub(crate) fn put_back(&self, pfn: Pfn) {
        let mobility = self.mobility_of(pfn);
        if !self.lists.push(mobility, pfn.as_u32()) {
            self.overflow_one(mobility, pfn);
        }
    }

    /// Has the lists accept freed pages, or none while a request waits, the zone is low, or the arena is retired. Goes after each
    /// change of those: see `shutting.rs`.
    pub(crate) fn settle_lists(&self) {
        if !self.opening.try_enter() {
            return; // No handle is left: see `leave`.
        }
        let set = |is_open| self.lists.lists().for_each(if is_open { List::open } else { List::shut });
        shutting::settle(|| self.goes_past_lists(), set);
        // Nothing of this is to be touched from here on: see `leave`.
        self.opening.leave();
    }

    /// Whether freed pages go to the zone, where every CPU finds them, and not to a list.
    pub(crate) fn goes_past_lists(&self) -> bool {
        self.is_retired() || self.is_low.load(Relaxed) || self.shared.waits.is_awaited()
    }

    /// Called after pages of this zone were handed out. Below the zone's low mark its lists are shut until it is above the
    /// high mark: freed pages refill the zone's reserve, and on a list any request could take them.
    pub(crate) fn shut_lists_below_low(&self) {
        let low = self.marks.floor(Gfp::NOWAIT, Level::Low) as usize;
        if low > 0 && self.buddy.free_frames() < low && !self.is_low.swap(true, Relaxed) {
            self.settle_lists();
        }
    }

    /// Opens the lists again if the zone is above its high mark. The caller owns a page of the zone, so the arena stays.
    pub(crate) fn open_lists_above_high(&self) {
        let high = (self.marks.high as usize).saturating_add(self.marks.lowmem_reserve as usize);
        if self.is_low.load(Relaxed) && self.buddy.free_frames() >= high {
            self.is_low.store(false, Relaxed);
            self.settle_lists();
        }
    }
}
