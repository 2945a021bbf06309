//! Memory for an allocator: how much, of what kind, on which node, with which marks.
use crate::allocator::{Allocator, Inner};
use crate::nodes::Nodes;
use crate::registry;
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::{Error, Invalid, NodeId, Order, PAGE_SIZE, PageCount, Watermarks, ZoneKind};
use pagemill_sys::{MapError, Mapping};

/// A piece of memory that an allocator is to manage: an arena.
///
/// ```
/// use pagemill::{Allocator, Gfp, Memory};
/// // Memory that a device with 32 address bits reaches, beside the ordinary kind.
/// let allocator = Allocator::builder().pages(1024).memory(Memory::anonymous(512).dma32()).build()?;
/// let reachable = allocator.alloc_page(Gfp::KERNEL | Gfp::DMA32)?;
/// # drop(reachable);
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Memory {
    backing: Backing,
    pub(crate) node: NodeId,
    pub(crate) kind: ZoneKind,
    pub(crate) marks: Watermarks,
    may_be_ordinary: bool,
    is_locked: bool,
}

#[derive(Clone, Copy, Debug)]
enum Backing {
    Anonymous { pages: usize },
    HugePages { pages: usize },
    Memfd { pages: usize, is_huge: bool },
    Brought { start: usize, pages: usize },
}

impl Memory {
    fn of(backing: Backing) -> Self {
        Self {
            backing,
            node: NodeId::ZERO,
            kind: ZoneKind::Normal,
            marks: Watermarks::NONE,
            may_be_ordinary: false,
            is_locked: false,
        }
    }

    /// Private memory of the process, committed as it is touched.
    pub fn anonymous(pages: usize) -> Self {
        Self::of(Backing::Anonymous { pages })
    }
    /// 2 MiB pages that the administrator set aside (`/proc/sys/vm/nr_hugepages`). `pages` counts pages of 4 KiB, a
    /// multiple of 512.
    pub fn huge_pages(pages: usize) -> Self {
        Self::of(Backing::HugePages { pages })
    }
    /// A file in memory, which another process may map too: [`Allocator::memfd`] gives it.
    pub fn memfd(pages: usize) -> Self {
        Self::of(Backing::Memfd { pages, is_huge: false })
    }
    /// The same of 2 MiB pages that the administrator set aside.
    pub fn memfd_of_huge_pages(pages: usize) -> Self {
        Self::of(Backing::Memfd { pages, is_huge: true })
    }
    /// Memory that the caller has mapped: `pages` pages from `start`, aligned to 2 MiB. It is not unmapped when the
    /// allocator closes. Its contents count as unspecified.
    ///
    /// # Safety
    /// It is readable and writable until the allocator is closed, and nobody else uses it meanwhile.
    pub unsafe fn brought(start: *mut u8, pages: usize) -> Self {
        Self::of(Backing::Brought { start: start.expose_provenance(), pages })
    }

    /// It is on this node.
    #[must_use]
    pub fn node(self, node: NodeId) -> Self {
        Self { node, ..self }
    }
    /// Its device addresses lie below 4 GiB.
    #[must_use]
    pub fn dma32(self) -> Self {
        Self { kind: ZoneKind::Dma32, ..self }
    }
    /// Keeps so many pages from requests; none unless said.
    ///
    /// ```
    /// use pagemill::{Allocator, Gfp, Memory, Watermarks};
    /// let memory = Memory::anonymous(1024).watermarks(Watermarks::above(100));
    /// let allocator = Allocator::builder().memory(memory).build()?;
    /// let pages: Vec<_> = std::iter::from_fn(|| allocator.alloc_page(Gfp::NOWAIT).ok()).collect();
    /// assert_eq!(pages.len(), 924);
    /// assert!(allocator.alloc_page(Gfp::ATOMIC).is_ok()); // has access to half of what is left
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    #[must_use]
    pub fn watermarks(self, marks: Watermarks) -> Self {
        Self { marks, ..self }
    }

    pub(crate) fn pages(&self) -> usize {
        match self.backing {
            Backing::Anonymous { pages }
            | Backing::HugePages { pages }
            | Backing::Memfd { pages, .. }
            | Backing::Brought { pages, .. } => pages,
        }
    }

    /// If the system refuses huge pages, or to lock the memory, goes on with ordinary memory, and
    /// [notes](Allocator::notes) why. Without this it is an error.
    #[must_use]
    pub fn or_ordinary(self) -> Self {
        Self { may_be_ordinary: true, ..self }
    }
    /// Locks it in memory (`mlock`), which commits all of it.
    #[must_use]
    pub fn locked(self) -> Self {
        Self { is_locked: true, ..self }
    }

    /// Is what nobody ever had of it zero?
    pub(crate) fn is_zeroed(&self) -> bool {
        !matches!(self.backing, Backing::Brought { .. })
    }

    /// Maps it.
    fn map(&self, huge_pages: bool) -> Result<Mapping, Invalid> {
        let bytes = self.pages() * PAGE_SIZE;
        // Blocks are aligned to their size, so the arena is to the largest that it holds.
        let align = bytes.next_power_of_two().clamp(1 << 21, Order::MAX.bytes());
        let refused = |what| move |errno: pagemill_sys::Errno| Invalid::System { what, bytes, errno: errno.0 };
        let mapping = match self.backing {
            Backing::Anonymous { .. } => Mapping::reserve(bytes, align).map_err(refused("an arena"))?,
            Backing::HugePages { .. } => return Mapping::huge(bytes, align).map_err(|why| refusal(why, bytes)),
            Backing::Memfd { is_huge, .. } => {
                Mapping::memfd(c"pagemill", bytes, align, is_huge).map_err(|why| refusal(why, bytes))?
            }
            Backing::Brought { start, .. } => {
                if !start.is_multiple_of(1 << 21) {
                    return Err(Invalid::Alignment { addr: start, align: 1 << 21 });
                }
                let start = core::ptr::with_exposed_provenance_mut(start);
                // SAFETY: what the caller of `brought` promised.
                return unsafe { Mapping::adopt(start, bytes) }.map_err(refused("memory that was brought"));
            }
        };
        if huge_pages {
            mapping.advise_huge_pages();
        }
        Ok(mapping)
    }

    /// The same of ordinary pages.
    fn ordinary(&self) -> Self {
        let pages = self.pages();
        let backing = match self.backing {
            Backing::HugePages { .. } => Backing::Anonymous { pages },
            Backing::Memfd { .. } => Backing::Memfd { pages, is_huge: false },
            other => other,
        };
        Self { backing, ..self.clone() }
    }
}

fn refusal(why: MapError, bytes: usize) -> Invalid {
    match why {
        MapError::HugePages { wanted, free, reserved } => Invalid::HugePages { wanted, free, reserved },
        MapError::LockLimit { wanted, limit, .. } => Invalid::LockLimit { wanted, limit },
        MapError::System { call, errno } => Invalid::System { what: call, bytes, errno: errno.0 },
    }
}

impl Nodes {
    /// Maps memory as it is described, or as ordinary memory where that will do; then notes why.
    pub(crate) fn map(&self, memory: &Memory, huge_pages: bool) -> Result<Mapping, Invalid> {
        let mapping = memory.map(huge_pages).or_else(|why| {
            let ordinary = memory.ordinary().map(huge_pages);
            if !memory.may_be_ordinary || ordinary.is_err() {
                return Err(why);
            }
            self.note(why);
            ordinary
        })?;
        if let Some(&node) = self.layout().system_nodes.get(memory.node.get())
            && memory.is_zeroed()
            && let Err(errno) = mapping.bind(0, mapping.bytes(), node, false)
        {
            // It serves from wherever it is.
            self.note(Invalid::System { what: "memory of a node", bytes: mapping.bytes(), errno: errno.0 });
        }
        if memory.is_locked
            && let Err(why) = mapping.lock(0, mapping.bytes())
        {
            let why = refusal(why, mapping.bytes());
            if !memory.may_be_ordinary {
                return Err(why);
            }
            self.note(why);
        }
        Ok(mapping)
    }
}

/// An allocator's piece of memory, for [`Allocator::retire`].
///
/// ```
/// use pagemill::{Allocator, Memory};
/// let allocator = Allocator::builder().pages(64).build()?;
/// let more = allocator.add_memory(&Memory::anonymous(512))?;
/// assert_eq!(allocator.managed_pages().get(), 576);
/// assert_eq!(allocator.retire(more)?.get(), 0); // no page of it is out
/// assert_eq!(allocator.managed_pages().get(), 64);
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ArenaId(usize);

impl Allocator {
    /// Lets the allocator grow.
    ///
    /// # Errors
    /// As [`Builder::build`](crate::Builder::build).
    pub fn add_memory(&self, memory: &Memory) -> Result<ArenaId, Error> {
        let held = registry::lock();
        let nodes = self.nodes();
        let lists = nodes.first().lists.another()?;
        let number = nodes.ever().len();
        nodes.open(&held, memory, lists, true)?;
        Ok(ArenaId(number))
    }

    /// Lets the allocator shrink: nothing more is handed out of that arena, and what is free of it goes back to the
    /// system; so do pages that come back later, when this is called again. Its address space stays until the allocator
    /// is closed. Returns how many of its pages are still out.
    ///
    /// # Errors
    /// [`Invalid::LastArena`]: an allocator keeps one.
    pub fn retire(&self, arena: ArenaId) -> Result<PageCount, Error> {
        let held = registry::lock();
        let nodes = self.nodes();
        let Some(&inner) = nodes.ever().get(arena.0) else { return Err(Invalid::LastArena.into()) };
        if nodes.all().iter().all(|other| core::ptr::eq(*other, inner)) {
            return Err(Invalid::LastArena.into());
        }
        inner.retired.store(true, Relaxed);
        inner.shut_lists();
        nodes.publish(&held);
        inner.drain_all();
        inner.give_back();
        Ok(PageCount::new(inner.out_at_rest()))
    }

    /// Gives whole free pageblocks (2 MiB) above the high marks back to the system, whatever lists hold included. Their
    /// address space stays, and they are committed again when they are next touched. Meanwhile they are nobody's: requests
    /// that do not wait may come back short. Returns the pages that went back.
    ///
    /// ```
    /// use pagemill::{Allocator, Bulk, PageList};
    /// let allocator = Allocator::builder().pages(4096).build()?;
    /// let mut pages = PageList::new();
    /// allocator.alloc_pages_bulk_list(Bulk::exact(4096), &mut pages)?;
    /// drop(pages);
    /// assert_eq!(allocator.give_back().get(), 4096);
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn give_back(&self) -> PageCount {
        self.nodes().drain_all();
        PageCount::new(self.nodes().all().iter().map(|inner| inner.give_back()).sum())
    }

    /// What the system refused when memory was added that need not be as it was described: see
    /// [`Memory::or_ordinary`].
    pub fn notes(&self) -> Vec<Error> {
        self.nodes().notes().into_iter().map(Error::from).collect()
    }

    /// The file behind an arena made of one, for another process to map.
    pub fn memfd(&self, arena: ArenaId) -> Option<std::os::fd::BorrowedFd<'_>> {
        self.nodes().ever().get(arena.0).and_then(|inner| inner.arena.memory().fd())
    }
}

impl Inner {
    /// Takes each whole free pageblock, has the system take its memory back, and returns it to the zone.
    fn give_back(&self) -> usize {
        let mut blocks = Vec::new();
        let floor = if self.is_retired() { 0 } else { self.marks.high };
        while let Some(pfn) = self.zone.alloc_block(Order::PAGEBLOCK, pagemill_core::Mobility::Unmovable, floor) {
            blocks.push(pfn);
        }
        let mut given = 0;
        for pfn in blocks {
            given += self.arena.give_back(pfn.as_u32(), Order::PAGEBLOCK);
            if self.zone.free_block(pfn, Order::PAGEBLOCK).is_err() {
                unreachable!("{pfn} was taken a moment ago");
            }
        }
        given
    }
}
