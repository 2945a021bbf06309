//! Frames on their way from one pageblock to a large request: its words, in eight times 64 bits.
use crate::units::BLOCK_WORDS;
use crate::{PAGEBLOCK_FRAMES, Pfn};

/// Frames of one pageblock that a request took: see [`Buddy::take_handful`](crate::Buddy::take_handful). What it still has when it is
/// forgotten is lost; [`Giving::give_handful`](crate::Giving::give_handful) returns it.
///
/// ```
/// let mut none = pagemill_core::Handful::new();
/// assert_eq!((none.len(), none.next_word(64)), (0, None));
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Handful {
    /// The pageblock's first frame.
    first: Pfn,
    words: [u64; BLOCK_WORDS],
}

impl Handful {
    /// No frame.
    pub const fn new() -> Self {
        Self { first: Pfn::new(0), words: [0; BLOCK_WORDS] }
    }

    /// Adds frames of one word: its bit 0, and the bits. All must be of one pageblock.
    pub(crate) fn add(&mut self, first: Pfn, mask: u64) {
        let at = first.as_u32() % PAGEBLOCK_FRAMES;
        self.first = Pfn::new(first.as_u32() - at);
        self.words[(at / 64) as usize] |= mask;
    }

    /// How many frames it has.
    pub fn len(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }
    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.words.iter().fold(0, |any, word| any | word) == 0
    }

    /// Takes the frames of its next word out: the frame of its bit 0, and the bits. None if those are more than `most`, or
    /// there are no more.
    #[inline]
    pub fn next_word(&mut self, most: usize) -> Option<(Pfn, u64)> {
        let (i, word) = (0..).zip(&mut self.words).find(|(_, word)| **word != 0)?;
        if word.count_ones() as usize > most {
            return None;
        }
        Some((self.first.offset(i * 64), core::mem::take(word)))
    }
}

impl Default for Handful {
    fn default() -> Self {
        Self::new()
    }
}
