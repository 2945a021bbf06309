//! How a pool gets pages from the allocator: with one request for 64, or with 64 requests for one. Each pool of
//! [`POOLS`] has an empty cache, so that its first request refills it; several pools, so that one reading of the clock
//! is for many pages. Afterwards every page is released and freed, untimed, one by one: they never return to a pool.

use std::time::{Duration, Instant};

use pagemill::{Allocator, Bulk, Error, Exact, Gfp, Page, PagePool, PageSource, PoolPage, Source};

use crate::rows::page_pool::{BULK, allocator_for};
use crate::rows::{Kind, Row};
use crate::subject::{Arrange as _, Flaw, ListOrder, check_pages};

/// Pools that are refilled one after the other. The CPU's list has to keep the pages of all of them in their order.
const POOLS: usize = 4;

/// Pages of a repetition.
pub(crate) const REFILL_PAGES: usize = POOLS * BULK;

pub(crate) const BULK_ROW: &str = "refill-bulk";
pub(crate) const SINGLE_ROW: &str = "refill-single";

/// A row of this part.
pub(crate) type RefillRow = Row<(), Box<dyn Refilled>>;

/// What is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Timed {
    /// The request of each pool that refills its cache, for one page of 64.
    Refill,
    /// The part of it that is not the pool's: the source fills 64 slots.
    Source,
}

pub(crate) trait Refilled {
    /// Takes [`REFILL_PAGES`] pages, and checks that they are distinct and aligned, and from a list in this order.
    fn verify(&mut self, order: ListOrder, rng: &mut fastrand::Rng) -> Result<(), Flaw>;

    /// Refills every pool `reps` times. The list is brought into its order before, untimed, and keeps it.
    fn rounds(
        &mut self,
        timed: Timed,
        order: ListOrder,
        reps: usize,
        rng: &mut fastrand::Rng,
    ) -> Result<Duration, Flaw>;
}

/// The rows on that backend.
pub(crate) fn rows(backend: &'static str) -> [RefillRow; 2] {
    let allocator = move || allocator_for(backend, REFILL_PAGES);
    let bulk = move |()| {
        let allocator = allocator()?;
        Ok(Box::new(Pools::new(&allocator, PageSource::pages)) as Box<dyn Refilled>)
    };
    let single = move |()| {
        let allocator = allocator()?;
        Ok(Box::new(Pools::new(&allocator, |allocator| SinglePages(allocator.clone()))) as Box<dyn Refilled>)
    };
    [Row::plain(BULK_ROW, Kind::Ours, bulk), Row::plain(SINGLE_ROW, Kind::Ours, single)].map(|row| row.on(backend))
}

/// The allocator, asked for one page at a time: [`Source::fill`] is not overridden.
struct SinglePages(Allocator);

impl Source for SinglePages {
    type Item = Page;

    #[inline]
    fn alloc(&self, _: Bulk<'_, Exact, Page>) -> Result<Option<Page>, Error> {
        // With the flags of every request in this file.
        self.0.alloc_page(Gfp::NOWAIT).map(Some)
    }

    fn free(&self, page: Page) {
        drop(page);
    }
}

struct Pools<S: Source> {
    /// Their caches are empty between two calls.
    pools: Vec<PagePool<S>>,
    allocator: Allocator,
    /// The page that each pool's refill returned.
    firsts: Vec<PoolPage<S>>,
    /// What the source filled.
    slots: Vec<Option<Page>>,
    held: Vec<Page>,
}

impl<S: Source<Item = Page>> Pools<S> {
    fn new(allocator: &Allocator, source: impl Fn(&Allocator) -> S) -> Self {
        let pools = (0..POOLS).map(|_| PagePool::new(source(allocator))).collect();
        let (firsts, held) = (Vec::with_capacity(POOLS), Vec::with_capacity(REFILL_PAGES));
        let slots = std::iter::repeat_with(|| None).take(REFILL_PAGES).collect();
        Self { pools, allocator: allocator.clone(), firsts, slots, held }
    }

    #[inline(never)]
    fn refill(&mut self) -> bool {
        for pool in &mut self.pools {
            let Ok(page) = pool.alloc(Gfp::NOWAIT) else { return false };
            self.firsts.push(page);
        }
        true
    }

    #[inline(never)]
    fn ask_the_source(&mut self) -> bool {
        let request = Bulk::exact(BULK).gfp(Gfp::NOWAIT);
        let mut parts = self.pools.iter().zip(self.slots.chunks_mut(BULK));
        parts.all(|(pool, slots)| pool.source().fill(request, slots).is_ok_and(|filled| filled == BULK))
    }

    #[inline(never)]
    fn take_all(&mut self) -> bool {
        for pool in &mut self.pools {
            for _ in 0..BULK {
                let Ok(page) = pool.alloc(Gfp::NOWAIT) else { return false };
                self.held.push(PoolPage::release(page));
            }
        }
        true
    }

    /// Empties the caches after [`refill`](Self::refill): the last pool first, so that pages that are freed in this
    /// order lie on the list as they did before.
    fn empty(&mut self) -> bool {
        for (pool, first) in self.pools.iter_mut().zip(self.firsts.drain(..)).rev() {
            self.held.push(PoolPage::release(first));
            for _ in 1..BULK {
                let Ok(page) = pool.alloc(Gfp::NOWAIT) else { return false };
                self.held.push(PoolPage::release(page));
            }
        }
        true
    }

    /// Frees the pages one by one: a bulk free might sort them.
    fn free(&mut self, order: ListOrder, rng: &mut fastrand::Rng) {
        if order == ListOrder::Random {
            rng.shuffle(&mut self.held);
        }
        self.held.clear();
    }
}

impl<S: Source<Item = Page>> Refilled for Pools<S> {
    fn verify(&mut self, order: ListOrder, rng: &mut fastrand::Rng) -> Result<(), Flaw> {
        order.arrange(&self.allocator, rng);
        let is_complete = self.take_all();
        let pages: Vec<usize> = self.held.iter().map(Page::addr).collect();
        self.free(order, rng);
        is_complete.then_some(()).ok_or(Flaw::Short { wanted: REFILL_PAGES })?;
        order.check(&pages)?;
        check_pages(pages, REFILL_PAGES)
    }

    fn rounds(
        &mut self,
        timed: Timed,
        order: ListOrder,
        reps: usize,
        rng: &mut fastrand::Rng,
    ) -> Result<Duration, Flaw> {
        order.arrange(&self.allocator, rng);
        let mut elapsed = Duration::ZERO;
        let mut is_complete = true;
        for _ in 0..reps {
            let start = Instant::now();
            match timed {
                Timed::Refill => {
                    is_complete &= self.refill();
                    elapsed += start.elapsed();
                    is_complete &= self.empty();
                }
                Timed::Source => {
                    is_complete &= self.ask_the_source();
                    elapsed += start.elapsed();
                    // Backwards for the same reason as in `empty`.
                    self.held.extend(self.slots.iter_mut().rev().filter_map(Option::take));
                }
            }
            self.free(order, rng);
        }
        is_complete.then_some(elapsed).ok_or(Flaw::Short { wanted: REFILL_PAGES })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::{Machine, pin_to};

    #[test]
    fn every_repetition_refills_every_pool_from_a_list_that_keeps_its_order() {
        // A thread that moved to another processor would use another list.
        pin_to(Machine::here().main_cpu()).unwrap();
        let mut rng = fastrand::Rng::with_seed(5);
        for backend in ["rseq", "portable"] {
            let Ok(allocator) = allocator_for(backend, REFILL_PAGES) else {
                println!("skipped {backend}");
                continue;
            };
            let mut pools = Pools::new(&allocator, PageSource::pages);
            for order in [ListOrder::Random, ListOrder::InOrder] {
                for timed in [Timed::Refill, Timed::Source] {
                    let slow = |pools: &Pools<_>| pools.pools.iter().map(|pool| pool.stats().slow).sum::<u64>();
                    let before = slow(&pools);
                    pools.rounds(timed, order, 3, &mut rng).unwrap();
                    let wanted = if timed == Timed::Source { 0 } else { 3 * POOLS as u64 };
                    assert_eq!(slow(&pools) - before, wanted, "{timed:?}");
                    assert!(pools.pools.iter().all(|pool| pool.in_flight() == 0));
                    // As the rounds left the list.
                    assert!(pools.take_all());
                    let pages: Vec<usize> = pools.held.iter().map(Page::addr).collect();
                    order.check(&pages).unwrap_or_else(|flaw| panic!("{backend} {order:?} {timed:?}: {flaw}"));
                    pools.free(order, &mut rng);
                }
            }
            for row in rows(backend) {
                let mut refilled = (row.open)(()).map_err(|_| ()).unwrap();
                for order in [ListOrder::Random, ListOrder::InOrder] {
                    refilled.verify(order, &mut rng).unwrap_or_else(|flaw| panic!("{} {backend}: {flaw}", row.name));
                }
            }
        }
    }
}
