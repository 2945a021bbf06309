//! C2.2: a page requested with ZERO is zero, and a page that is known to be zero is not zeroed again. The test measures the
//! memory of its process, so it has the process to itself.

use pagemill::{Allocator, Bulk, Gfp, Page, free_pages_bulk};

/// 64 MiB of pages.
const PAGES: usize = 16_384;

/// Resident memory of this process, in bytes.
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("/proc is mounted");
    let pages = statm.split_whitespace().nth(1).and_then(|n| n.parse::<usize>().ok()).expect("statm has two numbers");
    pages * 4096
}

#[test]
fn fresh_pages_are_zero_without_being_written_and_used_ones_are_zeroed() {
    own_process!();
    let memory = Allocator::builder().pages(PAGES).huge_pages(false).build().expect("64 MiB of address space");
    let all_zeroed = Bulk::exact(PAGES).gfp(Gfp::KERNEL | Gfp::ZERO);
    let mut pages: Vec<Option<Page>> = (0..PAGES).map(|_| None).collect();

    let before = resident();
    memory.alloc_pages_bulk_array(all_zeroed, &mut pages).expect("all of the arena");
    let grown = resident().saturating_sub(before);
    // Handing out 64 MiB touched its metadata and not its pages: writing the pages would show.
    assert!(grown < PAGES * 4096 / 8, "64 MiB of fresh pages cost {grown} bytes of memory");

    for page in pages.iter_mut().flatten() {
        assert!(page.iter().all(|&byte| byte == 0), "a fresh page that is not zero");
        page.fill(0xa5);
    }
    assert!(resident().saturating_sub(before) >= PAGES * 4096, "the test does not see memory: {}", resident());

    assert_eq!(free_pages_bulk(&mut pages), PAGES);
    memory.alloc_pages_bulk_array(all_zeroed, &mut pages).expect("all of the arena");
    assert!(pages.iter().flatten().all(|page| page.iter().all(|&byte| byte == 0)), "a used page that is not zeroed");
    drop(pages);
    let page = memory.alloc_page(Gfp::KERNEL | Gfp::ZERO).expect("all pages are free");
    assert!(page.iter().all(|&byte| byte == 0));
}
