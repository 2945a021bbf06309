//! An allocator's arenas: what it has, adding some and retiring them.
use crate::allocator::{Allocator, Inner};
use crate::memory::Memory;
use crate::nodes::Nodes;
use crate::registry;
use core::ops::Range;
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::{Error, Invalid, NodeId, PageCount, Unused, ZoneKind};

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
pub struct ArenaId {
    /// The address of what its allocator's arenas share, which is never freed.
    allocator: usize,
    number: usize,
}

/// What an arena is: see [`Allocator::arenas`].
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ArenaInfo {
    /// Its name, for [`Allocator::retire`] and [`Allocator::memfd`].
    pub id: ArenaId,
    /// Its addresses.
    pub range: Range<usize>,
    /// Its size.
    pub pages: PageCount,
    /// Where it is.
    pub node: NodeId,
    /// Whether devices with 32 address bits reach it.
    pub kind: ZoneKind,
    /// It hands out nothing any more. What is out of it stays in use until it comes back.
    pub is_retired: bool,
}

impl Nodes {
    fn id(&self, number: usize) -> ArenaId {
        ArenaId { allocator: core::ptr::from_ref(self).addr(), number }
    }
    fn by_id(&self, id: ArenaId) -> Option<&'static Inner> {
        let arena = self.ever().get(id.number).copied();
        arena.filter(|_| id == self.id(id.number))
    }
}

impl Allocator {
    /// All its memory, in the order in which it came, retired arenas included: for registering it with a device (io_uring,
    /// AF_XDP, VFIO) in one go, or telling its pages from others. What is there never moves.
    ///
    /// ```
    /// use pagemill::{Allocator, Gfp, Memory};
    /// let memory = [Memory::anonymous(1024), Memory::memfd(512)];
    /// let allocator = memory.into_iter().fold(Allocator::builder(), |builder, memory| builder.memory(memory)).build()?;
    /// let arenas = allocator.arenas();
    /// // As IORING_REGISTER_BUFFERS wants it: one entry for each arena, and a page's index tells which one it is in.
    /// let iovecs: Vec<(usize, usize)> = arenas.iter().map(|arena| (arena.range.start, arena.range.len())).collect();
    /// assert_eq!(iovecs.iter().map(|iovec| iovec.1).sum::<usize>(), 1536 * 4096);
    /// let page = allocator.alloc_page(Gfp::KERNEL)?;
    /// assert!(arenas.iter().any(|arena| arena.range.contains(&page.addr())));
    /// // What another process is to map.
    /// assert!(allocator.memfd(arenas[0].id).is_none() && allocator.memfd(arenas[1].id).is_some());
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn arenas(&self) -> Vec<ArenaInfo> {
        let nodes = self.nodes();
        let describe = |(number, inner): (usize, &&'static Inner)| ArenaInfo {
            id: nodes.id(number),
            range: inner.arena.base()..inner.arena.base() + inner.arena.bytes(),
            pages: PageCount::new(inner.arena.frames()),
            node: inner.node,
            kind: inner.kind,
            is_retired: inner.is_retired(),
        };
        nodes.ever().iter().enumerate().map(describe).collect()
    }

    /// Lets the allocator grow.
    ///
    /// # Errors
    /// As [`Builder::build`](crate::Builder::build).
    pub fn add_memory(&self, memory: &Memory) -> Result<ArenaId, Error> {
        let held = registry::lock();
        let nodes = self.nodes();
        let lists = nodes.first().lists.another()?;
        let number = nodes.ever().len();
        nodes.open(&held, memory, lists)?;
        Ok(nodes.id(number))
    }

    /// Lets the allocator shrink: nothing more is handed out of that arena, and what is free of it goes back to the
    /// system, unless a device has it registered; so do pages that come back later, when this is called again. Its address space stays until the allocator
    /// is closed. Returns how many of its pages are still out.
    ///
    /// # Errors
    /// [`Invalid::LastArena`]: an allocator keeps one. [`Invalid::NoSuchArena`]: it is another allocator's.
    pub fn retire(&self, arena: ArenaId) -> Result<PageCount, Error> {
        let held = registry::lock();
        let nodes = self.nodes();
        let inner = nodes.by_id(arena).ok_or(Invalid::NoSuchArena)?;
        if nodes.in_use().all(|other| core::ptr::eq(other, inner)) {
            return Err(Invalid::LastArena.into());
        }
        inner.retired.store(true, Relaxed);
        inner.shut_lists();
        nodes.publish(&held);
        inner.drain_all();
        inner.give_back(Unused::All, usize::MAX);
        Ok(PageCount::new(inner.out_at_rest()))
    }

    /// What the system refused when memory was added that need not be as it was described: see
    /// [`Memory::or_ordinary`] and [`Memory::within_limit`]. In the order in which it happened.
    ///
    /// ```
    /// use pagemill::{Allocator, Memory};
    /// let allocator = Allocator::builder().pages(64).build()?;
    /// let before = allocator.notes().len();
    /// allocator.add_memory(&Memory::anonymous(64).locked().or_ordinary())?;
    /// match allocator.notes().get(before) {
    ///     None => println!("locked"),
    ///     Some(why) => println!("not locked: {why}"),
    /// }
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn notes(&self) -> Vec<Error> {
        self.nodes().notes().into_iter().map(Error::from).collect()
    }

    /// The file behind an arena made of one, for another process to map; none if this one is not, or another allocator's.
    /// [`Memory::memfd`] shows how.
    pub fn memfd(&self, arena: ArenaId) -> Option<std::os::fd::BorrowedFd<'_>> {
        self.nodes().by_id(arena).and_then(|inner| inner.arena.memory().fd())
    }
}
