//! Rows of the table `holes`: some pages of an array leave it, are freed in random order, and are replaced.
//!
//! [`Lane`] is the object-safe interface to the timed loop, which is compiled for each [`Stock`].

use std::hint::black_box;
use std::time::Instant;

use crate::rows::pagemill::{BACKENDS, SPARE_PAGES, open};
use crate::rows::region::Region;
use crate::rows::stock::{Copying, InBulk, Locked, Singly, Stack, Stock};
use crate::rows::{Kind, Row, Unavailable};
use crate::subject::{Arrange as _, Flaw, ListOrder, Parts, check_pages};
use crate::tables::churn::pick_to_the_end;

/// The most pages that leave at once.
pub(crate) const HOLES_MOST: usize = 64;

/// Which slots become holes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Places {
    Random,
    First,
    Last,
    /// As far apart as they can be.
    Spread,
}

impl Places {
    /// Moves the numbers of `k` slots to the end of `slots`, which has the numbers of all slots in some order, and
    /// returns them.
    fn pick<'a>(self, slots: &'a mut [usize], k: usize, rng: &mut fastrand::Rng) -> &'a [usize] {
        let len = slots.len();
        if self == Places::Random {
            pick_to_the_end(slots, k, rng);
        } else {
            slots[len - k..].iter_mut().enumerate().for_each(|(i, slot)| {
                *slot = match self {
                    Places::First => i,
                    Places::Spread => i * len / k,
                    Places::Last | Places::Random => len - k + i,
                }
            });
        }
        &slots[len - k..]
    }
}

/// The timed loop over a stock.
pub(crate) trait Lane {
    /// Frees all pages, fills the array, and checks that its pages are distinct and aligned.
    fn verify(&mut self) -> Result<(), Flaw>;

    /// `reps` times: 1 to [`HOLES_MOST`] pages leave, are freed in bulk, and are replaced in bulk. Freeing and
    /// replacing are timed; choosing and shuffling the pages is not. Also returns how many pages left.
    fn rounds(&mut self, places: Places, reps: usize, rng: &mut fastrand::Rng) -> Result<(Parts, usize), Flaw>;
}

/// A row of the table, opened with a number of slots.
pub(crate) type HoleRow = Row<usize, Box<dyn Lane>>;

impl HoleRow {
    pub(super) fn of_stock<S: Stock + 'static>(
        name: &'static str,
        kind: Kind,
        open: impl Fn(usize) -> Result<S, Unavailable> + 'static,
    ) -> HoleRow {
        Row::plain(name, kind, move |slots| Ok(Box::new(Held::new(open(slots)?, slots)) as Box<dyn Lane>))
    }
}

pub(crate) fn rows() -> Vec<HoleRow> {
    let mut rows = Vec::new();
    for (label, backend) in BACKENDS {
        let single = move |slots| Ok(Singly(open(backend, slots + SPARE_PAGES)?));
        rows.push(HoleRow::of_stock("pagemill-single", Kind::Ours, single).on(label));
        let bulk = move |slots| Ok(InBulk(open(backend, slots + SPARE_PAGES)?));
        rows.push(HoleRow::of_stock("pagemill-array", Kind::Ours, bulk).on(label));
    }
    rows.push(HoleRow::of_stock("memcpy", Kind::Floor, |slots| Ok(Copying::new(Region::new(slots)?, slots))));
    rows.push(HoleRow::of_stock("tls-vec", Kind::Floor, |slots| Ok(Stack::new(Region::new(2 * slots)?))));
    rows.push(HoleRow::of_stock("mutex-vec", Kind::Peer, |slots| Ok(Locked::new(Region::new(2 * slots)?))));
    #[cfg(feature = "dpdk")]
    rows.push(super::dpdk::hole_row());
    rows
}

/// A stock and the array that it fills.
struct Held<S: Stock> {
    stock: S,
    slots: Vec<Option<S::Page>>,
    /// The pages that left.
    gone: Vec<Option<S::Page>>,
    /// The numbers of all slots, in some order.
    numbers: Vec<usize>,
}

impl<S: Stock> Held<S> {
    fn new(stock: S, slots: usize) -> Self {
        let empty = || std::iter::repeat_with(|| None).take(slots).collect();
        Held { stock, slots: empty(), gone: Vec::with_capacity(HOLES_MOST), numbers: (0..slots).collect() }
    }
}

impl<S: Stock> Drop for Held<S> {
    fn drop(&mut self) {
        for slot in self.slots.iter_mut().filter(|slot| slot.is_some()) {
            self.stock.free(std::slice::from_mut(slot));
        }
    }
}

impl<S: Stock> Lane for Held<S> {
    fn verify(&mut self) -> Result<(), Flaw> {
        let n = self.slots.len();
        if self.slots.iter().all(Option::is_some) {
            self.stock.free(&mut self.slots);
        }
        let is_complete = self.stock.fill(&mut self.slots);
        self.stock.settle(&mut self.slots);
        is_complete.then_some(()).ok_or(Flaw::Short { wanted: n })?;
        check_pages(self.slots.iter().flatten().map(S::at).collect(), n)
    }

    #[inline(never)]
    fn rounds(&mut self, places: Places, reps: usize, rng: &mut fastrand::Rng) -> Result<(Parts, usize), Flaw> {
        if let Some(allocator) = self.stock.allocator() {
            ListOrder::Random.arrange(allocator, rng);
        }
        self.numbers.iter_mut().enumerate().for_each(|(number, slot)| *slot = number);
        let (mut parts, mut pages, mut is_complete) = (Parts::default(), 0, true);
        for _ in 0..reps {
            let k = rng.usize(1..=HOLES_MOST.min(self.slots.len()));
            for &place in places.pick(&mut self.numbers, k, rng) {
                self.gone.push(self.slots[place].take());
            }
            rng.shuffle(&mut self.gone);
            let start = Instant::now();
            self.stock.free(&mut self.gone);
            black_box(&mut self.gone);
            parts.free += start.elapsed();
            self.gone.clear();
            let start = Instant::now();
            is_complete &= self.stock.fill(&mut self.slots);
            black_box(&mut self.slots);
            parts.alloc += start.elapsed();
            self.stock.settle(&mut self.slots);
            pages += k;
        }
        is_complete.then_some((parts, pages)).ok_or(Flaw::Short { wanted: self.slots.len() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rows::stock::Addr;

    #[test]
    fn places_pick_first_last_spread_or_random_slots() {
        let mut rng = fastrand::Rng::with_seed(1);
        let mut pick = |places: Places, k: usize| {
            let mut slots: Vec<usize> = (0..256).collect();
            let mut picked = places.pick(&mut slots, k, &mut rng).to_vec();
            picked.sort_unstable();
            picked
        };
        assert_eq!(pick(Places::First, 3), [0, 1, 2]);
        assert_eq!(pick(Places::Last, 3), [253, 254, 255]);
        assert_eq!(pick(Places::Spread, 4), [0, 64, 128, 192]);
        let mut seen = [false; 256];
        for k in 1..=HOLES_MOST {
            let mut picked = pick(Places::Random, k);
            picked.iter().for_each(|&place| seen[place] = true);
            picked.dedup();
            assert_eq!(picked.len(), k, "each once");
        }
        assert!(seen.iter().all(|seen| *seen), "any slot may be one");
    }

    /// Records the holes that it was asked to fill, and the order of the pages that it got back.
    struct Noted {
        next: usize,
        holes: Vec<Vec<usize>>,
        gone: Vec<Vec<usize>>,
    }

    impl Stock for Noted {
        type Page = Addr;
        fn fill(&mut self, slots: &mut [Option<Addr>]) -> bool {
            let is_hole = |(place, slot): (usize, &Option<Addr>)| slot.is_none().then_some(place);
            self.holes.push(slots.iter().enumerate().filter_map(is_hole).collect());
            for slot in slots.iter_mut().filter(|slot| slot.is_none()) {
                self.next += 1;
                *slot = Addr::new(self.next * 4096);
            }
            true
        }
        fn free(&mut self, slots: &mut [Option<Addr>]) {
            self.gone.push(slots.iter_mut().filter_map(Option::take).map(Addr::get).collect());
        }
        fn at(page: &Addr) -> usize {
            page.get()
        }
    }

    #[test]
    fn pages_are_freed_in_random_order_and_their_slots_refilled() {
        for places in [Places::Random, Places::First, Places::Last, Places::Spread] {
            let mut held = Held::new(Noted { next: 0, holes: Vec::new(), gone: Vec::new() }, 259);
            held.verify().unwrap();
            let (_, pages) = held.rounds(places, 50, &mut fastrand::Rng::with_seed(2)).unwrap();
            let holes = std::mem::take(&mut held.stock.holes).split_off(1);
            assert_eq!((holes.len(), holes.iter().map(Vec::len).sum::<usize>()), (50, pages));
            let fits = |holes: &Vec<usize>| match places {
                Places::Random => true,
                Places::First => *holes == (0..holes.len()).collect::<Vec<_>>(),
                Places::Last => *holes == (259 - holes.len()..259).collect::<Vec<_>>(),
                Places::Spread => holes.windows(2).all(|pair| pair[1] - pair[0] >= 259 / holes.len()),
            };
            assert!(holes.iter().all(fits), "{places:?}");
            let sizes: std::collections::BTreeSet<usize> = holes.iter().map(Vec::len).collect();
            assert!(sizes.len() > 20 && sizes.iter().all(|k| (1..=HOLES_MOST).contains(k)), "{sizes:?}");
            let is_mixed = |gone: &&Vec<usize>| gone.len() > 8 && !gone.is_sorted();
            assert!(held.stock.gone.iter().filter(is_mixed).count() > 30, "{places:?}");
        }
    }

    #[test]
    fn every_row_fills_its_holes_with_distinct_pages() {
        let mut rng = fastrand::Rng::with_seed(3);
        for row in rows() {
            let mut lane = match (row.open)(259) {
                Ok(lane) => lane,
                Err(reason) => {
                    println!("skipped {} {}: {reason}", row.name, row.backend);
                    continue;
                }
            };
            for places in [Places::Random, Places::First, Places::Last, Places::Spread] {
                lane.verify().unwrap_or_else(|flaw| panic!("{} {}: {flaw}", row.name, row.backend));
                let (_, pages) = lane.rounds(places, 20, &mut rng).unwrap();
                assert!(pages >= 20);
            }
            lane.verify().unwrap_or_else(|flaw| panic!("{} {}: {flaw}", row.name, row.backend));
        }
    }
}
