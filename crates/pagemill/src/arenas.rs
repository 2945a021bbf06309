//! An allocator's arenas: what it has, adding some and retiring them.
use crate::allocator::Allocator;
use crate::build_error::BuildError;
use crate::memory::Memory;
use crate::registry;
use crate::zone::Zone;
use crate::zones::Zones;
use core::ops::Range;
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::{NodeId, PageCount, Unused, ZoneKind};

/// An allocator's piece of memory, for [`Allocator::retire`].
///
/// ```
/// use pagemill::{Allocator, Memory};
/// let allocator = Allocator::builder().pages(64).build()?;
/// let more = allocator.add_memory(Memory::anonymous(512))?;
/// assert_eq!(allocator.managed_pages().get(), 576);
/// assert_eq!(allocator.retire(more)?.get(), 0); // no page of it is out
/// assert_eq!(allocator.managed_pages().get(), 64);
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ArenaId {
    allocator: u64,
    number: usize,
    /// How often it was taken up again before.
    turn: u32,
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

impl Zones {
    fn id(&self, number: usize, zone: &Zone) -> ArenaId {
        ArenaId { allocator: self.number, number, turn: zone.turn.load(Relaxed) }
    }
    fn by_id(&self, id: ArenaId) -> Option<&'static Zone> {
        let zone = self.ever().get(id.number).copied();
        zone.filter(|zone| id == self.id(id.number, zone))
    }

    /// An arena that was retired, of memory like this, of which nothing is out. It is as good as a new one, and a request that
    /// still walks over it from before finds a valid arena.
    fn retired_like(&self, memory: &Memory) -> Option<(usize, &'static Zone)> {
        let is_like = |zone: &Zone| zone.is_retired() && zone.is_lone() && memory.is_served_by_retired(&zone.described);
        let is_whole = |zone: &Zone| {
            zone.drain_all();
            zone.buddy.free_frames() == zone.frames()
        };
        self.ever().into_iter().enumerate().find(|(_, zone)| is_like(zone) && is_whole(zone))
    }

    /// Has an arena in use again that was retired.
    fn take_up(&self, held: &registry::Writing, zone: &Zone) {
        zone.turn.fetch_add(1, Relaxed);
        zone.is_low.store(false, Relaxed);
        zone.retired.store(false, Relaxed);
        self.publish(held);
        // Published first: a request that stops waiting meanwhile opens the lists of the arenas that it finds.
        zone.settle_lists();
        self.tell_who_waits();
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
    /// // SAFETY: nobody writes by it here.
    /// assert!(unsafe { allocator.memfd(arenas[0].id).is_none() && allocator.memfd(arenas[1].id).is_some() });
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn arenas(&self) -> Vec<ArenaInfo> {
        let zones = self.zones();
        let describe = |(number, zone): (usize, &&'static Zone)| ArenaInfo {
            id: zones.id(number, zone),
            range: zone.range(),
            pages: PageCount::new(zone.frames()),
            node: zone.node,
            kind: zone.kind,
            is_retired: zone.is_retired(),
        };
        zones.ever().iter().enumerate().map(describe).collect()
    }

    /// Lets the allocator grow. If an arena of memory like this was [retired](Self::retire) and none of its pages is out, it is
    /// taken up again, by another [`ArenaId`]; its statistics go on.
    ///
    /// # Errors
    /// As [`Builder::build`](crate::Builder::build).
    pub fn add_memory(&self, memory: Memory) -> Result<ArenaId, BuildError> {
        registry::bury();
        let held = registry::lock();
        let zones = self.zones();
        if let Some((number, retired)) = zones.retired_like(&memory) {
            zones.take_up(&held, retired);
            return Ok(zones.id(number, retired));
        }
        let lists = zones.first().lists.another()?;
        let number = zones.ever().len();
        let added = zones.open(&held, memory, lists)?;
        Ok(zones.id(number, added))
    }

    /// Lets the allocator shrink: nothing more is handed out of that arena, and what is free of it goes back to the
    /// system, unless a device has it registered; so do pages that come back later, when this is called again. Its
    /// address space stays until the allocator is closed, for memory like it that is [added](Self::add_memory).
    /// Returns how many of its pages are still out.
    ///
    /// # Errors
    /// [`BuildError::LastArena`]: an allocator keeps one. [`BuildError::NoSuchArena`]: it is another allocator's, or its memory was
    /// taken up again since, and has another name.
    pub fn retire(&self, arena: ArenaId) -> Result<PageCount, BuildError> {
        let held = registry::lock();
        let zones = self.zones();
        let zone = zones.by_id(arena).ok_or(BuildError::NoSuchArena)?;
        if zones.in_use().all(|other| core::ptr::eq(other, zone)) {
            return Err(BuildError::LastArena);
        }
        zone.retired.store(true, Relaxed);
        zone.settle_lists();
        zones.publish(&held);
        zone.drain_all();
        zone.buddy.end_withholding();
        zone.give_back(Unused::All, usize::MAX);
        Ok(PageCount::new(zone.out_at_rest()))
    }

    /// What the system refused when memory was added that need not be as it was described: see
    /// [`Memory::or_ordinary`] and [`Memory::within_limit`]. In the order in which it happened.
    ///
    /// ```
    /// use pagemill::{Allocator, Memory};
    /// let allocator = Allocator::builder().pages(64).build()?;
    /// let before = allocator.notes().len();
    /// allocator.add_memory(Memory::anonymous(64).locked().or_ordinary())?;
    /// match allocator.notes().get(before) {
    ///     None => println!("locked"),
    ///     Some(why) => println!("not locked: {why}"),
    /// }
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn notes(&self) -> Vec<BuildError> {
        self.zones().notes()
    }

    /// The file behind an arena made of one, for another process to map; none if this one is not, or another allocator's.
    /// [`Memory::memfd`] shows how. From then on each page that is asked for with `ZERO` is zeroed, whatever is known of it.
    ///
    /// # Safety
    /// Whoever has the file can write to every page, by `write`, by a mapping of it, or by a hole punched into it. They must
    /// not while a reference to the page's bytes lives: while a [`Page`](crate::Page) or [`Block`](crate::Block) is
    /// dereferenced, only what agreed so with its owner may write, to bytes that are then read as raw memory
    /// ([`as_ptr`](crate::Page::as_ptr)). Nobody may write to a page that is not handed out to somebody who agreed to it.
    pub unsafe fn memfd(&self, arena: ArenaId) -> Option<std::os::fd::BorrowedFd<'_>> {
        let zone = self.zones().by_id(arena)?;
        let fd = zone.memory().fd()?;
        zone.hand_on();
        Some(fd)
    }
}

#[cfg(test)]
mod tests {
    use crate::{Allocator, Memory, Order};

    #[test]
    fn nothing_of_a_retired_arena_is_withheld() {
        let allocator = Allocator::builder().pages(512).build().unwrap();
        let added = allocator.add_memory(Memory::anonymous(512)).unwrap();
        let zone = allocator.zones().by_id(added).unwrap();
        // As for a request that waits.
        assert!(zone.buddy.withhold(Order::PAGEBLOCK, pagemill_core::PageblockId::FIRST).is_some());
        assert_eq!(zone.buddy.withheld_frames(), 512);
        assert_eq!(allocator.retire(added).unwrap().get(), 0);
        assert_eq!(zone.buddy.withheld_frames(), 0);
    }
}
