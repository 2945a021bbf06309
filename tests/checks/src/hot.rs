//! The hot paths, each inlined into a function of its own, as into a user's loop.
//!
//! `cargo xtask test --only sizes` reads from the object file how long these functions are and what they call, and compares
//! the sizes with `limits.toml`: a change that makes a hot path longer fails there (C3.15). `--only aarch64` reads the
//! restartable sequences inside them, for both targets.

use pagemill::{Allocator, Bulk, Gfp, Page, PageList, free_pages_bulk};

/// One page out.
#[unsafe(no_mangle)]
pub fn hot_alloc_page(memory: &Allocator) -> Option<Page> {
    memory.alloc_page(Gfp::KERNEL).ok()
}

/// One page in.
#[unsafe(no_mangle)]
pub fn hot_free_page(page: Page) -> bool {
    page.free().is_ok()
}

/// 64 pages out, into the holes of an array.
#[unsafe(no_mangle)]
pub fn hot_bulk_array(memory: &Allocator, slots: &mut [Option<Page>; 64]) -> usize {
    memory.alloc_pages_bulk_array(Bulk::up_to(64), slots).map_or(0, |filled| filled.added)
}

/// 64 pages out, onto a list.
#[unsafe(no_mangle)]
pub fn hot_bulk_list(memory: &Allocator, list: &mut PageList) -> usize {
    memory.alloc_pages_bulk_list(Bulk::up_to(64), list).map_or(0, |delivered| delivered.blocks)
}

/// 64 pages out, each to a function that is inlined too.
#[unsafe(no_mangle)]
pub fn hot_bulk_callback(memory: &Allocator, addresses: &mut [usize; 64]) -> usize {
    let mut slots = addresses.iter_mut();
    let keep = |page: Page| {
        if let Some(slot) = slots.next() {
            *slot = page.into_raw() as usize;
        }
    };
    memory.alloc_pages_bulk_callback(Bulk::up_to(64), keep).map_or(0, |delivered| delivered.blocks)
}

/// 64 pages in, out of an array.
#[unsafe(no_mangle)]
pub fn hot_free_bulk(slots: &mut [Option<Page>; 64]) -> usize {
    free_pages_bulk(slots)
}
