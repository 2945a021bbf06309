//! What a cache counts.
// Not a model's: figures order nothing.
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

macro_rules! counts {
    ($($(#[doc = $doc:literal])+ $name:ident),* $(,)?) => {
        /// What a [`PageCache`](super::PageCache) has counted since it was made, and what it has now.
        #[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
        #[non_exhaustive]
        pub struct PageCacheStats {
            $($(#[doc = $doc])+ pub $name: u64,)*
            /// Pages that it has now, lent ones included.
            pub pages: u64,
            /// Those of them that are to be written.
            pub dirty: u64,
            /// Pages that it may have.
            pub limit: u64,
            /// Bytes of its descriptors and of its indexes.
            pub metadata: u64,
        }

        /// One CPU's counts, or those of a few CPUs.
        #[repr(align(128))]
        #[derive(Default)]
        pub(super) struct Counts {
            $(pub(super) $name: AtomicU64,)*
        }

        impl Counts {
            fn add_to(&self, stats: &mut PageCacheStats) {
                $(stats.$name += self.$name.load(Relaxed);)*
            }
        }
    };
}

counts! {
    /// Pages that readers found in the cache.
    hits,
    /// Pages that readers did not find, and waited for, and those that writers made.
    misses,
    /// Pages that were read from a backing.
    read,
    /// Those of them that no request had asked for: read ahead.
    read_ahead,
    /// Pages read ahead that were evicted before anybody asked for them.
    ahead_unused,
    /// Requests of readahead: windows that had a hole.
    windows,
    /// Those of them that a reader began by reaching the marker, without waiting.
    windows_marked,
    /// Windows that were shortened because there was no memory.
    windows_shortened,
    /// Reads of a backing: one for each run of neighbouring holes.
    reads,
    /// Those of them that failed.
    reads_failed,
    /// Pages that were written to a backing.
    written,
    /// Writes to a backing.
    writes,
    /// Those of them that failed.
    writes_failed,
    /// Pages that were replaced by a copy, since somebody read the old one as it was written to.
    copied,
    /// Pages that were evicted.
    evicted,
    /// Calls of the allocator's reclaim, for clean pages.
    shrinks,
    /// Pages lent, to be sent for example.
    lent,
}

/// CPUs share no line of counts unless there are more of them than this.
const STRIPES: usize = 16;

pub(super) struct Counters([Counts; STRIPES]);

impl Counters {
    pub(super) fn new() -> Self {
        Self(core::array::from_fn(|_| Counts::default()))
    }
    /// The counts of this CPU.
    #[inline]
    pub(super) fn here(&self) -> &Counts {
        &self.0[pagemill_os::current_cpu() % STRIPES]
    }
    pub(super) fn sum(&self) -> PageCacheStats {
        let mut stats = PageCacheStats::default();
        self.0.iter().for_each(|counts| counts.add_to(&mut stats));
        stats
    }
}

/// Adds to a count.
#[inline]
pub(super) fn add(count: &AtomicU64, n: usize) {
    // Relaxed: a figure orders nothing.
    count.fetch_add(n as u64, Relaxed);
}
