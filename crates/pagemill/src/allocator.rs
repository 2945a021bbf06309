//! The allocator: an arena, the zone over it and the per-CPU lists above that, made by a builder.
use crate::arena::Arena;
use crate::misuse::misuse;
use crate::{fork, registry};
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use pagemill_core::{Error, Given, Invalid, ListPolicy, MisuseKind, Mobility, PAGE_SIZE, PageCount, Zone, step};
use pagemill_sys::{Backend, List, PerCpu, current_cpu, possible_cpus};
use std::sync::{Arc, OnceLock};

/// What an allocator is made of. It lives until it is closed; pages find it through their arena.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) lists: PerCpu,
    pub(crate) arena: &'static Arena,
    pub(crate) zone: Zone<'static>,
    /// Frames that a list may hold: its share of the zone, so that CPUs cannot hide much of a small one.
    pub(crate) limit_max: u32,
    /// Entries of frames that were found on two ways at once, and put aside.
    pub(crate) quarantined: AtomicU64,
    /// Blocks that came back and were refused.
    pub(crate) misused: AtomicU64,
    /// The number of forks before this process that the allocator has dealt with.
    pub(crate) generation: AtomicU64,
}

/// An allocator of pages: a handle that is cheap to clone, and that threads share or take with them. See the
/// [crate's front page](crate) for a program.
///
/// Pages keep their allocator alive: when the last handle is dropped while pages are out, its memory stays.
///
/// ```
/// use pagemill::{Allocator, Gfp};
/// let allocator = Allocator::builder().pages(1024).build()?;
/// let page = allocator.alloc_page(Gfp::KERNEL)?;
/// let refused = allocator.clone().close().unwrap_err();
/// assert_eq!(refused.pages_out.get(), 1);
/// drop(page);
/// # drop(refused);
/// allocator.close().unwrap();
/// # Ok::<(), pagemill::Error>(())
/// ```
///
/// # Fork
/// The child of a `fork` goes on with a copy of each allocator (C4.4): what anybody had stays handed out there, everything
/// else is free. That is done by the C library's fork handlers. `_Fork`, a `fork` or `clone` system call made by hand, and
/// whatever else runs no `pthread_atfork` handlers, recover nothing: a child made so must not use Pagemill, unless to exec.
#[derive(Clone, Debug)]
pub struct Allocator {
    /// Of `owner`'s arena. Not a reference: the last handle's may not outlive what it frees, as that of an argument
    /// would.
    inner: NonNull<Inner>,
    _owner: Arc<Owner>,
}

// SAFETY: `inner` is used as a shared reference, which may be sent.
unsafe impl Send for Allocator where &'static Inner: Send {}
// SAFETY: as for Send.
unsafe impl Sync for Allocator where &'static Inner: Sync {}

/// Frees the allocator when the last handle is gone.
#[derive(Debug)]
struct Owner(&'static Arena);

impl Drop for Owner {
    fn drop(&mut self) {
        let arena = self.0;
        arena.inner().drain_all();
        if arena.inner().out_at_rest() != 0 {
            return; // Pages are out: their memory must stay, and they come back to it.
        }
        registry::remove(arena);
        // SAFETY: a box's in `build`; no handle is left, no page is out, and the registry leads here no more. The zone
        // borrows the arena's metadata, so it goes first.
        unsafe {
            drop(Box::from_raw(arena.inner.cast_mut()));
            arena.unmap();
        }
    }
}

/// [`Allocator::close`] was refused: pages are out.
///
/// ```
/// # use pagemill::{Allocator, Gfp};
/// # let allocator = Allocator::builder().pages(8).build()?;
/// let page = allocator.alloc_page(Gfp::KERNEL)?;
/// let still_open = allocator.close().unwrap_err();
/// println!("{still_open}");
/// drop(page);
/// still_open.allocator.close().unwrap();
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Debug, thiserror::Error)]
#[error("the allocator still has {pages_out} handed out; free them first")]
pub struct StillOut {
    /// The allocator, as it was.
    pub allocator: Allocator,
    /// How many pages are out.
    pub pages_out: PageCount,
}

impl Allocator {
    /// Begins to describe an allocator.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// The default allocator, made on first use: half of the system's memory as address space, committed as it is
    /// touched.
    ///
    /// # Panics
    /// If the system refuses even that address space, or `PAGEMILL_BACKEND` names a backend that there is not or that
    /// does not work here. [`builder`](Self::builder) returns these as errors.
    ///
    /// ```
    /// assert!(pagemill::Allocator::global().managed_pages().get() > 0);
    /// ```
    pub fn global() -> &'static Self {
        static GLOBAL: OnceLock<Allocator> = OnceLock::new();
        if let Some(allocator) = GLOBAL.get() {
            return allocator;
        }
        // Held outside of the cell, so that no child of a fork finds it half made.
        let held = registry::lock();
        GLOBAL.get_or_init(|| match Self::builder().build_held(&held) {
            Ok(allocator) => allocator,
            Err(error) => panic!("the default allocator cannot be made: {error}"),
        })
    }

    #[inline]
    pub(crate) fn inner(&self) -> &'static Inner {
        // SAFETY: the owner keeps it alive as long as there is a handle.
        unsafe { &*self.inner.as_ptr() }
    }

    /// The list backend in force.
    pub fn backend(&self) -> Backend {
        self.inner().lists.backend()
    }
    /// How many CPUs have lists.
    pub fn cpus(&self) -> usize {
        self.inner().lists.cpus()
    }
    /// How many pages it manages.
    pub fn managed_pages(&self) -> PageCount {
        PageCount::new(self.inner().arena.frames())
    }
    /// What the free/used state of a frame costs, in bits (C10.3: at most 2).
    pub fn metadata_bits_per_frame(&self) -> f64 {
        self.inner().arena.metadata_bits_per_frame()
    }
    /// The address range of its arena: for registering it with a device, or telling its pages from others.
    pub fn arena_range(&self) -> core::ops::Range<usize> {
        let memory = self.inner().arena.memory();
        memory.addr()..memory.addr() + memory.bytes()
    }

    /// Takes what all CPUs' lists hold back to the zone. Their owners go on meanwhile (C4.3). Returns the pages that
    /// were moved.
    pub fn drain(&self) -> PageCount {
        PageCount::new(self.inner().drain_all())
    }
    /// Takes what one CPU's lists hold back to the zone.
    ///
    /// # Errors
    /// [`Invalid::Cpus`] if there is no such CPU.
    pub fn drain_cpu(&self, cpu: pagemill_core::CpuId) -> Result<PageCount, Error> {
        if cpu.get() >= self.cpus() {
            return Err(Invalid::Cpus { cpus: cpu.get() + 1, max: self.cpus() }.into());
        }
        Ok(PageCount::new(self.inner().drain_cpu(cpu)))
    }

    /// Closes this handle, and with it the allocator if no other one is left.
    ///
    /// # Errors
    /// [`StillOut`] with the number of pages, while some are out; nothing has changed then.
    pub fn close(self) -> Result<(), StillOut> {
        self.inner().drain_all();
        match self.inner().out_at_rest() {
            0 => Ok(()),
            out => Err(StillOut { allocator: self, pages_out: PageCount::new(out) }),
        }
    }
}

/// Describes an allocator; [`build`](Self::build) makes it.
///
/// ```
/// use pagemill::{Allocator, Backend};
/// // Four CPUs that are not there: their number comes from a function.
/// let allocator = Allocator::builder().pages(4096).cpus(4, || 2).build()?;
/// assert_eq!((allocator.cpus(), allocator.backend()), (4, Backend::Portable));
/// assert!(Allocator::builder().pages(0).build().is_err());
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Builder {
    pages: Option<usize>,
    backend: Option<Backend>,
    cpus: Option<(usize, fn() -> usize)>,
    huge_pages: bool,
}

impl Default for Builder {
    fn default() -> Self {
        Self { pages: None, backend: None, cpus: None, huge_pages: true }
    }
}

impl Builder {
    /// The arena's size in pages. Default: half of the system's memory.
    #[must_use]
    pub fn pages(mut self, pages: usize) -> Self {
        self.pages = Some(pages);
        self
    }
    /// The arena's size in bytes, rounded down to pages.
    #[must_use]
    pub fn bytes(self, bytes: usize) -> Self {
        self.pages(bytes / PAGE_SIZE)
    }
    /// Forces the list backend. Default: what `PAGEMILL_BACKEND` says, else restartable sequences where their
    /// self-test passes, else the portable one.
    #[must_use]
    pub fn backend(mut self, backend: Backend) -> Self {
        self.backend = Some(backend);
        self
    }
    /// Pretends that there are `cpus` CPUs and that `cpu_of` says which one the caller is on. The portable backend
    /// serves them. `cpu_of` must not allocate pages.
    #[must_use]
    pub fn cpus(mut self, cpus: usize, cpu_of: fn() -> usize) -> Self {
        self.cpus = Some((cpus, cpu_of));
        self
    }
    /// Whether to ask the system for 2 MiB pages. Default: yes.
    #[must_use]
    pub fn huge_pages(mut self, huge_pages: bool) -> Self {
        self.huge_pages = huge_pages;
        self
    }

    /// Makes the allocator.
    ///
    /// # Errors
    /// [`Invalid`], saying what was asked for that cannot be had.
    pub fn build(&self) -> Result<Allocator, Error> {
        self.build_held(&registry::lock())
    }

    fn build_held(&self, held: &registry::Writing) -> Result<Allocator, Error> {
        let pages = self.pages.unwrap_or_else(half_of_memory);
        if !(1..=registry::FRAMES_MAX).contains(&pages) {
            return Err(Invalid::ArenaSize { pages, max: registry::FRAMES_MAX }.into());
        }
        let lists = self.lists()?;
        let cpus = lists.cpus();
        let arena = registry::enter(held, pages, |first| {
            let mut arena = Box::new(Arena::reserve(pages, first, self.huge_pages)?);
            // SAFETY: the only zone over this arena; `Owner` drops it first.
            let zone = unsafe { arena.zone() }?;
            let inner = Box::into_raw(Box::<Inner>::new_uninit()).cast::<Inner>();
            arena.inner = inner;
            let arena: &'static Arena = Box::leak(arena);
            let share = pages / (8 * cpus);
            let parts = Inner {
                lists,
                arena,
                zone,
                limit_max: (share as u32).clamp(1, List::LIMIT_MAX),
                quarantined: AtomicU64::new(0),
                misused: AtomicU64::new(0),
                generation: AtomicU64::new(fork::generation()),
            };
            // SAFETY: room for it, which nobody else knows of yet. `Owner` makes a box of it again.
            unsafe { inner.write(parts) };
            Ok(arena)
        })?;
        let inner = arena.inner();
        for list in inner.lists.lists() {
            list.set_policy(ListPolicy { limit: ListPolicy::LIMIT_MIN.min(inner.limit_max), ..ListPolicy::START });
        }
        Ok(Allocator { inner: NonNull::from(inner), _owner: Arc::new(Owner(arena)) })
    }

    fn lists(&self) -> Result<PerCpu, Error> {
        if let Some((cpus, cpu_of)) = self.cpus {
            if self.backend == Some(Backend::Rseq) {
                return Err(Invalid::Backend { why: "CPUs are faked" }.into());
            }
            return PerCpu::new(Backend::Portable, cpus, cpu_of);
        }
        let forced = match self.backend {
            Some(backend) => Some(backend),
            None => std::env::var("PAGEMILL_BACKEND")
                .ok()
                .filter(|name| !name.is_empty())
                .map(|name| name.parse())
                .transpose()?,
        };
        let backend =
            forced.unwrap_or_else(|| if pagemill_sys::self_test().is_ok() { Backend::Rseq } else { Backend::Portable });
        PerCpu::new(backend, possible_cpus(), current_cpu)
    }
}

/// Do restartable sequences work here? Tried once, for real; [`Builder::build`] asks it too.
///
/// # Errors
/// Why not.
///
/// ```
/// match pagemill::self_test() {
///     Ok(()) => println!("restartable sequences work"),
///     Err(why) => println!("portable lists: {why}"),
/// }
/// ```
pub fn self_test() -> Result<(), &'static str> {
    let _held = registry::lock();
    pagemill_sys::self_test()
}

/// Half of the system's memory, in pages.
fn half_of_memory() -> usize {
    let total_kib = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("MemTotal:"))?;
        line.split_whitespace().nth(1)?.parse::<usize>().ok()
    });
    // Without that file: 1 GiB.
    total_kib.map_or(1 << 18, |kib| (kib / 8).max(1)).min(registry::FRAMES_MAX)
}

impl Inner {
    /// Returns all lists' frames to the zone.
    #[cold]
    pub(crate) fn drain_all(&self) -> usize {
        (0..self.lists.cpus()).map(|cpu| self.drain_cpu(pagemill_core::CpuId::new(cpu as u32))).sum()
    }

    /// Returns one CPU's lists' frames to the zone.
    pub(crate) fn drain_cpu(&self, cpu: pagemill_core::CpuId) -> usize {
        step!("Inner::drain_cpu");
        self.check_generation();
        let mut drained = 0;
        for mobility in Mobility::ALL {
            let list = &self.lists.cpu(cpu).lists[mobility.index()];
            if !list.is_empty() {
                let mut giving = self.zone.giving();
                drained += self.lists.drain(cpu, mobility, |pfns| giving.give_slice(pfns));
                self.note_doubles(giving.finish());
            }
            self.zone.unbind(&list.bound);
            list.set_policy(ListPolicy { limit: ListPolicy::LIMIT_MIN.min(self.limit_max), ..ListPolicy::START });
        }
        drained
    }

    /// How many frames are neither in the zone nor put aside. Right when the lists are drained and nobody is at it.
    pub(crate) fn out_at_rest(&self) -> usize {
        let here = self.zone.free_frames() + self.quarantined.load(Relaxed) as usize;
        self.arena.frames().saturating_sub(here)
    }

    /// Frames that were in the free areas already when they came back: each was on two ways at once, and is free once
    /// from now on. All are counted, one is named.
    #[inline]
    pub(crate) fn note_doubles(&self, given: Given) {
        if let Some(pfn) = given.last_double {
            self.misused.fetch_add(given.doubles as u64 - 1, Relaxed);
            let _ = self.refuse(misuse(MisuseKind::DoubleFree, self.arena.addr_of(pfn.as_u32())));
        }
    }
}
