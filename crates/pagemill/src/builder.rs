//! Describes and builds an allocator.
use crate::allocator::Allocator;
use crate::build_error::BuildError;
use crate::fault::Faults;
use crate::memory::Memory;
use crate::registry;
use crate::topology::Layout;
use crate::zones::Zones;
use core::fmt;
use pagemill_core::{NodeId, PAGE_SIZE, Policy, interleave_share};
use pagemill_os::{Backend, MemoryLimit, PerCpu, address_space_limit, current_cpu, possible_cpus, total_memory};
use std::sync::OnceLock;
use std::time::Duration;

/// Describes one allocator; [`build`](Self::build) makes it.
///
/// ```
/// use pagemill::{Allocator, Backend};
/// // Four CPUs that are not there: their number comes from a function.
/// let allocator = Allocator::builder().pages(4096).cpus(4, || 2).build()?;
/// assert_eq!((allocator.cpus(), allocator.backend()), (4, Backend::Portable));
/// assert!(Allocator::builder().pages(0).build().is_err());
/// # Ok::<(), pagemill::Error>(())
/// ```
pub struct Builder {
    pages: Option<usize>,
    backend: Option<Backend>,
    cpus: Option<(usize, fn() -> usize)>,
    huge_pages: bool,
    memory: Vec<Memory>,
    layout: Option<Layout>,
    policy: Policy,
    has_background_reclaim: bool,
    idle: Option<Duration>,
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
            idle: None,
            faults: None,
        }
    }
}

impl fmt::Debug for Builder {
    /// The options, with lengths instead of tables.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pages: Vec<usize> = self.memory.iter().map(Memory::pages).collect();
        f.debug_struct("Builder")
            .field("pages", &self.pages)
            .field("memory", &pages)
            .field("backend", &self.backend)
            .field("cpus", &self.cpus.map(|(cpus, _)| cpus))
            .field("nodes", &self.layout.as_ref().map(|layout| layout.distances.len()))
            .field("policy", &self.policy)
            .field("huge_pages", &self.huge_pages)
            .field("background_reclaim", &self.has_background_reclaim)
            .field("give_back_after", &self.idle)
            .field("faults", &self.faults)
            .finish()
    }
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
    /// If the system refuses even that address space, `PAGEMILL_BACKEND` names a backend that there is not or that does not
    /// work here, or `PAGEMILL_FAIL` cannot be read (see [`Faults`]). [`builder`](Self::builder) returns these
    /// as errors.
    ///
    /// ```
    /// assert!(pagemill::Allocator::global().managed_pages().get() > 0);
    /// ```
    pub fn global() -> &'static Self {
        match Self::try_global() {
            Ok(allocator) => allocator,
            Err(error) => panic!("the default allocator cannot be made: {error}"),
        }
    }

    /// The same, with the panic's reason as an error. A later call tries again.
    ///
    /// # Errors
    /// As [`Builder::build`].
    pub fn try_global() -> Result<&'static Self, BuildError> {
        static GLOBAL: OnceLock<Allocator> = OnceLock::new();
        if let Some(allocator) = GLOBAL.get() {
            return Ok(allocator);
        }
        let mut begun = None;
        // Held outside of the cell, so that no child of a fork finds it half made.
        let held = registry::lock();
        if GLOBAL.get().is_none() {
            _ = GLOBAL.set(Self::builder().build_held(&held, &mut begun)?);
        }
        Ok(GLOBAL.get().expect("made with the registry held"))
    }
}

impl Builder {
    /// The arena's size in pages, divided evenly among the system's nodes that the process may have memory of.
    /// Default: half of the system's memory, of the process's memory limit (that of its control groups), or of its
    /// address space (`RLIMIT_AS`), whichever is least.
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
    /// Whether the system is asked for 2 MiB pages, or for none, of memory that [`add_memory`](Allocator::add_memory) brings
    /// too. Without them what a program touches is all that it commits, 4 KiB at a time. Default: yes.
    #[must_use]
    pub fn huge_pages(mut self, huge_pages: bool) -> Self {
        self.huge_pages = huge_pages;
        self
    }

    /// Adds memory. Memory set by [`pages`](Self::pages) is added to it. There is no default arena then.
    #[must_use]
    pub fn memory(mut self, memory: Memory) -> Self {
        self.memory.push(memory);
        self
    }
    /// Pretends that CPU i is on node `node_of_cpu[i]`, and that the distance from node i to node j is `distances[i][j]`; a node's
    /// distance to itself is 10. For tests, together with [`cpus`](Self::cpus).
    ///
    /// ```
    /// use pagemill::{Allocator, Gfp, Memory, NodeId};
    /// let [here, there] = [0, 1].map(|node| NodeId::new(node).unwrap());
    /// // CPU 2, on which we are, is on node 1.
    /// let builder = Allocator::builder().cpus(4, || 2).nodes(vec![here, here, there, there], vec![vec![10, 20], vec![20, 10]]);
    /// let allocator = builder.memory(Memory::anonymous(64)).memory(Memory::anonymous(64).node(there)).build()?;
    /// let page = allocator.alloc_page(Gfp::KERNEL)?;
    /// let arenas = allocator.arenas();
    /// assert_eq!(arenas.iter().find(|arena| arena.range.contains(&page.addr())).unwrap().node, there);
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    #[must_use]
    pub fn nodes(mut self, node_of_cpu: Vec<NodeId>, distances: Vec<Vec<u8>>) -> Self {
        self.layout = Some(Layout { node_of_cpu, distances, system_nodes: Vec::new() });
        self
    }
    /// The default policy of requests. Without it: memory near the caller's CPU first.
    ///
    /// ```
    /// use pagemill::{Allocator, Gfp, NodeMask, Policy};
    /// // Pages of all nodes in turn, for memory that threads of all nodes use.
    /// let allocator = Allocator::builder().pages(1024).policy(Policy::Interleave(NodeMask::ALL)).build()?;
    /// let page = allocator.alloc_page(Gfp::KERNEL)?;
    /// # drop(page);
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    #[must_use]
    pub fn policy(mut self, policy: Policy) -> Self {
        self.policy = policy;
        self
    }
    /// Whether a thread reclaims when a zone falls below its low mark, until all are above their high marks. Default:
    /// no; a program may call [`Allocator::reclaim_step`] instead.
    ///
    /// ```
    /// use pagemill::{Allocator, Gfp, Memory, Page, Shrink, Shrinker, Watermarks};
    /// use std::sync::{Arc, Mutex};
    /// struct Cache(Mutex<Vec<Page>>);
    /// impl Shrinker for Cache {
    ///     fn shrink(&self, wanted: Shrink) -> usize {
    ///         let Ok(mut pages) = self.0.try_lock() else { return 0 };
    ///         let rest = pages.len().saturating_sub(wanted.pages);
    ///         pages.drain(rest..).count()
    ///     }
    /// }
    /// let memory = Memory::anonymous(512).watermarks(Watermarks::above(40)); // low 50, high 60
    /// let allocator = Allocator::builder().memory(memory).background_reclaim(true).build()?;
    /// let cache = Arc::new(Cache(Mutex::default()));
    /// let registered = allocator.register_shrinker(cache.clone());
    /// // The request that goes below the low mark does not wait for the cache: the thread asks it.
    /// while allocator.stats().reclaim_background == 0 {
    ///     let page = allocator.alloc_page(Gfp::KERNEL)?;
    ///     cache.0.lock().unwrap().push(page);
    /// }
    /// # drop(registered);
    /// # cache.0.lock().unwrap().clear();
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    #[must_use]
    pub fn background_reclaim(mut self, has_background_reclaim: bool) -> Self {
        self.has_background_reclaim = has_background_reclaim;
        self
    }
    /// Gives whole free pageblocks (2 MiB) above the high marks back to the system once they were free for this long, or
    /// up to an eighth longer. The thread of [`background_reclaim`](Self::background_reclaim) checks that, or the program by
    /// [`Allocator::reclaim_step`]. Pages on per-CPU lists stay there. Default: nothing goes back by age, only by
    /// [`Allocator::give_back`].
    #[must_use]
    pub fn give_back_after(mut self, idle: Duration) -> Self {
        self.idle = Some(idle);
        self
    }
    /// Injects faults into acquisitions (C3.14): see [`Faults`]. Default: the faults of `PAGEMILL_FAIL`.
    #[must_use]
    pub fn faults(mut self, faults: Faults) -> Self {
        self.faults = Some(faults);
        self
    }

    /// Makes the allocator.
    ///
    /// # Errors
    /// [`BuildError`] names the option that failed.
    pub fn build(self) -> Result<Allocator, BuildError> {
        registry::bury();
        let mut begun = None;
        let held = registry::lock();
        self.build_held(&held, &mut begun)
    }

    /// After an error, `begun` has the arenas that were opened. The caller closes them when it no longer holds the registry.
    pub(crate) fn build_held(
        mut self,
        held: &registry::Writing,
        begun: &mut Option<Allocator>,
    ) -> Result<Allocator, BuildError> {
        let cpus = self.lists()?.cpus();
        let layout = match (self.layout.take(), self.cpus) {
            (Some(layout), _) => layout,
            (None, Some(_)) => Layout::flat(cpus),
            (None, None) => Layout::of_system(cpus),
        };
        if layout.node_of_cpu.len() < cpus {
            return Err(BuildError::NodesOfCpus { cpus, named: layout.node_of_cpu.len() });
        }
        let mut memory = core::mem::take(&mut self.memory);
        if memory.is_empty() || self.pages.is_some() {
            let (pages, nodes) = (self.pages.unwrap_or_else(half_of_memory), layout.system_nodes.len().max(1));
            let share =
                |at| NodeId::new(at).map(|node| Memory::anonymous(interleave_share(pages, nodes, at)).node(node));
            // The first has the most: if that is none, it is refused.
            memory.splice(
                0..0,
                (0..nodes).filter_map(share).filter(|memory| memory.node == NodeId::ZERO || memory.pages() > 0),
            );
        }
        if let Policy::Bind(among) | Policy::Interleave(among) = self.policy
            && !memory.iter().any(|memory| among.contains(memory.node))
        {
            return Err(BuildError::NoSuchNode { nodes: among.as_bits() });
        }
        let faults = match self.faults.take() {
            Some(faults) => Some(faults),
            None => Faults::from_env()?,
        };
        let kept = Zones::new(layout, self.policy, self.huge_pages).keep();
        let allocator = begun.insert(Allocator::of(kept)).clone();
        let zones = kept.get();
        for memory in memory {
            zones.open(held, memory, self.lists()?)?;
        }
        if let Some(faults) = faults {
            _ = zones.faults.set(faults);
        }
        if let Some(age) = self.idle {
            zones.give_back_after(age);
        }
        if self.has_background_reclaim {
            allocator.start_reclaim(held)?;
        }
        Ok(allocator)
    }

    fn lists(&self) -> Result<PerCpu, BuildError> {
        if let Some((cpus, cpu_of)) = self.cpus {
            if self.backend == Some(Backend::Rseq) {
                return Err(BuildError::Backend { why: "CPUs are faked" });
            }
            return Ok(PerCpu::new(Backend::Portable, cpus, cpu_of)?);
        }
        let forced = match self.backend {
            Some(backend) => Some(backend),
            None => std::env::var_os("PAGEMILL_BACKEND")
                .filter(|name| !name.is_empty())
                // A name that is not UTF-8 is refused as an empty name is.
                .map(|name| name.to_str().unwrap_or_default().parse())
                .transpose()?,
        };
        let backend =
            forced.unwrap_or_else(|| if pagemill_os::self_test().is_ok() { Backend::Rseq } else { Backend::Portable });
        Ok(PerCpu::new(backend, possible_cpus(), current_cpu)?)
    }
}

/// Half of the memory that the process may have, or of its address space, in pages.
fn half_of_memory() -> usize {
    let memory = MemoryLimit::of_process().map_or(usize::MAX, |limit| limit.bytes());
    let limit = memory.min(address_space_limit().unwrap_or(usize::MAX));
    // Where the system does not say how much memory it has, the half is 1 GiB.
    let total = total_memory().unwrap_or(2 << 30);
    total.min(limit).div_ceil(2 * PAGE_SIZE).min(registry::FRAMES_MAX)
}
