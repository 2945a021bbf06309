//! Frees many blocks, of an array, a run or a list.
//!
//! The next block decides which collector takes it and those that follow, until one is of another kind: [`Segment`] for
//! pages, [`Large`] for many pages, [`Blocks`] for blocks. A block that no collector takes is freed alone, which
//! detects misuse.
use super::batch::{FreeBatch, block_of};
use super::blocks::Blocks;
use super::large::Large;
use super::one::{free_one, page_at};
use super::segment::Segment;
use pagemill_core::{ListPolicy, Misuse, Order};
use pagemill_os::Batch;

/// A sequence of blocks to be freed.
pub(crate) trait Source {
    /// An upper limit on the number of blocks left.
    fn left(&self) -> usize;
    /// The address and order of the next block; none at the end.
    fn next(&mut self) -> Option<(usize, Order)>;
    /// Gives the next blocks to a collector, up to the first block that it does not take.
    fn give(&mut self, to: &mut impl FreeBatch);
    /// Passes the next block to `free`, which returns whether it freed it.
    fn free_next(&mut self, free: impl FnOnce(usize, Order) -> bool);
}

/// Frees all blocks of a source. `misused` gets the first refusal. Returns the number of blocks freed.
#[inline(always)]
pub(crate) fn free_all<const RAW: bool>(source: &mut impl Source, misused: &mut Option<Misuse>) -> usize {
    let mut freed = 0;
    // How many pages the last collector took. Where kinds alternate, the tables of a large collector cost more than
    // they save. For one page or block no collector is worth its tables.
    let mut last = usize::MAX;
    while let Some((addr, order)) = source.next() {
        let before = source.left();
        if before > 1 && order > Order::ZERO {
            freed += through_blocks::<RAW>(source, addr, order, misused);
        } else if before > 1 {
            let is_large = before > ListPolicy::LARGE && last >= Batch::CAPACITY;
            let pages = if is_large {
                through_large::<RAW>(source, addr, misused)
            } else {
                through_segment::<RAW>(source, addr)
            };
            last = pages.unwrap_or(last);
            freed += pages.unwrap_or(0);
        }
        if source.left() == before {
            source.free_next(|addr, order| match free_one::<RAW>(addr, order) {
                Ok(()) => {
                    freed += 1;
                    true
                }
                Err(misuse) => {
                    *misused = misused.or(Some(misuse));
                    false
                }
            });
        }
    }
    freed
}

/// Returns the number of pages freed; none if no zone has a page at the address.
#[inline]
fn through_segment<const RAW: bool>(source: &mut impl Source, addr: usize) -> Option<usize> {
    let (zone, mobility) = page_at(addr)?;
    let mut segment = Segment::<RAW>::new(zone, mobility);
    source.give(&mut segment);
    Some(segment.end())
}

// Out of line, so that only calls that need the tables have them on the stack.
#[inline(never)]
fn through_large<const RAW: bool>(
    source: &mut impl Source,
    addr: usize,
    misused: &mut Option<Misuse>,
) -> Option<usize> {
    let (zone, mobility) = page_at(addr)?;
    let mut large = Large::<RAW>::new(zone, mobility);
    source.give(&mut large);
    Some(large.end(misused))
}

#[inline(never)]
fn through_blocks<const RAW: bool>(
    source: &mut impl Source,
    addr: usize,
    order: Order,
    misused: &mut Option<Misuse>,
) -> usize {
    let Some(mut blocks) = Blocks::<RAW>::new(addr, order) else { return 0 };
    source.give(&mut blocks);
    blocks.end(misused)
}

/// An array's slots. Freeing a block empties its slot; empty slots are skipped.
pub(super) struct Slots<'w> {
    words: &'w mut [usize],
    at: usize,
    /// The order of raw pointers, whose words do not contain it.
    order: Option<Order>,
}

impl<'w> Slots<'w> {
    /// The words are handles', or with an `order` raw pointers.
    #[inline(always)]
    pub(super) fn new(words: &'w mut [usize], order: Option<Order>) -> Self {
        Self { words, at: 0, order }
    }
}

impl Source for Slots<'_> {
    #[inline]
    fn left(&self) -> usize {
        self.words.len() - self.at
    }

    #[inline]
    fn next(&mut self) -> Option<(usize, Order)> {
        while let Some(&word) = self.words.get(self.at) {
            if word != 0 {
                return Some(block_of(word, self.order));
            }
            self.at += 1;
        }
        None
    }

    #[inline]
    fn give(&mut self, to: &mut impl FreeBatch) {
        self.at = to.take_slots(self.words, self.at, self.order);
    }

    fn free_next(&mut self, free: impl FnOnce(usize, Order) -> bool) {
        let (addr, order) = block_of(self.words[self.at], self.order);
        if free(addr, order) {
            self.words[self.at] = 0;
        }
        self.at += 1;
    }
}

/// Neighbouring blocks of one order.
pub(super) struct Neighbours {
    pub(super) addr: usize,
    pub(super) end: usize,
    pub(super) order: Order,
}

impl Source for Neighbours {
    #[inline]
    fn left(&self) -> usize {
        (self.end - self.addr) / self.order.bytes()
    }

    #[inline]
    fn next(&mut self) -> Option<(usize, Order)> {
        (self.addr < self.end).then_some((self.addr, self.order))
    }

    #[inline]
    fn give(&mut self, to: &mut impl FreeBatch) {
        self.addr = to.take_run(self.addr, self.end, self.order);
    }

    fn free_next(&mut self, free: impl FnOnce(usize, Order) -> bool) {
        free(self.addr, self.order);
        self.addr += self.order.bytes();
    }
}
