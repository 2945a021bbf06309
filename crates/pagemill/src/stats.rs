//! What an allocator counts (C3.13), its invariants walked and proved (C10.2), and both in the shape that people
//! know from `/proc`.
use crate::allocator::Allocator;
use crate::misuse::foreign_count;
use crate::zone::{FULL, Zone};
use core::fmt;
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::atomic::AtomicU64;
use pagemill_core::{BuddyInfo, CpuId, FrameState, Gfp, Level, Misfit, NodeId, Order, Pfn, Watermarks, Why, ZoneKind};
use pagemill_os::{CpuStats, List};

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
    /// Pages on per-CPU lists and in depots.
    pub listed: u64,
    /// Those of them that are in depots, between the lists of the CPUs.
    pub in_depots: u64,
    /// Pages put aside because they were on two ways at once.
    pub quarantined: u64,
    /// Trips to the zone for a batch.
    pub refills: u64,
    /// Batches that went to the zone because a list was full.
    pub drains: u64,
    /// Loads that full lists passed to a depot.
    pub depot_in: u64,
    /// Loads that went from a depot to a list that had too few pages.
    pub depot_out: u64,
    /// Pages that lists got from the zone.
    pub refilled_pages: u64,
    /// Pages that lists and depots gave to the zone, or a depot to a request past the lists; drains from outside included.
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
    /// Requests that came back short, by why: see [`shortfalls`](Self::shortfalls).
    shortfalls: [u64; Why::COUNT],
    /// Pages that requests got of the node they wanted.
    pub numa_hit: u64,
    /// Pages of a node that went to requests that wanted another's.
    pub numa_miss: u64,
    /// Pages wanted of a node and got from another: summed over nodes, as many as `numa_miss`.
    pub numa_foreign: u64,
    /// Pages that interleaved requests got of the node whose turn it was.
    pub numa_interleave: u64,
    /// Pages handed out on CPUs of their own node.
    pub numa_local: u64,
    /// Pages handed out on CPUs of other nodes.
    pub numa_other: u64,
    /// Waits for memory that ended.
    pub waits: u64,
    /// How long they were in all, in microseconds.
    pub waited_us: u64,
    /// Requests that wait now.
    pub waiting: u64,
    /// Rounds of direct reclaim.
    pub reclaim_direct: u64,
    /// Rounds of background reclaim.
    pub reclaim_background: u64,
    /// Pages that shrinkers gave back.
    pub reclaimed: u64,
    /// Acquisitions that were made to fail.
    pub faults: u64,
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
    /// Requests that came back short.
    ///
    /// ```
    /// use pagemill::{Allocator, Gfp, Why};
    /// let allocator = Allocator::builder().pages(1).build()?;
    /// let page = allocator.alloc_page(Gfp::NOWAIT)?;
    /// assert!(allocator.alloc_page(Gfp::NOWAIT).is_err());
    /// let stats = allocator.stats();
    /// assert_eq!((stats.shortfalls(), stats.shortfalls_by(Why::Exhausted)), (1, 1));
    /// # drop(page);
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn shortfalls(&self) -> u64 {
        self.shortfalls.iter().sum()
    }
    /// Those of them that came back short for this reason.
    pub fn shortfalls_by(&self, why: Why) -> u64 {
        self.shortfalls[why.index()]
    }
    /// What counts nodes, by the names that Linux has for it.
    fn numa(&self) -> [(&'static str, u64); 6] {
        [
            ("numa_hit", self.numa_hit),
            ("numa_miss", self.numa_miss),
            ("numa_foreign", self.numa_foreign),
            ("numa_interleave", self.numa_interleave),
            ("numa_local", self.numa_local),
            ("numa_other", self.numa_other),
        ]
    }
}

/// Every frame of an allocator at rest, by what it is (C10.2).
///
/// ```
/// let allocator = pagemill::Allocator::builder().pages(100).build()?;
/// let page = allocator.alloc_page(pagemill::Gfp::KERNEL)?;
/// let census = allocator.validate().unwrap();
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
    /// On per-CPU lists and in depots.
    pub listed: usize,
    /// Handed out.
    pub handed_out: usize,
    /// Put aside.
    pub quarantined: usize,
}

/// A zone: the frames of one node and kind, and its counters, in the words of `/proc/zoneinfo`.
///
/// ```
/// let allocator = pagemill::Allocator::builder().pages(512).build()?;
/// let zones = allocator.zoneinfo();
/// assert_eq!((zones[0].kind.name(), zones[0].managed, zones[0].stats.free), ("Normal", 512, 512));
/// println!("{}", zones[0]);
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ZoneInfo {
    /// Its node.
    pub node: NodeId,
    /// Its kind.
    pub kind: ZoneKind,
    /// Its pages.
    pub managed: u64,
    /// Its watermarks, in pages.
    pub marks: Watermarks,
    /// What it counted, in arenas that have been retired too: these never go backwards. What is counted for the
    /// allocator as a whole (waits, reclaim, faults) is 0 here.
    pub stats: Stats,
    /// Pages on each CPU's lists.
    pub listed_by_cpu: Vec<u64>,
    /// Its free blocks by order.
    pub buddy: Vec<BuddyInfo>,
}

impl fmt::Display for ZoneInfo {
    /// In the shape of `/proc/zoneinfo`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (marks, stats) = (&self.marks, &self.stats);
        writeln!(f, "Node {}, zone {:>8}", self.node.get(), self.kind.name())?;
        writeln!(f, "  pages free     {}", stats.free)?;
        let lines = [
            ("min", u64::from(marks.min)),
            ("low", u64::from(marks.low)),
            ("high", u64::from(marks.high)),
            ("managed", self.managed),
            ("protection", u64::from(marks.lowmem_reserve)),
            ("listed", stats.listed),
            ("in depots", stats.in_depots),
            ("quarantined", stats.quarantined),
        ];
        lines.iter().try_for_each(|(name, value)| writeln!(f, "        {name:<12} {value}"))?;
        stats.numa().iter().try_for_each(|(name, value)| writeln!(f, "      {name:<14} {value}"))?;
        writeln!(f, "  pagesets")?;
        self.listed_by_cpu
            .iter()
            .enumerate()
            .try_for_each(|(cpu, listed)| writeln!(f, "    cpu: {cpu}\n              count: {listed}"))
    }
}

/// See [`Allocator::buddyinfo`].
///
/// ```
/// let info = pagemill::Allocator::global().buddyinfo();
/// assert!(info.to_string().starts_with("Node 0, zone"));
/// ```
#[derive(Clone, Debug)]
pub struct BuddyDump(Vec<(NodeId, ZoneKind, BuddyInfo)>);

impl BuddyDump {
    /// Free blocks of this order, in all zones.
    pub fn free_blocks(&self, order: Order) -> usize {
        self.0.iter().map(|(_, _, info)| info.free_blocks(order)).sum()
    }
}

impl fmt::Display for BuddyDump {
    /// A line a zone (more for one of several arenas), in the shape of `/proc/buddyinfo`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().enumerate().try_for_each(|(at, (node, kind, info))| {
            let end = if at == 0 { "" } else { "\n" };
            write!(f, "{end}Node {}, zone {:>8}{info}", node.get(), kind.name())
        })
    }
}

impl Allocator {
    /// Its counters, summed over its zones.
    pub fn stats(&self) -> Stats {
        let nodes = self.nodes();
        let mut sum = Stats::default();
        nodes.ever().iter().for_each(|arena| sum.add(&arena.stats()));
        Stats {
            foreign: foreign_count(),
            waits: nodes.waits.ended.load(Relaxed),
            waited_us: nodes.waits.waited_us.load(Relaxed),
            waiting: nodes.waits.len() as u64,
            reclaim_direct: nodes.reclaim.direct_runs.load(Relaxed),
            reclaim_background: nodes.reclaim.background_runs.load(Relaxed),
            reclaimed: nodes.reclaim.pages.load(Relaxed),
            faults: nodes.faults_injected(),
            ..sum
        }
    }

    /// Its zones, by node; arenas of one node and kind are one zone.
    pub fn zoneinfo(&self) -> Vec<ZoneInfo> {
        let mut zones: Vec<ZoneInfo> = Vec::new();
        for arena in self.nodes().ever() {
            let (node, kind, marks) = (arena.node, arena.kind, arena.marks);
            let at = zones.iter().position(|zone| (zone.node, zone.kind) == (node, kind)).unwrap_or_else(|| {
                let (stats, cpus) = (Stats::default(), vec![0; arena.lists.cpus()]);
                let marks = Watermarks::NONE;
                zones.push(ZoneInfo { node, kind, managed: 0, marks, stats, listed_by_cpu: cpus, buddy: Vec::new() });
                zones.len() - 1
            });
            let zone = &mut zones[at];
            zone.stats.add(&arena.stats());
            if arena.is_retired() {
                continue;
            }
            zone.managed += arena.frames() as u64;
            zone.marks = Watermarks {
                min: zone.marks.min + marks.min,
                low: zone.marks.low + marks.low,
                high: zone.marks.high + marks.high,
                lowmem_reserve: zone.marks.lowmem_reserve + marks.lowmem_reserve,
            };
            for (cpu, listed) in (0..).zip(&mut zone.listed_by_cpu) {
                *listed += arena.lists.cpu(CpuId::new(cpu)).lists.iter().map(|list| list.len() as u64).sum::<u64>();
            }
            zone.buddy.push(arena.buddy.buddy_info());
        }
        zones.sort_by_key(|zone| (zone.node, core::cmp::Reverse(zone.kind as u8)));
        zones
    }

    /// Free blocks by order, as `/proc/buddyinfo` shows them, up to 1 GiB.
    ///
    /// ```
    /// let allocator = pagemill::Allocator::builder().pages(1536).build()?;
    /// assert_eq!(allocator.buddyinfo().to_string().split_whitespace().nth(13), Some("1"));
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn buddyinfo(&self) -> BuddyDump {
        let line = |zone: &ZoneInfo| {
            let key = (zone.node, zone.kind);
            zone.buddy.iter().map(move |&info| (key.0, key.1, info)).collect::<Vec<_>>()
        };
        BuddyDump(self.zoneinfo().iter().flat_map(line).collect())
    }

    /// Its counters in the shape of `/proc/vmstat`.
    pub fn vmstat(&self) -> VmStat {
        VmStat(self.stats())
    }

    /// Walks every frame of an allocator at rest and proves that each is in one place (C10.2): free and merged, on one list,
    /// handed out, or put aside.
    ///
    /// It may be called at any time. Of an allocator that is in use, also by a bulk request whose callback calls this, it may
    /// see frames on their way, which fit nowhere: that proves nothing, neither does it harm.
    ///
    /// # Errors
    /// [`Misfit`], with both values: the first two things that disagreed. If nobody used the allocator, it is a fault of
    /// Pagemill's own (C10.1).
    ///
    /// ```
    /// let allocator = pagemill::Allocator::builder().pages(512).build()?;
    /// match allocator.validate() {
    ///     Ok(census) => assert_eq!(census.free, 512),
    ///     Err(misfit) => panic!("{misfit}"), // nobody else has this allocator
    /// }
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn validate(&self) -> Result<Census, Misfit> {
        self.nodes().ever().iter().try_fold(Census::default(), |sum, arena| {
            let zone = arena.validate()?;
            Ok(Census {
                managed: sum.managed + zone.managed,
                free: sum.free + zone.free,
                listed: sum.listed + zone.listed,
                handed_out: sum.handed_out + zone.handed_out,
                quarantined: sum.quarantined + zone.quarantined,
            })
        })
    }
}

impl Stats {
    /// Adds another zone's counters.
    fn add(&mut self, other: &Self) {
        let pairs = [
            (&mut self.allocated, other.allocated),
            (&mut self.freed, other.freed),
            (&mut self.free, other.free),
            (&mut self.listed, other.listed),
            (&mut self.quarantined, other.quarantined),
            (&mut self.refills, other.refills),
            (&mut self.drains, other.drains),
            (&mut self.in_depots, other.in_depots),
            (&mut self.depot_in, other.depot_in),
            (&mut self.depot_out, other.depot_out),
            (&mut self.refilled_pages, other.refilled_pages),
            (&mut self.drained_pages, other.drained_pages),
            (&mut self.direct_out, other.direct_out),
            (&mut self.direct_in, other.direct_in),
            (&mut self.blocks_out, other.blocks_out),
            (&mut self.blocks_in, other.blocks_in),
            (&mut self.fallbacks, other.fallbacks),
            (&mut self.steals, other.steals),
            (&mut self.numa_hit, other.numa_hit),
            (&mut self.numa_miss, other.numa_miss),
            (&mut self.numa_foreign, other.numa_foreign),
            (&mut self.numa_interleave, other.numa_interleave),
            (&mut self.numa_local, other.numa_local),
            (&mut self.numa_other, other.numa_other),
            (&mut self.misused, other.misused),
        ];
        pairs.into_iter().for_each(|(sum, more)| *sum += more);
        self.bulk_alloc.iter_mut().zip(other.bulk_alloc).for_each(|(sum, more)| *sum += more);
        self.bulk_free.iter_mut().zip(other.bulk_free).for_each(|(sum, more)| *sum += more);
        self.shortfalls.iter_mut().zip(other.shortfalls).for_each(|(sum, more)| *sum += more);
    }
}

/// Lists count modulo 2^48, and one that is looked at in between may have less than none: so their sum counts modulo 2^48.
const LISTS_COUNT: u64 = u64::MAX >> 16;

impl Zone {
    fn cpu_stats(&self) -> impl Iterator<Item = &CpuStats> {
        (0..self.lists.cpus()).map(|cpu| &self.lists.cpu(CpuId::new(cpu as u32)).stats)
    }

    fn sum(&self, field: fn(&CpuStats) -> &AtomicU64) -> u64 {
        self.cpu_stats().fold(0, |sum, cpu| sum.wrapping_add(field(cpu).load(Relaxed)))
    }
    fn sum_lists(&self, field: fn(&pagemill_os::List) -> u64) -> u64 {
        self.lists.lists().fold(0, |sum, list| sum.wrapping_add(field(list)))
    }
    fn allocated(&self) -> u64 {
        self.allocated_on(|_| true)
    }
    /// Pages handed out on CPUs that `which` names.
    fn allocated_on(&self, which: impl Fn(CpuId) -> bool) -> u64 {
        (0..self.lists.cpus() as u32).map(CpuId::new).filter(|&cpu| which(cpu)).fold(0u64, |sum, cpu| {
            let cpu = self.lists.cpu(cpu);
            let direct = cpu.stats.direct_out.load(Relaxed).wrapping_add(cpu.stats.block_pages_out.load(Relaxed));
            cpu.lists.iter().fold(sum.wrapping_add(direct), |sum, list| sum.wrapping_add(list.popped()))
        }) & LISTS_COUNT
    }
    fn freed(&self) -> u64 {
        let direct = self.sum(|cpu| &cpu.direct_in).wrapping_add(self.sum(|cpu| &cpu.block_pages_in));
        self.sum_lists(|list| list.pushed()).wrapping_add(direct) & LISTS_COUNT
    }

    /// Is there a frame that is neither out nor put aside, nor kept back by a mark or a claim? Then a request that found none
    /// came while another thread had that frame in its hands.
    #[cold]
    pub(crate) fn has_frames_under_way(&self, gfp: Gfp) -> bool {
        let kept = (self.floor(gfp, Level::Min) as usize).min(self.buddy.free_frames());
        // What comes back between the two sums makes it small, or negative.
        self.counted_out() + (self.quarantined.load(Relaxed) as i64) + (kept as i64) < self.frames() as i64
    }

    fn stats(&self) -> Stats {
        let sum = |field| self.sum(field);
        let lists = |field| self.sum_lists(field);
        let histogram = |field: fn(&CpuStats) -> &[AtomicU64; 32]| {
            core::array::from_fn(|i| self.cpu_stats().map(|cpu| field(cpu)[i].load(Relaxed)).sum())
        };
        let depots =
            |field: fn(&List) -> u64| self.lists.depots().fold(0u64, |sum, depot| sum.wrapping_add(field(depot)));
        // Each of these was counted by a list and by a depot, once as coming and once as going.
        let by_depot = depots(List::refilled).wrapping_add(depots(List::passed_on));
        let (direct_out, direct_in) = (sum(|cpu| &cpu.direct_out), sum(|cpu| &cpu.direct_in));
        let (allocated, numa_miss) = (self.allocated(), sum(|cpu| &cpu.numa_miss));
        let numa_other = self.allocated_on(|cpu| self.shared.layout.node_of(cpu) != self.node);
        Stats {
            allocated,
            numa_hit: allocated.saturating_sub(numa_miss),
            numa_miss,
            numa_foreign: sum(|cpu| &cpu.numa_foreign),
            numa_interleave: sum(|cpu| &cpu.numa_interleave),
            numa_local: allocated.saturating_sub(numa_other),
            numa_other,
            freed: self.freed(),
            // Of a retired arena nobody gets any.
            free: if self.is_retired() { 0 } else { self.buddy.free_frames() as u64 },
            listed: lists(|list| list.len() as u64),
            quarantined: self.quarantined.load(Relaxed),
            refills: sum(|cpu| &cpu.refills),
            drains: sum(|cpu| &cpu.drains),
            in_depots: depots(|depot| depot.len() as u64),
            depot_in: sum(|cpu| &cpu.depot_in),
            depot_out: sum(|cpu| &cpu.depot_out),
            refilled_pages: lists(List::refilled).wrapping_sub(by_depot),
            drained_pages: lists(List::drained).wrapping_sub(by_depot),
            direct_out,
            direct_in,
            blocks_out: sum(|cpu| &cpu.blocks_out),
            blocks_in: sum(|cpu| &cpu.blocks_in),
            fallbacks: sum(|cpu| &cpu.fallbacks),
            steals: sum(|cpu| &cpu.steals),
            shortfalls: core::array::from_fn(|why| self.cpu_stats().map(|cpu| cpu.shortfalls[why].load(Relaxed)).sum()),
            misused: self.misused.load(Relaxed),
            bulk_alloc: histogram(|cpu| &cpu.bulk_alloc),
            bulk_free: histogram(|cpu| &cpu.bulk_free),
            ..Stats::default()
        }
    }

    fn validate(&self) -> Result<Census, Misfit> {
        let zone = self.buddy.validate()?;
        let managed = self.frames();
        let mut census = Census { managed, free: zone.free, ..Census::default() };
        let first = self.buddy.start().as_u32();
        let mut on_list = vec![false; managed];
        for pfn in self.lists.lists().flat_map(|list| list.frames()) {
            let Some(seen) = on_list.get_mut(pfn.wrapping_sub(first) as usize) else {
                return Err(Misfit::OtherZones { pfn: Pfn::new(pfn) });
            };
            if core::mem::replace(seen, true) {
                return Err(Misfit::ListedTwice { pfn: Pfn::new(pfn) });
            }
            census.listed += 1;
        }
        let free = census.free + census.listed;
        let mut inside = 0;
        for (pfn, &is_listed) in (first..).map(Pfn::new).zip(&on_list) {
            let state = self.state(pfn.as_u32());
            let places = usize::from(is_listed) + usize::from(self.buddy.is_free(pfn));
            match state.order() {
                _ if inside > 0 => {
                    if state != FrameState::INSIDE || places > 0 {
                        return Err(Misfit::OfBlock { pfn, state, places });
                    }
                    inside -= 1;
                }
                Some(order) if places == 0 => inside = order.frames() - 1,
                None if state == FrameState::QUARANTINED && places == 0 => census.quarantined += 1,
                None if state.is_safe() && places == 1 => {}
                // Somebody has it. With full states that is written.
                None if state.is_safe() && places == 0 && !FULL => {}
                // Of a block that another thread was making raw, or taking up, when this process was forked: its, as all of it.
                None if state == FrameState::INSIDE && places == 0 && !FULL && self.was_forked() => {}
                _ => return Err(Misfit::State { pfn, state, places }),
            }
        }
        let found = free + census.quarantined;
        census.handed_out = managed.checked_sub(found).ok_or(Misfit::Managed { found, managed })?;
        let (counted, found) = (self.counted_out(), census.handed_out);
        // What was freed twice at once was counted twice.
        if counted != found as i64 && self.misused.load(Relaxed) == 0 {
            return Err(Misfit::Out { counted, found });
        }
        Ok(census)
    }

    /// Pages that are out, as they were counted. Sums are modulo 2^48; while others allocate it may be too few, or too many.
    fn counted_out(&self) -> i64 {
        (self.allocated().wrapping_sub(self.freed()) << 16) as i64 >> 16
    }

    /// In the child of a fork: counts what is neither free nor was counted as handed out as that. Other threads of the parent had
    /// it in their hands.
    pub(crate) fn count_stranded(&self) {
        let out = (self.frames() - self.buddy.free_frames()) as i64;
        self.lists.cpu(CpuId::new(0)).stats.direct_out.fetch_add((out - self.counted_out()) as u64, Relaxed);
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
        let pages = [
            ("nr_free_pages", stats.free),
            ("nr_pcp_pages", stats.listed.saturating_sub(stats.in_depots)),
            ("nr_depot_pages", stats.in_depots),
            ("nr_quarantined", stats.quarantined),
        ];
        let events = [
            ("pgalloc_normal", stats.allocated),
            ("pgfree", stats.freed),
            ("pcp_refill", stats.refills),
            ("pcp_refill_pages", stats.refilled_pages),
            ("pcp_drain", stats.drains),
            ("pcp_drain_pages", stats.drained_pages),
            ("pcp_depot_in", stats.depot_in),
            ("pcp_depot_out", stats.depot_out),
            ("direct_alloc_pages", stats.direct_out),
            ("direct_free_pages", stats.direct_in),
            ("block_alloc", stats.blocks_out),
            ("block_free", stats.blocks_in),
            ("bulk_alloc", bulk_calls(&stats.bulk_alloc)),
            ("bulk_free", bulk_calls(&stats.bulk_free)),
            ("bulk_fallback", stats.fallbacks),
            ("alloc_steal", stats.steals),
            ("alloc_shortfall", stats.shortfalls()),
            ("alloc_wait", stats.waits),
            ("alloc_wait_us", stats.waited_us),
            ("reclaim_direct", stats.reclaim_direct),
            ("reclaim_background", stats.reclaim_background),
            ("reclaim_pages", stats.reclaimed),
            ("fault_injected", stats.faults),
            ("misuse", stats.misused),
            ("misuse_foreign", stats.foreign),
        ];
        let mut lines = pages.into_iter().chain(stats.numa()).chain(events);
        lines.try_for_each(|(name, value)| writeln!(f, "{name} {value}"))?;
        for why in Why::ALL {
            writeln!(f, "alloc_shortfall_{} {}", why.name(), stats.shortfalls_by(why))?;
        }
        for (name, histogram) in [("bulk_alloc", &stats.bulk_alloc), ("bulk_free", &stats.bulk_free)] {
            for (i, calls) in histogram.iter().enumerate().filter(|(_, calls)| **calls > 0) {
                writeln!(f, "{name}_{}_to_{} {calls}", 1u64 << i, (1u64 << (i + 1)) - 1)?;
            }
        }
        let largest = Order::MAX.get();
        writeln!(f, "max_order {largest}")
    }
}
