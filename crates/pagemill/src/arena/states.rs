//! The state of each frame: whose it is, and the checks of that at hand-out and when it comes back (C2.4).
//!
//! A byte a frame, written by the frame's owner alone, and looked at by anybody: a thread that frees what is not its own, and
//! `validate`. So each is an atomic. In a run of neighbours they are looked at and written several at once
//! (`pagemill-sys/src/cells.rs`).
use super::{Arena, GROUP};
use core::ptr;
use core::sync::atomic::{AtomicU8, Ordering::Relaxed};
use pagemill_core::{FrameState, Mobility, Order, PAGE_SIZE, step};
use pagemill_sys::{Batch, bytes_differ, set_bytes};

impl Arena {
    #[inline]
    fn state_cell(&self, pfn: u32) -> &AtomicU8 {
        debug_assert!(self.has_pfn(pfn));
        // SAFETY: a frame of this arena has a byte in the table, for as long as the arena lives.
        unsafe { AtomicU8::from_ptr(self.states.wrapping_add(pfn as usize)) }
    }
    #[inline]
    pub(crate) fn state(&self, pfn: u32) -> FrameState {
        FrameState::from_byte(self.state_cell(pfn).load(Relaxed))
    }
    #[inline]
    pub(crate) fn set_state(&self, pfn: u32, state: FrameState) {
        self.state_cell(pfn).store(state.as_byte(), Relaxed);
    }

    /// Marks one free frame as handed out. False: it is not free.
    #[inline]
    pub(crate) fn hand_out(&self, pfn: u32, mobility: Mobility) -> bool {
        step!("Arena::hand_out");
        if cfg!(feature = "detection-off") {
            return true;
        }
        let is_free = self.state(pfn).is_free();
        if is_free {
            self.set_state(pfn, FrameState::handed_out(Order::ZERO, mobility));
        }
        is_free
    }

    /// Marks the frames of `batch` as handed out and takes those out of it that are not free, which `refused` gets.
    /// Returns the first frame, if all that are left follow each other.
    #[inline]
    pub(crate) fn hand_out_batch(
        &self,
        batch: &mut Batch,
        mobility: Mobility,
        refused: impl FnMut(u32),
    ) -> Option<u32> {
        let run = batch.as_run();
        if cfg!(feature = "detection-off") {
            return run;
        }
        if run.is_some_and(|first| self.hand_out_run(first, batch.len(), mobility)) {
            return run;
        }
        self.hand_out_each(batch, mobility, refused);
        None
    }

    /// Marks `n` neighbours from `first` on as handed out, if all are free.
    #[inline]
    pub(crate) fn hand_out_run(&self, first: u32, n: usize, mobility: Mobility) -> bool {
        if cfg!(feature = "detection-off") {
            return true;
        }
        let are_free = self.are_free(first, n);
        if are_free {
            self.set_states(first, n, FrameState::handed_out(Order::ZERO, mobility));
        }
        are_free
    }

    fn hand_out_each(&self, batch: &mut Batch, mobility: Mobility, mut refused: impl FnMut(u32)) {
        let (mut at, mut kept) = (0, 0);
        let pfns = batch.as_mut_slice();
        while at < pfns.len() {
            if let Some(first) = pfns[at..].first_chunk::<GROUP>().and_then(group_run)
                && self.hand_out_run(first, GROUP, mobility)
            {
                pfns.copy_within(at..at + GROUP, kept);
                (at, kept) = (at + GROUP, kept + GROUP);
                continue;
            }
            let pfn = pfns[at];
            if self.hand_out(pfn, mobility) {
                pfns[kept] = pfn;
                kept += 1;
            } else {
                refused(pfn);
            }
            at += 1;
        }
        batch.truncate(kept);
    }

    /// The mobility of a page that is handed out, which says its list; none if it is no such page.
    #[inline]
    pub(crate) fn page_mobility(&self, pfn: u32) -> Option<Mobility> {
        let state = self.state(pfn);
        // A branch for the usual one: what follows need not wait for the state.
        if state == FrameState::handed_out(Order::ZERO, Mobility::Unmovable) {
            Some(Mobility::Unmovable)
        } else {
            other_page_mobility(state)
        }
    }

    /// Marks a page as free. Its mobility; none if it is no page that is handed out.
    pub(crate) fn take_back_page(&self, pfn: u32) -> Option<Mobility> {
        if cfg!(feature = "detection-off") {
            return Some(Mobility::Unmovable);
        }
        let mobility = self.state(pfn).page_mobility()?;
        self.set_state(pfn, FrameState::FREE);
        Some(mobility)
    }

    /// Marks a page as free, if it is handed out with this mobility.
    #[inline]
    pub(crate) fn take_back(&self, pfn: u32, mobility: Mobility) -> bool {
        step!("Arena::take_back");
        if cfg!(feature = "detection-off") {
            return true;
        }
        let is_out = self.state(pfn) == FrameState::handed_out(Order::ZERO, mobility);
        if is_out {
            self.set_state(pfn, FrameState::FREE);
        }
        is_out
    }

    /// Marks `n` neighbours from `first` on as free, if all are pages handed out with this mobility.
    #[inline]
    pub(crate) fn take_back_run(&self, first: u32, n: usize, mobility: Mobility) -> bool {
        if cfg!(feature = "detection-off") {
            return true;
        }
        let are_out = self.states_differ(first, n, FrameState::handed_out(Order::ZERO, mobility), !0) == 0;
        if are_out {
            self.set_states(first, n, FrameState::FREE);
        }
        are_out
    }

    /// Which of these bits any of `n` neighbours' states has unlike `state`.
    #[inline]
    fn states_differ(&self, first: u32, n: usize, state: FrameState, bits: u8) -> u64 {
        debug_assert!(self.has_pfn(first) && self.has_pfn(first + n as u32 - 1));
        // SAFETY: inside the table, all of which is loaded and stored as `state_cell` or `cells` do.
        unsafe { bytes_differ(self.states.wrapping_add(first as usize), n, state.as_byte(), bits) }
    }
    /// Are these all states of free frames?
    #[inline]
    fn are_free(&self, first: u32, n: usize) -> bool {
        // Fresh or not, that is the lowest bit.
        self.states_differ(first, n, FrameState::FREE, !FrameState::FREE.as_byte()) == 0
    }
    /// Were none of these, all free, handed out since the system gave them? A hint while others take them.
    pub(crate) fn are_fresh(&self, first: u32, n: usize) -> bool {
        self.states_differ(first, n, FrameState::FRESH, !0) == 0
    }
    #[inline]
    fn set_states(&self, first: u32, n: usize, state: FrameState) {
        debug_assert!(self.has_pfn(first) && self.has_pfn(first + n as u32 - 1));
        // SAFETY: as in `states_differ`.
        unsafe { set_bytes(self.states.wrapping_add(first as usize), n, state.as_byte()) }
    }

    /// Marks a block as handed out. The first frame of it that is not free, if one is not; then nothing is changed.
    pub(crate) fn hand_out_block(&self, pfn: u32, order: Order, mobility: Mobility) -> Result<(), u32> {
        if cfg!(feature = "detection-off") {
            return Ok(());
        }
        let n = order.frames() as usize;
        if !self.are_free(pfn, n)
            && let Some(taken) = (pfn..pfn + order.frames()).find(|&pfn| !self.state(pfn).is_free())
        {
            return Err(taken);
        }
        self.set_states(pfn, n, FrameState::INSIDE);
        self.set_state(pfn, FrameState::handed_out(order, mobility));
        Ok(())
    }

    /// Marks all frames of a block that is handed out: as free ones, or as pages when it is split.
    pub(crate) fn mark_block(&self, pfn: u32, order: Order, state: FrameState) {
        self.mark(pfn, order.frames() as usize, state);
    }

    /// Marks `n` neighbouring frames of which the caller is the owner: who had them, or who took them out of the zone.
    pub(super) fn mark(&self, first: u32, n: usize, state: FrameState) {
        if !cfg!(feature = "detection-off") {
            self.set_states(first, n, state);
        }
    }

    /// After a fork: settles the states of `n` frames from `first` on where a thread stopped in the middle of writing
    /// them, and returns them. `block_end` is where the block ends that was seen last, `quarantined` counts.
    pub(crate) fn settle_states(
        &self,
        first: u32,
        n: usize,
        block_end: &mut u32,
        quarantined: &mut u64,
    ) -> &[FrameState] {
        let is_settled = first >= *block_end && self.are_free(first, n);
        debug_assert!(self.has_pfn(first) && self.has_pfn(first + n as u32 - 1));
        // SAFETY: inside the table, in a process that has one thread, which has no other such slice.
        let states = unsafe { core::slice::from_raw_parts_mut(self.states.wrapping_add(first as usize), n) };
        for (pfn, byte) in (first..).zip(&mut *states).filter(|_| !is_settled) {
            let state = FrameState::from_byte(*byte);
            if pfn < *block_end {
                *byte = FrameState::INSIDE.as_byte();
            } else if let Some(order) = state.order() {
                *block_end = pfn + order.frames();
            } else if state == FrameState::INSIDE {
                *byte = FrameState::FREE.as_byte();
            } else if state == FrameState::QUARANTINED {
                *quarantined += 1;
            }
        }
        // SAFETY: a FrameState is transparent over its byte.
        unsafe { core::slice::from_raw_parts(states.as_ptr().cast(), n) }
    }

    /// Zeroes those of a block's frames that somebody may have written to (C2.2). Before it is marked handed out.
    pub(crate) fn zero(&self, pfn: u32, order: Order) {
        for pfn in pfn..pfn + order.frames() {
            let state = self.state(pfn);
            if cfg!(feature = "detection-off") || !self.is_zeroed() || (state.is_free() && state != FrameState::FRESH) {
                let page = ptr::with_exposed_provenance_mut::<u8>(self.addr_of(pfn));
                // SAFETY: a page of this arena, which the caller took and has not handed on.
                unsafe { page.write_bytes(0, PAGE_SIZE) };
            }
        }
    }
}

#[cold]
#[inline(never)]
fn other_page_mobility(state: FrameState) -> Option<Mobility> {
    state.page_mobility()
}

/// The first of these numbers, if all follow each other.
#[inline]
fn group_run(pfns: &[u32; GROUP]) -> Option<u32> {
    let first = pfns[0];
    let differs = (0..GROUP).fold(0, |differs, i| differs | (pfns[i] ^ first.wrapping_add(i as u32)));
    (differs == 0).then_some(first)
}

#[cfg(test)]
#[cfg(not(feature = "detection-off"))]
mod tests {
    use crate::{Allocator, Gfp, Memory, Mobility, Order, free_raw};
    use pagemill_core::{FrameState, MisuseKind};
    use pagemill_sys::Batch;

    #[test]
    fn a_run_with_a_frame_that_is_not_free_is_not_handed_out() {
        let allocator = Allocator::builder().pages(64).build().unwrap();
        let arena = allocator.nodes().first().arena;
        let first = arena.first;
        let out = |order: u8| FrameState::handed_out(Order::new(order).unwrap(), Mobility::Unmovable);
        for state in [out(0), out(1), FrameState::INSIDE, FrameState::QUARANTINED] {
            arena.set_state(first + 3, state);
            assert!(!arena.hand_out_run(first, 8, Mobility::Unmovable), "{state:?}");
            assert_eq!([first, first + 3].map(|pfn| arena.state(pfn)), [FrameState::FRESH, state]);
        }
        arena.set_state(first + 3, FrameState::FREE);
        assert!(arena.hand_out_run(first, 8, Mobility::Unmovable));
        (first..first + 8).for_each(|pfn| arena.set_state(pfn, FrameState::FREE));
    }

    #[test]
    fn a_frame_that_is_not_free_is_left_out_of_a_batch_wherever_it_stands() {
        let allocator = Allocator::builder().pages(1024).build().unwrap();
        let arena = allocator.nodes().first().arena;
        let out = FrameState::handed_out(Order::ZERO, Mobility::Unmovable);
        for taken in (0..8).chain(16..24).chain([40]) {
            let mut batch = Batch::new();
            batch.push_run(arena.first, 8);
            batch.push_run(arena.first + 16, 8);
            batch.push(arena.first + 40);
            arena.set_state(arena.first + taken, out);
            let before: Vec<u32> = batch.as_slice().to_vec();
            let mut refused = Vec::new();
            assert_eq!(arena.hand_out_batch(&mut batch, Mobility::Unmovable, |pfn| refused.push(pfn)), None);
            assert_eq!(refused, [arena.first + taken]);
            let kept: Vec<u32> = before.into_iter().filter(|&pfn| pfn != arena.first + taken).collect();
            assert_eq!(batch.as_slice(), kept);
            kept.iter().for_each(|&pfn| {
                assert_eq!(arena.state(pfn), out);
                arena.set_state(pfn, FrameState::FREE);
            });
            arena.set_state(arena.first + taken, FrameState::FREE);
        }
    }

    #[test]
    fn what_is_out_of_a_block_that_is_put_aside_comes_back_singly() {
        let allocator = Allocator::builder().memory(Memory::anonymous(512)).build().unwrap();
        let arena = allocator.nodes().first().arena;
        // Somebody has two pages that are free all the same: they were freed twice.
        let [one, other] = [arena.first + 7, arena.first + 100];
        let out = FrameState::handed_out(Order::ZERO, Mobility::Unmovable);
        [one, other].iter().for_each(|&pfn| arena.set_state(pfn, out));
        assert!(allocator.alloc_pages(Gfp::KERNEL, Order::PAGEBLOCK).is_err());
        let free = |pfn| {
            let page = core::ptr::with_exposed_provenance_mut(arena.addr_of(pfn));
            // SAFETY: nobody looks at it.
            unsafe { free_raw(page, Order::ZERO) }
        };
        // The first that was found is put aside with what was free; the other one's owner gives it back.
        assert_eq!(free(one).unwrap_err().kind, MisuseKind::Quarantined);
        free(other).unwrap();
        allocator.drain();
        let census = allocator.validate().unwrap();
        assert_eq!((census.free, census.quarantined, census.handed_out), (1, 511, 0));
        assert_eq!(allocator.alloc_page(Gfp::KERNEL).unwrap().addr(), arena.addr_of(other));
    }
}
