//! The page cache against a plain file: the same bytes, whatever fails meanwhile (C8).
//!
//! The disk below it fails at random, answers short, and forgets at a power cut what was not flushed. The allocator
//! fails at random acquisitions. One thread compares each read with a vector of bytes; many threads stamp what they own.
use crate::common::{Over, Rng, arena, close_all_back, until};
use pagemill::{Advice, Allocator, Backing, CachedFile, Faults, Gfp, Lent, Page, PageCache, PageCount};
use std::io::{self, IoSlice, IoSliceMut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

const PAGE: usize = 4096;

/// A disk that fails by chance.
struct Disk {
    state: Mutex<State>,
    /// The chance that a request fails, in thousandths.
    chance: AtomicU64,
}

struct State {
    /// What reads see.
    bytes: Vec<u8>,
    /// What is there after a power cut.
    durable: Vec<u8>,
    rng: Rng,
    /// A failed flush loses what was not flushed, as the kernel's page cache does.
    forgets: bool,
}

impl Disk {
    fn new(bytes: Vec<u8>, seed: u64, chance: u64, forgets: bool) -> Arc<Self> {
        let state = State { durable: bytes.clone(), bytes, rng: Rng::new(seed), forgets };
        Arc::new(Self { state: Mutex::new(state), chance: AtomicU64::new(chance) })
    }
    fn fails(&self, state: &mut State) -> io::Result<()> {
        match state.rng.below(1000) < self.chance.load(Relaxed) as usize {
            true => Err(io::Error::other("a bad sector")),
            false => Ok(()),
        }
    }
    fn is_short(&self, state: &mut State) -> bool {
        state.rng.below(1000) < self.chance.load(Relaxed) as usize
    }
}

impl Backing for Disk {
    fn len(&self) -> io::Result<u64> {
        Ok(self.state.lock().unwrap().bytes.len() as u64)
    }
    fn read_vectored_at(&self, into: &mut [IoSliceMut<'_>], at: u64) -> io::Result<usize> {
        let state = &mut *self.state.lock().unwrap();
        self.fails(state)?;
        let len = state.bytes.len().saturating_sub(at as usize);
        let len = if self.is_short(state) && len > 1 { 1 + state.rng.below(len - 1) } else { len };
        let mut rest = state.bytes.get(at as usize..).map_or(&[][..], |rest| &rest[..len]);
        io::Read::read_vectored(&mut rest, into)
    }
    fn write_vectored_at(&self, from: &[IoSlice<'_>], at: u64) -> io::Result<usize> {
        let state = &mut *self.state.lock().unwrap();
        self.fails(state)?;
        let all: Vec<u8> = from.iter().flat_map(|slice| slice.iter().copied()).collect();
        let most = if self.is_short(state) { 1 + state.rng.below(all.len()) } else { all.len() };
        let end = at as usize + most;
        let len = state.bytes.len().max(end);
        state.bytes.resize(len, 0);
        state.bytes[at as usize..end].copy_from_slice(&all[..most]);
        Ok(most)
    }
    fn sync(&self) -> io::Result<()> {
        let state = &mut *self.state.lock().unwrap();
        let failed = self.fails(state);
        match failed {
            Ok(()) => state.durable = state.bytes.clone(),
            Err(_) if state.forgets => {
                // Some of the pages that were written are as they were before.
                for at in (0..state.durable.len().min(state.bytes.len())).step_by(PAGE) {
                    if state.rng.below(2) == 0 {
                        let end = (at + PAGE).min(state.durable.len()).min(state.bytes.len());
                        state.bytes[at..end].copy_from_slice(&state.durable[at..end]);
                    }
                }
            }
            Err(_) => {}
        }
        failed
    }
    fn set_len(&self, len: u64) -> io::Result<()> {
        let state = &mut *self.state.lock().unwrap();
        self.fails(state)?;
        state.bytes.resize(len as usize, 0);
        // A file system writes lengths to its journal.
        state.durable.resize(len as usize, 0);
        Ok(())
    }
}

/// What a run does.
struct Run {
    seed: u64,
    /// Pages that the cache may have.
    limit: usize,
    /// Thousandths of the disk's requests that fail, and of the allocator's acquisitions.
    disk: u64,
    memory: u64,
    forgets: bool,
    steps: usize,
}

const FILE_MAX: usize = 60 * PAGE;

#[expect(clippy::too_many_lines, reason = "a step of each kind, one after another")]
fn check(run: &Run) {
    let rng = &mut Rng::new(run.seed);
    let mut model: Vec<u8> = (0..rng.below(FILE_MAX)).map(|i| i as u8 ^ (i >> 8) as u8).collect();
    let disk = Disk::new(model.clone(), run.seed, run.disk, run.forgets);
    let faults = Faults::with_probability(run.memory as f64 / 1000.0, run.seed);
    let allocator = arena(run.limit + 400).faults(faults).build().unwrap();
    let cache = PageCache::builder(&allocator)
        .limit(PageCount::new(run.limit))
        .window(PageCount::new(rng.below(20)))
        .threads(1)
        .build();
    let mut openers = vec![cache.open(disk.clone()).unwrap()];
    let mut lent: Vec<(Lent, Vec<u8>)> = Vec::new();
    for step in 0..run.steps {
        let file = &openers[rng.below(openers.len())];
        let at = if rng.below(3) == 0 { rng.below(FILE_MAX) / PAGE * PAGE } else { rng.below(FILE_MAX) };
        let len = if rng.below(3) == 0 { rng.below(9) * PAGE } else { rng.below(3 * PAGE) };
        match rng.below(18) {
            0..6 => {
                let mut read = vec![0xee; len];
                if let Ok(n) = file.read_at(&mut read, at as u64) {
                    let wanted = model.get(at..model.len().min(at + len)).unwrap_or_default();
                    assert!(n <= wanted.len(), "step {step} of {}: {n} of {} bytes", run.seed, wanted.len());
                    assert!(read[..n] == wanted[..n], "step {step} of {}: {len} at {at} are wrong", run.seed);
                    assert!(n == wanted.len() || run.disk + run.memory > 0, "step {step} of {}: short", run.seed);
                }
            }
            6..10 => {
                let bytes: Vec<u8> = (0..len).map(|_| rng.below(256) as u8).collect();
                match file.write_at(&bytes, at as u64) {
                    Ok(n) => {
                        assert!(n == len || run.disk + run.memory > 0, "step {step} of {}: short", run.seed);
                        if n > 0 {
                            model.resize(model.len().max(at + n), 0);
                            model[at..][..n].copy_from_slice(&bytes[..n]);
                        }
                    }
                    Err(error) => assert!(run.disk + run.memory > 0, "step {step} of {}: {error}", run.seed),
                }
            }
            10 => {
                let len = rng.below(FILE_MAX);
                if file.set_len(len as u64).is_ok() {
                    model.resize(len, 0);
                }
            }
            11 => match file.sync() {
                Ok(()) => {
                    let state = disk.state.lock().unwrap();
                    assert!(state.durable == model, "step {step} of {}: sync promised what is not there", run.seed);
                }
                Err(error) => assert!(run.disk > 0, "step {step} of {}: {error}", run.seed),
            },
            12 => {
                cache.evict(PageCount::new(rng.below(run.limit)));
                file.invalidate(at as u64..(at + len) as u64);
            }
            13 if lent.len() < 3 => {
                if let Ok(pages) = file.lend(at as u64, len) {
                    let wanted = model.get(at..model.len().min(at + len)).unwrap_or_default().to_vec();
                    assert_eq!(pages.len(), wanted.len(), "step {step} of {}", run.seed);
                    lent.push((pages, wanted));
                }
            }
            13 => drop(lent.remove(rng.below(lent.len()))),
            14 => {
                let advice = [Advice::Normal, Advice::Sequential, Advice::Random, Advice::NoReuse];
                file.advise(advice[rng.below(4)], 0..0);
                let range = at as u64..(at + len) as u64;
                file.advise(if rng.below(2) == 0 { Advice::WillNeed } else { Advice::DontNeed }, range);
            }
            15..17 => write_pages(run, step, &allocator, file, &mut model, (at / PAGE * PAGE, len), rng),
            _ if openers.len() < 3 => {
                let another = openers[0].reopen();
                openers.push(another);
            }
            _ => drop(openers.swap_remove(rng.below(openers.len()))),
        }
        assert_eq!(openers[0].len(), model.len() as u64, "step {step} of {}", run.seed);
        for (pages, wanted) in &lent {
            assert!(pages.slices().concat() == *wanted, "step {step} of {}: what is lent has changed", run.seed);
        }
        let stats = cache.stats();
        assert!(stats.pages <= run.limit as u64, "step {step} of {}: {} pages", run.seed, stats.pages);
        assert!(stats.dirty <= stats.pages, "step {step} of {}: {} dirty", run.seed, stats.dirty);
    }
    drop(lent);
    // The disk recovers: nothing was lost.
    disk.chance.store(0, Relaxed);
    let last = openers.swap_remove(0);
    drop(openers);
    for _ in 0..2 {
        if last.sync().is_ok() {
            break;
        }
    }
    last.sync().unwrap();
    assert!(disk.state.lock().unwrap().durable == model, "{}: after the end", run.seed);
    last.close().unwrap();
    // Reads ahead may be under way still.
    until("the last page", || cache.stats().pages == 0);
    assert_eq!(cache.stats().dirty, 0);
    drop(cache);
    close_all_back(allocator);
}

/// Writes pages of this allocator, or of another one, which the cache copies.
fn write_pages(
    run: &Run,
    step: usize,
    allocator: &Allocator,
    file: &CachedFile,
    model: &mut Vec<u8>,
    (at, len): (usize, usize),
    rng: &mut Rng,
) {
    let is_foreign = rng.below(8) == 0;
    let source = if is_foreign { Allocator::global() } else { allocator };
    // More than the bytes need.
    let pages: Vec<_> = (0..len.div_ceil(PAGE) + rng.below(2)).map(|_| source.alloc_page(Gfp::NOWAIT).ok()).collect();
    let mut pages: Vec<Option<Page>> = pages.into_iter().take_while(Option::is_some).collect();
    let len = len.min(pages.len() * PAGE);
    for page in pages.iter_mut().flatten() {
        page.fill_with(|| rng.below(256) as u8);
    }
    let bytes: Vec<u8> = pages.iter().flatten().flat_map(|page| page.iter().copied()).collect();
    let given = pages.len();
    match file.write_pages(&mut pages, len, at as u64) {
        Ok(n) => {
            assert!(n == len || run.disk + run.memory > 0, "step {step} of {}: short", run.seed);
            let reached = n.div_ceil(PAGE);
            assert!(pages[reached..].iter().all(Option::is_some), "step {step} of {}: more was taken", run.seed);
            assert!(!is_foreign || pages.iter().flatten().count() == given, "step {step} of {}: foreign", run.seed);
            if n > 0 {
                model.resize(model.len().max(at + n), 0);
                model[at..][..n].copy_from_slice(&bytes[..n]);
            }
        }
        Err(error) => {
            assert!(run.disk + run.memory > 0, "step {step} of {}: {error}", run.seed);
            assert_eq!(pages.iter().flatten().count(), given, "step {step} of {}: taken for nothing", run.seed);
        }
    }
}

#[test]
fn the_cache_has_a_plain_files_bytes() {
    for seed in 0..40 {
        check(&Run { seed, limit: 200, disk: 0, memory: 0, forgets: false, steps: 300 });
    }
}

#[test]
fn a_small_cache_has_them_too() {
    for seed in 100..140 {
        check(&Run { seed, limit: 48, disk: 0, memory: 0, forgets: false, steps: 300 });
    }
}

#[test]
fn nothing_is_lost_where_reads_writes_and_memory_fail() {
    for seed in 200..260 {
        check(&Run { seed, limit: 48, disk: 100, memory: 200, forgets: false, steps: 300 });
    }
}

#[test]
fn what_a_failed_flush_forgets_is_written_again() {
    // Pages that are evicted between their write and the failed flush are lost: the error says so. Here none are.
    for seed in 300..340 {
        check(&Run { seed, limit: 1000, disk: 100, memory: 0, forgets: true, steps: 300 });
    }
}

/// Each thread writes to its own bytes of every page and knows what is there; the others read, evict, cut and sync.
#[test]
fn threads_find_what_they_wrote() {
    const THREADS: usize = 4;
    const PAGES: usize = 40;
    const OWN: usize = PAGE / THREADS;
    let allocator = arena(256).build().unwrap();
    let cache = PageCache::builder(&allocator).limit(PageCount::new(32)).window(PageCount::new(8)).build();
    let disk = Disk::new(vec![0; PAGES * PAGE], 7, 0, false);
    let file = cache.open(disk.clone()).unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _over = Over(&is_over);
        scope.spawn(|| disturb(&cache, &file.reopen(), &is_over));
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let file = file.reopen();
                scope.spawn(move || {
                    let rng = &mut Rng::new(thread as u64);
                    let mut stamps = [0_u8; PAGES];
                    let mut lent = Vec::new();
                    for turn in 0..3000_usize {
                        let page = rng.below(PAGES);
                        let at = (page * PAGE + thread * OWN) as u64;
                        let mut read = [0xee; OWN];
                        file.read_exact_at(&mut read, at).unwrap();
                        assert!(
                            read.iter().all(|&byte| byte == stamps[page]),
                            "page {page} of thread {thread}, turn {turn}"
                        );
                        if rng.below(4) == 0 {
                            // What others write to the page is there whole, or not.
                            let mut read = [0xee; PAGE];
                            file.read_exact_at(&mut read, (page * PAGE) as u64).unwrap();
                            for own in read.chunks(OWN) {
                                assert!(own.iter().all(|byte| *byte == own[0]), "page {page}, turn {turn}: torn");
                            }
                        }
                        if rng.below(8) == 0 {
                            let pages = file.lend(at, OWN).unwrap();
                            assert!(pages.slices().concat().iter().all(|&byte| byte == stamps[page]), "lent");
                            lent.push((pages, stamps[page]));
                        }
                        if lent.len() > 2 {
                            let (pages, stamp) = lent.remove(0);
                            assert!(pages.slices().concat().iter().all(|&byte| byte == stamp), "lent for long");
                        }
                        stamps[page] = turn as u8;
                        file.write_at(&[turn as u8; OWN], at).unwrap();
                    }
                    stamps
                })
            })
            .collect();
        let stamps: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        file.sync().unwrap();
        let durable = disk.state.lock().unwrap().durable.clone();
        for (page, bytes) in durable.chunks(PAGE).enumerate() {
            for (thread, own) in bytes.chunks(OWN).enumerate() {
                assert!(
                    own.iter().all(|&byte| byte == stamps[thread][page]),
                    "page {page} of thread {thread}, at the end"
                );
            }
        }
    });
    file.close().unwrap();
    until("the last page", || cache.stats().pages == 0);
    drop(cache);
    close_all_back(allocator);
}

fn disturb(cache: &PageCache, file: &CachedFile, is_over: &AtomicBool) {
    let rng = &mut Rng::new(99);
    while !is_over.load(Relaxed) {
        match rng.below(5) {
            0 => _ = cache.evict(PageCount::new(8)),
            1 => file.sync().unwrap(),
            2 => _ = cache.write_back(PageCount::new(4)),
            3 => _ = file.invalidate(0..u64::MAX),
            _ => file.set_len(file.len()).unwrap(),
        }
        std::thread::yield_now();
    }
}
