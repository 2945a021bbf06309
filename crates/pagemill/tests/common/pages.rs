//! Taking pages in whatever form, and marking whose they are.
use pagemill::{Allocator, Bulk, Error, Exact, Gfp, Page, PageList, Run, Shortfall, UpTo};
use std::collections::HashSet;

/// An array of empty slots.
pub(crate) fn slots<T>(n: usize) -> Vec<Option<T>> {
    (0..n).map(|_| None).collect()
}

/// An array of `n` pages.
pub(crate) fn array(allocator: &Allocator, n: usize) -> Vec<Option<Page>> {
    let mut slots = slots(n);
    assert_eq!(allocator.alloc_pages_bulk_array(Bulk::exact(n), &mut slots).unwrap().added, n);
    slots
}

/// What a bulk request gets, by a callback.
pub(crate) fn bulk(allocator: &Allocator, request: Bulk<'_>) -> (Vec<Page>, Option<Shortfall>) {
    let mut pages = Vec::new();
    let delivered = allocator.alloc_pages_bulk_callback(request, |page| pages.push(page)).unwrap();
    assert_eq!(delivered.blocks, pages.len());
    (pages, delivered.shortfall)
}

/// `n` pages by one bulk request.
pub(crate) fn take(allocator: &Allocator, n: usize) -> Vec<Page> {
    let (pages, shortfall) = bulk(allocator, Bulk::up_to(n));
    assert_eq!((pages.len(), shortfall), (n, None));
    pages
}

/// `n` pages, one by one.
pub(crate) fn singles(allocator: &Allocator, n: usize) -> Vec<Page> {
    (0..n).map(|_| allocator.alloc_page(Gfp::KERNEL).unwrap()).collect()
}

/// All that requests of this kind get, one by one.
pub(crate) fn all(allocator: &Allocator, gfp: Gfp) -> Vec<Page> {
    std::iter::from_fn(|| allocator.alloc_page(gfp).ok()).collect()
}

/// Every page that requests of this kind get without waiting. They drain no CPU's list but their own, and this thread may
/// have been on several CPUs: what it left on their lists is drained for it.
pub(crate) fn all_without_waiting(allocator: &Allocator, gfp: Gfp) -> Vec<Page> {
    let mut pages = Vec::new();
    loop {
        let before = pages.len();
        pages.extend(all(allocator, gfp));
        if pages.len() == before && allocator.stats().listed == 0 {
            return pages;
        }
        allocator.drain();
    }
}

/// The pages that a request gets, and what it is short by.
pub(crate) type Got = Result<(Vec<Page>, Option<Shortfall>), Error>;
/// A request in one form, for `n` pages at most.
pub(crate) type Form<N> = fn(&Allocator, Bulk<'_, N>, usize) -> Got;

/// Every form of a bulk request for pages.
pub(crate) const FORMS: [(&str, Form<UpTo>); 4] = [
    ("list", list),
    ("array", array_form),
    ("runs", runs),
    ("callback", |allocator, request, _| Ok(bulk(allocator, request))),
];

/// The forms that take a least number.
pub(crate) const EXACT_FORMS: [(&str, Form<Exact>); 3] = [("list", list), ("array", array_form), ("runs", runs)];

fn list<N>(allocator: &Allocator, request: Bulk<'_, N>, _: usize) -> Got {
    let mut list = PageList::new();
    let delivered = allocator.alloc_pages_bulk_list(request, &mut list)?;
    assert_eq!(delivered.blocks, list.len());
    Ok((list.collect(), delivered.shortfall))
}

fn array_form<N>(allocator: &Allocator, request: Bulk<'_, N>, n: usize) -> Got {
    let mut slots = slots(n);
    let filled = allocator.alloc_pages_bulk_array(request, &mut slots)?;
    let pages: Vec<Page> = slots.into_iter().flatten().collect();
    assert_eq!((filled.added, filled.occupied, filled.first_hole), (pages.len(), pages.len(), pages.len()));
    Ok((pages, filled.shortfall))
}

fn runs<N>(allocator: &Allocator, request: Bulk<'_, N>, _: usize) -> Got {
    let mut runs: Vec<Run<Page>> = Vec::new();
    let delivered = allocator.alloc_pages_bulk_runs(request, &mut runs)?;
    assert_eq!(delivered.blocks, runs.iter().map(Run::len).sum());
    Ok((runs.into_iter().flat_map(Run::into_pages).collect(), delivered.shortfall))
}

/// Each page is another; their addresses.
#[track_caller]
pub(crate) fn assert_distinct<'a>(pages: impl IntoIterator<Item = &'a Page>) -> HashSet<usize> {
    let addrs: Vec<usize> = pages.into_iter().map(Page::addr).collect();
    let distinct: HashSet<usize> = addrs.iter().copied().collect();
    assert_eq!(distinct.len(), addrs.len(), "a page is owned twice");
    distinct
}

/// Does every byte have this value? (By comparing pieces: byte by byte takes long in code that is not optimised.)
pub(crate) fn is_all(bytes: &[u8], value: u8) -> bool {
    bytes.chunks(4096).all(|chunk| chunk == &[value; 4096][..chunk.len()])
}

/// Writes the address and the owner to both ends of a page, so that a second owner would be seen.
pub(crate) fn stamp(page: &mut Page, owner: u64) {
    let stamp = (page.addr() as u64 ^ owner << 48).to_ne_bytes();
    page[..8].copy_from_slice(&stamp);
    page[4088..].copy_from_slice(&stamp);
}

/// Is the page as its owner stamped it?
pub(crate) fn is_stamped(page: &Page, owner: u64) -> bool {
    let stamp = (page.addr() as u64 ^ owner << 48).to_ne_bytes();
    page[..8] == stamp && page[4088..] == stamp
}
