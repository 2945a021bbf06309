//! Finds free pageblocks whose memory can go back to the system: which of them still have memory, and since when they are free. A
//! buddy's last pageblock counts as one even if it is shorter.
//!
//! The entry of a pageblock whose frames are all free has a mark. It has one of three meanings: nothing is known (0); the
//! tick at which the pageblock was first seen free; its memory is gone, that is, with the system (`GONE`). The request that takes the first frame clears the mark, in the same
//! write that sets the pageblock's mobility, so this costs nothing where frames are taken and freed.
use crate::area::Entry;
use crate::error::MisuseKind;
use crate::index::Class;
use crate::sync::Ordering::{Relaxed, SeqCst};
use crate::units::BLOCK_WORDS;
use crate::{Buddy, PageblockId, Pfn};

/// A point in time, in a unit of the caller's choice. The count starts again at [`Tick::ROUND`].
///
/// ```
/// use pagemill_core::Tick;
/// assert_eq!(Tick::new(10).since(Tick::new(7)), 3);
/// assert_eq!(Tick::new(u64::from(Tick::ROUND)).since(Tick::new(0)), 0); // once round
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tick(u16);

impl Tick {
    /// The number of ticks after which the count starts again.
    pub const ROUND: u16 = Entry::GONE - 1;

    /// The tick with this number.
    pub const fn new(number: u64) -> Self {
        Self((number % Self::ROUND as u64) as u16 + 1)
    }
    /// The number of ticks since `earlier`.
    pub const fn since(self, earlier: Self) -> u16 {
        ((self.0 as u32 + Self::ROUND as u32 - earlier.0 as u32) % Self::ROUND as u32) as u16
    }
}

/// Which free pageblocks [`Buddy::take_unused`] takes.
///
/// ```
/// assert!(pagemill_core::Unused::All != pagemill_core::Unused::Since { now: pagemill_core::Tick::new(8), ticks: 8 });
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unused {
    /// All of them.
    All,
    /// Those that were seen free at least `ticks` before `now`. Others are marked as seen now.
    Since {
        /// The present time.
        now: Tick,
        /// The least time since the pageblock was seen free.
        ticks: u16,
    },
}

/// The free frames of a pageblock; see [`Buddy::next_part`].
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// The pageblock's first frame.
    pub first: Pfn,
    /// A bit for each frame that is free.
    pub free: [u64; BLOCK_WORDS],
    /// All its frames are free.
    pub is_unused: bool,
    /// A CPU takes frames from it.
    pub is_bound: bool,
}

impl Part {
    /// Its words, each with the frame of its bit 0.
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
    /// Takes the next pageblock, from number `from` on, whose frames are all free and whose memory is not gone, if it has at most
    /// `most` frames and `floor` frames stay free. Moves `from` behind it. Returns its first frame and its number of frames. The
    /// caller returns it by [`return_unused`](Self::return_unused).
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
                    // If another thread took a frame meanwhile, this fails, and the pageblock stays unmarked.
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

    /// Returns a pageblock that [`take_unused`](Self::take_unused) took. `is_gone`: its memory went back to the system.
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

    /// The next pageblock, from number `from` on, that has free frames and whose memory is not gone. Moves `from` behind it. Other
    /// threads may take the frames at any moment.
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

    /// Takes the free frames of a pageblock that is partly in use and begins with `first`, as long as `floor` frames stay free. It
    /// calls `emit` for each word of which it took frames, with the frame of the word's bit 0 and the bits taken. Returns the number of
    /// frames. The caller returns them by [`Giving`](crate::Giving).
    pub fn take_part(&self, first: Pfn, floor: u32, emit: &mut impl FnMut(Pfn, u64)) -> usize {
        let block = self.block_of(first);
        let free = Entry(self.area(block).load(Relaxed)).free();
        if free == self.frames_of(block) {
            return 0; // `take_unused` takes such a pageblock.
        }
        let Some(claim) = self.claim(free as usize, floor) else { return 0 };
        let taken = self.take_from(block, claim.frames as u32, None, emit);
        self.settle(claim, taken as usize)
    }

    /// The number of free frames in pageblocks whose memory is gone.
    pub fn gone_frames(&self) -> usize {
        let entries = self.areas.iter().map(|area| Entry(area.load(Relaxed)));
        entries
            .filter(|entry| !entry.is_whole() && entry.mark() == Entry::GONE)
            .map(|entry| entry.free() as usize)
            .sum()
    }

    /// Notes that the system has committed the memory of all free pageblocks.
    pub fn note_committed(&self) {
        for area in self.areas {
            let entry = Entry(area.load(Relaxed));
            if !entry.is_whole() && entry.mark() == Entry::GONE {
                // If it fails, another thread took a frame, and cleared the mark.
                let _ = area.compare_exchange(entry.0, entry.with_mark(0).0, Relaxed, Relaxed);
            }
        }
    }
}
