//! Pages that a writer has move into the page cache (`CachedFile::write_pages`). `page_cache_contents.rs` compares the bytes
//! with a plain file's, where reads, writes and memory fail.
use crate::common::{Asked, FakeBacking, Fault, Kept, Over, arena, close_all_back, until};
use pagemill::{Advice, Allocator, CachedFile, Gfp, Page, PageCache, PageCount};
use std::io::{ErrorKind, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

const PAGE: usize = 4096;

fn cache(limit: usize) -> (Allocator, PageCache) {
    let allocator = arena(limit + 512).build().unwrap();
    let limit = PageCount::new(limit);
    let cache = PageCache::builder(&allocator).limit(limit).dirty_limit(limit).threads(1).build();
    (allocator, cache)
}

/// A file of so many pages of ones, of which nothing is read ahead.
fn file(cache: &PageCache, pages: usize) -> (Arc<FakeBacking>, CachedFile) {
    let backing = FakeBacking::new(vec![1; pages * PAGE]);
    let file = cache.open(backing.clone()).unwrap();
    file.advise(Advice::Random, 0..0);
    (backing, file)
}

fn pages_of(allocator: &Allocator, n: usize, byte: u8) -> Vec<Option<Page>> {
    let page = |_| {
        let mut page = allocator.alloc_page(Gfp::KERNEL).unwrap();
        page.fill(byte);
        Some(page)
    };
    (0..n).map(page).collect()
}

fn end(allocator: Allocator, cache: PageCache) {
    until("the last page", || cache.stats().pages == 0);
    drop(cache);
    close_all_back(allocator);
}

fn page_at(file: &CachedFile, page: usize) -> Result<Vec<u8>> {
    let mut read = vec![0xee; PAGE];
    file.read_exact_at(&mut read, (page * PAGE) as u64).map(|()| read)
}

fn reads(backing: &FakeBacking) -> usize {
    backing.take_asked().iter().filter(|asked| matches!(asked, Asked::Read { .. })).count()
}

/// Into holes, over pages that are there, and behind the end: the very pages are in the file afterwards.
#[test]
fn the_pages_themselves_are_in_the_file() {
    let (allocator, cache) = cache(256);
    let (backing, file) = file(&cache, 100);
    page_at(&file, 3).unwrap();
    file.write_at(&[9; PAGE], 5 * PAGE as u64).unwrap();
    backing.take_asked();
    let mut pages = pages_of(&allocator, 150, 7);
    let addresses: Vec<usize> = pages.iter().flatten().map(|page| page.addr()).collect();
    assert_eq!(file.write_pages(&mut pages, 150 * PAGE, 0).unwrap(), 150 * PAGE);
    assert!(pages.iter().all(Option::is_none));
    assert_eq!((file.len(), reads(&backing)), (150 * PAGE as u64, 0));
    let lent = file.lend(0, 150 * PAGE).unwrap();
    assert!(lent.slices().iter().map(|slice| slice.as_ptr().addr()).eq(addresses));
    let stats = cache.stats();
    assert_eq!((stats.pages, stats.dirty, stats.copied), (150, 150, 0));
    drop(lent);
    file.sync().unwrap();
    assert!(backing.bytes() == vec![7; 150 * PAGE]);
    file.close().unwrap();
    end(allocator, cache);
}

#[test]
fn what_lies_behind_the_last_pages_bytes_stays() {
    let (allocator, cache) = cache(64);
    for is_cached in [false, true] {
        // The file ends in the page, before the bytes end, and after them.
        for len in [2 * PAGE + 10, PAGE + 10, PAGE + 100, PAGE + 200] {
            let backing = FakeBacking::new(vec![1; len]);
            let file = cache.open(backing.clone()).unwrap();
            if is_cached {
                file.read_at(&mut [0; 2 * PAGE], 0).unwrap();
            }
            let mut pages = pages_of(&allocator, 2, 7);
            assert_eq!(file.write_pages(&mut pages, PAGE + 100, 0).unwrap(), PAGE + 100);
            assert!(pages.iter().all(Option::is_none));
            let mut wanted = vec![1; len.max(PAGE + 100)];
            wanted[..PAGE + 100].fill(7);
            file.sync().unwrap();
            assert!(backing.bytes() == wanted, "{len}, {is_cached}");
            // Behind the end are zeros, not what the page had.
            file.set_len(2 * PAGE as u64).unwrap();
            wanted.resize(2 * PAGE, 0);
            assert!(page_at(&file, 1).unwrap() == wanted[PAGE..], "{len}, {is_cached}");
            file.close().unwrap();
        }
    }
    end(allocator, cache);
}

#[test]
fn a_page_whose_rest_cannot_be_read_is_not_written() {
    let (allocator, cache) = cache(64);
    let (backing, file) = file(&cache, 8);
    let mut pages = pages_of(&allocator, 2, 7);
    for (len, at) in [(100, 0), (PAGE + 100, PAGE as u64)] {
        backing.fail([Fault::Error(ErrorKind::TimedOut)]);
        let written = file.write_pages(&mut pages, len, at);
        match len {
            100 => assert_eq!(written.unwrap_err().kind(), ErrorKind::TimedOut),
            _ => assert_eq!(written.unwrap(), PAGE),
        }
    }
    assert!(pages[0].is_none() && pages[1].is_some());
    assert_eq!((page_at(&file, 1).unwrap(), page_at(&file, 2).unwrap()), (vec![7; PAGE], vec![1; PAGE]));
    file.close().unwrap();
    drop(pages);
    end(allocator, cache);
}

#[test]
fn lent_pages_keep_their_bytes() {
    let (allocator, cache) = cache(64);
    let (_, file) = file(&cache, 8);
    let lent = file.lend(0, 4 * PAGE).unwrap();
    let mut pages = pages_of(&allocator, 4, 7);
    assert_eq!(file.write_pages(&mut pages, 3 * PAGE + 10, 0).unwrap(), 3 * PAGE + 10);
    assert!(lent.slices().concat() == [1; 4 * PAGE]);
    assert_eq!(cache.stats().pages, 8);
    let wanted = [vec![7; 10], vec![1; PAGE - 10]].concat();
    assert_eq!((page_at(&file, 2).unwrap(), page_at(&file, 3).unwrap()), (vec![7; PAGE], wanted));
    drop(lent);
    assert_eq!(cache.stats().pages, 4);
    file.close().unwrap();
    end(allocator, cache);
}

#[test]
fn a_page_on_its_way_to_the_backing_is_written_first() {
    let (allocator, cache) = cache(64);
    let (backing, file) = file(&cache, 8);
    file.write_at(&[3; 2 * PAGE], 0).unwrap();
    backing.keep_transfers(true);
    std::thread::scope(|scope| {
        let syncer = scope.spawn(|| file.sync());
        let Kept::Write(write) = backing.take_kept() else { panic!("a write") };
        assert_eq!(file.write_pages(&mut pages_of(&allocator, 2, 4), 2 * PAGE, 0).unwrap(), 2 * PAGE);
        assert!(write.slices().iter().flat_map(|slice| slice.iter()).eq(&[3; 2 * PAGE]));
        backing.keep_transfers(false);
        assert_eq!(backing.kept(), 0, "two writes of one place never overlap");
        write.complete(Ok(PAGE)); // short: the cache writes the rest
        syncer.join().unwrap().unwrap();
    });
    assert_eq!(page_at(&file, 0).unwrap(), [4; PAGE]);
    file.sync().unwrap();
    assert!(backing.bytes()[..2 * PAGE] == [4; 2 * PAGE]);
    assert_eq!(cache.stats().dirty, 0);
    file.close().unwrap();
    end(allocator, cache);
}

#[test]
fn the_limits_hold_and_writers_write_back() {
    let allocator = arena(600).build().unwrap();
    let cache = PageCache::builder(&allocator).limit(PageCount::new(128)).dirty_limit(PageCount::new(32)).build();
    let (backing, file) = file(&cache, 0);
    for turn in 0..3 {
        for first in (0..500).step_by(10) {
            let mut pages = pages_of(&allocator, 10, (first + turn) as u8);
            assert_eq!(file.write_pages(&mut pages, 10 * PAGE, (first * PAGE) as u64).unwrap(), 10 * PAGE);
            let stats = cache.stats();
            assert!(stats.pages <= 128 && stats.dirty <= 42, "{stats:?}");
        }
    }
    file.close().unwrap();
    assert!(backing.bytes().chunks(PAGE).enumerate().all(|(i, page)| page == [(i / 10 * 10 + 2) as u8; PAGE]));
    end(allocator, cache);
}

#[test]
fn a_full_cache_copies_and_one_without_room_says_so() {
    let (allocator, cache) = cache(8);
    let (_, file) = file(&cache, 32);
    let lent = file.lend(8 * PAGE as u64, 7 * PAGE).unwrap();
    page_at(&file, 0).unwrap();
    file.write_at(&[2; PAGE], 0).unwrap();
    // Full, but the old page can be changed.
    let mut pages = pages_of(&allocator, 2, 7);
    assert_eq!(file.write_pages(&mut pages[..1], PAGE, 0).unwrap(), PAGE);
    assert!(pages[0].is_some());
    assert_eq!(page_at(&file, 0).unwrap(), [7; PAGE]);
    // The dirty page is written and leaves for the first one; for the second there is no room before that is lent, too.
    let first = file.write_pages(&mut pages, PAGE, 16 * PAGE as u64).unwrap();
    assert_eq!((first, pages[0].is_none()), (PAGE, true));
    let all = file.lend(16 * PAGE as u64, PAGE).unwrap();
    let error = file.write_pages(&mut pages[1..], PAGE, 17 * PAGE as u64).unwrap_err();
    assert_eq!((error.kind(), pages[1].is_some()), (ErrorKind::OutOfMemory, true), "{error}");
    // In the place of a lent page neither.
    assert_eq!(file.write_pages(&mut pages[1..], PAGE, 16 * PAGE as u64).unwrap_err().kind(), ErrorKind::OutOfMemory);
    assert!(pages[1].is_some() && cache.stats().pages == 8);
    drop((lent, all));
    assert_eq!(file.write_pages(&mut pages[1..], PAGE, 17 * PAGE as u64).unwrap(), PAGE);
    file.close().unwrap();
    drop(pages);
    end(allocator, cache);
}

#[test]
fn a_write_that_lacks_room_for_its_rest_says_how_much_is_there() {
    let (allocator, cache) = cache(8);
    let (backing, file) = file(&cache, 0);
    let lent = {
        let (_, other) = self::file(&cache, 8);
        other.lend(0, 6 * PAGE).unwrap()
    };
    backing.fail([Fault::Error(ErrorKind::StorageFull); 100]);
    let mut pages = pages_of(&allocator, 5, 7);
    assert_eq!(file.write_pages(&mut pages, 5 * PAGE, 0).unwrap(), 2 * PAGE);
    assert_eq!(pages.iter().flatten().count(), 3);
    assert_eq!((file.len(), cache.stats().pages), (2 * PAGE as u64, 8));
    drop((lent, pages));
    backing.fail([]);
    while file.sync().is_err() {}
    assert!(backing.bytes() == [7; 2 * PAGE]);
    file.close().unwrap();
    end(allocator, cache);
}

#[test]
fn wrong_requests_are_refused_and_foreign_pages_are_copied() {
    let (allocator, cache) = cache(64);
    let (_, file) = file(&cache, 1);
    let mut pages = pages_of(&allocator, 3, 7);
    let kind = |result: Result<usize>| result.unwrap_err().kind();
    assert_eq!(kind(file.write_pages(&mut pages, PAGE, 1)), ErrorKind::InvalidInput);
    assert_eq!(kind(file.write_pages(&mut pages, 3 * PAGE + 1, 0)), ErrorKind::InvalidInput);
    assert_eq!(kind(file.write_pages(&mut pages, PAGE, 1 << 63)), ErrorKind::FileTooLarge);
    assert_eq!(kind(file.write_pages(&mut pages, usize::MAX, 4096)), ErrorKind::FileTooLarge);
    let taken = pages[1].take();
    assert_eq!(kind(file.write_pages(&mut pages, 2 * PAGE, 0)), ErrorKind::InvalidInput);
    assert_eq!(file.write_pages(&mut pages, 0, 8192).unwrap(), 0);
    assert_eq!(file.len(), PAGE as u64);
    pages[1] = taken;
    let other = arena(64).build().unwrap();
    let mut foreign = pages_of(&other, 1, 8);
    pages.push(foreign.remove(0));
    assert_eq!(file.write_pages(&mut pages, 3 * PAGE + 5, 0).unwrap(), 3 * PAGE + 5);
    assert_eq!(pages.iter().flatten().count(), 4);
    assert_eq!((page_at(&file, 2).unwrap(), file.len()), (vec![7; PAGE], 3 * PAGE as u64 + 5));
    drop(pages);
    close_all_back(other);
    file.close().unwrap();
    end(allocator, cache);
}

#[test]
fn pages_of_a_wiped_cache_are_wiped_as_they_leave() {
    let allocator = arena(64).build().unwrap();
    let cache = PageCache::builder(&allocator).limit(PageCount::new(8)).wiped(true).build();
    let (_, file) = file(&cache, 0);
    let mut pages = pages_of(&allocator, 1, 7);
    let addr = pages[0].as_ref().map(|page| page.addr());
    file.write_pages(&mut pages, PAGE, 0).unwrap();
    file.close().unwrap();
    let all: Vec<Page> = std::iter::from_fn(|| allocator.alloc_page(Gfp::NOWAIT).ok()).collect();
    let same = all.iter().find(|page| Some(page.addr()) == addr).unwrap();
    assert!(same.iter().all(|&byte| byte == 0));
    drop(all);
    end(allocator, cache);
}

/// Each page has one writer's byte, whole; a reader beside them sees nothing else. Pages are written back, evicted and lent
/// meanwhile.
#[test]
fn readers_beside_writers_see_whole_pages() {
    const PAGES: usize = 24;
    let (allocator, cache) = cache(48);
    let (_, file) = file(&cache, PAGES);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _over = Over(&is_over);
        for thread in 0..2 {
            let (file, cache, is_over) = (file.reopen(), &cache, &is_over);
            scope.spawn(move || {
                for turn in thread.. {
                    if is_over.load(SeqCst) {
                        return;
                    }
                    let page = turn * 7 % PAGES;
                    let read = page_at(&file, page).unwrap();
                    assert!(read.iter().all(|&byte| byte == read[0]), "page {page}: torn");
                    let lent = file.lend((page * PAGE) as u64, PAGE).unwrap();
                    let first = lent.slices().concat();
                    match turn % 5 {
                        0 => _ = cache.evict(PageCount::new(16)),
                        1 => _ = cache.write_back(PageCount::new(8)),
                        2 => file.sync().unwrap(),
                        _ => {}
                    }
                    assert!(lent.slices().concat() == first && first.iter().all(|&byte| byte == first[0]));
                }
            });
        }
        let writers: Vec<_> = (0..2)
            .map(|thread| {
                let (file, allocator) = (file.reopen(), &allocator);
                scope.spawn(move || {
                    for turn in 0..2000_usize {
                        let (first, n) = (turn * 5 % (PAGES - 4), 1 + turn % 4);
                        let mut pages = pages_of(allocator, n, (turn * 2 + thread) as u8);
                        let written = file.write_pages(&mut pages, n * PAGE, (first * PAGE) as u64).unwrap();
                        assert_eq!(written, n * PAGE);
                    }
                })
            })
            .collect();
        writers.into_iter().for_each(|thread| thread.join().unwrap());
    });
    file.close().unwrap();
    end(allocator, cache);
}

#[test]
fn cuts_beside_writers_show_no_old_bytes() {
    const PAGES: usize = 12;
    let (allocator, cache) = cache(64);
    let (backing, file) = file(&cache, 0);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _over = Over(&is_over);
        let (beside, cache, allocator, is_over) = (file.reopen(), &cache, &allocator, &is_over);
        // Behind what the cutter looks at. What it lengthens the file by is zeros, or these.
        scope.spawn(move || {
            for turn in 0.. {
                if is_over.load(SeqCst) {
                    return;
                }
                let mut pages = pages_of(allocator, 3, 5);
                let len = 2 * PAGE + turn * 37 % PAGE;
                _ = beside.write_pages(&mut pages, len, (PAGES * PAGE) as u64).unwrap();
                _ = if turn % 2 == 0 { cache.write_back(PageCount::new(64)) } else { cache.evict(PageCount::new(64)) };
            }
        });
        let mut read = vec![0xee; PAGES * PAGE];
        for turn in 0..1500 {
            let mut pages = pages_of(allocator, PAGES, 0xaa);
            assert_eq!(file.write_pages(&mut pages, PAGES * PAGE - 100, 0).unwrap(), PAGES * PAGE - 100);
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
