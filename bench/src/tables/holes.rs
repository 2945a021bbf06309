//! `holes`: 1 to 64 pages at a time leave an array that is held, and are replaced. Filling the holes and freeing the
//! pages are timed separately. The pages are freed in random order, and the list begins in random order, so that it is
//! in no order. Each part of the table has its holes in other places.

use std::time::Duration;

use crate::Error;
use crate::record::Record;
use crate::rows::Kind;
use crate::rows::holes::{HoleRow, Lane, Places, rows};
use crate::subject::{ListOrder, Parts};
use crate::tables::{CellSamples, Entrant, Run, Sample, measured};

/// Slots of the array. 259 is no power of two, and no multiple of the slots that one step of the search covers.
pub(crate) const SLOTS: [usize; 4] = [64, 256, 259, 1024];

/// The parts of the table.
pub(crate) const PLACES: [(&str, Places); 4] = [
    ("holes-random", Places::Random),
    ("holes-first", Places::First),
    ("holes-last", Places::Last),
    ("holes-spread", Places::Spread),
];

pub(crate) fn holes(run: &mut Run) -> Result<Vec<Record>, Error> {
    let rows = run.asked_for(rows());
    let mut records = Vec::new();
    for slots in SLOTS {
        run.progress.set_message(format!("holes of {slots}"));
        let mut lanes = run.open_all(&rows, slots);
        for (bench, places) in PLACES {
            records.extend(of_places(run, bench, places, slots, &mut lanes)?);
        }
        run.progress.inc(1);
    }
    Ok(records)
}

fn of_places(
    run: &Run,
    bench: &'static str,
    places: Places,
    slots: usize,
    lanes: &mut [Entrant<usize, Box<dyn Lane>>],
) -> Result<Vec<Record>, Error> {
    let mut rng = fastrand::Rng::with_seed(run.seed);
    let cell = |row: &HoleRow| CellSamples {
        seed: Some(run.seed),
        order: (row.kind == Kind::Ours).then_some(ListOrder::Random),
        ..CellSamples::new(bench, row.row_name(), slots)
    };
    let cells = lanes.iter().map(|lane| cell(lane.row)).collect();
    let prove = |lane: &mut Entrant<_, Box<dyn Lane>>| lane.opened.verify();
    measured(run, cells, lanes, 1, prove, |lane, reps| {
        let (parts, pages) = lane.opened.rounds(places, reps, &mut rng)?;
        Ok((sample(parts, pages, reps, run.clock_ns), parts.alloc + parts.free))
    })
}

/// Nanoseconds for each page that left, less the clock's cost in each half.
fn sample(parts: Parts, pages: usize, reps: usize, clock_ns: f64) -> Sample {
    let half = |time: Duration| ((time.as_nanos() as f64 - clock_ns * reps as f64) / pages as f64).max(0.0);
    let (alloc, free) = (half(parts.alloc), half(parts.free));
    Sample { alloc: Some(alloc), free: Some(free), total: alloc + free }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Machine;
    use crate::rows::catalogue;
    use crate::tables::Effort;

    #[test]
    fn every_row_has_a_record_for_each_array_and_each_place() {
        let machine = Machine::unknown();
        let wanted = ["pagemill-array", "tls-vec", "mutex-vec", "glibc"];
        let rows: Vec<_> = catalogue().into_iter().filter(|row| wanted.contains(&row.name)).collect();
        let mut run = Run::for_test(&machine, &rows, Effort { rounds: 2, round: Duration::from_micros(1) });
        let records = holes(&mut run).unwrap();
        let absent = run.absent.len();
        run.absent.iter().for_each(|why| println!("skipped: {why}"));
        assert_eq!(records.len(), (4 - absent) * SLOTS.len() * PLACES.len(), "glibc fills no arrays");
        assert!(records.iter().all(|record| record.alloc.is_some() && record.free.is_some() && record.seed.is_some()));
    }

    #[test]
    fn clock_cost_is_subtracted_from_each_half() {
        let parts = Parts { alloc: Duration::from_nanos(500), free: Duration::from_nanos(100) };
        let sample = sample(parts, 50, 10, 20.0);
        assert_eq!((sample.alloc, sample.free, sample.total), (Some(6.0), Some(0.0), 6.0));
    }
}
