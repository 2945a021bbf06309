//! Memory that goes back to the system, at once, in part and by age, and that is committed ahead; also while others work.
//! The system's figures count, not the allocator's.

use crate::common::{
    EXACT_FORMS, Over, PATIENCE, Rng, all_without_waiting, allocator, are_resident, assert_all_back, assert_distinct,
    backends, is_all, is_stamped, pages_go_singly, resident_pages, slots, stamp, system_page, take, until,
};
use pagemill::{
    Allocator, Block, BlockList, Bulk, Gfp, Memory, NodeId, Order, Page, PageCount, Populated, Watermarks,
    free_pages_bulk,
};
use std::collections::HashSet;
use std::ops::{ControlFlow, Range};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

const PAGES: usize = 8192;
const MINUTE: Duration = Duration::from_secs(60);

fn with(memory: Memory, idle: Option<Duration>) -> (Allocator, Range<usize>) {
    let builder = Allocator::builder().memory(memory).huge_pages(false);
    let allocator = match idle {
        Some(age) => builder.give_back_after(age).build().unwrap(),
        None => builder.build().unwrap(),
    };
    let range = allocator.arenas()[0].range.clone();
    (allocator, range)
}

/// Every page was written to, and is back.
fn use_all(allocator: &Allocator, range: &Range<usize>) {
    take(allocator, PAGES).iter_mut().for_each(|page| page[9] = 9);
    allocator.drain();
    assert_eq!(resident_pages(range), PAGES);
}

#[test]
fn give_back_at_most_returns_the_pages_it_gave_back() {
    for memory in [Memory::anonymous(PAGES), Memory::memfd(PAGES)] {
        let (allocator, range) = with(memory, None);
        assert_eq!(allocator.give_back().get(), 0, "nobody had any of it");
        use_all(&allocator, &range);
        let mut left = PAGES;
        for (most, given) in [(0, 0), (511, 0), (512, 512), (1500, 1024), (PAGES, PAGES - 1536), (PAGES, 0)] {
            assert_eq!(allocator.give_back_at_most(PageCount::new(most)).get(), given);
            left -= given;
            assert_eq!(resident_pages(&range), left);
        }
        assert_all_back(&allocator);
    }
}

#[test]
fn give_back_keeps_the_high_mark_committed() {
    let (allocator, range) = with(Memory::anonymous(PAGES).watermarks(Watermarks::above(1024)), None);
    take(&allocator, PAGES - 1280).iter_mut().for_each(|page| page[0] = 1);
    allocator.drain();
    // 13 pageblocks and a half; 1536 pages of them are to stay.
    assert_eq!((resident_pages(&range), allocator.give_back().get()), (PAGES - 1280, 10 * 512));
    assert_eq!((resident_pages(&range), allocator.give_back().get()), (PAGES - 1280 - 10 * 512, 0));
    assert_all_back(&allocator);
}

#[test]
fn give_back_counts_only_committed_pages() {
    let (allocator, range) = with(Memory::anonymous(PAGES), None);
    take(&allocator, PAGES - 1280).iter_mut().for_each(|page| page[0] = 1);
    assert_eq!((allocator.give_back().get(), resident_pages(&range)), (PAGES - 1280, 0));
    assert_all_back(&allocator);
}

#[test]
fn larger_system_pages_keep_the_high_mark_and_the_count() {
    own_process!();
    pagemill_os::pretend_system_page(4 * 4096);
    give_back_keeps_the_high_mark_committed();
    give_back_counts_only_committed_pages();
}

/// One page of each pageblock stays out, in the middle; all pages were written to.
fn keep_one_of_each_pageblock(allocator: &Allocator, range: &Range<usize>, pages: usize) -> Vec<Page> {
    let mut pages = take(allocator, pages);
    pages.iter_mut().for_each(|page| page.fill(9));
    pages.retain(|page| (page.addr() - range.start) / 4096 % 512 == 200);
    pages
}

#[test]
fn free_parts_of_a_used_pageblock_are_given_back() {
    if !pages_go_singly() {
        return;
    }
    for memory in [Memory::anonymous(PAGES), Memory::memfd(PAGES)] {
        let (allocator, range) = with(memory, None);
        let kept = keep_one_of_each_pageblock(&allocator, &range, PAGES);
        assert_eq!(kept.len(), PAGES / 512);
        let is_kept = |resident: &[bool]| resident.iter().enumerate().all(|(at, &is)| is == (at % 512 == 200));
        // A hundred pages at a time.
        for so_far in (100..=700).step_by(100) {
            let given = allocator.give_back_at_most(PageCount::new(100)).get();
            assert_eq!((given, resident_pages(&range)), (100, PAGES - so_far));
        }
        let given = allocator.give_back().get();
        assert_eq!((given, resident_pages(&range)), (PAGES - kept.len() - 700, kept.len()));
        assert!(is_kept(&are_resident(&range)));
        assert_eq!(allocator.give_back().get(), 0, "it is gone");
        assert!(kept.iter().all(|page| is_all(&page[..], 9)));
        // Pages taken again are zero.
        let mut zeroed = all_without_waiting(&allocator, Gfp::KERNEL | Gfp::ZERO);
        assert_eq!(zeroed.len(), PAGES - kept.len());
        assert!(zeroed.iter().all(|page| is_all(&page[..], 0)));
        zeroed.iter_mut().for_each(|page| page[0] = 1);
        // Runs of free pages that are shorter than 16 are not worth a call each.
        zeroed.retain(|page| (page.addr() - range.start) / 4096 % 8 == 0);
        allocator.drain();
        assert_eq!((allocator.give_back().get(), resident_pages(&range)), (0, PAGES));
        drop((kept, zeroed));
        allocator.drain();
        assert_eq!((allocator.give_back().get(), resident_pages(&range)), (PAGES, 0));
        assert_all_back(&allocator);
    }
}

#[test]
fn give_back_of_parts_keeps_the_high_mark_committed() {
    if !pages_go_singly() {
        return;
    }
    let (allocator, range) = with(Memory::anonymous(PAGES).watermarks(Watermarks::above(1000)), None);
    let pages = keep_one_of_each_pageblock(&allocator, &range, PAGES - 1250);
    let out = pages.len();
    allocator.drain();
    let resident = resident_pages(&range);
    assert_eq!(resident, PAGES - 1250);
    // 1500 free pages stay committed.
    assert_eq!(allocator.give_back().get(), resident - out - 1500);
    assert_eq!((allocator.give_back().get(), resident_pages(&range)), (0, out + 1500));
    drop(pages);
    assert_all_back(&allocator);
}

#[test]
fn parts_of_a_pageblock_are_not_given_back_with_huge_pages() {
    let allocator = allocator(PAGES);
    let range = allocator.arenas()[0].range.clone();
    let kept = keep_one_of_each_pageblock(&allocator, &range, PAGES);
    assert_eq!((allocator.give_back().get(), resident_pages(&range)), (0, PAGES));
    drop(kept);
    assert_eq!(allocator.give_back().get(), PAGES);
    assert_all_back(&allocator);
}

#[test]
fn pages_taken_during_give_back_count_towards_the_high_mark() {
    if std::thread::available_parallelism().is_ok_and(|processors| processors.get() == 1) {
        return eprintln!("skipped: two threads at once take two processors");
    }
    const PAGES: usize = 64 * 512;
    let marks = Watermarks { high: PAGES as u32 / 2, ..Watermarks::NONE };
    let (allocator, range) = with(Memory::anonymous(PAGES).watermarks(marks), None);
    // The pageblocks that the system has not got, by their first pages: all would take longer than giving them back.
    let here = || (0..64).filter(|at| resident_pages(&(range.start + (at << 21)..range.start + (at << 21) + 4096)) > 0);
    until("requests in the middle of giving back", || {
        take(&allocator, PAGES).iter_mut().for_each(|page| page[9] = 9);
        allocator.drain();
        std::thread::scope(|scope| {
            let giver = scope.spawn(|| allocator.give_back());
            while here().count() == 64 && !giver.is_finished() {
                std::hint::spin_loop();
            }
            // Nothing is left above the mark.
            let pages = take(&allocator, PAGES / 2);
            let (is_in_time, before) = (!giver.is_finished(), here().count());
            let given = giver.join().unwrap().get();
            // One pageblock was on its way.
            assert!(here().count() + 1 >= before, "{given} pages went back, {before} pageblocks were there");
            drop(pages);
            is_in_time && before > 32 + 1
        })
    });
    assert_all_back(&allocator);
}

#[test]
fn idle_pageblocks_are_given_back() {
    for memory in [Memory::anonymous(PAGES), Memory::memfd(PAGES)] {
        let (allocator, range) = with(memory, Some(MINUTE));
        let start = Instant::now();
        let at = |eighths: u32| allocator.give_back_idle(start + MINUTE / 8 * eighths).get();
        assert_eq!(at(0), 0);
        use_all(&allocator, &range);
        assert_eq!((at(8), resident_pages(&range)), (0, PAGES), "seen free just now");
        // One pageblock is used meanwhile.
        let block = allocator.alloc_pages(Gfp::KERNEL, Order::new(3).unwrap()).unwrap();
        let used = block.addr() >> 21;
        drop(block);
        assert_eq!((at(15), resident_pages(&range)), (0, PAGES), "not a minute ago");
        assert_eq!((at(18), resident_pages(&range)), (PAGES - 512, 512));
        assert_eq!((at(18), at(23), resident_pages(&range)), (0, 0, 512));
        assert_eq!((at(27), resident_pages(&range)), (512, 0));
        assert_eq!(at(1000), 0, "it is gone");
        // Pages in use stay.
        let mut pages = take(&allocator, 600);
        assert!(pages.iter().any(|page| page.addr() >> 21 == used) || pages.len() == 600);
        pages.iter_mut().for_each(|page| page[0] = 1);
        assert_eq!((at(1010), at(1030)), (0, 0));
        assert!(pages.iter().all(|page| page[0] == 1));
        drop(pages);
        assert_all_back(&allocator);
    }
}

#[test]
fn reclaim_steps_and_the_background_thread_give_back_idle_memory() {
    let (allocator, range) = with(Memory::anonymous(PAGES), Some(Duration::ZERO));
    use_all(&allocator, &range);
    assert_eq!((allocator.reclaim_step().get(), resident_pages(&range)), (0, PAGES), "seen");
    assert_eq!((allocator.reclaim_step().get(), resident_pages(&range)), (0, 0));

    let builder = Allocator::builder().pages(PAGES).give_back_after(Duration::from_millis(1));
    let allocator = builder.background_reclaim(true).build().unwrap();
    take(&allocator, PAGES).iter_mut().for_each(|page| page[0] = 1);
    allocator.drain();
    // The thread looks by itself, some times a second; the test ends when it did, and has nothing in its hands any more.
    let arenas = allocator.arenas();
    let is_resident = || arenas.iter().any(|arena| resident_pages(&arena.range) > 0);
    until("what is idle at the system", || !is_resident() && allocator.stats().free == PAGES as u64);
    assert_all_back(&allocator);
}

/// Pages that are committed where those of these blocks are: all in a page of the system's.
fn with_neighbours(addrs: impl Iterator<Item = usize>, order: usize) -> usize {
    let (page, in_one) = (system_page(), system_page() / 4096);
    let parts = addrs.flat_map(|addr| (addr..addr + (4096 << order)).step_by(4096));
    parts.map(|addr| addr / page).collect::<HashSet<_>>().len() * in_one
}

#[test]
fn populated_pages_are_resident_in_every_form() {
    for n in [1, 64, 300, 4096] {
        let resident = |allocator: &Allocator| resident_pages(&allocator.arenas()[0].range);
        let request = Bulk::exact(n).populated();
        let new = || with(Memory::anonymous(PAGES), None).0;
        let committed = |pages: &[Page]| with_neighbours(pages.iter().map(Page::addr), 0);
        for (name, form) in EXACT_FORMS {
            let allocator = new();
            let (pages, _) = form(&allocator, request, n).unwrap();
            assert_eq!((resident(&allocator), assert_distinct(&pages).len()), (committed(&pages), n), "{name} of {n}");
            drop(pages);
            assert_all_back(&allocator);
        }

        // An array that has a page already, and a slot too many.
        let (array, mut slots) = (new(), slots::<Page>(n + 2));
        slots[0] = Some(array.alloc_page(Gfp::KERNEL).unwrap());
        let before = resident(&array);
        let filled = array.alloc_pages_bulk_array(Bulk::exact(n + 1).populated(), &mut slots).unwrap();
        assert_eq!((filled.added, filled.first_hole, slots[n + 1].is_none()), (n, n + 1, true));
        assert_eq!(resident(&array) - before, with_neighbours(slots[1..].iter().flatten().map(Page::addr), 0));
        assert_distinct(slots.iter().flatten());

        // A callback that unwinds: pages that it was not given go back.
        let (callback, calls) = (new(), AtomicUsize::new(0));
        let each = |page: Page| {
            assert_eq!(page[77], 0);
            assert!(calls.fetch_add(1, Relaxed) < n / 2, "that is enough");
        };
        let all = AssertUnwindSafe(|| callback.alloc_pages_bulk_callback(Bulk::up_to(n).populated(), each));
        assert!(catch_unwind(all).is_err());
        assert_eq!((resident(&callback), calls.into_inner()), (n.next_multiple_of(system_page() / 4096), n / 2 + 1));

        let (allocator, order) = (new(), Order::new(1).unwrap());
        let mut pairs: Vec<Block> = Vec::new();
        let request = Bulk::up_to(n).populated().order(order);
        assert_eq!(allocator.alloc_pages_bulk_callback(request, |pair| pairs.push(pair)).unwrap().blocks, n);
        assert_eq!(resident(&allocator), with_neighbours(pairs.iter().map(|pair| pair.addr()), 1));
        let (blocks, mut list) = (new(), BlockList::new());
        let exactly = Bulk::exact(n).populated().order(order);
        assert_eq!(blocks.alloc_pages_bulk_list(exactly, &mut list).unwrap().blocks, n);
        let listed: Vec<Block> = list.collect();
        assert_eq!(resident(&blocks), with_neighbours(listed.iter().map(|pair| pair.addr()), 1));
        drop((slots, pairs, listed));
        [array, callback, allocator, blocks].iter().for_each(assert_all_back);
    }
}

#[test]
fn populate_commits_all_nodes_and_reports_progress() {
    const NODE: usize = 24_576; // 96 MiB: two pieces
    let node = |at| NodeId::new(at).unwrap();
    let memory = |at| Memory::anonymous(NODE).node(node(at));
    let builder = Allocator::builder().memory(memory(0)).memory(memory(1)).huge_pages(false);
    let nodes = vec![node(0), node(1), node(0)];
    let allocator = builder.cpus(3, || 1).nodes(nodes, vec![vec![10, 20], vec![20, 10]]).build().unwrap();
    let mut pages = take(&allocator, 2 * NODE);
    let (first, last) = (pages.iter().map(Page::addr).min().unwrap(), pages.iter().map(Page::addr).max().unwrap());
    let [inside, other] = pages.as_mut_slice().get_disjoint_mut([7, NODE + 7]).unwrap();
    (inside[5], other[5]) = (7, 8);

    let mut seen = Vec::new();
    let total = 2 * NODE * 4096;
    let stopped = allocator.populate(|so_far| {
        assert_eq!(so_far.total, total);
        ControlFlow::Break(())
    });
    let stopped = stopped.unwrap();
    assert!(stopped.done >= 64 << 20 && stopped.done < total, "{stopped:?}");
    let progress = |so_far: Populated| {
        seen.push(so_far.done);
        ControlFlow::Continue(())
    };
    let all = allocator.populate(progress).unwrap();
    assert_eq!((all.done, seen.len(), *seen.last().unwrap()), (total, 4, total));
    assert!(seen.is_sorted_by(|before, after| before < after), "{seen:?}");
    assert!(resident_pages(&(first..last + 4096)) >= 2 * NODE);
    assert_eq!((pages[7][5], pages[NODE + 7][5]), (7, 8), "contents stay");
    drop(pages);
    assert_eq!(allocator.give_back().get(), 2 * NODE);
    // Pages that were populated and never handed out go back as well.
    allocator.populate(|_| ControlFlow::Continue(())).unwrap();
    assert_eq!((allocator.give_back().get(), allocator.give_back().get()), (2 * NODE, 0));
    assert_all_back(&allocator);
}

/// Takes pages and blocks, each to be zero, stamps them, and looks whether the stamps stay.
/// Takes pages in many forms, stamps and frees them, and counts its turns.
fn work(allocator: &Allocator, seed: u64, is_over: &AtomicBool, turns: &AtomicUsize) {
    let mut rng = Rng::new(seed);
    while !is_over.load(Relaxed) {
        let n = 1 + rng.below(700);
        let mut slots = slots::<Page>(n);
        let request = Bulk::up_to(n).gfp(Gfp::KERNEL | Gfp::ZERO);
        let request = if rng.below(16) == 0 { request.populated() } else { request };
        allocator.alloc_pages_bulk_array(request, &mut slots).unwrap();
        let order = Order::new(rng.below(10) as u8).unwrap();
        let mut block = allocator.alloc_pages(Gfp::KERNEL | Gfp::ZERO, order).ok();
        assert!(block.iter().all(|block| is_all(block, 0)), "a block is not zero");
        block.iter_mut().for_each(|block| block.fill(seed as u8));
        for page in slots.iter_mut().flatten() {
            assert!(is_all(&page[..], 0), "a page is not zero");
            stamp(page, seed);
        }
        std::thread::yield_now();
        let is_stamped = slots.iter().flatten().all(|page| is_stamped(page, seed));
        assert!(is_stamped, "a page is owned twice, or was taken away");
        assert!(block.iter().all(|block| is_all(block, seed as u8)), "a block was taken away");
        free_pages_bulk(&mut slots);
        turns.fetch_add(1, Relaxed);
    }
}

#[test]
fn give_back_and_retire_race_with_allocation() {
    for (backend, huge_pages) in backends().into_iter().flat_map(|backend| [(backend, false), (backend, true)]) {
        let builder = Allocator::builder().pages(2048).huge_pages(huge_pages).backend(backend);
        let allocator = builder.give_back_after(Duration::ZERO).build().unwrap();
        // Where free parts of pageblocks go back too, the first arena has no whole one.
        let mut kept = if huge_pages { Vec::new() } else { take(&allocator, 2048) };
        kept.retain(|page| page.addr() / 4096 % 512 == 300);
        kept.iter_mut().for_each(|page| page.fill(0xee));
        let (is_over, turns) = (AtomicBool::new(false), AtomicUsize::new(0));
        let mut given = 0;
        std::thread::scope(|scope| {
            for seed in 1..4 {
                let (allocator, is_over, turns) = (&allocator, &is_over, &turns);
                scope.spawn(move || work(allocator, seed, is_over, turns));
            }
            let _over = Over(&is_over);
            let (mut turn, begin) = (0, Instant::now());
            while turn < 30 || (given < 10 * 512 && begin.elapsed() < PATIENCE) {
                turn += 1;
                let arena = allocator.add_memory(Memory::anonymous(1024)).unwrap();
                assert_eq!(allocator.managed_pages().get(), 3072);
                let before = turns.load(Relaxed);
                for _ in 0..10 {
                    given += match turn % 3 {
                        0 => allocator.give_back(),
                        1 => allocator.give_back_at_most(PageCount::new(512)),
                        _ => allocator.give_back_idle(Instant::now()),
                    }
                    .get();
                    std::thread::yield_now();
                }
                until("turns with the arena", || turns.load(Relaxed) > before + 3);
                allocator.retire(arena).unwrap();
                assert_eq!(allocator.managed_pages().get(), 2048);
            }
        });
        assert!(given >= 10 * 512, "{given} pages went back meanwhile");
        assert!(kept.iter().all(|page| is_all(&page[..], 0xee)), "a page in use went back");
        drop(kept);
        allocator.drain();
        let (census, stats) = (allocator.validate().unwrap(), allocator.stats());
        assert_eq!(census.free, census.managed, "retired arenas included");
        assert_eq!((stats.allocated, stats.misused, stats.quarantined), (stats.freed, 0, 0));
        allocator.close().unwrap();
    }
}

#[test]
fn a_short_last_pageblock_is_given_back() {
    for memory in [Memory::anonymous(700), Memory::memfd(300)] {
        let (allocator, range) = with(memory, Some(MINUTE));
        let all = range.len() / 4096;
        let use_all = || take(&allocator, all).iter_mut().for_each(|page| page[0] = 1);
        use_all();
        assert_eq!(resident_pages(&range), all);
        assert_eq!((allocator.give_back().get(), resident_pages(&range)), (all, 0));
        assert_eq!(allocator.give_back().get(), 0, "it is gone");
        use_all();
        let most = PageCount::new(all % 512 - 1);
        assert_eq!(allocator.give_back_at_most(most).get(), 0);
        let most = PageCount::new(all % 512);
        assert_eq!((allocator.give_back_at_most(most).get(), resident_pages(&range)), (most.get(), all - most.get()));
        // By age as well.
        use_all();
        let start = Instant::now();
        allocator.drain();
        assert_eq!(allocator.give_back_idle(start).get(), 0);
        assert_eq!((allocator.give_back_idle(start + 2 * MINUTE).get(), resident_pages(&range)), (all, 0));
        let pages = all_without_waiting(&allocator, Gfp::KERNEL | Gfp::ZERO);
        assert!(pages.len() == all && pages.iter().all(|page| is_all(&page[..], 0)));
        drop(pages);
        assert_all_back(&allocator);
    }
}

#[test]
fn all_free_pages_of_a_retired_arena_are_given_back() {
    if !pages_go_singly() {
        return;
    }
    for backend in backends() {
        // Marks keep nothing of an arena that hands out nothing any more.
        let marks = Watermarks { min: 0, low: 0, high: 5000, lowmem_reserve: 0 };
        for memory in [Memory::anonymous(1700).watermarks(marks), Memory::memfd(1700)] {
            let builder = Allocator::builder().huge_pages(false).give_back_after(MINUTE).backend(backend);
            let allocator = builder.memory(Memory::anonymous(64)).memory(memory).build().unwrap();
            let arena = allocator.arenas()[1].clone();
            let mut pages = all_without_waiting(&allocator, Gfp::NOWAIT);
            assert_eq!(pages.len(), 1764);
            pages.iter_mut().for_each(|page| page[0] = 1);
            pages.retain(|page| arena.range.contains(&page.addr()));
            let number = |page: &Page| (page.addr() - arena.range.start) / 4096;
            // One in seven of the first two pageblocks stays out, and nothing of the others.
            pages.retain(|page| number(page) < 1024 && number(page) % 7 == 0);
            let is_only_theirs = |pages: &[Page]| {
                let mut expected = vec![false; 1700];
                pages.iter().for_each(|page| expected[number(page)] = true);
                are_resident(&arena.range) == expected
            };
            let drains = allocator.stats().drains;
            let out = pages.len();
            assert!(out > 100);
            assert_eq!(allocator.retire(arena.id).unwrap().get(), out);
            assert!(is_only_theirs(&pages));
            assert!(pages.iter().all(|page| page[0] == 1));
            // Pages that are freed bypass the lists, and go to the system with the next call or in time.
            pages.truncate(out / 2);
            assert_eq!(allocator.stats().drains, drains);
            assert!(!is_only_theirs(&pages));
            assert_eq!(allocator.retire(arena.id).unwrap().get(), out / 2);
            assert!(is_only_theirs(&pages));
            let gone = pages.split_off(out / 4).len();
            assert_eq!(allocator.give_back_idle(Instant::now()).get(), gone);
            assert!(is_only_theirs(&pages));
            assert_eq!(allocator.give_back_idle(Instant::now() + MINUTE).get(), 0);
            drop(pages);
            assert_eq!(allocator.retire(arena.id).unwrap().get(), 0);
            assert!(is_only_theirs(&[]));
            allocator.drain();
            assert_eq!(allocator.validate().unwrap().handed_out, 0);
            allocator.close().unwrap();
        }
    }
}

/// As on a system with pages of 16 KiB, which takes back whole ones, and so the neighbours of a page of 4 KiB.
#[test]
fn larger_system_pages_with_a_used_page_are_not_given_back() {
    own_process!();
    pagemill_os::pretend_system_page(4 * 4096);
    for memory in [Memory::anonymous(1701), Memory::memfd(1701)] {
        let builder = Allocator::builder().huge_pages(false).memory(Memory::anonymous(64));
        let allocator = builder.memory(memory).build().unwrap();
        let arena = allocator.arenas()[1].clone();
        let mut pages = take(&allocator, 1765);
        pages.iter_mut().for_each(|page| page[9] = 9);
        let number = |page: &Page| (page.addr() - arena.range.start) / 4096;
        pages.retain(|page| arena.range.contains(&page.addr()) && number(page) < 1024 && number(page) % 7 == 0);
        // Of the first two pageblocks some pages are out, and others beside them; the other two, one of 165 pages, go back.
        assert_eq!(allocator.give_back().get(), 512 + 165 + 64);
        let is_beside_them = |at: usize| at < 1024;
        let is_as_it_was = |pages: &[Page]| pages.iter().all(|page| page[9] == 9);
        assert!(is_as_it_was(&pages));
        assert!(are_resident(&arena.range).into_iter().enumerate().all(|(at, is)| is == is_beside_them(at)));
        // Retired, it would give single pages back too.
        assert_eq!(allocator.retire(arena.id).unwrap().get(), pages.len());
        assert!(is_as_it_was(&pages));
        drop(pages);
        assert_eq!(allocator.retire(arena.id).unwrap().get(), 0);
        assert_eq!(resident_pages(&arena.range), 0);
        allocator.close().unwrap();
    }
}
