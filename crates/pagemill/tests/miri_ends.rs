//! Zones that end as several threads free their last pages, and others that begin in their headers meanwhile: for miri, which sees a
//! look at a zone that another thread may have ended. The tests also run without it.
use pagemill::{Allocator, Bulk, Gfp, Memory, Order, Page, PageList, free_pages_bulk};
use std::thread::scope;

fn allocator(pages: usize) -> Allocator {
    Allocator::builder().memory(Memory::anonymous(pages)).cpus(1, || 0).huge_pages(false).build().unwrap()
}

#[test]
fn two_threads_free_the_last_pages_while_an_allocator_is_built() {
    for _ in 0..3 {
        let ownerless = allocator(8);
        let [one, other] = [(), ()].map(|()| ownerless.alloc_page(Gfp::KERNEL).unwrap());
        drop(ownerless);
        scope(|scope| {
            scope.spawn(move || drop(one));
            scope.spawn(move || drop(other));
            scope.spawn(|| drop(allocator(8)));
        });
    }
}

#[test]
fn the_last_handle_and_pages_are_dropped_while_an_allocator_is_built() {
    for _ in 0..3 {
        let last = allocator(8);
        let page = last.alloc_page(Gfp::KERNEL).unwrap();
        let block = last.alloc_pages(Gfp::KERNEL, Order::new(1).unwrap()).unwrap();
        scope(|scope| {
            scope.spawn(move || drop(page));
            scope.spawn(move || drop(block));
            scope.spawn(move || drop(last));
            scope.spawn(|| drop(allocator(8)));
        });
    }
}

#[test]
fn three_threads_free_the_last_pages_in_bulk() {
    for _ in 0..2 {
        let last = allocator(64);
        let slots = |n: usize| {
            let mut slots: Vec<Option<Page>> = (0..n).map(|_| None).collect();
            last.alloc_pages_bulk_array(Bulk::exact(n), &mut slots).unwrap();
            slots
        };
        let (mut five, mut three, mut list) = (slots(5), slots(3), PageList::new());
        last.alloc_pages_bulk_list(Bulk::exact(4), &mut list).unwrap();
        scope(|scope| {
            scope.spawn(move || free_pages_bulk(&mut five));
            scope.spawn(move || free_pages_bulk(&mut three));
            scope.spawn(move || drop(list));
            scope.spawn(move || drop(last));
        });
    }
}

/// Each thread frees a page whose zone another one's header remembers.
#[test]
fn two_threads_reuse_the_headers_of_zones() {
    scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut kept: Option<Page> = None;
                for _ in 0..3 {
                    drop(kept.replace(allocator(4).alloc_page(Gfp::KERNEL).unwrap()));
                }
            });
        }
    });
}
