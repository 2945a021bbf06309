//! `threads`: two processors.
//!
//! - *own pages*: each thread allocates and frees its own pages, first alone on each processor, then both at once. The
//!   result is how much slower a page becomes when the other thread works too, compared with a thread-local `Vec` in
//!   the same run.
//! - *hand-over*: one thread allocates 64 pages at a time and sends their addresses through a single-producer ring; the
//!   other thread frees them. The floor sends the same words without allocating.
//!
//! Each worker is bound to its processor and keeps its runners for the whole table. Before a round both spin until the
//! other one is ready: waking up would take longer than the round.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use crate::Error;
use crate::machine::preemptions;
use crate::record::Record;
use crate::rows::{Baton, Kind, Need, Row, Site, Unavailable};
use crate::subject::{Flaw, HAND_OVER_PAGES, Runner};
use crate::tables::worker::{self, Gate};
use crate::tables::{CellSamples, Run, Sample, enough, enough_from, in_turns};

/// Batch sizes of *own pages*.
pub(crate) const OWN_SIZES: [usize; 2] = [1, 64];

pub(crate) fn own_sizes(is_brief: bool) -> &'static [usize] {
    if is_brief { &OWN_SIZES[1..] } else { &OWN_SIZES }
}

/// Words of the ring between the threads: 64 batches, so that neither thread waits at every batch.
const RING_WORDS: usize = 64 * HAND_OVER_PAGES;

/// Pages that a site needs: as many as two threads, the ring and their caches can hold.
const SITE_PAGES: usize = 32768;

/// Rounds last this much longer than those of one thread, so that the start's share is small.
const ROUND_FACTOR: u32 = 5;

enum Work {
    Verify,
    Batch { n: usize, reps: usize },
    Produce { ring: rtrb::Producer<usize>, batches: usize },
    Consume { ring: rtrb::Consumer<usize>, batches: usize },
}

struct Job {
    entrant: usize,
    work: Work,
    gate: Option<Arc<Gate>>,
}

/// A job's loop.
#[derive(Debug, Clone, Copy)]
struct Span {
    start: Instant,
    end: Instant,
    /// Whether the system preempted the thread meanwhile.
    is_disturbed: bool,
}

impl Span {
    fn time(self) -> Duration {
        self.end - self.start
    }
}

type Worker = worker::Worker<Job, Result<Span, Flaw>>;

fn wait(worker: &Worker, cell: &CellSamples) -> Result<Span, Error> {
    worker.answer()?.map_err(|flaw| cell.flawed(flaw))
}

fn alone(worker: &Worker, entrant: usize, work: Work, cell: &CellSamples) -> Result<Span, Error> {
    worker.send(Job { entrant, work, gate: None })?;
    wait(worker, cell)
}

fn perform(runner: &mut dyn Runner, work: Work, gate: Option<&Gate>) -> Result<Span, Flaw> {
    if let Some(gate) = gate {
        gate.pass();
    }
    let before = preemptions();
    let start = Instant::now();
    let mut own_time = None;
    match work {
        Work::Verify => runner.verify(HAND_OVER_PAGES)?,
        Work::Batch { n, reps } => own_time = Some(runner.batch(n, reps)?),
        Work::Produce { mut ring, batches } => runner.produce(&mut ring, batches)?,
        Work::Consume { mut ring, batches } => runner.consume(&mut ring, batches),
    }
    let end = own_time.map_or_else(Instant::now, |time| start + time);
    Ok(Span { start, end, is_disturbed: preemptions() != before })
}

/// The workers, and each row with its index in them.
struct Table<'a> {
    workers: [Worker; 2],
    entrants: Vec<(&'a Row, usize)>,
    /// Which rows can hand over, by their index.
    hands_over: Vec<bool>,
}

pub(crate) fn threads(run: &mut Run) -> Result<Vec<Record>, Error> {
    let main = run.machine.main_cpu();
    let Some(second) = run.machine.second_cpu() else {
        run.note_absent("threads", "-", &Unavailable("needs two processors, this process may use one".to_owned()));
        return Ok(Vec::new());
    };
    let baton = Row::plain("hand-over", Kind::Floor, |_| {
        let site: Site = Box::new(|_| Box::new(Baton));
        Ok(site)
    });
    let rows = run.rows;
    let mut sites = Vec::new();
    let mut entrants = Vec::new();
    for row in rows.iter().chain([&baton]) {
        if let Some(site) = run.open(row, Need { pages: SITE_PAGES }) {
            entrants.push((row, sites.len()));
            sites.push(site);
        }
    }
    std::thread::scope(|scope| {
        let (tell, told) = channel();
        let start = |cpu| {
            let (sites, tell) = (&sites, tell.clone());
            let open = move || {
                let runners: Vec<Box<dyn Runner>> = sites.iter().map(|site| site(RING_WORDS)).collect();
                // Nobody listens if the table has ended with an error.
                let _ = tell.send(runners.iter().map(|runner| runner.hands_over()).collect());
                runners
            };
            Worker::start(scope, cpu, open, |runners, job| {
                perform(runners[job.entrant].as_mut(), job.work, job.gate.as_deref())
            })
        };
        let workers = [start(main)?, start(second)?];
        let hands_over = told.recv().map_err(|_| Error::WorkerDied)?;
        let table = Table { workers, entrants, hands_over };
        table.verify()?;
        let mut records = Vec::new();
        for &n in own_sizes(run.is_brief) {
            run.progress.set_message(format!("threads: own pages, {n}"));
            records.extend(table.own_pages(run, n)?);
            run.progress.inc(1);
        }
        run.progress.set_message("threads: hand-over");
        records.extend(table.hand_over(run)?);
        run.progress.inc(1);
        Ok(records)
    })
}

impl Table<'_> {
    fn verify(&self) -> Result<(), Error> {
        for &(row, at) in self.entrants.iter().filter(|(row, _)| row.name != "hand-over") {
            for worker in &self.workers {
                alone(worker, at, Work::Verify, &CellSamples::new("threads", row.row_name(), HAND_OVER_PAGES))?;
            }
        }
        Ok(())
    }

    fn own_pages(&self, run: &Run, n: usize) -> Result<Vec<Record>, Error> {
        let round = run.effort.round * ROUND_FACTOR;
        let entrants: Vec<_> = self.entrants.iter().filter(|(row, _)| row.name != "hand-over").collect();
        let cell = |bench, row: &Row| CellSamples::new(bench, row.row_name(), n);
        let mut cells: Vec<[CellSamples; 2]> =
            entrants.iter().map(|(row, _)| [cell("threads-own-1", row), cell("threads-own-2", row)]).collect();
        let mut reps = Vec::new();
        for (&&(_, at), cells) in entrants.iter().zip(&cells) {
            let batch = |worker, reps| alone(worker, at, Work::Batch { n, reps }, &cells[0]).map(Span::time);
            let found = enough(round, |reps| batch(&self.workers[0], reps))?;
            batch(&self.workers[1], found)?;
            reps.push(found);
        }
        for (_, which) in in_turns(run.effort.rounds, entrants.len()) {
            let [solo, both] = &mut cells[which];
            let (&(_, at), reps) = (entrants[which], reps[which]);
            let per_page = |times: [Duration; 2]| (times[0] + times[1]).as_nanos() as f64 / (2 * n * reps) as f64;
            let spans = run.rounds.undisturbed(|| {
                let batch = |worker| alone(worker, at, Work::Batch { n, reps }, solo);
                let spans = [batch(&self.workers[0])?, batch(&self.workers[1])?];
                Ok::<_, Error>((spans, spans.iter().any(|span| span.is_disturbed)))
            })?;
            solo.samples.push(Sample::whole(per_page(spans.map(Span::time))));
            let spans = run.rounds.undisturbed(|| {
                let spans = self.together(at, both, || [Work::Batch { n, reps }, Work::Batch { n, reps }])?;
                Ok::<_, Error>((spans, spans.iter().any(|span| span.is_disturbed)))
            })?;
            both.samples.push(Sample::whole(per_page(spans.map(Span::time))));
        }
        Ok(cells.into_iter().flatten().filter_map(CellSamples::record).collect())
    }

    fn hand_over(&self, run: &Run) -> Result<Vec<Record>, Error> {
        let round = run.effort.round * ROUND_FACTOR;
        let entrants: Vec<_> = self.entrants.iter().filter(|&&(_, at)| self.hands_over[at]).collect();
        let mut cells: Vec<CellSamples> = entrants
            .iter()
            .map(|(row, _)| CellSamples::new("threads-hand-over", row.row_name(), HAND_OVER_PAGES))
            .collect();
        let mut batches = Vec::new();
        for (&&(_, at), cell) in entrants.iter().zip(&cells) {
            batches.push(enough_from(64, round, |batches| self.cross(at, batches, cell).map(|(elapsed, _)| elapsed))?);
        }
        for (_, which) in in_turns(run.effort.rounds, entrants.len()) {
            let cross = || self.cross(entrants[which].1, batches[which], &cells[which]);
            let elapsed = run.rounds.undisturbed(cross)?;
            let total = elapsed.as_nanos() as f64 / (batches[which] * HAND_OVER_PAGES) as f64;
            cells[which].samples.push(Sample::whole(total));
        }
        Ok(cells.into_iter().filter_map(CellSamples::record).collect())
    }

    /// Sends `batches` from the first worker to the second. Returns the time from the first allocation to the last
    /// free, and whether either thread was preempted meanwhile.
    fn cross(&self, entrant: usize, batches: usize, cell: &CellSamples) -> Result<(Duration, bool), Error> {
        let [produced, consumed] = self.together(entrant, cell, || {
            let (producer, consumer) = rtrb::RingBuffer::new(RING_WORDS);
            [Work::Produce { ring: producer, batches }, Work::Consume { ring: consumer, batches }]
        })?;
        Ok((consumed.end - produced.start, produced.is_disturbed || consumed.is_disturbed))
    }

    /// Has both workers begin at once.
    fn together(
        &self,
        entrant: usize,
        cell: &CellSamples,
        works: impl FnOnce() -> [Work; 2],
    ) -> Result<[Span; 2], Error> {
        let gate = Arc::new(Gate::default());
        for (worker, work) in self.workers.iter().zip(works()) {
            worker.send(Job { entrant, work, gate: Some(Arc::clone(&gate)) })?;
        }
        // Both answers are received before either's error is returned, so that no answer stays in a channel.
        let [first, second] = [wait(&self.workers[0], cell), wait(&self.workers[1], cell)];
        Ok([first?, second?])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Machine;
    use crate::rows::catalogue;
    use crate::tables::Effort;

    #[test]
    fn threads_gives_a_record_for_each_row_or_a_reason() {
        let machine = Machine::here();
        let rows: Vec<Row> =
            catalogue().into_iter().filter(|row| ["tls-vec", "mutex-vec", "glibc"].contains(&row.name)).collect();
        let effort = Effort { rounds: 2, round: Duration::from_micros(10) };
        let mut run = Run::for_test(&machine, &rows, effort);
        let records = threads(&mut run).unwrap();
        if machine.second_cpu().is_none() {
            assert!(records.is_empty() && run.absent.len() == 1, "{:?}", run.absent);
            return;
        }
        let count = |bench| records.iter().filter(|record| record.bench == bench).count();
        assert_eq!(count("threads-own-1"), 3 * OWN_SIZES.len());
        assert_eq!(count("threads-own-2"), 3 * OWN_SIZES.len());
        // The floor, mutex-vec and glibc; a thread-local list can't hand over.
        assert_eq!(count("threads-hand-over"), 3);
    }
}
