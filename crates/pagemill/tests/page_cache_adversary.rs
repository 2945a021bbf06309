//! The page cache against threads that meet at bad moments, and backings at their worst (C8, C10.1).
use crate::common::{FakeBacking, Over, arena, close_all_back, until};
use pagemill::{Advice, Allocator, Backing, CachedFile, Gfp, PageCache, PageCacheBuilder, PageCount};
use std::io::{self, IoSlice, IoSliceMut};
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const PAGE: usize = 4096;

fn builder(limit: usize) -> (Allocator, PageCacheBuilder) {
    let allocator = arena(limit + 512).build().unwrap();
    let builder = PageCache::builder(&allocator).limit(PageCount::new(limit));
    (allocator, builder)
}

fn end(allocator: Allocator, cache: PageCache) {
    until("the last page", || cache.stats().pages == 0);
    drop(cache);
    close_all_back(allocator);
}

/// Runs `work`, which is over soon unless threads wait for each other.
#[track_caller]
fn in_time(work: impl FnOnce() + Send + 'static) {
    let (says, hears) = channel();
    let thread = std::thread::spawn(move || {
        work();
        _ = says.send(());
    });
    match hears.recv_timeout(Duration::from_secs(120)) {
        Err(RecvTimeoutError::Timeout) => panic!("threads wait for each other for ever"),
        _ => thread.join().unwrap_or_else(|payload| resume_unwind(payload)),
    }
}

/// A backing in which a write of the first page waits until it may go on.
struct Held(Arc<FakeBacking>, Mutex<Sender<()>>, Mutex<Receiver<()>>);

impl Backing for Held {
    fn len(&self) -> io::Result<u64> {
        self.0.len()
    }
    fn read_vectored_at(&self, into: &mut [IoSliceMut<'_>], at: u64) -> io::Result<usize> {
        self.0.read_vectored_at(into, at)
    }
    fn write_vectored_at(&self, from: &[IoSlice<'_>], at: u64) -> io::Result<usize> {
        if at == 0 {
            self.1.lock().unwrap().send(()).unwrap();
            // Without a sender it goes on.
            _ = self.2.lock().unwrap().recv();
        }
        self.0.write_vectored_at(from, at)
    }
    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }
}

/// One thread waits for a page's write to end, so that it may write it again. Another begins and ends writes meanwhile.
#[test]
fn a_sync_that_waits_for_a_page_does_not_stop_other_writes() {
    in_time(|| {
        let (allocator, builder) = builder(256);
        let cache = builder.dirty_limit(PageCount::new(4)).build();
        let ((says, begun), (goes, waits)) = (channel(), channel::<()>());
        let held = Held(FakeBacking::new(vec![0; 128 * PAGE]), Mutex::new(says), Mutex::new(waits));
        let file = cache.open(held).unwrap();
        std::thread::scope(|scope| {
            file.write_at(&[1; PAGE], 0).unwrap();
            scope.spawn(|| file.reopen().sync().unwrap());
            begun.recv().unwrap();
            file.write_at(&[2; PAGE], 0).unwrap();
            scope.spawn(|| file.reopen().sync().unwrap());
            for turn in 0..200_000 {
                file.write_at(&[3; PAGE], ((1 + turn % 100) * PAGE) as u64).unwrap();
            }
            drop(goes);
        });
        file.close().unwrap();
        end(allocator, cache);
    });
}

#[test]
fn a_cache_grows_beyond_its_first_limit() {
    in_time(|| {
        let allocator = arena(4096).build().unwrap();
        let cache = PageCache::builder(&allocator).limit(PageCount::new(16)).build();
        cache.set_limit(PageCount::new(3000));
        let file = cache.open(FakeBacking::new(vec![7; 2000 * PAGE])).unwrap();
        let mut read = vec![0; PAGE];
        for page in 0..2000 {
            file.read_exact_at(&mut read, page * PAGE as u64).unwrap();
            assert!(read == [7; PAGE]);
        }
        for page in 2000..2900 {
            file.write_at(&read, page * PAGE as u64).unwrap();
        }
        file.close().unwrap();
        end(allocator, cache);
    });
}

/// A page is changed between its way into the file and its way into the queues, which are held up by others.
#[test]
fn a_page_that_is_written_as_it_comes_can_be_evicted() {
    const LENT: usize = 2000;
    let (allocator, builder) = builder(4096);
    let cache = builder.dirty_limit(PageCount::new(4096)).build();
    let busy = cache.open(FakeBacking::new(vec![1; LENT * PAGE])).unwrap();
    let lent = busy.lend(0, LENT * PAGE).unwrap();
    let file = cache.open(FakeBacking::new(Vec::new())).unwrap();
    let last = 63 * PAGE;
    for turn in 0..300_usize {
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let _over = Over(&is_over);
            scope.spawn(|| {
                while !is_over.load(SeqCst) {
                    cache.evict(PageCount::new(1));
                }
            });
            let other = file.reopen();
            scope.spawn(move || {
                while other.len() <= last as u64 {
                    std::thread::yield_now();
                }
                other.write_at(&[turn as u8; 8], last as u64 + 8).unwrap();
            });
            file.write_at(&[turn as u8; 64 * PAGE], 0).unwrap();
        });
        file.sync().unwrap();
        cache.evict(PageCount::new(1000));
        assert_eq!(cache.stats().pages as usize, LENT, "in turn {turn} clean pages stay that nobody has");
        file.set_len(0).unwrap();
    }
    drop(lent);
    busy.close().unwrap();
    file.close().unwrap();
    end(allocator, cache);
}

/// A disk with a cache of its own, which forgets what it has not made durable when that fails. Each flush asks whether it
/// is to fail, and waits for the answer.
struct Forgetful {
    pending: Mutex<Vec<(usize, Vec<u8>)>>,
    durable: Mutex<Vec<u8>>,
    asks: Mutex<Sender<()>>,
    fails: Mutex<Receiver<bool>>,
}

impl Backing for Forgetful {
    fn len(&self) -> io::Result<u64> {
        Ok(self.durable.lock().unwrap().len() as u64)
    }
    fn read_vectored_at(&self, into: &mut [IoSliceMut<'_>], _: u64) -> io::Result<usize> {
        Ok(into.iter_mut().map(|slice| (slice.fill(0), slice.len()).1).sum())
    }
    fn write_vectored_at(&self, from: &[IoSlice<'_>], at: u64) -> io::Result<usize> {
        let bytes: Vec<u8> = from.iter().flat_map(|slice| slice.iter().copied()).collect();
        let len = bytes.len();
        self.pending.lock().unwrap().push((at as usize, bytes));
        Ok(len)
    }
    fn sync(&self) -> io::Result<()> {
        self.asks.lock().unwrap().send(()).unwrap();
        let fails = self.fails.lock().unwrap().recv().unwrap();
        let pending = std::mem::take(&mut *self.pending.lock().unwrap());
        if fails {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        let mut durable = self.durable.lock().unwrap();
        for (at, bytes) in pending {
            durable[at..at + bytes.len()].copy_from_slice(&bytes);
        }
        Ok(())
    }
    fn set_len(&self, _: u64) -> io::Result<()> {
        unreachable!()
    }
}

#[test]
fn what_is_written_back_during_a_flush_that_fails_is_written_again() {
    let (allocator, builder) = builder(64);
    let cache = builder.build();
    let ((asks, asked), (answers, fails)) = (channel(), channel());
    let disk = Arc::new(Forgetful {
        pending: Mutex::default(),
        durable: Mutex::new(vec![0; 2 * PAGE]),
        asks: Mutex::new(asks),
        fails: Mutex::new(fails),
    });
    let file = cache.open(disk.clone()).unwrap();
    file.write_at(&[1; PAGE], 0).unwrap();
    std::thread::scope(|scope| {
        let syncs = scope.spawn(|| file.sync());
        asked.recv().unwrap();
        file.write_at(&[2; PAGE], PAGE as u64).unwrap();
        assert_eq!(cache.write_back(PageCount::new(10)).get(), 1);
        answers.send(true).unwrap();
        assert!(syncs.join().unwrap().is_err());
    });
    answers.send(false).unwrap();
    file.sync().unwrap();
    assert!(disk.durable.lock().unwrap()[..PAGE] == [1; PAGE], "the page that the failed call wrote");
    assert!(disk.durable.lock().unwrap()[PAGE..] == [2; PAGE], "the page that was written meanwhile");
    file.close().unwrap();
    end(allocator, cache);
}

#[test]
fn a_file_whose_dirty_pages_fill_the_cache_can_be_cut() {
    let (allocator, builder) = builder(16);
    let cache = builder.dirty_limit(PageCount::new(16)).build();
    let file = cache.open(FakeBacking::new(Vec::new())).unwrap();
    file.write_at(&[1; 16 * PAGE], 0).unwrap();
    assert_eq!(cache.stats().dirty, 16);
    file.set_len(100).unwrap();
    file.set_len(200).unwrap();
    let mut read = [7; 300];
    assert_eq!(file.read_at(&mut read, 0).unwrap(), 200);
    assert!(read[..100] == [1; 100] && read[100..200] == [0; 100]);
    file.close().unwrap();
    end(allocator, cache);
}

/// A backing whose answer that it ends here arrives late.
struct LateEnd {
    is_at_end: Mutex<Sender<()>>,
    goes_on: Mutex<Receiver<()>>,
    inner: Arc<FakeBacking>,
}

impl Backing for LateEnd {
    fn len(&self) -> io::Result<u64> {
        self.inner.len()
    }
    fn read_vectored_at(&self, into: &mut [IoSliceMut<'_>], at: u64) -> io::Result<usize> {
        let read = self.inner.read_vectored_at(into, at)?;
        if read == 0 {
            self.is_at_end.lock().unwrap().send(()).unwrap();
            self.goes_on.lock().unwrap().recv().unwrap();
        }
        Ok(read)
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
}

#[test]
fn a_page_that_is_read_while_the_file_grows_is_no_error() {
    let (allocator, builder) = builder(64);
    let cache = builder.build();
    let ((says, is_at_end), (goes, waits)) = (channel(), channel());
    let (is_at_end_of, goes_on) = (Mutex::new(says), Mutex::new(waits));
    let inner = FakeBacking::new(vec![5; 5000]);
    let file = cache.open(LateEnd { is_at_end: is_at_end_of, goes_on, inner }).unwrap();
    file.advise(Advice::Random, 0..0);
    std::thread::scope(|scope| {
        let reader = file.reopen();
        reader.advise(Advice::Random, 0..0);
        let reads = scope.spawn(move || {
            let mut read = [7; 904];
            reader.read_at(&mut read, PAGE as u64).map(|n| (n, read))
        });
        is_at_end.recv().unwrap();
        file.write_at(&[6; PAGE], 2 * PAGE as u64).unwrap();
        file.sync().unwrap();
        goes.send(()).unwrap();
        assert_eq!(reads.join().unwrap().unwrap(), (904, [5; 904]));
    });
    file.close().unwrap();
    end(allocator, cache);
}

/// A backing that takes its time.
struct Slow(Arc<FakeBacking>, Duration);

impl Backing for Slow {
    fn len(&self) -> io::Result<u64> {
        self.0.len()
    }
    fn read_vectored_at(&self, into: &mut [IoSliceMut<'_>], at: u64) -> io::Result<usize> {
        std::thread::sleep(self.1);
        self.0.read_vectored_at(into, at)
    }
    fn write_vectored_at(&self, from: &[IoSlice<'_>], at: u64) -> io::Result<usize> {
        self.0.write_vectored_at(from, at)
    }
    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }
}

#[test]
fn streams_whose_windows_fill_the_cache_wait_for_each_other() {
    const STREAMS: usize = 24;
    let (allocator, builder) = builder(64);
    let cache = builder.build();
    let backing = Slow(FakeBacking::new(vec![7; STREAMS * 32 * PAGE]), Duration::from_millis(5));
    let file = cache.open(backing).unwrap();
    std::thread::scope(|scope| {
        for stream in 0..STREAMS {
            let file = file.reopen();
            scope.spawn(move || {
                for page in stream * 32..stream * 32 + 32 {
                    file.read_exact_at(&mut [0; PAGE], (page * PAGE) as u64).unwrap();
                }
            });
        }
    });
    file.close().unwrap();
    end(allocator, cache);
}

#[test]
fn a_writer_finds_memory_while_another_thread_waits_to_cut() {
    let (allocator, builder) = builder(8);
    let cache = builder.dirty_limit(PageCount::new(8)).build();
    let backing = FakeBacking::new(vec![1; PAGE]);
    let file = cache.open(backing.clone()).unwrap();
    backing.close();
    std::thread::scope(|scope| {
        let lends = scope.spawn(|| file.reopen().lend(0, PAGE).unwrap());
        backing.until_waiting(1);
        // Waits for the same read, and then needs a copy.
        let writes = scope.spawn(|| file.reopen().write_at(&[2; 8], 0));
        std::thread::sleep(Duration::from_millis(100));
        file.write_at(&[3; 7 * PAGE], PAGE as u64).unwrap();
        let cuts = scope.spawn(|| file.reopen().set_len(20 * PAGE as u64));
        std::thread::sleep(Duration::from_millis(100));
        backing.open();
        assert_eq!(writes.join().unwrap().map_err(|error| error.to_string()), Ok(8));
        cuts.join().unwrap().unwrap();
        assert!(lends.join().unwrap().slices().concat() == [1; PAGE]);
    });
    file.close().unwrap();
    end(allocator, cache);
}

#[test]
fn bytes_that_others_append_are_seen_though_the_last_page_is_lent() {
    let (allocator, builder) = builder(64);
    let cache = builder.build();
    let backing = FakeBacking::new(vec![1; 100]);
    let file = cache.open(backing.clone()).unwrap();
    let lent = file.lend(0, 100).unwrap();
    backing.write_vectored_at(&[IoSlice::new(&[2; 200])], 100).unwrap();
    assert_eq!(file.refresh().unwrap(), 300);
    let mut read = [7; 300];
    assert_eq!(file.read_at(&mut read, 0).unwrap(), 300);
    assert!(read[..100] == [1; 100] && lent.slices().concat() == [1; 100]);
    assert!(read[100..] == [2; 200], "{:?}", &read[96..104]);
    drop(lent);
    file.close().unwrap();
    end(allocator, cache);
}

/// A backing whose writes end when they are told to, and those of the first page fail.
struct Told(Arc<FakeBacking>, [Mutex<Receiver<()>>; 2], Mutex<Sender<()>>);

impl Backing for Told {
    fn len(&self) -> io::Result<u64> {
        self.0.len()
    }
    fn read_vectored_at(&self, into: &mut [IoSliceMut<'_>], at: u64) -> io::Result<usize> {
        self.0.read_vectored_at(into, at)
    }
    fn write_vectored_at(&self, from: &[IoSlice<'_>], at: u64) -> io::Result<usize> {
        self.2.lock().unwrap().send(()).unwrap();
        // Without a sender it goes on.
        _ = self.1[usize::from(at > 0)].lock().unwrap().recv();
        if at == 0 { Err(io::Error::from_raw_os_error(libc::EIO)) } else { self.0.write_vectored_at(from, at) }
    }
    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }
}

#[test]
fn sync_tells_of_a_write_that_fails_on_another_thread() {
    for turn in 0..1000 {
        let (allocator, builder) = builder(64);
        let cache = builder.build();
        let ((first, firsts), (second, seconds), (says, begun)) = (channel(), channel(), channel());
        let told = Told(FakeBacking::new(vec![0; 8 * PAGE]), [firsts, seconds].map(Mutex::new), Mutex::new(says));
        let file = cache.open(told).unwrap();
        file.write_at(&[1; 8], 0).unwrap();
        let synced = std::thread::scope(|scope| {
            scope.spawn(|| cache.write_back(PageCount::new(1)));
            begun.recv().unwrap();
            file.write_at(&[1; 8], 5 * PAGE as u64).unwrap();
            let syncs = scope.spawn(|| file.sync());
            begun.recv().unwrap();
            // The one is about to tell of its error, while the other looks for the last time.
            first.send(()).unwrap();
            (0..turn).for_each(|_| core::hint::spin_loop());
            second.send(()).unwrap();
            syncs.join().unwrap()
        });
        drop((first, second));
        drop(file);
        assert!(synced.is_err(), "in turn {turn} a page is not written, and nobody hears of it");
        end(allocator, cache);
    }
}

#[test]
fn after_a_refresh_that_fails_no_old_bytes_come_back() {
    let (allocator, builder) = builder(4);
    let cache = builder.build();
    let backing = FakeBacking::new(vec![1; 4 * PAGE]);
    let file = cache.open(backing.clone()).unwrap();
    let lent = file.lend(0, 4 * PAGE).unwrap();
    backing.set_len(100).unwrap();
    let before = file.len();
    if file.refresh().is_err() {
        assert!([100, before].contains(&file.len()));
    }
    drop(lent);
    file.refresh().unwrap();
    assert_eq!(file.len(), 100);
    file.set_len(4 * PAGE as u64).unwrap();
    let mut read = vec![7; 4 * PAGE];
    assert_eq!(file.read_at(&mut read, 0).unwrap(), 4 * PAGE);
    assert!(read[..100] == [1; 100] && read[100..].iter().all(|&byte| byte == 0));
    file.close().unwrap();
    end(allocator, cache);
}

#[test]
fn ranges_that_end_before_they_start_have_no_pages() {
    let (allocator, builder) = builder(64);
    let cache = builder.build();
    let file = cache.open(FakeBacking::new(vec![1; 8 * PAGE])).unwrap();
    file.read_exact_at(&mut [0; 8 * PAGE], 0).unwrap();
    let pages = PAGE as u64;
    #[expect(clippy::reversed_empty_ranges, reason = "a caller's mistake")]
    for range in [5 * pages..pages, u64::MAX..0, 7 * pages..3, u64::MAX..u64::MAX] {
        for advice in [Advice::WillNeed, Advice::DontNeed, Advice::Normal] {
            file.advise(advice, range.clone());
        }
        file.invalidate(range);
    }
    assert_eq!(cache.stats().pages, 8);
    file.close().unwrap();
    end(allocator, cache);
}

/// It panics where it says how much it wants at a time.
struct NoLargest(Arc<FakeBacking>);

impl Backing for NoLargest {
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
        Ok(())
    }
    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }
    fn largest(&self) -> usize {
        resume_unwind(Box::new("a backing's panic"))
    }
}

#[test]
fn a_panic_of_largest_fails_the_transfer_and_nothing_else() {
    let (allocator, builder) = builder(64);
    let cache = builder.build();
    let file = cache.open(NoLargest(FakeBacking::new(vec![1; 8 * PAGE]))).unwrap();
    assert!(file.read_at(&mut [0; 10], 0).is_err());
    file.write_at(&[2; PAGE], 0).unwrap();
    assert!(file.sync().is_err());
    assert!(file.close().is_err());
    end(allocator, cache);
}

/// A backing that is a file of the same cache.
struct Stacked(CachedFile);

impl Backing for Stacked {
    fn len(&self) -> io::Result<u64> {
        Ok(self.0.len())
    }
    fn read_vectored_at(&self, into: &mut [IoSliceMut<'_>], at: u64) -> io::Result<usize> {
        self.0.read_at(&mut into[0], at)
    }
    fn write_vectored_at(&self, from: &[IoSlice<'_>], at: u64) -> io::Result<usize> {
        self.0.write_at(&from[0], at)
    }
    fn sync(&self) -> io::Result<()> {
        self.0.sync()
    }
    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }
}

#[test]
fn a_backing_may_have_files_of_the_cache_that_evicts_it() {
    in_time(|| {
        let (allocator, builder) = builder(512);
        let cache = builder.build();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let _over = Over(&is_over);
            scope.spawn(|| {
                while !is_over.load(SeqCst) {
                    cache.evict(PageCount::new(512));
                }
            });
            let last = cache.open(FakeBacking::new(vec![1; PAGE])).unwrap();
            for _ in 0..5_000 {
                let inner = cache.open(FakeBacking::new(vec![1; 4 * PAGE])).unwrap();
                let outer = cache.open(Stacked(inner)).unwrap();
                outer.advise(Advice::Random, 0..0);
                outer.read_exact_at(&mut [0; 8], 0).unwrap();
                last.read_exact_at(&mut [0; 8], 0).unwrap();
            }
        });
        end(allocator, cache);
    });
}

/// A backing that allocates for its reads.
struct Bounced(Allocator, Mutex<Sender<()>>, Mutex<Receiver<()>>);

impl Backing for Bounced {
    fn len(&self) -> io::Result<u64> {
        Ok(PAGE as u64)
    }
    fn read_vectored_at(&self, into: &mut [IoSliceMut<'_>], _: u64) -> io::Result<usize> {
        self.1.lock().unwrap().send(()).unwrap();
        _ = self.2.lock().unwrap().recv();
        let _buffer = self.0.alloc_page(Gfp::KERNEL | Gfp::NORETRY | Gfp::NOWARN);
        Ok(into.iter_mut().map(|slice| (slice.fill(0), slice.len()).1).sum())
    }
    fn write_vectored_at(&self, _: &[IoSlice<'_>], _: u64) -> io::Result<usize> {
        unreachable!()
    }
    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
    fn set_len(&self, _: u64) -> io::Result<()> {
        unreachable!()
    }
}

/// The one thread of the cache reclaims, while writes wait for it.
#[test]
fn a_backing_that_needs_memory_to_read_does_not_wait_for_writes_behind_it() {
    in_time(|| {
        let allocator = arena(64).build().unwrap();
        let cache = PageCache::builder(&allocator).dirty_limit(PageCount::new(64)).threads(1).build();
        let ((says, begun), (goes, waits)) = (channel(), channel());
        let read = cache.open(Bounced(allocator.clone(), Mutex::new(says), Mutex::new(waits))).unwrap();
        let file = cache.open(FakeBacking::new(Vec::new())).unwrap();
        read.advise(Advice::WillNeed, 0..PAGE as u64);
        begun.recv().unwrap();
        for page in 0..8 {
            file.write_at(&[1; PAGE], page * 2 * PAGE as u64).unwrap();
        }
        std::thread::scope(|scope| {
            let syncs = scope.spawn(|| file.reopen().sync());
            until("the writes begin", || cache.stats().dirty == 0);
            file.write_at(&[2; PAGE], 0).unwrap();
            let mut rest = Vec::new();
            while let Ok(page) = allocator.alloc_page(Gfp::NOWAIT | Gfp::NOWARN) {
                rest.push(page);
            }
            goes.send(()).unwrap();
            syncs.join().unwrap().unwrap();
        });
        read.close().unwrap();
        file.close().unwrap();
        end(allocator, cache);
    });
}

/// Others than this cache write where the cut was: a page from before would hide that.
#[test]
fn a_cut_between_a_decision_to_read_and_the_read_leaves_no_page_behind_the_end() {
    let (allocator, builder) = builder(64);
    let to_cut = Arc::new(Mutex::new(None::<CachedFile>));
    let cuts = to_cut.clone();
    let cut = move || cuts.lock().unwrap().take().map(|file| file.set_len(PAGE as u64).unwrap());
    let cache = builder.trace(move |_| _ = cut()).build();
    let backing = FakeBacking::new([1; 3 * PAGE]);
    let file = cache.open(backing.clone()).unwrap();
    *to_cut.lock().unwrap() = Some(file.reopen());
    assert_eq!(file.read_at(&mut [0; PAGE], 2 * PAGE as u64).unwrap(), 0);
    assert_eq!(file.next_present(1, 9), 10);
    backing.write_vectored_at(&[IoSlice::new(&[2; 2 * PAGE])], PAGE as u64).unwrap();
    assert_eq!(file.refresh().unwrap(), 3 * PAGE as u64);
    let mut read = [0; 2 * PAGE];
    file.read_exact_at(&mut read, PAGE as u64).unwrap();
    assert!(read == [2; 2 * PAGE], "bytes from before the cut");
    file.close().unwrap();
    end(allocator, cache);
}
