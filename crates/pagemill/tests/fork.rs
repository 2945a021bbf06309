//! C4.4: after a fork the child goes on, while the parent's other threads stopped wherever they were.
//!
//! The children do what a program would: they use whatever form comes first, take everything that is free, prove the
//! invariants, and end. They are made while three threads of the parent do everything at once.

use crate::common::{
    HOUR, Over, Rng, all_without_waiting, allocator, allocators, are_resident, arena, assert_distinct, bulk,
    close_all_back, end_if_it_hangs, fork, in_child, is_all, map_as, mappings, one_cpu, singles, wait_for,
};
use pagemill::{
    Allocator, ArenaId, Block, BuildError, Bulk, Error, Gfp, Memory, Order, Page, PageList, Why, free_pages_bulk,
};
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

/// Forks that a test makes.
const FORKS: usize = 100;
/// 16 MiB: eight pageblocks.
const PAGES: usize = 4096;

/// What a thread of the parent does until it is told to stop.
fn hammer(allocator: &Allocator, seed: u64, stop: &AtomicBool) {
    let mut rng = Rng::new(seed);
    let mut kept: Vec<Page> = Vec::new();
    let mut blocks: Vec<Block> = Vec::new();
    while !stop.load(Relaxed) {
        let choice = rng.next() >> 33;
        let n = (choice >> 8) as usize % 90 + 1;
        match choice % 8 {
            0 => kept.extend(allocator.alloc_page(Gfp::NOWAIT)),
            1 => drop(kept.pop()),
            2 => _ = allocator.alloc_pages_bulk_callback(Bulk::up_to(n), |page: Page| kept.push(page)),
            3 => drop(kept.split_off(kept.len().saturating_sub(n))),
            4 => {
                let mut list = PageList::new();
                let _ = allocator.alloc_pages_bulk_list(Bulk::up_to(8 * n), &mut list);
            }
            5 => {
                let order = Order::new((choice >> 16) as u8 % 11).unwrap();
                blocks.extend(allocator.alloc_pages(Gfp::NOWAIT, order));
            }
            6 => blocks.truncate(3),
            _ => kept.extend(blocks.pop().into_iter().flat_map(|block| block.split().skip(1))),
        }
        if kept.len() > 600 {
            kept.truncate(100);
        }
    }
}

/// What the child inherits: the forking thread's own pages, and those that other threads keep all the time.
struct Before {
    page: Option<Page>,
    slots: Vec<Option<Page>>,
    block: Option<Block>,
    others: HashSet<usize>,
}

impl Before {
    /// Of the forking thread; none if there is no memory just now.
    fn new(allocator: &Allocator, others: &[Page]) -> Option<Self> {
        let mut page = allocator.alloc_page(Gfp::KERNEL).ok()?;
        page[..64].fill(0xaa);
        let block = allocator.alloc_pages(Gfp::KERNEL, Order::new(2).unwrap()).ok()?;
        let mut slots: Vec<Option<Page>> = (0..20).map(|_| None).collect();
        allocator.alloc_pages_bulk_array(Bulk::exact(20), &mut slots).ok()?;
        let others = others.iter().map(Page::addr).collect();
        Some(Self { page: Some(page), slots, block: Some(block), others })
    }

    fn addrs(&self) -> HashSet<usize> {
        let own = self.slots.iter().flatten().chain(&self.page).map(Page::addr);
        let block = self.block.iter().flat_map(|block| (0..block.len()).step_by(4096).map(|at| block.addr() + at));
        own.chain(block).chain(self.others.iter().copied()).collect()
    }
}

/// The child's first step: each way in must find out that there was a fork.
fn begin(allocator: &Allocator, before: &mut Before, first: usize) {
    match first {
        0 => drop(before.page.take()),
        1 => assert_eq!(free_pages_bulk(&mut before.slots), 20),
        2 => drop(allocator.alloc_page(Gfp::NOWAIT)),
        3 => drop(allocator.alloc_pages(Gfp::KERNEL, Order::new(3).unwrap())),
        4 => drop(before.block.take()),
        5 => {
            // A thread of the child's frees while this one allocates.
            let slots = core::mem::take(&mut before.slots);
            std::thread::scope(|scope| {
                scope.spawn(move || drop(slots));
                drop(allocator.alloc_page(Gfp::KERNEL));
            });
        }
        6 => drop(before.block.take().map(|block| block.split().count())),
        _ => {}
    }
}

/// Goes on in the child.
fn go_on(allocator: &Allocator, mut before: Before, first: usize) {
    begin(allocator, &mut before, first);
    allocator.drain();
    let census = allocator.validate().unwrap();
    assert_eq!((census.quarantined, allocator.stats().quarantined), (0, 0), "a frame was on two ways");
    // All that is free can be had, and nothing that is out.
    let mut all = all(allocator);
    assert_eq!(all.len(), census.free);
    let mut owned = before.addrs();
    for page in &mut all {
        assert!(owned.insert(page.addr()), "{page:?} is owned twice");
        page[..64].fill(0xcc);
    }
    assert!(before.page.iter().all(|page| is_all(&page[..64], 0xaa)), "a page was overwritten");
    drop(all);
    assert_eq!(allocator.validate().unwrap().handed_out, census.handed_out);
    assert_eq!(allocator.stats().misused, 0);
    if first == 7 {
        in_child("is a grandchild", || {
            drop(before);
            allocator.drain();
            assert_eq!(allocator.validate().unwrap().handed_out, census.handed_out - 25);
        });
    }
}

#[test]
fn children_forked_while_threads_allocate_go_on() {
    own_process!();
    for allocator in allocators(PAGES) {
        let stop = AtomicBool::new(false);
        // Pages as another thread would keep them.
        let others = singles(&allocator, 50);
        std::thread::scope(|scope| {
            let _over = Over(&stop);
            for seed in 1..=3 {
                let (allocator, stop) = (&allocator, &stop);
                scope.spawn(move || hammer(allocator, seed, stop));
            }
            let mut forked = 0;
            while forked < FORKS {
                let Some(before) = Before::new(&allocator, &others) else { continue };
                let (first, mut before) = (forked % 8, Some(before));
                in_child(&format!("begins with {first}"), || go_on(&allocator, before.take().unwrap(), first));
                forked += 1;
            }
        });
        // Nothing of that was felt in the parent.
        drop(others);
        close_all_back(allocator);
    }
}

/// Everything that there is.
fn all(allocator: &Allocator) -> Vec<Page> {
    bulk(allocator, Bulk::up_to(PAGES)).0
}

/// Goes on in a child, as a callback may; this process ends as well or as badly as that does.
fn fork_and_be_the_child() {
    let pid = fork();
    if pid != 0 {
        let status = wait_for(pid);
        // SAFETY: ends the process.
        unsafe { libc::_exit(i32::from(status != 0)) };
    }
    end_if_it_hangs();
}

/// More than the lists are for, so that there are frames between the zone and the callback.
#[test]
fn a_callback_that_forks_gets_all_its_pages_in_the_child() {
    own_process!();
    for (fork_at, takes) in [(1, 0), (1, 1500), (64, 1500), (65, 1500), (700, 0), (1000, 1500)] {
        in_child(&format!("forks at page {fork_at} and takes {takes}"), || {
            let allocator = one_cpu(Memory::anonymous(PAGES));
            let (mut kept, mut own) = (Vec::<Page>::new(), Vec::<Page>::new());
            let request = Bulk::up_to(1000);
            let delivered = allocator.alloc_pages_bulk_callback(request, |page: Page| {
                kept.push(page);
                if kept.len() == fork_at {
                    fork_and_be_the_child();
                    own.extend(singles(&allocator, takes));
                }
            });
            assert_eq!((delivered.unwrap().blocks, kept.len()), (1000, 1000));
            assert_eq!(assert_distinct(kept.iter().chain(&own)).len(), 1000 + takes);
            drop((kept, own));
            allocator.drain();
            let (census, stats) = (allocator.validate().unwrap(), allocator.stats());
            assert_eq!((stats.misused, stats.quarantined, census.quarantined), (0, 0, 0));
            assert_eq!(all(&allocator).len(), census.free);
        });
    }
}

/// Does everything that would give memory to the system.
fn give_all_back(allocator: &Allocator, shared: &[ArenaId]) {
    allocator.give_back();
    allocator.give_back_idle(Instant::now());
    allocator.give_back_idle(Instant::now() + HOUR);
    shared.iter().for_each(|&arena| assert_eq!(allocator.retire(arena).unwrap().get(), 0));
}

#[test]
fn shared_memory_stays_the_parents_after_a_fork() {
    own_process!();
    // SAFETY: a new mapping, which both processes see; nobody else uses it.
    let brought = unsafe { Memory::brought(map_as(libc::MAP_SHARED, 2 << 20, 2 << 20), 512) };
    let allocator = arena(512).give_back_after(HOUR / 60).build().unwrap();
    let shared = [Memory::memfd(700), brought].map(|memory| allocator.add_memory(memory).unwrap());
    let mut mine = all(&allocator);
    assert_eq!(mine.len(), 512 + 700 + 512);
    mine.iter_mut().for_each(|page| page.fill(b'p'));
    // Every other one stays out.
    let first = allocator.arenas()[0].range.clone();
    let (mut mine, free): (Vec<Page>, Vec<Page>) = mine.into_iter().partition(|page| page.addr() % 8192 == 0);
    drop(free);

    in_child("shares memory", || {
        let mut got = all(&allocator);
        assert!(!got.is_empty() && got.iter().all(|page| first.contains(&page.addr())), "the parent's pages");
        assert_eq!((allocator.managed_pages().get(), allocator.notes().len()), (512, 0));
        got.iter_mut().for_each(|page| page.fill(b'c'));
        // It may use the pages that it inherited, and frees them in its own books alone.
        drop(got);
        mine.clear();
        give_all_back(&allocator, &shared);
        assert!(all(&allocator).iter().all(|page| first.contains(&page.addr())));
        // Memory that it adds is its own, and is not shared with its child.
        let own = allocator.add_memory(Memory::memfd(512)).unwrap();
        let got = all(&allocator);
        assert_eq!(got.len(), 1024);
        drop(got);
        in_child("inherits from a child", || assert_eq!(all(&allocator).len(), 512));
        assert_eq!(allocator.retire(own).unwrap().get(), 0);
        assert_eq!(allocator.validate().unwrap().handed_out, 0);
    });
    assert!(mine.iter().all(|page| is_all(&page[..], b'p')), "the child took memory of its parent's");
    // To the parent it is as if nothing had happened.
    let rest = all(&allocator);
    assert_eq!(rest.len() + mine.len(), 512 + 700 + 512);
    drop((rest, mine));
    give_all_back(&allocator, &shared);
    allocator.drain();
    assert_eq!(allocator.validate().unwrap().handed_out, 0);
    allocator.close().unwrap();
}

#[test]
fn a_child_of_shared_memory_alone_has_no_memory() {
    own_process!();
    let allocator = Allocator::builder().memory(Memory::memfd(600)).build().unwrap();
    let mut page = allocator.alloc_page(Gfp::KERNEL).ok();
    page.as_mut().unwrap().fill(b'p');
    in_child("has none", || {
        for gfp in [Gfp::NOWAIT, Gfp::ATOMIC, Gfp::KERNEL] {
            let Err(Error::Exhausted(exhausted)) = allocator.alloc_page(gfp) else { panic!("{gfp:?} brought a page") };
            assert_eq!(exhausted.why, Why::NotAllowed);
        }
        drop(page.take());
        assert_eq!((allocator.drain().get(), allocator.give_back().get(), allocator.cpus() > 0), (0, 0, true));
        assert_eq!((allocator.managed_pages().get(), allocator.stats().free), (0, 0));
        // It goes on with memory of its own, which it then has to keep.
        let more = allocator.add_memory(Memory::anonymous(64)).unwrap();
        assert_eq!(all(&allocator).len(), 64);
        assert_eq!(allocator.retire(more), Err(BuildError::LastArena));
    });
    assert!(is_all(&page.unwrap()[..], b'p'));
    assert_eq!(all(&allocator).len(), 600);
}

/// Page faults that this process has met, but for those that a disk took part in.
fn faults() -> i64 {
    // SAFETY: zero is a valid value of this structure of numbers, which the call fills.
    unsafe {
        let mut usage: libc::rusage = core::mem::zeroed();
        assert_eq!(libc::getrusage(libc::RUSAGE_SELF, &raw mut usage), 0);
        usage.ru_minflt
    }
}

/// The state of each 4096 frames is a page of metadata: 65,536 pages for the largest of these arenas.
#[test]
fn a_child_scans_only_the_used_part_of_a_large_arena() {
    own_process!();
    // Or one fault would bring 512 of those pages.
    // SAFETY: numbers alone.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) }, 0);
    // 1 TiB, or what the system's overcommit lets through.
    let large = [28, 24].into_iter().find_map(|log2| Allocator::builder().pages(1 << log2).build().ok());
    let Some(large) = large else { return println!("skipped: no address space for an arena of 64 GiB") };
    let mut kept = singles(&large, 700);
    kept.iter_mut().for_each(|page| page[0] = b'p');
    let managed = large.managed_pages().get() as u64;
    in_child("has a large arena", || {
        let before = faults();
        assert!(before < 2000, "{before} page faults before the first step");
        assert_eq!(large.stats().free, managed - 700);
        let mut got = singles(&large, 70_000);
        got.iter_mut().for_each(|page| page[0] = b'c');
        assert!(kept.iter().all(|page| page[0] == b'p'), "a page is owned twice");
        kept.clear();
        drop(got);
        // And once more, with the pages used here.
        in_child("is a grandchild", || {
            assert!(faults() < 3000, "{} page faults before the first step", faults());
            assert_eq!(large.stats().free, managed);
        });
    });
    assert_eq!(large.stats().misused, 0);
}

#[test]
fn a_child_finds_allocated_pages_anywhere_in_a_large_arena() {
    own_process!();
    const GIB: usize = 1 << 18;
    let allocator = allocator(3 * GIB);
    // Blocks in two other places than the pages, with nothing taken in between.
    let mut blocks: Vec<Block> =
        (0..12).map(|_| allocator.alloc_pages(Gfp::KERNEL, Order::new(16).unwrap()).unwrap()).collect();
    let used: Vec<Block> = [10, 7, 0].map(|at| blocks.swap_remove(at)).into();
    let small = blocks.pop().unwrap().split().step_by(513).collect::<Vec<Page>>();
    drop((used, blocks.split_off(2)));
    allocator.drain();
    let out = 2 * (1 << 16) + small.len();
    assert_eq!(allocator.validate().unwrap().handed_out, out);
    let mut owned: HashSet<usize> = small.iter().map(Page::addr).collect();
    owned.extend(blocks.iter().flat_map(|block| (block.addr()..block.addr() + block.len()).step_by(4096)));
    in_child("finds them", || {
        let census = allocator.validate().unwrap();
        assert_eq!((census.free, census.handed_out), (3 * GIB - out, out));
        let all = all_without_waiting(&allocator, Gfp::NOWAIT);
        assert_eq!(all.len(), census.free);
        assert!(all.iter().all(|page| owned.insert(page.addr())), "a page is owned twice");
        drop((all, blocks, small));
        allocator.drain();
        assert_eq!(allocator.validate().unwrap().free, 3 * GIB);
    });
}

#[test]
fn a_child_that_cannot_map_its_notes_goes_on_without_them() {
    own_process!();
    const GIB: usize = 1 << 18;
    let allocator = allocator(2 * GIB);
    let page = allocator.alloc_page(Gfp::KERNEL).unwrap();
    let has_notes = || mappings().iter().any(|(_, rest)| rest.starts_with("rw-s") && rest.contains("/dev/zero"));
    assert!(has_notes());
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the structure is written.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_AS, &raw mut limit) }, 0);
    // SAFETY: the structure is read. The process is this test's own.
    let allow = |bytes| unsafe {
        libc::setrlimit(libc::RLIMIT_AS, &libc::rlimit { rlim_cur: bytes, ..limit });
    };
    allow(0);
    in_child("may map no memory as it begins", || {
        allow(limit.rlim_cur);
        assert!(!has_notes(), "it shares its parent's");
        // In a part of which nothing was used yet.
        let block = allocator.alloc_pages(Gfp::KERNEL, Order::new(16).unwrap()).unwrap();
        in_child("is a grandchild", || {
            let census = allocator.validate().unwrap();
            assert_eq!((census.free, census.handed_out), (2 * GIB - block.len() / 4096 - 1, block.len() / 4096 + 1));
            drop((block, page));
            allocator.drain();
            assert_eq!(allocator.validate().unwrap().free, 2 * GIB);
        });
    });
    allow(limit.rlim_cur);
}

#[test]
fn a_child_zeroes_pages_that_were_fresh_in_its_parent() {
    // Another thread of the parent may have taken such a page while the system copied the process: its state was copied
    // before that, and its bytes after.
    let allocator = Allocator::builder().pages(64).huge_pages(false).build().unwrap();
    let is_written = |page: &Page| are_resident(&(page.addr()..page.addr() + page.len())) == [true];
    assert!(!is_written(&allocator.alloc_page(Gfp::KERNEL | Gfp::ZERO).unwrap()));
    in_child("zeroes pages that were fresh", || {
        let pages = all_without_waiting(&allocator, Gfp::KERNEL | Gfp::ZERO);
        assert_eq!((pages.len(), pages.iter().filter(|page| is_written(page)).count()), (64, 64));
    });
}

/// Recovery depends on this: the child's memory is a copy of one moment. Of the writes of each thread of the parent, to however
/// many pages, it has all up to some point and none after; and if it has a write that depends on a read, it has what was read.
#[test]
fn a_fork_copies_the_memory_of_one_moment() {
    own_process!();
    use std::sync::atomic::AtomicU64;
    const CELLS: usize = 64;
    /// A number, alone on its page of the system.
    #[repr(align(65536))]
    struct Cell(AtomicU64);
    let cells = || (0..CELLS).map(|_| Cell(AtomicU64::new(0))).collect::<Vec<Cell>>();
    let (written, copied, stop) = (cells(), cells(), AtomicBool::new(false));
    let numbers = |cells: &[Cell]| cells.iter().map(|cell| cell.0.load(Relaxed)).collect::<Vec<u64>>();
    std::thread::scope(|scope| {
        let _over = Over(&stop);
        scope.spawn(|| {
            for turn in (1..).take_while(|_| !stop.load(Relaxed)) {
                written.iter().for_each(|cell| cell.0.store(turn, Relaxed));
            }
        });
        scope.spawn(|| {
            while !stop.load(Relaxed) {
                copied.iter().zip(&written).for_each(|(to, from)| to.0.store(from.0.load(Relaxed), Relaxed));
            }
        });
        for _ in 0..FORKS {
            in_child("looks at its memory", || {
                let (seen, copies) = (numbers(&written), numbers(&copied));
                let at = seen.iter().position(|&number| number != seen[0]).unwrap_or(CELLS);
                assert!(seen[at..].iter().all(|&number| number + 1 == seen[0]), "{seen:?}");
                assert!(seen.iter().zip(&copies).all(|(number, copy)| copy <= number), "{seen:?} {copies:?}");
            });
        }
    });
}
