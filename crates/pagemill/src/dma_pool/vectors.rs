//! Converts many numbers to words, and words to numbers, with vector instructions. Each block takes an addition or
//! subtraction and a shift.
//!
//! Every x86-64 processor has vectors of two words. Those with AVX2 have vectors of four, which takes a quarter off the
//! cost of a block in bulk; this is detected at run time.
use super::block::Words;
use pagemill_os::Batch;

impl Words {
    /// Fills slots, one for each number, the last number first. Returns all numbers' bits, or-ed: if
    /// [`FAR`](super::block::FAR) is among them, some words are invalid.
    #[inline]
    pub(super) fn fill(self, words: &mut [u64], numbers: &[u32]) -> u32 {
        #[cfg(target_arch = "x86_64")]
        if has_avx2() {
            // SAFETY: the processor has AVX2.
            return unsafe { fill_by_four(self, words, numbers) };
        }
        fill(self, words, numbers)
    }

    /// Appends the numbers of near blocks, the last first. Returns all numbers' bits, or-ed: they exceed those of near
    /// numbers if a block is far or foreign, or a slot is empty.
    #[inline]
    pub(super) fn numbers(self, words: &[u64], batch: &mut Batch) -> u64 {
        #[cfg(target_arch = "x86_64")]
        if has_avx2() {
            // SAFETY: the processor has AVX2.
            return unsafe { numbers_by_four(self, words, batch) };
        }
        numbers(self, words, batch)
    }
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn has_avx2() -> bool {
    use core::sync::atomic::{AtomicU8, Ordering::Relaxed};
    /// 0 before the check; then 1 for no and 2 for yes. The standard library's own check is a call.
    static HAS: AtomicU8 = AtomicU8::new(0);
    #[cold]
    fn look() -> bool {
        let has = std::arch::is_x86_feature_detected!("avx2");
        HAS.store(1 + u8::from(has), Relaxed);
        has
    }
    match HAS.load(Relaxed) {
        0 => look(),
        has => has == 2,
    }
}

#[inline(always)]
fn fill(of: Words, words: &mut [u64], numbers: &[u32]) -> u32 {
    let mut bits = 0;
    words.iter_mut().zip(numbers.iter().rev()).for_each(|(word, &number)| {
        bits |= number;
        *word = of.word(number);
    });
    bits
}

#[inline(always)]
fn numbers(of: Words, words: &[u64], batch: &mut Batch) -> u64 {
    let mut bits = 0;
    batch.push_reversed(words, |&word| {
        bits |= of.grains(word);
        of.grains(word) as u32
    });
    bits
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn fill_by_four(of: Words, words: &mut [u64], numbers: &[u32]) -> u32 {
    fill(of, words, numbers)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn numbers_by_four(of: Words, words: &[u64], batch: &mut Batch) -> u64 {
    numbers(of, words, batch)
}
