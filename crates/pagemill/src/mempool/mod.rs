//! A pool with a reserve, so that requests make progress even when memory is exhausted (the kernel's `mempool`).
//!
//! A storage path that frees memory by writing it out must not wait for memory to do so. It keeps enough elements for
//! one operation in reserve, takes from them when the page allocator has none, and waits for earlier operations to
//! return theirs, which needs no memory.
//!
//! # The way of a request (C5.2)
//! [`Mempool::get`] asks the [`Source`] without waiting, and takes what is missing from the reserve. If that is not
//! enough, it does both again, now with reclaim. Then it waits for its turn, and tries again whenever elements are
//! freed or 10 ms have passed.
//!
//! # Invariants
//! - M1 At most `min_nr` unclaimed elements are in the reserve. (A callback that unwound may leave some more there, and
//!   so may a thread of the parent in a forked child.) Elements that are freed while the reserve is not full go into it
//!   (C5.5).
//! - M2 A request takes its remainder from the reserve in full or not at all: it claims it in one section, and only if
//!   no request waits or it is the first in line (C5.3).
//! - M3 No request waits for more than `min_nr` elements.
//!
//! Progress follows: a request that took elements of the reserve has all its elements. So its owner continues and frees
//! them, until the reserve is full; then the first waiting request is served. Elements that a waiting request holds
//! already came from the source, so the reserve does not lack them.
//!
//! # Locks
//! The reserve's lock is held only to move element handles. No source, callback or other lock is entered under it, and
//! it is never held together with the lock of the lines in [`crate::wait`]. No fork begins while it is held
//! ([`no_fork`]), so a child finds it free and the reserve consistent. In a forked child, the first call that takes the
//! lock forgets the waits and claims of the parent's threads.
//!
//! The decisions and their evidence: `docs/adr/0022-the-pool.md`.
use crate::allocator::Allocator;
use crate::bulk::{Bulk, Exact, Request, from_now};
use crate::error::{Error, InvalidRequest};
use crate::handle::{Block, Page};
use crate::process::AtomicStamp;
use crate::reclaim;
use crate::sync::{AtomicUsize, Mutex, MutexGuard, NoFork, Stamp, no_fork};
use crate::wait::{Patience, Waits};
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use pagemill_core::{Exhausted, Gfp, Order, Why};
use std::sync::PoisonError;

mod awaited;
mod pooled;
mod source;
mod stats;

pub use pooled::{PoolRef, Pooled};
pub use source::{PageSource, Pair, Source};
pub use stats::MempoolStats;

/// A pool of elements with a reserve of `min_nr` of them. A request for up to `min_nr` elements that may wait always
/// succeeds, as long as other owners free their elements.
///
/// An element is a [`Pooled`] handle, which goes back to the pool when it is dropped; [`free_bulk`](Self::free_bulk)
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
    source: S,
    reserve: Mutex<Reserve<S::Item>>,
    /// How many elements the reserve lacks. While it is 0, freed elements go past the reserve. Written with the reserve
    /// locked.
    ///
    /// It is read without the lock. A thread that frees an element of the reserve got it, directly or not, from the
    /// thread that took it out, so it sees that thread's write or a later one. An element of the source that misses the
    /// reserve because of a stale 0 is no loss.
    lacks: AtomicUsize,
    /// The size of a full reserve. Written with the reserve locked.
    min_nr: AtomicUsize,
    /// The number of elements that are handed out and not freed.
    out: AtomicUsize,
    misused: AtomicU64,
    waits: Waits,
    /// The process that claims and waits belong to. Written with the reserve locked.
    stamp: AtomicStamp,
}

struct Reserve<T> {
    elements: Vec<T>,
    /// How many of them are claimed by requests that are taking them out.
    claimed: usize,
    /// For each waiting request, the number of elements that it asked for.
    needs: Vec<usize>,
    low_water: usize,
    taken: u64,
}

impl<T> core::fmt::Debug for Reserve<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{} elements, {} claimed", self.elements.len(), self.claimed)
    }
}

/// A pool of pages.
pub type PagePool = Mempool<PageSource<Page>>;
/// A pool of blocks of one order.
pub type BlockPool = Mempool<PageSource<Block>>;

/// The locked reserve. No fork begins while it is locked.
struct Held<'p, T> {
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
    fn available(&self) -> usize {
        self.elements.len() - self.claimed
    }
    /// How many elements a reserve of size `min_nr` lacks.
    fn lacks(&self, min_nr: usize) -> usize {
        (min_nr + self.claimed).saturating_sub(self.elements.len())
    }
}

impl Mempool<PageSource<Page>> {
    /// A pool of pages with a reserve of `min_nr`.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn pages(allocator: &Allocator, min_nr: usize) -> Result<Self, Error> {
        Self::new(PageSource::new(allocator, Order::ZERO), min_nr)
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
        Self::new(PageSource::new(allocator, order), min_nr)
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

    /// Allocates one element as a plain value, which the caller must return by [`free_raw`](Self::free_raw).
    ///
    /// # Errors
    /// [`Error::Exhausted`] if `gfp` does not wait, and neither the source nor the reserve has an element.
    #[inline]
    pub fn alloc_raw(&self, gfp: Gfp) -> Result<S::Item, Error> {
        let mut slot = [None];
        self.alloc_bulk_array_raw(Bulk::exact(1).gfp(gfp), &mut slot)?;
        let [Some(item)] = slot else { unreachable!("a request that succeeded left its slot empty") };
        Ok(item)
    }

    /// As [`alloc_bulk_array`](Self::alloc_bulk_array), with plain values, which the caller must return by
    /// [`free_bulk_raw`](Self::free_bulk_raw).
    ///
    /// # Errors
    /// [`Error::Exhausted`] if the request may not wait, or not any longer. Elements that were delivered until then
    /// stay in their slots. [`Error::Invalid`] if n is above `min_nr`.
    ///
    /// Return them by `free_bulk_raw` before the array is dropped: a plain element that is dropped never comes back.
    ///
    /// A pool promises all that was asked for, so only an exact request compiles:
    /// ```compile_fail,E0308
    /// # use pagemill::{Allocator, Bulk, Mempool, Page};
    /// # fn ask(pool: &Mempool<pagemill::PageSource<Page>>, slots: &mut [Option<Page>]) {
    /// pool.alloc_bulk_array_raw(Bulk::up_to(2), slots);
    /// # }
    /// ```
    #[inline]
    pub fn alloc_bulk_array_raw(
        &self,
        request: Bulk<'_, Exact, S::Item>,
        slots: &mut [Option<S::Item>],
    ) -> Result<(), Error> {
        let (n, len) = (request.request.most, slots.len());
        let slots = slots.get_mut(..n).ok_or(InvalidRequest::ArrayTooShort { slots: len, count: n })?;
        self.get(request.request, Array::new(slots))
    }

    /// As [`alloc_bulk_callback`](Self::alloc_bulk_callback), with plain values.
    ///
    /// # Errors
    /// As for [`alloc_bulk_array_raw`](Self::alloc_bulk_array_raw).
    ///
    /// ```
    /// use pagemill::{Allocator, Bulk, Gfp, Mempool};
    /// let pool = Mempool::pages(&Allocator::builder().pages(64).build()?, 16)?;
    /// let mut pages = Vec::new();
    /// pool.alloc_bulk_callback_raw(Bulk::exact(16).gfp(Gfp::NOIO), |page| pages.push(Some(page)))?;
    /// assert_eq!(pool.free_bulk_raw(&mut pages), 16);
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn alloc_bulk_callback_raw(
        &self,
        request: Bulk<'_, Exact, S::Item>,
        each: impl FnMut(S::Item),
    ) -> Result<(), Error> {
        self.get(request.request, Callback::new(request.request.most, each))
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
    fn note_lie(&self) {
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

    fn lock(&self) -> Held<'_, S::Item> {
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

impl<S: Source> Mempool<S> {
    /// The way of every request.
    #[inline]
    fn get(&self, request: Request<'_>, mut want: impl Want<S>) -> Result<(), Error> {
        request.gfp.check()?;
        if request.most > self.min_nr.load(Relaxed) {
            return Err(self.refusal(&request));
        }
        want.ask(self, request.at_once(request.gfp.nowait()))?;
        if want.missing() == 0 { Ok(()) } else { self.get_slow(request, want) }
    }

    #[cold]
    fn refusal(&self, request: &Request<'_>) -> Error {
        InvalidRequest::AboveReserve { count: request.most, min_nr: self.min_nr.load(Relaxed) }.into()
    }

    #[cold]
    #[inline(never)]
    fn get_slow(&self, request: Request<'_>, mut want: impl Want<S>) -> Result<(), Error> {
        let patience = Patience { deadline: request.timeout.map(from_now), cancel: request.cancel };
        let at_once = request.at_once(request.gfp.nowait());
        // A request in a shrinker may wait, since freed elements need no memory, but it may not reclaim.
        let with_reclaim = (!reclaim::is_reclaiming()).then(|| request.at_once(request.gfp.noretry()));
        let is_served = self.take_whole(&mut want, request.gfp, false)
            || (request.gfp.may_wait() && self.ask_and_take(&mut want, with_reclaim, request.gfp, false)?)
            || (request.gfp.may_wait()
                && self.wait(&request, &patience, || {
                    Ok(self.ask_and_take(&mut want, Some(at_once), request.gfp, true)?
                        || self.ask_and_take(&mut want, with_reclaim, request.gfp, true)?)
                })?);
        match want.missing() {
            0 if is_served => Ok(()),
            missing => Err(short(&request, request.most - missing, self.source.order())),
        }
    }

    /// Asks the source, if a `request` is given, and then takes the whole remainder from the reserve. Returns whether
    /// the request is served.
    fn ask_and_take(
        &self,
        want: &mut impl Want<S>,
        request: Option<Request<'_>>,
        gfp: Gfp,
        is_first: bool,
    ) -> Result<bool, Error> {
        if let Some(request) = request {
            let mut before = want.missing();
            want.ask(self, request)?;
            // A page source that has some pages does not reclaim for the rest (C3.4). Asked again, it does.
            while request.gfp.may_wait() && (1..before).contains(&want.missing()) {
                before = want.missing();
                want.ask(self, request)?;
            }
        }
        Ok(want.missing() == 0 || self.take_whole(want, gfp, is_first))
    }

    /// Takes the missing elements from the reserve, all of them or none (M2).
    fn take_whole(&self, want: &mut impl Want<S>, gfp: Gfp, is_first: bool) -> bool {
        let mut reserve = self.lock();
        let (mut missing, available) = (want.missing(), reserve.available());
        if cfg!(pagemill_canary) {
            missing = missing.min(available); // Takes a part: two requests with a part each wait for each other.
        }
        // Checked with the reserve locked: a request that lines up after this check makes its attempt after it.
        if available < missing || (!is_first && self.waits.is_awaited()) {
            return false;
        }
        reserve.claimed += missing;
        reserve.taken += missing as u64;
        reserve.low_water = reserve.low_water.min(reserve.available());
        self.lacks.store(reserve.lacks(self.min_nr.load(Relaxed)), Relaxed);
        drop(reserve);
        self.out.fetch_add(missing, Relaxed);
        let mut claim = Claim::new(self, missing);
        while let Some(mut item) = claim.next() {
            self.source.renew(&mut item, gfp);
            want.put(item);
        }
        want.missing() == 0
    }

    /// Notes a request that is about to wait.
    fn need(&self, request: &Request<'_>) -> Result<Need<'_, S>, Error> {
        let mut reserve = self.lock();
        if request.most > self.min_nr.load(Relaxed) {
            return Err(self.refusal(request)); // The reserve shrank meanwhile.
        }
        reserve.needs.push(request.most);
        drop(reserve);
        Ok(Need { pool: self, count: request.most, stamp: Stamp::here() })
    }

    /// Waits in line until `attempt` returns true. False if the request's patience ended first.
    fn wait(
        &self,
        request: &Request<'_>,
        patience: &Patience<'_>,
        mut attempt: impl FnMut() -> Result<bool, Error>,
    ) -> Result<bool, Error> {
        let _need = self.need(request)?;
        let served =
            self.waits.wait((), patience, None, |_| attempt().map(|is_served| is_served.then_some(true)).transpose());
        served.unwrap_or(Ok(false))
    }
}

/// The error of a request that got fewer elements than it must have.
fn short(request: &Request<'_>, got: usize, order: Order) -> Error {
    let why = match (request.cancel, request.gfp.may_wait() && request.timeout.is_some()) {
        (Some(cancel), _) if cancel.is_cancelled() => Why::Cancelled,
        (_, true) => Why::TimedOut,
        _ => Why::Exhausted,
    };
    Exhausted { wanted: request.most, got, order: order.get(), why }.into()
}

/// The size of a waiting request. The reserve does not shrink below it.
struct Need<'p, S: Source> {
    pool: &'p Mempool<S>,
    count: usize,
    stamp: Stamp,
}

impl<S: Source> Need<'_, S> {
    /// Whether it was noted before this process was forked: the child has forgotten it.
    fn is_inherited(&self) -> bool {
        self.stamp.is_inherited()
    }
}

impl<S: Source> Drop for Need<'_, S> {
    fn drop(&mut self) {
        let needs = &mut self.pool.lock().needs;
        // If the source forked, this is the child, where the need is forgotten already.
        let at = needs.iter().position(|&need| need == self.count && !self.is_inherited());
        if let Some(at) = at {
            needs.swap_remove(at);
        }
    }
}

impl<S: Source> Drop for Mempool<S> {
    fn drop(&mut self) {
        drop(self.lock()); // In a forked child, this forgets the parent's waits first.
        let reserve = self.reserve.get_mut().unwrap_or_else(PoisonError::into_inner);
        reserve.elements.drain(..).for_each(|item| self.source.free(item));
    }
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
#[non_exhaustive]
pub struct ElementsOut<S: Source> {
    /// The pool, unchanged.
    pub pool: Mempool<S>,
    /// The number of elements that are out.
    pub out: usize,
}

impl<S: Source> core::fmt::Display for ElementsOut<S> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let plural = if self.out == 1 { "" } else { "s" };
        write!(f, "the pool still has {} element{plural} handed out; free them first", self.out)
    }
}
impl<S: Source> core::fmt::Debug for ElementsOut<S> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        core::fmt::Display::fmt(self, f)
    }
}
impl<S: Source> core::error::Error for ElementsOut<S> {}

/// The unserved rest of a request.
trait Want<S: Source> {
    /// The number of elements that it still needs.
    fn missing(&self) -> usize;
    /// Takes what the source delivers, and counts the elements that were in fact delivered as out, whatever the source
    /// returns.
    fn ask(&mut self, pool: &Mempool<S>, request: Request<'_>) -> Result<(), Error>;
    /// Takes one element from the reserve.
    fn put(&mut self, item: S::Item);
}

/// The array form: fills empty slots.
struct Array<'s, T> {
    slots: &'s mut [Option<T>],
    missing: usize,
    /// No slot before this index is empty.
    at: usize,
}

impl<'s, T> Array<'s, T> {
    #[inline]
    fn new(slots: &'s mut [Option<T>]) -> Self {
        Self { missing: slots.len(), slots, at: 0 }
    }
}

impl<S: Source> Want<S> for Array<'_, S::Item> {
    #[inline]
    fn missing(&self) -> usize {
        self.missing
    }
    #[inline]
    fn ask(&mut self, pool: &Mempool<S>, request: Request<'_>) -> Result<(), Error> {
        let before = empty(self.slots);
        let said = pool.source.fill(Bulk::of(request), self.slots);
        (self.missing, self.at) = (empty(self.slots), 0);
        let added = before.saturating_sub(self.missing);
        pool.out.fetch_add(added, Relaxed);
        if said? != added {
            pool.note_lie();
        }
        Ok(())
    }
    fn put(&mut self, item: S::Item) {
        while self.slots[self.at].is_some() {
            self.at += 1;
        }
        self.slots[self.at] = Some(item);
        self.missing -= 1;
    }
}

#[inline]
fn empty<T>(slots: &[Option<T>]) -> usize {
    slots.iter().filter(|slot| slot.is_none()).count()
}

/// The callback form.
struct Callback<F> {
    missing: usize,
    each: F,
}

impl<F> Callback<F> {
    fn new(count: usize, each: F) -> Self {
        Self { missing: count, each }
    }
}

impl<S: Source, F: FnMut(S::Item)> Want<S> for Callback<F> {
    fn missing(&self) -> usize {
        self.missing
    }
    fn ask(&mut self, pool: &Mempool<S>, request: Request<'_>) -> Result<(), Error> {
        let before = self.missing;
        let mut delivered = Delivered::new(&pool.out, before);
        let Self { missing, each } = self;
        let said = pool.source.deliver(Bulk::of(request), before, &mut |item| {
            if *missing == 0 {
                return pool.source.free(item); // More than was asked for.
            }
            delivered.left -= 1;
            *missing -= 1;
            each(item);
        })?;
        if said != before - self.missing {
            pool.note_lie();
        }
        Ok(())
    }
    fn put(&mut self, item: S::Item) {
        self.missing -= 1;
        (self.each)(item);
    }
}

/// Counts elements as out before the callback receives them, since it may free each at once. When it is dropped, also
/// by unwinding, it subtracts those that were not delivered.
struct Delivered<'p> {
    out: &'p AtomicUsize,
    left: usize,
}

impl<'p> Delivered<'p> {
    fn new(out: &'p AtomicUsize, count: usize) -> Self {
        out.fetch_add(count, Relaxed);
        Self { out, left: count }
    }
}

impl Drop for Delivered<'_> {
    fn drop(&mut self) {
        self.out.fetch_sub(self.left, Relaxed);
    }
}

/// How many elements leave the reserve in one section. It bounds how many are in hand if a callback unwinds.
const HANDFUL: usize = 32;

/// Elements that were claimed for one request and are on their way out; they count as out. If a callback unwinds, the
/// elements that it did not receive stay in the reserve.
struct Claim<'p, S: Source> {
    pool: &'p Mempool<S>,
    /// The number of its elements that are still in the reserve.
    left: usize,
    hand: [Option<S::Item>; HANDFUL],
    /// The number of elements in `hand`.
    held: usize,
    /// The process that it was claimed in.
    stamp: Stamp,
}

impl<'p, S: Source> Claim<'p, S> {
    fn new(pool: &'p Mempool<S>, count: usize) -> Self {
        Self { pool, left: count, hand: [const { None }; HANDFUL], held: 0, stamp: Stamp::here() }
    }

    /// Locks the reserve, in which `left` elements are claimed. If the callback forked, this is the child, where the
    /// claim does not hold: it is made again, or given up if the reserve has too few elements.
    fn lock(&mut self) -> Held<'p, S::Item> {
        let mut reserve = self.pool.lock();
        if self.stamp.renew() {
            if reserve.available() < self.left {
                self.pool.out.fetch_sub(self.left, Relaxed);
                self.left = 0;
            }
            reserve.claimed += self.left;
            self.pool.lacks.store(reserve.lacks(self.pool.min_nr.load(Relaxed)), Relaxed);
        }
        reserve
    }

    #[inline]
    fn next(&mut self) -> Option<S::Item> {
        if self.held == 0 && self.left > 0 {
            self.take_handful();
        }
        self.held = self.held.checked_sub(1)?;
        self.hand[self.held].take()
    }

    #[inline(never)]
    fn take_handful(&mut self) {
        let mut reserve = self.lock();
        let count = self.left.min(HANDFUL);
        let kept = reserve.elements.len() - count;
        for (slot, item) in self.hand.iter_mut().zip(reserve.elements.drain(kept..)) {
            *slot = Some(item);
        }
        reserve.claimed -= count;
        self.left -= count;
        self.held = count;
    }
}

impl<S: Source> Drop for Claim<'_, S> {
    fn drop(&mut self) {
        if self.left + self.held == 0 {
            return;
        }
        let pool = self.pool;
        let surplus = {
            let mut reserve = self.lock();
            reserve.claimed -= self.left;
            let min_nr = pool.min_nr.load(Relaxed);
            // Elements that were freed meanwhile took the place of those that stay.
            let kept = reserve.elements.len().min(min_nr + reserve.claimed);
            reserve.elements.split_off(kept)
        };
        surplus.into_iter().for_each(|item| pool.source.free(item));
        pool.out.fetch_sub(self.left, Relaxed);
        pool.free_bulk_raw(&mut self.hand); // Wakes the first waiting request too.
    }
}
