//! What is seen of a pool.

/// What a pool was and is under (C5.6). Counts are of elements.
///
/// ```
/// use pagemill::{Allocator, Gfp, Mempool};
/// let pool = Mempool::pages(&Allocator::builder().pages(64).build()?, 16)?;
/// let page = pool.alloc(Gfp::NOIO)?;
/// let stats = pool.stats();
/// assert_eq!((stats.min_nr, stats.reserve, stats.out, stats.from_reserve), (16, 16, 1, 0));
/// # pool.free(page);
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct MempoolStats {
    /// The size of a full reserve.
    pub min_nr: usize,
    /// What it holds.
    pub reserve: usize,
    /// The least that it held since the pool was made or resized.
    pub low_water: usize,
    /// Handed out and not freed.
    pub out: usize,
    /// How many have left the reserve in all.
    pub from_reserve: u64,
    /// Requests that wait now.
    pub waiting: usize,
    /// Waits that ended.
    pub waits: u64,
    /// How long those were in all, in microseconds.
    pub waited_us: u64,
    /// The longest of them, in microseconds.
    pub longest_wait_us: u64,
    /// Elements that came back and were refused as misuse: more than were out, or none of the source's
    /// ([`Source::is_own`](crate::Source::is_own)). They went to the source, which ends them. Also calls of the source's that did something else
    /// than it said: what they did counts.
    pub misused: u64,
}
