//! Loops over arrays of words of some hundred bytes: check for empty slots or for pages, fill, and clear.
//!
//! A loop that the compiler vectorises well is written once and compiled twice, the second time with vectors of 32 bytes for
//! processors that have them (`wide!`). The others use hand-written vector code: `distances`, `find_empty`, `empty`.
use pagemill_core::{PAGE_SHIFT, PAGE_SIZE, Pfn};

/// Words that are processed together: 64 bytes.
const GROUP: usize = 8;
/// With fewer words than this, wider vectors do not pay for the call that they cost: code that uses them cannot be inlined into
/// code that does not.
#[cfg(target_arch = "x86_64")]
const WIDE: usize = 32;

/// Whether this many words are processed with vectors of 32 bytes. All code that reads or writes an array's slots uses this
/// answer: a load that is wider than the store before it waits for the cache.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(crate) fn is_wide(words: usize) -> bool {
    words >= WIDE && is_x86_feature_detected!("avx2") && is_x86_feature_detected!("popcnt")
}

/// Compiles a loop over words twice, and defines a function that calls one of the two.
macro_rules! wide {
    ($(#[$about:meta])* fn $name:ident($words:ident: $type:ty $(, $arg:ident: $arg_type:ty)*) -> $out:ty $body:block) => {
        $(#[$about])*
        #[inline]
        pub fn $name($words: $type $(, $arg: $arg_type)*) -> $out {
            #[inline(always)]
            fn plain($words: $type $(, $arg: $arg_type)*) -> $out $body
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2")]
            fn wide($words: $type $(, $arg: $arg_type)*) -> $out {
                plain($words $(, $arg)*)
            }
            #[cfg(target_arch = "x86_64")]
            if is_wide($words.len()) {
                // SAFETY: the processor has what it needs.
                return unsafe { wide($words $(, $arg)*) };
            }
            plain($words $(, $arg)*)
        }
    };
}

/// Whether all words are 0.
///
/// ```
/// assert!(pagemill_os::are_empty(&[0; 40]) && !pagemill_os::are_empty(&[0, 0, 7]));
/// ```
#[inline(always)]
pub fn are_empty(words: &[usize]) -> bool {
    // The distance of an empty word from 0 has no bit set. The remaining words are checked with a branch each, or the compiler
    // would vectorise that loop, too.
    let ((bits, _), rest) = distances(words, 0, 0);
    bits == 0 && rest.iter().all(|&word| word == 0)
}

wide! {
    /// How many words, from the first on, are addresses of neighbouring pages.
    ///
    /// ```
    /// assert_eq!(pagemill_os::neighbours(&[0x5000, 0x6000, 0x7000, 0x9000]), 3);
    /// ```
    fn neighbours(words: &[usize]) -> usize {
        let Some(&first) = words.first() else { return 0 };
        if let Ok(all) = <&[usize; 64]>::try_from(words) {
            // The usual case, without a branch for each word.
            let differs = (0..all.len()).fold(0, |differs, i| differs | (all[i] ^ first.wrapping_add(i * PAGE_SIZE)));
            if differs == 0 {
                return all.len();
            }
        }
        let mut n = 0;
        while let Some(group) = words[n..].first_chunk::<GROUP>() {
            let expected = first.wrapping_add(n * PAGE_SIZE);
            let differs = (0..GROUP).fold(0, |differs, i| differs | (group[i] ^ expected.wrapping_add(i * PAGE_SIZE)));
            if differs != 0 {
                break;
            }
            n += GROUP;
        }
        while n < words.len() && words[n] == first.wrapping_add(n * PAGE_SIZE) {
            n += 1;
        }
        n
    }
}

/// Whether all words are addresses of pages of an arena that has `frames` pages from `base` on.
///
/// ```
/// assert!(pagemill_os::are_pages(&[0x7000, 0x5000], 0x4000, 4));
/// assert!(!pagemill_os::are_pages(&[0x5000, 0x8000], 0x4000, 4));
/// ```
#[inline(always)]
pub fn are_pages(words: &[usize], base: usize, frames: u32) -> bool {
    // The bits that no distance of a page from `base` has set. The distance subtracted from the last page's must not be
    // negative either.
    const ODD: usize = !((u32::MAX as usize) << PAGE_SHIFT);
    let last = ((frames as usize) << PAGE_SHIFT).wrapping_sub(PAGE_SIZE);
    let ((bits, left), rest) = distances(words, base, last);
    let is_page = |word: &usize| word.wrapping_sub(base).rotate_right(PAGE_SHIFT) < frames as usize;
    bits & ODD == 0 && left.cast_signed() >= 0 && rest.iter().all(is_page)
}

#[cfg(target_arch = "x86_64")]
use x86::distances;

/// No hand-written vectors for other processors: the caller checks all words.
#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
fn distances(words: &[usize], _base: usize, _last: usize) -> ((usize, usize), &[usize]) {
    ((0, 0), words)
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{GROUP, is_wide};
    use core::arch::x86_64::*;

    /// For whole groups of eight words: the bitwise or of their distances from `base`, and of `last` minus those distances.
    /// Also returns the words after the last group. From a plain loop the compiler makes vector code that goes through memory.
    #[inline(always)]
    pub(super) fn distances(words: &[usize], base: usize, last: usize) -> ((usize, usize), &[usize]) {
        let (groups, rest) = words.as_chunks();
        if groups.is_empty() {
            return ((0, 0), rest);
        }
        let found = if is_wide(words.len()) {
            // SAFETY: the processor has what it needs.
            unsafe { by_32(groups, base, last) }
        } else {
            by_16(groups, base, last)
        };
        (found, rest)
    }

    #[inline(always)]
    fn by_16(groups: &[[usize; GROUP]], base: usize, last: usize) -> (usize, usize) {
        // SAFETY: every x86-64 processor has SSE2; the loads are of a group each.
        unsafe {
            let (base, last) = (_mm_set1_epi64x(base as i64), _mm_set1_epi64x(last as i64));
            let (mut bits, mut left) = (_mm_setzero_si128(), _mm_setzero_si128());
            for group in groups {
                let from = group.as_ptr().cast::<__m128i>();
                for i in 0..GROUP / 2 {
                    let distances = _mm_sub_epi64(_mm_loadu_si128(from.add(i)), base);
                    bits = _mm_or_si128(bits, distances);
                    left = _mm_or_si128(left, _mm_sub_epi64(last, distances));
                }
            }
            (either(bits), either(left))
        }
    }

    #[target_feature(enable = "avx2")]
    fn by_32(groups: &[[usize; GROUP]], base: usize, last: usize) -> (usize, usize) {
        let (base, last) = (_mm256_set1_epi64x(base as i64), _mm256_set1_epi64x(last as i64));
        let (mut bits, mut left) = (_mm256_setzero_si256(), _mm256_setzero_si256());
        for group in groups {
            let from = group.as_ptr().cast::<__m256i>();
            for i in 0..GROUP / 4 {
                // SAFETY: of the group.
                let distances = _mm256_sub_epi64(unsafe { _mm256_loadu_si256(from.add(i)) }, base);
                bits = _mm256_or_si256(bits, distances);
                left = _mm256_or_si256(left, _mm256_sub_epi64(last, distances));
            }
        }
        let halves = |all| _mm_or_si128(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
        (either(halves(bits)), either(halves(left)))
    }

    /// As in the parent module.
    #[target_feature(enable = "avx2,popcnt")]
    pub(super) fn find_empty(words: &[usize], masks: &mut [u64]) -> usize {
        let (chunks, rest) = words.as_chunks::<64>();
        let mut found = 0;
        for (words, mask) in chunks.iter().zip(&mut *masks) {
            let mut bits = 0;
            for (i, four) in words.as_chunks::<4>().0.iter().enumerate() {
                // SAFETY: of the four.
                let four = unsafe { _mm256_loadu_si256(four.as_ptr().cast()) };
                let are_empty = _mm256_castsi256_pd(_mm256_cmpeq_epi64(four, _mm256_setzero_si256()));
                bits |= (_mm256_movemask_pd(are_empty) as u64) << (4 * i);
            }
            *mask = bits;
            found += bits.count_ones() as usize;
        }
        if let Some(mask) = masks.get_mut(chunks.len()) {
            *mask = super::empty_slots(rest);
            found += mask.count_ones() as usize;
        }
        found
    }

    /// The bitwise or of both halves.
    #[inline(always)]
    fn either(both: __m128i) -> usize {
        // SAFETY: every x86-64 processor has SSE2.
        unsafe { _mm_cvtsi128_si64(_mm_or_si128(both, _mm_unpackhi_epi64(both, both))) as usize }
    }
}

/// Sets words to 0. The compiler would turn a plain loop into a call of `memset`, which costs as much as 64 stores.
///
/// ```
/// let mut words = [7; 9];
/// pagemill_os::empty(&mut words);
/// assert_eq!(words, [0; 9]);
/// ```
#[inline(always)]
pub fn empty(words: &mut [usize]) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        let (groups, rest) = words.as_chunks_mut::<GROUP>();
        let end = groups.as_mut_ptr_range().end;
        let mut at = groups.as_mut_ptr();
        if is_wide(groups.len() * GROUP) {
            // SAFETY: the processor has such vectors; stores are of a group each.
            unsafe {
                core::arch::asm!(
                    "vpxor {0}, {0}, {0}", "2:", "vmovdqu [{at}], {0:y}", "vmovdqu [{at} + 32], {0:y}", "add {at}, 64",
                    "cmp {at}, {end}", "jb 2b", "vzeroupper", out(xmm_reg) _, at = inout(reg) at => _, end = in(reg) end,
                    options(nostack));
            }
        } else {
            while at < end {
                // SAFETY: as above.
                unsafe {
                    core::arch::asm!(
                        "pxor {0}, {0}", "movups [{at}], {0}", "movups [{at} + 16], {0}", "movups [{at} + 32], {0}",
                        "movups [{at} + 48], {0}", out(xmm_reg) _, at = in(reg) at, options(nostack));
                    at = at.add(1);
                }
            }
        }
        for word in rest {
            // SAFETY: stores a word of the slice. Plain stores would become a call of `memset`.
            unsafe { core::arch::asm!("mov qword ptr [{}], 0", in(reg) core::ptr::from_mut(word), options(nostack)) }
        }
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    words.fill(0);
}

wide! {
    /// Fills the words with the addresses of the pages with these numbers, as many as there are words. `zero` is the address of
    /// number 0.
    ///
    /// ```
    /// let mut words = [0; 3];
    /// pagemill_os::fill_pages(&mut words, &[2, 5, 1].map(pagemill_core::Pfn::new), 0x10000);
    /// assert_eq!(words, [0x12000, 0x15000, 0x11000]);
    /// ```
    fn fill_pages(words: &mut [usize], pfns: &[Pfn], zero: usize) -> () {
        let pfns = &pfns[..words.len()];
        let word_of = |pfn: Pfn| zero.wrapping_add(pfn.as_usize() << PAGE_SHIFT);
        let (groups, rest) = words.as_chunks_mut::<GROUP>();
        let (from, from_rest) = pfns.as_chunks::<GROUP>();
        for (group, from) in groups.iter_mut().zip(from) {
            for i in 0..GROUP {
                group[i] = word_of(from[i]);
            }
        }
        rest.iter_mut().zip(from_rest).for_each(|(word, &pfn)| *word = word_of(pfn));
    }
}

/// Bit i is set if word i, of at most 64, is 0.
///
/// ```
/// assert_eq!(pagemill_os::empty_slots(&[0, 7, 0]), 0b101);
/// ```
#[inline(always)]
pub fn empty_slots(words: &[usize]) -> u64 {
    debug_assert!(words.len() <= 64);
    let (groups, rest) = words.as_chunks::<GROUP>();
    let mut mask = 0;
    for (group, at) in groups.iter().zip((0..).step_by(GROUP)) {
        mask |= empty_in_group(group) << at;
    }
    for (&word, at) in rest.iter().zip(words.len() - rest.len()..) {
        mask |= u64::from(word == 0) << at;
    }
    mask
}

/// Bit i is set if word i of eight is 0.
#[inline(always)]
fn empty_in_group(group: &[usize; GROUP]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        use core::arch::x86_64::*;
        // SAFETY: every x86-64 processor has SSE2; the loads are of the group.
        unsafe {
            let at = group.as_ptr().cast::<f32>();
            // For four words: collects lower halves and upper halves, combines them, and compares with 0.
            let four = |i: usize| {
                let (two, next) = (_mm_loadu_ps(at.add(8 * i)), _mm_loadu_ps(at.add(8 * i + 4)));
                let any = _mm_or_ps(_mm_shuffle_ps(two, next, 0x88), _mm_shuffle_ps(two, next, 0xdd));
                _mm_movemask_ps(_mm_castsi128_ps(_mm_cmpeq_epi32(_mm_castps_si128(any), _mm_setzero_si128())))
            };
            (four(0) | four(1) << 4) as u64
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        group.iter().rev().fold(0, |mask, &word| mask << 1 | u64::from(word == 0))
    }
}

/// Sets bit i of mask k if word 64 k + i is 0, and clears it otherwise. Returns how many words are 0. There must be enough
/// masks for all words.
///
/// ```
/// let (mut words, mut masks) = ([7; 70], [0; 2]);
/// (words[3], words[69]) = (0, 0);
/// assert_eq!((pagemill_os::find_empty(&words, &mut masks), masks), (2, [1 << 3, 1 << 5]));
/// ```
#[inline]
pub fn find_empty(words: &[usize], masks: &mut [u64]) -> usize {
    debug_assert!(masks.len() * 64 >= words.len());
    #[cfg(target_arch = "x86_64")]
    if is_wide(words.len()) {
        // SAFETY: the processor has what it needs.
        return unsafe { x86::find_empty(words, masks) };
    }
    let find = |(words, mask): (&[usize], &mut u64)| {
        *mask = empty_slots(words);
        mask.count_ones() as usize
    };
    words.chunks(64).zip(masks).map(find).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_foreign_address_among_pages_is_found() {
        const BASE: usize = 0x7f00_0020_0000;
        let takes_long = |n: &usize| cfg!(miri) && (20..63).contains(n);
        for n in (1..=70).filter(|n| !takes_long(n)) {
            // Scattered over all frames, including the first and the last.
            let frames = 1000;
            let numbers: Vec<u32> = (0..n as u32).map(|i| (i * 389 + if n > 1 { 0 } else { 999 }) % frames).collect();
            let mut addrs = vec![0; n];
            fill_pages(&mut addrs, crate::as_pfns(&numbers), BASE);
            assert!(addrs.iter().zip(&numbers).all(|(&addr, &number)| addr == BASE + number as usize * PAGE_SIZE));
            let are_pages = |addrs: &[usize]| are_pages(addrs, BASE, frames);
            for i in 0..n {
                let own = addrs[i];
                for stranger in
                    [0, BASE - PAGE_SIZE, BASE + frames as usize * PAGE_SIZE, own + 1, own ^ 1 << 44, own ^ 1 << 63, !0]
                {
                    addrs[i] = stranger;
                    assert!(!are_pages(&addrs), "{stranger:#x} at {i} of {n}");
                }
                addrs[i] = own;
            }
            assert!(are_pages(&addrs));
        }
    }

    #[test]
    fn every_empty_slot_is_found() {
        for n in 0..=if cfg!(miri) { 20 } else { 64 } {
            for pattern in [0, !0, 0x5555_5555_5555_5555, 1, 1 << 63, 0x8000_0001_0f0f_1234_u64] {
                // Words that are not empty have a single bit set, in either half.
                let words: Vec<usize> =
                    (0..n).map(|i| if pattern >> i & 1 == 1 { 0 } else { 1 << (i * 7 % 64) }).collect();
                let expected = if n == 64 { pattern } else { pattern & ((1 << n) - 1) };
                assert_eq!(empty_slots(&words), expected, "{n}");
                // After 64 words that are not empty.
                let behind: Vec<usize> = std::iter::repeat_n(7, 64).chain(words.iter().copied()).collect();
                let mut masks = [!0; 2];
                assert_eq!(find_empty(&behind, &mut masks), expected.count_ones() as usize, "{n}");
                assert_eq!(masks[0], 0, "{n}");
                assert!(n == 0 || masks[1] == expected, "{n}");
            }
        }
    }

    /// For lengths around the start of wide vectors and around a batch, with a wrong word at each position in turn.
    #[test]
    fn loops_read_every_word() {
        let takes_long = |n: &usize| cfg!(miri) && (20..63).contains(n);
        for n in (0..=70).filter(|n| !takes_long(n)) {
            let mut words: Vec<usize> = (0..n).map(|i| 0x5000 + i * PAGE_SIZE).collect();
            assert_eq!(neighbours(&words), n);
            let mut nothing = vec![0; n];
            assert!(are_empty(&nothing));
            for i in 0..n {
                nothing[i] = 1 << (i % 64);
                assert!(!are_empty(&nothing), "{i} of {n}");
                nothing[i] = 0;
                words[i] ^= 1 << 40;
                assert_eq!(neighbours(&words), if i == 0 { 1 } else { i }, "{i} of {n}");
                words[i] ^= 1 << 40;
            }
        }
    }
}
