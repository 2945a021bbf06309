//! A block's handle, and what a pool makes of it: one word, which leads to the block and to its pool.
//!
//! The word is the block's address with the pool's number above it. On lists and the stack a block is a number of 32 bits: as
//! many *grains* (what all addresses of the pool's blocks are multiples of) as it lies beyond a base that the pool chose. So a
//! subtraction and a shift make the number of a word, whatever order blocks come in, and tell with it whether the block is the
//! pool's. Blocks that lie too far from the base have a number with [`FAR`] and their place, and are looked up.
use super::numbers;
use core::fmt;
use core::mem::ManuallyDrop;
use core::num::NonZeroU64;
use core::ops::Range;
use pagemill_core::PAGE_SIZE;

/// Addresses have 48 bits at most.
const ADDRESS_BITS: u32 = 48;
/// Set in the number of a block that lies too far away for an offset; its place is below.
pub(super) const FAR: u32 = 1 << 31;

/// A block of a [`DmaPool`](crate::DmaPool). It goes back by [`DmaPool::free`](crate::DmaPool::free), or, at more cost, when it is
/// dropped.
///
/// ```
/// use pagemill::{Allocator, Device, DmaBlock, DmaPool, Gfp, Identity};
/// let device = Device::new(&Allocator::builder().pages(64).build()?, Identity)?;
/// let pool = DmaPool::create("descriptors", &device, 32, 32, 0)?;
/// let block = pool.zalloc(Gfp::KERNEL)?;
/// // SAFETY: the block is ours, of 32 bytes, and no device was told of it yet.
/// unsafe { block.as_ptr().cast::<u64>().write(0x1234) };
/// assert_eq!(pool.device_addr(&block).get(), block.as_ptr() as u64); // what `Identity` makes it
/// assert_eq!(size_of::<Option<DmaBlock>>(), 8);
/// drop(block);
/// assert_eq!(pool.stats().in_use, 0);
/// # Ok::<(), pagemill::DeviceError>(())
/// ```
#[repr(transparent)]
pub struct DmaBlock(NonZeroU64);

impl DmaBlock {
    /// The handle of a word.
    ///
    /// # Safety
    /// It is that of a block of a pool's, which nobody else has.
    #[inline(always)]
    pub(super) unsafe fn from_word(word: u64) -> Self {
        // SAFETY: no block is at address 0 (the caller's).
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

    /// Its first byte.
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

/// The words behind slots: 0 is empty.
#[inline(always)]
pub(super) fn words_of(slots: &mut [Option<DmaBlock>]) -> &mut [u64] {
    // SAFETY: a handle is transparent over NonZeroU64, whose Option is a u64 with 0 for None. Callers write 0 or words of blocks
    // that nobody else has.
    unsafe { core::slice::from_raw_parts_mut(slots.as_mut_ptr().cast(), slots.len()) }
}

#[inline(always)]
pub(super) fn addr_of_word(word: u64) -> usize {
    (word & ((1 << ADDRESS_BITS) - 1)) as usize
}

/// How a pool's blocks become words, and words numbers. A copy of it is what a loop has in registers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Words {
    /// The word of number 0: the pool's number above the base. The base lies so that no word of another pool's, nor 0, is one
    /// of the 2^31 grains from here.
    base: u64,
    /// log2 of a grain.
    grain: u32,
}

impl Words {
    /// For the pool of this number, over memory in this range, as a rule: numbers reach as far on both sides.
    pub(super) fn new(number: u16, grain: u32, memory: Range<usize>) -> Self {
        let window = 1usize << (31 + grain);
        let slack = window.saturating_sub(memory.len());
        let start = memory.start.saturating_sub((slack / 2) & !(PAGE_SIZE - 1)).min((1 << ADDRESS_BITS) - window);
        Self { base: u64::from(number) << ADDRESS_BITS | start as u64, grain }
    }

    /// The pool's number in its place in a word.
    fn above(self) -> u64 {
        self.base >> ADDRESS_BITS << ADDRESS_BITS
    }
    /// The word of the pool's block at this address.
    pub(super) fn at(self, addr: usize) -> u64 {
        self.above() | addr as u64
    }
    /// Is it a word of this pool?
    pub(super) fn is_ours(self, word: u64) -> bool {
        word >> ADDRESS_BITS == self.base >> ADDRESS_BITS
    }
    /// The word of a near block.
    #[inline(always)]
    pub(super) fn word(self, number: u32) -> u64 {
        self.base + (u64::from(number) << self.grain)
    }
    /// How many grains a block lies beyond the base: its number, if it is near and the pool's; more than numbers have, if not.
    #[inline(always)]
    pub(super) fn grains(self, word: u64) -> u64 {
        word.wrapping_sub(self.base) >> self.grain
    }
    /// The number of a near block of this pool.
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
