//! The pool itself: its reserve, what goes back, its size and its end.
use super::source::{PageSource, Pair, Source};
use super::stats::MempoolStats;
use crate::allocator::Allocator;
use crate::bulk::{Bulk, Exact, Request};
use crate::error::{Error, InvalidRequest};
use crate::handle::{Block, Page};
use crate::process::AtomicStamp;
use crate::sync::{AtomicUsize, Mutex, MutexGuard, NoFork, no_fork};
use crate::wait::Waits;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use pagemill_core::{Exhausted, Gfp, Order, Why};
use std::sync::PoisonError;

/// A pool of elements with a reserve of `min_nr` of them. A request for up to `min_nr` elements that may wait always
/// succeeds, as long as other owners free their elements.
///
/// An element is a [`Pooled`](super::Pooled) handle, which goes back to the pool when it is dropped; [`free_bulk`](Self::free_bulk)
/// returns many in one section. The raw forms ([`alloc_raw`](Self::alloc_raw) and others) deliver plain values, such as
/// [`Page`]s, which return through [`free_raw`](Self::free_raw) and [`free_bulk_raw`](Self::free_bulk_raw). A plain
/// value that is dropped instead goes to its allocator, past the reserve, and counts as handed out for ever.
///
/// Code that holds elements of a pool must not wait for more of the same pool. If an operation is split into several
/// requests, each part must be freed by itself (C5.3).
///
/// # Fork
/// In a forked child the pool continues with the reserve that it had. The parent's other threads do not exist there: no
/// request waits, and their elements stay handed out for ever. So the reserve may lack elements until others are freed,
/// and such a pool can be dropped but not [closed](Self::close).
///
/// ```
/// use pagemill::{Allocator, Bulk, Gfp, Mempool, Page};
/// let allocator = Allocator::builder().pages(80).build()?;
/// let pool = Mempool::pages(&allocator, 64)?;
/// let everything_else = allocator.alloc_pages_bulk_array(Bulk::up_to(16), &mut [const { None::<Page> }; 16]);
///
/// let mut pages = [const { None }; 64];
/// pool.alloc_bulk_array(Bulk::exact(64).gfp(Gfp::NOIO), &mut pages)?;
/// assert_eq!(pool.free_bulk(&mut pages), 64); // Dropping them returns them too, one by one.
/// assert_eq!(pool.stats().reserve, 64);
/// # drop(everything_else);
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Debug)]
pub struct Mempool<S: Source> {
    pub(super) source: S,
    reserve: Mutex<Reserve<S::Item>>,
    /// How many elements the reserve lacks. While it is 0, freed elements go past the reserve. Written with the reserve
    /// locked.
    ///
    /// It is read without the lock. A thread that frees an element of the reserve got it, directly or not, from the
    /// thread that took it out, so it sees that thread's write or a later one. An element of the source that misses the
    /// reserve because of a stale 0 is no loss.
    pub(super) lacks: AtomicUsize,
    /// The size of a full reserve. Written with the reserve locked.
    pub(super) min_nr: AtomicUsize,
    /// The number of elements that are handed out and not freed.
    pub(super) out: AtomicUsize,
    misused: AtomicU64,
    pub(super) waits: Waits,
    /// The process that claims and waits belong to. Written with the reserve locked.
    stamp: AtomicStamp,
}

pub(super) struct Reserve<T> {
    pub(super) elements: Vec<T>,
    /// How many of them are claimed by requests that are taking them out.
    pub(super) claimed: usize,
    /// For each waiting request, the number of elements that it asked for.
    pub(super) needs: Vec<usize>,
    pub(super) low_water: usize,
    pub(super) taken: u64,
}

impl<T> core::fmt::Debug for Reserve<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{} elements, {} claimed", self.elements.len(), self.claimed)
    }
}

/// A pool of pages.
pub type PageMempool = Mempool<PageSource<Page>>;
/// A pool of blocks of one order.
pub type BlockMempool = Mempool<PageSource<Block>>;

/// The locked reserve. No fork begins while it is locked.
pub(super) struct Held<'p, T> {
    reserve: MutexGuard<'p, Reserve<T>>,
    /// Declared last, so that it is dropped after the lock.
    _no_fork: NoFork,
}

impl<T> core::ops::Deref for Held<'_, T> {
    type Target = Reserve<T>;
    fn deref(&self) -> &Reserve<T> {
        &self.reserve
    }
}

impl<T> core::ops::DerefMut for Held<'_, T> {
    fn deref_mut(&mut self) -> &mut Reserve<T> {
        &mut self.reserve
    }
}

impl<T> Reserve<T> {
    pub(super) fn available(&self) -> usize {
        self.elements.len() - self.claimed
    }
    /// How many elements a reserve of size `min_nr` lacks.
    pub(super) fn lacks(&self, min_nr: usize) -> usize {
        (min_nr + self.claimed).saturating_sub(self.elements.len())
    }
}

impl Mempool<PageSource<Page>> {
    /// A pool of pages with a reserve of `min_nr`.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn pages(allocator: &Allocator, min_nr: usize) -> Result<Self, Error> {
        Self::new(PageSource::pages(allocator), min_nr)
    }
}

impl Mempool<PageSource<Block>> {
    /// A pool of blocks of an order with a reserve of `min_nr`.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    ///
    /// ```
    /// use pagemill::{Allocator, Gfp, Mempool, Order};
    /// let pool = Mempool::blocks(&Allocator::builder().pages(64).build()?, Order::new(2)?, 4)?;
    /// let block = pool.alloc(Gfp::NOIO | Gfp::ZERO)?;
    /// assert_eq!(block.len(), 16384);
    /// drop(block); // It goes back to the pool.
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn blocks(allocator: &Allocator, order: Order, min_nr: usize) -> Result<Self, Error> {
        Self::new(PageSource::blocks(allocator, order), min_nr)
    }
}

impl<T: Send, A: Fn(Gfp) -> Option<T>, F: Fn(T)> Mempool<Pair<A, F>> {
    /// A pool of elements that `alloc` makes and `free` ends, with a reserve of `min_nr`.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    ///
    /// ```
    /// use pagemill::{Gfp, Mempool};
    /// let pool = Mempool::from_fns(|_gfp| Some(String::new()), drop, 2)?;
    /// assert_eq!(*pool.alloc(Gfp::NOWAIT)?, ""); // Then it goes back to the pool.
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn from_fns(alloc: A, free: F, min_nr: usize) -> Result<Self, Error> {
        Self::new(Pair { alloc, free }, min_nr)
    }
}

impl<S: Source> Mempool<S> {
    /// A pool over `source`. Its reserve is filled with `min_nr` elements, one by one (C5.1).
    ///
    /// # Errors
    /// [`Error::Exhausted`] if the source cannot deliver `min_nr` elements; those that it delivered are returned to it.
    /// [`Error::Invalid`] if `min_nr` is 0 or above [`Bulk::COUNT_MAX`].
    pub fn new(source: S, min_nr: usize) -> Result<Self, Error> {
        if min_nr == 0 || min_nr > Bulk::COUNT_MAX {
            return Err(InvalidRequest::Reserve { min_nr, max: Bulk::COUNT_MAX }.into());
        }
        let reserve = Reserve { elements: Vec::new(), claimed: 0, needs: Vec::new(), low_water: 0, taken: 0 };
        let pool = Self {
            source,
            reserve: Mutex::new(reserve),
            lacks: AtomicUsize::new(0),
            min_nr: AtomicUsize::new(0),
            out: AtomicUsize::new(0),
            misused: AtomicU64::new(0),
            waits: Waits::default(),
            stamp: AtomicStamp::here(),
        };
        crate::registry::watch();
        pool.resize(min_nr)?;
        Ok(pool)
    }

    /// The source of its elements.
    pub fn source(&self) -> &S {
        &self.source
    }

    /// Returns a plain element: to the reserve if it is not full, else to the source.
    #[inline]
    pub fn free_raw(&self, item: S::Item) {
        self.free_bulk_raw(&mut [Some(item)]);
    }

    /// Returns the plain elements in the slots and empties the slots. The reserve is refilled first, in one section (C5.5).
    /// Returns the number of elements.
    ///
    /// Only elements that this pool handed out may be returned. A foreign one is detected where that costs nothing:
    /// when more elements are returned than are out, or when the element would go into the reserve. It is counted as
    /// [misuse](MempoolStats::misused).
    #[inline]
    pub fn free_bulk_raw(&self, slots: &mut [Option<S::Item>]) -> usize {
        let count = slots.iter().filter(|slot| slot.is_some()).count();
        let foreign = if self.lacks.load(Relaxed) > 0 { self.refill(slots) } else { 0 };
        let out = self.out.fetch_sub(count - foreign, Relaxed);
        if out < count - foreign {
            self.refuse(count - foreign - out);
        }
        self.source.free_bulk(slots);
        if self.waits.is_awaited() {
            self.note_freed();
        }
        count
    }

    /// `count` more elements were returned than were out.
    #[cold]
    fn refuse(&self, count: usize) {
        self.out.fetch_add(count, Relaxed);
        self.misused.fetch_add(count as u64, Relaxed);
    }

    /// The source's return value disagrees with what it did.
    #[cold]
    pub(super) fn note_lie(&self) {
        self.misused.fetch_add(1, Relaxed);
    }

    /// Puts elements into the reserve until it is full. Returns the number of elements that are not the source's.
    #[cold]
    fn refill(&self, slots: &mut [Option<S::Item>]) -> usize {
        let mut foreign = 0;
        for slot in slots.iter_mut() {
            if let Some(item) = slot.take_if(|item| !self.source.is_own(item)) {
                self.source.free(item);
                foreign += 1;
            }
        }
        self.misused.fetch_add(foreign as u64, Relaxed);
        let mut reserve = self.lock();
        let min_nr = self.min_nr.load(Relaxed);
        let lacks = reserve.lacks(min_nr);
        // The order of the adapters matters: only elements that the reserve keeps are taken from their slots.
        reserve.elements.extend(slots.iter_mut().filter(|slot| slot.is_some()).take(lacks).filter_map(Option::take));
        self.lacks.store(reserve.lacks(min_nr), Relaxed);
        foreign
    }

    #[cold]
    fn note_freed(&self) {
        if self.stamp.is_inherited() {
            drop(self.lock()); // In a child: those who wait are not here.
        }
        self.waits.note_freed(&|()| true);
    }

    /// Changes the size of the reserve. If it grows, it is filled one by one; if that fails, its size is unchanged
    /// (C5.6).
    ///
    /// # Errors
    /// [`Error::Exhausted`] if the source cannot deliver enough elements. [`Error::Invalid`] if `min_nr` is 0, below
    /// the size of a request that waits, or above [`Bulk::COUNT_MAX`].
    pub fn resize(&self, min_nr: usize) -> Result<(), Error> {
        if min_nr == 0 || min_nr > Bulk::COUNT_MAX {
            return Err(InvalidRequest::Reserve { min_nr, max: Bulk::COUNT_MAX }.into());
        }
        let (mut fresh, mut reserve) = loop {
            let before = self.min_nr.load(Relaxed);
            let fresh = self.make(min_nr.saturating_sub(before))?;
            let reserve = self.lock();
            if self.min_nr.load(Relaxed) == before {
                break (fresh, reserve);
            }
            // Another resize finished first. There is no lock to wait for: in a forked child its holder might not
            // exist.
            drop(reserve);
            fresh.into_iter().for_each(|item| self.source.free(item));
        };
        let needed = reserve.needs.iter().copied().max().unwrap_or(0);
        if min_nr < needed {
            return Err(InvalidRequest::ReserveAwaited { min_nr, needed }.into());
        }
        self.min_nr.store(min_nr, Relaxed);
        reserve.elements.append(&mut fresh);
        let kept = reserve.elements.len().min(min_nr + reserve.claimed);
        let surplus = reserve.elements.split_off(kept);
        reserve.low_water = reserve.available();
        self.lacks.store(reserve.lacks(min_nr), Relaxed);
        drop(reserve);
        surplus.into_iter().for_each(|item| self.source.free(item));
        if self.waits.is_awaited() {
            self.note_freed();
        }
        Ok(())
    }

    /// Makes `count` elements for the reserve, one by one; all of them or none.
    fn make(&self, count: usize) -> Result<Vec<S::Item>, Error> {
        let mut fresh = Vec::new();
        for got in 0..count {
            match self.source.alloc(Bulk::exact(1).gfp(Gfp::KERNEL | Gfp::NORETRY).populated()) {
                Ok(Some(item)) => fresh.push(item),
                refused => {
                    fresh.into_iter().for_each(|item| self.source.free(item));
                    let request = Bulk::<Exact, S::Item>::exact(count).request;
                    return Err(refused.err().unwrap_or(short(&request, got, self.source.order())));
                }
            }
        }
        Ok(fresh)
    }

    /// Frees the reserve and ends the pool.
    ///
    /// # Errors
    /// [`ElementsOut`], with their number, if elements are out. Nothing has changed in this case.
    #[expect(clippy::result_large_err, reason = "a pool is closed once, and a refusal returns the pool itself")]
    pub fn close(self) -> Result<(), ElementsOut<S>> {
        match self.out.load(Relaxed) {
            0 => Ok(()),
            out => Err(ElementsOut { pool: self, out }),
        }
    }

    /// Returns the pool's size, its elements and its pressure.
    pub fn stats(&self) -> MempoolStats {
        let reserve = self.lock();
        MempoolStats {
            min_nr: self.min_nr.load(Relaxed),
            reserve: reserve.available(),
            low_water: reserve.low_water,
            out: self.out.load(Relaxed),
            from_reserve: reserve.taken,
            waiting: self.waits.len(),
            waits: self.waits.ended.load(Relaxed),
            waited_us: self.waits.waited_us.load(Relaxed),
            longest_wait_us: self.waits.longest_us.load(Relaxed),
            misused: self.misused.load(Relaxed),
        }
    }

    pub(super) fn lock(&self) -> Held<'_, S::Item> {
        let no_fork = no_fork();
        let mut reserve = self.reserve.lock().unwrap_or_else(PoisonError::into_inner);
        if self.stamp.is_inherited() {
            self.forget_parent(&mut reserve);
        }
        Held { reserve, _no_fork: no_fork }
    }

    /// In a forked child: the threads that waited, or were taking elements out, do not exist. Elements claimed by them
    /// stay in the reserve.
    #[cold]
    fn forget_parent(&self, reserve: &mut Reserve<S::Item>) {
        reserve.claimed = 0;
        reserve.needs.clear();
        self.lacks.store(reserve.lacks(self.min_nr.load(Relaxed)), Relaxed);
        self.waits.forget_after_fork();
        self.stamp.renew();
    }
}

impl<S: Source> Drop for Mempool<S> {
    fn drop(&mut self) {
        drop(self.lock()); // In a forked child, this forgets the parent's waits first.
        let reserve = self.reserve.get_mut().unwrap_or_else(PoisonError::into_inner);
        reserve.elements.drain(..).for_each(|item| self.source.free(item));
    }
}

/// The error of a request that got fewer elements than it must have.
pub(super) fn short(request: &Request<'_>, got: usize, order: Order) -> Error {
    let why = match (request.cancel, request.gfp.may_wait() && request.timeout.is_some()) {
        (Some(cancel), _) if cancel.is_cancelled() => Why::Cancelled,
        (_, true) => Why::TimedOut,
        _ => Why::Exhausted,
    };
    Exhausted { wanted: request.most, got, order: order.get(), why }.into()
}

/// The error of [`Mempool::close`]: elements are still handed out.
///
/// ```
/// # use pagemill::{Allocator, Gfp, Mempool};
/// # let pool = Mempool::pages(&Allocator::builder().pages(8).build()?, 1)?;
/// let page = pool.alloc_raw(Gfp::NOIO)?;
/// let refused = pool.close().unwrap_err();
/// assert_eq!(refused.to_string(), "the pool still has 1 element handed out; free them first");
/// refused.pool.free_raw(page);
/// refused.pool.close().unwrap();
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(thiserror::Error)]
#[error("the pool still has {out} element{} handed out; free them first", if *out == 1 { "" } else { "s" })]
#[non_exhaustive]
pub struct ElementsOut<S: Source> {
    /// The pool, unchanged.
    pub pool: Mempool<S>,
    /// The number of elements that are out.
    pub out: usize,
}

/// The sentence, as `Display`, for a `main` that returns this error.
impl<S: Source> core::fmt::Debug for ElementsOut<S> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        core::fmt::Display::fmt(self, f)
    }
}
