//! Peers in Rust: what a Rust program would use today.
//!
//! - `mutex-vec`: a `Vec` of addresses in a `std::sync::Mutex`, 64 at a time.
//! - `array-queue`: `crossbeam_queue::ArrayQueue`, one at a time, since it has no bulk interface. A queue cycles
//!   through all its pages, so it has as many pages as are needed and no more.
//! - `buddy-system`: `buddy_system_allocator::FrameAllocator`, one frame at a time, without its lock.

use std::sync::{Arc, Mutex, PoisonError};

use buddy_system_allocator::FrameAllocator;
use crossbeam_queue::ArrayQueue;

use crate::rows::one_by_one::{OneByOne, OnePage};
use crate::rows::region::Region;
use crate::rows::{Kind, Need, Row, Site, Unavailable};
use crate::subject::{PAGE_BYTES, Subject};
use crate::tables::churn::{ChurnRow, Frames};

/// Pages that `mutex-vec` moves under one hold of its lock: enough to make the lock cheap, short enough to share it.
const LOCKED_AT_ONCE: usize = 64;

pub(crate) fn rows() -> Vec<Row> {
    vec![
        Row::plain("mutex-vec", Kind::Peer, |need: Need| {
            let region = Arc::new(Region::new(need.pages)?);
            let stock = Arc::new(Mutex::new(region.words().collect()));
            let site: Site = Box::new(move |most_held| {
                let held = Vec::with_capacity(most_held);
                Box::new(MutexVec { stock: Arc::clone(&stock), held, _region: Arc::clone(&region) })
            });
            Ok(site)
        }),
        Row::plain("array-queue", Kind::Peer, |need: Need| {
            let region = Arc::new(Region::new(need.pages)?);
            let queue = full_queue(&region, need.pages);
            let site: Site = Box::new(move |most_held| {
                let queue = Queue { queue: Arc::clone(&queue), region: Arc::clone(&region) };
                Box::new(OneByOne::new(queue, most_held))
            });
            Ok(site)
        }),
        Row::plain("buddy-system", Kind::Peer, |need: Need| {
            let region = Arc::new(Region::new(need.pages)?);
            let site: Site = Box::new(move |most_held| {
                let mut frames = FrameAllocator::new();
                let first = region.base() / PAGE_BYTES;
                frames.add_frame(first, first + need.pages);
                Box::new(OneByOne::new(Buddy { frames, _region: Arc::clone(&region) }, most_held))
            });
            Ok(site)
        }),
    ]
}

struct MutexVec {
    stock: Arc<Mutex<Vec<usize>>>,
    held: Vec<usize>,
    _region: Arc<Region>,
}

impl Subject for MutexVec {
    #[inline]
    fn take(&mut self, n: usize) -> bool {
        let mut missing = n;
        while missing > 0 {
            let batch = missing.min(LOCKED_AT_ONCE);
            let mut stock = self.stock.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(rest) = stock.len().checked_sub(batch) else { return false };
            self.held.extend_from_slice(&stock[rest..]);
            stock.truncate(rest);
            missing -= batch;
        }
        true
    }

    #[inline]
    fn put(&mut self) {
        for batch in self.held.chunks(LOCKED_AT_ONCE) {
            self.stock.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(batch);
        }
        self.held.clear();
    }

    fn shuffle(&mut self, rng: &mut fastrand::Rng) {
        rng.shuffle(&mut self.held);
    }

    fn addresses(&mut self) -> Vec<usize> {
        self.held.clone()
    }

    #[inline]
    fn give(&mut self, out: &mut [usize]) -> bool {
        let mut stock = self.stock.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(rest) = stock.len().checked_sub(out.len()) else { return false };
        out.copy_from_slice(&stock[rest..]);
        stock.truncate(rest);
        true
    }

    #[inline]
    fn accept(&mut self, words: &[usize]) {
        self.stock.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(words);
    }
}

#[derive(Clone)]
pub(super) struct Queue {
    queue: Arc<ArrayQueue<usize>>,
    region: Arc<Region>,
}

/// A queue with so many pages and no more, for the table `page-pool`.
pub(super) fn queue_of(pages: usize) -> Result<Queue, Unavailable> {
    let region = Arc::new(Region::new(pages)?);
    Ok(Queue { queue: full_queue(&region, pages), region })
}

/// A queue with the first `pages` of the region's pages.
fn full_queue(region: &Region, pages: usize) -> Arc<ArrayQueue<usize>> {
    let queue = ArrayQueue::new(pages);
    region.words().take(pages).for_each(|addr| _ = queue.push(addr));
    Arc::new(queue)
}

impl OnePage for Queue {
    fn fit(&mut self, n: usize) {
        self.queue = full_queue(&self.region, n);
    }

    #[inline]
    fn get(&mut self) -> usize {
        self.queue.pop().unwrap_or(0)
    }

    #[inline]
    fn put_back(&mut self, addr: usize) {
        let returned = self.queue.push(addr);
        debug_assert!(returned.is_ok(), "the queue holds as many as there are");
    }
}

struct Buddy {
    frames: FrameAllocator,
    _region: Arc<Region>,
}

impl OnePage for Buddy {
    const HANDS_OVER: bool = false;

    #[inline]
    fn get(&mut self) -> usize {
        self.frames.alloc(1).map_or(0, |frame| frame * PAGE_BYTES)
    }

    #[inline]
    fn put_back(&mut self, addr: usize) {
        self.frames.dealloc(addr / PAGE_BYTES, 1);
    }
}

/// `buddy-system` in the table `churn`.
pub(crate) fn churn_row() -> ChurnRow {
    ChurnRow {
        name: "buddy-system",
        backend: "-",
        kind: Kind::Peer,
        open: Box::new(|pages| {
            let mut frames = FrameAllocator::new();
            frames.add_frame(0, pages);
            Ok(Box::new(BuddyFrames { frames, held: Vec::with_capacity(pages), pages }))
        }),
    }
}

struct BuddyFrames {
    frames: FrameAllocator,
    held: Vec<usize>,
    pages: usize,
}

impl Frames for BuddyFrames {
    fn managed(&self) -> usize {
        self.pages
    }

    fn held(&self) -> usize {
        self.held.len()
    }

    fn take(&mut self, n: usize) -> bool {
        for _ in 0..n {
            match self.frames.alloc(1) {
                Some(frame) => self.held.push(frame),
                None => return false,
            }
        }
        true
    }

    fn pick(&mut self, n: usize, rng: &mut fastrand::Rng) {
        crate::tables::churn::pick_to_the_end(&mut self.held, n, rng);
    }

    fn put_last(&mut self, n: usize) {
        for frame in self.held.drain(self.held.len() - n..) {
            self.frames.dealloc(frame, 1);
        }
    }

    fn drain(&mut self) {}

    fn free_huge(&mut self) -> usize {
        let huge: Vec<usize> = std::iter::from_fn(|| self.frames.alloc(crate::tables::churn::HUGE_PAGES)).collect();
        huge.iter().for_each(|&first| self.frames.dealloc(first, crate::tables::churn::HUGE_PAGES));
        huge.len()
    }
}
