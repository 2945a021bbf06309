//! What an allocator counts (C3.13), its invariants walked and proved (C10.2), and both in the shape that people
//! know from `/proc`.
use crate::allocator::{Allocator, Inner};
use crate::misuse::foreign_count;
use core::fmt;
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::atomic::AtomicU64;
use pagemill_core::{BuddyInfo, CpuId, FrameState, Order};
use pagemill_sys::CpuStats;

/// Counters of an allocator, summed over its CPUs. Read without a lock: exact at rest, close while others work.
/// Counts of pages wrap at 2^48.
///
/// ```
/// use pagemill::{Allocator, Bulk, PageList};
/// let allocator = Allocator::builder().pages(512).build()?;
/// let mut list = PageList::new();
/// allocator.alloc_pages_bulk_list(Bulk::up_to(64), &mut list)?;
/// let stats = allocator.stats();
/// assert_eq!((stats.allocated, stats.freed, stats.bulk_calls()), (64, 0, 1));
/// println!("{}", allocator.vmstat());
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Pages handed out, those of blocks included.
    pub allocated: u64,
    /// Pages that came back.
    pub freed: u64,
    /// Pages free in the zone.
    pub free: u64,
    /// Pages on per-CPU lists.
    pub listed: u64,
    /// Pages put aside because they were on two ways at once.
    pub quarantined: u64,
    /// Trips to the zone for a batch.
    pub refills: u64,
    /// Batches that went to the zone because a list was full.
    pub drains: u64,
    /// Pages that lists got from the zone.
    pub refilled_pages: u64,
    /// Pages that lists gave to the zone, drains from outside included.
    pub drained_pages: u64,
    /// Pages handed out past the lists.
    pub direct_out: u64,
    /// Pages taken back past the lists.
    pub direct_in: u64,
    /// Blocks above order 0 handed out.
    pub blocks_out: u64,
    /// Blocks above order 0 that came back.
    pub blocks_in: u64,
    /// Bulk requests that ended with the single path.
    pub fallbacks: u64,
    /// Pages taken from a pageblock of another mobility.
    pub steals: u64,
    /// Requests that came back short.
    pub shortfalls: u64,
    /// Blocks that were refused, and frames found on two ways at once.
    pub misused: u64,
    /// Blocks refused in this process that belong to no allocator.
    pub foreign: u64,
    /// Bulk allocations by the pages they delivered: entry i counts those of 2^i to 2^(i+1) - 1.
    pub bulk_alloc: [u64; 32],
    /// Bulk frees by the pages they returned, likewise.
    pub bulk_free: [u64; 32],
}

impl Stats {
    /// Bulk allocations of more than one page.
    pub fn bulk_calls(&self) -> u64 {
        self.bulk_alloc.iter().sum()
    }
}

/// Every frame of an allocator at rest, by what it is (C10.2).
///
/// ```
/// let allocator = pagemill::Allocator::builder().pages(100).build()?;
/// let page = allocator.alloc_page(pagemill::Gfp::KERNEL)?;
/// let census = allocator.validate();
/// assert_eq!(census.handed_out, 1);
/// assert_eq!(census.free + census.listed + census.handed_out + census.quarantined, census.managed);
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// All frames.
    pub managed: usize,
    /// Free in the zone.
    pub free: usize,
    /// On per-CPU lists.
    pub listed: usize,
    /// Handed out.
    pub handed_out: usize,
    /// Put aside.
    pub quarantined: usize,
}

impl Allocator {
    /// Its counters.
    pub fn stats(&self) -> Stats {
        self.inner().stats()
    }

    /// Free blocks by order, as `/proc/buddyinfo` shows them, up to 1 GiB: displayed as one line, without its newline.
    ///
    /// ```
    /// let allocator = pagemill::Allocator::builder().pages(1536).build()?;
    /// assert_eq!(allocator.buddyinfo().to_string().split_whitespace().nth(13), Some("1"));
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn buddyinfo(&self) -> BuddyInfo {
        self.inner().zone.buddy_info()
    }

    /// Its counters in the shape of `/proc/vmstat`: displayed as lines, each with its newline.
    pub fn vmstat(&self) -> VmStat {
        VmStat(self.stats())
    }

    /// Walks every frame and proves that each is in one place: free and merged, on one list, handed out, or put
    /// aside. Nobody may use the allocator meanwhile.
    ///
    /// # Panics
    /// If an invariant is broken, which is a fault of Pagemill's own (C10.1); with both values.
    pub fn validate(&self) -> Census {
        self.inner().validate()
    }
}

impl Inner {
    fn cpu_stats(&self) -> impl Iterator<Item = &CpuStats> {
        (0..self.lists.cpus()).map(|cpu| &self.lists.cpu(CpuId::new(cpu as u32)).stats)
    }

    fn sum(&self, field: fn(&CpuStats) -> &AtomicU64) -> u64 {
        self.cpu_stats().fold(0, |sum, cpu| sum.wrapping_add(field(cpu).load(Relaxed)))
    }
    fn sum_lists(&self, field: fn(&pagemill_sys::List) -> u64) -> u64 {
        self.lists.lists().fold(0, |sum, list| sum.wrapping_add(field(list)))
    }
    fn allocated(&self) -> u64 {
        let direct = self.sum(|cpu| &cpu.direct_out).wrapping_add(self.sum(|cpu| &cpu.block_pages_out));
        self.sum_lists(|list| list.popped()).wrapping_add(direct)
    }
    fn freed(&self) -> u64 {
        let direct = self.sum(|cpu| &cpu.direct_in).wrapping_add(self.sum(|cpu| &cpu.block_pages_in));
        self.sum_lists(|list| list.pushed()).wrapping_add(direct)
    }

    /// Is there a frame that is neither out nor put aside? Then a request that found none came while it was on its way.
    #[cold]
    pub(crate) fn has_frames_under_way(&self) -> bool {
        // Both wrap at 2^48. What comes back between the two sums makes the difference small, or negative.
        let out = (self.allocated().wrapping_sub(self.freed()) << 16) as i64 >> 16;
        out + (self.quarantined.load(Relaxed) as i64) < self.arena.frames() as i64
    }

    fn stats(&self) -> Stats {
        let sum = |field| self.sum(field);
        let lists = |field| self.sum_lists(field);
        let histogram = |field: fn(&CpuStats) -> &[AtomicU64; 32]| {
            core::array::from_fn(|i| self.cpu_stats().map(|cpu| field(cpu)[i].load(Relaxed)).sum())
        };
        let (direct_out, direct_in) = (sum(|cpu| &cpu.direct_out), sum(|cpu| &cpu.direct_in));
        Stats {
            allocated: self.allocated(),
            freed: self.freed(),
            free: self.zone.free_frames() as u64,
            listed: lists(|list| list.len() as u64),
            quarantined: self.quarantined.load(Relaxed),
            refills: sum(|cpu| &cpu.refills),
            drains: sum(|cpu| &cpu.drains),
            refilled_pages: lists(|list| list.refilled()),
            drained_pages: lists(|list| list.drained()),
            direct_out,
            direct_in,
            blocks_out: sum(|cpu| &cpu.blocks_out),
            blocks_in: sum(|cpu| &cpu.blocks_in),
            fallbacks: sum(|cpu| &cpu.fallbacks),
            steals: sum(|cpu| &cpu.steals),
            shortfalls: sum(|cpu| &cpu.shortfalls),
            misused: self.misused.load(Relaxed),
            foreign: foreign_count(),
            bulk_alloc: histogram(|cpu| &cpu.bulk_alloc),
            bulk_free: histogram(|cpu| &cpu.bulk_free),
        }
    }

    fn validate(&self) -> Census {
        self.check_generation();
        let zone = self.zone.validate();
        let frames = self.arena.frames();
        let mut census = Census { managed: frames, free: zone.free, ..Census::default() };
        let first = self.zone.start().as_u32();
        let mut on_list = vec![false; frames];
        for pfn in self.lists.lists().flat_map(|list| list.frames()) {
            assert!(self.arena.has_pfn(pfn), "L1: a list holds frame {pfn:#x}, which is not of its zone");
            let seen = &mut on_list[(pfn - first) as usize];
            assert!(!*seen, "L1: frame {pfn:#x} is on lists twice");
            *seen = true;
            census.listed += 1;
        }
        if cfg!(feature = "detection-off") {
            census.quarantined = self.quarantined.load(Relaxed) as usize;
            census.handed_out = frames - census.free - census.listed - census.quarantined;
            return census;
        }
        let mut inside = 0;
        for (pfn, &is_listed) in (first..).zip(&on_list) {
            let (state, is_in_zone) = (self.arena.state(pfn), self.zone.is_free(pagemill_core::Pfn::new(pfn)));
            let places = usize::from(is_listed) + usize::from(is_in_zone);
            match state.order() {
                _ if inside > 0 => {
                    assert!(
                        state == FrameState::INSIDE && places == 0,
                        "frame {pfn:#x} of a block is {state:?}, in {places} places"
                    );
                    inside -= 1;
                }
                Some(order) => {
                    assert_eq!(places, 0, "frame {pfn:#x} is handed out and in {places} free places");
                    census.handed_out += order.frames() as usize;
                    inside = order.frames() - 1;
                }
                None if state == FrameState::QUARANTINED => census.quarantined += 1,
                None => {
                    assert!(state.is_free() && places == 1, "frame {pfn:#x} is {state:?} and in {places} free places")
                }
            }
        }
        let sum = census.free + census.listed + census.handed_out + census.quarantined;
        assert_eq!(sum, frames, "C10.2: {census:?} adds up to {sum}, and {frames} are managed");
        census
    }
}

/// See [`Allocator::vmstat`].
///
/// ```
/// let text = pagemill::Allocator::global().vmstat().to_string();
/// assert!(text.lines().any(|line| line.starts_with("nr_free_pages ")));
/// ```
#[derive(Clone, Debug)]
pub struct VmStat(Stats);

impl fmt::Display for VmStat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stats = &self.0;
        let bulk_calls = |histogram: &[u64; 32]| histogram.iter().sum::<u64>();
        let lines = [
            ("nr_free_pages", stats.free),
            ("nr_pcp_pages", stats.listed),
            ("nr_quarantined", stats.quarantined),
            ("numa_hit", stats.allocated),
            ("numa_miss", 0),
            ("numa_foreign", 0),
            ("numa_interleave", 0),
            ("numa_local", stats.allocated),
            ("numa_other", 0),
            ("pgalloc_normal", stats.allocated),
            ("pgfree", stats.freed),
            ("pcp_refill", stats.refills),
            ("pcp_refill_pages", stats.refilled_pages),
            ("pcp_drain", stats.drains),
            ("pcp_drain_pages", stats.drained_pages),
            ("direct_alloc_pages", stats.direct_out),
            ("direct_free_pages", stats.direct_in),
            ("block_alloc", stats.blocks_out),
            ("block_free", stats.blocks_in),
            ("bulk_alloc", bulk_calls(&stats.bulk_alloc)),
            ("bulk_free", bulk_calls(&stats.bulk_free)),
            ("bulk_fallback", stats.fallbacks),
            ("alloc_steal", stats.steals),
            ("alloc_shortfall", stats.shortfalls),
            ("misuse", stats.misused),
            ("misuse_foreign", stats.foreign),
        ];
        lines.iter().try_for_each(|(name, value)| writeln!(f, "{name} {value}"))?;
        for (name, histogram) in [("bulk_alloc", &stats.bulk_alloc), ("bulk_free", &stats.bulk_free)] {
            for (i, calls) in histogram.iter().enumerate().filter(|(_, calls)| **calls > 0) {
                writeln!(f, "{name}_{}_to_{} {calls}", 1u64 << i, (1u64 << (i + 1)) - 1)?;
            }
        }
        let largest = Order::MAX.get();
        writeln!(f, "max_order {largest}")
    }
}
