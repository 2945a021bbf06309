//! Statistics of a pool.

/// A pool's size, elements and pressure (C5.6). Counts are of elements.
///
/// ```
/// use pagemill::{Allocator, Gfp, Mempool};
/// let pool = Mempool::pages(&Allocator::builder().pages(64).build()?, 16)?;
/// let page = pool.alloc(Gfp::NOIO)?;
/// let stats = pool.stats();
/// assert_eq!((stats.min_nr, stats.reserve, stats.out, stats.from_reserve), (16, 16, 1, 0));
/// # drop(page);
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct MempoolStats {
    /// The size of a full reserve.
    pub min_nr: usize,
    /// The number of elements in the reserve now.
    pub reserve: usize,
    /// The smallest number of elements in the reserve since the pool was made or resized.
    pub low_water: usize,
    /// Elements that are handed out and not freed.
    pub out: usize,
    /// Elements that left the reserve since the pool was made.
    pub from_reserve: u64,
    /// Requests that wait now.
    pub waiting: usize,
    /// Waits that ended.
    pub waits: u64,
    /// Their total time, in microseconds.
    pub waited_us: u64,
    /// The longest of them, in microseconds.
    pub longest_wait_us: u64,
    /// Cases of misuse. Elements that were refused when they were returned count: more were returned than were out, or
    /// the element was not the source's ([`Source::is_own`](crate::Source::is_own)). They went to the source, which
    /// ended them. Calls of the source whose return value disagreed with what they did count too.
    pub misused: u64,
}
