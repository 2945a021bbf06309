//! The figures of a pool, by the names that Linux gives them.
use core::fmt;

/// The figures of a [`PagePool`](super::PagePool), by the names of the kernel's `page_pool_alloc_stats` and
/// `page_pool_recycle_stats` (C7.3).
///
/// ```
/// use pagemill::{Allocator, Gfp, PagePool};
/// let mut pool = PagePool::pages(&Allocator::builder().pages(256).build()?);
/// let page = pool.alloc(Gfp::NOWAIT)?;
/// pool.put(page);
/// let page = pool.alloc(Gfp::NOWAIT)?;
/// drop(page); // By the ring, as from any other thread.
/// let stats = pool.stats();
/// assert_eq!((stats.slow, stats.fast, stats.cached, stats.ring, stats.in_flight), (1, 1, 1, 1, 0));
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct PagePoolStats {
    /// Pages that came from the cache.
    pub fast: u64,
    /// Requests that asked the source, for pages or blocks of any order.
    pub slow: u64,
    /// Those of them that were for blocks of an order above 0.
    pub slow_high_order: u64,
    /// Requests that found the cache and the ring empty.
    pub empty: u64,
    /// Requests that found the cache empty, and filled it from the ring.
    pub refill: u64,
    /// Pages of the ring that are of another node than the pool's: they went back to the source.
    pub waive: u64,
    /// Pages that the consumer put into its cache.
    pub cached: u64,
    /// Pages that the consumer returned while its cache was full.
    pub cache_full: u64,
    /// Pages that were put into the ring.
    pub ring: u64,
    /// Pages that found the ring full, and went back to the source.
    pub ring_full: u64,
    /// Pages that the consumer was done with while somebody held a fragment.
    pub released_refcnt: u64,
    /// Pages that are out now: handed out, and neither returned nor released.
    pub in_flight: usize,
}

impl fmt::Display for PagePoolStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { fast, slow, slow_high_order, empty, refill, waive, .. } = self;
        let Self { cached, cache_full, ring, ring_full, released_refcnt, in_flight, .. } = self;
        writeln!(
            f,
            "fast {fast}, slow {slow}, slow_high_order {slow_high_order}, empty {empty}, refill {refill}, waive {waive}"
        )?;
        writeln!(
            f,
            "cached {cached}, cache_full {cache_full}, ring {ring}, ring_full {ring_full}, released_refcnt {released_refcnt}"
        )?;
        writeln!(f, "in flight {in_flight}")
    }
}
