//! Contiguous runs: a large request as few long pieces of memory, instead of many pages.
//!
//! `cargo run -p pagemill --example runs`
use pagemill::{Allocator, Block, Bulk, Error, Order, Page, Run};

fn main() -> Result<(), Error> {
    let memory = Allocator::builder().bytes(64 << 20).build()?;

    // 4 MiB. Neighbours are merged, so that a device or an I/O vector gets few entries.
    let mut runs: Vec<Run<Page>> = Vec::new();
    let delivered = memory.alloc_pages_bulk_runs(Bulk::exact(1024), &mut runs)?;
    println!("{} pages in {} runs:", delivered.blocks, runs.len());
    for run in &mut runs {
        run.as_mut_bytes().fill(0xab);
        println!("  {:#x}: {} pages, {} bytes", run.addr(), run.len(), run.bytes());
    }
    assert_eq!(runs.iter().map(Run::bytes).sum::<usize>(), 4 << 20);

    // A run can be taken apart into its pages, which are freed one by one from then on. The others go back whole.
    let pages: Vec<Page> = runs.pop().into_iter().flat_map(Run::into_pages).collect();
    println!("the last run had {} pages", pages.len());
    drop((runs, pages));

    // Every order has every form: eight blocks of 16 pages.
    let mut blocks: Vec<Run<Block>> = Vec::new();
    memory.alloc_pages_bulk_runs(Bulk::exact(8).order(Order::new(4)?), &mut blocks)?;
    println!("8 blocks of order 4 in {} runs", blocks.len());
    assert_eq!(blocks.iter().map(Run::bytes).sum::<usize>(), 8 * 16 * 4096);
    drop(blocks);
    assert_eq!(memory.validate().unwrap().handed_out, 0);
    Ok(())
}
