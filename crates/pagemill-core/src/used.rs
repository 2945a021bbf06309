//! Notes of which parts of a buddy were ever used, so that the child of a fork looks at those alone.
//!
//! A buddy of a TiB has half a million pageblocks, and most programs use few of them. [`Buddy::recover`] would look at each,
//! and at the states of its frames: pages of metadata that nobody has touched until then.
//!
//! There is a bit for each region of 64 pageblocks, in memory that the caller lends and that *a child shares with its parent*. The
//! parent's threads go on while the system copies the process, so a bit that was copied could be older than the states that
//! it speaks of. One that is shared is read after the states were copied. It is set before anything else of the region
//! changes, so a child that finds it unset has the region as [`Buddy::new`] left it. Bits are never cleared: one that
//! is set for nothing costs a look at the region, and no more.
use crate::sync::{AtomicU32, Ordering::Relaxed, Ordering::SeqCst, fence};
use crate::{Buddy, PageblockId};

/// Pageblocks of a region: 128 MiB, the blocks that share a word of the index.
const BLOCKS: usize = 64;

/// Words of notes for a buddy of this many frames; see [`Buddy::noting_use`].
///
/// ```
/// assert_eq!(pagemill_core::use_words_for(1 << 28), 256); // a TiB: a KiB of notes
/// ```
pub const fn use_words_for(frames: u32) -> usize {
    frames.div_ceil(BLOCKS as u32 * crate::PAGEBLOCK_FRAMES * 32) as usize
}

impl<'m> Buddy<'m> {
    /// Has the buddy, which is new, note in these words what of it is used: [`use_words_for`] so many frames, all zero. The child
    /// of a fork must see its parent's until it has recovered. Without it, [`recover`](Self::recover) looks at everything.
    #[must_use]
    pub fn noting_use(mut self, words: &'m [AtomicU32]) -> Self {
        self.used = words;
        self
    }

    /// Has it note nothing any more, and touch those words no more: from now on [`recover`](Self::recover) looks at everything, in
    /// this process and in its children. For the child of a fork that has recovered, and has no memory for words of its own.
    pub fn forget_use(&self) {
        self.forgets_use.store(true, Relaxed);
    }

    /// Goes before a change to a pageblock that may have been as [`Buddy::new`] left it.
    pub(crate) fn note_use(&self, block: PageblockId) {
        let Some((word, bit)) = self.use_bit(block) else { return };
        if word.load(Relaxed) & bit == 0 {
            word.fetch_or(bit, SeqCst);
            // Whoever sees any later write of this thread's sees the bit.
            fence(SeqCst);
        }
    }

    /// May something have been taken of the pageblock? In the child of a fork: by its parent, before the copy was made.
    pub(crate) fn was_used(&self, block: PageblockId) -> bool {
        self.use_bit(block).is_none_or(|(word, bit)| word.load(SeqCst) & bit != 0)
    }

    fn use_bit(&self, block: PageblockId) -> Option<(&AtomicU32, u32)> {
        if self.forgets_use.load(Relaxed) {
            return None;
        }
        let region = block.as_usize() / BLOCKS;
        Some((self.used.get(region / 32)?, 1 << (region % 32)))
    }
}
