//! The pages of requests.
//!
//! There are two kinds of memory, so that a client can block only itself:
//! - Bytes that a client sends or receives are in pages of the *allocator*, for as long as the client takes. Such pages
//!   may be refused; the connection then continues in small parts, in a buffer of its own ([`Memory::borrow`]).
//! - Bytes that go to the disk are in pages of the *pool*, which has a reserve ([`Memory::take`]). These pages come
//!   back when the disk is done, whatever the clients do.
//!
//! Invariants: no page of the pool is held while waiting for a client (W1). A worker that holds pages of the pool never
//! waits for more of them: it tries, and tries again when some of its own are back (W2, C5.3).
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use pagemill::{Allocator, Bulk, Error, Gfp, Mempool, PAGE_SIZE, Page, PageSource, free_pages_bulk};

use super::buffer::{Buffer, Origin};

/// What to do if the pool has too few pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// Nothing.
    None,
    /// Wait until others free theirs. Only for a caller that holds none.
    Wait,
}

/// Statistics of a server's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryStats {
    /// Parts that had to wait for pages of the pool.
    pub waits: u64,
    /// The longest of these waits.
    pub longest_wait: Duration,
    /// How often there were no pages for a client's bytes, so that the connection's own buffer was used.
    pub short: u64,
}

/// A server's memory. A clone is the same memory: the volumes of a server share it.
#[derive(Clone, Debug)]
pub struct Memory {
    allocator: Allocator,
    pool: Arc<Mempool<PageSource<Page>>>,
    part: usize,
    counts: Arc<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    waits: AtomicU64,
    longest_us: AtomicU64,
    short: AtomicU64,
}

impl Memory {
    /// The default of the longest part of a request that goes through the pool at once: the longest request of most
    /// clients.
    pub const PART: usize = 1 << 20;
    /// The default number of pages of the reserve: four such parts.
    pub const PROMISED: usize = 4 * Self::PART / PAGE_SIZE;

    /// Over `allocator`, with a reserve of `promised` pages, and parts of at most `part` bytes.
    ///
    /// # Errors
    /// As [`Mempool::pages`].
    pub fn new(allocator: &Allocator, promised: usize, part: usize) -> Result<Self, Error> {
        let pool = Arc::new(Mempool::pages(allocator, promised)?);
        let part = part.min(promised * PAGE_SIZE) / PAGE_SIZE * PAGE_SIZE;
        Ok(Self { allocator: allocator.clone(), pool, part: part.max(PAGE_SIZE), counts: Arc::default() })
    }

    /// The most bytes of a buffer; longer requests are split.
    #[must_use]
    pub fn part(&self) -> usize {
        self.part
    }

    /// The allocator of the pages.
    #[must_use]
    pub fn allocator(&self) -> &Allocator {
        &self.allocator
    }

    /// The pool.
    #[must_use]
    pub fn pool(&self) -> &Arc<Mempool<PageSource<Page>>> {
        &self.pool
    }

    /// Its statistics.
    #[must_use]
    pub fn stats(&self) -> MemoryStats {
        MemoryStats {
            waits: self.counts.waits.load(Relaxed),
            longest_wait: Duration::from_micros(self.counts.longest_us.load(Relaxed)),
            short: self.counts.short.load(Relaxed),
        }
    }

    /// Counts a part that has waited.
    pub(super) fn note_wait(&self, length: Duration) {
        self.counts.waits.fetch_add(1, Relaxed);
        self.counts.longest_us.fetch_max(length.as_micros() as u64, Relaxed);
    }

    /// Counts a use of a connection's own buffer.
    pub(super) fn note_short(&self) {
        self.counts.short.fetch_add(1, Relaxed);
    }

    /// Memory for bytes that a client sends or receives, if there is any.
    #[must_use]
    pub fn borrow(&self, len: usize) -> Option<Buffer> {
        let count = len.div_ceil(PAGE_SIZE);
        let mut pages = empty_slots(count);
        self.allocator.alloc_pages_bulk_array(Bulk::exact(count).gfp(Gfp::NOWAIT), &mut pages).ok()?;
        Some(Buffer::of_pages(pages, len, Origin::Free))
    }

    /// Memory for bytes that go to the disk, at most [`Memory::part`]. `None` if there is too little, and `patience`
    /// does not allow waiting.
    ///
    /// # Errors
    /// As for [`Mempool::alloc_bulk_array`], except [`Error::Exhausted`].
    pub fn take(&self, len: usize, patience: Patience) -> Result<Option<Buffer>, Error> {
        let count = len.div_ceil(PAGE_SIZE);
        let mut pages = empty_slots(count);
        let gfp = if patience == Patience::Wait { Gfp::NOIO } else { Gfp::NOWAIT };
        match self.pool.alloc_bulk_array_raw(Bulk::exact(count).gfp(gfp), &mut pages) {
            Ok(()) => Ok(Some(Buffer::of_pages(pages, len, Origin::Pool))),
            // Delivered pages stay in the array, and must not be held while others wait.
            Err(Error::Exhausted(_)) => {
                self.pool.free_bulk_raw(&mut pages);
                Ok(None)
            }
            Err(other) => Err(other),
        }
    }

    /// Frees a buffer, all its pages with one call.
    pub fn give_back(&self, mut buffer: Buffer) {
        match buffer.origin {
            Origin::Pool => self.pool.free_bulk_raw(&mut buffer.pages),
            Origin::Free | Origin::Connection => free_pages_bulk(&mut buffer.pages),
        };
    }
}

fn empty_slots(count: usize) -> Vec<Option<Page>> {
    std::iter::repeat_with(|| None).take(count).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(pages: usize, promised: usize) -> Memory {
        let allocator = Allocator::builder().pages(pages).build().unwrap();
        Memory::new(&allocator, promised, 1 << 20).unwrap()
    }

    #[test]
    fn buffers_return_their_pages() {
        let memory = memory(1024, 64);
        assert_eq!(memory.part(), 64 * PAGE_SIZE, "the promise, where that is less");
        for len in [512, 4096, 5000, memory.part()] {
            let taken = memory.take(len, Patience::None).unwrap().unwrap();
            let borrowed = memory.borrow(len).unwrap();
            assert_eq!((taken.len(), borrowed.len()), (len, len));
            memory.give_back(taken);
            memory.give_back(borrowed);
        }
        assert_eq!(memory.pool().stats().out, 0);
        assert_eq!(memory.allocator().validate().unwrap().handed_out, 64, "the reserve and nothing else");
    }

    #[test]
    fn a_failed_take_returns_the_allocators_pages_too() {
        let allocator = Allocator::builder().pages(20).cpus(1, || 0).build().unwrap();
        let memory = Memory::new(&allocator, 16, 1 << 20).unwrap();
        let borrowed = memory.borrow(2 * PAGE_SIZE).unwrap();
        // Two pages of the allocator, twelve of the reserve.
        let taken = memory.take(14 * PAGE_SIZE, Patience::None).unwrap().unwrap();
        memory.give_back(borrowed);
        assert_eq!((memory.pool().stats().reserve, allocator.validate().unwrap().handed_out), (4, 18));
        assert!(memory.take(7 * PAGE_SIZE, Patience::None).unwrap().is_none());
        let stats = memory.pool().stats();
        // They go to the reserve, which is not full.
        assert_eq!((stats.out, stats.reserve, allocator.validate().unwrap().handed_out), (14, 6, 20));
        memory.give_back(taken);
        assert_eq!((memory.pool().stats().out, memory.pool().stats().reserve), (0, 16));
    }

    #[test]
    fn a_failed_take_or_borrow_keeps_no_pages() {
        let memory = memory(20, 16);
        let all = memory.take(16 * PAGE_SIZE, Patience::None).unwrap().unwrap();
        // Four are left of 20.
        assert!(memory.take(5 * PAGE_SIZE, Patience::None).unwrap().is_none());
        assert!(memory.borrow(5 * PAGE_SIZE).is_none());
        assert_eq!(memory.pool().stats().out, 16);
        let rest = memory.take(4 * PAGE_SIZE, Patience::None).unwrap().unwrap();
        memory.give_back(all);
        memory.give_back(rest);
        assert_eq!(memory.pool().stats().out, 0);
    }

    #[test]
    fn a_waiting_take_is_served_when_pages_come_back() {
        let memory = memory(16, 16);
        let held = memory.take(9 * PAGE_SIZE, Patience::None).unwrap().unwrap();
        std::thread::scope(|scope| {
            // Each needs more pages than there are now, and together they need more than the pool has: they are served
            // in turn.
            let waiters: Vec<_> = (0..3)
                .map(|_| {
                    scope.spawn(|| {
                        let got = memory.take(12 * PAGE_SIZE, Patience::Wait).unwrap().unwrap();
                        assert_eq!(got.len(), 12 * PAGE_SIZE);
                        memory.give_back(got);
                    })
                })
                .collect();
            std::thread::sleep(Duration::from_millis(20));
            memory.give_back(held);
            waiters.into_iter().for_each(|waiter| waiter.join().unwrap());
        });
        assert_eq!(memory.pool().stats().out, 0);
    }
}
