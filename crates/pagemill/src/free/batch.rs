//! What pages and blocks on their way back are collected in, until they go to a list or to the zone together.
use pagemill_core::PAGE_SIZE;
use pagemill_os::neighbours;

/// Collects frames of one arena on their way back.
pub(crate) trait FreeBatch {
    /// Takes the page or block that begins at this frame, if it is of this kind and out.
    fn give(&mut self, pfn: u32) -> bool;
}

/// How many of these words, at most `most`, are those of neighbouring pages, from the first on.
#[inline(always)]
pub(super) fn address_run(words: &[usize], most: usize) -> usize {
    let words = &words[..words.len().min(most)];
    if words.len() < 2 || words[1] != words[0].wrapping_add(PAGE_SIZE) {
        return words.len().min(1); // In no order, as a rule: seen before 64 words are compared.
    }
    neighbours(words)
}
