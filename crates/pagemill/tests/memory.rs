//! Kinds of memory, growing and shrinking, and giving memory back: the system's figures count, not those of the
//! allocator believes (C2.2, C10.2).
use crate::common::{
    allocator, arena, assert_all_back, bulk, close_all_back, in_child, is_all, is_stamped, map, mappings, range_of,
    resident_pages, stamp, system_page, take,
};
use pagemill::{
    Allocator, BuildError, Bulk, Error, Faults, Gfp, Memory, NodeId, Order, Page, PageList, ZoneKind, free_pages_bulk,
};
use std::ops::Range;
use std::os::fd::AsRawFd;

const MIB: usize = 1 << 20;

/// What `/proc/self/smaps` says of `name` for each mapping.
fn smaps(name: &str) -> Vec<(Range<usize>, String)> {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut inside, mut said) = (0..0, Vec::new());
    for line in smaps.lines() {
        if let Some((range, _)) = range_of(line) {
            inside = range;
        } else if let Some(value) = line.strip_prefix(name) {
            said.push((inside.clone(), value.trim().to_owned()));
        }
    }
    said
}

/// Resident bytes of the mappings that lie in `range`.
fn resident_bytes(range: &Range<usize>) -> usize {
    let smaps = smaps("Rss:");
    let inside = smaps.iter().filter(|(mapping, _)| mapping.start < range.end && mapping.end > range.start);
    let bytes: Vec<usize> =
        inside.map(|(_, kib)| kib.trim_end_matches(" kB").parse::<usize>().unwrap() * 1024).collect();
    assert!(!bytes.is_empty(), "no mapping in {range:x?}");
    bytes.iter().sum()
}

/// Keeps a mapping from being merged with its neighbours of the same kind, whose memory would be counted with it.
fn keep_apart(range: &Range<usize>) {
    let start = std::ptr::with_exposed_provenance_mut(range.start);
    // SAFETY: says only that a core dump leaves it out, as no other test says of its memory.
    assert_eq!(unsafe { libc::madvise(start, range.len(), libc::MADV_DONTDUMP) }, 0);
}

/// Writes something else into each page.
fn dirty(pages: &mut [Page]) {
    pages.iter_mut().for_each(|page| stamp(page, 0));
}

/// Resident memory falls when it is given back, and reads zero afterwards.
fn gives_back(memory: Memory, huge_pages: bool) {
    const PAGES: usize = 8192;
    let allocator = Allocator::builder().memory(memory).huge_pages(huge_pages).build().unwrap();
    let range = allocator.arenas()[0].range.clone();
    keep_apart(&range);
    let resident = || resident_bytes(&range);
    assert!(resident() <= 4 * MIB, "{} bytes before anything was touched", resident());
    let mut pages = take(&allocator, PAGES);
    dirty(&mut pages);
    assert_eq!(resident(), PAGES * 4096);

    // One page of the first and of the last pageblock stays out: those two go in part, where no page may be larger.
    pages.sort_by_key(Page::addr);
    let kept = [pages.pop().unwrap(), pages.swap_remove(0)];
    drop(pages);
    let stays = if huge_pages || system_page() > 4096 { 2 * 512 } else { 2 };
    assert_eq!(allocator.give_back().get(), PAGES - stays);
    assert_eq!(resident(), stays * 4096);
    assert!(kept.iter().all(|page| is_stamped(page, 0)), "a page that is out was taken");

    // Pages with ZERO come zeroed without being written: reading commits none of them (the system's zero page), or for
    // files one page of it.
    let zeroed = bulk(&allocator, Bulk::up_to(PAGES - 2 * 512).gfp(Gfp::KERNEL | Gfp::ZERO)).0;
    assert!(zeroed.len() == PAGES - 2 * 512 && zeroed.iter().all(|page| is_all(&page[..], 0)));
    drop(zeroed);
    // All of them, so that nothing is left that the system has already.
    dirty(&mut take(&allocator, PAGES - 2));
    drop(kept);
    assert_eq!(allocator.give_back().get(), PAGES);
    assert_eq!(resident(), 0);
    let zeroed = bulk(&allocator, Bulk::up_to(PAGES).gfp(Gfp::KERNEL | Gfp::ZERO)).0;
    assert_eq!((resident(), zeroed.len()), (0, PAGES), "ZERO wrote to pages that are known to be zero");
    drop(zeroed);
    close_all_back(allocator);
}

#[test]
fn resident_memory_falls_when_it_is_given_back() {
    gives_back(Memory::anonymous(8192), false);
    gives_back(Memory::anonymous(8192), true);
    gives_back(Memory::memfd(8192), false);
}

#[test]
fn a_memfd_is_shared_with_a_child_that_maps_it() {
    own_process!();
    let allocator = Allocator::builder().pages(64).build().unwrap();
    let arena = allocator.add_memory(Memory::memfd(512)).unwrap();
    // SAFETY: the child writes to one page, which is not looked at meanwhile.
    let fd = unsafe { allocator.memfd(arena) }.unwrap().as_raw_fd();
    // All of the first arena, so that the rest is the file's.
    let mut pages = take(&allocator, 576);
    let files: Vec<_> = mappings().into_iter().filter(|(_, rest)| rest.contains("memfd:pagemill")).collect();
    let [(file, _)] = &files[..] else { panic!("{files:x?}") };
    pages.retain(|page| file.contains(&page.addr()));
    assert_eq!(pages.len(), 512);
    let offset = pages[77].addr() - file.start;
    pages[77][..6].copy_from_slice(b"parent");
    in_child("maps the file", || {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a mapping of its own, of a file that is large enough.
        let map = unsafe { libc::mmap(std::ptr::null_mut(), 512 * 4096, access, libc::MAP_SHARED, fd, 0) };
        assert_ne!(map, libc::MAP_FAILED);
        // SAFETY: six bytes of that mapping, which nobody else uses meanwhile.
        let bytes = unsafe { std::slice::from_raw_parts_mut(map.cast::<u8>().add(offset), 6) };
        assert_eq!(bytes, b"parent");
        bytes.copy_from_slice(b"child!");
    });
    assert_eq!(&pages[77][..6], b"child!");
    drop(pages);
    assert_all_back(&allocator);
}

#[test]
fn brought_memory_is_aligned_zeroed_on_request_and_stays_mapped() {
    let start = map(4 * MIB, 2 * MIB);
    // SAFETY: inside the mapping; what is there is nobody's yet.
    unsafe { start.write_bytes(0xaa, 4 * MIB) };
    // SAFETY: readable, writable, and used by nobody else until the allocator is closed.
    let memory = |start| unsafe { Memory::brought(start, 1024) };
    let refused = Allocator::builder().memory(memory(start.wrapping_add(4096))).build().unwrap_err();
    let addr = start.addr() + 4096;
    assert_eq!(refused, BuildError::Alignment { addr, align: 2 * MIB });

    let allocator = Allocator::builder().memory(memory(start)).build().unwrap();
    assert_eq!(allocator.arenas()[0].range, start.addr()..start.addr() + 4 * MIB);
    // Its contents are unspecified: with ZERO all of it is zeroed.
    let (mut pages, shortfall) = bulk(&allocator, Bulk::up_to(1024).gfp(Gfp::KERNEL | Gfp::ZERO));
    assert_eq!((pages.len(), shortfall), (1024, None));
    assert!(pages.iter().all(|page| is_all(&page[..], 0)));
    assert!(pages.iter().all(|page| allocator.arenas()[0].range.contains(&page.addr())));
    dirty(&mut pages);
    drop(pages);
    allocator.close().unwrap();
    // SAFETY: still mapped, and ours again.
    assert_ne!(unsafe { start.cast::<u64>().read() }, 0);
}

#[test]
fn memory_brought_again_belongs_to_its_new_allocator_on_every_thread() {
    own_process!();
    let start = map(2 * MIB, 2 * MIB);
    // Singly and as a run, which look for the arena each in their own way.
    let (send, receive) = std::sync::mpsc::channel::<Vec<Page>>();
    let (freed, is_freed) = std::sync::mpsc::channel();
    let other = std::thread::spawn(move || {
        for mut pages in receive {
            drop(pages.pop());
            let mut slots: Vec<_> = pages.into_iter().map(Some).collect();
            assert_eq!(free_pages_bulk(&mut slots), 8);
            freed.send(()).unwrap();
        }
    });
    let mut between = Vec::new();
    for pages in [512, 300, 512] {
        // SAFETY: readable, writable, and used by nobody else until the allocator is closed.
        let allocator = Allocator::builder().memory(unsafe { Memory::brought(start, pages) }).build().unwrap();
        send.send(take(&allocator, 9)).unwrap();
        is_freed.recv().unwrap();
        drop(allocator.alloc_page(Gfp::KERNEL).unwrap());
        assert_eq!(allocator.validate().unwrap().handed_out, 0);
        allocator.close().unwrap();
        // It takes the places that the system and the heap got back, which the next one would take.
        between.push(Allocator::builder().pages(512).build().unwrap());
    }
    drop(send);
    other.join().unwrap();
}

#[test]
fn blocks_of_brought_memory_are_aligned() {
    // Of 14 MiB that begin 2 MiB after a multiple of 16 MiB: blocks of 2, 4 and 8 MiB, each where it may be.
    let start = map(16 * MIB, 16 * MIB).wrapping_add(2 * MIB);
    // SAFETY: memory of the test's own, which stays mapped.
    let memory = unsafe { Memory::brought(start, 14 * MIB / 4096) };
    let allocator = Allocator::builder().memory(memory).build().unwrap();
    let buddies = |order| allocator.buddyinfo().free_blocks(Order::new(order).unwrap());
    assert_eq!([9, 10, 11, 12].map(buddies), [1, 1, 1, 0]);
    let block = |order| allocator.alloc_pages(Gfp::NOWAIT, Order::new(order).unwrap());
    let blocks = [block(11).unwrap(), block(10).unwrap(), block(9).unwrap()];
    for block in &blocks {
        assert!(block.addr().is_multiple_of(block.order().bytes()), "{:#x}, {:?}", block.addr(), block.order());
    }
    assert!(block(0).is_err());
    allocator.validate().unwrap();
    drop(blocks);
    assert!(block(12).is_err());
    allocator.validate().unwrap();
    assert_eq!([9, 10, 11, 12].map(buddies), [1, 1, 1, 0]);
}

/// Huge pages of 2 MiB that are set aside and free.
fn free_huge_pages() -> usize {
    let text = std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
    text.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

#[test]
fn missing_huge_pages_are_reported_and_replaced_by_ordinary_ones() {
    // More than are set aside anywhere, and no more address space than a process has.
    let wanted = free_huge_pages() + 8;
    for memory in [Memory::huge_pages, Memory::memfd_of_huge_pages].map(|kind| move || kind(wanted * 512)) {
        let refused = Allocator::builder().memory(memory()).build().unwrap_err();
        let BuildError::HugePages { wanted: said, free, .. } = refused else { panic!("{refused}") };
        assert_eq!((said, free), (wanted, free_huge_pages()));
        assert!(refused.to_string().contains("/proc/sys/vm/nr_hugepages"), "{refused}");

        let allocator = Allocator::builder().memory(memory().or_ordinary()).build().unwrap();
        assert_eq!(allocator.notes(), [refused]);
        let mut pages = take(&allocator, 600);
        dirty(&mut pages);
        drop(pages);
        assert_all_back(&allocator);
    }
    let plain = Allocator::builder().pages(8).build().unwrap();
    assert!(plain.notes().is_empty());
    let refused = plain.add_memory(Memory::huge_pages(wanted * 512));
    assert!(refused.is_err() && plain.managed_pages().get() == 8);
}

/// In a child, which loses the right to lock memory.
fn locks_nothing() {
    let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: takes rights and limits away from this process, a child that ends soon. The limit first: then the user, and
    // with it what is exempt from limits.
    unsafe {
        assert_eq!(libc::setrlimit(libc::RLIMIT_MEMLOCK, &none), 0);
        assert!(libc::geteuid() != 0 || libc::setresuid(65_534, 65_534, 65_534) == 0);
    }
    let locked = || Memory::anonymous(512).locked();
    let why = Allocator::builder().memory(locked()).build().unwrap_err();
    assert!(matches!(why, BuildError::LockLimit { limit: 0, .. }), "{why}");
    let allocator = Allocator::builder().memory(locked().or_ordinary()).build().unwrap();
    assert_eq!(allocator.notes(), [why]);
    drop(allocator.alloc_page(Gfp::KERNEL).unwrap());
}

#[test]
fn memory_that_may_not_be_locked_is_reported_and_left_unlocked() {
    own_process!();
    in_child("may lock nothing", locks_nothing);
}

#[test]
fn locked_memory_is_resident_from_the_start() {
    own_process!();
    let memory = Memory::anonymous(512).locked();
    match Allocator::builder().memory(memory).build() {
        Ok(allocator) => assert_eq!(resident_pages(&allocator.arenas()[0].range), 512),
        Err(BuildError::LockLimit { limit, .. }) => assert!(limit < 2 * MIB, "{limit} would do"),
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn pages_of_a_retired_arena_are_given_back_once_freed() {
    let allocator = allocator(512);
    let first = allocator.arenas()[0].range.clone();
    let more = allocator.add_memory(Memory::anonymous(512)).unwrap();
    let mut pages = take(&allocator, 1024);
    dirty(&mut pages);
    // All but ten of the new arena's are back when it is retired.
    let (mut old, mut new): (Vec<Page>, Vec<Page>) = pages.into_iter().partition(|page| first.contains(&page.addr()));
    assert_eq!((old.len(), new.len()), (512, 512));
    let place = new.iter().map(Page::addr).min().unwrap();
    let place = place..place + 512 * 4096;
    new.truncate(10);
    assert_eq!(allocator.retire(more).unwrap().get(), 10);
    assert_eq!(allocator.managed_pages().get(), 512);
    assert!(matches!(allocator.alloc_page(Gfp::KERNEL), Err(Error::Exhausted(_))), "a page of a retired arena");
    assert!(new.iter().all(|page| is_stamped(page, 0)));
    drop(new);
    assert!(allocator.alloc_page(Gfp::KERNEL).is_err());
    assert!(resident_pages(&place) > 0);
    assert_eq!(allocator.retire(more).unwrap().get(), 0);
    assert_eq!(resident_pages(&place), 0);
    old.truncate(500);
    assert!(first.contains(&allocator.alloc_page(Gfp::KERNEL).unwrap().addr()));
    drop(old);
    // The last one stays.
    let last = Allocator::builder().pages(8).build().unwrap();
    let second = last.add_memory(Memory::anonymous(8)).unwrap();
    last.retire(second).unwrap();
    allocator.drain();
    let (census, stats) = (allocator.validate().unwrap(), allocator.stats());
    assert_eq!(census.free, census.managed, "the retired arena included");
    assert_eq!((stats.allocated, stats.misused, stats.quarantined), (stats.freed, 0, 0));
    allocator.close().unwrap();
}

#[test]
fn a_request_takes_pages_of_several_arenas() {
    let two = arena(512).memory(Memory::anonymous(512));
    let allocator = two.build().unwrap();
    let mut list = PageList::new();
    allocator.alloc_pages_bulk_list(Bulk::exact(1024), &mut list).unwrap();
    assert_eq!((list.len(), allocator.stats().free), (1024, 0));
    list.clear();
    assert_eq!(allocator.give_back().get(), 1024);
    let order = Order::PAGEBLOCK;
    let both = [(); 2].map(|()| allocator.alloc_pages(Gfp::KERNEL, order).unwrap());
    assert!(allocator.alloc_page(Gfp::KERNEL).is_err());
    drop(both);
    assert_all_back(&allocator);
}

#[test]
fn an_arena_id_belongs_to_one_allocator() {
    let [one, other] = [(); 2].map(|()| allocator(64));
    let arena = one.add_memory(Memory::memfd(64)).unwrap();
    let same_number = other.add_memory(Memory::memfd(128)).unwrap();
    assert_ne!(arena, same_number);
    assert_eq!(other.retire(arena), Err(BuildError::NoSuchArena));
    // SAFETY: nobody writes by it.
    assert!(unsafe { other.memfd(arena).is_none() && one.memfd(arena).is_some() });
    assert_eq!((one.managed_pages().get(), other.managed_pages().get()), (128, 192));
    one.retire(arena).unwrap();
    assert_eq!((one.managed_pages().get(), other.managed_pages().get()), (64, 192));
}

#[test]
fn added_memory_follows_the_setting_for_huge_pages() {
    for huge_pages in [false, true] {
        let first = Memory::anonymous(512);
        let allocator = Allocator::builder().memory(first).huge_pages(huge_pages).build().unwrap();
        allocator.add_memory(Memory::anonymous(1024)).unwrap();
        let pages = take(&allocator, 1536);
        let flags = smaps("VmFlags:");
        for page in pages.iter().step_by(256) {
            let (_, flags) = flags.iter().find(|(mapping, _)| mapping.contains(&page.addr())).unwrap();
            // To be of 2 MiB pages, and not to be.
            let has = ["hg", "nh"].map(|flag| flags.split_whitespace().any(|has| has == flag));
            assert_eq!(has, [huge_pages, !huge_pages], "{flags}");
        }
    }
}

#[test]
fn memory_of_huge_pages_must_be_a_multiple_of_them() {
    for memory in [Memory::huge_pages(3), Memory::memfd_of_huge_pages(513)] {
        let refused = Allocator::builder().memory(memory).build().unwrap_err();
        assert!(matches!(refused, BuildError::HugePageMultiple { .. }), "{refused}");
        assert!(refused.to_string().ends_with("take a multiple of 512"), "{refused}");
    }
}

/// For logs and assertions: a line, however much memory there is.
#[test]
fn debug_output_is_one_short_line() {
    let builder = arena(64).memory(Memory::anonymous(512)).cpus(256, || 3);
    let allocator = builder.faults("after=3,gfp=atomic".parse().unwrap()).build().unwrap();
    let page = allocator.alloc_page(Gfp::KERNEL).unwrap();
    assert_eq!(format!("{allocator:?}"), "Allocator { backend: portable, arenas: 2, pages: 576, out: 1 }");
    let out = allocator.close().unwrap_err();
    assert!(format!("{out:?}").len() < 150, "{out:?}");
    drop(page);

    let faults: Faults = "p=0.25,gfp=atomic".parse().unwrap();
    assert_eq!(format!("{faults:?}"), "Faults { after: 0, p: 0.25, only: Some(ATOMIC), injected: 0 }");
    let node = NodeId::ZERO;
    let builder = Allocator::builder().nodes(vec![node; 256], vec![vec![10]]).memory(Memory::anonymous(64));
    assert!(format!("{builder:?}").len() < 250, "{builder:?}");
    assert_eq!(format!("{:?}", pagemill::Cancel::new()), "Cancel { is_cancelled: false }");

    for (gfp, name) in [
        (Gfp::NOWAIT, "NOWAIT"),
        (Gfp::NOIO | Gfp::MOVABLE, "NOIO | MOVABLE"),
        (Gfp::NOFS | Gfp::THISNODE | Gfp::NORETRY, "NOFS | THISNODE | NORETRY"),
        (Gfp::ATOMIC | Gfp::DMA32 | Gfp::RECLAIMABLE, "ATOMIC | RECLAIMABLE | DMA32"),
        (Gfp::KERNEL | Gfp::ATOMIC, "KERNEL | ATOMIC"),
        (Gfp::KERNEL | Gfp::RETRY_MAYFAIL | Gfp::NOWARN | Gfp::ACCOUNT, "KERNEL | RETRY_MAYFAIL | NOWARN | ACCOUNT"),
        (Gfp::KERNEL | Gfp::NOFAIL | Gfp::ZERO, "KERNEL | ZERO | NOFAIL"),
    ] {
        assert_eq!(format!("{gfp:?}"), name);
    }
}

#[test]
fn arenas_are_listed_in_the_order_of_addition() {
    let low = Memory::anonymous(64).dma32();
    let allocator = Allocator::builder().memory(low).memory(Memory::memfd(100)).build().unwrap();
    let before = allocator.arenas();
    // Requests try this one first.
    let third = allocator.add_memory(Memory::anonymous(512)).unwrap();
    let arenas = allocator.arenas();
    assert_eq!(arenas[..2], before);
    let told = arenas.iter().map(|arena| (arena.pages.get(), arena.kind, arena.node)).collect::<Vec<_>>();
    let normal = |pages| (pages, ZoneKind::Normal, NodeId::ZERO);
    assert_eq!(told, [(64, ZoneKind::Dma32, NodeId::ZERO), normal(100), normal(512)]);
    assert_eq!(arenas[2].id, third);
    for page in take(&allocator, 676) {
        assert_eq!(arenas.iter().filter(|arena| arena.range.contains(&page.addr())).count(), 1);
    }
    // SAFETY: nobody writes by it.
    let fd = unsafe { allocator.memfd(arenas[1].id) }.unwrap();
    // SAFETY: asks for the file's size alone.
    let bytes = unsafe { libc::lseek(fd.as_raw_fd(), 0, libc::SEEK_END) };
    assert_eq!((bytes, arenas[1].range.len()), (100 * 4096, 100 * 4096));
    // It can be retired, as those can that were added later, and goes on being told of.
    allocator.retire(before[1].id).unwrap();
    let is_retired: Vec<bool> = allocator.arenas().iter().map(|arena| arena.is_retired).collect();
    assert_eq!((is_retired, allocator.managed_pages().get()), (vec![false, true, false], 576));
}

#[test]
fn the_default_arena_fits_a_limit_of_the_address_space() {
    own_process!();
    const LIMIT: u64 = 4 << 30;
    let limit = libc::rlimit { rlim_cur: LIMIT, rlim_max: LIMIT };
    // SAFETY: the structure is read.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const limit) }, 0);
    let bytes = Allocator::global().managed_pages().get() as u64 * 4096;
    assert!((1..=LIMIT / 2).contains(&bytes), "{bytes}");
    drop(Allocator::global().alloc_page(pagemill::Gfp::KERNEL).unwrap());
}
