//! What one file, reader or backing of a page cache may do to the others (C8.4, C10.1): slow and dead backings, scans, hints,
//! limits.
use crate::common::{FakeBacking, arena, close_all_back, until};
use pagemill::{
    Advice, Allocator, Backing, CachedFile, Gfp, PageCache, PageCacheBuilder, PageCount, ReadTransfer, WriteTransfer,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const PAGE: usize = 4096;

fn builder(limit: usize) -> (Allocator, PageCacheBuilder) {
    let allocator = arena(limit + 512).build().unwrap();
    let builder = PageCache::builder(&allocator).limit(PageCount::new(limit));
    (allocator, builder)
}

/// Runs `work`, which is over soon unless it waits for ever.
#[track_caller]
fn in_time<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (says, hears) = channel();
    std::thread::spawn(move || says.send(work()));
    hears.recv_timeout(Duration::from_secs(300)).expect("it waits for ever, or panicked")
}

fn of_file(file: &CachedFile, pages: usize) -> usize {
    (0..pages as u64).filter(|&page| file.next_present(page, 1) == page).count()
}

/// A backing of ones, of any length; writes go nowhere.
struct Ones(u64);

impl Backing for Ones {
    fn len(&self) -> io::Result<u64> {
        Ok(self.0)
    }
    fn read_vectored_at(&self, into: &mut [IoSliceMut<'_>], _: u64) -> io::Result<usize> {
        let fill = |slice: &mut IoSliceMut<'_>| (slice.fill(1), slice.len()).1;
        Ok(into.iter_mut().map(fill).sum())
    }
    fn write_vectored_at(&self, from: &[IoSlice<'_>], _: u64) -> io::Result<usize> {
        Ok(from.iter().map(|slice| slice.len()).sum())
    }
    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
    fn set_len(&self, _: u64) -> io::Result<()> {
        Ok(())
    }
}

/// A cache of 256 pages, and a file of which 128 are used often.
fn with_hot_pages() -> (Allocator, PageCache, CachedFile) {
    let (allocator, builder) = builder(256);
    let cache = builder.build();
    let hot = cache.open(Ones(128 * PAGE as u64)).unwrap();
    hot.advise(Advice::Random, 0..0);
    for _ in 0..8 {
        (0..128).for_each(|page| assert_eq!(hot.read_at(&mut [0; 64], page * PAGE as u64).unwrap(), 64));
    }
    (allocator, cache, hot)
}

#[test]
fn a_writer_waits_for_a_backing_that_has_not_ended_its_writes() {
    let (allocator, builder) = builder(32);
    let cache = builder.dirty_limit(PageCount::new(4)).build();
    let slow = FakeBacking::new(Vec::new());
    slow.keep_transfers(true);
    let written = cache.open(slow.clone()).unwrap();
    let read = cache.open(FakeBacking::new(vec![7; PAGE])).unwrap();
    std::thread::scope(|scope| {
        let writes = scope.spawn(|| {
            (0..64).for_each(|page| assert_eq!(written.write_at(&[1; PAGE], page * PAGE as u64).unwrap(), PAGE));
        });
        until("a write that is kept", || slow.kept() > 0);
        // The cache is not full of pages that are on their way.
        assert_eq!(read.read_at(&mut [0; 8], 0).unwrap(), 8);
        assert!(cache.stats().pages < 16, "{:?}", cache.stats());
        slow.keep_transfers(false);
        until("all writes", || {
            (0..slow.kept()).for_each(|_| drop(slow.take_kept()));
            writes.is_finished()
        });
    });
    // The dropped writes have failed, and their pages are written again.
    assert!(written.sync().is_err());
    written.sync().unwrap();
    assert_eq!(slow.bytes(), vec![1; 64 * PAGE]);
    drop((written, read));
    until("the last page", || cache.stats().pages == 0);
    drop(cache);
    close_all_back(allocator);
}

/// Keeps writes for ever.
struct Dead(Mutex<Vec<WriteTransfer>>);

impl Backing for Dead {
    fn len(&self) -> io::Result<u64> {
        Ok(0)
    }
    fn read_vectored_at(&self, _: &mut [IoSliceMut<'_>], _: u64) -> io::Result<usize> {
        Ok(0)
    }
    fn write_vectored_at(&self, _: &[IoSlice<'_>], _: u64) -> io::Result<usize> {
        Ok(0)
    }
    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
    fn set_len(&self, _: u64) -> io::Result<()> {
        Ok(())
    }
    fn start_write(&self, write: WriteTransfer) -> Option<WriteTransfer> {
        self.0.lock().unwrap().push(write);
        None
    }
}

/// A shared backing's handle.
struct Of<B>(Arc<B>);

impl<B: Backing> Backing for Of<B> {
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
        self.0.start_read(read)
    }
    fn start_write(&self, write: WriteTransfer) -> Option<WriteTransfer> {
        self.0.start_write(write)
    }
}

/// The cache waits for such a backing once, for ten seconds; this test takes as long.
#[test]
fn a_backing_that_ends_no_write_stops_neither_requests_for_memory_nor_other_writers() {
    let dead = Arc::new(Dead(Mutex::default()));
    let allocator = arena(64).build().unwrap();
    let cache = PageCache::builder(&allocator).dirty_limit(PageCount::new(4)).build();
    let stuck = cache.open(Of(dead.clone())).unwrap();
    // One page is on its way, and one is dirty.
    stuck.write_at(&[1; PAGE], 0).unwrap();
    let complete_all = || {
        let kept: Vec<_> = dead.0.lock().unwrap().drain(..).collect();
        kept.into_iter().for_each(|write| {
            let len = write.len();
            write.complete(Ok(len));
        });
    };
    std::thread::scope(|scope| {
        let sync = scope.spawn(|| stuck.sync().unwrap());
        until("a write that is kept", || !dead.0.lock().unwrap().is_empty());
        stuck.write_at(&[1; PAGE], 20 * PAGE as u64).unwrap();
        let wanted = allocator.clone();
        let alloc = move || wanted.alloc_page(Gfp::KERNEL | Gfp::NORETRY | Gfp::NOWARN).ok();
        let got = in_time(|| std::iter::from_fn(alloc).collect::<Vec<_>>().len());
        assert!(got > 48, "{got} of 64 pages");
        let other = cache.open(FakeBacking::new(Vec::new())).unwrap();
        in_time(move || (0..200).for_each(|n| assert_eq!(other.write_at(&[2; PAGE], n * PAGE as u64).unwrap(), PAGE)));
        // The backing wakes up.
        until("the end of the sync", || {
            complete_all();
            sync.is_finished()
        });
    });
    let end = std::thread::spawn(|| stuck.close().unwrap());
    until("the end of the file", || {
        complete_all();
        end.is_finished()
    });
    end.join().unwrap();
    until("the last page", || cache.stats().pages == 0);
    drop(cache);
    close_all_back(allocator);
}

/// Two files whose backings share a queue of writes, from which `start_write` may hand back any.
struct Queue {
    kept: Arc<Mutex<Vec<WriteTransfer>>>,
    inner: Arc<FakeBacking>,
    keeps: bool,
}

impl Backing for Queue {
    fn len(&self) -> io::Result<u64> {
        self.inner.len()
    }
    fn read_vectored_at(&self, into: &mut [IoSliceMut<'_>], at: u64) -> io::Result<usize> {
        self.inner.read_vectored_at(into, at)
    }
    fn write_vectored_at(&self, from: &[IoSlice<'_>], at: u64) -> io::Result<usize> {
        self.inner.write_vectored_at(from, at)
    }
    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
    fn set_len(&self, len: u64) -> io::Result<()> {
        self.inner.set_len(len)
    }
    fn start_write(&self, write: WriteTransfer) -> Option<WriteTransfer> {
        let mut kept = self.kept.lock().unwrap();
        kept.push(write);
        if self.keeps { None } else { Some(kept.remove(0)) }
    }
}

#[test]
fn a_write_that_another_backing_hands_back_goes_to_its_own_file() {
    let (_allocator, builder) = builder(64);
    let cache = builder.build();
    let kept = Arc::<Mutex<Vec<WriteTransfer>>>::default();
    let backings = [FakeBacking::new(vec![0; PAGE]), FakeBacking::new(vec![0; PAGE])];
    let open =
        |which: usize, keeps| cache.open(Queue { kept: kept.clone(), inner: backings[which].clone(), keeps }).unwrap();
    let files = [open(0, true), open(1, false)];
    files[0].write_at(&[1; PAGE], 0).unwrap();
    files[1].write_at(&[2; PAGE], 0).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| files[0].sync().unwrap());
        until("the first write", || kept.lock().unwrap().len() == 1);
        scope.spawn(|| files[1].sync().unwrap());
        until("the second write in its place", || backings[0].bytes()[0] == 1);
        // The second file's is kept now.
        let write = kept.lock().unwrap().remove(0);
        let len = write.len();
        write.complete(Ok(len));
    });
    assert_eq!(
        (backings[0].bytes()[0], backings[1].bytes()[0]),
        (1, 0),
        "the second was completed without being written"
    );
}

#[test]
fn a_length_that_offsets_do_not_reach_is_refused() {
    let (_allocator, builder) = builder(64);
    let cache = builder.build();
    assert_eq!(cache.open(Ones(u64::MAX)).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
    let file = cache.open(Ones(i64::MAX as u64)).unwrap();
    let end = i64::MAX as u64;
    assert_eq!(file.read_at(&mut [0; 64], end - 20).unwrap(), 20);
    assert_eq!(file.lend(end - 20, usize::MAX).unwrap().slices().concat(), [1; 20]);
    assert_eq!(file.append(&[1]).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
}

#[test]
fn two_scans_by_small_reads_leave_the_hot_pages() {
    let (_allocator, cache, hot) = with_hot_pages();
    let cold = cache.open(Ones(20_000 * PAGE as u64)).unwrap();
    for step in 0..1280 * 8 {
        for stream in [0, 10_000 * PAGE as u64] {
            cold.read_exact_at(&mut [0; 512], stream + step * 512).unwrap();
        }
    }
    let left = of_file(&hot, 128);
    assert!(left > 115, "{left} of 128");
}

/// Steps count once, and each read of a record counts.
#[test]
fn records_that_are_read_again_and_again_outlive_a_scan() {
    let (_allocator, builder) = builder(64);
    let cache = builder.build();
    let hot = cache.open(Ones(4 * PAGE as u64)).unwrap();
    hot.advise(Advice::Random, 0..0);
    for _ in 0..8 {
        (0..4).for_each(|page| hot.read_exact_at(&mut [0; 100], page * PAGE as u64 + 1000).unwrap());
    }
    let cold = cache.open(Ones(640 * PAGE as u64)).unwrap();
    (0..640).for_each(|page| cold.read_exact_at(&mut [0; PAGE], page * PAGE as u64).unwrap());
    assert_eq!(of_file(&hot, 4), 4);
}

#[test]
fn a_reader_that_will_not_come_back_leaves_what_others_use() {
    let (_allocator, _cache, hot) = with_hot_pages();
    let once = hot.reopen();
    once.advise(Advice::NoReuse, 0..0);
    (0..128).for_each(|page| once.read_exact_at(&mut [0; PAGE], page * PAGE as u64).unwrap());
    assert_eq!(of_file(&hot, 128), 128);
}

#[test]
fn pages_that_are_not_needed_go_first_however_often_they_were_used() {
    let (_allocator, cache, hot) = with_hot_pages();
    // Dirty, so that it cannot go at once.
    hot.write_at(&[2; 8], 31 * PAGE as u64).unwrap();
    hot.advise(Advice::DontNeed, 31 * PAGE as u64..32 * PAGE as u64);
    assert_eq!(hot.next_present(31, 1), 31);
    hot.sync().unwrap();
    assert_eq!(cache.evict(PageCount::new(1)), PageCount::new(1));
    assert_eq!(hot.next_present(31, 1), 32);
}

#[test]
fn no_more_is_read_ahead_on_request_than_the_cache_has_room_for() {
    for threads in [0, 3] {
        let (_allocator, builder) = builder(64);
        let cache = builder.threads(threads).build();
        let file = cache.open(Ones(64_000 * PAGE as u64)).unwrap();
        file.advise(Advice::WillNeed, 0..u64::MAX);
        let stats = cache.stats();
        assert!(stats.read <= 64 && stats.evicted == 0, "{stats:?}");
    }
}

#[test]
fn a_loan_that_cannot_be_evicts_nothing() {
    let (_allocator, cache, hot) = with_hot_pages();
    let big = cache.open(Ones(1000 * PAGE as u64)).unwrap();
    assert_eq!(big.lend(0, 1000 * PAGE).unwrap_err().kind(), io::ErrorKind::OutOfMemory);
    assert_eq!((of_file(&hot, 128), cache.stats().evicted), (128, 0));
}

#[test]
fn a_smaller_limit_allows_fewer_dirty_pages() {
    let (_allocator, builder) = builder(1000);
    let cache = builder.build();
    cache.set_limit(PageCount::new(100));
    let file = cache.open(FakeBacking::new(Vec::new())).unwrap();
    for page in 0..90 {
        file.write_at(&[1; PAGE], page * PAGE as u64).unwrap();
        assert!(cache.stats().dirty <= 21, "{:?}", cache.stats());
    }
}

/// A page that somebody reads at each moment is taken off its file by the first try.
#[test]
fn a_page_is_let_go_while_others_have_it() {
    let (_allocator, builder) = builder(64);
    let cache = builder.build();
    let backing = FakeBacking::new(vec![1; PAGE]);
    let file = cache.open(backing.clone()).unwrap();
    let lent = file.lend(0, PAGE).unwrap();
    backing.write_vectored_at(&[IoSlice::new(&[2; PAGE])], 0).unwrap();
    assert_eq!(file.invalidate(0..PAGE as u64), 0);
    let mut read = [0; PAGE];
    file.read_exact_at(&mut read, 0).unwrap();
    assert_eq!((read, lent.slices().concat()), ([2; PAGE], vec![1; PAGE]));
    drop(lent);
    assert_eq!(cache.stats().pages, 1);
}

/// A backing that allocates while it has a lock that its writes need.
struct Locks(Allocator, Mutex<()>);

impl Locks {
    fn alloc(&self) {
        let _held = self.1.lock().unwrap();
        _ = self.0.alloc_page(Gfp::KERNEL | Gfp::NORETRY | Gfp::NOWARN);
    }
}

impl Backing for Locks {
    fn len(&self) -> io::Result<u64> {
        Ok(64 * PAGE as u64)
    }
    fn read_vectored_at(&self, into: &mut [IoSliceMut<'_>], at: u64) -> io::Result<usize> {
        Ones(0).read_vectored_at(into, at)
    }
    fn write_vectored_at(&self, from: &[IoSlice<'_>], at: u64) -> io::Result<usize> {
        let _held = self.1.lock().unwrap();
        Ones(0).write_vectored_at(from, at)
    }
    fn sync(&self) -> io::Result<()> {
        self.alloc();
        Ok(())
    }
    fn set_len(&self, _: u64) -> io::Result<()> {
        self.alloc();
        Ok(())
    }
    fn start_read(&self, read: ReadTransfer) -> Option<ReadTransfer> {
        self.alloc();
        Some(read)
    }
}

/// Reclaim does not call a backing from within it.
#[test]
fn a_backing_may_allocate_under_its_own_lock_in_each_of_its_calls() {
    in_time(|| {
        let allocator = arena(64).build().unwrap();
        let cache = PageCache::builder(&allocator).dirty_limit(PageCount::new(64)).build();
        let file = cache.open(Locks(allocator.clone(), Mutex::new(()))).unwrap();
        (0..8).for_each(|page| assert_eq!(file.write_at(&[1; PAGE], page * 2 * PAGE as u64).unwrap(), PAGE));
        let mut rest: Vec<_> = std::iter::from_fn(|| allocator.alloc_page(Gfp::NOWAIT | Gfp::NOWARN).ok()).collect();
        drop(rest.pop());
        file.advise(Advice::WillNeed, 40 * PAGE as u64..41 * PAGE as u64);
        file.set_len(60 * PAGE as u64).unwrap();
        file.sync().unwrap();
        drop(rest);
        file.close().unwrap();
    });
}

/// A disk that is full, until it has room.
struct Full(Arc<Mutex<bool>>);

impl Backing for Full {
    fn len(&self) -> io::Result<u64> {
        Ok(0)
    }
    fn read_vectored_at(&self, _: &mut [IoSliceMut<'_>], _: u64) -> io::Result<usize> {
        Ok(0)
    }
    fn write_vectored_at(&self, from: &[IoSlice<'_>], _: u64) -> io::Result<usize> {
        match *self.0.lock().unwrap() {
            true => Err(io::ErrorKind::StorageFull.into()),
            false => Ok(from.iter().map(|slice| slice.len()).sum()),
        }
    }
    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
    fn set_len(&self, _: u64) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn pages_that_no_disk_takes_leave_room_for_other_files() {
    let (allocator, cache, hot) = with_hot_pages();
    let is_full = Arc::new(Mutex::new(true));
    let full = cache.open(Full(is_full.clone())).unwrap();
    let pages = |from: usize| move |page: usize| ((from + page) * PAGE) as u64;
    // One page after the other, by a copy and by a move; the cache has 256, of which it likes 51 to be dirty.
    let copied = (0..256).map(pages(0)).take_while(|&at| full.write_at(&[2; PAGE], at).is_ok()).count();
    let moved = |at: u64| {
        full.write_pages(&mut [allocator.alloc_page(Gfp::KERNEL).ok()], PAGE, at).map_err(|error| error.kind())
    };
    assert!((51..64).contains(&copied), "{copied}");
    assert_eq!(moved(pages(copied)(0)), Err(io::ErrorKind::StorageFull));
    (0..128).for_each(|page| assert_eq!(hot.read_at(&mut [0; 64], page * PAGE as u64).unwrap(), 64));
    // Other files are written to, though each page has to go to its disk at once.
    (0..128).for_each(|page| assert_eq!(hot.write_at(&[3; PAGE], page * PAGE as u64).unwrap(), PAGE));
    assert_eq!(full.sync().unwrap_err().kind(), io::ErrorKind::StorageFull);
    // Nothing that was accepted is lost, and the file is written to again.
    *is_full.lock().unwrap() = false;
    assert_eq!(moved(pages(copied)(0)), Ok(PAGE));
    full.sync().unwrap();
    assert_eq!(of_file(&full, copied + 1), copied + 1);
}
