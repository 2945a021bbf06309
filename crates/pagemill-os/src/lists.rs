//! Per-CPU lists: stacks of frame numbers that a CPU takes from and returns to without a lock.
//!
//! They stand between the caller and the zone. A CPU has one list for each mobility. A list is a 64-bit word and an array: the
//! word counts the frames on the stack (16 bits) and all pages ever popped (48 bits), so one store commits both, and a
//! restarted section counts nothing twice. Pages pushed follow from top + popped + drained - refilled.
//!
//! Two backends work on the same memory:
//! - **rseq**: restartable sequences. A section reads the CPU's number, copies frame numbers and commits with one
//!   plain store; if it is preempted, migrated or interrupted by a signal before that store, the kernel sends it
//!   back to its start. See [`crate::rseq`].
//! - **portable**: the list's `held` word as a try-lock. It is readable and complete, and the model checkers test it.
//!
//! # Invariants
//! - L1 `items[..top]` are frames that the list owns. Above `top` is garbage.
//! - L2 Under rseq, only sections on the list's own CPU touch a list whose `held` is 0. A thread that set `held` and then
//!   restarted that CPU's sections has the list to itself. If the system refuses to restart them, only those sections touch the
//!   list. The limit may change at any time: a section uses the value that it read, and there are slots for every value.
//! - L3 Portable: the thread that set `held` has the list to itself.
//!
//! A caller that finds its list held, full or empty goes to the zone; only a drain waits for a list.
//!
//! Behind the lists of the CPUs stand the [depots](depot): lists that belong to no CPU, through which whole loads go from one
//! CPU to another.
pub use crate::backend::{Backend, BackendName};
pub use crate::counters::{BulkCall, CpuStats};
use crate::{Batch, Frames, Mapping, rseq};
use core::mem::{MaybeUninit, offset_of, size_of};
use core::ops::Range;
use core::sync::atomic::AtomicU8;
use core::sync::atomic::Ordering::{Relaxed, Release};
pub use error::ListsError;
pub use list::List;
use list::{LIST_BYTES, NONE, TOP};
use pagemill_core::{CpuId, ListPolicy, Mobility, step};
pub use table::CpuTable;

mod depot;
mod drain;
mod error;
pub(crate) mod list;
mod table;
#[cfg(all(test, not(any(loom, miri))))]
mod tests;

/// The number of depots for each mobility: while one is held, the other may be free.
pub const DEPOTS: usize = 2;

/// One CPU's lists.
#[repr(C)]
#[derive(Debug)]
pub struct CpuLists {
    /// One for each mobility.
    pub lists: [List; Mobility::COUNT],
    /// Its counters.
    pub stats: CpuStats,
    /// The table in which this CPU collects frames that leave a list for the zone.
    pub table: CpuTable,
    _pad: [u64; PAD_WORDS],
}

#[cfg(not(loom))]
const _: () = {
    assert!(list::LIMIT == rseq::LIMIT && list::HELD == rseq::HELD);
    assert!(size_of::<List>() == 1 << rseq::LIST_SHIFT && size_of::<CpuLists>() == 1 << rseq::CPU_SHIFT);
    assert!(offset_of!(CpuLists, stats) == Mobility::COUNT << rseq::LIST_SHIFT);
};

/// Words of padding, so that each CPU's lists begin where the sections expect them.
#[cfg(not(loom))]
const PAD_WORDS: usize = (LIST_BYTES - size_of::<CpuStats>() - size_of::<CpuTable>()) / 8;
#[cfg(loom)]
const PAD_WORDS: usize = 0;

/// The lists of all CPUs.
///
/// ```
/// use pagemill_core::Mobility;
/// use pagemill_os::{Backend, Batch, PerCpu};
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
    /// The portable backend's source of the CPU number.
    cpu_of: fn() -> usize,
    is_in_area: bool,
    _map: Mapping,
}

// SAFETY: `base` points into `_map`, which lives as long as this does; everything there is atomic, or accessed by sections as
// L2 says.
unsafe impl Send for PerCpu {}
// SAFETY: as for Send.
unsafe impl Sync for PerCpu {}

#[cold]
#[inline(never)]
fn no_such_cpu(cpu: CpuId, cpus: u32) -> ! {
    panic!("CPU {} has no lists: there are lists for {cpus} CPUs", cpu.get())
}

impl PerCpu {
    /// The most CPUs that there can be lists for: Linux's own maximum.
    pub const CPUS_MAX: usize = 8192;

    /// Empty lists for CPUs 0 to `cpus` - 1. `cpu_of` tells the portable backend the CPU that it runs on; its result is used
    /// modulo `cpus`.
    ///
    /// # Errors
    /// No CPU or too many; rseq where the self-test fails; no memory.
    pub fn new(backend: Backend, cpus: usize, cpu_of: fn() -> usize) -> Result<Self, ListsError> {
        let lists = Self::shut(backend, cpus, cpu_of)?;
        lists.lists().for_each(|list| {
            list.set_policy(ListPolicy::START);
            list.open();
        });
        Ok(lists)
    }

    fn shut(backend: Backend, cpus: usize, cpu_of: fn() -> usize) -> Result<Self, ListsError> {
        if !(1..=Self::CPUS_MAX).contains(&cpus) {
            return Err(ListsError::Cpus { cpus, max: Self::CPUS_MAX });
        }
        if backend == Backend::Rseq {
            rseq::self_test().map_err(|why| ListsError::Backend { why })?;
        }
        let bytes = (cpus + DEPOTS) * size_of::<CpuLists>();
        let refused = |errno| ListsError::System { what: "the per-CPU lists", bytes, errno };
        let map = Mapping::reserve(bytes, LIST_BYTES).map_err(refused)?;
        let rseq_offset = rseq::area_offset();
        // If the comparison fails for the same function, `cpu_of` is called: slower, but as correct.
        let is_in_area = rseq_offset != 0 && core::ptr::fn_addr_eq(cpu_of, crate::current_cpu as fn() -> usize);
        Ok(Self { base: map.as_ptr(), cpus: cpus as u32, backend, rseq_offset, cpu_of, is_in_area, _map: map })
    }

    /// New empty lists for the same CPUs, with the same backend. Errors are those of [`new`](Self::new).
    pub fn another(&self) -> Result<Self, ListsError> {
        Self::new(self.backend, self.cpus(), self.cpu_of)
    }

    /// The same, but shut: they accept nothing and use no memory until each gets a policy and is [opened](List::open). In the
    /// child of a fork they are shut and empty again.
    pub fn another_shut(&self) -> Result<Self, ListsError> {
        let lists = Self::shut(self.backend, self.cpus(), self.cpu_of)?;
        let (map, what) = (&lists._map, "lists that no child sees");
        map.wipe_on_fork().map_err(|errno| ListsError::System { what, bytes: map.bytes(), errno })?;
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
    /// The lists and counters of one CPU.
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
    /// The lists at an index: those of a CPU, or, after all CPUs, those of a depot.
    #[inline(always)]
    fn place(&self, at: usize) -> &CpuLists {
        debug_assert!(at < self.cpus() + DEPOTS);
        // SAFETY: inside the mapping, aligned by its layout, and zeroed memory is a valid CpuLists.
        unsafe { &*self.base.add(at) }
    }
    /// Every list, including the depots.
    pub fn lists(&self) -> impl Iterator<Item = &List> {
        (0..self.cpus() + DEPOTS).flat_map(|at| &self.place(at).lists)
    }
    /// The CPU that this thread runs on; the thread may move at any moment.
    #[inline]
    pub fn here(&self) -> CpuId {
        let cpu = match self.backend {
            Backend::Portable if !self.is_in_area => (self.cpu_of)() as u32,
            _ => rseq::cpu(self.rseq_offset),
        };
        CpuId::new(if cpu < self.cpus { cpu } else { cpu % self.cpus })
    }
    /// This CPU's list for a mobility.
    #[inline]
    pub fn list_here(&self, mobility: Mobility) -> &List {
        // SAFETY: as in `cpu`; `here` names a CPU that has lists.
        unsafe { &(*self.base.add(self.here().get())).lists[mobility.index()] }
    }

    /// CPU 0's list for a mobility, as sections take it.
    #[inline]
    fn sections(&self, mobility: Mobility) -> rseq::Lists {
        rseq::Lists {
            // SAFETY: the pointer stays inside the first CPU's lists.
            base: unsafe { self.base.cast::<List>().add(mobility.index()) }.cast_mut().cast(),
            cpus: self.cpus,
            offset: self.rseq_offset,
        }
    }

    /// Takes one frame. Returns `None` if the list is empty or held.
    #[inline]
    pub fn pop(&self, mobility: Mobility) -> Option<u32> {
        step!("PerCpu::pop");
        let pfn = match self.backend {
            // SAFETY: the self-test passed, and `sections` names the lists of the CPUs that it counts.
            Backend::Rseq => unsafe { rseq::pop(self.sections(mobility)) },
            Backend::Portable => self.pop_portable(mobility),
        };
        if pfn == NONE { None } else { Some(pfn) }
    }

    #[inline(never)]
    fn pop_portable(&self, mobility: Mobility) -> u32 {
        self.list_here(mobility).try_hold().map_or(NONE, |held| held.pop())
    }

    /// Takes up to `want` frames, at most a batch, into `batch`, which must be empty, in the order in which they were pushed.
    #[inline]
    pub fn pop_n(&self, mobility: Mobility, want: usize, batch: &mut Batch) {
        self.pop_at_least(mobility, want, 0, batch);
    }

    /// Takes exactly `want` frames. Returns false, and takes none, if the list has fewer or is held.
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

    /// Puts one frame back. Returns false if the list is full or held; then the caller keeps the frame.
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

    /// Puts the frames in `range` back, at most a batch. Returns false, and puts none back, if they do not fit or the list is
    /// held.
    ///
    /// # Panics
    /// If `range` reaches past the last frame.
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

    /// Takes as many frames as there are words, 1 to a batch, and fills the words with the addresses of their pages, in the
    /// order in which they were pushed. `zero` is the address of frame 0. Returns false, and takes none, if the list has fewer
    /// or is held, if not all of these frames are [`SAFE`](pagemill_core::FrameState::SAFE), or if the number of words is out
    /// of range; then the contents of the words are unspecified.
    ///
    /// # Safety
    /// Each frame on the lists has a state: the atomic byte at its number in `states`.
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

    /// Puts the frames of the pages with these addresses back, 1 to a batch. They must be pages of the zone whose frame 0 has
    /// the address `zero`. Returns false, and puts none back, if they do not fit, the list is held, or the number of words is
    /// out of range.
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

    /// Counts a bulk call of so many blocks on this CPU.
    #[inline(always)]
    pub fn count_bulk(&self, call: BulkCall, blocks: usize) {
        let Some(log2) = blocks.checked_ilog2() else { return };
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

    /// Holds all lists and depots, whatever held them before, so that every caller takes the slow path. For tests.
    pub fn hold_all(&self) {
        self.lists().for_each(|list| {
            list.held.store(1, Relaxed);
            list.draining.free_after_fork();
        });
    }
    /// To be called in the child of a fork: empties the lists, whose frames the zone takes over, and releases them.
    pub fn empty_after_fork(&self) {
        for list in self.lists() {
            let top = list.word.fetch_and(!TOP, Relaxed) & TOP;
            list.drained.fetch_add(top, Relaxed);
            list.held.store(0, Release);
            list.draining.free_after_fork();
        }
    }
}
