//! How allocators and arenas end: with the last page, on whatever thread, and without a trace.
use crate::common::{
    Over, all, allocator, allocators, arena, backends, in_child, is_all, is_mapped, map, one_cpu, singles, until,
};
use pagemill::{
    Allocator, Backend, Block, BuildError, Bulk, Gfp, Memory, MisuseKind, Order, Page, PageList, free_pages_bulk,
    free_raw,
};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{channel, sync_channel};

const MIB: usize = 1 << 20;

/// 3,000 times a piece of frame numbers are 6 GiB of address space. PAGEMILL_CYCLES has as many as one has time for.
fn cycles() -> usize {
    std::env::var("PAGEMILL_CYCLES").map_or(3_000, |cycles| cycles.parse().unwrap())
}

/// For one CPU, so that the system is asked for little.
fn small() -> Allocator {
    one_cpu(Memory::anonymous(512))
}

/// The bytes of address space and of memory that this process has.
fn size_and_resident() -> [usize; 2] {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let mut pages = statm.split_whitespace().map(|pages| pages.parse::<usize>().unwrap());
    [(); 2].map(|()| pages.next().unwrap() * 4096)
}

/// Runs `cycle` often. A leak of 350 bytes a cycle would be seen.
fn is_flat(what: &str, mut cycle: impl FnMut()) {
    (0..200).for_each(|_| cycle()); // Tables that are made once, and the heap.
    let (before, cycles) = (size_and_resident(), cycles());
    (0..cycles).for_each(|_| cycle());
    let after = size_and_resident();
    for (what, before, after) in [("address space", before[0], after[0]), ("memory", before[1], after[1])]
        .map(|(kind, before, after)| (format!("{what}: bytes of {kind}"), before, after))
    {
        assert!(after <= before + MIB, "{what}: {before} before, {after} after {cycles} cycles");
    }
}

/// One after the other: address space and memory are those of the process.
#[test]
fn allocators_and_arenas_that_end_leak_no_memory() {
    own_process!();
    is_flat("the handle first, then its page", || {
        let allocator = small();
        let page = allocator.alloc_page(Gfp::KERNEL).unwrap();
        drop(allocator);
        drop(page);
    });
    is_flat("an allocator", || drop(small()));
    let allocator = small();
    is_flat("an arena added and retired", || {
        let arena = allocator.add_memory(Memory::anonymous(512)).unwrap();
        assert_eq!(allocator.retire(arena).unwrap().get(), 0);
    });
    assert_eq!(allocator.arenas().len(), 2);
}

#[test]
fn each_arena_is_unmapped_with_its_last_page() {
    own_process!();
    for backend in backends() {
        let builder = Allocator::builder().memory(Memory::anonymous(512)).memory(Memory::anonymous(1024));
        let allocator = builder.memory(Memory::memfd(300)).backend(backend).build().unwrap();
        let ranges = allocator.arenas().into_iter().map(|arena| arena.range).collect::<Vec<_>>();
        let mut pages = all(&allocator, Gfp::NOWAIT);
        assert_eq!(pages.len(), 512 + 1024 + 300);
        let clone = allocator.clone();
        drop(allocator);
        let mut first = pages.extract_if(.., |page| ranges[0].contains(&page.addr())).collect::<Vec<_>>();
        drop(clone);
        let there = || [0, 1, 2].map(|at: usize| is_mapped(&ranges[at]));
        let last = first.pop();
        drop(first);
        assert_eq!(there(), [true; 3], "{backend}");
        drop(last);
        assert_eq!(there(), [false, true, true], "{backend}");
        let mut slots: Vec<Option<Page>> = pages.drain(..).map(Some).collect();
        assert_eq!(free_pages_bulk(&mut slots), 1324);
        assert_eq!(there(), [false; 3], "{backend}");
    }
}

#[test]
fn an_arena_is_unmapped_with_its_last_block_in_any_form() {
    own_process!();
    let big = Order::new(10).unwrap();
    type Keep = fn(&Allocator) -> Box<dyn FnOnce()>;
    fn kept<T: 'static>(what: T) -> Box<dyn FnOnce()> {
        Box::new(move || drop(what))
    }
    let ways: [(&str, Keep); 6] = [
        ("a page", |allocator| kept(allocator.alloc_page(Gfp::KERNEL).unwrap())),
        ("a movable page", |allocator| kept(allocator.alloc_page(Gfp::KERNEL | Gfp::MOVABLE).unwrap())),
        ("a block", |allocator| kept(allocator.alloc_pages(Gfp::KERNEL, Order::new(3).unwrap()).unwrap())),
        ("a list", |allocator| {
            let mut list = PageList::new();
            allocator.alloc_pages_bulk_list(Bulk::exact(50), &mut list).unwrap();
            kept(list)
        }),
        ("a large list", |allocator| {
            let mut list = PageList::new();
            allocator.alloc_pages_bulk_list(Bulk::exact(2000), &mut list).unwrap();
            kept(list)
        }),
        ("the pages of a block", |allocator| {
            kept(allocator.alloc_pages(Gfp::KERNEL, Order::new(2).unwrap()).unwrap().split().collect::<Vec<_>>())
        }),
    ];
    for (what, keep) in ways {
        for allocator in allocators(4096) {
            let (backend, range) = (allocator.backend(), allocator.arenas()[0].range.clone());
            let block: Block = allocator.alloc_pages(Gfp::KERNEL, big).unwrap();
            let free = keep(&allocator);
            drop(allocator);
            drop(block);
            assert!(is_mapped(&range), "{what}, {backend}: the arena went before its last pages");
            free();
            assert!(!is_mapped(&range), "{what}, {backend}: the arena stays");
        }
    }
}

/// The last page comes back on one thread while the last handle is dropped on another.
#[test]
fn the_last_page_and_the_last_handle_may_be_dropped_at_once() {
    own_process!();
    const ROUNDS: usize = 1000;
    for backend in backends() {
        let [first, second] = [(); 2].map(|()| sync_channel::<Vec<Page>>(1));
        let (begin, (done, is_done)) = (Barrier::new(3), sync_channel(2));
        std::thread::scope(|scope| {
            // They end when their channels are closed.
            let [first, second] = [first, second].map(|(send, receive)| {
                let (begin, done) = (&begin, done.clone());
                scope.spawn(move || {
                    for pages in receive {
                        begin.wait();
                        drop(pages);
                        done.send(()).unwrap();
                    }
                });
                send
            });
            for round in 0..ROUNDS {
                let allocator = arena(512).backend(backend).build().unwrap();
                let range = allocator.arenas()[0].range.clone();
                let some = |n: usize| singles(&allocator, n);
                // Few enough for a list, or more than one takes.
                let pages: [Vec<Page>; 2] = [[1, 2, 70][round % 3], 1].map(some);
                [&first, &second].into_iter().zip(pages).for_each(|(send, pages)| send.send(pages).unwrap());
                begin.wait();
                drop(allocator);
                (0..2).for_each(|_| is_done.recv().unwrap());
                assert!(!is_mapped(&range), "{backend}, round {round}: the arena at {range:x?} stays");
            }
        });
    }
}

/// A signal handler may free (C2.5), so also the last page.
#[test]
fn a_signal_handler_frees_the_last_page() {
    own_process!();
    static LAST: AtomicPtr<u8> = AtomicPtr::new(std::ptr::null_mut());
    static FREED: AtomicUsize = AtomicUsize::new(0);
    extern "C" fn handler(_signal: i32) {
        // SAFETY: errno is this thread's.
        let errno = unsafe { libc::__errno_location() };
        // SAFETY: as above.
        let before = unsafe { errno.read() };
        let last = LAST.swap(std::ptr::null_mut(), SeqCst);
        // SAFETY: the page was given up to the handler.
        let is_freed = last.is_null() || unsafe { free_raw(last, Order::ZERO) }.is_ok();
        // SAFETY: as above.
        let is_errno_kept = unsafe { errno.read() } == before;
        FREED.fetch_add(usize::from(is_freed && is_errno_kept && !last.is_null()), SeqCst);
    }
    // SAFETY: the handler does what this test is about, and atomics.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as extern "C" fn(i32) as usize;
        assert_eq!(libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut()), 0);
    }
    for allocator in allocators(512) {
        let (backend, range) = (allocator.backend(), allocator.arenas()[0].range.clone());
        LAST.store(allocator.alloc_page(Gfp::KERNEL).unwrap().into_raw(), SeqCst);
        drop(allocator);
        assert!(is_mapped(&range));
        let before = FREED.load(SeqCst);
        // SAFETY: to this thread, which has a handler for it.
        assert_eq!(unsafe { libc::raise(libc::SIGUSR1) }, 0);
        assert_eq!(FREED.load(SeqCst), before + 1, "{backend}");
        assert!(!is_mapped(&range), "{backend}");
    }
    // Into a thread that builds and drops allocators, and so holds the registry most of the time.
    const ROUNDS: usize = 200;
    let mut before = 0;
    let is_over = AtomicBool::new(false);
    let builder_thread = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let _over = Over(&is_over);
        scope.spawn(|| {
            // SAFETY: always allowed.
            builder_thread.store(unsafe { libc::pthread_self() } as usize, SeqCst);
            while !is_over.load(SeqCst) {
                drop(small());
            }
        });
        until("the thread", || builder_thread.load(SeqCst) != 0);
        for round in 0..ROUNDS {
            if round == 20 {
                before = size_and_resident()[0];
            }
            let allocator = small();
            LAST.store(allocator.alloc_page(Gfp::KERNEL).unwrap().into_raw(), SeqCst);
            drop(allocator);
            let freed = FREED.load(SeqCst);
            // SAFETY: a thread that runs until `is_over`.
            assert_eq!(unsafe { libc::pthread_kill(builder_thread.load(SeqCst) as libc::pthread_t, libc::SIGUSR1) }, 0);
            until("the handler", || FREED.load(SeqCst) > freed);
        }
    });
    // None of those stays mapped; each would be 2 MiB.
    let after = size_and_resident()[0];
    assert!(after < before + ROUNDS / 2 * MIB, "{before} bytes of address space before, {after} after");
}

#[test]
fn a_forked_child_unmaps_its_arena_and_the_parents_stays_mapped() {
    own_process!();
    let allocator = allocator(512);
    let range = allocator.arenas()[0].range.clone();
    let mut pages = singles(&allocator, 100);
    pages.iter_mut().for_each(|page| page.fill(b'p'));
    pages.truncate(60);
    drop(allocator);
    in_child("ends its own", || {
        pages.truncate(1);
        assert!(is_mapped(&range) && pages[0][7] == b'p');
        pages.clear();
        assert!(!is_mapped(&range));
        drop(small());
    });
    assert!(pages.len() == 60 && pages.iter().all(|page| is_all(&page[..], b'p')));
    pages.truncate(1);
    assert!(is_mapped(&range));
    pages.clear();
    assert!(!is_mapped(&range));
}

/// A thread remembers the arena that it met last, which may stand for other memory when it frees next.
#[test]
fn an_address_of_an_unmapped_arena_is_foreign() {
    own_process!();
    for _ in 0..100 {
        let allocator = small();
        let page = allocator.alloc_page(Gfp::KERNEL).unwrap().into_raw();
        // SAFETY: the page is ours.
        unsafe { free_raw(page, Order::ZERO) }.unwrap();
        drop(allocator);
        // Larger, so that it lies elsewhere, and one may be where the old one was.
        let other = one_cpu(Memory::anonymous(1024));
        // SAFETY: misuse, on purpose: nobody has that page.
        let refused = unsafe { free_raw(page, Order::ZERO) }.unwrap_err();
        assert_eq!(refused.kind, MisuseKind::Foreign);
        assert_eq!(other.validate().unwrap().free, 1024);
    }
}

#[test]
fn memory_that_overlaps_an_arena_is_refused() {
    let start = map(8 * MIB, 2 * MIB);
    // SAFETY: each time a part of the mapping; what overlaps is refused, which is what this test is about.
    let memory = |at: usize, len: usize| unsafe { Memory::brought(start.wrapping_add(at * MIB), len * MIB / 4096) };
    let one = Allocator::builder().memory(memory(2, 4)).build().unwrap();
    let page = one.alloc_page(Gfp::KERNEL).unwrap();
    for (at, len) in [(2, 4), (0, 8), (0, 3), (4, 4), (4, 1)] {
        let refused = Allocator::builder().memory(memory(at, len)).build().unwrap_err();
        let range = |at: usize, len: usize| (start.addr() + at * MIB, start.addr() + (at + len) * MIB);
        let ((start, end), (other_start, other_end)) = (range(at, len), range(2, 4));
        assert_eq!(refused, BuildError::Overlap { start, end, other_start, other_end });
        assert!(refused.to_string().contains(&format!("an arena lies at {other_start:#x} to {other_end:#x}")));
        assert_eq!(one.add_memory(memory(at, len)).unwrap_err(), refused);
    }
    // Memory beside it is accepted, and the arena is as it was.
    let beside = Allocator::builder().memory(memory(0, 2)).memory(memory(6, 2)).build().unwrap();
    drop(page);
    assert_eq!((one.validate().unwrap().handed_out, beside.managed_pages().get()), (0, 1024));
    one.close().unwrap();
    Allocator::builder().memory(memory(2, 4)).build().unwrap().close().unwrap();
}

#[test]
fn an_arena_inside_another_allocators_block_is_refused() {
    let allocator = allocator(1024);
    let mut block = allocator.alloc_pages(Gfp::KERNEL, Order::PAGEBLOCK).unwrap();
    // SAFETY: the block is ours, and outlives the allocator, if one is made.
    let memory = unsafe { Memory::brought(block.as_mut_ptr(), 512) };
    let refused = Allocator::builder().memory(memory).build();
    assert!(matches!(refused, Err(BuildError::Overlap { .. })));
    block.free().unwrap();
    allocator.close().unwrap();
}

#[test]
fn zero_zeroes_pages_that_were_written_through_the_file() {
    use std::{fs::File, os::unix::fs::FileExt};
    let allocator = Allocator::builder().memory(Memory::memfd(64)).build().unwrap();
    let arena = allocator.arenas()[0].id;
    // SAFETY: no page is out when the file is written to.
    let file = File::from(unsafe { allocator.memfd(arena) }.unwrap().try_clone_to_owned().unwrap());
    // As another process may, before anybody had a page.
    file.write_all_at(&[7; 64 * 4096], 0).unwrap();
    let pages = all(&allocator, Gfp::KERNEL | Gfp::ZERO);
    assert!(pages.len() == 64 && pages.iter().all(|page| is_all(&page[..], 0)), "a page that is not zero");
}

#[test]
fn memory_added_again_gets_a_new_arena_id() {
    let allocator = arena(64).backend(Backend::Portable).build().unwrap();
    let first = allocator.add_memory(Memory::anonymous(512)).unwrap();
    let range = allocator.arenas()[1].range.clone();
    let mut pages = all(&allocator, Gfp::NOWAIT);
    pages.iter_mut().for_each(|page| page.fill(7));
    pages.retain(|page| range.contains(&page.addr()));
    assert_eq!(allocator.retire(first).unwrap().get(), 512);
    // Some of it is out: other memory is had.
    let second = allocator.add_memory(Memory::anonymous(512)).unwrap();
    assert_eq!((allocator.arenas().len(), allocator.managed_pages().get()), (3, 576));
    pages.clear();
    // Memory of another description is not the retired arena.
    allocator.add_memory(Memory::anonymous(512).dma32()).unwrap();
    assert_eq!(allocator.arenas().len(), 4);
    let again = allocator.add_memory(Memory::anonymous(512)).unwrap();
    assert_eq!((allocator.arenas().len(), allocator.arenas()[1].range.clone()), (4, range));
    assert!(again != first && again != second);
    assert_eq!(allocator.retire(first), Err(BuildError::NoSuchArena));
    let pages = all(&allocator, Gfp::NOWAIT | Gfp::ZERO);
    assert!(pages.len() >= 64 + 1024 && pages.iter().all(|page| is_all(&page[..], 0)));
}

/// A thread remembers the arena that it met last. When that has ended, another one has its frame numbers.
#[test]
fn a_list_belongs_to_the_arena_that_has_its_frame_numbers_now() {
    own_process!();
    // Elsewhere than the others, whose memory may come to lie where one lay before.
    // SAFETY: the mapping is nobody else's.
    let memory = unsafe { Memory::brought(map(2 * MIB, 2 * MIB), 512) };
    let first = Allocator::builder().memory(memory).cpus(1, || 0).build().unwrap();
    let second = small();
    let ((gives, is_given), (sends, receives)) = (channel(), channel::<PageList>());
    let popped = std::thread::scope(|scope| {
        let thread = scope.spawn(move || {
            drop(first.alloc_page(Gfp::KERNEL).unwrap());
            gives.send(first).unwrap();
            let mut list = receives.recv().unwrap();
            let addr = list.pop().unwrap().addr();
            drop(list);
            addr
        });
        drop(is_given.recv().unwrap());
        // Descriptions of arenas are reused, the last one first; frame numbers from the lowest on.
        drop(second);
        let third = small();
        let mut list = PageList::new();
        third.alloc_pages_bulk_list(Bulk::exact(8), &mut list).unwrap();
        sends.send(list).unwrap();
        let addr = thread.join().unwrap();
        third.arenas().iter().any(|arena| arena.range.contains(&addr))
    });
    assert!(popped);
}
