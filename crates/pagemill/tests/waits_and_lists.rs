//! What CPUs' lists do while somebody waits, and who comes first (C3.6). Deadlines are an hour: something else ends the
//! waits.
use crate::common::until;
use pagemill::{Allocator, BlockList, Bulk, Cancel, Gfp, Memory, Order, Page, PageList, Shrink, Shrinker, Watermarks};
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
    let request = Bulk::exact(1).order(Order::new(6).unwrap()).deadline(HOUR).cancel(cancel);
    assert!(allocator.alloc_pages_bulk_list(request, &mut BlockList::new()).is_err());
}

#[test]
fn lists_take_nothing_while_anybody_waits_and_then_again() {
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
fn lists_of_a_zone_below_its_low_mark_stay_shut_as_a_wait_ends() {
    let memory = Memory::anonymous(PAGES).watermarks(Watermarks::above(16));
    let allocator = Allocator::builder().memory(memory).cpus(1, || 0).build().unwrap();
    let mut pages = all(&allocator);
    let cancel = Cancel::new();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let request = Bulk::exact(1).order(Order::new(5).unwrap()).deadline(HOUR).cancel(&cancel);
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
fn who_reclaims_passes_nobody_who_lacks_the_same() {
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
        scope.spawn(|| {
            let request = Bulk::exact(1).deadline(HOUR).cancel(&other);
            assert!(allocator.alloc_pages_bulk_list(request, &mut PageList::new()).is_err());
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
