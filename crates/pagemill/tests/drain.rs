//! C4.3 and C4.4: lists are drained by others while their owners go on; threads come, move and go; CPUs are many. No
//! frame is lost, none has two owners.

use crate::common::{Over, PATIENCE, assert_all_back, backends};
use pagemill::{Allocator, Bulk, CpuId, Error, Gfp, InvalidRequest, Page, PageList, free_pages_bulk};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Instant;

/// Runs `test` with an allocator of each backend that works here.
fn with_each(pages: usize, test: impl Fn(&Allocator)) {
    for backend in backends() {
        test(&Allocator::builder().pages(pages).backend(backend).build().unwrap());
    }
}

/// A thread that allocates and frees, and marks what it has, so that a second owner would be seen.
fn own(allocator: &Allocator, seed: u64, turns: usize, mut before: impl FnMut(u64)) -> u64 {
    let mut random = seed;
    let mut held: Vec<Page> = Vec::new();
    let mut pages = 0;
    let mark = |page: &mut Page| {
        let mark = (page.addr() as u64) ^ seed << 48;
        page[..8].copy_from_slice(&mark.to_ne_bytes());
        page[4088..].copy_from_slice(&mark.to_ne_bytes());
    };
    let check = |page: &Page| {
        let mark = ((page.addr() as u64) ^ seed << 48).to_ne_bytes();
        assert!(page[..8] == mark && page[4088..] == mark, "{page:?} is owned twice");
    };
    for _ in 0..turns {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        before(random);
        let n = (random >> 40) as usize % 150;
        match random >> 62 {
            0 => held.extend(allocator.alloc_page(Gfp::KERNEL)),
            1 => {
                allocator.alloc_pages_bulk_callback(Bulk::up_to(n), |page: Page| held.push(page)).unwrap();
            }
            2 => drop(held.pop()),
            _ => {
                let mut slots: Vec<Option<Page>> =
                    held.drain(held.len().saturating_sub(n)..).inspect(check).map(Some).collect();
                assert_eq!(free_pages_bulk(&mut slots), slots.len());
            }
        }
        pages += held.len() as u64;
        held.iter_mut().for_each(mark);
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
    with_each(4096, |allocator| {
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
    });
}

#[test]
fn threads_that_exit_or_change_cpu_lose_no_page() {
    with_each(4096, |allocator| {
        for round in 0..40 {
            std::thread::scope(|scope| {
                for seed in 1..=3 {
                    // Every now and then to another CPU, in the middle of everything.
                    scope.spawn(move || own(allocator, seed + round, 60, |random| move_to(random as usize % 2)));
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
    });
}

/// Moves this thread to that CPU, if there is one.
fn move_to(cpu: usize) {
    // SAFETY: zero is a valid, empty set; the call reads it, and leaves things as they are if there is no such CPU.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set);
    }
}

// ── 64 CPUs that are not there ─────────────────────────────────────────────────────────────────────────────────────

const CPUS: usize = 64;

thread_local! {
    static CPU: Cell<usize> = const { Cell::new(0) };
}

fn on(cpu: usize) {
    CPU.set(cpu % CPUS);
}

fn many_cpus(pages: usize) -> Allocator {
    Allocator::builder().pages(pages).cpus(CPUS, || CPU.get()).build().unwrap()
}

#[test]
fn lists_hold_at_most_an_eighth_of_a_small_zone() {
    for pages in [512, 4096, 1 << 16] {
        let allocator = many_cpus(pages);
        // Swing on every CPU, so that limits grow as far as they go.
        for cpu in 0..CPUS {
            on(cpu);
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
        // Who may not drain still gets all the rest; who may gets everything.
        on(0);
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
        on(cpu);
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
    on(5);
    let mut held: Vec<Page> = (0..8192).map(|_| allocator.alloc_page(Gfp::KERNEL).unwrap()).collect();
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
                    on(random as usize >> 7);
                    if random % 50 == 0 {
                        allocator.drain_cpu(CpuId::new((random >> 20) as u32 % CPUS as u32)).unwrap();
                    }
                })
            });
        }
    });
    assert_all_back(&allocator);
}
