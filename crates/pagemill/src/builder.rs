//! What an allocator is to be made of.
use crate::allocator::{Allocator, Inner};
use crate::arena::Arena;
use crate::fault::Faults;
use crate::memory::Memory;
use crate::nodes::{Layout, Nodes};
use crate::{fork, registry};
use core::sync::atomic::{AtomicBool, AtomicU64};
use pagemill_core::{Error, Invalid, ListPolicy, NodeId, PAGE_SIZE, Policy, interleave_share};
use pagemill_sys::{Backend, List, PerCpu, Topology, current_cpu, possible_cpus};

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
    memory: Vec<Memory>,
    layout: Option<Layout>,
    policy: Policy,
    has_background_reclaim: bool,
    faults: Option<Faults>,
}

impl Default for Builder {
    fn default() -> Self {
        Self {
            pages: None,
            backend: None,
            cpus: None,
            huge_pages: true,
            memory: Vec::new(),
            layout: None,
            policy: Policy::Local,
            has_background_reclaim: false,
            faults: None,
        }
    }
}

impl Builder {
    /// The arena's size in pages, divided evenly among the system's nodes where it has several. Default: half of the
    /// system's memory.
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

    /// Adds memory; what [`pages`](Self::pages) says comes beside it, and nothing comes by itself then.
    #[must_use]
    pub fn memory(mut self, memory: Memory) -> Self {
        self.memory.push(memory);
        self
    }
    /// Pretends that CPU i is on node `node_of_cpu[i]`, and that from node i to node j it is as far as
    /// `distances[i][j]` says, 10 being the own one. For tests; beside [`cpus`](Self::cpus).
    #[must_use]
    pub fn nodes(mut self, node_of_cpu: Vec<NodeId>, distances: Vec<Vec<u8>>) -> Self {
        self.layout = Some(Layout { node_of_cpu, distances, system_nodes: Vec::new() });
        self
    }
    /// Where requests that say nothing of it look for memory. Default: near the caller's CPU.
    #[must_use]
    pub fn policy(mut self, policy: Policy) -> Self {
        self.policy = policy;
        self
    }
    /// Whether a thread reclaims when a zone falls below its low mark, until all are above their high marks. Default:
    /// no; a program may call [`Allocator::reclaim_step`] instead.
    #[must_use]
    pub fn background_reclaim(mut self, has_background_reclaim: bool) -> Self {
        self.has_background_reclaim = has_background_reclaim;
        self
    }
    /// Has acquisitions fail (C3.14): see [`Faults`]. Default: what `PAGEMILL_FAIL` says.
    #[must_use]
    pub fn faults(mut self, faults: Faults) -> Self {
        self.faults = Some(faults);
        self
    }

    /// Makes the allocator.
    ///
    /// # Errors
    /// [`Invalid`], saying what was asked for that cannot be had.
    pub fn build(&self) -> Result<Allocator, Error> {
        self.build_held(&registry::lock())
    }

    pub(crate) fn build_held(&self, held: &registry::Writing) -> Result<Allocator, Error> {
        let cpus = self.lists()?.cpus();
        let layout = match (&self.layout, self.cpus) {
            (Some(layout), _) => layout.clone(),
            (None, Some(_)) => Layout::flat(cpus),
            // A system that says nothing of nodes is one.
            (None, None) => Topology::of_system().map_or(Layout::flat(cpus), |topology| Layout::of(&topology, cpus)),
        };
        let mut memory = self.memory.clone();
        if memory.is_empty() || self.pages.is_some() {
            let (pages, nodes) = (self.pages.unwrap_or_else(half_of_memory), layout.system_nodes.len().max(1));
            let share =
                |at| NodeId::new(at).map(|node| Memory::anonymous(interleave_share(pages, nodes, at)).node(node));
            memory.splice(0..0, (0..nodes).filter_map(share).filter(|memory| nodes == 1 || memory.pages() > 0));
        }
        let faults = match (&self.faults, std::env::var("PAGEMILL_FAIL")) {
            (None, Ok(text)) if !text.is_empty() => Some(text.parse()?),
            (faults, _) => faults.clone(),
        };
        let nodes = Nodes::new(layout, self.policy).keep();
        // Closes what was opened, if one cannot be.
        let allocator = Allocator::of(nodes);
        for memory in &memory {
            nodes.open(held, memory, self.lists()?, self.huge_pages)?;
        }
        if let Some(faults) = faults {
            nodes.inject(faults);
        }
        if self.has_background_reclaim {
            allocator.start_reclaim();
        }
        Ok(allocator)
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

impl Nodes {
    /// Opens an arena and enters it.
    pub(crate) fn open(
        &'static self,
        held: &registry::Writing,
        memory: &Memory,
        lists: PerCpu,
        huge_pages: bool,
    ) -> Result<&'static Inner, Error> {
        let pages = memory.pages();
        if !(1..=registry::FRAMES_MAX).contains(&pages) {
            return Err(Invalid::ArenaSize { pages, max: registry::FRAMES_MAX }.into());
        }
        let share = pages / (8 * lists.cpus());
        let arena = registry::enter(held, pages, |first| {
            let mut arena = Box::new(Arena::over(self.map(memory, huge_pages)?, memory.is_zeroed(), pages, first)?);
            // SAFETY: the only zone over this arena; `Owner` drops it first.
            let zone = unsafe { arena.zone() }?;
            let inner = Box::into_raw(Box::<Inner>::new_uninit()).cast::<Inner>();
            arena.inner = inner;
            let arena: &'static Arena = Box::leak(arena);
            let parts = Inner {
                lists,
                arena,
                zone,
                nodes: self,
                older: self.newest(),
                node: memory.node,
                kind: memory.kind,
                marks: memory.marks,
                retired: AtomicBool::new(false),
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
            list.set_policy(ListPolicy::start(inner.limit_max));
        }
        self.add(held, inner);
        Ok(inner)
    }
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
