//! An arena: address space that Pagemill owns, the numbers of its frames, and what is known of each frame.
//!
//! It stands below the path: `path` decides which frame, the arena knows where that is and in what state. The state
//! table (a byte a frame) is written by a frame's owner alone: whoever frees it, then whoever hands it out. Both
//! happen to many frames at once where they are contiguous, which is the rule in bulk.
//!
//! # Memory
//! Reserved at once, committed by the system on first touch: the pages themselves; the free areas (1.1 bits a frame);
//! the states (1 byte a frame); the links of lists (4 bytes a frame, touched by lists alone).
use crate::allocator::Inner;
use core::mem::ManuallyDrop;
use core::ptr;
use core::sync::atomic::{AtomicPtr, AtomicU8, AtomicU32, Ordering::Relaxed};
use pagemill_core::atomic::AtomicU64;
use pagemill_core::{FrameState, Invalid, Mobility, Order, PAGE_SHIFT, PAGE_SIZE, Pfn, Zone, ZoneMetadata, step};
use pagemill_sys::{Batch, Mapping};

/// Links and addresses are compared this many at a time.
pub(crate) const GROUP: usize = 8;

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Arena {
    base: usize,
    bytes: usize,
    first: u32,
    /// Where frame number 0 would be, if this arena's numbers went down that far. So would these begin: a frame's
    /// number alone leads to its page, its state and its link, without subtracting `first` on the way of every page.
    zero: usize,
    /// One byte a frame.
    states: *mut u8,
    /// One link a frame.
    links: *mut u32,
    /// What nobody ever had of it is zero.
    is_zeroed: bool,
    pub(crate) inner: *const Inner,
    /// Of the arenas that are unmapped: see [`registry::remove`](crate::registry::remove).
    pub(crate) next_closed: AtomicPtr<Arena>,
    memory: ManuallyDrop<Mapping>,
    metadata: ManuallyDrop<Mapping>,
}

// SAFETY: the pointers lead into the arena's own mappings; who may touch which byte is told at each access.
unsafe impl Send for Arena {}
// SAFETY: as for Send.
unsafe impl Sync for Arena {}

/// Where the parts of the metadata lie.
struct Layout {
    zone: ZoneMetadata,
    areas: usize,
    states: usize,
    links: usize,
    bytes: usize,
}

impl Layout {
    fn of(frames: usize) -> Self {
        let zone = ZoneMetadata::for_frames(frames as u32);
        let areas = zone.words * 8;
        let states = areas + zone.areas * 4;
        let links = (states + frames).next_multiple_of(PAGE_SIZE);
        Self { zone, areas, states, links, bytes: links + frames * 4 }
    }
}

impl Arena {
    /// An arena of `frames` frames over `memory`, the first numbered `first`.
    pub(crate) fn over(memory: Mapping, is_zeroed: bool, frames: usize, first: Pfn) -> Result<Self, Invalid> {
        let bytes = frames * PAGE_SIZE;
        let system = |what, bytes| move |errno: pagemill_sys::Errno| Invalid::System { what, bytes, errno: errno.0 };
        let layout = Layout::of(frames);
        let metadata =
            Mapping::reserve(layout.bytes, PAGE_SIZE).map_err(system("an arena's metadata", layout.bytes))?;
        let start = metadata.as_ptr::<u8>();
        Ok(Self {
            base: memory.addr(),
            bytes,
            first: first.as_u32(),
            zero: memory.addr().wrapping_sub(first.as_u32() as usize * PAGE_SIZE),
            states: start.wrapping_add(layout.states).wrapping_sub(first.as_u32() as usize),
            // `layout.links` is page-aligned.
            links: start.wrapping_add(layout.links).cast::<u32>().wrapping_sub(first.as_u32() as usize),
            is_zeroed,
            inner: ptr::null(),
            next_closed: AtomicPtr::new(ptr::null_mut()),
            memory: ManuallyDrop::new(memory),
            metadata: ManuallyDrop::new(metadata),
        })
    }

    /// The zone over this arena's metadata.
    ///
    /// # Safety
    /// At most one, dropped before the arena.
    pub(crate) unsafe fn zone(&self) -> Result<Zone<'static>, Invalid> {
        let frames = self.frames();
        let layout = Layout::of(frames);
        let start = self.metadata.as_ptr::<u8>();
        // SAFETY: zeroed memory of that size and alignment is a valid slice of atomics; the caller sees to its life.
        let (words, areas) = unsafe {
            (
                core::slice::from_raw_parts(start.cast::<AtomicU64>(), layout.zone.words),
                core::slice::from_raw_parts(
                    start.add(layout.areas).cast::<pagemill_core::atomic::AtomicU32>(),
                    layout.zone.areas,
                ),
            )
        };
        Zone::new(Pfn::new(self.first), frames as u32, words, areas)
    }

    pub(crate) fn base(&self) -> usize {
        self.base
    }
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
    pub(crate) fn frames(&self) -> usize {
        self.bytes >> PAGE_SHIFT
    }
    #[inline]
    pub(crate) fn contains(&self, addr: usize) -> bool {
        addr.wrapping_sub(self.base) < self.bytes
    }
    #[inline]
    pub(crate) fn has_pfn(&self, pfn: u32) -> bool {
        (pfn.wrapping_sub(self.first) as usize) < self.frames()
    }
    /// The allocator that the arena belongs to.
    #[inline]
    pub(crate) fn inner(&self) -> &'static Inner {
        // SAFETY: set before the arena is entered in the registry, to the allocator that owns the arena and lives as
        // long.
        unsafe { &*self.inner }
    }

    /// A frame's address.
    #[inline]
    pub(crate) fn addr_of(&self, pfn: u32) -> usize {
        self.zero.wrapping_add((pfn as usize) << PAGE_SHIFT)
    }
    /// What a frame's address is more than its number times the page size.
    #[inline]
    pub(crate) fn addr_of_zero(&self) -> usize {
        self.zero
    }
    /// The number of the frame at an address of this arena.
    #[inline]
    pub(crate) fn pfn_of(&self, addr: usize) -> u32 {
        (addr.wrapping_sub(self.zero) >> PAGE_SHIFT) as u32
    }

    // ── states ─────────────────────────────────────────────────────────────────────────────────────────────────

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
        let out = FrameState::handed_out(Order::ZERO, mobility);
        if let Some(first) = run {
            // SAFETY: the frames came off a list or out of the free areas, so they are ours alone; nobody else
            // writes their bytes unless one was freed twice, which is what is looked for.
            let states = unsafe { self.states_of(first, batch.len()) };
            if all_free(states) {
                set_all(states, out.as_byte());
                return run;
            }
        }
        self.hand_out_each(batch, mobility, refused);
        None
    }

    fn hand_out_each(&self, batch: &mut Batch, mobility: Mobility, mut refused: impl FnMut(u32)) {
        let (mut at, mut kept) = (0, 0);
        let pfns = batch.as_mut_slice();
        while at < pfns.len() {
            if let Some(first) = pfns[at..].first_chunk::<GROUP>().and_then(group_run) {
                // SAFETY: as in `hand_out_batch`.
                let states = unsafe { self.states_of(first, GROUP) };
                if all_free(states) {
                    set_all(states, FrameState::handed_out(Order::ZERO, mobility).as_byte());
                    pfns.copy_within(at..at + GROUP, kept);
                    (at, kept) = (at + GROUP, kept + GROUP);
                    continue;
                }
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

    /// Marks a page as free that is not unmovable. Its mobility; none if it is no such page.
    #[cold]
    #[inline(never)]
    pub(crate) fn take_back_other(&self, pfn: u32) -> Option<Mobility> {
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
        // SAFETY: frames of this arena that the caller owns, or claims to; see `hand_out_batch`.
        let states = unsafe { self.states_of(first, n) };
        let are_out = all_are(states, FrameState::handed_out(Order::ZERO, mobility).as_byte());
        if are_out {
            set_all(states, FrameState::FREE.as_byte());
        }
        are_out
    }

    /// The states of neighbouring frames, of which the caller is the owner.
    #[expect(clippy::mut_from_ref, reason = "the bytes of a frame belong to its owner, who holds one such slice")]
    #[inline]
    unsafe fn states_of(&self, first: u32, n: usize) -> &mut [u8] {
        debug_assert!(self.has_pfn(first) && self.has_pfn(first + n as u32 - 1));
        // SAFETY: inside the table; the caller owns the frames.
        unsafe { core::slice::from_raw_parts_mut(self.states.wrapping_add(first as usize), n) }
    }

    /// Marks a block as handed out. The first frame of it that is not free, if one is not; then nothing is changed.
    pub(crate) fn hand_out_block(&self, pfn: u32, order: Order, mobility: Mobility) -> Result<(), u32> {
        if cfg!(feature = "detection-off") {
            return Ok(());
        }
        // SAFETY: the block came out of the free areas, so it is the caller's.
        let states = unsafe { self.states_of(pfn, order.frames() as usize) };
        if let Some(at) = states.iter().position(|&byte| !FrameState::from_byte(byte).is_free()) {
            return Err(pfn + at as u32);
        }
        states.fill(FrameState::INSIDE.as_byte());
        states[0] = FrameState::handed_out(order, mobility).as_byte();
        Ok(())
    }

    /// Marks all frames of a block that is handed out: as free ones, or as pages when it is split.
    pub(crate) fn mark_block(&self, pfn: u32, order: Order, state: FrameState) {
        if !cfg!(feature = "detection-off") {
            // SAFETY: the caller checked that the block is handed out, and it is the one who has it.
            unsafe { self.states_of(pfn, order.frames() as usize) }.fill(state.as_byte());
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
        // SAFETY: frames of this arena, in a process that has one thread.
        let states = unsafe { self.states_of(first, n) };
        let is_settled = first >= *block_end && all_free(states);
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
            if cfg!(feature = "detection-off") || !self.is_zeroed || (state.is_free() && state != FrameState::FRESH) {
                let page = ptr::with_exposed_provenance_mut::<u8>(self.addr_of(pfn));
                // SAFETY: a page of this arena, which the caller took and has not handed on.
                unsafe { page.write_bytes(0, PAGE_SIZE) };
            }
        }
    }

    // ── links ──────────────────────────────────────────────────────────────────────────────────────────────────

    /// A frame's link, where a list keeps the number of its next one.
    #[inline]
    pub(crate) fn link(&self, pfn: u32) -> &AtomicU32 {
        debug_assert!(self.has_pfn(pfn));
        // SAFETY: a frame of this arena has a link, for as long as the arena lives.
        unsafe { AtomicU32::from_ptr(self.links.wrapping_add(pfn as usize)) }
    }

    /// Links neighbouring frames, each to the next, the last to whatever comes after it.
    #[inline]
    pub(crate) fn link_run(&self, first: u32, n: usize) {
        debug_assert!(self.has_pfn(first) && self.has_pfn(first + n as u32 - 1));
        // SAFETY: the links of frames that belong to the caller's list.
        let links = unsafe { core::slice::from_raw_parts_mut(self.links.wrapping_add(first as usize), n) };
        links.iter_mut().zip(first + 1..).for_each(|(link, next)| *link = next);
    }

    /// If each of the `N` frames from `first` is linked to its neighbour: what the last one is linked to.
    #[inline]
    pub(crate) fn linked_run<const N: usize>(&self, first: u32) -> Option<u32> {
        if !self.has_pfn(first + N as u32 - 1) {
            return None;
        }
        // SAFETY: in the table. Links of frames that are not this list's are read and not believed.
        let links = unsafe { self.links.wrapping_add(first as usize).cast::<[u32; N]>().read_volatile() };
        let differs = (0..N - 1).fold(0, |differs, i| differs | (links[i] ^ (first + 1 + i as u32)));
        (differs == 0).then_some(links[N - 1])
    }

    /// What a frame of metadata costs, in bits, for free and used (C10.3).
    pub(crate) fn metadata_bits_per_frame(&self) -> f64 {
        let frames = self.frames() as u32;
        ZoneMetadata::for_frames(frames).bits_per_frame(frames)
    }

    /// Gives the memory back to the system. What is left, a hundred bytes or so, stays for ever: somebody may be looking
    /// at it in the registry, to see that an address is another arena's.
    ///
    /// # Safety
    /// Once, when nobody uses its pages and its metadata any more.
    pub(crate) unsafe fn unmap(&self) {
        // SAFETY: the copies are dropped here, once, as the caller promises; the originals never are.
        unsafe {
            drop(ptr::read(&*self.memory));
            drop(ptr::read(&*self.metadata));
        }
    }

    /// Has the system commit blocks of `order`, neighbours in one call.
    #[cold]
    pub(crate) fn populate(&self, pfns: &[u32], order: Order) {
        let next_to = |a: &u32, b: &u32| b.wrapping_sub(*a) == order.frames();
        for run in pfns.chunk_by(next_to) {
            let bytes = run.len() * order.bytes();
            // A page that cannot be committed now faults when it is touched, as it would have.
            let _ = self.memory.populate(self.addr_of(run[0]) - self.base, bytes);
        }
    }

    /// Has the system take the memory of a block back that nobody has. Its frames are zero from then on, as if they had
    /// never been handed out. Returns how many those are; 0 if the system refuses.
    pub(crate) fn give_back(&self, pfn: u32, order: Order) -> usize {
        let offset = self.addr_of(pfn) - self.base;
        // SAFETY: the caller took the block out of the zone: nobody has a page of it.
        if unsafe { self.memory.release(offset, order.bytes()) }.is_err() {
            return 0;
        }
        let state = if self.is_zeroed { FrameState::FRESH } else { FrameState::FREE };
        self.mark_block(pfn, order, state);
        order.frames() as usize
    }

    /// The mapping with the pages.
    pub(crate) fn memory(&self) -> &Mapping {
        &self.memory
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

// States are looked at and written eight at a time, as words; a tail of fewer as four, two and one. Both sides cut it alike,
// so that a load finds what it wants in one store and need not wait for the cache.

/// Four, two and one of what is left below eight.
#[inline]
fn tail_of(tail: &[u8]) -> u64 {
    let (fours, tail) = tail.as_chunks::<4>();
    let (twos, tail) = tail.as_chunks::<2>();
    let four = fours.first().map_or(0, |four| u32::from_ne_bytes(*four));
    let two = twos.first().map_or(0, |two| u16::from_ne_bytes(*two));
    u64::from(four) | u64::from(two) | u64::from(tail.first().copied().unwrap_or(0))
}

/// Are these all states of free frames?
#[inline]
fn all_free(states: &[u8]) -> bool {
    const NOT_FREE: u8 = !FrameState::FREE.as_byte();
    let (words, tail) = states.as_chunks::<8>();
    let in_words = words.iter().fold(0, |any, word| any | u64::from_ne_bytes(*word));
    (in_words | tail_of(tail)) & u64::from_ne_bytes([NOT_FREE; 8]) == 0
}

/// Are these all `state`?
#[inline]
fn all_are(states: &[u8], state: u8) -> bool {
    let (words, tail) = states.as_chunks::<8>();
    let expected = [state; 8];
    let differs = |differs, word: &[u8; 8]| differs | (u64::from_ne_bytes(*word) ^ u64::from_ne_bytes(expected));
    let in_words = words.iter().fold(0, differs);
    let (fours, tail) = tail.as_chunks::<4>();
    let (twos, tail) = tail.as_chunks::<2>();
    in_words == 0
        && fours.first().is_none_or(|four| *four == [state; 4])
        && twos.first().is_none_or(|two| *two == [state; 2])
        && tail.first().is_none_or(|one| *one == state)
}

/// Sets all to `state`. A loop over words that the compiler does not know: for one that it knows it would call `memset`,
/// which costs more than a few words do.
#[inline]
fn set_all(states: &mut [u8], state: u8) {
    let (words, tail) = states.as_chunks_mut::<8>();
    if !words.is_empty() {
        let word = core::hint::black_box(u64::from_ne_bytes([state; 8])).to_ne_bytes();
        words.iter_mut().for_each(|place| *place = word);
    }
    let (fours, tail) = tail.as_chunks_mut::<4>();
    let (twos, tail) = tail.as_chunks_mut::<2>();
    if let Some(four) = fours.first_mut() {
        *four = [state; 4];
    }
    if let Some(two) = twos.first_mut() {
        *two = [state; 2];
    }
    if let Some(one) = tail.first_mut() {
        *one = state;
    }
}

#[cfg(test)]
#[cfg(not(feature = "detection-off"))]
mod tests {
    use crate::{Allocator, Mobility, Order};
    use pagemill_core::FrameState;
    use pagemill_sys::Batch;

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
}
