//! *allocation*, *cold*, *delayed*, *patterns*: a round of a row is a pass over a file that no cache has.

use std::rc::Rc;
use std::time::{Duration, Instant};

use pagemill::{Allocator, Bulk, Page};

use super::{Sizes, is_shown};
use crate::Error;
use crate::record::Record;
use crate::rows::readahead::DataFile;
use crate::rows::readahead::cold::{self, EACH, Ours, Pattern, Setup, USUAL, Way, WayRow};
use crate::rows::readahead::delayed::{Delayed, OneByOne, RATE, Through};
use crate::rows::{Kind, Unavailable};
use crate::stats::Spread;
use crate::subject::{Flaw, PAGE_BYTES};
use crate::tables::{CellSamples, Run, Sample, in_turns};

pub(crate) const COLD: &str = "readahead-cold";

/// The parts of *allocation*: pages of a window, the names of reading and of allocating alone.
pub(crate) const WINDOWS: [(usize, &str, &str); 6] = [
    (1, "readahead-read-1", "readahead-alloc-1"),
    (2, "readahead-read-2", "readahead-alloc-2"),
    (4, "readahead-read-4", "readahead-alloc-4"),
    (8, "readahead-read-8", "readahead-alloc-8"),
    (16, "readahead-read-16", "readahead-alloc-16"),
    (32, "readahead-read-32", "readahead-alloc-32"),
];

/// The parts of *delayed*, and their delays.
pub(crate) const DELAYS: [(&str, Duration); 2] =
    [("readahead-cold-1ms", Duration::from_millis(1)), ("readahead-cold-20ms", Duration::from_millis(20))];

/// What a delayed source could deliver at best: one delay, and then all it has.
pub(crate) const IDEAL: &str = "ideal";

/// The parts of *patterns*, as records have them.
pub(crate) const PATTERNS: [(&str, &str); 6] = [
    ("readahead-cold-in-sequence", "in sequence"),
    ("readahead-cold-random", "random"),
    ("readahead-cold-strided", "every 16th"),
    ("readahead-cold-backward", "backward"),
    ("readahead-cold-2-streams", "2 streams"),
    ("readahead-cold-8-streams", "8 streams"),
];

/// A row that takes part.
struct Entrant {
    way: Box<dyn Way>,
    pattern: Pattern,
    cell: CellSamples,
    fetched: Vec<f64>,
    hits: Vec<f64>,
}

impl Entrant {
    fn new(bench: &'static str, name: &'static str, kind: Kind, pattern: Pattern, way: Box<dyn Way>) -> Entrant {
        let cell = CellSamples::new(bench, (name, "-", kind), pattern.asked());
        Entrant { way, pattern, cell, fetched: Vec::new(), hits: Vec::new() }
    }

    fn round(&mut self) -> Result<(), Flaw> {
        self.way.chill(&self.pattern)?;
        let pass = self.way.pass(&self.pattern)?.checked(&self.pattern)?;
        let asked = self.pattern.asked() as f64;
        self.cell.samples.push(Sample::whole(pass.elapsed.as_nanos() as f64 / asked));
        self.fetched.extend(pass.fetched.map(|pages| pages as f64 / asked));
        self.hits.extend(pass.hits.map(|hits| 100.0 * hits as f64 / asked));
        Ok(())
    }

    fn record(self) -> Option<Record> {
        let median = |figures: &[f64]| Spread::of(figures).map(|spread| spread.median);
        let (fetched, hit_percent) = (median(&self.fetched), median(&self.hits));
        Some(Record { fetched, hit_percent, ..self.cell.record()? })
    }
}

/// Passes in turns. A row whose way fails ends the table.
fn passes(entrants: Vec<Entrant>, passes: usize) -> Result<Vec<Record>, Error> {
    let mut entrants = entrants;
    for (_, at) in in_turns(passes, entrants.len()) {
        let entrant = &mut entrants[at];
        if let Err(flaw) = entrant.round() {
            return Err(entrant.cell.flawed(flaw));
        }
    }
    Ok(entrants.into_iter().filter_map(Entrant::record).collect())
}

/// Opens a row, or notes why it is absent.
fn opened(run: &mut Run, row: &WayRow, data: &Rc<DataFile>) -> Option<Box<dyn Way>> {
    match (row.open)(data) {
        Ok(way) => Some(way),
        Err(why) => {
            run.note_absent(row.name, "-", &why);
            None
        }
    }
}

/// The rows of the kinds that were asked for.
fn shown(run: &Run, rows: Vec<WayRow>) -> Vec<WayRow> {
    rows.into_iter().filter(|row| is_shown(run, row.kind)).collect()
}

pub(super) fn cold(run: &mut Run, data: &Rc<DataFile>, sizes: Sizes) -> Result<Vec<Record>, Error> {
    let mut entrants = Vec::new();
    for row in shown(run, cold::rows(sizes.cold)) {
        let pattern = Pattern::sequential(sizes.cold / row.part, row.each);
        let way = opened(run, &row, data);
        entrants.extend(way.map(|way| Entrant::new(COLD, row.name, row.kind, pattern, way)));
    }
    passes(entrants, sizes.passes)
}

pub(super) fn patterns(run: &mut Run, data: &Rc<DataFile>, sizes: Sizes) -> Result<Vec<Record>, Error> {
    let mut records = Vec::new();
    for (bench, name) in PATTERNS {
        let pattern = pattern_of(name, sizes.cold, run.seed);
        let mut entrants = Vec::new();
        for row in shown(run, cold::pattern_rows(sizes.cold)) {
            if row.name.ends_with("-own") && pattern.streams == 1 {
                continue;
            }
            let way = opened(run, &row, data);
            entrants.extend(way.map(|way| Entrant::new(bench, row.name, row.kind, pattern.clone(), way)));
        }
        records.extend(passes(entrants, sizes.passes.min(3))?);
    }
    Ok(records)
}

/// Requests of one page each, over a file of so many pages.
fn pattern_of(name: &str, pages: usize, seed: u64) -> Pattern {
    let (all, some) = (pages as u32, (pages / 16) as u32);
    let alone =
        |pages: Vec<u32>| Pattern { requests: pages.into_iter().map(|page| (0, page)).collect(), each: 1, streams: 1 };
    let interleaved = |streams: u16| {
        let (own, each) = (all / u32::from(streams), all / 4 / u32::from(streams));
        let step = |at: u32| (0..streams).map(move |stream| (stream, u32::from(stream) * own + at));
        Pattern { requests: (0..each).flat_map(step).collect(), each: 1, streams }
    };
    match name {
        "in sequence" => alone((0..all / 4).collect()),
        "random" => {
            // No two neighbours, and not page 0: by chance they would make a sequence.
            let mut pages: Vec<u32> = (1..all).step_by(2).collect();
            fastrand::Rng::with_seed(seed).shuffle(&mut pages);
            pages.truncate(some as usize);
            alone(pages)
        }
        "every 16th" => alone((0..all).step_by(16).collect()),
        "backward" => alone((all - some..all).rev().collect()),
        "2 streams" => interleaved(2),
        _ => interleaved(8),
    }
}

pub(super) fn delayed(run: &mut Run, _: &Rc<DataFile>, sizes: Sizes) -> Result<Vec<Record>, Error> {
    let mut records = Vec::new();
    let pages = sizes.delayed;
    for (bench, delay) in DELAYS {
        // Two windows are under way at most.
        let enough = (2.0 * delay.as_secs_f64() * RATE / PAGE_BYTES as f64) as usize;
        let mut entrants = Vec::new();
        let ours = [
            ("cache", false, None),
            ("cache-begins", true, None),
            ("cache-wide", true, Some(enough)),
            ("cache-0", true, Some(0)),
        ];
        let has_ours = is_shown(run, Kind::Ours);
        for (name, begins, window) in ours.into_iter().filter(|_| has_ours) {
            // A delay for each page takes its time.
            let part = if window == Some(0) { 16 * delay.as_millis() as usize } else { 1 };
            let pattern = Pattern::sequential(pages / part, EACH);
            match Through::new(pages, delay, begins, window) {
                Ok(way) => entrants.push(Entrant::new(bench, name, Kind::Ours, pattern, Box::new(way))),
                Err(why) => run.note_absent(name, "-", &Unavailable(why.to_string())),
            }
        }
        for (name, each, part) in [("one-128k", EACH, 16), ("one-1m", 256, 4)] {
            let pattern = Pattern::sequential(pages / part, each);
            let way = Box::new(OneByOne(Delayed::new(pages, delay, false)));
            entrants.push(Entrant::new(bench, name, Kind::Peer, pattern, way));
        }
        records.extend(passes(entrants, sizes.passes.min(3))?);
        let bytes = (pages * PAGE_BYTES) as f64;
        let ns = (delay.as_secs_f64() + bytes / RATE) * 1e9 / pages as f64;
        let mut ideal = CellSamples::new(bench, (IDEAL, "-", Kind::Floor), pages);
        ideal.samples = vec![Sample::whole(ns); sizes.passes.min(3)];
        records.extend(ideal.record());
    }
    Ok(records)
}

/// Totals of *allocation*, in pages, up to the largest.
pub(crate) fn totals(most: usize) -> Vec<usize> {
    (5..=18)
        .map(|k| 1 << k)
        .filter(|&pages| pages <= most && (most > 1 << 12 || [5, 8, 12].contains(&pages.ilog2())))
        .collect()
}

pub(super) fn allocation(run: &mut Run, data: &Rc<DataFile>, sizes: Sizes) -> Result<Vec<Record>, Error> {
    let mut records = Vec::new();
    if !is_shown(run, Kind::Ours) {
        return Ok(records);
    }
    for total in totals(sizes.total) {
        let mut entrants = Vec::new();
        for (window, read, _) in WINDOWS {
            let setup = Setup { window: Some(window), ..USUAL };
            match Ours::new(data, setup, total) {
                Ok(way) => {
                    let pattern = Pattern::sequential(total, 1);
                    entrants.push(Entrant::new(read, super::CACHE, Kind::Ours, pattern, Box::new(way)));
                }
                Err(why) => run.note_absent(super::CACHE, "-", &why),
            }
        }
        records.extend(passes(entrants, sizes.passes.min(3))?);
        let allocator = Allocator::builder().pages(2 * total + 4096).build();
        let allocator = allocator.map_err(|why| Error::NoAllocator(why.to_string()))?;
        let mut slots: Vec<Option<Page>> = std::iter::repeat_with(|| None).take(total).collect();
        for (window, _, alone) in WINDOWS {
            let mut cell = CellSamples::new(alone, ("allocator", "-", Kind::Ours), total);
            for _ in 0..run.effort.rounds {
                let elapsed = take(&allocator, &mut slots, window).map_err(|flaw| cell.flawed(flaw))?;
                cell.samples.push(Sample::whole(elapsed.as_nanos() as f64 / total as f64));
            }
            records.extend(cell.record());
        }
    }
    Ok(records)
}

/// Takes all of a total, so many pages a call, and puts it back, untimed.
fn take(allocator: &Allocator, slots: &mut [Option<Page>], each: usize) -> Result<Duration, Flaw> {
    let (wanted, mut got) = (slots.len(), 0);
    let start = Instant::now();
    for slots in slots.chunks_mut(each) {
        got += allocator.alloc_pages_bulk_array(Bulk::up_to(slots.len()), slots).map_or(0, |filled| filled.added);
    }
    let elapsed = start.elapsed();
    pagemill::free_pages_bulk(slots);
    if got == wanted { Ok(elapsed) } else { Err(Flaw::Short { wanted }) }
}
