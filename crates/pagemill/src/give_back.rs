//! Returns free memory to the system: when the program asks, or when the memory was free for a while.
//!
//! It is not on the way of a request. It drains lists or depots, and asks each zone to give memory back; `zone/idle.rs` explains
//! how a zone does that.
use crate::allocator::Allocator;
use crate::idle::Idle;
use crate::zone::Zone;
use crate::zones::Zones;
use pagemill_core::{PageCount, Unused};
use std::time::{Duration, Instant};

impl Zones {
    /// Sets the age at which free memory goes back.
    pub(crate) fn give_back_after(&self, age: Duration) {
        self.idle.get_or_init(|| Idle::new(age));
    }

    /// Gives back what is due, and what was freed to retired zones since. Returns the pages given back.
    pub(crate) fn give_back_idle(&self, now: Instant) -> usize {
        let Some(due) = self.idle.get().and_then(|idle| idle.due(now)) else { return 0 };
        // Pages in a depot keep whole pageblocks from going back, and no CPU may ever take them.
        let arenas = self.ever();
        arenas.iter().for_each(|zone| _ = zone.drain_depots());
        arenas.iter().map(|zone| zone.give_back(due, usize::MAX)).sum()
    }
}

impl Allocator {
    /// Gives free memory above the high marks back to the system. Pages on lists count as free: they are drained first.
    /// Whole free pageblocks go back first (2 MiB; the last one of an arena may be shorter). Then free parts of other
    /// pageblocks follow, runs of 16 neighbouring pages or more, if the allocator [uses no huge
    /// pages](crate::Builder::huge_pages) and the system's own pages have 4 KiB. Pages that were never handed out since
    /// their memory came from the system are skipped. Addresses stay valid, and the system commits memory again on the
    /// next touch. Nothing goes back from arenas that a device has registered. Returns the number of pages that went
    /// back.
    ///
    /// ```
    /// use pagemill::{Allocator, Bulk, PageList};
    /// let allocator = Allocator::builder().pages(4096).build()?;
    /// let mut pages = PageList::new();
    /// allocator.alloc_pages_bulk_list(Bulk::exact(4096), &mut pages)?;
    /// drop(pages);
    /// assert_eq!(allocator.give_back().get(), 4096);
    /// assert_eq!(allocator.give_back().get(), 0); // it went back already
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn give_back(&self) -> PageCount {
        self.give_back_at_most(PageCount::new(usize::MAX))
    }

    /// The same, up to a number of pages. A pageblock without a page in use goes back whole or not at all.
    ///
    /// ```
    /// # use pagemill::{Allocator, Bulk, PageCount, PageList};
    /// # let allocator = Allocator::builder().pages(4096).build()?;
    /// # let mut pages = PageList::new();
    /// # allocator.alloc_pages_bulk_list(Bulk::exact(4096), &mut pages)?;
    /// # drop(pages);
    /// assert_eq!(allocator.give_back_at_most(PageCount::new(1500)).get(), 1024);
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn give_back_at_most(&self, pages: PageCount) -> PageCount {
        let zones = self.zones();
        zones.drain_all();
        PageCount::new(give_back_of(zones.in_use(), pages.get()))
    }

    /// Gives back whole pageblocks that were free for as long as
    /// [`Builder::give_back_after`](crate::Builder::give_back_after) says. `now` is the current time.
    /// [`reclaim_step`](Self::reclaim_step) does this too; this call is for programs that keep their own time. A
    /// pageblock's age counts from the first such call that finds it free. A call that comes within an eighth of the
    /// age after the last one does nothing. Returns the number of pages that went back.
    ///
    /// ```
    /// use pagemill::{Allocator, Bulk, PageList};
    /// use std::time::{Duration, Instant};
    /// let minute = Duration::from_secs(60);
    /// let allocator = Allocator::builder().pages(4096).give_back_after(minute).build()?;
    /// let mut pages = PageList::new();
    /// allocator.alloc_pages_bulk_list(Bulk::exact(4096), &mut pages)?;
    /// drop(pages);
    /// let now = Instant::now();
    /// assert_eq!(allocator.give_back_idle(now).get(), 0); // found free now
    /// assert_eq!(allocator.give_back_idle(now + minute / 2).get(), 0);
    /// assert_eq!(allocator.give_back_idle(now + minute * 2).get(), 4096);
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn give_back_idle(&self, now: Instant) -> PageCount {
        PageCount::new(self.zones().give_back_idle(now))
    }
}

/// Gives back up to `most` pages of these zones together. Of a zone that is retired meanwhile, all free pages go back.
fn give_back_of(arenas: impl Iterator<Item = &'static Zone>, most: usize) -> usize {
    arenas.fold(0, |given, zone| given + zone.give_back(Unused::All, most.saturating_sub(given)))
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::give_back_of;
    use crate::{Allocator, Gfp, Memory, Order};

    #[test]
    fn a_zone_retired_during_give_back_gives_all_and_the_others_no_more() {
        let builder = [Memory::anonymous(512), Memory::anonymous(512)]
            .into_iter()
            .fold(Allocator::builder(), |builder, memory| builder.memory(memory));
        let allocator = builder.huge_pages(false).build().unwrap();
        let zones = allocator.zones();
        let whole = || allocator.alloc_pages(Gfp::KERNEL, Order::PAGEBLOCK).unwrap();
        let mut blocks = [whole(), whole()];
        blocks.iter_mut().for_each(|block| block.fill(1));
        drop(blocks);
        let [first, second] = [0, 1].map(|at| zones.all()[at]);
        // As `retire` does on another thread, after this thread saw the zone in use.
        first.set_retired(true);
        assert_eq!(give_back_of([first, second].into_iter(), 100), 512);
        assert_eq!(give_back_of([second].into_iter(), 512), 512);
        first.set_retired(false);
    }
}
