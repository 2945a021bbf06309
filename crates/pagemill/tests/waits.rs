//! Waiting for memory (C3.20): requests for the same resource are served in order of arrival, none waits behind one that lacks
//! something else, and the caller sets the end. Nothing here is timed: deadlines are an hour where something else has to end
//! the wait.

use crate::common::{
    HOUR, Over, all_without_waiting, allocators, arena, assert_all_back, backends, is_served_beside_others, slots,
    take, until, until_waiting,
};
use pagemill::{
    Allocator, AtLeast, Block, BlockList, Bulk, Cancel, Delivered, Error, Exact, Gfp, InvalidRequest, List, Memory,
    NodeId, NodeMask, Order, Owned, Page, PageList, Policy, Run, Shortfall, Watermarks, Why, free_pages_bulk,
};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Every page there is.
fn all(allocator: &Allocator) -> Vec<Page> {
    take(allocator, allocator.managed_pages().get())
}

/// Waits an hour for a page.
fn wait_for_one(allocator: &Allocator, cancel: &Cancel) -> Delivered {
    let mut list = PageList::new();
    allocator.alloc_pages_bulk_list(Bulk::up_to(1).timeout(HOUR).cancel(cancel), &mut list).unwrap()
}

const ONE: Delivered = Delivered { blocks: 1, shortfall: None };
const CANCELLED: Delivered = Delivered { blocks: 0, shortfall: Some(Shortfall { missing: 1, why: Why::Cancelled }) };

#[test]
fn a_waiting_request_gets_freed_pages() {
    for allocator in &allocators(64) {
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
                allocator.alloc_pages_bulk_list(Bulk::exact(40).timeout(HOUR), &mut list).map(|_| list.len())
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
    }
}

#[test]
fn a_waiting_request_gets_freed_blocks() {
    for allocator in &allocators(1024) {
        let order = Order::new(4).unwrap();
        let pages = all(allocator);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let mut blocks = BlockList::new();
                let request = Bulk::exact(3).order(order).timeout(HOUR);
                allocator.alloc_pages_bulk_list(request, &mut blocks).map(|delivered| delivered.blocks)
            });
            until_waiting(allocator, 1);
            pages.into_iter().for_each(drop);
            assert_eq!(waiter.join().unwrap(), Ok(3));
        });
        assert_all_back(allocator);
    }
}

#[test]
fn a_thousand_waiters_of_one_kind_are_served_in_order_of_arrival() {
    const WAITERS: usize = 1000;
    for allocator in &allocators(1) {
        let pages = all(allocator);
        let served = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for number in 0..WAITERS {
                let served = &served;
                let wait = move || {
                    let mut slots = [const { None::<Page> }; 1];
                    allocator.alloc_pages_bulk_array(Bulk::exact(1).timeout(HOUR), &mut slots).unwrap();
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
        assert_eq!(served.len(), WAITERS);
        let mut turns = served.iter().zip(0..);
        assert_eq!(turns.find(|(number, turn)| *number != turn), None, "the first out of turn, and its turn");
        assert_eq!(allocator.stats().waits, WAITERS as u64);
        assert_all_back(allocator);
    }
}

/// Cancels when a test is over, however it ends: a failed assertion is not to leave others waiting for an hour.
struct Cancels<'a>(&'a Cancel);

impl Drop for Cancels<'_> {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// One request waits that nothing there can serve; meanwhile all others are served at once, that can be.
fn holds_up_nobody<N, T: Owned>(allocator: &Allocator, request: Bulk<'_, N, T>) {
    let (before, cancel) = (allocator.stats(), Cancel::new());
    std::thread::scope(|scope| {
        let over = Cancels(&cancel);
        let waiter = scope.spawn(|| {
            let request = request.timeout(HOUR).cancel(&cancel);
            let mut blocks = List::<T>::new();
            assert_eq!(
                allocator.alloc_pages_bulk_list(request, &mut blocks).map_or(0, |delivered| delivered.blocks),
                0
            );
        });
        until_waiting(allocator, 1);
        for gfp in [Gfp::KERNEL, Gfp::NOIO, Gfp::KERNEL | Gfp::NORETRY, Gfp::NOWAIT] {
            let pages: Vec<Page> = (0..20).map(|_| allocator.alloc_page(gfp).unwrap()).collect();
            let mut list = PageList::new();
            for request in [0, 64, 2].map(|least| Bulk::at_least(least, 64)) {
                // One that may not wait takes from the nearest node alone in bulk, and the machine may have this thread on
                // the one that is exhausted.
                let request = request.policy(Policy::Preferred(NodeId::ZERO));
                let delivered = allocator.alloc_pages_bulk_list(request.gfp(gfp), &mut list).unwrap();
                assert_eq!((delivered.blocks, delivered.shortfall), (64, None), "{gfp:?} {request:?}");
            }
            assert!(allocator.alloc_pages(gfp, Order::new(3).unwrap()).is_ok());
            drop(pages);
        }
        assert_eq!(allocator.stats().waiting, 1);
        drop(over);
        waiter.join().unwrap();
    });
    let stats = allocator.stats();
    assert_eq!((stats.shortfalls() - before.shortfalls(), stats.waits - before.waits), (1, 1), "its own alone");
}

#[test]
fn a_request_waiting_for_a_block_delays_no_other() {
    for allocator in &allocators(16_384) {
        // One page of each pageblock stays out: there is no block of order 9, and nearly all memory is free.
        let mut pages = all(allocator);
        pages.retain(|page| page.addr() % Order::PAGEBLOCK.bytes() == 0);
        allocator.drain();
        assert!(allocator.stats().free > 16_000);
        holds_up_nobody(allocator, Bulk::exact(1).order(Order::PAGEBLOCK));
        drop(pages);
        assert_all_back(allocator);
    }
}

#[test]
fn a_request_waiting_for_an_exhausted_zone_delays_no_other() {
    let second = NodeId::new(1).unwrap();
    for backend in backends() {
        let builder = arena(4096).backend(backend);
        let builder = builder.memory(Memory::anonymous(512).dma32()).memory(Memory::anonymous(512).node(second));
        let allocator = builder.build().unwrap();
        for request in [Bulk::up_to(1).exact_node(second), Bulk::up_to(1).gfp(Gfp::KERNEL | Gfp::DMA32)] {
            let mut pages: Vec<Page> = Vec::new();
            let one = request.timeout(Duration::ZERO);
            while allocator.alloc_pages_bulk_callback(one, |page| pages.push(page)).unwrap().blocks > 0 {}
            assert_eq!(pages.len(), 512);
            holds_up_nobody(&allocator, request);
        }
    }
}

#[test]
fn a_request_waiting_for_all_pages_delays_no_other() {
    for allocator in &allocators(16_384) {
        let page = allocator.alloc_page(Gfp::KERNEL).unwrap();
        holds_up_nobody(allocator, Bulk::<_, Page>::exact(16_384));
        drop(page);
        assert_all_back(allocator);
    }
}

#[test]
fn requests_that_can_never_succeed_are_invalid_at_once() {
    let marks = Watermarks { min: 100, low: 110, high: 120, lowmem_reserve: 0 };
    for backend in backends() {
        let memory = Memory::anonymous(16_384).watermarks(marks);
        let allocator = Allocator::builder().memory(memory).backend(backend).build().unwrap();
        let never = |blocks, order, most| Error::Invalid(InvalidRequest::MoreThanManaged { blocks, order, most });
        let (mut list, mut blocks) = (PageList::new(), BlockList::new());
        for gfp in [Gfp::KERNEL, Gfp::NOWAIT, Gfp::KERNEL | Gfp::NOFAIL] {
            let all = 16_384 - 100;
            let error = allocator.alloc_pages_bulk_list(Bulk::exact(all + 1).gfp(gfp).timeout(HOUR), &mut list);
            assert_eq!(error.unwrap_err(), never(all + 1, 0, all), "{gfp:?}");
            let order = Order::new(18).unwrap();
            assert_eq!(allocator.alloc_pages(gfp, order).unwrap_err(), never(1, 18, 0));
            for request in [Bulk::at_least(0, 3), Bulk::at_least(1, 1)] {
                let request = request.order(order).gfp(gfp).timeout(HOUR);
                assert_eq!(allocator.alloc_pages_bulk_list(request, &mut blocks).unwrap_err(), never(1, 18, 0));
            }
            let nowhere = Bulk::up_to(1).exact_node(NodeId::new(3).unwrap()).gfp(gfp).timeout(HOUR);
            let error = allocator.alloc_pages_bulk_list(nowhere, &mut list).unwrap_err();
            assert_eq!(error, Error::Invalid(InvalidRequest::NoSuchNode { nodes: 8 }));
        }
        // And as many as there are is a request like any other.
        let all = allocator.alloc_pages_bulk_list(Bulk::exact(16_384 - 100), &mut list).unwrap();
        assert_eq!((all.blocks, allocator.stats().waits), (16_284, 0));
    }
}

#[test]
fn a_request_that_can_be_served_overtakes_one_that_cannot() {
    for allocator in &allocators(2) {
        let mut pages = all(allocator);
        std::thread::scope(|scope| {
            let block = scope.spawn(|| {
                let mut blocks = BlockList::new();
                let request = Bulk::exact(1).order(Order::new(1).unwrap()).timeout(HOUR);
                allocator.alloc_pages_bulk_list(request, &mut blocks).map(|delivered| delivered.blocks)
            });
            until_waiting(allocator, 1);
            let page = scope.spawn(|| wait_for_one(allocator, &Cancel::new()));
            until_waiting(allocator, 2);
            // One page is no block: it goes to the later request, and from there to the next.
            drop(pages.pop());
            assert_eq!(page.join().unwrap(), ONE);
            drop(allocator.alloc_page(Gfp::KERNEL).unwrap());
            assert_eq!(allocator.stats().waiting, 1);
            drop(pages.pop());
            assert_eq!(block.join().unwrap(), Ok(1));
        });
        assert_all_back(allocator);
    }
}

#[test]
fn a_waiting_bulk_request_holds_no_pages() {
    for allocator in &allocators(64) {
        let mut pages = all(allocator);
        std::thread::scope(|scope| {
            let form = |request: Bulk<'_, AtLeast>, n: usize| match n % 3 {
                0 => allocator.alloc_pages_bulk_list(request, &mut PageList::new()).map(|_| ()),
                1 => allocator.alloc_pages_bulk_runs(request, &mut Vec::<Run<Page>>::new()).map(|_| ()),
                _ => {
                    let mut slots = slots::<Page>(64);
                    allocator.alloc_pages_bulk_array(request, &mut slots).map(|_| ())
                }
            };
            let waiters: Vec<_> =
                (0..6).map(|n| scope.spawn(move || form(Bulk::at_least(40, 50 + n).timeout(HOUR), n))).collect();
            until_waiting(allocator, 6);
            for free in 1..40 {
                drop(pages.pop());
                // Freed pages are there for any request that can use them, once all waiting ones have looked.
                let mut all = PageList::new();
                until("all that is free", || {
                    let request = Bulk::exact(free).gfp(Gfp::NOWAIT);
                    allocator.alloc_pages_bulk_list(request, &mut all).is_ok()
                });
            }
            assert_eq!(allocator.stats().waiting, 6);
            drop(pages);
            waiters.into_iter().for_each(|waiter| waiter.join().unwrap().unwrap());
        });
        assert_all_back(allocator);
    }
}

/// Two always fit, and each frees its pages at once: no request waits for ever.
#[test]
fn three_requests_for_half_of_memory_take_turns() {
    for allocator in &allocators(2048) {
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        let mut list = PageList::new();
                        allocator.alloc_pages_bulk_list(Bulk::exact(1024).timeout(HOUR), &mut list).unwrap();
                    }
                });
            }
        });
        assert_all_back(allocator);
    }
}

/// A list of so many blocks.
fn blocks_of(request: Bulk<'_, Exact, Block>) -> impl Fn(&Allocator) -> Result<usize, Error> + Sync {
    move |allocator| {
        let mut list = BlockList::new();
        allocator.alloc_pages_bulk_list(request.timeout(HOUR), &mut list).map(|delivered| delivered.blocks)
    }
}

#[test]
fn an_overtaken_request_claims_what_comes_back() {
    is_served_beside_others(512, 200, blocks_of(Bulk::exact(200)));
    is_served_beside_others(2048, 1, blocks_of(Bulk::exact(1).order(Order::PAGEBLOCK)));
    is_served_beside_others(2048, 1, blocks_of(Bulk::exact(1).order(Order::new(7).unwrap())));
}

/// The pages that a claim lacks may never be freed: other requests go on.
#[test]
fn a_claim_that_cannot_be_fulfilled_ends() {
    for allocator in &allocators(64) {
        let mut kept = all(allocator);
        drop(kept.split_off(4));
        let (cancel, is_over, turns) = (Cancel::new(), AtomicBool::new(false), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            let _over = Over(&is_over);
            let waiter = scope.spawn(|| {
                // Four of them stay out.
                let request = Bulk::exact(62).timeout(HOUR).cancel(&cancel);
                allocator.alloc_pages_bulk_list(request, &mut PageList::new()).is_err()
            });
            until_waiting(allocator, 1);
            for _ in 0..2 {
                scope.spawn(|| {
                    while !is_over.load(Relaxed) {
                        let few = Bulk::exact(4).timeout(HOUR).cancel(&cancel);
                        let is_served = allocator.alloc_pages_bulk_list(few, &mut PageList::new()).is_ok();
                        turns.fetch_add(usize::from(is_served), Relaxed);
                    }
                });
            }
            // Many times as many as it takes to claim.
            until("the others' turns", || turns.load(Relaxed) > 5000);
            is_over.store(true, Relaxed);
            cancel.cancel();
            assert!(waiter.join().unwrap());
        });
        drop(kept);
        assert_all_back(allocator);
    }
}

#[test]
fn a_cancelled_wait_returns() {
    for allocator in &allocators(8) {
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
        let mut slots = slots::<Page>(4);
        let request = Bulk::exact(4).gfp(Gfp::KERNEL | Gfp::NOFAIL).timeout(HOUR).cancel(&cancel);
        assert!(matches!(allocator.alloc_pages_bulk_array(request, &mut slots), Err(Error::Exhausted(_))));
        assert!(slots.iter().all(Option::is_none));
        drop(pages);
        assert_all_back(allocator);
    }
}

#[test]
fn a_cancelled_waiter_does_not_stop_the_queue() {
    for allocator in &allocators(1) {
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
                            let request = Bulk::up_to(1).timeout(HOUR).cancel(cancel);
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
    }
}

#[test]
fn a_cancelled_waiter_lets_the_next_one_try_free_pages() {
    for allocator in &allocators(2) {
        std::thread::scope(|scope| {
            let mut pages = all(allocator);
            let (cancel, endless) = (Cancel::new(), Cancel::new());
            let (leaves, stays) = (cancel.clone(), endless.clone());
            let block = scope.spawn(move || {
                let mut blocks = BlockList::new();
                let request = Bulk::exact(1).order(Order::new(1).unwrap()).timeout(HOUR).cancel(&leaves);
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
    }
}

#[test]
fn a_bounded_wait_ends_behind_an_endless_one() {
    // The head never gives up, and it waits for pages that the others hold.
    for allocator in &allocators(4) {
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
    }
}

#[test]
fn deadlines_end_waits() {
    for allocator in &allocators(4) {
        let pages = all(allocator);
        let wait = Duration::from_millis(30);
        let mut list = PageList::new();
        // The time counts from each call, however old the request is.
        let request = Bulk::up_to(2).timeout(wait);
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
        // A wait behind a longer one ends too, and the longer one stays.
        let cancel = Cancel::new();
        std::thread::scope(|scope| {
            let long = scope.spawn(|| wait_for_one(allocator, &cancel));
            until_waiting(allocator, 1);
            assert!(allocator.alloc_pages_bulk_list(Bulk::exact(1).timeout(wait), &mut list).is_err());
            until_waiting(allocator, 1);
            assert!(!long.is_finished());
            cancel.cancel();
            assert_eq!(long.join().unwrap(), CANCELLED);
        });
        // A deadline that is over at once gets all that is free, and does not wait.
        drop(pages);
        let request = Bulk::up_to(9).gfp(Gfp::KERNEL | Gfp::RETRY_MAYFAIL).timeout(Duration::ZERO);
        let delivered = allocator.alloc_pages_bulk_list(request, &mut list).unwrap();
        assert_eq!((delivered.blocks, delivered.shortfall), (4, Some(Shortfall { missing: 5, why: Why::TimedOut })));
        drop(list);
        assert_all_back(allocator);
    }
}

#[test]
fn added_or_allowed_memory_serves_waiters() {
    let second = NodeId::new(1).unwrap();
    for backend in backends() {
        let (first, other) = (Memory::anonymous(64), Memory::anonymous(64).node(second));
        let whole = Memory::anonymous(1024);
        let builder = Allocator::builder().memory(first).memory(other).memory(whole).backend(backend);
        let allocator = builder.build().unwrap();
        allocator.set_allowed_nodes(NodeMask::only(NodeId::ZERO)).unwrap();
        // To the last one: a page left on a list would serve the next request, which then does not wait.
        let _all = all_without_waiting(&allocator, Gfp::NOWAIT);
        let request = Bulk::exact(1).order(Order::PAGEBLOCK).timeout(HOUR);
        let wait = || allocator.alloc_pages_bulk_list(request, &mut BlockList::new());
        std::thread::scope(|scope| {
            let waiter = scope.spawn(wait);
            until_waiting(&allocator, 1);
            // Too little for the waiting request: pages that others take of it go back to its zone.
            allocator.add_memory(Memory::anonymous(64)).unwrap();
            drop(allocator.alloc_page(Gfp::NOWAIT).unwrap());
            assert_eq!((allocator.stats().listed, allocator.stats().waiting), (0, 1));
            allocator.add_memory(Memory::anonymous(1024)).unwrap();
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
fn nowait_and_noretry_requests_do_not_wait() {
    for allocator in &allocators(4) {
        let pages = all(allocator);
        let mut list = PageList::new();
        for gfp in [Gfp::NOWAIT, Gfp::ATOMIC, Gfp::KERNEL | Gfp::NORETRY] {
            let delivered = allocator.alloc_pages_bulk_list(Bulk::up_to(1).gfp(gfp), &mut list).unwrap();
            assert_eq!((delivered.blocks, allocator.stats().waits), (0, 0), "{gfp:?}");
        }
        // A deadline of an hour is how long it may wait, not that it may.
        for gfp in [Gfp::NOWAIT, Gfp::ATOMIC] {
            let request = Bulk::up_to(1).gfp(gfp).timeout(HOUR);
            assert_eq!(allocator.alloc_pages_bulk_list(request, &mut list).unwrap().blocks, 0);
        }
        // Nor does one where there is nothing to wait for: no shrinker, no deadline, and all pages out.
        assert!(matches!(allocator.alloc_page(Gfp::KERNEL), Err(Error::Exhausted(_))));
        assert_eq!(allocator.stats().waits, 0);
        drop(pages);
        assert_all_back(allocator);
    }
}

#[test]
fn threads_that_want_more_than_there_is_all_get_through() {
    // More is wanted than there is, all the time; each thread frees what it got. All of them finish.
    const THREADS: usize = 8;
    const TURNS: usize = 300;
    for allocator in &allocators(40) {
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
                            // A thread holds no page while it waits, so
                            // that no thread waits for a waiting one.
                            let n = 1 + (thread * 7 + turn * 3) % 4;
                            let mut list = PageList::new();
                            let request = Bulk::exact(n).timeout(HOUR);
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
    }
}
