//! An allocator whose CPUs are made up: tests can try 64 of them on any machine.
//!
//! `cargo run -p pagemill --example fake_cpus`
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use pagemill::{Allocator, Bulk, CpuId, Error, PageList};

/// The CPU that the program pretends to be on. Relaxed: only this thread uses it.
static CPU: AtomicUsize = AtomicUsize::new(0);

fn main() -> Result<(), Error> {
    let memory = Allocator::builder().pages(64 << 10).cpus(64, || CPU.load(Relaxed)).build()?;
    println!("{} CPUs, lists by {}", memory.cpus(), memory.backend());

    // Each CPU takes 32 pages in its turn and gives them back: they stay on its list.
    for cpu in 0..64 {
        CPU.store(cpu, Relaxed);
        let mut list = PageList::new();
        memory.alloc_pages_bulk_list(Bulk::exact(32), &mut list)?;
        if let (0, Some(page)) = (cpu % 16, list.pop()) {
            println!("CPU {cpu} had frame {} first", page.pfn().as_u32());
        }
    }
    let census = memory.validate().unwrap();
    println!("{} pages on lists, {} free in the zone", census.listed, census.free);
    assert!(census.listed >= 64 * 32 && census.handed_out == 0);

    // Another CPU's list can be drained, while its owner goes on.
    let drained = memory.drain_cpu(CpuId::new(17))?;
    println!("CPU 17 had {drained}");
    assert_eq!(memory.validate().unwrap().listed, census.listed - drained.get());
    assert!(memory.drain_cpu(CpuId::new(64)).is_err(), "there are CPUs 0 to 63");

    memory.drain();
    assert_eq!(memory.validate().unwrap().free, memory.managed_pages().get());
    println!("\n{}", memory.buddyinfo());
    Ok(())
}
