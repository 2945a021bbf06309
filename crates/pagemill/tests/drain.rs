//! C4.3 and C4.4: lists are drained by other threads while their owners go on; threads begin, end and change CPU; CPUs are many.
//! No frame is lost, none has two owners.

use crate::common::{
    Over, PATIENCE, Rng, allocators, assert_all_back, bulk, fake_cpu, go_to, is_stamped, moves_to, singles, stamp,
};
use pagemill::{Allocator, Bulk, CpuId, Error, Gfp, InvalidRequest, Page, PageList, free_pages_bulk};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Instant;

/// A thread that allocates and frees, and stamps what it has, so that a second owner would be seen.
fn own(allocator: &Allocator, seed: u64, turns: usize, mut before: impl FnMut(u64)) -> u64 {
    let mut rng = Rng::new(seed);
    let mut held: Vec<Page> = Vec::new();
    let mut pages = 0;
    let check = |page: &Page| assert!(is_stamped(page, seed), "{page:?} is owned twice");
    for _ in 0..turns {
        let random = rng.next();
        before(random);
        let n = (random >> 40) as usize % 150;
        match random >> 62 {
            0 => held.extend(allocator.alloc_page(Gfp::KERNEL)),
            1 => held.extend(bulk(allocator, Bulk::up_to(n)).0),
            2 => drop(held.pop()),
            _ => {
                let mut slots: Vec<Option<Page>> =
                    held.drain(held.len().saturating_sub(n)..).inspect(check).map(Some).collect();
                assert_eq!(free_pages_bulk(&mut slots), slots.len());
            }
        }
        pages += held.len() as u64;
        held.iter_mut().for_each(|page| stamp(page, seed));
        held.iter().for_each(check);
        if held.len() > 400 {
            held.truncate(200);
        }
    }
    held.iter().for_each(check);
    pages
}

#[test]
fn allocation_goes_on_while_all_lists_are_drained() {
    for allocator in &allocators(4096) {
        let (is_over, drains, moved) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            let _over = Over(&is_over);
            scope.spawn(|| {
                while !is_over.load(Relaxed) {
                    for cpu in 0..allocator.cpus() {
                        moved.fetch_add(allocator.drain_cpu(CpuId::new(cpu as u32)).unwrap().get() as u64, Relaxed);
                    }
                    drains.fetch_add(1, Relaxed);
                }
            });
            // Again, if the machine was busy and drains came too seldom to meet anybody.
            let started = Instant::now();
            while drains.load(Relaxed) < 100 || moved.load(Relaxed) < 1000 {
                assert!(started.elapsed() < PATIENCE, "{drains:?} drains moved {moved:?} pages");
                let owners = [1, 2, 3].map(|seed| scope.spawn(move || own(allocator, seed, 2000, |_| {})));
                let pages: u64 = owners.into_iter().map(|owner| owner.join().unwrap()).sum();
                assert!(pages > 0);
            }
        });
        let (drains, moved) = (drains.into_inner(), moved.into_inner());
        println!("{}: {drains} drains of all CPUs moved {moved} pages", allocator.backend());
        assert_all_back(allocator);
    }
}

#[test]
fn threads_that_exit_or_change_cpu_lose_no_page() {
    for allocator in &allocators(4096) {
        for round in 0..40 {
            std::thread::scope(|scope| {
                for seed in 1..=3 {
                    // Every now and then to another CPU, in the middle of everything.
                    scope.spawn(move || own(allocator, seed + round, 60, |random| _ = moves_to(random as usize % 2)));
                }
            });
            let census = allocator.validate().unwrap();
            assert_eq!(
                (census.handed_out, census.free + census.listed),
                (0, 4096),
                "an exited thread took pages along"
            );
        }
        assert!(allocator.validate().unwrap().listed > 0, "what threads freed stays on the CPUs' lists");
        assert_all_back(allocator);
    }
}

// ── 64 CPUs that are not there ─────────────────────────────────────────────────────────────────────────────────────

const CPUS: usize = 64;

fn many_cpus(pages: usize) -> Allocator {
    Allocator::builder().pages(pages).cpus(CPUS, fake_cpu).build().unwrap()
}

#[test]
fn lists_hold_at_most_an_eighth_of_a_small_zone() {
    for pages in [512, 4096, 1 << 16] {
        let allocator = many_cpus(pages);
        // Swing on every CPU, so that limits grow as far as they go.
        for cpu in 0..CPUS {
            go_to(cpu);
            for n in [1, 10, 100, 300, 700, 1000].into_iter().cycle().take(36) {
                let mut held: Vec<Page> = Vec::new();
                (0..n).for_each(|_| held.extend(allocator.alloc_page(Gfp::NOWAIT)));
            }
        }
        let stats = allocator.stats();
        let (listed, in_depots) = (stats.listed as usize, stats.in_depots as usize);
        // An eighth of the zone at most, for one kind of mobility on all CPUs together; and half as much between them.
        let on_lists = listed - in_depots;
        assert!((1..=(pages / 8).max(CPUS)).contains(&on_lists), "{on_lists} of {pages} pages are on lists");
        assert!(in_depots <= pages / 16, "{in_depots} of {pages} pages are in depots");
        // A request that may not drain still gets all other pages; one that may gets everything.
        go_to(0);
        let mut list = PageList::new();
        let got = allocator.alloc_pages_bulk_list(Bulk::up_to(pages).gfp(Gfp::NOWAIT), &mut list).unwrap().blocks;
        assert!(got >= pages - listed, "{got} of {pages} with {listed} on lists");
        let rest = allocator.alloc_pages_bulk_list(Bulk::up_to(pages), &mut list).unwrap().blocks;
        assert_eq!((got + rest, list.len()), (pages, pages));
        drop(list);
        assert_all_back(&allocator);
    }
}

#[test]
fn drain_cpu_drains_only_that_cpu() {
    let allocator = many_cpus(1 << 15);
    for cpu in 0..CPUS {
        go_to(cpu);
        drop(allocator.alloc_page(Gfp::KERNEL).unwrap());
    }
    let before = allocator.stats();
    let drained = allocator.drain_cpu(CpuId::new(63)).unwrap().get() as u64;
    let after = allocator.stats();
    assert!(drained > 0);
    assert_eq!((after.listed, after.free), (before.listed - drained, before.free + drained));
    assert_eq!(after.drained_pages, before.drained_pages + drained);
    assert_eq!(allocator.drain_cpu(CpuId::new(63)).unwrap().get(), 0);
    let none = Error::Invalid(InvalidRequest::NoSuchCpu { cpu: 64, cpus: 64 });
    assert_eq!(allocator.drain_cpu(CpuId::new(64)).unwrap_err(), none);
    assert_all_back(&allocator);
}

#[test]
fn batches_grow_while_a_cpu_only_allocates_or_only_frees() {
    let allocator = many_cpus(1 << 17);
    go_to(5);
    let mut held = singles(&allocator, 8192);
    let stats = allocator.stats();
    // With the smallest batch it would be 128 trips. The limit starts at 256 pages, so half of that is the largest step.
    assert!((1..=8192 / 128 + 4).contains(&stats.refills), "{} trips to the zone for 8192 pages", stats.refills);
    held.drain(..).for_each(drop);
    let drains = allocator.stats().drains;
    assert!((1..=8192 / 64).contains(&drains), "{drains} trips to the zone with 8192 pages");
    drop(held);
    assert_all_back(&allocator);
}

#[test]
fn drains_of_single_cpus_race_with_allocation() {
    let allocator = many_cpus(1 << 14);
    std::thread::scope(|scope| {
        for seed in 1..=4 {
            let allocator = &allocator;
            scope.spawn(move || {
                own(allocator, seed, 2000, |random| {
                    go_to((random as usize >> 7) % CPUS);
                    if random % 50 == 0 {
                        allocator.drain_cpu(CpuId::new((random >> 20) as u32 % CPUS as u32)).unwrap();
                    }
                })
            });
        }
    });
    assert_all_back(&allocator);
}
