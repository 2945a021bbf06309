//! An allocator's arenas: mapping, listing, adding and retiring them.
//!
//! It is not on the way of a request: a program calls it to grow or shrink an allocator. Each arena is one [`Zone`]. A retired
//! one is kept for memory like it that is added later, because a request may still walk over it (N1 in `zones.rs`).
//! Every change is made with the registry held.
use crate::allocator::Allocator;
use crate::build_error::BuildError;
use crate::memory::Memory;
use crate::registry;
use crate::zone::{Body, Parts, Zone};
use crate::zones::Zones;
use core::ops::Range;
use pagemill_core::{NodeId, Order, PAGE_SIZE, PAGEBLOCK_FRAMES, PageCount, Unused, ZoneKind};
use pagemill_os::{Mapping, PerCpu};

/// Names an arena, for [`Allocator::retire`] and [`Allocator::memfd`].
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
    /// How often the arena was reused before.
    turn: u32,
}

/// An arena's description: see [`Allocator::arenas`].
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ArenaInfo {
    /// Its name, for [`Allocator::retire`] and [`Allocator::memfd`].
    pub id: ArenaId,
    /// Its addresses.
    pub range: Range<usize>,
    /// Its size.
    pub pages: PageCount,
    /// The node that it is on.
    pub node: NodeId,
    /// Whether devices with 32 address bits can reach it.
    pub kind: ZoneKind,
    /// It was retired: no page of it is handed out any more. Pages that are out remain usable until they are freed.
    pub is_retired: bool,
}

impl Zones {
    fn id(&self, number: usize, zone: &Zone) -> ArenaId {
        ArenaId { allocator: self.number, number, turn: zone.turn() }
    }
    fn by_id(&self, id: ArenaId) -> Option<&'static Zone> {
        let zone = self.ever().get(id.number).copied();
        zone.filter(|zone| id == self.id(id.number, zone))
    }

    /// Opens an arena and enters it.
    pub(crate) fn open(
        &'static self,
        held: &registry::Writing,
        memory: Memory,
        lists: PerCpu,
    ) -> Result<&'static Zone, BuildError> {
        memory.marks.check()?;
        let memory = self.within_limit(memory)?;
        let pages = memory.pages();
        if !(1..=registry::FRAMES_MAX).contains(&pages) {
            return Err(BuildError::ArenaSize { pages, max: registry::FRAMES_MAX });
        }
        if let Some(range) = memory.brought_range()? {
            registry::check_apart(held, &range)?;
        }
        let zone = registry::enter(held, memory.lead(), pages, |first| {
            let mapping = self.map(&memory)?;
            // Check our own mapping too: a program may have unmapped memory that it brought.
            registry::check_apart(held, &(mapping.addr()..mapping.addr() + mapping.bytes()))?;
            Body::new(Parts {
                memory: mapping,
                described: memory,
                lists,
                first,
                shared: self.shared.clone(),
                older: self.newest(),
                come_home: registry::come_home,
            })
        })?;
        self.add(held, zone);
        Ok(zone)
    }

    /// The memory as described. If it must fit the process's limit and does not, it becomes smaller, and that is noted.
    fn within_limit(&self, memory: Memory) -> Result<Memory, BuildError> {
        let room = match &self.limit {
            Some(limit) if memory.is_within_limit => limit.room(),
            _ => return Ok(memory),
        };
        // Room promised to this allocator's other arenas and not yet committed.
        let promised = |zone: &&Zone| zone.is_within_limit().then(|| zone.uncommitted());
        let room = room.saturating_sub(self.ever().iter().filter_map(promised).sum());
        let wanted = memory.pages().saturating_mul(PAGE_SIZE);
        if wanted <= room {
            return Ok(memory);
        }
        let why = BuildError::MemoryLimit { wanted, room };
        let whole = room >> Order::PAGEBLOCK.bytes().ilog2() << PAGEBLOCK_FRAMES.ilog2();
        if whole == 0 {
            return Err(why);
        }
        self.note(why);
        Ok(memory.resized(whole))
    }

    /// Maps memory as described. If that fails and ordinary memory will do, maps ordinary memory, and notes the reason.
    fn map(&self, memory: &Memory) -> Result<Mapping, BuildError> {
        let huge_pages = self.huge_pages;
        let mapping = memory.map(huge_pages).or_else(|why| {
            let ordinary = memory.ordinary().map(huge_pages);
            if !memory.may_be_ordinary || ordinary.is_err() {
                return Err(why);
            }
            self.note(why);
            ordinary
        })?;
        if let Some(&node) = self.layout.system_nodes.get(memory.node.get())
            && memory.is_zeroed()
            && let Err(errno) = mapping.bind(0, mapping.bytes(), node, false)
        {
            // Without the binding, the memory is used on any node.
            self.note(BuildError::system("memory of a node", mapping.bytes())(errno));
        }
        if memory.is_locked
            && let Err(why) = mapping.lock(0, mapping.bytes())
        {
            let why = BuildError::of_memory(mapping.bytes())(why);
            if !memory.may_be_ordinary {
                return Err(why);
            }
            self.note(why);
        }
        Ok(mapping)
    }

    /// A retired zone of memory like this with no page out. It is as good as a new one, and a request that still walks
    /// over it from before finds a valid zone.
    fn retired_like(&self, memory: &Memory) -> Option<(usize, &'static Zone)> {
        let is_like =
            |zone: &Zone| zone.is_retired() && zone.is_lone() && memory.is_served_by_retired(zone.described());
        let is_whole = |zone: &Zone| {
            zone.drain_all();
            zone.buddy().free_frames() == zone.frames()
        };
        self.ever().into_iter().enumerate().find(|(_, zone)| is_like(zone) && is_whole(zone))
    }

    /// Puts a retired zone to use again.
    fn take_up(&self, held: &registry::Writing, zone: &Zone) {
        zone.take_up_again();
        self.publish(held);
        // Published first: a request whose wait ends meanwhile opens the lists of the zones that it finds in the
        // zonelist.
        zone.settle_lists();
        self.tell_who_waits();
    }
}

impl Allocator {
    /// All arenas, in the order in which they were added, retired ones included. Use it to register all memory with a
    /// device (io_uring, AF_XDP, VFIO), or to recognise the allocator's pages. An arena never moves.
    ///
    /// ```
    /// use pagemill::{Allocator, Gfp, Memory};
    /// let memory = [Memory::anonymous(1024), Memory::memfd(512)];
    /// let allocator = memory.into_iter().fold(Allocator::builder(), |builder, memory| builder.memory(memory)).build()?;
    /// let arenas = allocator.arenas();
    /// // As IORING_REGISTER_BUFFERS wants it: one entry for each arena. A page's buffer index is its arena's index.
    /// let iovecs: Vec<(usize, usize)> = arenas.iter().map(|arena| (arena.range.start, arena.range.len())).collect();
    /// assert_eq!(iovecs.iter().map(|iovec| iovec.1).sum::<usize>(), 1536 * 4096);
    /// let page = allocator.alloc_page(Gfp::KERNEL)?;
    /// assert!(arenas.iter().any(|arena| arena.range.contains(&page.addr())));
    /// // Another process can map the memfd.
    /// // SAFETY: nothing writes to the file here.
    /// assert!(unsafe { allocator.memfd(arenas[0].id).is_none() && allocator.memfd(arenas[1].id).is_some() });
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn arenas(&self) -> Vec<ArenaInfo> {
        let zones = self.zones();
        let describe = |(number, zone): (usize, &&'static Zone)| ArenaInfo {
            id: zones.id(number, zone),
            range: zone.range(),
            pages: PageCount::new(zone.frames()),
            node: zone.node(),
            kind: zone.kind(),
            is_retired: zone.is_retired(),
        };
        zones.ever().iter().enumerate().map(describe).collect()
    }

    /// Adds memory to the allocator. If an arena of memory like this was [retired](Self::retire) and no page of it is
    /// out, that arena is reused under a new [`ArenaId`]; its statistics continue.
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
        let lists = zones.first().lists().another()?;
        let number = zones.ever().len();
        let added = zones.open(&held, memory, lists)?;
        Ok(zones.id(number, added))
    }

    /// Retires an arena: no page of it is handed out any more, and its free pages go back to the system, unless a
    /// device has them registered. Pages that are freed later go back when this is called again. The address space
    /// stays reserved until the allocator is closed, for memory like it that is [added](Self::add_memory). Returns how
    /// many pages are still out.
    ///
    /// # Errors
    /// [`BuildError::LastArena`]: an allocator keeps at least one arena. [`BuildError::NoSuchArena`]: the name is
    /// another allocator's, or the arena was reused and has a new name.
    pub fn retire(&self, arena: ArenaId) -> Result<PageCount, BuildError> {
        let held = registry::lock();
        let zones = self.zones();
        let zone = zones.by_id(arena).ok_or(BuildError::NoSuchArena)?;
        if zones.in_use().all(|other| core::ptr::eq(other, zone)) {
            return Err(BuildError::LastArena);
        }
        zone.set_retired(true);
        zone.settle_lists();
        zones.publish(&held);
        zone.drain_all();
        zone.buddy().end_withholding();
        zone.give_back(Unused::All, usize::MAX);
        Ok(PageCount::new(zone.out_at_rest()))
    }

    /// What the system refused while memory was added that allows a fallback: see [`Memory::or_ordinary`] and
    /// [`Memory::within_limit`]. In the order in which it happened.
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

    /// The file behind an arena made by [`Memory::memfd`], for another process to map; that function's example shows
    /// how. `None` if the arena has no file, or is another allocator's. From then on every page that is asked for with
    /// `ZERO` is zeroed, even one known to be fresh.
    ///
    /// # Safety
    /// Code that has the file can write to every page: by `write`, through a mapping, or by punching a hole. It must
    /// not write to a page's bytes while a reference to them lives. So while a [`Page`](crate::Page) or
    /// [`Block`](crate::Block) is dereferenced, only code that agreed with its owner may write, and the owner must read
    /// those bytes as raw memory ([`as_ptr`](crate::Page::as_ptr)). Nothing may write to a page that is not handed out
    /// to an owner who agreed to it.
    pub unsafe fn memfd(&self, arena: ArenaId) -> Option<std::os::fd::BorrowedFd<'_>> {
        let zone = self.zones().by_id(arena)?;
        let fd = zone.memory().fd()?;
        zone.hand_on();
        Some(fd)
    }
}

#[cfg(test)]
mod tests {
    use crate::{Allocator, Memory};

    #[test]
    fn a_retired_arena_has_no_withheld_frames() {
        let allocator = Allocator::builder().pages(512).build().unwrap();
        let added = allocator.add_memory(Memory::anonymous(512)).unwrap();
        let zone = allocator.zones().by_id(added).unwrap();
        // As a request that waits does.
        assert!(zone.buddy().withhold(512, 512, pagemill_core::PageblockId::FIRST).is_some());
        assert_eq!(zone.buddy().withheld_frames(), 512);
        assert_eq!(allocator.retire(added).unwrap().get(), 0);
        assert_eq!(zone.buddy().withheld_frames(), 0);
    }
}
