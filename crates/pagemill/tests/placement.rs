//! Where pages are put: kinds of mobility do not share pageblocks while there is room (C3.6), and huge frames survive
//! churn.

use crate::common::{Rng, allocators, bulk, one_cpu, singles};
use pagemill::{Allocator, Bulk, Error, Gfp, Memory, Order, Page, PageList};
use std::collections::{HashMap, HashSet};

const BLOCK: usize = 512;

/// Pageblocks that are entirely free.
fn free_pageblocks(allocator: &Allocator) -> usize {
    let info = allocator.buddyinfo();
    (9..=18).map(|order| info.free_blocks(Order::new(order).unwrap()) << (order - 9)).sum()
}

#[test]
fn mobilities_do_not_share_pageblocks_while_there_is_room() {
    for allocator in &allocators(32 * BLOCK) {
        let kinds = [Gfp::KERNEL, Gfp::KERNEL | Gfp::MOVABLE, Gfp::NOWAIT | Gfp::RECLAIMABLE];
        let (mut random, mut held) = (Rng::new(7), Vec::new());
        for _ in 0..400 {
            let kind = random.below(3);
            let request = Bulk::up_to(1 + random.below(60)).gfp(kinds[kind]);
            if random.below(2) == 0 {
                held.push((kind, allocator.alloc_page(kinds[kind]).unwrap()));
            } else {
                allocator.alloc_pages_bulk_callback(request, |page: Page| held.push((kind, page))).unwrap();
            }
            if held.len() > 16 * BLOCK {
                (0..4000).for_each(|_| drop(held.swap_remove(random.below(held.len()))));
            }
        }
        assert!(held.len() > 8 * BLOCK);
        let mut kind_of = HashMap::new();
        for (kind, page) in &held {
            let of_block = *kind_of.entry(page.addr() >> 21).or_insert(*kind);
            assert_eq!(of_block, *kind, "two kinds share the pageblock of {page:?}");
        }
        assert_eq!(kind_of.values().collect::<HashSet<_>>().len(), 3);
        assert_eq!(allocator.stats().steals, 0);
    }
}

#[test]
fn bulk_takes_no_page_of_another_mobility_and_the_single_attempt_does() {
    for gfp in [Gfp::KERNEL, Gfp::NOWAIT] {
        for allocator in &allocators(2 * BLOCK) {
            let movable = Gfp::KERNEL | Gfp::MOVABLE;
            let mut first = PageList::new();
            allocator.alloc_pages_bulk_list(Bulk::exact(600).gfp(movable), &mut first).unwrap();
            // All that is free now is in pageblocks of movable pages.
            let mut list = PageList::new();
            let delivered = allocator.alloc_pages_bulk_list(Bulk::up_to(64).gfp(gfp), &mut list).unwrap();
            assert_eq!(delivered.blocks, 1, "one page, by the single attempt");
            let stats = allocator.stats();
            assert_eq!((stats.steals, stats.fallbacks), (1, 1));
            // One by one it may have more, and a least number is reached so.
            list.push(allocator.alloc_page(gfp).unwrap()).unwrap();
            assert_eq!(allocator.stats().steals, 2);
            assert_eq!(allocator.alloc_pages_bulk_list(Bulk::exact(10).gfp(gfp), &mut list).unwrap().blocks, 10);
            assert_eq!((allocator.stats().steals, list.len()), (12, 12));
            // The pageblock's own kind is not hindered: it gets all the rest.
            let rest = 2 * BLOCK - 600 - 12;
            assert_eq!(
                allocator.alloc_pages_bulk_list(Bulk::up_to(5000).gfp(movable), &mut first).unwrap().blocks,
                rest
            );
            assert!(matches!(allocator.alloc_page(gfp), Err(Error::Exhausted(_))));
            drop((first, list));
            allocator.drain();
            assert_eq!(free_pageblocks(allocator), 2);
        }
    }
}

#[test]
fn an_empty_pageblock_serves_any_mobility() {
    for allocator in &allocators(2 * BLOCK) {
        for gfp in [Gfp::KERNEL | Gfp::MOVABLE, Gfp::KERNEL, Gfp::KERNEL | Gfp::RECLAIMABLE] {
            let mut list = PageList::new();
            assert_eq!(
                allocator.alloc_pages_bulk_list(Bulk::up_to(5000).gfp(gfp), &mut list).unwrap().blocks,
                2 * BLOCK
            );
            assert_eq!(allocator.stats().steals, 0);
            drop(list);
            allocator.drain();
        }
    }
}

/// Half full, 100 rounds in which a tenth of the pages is freed and taken again in random order.
fn churn(allocator: &Allocator, seed: u64, in_bulk: bool) -> f64 {
    let pages = allocator.managed_pages().get();
    let mut random = Rng::new(seed);
    let mut held = singles(allocator, pages / 2);
    for _ in 0..100 {
        let n = held.len() / 10;
        (0..n).for_each(|_| drop(held.swap_remove(random.below(held.len()))));
        if in_bulk {
            while held.len() < pages / 2 {
                let want = (pages / 2 - held.len()).min(1 + random.below(100));
                held.extend(bulk(allocator, Bulk::up_to(want)).0);
            }
        } else {
            held.extend(singles(allocator, n));
        }
    }
    allocator.drain();
    let ideal = (pages - held.len()) / BLOCK;
    let kept = free_pageblocks(allocator);
    println!("seed {seed}, bulk {in_bulk}, {}: {kept} of {ideal} pageblocks kept", allocator.backend());
    kept as f64 / ideal as f64
}

#[test]
fn free_pageblocks_survive_churn() {
    for seed in [1, 2, 3] {
        for in_bulk in [false, true] {
            // 256 MiB. On one CPU the seed determines the result; a thread that moves between CPUs costs a pageblock
            // or two of 64 for each.
            let one_cpu = one_cpu(Memory::anonymous(128 * BLOCK));
            let kept = churn(&one_cpu, seed, in_bulk);
            assert!(kept >= 0.95, "seed {seed}: {kept:.2} of the ideal number of free pageblocks is left");
            for allocator in &allocators(128 * BLOCK) {
                let kept = churn(allocator, seed, in_bulk);
                assert!(kept >= 0.8, "seed {seed}: {kept:.2} of the ideal number of free pageblocks is left");
                assert_eq!(allocator.validate().unwrap().handed_out, 0);
            }
        }
    }
}
