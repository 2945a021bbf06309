//! The list of figures, and the snapshots that they are read from.
//!
//! Each counter of [`Stats::COUNTERS`] is a figure already. To add another figure, add a line to [`FIRST`] or [`LAST`].
use Read::{
    Allocator as Of, DmaPool as PerDmaPool, Labelled, List as PerList, PageCache as PerPageCache,
    PagePool as PerPagePool, Pool as PerPool, Process, Zone as PerZone,
};
use pagemill::{Allocator, Backend, CountedBy, Counter, DmaPoolStats, ListInfo};
use pagemill::{MempoolStats, Order, PageCacheInfo, PagePoolInfo, Stats, Why, ZoneInfo};
use pagemill::{foreign_frees, page_caches, page_pools, restarts};
use std::sync::LazyLock;

/// Whether a figure only grows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FigureKind {
    /// Only grows, from 0 when its allocator is made.
    Counter,
    /// Goes up and down.
    Gauge,
}

impl FigureKind {
    /// By its name, as Prometheus names counters.
    fn of(name: &str) -> Self {
        if name.ends_with("_total") { Self::Counter } else { Self::Gauge }
    }
    /// `counter` or `gauge`.
    ///
    /// ```
    /// assert_eq!(pagemill_watch::FigureKind::Gauge.name(), "gauge");
    /// ```
    pub const fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
        }
    }
}

/// A value that describes a process or one of its allocators. [`FIGURES`] has all of them.
#[derive(Debug)]
pub struct Figure {
    /// Its name by Prometheus' rules: `pagemill_`, what it counts, and `_total` for counters.
    pub name: &'static str,
    /// Its meaning, in one sentence.
    pub help: &'static str,
    /// Whether it only grows.
    pub kind: FigureKind,
    read: Read,
}

/// One value of a figure.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Sample {
    /// The allocator, node, zone, CPU, size, pool or cache that the value belongs to.
    pub labels: Vec<(&'static str, String)>,
    /// The value.
    pub value: u64,
}

/// Where a figure is read, which also determines the labels of its samples.
#[derive(Clone, Copy, Debug)]
enum Read {
    /// As `Allocator` or `Zone`, depending on the counter.
    Counter(&'static Counter),
    /// Once for the process: no label.
    Process(fn() -> u64),
    /// For each pool of circulating pages in the process that has the figure, with `page_pool` (its name) and `id`, by
    /// which pools of one name are told apart.
    PagePool(fn(&PagePoolInfo) -> Option<u64>),
    /// For each page cache in the process, with `page_cache` (its name) and `id`, by which caches of one name are told
    /// apart.
    PageCache(fn(&PageCacheInfo) -> u64),
    /// For each allocator, with the label `allocator`.
    Allocator(fn(&Snapshot) -> u64),
    /// For each zone, with `node` and `zone` as well.
    Zone(fn(&ZoneInfo) -> u64),
    /// For each per-CPU list that was ever used, with `node`, `zone`, `cpu` and `mobility` as well.
    List(fn(&ListInfo) -> u64),
    /// For each pool that is shown with the allocator, with `pool` as well.
    Pool(fn(&MempoolStats) -> u64),
    /// For each pool of blocks for a device, with `dma_pool` as well.
    DmaPool(fn(&DmaPoolStats) -> u64),
    /// With labels of its own.
    Labelled(fn(&Snapshot, &mut Samples<'_>)),
}

/// One allocator's counters at one moment, under the name that it is shown by.
///
/// ```
/// use pagemill::{Allocator, Gfp};
/// use pagemill_watch::{FIGURES, Snapshot};
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
    pools: Vec<(String, MempoolStats)>,
    dma_pools: Vec<(String, DmaPoolStats)>,
}

impl Snapshot {
    /// Reads an allocator's counters without a lock: exact at rest, approximate while threads use it.
    pub fn of(name: impl Into<String>, allocator: &Allocator) -> Self {
        let stats = allocator.stats();
        Self {
            name: name.into(),
            backend: allocator.backend(),
            cpus: allocator.cpus() as u64,
            zones: allocator.zoneinfo(),
            pools: Vec::new(),
            dma_pools: Vec::new(),
            stats,
        }
    }
    /// Adds a pool, shown under this name.
    ///
    /// ```
    /// use pagemill::{Allocator, Mempool};
    /// use pagemill_watch::Snapshot;
    /// let allocator = Allocator::builder().pages(64).build()?;
    /// let pool = Mempool::pages(&allocator, 16)?;
    /// let seen = Snapshot::of("mine", &allocator).with_pool("writes", pool.stats());
    /// let text = pagemill_watch::prometheus(&[seen]);
    /// assert!(text.contains("pagemill_pool_reserve{allocator=\"mine\",pool=\"writes\"} 16"));
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    #[must_use]
    pub fn with_pool(mut self, name: impl Into<String>, stats: MempoolStats) -> Self {
        self.pools.push((name.into(), stats));
        self
    }
    /// Adds a pool of blocks for a device, shown under this name, which is usually its own.
    ///
    /// ```
    /// use pagemill::{Allocator, Device, DmaPool, Gfp, Identity};
    /// use pagemill_watch::Snapshot;
    /// let allocator = Allocator::builder().pages(64).build()?;
    /// let pool = DmaPool::create("prp", &Device::new(&allocator, Identity)?, 256, 256, 0)?;
    /// let block = pool.alloc(Gfp::KERNEL)?;
    /// let seen = Snapshot::of("drive", &allocator).with_dma_pool(pool.name(), pool.stats());
    /// let text = pagemill_watch::prometheus(&[seen]);
    /// assert!(text.contains("pagemill_dma_pool_out{allocator=\"drive\",dma_pool=\"prp\"} 1"));
    /// # drop(block);
    /// # Ok::<(), pagemill::DeviceError>(())
    /// ```
    #[must_use]
    pub fn with_dma_pool(mut self, name: impl Into<String>, stats: DmaPoolStats) -> Self {
        self.dma_pools.push((name.into(), stats));
        self
    }
    /// The name that the allocator is shown by.
    pub fn name(&self) -> &str {
        &self.name
    }
}

/// All figures, in the order in which they are shown.
pub static FIGURES: LazyLock<Vec<Figure>> = LazyLock::new(|| {
    let counted = |counter: &'static Counter| Some((counter.figure?, counter.help, Read::Counter(counter)));
    let counters = Stats::COUNTERS.iter().filter_map(counted);
    let rows = FIRST.iter().copied().chain(counters).chain(LAST.iter().copied());
    rows.map(|(name, help, read)| Figure { name, help, kind: FigureKind::of(name), read }).collect()
});

/// Name, help, and the way to read it.
type Row = (&'static str, &'static str, Read);

/// The figures before the counters.
const FIRST: &[Row] = &[
    ("pagemill_info", "Always 1, labelled with the library's version and the list backend.", Labelled(info)),
    ("pagemill_cpus", "CPUs that have lists.", Of(|seen| seen.cpus)),
    ("pagemill_handed_out_pages", "Pages handed out now.", Of(handed_out)),
    ("pagemill_zone_managed_pages", "All pages of the zone.", PerZone(|zone| zone.managed)),
];

/// The figures after the counters.
const LAST: &[Row] = &[
    (
        "pagemill_zone_min_pages",
        "The min watermark: pages below it are reserves.",
        PerZone(|zone| zone.marks.min.into()),
    ),
    ("pagemill_zone_low_pages", "The low watermark: below it reclaim wakes.", PerZone(|zone| zone.marks.low.into())),
    ("pagemill_zone_high_pages", "The high watermark: reclaim runs up to it.", PerZone(|zone| zone.marks.high.into())),
    ("pagemill_free_blocks", "Free blocks by order; each counts at its largest order only.", Labelled(free_blocks)),
    ("pagemill_list_pages", "Pages on a CPU's list.", PerList(|list| list.pages)),
    ("pagemill_list_taken_pages_total", "Pages taken from a CPU's list.", PerList(|list| list.taken)),
    ("pagemill_list_returned_pages_total", "Pages given back to a CPU's list.", PerList(|list| list.returned)),
    ("pagemill_list_refilled_pages_total", "Pages that a list got from zone or depot.", PerList(|list| list.refilled)),
    ("pagemill_list_drained_pages_total", "Pages that a list gave to zone or depot.", PerList(|list| list.drained)),
    (
        "pagemill_bulk_allocations_total",
        "Bulk allocations by the number of blocks delivered; a page is one block.",
        Labelled(bulk_alloc),
    ),
    (
        "pagemill_bulk_frees_total",
        "Bulk frees by the number of blocks returned; a page is one block.",
        Labelled(bulk_free),
    ),
    ("pagemill_shortfalls_total", "Requests that got too few pages or blocks, by reason.", Labelled(shortfalls)),
    ("pagemill_pool_size", "Elements of the pool's reserve when it is full.", PerPool(|pool| pool.min_nr as u64)),
    ("pagemill_pool_reserve", "Elements in the reserve.", PerPool(|pool| pool.reserve as u64)),
    (
        "pagemill_pool_low_water",
        "The fewest elements that the reserve ever held.",
        PerPool(|pool| pool.low_water as u64),
    ),
    ("pagemill_pool_out", "Elements handed out.", PerPool(|pool| pool.out as u64)),
    ("pagemill_pool_waiting", "Requests that wait for elements.", PerPool(|pool| pool.waiting as u64)),
    ("pagemill_pool_longest_us", "The longest wait, in microseconds.", PerPool(|pool| pool.longest_wait_us)),
    ("pagemill_pool_from_reserve_total", "Elements taken from the reserve.", PerPool(|pool| pool.from_reserve)),
    ("pagemill_pool_waits_total", "Waits for elements that ended.", PerPool(|pool| pool.waits)),
    ("pagemill_pool_waited_us_total", "Microseconds of those waits.", PerPool(|pool| pool.waited_us)),
    (
        "pagemill_pool_misuse_total",
        "Elements that the pool refused when they were returned.",
        PerPool(|pool| pool.misused),
    ),
    ("pagemill_dma_pool_out", "Blocks handed out.", PerDmaPool(|pool| pool.in_use as u64)),
    ("pagemill_dma_pool_blocks", "All blocks of the pool.", PerDmaPool(|pool| pool.blocks as u64)),
    ("pagemill_dma_pool_block_bytes", "The size of a block in bytes.", PerDmaPool(|pool| pool.size as u64)),
    ("pagemill_dma_pool_pages", "Pages that the blocks lie in.", PerDmaPool(|pool| pool.pages as u64)),
    (
        "pagemill_dma_pool_metadata_bytes",
        "Bytes of the pool's tables and lists.",
        PerDmaPool(|pool| pool.metadata as u64),
    ),
    ("pagemill_dma_pool_misuse_total", "Blocks that the pool refused.", PerDmaPool(|pool| pool.misused)),
    (
        "pagemill_page_pool_fast_total",
        "Circulating pages that came from a consumer's cache.",
        PerPagePool(|pool| Some(pool.stats.fast)),
    ),
    (
        "pagemill_page_pool_slow_total",
        "Requests to a page pool that asked its source.",
        PerPagePool(|pool| Some(pool.stats.slow)),
    ),
    (
        "pagemill_page_pool_slow_high_order_total",
        "Those of them that were for blocks of an order above 0.",
        PerPagePool(|pool| Some(pool.stats.slow_high_order)),
    ),
    (
        "pagemill_page_pool_empty_total",
        "Requests that found a page pool's cache and ring empty.",
        PerPagePool(|pool| Some(pool.stats.empty)),
    ),
    (
        "pagemill_page_pool_refill_total",
        "Requests that filled a page pool's cache from its ring.",
        PerPagePool(|pool| Some(pool.stats.refill)),
    ),
    (
        "pagemill_page_pool_waive_total",
        "Pages of a page pool's ring that went back to the source, being of another node.",
        PerPagePool(|pool| Some(pool.stats.waive)),
    ),
    (
        "pagemill_page_pool_cached_total",
        "Pages that a consumer put into its cache.",
        PerPagePool(|pool| Some(pool.stats.cached)),
    ),
    (
        "pagemill_page_pool_cache_full_total",
        "Pages that a consumer returned while its cache was full.",
        PerPagePool(|pool| Some(pool.stats.cache_full)),
    ),
    (
        "pagemill_page_pool_ring_total",
        "Pages that were put into a page pool's ring.",
        PerPagePool(|pool| Some(pool.stats.ring)),
    ),
    (
        "pagemill_page_pool_ring_full_total",
        "Pages that found a page pool's ring full, and went back to the source.",
        PerPagePool(|pool| Some(pool.stats.ring_full)),
    ),
    (
        "pagemill_page_pool_released_refcnt_total",
        "Pages that a consumer was done with while somebody held a fragment.",
        PerPagePool(|pool| Some(pool.stats.released_refcnt)),
    ),
    (
        "pagemill_page_pool_in_flight",
        "Pages of a page pool that are out now, also after its end.",
        PerPagePool(|pool| Some(pool.stats.in_flight as u64)),
    ),
    (
        "pagemill_page_pool_ended_s",
        "Seconds since the end of a page pool of which pages are still out.",
        PerPagePool(|pool| pool.ended.map(|age| age.as_secs())),
    ),
    (
        "pagemill_page_cache_hits_total",
        "Pages that readers and writers found in a page cache.",
        PerPageCache(|cache| cache.stats.hits),
    ),
    (
        "pagemill_page_cache_misses_total",
        "Pages that they did not find, and had to wait for.",
        PerPageCache(|cache| cache.stats.misses),
    ),
    (
        "pagemill_page_cache_read_pages_total",
        "Pages that a page cache read from what is below it.",
        PerPageCache(|cache| cache.stats.read),
    ),
    (
        "pagemill_page_cache_read_ahead_pages_total",
        "Those of them that no request had asked for.",
        PerPageCache(|cache| cache.stats.read_ahead),
    ),
    (
        "pagemill_page_cache_ahead_unused_pages_total",
        "Pages read ahead that were evicted before anybody asked for them.",
        PerPageCache(|cache| cache.stats.ahead_unused),
    ),
    (
        "pagemill_page_cache_windows_total",
        "Windows of readahead that had a hole.",
        PerPageCache(|cache| cache.stats.windows),
    ),
    (
        "pagemill_page_cache_windows_marked_total",
        "Those of them that a reader began at the marker, without waiting.",
        PerPageCache(|cache| cache.stats.windows_marked),
    ),
    (
        "pagemill_page_cache_windows_shortened_total",
        "Windows that were shortened because there was no memory.",
        PerPageCache(|cache| cache.stats.windows_shortened),
    ),
    (
        "pagemill_page_cache_reads_total",
        "Reads of what is below a page cache, one for each run of neighbouring holes.",
        PerPageCache(|cache| cache.stats.reads),
    ),
    (
        "pagemill_page_cache_reads_failed_total",
        "Those of them that failed.",
        PerPageCache(|cache| cache.stats.reads_failed),
    ),
    (
        "pagemill_page_cache_written_pages_total",
        "Pages that a page cache wrote back.",
        PerPageCache(|cache| cache.stats.written),
    ),
    (
        "pagemill_page_cache_writes_total",
        "Writes to what is below a page cache.",
        PerPageCache(|cache| cache.stats.writes),
    ),
    (
        "pagemill_page_cache_writes_failed_total",
        "Those of them that failed.",
        PerPageCache(|cache| cache.stats.writes_failed),
    ),
    (
        "pagemill_page_cache_copied_pages_total",
        "Pages replaced by a copy, since somebody read the old one as it was written to.",
        PerPageCache(|cache| cache.stats.copied),
    ),
    ("pagemill_page_cache_evicted_pages_total", "Pages that were evicted.", PerPageCache(|cache| cache.stats.evicted)),
    (
        "pagemill_page_cache_shrinks_total",
        "Requests for memory that a reclaim of the allocator made of a page cache.",
        PerPageCache(|cache| cache.stats.shrinks),
    ),
    ("pagemill_page_cache_lent_pages_total", "Pages that were lent.", PerPageCache(|cache| cache.stats.lent)),
    (
        "pagemill_page_cache_pages",
        "Pages that a page cache has now, lent ones included.",
        PerPageCache(|cache| cache.stats.pages),
    ),
    (
        "pagemill_page_cache_dirty_pages",
        "Those of them that are to be written.",
        PerPageCache(|cache| cache.stats.dirty),
    ),
    ("pagemill_page_cache_limit_pages", "Pages that a page cache may have.", PerPageCache(|cache| cache.stats.limit)),
    (
        "pagemill_page_cache_metadata_bytes",
        "Bytes of a page cache's descriptors and indexes.",
        PerPageCache(|cache| cache.stats.metadata),
    ),
    ("pagemill_foreign_frees_total", "Frees of addresses that belong to no allocator.", Process(foreign_frees)),
    ("pagemill_section_restarts_total", "Restarts of restartable sections.", Process(restarts)),
];

fn info(_: &Snapshot, samples: &mut Samples<'_>) {
    let backend = samples.seen.backend.name();
    samples.push([("version", env!("CARGO_PKG_VERSION").into()), ("backend", backend.into())], 1);
}

/// Both counts wrap at 2^48, and a free between the two reads can make the difference negative.
fn handed_out(seen: &Snapshot) -> u64 {
    let out = (seen.stats.allocated.wrapping_sub(seen.stats.freed) << 16) as i64 >> 16;
    out.max(0) as u64
}

fn free_blocks(seen: &Snapshot, samples: &mut Samples<'_>) {
    for zone in &seen.zones {
        for order in (0..=Order::MAX.get()).flat_map(Order::new) {
            let [node, kind] = labels_of(zone);
            let blocks: usize = zone.buddy.iter().map(|arena| arena.free_blocks(order)).sum();
            samples.push([node, kind, ("order", order.get().to_string())], blocks as u64);
        }
    }
}

fn labels_of(zone: &ZoneInfo) -> [(&'static str, String); 2] {
    [("node", zone.node.get().to_string()), ("zone", zone.kind.name().into())]
}

fn bulk_alloc(seen: &Snapshot, samples: &mut Samples<'_>) {
    by_size(&seen.stats.bulk_alloc, samples);
}
fn bulk_free(seen: &Snapshot, samples: &mut Samples<'_>) {
    by_size(&seen.stats.bulk_free, samples);
}

/// Sizes that occurred, as `blocks="64-127"`.
fn by_size(calls: &[u64; 32], samples: &mut Samples<'_>) {
    for (i, &calls) in calls.iter().enumerate().filter(|(_, calls)| **calls > 0) {
        let (from, to) = (1u64 << i, (1u64 << (i + 1)) - 1);
        samples.push([("blocks", if from == to { from.to_string() } else { format!("{from}-{to}") })], calls);
    }
}

/// For each zone, including zeros: so a rate can be computed from the first event on.
fn shortfalls(seen: &Snapshot, samples: &mut Samples<'_>) {
    for zone in &seen.zones {
        for why in Why::ALL {
            let [node, kind] = labels_of(zone);
            samples.push([node, kind, ("reason", why.name().into())], zone.stats.shortfalls_by(why));
        }
    }
}

/// Collects a figure's samples for one allocator, and puts the allocator's name in front of the labels.
struct Samples<'s> {
    seen: &'s Snapshot,
    all: &'s mut Vec<Sample>,
}

impl Samples<'_> {
    fn push<const N: usize>(&mut self, labels: [(&'static str, String); N], value: u64) {
        let allocator = [("allocator", self.seen.name.clone())];
        self.all.push(Sample { labels: allocator.into_iter().chain(labels).collect(), value });
    }
    fn push_zones(&mut self, read: impl Fn(&ZoneInfo) -> u64) {
        self.seen.zones.iter().for_each(|zone| self.push(labels_of(zone), read(zone)));
    }
}

impl Figure {
    /// The figure's values for these allocators; those of the process, of its page pools and of its page caches whatever
    /// allocators these are.
    pub fn samples(&self, seen: &[Snapshot]) -> Vec<Sample> {
        let mut all = Vec::new();
        match self.read {
            Read::Process(read) => return vec![Sample { labels: Vec::new(), value: read() }],
            Read::PagePool(read) => {
                let sample = |pool: PagePoolInfo| {
                    let value = read(&pool)?;
                    Some(Sample { labels: vec![("page_pool", pool.name), ("id", pool.id.to_string())], value })
                };
                return page_pools().into_iter().filter_map(sample).collect();
            }
            Read::PageCache(read) => {
                let sample = |cache: PageCacheInfo| Sample {
                    value: read(&cache),
                    labels: vec![("page_cache", cache.name), ("id", cache.id.to_string())],
                };
                return page_caches().into_iter().map(sample).collect();
            }
            _ => {}
        }
        for seen in seen {
            let mut samples = Samples { seen, all: &mut all };
            match self.read {
                Read::Process(_) | Read::PagePool(_) | Read::PageCache(_) => {}
                Read::Counter(counter) => match counter.by {
                    CountedBy::Allocator => samples.push([], counter.of(&seen.stats)),
                    CountedBy::Zone => samples.push_zones(|zone| counter.of(&zone.stats)),
                },
                Read::Allocator(read) => samples.push([], read(seen)),
                Read::Zone(read) => samples.push_zones(read),
                Read::List(read) => seen.zones.iter().for_each(|zone| {
                    // A large machine has many lists that were never used.
                    let is_used = |list: &&ListInfo| list.pages + list.taken + list.returned + list.refilled > 0;
                    for list in zone.lists.iter().filter(is_used) {
                        let [node, kind] = labels_of(zone);
                        let mobility = format!("{:?}", list.mobility).to_lowercase();
                        samples.push(
                            [node, kind, ("cpu", list.cpu.get().to_string()), ("mobility", mobility)],
                            read(list),
                        );
                    }
                }),
                Read::Pool(read) => seen.pools.iter().for_each(|(name, pool)| {
                    samples.push([("pool", name.clone())], read(pool));
                }),
                Read::DmaPool(read) => seen.dma_pools.iter().for_each(|(name, pool)| {
                    samples.push([("dma_pool", name.clone())], read(pool));
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
    use pagemill::NodeId;
    use std::collections::HashSet;

    #[test]
    fn names_follow_the_rules_and_help_is_a_sentence() {
        let mut names = HashSet::new();
        for figure in FIGURES.iter() {
            assert!(names.insert(figure.name), "{} appears twice", figure.name);
            assert!(figure.name.starts_with("pagemill_"), "{}", figure.name);
            assert!(figure.name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'), "{}", figure.name);
            assert_eq!(figure.kind == FigureKind::Counter, figure.name.ends_with("_total"), "{}", figure.name);
            assert!(figure.help.ends_with('.') && !figure.help.contains(['\n', '\\']), "{}", figure.help);
        }
    }

    #[test]
    fn samples_equal_the_allocators_counters() {
        use pagemill::{Bulk, Gfp, PageList, free_pages_bulk};
        let allocator = Allocator::builder().pages(2048).cpus(2, || 1).build().unwrap();
        let mut list = PageList::new();
        allocator.alloc_pages_bulk_list(Bulk::up_to(100), &mut list).unwrap();
        let mut array: [Option<pagemill::Page>; 10] = [const { None }; 10];
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
        let sizes: Vec<_> = all("pagemill_bulk_allocations_total").iter().map(|s| label(s, "blocks")).collect();
        assert_eq!(sizes, ["8-15", "64-127", "8-15", "64-127"]);
        drop(block);
    }

    #[test]
    fn shortfalls_are_shown_by_zone_and_reason() {
        use pagemill::{Account, Bulk, Memory, PageCount, PageList};
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
        assert_eq!(samples.len(), 2 * Why::COUNT, "including those that are 0");
        assert_eq!(allocator.stats().shortfalls(), 2);
    }
}
