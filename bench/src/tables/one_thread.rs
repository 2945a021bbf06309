//! `batch`, `burst` and `scatter`: one thread, on one processor.
//!
//! - `batch`: a batch of N pages out and back, as a whole; no clock inside.
//! - `burst`: N out, then N in. The total comes from a loop without a clock inside; the halves from another with one,
//!   less what the clock costs. A clock also stops the processor from overlapping the halves, and itself overlaps
//!   with them, so that below about 16 pages the halves may add up to more than the total, or to less.
//! - `scatter`: N out, then N in, in a random order that is made in between, untimed. Over 4 GiB the rows go one
//!   after another instead of taking turns, so that not all of them hold 4 GiB at once.

use std::time::Duration;

use crate::Error;
use crate::record::Record;
use crate::rows::{Need, Row, Site};
use crate::subject::{Flaw, Runner};
use crate::tables::{CellSamples, Run, Sample, enough, take_turns};

/// Batch sizes of `batch`: those of the published table.
pub(crate) const BATCH_SIZES: [usize; 9] = [1, 2, 3, 4, 8, 16, 32, 64, 128];

/// The largest of `burst`'s sizes, which are the powers of two up to it.
pub(crate) const BURST_MOST: usize = 16384;

/// Pages of `scatter` by default.
pub(crate) const SCATTER_PAGES: usize = 16384;

/// Pages of `scatter` over 4 GiB.
pub(crate) const SCATTER_WIDE_PAGES: usize = 1 << 20;

/// Rounds over 4 GiB, where one takes seconds for the slowest peers.
const WIDE_ROUNDS: usize = 3;

pub(crate) fn burst_sizes() -> Vec<usize> {
    (0..).map(|k| 1 << k).take_while(|&n| n <= BURST_MOST).collect()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Loop {
    Batch,
    Burst,
    Scatter,
    /// The halves alone, each with a clock.
    Halves,
}

impl Loop {
    fn round(self, runner: &mut dyn Runner, n: usize, reps: usize, ctx: &mut Ctx) -> Result<Sample, Flaw> {
        let whole = |elapsed: Duration| elapsed.as_nanos() as f64 / (n * reps) as f64;
        Ok(match self {
            Loop::Batch => Sample { alloc: None, free: None, total: whole(runner.batch(n, reps)?) },
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
    interleaved(run, "batch", Loop::Batch, &BATCH_SIZES)
}

pub(crate) fn burst(run: &mut Run) -> Result<Vec<Record>, Error> {
    let sizes = burst_sizes();
    interleaved(run, "burst", Loop::Burst, &sizes)
}

pub(crate) fn scatter(run: &mut Run) -> Result<Vec<Record>, Error> {
    interleaved(run, "scatter", Loop::Scatter, &[SCATTER_PAGES])
}

/// A row that takes part. The runner goes before what it was made from.
pub(super) struct Entrant<'a> {
    /// The table, or the part of it.
    bench: &'static str,
    row: &'a Row,
    pub(super) runner: Box<dyn Runner>,
    _site: Site,
}

impl<'a> Entrant<'a> {
    pub(super) fn open(run: &mut Run, bench: &'static str, row: &'a Row, pages: usize) -> Option<Entrant<'a>> {
        let site = run.open(row, Need { pages })?;
        let runner = site(pages);
        Some(Entrant { bench, row, runner, _site: site })
    }
}

fn interleaved(run: &mut Run, bench: &'static str, kind: Loop, sizes: &[usize]) -> Result<Vec<Record>, Error> {
    let most = sizes.iter().copied().max().unwrap_or(0);
    let rows = run.rows;
    let mut entrants: Vec<Entrant> = rows.iter().filter_map(|row| Entrant::open(run, bench, row, most)).collect();
    let mut records = Vec::new();
    for &n in sizes {
        run.progress.set_message(format!("{bench} {n}"));
        let mut present: Vec<&mut Entrant> = entrants.iter_mut().filter(|entrant| entrant.runner.supports(n)).collect();
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

/// One size for all rows: verify, warm, take turns, verify.
pub(super) fn cells(
    run: &Run,
    kind: Loop,
    n: usize,
    entrants: &mut [&mut Entrant],
    rounds: usize,
) -> Result<Vec<Record>, Error> {
    let mut ctx = Ctx { clock_ns: run.clock_ns, rng: fastrand::Rng::with_seed(run.seed) };
    let mut cells: Vec<CellSamples> =
        entrants.iter().map(|entrant| CellSamples::new(entrant.bench, entrant.row, n)).collect();
    let mut reps = Vec::new();
    for (entrant, cell) in entrants.iter_mut().zip(&mut cells) {
        cell.seed = (kind == Loop::Scatter).then_some(run.seed);
        entrant.runner.fit(n);
        entrant.runner.verify(n).map_err(|flaw| cell.flawed(flaw))?;
        let runner = entrant.runner.as_mut();
        let round = run.effort.round;
        reps.push(enough(round, |reps| runner.batch(n, reps)).map_err(|flaw| cell.flawed(flaw))?);
        kind.round(runner, n, 1, &mut ctx).map_err(|flaw| cell.flawed(flaw))?;
    }
    take_turns(run, rounds, &mut cells, &reps, |at, reps| kind.round(entrants[at].runner.as_mut(), n, reps, &mut ctx))?;
    for (entrant, cell) in entrants.iter_mut().zip(&cells) {
        entrant.runner.verify(n).map_err(|flaw| cell.flawed(flaw))?;
    }
    Ok(cells.into_iter().filter_map(CellSamples::record).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Machine;
    use crate::rows::{Kind, catalogue};
    use crate::tables::Effort;

    #[test]
    fn sizes_are_those_that_are_promised() {
        let all = burst_sizes();
        assert_eq!((all.len(), all[0], all[14]), (15, 1, 16384));
        assert!(all.windows(2).all(|pair| pair[1] == 2 * pair[0]));
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

        let burst = interleaved(&mut run, "burst", Loop::Burst, &[1, 64]).unwrap();
        assert_eq!(burst.len(), rows.len() * 2);
        assert!(burst.iter().all(|record| record.alloc.is_some() && record.free.is_some()));

        let scatter = interleaved(&mut run, "scatter", Loop::Scatter, &[64]).unwrap();
        assert!(scatter.iter().all(|record| record.seed == Some(3)));
        assert!(run.absent.is_empty(), "{:?}", run.absent);
    }
}
