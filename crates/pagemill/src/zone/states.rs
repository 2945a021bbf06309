//! The state of each frame: whether it has an owner who could misuse it. Checked where a raw pointer comes back, and at hand-out
//! (C2.4).
//!
//! A state is a byte. Only the frame's owner writes it; any thread may read it: one that frees a page of another thread, and
//! `validate`. So each byte is an atomic. In a run of neighbours several are read and written at once (`pagemill-os/src/cells.rs`). A
//! handle's frame costs one read at hand-out and nothing else: see [ADR 5](../../../../docs/adr/0005-frame-state.md).
use super::body::Zone;
use core::ptr;
use core::sync::atomic::{AtomicU8, Ordering::Relaxed};
use pagemill_core::{FrameState, MisuseKind, Order, PAGE_SHIFT, PAGE_SIZE, Pfn, step};
use pagemill_os::{Batch, bytes_differ, set_bytes};

/// Full states also tell a handle's frame from a free one. They are kept in debug builds and with the feature.
pub(crate) const FULL: bool = cfg!(any(debug_assertions, feature = "full-states"));

/// The state of a handle's block: safe, or with full states its order.
const fn owned(order: Order) -> FrameState {
    if FULL { FrameState::owned(order) } else { FrameState::SAFE }
}

impl Zone {
    #[inline]
    fn state_cell(&self, pfn: Pfn) -> &AtomicU8 {
        debug_assert!(self.has_pfn(pfn));
        // SAFETY: a frame of this arena has a byte in the table, for as long as the arena lives.
        unsafe { AtomicU8::from_ptr(self.states.wrapping_add(pfn.as_usize())) }
    }
    #[inline]
    pub(crate) fn state(&self, pfn: Pfn) -> FrameState {
        FrameState::from_byte(self.state_cell(pfn).load(Relaxed))
    }
    #[inline]
    pub(crate) fn set_state(&self, pfn: Pfn, state: FrameState) {
        self.state_cell(pfn).store(state.as_byte(), Relaxed);
    }

    /// Marks one frame as a handle's. False: the frame has an owner.
    #[inline]
    pub(crate) fn hand_out(&self, pfn: Pfn) -> bool {
        step!("Zone::hand_out");
        let state = self.state(pfn);
        // A frame that was never handed out is marked once; with full states every frame is.
        if state.is_safe() && state != owned(Order::ZERO) {
            self.set_state(pfn, owned(Order::ZERO));
        }
        state.is_safe()
    }

    /// Marks the frames of `batch` as handles', and takes frames that have an owner out of it: `refused` gets those.
    #[inline(always)]
    pub(crate) fn hand_out_batch(&self, batch: &mut Batch, refused: impl FnMut(Pfn)) {
        if FULL || !self.are_safe_and_marked(batch.as_pfns()) {
            self.hand_out_each(batch, refused);
        }
    }

    /// Whether each of these frames is free and was handed out before, as most are. One read each, without a branch.
    #[inline(always)]
    fn are_safe_and_marked(&self, pfns: &[Pfn]) -> bool {
        let states = self.states;
        let mut all = FrameState::SAFE.as_byte();
        for &pfn in pfns {
            debug_assert!(self.has_pfn(pfn));
            // SAFETY: as in `state_cell`.
            all &= unsafe { AtomicU8::from_ptr(states.wrapping_add(pfn.as_usize())) }.load(Relaxed);
        }
        all != 0
    }

    /// The states, for sections that read those of the frames that they pop.
    #[inline]
    pub(crate) fn states(&self) -> *const u8 {
        self.states
    }

    /// The states, indexed by a page's number in the address space, which saves a subtraction.
    #[inline]
    fn states_by_page(&self) -> *mut u8 {
        self.states.wrapping_offset(-(self.addr_of_pfn_zero().cast_signed() >> PAGE_SHIFT))
    }

    /// Marks pages as handles', with full states. Their frames are all safe.
    #[inline(always)]
    pub(crate) fn hand_out_safe(&self, words: &[usize]) {
        if FULL {
            words.iter().for_each(|&word| self.set_state(self.pfn_of(word), owned(Order::ZERO)));
        }
    }

    #[cold]
    #[inline(never)]
    fn hand_out_each(&self, batch: &mut Batch, mut refused: impl FnMut(Pfn)) {
        let mut kept = 0;
        let numbers = batch.as_mut_slice();
        for at in 0..numbers.len() {
            let pfn = Pfn::new(numbers[at]);
            if self.hand_out(pfn) {
                numbers[kept] = numbers[at];
                kept += 1;
            } else {
                refused(pfn);
            }
        }
        batch.truncate(kept);
    }

    /// Takes a page back from a handle. The handle proves that the page was out; full states check it.
    #[inline]
    fn take_back(&self, pfn: Pfn) -> bool {
        step!("Zone::take_back");
        !FULL || self.change(pfn, owned(Order::ZERO), FrameState::SAFE)
    }

    /// The same for a block.
    pub(crate) fn take_back_block(&self, pfn: Pfn, order: Order) -> Result<(), MisuseKind> {
        if !FULL {
            return Ok(());
        }
        self.check(pfn, order, FrameState::owned(order))?;
        self.mark(pfn, order.frames() as usize, FrameState::SAFE);
        Ok(())
    }

    /// Takes a page back by a raw pointer. False if it is not raw.
    #[inline]
    fn take_back_raw(&self, pfn: Pfn) -> bool {
        step!("Zone::take_back_raw");
        self.change(pfn, FrameState::raw(Order::ZERO), FrameState::SAFE)
    }

    /// Ends a raw block: it is freed, or a handle takes it up again.
    pub(crate) fn take_up(&self, pfn: Pfn, order: Order, is_handle: bool) -> Result<(), MisuseKind> {
        self.check(pfn, order, FrameState::raw(order))?;
        // The first frame first: a fork never finds one whose block is not all there.
        self.set_state(pfn, if is_handle { owned(order) } else { FrameState::SAFE });
        self.mark_inside(pfn, order, is_handle && FULL);
        Ok(())
    }

    /// Makes a raw pointer of a handle's block.
    #[inline]
    pub(crate) fn give_away(&self, pfn: Pfn, order: Order) -> Result<(), MisuseKind> {
        self.give_away_as(pfn, order, FrameState::raw(order))
    }

    /// Makes a raw pointer of a block of the page pool with this number, which alone takes it up again. Nothing else uses a block's link
    /// while it is out.
    #[inline]
    pub(crate) fn give_away_pooled(&self, pfn: Pfn, order: Order, pool: u32) -> Result<(), MisuseKind> {
        self.link(pfn).store(pool, Relaxed);
        self.give_away_as(pfn, order, FrameState::pooled(order))
    }

    /// Makes a raw pointer of such a block a handle's again, and returns its order. An exchange, so that of two threads that return a block
    /// at once one is refused: the pool counts its blocks.
    #[inline]
    pub(crate) fn take_up_pooled(&self, pfn: Pfn, pool: u32) -> Result<Order, MisuseKind> {
        let state = self.state(pfn);
        let Some(order) = state.order().filter(|_| state.is_pooled()) else {
            let wanted = FrameState::pooled(Order::ZERO);
            let of_others = if state.is_raw() { Err(MisuseKind::Foreign) } else { Ok(()) };
            return of_others.and_then(|()| self.check(pfn, Order::ZERO, wanted)).and(Err(MisuseKind::DoubleFree));
        };
        if self.link(pfn).load(Relaxed) != pool {
            return Err(MisuseKind::Foreign);
        }
        let (from, to) = (state.as_byte(), owned(order).as_byte());
        if self.state_cell(pfn).compare_exchange(from, to, Relaxed, Relaxed).is_err() {
            return Err(MisuseKind::DoubleFree);
        }
        self.mark_inside(pfn, order, FULL);
        Ok(order)
    }

    /// Marks all frames of a block but the first: as inside, or as safe.
    fn mark_inside(&self, pfn: Pfn, order: Order, is_inside: bool) {
        if order > Order::ZERO {
            let state = if is_inside { FrameState::INSIDE } else { FrameState::SAFE };
            self.mark(pfn.offset(1), order.frames() as usize - 1, state);
        }
    }

    #[inline]
    fn give_away_as(&self, pfn: Pfn, order: Order, state: FrameState) -> Result<(), MisuseKind> {
        if FULL {
            self.check(pfn, order, FrameState::owned(order))?;
        }
        self.mark_inside(pfn, order, true);
        self.set_state(pfn, state);
        Ok(())
    }

    /// The same for pages by their words.
    #[inline]
    pub(crate) fn give_away_pages(&self, words: &[usize]) {
        let states = self.states_by_page();
        for &word in words {
            debug_assert!(self.contains(word) && self.state(self.pfn_of(word)) == owned(Order::ZERO));
            // SAFETY: as in `state_cell`.
            let cell = unsafe { AtomicU8::from_ptr(states.wrapping_add(word >> PAGE_SHIFT)) };
            cell.store(FrameState::raw(Order::ZERO).as_byte(), Relaxed);
        }
    }

    /// Marks a page as free that a handle owned or, with `RAW`, a raw pointer. False, and no change, if it was not out in that way.
    #[inline(always)]
    pub(crate) fn mark_page_free<const RAW: bool>(&self, pfn: Pfn) -> bool {
        if RAW { self.take_back_raw(pfn) } else { self.take_back(pfn) }
    }

    /// The same for pages by their words, up to the first that was not out in that way. Returns how many it marked.
    #[inline(always)]
    pub(crate) fn mark_words_free<const RAW: bool>(&self, words: &[usize]) -> usize {
        let states = self.states_by_page();
        self.mark_each_free::<RAW, _>(words, |&word| states.wrapping_add(word >> PAGE_SHIFT))
    }

    /// The same for frames.
    #[inline(always)]
    pub(crate) fn mark_frames_free<const RAW: bool>(&self, pfns: &[Pfn]) -> usize {
        let states = self.states;
        self.mark_each_free::<RAW, _>(pfns, |&pfn| states.wrapping_add(pfn.as_usize()))
    }

    /// A read, a branch and a store for one page after the other, so that a page that stands there twice is seen.
    #[inline(always)]
    fn mark_each_free<const RAW: bool, T>(&self, pages: &[T], state: impl Fn(&T) -> *mut u8) -> usize {
        if !RAW && !FULL {
            return pages.len();
        }
        let wanted = if RAW { FrameState::raw(Order::ZERO) } else { owned(Order::ZERO) };
        let mark_free = |page: &T| {
            let cell = state(page);
            debug_assert!(self.has_pfn(Pfn::new(cell.addr().wrapping_sub(self.states.addr()) as u32)));
            // SAFETY: as in `state_cell`.
            let cell = unsafe { AtomicU8::from_ptr(cell) };
            let is_out = cell.load(Relaxed) == wanted.as_byte();
            if is_out {
                cell.store(FrameState::SAFE.as_byte(), Relaxed);
            }
            is_out
        };
        // Eight at a time: the loop itself costs as much as a page.
        let (groups, rest) = pages.as_chunks::<8>();
        for (i, group) in groups.iter().enumerate() {
            if let Some(at) = group.iter().position(|page| !mark_free(page)) {
                return 8 * i + at;
            }
        }
        let whole = pages.len() - rest.len();
        whole + rest.iter().position(|page| !mark_free(page)).unwrap_or(rest.len())
    }

    /// The same for `n` neighbours, all or none.
    #[inline]
    pub(crate) fn mark_run_free<const RAW: bool>(&self, first: Pfn, n: usize) -> bool {
        if !RAW && !FULL {
            return true;
        }
        let wanted = if RAW { FrameState::raw(Order::ZERO) } else { owned(Order::ZERO) };
        let are_out = self.states_differ(first, n, wanted, !0) == 0;
        if are_out {
            self.mark(first, n, FrameState::SAFE);
        }
        are_out
    }

    #[inline]
    fn change(&self, pfn: Pfn, from: FrameState, to: FrameState) -> bool {
        let is_so = self.state(pfn) == from;
        if is_so {
            self.set_state(pfn, to);
        }
        is_so
    }

    /// Checks that a block is in the state that it must be in. The error says what is wrong with it.
    fn check(&self, pfn: Pfn, order: Order, wanted: FrameState) -> Result<(), MisuseKind> {
        let state = self.state(pfn);
        match state.order() {
            _ if state == wanted => Ok(()),
            // It is out of a pool, to which it goes back.
            Some(_) if state.is_pooled() => Err(MisuseKind::DoubleFree),
            // A handle owns it; or a handle should, and it is raw.
            Some(_) if state.is_raw() != wanted.is_raw() => Err(MisuseKind::DoubleFree),
            Some(out) => Err(MisuseKind::WrongOrder { handed_out: out.get(), freed: order.get() }),
            None if state == FrameState::INSIDE => Err(MisuseKind::Inside),
            None if state == FrameState::QUARANTINED => Err(MisuseKind::Quarantined),
            // It is free, and was never handed out, unless memory went back to the system meanwhile.
            None if state == FrameState::FRESH && !self.has_given_back.load(Relaxed) => Err(MisuseKind::Foreign),
            None => Err(MisuseKind::DoubleFree),
        }
    }

    /// Which of these bits differ from `state` in any of `n` neighbours.
    #[inline]
    fn states_differ(&self, first: Pfn, n: usize, state: FrameState, bits: u8) -> u64 {
        debug_assert!(self.has_pfn(first) && self.has_pfn(first.offset(n as u32 - 1)));
        // SAFETY: inside the table, all of which is loaded and stored as `state_cell` or `cells` do.
        unsafe { bytes_differ(self.states.wrapping_add(first.as_usize()), n, state.as_byte(), bits) }
    }
    /// Whether all of these frames may be handed out.
    fn are_safe(&self, first: Pfn, n: usize) -> bool {
        // The lowest bit says so, for fresh frames and others.
        self.states_differ(first, n, FrameState::SAFE, !FrameState::SAFE.as_byte()) == 0
    }
    /// Whether none of these free frames was handed out since the system gave them. A hint while other threads take them.
    pub(crate) fn are_fresh(&self, first: Pfn, n: usize) -> bool {
        self.states_differ(first, n, FrameState::FRESH, !0) == 0
    }

    /// Marks a block as a handle's. The error is the first frame that has an owner; nothing is changed then.
    pub(crate) fn hand_out_block(&self, pfn: Pfn, order: Order) -> Result<(), Pfn> {
        let n = order.frames() as usize;
        if !FULL && self.states_differ(pfn, n, FrameState::SAFE, !0) == 0 {
            return Ok(());
        }
        if !self.are_safe(pfn, n)
            && let Some(taken) = pfn.run(order.frames()).find(|&pfn| !self.state(pfn).is_safe())
        {
            return Err(taken);
        }
        self.mark(pfn, n, if FULL { FrameState::INSIDE } else { FrameState::SAFE });
        self.set_state(pfn, owned(order));
        Ok(())
    }

    /// Marks `n` neighbouring frames as a handle's pages. False, and no change, if one of them has an owner.
    pub(super) fn hand_out_run(&self, first: Pfn, n: usize) -> bool {
        let are_safe = self.are_safe(first, n);
        if are_safe {
            self.mark(first, n, owned(Order::ZERO));
        }
        are_safe
    }

    /// Makes single pages of a handle's block.
    pub(crate) fn split_block(&self, pfn: Pfn, order: Order) -> Result<(), MisuseKind> {
        if FULL {
            self.check(pfn, order, FrameState::owned(order))?;
            self.mark(pfn, order.frames() as usize, FrameState::owned(Order::ZERO));
        }
        Ok(())
    }

    /// Marks `n` neighbouring frames that the caller owns.
    pub(super) fn mark(&self, first: Pfn, n: usize, state: FrameState) {
        debug_assert!(self.has_pfn(first) && self.has_pfn(first.offset(n as u32 - 1)));
        // SAFETY: as in `states_differ`.
        unsafe { set_bytes(self.states.wrapping_add(first.as_usize()), n, state.as_byte()) }
    }

    /// After a fork, with full states, for `n` frames from `first` on: a frame that another thread held counts as handed out, whatever
    /// its state said a moment before. `is_free` tells the buddy's frames; `block_end` is the end of the last block seen.
    pub(crate) fn settle_states(&self, first: Pfn, n: u32, block_end: &mut Pfn, is_free: impl Fn(Pfn) -> bool) {
        for pfn in first.run(n) {
            let state = self.state(pfn);
            match state.order() {
                _ if state == FrameState::QUARANTINED || pfn < *block_end => {}
                _ if is_free(pfn) && !state.is_safe() => self.set_state(pfn, FrameState::SAFE),
                _ if is_free(pfn) => {}
                Some(order) => *block_end = pfn.offset(order.frames()),
                None => self.set_state(pfn, owned(Order::ZERO)),
            }
        }
    }

    /// Zeroes the frames of a block that may have been written to (C2.2), before the block is handed out.
    pub(crate) fn zero_block(&self, pfn: Pfn, order: Order) {
        for pfn in pfn.run(order.frames()) {
            let state = self.state(pfn);
            // A page that somebody has is put aside instead (C2.4).
            if state.is_safe() && (!self.is_zeroed() || state != FrameState::FRESH) {
                let page = ptr::with_exposed_provenance_mut::<u8>(self.addr_of(pfn));
                // SAFETY: a page of this arena, which the caller took and has not handed on.
                unsafe { page.write_bytes(0, PAGE_SIZE) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{Allocator, Gfp, Memory, Order, Page, free_raw};
    use pagemill_core::{FrameState, MisuseKind, Pfn};
    use pagemill_os::Batch;

    #[test]
    fn a_frame_that_somebody_has_is_left_out_of_a_batch_wherever_it_stands() {
        let allocator = Allocator::builder().pages(1024).build().unwrap();
        let zone = allocator.zones().first();
        let out = |order: u8| FrameState::raw(Order::new(order).unwrap());
        for (taken, state) in
            (0..17).zip([out(0), out(1), FrameState::INSIDE, FrameState::QUARANTINED].into_iter().cycle())
        {
            // Fresh frames and others, in no order.
            let numbers: Vec<Pfn> = (0..17).map(|i| zone.first.offset(i * 5 % 17 * 9)).collect();
            numbers
                .iter()
                .for_each(|&pfn| zone.set_state(pfn, [FrameState::FRESH, FrameState::SAFE][pfn.as_usize() % 2]));
            zone.set_state(numbers[taken], state);
            let (mut batch, mut refused) = (Batch::new(), Vec::new());
            numbers.iter().for_each(|pfn| batch.push(pfn.as_u32()));
            zone.hand_out_batch(&mut batch, |pfn| refused.push(pfn));
            assert_eq!((refused, zone.state(numbers[taken])), (vec![numbers[taken]], state));
            let kept: Vec<Pfn> = numbers.iter().copied().filter(|&pfn| pfn != numbers[taken]).collect();
            assert_eq!(batch.as_pfns(), kept);
            kept.iter().for_each(|&pfn| assert_eq!(zone.state(pfn), super::owned(Order::ZERO)));
            numbers.iter().for_each(|&pfn| zone.set_state(pfn, FrameState::FRESH));
        }
    }

    #[test]
    fn a_run_with_an_owned_frame_is_left_for_another_and_the_frame_quarantined() {
        let allocator = Allocator::builder().memory(Memory::anonymous(300)).build().unwrap();
        let zone = allocator.zones().first();
        // A free page has an owner: as if two CPUs had freed it at once.
        let owned = zone.first.offset(280);
        zone.set_state(owned, FrameState::raw(Order::ZERO));
        let run = allocator.alloc_contig(Gfp::KERNEL | Gfp::ZERO, 266).unwrap();
        assert_eq!(run.addr(), zone.addr_of(zone.first.offset(14)), "below the frame");
        assert_eq!((zone.state(owned), allocator.stats().quarantined), (FrameState::QUARANTINED, 1));
        drop(run);
        let census = allocator.validate().unwrap();
        assert_eq!((census.free, census.quarantined), (299, 1));
    }

    /// Memory that is not known to be zeroed, and a page of it that somebody has though it is free: what the owner wrote stays.
    #[test]
    fn a_page_that_somebody_has_is_not_zeroed_for_another() {
        let layout = std::alloc::Layout::from_size_align(64 << 12, 2 << 20).unwrap();
        // SAFETY: a size above 0.
        let memory = unsafe { std::alloc::alloc(layout) };
        // SAFETY: the memory is the test's, and outlives the allocator.
        let allocator = Allocator::builder().memory(unsafe { Memory::brought(memory, 64) }).build().unwrap();
        let zone = allocator.zones().first();
        let owned = zone.first.offset(40);
        let word = core::ptr::with_exposed_provenance_mut::<u64>(zone.addr_of(owned));
        // SAFETY: a page of the test's memory.
        unsafe { word.write(7) };
        zone.set_state(owned, FrameState::raw(Order::ZERO));
        assert!(allocator.alloc_contig(Gfp::KERNEL | Gfp::ZERO, 64).is_err());
        let block = allocator.alloc_pages(Gfp::KERNEL | Gfp::ZERO, Order::new(5).unwrap()).ok();
        let all: Vec<Page> = core::iter::from_fn(|| allocator.alloc_page(Gfp::KERNEL | Gfp::ZERO).ok()).collect();
        assert!(all.iter().all(|page| page[0] == 0));
        // SAFETY: as above.
        assert_eq!((unsafe { word.read() }, allocator.stats().quarantined), (7, 1));
        drop((all, block));
        allocator.close().unwrap();
        // SAFETY: allocated above, with this layout.
        unsafe { std::alloc::dealloc(memory, layout) };
    }

    #[test]
    fn what_is_out_of_a_block_that_is_put_aside_comes_back_singly() {
        let allocator = Allocator::builder().memory(Memory::anonymous(512)).build().unwrap();
        let zone = allocator.zones().first();
        let [one, other] = [zone.first.offset(7), zone.first.offset(100)];
        let page = |pfn| core::ptr::with_exposed_provenance_mut::<u8>(zone.addr_of(pfn));
        // SAFETY: nobody looks at it.
        let free = |pfn| unsafe { free_raw(page(pfn), Order::ZERO) };
        // Two free pages have an owner: as if two CPUs had freed them at once.
        let all: Vec<Page> = core::iter::from_fn(|| allocator.alloc_page(Gfp::NOWAIT).ok()).collect();
        all.into_iter().for_each(|page| _ = page.into_raw());
        zone.first.run(512).for_each(|pfn| free(pfn).unwrap());
        allocator.drain();
        [one, other].iter().for_each(|&pfn| zone.set_state(pfn, FrameState::raw(Order::ZERO)));
        assert!(allocator.alloc_pages(Gfp::KERNEL, Order::PAGEBLOCK).is_err());
        // The first such frame is quarantined with the free ones; the other one's owner frees it.
        assert_eq!(free(one).unwrap_err().kind, MisuseKind::Quarantined);
        free(other).unwrap();
        assert_eq!(allocator.alloc_page(Gfp::KERNEL).unwrap().addr(), zone.addr_of(other));
        allocator.drain();
        assert_eq!((allocator.stats().quarantined, allocator.stats().free), (511, 1));
    }
}
