//! `validate` of an allocator that is in use (C10.2 is for rest): it returns the misfit, and does not panic.
use crate::common::{Over, allocator, allocators, assert_all_back, until};
use pagemill::{Bulk, Gfp, Misfit, Page, PageList};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

#[test]
fn validate_inside_a_callback_returns_a_misfit() {
    let allocator = allocator(4096);
    let mut seen = None;
    // So large a request has taken a whole pageblock when it hands out the first page.
    let each = |_: Page| _ = seen.get_or_insert_with(|| allocator.validate());
    allocator.alloc_pages_bulk_callback(Bulk::up_to(1000), each).unwrap();
    // Full states say which; without, more are out than were counted.
    assert!(matches!(seen, Some(Err(Misfit::State { places: 0, .. } | Misfit::Out { .. }))), "{seen:?}");
    assert_all_back(&allocator);
}

#[test]
fn validate_of_a_busy_allocator_returns_a_misfit() {
    for allocator in &allocators(4096) {
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let _over = Over(&is_over);
            scope.spawn(|| {
                while !is_over.load(Relaxed) {
                    let mut list = PageList::new();
                    allocator.alloc_pages_bulk_list(Bulk::up_to(300), &mut list).unwrap();
                    drop(allocator.alloc_page(Gfp::KERNEL).unwrap());
                }
            });
            until("a frame on its way", || allocator.validate().is_err());
        });
        assert_all_back(allocator);
    }
}
