//! Pages one at a time and in bulk, and how they are freed.
//!
//! `cargo run -p pagemill --example hello`
use pagemill::{Allocator, Bulk, Error, Gfp, Order, PageList};

fn main() -> Result<(), Error> {
    // 64 MiB of address space of its own. `Allocator::global()` serves programs that need no allocator of their own.
    let memory = Allocator::builder().bytes(64 << 20).build()?;
    println!("{}, per-CPU lists by {}", memory.managed_pages(), memory.backend());

    // One page. Zeroed, because that was asked for; freed when it is dropped.
    let mut page = memory.alloc_page(Gfp::KERNEL | Gfp::ZERO)?;
    page[..5].copy_from_slice(b"hello");
    println!("a page at {:#x}: {:?}, then zeros", page.addr(), &page[..8]);

    // All 256 of them or none, in one call.
    let mut list = PageList::new();
    memory.alloc_pages_bulk_list(Bulk::exact(256), &mut list)?;
    println!("{} pages in one call", list.len());

    // Eight neighbouring pages, aligned to their size, and split into pages that are freed one by one.
    let block = memory.alloc_pages(Gfp::KERNEL, Order::new(3)?)?;
    println!("a block of {} bytes at {:#x}", block.len(), block.addr());
    let pages: Vec<_> = block.split().collect();
    assert!(pages.windows(2).all(|pair| pair[0].addr() + 4096 == pair[1].addr()));

    // An allocator is closed when all of its pages are back, and not before.
    let refused = memory.close().expect_err("265 pages are out");
    println!("{refused}");
    assert_eq!(refused.pages_out.get(), 1 + 256 + 8);
    drop((page, list, pages));
    refused.allocator.close().expect("all pages are back");
    Ok(())
}
