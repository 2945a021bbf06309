//! `batch`, `burst` and `scatter`: one thread, on one processor.
//!
//! - `batch`: allocates and frees N pages, timed as a whole, without a clock inside.
//! - `burst`: allocates N pages, then frees N. The total comes from a loop without a clock inside. The halves come from
//!   another loop with a clock, less the clock's cost. A clock stops the processor from overlapping the halves, and
//!   itself overlaps with them: below about 16 pages the halves may add up to more than the total, or to less.
//! - `scatter`: allocates N pages, shuffles them untimed, and frees them. Over 4 GiB the rows are measured one after
//!   another and take no turns, so that not all of them hold 4 GiB at once.
//!
//! The cost of a page from a CPU's list may depend on the order of that list. So each such row is in `batch` and
//! `burst` once for each order, with an allocator of its own. Before every round the list is brought into its order,
//! untimed. Up to [`LISTED_MOST`] pages the loops keep the order, since they free the pages that they allocated; that
//! is checked before and after a cell. More pages than that go through the zone, which puts them in order. For the
//! random order they are then shuffled, untimed, between the halves of every repetition. The order `fifo` is not
//! measured then, since it would be the same as `in-order`.

use std::time::Duration;

use crate::Error;
use crate::record::Record;
use crate::rows::{Kind, Need, Row, Site, burst_rows};
use crate::subject::{Arrange as _, Flaw, ListOrder, Runner};
use crate::tables::{CellSamples, Run, Sample, enough, take_turns};

/// Batch sizes of `batch`: those of the published table.
pub(crate) const BATCH_SIZES: [usize; 9] = [1, 2, 3, 4, 8, 16, 32, 64, 128];

/// Those of them that the first screen and its chart have.
const BRIEF_BATCH_SIZES: [usize; 4] = [1, 4, 16, 64];

/// The largest of `burst`'s sizes, which are the powers of two up to it.
pub(crate) const BURST_MOST: usize = 16384;

/// Pages that a CPU's list of any allocator keeps in the order in which they were freed.
pub(crate) const LISTED_MOST: usize = 128;

/// With fewer pages than this the orders can't be told apart.
const ORDERED_LEAST: usize = 16;

/// Pages of `scatter` by default.
pub(crate) const SCATTER_PAGES: usize = 16384;

/// The sizes of `scatter` in the chart of the first screen, which continue those of `batch`.
const BRIEF_SCATTER_SIZES: [usize; 4] = [256, 1024, 4096, SCATTER_PAGES];

/// Pages of `scatter` over 4 GiB.
pub(crate) const SCATTER_WIDE_PAGES: usize = 1 << 20;

/// Rounds over 4 GiB, where a round of the slowest peers takes seconds.
const WIDE_ROUNDS: usize = 3;

pub(crate) fn batch_sizes(is_brief: bool) -> &'static [usize] {
    if is_brief { &BRIEF_BATCH_SIZES } else { &BATCH_SIZES }
}

pub(crate) fn burst_sizes(is_brief: bool) -> Vec<usize> {
    let least = if is_brief { BURST_MOST } else { 1 };
    (0..).map(|k| 1 << k).skip_while(|&n| n < least).take_while(|&n| n <= BURST_MOST).collect()
}

pub(crate) fn scatter_sizes(is_brief: bool) -> &'static [usize] {
    if is_brief { &BRIEF_SCATTER_SIZES } else { &[SCATTER_PAGES] }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Loop {
    Batch,
    Burst,
    Scatter,
    /// Only the halves, each with a clock.
    Halves,
}

impl Loop {
    fn round(self, runner: &mut dyn Runner, n: usize, reps: usize, ctx: &mut Ctx) -> Result<Sample, Flaw> {
        let whole = |elapsed: Duration| elapsed.as_nanos() as f64 / (n * reps) as f64;
        Ok(match self {
            Loop::Batch => Sample::whole(whole(runner.batch(n, reps)?)),
            Loop::Burst => {
                let total = whole(runner.batch(n, reps)?);
                Sample { total, ..Sample::from_parts(runner.parts(n, reps)?, n, reps, ctx.clock_ns) }
            }
            Loop::Halves => Sample::from_parts(runner.parts(n, reps)?, n, reps, ctx.clock_ns),
            Loop::Scatter => Sample::from_parts(runner.scattered(n, reps, &mut ctx.rng)?, n, reps, ctx.clock_ns),
        })
    }
}

struct Ctx {
    clock_ns: f64,
    rng: fastrand::Rng,
}

pub(crate) fn batch(run: &mut Run) -> Result<Vec<Record>, Error> {
    let orders = if run.is_brief { &[ListOrder::Random][..] } else { &ListOrder::ALL };
    interleaved(run, "batch", Loop::Batch, batch_sizes(run.is_brief), &[], orders)
}

pub(crate) fn burst(run: &mut Run) -> Result<Vec<Record>, Error> {
    let is_array =
        |wanted: &Row| run.rows.iter().any(|row| (row.name, row.backend) == ("pagemill-array", wanted.backend));
    let more: Vec<Row> = burst_rows().into_iter().filter(|row| !run.is_brief && is_array(row)).collect();
    // The screen has the random order from `scatter`, in which every row frees its pages in random order.
    let orders = if run.is_brief { &[ListOrder::InOrder][..] } else { &ListOrder::ALL };
    interleaved(run, "burst", Loop::Burst, &burst_sizes(run.is_brief), &more, orders)
}

pub(crate) fn scatter(run: &mut Run) -> Result<Vec<Record>, Error> {
    interleaved(run, "scatter", Loop::Scatter, scatter_sizes(run.is_brief), &[], &[])
}

/// A row that takes part. The runner is dropped before its site.
pub(super) struct Entrant<'a> {
    /// The table, or the part of it.
    bench: &'static str,
    row: &'a Row,
    /// The order of its list, if the row has a list and the table several orders.
    order: Option<ListOrder>,
    pub(super) runner: Box<dyn Runner>,
    _site: Site,
}

impl<'a> Entrant<'a> {
    pub(super) fn open(run: &mut Run, bench: &'static str, row: &'a Row, pages: usize) -> Option<Entrant<'a>> {
        let site = run.open(row, Need { pages })?;
        let runner = site(pages);
        Some(Entrant { bench, row, order: None, runner, _site: site })
    }

    /// Opens a row once for each order, or once if its pages come from no list.
    pub(super) fn in_orders(
        run: &mut Run,
        bench: &'static str,
        row: &'a Row,
        pages: usize,
        orders: &[ListOrder],
    ) -> Vec<Entrant<'a>> {
        let Some(first) = Entrant::open(run, bench, row, pages) else { return Vec::new() };
        if orders.is_empty() || !first.runner.has_list() {
            return vec![first];
        }
        let mut next = Some(first);
        let mut of_order = |&order| {
            let entrant = next.take().or_else(|| Entrant::open(run, bench, row, pages))?;
            Some(Entrant { order: Some(order), ..entrant })
        };
        orders.iter().filter_map(&mut of_order).collect()
    }

    fn supports(&self, n: usize) -> bool {
        self.runner.supports(n) && (self.order != Some(ListOrder::Fifo) || n <= LISTED_MOST)
    }

    /// Checks the pages that it hands out, and their order if the loop keeps it.
    fn prove(&mut self, n: usize, rng: &mut fastrand::Rng) -> Result<(), Flaw> {
        let Some(order) = self.order else { return self.runner.verify(n) };
        self.runner.arrange(order, rng);
        self.runner.verify(n)?;
        if (ORDERED_LEAST..=LISTED_MOST).contains(&n) {
            order.check(&self.runner.handed_out(n)?)?;
            self.runner.batch(n, 3)?;
            order.check(&self.runner.handed_out(n)?)?;
        }
        Ok(())
    }

    fn round(&mut self, kind: Loop, n: usize, reps: usize, ctx: &mut Ctx) -> Result<Sample, Flaw> {
        if let Some(order) = self.order {
            self.runner.arrange(order, &mut ctx.rng);
        }
        let is_shuffled = self.order == Some(ListOrder::Random) && (n > LISTED_MOST || kind == Loop::Halves);
        let kind = if is_shuffled { Loop::Scatter } else { kind };
        kind.round(self.runner.as_mut(), n, reps, ctx)
    }
}

/// Measures the rows of this run and `more`, each in `orders` if its pages come from a list.
fn interleaved(
    run: &mut Run,
    bench: &'static str,
    kind: Loop,
    sizes: &[usize],
    more: &[Row],
    orders: &[ListOrder],
) -> Result<Vec<Record>, Error> {
    let most = sizes.iter().copied().max().unwrap_or(0);
    let mut rows: Vec<&Row> = run.rows.iter().chain(more).collect();
    rows.sort_by_key(|row| row.kind != Kind::Ours);
    let mut entrants: Vec<Entrant> =
        rows.into_iter().flat_map(|row| Entrant::in_orders(run, bench, row, most, orders)).collect();
    let mut records = Vec::new();
    for &n in sizes {
        run.progress.set_message(format!("{bench} {n}"));
        let mut present: Vec<&mut Entrant> = entrants.iter_mut().filter(|entrant| entrant.supports(n)).collect();
        records.extend(cells(run, kind, n, &mut present, run.effort.rounds)?);
        run.progress.inc(1);
    }
    Ok(records)
}

/// `scatter` over 4 GiB, one row after another.
pub(crate) fn scatter_wide(run: &mut Run) -> Result<Vec<Record>, Error> {
    let mut records = Vec::new();
    for row in run.rows {
        run.progress.set_message(format!("scatter 4 GiB: {} {}", row.name, row.backend));
        if let Some(mut entrant) = Entrant::open(run, "scatter", row, SCATTER_WIDE_PAGES)
            && entrant.runner.supports(SCATTER_WIDE_PAGES)
        {
            records.extend(cells(run, Loop::Scatter, SCATTER_WIDE_PAGES, &mut [&mut entrant], WIDE_ROUNDS)?);
        }
        run.progress.inc(1);
    }
    Ok(records)
}

/// Measures one size of all rows: verify, warm, take turns, verify.
pub(super) fn cells(
    run: &Run,
    kind: Loop,
    n: usize,
    entrants: &mut [&mut Entrant],
    rounds: usize,
) -> Result<Vec<Record>, Error> {
    let mut ctx = Ctx { clock_ns: run.clock_ns, rng: fastrand::Rng::with_seed(run.seed) };
    let mut cells: Vec<CellSamples> =
        entrants.iter().map(|entrant| CellSamples::new(entrant.bench, entrant.row.row_name(), n)).collect();
    let mut reps = Vec::new();
    for (entrant, cell) in entrants.iter_mut().zip(&mut cells) {
        cell.order = entrant.order;
        cell.seed = (kind == Loop::Scatter || entrant.order == Some(ListOrder::Random)).then_some(run.seed);
        entrant.runner.fit(n);
        entrant.prove(n, &mut ctx.rng).map_err(|flaw| cell.flawed(flaw))?;
        let (runner, round) = (entrant.runner.as_mut(), run.effort.round);
        reps.push(enough(round, |reps| runner.batch(n, reps)).map_err(|flaw| cell.flawed(flaw))?);
        entrant.round(kind, n, 1, &mut ctx).map_err(|flaw| cell.flawed(flaw))?;
    }
    take_turns(run, rounds, &mut cells, &reps, |at, reps| entrants[at].round(kind, n, reps, &mut ctx))?;
    for (entrant, cell) in entrants.iter_mut().zip(&cells) {
        entrant.prove(n, &mut ctx.rng).map_err(|flaw| cell.flawed(flaw))?;
    }
    Ok(cells.into_iter().filter_map(CellSamples::record).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::{Machine, pin_to};
    use crate::rows::catalogue;
    use crate::tables::Effort;

    #[test]
    fn the_published_tables_cover_the_sizes_that_are_measured() {
        let published = crate::published::Published::load().unwrap();
        let array = published.table("linux-array-2021").unwrap();
        let at = |n: usize| crate::published::Cell::Number(n as f64);
        assert!(BATCH_SIZES.iter().all(|&n| ["list", "array"].iter().all(|form| array.number(&at(n), form).is_some())));
        let bulk = published.table("linux-bulk-2017").unwrap();
        assert!(burst_sizes(false).iter().all(|&n| bulk.number(&at(n), "total bulk").is_some()));
        assert_eq!(bulk.number(&at(16384), "alloc bulk"), Some(89.0));
    }

    #[test]
    fn burst_sizes_are_the_powers_of_two_to_16384() {
        let all = burst_sizes(false);
        assert_eq!((all.len(), all[0], all[14]), (15, 1, 16384));
        assert!(all.windows(2).all(|pair| pair[1] == 2 * pair[0]));
        assert_eq!(burst_sizes(true), [16384]);
    }

    /// A thread that moved to another processor would use another list.
    fn stay() {
        pin_to(Machine::here().main_cpu()).unwrap();
    }

    #[test]
    fn arranged_lists_hand_out_pages_in_their_order() {
        stay();
        let mut rng = fastrand::Rng::with_seed(5);
        for row in catalogue().into_iter().filter(|row| row.kind == Kind::Ours) {
            let Ok(site) = (row.open)(Need { pages: 4096 }) else {
                println!("skipped {} {}", row.name, row.backend);
                continue;
            };
            let mut runner = site(4096);
            assert_eq!(runner.has_list(), row.name != "pagemill-split", "{}", row.name);
            for order in ListOrder::ALL.into_iter().cycle().take(6).filter(|_| runner.has_list()).collect::<Vec<_>>() {
                runner.arrange(order, &mut rng);
                let pages = runner.handed_out(LISTED_MOST).unwrap();
                order.check(&pages).unwrap_or_else(|flaw| panic!("{} {}: {flaw}", row.name, row.backend));
                let is_other = |other: &ListOrder| other.check(&pages).is_err();
                let others = ListOrder::ALL.iter().filter(|other| is_other(other)).count();
                assert_eq!(others, if order == ListOrder::Random { 2 } else { 1 }, "told from the others");
                if row.name == "pagemill-single" {
                    let ups = pages.windows(2).filter(|pair| pair[0] < pair[1]).count() * 100 / (LISTED_MOST - 1);
                    let wanted = match order {
                        ListOrder::Random => 25..=75,
                        ListOrder::Fifo => 75..=100,
                        ListOrder::InOrder => 0..=25,
                    };
                    // A list is a stack: in ascending order it hands out its last page first.
                    assert!(wanted.contains(&ups), "{order:?} {}: {ups} % of the pages go up", row.backend);
                }
            }
        }
    }

    #[test]
    fn a_row_with_a_list_has_a_record_for_each_order() {
        stay();
        let machine = Machine::unknown();
        let wanted = ["pagemill-array", "pagemill-split", "mutex-vec"];
        let rows: Vec<Row> = catalogue().into_iter().filter(|row| wanted.contains(&row.name)).collect();
        let rows: Vec<Row> = rows.into_iter().filter(|row| row.backend != "rseq").collect();
        let more: Vec<Row> = burst_rows().into_iter().filter(|row| row.backend != "rseq").collect();
        let mut run = Run::for_test(&machine, &rows, Effort { rounds: 2, round: Duration::from_micros(1) });
        let sizes = [64, 256];
        let records = interleaved(&mut run, "burst", Loop::Burst, &sizes, &more, &ListOrder::ALL).unwrap();
        let orders = |name: &str, n: usize| {
            let of_row = records.iter().filter(move |record| (record.name, record.n) == (name, n));
            of_row.map(|record| record.order.map(ListOrder::label)).collect::<Vec<_>>()
        };
        assert_eq!(orders("pagemill-array", 64), [Some("random"), Some("fifo"), Some("in-order")]);
        assert_eq!(orders("pagemill-array", 256), [Some("random"), Some("in-order")], "more than a list keeps");
        assert_eq!(orders("pagemill-array-64", 256), [Some("random"), Some("in-order")]);
        assert!(orders("pagemill-array-64", 64).is_empty(), "that is one call");
        assert_eq!((orders("pagemill-split", 64), orders("mutex-vec", 256)), (vec![None], vec![None]));
        let is_seeded = |record: &Record| record.seed.is_some() == (record.order == Some(ListOrder::Random));
        assert!(records.iter().all(is_seeded));
    }

    #[test]
    fn a_table_has_a_record_for_each_row_and_size() {
        let machine = Machine::unknown();
        let rows: Vec<Row> = catalogue().into_iter().filter(|row| row.kind == Kind::Floor).collect();
        let effort = Effort { rounds: 3, round: Duration::from_micros(1) };
        let mut run = Run::for_test(&machine, &rows, effort);
        let batch = batch(&mut run).unwrap();
        assert_eq!(batch.len(), rows.len() * BATCH_SIZES.len());
        assert!(batch.iter().all(|record| record.runs == 3 && record.alloc.is_none() && record.total.min > 0.0));

        let burst = interleaved(&mut run, "burst", Loop::Burst, &[1, 64], &[], &[]).unwrap();
        assert_eq!(burst.len(), rows.len() * 2);
        assert!(burst.iter().all(|record| record.alloc.is_some() && record.free.is_some()));

        let scatter = interleaved(&mut run, "scatter", Loop::Scatter, &[64], &[], &[]).unwrap();
        assert!(scatter.iter().all(|record| record.seed == Some(3)));
        assert!(run.absent.is_empty(), "{:?}", run.absent);
    }
}
