//! Free pageblocks whose memory the system may take back: which of them have any, and since when they are free. A last one
//! that is cut short counts as a pageblock.
//!
//! The entry of a pageblock in which nothing is taken has a mark: none, when it was first seen free, or that the system
//! has its memory already. Whoever takes the first frame clears it, in the same write that says whose the pageblock is
//! now; so neither taking nor freeing pays for this.
use crate::area::Entry;
use crate::error::MisuseKind;
use crate::index::Class;
use crate::sync::Ordering::{Relaxed, SeqCst};
use crate::units::BLOCK_WORDS;
use crate::{Buddy, PageblockId, Pfn};

/// When: a count of whatever unit the caller likes, going round at [`Tick::ROUND`].
///
/// ```
/// use pagemill_core::Tick;
/// assert_eq!(Tick::new(10).since(Tick::new(7)), 3);
/// assert_eq!(Tick::new(u64::from(Tick::ROUND)).since(Tick::new(0)), 0); // once round
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tick(u16);

impl Tick {
    /// So many ticks look like none.
    pub const ROUND: u16 = Entry::GONE - 1;

    /// The tick of this number.
    pub const fn new(number: u64) -> Self {
        Self((number % Self::ROUND as u64) as u16 + 1)
    }
    /// How many ticks ago `earlier` was.
    pub const fn since(self, earlier: Self) -> u16 {
        ((self.0 as u32 + Self::ROUND as u32 - earlier.0 as u32) % Self::ROUND as u32) as u16
    }
}

/// Which free pageblocks are to be taken: see [`Buddy::take_unused`].
///
/// ```
/// assert!(pagemill_core::Unused::All != pagemill_core::Unused::Since { now: pagemill_core::Tick::new(8), ticks: 8 });
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unused {
    /// All.
    All,
    /// Those that were seen free at least `ticks` before `now`; others count as seen now.
    Since {
        /// The time.
        now: Tick,
        /// At least so long ago.
        ticks: u16,
    },
}

/// What is free of a pageblock; see [`Buddy::next_part`].
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// The pageblock's first frame.
    pub first: Pfn,
    /// A bit for each frame that is free.
    pub free: [u64; BLOCK_WORDS],
    /// Nothing of it is taken.
    pub is_unused: bool,
    /// A CPU draws from it.
    pub is_bound: bool,
}

impl Part {
    /// Each word of it: the frame of its bit 0, and the word.
    ///
    /// ```
    /// # use pagemill_core::{Mobility, Order, Pfn, Buddy, BuddyMetadata, atomic::{AtomicU32, AtomicU64}};
    /// # let need = BuddyMetadata::for_frames(512);
    /// # let bits: Vec<AtomicU64> = (0..need.words).map(|_| AtomicU64::new(0)).collect();
    /// # let areas: Vec<AtomicU32> = (0..need.areas).map(|_| AtomicU32::new(0)).collect();
    /// let buddy = Buddy::new(Pfn::new(0), 512, &bits, &areas).unwrap();
    /// assert!(buddy.next_part(&mut pagemill_core::PageblockId::new(0)).is_none(), "the system has not committed any of it");
    /// buddy.alloc_block(Order::ZERO, Mobility::Movable, 0).unwrap();
    /// let part = buddy.next_part(&mut pagemill_core::PageblockId::new(0)).unwrap();
    /// assert_eq!(part.words().nth(1), Some((Pfn::new(64), !0)));
    /// ```
    pub fn words(&self) -> impl Iterator<Item = (Pfn, u64)> {
        let first = self.first;
        (0..).zip(self.free).map(move |(word, bits)| (first.offset(64 * word), bits))
    }
}

impl Buddy<'_> {
    /// Takes the next pageblock from number `from` on in which nothing is taken and whose memory the system does not have,
    /// of at most `most` frames, as long as `floor` frames stay free. `from` moves behind it. Returns its first frame and
    /// how many it has. The caller gives it back by [`return_unused`](Self::return_unused).
    pub fn take_unused(&self, from: &mut PageblockId, which: Unused, floor: u32, most: u32) -> Option<(Pfn, u32)> {
        while from.as_usize() < self.areas.len() {
            let block = *from;
            *from = block.offset(1);
            let (entry, frames) = (Entry(self.area(block).load(Relaxed)), self.frames_of(block));
            if entry.free() != frames || entry.mark() == Entry::GONE || frames > most || self.is_withheld(block) {
                continue;
            }
            if let Unused::Since { now, ticks } = which {
                if entry.mark() == 0 {
                    // If somebody took a frame meanwhile it is not free since now.
                    let _ = self.area(block).compare_exchange(entry.0, entry.with_mark(now.0).0, Relaxed, Relaxed);
                    continue;
                }
                if now.since(Tick(entry.mark())) < ticks {
                    continue;
                }
            }
            let claim = self.claim(frames as usize, floor)?;
            self.note_use(block);
            let is_taken = claim.frames == frames as usize
                && self.area(block).compare_exchange(entry.0, Entry::GOING.0, SeqCst, Relaxed).is_ok();
            self.settle(claim, if is_taken { frames as usize } else { 0 });
            if is_taken {
                self.file(block, Class::of(entry, frames), None);
                return Some((self.first_of(block), frames));
            }
        }
        None
    }

    /// Returns a pageblock that [`take_unused`](Self::take_unused) took. `is_gone`: the system has its memory.
    ///
    /// # Errors
    /// As [`free_block`](Self::free_block): it was not taken.
    pub fn return_unused(&self, pfn: Pfn, is_gone: bool) -> Result<(), MisuseKind> {
        let block = self.block_of(pfn);
        let frames = self.frames_of(block);
        let unused = Entry::unused(frames).with_mark(if is_gone { Entry::GONE } else { 0 });
        // SeqCst as in `free_block`: the next owner sees what this one did; and see `file`.
        if self.area(block).compare_exchange(Entry::GOING.0, unused.0, SeqCst, Relaxed).is_err() {
            return Err(MisuseKind::DoubleFree);
        }
        self.file(block, None, Class::of(unused, frames));
        self.add_free(frames as usize);
        Ok(())
    }

    /// The next pageblock from number `from` on that has free frames, but for those whose memory the system has. `from` moves
    /// behind it. Others may take them at any moment.
    pub fn next_part(&self, from: &mut PageblockId) -> Option<Part> {
        while from.as_usize() < self.areas.len() {
            let block = *from;
            *from = block.offset(1);
            let entry = Entry(self.area(block).load(Relaxed));
            let is_unused = entry.free() == self.frames_of(block);
            if entry.free() == 0 || is_unused && entry.mark() == Entry::GONE {
                continue;
            }
            let mut free = [0; BLOCK_WORDS];
            free.iter_mut().zip(self.words_of(block)).for_each(|(copy, word)| *copy = word.load(Relaxed));
            let first = self.first_of(block);
            return Some(Part { first, free, is_unused, is_bound: entry.is_bound() });
        }
        None
    }

    /// Takes what is free of the pageblock that begins with `first` and of which something is taken, as long as
    /// `floor` frames stay free. Each word that gives some is handed to `emit` as (frame of its bit 0, the bits
    /// taken). Returns how many frames those were. The caller gives them back by [giving](crate::Giving).
    pub fn take_part(&self, first: Pfn, floor: u32, emit: &mut impl FnMut(Pfn, u64)) -> usize {
        let block = self.block_of(first);
        let free = Entry(self.area(block).load(Relaxed)).free();
        if free == self.frames_of(block) {
            return 0; // It goes as a whole.
        }
        let Some(claim) = self.claim(free as usize, floor) else { return 0 };
        let taken = self.take_from(block, claim.frames as u32, None, emit);
        self.settle(claim, taken as usize)
    }

    /// How many free frames stand in pageblocks whose memory the system has.
    pub fn gone_frames(&self) -> usize {
        let entries = self.areas.iter().map(|area| Entry(area.load(Relaxed)));
        entries
            .filter(|entry| !entry.is_whole() && entry.mark() == Entry::GONE)
            .map(|entry| entry.free() as usize)
            .sum()
    }

    /// Notes that the system committed the memory of the free pageblocks too.
    pub fn note_committed(&self) {
        for area in self.areas {
            let entry = Entry(area.load(Relaxed));
            if !entry.is_whole() && entry.mark() == Entry::GONE {
                // If it fails somebody took a frame, and cleared the mark.
                let _ = area.compare_exchange(entry.0, entry.with_mark(0).0, Relaxed, Relaxed);
            }
        }
    }
}
