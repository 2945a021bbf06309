//! The page cache: readahead, write-back, eviction, lending (C8). `page_cache_contents.rs` compares its bytes with a file's.
use crate::common::{Asked, FakeBacking, Fault, Kept, Over, arena, close_all_back, in_child, until};
use pagemill::{
    Advice, Allocator, Backing, CachedFile, FileBacking, Gfp, LentSender, Page, PageCache, PageCount, ReadTransfer,
    WriteTransfer, page_caches,
};
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Barrier, Mutex};

const PAGE: usize = 4096;

/// Bytes that say which page they are of.
fn bytes(pages: usize) -> Vec<u8> {
    (0..pages * PAGE).map(|i| (i / PAGE) as u8 ^ i as u8).collect()
}

/// A cache of so many pages, whose allocator has more.
fn cache(limit: usize) -> (Allocator, PageCache) {
    let allocator = arena(limit + 512).build().unwrap();
    let cache = PageCache::builder(&allocator).limit(PageCount::new(limit)).threads(1).build();
    (allocator, cache)
}

/// A file of so many pages, in a cache of which nothing is read ahead.
fn file(cache: &PageCache, pages: usize) -> (Arc<FakeBacking>, CachedFile) {
    let backing = FakeBacking::new(bytes(pages));
    let file = cache.open(backing.clone()).unwrap();
    file.advise(Advice::Random, 0..0);
    (backing, file)
}

fn end(allocator: Allocator, cache: PageCache) {
    until("the last page", || cache.stats().pages == 0);
    drop(cache);
    close_all_back(allocator);
}

fn page_at(file: &CachedFile, page: usize) -> io::Result<Vec<u8>> {
    let mut read = vec![0xee; PAGE];
    file.read_exact_at(&mut read, (page * PAGE) as u64).map(|()| read)
}

fn reads(backing: &FakeBacking) -> Vec<(usize, usize)> {
    let pages = |asked: &Asked| match *asked {
        Asked::Read { at, bytes, .. } => Some((at as usize / PAGE, bytes / PAGE)),
        _ => None,
    };
    backing.take_asked().iter().filter_map(pages).collect()
}

fn writes(backing: &FakeBacking) -> Vec<(usize, usize)> {
    let pages = |asked: &Asked| match *asked {
        Asked::Write { at, bytes, .. } => Some((at as usize / PAGE, bytes)),
        _ => None,
    };
    backing.take_asked().iter().filter_map(pages).collect()
}

#[test]
fn concurrent_readers_of_a_page_read_it_once() {
    let (allocator, cache) = cache(64);
    let (backing, file) = file(&cache, 8);
    backing.close();
    std::thread::scope(|scope| {
        for _ in 0..64 {
            let (file, wanted) = (file.reopen(), bytes(8)[3 * PAGE..4 * PAGE].to_vec());
            file.advise(Advice::Random, 0..0);
            scope.spawn(move || assert!(page_at(&file, 3).unwrap() == wanted));
        }
        backing.until_waiting(1);
        backing.open();
    });
    assert_eq!(reads(&backing), [(3, 1)]);
    assert_eq!((cache.stats().reads, cache.stats().read, cache.stats().hits + cache.stats().misses), (1, 1, 64));
    file.close().unwrap();
    end(allocator, cache);
}

#[test]
fn a_read_that_fails_leaves_nothing_and_is_tried_again() {
    let (allocator, cache) = cache(64);
    let (backing, file) = file(&cache, 8);
    for fault in [Fault::Error(ErrorKind::TimedOut), Fault::Panic, Fault::Lie(1)] {
        backing.fail([fault]);
        let error = page_at(&file, 3).unwrap_err();
        assert_eq!(error.kind() == ErrorKind::TimedOut, matches!(fault, Fault::Error(_)), "{error}");
        assert_eq!(cache.stats().pages, 0);
    }
    assert!(page_at(&file, 3).unwrap() == bytes(8)[3 * PAGE..4 * PAGE]);
    file.close().unwrap();
    end(allocator, cache);
}

#[test]
fn short_answers_go_on() {
    let (allocator, cache) = cache(64);
    let (backing, file) = file(&cache, 8);
    backing.fail([Fault::Short(100), Fault::Short(1), Fault::Error(ErrorKind::Interrupted)]);
    assert!(page_at(&file, 3).unwrap() == bytes(8)[3 * PAGE..4 * PAGE]);
    file.write_at(&[7; 2 * PAGE], 0).unwrap();
    backing.fail([Fault::Short(PAGE + 1), Fault::Error(ErrorKind::Interrupted)]);
    file.sync().unwrap();
    assert!(backing.bytes()[..2 * PAGE] == [7; 2 * PAGE]);
    file.close().unwrap();
    end(allocator, cache);
}

#[test]
fn all_who_wait_for_a_read_hear_that_it_failed() {
    let (allocator, cache) = cache(64);
    let (backing, file) = file(&cache, 8);
    backing.close();
    backing.fail([Fault::Error(ErrorKind::TimedOut)]);
    let failed = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            let (file, failed) = (file.reopen(), &failed);
            file.advise(Advice::Random, 0..0);
            scope.spawn(move || failed.fetch_add(usize::from(page_at(&file, 3).is_err()), SeqCst));
        }
        backing.until_waiting(1);
        backing.open();
    });
    // Those that came later read the page again, and none of them failed.
    assert!(failed.load(SeqCst) >= 1);
    assert!(page_at(&file, 3).unwrap() == bytes(8)[3 * PAGE..4 * PAGE]);
    file.close().unwrap();
    end(allocator, cache);
}

/// A disk with a page that cannot be read.
struct BadPage(Arc<FakeBacking>, u64);

impl Backing for BadPage {
    fn len(&self) -> io::Result<u64> {
        self.0.len()
    }
    fn read_vectored_at(&self, into: &mut [IoSliceMut<'_>], at: u64) -> io::Result<usize> {
        let end = at + into.iter().map(|slice| slice.len() as u64).sum::<u64>();
        match (at..end).contains(&(self.1 * PAGE as u64)) {
            true => Err(io::Error::from_raw_os_error(libc::EIO)),
            false => self.0.read_vectored_at(into, at),
        }
    }
    fn write_vectored_at(&self, from: &[IoSlice<'_>], at: u64) -> io::Result<usize> {
        self.0.write_vectored_at(from, at)
    }
    fn sync(&self) -> io::Result<()> {
        self.0.sync()
    }
    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }
}

#[test]
fn a_bad_page_spoils_no_other_of_its_window() {
    let (allocator, cache) = cache(256);
    let file = cache.open(BadPage(FakeBacking::new(bytes(100)), 50)).unwrap();
    for page in 0..100 {
        match page_at(&file, page) {
            Ok(read) => assert!(read == bytes(100)[page * PAGE..][..PAGE], "page {page}"),
            Err(error) => assert_eq!((page, error.raw_os_error()), (50, Some(libc::EIO))),
        }
    }
    // A request that has the page in it delivers what comes before, and then the error.
    let mut read = vec![0; 8 * PAGE];
    assert_eq!(file.read_at(&mut read, 45 * PAGE as u64).unwrap(), 5 * PAGE);
    assert!(file.read_at(&mut read, 50 * PAGE as u64).is_err());
    file.close().unwrap();
    end(allocator, cache);
}

/// Pages 10, 11 and 30 are there, and the first 64 are wanted: runs 0 to 9, 12 to 29, 31 to 63.
fn read_a_window_with_holes(allocator: &Allocator) -> (u64, Vec<Asked>) {
    let cache = PageCache::builder(allocator).threads(1).build();
    let (backing, file) = file(&cache, 200);
    for page in [10, 11, 30] {
        page_at(&file, page).unwrap();
    }
    backing.take_asked();
    let calls = || allocator.stats().bulk_alloc.iter().sum::<u64>();
    let before = calls();
    file.advise(Advice::WillNeed, 0..64 * PAGE as u64);
    let bulk = calls() - before;
    let mut read = vec![0; 64 * PAGE];
    assert_eq!(file.read_at(&mut read, 0).unwrap(), 64 * PAGE);
    assert!(read == bytes(200)[..64 * PAGE]);
    file.close().unwrap();
    until("the last page", || cache.stats().pages == 0);
    (bulk, backing.take_asked())
}

#[test]
fn the_holes_of_a_window_are_one_request_and_one_read_a_run() {
    let allocator = arena(512).build().unwrap();
    let read = |at: usize, pages: usize, slices| Asked::Read { at: (at * PAGE) as u64, bytes: pages * PAGE, slices };
    // A zone with a run of so many pages: one request for the run.
    let (bulk, asked) = read_a_window_with_holes(&allocator);
    assert_eq!((bulk, asked), (0, vec![read(0, 10, 1), read(12, 18, 1), read(31, 33, 1)]));
    // Without one: a bulk request, for pages that are no neighbours.
    // Requests that may wait: they find pages on another CPU's list too.
    let mut taken: Vec<_> = (0..512).map(|_| Some(allocator.alloc_page(Gfp::KERNEL).unwrap())).collect();
    for page in &mut taken {
        let is_even = page.as_ref().is_some_and(|page| (page.addr() / PAGE).is_multiple_of(2));
        if is_even {
            *page = None;
        }
    }
    let (bulk, asked) = read_a_window_with_holes(&allocator);
    assert_eq!((bulk, asked), (1, vec![read(0, 10, 10), read(12, 18, 18), read(31, 33, 33)]));
    drop(taken);
    close_all_back(allocator);
}

#[test]
fn random_reads_fetch_nothing_that_was_not_asked_for() {
    let allocator = arena(4608).build().unwrap();
    // A line for each decision, should one be wrong.
    let cache = PageCache::builder(&allocator).trace(|decision| println!("{decision}")).build();
    let file = cache.open(FakeBacking::new(bytes(4096))).unwrap();
    let mut page = 1;
    for _ in 0..2000 {
        page = (page + 1597) % 4093; // each once, and many beside one that is cached
        page_at(&file, page).unwrap();
    }
    let stats = cache.stats();
    assert_eq!((stats.read, stats.read_ahead, stats.misses), (2000, 0, 2000));
    file.close().unwrap();
    end(allocator, cache);
}

#[test]
fn a_reader_in_sequence_waits_for_few_reads() {
    let (allocator, cache) = cache(4096);
    let backing = FakeBacking::new(bytes(2048));
    let file = cache.open(backing.clone()).unwrap();
    for page in 0..2048 {
        assert!(page_at(&file, page).unwrap()[0] == page as u8);
    }
    let stats = cache.stats();
    assert_eq!(stats.read, 2048);
    assert!(stats.reads <= 16, "{} reads", stats.reads);
    assert!(stats.windows_marked >= stats.windows - 1, "{} of {} windows", stats.windows_marked, stats.windows);
    file.close().unwrap();
    end(allocator, cache);
}

#[test]
fn too_little_memory_shortens_the_window_and_readers_go_on() {
    // The allocator has fewer pages than the cache may have, and others take most of them.
    let allocator = arena(128).build().unwrap();
    let cache = PageCache::builder(&allocator).limit(PageCount::new(128)).threads(1).build();
    let file = cache.open(FakeBacking::new(bytes(1000))).unwrap();
    let others: Vec<Page> = (0..108).map(|_| allocator.alloc_page(Gfp::KERNEL).unwrap()).collect();
    for page in 0..1000 {
        assert!(page_at(&file, page).unwrap() == bytes(1000)[page * PAGE..][..PAGE], "page {page}");
    }
    let stats = cache.stats();
    assert!(stats.windows_shortened > 0 && stats.evicted > 800, "{stats:?}");
    drop(others);
    file.close().unwrap();
    end(allocator, cache);
}

#[test]
fn reclaim_takes_clean_pages_and_writes_dirty_ones_unless_it_must_not() {
    let allocator = arena(64).build().unwrap();
    let limit = PageCount::new(64);
    let cache = PageCache::builder(&allocator).limit(limit).dirty_limit(limit).threads(1).build();
    let (backing, file) = file(&cache, 64);
    file.write_at(&bytes(64), 0).unwrap();
    assert_eq!(cache.stats().dirty, 64);
    backing.take_asked();
    for gfp in [Gfp::NOFS, Gfp::NOIO, Gfp::NOWAIT] {
        assert!(allocator.alloc_page(gfp).is_err());
        assert_eq!(writes(&backing), []);
    }
    let page = allocator.alloc_page(Gfp::KERNEL).unwrap();
    assert_eq!(writes(&backing).iter().map(|&(_, bytes)| bytes / PAGE).sum::<usize>(), 64);
    // They are clean now, so a request that does no I/O gets them.
    let others: Vec<Page> = (0..8).map(|_| allocator.alloc_page(Gfp::NOIO).unwrap()).collect();
    drop((page, others));
    file.close().unwrap();
    end(allocator, cache);
}

/// A backing that needs pages for each write, as one does that encrypts.
struct Hungry(Arc<FakeBacking>, Allocator, Gfp);

impl Backing for Hungry {
    fn len(&self) -> io::Result<u64> {
        self.0.len()
    }
    fn read_vectored_at(&self, into: &mut [IoSliceMut<'_>], at: u64) -> io::Result<usize> {
        self.0.read_vectored_at(into, at)
    }
    fn write_vectored_at(&self, from: &[IoSlice<'_>], at: u64) -> io::Result<usize> {
        let _page = self.1.alloc_page(self.2).map_err(|error| io::Error::new(ErrorKind::OutOfMemory, error))?;
        self.0.write_vectored_at(from, at)
    }
    fn sync(&self) -> io::Result<()> {
        self.0.sync()
    }
    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }
}

#[test]
fn a_backing_that_needs_memory_to_write_does_not_wait_for_its_own_writes() {
    for gfp in [Gfp::NOIO, Gfp::KERNEL] {
        let allocator = arena(64).build().unwrap();
        let cache = PageCache::builder(&allocator).limit(PageCount::new(48)).dirty_limit(PageCount::new(48)).build();
        let backing = FakeBacking::new(bytes(200));
        let file = cache.open(Hungry(backing.clone(), allocator.clone(), gfp)).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let file = file.reopen();
                scope.spawn(move || {
                    for page in (thread..200).step_by(4) {
                        // A page of the reader's own may be what the writes lack.
                        while file.write_at(&[thread as u8; PAGE], (page * PAGE) as u64).is_err() {}
                    }
                });
            }
        });
        while file.sync().is_err() {}
        assert!(backing.bytes().chunks(PAGE).enumerate().all(|(page, bytes)| bytes == [(page % 4) as u8; PAGE]));
        file.close().unwrap();
        end(allocator, cache);
    }
}

#[test]
fn an_error_of_write_back_reaches_each_openers_sync_once() {
    let (allocator, cache) = cache(64);
    let (backing, file) = file(&cache, 8);
    let second = file.reopen();
    file.write_at(&[1; PAGE], 0).unwrap();
    backing.fail([Fault::Error(ErrorKind::TimedOut)]);
    assert_eq!(cache.write_back(PageCount::new(64)), PageCount::new(1));
    assert_eq!(cache.stats().dirty, 1, "the page stays dirty");
    // Nobody was told: it is news for one that comes now.
    let third = file.reopen();
    for opener in [&file, &second, &third] {
        assert_eq!(opener.sync().unwrap_err().kind(), ErrorKind::TimedOut);
        opener.sync().unwrap();
    }
    file.reopen().sync().unwrap();
    assert_eq!(backing.bytes()[..PAGE], [1; PAGE]);
    // An error that closing finds is told by it.
    second.write_at(&[2; PAGE], 0).unwrap();
    drop((file, third));
    backing.fail([Fault::Error(ErrorKind::TimedOut), Fault::Error(ErrorKind::TimedOut)]);
    assert!(second.close().is_err());
    end(allocator, cache);
}

#[test]
fn dirty_pages_are_written_in_runs_and_only_to_the_files_end() {
    let (allocator, cache) = cache(64);
    let (backing, file) = file(&cache, 0);
    file.write_at(&bytes(5)[..5 * PAGE - 100], 0).unwrap();
    file.write_at(&[9; 10], 20 * PAGE as u64).unwrap();
    file.sync().unwrap();
    assert_eq!(writes(&backing), [(0, 5 * PAGE), (20, 10)]);
    assert_eq!(backing.bytes().len(), 20 * PAGE + 10);
    // What lies between was never written: zeros, and no read.
    assert_eq!(page_at(&file, 12).unwrap(), [0; PAGE]);
    file.close().unwrap();
    end(allocator, cache);
}

#[test]
fn a_writer_that_is_faster_than_the_backing_waits() {
    let allocator = arena(600).build().unwrap();
    let cache = PageCache::builder(&allocator).limit(PageCount::new(256)).dirty_limit(PageCount::new(32)).build();
    let (_, file) = file(&cache, 0);
    for page in 0..500 {
        file.write_at(&[page as u8; PAGE], (page * PAGE) as u64).unwrap();
        assert!(cache.stats().dirty <= 33, "{} dirty", cache.stats().dirty);
    }
    file.close().unwrap();
    end(allocator, cache);
}

#[test]
fn lent_pages_keep_their_bytes_through_writes_cuts_eviction_and_the_files_end() {
    let (allocator, cache) = cache(64);
    let (backing, file) = file(&cache, 8);
    let lent = file.lend(PAGE as u64 + 10, 2 * PAGE).unwrap();
    let wanted = bytes(8)[PAGE + 10..3 * PAGE + 10].to_vec();
    assert_eq!((lent.len(), lent.slices().len()), (2 * PAGE, 3));
    file.write_at(&[7; 4 * PAGE], 0).unwrap();
    assert_eq!(cache.stats().copied, 3);
    file.sync().unwrap();
    cache.evict(PageCount::new(64));
    assert_eq!(cache.stats().pages, 3, "the lent ones");
    assert_eq!(page_at(&file, 1).unwrap(), [7; PAGE]);
    file.set_len(PAGE as u64 + 5).unwrap();
    assert_eq!(backing.bytes().len(), PAGE + 5);
    file.close().unwrap();
    assert!(lent.slices().concat() == wanted);
    drop(lent);
    end(allocator, cache);
}

#[test]
fn a_cut_makes_zeros_of_the_last_pages_end() {
    let (allocator, cache) = cache(64);
    for is_lent in [false, true] {
        let (_, file) = file(&cache, 2);
        let lent = file.lend(0, if is_lent { 2 * PAGE } else { 0 }).unwrap();
        page_at(&file, 0).unwrap();
        file.set_len(100).unwrap();
        file.set_len(2 * PAGE as u64).unwrap();
        let read = page_at(&file, 0).unwrap();
        assert!(read[..100] == bytes(1)[..100] && read[100..] == [0; PAGE - 100]);
        assert_eq!(page_at(&file, 1).unwrap(), [0; PAGE]);
        assert!(!is_lent || lent.slices().concat() == bytes(2));
        drop(lent);
        file.close().unwrap();
    }
    end(allocator, cache);
}

#[test]
fn a_cut_while_pages_are_read_shows_no_old_bytes() {
    let (allocator, cache) = cache(64);
    let (backing, file) = file(&cache, 8);
    backing.close();
    std::thread::scope(|scope| {
        let reader = file.reopen();
        let reader = scope.spawn(move || {
            let mut read = vec![0xee; 4 * PAGE];
            let n = reader.read_at(&mut read, 0).unwrap();
            (n, read)
        });
        backing.until_waiting(1);
        let cutter = scope.spawn(|| file.set_len(100).unwrap());
        until("the cut", || file.len() == 100);
        backing.open();
        let (n, read) = reader.join().unwrap();
        assert!(read[..n] == bytes(8)[..n] || read[100..n].iter().all(|&byte| byte == 0));
        cutter.join().unwrap();
    });
    file.set_len(8 * PAGE as u64).unwrap();
    assert!(page_at(&file, 0).unwrap()[100..] == [0; PAGE - 100]);
    assert_eq!(page_at(&file, 3).unwrap(), [0; PAGE]);
    file.close().unwrap();
    end(allocator, cache);
}

#[test]
fn cuts_beside_readers_and_write_back_show_no_old_bytes() {
    const PAGES: usize = 12;
    let (allocator, cache) = cache(64);
    let (backing, file) = file(&cache, PAGES);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _over = Over(&is_over);
        for thread in 0..2 {
            let (file, is_over, cache) = (file.reopen(), &is_over, &cache);
            scope.spawn(move || {
                let mut page = thread;
                while !is_over.load(SeqCst) {
                    page = (page + 5) % PAGES;
                    _ = file.read_at(&mut [0; 3 * PAGE], (page * PAGE) as u64).unwrap();
                    match page {
                        0 => _ = cache.evict(PageCount::new(64)),
                        1 => _ = cache.write_back(PageCount::new(64)),
                        _ => {}
                    }
                }
            });
        }
        let mut read = vec![0xee; PAGES * PAGE];
        for turn in 0..1500 {
            file.write_at(&vec![0xaa; PAGES * PAGE], 0).unwrap();
            let cut = turn * 37 % (3 * PAGE);
            file.set_len(cut as u64).unwrap();
            file.set_len((PAGES * PAGE) as u64).unwrap();
            file.read_exact_at(&mut read, 0).unwrap();
            assert!(read[..cut].iter().all(|&byte| byte == 0xaa), "turn {turn}, before the cut");
            assert!(read[cut..].iter().all(|&byte| byte == 0), "turn {turn}, behind the cut");
            backing.take_asked();
        }
    });
    file.close().unwrap();
    end(allocator, cache);
}

#[test]
fn a_backing_that_was_cut_by_others_is_an_error_and_refresh_takes_its_length() {
    let (allocator, cache) = cache(64);
    let (backing, file) = file(&cache, 8);
    backing.set_len(3 * PAGE as u64).unwrap();
    assert_eq!(page_at(&file, 5).unwrap_err().kind(), ErrorKind::UnexpectedEof);
    assert_eq!(file.refresh().unwrap(), 3 * PAGE as u64);
    assert_eq!(file.read_at(&mut [0; 10], 5 * PAGE as u64).unwrap(), 0);
    backing.set_len(6 * PAGE as u64).unwrap();
    assert_eq!(file.refresh().unwrap(), 6 * PAGE as u64);
    assert_eq!(page_at(&file, 5).unwrap(), [0; PAGE]);
    file.close().unwrap();
    end(allocator, cache);
}

#[test]
fn a_scan_leaves_what_is_used_often() {
    let (allocator, cache) = cache(200);
    let (_, hot) = file(&cache, 100);
    let scanned = cache.open(FakeBacking::new(bytes(2000))).unwrap();
    for _ in 0..4 {
        (0..100).for_each(|page| _ = page_at(&hot, page).unwrap());
    }
    // In small steps, which are one use of a page.
    let mut read = [0; 512];
    for step in 0..2000 * 8 {
        scanned.read_exact_at(&mut read, step * 512).unwrap();
    }
    let before = cache.stats().misses;
    (0..100).for_each(|page| _ = page_at(&hot, page).unwrap());
    assert!(cache.stats().misses - before <= 5, "{} of 100 were evicted", cache.stats().misses - before);
    hot.close().unwrap();
    scanned.close().unwrap();
    end(allocator, cache);
}

#[test]
fn hints_are_followed() {
    let (allocator, cache) = cache(2048);
    let backing = FakeBacking::new(bytes(1024));
    let file = cache.open(backing.clone()).unwrap();
    file.advise(Advice::WillNeed, 100 * PAGE as u64..200 * PAGE as u64);
    until("what will be needed", || cache.stats().read == 100);
    until("its pages", || reads(&backing).len() == 1);
    assert_eq!(cache.stats().misses, 0);
    file.advise(Advice::DontNeed, 0..u64::MAX);
    until("nothing", || {
        file.advise(Advice::DontNeed, 0..u64::MAX);
        cache.stats().pages == 0
    });
    file.advise(Advice::NoReuse, 0..0);
    for page in 0..1024 {
        page_at(&file, page).unwrap();
    }
    // At most two windows of 512 pages are ahead of the reader or not dropped yet.
    assert!(cache.stats().pages < 800, "{} pages stay behind", cache.stats().pages);
    file.close().unwrap();
    end(allocator, cache);
}

#[test]
fn records_that_are_appended_by_threads_stay_whole() {
    let (allocator, cache) = cache(256);
    let (backing, file) = file(&cache, 0);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _over = Over(&is_over);
        // Pages are written and evicted meanwhile, the last one of the file, too.
        let syncer = file.reopen();
        let (is_over, cache) = (&is_over, &cache);
        scope.spawn(move || {
            while !is_over.load(SeqCst) {
                syncer.sync().unwrap();
                cache.evict(PageCount::new(256));
            }
        });
        let threads: Vec<_> = (0..4_u8)
            .map(|thread| {
                let file = file.reopen();
                scope.spawn(move || {
                    for _ in 0..1000 {
                        let at = file.append(&[thread + 1; 1000]).unwrap();
                        assert_eq!(at % 1000, 0);
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
    file.close().unwrap();
    let written = backing.bytes();
    assert_eq!(written.len(), 4_000_000);
    assert!(written.chunks(1000).all(|record| record.iter().all(|&byte| byte == record[0] && byte > 0)));
    end(allocator, cache);
}

#[test]
fn transfers_that_a_backing_keeps_are_awaited() {
    let (allocator, cache) = cache(64);
    let (backing, file) = file(&cache, 32);
    file.write_at(&[3; 2 * PAGE], 0).unwrap();
    backing.keep_transfers(true);
    std::thread::scope(|scope| {
        let syncer = scope.spawn(|| file.sync());
        let kept = backing.take_kept();
        assert!(matches!(kept, Kept::Write(_)) && backing.kept() == 0);
        // A write of the same page goes to a copy, and its write waits for the first.
        file.write_at(&[4; PAGE], 0).unwrap();
        backing.keep_transfers(false);
        assert!(!syncer.is_finished());
        kept.complete(Ok(PAGE)); // short: the cache writes the rest
        syncer.join().unwrap().unwrap();
    });
    file.sync().unwrap();
    assert_eq!(backing.bytes()[PAGE..2 * PAGE], [3; PAGE]);
    assert_eq!(backing.bytes()[..PAGE], [4; PAGE]);
    file.close().unwrap();
    end(allocator, cache);
}

/// Drops each transfer, or forgets it.
struct Careless(Arc<FakeBacking>);

impl Backing for Careless {
    fn len(&self) -> io::Result<u64> {
        self.0.len()
    }
    fn read_vectored_at(&self, into: &mut [IoSliceMut<'_>], at: u64) -> io::Result<usize> {
        self.0.read_vectored_at(into, at)
    }
    fn write_vectored_at(&self, from: &[IoSlice<'_>], at: u64) -> io::Result<usize> {
        self.0.write_vectored_at(from, at)
    }
    fn sync(&self) -> io::Result<()> {
        self.0.sync()
    }
    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }
    fn start_read(&self, read: ReadTransfer) -> Option<ReadTransfer> {
        drop(read);
        None
    }
    fn start_write(&self, write: WriteTransfer) -> Option<WriteTransfer> {
        drop(write);
        None
    }
}

#[test]
fn transfers_that_a_backing_drops_fail() {
    let (allocator, cache) = cache(64);
    let file = cache.open(Careless(FakeBacking::new(bytes(32)))).unwrap();
    file.advise(Advice::WillNeed, 0..32 * PAGE as u64);
    // What was read ahead failed; a reader reads its page by itself.
    assert!(page_at(&file, 3).unwrap() == bytes(32)[3 * PAGE..4 * PAGE]);
    file.write_at(&[1; PAGE], 0).unwrap();
    assert!(file.sync().unwrap_err().to_string().contains("dropped"));
    assert!(file.close().unwrap_err().to_string().contains("lost"));
    end(allocator, cache);
}

#[test]
fn the_last_opener_that_is_dropped_writes_what_is_dirty() {
    let (allocator, cache) = cache(64);
    let (backing, file) = file(&cache, 2);
    let second = file.reopen();
    file.write_at(b"dirty", 0).unwrap();
    drop(file);
    assert_eq!(backing.bytes()[..5], bytes(1)[..5]);
    drop(second);
    assert_eq!(&backing.bytes()[..5], b"dirty");
    end(allocator, cache);
}

#[test]
fn offsets_at_the_ends_of_what_there_can_be_are_refused_or_empty() {
    let (allocator, cache) = cache(64);
    let (_, file) = file(&cache, 2);
    for at in [u64::MAX, i64::MAX as u64, 2 * PAGE as u64] {
        assert_eq!(file.read_at(&mut [0; 100], at).unwrap(), 0);
        assert!(file.lend(at, usize::MAX).unwrap().is_empty());
    }
    assert_eq!(file.write_at(&[1], i64::MAX as u64).unwrap_err().kind(), ErrorKind::FileTooLarge);
    assert_eq!(file.write_at(&[1; 2], u64::MAX).unwrap_err().kind(), ErrorKind::FileTooLarge);
    assert_eq!(file.set_len(u64::MAX).unwrap_err().kind(), ErrorKind::FileTooLarge);
    assert_eq!(file.read_at(&mut [], 0).unwrap(), 0);
    assert_eq!(file.write_at(&[], u64::MAX / 4).unwrap(), 0);
    assert_eq!(file.len(), 2 * PAGE as u64);
    let backward = Range { start: 5, end: 0 };
    for advice in [Advice::WillNeed, Advice::DontNeed, Advice::Normal] {
        file.advise(advice, u64::MAX - 1..u64::MAX);
        file.advise(advice, backward.clone());
        file.advise(advice, 0..0);
    }
    assert_eq!(file.invalidate(backward), 0);
    file.close().unwrap();
    end(allocator, cache);
}

#[test]
fn a_cache_full_of_lent_pages_says_so() {
    let (allocator, cache) = cache(8);
    let (_, file) = file(&cache, 32);
    let lent = file.lend(0, 8 * PAGE).unwrap();
    let error = page_at(&file, 20).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfMemory);
    assert!(error.to_string().contains("lent"), "{error}");
    assert!(file.write_at(&[1], 0).is_err(), "no memory for a copy");
    drop(lent);
    assert!(page_at(&file, 20).is_ok());
    file.write_at(&[1], 0).unwrap();
    file.close().unwrap();
    end(allocator, cache);
}

#[test]
fn what_sync_promised_is_there_after_a_kill() {
    let path = std::env::temp_dir().join(format!("pagemill-kill-{}", std::process::id()));
    in_child("syncs and is killed", || {
        let cache = PageCache::builder(&arena(256).build().unwrap()).build();
        let file = cache.open(FileBacking::options().create(true).open(&path).unwrap()).unwrap();
        file.write_at(&bytes(64), 0).unwrap();
        file.sync().unwrap();
        file.write_at(&[0xff; PAGE], 10 * PAGE as u64).unwrap();
        // SAFETY: a plain system call: nothing that would write the page is run.
        unsafe { libc::_exit(0) };
    });
    let there = std::fs::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert!(there == bytes(64));
}

#[test]
fn observers_see_the_caches_by_name() {
    let (allocator, unnamed) = cache(64);
    let named = PageCache::builder(&allocator).limit(PageCount::new(9)).named("volumes").build();
    let seen = page_caches().into_iter().find(|cache| cache.name == "volumes").unwrap();
    assert_eq!((seen.stats.limit, seen.stats.pages), (9, 0));
    drop(named);
    assert!(page_caches().iter().all(|cache| cache.name != "volumes"));
    end(allocator, unnamed);
}

#[test]
fn decisions_of_readahead_can_be_traced() {
    let allocator = arena(512).build().unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let noted = seen.clone();
    let cache =
        PageCache::builder(&allocator).trace(move |decision| noted.lock().unwrap().push(decision.to_string())).build();
    let file = cache.open(FakeBacking::new(bytes(100))).unwrap();
    page_at(&file, 0).unwrap();
    page_at(&file, 1).unwrap();
    let seen = seen.lock().unwrap();
    assert_eq!(seen[0], "file 1: miss at page 0, 1 asked: fetch 4 from page 0, marker on page 1 (a sequence begins)");
    assert!(seen[1].starts_with("file 1: marker at page 1, 1 asked: fetch 8 from page 4"), "{}", seen[1]);
    file.close().unwrap();
    end(allocator, cache);
}

#[test]
fn many_readers_share_a_small_cache() {
    let (allocator, cache) = cache(64);
    let backing = FakeBacking::new(bytes(256));
    let file = cache.open(backing).unwrap();
    let (is_over, start) = (AtomicBool::new(false), Barrier::new(5));
    std::thread::scope(|scope| {
        let _over = Over(&is_over);
        for thread in 0..4 {
            let (file, start) = (file.reopen(), &start);
            scope.spawn(move || {
                start.wait();
                for turn in 0..2000 {
                    // Two in sequence, one backward, one strided.
                    let page = [turn, turn * 2, 256_000 - turn, turn * 17][thread] % 256;
                    assert!(page_at(&file, page).unwrap() == bytes(256)[page * PAGE..][..PAGE], "{thread} {turn}");
                }
            });
        }
        start.wait();
    });
    file.close().unwrap();
    end(allocator, cache);
}

#[test]
fn pages_that_a_socket_sends_stay_lent_until_the_kernel_is_done() {
    let (allocator, cache) = cache(512);
    let (_, file) = file(&cache, 256);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (socket, _) = listener.accept().unwrap();
    socket.set_nonblocking(true).unwrap();
    let mut sender = LentSender::new(socket).unwrap();
    let wanted = bytes(256);
    sender.push(file.lend(0, 0).unwrap());
    // More than the socket has room for: what is not sent waits, in one piece or two.
    sender.push(file.lend(100, 200 * PAGE).unwrap());
    sender.push(file.lend(100 + 200 * PAGE as u64, 56 * PAGE).unwrap());
    while sender.flush().unwrap() {
        sender.push(file.lend(0, PAGE).unwrap());
    }
    assert!(sender.in_flight() > 0);
    // Writes and evictions meanwhile do not change what is sent.
    file.write_at(&vec![0xff; 256 * PAGE], 0).unwrap();
    file.sync().unwrap();
    cache.evict(PageCount::new(512));
    assert!(cache.stats().pages > 0, "the kernel has them");
    let receiver = std::thread::spawn(move || {
        let mut received = Vec::new();
        peer.read_to_end(&mut received).unwrap();
        received
    });
    while !sender.flush().unwrap() {
        std::thread::yield_now();
    }
    assert!(sender.wait(None).unwrap() && sender.in_flight() == 0);
    sender.socket().shutdown(Shutdown::Write).unwrap();
    let received = receiver.join().unwrap();
    let first = 256 * PAGE - 100;
    assert!(received[..first] == wanted[100..]);
    assert!(received[first..].chunks(PAGE).all(|page| page == &wanted[..page.len()]));
    drop(sender);
    file.close().unwrap();
    end(allocator, cache);
}

#[test]
fn a_sender_that_is_dropped_leaves_the_kernel_its_pages() {
    let allocator = arena(64).build().unwrap();
    let cache = PageCache::builder(&allocator).build();
    let (_, file) = file(&cache, 16);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let mut sender = LentSender::new(listener.accept().unwrap().0).unwrap();
    sender.push(file.lend(0, 16 * PAGE).unwrap());
    assert!(sender.flush().unwrap());
    let is_out = sender.in_flight() > 0;
    drop(sender);
    file.close().unwrap();
    assert_eq!(cache.stats().pages > 0, is_out);
    let mut received = Vec::new();
    peer.read_to_end(&mut received).unwrap();
    assert!(received == bytes(16));
    // The pages are lent for good, so the cache does not end.
    drop(cache);
}
