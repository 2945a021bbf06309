//! `churn`: how many 2 MiB frames are free after 100 rounds of 10 % churn in random order, half full, over 4 GiB.
//!
//! A round frees a tenth of the pages that are held, picked and ordered at random, and allocates as many. In the end
//! the per-CPU lists are drained, and the 2 MiB frames are counted by allocating them until there are none. The ideal
//! is the number of 2 MiB frames if all free pages were together.
//!
//! Half full is reached in two ways, which decide how hard the task is. `in order` allocates half of the memory.
//! `random half` allocates all of it and frees a random half, so that at the start hardly any 2 MiB frame is free.

use std::time::Instant;

use crate::Error;
use crate::record::Record;
use crate::rows::{Row, buddy_churn_row, pagemill_churn_rows};
use crate::stats::Spread;
use crate::subject::PAGE_BYTES;
use crate::tables::Run;

/// Pages of the arena: 4 GiB.
pub(crate) const CHURN_PAGES: usize = (4 << 30) / PAGE_BYTES;

/// Pages of a 2 MiB frame.
pub(crate) const HUGE_PAGES: usize = (2 << 20) / PAGE_BYTES;

const ROUNDS: usize = 100;

/// One in this many pages is churned in a round.
const CHURNED: usize = 10;

/// What `churn` needs of an allocator.
pub(crate) trait Frames {
    /// Pages that the allocator manages.
    fn managed(&self) -> usize;

    /// Pages that are allocated.
    fn held(&self) -> usize;

    /// Allocates `n` more pages. False if there were fewer.
    fn take(&mut self, n: usize) -> bool;

    /// Moves `n` random pages that are held to the end, in random order.
    fn pick(&mut self, n: usize, rng: &mut fastrand::Rng);

    /// Frees the last `n` pages that are held.
    fn put_last(&mut self, n: usize);

    /// Sends the pages on per-CPU lists back to where frames merge.
    fn drain(&mut self);

    /// Counts the free 2 MiB frames by allocating all of them, and frees them.
    fn free_huge(&mut self) -> usize;
}

/// One row of `churn`, opened with a number of pages.
pub(crate) type ChurnRow = Row<usize, Box<dyn Frames>>;

/// The rows that know 2 MiB frames.
pub(crate) fn rows() -> Vec<ChurnRow> {
    let mut rows = pagemill_churn_rows();
    rows.push(buddy_churn_row());
    rows
}

/// Moves `n` random elements to the end, in random order: the first steps of a shuffle.
pub(crate) fn pick_to_the_end<T>(held: &mut [T], n: usize, rng: &mut fastrand::Rng) {
    let len = held.len();
    for last in (len - n.min(len)..len).rev() {
        held.swap(last, rng.usize(..=last));
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Start {
    InOrder,
    RandomHalf,
}

impl Start {
    fn label(self) -> &'static str {
        match self {
            Start::InOrder => "churn-in-order",
            Start::RandomHalf => "churn-random-half",
        }
    }
}

pub(crate) fn churn(run: &mut Run) -> Result<Vec<Record>, Error> {
    let mut records = Vec::new();
    for row in rows().into_iter().filter(|row| is_selected(run.rows, row)) {
        for start in [Start::InOrder, Start::RandomHalf] {
            run.progress.set_message(format!("{}: {} {}", start.label(), row.name, row.backend));
            if let Some(mut frames) = run.open(&row, CHURN_PAGES) {
                records.push(one(&row, start, frames.as_mut(), ROUNDS, run.seed)?);
            }
            run.progress.inc(1);
        }
    }
    Ok(records)
}

fn is_selected(chosen: &[Row], row: &ChurnRow) -> bool {
    chosen.iter().any(|chosen| (chosen.name, chosen.backend) == (row.name, row.backend))
}

/// Steps of progress that the table takes with these rows chosen.
pub(crate) fn steps(chosen: &[Row]) -> usize {
    2 * rows().iter().filter(|row| is_selected(chosen, row)).count()
}

fn one(row: &ChurnRow, start: Start, frames: &mut dyn Frames, rounds: usize, seed: u64) -> Result<Record, Error> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let pages = frames.managed();
    let short = |frames: &dyn Frames| Error::Row {
        bench: start.label(),
        name: row.name,
        backend: row.backend,
        n: pages,
        flaw: format!("ran out of pages with {} of {pages} held", frames.held()),
    };
    let filled = match start {
        Start::InOrder => frames.take(pages / 2),
        Start::RandomHalf => {
            // A reserve may keep the last pages: within a twentieth of all pages the allocator counts as full.
            let filled = frames.take(pages) || frames.held() >= pages / 20 * 19;
            let surplus = frames.held().saturating_sub(pages / 2);
            frames.pick(surplus, &mut rng);
            frames.put_last(surplus);
            filled
        }
    };
    if !filled {
        return Err(short(frames));
    }
    let (mut allocs, mut frees, mut totals) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        let n = frames.held() / CHURNED;
        frames.pick(n, &mut rng);
        let start_time = Instant::now();
        frames.put_last(n);
        let middle = Instant::now();
        let filled = frames.take(n);
        let end = Instant::now();
        if !filled {
            return Err(short(frames));
        }
        let per_page = |time: std::time::Duration| time.as_nanos() as f64 / n as f64;
        frees.push(per_page(middle - start_time));
        allocs.push(per_page(end - middle));
        totals.push(per_page(end - start_time));
    }
    frames.drain();
    let ideal = (pages - frames.held()) / HUGE_PAGES;
    let percent = 100.0 * frames.free_huge() as f64 / ideal.max(1) as f64;
    let nothing = Spread { median: 0.0, min: 0.0, max: 0.0 };
    let total = Spread::of(&totals).unwrap_or(nothing);
    // Without turns: the rows go one after another.
    Ok(Record {
        alloc: Spread::of(&allocs),
        free: Spread::of(&frees),
        runs: rounds,
        ideal_percent: Some(percent),
        seed: Some(seed),
        ..Record::of(start.label(), (row.name, row.backend, row.kind), pages, total)
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn picking_moves_distinct_elements_and_loses_none() {
        let mut rng = fastrand::Rng::with_seed(11);
        let mut held: Vec<u32> = (0..1000).collect();
        pick_to_the_end(&mut held, 100, &mut rng);
        assert_eq!(held.iter().collect::<BTreeSet<_>>().len(), 1000);
        let picked: BTreeSet<u32> = held[900..].iter().copied().collect();
        assert!(picked.iter().any(|&element| element < 500), "the picked ones come from everywhere");
        pick_to_the_end(&mut held, 1000, &mut rng);
        pick_to_the_end(&mut held[..0], 3, &mut rng);
        assert_eq!(held.iter().collect::<BTreeSet<_>>().len(), 1000);
    }

    /// Both starts, small: the counts add up, and the count of frames stays within the ideal.
    #[test]
    fn every_row_keeps_its_pages_through_churn() {
        for row in rows() {
            for start in [Start::InOrder, Start::RandomHalf] {
                let mut frames = match (row.open)(64 * HUGE_PAGES) {
                    Ok(frames) => frames,
                    Err(reason) => {
                        println!("skipped {} {}: {reason}", row.name, row.backend);
                        continue;
                    }
                };
                let record = one(&row, start, frames.as_mut(), 3, 5).unwrap();
                let percent = record.ideal_percent.unwrap();
                assert!((0.0..=100.0).contains(&percent), "{} {}: {percent}", row.name, row.backend);
                assert_eq!(frames.held(), frames.managed() / 2);
                let all = frames.held();
                frames.put_last(all);
                frames.drain();
                assert_eq!(frames.free_huge(), frames.managed() / HUGE_PAGES, "{} {}", row.name, row.backend);
            }
        }
    }
}
