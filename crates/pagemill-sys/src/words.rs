//! Arrays of words, some hundred bytes at a time: are they empty, are they pages in order, and to be filled.
//!
//! Each is a plain loop, of which the compiler makes vectors. It exists twice: as every processor runs it, and with vectors
//! of 32 bytes where there are some (AVX2), which takes half the steps.
use core::mem::MaybeUninit;
use pagemill_core::{PAGE_SHIFT, PAGE_SIZE};

/// Words that are looked at together: 64 bytes.
const GROUP: usize = 8;
/// Fewer words than this are not worth the call that wider vectors cost: code that uses them is inlined nowhere else.
#[cfg(target_arch = "x86_64")]
const WIDE: usize = 32;

/// Defines a loop over words twice, and a function that calls the one or the other.
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
            if $words.len() >= WIDE && is_x86_feature_detected!("avx2") {
                // SAFETY: the processor has what it needs.
                return unsafe { wide($words $(, $arg)*) };
            }
            plain($words $(, $arg)*)
        }
    };
}

wide! {
    /// Are all of them 0?
    ///
    /// ```
    /// assert!(pagemill_sys::are_empty(&[0; 40]) && !pagemill_sys::are_empty(&[0, 0, 7]));
    /// ```
    fn are_empty(words: &[usize]) -> bool {
        let (groups, rest) = words.as_chunks::<GROUP>();
        let any = groups.iter().fold(0, |any, group| any | group.iter().fold(0, |any, &word| any | word));
        rest.iter().fold(any, |any, &word| any | word) == 0
    }
}

wide! {
    /// How many of them, from the first on, are those of neighbouring pages.
    ///
    /// ```
    /// assert_eq!(pagemill_sys::neighbours(&[0x5000, 0x6000, 0x7000, 0x9000]), 3);
    /// ```
    fn neighbours(words: &[usize]) -> usize {
        let Some(&first) = words.first() else { return 0 };
        if let Ok(all) = <&[usize; 64]>::try_from(words) {
            // The usual case, without a branch for each.
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

wide! {
    /// Fills them with the words of neighbouring pages, from `first` on.
    ///
    /// ```
    /// let mut words = [0; 3];
    /// pagemill_sys::fill_neighbours(&mut words, 0x5000);
    /// assert_eq!(words, [0x5000, 0x6000, 0x7000]);
    /// ```
    fn fill_neighbours(words: &mut [usize], first: usize) -> () {
        // Group by group: of one loop over all the compiler makes twice the steps.
        let mut word = first;
        let (groups, rest) = words.as_chunks_mut::<GROUP>();
        for group in groups {
            group.iter_mut().zip(0..).for_each(|(slot, i)| *slot = word + i * PAGE_SIZE);
            word += GROUP * PAGE_SIZE;
        }
        for slot in rest {
            *slot = word;
            word += PAGE_SIZE;
        }
    }
}

/// The numbers of the pages at these addresses, if all are pages of an arena: of `frames` frames at `base`, the first numbered
/// `first`. False: one is not, and what stands in `places` means nothing.
#[inline(always)]
pub(crate) fn page_numbers(
    addrs: &[usize],
    places: &mut [MaybeUninit<u32>],
    base: usize,
    frames: u32,
    first: u32,
) -> bool {
    let places = &mut places[..addrs.len()];
    // In groups, and what is left one by one: stored as it is loaded by the section that comes next.
    #[cfg(target_arch = "x86_64")]
    let done = x86::page_numbers(addrs, places, base, frames, first);
    #[cfg(not(target_arch = "x86_64"))]
    let done = Some(0);
    let Some(done) = done else { return false };
    for (&addr, place) in addrs[done..].iter().zip(&mut places[done..]) {
        let offset = addr.wrapping_sub(base);
        if offset >> PAGE_SHIFT >= frames as usize || !offset.is_multiple_of(PAGE_SIZE) {
            return false;
        }
        place.write(first + (offset >> PAGE_SHIFT) as u32);
    }
    true
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{GROUP, WIDE};
    use core::arch::x86_64::*;
    use core::mem::MaybeUninit;
    use pagemill_core::{PAGE_SHIFT, PAGE_SIZE};

    /// What no distance of a page from its arena's beginning has set.
    const ODD: i64 = !(((u32::MAX as u64) << PAGE_SHIFT) as i64);
    const _: () = assert!(ODD & (PAGE_SIZE as i64 - 1) == PAGE_SIZE as i64 - 1);

    /// As in the parent module, for whole groups of eight: how many addresses those were; none if one is no page.
    #[inline(always)]
    pub(super) fn page_numbers(
        addrs: &[usize],
        places: &mut [MaybeUninit<u32>],
        base: usize,
        frames: u32,
        first: u32,
    ) -> Option<usize> {
        let (groups, places) = (addrs.as_chunks().0, places.as_chunks_mut().0);
        if groups.is_empty() {
            return Some(0);
        }
        let are_all = if addrs.len() >= WIDE && is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has what it needs.
            unsafe { by_32(groups, places, base, frames, first) }
        } else {
            by_16(groups, places, base, frames, first)
        };
        are_all.then_some(groups.len() * GROUP)
    }

    fn by_16(
        groups: &[[usize; GROUP]],
        places: &mut [[MaybeUninit<u32>; GROUP]],
        base: usize,
        frames: u32,
        first: u32,
    ) -> bool {
        // SAFETY: every x86-64 processor has SSE2; loads and stores are of a group each.
        unsafe {
            let (base, first) = (_mm_set1_epi64x(base as i64), _mm_set1_epi32(first as i32));
            // Comparisons take signs into account: both sides begin at the least number.
            let sign = _mm_set1_epi32(i32::MIN);
            let last = _mm_xor_si128(_mm_set1_epi32(frames.wrapping_sub(1) as i32), sign);
            let (mut bits, mut far) = (_mm_setzero_si128(), _mm_setzero_si128());
            for (group, places) in groups.iter().zip(places) {
                for half in [0, GROUP / 2] {
                    let from = group.as_ptr().add(half).cast::<__m128i>();
                    let low = _mm_sub_epi64(_mm_loadu_si128(from), base);
                    let high = _mm_sub_epi64(_mm_loadu_si128(from.add(1)), base);
                    bits = _mm_or_si128(bits, _mm_or_si128(low, high));
                    let shifted = |distances| _mm_castsi128_ps(_mm_srli_epi64(distances, PAGE_SHIFT as i32));
                    let numbers = _mm_castps_si128(_mm_shuffle_ps(shifted(low), shifted(high), 0x88));
                    far = _mm_or_si128(far, _mm_cmpgt_epi32(_mm_xor_si128(numbers, sign), last));
                    _mm_storeu_si128(places.as_mut_ptr().add(half).cast(), _mm_add_epi32(numbers, first));
                }
            }
            let odd = _mm_and_si128(bits, _mm_set1_epi64x(ODD));
            let fine = _mm_cmpeq_epi32(_mm_or_si128(odd, far), _mm_setzero_si128());
            frames > 0 && _mm_movemask_epi8(fine) == 0xffff
        }
    }

    #[target_feature(enable = "avx2")]
    fn by_32(
        groups: &[[usize; GROUP]],
        places: &mut [[MaybeUninit<u32>; GROUP]],
        base: usize,
        frames: u32,
        first: u32,
    ) -> bool {
        let (base, first) = (_mm256_set1_epi64x(base as i64), _mm256_set1_epi32(first as i32));
        let sign = _mm256_set1_epi32(i32::MIN);
        let last = _mm256_xor_si256(_mm256_set1_epi32(frames.wrapping_sub(1) as i32), sign);
        let (mut bits, mut far) = (_mm256_setzero_si256(), _mm256_setzero_si256());
        for (group, places) in groups.iter().zip(places) {
            let from = group.as_ptr().cast::<__m256i>();
            // SAFETY: both halves are of the group.
            let (low, high) = unsafe { (_mm256_loadu_si256(from), _mm256_loadu_si256(from.add(1))) };
            let (low, high) = (_mm256_sub_epi64(low, base), _mm256_sub_epi64(high, base));
            bits = _mm256_or_si256(bits, _mm256_or_si256(low, high));
            let shifted = |distances| _mm256_castsi256_ps(_mm256_srli_epi64(distances, PAGE_SHIFT as i32));
            let mixed = _mm256_castps_si256(_mm256_shuffle_ps(shifted(low), shifted(high), 0x88));
            let numbers = _mm256_permute4x64_epi64(mixed, 0b11_01_10_00);
            far = _mm256_or_si256(far, _mm256_cmpgt_epi32(_mm256_xor_si256(numbers, sign), last));
            // SAFETY: the group's places.
            unsafe { _mm256_storeu_si256(places.as_mut_ptr().cast(), _mm256_add_epi32(numbers, first)) };
        }
        let odd = _mm256_and_si256(bits, _mm256_set1_epi64x(ODD));
        let wrong = _mm256_or_si256(odd, far);
        frames > 0 && _mm256_testz_si256(wrong, wrong) == 1
    }
}

/// Sets words to 0. (A loop that stores a value which the compiler knows becomes a call of `memset`, which costs as much as 64
/// stores.)
///
/// ```
/// let mut words = [7; 9];
/// pagemill_sys::empty(&mut words);
/// assert_eq!(words, [0; 9]);
/// ```
#[inline(always)]
pub fn empty(words: &mut [usize]) {
    let (groups, rest) = words.as_chunks_mut::<GROUP>();
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        use core::arch::x86_64::*;
        let nothing: __m128i;
        // SAFETY: makes zeros of which the compiler knows nothing, in a register; stores are of a group each.
        unsafe {
            core::arch::asm!("pxor {0}, {0}", out(xmm_reg) nothing, options(pure, nomem, nostack, preserves_flags));
            for group in groups {
                let to = group.as_mut_ptr().cast::<__m128i>();
                (0..GROUP / 2).for_each(|i| _mm_storeu_si128(to.add(i), nothing));
            }
        }
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    groups.as_flattened_mut().fill(0);
    for word in rest {
        *word = core::hint::black_box(0);
    }
}

wide! {
    /// Fills them with the words of the pages with these numbers, of which there are as many; number 0 would be at `zero`.
    ///
    /// ```
    /// let mut words = [0; 3];
    /// pagemill_sys::fill_pages(&mut words, &[2, 5, 1], 0x10000);
    /// assert_eq!(words, [0x12000, 0x15000, 0x11000]);
    /// ```
    fn fill_pages(words: &mut [usize], pfns: &[u32], zero: usize) -> () {
        let pfns = &pfns[..words.len()];
        let word_of = |pfn: u32| zero.wrapping_add((pfn as usize) << PAGE_SHIFT);
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

/// Which of at most 64 words are 0: bit i for word i.
///
/// ```
/// assert_eq!(pagemill_sys::empty_slots(&[0, 7, 0]), 0b101);
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

/// Which of eight words are 0.
#[inline(always)]
fn empty_in_group(group: &[usize; GROUP]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        use core::arch::x86_64::*;
        // SAFETY: every x86-64 processor has SSE2; the loads are of the group.
        unsafe {
            let at = group.as_ptr().cast::<f32>();
            // Which of four words are 0: their lower halves, their upper halves, both together.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_page_is_numbered_and_every_stranger_seen() {
        const BASE: usize = 0x7f00_0020_0000;
        let takes_long = |n: &usize| cfg!(miri) && (20..63).contains(n);
        for n in (1..=70).filter(|n| !takes_long(n)) {
            // Scattered over all frames, the first and the last among them.
            let frames = 1000;
            let numbers: Vec<u32> = (0..n as u32).map(|i| (i * 389 + if n > 1 { 0 } else { 999 }) % frames).collect();
            let mut addrs = vec![0; n];
            fill_pages(&mut addrs, &numbers, BASE);
            assert!(addrs.iter().zip(&numbers).all(|(&addr, &number)| addr == BASE + number as usize * PAGE_SIZE));
            let mut places = vec![MaybeUninit::new(0); n];
            let mut are_pages = |addrs: &[usize]| page_numbers(addrs, &mut places, BASE, frames, 77);
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
            // SAFETY: written at first with a value.
            let found: Vec<u32> = places.iter().map(|place| unsafe { place.assume_init() } - 77).collect();
            assert_eq!(found, numbers);
        }
    }

    #[test]
    fn every_hole_is_seen() {
        for n in 0..=if cfg!(miri) { 20 } else { 64 } {
            for pattern in [0, !0, 0x5555_5555_5555_5555, 1, 1 << 63, 0x8000_0001_0f0f_1234_u64] {
                // What is not empty has one bit alone, in either half.
                let words: Vec<usize> =
                    (0..n).map(|i| if pattern >> i & 1 == 1 { 0 } else { 1 << (i * 7 % 64) }).collect();
                assert_eq!(empty_slots(&words), if n == 64 { pattern } else { pattern & ((1 << n) - 1) }, "{n}");
            }
        }
    }

    /// Of every length on both sides of where wide vectors begin and of a batch, with one word wrong at every place.
    #[test]
    fn loops_see_every_word_and_fill_every_word() {
        let takes_long = |n: &usize| cfg!(miri) && (20..63).contains(n);
        for n in (0..=70).filter(|n| !takes_long(n)) {
            let mut words = vec![7; n + 1];
            fill_neighbours(&mut words[..n], 0x5000);
            assert!(words[..n].iter().enumerate().all(|(i, &word)| word == 0x5000 + i * PAGE_SIZE) && words[n] == 7);
            assert_eq!(neighbours(&words[..n]), n);
            let mut nothing = vec![0; n];
            assert!(are_empty(&nothing));
            for i in 0..n {
                nothing[i] = 1 << (i % 64);
                assert!(!are_empty(&nothing), "{i} of {n}");
                nothing[i] = 0;
                words[i] ^= 1 << 40;
                assert_eq!(neighbours(&words[..n]), if i == 0 { 1 } else { i }, "{i} of {n}");
                words[i] ^= 1 << 40;
            }
        }
    }
}
