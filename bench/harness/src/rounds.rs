//! Rounds of rows that take turns.
//!
//! Every cell of a table is measured in the same way. The number of repetitions grows until a round is long enough,
//! which also warms the row. Then the rows take turns, one round each. Each turn begins with another row, so that a
//! disturbance hits several rows and not one. A round in which the system preempted the measuring thread is repeated, a
//! few times at most. If it is preempted every time, it is counted as disturbed.

use std::cell::Cell;
use std::fmt::Display;
use std::path::Path;
use std::time::Duration;

use indicatif::ProgressBar;

use crate::Error;
use crate::machine::{Machine, preemptions};
use crate::record::Record;
use crate::stats::Spread;

/// What a row is to the reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Pagemill itself.
    Ours,
    /// A lower bound: no list of pages can be faster.
    Floor,
    /// What a user would choose today.
    Peer,
}

impl Kind {
    /// As records have it.
    pub fn label(self) -> &'static str {
        match self {
            Kind::Ours => "pagemill",
            Kind::Floor => "floor",
            Kind::Peer => "peer",
        }
    }
}

/// The order of the free pages on a CPU's list, from which the next pages come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ListOrder {
    /// Freed in random order.
    Random,
    /// Freed in the order in which they were allocated, as a queue does. The list is a stack, so it is in descending
    /// order.
    Fifo,
    /// As the allocator's zone refills the list: ascending, the best case.
    InOrder,
}

impl ListOrder {
    /// Every order.
    pub const ALL: [ListOrder; 3] = [ListOrder::Random, ListOrder::Fifo, ListOrder::InOrder];

    /// As records have it.
    pub fn label(self) -> &'static str {
        match self {
            ListOrder::Random => "random",
            ListOrder::Fifo => "fifo",
            ListOrder::InOrder => "in-order",
        }
    }
}

/// A row's name, its backend (`-` for others than Pagemill) and its kind.
pub type RowName = (&'static str, &'static str, Kind);

/// Why a row is absent from a table. The report shows it.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{0}")]
pub struct Unavailable(pub String);

/// How long to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Effort {
    /// Rounds of each row.
    pub rounds: usize,
    /// The shortest duration of a round of one row.
    pub round: Duration,
}

impl Effort {
    /// The default.
    pub const FULL: Effort = Effort { rounds: 11, round: Duration::from_millis(1) };
    /// For a first look.
    pub const QUICK: Effort = Effort { rounds: 5, round: Duration::from_micros(200) };
}

/// How often a disturbed round is repeated.
const RETRIES: usize = 4;

/// The rounds of this run, and how many of them stayed disturbed.
#[derive(Debug, Default)]
pub struct Rounds {
    /// All of them.
    pub all: Cell<usize>,
    /// Those that stayed disturbed.
    pub disturbed: Cell<usize>,
    repeated: Cell<usize>,
}

impl Rounds {
    /// Runs one round. `attempt` says whether it was disturbed; it is repeated until it was not, or until the retries
    /// are used up.
    ///
    /// # Errors
    /// Those of `attempt`.
    pub fn undisturbed<T, E>(&self, mut attempt: impl FnMut() -> Result<(T, bool), E>) -> Result<T, E> {
        self.all.set(self.all.get() + 1);
        for _ in 0..RETRIES {
            let (outcome, is_disturbed) = attempt()?;
            if !is_disturbed {
                return Ok(outcome);
            }
            // On a busy machine repetitions may double the work, and not more.
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
#[derive(Debug)]
pub struct Run<'a> {
    /// The machine that it runs on.
    pub machine: &'a Machine,
    /// The file of the program `pagemill`.
    pub program: &'a Path,
    /// How long to measure.
    pub effort: Effort,
    /// Whether rows other than Pagemill's were asked for.
    pub is_compared: bool,
    /// The backend that an allocator has here by default.
    pub backend: &'static str,
    /// What a pair of clock readings costs, in nanoseconds.
    pub clock_ns: f64,
    /// Seed of the random orders.
    pub seed: u64,
    /// The bar on standard error.
    pub progress: ProgressBar,
    /// Rounds so far.
    pub rounds: Rounds,
    /// Rows that could not take part, with the reason; printed below the table.
    pub absent: Vec<String>,
}

impl Run<'_> {
    /// A run without a progress bar, for tests.
    pub fn for_test(machine: &Machine, effort: Effort) -> Run<'_> {
        Run {
            machine,
            program: Path::new("pagemill"),
            effort,
            is_compared: true,
            backend: "rseq",
            clock_ns: 0.0,
            seed: 3,
            progress: ProgressBar::hidden(),
            rounds: Rounds::default(),
            absent: Vec::new(),
        }
    }

    /// Notes that a row is missing from a table, and why.
    pub fn note_absent(&mut self, name: &str, backend: &str, reason: &Unavailable) {
        let note = if backend == "-" { format!("{name}: {reason}") } else { format!("{name} {backend}: {reason}") };
        if !self.absent.contains(&note) {
            self.absent.push(note);
        }
    }
}

/// Time in the two halves of a loop, the clock's own time included.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Parts {
    /// Taking.
    pub alloc: Duration,
    /// Giving back.
    pub free: Duration,
}

/// One round of one row, in nanoseconds a page.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample {
    /// Allocating, where the halves are timed separately.
    pub alloc: Option<f64>,
    /// Giving back.
    pub free: Option<f64>,
    /// Both.
    pub total: f64,
}

impl Sample {
    /// A round whose halves were not timed separately.
    pub fn whole(total: f64) -> Sample {
        Sample { alloc: None, free: None, total }
    }

    /// From the halves of a loop with clock readings inside, less the clock's own cost in each half.
    pub fn from_parts(parts: Parts, n: usize, reps: usize, clock_ns: f64) -> Sample {
        let half = |time: Duration| ((time.as_nanos() as f64 - clock_ns * reps as f64) / (n * reps) as f64).max(0.0);
        let (alloc, free) = (half(parts.alloc), half(parts.free));
        Sample { alloc: Some(alloc), free: Some(free), total: alloc + free }
    }
}

/// The figures of one cell, in the order of its rounds.
#[derive(Debug, Clone)]
pub struct CellSamples {
    /// The table, or the part of it.
    pub bench: &'static str,
    /// The row: name, backend, kind.
    pub row: RowName,
    /// The size.
    pub n: usize,
    /// One for each round.
    pub samples: Vec<Sample>,
    /// Of each round, where operations were timed one by one: the median and the 99th percentile, in microseconds.
    pub latencies_us: Vec<[f64; 2]>,
    /// Of each round, where a server of its own did the work: its processor time a page, in nanoseconds.
    pub cpu_ns: Vec<f64>,
    /// The order of the list, where the row depends on it.
    pub order: Option<ListOrder>,
    /// The seed, where something is random.
    pub seed: Option<u64>,
}

impl CellSamples {
    /// A row's cell, without a sample yet.
    pub fn new(bench: &'static str, row: RowName, n: usize) -> CellSamples {
        let (samples, latencies_us, cpu_ns) = (Vec::new(), Vec::new(), Vec::new());
        CellSamples { bench, row, n, samples, latencies_us, cpu_ns, order: None, seed: None }
    }

    /// Its summary; `None` without a sample.
    pub fn record(self) -> Option<Record> {
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
            cpu_ns: Spread::of(&self.cpu_ns).map(|spread| spread.median),
            order: self.order,
            seed: self.seed,
            turns: self.samples,
            ..Record::of(self.bench, self.row, self.n, total)
        })
    }

    /// The error for a row that handed out wrong pages.
    pub fn flawed(&self, flaw: impl Display) -> Error {
        let (name, backend, _) = self.row;
        Error::Row { bench: self.bench, name, backend, n: self.n, flaw: flaw.to_string() }
    }
}

/// Measures one cell of each entrant: verifies it, finds how many repetitions a round needs, times rounds in turns, and
/// verifies it again. `round` returns a round's figures and its duration without the untimed parts. A round has at
/// least `least` repetitions.
///
/// # Errors
/// A row that did not do what it must.
pub fn measured<E, F: Display>(
    run: &Run,
    mut cells: Vec<CellSamples>,
    entrants: &mut [E],
    least: usize,
    prove: impl Fn(&mut E) -> Result<(), F>,
    mut round: impl FnMut(&mut E, usize) -> Result<(Sample, Duration), F>,
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

/// Rounds of all cells, [`in_turns`]. `round` gets a cell's index and the number of repetitions.
///
/// # Errors
/// A row that did not do what it must.
pub fn take_turns<F: Display>(
    run: &Run,
    rounds: usize,
    cells: &mut [CellSamples],
    reps: &[usize],
    mut round: impl FnMut(usize, usize) -> Result<Sample, F>,
) -> Result<(), Error> {
    in_turns(rounds, cells.len())
        .try_for_each(|(_, at)| take_turn(run, &mut cells[at], reps[at], |reps| round(at, reps)))
}

/// The turn and the index of the cell of each round: one of each cell, each turn beginning with another cell.
pub fn in_turns(turns: usize, cells: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..turns).flat_map(move |turn| (0..cells).map(move |place| (turn, (place + turn) % cells)))
}

/// One round of one cell, of `reps` repetitions.
///
/// # Errors
/// A row that did not do what it must.
pub fn take_turn<F: Display>(
    run: &Run,
    cell: &mut CellSamples,
    reps: usize,
    mut round: impl FnMut(usize) -> Result<Sample, F>,
) -> Result<(), Error> {
    // The previous row's round left the caches cold. A sixteenth of a round warms them again.
    if reps > 1 {
        round(reps / 16 + 1).map_err(|flaw| cell.flawed(flaw))?;
    }
    let sample = run.rounds.undisturbed(|| {
        let before = preemptions();
        round(reps).map(|sample| (sample, preemptions() != before))
    });
    cell.samples.push(sample.map_err(|flaw| cell.flawed(flaw))?);
    Ok(())
}

/// Grows the number of repetitions from one until a round is long enough, and returns it.
///
/// # Errors
/// Those of `repeat`.
pub fn enough<F>(round: Duration, repeat: impl FnMut(usize) -> Result<Duration, F>) -> Result<usize, F> {
    enough_from(1, round, repeat)
}

/// Grows the number of repetitions from `reps`, as [`enough`] does.
///
/// # Errors
/// Those of `repeat`.
pub fn enough_from<F>(
    mut reps: usize,
    round: Duration,
    mut repeat: impl FnMut(usize) -> Result<Duration, F>,
) -> Result<usize, F> {
    loop {
        let elapsed = repeat(reps)?;
        if elapsed >= round {
            return Ok(reps);
        }
        reps = scale(reps, elapsed, round);
    }
}

/// Repetitions to try after `reps` took `elapsed`: enough for a round, at most sixteen times as many.
fn scale(reps: usize, elapsed: Duration, round: Duration) -> usize {
    let factor = round.as_secs_f64() / elapsed.as_secs_f64().max(1e-9);
    ((reps as f64 * factor.clamp(1.0, 16.0) * 1.05).ceil() as usize).max(reps + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clock_cost_is_subtracted_but_never_below_zero() {
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
