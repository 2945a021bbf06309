//! Rows of the table `page-pool`: pages that go to and fro between a consumer and those that it hands them to.
//!
//! This file has the consumer's own loop: N pages taken, then put back in an order that was written down beforehand.
//! [`Lane`] is the object-safe interface to it, and it is compiled for each [`Stock`]. The other parts of the table are
//! in files of their own: pages that come back from another thread (`returned`), the pool's requests of the allocator
//! (`refill`), and pages with device addresses (`device`).

pub(crate) mod device;
pub(crate) mod refill;
pub(crate) mod returned;

use std::hint::black_box;
use std::marker::PhantomData;
use std::slice;
use std::time::{Duration, Instant};

use pagemill::{Allocator, Gfp, Page, PagePool, PoolPage};

use crate::rows::pagemill::{SPARE_PAGES, open, refused};
use crate::rows::stock::{EachOf, InBulk, Singly, Stock};
use crate::rows::{Kind, Row, Unavailable, backend_named, rust_peers};
use crate::subject::{Flaw, check_pages};

/// Pages of a bulk call.
pub(crate) const BULK: usize = 64;

/// What the names of the rows end in that have a call for [`BULK`] pages.
pub(crate) const IN_BULK: &str = "-64";

/// A row of the consumer's loop, opened for so many pages.
pub(crate) type LaneRow = Row<usize, Box<dyn Lane>>;

/// The timed loop over pages that one thread takes and puts back.
pub(crate) trait Lane {
    /// Takes as many pages as `back` has places, checks that they are distinct and aligned, and puts them back.
    fn verify(&mut self, back: &[u16]) -> Result<(), Flaw>;

    /// Takes the pages and puts them back `reps` times, timed as a whole: first the page of the slot `back[0]`.
    fn rounds(&mut self, back: &[u16], reps: usize) -> Result<Duration, Flaw>;
}

impl LaneRow {
    /// A row that puts pages back one by one.
    fn singly<S: Stock + 'static>(
        name: &'static str,
        kind: Kind,
        open: impl Fn(usize) -> Result<S, Unavailable> + 'static,
    ) -> LaneRow {
        Row::plain(name, kind, move |n| Ok(Box::new(Held::<S, 1>::new(open(n)?, n)) as Box<dyn Lane>))
    }

    /// A row that gathers [`BULK`] pages in their order, and puts them back with one call.
    fn in_bulk<S: Stock + 'static>(
        name: &'static str,
        kind: Kind,
        open: impl Fn(usize) -> Result<S, Unavailable> + 'static,
    ) -> LaneRow {
        Row::plain(name, kind, move |n| Ok(Box::new(Held::<S, BULK>::new(open(n)?, n)) as Box<dyn Lane>))
    }
}

/// The rows, Pagemill's on that backend.
pub(crate) fn rows(backend: &'static str) -> Vec<LaneRow> {
    let allocator = move |n| allocator_for(backend, n);
    let mut rows = vec![
        LaneRow::singly("page-pool", Kind::Ours, move |n| Ok(OfPool::<OneByOne>::new(&allocator(n)?))).on(backend),
        LaneRow::in_bulk("page-pool-64", Kind::Ours, move |n| Ok(OfPool::<ManyAtOnce>::new(&allocator(n)?)))
            .on(backend),
        LaneRow::singly("page-pool-drop", Kind::Ours, move |n| Ok(OfPool::<Dropped>::new(&allocator(n)?))).on(backend),
        LaneRow::in_bulk("page-pool-drop-64", Kind::Ours, move |n| Ok(OfPool::<DroppedAtOnce>::new(&allocator(n)?)))
            .on(backend),
        LaneRow::singly("pagemill-single", Kind::Ours, move |n| Ok(Singly(allocator(n)?))).on(backend),
        LaneRow::in_bulk("pagemill-array-64", Kind::Ours, move |n| Ok(InBulk(allocator(n)?))).on(backend),
    ];
    rows.extend([
        LaneRow::singly("page-vec", Kind::Floor, move |n| FreeList::new(&allocator(n)?, n)),
        LaneRow::singly("array-queue", Kind::Peer, |n| Ok(EachOf(rust_peers::queue_of(n)?))),
    ]);
    #[cfg(feature = "dpdk")]
    rows.extend(super::dpdk::lane_rows());
    rows
}

fn allocator_for(backend: &'static str, pages: usize) -> Result<Allocator, Unavailable> {
    open(backend_named(backend), pages + SPARE_PAGES)
}

/// A stock, and the slots that hold what was taken. `AT_ONCE` pages go back with one call.
struct Held<S: Stock, const AT_ONCE: usize> {
    stock: S,
    slots: Vec<Option<S::Page>>,
    /// Pages on their way back, in their order.
    gathered: Vec<Option<S::Page>>,
}

impl<S: Stock, const AT_ONCE: usize> Held<S, AT_ONCE> {
    fn new(stock: S, n: usize) -> Self {
        let empty = |n| std::iter::repeat_with(|| None).take(n).collect();
        Self { stock, slots: empty(n), gathered: empty(AT_ONCE) }
    }

    #[inline]
    fn take(&mut self) -> bool {
        self.slots.chunks_mut(BULK).all(|slots| self.stock.fill(slots))
    }

    #[inline]
    fn put(&mut self, back: &[u16]) {
        if AT_ONCE == 1 {
            for &at in back {
                self.stock.free(slice::from_mut(&mut self.slots[usize::from(at)]));
            }
            return;
        }
        for back in back.chunks(AT_ONCE) {
            for (place, &at) in self.gathered.iter_mut().zip(back) {
                *place = self.slots[usize::from(at)].take();
            }
            self.stock.free(&mut self.gathered[..back.len()]);
        }
    }
}

impl<S: Stock, const AT_ONCE: usize> Lane for Held<S, AT_ONCE> {
    fn verify(&mut self, back: &[u16]) -> Result<(), Flaw> {
        let is_complete = self.take();
        let pages: Vec<usize> = self.slots.iter().flatten().map(S::at).collect();
        self.put(back);
        is_complete.then_some(()).ok_or(Flaw::Short { wanted: back.len() })?;
        check_pages(pages, back.len())
    }

    #[inline(never)]
    fn rounds(&mut self, back: &[u16], reps: usize) -> Result<Duration, Flaw> {
        let mut is_complete = true;
        let start = Instant::now();
        for _ in 0..reps {
            is_complete &= self.take();
            black_box(&mut self.slots);
            self.put(back);
            black_box(&mut self.slots);
        }
        let elapsed = start.elapsed();
        is_complete.then_some(elapsed).ok_or(Flaw::Short { wanted: back.len() })
    }
}

/// How a program takes pages from a pool, and how they come back.
trait Way: 'static {
    fn take(pool: &mut PagePool, slots: &mut [Option<PoolPage>]) -> bool;
    fn put(pool: &mut PagePool, slots: &mut [Option<PoolPage>]);
}

/// `alloc` and `put`: by the cache, and what it has no room for by the ring.
struct OneByOne;

impl Way for OneByOne {
    #[inline]
    fn take(pool: &mut PagePool, slots: &mut [Option<PoolPage>]) -> bool {
        for slot in slots {
            *slot = pool.alloc(Gfp::NOWAIT).ok();
            if slot.is_none() {
                return false;
            }
        }
        true
    }

    #[inline]
    fn put(pool: &mut PagePool, slots: &mut [Option<PoolPage>]) {
        slots.iter_mut().filter_map(Option::take).for_each(|page| pool.put(page));
    }
}

/// `alloc_bulk` and `put_bulk`.
struct ManyAtOnce;

impl Way for ManyAtOnce {
    #[inline]
    fn take(pool: &mut PagePool, slots: &mut [Option<PoolPage>]) -> bool {
        pool.alloc_bulk(Gfp::NOWAIT, slots).is_ok_and(|filled| filled == slots.len())
    }

    #[inline]
    fn put(pool: &mut PagePool, slots: &mut [Option<PoolPage>]) {
        pool.put_bulk(slots);
    }
}

/// `alloc`, and handles that are dropped: by the ring, as from any other thread.
struct Dropped;

impl Way for Dropped {
    #[inline]
    fn take(pool: &mut PagePool, slots: &mut [Option<PoolPage>]) -> bool {
        OneByOne::take(pool, slots)
    }

    #[inline]
    fn put(_: &mut PagePool, slots: &mut [Option<PoolPage>]) {
        slots.fill_with(|| None);
    }
}

/// `alloc_bulk`, and `PoolPage::put_bulk`: by the ring, in one section of it.
struct DroppedAtOnce;

impl Way for DroppedAtOnce {
    #[inline]
    fn take(pool: &mut PagePool, slots: &mut [Option<PoolPage>]) -> bool {
        ManyAtOnce::take(pool, slots)
    }

    #[inline]
    fn put(_: &mut PagePool, slots: &mut [Option<PoolPage>]) {
        PoolPage::put_bulk(slots);
    }
}

/// Pagemill's `PagePool`.
struct OfPool<W> {
    pool: PagePool,
    way: PhantomData<W>,
}

impl<W: Way> OfPool<W> {
    fn new(allocator: &Allocator) -> Self {
        Self { pool: PagePool::pages(allocator), way: PhantomData }
    }
}

impl<W: Way> Stock for OfPool<W> {
    type Page = PoolPage;

    #[inline]
    fn fill(&mut self, slots: &mut [Option<PoolPage>]) -> bool {
        W::take(&mut self.pool, slots)
    }

    #[inline]
    fn free(&mut self, slots: &mut [Option<PoolPage>]) {
        W::put(&mut self.pool, slots);
    }

    fn at(page: &PoolPage) -> usize {
        page.addr()
    }
}

/// A floor: the free list that a program writes itself, a `Vec` of pages. It never gives a page back.
struct FreeList(Vec<Page>);

impl FreeList {
    fn new(allocator: &Allocator, pages: usize) -> Result<Self, Unavailable> {
        let pages = (0..pages).map(|_| allocator.alloc_page(Gfp::KERNEL));
        Ok(Self(pages.collect::<Result<_, _>>().map_err(refused)?))
    }
}

impl Stock for FreeList {
    type Page = Page;

    #[inline]
    fn fill(&mut self, slots: &mut [Option<Page>]) -> bool {
        for slot in slots {
            *slot = self.0.pop();
            if slot.is_none() {
                return false;
            }
        }
        true
    }

    #[inline]
    fn free(&mut self, slots: &mut [Option<Page>]) {
        slots.iter_mut().filter_map(Option::take).for_each(|page| self.0.push(page));
    }

    fn at(page: &Page) -> usize {
        page.addr()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the check that every cell makes before it is timed, with pages that come back in a mixed order.
    #[test]
    fn every_row_hands_out_distinct_pages_and_takes_them_back_in_any_order() {
        for backend in ["rseq", "portable"] {
            for row in rows(backend) {
                for n in [1, BULK, 128, 1024] {
                    let mut lane = match (row.open)(n) {
                        Ok(lane) => lane,
                        Err(reason) => {
                            println!("skipped {} {backend}: {reason}", row.name);
                            continue;
                        }
                    };
                    let mut back: Vec<u16> = (0..n as u16).collect();
                    fastrand::Rng::with_seed(n as u64).shuffle(&mut back);
                    for _ in 0..3 {
                        lane.verify(&back).unwrap_or_else(|flaw| panic!("{} {backend} at {n}: {flaw}", row.name));
                        lane.rounds(&back, 2).unwrap_or_else(|flaw| panic!("{} {backend} at {n}: {flaw}", row.name));
                    }
                }
            }
        }
    }

    /// Otherwise the loop would measure the allocator.
    #[test]
    fn in_the_loop_no_page_of_the_pool_goes_to_the_allocator() {
        fn check<W: Way, const AT_ONCE: usize>(n: usize) {
            let allocator = allocator_for("portable", n).unwrap();
            let mut held = Held::<_, AT_ONCE>::new(OfPool::<W>::new(&allocator), n);
            let back: Vec<u16> = (0..n as u16).rev().collect();
            held.rounds(&back, 2).unwrap();
            let before = held.stock.pool.stats();
            held.rounds(&back, 5).unwrap();
            let stats = held.stock.pool.stats();
            assert_eq!((stats.slow, stats.ring_full, stats.in_flight), (before.slow, 0, 0), "{n} at {AT_ONCE}");
        }
        for n in [1, BULK, 128, 1024] {
            check::<OneByOne, 1>(n);
            check::<ManyAtOnce, BULK>(n);
            check::<Dropped, 1>(n);
            check::<DroppedAtOnce, BULK>(n);
        }
    }

    #[test]
    fn a_row_that_runs_short_gets_an_error_instead_of_a_time() {
        let row = LaneRow::singly("short", Kind::Floor, |_| Ok(FreeList(Vec::new())));
        let mut lane = (row.open)(4).map_err(|_| ()).unwrap();
        let short = Flaw::Short { wanted: 4 };
        assert_eq!(lane.verify(&[0, 1, 2, 3]), Err(short.clone()));
        assert_eq!(lane.rounds(&[0, 1, 2, 3], 2).err(), Some(short));
    }
}
