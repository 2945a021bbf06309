//! Depots: pages that one CPU frees reach another CPU without the zone, and no page stays in a depot while a request needs it.
//! CPU numbers are made up, so that every page is accounted for (ADR 34).
use crate::common::{Over, allocators, array, assert_all_back, fake_cpu, go_to, in_child};
use pagemill::{Allocator, Bulk, Gfp, Memory, Order, Page, Stats, Watermarks, free_pages_bulk};
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

const PAGES: usize = 1 << 15;
const FREES: usize = 0;
const TAKES: usize = 1;

fn allocator(pages: usize) -> Allocator {
    Allocator::builder().pages(pages).cpus(2, fake_cpu).build().unwrap()
}

fn free_by_64(slots: &mut [Option<Page>]) {
    assert_eq!(slots.chunks_mut(64).map(free_pages_bulk).sum::<usize>(), slots.len());
}

/// Has the other CPU ask for pages: before that nothing is passed on.
fn ask(allocator: &Allocator) {
    go_to(TAKES);
    drop(allocator.alloc_page(Gfp::KERNEL).unwrap());
}

/// Puts pages on the list of one CPU and into depots. Returns the counters at that moment, and the pages' addresses.
fn fill_depots(allocator: &Allocator) -> (Stats, HashSet<usize>) {
    let mut slots = array(allocator, 2000);
    let addrs = slots.iter().flatten().map(Page::addr).collect();
    ask(allocator);
    allocator.drain();
    go_to(FREES);
    let empty = allocator.stats();
    free_by_64(&mut slots);
    let stats = allocator.stats();
    let of_zone = |stats: &Stats| (stats.drains, stats.free, stats.drained_pages);
    assert_eq!(of_zone(&stats), of_zone(&empty), "the zone got some");
    assert!(stats.in_depots > 1000 && stats.depot_in > 0, "{stats:?}");
    (stats, addrs)
}

/// Pages that went to lists and depots, less those that left them, are listed.
fn assert_conserved(stats: &Stats) {
    let came = stats.refilled_pages + stats.freed - stats.direct_in;
    let went = stats.drained_pages + stats.allocated - stats.direct_out;
    assert_eq!(came - went, stats.listed, "{stats:?}");
    assert!(stats.in_depots <= stats.listed);
}

#[test]
fn freed_pages_reach_another_cpu_without_the_zone() {
    let allocator = allocator(PAGES);
    let (before, addrs) = fill_depots(&allocator);
    go_to(TAKES);
    let mut held = array(&allocator, 64);
    held.push(Some(allocator.alloc_page(Gfp::KERNEL).unwrap()));
    for _ in 0..10 {
        held.extend(array(&allocator, 64));
    }
    assert!(held.iter().flatten().all(|page| addrs.contains(&page.addr())), "a page came from the zone");
    let after = allocator.stats();
    assert_eq!((after.refills, after.free), (before.refills, before.free), "the zone was asked");
    assert!((1..=11).contains(&(after.depot_out - before.depot_out)), "a load has several requests' pages");
    assert_eq!(allocator.validate().unwrap().listed as u64, after.listed);
    [before, after].iter().for_each(assert_conserved);
    drop(held);
    assert_all_back(&allocator);
    assert_conserved(&allocator.stats());
    assert_eq!(allocator.stats().in_depots, 0);
}

#[test]
fn a_single_cpu_puts_nothing_into_depots() {
    let allocator = allocator(PAGES);
    go_to(FREES);
    for _ in 0..10 {
        free_by_64(&mut array(&allocator, 1 << 9));
        free_by_64(&mut (0..16).flat_map(|_| array(&allocator, 64)).collect::<Vec<_>>());
    }
    let stats = allocator.stats();
    assert!(stats.drains > 0);
    assert_eq!((stats.depot_in, stats.in_depots), (0, 0));
    assert_all_back(&allocator);
}

#[test]
fn depots_are_emptied_before_a_request_is_refused() {
    let allocator = allocator(PAGES);
    let rest = PAGES - 2000;
    for is_large in [false, true] {
        let (stats, _) = fill_depots(&allocator);
        let on_lists = (stats.listed - stats.in_depots) as usize;
        go_to(TAKES);
        let mut all = Vec::new();
        let mut take = |gfp, n: usize| {
            let bulk = Bulk::up_to(n).gfp(gfp);
            allocator.alloc_pages_bulk_callback(bulk, |page: Page| all.push(page)).unwrap().blocks
        };
        // A request that may not wait drains no list, but takes all pages of the depots.
        let sum = if is_large {
            take(Gfp::NOWAIT, PAGES)
        } else {
            (0..).map(|_| take(Gfp::NOWAIT, 64)).take_while(|&n| n > 0).sum()
        };
        assert_eq!((sum, allocator.stats().in_depots), (PAGES - on_lists, 0));
        assert!(sum > rest);
        assert_eq!(take(Gfp::KERNEL, PAGES), on_lists);
        assert_conserved(&allocator.stats());
        drop(all);
        assert_all_back(&allocator);
    }
}

#[test]
fn a_request_that_may_wait_gets_a_block_whose_frames_are_in_depots() {
    let allocator = allocator(4096);
    let mut slots = array(&allocator, 4095);
    ask(&allocator);
    allocator.drain();
    go_to(FREES);
    slots.sort_by_key(|page| page.as_ref().map(Page::addr));
    free_by_64(&mut slots[..512]);
    assert!(allocator.stats().in_depots > 0);
    go_to(TAKES);
    drop(allocator.alloc_pages(Gfp::KERNEL, Order::PAGEBLOCK).unwrap());
    free_pages_bulk(&mut slots);
    assert_all_back(&allocator);
}

#[test]
fn frees_below_the_low_mark_go_to_the_zone_and_not_to_depots() {
    let marks = Watermarks { min: 64, low: 1024, high: 2048, lowmem_reserve: 0 };
    let memory = Memory::anonymous(8192).watermarks(marks);
    let allocator = Allocator::builder().memory(memory).cpus(2, fake_cpu).build().unwrap();
    let mut slots = array(&allocator, 7500);
    go_to(TAKES);
    let page = allocator.alloc_page(Gfp::NOWAIT).unwrap();
    go_to(FREES);
    let before = allocator.stats();
    assert!(before.free < 1024, "{before:?}");
    let from = slots.len() - 512;
    free_by_64(&mut slots[from..]);
    let after = allocator.stats();
    assert_eq!((after.in_depots, after.free), (before.in_depots, before.free + 512));
    drop((slots, page));
    assert_all_back(&allocator);
}

#[test]
fn idle_pageblocks_in_depots_go_back_to_the_system() {
    let minute = Duration::from_secs(60);
    let allocator = Allocator::builder().pages(PAGES).cpus(2, fake_cpu).give_back_after(minute).build().unwrap();
    fill_depots(&allocator);
    let now = Instant::now();
    allocator.give_back_idle(now);
    assert_eq!(allocator.stats().in_depots, 0);
    // All used pages but those on the list of a CPU.
    assert!(allocator.give_back_idle(now + 2 * minute).get() >= 1024);
    assert_all_back(&allocator);
}

#[test]
fn a_forked_child_keeps_the_pages_in_depots() {
    let allocator = allocator(PAGES);
    let (stats, _) = fill_depots(&allocator);
    in_child("takes all", || {
        assert_eq!((allocator.stats().in_depots, allocator.validate().unwrap().free), (0, PAGES));
        go_to(TAKES);
        array(&allocator, PAGES);
        let (_, addrs) = fill_depots(&allocator);
        assert!(!addrs.is_empty());
        assert_conserved(&allocator.stats());
    });
    assert_eq!(allocator.stats(), stats, "the parent felt it");
    assert_all_back(&allocator);
}

#[test]
fn children_forked_during_handovers_lose_no_page() {
    for allocator in allocators(PAGES) {
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (to_other, from_one) = sync_channel::<Vec<Option<Page>>>(8);
            let (allocator, stop) = (&allocator, &stop);
            scope.spawn(move || while !stop.load(Relaxed) && to_other.send(array(allocator, 64)).is_ok() {});
            scope.spawn(move || from_one.iter().for_each(|mut slots| free_by_64(&mut slots)));
            let _over = Over(stop);
            for _ in 0..40 {
                in_child("takes all that is free", || {
                    let census = allocator.validate().unwrap();
                    assert_eq!((census.quarantined, census.free + census.handed_out), (0, PAGES));
                    drop(array(allocator, census.free));
                    allocator.drain();
                    assert_eq!(allocator.validate().unwrap().free, census.free);
                });
            }
        });
        assert_all_back(&allocator);
        assert_conserved(&allocator.stats());
    }
}
