//! A row of a table ([`Subject`]), and the loops that time it ([`Runner`]).
//!
//! A subject allocates and frees pages in the form in which its own users hold them. The loops are written once and
//! compiled for every subject, so that no row pays for a dynamic call per operation: [`Runner`] is the object-safe
//! interface to whole loops, called once a round.
//!
//! - I1: between two calls of a loop a subject holds no page.
//! - I2: a loop returns an error instead of a figure if the subject got fewer pages than it was asked for.
//! - I3: no loop reads a clock inside the timed part, except [`Runner::parts`] and [`Runner::scattered`]; their caller
//!   subtracts the clock's cost.

use std::hint::black_box;
use std::io;
use std::time::{Duration, Instant};

use pagemill::{Allocator, Gfp, Page};

pub(crate) use pagemill_harness::PAGE_BYTES;
pub(crate) use pagemill_harness::rounds::{ListOrder, Parts};

/// Pages that one thread hands to the other at a time in the table `threads`.
pub(crate) const HAND_OVER_PAGES: usize = 64;

/// Pages that [`Arrange::arrange`] puts on the list of the measuring thread's CPU, one by one.
pub(crate) const STOCK_PAGES: usize = 1024;

/// Brings lists into an order, and checks that they have it.
pub(crate) trait Arrange {
    /// Brings the list of this thread's CPU into this order, through single pages: a bulk free might sort them.
    fn arrange(self, allocator: &Allocator, rng: &mut fastrand::Rng);

    /// Checks pages as a list in this order handed them out: in random order few follow their neighbour in memory, in
    /// the others most do, upwards or downwards.
    fn check(self, addresses: &[usize]) -> Result<(), Flaw>;
}

impl Arrange for ListOrder {
    fn arrange(self, allocator: &Allocator, rng: &mut fastrand::Rng) {
        // From here on the zone refills the list, which it does in ascending order.
        allocator.drain();
        let pages = if self == ListOrder::InOrder { 1 } else { STOCK_PAGES };
        let page = || allocator.alloc_page(Gfp::KERNEL).ok();
        let mut stock: Vec<Page> = std::iter::from_fn(page).take(pages).collect();
        if self == ListOrder::Random {
            rng.shuffle(&mut stock);
        }
        // A vector drops its first page first.
        drop(stock);
    }

    fn check(self, addresses: &[usize]) -> Result<(), Flaw> {
        let pairs = addresses.len().saturating_sub(1);
        let neighbours = addresses.windows(2).filter(|pair| pair[0].abs_diff(pair[1]) == PAGE_BYTES).count();
        let is_so = match self {
            ListOrder::Random => 4 * neighbours <= pairs,
            ListOrder::Fifo | ListOrder::InOrder => 4 * neighbours >= 3 * pairs,
        };
        is_so.then_some(()).ok_or(Flaw::Order { order: self.label(), neighbours, pairs })
    }
}

/// What was wrong with the pages of a row, so that its figures would mean nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Flaw {
    #[error("got fewer than the {wanted} pages it was asked for")]
    Short { wanted: usize },
    #[error("holds {held} pages after taking {wanted}")]
    Count { wanted: usize, held: usize },
    #[error("handed out {addr:#x}, which is not aligned to {PAGE_BYTES} bytes")]
    Unaligned { addr: usize },
    #[error("handed out memory that overlaps at {addr:#x}")]
    Overlap { addr: usize },
    #[error(
        "should have its list in the order `{order}`, but {neighbours} of {pairs} pages follow their neighbour in memory"
    )]
    Order { order: &'static str, neighbours: usize, pairs: usize },
    #[error("had {percent} of 100 pages freed by the other thread, and not about {wanted}")]
    Sent { percent: usize, wanted: usize },
    #[error("got fewer than the {wanted} blocks it was asked for")]
    ShortOfBlocks { wanted: usize },
    #[error("holds {held} blocks after taking {wanted}")]
    CountOfBlocks { wanted: usize, held: usize },
    #[error("handed out a block at {addr:#x}, which is not aligned to {align} bytes")]
    UnalignedBlock { addr: usize, align: usize },
    #[error("tells the device that the block at {addr:#x} is at {device:#x}")]
    Elsewhere { addr: usize, device: u64 },
    #[error("has pages that the system did not take back")]
    Kept,
    #[error("asked for {wanted} committed pages, and got {committed}")]
    Uncommitted { wanted: usize, committed: usize },
    /// Something else failed that the table does with its pages.
    #[error("failed: {0}")]
    Failed(String),
}

impl From<io::Error> for Flaw {
    fn from(error: io::Error) -> Flaw {
        Flaw::Failed(error.to_string())
    }
}

/// One way of getting pages, as its own users would use it.
pub(crate) trait Subject {
    /// Resizes its stock to what a program that needs `n` pages would have. Untimed; called while it holds no page and
    /// no other thread uses it.
    fn fit(&mut self, _n: usize) {}

    /// The allocator whose per-CPU lists the pages come from, if a page's cost may depend on the order of these lists.
    fn allocator(&self) -> Option<&Allocator> {
        None
    }

    /// Allocates `n` pages, while holding none. False if there were fewer.
    fn take(&mut self, n: usize) -> bool;

    /// Frees all pages that it holds, in the order in which they were allocated.
    fn put(&mut self);

    /// Shuffles the pages that it holds. Untimed.
    fn shuffle(&mut self, rng: &mut fastrand::Rng);

    /// Frees all pages that it holds, after [`Subject::shuffle`].
    fn put_scattered(&mut self) {
        self.put();
    }

    /// The addresses of the pages that it holds. Untimed.
    fn addresses(&mut self) -> Vec<usize>;

    /// Whether the row is defined for `n` pages.
    fn supports(&self, _n: usize) -> bool {
        true
    }

    /// Whether another thread can free the pages.
    fn hands_over(&self) -> bool {
        true
    }

    /// Allocates `out.len()` pages and leaves them in `out` as addresses. False if there were fewer.
    fn give(&mut self, out: &mut [usize]) -> bool;

    /// Frees pages that another thread's [`Subject::give`] allocated.
    fn accept(&mut self, words: &[usize]);

    /// Allocates and frees `n` pages `reps` times. Overridden by rows whose own users write this loop in C.
    fn batch_loop(&mut self, n: usize, reps: usize) -> bool {
        let mut complete = true;
        for _ in 0..reps {
            complete &= self.take(n);
            black_box(&mut *self);
            self.put();
        }
        complete
    }
}

/// The timed loops over one subject.
pub(crate) trait Runner {
    /// Prepares for `n` pages: [`Subject::fit`].
    fn fit(&mut self, n: usize);

    /// Whether a page's cost may depend on the order of a list, which [`Runner::arrange`] sets.
    fn has_list(&self) -> bool;

    /// Brings the list of this thread's CPU into `order`. Untimed; called while no page is held.
    fn arrange(&mut self, order: ListOrder, rng: &mut fastrand::Rng);

    /// Allocates `n` pages, frees them, and returns their addresses in the order in which they were held.
    fn handed_out(&mut self, n: usize) -> Result<Vec<usize>, Flaw>;

    /// Allocates `n` pages, and checks that they are distinct and aligned.
    fn verify(&mut self, n: usize) -> Result<(), Flaw> {
        check_pages(self.handed_out(n)?, n)
    }

    /// Allocates and frees `n` pages `reps` times, timed as a whole.
    fn batch(&mut self, n: usize, reps: usize) -> Result<Duration, Flaw>;

    /// The same with a clock reading before, between and after the halves of each repetition.
    fn parts(&mut self, n: usize, reps: usize) -> Result<Parts, Flaw>;

    /// The same, with the pages shuffled, untimed, between the halves.
    fn scattered(&mut self, n: usize, reps: usize, rng: &mut fastrand::Rng) -> Result<Parts, Flaw>;

    /// Allocates [`HAND_OVER_PAGES`] pages `batches` times and sends them into `ring`; stops when there are too few
    /// pages.
    fn produce(&mut self, ring: &mut rtrb::Producer<usize>, batches: usize) -> Result<(), Flaw>;

    /// Frees the pages that [`Runner::produce`] sends, until `batches` have come or the producer stopped.
    fn consume(&mut self, ring: &mut rtrb::Consumer<usize>, batches: usize);

    fn supports(&self, n: usize) -> bool;

    fn hands_over(&self) -> bool;
}

impl<S: Subject> Runner for S {
    fn fit(&mut self, n: usize) {
        Subject::fit(self, n);
    }

    fn has_list(&self) -> bool {
        self.allocator().is_some()
    }

    fn arrange(&mut self, order: ListOrder, rng: &mut fastrand::Rng) {
        if let Some(allocator) = self.allocator() {
            order.arrange(allocator, rng);
        }
    }

    fn handed_out(&mut self, n: usize) -> Result<Vec<usize>, Flaw> {
        let complete = self.take(n);
        let addresses = self.addresses();
        self.put();
        complete.then_some(addresses).ok_or(Flaw::Short { wanted: n })
    }

    #[inline(never)]
    fn batch(&mut self, n: usize, reps: usize) -> Result<Duration, Flaw> {
        let start = Instant::now();
        let complete = self.batch_loop(n, reps);
        let elapsed = start.elapsed();
        complete.then_some(elapsed).ok_or(Flaw::Short { wanted: n })
    }

    #[inline(never)]
    fn parts(&mut self, n: usize, reps: usize) -> Result<Parts, Flaw> {
        let mut parts = Parts::default();
        let mut complete = true;
        for _ in 0..reps {
            let start = Instant::now();
            complete &= self.take(n);
            black_box(&mut *self);
            let middle = Instant::now();
            self.put();
            black_box(&mut *self);
            let end = Instant::now();
            parts.alloc += middle - start;
            parts.free += end - middle;
        }
        complete.then_some(parts).ok_or(Flaw::Short { wanted: n })
    }

    #[inline(never)]
    fn scattered(&mut self, n: usize, reps: usize, rng: &mut fastrand::Rng) -> Result<Parts, Flaw> {
        let mut parts = Parts::default();
        let mut complete = true;
        for _ in 0..reps {
            let start = Instant::now();
            complete &= self.take(n);
            black_box(&mut *self);
            parts.alloc += start.elapsed();
            self.shuffle(rng);
            let start = Instant::now();
            self.put_scattered();
            black_box(&mut *self);
            parts.free += start.elapsed();
        }
        complete.then_some(parts).ok_or(Flaw::Short { wanted: n })
    }

    #[inline(never)]
    fn produce(&mut self, ring: &mut rtrb::Producer<usize>, batches: usize) -> Result<(), Flaw> {
        let mut words = [0; HAND_OVER_PAGES];
        for _ in 0..batches {
            if !self.give(&mut words) {
                return Err(Flaw::Short { wanted: HAND_OVER_PAGES });
            }
            let chunk = loop {
                if let Ok(chunk) = ring.write_chunk_uninit(HAND_OVER_PAGES) {
                    break chunk;
                }
                std::hint::spin_loop();
            };
            chunk.fill_from_iter(words);
        }
        Ok(())
    }

    #[inline(never)]
    fn consume(&mut self, ring: &mut rtrb::Consumer<usize>, batches: usize) {
        for _ in 0..batches {
            let chunk = loop {
                // Read before the ring is, so that no batch is missed that the producer sent before it stopped.
                let is_abandoned = ring.is_abandoned();
                if let Ok(chunk) = ring.read_chunk(HAND_OVER_PAGES) {
                    break chunk;
                }
                if is_abandoned {
                    return;
                }
                std::hint::spin_loop();
            };
            // The ring's size is a multiple of the batch, so a batch never wraps: the second slice is empty.
            let (first, second) = chunk.as_slices();
            self.accept(first);
            if !second.is_empty() {
                self.accept(second);
            }
            chunk.commit_all();
        }
    }

    fn supports(&self, n: usize) -> bool {
        Subject::supports(self, n)
    }

    fn hands_over(&self) -> bool {
        Subject::hands_over(self)
    }
}

/// Checks that `addresses` are `n` aligned pages of which no two overlap.
pub(crate) fn check_pages(mut addresses: Vec<usize>, n: usize) -> Result<(), Flaw> {
    if addresses.len() != n {
        return Err(Flaw::Count { wanted: n, held: addresses.len() });
    }
    if let Some(&addr) = addresses.iter().find(|&&addr| addr == 0 || addr % PAGE_BYTES != 0) {
        return Err(Flaw::Unaligned { addr });
    }
    addresses.sort_unstable();
    match addresses.windows(2).find(|pair| pair[1] - pair[0] < PAGE_BYTES) {
        Some(pair) => Err(Flaw::Overlap { addr: pair[1] }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_check_of_pages_fails_on_each_flaw() {
        let page = PAGE_BYTES;
        assert_eq!(check_pages(vec![3 * page, page, 2 * page], 3), Ok(()));
        assert_eq!(check_pages(vec![page], 2), Err(Flaw::Count { wanted: 2, held: 1 }));
        assert_eq!(check_pages(vec![page, 2 * page + 8], 2), Err(Flaw::Unaligned { addr: 2 * page + 8 }));
        assert_eq!(check_pages(vec![0], 1), Err(Flaw::Unaligned { addr: 0 }));
        assert_eq!(check_pages(vec![2 * page, page, 2 * page], 3), Err(Flaw::Overlap { addr: 2 * page }));
    }

    #[test]
    fn a_list_in_the_wrong_order_is_caught() {
        let at = |pages: &[usize]| pages.iter().map(|page| page * PAGE_BYTES).collect::<Vec<_>>();
        let (up, down, mixed) = (at(&[1, 2, 3, 4, 5]), at(&[5, 4, 3, 2, 1]), at(&[3, 9, 1, 7, 5]));
        for order in [ListOrder::InOrder, ListOrder::Fifo] {
            assert_eq!((order.check(&up), order.check(&down)), (Ok(()), Ok(())));
            assert_eq!(order.check(&mixed), Err(Flaw::Order { order: order.label(), neighbours: 0, pairs: 4 }));
        }
        assert_eq!(ListOrder::Random.check(&mixed), Ok(()));
        assert_eq!(ListOrder::Random.check(&down), Err(Flaw::Order { order: "random", neighbours: 4, pairs: 4 }));
    }

    /// Hands out the same page every time, or one page too few.
    struct Broken {
        held: Vec<usize>,
        is_short: bool,
    }

    impl Subject for Broken {
        fn take(&mut self, n: usize) -> bool {
            self.held.extend(std::iter::repeat_n(PAGE_BYTES, n - usize::from(self.is_short)));
            !self.is_short
        }
        fn put(&mut self) {
            self.held.clear();
        }
        fn shuffle(&mut self, _rng: &mut fastrand::Rng) {}
        fn addresses(&mut self) -> Vec<usize> {
            self.held.clone()
        }
        fn give(&mut self, _out: &mut [usize]) -> bool {
            !self.is_short
        }
        fn accept(&mut self, _words: &[usize]) {}
    }

    #[test]
    fn a_row_that_hands_a_page_out_twice_is_caught() {
        let mut broken = Broken { held: Vec::new(), is_short: false };
        assert_eq!(broken.verify(2), Err(Flaw::Overlap { addr: PAGE_BYTES }));
        assert!(broken.held.is_empty(), "the check puts back what it took");
    }

    #[test]
    fn a_row_that_runs_short_gets_an_error_instead_of_a_time() {
        let mut broken = Broken { held: Vec::new(), is_short: true };
        let short = Flaw::Short { wanted: 4 };
        assert_eq!(broken.verify(4), Err(short.clone()));
        assert_eq!(broken.batch(4, 3), Err(short.clone()));
        assert_eq!(broken.parts(4, 3), Err(short.clone()));
        assert_eq!(broken.scattered(4, 3, &mut fastrand::Rng::with_seed(1)), Err(short));
    }
}
