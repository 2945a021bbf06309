//! The fields of a zone, the addresses of its frames, how it begins and how it ends.
//!
//! # Memory
//! All of it is reserved at once, and the system commits it at the first access: the pages; the buddy's bits and entries (1.1 bits a frame); the
//! states (1 byte a frame); the links of lists (4 bytes a frame, which only lists touch). A zone above a GiB also has notes of its
//! used parts (a bit for 128 MiB), which it shares with the child of a fork.
//!
//! # Life
//! The header, [`Zone`], is never freed, because a thread may look at any time at the zone that it met last. It is reused: it has a
//! [`Body`] while it stands for memory, and gets another body when it stands for other memory. A zone ends when its allocator has
//! no handle and its last page is back; `registry.rs` says how, and on which thread.
//!
//! # Invariants
//! - A1 `span` is one word, so that a reader sees the range of one zone and never a mixture of two. So is `numbers`.
//! - A2 Only code that owns a page or frame of the zone, or holds a handle of its allocator, or holds the registry, touches the body,
//!   so the body stays valid. All other code learns from the two words that its address or number is not of this zone, and touches
//!   nothing else. The words are never wrong: a zone begins only after the zone that lay there before has ended.
use super::pins::Pins;
use crate::build_error::BuildError;
use crate::memory::Memory;
use crate::misuse::{misuse, report};
use crate::process::Stamp;
use crate::shared::{Lack, Shared};
use core::cell::UnsafeCell;
use core::fmt;
use core::mem::{ManuallyDrop, MaybeUninit};
use core::ops::{Deref, Range};
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use pagemill_core::atomic::AtomicU64;
use pagemill_core::{
    Buddy, BuddyMetadata, CpuId, Given, Invalid, ListPolicy, Misuse, MisuseKind, Mobility, NodeId, PAGE_SHIFT,
    PAGE_SIZE, Pfn, Watermarks, ZoneKind, use_words_for,
};
use pagemill_os::lists::DEPOTS;
use pagemill_os::{Batch, List, Mapping, PerCpu, Sections, are_pages};
use std::sync::Arc;

/// See the [module](self).
pub(crate) struct Zone {
    /// The address, a multiple of 2 MiB below 2^48, times 2^11, and the number of frames; 0 while it stands for nothing.
    span: AtomicU64,
    /// The first frame's number times 2^32, and the number of frames; 0 while it stands for nothing.
    numbers: AtomicU64,
    /// The zone below in one of the registry's stacks.
    next: AtomicPtr<Zone>,
    body: UnsafeCell<MaybeUninit<Body>>,
}

/// The fields of a zone while it stands for memory.
#[derive(Debug)]
pub(crate) struct Body {
    /// The CPU whose list asked a depot last, plus one; 0 for none: see [`passes_on`](Zone::passes_on).
    pub(super) last_to_ask: AtomicU32,
    pub(super) lists: ManuallyDrop<PerCpu>,
    pub(super) buddy: Buddy<'static>,
    pub(super) base: usize,
    pub(super) frames: u32,
    pub(super) first: Pfn,
    /// The address that frame number 0 would have if this zone's numbers began there. `states` and `links` begin there in the same
    /// way: a frame's number alone leads to its page, state and link, and the path of every page saves a subtraction.
    pub(super) zero: usize,
    /// The states, one byte a frame.
    pub(super) states: *mut u8,
    /// The links, one a frame.
    pub(super) links: *mut u32,
    /// The state that all zones of the allocator share.
    pub(super) shared: Arc<Shared>,
    /// The allocator's zone that was added before this one.
    pub(super) older: Option<&'static Zone>,
    /// Called with the zone when no handle is left and its last page is back: the registry ends it.
    pub(super) come_home: fn(&'static Zone),
    pub(super) node: NodeId,
    pub(super) kind: ZoneKind,
    pub(super) marks: Watermarks,
    /// The memory that it was made of.
    pub(super) described: Memory,
    /// How often it was put to use again after it was retired.
    pub(super) turn: AtomicU32,
    /// No handle of the allocator is left.
    pub(super) is_ownerless: AtomicBool,
    /// Calls that open or shut its lists right now. `leave` holds them back for ever.
    pub(super) opening: Sections,
    /// It hands out no page any more, and freed pages go to the system.
    pub(super) retired: AtomicBool,
    /// It fell below its low watermark, and has not risen above the high one.
    pub(super) is_low: AtomicBool,
    /// Low half: free frames that are kept for the request that claims them. High half: that claim's number.
    pub(super) claimed: AtomicU64,
    /// The most frames that a list may hold: a share of the zone, so that CPUs cannot hide much of a small zone.
    pub(super) limit_max: u32,
    /// Frames in quarantine: each was found free while it had an owner.
    pub(super) quarantined: AtomicU64,
    /// Blocks whose free was refused.
    pub(super) misused: AtomicU64,
    /// A frame that was never handed out is zero.
    pub(super) is_zeroed: bool,
    /// Another process may write to its pages at any time: [`Allocator::memfd`](crate::Allocator::memfd) handed out its file.
    pub(super) is_handed_on: AtomicBool,
    /// Its size was cut to the process's memory limit, and no other zone has that room.
    pub(super) is_within_limit: bool,
    /// Some memory went back to the system and is fresh again: a fresh frame may have been handed out before.
    pub(super) has_given_back: AtomicBool,
    pub(super) pins: Pins,
    /// The process that mapped it.
    pub(super) opened_in: Stamp,
    pub(super) memory: ManuallyDrop<Mapping>,
    pub(super) metadata: ManuallyDrop<Mapping>,
    /// Notes of the used parts of a large zone, shared with the child of a fork.
    pub(super) used: ManuallyDrop<Option<Mapping>>,
}

impl Deref for Zone {
    type Target = Body;
    #[inline]
    fn deref(&self) -> &Body {
        // SAFETY: the body is there, and nobody writes to it meanwhile (A2).
        unsafe { (*self.body.get()).assume_init_ref() }
    }
}

impl fmt::Debug for Zone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Zone").field("span", &self.span).finish_non_exhaustive()
    }
}

// SAFETY: the pointers lead into the arena's own mappings; who may touch which byte is told at each access.
unsafe impl Send for Zone {}
// SAFETY: as for Send.
unsafe impl Sync for Zone {}

/// A zone with more frames than this, a GiB, notes its used parts. The child of a fork looks at all of a smaller zone.
const SMALL: usize = 1 << 18;

/// Offsets of the parts of the metadata.
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

/// The parts that a zone is made of.
pub(crate) struct Parts {
    /// The mapped pages, and their description.
    pub(crate) memory: Mapping,
    pub(crate) described: Memory,
    pub(crate) lists: PerCpu,
    /// The number of the first frame.
    pub(crate) first: Pfn,
    pub(crate) shared: Arc<Shared>,
    pub(crate) older: Option<&'static Zone>,
    pub(crate) come_home: fn(&'static Zone),
}

impl Body {
    /// The body of a zone over `parts.memory`.
    pub(crate) fn new(parts: Parts) -> Result<Self, BuildError> {
        let Parts { memory, described, lists, first, shared, older, come_home } = parts;
        let frames = described.pages();
        let system = BuildError::system;
        let layout = Layout::of(frames);
        let metadata =
            Mapping::reserve(layout.bytes, PAGE_SIZE).map_err(system("an arena's metadata", layout.bytes))?;
        let note = use_words_for(frames as u32) * 4;
        let used =
            (frames > SMALL).then(|| Mapping::shared(note)).transpose().map_err(system("an arena's notes", note))?;
        let start = metadata.as_ptr::<u8>();
        let buddy = buddy_over(&metadata, &layout, used.as_ref(), first, frames as u32)?;
        // Nothing fails from here on: `end` unmaps the parts that are never dropped by themselves.
        let limit_max = ((frames / (8 * lists.cpus())) as u32).clamp(1, List::LIMIT_MAX);
        lists.lists().for_each(|list| list.set_policy(ListPolicy::start(limit_max)));
        let limit = depot_limit(frames, lists.cpus());
        lists.depots().for_each(|depot| depot.set_policy(ListPolicy { limit, ..ListPolicy::START }));
        Ok(Self {
            last_to_ask: AtomicU32::new(0),
            lists: ManuallyDrop::new(lists),
            buddy,
            base: memory.addr(),
            frames: frames as u32,
            first,
            zero: memory.addr().wrapping_sub(first.as_usize() * PAGE_SIZE),
            states: start.wrapping_add(layout.states).wrapping_sub(first.as_usize()),
            // `layout.links` is page-aligned.
            links: start.wrapping_add(layout.links).cast::<u32>().wrapping_sub(first.as_usize()),
            shared,
            older,
            come_home,
            node: described.node,
            kind: described.kind,
            marks: described.marks,
            is_zeroed: described.is_zeroed(),
            is_within_limit: described.is_within_limit,
            described,
            turn: AtomicU32::new(0),
            is_ownerless: AtomicBool::new(false),
            opening: Sections::new(),
            retired: AtomicBool::new(false),
            is_low: AtomicBool::new(false),
            claimed: AtomicU64::new(0),
            limit_max,
            quarantined: AtomicU64::new(0),
            misused: AtomicU64::new(0),
            is_handed_on: AtomicBool::new(false),
            has_given_back: AtomicBool::new(false),
            pins: Pins::default(),
            opened_in: Stamp::here(),
            memory: ManuallyDrop::new(memory),
            metadata: ManuallyDrop::new(metadata),
            used: ManuallyDrop::new(used),
        })
    }
}

/// The buddy over a zone's metadata and notes.
fn buddy_over(
    metadata: &Mapping,
    layout: &Layout,
    used: Option<&Mapping>,
    first: Pfn,
    frames: u32,
) -> Result<Buddy<'static>, Invalid> {
    let start = metadata.as_ptr::<u8>();
    // SAFETY: zeroed memory of that size and alignment is a valid slice of atomics. It is unmapped when the zone has ended, and
    // nobody uses its buddy any more.
    let (words, areas) = unsafe {
        (
            core::slice::from_raw_parts(start.cast::<AtomicU64>(), layout.buddy.words),
            core::slice::from_raw_parts(
                start.add(layout.areas).cast::<pagemill_core::atomic::AtomicU32>(),
                layout.buddy.areas,
            ),
        )
    };
    let buddy = Buddy::new(first, frames, words, areas)?.sleeping(pagemill_os::SLEEP);
    let Some(used) = used else { return Ok(buddy) };
    // SAFETY: as above; other processes of the family use it as this one does, by atomics.
    Ok(buddy.noting_use(unsafe { core::slice::from_raw_parts(used.as_ptr(), use_words_for(frames)) }))
}

/// Depots hold at most this part of a zone's pages for each mobility: half as much as lists.
const DEPOT_SHARE: usize = 16;

/// The most frames that one depot may hold. None with one CPU, which has no other CPU to hand pages to, or if that would be fewer
/// than two sections' worth.
fn depot_limit(pages: usize, cpus: usize) -> u32 {
    let limit = (pages / DEPOT_SHARE / DEPOTS).min(List::LIMIT_MAX as usize);
    if cpus == 1 || limit < 2 * ListPolicy::SECTION { 0 } else { limit as u32 }
}

impl Zone {
    /// A header that stands for no memory yet.
    pub(crate) const fn new() -> Self {
        Self {
            span: AtomicU64::new(0),
            numbers: AtomicU64::new(0),
            next: AtomicPtr::new(ptr::null_mut()),
            body: UnsafeCell::new(MaybeUninit::uninit()),
        }
    }

    /// Makes it stand for this memory.
    ///
    /// # Safety
    /// It stands for no memory, and only the thread that holds the registry knows of it.
    pub(crate) unsafe fn begin(&self, body: Body) {
        let (base, first, frames) = (body.base as u64, u64::from(body.first.as_u32()), u64::from(body.frames));
        // SAFETY: nobody touches the body (A2), and the caller is alone in beginning one.
        unsafe { (*self.body.get()).write(body) };
        // Release pairs with the Acquire in `contains`: the body is there.
        self.span.store(base << 11 | frames, Release);
        self.numbers.store(first << 32 | frames, Release);
    }

    /// Ends the zone and gives its memory back to the system. A signal handler may call this: what the zone has on the heap stays
    /// for [`bury`](Self::bury).
    ///
    /// # Safety
    /// Called once, when no page is out, no thread uses its lists or metadata, and the registry leads here no more.
    pub(crate) unsafe fn end(&self) {
        self.span.store(0, Relaxed);
        self.numbers.store(0, Relaxed);
        // SAFETY: nobody touches these from here on, as the caller promises; the body is there until it is buried.
        unsafe {
            let body = self.body.get().cast::<Body>();
            ManuallyDrop::drop(&mut (*body).lists);
            ManuallyDrop::drop(&mut (*body).memory);
            ManuallyDrop::drop(&mut (*body).metadata);
            ManuallyDrop::drop(&mut (*body).used);
        }
    }

    /// Frees what it had on the heap. After that it may [begin](Self::begin) again.
    ///
    /// # Safety
    /// Called once, after [`end`](Self::end); no other thread knows of it.
    pub(crate) unsafe fn bury(&self) {
        // SAFETY: nobody touches the body, as the caller promises (A2).
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
    pub(crate) fn has_pfn(&self, pfn: Pfn) -> bool {
        let numbers = self.numbers.load(Relaxed);
        pfn.since(Pfn::new((numbers >> 32) as u32)) < numbers as u32
    }

    pub(crate) fn base(&self) -> usize {
        self.base
    }
    /// The addresses of its pages.
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
    /// The address of a frame.
    #[inline]
    pub(crate) fn addr_of(&self, pfn: Pfn) -> usize {
        self.zero.wrapping_add(pfn.as_usize() << PAGE_SHIFT)
    }
    /// The address that frame number 0 would have: a frame's address is this and its number times the page size.
    #[inline]
    pub(crate) fn addr_of_pfn_zero(&self) -> usize {
        self.zero
    }
    /// The number of the frame at an address of this zone.
    #[inline]
    pub(crate) fn pfn_of(&self, addr: usize) -> Pfn {
        Pfn::new((addr.wrapping_sub(self.zero) >> PAGE_SHIFT) as u32)
    }

    /// Metadata that says whether a frame is free, in bits a frame (C10.3).
    pub(crate) fn metadata_bits_per_frame(&self) -> f64 {
        let frames = self.frames() as u32;
        BuddyMetadata::for_frames(frames).bits_per_frame(frames)
    }

    /// Whether this process inherited memory that it shares with its parent, whose pages these are.
    pub(crate) fn is_inherited(&self) -> bool {
        self.memory.is_shared() && self.opened_in.is_inherited()
    }

    /// Whether it began before this process was forked.
    pub(crate) fn was_forked(&self) -> bool {
        self.opened_in.is_inherited()
    }

    /// The mapping with the pages.
    pub(crate) fn memory(&self) -> &Mapping {
        &self.memory
    }

    /// Whether no other process, and no holder of its file, sees its pages.
    pub(crate) fn is_lone(&self) -> bool {
        !self.is_handed_on.load(Relaxed) && !self.is_inherited()
    }
    /// Notes that another process may write to its pages from now on.
    pub(crate) fn hand_on(&self) {
        self.is_handed_on.store(true, Relaxed);
    }
    /// Whether a frame that was never handed out is known to be zero. It is not in the child of a fork: another thread of the parent
    /// may have written to the frame, and the copied state need not say so.
    pub(crate) fn is_zeroed(&self) -> bool {
        self.is_zeroed && !self.is_handed_on.load(Relaxed) && !self.opened_in.is_inherited()
    }

    /// Whether all of these words are those of pages of this zone.
    #[inline(always)]
    pub(crate) fn has_pages(&self, words: &[usize]) -> bool {
        are_pages(words, self.base, self.frames)
    }

    /// Adds the numbers of the pages with these words to `batch`, which has room for them, if all are pages of this zone.
    #[inline(always)]
    pub(crate) fn push_pages(&self, words: &[usize], batch: &mut Batch) -> bool {
        batch.push_pages(words, self.base, self.frames, self.first.as_u32())
    }

    /// The mobility of the list that a freed page goes to.
    #[inline(always)]
    pub(crate) fn mobility_of(&self, pfn: Pfn) -> Mobility {
        if self.buddy.is_mixed() { self.buddy.mobility_of(pfn) } else { Mobility::Unmovable }
    }

    pub(crate) fn node(&self) -> NodeId {
        self.node
    }
    pub(crate) fn kind(&self) -> ZoneKind {
        self.kind
    }
    pub(crate) fn marks(&self) -> Watermarks {
        self.marks
    }
    #[inline]
    pub(crate) fn buddy(&self) -> &Buddy<'static> {
        &self.buddy
    }
    #[inline]
    pub(crate) fn lists(&self) -> &PerCpu {
        &self.lists
    }
    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }
    /// The allocator's zone that was added before this one.
    pub(crate) fn older(&self) -> Option<&'static Zone> {
        self.older
    }
    /// The memory that it was made of.
    pub(crate) fn described(&self) -> &Memory {
        &self.described
    }
    pub(crate) fn is_within_limit(&self) -> bool {
        self.is_within_limit
    }
    pub(crate) fn pins(&self) -> &Pins {
        &self.pins
    }
    /// The zone below in one of the registry's stacks.
    pub(crate) fn below(&self) -> &AtomicPtr<Zone> {
        &self.next
    }

    /// For tests that act in another thread's place.
    #[cfg(all(test, not(shuttle)))]
    pub(crate) fn opening(&self) -> &Sections {
        &self.opening
    }
    #[cfg(test)]
    pub(crate) fn claimed(&self) -> &AtomicU64 {
        &self.claimed
    }

    /// Frames in quarantine.
    pub(crate) fn quarantined(&self) -> u64 {
        self.quarantined.load(Relaxed)
    }
    /// Blocks whose free was refused.
    pub(crate) fn misused(&self) -> u64 {
        self.misused.load(Relaxed)
    }

    /// How often it was put to use again after it was retired.
    pub(crate) fn turn(&self) -> u32 {
        self.turn.load(Relaxed)
    }
    /// A retired zone hands nothing out any more, and its free memory goes to the system.
    pub(crate) fn set_retired(&self, is_retired: bool) {
        self.retired.store(is_retired, Relaxed);
    }
    /// Puts a retired zone to use again.
    pub(crate) fn take_up_again(&self) {
        self.turn.fetch_add(1, Relaxed);
        self.is_low.store(false, Relaxed);
        self.set_retired(false);
    }

    pub(crate) fn is_retired(&self) -> bool {
        self.retired.load(Relaxed)
    }

    /// Whether it has memory that serves a request with this lack.
    pub(crate) fn serves(&self, lack: Lack) -> bool {
        lack.nodes.contains(self.node) && self.kind.serves(lack.gfp()) && !self.is_retired()
    }

    /// The CPUs of its node; none if the node has no CPU.
    pub(crate) fn cpus(&self) -> Vec<usize> {
        let layout = &self.shared.layout;
        (0..self.lists.cpus()).filter(|&cpu| layout.node_of(CpuId::new(cpu as u32)) == self.node).collect()
    }

    /// Frames that are missing up to the high watermark.
    pub(crate) fn below_high(&self) -> usize {
        (self.marks.high as usize).saturating_sub(self.buddy.free_frames())
    }

    /// Counts and reports a misuse of this zone's memory.
    #[cold]
    pub(crate) fn refuse(&self, misuse: Misuse) -> Misuse {
        self.misused.fetch_add(1, Relaxed);
        report(misuse)
    }

    /// Reports frames that were free already when they were freed: each was freed twice, and is free once now. All are
    /// counted, and the last one is named.
    #[inline]
    pub(crate) fn note_doubles(&self, given: Given) -> Option<Misuse> {
        let pfn = given.last_double?;
        self.misused.fetch_add(given.doubles as u64 - 1, Relaxed);
        Some(self.refuse(misuse(MisuseKind::DoubleFree, self.addr_of(pfn))))
    }

    /// Frames that are neither in the buddy, nor in quarantine, nor on lists that cannot be drained. Exact only when all other lists
    /// are drained and no thread allocates or frees.
    pub(crate) fn out_at_rest(&self) -> usize {
        // The buddy first, by an acquiring load: a free may push other pages from a list to the buddy, and none may count twice.
        let here = self.buddy.free_frames() + self.quarantined.load(Relaxed) as usize;
        self.frames().saturating_sub(here + self.lists.left_alone())
    }

    /// The last handle is dropped: [`leave`](Self::leave) comes next, in the child of a fork too.
    pub(crate) fn abandon(&'static self) {
        self.is_ownerless.store(true, Relaxed);
        self.retired.store(true, Relaxed);
    }

    /// Called after the allocator's last handle is dropped. From then on freed pages go to the buddy and not to a list.
    ///
    /// Returns whether all pages are back. If they are not, the call that frees the last page learns that from the buddy, and the
    /// zone ends: on another thread, at any time. Do not touch `self` after `false`.
    pub(crate) fn leave(&self) -> bool {
        // Waits for calls that open lists. No call does so from now on.
        self.opening.hold_back();
        self.lists.lists().for_each(List::shut);
        self.drain_all();
        if self.out_at_rest() != 0 {
            // Some pages are not back. A thread may have put one of them on a list just before the list was shut: drain again,
            // also lists that look empty. A thread that reaches a list after this drain sees that the list is shut.
            for cpu in 0..self.lists.cpus() {
                self.drain_lists(CpuId::new(cpu as u32), |_| true);
            }
            self.drain_depots();
        }
        let quarantined = self.quarantined.load(Relaxed) as usize;
        // Frames on lists that cannot be drained. If pages are out these frames do not count and the zone stays: a free may push
        // others of its list to the buddy, where they would count once more.
        let left = if self.out_at_rest() == 0 { self.frames() - self.buddy.free_frames() - quarantined } else { 0 };
        self.buddy.close(quarantined + left)
    }
}
