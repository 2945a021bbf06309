//! The tables, and what they share: which rows take part, how long a round is, and the interleaving of rounds.
//!
//! Every cell goes the same way: each row is verified; its repetitions are doubled until a round is long enough,
//! which warms it; then the rows take turns, one round each, beginning with another row every time, so that a
//! disturbance hits neighbours rather than one row; then each row is verified again. A round in which the system
//! stopped the measuring thread for another one is repeated, a few times at most, and counted if it stayed so.

pub(crate) mod churn;
pub(crate) mod crypt;
pub(crate) mod dma;
pub(crate) mod holes;
pub(crate) mod mempool;
pub(crate) mod mixed;
pub(crate) mod one_thread;
pub(crate) mod orders;
pub(crate) mod threads;
pub(crate) mod total;
pub(crate) mod touch;

use std::cell::Cell;
use std::path::Path;
use std::time::Duration;

use indicatif::ProgressBar;

use crate::Error;
use crate::machine::{Machine, preemptions};
use crate::record::Record;
use crate::rows::{Kind, Row, Unavailable};
use crate::stats::Spread;
use crate::subject::{Flaw, ListOrder, Parts};

/// How much measuring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Effort {
    pub(crate) rounds: usize,
    /// The least that a round of one row lasts.
    pub(crate) round: Duration,
}

impl Effort {
    pub(crate) const FULL: Effort = Effort { rounds: 11, round: Duration::from_millis(1) };
    pub(crate) const QUICK: Effort = Effort { rounds: 5, round: Duration::from_micros(200) };
}

/// How often a disturbed round is repeated.
const RETRIES: usize = 4;

/// The rounds of this run, and how many of them were disturbed to the last.
#[derive(Debug, Default)]
pub(crate) struct Rounds {
    pub(crate) all: Cell<usize>,
    pub(crate) disturbed: Cell<usize>,
    repeated: Cell<usize>,
}

impl Rounds {
    /// One round: `attempt`, which says whether it was disturbed, until it was not or patience ends.
    pub(crate) fn undisturbed<T, E>(&self, mut attempt: impl FnMut() -> Result<(T, bool), E>) -> Result<T, E> {
        self.all.set(self.all.get() + 1);
        for _ in 0..RETRIES {
            let (outcome, is_disturbed) = attempt()?;
            if !is_disturbed {
                return Ok(outcome);
            }
            // On a machine that is busy throughout, repeating may at most double the work.
            if self.repeated.get() >= self.all.get() {
                self.disturbed.set(self.disturbed.get() + 1);
                return Ok(outcome);
            }
            self.repeated.set(self.repeated.get() + 1);
        }
        let (outcome, is_disturbed) = attempt()?;
        self.disturbed.set(self.disturbed.get() + usize::from(is_disturbed));
        Ok(outcome)
    }
}

/// What every table needs to know of this run.
pub(crate) struct Run<'a> {
    pub(crate) machine: &'a Machine,
    /// The file of the program `pagemill`.
    pub(crate) program: &'a Path,
    pub(crate) effort: Effort,
    pub(crate) rows: &'a [Row],
    /// The backend that an allocator has here when nobody says which.
    pub(crate) backend: &'static str,
    /// What a pair of clock readings costs, in nanoseconds.
    pub(crate) clock_ns: f64,
    pub(crate) seed: u64,
    pub(crate) progress: ProgressBar,
    pub(crate) rounds: Rounds,
    /// Rows that could not take part, with the reason; printed below the table.
    pub(crate) absent: Vec<String>,
}

impl Run<'_> {
    /// A run that is shown to nobody.
    #[cfg(test)]
    pub(crate) fn for_test<'a>(machine: &'a Machine, rows: &'a [Row], effort: Effort) -> Run<'a> {
        Run {
            machine,
            program: Path::new("pagemill"),
            effort,
            rows,
            backend: "rseq",
            clock_ns: 0.0,
            seed: 3,
            progress: ProgressBar::hidden(),
            rounds: Rounds::default(),
            absent: Vec::new(),
        }
    }

    /// Notes that a row is missing from a table, and why.
    pub(crate) fn note_absent(&mut self, name: &str, backend: &str, reason: &Unavailable) {
        let note = if backend == "-" { format!("{name}: {reason}") } else { format!("{name} {backend}: {reason}") };
        if !self.absent.contains(&note) {
            self.absent.push(note);
        }
    }

    /// Was this row of Pagemill's asked for, in a table that shows one backend alone? It shows the default one, the
    /// other where that was left out.
    pub(crate) fn is_shown_once(&self, name: &str, backend: &str) -> bool {
        let ours = || self.rows.iter().filter(|row| row.kind == Kind::Ours);
        let has_default = ours().any(|row| row.backend == self.backend);
        let is_shown = !has_default || backend == self.backend;
        is_shown && ours().any(|row| (row.name, row.backend) == (name, backend))
    }

    /// Those of a table's own rows that were asked for.
    pub(crate) fn asked_for<N, O>(&self, rows: Vec<Row<N, O>>) -> Vec<Row<N, O>> {
        let is_asked_for =
            |row: &Row<N, O>| self.rows.iter().any(|known| (known.name, known.backend) == (row.name, row.backend));
        rows.into_iter().filter(is_asked_for).collect()
    }

    /// Opens a row, or notes why it is absent.
    pub(crate) fn open<N, O>(&mut self, row: &Row<N, O>, need: N) -> Option<O> {
        match (row.open)(need) {
            Ok(opened) => Some(opened),
            Err(reason) => {
                self.note_absent(row.name, row.backend, &reason);
                None
            }
        }
    }

    /// Opens all of these that can be.
    pub(crate) fn open_all<'r, N: Copy, O>(&mut self, rows: &'r [Row<N, O>], need: N) -> Vec<Entrant<'r, N, O>> {
        rows.iter().filter_map(|row| Some(Entrant { row, opened: self.open(row, need)? })).collect()
    }
}

/// A row that takes part in a table.
pub(crate) struct Entrant<'r, N, O> {
    pub(crate) row: &'r Row<N, O>,
    pub(crate) opened: O,
}

/// One round of one row, in nanoseconds a page.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Sample {
    pub(crate) alloc: Option<f64>,
    pub(crate) free: Option<f64>,
    pub(crate) total: f64,
}

impl Sample {
    /// Of a round whose halves were not timed apart.
    pub(crate) fn whole(total: f64) -> Sample {
        Sample { alloc: None, free: None, total }
    }

    /// From the halves of a stamped loop, less what the clock cost in each.
    pub(crate) fn from_parts(parts: Parts, n: usize, reps: usize, clock_ns: f64) -> Sample {
        let half = |time: Duration| ((time.as_nanos() as f64 - clock_ns * reps as f64) / (n * reps) as f64).max(0.0);
        let (alloc, free) = (half(parts.alloc), half(parts.free));
        Sample { alloc: Some(alloc), free: Some(free), total: alloc + free }
    }
}

/// The figures of one cell, as its rounds came in.
#[derive(Debug, Clone)]
pub(crate) struct CellSamples {
    pub(crate) bench: &'static str,
    pub(crate) name: &'static str,
    pub(crate) backend: &'static str,
    pub(crate) kind: Kind,
    pub(crate) n: usize,
    pub(crate) samples: Vec<Sample>,
    /// Of each round, where operations were timed one by one: the median and the 99th percentile, in microseconds.
    pub(crate) latencies_us: Vec<[f64; 2]>,
    pub(crate) order: Option<ListOrder>,
    pub(crate) seed: Option<u64>,
}

impl CellSamples {
    pub(crate) fn new<N, O>(bench: &'static str, row: &Row<N, O>, n: usize) -> CellSamples {
        CellSamples::named(bench, (row.name, row.backend, row.kind), n)
    }

    /// Of a row with that name, backend and kind.
    pub(crate) fn named(bench: &'static str, row: (&'static str, &'static str, Kind), n: usize) -> CellSamples {
        let (name, backend, kind) = row;
        CellSamples {
            bench,
            name,
            backend,
            kind,
            n,
            samples: Vec::new(),
            latencies_us: Vec::new(),
            order: None,
            seed: None,
        }
    }

    /// `None` without a sample.
    pub(crate) fn record(self) -> Option<Record> {
        let column =
            |pick: fn(&Sample) -> Option<f64>| Spread::of(&self.samples.iter().filter_map(pick).collect::<Vec<f64>>());
        let latency = |at: usize| {
            let of_rounds: Vec<f64> = self.latencies_us.iter().map(|both| both[at]).collect();
            Spread::of(&of_rounds).map(|spread| spread.median)
        };
        let total = column(|sample| Some(sample.total))?;
        Some(Record {
            alloc: column(|sample| sample.alloc),
            free: column(|sample| sample.free),
            runs: self.samples.len(),
            p50_us: latency(0),
            p99_us: latency(1),
            order: self.order,
            seed: self.seed,
            turns: self.samples,
            ..Record::of(self.bench, (self.name, self.backend, self.kind), self.n, total)
        })
    }

    pub(crate) fn flawed(&self, flaw: Flaw) -> Error {
        Error::Row { bench: self.bench, name: self.name, backend: self.backend, n: self.n, flaw: flaw.to_string() }
    }
}

/// One cell of each of these, all the way: proved, repeated until a round is long enough, timed in turns, proved again.
/// `round` gives a round's figures, and how long it took without what is not timed. A round has `least` repetitions or more.
pub(crate) fn measured<E>(
    run: &Run,
    mut cells: Vec<CellSamples>,
    entrants: &mut [E],
    least: usize,
    prove: impl Fn(&mut E) -> Result<(), Flaw>,
    mut round: impl FnMut(&mut E, usize) -> Result<(Sample, Duration), Flaw>,
) -> Result<Vec<Record>, Error> {
    let mut reps = Vec::new();
    for (entrant, cell) in entrants.iter_mut().zip(&cells) {
        let found = prove(entrant)
            .and_then(|()| enough(run.effort.round, |reps| round(entrant, reps).map(|(_, elapsed)| elapsed)));
        reps.push(found.map_err(|flaw| cell.flawed(flaw))?.max(least));
    }
    take_turns(run, run.effort.rounds, &mut cells, &reps, |at, reps| {
        round(&mut entrants[at], reps).map(|(sample, _)| sample)
    })?;
    for (entrant, cell) in entrants.iter_mut().zip(&cells) {
        prove(entrant).map_err(|flaw| cell.flawed(flaw))?;
    }
    Ok(cells.into_iter().filter_map(CellSamples::record).collect())
}

/// Rounds in turns: one of each cell, beginning with another one every time. `round` makes one of the cell at a place,
/// of so many repetitions.
pub(crate) fn take_turns(
    run: &Run,
    rounds: usize,
    cells: &mut [CellSamples],
    reps: &[usize],
    mut round: impl FnMut(usize, usize) -> Result<Sample, Flaw>,
) -> Result<(), Error> {
    for turn in 0..rounds {
        for place in 0..cells.len() {
            let at = (place + turn) % cells.len();
            take_turn(run, &mut cells[at], reps[at], |reps| round(at, reps))?;
        }
    }
    Ok(())
}

/// One round of one cell, of so many repetitions.
pub(crate) fn take_turn(
    run: &Run,
    cell: &mut CellSamples,
    reps: usize,
    mut round: impl FnMut(usize) -> Result<Sample, Flaw>,
) -> Result<(), Error> {
    // The neighbour's round left the caches cold; a sixteenth of a round warms them again.
    if reps > 1 {
        round(reps / 16 + 1).map_err(|flaw| cell.flawed(flaw))?;
    }
    let sample = run.rounds.undisturbed(|| {
        let before = preemptions();
        let sample = round(reps)?;
        Ok((sample, preemptions() != before))
    });
    cell.samples.push(sample.map_err(|flaw| cell.flawed(flaw))?);
    Ok(())
}

/// Repeats what takes a time until a round is long enough; gives the repetitions of a round.
pub(crate) fn enough(round: Duration, mut repeat: impl FnMut(usize) -> Result<Duration, Flaw>) -> Result<usize, Flaw> {
    let mut reps = 1;
    loop {
        let elapsed = repeat(reps)?;
        if elapsed >= round {
            return Ok(reps);
        }
        reps = scale(reps, elapsed, round);
    }
}

/// Repetitions after `reps` took `elapsed`: enough for a round, at most sixteen times as many.
fn scale(reps: usize, elapsed: Duration, round: Duration) -> usize {
    let factor = round.as_secs_f64() / elapsed.as_secs_f64().max(1e-9);
    ((reps as f64 * factor.clamp(1.0, 16.0) * 1.05).ceil() as usize).max(reps + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_is_subtracted_from_each_half_and_never_below_nothing() {
        let parts = Parts { alloc: Duration::from_nanos(1000), free: Duration::from_nanos(150) };
        let sample = Sample::from_parts(parts, 4, 10, 20.0);
        assert_eq!(sample, Sample { alloc: Some(20.0), free: Some(0.0), total: 20.0 });
    }

    #[test]
    fn a_disturbed_round_is_repeated_and_counted_when_it_stays_so() {
        let rounds = Rounds { all: Cell::new(10), ..Rounds::default() };
        let mut attempts = 0;
        let second: Result<i32, ()> = rounds.undisturbed(|| {
            attempts += 1;
            Ok((attempts, attempts < 2))
        });
        assert_eq!((second, rounds.all.get(), rounds.disturbed.get()), (Ok(2), 11, 0));
        let mut always = || {
            attempts += 1;
            Ok::<_, ()>((attempts, true))
        };
        assert_eq!(rounds.undisturbed(&mut always), Ok(2 + 1 + RETRIES as i32));
        assert_eq!((rounds.all.get(), rounds.disturbed.get()), (12, 1));
        for _ in 0..8 {
            rounds.undisturbed(&mut always).unwrap();
        }
        assert_eq!((rounds.disturbed.get(), rounds.repeated.get()), (9, rounds.all.get()), "no more than doubled");
        assert_eq!(rounds.undisturbed(|| Err::<((), bool), _>("short")), Err("short"));
    }

    #[test]
    fn repetitions_grow_until_a_round_is_long_enough() {
        let round = Duration::from_micros(200);
        assert_eq!(scale(1, Duration::from_nanos(50), round), 17);
        assert_eq!(scale(100, Duration::from_micros(100), round), 210);
        assert_eq!(scale(100, Duration::from_micros(199), round), 106);
    }
}
