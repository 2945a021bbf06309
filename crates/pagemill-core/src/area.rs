//! The words of a pageblock's metadata: 8 words of 64 bits, in which a set bit is a free frame, and one entry of 32 bits that
//! counts them. This module only computes with single words. [`crate::buddy`] says which operation may change them when.
use crate::{Mobility, Order};

/// A pageblock's entry.
///
/// | bits | |
/// |---|---|
/// | 0-9 | free frames that are not reserved |
/// | 10-11 | mobility, meaningful while the block is in use, or whole and first |
/// | 12 | bound: a CPU takes frames from it |
/// | 13 | handed out whole, as an order-9 block or part of a larger one |
/// | 14 | whole, and not the first pageblock of its block |
/// | 16-20 | whole and first: the order; 0 while its memory goes back to the system |
/// | 16-31 | all frames free: see [`crate::idle`] |
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Entry(pub(crate) u32);

impl Entry {
    const FREE: u32 = (1 << 10) - 1;
    const MOBILITY_SHIFT: u32 = 10;
    const BOUND: u32 = 1 << 12;
    const WHOLE: u32 = 1 << 13;
    const TAIL: u32 = 1 << 14;
    const ORDER_SHIFT: u32 = 16;
    const MARK_SHIFT: u32 = 16;
    /// The mark of a pageblock whose memory is gone.
    pub(crate) const GONE: u16 = u16::MAX;

    pub(crate) const fn unused(free: u32) -> Self {
        Self(free)
    }
    /// The first pageblock of a block that is handed out whole. When it is split, its pages get this `mobility`.
    pub(crate) const fn whole(order: Order, mobility: Mobility) -> Self {
        Self(Self::WHOLE | (mobility as u32) << Self::MOBILITY_SHIFT | (order.get() as u32) << Self::ORDER_SHIFT)
    }
    /// Any other pageblock of such a block.
    pub(crate) const TAIL_OF_WHOLE: Self = Self(Self::WHOLE | Self::TAIL);
    /// A pageblock that is taken while its memory goes back to the system.
    pub(crate) const GOING: Self = Self::whole(Order::ZERO, Mobility::Unmovable);
    pub(crate) const fn in_use(free: u32, mobility: Mobility) -> Self {
        Self(free | (mobility as u32) << Self::MOBILITY_SHIFT)
    }
    pub(crate) const fn free(self) -> u32 {
        self.0 & Self::FREE
    }
    pub(crate) const fn mobility(self) -> Mobility {
        Mobility::from_index(self.0 >> Self::MOBILITY_SHIFT)
    }
    pub(crate) const fn is_bound(self) -> bool {
        self.0 & Self::BOUND != 0
    }
    pub(crate) const fn is_whole(self) -> bool {
        self.0 & Self::WHOLE != 0
    }
    /// The order, if this is the first pageblock of a block that is handed out whole.
    pub(crate) const fn whole_order(self) -> Option<u8> {
        if self.0 & (Self::WHOLE | Self::TAIL) == Self::WHOLE {
            Some((self.0 >> Self::ORDER_SHIFT) as u8)
        } else {
            None
        }
    }
    pub(crate) const fn with_free(self, free: u32) -> Self {
        Self(self.0 & !Self::FREE | free)
    }
    /// The entry of a pageblock in use by `mobility`, without the mark.
    pub(crate) const fn with_mobility(self, mobility: Mobility) -> Self {
        const KEPT: u32 = ((1 << Entry::MARK_SHIFT) - 1) & !(3 << Entry::MOBILITY_SHIFT);
        Self(self.0 & KEPT | (mobility as u32) << Self::MOBILITY_SHIFT)
    }
    /// What is known of the memory of a pageblock whose frames are all free.
    pub(crate) const fn mark(self) -> u16 {
        (self.0 >> Self::MARK_SHIFT) as u16
    }
    pub(crate) const fn with_mark(self, mark: u16) -> Self {
        Self(self.0 & ((1 << Self::MARK_SHIFT) - 1) | (mark as u32) << Self::MARK_SHIFT)
    }
    pub(crate) const fn with_bound(self, is_bound: bool) -> Self {
        Self(if is_bound { self.0 | Self::BOUND } else { self.0 & !Self::BOUND })
    }
}

/// The `n` lowest bits; all 64 if `n` is larger.
pub(crate) fn low_bits(n: u32) -> u64 {
    if n >= 64 { !0 } else { (1 << n) - 1 }
}

/// The `n` lowest set bits of `word`, or all of them if it has fewer.
pub(crate) fn lowest(word: u64, n: u32) -> u64 {
    if word.count_ones() <= n {
        return word;
    }
    let mut rest = word;
    for _ in 0..n {
        rest &= rest - 1;
    }
    word ^ rest
}

/// Bit i of entry k: position i is a multiple of 2^k.
const STARTS: [u64; 7] = [
    !0,
    0x5555_5555_5555_5555,
    0x1111_1111_1111_1111,
    0x0101_0101_0101_0101,
    0x0001_0001_0001_0001,
    0x0000_0001_0000_0001,
    1,
];

/// The positions in `word` where 2^order set bits begin, aligned to their number; order 0 to 6.
#[inline]
pub(crate) fn aligned_runs(word: u64, order: u8) -> u64 {
    if word == !0 {
        return STARTS[usize::from(order)]; // The usual case where whole pageblocks are free.
    }
    let mut runs = word;
    for half in 0..order {
        runs &= runs >> (1 << half);
    }
    runs & STARTS[usize::from(order)]
}

/// A run of 2^order set bits, for orders 0 to 6.
pub(crate) const fn run_mask(order: u8) -> u64 {
    if order >= 6 { !0 } else { (1 << (1 << order)) - 1 }
}

/// Where in `word` up to `n` blocks of this order are best taken: first where they break no larger one, then the lowest.
#[inline]
pub(crate) fn best_runs(word: u64, order: u8, n: u32) -> u64 {
    let runs = aligned_runs(word, order);
    let unbroken = if order < 6 {
        let larger = runs & (runs >> (1 << order)) & STARTS[usize::from(order) + 1];
        larger | larger << (1 << order)
    } else {
        0
    };
    let cheap = runs & !unbroken;
    match n {
        1 if cheap != 0 => cheap & cheap.wrapping_neg(),
        1 => runs & runs.wrapping_neg(),
        // `n` is at least the number of blocks that fit in a word.
        _ if n >= 64 >> order => runs,
        _ => {
            let cheap = lowest(cheap, n);
            cheap | lowest(runs & unbroken, n - cheap.count_ones())
        }
    }
}

/// The bits of all blocks of this order that begin at these positions.
pub(crate) const fn bits_of_runs(runs: u64, order: u8) -> u64 {
    runs.wrapping_mul(run_mask(order)) // None overlaps another one, so nothing is carried.
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lowest_takes_from_the_bottom() {
        assert_eq!(lowest(0b1011_0100, 2), 0b0001_0100);
        assert_eq!(lowest(0b101, 64), 0b101);
        assert_eq!(lowest(!0, 64), !0);
    }

    #[test]
    fn runs_are_aligned_and_whole() {
        assert_eq!(aligned_runs(0b0110_1111, 1), 0b0000_0101);
        assert_eq!(aligned_runs(0xff, 3), 1);
        assert_eq!(aligned_runs(!0, 6), 1);
        assert_eq!(aligned_runs(!1, 6), 0);
    }

    #[test]
    fn the_best_run_breaks_no_larger_one() {
        // Bits 0-3 are a free order 2; bit 6 alone is a free order 0.
        assert_eq!(best_runs(0b0100_1111, 0, 1), 1 << 6);
        assert_eq!(best_runs(0b0100_1111, 0, 3), 0b0100_0011);
        assert_eq!(best_runs(0b0000_1111, 0, 1), 1);
        assert_eq!(best_runs(0b1111_0011, 1, 2), 0b0001_0001);
        assert_eq!(best_runs(0b1111_0011, 1, 9), 0b0101_0001);
        assert_eq!(best_runs(0, 0, 1), 0);
    }

    #[test]
    fn runs_have_the_bits_of_their_blocks() {
        assert_eq!(bits_of_runs(0b0101_0001, 1), 0b1111_0011);
        assert_eq!(bits_of_runs(1, 6), !0);
        assert_eq!(bits_of_runs(0x0001_0001, 4), 0xffff_ffff);
        assert_eq!(bits_of_runs(0, 3), 0);
    }
}
