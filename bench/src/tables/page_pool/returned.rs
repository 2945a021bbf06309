//! *Returned*: pages that another thread puts back. The measuring thread takes and sends them, and the other thread is
//! bound to a second processor. Both begin at once; timed from the first page taken to the last one put back.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::Error;
use crate::machine::preemptions;
use crate::record::Record;
use crate::rows::Unavailable;
use crate::rows::page_pool::BULK;
use crate::rows::page_pool::returned::{CrossRow, Crossing, rows};
use crate::subject::Flaw;
use crate::tables::page_pool::is_shown;
use crate::tables::worker::{Gate, Worker};
use crate::tables::{CellSamples, Entrant, Run, Sample, enough_from, in_turns};

/// The part's name in records.
pub(crate) const RETURNED: &str = "page-pool-returned";

/// Rounds last this much longer than those of one thread, so that the start's share is small.
const ROUND_FACTOR: u32 = 5;

/// The other thread's part.
struct Job {
    returns: Box<dyn FnOnce() + Send>,
    gate: Arc<Gate>,
}

/// It answers with its end, and whether the system preempted it meanwhile.
type Other = Worker<Job, (Instant, bool)>;

pub(super) fn returned(run: &mut Run) -> Result<Vec<Record>, Error> {
    let Some(second) = run.machine.second_cpu() else {
        run.note_absent(RETURNED, "-", &Unavailable("needs two processors, this process may use one".to_owned()));
        return Ok(Vec::new());
    };
    let rows: Vec<CrossRow> = rows(run.backend).into_iter().filter(|row| is_shown(run, row.name, row.kind)).collect();
    let mut entrants = run.open_all(&rows, ());
    let perform = |(): &mut (), Job { returns, gate }| {
        gate.pass();
        let before = preemptions();
        returns();
        (Instant::now(), preemptions() != before)
    };
    std::thread::scope(|scope| {
        let other = Worker::start(scope, second, || (), perform)?;
        in_rounds(run, &mut entrants, &other)
    })
}

fn in_rounds(run: &Run, entrants: &mut [Entrant<(), Box<dyn Crossing>>], other: &Other) -> Result<Vec<Record>, Error> {
    let round = run.effort.round * ROUND_FACTOR;
    let cell = |entrant: &Entrant<_, _>| CellSamples::new(RETURNED, entrant.row.row_name(), BULK);
    let mut cells: Vec<CellSamples> = entrants.iter().map(cell).collect();
    let mut batches = Vec::new();
    for (entrant, cell) in entrants.iter_mut().zip(&cells) {
        let crossing = entrant.opened.as_mut();
        crossing.verify().map_err(|flaw| cell.flawed(flaw))?;
        batches.push(enough_from(64, round, |batches| cross(crossing, other, batches, cell).map(|(time, _)| time))?);
    }
    for (_, at) in in_turns(run.effort.rounds, entrants.len()) {
        let (crossing, batches) = (entrants[at].opened.as_mut(), batches[at]);
        let elapsed = run.rounds.undisturbed(|| cross(crossing, other, batches, &cells[at]))?;
        cells[at].samples.push(Sample::whole(elapsed.as_nanos() as f64 / (batches * BULK) as f64));
    }
    for (entrant, cell) in entrants.iter_mut().zip(&cells) {
        entrant.opened.verify().map_err(|flaw| cell.flawed(flaw))?;
    }
    Ok(cells.into_iter().filter_map(CellSamples::record).collect())
}

/// Sends `batches`, and waits until they are back. Returns the time, and whether either thread was preempted.
fn cross(
    crossing: &mut dyn Crossing,
    other: &Other,
    batches: usize,
    cell: &CellSamples,
) -> Result<(Duration, bool), Error> {
    let gate = Arc::new(Gate::default());
    let ends = crossing.ends(batches);
    other.send(Job { returns: ends.returns, gate: Arc::clone(&gate) })?;
    gate.pass();
    let before = preemptions();
    let start = Instant::now();
    let is_complete = (ends.takes)();
    let is_disturbed = preemptions() != before;
    let (end, is_other_disturbed) = other.answer()?;
    if !is_complete {
        return Err(cell.flawed(Flaw::Short { wanted: BULK }));
    }
    Ok((end - start, is_disturbed || is_other_disturbed))
}
