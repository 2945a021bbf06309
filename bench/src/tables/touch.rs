//! `touch`: what it costs when the system commits memory, and what is saved when it need not.
//!
//! Each row allocates 16 MiB of pages and writes a byte to each page. Fresh pages have no memory behind them before; it
//! goes back to the system between two rounds, untimed. Recycled pages keep their memory. Returned pages give it back
//! when they are freed, timed. Before a row is timed, it is checked that the system uses pages of the size that the row
//! names, and that populated pages are committed.

use std::time::{Duration, Instant};

use crate::Error;
use crate::machine::{committed_pages, huge_bytes};
use crate::record::Record;
use crate::rows::{Kind, TouchRow, Unavailable, Written, touch_rows};
use crate::subject::{Flaw, PAGE_BYTES, Parts, check_pages};
use crate::tables::{CellSamples, Run, Sample, enough, take_turns};

/// Pages that are written to: 16 MiB.
pub(crate) const TOUCH_PAGES: usize = 4096;

/// A round lasts this much longer than elsewhere, since the system's part varies a lot.
const LONGER: u32 = 10;

/// Why a row cannot take part, or has failed.
enum Refusal {
    Absent(Unavailable),
    Flawed(Flaw),
}

pub(crate) fn touch(run: &mut Run) -> Result<Vec<Record>, Error> {
    run.progress.set_message("touch");
    let has_others = run.rows.iter().any(|row| row.kind != Kind::Ours);
    let is_shown = |row: &TouchRow| match row.kind {
        Kind::Ours => run.is_shown_once(row.name, row.backend),
        _ => has_others,
    };
    let mut lanes: Vec<Box<dyn Written>> = Vec::new();
    let mut cells: Vec<CellSamples> = Vec::new();
    let mut reps = Vec::new();
    for row in touch_rows().into_iter().filter(is_shown).collect::<Vec<_>>() {
        let cell = CellSamples::new(row.bench, (row.name, row.backend, row.kind), TOUCH_PAGES);
        match open(&row) {
            Ok(mut lane) => {
                let warm = |reps| round(lane.as_mut(), reps).map(|parts| parts.alloc + parts.free);
                reps.push(enough(run.effort.round * LONGER, warm).map_err(|flaw| cell.flawed(flaw))?);
                lanes.push(lane);
                cells.push(cell);
            }
            Err(Refusal::Absent(why)) => run.note_absent(&format!("{} {}", row.bench, row.name), row.backend, &why),
            Err(Refusal::Flawed(flaw)) => return Err(cell.flawed(flaw)),
        }
    }
    take_turns(run, run.effort.rounds, &mut cells, &reps, |at, reps| {
        let parts = round(lanes[at].as_mut(), reps)?;
        Ok::<_, Flaw>(Sample::from_parts(parts, TOUCH_PAGES, reps, run.clock_ns))
    })?;
    run.progress.inc(1);
    Ok(cells.into_iter().filter_map(CellSamples::record).collect())
}

/// Opens a row, and checks that its pages are what it says.
fn open(row: &TouchRow) -> Result<Box<dyn Written>, Refusal> {
    let flawed = Refusal::Flawed;
    let mut lane = (row.open)(TOUCH_PAGES).map_err(Refusal::Absent)?;
    if !lane.take() {
        return Err(flawed(Flaw::Short { wanted: TOUCH_PAGES }));
    }
    let addresses = lane.addresses();
    let (first, last) = (addresses.iter().min(), addresses.iter().max());
    let range = first.copied().unwrap_or(0)..last.map_or(0, |last| last + PAGE_BYTES);
    check_pages(addresses, TOUCH_PAGES).map_err(flawed)?;
    let unreadable = |error: std::io::Error| Refusal::Absent(Unavailable(format!("what is committed: {error}")));
    let committed = committed_pages(&range).map_err(unreadable)?;
    let wanted = if row.bench.ends_with("-populated") { TOUCH_PAGES } else { 0 };
    if committed != wanted {
        return Err(flawed(Flaw::Uncommitted { wanted, committed }));
    }
    lane.touch();
    let huge = huge_bytes(&range).map_err(unreadable)?;
    let is_as_named = if row.is_huge { huge >= range.len() } else { huge == 0 };
    let is_put = lane.put() && lane.renew();
    if !is_put {
        return Err(flawed(Flaw::Kept));
    }
    if !is_as_named {
        let (huge, all) = (huge >> 20, range.len() >> 20);
        let why = format!("the system used 2 MiB pages for {huge} of {all} MiB (transparent_hugepage/enabled)");
        return Err(Refusal::Absent(Unavailable(why)));
    }
    Ok(lane)
}

/// `reps` times: allocates the pages, writes to them, and frees them.
fn round(lane: &mut dyn Written, reps: usize) -> Result<Parts, Flaw> {
    let mut parts = Parts { alloc: Duration::ZERO, free: Duration::ZERO };
    for _ in 0..reps {
        let start = Instant::now();
        let is_complete = lane.take();
        lane.touch();
        let middle = Instant::now();
        let is_put = lane.put();
        let end = Instant::now();
        if !is_complete {
            return Err(Flaw::Short { wanted: TOUCH_PAGES });
        }
        if !is_put || !lane.renew() {
            return Err(Flaw::Kept);
        }
        parts.alloc += middle - start;
        parts.free += end - middle;
    }
    Ok(parts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Machine;
    use crate::rows::catalogue;
    use crate::tables::Effort;

    #[test]
    fn every_row_proves_its_page_size_or_is_absent() {
        let machine = Machine::unknown();
        let rows = catalogue();
        let effort = Effort { rounds: 2, round: Duration::from_micros(1) };
        for backend in ["rseq", "portable"] {
            let mut run = Run::for_test(&machine, &rows, effort);
            run.backend = backend;
            let records = touch(&mut run).unwrap();
            run.absent.iter().for_each(|why| println!("skipped: {why}"));
            assert_eq!(records.len() + run.absent.len(), 9 + 4);
            assert!(records.iter().all(|record| record.alloc.is_some_and(|spread| spread.min > 0.0)));
            let is_shown = |record: &Record| record.backend == backend || record.name == "mmap";
            assert!(records.iter().all(is_shown));
        }
        let ours: Vec<_> = catalogue().into_iter().filter(|row| row.name == "pagemill-single").collect();
        let mut run = Run::for_test(&machine, &ours, effort);
        run.backend = "portable";
        let records = touch(&mut run).unwrap();
        assert!(records.iter().all(|record| (record.bench, record.name) == ("touch-4k", "pagemill-single")));
        assert_eq!(records.len() + run.absent.len(), 1, "no peers where none was asked for");
    }

    /// A row whose memory stays, or that has too few pages.
    struct Broken {
        is_short: bool,
    }

    impl Written for Broken {
        fn take(&mut self) -> bool {
            !self.is_short
        }
        fn touch(&mut self) {}
        fn put(&mut self) -> bool {
            true
        }
        fn renew(&mut self) -> bool {
            false
        }
        fn addresses(&self) -> Vec<usize> {
            Vec::new()
        }
    }

    #[test]
    fn no_time_is_reported_for_pages_that_are_not_fresh_or_too_few() {
        assert_eq!(round(&mut Broken { is_short: true }, 1), Err(Flaw::Short { wanted: TOUCH_PAGES }));
        assert_eq!(round(&mut Broken { is_short: false }, 1), Err(Flaw::Kept));
    }
}
