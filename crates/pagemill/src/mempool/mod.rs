//! A pool that keeps a reserve, so that who asks makes progress even when memory is out (the kernel's `mempool`).
//!
//! A storage path that frees memory by writing it out must not wait for memory to do so. It keeps enough elements for one
//! operation aside, takes from them when the page allocator has none, and waits for the operations before it to give
//! theirs back, which needs no memory.
//!
//! The way of a request (C5.2): [`Mempool::get`] asks the [`Source`] without waiting; what is missing comes from the
//! reserve; both again with reclaim; then it waits for its turn and tries again whenever elements come back, or 10 ms
//! have passed.
//!
//! # Invariants
//! - M1 Of the elements in the reserve at most `min_nr` are claimed by nobody, but for those that a callback which unwound, or
//!   in the child of a fork a thread that is not there, has left there. What is freed while the reserve lacks something goes into it (C5.5).
//! - M2 The remainder of a request leaves the reserve whole: it is claimed in one section, and only while nobody waits or by
//!   the first of those who wait (C5.3).
//! - M3 No request waits that asks for more than `min_nr`.
//!
//! From these follows progress: whoever holds elements of the reserve has all that it asked for, so it goes on and gives
//! them back, until the reserve is full; then the first of those who wait is served. Elements that a waiting request
//! already has came from the source, and the reserve does not lack them.
//!
//! # Locks
//! The reserve's lock is held for moving element handles only: no source, callback or other lock is entered with it, and it
//! is never held together with that of the lines in [`crate::wait`]. No fork begins while it is held ([`no_fork`]), so that a child
//! finds it free and the reserve whole; whoever takes it there first forgets what the parent's threads waited for or were taking.
//!
//! The choices, and what shows that they do: `docs/adr/0022-the-pool.md`.
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

mod source;
mod stats;

pub use source::{PageSource, Pair, Source};
pub use stats::MempoolStats;

/// Elements with a reserve of `min_nr` of them: a request for up to so many always succeeds if it may wait, as long as
/// what others took comes back.
///
/// Elements are plain values, [`Page`]s say. They come back by [`free`](Self::free) and [`free_bulk`](Self::free_bulk); one
/// that is dropped instead returns to the allocator past the reserve, and counts as out for ever.
///
/// Who holds elements of a pool must not wait for more of the same pool: a request that is split frees part by part (C5.3).
///
/// In the child of a fork the pool goes on with the reserve that it had. The parent's other threads are not there: nobody
/// waits, and what they had of the pool is out for ever. So the reserve may lack elements until others are freed, and such
/// a pool is dropped, not [closed](Self::close).
///
/// ```
/// use pagemill::{Allocator, Bulk, Gfp, Mempool, Page};
/// let allocator = Allocator::builder().pages(80).build()?;
/// let pool = Mempool::pages(&allocator, 64)?;
/// let everything_else = allocator.alloc_pages_bulk_array(Bulk::up_to(16), &mut [const { None::<Page> }; 16]);
///
/// let mut pages = [const { None }; 64];
/// pool.alloc_bulk_array(Bulk::exact(64).gfp(Gfp::NOIO), &mut pages)?;
/// assert_eq!(pool.free_bulk(&mut pages), 64);
/// pool.close().unwrap();
/// # drop(everything_else);
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Debug)]
pub struct Mempool<S: Source> {
    source: S,
    reserve: Mutex<Reserve<S::Item>>,
    /// What the reserve lacks. While it is 0, what is freed goes past it. Written with the reserve locked.
    ///
    /// Read without: whoever frees an element of the reserve got it from the one who took it out, so it sees what that one
    /// wrote here or something later. Another's element that misses the reserve for a stale 0 is no loss.
    lacks: AtomicUsize,
    /// The size of a full reserve. Written with the reserve locked.
    min_nr: AtomicUsize,
    /// Handed out and not freed.
    out: AtomicUsize,
    misused: AtomicU64,
    waits: Waits,
    /// The process that claims and waits are of. Renewed with the reserve locked.
    stamp: AtomicStamp,
}

struct Reserve<T> {
    elements: Vec<T>,
    /// How many of them are promised to requests that are taking them out.
    claimed: usize,
    /// What the requests that wait have asked for, each.
    needs: Vec<usize>,
    low_water: usize,
    taken: u64,
}

impl<T> core::fmt::Debug for Reserve<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{} elements, {} claimed", self.elements.len(), self.claimed)
    }
}

/// The reserve, locked. No fork begins meanwhile.
struct Held<'p, T> {
    reserve: MutexGuard<'p, Reserve<T>>,
    /// Goes last.
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
    /// What a reserve of `min_nr` lacks.
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
    /// pool.free(block);
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn blocks(allocator: &Allocator, order: Order, min_nr: usize) -> Result<Self, Error> {
        Self::new(PageSource::new(allocator, order), min_nr)
    }
}

impl<T: Send, A: Fn(Gfp) -> Option<T>, F: Fn(T)> Mempool<Pair<A, F>> {
    /// A pool of whatever `alloc` makes and `free` ends, with a reserve of `min_nr`.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    ///
    /// ```
    /// use pagemill::{Gfp, Mempool};
    /// let pool = Mempool::from_fns(|_gfp| Some(String::new()), drop, 2)?;
    /// pool.free(pool.alloc(Gfp::NOWAIT)?);
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn from_fns(alloc: A, free: F, min_nr: usize) -> Result<Self, Error> {
        Self::new(Pair { alloc, free }, min_nr)
    }
}

impl<S: Source> Mempool<S> {
    /// A pool over `source`, its reserve filled with `min_nr` elements, one by one (C5.1).
    ///
    /// # Errors
    /// [`Error::Exhausted`] if the source does not have so many; what it had goes back. [`Error::Invalid`] if `min_nr` is 0
    /// or above [`Bulk::COUNT_MAX`].
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

    /// One element.
    ///
    /// # Errors
    /// [`Error::Exhausted`] if `gfp` does not wait and neither the source nor the reserve has one.
    #[inline]
    pub fn alloc(&self, gfp: Gfp) -> Result<S::Item, Error> {
        let mut slot = [None];
        self.alloc_bulk_array(Bulk::exact(1).gfp(gfp), &mut slot)?;
        let [Some(item)] = slot else { unreachable!("a request that succeeded left its slot empty") };
        Ok(item)
    }

    /// Fills the empty slots among the first n of `slots`, all of them; n is the request's count. The request waits for as
    /// long as it must if its flags, deadline and cancel token let it (C5.2).
    ///
    /// # Errors
    /// [`Error::Exhausted`] if it may not wait, or no longer: what was delivered until then stays in its slots.
    /// [`Error::Invalid`] for n above `min_nr`.
    #[inline]
    pub fn alloc_bulk_array(
        &self,
        request: Bulk<'_, Exact, S::Item>,
        slots: &mut [Option<S::Item>],
    ) -> Result<(), Error> {
        let (request, n) = (request.request, request.request.most);
        let len = slots.len();
        let slots = slots.get_mut(..n).ok_or(InvalidRequest::ArrayTooShort { slots: len, count: n })?;
        self.get(request, Array::new(slots))
    }

    /// Hands n elements to `each`; n is the request's count. As [`alloc_bulk_array`](Self::alloc_bulk_array), and what was
    /// delivered is `each`'s in any case.
    ///
    /// # Errors
    /// As there.
    ///
    /// ```
    /// use pagemill::{Allocator, Bulk, Gfp, Mempool};
    /// let pool = Mempool::pages(&Allocator::builder().pages(64).build()?, 16)?;
    /// let mut pages = Vec::new();
    /// pool.alloc_bulk_callback(Bulk::exact(16).gfp(Gfp::NOIO), |page| pages.push(Some(page)))?;
    /// assert_eq!(pool.free_bulk(&mut pages), 16);
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn alloc_bulk_callback(
        &self,
        request: Bulk<'_, Exact, S::Item>,
        each: impl FnMut(S::Item),
    ) -> Result<(), Error> {
        self.get(request.request, Callback::new(request.request.most, each))
    }

    /// Takes an element back: into the reserve if that lacks one, to the source if not.
    #[inline]
    pub fn free(&self, item: S::Item) {
        self.free_bulk(&mut [Some(item)]);
    }

    /// Takes back what the slots hold and empties them; the reserve is refilled first, in one section (C5.5). Returns how
    /// many those were.
    ///
    /// An element that this pool has not handed out does not belong here. It is told where that costs nothing, when more come
    /// back than are out or when the reserve would keep it, and is counted as [misuse](MempoolStats::misused).
    #[inline]
    pub fn free_bulk(&self, slots: &mut [Option<S::Item>]) -> usize {
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

    /// So many more came back than were out.
    #[cold]
    fn refuse(&self, count: usize) {
        self.out.fetch_add(count, Relaxed);
        self.misused.fetch_add(count as u64, Relaxed);
    }

    /// The source did something else than it said.
    #[cold]
    fn note_lie(&self) {
        self.misused.fetch_add(1, Relaxed);
    }

    /// What the reserve lacks goes there. Returns how many are none of the source's.
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
        // The order matters: no element is taken from its slot that is not kept.
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

    /// Makes the reserve larger or smaller. Growing fills it one by one; when that fails it is as it was (C5.6).
    ///
    /// # Errors
    /// [`Error::Exhausted`] if the source does not have so many. [`Error::Invalid`] for 0, for less than a request that waits
    /// has asked for, or for more than [`Bulk::COUNT_MAX`].
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
            // Another resize was first. It is not waited for: in the child of a fork it may never end.
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

    /// Elements for the reserve, one by one; all of them or none.
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

    /// Gives the reserve back and ends the pool.
    ///
    /// # Errors
    /// [`ElementsOut`] with the number of elements, while some are out; nothing has changed then.
    #[expect(clippy::result_large_err, reason = "a pool is closed once, and what is refused is given back as it was")]
    pub fn close(self) -> Result<(), ElementsOut<S>> {
        match self.out.load(Relaxed) {
            0 => Ok(()),
            out => Err(ElementsOut { pool: self, out }),
        }
    }

    /// What it holds, and what it was under.
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

    /// In the child of a fork: who waited, or was taking elements out, is not there. What was promised to them stays.
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
        let at_once = request.at_once(request.gfp.nowait());
        // In a shrinker it may wait, for what comes back without memory, but not reclaim once more.
        let with_reclaim = (!reclaim::is_reclaiming()).then(|| request.at_once(request.gfp.noretry()));
        let is_served = self.take_whole(&mut want, request.gfp, false)
            || (request.gfp.may_wait() && self.ask_and_take(&mut want, with_reclaim, request.gfp, false)?)
            || (request.gfp.may_wait()
                && self.wait(&request, || {
                    Ok(self.ask_and_take(&mut want, Some(at_once), request.gfp, true)?
                        || self.ask_and_take(&mut want, with_reclaim, request.gfp, true)?)
                })?);
        match want.missing() {
            0 if is_served => Ok(()),
            missing => Err(short(&request, request.most - missing, self.source.order())),
        }
    }

    /// Asks the source, if there is something to ask it, then the reserve for the whole remainder. Is the request served?
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
            // A page source that has some does not reclaim for the rest (C3.4): asked again, it does.
            while request.gfp.may_wait() && (1..before).contains(&want.missing()) {
                before = want.missing();
                want.ask(self, request)?;
            }
        }
        Ok(want.missing() == 0 || self.take_whole(want, gfp, is_first))
    }

    /// Takes what is missing from the reserve, all of it or nothing (M2).
    fn take_whole(&self, want: &mut impl Want<S>, gfp: Gfp, is_first: bool) -> bool {
        let mut reserve = self.lock();
        let (mut missing, available) = (want.missing(), reserve.available());
        if cfg!(pagemill_canary) {
            missing = missing.min(available); // Takes part of it: two that each hold part wait for each other.
        }
        // Looked at with the reserve locked: who takes a seat after this tries after this.
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

    /// Waits for its turn, and until `attempt` says that the request is served. False if its patience ended before.
    fn wait(&self, request: &Request<'_>, mut attempt: impl FnMut() -> Result<bool, Error>) -> Result<bool, Error> {
        {
            let mut reserve = self.lock();
            let min_nr = self.min_nr.load(Relaxed);
            if request.most > min_nr {
                return Err(InvalidRequest::AboveReserve { count: request.most, min_nr }.into()); // It shrank meanwhile.
            }
            reserve.needs.push(request.most);
        }
        let _need = Need { pool: self, count: request.most, stamp: Stamp::here() };
        let patience = Patience { deadline: request.timeout.map(from_now), cancel: request.cancel };
        let served =
            self.waits.wait((), &patience, None, |_| attempt().map(|is_served| is_served.then_some(true)).transpose());
        served.unwrap_or(Ok(false))
    }
}

/// A request got fewer than it must have.
fn short(request: &Request<'_>, got: usize, order: Order) -> Error {
    let why = match (request.cancel, request.gfp.may_wait() && request.timeout.is_some()) {
        (Some(cancel), _) if cancel.is_cancelled() => Why::Cancelled,
        (_, true) => Why::TimedOut,
        _ => Why::Exhausted,
    };
    Exhausted { wanted: request.most, got, order: order.get(), why }.into()
}

/// What a request that waits has asked for: the reserve does not shrink below it.
struct Need<'p, S: Source> {
    pool: &'p Mempool<S>,
    count: usize,
    stamp: Stamp,
}

impl<S: Source> Drop for Need<'_, S> {
    fn drop(&mut self) {
        let needs = &mut self.pool.lock().needs;
        // If the source forked, this is the child, where it is forgotten.
        let at = needs.iter().position(|&need| need == self.count && !self.stamp.is_inherited());
        if let Some(at) = at {
            needs.swap_remove(at);
        }
    }
}

impl<S: Source> Drop for Mempool<S> {
    fn drop(&mut self) {
        drop(self.lock()); // In the child of a fork nothing that those had who waited is touched.
        let reserve = self.reserve.get_mut().unwrap_or_else(PoisonError::into_inner);
        reserve.elements.drain(..).for_each(|item| self.source.free(item));
    }
}

/// [`Mempool::close`] was refused: elements are out.
///
/// ```
/// # use pagemill::{Allocator, Gfp, Mempool};
/// # let pool = Mempool::pages(&Allocator::builder().pages(8).build()?, 1)?;
/// let page = pool.alloc(Gfp::NOIO)?;
/// let refused = pool.close().unwrap_err();
/// assert_eq!(refused.to_string(), "the pool still has 1 element handed out; free them first");
/// refused.pool.free(page);
/// refused.pool.close().unwrap();
/// # Ok::<(), pagemill::Error>(())
/// ```
pub struct ElementsOut<S: Source> {
    /// The pool, as it was.
    pub pool: Mempool<S>,
    /// How many elements are out.
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

/// The rest of a request.
trait Want<S: Source> {
    /// How many elements it still needs.
    fn missing(&self) -> usize;
    /// Takes what the source has for it, and counts that as out: what it did, whatever it says.
    fn ask(&mut self, pool: &Mempool<S>, request: Request<'_>) -> Result<(), Error>;
    /// Takes one from the reserve.
    fn put(&mut self, item: S::Item);
}

/// The array form: empty slots.
struct Array<'s, T> {
    slots: &'s mut [Option<T>],
    missing: usize,
    /// No slot before this one is empty.
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
                return pool.source.free(item); // More than it was asked for.
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

/// Counts what the callback was asked to take, and of that in the end what it got, also if it unwinds. Before, since it may
/// free at once what it gets.
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

/// So many elements leave the reserve in one section: those in the hand of a callback that unwinds are few.
const HANDFUL: usize = 32;

/// Elements that were promised to one request and are on their way out; counted as out. Those that it does not take, since
/// a callback unwinds, stay in the reserve.
struct Claim<'p, S: Source> {
    pool: &'p Mempool<S>,
    /// Still in the reserve.
    left: usize,
    hand: [Option<S::Item>; HANDFUL],
    /// In the hand.
    held: usize,
    /// The process that it was promised in.
    stamp: Stamp,
}

impl<'p, S: Source> Claim<'p, S> {
    fn new(pool: &'p Mempool<S>, count: usize) -> Self {
        Self { pool, left: count, hand: [const { None }; HANDFUL], held: 0, stamp: Stamp::here() }
    }

    /// The reserve, in which `left` elements are claimed. If the callback forked, this is the child, where no claim holds: it
    /// claims the rest again, or gives it up if that is no longer there.
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

    fn next(&mut self) -> Option<S::Item> {
        if self.held == 0 && self.left > 0 {
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
        self.held = self.held.checked_sub(1)?;
        self.hand[self.held].take()
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
            // What was freed meanwhile has taken the place of those that stay.
            let kept = reserve.elements.len().min(min_nr + reserve.claimed);
            reserve.elements.split_off(kept)
        };
        surplus.into_iter().for_each(|item| pool.source.free(item));
        pool.out.fetch_sub(self.left, Relaxed);
        pool.free_bulk(&mut self.hand); // Wakes the first of those who wait as well.
    }
}
