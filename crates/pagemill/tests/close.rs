//! What a closed allocator leaves behind: nothing that is mapped.
use crate::common::{arena, backends, is_mapped, mappings};
use pagemill::{Allocator, Backend, BuildError, Bulk, Gfp, Memory, Order, Page, PageList};

/// 1 GiB of address space, so that the smallest of its mappings is some MiB.
const PAGES: usize = 1 << 18;
/// Of the lists' mapping, which is 32 KiB for each.
const CPUS: usize = 64;

/// Bytes that this process has mapped. Neighbours may be shown as one mapping, so that bytes are counted and not mappings.
fn mapped() -> usize {
    mappings().iter().map(|(range, _)| range.len()).sum()
}

/// Makes an allocator, uses each of its mappings, ends it, and looks. Returns what was mapped meanwhile.
fn live(build: fn() -> Allocator, is_dropped: bool) -> usize {
    let allocator = build();
    let range = allocator.arenas()[0].range.clone();
    let block = allocator.alloc_pages(Gfp::KERNEL, Order::new(10).unwrap()).unwrap();
    let mut list = PageList::new();
    allocator.alloc_pages_bulk_list(Bulk::exact(100), &mut list).unwrap();
    let mut page: Page = allocator.alloc_page(Gfp::KERNEL).unwrap();
    page[0] = 1;
    let during = mapped();
    assert!(is_mapped(&range), "the arena at {range:x?} is not mapped while it is in use");
    drop((block, list, page));
    if is_dropped {
        drop(allocator);
    } else {
        allocator.close().unwrap();
    }
    assert!(!is_mapped(&range), "the arena at {range:x?} is mapped after its allocator is closed");
    during
}

/// In a process of its own: no thread of another test maps a stack or a heap meanwhile.
#[test]
fn a_closed_allocator_leaves_nothing_mapped() {
    own_process!();
    const ROUNDS: usize = 32;
    let on_fake_cpus: fn() -> Allocator = || Allocator::builder().pages(PAGES).cpus(CPUS, || 5).build().unwrap();
    let mut ways = vec![("fake CPUs", on_fake_cpus)];
    if backends().contains(&Backend::Rseq) {
        ways.push(("rseq", || Allocator::builder().pages(PAGES).backend(Backend::Rseq).build().unwrap()));
    }
    for (what, build) in ways {
        for is_dropped in [false, true] {
            live(build, is_dropped); // What is made once and kept: the registry's tables.
            let before = mapped();
            let during = live(build, is_dropped);
            // The pages; a byte and a link for each.
            assert!(
                during >= before + PAGES * (4096 + 1 + 4),
                "{what}: {during} bytes with an allocator, {before} before"
            );
            for _ in 1..ROUNDS {
                live(build, is_dropped);
            }
            // Not to the byte: the heap may have grown. What each round left of any of its mappings would be more, as
            // the smallest are 32 KiB for each CPU.
            let left = mapped().saturating_sub(before);
            assert!(left < ROUNDS * (32 << 10), "{what}: {left} bytes are mapped more after {ROUNDS} allocators");
        }
    }
    a_failed_build_leaves_nothing_mapped();
}

/// A piece of memory that is refused unmaps those that were mapped before it.
fn a_failed_build_leaves_nothing_mapped() {
    let begin = || arena(PAGES).cpus(CPUS, || 0).background_reclaim(true);
    let build = || begin().memory(Memory::anonymous(0)).build();
    assert!(matches!(build(), Err(BuildError::ArenaSize { pages: 0, .. })));
    let before = mapped();
    for _ in 0..4 {
        assert!(build().is_err());
    }
    assert!(mapped() < before + PAGES * 4096 / 2, "an arena stays mapped");
    begin().build().unwrap().close().unwrap();
}
