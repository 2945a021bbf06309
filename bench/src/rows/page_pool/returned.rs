//! Pages that come back from another thread: one thread takes 64 pages at a time and sends their handles through a
//! ring, the other one frees them. [`Crossing`] is the object-safe interface.
//!
//! The ring between the threads holds fewer pages than the pool's own ring, so that the pool's never overflows.

use std::hint::spin_loop;

use pagemill::{PoolPage, free_pages_bulk};

use crate::rows::one_by_one::OnePage as _;
use crate::rows::page_pool::{BULK, ManyAtOnce, OfPool, OneByOne, allocator_for};
use crate::rows::stock::{Addr, EachOf, InBulk, Singly, Stock};
use crate::rows::{Kind, Row, Unavailable, rust_peers};
use crate::subject::{Flaw, check_pages};

/// Handles that the ring between the threads holds.
pub(crate) const SENT_MOST: usize = 8 * BULK;

/// Pages that a row needs: those in the ring between the threads and in the hands of both, twice.
pub(in crate::rows) const CROSSING_PAGES: usize = 2 * (SENT_MOST + 2 * BULK);

/// A row of this part.
pub(crate) type CrossRow = Row<(), Box<dyn Crossing>>;

/// What the two threads do. Each does its part once.
pub(crate) struct Ends<'a> {
    /// Takes and sends; false if there were too few pages.
    pub(crate) takes: Box<dyn FnOnce() -> bool + 'a>,
    /// Frees what was sent.
    pub(crate) returns: Box<dyn FnOnce() + Send>,
}

pub(crate) trait Crossing {
    /// Takes [`BULK`] pages, checks that they are distinct and aligned, and frees them.
    fn verify(&mut self) -> Result<(), Flaw>;

    /// The parts of both threads, for so many times [`BULK`] pages.
    fn ends(&mut self, batches: usize) -> Ends<'_>;
}

impl CrossRow {
    /// `open` returns what the first thread takes pages from, and how the second one frees them.
    pub(in crate::rows) fn of<S, F>(
        name: &'static str,
        kind: Kind,
        open: impl Fn() -> Result<(S, F), Unavailable> + 'static,
    ) -> CrossRow
    where
        S: Stock + 'static,
        F: FnMut(&mut [Option<S::Page>]) + Clone + Send + 'static,
    {
        Row::plain(name, kind, move |()| {
            let (stock, free) = open()?;
            Ok(Box::new(Sending { stock, free, slots: empty_slots() }) as Box<dyn Crossing>)
        })
    }
}

/// The rows, Pagemill's on that backend.
pub(crate) fn rows(backend: &'static str) -> Vec<CrossRow> {
    let allocator = move || allocator_for(backend, CROSSING_PAGES);
    let mut rows = vec![
        CrossRow::of("page-pool", Kind::Ours, move || {
            let dropped = |slots: &mut [Option<PoolPage>]| slots.fill_with(|| None);
            Ok((OfPool::<OneByOne>::new(&allocator()?), dropped))
        })
        .on(backend),
        CrossRow::of("page-pool-64", Kind::Ours, move || {
            let put = |slots: &mut [Option<PoolPage>]| _ = PoolPage::put_bulk(slots);
            Ok((OfPool::<ManyAtOnce>::new(&allocator()?), put))
        })
        .on(backend),
        CrossRow::of("pagemill-single", Kind::Ours, move || {
            Ok((Singly(allocator()?), |slots: &mut [Option<_>]| slots.fill_with(|| None)))
        })
        .on(backend),
        CrossRow::of("pagemill-array-64", Kind::Ours, move || {
            Ok((InBulk(allocator()?), |slots: &mut [Option<_>]| _ = free_pages_bulk(slots)))
        })
        .on(backend),
    ];
    rows.extend([
        CrossRow::of("array-queue", Kind::Peer, || {
            let queue = rust_peers::queue_of(CROSSING_PAGES)?;
            let mut other = queue.clone();
            let free = move |slots: &mut [Option<Addr>]| {
                slots.iter_mut().filter_map(Option::take).for_each(|page| other.put_back(page.get()));
            };
            Ok((EachOf(queue), free))
        }),
        CrossRow::of("hand-over", Kind::Floor, || Ok((Words, |slots: &mut [Option<_>]| slots.fill(None)))),
    ]);
    #[cfg(feature = "dpdk")]
    rows.extend(crate::rows::dpdk::cross_rows());
    rows
}

/// The floor: words as long as a pool's handles, without pages.
struct Words;

impl Stock for Words {
    type Page = (Addr, usize);

    #[inline]
    fn fill(&mut self, slots: &mut [Option<Self::Page>]) -> bool {
        slots.iter_mut().zip(1..).for_each(|(slot, page)| *slot = Addr::new(page << 12).map(|page| (page, 0)));
        true
    }

    fn free(&mut self, slots: &mut [Option<Self::Page>]) {
        slots.fill(None);
    }

    fn at(page: &Self::Page) -> usize {
        page.0.get()
    }
}

struct Sending<S: Stock, F> {
    stock: S,
    free: F,
    slots: Vec<Option<S::Page>>,
}

fn empty_slots<P>() -> Vec<Option<P>> {
    std::iter::repeat_with(|| None).take(BULK).collect()
}

impl<S, F> Crossing for Sending<S, F>
where
    S: Stock,
    F: FnMut(&mut [Option<S::Page>]) + Clone + Send + 'static,
{
    fn verify(&mut self) -> Result<(), Flaw> {
        let is_complete = self.stock.fill(&mut self.slots);
        let pages = self.slots.iter().flatten().map(S::at).collect();
        (self.free)(&mut self.slots);
        is_complete.then_some(()).ok_or(Flaw::Short { wanted: BULK })?;
        check_pages(pages, BULK)
    }

    fn ends(&mut self, batches: usize) -> Ends<'_> {
        let (producer, consumer) = rtrb::RingBuffer::new(SENT_MOST);
        let free = self.free.clone();
        Ends {
            takes: Box::new(move || send(&mut self.stock, &mut self.slots, producer, batches)),
            returns: Box::new(move || receive(free, consumer, batches)),
        }
    }
}

#[inline(never)]
fn send<S: Stock>(
    stock: &mut S,
    slots: &mut [Option<S::Page>],
    mut ring: rtrb::Producer<S::Page>,
    batches: usize,
) -> bool {
    for _ in 0..batches {
        if !stock.fill(slots) {
            return false;
        }
        let chunk = loop {
            if let Ok(chunk) = ring.write_chunk_uninit(BULK) {
                break chunk;
            }
            spin_loop();
        };
        chunk.fill_from_iter(slots.iter_mut().filter_map(Option::take));
    }
    true
}

#[inline(never)]
fn receive<P>(mut free: impl FnMut(&mut [Option<P>]), mut ring: rtrb::Consumer<P>, batches: usize) {
    let mut slots = empty_slots();
    for _ in 0..batches {
        let chunk = loop {
            // Read before the ring is, so that no batch is missed that was sent before the sender stopped.
            let is_abandoned = ring.is_abandoned();
            if let Ok(chunk) = ring.read_chunk(BULK) {
                break chunk;
            }
            if is_abandoned {
                return;
            }
            spin_loop();
        };
        slots.iter_mut().zip(chunk).for_each(|(slot, page)| *slot = Some(page));
        free(&mut slots);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cross(crossing: &mut dyn Crossing, batches: usize) -> bool {
        let Ends { takes, returns } = crossing.ends(batches);
        std::thread::scope(|scope| {
            scope.spawn(returns);
            takes()
        })
    }

    #[test]
    fn every_row_gets_its_pages_back_from_the_other_thread() {
        for backend in ["rseq", "portable"] {
            for row in rows(backend) {
                let mut crossing = match (row.open)(()) {
                    Ok(crossing) => crossing,
                    Err(reason) => {
                        println!("skipped {} {backend}: {reason}", row.name);
                        continue;
                    }
                };
                for _ in 0..3 {
                    assert!(cross(crossing.as_mut(), 100), "{} {backend}", row.name);
                    crossing.verify().unwrap_or_else(|flaw| panic!("{} {backend}: {flaw}", row.name));
                }
            }
        }
    }

    /// Otherwise pages would go to the allocator and come from there.
    #[test]
    fn the_ring_of_the_pool_never_overflows() {
        let allocator = allocator_for("portable", CROSSING_PAGES).unwrap();
        let mut sending = Sending {
            stock: OfPool::<OneByOne>::new(&allocator),
            free: |slots: &mut [Option<PoolPage>]| slots.fill_with(|| None),
            slots: empty_slots(),
        };
        assert!(cross(&mut sending, 1000));
        let stats = sending.stock.pool.stats();
        assert_eq!((stats.ring, stats.ring_full, stats.in_flight), (1000 * BULK as u64, 0, 0));
    }
}
