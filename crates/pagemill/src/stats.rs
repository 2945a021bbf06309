//! Statistics of an allocator (C3.13), the walk that checks its invariants (C10.2), and both in the formats of `/proc`.
//!
//! Counters are per CPU and read without a lock. Sums are exact at rest, and close while other threads work.
use crate::allocator::Allocator;
use crate::misuse::foreign_frees;
use crate::zone::{FULL, Zone};
use core::fmt;
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::{BuddyInfo, CpuId, FrameState, Misfit, Mobility, NodeId, Order, Pfn, Watermarks, Why, ZoneKind};
use pagemill_os::List;

mod counters;
pub use counters::{CountedBy, Counter, Stats};

/// All frames of an allocator at rest, counted by state (C10.2).
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
#[non_exhaustive]
pub struct Census {
    /// All frames.
    pub managed: usize,
    /// Free in a zone.
    pub free: usize,
    /// On per-CPU lists and in depots.
    pub listed: usize,
    /// Handed out.
    pub handed_out: usize,
    /// Put aside for good: a frame that had two owners at once, and the other frames of its block if it was part of one.
    pub quarantined: usize,
}

/// A zone: the frames of one node and kind, with counters as in `/proc/zoneinfo`.
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
    /// Its pages, without those of retired arenas.
    pub managed: u64,
    /// Its watermarks, in pages.
    pub marks: Watermarks,
    /// Its counters. They include those of retired arenas, so they never decrease. Counters of the allocator as a whole
    /// (waits, reclaim, faults) are 0 here.
    pub stats: Stats,
    /// Pages on each CPU's lists.
    pub listed_by_cpu: Vec<u64>,
    /// Each CPU's lists. Their counters include those of retired arenas.
    pub lists: Vec<ListInfo>,
    /// Its free blocks by order.
    pub buddy: Vec<BuddyInfo>,
}

/// One CPU's list of a zone's pages of one mobility.
///
/// ```
/// let allocator = pagemill::Allocator::builder().pages(512).build()?;
/// drop(allocator.alloc_page(pagemill::Gfp::KERNEL)?);
/// let lists = &allocator.zoneinfo()[0].lists;
/// assert_eq!(lists.iter().map(|list| list.returned).sum::<u64>(), 1);
/// assert!(lists.iter().all(|list| list.pages + list.taken + list.drained == list.refilled + list.returned));
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ListInfo {
    /// The CPU that the list belongs to.
    pub cpu: CpuId,
    /// The mobility of its pages.
    pub mobility: Mobility,
    /// Pages on it.
    pub pages: u64,
    /// Pages that requests took from it.
    pub taken: u64,
    /// Pages that were freed to it.
    pub returned: u64,
    /// Pages that it received from the zone or a depot.
    pub refilled: u64,
    /// Pages that it passed on to the zone or a depot.
    pub drained: u64,
}

impl ListInfo {
    fn new(cpu: CpuId, mobility: Mobility) -> Self {
        Self { cpu, mobility, pages: 0, taken: 0, returned: 0, refilled: 0, drained: 0 }
    }
    /// Adds the counters of another zone's list.
    fn add(&mut self, list: &List) {
        self.pages += list.len() as u64;
        self.taken += list.popped();
        self.returned += list.pushed();
        self.refilled += list.refilled();
        self.drained += list.drained();
    }
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
        let mut numa = stats.named().filter(|(name, _)| name.starts_with("numa_"));
        numa.try_for_each(|(name, value)| writeln!(f, "      {name:<14} {value}"))?;
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
    /// The number of free blocks of this order, in all zones.
    pub fn free_blocks(&self, order: Order) -> usize {
        self.0.iter().map(|(_, _, info)| info.free_blocks(order)).sum()
    }
}

impl fmt::Display for BuddyDump {
    /// One line for each zone (one for each arena, if it has several), as in `/proc/buddyinfo`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().enumerate().try_for_each(|(at, (node, kind, info))| {
            let end = if at == 0 { "" } else { "\n" };
            write!(f, "{end}Node {}, zone {:>8}{info}", node.get(), kind.name())
        })
    }
}

impl fmt::Debug for Allocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stats = self.stats();
        f.debug_struct("Allocator")
            .field("backend", &format_args!("{}", self.backend()))
            .field("arenas", &self.zones().in_use().count())
            .field("pages", &self.managed_pages().get())
            .field("out", &stats.allocated.saturating_sub(stats.freed))
            .finish()
    }
}

impl Allocator {
    /// Returns the counters, summed over all zones.
    pub fn stats(&self) -> Stats {
        let zones = self.zones();
        let mut sum = Stats::default();
        zones.ever().iter().for_each(|arena| sum.add(&arena.stats()));
        Stats {
            foreign: foreign_frees(),
            waits: zones.waits.ended.load(Relaxed),
            waited_us: zones.waits.waited_us.load(Relaxed),
            waiting: zones.waits.len() as u64,
            reclaim_direct: zones.reclaim.direct_runs.load(Relaxed),
            reclaim_background: zones.reclaim.background_runs.load(Relaxed),
            reclaimed: zones.reclaim.pages.load(Relaxed),
            faults: zones.faults_injected(),
            ..sum
        }
    }

    /// Describes the zones, by node. Arenas of one node and kind are one zone.
    pub fn zoneinfo(&self) -> Vec<ZoneInfo> {
        let mut zones: Vec<ZoneInfo> = Vec::new();
        for arena in self.zones().ever() {
            let (node, kind, marks) = (arena.node(), arena.kind(), arena.marks());
            let cpus = arena.lists().cpus();
            let at = zones.iter().position(|zone| (zone.node, zone.kind) == (node, kind)).unwrap_or_else(|| {
                let (stats, marks, listed_by_cpu) = (Stats::default(), Watermarks::NONE, vec![0; cpus]);
                let lists = (0..cpus as u32).map(CpuId::new);
                let lists = lists.flat_map(|cpu| Mobility::ALL.map(|mobility| ListInfo::new(cpu, mobility))).collect();
                zones.push(ZoneInfo { node, kind, managed: 0, marks, stats, listed_by_cpu, lists, buddy: Vec::new() });
                zones.len() - 1
            });
            let zone = &mut zones[at];
            zone.stats.add(&arena.stats());
            for list in &mut zone.lists {
                list.add(&arena.lists().cpu(list.cpu).lists[list.mobility.index()]);
            }
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
                *listed += arena.lists().cpu(CpuId::new(cpu)).lists.iter().map(|list| list.len() as u64).sum::<u64>();
            }
            zone.buddy.push(arena.buddy().buddy_info());
        }
        zones.sort_by_key(|zone| (zone.node, core::cmp::Reverse(zone.kind as u8)));
        zones
    }

    /// Counts free blocks by order, as `/proc/buddyinfo` does, up to 1 GiB.
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

    /// Returns the counters in the format of `/proc/vmstat`.
    pub fn vmstat(&self) -> VmStat {
        VmStat(self.stats())
    }

    /// Walks every frame of an allocator at rest and checks that each is in exactly one place (C10.2): free and merged,
    /// on one list, handed out, or put aside.
    ///
    /// It may be called at any time, and does no harm. But while the allocator is in use, also by a bulk request whose
    /// callback calls this, it may find frames on their way that are in no place. Then an error proves nothing.
    ///
    /// # Errors
    /// [`Misfit`]: the first two values that disagree. If no thread used the allocator meanwhile, this is a bug in
    /// Pagemill (C10.1).
    ///
    /// ```
    /// let allocator = pagemill::Allocator::builder().pages(512).build()?;
    /// match allocator.validate() {
    ///     Ok(census) => assert_eq!(census.free, 512),
    ///     Err(misfit) => panic!("{misfit}"), // no other thread uses this allocator
    /// }
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn validate(&self) -> Result<Census, Misfit> {
        self.zones().ever().iter().try_fold(Census::default(), |sum, arena| {
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

impl Zone {
    fn stats(&self) -> Stats {
        let depots =
            |field: fn(&List) -> u64| self.lists().depots().fold(0u64, |sum, depot| sum.wrapping_add(field(depot)));
        // Each of these was counted by a list and by a depot: once as refilled and once as passed on.
        let by_depot = depots(List::refilled).wrapping_add(depots(List::passed_on));
        let counted = Stats::of_cpus(self.cpu_stats());
        let allocated = self.allocated();
        let numa_other = self.allocated_on(|cpu| self.shared().layout.node_of(cpu) != self.node());
        Stats {
            // Requests get no page of a retired zone.
            free: if self.is_retired() { 0 } else { self.buddy().free_frames() as u64 },
            listed: self.sum_lists(|list| list.len() as u64),
            in_depots: depots(|depot| depot.len() as u64),
            quarantined: self.quarantined(),
            allocated,
            freed: self.freed(),
            refilled_pages: self.sum_lists(List::refilled).wrapping_sub(by_depot),
            drained_pages: self.sum_lists(List::drained).wrapping_sub(by_depot),
            misused: self.misused(),
            numa_local: allocated.saturating_sub(numa_other),
            numa_other,
            numa_hit: allocated.saturating_sub(counted.numa_miss),
            ..counted
        }
    }

    fn validate(&self) -> Result<Census, Misfit> {
        let zone = self.buddy().validate()?;
        let managed = self.frames();
        let mut census = Census { managed, free: zone.free, ..Census::default() };
        let first = self.buddy().start();
        let mut on_list = vec![false; managed];
        for pfn in self.lists().lists().flat_map(|list| list.frames()).map(Pfn::new) {
            let Some(seen) = on_list.get_mut(pfn.since(first) as usize) else {
                return Err(Misfit::OtherZones { pfn });
            };
            if core::mem::replace(seen, true) {
                return Err(Misfit::ListedTwice { pfn });
            }
            census.listed += 1;
        }
        let free = census.free + census.listed;
        let mut inside = 0;
        for (pfn, &is_listed) in first.run(managed as u32).zip(&on_list) {
            let state = self.state(pfn);
            let places = usize::from(is_listed) + usize::from(self.buddy().is_free(pfn));
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
                // Handed out. With full states the state says so.
                None if state.is_safe() && places == 0 && !FULL => {}
                // Inside a block that another thread of the parent was making raw, or taking ownership of, at the fork.
                // The block is that thread's.
                None if state == FrameState::INSIDE && places == 0 && !FULL && self.was_forked() => {}
                _ => return Err(Misfit::State { pfn, state, places }),
            }
        }
        let found = free + census.quarantined;
        census.handed_out = managed.checked_sub(found).ok_or(Misfit::Managed { found, managed })?;
        let (counted, found) = (self.counted_out(), census.handed_out);
        // A page that two threads freed at once was counted twice.
        if counted != found as i64 && self.misused() == 0 {
            return Err(Misfit::Out { counted, found });
        }
        Ok(census)
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
        let sums = [
            ("nr_pcp_pages", stats.listed.saturating_sub(stats.in_depots)),
            ("bulk_alloc", bulk_calls(&stats.bulk_alloc)),
            ("bulk_free", bulk_calls(&stats.bulk_free)),
            ("alloc_shortfall", stats.shortfalls()),
        ];
        stats.named().chain(sums).try_for_each(|(name, value)| writeln!(f, "{name} {value}"))?;
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
