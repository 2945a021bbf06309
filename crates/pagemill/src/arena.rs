//! An arena: address space that Pagemill owns, the numbers of its frames, and what is known of each frame.
//!
//! It stands below the path: `path` decides which frame, the arena knows where that is and in what state. The state
//! table (a byte a frame) is written where a block becomes a raw pointer, and where it comes back.
//!
//! # Memory
//! Reserved at once, committed by the system on first touch: the pages themselves; the free areas (1.1 bits a frame);
//! the states (1 byte a frame); the links of lists (4 bytes a frame, touched by lists alone). Of an arena above a GiB also the
//! notes of what was used (a bit for 128 MiB), which the child of a fork shares.
//!
//! # Life
//! The header, [`Arena`], is never freed, because a thread may look at the arena that it met last at any time. It is reused: it
//! has a [`Body`] while it stands for memory, and gets another one when it stands for other memory. An arena ends when its
//! allocator has no handle and its last page is back; how, and on which thread, `registry.rs` says.
//!
//! # Invariants
//! - A1 `span` is one word, so that a reader sees the range of one arena and never a mixture of two; so is `numbers`.
//! - A2 Only code that has a page or frame of the arena, a handle of its allocator, or the registry touches the body: so the
//!   body is there, and stays. All other code finds by the two words that its address or number is not here, and touches
//!   nothing else. The words do not deceive: an arena is entered after what lay there before has ended.
mod pins;
pub(crate) use pins::Pinned;
mod states;
pub(crate) use states::FULL;

use crate::allocator::Inner;
use crate::memory::Memory;
use crate::process;
use core::cell::UnsafeCell;
use core::fmt;
use core::mem::MaybeUninit;
use core::ops::{Deref, Range};
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use pagemill_core::atomic::AtomicU64;
use pagemill_core::{Buddy, BuddyMetadata, FrameState, Invalid, Order, PAGE_SHIFT, PAGE_SIZE, Pfn, use_words_for};
use pagemill_os::{Batch, Mapping, are_pages};

/// See the [module](self).
pub(crate) struct Arena {
    /// The address, a multiple of 2 MiB below 2^48, times 2^11, and the number of frames; 0 while it stands for nothing.
    span: AtomicU64,
    /// The first frame's number times 2^32, and the number of frames; 0 while it stands for nothing.
    numbers: AtomicU64,
    /// In one of the registry's stacks: the arena below.
    pub(crate) next: AtomicPtr<Arena>,
    body: UnsafeCell<MaybeUninit<Body>>,
}

/// What an arena has while it stands for memory.
#[derive(Debug)]
pub(crate) struct Body {
    base: usize,
    frames: u32,
    first: u32,
    /// Where frame number 0 would be, if this arena's numbers went down that far. So would these begin: a frame's
    /// number alone leads to its page, its state and its link, without subtracting `first` on the way of every page.
    zero: usize,
    /// One byte a frame.
    states: *mut u8,
    /// One link a frame.
    links: *mut u32,
    /// Frames that nobody ever had are zero.
    is_zeroed: bool,
    /// Somebody else may write to its pages at any time: [`Allocator::memfd`](crate::Allocator::memfd) handed out its file.
    is_handed_on: AtomicBool,
    /// It was cut to what the process's limit had room for, which is for it alone.
    pub(crate) is_within_limit: bool,
    /// Some of it went back to the system, and is fresh again: fresh frames may have been handed out before.
    pub(crate) has_given_back: AtomicBool,
    pins: pins::Pins,
    /// The [generation](crate::process) that mapped it.
    opened_in: u64,
    pub(crate) inner: *const Inner,
    memory: Mapping,
    metadata: Mapping,
    /// What of a large arena was ever used; a child shares it.
    used: Option<Mapping>,
}

impl Deref for Arena {
    type Target = Body;
    #[inline]
    fn deref(&self) -> &Body {
        // SAFETY: the body is there, and nobody writes to it meanwhile (A2).
        unsafe { (*self.body.get()).assume_init_ref() }
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena").field("span", &self.span).finish_non_exhaustive()
    }
}

// SAFETY: the pointers lead into the arena's own mappings; who may touch which byte is told at each access.
unsafe impl Send for Arena {}
// SAFETY: as for Send.
unsafe impl Sync for Arena {}

/// An arena of more frames, a GiB, has it noted what of it is used: of a smaller one, the child of a fork looks at everything.
const SMALL: usize = 1 << 18;

/// Where the parts of the metadata lie.
struct Layout {
    buddy: BuddyMetadata,
    areas: usize,
    states: usize,
    links: usize,
    bytes: usize,
}

impl Layout {
    fn of(frames: usize) -> Self {
        let buddy = BuddyMetadata::for_frames(frames as u32);
        let areas = buddy.words * 8;
        let states = areas + buddy.areas * 4;
        let links = (states + frames).next_multiple_of(PAGE_SIZE);
        Self { buddy, areas, states, links, bytes: links + frames * 4 }
    }
}

impl Body {
    /// That of an arena over `memory`, whose first frame is numbered `first`. Its `inner` is still to be set.
    pub(crate) fn over(memory: Mapping, described: &Memory, first: Pfn) -> Result<Self, Invalid> {
        let frames = described.pages();
        let system = |what, bytes| move |errno: pagemill_os::Errno| Invalid::System { what, bytes, errno: errno.0 };
        let layout = Layout::of(frames);
        let metadata =
            Mapping::reserve(layout.bytes, PAGE_SIZE).map_err(system("an arena's metadata", layout.bytes))?;
        let note = use_words_for(frames as u32) * 4;
        let used =
            (frames > SMALL).then(|| Mapping::shared(note)).transpose().map_err(system("an arena's notes", note))?;
        let start = metadata.as_ptr::<u8>();
        Ok(Self {
            base: memory.addr(),
            frames: frames as u32,
            first: first.as_u32(),
            zero: memory.addr().wrapping_sub(first.as_u32() as usize * PAGE_SIZE),
            states: start.wrapping_add(layout.states).wrapping_sub(first.as_u32() as usize),
            // `layout.links` is page-aligned.
            links: start.wrapping_add(layout.links).cast::<u32>().wrapping_sub(first.as_u32() as usize),
            is_zeroed: described.is_zeroed(),
            is_handed_on: AtomicBool::new(false),
            is_within_limit: described.is_within_limit,
            has_given_back: AtomicBool::new(false),
            pins: pins::Pins::default(),
            opened_in: process::generation(),
            inner: ptr::null(),
            memory,
            metadata,
            used,
        })
    }

    /// The zone over this arena's metadata.
    ///
    /// # Safety
    /// At most one, dropped before the arena.
    pub(crate) unsafe fn buddy(&self) -> Result<Buddy<'static>, Invalid> {
        let layout = Layout::of(self.frames as usize);
        let start = self.metadata.as_ptr::<u8>();
        // SAFETY: zeroed memory of that size and alignment is a valid slice of atomics; the caller sees to its life.
        let (words, areas) = unsafe {
            (
                core::slice::from_raw_parts(start.cast::<AtomicU64>(), layout.buddy.words),
                core::slice::from_raw_parts(
                    start.add(layout.areas).cast::<pagemill_core::atomic::AtomicU32>(),
                    layout.buddy.areas,
                ),
            )
        };
        let buddy = Buddy::new(Pfn::new(self.first), self.frames, words, areas)?.sleeping(pagemill_os::SLEEP);
        let Some(used) = &self.used else { return Ok(buddy) };
        // SAFETY: as above; other processes of the family use it as this one does, by atomics.
        Ok(buddy.noting_use(unsafe { core::slice::from_raw_parts(used.as_ptr(), use_words_for(self.frames)) }))
    }
}

impl Arena {
    /// One that stands for nothing yet.
    pub(crate) const fn new() -> Self {
        Self {
            span: AtomicU64::new(0),
            numbers: AtomicU64::new(0),
            next: AtomicPtr::new(ptr::null_mut()),
            body: UnsafeCell::new(MaybeUninit::uninit()),
        }
    }

    /// Has it stand for this memory from now on.
    ///
    /// # Safety
    /// It stands for nothing, and whoever holds the registry alone knows of it.
    pub(crate) unsafe fn begin(&self, body: Body) {
        let (base, first, frames) = (body.base as u64, u64::from(body.first), u64::from(body.frames));
        // SAFETY: nobody touches the body (A2), and the caller is alone in beginning one.
        unsafe { (*self.body.get()).write(body) };
        // Release pairs with the Acquire in `contains`: the body is there.
        self.span.store(base << 11 | frames, Release);
        self.numbers.store(first << 32 | frames, Release);
    }

    /// It stands for nothing from now on, and its memory goes back to the system. Nothing here needs more than a signal
    /// handler may do.
    ///
    /// # Safety
    /// No page of it is out, nobody uses its metadata any more, and the registry leads here no more.
    pub(crate) unsafe fn end(&self) {
        self.span.store(0, Relaxed);
        self.numbers.store(0, Relaxed);
        // SAFETY: nobody touches the body from here on, as the caller promises (A2).
        unsafe { (*self.body.get()).assume_init_drop() };
    }

    #[inline]
    pub(crate) fn contains(&self, addr: usize) -> bool {
        // Acquire pairs with the Release in `begin`.
        let span = self.span.load(Acquire);
        let base = (span >> 32) << 21;
        (addr as u64).wrapping_sub(base) >> PAGE_SHIFT < span & u64::from(u32::MAX)
    }
    #[inline]
    pub(crate) fn has_pfn(&self, pfn: u32) -> bool {
        let numbers = self.numbers.load(Relaxed);
        pfn.wrapping_sub((numbers >> 32) as u32) < numbers as u32
    }

    pub(crate) fn base(&self) -> usize {
        self.base
    }
    /// Its addresses.
    pub(crate) fn range(&self) -> Range<usize> {
        self.base..self.base + self.bytes()
    }
    #[inline]
    pub(crate) fn bytes(&self) -> usize {
        self.frames() << PAGE_SHIFT
    }
    #[inline]
    pub(crate) fn frames(&self) -> usize {
        self.frames as usize
    }
    /// Its zone and lists, and by them its allocator.
    #[inline]
    pub(crate) fn inner(&self) -> &'static Inner {
        // SAFETY: set before the arena is entered in the registry; freed after the arena has ended, when nobody touches its
        // body any more (A2).
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

    /// What a frame of metadata costs, in bits, for free and used (C10.3).
    pub(crate) fn metadata_bits_per_frame(&self) -> f64 {
        let frames = self.frames() as u32;
        BuddyMetadata::for_frames(frames).bits_per_frame(frames)
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
            let (start, len) = whole(pagemill_os::HUGE_PAGE_SIZE);
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
        committed.is_ok() || committed.is_err_and(pagemill_os::Errno::is_unsupported)
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
        self.mark(first, n, if self.is_zeroed() { FrameState::FRESH } else { FrameState::SAFE });
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
        self.memory.is_shared() && self.opened_in != process::generation()
    }

    /// Was it there before this process was forked?
    pub(crate) fn was_forked(&self) -> bool {
        self.opened_in != process::generation()
    }

    /// The mapping with the pages.
    pub(crate) fn memory(&self) -> &Mapping {
        &self.memory
    }

    /// Does nobody else see its pages, neither another process nor a holder of its file?
    pub(crate) fn is_lone(&self) -> bool {
        !self.is_handed_on.load(Relaxed) && !self.is_of_parent()
    }
    /// From now on somebody else may write to its pages.
    pub(crate) fn hand_on(&self) {
        self.is_handed_on.store(true, Relaxed);
    }
    /// Is a frame that nobody had since the system gave it known to be zero? Not in the child of a fork: what another thread
    /// of the parent did to it meanwhile, the child may have and the state that it copied may not say.
    pub(crate) fn is_zeroed(&self) -> bool {
        self.is_zeroed && !self.is_handed_on.load(Relaxed) && self.opened_in == process::generation()
    }

    /// In the child of a fork, once it has read what was used: from now on it shares its notes with its own children alone. An
    /// attacker in it could else clear notes that its parent's later children read, and these would hand out pages that are owned.
    /// If the system has no memory for others, it has none, and its children look at everything.
    pub(crate) fn keep_own_notes(&self) {
        // SAFETY: this process has this thread alone; and if it fails nobody touches the notes any more, as the zone is told.
        let parted = self.used.as_ref().map(|used| unsafe { used.part_from_parent() });
        if let Some(Err(_)) = parted {
            self.inner().buddy.forget_use();
        }
    }

    /// Are all of these words those of pages of this arena?
    #[inline(always)]
    pub(crate) fn has_pages(&self, words: &[usize]) -> bool {
        are_pages(words, self.base, self.frames)
    }

    /// Adds the numbers of the pages with these words to `batch`, which has room for them, if all are pages of this arena.
    #[inline(always)]
    pub(crate) fn push_pages(&self, words: &[usize], batch: &mut Batch) -> bool {
        batch.push_pages(words, self.base, self.frames, self.first)
    }

    // ── links ──────────────────────────────────────────────────────────────────────────────────────────────────

    /// A frame's link, where a list keeps the number of its next one.
    #[inline]
    pub(crate) fn link(&self, pfn: u32) -> &AtomicU32 {
        debug_assert!(self.has_pfn(pfn));
        // SAFETY: a frame of this arena has a link, for as long as the arena lives.
        unsafe { AtomicU32::from_ptr(self.links.wrapping_add(pfn as usize)) }
    }

    /// Links each of these frames to the next.
    #[inline]
    pub(crate) fn link_all(&self, pfns: &[u32]) {
        // In a register: a store to a link might change anything.
        let links = self.links;
        let link = |from: u32, to: u32| {
            debug_assert!(self.has_pfn(from));
            // SAFETY: as in `link`.
            unsafe { AtomicU32::from_ptr(links.wrapping_add(from as usize)) }.store(to, Relaxed);
        };
        // Eight at a time, since a store is little more than what a loop takes to come around.
        let Some((&last, from)) = pfns.split_last() else { return };
        let (groups, rest) = from.as_chunks::<8>();
        for (i, group) in groups.iter().enumerate() {
            (0..7).for_each(|at| link(group[at], group[at + 1]));
            link(group[7], pfns[8 * i + 8]);
        }
        for (&from, &to) in rest.iter().zip(rest.iter().skip(1).chain([&last])) {
            link(from, to);
        }
    }
}
