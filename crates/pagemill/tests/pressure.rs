//! Memory that is short: the pages that each kind of request still gets, reclaim, and faults at every acquisition
//! (C3.4, C3.6, C3.14).
use crate::common::{
    Cache, Calls, HOUR, all, arena, assert_all_back, backends, fake_cpu, go_to, one_cpu, slots, stay_here, until,
    until_waiting,
};
use pagemill::{
    Account, Allocator, Backend, Block, BlockList, BuildError, Bulk, Cancel, Delivered, Error, Exhausted, Faults, Gfp,
    InvalidRequest, Memory, NodeId, NodeMask, Order, Page, PageCount, PageList, Run, Shortfall, ShrinkerDoes,
    Watermarks, Why, free_pages_bulk,
};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

const MIN: u32 = 100;
const PAGES: usize = 1000;

/// An allocator of each backend: portable lists of one CPU that is not there, and restartable sequences.
fn of_each_backend(memory: impl Fn() -> Memory) -> Vec<Allocator> {
    let rseq = backends().into_iter().filter(|&backend| backend == Backend::Rseq);
    let rseq = rseq.map(|backend| Allocator::builder().memory(memory()).backend(backend).build().unwrap());
    std::iter::once(one_cpu(memory())).chain(rseq).collect()
}

/// As [`of_each_backend`], for a thread that is kept on one CPU: no list of another CPU hides pages from requests that may not
/// drain it.
fn each_of(memory: impl Fn() -> Memory) -> Vec<Allocator> {
    stay_here();
    of_each_backend(memory)
}

fn each(pages: usize) -> Vec<Allocator> {
    each_of(|| Memory::anonymous(pages))
}

fn with_marks() -> Memory {
    Memory::anonymous(PAGES).watermarks(Watermarks::above(MIN))
}

#[test]
fn single_requests_stop_at_their_watermark() {
    for allocator in &each_of(with_marks) {
        let pages = all(allocator, Gfp::NOWAIT);
        assert_eq!(pages.len(), PAGES - MIN as usize);
        let why = Why::BelowMark;
        let refused = Error::Exhausted(Exhausted { wanted: 1, got: 0, order: 0, why });
        assert_eq!(allocator.alloc_page(Gfp::KERNEL).unwrap_err(), refused);
        // Half of what is left, and no more.
        let reserve = all(allocator, Gfp::ATOMIC);
        assert_eq!(reserve.len(), MIN as usize / 2);
        assert_eq!(allocator.stats().free, u64::from(MIN) / 2);
        // A block counts as its pages.
        drop((pages, reserve));
        allocator.drain();
        let order = Order::new(3).unwrap();
        let blocks: Vec<Block> = std::iter::from_fn(|| allocator.alloc_pages(Gfp::NOWAIT, order).ok()).collect();
        assert_eq!(blocks.len(), (PAGES - MIN as usize) / 8);
        drop(blocks);
        assert_all_back(allocator);
    }
}

#[test]
fn pages_freed_below_min_refill_the_reserve() {
    for allocator in &each_of(with_marks) {
        let mut pages = all(allocator, Gfp::NOWAIT);
        let reserve = all(allocator, Gfp::ATOMIC);
        assert_eq!(reserve.len(), MIN as usize / 2);
        drop(reserve);
        assert!(allocator.alloc_page(Gfp::NOWAIT).is_err(), "a page of the reserve");
        assert_eq!((allocator.stats().free, allocator.stats().listed), (u64::from(MIN), 0));
        // Only above the high mark do lists take freed pages again.
        let high = MIN as usize * 3 / 2;
        pages.drain(..high - MIN as usize);
        assert_eq!((allocator.stats().free as usize, allocator.stats().listed), (high, 0));
        drop(pages.pop());
        assert_eq!((allocator.stats().free as usize, allocator.stats().listed), (high, 1));
        drop(pages);
        assert_all_back(allocator);
    }
}

#[test]
fn concurrent_atomic_requests_stop_at_half_of_min() {
    const THREADS: usize = 4;
    for allocator in &of_each_backend(with_marks) {
        for _ in 0..20 {
            let taken: usize = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..THREADS)
                    .map(|_| {
                        scope.spawn(|| {
                            let mut pages = Vec::new();
                            while let Ok(page) = allocator.alloc_page(Gfp::ATOMIC) {
                                assert!(allocator.stats().free >= u64::from(MIN) / 2);
                                pages.push(page);
                            }
                            pages
                        })
                    })
                    .collect();
                let pages: Vec<Vec<Page>> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
                // Some may stand on the list of a CPU that a thread was on.
                let stats = allocator.stats();
                assert!(stats.free >= u64::from(MIN) / 2, "{stats:?}");
                pages.iter().map(Vec::len).sum::<usize>() + stats.listed as usize
            });
            assert!(taken <= PAGES - MIN as usize / 2, "{taken}");
            allocator.drain();
        }
        assert_all_back(allocator);
    }
}

#[test]
fn bulk_requests_stop_at_the_low_mark() {
    let low = (MIN + MIN / 4) as usize;
    for allocator in &each_of(with_marks) {
        for n in [PAGES, 400] {
            // A large request, and several small ones that fill lists.
            let mut list = PageList::new();
            let mut got = 0;
            let last = loop {
                let delivered = allocator.alloc_pages_bulk_list(Bulk::up_to(n).gfp(Gfp::NOWAIT), &mut list).unwrap();
                got += delivered.blocks;
                if delivered.blocks < n {
                    break delivered;
                }
            };
            assert_eq!(got, PAGES - low, "what lies above low");
            assert_eq!(last.shortfall, Some(Shortfall { missing: n - last.blocks, why: Why::BelowMark }));
            // The next one brings one by the single path, though nothing lies above low (C3.8); nor do lists hold any of it.
            let more = allocator.alloc_pages_bulk_list(Bulk::up_to(40).gfp(Gfp::NOWAIT), &mut list).unwrap();
            assert_eq!(more, Delivered { blocks: 1, shortfall: Some(Shortfall { missing: 39, why: Why::BelowMark }) });
            let stats = allocator.stats();
            assert_eq!((stats.listed, stats.free as usize), (0, low - 1));
            drop(list);
            allocator.drain();
        }
        // A number that must be reached is, one by one, down to min; one more leaves everything as it was.
        let mut slots = slots::<Page>(PAGES);
        slots[1] = Some(allocator.alloc_page(Gfp::KERNEL).unwrap());
        let before: Vec<_> = slots.iter().map(|slot| slot.as_ref().map(Page::addr)).collect();
        let most = PAGES - MIN as usize;
        let refused = allocator.alloc_pages_bulk_array(Bulk::exact(most + 1).gfp(Gfp::NOWAIT), &mut slots);
        assert!(matches!(refused, Err(Error::Exhausted(_))), "{refused:?}");
        assert!(slots.iter().map(|slot| slot.as_ref().map(Page::addr)).eq(before));
        allocator.drain();
        let filled = allocator.alloc_pages_bulk_array(Bulk::exact(most).gfp(Gfp::NOWAIT), &mut slots).unwrap();
        assert_eq!((filled.added, filled.occupied, filled.first_hole), (most - 1, most, most));
        free_pages_bulk(&mut slots);
        assert_all_back(allocator);
    }
}

#[test]
fn every_shortfall_says_why() {
    for allocator in &each(64) {
        let mut list = PageList::new();
        let mut why = |request: Bulk<'_>| {
            let delivered = allocator.alloc_pages_bulk_list(request, &mut list).unwrap();
            list.clear();
            (delivered.blocks, delivered.shortfall)
        };
        assert_eq!(why(Bulk::up_to(65)), (64, Some(Shortfall { missing: 1, why: Why::Exhausted })));
        assert_eq!(why(Bulk::up_to(64)), (64, None));
        let account = Account::new(PageCount::new(10));
        let paid = Bulk::up_to(16).gfp(Gfp::KERNEL | Gfp::ACCOUNT).account(&account);
        assert_eq!(why(paid), (10, Some(Shortfall { missing: 6, why: Why::Account })));
        assert_eq!(account.charged().get(), 10);
        assert_eq!(why(paid), (0, Some(Shortfall { missing: 16, why: Why::Account })));
        // A request for more than there is pays for what it got.
        let rich = Account::new(PageCount::new(1000));
        let paid = Bulk::up_to(100).gfp(Gfp::KERNEL | Gfp::ACCOUNT).account(&rich);
        assert_eq!(why(paid), (64, Some(Shortfall { missing: 36, why: Why::Exhausted })));
        assert_eq!(rich.charged().get(), 64);
        let cancel = Cancel::new();
        cancel.cancel();
        let cancelled = Bulk::up_to(65).gfp(Gfp::KERNEL | Gfp::RETRY_MAYFAIL).timeout(HOUR).cancel(&cancel);
        assert_eq!(why(cancelled), (64, Some(Shortfall { missing: 1, why: Why::Cancelled })));
        // One that would not have waited for more was kept from nothing.
        assert_eq!(why(cancelled.gfp(Gfp::KERNEL)), (64, Some(Shortfall { missing: 1, why: Why::Exhausted })));

        // An exact request that is refused says why too, and is not charged.
        let short = Bulk::exact(11).gfp(Gfp::KERNEL | Gfp::ACCOUNT);
        let poor = Account::new(PageCount::new(10));
        let mut slots = slots::<Page>(70);
        let refused = |wanted, got, why| Error::Exhausted(Exhausted { wanted, got, order: 0, why });
        let error = allocator.alloc_pages_bulk_list(short.account(&poor), &mut list).unwrap_err();
        assert_eq!(error, refused(11, 0, Why::Account));
        assert_eq!((list.len(), poor.charged().get()), (0, 0));
        let rich = Account::new(PageCount::new(1000));
        let one = allocator.alloc_page(Gfp::KERNEL).unwrap();
        let all = Bulk::exact(64).gfp(Gfp::KERNEL | Gfp::ACCOUNT).account(&rich);
        let missing = refused(64, 63, Why::Exhausted);
        assert_eq!(allocator.alloc_pages_bulk_list(all, &mut list).unwrap_err(), missing);
        assert_eq!(allocator.alloc_pages_bulk_array(all, &mut slots).unwrap_err(), missing);
        assert_eq!(allocator.alloc_pages_bulk_runs(all, &mut Vec::<Run<Page>>::new()).unwrap_err(), missing);
        assert_eq!(rich.charged().get(), 0);
        let error = allocator.alloc_pages_bulk_list(Bulk::exact(64).timeout(HOUR).cancel(&cancel), &mut list);
        assert_eq!(error.unwrap_err(), refused(64, 63, Why::Cancelled));
        drop(one);
        // A node that there is, but not for this allocator now.
        let second = NodeId::new(1).unwrap();
        allocator.add_memory(Memory::anonymous(64).node(second)).unwrap();
        allocator.set_allowed_nodes(NodeMask::only(NodeId::ZERO)).unwrap();
        let second = NodeMask::only(second);
        let error = allocator.alloc_pages_bulk_array(Bulk::exact(8).nodes(second), &mut slots).unwrap_err();
        assert_eq!(error, refused(8, 0, Why::NotAllowed));
        let delivered = allocator.alloc_pages_bulk_list(Bulk::up_to(8).nodes(second), &mut list).unwrap();
        assert_eq!(delivered.shortfall, Some(Shortfall { missing: 8, why: Why::NotAllowed }));
        let nobody = allocator.alloc_pages_bulk_list(short, &mut list);
        assert_eq!(nobody.unwrap_err(), Error::Invalid(InvalidRequest::NoAccount));
        assert_all_back(allocator);
    }
}

#[test]
fn a_request_that_may_wait_gets_reclaimed_pages() {
    for allocator in &each(64) {
        let cache = Arc::new(Cache { from: 3, ..Cache::of(all(allocator, Gfp::NOWAIT)) });
        let registered = allocator.register_shrinker(cache.clone());
        assert_eq!(cache.len(), 64);
        for gfp in [Gfp::NOWAIT, Gfp::ATOMIC, Gfp::NOWAIT | Gfp::NOWARN] {
            assert!(matches!(allocator.alloc_page(gfp), Err(Error::Exhausted(_))));
            let mut slots = slots::<Page>(4);
            let filled = allocator.alloc_pages_bulk_array(Bulk::up_to(4).gfp(gfp), &mut slots).unwrap();
            assert_eq!((filled.added, filled.shortfall), (0, Some(Shortfall { missing: 4, why: Why::Exhausted })));
        }
        let before = allocator.stats();
        assert_eq!((cache.calls(), before.waits, before.reclaim_direct), (0, 0, 0));
        let page = allocator.alloc_page(Gfp::KERNEL).unwrap();
        let stats = allocator.stats();
        assert_eq!((cache.calls(), stats.waits, stats.reclaim_direct, stats.reclaimed), (3, 1, 3, 64));
        assert_eq!(stats.shortfalls(), before.shortfalls());
        // A shrinker that gives at once leaves no request waiting, and serves bulk requests as well.
        drop(page);
        cache.extend(all(allocator, Gfp::NOWAIT));
        let mut list = PageList::new();
        allocator.alloc_pages_bulk_list(Bulk::exact(64), &mut list).unwrap();
        assert_eq!((cache.calls(), allocator.stats().waits), (4, 1));
        drop((list, registered));
        allocator.drain();
        let _all = all(allocator, Gfp::NOWAIT);
        assert!(allocator.alloc_page(Gfp::KERNEL).is_err());
        assert_eq!(cache.calls(), 4, "a shrinker that is not registered any more");
    }
}

#[test]
fn gfp_flags_bound_the_rounds_of_reclaim() {
    let none = || Cache { from: usize::MAX, ..Cache::of(Vec::new()) };
    for allocator in &each(8) {
        let _all = all(allocator, Gfp::NOWAIT);
        for (gfp, calls) in [
            (Gfp::KERNEL | Gfp::NORETRY, 1),
            (Gfp::KERNEL, 1 + 16),
            (Gfp::NOIO, 1 + 16),
            (Gfp::KERNEL | Gfp::RETRY_MAYFAIL, 1 + 64),
        ] {
            let cache = Arc::new(none());
            let _registered = allocator.register_shrinker(cache.clone());
            assert!(matches!(allocator.alloc_page(gfp), Err(Error::Exhausted(_))));
            assert_eq!(cache.calls(), calls, "{gfp:?}");
        }
    }
}

#[test]
fn nofail_waits_until_it_is_served() {
    for allocator in &each(8) {
        // Longer than any other request would try.
        let cache = Arc::new(Cache { from: 80, ..Cache::of(all(allocator, Gfp::NOWAIT)) });
        let registered = allocator.register_shrinker(cache.clone());
        let page = allocator.alloc_page(Gfp::KERNEL | Gfp::NOFAIL).unwrap();
        assert_eq!((cache.calls(), allocator.stats().waits), (80, 1));
        drop((registered, page));
        // Without any shrinker it waits for a free.
        let mut pages = all(allocator, Gfp::NOWAIT);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| allocator.alloc_page(Gfp::NOFS | Gfp::NOFAIL).is_ok());
            until_waiting(allocator, 1);
            drop(pages.pop());
            assert!(waiter.join().unwrap());
        });
        drop(pages);
        assert_all_back(allocator);
    }
}

#[test]
fn noio_and_nofs_exclude_shrinkers() {
    use ShrinkerDoes::{Filesystem, Io, Nothing};
    for allocator in &each(8) {
        for (gfp, called) in
            [(Gfp::KERNEL, [true, true, true]), (Gfp::NOFS, [true, true, false]), (Gfp::NOIO, [true, false, false])]
        {
            let _all = all(allocator, Gfp::NOWAIT);
            let caches = [Nothing, Io, Filesystem]
                .map(|does| Arc::new(Cache { does, from: usize::MAX, ..Cache::of(Vec::new()) }));
            let _registered = caches.each_ref().map(|cache| allocator.register_shrinker(cache.clone()));
            assert!(allocator.alloc_page(gfp | Gfp::NORETRY).is_err());
            assert_eq!(caches.each_ref().map(|cache| cache.calls() > 0), called, "{gfp:?}");
        }
    }
}

#[test]
fn a_shrinker_may_not_reclaim() {
    for allocator in &each(8) {
        let _all = all(allocator, Gfp::NOWAIT);
        let (own, seen) = (Mutex::new(Some(allocator.clone())), Mutex::new(Vec::new()));
        let asks = Arc::new((own, seen));
        let asked = asks.clone();
        let registered = allocator.register_shrinker(Calls::new(move |_, wanted| {
            let allocator = asked.0.lock().unwrap().clone().unwrap();
            let is_exhausted = |error: &Error| matches!(error, Error::Exhausted(_));
            *asked.1.lock().unwrap() = vec![
                allocator.alloc_page(wanted.gfp).err(),
                allocator.alloc_pages(Gfp::NOIO, Order::new(1).unwrap()).err(),
                allocator.alloc_page(Gfp::NOWAIT).err().filter(|error| !is_exhausted(error)),
            ];
            0
        }));
        assert!(allocator.alloc_page(Gfp::KERNEL | Gfp::NORETRY).is_err());
        let refused = Some(Error::Invalid(InvalidRequest::ReclaimInShrinker));
        assert_eq!(*asks.1.lock().unwrap(), [refused, refused, None]);
        // Outside of it, this thread may again.
        drop(registered);
        assert!(matches!(allocator.alloc_page(Gfp::KERNEL), Err(Error::Exhausted(_))));
        asks.0.lock().unwrap().take();
    }
}

#[test]
fn a_reclaim_step_reaches_the_high_mark() {
    // Low and high are further apart than a round asks for at least.
    const MIN: u32 = 400;
    let high = MIN as usize * 3 / 2;
    for allocator in &each_of(|| Memory::anonymous(PAGES).watermarks(Watermarks::above(MIN))) {
        let cache = Arc::new(Cache::of(all(allocator, Gfp::NOWAIT)));
        let _registered = allocator.register_shrinker(cache.clone());
        assert_eq!(allocator.stats().free, u64::from(MIN));
        // At once as many as are missing to `high`; a round asks for a batch of 64 at least.
        let missing = (high - MIN as usize).max(64);
        assert_eq!(allocator.reclaim_step().get(), missing);
        let stats = allocator.stats();
        assert_eq!((stats.free as usize, cache.calls()), (MIN as usize + missing, 1));
        assert_eq!((stats.reclaim_background, stats.reclaimed), (1, missing as u64));
        assert_eq!(allocator.reclaim_step().get(), 0, "above its marks");
        assert_eq!(cache.calls(), 1);
        cache.clear();
        assert_all_back(allocator);
    }
}

#[test]
fn background_reclaim_reaches_the_high_mark() {
    let high = u64::from(MIN) * 3 / 2;
    for backend in backends() {
        let builder = Allocator::builder().memory(with_marks()).backend(backend).background_reclaim(true);
        let allocator = builder.build().unwrap();
        let mut list = PageList::new();
        allocator.alloc_pages_bulk_list(Bulk::exact(700), &mut list).unwrap();
        let cache = Arc::new(Cache::of(Vec::new()));
        let registered = allocator.register_shrinker(cache.clone());
        allocator.alloc_pages_bulk_callback(Bulk::up_to(150), |page| cache.pages.lock().unwrap().push(page)).unwrap();
        // Down to low there is no reclaim; a request that falls below wakes the thread, and does not wait itself.
        for _ in 0..3 {
            let before = allocator.stats().reclaim_background;
            let has_begun = || allocator.stats().reclaim_background > before;
            let mut taken = Vec::new();
            while let (false, Ok(page)) = (has_begun(), allocator.alloc_page(Gfp::NOWAIT)) {
                taken.push(page);
            }
            until("background reclaim", || has_begun() && allocator.stats().free >= high);
            let stats = allocator.stats();
            assert_eq!((stats.reclaim_direct, stats.waits), (0, 0));
            cache.extend(taken);
        }
        drop((list, registered));
        cache.clear();
        assert_all_back(&allocator);
        allocator.close().unwrap();
    }
}

#[test]
fn lists_take_less_as_free_memory_falls() {
    for allocator in &each_of(with_marks) {
        let mut pages = Vec::new();
        let mut most = Vec::new();
        while let Ok(page) = allocator.alloc_page(Gfp::NOWAIT) {
            pages.push(page);
            let stats = allocator.stats();
            let above = (stats.free + stats.listed).saturating_sub(u64::from(MIN));
            // A refill takes a quarter of what lies above the low mark at most, and below it only the requested pages.
            assert!(stats.listed <= 256.min(above), "{stats:?}");
            assert!(stats.listed == 0 || stats.free >= u64::from(MIN + MIN / 4), "{stats:?}");
            most.push(stats.listed);
        }
        let (early, late) = (most[..200].iter().max(), most[most.len() - 50..].iter().max());
        assert!(early > late, "{early:?} {late:?}");
        drop(pages);
        assert_all_back(allocator);
    }
}

#[test]
fn other_cpus_lists_are_drained_before_a_request_waits() {
    let allocator = arena(512).cpus(4, fake_cpu).build().unwrap();
    let mut pages = all(&allocator, Gfp::NOWAIT);
    go_to(1);
    pages.truncate(500);
    go_to(2);
    assert_eq!((allocator.stats().listed, allocator.stats().free), (12, 0));
    assert!(allocator.alloc_page(Gfp::NOWAIT).is_err(), "what another CPU's list holds is not drained for NOWAIT");
    let page = allocator.alloc_page(Gfp::KERNEL).unwrap();
    let mut list = PageList::new();
    allocator.alloc_pages_bulk_list(Bulk::exact(11), &mut list).unwrap();
    assert_eq!(allocator.stats().waits, 0);
    drop((page, list, pages));
    assert_all_back(&allocator);
}

/// Every form, with what it must leave behind when it fails.
fn every_form(allocator: &Allocator, gfp: Gfp) {
    let order = Order::new(2).unwrap();
    let _ = allocator.alloc_page(gfp);
    let _ = allocator.alloc_page(gfp | Gfp::ZERO | Gfp::MOVABLE);
    let _ = allocator.alloc_pages(gfp, order);
    let _ = allocator.alloc_pages(gfp, Order::PAGEBLOCK);
    for n in [1, 100, 700] {
        let mut slots = slots::<Page>(n + 2);
        slots[n / 2] = allocator.alloc_page(gfp).ok();
        let before: Vec<_> = slots.iter().map(|slot| slot.as_ref().map(Page::addr)).collect();
        if let Err(error) = allocator.alloc_pages_bulk_array(Bulk::exact(n).gfp(gfp), &mut slots) {
            assert!(matches!(error, Error::Exhausted(_)), "{error}");
            assert!(slots.iter().map(|slot| slot.as_ref().map(Page::addr)).eq(before), "an array that was changed");
        } else {
            assert!(slots[..n].iter().all(Option::is_some));
        }
        let filled = allocator.alloc_pages_bulk_array(Bulk::up_to(n).gfp(gfp), &mut slots).unwrap();
        assert_eq!(filled.occupied, slots[..n].iter().flatten().count());
        assert_eq!(filled.shortfall.is_some(), filled.occupied < n);
        drop(slots);
        let mut list = PageList::new();
        let at_least = allocator.alloc_pages_bulk_list(Bulk::at_least(n / 2 + 1, n).gfp(gfp), &mut list);
        assert_eq!(list.len(), at_least.map_or(0, |delivered| delivered.blocks));
        drop(list);
        let mut kept = Vec::<Page>::new();
        let delivered = allocator.alloc_pages_bulk_callback(Bulk::up_to(n).gfp(gfp), |page| kept.push(page)).unwrap();
        assert_eq!(delivered.blocks, kept.len());
        drop(kept);
        let mut runs = Vec::<Run<Page>>::new();
        let exact = allocator.alloc_pages_bulk_runs(Bulk::exact(n).gfp(gfp | Gfp::RECLAIMABLE), &mut runs);
        assert_eq!(runs.iter().map(Run::len).sum::<usize>(), exact.map_or(0, |delivered| delivered.blocks));
    }
    let mut blocks = BlockList::new();
    let exact = allocator.alloc_pages_bulk_list(Bulk::exact(20).order(order).gfp(gfp), &mut blocks);
    assert_eq!(blocks.len(), exact.map_or(0, |delivered| delivered.blocks));
}

#[test]
fn faults_at_every_acquisition_lose_no_page() {
    for backend in backends() {
        let build = |faults: &Faults| {
            Allocator::builder()
                .memory(Memory::anonymous(1100))
                .backend(backend)
                .faults(faults.clone())
                .build()
                .unwrap()
        };
        let mut acquisitions = 0;
        for after in 0.. {
            let faults = Faults::after(after);
            let allocator = build(&faults);
            every_form(&allocator, Gfp::NOWAIT);
            assert_eq!(allocator.stats().faults, faults.injected());
            assert_all_back(&allocator);
            if faults.injected() == 0 {
                acquisitions = after;
                break;
            }
        }
        assert!(acquisitions >= 20, "{acquisitions} acquisitions are too few to have met every form");
        for seed in 0..100 {
            let faults = Faults::with_probability(0.3, seed);
            let allocator = build(&faults);
            every_form(&allocator, Gfp::ATOMIC);
            assert!(faults.injected() > 0);
            assert_all_back(&allocator);
        }
    }
}

#[test]
fn faults_hit_every_way_to_a_zone() {
    let order = Order::new(3).unwrap();
    let build = |after| {
        let faults = Faults::after(after).only(Gfp::ATOMIC);
        let memory = Memory::anonymous(1536);
        (Allocator::builder().memory(memory).cpus(1, || 0).faults(faults.clone()).build().unwrap(), faults)
    };
    // Past the list, and then singly: from the request's own pageblocks and from others'.
    let (allocator, faults) = build(0);
    let request = Bulk::up_to(1000).gfp(Gfp::ATOMIC);
    let delivered = allocator.alloc_pages_bulk_list(request, &mut PageList::new()).unwrap();
    assert_eq!((delivered.blocks, delivered.shortfall.unwrap().why, faults.injected()), (0, Why::Fault, 3));
    // A block, from both.
    let (allocator, faults) = build(0);
    assert!(allocator.alloc_pages(Gfp::ATOMIC, order).is_err());
    assert_eq!(faults.injected(), 2);
    // Where the request's own have none, the second way alone is left: singly and for blocks.
    for (after, is_refused) in [(1, true), (2, false)] {
        for order in [Order::ZERO, order] {
            let (allocator, faults) = build(after);
            let movable = Gfp::NOWAIT | Gfp::MOVABLE;
            let mut pages: Vec<Page> = std::iter::from_fn(|| allocator.alloc_page(movable).ok()).collect();
            pages.sort_by_key(Page::addr);
            pages.drain(..16);
            allocator.drain();
            assert_eq!(allocator.alloc_pages(Gfp::ATOMIC, order).is_err(), is_refused, "{order:?} after {after}");
            assert_eq!(faults.injected(), u64::from(is_refused));
        }
    }
}

#[test]
fn faults_spare_other_gfp_kinds_other_threads_and_nofail() {
    const KINDS: [(&str, Gfp); 5] = [
        ("kernel", Gfp::KERNEL),
        ("noio", Gfp::NOIO),
        ("nofs", Gfp::NOFS),
        ("nowait", Gfp::NOWAIT),
        ("atomic", Gfp::ATOMIC),
    ];
    let build = |faults| arena(512).faults(faults).build().unwrap();
    for (name, _) in KINDS {
        for (other, gfp) in KINDS {
            let faults: Faults = format!("after=0,gfp={name}").parse().unwrap();
            let allocator = build(faults.clone());
            assert_eq!(allocator.alloc_page(gfp).is_err(), name == other, "faults for {name}, and {other}");
            assert_eq!(faults.injected() > 0, name == other, "faults for {name}, and {other}");
        }
    }
    // Modifiers alone are those of every kind; with a kind, both must be there.
    for (only, struck) in [(Gfp::MOVABLE, [true, true, false]), (Gfp::KERNEL | Gfp::MOVABLE, [true, false, false])] {
        let asked = [Gfp::KERNEL | Gfp::MOVABLE | Gfp::ZERO, Gfp::ATOMIC | Gfp::MOVABLE, Gfp::KERNEL];
        let allocator = build(Faults::after(0).only(only));
        assert_eq!(asked.map(|gfp| allocator.alloc_page(gfp).is_err()), struck, "{only:?}");
    }
    let allocator = build(Faults::after(0).only_on_this_thread().only(Gfp::KERNEL));
    assert!(allocator.alloc_page(Gfp::KERNEL).is_err());
    assert!(allocator.alloc_page(Gfp::KERNEL | Gfp::NOFAIL).is_ok());
    allocator.drain();
    assert!(std::thread::scope(|scope| scope.spawn(|| allocator.alloc_page(Gfp::KERNEL).is_ok()).join().unwrap()));
}

#[test]
fn faults_are_parsed_and_a_syntax_error_names_its_part() {
    for text in ["after=3", "p=0.5,seed=7", "after=1,p=0.1,gfp=atomic", " after = 0 ", "p=1,gfp=reclaimable"] {
        assert!(text.parse::<Faults>().is_ok(), "{text}");
    }
    for (text, at, says) in [
        ("", 1, "KEY=VALUE"),
        ("gfp=atomic", 1, "which acquisitions"),
        ("p=2", 1, "0 to 1"),
        ("p=NaN", 1, "0 to 1"),
        ("after=1,p=x", 2, "0 to 1"),
        ("after=-1", 1, "acquisitions"),
        ("p=1,seed=0x3", 2, "a number"),
        ("p=1,every=3", 2, "after, p, gfp or seed"),
        ("after=3;p=1", 1, "acquisitions"),
        ("p=1,gfp=all", 2, "kernel, noio"),
        ("p=1,after=2,p=1", 3, "twice"),
        ("p=1,", 2, "KEY=VALUE"),
    ] {
        match text.parse::<Faults>().unwrap_err() {
            BuildError::FaultSyntax { part, why } => assert!(part == at && why.contains(says), "{text}: {part} {why}"),
            other => panic!("{text}: {other}"),
        }
    }
    // The text is the same request as the calls.
    let waits = |text: &str| {
        let faults: Faults = text.parse().unwrap();
        let allocator = arena(64).faults(faults.clone()).build().unwrap();
        let refused = [Gfp::KERNEL, Gfp::NOWAIT, Gfp::ATOMIC].map(|gfp| {
            let is_refused = allocator.alloc_page(gfp).is_err();
            allocator.drain();
            is_refused
        });
        assert!(faults.injected() > 0);
        refused
    };
    assert_eq!(waits("p=1,gfp=nowait"), [false, true, false]);
    assert_eq!(waits("after=0,gfp=kernel"), [true, false, false]);
}

#[test]
fn faults_hit_requests_that_reclaim() {
    // The third acquisition fails and all after it: a request that may wait gives up after its rounds, or at its end.
    let faults = Faults::after(2);
    let allocator = arena(512).faults(faults.clone()).build().unwrap();
    let cache = Arc::new(Cache::of(Vec::new()));
    let _registered = allocator.register_shrinker(cache.clone());
    let mut list = PageList::new();
    allocator.alloc_pages_bulk_list(Bulk::exact(128), &mut list).unwrap();
    let is_cancelled = AtomicBool::new(false);
    let cancel = Cancel::new();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            until_waiting(&allocator, 1);
            is_cancelled.store(true, Relaxed);
            cancel.cancel();
        });
        let request = Bulk::exact(512).timeout(HOUR).cancel(&cancel);
        assert!(matches!(allocator.alloc_pages_bulk_list(request, &mut list), Err(Error::Exhausted(_))));
        assert!(is_cancelled.load(Relaxed), "it gave up before it was told to");
    });
    assert_eq!(list.len(), 128);
    assert!(cache.calls() > 0 && faults.injected() > 0);
    drop(list);
    assert_all_back(&allocator);
}

#[test]
fn a_shortfall_of_blocks_names_the_account() {
    for allocator in &each(64) {
        let account = Account::new(PageCount::new(10));
        let paid = Bulk::up_to(4).order(Order::new(2).unwrap()).gfp(Gfp::KERNEL | Gfp::ACCOUNT).account(&account);
        let mut list = BlockList::new();
        let delivered = allocator.alloc_pages_bulk_list(paid, &mut list).unwrap();
        assert_eq!(delivered, Delivered { blocks: 2, shortfall: Some(Shortfall { missing: 2, why: Why::Account }) });
        assert_eq!(account.charged().get(), 8);
    }
}
