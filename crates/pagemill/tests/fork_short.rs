//! The child of a process that is short of memory: nobody waits there, and it goes on (C4.4).
#![cfg(not(feature = "detection-off"))] // Without frame states no child goes on: `fork_and_locks.rs` tests that.
mod in_child;

use in_child::in_child;
use pagemill::{Allocator, BlockList, Bulk, Cancel, Gfp, Memory, Order, Page, Shrink, Shrinker, Watermarks};
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// One test forks at a time: the children of one have no threads of the other.
static ALONE: Mutex<()> = Mutex::new(());

fn all(allocator: &Allocator) -> Vec<Page> {
    std::iter::from_fn(|| allocator.alloc_page(Gfp::NOWAIT).ok()).collect()
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let limit = Instant::now() + Duration::from_secs(20);
    while !is_so() {
        assert!(Instant::now() < limit, "{what} never came");
        std::thread::yield_now();
    }
}

#[test]
fn nobody_waits_in_a_child() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let allocator = Allocator::builder().memory(Memory::anonymous(64)).cpus(1, || 0).build().unwrap();
    let mut pages = all(&allocator);
    let cancel = Cancel::new();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let request = Bulk::exact(1).order(Order::new(6).unwrap());
            let request = request.deadline(Duration::from_secs(60)).cancel(&cancel);
            assert!(allocator.alloc_pages_bulk_list(request, &mut BlockList::new()).is_err());
        });
        until("a waiter", || allocator.stats().waiting == 1);
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

/// Gives all that it has, and notes the process that it did so in last.
struct Cache(Mutex<Vec<Page>>, AtomicI32);

impl Shrinker for Cache {
    fn shrink(&self, _: Shrink) -> usize {
        // SAFETY: getpid reads no memory of ours.
        self.1.store(unsafe { libc::getpid() }, Relaxed);
        // Tried: a fork may have copied it locked.
        self.0.try_lock().map_or(0, |mut pages| pages.drain(..).count())
    }
}

#[test]
fn background_reclaim_begins_again_in_a_child() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let memory = Memory::anonymous(1024).watermarks(Watermarks::above(64));
    let allocator = Allocator::builder().memory(memory).background_reclaim(true).build().unwrap();
    let cache = Arc::new(Cache(Mutex::default(), AtomicI32::new(0)));
    let _registered = allocator.register_shrinker(cache.clone());
    // Above its marks, so that the parent's thread is at rest.
    in_child("has its own thread", || {
        let mut pages = all(&allocator);
        // Between min and low.
        pages.truncate(pages.len() - 8);
        cache.0.lock().unwrap().extend(pages);
        // SAFETY: as above.
        let me = unsafe { libc::getpid() };
        // Who gets a page does not reclaim itself, but wakes who does.
        until("background reclaim", || {
            drop(allocator.alloc_page(Gfp::KERNEL | Gfp::NORETRY));
            allocator.stats().reclaim_background > 0 && cache.1.load(Relaxed) == me
        });
        assert_eq!(allocator.stats().reclaim_direct, 0);
    });
}
