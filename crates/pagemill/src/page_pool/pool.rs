//! The consumer's end of a pool.
use super::cache::{CACHE, Cache};
use super::frag::{Cut, Frag};
use super::page::PoolPage;
use super::record::Ending;
use super::shared::{Hand, REFILL, SharedPtr};
use super::stats::PagePoolStats;
use crate::allocator::Allocator;
use crate::bulk::{Bulk, Exact};
use crate::error::{Error, InvalidRequest};
use crate::handle::{Block, Owned, Page};
use crate::mempool::{PageSource, Source};
use crate::sync::let_others_on;
use core::fmt;
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::{Exhausted, Gfp, NodeId, Order, Policy, Why};
use std::sync::Arc;

const _: () = assert!(REFILL <= CACHE);

/// Slots of the ring by default, as in the kernel.
const RING: usize = 1024;
const RING_MAX: usize = 32768;

/// A pool of pages that circulate: the consumer's end (the kernel's `page_pool`).
///
/// One thread at a time has it, and takes pages from it. A page goes back to the pool when its handle, a [`PoolPage`], is
/// dropped, on whatever thread. So a page that a device may still write to is not handed out again as long as its handle
/// is kept (see [`InFlight`](crate::InFlight)).
///
/// Pages keep their contents and their place while they circulate, and so their device address. They come from a
/// [`Source`]: the page allocator ([`pages`](Self::pages), [`blocks`](Self::blocks)) or a program's own
/// ([`new`](Self::new)), such as a registered region or a device's memory (C7.6).
///
/// A forked child must not use a pool whose memory it shares with its parent (`Memory::memfd`): both have the same pages in
/// the cache and in the ring.
///
/// Dropping the pool, or [`destroy`](Self::destroy), ends it: pages that are out go back to the source one by one, and
/// the last one ends what is left of the pool.
///
/// ```
/// use pagemill::{Allocator, Gfp, PagePool};
/// let allocator = Allocator::builder().pages(256).build()?;
/// let mut pool = PagePool::pages(&allocator);
/// let mut page = pool.alloc(Gfp::NOWAIT)?;
/// page[..4].copy_from_slice(b"ping");
/// // Another thread is done with it: it goes to the ring.
/// std::thread::spawn(move || drop(page)).join().unwrap();
/// assert_eq!((pool.stats().ring, pool.in_flight()), (1, 0));
/// # Ok::<(), pagemill::Error>(())
/// ```
pub struct PagePool<S: Source = PageSource<Page>> {
    cache: Cache<S::Item>,
    own: Own,
    shared: SharedPtr<S>,
    /// Asked once: the pool ends without calling the source's code, which may unwind, before its ring has ended.
    is_high_order: bool,
    node: Option<NodeId>,
    /// The page that fragments are cut from.
    cut: Option<Cut<S>>,
}

/// The consumer's figures. What a page from the cache would count is derived from the others, so that it counts nothing.
#[derive(Default)]
struct Own {
    /// Pages that a refill put into the cache.
    refilled: u64,
    /// Those of them that the request took which the refill was made for.
    not_fast: u64,
    slow: u64,
    empty: u64,
    refill: u64,
    waive: u64,
    cached: u64,
    cache_full: u64,
    released_refcnt: u64,
}

impl PagePool<PageSource<Page>> {
    /// A pool of the allocator's pages.
    pub fn pages(allocator: &Allocator) -> Self {
        Self::new(PageSource::pages(allocator))
    }
}

impl PagePool<PageSource<Block>> {
    /// A pool of blocks of one order.
    ///
    /// ```
    /// use pagemill::{Allocator, Gfp, Order, PagePool};
    /// let mut pool = PagePool::blocks(&Allocator::builder().pages(256).build()?, Order::new(2).unwrap());
    /// let block = pool.alloc(Gfp::NOWAIT)?;
    /// assert_eq!((block.len(), pool.stats().slow_high_order), (16384, 1));
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn blocks(allocator: &Allocator, order: Order) -> Self {
        Self::new(PageSource::blocks(allocator, order))
    }
}

impl<S: Source> PagePool<S> {
    /// A pool of what this source makes, with a ring of 1024 slots.
    ///
    /// ```
    /// use pagemill::{Bulk, Error, Exact, Gfp, PagePool, Source};
    /// /// Frames of a region that a device knows, by their numbers.
    /// struct Region(std::sync::Mutex<Vec<u32>>);
    /// impl Source for Region {
    ///     type Item = u32;
    ///     fn alloc(&self, _: Bulk<'_, Exact, u32>) -> Result<Option<u32>, Error> {
    ///         Ok(self.0.lock().unwrap().pop())
    ///     }
    ///     fn free(&self, frame: u32) {
    ///         self.0.lock().unwrap().push(frame);
    ///     }
    /// }
    /// let mut pool = PagePool::new(Region((0..100).collect::<Vec<_>>().into()));
    /// let frame = pool.alloc(Gfp::NOWAIT)?;
    /// assert!(*frame < 100);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn new(source: S) -> Self {
        Self::of_ring(source, RING)
    }

    /// The same with a ring of `slots` slots, rounded up to a power of two. Pages that are returned while the ring is full
    /// go back to the source.
    ///
    /// # Errors
    /// [`InvalidRequest::RingSize`] if `slots` is 0 or above 32768, the kernel's limit.
    pub fn with_ring(source: S, slots: usize) -> Result<Self, Error> {
        if !(1..=RING_MAX).contains(&slots) {
            return Err(InvalidRequest::RingSize { slots, max: RING_MAX }.into());
        }
        Ok(Self::of_ring(source, slots))
    }

    fn of_ring(source: S, slots: usize) -> Self {
        crate::registry::watch(); // The fork hooks must be registered before the stamp is taken.
        let is_high_order = source.order() > Order::ZERO;
        let shared = SharedPtr::new(source, slots);
        Self { cache: Cache::new(), own: Own::default(), shared, is_high_order, node: None, cut: None }
    }

    /// Has the pool prefer memory of a node. Pages of other nodes are not taken from the ring: they go back to the source.
    ///
    /// ```
    /// use pagemill::{Allocator, NodeId, PagePool};
    /// let pool = PagePool::pages(&Allocator::builder().pages(256).build()?).on_node(NodeId::ZERO);
    /// # drop(pool);
    /// # Ok::<(), pagemill::BuildError>(())
    /// ```
    #[must_use]
    pub fn on_node(mut self, node: NodeId) -> Self {
        self.node = Some(node);
        self
    }

    /// Names the pool for observers: see [`page_pools`](crate::page_pools). A pool that has a name keeps it.
    ///
    /// ```
    /// use pagemill::{Allocator, PagePool};
    /// let pool = PagePool::pages(&Allocator::builder().pages(256).build()?).named("eth0, queue 3");
    /// # drop(pool);
    /// # Ok::<(), pagemill::BuildError>(())
    /// ```
    #[must_use]
    pub fn named(self, name: impl Into<String>) -> Self {
        self.shared.get().record.name.get_or_init(|| name.into().into());
        self
    }

    /// Takes a page. Its contents are what its last owner left, unless `gfp` has `ZERO`.
    ///
    /// What `gfp` says of reclaim and waiting is said to the source, with two differences. A request for 64 never tries for
    /// all of them: with `RETRY_MAYFAIL` it asks for one if none came. With `NOFAIL` the pool asks its ring and its source in
    /// turn until one has a page, since the pages that it waits for may come back to the ring.
    ///
    /// # Errors
    /// [`Error::Exhausted`] if cache and ring are empty and the source has none; the source's error otherwise. Flags that
    /// contradict each other are refused only when the cache is empty.
    #[inline]
    pub fn alloc(&mut self, gfp: Gfp) -> Result<PoolPage<S>, Error> {
        let mut page = match self.cache.pop() {
            Some(item) => PoolPage::new(item, self.shared),
            None => self.alloc_slow(gfp)?,
        };
        if gfp.contains(Gfp::ZERO) {
            self.shared.get().source.renew(&mut page, gfp);
        }
        Ok(page)
    }

    #[cold]
    #[inline(never)]
    fn alloc_slow(&mut self, gfp: Gfp) -> Result<PoolPage<S>, Error> {
        gfp.check()?;
        self.forget_holes();
        let filled = self.fill(gfp);
        let item = self.cache.pop();
        self.own.not_fast += u64::from(item.is_some());
        self.publish();
        match (item, filled) {
            (Some(item), _) => Ok(PoolPage::new(item, self.shared)),
            (None, Err(error)) => Err(error),
            (None, Ok(())) => {
                let order = self.shared.get().source.order().get();
                Err(Exhausted { wanted: 1, got: 0, order, why: Why::Exhausted }.into())
            }
        }
    }

    /// Takes off the count what a source said it delivered, and did not.
    fn forget_holes(&mut self) {
        let holes = self.cache.take_holes();
        self.own.refilled -= holes as u64;
        self.shared.take_off(holes);
    }

    fn fill(&mut self, gfp: Gfp) -> Result<(), Error> {
        // Each page is zeroed as it is taken.
        let one = gfp.without(Gfp::NOFAIL | Gfp::ZERO);
        let some = one.without(Gfp::RETRY_MAYFAIL);
        self.own.empty += u64::from(self.refill() == 0);
        self.own.slow += u64::from(self.cache.len() == 0);
        let mut turn = 0;
        loop {
            let mut asked = Ok(());
            if self.cache.len() == 0 {
                asked = self.ask(some, REFILL);
            }
            if self.cache.len() == 0 && one != some {
                asked = self.ask(one, 1);
            }
            // Pages may have come back while the source was asked.
            if self.cache.len() == 0 {
                self.refill();
            }
            if self.cache.len() > 0 {
                return Ok(());
            }
            match asked {
                Ok(()) | Err(Error::Exhausted(_)) if gfp.contains(Gfp::NOFAIL) => {}
                asked => return asked,
            }
            let_others_on(turn);
            turn += 1;
        }
    }

    /// Fills empty slots, as many as it can, and returns how many.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc), if it filled none.
    ///
    /// ```
    /// use pagemill::{Allocator, Gfp, PagePool};
    /// let mut pool = PagePool::pages(&Allocator::builder().pages(256).build()?);
    /// let mut slots = [const { None }; 100];
    /// assert_eq!(pool.alloc_bulk(Gfp::NOWAIT, &mut slots)?, 100);
    /// assert_eq!(pool.put_bulk(&mut slots), 100);
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn alloc_bulk(&mut self, gfp: Gfp, slots: &mut [Option<PoolPage<S>>]) -> Result<usize, Error> {
        let mut holes = slots.iter_mut().filter(|slot| slot.is_none());
        let mut filled = 0;
        loop {
            let mut hole = None;
            // Pages that are zeroed go one by one.
            if !gfp.contains(Gfp::ZERO) {
                let (count, unfilled) = self.cache.hand_out(&mut holes, |item| PoolPage::new(item, self.shared));
                filled += count;
                hole = unfilled;
            }
            let Some(hole) = hole.or_else(|| holes.next()) else { return Ok(filled) };
            match self.alloc(gfp) {
                Ok(page) => *hole = Some(page),
                Err(error) if filled == 0 => return Err(error),
                Err(_) => return Ok(filled),
            }
            filled += 1;
        }
    }

    /// Fills the empty cache from the ring. Returns how many items were there, of the pool's node or not.
    fn refill(&mut self) -> usize {
        if let Some(node) = self.node {
            return self.refill_of_node(node);
        }
        let shared = self.shared.get();
        let mut room = self.cache.room().iter_mut();
        let put = |item| match room.next() {
            Some(place) => _ = place.write(Some(item)),
            None => unreachable!("the cache was empty, and has room for more than a refill"),
        };
        // SAFETY: `&mut self`: this thread alone takes from the ring (P3).
        let popped = unsafe { shared.ring.pop(REFILL, shared.stamp.is_inherited(), put) };
        // SAFETY: each item was written to the next place.
        unsafe { self.cache.added(popped) };
        self.count_refill();
        popped
    }

    fn count_refill(&mut self) {
        self.own.refilled += self.cache.len() as u64;
        self.own.refill += u64::from(self.cache.len() > 0);
    }

    /// Takes items of this node alone from the ring; the others go back to the source.
    fn refill_of_node(&mut self, node: NodeId) -> usize {
        let mut hand = Hand::new(self.shared);
        let shared = self.shared.get();
        let mut slots = hand.slots.iter_mut();
        let put = |item| {
            if let Some(slot) = slots.next() {
                *slot = Some(item);
            }
        };
        // SAFETY: `&mut self`: this thread alone takes from the ring (P3).
        let popped = unsafe { shared.ring.pop(REFILL, shared.stamp.is_inherited(), put) };
        // The source's code may unwind: then all go back to it.
        let is_own = |slot: &Option<S::Item>| {
            slot.as_ref().is_some_and(|item| shared.source.node_of(item).is_none_or(|of| of == node))
        };
        let are_own = hand.slots.each_ref().map(is_own);
        for (slot, _) in hand.slots.iter_mut().zip(are_own).filter(|(_, is_own)| *is_own) {
            _ = slot.take().and_then(|item| self.cache.push(item)); // There is room: it was empty.
        }
        self.own.waive += (popped - self.cache.len()) as u64;
        // Before the others go: the source may unwind.
        self.count_refill();
        drop(hand);
        popped
    }

    /// Fills the empty cache from the source, with up to `n` items.
    fn ask(&mut self, gfp: Gfp, n: usize) -> Result<(), Error> {
        let mut request = Bulk::<Exact, S::Item>::exact(n).gfp(gfp);
        if let Some(node) = self.node {
            request = request.policy(Policy::Preferred(node));
        }
        let shared = self.shared.get();
        let filled = self.cache.fill(n, |slots| shared.source.fill(request, slots));
        let came = self.cache.len();
        shared.record.count.fetch_add(came, Relaxed);
        self.own.refilled += came as u64;
        if came == 0 { filled.map(drop) } else { Ok(()) }
    }

    /// Returns a page to the cache. If the cache is full, or the page is another pool's, it goes where a dropped page goes.
    #[inline]
    pub fn put(&mut self, page: PoolPage<S>) {
        if page.shared != self.shared {
            return self.put_elsewhere(page);
        }
        match self.cache.push(page.into_item()) {
            None => self.own.cached += 1,
            Some(item) => self.put_elsewhere(PoolPage::new(item, self.shared)),
        }
    }

    /// Out of line, since a page's way to the ring is long.
    #[cold]
    #[inline(never)]
    fn put_elsewhere(&mut self, page: PoolPage<S>) {
        self.own.cache_full += u64::from(page.shared == self.shared);
        drop(page);
    }

    /// Returns the pages in the slots: to the cache until it is full, then as [`PoolPage::put_bulk`] does. Returns how many
    /// there were.
    pub fn put_bulk(&mut self, slots: &mut [Option<PoolPage<S>>]) -> usize {
        let (mut cached, mut has_others) = (0, false);
        for slot in slots.iter_mut() {
            let Some(page) = slot.take_if(|page| page.shared == self.shared) else {
                has_others |= slot.is_some();
                continue;
            };
            if let Some(item) = self.cache.push(page.into_item()) {
                *slot = Some(PoolPage::new(item, self.shared));
                has_others = true;
                break;
            }
            cached += 1;
        }
        self.own.cached += cached as u64;
        if has_others { cached + self.put_bulk_elsewhere(slots) } else { cached }
    }

    #[cold]
    #[inline(never)]
    fn put_bulk_elsewhere(&mut self, slots: &mut [Option<PoolPage<S>>]) -> usize {
        let is_own = |slot: &&Option<PoolPage<S>>| slot.as_ref().is_some_and(|page| page.shared == self.shared);
        self.own.cache_full += slots.iter().filter(is_own).count() as u64;
        PoolPage::put_bulk(slots)
    }

    /// The number of pages that are out: handed out, and neither returned nor [released](PoolPage::release); with the one
    /// that fragments are cut from. While other threads return pages it may be a little off.
    pub fn in_flight(&self) -> usize {
        self.shared.get().record.in_flight(self.cache.counted())
    }

    /// The pool's figures. Observers see these from now on ([`page_pools`](crate::page_pools)).
    pub fn stats(&self) -> PagePoolStats {
        self.publish();
        self.shared.get().record.stats()
    }

    /// Shows observers what the consumer has counted.
    fn publish(&self) {
        let own = &self.own;
        let taken = own.refilled + own.cached - self.cache.counted() as u64;
        let figures = PagePoolStats {
            fast: taken - own.not_fast,
            slow: own.slow,
            slow_high_order: if self.is_high_order { own.slow } else { 0 },
            empty: own.empty,
            refill: own.refill,
            waive: own.waive,
            cached: own.cached,
            cache_full: own.cache_full,
            released_refcnt: own.released_refcnt,
            ..PagePoolStats::default()
        };
        self.shared.get().record.publish(&figures, self.cache.counted());
    }

    pub(super) fn shared(&self) -> SharedPtr<S> {
        self.shared
    }

    /// The source that the pages come from.
    pub fn source(&self) -> &S {
        &self.shared.get().source
    }

    /// Ends the pool, as dropping it does. The returned value tells how many pages are still out, and for how long.
    ///
    /// ```
    /// use pagemill::{Allocator, Gfp, PagePool};
    /// let allocator = Allocator::builder().pages(256).build()?;
    /// let mut pool = PagePool::pages(&allocator);
    /// let page = pool.alloc(Gfp::NOWAIT)?;
    /// let ending = pool.destroy();
    /// assert_eq!(ending.in_flight(), 1);
    /// println!("{ending}"); // "1 page is still out, 0 s after the pool's end"
    /// drop(page);
    /// assert_eq!(ending.in_flight(), 0);
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn destroy(self) -> Ending {
        let record = Arc::clone(&self.shared.get().record);
        drop(self);
        Ending { record }
    }
}

impl<S: Source> PagePool<S>
where
    S::Item: Owned,
{
    /// Takes a part of a page: `bytes` bytes that begin at a multiple of 64, with an owner of its own. The page goes back to
    /// the pool with the last of its fragments. Fragments are cut one after the other, and a new page is begun when the
    /// rest of the last one is too short.
    ///
    /// # Errors
    /// [`InvalidRequest::FragmentSize`] for 0 bytes, or more than a page of the pool has. As [`alloc`](Self::alloc).
    ///
    /// ```
    /// use pagemill::{Allocator, Gfp, PagePool};
    /// let mut pool = PagePool::pages(&Allocator::builder().pages(256).build()?);
    /// let (mut first, second) = (pool.alloc_frag(Gfp::NOWAIT, 1500)?, pool.alloc_frag(Gfp::NOWAIT, 1500)?);
    /// first[0] = 1;
    /// assert_eq!((first.len(), second.addr() - first.addr()), (1500, 1536));
    /// assert_eq!(pool.in_flight(), 1); // Both are of one page.
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn alloc_frag(&mut self, gfp: Gfp, bytes: usize) -> Result<Frag<S>, Error> {
        let max = self.source().order().bytes();
        if bytes == 0 || bytes > max {
            return Err(InvalidRequest::FragmentSize { bytes, max }.into());
        }
        if let Some(frag) = self.cut.as_mut().and_then(|cut| cut.next(bytes)) {
            return Ok(frag);
        }
        let page = self.alloc(gfp)?;
        self.end_cut();
        let cut = self.cut.insert(Cut::new(page));
        // A source may make smaller blocks than it says.
        cut.next(bytes).ok_or(InvalidRequest::FragmentSize { bytes, max: cut.bytes() }.into())
    }
}

impl<S: Source> PagePool<S> {
    /// The consumer is done with the page that it cut.
    fn end_cut(&mut self) {
        let Some(cut) = self.cut.take() else { return };
        match cut.end() {
            Some(page) => self.put(page),
            None => self.own.released_refcnt += 1,
        }
    }
}

impl<S: Source> Drop for PagePool<S> {
    fn drop(&mut self) {
        // Not by `put`, which may call the source: before its ring has ended, nothing may unwind.
        let mut cut = self.cut.take().and_then(|cut| {
            let page = cut.end();
            self.own.released_refcnt += u64::from(page.is_none());
            page
        });
        self.publish();
        // SAFETY: `&mut self`: this thread alone takes from the ring (P3), and it is the last use of the pointer.
        unsafe {
            self.shared.end(|| {
                let item = cut.take().map(PoolPage::into_item).or_else(|| self.cache.pop());
                self.shared.take_off(self.cache.take_holes());
                item
            })
        };
    }
}

// SAFETY: it has its items, and shares the rest, whose parts are atomics, the ring, and the source.
unsafe impl<S: Source + Send + Sync> Send for PagePool<S> {}

impl<S: Source> fmt::Debug for PagePool<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.stats().fmt(f)
    }
}
