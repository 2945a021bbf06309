//! What an allocator counts (C3.13): one table, from which everything is generated that stores, sums, names or shows a counter.
//!
//! To add a counter, add a line to the table. A counter of the section `cpu` is incremented where its event happens, by
//! `stats_here().NAME.fetch_add(..)`; one of the other sections gets its value in `stats.rs` of `pagemill`.
use pagemill_core::Why;
use pagemill_core::atomic::AtomicU64;

/// Passes the table to the macro `$make`. An entry is
///
/// ```text
/// /// Refills: batches that lists fetched from the zone.
/// refills: "pcp_refill", "pagemill_refills_total" by Allocator;
/// ```
///
/// - the sentence is the documentation of the field, and the help of the figure;
/// - `refills` is the field in `pagemill::Stats`, and in [`CpuStats`] for the section `cpu`;
/// - `pcp_refill` is its name in `vmstat`, or `_` if `vmstat` leaves it out;
/// - `pagemill_refills_total` is the figure that a running process exports, or `_` for none. It ends with `_total` if it only
///   grows;
/// - `by Allocator` or `by Zone` says whether there is one value for each allocator or for each zone.
#[doc(hidden)]
#[macro_export]
macro_rules! counters {
    ($make:ident) => {
        $make! {
            // Of a zone as a whole, or computed from the counts of its lists.
            zone {
                /// Pages free in the zone.
                free: "nr_free_pages", "pagemill_zone_free_pages" by Zone;
                /// Pages on per-CPU lists and in depots.
                listed: _, "pagemill_zone_listed_pages" by Zone;
                /// Pages in depots, between the lists of the CPUs.
                in_depots: "nr_depot_pages", "pagemill_depot_pages" by Allocator;
                /// Pages in quarantine: freed twice, so they are not handed out again.
                quarantined: "nr_quarantined", "pagemill_quarantined_pages" by Allocator;
                /// Pages handed out, including those of blocks.
                allocated: "pgalloc_normal", "pagemill_allocated_pages_total" by Allocator;
                /// Pages freed.
                freed: "pgfree", "pagemill_freed_pages_total" by Allocator;
                /// Pages that lists got from the zone as refills.
                refilled_pages: "pcp_refill_pages", _ by Allocator;
                /// Pages that lists and depots gave to the zone, drains included, or depots to requests past the lists.
                drained_pages: "pcp_drain_pages", _ by Allocator;
                /// Frees that were refused, and frames that went into quarantine.
                misused: "misuse", "pagemill_misuse_total" by Allocator;
                /// Pages handed out to CPUs of their own node.
                numa_local: "numa_local", "pagemill_numa_local_total" by Zone;
                /// Pages handed out to CPUs of other nodes.
                numa_other: "numa_other", "pagemill_numa_other_total" by Zone;
                /// Pages that requests got from the node that they wanted.
                numa_hit: "numa_hit", "pagemill_numa_hit_total" by Zone;
            }
            // Counted by each CPU, once a call or once a trip to the zone.
            cpu {
                /// Pages of a node that went to requests for another node.
                numa_miss: "numa_miss", "pagemill_numa_miss_total" by Zone;
                /// Pages that requests for a node got from another node; the sum over all nodes equals that of numa_miss.
                numa_foreign: "numa_foreign", "pagemill_numa_foreign_total" by Zone;
                /// Pages that interleaved requests got from the node whose turn it was.
                numa_interleave: "numa_interleave", "pagemill_numa_interleave_total" by Zone;
                /// Refills: batches that lists fetched from the zone.
                refills: "pcp_refill", "pagemill_refills_total" by Allocator;
                /// Batches that went to the zone because a list was full.
                drains: "pcp_drain", "pagemill_drains_total" by Allocator;
                /// Loads that full lists passed to a depot.
                depot_in: "pcp_depot_in", "pagemill_depot_in_total" by Allocator;
                /// Loads that went from a depot to a list that had too few pages.
                depot_out: "pcp_depot_out", "pagemill_depot_out_total" by Allocator;
                /// Pages handed out past the lists.
                direct_out: "direct_alloc_pages", "pagemill_direct_allocated_pages_total" by Allocator;
                /// Pages taken back past the lists.
                direct_in: "direct_free_pages", "pagemill_direct_freed_pages_total" by Allocator;
                /// Blocks above order 0 handed out.
                blocks_out: "block_alloc", "pagemill_blocks_allocated_total" by Allocator;
                /// Blocks above order 0 freed.
                blocks_in: "block_free", "pagemill_blocks_freed_total" by Allocator;
                /// Blocks of any order, pages included, that bulk requests took singly.
                fallbacks: "bulk_fallback", "pagemill_bulk_fallbacks_total" by Allocator;
                /// Pages taken from a pageblock of another mobility.
                steals: "alloc_steal", "pagemill_stolen_pages_total" by Allocator;
            }
            // Of the allocator as a whole; 0 for a zone.
            allocator {
                /// Requests that wait for memory now.
                waiting: _, "pagemill_waiting_requests" by Allocator;
                /// Waits for memory that ended.
                waits: "alloc_wait", "pagemill_waits_total" by Allocator;
                /// Total length of the waits that ended, in microseconds.
                waited_us: "alloc_wait_us", "pagemill_waited_us_total" by Allocator;
                /// Rounds of direct reclaim.
                reclaim_direct: "reclaim_direct", "pagemill_direct_reclaims_total" by Allocator;
                /// Rounds of background reclaim.
                reclaim_background: "reclaim_background", "pagemill_background_reclaims_total" by Allocator;
                /// Pages that shrinkers freed.
                reclaimed: "reclaim_pages", "pagemill_reclaimed_pages_total" by Allocator;
                /// Acquisitions that fault injection made fail.
                faults: "fault_injected", "pagemill_injected_faults_total" by Allocator;
                /// Frees refused in this process because the address belongs to no allocator.
                foreign: "misuse_foreign", _ by Allocator;
            }
        }
    };
}

macro_rules! cpu_stats {
    (
        zone $_zone:tt
        cpu { $(#[doc = $doc:literal] $field:ident: $_vmstat:tt, $_figure:tt by $_by:ident;)* }
        allocator $_allocator:tt
    ) => {
        /// What a CPU counts: once for each call or refill, never for each page (C3.13). Histograms go by powers of two: entry
        /// i counts calls of 2^i to 2^(i+1) - 1 blocks, where a page is a block of order 0.
        #[repr(C)]
        #[derive(Debug)]
        pub struct CpuStats {
            /// Bulk allocations by the number of blocks delivered.
            pub bulk_alloc: [AtomicU64; 32],
            /// Bulk frees by the number of blocks returned.
            pub bulk_free: [AtomicU64; 32],
            $(#[doc = $doc] pub $field: AtomicU64,)*
            /// Pages handed out in blocks above order 0.
            pub block_pages_out: AtomicU64,
            /// Pages freed in blocks above order 0.
            pub block_pages_in: AtomicU64,
            /// Requests that delivered too few pages or blocks, by [`Why::index`].
            pub shortfalls: [AtomicU64; Why::COUNT],
        }
    };
}
counters!(cpu_stats);

/// The histogram that a bulk call is counted in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BulkCall {
    /// [`CpuStats::bulk_alloc`].
    Alloc,
    /// [`CpuStats::bulk_free`].
    Free,
}
