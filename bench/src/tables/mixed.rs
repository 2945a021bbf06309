//! `mixed`: a program with two threads. Each thread has 1024 requests of 1 to 16 pages under way; one of them ends, and
//! another begins in its place. For three of ten requests the other thread frees the pages, which it gets through a
//! ring. The time is wall time, divided by the pages of both threads.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use crate::Error;
use crate::machine::preemptions;
use crate::record::Record;
use crate::rows::Unavailable;
use crate::rows::mixed::{Day, Done, REQUESTS, SCRIPT_STEPS, SENT_PERCENT, rows};
use crate::subject::{Flaw, check_pages};
use crate::tables::worker::{self, Gate};
use crate::tables::{CellSamples, Run, Sample, enough_from, in_turns};

/// Rounds last this much longer than those of one thread, so that the start's share is small.
const ROUND_FACTOR: u32 = 5;

enum Job {
    Steps { row: usize, steps: usize, gate: Arc<Gate>, through: Arc<AtomicUsize> },
    Held { row: usize },
}

enum Answer {
    /// And whether the system preempted the thread meanwhile.
    Done(Result<Done, Flaw>, bool),
    Held(Vec<usize>),
}

type Worker = worker::Worker<Job, Answer>;

fn perform(days: &mut [Box<dyn Day>], job: Job) -> Answer {
    match job {
        Job::Steps { row, steps, gate, through } => {
            gate.pass();
            let before = preemptions();
            let done = days[row].steps(steps, &through);
            Answer::Done(done, preemptions() != before)
        }
        Job::Held { row } => Answer::Held(days[row].held()),
    }
}

pub(crate) fn mixed(run: &mut Run) -> Result<Vec<Record>, Error> {
    let main = run.machine.main_cpu();
    let Some(second) = run.machine.second_cpu() else {
        run.note_absent("mixed", "-", &Unavailable("needs two processors, this process may use one".to_owned()));
        return Ok(Vec::new());
    };
    run.progress.set_message("mixed");
    let rows = run.asked_for(rows());
    let (mut cells, mut desks) = (Vec::new(), [Vec::new(), Vec::new()]);
    for row in &rows {
        if let Some(pair) = run.open(row, run.seed) {
            cells.push(CellSamples { seed: Some(run.seed), ..CellSamples::new("mixed", row.row_name(), REQUESTS) });
            desks.iter_mut().zip(pair).for_each(|(desks, desk)| desks.push(desk));
        }
    }
    let [first, others] = desks;
    let records = std::thread::scope(|scope| {
        let start = |cpu, desks: Vec<Box<dyn FnOnce() -> Box<dyn Day> + Send>>| {
            let open = || desks.into_iter().map(|desk| desk()).collect::<Vec<_>>();
            Worker::start(scope, cpu, open, |days, job| perform(days, job))
        };
        let workers = [start(main, first)?, start(second, others)?];
        measured(run, &workers, cells)
    });
    run.progress.inc(1);
    records
}

fn measured(run: &Run, workers: &[Worker; 2], mut cells: Vec<CellSamples>) -> Result<Vec<Record>, Error> {
    let round = run.effort.round * ROUND_FACTOR;
    let mut steps = Vec::new();
    for (row, cell) in cells.iter().enumerate() {
        // After a few scripts all places have a request.
        let percent = day(workers, row, 4 * SCRIPT_STEPS, cell)?.sent_percent();
        if percent.abs_diff(SENT_PERCENT) > 3 {
            return Err(cell.flawed(Flaw::Sent { percent, wanted: SENT_PERCENT }));
        }
        verify(workers, row, cell)?;
        // At least a whole script, however slow the machine is at the moment: only a whole script has the right mix.
        steps.push(enough_from(SCRIPT_STEPS, round, |steps| day(workers, row, steps, cell).map(|both| both.elapsed))?);
    }
    for (_, row) in in_turns(run.effort.rounds, cells.len()) {
        let total = run.rounds.undisturbed(|| {
            let both = day(workers, row, steps[row], &cells[row])?;
            Ok::<_, Error>((both.elapsed.as_nanos() as f64 / both.pages as f64, both.is_disturbed))
        })?;
        cells[row].samples.push(Sample::whole(total));
    }
    cells.iter().enumerate().try_for_each(|(row, cell)| verify(workers, row, cell))?;
    Ok(cells.into_iter().filter_map(CellSamples::record).collect())
}

/// The work of both threads in a round.
struct Both {
    elapsed: Duration,
    pages: usize,
    sent: usize,
    is_disturbed: bool,
}

impl Both {
    /// Percent of pages that the other thread freed.
    fn sent_percent(&self) -> usize {
        self.sent * 100 / self.pages
    }
}

fn day(workers: &[Worker; 2], row: usize, steps: usize, cell: &CellSamples) -> Result<Both, Error> {
    let (gate, through) = (Arc::new(Gate::default()), Arc::new(AtomicUsize::new(0)));
    for worker in workers {
        let (gate, through) = (Arc::clone(&gate), Arc::clone(&through));
        worker.send(Job::Steps { row, steps, gate, through })?;
    }
    // Both answers are received before either's error is returned, so that no answer stays in a channel.
    let [first, second] = [0, 1].map(|at| workers[at].answer());
    let done = |answer| match answer {
        Ok(Answer::Done(done, is_disturbed)) => Ok((done.map_err(|flaw| cell.flawed(flaw))?, is_disturbed)),
        _ => Err(Error::WorkerDied),
    };
    let ((first, first_disturbed), (second, second_disturbed)) = (done(first)?, done(second)?);
    Ok(Both {
        elapsed: first.end.max(second.end) - first.start.min(second.start),
        pages: first.pages + second.pages,
        sent: first.sent + second.sent,
        is_disturbed: first_disturbed || second_disturbed,
    })
}

/// Checks that the pages of all requests under way in both threads are distinct.
fn verify(workers: &[Worker; 2], row: usize, cell: &CellSamples) -> Result<(), Error> {
    let mut all = Vec::new();
    for worker in workers {
        worker.send(Job::Held { row })?;
        let Answer::Held(held) = worker.answer()? else { return Err(Error::WorkerDied) };
        all.extend(held);
    }
    let pages = all.len();
    check_pages(all, pages).map_err(|flaw| cell.flawed(flaw))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Machine;
    use crate::rows::catalogue;
    use crate::tables::Effort;

    #[test]
    fn mixed_gives_a_record_for_each_row_or_a_reason() {
        let machine = Machine::here();
        let wanted = ["pagemill-array", "mutex-vec", "glibc", "tls-vec"];
        let rows: Vec<_> = catalogue().into_iter().filter(|row| wanted.contains(&row.name)).collect();
        let mut run = Run::for_test(&machine, &rows, Effort { rounds: 2, round: Duration::from_micros(10) });
        let records = mixed(&mut run).unwrap();
        run.absent.iter().for_each(|why| println!("skipped: {why}"));
        if machine.second_cpu().is_none() {
            assert!(records.is_empty() && run.absent.len() == 1, "{:?}", run.absent);
            return;
        }
        assert_eq!(records.len(), 4 - run.absent.len(), "a thread-local list can't hand over");
        assert!(records.iter().all(|record| record.bench == "mixed" && record.runs == 2 && record.total.min > 0.0));
    }
}
