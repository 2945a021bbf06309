//! What pages and blocks on their way back are collected in, until they go to a list or to the zone together.
use crate::word::{addr_of_word, order_of_word};
use crate::zone::Zone;
use pagemill_core::{Order, PAGE_SIZE, Pfn};
use pagemill_os::neighbours;

/// Collects frames of one zone and kind on their way back.
pub(crate) trait FreeBatch {
    fn zone(&self) -> &'static Zone;

    /// The order of what it takes.
    #[inline]
    fn order(&self) -> Order {
        Order::ZERO
    }

    /// Takes the page or block that begins at this frame of its zone, if it is of this kind and out.
    fn give(&mut self, pfn: Pfn) -> bool;

    /// Takes the page or block at an address, if it is one of its zone, of this kind and out.
    #[inline]
    fn give_at(&mut self, addr: usize) -> bool {
        let zone = self.zone();
        addr.is_multiple_of(PAGE_SIZE) && zone.contains(addr) && self.give(zone.pfn_of(addr))
    }

    /// Takes what stands in `words[at..]` and empties the slots, up to the first that it does not take; empty ones are passed
    /// over. Returns where that is. `order` is that of raw pointers.
    fn take_slots(&mut self, words: &mut [usize], at: usize, order: Option<Order>) -> usize {
        let takes = |word: usize| {
            let (addr, order) = block_of(word, order);
            order == self.order() && self.give_at(addr)
        };
        at + empty_while(&mut words[at..], takes)
    }

    /// Takes neighbouring blocks of `order` from `addr` up to `end`, up to the first that it does not take. Returns where that is.
    #[inline]
    fn take_run(&mut self, mut addr: usize, end: usize, order: Order) -> usize {
        while addr < end && self.give_at(addr) {
            addr += order.bytes();
        }
        addr
    }
}

/// Empties slots as long as `takes` takes the words in them. Returns how many it passed.
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

/// The address and order of the block with this word, a handle's, or a raw pointer of this order.
#[inline]
pub(super) fn block_of(word: usize, order: Option<Order>) -> (usize, Order) {
    match order {
        Some(order) => (word, order),
        None => (addr_of_word(word), order_of_word(word)),
    }
}

/// How many of these words, at most `most`, are those of neighbouring pages, from the first on.
#[inline(always)]
pub(super) fn address_run(words: &[usize], most: usize) -> usize {
    let words = &words[..words.len().min(most)];
    if words.len() < 2 || words[1] != words[0].wrapping_add(PAGE_SIZE) {
        return words.len().min(1); // In no order, as a rule: seen before 64 words are compared.
    }
    neighbours(words)
}
