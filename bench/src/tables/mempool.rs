//! `mempool`: 256 pages an operation from a pool with a reserve of 256, allocated and freed, with an allocator that has
//! pages and with one that has none. Also how long requests wait for each other when several threads need the whole
//! reserve and there are no other pages; these figures are nanoseconds a request, not a page.

use std::time::Instant;

use pagemill::{Bulk, Gfp, Page, PageMempool};

use crate::Error;
use crate::machine;
use crate::record::Record;
use crate::rows::mempool::{POOL_PAGES, pool, rows};
use crate::rows::{Kind, Row, backend_named};
use crate::stats::Spread;
use crate::tables::Run;
use crate::tables::one_thread::{Entrant, Loop, cells};

/// The percentiles of the waits that are shown.
pub(crate) const PERCENTILES: [(&str, f64); 5] = [
    ("mempool-wait-p50", 0.5),
    ("mempool-wait-p90", 0.9),
    ("mempool-wait-p99", 0.99),
    ("mempool-wait-p99.9", 0.999),
    ("mempool-wait-max", 1.0),
];

/// Threads that take turns with one reserve.
pub(crate) const WAITERS: usize = 8;
/// Requests of each, at full effort.
const REQUESTS: usize = 2000;

pub(crate) fn mempool(run: &mut Run) -> Result<Vec<Record>, Error> {
    let is_shown = |(_, row): &(&str, Row)| row.backend == run.backend;
    let rows: Vec<(&str, Row)> = rows().into_iter().filter(is_shown).collect();
    let mut entrants: Vec<Entrant> =
        rows.iter().filter_map(|(bench, row)| Entrant::open(run, bench, row, POOL_PAGES)).collect();
    run.progress.set_message("mempool");
    let mut present: Vec<&mut Entrant> = entrants.iter_mut().collect();
    let mut records = cells(run, Loop::Batch, POOL_PAGES, &mut present, run.effort.rounds)?;
    run.progress.set_message("mempool: waits");
    match pool(backend_named(run.backend), true) {
        Ok((_allocator, pool, _rest)) => {
            let waits = waits(&pool, &run.machine.allowed, REQUESTS * run.effort.rounds / 11);
            records.extend(PERCENTILES.map(|(bench, at)| percentile(run, bench, at, &waits)));
        }
        Err(why) => run.run.note_absent("mempool-wait", run.run.backend, &why),
    }
    run.progress.inc(1);
    Ok(records)
}

/// How long each request of each thread took, in nanoseconds, sorted. Each request takes the whole reserve, writes a
/// byte to each page and frees them.
fn waits(pool: &PageMempool, allowed: &[usize], requests: usize) -> Vec<f64> {
    let of_one = || {
        // On any processor: the measuring thread, which starts these, is bound to one.
        let _ = machine::pin_to_all(allowed);
        let mut slots: Vec<Option<Page>> = (0..POOL_PAGES).map(|_| None).collect();
        let mut waits = Vec::with_capacity(requests);
        for _ in 0..requests {
            let start = Instant::now();
            let served = pool.alloc_bulk_array_raw(Bulk::exact(POOL_PAGES).gfp(Gfp::NOIO), &mut slots);
            waits.push(start.elapsed().as_nanos() as f64);
            assert!(served.is_ok(), "a request that may wait is served: {served:?}");
            slots.iter_mut().flatten().for_each(|page| page[0] = 1);
            pool.free_bulk_raw(&mut slots);
        }
        waits
    };
    let mut all = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..WAITERS).map(|_| scope.spawn(of_one)).collect();
        threads.into_iter().filter_map(|thread| thread.join().ok()).flatten().collect::<Vec<f64>>()
    });
    all.sort_by(f64::total_cmp);
    all
}

fn percentile(run: &Run, bench: &'static str, at: f64, waits: &[f64]) -> Record {
    let place = ((waits.len() as f64 * at).ceil() as usize).clamp(1, waits.len()) - 1;
    let wait = waits[place];
    let (row, spread) = (("mempool-array", run.backend, Kind::Ours), Spread { median: wait, min: wait, max: wait });
    Record { runs: waits.len(), ..Record::of(bench, row, POOL_PAGES, spread) }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::machine::Machine;
    use crate::tables::Effort;

    #[test]
    fn every_form_and_every_percentile_has_a_record() {
        let machine = Machine::unknown();
        let effort = Effort { rounds: 2, round: Duration::from_micros(1) };
        let mut run = Run::for_test(&machine, &[], effort);
        run.backend = "portable";
        let records = mempool(&mut run).unwrap();
        for bench in ["mempool", "mempool-dry"] {
            for name in ["mempool-single", "mempool-array-raw", "mempool-callback"] {
                assert!(records.iter().any(|r| (r.bench, r.name) == (bench, name) && r.total.median > 0.0), "{name}");
            }
        }
        let waits: Vec<f64> =
            records.iter().filter(|r| r.bench.starts_with("mempool-wait")).map(|r| r.total.median).collect();
        assert_eq!(waits.len(), PERCENTILES.len());
        assert!(waits.is_sorted(), "{waits:?}");
    }
}
