//! Waiting for memory: in order of arrival, with an end that the caller sets (C3.6, C10.1). Nothing here is timed:
//! deadlines are an hour where something else has to end the wait.

use crate::common::{all_without_waiting, assert_all_back, backends, until};
use pagemill::{
    Allocator, BlockList, Bulk, Cancel, Delivered, Error, Gfp, Memory, NodeId, NodeMask, Order, Page, PageList,
    Shortfall, Why, free_pages_bulk,
};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

const HOUR: Duration = Duration::from_secs(3600);

/// Runs `test` with an allocator of each backend that works here.
fn with_each(pages: usize, test: impl Fn(&Allocator)) {
    for backend in backends() {
        test(&Allocator::builder().memory(Memory::anonymous(pages)).backend(backend).build().unwrap());
    }
}

/// Every page there is.
fn all(allocator: &Allocator) -> Vec<Page> {
    let mut pages = Vec::new();
    let n = allocator.managed_pages().get();
    let delivered = allocator.alloc_pages_bulk_callback(Bulk::up_to(n), |page| pages.push(page)).unwrap();
    assert_eq!((delivered.blocks, delivered.shortfall), (n, None));
    pages
}

/// One page for who waits an hour.
fn wait_for_one(allocator: &Allocator, cancel: &Cancel) -> Delivered {
    let mut list = PageList::new();
    allocator.alloc_pages_bulk_list(Bulk::up_to(1).deadline(HOUR).cancel(cancel), &mut list).unwrap()
}

fn until_waiting(allocator: &Allocator, n: u64) {
    until("a waiter", || allocator.stats().waiting == n);
}

const ONE: Delivered = Delivered { blocks: 1, shortfall: None };
const CANCELLED: Delivered = Delivered { blocks: 0, shortfall: Some(Shortfall { missing: 1, why: Why::Cancelled }) };

#[test]
fn who_waits_gets_what_others_free() {
    with_each(64, |allocator| {
        let mut pages = all(allocator);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| wait_for_one(allocator, &Cancel::new()));
            until_waiting(allocator, 1);
            drop(pages.pop());
            assert_eq!(waiter.join().unwrap(), ONE);
        });
        // A number that must be reached is collected as it comes.
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let mut list = PageList::new();
                allocator.alloc_pages_bulk_list(Bulk::exact(40).deadline(HOUR), &mut list).map(|_| list.len())
            });
            until_waiting(allocator, 1);
            while !waiter.is_finished() {
                drop(pages.pop());
                std::thread::yield_now();
            }
            assert_eq!(waiter.join().unwrap(), Ok(40));
        });
        let stats = allocator.stats();
        assert!(stats.waits >= 2 && stats.reclaim_direct == 0, "{stats:?}");
        drop(pages);
        assert_all_back(allocator);
    });
}

#[test]
fn blocks_are_waited_for_too() {
    with_each(1024, |allocator| {
        let order = Order::new(4).unwrap();
        let pages = all(allocator);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let mut blocks = pagemill::BlockList::new();
                let request = Bulk::exact(3).order(order).deadline(HOUR);
                allocator.alloc_pages_bulk_list(request, &mut blocks).map(|delivered| delivered.blocks)
            });
            until_waiting(allocator, 1);
            pages.into_iter().for_each(drop);
            assert_eq!(waiter.join().unwrap(), Ok(3));
        });
        assert_all_back(allocator);
    });
}

#[test]
fn a_thousand_waiters_are_served_in_order_of_arrival() {
    const WAITERS: usize = 1000;
    with_each(1, |allocator| {
        let pages = all(allocator);
        let served = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for number in 0..WAITERS {
                let served = &served;
                let wait = move || {
                    let mut slots = [const { None::<Page> }; 1];
                    allocator.alloc_pages_bulk_array(Bulk::exact(1).deadline(HOUR), &mut slots).unwrap();
                    // Noted before the page goes to the next one.
                    served.lock().unwrap().push(number);
                    free_pages_bulk(&mut slots);
                };
                std::thread::Builder::new().stack_size(256 << 10).spawn_scoped(scope, wait).unwrap();
                until_waiting(allocator, number as u64 + 1);
            }
            drop(pages);
        });
        let served = served.into_inner().unwrap();
        let first_wrong = served.iter().zip(0..).position(|(&number, turn)| number != turn);
        assert_eq!(
            (served.len(), first_wrong),
            (WAITERS, None),
            "{:?}",
            first_wrong.map(|at| &served[at.saturating_sub(1)..at + 3])
        );
        assert_eq!(allocator.stats().waits, WAITERS as u64);
        assert_all_back(allocator);
    });
}

#[test]
fn nobody_who_may_wait_overtakes() {
    with_each(2, |allocator| {
        let mut pages = all(allocator);
        let served = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            let block = scope.spawn(|| {
                // Wants both, and came first.
                let mut blocks = pagemill::BlockList::new();
                let request = Bulk::exact(1).order(Order::new(1).unwrap()).deadline(HOUR);
                allocator.alloc_pages_bulk_list(request, &mut blocks).unwrap();
                served.fetch_add(1, Relaxed)
            });
            until_waiting(allocator, 1);
            let page = scope.spawn(|| {
                wait_for_one(allocator, &Cancel::new());
                served.fetch_add(1, Relaxed)
            });
            until_waiting(allocator, 2);
            // One page is no block, and the other one's turn has not come.
            drop(pages.pop());
            let request = Bulk::exact(1).deadline(Duration::from_millis(50));
            assert!(allocator.alloc_pages_bulk_list(request, &mut PageList::new()).is_err());
            assert_eq!((served.load(Relaxed), allocator.stats().waiting), (0, 2));
            drop(pages.pop());
            let order = (block.join().unwrap(), page.join().unwrap());
            assert_eq!(order, (0, 1));
        });
        assert_all_back(allocator);
    });
}

#[test]
fn nobody_who_may_wait_overtakes_in_bulk() {
    with_each(64, |allocator| {
        std::thread::scope(|scope| {
            let mut pages = all(allocator);
            pages.sort_unstable_by_key(Page::addr);
            let block = scope.spawn(|| {
                let mut blocks = pagemill::BlockList::new();
                let request = Bulk::exact(1).order(Order::new(6).unwrap()).deadline(HOUR);
                allocator.alloc_pages_bulk_list(request, &mut blocks).map(|delivered| delivered.blocks)
            });
            until_waiting(allocator, 1);
            drop(pages.split_off(1));
            // It waits for the last page; who comes later may wait, and does, before those that are free.
            let mut list = PageList::new();
            for request in [Bulk::up_to(8), Bulk::exact(8), Bulk::at_least(2, 40)] {
                let after = request.deadline(Duration::from_millis(20));
                let got = allocator.alloc_pages_bulk_list(after, &mut list).map_or(0, |delivered| delivered.blocks);
                assert_eq!((got, allocator.stats().waiting), (0, 1), "{request:?}");
            }
            // Who may not wait takes what there is.
            let delivered = allocator.alloc_pages_bulk_list(Bulk::up_to(8).gfp(Gfp::NOWAIT), &mut list).unwrap();
            assert_eq!(delivered.blocks, 8);
            drop((list, pages));
            assert_eq!(block.join().unwrap(), Ok(1));
        });
        assert_all_back(allocator);
    });
}

#[test]
fn a_cancelled_wait_returns() {
    with_each(8, |allocator| {
        let pages = all(allocator);
        let cancel = Cancel::new();
        std::thread::scope(|scope| {
            let waiters: Vec<_> = (0..5).map(|_| scope.spawn(|| wait_for_one(allocator, &cancel))).collect();
            until_waiting(allocator, 5);
            cancel.cancel();
            waiters.into_iter().for_each(|waiter| assert_eq!(waiter.join().unwrap(), CANCELLED));
        });
        // Neither does one begin afterwards.
        assert_eq!(wait_for_one(allocator, &cancel), CANCELLED);
        let mut slots: Vec<Option<Page>> = (0..4).map(|_| None).collect();
        let request = Bulk::exact(4).gfp(Gfp::KERNEL | Gfp::NOFAIL).deadline(HOUR).cancel(&cancel);
        assert!(matches!(allocator.alloc_pages_bulk_array(request, &mut slots), Err(Error::Exhausted(_))));
        assert!(slots.iter().all(Option::is_none));
        drop(pages);
        assert_all_back(allocator);
    });
}

#[test]
fn who_leaves_the_queue_stops_nobody() {
    with_each(1, |allocator| {
        for leaves in 0..4 {
            let pages = all(allocator);
            let cancels = std::array::from_fn::<_, 4, _>(|_| Cancel::new());
            let served = Mutex::new(Vec::new());
            std::thread::scope(|scope| {
                let waiters: Vec<_> = cancels
                    .iter()
                    .enumerate()
                    .map(|(number, cancel)| {
                        let served = &served;
                        let waiter = scope.spawn(move || {
                            let mut slots = [const { None::<Page> }; 1];
                            let request = Bulk::up_to(1).deadline(HOUR).cancel(cancel);
                            if allocator.alloc_pages_bulk_array(request, &mut slots).unwrap().added == 1 {
                                served.lock().unwrap().push(number);
                            }
                        });
                        until_waiting(allocator, number as u64 + 1);
                        waiter
                    })
                    .collect();
                cancels[leaves].cancel();
                until_waiting(allocator, 3);
                drop(pages);
                waiters.into_iter().for_each(|waiter| waiter.join().unwrap());
            });
            let others: Vec<usize> = (0..4).filter(|&number| number != leaves).collect();
            assert_eq!(served.into_inner().unwrap(), others);
        }
        assert_all_back(allocator);
    });
}

#[test]
fn who_leaves_lets_the_next_one_try_what_is_free_already() {
    with_each(2, |allocator| {
        std::thread::scope(|scope| {
            let mut pages = all(allocator);
            let (cancel, endless) = (Cancel::new(), Cancel::new());
            let (leaves, stays) = (cancel.clone(), endless.clone());
            let block = scope.spawn(move || {
                let mut blocks = pagemill::BlockList::new();
                let request = Bulk::exact(1).order(Order::new(1).unwrap()).deadline(HOUR).cancel(&leaves);
                allocator.alloc_pages_bulk_list(request, &mut blocks).is_err()
            });
            until_waiting(allocator, 1);
            let page = scope.spawn(move || wait_for_one(allocator, &stays));
            until_waiting(allocator, 2);
            drop(pages.pop());
            // Nothing else comes back until the second one is served.
            cancel.cancel();
            until("the second one's page", || page.is_finished());
            endless.cancel();
            assert!(block.join().unwrap(), "one page is no block");
            assert_eq!(page.join().unwrap(), ONE);
        });
        assert_all_back(allocator);
    });
}

#[test]
fn a_request_that_need_not_wait_for_ever_does_not_do_so_in_line() {
    // The head never gives up, and what it waits for is with those behind it.
    with_each(4, |allocator| {
        std::thread::scope(|scope| {
            // In here: a test that fails lets go of them, and then everybody ends.
            let pages = all(allocator);
            let stubborn = scope.spawn(|| allocator.alloc_page(Gfp::KERNEL | Gfp::NOFAIL).is_ok());
            until_waiting(allocator, 1);
            for gfp in [Gfp::KERNEL, Gfp::NOIO, Gfp::KERNEL | Gfp::RETRY_MAYFAIL, Gfp::KERNEL | Gfp::NORETRY] {
                let bounded = scope.spawn(move || allocator.alloc_page(gfp).map(drop));
                until("the end of a bounded wait", || bounded.is_finished());
                assert!(matches!(bounded.join().unwrap(), Err(Error::Exhausted(_))), "{gfp:?}");
            }
            assert_eq!(allocator.stats().waiting, 1);
            drop(pages);
            assert!(stubborn.join().unwrap());
        });
        assert_all_back(allocator);
    });
}

#[test]
fn deadlines_end_waits() {
    with_each(4, |allocator| {
        let pages = all(allocator);
        let wait = Duration::from_millis(30);
        let mut list = PageList::new();
        // The time counts from each call, however old the request is.
        let request = Bulk::up_to(2).deadline(wait);
        let begun = Instant::now();
        for waits in 1..=2 {
            let (start, before) = (Instant::now(), allocator.stats().waited_us);
            let delivered = allocator.alloc_pages_bulk_list(request, &mut list).unwrap();
            let shortfall = Shortfall { missing: 2, why: Why::TimedOut };
            assert_eq!((delivered.blocks, delivered.shortfall), (0, Some(shortfall)));
            assert!(start.elapsed() >= wait, "it gave up before its deadline");
            let stats = allocator.stats();
            assert_eq!(stats.waits, waits);
            // On a busy machine a part of the deadline has passed before it begins to wait.
            assert!(
                stats.waited_us > before && u128::from(stats.waited_us) <= begun.elapsed().as_micros(),
                "{stats:?}"
            );
        }
        // One behind somebody who waits for longer ends too, and the other one stays.
        let cancel = Cancel::new();
        std::thread::scope(|scope| {
            let long = scope.spawn(|| wait_for_one(allocator, &cancel));
            until_waiting(allocator, 1);
            assert!(allocator.alloc_pages_bulk_list(Bulk::exact(1).deadline(wait), &mut list).is_err());
            until_waiting(allocator, 1);
            assert!(!long.is_finished());
            cancel.cancel();
            assert_eq!(long.join().unwrap(), CANCELLED);
        });
        // One that is over before it begins gets what there is, and waits for nothing.
        drop(pages);
        let delivered = allocator.alloc_pages_bulk_list(Bulk::up_to(9).deadline(Duration::ZERO), &mut list).unwrap();
        assert_eq!((delivered.blocks, delivered.shortfall), (4, Some(Shortfall { missing: 5, why: Why::TimedOut })));
        drop(list);
        assert_all_back(allocator);
    });
}

#[test]
fn memory_that_is_added_or_allowed_goes_to_who_waits() {
    let second = NodeId::new(1).unwrap();
    for backend in backends() {
        let memory = [Memory::anonymous(64), Memory::anonymous(64).node(second)];
        let [first, other] = memory.clone();
        let allocator = Allocator::builder().memory(first).memory(other).backend(backend).build().unwrap();
        allocator.set_allowed_nodes(NodeMask::only(NodeId::ZERO)).unwrap();
        // To the last one: what is left on a list is had by the next one, who then does not wait.
        let _all = all_without_waiting(&allocator, Gfp::NOWAIT);
        let request = Bulk::exact(1).order(Order::PAGEBLOCK).deadline(HOUR);
        let wait = || allocator.alloc_pages_bulk_list(request, &mut BlockList::new());
        std::thread::scope(|scope| {
            let waiter = scope.spawn(wait);
            until_waiting(&allocator, 1);
            // Too little for who waits: what others take of it comes back to its zone.
            allocator.add_memory(&memory[0]).unwrap();
            drop(allocator.alloc_page(Gfp::NOWAIT).unwrap());
            assert_eq!((allocator.stats().listed, allocator.stats().waiting), (0, 1));
            allocator.add_memory(&Memory::anonymous(1024)).unwrap();
            assert_eq!(waiter.join().unwrap().map(|delivered| delivered.blocks), Ok(1));
        });
        let _more = all_without_waiting(&allocator, Gfp::NOWAIT);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| wait_for_one(&allocator, &Cancel::new()));
            until_waiting(&allocator, 1);
            allocator.set_allowed_nodes(NodeMask::ALL).unwrap();
            assert_eq!(waiter.join().unwrap(), ONE);
        });
    }
}

#[test]
fn who_may_not_wait_does_not() {
    with_each(4, |allocator| {
        let pages = all(allocator);
        let mut list = PageList::new();
        for gfp in [Gfp::NOWAIT, Gfp::ATOMIC, Gfp::KERNEL | Gfp::NORETRY] {
            let delivered = allocator.alloc_pages_bulk_list(Bulk::up_to(1).gfp(gfp), &mut list).unwrap();
            assert_eq!((delivered.blocks, allocator.stats().waits), (0, 0), "{gfp:?}");
        }
        // A deadline of an hour is how long it may wait, not that it may.
        for gfp in [Gfp::NOWAIT, Gfp::ATOMIC] {
            let request = Bulk::up_to(1).gfp(gfp).deadline(HOUR);
            assert_eq!(allocator.alloc_pages_bulk_list(request, &mut list).unwrap().blocks, 0);
        }
        // Nor does one where there is nothing to wait for: no shrinker, no deadline, and all pages out.
        assert!(matches!(allocator.alloc_page(Gfp::KERNEL), Err(Error::Exhausted(_))));
        assert_eq!(allocator.stats().waits, 0);
        drop(pages);
        assert_all_back(allocator);
    });
}

#[test]
fn many_wait_and_free_at_once() {
    // More is wanted than there is, all the time; each thread frees what it got. Everybody gets through.
    const THREADS: usize = 8;
    const TURNS: usize = 300;
    with_each(40, |allocator| {
        let (pages, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let drainer = scope.spawn(|| {
                while !is_over.load(Relaxed) {
                    allocator.drain();
                    std::thread::yield_now();
                }
            });
            let workers: Vec<_> = (0..THREADS)
                .map(|thread| {
                    let pages = &pages;
                    scope.spawn(move || {
                        for turn in 0..TURNS {
                            // One page at a time is held while the next is waited for, by whoever holds none else: so
                            // that nobody waits for who waits.
                            let n = 1 + (thread * 7 + turn * 3) % 4;
                            let mut list = PageList::new();
                            let request = Bulk::exact(n).deadline(HOUR);
                            allocator.alloc_pages_bulk_list(request, &mut list).unwrap();
                            pages.fetch_add(list.len(), Relaxed);
                            if turn % 3 == 0 {
                                std::thread::yield_now();
                            }
                        }
                    })
                })
                .collect();
            workers.into_iter().for_each(|worker| worker.join().unwrap());
            is_over.store(true, Relaxed);
            drainer.join().unwrap();
        });
        let wanted = (0..THREADS).flat_map(|thread| (0..TURNS).map(move |turn| 1 + (thread * 7 + turn * 3) % 4));
        assert_eq!(pages.load(Relaxed), wanted.sum::<usize>());
        assert_all_back(allocator);
    });
}
