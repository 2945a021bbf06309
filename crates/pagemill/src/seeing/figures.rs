//! The list of figures, and the moment that they are read from.
//!
//! To add a figure: a line in [`FIGURES`], and what it reads in [`Snapshot`], or in one of its zones or lists.
use crate::allocator::Allocator;
use crate::mempool::MempoolStats;
use crate::misuse::foreign_count;
use crate::stats::{Stats, ZoneInfo};
use pagemill_core::{CpuId, Mobility, NodeId, Order, Why, ZoneKind};
use pagemill_os::Backend;

/// Whether a figure only grows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FigureKind {
    /// Grows from zero, and begins anew when its allocator does.
    Counter,
    /// Goes up and down.
    Gauge,
}

impl FigureKind {
    /// `counter` or `gauge`.
    ///
    /// ```
    /// assert_eq!(pagemill::FigureKind::Gauge.name(), "gauge");
    /// ```
    pub const fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
        }
    }
}

/// Something that can be told of a process or of one of its allocators. [`FIGURES`] has them all.
#[derive(Debug)]
pub struct Figure {
    /// Its name by Prometheus' rules: `pagemill_`, what it counts, and `_total` for counters.
    pub name: &'static str,
    /// What it says, in a sentence.
    pub help: &'static str,
    /// Whether it only grows.
    pub kind: FigureKind,
    read: Read,
}

/// One value of a figure.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Sample {
    /// Which allocator, node, zone, CPU or size it is of.
    pub labels: Vec<(&'static str, String)>,
    /// The value.
    pub value: u64,
}

/// Where a figure is read, and so which labels its samples have.
#[derive(Debug)]
enum Read {
    /// Once in a process: no label.
    Process(fn() -> u64),
    /// Of each allocator: `allocator`.
    Allocator(fn(&Snapshot) -> u64),
    /// Of each zone: `node` and `zone` besides.
    Zone(fn(&ZoneInfo) -> u64),
    /// Of each per-CPU list that was ever used: `node`, `zone`, `cpu` and `mobility` besides.
    List(fn(&List) -> u64),
    /// Of each pool that is shown with the allocator: `pool` besides.
    Pool(fn(&MempoolStats) -> u64),
    /// With labels of its own.
    Labelled(fn(&Snapshot, &mut Samples<'_>)),
}

/// One per-CPU list at a snapshot's moment.
#[derive(Clone, Debug)]
struct List {
    node: NodeId,
    zone: ZoneKind,
    cpu: usize,
    mobility: &'static str,
    pages: u64,
    popped: u64,
    pushed: u64,
    refilled: u64,
    drained: u64,
}

/// One allocator's counters at one moment, under the name that it is shown by.
///
/// ```
/// use pagemill::{Allocator, FIGURES, Gfp, Snapshot};
/// let allocator = Allocator::builder().pages(100).build()?;
/// let _page = allocator.alloc_page(Gfp::KERNEL)?;
/// let seen = [Snapshot::of("mine", &allocator)];
/// let figure = FIGURES.iter().find(|figure| figure.name == "pagemill_handed_out_pages").unwrap();
/// let sample = &figure.samples(&seen)[0];
/// assert_eq!((sample.labels[0].1.as_str(), sample.value), ("mine", 1));
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Snapshot {
    name: String,
    backend: Backend,
    cpus: u64,
    stats: Stats,
    zones: Vec<ZoneInfo>,
    lists: Vec<List>,
    pools: Vec<(String, MempoolStats)>,
}

impl Snapshot {
    /// Reads an allocator's counters, without a lock: exact at rest, close while others work.
    pub fn of(name: impl Into<String>, allocator: &Allocator) -> Self {
        let stats = allocator.stats();
        Self {
            name: name.into(),
            backend: allocator.backend(),
            cpus: allocator.cpus() as u64,
            zones: allocator.zoneinfo(),
            lists: lists(allocator),
            pools: Vec::new(),
            stats,
        }
    }
    /// Shows a pool with it, under this name.
    ///
    /// ```
    /// use pagemill::{Allocator, Mempool, Snapshot};
    /// let allocator = Allocator::builder().pages(64).build()?;
    /// let pool = Mempool::pages(&allocator, 16)?;
    /// let seen = Snapshot::of("mine", &allocator).with_pool("writes", pool.stats());
    /// let text = pagemill::prometheus(&[seen]);
    /// assert!(text.contains("pagemill_pool_reserve{allocator=\"mine\",pool=\"writes\"} 16"));
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    #[must_use]
    pub fn with_pool(mut self, name: impl Into<String>, stats: MempoolStats) -> Self {
        self.pools.push((name.into(), stats));
        self
    }
    /// The name that the allocator is shown by.
    pub fn name(&self) -> &str {
        &self.name
    }
}

/// The per-CPU lists that were ever used: a large machine has many that were not. Those of several arenas are one list
/// if these are one zone.
fn lists(allocator: &Allocator) -> Vec<List> {
    let mut all: Vec<List> = Vec::new();
    // Retired arenas too: what they counted must not go back.
    for arena in allocator.nodes().ever().iter() {
        let cpus = (0..arena.lists.cpus()).flat_map(|cpu| Mobility::ALL.map(|mobility| (cpu, mobility)));
        for (cpu, mobility) in cpus {
            let list = &arena.lists.cpu(CpuId::new(cpu as u32)).lists[mobility.index()];
            let mobility = match mobility {
                Mobility::Unmovable => "unmovable",
                Mobility::Movable => "movable",
                Mobility::Reclaimable => "reclaimable",
            };
            let (node, zone, pages) = (arena.node, arena.kind, list.len() as u64);
            let (popped, pushed) = (list.popped(), list.pushed());
            let (refilled, drained) = (list.refilled(), list.drained());
            if pages + popped + pushed + refilled == 0 {
                continue;
            }
            let key = |list: &List| (list.node, list.zone, list.cpu, list.mobility);
            match all.iter_mut().find(|list| key(list) == (node, zone, cpu, mobility)) {
                Some(list) => {
                    list.pages += pages;
                    list.popped += popped;
                    list.pushed += pushed;
                    list.refilled += refilled;
                    list.drained += drained;
                }
                None => all.push(List { node, zone, cpu, mobility, pages, popped, pushed, refilled, drained }),
            }
        }
    }
    all
}

const fn counter(name: &'static str, help: &'static str, read: Read) -> Figure {
    Figure { name, help, kind: FigureKind::Counter, read }
}
const fn gauge(name: &'static str, help: &'static str, read: Read) -> Figure {
    Figure { name, help, kind: FigureKind::Gauge, read }
}

use Read::{Allocator as Of, Labelled, List as PerList, Pool as PerPool, Process, Zone as PerZone};

/// Every figure there is, in the order in which it is shown.
pub static FIGURES: &[Figure] = &[
    gauge("pagemill_info", "1, labelled with the library's version and how the per-CPU lists work.", Labelled(info)),
    gauge("pagemill_cpus", "CPUs that have lists.", Of(|seen| seen.cpus)),
    gauge("pagemill_handed_out_pages", "Pages that are handed out.", Of(handed_out)),
    gauge(
        "pagemill_quarantined_pages",
        "Pages put aside, found on two ways at once.",
        Of(|seen| seen.stats.quarantined),
    ),
    gauge("pagemill_zone_managed_pages", "Pages that the zone has in all.", PerZone(|zone| zone.managed)),
    gauge("pagemill_zone_free_pages", "Pages free in the zone.", PerZone(|zone| zone.stats.free)),
    gauge(
        "pagemill_zone_listed_pages",
        "Pages of the zone on per-CPU lists and in depots.",
        PerZone(|zone| zone.stats.listed),
    ),
    gauge("pagemill_zone_min_pages", "Watermark: below it only reserves.", PerZone(|zone| zone.marks.min.into())),
    gauge("pagemill_zone_low_pages", "Watermark: below it reclaim wakes.", PerZone(|zone| zone.marks.low.into())),
    gauge("pagemill_zone_high_pages", "Watermark: reclaim runs up to it.", PerZone(|zone| zone.marks.high.into())),
    gauge("pagemill_free_blocks", "Free blocks by order, each as large as it merges to.", Labelled(free_blocks)),
    gauge("pagemill_list_pages", "Pages on a CPU's list.", PerList(|list| list.pages)),
    counter("pagemill_list_taken_pages_total", "Pages taken from a CPU's list.", PerList(|list| list.popped)),
    counter("pagemill_list_returned_pages_total", "Pages given back to a CPU's list.", PerList(|list| list.pushed)),
    counter(
        "pagemill_list_refilled_pages_total",
        "Pages that a list got from the zone or a depot.",
        PerList(|list| list.refilled),
    ),
    counter(
        "pagemill_list_drained_pages_total",
        "Pages that a list gave to the zone or a depot.",
        PerList(|list| list.drained),
    ),
    counter(
        "pagemill_allocated_pages_total",
        "Pages handed out, those of blocks too.",
        Of(|seen| seen.stats.allocated),
    ),
    counter("pagemill_freed_pages_total", "Pages that came back.", Of(|seen| seen.stats.freed)),
    counter("pagemill_refills_total", "Trips to the zone for a batch.", Of(|seen| seen.stats.refills)),
    counter("pagemill_drains_total", "Batches that a full list gave to the zone.", Of(|seen| seen.stats.drains)),
    gauge("pagemill_depot_pages", "Pages in depots, between the lists of the CPUs.", Of(|seen| seen.stats.in_depots)),
    counter("pagemill_depot_in_total", "Loads that a full list passed to a depot.", Of(|seen| seen.stats.depot_in)),
    counter("pagemill_depot_out_total", "Loads that went from a depot to a list.", Of(|seen| seen.stats.depot_out)),
    counter("pagemill_direct_allocated_pages_total", "Pages past the lists, out.", Of(|seen| seen.stats.direct_out)),
    counter("pagemill_direct_freed_pages_total", "Pages past the lists, back.", Of(|seen| seen.stats.direct_in)),
    counter("pagemill_blocks_allocated_total", "Blocks above order 0 handed out.", Of(|seen| seen.stats.blocks_out)),
    counter("pagemill_blocks_freed_total", "Blocks above order 0 that came back.", Of(|seen| seen.stats.blocks_in)),
    counter("pagemill_bulk_allocations_total", "Bulk allocations by the pages they delivered.", Labelled(bulk_alloc)),
    counter("pagemill_bulk_frees_total", "Bulk frees by the pages they returned.", Labelled(bulk_free)),
    counter(
        "pagemill_bulk_fallbacks_total",
        "Bulk requests that took the single path.",
        Of(|seen| seen.stats.fallbacks),
    ),
    counter("pagemill_stolen_pages_total", "Pages out of another mobility's pageblock.", Of(|seen| seen.stats.steals)),
    counter("pagemill_shortfalls_total", "Requests that came back short, by reason.", Labelled(shortfalls)),
    counter("pagemill_numa_hit_total", "Pages from the node that was asked for.", PerZone(|zone| zone.stats.numa_hit)),
    counter("pagemill_numa_miss_total", "Pages for another node's requests.", PerZone(|zone| zone.stats.numa_miss)),
    counter("pagemill_numa_foreign_total", "Its requests, met elsewhere.", PerZone(|zone| zone.stats.numa_foreign)),
    counter("pagemill_numa_interleave_total", "Pages by interleaving.", PerZone(|zone| zone.stats.numa_interleave)),
    counter("pagemill_numa_local_total", "Pages for CPUs of the node.", PerZone(|zone| zone.stats.numa_local)),
    counter("pagemill_numa_other_total", "Pages for CPUs of other nodes.", PerZone(|zone| zone.stats.numa_other)),
    gauge("pagemill_waiting_requests", "Requests that wait for memory.", Of(|seen| seen.stats.waiting)),
    counter("pagemill_waits_total", "Waits for memory that have ended.", Of(|seen| seen.stats.waits)),
    counter("pagemill_waited_us_total", "Microseconds of those waits.", Of(|seen| seen.stats.waited_us)),
    counter("pagemill_direct_reclaims_total", "Reclaim by requests.", Of(|seen| seen.stats.reclaim_direct)),
    counter("pagemill_background_reclaims_total", "Reclaim beside them.", Of(|seen| seen.stats.reclaim_background)),
    counter("pagemill_reclaimed_pages_total", "Pages that shrinkers freed.", Of(|seen| seen.stats.reclaimed)),
    counter("pagemill_injected_faults_total", "Requests failed on purpose.", Of(|seen| seen.stats.faults)),
    gauge("pagemill_pool_size", "Elements of the pool's reserve when it is full.", PerPool(|pool| pool.min_nr as u64)),
    gauge("pagemill_pool_reserve", "Elements in the reserve.", PerPool(|pool| pool.reserve as u64)),
    gauge("pagemill_pool_low_water", "The least that it held.", PerPool(|pool| pool.low_water as u64)),
    gauge("pagemill_pool_out", "Elements handed out.", PerPool(|pool| pool.out as u64)),
    gauge("pagemill_pool_waiting", "Requests that wait for elements.", PerPool(|pool| pool.waiting as u64)),
    gauge("pagemill_pool_longest_us", "The longest wait, in microseconds.", PerPool(|pool| pool.longest_wait_us)),
    counter("pagemill_pool_from_reserve_total", "Elements out of reserves.", PerPool(|pool| pool.from_reserve)),
    counter("pagemill_pool_waits_total", "Waits for elements that ended.", PerPool(|pool| pool.waits)),
    counter("pagemill_pool_waited_us_total", "Microseconds of those waits.", PerPool(|pool| pool.waited_us)),
    counter("pagemill_misuse_total", "Frees refused, frames found on two ways at once.", Of(|seen| seen.stats.misused)),
    counter("pagemill_foreign_frees_total", "Frees of what belongs to no allocator.", Process(foreign_count)),
    counter("pagemill_section_restarts_total", "Restartable sections begun anew.", Process(pagemill_os::restarts)),
];

fn info(_: &Snapshot, samples: &mut Samples<'_>) {
    let backend = samples.seen.backend.name();
    samples.push([("version", env!("CARGO_PKG_VERSION").into()), ("backend", backend.into())], 1);
}

/// Both counts wrap at 2^48, and what comes back between their readings would make the difference negative.
fn handed_out(seen: &Snapshot) -> u64 {
    let out = (seen.stats.allocated.wrapping_sub(seen.stats.freed) << 16) as i64 >> 16;
    out.max(0) as u64
}

fn free_blocks(seen: &Snapshot, samples: &mut Samples<'_>) {
    for zone in &seen.zones {
        for order in (0..=Order::MAX.get()).flat_map(Order::new) {
            let [node, kind] = labels_of(zone.node, zone.kind);
            let blocks: usize = zone.buddy.iter().map(|arena| arena.free_blocks(order)).sum();
            samples.push([node, kind, ("order", order.get().to_string())], blocks as u64);
        }
    }
}

fn labels_of(node: NodeId, zone: ZoneKind) -> [(&'static str, String); 2] {
    [("node", node.get().to_string()), ("zone", zone.name().into())]
}

fn bulk_alloc(seen: &Snapshot, samples: &mut Samples<'_>) {
    by_size(&seen.stats.bulk_alloc, samples);
}
fn bulk_free(seen: &Snapshot, samples: &mut Samples<'_>) {
    by_size(&seen.stats.bulk_free, samples);
}

/// Sizes that occurred, as `pages="64-127"`.
fn by_size(calls: &[u64; 32], samples: &mut Samples<'_>) {
    for (i, &calls) in calls.iter().enumerate().filter(|(_, calls)| **calls > 0) {
        let (from, to) = (1u64 << i, (1u64 << (i + 1)) - 1);
        samples.push([("pages", if from == to { from.to_string() } else { format!("{from}-{to}") })], calls);
    }
}

/// Each zone's, those that are 0 too: so a rate can be told from the first one on.
fn shortfalls(seen: &Snapshot, samples: &mut Samples<'_>) {
    for zone in &seen.zones {
        for why in Why::ALL {
            let [node, kind] = labels_of(zone.node, zone.kind);
            samples.push([node, kind, ("reason", why.name().into())], zone.stats.shortfalls_by(why));
        }
    }
}

/// Where a figure's samples of one allocator are gathered: puts the allocator's name in front of the labels.
struct Samples<'s> {
    seen: &'s Snapshot,
    all: &'s mut Vec<Sample>,
}

impl Samples<'_> {
    fn push<const N: usize>(&mut self, labels: [(&'static str, String); N], value: u64) {
        let allocator = [("allocator", self.seen.name.clone())];
        self.all.push(Sample { labels: allocator.into_iter().chain(labels).collect(), value });
    }
}

impl Figure {
    /// Its values for these allocators.
    pub fn samples(&self, seen: &[Snapshot]) -> Vec<Sample> {
        let mut all = Vec::new();
        if let Read::Process(read) = self.read {
            return vec![Sample { labels: Vec::new(), value: read() }];
        }
        for seen in seen {
            let mut samples = Samples { seen, all: &mut all };
            match self.read {
                Read::Process(_) => {}
                Read::Allocator(read) => samples.push([], read(seen)),
                Read::Zone(read) => seen.zones.iter().for_each(|zone| {
                    samples.push(labels_of(zone.node, zone.kind), read(zone));
                }),
                Read::List(read) => seen.lists.iter().for_each(|list| {
                    let [node, zone] = labels_of(list.node, list.zone);
                    let labels = [node, zone, ("cpu", list.cpu.to_string()), ("mobility", list.mobility.into())];
                    samples.push(labels, read(list));
                }),
                Read::Pool(read) => seen.pools.iter().for_each(|(name, pool)| {
                    samples.push([("pool", name.clone())], read(pool));
                }),
                Read::Labelled(read) => read(seen, &mut samples),
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn names_follow_the_rules_and_help_is_a_sentence() {
        let mut names = HashSet::new();
        for figure in FIGURES {
            assert!(names.insert(figure.name), "{} is there twice", figure.name);
            assert!(figure.name.starts_with("pagemill_"), "{}", figure.name);
            assert!(figure.name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'), "{}", figure.name);
            assert_eq!(figure.kind == FigureKind::Counter, figure.name.ends_with("_total"), "{}", figure.name);
            assert!(figure.help.ends_with('.') && !figure.help.contains(['\n', '\\']), "{}", figure.help);
        }
    }

    #[test]
    fn the_samples_are_what_the_allocator_counts() {
        use crate::{Bulk, Gfp, PageList, free_pages_bulk};
        let allocator = Allocator::builder().pages(2048).cpus(2, || 1).build().unwrap();
        let mut list = PageList::new();
        allocator.alloc_pages_bulk_list(Bulk::up_to(100), &mut list).unwrap();
        let mut array: [Option<crate::Page>; 10] = [const { None }; 10];
        allocator.alloc_pages_bulk_array(Bulk::up_to(10), &mut array).unwrap();
        free_pages_bulk(&mut array);
        let block = allocator.alloc_pages(Gfp::KERNEL, Order::new(3).unwrap()).unwrap();
        let stats = allocator.stats();
        let seen = [Snapshot::of("a", &allocator), Snapshot::of("b", &allocator)];
        let all = |name: &str| FIGURES.iter().find(|figure| figure.name == name).unwrap().samples(&seen);
        let sum = |name: &str| {
            let of = |sample: &&Sample| sample.labels.first().is_some_and(|label| label.1 == "a");
            all(name).iter().filter(of).map(|sample| sample.value).sum::<u64>()
        };
        assert_eq!(sum("pagemill_handed_out_pages"), 108);
        assert_eq!(sum("pagemill_allocated_pages_total"), stats.allocated);
        assert_eq!(sum("pagemill_freed_pages_total"), 10);
        assert_eq!(sum("pagemill_list_pages"), stats.listed);
        assert_eq!(sum("pagemill_list_refilled_pages_total"), stats.refilled_pages);
        assert_eq!(sum("pagemill_bulk_allocations_total"), stats.bulk_calls());
        let places = ["pagemill_zone_free_pages", "pagemill_zone_listed_pages", "pagemill_handed_out_pages"];
        assert_eq!(places.map(sum).iter().sum::<u64>(), sum("pagemill_zone_managed_pages"));
        let free = all("pagemill_free_blocks");
        let label = |sample: &Sample, name: &str| sample.labels.iter().find(|l| l.0 == name).unwrap().1.clone();
        let pages = |sample: &Sample| sample.value << label(sample, "order").parse::<u32>().unwrap();
        let of_b = free.iter().filter(|sample| label(sample, "allocator") == "b");
        assert_eq!(of_b.map(pages).sum::<u64>(), stats.free);
        assert!(all("pagemill_list_pages").iter().all(|sample| label(sample, "cpu") == "1"), "CPU 0 was never used");
        let sizes: Vec<_> = all("pagemill_bulk_allocations_total").iter().map(|s| label(s, "pages")).collect();
        assert_eq!(sizes, ["8-15", "64-127", "8-15", "64-127"]);
        drop(block);
    }

    #[test]
    fn shortfalls_are_shown_by_zone_and_reason() {
        use crate::{Account, Bulk, Memory, PageCount, PageList};
        let second = NodeId::new(1).unwrap();
        let builder = Allocator::builder().memory(Memory::anonymous(512));
        let allocator = builder.memory(Memory::anonymous(512).node(second)).build().unwrap();
        let (account, mut list) = (Account::new(PageCount::new(3)), PageList::new());
        let request = Bulk::up_to(4).account(&account).exact_node(second);
        (0..2).for_each(|_| _ = allocator.alloc_pages_bulk_list(request, &mut list).unwrap());
        let seen = [Snapshot::of("a", &allocator)];
        let figure = FIGURES.iter().find(|figure| figure.name == "pagemill_shortfalls_total").unwrap();
        let samples = figure.samples(&seen);
        let counted: Vec<_> = samples.iter().filter(|sample| sample.value > 0).collect();
        let labels = [("allocator", "a"), ("node", "1"), ("zone", "Normal"), ("reason", "account")];
        let labels = labels.map(|(name, value)| (name, value.to_owned())).to_vec();
        assert_eq!(counted, [&Sample { labels, value: 2 }]);
        assert_eq!(samples.len(), 2 * Why::COUNT, "those that are 0 too");
        assert_eq!(allocator.stats().shortfalls(), 2);
    }
}
