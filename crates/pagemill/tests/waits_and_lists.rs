//! CPUs' lists while a request waits, and the order of service (C3.6). Deadlines are an hour: something else ends the
//! waits.
use crate::common::{Calls, HOUR, all, one_cpu, until, until_waiting};
use pagemill::{Allocator, BlockList, Bulk, Cancel, Gfp, Memory, Order, Page, PageList, Watermarks};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

const PAGES: usize = 64;

/// Waits for a block that cannot be had, until it is cancelled.
fn wait_for_a_block(allocator: &Allocator, order: u8, cancel: &Cancel) {
    let request = Bulk::exact(1).order(Order::new(order).unwrap()).timeout(HOUR).cancel(cancel);
    assert!(allocator.alloc_pages_bulk_list(request, &mut BlockList::new()).is_err());
}

#[test]
fn lists_are_shut_while_a_request_waits() {
    let allocator = one_cpu(Memory::anonymous(PAGES));
    let mut pages = all(&allocator, Gfp::NOWAIT);
    let listed_of_a_free = |pages: &mut Vec<Page>| {
        drop(pages.pop());
        allocator.stats().listed
    };
    let (first, second) = (Cancel::new(), Cancel::new());
    std::thread::scope(|scope| {
        let one = scope.spawn(|| wait_for_a_block(&allocator, 6, &first));
        until_waiting(&allocator, 1);
        let other = scope.spawn(|| wait_for_a_block(&allocator, 6, &second));
        until_waiting(&allocator, 2);
        assert_eq!(listed_of_a_free(&mut pages), 0);
        first.cancel();
        one.join().unwrap();
        assert_eq!((allocator.stats().waiting, listed_of_a_free(&mut pages)), (1, 0));
        second.cancel();
        other.join().unwrap();
    });
    assert_eq!((allocator.stats().waiting, listed_of_a_free(&mut pages)), (0, 1));
}

#[test]
fn lists_below_the_low_mark_stay_shut_after_a_wait() {
    let allocator = one_cpu(Memory::anonymous(PAGES).watermarks(Watermarks::above(16)));
    let mut pages = all(&allocator, Gfp::NOWAIT);
    let cancel = Cancel::new();
    std::thread::scope(|scope| {
        scope.spawn(|| wait_for_a_block(&allocator, 5, &cancel));
        until_waiting(&allocator, 1);
        cancel.cancel();
    });
    drop(pages.pop());
    assert_eq!((allocator.stats().free, allocator.stats().listed), (17, 0));
}

#[test]
fn a_reclaiming_request_does_not_overtake_waiters() {
    let allocator = one_cpu(Memory::anonymous(PAGES));
    let pages = Arc::new(Mutex::new(all(&allocator, Gfp::NOWAIT)));
    // It gives a page to requests of this thread alone.
    let (its, me) = (pages.clone(), std::thread::current().id());
    let registered = allocator.register_shrinker(Calls::new(move |_, _| {
        usize::from(std::thread::current().id() == me && its.lock().unwrap().pop().is_some())
    }));
    let (cancel, other) = (Cancel::new(), Cancel::new());
    std::thread::scope(|scope| {
        scope.spawn(|| wait_for_a_block(&allocator, 6, &cancel));
        until_waiting(&allocator, 1);
        // It waits for something else.
        let page = allocator.alloc_page(Gfp::KERNEL | Gfp::NORETRY).unwrap();
        // Two came, if the waiter had the first in its hands for a moment.
        let _more = all(&allocator, Gfp::NOWAIT);
        scope.spawn(|| {
            let request = Bulk::exact(1).timeout(HOUR).cancel(&other);
            // A page that the first waiter held while all was taken is freed now, and is kept.
            let mut kept = PageList::new();
            while allocator.alloc_pages_bulk_list(request, &mut kept).is_ok() {}
        });
        until_waiting(&allocator, 2);
        let left = pages.lock().unwrap().len();
        assert!(allocator.alloc_page(Gfp::KERNEL | Gfp::NORETRY).is_err());
        let request = Bulk::up_to(4).gfp(Gfp::KERNEL | Gfp::NORETRY);
        let delivered = allocator.alloc_pages_bulk_list(request, &mut PageList::new()).unwrap();
        assert_eq!((delivered.blocks, pages.lock().unwrap().len()), (0, left));
        other.cancel();
        cancel.cancel();
        drop(page);
    });
    assert!(allocator.alloc_page(Gfp::KERNEL | Gfp::NORETRY).is_ok());
    drop(registered);
}

#[test]
fn requests_behind_a_slow_shrinker_get_freed_pages() {
    let allocator = one_cpu(Memory::anonymous(PAGES));
    let mut pages = all(&allocator, Gfp::NOWAIT);
    // It gives nothing, and its second call takes as long as it is told to.
    let is_over = Arc::new(AtomicBool::new(false));
    let ends = is_over.clone();
    let slow = Calls::new(move |call, _| {
        if call == 2 {
            until("the end of a slow shrinker", || ends.load(Relaxed));
        }
        0
    });
    let _registered = allocator.register_shrinker(slow.clone());
    std::thread::scope(|scope| {
        // The first in line: it looks at nothing until its shrinker is done.
        let first = scope.spawn(|| allocator.alloc_page(Gfp::KERNEL).map(drop));
        until("a shrinker at work", || slow.so_far() == 2);
        pages.truncate(PAGES / 2);
        for gfp in [Gfp::KERNEL, Gfp::KERNEL | Gfp::NORETRY] {
            let one = allocator.alloc_page(gfp).map(drop);
            let many = allocator.alloc_pages_bulk_list(Bulk::exact(8).gfp(gfp), &mut PageList::new());
            if one.is_err() || many.is_err() {
                is_over.store(true, Relaxed);
            }
            assert!(one.is_ok() && many.is_ok(), "{gfp:?}: {one:?} and {many:?} with half of all pages free");
        }
        assert_eq!(allocator.stats().waiting, 1);
        is_over.store(true, Relaxed);
        first.join().unwrap().unwrap();
    });
}
