//! Giving free memory back to the system: at once, or when nobody used it for a while.
//!
//! Whole free pageblocks go one at a time: taken from the zone like a block of order 9, released, and returned with the
//! mark that the system has their memory (`pagemill-core/src/idle.rs`), so that they do not go twice. Requests miss one
//! pageblock at most meanwhile. The last pageblock of an arena may be shorter.
//!
//! Of a pageblock with pages out the free ones go at a call of the program's, where that takes no huge page apart: taken
//! from the zone as single frames, they go in runs of [`RUN`] or more, and all are given to the zone again. No mark tells that
//! they went: their states do, fresh again, and the system. Of a retired arena pages go singly too.
//!
//! What a device has registered stays (`arena/pins.rs`).
use crate::allocator::{Allocator, Inner};
use crate::free::finish;
use crate::nodes::Nodes;
use core::iter;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use pagemill_core::{Giving, PAGE_SIZE, PAGEBLOCK_FRAMES, PageCount, Pfn, Tick, Unused};
use pagemill_os::HUGE_PAGE_SIZE;
use std::time::{Duration, Instant};

/// Ages are told in this many parts: what goes back is an eighth older than was said at most.
const PARTS: u16 = 8;

/// Of a pageblock with pages out, free pages go back where so many lie together: each run is a call of the system.
const RUN: usize = 16;

/// After how long free memory goes back.
#[derive(Debug)]
pub(crate) struct Idle {
    part: Duration,
    born: Instant,
    /// The number of the part in which somebody looked last.
    looked: AtomicU64,
}

impl Idle {
    /// Which pageblocks are due; none if that was looked at in this part already.
    fn due(&self, now: Instant) -> Option<Unused> {
        let part = (now.saturating_duration_since(self.born).as_nanos() / self.part.as_nanos()) as u64;
        // Seen in some part, and free for all of those after that one up to this.
        let due = Unused::Since { now: Tick::new(part), ticks: PARTS + 1 };
        (self.looked.fetch_max(part + 1, Relaxed) <= part).then_some(due)
    }
}

impl Nodes {
    /// Has memory go back when it was free for `age`.
    pub(crate) fn give_back_after(&self, age: Duration) {
        let part = (age / u32::from(PARTS)).max(Duration::from_nanos(1));
        self.idle.get_or_init(|| Idle { part, born: Instant::now(), looked: AtomicU64::new(0) });
    }

    /// Gives back what is due, and what came back to retired arenas since. Returns the pages.
    pub(crate) fn give_back_idle(&self, now: Instant) -> usize {
        let Some(due) = self.idle.get().and_then(|idle| idle.due(now)) else { return 0 };
        // What stands in a depot keeps whole pageblocks from going, and perhaps no CPU takes it any more.
        let arenas = self.ever();
        arenas.iter().for_each(|arena| _ = arena.drain_depots());
        arenas.iter().map(|arena| arena.give_back(due, usize::MAX)).sum()
    }
}

impl Inner {
    /// Has the system take the memory of free pageblocks back, above the high mark, all of it or up to `most` pages; of a
    /// retired arena whatever is free. Returns the pages.
    pub(crate) fn give_back(&self, which: Unused, most: usize) -> usize {
        if self.arena.is_of_parent() {
            return 0; // A hole in the parent's memory it would be.
        }
        let Some(_giving) = self.arena.giving_back() else { return 0 };
        if self.is_retired() {
            return self.give_back_unused(Unused::All, usize::MAX, 0) + self.give_back_parts(usize::MAX, 0, 1);
        }
        // How long single pages were free nobody knows.
        let is_all = which == Unused::All;
        // What stays is to be committed: what the system has already is not counted as free.
        let high = self.marks.high;
        let committed = match is_all && self.is_counted_singly() && high > 0 {
            true => self.free_and_resident(),
            false => self.buddy.free_frames().saturating_sub(self.buddy.gone_frames()),
        };
        let most = most.min(committed.saturating_sub(high as usize));
        let given = self.give_back_unused(which, most, high);
        if is_all { given + self.give_back_parts(most - given, high, RUN) } else { given }
    }

    /// May less than a pageblock go back? Not of a page of 2 MiB, which the system would take apart, and of which it takes
    /// nothing where it is hugetlb; nor of a page of the system's own that is larger than Pagemill's.
    fn goes_in_parts(&self) -> bool {
        self.arena.memory().page_bytes() == PAGE_SIZE && self.is_counted_singly()
    }

    /// May the system have a part of a pageblock only, so that it is asked what it has?
    fn is_counted_singly(&self) -> bool {
        self.arena.memory().page_bytes() < HUGE_PAGE_SIZE && (self.is_retired() || !self.nodes.huge_pages())
    }

    /// Free pages that the system has committed, by what it says; without those of runs that are too short to go back.
    fn free_and_resident(&self) -> usize {
        let mut from = 0;
        let parts = iter::from_fn(|| self.buddy.next_part(&mut from));
        parts.map(|part| runs(&pages_of(part.words()), RUN).map(|run| self.resident(run)).sum::<usize>()).sum()
    }

    fn resident(&self, run: &[u32]) -> usize {
        self.arena.resident(run[0], run.len())
    }

    /// Pageblocks of which nothing is taken, up to `most` pages, as long as `floor` stay free.
    fn give_back_unused(&self, which: Unused, most: usize, floor: u32) -> usize {
        let (mut given, mut from) = (0, 0);
        let left = |given: usize| (most - given).min(PAGEBLOCK_FRAMES as usize) as u32;
        while let Some((first, frames)) = self.buddy.take_unused(&mut from, which, floor, left(given)) {
            let n = frames as usize;
            // Of one some may never have been there, or have gone before.
            let resident = if self.is_counted_singly() { self.arena.resident(first.as_u32(), n) } else { n };
            let is_gone = self.arena.give_back(first.as_u32(), n);
            if self.buddy.return_unused(first, is_gone).is_err() {
                unreachable!("{first} was taken a moment ago");
            }
            given += if is_gone { resident } else { 0 };
            self.nodes.waits.note_memory();
        }
        given
    }

    /// What is free in the other pageblocks, up to `most` pages and as long as `floor` stay free, in runs of `least` or more.
    fn give_back_parts(&self, most: usize, floor: u32, least: usize) -> usize {
        let (mut given, mut from, mut is_refused) = (0, 0, !self.goes_in_parts());
        while !is_refused
            && given < most
            && let Some(part) = self.buddy.next_part(&mut from)
        {
            // What is fresh and not resident never was, or went before; what is neither is swapped out.
            let may_go = |run: &[u32]| !self.arena.are_fresh(run[0], run.len()) || self.resident(run) > 0;
            let is_left_alone = part.is_unused || part.is_bound && !self.is_retired();
            if is_left_alone || !runs(&pages_of(part.words()), least).any(may_go) {
                continue;
            }
            let mut words = Vec::new();
            self.buddy.take_part(part.first, floor, &mut |first, mask| words.push((first, mask)));
            let pages = pages_of(words);
            let mut giving = Giving::to(&self.buddy);
            for run in runs(&pages, least) {
                // In pieces that fit into what is left.
                for piece in run.chunks((most - given).max(1)).filter(|piece| may_go(piece)) {
                    let resident = self.resident(piece);
                    if resident <= most - given && !is_refused {
                        is_refused = !self.arena.give_back(piece[0], piece.len());
                        given += if is_refused { 0 } else { resident };
                    }
                }
            }
            giving.give_slice(&pages);
            finish(self, &mut giving);
        }
        given
    }
}

/// The frames whose bits are set: of words, each with the frame of its bit 0.
fn pages_of(words: impl IntoIterator<Item = (Pfn, u64)>) -> Vec<u32> {
    let bits = |(first, mask): (Pfn, u64)| {
        (0..64).filter(move |bit| mask >> bit & 1 == 1).map(move |bit| first.as_u32() + bit)
    };
    words.into_iter().flat_map(bits).collect()
}

/// Those that follow each other, `least` or more together.
fn runs(pages: &[u32], least: usize) -> impl Iterator<Item = &[u32]> {
    pages.chunk_by(|one, next| one + 1 == *next).filter(move |run| run.len() >= least)
}

impl Allocator {
    /// Gives free memory above the high marks back to the system, whatever lists hold included: whole free pageblocks
    /// (2 MiB; the last one of an arena may be shorter), then, where the allocator [uses no huge
    /// pages](crate::Builder::huge_pages) and the system's own have 4 KiB, free parts of the others, of 16 neighbouring pages or
    /// more. What nobody had since it came from there is left alone. Addresses stay, and memory is committed again
    /// when it is next touched. Of arenas that a device has registered nothing goes back until it lets go of them. Returns
    /// the pages that went back.
    ///
    /// ```
    /// use pagemill::{Allocator, Bulk, PageList};
    /// let allocator = Allocator::builder().pages(4096).build()?;
    /// let mut pages = PageList::new();
    /// allocator.alloc_pages_bulk_list(Bulk::exact(4096), &mut pages)?;
    /// drop(pages);
    /// assert_eq!(allocator.give_back().get(), 4096);
    /// assert_eq!(allocator.give_back().get(), 0); // it is gone already
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn give_back(&self) -> PageCount {
        self.give_back_at_most(PageCount::new(usize::MAX))
    }

    /// The same of so many pages at most. A pageblock of which nothing is in use goes whole or not at all.
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
        let nodes = self.nodes();
        nodes.drain_all();
        PageCount::new(give_back_of(nodes.in_use(), pages.get()))
    }

    /// Gives back whole free pageblocks that were free for as long as
    /// [`Builder::give_back_after`](crate::Builder::give_back_after) says, `now` being the time: a part of
    /// [`reclaim_step`](Self::reclaim_step), for programs that keep their own time. Time counts from when a pageblock was
    /// first seen free by such a call; a call within an eighth of the age after the last one does nothing. Returns the
    /// pages that went back.
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
    /// assert_eq!(allocator.give_back_idle(now).get(), 0); // seen
    /// assert_eq!(allocator.give_back_idle(now + minute / 2).get(), 0);
    /// assert_eq!(allocator.give_back_idle(now + minute * 2).get(), 4096);
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn give_back_idle(&self, now: Instant) -> PageCount {
        PageCount::new(self.nodes().give_back_idle(now))
    }
}

/// Gives back up to `most` pages of these arenas together; of one that is retired meanwhile, all that is free.
fn give_back_of(arenas: impl Iterator<Item = &'static Inner>, most: usize) -> usize {
    arenas.fold(0, |given, arena| given + arena.give_back(Unused::All, most.saturating_sub(given)))
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::give_back_of;
    use crate::{Allocator, Gfp, Memory, Order};
    use core::sync::atomic::Ordering::Relaxed;

    #[test]
    fn an_arena_that_is_retired_while_memory_goes_back_gives_all_and_the_others_no_more() {
        let builder = [Memory::anonymous(512), Memory::anonymous(512)]
            .into_iter()
            .fold(Allocator::builder(), |builder, memory| builder.memory(memory));
        let allocator = builder.huge_pages(false).build().unwrap();
        let nodes = allocator.nodes();
        let whole = || allocator.alloc_pages(Gfp::KERNEL, Order::PAGEBLOCK).unwrap();
        let mut blocks = [whole(), whole()];
        blocks.iter_mut().for_each(|block| block.fill(1));
        drop(blocks);
        let [first, second] = [0, 1].map(|at| nodes.all()[at]);
        // As `retire` does on another thread, after this one saw the arena in use.
        first.retired.store(true, Relaxed);
        assert_eq!(give_back_of([first, second].into_iter(), 100), 512);
        assert_eq!(give_back_of([second].into_iter(), 512), 512);
        first.retired.store(false, Relaxed);
    }
}
