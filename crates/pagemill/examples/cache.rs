//! A cache that several threads share. It has no size of its own: it grows until its memory is used up, and a shrinker evicts
//! what has not been read lately whenever free pages become few.
//!
//! `cargo run --release -p pagemill --example cache [MIB]` with 64 MiB by default, 1024 at most
use std::collections::{HashMap, VecDeque};
use std::error::Error;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use pagemill::{Allocator, Bulk, Gfp, Memory, Page, Shrink, Shrinker, Watermarks, free_pages_bulk};

const THREADS: u64 = 4;
const SHARDS: usize = 64;

struct Entry {
    page: Page,
    /// Whether it was read since it was last considered.
    is_hot: bool,
}

#[derive(Default)]
struct Shard {
    entries: HashMap<u64, Entry>,
    /// The keys in the order in which they are considered for eviction.
    order: VecDeque<u64>,
}

impl Shard {
    /// Takes the first entry out that was not read since its last turn.
    fn evict(&mut self) -> Option<Page> {
        loop {
            let key = self.order.pop_front()?;
            match self.entries.get_mut(&key) {
                Some(entry) if entry.is_hot => {
                    entry.is_hot = false;
                    self.order.push_back(key);
                }
                _ => return self.entries.remove(&key).map(|entry| entry.page),
            }
        }
    }
}

struct Cache {
    shards: [Mutex<Shard>; SHARDS],
    /// Where the next eviction begins.
    next: AtomicUsize,
    hits: AtomicU64,
    misses: AtomicU64,
    evictions: AtomicU64,
    shrinks: AtomicU64,
}

impl Cache {
    fn new() -> Self {
        let [hits, misses, evictions, shrinks] = [(); 4].map(|()| AtomicU64::new(0));
        let shards = [(); SHARDS].map(|()| Mutex::default());
        Self { shards, next: AtomicUsize::new(0), hits, misses, evictions, shrinks }
    }

    /// Looks a key up, and reads its page with `read`. On a miss it loads the page first.
    fn get<R>(&self, memory: &Allocator, key: u64, read: impl Fn(&Page) -> R) -> Result<R, pagemill::Error> {
        let shard = &self.shards[key as usize % SHARDS];
        if let Some(entry) = shard.lock().unwrap_or_else(PoisonError::into_inner).entries.get_mut(&key) {
            self.hits.fetch_add(1, Relaxed);
            entry.is_hot = true;
            return Ok(read(&entry.page));
        }
        self.misses.fetch_add(1, Relaxed);
        // Without the shard's lock, since this may call the shrinker. Where this fails, a real cache loads into a buffer of its own
        // and serves the key without caching it.
        let mut page = memory.alloc_page(Gfp::KERNEL)?;
        load(key, &mut page);
        let found = read(&page);
        let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
        if shard.entries.insert(key, Entry { page, is_hot: false }).is_none() {
            shard.order.push_back(key);
        }
        Ok(found)
    }
}

impl Shrinker for Cache {
    fn shrink(&self, wanted: Shrink) -> usize {
        self.shrinks.fetch_add(1, Relaxed);
        let mut evicted = Vec::with_capacity(wanted.pages);
        for _ in 0..SHARDS {
            // A shard that is in use is left out: a shrinker does not wait for locks.
            if let Ok(mut shard) = self.shards[self.next.fetch_add(1, Relaxed) % SHARDS].try_lock() {
                let most = (wanted.pages - evicted.len()).min(wanted.pages.div_ceil(SHARDS) + 8);
                evicted.extend((0..most).map_while(|_| shard.evict()).map(Some));
            }
        }
        self.evictions.fetch_add(evicted.len() as u64, Relaxed);
        free_pages_bulk(&mut evicted)
    }
}

/// Plays the disk behind the cache.
fn load(key: u64, page: &mut Page) {
    page.fill(key as u8);
    page[..8].copy_from_slice(&key.to_le_bytes());
}

/// Reads keys, a few of them often and most of them rarely.
fn work(cache: &Cache, memory: &Allocator, keys: u64, reads: u64, seed: u64) -> Result<(), pagemill::Error> {
    let mut random = seed;
    for _ in 0..reads {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let place = (random >> 32) as f64 / 2f64.powi(32);
        let key = (place.powi(8) * keys as f64) as u64;
        let is_right = cache.get(memory, key, |page| page[..8] == key.to_le_bytes() && page[4095] == key as u8)?;
        assert!(is_right, "the page of key {key} is another one's");
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let mib: usize = std::env::args().nth(1).map_or(Ok(64), |mib| mib.parse())?;
    let pages = mib.clamp(1, 1024) << 8;
    // Below `low` a thread of the allocator calls the shrinker, until `high` is reached. So requests seldom wait for it.
    let memory = Memory::anonymous(pages).watermarks(Watermarks::above(pages as u32 / 64));
    let memory = Allocator::builder().memory(memory).background_reclaim(true).build()?;
    let cache = Arc::new(Cache::new());
    let registered = memory.register_shrinker(cache.clone());

    let (keys, reads) = (4 * pages as u64, 20 * pages as u64 / THREADS);
    thread::scope(|scope| {
        let threads: Vec<_> = (1..=THREADS)
            .map(|seed| {
                let (cache, memory) = (&cache, &memory);
                scope.spawn(move || work(cache, memory, keys, reads, seed << 32 | 0x9e37_79b9))
            })
            .collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("it does not panic"))
    })?;

    let [hits, misses, evictions, shrinks] =
        [&cache.hits, &cache.misses, &cache.evictions, &cache.shrinks].map(|count| count.load(Relaxed));
    println!("{hits} hits and {misses} misses in {pages} pages, for {keys} keys");
    println!("{evictions} evictions by {shrinks} calls of the shrinker");
    let stats = memory.stats();
    println!(
        "{} rounds by the allocator's background thread, {} by requests",
        stats.reclaim_background, stats.reclaim_direct
    );
    assert!(hits > misses && evictions > 0 && hits + misses == reads * THREADS);

    // The same memory serves others at once: the cache makes room for a request of half of all pages.
    let mut pages_of_others = Vec::new();
    let request = Bulk::exact(pages / 2).timeout(std::time::Duration::from_secs(60));
    memory.alloc_pages_bulk_runs::<_, Page>(request, &mut pages_of_others)?;
    println!("{} pages for another part of the program, in {} runs", pages / 2, pages_of_others.len());
    drop((registered, pages_of_others));
    // A call of the shrinker may be under way: it has the cache, and pages that it has evicted.
    while Arc::strong_count(&cache) > 1 {
        thread::yield_now();
    }
    drop(cache);
    memory.close()?;
    Ok(())
}
