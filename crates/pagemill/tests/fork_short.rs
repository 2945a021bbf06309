//! The child of a process that is short of memory: no request waits there, and it goes on (C4.4), with its pools as well.

use crate::common::{HOUR, Over, all_without_waiting, fork, in_child, one_cpu, slots, until, until_waiting, wait_for};
use pagemill::{
    Allocator, BlockList, Bulk, Cancel, Error, Gfp, Memory, Mempool, Order, PageList, Source, Watermarks, Why,
};
use std::cell::Cell;
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::time::Duration;

#[test]
fn a_child_inherits_no_waiters() {
    own_process!();
    let allocator = one_cpu(Memory::anonymous(64));
    let mut pages = all_without_waiting(&allocator, Gfp::NOWAIT);
    let cancel = Cancel::new();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let request = Bulk::exact(1).order(Order::new(6).unwrap()).timeout(HOUR).cancel(&cancel);
            assert!(allocator.alloc_pages_bulk_list(request, &mut BlockList::new()).is_err());
        });
        until_waiting(&allocator, 1);
        in_child("forks while others wait", || {
            assert_eq!(allocator.stats().waiting, 0);
            drop(pages.pop());
            assert_eq!(allocator.stats().listed, 1);
            assert!(allocator.alloc_page(Gfp::KERNEL).is_ok());
        });
        assert_eq!(allocator.stats().waiting, 1);
        cancel.cancel();
    });
}

/// The request gets the pages above the low mark; only the thread frees more, and in a child the request starts the thread.
#[test]
fn a_bulk_request_that_ends_at_the_low_mark_wakes_background_reclaim() {
    own_process!();
    let memory = Memory::anonymous(1024).watermarks(Watermarks::above(64));
    let allocator = Allocator::builder().memory(memory).background_reclaim(true).build().unwrap();
    in_child("has its own thread", || {
        let mut list = PageList::new();
        let delivered = allocator.alloc_pages_bulk_list(Bulk::up_to(1024), &mut list).unwrap();
        assert_eq!((delivered.blocks, allocator.stats().free), (1024 - 80, 80));
        until("background reclaim", || allocator.stats().reclaim_background > 0);
    });
}

// Pools: their lock, their waiting requests, and the elements promised to a request (C5 and C4.4).

const RESERVE: usize = 80;

/// Each element is different. The source serves only a reserve that is made or enlarged: requests get all from the reserve.
fn pool() -> Mempool<impl Source<Item = u32> + Sync> {
    let next = AtomicU32::new(0);
    let source = move |gfp| (gfp == Gfp::KERNEL | Gfp::NORETRY).then(|| next.fetch_add(1, Relaxed));
    Mempool::from_fns(source, drop, RESERVE).unwrap()
}

/// Takes every element that the pool has left, each once; then a request waits for one of them.
fn goes_on(pool: &Mempool<impl Source<Item = u32> + Sync>) {
    let stats = pool.stats();
    assert_eq!(stats.waiting, 0, "nobody waits in a child");
    let n = stats.reserve.min(stats.min_nr);
    let mut all = slots(n);
    pool.alloc_bulk_array_raw(Bulk::exact(n).gfp(Gfp::NOWAIT), &mut all).unwrap();
    assert_eq!(all.iter().flatten().collect::<HashSet<_>>().len(), n, "an element is there twice");
    let mut rest: Vec<_> = std::iter::from_fn(|| pool.alloc_raw(Gfp::NOWAIT).ok()).map(Some).collect();
    assert_eq!(pool.stats().reserve, 0);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| pool.free_raw(pool.alloc_raw(Gfp::NOIO).unwrap()));
        until("a waiter", || pool.stats().waiting > 0);
        if n == 0 {
            pool.resize(stats.min_nr + 1).unwrap(); // All was out: this one is new.
        }
        pool.free_bulk_raw(&mut all);
        waiter.join().unwrap();
    });
    pool.free_bulk_raw(&mut rest);
    let now = pool.stats();
    assert_eq!((now.waiting, now.out, now.misused), (0, stats.out, 0));
    pool.resize(1).unwrap();
    pool.resize(2).unwrap();
    assert_eq!(pool.stats().reserve, 2);
}

#[test]
fn a_mempool_works_in_a_child_forked_while_others_wait_in_it() {
    own_process!();
    in_child("forks while others use a pool", || {
        let pool = &pool();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let _over = Over(&is_over);
            // Three want more than there is.
            for n in [50, 40, 30] {
                let is_over = &is_over;
                scope.spawn(move || {
                    while !is_over.load(Relaxed) {
                        let mut mine = slots(n);
                        pool.alloc_bulk_array_raw(Bulk::exact(n).gfp(Gfp::NOIO), &mut mine).unwrap();
                        let (one, others) = mine.split_at_mut(1);
                        pool.free_bulk_raw(one);
                        pool.free_bulk_raw(others);
                    }
                });
            }
            scope.spawn(|| {
                for turn in (0..).take_while(|_| !is_over.load(Relaxed)) {
                    pool.resize(RESERVE - turn % 8).unwrap();
                }
            });
            for _ in 0..60 {
                until("a waiter", || pool.stats().waiting > 0);
                in_child("goes on with the pool", || goes_on(pool));
            }
        });
        let stats = pool.stats();
        assert_eq!((stats.out, stats.waiting, stats.reserve), (0, 0, stats.min_nr));
    });
}

/// Both processes of a fork inside of a child, whose time is limited, go on; the parent ends as its child does.
fn ends_well(pid: libc::pid_t) {
    let status = if pid == 0 { 0 } else { wait_for(pid) };
    assert_eq!(status, 0, "the inner child ended with {status:#x}");
}

#[test]
fn a_mempool_callback_that_forks_gets_the_rest_in_both_processes() {
    own_process!();
    for (forks_at, unwinds) in [(0, false), (10, false), (RESERVE - 1, false), (10, true)] {
        in_child("forks in a callback", || {
            let pool = pool();
            let (mut got, mut pid) = (Vec::new(), None);
            let taken = std::panic::AssertUnwindSafe(|| {
                pool.alloc_bulk_callback_raw(Bulk::exact(RESERVE).gfp(Gfp::NOWAIT), |item| {
                    if got.len() == forks_at {
                        pid = Some(fork());
                    }
                    got.push(Some(item));
                    assert!(pid.is_none() || !unwinds, "on purpose");
                })
            });
            let taken = std::panic::catch_unwind(taken);
            assert_eq!(taken.is_err(), unwinds);
            assert!(unwinds || taken.is_ok_and(|taken| taken.is_ok()));
            assert_eq!(got.len(), if unwinds { forks_at + 1 } else { RESERVE });
            let stats = pool.stats();
            assert_eq!((stats.out, stats.reserve), (got.len(), RESERVE - got.len()));
            pool.free_bulk_raw(&mut got);
            goes_on(&pool);
            ends_well(pid.unwrap());
            pool.close().unwrap();
        });
    }
}

/// The rest that was promised may be gone in the child, when others there took it: the request comes short.
#[test]
fn a_mempool_callback_comes_short_in_a_child_whose_reserve_is_taken() {
    own_process!();
    in_child("takes what was promised", || {
        let pool = pool();
        let (mut got, mut pid, mut others) = (Vec::new(), None, slots(RESERVE));
        let taken = pool.alloc_bulk_callback_raw(Bulk::exact(RESERVE).gfp(Gfp::NOWAIT), |item| {
            got.push(Some(item));
            if got.len() == 1 {
                pid = Some(fork());
                if pid == Some(0) {
                    others = std::iter::from_fn(|| pool.alloc_raw(Gfp::NOWAIT).ok()).map(Some).collect();
                    assert!(!others.is_empty(), "nothing is promised in the child");
                }
            }
        });
        assert_eq!(taken.is_ok(), pid != Some(0));
        let all = got.len() + others.iter().flatten().count();
        assert_eq!((all, pool.stats().out, pool.stats().reserve), (RESERVE, RESERVE, 0));
        pool.free_bulk_raw(&mut got);
        pool.free_bulk_raw(&mut others);
        goes_on(&pool);
        ends_well(pid.unwrap());
        pool.close().unwrap();
    });
}

thread_local! {
    /// How many calls of the source are left until it forks.
    static FORKS_IN: Cell<u32> = const { Cell::new(0) };
    static PID: Cell<Option<libc::pid_t>> = const { Cell::new(None) };
}

#[test]
fn a_mempool_source_that_forks_in_a_wait_serves_both_processes() {
    own_process!();
    in_child("forks in a wait", || {
        let source = |gfp| {
            let is_for_reserve = gfp == Gfp::KERNEL | Gfp::NORETRY;
            FORKS_IN.set(FORKS_IN.get().saturating_sub(1));
            if FORKS_IN.get() == 1 {
                PID.set(Some(fork()));
            }
            // Once it has forked it has one, at the time after that.
            (is_for_reserve || (PID.get().is_some() && FORKS_IN.get() == 0)).then_some(7)
        };
        let pool = Mempool::from_fns(source, drop, 1).unwrap();
        let mut first = [None];
        pool.alloc_bulk_array_raw(Bulk::exact(1).gfp(Gfp::NOIO), &mut first).unwrap();
        // Twice it is asked before the request waits.
        FORKS_IN.set(4);
        let second = pool.alloc_raw(Gfp::NOIO).unwrap();
        let pid = PID.take().expect("it forked");
        assert_eq!((pool.stats().waiting, pool.stats().waits, pool.stats().out), (0, 1, 2));
        let late = Bulk::exact(1).gfp(Gfp::NOIO).timeout(Duration::ZERO);
        let refused = pool.alloc_bulk_array_raw(late, &mut [None]).unwrap_err();
        assert!(matches!(refused, Error::Exhausted(short) if short.why == Why::TimedOut), "{refused:?}");
        pool.resize(2).unwrap();
        pool.free_raw(second);
        pool.free_bulk_raw(&mut first);
        assert_eq!((pool.stats().out, pool.stats().reserve, pool.stats().waiting), (0, 2, 0));
        ends_well(pid);
        pool.close().unwrap();
    });
}
