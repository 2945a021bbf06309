//! Many blocks at once, from numbers to words and back: a subtraction or an addition and a shift each, by vectors.
//!
//! Every x86-64 has vectors of two words. What has AVX2 has vectors of four, which takes a quarter off a block in bulk; it is
//! found at run time.
use super::block::Words;
use pagemill_os::Batch;

impl Words {
    /// Fills slots, as many as there are numbers, the last number first. Returns the numbers' bits: with
    /// [`FAR`](super::block::FAR) among them there are words that are nobody's.
    #[inline]
    pub(super) fn fill(self, words: &mut [u64], numbers: &[u32]) -> u32 {
        #[cfg(target_arch = "x86_64")]
        if has_avx2() {
            // SAFETY: the processor has it.
            return unsafe { fill_by_four(self, words, numbers) };
        }
        fill(self, words, numbers)
    }

    /// Appends the numbers of near blocks, the last first. Returns their bits: beyond those of near numbers if one is not near,
    /// or not the pool's, or a slot is empty.
    #[inline]
    pub(super) fn numbers(self, words: &[u64], batch: &mut Batch) -> u64 {
        #[cfg(target_arch = "x86_64")]
        if has_avx2() {
            // SAFETY: the processor has it.
            return unsafe { numbers_by_four(self, words, batch) };
        }
        numbers(self, words, batch)
    }
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn has_avx2() -> bool {
    use core::sync::atomic::{AtomicU8, Ordering::Relaxed};
    /// 0 before it was looked for; then 1 for no, 2 for yes. The library's own answer is a call.
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
