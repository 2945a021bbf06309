//! An arena: address space that Pagemill owns, the numbers of its frames, and what is known of each frame.
//!
//! It stands below the path: `path` decides which frame, the arena knows where that is and in what state. The state
//! table (a byte a frame) is written by a frame's owner alone: whoever frees it, then whoever hands it out. Both
//! happen to many frames at once where they are contiguous, which is the rule in bulk.
//!
//! # Memory
//! Reserved at once, committed by the system on first touch: the pages themselves; the free areas (1.1 bits a frame);
//! the states (1 byte a frame); the links of lists (4 bytes a frame, touched by lists alone).
mod pins;
pub(crate) use pins::Pinned;
mod states;

use crate::allocator::Inner;
use crate::fork;
use crate::memory::Memory;
use core::mem::ManuallyDrop;
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering::Relaxed};
use pagemill_core::atomic::AtomicU64;
use pagemill_core::{FrameState, Invalid, Order, PAGE_SHIFT, PAGE_SIZE, Pfn, Zone, ZoneMetadata};
use pagemill_sys::{Batch, Mapping, count_up, do_count_up};

/// Links and addresses are compared this many at a time.
pub(crate) const GROUP: usize = 8;

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Arena {
    base: usize,
    /// 0 once it is taken out of the registry: threads that still remember it then find nothing in it.
    bytes: AtomicUsize,
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
    /// It was cut to what the process's limit had room for, which is for it alone.
    pub(crate) is_within_limit: bool,
    /// Some of it went back to the system, and is fresh again: fresh frames may have been handed out before.
    pub(crate) has_given_back: AtomicBool,
    pins: pins::Pins,
    /// The [generation](crate::fork) that mapped it.
    opened_in: u64,
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
    pub(crate) fn over(memory: Mapping, described: &Memory, first: Pfn) -> Result<Self, Invalid> {
        let frames = described.pages();
        let bytes = frames * PAGE_SIZE;
        let system = |what, bytes| move |errno: pagemill_sys::Errno| Invalid::System { what, bytes, errno: errno.0 };
        let layout = Layout::of(frames);
        let metadata =
            Mapping::reserve(layout.bytes, PAGE_SIZE).map_err(system("an arena's metadata", layout.bytes))?;
        let start = metadata.as_ptr::<u8>();
        Ok(Self {
            base: memory.addr(),
            bytes: AtomicUsize::new(bytes),
            first: first.as_u32(),
            zero: memory.addr().wrapping_sub(first.as_u32() as usize * PAGE_SIZE),
            states: start.wrapping_add(layout.states).wrapping_sub(first.as_u32() as usize),
            // `layout.links` is page-aligned.
            links: start.wrapping_add(layout.links).cast::<u32>().wrapping_sub(first.as_u32() as usize),
            is_zeroed: described.is_zeroed(),
            is_within_limit: described.is_within_limit,
            has_given_back: AtomicBool::new(false),
            pins: pins::Pins::default(),
            opened_in: fork::generation(),
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
    #[inline]
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.load(Relaxed)
    }
    pub(crate) fn frames(&self) -> usize {
        self.bytes() >> PAGE_SHIFT
    }
    /// It contains nothing from now on.
    pub(crate) fn shut(&self) {
        self.bytes.store(0, Relaxed);
    }
    #[inline]
    pub(crate) fn contains(&self, addr: usize) -> bool {
        addr.wrapping_sub(self.base) < self.bytes()
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
        // SAFETY: in the table. Other lists may look at these links meanwhile, and do it as `link` or `cells` do.
        unsafe { count_up(self.links.wrapping_add(first as usize), n, first + 1) };
    }

    /// Is each of these `n` neighbours linked to the next, the last to whatever comes after it? Links of frames that are not
    /// this list's are looked at too: if it is so, all of them are this list's, since each is linked to from the one before.
    #[inline]
    pub(crate) fn are_linked(&self, first: u32, n: usize) -> bool {
        // SAFETY: in the table. Whoever's the links are, they are loaded and stored as `link` or `cells` do.
        self.has_pfn(first + n as u32 - 1)
            && unsafe { do_count_up(self.links.wrapping_add(first as usize), n - 1, first + 1) }
    }

    /// If each of the `N` frames from `first` [is linked](Self::are_linked) to its neighbour: what the last one is linked to.
    #[inline]
    pub(crate) fn linked_run<const N: usize>(&self, first: u32) -> Option<u32> {
        self.are_linked(first, N).then(|| self.link(first + N as u32 - 1).load(Relaxed))
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

    /// Has the system commit `n` neighbouring blocks from `first` on, in one call. Returns how many it did, from the first
    /// on; all where it cannot do so before they are touched.
    #[cold]
    pub(crate) fn populate(&self, first: u32, n: usize, order: Order) -> usize {
        let start = self.addr_of(first) - self.base;
        if self.commit(start, n * order.bytes()) {
            return n;
        }
        // Piece by piece, to know how far it comes.
        let step = (Batch::CAPACITY * PAGE_SIZE).max(order.bytes());
        let is_uncommitted = |at: &usize| !self.commit(start + at, step.min(n * order.bytes() - at));
        (0..n * order.bytes()).step_by(step).find(is_uncommitted).map_or(n, |at| at / order.bytes())
    }

    /// Has the system commit a range, and what else its pages of 2 MiB hold. False: it has no memory for it.
    pub(crate) fn commit(&self, offset: usize, len: usize) -> bool {
        let whole = |page: usize| {
            let (start, end) = (offset / page * page, (offset + len).next_multiple_of(page));
            (start, end.min(self.memory.bytes()) - start)
        };
        let mut claim = None;
        if let Some(limit) = &self.inner().nodes.limit {
            // The system may take 2 MiB where 4 KiB are asked for.
            let (start, len) = whole(pagemill_sys::HUGE_PAGE_SIZE);
            let missing = || len - self.memory.resident(start, len).unwrap_or(0);
            claim = limit.claim(len).or_else(|| limit.claim(missing()));
            if claim.is_none() {
                return false;
            }
        }
        let (start, len) = whole(self.memory.page_bytes());
        let committed = self.memory.populate(start, len);
        drop(claim);
        // Memory of a device, and any before Linux 5.14, is left to be touched.
        committed.is_ok() || committed.is_err_and(pagemill_sys::Errno::is_unsupported)
    }

    /// Has the system take the memory of `n` neighbouring frames back that nobody has. They are zero from then on, as if
    /// they had never been handed out. False: the system refuses.
    pub(crate) fn give_back(&self, first: u32, n: usize) -> bool {
        let offset = self.addr_of(first) - self.base;
        // Behind the last frame the system's last page is nobody's.
        let end = offset + n * PAGE_SIZE;
        let end = if end == self.bytes() { self.memory.bytes() } else { end };
        // SAFETY: the caller took the frames out of the zone: nobody has one of them.
        if unsafe { self.memory.release(offset, end - offset) }.is_err() {
            return false;
        }
        self.has_given_back.store(true, Relaxed);
        self.mark(first, n, if self.is_zeroed { FrameState::FRESH } else { FrameState::FREE });
        true
    }

    /// How many of `n` neighbouring frames the system has committed; all where it does not say.
    pub(crate) fn resident(&self, first: u32, n: usize) -> usize {
        let resident = self.memory.resident(self.addr_of(first) - self.base, n * PAGE_SIZE);
        resident.map_or(n, |bytes| bytes / PAGE_SIZE)
    }

    /// Bytes that the system would have to commit yet.
    pub(crate) fn uncommitted(&self) -> usize {
        self.bytes() - self.memory.resident(0, self.memory.bytes()).unwrap_or(0).min(self.bytes())
    }

    /// Did this process inherit memory that it shares with its parent, whose pages these are?
    pub(crate) fn is_of_parent(&self) -> bool {
        self.memory.is_shared() && self.opened_in != fork::generation()
    }

    /// The mapping with the pages.
    pub(crate) fn memory(&self) -> &Mapping {
        &self.memory
    }
}
