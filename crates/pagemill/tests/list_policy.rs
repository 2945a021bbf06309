//! C4.3 and C3.1: the batch and the limit of a CPU's list adapt, and begin anew when it is drained; requests as large as what
//! would be moved goes past it, in both directions. One CPU that is not there, so that every page is accounted for.
use crate::common::{array, bulk, close_all_back, one_cpu, singles};
use pagemill::{Allocator, Bulk, CpuId, Gfp, Memory, Page, PageList, Run, Stats, free_pages_bulk};
use pagemill_core::ListPolicy;

const SECTION: usize = ListPolicy::SECTION;
const LARGE: usize = ListPolicy::LARGE;

fn allocator() -> Allocator {
    one_cpu(Memory::anonymous(1 << 15))
}

/// As [`singles`], past the list.
fn pages_from_the_zone(allocator: &Allocator, n: usize) -> Vec<Page> {
    let mut pages = bulk(allocator, Bulk::up_to(n.max(LARGE + 1))).0;
    pages.truncate(n);
    allocator.drain();
    pages
}

/// The pages that a trip to the zone brings to an empty list, the requested one included.
fn batch(allocator: &Allocator) -> u64 {
    assert_eq!(allocator.stats().listed, 0);
    drop(allocator.alloc_page(Gfp::KERNEL).unwrap());
    allocator.stats().listed
}

/// How many pages a list that is empty takes before it gives some to the zone: the limit.
fn limit(allocator: &Allocator) -> u64 {
    let mut held = pages_from_the_zone(allocator, 4000);
    let mut most = 0;
    while let Some(page) = held.pop() {
        drop(page);
        let listed = allocator.stats().listed;
        if listed <= most {
            break;
        }
        most = listed;
    }
    assert!(!held.is_empty(), "a list took all that there was");
    free_pages_bulk(&mut held.into_iter().map(Some).collect::<Vec<_>>());
    most
}

#[test]
fn a_drain_resets_the_batch_of_a_list() {
    let allocator = allocator();
    assert_eq!(batch(&allocator), u64::from(ListPolicy::BATCH_MIN));
    allocator.drain();
    // While all goes one way, batches grow.
    let held = singles(&allocator, 3000);
    let taken = singles(&allocator, allocator.stats().listed as usize);
    assert!(batch(&allocator) > u64::from(ListPolicy::BATCH_MIN), "a list that was always empty gets larger batches");
    allocator.drain();
    assert_eq!(batch(&allocator), u64::from(ListPolicy::BATCH_MIN), "after a drain of all CPUs");
    allocator.drain();
    // And by itself: one that is drained alone.
    let more = singles(&allocator, 3000);
    allocator.drain_cpu(CpuId::new(0)).unwrap();
    assert_eq!(batch(&allocator), u64::from(ListPolicy::BATCH_MIN), "after a drain of its CPU");
    drop((held, taken, more));
    allocator.close().unwrap();
}

#[test]
fn a_drain_resets_the_limit_of_a_list() {
    let allocator = allocator();
    assert_eq!(limit(&allocator), u64::from(ListPolicy::LIMIT_MIN));
    allocator.drain();
    // While callers swing further than the list is long, it grows.
    let mut most = 0;
    for _ in 0..10 {
        let mut held = singles(&allocator, 1000);
        while let Some(page) = held.pop() {
            drop(page);
            most = allocator.stats().listed.max(most);
        }
    }
    assert!(most > u64::from(ListPolicy::LIMIT_MIN), "a list that callers swing past holds {most}");
    allocator.drain();
    assert_eq!(limit(&allocator), u64::from(ListPolicy::LIMIT_MIN), "after a drain");
    close_all_back(allocator);
}

/// What changed: (on the list, in the zone, given past the list, from the list to the zone).
fn change(before: &Stats, after: &Stats) -> (i64, i64, u64, u64) {
    (
        after.listed as i64 - before.listed as i64,
        after.free as i64 - before.free as i64,
        after.direct_in - before.direct_in,
        after.drained_pages - before.drained_pages,
    )
}

#[test]
fn large_frees_bypass_a_full_list() {
    let allocator = allocator();
    let mut held: Vec<Option<Page>> = pages_from_the_zone(&allocator, 1000).into_iter().map(Some).collect();
    let limit = ListPolicy::LIMIT_MIN as usize;
    held[..limit].iter_mut().for_each(|slot| *slot = None);
    assert_eq!(allocator.stats().listed, limit as u64, "the list is full");
    let mut free = |n: usize| {
        let before = allocator.stats();
        let from = held.len() - n;
        assert_eq!(free_pages_bulk(&mut held[from..]), n);
        held.truncate(from);
        change(&before, &allocator.stats())
    };
    let section = SECTION as i64;
    assert_eq!(free(SECTION), (0, section, SECTION as u64, 0), "as large as what would be moved: past the list");
    // The second time in a row twice as much is moved, and so the list makes room.
    assert_eq!(free(SECTION), (-section, 2 * section, 0, 2 * SECTION as u64), "smaller than what is moved");
    assert_eq!(free(8), (8, 0, 0, 0), "there is room now");
    drop(held);
    close_all_back(allocator);
}

#[test]
fn large_requests_bypass_the_list() {
    let allocator = allocator();
    drop(allocator.alloc_page(Gfp::KERNEL).unwrap());
    let n = LARGE + 1;
    let alone = allocator.stats();
    assert!(alone.listed > 0);
    let passes = |stats: &Stats, what: &str| {
        assert_eq!((stats.listed, stats.refills, stats.drains), (alone.listed, alone.refills, alone.drains), "{what}");
    };
    let (mut list, mut runs) = (PageList::new(), Vec::<Run<Page>>::new());
    let mut slots = array(&allocator, n);
    passes(&allocator.stats(), "an array");
    allocator.alloc_pages_bulk_list(Bulk::exact(n), &mut list).unwrap();
    passes(&allocator.stats(), "a list");
    allocator.alloc_pages_bulk_runs(Bulk::exact(n), &mut runs).unwrap();
    passes(&allocator.stats(), "runs");
    let kept = bulk(&allocator, Bulk::up_to(n)).0;
    passes(&allocator.stats(), "a callback");
    assert_eq!(free_pages_bulk(&mut slots), n);
    passes(&allocator.stats(), "an array, freed");
    drop(list);
    passes(&allocator.stats(), "a list, freed");
    drop(runs);
    passes(&allocator.stats(), "runs, freed");
    assert_eq!(allocator.stats().direct_in, 3 * n as u64);
    // The largest request that is not large goes by the list.
    allocator.alloc_pages_bulk_list(Bulk::exact(LARGE), &mut PageList::new()).unwrap();
    assert!(allocator.stats().refills > alone.refills);
    drop(kept);
    close_all_back(allocator);
}
