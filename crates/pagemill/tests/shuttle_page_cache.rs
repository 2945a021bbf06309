//! A page cache's promises under a model checker (C8.4, C8.5): run with `RUSTFLAGS="--cfg shuttle"`. Reads and writes of
//! the backing end on a thread of their own, or on the caller's; each needs a page for that, as a driver's may. No wait
//! times out there, so that a lost wake-up, or two waits for each other, is a deadlock that shuttle reports.
use pagemill::{
    Allocator, Backing, CachedFile, Gfp, Memory, Mempool, Page, PageCache, PageCount, PageSource, ReadTransfer,
    Watermarks, WriteTransfer,
};
use shuttle::rand::{Rng, thread_rng};
use shuttle::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use shuttle::sync::{Arc, Condvar, Mutex, MutexGuard};
use shuttle::thread::{self, JoinHandle};
use std::cell::Cell;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};

const PAGE: usize = 4096;

/// So many different schedules of each model, of each kind.
/// The variable `PAGEMILL_SCHEDULES` names another number, for a hunt. It is the one for a pool's models, which take a
/// tenth of the time.
fn schedules() -> usize {
    let asked = std::env::var("PAGEMILL_SCHEDULES").ok().map(|n| n.parse().expect("PAGEMILL_SCHEDULES is a number"));
    asked.unwrap_or(20_000_usize).div_ceil(10)
}

fn check(model: impl Fn() + Send + Sync + 'static) {
    let model = std::sync::Arc::new(model);
    let random = model.clone();
    shuttle::check_random(move || random(), schedules());
    shuttle::check_pct(move || model(), schedules(), 3);
}

shuttle::thread_local! {
    /// Whether this thread makes a request that must cause no write.
    static MUST_NOT_WRITE: Cell<bool> = const { Cell::new(false) };
}

/// Makes a request with these flags, during which this thread must not write to a backing unless they allow it.
fn ask<T>(gfp: Gfp, request: impl FnOnce(Gfp) -> T) -> T {
    MUST_NOT_WRITE.with(|must_not| must_not.set(!(gfp.may_io() && gfp.may_fs())));
    let answer = request(gfp);
    MUST_NOT_WRITE.with(|must_not| must_not.set(false));
    answer
}

enum Transfer {
    Read(ReadTransfer),
    Write(WriteTransfer),
}

#[derive(Default)]
struct State {
    bytes: Vec<u8>,
    /// What it had at the last sync.
    durable: Vec<u8>,
    queue: Vec<Transfer>,
    is_over: bool,
    /// So many reads from now on fail.
    bad_reads: usize,
    /// The cache survives a panic of its backing, so what must not be is noted for the end.
    complaints: Vec<&'static str>,
}

/// A backing that leaves some transfers to the thread of its driver.
struct Disk {
    state: Mutex<State>,
    changed: Condvar,
    /// Each read and write needs a page.
    pool: Arc<Mempool<PageSource<Page>>>,
    has_driver: bool,
}

/// The pages that a disk has in reserve.
const RESERVE: usize = 1;

impl Disk {
    fn new(bytes: Vec<u8>, pool: Arc<Mempool<PageSource<Page>>>, has_driver: bool) -> Arc<Self> {
        let state = Mutex::new(State { bytes, ..State::default() });
        Arc::new(Self { state, changed: Condvar::new(), pool, has_driver })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Begins a transfer, or hands it back for blocking calls.
    fn begin(&self, transfer: Transfer) -> Option<Transfer> {
        let mut state = self.lock();
        if matches!(transfer, Transfer::Write(_)) && MUST_NOT_WRITE.with(Cell::get) {
            state.complaints.push("a request that must not cause a write caused one");
        }
        if !self.has_driver || thread_rng().gen_range(0..3) == 0 {
            return Some(transfer);
        }
        state.queue.push(transfer);
        drop(state);
        self.changed.notify_one();
        None
    }

    /// The driver: ends transfers, in any order.
    fn drive(&self) {
        loop {
            let mut state = self.lock();
            while state.queue.is_empty() && !state.is_over {
                state = self.changed.wait(state).unwrap();
            }
            if state.queue.is_empty() {
                return;
            }
            let next = thread_rng().gen_range(0..state.queue.len());
            let transfer = state.queue.swap_remove(next);
            drop(state);
            match transfer {
                Transfer::Read(mut read) => {
                    let at = read.at();
                    let moved = self.read_vectored_at(&mut read.slices(), at);
                    read.complete(moved);
                }
                Transfer::Write(write) => {
                    let moved = self.write_vectored_at(&write.slices(), write.at());
                    write.complete(moved);
                }
            }
        }
    }

    /// The state, for a transfer that has the page that it needs.
    fn transfer<T>(&self, work: impl FnOnce(&mut State) -> T) -> T {
        let before = MUST_NOT_WRITE.with(Cell::get);
        let page = ask(Gfp::NOIO, |gfp| self.pool.alloc(gfp).unwrap());
        MUST_NOT_WRITE.with(|must_not| must_not.set(before));
        let done = work(&mut self.lock());
        drop(page);
        done
    }
}

impl Backing for Disk {
    fn len(&self) -> io::Result<u64> {
        Ok(self.lock().bytes.len() as u64)
    }
    fn read_vectored_at(&self, into: &mut [IoSliceMut<'_>], at: u64) -> io::Result<usize> {
        self.transfer(|state| {
            if state.bad_reads > 0 {
                state.bad_reads -= 1;
                return Err(io::ErrorKind::TimedOut.into());
            }
            let mut rest = state.bytes.get(at as usize..).unwrap_or_default();
            rest.read_vectored(into)
        })
    }
    fn write_vectored_at(&self, from: &[IoSlice<'_>], at: u64) -> io::Result<usize> {
        self.transfer(|state| {
            let end = at as usize + from.iter().map(|slice| slice.len()).sum::<usize>();
            let len = state.bytes.len().max(end);
            state.bytes.resize(len, 0);
            (&mut state.bytes[at as usize..]).write_vectored(from)
        })
    }
    fn sync(&self) -> io::Result<()> {
        let mut state = self.lock();
        state.durable = state.bytes.clone();
        Ok(())
    }
    fn set_len(&self, len: u64) -> io::Result<()> {
        self.lock().bytes.resize(len as usize, 0);
        Ok(())
    }
    fn start_read(&self, read: ReadTransfer) -> Option<ReadTransfer> {
        match self.begin(Transfer::Read(read)) {
            Some(Transfer::Read(back)) => Some(back),
            _ => None,
        }
    }
    fn start_write(&self, write: WriteTransfer) -> Option<WriteTransfer> {
        match self.begin(Transfer::Write(write)) {
            Some(Transfer::Write(back)) => Some(back),
            _ => None,
        }
    }
}

/// A file in a cache, and its driver.
struct World {
    allocator: Allocator,
    cache: PageCache,
    disk: Arc<Disk>,
    file: CachedFile,
    driver: JoinHandle<()>,
}

impl World {
    /// Memory of so many pages, of which the cache may have `limit`, and a file with these bytes.
    fn new(memory: usize, limit: usize, bytes: Vec<u8>) -> Self {
        Self::with_marks(memory, Watermarks::NONE, limit, bytes)
    }

    fn with_marks(memory: usize, marks: Watermarks, limit: usize, bytes: Vec<u8>) -> Self {
        let memory = Memory::anonymous(memory).watermarks(marks);
        let allocator = Allocator::builder().memory(memory).cpus(1, || 0).huge_pages(false).build().unwrap();
        let disk = Disk::new(bytes, Arc::new(Mempool::pages(&allocator, RESERVE).unwrap()), true);
        // Writers write back, or leave it to others.
        let dirty = PageCount::new(thread_rng().gen_range(0..3));
        let builder = PageCache::builder(&allocator).limit(PageCount::new(limit)).dirty_limit(dirty);
        let cache = builder.window(PageCount::new(0)).build();
        let file = cache.open(disk.clone()).unwrap();
        let driver = thread::spawn({
            let disk = disk.clone();
            move || disk.drive()
        });
        Self { allocator, cache, disk, file, driver }
    }

    /// Ends it. All pages must have come back, and the backing must have the file's bytes, which this returns.
    fn end(self) -> Vec<u8> {
        let Self { allocator, cache, disk, file, driver } = self;
        let mut cached = vec![0; file.len() as usize];
        file.read_exact_at(&mut cached, 0).unwrap();
        file.sync().unwrap();
        assert_eq!(cache.stats().dirty, 0);
        file.close().unwrap();
        disk.lock().is_over = true;
        disk.changed.notify_one();
        // It may still have the pages of the last transfer.
        driver.join().unwrap();
        assert_eq!(cache.stats().pages, 0, "pages outlive their file");
        drop(cache);
        let Disk { state, pool, .. } = Arc::into_inner(disk).unwrap();
        drop(pool);
        allocator.drain();
        assert_eq!(allocator.stats().free, allocator.managed_pages().get() as u64, "pages are missing");
        let state = state.into_inner().unwrap();
        assert_eq!(state.complaints, [""; 0]);
        assert!(state.bytes == cached, "the backing has other bytes");
        cached
    }

    fn read(&self, page: usize) -> Vec<u8> {
        let mut bytes = vec![0; PAGE];
        let read = self.file.read_at(&mut bytes, (page * PAGE) as u64).unwrap();
        bytes.truncate(read);
        bytes
    }

    fn write(&self, bytes: &[u8], at: usize) {
        assert_eq!(self.file.write_at(bytes, at as u64).unwrap(), bytes.len());
    }

    /// Asks for pages, with flags of each kind, until there are none. Then all go back.
    fn ask_for_all(&self) {
        for gfp in [Gfp::KERNEL, Gfp::NOFS, Gfp::NOIO] {
            let request = |gfp| self.allocator.alloc_page(gfp | Gfp::NORETRY | Gfp::NOWARN);
            let held: Vec<_> = std::iter::from_fn(|| ask(gfp, request).ok()).collect();
            drop(held);
        }
    }
}

/// Runs these at once, and waits for them.
fn at_once<const N: usize>(threads: [&(dyn Fn() + Sync); N]) {
    thread::scope(|scope| {
        for thread in threads {
            scope.spawn(thread);
        }
    });
}

/// The bytes of some pages, each filled with its number and a version.
fn pages(n: usize, version: u8) -> Vec<u8> {
    (0..n).flat_map(|page| page_of(page, version)).collect()
}
fn page_of(page: usize, version: u8) -> [u8; PAGE] {
    [page as u8 * 16 + version; PAGE]
}

/// The version of a page whose bytes are all the same.
fn version_of(page: usize, bytes: &[u8]) -> u8 {
    assert!(bytes.len() == PAGE && bytes.iter().all(|&byte| byte == bytes[0]), "a torn page");
    bytes[0] - page as u8 * 16
}

#[test]
fn reclaim_with_write_back_ends() {
    check(|| {
        let world = World::new(6, 3, pages(4, 0));
        let written = [(0, 2), (1, 1), (2, 1), (3, 0)].map(|(page, version)| page_of(page, version)).concat();
        let writes = || {
            for (page, version) in [(0, 1), (1, 1), (0, 2), (2, 1)] {
                world.write(&page_of(page, version), page * PAGE);
            }
            world.file.sync().unwrap();
            assert!(world.disk.lock().durable == written, "a sync has not waited for a write");
        };
        let reads = || {
            let mut newest = [0; 4];
            for page in [3, 0, 1, 0, 2] {
                let version = version_of(page, &world.read(page));
                assert!(version >= newest[page], "an old page");
                newest[page] = version;
            }
        };
        at_once([&writes, &reads, &|| world.ask_for_all()]);
        assert!(world.end() == written);
    });
}

/// Another thread, which reclaims for example, begins to write a page as it is synced.
#[test]
fn a_sync_waits_for_writes_that_others_begin() {
    check(|| {
        let world = World::new(6, 3, pages(1, 0));
        world.write(&pages(1, 1), 0);
        let syncs = || {
            world.file.sync().unwrap();
            assert!(world.disk.lock().durable == pages(1, 1), "a sync has not waited for a write");
        };
        at_once([&syncs, &|| _ = world.cache.write_back(PageCount::new(1))]);
        assert!(world.end() == pages(1, 1));
    });
}

/// The last opener of a file closes it while reclaim writes and evicts its pages.
#[test]
fn a_file_ends_beside_reclaim() {
    check(|| {
        let world = World::new(6, 3, pages(2, 0));
        let other = Disk::new(pages(1, 0), world.disk.pool.clone(), false);
        let file = Mutex::new(Some(world.cache.open(other.clone()).unwrap()));
        let ends = || {
            let file = file.lock().unwrap().take().unwrap();
            assert_eq!(file.write_at(&page_of(0, 1), 0).unwrap(), PAGE);
            file.close().unwrap();
        };
        let uses = || {
            world.write(&page_of(1, 1), PAGE);
            version_of(0, &world.read(0));
        };
        at_once([&ends, &uses, &|| world.ask_for_all()]);
        let bytes = Arc::into_inner(other).unwrap().state.into_inner().unwrap().bytes;
        assert!(bytes == page_of(0, 1), "what was written is lost");
        assert!(world.end() == [page_of(0, 0), page_of(1, 1)].as_flattened());
    });
}

/// Nothing else brings the pages that the requests wait for: the cache has them all, and some are dirty.
#[test]
fn requests_that_wait_get_what_write_back_frees() {
    check(|| {
        let world = World::with_marks(6, Watermarks::above(1), 4, pages(4, 0));
        let is_over = AtomicBool::new(false);
        let request = || {
            let gfp = [Gfp::KERNEL, Gfp::NOFS, Gfp::NOIO][thread_rng().gen_range(0..3)];
            let held = [(); 2].map(|()| ask(gfp, |gfp| world.allocator.alloc_page(gfp).unwrap()));
            drop(held);
        };
        // What the background thread does, which no clock wakes here.
        let reclaims = || {
            while !is_over.load(SeqCst) {
                world.allocator.reclaim_step();
                thread::yield_now();
            }
        };
        let uses = || {
            for page in 0..4 {
                world.write(&page_of(page, 1), page * PAGE);
                world.read(3 - page);
            }
        };
        thread::scope(|scope| {
            let reclaimer = scope.spawn(reclaims);
            at_once([&request, &uses]);
            is_over.store(true, SeqCst);
            reclaimer.join().unwrap();
        });
        assert!(world.end() == pages(4, 1));
    });
}

/// Readers fill the cache: each waits for the others' reads to end.
#[test]
fn readers_that_lack_room_wait_for_each_other() {
    check(|| {
        let world = World::new(4, 1, pages(3, 0));
        let reads = |order: [usize; 2]| {
            for page in order {
                assert_eq!(version_of(page, &world.read(page)), 0);
            }
        };
        at_once([&|| reads([0, 1]), &|| reads([1, 2]), &|| reads([2, 0])]);
        assert!(world.end() == pages(3, 0));
    });
}

/// The pages of a file are cut off while they are read, written back and evicted. What is behind a new end is zeros.
#[test]
fn cuts_end_beside_readers_write_back_and_reclaim() {
    const KEPT: usize = PAGE + 100;
    check(|| {
        let world = World::new(6, 3, pages(3, 0));
        world.write(&[1; 2 * PAGE], PAGE);
        let cut = || {
            world.file.set_len(KEPT as u64).unwrap();
            world.file.set_len(3 * PAGE as u64).unwrap();
            let bytes = [world.read(1), world.read(2)].concat();
            assert!(bytes[..100] == [1; 100] && bytes[100..] == [0; 2 * PAGE - 100], "bytes from before the cut");
        };
        let reads = || [1, 2, 2].into_iter().for_each(|page| assert!(world.read(page).iter().all(|&byte| byte <= 1)));
        let syncs = || {
            world.file.sync().unwrap();
            world.cache.evict(PageCount::new(1));
        };
        at_once([&cut, &reads, &syncs]);
        let mut expected = pages(3, 0);
        expected[PAGE..].fill(0);
        expected[PAGE..KEPT].fill(1);
        assert!(world.end() == expected);
    });
}

/// The page is read in, or is there. The reader comes before the cut or after it.
#[test]
fn a_read_beside_a_cut_shows_nothing_from_behind_the_end() {
    check(|| {
        let world = World::new(6, 3, pages(2, 1));
        let reads = || {
            for _ in 0..2 {
                let read = world.read(1);
                assert!(read.iter().all(|&byte| byte == 17), "bytes that the file never had");
                assert!([100, PAGE].contains(&read.len()));
            }
        };
        at_once([&reads, &|| world.file.set_len(PAGE as u64 + 100).unwrap(), &|| world.ask_for_all()]);
        assert!(world.end() == pages(2, 1)[..PAGE + 100]);
    });
}

/// A page that is lent keeps its bytes while it is written to, let go and evicted.
#[test]
fn lent_pages_keep_their_bytes() {
    check(|| {
        let world = World::new(6, 3, pages(2, 0));
        let lends = || {
            for page in [0, 1, 0] {
                let lent = world.file.lend((page * PAGE) as u64, PAGE).unwrap();
                let before = lent.slices().concat();
                version_of(page, &before);
                thread::yield_now();
                assert!(lent.slices().concat() == before, "its bytes changed");
            }
        };
        let writes = || world.write(&page_of(0, 1), 0);
        let lets_go = || {
            world.file.invalidate(0..2 * PAGE as u64);
            // Whoever gets its page puts other bytes there.
            let page = world.allocator.alloc_page(Gfp::NOWAIT | Gfp::NOWARN);
            page.into_iter().for_each(|mut page| page.fill(0xff));
            world.cache.evict(PageCount::new(2));
        };
        at_once([&lends, &writes, &lets_go]);
        assert!(world.end() == [page_of(0, 1), page_of(1, 0)].as_flattened());
    });
}

/// Two write to the halves of a page while it is read, written back and let go.
#[test]
fn two_writers_of_a_page_lose_nothing() {
    const HALF: usize = PAGE / 2;
    check(|| {
        let world = World::new(6, 3, vec![0; PAGE]);
        let reads = || {
            for _ in 0..2 {
                let bytes = world.read(0);
                assert!(bytes.chunks(HALF).all(|half| half.iter().all(|&byte| byte == half[0])), "a torn page");
            }
            world.file.invalidate(0..PAGE as u64);
        };
        let syncs = || world.file.sync().unwrap();
        at_once([&|| world.write(&[1; HALF], 0), &|| world.write(&[2; HALF], HALF), &reads, &syncs]);
        assert!(world.end() == [[1; HALF], [2; HALF]].as_flattened());
    });
}

/// Two write to a page behind the file's end, which is written back and let go as soon as it is there.
#[test]
fn two_who_lengthen_a_file_lose_nothing() {
    check(|| {
        let world = World::new(6, 3, Vec::new());
        let leaves = || {
            for _ in 0..2 {
                world.file.sync().unwrap();
                world.file.invalidate(0..PAGE as u64);
            }
        };
        at_once([&|| world.write(&[1; 10], 0), &|| world.write(&[2; 10], 10), &leaves]);
        assert!(world.end() == [[1; 10], [2; 10]].as_flattened());
    });
}

/// Threads wait for a page whose read fails, and it is read again.
#[test]
fn readers_of_a_page_that_cannot_be_read_all_hear_of_it() {
    check(|| {
        let world = World::new(6, 3, pages(1, 1));
        world.disk.lock().bad_reads = 1;
        let errors = AtomicUsize::new(0);
        let reads = || {
            let mut bytes = [0; PAGE];
            match world.file.read_at(&mut bytes, 0) {
                Ok(read) => assert_eq!(version_of(0, &bytes[..read]), 1),
                Err(error) => {
                    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
                    errors.fetch_add(1, SeqCst);
                }
            }
        };
        at_once([&reads, &reads, &reads]);
        assert!(errors.load(SeqCst) > 0);
        assert!(world.end() == pages(1, 1));
    });
}
