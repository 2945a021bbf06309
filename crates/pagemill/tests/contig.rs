//! Runs of neighbouring pages in any number (C3.17): `alloc_contig`.
use crate::common::{
    Cache, Rng, all, allocators, arena, assert_all_back, backends, close_all_back, is_all, is_served_beside_others,
    is_stamped, one_cpu, stamp, stay_here, until_waiting,
};
use pagemill::{
    Allocator, Error, Exhausted, Faults, Gfp, InvalidRequest, Memory, MisuseKind, Mobility, NodeId, Order, PAGE_SIZE,
    Page, Run, Watermarks, Why, free_pages_bulk_runs, free_raw,
};
use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

const MIXTURE: [usize; 5] = [3, 17, 100, 266, 700];

fn short(wanted: usize, why: Why) -> Error {
    Error::Exhausted(Exhausted { wanted, got: 0, order: 0, why })
}

/// Runs of random numbers of the mixture, until one is refused.
fn fill(allocator: &Allocator, rng: &mut Rng, held: &mut Vec<Run<Page>>) {
    while let Ok(run) = allocator.alloc_contig(Gfp::KERNEL, MIXTURE[rng.below(MIXTURE.len())]) {
        held.push(run);
    }
}

fn pages_of(held: &[Run<Page>]) -> usize {
    held.iter().map(Run::len).sum()
}

#[test]
fn a_run_has_exactly_the_pages_asked_for_wherever_it_lies() {
    for allocator in &allocators(9 * 512 + 77) {
        let numbers = [1, 2, 3, 63, 64, 65, 266, 511, 512, 513, 700, 1500];
        let mut runs: Vec<Run<Page>> =
            numbers.iter().map(|&n| allocator.alloc_contig(Gfp::KERNEL, n).unwrap()).collect();
        let mut seen = HashSet::new();
        for (run, &n) in runs.iter_mut().zip(&numbers) {
            assert_eq!((run.len(), run.bytes(), run.addr() % PAGE_SIZE), (n, n * PAGE_SIZE, 0));
            assert!((0..n).all(|i| seen.insert(run.addr() + i * PAGE_SIZE)), "a page is owned twice");
            run.as_mut_bytes().fill(n as u8);
        }
        assert_eq!(allocator.validate().unwrap().handed_out, pages_of(&runs));
        assert_eq!(allocator.stats().allocated, seen.len() as u64);
        assert!(runs.iter().zip(&numbers).all(|(run, &n)| is_all(run.as_bytes(), n as u8)));
        // By a drop, in bulk, and page by page.
        drop(runs.swap_remove(6));
        let pages: Vec<Page> = runs.swap_remove(9).into_pages().skip(1).collect();
        assert!(free_pages_bulk_runs(&mut runs) > 512);
        drop(pages);
        assert_all_back(allocator);
        let whole = allocator.alloc_contig(Gfp::KERNEL, 9 * 512 + 77).unwrap();
        assert!(allocator.alloc_page(Gfp::KERNEL).is_err());
        drop(whole);
    }
}

#[test]
fn runs_of_266_pages_use_98_percent_of_an_arena() {
    for pages in [4096, 20_000, 8 * 512 + 77] {
        for allocator in allocators(pages) {
            let runs: Vec<Run<Page>> = std::iter::from_fn(|| allocator.alloc_contig(Gfp::KERNEL, 266).ok()).collect();
            assert_eq!(runs.len(), pages / 266);
            assert!(pages_of(&runs) * 100 >= pages * 98 || pages < 50 * 266, "{} of {pages}", pages_of(&runs));
            drop(runs);
            close_all_back(allocator);
        }
    }
}

#[test]
fn a_mixture_uses_98_percent_of_an_arena_before_the_first_refusal() {
    for allocator in &allocators(65_536) {
        let (mut rng, mut held) = (Rng::new(5), Vec::new());
        fill(allocator, &mut rng, &mut held);
        assert!(pages_of(&held) * 100 >= 65_536 * 98, "{}", pages_of(&held));
        drop(held);
        assert_all_back(allocator);
    }
}

#[test]
fn after_churn_everything_merges_whatever_the_order_of_frees() {
    for allocator in &allocators(16_384) {
        let (mut rng, mut held) = (Rng::new(7), Vec::new());
        for _ in 0..30 {
            fill(allocator, &mut rng, &mut held);
            assert!(pages_of(&held) > 16_384 / 2, "{} pages in use at the first refusal", pages_of(&held));
            for _ in 0..held.len() / 4 {
                held.swap_remove(rng.below(held.len()));
            }
            allocator.validate().unwrap();
        }
        while !held.is_empty() {
            held.swap_remove(rng.below(held.len()));
        }
        assert_all_back(allocator);
        let order = Order::new(13).unwrap();
        assert_eq!([0, 0].map(|_| allocator.alloc_pages(Gfp::KERNEL, order).is_ok()), [true; 2]);
    }
}

#[test]
fn numbers_that_no_arena_can_have_are_invalid_at_once() {
    let marks = Watermarks::above(40);
    let memory = || Memory::anonymous(600).watermarks(marks);
    let allocator = Allocator::builder().memory(memory()).memory(memory()).build().unwrap();
    for gfp in [Gfp::KERNEL, Gfp::NOWAIT, Gfp::KERNEL | Gfp::NOFAIL] {
        let refused = |pages| allocator.alloc_contig(gfp, pages).unwrap_err();
        assert_eq!(refused(0), Error::Invalid(InvalidRequest::NoPages));
        for blocks in [561, 700, 1200, u32::MAX as usize + 3, usize::MAX] {
            let never = InvalidRequest::MoreThanManaged { blocks, order: 0, most: 560 };
            assert_eq!(refused(blocks), Error::Invalid(never), "{gfp:?}");
        }
        assert_eq!(allocator.alloc_contig(gfp, 560).unwrap().len(), 560);
    }
    let refused = |gfp| allocator.alloc_contig(gfp, 3).unwrap_err();
    assert_eq!(refused(Gfp::KERNEL | Gfp::ACCOUNT), Error::Invalid(InvalidRequest::NoAccount));
    assert_eq!(refused(Gfp::KERNEL | Gfp::DMA32), Error::Invalid(InvalidRequest::GfpUnsupported("DMA32")));
    assert!(matches!(refused(Gfp::NOWAIT | Gfp::NOFAIL), Error::Invalid(_)));
    assert_eq!(allocator.stats().waits, 0);
    close_all_back(allocator);
}

#[test]
fn a_run_that_may_wait_drains_the_lists_first() {
    let allocator = one_cpu(Memory::anonymous(300));
    drop(all(&allocator, Gfp::KERNEL));
    assert!(allocator.stats().listed > 0);
    assert_eq!(allocator.alloc_contig(Gfp::NOWAIT, 300).unwrap_err(), short(300, Why::Exhausted));
    let run = allocator.alloc_contig(Gfp::KERNEL, 300).unwrap();
    drop(run);
    // It went past the list.
    assert_eq!((allocator.stats().listed, allocator.stats().free), (0, 300));
    close_all_back(allocator);
}

#[test]
fn a_run_of_zeroes_is_zero_and_an_ordinary_one_is_not_zeroed() {
    for allocator in &allocators(1100) {
        let run = |gfp| allocator.alloc_contig(gfp, 700).unwrap();
        assert!(is_all(run(Gfp::KERNEL | Gfp::ZERO).as_bytes(), 0));
        run(Gfp::KERNEL).as_mut_bytes().fill(0xee);
        assert!(is_all(run(Gfp::KERNEL).as_bytes(), 0xee));
        assert!(is_all(run(Gfp::KERNEL | Gfp::ZERO).as_bytes(), 0));
        assert_all_back(allocator);
    }
}

#[test]
fn runs_stop_at_their_watermark() {
    let allocator = one_cpu(Memory::anonymous(1000).watermarks(Watermarks::above(100)));
    let run = allocator.alloc_contig(Gfp::NOWAIT, 890).unwrap();
    assert_eq!(allocator.alloc_contig(Gfp::NOWAIT, 11).unwrap_err(), short(11, Why::BelowMark));
    let more = allocator.alloc_contig(Gfp::ATOMIC, 60).unwrap();
    assert_eq!(allocator.alloc_contig(Gfp::ATOMIC, 2).unwrap_err(), short(2, Why::BelowMark));
    assert_eq!(allocator.stats().free, 50);
    drop((run, more));
    close_all_back(allocator);
}

/// Every other page is free: enough above the watermark, and no two of them neighbours.
#[test]
fn a_run_that_no_neighbours_can_make_is_exhausted_and_not_below_a_mark() {
    let allocator = one_cpu(Memory::anonymous(640).watermarks(Watermarks::above(40)));
    let mut pages: Vec<_> = std::iter::from_fn(|| allocator.alloc_page(Gfp::NOWAIT).ok()).collect();
    pages.retain(|page| !(page.addr() / PAGE_SIZE).is_multiple_of(2));
    allocator.drain();
    // The pages that the mark kept may be neighbours.
    let _rest: Vec<_> = std::iter::from_fn(|| allocator.alloc_contig(Gfp::ATOMIC, 2).ok()).collect();
    assert!(allocator.stats().free > 200);
    assert_eq!(allocator.alloc_contig(Gfp::NOWAIT, 2).unwrap_err(), short(2, Why::Exhausted));
}

#[test]
fn a_run_keeps_to_pageblocks_of_its_mobility_until_there_is_nothing_else() {
    let allocator = one_cpu(Memory::anonymous(1024));
    let movable = allocator.alloc_contig(Gfp::KERNEL | Gfp::MOVABLE, 100).unwrap();
    let run = allocator.alloc_contig(Gfp::KERNEL, 500).unwrap();
    assert_eq!(allocator.stats().steals, 0);
    assert!(run.addr() + run.bytes() <= movable.addr() - 412 * PAGE_SIZE, "it lies in the other pageblock");
    let mixed = allocator.alloc_contig(Gfp::KERNEL, 412).unwrap();
    assert_eq!((allocator.stats().steals, mixed.addr() + mixed.bytes()), (412, movable.addr()));
    // Pages of a run over pageblocks of two mobilities go back together too.
    drop((run, mixed));
    let both = allocator.alloc_contig(Gfp::KERNEL, 600).unwrap();
    assert_eq!(both.addr() + both.bytes(), movable.addr());
    drop(both);
    let lists = &allocator.zoneinfo()[0].lists;
    assert!(lists.iter().all(|list| list.pages == 0 || list.mobility == Mobility::Unmovable));
    drop(movable);
    close_all_back(allocator);
}

#[test]
fn a_run_lies_in_one_arena_of_an_allowed_node() {
    let far = NodeId::new(1).unwrap();
    let builder = Allocator::builder().memory(Memory::anonymous(600)).memory(Memory::anonymous(600).node(far));
    let allocator = builder.cpus(1, || 0).build().unwrap();
    let first = allocator.alloc_contig(Gfp::KERNEL, 400).unwrap();
    assert!(allocator.alloc_contig(Gfp::KERNEL | Gfp::THISNODE, 400).is_err());
    let second = allocator.alloc_contig(Gfp::KERNEL, 400).unwrap();
    let nodes = |allocator: &Allocator| -> Vec<u64> {
        allocator.zoneinfo().iter().map(|zone| zone.stats.allocated - zone.stats.freed).collect()
    };
    assert_eq!(nodes(&allocator), [400, 400]);
    assert_eq!(allocator.alloc_contig(Gfp::KERNEL, 400).unwrap_err(), short(400, Why::Exhausted));
    drop((first, second));
    allocator.set_allowed_nodes(pagemill::NodeMask::only(far)).unwrap();
    let held = allocator.alloc_contig(Gfp::KERNEL, 400).unwrap();
    assert_eq!(nodes(&allocator), [0, 400]);
    allocator.set_allowed_nodes(pagemill::NodeMask::ALL).unwrap();
    // A retired arena hands out none, and takes back what is out.
    let arena = allocator.arenas().into_iter().find(|arena| arena.node == far).unwrap();
    allocator.retire(arena.id).unwrap();
    assert_eq!(
        allocator.alloc_contig(Gfp::KERNEL, 601).unwrap_err(),
        Error::Invalid(InvalidRequest::MoreThanManaged { blocks: 601, order: 0, most: 600 })
    );
    assert_eq!(nodes(&allocator).first(), Some(&0));
    drop(held);
    assert_eq!(allocator.alloc_contig(Gfp::KERNEL, 600).map(|run| run.len()), Ok(600));
    assert_eq!(allocator.validate().unwrap().handed_out, 0);
    allocator.close().unwrap();
}

#[test]
fn a_fault_makes_a_run_fail_and_nothing_is_lost() {
    let faults = Faults::with_probability(0.5, 3);
    let allocator = arena(2048).faults(faults.clone()).build().unwrap();
    let runs: Vec<Result<Run<Page>, Error>> = (0..40).map(|_| allocator.alloc_contig(Gfp::NOWAIT, 33)).collect();
    let failed = runs.iter().filter(|run| run.is_err()).count();
    assert!(failed > 0 && failed < 40 && faults.injected() >= failed as u64, "{failed}");
    assert!(runs.iter().flatten().all(|run| run.len() == 33));
    assert_eq!(runs.into_iter().find_map(Result::err), Some(short(33, Why::Fault)));
    assert_all_back(&allocator);
}

#[test]
fn a_shrinker_brings_the_pages_of_a_run() {
    let allocator = one_cpu(Memory::anonymous(600));
    let pages = all(&allocator, Gfp::KERNEL);
    let registered = allocator.register_shrinker(Arc::new(Cache::of(pages)));
    let run = allocator.alloc_contig(Gfp::KERNEL, 300).unwrap();
    assert_eq!(run.len(), 300);
    drop((run, registered));
    assert_all_back(&allocator);
}

#[test]
fn a_request_waits_for_a_run_and_delays_no_other() {
    for allocator in &allocators(1024) {
        let runs: Vec<Run<Page>> = (0..10).map(|_| allocator.alloc_contig(Gfp::KERNEL, 100).unwrap()).collect();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| allocator.alloc_contig(Gfp::KERNEL | Gfp::NOFAIL, 250).map(|run| run.len()));
            until_waiting(allocator, 1);
            assert_eq!(allocator.alloc_contig(Gfp::NOWAIT, 20).unwrap().len(), 20);
            drop(allocator.alloc_page(Gfp::KERNEL).unwrap());
            assert_eq!(allocator.stats().waiting, 1);
            drop(runs);
            assert_eq!(waiter.join().unwrap(), Ok(250));
        });
        assert_all_back(allocator);
    }
}

#[test]
fn a_run_that_is_overtaken_claims_a_pageblock() {
    is_served_beside_others(2048, 300, |allocator| {
        allocator.alloc_contig(Gfp::KERNEL | Gfp::NOFAIL, 300).map(|run| run.len())
    });
}

#[test]
fn a_page_of_a_run_cannot_be_freed_by_its_address() {
    for allocator in &allocators(600) {
        let mut run = allocator.alloc_contig(Gfp::KERNEL, 266).unwrap();
        run.as_mut_bytes().fill(5);
        for i in [0, 1, 265] {
            let page = run.as_mut_ptr().wrapping_add(i * PAGE_SIZE);
            // SAFETY: deliberate misuse, which is refused and changes nothing.
            assert_eq!(unsafe { free_raw(page, Order::ZERO) }.unwrap_err().kind, MisuseKind::DoubleFree);
        }
        assert!(is_all(run.as_bytes(), 5));
        // Of its pages, one becomes a raw pointer.
        let mut pages = run.into_pages();
        let raw = pages.next().unwrap().into_raw();
        drop(pages);
        // SAFETY: the page is the test's; the second call is deliberate misuse.
        let freed = unsafe { [free_raw(raw, Order::ZERO), free_raw(raw, Order::ZERO)] };
        assert_eq!(freed.map(|freed| freed.is_ok()), [true, false]);
        allocator.drain();
        assert_eq!((allocator.stats().free, allocator.stats().misused), (600, 4));
    }
}

/// Runs, blocks and pages beside each other in a small arena: each owner stamps its pages and finds its stamps again.
#[test]
fn runs_pages_and_blocks_of_many_threads_never_overlap() {
    const PAGES: usize = 1500;
    fn own(pages: impl Iterator<Item = Page>, owner: u64) -> Vec<Page> {
        pages
            .map(|mut page| {
                stamp(&mut page, owner);
                page
            })
            .collect()
    }
    for backend in backends() {
        let allocator = arena(PAGES).backend(backend).build().unwrap();
        let served = [const { AtomicUsize::new(0) }; 4];
        std::thread::scope(|scope| {
            for owner in 0..4 {
                let (allocator, served) = (&allocator, &served);
                scope.spawn(move || {
                    let mut rng = Rng::new(owner + 1);
                    let mut held: VecDeque<Vec<Page>> = VecDeque::new();
                    for _ in 0..3000 {
                        let gfp = [Gfp::KERNEL, Gfp::NOWAIT, Gfp::KERNEL | Gfp::MOVABLE][rng.below(3)];
                        let most = [5, 70, 600][rng.below(3)];
                        let n = 1 + rng.below(most);
                        let taken = match owner {
                            0 | 1 => allocator.alloc_contig(gfp, n).map(|run| own(run.into_pages(), owner)),
                            2 => allocator
                                .alloc_pages(gfp, Order::new(rng.below(9) as u8).unwrap())
                                .map(|block| own(block.split(), owner)),
                            _ => allocator.alloc_page(gfp).map(|page| own(std::iter::once(page), owner)),
                        };
                        match taken {
                            Ok(pages) => {
                                held.push_back(pages);
                                served[owner as usize].fetch_add(1, Relaxed);
                            }
                            Err(why) => assert!(matches!(why, Error::Exhausted(_)), "{why}"),
                        }
                        while held.len() > [2, 3, 20, 200][owner as usize] || rng.below(7) == 0 {
                            let Some(pages) = held.pop_front() else { break };
                            assert!(pages.iter().all(|page| is_stamped(page, owner)), "a page has two owners");
                        }
                    }
                    assert!(held.iter().flatten().all(|page| is_stamped(page, owner)), "a page has two owners");
                });
            }
        });
        assert!(served.iter().all(|served| served.load(Relaxed) > 0), "{served:?}");
        close_all_back(allocator);
    }
}

/// A request that would be served if it were alone is not refused because another one looks at the same time: both fit.
#[test]
fn two_threads_get_all_runs_that_fit() {
    stay_here();
    for allocator in &allocators(4096) {
        let rounds = 300;
        for _ in 0..rounds {
            let got: usize = std::thread::scope(|scope| {
                let take = || (0..7).map(|_| allocator.alloc_contig(Gfp::NOWAIT, 266)).collect::<Result<Vec<_>, _>>();
                let threads = [0, 0].map(|_| scope.spawn(take));
                threads.into_iter().map(|thread| pages_of(&thread.join().unwrap().unwrap())).sum()
            });
            assert_eq!(got, 14 * 266);
        }
        assert_all_back(allocator);
    }
}
