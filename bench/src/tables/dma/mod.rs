//! `dma`: small blocks as in the self test that was published for Linux's `dma_pool`: all allocated, then all freed in
//! the same order, for five sizes. And small blocks as descriptors of requests in flight: `requests`.
//!
//! A record's `n` is the size of a block. Its time is nanoseconds for allocating and freeing a block, or nanoseconds a
//! request.

pub(crate) mod requests;

use std::time::Duration;

use crate::Error;
use crate::record::Record;
use crate::rows::Kind;
use crate::rows::dma::{BULK, BlockRow, Lane, Shape, rows};
use crate::subject::{Flaw, Parts};
use crate::tables::{self, CellSamples, Effort, Run, Sample, enough, in_turns, measured, take_turn};
use requests::{Bed, Busy};

/// The shapes of the kernel's self test.
pub(crate) const SHAPES: [Shape; 5] = [
    Shape { bytes: 16, blocks: 8192 },
    Shape { bytes: 64, blocks: 8192 },
    Shape { bytes: 256, blocks: 8192 },
    Shape { bytes: 1024, blocks: 2048 },
    Shape { bytes: 4096, blocks: 1024 },
];

/// Steps on the bar that shows progress.
pub(crate) const STEPS: usize = SHAPES.len() + 1;

/// The parts of the table.
pub(crate) const SELF_TEST: &str = "dma";
/// The same, with a word written to each block.
pub(crate) const WRITTEN: &str = "dma-written";
/// All allocated, then freed in random order.
pub(crate) const SHUFFLED: &str = "dma-shuffled";
/// Requests in flight: wall time, and of each read processor time, and the latencies of submission and completion.
pub(crate) const REQUESTS: &str = "dma-requests";
pub(crate) const REQUESTS_CPU: &str = "dma-requests-cpu";
pub(crate) const SUBMISSION: &str = "dma-requests-submission";
pub(crate) const COMPLETION: &str = "dma-requests-completion";

/// How often all blocks are allocated and freed in one turn at full effort: in all turns together as often as in the
/// self test.
const LEAST_ROUNDS: usize = 100usize.div_ceil(Effort::FULL.rounds);

pub(crate) fn dma(run: &mut Run) -> Result<Vec<Record>, Error> {
    let is_shown = |row: &BlockRow| match row.kind {
        Kind::Ours => run.rows.iter().any(|row| row.kind == Kind::Ours),
        // `rte-mempool-bulk` goes with `rte-mempool`.
        _ => run.rows.iter().any(|known| row.name.trim_end_matches("-bulk") == known.name),
    };
    let rows: Vec<BlockRow> = rows(run.backend).into_iter().filter(is_shown).collect();
    let mut records = Vec::new();
    for shape in SHAPES {
        run.progress.set_message(format!("dma {} B", shape.bytes));
        records.extend(self_test(run, &rows, shape)?);
        run.progress.inc(1);
    }
    run.progress.set_message("dma: requests");
    match Bed::new(run.seed) {
        Ok(mut bed) => records.extend(in_flight(run, &rows, &mut bed)?),
        Err(why) => run.note_absent(REQUESTS, "-", &why),
    }
    run.progress.inc(1);
    Ok(records)
}

/// A row that takes part.
type Entrant<'r> = tables::Entrant<'r, Shape, Box<dyn Lane>>;

/// DPDK's loops are in C, which hold its blocks.
fn is_in_c(row: &BlockRow) -> bool {
    row.name.starts_with("rte-mempool")
}

/// Measures one size: all rows, then the parts with a word written and with random order.
fn self_test(run: &mut Run, rows: &[BlockRow], shape: Shape) -> Result<Vec<Record>, Error> {
    let mut entrants = run.open_all(rows, shape);
    let of_all = |time: Duration, reps: usize| time.as_nanos() as f64 / (shape.blocks * reps) as f64;
    let least = if run.effort.rounds >= Effort::FULL.rounds { LEAST_ROUNDS } else { 1 };
    let mut records = timed(run, entrants.iter_mut().collect(), SELF_TEST, shape, least, |lane, reps| {
        Ok(Sample::whole(of_all(lane.rounds(reps)?, reps)))
    })?;
    // They are measured only in the self test's order.
    entrants.retain(|entrant| !is_in_c(entrant.row));
    let ours = entrants.iter_mut().filter(|entrant| entrant.row.kind == Kind::Ours).collect();
    records.extend(timed(run, ours, WRITTEN, shape, 1, |lane, reps| {
        Ok(Sample::whole(of_all(lane.written_rounds(reps)?, reps)))
    })?);
    // Last: the pools are out of order afterwards.
    let mut rng = fastrand::Rng::with_seed(run.seed);
    let shuffled = timed(run, entrants.iter_mut().collect(), SHUFFLED, shape, 1, |lane, reps| {
        let parts = lane.shuffled_rounds(reps, &mut rng)?;
        Ok(Sample::from_parts(parts, shape.blocks, reps, run.clock_ns))
    })?;
    records.extend(shuffled.into_iter().map(|record| Record { seed: Some(run.seed), ..record }));
    Ok(records)
}

fn timed(
    run: &Run,
    mut entrants: Vec<&mut Entrant>,
    bench: &'static str,
    shape: Shape,
    least: usize,
    mut round: impl FnMut(&mut dyn Lane, usize) -> Result<Sample, Flaw>,
) -> Result<Vec<Record>, Error> {
    let cells = entrants.iter().map(|it| CellSamples::new(bench, it.row.row_name(), shape.bytes)).collect();
    // At least two: a turn with one repetition is not warmed up.
    let prove = |entrant: &mut &mut Entrant| entrant.opened.verify();
    let mut records = measured(run, cells, &mut entrants, least.max(2), prove, |entrant, reps| {
        let sample = round(entrant.opened.as_mut(), reps)?;
        Ok((sample, Duration::from_nanos((sample.total * (shape.blocks * reps) as f64) as u64)))
    })?;
    for (entrant, record) in entrants.iter().zip(&mut records) {
        record.bytes_a_block = entrant.opened.bytes_a_block();
    }
    Ok(records)
}

fn in_flight(run: &mut Run, rows: &[BlockRow], bed: &mut Bed) -> Result<Vec<Record>, Error> {
    let mut entrants: Vec<Entrant> = run.open_all(rows, requests::SHAPE);
    entrants.retain(|entrant| !is_in_c(entrant.row));
    let bytes = requests::SHAPE.bytes;
    let cells_of = |bench| -> Vec<CellSamples> {
        entrants.iter().map(|it| CellSamples::new(bench, it.row.row_name(), bytes)).collect()
    };
    let mut cells = cells_of(REQUESTS);
    let mut of_a_read = [REQUESTS_CPU, SUBMISSION, COMPLETION].map(cells_of);
    let mut batches = Vec::new();
    for (entrant, cell) in entrants.iter_mut().zip(&cells) {
        let lane = entrant.opened.as_mut();
        // Four times as long as elsewhere, since the system's part varies.
        let found = lane
            .verify()
            .and_then(|()| enough(4 * run.effort.round, |batches| lane.requests(bed, batches).map(|busy| busy.wall)));
        batches.push(found.map_err(|flaw| cell.flawed(flaw))?);
    }
    for (_, at) in in_turns(run.effort.rounds, cells.len()) {
        let mut last = (Busy::default(), 1);
        let of_one = |time: Duration, batches| time.as_nanos() as f64 / (batches * BULK) as f64;
        take_turn(run, &mut cells[at], batches[at], |batches| {
            let busy = entrants[at].opened.requests(bed, batches)?;
            last = (busy, batches);
            let parts = Sample::from_parts(Parts { alloc: busy.alloc, free: busy.free }, BULK, batches, run.clock_ns);
            Ok::<_, Flaw>(Sample { total: of_one(busy.wall, batches), ..parts })
        })?;
        let (busy, batches) = last;
        for (cells, time) in of_a_read.iter_mut().zip([busy.cpu, busy.submission, busy.completion]) {
            cells[at].samples.push(Sample::whole(of_one(time, batches)));
        }
    }
    Ok(cells.into_iter().chain(of_a_read.into_iter().flatten()).filter_map(CellSamples::record).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Machine;
    use crate::rows::catalogue;

    #[test]
    fn every_row_and_size_has_a_record_or_a_reason() {
        let machine = Machine::unknown();
        let all = catalogue();
        let effort = Effort { rounds: 2, round: Duration::from_micros(1) };
        for backend in ["rseq", "portable"] {
            let mut run = Run::for_test(&machine, &all, effort);
            run.backend = backend;
            let records = dma(&mut run).unwrap();
            run.absent.iter().for_each(|why| println!("skipped: {why}"));
            let is_absent = |name: &str| run.absent.iter().any(|why| why.starts_with(name));
            let has = |bench: &str, name: &str, n: usize| {
                records.iter().any(|r| (r.bench, r.name, r.n) == (bench, name, n) && r.total.min > 0.0)
            };
            for row in rows(backend).iter().filter(|row| !is_absent(row.name)) {
                for shape in SHAPES {
                    assert!(has(SELF_TEST, row.name, shape.bytes), "{} at {}", row.name, shape.bytes);
                    if !is_in_c(row) {
                        assert!(has(SHUFFLED, row.name, shape.bytes), "{} at {}", row.name, shape.bytes);
                    }
                }
                if !is_in_c(row) && !is_absent(REQUESTS) {
                    for bench in [REQUESTS, REQUESTS_CPU, SUBMISSION, COMPLETION] {
                        assert!(has(bench, row.name, 64), "{bench}: {}", row.name);
                    }
                }
            }
            for record in records.iter().filter(|record| record.bench == REQUESTS) {
                assert!(record.alloc.is_some() && record.free.is_some() && record.runs == 2, "{}", record.name);
            }
            let ours = records.iter().filter(|record| record.kind == Kind::Ours);
            assert!(ours.clone().count() > 0 && ours.clone().all(|record| record.backend == backend));
            assert!(ours.filter(|r| r.bench == SELF_TEST).all(|r| r.bytes_a_block.is_some_and(|b| b > r.n as f64)));
        }
    }

    #[test]
    fn only_requested_rows_take_part() {
        let machine = Machine::unknown();
        let effort = Effort { rounds: 1, round: Duration::from_micros(1) };
        let named =
            |names: &[&str]| catalogue().into_iter().filter(|row| names.contains(&row.name)).collect::<Vec<_>>();
        let shown = |names: &[&str]| {
            let rows = named(names);
            let mut run = Run::for_test(&machine, &rows, effort);
            let mut names: Vec<&str> = dma(&mut run).unwrap().iter().map(|record| record.name).collect();
            names.dedup();
            names.sort_unstable();
            names.dedup();
            names
        };
        let alone = shown(&["pagemill-single"]);
        assert!(alone.iter().all(|name| name.starts_with("dma-")), "{alone:?}");
        let versus = shown(&["pagemill-single", "glibc"]);
        assert!(versus.contains(&"glibc") && versus.contains(&"dma-single"), "{versus:?}");
        assert!(!versus.contains(&"tls-vec"), "{versus:?}");
    }

    /// A source that hands the same block to two requests: what they read is not what they asked for.
    #[test]
    fn requests_that_share_a_block_are_found_out() {
        use std::ptr::NonNull;

        use super::requests::Failure;
        use crate::rows::dma::Source;

        struct Same(Box<[u64; 8]>);
        impl Source for Same {
            type Block = NonNull<u8>;
            fn fill(&mut self, slots: &mut [Option<NonNull<u8>>]) -> bool {
                slots.fill(Some(NonNull::from(&mut *self.0).cast()));
                true
            }
            fn empty(&mut self, slots: &mut [Option<NonNull<u8>>]) {
                slots.fill(None);
            }
            fn at(block: &NonNull<u8>) -> NonNull<u8> {
                *block
            }
        }
        match Bed::new(3) {
            Ok(mut bed) => {
                let found = bed.run(&mut Same(Box::new([0; 8])), 4);
                assert!(matches!(found, Err(Failure::Shared { .. })), "{found:?}");
            }
            Err(why) => println!("skipped: {why}"),
        }
    }
}
