//! The word behind a handle: an address, with the block's order in the low bits.
use pagemill_core::{Order, PAGE_SHIFT, Pfn};

/// The bits of a handle's word that hold the order.
const ORDER: usize = 0x1f;
/// A bit that is set in a slot that an all-or-nothing array request has filled and may have to empty again.
pub(crate) const TENTATIVE: usize = 1 << 11;

#[inline]
pub(crate) fn addr_of_word(word: usize) -> usize {
    word & !ORDER
}
/// The order in a handle's word. Only this crate makes words, so the order is valid.
#[inline]
pub(crate) fn order_of_word(word: usize) -> Order {
    Order::new((word & ORDER) as u8).unwrap_or(Order::MAX)
}

/// The word of the page with this number. `zero` is the address that number 0 would have.
#[inline]
pub(crate) fn word_of(zero: usize, pfn: Pfn) -> usize {
    zero.wrapping_add(pfn.as_usize() << PAGE_SHIFT)
}
