//! The pageblocks to look at first: a bitmap of pageblocks for each mobility and class of fullness.
//!
//! The index is a hint. A bit may be stale while two threads change one block's count: a thread that follows it looks at the block's
//! entry, and files the block where it belongs. A request that finds nothing by the index scans the entries before it gives up. At rest
//! (I5) each block stands under its own class; it may stand under others too.
//!
//! Two levels keep the search short on large arenas: a summary bit for every 64 blocks.
use crate::area::Entry;
use crate::sync::{AtomicU64, Ordering::SeqCst, latest_u64};
use crate::{Mobility, PAGEBLOCK_FRAMES, PageblockId};

/// Classes of fullness of a mobility. Fuller blocks stand in lower classes and are drawn from first (best fit), so that the emptier ones
/// can become whole.
const LEVELS: usize = 8;
/// All classes: those of each mobility, and the class of blocks that are entirely free.
const CLASSES: usize = Mobility::COUNT * LEVELS + 1;
/// Entirely free: any mobility may take it.
pub(crate) const UNUSED: Class = Class((CLASSES - 1) as u8);

/// A class, by its place in the index.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Class(u8);

impl Class {
    /// The class of a block in use by its free frames: below 16, 32, 64, 128, 192, 256, 384, 512.
    fn level(free: u32) -> usize {
        const BELOW: [u32; LEVELS - 1] = [16, 32, 64, 128, 192, 256, 384];
        BELOW.iter().filter(|&&below| free >= below).count()
    }

    /// The class of a block with this entry; none if it has no free frame, or if a CPU draws from it: its count then changes often, and
    /// no other CPU should choose it. `frames` is the number of its frames.
    pub(crate) fn of(entry: Entry, frames: u32) -> Option<Self> {
        match entry.free() {
            0 => None,
            _ if entry.is_bound() => None,
            free if free == frames && frames == PAGEBLOCK_FRAMES => Some(UNUSED),
            // A last pageblock with fewer frames serves small orders of any mobility, but never a 2 MiB block.
            free if free == frames => Some(Self((LEVELS - 1) as u8)),
            free => Some(Self((entry.mobility().index() * LEVELS + Self::level(free)) as u8)),
        }
    }

    pub(crate) fn all() -> impl Iterator<Item = Self> {
        (0..CLASSES as u8).map(Self)
    }

    /// The classes of a mobility that can hold a block with `free` free frames, the fullest first.
    pub(crate) fn best_fit(mobility: Mobility, free: u32) -> impl Iterator<Item = Self> {
        (Self::level(free)..LEVELS).map(move |level| Self((mobility.index() * LEVELS + level) as u8))
    }
}

/// The index over the words that the buddy lends it.
#[derive(Debug)]
pub(crate) struct BlockIndex<'m> {
    words: &'m [AtomicU64],
    leaves: usize,
    summaries: usize,
}

/// The leaf that has a pageblock's bit, and the bit.
fn place_of(block: PageblockId) -> (usize, u64) {
    (block.as_usize() / 64, 1 << (block.as_usize() % 64))
}

impl<'m> BlockIndex<'m> {
    /// Words for this many blocks.
    pub(crate) const fn words_for(blocks: usize) -> usize {
        let leaves = blocks.div_ceil(64);
        CLASSES * (leaves + leaves.div_ceil(64))
    }

    pub(crate) fn new(words: &'m [AtomicU64], blocks: usize) -> Self {
        let leaves = blocks.div_ceil(64);
        Self { words, leaves, summaries: leaves.div_ceil(64) }
    }

    fn leaf(&self, class: Class, word: usize) -> &AtomicU64 {
        &self.words[usize::from(class.0) * (self.leaves + self.summaries) + word]
    }
    fn summary(&self, class: Class, word: usize) -> &AtomicU64 {
        &self.words[usize::from(class.0) * (self.leaves + self.summaries) + self.leaves + word]
    }

    pub(crate) fn contains(&self, class: Class, block: PageblockId) -> bool {
        let (word, bit) = place_of(block);
        self.leaf(class, word).load(SeqCst) & bit != 0
    }
    /// Whether a block stands under this class, and both levels lead to it.
    pub(crate) fn leads_to(&self, class: Class, block: PageblockId) -> bool {
        let (word, _) = place_of(block);
        self.contains(class, block) && self.summary(class, word / 64).load(SeqCst) >> (word % 64) & 1 == 1
    }

    pub(crate) fn insert(&self, class: Class, block: PageblockId) {
        let (word, bit) = place_of(block);
        self.leaf(class, word).fetch_or(bit, SeqCst);
        // SeqCst pairs with `remove`, which clears the summary bit and then looks at the leaf again: one of the two sees the other's
        // change.
        self.summary(class, word / 64).fetch_or(1 << (word % 64), SeqCst);
    }

    pub(crate) fn remove(&self, class: Class, block: PageblockId) {
        let (word, bit) = place_of(block);
        if self.leaf(class, word).fetch_and(!bit, SeqCst) & !bit != 0 {
            return;
        }
        let summary = self.summary(class, word / 64);
        summary.fetch_and(!(1 << (word % 64)), SeqCst);
        if latest_u64(self.leaf(class, word)) != 0 {
            summary.fetch_or(1 << (word % 64), SeqCst);
        }
    }

    /// The first block at or after `from` that stands under `class`.
    pub(crate) fn next(&self, class: Class, from: PageblockId) -> Option<PageblockId> {
        let (mut word, first) = place_of(from);
        let at = |word: usize, leaf: u64| Some(PageblockId::new(word * 64 + leaf.trailing_zeros() as usize));
        if word >= self.leaves {
            return None;
        }
        let here = self.leaf(class, word).load(SeqCst) & first.wrapping_neg();
        if here != 0 {
            return at(word, here);
        }
        word += 1;
        while word < self.leaves {
            let marked = self.summary(class, word / 64).load(SeqCst) & (!0 << (word % 64));
            if marked == 0 {
                word = (word / 64 + 1) * 64;
                continue;
            }
            word = word / 64 * 64 + marked.trailing_zeros() as usize;
            let leaf = self.leaf(class, word).load(SeqCst);
            if leaf != 0 {
                return at(word, leaf);
            }
            word += 1;
        }
        None
    }
}
