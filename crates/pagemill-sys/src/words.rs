//! Arrays of words, some hundred bytes at a time: are they empty, are they pages in order, and to be filled.
//!
//! Each is a plain loop, of which the compiler makes vectors. It exists twice: as every processor runs it, and with vectors
//! of 32 bytes where there are some (AVX2), which takes half the steps.
use pagemill_core::PAGE_SIZE;

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

#[cfg(test)]
mod tests {
    use super::*;

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
