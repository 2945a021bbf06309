//! `total`: a total of pages, a few in each call, as in the table that was published for Linux 3.10.
//!
//! The figure is the time of allocating the whole total. Freeing it, always by one bulk call, is timed separately. Each
//! row has an allocator of its own. Only the default backend is shown.

use crate::Error;
use crate::record::Record;
use crate::rows::{Row, total_rows};
use crate::subject::ListOrder;
use crate::tables::Run;
use crate::tables::one_thread::{Entrant, Loop, cells};

/// The parts of the table, and how many pages each asks for in a call.
pub(crate) const PER_CALL: [(&str, usize); 6] =
    [("total-1", 1), ("total-2", 2), ("total-4", 4), ("total-8", 8), ("total-16", 16), ("total-32", 32)];

/// The orders in which the total was freed before it is allocated again.
pub(crate) const ORDERS: [ListOrder; 2] = [ListOrder::Random, ListOrder::InOrder];

/// The totals, in pages: 128 KiB to 1 GiB.
pub(crate) fn sizes() -> Vec<usize> {
    (5..=18).map(|k| 1 << k).collect()
}

/// A total as the published table writes it.
pub(crate) fn published_size(pages: usize) -> String {
    match pages * 4 {
        kib if kib < 1 << 10 => format!("{kib} KB"),
        kib if kib < 1 << 20 => format!("{} MB", kib >> 10),
        kib => format!("{} GB", kib >> 20),
    }
}

pub(crate) fn total(run: &mut Run) -> Result<Vec<Record>, Error> {
    of_sizes(run, &sizes())
}

fn of_sizes(run: &mut Run, sizes: &[usize]) -> Result<Vec<Record>, Error> {
    let most = sizes.iter().copied().max().unwrap_or(0);
    let is_shown = |(_, row): &(&str, Row)| run.is_shown_once(row.name, row.backend);
    let rows: Vec<(&str, Row)> = total_rows().into_iter().filter(is_shown).collect();
    let mut entrants: Vec<Entrant> =
        rows.iter().flat_map(|(bench, row)| Entrant::in_orders(run, bench, row, most, &ORDERS)).collect();
    let mut records = Vec::new();
    for &n in sizes {
        run.progress.set_message(format!("total {}", published_size(n)));
        let mut present: Vec<&mut Entrant> = entrants.iter_mut().collect();
        records.extend(cells(run, Loop::Halves, n, &mut present, run.effort.rounds)?);
        run.progress.inc(1);
    }
    Ok(records)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::machine::{Machine, pin_to};
    use crate::published::Published;
    use crate::rows::catalogue;
    use crate::tables::Effort;

    #[test]
    fn the_published_table_has_every_size_and_every_number_a_call() {
        let published = Published::load().unwrap();
        let linux = published.table("linux-buddy-2013").unwrap();
        assert_eq!((sizes().len(), sizes()[0] * 4096, sizes()[13] * 4096), (14, 128 << 10, 1 << 30));
        for n in sizes() {
            for (_, per_call) in PER_CALL {
                assert!(linux.find(&published_size(n), &per_call.to_string()).is_some(), "{n} by {per_call}");
            }
        }
        assert_eq!(linux.find(&published_size(1 << 18), "16").as_deref(), Some("24876"));
    }

    #[test]
    fn every_number_a_call_and_the_single_path_have_a_record_on_one_backend() {
        // A thread that moved to another processor would use another list.
        pin_to(Machine::here().main_cpu()).unwrap();
        let machine = Machine::unknown();
        let rows = catalogue();
        let effort = Effort { rounds: 2, round: Duration::from_micros(1) };
        for (backend, shown) in [("rseq", "rseq"), ("portable", "portable")] {
            let mut run = Run::for_test(&machine, &rows, effort);
            run.backend = backend;
            let records = of_sizes(&mut run, &[32, 1000]).unwrap();
            if !run.absent.is_empty() {
                run.absent.iter().for_each(|why| println!("skipped: {why}"));
                continue;
            }
            assert_eq!(records.len(), 7 * 2 * ORDERS.len());
            assert!(records.iter().all(|record| record.backend == shown && record.alloc.is_some()));
            for (bench, _) in PER_CALL {
                assert!(records.iter().any(|r| (r.bench, r.name, r.n) == (bench, "pagemill-array", 1000)), "{bench}");
            }
        }
        let one: Vec<Row> = catalogue().into_iter().filter(|row| row.name == "pagemill-single").collect();
        let records = of_sizes(&mut Run::for_test(&machine, &one[1..], effort), &[32]).unwrap();
        assert_eq!(records.len(), ORDERS.len(), "the backend that is left");
        assert_eq!((records[0].bench, records[0].name, records[0].backend), ("total-1", "pagemill-single", "portable"));
    }
}
