//! Requests that come back short: when one keeps its pages, and when it reclaims and waits for more (C3.4, C3.6, C3.8); and
//! how each is counted (C3.13).
use crate::common::{Cache, Calls, FORMS, HOUR, all, allocators, arena, assert_all_back, backends, until_waiting};
use pagemill::{
    Account, Allocator, Bulk, Cancel, Faults, Gfp, Memory, NodeId, NodeMask, Page, PageCount, PageList, Shortfall,
    Watermarks, Why,
};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const PAGES: usize = 64;

/// A cache that gives one page a call.
fn cache(pages: impl IntoIterator<Item = Page>) -> Arc<Cache> {
    Arc::new(Cache { most: 1, ..Cache::of(pages) })
}

/// Makes a request in each form: `check` gets the number of pages, and the shortfall.
fn in_each_form(allocator: &Allocator, request: Bulk<'_>, mut check: impl FnMut(&str, usize, Option<Shortfall>)) {
    for (name, form) in FORMS {
        let (pages, shortfall) = form(allocator, request, PAGES + 1).unwrap();
        check(name, pages.len(), shortfall);
    }
}

#[test]
fn up_to_neither_reclaims_nor_waits_once_it_has_a_page() {
    let cancel = Cancel::new();
    cancel.cancel();
    for allocator in &allocators(PAGES) {
        let cache = cache([]);
        let registered = allocator.register_shrinker(cache.clone());
        let page = allocator.alloc_page(Gfp::KERNEL).unwrap();
        for gfp in [Gfp::KERNEL, Gfp::NOIO, Gfp::KERNEL | Gfp::NORETRY, Gfp::KERNEL | Gfp::NOFAIL] {
            // A deadline is how long it may wait for the first page, and a token ends that wait.
            for request in [Bulk::up_to(PAGES), Bulk::up_to(PAGES).timeout(HOUR).cancel(&cancel)] {
                for request in [request.gfp(gfp), request.gfp(gfp).populated()] {
                    in_each_form(allocator, request, |form, got, shortfall| {
                        let exhausted = Some(Shortfall { missing: 1, why: Why::Exhausted });
                        assert_eq!((got, shortfall), (PAGES - 1, exhausted), "{form}, {request:?}");
                        let stats = allocator.stats();
                        let tries = (cache.calls(), stats.reclaim_direct, stats.waits);
                        assert_eq!(tries, (0, 0, 0), "{form}, {request:?}: calls, rounds, waits");
                    });
                }
            }
        }
        drop((page, registered));
        assert_all_back(allocator);
    }
}

#[test]
fn at_least_stops_at_its_minimum() {
    for allocator in &allocators(PAGES) {
        let cache = cache([]);
        let registered = allocator.register_shrinker(cache.clone());
        let page = allocator.alloc_page(Gfp::KERNEL).unwrap();
        let mut list = PageList::new();
        let delivered = allocator.alloc_pages_bulk_list(Bulk::at_least(PAGES - 1, PAGES), &mut list).unwrap();
        let stats = allocator.stats();
        assert_eq!((delivered.blocks, cache.calls()), (PAGES - 1, 0));
        assert_eq!((stats.reclaim_direct, stats.waits), (0, 0));
        drop((page, registered, list));
        assert_all_back(allocator);
    }
}

#[test]
fn retry_mayfail_reclaims_for_all_pages_and_keeps_a_part() {
    for allocator in &allocators(PAGES) {
        let all = || all(allocator, Gfp::NOWAIT).into_iter();
        let request = Bulk::up_to(PAGES).gfp(Gfp::KERNEL | Gfp::RETRY_MAYFAIL);
        let mut list = PageList::new();
        // The cache has the missing pages, and gives one a call.
        let cache = cache(all().take(40));
        let registered = allocator.register_shrinker(cache.clone());
        let delivered = allocator.alloc_pages_bulk_list(request, &mut list).unwrap();
        assert_eq!((delivered.blocks, delivered.shortfall, cache.calls()), (PAGES, None, 40));
        assert_eq!((allocator.stats().reclaim_direct, allocator.stats().waits), (40, 0));
        drop(list);
        // All but one page of it.
        let page = allocator.alloc_page(Gfp::KERNEL).unwrap();
        let calls = cache.calls();
        cache.extend(all().take(40));
        let mut slots = [const { None::<Page> }; PAGES];
        let filled = allocator.alloc_pages_bulk_array(request, &mut slots).unwrap();
        assert_eq!((filled.added, filled.first_hole), (PAGES - 1, PAGES - 1));
        assert_eq!(filled.shortfall, Some(Shortfall { missing: 1, why: Why::Exhausted }));
        assert_eq!(
            (cache.calls() - calls, allocator.stats().waits),
            (40 + 1 + 64, 1),
            "as long as such a request tries"
        );
        drop((slots, page, registered));
        assert_all_back(allocator);
    }
}

#[test]
fn retry_mayfail_waits_for_all_until_its_deadline() {
    for allocator in &allocators(PAGES) {
        let mut held = all(allocator, Gfp::NOWAIT);
        held.truncate(8);
        std::thread::scope(|scope| {
            let request = Bulk::up_to(PAGES).gfp(Gfp::KERNEL | Gfp::RETRY_MAYFAIL).timeout(HOUR);
            let waiter = scope.spawn(move || {
                let mut list = PageList::new();
                allocator.alloc_pages_bulk_list(request, &mut list).map(|delivered| (delivered.blocks, list))
            });
            for page in held.drain(..) {
                until_waiting(allocator, 1);
                drop(page);
            }
            assert_eq!(waiter.join().unwrap().unwrap().0, PAGES);
        });
        let over = Bulk::up_to(PAGES + 1).gfp(Gfp::KERNEL | Gfp::RETRY_MAYFAIL).timeout(Duration::ZERO);
        let delivered = allocator.alloc_pages_bulk_list(over, &mut PageList::new()).unwrap();
        assert_eq!((delivered.blocks, delivered.shortfall.map(|short| short.why)), (PAGES, Some(Why::TimedOut)));
        assert_all_back(allocator);
    }
}

#[test]
fn up_to_without_a_page_reclaims_one() {
    for allocator in &allocators(PAGES) {
        let cache = cache(all(allocator, Gfp::NOWAIT));
        let registered = allocator.register_shrinker(cache.clone());
        let mut list = PageList::new();
        for (calls, gfp) in (1..).zip([Gfp::KERNEL, Gfp::NOIO, Gfp::KERNEL | Gfp::NORETRY]) {
            let delivered = allocator.alloc_pages_bulk_list(Bulk::up_to(8).gfp(gfp), &mut list).unwrap();
            let exhausted = Some(Shortfall { missing: 7, why: Why::Exhausted });
            assert_eq!((delivered.blocks, delivered.shortfall, cache.calls()), (1, exhausted, calls), "{gfp:?}");
        }
        drop((registered, list));
        cache.clear();
        assert_all_back(allocator);
    }
}

/// The shortfalls of this reason, if there are no others.
fn counted(allocator: &Allocator, why: Why) -> u64 {
    let (stats, vmstat) = (allocator.stats(), allocator.vmstat().to_string());
    let lines = |name: String| vmstat.lines().any(|line| line == name);
    assert_eq!(stats.shortfalls(), stats.shortfalls_by(why), "{vmstat}");
    assert!(lines(format!("alloc_shortfall {}", stats.shortfalls())), "{vmstat}");
    assert!(lines(format!("alloc_shortfall_{} {}", why.name(), stats.shortfalls())), "{vmstat}");
    stats.shortfalls()
}

#[test]
fn each_shortfall_is_counted_once() {
    for allocator in &allocators(PAGES) {
        let counted = || counted(allocator, Why::Exhausted);
        in_each_form(allocator, Bulk::up_to(PAGES), |_, _, _| assert_eq!(counted(), 0, "none is missing"));
        let mut calls = 0;
        in_each_form(allocator, Bulk::up_to(PAGES + 1), |form, _, _| {
            calls += 1;
            assert_eq!(counted(), calls, "{form}");
        });
        let page = allocator.alloc_page(Gfp::KERNEL).unwrap();
        let mut list = PageList::new();
        assert!(allocator.alloc_pages_bulk_list(Bulk::exact(PAGES), &mut list).is_err());
        assert_eq!(counted(), 5);
        assert_eq!(allocator.alloc_pages_bulk_list(Bulk::at_least(2, PAGES), &mut list).unwrap().blocks, PAGES - 1);
        assert_eq!(counted(), 6);
        assert!(allocator.alloc_page(Gfp::NOWAIT).is_err());
        assert_eq!(counted(), 7);
        // A request that can never succeed is no shortfall.
        assert!(allocator.alloc_pages_bulk_list(Bulk::exact(PAGES + 1), &mut list).is_err());
        assert_eq!(counted(), 7);
        drop((page, list));
        assert_all_back(allocator);
    }
}

#[test]
fn shortfalls_are_counted_by_reason() {
    let mut list = PageList::new();
    for backend in backends() {
        let build = |memory: Memory| Allocator::builder().memory(memory).backend(backend).build().unwrap();
        let memory = || Memory::anonymous(PAGES);

        let low = build(memory().watermarks(Watermarks { min: 8, low: 16, high: 32, lowmem_reserve: 0 }));
        assert_eq!(low.alloc_pages_bulk_list(Bulk::up_to(PAGES), &mut list).unwrap().blocks, PAGES - 16);
        assert_eq!(counted(&low, Why::BelowMark), 1);
        assert!(low.alloc_pages_bulk_list(Bulk::exact(PAGES - 8).gfp(Gfp::NOWAIT), &mut list).is_err());
        assert_eq!(counted(&low, Why::BelowMark), 2);
        list.clear();

        let paid = build(memory());
        let account = Account::new(PageCount::new(10));
        assert_eq!(paid.alloc_pages_bulk_list(Bulk::up_to(16).account(&account), &mut list).unwrap().blocks, 10);
        assert!(paid.alloc_pages_bulk_list(Bulk::exact(16).account(&account), &mut list).is_err());
        assert_eq!(counted(&paid, Why::Account), 2);
        list.clear();

        let ended = build(memory());
        let held = all(&ended, Gfp::NOWAIT);
        let (before, cancel) = (ended.stats(), Cancel::new());
        cancel.cancel();
        for (request, why) in [
            (Bulk::up_to(2).timeout(HOUR).cancel(&cancel), Why::Cancelled),
            (Bulk::up_to(2).timeout(Duration::ZERO), Why::TimedOut),
        ] {
            assert_eq!(ended.alloc_pages_bulk_list(request, &mut list).unwrap().blocks, 0);
            assert_eq!((ended.stats().shortfalls_by(why), before.shortfalls_by(why)), (1, 0));
        }
        assert_eq!(ended.stats().shortfalls() - before.shortfalls(), 2);
        drop(held);

        let struck = arena(PAGES).backend(backend).faults(Faults::after(0)).build().unwrap();
        assert_eq!(struck.alloc_pages_bulk_list(Bulk::up_to(2), &mut list).unwrap().blocks, 0);
        assert_eq!(counted(&struck, Why::Fault), 1);
    }
}

#[test]
fn a_shortfall_inside_a_shrinker_is_counted_as_reclaiming() {
    for allocator in &allocators(PAGES) {
        let held = all(allocator, Gfp::NOWAIT);
        // A shrinker that asks for pages, as it may not.
        let own = Arc::new(Mutex::new(Some(allocator.clone())));
        let its = own.clone();
        let registered = allocator.register_shrinker(Calls::new(move |_, _| {
            let allocator = its.lock().unwrap().clone().unwrap();
            let delivered = allocator.alloc_pages_bulk_list(Bulk::up_to(2), &mut PageList::new()).unwrap();
            assert_eq!(delivered.shortfall, Some(Shortfall { missing: 2, why: Why::Reclaiming }));
            0
        }));
        assert!(allocator.alloc_page(Gfp::KERNEL | Gfp::NORETRY).is_err());
        assert_eq!(allocator.stats().shortfalls_by(Why::Reclaiming), 1);
        drop((held, registered));
        own.lock().unwrap().take();
        assert_all_back(allocator);
    }
}

#[test]
fn a_shortfall_is_counted_in_the_zone_of_its_request() {
    let (first, second) = (NodeId::ZERO, NodeId::new(1).unwrap());
    for backend in backends() {
        let builder = Allocator::builder().memory(Memory::anonymous(PAGES)).backend(backend);
        let allocator = builder.memory(Memory::anonymous(PAGES).node(second)).build().unwrap();
        let of = |node: NodeId, why| {
            let zones = allocator.zoneinfo();
            zones.iter().filter(|zone| zone.node == node).map(|zone| zone.stats.shortfalls_by(why)).sum::<u64>()
        };
        let mut list = PageList::new();
        allocator.alloc_pages_bulk_list(Bulk::up_to(PAGES + 1).exact_node(second), &mut list).unwrap();
        assert_eq!((of(first, Why::Exhausted), of(second, Why::Exhausted)), (0, 1));
        allocator.set_allowed_nodes(NodeMask::only(first)).unwrap();
        allocator.alloc_pages_bulk_list(Bulk::up_to(1).exact_node(second), &mut list).unwrap();
        assert_eq!((of(first, Why::NotAllowed), of(second, Why::NotAllowed)), (0, 1));
        assert_eq!(allocator.stats().shortfalls(), 2);
        drop(list);
        assert_all_back(&allocator);
    }
}
