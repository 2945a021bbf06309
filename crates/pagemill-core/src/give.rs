//! Frees frames to the buddy, many at a time and in any order.
//!
//! A frame that is freed alone costs two atomic operations: one on its bit, one on the count of its pageblock. Here frames of one word
//! or pageblock share them: a small direct-mapped table collects masks by word, a second one counts by pageblock. An entry is written
//! when another word needs its place, or at the end. The counts are written last, after all bits (I1).
use crate::area::{aligned_runs, low_bits};
use crate::{Buddy, Handful, Order, PageblockId, Pfn, WordId};
use core::borrow::BorrowMut;

/// The result of a [`Giving`].
///
/// ```
/// let given = pagemill_core::Given::default();
/// assert_eq!((given.frames, given.doubles), (0, 0));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Given {
    /// Frames that are free now.
    pub frames: usize,
    /// Frames that were free already, or were given twice in this call.
    pub doubles: usize,
    /// How many blocks those are, if the [`Giving`] is [of an order](Giving::of_order). If several threads give a block at the same
    /// moment, it counts here for all but one of them.
    pub double_blocks: usize,
    /// The last frame that was free already.
    pub last_double: Option<Pfn>,
    /// The buddy was [closed](Buddy::close), and these were its last frames. From now on the caller alone uses it.
    pub is_complete: bool,
}

/// The table in which a [`Giving`] collects frames: the bits of up to `SLOTS` words. Zeroed memory is an empty table.
/// [`Giving::by`] shows how it is used.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WordTable<const SLOTS: usize> {
    /// Word numbers plus one, 0 where there is none.
    words: [u32; SLOTS],
    masks: [u64; SLOTS],
}

impl<const SLOTS: usize> WordTable<SLOTS> {
    /// An empty table.
    pub const fn new() -> Self {
        Self { words: [0; SLOTS], masks: [0; SLOTS] }
    }
}

impl<const SLOTS: usize> Default for WordTable<SLOTS> {
    fn default() -> Self {
        Self::new()
    }
}

/// Frames on their way to a buddy. [`finish`](Self::finish) completes the call.
#[derive(Debug)]
#[must_use = "frames are lost unless it is finished"]
pub struct Giving<'z, 'm, const SLOTS: usize, T: BorrowMut<WordTable<SLOTS>> = WordTable<SLOTS>> {
    buddy: &'z Buddy<'m>,
    order: Order,
    table: T,
    /// Each entry is a pageblock's number plus one, and a count of frames.
    counts: [(u32, u32); 32],
    given: Given,
}

impl<'z, 'm> Giving<'z, 'm, 32> {
    /// Begins to give frames to a buddy.
    pub fn to(buddy: &'z Buddy<'m>) -> Self {
        Self::by(buddy, WordTable::new())
    }
}

impl<'z, 'm> Giving<'z, 'm, 256> {
    /// As [`to`](Giving::to), for thousands of frames in any order: it collects more words before it writes them.
    pub fn many_to(buddy: &'z Buddy<'m>) -> Self {
        Self::by(buddy, WordTable::new())
    }
}

impl<'z, 'm, const SLOTS: usize, T: BorrowMut<WordTable<SLOTS>>> Giving<'z, 'm, SLOTS, T> {
    /// Begins to give frames to a buddy, and collects them in the caller's table, which must be empty. It is empty again when the call
    /// is finished.
    ///
    /// ```
    /// # use pagemill_core::{BoundBlock, Giving, Mobility, Pfn, WordTable, Buddy, BuddyMetadata, atomic::{AtomicU32, AtomicU64}};
    /// # let need = BuddyMetadata::for_frames(512);
    /// # let bits: Vec<AtomicU64> = (0..need.words).map(|_| AtomicU64::new(0)).collect();
    /// # let areas: Vec<AtomicU32> = (0..need.areas).map(|_| AtomicU32::new(0)).collect();
    /// let buddy = Buddy::new(Pfn::new(0), 512, &bits, &areas).unwrap();
    /// let mut table = WordTable::<512>::new();
    /// let taken = buddy.take(&BoundBlock::new(), 100, Mobility::Unmovable, 0, &mut |_, _| ());
    /// let mut giving = Giving::by(&buddy, &mut table);
    /// (0..100).rev().for_each(|pfn| giving.give(Pfn::new(pfn)));
    /// assert_eq!((taken, giving.finish().frames), (100, 100));
    /// assert_eq!(table, WordTable::new());
    /// ```
    pub fn by(buddy: &'z Buddy<'m>, table: T) -> Self {
        Self { buddy, order: Order::ZERO, table, counts: [(0, 0); 32], given: Given::default() }
    }

    /// Promises that only blocks of this order are given. The order is at most 8.
    pub fn of_order(self, order: Order) -> Self {
        Self { order, ..self }
    }

    /// Gives one frame.
    #[inline]
    pub fn give(&mut self, pfn: Pfn) {
        self.give_bits(self.buddy.word_of(pfn), 1 << (pfn.as_u32() % 64));
    }

    /// Gives frames by their numbers. Neighbouring frames cost less.
    #[inline]
    pub fn give_slice(&mut self, pfns: &[Pfn]) {
        let mut groups = pfns.chunks_exact(8);
        for group in &mut groups {
            let first = group[0].as_u32();
            let is_run = group.iter().zip(0..).fold(0, |diff, (pfn, i)| diff | (pfn.as_u32() ^ (first + i))) == 0;
            if is_run && first % 64 <= 56 {
                self.give_bits(self.buddy.word_of(group[0]), 0xff << (first % 64));
            } else {
                group.iter().for_each(|&pfn| self.give(pfn));
            }
        }
        groups.remainder().iter().for_each(|&pfn| self.give(pfn));
    }

    /// Gives `n` neighbouring frames from `first` on.
    #[inline]
    pub fn give_run(&mut self, first: Pfn, n: usize) {
        let (mut word, mut bit, mut left) = (self.buddy.word_of(first), first.as_u32() % 64, n as u32);
        while left > 0 {
            let here = left.min(64 - bit);
            self.give_bits(word, low_bits(here) << bit);
            (word, bit, left) = (word.offset(1), 0, left - here);
        }
    }

    /// Gives the remaining frames of a handful.
    pub fn give_handful(&mut self, handful: &mut Handful) {
        while let Some((first, mask)) = handful.next_word(64) {
            self.give_bits(self.buddy.word_of(first), mask);
        }
    }

    /// Gives frames of one word.
    #[inline]
    pub(crate) fn give_bits(&mut self, word: WordId, mask: u64) {
        let slot = word.as_usize() % SLOTS;
        if self.table.borrow().words[slot] != word.as_u32() + 1 {
            if mask == !0 {
                return self.put(word, mask); // No other bits of it will come.
            }
            self.write(slot);
            self.table.borrow_mut().words[slot] = word.as_u32() + 1;
        }
        // A bit that is collected twice is a double free too; counting bits would lose it.
        let collected = &mut self.table.borrow_mut().masks[slot];
        let doubles = *collected & mask;
        *collected |= mask;
        if doubles != 0 {
            self.note_doubles(word, doubles);
        }
    }

    #[cold]
    fn note_doubles(&mut self, word: WordId, doubles: u64) {
        self.given.doubles += doubles.count_ones() as usize;
        let (span, in_word) = ((self.order.frames() as usize).div_ceil(64), self.order.get().min(6));
        let firsts = if word.as_usize().is_multiple_of(span) { aligned_runs(!0, in_word) } else { 0 };
        self.given.double_blocks += (doubles & firsts).count_ones() as usize;
        self.given.last_double = Some(self.buddy.first_of_word(word).offset(doubles.ilog2()));
    }

    /// Sets the bits that `slot` collected, and empties it.
    fn write(&mut self, slot: usize) {
        let table = self.table.borrow_mut();
        let Some(word) = core::mem::take(&mut table.words[slot]).checked_sub(1).map(WordId::new) else { return };
        let mask = core::mem::take(&mut table.masks[slot]);
        self.put(word, mask);
    }

    /// Sets bits of one word, and counts them.
    fn put(&mut self, word: WordId, mask: u64) {
        let doubles = self.buddy.set_bits(word, mask);
        if doubles != 0 {
            self.note_doubles(word, doubles);
        }
        // Without a population-count instruction, counting bits takes about ten instructions. If frames come in order, most words are
        // full, so they are tested first.
        let frames = if mask & !doubles == !0 { 64 } else { (mask & !doubles).count_ones() };
        self.given.frames += frames as usize;
        let block = word.pageblock();
        let place = block.as_usize() % self.counts.len();
        if self.counts[place].0 != block.as_entry() {
            self.write_count(place);
            self.counts[place].0 = block.as_entry();
        }
        self.counts[place].1 += frames;
    }

    fn write_count(&mut self, place: usize) {
        let (block, frames) = core::mem::take(&mut self.counts[place]);
        if let Some(block) = PageblockId::from_entry(block)
            && frames > 0
        {
            self.buddy.raise(block, frames);
        }
    }

    /// The number of frames given so far, including those that were free already.
    pub fn frames(&self) -> usize {
        let collected = self.table.borrow().masks.iter().map(|mask| mask.count_ones() as usize).sum::<usize>();
        collected + self.given.frames + self.given.doubles
    }

    /// Writes the entries that are still in the tables. It takes a reference because the tables are large: a signal handler may have no
    /// stack for a copy.
    pub fn finish(&mut self) -> Given {
        self.finish_with(|_| ())
    }

    /// The same. It calls `look` with the result after all bits are set and before the frames are counted. Until `look` returns, no
    /// other thread can end the buddy.
    pub fn finish_with(&mut self, look: impl FnOnce(&Given)) -> Given {
        for from in (0..SLOTS).step_by(8) {
            // Most are empty where frames were in order.
            let to = SLOTS.min(from + 8);
            if self.table.borrow().words[from..to].iter().fold(0, |any, word| any | word) != 0 {
                (from..to).for_each(|slot| self.write(slot));
            }
        }
        look(&self.given);
        (0..self.counts.len()).for_each(|place| self.write_count(place));
        let mut given = core::mem::take(&mut self.given);
        given.is_complete = self.buddy.add_free(given.frames);
        given
    }
}
