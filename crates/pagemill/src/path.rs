//! The way of one page: from the CPU's list, or with a batch for the list from a depot or the zone.
//!
//! The fast path is inlined into the caller: one section, one state, one address. Everything else is cold and out of
//! line (C3.15).
use crate::allocator::{Allocator, Inner};
use crate::arena::{Arena, FULL};
use crate::free::{finish, free_page};
use crate::handle::{Block, Page, sealed::Word};
use crate::misuse::misuse;
use crate::slow::Ask;
use core::borrow::BorrowMut;
use core::mem::MaybeUninit;
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::{
    Error, FrameState, Gfp, Giving, Level, MisuseKind, Mobility, Order, Pfn, SlowEvent, WordTable, step,
};
use pagemill_os::lists::{BulkCall, CpuLists};
use pagemill_os::{Batch, CpuStats, Frames, List, Load};

impl Allocator {
    /// One page.
    ///
    /// # Errors
    /// [`Error::Exhausted`], or [`Error::Invalid`] for flags that contradict each other or cannot be served.
    ///
    /// ```
    /// use pagemill::{Allocator, Error, Gfp};
    /// let allocator = Allocator::builder().pages(1).build()?;
    /// let page = allocator.alloc_page(Gfp::KERNEL)?;
    /// assert!(matches!(allocator.alloc_page(Gfp::KERNEL), Err(Error::Exhausted(_))));
    /// # drop(page);
    /// # Ok::<(), Error>(())
    /// ```
    #[inline]
    pub fn alloc_page(&self, gfp: Gfp) -> Result<Page, Error> {
        step!("Allocator::alloc_page");
        let nodes = self.nodes();
        let addr = match nodes.here().and_then(|inner| inner.pop_one(gfp)).map(|(arena, pfn)| arena.addr_of(pfn)) {
            Some(addr) => addr,
            None => nodes.alloc_page_slow(gfp, || self.weak())?,
        };
        // SAFETY: the frame is marked as handed out: nobody else has it.
        Ok(unsafe { Page::from_word(addr) })
    }

    /// One block of 2^order pages, aligned to its size.
    ///
    /// # Errors
    /// As [`alloc_page`](Self::alloc_page).
    ///
    /// ```
    /// use pagemill::{Allocator, Gfp, Order};
    /// let huge = Allocator::global().alloc_pages(Gfp::KERNEL, Order::PAGEBLOCK)?;
    /// assert_eq!(huge.len(), 2 << 20);
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    #[inline]
    pub fn alloc_pages(&self, gfp: Gfp, order: Order) -> Result<Block, Error> {
        if order == Order::ZERO {
            return self.alloc_page(gfp).map(Block::from);
        }
        let nodes = self.nodes();
        let addr = match nodes.here().and_then(|inner| inner.take_block_at_once(gfp, order)) {
            Some(addr) => addr,
            None => nodes.alloc_block(&Ask::plain(nodes, gfp, order), || self.weak())?,
        };
        // SAFETY: the block is marked as handed out: nobody else has it.
        Ok(unsafe { Block::from_word(addr | usize::from(order.get())) })
    }
}

impl Inner {
    /// This CPU's counters.
    pub(crate) fn stats_here(&self) -> &CpuStats {
        &self.lists.cpu(self.lists.here()).stats
    }

    /// The fast path: a frame of this CPU's list and its arena, for a handle; none where there is more to do.
    #[inline]
    pub(crate) fn pop_one(&self, gfp: Gfp) -> Option<(&'static Arena, u32)> {
        if !gfp.is_plain() {
            return None;
        }
        let pfn = self.lists.pop(gfp.mobility())?;
        let arena = self.arena;
        // The usual case only looks.
        let is_usual = !FULL && arena.state(pfn) == FrameState::SAFE;
        if is_usual || self.hand_out_other(pfn) { Some((arena, pfn)) } else { None }
    }

    /// A frame that was never handed out, or, with full states, any; one that somebody has is put aside.
    #[cold]
    #[inline(never)]
    fn hand_out_other(&self, pfn: u32) -> bool {
        let is_free = self.arena.hand_out(pfn);
        if !is_free {
            self.quarantine(pfn);
        }
        is_free
    }

    /// The same for `n` frames, at most a batch's worth, all or none; counted as a bulk call.
    #[inline(always)]
    pub(crate) fn pop_batch(&self, gfp: Gfp, n: usize, batch: &mut Batch) -> Option<&'static Arena> {
        if !gfp.is_plain() || !self.lists.pop_all(gfp.mobility(), n, batch) {
            return None;
        }
        let arena = self.arena;
        arena.hand_out_batch(batch, |pfn| self.quarantine(pfn));
        if batch.len() < n {
            self.return_sound(batch);
            return None;
        }
        self.lists.count_bulk(BulkCall::Alloc, n);
        Some(arena)
    }

    /// Fills words, a batch's worth at most, with those of pages for handles, if the list has as many and all were handed out before;
    /// counted as a bulk call. None: what stands in the words means nothing.
    #[inline(always)]
    pub(crate) fn pop_words<'w>(&self, gfp: Gfp, words: &'w mut [MaybeUninit<usize>]) -> Option<&'w [usize]> {
        let arena = self.arena;
        let (mobility, n) = (gfp.mobility(), words.len());
        // SAFETY: every frame on the lists is the arena's, and has a state there.
        let mut pop = || unsafe { self.lists.pop_words(mobility, words, arena.addr_of_zero(), arena.states()) };
        if !gfp.is_plain() || !(pop() || self.reload_from_depot(mobility, n) && pop()) {
            return None;
        }
        // SAFETY: all are filled.
        let words = unsafe { core::slice::from_raw_parts(words.as_ptr().cast::<usize>(), n) };
        arena.hand_out_safe(words);
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
        batch.as_slice().iter().for_each(|&pfn| _ = free_page(self.arena.addr_of(pfn)));
        batch.clear();
    }

    /// One frame of the request's mobility: from the list, or with a batch for the list from the zone.
    pub(crate) fn take_page(&self, gfp: Gfp, level: Level) -> Option<u32> {
        let mobility = gfp.mobility();
        let mut one = Batch::new();
        self.lists.pop_n(mobility, 1, &mut one);
        if !one.is_empty() {
            self.prepare(&mut one, gfp);
        }
        while one.is_empty() && self.refill(gfp, level, 1, &mut one) > 0 {
            self.prepare(&mut one, gfp);
        }
        one.as_slice().first().copied()
    }

    /// One frame from a pageblock of another mobility.
    pub(crate) fn steal_page(&self, gfp: Gfp, level: Level) -> Option<u32> {
        if self.is_refused_by_fault(gfp) {
            return None;
        }
        let pfn = self.buddy.steal(self.floor(gfp, level))?;
        let stats = self.stats_here();
        stats.steals.fetch_add(1, Relaxed);
        stats.direct_out.fetch_add(1, Relaxed);
        let mut one = Batch::new();
        one.push(pfn.as_u32());
        self.prepare(&mut one, gfp);
        one.as_slice().first().copied()
    }

    /// Gets the frames of a batch ready for their new owner, each once (C3.9): zeroed if asked for, marked if they were never
    /// handed out. A frame that somebody has is on two ways at once: it is put aside and reported.
    #[inline(never)]
    pub(crate) fn prepare(&self, batch: &mut Batch, gfp: Gfp) {
        step!("Inner::prepare");
        if gfp.contains(Gfp::ZERO) {
            batch.as_slice().iter().for_each(|&pfn| self.arena.zero(pfn, Order::ZERO));
        }
        self.arena.hand_out_batch(batch, |pfn| self.quarantine(pfn));
    }

    fn put_aside(&self, pfn: u32) {
        if self.arena.state(pfn) != FrameState::QUARANTINED {
            self.arena.set_state(pfn, FrameState::QUARANTINED);
            self.quarantined.fetch_add(1, Relaxed);
        }
    }

    /// Puts a frame aside that came off a list or out of the zone while somebody has it.
    #[cold]
    #[inline(never)]
    pub(crate) fn quarantine(&self, pfn: u32) {
        self.put_aside(pfn);
        let _ = self.refuse(misuse(MisuseKind::Quarantined, self.arena.addr_of(pfn)));
    }

    /// Takes `want` frames (at most a batch's room) from a depot, or else from the zone above the mark, into `batch`, and as many
    /// more for the list as its policy says. Returns how many are in the batch, which was empty. Not prepared.
    pub(crate) fn refill(&self, gfp: Gfp, level: Level, want: usize, batch: &mut Batch) -> usize {
        step!("Inner::refill");
        if self.is_refused_by_fault(gfp) {
            return 0;
        }
        let mobility = gfp.mobility();
        let cpu = self.lists.cpu(self.lists.here());
        let list = &cpu.lists[mobility.index()];
        let policy = list.policy();
        list.set_policy(policy.after(SlowEvent::Refill, self.limit_max));
        let load = if self.goes_past_lists() { 0 } else { want.max(policy.batch as usize) };
        if self.take_from_depot(mobility, want, load, batch) {
            return batch.len();
        }
        cpu.stats.refills.fetch_add(1, Relaxed);

        // While free memory falls, so does what lists take of it: a quarter of what lies above low at most, and nothing
        // below.
        let floor = self.floor(gfp, level);
        let share = match self.floor(Gfp::NOWAIT, Level::Low) as usize {
            0 => policy.batch as usize,
            _ if level == Level::Min || self.is_low.load(Relaxed) => 0,
            low => (self.buddy.free_frames().saturating_sub(low) / 4).min(policy.batch as usize),
        };
        let direct = if gfp.may_wait() {
            self.load(list, want.max(share), want, mobility, floor, batch)
        } else {
            self.load_in_parts(list, share, want, mobility, floor, batch)
        };
        cpu.stats.direct_out.fetch_add(direct as u64, Relaxed);
        batch.len()
    }

    /// Takes up to `want` frames (at most a batch's room) from a depot into `batch`, which is empty: with a load of `load` frames for
    /// this CPU's list, or, if that is 0 or the list takes none, past it. False: there are none, or others are at the depots.
    #[inline(never)]
    pub(crate) fn take_from_depot(&self, mobility: Mobility, want: usize, load: usize, batch: &mut Batch) -> bool {
        if load > 0 && self.load_from_depot(mobility, load) {
            self.lists.pop_n(mobility, want, batch);
        }
        if batch.is_empty() {
            self.lists.pop_depot(mobility, want, batch);
            self.stats_here().direct_out.fetch_add(batch.len() as u64, Relaxed);
        }
        !batch.is_empty()
    }

    /// Moves a load of `n` frames from a depot to this CPU's list.
    fn load_from_depot(&self, mobility: Mobility, n: usize) -> bool {
        let here = self.lists.here().get() as u32 + 1;
        if self.last_to_ask.load(Relaxed) != here {
            self.last_to_ask.store(here, Relaxed); // Written where that changes something: all CPUs share it.
        }
        let is_loaded = self.lists.depot_to_list(mobility, n) > 0;
        if is_loaded {
            self.stats_here().depot_out.fetch_add(1, Relaxed);
        }
        is_loaded
    }

    /// Does a full list of this CPU pass pages to a depot? Not if no other CPU's list was empty since this one's: then they would be
    /// here again before long, and the zone keeps pageblocks whole better than a depot.
    fn passes_on(&self) -> bool {
        let asked = self.last_to_ask.load(Relaxed);
        asked != 0 && asked != self.lists.here().get() as u32 + 1
    }

    /// Moves a load from a depot to this CPU's list, if that has fewer than `n` frames. Not where faults are injected: the slow path
    /// asks once.
    #[cold]
    #[inline(never)]
    fn reload_from_depot(&self, mobility: Mobility, n: usize) -> bool {
        let list = self.lists.list_here(mobility);
        if list.len() >= n || self.nodes.faults.get().is_some() || self.goes_past_lists() {
            return false;
        }
        let policy = list.policy();
        let is_loaded = self.load_from_depot(mobility, n.max(policy.batch as usize));
        if is_loaded {
            list.set_policy(policy.after(SlowEvent::Refill, self.limit_max));
        }
        is_loaded
    }

    /// Takes `all` frames from the zone, `want` of them for the caller, the others for the list. One trip for all.
    #[inline(never)]
    fn load(&self, list: &List, all: usize, want: usize, mobility: Mobility, floor: u32, batch: &mut Batch) -> usize {
        let mut load = Load::new();
        self.take_from_zone(&list.bound, all, mobility, floor, &mut load);
        let kept = load.len().saturating_sub(want);
        batch.push_slice(&load.as_slice()[kept..]);
        let direct = load.len() - kept;
        load.truncate(kept);
        self.put_on_list(mobility, &load);
        direct
    }

    /// The same for a caller that may be a signal handler, with little stack: a part at a time. Others may take the last
    /// frames in between: then the caller gets what is on the list.
    #[inline(never)]
    fn load_in_parts(
        &self,
        list: &List,
        all: usize,
        want: usize,
        mobility: Mobility,
        floor: u32,
        batch: &mut Batch,
    ) -> usize {
        let mut left = all.min(self.buddy.free_frames().saturating_sub(floor as usize)).saturating_sub(want);
        while left > 0 {
            let mut part = Batch::new();
            let n = left.min(Batch::CAPACITY);
            self.take_from_zone(&list.bound, n, mobility, floor, &mut part);
            self.put_on_list(mobility, &part);
            if part.len() < n {
                break;
            }
            left -= n;
        }
        let direct = self.take_from_zone(&list.bound, want, mobility, floor, batch);
        if batch.is_empty() {
            self.lists.pop_n(mobility, want, batch);
        }
        direct
    }

    /// Puts frames from the zone on this CPU's list, or into the zone where it takes no more.
    fn put_on_list<const ROOM: usize>(&self, mobility: Mobility, load: &Frames<ROOM>) {
        step!("Inner::put_on_list");
        for start in (0..load.len()).step_by(Batch::CAPACITY) {
            let end = load.len().min(start + Batch::CAPACITY);
            let list = self.lists.list_here(mobility);
            if !self.lists.push_n(mobility, load, start..end) {
                return self.give_to_zone(&load.as_slice()[start..]);
            }
            // Afterwards, so that frames under way never look as if they were out.
            list.note_refilled(end - start);
        }
    }

    pub(crate) fn take_from_zone<const ROOM: usize>(
        &self,
        bound: &pagemill_core::BoundBlock,
        want: usize,
        mobility: Mobility,
        floor: u32,
        batch: &mut Frames<ROOM>,
    ) -> usize {
        self.buddy.take(bound, want, mobility, floor, &mut |first: Pfn, mask| batch.push_bits(first.as_u32(), mask))
    }

    /// Returns frames whose states say free to the zone. Out of line, that no caller has its tables on the stack twice.
    #[inline(never)]
    pub(crate) fn give_to_zone(&self, pfns: &[u32]) {
        let mut giving = Giving::to(&self.buddy);
        giving.give_slice(pfns);
        finish(self, &mut giving);
    }

    /// A block above order 0 from a pageblock of the request's mobility, marked as handed out, zeroed if asked for.
    pub(crate) fn take_block(&self, gfp: Gfp, order: Order, level: Level) -> Option<u32> {
        if self.is_refused_by_fault(gfp) {
            return None;
        }
        let floor = self.floor(gfp, level);
        let withheld = self.take_withheld(gfp, order, floor);
        let pfn = withheld.or_else(|| self.buddy.alloc_block(order, gfp.mobility(), floor))?;
        self.prepare_one_block(pfn.as_u32(), gfp, order)
    }

    /// The usual case, where nobody waits and memory above the low mark serves the request: the block's address.
    fn take_block_at_once(&self, gfp: Gfp, order: Order) -> Option<usize> {
        // Faults are injected on the general way, once at each acquisition.
        if !gfp.is_plain() || self.nodes.waits.is_awaited() || self.nodes.faults.get().is_some() {
            return None;
        }
        let pfn = self.take_block(gfp, order, Level::Low)?;
        self.shut_lists_below_low();
        Some(self.arena.addr_of(pfn))
    }

    /// Up to `want` blocks of an order below a pageblock's from pageblocks of the request's mobility, marked as handed out, zeroed if
    /// asked for, into `batch`, which is empty and has room. False: a fault is injected.
    pub(crate) fn take_blocks(&self, gfp: Gfp, order: Order, level: Level, want: usize, batch: &mut Batch) -> bool {
        if self.is_refused_by_fault(gfp) {
            return false;
        }
        let mut emit = |first: Pfn, mut blocks: u64| {
            while blocks != 0 {
                batch.push(first.as_u32() + blocks.trailing_zeros());
                blocks &= blocks - 1;
            }
        };
        self.buddy.take_blocks(order, want, gfp.mobility(), self.floor(gfp, level), &mut emit);
        let mut kept = 0;
        for at in 0..batch.len() {
            if let Some(pfn) = self.prepare_block(batch.as_slice()[at], gfp, order) {
                batch.as_mut_slice()[kept] = pfn;
                kept += 1;
            }
        }
        batch.truncate(kept);
        self.count_blocks_out(kept, order);
        true
    }

    /// A block above order 0 from a pageblock of another mobility.
    pub(crate) fn steal_block(&self, gfp: Gfp, order: Order, level: Level) -> Option<u32> {
        if self.is_refused_by_fault(gfp) {
            return None;
        }
        let pfn = self.buddy.steal_block(order, self.floor(gfp, level))?;
        self.stats_here().steals.fetch_add(u64::from(order.frames()), Relaxed);
        self.prepare_one_block(pfn.as_u32(), gfp, order)
    }

    fn prepare_one_block(&self, pfn: u32, gfp: Gfp, order: Order) -> Option<u32> {
        let pfn = self.prepare_block(pfn, gfp, order)?;
        self.count_blocks_out(1, order);
        Some(pfn)
    }

    fn count_blocks_out(&self, blocks: usize, order: Order) {
        let stats = self.stats_here();
        stats.blocks_out.fetch_add(blocks as u64, Relaxed);
        stats.block_pages_out.fetch_add(blocks as u64 * u64::from(order.frames()), Relaxed);
    }

    #[inline(always)]
    fn prepare_block(&self, pfn: u32, gfp: Gfp, order: Order) -> Option<u32> {
        if gfp.contains(Gfp::ZERO) {
            self.arena.zero(pfn, order);
        }
        if let Err(double) = self.arena.hand_out_block(pfn, order) {
            return self.quarantine_block(pfn, order, double);
        }
        Some(pfn)
    }

    /// A block with a frame in it that somebody has: all of it is put aside, and there is none to hand out.
    #[cold]
    #[inline(never)]
    fn quarantine_block(&self, pfn: u32, order: Order, double: u32) -> Option<u32> {
        if order >= Order::PAGEBLOCK {
            // What somebody has of it can come back singly.
            let _ = self.buddy.split_block(Pfn::new(pfn), order);
        }
        self.quarantine(double);
        (pfn..pfn + order.frames()).filter(|&pfn| self.arena.state(pfn).is_safe()).for_each(|pfn| self.put_aside(pfn));
        None
    }

    /// Moves frames of this CPU's list to the zone, as many as its policy says: the more there are, the more of them share a word also
    /// where they are in no order (ADR 35). The caller has pages in its hands: so the arena stays until the table is let go of.
    #[inline(never)]
    fn drain_to_zone(&self, cpu: &CpuLists, mobility: Mobility) {
        let policy = cpu.lists[mobility.index()].policy();
        if let Some(n) = policy.large_drain()
            && let Some(table) = cpu.table.try_hold()
        {
            self.move_to_zone(mobility, n as usize, Giving::by(&self.buddy, table));
        } else {
            self.move_to_zone(mobility, policy.batch as usize, Giving::to(&self.buddy));
        }
    }

    fn move_to_zone<const N: usize, T: BorrowMut<WordTable<N>>>(
        &self,
        mobility: Mobility,
        n: usize,
        mut giving: Giving<'_, '_, N, T>,
    ) {
        let mut left = n;
        while left > 0 {
            let mut out = Batch::new();
            self.lists.pop_n(mobility, left, &mut out);
            if out.is_empty() {
                break;
            }
            self.lists.list_here(mobility).note_overflowed(out.len());
            left -= out.len();
            giving.give_slice(out.as_slice());
        }
        finish(self, &mut giving);
    }

    /// Passes on pages that a list does not take: to a depot go as many others of the list, or to the zone.
    #[cold]
    #[inline(never)]
    pub(crate) fn overflow(&self, mobility: Mobility, batch: &Batch) {
        if !self.grow_or_pass_on(mobility, batch.len()) || !self.lists.push_n(mobility, batch, 0..batch.len()) {
            self.overflow_to_zone(mobility, batch);
        }
    }

    /// The list of this CPU is full: has it grown, or passed a load to a depot, so that `n` frames may fit? The caller has them in its
    /// hands: so the arena stays until this thread has let go of the depot.
    #[inline(never)]
    pub(crate) fn grow_or_pass_on(&self, mobility: Mobility, n: usize) -> bool {
        self.open_lists_above_high();
        if self.goes_past_lists() {
            return false;
        }
        let list = self.lists.list_here(mobility);
        let policy = list.policy().after(SlowEvent::Drain, self.limit_max);
        list.set_policy(policy);
        if list.len() + n <= policy.limit as usize {
            return true;
        }
        let has_moved = self.passes_on() && self.lists.list_to_depot(mobility, n.max(policy.batch as usize)) > 0;
        if has_moved {
            self.stats_here().depot_in.fetch_add(1, Relaxed);
        }
        has_moved
    }

    /// Passes pages on to the zone that a list does not take, and as many of the list as its policy says: more while drains follow
    /// drains.
    #[inline(always)] // One frame less on the stack of a signal handler.
    pub(crate) fn overflow_to_zone(&self, mobility: Mobility, batch: &Batch) {
        let cpu = self.lists.cpu(self.lists.here());
        if self.goes_past_lists() {
            // Others wait for it, it is a reserve's, or the system is to have it: past the list.
            cpu.stats.direct_in.fetch_add(batch.len() as u64, Relaxed);
            return self.give_to_zone(batch.as_slice());
        }
        cpu.stats.drains.fetch_add(1, Relaxed);
        let moved = cpu.lists[mobility.index()].policy().batch as usize;
        if batch.len() >= moved {
            // As large as what would be moved: it goes past the list.
            cpu.stats.direct_in.fetch_add(batch.len() as u64, Relaxed);
            return self.give_to_zone(batch.as_slice());
        }
        self.drain_to_zone(cpu, mobility);
        if !self.lists.push_n(mobility, batch, 0..batch.len()) {
            self.stats_here().direct_in.fetch_add(batch.len() as u64, Relaxed);
            self.give_to_zone(batch.as_slice());
        }
    }
}
