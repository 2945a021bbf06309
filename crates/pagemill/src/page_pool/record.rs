//! The figures of a pool as everyone may read them, and the list of all pools.
//!
//! A [`Record`] is a pool's, and outlives it: what is shared has it, and so do an [`Ending`] and an observer that
//! looks. The count and the ring's positions are there themselves. The consumer's figures are copies, which the
//! consumer stores when an allocation finds its cache empty, and in `stats`.
//!
//! The list has weak pointers. So the end of a pool, which may come with any page that is returned, changes no list and
//! takes no lock. Making a pool and looking at all of them do. No fork begins meanwhile: a child finds the lock free.
use super::ring::Positions;
use super::stats::PagePoolStats;
use crate::sync::{AtomicU64, AtomicUsize, no_fork};
use core::fmt;
use core::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

pub(super) struct Record {
    pub(super) id: u64,
    pub(super) name: OnceLock<Box<str>>,
    /// When the consumer had ended: its cache and its ring are empty.
    pub(super) ended: OnceLock<Instant>,
    /// One for each page that is not with the source, and one for the consumer.
    pub(super) count: AtomicUsize,
    pub(super) ring_full: AtomicU64,
    positions: Arc<Positions>,
    /// The figures that the consumer stores.
    figures: [AtomicU64; FIGURES],
}

/// The number of figures that only the consumer counts.
const FIGURES: usize = 10;

impl Record {
    /// With one on the count, for the consumer; and in the list of all pools.
    pub(super) fn new(positions: Arc<Positions>) -> Arc<Self> {
        static NEXT: core::sync::atomic::AtomicU64 = core::sync::atomic::AtomicU64::new(1);
        let record = Arc::new(Self {
            id: NEXT.fetch_add(1, Relaxed),
            name: OnceLock::new(),
            ended: OnceLock::new(),
            count: AtomicUsize::new(1),
            ring_full: AtomicU64::new(0),
            positions,
            figures: core::array::from_fn(|_| AtomicU64::new(0)),
        });
        with_list(|list| {
            // Only before it grows, so that many pools cost no search each.
            if list.len() == list.capacity() {
                list.retain(|record| record.strong_count() > 0);
                list.shrink_to(4 * list.len());
                list.reserve(list.len().max(16));
            }
            list.push(Arc::downgrade(&record));
        });
        record
    }

    /// Stores what the consumer has counted: all figures but `ring`, `ring_full` and `in_flight`, which are known here,
    /// and last the number of pages in its cache.
    pub(super) fn publish(&self, of: &PagePoolStats, in_cache: usize) {
        let PagePoolStats { fast, slow, slow_high_order, empty, refill, waive, .. } = *of;
        let PagePoolStats { cached, cache_full, released_refcnt, .. } = *of;
        let figures =
            [fast, slow, slow_high_order, empty, refill, waive, cached, cache_full, released_refcnt, in_cache as u64];
        self.figures.iter().zip(figures).for_each(|(place, figure)| place.store(figure, Relaxed));
    }

    pub(super) fn stats(&self) -> PagePoolStats {
        let [fast, slow, slow_high_order, empty, refill, waive, cached, cache_full, released_refcnt, in_cache] =
            self.figures.each_ref().map(|figure| figure.load(Relaxed));
        PagePoolStats {
            fast,
            slow,
            slow_high_order,
            empty,
            refill,
            waive,
            cached,
            cache_full,
            ring: self.positions.pushed() as u64,
            ring_full: self.ring_full.load(Relaxed),
            released_refcnt,
            in_flight: match self.ended.get() {
                None => self.in_flight(in_cache as usize),
                Some(_) => self.still_out(),
            },
        }
    }

    /// The pages that are out of a pool with so many in its cache.
    pub(super) fn in_flight(&self, in_cache: usize) -> usize {
        self.count.load(Acquire).saturating_sub(1 + in_cache + self.positions.len())
    }

    /// The pages that are out of a pool that has ended.
    pub(super) fn still_out(&self) -> usize {
        // Acquire pairs with the Release in `take_off`: the source has ended the other pages.
        self.count.load(Acquire)
    }
}

/// In a model: fails if a thread touches it afterwards, or may do so at the same time.
#[cfg(loom)]
impl Drop for Record {
    fn drop(&mut self) {
        self.count.with_mut(|_| ());
        self.ring_full.with_mut(|_| ());
    }
}

fn with_list<R>(work: impl FnOnce(&mut Vec<Weak<Record>>) -> R) -> R {
    static ALL: Mutex<Vec<Weak<Record>>> = Mutex::new(Vec::new());
    let _no_fork = no_fork();
    // A panic under the lock leaves the list as it was.
    work(&mut ALL.lock().unwrap_or_else(PoisonError::into_inner))
}

/// A pool of circulating pages, as [`page_pools`] shows it.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct PagePoolInfo {
    /// Its number, from 1 on. No other page pool of the process has it.
    pub id: u64,
    /// The name that [`PagePool::named`](super::PagePool::named) gave it, or an empty one.
    pub name: String,
    /// Its figures.
    pub stats: PagePoolStats,
    /// The time since its end, if it has ended.
    pub ended: Option<Duration>,
}

/// The process's page pools, in the order in which they were made: those that have a consumer, and those that have
/// ended while pages of them are out (C7.5).
///
/// `ring`, `ring_full`, and the number of pages that are out of a pool that has ended, are those of now. The consumer of
/// a pool counts without atomic operations, so its other figures are those of the last time when its cache was empty,
/// or when it asked for [`PagePool::stats`](super::PagePool::stats); and `in_flight` may be off by what the cache took
/// or gave since. A consumer that never empties its cache should call `stats` now and then.
///
/// ```
/// use pagemill::{Allocator, Gfp, PagePool, page_pools};
/// let mut pool = PagePool::pages(&Allocator::builder().pages(256).build()?).named("rx0");
/// let page = pool.alloc(Gfp::NOWAIT)?;
/// let ours = || page_pools().into_iter().find(|pool| pool.name == "rx0");
/// let seen = ours().unwrap();
/// assert_eq!((seen.stats.slow, seen.stats.in_flight, seen.ended), (1, 1, None));
/// drop(pool);
/// let seen = ours().unwrap();
/// println!("{} pages are out {:?} after the end", seen.stats.in_flight, seen.ended.unwrap());
/// drop(page);
/// assert_eq!(ours(), None);
/// # Ok::<(), pagemill::Error>(())
/// ```
pub fn page_pools() -> Vec<PagePoolInfo> {
    let all = with_list(|list| list.clone());
    let records = all.iter().filter_map(Weak::upgrade);
    let info = |record: Arc<Record>| PagePoolInfo {
        id: record.id,
        name: record.name.get().map_or_else(String::new, |name| name.to_string()),
        ended: record.ended.get().map(Instant::elapsed),
        stats: record.stats(),
    };
    // An `Ending` and other observers keep the records of pools that have no page out any more.
    records.map(info).filter(|info| info.ended.is_none() || info.stats.in_flight > 0).collect()
}

/// A pool that has ended, while pages of it may be out: see [`PagePool::destroy`](super::PagePool::destroy).
///
/// Dropping it leaves the pages as they are.
pub struct Ending {
    pub(super) record: Arc<Record>,
}

impl Ending {
    /// The number of pages that are still out.
    pub fn in_flight(&self) -> usize {
        self.record.still_out()
    }
    /// The pool's figures, with the pages that are still out.
    ///
    /// ```
    /// use pagemill::{Allocator, Gfp, PagePool};
    /// let mut pool = PagePool::pages(&Allocator::builder().pages(256).build()?);
    /// let page = pool.alloc(Gfp::NOWAIT)?;
    /// let stats = pool.destroy().stats();
    /// assert_eq!((stats.slow, stats.in_flight), (1, 1));
    /// # drop(page);
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn stats(&self) -> PagePoolStats {
        self.record.stats()
    }
    /// The time since the pool ended.
    pub fn age(&self) -> Duration {
        self.record.ended.get().map_or(Duration::ZERO, Instant::elapsed)
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (pages, age) = (self.in_flight(), self.age().as_secs());
        let are = if pages == 1 { "page is" } else { "pages are" };
        write!(f, "{pages} {are} still out, {age} s after the pool's end")
    }
}

impl fmt::Debug for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
