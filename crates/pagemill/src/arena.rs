//! An arena: address space that Pagemill owns, the numbers of its frames, and what is known of each frame.
//!
//! It stands below the path: `path` decides which frame, the arena knows where that is and in what state. The state
//! table (a byte a frame) is written by a frame's owner alone: whoever frees it, then whoever hands it out. Both
//! happen at 8 frames at once where they are contiguous, which is the rule in bulk.
//!
//! # Memory
//! Reserved at once, committed by the system on first touch: the pages themselves; the free areas (1.1 bits a frame);
//! the states (1 byte a frame); the links of lists (4 bytes a frame, touched by lists alone).
use crate::allocator::Inner;
use core::ptr;
use core::sync::atomic::{AtomicU8, AtomicU32, Ordering::Relaxed};
use pagemill_core::atomic::AtomicU64;
use pagemill_core::{FrameState, Invalid, Mobility, Order, PAGE_SHIFT, PAGE_SIZE, Pfn, Zone, ZoneMetadata};
use pagemill_sys::{Batch, Mapping};

/// Each byte of a word.
const fn splat(byte: u8) -> u64 {
    byte as u64 * 0x0101_0101_0101_0101
}
/// In each byte, the bits that are not set in a free frame's state (0 or 1).
const NOT_FREE: u64 = splat(!FrameState::FREE.as_byte());
/// Frames whose states are checked at once.
pub(crate) const GROUP: usize = 8;

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Arena {
    base: usize,
    bytes: usize,
    first: u32,
    /// One byte a frame, and padding.
    states: *mut u8,
    /// One link a frame.
    links: *mut u32,
    pub(crate) inner: *const Inner,
    memory: Mapping,
    metadata: Mapping,
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
    /// Reserves an arena of `frames` frames, the first numbered `first`.
    pub(crate) fn reserve(frames: usize, first: Pfn, huge_pages: bool) -> Result<Self, Invalid> {
        let bytes = frames * PAGE_SIZE;
        // Blocks are aligned to their size, so the arena is to the largest that it holds.
        let align = bytes.next_power_of_two().clamp(1 << 21, Order::MAX.bytes());
        let system = |what, bytes| move |errno: pagemill_sys::Errno| Invalid::System { what, bytes, errno: errno.0 };
        let memory = Mapping::reserve(bytes, align).map_err(system("an arena", bytes))?;
        if huge_pages {
            memory.advise_huge_pages();
        }
        let layout = Layout::of(frames);
        let metadata =
            Mapping::reserve(layout.bytes, PAGE_SIZE).map_err(system("an arena's metadata", layout.bytes))?;
        let start = metadata.as_ptr::<u8>();
        Ok(Self {
            base: memory.addr(),
            bytes,
            first: first.as_u32(),
            // SAFETY: both offsets lie inside the metadata, by the layout that sized it.
            states: unsafe { start.add(layout.states) },
            // SAFETY: as above; `links` is page-aligned.
            links: unsafe { start.add(layout.links).cast() },
            inner: ptr::null(),
            memory,
            metadata,
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
        self.base + ((pfn - self.first) as usize) * PAGE_SIZE
    }
    /// The address of frame 0, if numbers went on below this arena's: adding a frame's number times the page size
    /// gives its address.
    #[inline]
    pub(crate) fn addr_of_zero(&self) -> usize {
        self.base.wrapping_sub(self.first as usize * PAGE_SIZE)
    }
    /// The number of the frame at an address of this arena.
    #[inline]
    pub(crate) fn pfn_of(&self, addr: usize) -> u32 {
        self.first + ((addr - self.base) >> PAGE_SHIFT) as u32
    }

    // ── states ─────────────────────────────────────────────────────────────────────────────────────────────────

    #[inline]
    fn state_cell(&self, pfn: u32) -> &AtomicU8 {
        debug_assert!(self.has_pfn(pfn));
        // SAFETY: a frame of this arena has a byte in the table, for as long as the arena lives.
        unsafe { AtomicU8::from_ptr(self.states.add((pfn - self.first) as usize)) }
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
    #[inline]
    pub(crate) fn hand_out_batch(&self, batch: &mut Batch, mobility: Mobility, mut refused: impl FnMut(u32)) {
        if cfg!(feature = "detection-off") {
            return;
        }
        let out = FrameState::handed_out(Order::ZERO, mobility);
        let mut kept = 0;
        let pfns = batch.as_mut_slice();
        let mut at = 0;
        while at < pfns.len() {
            if at + GROUP <= pfns.len() && is_run(&pfns[at..at + GROUP]) {
                let states = self.group_at(pfns[at]);
                // SAFETY: the group's frames are this arena's and ours alone: they came off a list or out of the
                // free areas. Nobody else writes their bytes unless one was freed twice, which is what is looked
                // for; byte stores of eight neighbours at once are what the processor does anyway.
                unsafe {
                    if states.read_unaligned() & NOT_FREE == 0 {
                        states.write_unaligned(splat(out.as_byte()));
                        if kept != at {
                            pfns.copy_within(at..at + GROUP, kept);
                        }
                        kept += GROUP;
                        at += GROUP;
                        continue;
                    }
                }
            }
            if self.hand_out(pfns[at], mobility) {
                pfns[kept] = pfns[at];
                kept += 1;
            } else {
                refused(pfns[at]);
            }
            at += 1;
        }
        batch.truncate(kept);
    }

    /// Marks eight neighbours from `first` on as free, if all are pages handed out with this mobility.
    #[inline]
    pub(crate) fn take_back_group(&self, first: u32, mobility: Mobility) -> bool {
        if cfg!(feature = "detection-off") {
            return true;
        }
        let states = self.group_at(first);
        // SAFETY: eight frames of this arena that the caller owns, or claims to; see `hand_out_batch`.
        unsafe {
            let is_out = states.read_unaligned() == splat(FrameState::handed_out(Order::ZERO, mobility).as_byte());
            if is_out {
                states.write_unaligned(splat(FrameState::FREE.as_byte()));
            }
            is_out
        }
    }

    #[inline]
    fn group_at(&self, pfn: u32) -> *mut u64 {
        debug_assert!(self.has_pfn(pfn) && self.has_pfn(pfn + GROUP as u32 - 1));
        // SAFETY: a frame of this arena has a byte in the table.
        unsafe { self.states.add((pfn - self.first) as usize).cast() }
    }

    /// The states of a block's frames, of which the caller is the owner.
    #[expect(clippy::mut_from_ref, reason = "the bytes of a block belong to its owner, who calls this once")]
    unsafe fn states_of(&self, pfn: u32, order: Order) -> &mut [u8] {
        debug_assert!(self.has_pfn(pfn) && self.has_pfn(pfn + order.frames() - 1));
        // SAFETY: inside the table; the caller owns the frames.
        unsafe {
            core::slice::from_raw_parts_mut(self.states.add((pfn - self.first) as usize), order.frames() as usize)
        }
    }

    /// Marks a block as handed out. The first frame of it that is not free, if one is not; then nothing is changed.
    pub(crate) fn hand_out_block(&self, pfn: u32, order: Order, mobility: Mobility) -> Result<(), u32> {
        if cfg!(feature = "detection-off") {
            return Ok(());
        }
        // SAFETY: the block came out of the free areas, so it is the caller's.
        let states = unsafe { self.states_of(pfn, order) };
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
            unsafe { self.states_of(pfn, order) }.fill(state.as_byte());
        }
    }

    /// Zeroes those of a block's frames that somebody may have written to (C2.2). Before it is marked handed out.
    pub(crate) fn zero(&self, pfn: u32, order: Order) {
        for pfn in pfn..pfn + order.frames() {
            let state = self.state(pfn);
            if cfg!(feature = "detection-off") || (state.is_free() && state != FrameState::FRESH) {
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
        unsafe { AtomicU32::from_ptr(self.links.add((pfn - self.first) as usize)) }
    }

    /// Links the frames of a run, each to the next, the last to the one after the run.
    #[inline]
    pub(crate) fn link_group(&self, first: u32) {
        debug_assert!(self.has_pfn(first) && self.has_pfn(first + GROUP as u32 - 1));
        let next: [u32; GROUP] = core::array::from_fn(|i| first + 1 + i as u32);
        // SAFETY: the links of eight frames that belong to the caller's list.
        unsafe { self.links.add((first - self.first) as usize).cast::<[u32; GROUP]>().write(next) };
    }

    /// Is each of the eight frames from `first` linked to its neighbour, the last to whatever comes next?
    #[inline]
    pub(crate) fn is_linked_group(&self, first: u32) -> Option<u32> {
        if !self.has_pfn(first + GROUP as u32 - 1) {
            return None;
        }
        // SAFETY: in the table; those that are not this list's are read and not believed. Eight plain reads: a link
        // that another list's owner changes at the same time is one of those.
        let links = unsafe { self.links.add((first - self.first) as usize).cast::<[u32; GROUP]>().read_volatile() };
        let differs =
            links[..GROUP - 1].iter().zip(first + 1..).fold(0, |differs, (&link, next)| differs | (link ^ next));
        (differs == 0).then_some(links[GROUP - 1])
    }

    /// What a frame of metadata costs, in bits, for free and used (C10.3).
    pub(crate) fn metadata_bits_per_frame(&self) -> f64 {
        let frames = self.frames() as u32;
        ZoneMetadata::for_frames(frames).bits_per_frame(frames)
    }

    /// The mapping with the pages.
    pub(crate) fn memory(&self) -> &Mapping {
        &self.memory
    }
}

/// Are these eight consecutive frame numbers?
#[inline]
pub(crate) fn is_run(pfns: &[u32]) -> bool {
    let first = pfns[0];
    pfns.iter().zip(0u32..).fold(0, |differs, (&pfn, i)| differs | (pfn ^ first.wrapping_add(i))) == 0
}
