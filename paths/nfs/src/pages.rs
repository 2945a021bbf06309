//! The page array of a service thread (C9.1, C9.2): the pages that a request's payload is received into.
//!
//! A request uses the first pages of its thread's array, and may take some of them away: a WRITE's pages move into the page
//! cache. Before the next request the thread fills the holes again. [`PageArray`] remembers which slots it handed out. Only
//! those can have become holes, so [`PageArray::refill`] looks at that slice alone, and fills it by one request in the array
//! form, wherever the holes are.
//!
//! # When memory is short
//! A refill that brings some pages asks again at once. Without any it goes one step further, in this order: what is free, what
//! reclaim brings, and a place in the allocator's line, where it sleeps until a page is freed for it or until the server
//! stops. It holds the pages that it has while it sleeps, as a thread of Linux's RPC server does.
//!
//! # What is promised
//! - A1 Slots outside of the slice that is `consumed` are full, unless a refill was stopped before they ever were.
//! - A2 After a refill that was not stopped, all slots are full and nothing is consumed.
//! - A3 Every hole is found once for each refill that began with it, and filled at most once: as many pages as holes are
//!   counted, less the holes that stopped refills left.
//!
//! An array belongs to one thread, which takes no lock to refill it. What it counts is added up by [`PageCounters`].

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pagemill::{Allocator, Bulk, Cancel, Filled, Gfp, PAGE_SIZE, Page};
use serde::Serialize;

use crate::sync::lock;

/// Slots of an array: a payload of 1 MiB, and three pages for the headers and for data that do not begin at a page's boundary, as
/// in Linux's sunrpc.
pub const SLOTS: usize = (1 << 20) / PAGE_SIZE + 3;

/// How long a refill sleeps unless it is woken: for ever.
const UNTIL_WOKEN: Duration = Duration::MAX;

/// The server stops: the array may still have holes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stopped;

/// The pages of one service thread.
///
/// ```
/// use pagemill::{Allocator, Cancel};
/// use pagemill_nfs::pages::{PageArray, PageCounters};
/// use std::sync::Arc;
/// let (counters, stop) = (Arc::new(PageCounters::default()), Cancel::new());
/// let mut array = PageArray::new(Allocator::global(), counters.clone());
/// array.refill(&stop).unwrap();
/// // A request of 8192 bytes comes, and its second page goes to the page cache.
/// let page = array.payload(8192)[1].take();
/// array.refill(&stop).unwrap();
/// assert!(array.payload(8192).iter().all(Option::is_some));
/// let counts = counters.snapshot();
/// assert_eq!((counts.refills, counts.pages, counts.holes), (2, 259 + 1, 259 + 1));
/// # drop(page);
/// ```
#[derive(Debug)]
pub struct PageArray {
    slots: Box<[Option<Page>; SLOTS]>,
    /// The slots that were handed out since the last refill, and those between them.
    consumed: Range<usize>,
    /// Whether a refill has a call for each hole.
    is_one_by_one: bool,
    allocator: Allocator,
    counts: Arc<Counts>,
}

impl PageArray {
    /// An empty array. All of it counts as consumed, so that the first refill fills it.
    pub fn new(allocator: &Allocator, counters: Arc<PageCounters>) -> Self {
        let (slots, counts) = (Box::new([const { None }; SLOTS]), counters.another());
        Self { slots, consumed: 0..SLOTS, is_one_by_one: false, allocator: allocator.clone(), counts }
    }

    /// Refills by a call for each hole from now on, which is for comparison only. It is a bulk request again where memory is
    /// short.
    #[must_use]
    pub fn one_by_one(self) -> Self {
        Self { is_one_by_one: true, ..self }
    }

    /// Fills the holes of the slice that was consumed. If nothing was, it does nothing, and counts nothing.
    ///
    /// It asks at once for as many pages as there are. If there are none it waits, without polling, until memory is freed.
    ///
    /// # Errors
    /// [`Stopped`]: `stop` is cancelled and there are holes to look for. That also ends a wait, at once. A later refill goes on
    /// with the same slice.
    ///
    /// # Panics
    /// The allocator manages no page that a plain request may have, or the thread is inside of a shrinker.
    pub fn refill(&mut self, stop: &Cancel) -> Result<(), Stopped> {
        let consumed = self.consumed.clone();
        if consumed.is_empty() {
            return Ok(());
        }
        if stop.is_cancelled() {
            return Err(Stopped);
        }
        if self.is_one_by_one && self.fill_one_by_one() {
            add(&self.counts.refills, 1);
            self.consumed = 0..0;
            return Ok(());
        }
        // What is free, and no more: the allocator's shortest path.
        let n = consumed.len();
        let first = self.fill(Bulk::up_to(n).gfp(Gfp::NOWAIT));
        add(&self.counts.refills, 1);
        add(&self.counts.holes, n - first.occupied + first.added);
        if first.occupied < n {
            return self.refill_short(first, stop);
        }
        self.consumed = 0..0;
        Ok(())
    }

    /// The rest of a refill that found too few free pages.
    #[cold]
    #[inline(never)]
    fn refill_short(&mut self, mut last: Filled, stop: &Cancel) -> Result<(), Stopped> {
        let n = self.consumed.len();
        let mut may_sleep = false;
        while last.occupied < n {
            add(&self.counts.short_refills, usize::from(last.added > 0));
            if stop.is_cancelled() {
                return Err(Stopped);
            }
            last = if may_sleep {
                add(&self.counts.sleeps, 1);
                let began = Instant::now();
                let filled = self.fill(Bulk::up_to(n).timeout(UNTIL_WOKEN).cancel(stop));
                add(&self.counts.slept_ns, began.elapsed().as_nanos() as usize);
                filled
            } else {
                self.fill(Bulk::up_to(n).gfp(Gfp::KERNEL | Gfp::NORETRY))
            };
            may_sleep = last.added == 0;
        }
        self.consumed = 0..0;
        Ok(())
    }

    /// A call for each hole of the slice that was consumed. False: free pages ended before.
    #[inline(never)]
    fn fill_one_by_one(&mut self) -> bool {
        let mut filled = 0;
        for hole in self.slots[self.consumed.clone()].iter_mut().filter(|slot| slot.is_none()) {
            *hole = self.allocator.alloc_page(Gfp::NOWAIT).ok();
            if hole.is_none() {
                break;
            }
            filled += 1;
        }
        add(&self.counts.pages, filled);
        add(&self.counts.holes, filled);
        self.slots[self.consumed.clone()].iter().all(Option::is_some)
    }

    /// One request for the holes of the slice that was consumed.
    #[inline(always)]
    fn fill(&mut self, request: Bulk<'_>) -> Filled {
        let slots = &mut self.slots[self.consumed.clone()];
        match self.allocator.alloc_pages_bulk_array(request, slots) {
            Ok(filled) => {
                add(&self.counts.pages, filled.added);
                filled
            }
            // It has no least number, so no shortage is an error.
            Err(error) => panic!("a refill of {} slots: {error}", slots.len()),
        }
    }

    /// The first pages, enough for `bytes`. The caller may take them. The next refill looks at them, beside those that were handed
    /// out before.
    ///
    /// # Panics
    /// `bytes` are more than [`SLOTS`] pages have.
    pub fn payload(&mut self, bytes: usize) -> &mut [Option<Page>] {
        self.slots(0..bytes.div_ceil(PAGE_SIZE))
    }

    /// The pages of these slots. The caller may take them. The next refill looks at them, beside those that were handed out before
    /// and those between.
    ///
    /// # Panics
    /// A slot is not below [`SLOTS`].
    pub fn slots(&mut self, slots: Range<usize>) -> &mut [Option<Page>] {
        let handed = &mut self.slots[slots.clone()];
        if self.consumed.is_empty() {
            self.consumed = slots;
        } else if !slots.is_empty() {
            self.consumed = self.consumed.start.min(slots.start)..self.consumed.end.max(slots.end);
        }
        handed
    }
}

/// What all arrays of a server have counted. Each array writes to counters of its own, so that threads do not share a cache line.
#[derive(Default, Debug)]
pub struct PageCounters {
    /// Those of each array that was made. They stay when the array is dropped.
    arrays: Mutex<Vec<Arc<Counts>>>,
}

/// What one array counts. Only the array's owner writes.
#[derive(Default, Debug)]
#[repr(align(64))]
struct Counts {
    refills: AtomicU64,
    pages: AtomicU64,
    holes: AtomicU64,
    short_refills: AtomicU64,
    sleeps: AtomicU64,
    slept_ns: AtomicU64,
}

/// Counts on. There is one writer, so the sum needs no locked instruction. Relaxed: nothing else is read by what it says.
fn add(counter: &AtomicU64, more: usize) {
    counter.store(counter.load(Relaxed) + more as u64, Relaxed);
}

/// What was counted, at one moment. Names are those of the JSON.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize)]
pub struct PageCounts {
    /// Refills that looked at a slice.
    pub refills: u64,
    /// Pages that they filled in.
    pub pages: u64,
    /// Holes that they found. A hole that a stopped refill left is found again by the next one.
    pub holes: u64,
    /// Requests that brought some of the missing pages, and not all.
    pub short_refills: u64,
    /// Requests that waited because not one page could be had.
    pub sleeps: u64,
    /// How long these took, in nanoseconds.
    pub slept_ns: u64,
}

impl PageCounters {
    fn another(&self) -> Arc<Counts> {
        let counts = Arc::new(Counts::default());
        lock(&self.arrays).push(counts.clone());
        counts
    }

    /// The sums over all arrays. While threads refill, the figures of one array may be from slightly different moments.
    pub fn snapshot(&self) -> PageCounts {
        let arrays = lock(&self.arrays);
        let sum = |of: fn(&Counts) -> &AtomicU64| arrays.iter().map(|counts| of(counts).load(Relaxed)).sum();
        PageCounts {
            refills: sum(|counts| &counts.refills),
            pages: sum(|counts| &counts.pages),
            holes: sum(|counts| &counts.holes),
            short_refills: sum(|counts| &counts.short_refills),
            sleeps: sum(|counts| &counts.sleeps),
            slept_ns: sum(|counts| &counts.slept_ns),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagemill::{Memory, PageList, Shrink, Shrinker};
    use std::sync::mpsc::{Receiver, channel};
    use std::thread;

    /// Longer than any machine needs. Only a refill that hangs waits for it.
    const HANGS: Duration = Duration::from_secs(60);

    /// All threads share one list of free pages, so that a request finds all pages that are free.
    fn allocator(pages: usize) -> Allocator {
        Allocator::builder().memory(Memory::anonymous(pages)).cpus(1, || 0).build().unwrap()
    }

    fn array(allocator: &Allocator) -> (PageArray, Arc<PageCounters>) {
        let counters = Arc::new(PageCounters::default());
        (PageArray::new(allocator, counters.clone()), counters)
    }

    fn full(allocator: &Allocator) -> (PageArray, Arc<PageCounters>) {
        let (mut array, counters) = array(allocator);
        array.refill(&Cancel::new()).unwrap();
        (array, counters)
    }

    #[test]
    fn a_refill_one_by_one_fills_and_counts_what_one_call_does_and_waits_where_pages_end() {
        let allocator = allocator(1024);
        let counters = Arc::new(PageCounters::default());
        let mut array = PageArray::new(&allocator, counters.clone()).one_by_one();
        array.refill(&Cancel::new()).unwrap();
        for at in [3, 9, 10] {
            array.slots(0..20)[at] = None;
        }
        array.refill(&Cancel::new()).unwrap();
        assert!(holes(&array).is_empty());
        let counts = counters.snapshot();
        assert_eq!((counts.refills, counts.pages, counts.holes), (2, SLOTS as u64 + 3, SLOTS as u64 + 3));
        assert_eq!(allocator.stats().bulk_alloc.iter().sum::<u64>(), 0, "it makes no bulk call");
        // Two holes and one free page: the page of the other hole comes later.
        let all = take_all(&allocator);
        let (a, b) = (array.slots(0..2)[0].take(), array.slots(0..2)[1].take());
        drop(a);
        let filled = thread::scope(|scope| {
            let filled = scope.spawn(|| array.refill(&Cancel::new()));
            while counters.snapshot().sleeps == 0 {
                thread::yield_now();
            }
            drop(b);
            filled.join().unwrap()
        });
        assert_eq!((filled, holes(&array).len()), (Ok(()), 0));
        let counts = counters.snapshot();
        assert_eq!((counts.pages, counts.holes), (SLOTS as u64 + 5, SLOTS as u64 + 5));
        drop(all);
    }

    fn holes(array: &PageArray) -> Vec<usize> {
        (0..SLOTS).filter(|&at| array.slots[at].is_none()).collect()
    }

    /// Takes all free pages.
    fn take_all(allocator: &Allocator) -> PageList {
        let mut all = PageList::new();
        while allocator.alloc_pages_bulk_list(Bulk::up_to(64).gfp(Gfp::NOWAIT), &mut all).unwrap().blocks > 0 {}
        all
    }

    /// Refills on another thread. Returns when the refill waits for memory.
    fn refill_asleep(mut array: PageArray, allocator: &Allocator, stop: &Cancel) -> Receiver<(PageArray, bool)> {
        let (done, result) = channel();
        let stop = stop.clone();
        thread::spawn(move || {
            let is_stopped = array.refill(&stop) == Err(Stopped);
            done.send((array, is_stopped))
        });
        let began = Instant::now();
        while allocator.stats().waiting == 0 {
            assert!(began.elapsed() < HANGS, "the refill does not wait");
            thread::yield_now();
        }
        result
    }

    #[test]
    fn a_new_array_is_filled_whole_and_an_array_that_nobody_used_is_not_looked_at() {
        let allocator = allocator(1024);
        let (mut array, counters) = full(&allocator);
        assert_eq!(holes(&array), Vec::<usize>::new());
        let counts = PageCounts { refills: 1, pages: 259, holes: 259, ..PageCounts::default() };
        assert_eq!(counters.snapshot(), counts);
        let calls = allocator.stats().bulk_alloc;
        array.slots[7] = None; // Nobody could: it was not handed out.
        array.refill(&Cancel::new()).unwrap();
        assert_eq!((holes(&array), counters.snapshot(), allocator.stats().bulk_alloc), (vec![7], counts, calls));
    }

    #[test]
    fn only_the_slice_that_was_consumed_is_looked_at() {
        let allocator = allocator(1024);
        let (mut array, counters) = full(&allocator);
        array.payload(5 * PAGE_SIZE - 1)[3] = None;
        (array.slots[5], array.slots[200]) = (None, None);
        array.refill(&Cancel::new()).unwrap();
        assert_eq!((holes(&array), counters.snapshot().holes), (vec![5, 200], 259 + 1));
        array.slots(190..210)[0] = None;
        array.refill(&Cancel::new()).unwrap();
        assert_eq!((holes(&array), counters.snapshot().holes), (vec![5], 259 + 1 + 2));
    }

    #[test]
    fn what_was_consumed_only_grows_until_the_next_refill() {
        let (mut array, _) = full(&allocator(1024));
        array.slots(100..101)[0] = None;
        assert_eq!((array.payload(0).len(), array.consumed.clone()), (0, 100..101));
        array.payload(10 * PAGE_SIZE)[9] = None;
        assert_eq!((array.payload(1).len(), array.consumed.clone()), (1, 0..101));
        array.refill(&Cancel::new()).unwrap();
        assert_eq!((holes(&array), array.consumed.len()), (vec![], 0));
    }

    #[test]
    fn scattered_holes_are_filled_and_other_pages_stay() {
        let (mut array, counters) = full(&allocator(1024));
        let taken = |at: &usize| at % 3 == 1 || *at == 128;
        let payload = array.payload(129 * PAGE_SIZE);
        (0..129).filter(taken).for_each(|at| payload[at] = None);
        let before: Vec<Option<usize>> = array.slots.iter().map(|slot| slot.as_ref().map(|page| page.addr())).collect();
        let empty = holes(&array).len() as u64;
        array.refill(&Cancel::new()).unwrap();
        let after: Vec<usize> = array.slots.iter().flatten().map(|page| page.addr()).collect();
        assert_eq!(after.len(), SLOTS);
        assert!(before.iter().zip(&after).all(|(old, new)| old.is_none_or(|old| old == *new)));
        let distinct: std::collections::BTreeSet<_> = after.iter().collect();
        assert_eq!((distinct.len(), empty), (SLOTS, 44));
        let counts = counters.snapshot();
        assert_eq!((counts.refills, counts.holes, counts.pages), (2, 259 + empty, 259 + empty));
    }

    /// 200 pages are free, so the refill brings these, finds none, and sleeps until the others are freed.
    #[test]
    fn a_short_refill_keeps_what_came_sleeps_and_is_woken_by_freed_pages() {
        let allocator = allocator(1024);
        let mut others = take_all(&allocator);
        (0..200).for_each(|_| drop(others.pop()));
        let (array, counters) = array(&allocator);
        let result = refill_asleep(array, &allocator, &Cancel::new());
        let asleep = counters.snapshot();
        assert_eq!((asleep.refills, asleep.holes, asleep.pages), (1, 259, 200));
        assert_eq!((asleep.short_refills, asleep.sleeps, asleep.slept_ns), (1, 1, 0));
        drop(others);
        let (array, is_stopped) = result.recv_timeout(HANGS).expect("freed pages wake the refill");
        assert!(!is_stopped && holes(&array).is_empty() && array.consumed.is_empty());
        let counts = counters.snapshot();
        assert_eq!((counts.refills, counts.holes, counts.pages), (1, 259, 259), "every hole was filled once");
        assert!(counts.slept_ns > 0 && counts.sleeps <= allocator.stats().waits, "{counts:?}");
    }

    #[test]
    fn a_refill_of_one_hole_is_woken_by_one_page() {
        let allocator = allocator(1024);
        let (mut array, counters) = full(&allocator);
        let page = array.payload(1)[0].take();
        let others = take_all(&allocator);
        let result = refill_asleep(array, &allocator, &Cancel::new());
        drop(page);
        let (array, is_stopped) = result.recv_timeout(HANGS).expect("a freed page wakes the refill");
        assert!(!is_stopped && holes(&array).is_empty());
        let counts = counters.snapshot();
        assert_eq!((counts.sleeps, counts.short_refills, counts.pages), (1, 0, 259 + 1));
        drop(others);
    }

    /// A cache that frees all its pages.
    struct Cache(Mutex<PageList>);

    impl Shrinker for Cache {
        fn shrink(&self, _: Shrink) -> usize {
            self.0.try_lock().map_or(0, |mut pages| std::mem::take(&mut *pages).count())
        }
    }

    #[test]
    fn a_refill_that_reclaim_serves_does_not_sleep() {
        let allocator = allocator(1024);
        let (mut array, counters) = full(&allocator);
        let taken: Vec<_> = array.payload(4 * PAGE_SIZE).iter_mut().map(Option::take).collect();
        let cache = Arc::new(Cache(Mutex::new(take_all(&allocator))));
        let registered = allocator.register_shrinker(cache);
        array.refill(&Cancel::new()).unwrap();
        let counts = counters.snapshot();
        assert_eq!((counts.pages, counts.sleeps, counts.slept_ns), (259 + 4, 0, 0));
        assert_eq!(allocator.stats().reclaim_direct, 1);
        drop((taken, registered));
    }

    #[test]
    fn a_stop_ends_the_wait_and_a_later_refill_fills_the_same_slice() {
        let allocator = allocator(1024);
        let (mut array, counters) = full(&allocator);
        let taken: Vec<_> = array.payload(4 * PAGE_SIZE).iter_mut().map(Option::take).collect();
        let (others, stop) = (take_all(&allocator), Cancel::new());
        let result = refill_asleep(array, &allocator, &stop);
        stop.cancel();
        let (mut array, is_stopped) = result.recv_timeout(HANGS).expect("a stop ends the wait");
        assert_eq!((is_stopped, holes(&array)), (true, vec![0, 1, 2, 3]));
        drop((taken, others));
        assert_eq!((array.refill(&stop), holes(&array).len()), (Err(Stopped), 4), "stopped, although pages are free");
        let counts = counters.snapshot();
        assert_eq!((counts.refills, counts.holes - counts.pages), (2, 4), "as many holes as it left");
        assert_eq!(array.refill(&Cancel::new()), Ok(()));
        assert_eq!((holes(&array), counters.snapshot().pages), (vec![], 259 + 4));
    }

    #[test]
    fn counters_add_up_over_threads_and_stay_when_an_array_is_dropped() {
        let (allocator, counters) = (allocator(4096), Arc::new(PageCounters::default()));
        thread::scope(|scope| {
            for thread in 1..=4 {
                let mut array = PageArray::new(&allocator, counters.clone());
                scope.spawn(move || {
                    for round in 0..100 {
                        array.refill(&Cancel::new()).unwrap();
                        array
                            .payload(SLOTS * PAGE_SIZE)
                            .iter_mut()
                            .skip(round % 7)
                            .step_by(thread)
                            .for_each(|slot| *slot = None);
                    }
                });
            }
        });
        let of = |thread: usize| (0..99).map(move |round| (SLOTS - round % 7).div_ceil(thread)).sum::<usize>();
        let holes = (1..=4).map(|thread| SLOTS + of(thread)).sum::<usize>() as u64;
        let wanted = PageCounts { refills: 400, pages: holes, holes, ..PageCounts::default() };
        assert_eq!(counters.snapshot(), wanted);
        assert_eq!(allocator.stats().allocated - allocator.stats().freed, 0);
    }
}
