//! A block's handle: one word, which leads to the block and to its pool.
//!
//! The word is the block's address with the pool's number above it. On lists and the stack a block is a 32-bit number:
//! its distance from a base that the pool chose, in *grains*. A grain is the largest power of two that divides the
//! addresses of all the pool's blocks, up to a page. So a word becomes a number by a subtraction and a shift, in any
//! order of blocks, and the result tells whether the block is the pool's. The number of a block that is too far from
//! the base is [`FAR`] with its place, which is looked up.
use super::numbers;
use core::fmt;
use core::mem::ManuallyDrop;
use core::num::NonZeroU64;
use core::ops::Range;
use pagemill_core::PAGE_SIZE;

/// Addresses have at most 48 bits.
const ADDRESS_BITS: u32 = 48;
/// Set in the number of a block that is too far away for an offset. The lower bits are its place.
pub(super) const FAR: u32 = 1 << 31;

/// A block of a [`DmaPool`](crate::DmaPool). [`DmaPool::free`](crate::DmaPool::free) frees it. Dropping it frees it
/// too, at a higher cost.
///
/// ```
/// use pagemill::{Allocator, Device, DmaBlock, DmaPool, Gfp, Identity};
/// let device = Device::new(&Allocator::builder().pages(64).build()?, Identity)?;
/// let pool = DmaPool::create("descriptors", &device, 32, 32, 0)?;
/// let block = pool.zalloc(Gfp::KERNEL)?;
/// // SAFETY: this code owns the block, which has 32 bytes, and no device knows its address yet.
/// unsafe { block.as_ptr().cast::<u64>().write(0x1234) };
/// assert_eq!(pool.device_addr(&block).get(), block.as_ptr() as u64); // as `Identity` maps it
/// assert_eq!(size_of::<Option<DmaBlock>>(), 8);
/// drop(block);
/// assert_eq!(pool.stats().in_use, 0);
/// # Ok::<(), pagemill::DeviceError>(())
/// ```
#[repr(transparent)]
pub struct DmaBlock(NonZeroU64);

impl DmaBlock {
    /// Makes a handle from its word.
    ///
    /// # Safety
    /// The word is that of a pool's block that has no other owner.
    #[inline(always)]
    pub(super) unsafe fn from_word(word: u64) -> Self {
        // SAFETY: the caller passes the word of a block, and no block is at address 0.
        Self(unsafe { NonZeroU64::new_unchecked(word) })
    }
    #[inline(always)]
    pub(super) fn word(&self) -> u64 {
        self.0.get()
    }
    #[inline(always)]
    pub(super) fn into_word(self) -> u64 {
        ManuallyDrop::new(self).0.get()
    }

    /// A pointer to its first byte.
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        core::ptr::with_exposed_provenance_mut(addr_of_word(self.word()))
    }
}

impl Drop for DmaBlock {
    #[inline(never)]
    fn drop(&mut self) {
        numbers::take_back((self.word() >> ADDRESS_BITS) as u16, self.word());
    }
}

impl fmt::Debug for DmaBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block at {:#x}", addr_of_word(self.word()))
    }
}

/// The words behind slots: 0 is an empty slot.
#[inline(always)]
pub(super) fn words_of(slots: &mut [Option<DmaBlock>]) -> &mut [u64] {
    // SAFETY: a handle is transparent over NonZeroU64, whose Option is a u64 with 0 for None. Callers write only 0 or
    // words of blocks that have no other owner.
    unsafe { core::slice::from_raw_parts_mut(slots.as_mut_ptr().cast(), slots.len()) }
}

#[inline(always)]
pub(super) fn addr_of_word(word: u64) -> usize {
    (word & ((1 << ADDRESS_BITS) - 1)) as usize
}

/// Converts between a pool's words and numbers. It is a small value, so that a loop holds a copy in registers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Words {
    /// The word of number 0: the pool's number above the base. The base is chosen so that neither 0 nor another pool's
    /// word is among the 2^31 grains that follow.
    base: u64,
    /// log2 of a grain.
    grain: u32,
}

impl Words {
    /// For the pool with this number, whose memory is usually in this range. Numbers reach equally far on both sides of
    /// it.
    pub(super) fn new(number: u16, grain: u32, memory: Range<usize>) -> Self {
        let window = 1usize << (31 + grain);
        let slack = window.saturating_sub(memory.len());
        let start = memory.start.saturating_sub((slack / 2) & !(PAGE_SIZE - 1)).min((1 << ADDRESS_BITS) - window);
        Self { base: u64::from(number) << ADDRESS_BITS | start as u64, grain }
    }

    /// The pool's number at its place in a word.
    fn above(self) -> u64 {
        self.base >> ADDRESS_BITS << ADDRESS_BITS
    }
    /// The word of the pool's block at this address.
    pub(super) fn at(self, addr: usize) -> u64 {
        self.above() | addr as u64
    }
    /// Whether the word is one of this pool.
    pub(super) fn is_ours(self, word: u64) -> bool {
        word >> ADDRESS_BITS == self.base >> ADDRESS_BITS
    }
    /// The word of a near block.
    #[inline(always)]
    pub(super) fn word(self, number: u32) -> u64 {
        self.base + (u64::from(number) << self.grain)
    }
    /// The distance of a word from the base, in grains. It is the block's number if the block is near and the pool's;
    /// otherwise it is above all numbers.
    #[inline(always)]
    pub(super) fn grains(self, word: u64) -> u64 {
        word.wrapping_sub(self.base) >> self.grain
    }
    /// The number of a near block of this pool; none for other words.
    #[inline(always)]
    pub(super) fn near(self, word: u64) -> Option<u32> {
        let grains = self.grains(word);
        if grains < u64::from(FAR) { Some(grains as u32) } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::{ADDRESS_BITS, FAR, Words};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn near_words_are_numbers_and_nothing_else_is(
            numbers in (1u16.., 1u16..), grain in 0u32..=12, start in 1usize..1 << 36, pages in 1usize..1 << 30, at in 0u64..1 << 36,
        ) {
            let memory = start << 12..((start + pages) << 12).min(1 << ADDRESS_BITS);
            let ours = Words::new(numbers.0, grain, memory.clone());
            let others = Words::new(numbers.1, grain, memory.clone());
            let addr = (at << 12) as usize;
            let word = ours.at(addr);
            prop_assert!(ours.is_ours(word));
            match ours.near(word) {
                Some(number) => prop_assert_eq!(ours.word(number), word),
                None => prop_assert!(!memory.contains(&addr) || memory.len() > (1 << (31 + grain))),
            }
            prop_assert!(numbers.0 == numbers.1 || ours.near(others.at(addr)).is_none() && !ours.is_ours(others.at(addr)));
            prop_assert_eq!(ours.near(0), None);
            prop_assert_eq!(ours.near(ours.word(FAR - 1)), Some(FAR - 1));
        }
    }
}
