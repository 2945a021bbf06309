//! The contents of files against plain vectors of bytes, over disks that fail, and forget at a power cut what was not flushed.
use super::disk::Inner;
use super::{Data, FileKey, LOOK_EVERY, PAGE_SIZE, Payload, Pending, STREAM, Stable};
use pagemill::{Allocator, Backing, Bulk, Page, PageCache, PageCount};
use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, SystemTime};

/// A file as it is after a power cut, and how its disk fails.
#[derive(Default)]
struct Fake {
    durable: Mutex<Vec<u8>>,
    rng: AtomicU64,
    /// So many of a thousand requests fail, and flushes.
    chance: AtomicU64,
    /// So many of the next writes or flushes fail.
    writes: AtomicUsize,
    flushes: AtomicUsize,
    /// A flush waits here as it begins, and again.
    gate: Mutex<Option<Arc<Barrier>>>,
}

impl Fake {
    fn fails(&self, next: &AtomicUsize) -> io::Result<()> {
        let is_next = next.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)).is_ok();
        let is_chance = random(&self.rng, 1000) < self.chance.load(SeqCst);
        if is_next || is_chance { Err(io::Error::from_raw_os_error(libc::EIO)) } else { Ok(()) }
    }
}

/// A number below `n`.
fn random(rng: &AtomicU64, n: u64) -> u64 {
    let next = |x: u64| Some(x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407));
    (rng.fetch_update(SeqCst, SeqCst, next).unwrap() >> 33) % n
}

struct FakeDisk(Arc<Fake>, File);

impl Backing for FakeDisk {
    fn len(&self) -> io::Result<u64> {
        Ok(self.1.metadata()?.size())
    }
    fn read_vectored_at(&self, into: &mut [IoSliceMut<'_>], at: u64) -> io::Result<usize> {
        self.0.fails(&AtomicUsize::new(0))?;
        into.first_mut().map_or(Ok(0), |into| self.1.read_at(into, at))
    }
    fn write_vectored_at(&self, from: &[IoSlice<'_>], at: u64) -> io::Result<usize> {
        self.0.fails(&self.0.writes)?;
        from.first().map_or(Ok(0), |from| self.1.write_at(from, at))
    }
    fn sync(&self) -> io::Result<()> {
        let gate = self.0.gate.lock().unwrap().clone();
        if let Some(gate) = gate {
            gate.wait();
            gate.wait();
        }
        let mut durable = self.0.durable.lock().unwrap();
        let mut bytes = vec![0; self.1.metadata()?.size() as usize];
        self.1.read_exact_at(&mut bytes, 0)?;
        if let Err(error) = self.0.fails(&self.0.flushes) {
            // Every other page that was not flushed is gone.
            for (i, (old, new)) in durable.chunks(PAGE_SIZE).zip(bytes.chunks(PAGE_SIZE)).enumerate() {
                if i % 2 == 0 && old.len() == new.len() {
                    self.1.write_all_at(old, (i * PAGE_SIZE) as u64)?;
                }
            }
            return Err(error);
        }
        *durable = bytes;
        Ok(())
    }
    fn set_len(&self, len: u64) -> io::Result<()> {
        self.1.set_len(len)?;
        self.0.durable.lock().unwrap().resize(len as usize, 0);
        Ok(())
    }
}

/// A directory with files, and a `Data` over them.
struct Set {
    dir: tempfile::TempDir,
    allocator: Allocator,
    cache: PageCache,
    fakes: Arc<Mutex<HashMap<u64, Arc<Fake>>>>,
    data: Data,
}

impl Set {
    /// Over real files.
    fn real(files: usize, most: usize, look_every: Duration) -> Self {
        Self::new(files, 512, most, look_every, false)
    }

    fn new(files: usize, pages: usize, most: usize, look_every: Duration, is_fake: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let allocator = Allocator::builder().pages(pages + 256).build().unwrap();
        let cache = PageCache::builder(&allocator).limit(PageCount::new(pages)).threads(1).build();
        let fakes = Arc::new(Mutex::new(HashMap::<u64, Arc<Fake>>::new()));
        for file in 0..files {
            File::create(dir.path().join(file.to_string())).unwrap();
        }
        let shared = fakes.clone();
        let fake = move |file: &File| {
            let fake = shared.lock().unwrap().entry(file.metadata()?.ino()).or_default().clone();
            Ok(Inner::Fake(Box::new(FakeDisk(fake, file.try_clone()?))))
        };
        let real = |file: &File| Ok(Inner::File(pagemill::FileBacking::from_file(file.try_clone()?)?));
        let data = match is_fake {
            true => Data::with(cache.clone(), most, look_every, Box::new(fake)),
            false => Data::with(cache.clone(), most, look_every, Box::new(real)),
        };
        Self { dir, allocator, cache, fakes, data }
    }

    fn path(&self, file: usize) -> PathBuf {
        self.dir.path().join(file.to_string())
    }
    fn key(&self, file: usize) -> FileKey {
        key_of(&self.path(file))
    }
    fn fake(&self, file: usize) -> Arc<Fake> {
        self.fakes.lock().unwrap().entry(self.key(file).inode).or_default().clone()
    }
    fn on_disk(&self, file: usize) -> Vec<u8> {
        std::fs::read(self.path(file)).unwrap()
    }

    fn write(&self, file: usize, at: usize, bytes: &[u8], stable: Stable) -> io::Result<usize> {
        let mut pages = self.pages(bytes);
        let mut payload = Payload { pages: &mut pages, len: bytes.len() };
        let written = self.data.write(&self.key(file), open(&self.path(file)), at as u64, &mut payload, stable)?;
        assert!(written.committed >= stable);
        Ok(written.count as usize)
    }
    fn pages(&self, bytes: &[u8]) -> Vec<Option<Page>> {
        let mut pages: Vec<Option<Page>> = (0..bytes.len().div_ceil(PAGE_SIZE)).map(|_| None).collect();
        self.allocator.alloc_pages_bulk_array(Bulk::exact(pages.len()), &mut pages).unwrap();
        for (page, bytes) in pages.iter_mut().flatten().zip(bytes.chunks(PAGE_SIZE)) {
            page.fill(0xee);
            page[..bytes.len()].copy_from_slice(bytes);
        }
        pages
    }
    fn read(&self, file: usize, at: usize, len: usize) -> io::Result<(Vec<u8>, bool)> {
        let read = self.data.read(&self.key(file), open(&self.path(file)), at as u64, len as u32)?;
        Ok((read.lent.slices().concat(), read.is_end))
    }
    fn commit(&self, file: usize) -> io::Result<()> {
        self.data.commit(&self.key(file), open(&self.path(file)), 0, 0)
    }
    fn set_len(&self, file: usize, len: usize) -> io::Result<()> {
        self.data.set_len(&self.key(file), open(&self.path(file)), len as u64)
    }
    fn pending(&self, file: usize) -> Option<Pending> {
        let seen = rustix::fs::stat(self.path(file)).unwrap();
        self.data.attributes(&self.key(file), &seen)
    }
}

fn key_of(path: &Path) -> FileKey {
    let there = std::fs::metadata(path).unwrap();
    FileKey { device: there.dev(), inode: there.ino(), generation: 0 }
}

fn open(path: &Path) -> impl FnOnce() -> io::Result<OwnedFd> {
    let path = path.to_owned();
    move || {
        let writing = OpenOptions::new().read(true).write(true).open(&path);
        writing.or_else(|_| File::open(&path)).map(OwnedFd::from)
    }
}

const FILE_MAX: u64 = 24 * PAGE_SIZE as u64;

/// A file as it should be, what was promised to be on its disk, and which bytes changed since.
#[derive(Default)]
struct Model {
    bytes: Vec<u8>,
    promised: Vec<u8>,
    is_touched: Vec<bool>,
}

impl Model {
    fn write(&mut self, at: usize, bytes: &[u8]) {
        let len = self.bytes.len().max(at + bytes.len());
        self.set_len(len);
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        self.is_touched[at..at + bytes.len()].fill(true);
    }
    fn set_len(&mut self, len: usize) {
        self.bytes.resize(len, 0);
        self.is_touched.resize(len, true);
    }
    fn promise(&mut self, durable: &[u8], what: &str) {
        assert!(durable == self.bytes, "{what}: promised what is not there");
        self.promised.clone_from(&self.bytes);
        self.is_touched.fill(false);
    }
}

/// What a run does by chance.
struct Run {
    seed: u64,
    /// Files that may be open.
    most: usize,
    /// Thousandths of requests that fail.
    chance: u64,
}

#[expect(clippy::too_many_lines, reason = "a step of each kind, one after another")]
fn check(run: &Run) {
    const FILES: usize = 4;
    let seed = run.seed;
    let rng = &AtomicU64::new(seed * 977 + 13);
    let below = |n: u64| random(rng, n) as usize;
    // Where disks fail, no page leaves: what is evicted before a flush that fails is lost, and the verifier says so.
    let set = Set::new(FILES, if run.chance > 0 { 400 } else { 64 }, run.most, Duration::ZERO, true);
    let mut models: Vec<Model> = (0..FILES).map(|_| Model::default()).collect();
    for file in 0..FILES {
        set.fake(file).chance.store(run.chance, SeqCst);
        set.fake(file).rng.store(seed + file as u64, SeqCst);
    }
    for step in 0..400 {
        let what = &format!("step {step} of {seed}");
        let file = below(FILES as u64);
        let (fake, model) = (set.fake(file), &mut models[file]);
        let at = if below(2) == 0 { below(FILE_MAX) / PAGE_SIZE * PAGE_SIZE } else { below(FILE_MAX) };
        let len = match below(8) {
            // What goes to the file at once and leaves the cache is lost if the flush fails.
            0 if run.chance == 0 => STREAM + below(FILE_MAX / 4),
            0..4 => below(6) * PAGE_SIZE,
            _ => below(3 * PAGE_SIZE as u64),
        };
        let before = set.data.verifier();
        match below(12) {
            0..4 => match set.read(file, at, len) {
                Ok((read, is_end)) => {
                    let wanted = model.bytes.get(at..model.bytes.len().min(at + len)).unwrap_or_default();
                    assert!(read == wanted, "{what}: {len} at {at}");
                    assert_eq!(is_end, at + read.len() >= model.bytes.len(), "{what}");
                }
                Err(error) => assert!(run.chance > 0, "{what}: {error}"),
            },
            4..8 => {
                let new: Vec<u8> = (0..len).map(|_| below(256) as u8).collect();
                let stable = [Stable::Unstable, Stable::Unstable, Stable::DataSync, Stable::FileSync][below(4)];
                match set.write(file, at, &new, stable) {
                    Ok(n) => {
                        assert!(n == len || run.chance > 0, "{what}: short");
                        if n > 0 {
                            model.write(at, &new[..n]);
                        }
                        if stable != Stable::Unstable {
                            model.promise(&fake.durable.lock().unwrap(), what);
                        }
                    }
                    Err(error) => {
                        assert!(run.chance > 0, "{what}: {error}");
                        assert!(stable == Stable::Unstable || set.data.verifier() != before || len > 0, "{what}");
                        // The write or its flush: what is there now is a part of the new bytes, whole pages of them.
                        fake.chance.store(0, SeqCst);
                        let (now, _) = set.read(file, 0, FILE_MAX as usize * 2).unwrap();
                        let is_end = |n: &usize| *n == len || (at + n).is_multiple_of(PAGE_SIZE);
                        let with = |n: usize| {
                            let mut bytes = model.bytes.clone();
                            bytes.resize(bytes.len().max(if n > 0 { at + n } else { 0 }), 0);
                            if n > 0 {
                                bytes[at..at + n].copy_from_slice(&new[..n]);
                            }
                            bytes
                        };
                        let written = (0..=len).filter(|n| *n == 0 || is_end(n)).find(|&n| with(n) == now);
                        let written = written.unwrap_or_else(|| panic!("{what}: neither old nor new"));
                        if written > 0 {
                            model.write(at, &new[..written]);
                        }
                        fake.chance.store(run.chance, SeqCst);
                    }
                }
            }
            8 => {
                let len = below(FILE_MAX);
                if set.set_len(file, len).is_ok() {
                    model.set_len(len);
                    model.promise(&fake.durable.lock().unwrap(), what);
                } else {
                    assert!(run.chance > 0, "{what}");
                    // Cut, or not.
                    fake.chance.store(0, SeqCst);
                    let (now, _) = set.read(file, 0, FILE_MAX as usize * 2).unwrap();
                    model.set_len(now.len());
                    assert!(model.bytes == now, "{what}");
                    fake.chance.store(run.chance, SeqCst);
                }
            }
            9 => match set.commit(file) {
                Ok(()) => {
                    model.promise(&fake.durable.lock().unwrap(), what);
                    assert_eq!(set.pending(file), None, "{what}");
                }
                Err(_) => assert!(run.chance > 0 && set.data.verifier() != before, "{what}"),
            },
            // A file that leaves while its disk fails loses what was not promised: see below.
            10 if run.chance == 0 => set.data.forget(&set.key(file)),
            _ => _ = set.cache.write_back(PageCount::new(8)),
        }
        let len = set.pending(file).map_or_else(|| set.on_disk(file).len() as u64, |pending| pending.len);
        assert_eq!(len, models[file].bytes.len() as u64, "{what}");
        assert!(set.data.table.len() <= run.most, "{what}");
    }
    // The power fails: nothing more is written.
    for (file, model) in models.iter().enumerate() {
        let durable = set.fake(file).durable.lock().unwrap().clone();
        for (at, &byte) in model.promised.iter().enumerate() {
            if model.is_touched.get(at) == Some(&false) {
                assert_eq!(durable.get(at), Some(&byte), "{seed}: byte {at} of {file} was promised");
            }
        }
    }
}

#[test]
fn files_have_the_bytes_of_plain_ones() {
    for seed in 0..20 {
        check(&Run { seed, most: 8, chance: 0 });
    }
}

#[test]
fn files_that_leave_a_small_table_have_them_too() {
    for seed in 100..120 {
        check(&Run { seed, most: 2, chance: 0 });
    }
}

#[test]
fn what_was_promised_is_there_where_disks_fail_and_forget() {
    for seed in 200..230 {
        check(&Run { seed, most: 8, chance: 60 });
    }
}

#[test]
fn whole_pages_move_in_and_others_are_copied() {
    let set = Set::real(1, 8, LOOK_EVERY);
    for (at, len, moved) in [(0, 3 * PAGE_SIZE, 3), (8192, PAGE_SIZE + 10, 2), (100, 2 * PAGE_SIZE, 0), (0, 100, 0)] {
        let mut pages = set.pages(&vec![7; len]);
        let given = pages.len();
        let mut payload = Payload { pages: &mut pages, len };
        let written = set.data.write(&set.key(0), open(&set.path(0)), at, &mut payload, Stable::Unstable).unwrap();
        assert_eq!((written.count as usize, written.committed), (len, Stable::Unstable));
        assert_eq!(given - pages.iter().flatten().count(), moved, "{len} at {at}");
    }
    assert_eq!(set.read(0, 0, 1 << 20).unwrap(), (vec![7; 3 * PAGE_SIZE + 10], true));
}

#[test]
fn an_error_is_told_once_and_the_verifier_changes() {
    let set = Set::new(2, 512, 8, LOOK_EVERY, true);
    let fake = set.fake(0);
    let mut verifier = set.data.verifier();
    assert_eq!(set.data.verifier(), verifier);
    assert_ne!(Set::real(0, 8, LOOK_EVERY).data.verifier(), verifier, "a restart");
    for (writes, flushes) in [(1, 0), (0, 1)] {
        set.write(0, 0, &[7; 5000], Stable::Unstable).unwrap();
        fake.writes.store(writes, SeqCst);
        fake.flushes.store(flushes, SeqCst);
        // Written back beside the clients, so that nobody hears of it at that moment.
        set.cache.write_back(PageCount::new(512));
        assert_eq!(set.commit(0).unwrap_err().raw_os_error(), Some(libc::EIO));
        assert_ne!(set.data.verifier(), verifier);
        verifier = set.data.verifier();
        assert!(set.pending(0).is_some());
        set.commit(0).unwrap();
        assert_eq!((set.data.verifier(), set.pending(0)), (verifier, None));
        assert!(*fake.durable.lock().unwrap() == [7; 5000]);
    }
    fake.flushes.store(1, SeqCst);
    assert_eq!(set.write(0, 0, &[8; 100], Stable::FileSync).unwrap_err().raw_os_error(), Some(libc::EIO));
    assert_ne!(set.data.verifier(), verifier);
    assert_eq!(set.write(0, 50, &[9; 100], Stable::FileSync).unwrap(), 100);
    assert!(*fake.durable.lock().unwrap() == [vec![8; 50], vec![9; 100], vec![7; 4850]].concat());
}

#[test]
fn a_write_of_a_stream_goes_to_the_file_at_once_and_is_promised_by_its_commit_alone() {
    let set = Set::new(1, 512, 8, LOOK_EVERY, true);
    let fake = set.fake(0);
    set.write(0, 0, &[6; STREAM - 1], Stable::Unstable).unwrap();
    assert_eq!((set.on_disk(0).len(), set.cache.stats().dirty), (0, 16));
    set.commit(0).unwrap();
    let (verifier, cached) = (set.data.verifier(), set.cache.stats().pages);
    set.write(0, STREAM, &[7; STREAM], Stable::Unstable).unwrap();
    assert!(set.on_disk(0)[STREAM..] == [7; STREAM]);
    assert_eq!((set.cache.stats().dirty, set.cache.stats().pages), (0, cached));
    assert_eq!(set.pending(0).unwrap().len, 2 * STREAM as u64);
    assert_eq!(set.read(0, STREAM, STREAM).unwrap(), (vec![7; STREAM], true));
    // What left the cache cannot be written again, so clients are told to send it again. What was read since can be.
    fake.flushes.store(1, SeqCst);
    set.commit(0).unwrap_err();
    assert_ne!(set.data.verifier(), verifier);
    // A disk that takes nothing keeps nothing from the cache.
    fake.writes.store(1, SeqCst);
    set.write(0, 0, &[8; STREAM], Stable::Unstable).unwrap();
    assert_eq!(set.cache.stats().dirty, 32);
    assert_eq!(set.read(0, 0, STREAM).unwrap().0, [8; STREAM]);
    set.commit(0).unwrap_err();
    set.write(0, STREAM, &[9; STREAM], Stable::Unstable).unwrap();
    set.commit(0).unwrap();
    assert!(*fake.durable.lock().unwrap() == [[8; STREAM], [9; STREAM]].concat());
}

#[test]
fn data_that_are_lost_as_a_file_leaves_change_the_verifier() {
    let set = Set::new(2, 512, 1, LOOK_EVERY, true);
    set.write(0, 0, &[7; 5000], Stable::Unstable).unwrap();
    let verifier = set.data.verifier();
    set.fake(0).writes.store(usize::MAX, SeqCst);
    set.read(1, 0, 10).unwrap();
    assert_eq!(set.data.table.len(), 1);
    assert_ne!(set.data.verifier(), verifier);
}

#[test]
fn no_more_files_are_open_than_the_table_has_places() {
    let set = Set::real(100, 4, LOOK_EVERY);
    let under = format!("{}/", set.dir.path().display());
    let is_under = |path: PathBuf| path.to_string_lossy().starts_with(&under);
    let links =
        || std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok());
    for file in 0..100 {
        set.write(file, 10, &[file as u8; 5000], Stable::Unstable).unwrap();
        assert!(set.data.table.len() <= 4);
        assert!(links().filter(|path| is_under(path.clone())).count() <= 8, "two descriptors a file");
    }
    // What has left is written, and what is used stays.
    for file in 0..96 {
        assert!(set.on_disk(file)[10..] == [file as u8; 5000], "{file}");
        assert_eq!(set.pending(file), None);
    }
    set.read(96, 0, 1).unwrap();
    set.read(0, 0, 1).unwrap();
    assert!(set.pending(96).is_some() && set.pending(97).is_none());
    set.data.forget(&set.key(96));
    assert!(set.on_disk(96)[10..] == [96; 5000]);
}

#[test]
fn attributes_are_those_of_the_last_write_before_and_after_write_back() {
    let set = Set::real(1, 8, Duration::ZERO);
    let on_disk = || std::fs::metadata(set.path(0)).unwrap();
    assert_eq!(set.pending(0), None);
    let before = SystemTime::now();
    set.write(0, 100, &[7; 5000], Stable::Unstable).unwrap();
    let pending = set.pending(0).unwrap();
    assert_eq!((pending.len, on_disk().size()), (5100, 0));
    assert!(pending.modified >= before && pending.modified <= SystemTime::now());
    // Written back, but not by a COMMIT: the file's time has moved, and clients do not see it.
    std::thread::sleep(Duration::from_millis(20));
    set.cache.write_back(PageCount::new(512));
    assert_eq!((on_disk().size(), set.pending(0)), (5100, Some(pending)));
    assert!(on_disk().modified().unwrap() > pending.modified);
    set.commit(0).unwrap();
    assert_eq!(set.pending(0), None);
    let moved = on_disk().modified().unwrap().max(pending.modified).duration_since(pending.modified).unwrap();
    assert!(moved == Duration::ZERO, "the file's time moved by {moved:?}");
    // A time that a client sets stays.
    set.write(0, 0, &[8], Stable::Unstable).unwrap();
    set.data.settle(&set.key(0)).unwrap();
    let file = File::options().write(true).open(set.path(0)).unwrap();
    file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
    set.commit(0).unwrap();
    assert_eq!((on_disk().modified().unwrap(), set.pending(0)), (SystemTime::UNIX_EPOCH, None));
    // A change of the attributes by this server is none of the contents.
    set.read(0, 0, 10).unwrap();
    std::fs::set_permissions(set.path(0), std::fs::Permissions::from_mode(0o640)).unwrap();
    set.data.changed_here(&set.key(0));
    let reads = set.cache.stats().read;
    set.read(0, 0, 10).unwrap();
    assert_eq!(set.cache.stats().read, reads);
    // A cut is durable at once.
    set.write(0, 0, &[9], Stable::Unstable).unwrap();
    set.set_len(0, 50).unwrap();
    assert_eq!((set.on_disk(0).len(), set.on_disk(0)[0], set.pending(0)), (50, 9, None));
}

#[test]
fn a_write_beside_a_commit_is_pending_after_it() {
    let set = Set::new(1, 512, 8, LOOK_EVERY, true);
    let gate = Arc::new(Barrier::new(2));
    set.write(0, 0, &[7; 5000], Stable::Unstable).unwrap();
    *set.fake(0).gate.lock().unwrap() = Some(gate.clone());
    std::thread::scope(|scope| {
        let commit = scope.spawn(|| set.commit(0));
        gate.wait();
        set.write(0, 5000, &[8; 5000], Stable::Unstable).unwrap();
        gate.wait();
        commit.join().unwrap().unwrap();
    });
    *set.fake(0).gate.lock().unwrap() = None;
    assert_eq!((set.on_disk(0).len(), set.pending(0).map(|pending| pending.len)), (5000, Some(10_000)));
    set.commit(0).unwrap();
    assert_eq!((set.on_disk(0).len(), set.pending(0)), (10_000, None));
}

#[test]
fn what_others_change_is_seen() {
    let set = Set::real(1, 8, Duration::ZERO);
    std::fs::write(set.path(0), vec![1; 3 * PAGE_SIZE]).unwrap();
    assert!(set.read(0, 0, 1 << 20).unwrap().0 == vec![1; 3 * PAGE_SIZE]);
    let others = File::options().write(true).open(set.path(0)).unwrap();
    // The clock of the file system ticks at most every 10 ms.
    let tick = || std::thread::sleep(Duration::from_millis(30));
    tick();
    others.write_all_at(&[2; PAGE_SIZE], PAGE_SIZE as u64).unwrap();
    assert_eq!(set.read(0, PAGE_SIZE, 10).unwrap().0, [2; 10]);
    tick();
    others.write_all_at(&[3; 10], 3 * PAGE_SIZE as u64).unwrap();
    assert_eq!(set.read(0, 3 * PAGE_SIZE, 100).unwrap(), (vec![3; 10], true));
    tick();
    others.set_len(100).unwrap();
    assert_eq!(set.read(0, 0, 1 << 20).unwrap(), (vec![1; 100], true));
    // After a write of this server, too; and a page that is lent goes later.
    set.write(0, 0, &[4; 10], Stable::FileSync).unwrap();
    let lent = set.data.read(&set.key(0), open(&set.path(0)), 0, 10).unwrap().lent;
    tick();
    others.write_all_at(&[5; 10], 0).unwrap();
    set.read(0, 0, 10).unwrap();
    assert_eq!(lent.slices().concat(), [4; 10]);
    drop(lent);
    assert_eq!(set.read(0, 0, 10).unwrap().0, [5; 10]);
    // What is dirty stays.
    set.write(0, 0, &[6; 10], Stable::Unstable).unwrap();
    tick();
    others.write_all_at(&[7; 10], 0).unwrap();
    assert_eq!(set.read(0, 0, 10).unwrap().0, [6; 10]);
}

#[test]
fn a_write_to_an_open_file_spares_what_others_have_added() {
    let set = Set::real(1, 8, Duration::ZERO);
    set.write(0, 0, &[1; 100], Stable::FileSync).unwrap();
    let opened = set.data.opened(0).unwrap();
    let others = File::options().write(true).open(set.path(0)).unwrap();
    others.write_all_at(&[5; 8092], 100).unwrap();
    let mut pages = set.pages(&[7; 100]);
    let mut payload = Payload { pages: &mut pages, len: 100 };
    set.data.write_opened(&opened, 5000, &mut payload, Stable::FileSync).unwrap();
    assert!(set.on_disk(0) == [vec![1; 100], vec![5; 4900], vec![7; 100], vec![5; 3092]].concat());
}

#[test]
fn a_file_that_was_open_for_reading_only_is_opened_again_to_be_written() {
    let set = Set::real(1, 8, LOOK_EVERY);
    let path = set.path(0);
    let read_only = || File::open(&path).map(OwnedFd::from);
    assert_eq!(set.data.read(&set.key(0), read_only, 0, 10).unwrap().lent.len(), 0);
    let mut pages = set.pages(&[7; 10]);
    let mut payload = Payload { pages: &mut pages, len: 10 };
    let refused = set.data.write(&set.key(0), read_only, 0, &mut payload, Stable::FileSync).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::PermissionDenied);
    assert_eq!(set.write(0, 0, &[7; 10], Stable::FileSync).unwrap(), 10);
    assert_eq!(set.on_disk(0), [7; 10]);
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o400)).unwrap();
    assert_eq!(set.write(0, 10, &[8; 10], Stable::FileSync).unwrap(), 10, "the caller checks permissions");
}

#[test]
fn another_file_in_the_place_of_the_one_that_was_meant_is_stale() {
    let set = Set::real(2, 8, LOOK_EVERY);
    let error = set.data.read(&set.key(0), open(&set.path(1)), 0, 10).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ESTALE));
    assert_eq!(set.data.table.len(), 0);
    let failed = set.data.read(&set.key(0), || Err(ErrorKind::NotFound.into()), 0, 10).unwrap_err();
    assert_eq!((failed.kind(), set.data.table.len()), (ErrorKind::NotFound, 0));
}

/// Two clients, each in sequence, at different places, and one that has several requests under way out of order.
#[test]
fn a_read_is_short_while_others_are_lent_most_of_the_cache() {
    const LEN: usize = 200 * PAGE_SIZE;
    let set = Set::new(2, 256, 8, LOOK_EVERY, false);
    let bytes: Vec<u8> = (0..LEN).map(|at| (at / 251) as u8).collect();
    for file in 0..2 {
        assert_eq!(set.write(file, 0, &bytes, Stable::FileSync).unwrap(), LEN);
    }
    let lent = set.data.read(&set.key(0), open(&set.path(0)), 0, LEN as u32).unwrap();
    assert_eq!(lent.lent.len(), LEN);
    let (read, is_end) = set.read(1, 0, LEN).unwrap();
    assert!((1..LEN).contains(&read.len()) && bytes.starts_with(&read) && !is_end, "{}", read.len());
    drop(lent);
    assert!(set.read(1, 0, LEN).unwrap() == (bytes, true));
}

#[test]
fn readers_in_sequence_are_told_apart() {
    const PAGES: usize = 1024;
    let set = Set::new(1, 4096, 8, LOOK_EVERY, true);
    let bytes: Vec<u8> = (0..PAGES * PAGE_SIZE).map(|i| (i / PAGE_SIZE) as u8).collect();
    std::fs::write(set.path(0), &bytes).unwrap();
    let read = |page: usize, pages: usize| {
        let (read, _) = set.read(0, page * PAGE_SIZE, pages * PAGE_SIZE).unwrap();
        assert!(read == bytes[page * PAGE_SIZE..(page + pages) * PAGE_SIZE]);
    };
    for step in (0..PAGES / 4).step_by(8) {
        read(step, 8);
        read(PAGES / 2 + step, 8);
        if step % 16 == 0 {
            read(PAGES * 3 / 4 + step + 8, 8);
            read(PAGES * 3 / 4 + step, 8);
        }
    }
    let stats = set.cache.stats();
    assert!(stats.reads < 100, "{stats:?}");
    assert!(stats.misses < 200, "{stats:?}");
}

/// Each thread has its own bytes of every file, and knows what is in them, while files leave and come back.
#[test]
fn threads_find_what_they_wrote() {
    const FILES: usize = 6;
    const THREADS: usize = 3;
    let set = &Set::new(FILES, 96, 2, Duration::ZERO, false);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || {
                let rng = AtomicU64::new(thread as u64);
                let mut stamps = [0; FILES];
                for turn in 0..400_usize {
                    let file = random(&rng, FILES as u64) as usize;
                    let at = thread * 3 * PAGE_SIZE;
                    if stamps[file] > 0 {
                        let (read, _) = set.read(file, at, 2 * PAGE_SIZE).unwrap();
                        assert!(read == [stamps[file]; 2 * PAGE_SIZE], "{thread} {turn}");
                    }
                    stamps[file] = (turn % 255) as u8 + 1;
                    let stable = if turn % 16 == 0 { Stable::FileSync } else { Stable::Unstable };
                    assert_eq!(set.write(file, at, &[stamps[file]; 2 * PAGE_SIZE], stable).unwrap(), 2 * PAGE_SIZE);
                    match turn % 23 {
                        0 => set.data.forget(&set.key(file)),
                        1 => set.commit(file).unwrap(),
                        _ => {}
                    }
                    assert!(set.data.table.len() <= 2 + THREADS);
                }
            });
        }
    });
}

/// Of the moment before the WRITE: a flush that fails as soon as its pages have left the cache loses them.
#[test]
fn a_stream_that_a_flush_loses_before_its_write_is_answered_is_not_promised() {
    let set = Set::new(1, 512, 8, LOOK_EVERY, true);
    set.write(0, 0, &[6; STREAM], Stable::FileSync).unwrap();
    set.data.forget(&set.key(0)); // With its pages: what is cached would be written again.
    let before = set.data.verifier();
    let mut pages = set.pages(&[7; STREAM]);
    let mut payload = Payload { pages: &mut pages, len: STREAM };
    set.fake(0).flushes.store(1, SeqCst);
    let written = set.data.write(&set.key(0), open(&set.path(0)), 0, &mut payload, Stable::Unstable).unwrap();
    set.commit(0).unwrap_err(); // Another client's.
    set.commit(0).unwrap();
    assert!(*set.fake(0).durable.lock().unwrap() != [7; STREAM], "it is lost");
    assert!(written.verifier == before && set.data.verifier() != before);
}

/// What GETATTR of an open file shows: the file system's attributes, and what it did not know yet.
fn shown(set: &Set) -> Option<(u64, SystemTime)> {
    let opened = set.data.opened(0)?;
    let pending = set.data.attributes(&opened.key, &opened.stat);
    let mtime = SystemTime::UNIX_EPOCH + Duration::new(opened.stat.st_mtime as u64, opened.stat.st_mtime_nsec as u32);
    Some(pending.map_or((opened.stat.st_size as u64, mtime), |it| (it.len, it.modified)))
}

#[test]
fn what_was_seen_of_a_file_before_a_commit_is_not_shown_after_it() {
    for len in [5000, STREAM] {
        let set = Set::real(1, 8, LOOK_EVERY);
        set.write(0, 0, &vec![7; len], Stable::Unstable).unwrap();
        let before = shown(&set).unwrap();
        let opened = set.data.opened(0).unwrap();
        set.commit(0).unwrap();
        let late = set.data.attributes(&opened.key, &opened.stat).map(|it| (it.len, it.modified));
        assert_eq!((before, late), (shown(&set).unwrap(), Some(before)), "{len}");
        // Nor is it shown for what others do then.
        std::fs::write(set.path(0), [8; 10]).unwrap();
        assert_eq!(shown(&set).unwrap().0, 10);
    }
}

#[test]
fn sizes_and_times_never_go_back_beside_commits() {
    for len in [5000, STREAM] {
        let set = &Set::real(1, 8, LOOK_EVERY);
        let over = &AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for turn in 0..500 {
                    set.write(0, turn * len, &vec![7; len], Stable::Unstable).unwrap();
                    set.commit(0).unwrap();
                }
                over.store(true, SeqCst);
            });
            let mut before = (0, SystemTime::UNIX_EPOCH);
            while !over.load(SeqCst) {
                let Some(now) = shown(set) else { continue };
                assert!(now.0 >= before.0 && now.1 >= before.1, "{now:?} after {before:?}");
                before = now;
            }
        });
    }
}

/// A range that is read again and again and overwritten in large pieces, as a database's.
#[test]
fn pages_that_are_in_use_stay_in_the_cache_beside_large_writes() {
    let set = Set::real(1, 8, LOOK_EVERY);
    set.write(0, 0, &[1; STREAM], Stable::FileSync).unwrap();
    set.read(0, 0, STREAM).unwrap();
    let reads = set.cache.stats().read;
    for stamp in 2..10 {
        set.write(0, 0, &[stamp; STREAM], Stable::Unstable).unwrap();
        assert_eq!(set.read(0, 0, STREAM).unwrap().0, [stamp; STREAM]);
        assert!(set.on_disk(0) == [stamp; STREAM]);
    }
    assert_eq!((set.cache.stats().read, set.cache.stats().dirty), (reads, 0));
}

/// Threads write ends of the same pages, in pieces of a stream, beside commits, cuts of what nobody has, and readers.
#[test]
fn threads_find_their_streams() {
    const THREADS: usize = 4;
    let set = &Set::new(2, 200, 1, Duration::ZERO, false);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || {
                let rng = AtomicU64::new(thread as u64 + 77);
                let len = STREAM + 1000;
                let mut stamps = [0; 2];
                for turn in 0..400_usize {
                    let file = random(&rng, 2) as usize;
                    let at = thread * len;
                    if stamps[file] > 0 {
                        let mut read = Vec::new();
                        while read.len() < len {
                            let (more, _) = set.read(file, at + read.len(), len - read.len()).unwrap();
                            assert!(!more.is_empty(), "{thread} {turn}: ends at {}", at + read.len());
                            read.extend(more);
                        }
                        assert!(read == vec![stamps[file]; len], "{thread} {turn}");
                    }
                    stamps[file] = (turn % 255) as u8 + 1;
                    let stable = if turn % 16 == 0 { Stable::FileSync } else { Stable::Unstable };
                    let (mut done, new) = (0, vec![stamps[file]; len]);
                    while done < len {
                        done += set.write(file, at + done, &new[done..], stable).unwrap();
                    }
                    match turn % 23 {
                        0 => set.data.forget(&set.key(file)),
                        1 => set.commit(file).unwrap(),
                        2 => set.set_len(file, THREADS * len + turn).unwrap(),
                        _ => {}
                    }
                }
            });
        }
    });
    set.data.sync_all().unwrap();
    assert_eq!(set.cache.stats().dirty, 0);
}
