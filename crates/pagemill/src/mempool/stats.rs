//! What is seen of a pool, and why it was not closed.
use super::{Mempool, Source};

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
    /// ([`Source::is_own`]). They went to the source, which ends them. Also calls of the source's that did something else
    /// than it said: what they did counts.
    pub misused: u64,
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
