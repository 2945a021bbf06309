//! Handles that go back to their pool when they are dropped (C5.7).
use crate::common::one_cpu;
use pagemill::{
    Allocator, Bulk, Device, DmaPool, Error, Faults, Gfp, Identity, InFlight, Memory, Mempool, Page, PageList,
    PageMempool, Pooled,
};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

const RESERVE: usize = 16;

/// A pool whose allocator has nothing left but the pool's reserve.
fn dry_pool() -> (Allocator, PageMempool, PageList) {
    let allocator = one_cpu(Memory::anonymous(RESERVE + 100));
    let pool = Mempool::pages(&allocator, RESERVE).unwrap();
    let mut rest = PageList::new();
    allocator.alloc_pages_bulk_list(Bulk::up_to(100).gfp(Gfp::NOWAIT), &mut rest).unwrap();
    assert!(allocator.alloc_page(Gfp::NOWAIT).is_err());
    (allocator, pool, rest)
}

type Slots<'p> = Vec<Option<Pooled<&'p PageMempool>>>;

fn empty<'p>(count: usize) -> Slots<'p> {
    (0..count).map(|_| None).collect()
}

fn all_of(pool: &PageMempool) -> Result<Slots<'_>, Error> {
    let mut all = empty(RESERVE);
    pool.alloc_bulk_array(Bulk::exact(RESERVE).gfp(Gfp::NOWAIT), &mut all)?;
    Ok(all)
}

#[test]
fn pages_dropped_by_an_early_return_are_in_the_reserve_again() {
    let (_allocator, pool, _rest) = dry_pool();
    let write = || -> Result<(), Error> {
        let pages = all_of(&pool)?;
        assert_eq!((pages.iter().flatten().count(), pool.stats().reserve), (RESERVE, 0));
        pool.alloc(Gfp::NOWAIT)?; // Refused: nothing is left.
        unreachable!("the reserve is empty");
    };
    for _ in 0..3 {
        assert!(matches!(write(), Err(Error::Exhausted(_))));
        assert_eq!((pool.stats().reserve, pool.stats().out), (RESERVE, 0));
    }
    pool.close().unwrap();
}

/// The request gets the allocator's last pages, and the reserve has too few for the rest.
#[test]
fn pages_of_a_request_that_came_back_short_are_not_lost_by_an_early_return() {
    let (_allocator, pool, mut rest) = dry_pool();
    let held: Vec<_> = (0..RESERVE - 6).map(|_| pool.alloc(Gfp::NOWAIT).unwrap()).collect();
    (0..3).for_each(|_| drop(rest.pop()));
    let ask = |count| -> Result<(), Error> {
        let mut pages = empty(count);
        pool.alloc_bulk_array(Bulk::exact(count).gfp(Gfp::NOWAIT), &mut pages)
    };
    assert!(matches!(ask(RESERVE), Err(Error::Exhausted(short)) if short.got == 3));
    assert_eq!((pool.stats().out, pool.stats().reserve), (RESERVE - 6, 6 + 3), "they refill the reserve");
    assert_eq!(ask(6 + 3), Ok(()));
    drop((held, rest));
    assert_eq!((pool.stats().reserve, pool.stats().out), (RESERVE, 0));
    pool.close().unwrap();
}

#[test]
fn handles_that_unwind_or_cross_threads_go_back() {
    let (_allocator, pool, _rest) = dry_pool();
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        let mut seen = 0;
        pool.alloc_bulk_callback(Bulk::exact(RESERVE).gfp(Gfp::NOWAIT), |_page| {
            seen += 1;
            assert!(seen < 5, "on purpose");
        })
    }));
    assert!(unwound.is_err());
    assert_eq!((pool.stats().reserve, pool.stats().out), (RESERVE, 0));
    let all = all_of(&pool).unwrap();
    std::thread::scope(|scope| scope.spawn(|| drop(all)).join().unwrap());
    assert_eq!((pool.stats().reserve, pool.stats().out), (RESERVE, 0));
}

#[test]
fn a_bulk_free_returns_elements_to_the_pools_that_they_are_of() {
    let (_allocator, pool, _rest) = dry_pool();
    let (_other_allocator, other, _other_rest) = dry_pool();
    let mut mixed = all_of(&pool).unwrap();
    mixed[3] = None;
    mixed[7] = Some(other.alloc(Gfp::NOWAIT).unwrap());
    assert_eq!((pool.stats().out, other.stats().out), (RESERVE - 2, 1));
    assert_eq!(pool.free_bulk(&mut mixed), RESERVE - 1);
    assert!(mixed.iter().all(Option::is_none));
    for pool in [&pool, &other] {
        let stats = pool.stats();
        assert_eq!((stats.out, stats.reserve, stats.misused), (0, RESERVE, 0));
    }
}

#[test]
fn an_array_of_handles_keeps_full_slots_and_fills_holes() {
    let (_allocator, pool, _rest) = dry_pool();
    let mut slots = empty(8);
    slots[2] = Some(pool.alloc(Gfp::NOWAIT).unwrap());
    let kept = slots[2].as_ref().map(|page| page.addr());
    pool.alloc_bulk_array(Bulk::exact(6).gfp(Gfp::NOWAIT), &mut slots).unwrap();
    assert_eq!(slots.iter().map(Option::is_some).filter(|is_full| *is_full).count(), 6);
    assert!(slots[6].is_none() && slots[2].as_ref().map(|page| page.addr()) == kept);
    assert!(matches!(pool.alloc_bulk_array(Bulk::exact(9), &mut slots), Err(Error::Invalid(_))));
}

#[test]
fn an_element_that_leaves_is_replaced_from_the_source() {
    let (allocator, pool, rest) = dry_pool();
    let left: Page = Pooled::leave(pool.alloc(Gfp::NOWAIT).unwrap());
    assert_eq!((pool.stats().out, pool.stats().reserve), (0, RESERVE - 1), "the source has none to replace it");
    drop(rest);
    let again: Page = Pooled::leave(pool.alloc(Gfp::NOWAIT).unwrap());
    assert_eq!((pool.stats().out, pool.stats().reserve), (0, RESERVE));
    assert_ne!(left.addr(), again.addr());
    pool.close().unwrap();
    drop((left, again));
    assert_eq!(allocator.validate().unwrap().handed_out, 0);
}

#[test]
fn an_owned_handle_keeps_its_pool() {
    let allocator = one_cpu(Memory::anonymous(64));
    let pool = Arc::new(Mempool::pages(&allocator, RESERVE).unwrap());
    let one = pool.alloc_owned(Gfp::NOIO).unwrap();
    let mut many: [Option<Pooled<Arc<PageMempool>>>; 4] = [const { None }; 4];
    pool.alloc_bulk_array_owned(Bulk::exact(4).gfp(Gfp::NOIO), &mut many).unwrap();
    drop(pool);
    assert_eq!(Pooled::pool(&one).stats().out, 5);
    assert_eq!(Pooled::pool(&one).free_bulk(&mut many), 4);
    assert_eq!(Pooled::pool(&one).stats().out, 1);
    std::thread::spawn(move || drop(one)).join().unwrap();
    assert_eq!(allocator.validate().unwrap().handed_out, 0, "the pool ended with its last handle");
}

#[test]
fn a_handle_of_a_page_has_two_words_and_so_has_its_option() {
    let two = 2 * size_of::<usize>();
    assert_eq!(size_of::<Pooled<&PageMempool>>(), two);
    assert_eq!(size_of::<Option<Pooled<&PageMempool>>>(), two);
    assert_eq!(size_of::<Option<Pooled<Arc<PageMempool>>>>(), two);
}

/// A program that says `?` wherever it can, while acquisitions fail at random: reserves and pools are whole at the end.
#[test]
fn whatever_fails_reserves_are_whole_at_the_end() {
    for seed in 0..50 {
        let faults = Faults::with_probability(0.2, seed);
        let allocator = Allocator::builder().memory(Memory::anonymous(4096)).faults(faults.clone()).build().unwrap();
        let Ok(pool) = Mempool::pages(&allocator, RESERVE) else { continue };
        let device = Device::new(&allocator, Identity).unwrap();
        let dma = DmaPool::create("commands", &device, 64, 64, 0).unwrap();
        let operation = |n: usize| -> Result<usize, Box<dyn std::error::Error>> {
            let mut pages = empty(n);
            pool.alloc_bulk_array(Bulk::exact(n).gfp(Gfp::NOWAIT), &mut pages)?;
            let command = dma.alloc(Gfp::NOWAIT)?;
            let _page = allocator.alloc_page(Gfp::NOWAIT)?;
            let second = pool.alloc(Gfp::NOWAIT)?;
            let mut more = Vec::new();
            pool.alloc_bulk_callback(Bulk::exact(3).gfp(Gfp::NOWAIT), |page| more.push(page))?;
            let mut list = PageList::new();
            allocator.alloc_pages_bulk_list(Bulk::exact(n).gfp(Gfp::NOWAIT), &mut list)?;
            let mut blocks: [_; 4] = [const { None }; 4];
            if dma.alloc_bulk(Gfp::NOWAIT, &mut blocks)? < 4 {
                return Err("too few blocks".into());
            }
            drop((command, second));
            Ok(pool.free_bulk(&mut pages))
        };
        let done = (0..200)
            .filter(|round| {
                allocator.drain(); // Faults strike where a list is refilled.
                operation(1 + round % (RESERVE - 1)).is_ok()
            })
            .count();
        assert!(faults.injected() > 0 && done > 0, "seed {seed}: {done} of 200");
        let stats = pool.stats();
        assert_eq!((stats.reserve, stats.out, stats.misused, dma.stats().in_use), (RESERVE, 0, 0, 0), "seed {seed}");
        pool.close().unwrap();
        dma.destroy().unwrap();
        assert_eq!(allocator.validate().unwrap().handed_out, 0, "seed {seed}");
    }
}

#[test]
fn memory_in_flight_is_not_handed_out_again() {
    own_process!(); // It counts what the process leaks.
    let allocator = one_cpu(Memory::anonymous(8));
    let pool = Mempool::pages(&allocator, 4).unwrap();
    let device = Device::new(&allocator, Identity).unwrap();
    // A guard that says when the device is done returns its memory as it was.
    let page = pool.alloc(Gfp::NOWAIT).unwrap();
    let addr = page.addr();
    let flying = InFlight::new(page);
    assert_eq!(pool.stats().out, 1);
    // SAFETY: no device knows the page.
    let page = unsafe { flying.done() };
    assert_eq!(page.addr(), addr);
    drop(page);
    assert_eq!(pool.stats().out, 0);
    // A guard that an early return drops keeps its memory for ever.
    let leaked = InFlight::leaked();
    let transfer = || -> Result<(), Error> {
        let _pooled = InFlight::new(pool.alloc(Gfp::NOWAIT)?);
        let _page = InFlight::new(allocator.alloc_page(Gfp::NOWAIT)?);
        Err(allocator.alloc_pages(Gfp::NOWAIT, pagemill::Order::new(5)?).unwrap_err())
    };
    assert!(transfer().is_err());
    assert_eq!((InFlight::leaked() - leaked, pool.stats().out), (2, 1));
    let rest: Vec<Page> = std::iter::from_fn(|| allocator.alloc_page(Gfp::NOWAIT).ok()).collect();
    assert_eq!((rest.len(), pool.stats().reserve), (8 - 2 - 4, 4), "two pages stay out");
    drop(device);
}

#[test]
fn a_source_that_unwinds_gets_its_elements_back() {
    let made = AtomicUsize::new(0);
    let freed = AtomicUsize::new(0);
    let alloc = |_| match made.fetch_add(1, Relaxed) {
        at if at == RESERVE + 3 => panic!("a source that panics on purpose"),
        at => Some(at),
    };
    let pool = Mempool::from_fns(alloc, |_| _ = freed.fetch_add(1, Relaxed), RESERVE).unwrap();
    let mut slots = [const { None }; RESERVE];
    let ask = AssertUnwindSafe(|| pool.alloc_bulk_array(Bulk::exact(RESERVE).gfp(Gfp::NOIO), &mut slots));
    assert!(catch_unwind(ask).is_err());
    assert!(slots.iter().all(Option::is_none));
    assert_eq!((freed.load(Relaxed), pool.stats().out, pool.stats().reserve), (3, 0, RESERVE));
}
