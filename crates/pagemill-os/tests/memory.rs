//! Each kind of memory is committed, given back, shared and refused as documented; checked by the process's own smaps.
use pagemill_os::{Errno, HUGE_PAGE_SIZE, MapError, Mapping, system_page};
use std::fs::read_to_string;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

/// The size of the memory under test. Guards around it keep the system from merging it with other memory.
const LEN: usize = 16 << 20;
const GUARD: usize = HUGE_PAGE_SIZE;

/// The sum of `field` over the areas of `start..start + len` in smaps, in bytes. No area may reach outside of the range.
fn smaps(start: usize, len: usize, field: &str) -> usize {
    let text = read_to_string("/proc/self/smaps").unwrap();
    let (mut sum, mut is_inside, mut parts) = (0, false, 0);
    for line in text.lines() {
        if let Some((from, to)) = line.split(' ').next().and_then(|range| range.split_once('-')) {
            let hex = |text| usize::from_str_radix(text, 16).unwrap();
            let (from, to) = (hex(from), hex(to));
            is_inside = from < start + len && to > start;
            assert!(!is_inside || (from >= start && to <= start + len), "{line} reaches out of {start:#x} + {len:#x}");
            parts += usize::from(is_inside);
        } else if is_inside && let Some(rest) = line.strip_prefix(field).and_then(|rest| rest.strip_prefix(':')) {
            sum += rest.trim().strip_suffix(" kB").unwrap().parse::<usize>().unwrap() << 10;
        }
    }
    assert!(parts > 0, "{start:#x} is not mapped");
    sum
}

/// Private memory with guards around `LEN` bytes at offset `GUARD`.
fn guarded() -> Mapping {
    let map = Mapping::reserve(LEN + 2 * GUARD, GUARD).unwrap();
    for offset in [0, GUARD + LEN] {
        // SAFETY: a part of our own mapping that nothing accesses.
        let rc = unsafe { libc::mprotect(map.as_ptr::<libc::c_void>().byte_add(offset), GUARD, libc::PROT_NONE) };
        assert_eq!(rc, 0);
    }
    map
}

fn fill(map: &Mapping, offset: usize, len: usize, byte: u8) {
    assert!(offset + len <= map.bytes());
    // SAFETY: inside the mapping, which only this test uses.
    unsafe { map.as_ptr::<u8>().add(offset).write_bytes(byte, len) };
}

fn is_all(map: &Mapping, offset: usize, len: usize, byte: u8) -> bool {
    assert!(offset + len <= map.bytes());
    // SAFETY: inside the mapping, which only this test uses, and which nobody writes meanwhile.
    let bytes = unsafe { core::slice::from_raw_parts(map.as_ptr::<u8>().add(offset), len) };
    bytes.iter().all(|&b| b == byte)
}

fn release(map: &Mapping, offset: usize, len: usize) -> Result<(), Errno> {
    // SAFETY: the tests hold no references into their mappings.
    unsafe { map.release(offset, len) }
}

/// Writes `LEN` bytes at `offset`, releases a part and then all of them, and populates them again. `field` of smaps must follow
/// each step.
fn follows_release_and_populate(map: &Mapping, offset: usize, field: &str) {
    let counted = || smaps(map.addr() + offset, LEN, field);
    assert_eq!(counted(), 0, "nothing is committed before it is touched");
    fill(map, offset, LEN, 0xa5);
    assert_eq!(counted(), LEN);
    assert_eq!(map.resident(offset, LEN), Ok(LEN));
    // A piece in the middle goes back, and the rest around it stays.
    let (piece, at) = (LEN / 4, offset + LEN / 2);
    release(map, at, piece).unwrap();
    assert_eq!(counted(), LEN - piece);
    assert_eq!((map.resident(at, piece), map.resident(offset, LEN)), (Ok(0), Ok(LEN - piece)));
    assert!(is_all(map, offset, LEN / 2, 0xa5) && is_all(map, at + piece, LEN / 4, 0xa5));
    assert!(is_all(map, at, piece, 0), "released memory reads zero");
    release(map, offset, LEN).unwrap();
    assert_eq!(counted(), 0);
    match map.populate(offset, LEN) {
        Ok(()) => assert_eq!((counted(), map.resident(offset, LEN)), (LEN, Ok(LEN))),
        Err(errno) => assert_eq!(errno, Errno(libc::EINVAL), "a system before Linux 5.14"),
    }
    assert!(is_all(map, offset, LEN, 0), "populated memory is zero");
}

#[test]
fn released_private_memory_goes_back_to_the_system() {
    follows_release_and_populate(&guarded(), GUARD, "Rss");
}

#[test]
fn released_transparent_huge_pages_go_back_to_the_system() {
    let map = guarded();
    if !map.advise_huge_pages(true) {
        eprintln!("skipped: the system takes no advice about 2 MiB pages");
        return;
    }
    fill(&map, GUARD, 1, 1);
    if smaps(map.addr() + GUARD, LEN, "AnonHugePages") == 0 {
        eprintln!("skipped: the system gave no 2 MiB page where it was advised to");
        return;
    }
    release(&map, GUARD, LEN).unwrap();
    follows_release_and_populate(&map, GUARD, "Rss");
    assert_eq!(smaps(map.addr() + GUARD, LEN, "AnonHugePages"), LEN, "all of it was committed as 2 MiB pages");
}

#[test]
fn released_memfd_pages_go_back_to_the_system() {
    let map = Mapping::memfd(c"holes", LEN, 1 << 30, false).unwrap();
    assert_eq!(map.addr() % (1 << 30), 0);
    follows_release_and_populate(&map, 0, "Rss");
    // The file itself holds memory only where it was written.
    let blocks = |map: &Mapping| {
        // SAFETY: zero is a valid stat, which is written.
        unsafe {
            let mut stat: libc::stat = core::mem::zeroed();
            assert_eq!(libc::fstat(map.fd().unwrap().as_raw_fd(), &raw mut stat), 0);
            stat.st_blocks * 512
        }
    };
    fill(&map, 0, LEN, 1);
    assert_eq!(blocks(&map), LEN as i64);
    release(&map, 0, LEN).unwrap();
    assert_eq!(blocks(&map), 0);
}

#[test]
fn released_locked_memory_goes_back_to_the_system() {
    own_process!();
    let map = guarded();
    match map.lock(GUARD, 8 * 4096) {
        Ok(()) => assert_eq!(smaps(map.addr() + GUARD, LEN, "Locked"), 8 * 4096),
        Err(why @ MapError::LockLimit { .. }) => return eprintln!("skipped: {why}"),
        Err(why) => panic!("{why}"),
    }
    fill(&map, GUARD, 8 * 4096, 3);
    match release(&map, GUARD, 4 * 4096) {
        Ok(()) => assert_eq!(smaps(map.addr() + GUARD, LEN, "Rss"), 4 * 4096),
        Err(errno) => assert_eq!(errno, Errno(libc::EINVAL), "a system before Linux 5.18"),
    }
}

/// C2.5: the system refuses to take locked memory back at the first attempt, and the second one succeeds.
#[test]
fn calls_that_succeed_keep_errno() {
    own_process!();
    const UNTOUCHED: i32 = 12345;
    // SAFETY: errno is this thread's.
    let errno = unsafe { libc::__errno_location() };
    let page = system_page();
    let keeps = |what: &str, call: &mut dyn FnMut() -> bool| {
        // SAFETY: as above.
        unsafe { *errno = UNTOUCHED };
        let is_done = call();
        // SAFETY: as above.
        assert!(!is_done || unsafe { *errno } == UNTOUCHED, "{what}");
        is_done
    };
    let map = Mapping::reserve(4 * page, page).unwrap();
    let memfd = Mapping::memfd(c"errno", 4 * page, page, false).unwrap();
    assert!(keeps("memfd", &mut || Mapping::memfd(c"errno", page, 1 << 21, false).is_ok()));
    assert!(keeps("reserve and unmap", &mut || Mapping::reserve(page, 1 << 21).is_ok()));
    assert!(keeps("release", &mut || release(&map, 0, page).is_ok() && release(&memfd, 0, page).is_ok()));
    keeps("populate", &mut || map.populate(0, page).is_ok());
    if !keeps("lock", &mut || map.lock(0, page).is_ok()) {
        return eprintln!("skipped: this process may lock no memory");
    }
    if !keeps("release of locked memory", &mut || release(&map, 0, page).is_ok()) {
        eprintln!("skipped: the system does not take locked memory back");
    }
}

/// As on a system with pages of 16 KiB, which would round a range and take back the memory beside it.
#[test]
fn ranges_are_whole_pages_on_a_system_with_larger_pages() {
    own_process!();
    const PAGE: usize = 4 * 4096;
    pagemill_os::pretend_system_page(PAGE);
    let (refused, memfd) = (Err(Errno(libc::EINVAL)), Mapping::memfd(c"large pages", 3 * 4096, 4096, false).unwrap());
    for map in [Mapping::reserve(3 * 4096, 4096).unwrap(), Mapping::reserve(PAGE, 1 << 21).unwrap(), memfd] {
        assert_eq!((map.bytes(), map.page_bytes(), map.addr() % PAGE), (PAGE, PAGE, 0));
        if map.populate(4096, 4096).is_ok() {
            assert_eq!((map.resident(0, PAGE), map.resident(4096, 8192)), (Ok(PAGE), Ok(8192)));
        }
        fill(&map, 0, PAGE, 7);
        for (offset, len) in [(0, 4096), (4096, 4096), (0, 3 * 4096), (4096, 3 * 4096)] {
            assert_eq!(release(&map, offset, len), refused, "{len} bytes at {offset}");
        }
        assert!(is_all(&map, 0, PAGE, 7));
        release(&map, 0, PAGE).unwrap();
        assert!(is_all(&map, 0, PAGE, 0));
    }
}

#[test]
fn invalid_ranges_are_refused() {
    let map = Mapping::reserve(1 << 16, 4096).unwrap();
    fill(&map, 0, 1 << 16, 9);
    let refused = Err(Errno(libc::EINVAL));
    let reach = 1 << 16;
    for (offset, len) in
        [(0, reach + 4096), (reach, 4096), (4096, reach), (1, 4096), (0, 1), (usize::MAX, 1), (4096, usize::MAX - 4095)]
    {
        assert_eq!(map.populate(offset, len), refused, "{offset} {len}");
        assert_eq!(release(&map, offset, len), refused, "{offset} {len}");
        assert_eq!(map.resident(offset, len), refused.map(|()| 0), "{offset} {len}");
        assert_eq!(map.lock(offset, len), Err(MapError::System { call: "mlock", errno: Errno(libc::EINVAL) }));
    }
    for offset in [0, 4096, reach] {
        assert_eq!(
            (map.populate(offset, 0), release(&map, offset, 0), map.resident(offset, 0)),
            (Ok(()), Ok(()), Ok(0))
        );
    }
    assert!(is_all(&map, 0, 1 << 16, 9), "no part of it went back");
    let shared = Mapping::memfd(c"empty ranges", 4096, 4096, false).unwrap();
    assert_eq!(release(&shared, 0, 0), Ok(()));
}

#[test]
fn missing_huge_pages_are_refused_with_advice() {
    let number = |path: &str| read_to_string(path).ok().and_then(|text| text.trim().parse::<usize>().ok());
    let folder = "/sys/kernel/mm/hugepages/hugepages-2048kB";
    let Some(set_aside) = number(&format!("{folder}/nr_hugepages")) else {
        eprintln!("skipped: the system has no hugetlb pages of 2 MiB");
        return;
    };
    let surplus = number(&format!("{folder}/nr_overcommit_hugepages")).unwrap();
    let wanted = set_aside + surplus + 1;
    for refused in [
        Mapping::huge(wanted * HUGE_PAGE_SIZE, 1 << 30).unwrap_err(),
        Mapping::memfd(c"huge", wanted * HUGE_PAGE_SIZE, 4096, true).unwrap_err(),
    ] {
        let MapError::HugePages { wanted: said, free, reserved } = refused else { panic!("{refused}") };
        assert_eq!((said, reserved), (wanted, set_aside));
        assert!(free <= set_aside);
        let text = refused.to_string();
        assert!(text.contains(&format!("wanted {wanted} huge pages")) && text.contains("vm/nr_hugepages"), "{text}");
    }
}

#[test]
fn hugetlb_pages_commit_and_go_back() {
    let wanted = 4 * HUGE_PAGE_SIZE;
    for is_shared in [false, true] {
        let made = if is_shared {
            Mapping::memfd(c"huge", wanted - 1, 1 << 30, true)
        } else {
            Mapping::huge(wanted - 1, 1 << 30)
        };
        let map = match made {
            Ok(map) => map,
            Err(why @ MapError::HugePages { .. }) => return eprintln!("skipped: {why}"),
            Err(why) => panic!("{why}"),
        };
        assert_eq!((map.bytes(), map.addr() % (1 << 30), map.page_bytes()), (wanted, 0, HUGE_PAGE_SIZE));
        assert_eq!((map.is_shared(), map.fd().is_some()), (is_shared, is_shared));
        let field = if is_shared { "Shared_Hugetlb" } else { "Private_Hugetlb" };
        let counted = || smaps(map.addr(), wanted, "Private_Hugetlb") + smaps(map.addr(), wanted, "Shared_Hugetlb");
        fill(&map, 0, wanted, 5);
        assert_eq!(counted(), wanted, "{field}");
        assert_eq!(release(&map, 4096, HUGE_PAGE_SIZE), Err(Errno(libc::EINVAL)), "not a whole huge page");
        release(&map, HUGE_PAGE_SIZE, 2 * HUGE_PAGE_SIZE).unwrap();
        assert_eq!((counted(), map.resident(0, wanted)), (wanted / 2, Ok(wanted / 2)));
        map.populate(0, wanted).unwrap();
        assert_eq!((counted(), map.resident(0, wanted)), (wanted, Ok(wanted)));
        assert!(is_all(&map, 0, HUGE_PAGE_SIZE, 5) && is_all(&map, HUGE_PAGE_SIZE, 2 * HUGE_PAGE_SIZE, 0));
    }
}

/// Runs `work` in a child process, which prints its error.
fn in_child(work: impl FnOnce() -> Result<(), String>) {
    // SAFETY: the child runs `work` on its only thread, and ends without the parent's clean-up.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "fork: {}", std::io::Error::last_os_error());
    if child == 0 {
        let code = match std::panic::catch_unwind(core::panic::AssertUnwindSafe(work)) {
            Ok(Ok(())) => 0,
            Ok(Err(why)) => {
                let line = format!("the child: {why}\n");
                // SAFETY: the string has that length.
                unsafe { libc::write(2, line.as_ptr().cast(), line.len()) };
                1
            }
            Err(_) => 2,
        };
        // SAFETY: ends the child.
        unsafe { libc::_exit(code) };
    }
    let mut status = 0;
    // SAFETY: our own child; the status is written.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child failed (256: said why, 512: panicked)");
}

fn expect(is_so: bool, what: impl FnOnce() -> String) -> Result<(), String> {
    if is_so { Ok(()) } else { Err(what()) }
}

#[test]
fn another_process_maps_the_same_memory() {
    own_process!();
    let page = system_page();
    let map = Mapping::memfd(c"shared", LEN, 4096, false).unwrap();
    let private = Mapping::reserve(4096, 4096).unwrap();
    let fd = map.fd().unwrap().as_raw_fd();
    fill(&map, 0, LEN, 0x11);
    fill(&private, 0, 4096, 0x11);
    in_child(|| {
        // SAFETY: a new mapping of the inherited descriptor, anywhere.
        let start = unsafe {
            libc::mmap(core::ptr::null_mut(), LEN, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, fd, 0)
        };
        expect(start != libc::MAP_FAILED && start.addr() != map.addr(), || format!("mapped at {start:?}"))?;
        // SAFETY: mapped just now with that length, and only this process's tests use it.
        let theirs = unsafe { Mapping::adopt(start.cast(), LEN) }.map_err(|errno| format!("adopting: {errno:?}"))?;
        expect(theirs.is_shared(), || "a memfd that was adopted is shared".into())?;
        expect(is_all(&theirs, 0, LEN, 0x11), || "the child reads something else".into())?;
        fill(&theirs, LEN / 2, 4096, 0x22);
        fill(&private, 0, 4096, 0x22);
        // SAFETY: no reference into it.
        unsafe { map.release(0, page) }.map_err(|errno| format!("release: {errno:?}"))
    });
    assert!(is_all(&map, LEN / 2, 4096, 0x22), "the parent sees what the child wrote");
    assert!(is_all(&map, 0, page, 0), "memory that the child gave back reads zero");
    assert!(is_all(&map, page, LEN / 2 - page, 0x11));
    assert!(is_all(&private, 0, 4096, 0x11), "private memory is the parent's own");
}

#[test]
fn the_size_of_a_memfd_is_sealed() {
    let map = Mapping::memfd(c"sealed", LEN, 4096, false).unwrap();
    for size in [0, LEN as i64 - 1, LEN as i64 + 4096] {
        // SAFETY: numbers alone.
        let rc = unsafe { libc::ftruncate(map.fd().unwrap().as_raw_fd(), size) };
        assert_eq!((rc, std::io::Error::last_os_error().raw_os_error()), (-1, Some(libc::EPERM)));
    }
}

/// Drops this thread's capability to exceed RLIMIT_MEMLOCK.
fn without_ipc_lock() -> bool {
    /// `linux/capability.h`.
    const VERSION_3: u32 = 0x2008_0522;
    const IPC_LOCK: u32 = 14;
    let header = [VERSION_3, 0];
    // Effective, permitted and inheritable, of capabilities 0 to 31 and 32 to 63.
    let mut sets = [0_u32; 6];
    // SAFETY: both arrays have the layout and size that version 3 asks for.
    unsafe {
        if libc::syscall(libc::SYS_capget, header.as_ptr(), sets.as_mut_ptr()) != 0 {
            return false;
        }
        sets[0] &= !(1 << IPC_LOCK);
        libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr()) == 0
    }
}

#[test]
fn locking_above_the_limit_reports_the_limit() {
    own_process!();
    let mut now = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the structure is written.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut now) }, 0);
    for limit in [0, 1 << 16] {
        if limit > now.rlim_max {
            eprintln!("skipped: RLIMIT_MEMLOCK is {} at most here, so it was not tried at {limit}", now.rlim_max);
            continue;
        }
        in_child(|| {
            expect(without_ipc_lock(), || "the capability stays".into())?;
            let bounds = libc::rlimit { rlim_cur: limit, rlim_max: limit };
            // SAFETY: the structure is read.
            let rc = unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const bounds) };
            expect(rc == 0, || "setrlimit".into())?;
            let map = Mapping::reserve(1 << 20, 4096).map_err(|errno| format!("{errno:?}"))?;
            let limit = limit as usize;
            if limit > 0 {
                map.lock(0, 4096).map_err(|why| format!("below the limit: {why}"))?;
            }
            let locked = if limit > 0 { system_page() } else { 0 };
            // Within the limit, but for the memory that is locked already.
            let wanted = limit.max(4096);
            let found = map.lock(1 << 16, wanted);
            expect(found == Err(MapError::LockLimit { wanted, locked, limit }), || format!("{found:?}"))?;
            let text = found.unwrap_err().to_string();
            expect(text.contains(&format!("RLIMIT_MEMLOCK is {limit};")), || text)
        });
    }
}

#[test]
fn adopted_memory_stays_the_callers() {
    let own = guarded();
    let start = own.as_ptr::<u8>().wrapping_add(GUARD);
    fill(&own, GUARD, LEN, 6);
    // SAFETY: `own` outlives it, and is not accessed while it lives.
    let map = unsafe { Mapping::adopt(start, LEN) }.unwrap();
    assert!(!map.is_shared() && map.fd().is_none());
    assert_eq!((map.addr(), map.bytes(), map.page_bytes()), (start.addr(), LEN, system_page()));
    assert_eq!(release(&map, 0, LEN), Err(Errno(libc::EOPNOTSUPP)));
    assert_eq!(map.resident(0, LEN), Ok(LEN));
    drop(map);
    assert!(is_all(&own, GUARD, LEN, 6), "neither unmapped nor emptied");
    // SAFETY: each is refused.
    unsafe {
        let einval = |found: Result<Mapping, Errno>| assert_eq!(found.unwrap_err(), Errno(libc::EINVAL));
        einval(Mapping::adopt(start.wrapping_add(8), 4096));
        einval(Mapping::adopt(start, 100));
        einval(Mapping::adopt(start, 0));
        einval(Mapping::adopt(core::ptr::null_mut(), 4096));
        einval(Mapping::adopt(core::ptr::without_provenance_mut(usize::MAX - 4095), 8192));
        let efault = |found: Result<Mapping, Errno>| assert_eq!(found.unwrap_err(), Errno(libc::EFAULT));
        efault(Mapping::adopt(own.as_ptr(), LEN + GUARD));
        efault(Mapping::adopt(start, LEN + 4096));
        efault(Mapping::adopt(core::ptr::without_provenance_mut(1 << 46), 4096));
    }
}

#[test]
fn a_dropped_mapping_is_unmapped() {
    let is_named = |name: &str| read_to_string("/proc/self/maps").unwrap().contains(name);
    let map = Mapping::memfd(c"gone-with-its-owner", LEN, 1 << 30, false).unwrap();
    assert!(is_named("gone-with-its-owner"));
    drop(map);
    assert!(!is_named("gone-with-its-owner"));
}

#[test]
fn a_child_sees_its_parents_writes_until_it_parts() {
    let map = Mapping::shared(5000).unwrap();
    // SAFETY: ours, of that size and zero; it is used by atomics alone.
    let [word, last] = [0, 4996].map(|at| unsafe { AtomicU32::from_ptr(map.as_ptr::<u8>().add(at).cast()) });
    last.store(7, SeqCst);
    // SAFETY: the child does what needs no lock, and ends.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        // SAFETY: numbers alone.
        unsafe { libc::alarm(600) };
        while word.load(SeqCst) == 0 {
            std::thread::yield_now();
        }
        // SAFETY: this process has one thread.
        let is_parted = unsafe { map.part_from_parent() }.is_ok();
        let is_same = (word.load(SeqCst), last.load(SeqCst)) == (1, 7);
        word.store(2, SeqCst);
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(!is_parted || !is_same)) }
    }
    word.store(1, SeqCst);
    let mut status = 0;
    // SAFETY: our child, and a place for its status.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!((status, word.load(SeqCst)), (0, 1));
}

#[test]
fn a_child_without_memory_for_its_copy_loses_the_shared_memory() {
    let map = Mapping::shared(5000).unwrap();
    let (start, len) = (map.as_ptr::<libc::c_void>(), map.bytes());
    // SAFETY: ours and zero; it is used by atomics alone.
    let word = unsafe { AtomicU32::from_ptr(start.cast()) };
    word.store(7, SeqCst);
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the structure is written.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_AS, &raw mut limit) }, 0);
    // SAFETY: the child does what needs no lock, and ends.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let mut residency = [0; 2];
        // SAFETY: room for the answers for two pages, more than there are.
        let mut is_mapped = || unsafe { libc::mincore(start, len, residency.as_mut_ptr()) } == 0;
        let no_more = libc::rlimit { rlim_cur: 0, ..limit };
        // SAFETY: this process has one thread, and does not touch the memory any more. The limit is its own.
        let is_refused = unsafe {
            libc::setrlimit(libc::RLIMIT_AS, &raw const no_more) == 0
                && map.part_from_parent() == Err(Errno(libc::ENOMEM))
                && libc::setrlimit(libc::RLIMIT_AS, &raw const limit) == 0
                && map.part_from_parent() == Err(Errno(libc::EFAULT))
        };
        let is_gone = !is_mapped();
        // Memory that is mapped there later stays.
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        // SAFETY: a new mapping that replaces none.
        let other = unsafe { libc::mmap(start, len, libc::PROT_READ, flags, -1, 0) };
        drop(map);
        let is_kept = other == start && is_mapped();
        let failed = u8::from(!is_refused) | u8::from(!is_gone) << 1 | u8::from(!is_kept) << 2;
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(failed)) }
    }
    let mut status = 0;
    // SAFETY: our child, and a place for its status.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!((libc::WEXITSTATUS(status), status, word.load(SeqCst)), (0, 0, 7));
}
