//! Commits an arena before its first use, with progress, as a server does before it takes requests; and lets go again of
//! what it does not use.
//!
//! `cargo run -p pagemill --example populate`
use pagemill::{Allocator, Bulk, Gfp, Memory, PAGE_SIZE, PageList};
use std::ops::ControlFlow::{Break, Continue};
use std::time::Duration;

fn main() -> Result<(), pagemill::Error> {
    // No more than the container's memory limit leaves room for.
    let memory = Memory::anonymous((256 << 20) / PAGE_SIZE).within_limit();
    let builder = Allocator::builder().memory(memory).give_back_after(Duration::from_secs(60));
    let allocator = builder.background_reclaim(true).build()?;
    allocator.notes().iter().for_each(|note| eprintln!("{note}"));

    let is_asked_to_end = || false;
    let populated = allocator.populate(|so_far| {
        println!("{} of {} MiB", so_far.done >> 20, so_far.total >> 20);
        if is_asked_to_end() { Break(()) } else { Continue(()) }
    })?;
    assert_eq!(populated.done, populated.total);

    // Requests that bring no page whose first touch faults, or kills.
    let mut pages = PageList::new();
    let got = allocator.alloc_pages_bulk_list(Bulk::up_to(1024).gfp(Gfp::KERNEL).populated(), &mut pages)?;
    println!("{} pages, missing: {:?}", got.blocks, got.shortfall);
    drop(pages);
    println!("{} pages go back to the system", allocator.give_back().get());
    Ok(())
}
