//! Rows of the table `mixed`: a program with two threads. Each thread has requests of mixed sizes under way, ends them
//! at random, and lets the other thread free the pages of some.
//!
//! A [`Desk`] is one thread's part, over a [`Stock`]; [`Day`] is its object-safe interface. A desk follows a script of
//! [`Step`]s that is made beforehand, so that no time goes into choosing. I1: a thread that waits for the other one
//! keeps freeing the pages that the other one sent: when the ring is full, and at the end.

use std::hint::spin_loop;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use crate::rows::pagemill::{BACKENDS, SPARE_PAGES, open};
use crate::rows::region::Region;
use crate::rows::stock::{InBulk, Listed, Locked, Singly, Stock};
use crate::rows::{Kind, Row, Unavailable, c_peers};
use crate::subject::Flaw;

/// Percent of requests, and the pages that each of them has: the block sizes of JEDEC's enterprise workload for
/// solid-state drives (JESD219), rounded up to pages.
pub(crate) const MIX: [(usize, usize); 5] = [(77, 1), (10, 2), (7, 4), (3, 8), (3, 16)];

/// Pages of the largest request.
pub(super) const REQUEST_MOST: usize = MIX[MIX.len() - 1].1;

/// Requests that a thread has under way.
pub(crate) const REQUESTS: usize = 1024;

/// Percent of requests whose pages the other thread frees.
pub(crate) const SENT_PERCENT: usize = 30;

/// Steps of a script.
pub(crate) const SCRIPT_STEPS: usize = 8192;

/// Pages that the ring to one thread can hold.
const RING_PAGES: usize = 4096;

/// Pages of the other thread that are freed at once.
const TAKEN_UP: usize = 64;

/// Pages that both threads need if all requests are the largest.
pub(crate) const DAY_PAGES: usize = 2 * (REQUESTS * REQUEST_MOST + RING_PAGES);

/// The request at a place ends, and a new one begins in its place.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Step {
    place: u16,
    /// Pages of the new request.
    pages: u8,
    /// Whether the other thread frees the pages of the old one.
    is_sent: bool,
}

fn script(seed: u64) -> Vec<Step> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut step = || {
        let mut percent = rng.usize(..100);
        let of_mix = MIX.iter().find(|(part, _)| {
            let is_it = percent < *part;
            percent = percent.saturating_sub(*part);
            is_it
        });
        let pages = of_mix.map_or(1, |(_, pages)| *pages) as u8;
        Step { place: rng.u16(..REQUESTS as u16), pages, is_sent: rng.usize(..100) < SENT_PERCENT }
    };
    std::iter::repeat_with(&mut step).take(SCRIPT_STEPS).collect()
}

/// What a thread did in a round.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Done {
    pub(crate) start: Instant,
    pub(crate) end: Instant,
    /// Pages that were allocated, and pages that were sent to the other thread.
    pub(crate) pages: usize,
    pub(crate) sent: usize,
}

/// One thread's part.
pub(crate) trait Day {
    /// Makes `steps` steps. `through` counts the threads that have finished theirs.
    fn steps(&mut self, steps: usize, through: &AtomicUsize) -> Result<Done, Flaw>;

    /// The addresses of the pages of the requests under way.
    fn held(&self) -> Vec<usize>;
}

/// Makes each thread's part, in that thread.
pub(crate) type Desks = [Box<dyn FnOnce() -> Box<dyn Day> + Send>; 2];

/// A row of the table, opened with a seed.
pub(crate) type DayRow = Row<u64, Desks>;

impl DayRow {
    /// `open` returns a function that makes a thread's stock.
    pub(super) fn of_stocks<S, M>(
        name: &'static str,
        kind: Kind,
        open: impl Fn() -> Result<M, Unavailable> + 'static,
    ) -> DayRow
    where
        S: Stock + 'static,
        M: Fn() -> S + Send + Sync + 'static,
    {
        Row::plain(name, kind, move |seed: u64| {
            let make = Arc::new(open()?);
            let (to_second, from_first) = rtrb::RingBuffer::new(RING_PAGES);
            let (to_first, from_second) = rtrb::RingBuffer::new(RING_PAGES);
            let desk = |outbox, inbox, seed| {
                let make = Arc::clone(&make);
                Box::new(move || Box::new(Desk::new(make(), outbox, inbox, seed)) as Box<dyn Day>) as _
            };
            Ok([desk(to_second, from_second, seed), desk(to_first, from_first, seed + 1)])
        })
    }
}

pub(crate) fn rows() -> Vec<DayRow> {
    let mut rows = Vec::new();
    for (label, backend) in BACKENDS {
        let allocator = move || open(backend, DAY_PAGES + SPARE_PAGES);
        rows.push(
            DayRow::of_stocks("pagemill-single", Kind::Ours, move || {
                let allocator = allocator()?;
                Ok(move || Singly(allocator.clone()))
            })
            .on(label),
        );
        rows.push(
            DayRow::of_stocks("pagemill-list", Kind::Ours, move || {
                let allocator = allocator()?;
                Ok(move || Listed { allocator: allocator.clone(), list: pagemill::PageList::new() })
            })
            .on(label),
        );
        rows.push(
            DayRow::of_stocks("pagemill-array", Kind::Ours, move || {
                let allocator = allocator()?;
                Ok(move || InBulk(allocator.clone()))
            })
            .on(label),
        );
    }
    rows.push(DayRow::of_stocks("mutex-vec", Kind::Peer, || {
        let stock = Locked::new(Region::new(DAY_PAGES)?);
        Ok(move || stock.clone())
    }));
    rows.extend(c_peers::day_rows());
    #[cfg(feature = "dpdk")]
    rows.push(super::dpdk::day_row());
    rows
}

struct Desk<S: Stock> {
    stock: S,
    /// The slots of all requests, and how many of its slots each request uses.
    slots: Vec<Option<S::Page>>,
    lens: Vec<u8>,
    outbox: rtrb::Producer<Option<S::Page>>,
    inbox: rtrb::Consumer<Option<S::Page>>,
    script: Vec<Step>,
    next: usize,
}

impl<S: Stock> Desk<S> {
    fn new(
        stock: S,
        outbox: rtrb::Producer<Option<S::Page>>,
        inbox: rtrb::Consumer<Option<S::Page>>,
        seed: u64,
    ) -> Self {
        let slots = std::iter::repeat_with(|| None).take(REQUESTS * REQUEST_MOST).collect();
        Desk { stock, slots, lens: vec![0; REQUESTS], outbox, inbox, script: script(seed), next: 0 }
    }

    /// Frees some of the pages that the other thread sent.
    #[inline]
    fn take_up(&mut self) {
        let Ok(mut chunk) = self.inbox.read_chunk(self.inbox.slots().min(TAKEN_UP)) else { return };
        let (first, second) = chunk.as_mut_slices();
        for part in [first, second].into_iter().filter(|part| !part.is_empty()) {
            self.stock.free(part);
        }
        chunk.commit_all();
    }

    /// Sends the pages of these slots to the other thread, or frees them if it is gone.
    #[inline]
    fn send(&mut self, first: usize, len: usize) {
        loop {
            if let Ok(chunk) = self.outbox.write_chunk_uninit(len) {
                chunk.fill_from_iter(self.slots[first..first + len].iter_mut().map(Option::take));
                return;
            }
            if self.outbox.is_abandoned() {
                return self.stock.free(&mut self.slots[first..first + len]);
            }
            self.take_up();
            spin_loop();
        }
    }

    /// One step. Returns how many pages were sent, and how many were allocated; `None` if there were too few.
    #[inline]
    fn step(&mut self) -> Option<(usize, usize)> {
        let step = self.script[self.next % SCRIPT_STEPS];
        self.next += 1;
        self.take_up();
        let (place, pages) = (usize::from(step.place), usize::from(step.pages));
        let (first, len) = (place * REQUEST_MOST, usize::from(self.lens[place]));
        let is_sent = step.is_sent && len > 0;
        if is_sent {
            self.send(first, len);
        } else {
            self.stock.free(&mut self.slots[first..first + len]);
        }
        self.lens[place] = step.pages;
        let is_complete = self.stock.fill(&mut self.slots[first..first + pages]);
        is_complete.then_some((if is_sent { len } else { 0 }, pages))
    }
}

impl<S: Stock> Day for Desk<S> {
    #[inline(never)]
    fn steps(&mut self, steps: usize, through: &AtomicUsize) -> Result<Done, Flaw> {
        let start = Instant::now();
        let (mut sent, mut pages, mut is_complete) = (0, 0, true);
        for _ in 0..steps {
            match self.step() {
                Some((now_sent, taken)) => (sent, pages) = (sent + now_sent, pages + taken),
                None => is_complete = false,
            }
        }
        // AcqRel and Acquire pair with each other: a thread that sees the other one finished also sees all pages that
        // it sent.
        through.fetch_add(1, Ordering::AcqRel);
        while through.load(Ordering::Acquire) < 2 && !self.outbox.is_abandoned() {
            self.take_up();
            spin_loop();
        }
        while !self.inbox.is_empty() {
            self.take_up();
        }
        is_complete
            .then_some(Done { start, end: Instant::now(), pages, sent })
            .ok_or(Flaw::Short { wanted: REQUEST_MOST })
    }

    fn held(&self) -> Vec<usize> {
        self.slots.iter().flatten().map(S::at).collect()
    }
}

impl<S: Stock> Drop for Desk<S> {
    fn drop(&mut self) {
        while !self.inbox.is_empty() {
            self.take_up();
        }
        for slot in self.slots.iter_mut().filter(|slot| slot.is_some()) {
            self.stock.free(std::slice::from_mut(slot));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::subject::check_pages;

    #[test]
    fn a_script_has_the_mix_that_was_published() {
        assert_eq!(MIX.iter().map(|(percent, _)| percent).sum::<usize>(), 100);
        let steps = script(11);
        let percent = |is_it: &dyn Fn(&Step) -> bool| 100.0 * steps.iter().filter(|s| is_it(s)).count() as f64 / 8192.0;
        for (wanted, pages) in MIX {
            let found = percent(&|step| usize::from(step.pages) == pages);
            assert!((found - wanted as f64).abs() < 2.0, "{found} % have {pages} pages");
        }
        let sent = percent(&|step| step.is_sent);
        assert!((sent - SENT_PERCENT as f64).abs() < 2.0, "{sent} % are sent");
        let mut places: Vec<u16> = steps.iter().map(|step| step.place).collect();
        assert!(!places.is_sorted());
        places.sort_unstable();
        places.dedup();
        assert!(places.len() > REQUESTS * 99 / 100, "any request may end");
    }

    /// The other thread frees its share, and no page is held twice.
    #[test]
    fn threads_free_each_others_pages_and_never_share_one() {
        for row in rows() {
            let told = |what: String| -> ! { panic!("{} {}: {what}", row.name, row.backend) };
            let desks = match (row.open)(5) {
                Ok(desks) => desks,
                Err(reason) => {
                    println!("skipped {} {}: {reason}", row.name, row.backend);
                    continue;
                }
            };
            let through = AtomicUsize::new(0);
            let held = std::thread::scope(|scope| {
                let of = |desk: Box<dyn FnOnce() -> Box<dyn Day> + Send>| {
                    scope.spawn(|| {
                        let mut day = desk();
                        let done = day.steps(3 * SCRIPT_STEPS, &through);
                        // Both are read before either is dropped.
                        through.fetch_add(1, Ordering::AcqRel);
                        let held = day.held();
                        while through.load(Ordering::Acquire) < 4 {
                            spin_loop();
                        }
                        done.map(|done| (done.sent * 100 / done.pages, held))
                    })
                };
                let threads = desks.map(of);
                threads.map(|thread| thread.join().unwrap().unwrap_or_else(|flaw| told(flaw.to_string())))
            });
            assert!(held.iter().all(|(sent, _)| (27..=33).contains(sent)), "{}: {} %", row.name, held[0].0);
            let all: Vec<usize> = held.into_iter().flat_map(|(_, held)| held).collect();
            assert!(all.len() > 2 * REQUESTS);
            check_pages(all.clone(), all.len()).unwrap_or_else(|flaw| told(flaw.to_string()));
        }
    }
}
