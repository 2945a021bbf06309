//! What a closed allocator leaves behind: nothing that is mapped.
use pagemill::{Allocator, Backend, BuildError, Bulk, Gfp, Memory, Order, Page, PageList};
use std::ops::Range;

/// 1 GiB of address space, so that the smallest of its mappings is some MiB.
const PAGES: usize = 1 << 18;
/// Of the lists' mapping, which is 32 KiB for each.
const CPUS: usize = 64;

/// The ranges of addresses that this process has mapped.
fn mapped() -> Vec<Range<usize>> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let range = |line: &str| {
        let (start, end) = line.split_once(' ')?.0.split_once('-')?;
        Some(usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?)
    };
    maps.lines().map(|line| range(line).unwrap_or_else(|| panic!("{line:?} is no mapping"))).collect()
}

/// Neighbours are shown as one, so that bytes are counted and not lines.
fn bytes(mapped: &[Range<usize>]) -> usize {
    mapped.iter().map(Range::len).sum()
}

/// Makes an allocator, uses each of its mappings, ends it, and looks. Returns what was mapped meanwhile.
fn live(build: fn() -> Allocator, is_dropped: bool) -> usize {
    let allocator = build();
    let arena = allocator.arenas()[0].range.clone();
    let is_there = |mapped: &[Range<usize>]| mapped.iter().any(|m| m.start < arena.end && arena.start < m.end);
    let block = allocator.alloc_pages(Gfp::KERNEL, Order::new(10).unwrap()).unwrap();
    let mut list = PageList::new();
    allocator.alloc_pages_bulk_list(Bulk::exact(100), &mut list).unwrap();
    let mut page: Page = allocator.alloc_page(Gfp::KERNEL).unwrap();
    page[0] = 1;
    let during = mapped();
    assert!(is_there(&during), "the arena at {arena:x?} is not mapped while it is in use");
    drop((block, list, page));
    if is_dropped {
        drop(allocator);
    } else {
        allocator.close().unwrap();
    }
    assert!(!is_there(&mapped()), "the arena at {arena:x?} is mapped after its allocator is closed");
    bytes(&during)
}

/// In a process of its own: no thread of another test maps a stack or a heap meanwhile.
#[test]
fn a_closed_allocator_leaves_nothing_mapped() {
    own_process!();
    const ROUNDS: usize = 32;
    let on_fake_cpus: fn() -> Allocator = || Allocator::builder().pages(PAGES).cpus(CPUS, || 5).build().unwrap();
    let mut ways = vec![("fake CPUs", on_fake_cpus)];
    match pagemill::self_test() {
        Ok(()) => ways.push(("rseq", || Allocator::builder().pages(PAGES).backend(Backend::Rseq).build().unwrap())),
        Err(why) => eprintln!("skipped: the rseq backend ({why})"),
    }
    for (what, build) in ways {
        for is_dropped in [false, true] {
            live(build, is_dropped); // What is made once and kept: the registry's tables.
            let before = bytes(&mapped());
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
            let left = bytes(&mapped()).saturating_sub(before);
            assert!(left < ROUNDS * (32 << 10), "{what}: {left} bytes are mapped more after {ROUNDS} allocators");
        }
    }
    what_cannot_be_completed_is_closed();
}

/// One piece of memory that is refused closes those that were opened before it.
fn what_cannot_be_completed_is_closed() {
    let begin = || Allocator::builder().memory(Memory::anonymous(PAGES)).cpus(CPUS, || 0).background_reclaim(true);
    let build = || begin().memory(Memory::anonymous(0)).build();
    assert!(matches!(build(), Err(BuildError::ArenaSize { pages: 0, .. })));
    let before = bytes(&mapped());
    for _ in 0..4 {
        assert!(build().is_err());
    }
    assert!(bytes(&mapped()) < before + PAGES * 4096 / 2, "an arena stays mapped");
    begin().build().unwrap().close().unwrap();
}
