//! The interface of the collectors: pages or blocks of one zone and kind, which go to a list or to the zone together.
//!
//! `many.rs` feeds a collector until a block does not fit. A collector takes a block only if it is out, and marks it
//! free.
use crate::word::{addr_of_word, order_of_word};
use crate::zone::Zone;
use pagemill_core::{Order, PAGE_SIZE, Pfn};
use pagemill_os::neighbours;

/// Collects frames of one zone and kind on their way back.
pub(crate) trait FreeBatch {
    fn zone(&self) -> &'static Zone;

    /// The order of the blocks that it takes.
    #[inline]
    fn order(&self) -> Order {
        Order::ZERO
    }

    /// Takes the page or block that begins at this frame of the zone, if it is of this kind and out.
    fn give(&mut self, pfn: Pfn) -> bool;

    /// Takes the page or block at an address, if it belongs to the zone, is of this kind and out.
    #[inline]
    fn give_at(&mut self, addr: usize) -> bool {
        let zone = self.zone();
        addr.is_multiple_of(PAGE_SIZE) && zone.contains(addr) && self.give(zone.pfn_of(addr))
    }

    /// Takes the blocks in `words[at..]` and empties their slots, up to the first block that it does not take. It skips
    /// empty slots. Returns the index where it stopped. `order` is set if the words are raw pointers.
    fn take_slots(&mut self, words: &mut [usize], at: usize, order: Option<Order>) -> usize {
        let takes = |word: usize| {
            let (addr, order) = block_of(word, order);
            order == self.order() && self.give_at(addr)
        };
        at + empty_while(&mut words[at..], takes)
    }

    /// Takes neighbouring blocks of `order` between `addr` and `end`, up to the first that it does not take. Returns
    /// that block's address, or `end`.
    #[inline]
    fn take_run(&mut self, mut addr: usize, end: usize, order: Order) -> usize {
        while addr < end && self.give_at(addr) {
            addr += order.bytes();
        }
        addr
    }
}

/// Empties slots as long as `takes` takes their words. Returns the number of slots passed, empty ones included.
pub(super) fn empty_while(words: &mut [usize], mut takes: impl FnMut(usize) -> bool) -> usize {
    for (i, word) in words.iter_mut().enumerate() {
        if *word != 0 {
            if !takes(*word) {
                return i;
            }
            *word = 0;
        }
    }
    words.len()
}

/// The address and order of the block with this word. The word is a handle's, or with an `order` a raw pointer's.
#[inline]
pub(super) fn block_of(word: usize, order: Option<Order>) -> (usize, Order) {
    match order {
        Some(order) => (word, order),
        None => (addr_of_word(word), order_of_word(word)),
    }
}

/// How many words, from the first on and `most` at most, are those of neighbouring pages.
#[inline(always)]
pub(super) fn address_run(words: &[usize], most: usize) -> usize {
    let words = &words[..words.len().min(most)];
    if words.len() < 2 || words[1] != words[0].wrapping_add(PAGE_SIZE) {
        return words.len().min(1); // Usually pages are in no order: seen before 64 words are compared.
    }
    neighbours(words)
}
