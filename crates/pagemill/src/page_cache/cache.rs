//! The cache itself: its builder, its shrinkers, its figures.
use super::backing::{Backing, Io, is_in_backing};
use super::cached::Cached;
use super::file::CachedFile;
use super::mapping::Mapping;
use super::shared::{Shared, Sizes};
use super::stats::PageCacheStats;
use super::stats::add;
use super::trace::Trace;
use super::workers::THREADS;
use super::writeback::write_back_files;
use crate::allocator::Allocator;
use crate::reclaim::{Shrink, Shrinker, ShrinkerDoes};
use core::fmt;
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::PageCount;
use std::io;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Pages of files, and of whatever else reads and writes like a file ([`Backing`]): those that were used, and those
/// that a reader will use soon.
///
/// A file is opened once, by [`open`](Self::open); other openers of it are made from the first, by
/// [`CachedFile::reopen`]. Two backings of one file would be two files to the cache, of which neither sees what is
/// written to the other.
///
/// Its pages come from an allocator. It registers shrinkers with it: one that evicts clean pages, and one that writes
/// dirty ones first, which requests with `NOIO` or `NOFS` do not call (C8.4). A backing that needs pages for its own
/// reads and writes takes them from a [`Mempool`](crate::Mempool), with `NOIO`: a shrinker may be what writes, and there
/// the allocator refuses requests that may wait.
///
/// Clones are handles of one cache, which ends with the last handle, the last file and the last [`Lent`](super::Lent). A
/// forked child must not use it: transfers that were under way at the fork never end there.
///
/// ```
/// use pagemill::{Allocator, FileBacking, PageCache};
/// # let path = std::env::temp_dir().join(format!("pagemill-cache-{}", std::process::id()));
/// # std::fs::write(&path, vec![7; 1 << 20])?;
/// let cache = PageCache::builder(&Allocator::builder().pages(1024).build().unwrap()).build();
/// let file = cache.open(FileBacking::open(&path)?)?;
/// let mut buffer = [0; 4096];
/// let mut at = 0;
/// while file.read_at(&mut buffer, at)? > 0 {
///     at += 4096;
/// }
/// let stats = cache.stats();
/// assert_eq!((stats.read, stats.pages), (256, 256));
/// assert!(stats.reads < 32); // a reader in sequence has larger and larger windows read ahead
/// # drop(file); std::fs::remove_file(path)?;
/// # std::io::Result::Ok(())
/// ```
#[derive(Clone)]
pub struct PageCache {
    shared: Arc<Shared>,
}

/// What a [`PageCache`] is to be: see [`PageCache::builder`].
///
/// ```
/// use pagemill::{Allocator, PageCache, PageCount};
/// let allocator = Allocator::builder().pages(4096).build().unwrap();
/// let cache = PageCache::builder(&allocator).limit(PageCount::new(1024)).window(PageCount::new(64)).build();
/// assert_eq!(cache.stats().limit, 1024);
/// ```
#[must_use = "it makes no cache before `build`"]
pub struct PageCacheBuilder {
    allocator: Allocator,
    limit: Option<usize>,
    dirty: Option<usize>,
    window: usize,
    threads: usize,
    is_wiped: bool,
    name: Box<str>,
    trace: Option<Trace>,
}

/// The largest window of readahead unless the program says otherwise: 4 MiB. A window is on its way while the one before
/// is read, so this is what hides the delay of the backing: half of what it delivers within one delay.
const WINDOW: usize = 1024;

impl PageCacheBuilder {
    /// The most pages that it has at a time; by default, and at most, as many as its allocator has. Pages that are lent count too.
    pub fn limit(self, pages: PageCount) -> Self {
        Self { limit: Some(pages.get()), ..self }
    }
    /// How many of its pages may be dirty, or on their way to a backing, before writers have to write back and wait; a fifth
    /// of the limit by default.
    pub fn dirty_limit(self, pages: PageCount) -> Self {
        Self { dirty: Some(pages.get()), ..self }
    }
    /// The largest window of readahead; 4 MiB by default, and at most an eighth of the limit that the cache is built with.
    /// Twice as much for a reader that says that it reads in sequence. 0: nothing is read ahead.
    pub fn window(self, pages: PageCount) -> Self {
        Self { window: pages.get(), ..self }
    }
    /// The number of threads that make blocking calls of backings; 3 by default. They are started as they are needed.
    pub fn threads(self, threads: usize) -> Self {
        Self { threads, ..self }
    }
    /// Zeroes each page before it goes back to the allocator, for contents that must not stay in memory. By default a
    /// page keeps them until it is used again.
    ///
    /// ```
    /// # use pagemill::{Allocator, FileBacking, Gfp, PageCache, PageCount};
    /// # let path = std::env::temp_dir().join(format!("pagemill-wiped-{}", std::process::id()));
    /// # std::fs::write(&path, vec![7; 1 << 12])?;
    /// let allocator = Allocator::builder().pages(1).build().unwrap();
    /// let cache = PageCache::builder(&allocator).wiped(true).build();
    /// let file = cache.open(FileBacking::open(&path)?)?;
    /// file.read_at(&mut [0; 4096], 0)?;
    /// cache.evict(PageCount::new(1));
    /// let page = allocator.alloc_page(Gfp::KERNEL).unwrap();
    /// assert!(page.iter().all(|&byte| byte == 0));
    /// # drop(file); std::fs::remove_file(path)?;
    /// # std::io::Result::Ok(())
    /// ```
    pub fn wiped(self, is_wiped: bool) -> Self {
        Self { is_wiped, ..self }
    }
    /// A name for observers.
    pub fn named(self, name: impl Into<Box<str>>) -> Self {
        Self { name: name.into(), ..self }
    }
    /// Has each decision of readahead passed to `trace`, on the reader's thread.
    ///
    /// ```
    /// use pagemill::{Allocator, FileBacking, PageCache};
    /// # let path = std::env::temp_dir().join(format!("pagemill-trace-{}", std::process::id()));
    /// # std::fs::write(&path, vec![7; 1 << 20])?;
    /// let allocator = Allocator::builder().pages(1024).build().unwrap();
    /// let cache = PageCache::builder(&allocator).trace(|decision| println!("{decision}")).build();
    /// let file = cache.open(FileBacking::open(&path)?)?;
    /// file.read_at(&mut [0; 4096], 0)?; // file 1: miss at page 0, 1 asked: fetch 4 from page 0, marker on page 1 (...)
    /// # drop(file); std::fs::remove_file(path)?;
    /// # std::io::Result::Ok(())
    /// ```
    pub fn trace(self, trace: impl Fn(&super::ReadaheadDecision) + Send + Sync + 'static) -> Self {
        Self { trace: Some(Box::new(trace)), ..self }
    }

    /// Makes the cache.
    pub fn build(self) -> PageCache {
        let Self { allocator, limit, dirty, window, threads, is_wiped, name, trace } = self;
        let managed = allocator.managed_pages().get();
        let limit = limit.unwrap_or(managed).min(managed).max(1);
        let sizes = Sizes {
            limit,
            dirty,
            // A window that had to evict what others need would cost more than it saves.
            window: u32::try_from(window.min(limit / 8)).unwrap_or(u32::MAX),
            threads,
            is_wiped,
        };
        let shared = Arc::new(Shared::new(allocator, sizes, name, trace));
        let clean = shared.allocator.register_shrinker(Arc::new(Clean(Arc::downgrade(&shared))));
        let dirty = shared.allocator.register_shrinker(Arc::new(Dirty(Arc::downgrade(&shared))));
        shared.keep([clean, dirty]);
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        all.made += 1;
        let id = all.made;
        all.caches.retain(|(_, cache)| cache.strong_count() > 0);
        all.caches.push((id, Arc::downgrade(&shared)));
        drop(all);
        PageCache { shared }
    }
}

/// The caches of this process, by their numbers.
struct All {
    caches: Vec<(u64, Weak<Shared>)>,
    made: u64,
}

/// The lock is the system's also in models, whose own do not outlive a run.
static ALL: Mutex<All> = Mutex::new(All { caches: Vec::new(), made: 0 });

impl PageCache {
    /// A cache whose pages come from `allocator`.
    pub fn builder(allocator: &Allocator) -> PageCacheBuilder {
        PageCacheBuilder {
            allocator: allocator.clone(),
            limit: None,
            dirty: None,
            window: WINDOW,
            threads: THREADS,
            is_wiped: false,
            name: Box::default(),
            trace: None,
        }
    }

    /// Opens what is behind `backing`.
    ///
    /// # Errors
    /// The backing does not say how long it is.
    pub fn open(&self, backing: impl Backing) -> io::Result<CachedFile> {
        let io = Io::new(Arc::new(backing), self.shared.workers.clone());
        let file = self.shared.add_file(|number| Mapping::new(number, io, self.shared.nodes.clone()))?;
        Ok(CachedFile::new(Cached { shared: self.shared.clone(), file }))
    }

    /// What it has counted, and what it has now.
    pub fn stats(&self) -> PageCacheStats {
        self.shared.stats()
    }

    /// Changes the limit; the one that it was built with is the largest. Pages above it are evicted now, as far as they can
    /// be.
    ///
    /// ```
    /// # use pagemill::{Allocator, PageCache, PageCount};
    /// let cache = PageCache::builder(&Allocator::builder().pages(4096).build().unwrap()).build();
    /// cache.set_limit(PageCount::new(512));
    /// assert_eq!(cache.stats().limit, 512);
    /// ```
    pub fn set_limit(&self, pages: PageCount) {
        self.shared.set_limit(pages.get().max(1));
    }

    /// Evicts up to so many clean pages, those first that were used least. Returns how many.
    pub fn evict(&self, pages: PageCount) -> PageCount {
        PageCount::new(self.shared.evict(pages.get(), true))
    }

    /// Writes up to so many dirty pages, of any file, without making them durable. Returns how many.
    pub fn write_back(&self, pages: PageCount) -> PageCount {
        PageCount::new(write_back_files(&self.shared, pages.get()))
    }
}

impl fmt::Debug for PageCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PageCache").field("name", &self.shared.name).field("stats", &self.stats()).finish()
    }
}

/// A page cache of this process, as [`page_caches`] shows it.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct PageCacheInfo {
    /// A number that no other cache of this process had.
    pub id: u64,
    /// The name that its builder gave it, or an empty one.
    pub name: String,
    /// Its figures.
    pub stats: PageCacheStats,
}

/// The page caches of this process, in the order in which they were made.
///
/// ```
/// use pagemill::{Allocator, PageCache, page_caches};
/// let allocator = Allocator::builder().pages(64).build().unwrap();
/// let cache = PageCache::builder(&allocator).named("volumes").build();
/// let seen = page_caches().into_iter().find(|cache| cache.name == "volumes").unwrap();
/// assert_eq!(seen.stats, cache.stats());
/// ```
pub fn page_caches() -> Vec<PageCacheInfo> {
    let all = ALL.lock().unwrap_or_else(PoisonError::into_inner).caches.clone();
    let info = |id, shared: Arc<Shared>| PageCacheInfo { id, name: shared.name.to_string(), stats: shared.stats() };
    all.iter().filter_map(|(id, shared)| Some(info(*id, shared.upgrade()?))).collect()
}

/// Evicts clean pages for the allocator.
struct Clean(Weak<Shared>);

impl Shrinker for Clean {
    fn shrink(&self, wanted: Shrink) -> usize {
        let Some(shared) = usable(&self.0) else { return 0 };
        add(&shared.counters.here().shrinks, 1);
        shared.evict(wanted.pages, false)
    }
}

/// Writes dirty pages, and evicts them.
struct Dirty(Weak<Shared>);

impl Shrinker for Dirty {
    fn shrink(&self, wanted: Shrink) -> usize {
        let Some(shared) = usable(&self.0) else { return 0 };
        // A backing that needs memory does not get it by writes.
        if is_in_backing() || shared.dirty.load(Relaxed) == 0 {
            return 0;
        }
        write_back_files(&shared, wanted.pages);
        shared.evict(wanted.pages, false)
    }
    fn does(&self) -> ShrinkerDoes {
        ShrinkerDoes::Filesystem
    }
}

/// The cache, unless it has ended, or is a parent's.
fn usable(cache: &Weak<Shared>) -> Option<Arc<Shared>> {
    cache.upgrade().filter(|shared| !shared.stamp.is_inherited())
}
