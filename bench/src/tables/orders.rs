//! `orders`: blocks of 2 to 512 pages. One block allocated and freed repeatedly, timed as a whole; and 64 blocks
//! allocated, then freed in random order, with a clock around each half, from a zone whose pageblocks are whole and
//! from a worn one. Pagemill has a bulk form for 64 blocks; the peers allocate them one by one. `pagemill-contig` allocates
//! runs of as many neighbouring pages, one by one.

use crate::Error;
use crate::record::Record;
use crate::rows::dma::{Lane, Shape};
use crate::rows::orders::rows;
use crate::subject::PAGE_BYTES;
use crate::tables::{CellSamples, Entrant, Run, Sample, measured};
use std::ops::RangeInclusive;

/// The orders that are measured, ascending.
pub(crate) const ORDERS: [usize; 9] = [1, 2, 3, 4, 5, 6, 7, 8, 9];

/// The parts of the table, and how many blocks are out in each.
pub(crate) const ONE: &str = "orders-1";
pub(crate) const MANY: &str = "orders-64";
/// The part with a worn zone, which has hardly a block above order 6.
pub(crate) const WORN: &str = "orders-64-worn";
pub(crate) const WORN_ORDERS: RangeInclusive<usize> = 1..=6;
pub(crate) const BLOCKS: usize = 64;

/// A record's `n` is the order of a block; its time is nanoseconds a block.
pub(crate) fn orders(run: &mut Run) -> Result<Vec<Record>, Error> {
    let (whole, worn) = (run.asked_for(rows(false)), run.asked_for(rows(true)));
    let mut records = Vec::new();
    for order in ORDERS {
        run.progress.set_message(format!("orders: {order}"));
        for (bench, rows, blocks) in [(ONE, &whole, 1), (MANY, &whole, BLOCKS), (WORN, &worn, BLOCKS)] {
            if bench == WORN && !WORN_ORDERS.contains(&order) {
                continue;
            }
            let shape = Shape { bytes: PAGE_BYTES << order, blocks };
            let mut lanes = run.open_all(rows, shape);
            records.extend(of_blocks(run, bench, order, blocks, &mut lanes)?);
        }
        run.progress.inc(1);
    }
    Ok(records)
}

fn of_blocks(
    run: &Run,
    bench: &'static str,
    order: usize,
    blocks: usize,
    lanes: &mut [Entrant<Shape, Box<dyn Lane>>],
) -> Result<Vec<Record>, Error> {
    let mut rng = fastrand::Rng::with_seed(run.seed);
    let seed = (blocks > 1).then_some(run.seed);
    let cells =
        lanes.iter().map(|lane| CellSamples { seed, ..CellSamples::new(bench, lane.row.row_name(), order) }).collect();
    let prove = |lane: &mut Entrant<_, Box<dyn Lane>>| lane.opened.verify();
    measured(run, cells, lanes, 1, prove, |lane, reps| {
        if blocks > 1 {
            let parts = lane.opened.shuffled_rounds(reps, &mut rng)?;
            return Ok((Sample::from_parts(parts, blocks, reps, run.clock_ns), parts.alloc + parts.free));
        }
        let elapsed = lane.opened.rounds(reps)?;
        Ok((Sample::whole(elapsed.as_nanos() as f64 / reps as f64), elapsed))
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::machine::Machine;
    use crate::rows::catalogue;
    use crate::tables::Effort;

    #[test]
    fn every_row_has_a_record_for_each_order() {
        let machine = Machine::unknown();
        let wanted = ["pagemill-single", "pagemill-array", "buddy-system", "mutex-vec"];
        let rows: Vec<_> = catalogue().into_iter().filter(|row| wanted.contains(&row.name)).collect();
        let mut run = Run::for_test(&machine, &rows, Effort { rounds: 2, round: Duration::from_micros(1) });
        let records = orders(&mut run).unwrap();
        run.absent.iter().for_each(|why| println!("skipped: {why}"));
        let cells = ORDERS.len() * 2 + WORN_ORDERS.count();
        assert_eq!(records.len(), (7 - run.absent.len()) * cells, "a pool of pages has no blocks");
        assert!(records.iter().all(|record| record.alloc.is_some() == (record.bench != ONE) && record.total.min > 0.0));
    }

    /// Checks that blocks are aligned to their size and do not overlap.
    #[test]
    fn every_row_hands_out_blocks_of_its_order() {
        let rows =
            [false, true].into_iter().flat_map(|is_worn| rows(is_worn).into_iter().map(move |row| (is_worn, row)));
        for (is_worn, row) in rows {
            for order in ORDERS.into_iter().filter(|order| !is_worn || WORN_ORDERS.contains(order)) {
                let shape = Shape { bytes: PAGE_BYTES << order, blocks: BLOCKS };
                let Ok(mut lane) = (row.open)(shape) else {
                    println!("skipped {} {}", row.name, row.backend);
                    continue;
                };
                lane.verify().unwrap_or_else(|flaw| panic!("{} {} at {order}: {flaw}", row.name, row.backend));
                lane.shuffled_rounds(2, &mut fastrand::Rng::with_seed(1)).unwrap();
                lane.verify().unwrap_or_else(|flaw| panic!("{} {} at {order}: {flaw}", row.name, row.backend));
            }
        }
    }
}
