//! Per-CPU lists: stacks of frame numbers that a CPU takes from and returns to without a lock.
//!
//! They stand between the caller and the zone. A CPU has one list for each mobility. What is in a list is one 64-bit
//! word and an array: the word counts the frames on the stack (16 bits) and all pages ever popped (48 bits), so that
//! one store commits both and a restarted section counts nothing twice. Pages pushed follow from top + popped +
//! drained - refilled.
//!
//! Two backends work on the same memory:
//! - **rseq**: restartable sequences. A section reads the CPU's number, copies frame numbers and commits with one
//!   plain store; if it is preempted, migrated or interrupted by a signal before that store, the kernel sends it
//!   back to its start. See [`crate::rseq`].
//! - **portable**: the list's `held` word as a try-lock. Readable, complete, and what the models check.
//!
//! # Invariants
//! - L1 `items[..top]` are frames that nobody else has. Above `top` is garbage.
//! - L2 Under rseq, only sections on the list's own CPU touch a list whose `held` is 0. Whoever set `held` and then
//!   restarted that CPU's sections is alone with it. Where the system refuses to restart them, nobody but those sections
//!   touches the list. Its limit may change at any time: a section keeps to the one that it read, for which there are slots.
//! - L3 Portable: whoever set `held` is alone with the list.
//!
//! A list that is held, full or empty sends its caller to the zone; nobody waits for a list but whoever drains it.
//!
//! Behind the lists of the CPUs stand the [depots](depot), lists of no CPU, through which whole loads go from one CPU to another.
pub use crate::backend::Backend;
use crate::batch::PAD;
pub use crate::counters::{BulkCall, CpuStats};
use crate::{Batch, Frames, Mapping, rseq};
use core::mem::{MaybeUninit, offset_of, size_of};
use core::ops::Range;
use core::sync::atomic::AtomicU8;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
pub use depot::DEPOTS;
use held::Held;
use pagemill_core::atomic::{AtomicU32, AtomicU64};
use pagemill_core::{BoundBlock, CpuId, Error, Invalid, ListPolicy, Lock, Mobility, step};
pub use table::CpuTable;

mod depot;
mod drain;
mod held;
mod table;
#[cfg(all(test, not(any(loom, miri))))]
mod tests;

/// Slots of a list: what is left of 8 KiB after the header, so that one frame of metadata serves two lists.
#[cfg(not(loom))]
const SLOTS: usize = (LIST_BYTES - HEADER_BYTES) / 4;
#[cfg(loom)]
const SLOTS: usize = 24;
const LIST_BYTES: usize = 8192;
const HEADER_BYTES: usize = 64;

/// What the top of the word means.
const TOP: u64 = 0xffff;
const POPPED_SHIFT: u32 = 16;

/// One list. Zeroed memory is an empty list that takes nothing: `set_policy` opens it.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct List {
    /// top | popped << 16.
    word: AtomicU64,
    /// Frames that the list may hold; a copy of the policy's for the sections.
    limit: AtomicU32,
    /// Not 0: somebody else is at it.
    held: AtomicU32,
    /// Held by the one drain that may wait for the list.
    draining: Lock,
    policy: AtomicU64,
    /// Frames that came from the zone or a depot, and that a drain took.
    refilled: AtomicU64,
    drained: AtomicU64,
    /// Frames that its own CPU popped for the zone or a depot, not for a caller; of a depot, those that lists got.
    overflowed: AtomicU64,
    /// The pageblock that refills draw from.
    pub bound: BoundBlock,
    /// In a cache line of its own, so that sections copy whole vectors inside of lines.
    items: Items,
}

#[cfg(not(loom))]
const _: () = {
    assert!(size_of::<List>() == LIST_BYTES && offset_of!(List, word) == 0);
    assert!(offset_of!(List, limit) == rseq::LIMIT && offset_of!(List, held) == rseq::HELD);
    assert!(size_of::<List>() == 1 << rseq::LIST_SHIFT && size_of::<CpuLists>() == 1 << rseq::CPU_SHIFT);
    assert!(offset_of!(CpuLists, stats) == Mobility::COUNT << rseq::LIST_SHIFT);
};

#[repr(align(64))]
#[derive(Debug)]
struct Items([AtomicU32; SLOTS]);

/// Where the items begin, for the sections.
pub(crate) const ITEMS: usize = offset_of!(List, items);

impl List {
    /// The longest list: sections copy in steps of 16 numbers and may write garbage that far above the top.
    pub const LIMIT_MAX: u32 = (SLOTS - PAD) as u32;

    /// An empty, open list, for models.
    #[cfg(loom)]
    pub fn for_model(limit: u32) -> Self {
        let list = Self {
            word: AtomicU64::new(0),
            limit: AtomicU32::new(0),
            held: AtomicU32::new(0),
            draining: Lock::new(),
            policy: AtomicU64::new(0),
            refilled: AtomicU64::new(0),
            drained: AtomicU64::new(0),
            overflowed: AtomicU64::new(0),
            bound: BoundBlock::new(),
            items: Items(core::array::from_fn(|_| AtomicU32::new(0))),
        };
        list.set_policy(ListPolicy { limit, ..ListPolicy::START });
        list.open();
        list
    }

    /// Frames on the list just now.
    pub fn len(&self) -> usize {
        (self.word.load(Relaxed) & TOP) as usize
    }
    /// Is it empty just now?
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Pages that callers took from it so far, modulo 2^48.
    pub fn popped(&self) -> u64 {
        let popped = self.word.load(Relaxed) >> POPPED_SHIFT;
        popped.wrapping_sub(self.overflowed.load(Relaxed)) & (u64::MAX >> POPPED_SHIFT)
    }
    /// Frames that came to it from the zone or a depot so far.
    pub fn refilled(&self) -> u64 {
        self.refilled.load(Relaxed)
    }
    /// Frames that went from it to the zone or a depot so far.
    pub fn drained(&self) -> u64 {
        self.drained.load(Relaxed) + self.overflowed.load(Relaxed)
    }
    /// Pages that callers returned to it so far, modulo 2^48.
    pub fn pushed(&self) -> u64 {
        let word = self.word.load(Relaxed);
        let pushed = (word & TOP)
            .wrapping_add(word >> POPPED_SHIFT)
            .wrapping_add(self.drained.load(Relaxed))
            .wrapping_sub(self.refilled.load(Relaxed));
        pushed & (u64::MAX >> POPPED_SHIFT)
    }
    /// How much it moves and may hold.
    pub fn policy(&self) -> ListPolicy {
        ListPolicy::from_word(self.policy.load(Relaxed))
    }
    /// Sets how much it moves and may hold, the limit up to [`LIMIT_MAX`](Self::LIMIT_MAX).
    pub fn set_policy(&self, policy: ListPolicy) {
        let policy = ListPolicy { limit: policy.limit.min(Self::LIMIT_MAX), ..policy };
        self.policy.store(policy.as_word(), Relaxed);
        // Whoever shuts it meanwhile stays right.
        let _ = self.limit.fetch_update(Relaxed, Relaxed, |limit| (limit != 0).then_some(policy.limit));
    }
    /// It takes nothing from now on, until it is [opened](Self::open) again.
    pub fn shut(&self) {
        self.limit.store(0, Relaxed);
    }
    /// It takes as many as its policy says.
    pub fn open(&self) {
        self.limit.store(self.policy().limit, Relaxed);
    }
    /// Notes that `n` of the frames that were pushed came from the zone.
    pub fn note_refilled(&self, n: usize) {
        self.refilled.fetch_add(n as u64, Relaxed);
    }
    /// Notes that `n` frames that were popped go to the zone.
    pub fn note_overflowed(&self, n: usize) {
        self.overflowed.fetch_add(n as u64, Relaxed);
    }
    /// The frames on it, at rest, or in the child of a fork.
    pub fn frames(&self) -> impl Iterator<Item = u32> {
        // Acquire pairs with the Release in `Held::push_n`.
        let len = (self.word.load(Acquire) & TOP) as usize;
        self.items.0[..len].iter().map(|item| item.load(Relaxed))
    }

    /// Tries to be alone with the list: the portable backend's section, and the first half of a drain.
    #[inline]
    fn try_hold(&self) -> Option<Held<'_>> {
        // Acquire pairs with the Release in `Held::drop`: the stack as the last holder left it. A release that pairs
        // with the sections' read of `held` is not needed here: under rseq the caller restarts them first.
        let is_mine = self.held.compare_exchange(0, 1, Acquire, Relaxed).is_ok();
        if cfg!(pagemill_canary) {
            // The canary: a bug that stress and the model must find. It goes on although somebody is at it.
            return Some(Held { list: self });
        }
        // Not `then_some`: a `Held` that is made only to be dropped lets go of somebody else's list.
        if is_mine { Some(Held { list: self }) } else { None }
    }

    /// Portable: pops up to `want` into `batch`, which is empty. `None`: somebody is at the list.
    #[inline]
    pub fn try_pop_n(&self, want: usize, batch: &mut Batch) -> Option<()> {
        self.try_pop_at_least(want, 0, batch)
    }

    #[inline]
    fn try_pop_at_least(&self, want: usize, least: usize, batch: &mut Batch) -> Option<()> {
        let held = self.try_hold()?;
        if self.len() >= least {
            held.pop_n(want, batch, 1);
        }
        Some(())
    }

    /// Portable: pushes all of `pfns`, or none if they do not fit or somebody is at the list.
    #[inline]
    pub fn try_push_n(&self, pfns: &[u32]) -> bool {
        self.try_hold().is_some_and(|held| held.push_n(pfns))
    }
}

#[cfg(loom)]
impl List {
    /// What a drain does once it is alone with the list. `None`: somebody is at it.
    pub fn drain_for_model(&self, mut give: impl FnMut(&[u32])) -> Option<usize> {
        Some(self.try_hold()?.drain(&mut give))
    }
}

/// One CPU's lists.
#[repr(C)]
#[derive(Debug)]
pub struct CpuLists {
    /// One for each mobility.
    pub lists: [List; Mobility::COUNT],
    /// What it counts.
    pub stats: CpuStats,
    /// What this CPU collects frames in that leave a list for the zone.
    pub table: CpuTable,
    _pad: [u64; PAD_WORDS],
}

/// Words of padding, for a CPU's lists to begin where a section looks for them.
#[cfg(not(loom))]
const PAD_WORDS: usize = (LIST_BYTES - size_of::<CpuStats>() - size_of::<CpuTable>()) / 8;
#[cfg(loom)]
const PAD_WORDS: usize = 0;

/// The lists of all CPUs.
///
/// ```
/// use pagemill_core::Mobility;
/// use pagemill_sys::{Backend, Batch, PerCpu};
/// let (lists, list) = (PerCpu::new(Backend::Portable, 1, || 0).unwrap(), Mobility::Unmovable);
/// assert!(lists.push(list, 7) && lists.push(list, 8));
/// let mut batch = Batch::new();
/// lists.pop_n(list, 64, &mut batch);
/// assert_eq!(batch.as_slice(), [7, 8]);
/// ```
#[derive(Debug)]
pub struct PerCpu {
    base: *const CpuLists,
    cpus: u32,
    backend: Backend,
    /// From the thread pointer to the thread's rseq area.
    rseq_offset: isize,
    /// The portable backend's CPU number; it is the system's, which the thread's rseq area has as well.
    cpu_of: fn() -> usize,
    is_in_area: bool,
    _map: Mapping,
}

// SAFETY: `base` points into `_map`, which lives as long as this does; everything there is atomic, or touched by the
// sections as L2 says.
unsafe impl Send for PerCpu {}
// SAFETY: as for Send.
unsafe impl Sync for PerCpu {}

#[cold]
#[inline(never)]
fn no_such_cpu(cpu: CpuId, cpus: u32) -> ! {
    panic!("CPU {} has no lists: there are {cpus}", cpu.get())
}

/// No frame.
const NONE: u32 = u32::MAX;

impl PerCpu {
    /// The most CPUs that lists are made for: what Linux can be built for.
    pub const CPUS_MAX: usize = 8192;

    /// Empty lists for CPUs 0 to `cpus` - 1. `cpu_of` tells the portable backend where it runs; what it says modulo
    /// `cpus` is taken.
    ///
    /// # Errors
    /// No CPU or too many; rseq where the self-test fails; no memory.
    pub fn new(backend: Backend, cpus: usize, cpu_of: fn() -> usize) -> Result<Self, Error> {
        let lists = Self::shut(backend, cpus, cpu_of)?;
        lists.lists().for_each(|list| {
            list.set_policy(ListPolicy::START);
            list.open();
        });
        Ok(lists)
    }

    fn shut(backend: Backend, cpus: usize, cpu_of: fn() -> usize) -> Result<Self, Error> {
        if !(1..=Self::CPUS_MAX).contains(&cpus) {
            return Err(Invalid::Cpus { cpus, max: Self::CPUS_MAX }.into());
        }
        if backend == Backend::Rseq {
            rseq::self_test().map_err(|why| Invalid::Backend { why })?;
        }
        let bytes = (cpus + DEPOTS) * size_of::<CpuLists>();
        let map = Mapping::reserve(bytes, LIST_BYTES).map_err(|errno| Invalid::System {
            what: "the per-CPU lists",
            bytes,
            errno: errno.0,
        })?;
        let rseq_offset = rseq::area_offset();
        // Were it taken for another function than it is, that would be asked: slower, and no less right.
        let is_in_area = rseq_offset != 0 && core::ptr::fn_addr_eq(cpu_of, crate::current_cpu as fn() -> usize);
        Ok(Self { base: map.as_ptr(), cpus: cpus as u32, backend, rseq_offset, cpu_of, is_in_area, _map: map })
    }

    /// Lists for the same CPUs, empty; errors are the same.
    pub fn another(&self) -> Result<Self, Error> {
        Self::new(self.backend, self.cpus(), self.cpu_of)
    }

    /// The same, which take nothing, and no memory, until each is given a policy and [opened](List::open), and are so again
    /// in the child of a fork.
    pub fn another_shut(&self) -> Result<Self, Error> {
        let lists = Self::shut(self.backend, self.cpus(), self.cpu_of)?;
        let (map, what) = (&lists._map, "lists that no child sees");
        map.wipe_on_fork().map_err(|errno| Invalid::System { what, bytes: map.bytes(), errno: errno.0 })?;
        Ok(lists)
    }

    /// The backend in force.
    pub fn backend(&self) -> Backend {
        self.backend
    }
    /// How many CPUs have lists.
    pub fn cpus(&self) -> usize {
        self.cpus as usize
    }
    /// One CPU's lists and counters.
    ///
    /// # Panics
    /// If there is no such CPU.
    #[inline]
    pub fn cpu(&self, cpu: CpuId) -> &CpuLists {
        if cpu.get() >= self.cpus() {
            no_such_cpu(cpu, self.cpus);
        }
        self.place(cpu.get())
    }
    /// The lists at a place: those of a CPU, or, behind all CPUs', a depot's.
    #[inline(always)]
    fn place(&self, at: usize) -> &CpuLists {
        debug_assert!(at < self.cpus() + DEPOTS);
        // SAFETY: in bounds of the mapping, aligned by its layout, and zeroed memory is a valid CpuLists.
        unsafe { &*self.base.add(at) }
    }
    /// Every list, those of the depots too.
    pub fn lists(&self) -> impl Iterator<Item = &List> {
        (0..self.cpus() + DEPOTS).flat_map(|at| &self.place(at).lists)
    }
    /// Where this thread runs, or ran a moment ago.
    #[inline]
    pub fn here(&self) -> CpuId {
        let cpu = match self.backend {
            Backend::Portable if !self.is_in_area => (self.cpu_of)() as u32,
            _ => rseq::cpu(self.rseq_offset),
        };
        CpuId::new(if cpu < self.cpus { cpu } else { cpu % self.cpus })
    }
    /// This CPU's list of that mobility.
    #[inline]
    pub fn list_here(&self, mobility: Mobility) -> &List {
        // SAFETY: as in `cpu`; `here` names a CPU that has lists.
        unsafe { &(*self.base.add(self.here().get())).lists[mobility.index()] }
    }

    /// Where a section finds CPU 0's list of that mobility.
    #[inline]
    fn sections(&self, mobility: Mobility) -> rseq::Lists {
        rseq::Lists {
            // SAFETY: stays inside the first CPU's lists.
            base: unsafe { self.base.cast::<List>().add(mobility.index()) }.cast_mut().cast(),
            cpus: self.cpus,
            offset: self.rseq_offset,
        }
    }

    /// Takes one frame. `None`: the list is empty or held.
    #[inline]
    pub fn pop(&self, mobility: Mobility) -> Option<u32> {
        step!("PerCpu::pop");
        let pfn = match self.backend {
            // SAFETY: the self-test passed, and `sections` names lists of as many CPUs as it says.
            Backend::Rseq => unsafe { rseq::pop(self.sections(mobility)) },
            Backend::Portable => self.pop_portable(mobility),
        };
        if pfn == NONE { None } else { Some(pfn) }
    }

    #[inline(never)]
    fn pop_portable(&self, mobility: Mobility) -> u32 {
        self.list_here(mobility).try_hold().map_or(NONE, |held| held.pop())
    }

    /// Takes up to `want` frames, at most a batch's worth, into `batch`, which must be empty. They come in the order
    /// in which they were pushed.
    #[inline]
    pub fn pop_n(&self, mobility: Mobility, want: usize, batch: &mut Batch) {
        self.pop_at_least(mobility, want, 0, batch);
    }

    /// The same, all `want` or none. False: the list has fewer, or is held.
    #[inline(always)]
    pub fn pop_all(&self, mobility: Mobility, want: usize, batch: &mut Batch) -> bool {
        debug_assert!((1..=Batch::CAPACITY).contains(&want));
        self.pop_at_least(mobility, want, want, batch);
        !batch.is_empty()
    }

    #[inline(always)]
    fn pop_at_least(&self, mobility: Mobility, want: usize, least: usize, batch: &mut Batch) {
        debug_assert!(batch.is_empty());
        let want = want.min(Batch::CAPACITY);
        match self.backend {
            // SAFETY: as in `pop`; the batch has room for `want` numbers and the padding, and the section wrote as
            // many as it says.
            Backend::Rseq => unsafe {
                let n = rseq::pop_n(self.sections(mobility), batch.as_mut_ptr(), want, least);
                batch.set_len(n);
            },
            Backend::Portable => {
                self.list_here(mobility).try_pop_at_least(want, least, batch);
            }
        }
    }

    /// Returns one frame. False: the list is full or held, and the caller still has it.
    #[inline]
    pub fn push(&self, mobility: Mobility, pfn: u32) -> bool {
        step!("PerCpu::push");
        match self.backend {
            // SAFETY: as in `pop`.
            Backend::Rseq => unsafe { rseq::push(self.sections(mobility), pfn) },
            Backend::Portable => self.push_portable(mobility, pfn),
        }
    }

    #[inline(never)]
    fn push_portable(&self, mobility: Mobility, pfn: u32) -> bool {
        self.list_here(mobility).try_hold().is_some_and(|held| held.push(pfn))
    }

    /// Returns the frames in `range`, at most a batch's worth: all, or none if they do not fit or the list is held.
    ///
    /// # Panics
    /// If there are not so many.
    #[inline]
    pub fn push_n<const ROOM: usize>(&self, mobility: Mobility, frames: &Frames<ROOM>, range: Range<usize>) -> bool {
        step!("PerCpu::push_n");
        debug_assert!((1..=Batch::CAPACITY).contains(&range.len()));
        match self.backend {
            // SAFETY: as in `pop`; the numbers are initialised, with readable padding behind them.
            Backend::Rseq => unsafe { rseq::push_n(self.sections(mobility), frames.as_ptr_at(&range), range.len()) },
            Backend::Portable => self.list_here(mobility).try_push_n(&frames.as_slice()[range]),
        }
    }

    /// Takes as many frames as there are words, all or none, at most a batch's worth, and fills the words with the addresses of their
    /// pages: number 0 would be at `zero`. In the order in which they were pushed. False: the list has fewer or is held, or not all
    /// of these frames are [`SAFE`](pagemill_core::FrameState::SAFE), or there are no words or more than a batch has; what stands in
    /// the words means nothing then.
    ///
    /// # Safety
    /// Each frame on the lists has a state, the atomic byte at its number in `states`.
    #[inline(always)]
    pub unsafe fn pop_words(
        &self,
        mobility: Mobility,
        words: &mut [MaybeUninit<usize>],
        zero: usize,
        states: *const u8,
    ) -> bool {
        match self.backend {
            _ if !(1..=Batch::CAPACITY).contains(&words.len()) => false,
            // SAFETY: as in `pop`; the section writes the words, of which there are as many as it takes, and no more.
            Backend::Rseq => unsafe {
                rseq::pop_words(self.sections(mobility), words.as_mut_ptr().cast(), words.len(), zero, states)
            },
            Backend::Portable => self.list_here(mobility).try_hold().is_some_and(|held| {
                // SAFETY: as the caller promises.
                held.pop_words(words, zero, |pfn| unsafe {
                    AtomicU8::from_ptr(states.cast_mut().wrapping_add(pfn as usize)).load(Relaxed)
                })
            }),
        }
    }

    /// Returns the frames of the pages with these addresses: all, or none if they do not fit or the list is held, or if there are no
    /// words or more than a batch has. They are pages of the zone whose number 0 would be at `zero`.
    #[inline(always)]
    pub fn push_words(&self, mobility: Mobility, words: &[usize], zero: usize) -> bool {
        step!("PerCpu::push_words");
        match self.backend {
            _ if !(1..=Batch::CAPACITY).contains(&words.len()) => false,
            // SAFETY: as in `pop`; the section reads the words, of which there are as many as it takes, and no more.
            Backend::Rseq => unsafe { rseq::push_words(self.sections(mobility), words.as_ptr(), words.len(), zero) },
            Backend::Portable => self.list_here(mobility).try_hold().is_some_and(|held| held.push_words(words, zero)),
        }
    }

    /// Counts a bulk call of `pages` pages on this CPU.
    #[inline(always)]
    pub fn count_bulk(&self, call: BulkCall, pages: usize) {
        let Some(log2) = pages.checked_ilog2() else { return };
        match self.backend {
            // SAFETY: as in `pop`; the offset is that of a counter in CpuStats.
            Backend::Rseq => unsafe {
                let histogram = match call {
                    BulkCall::Alloc => offset_of!(CpuStats, bulk_alloc),
                    BulkCall::Free => offset_of!(CpuStats, bulk_free),
                };
                let lists = self.sections(Mobility::Unmovable);
                rseq::count(lists, offset_of!(CpuLists, stats) + histogram + log2.min(31) as usize * 8);
            },
            Backend::Portable => self.count_bulk_portable(call, log2.min(31) as usize),
        }
    }

    #[inline(never)]
    fn count_bulk_portable(&self, call: BulkCall, log2: usize) {
        let stats = &self.cpu(self.here()).stats;
        let histogram = if call == BulkCall::Alloc { &stats.bulk_alloc } else { &stats.bulk_free };
        histogram[log2].fetch_add(1, Relaxed);
    }

    /// Holds all lists and depots, whoever did before, so that every caller goes the slow way: for tests.
    pub fn hold_all(&self) {
        self.lists().for_each(|list| {
            list.held.store(1, Relaxed);
            list.draining.free_after_fork();
        });
    }
    /// In the child of a fork: forgets what is on the lists, which the zone takes up, and who held them.
    pub fn empty_after_fork(&self) {
        for list in self.lists() {
            let top = list.word.fetch_and(!TOP, Relaxed) & TOP;
            list.drained.fetch_add(top, Relaxed);
            list.held.store(0, Release);
            list.draining.free_after_fork();
        }
    }
}
