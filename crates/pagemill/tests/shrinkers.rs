//! Shrinkers that report wrong numbers, or panic: requests and background reclaim end all the same (C3.4, C3.6).
//! A request that never ends is the failure.
use crate::common::{Calls, all, one_cpu, panics, until, until_waiting};
use pagemill::{Allocator, Bulk, Gfp, Memory, Order, Page, Watermarks, Why, free_pages_bulk_raw};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;

const PAGES: usize = 64;

#[test]
fn a_shrinker_that_overstates_is_called_a_bounded_number_of_times() {
    for said in [0, 1, usize::MAX] {
        let allocator = one_cpu(Memory::anonymous(PAGES));
        let _all = all(&allocator, Gfp::NOWAIT);
        // Rounds before it stands in line, and there.
        for (gfp, calls) in [
            (Gfp::KERNEL | Gfp::NORETRY, 1),
            (Gfp::KERNEL, 16 + 16),
            (Gfp::NOIO, 16 + 16),
            (Gfp::KERNEL | Gfp::RETRY_MAYFAIL, 16 + 64),
        ] {
            let one = Calls::new(|_, _| 1);
            let other = Calls::new(move |_, _| said);
            let _registered = (allocator.register_shrinker(one.clone()), allocator.register_shrinker(other));
            assert!(allocator.alloc_page(gfp).is_err());
            assert_eq!(one.so_far(), calls, "{gfp:?}, {said} pages said");
        }
    }
}

#[test]
fn a_shrinker_that_gave_enough_is_the_last_one_called() {
    let allocator = one_cpu(Memory::anonymous(PAGES));
    let _all = all(&allocator, Gfp::NOWAIT);
    let other = Calls::new(|_, _| 0);
    let _registered =
        (allocator.register_shrinker(Calls::new(|_, asked| asked.pages)), allocator.register_shrinker(other.clone()));
    assert!(allocator.alloc_page(Gfp::KERNEL | Gfp::NORETRY).is_err());
    assert_eq!(other.so_far(), 0);
}

#[test]
fn noretry_is_one_round_of_reclaim() {
    let allocator = one_cpu(Memory::anonymous(PAGES));
    let mut pages = all(&allocator, Gfp::NOWAIT);
    // Every other one: no two make a block.
    let _even: Vec<Page> = pages.extract_if(.., |page| page.addr() % 8192 == 0).collect();
    let odd = Mutex::new(pages);
    let gives = Calls::new(move |_, _| usize::from(odd.lock().unwrap().pop().is_some()));
    let _registered = allocator.register_shrinker(gives.clone());
    assert!(allocator.alloc_pages(Gfp::KERNEL | Gfp::NORETRY, Order::new(1).unwrap()).is_err());
    assert_eq!(gives.so_far(), 1);
}

#[test]
fn a_reclaim_step_ends_when_nothing_is_freed() {
    let allocator = one_cpu(Memory::anonymous(PAGES).watermarks(Watermarks::above(16)));
    let _all = all(&allocator, Gfp::NOWAIT);
    let liar = Calls::new(|_, _| usize::MAX);
    let _registered = allocator.register_shrinker(liar.clone());
    allocator.reclaim_step();
    assert_eq!(liar.so_far(), 1);
}

#[test]
fn a_reclaim_step_goes_on_while_pages_of_a_retired_arena_are_freed() {
    let marks = Watermarks::above(16);
    let allocator = one_cpu(Memory::anonymous(PAGES).watermarks(marks));
    let first = allocator.arenas()[0].id;
    let mut pages = all(&allocator, Gfp::NOWAIT);
    let of_first = pages.len();
    allocator.add_memory(Memory::anonymous(PAGES).watermarks(marks)).unwrap();
    pages.extend(all(&allocator, Gfp::NOWAIT));
    allocator.retire(first).unwrap();
    // One page a round, and those of the retired arena first.
    let pages = Mutex::new(pages.into_iter());
    let gives = Calls::new(move |_, _| pages.lock().unwrap().by_ref().take(1).count());
    let _registered = allocator.register_shrinker(gives.clone());
    allocator.reclaim_step();
    assert!(gives.so_far() > of_first);
    assert_eq!(allocator.stats().free, u64::from(marks.high));
}

#[test]
fn lists_open_again_after_a_panic_in_a_wait() {
    let allocator = one_cpu(Memory::anonymous(4096));
    let mut pages = all(&allocator, Gfp::NOWAIT);
    // The second call comes from the wait.
    let panics = Calls::new(|call, _| if call == 2 { panic!("a shrinker that panics on purpose") } else { 0 });
    let registered = allocator.register_shrinker(panics.clone());
    assert!(catch_unwind(AssertUnwindSafe(|| allocator.alloc_page(Gfp::KERNEL).map(drop))).is_err());
    assert_eq!((panics.so_far(), allocator.stats().waiting), (2, 0));
    drop(registered);
    drop(pages.pop());
    assert_eq!(allocator.stats().listed, 1);
    // And this thread may reclaim: it is inside of no shrinker.
    let page = allocator.alloc_page(Gfp::KERNEL).unwrap();
    let refused = allocator.alloc_page(Gfp::KERNEL).unwrap_err();
    assert!(matches!(refused, pagemill::Error::Exhausted(short) if short.why == Why::Exhausted), "{refused:?}");
    drop(page);
}

#[test]
fn background_reclaim_survives_a_panic() {
    let memory = Memory::anonymous(1024).watermarks(Watermarks::above(64));
    let allocator = Allocator::builder().memory(memory).background_reclaim(true).build().unwrap();
    let pages = Mutex::new(all(&allocator, Gfp::NOWAIT));
    let gives = Calls::new(move |call, _| {
        assert!(call > 1, "a shrinker that panics on purpose");
        pages.lock().unwrap().drain(..).count()
    });
    let _registered = allocator.register_shrinker(gives.clone());
    until("another round of the thread", || {
        // Below the low mark it wakes the thread.
        drop(allocator.alloc_page(Gfp::ATOMIC));
        gives.so_far() >= 2 && allocator.stats().free >= 96
    });
}

#[test]
fn a_raw_array_keeps_its_blocks_when_the_request_unwinds() {
    for order in [0, 1, 3].map(|order| Order::new(order).unwrap()) {
        let allocator = one_cpu(Memory::anonymous(PAGES));
        let _registered = allocator.register_shrinker(panics());
        let mut slots = [std::ptr::null_mut(); 2 * PAGES];
        let bulk = Bulk::up_to(slots.len()).order(order).gfp(Gfp::KERNEL | Gfp::RETRY_MAYFAIL);
        let ask = AssertUnwindSafe(|| allocator.alloc_pages_bulk_array_raw(bulk, &mut slots));
        assert!(catch_unwind(ask).is_err());
        let blocks = PAGES >> order.get();
        // SAFETY: the blocks are the test's.
        assert_eq!(unsafe { free_pages_bulk_raw(&mut slots, order) }, Ok(blocks), "{order:?}");
        assert_eq!(allocator.validate().unwrap().handed_out, 0);
        allocator.close().unwrap();
    }
}

#[test]
fn a_waiting_request_calls_a_shrinker_that_is_registered_later() {
    let allocator = one_cpu(Memory::anonymous(PAGES));
    let cached = Mutex::new(all(&allocator, Gfp::NOWAIT));
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| allocator.alloc_page(Gfp::KERNEL | Gfp::NOFAIL).is_ok());
        until_waiting(&allocator, 1);
        let cache = Calls::new(move |_, _| usize::from(cached.lock().unwrap().pop().is_some()));
        let registered = allocator.register_shrinker(cache);
        assert!(waiter.join().unwrap());
        drop(registered);
    });
}

/// One page is free and two slots are empty. The one slot that is full is all that the request must have.
#[test]
fn a_raw_array_reclaims_no_more_than_an_array_does() {
    let allocator = one_cpu(Memory::anonymous(PAGES));
    let mut pages = all(&allocator, Gfp::NOWAIT);
    let calls = Calls::new(|_, _| 0);
    let _registered = allocator.register_shrinker(calls.clone());
    let gfp = Gfp::KERNEL | Gfp::RETRY_MAYFAIL;

    let mut slots = [pages.pop(), None, None];
    drop(pages.pop());
    assert_eq!(allocator.alloc_pages_bulk_array(Bulk::at_least(1, 3).gfp(gfp), &mut slots).unwrap().added, 1);
    assert_eq!(calls.so_far(), 0);

    let [Some(first), Some(second), None] = slots else { panic!("two pages") };
    drop(second);
    let mut raw = [first.into_raw(), std::ptr::null_mut(), std::ptr::null_mut()];
    assert_eq!(allocator.alloc_pages_bulk_array_raw(Bulk::at_least(1, 3).gfp(gfp), &mut raw).unwrap().added, 1);
    assert_eq!(calls.so_far(), 0);
    // SAFETY: the pages are the test's.
    assert_eq!(unsafe { free_pages_bulk_raw(&mut raw, Order::ZERO) }, Ok(2));
}
