//! Nodes, on any machine: where pages come from, sets of allowed nodes, and memory that is added and retired.
//!
//! `cargo run -p pagemill --example nodes`
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use pagemill::{Allocator, Bulk, Error, Gfp, Memory, NodeId, NodeMask, PageList, Policy};

/// The CPU that the program pretends to be on. Relaxed: only this thread uses it.
static CPU: AtomicUsize = AtomicUsize::new(0);

/// Pages in use, by node.
fn used(memory: &Allocator) -> Vec<u64> {
    memory.zoneinfo().iter().map(|zone| zone.stats.allocated - zone.stats.freed).collect()
}

fn main() -> Result<(), Error> {
    // Two nodes of two CPUs, each with 4096 pages.
    let [near, far] = [0, 1].map(|id| NodeId::new(id).expect("there can be 64"));
    let memory = Allocator::builder()
        .cpus(4, || CPU.load(Relaxed))
        .nodes(vec![near, near, far, far], vec![vec![10, 20], vec![20, 10]])
        .memory(Memory::anonymous(4096).node(near))
        .memory(Memory::anonymous(4096).node(far))
        .build()?;

    // A plain request gets pages of the nearest node.
    CPU.store(3, Relaxed);
    let page = memory.alloc_page(Gfp::KERNEL)?;
    assert_eq!(used(&memory), [0, 1]);

    // A bulk request in turn is divided; one that is bound stays where it is bound to, and comes back short.
    let both = NodeMask::from_iter([near, far]);
    let mut list = PageList::new();
    memory.alloc_pages_bulk_list(Bulk::exact(64).policy(Policy::Interleave(both)), &mut list)?;
    println!("64 pages in turn: {:?} of nodes 0 and 1", used(&memory));
    assert_eq!(used(&memory), [32, 33]);
    let bound = Bulk::up_to(8192).policy(Policy::Bind(NodeMask::only(near)));
    let delivered = memory.alloc_pages_bulk_list(bound, &mut list)?;
    println!("bound to node 0: {} pages, {}", delivered.blocks, delivered.shortfall.expect("more than it has"));
    assert_eq!(delivered.blocks, 4096 - 32);
    list.clear();

    // The allowed set holds for everybody, whatever a request prefers.
    memory.set_allowed_nodes(NodeMask::only(near))?;
    let other = memory.alloc_page(Gfp::KERNEL)?; // on CPU 3 still
    assert_eq!(used(&memory), [1, 1]);
    memory.set_allowed_nodes(NodeMask::ALL)?;

    // Memory is added and retired again: pages that are out stay their owner's.
    let more = memory.add_memory(Memory::anonymous(512).node(far))?;
    println!("{} with what was added", memory.managed_pages());
    assert_eq!(memory.managed_pages().get(), 2 * 4096 + 512);
    assert_eq!(memory.retire(more)?.get(), 0, "none of its pages were out");
    assert_eq!(memory.managed_pages().get(), 2 * 4096);

    drop((page, other));
    println!("{}", memory.buddyinfo());
    assert_eq!(memory.validate().unwrap().handed_out, 0);
    Ok(())
}
