//! The bars: the limits that Pagemill sets itself, judged from the figures of this run alone.
//!
//! Bars are for the restartable backend, except those that say `portable`. Where a table has several list orders, a bar
//! is for lists in random order, and the figure for a list in order stands below it, as the best case. A bar is absent
//! when its tables or rows were not run. Two rows are compared turn by turn, and the bar holds for the median of the
//! ratios: what slows the machine for a while slows both rows.
//!
//! Bars in nanoseconds are for the processor that they were set on. On another processor they are scaled by the time
//! that `rte-mempool` takes for one page in the same run, if it is in this build ([`pace`]).

pub(crate) use pagemill_harness::bars::Bar;
use pagemill_harness::bars::Limit::{self, AtLeast, AtMost};
use pagemill_harness::bars::{Turns, bar, difference, each, least, median, outs, ratio, speed, totals, worst};

use crate::record::Record;
use crate::rows::Kind;
use crate::rows::mixed::REQUESTS;
use crate::subject::{HAND_OVER_PAGES, ListOrder};
use crate::tables::dma::{SELF_TEST, SHAPES};
use crate::tables::readahead::cold::{COLD, PATTERNS};
use crate::tables::readahead::hits::{HITS, SCAN};
use crate::tables::readahead::warm::{PARTS, SMALL};
use crate::tables::readahead::{CACHE, DIRECT};
use crate::tables::touch::TOUCH_PAGES;
use crate::tables::{orders, total};

/// Nanoseconds that `rte-mempool` takes for one page on the processor of the bars, an EPYC at 3.7 GHz.
const REFERENCE_NS: f64 = 5.2;

/// The line below a bar: the same figure with a list in ascending order.
const BEST_CASE: &str = "  in order, the best case";

/// The records of this run, to be looked up.
struct Figures<'a>(&'a [Record]);

impl Figures<'_> {
    /// A row of Pagemill's on the restartable backend, its list in random order.
    fn ours(&self, bench: &str, name: &str, n: usize) -> Option<Turns> {
        self.in_order(bench, name, n, ListOrder::Random)
    }

    fn in_order(&self, bench: &str, name: &str, n: usize, order: ListOrder) -> Option<Turns> {
        totals(self.record(bench, name, "rseq", n, order)?)
    }

    fn other(&self, bench: &str, name: &str, n: usize) -> Option<Turns> {
        self.find(bench, name, "-", n)
    }

    fn find(&self, bench: &str, name: &str, backend: &str, n: usize) -> Option<Turns> {
        totals(self.record(bench, name, backend, n, ListOrder::Random)?)
    }

    fn record(&self, bench: &str, name: &str, backend: &str, n: usize, order: ListOrder) -> Option<&Record> {
        let at = |record: &&Record| {
            let is_order = record.order.is_none_or(|its| its == order);
            is_order && (record.bench, record.name, record.backend, record.n) == (bench, name, backend, n)
        };
        self.0.iter().find(at)
    }

    /// Nanoseconds that a call of the array form takes, allocating and freeing, beyond `ns_a_page` for each page: the
    /// worst over the sizes from 2 to 16 and all orders.
    fn call(&self, ns_a_page: f64) -> Option<f64> {
        let each = |n: usize| ListOrder::ALL.map(|order| (n, order));
        let beyond = |(n, order)| {
            let total = median(self.in_order("batch", "pagemill-array", n, order))?;
            Some((total - ns_a_page) * n as f64)
        };
        worst([2, 4, 8, 16].into_iter().flat_map(each).map(beyond))
    }

    /// The share of its speed that a row keeps when both processors work.
    fn scaling(&self, name: &str, backend: &str, n: usize) -> Option<Turns> {
        let of = |bench| self.find(bench, name, backend, n);
        each(of("threads-own-1"), of("threads-own-2"), |one, two| one / two)
    }

    /// Allocating alone, of a row on the restartable backend.
    fn out(&self, bench: &str, name: &str, n: usize, order: ListOrder) -> Option<Turns> {
        outs(self.record(bench, name, "rseq", n, order)?)
    }

    /// `figure` of each size and order of `total`; `None` if one of them is missing.
    fn totals(&self, figure: impl Fn(usize, ListOrder) -> Option<f64>) -> Option<Vec<f64>> {
        let of_size = |n| total::ORDERS.map(|order| (n, order));
        total::sizes().into_iter().flat_map(of_size).map(|(n, order)| figure(n, order)).collect()
    }

    /// Time of a row of the table `dma` at each size; `None` if one of them is missing.
    fn blocks(&self, name: &str) -> Option<Vec<f64>> {
        SHAPES.iter().map(|shape| median(self.served_at(SELF_TEST, name, shape.bytes))).collect()
    }

    fn served_at(&self, bench: &str, name: &str, n: usize) -> Option<Turns> {
        let record = self.0.iter().find(|record| (record.bench, record.name, record.n) == (bench, name, n))?;
        Some(record.turns.iter().map(|turn| turn.total).collect())
    }

    /// Bytes that a block of the pool takes beyond its size, for the size where that is most.
    fn beyond_size(&self) -> Option<f64> {
        let of_pool = self.0.iter().filter(|r| (r.bench, r.name, r.kind) == (SELF_TEST, "dma-single", Kind::Ours));
        of_pool.filter_map(|record| Some(record.bytes_a_block? - record.n as f64)).max_by(f64::total_cmp)
    }

    fn least_ideal(&self) -> Option<f64> {
        let ours = self.0.iter().filter(|record| record.name == "pagemill-array" && record.backend == "rseq");
        ours.filter_map(|record| record.ideal_percent).min_by(f64::total_cmp)
    }
}

/// How much slower this processor is than the one that the bars were set on, if this run can tell.
fn pace(figures: &Figures) -> Option<f64> {
    median(figures.other("batch", "rte-mempool", 1)).map(|ns| ns / REFERENCE_NS)
}

/// All bars that these records allow to be judged; `of_paths` are those of tables that data paths bring.
pub(crate) fn judge(records: &[Record], of_paths: Vec<Bar>, bits_per_frame: Option<f64>) -> Vec<Bar> {
    let figures = Figures(records);
    let pace = pace(&figures);
    let ns = |limit: f64| Some(AtMost(limit * pace.unwrap_or(1.0)));
    let mut bars = vec![bar("ns in bars: times (rte-mempool / 5.2 ns)", pace, None, None)];
    bars.extend(one_call(&figures, ns));
    bars.extend(many_calls(&figures, ns));
    bars.extend(shapes(&figures, ns));
    bars.extend(threads(&figures, ns));
    bars.extend(memory(&figures));
    bars.extend(small_blocks(&figures));
    bars.extend(page_cache(&figures));
    bars.extend(of_paths.into_iter().map(Some));
    bars.push(bar("free/used state: bits a frame", bits_per_frame, Some(AtMost(2.0)), Some(AtMost(1.3))));
    bars.into_iter().flatten().collect()
}

/// The table `batch`.
fn one_call(figures: &Figures, ns: impl Fn(f64) -> Option<Limit>) -> Vec<Option<Bar>> {
    let single = |n| figures.ours("batch", "pagemill-single", n);
    let array = |n| figures.ours("batch", "pagemill-array", n);
    let pool = |n| figures.other("batch", "rte-mempool", n);
    let portable = |name, n| median(figures.find("batch", name, "portable", n));
    let random = |name, n| median(figures.ours("batch", name, n));
    let best = |name, n| figures.in_order("batch", name, n, ListOrder::InOrder);
    let gain = |order| {
        let of = |name| figures.in_order("batch", name, 64, order);
        ratio(of("pagemill-single"), of("pagemill-array"))
    };
    let split = || figures.ours("batch", "pagemill-split", 64);
    vec![
        bar("1 page, single: ns", median(single(1)), ns(6.5), ns(5.6)),
        bar(BEST_CASE, median(best("pagemill-single", 1)), None, None),
        bar("1 page, single / rte-mempool", ratio(single(1), pool(1)), Some(AtMost(1.25)), Some(AtMost(1.1))),
        bar(
            "1 page, single / tls-vec",
            ratio(single(1), figures.other("batch", "tls-vec", 1)),
            Some(AtMost(1.5)),
            None,
        ),
        bar("1 page: array less single, ns", difference(array(1), single(1)), Some(AtMost(0.5)), None),
        bar("array, 2 to 16: ns a call less 1.2 a page", figures.call(1.2), ns(16.0), None),
        bar("array, 2 to 16: ns a call less 0.6 a page", figures.call(0.6), None, ns(14.0)),
        bar("64 pages, array: ns a page", median(array(64)), ns(1.0), ns(0.6)),
        bar(BEST_CASE, median(best("pagemill-array", 64)), ns(0.75), ns(0.45)),
        bar("64 pages, raw pointers: ns a page", random("pagemill-raw", 64), ns(1.8), None),
        bar(BEST_CASE, median(best("pagemill-raw", 64)), ns(1.0), None),
        bar("64 pages, list: ns a page", random("pagemill-list", 64), ns(2.2), ns(1.2)),
        bar(BEST_CASE, median(best("pagemill-list", 64)), None, None),
        bar("64 pages, callback: ns a page", random("pagemill-callback", 64), ns(1.8), ns(1.2)),
        bar(BEST_CASE, median(best("pagemill-callback", 64)), None, None),
        bar("64 pages, runs: ns a page", random("pagemill-runs", 64), ns(3.5), ns(1.2)),
        bar(BEST_CASE, median(best("pagemill-runs", 64)), None, None),
        bar("64 pages, array / rte-mempool", ratio(array(64), pool(64)), None, Some(AtMost(1.0))),
        bar(
            "64 pages, worst order: single / array",
            least(ListOrder::ALL.map(gain)),
            Some(AtLeast(3.0)),
            Some(AtLeast(5.0)),
        ),
        bar(
            "64 in order: array / order-6 block split",
            ratio(best("pagemill-array", 64), split()),
            Some(AtMost(2.0)),
            Some(AtMost(1.2)),
        ),
        bar(
            "64 in order: runs / order-6 block split",
            ratio(best("pagemill-runs", 64), split()),
            Some(AtMost(2.0)),
            Some(AtMost(1.2)),
        ),
        bar("portable, 1 page, single: ns", portable("pagemill-single", 1), ns(12.0), ns(9.0)),
        bar("portable, 64 pages, array: ns a page", portable("pagemill-array", 64), ns(2.5), ns(1.5)),
    ]
}

/// The tables `burst`, `scatter`, `total` and `churn`.
fn many_calls(figures: &Figures, ns: impl Fn(f64) -> Option<Limit>) -> Vec<Option<Bar>> {
    let burst = |order| median(figures.in_order("burst", "pagemill-array-64", 16384, order));
    let scatter = |n| median(figures.ours("scatter", "pagemill-array", n));
    let out = |bench, name, (n, order)| figures.out(bench, name, n, order);
    let gains = figures.totals(|n, order| {
        let at = (n, order);
        ratio(out("total-1", "pagemill-array", at), out("total-16", "pagemill-array", at))
    });
    let dearer = figures.totals(|n, order| {
        let at = (n, order);
        difference(out("total-1", "pagemill-array", at), out("total-1", "pagemill-single", at))
    });
    vec![
        bar("burst of 16384, 64 a call: ns a page", burst(ListOrder::Random), ns(6.0), ns(3.0)),
        bar(BEST_CASE, burst(ListOrder::InOrder), ns(2.0), ns(0.9)),
        bar("scatter 16384, array: ns a page", scatter(16384), ns(10.0), ns(5.0)),
        bar("scatter 4 GiB, array: ns (LLFree*: 31)", scatter(1 << 20), Some(AtMost(31.0)), Some(AtMost(15.5))),
        bar(
            "churn, worse start, array: % of the ideal",
            figures.least_ideal(),
            Some(AtLeast(94.0)),
            Some(AtLeast(97.0)),
        ),
        bar(
            "total, any order, least: 1 a call / 16",
            gains.and_then(|gains| least(gains.into_iter().map(Some))),
            Some(AtLeast(1.3)),
            None,
        ),
        bar(
            "total, most: array of 1 less single, ns",
            dearer.and_then(|dearer| worst(dearer.into_iter().map(Some))),
            Some(AtMost(0.5)),
            None,
        ),
    ]
}

/// The tables `holes` and `orders`.
fn shapes(figures: &Figures, ns: impl Fn(f64) -> Option<Limit>) -> Vec<Option<Bar>> {
    let slots = |n| median(figures.out("holes-random", "pagemill-array", n, ListOrder::Random));
    let freed = |n| {
        let record = figures.record("holes-random", "pagemill-array", "rseq", n, ListOrder::Random)?;
        median(record.turns.iter().map(|turn| turn.free).collect())
    };
    let blocks = |bench| worst(orders::WORN_ORDERS.map(|order| median(figures.ours(bench, "pagemill-array", order))));
    vec![
        bar("holes in 64 slots, filling: ns a page", slots(64), ns(2.0), ns(1.2)),
        bar("holes in 256 slots, filling: ns a page", slots(256), ns(4.0), ns(2.0)),
        bar("holes in 1024 slots, filling: ns a page", slots(1024), ns(6.0), ns(4.0)),
        bar("holes, bulk free, worst: ns a page", worst([64, 256, 1024].map(freed)), ns(1.5), ns(1.1)),
        bar("orders 1 to 6, 64 a call, worn: ns a block", blocks(orders::WORN), ns(15.0), ns(6.0)),
        bar("  pageblocks whole, the best case", blocks(orders::MANY), ns(15.0), ns(6.0)),
    ]
}

/// The tables `threads` and `mixed`.
fn threads(figures: &Figures, ns: impl Fn(f64) -> Option<Limit>) -> Vec<Option<Bar>> {
    let scaling = |name, n| ratio(figures.scaling(name, "rseq", n), figures.scaling("tls-vec", "-", n));
    let mixed = |peer| {
        let ours = figures.ours("mixed", "pagemill-array", REQUESTS);
        speed(ours, figures.other("mixed", peer, REQUESTS))
    };
    let crossed = || figures.ours("threads-hand-over", "pagemill-array", HAND_OVER_PAGES);
    let pool = figures.other("threads-hand-over", "mutex-vec", HAND_OVER_PAGES);
    vec![
        bar(
            "own pages, 1: scaling / tls-vec's",
            scaling("pagemill-single", 1),
            Some(AtLeast(0.95)),
            Some(AtLeast(0.99)),
        ),
        bar(
            "own pages, 64: scaling / tls-vec's",
            scaling("pagemill-array", 64),
            Some(AtLeast(0.95)),
            Some(AtLeast(0.99)),
        ),
        bar("hand-over, array: ns a page", median(crossed()), ns(4.0), ns(3.0)),
        bar("hand-over, array / mutex-vec", ratio(crossed(), pool), Some(AtMost(1.0)), None),
        bar("mixed, array: throughput / mimalloc", mixed("mimalloc"), Some(AtLeast(2.0)), Some(AtLeast(3.0))),
        bar("mixed, array: throughput / mutex-vec", mixed("mutex-vec"), Some(AtLeast(2.0)), Some(AtLeast(3.0))),
    ]
}

/// The table `touch`.
fn memory(figures: &Figures) -> Vec<Option<Bar>> {
    let written = |bench| figures.out(bench, "pagemill-array", TOUCH_PAGES, ListOrder::Random);
    let touched = || written("touch-4k");
    let (small, large) = (written("touch-4k-populated"), || written("touch-2m-populated"));
    let one_call = figures.record("touch-2m-populated", "mmap", "-", TOUCH_PAGES, ListOrder::Random).and_then(outs);
    vec![
        bar("touch: populated / one by one", ratio(small, touched()), Some(AtMost(0.6)), None),
        bar("touch: 2 MiB, populated / one by one", ratio(large(), touched()), Some(AtMost(0.2)), None),
        bar("touch: 2 MiB, populated / populate call", ratio(large(), one_call), None, Some(AtMost(1.1))),
    ]
}

/// The table `dma`.
fn small_blocks(figures: &Figures) -> Vec<Option<Bar>> {
    let worst_of = |sizes: &Option<Vec<f64>>| worst(sizes.clone()?.into_iter().map(Some));
    let (pair, in_bulk) = (figures.blocks("dma-single"), figures.blocks("dma-bulk"));
    let flat = |sizes: &Option<Vec<f64>>| Some(worst_of(sizes)? / least(sizes.clone()?.into_iter().map(Some))?);
    vec![
        bar("dma_pool, worst size: ns a pair", worst_of(&pair), Some(AtMost(5.0)), None),
        bar("dma_pool, largest / smallest size", flat(&pair), Some(AtMost(1.5)), None),
        bar("dma_pool, 64 a call, worst size: ns", worst_of(&in_bulk), Some(AtMost(1.0)), None),
        bar("dma_pool: bytes a block beyond its size", figures.beyond_size(), Some(AtMost(8.0)), None),
    ]
}

/// The table `readahead`.
fn page_cache(figures: &Figures) -> Vec<Option<Bar>> {
    let of = |bench: &str, name: &str, is_small: Option<bool>| {
        let is_size = |n: usize| is_small.is_none_or(|is_small| (n == SMALL) == is_small);
        figures.0.iter().find(|r| (r.bench, r.name) == (bench, name) && is_size(r.n)).and_then(totals)
    };
    let beside = |ours, direct: &[&str]| {
        let there = direct.iter().filter_map(|name| of(COLD, name, None));
        least(there.map(|direct| speed(of(COLD, ours, None), Some(direct))))
    };
    let warm = |at: usize, is_small| {
        let of = |name| of(PARTS[at].one, name, Some(is_small));
        speed(of(CACHE), of("read"))
    };
    let random = figures.0.iter().find(|r| (r.bench, r.name) == (PATTERNS[1].0, CACHE)).and_then(|r| r.fetched);
    let ours = figures.0.iter().filter(|r| r.name == CACHE && r.bench.starts_with(HITS));
    let behind = ours.filter_map(|ours| {
        let all = figures.0.iter().filter(|r| (r.bench, r.n) == (ours.bench, ours.n) && r.kind == Kind::Peer);
        Some(all.filter_map(|r| r.hit_percent).max_by(f64::total_cmp)? - ours.hit_percent?)
    });
    let scan = figures.0.iter().filter(|r| (r.bench, r.name) == (SCAN, CACHE)).filter_map(|r| r.hit_percent);
    vec![
        bar("cold sequence: speed / O_DIRECT by 1 MiB", beside(CACHE, &DIRECT), Some(AtLeast(0.9)), None),
        bar("  the same, both in 4 KiB pages", beside("cache-4k", &DIRECT[..2]), Some(AtLeast(0.9)), None),
        bar("warm sequence, large: speed / read(2)", warm(0, false), Some(AtLeast(1.0)), None),
        bar("warm sequence, 500 pages: speed / read(2)", warm(0, true), Some(AtLeast(1.0)), None),
        bar("warm random, large: speed / read(2)", warm(1, false), Some(AtLeast(2.0)), None),
        bar("warm random, 500 pages: speed / read(2)", warm(1, true), Some(AtLeast(2.0)), None),
        bar("random, cold: pages read / asked for", random, Some(AtMost(1.0)), None),
        bar("hit rate, worst trace: points behind best", behind.max_by(f64::total_cmp), Some(AtMost(2.0)), None),
        bar("hot set left after a scan of 10 caches, %", scan.min_by(f64::total_cmp), None, None),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::example as record;
    use crate::rows::Kind;
    use crate::tables::Sample;

    fn find<'a>(bars: &'a [Bar], what: &str) -> Option<&'a Bar> {
        bars.iter().find(|bar| bar.what.starts_with(what))
    }

    #[test]
    fn a_bar_is_judged_from_the_run_and_absent_without_its_figures() {
        let mut records = vec![
            record("batch", "pagemill-single", Kind::Ours, 1, 6.0),
            record("batch", "pagemill-single", Kind::Ours, 64, 4.0),
            record("batch", "pagemill-array", Kind::Ours, 64, 1.0),
            record("batch", "tls-vec", Kind::Floor, 1, 3.0),
        ];
        records[2].order = Some(ListOrder::Random);
        let mut best = record("batch", "pagemill-array", Kind::Ours, 64, 0.5);
        best.order = Some(ListOrder::InOrder);
        records.insert(0, best);
        let mut slow = record("batch", "pagemill-array", Kind::Ours, 64, 100.0);
        slow.backend = "portable";
        records.insert(0, slow);

        let bars = judge(&records, Vec::new(), Some(1.27));
        let ratio = find(&bars, "1 page, single / tls-vec").unwrap();
        assert_eq!((ratio.figure, ratio.bar.unwrap().holds(ratio.figure)), (2.0, false));
        assert_eq!(find(&bars, "64 pages, array: ns").unwrap().figure, 1.0, "the portable row is not judged");
        let at = bars.iter().position(|bar| bar.what.starts_with("64 pages, array: ns")).unwrap();
        assert_eq!((bars[at + 1].what, bars[at + 1].figure), (BEST_CASE, 0.5), "and the list in order below it");
        assert!(find(&bars, "1 page, single / rte-mempool").is_none());
        assert!(find(&bars, "churn").is_none());

        let mut out = Vec::new();
        pagemill_harness::bars::write(&mut out, &bars).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains("MISSED") && text.contains("met"), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    }

    #[test]
    fn an_array_is_judged_by_its_worst_order_and_not_without_all_of_them() {
        let mut records = Vec::new();
        for (order, ns) in ListOrder::ALL.into_iter().zip([4.0, 6.0, 2.0]) {
            let sizes = [2, 4, 8, 16].map(|n| record("batch", "pagemill-array", Kind::Ours, n, ns));
            records.extend(sizes.map(|record| Record { order: Some(order), ..record }));
        }
        let bars = judge(&records, Vec::new(), None);
        let call = find(&bars, "array, 2 to 16: ns a call less 1.2").unwrap();
        assert!((call.figure - 16.0 * (6.0 - 1.2)).abs() < 1e-9, "{}", call.figure);
        records.retain(|record| record.order != Some(ListOrder::InOrder));
        assert!(find(&judge(&records, Vec::new(), None), "array, 2 to 16").is_none());
    }

    #[test]
    fn holes_are_judged_by_random_places_and_blocks_by_the_worst_order() {
        let mut records = Vec::new();
        for (slots, ns) in [(64, 2.0), (256, 3.0), (1024, 7.0)] {
            let mut random = record("holes-random", "pagemill-array", Kind::Ours, slots, 2.0 * ns);
            random.turns[0] = Sample { alloc: Some(ns), free: Some(ns / 4.0), total: 1.25 * ns };
            let first = Record { bench: "holes-first", ..random.clone() };
            records.extend([Record { turns: vec![Sample { alloc: Some(0.0), ..first.turns[0] }], ..first }, random]);
        }
        records.extend((1..=6).map(|n| record(orders::WORN, "pagemill-array", Kind::Ours, n, 10.0 + n as f64)));
        let judged = |records: &[Record], what| find(&judge(records, Vec::new(), None), what).map(|bar| bar.figure);
        assert_eq!(judged(&records, "holes in 1024 slots, filling"), Some(7.0));
        assert_eq!(judged(&records, "holes, bulk free"), Some(1.75));
        assert_eq!(judged(&records, "orders 1 to 6"), Some(16.0));
        records.pop();
        assert_eq!(judged(&records, "orders 1 to 6"), None, "not without every order");
    }

    #[test]
    fn a_mixed_program_is_judged_by_its_throughput() {
        let mut records = vec![
            record("mixed", "pagemill-array", Kind::Ours, REQUESTS, 4.0),
            record("mixed", "mutex-vec", Kind::Peer, REQUESTS, 10.0),
        ];
        let judged = |records: &[Record], what| find(&judge(records, Vec::new(), None), what).map(|bar| bar.figure);
        assert_eq!(judged(&records, "mixed, array: throughput / mutex-vec"), Some(2.5));
        assert_eq!(judged(&records, "mixed, array: throughput / mimalloc"), None);
        records.remove(0);
        assert_eq!(judged(&records, "mixed"), None);
    }

    #[test]
    fn nanoseconds_are_scaled_by_the_pool_of_the_same_run() {
        let ours = || record("batch", "pagemill-single", Kind::Ours, 1, 8.0);
        let limit = |records: &[Record]| find(&judge(records, Vec::new(), None), "1 page, single: ns").unwrap().bar;
        assert_eq!(limit(&[ours()]), Some(AtMost(6.5)));
        let pool = record("batch", "rte-mempool", Kind::Peer, 1, 2.0 * REFERENCE_NS);
        assert_eq!(limit(&[ours(), pool]), Some(AtMost(13.0)));
    }

    #[test]
    fn total_is_judged_by_its_worst_size_and_only_with_all_of_them() {
        let halves = |bench, name, n, out| {
            let mut record = record(bench, name, Kind::Ours, n, 100.0);
            record.turns[0].alloc = Some(out);
            record
        };
        let mut records = Vec::new();
        for n in total::sizes() {
            let is_worst = n == 1024;
            let first = records.len();
            records.push(halves("total-1", "pagemill-single", n, 4.0));
            records.push(halves("total-1", "pagemill-array", n, if is_worst { 5.0 } else { 4.25 }));
            records.push(halves("total-16", "pagemill-array", n, if is_worst { 4.0 } else { 1.0 }));
            let in_random = records[first..].to_vec();
            records[first..].iter_mut().for_each(|record| record.order = Some(ListOrder::InOrder));
            records.extend(in_random.into_iter().map(|r| Record { order: Some(ListOrder::Random), ..r }));
        }
        let bars = judge(&records, Vec::new(), None);
        let gain = find(&bars, "total, any order, least").unwrap();
        assert_eq!((gain.figure, gain.bar.unwrap().holds(gain.figure)), (1.25, false));
        let dearer = find(&bars, "total, most").unwrap();
        assert_eq!((dearer.figure, dearer.bar.unwrap().holds(dearer.figure)), (1.0, false));
        records.retain(|record| record.n != 64);
        assert!(find(&judge(&records, Vec::new(), None), "total").is_none());
    }

    #[test]
    fn touch_is_judged_by_what_was_written_and_not_by_putting_back() {
        let written = |bench, name, backend, out| {
            let mut record = record(bench, name, Kind::Ours, TOUCH_PAGES, 5000.0);
            (record.backend, record.turns[0].alloc) = (backend, Some(out));
            record
        };
        let records = [
            written("touch-4k", "pagemill-single", "rseq", 3000.0),
            written("touch-4k", "pagemill-array", "rseq", 1000.0),
            written("touch-4k-populated", "pagemill-array", "rseq", 500.0),
            written("touch-2m-populated", "pagemill-array", "rseq", 250.0),
            written("touch-2m-populated", "mmap", "-", 200.0),
        ];
        let bars = judge(&records, Vec::new(), None);
        let figure = |what| find(&bars, what).unwrap().figure;
        assert_eq!(figure("touch: populated / one by one"), 0.5);
        assert_eq!(figure("touch: 2 MiB, populated / one by one"), 0.25);
        assert_eq!(figure("touch: 2 MiB, populated / populate call"), 1.25);
    }

    #[test]
    fn a_page_cache_is_judged_beside_what_reads_files_and_by_its_worst_trace() {
        let of = |bench, name, n, ns| record(bench, name, if name == CACHE { Kind::Ours } else { Kind::Peer }, n, ns);
        let hits = |bench, name, percent| Record { hit_percent: Some(percent), ..of(bench, name, 100, 0.0) };
        let records = [
            of(COLD, CACHE, 1 << 15, 1000.0),
            of(COLD, DIRECT[0], 1 << 15, 1200.0),
            of(COLD, DIRECT[1], 1 << 15, 800.0),
            of(PARTS[1].one, CACHE, SMALL, 100.0),
            of(PARTS[1].one, "read", SMALL, 300.0),
            Record { fetched: Some(1.0), ..of(PATTERNS[1].0, CACHE, 2048, 1.0) },
            hits("readahead-hits a", CACHE, 50.0),
            hits("readahead-hits a", "LRU", 51.0),
            hits("readahead-hits a", "ARC", 10.0),
            hits("readahead-hits b", CACHE, 90.0),
            hits("readahead-hits b", "ARC", 10.0),
        ];
        let bars = judge(&records, Vec::new(), None);
        let figure = |what| find(&bars, what).map(|bar| bar.figure);
        assert_eq!(figure("cold sequence"), Some(0.8), "beside the faster one");
        assert_eq!(figure("warm random, 500 pages"), Some(3.0));
        assert_eq!(figure("warm random, large"), None);
        assert_eq!(figure("random, cold"), Some(1.0));
        assert_eq!(figure("hit rate, worst trace"), Some(1.0));
    }

    #[test]
    fn a_pool_is_judged_by_its_worst_size() {
        let row = |name, figures: [f64; 5]| {
            let at = |(shape, figure): (&crate::rows::dma::Shape, f64)| {
                record(SELF_TEST, name, Kind::Ours, shape.bytes, figure)
            };
            SHAPES.iter().zip(figures).map(at).collect::<Vec<_>>()
        };
        let mut records = row("dma-single", [4.0, 4.0, 4.5, 6.0, 4.0]);
        records.iter_mut().for_each(|record| record.bytes_a_block = Some(record.n as f64 + 5.5));
        records.extend(row("dma-bulk", [0.5, 0.5, 0.75, 0.5, 0.5]));
        let bars = judge(&records, Vec::new(), None);
        assert_eq!(find(&bars, "dma_pool, 64 a call").unwrap().figure, 0.75);
        assert_eq!(find(&bars, "dma_pool, worst size").unwrap().figure, 6.0);
        assert_eq!(find(&bars, "dma_pool, largest / smallest").unwrap().figure, 1.5);
        assert_eq!(find(&bars, "dma_pool: bytes").unwrap().figure, 5.5);
        records.retain(|record| (record.name, record.n) != ("dma-bulk", 64));
        assert!(find(&judge(&records, Vec::new(), None), "dma_pool, 64 a call").is_none(), "not without every size");
    }

    /// The machine is three times as slow in two of three turns, and the rows' medians fall into different turns.
    #[test]
    fn rows_are_compared_turn_by_turn() {
        let turns = |name, kind, totals: [f64; 3]| {
            let mut record = record("batch", name, kind, 1, 1.0);
            record.turns = totals.map(Sample::whole).to_vec();
            record.total = crate::stats::Spread::of(&totals).unwrap();
            record
        };
        let records = [
            turns("pagemill-single", Kind::Ours, [6.0, 18.0, 18.0]),
            turns("pagemill-array", Kind::Ours, [6.5, 18.5, 6.5]),
            turns("tls-vec", Kind::Floor, [3.0, 9.0, 3.0]),
        ];
        let bars = judge(&records, Vec::new(), None);
        assert_eq!(find(&bars, "1 page, single / tls-vec").unwrap().figure, 2.0, "the medians alone say 6");
        assert_eq!(find(&bars, "1 page: array less single").unwrap().figure, 0.5, "the medians alone say -11.5");
    }

    #[test]
    fn scaling_is_a_ratio_of_ratios() {
        let mut records = Vec::new();
        for (bench, ours, floor) in [("threads-own-1", 1.0, 0.5), ("threads-own-2", 1.25, 0.5)] {
            records.push(record(bench, "pagemill-array", Kind::Ours, 64, ours));
            records.push(record(bench, "tls-vec", Kind::Floor, 64, floor));
        }
        let bars = judge(&records, Vec::new(), None);
        assert_eq!(find(&bars, "own pages, 64").unwrap().figure, 0.8);
    }
}
