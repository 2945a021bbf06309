//! Freeing many blocks, of an array, a run or a list: what stands next decides which collector takes it and those that follow,
//! until one is of another kind. What no collector takes is freed alone, and misuse is told there.
use super::batch::{FreeBatch, block_of};
use super::blocks::Blocks;
use super::large::Large;
use super::one::{free_one, page_at};
use super::segment::Segment;
use pagemill_core::{ListPolicy, Misuse, Order};
use pagemill_os::Batch;

/// Where the blocks stand that are to be freed.
pub(crate) trait Source {
    /// How many are left at most.
    fn left(&self) -> usize;
    /// The address and order of the next one; none if that was all.
    fn next(&mut self) -> Option<(usize, Order)>;
    /// Gives what stands next to a collector, up to the first that it does not take.
    fn give(&mut self, to: &mut impl FreeBatch);
    /// Has `free` free the next one, which says whether it did.
    fn free_next(&mut self, free: &mut dyn FnMut(usize, Order) -> bool);
}

/// Frees all of a source. The first refusal is left in `misused`. Returns how many were freed.
#[inline(always)]
pub(crate) fn free_all<const RAW: bool>(source: &mut impl Source, misused: &mut Option<Misuse>) -> usize {
    let mut freed = 0;
    // How many the last collector of pages had: where kinds alternate, tables for many cost more than they bring.
    let mut last = usize::MAX;
    while let Some((addr, order)) = source.next() {
        let before = source.left();
        if order > Order::ZERO {
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
            source.free_next(&mut |addr, order| match free_one::<RAW>(addr, order) {
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

/// How many went; none if there is no page of Pagemill's at the address.
#[inline]
fn through_segment<const RAW: bool>(source: &mut impl Source, addr: usize) -> Option<usize> {
    let (zone, mobility) = page_at(addr)?;
    let mut segment = Segment::<RAW>::new(zone, mobility);
    source.give(&mut segment);
    Some(segment.end())
}

// Out of line, that the tables are on the stack of those calls alone that want them.
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

/// The slots of an array: those of blocks that are freed are emptied, empty ones are passed over.
pub(super) struct Slots<'w> {
    words: &'w mut [usize],
    at: usize,
    /// The order of raw pointers, which do not say it.
    order: Option<Order>,
}

impl<'w> Slots<'w> {
    /// Handles' words, or, with their order, raw pointers.
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

    fn free_next(&mut self, free: &mut dyn FnMut(usize, Order) -> bool) {
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

    fn free_next(&mut self, free: &mut dyn FnMut(usize, Order) -> bool) {
        free(self.addr, self.order);
        self.addr += self.order.bytes();
    }
}
