//! The pool with a reserve (C5), over pages and over any pair of functions.
use crate::common::{Cache, Rng, is_all, one_cpu, slots, until};
use pagemill::{
    Allocator, Bulk, Cancel, Error, Exact, Exhausted, Gfp, InvalidRequest, Memory, Mempool, Order, Page, PageList,
    Shrink, Shrinker, Source,
};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const RESERVE: usize = 64;

/// A pool whose allocator has nothing left but the pool's reserve.
fn dry_pool() -> (Mempool<pagemill::PageSource<Page>>, PageList) {
    let (_, pool, rest) = dry();
    (pool, rest)
}

fn dry() -> (Allocator, Mempool<pagemill::PageSource<Page>>, PageList) {
    let allocator = one_cpu(Memory::anonymous(RESERVE + 100));
    let pool = Mempool::pages(&allocator, RESERVE).unwrap();
    let mut rest = PageList::new();
    allocator.alloc_pages_bulk_list(Bulk::up_to(1000).gfp(Gfp::NOWAIT), &mut rest).unwrap();
    assert_eq!(rest.len(), 100);
    (allocator, pool, rest)
}

/// Everything that a pool has left.
fn all_of(pool: &Mempool<pagemill::PageSource<Page>>) -> Vec<Option<Page>> {
    let mut all = slots(RESERVE);
    pool.alloc_bulk_array_raw(Bulk::exact(RESERVE).gfp(Gfp::NOWAIT), &mut all).unwrap();
    all
}

fn handed_out(allocator: &Allocator) -> usize {
    allocator.validate().unwrap().handed_out
}

fn assert_short(result: Result<(), Error>, wanted: usize, got: usize) {
    match result {
        Err(Error::Exhausted(short)) => assert_eq!((short.wanted, short.got), (wanted, got)),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_reserve_that_cannot_be_filled_is_refused_whole() {
    let allocator = one_cpu(Memory::anonymous(10));
    assert!(matches!(Mempool::pages(&allocator, 11), Err(Error::Exhausted(short)) if short.got == 10));
    assert_eq!(handed_out(&allocator), 0, "what there was went back");
    assert!(matches!(Mempool::pages(&allocator, 0), Err(Error::Invalid(InvalidRequest::Reserve { .. }))));
    let pool = Mempool::pages(&allocator, 10).unwrap();
    assert_eq!(pool.stats().reserve, 10);
    pool.close().unwrap();
    allocator.close().unwrap();
}

#[test]
fn the_allocator_serves_first_and_the_reserve_all_of_the_rest() {
    let allocator = one_cpu(Memory::anonymous(RESERVE + 10));
    let pool = Mempool::pages(&allocator, RESERVE).unwrap();
    let mut pages = slots(16);
    pool.alloc_bulk_array_raw(Bulk::exact(16).gfp(Gfp::NOWAIT), &mut pages).unwrap();
    assert!(pages.iter().all(Option::is_some));
    let stats = pool.stats();
    assert_eq!((stats.out, stats.reserve, stats.from_reserve), (16, RESERVE - 6, 6));
    // Freed elements refill the reserve before any goes to the allocator (C5.5).
    assert_eq!(pool.free_bulk_raw(&mut pages[..4]), 4);
    assert_eq!(pool.stats().reserve, RESERVE - 2);
    assert_eq!(handed_out(&allocator), RESERVE + 10);
    assert_eq!(pool.free_bulk_raw(&mut pages), 12);
    let stats = pool.stats();
    assert_eq!((stats.out, stats.reserve, stats.low_water), (0, RESERVE, RESERVE - 6));
    assert_eq!(handed_out(&allocator), RESERVE);
}

#[test]
fn a_nowait_request_above_the_reserve_takes_nothing_of_it() {
    let (pool, mut rest) = dry_pool();
    let mut held = slots(RESERVE - 10);
    pool.alloc_bulk_array_raw(Bulk::exact(RESERVE - 10).gfp(Gfp::NOWAIT), &mut held).unwrap();
    drop(rest.pop());
    let mut pages = slots(20);
    let result = pool.alloc_bulk_array_raw(Bulk::exact(20).gfp(Gfp::NOWAIT), &mut pages);
    // One came from the allocator; nineteen are more than the reserve has, so it gives none.
    assert_short(result, 20, 1);
    assert_eq!(pages.iter().flatten().count(), 1);
    assert_eq!(pool.stats().reserve, 10);
    pool.free_bulk_raw(&mut held);
    pool.free_bulk_raw(&mut pages);
    let mut seen = 0;
    let result = pool.alloc_bulk_callback_raw(Bulk::exact(RESERVE).gfp(Gfp::NOWAIT), |page| {
        seen += 1;
        pool.free_raw(page);
    });
    assert_eq!((result, seen), (Ok(()), RESERVE));
}

#[test]
fn only_empty_slots_are_filled() {
    let (pool, _rest) = dry_pool();
    let mut pages = slots(8);
    pages[3] = Some(pool.alloc_raw(Gfp::NOWAIT).unwrap());
    let mine = pages[3].as_ref().map(Page::addr);
    pool.alloc_bulk_array_raw(Bulk::exact(6).gfp(Gfp::NOWAIT), &mut pages).unwrap();
    assert_eq!(pages[3].as_ref().map(Page::addr), mine);
    assert_eq!(
        pages.iter().map(Option::is_some).collect::<Vec<_>>(),
        [true, true, true, true, true, true, false, false]
    );
    assert_eq!(pool.stats().out, 6);
    pool.free_bulk_raw(&mut pages);
}

#[test]
fn requests_above_the_reserve_are_refused_at_once() {
    let (pool, _rest) = dry_pool();
    assert_eq!(
        pool.alloc_bulk_array_raw(Bulk::exact(RESERVE + 1), &mut slots(RESERVE + 1)).unwrap_err(),
        Error::Invalid(InvalidRequest::AboveReserve { count: RESERVE + 1, min_nr: RESERVE })
    );
    assert!(matches!(
        pool.alloc_bulk_array_raw(Bulk::exact(4), &mut slots(3)),
        Err(Error::Invalid(InvalidRequest::ArrayTooShort { slots: 3, count: 4 }))
    ));
    assert_eq!(pool.stats().out, 0);
}

#[test]
fn zero_zeroes_pages_of_the_reserve() {
    let (pool, _rest) = dry_pool();
    let mut pages = slots::<Page>(RESERVE);
    pool.alloc_bulk_array_raw(Bulk::exact(RESERVE), &mut pages).unwrap();
    pages.iter_mut().flatten().for_each(|page| page.fill(0xa5));
    pool.free_bulk_raw(&mut pages);
    pool.alloc_bulk_array_raw(Bulk::exact(RESERVE).gfp(Gfp::NOWAIT | Gfp::ZERO), &mut pages).unwrap();
    assert!(pages.iter().flatten().all(|page| is_all(&page[..], 0)));
    pool.free_bulk_raw(&mut pages);
}

#[test]
fn a_pool_of_blocks_delivers_its_order() {
    let allocator = one_cpu(Memory::anonymous(64));
    let pool = Mempool::blocks(&allocator, Order::new(3).unwrap(), 4).unwrap();
    let mut blocks = slots(4);
    pool.alloc_bulk_array_raw(Bulk::exact(4), &mut blocks).unwrap();
    assert!(blocks.iter().flatten().all(|block| block.len() == 8 * 4096));
    let mut rest: Vec<_> = std::iter::from_fn(|| pool.alloc_raw(Gfp::NOWAIT).ok()).map(Some).collect();
    let error = pool.alloc_raw(Gfp::NOWAIT).unwrap_err();
    assert!(matches!(error, Error::Exhausted(Exhausted { wanted: 1, got: 0, order: 3, .. })), "{error:?}");
    assert!(error.to_string().starts_with("exhausted: wanted 1 of order 3, got 0: "), "{error}");
    pool.free_bulk_raw(&mut rest);
    pool.free_bulk_raw(&mut blocks);
}

#[test]
fn a_wait_ends_when_enough_elements_are_freed() {
    let (pool, _rest) = dry_pool();
    let mut all = all_of(&pool);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let mut pages = slots(RESERVE / 2);
            pool.alloc_bulk_array_raw(Bulk::exact(RESERVE / 2).gfp(Gfp::NOIO), &mut pages).unwrap();
            pool.free_bulk_raw(&mut pages)
        });
        until("a waiter", || pool.stats().waiting > 0);
        // Too few for it: nothing is taken, and it waits on.
        pool.free_bulk_raw(&mut all[..RESERVE / 4]);
        std::thread::sleep(Duration::from_millis(30));
        assert_eq!((pool.stats().waiting, pool.stats().reserve), (1, RESERVE / 4));
        // No request takes from the reserve ahead of it, not even one that does not wait.
        assert!(pool.alloc_raw(Gfp::NOWAIT).is_err());
        assert!(matches!(
            pool.resize(RESERVE / 2 - 1),
            Err(Error::Invalid(InvalidRequest::ReserveAwaited { needed: 32, .. }))
        ));
        pool.free_bulk_raw(&mut all);
        assert_eq!(waiter.join().unwrap(), RESERVE / 2);
    });
    let stats = pool.stats();
    assert_eq!((stats.waits, stats.waiting, stats.reserve, stats.low_water), (1, 0, RESERVE, 0));
    assert!(stats.longest_wait_us > 0 && stats.waited_us >= stats.longest_wait_us);
}

/// Nothing comes back to the pool: after a bounded time the waiting request asks the allocator again (C5.2).
#[test]
fn a_wait_ends_when_the_allocator_gets_pages() {
    let (pool, mut rest) = dry_pool();
    let mut all = all_of(&pool);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let mut pages = slots(RESERVE / 2);
            pool.alloc_bulk_array_raw(Bulk::exact(RESERVE / 2).gfp(Gfp::NOIO), &mut pages).unwrap();
            pages
        });
        until("a waiter", || pool.stats().waiting > 0);
        rest.clear();
        let mut pages = waiter.join().unwrap();
        assert!(pages.iter().all(Option::is_some));
        let stats = pool.stats();
        assert_eq!((stats.waits, stats.from_reserve, stats.reserve), (1, RESERVE as u64, 0), "none of the reserve");
        assert_eq!(stats.out, RESERVE + RESERVE / 2);
        assert_eq!(pool.free_bulk_raw(&mut pages), RESERVE / 2);
    });
    assert_eq!(pool.free_bulk_raw(&mut all), RESERVE);
    pool.close().unwrap();
}

#[test]
fn waits_are_served_in_order_and_end_by_cancel_or_deadline() {
    let (pool, _rest) = dry_pool();
    let mut all = all_of(&pool);
    let start = Instant::now();
    let late = Bulk::exact(1).gfp(Gfp::NOIO).timeout(Duration::from_millis(20));
    assert_short(pool.alloc_bulk_array_raw(late, &mut slots(1)), 1, 0);
    assert!(start.elapsed() >= Duration::from_millis(20));

    let cancel = Cancel::new();
    let order = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let wait_for = |count: usize| until("a waiter", || pool.stats().waiting >= count);
        let cancelled =
            scope.spawn(|| pool.alloc_bulk_array_raw(Bulk::exact(40).gfp(Gfp::NOIO).cancel(&cancel), &mut slots(40)));
        wait_for(1);
        let (pool, order) = (&pool, &order);
        let served: Vec<_> = (0..20)
            .map(|i| {
                let served = scope.spawn(move || {
                    let page = pool.alloc_raw(Gfp::NOIO).unwrap();
                    let turn = order.fetch_add(1, Relaxed);
                    pool.free_raw(page);
                    (i, turn)
                });
                wait_for(2 + i);
                served
            })
            .collect();
        // The first one needs 40, and there is one: the others wait behind it.
        pool.free_bulk_raw(&mut all[..1]);
        std::thread::sleep(Duration::from_millis(30));
        assert_eq!((pool.stats().waiting, order.load(Relaxed)), (21, 0));
        cancel.cancel();
        assert_short(cancelled.join().unwrap(), 40, 0);
        for served in served {
            let (i, turn) = served.join().unwrap();
            assert_eq!(i, turn, "first come, first served");
        }
    });
    pool.free_bulk_raw(&mut all);
    pool.close().unwrap();
}

#[test]
fn a_callback_that_unwinds_loses_no_element() {
    let (pool, mut rest) = dry_pool();
    drop(rest.pop());
    for panics_at in [0, 1, 40, RESERVE - 1] {
        let mut kept = Vec::new();
        let unwound = catch_unwind(AssertUnwindSafe(|| {
            let _ = pool.alloc_bulk_callback_raw(Bulk::exact(RESERVE).gfp(Gfp::NOWAIT), |page| {
                kept.push(Some(page));
                assert!(kept.len() <= panics_at, "on purpose");
            });
        }));
        assert!(unwound.is_err());
        assert_eq!(pool.stats().out, kept.len());
        pool.free_bulk_raw(&mut kept);
        assert_eq!((pool.stats().out, pool.stats().reserve), (0, RESERVE));
    }
}

#[test]
fn a_callback_that_frees_and_unwinds_does_not_enlarge_the_reserve() {
    let (allocator, pool, rest) = dry();
    drop(rest);
    let mut others = all_of(&pool);
    let mut rest = PageList::new();
    allocator.alloc_pages_bulk_list(Bulk::up_to(1000).gfp(Gfp::NOWAIT), &mut rest).unwrap();
    assert_eq!(pool.stats().from_reserve, 0);
    let mut kept = Vec::new();
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        let _ = pool.alloc_bulk_callback_raw(Bulk::exact(RESERVE).gfp(Gfp::NOWAIT), |page| {
            kept.push(Some(page));
            // They take the places of those that the request is about to take.
            pool.free_bulk_raw(&mut others);
            panic!("on purpose");
        });
    }));
    assert!(unwound.is_err());
    assert_eq!((pool.stats().out, pool.stats().reserve), (1, RESERVE));
    pool.free_bulk_raw(&mut kept);
    assert_eq!((pool.stats().out, pool.stats().reserve), (0, RESERVE));
    assert_eq!(handed_out(&allocator), RESERVE + rest.len());
}

#[test]
fn a_request_reclaims_all_missing_pages_before_it_waits() {
    let (allocator, pool, mut rest) = dry();
    let others = all_of(&pool);
    let mut pages = slots(8);
    // One page is free, then none; each time the cache has the others.
    for free in [1, 0] {
        drop(rest.pop().filter(|_| free == 1));
        let cache = Arc::new(Cache::of(core::mem::take(&mut rest)));
        let registered = allocator.register_shrinker(cache.clone());
        let before = allocator.stats();
        pool.alloc_bulk_array_raw(Bulk::exact(8), &mut pages).unwrap();
        let (stats, waits) = (allocator.stats(), pool.stats().waits);
        assert_eq!((stats.reclaim_direct - before.reclaim_direct, stats.waits, waits), (1, 0, 0), "{free} free");
        drop(registered);
        allocator.alloc_pages_bulk_list(Bulk::up_to(1000).gfp(Gfp::NOWAIT), &mut rest).unwrap();
        cache.pages.lock().unwrap().drain(..).for_each(|page| rest.push(page).unwrap());
        pages.iter_mut().for_each(|page| rest.push(page.take().unwrap()).unwrap());
    }
    drop(others);
}

#[test]
fn a_reserve_does_not_shrink_below_a_waiting_request() {
    let (pool, _rest) = dry_pool();
    let mut all = all_of(&pool);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let mut pages = slots(20);
            pool.alloc_bulk_array_raw(Bulk::exact(20).gfp(Gfp::NOIO), &mut pages).unwrap();
            pool.free_bulk_raw(&mut pages);
        });
        until("a waiter", || pool.stats().waiting > 0);
        let refused = pool.resize(19);
        let shrunk = pool.resize(20);
        // As much as the smaller reserve has, and no less than the request needs. Asserted when no request waits any more.
        pool.free_bulk_raw(&mut all[..20]);
        waiting.join().unwrap();
        assert!(
            matches!(refused, Err(Error::Invalid(InvalidRequest::ReserveAwaited { min_nr: 19, needed: 20 }))),
            "{refused:?}"
        );
        shrunk.unwrap();
    });
    pool.resize(1).unwrap();
    pool.free_bulk_raw(&mut all);
    assert_eq!((pool.stats().out, pool.stats().reserve), (0, 1));
}

#[test]
fn a_reserve_grows_and_shrinks() {
    let (pool, mut rest) = dry_pool();
    assert!(matches!(pool.resize(RESERVE + 5), Err(Error::Exhausted(short)) if (short.wanted, short.got) == (5, 0)));
    assert_eq!(pool.stats().min_nr, RESERVE);
    rest.clear();
    pool.resize(RESERVE + 5).unwrap();
    assert_eq!((pool.stats().min_nr, pool.stats().reserve), (RESERVE + 5, RESERVE + 5));
    let mut pages = slots(RESERVE + 5);
    pool.alloc_bulk_array_raw(Bulk::exact(RESERVE + 5), &mut pages).unwrap();
    pool.resize(3).unwrap();
    assert_eq!((pool.stats().min_nr, pool.stats().reserve), (3, 3));
    pool.free_bulk_raw(&mut pages);
    let refused = {
        let page = pool.alloc_raw(Gfp::NOIO).unwrap();
        let refused = pool.close().unwrap_err();
        assert_eq!(refused.out, 1);
        refused.pool.free_raw(page);
        refused.pool
    };
    refused.close().unwrap();
}

#[test]
fn freeing_more_than_was_handed_out_is_misuse() {
    let (allocator, pool, mut rest) = dry();
    let mine = pool.alloc_raw(Gfp::NOWAIT).unwrap();
    let mut slots = [Some(mine), rest.pop(), rest.pop()];
    assert_eq!(pool.free_bulk_raw(&mut slots), 3);
    let stats = pool.stats();
    assert_eq!((stats.out, stats.misused, stats.reserve), (0, 2, RESERVE));
    pool.free_raw(rest.pop().unwrap());
    assert_eq!((pool.stats().out, pool.stats().misused), (0, 3));
    assert_eq!(handed_out(&allocator), RESERVE + rest.len(), "the others went where they are from");
    pool.close().unwrap();
}

#[test]
fn elements_of_another_source_are_refused_by_the_reserve() {
    let order = Order::new(1).unwrap();
    let allocator = one_cpu(Memory::anonymous(16));
    let other = one_cpu(Memory::anonymous(16));
    let pool = Mempool::blocks(&allocator, order, 4).unwrap();
    let page = allocator.alloc_page(Gfp::NOWAIT).unwrap();
    let mut mine: Vec<_> = std::iter::from_fn(|| pool.alloc_raw(Gfp::NOWAIT).ok()).map(Some).collect();
    let out = mine.len();
    assert_eq!((pool.stats().out, pool.stats().reserve), (out, 0));
    pool.free_raw(page.into()); // Of another order.
    pool.free_raw(other.alloc_pages(Gfp::NOWAIT, order).unwrap()); // Of another allocator.
    let stats = pool.stats();
    assert_eq!((stats.out, stats.misused, stats.reserve), (out, 2, 0));
    assert_eq!(handed_out(&other), 0);
    // Some of both at once, fewer than are out.
    let mut both = mine.split_off(3);
    both.extend([(); 2].map(|()| other.alloc_pages(Gfp::NOWAIT, order).ok()));
    pool.free_bulk_raw(&mut both);
    let stats = pool.stats();
    assert_eq!((stats.out, stats.misused, stats.reserve), (3, 4, 4));
    pool.free_bulk_raw(&mut mine);
    let stats = pool.stats();
    assert_eq!((stats.out, stats.misused, stats.reserve), (0, 4, 4));
    pool.close().unwrap();
    assert_eq!(handed_out(&allocator), 0);
}

/// A source that reports wrong counts.
struct Lies {
    /// It reports this many more than it made, or fewer.
    by: isize,
    made: AtomicUsize,
    /// The source fills or delivers this many more than it is asked for, or fewer.
    does: isize,
}

impl Source for Lies {
    type Item = Box<usize>;
    fn alloc(&self, _: Bulk<'_, Exact, Self::Item>) -> Result<Option<Self::Item>, Error> {
        Ok(Some(Box::new(self.made.fetch_add(1, Relaxed))))
    }
    fn free(&self, _: Self::Item) {
        self.made.fetch_sub(1, Relaxed);
    }
    fn fill(&self, request: Bulk<'_, Exact, Self::Item>, slots: &mut [Option<Self::Item>]) -> Result<usize, Error> {
        let most = slots.len().saturating_add_signed(self.does);
        let mut filled = 0_usize;
        for slot in slots.iter_mut().take(most).filter(|slot| slot.is_none()) {
            *slot = self.alloc(request)?;
            filled += 1;
        }
        Ok(filled.saturating_add_signed(self.by))
    }
    fn deliver(
        &self,
        request: Bulk<'_, Exact, Self::Item>,
        count: usize,
        each: &mut dyn FnMut(Self::Item),
    ) -> Result<usize, Error> {
        let count = count.saturating_add_signed(self.does);
        for _ in 0..count {
            self.alloc(request)?.into_iter().for_each(&mut *each);
        }
        Ok(count.saturating_add_signed(self.by))
    }
}

#[test]
fn a_source_that_miscounts_is_misuse_and_breaks_nothing() {
    for (by, does) in
        [(1, 0), (-1, 0), (1, -1), (10, -3), (-10, 0), (isize::MAX, -10), (0, 1), (-2, 2), (3, 2), (1, -10)]
    {
        let pool = Mempool::new(Lies { by, does, made: AtomicUsize::new(0) }, 8).unwrap();
        for n in [1, 5, 8] {
            let request = Bulk::exact(n).gfp(Gfp::NOWAIT);
            let mut items = slots(n);
            pool.alloc_bulk_array_raw(request, &mut items).unwrap();
            assert!(items.iter().all(Option::is_some), "{by} {does}");
            assert_eq!(pool.stats().out, n, "{by} {does}");
            assert_eq!((pool.free_bulk_raw(&mut items), pool.stats().out), (n, 0));
            pool.alloc_bulk_callback_raw(request, |item| items.push(Some(item))).unwrap();
            assert_eq!((items.iter().flatten().count(), pool.stats().out), (n, n), "{by} {does}");
            assert_eq!((pool.free_bulk_raw(&mut items), pool.stats().out), (n, 0));
        }
        pool.free_raw(pool.alloc_raw(Gfp::NOWAIT).unwrap());
        let stats = pool.stats();
        assert_eq!((stats.out, stats.reserve), (0, 8));
        assert!(stats.misused > 0, "{by} {does}");
    }
}

#[test]
fn a_callback_may_free_its_element_at_once() {
    let allocator = one_cpu(Memory::anonymous(RESERVE * 2));
    let pool = Mempool::pages(&allocator, RESERVE).unwrap();
    let mut least = usize::MAX;
    let each = |page| {
        pool.free_raw(page);
        least = least.min(pool.stats().out);
    };
    pool.alloc_bulk_callback_raw(Bulk::exact(RESERVE).gfp(Gfp::NOWAIT), each).unwrap();
    assert_eq!((least, pool.stats().out, pool.stats().misused), (0, 0, 0));
}

#[test]
fn functions_of_a_pool_are_first_called_with_nowait() {
    let flags = Mutex::new(Vec::new());
    let has_memory = AtomicBool::new(true);
    let freed = AtomicUsize::new(0);
    let pool = Mempool::from_fns(
        |gfp| {
            flags.lock().unwrap().push(gfp);
            has_memory.load(Relaxed).then_some(7_u32)
        },
        |_| _ = freed.fetch_add(1, Relaxed),
        2,
    )
    .unwrap();
    has_memory.store(false, Relaxed);
    flags.lock().unwrap().clear();
    let mut three = slots(2);
    pool.alloc_bulk_array_raw(Bulk::exact(2).gfp(Gfp::NOIO), &mut three).unwrap();
    let waits_no_longer = Bulk::exact(1).gfp(Gfp::NOIO).timeout(Duration::ZERO);
    assert_short(pool.alloc_bulk_array_raw(waits_no_longer, &mut slots(1)), 1, 0);
    assert_eq!(*flags.lock().unwrap(), [Gfp::NOWAIT, Gfp::NOWAIT, Gfp::NOIO | Gfp::NORETRY]);
    pool.free_bulk_raw(&mut three);
    drop(pool);
    assert_eq!(freed.load(Relaxed), 2);
}

#[test]
fn threads_that_share_only_the_reserve_all_finish() {
    let (pool, _rest) = dry_pool();
    let turns = 300;
    let served = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (pool, served) = (&pool, &served);
            scope.spawn(move || {
                let mut rng = Rng::new(20_261_120 + thread);
                for turn in 0..turns {
                    let n = 1 + rng.below(RESERVE);
                    let stamp = [thread as u8, turn as u8];
                    let mut pages = slots::<Page>(n);
                    pool.alloc_bulk_array_raw(Bulk::exact(n).gfp(Gfp::NOIO), &mut pages).unwrap();
                    pages.iter_mut().flatten().for_each(|page| page[..2].copy_from_slice(&stamp));
                    std::thread::yield_now();
                    assert!(pages.iter().flatten().all(|page| page[..2] == stamp), "a page had two owners");
                    assert_eq!(pool.free_bulk_raw(&mut pages), n);
                    served.fetch_add(1, Relaxed);
                }
            });
        }
    });
    assert_eq!(served.load(Relaxed), 8 * turns);
    let stats = pool.stats();
    assert_eq!((stats.out, stats.reserve, stats.waiting), (0, RESERVE, 0));
    assert!(stats.waits > 0, "nobody ever waited: this proves nothing");
    pool.close().unwrap();
}

/// Writes a dirty page out through a pool, in the middle of a request's reclaim, and gives the page back.
struct WritesOut {
    pool: Arc<Mempool<pagemill::PageSource<Page>>>,
    dirty: Mutex<Vec<Page>>,
}

impl Shrinker for WritesOut {
    fn shrink(&self, _wanted: Shrink) -> usize {
        let Some(page) = self.dirty.lock().unwrap().pop() else { return 0 };
        let bounce = self.pool.alloc_raw(Gfp::NOIO).unwrap();
        self.pool.free_raw(bounce);
        drop(page);
        1
    }
}

#[test]
fn a_shrinker_may_wait_for_the_reserve() {
    let (allocator, pool, rest) = dry();
    let pool = Arc::new(pool);
    let mut all = all_of(&pool);
    let writer = Arc::new(WritesOut { pool: pool.clone(), dirty: Mutex::new(rest.into_iter().collect()) });
    let _registered = allocator.register_shrinker(writer);
    std::thread::scope(|scope| {
        // Reclaims, in which the shrinker waits for an element, until the pool has some again.
        let reclaims = scope.spawn(|| allocator.alloc_page(Gfp::KERNEL).map(drop));
        until("a waiter", || pool.stats().waiting > 0);
        pool.free_bulk_raw(&mut all);
        assert_eq!(reclaims.join().unwrap(), Ok(()));
    });
    assert_eq!(pool.stats().out, 0);
}

#[test]
fn contradictory_flags_are_refused() {
    let (_, pool, _rest) = dry();
    for gfp in [Gfp::NOWAIT | Gfp::NOFAIL, Gfp::KERNEL | Gfp::ATOMIC, Gfp::NOIO | Gfp::NOFAIL | Gfp::NORETRY] {
        assert!(matches!(pool.alloc(gfp), Err(Error::Invalid(_))), "{gfp:?}");
    }
    assert_eq!((pool.stats().reserve, pool.stats().out), (RESERVE, 0));
}

/// The deadline has passed when the request would begin to wait, so it does not ask the source again.
#[test]
fn a_timeout_counts_from_the_start_of_the_call() {
    const TIMEOUT: Duration = Duration::from_millis(5);
    let calls = AtomicUsize::new(0);
    let pool = Mempool::from_fns(
        |gfp: Gfp| {
            if calls.fetch_add(1, Relaxed) == 0 {
                return Some(()); // The reserve.
            }
            if gfp.may_wait() {
                std::thread::sleep(4 * TIMEOUT);
            }
            None
        },
        |()| {},
        1,
    )
    .unwrap();
    let _only = pool.alloc(Gfp::NOIO).unwrap();
    calls.store(1, Relaxed);
    let mut slot = [None];
    let late = pool.alloc_bulk_array(Bulk::exact(1).gfp(Gfp::NOIO).timeout(TIMEOUT), &mut slot);
    assert_short(late, 1, 0);
    assert_eq!(calls.load(Relaxed) - 1, 2, "one call without reclaim, one with");
}
