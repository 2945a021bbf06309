//! `page-pool`: pages that go to and fro between a consumer and those that it hands them to.
//!
//! - *out and back*: the consumer takes N pages and puts them back, timed as a whole: the last one first (`lifo`), the
//!   first one first (`fifo`), or shuffled. The order is written down beforehand, and no clock is inside.
//! - *refill*: the pool's requests of the allocator, in bulk and one by one, from lists in random order and in order;
//!   and taking the pages from the pool for good.
//! - *returned*: a second thread, on a processor of its own, puts the pages back (`returned`).
//! - *device*: 64 pages against one block of 64 pages, with device addresses. The pages are shuffled between the
//!   halves; each half has a clock around it.

mod returned;

use crate::Error;
use crate::record::Record;
use crate::rows::Kind;
use crate::rows::dma::Lane as PieceLane;
use crate::rows::page_pool::device::{self, Mapping};
use crate::rows::page_pool::refill::{self, REFILL_PAGES, Refilled, Timed};
use crate::rows::page_pool::{BULK, IN_BULK, Lane, LaneRow, rows};
use crate::subject::ListOrder;
use crate::tables::{CellSamples, Entrant, Run, Sample, measured};

pub(crate) use returned::RETURNED;

/// Pages that the consumer has out: one, a bulk call's, as many as the cache holds, more than it holds.
pub(crate) const SIZES: [usize; 4] = [1, BULK, 128, 1024];

/// The order in which pages come back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Back {
    Lifo,
    Fifo,
    Shuffled,
}

/// The parts of *out and back*. A single page has only one order, which stands under the first.
pub(crate) const ORDERS: [(&str, Back); 3] =
    [("page-pool-lifo", Back::Lifo), ("page-pool-fifo", Back::Fifo), ("page-pool-shuffled", Back::Shuffled)];

impl Back {
    fn places(self, n: usize, rng: &mut fastrand::Rng) -> Vec<u16> {
        let mut places: Vec<u16> = (0..n as u16).collect();
        match self {
            Back::Lifo => places.reverse(),
            Back::Fifo => {}
            Back::Shuffled => rng.shuffle(&mut places),
        }
        places
    }
}

/// The pool's requests alone.
pub(crate) const REFILL: &str = "page-pool-refill";
/// The part of them that is not the pool's.
pub(crate) const SOURCE: &str = "page-pool-source";
/// The orders of the list from which it is refilled.
pub(crate) const LIST_ORDERS: [ListOrder; 2] = [ListOrder::Random, ListOrder::InOrder];

/// The parts of *device*: how memory is mapped.
pub(crate) const MAPPINGS: [(&str, Mapping); 3] = [
    ("page-pool-device-once", Mapping::Once),
    ("page-pool-device-table", Mapping::Table),
    ("page-pool-device-pinned", Mapping::Pinned),
];

/// Steps of progress.
pub(crate) const STEPS: usize = SIZES.len() + 3;

pub(crate) fn page_pool(run: &mut Run) -> Result<Vec<Record>, Error> {
    let rows: Vec<LaneRow> = rows(run.backend).into_iter().filter(|row| is_shown(run, row.name, row.kind)).collect();
    let mut records = Vec::new();
    for n in SIZES {
        run.progress.set_message(format!("page-pool: {n} out and back"));
        records.extend(out_and_back(run, &rows, n)?);
        run.progress.inc(1);
    }
    let has_ours = run.rows.iter().any(|row| row.kind == Kind::Ours);
    run.progress.set_message("page-pool: refill");
    if has_ours {
        records.extend(refill(run)?);
    }
    run.progress.inc(1);
    run.progress.set_message("page-pool: returned");
    records.extend(returned::returned(run)?);
    run.progress.inc(1);
    run.progress.set_message("page-pool: device");
    if has_ours {
        records.extend(device(run)?);
    }
    run.progress.inc(1);
    Ok(records)
}

/// Whether this row takes part: a peer if it was named (`rte-mempool-64` by `rte-mempool`), our rows and floors if any
/// row of their kind was.
fn is_shown(run: &Run, name: &str, kind: Kind) -> bool {
    run.rows
        .iter()
        .any(|known| known.kind == kind && (kind != Kind::Peer || name.trim_end_matches(IN_BULK) == known.name))
}

fn out_and_back(run: &mut Run, rows: &[LaneRow], n: usize) -> Result<Vec<Record>, Error> {
    let mut lanes = run.open_all(rows, n);
    lanes.retain(|lane| n >= BULK || !lane.row.name.ends_with(IN_BULK));
    let mut rng = fastrand::Rng::with_seed(run.seed);
    let mut records = Vec::new();
    for (bench, order) in ORDERS.into_iter().take(if n == 1 { 1 } else { ORDERS.len() }) {
        let back = order.places(n, &mut rng);
        let seed = (order == Back::Shuffled).then_some(run.seed);
        let cell = |lane: &Entrant<_, _>| CellSamples { seed, ..CellSamples::new(bench, lane.row.row_name(), n) };
        let cells = lanes.iter().map(cell).collect();
        let prove = |lane: &mut Entrant<_, Box<dyn Lane>>| lane.opened.verify(&back);
        records.extend(measured(run, cells, &mut lanes, 1, prove, |lane, reps| {
            let elapsed = lane.opened.rounds(&back, reps)?;
            Ok((Sample::whole(elapsed.as_nanos() as f64 / (n * reps) as f64), elapsed))
        })?);
    }
    Ok(records)
}

fn refill(run: &mut Run) -> Result<Vec<Record>, Error> {
    let rows = refill::rows(run.backend);
    let mut pools = run.open_all(&rows, ());
    let mut records = Vec::new();
    for order in LIST_ORDERS {
        for (bench, timed) in [(REFILL, Timed::Refill), (SOURCE, Timed::Source)] {
            let seed = (order == ListOrder::Random).then_some(run.seed);
            let cell = |row| CellSamples { seed, order: Some(order), ..CellSamples::new(bench, row, REFILL_PAGES) };
            let cells = pools.iter().map(|entrant| cell(entrant.row.row_name())).collect();
            let rng = std::cell::RefCell::new(fastrand::Rng::with_seed(run.seed));
            let prove =
                |entrant: &mut Entrant<_, Box<dyn Refilled>>| entrant.opened.verify(order, &mut rng.borrow_mut());
            records.extend(measured(run, cells, &mut pools, 1, prove, |entrant, reps| {
                let elapsed = entrant.opened.rounds(timed, order, reps, &mut rng.borrow_mut())?;
                let ns = elapsed.as_nanos() as f64 - run.clock_ns * reps as f64;
                Ok((Sample::whole((ns / (REFILL_PAGES * reps) as f64).max(0.0)), elapsed))
            })?);
        }
    }
    Ok(records)
}

fn device(run: &mut Run) -> Result<Vec<Record>, Error> {
    let mut records = Vec::new();
    for (bench, mapping) in MAPPINGS {
        let rows = device::rows(run.backend, mapping);
        let mut lanes = Vec::new();
        for (row, shape) in &rows {
            lanes.extend(run.open(row, *shape).map(|opened| Entrant { row, opened }));
        }
        let mut rng = fastrand::Rng::with_seed(run.seed);
        let cell = |name| CellSamples { seed: Some(run.seed), ..CellSamples::new(bench, name, BULK) };
        let cells = lanes.iter().map(|lane| cell(lane.row.row_name())).collect();
        let prove = |lane: &mut Entrant<_, Box<dyn PieceLane>>| lane.opened.verify();
        records.extend(measured(run, cells, &mut lanes, 1, prove, |lane, reps| {
            let parts = lane.opened.shuffled_rounds(reps, &mut rng)?;
            Ok((Sample::from_parts(parts, BULK, reps, run.clock_ns), parts.alloc + parts.free))
        })?);
    }
    Ok(records)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::machine::{Machine, pin_to};
    use crate::rows::catalogue;
    use crate::rows::page_pool::device::{BLOCK, PAGES, POOL_BLOCK, POOL_PAGES};
    use crate::rows::page_pool::returned as crossing;
    use crate::tables::Effort;

    #[test]
    fn every_row_and_part_has_a_record_or_a_reason() {
        let machine = Machine::here();
        // A thread that moved to another processor would use another list.
        pin_to(machine.main_cpu()).unwrap();
        let all = catalogue();
        let effort = Effort { rounds: 2, round: Duration::from_micros(1) };
        for backend in ["rseq", "portable"] {
            let mut run = Run::for_test(&machine, &all, effort);
            run.backend = backend;
            let records = page_pool(&mut run).unwrap();
            run.absent.iter().for_each(|why| println!("skipped: {why}"));
            let is_absent = |name: &str| run.absent.iter().any(|why| why.starts_with(name));
            let check = |bench: &str, name: &str, n: usize| {
                let has = records.iter().any(|r| (r.bench, r.name, r.n) == (bench, name, n) && r.total.min > 0.0);
                assert!(has || is_absent(name), "{bench}: {name} at {n}");
            };
            for row in rows(backend) {
                for n in SIZES.into_iter().filter(|&n| n >= BULK || !row.name.ends_with(IN_BULK)) {
                    let orders = ORDERS.into_iter().take(if n == 1 { 1 } else { 3 });
                    orders.for_each(|(bench, _)| check(bench, row.name, n));
                }
            }
            for bench in [REFILL, SOURCE] {
                refill::rows(backend).iter().for_each(|row| check(bench, row.name, REFILL_PAGES));
            }
            if machine.second_cpu().is_some() {
                crossing::rows(backend).iter().for_each(|row| check(RETURNED, row.name, BULK));
            }
            for (bench, _) in MAPPINGS {
                [PAGES, BLOCK, POOL_PAGES, POOL_BLOCK].iter().for_each(|name| check(bench, name, BULK));
            }
            let ours = records.iter().filter(|record| record.kind == Kind::Ours);
            assert!(ours.clone().count() > 0 && ours.clone().all(|record| record.backend == backend));
            let refills: Vec<_> = records.iter().filter(|record| record.bench == REFILL).collect();
            assert!(refills.iter().all(|record| record.seed.is_some() == (record.order == Some(ListOrder::Random))));
        }
    }

    #[test]
    fn only_requested_rows_take_part() {
        let machine = Machine::here();
        let effort = Effort { rounds: 1, round: Duration::from_micros(1) };
        let named = |name: &str| catalogue().into_iter().filter(|row| row.name == name).collect::<Vec<_>>();
        let names = |rows: &[_]| {
            let mut run = Run::for_test(&machine, rows, effort);
            let mut names: Vec<_> = page_pool(&mut run).unwrap().iter().map(|record| record.name).collect();
            names.sort_unstable();
            names.dedup();
            names
        };
        assert_eq!(names(&named("array-queue")), ["array-queue"]);
        assert!(names(&named("glibc")).is_empty(), "it is in other tables alone");
    }

    #[test]
    fn each_order_has_every_place_once() {
        let mut rng = fastrand::Rng::with_seed(1);
        assert_eq!(Back::Lifo.places(3, &mut rng), [2, 1, 0]);
        assert_eq!(Back::Fifo.places(3, &mut rng), [0, 1, 2]);
        let mut shuffled = Back::Shuffled.places(1024, &mut rng);
        assert!(!shuffled.is_sorted());
        shuffled.sort_unstable();
        assert_eq!(shuffled, Back::Fifo.places(1024, &mut rng));
    }
}
