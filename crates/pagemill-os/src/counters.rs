//! What each CPU counts beside what its lists' words say (C3.13).
use pagemill_core::Why;
use pagemill_core::atomic::AtomicU64;

/// What a CPU counts once a call or once a trip to the zone, never per page (C3.13). By power of two: entry i counts
/// calls of 2^i to 2^(i+1) - 1 pages.
#[repr(C)]
#[derive(Debug)]
pub struct CpuStats {
    /// Bulk allocations by the pages they delivered.
    pub bulk_alloc: [AtomicU64; 32],
    /// Bulk frees by the pages they returned.
    pub bulk_free: [AtomicU64; 32],
    /// Trips to the zone for a batch.
    pub refills: AtomicU64,
    /// Batches that went back to the zone because a list was full.
    pub drains: AtomicU64,
    /// Loads that a full list passed to a depot.
    pub depot_in: AtomicU64,
    /// Loads that went from a depot to a list that had too few pages.
    pub depot_out: AtomicU64,
    /// Frames handed out past the lists.
    pub direct_out: AtomicU64,
    /// Frames taken back past the lists.
    pub direct_in: AtomicU64,
    /// Bulk requests that ended with the single path.
    pub fallbacks: AtomicU64,
    /// Frames taken from a pageblock of another mobility.
    pub steals: AtomicU64,
    /// Blocks above order 0 handed out.
    pub blocks_out: AtomicU64,
    /// Blocks above order 0 that came back.
    pub blocks_in: AtomicU64,
    /// Pages in them, out.
    pub block_pages_out: AtomicU64,
    /// Pages in them, in.
    pub block_pages_in: AtomicU64,
    /// Pages of this zone that went to requests that wanted another node's.
    pub numa_miss: AtomicU64,
    /// Pages that requests wanted of this zone's node and got from another.
    pub numa_foreign: AtomicU64,
    /// Pages that interleaved requests wanted of this node and got.
    pub numa_interleave: AtomicU64,
    /// Requests that came back short, by [`Why::index`].
    pub shortfalls: [AtomicU64; Why::COUNT],
}

/// Which of a CPU's histograms a bulk call counts in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BulkCall {
    /// [`CpuStats::bulk_alloc`].
    Alloc,
    /// [`CpuStats::bulk_free`].
    Free,
}
