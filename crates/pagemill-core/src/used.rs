//! Notes which parts of a buddy were ever used, so that a forked child examines only those.
//!
//! A buddy of 1 TiB has half a million pageblocks, and most programs use few of them. Without the notes [`Buddy::recover`] would
//! examine every pageblock and the states of its frames: pages of metadata that were never touched.
//!
//! Each region of 64 pageblocks has a bit, in memory that the caller lends and that *a child shares with its parent*. The parent's
//! threads run on while the system copies the process, so a copied bit could be older than the states that it describes. The child
//! reads a shared bit after the states were copied. A bit is set before anything else of its region changes, so if a child finds it
//! unset, the region is as [`Buddy::new`] left it. Bits are never cleared: a bit that was set in vain costs the child a look at the
//! region, and no more.
use crate::sync::{AtomicU32, Ordering::Relaxed, Ordering::SeqCst, fence};
use crate::{Buddy, PageblockId};

/// The number of pageblocks in a region (128 MiB): those that share a word of the index.
const BLOCKS: usize = 64;

/// The number of words of notes for a buddy of this many frames; see [`Buddy::noting_use`].
///
/// ```
/// assert_eq!(pagemill_core::use_words_for(1 << 28), 256); // a TiB: a KiB of notes
/// ```
pub const fn use_words_for(frames: u32) -> usize {
    frames.div_ceil(BLOCKS as u32 * crate::PAGEBLOCK_FRAMES * 32) as usize
}

impl<'m> Buddy<'m> {
    /// Makes the buddy, which must be new, note in these words which parts of it are used. There must be as many words as
    /// [`use_words_for`] says, all of them zero. A forked child must share them with its parent until it has recovered. Without
    /// them, [`recover`](Self::recover) examines everything.
    #[must_use]
    pub fn noting_use(mut self, words: &'m [AtomicU32]) -> Self {
        self.used = words;
        self
    }

    /// Stops the notes: the buddy does not touch the words any more, and from now on [`recover`](Self::recover) examines everything,
    /// in this process and in its children. A forked child calls this after it has recovered if it has no memory for words of its own.
    pub fn forget_use(&self) {
        self.forgets_use.store(true, Relaxed);
    }

    /// Must be called before the first change to a pageblock.
    pub(crate) fn note_use(&self, block: PageblockId) {
        let Some((word, bit)) = self.use_bit(block) else { return };
        if word.load(Relaxed) & bit == 0 {
            word.fetch_or(bit, SeqCst);
            // A thread that sees a later write of this thread also sees the bit.
            fence(SeqCst);
        }
    }

    /// Whether frames of the pageblock may ever have been taken. In a forked child: by its parent, before the fork.
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
