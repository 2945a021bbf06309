//! C2.4 and C10.1: wrong frees are refused, singly and in bulk, with a typed error that says why,
//! and nothing changes. In release builds as in others.

use crate::common::{allocator, allocators, arena, backends, map, one_cpu, status_of_child, stay_here};
use pagemill::{
    Allocator, Block, Gfp, Memory, Misuse, MisuseKind, Order, Page, free_pages_bulk_raw, free_raw, on_misuse,
};
use std::collections::HashSet;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};

fn order(order: u8) -> Order {
    Order::new(order).unwrap()
}

fn page(allocator: &Allocator) -> *mut u8 {
    allocator.alloc_page(Gfp::KERNEL).unwrap().into_raw()
}

fn block(allocator: &Allocator, of: u8) -> *mut u8 {
    allocator.alloc_pages(Gfp::KERNEL, order(of)).unwrap().into_raw().0
}

fn free(ptr: *mut u8, of: u8) -> Result<(), Misuse> {
    // SAFETY: what is freed is a test's own or misused on purpose, and nobody uses it.
    unsafe { free_raw(ptr, order(of)) }
}

fn free_bulk(slots: &mut [*mut u8], of: u8) -> Result<usize, (usize, Misuse)> {
    // SAFETY: as in `free`.
    unsafe { free_pages_bulk_raw(slots, order(of)) }
}

/// Two blocks that are handed out.
fn good(allocator: &Allocator, of: u8) -> [*mut u8; 2] {
    [(); 2].map(|()| if of == 0 { page(allocator) } else { block(allocator, of) })
}

/// Frees `ptr`, alone and in the middle of a bulk call: refused for that reason, and all else is as it was.
fn refused(allocator: &Allocator, what: &str, ptr: *mut u8, of: u8, kind: MisuseKind, says: &str) {
    refused_between(allocator, good(allocator, of), what, ptr, of, kind, says);
}

/// As [`refused`], with the blocks that are fine; taken before, if `ptr` is free and must not be handed out again.
fn refused_between(
    allocator: &Allocator,
    [first, last]: [*mut u8; 2],
    what: &str,
    ptr: *mut u8,
    of: u8,
    kind: MisuseKind,
    says: &str,
) {
    let (census, stats) = (allocator.validate().unwrap(), allocator.stats());
    let misuse = free(ptr, of).unwrap_err();
    assert_eq!(misuse, Misuse { kind, addr: ptr.addr() }, "{what}");
    let text = pagemill::Error::from(misuse).to_string();
    assert!(text.starts_with("misuse: ") && text.contains(&format!("{:#x}", ptr.addr())), "{what}: {text}");
    assert!(text.contains(says), "{what}: {text:?} does not say {says:?}");
    assert_eq!(allocator.validate().unwrap(), census, "{what}");
    let now = allocator.stats();
    let counted = if allocator.arenas()[0].range.contains(&ptr.addr()) {
        now.misused - stats.misused
    } else {
        now.foreign - stats.foreign
    };
    assert_eq!(counted, 1, "{what} was not counted once");
    assert_eq!((now.allocated, now.freed), (stats.allocated, stats.freed), "{what}");

    let mut slots = [first, ptr, null_mut(), last];
    let freed = free_bulk(&mut slots, of);
    assert_eq!(slots, [null_mut(), ptr, null_mut(), null_mut()], "{what}, in bulk");
    match freed {
        Ok(freed) => assert!(freed == 2 && ptr.is_null(), "{what}, in bulk: an empty slot is no misuse"),
        Err((freed, misuse)) => assert_eq!((freed, misuse.kind, misuse.addr), (2, kind, ptr.addr()), "{what}, in bulk"),
    }
    assert_eq!(allocator.validate().unwrap().handed_out, census.handed_out - (2 << of), "{what}, in bulk");
}

#[test]
fn double_free_is_refused_singly_and_in_bulk() {
    for allocator in allocators(8 * 1024) {
        let a = &allocator;
        for of in [0, 1, 3, 6, 7, 8, 9, 10] {
            // On the CPU's list, or in the zone; then all in the zone.
            for is_drained in [false, true] {
                let good = good(a, of);
                let twice = if of == 0 { page(a) } else { block(a, of) };
                assert_eq!(free(twice, of), Ok(()));
                if is_drained {
                    a.drain();
                }
                let what = format!("a block of order {of} that is free, drained: {is_drained}");
                refused_between(a, good, &what, twice, of, MisuseKind::DoubleFree, "is free, or a handle has it");
                // With whatever order.
                for other in [0, 2, 9, 18] {
                    assert_eq!(free(twice, other).unwrap_err().kind, MisuseKind::DoubleFree, "{what}");
                }
            }
        }
        a.drain();
        assert_eq!(a.validate().unwrap().free, 8 * 1024);
    }
}

#[test]
fn double_free_after_give_back_is_refused() {
    for allocator in allocators(1024) {
        let (ptr, large) = (page(&allocator), block(&allocator, 3));
        assert_eq!((free(ptr, 0), free(large, 3)), (Ok(()), Ok(())));
        assert!(allocator.give_back().get() > 0);
        for (gone, of) in [(ptr, 0), (large, 3)] {
            assert_eq!(free(gone, of).unwrap_err().kind, MisuseKind::DoubleFree);
            assert_eq!(free_bulk(&mut [gone], of).unwrap_err().1.kind, MisuseKind::DoubleFree);
        }
        allocator.validate().unwrap();
    }
}

#[test]
fn foreign_addresses_are_refused() {
    own_process!();
    for backend in backends() {
        let allocator = arena(4096).backend(backend).build().unwrap();
        let a = &allocator;
        let kept = page(a);
        let says = "no allocator handed out";
        let range = a.arenas()[0].range.clone();
        let mut local = [0u64; 1024];
        let mut heap = vec![0u8; 3 * 4096];
        let mapped = map(8192, 4096);
        let at = std::ptr::without_provenance_mut::<u8>;
        let aligned = |addr: usize| at(addr.next_multiple_of(4096));
        for (what, ptr) in [
            ("nothing", null_mut()),
            ("the stack", local.as_mut_ptr().cast()),
            ("a page of the stack", aligned(local.as_ptr().addr())),
            ("the heap", heap.as_mut_ptr()),
            ("a page of the heap", aligned(heap.as_ptr().addr())),
            ("another mapping", mapped),
            ("just before the arena", at(range.start - 4096)),
            ("just behind the arena", at(range.end)),
            ("far behind the arena", at(range.end + (1 << 30))),
            ("code", at(foreign_addresses_are_refused as *const () as usize)),
            ("page one", at(4096)),
            ("the last byte", at(usize::MAX)),
            ("the last page", at(usize::MAX & !4095)),
            ("no canonical address", at(1 << 63)),
            ("the first that a program cannot have", at(1 << 47)),
            ("behind 48 bits", at(1 << 48)),
            ("a page that was never handed out", at(range.end - 4096)),
        ] {
            refused(a, what, ptr, 0, MisuseKind::Foreign, says);
        }
        refused(a, "a block that was never handed out", at(range.end - (4 << 12)), 2, MisuseKind::Foreign, says);
        refused(a, "behind the arena", at(range.end), 9, MisuseKind::Foreign, says);
        assert_eq!(free(at(usize::MAX & !4095), 18).unwrap_err().kind, MisuseKind::Foreign);
        for off in [1, 8, 31, 2048, 4095] {
            let inside = kept.wrapping_add(off);
            refused(a, "not a page", inside, 0, MisuseKind::Unaligned, "is not the address of a page");
            assert_eq!(free(inside, 3).unwrap_err().kind, MisuseKind::Unaligned);
        }
        assert_eq!(free(kept, 0), Ok(()));
    }
}

/// Also when a thread's note of the arena that it met last leads to the closed one: the metadata of a closed arena's frames
/// is mapped no more.
#[test]
fn addresses_of_a_closed_allocator_are_foreign() {
    own_process!();
    // On one CPU: another may have met another arena last.
    stay_here();
    for other in allocators(4096) {
        let kept = page(&other);
        for met_last in [false, true] {
            let closed = arena(4096).backend(other.backend()).build().unwrap();
            let (single, large) = (page(&closed), block(&closed, 3));
            assert_eq!((free(single, 0), free(large, 3)), (Ok(()), Ok(())));
            if !met_last {
                // This CPU meets the other one last.
                assert_eq!(free(page(&other), 0), Ok(()));
            }
            closed.close().unwrap();
            let what = format!("a closed allocator's, met last: {met_last}");
            let says = "no allocator handed out";
            for of in [0, 3, 10] {
                refused(&other, &what, single, of, MisuseKind::Foreign, says);
                refused(&other, &what, large, of, MisuseKind::Foreign, says);
            }
        }
        assert_eq!(free(kept, 0), Ok(()));
        assert_eq!(other.validate().unwrap().handed_out, 0);
    }
}

#[test]
fn wrong_orders_and_addresses_inside_a_block_are_refused() {
    for allocator in allocators(32 * 1024) {
        let a = &allocator;
        let wrong = |handed_out, freed| MisuseKind::WrongOrder { handed_out, freed };
        let single = page(a);
        for freed in [1, 2, 9, 18] {
            let says = format!("was handed out with order 0 and freed with {freed}");
            let census = a.validate().unwrap();
            let misuse = free(single, freed).unwrap_err();
            assert_eq!(misuse.kind, wrong(0, freed));
            assert!(misuse.to_string().ends_with(&says), "{misuse}");
            assert_eq!(a.validate().unwrap(), census);
        }
        for of in [1u8, 3, 6, 7, 8, 9, 10, 11] {
            let whole = block(a, of);
            for freed in [0, of - 1, of + 1].into_iter().filter(|&freed| freed != of) {
                let says = format!("order {of} and freed with {freed}");
                refused(a, "another order", whole, freed, wrong(of, freed), &says);
            }
            let pages = 1usize << of;
            for at in [1, pages / 2, pages - 1] {
                let inside = whole.wrapping_add(at * 4096);
                refused(a, "a page inside", inside, 0, MisuseKind::Inside, "is inside a block");
            }
            refused(a, "the upper half", whole.wrapping_add(pages / 2 * 4096), of - 1, MisuseKind::Inside, "inside");
            assert_eq!(free(whole, of), Ok(()));
        }
        assert_eq!(free(single, 0), Ok(()));
    }
}

#[test]
fn a_split_block_is_freed_only_by_its_pages() {
    for allocator in allocators(4 * 1024) {
        let a = &allocator;
        for of in [1u8, 4, 7, 9, 10] {
            let mut pages: Vec<Page> = a.alloc_pages(Gfp::KERNEL, order(of)).unwrap().split().collect();
            let first = pages.remove(0).into_raw();
            let kind = MisuseKind::WrongOrder { handed_out: 0, freed: of };
            refused(a, "a split block", first, of, kind, "was handed out with order 0");
            let second = pages.remove(0).into_raw();
            assert_eq!(free(second, 0), Ok(()));
            assert_eq!(free(first, of).unwrap_err().kind, kind);
            assert_eq!(free(first, 0), Ok(()));
            drop(pages);
            a.drain();
            assert_eq!(free(first, of).unwrap_err().kind, MisuseKind::DoubleFree);
            assert_eq!(a.validate().unwrap().free, 4 * 1024);
        }
    }
}

#[test]
fn from_raw_refuses_pages_that_are_not_raw() {
    for allocator in allocators(4 * 1024) {
        let a = &allocator;
        // SAFETY: misuse on purpose, and what is taken up is taken up once.
        let take_up = |ptr, of: u8| unsafe { Block::from_raw(ptr, order(of)) }.map_err(|misuse| misuse.kind);
        for of in [0u8, 1, 4, 8, 9, 10] {
            let ptr = block(a, of);
            let census = a.validate().unwrap();
            let other = of + 1;
            let wrong = MisuseKind::WrongOrder { handed_out: of, freed: other };
            assert_eq!(take_up(ptr, other).unwrap_err(), wrong);
            if of > 0 {
                assert_eq!(take_up(ptr.wrapping_add(4096), 0).unwrap_err(), MisuseKind::Inside);
            }
            assert_eq!(a.validate().unwrap(), census);
            let mut block = take_up(ptr, of).unwrap();
            block.fill(1);
            // A handle has it: it is neither taken up nor freed as a raw pointer.
            for _ in 0..2 {
                assert_eq!(take_up(ptr, of).unwrap_err(), MisuseKind::DoubleFree);
                assert_eq!(free(ptr, of).unwrap_err().kind, MisuseKind::DoubleFree);
                assert_eq!(free_bulk(&mut [ptr], of).unwrap_err().1.kind, MisuseKind::DoubleFree);
            }
            assert_eq!(a.validate().unwrap(), census);
            let pages: Vec<Page> = block.split().collect();
            assert_eq!(take_up(ptr, of).unwrap_err(), MisuseKind::DoubleFree);
            drop(pages);
            assert_eq!(take_up(ptr, of).unwrap_err(), MisuseKind::DoubleFree);
        }
        assert_eq!(take_up(null_mut(), 0).unwrap_err(), MisuseKind::Foreign);
    }
}

/// At every place of every size, through every way in that takes raw pointers in bulk.
#[test]
fn misuse_in_bulk_is_refused_at_every_position() {
    // Behind the arena another one may lie: none of another test, nor of another backend.
    own_process!();
    for backend in backends() {
        let allocator = arena(1024).backend(backend).build().unwrap();
        let a = &allocator;
        let range = a.arenas()[0].range.clone();
        let large = block(a, 3);
        let owned = a.alloc_page(Gfp::KERNEL).unwrap();
        let never = std::ptr::without_provenance_mut::<u8>(range.end - 4096);
        let strange = |what: usize, free: *mut u8| match what {
            0 => (free, MisuseKind::DoubleFree),
            1 => (std::ptr::with_exposed_provenance_mut(owned.addr()), MisuseKind::DoubleFree),
            2 => (never, MisuseKind::Foreign),
            3 => (large, MisuseKind::WrongOrder { handed_out: 3, freed: 0 }),
            4 => (large.wrapping_add(4096), MisuseKind::Inside),
            _ => (std::ptr::without_provenance_mut(range.end), MisuseKind::Foreign),
        };
        for n in 1..=130 {
            for (what, at) in (0..=6).flat_map(|what| (0..=n).map(move |at| (what, at))) {
                // Few of the places of many pages, and each of them with something.
                if n > 20 && (at * 7 + n + what) % 23 != 0 && at != n {
                    continue;
                }
                let mut slots: Vec<*mut u8> = (0..n).map(|_| page(a)).collect();
                let gone = page(a);
                assert_eq!(free(gone, 0), Ok(()));
                // The last kind is one of its own: the same twice within the call.
                let (ptr, kind) = if what == 6 {
                    (slots[n - 1 - at.min(n - 1)], MisuseKind::DoubleFree)
                } else {
                    strange(what, gone)
                };
                slots.insert(at, ptr);
                let (freed, misuse) = free_bulk(&mut slots, 0).unwrap_err();
                assert_eq!((freed, misuse.kind, misuse.addr), (n, kind, ptr.addr()), "{n} pages, {what} at {at}");
                assert_eq!(slots.iter().filter(|slot| !slot.is_null()).count(), 1);
            }
        }
        drop(owned);
        assert_eq!(free(large, 3), Ok(()));
        a.drain();
        assert_eq!((a.validate().unwrap().free, a.stats().quarantined), (1024, 0));
    }
}

#[test]
fn double_free_in_bulk_is_refused() {
    for allocator in allocators(8 * 1024) {
        let a = &allocator;
        for (n, of) in [(2, 0), (7, 0), (8, 0), (9, 0), (64, 0), (65, 0), (200, 0), (2000, 0), (9, 1), (70, 3), (3, 9)]
        {
            for (twice, at) in [(0, n / 2), (0, n), (n - 1, n), (n / 2, 0)] {
                let mut slots: Vec<*mut u8> = (0..n).map(|_| if of == 0 { page(a) } else { block(a, of) }).collect();
                let double = slots[twice];
                slots.insert(at, double);
                let (freed, misuse) = free_bulk(&mut slots, of).unwrap_err();
                assert_eq!((freed, misuse.addr, misuse.kind), (n, double.addr(), MisuseKind::DoubleFree), "{n} {of}");
                let left: Vec<*mut u8> = slots.iter().copied().filter(|ptr| !ptr.is_null()).collect();
                assert_eq!(left, [double], "the second of the two stays");
                assert_eq!(a.validate().unwrap().handed_out, 0);
            }
        }
        assert_eq!(a.stats().quarantined, 0);
        a.drain();
        assert_eq!(a.validate().unwrap().free, 8 * 1024);
    }
}

#[test]
fn double_free_among_thousands_of_scattered_pages_is_refused() {
    // Close enough to each other to be sorted on their way back, and too far apart.
    const PAGES: usize = 1 << 16;
    for allocator in allocators(PAGES) {
        let all: Vec<*mut u8> = (0..PAGES).map(|_| page(&allocator)).collect();
        let mut scattered: Vec<*mut u8> = (0..PAGES).map(|i| all[i * 40_503 % PAGES]).collect();
        for n in [40_000, 2000, PAGES - 42_000] {
            let rest = scattered.split_off(n);
            let mut slots = core::mem::replace(&mut scattered, rest);
            let double = slots[n / 3];
            slots.insert(n / 2, double);
            slots.insert(n / 4, core::ptr::null_mut());
            let (freed, misuse) = free_bulk(&mut slots, 0).unwrap_err();
            assert_eq!((freed, misuse.addr, misuse.kind), (n, double.addr(), MisuseKind::DoubleFree));
            let is_left = |(at, &ptr): (usize, &*mut u8)| (!ptr.is_null()).then_some((at, ptr));
            let left: Vec<(usize, *mut u8)> = slots.iter().enumerate().filter_map(is_left).collect();
            assert_eq!(left, [(n / 2 + 1, double)], "the second of the two stays where it was");
            assert_eq!(allocator.validate().unwrap().handed_out, scattered.len());
        }
        assert!(scattered.is_empty());
        allocator.drain();
        assert_eq!(allocator.validate().unwrap().free, PAGES);
    }
}

#[test]
fn misuse_calls_the_hook() {
    own_process!();
    static WANTED: AtomicUsize = AtomicUsize::new(0);
    static SEEN: AtomicUsize = AtomicUsize::new(0);
    on_misuse(|misuse| {
        if misuse.addr == WANTED.load(SeqCst) && misuse.kind == MisuseKind::DoubleFree {
            SEEN.fetch_add(1, SeqCst);
        }
    });
    for allocator in allocators(64) {
        let ptr = page(&allocator);
        WANTED.store(ptr.addr(), SeqCst);
        SEEN.store(0, SeqCst);
        assert_eq!(free(ptr, 0), Ok(()));
        // SAFETY: misuse on purpose; nobody has the page.
        let refused = unsafe { (Page::from_raw(ptr).unwrap_err(), Block::from_raw(ptr, order(0)).unwrap_err()) };
        assert_eq!([refused.0, refused.1].map(|misuse| misuse.kind), [MisuseKind::DoubleFree; 2]);
        assert_eq!((SEEN.load(SeqCst), allocator.stats().misused), (2, 2));
    }
}

/// Misuse may be met where nothing may unwind.
#[test]
fn a_hook_that_panics_ends_the_process() {
    own_process!();
    let allocator = allocator(64);
    let status = status_of_child("has a hook that panics", || {
        let limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: reads the limit: no core is dumped.
        unsafe { libc::setrlimit(libc::RLIMIT_CORE, &raw const limit) };
        on_misuse(|_| panic!("a hook may not"));
        let ptr = page(&allocator);
        let _ = std::panic::catch_unwind(|| (free(ptr, 0), free(ptr, 0)));
    });
    assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGABRT, "it ended with {status:#x}");
}

#[test]
fn pages_of_different_mobility_count_as_no_bulk_free() {
    for allocator in allocators(1024) {
        let mut slots = [Gfp::KERNEL, Gfp::KERNEL | Gfp::MOVABLE].map(|gfp| allocator.alloc_page(gfp).ok());
        assert_eq!(pagemill::free_pages_bulk(&mut slots), 2);
        let calls = || allocator.stats().bulk_free.iter().sum::<u64>();
        assert_eq!(calls(), 0);
        let mut slots = [(); 4].map(|()| allocator.alloc_page(Gfp::KERNEL).ok());
        assert_eq!((pagemill::free_pages_bulk(&mut slots), calls()), (4, 1));
    }
}

/// Two threads free one block at the same moment, over and over.
///
/// One of them may be refused at once. If neither is, the frame is on two ways. That is seen when both come back to the zone, or
/// when it is to be handed out while a caller has it as a raw pointer: of those it never has two, and all frames are accounted
/// for. (Two handles of it are seen with full states alone: ADR 5.)
#[test]
fn a_concurrent_double_free_is_detected() {
    const PAGES: usize = 1024;
    for (of, rounds) in [(0u8, 400), (2, 100), (9, 100)] {
        for mut allocator in allocators(PAGES) {
            let backend = allocator.backend();
            let mut seen_later = 0;
            for _ in 0..rounds {
                if allocator.validate().unwrap().quarantined > PAGES / 4 {
                    allocator = arena(PAGES).backend(backend).build().unwrap();
                }
                let before = allocator.stats().misused;
                let went_well = free_at_once(if of == 0 { page(&allocator) } else { block(&allocator, of) }, of);
                assert_ne!(went_well, 0, "both were refused");
                take_all(&allocator);
                let found = allocator.stats().misused - before;
                assert!(found > 0, "order {of} on {backend}: the second free was never seen");
                seen_later += usize::from(went_well == 2);
            }
            println!("order {of} on {backend}: of {rounds} second frees, {seen_later} were seen later than at once");
        }
    }
}

/// How many of two threads that free `ptr` at the same moment are told that it went well.
fn free_at_once(ptr: *mut u8, of: u8) -> usize {
    let (addr, ready) = (ptr.expose_provenance(), AtomicUsize::new(0));
    let run = || {
        ready.fetch_add(1, SeqCst);
        let mut spins = 0;
        while ready.load(Relaxed) < 2 {
            // Where the other one waits for a CPU, this one gives way.
            spins += 1;
            if spins % 1000 == 0 { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
        usize::from(free(std::ptr::with_exposed_provenance_mut(addr), of).is_ok())
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(run);
        run() + other.join().unwrap()
    })
}

/// Takes everything there is as raw pointers, each frame once, and gives it back; then the invariants at rest hold.
fn take_all(allocator: &Allocator) {
    let managed = allocator.managed_pages().get();
    let mut all: Vec<*mut u8> = Vec::with_capacity(managed);
    while let Ok(page) = allocator.alloc_page(Gfp::KERNEL) {
        all.push(page.into_raw());
    }
    let addrs: HashSet<usize> = all.iter().map(|page| page.addr()).collect();
    assert_eq!(addrs.len(), all.len(), "a page is owned twice");
    // One that was put aside meanwhile is refused.
    let (Ok(_) | Err((_, Misuse { kind: MisuseKind::Quarantined, .. }))) = free_bulk(&mut all, 0) else {
        panic!("what was out is not taken back")
    };
    allocator.drain();
    let census = allocator.validate().unwrap();
    assert_eq!((census.handed_out, census.free + census.quarantined), (0, managed));
    assert_eq!(census.quarantined as u64, allocator.stats().quarantined);
}

/// Many pages go past the lists, whatever stands in front of them.
#[test]
fn a_large_free_with_a_foreign_first_slot_bypasses_the_lists() {
    const PAGES: usize = 8192;
    let allocator = one_cpu(Memory::anonymous(PAGES));
    let mut foreign = [0_u8; 8192];
    let at = foreign.as_mut_ptr().wrapping_add(foreign.as_ptr().align_offset(4096));
    let mut slots = vec![std::ptr::null_mut(); PAGES + 1];
    slots[0] = at;
    allocator.alloc_pages_bulk_array_raw(pagemill::Bulk::exact(PAGES), &mut slots[1..]).unwrap();
    let before = allocator.stats().direct_in;
    // SAFETY: the pages are ours; the first address is nobody's, on purpose.
    let (freed, misuse) = unsafe { free_pages_bulk_raw(&mut slots, Order::ZERO) }.unwrap_err();
    assert_eq!((freed, misuse.kind), (PAGES, MisuseKind::Foreign));
    assert_eq!(allocator.stats().direct_in - before, PAGES as u64);
}
