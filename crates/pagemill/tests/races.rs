//! Races that once were lost: between the last page that comes back and the allocator's end, between requests that take
//! more than they keep, between a fork and the first use.

use crate::common::{Over, PATIENCE, all, arena, assert_all_back, backends, in_child, slots};
use pagemill::{Allocator, Block, Bulk, Gfp, Order, Page, free_pages_bulk};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::time::{Duration, Instant};

/// Closes as soon as no page is out.
fn close_when_all_are_back(mut allocator: Allocator) {
    while let Err(still_out) = allocator.close() {
        allocator = still_out.allocator;
    }
}

#[test]
fn a_bulk_free_touches_nothing_after_its_last_page() {
    // A CPU number that waits, the second time that a bulk free asks for it, until the allocator is closed or it is
    // clear that it cannot be: then pages are still in hand, as they must be.
    thread_local! {
        static ASKED: Cell<Option<usize>> = const { Cell::new(None) };
    }
    static GO: AtomicBool = AtomicBool::new(false);
    static TRIED: AtomicBool = AtomicBool::new(false);
    fn cpu() -> usize {
        if let Some(asked) = ASKED.get() {
            ASKED.set(Some(asked + 1));
            if asked == 1 {
                GO.store(true, SeqCst);
                while !TRIED.load(SeqCst) {
                    std::thread::yield_now();
                }
            }
        }
        0
    }
    let allocator = Allocator::builder().pages(8192).cpus(1, cpu).build().unwrap();
    let mut slots = slots::<Page>(65);
    allocator.alloc_pages_bulk_array(Bulk::exact(64), &mut slots[..64]).unwrap();
    let closer = std::thread::spawn(move || {
        while !GO.load(SeqCst) {
            std::thread::yield_now();
        }
        let first_try = allocator.close();
        TRIED.store(true, SeqCst);
        if let Err(still_out) = first_try {
            close_when_all_are_back(still_out.allocator);
        }
    });
    ASKED.set(Some(0));
    assert_eq!(free_pages_bulk(&mut slots), 64);
    GO.store(true, SeqCst);
    closer.join().unwrap();
}

#[test]
fn a_bulk_free_walks_trailing_holes_without_the_allocator() {
    for backend in backends() {
        for _ in 0..30 {
            let allocator = Allocator::builder().pages(8192).backend(backend).build().unwrap();
            let mut slots = slots::<Page>(464);
            allocator.alloc_pages_bulk_array(Bulk::exact(64), &mut slots[..64]).unwrap();
            let go = Arc::new(AtomicBool::new(false));
            let goes = go.clone();
            let closer = std::thread::spawn(move || {
                while !goes.load(SeqCst) {
                    std::hint::spin_loop();
                }
                close_when_all_are_back(allocator);
            });
            go.store(true, SeqCst);
            assert_eq!(free_pages_bulk(&mut slots), 64);
            closer.join().unwrap();
        }
    }
}

#[test]
fn failed_large_requests_hide_no_pageblock() {
    let allocator = Allocator::builder().pages(2048).build().unwrap();
    let (order9, order10) = (Order::PAGEBLOCK, Order::new(10).unwrap());
    // Of four pageblocks every second one is free, so that no order 10 can be had.
    let blocks = (0..4).map(|_| allocator.alloc_pages(Gfp::KERNEL, order9).unwrap());
    let start = allocator.arenas()[0].range.start;
    let (kept, free): (Vec<Block>, Vec<Block>) =
        blocks.partition(|block| (block.addr() - start) / order9.bytes() % 2 == 1);
    drop(free);
    const EACH: usize = 20_000;
    let (is_over, in_vain) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let _over = Over(&is_over);
        scope.spawn(|| {
            while !is_over.load(SeqCst) {
                assert!(allocator.alloc_pages(Gfp::KERNEL, order10).is_err());
                in_vain.fetch_add(1, SeqCst);
            }
        });
        let (begin, mut rounds) = (Instant::now(), 0);
        while rounds < EACH || in_vain.load(SeqCst) < EACH {
            assert!(begin.elapsed() < PATIENCE, "{in_vain:?} large requests in {rounds} rounds");
            rounds += 1;
            let both = (allocator.alloc_pages(Gfp::KERNEL, order9), allocator.alloc_pages(Gfp::KERNEL, order9));
            assert!(both.0.is_ok() && both.1.is_ok(), "refused although two pageblocks are free");
        }
    });
    drop(kept);
    allocator.close().unwrap();
}

#[test]
fn requests_wait_for_frames_in_transit() {
    for backend in backends() {
        // Three threads that each hold at most one page of 64: a request that may wait is never refused.
        let allocator = Allocator::builder().pages(64).backend(backend).build().unwrap();
        const EACH: usize = 200_000;
        let turns = [const { AtomicUsize::new(0) }; 3];
        std::thread::scope(|scope| {
            let mobilities = [Gfp::KERNEL, Gfp::KERNEL | Gfp::MOVABLE, Gfp::KERNEL | Gfp::RECLAIMABLE];
            for (own, mobility) in turns.iter().zip(mobilities) {
                let (allocator, turns) = (&allocator, &turns);
                scope.spawn(move || {
                    // All of them go on until each has met the others often enough.
                    while turns.iter().any(|turns| turns.load(Relaxed) < EACH) {
                        let page = allocator.alloc_page(mobility);
                        if page.is_err() {
                            turns.iter().for_each(|turns| turns.store(EACH, Relaxed)); // That the others end too.
                        }
                        assert!(page.is_ok(), "{backend}: refused with at least 61 pages free");
                        own.fetch_add(1, Relaxed);
                    }
                });
            }
        });
        allocator.close().unwrap();
    }
}

#[test]
fn a_request_waits_for_frames_held_by_another_request() {
    // A CPU number that runs a closure the n-th time that it is asked for.
    thread_local! {
        static ASKS: Cell<usize> = const { Cell::new(0) };
        static THEN: Cell<Option<Box<dyn FnOnce()>>> = const { Cell::new(None) };
    }
    fn at_ask(number: usize, then: impl FnOnce() + 'static) {
        ASKS.set(number);
        THEN.set(Some(Box::new(then)));
    }
    fn cpu() -> usize {
        let left = ASKS.replace(ASKS.get().saturating_sub(1));
        if left == 1
            && let Some(then) = THEN.take()
        {
            then();
        }
        0
    }
    const PAGES: u64 = 64;
    // A request asks fewer times before it waits, and more often until it gives up.
    const MANY: usize = 100;
    let mut were_under_way = 0;
    for number in 1.. {
        let allocator = arena(PAGES as usize).cpus(1, cpu).build().unwrap();
        let page = allocator.alloc_page(Gfp::KERNEL).unwrap();
        allocator.drain();
        let seen = Rc::new(Cell::new(None));
        let (its, tells) = (allocator.clone(), seen.clone());
        at_ask(number, move || {
            let rest = all(&its, Gfp::NOWAIT);
            let stats = its.stats();
            // A page comes back while the next request waits, if it does.
            at_ask(MANY, || drop(page));
            let is_served = its.alloc_page(Gfp::KERNEL).is_ok();
            let has_waited = THEN.take().is_none();
            tells.set(Some((stats.allocated - stats.freed < PAGES, is_served, has_waited)));
            drop(rest);
        });
        // Whatever this one has in its hands, it keeps for as long.
        drop(allocator.alloc_page(Gfp::KERNEL));
        THEN.set(None);
        let Some((are_under_way, is_served, has_waited)) = seen.get() else { break };
        assert_eq!((is_served, has_waited), (are_under_way, are_under_way), "at the CPU number's ask {number}");
        were_under_way += usize::from(are_under_way);
        assert_all_back(&allocator);
    }
    assert!(were_under_way > 0);
}

#[test]
fn a_child_forked_during_the_first_use_can_allocate() {
    const DELAY: &str = "PAGEMILL_TEST_DELAY_US";
    let Ok(delay_us) = std::env::var(DELAY) else {
        // Each try wants a process whose first use is still to come.
        let me = std::env::current_exe().unwrap();
        for delay_us in [0, 20, 50, 100, 150, 200, 300, 500, 1000] {
            let test = std::process::Command::new(&me)
                .args(["--exact", "races::a_child_forked_during_the_first_use_can_allocate"])
                .env(DELAY, delay_us.to_string())
                .output()
                .unwrap();
            let said = String::from_utf8_lossy(&test.stdout);
            assert!(test.status.success() && said.contains("1 passed"), "{delay_us} us: {said}");
        }
        return;
    };
    let first_use = std::thread::spawn(|| drop(Allocator::global().alloc_page(Gfp::KERNEL).unwrap()));
    std::thread::sleep(Duration::from_micros(delay_us.parse().unwrap()));
    in_child("is forked during the first use", || drop(Allocator::global().alloc_page(Gfp::KERNEL).unwrap()));
    first_use.join().unwrap();
}

/// The standard library's threads take a lock as they begin and end that a fork does not wait for, and so must not be what
/// Pagemill starts in a child.
#[test]
fn a_child_forked_during_thread_starts_can_start_threads() {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _over = Over(&is_over);
        for _ in 0..4 {
            scope.spawn(|| {
                while !is_over.load(Relaxed) {
                    std::thread::spawn(|| ()).join().unwrap();
                }
            });
        }
        for _ in 0..100 {
            in_child("builds an allocator", || drop(arena(64).background_reclaim(true).build().unwrap()));
        }
    });
}
