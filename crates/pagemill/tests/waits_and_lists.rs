//! What CPUs' lists do while somebody waits, and who comes first (C3.6). Deadlines are an hour: something else ends the
//! waits.
use crate::common::until;
use pagemill::{Allocator, BlockList, Bulk, Cancel, Gfp, Memory, Order, Page, PageList, Shrink, Shrinker, Watermarks};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const HOUR: Duration = Duration::from_secs(3600);
const PAGES: usize = 64;

fn one_cpu() -> Allocator {
    Allocator::builder().memory(Memory::anonymous(PAGES)).cpus(1, || 0).build().unwrap()
}

fn all(allocator: &Allocator) -> Vec<Page> {
    std::iter::from_fn(|| allocator.alloc_page(Gfp::NOWAIT).ok()).collect()
}

/// Waits for a block that there is not, until it is cancelled.
fn wait_for_a_block(allocator: &Allocator, cancel: &Cancel) {
    let request = Bulk::exact(1).order(Order::new(6).unwrap()).timeout(HOUR).cancel(cancel);
    assert!(allocator.alloc_pages_bulk_list(request, &mut BlockList::new()).is_err());
}

#[test]
fn lists_are_shut_while_a_request_waits() {
    let allocator = one_cpu();
    let mut pages = all(&allocator);
    let listed_of_a_free = |pages: &mut Vec<Page>| {
        drop(pages.pop());
        allocator.stats().listed
    };
    let (first, second) = (Cancel::new(), Cancel::new());
    std::thread::scope(|scope| {
        let one = scope.spawn(|| wait_for_a_block(&allocator, &first));
        until("a waiter", || allocator.stats().waiting == 1);
        let other = scope.spawn(|| wait_for_a_block(&allocator, &second));
        until("another", || allocator.stats().waiting == 2);
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
    let memory = Memory::anonymous(PAGES).watermarks(Watermarks::above(16));
    let allocator = Allocator::builder().memory(memory).cpus(1, || 0).build().unwrap();
    let mut pages = all(&allocator);
    let cancel = Cancel::new();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let request = Bulk::exact(1).order(Order::new(5).unwrap()).timeout(HOUR).cancel(&cancel);
            assert!(allocator.alloc_pages_bulk_list(request, &mut BlockList::new()).is_err());
        });
        until("a waiter", || allocator.stats().waiting == 1);
        cancel.cancel();
    });
    drop(pages.pop());
    assert_eq!((allocator.stats().free, allocator.stats().listed), (17, 0));
}

/// Gives a page to requests of one thread alone.
struct For(std::thread::ThreadId, Mutex<Vec<Page>>);

impl Shrinker for For {
    fn shrink(&self, _: Shrink) -> usize {
        let is_for = std::thread::current().id() == self.0;
        usize::from(is_for && self.1.lock().unwrap().pop().is_some())
    }
}

#[test]
fn a_reclaiming_request_does_not_overtake_waiters() {
    let allocator = one_cpu();
    let pages = all(&allocator);
    let cache = Arc::new(For(std::thread::current().id(), Mutex::new(pages)));
    let registered = allocator.register_shrinker(cache.clone());
    let (cancel, other) = (Cancel::new(), Cancel::new());
    std::thread::scope(|scope| {
        scope.spawn(|| wait_for_a_block(&allocator, &cancel));
        until("a waiter", || allocator.stats().waiting == 1);
        // It waits for something else.
        let page = allocator.alloc_page(Gfp::KERNEL | Gfp::NORETRY).unwrap();
        // Two came, if the waiter had the first in its hands for a moment.
        let _more: Vec<Page> = std::iter::from_fn(|| allocator.alloc_page(Gfp::NOWAIT).ok()).collect();
        scope.spawn(|| {
            let request = Bulk::exact(1).timeout(HOUR).cancel(&other);
            // What the first waiter had in its hands while all was taken comes back now, and is kept.
            let mut kept = PageList::new();
            while allocator.alloc_pages_bulk_list(request, &mut kept).is_ok() {}
        });
        until("another", || allocator.stats().waiting == 2);
        let left = cache.1.lock().unwrap().len();
        assert!(allocator.alloc_page(Gfp::KERNEL | Gfp::NORETRY).is_err());
        let request = Bulk::up_to(4).gfp(Gfp::KERNEL | Gfp::NORETRY);
        let delivered = allocator.alloc_pages_bulk_list(request, &mut PageList::new()).unwrap();
        assert_eq!((delivered.blocks, cache.1.lock().unwrap().len()), (0, left));
        other.cancel();
        cancel.cancel();
        drop(page);
    });
    assert!(allocator.alloc_page(Gfp::KERNEL | Gfp::NORETRY).is_ok());
    drop(registered);
}

/// Brings nothing; from the second call on it takes as long as it is told to.
#[derive(Default)]
struct Slow {
    calls: AtomicUsize,
    is_over: AtomicBool,
}

impl Shrinker for Slow {
    fn shrink(&self, _wanted: Shrink) -> usize {
        if self.calls.fetch_add(1, Relaxed) == 1 {
            until("the end of a slow shrinker", || self.is_over.load(Relaxed));
        }
        0
    }
}

#[test]
fn requests_behind_a_slow_shrinker_get_freed_pages() {
    let allocator = one_cpu();
    let mut pages = all(&allocator);
    let slow = Arc::new(Slow::default());
    let _registered = allocator.register_shrinker(slow.clone());
    std::thread::scope(|scope| {
        // The first in line: it looks at nothing until its shrinker is done.
        let first = scope.spawn(|| allocator.alloc_page(Gfp::KERNEL).map(drop));
        until("a shrinker at work", || slow.calls.load(Relaxed) == 2);
        pages.truncate(PAGES / 2);
        for gfp in [Gfp::KERNEL, Gfp::KERNEL | Gfp::NORETRY] {
            let one = allocator.alloc_page(gfp).map(drop);
            let many = allocator.alloc_pages_bulk_list(Bulk::exact(8).gfp(gfp), &mut PageList::new());
            if one.is_err() || many.is_err() {
                slow.is_over.store(true, Relaxed);
            }
            assert!(one.is_ok() && many.is_ok(), "{gfp:?}: {one:?} and {many:?} with half of all pages free");
        }
        assert_eq!(allocator.stats().waiting, 1);
        slow.is_over.store(true, Relaxed);
        first.join().unwrap().unwrap();
    });
}
