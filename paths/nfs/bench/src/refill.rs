//! Refilling the array: pages leave it, are freed, and the holes are filled again.
//!
//! Only the refill is timed. Which pages leave, the order in which they are freed, and the free itself are not: in a server
//! others do that, at another time.

use std::collections::BTreeSet;
use std::hint::black_box;
use std::ops::Range;
use std::time::{Duration, Instant};

use pagemill::{Allocator, Gfp, Page};
use pagemill_harness::record::Record;
use pagemill_harness::rounds::{CellSamples, Kind, ListOrder, Sample, measured};
use pagemill_harness::{Error, PAGE_BYTES, Run};
use pagemill_nfs::pages::SLOTS;

use crate::ways::{ARRAY, Array, LIST, List, Plain, SINGLE, STOPS, ServerArray, Single, Stops, WHOLE, Way, Whole};

/// The parts of the table, by where the holes are.
pub(crate) const FIRST: &str = "rpc-refill-first";
pub(crate) const LAST: &str = "rpc-refill-last";
pub(crate) const SPREAD: &str = "rpc-refill-spread";
pub(crate) const ALL: &str = "rpc-refill-all";
pub(crate) const ONE: &str = "rpc-refill-one";

/// The slots that a request used, and which of its pages leave.
#[derive(Clone, Debug)]
pub(crate) struct Pattern {
    pub(crate) bench: &'static str,
    pub(crate) what: &'static str,
    pub(crate) slice: Range<usize>,
    /// Every so many slots of the slice one page leaves, beginning with its first.
    step: usize,
}

impl Pattern {
    pub(crate) fn holes(&self) -> usize {
        self.slice.len().div_ceil(self.step)
    }
}

pub(crate) const PATTERNS: [Pattern; 5] = [
    Pattern { bench: FIRST, what: "first 64", slice: 0..64, step: 1 },
    Pattern { bench: LAST, what: "last 64", slice: SLOTS - 64..SLOTS, step: 1 },
    Pattern { bench: SPREAD, what: "64 of 256", slice: 0..256, step: 4 },
    Pattern { bench: ALL, what: "all 259", slice: 0..SLOTS, step: 1 },
    Pattern { bench: ONE, what: "first", slice: 0..1, step: 1 },
];

/// Orders of the list that the refill takes pages from: as a program leaves it, and the best case.
pub(crate) const ORDERS: [ListOrder; 2] = [ListOrder::Random, ListOrder::InOrder];

pub(crate) const STEPS: usize = PATTERNS.len();

/// Arrays are refilled one after the other between two readings of the clock, so that it costs little beside them: as many as
/// have so many holes together, and [`ARRAYS_MOST`] at most. The list of a CPU holds 256
/// pages from the start (`ListPolicy::LIMIT_MIN`), so these stay on it when they are freed: others would come back from the zone,
/// in order.
const HOLES_AT_ONCE: usize = 192;
const ARRAYS_MOST: usize = 16;

/// Pages that are shuffled before a round, so that the array's come from places that are not neighbours.
const SHUFFLED: usize = 1024;
/// Pages of each row's allocator: its arrays, the shuffled ones, and whole pageblocks besides.
const PAGES: usize = 1 << 15;

pub(crate) fn refill(run: &mut Run<'_>) -> Result<Vec<Record>, Error> {
    let mut records = Vec::new();
    for pattern in PATTERNS {
        run.progress.set_message(pattern.bench);
        for order in ORDERS {
            records.extend(of_pattern(run, &pattern, order)?);
        }
        run.progress.inc(1);
    }
    Ok(records)
}

fn of_pattern(run: &Run<'_>, pattern: &Pattern, order: ListOrder) -> Result<Vec<Record>, Error> {
    let mut lanes = lanes(pattern)?;
    let cell = |name: &'static str| CellSamples {
        order: Some(order),
        seed: (order == ListOrder::Random).then_some(run.seed),
        ..CellSamples::new(pattern.bench, (name, run.backend, Kind::Ours), pattern.holes())
    };
    let cells = lanes.iter().map(|(name, _)| cell(name)).collect();
    let mut rng = fastrand::Rng::with_seed(run.seed);
    measured(
        run,
        cells,
        &mut lanes,
        1,
        |(_, lane)| lane.verify(),
        |(_, lane), reps| {
            let (elapsed, pages) = lane.round(order, reps, &mut rng)?;
            let clock = run.clock_ns * reps as f64;
            let ns = ((elapsed.as_nanos() as f64 - clock) / pages as f64).max(0.0);
            Ok::<_, String>((Sample::whole(ns), elapsed))
        },
    )
}

/// The rows, each with an allocator of its own.
fn lanes(pattern: &Pattern) -> Result<Vec<Row>, Error> {
    Ok(vec![
        (ARRAY, lane::<ServerArray>(pattern)?),
        (WHOLE, plain::<Whole>(pattern)?),
        (LIST, plain::<List>(pattern)?),
        (SINGLE, plain::<Single>(pattern)?),
        (STOPS, plain::<Stops>(pattern)?),
    ])
}

fn plain<W: Way + 'static>(pattern: &Pattern) -> Result<Box<dyn Lane>, Error> {
    lane::<Plain<W>>(pattern)
}

fn lane<A: Array + 'static>(pattern: &Pattern) -> Result<Box<dyn Lane>, Error> {
    let allocator = Allocator::builder().pages(PAGES).build().map_err(|why| Error::NoAllocator(why.to_string()))?;
    let arrays = (HOLES_AT_ONCE / pattern.holes()).clamp(1, ARRAYS_MOST);
    let arrays = (0..arrays).map(|_| A::new(&allocator)).collect();
    Ok(Box::new(Held { arrays, gone: Vec::with_capacity(HOLES_AT_ONCE + SLOTS), allocator, pattern: pattern.clone() }))
}

/// A row's name, and its arrays.
type Row = (&'static str, Box<dyn Lane>);

/// The arrays of a row.
trait Lane {
    /// Takes all pages out and fills the arrays, and checks that they then have distinct pages, aligned, in all slots.
    fn verify(&mut self) -> Result<(), String>;

    /// `reps` times: the pages of the pattern leave, are freed, and are replaced. Returns how long replacing took, the clock's own
    /// time included, and how many pages that were.
    fn round(&mut self, order: ListOrder, reps: usize, rng: &mut fastrand::Rng) -> Result<(Duration, usize), String>;
}

struct Held<A> {
    arrays: Vec<A>,
    gone: Vec<Page>,
    allocator: Allocator,
    pattern: Pattern,
}

impl<A: Array> Held<A> {
    fn refill(&mut self, slice: &Range<usize>) {
        for array in &mut self.arrays {
            array.refill(&self.allocator, slice.clone());
        }
    }

    /// Pages of slots leave the arrays.
    fn take(&mut self, slice: &Range<usize>, step: usize) {
        for array in &mut self.arrays {
            self.gone.extend(array.slots(slice.clone()).iter_mut().step_by(step).filter_map(Option::take));
        }
    }

    /// Frees the pages that left, so that the list has them in this order. Returns how many.
    fn free(&mut self, order: ListOrder, rng: &mut fastrand::Rng) -> usize {
        match order {
            ListOrder::Random => rng.shuffle(&mut self.gone),
            // As the zone fills the list.
            ListOrder::Fifo | ListOrder::InOrder => self.gone.sort_unstable_by_key(|page| page.addr()),
        }
        // A vector drops its first page first.
        self.gone.drain(..).count()
    }

    /// Brings list and arrays into an order before a round.
    fn arrange(&mut self, order: ListOrder, rng: &mut fastrand::Rng) {
        self.take(&(0..SLOTS), 1);
        self.free(order, rng);
        self.allocator.drain();
        if order == ListOrder::Random {
            let mut stock: Vec<Page> =
                (0..SHUFFLED).filter_map(|_| self.allocator.alloc_page(Gfp::KERNEL).ok()).collect();
            rng.shuffle(&mut stock);
        }
        self.refill(&(0..SLOTS));
    }
}

impl<A: Array> Lane for Held<A> {
    fn verify(&mut self) -> Result<(), String> {
        self.arrange(ListOrder::Random, &mut fastrand::Rng::with_seed(0));
        let mut addresses = BTreeSet::new();
        for array in &mut self.arrays {
            addresses.extend(array.slots(0..SLOTS).iter().flatten().map(|page| page.addr()));
        }
        let wanted = self.arrays.len() * SLOTS;
        if addresses.len() != wanted || addresses.iter().any(|addr| addr % PAGE_BYTES != 0) {
            return Err(format!("has {} distinct pages, not {wanted}, or one is not aligned", addresses.len()));
        }
        self.refill(&(0..SLOTS));
        Ok(())
    }

    #[inline(never)]
    fn round(&mut self, order: ListOrder, reps: usize, rng: &mut fastrand::Rng) -> Result<(Duration, usize), String> {
        let Pattern { slice, step, .. } = self.pattern.clone();
        self.arrange(order, rng);
        let (mut elapsed, mut pages) = (Duration::ZERO, 0);
        for _ in 0..reps {
            self.take(&slice, step);
            pages += self.free(order, rng);
            let start = Instant::now();
            self.refill(&slice);
            black_box(&mut self.arrays);
            elapsed += start.elapsed();
        }
        // A slot that stayed empty is missing from the next repetition's pages.
        self.take(&slice, step);
        let wanted = self.arrays.len() * self.pattern.holes();
        let are_in_order = are_in_order(&self.gone);
        if pages != reps * wanted || self.free(order, rng) != wanted {
            return Err(format!("left some of {wanted} holes"));
        }
        if are_in_order.is_some_and(|are| are != (order == ListOrder::InOrder)) {
            return Err(format!("did not get its pages in the order `{}`", order.label()));
        }
        self.refill(&slice);
        Ok((elapsed, pages))
    }
}

/// Whether the addresses of most pages are all above those of the pages before, or all below: at random half of them are. None if
/// the pages are too few to tell.
fn are_in_order(pages: &[Page]) -> Option<bool> {
    let (all, up) = (pages.len(), pages.windows(2).filter(|pair| pair[0].addr() < pair[1].addr()).count());
    (all >= 64).then(|| 4 * up < all || 4 * up > 3 * all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagemill_harness::machine::Machine;
    use pagemill_harness::rounds::Effort;

    #[test]
    fn patterns_have_the_holes_that_they_say() {
        let holes: Vec<usize> = PATTERNS.iter().map(Pattern::holes).collect();
        assert_eq!(holes, [64, 64, 64, 259, 1]);
        assert!(PATTERNS.iter().all(|pattern| pattern.slice.end <= SLOTS));
    }

    #[test]
    fn every_way_has_a_record_for_each_pattern_and_order() {
        let machine = Machine::unknown();
        let mut run = Run::for_test(&machine, Effort { rounds: 2, round: Duration::from_micros(1) });
        let records = refill(&mut run).unwrap();
        assert_eq!(records.len(), 5 * PATTERNS.len() * ORDERS.len());
        assert!(records.iter().all(|record| record.runs == 2 && record.total.median > 0.0));
    }

    /// Leaves the last hole of its slice.
    struct Short;

    impl Way for Short {
        fn fill(allocator: &Allocator, slots: &mut [Option<Page>]) {
            let all = slots.len() - usize::from(slots.len() < SLOTS);
            Single::fill(allocator, &mut slots[..all]);
        }
    }

    #[test]
    fn a_way_that_leaves_a_hole_is_refused() {
        let mut lane = plain::<Short>(&PATTERNS[0]).unwrap();
        lane.verify().unwrap();
        let refused = lane.round(ListOrder::Random, 1, &mut fastrand::Rng::with_seed(1));
        assert!(refused.unwrap_err().contains("holes"));
    }

    #[test]
    fn the_array_gets_pages_in_the_order_of_the_list() {
        for (order, is_sorted) in [(ListOrder::InOrder, true), (ListOrder::Random, false)] {
            let pattern = &PATTERNS[0];
            let allocator = Allocator::builder().pages(PAGES).cpus(1, || 0).build().unwrap();
            let arrays = vec![Plain::<Whole>::new(&allocator)];
            let mut held = Held { arrays, gone: Vec::new(), allocator, pattern: pattern.clone() };
            held.round(order, 3, &mut fastrand::Rng::with_seed(5)).unwrap();
            let addresses: Vec<usize> =
                held.arrays[0].slots(pattern.slice.clone()).iter().flatten().map(|page| page.addr()).collect();
            assert_eq!((addresses.len(), addresses.is_sorted()), (64, is_sorted));
        }
    }
}
