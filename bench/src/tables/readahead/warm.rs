//! *warm*: reads of pages that are cached, each by a call for one page. On two processors both threads begin at once, each
//! with a reader of its own; the figure is the mean of their times.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use super::{Sizes, is_shown};
use crate::Error;
use crate::machine::{available_bytes, preemptions};
use crate::record::Record;
use crate::rows::Unavailable;
use crate::rows::readahead::DataFile;
use crate::rows::readahead::warm::{Loop, Need, Warm, WarmRow, rows, value_rows};
use crate::subject::Flaw;
use crate::tables::worker::{Gate, Worker};
use crate::tables::{CellSamples, Run, Sample, in_turns};

/// Pages of the small file: 2 MB, about as much as a second-level cache has.
pub(crate) const SMALL: usize = 500;

/// Memory that a row leaves to others.
const SPARE_BYTES: u64 = 512 << 20;

/// Reads in a round.
const READS: usize = 1 << 14;

/// The parts: in sequence or at random; whole pages or 8 bytes; the name for one processor and for two.
#[derive(Clone, Copy)]
pub(crate) struct Part {
    pub(crate) title: &'static str,
    is_random: bool,
    is_whole: bool,
    pub(crate) one: &'static str,
    pub(crate) two: &'static str,
}

pub(crate) const PARTS: [Part; 4] = [
    Part {
        title: "4 KiB, in sequence",
        is_random: false,
        is_whole: true,
        one: "readahead-warm-seq",
        two: "readahead-warm-seq-2",
    },
    Part {
        title: "4 KiB, random",
        is_random: true,
        is_whole: true,
        one: "readahead-warm-random",
        two: "readahead-warm-random-2",
    },
    Part {
        title: "8 bytes, in sequence",
        is_random: false,
        is_whole: false,
        one: "readahead-look-seq",
        two: "readahead-look-seq-2",
    },
    Part {
        title: "8 bytes, random",
        is_random: true,
        is_whole: false,
        one: "readahead-look-random",
        two: "readahead-look-random-2",
    },
];

/// Work for the second processor.
struct Job {
    reader: Box<dyn Loop>,
    pages: Arc<[u32]>,
    is_whole: bool,
    gate: Arc<Gate>,
}

/// It hands the reader back.
type Other = Worker<Job, (Box<dyn Loop>, Result<Duration, String>, bool)>;

/// A row's readers.
struct Entrant {
    row: WarmRow,
    warm: Box<dyn Warm>,
    reader: Box<dyn Loop>,
    second: Option<Box<dyn Loop>>,
}

pub(super) fn warm(run: &mut Run, data: &Rc<DataFile>, sizes: Sizes) -> Result<Vec<Record>, Error> {
    let Some(second) = run.machine.second_cpu() else {
        run.note_absent("two processors", "-", &Unavailable("this process may use one".to_owned()));
        return of_sizes(run, data, sizes, None);
    };
    std::thread::scope(|scope| {
        let perform = |(): &mut (), job: Job| {
            let Job { mut reader, pages, is_whole, gate } = job;
            gate.pass();
            let before = preemptions();
            let elapsed = reader.round(&pages, is_whole).map_err(|flaw| flaw.to_string());
            (reader, elapsed, preemptions() != before)
        };
        let other = Worker::start(scope, second, || (), perform)?;
        of_sizes(run, data, sizes, Some(&other))
    })
}

fn of_sizes(run: &mut Run, data: &Rc<DataFile>, sizes: Sizes, other: Option<&Other>) -> Result<Vec<Record>, Error> {
    let mut records = Vec::new();
    for pages in [SMALL, sizes.warm] {
        let need = Need { data: Rc::clone(data), pages };
        let mut groups = vec![rows()];
        // Values need memory of their own: one row after the other.
        groups.extend(value_rows().into_iter().map(|row| vec![row]));
        for group in groups {
            let mut entrants = Vec::new();
            for row in group.into_iter().filter(|row| is_shown(run, row.kind)).collect::<Vec<_>>() {
                entrants.extend(opened(run, row, &need, other.is_some())?);
            }
            records.extend(of_group(run, &mut entrants, pages, other)?);
        }
    }
    Ok(records)
}

fn opened(run: &mut Run, row: WarmRow, need: &Need, has_second: bool) -> Result<Option<Entrant>, Error> {
    if available_bytes().is_some_and(|bytes| bytes < need.bytes() + SPARE_BYTES) {
        let why = format!("needs {} MiB of memory, which this machine does not have now", need.bytes() >> 20);
        run.note_absent(row.name, "-", &Unavailable(why));
        return Ok(None);
    }
    let Some(warm) = run.open(&row, need.clone()) else { return Ok(None) };
    let cell = CellSamples::new("readahead-warm", row.row_name(), need.pages);
    let reader = || warm.reader().map_err(|flaw| cell.flawed(flaw));
    let (first, second) = (reader()?, if has_second { Some(reader()?) } else { None });
    Ok(Some(Entrant { row, reader: first, second, warm }))
}

fn of_group(run: &Run, entrants: &mut [Entrant], pages: usize, other: Option<&Other>) -> Result<Vec<Record>, Error> {
    let mut records = Vec::new();
    for part in PARTS {
        let orders = [orders_of(part, pages, run.seed), orders_of(part, pages, run.seed + 1)];
        let seed = part.is_random.then_some(run.seed);
        let cells = |bench| {
            let cell =
                |entrant: &Entrant| CellSamples { seed, ..CellSamples::new(bench, entrant.row.row_name(), pages) };
            entrants.iter().map(cell).collect::<Vec<_>>()
        };
        let (mut ones, mut twos) = (cells(part.one), cells(part.two));
        // A reader that was somewhere else is one that jumps.
        for entrant in entrants.iter_mut() {
            entrant.reader = entrant.warm.reader().map_err(|flaw| ones[0].flawed(flaw))?;
        }
        for (turn, at) in in_turns(run.effort.rounds, entrants.len()) {
            let entrant = &mut entrants[at];
            let pages = |of: usize| &orders[of][turn % orders[of].len()];
            if pages(0).len() > SMALL && orders[0].len() == 1 {
                // A small file is in the processor's cache; another row's was before.
                entrant.reader.round(pages(0), part.is_whole).map_err(|flaw| ones[at].flawed(flaw))?;
            }
            let one = run.rounds.undisturbed(|| {
                let before = preemptions();
                let elapsed = entrant.reader.round(pages(0), part.is_whole);
                elapsed.map(|elapsed| (elapsed, preemptions() != before))
            });
            let one = one.map_err(|flaw| ones[at].flawed(flaw))?;
            ones[at].samples.push(sample(one));
            if let Some(other) = other {
                let two = run.rounds.undisturbed(|| both(entrant, other, pages(0), pages(1), part, &twos[at]))?;
                twos[at].samples.push(sample(two));
            }
        }
        records.extend(ones.into_iter().chain(twos).filter_map(CellSamples::record));
    }
    Ok(records)
}

fn sample(elapsed: Duration) -> Sample {
    Sample::whole(elapsed.as_nanos() as f64 / READS as f64)
}

/// Both threads read at once. The mean of their times.
fn both(
    entrant: &mut Entrant,
    other: &Other,
    pages: &Arc<[u32]>,
    others: &Arc<[u32]>,
    part: Part,
    cell: &CellSamples,
) -> Result<(Duration, bool), Error> {
    let Some(reader) = entrant.second.take() else { return Err(Error::WorkerDied) };
    let gate = Arc::new(Gate::default());
    other.send(Job { reader, pages: Arc::clone(others), is_whole: part.is_whole, gate: Arc::clone(&gate) })?;
    gate.pass();
    let before = preemptions();
    let mine = entrant.reader.round(pages, part.is_whole);
    let is_disturbed = preemptions() != before;
    let (reader, theirs, is_other_disturbed) = other.answer()?;
    entrant.second = Some(reader);
    let mine = mine.map_err(|flaw| cell.flawed(flaw))?;
    let theirs = theirs.map_err(|flaw| cell.flawed(Flaw::Failed(flaw)))?;
    Ok(((mine + theirs) / 2, is_disturbed || is_other_disturbed))
}

/// The pages of each round: one round's for a small file, and for a large one those of as many rounds as it has.
fn orders_of(part: Part, pages: usize, seed: u64) -> Vec<Arc<[u32]>> {
    let mut rng = fastrand::Rng::with_seed(seed);
    // The second thread reads another part of the file.
    let first = if seed.is_multiple_of(2) { 0 } else { pages / 2 };
    let rounds = (pages / READS).max(1);
    let page = |at: usize| ((first + at) % pages) as u32;
    if pages <= READS {
        let mut all: Vec<u32> = (0..pages).map(page).collect();
        if part.is_random {
            rng.shuffle(&mut all);
        }
        return vec![all.into_iter().cycle().take(READS).collect()];
    }
    let order = |round: usize| -> Arc<[u32]> {
        match part.is_random {
            true => (0..READS).map(|_| rng.u32(..pages as u32)).collect(),
            false => (round * READS..(round + 1) * READS).map(page).collect(),
        }
    };
    (0..rounds).map(order).collect()
}
