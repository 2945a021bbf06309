//! Walks a buddy and proves its invariants, if it is at rest; shows what is free by order, as `/proc/buddyinfo` does.
use crate::area::{Entry, aligned_runs, low_bits, run_mask};
use crate::index::Class;
use crate::sync::AtomicU32;
use crate::sync::Ordering::{Acquire, Relaxed};
use crate::units::BLOCK_WORDS;
use crate::{Buddy, FrameState, Order, PAGEBLOCK_FRAMES, PageblockId, Pfn};
use core::fmt;

/// The buddy's side of C10.2.
///
/// ```
/// # use pagemill_core::{Pfn, Buddy, BuddyMetadata, atomic::{AtomicU32, AtomicU64}};
/// # let need = BuddyMetadata::for_frames(600);
/// # let bits: Vec<AtomicU64> = (0..need.words).map(|_| AtomicU64::new(0)).collect();
/// # let areas: Vec<AtomicU32> = (0..need.areas).map(|_| AtomicU32::new(0)).collect();
/// let buddy = Buddy::new(Pfn::new(0), 600, &bits, &areas).unwrap();
/// let census = buddy.validate().unwrap();
/// assert_eq!((census.free, census.whole), (600, 0));
/// assert_eq!(buddy.buddy_info().free_blocks(pagemill_core::Order::PAGEBLOCK), 1);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BuddyCensus {
    /// Free frames.
    pub free: usize,
    /// Frames in blocks of order 9 and up that are handed out.
    pub whole: usize,
}

/// Two things that disagreed in a walk over the frames. Another thread changed one of them between two looks; or, if the
/// allocator was at rest, it is a fault of Pagemill's own (C10.1).
///
/// ```
/// let misfit = pagemill_core::Misfit::Sum { counted: 7, found: 8 };
/// assert_eq!(misfit.to_string(), "I4: the buddy counts 7 free frames, and its pageblocks 8");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Misfit {
    /// A pageblock that is handed out whole has free frames, or not all bits set.
    #[error("I3: whole pageblock {block} counts {counted} free frames and has {set} bits")]
    Whole {
        /// Its place in the buddy.
        block: PageblockId,
        /// What it counts.
        counted: u32,
        /// Bits.
        set: u32,
    },
    /// A pageblock's count is not that of its bits.
    #[error("I4: pageblock {block} counts {counted} free frames and has {set} bits")]
    Count {
        /// Its place in the buddy.
        block: PageblockId,
        /// What it counts.
        counted: u32,
        /// Bits.
        set: u32,
    },
    /// The buddy's count is not that of its pageblocks.
    #[error("I4: the buddy counts {counted} free frames, and its pageblocks {found}")]
    Sum {
        /// What it counts.
        counted: usize,
        /// What they do.
        found: usize,
    },
    /// The index does not lead to a pageblock where it should.
    #[error("I5: pageblock {block} with {free} free frames is not filed under its class")]
    Unfiled {
        /// Its place in the buddy.
        block: PageblockId,
        /// What it counts.
        free: u32,
    },
    /// A list holds a frame of another buddy.
    #[error("L1: a list holds {pfn}, which is not of its buddy")]
    OtherZones {
        /// The frame.
        pfn: Pfn,
    },
    /// Two lists hold a frame, or one holds it twice.
    #[error("L1: {pfn} is on lists twice")]
    ListedTwice {
        /// The frame.
        pfn: Pfn,
    },
    /// A frame's state does not say where it is.
    #[error("{pfn} is {state:?} and in {places} free places")]
    State {
        /// The frame.
        pfn: Pfn,
        /// Its state.
        state: FrameState,
        /// How often it is in the free areas and on lists.
        places: usize,
    },
    /// A frame inside of a block that is handed out looks as if it were not.
    #[error("{pfn} of a block that is handed out is {state:?} and in {places} free places")]
    OfBlock {
        /// The frame.
        pfn: Pfn,
        /// Its state.
        state: FrameState,
        /// As above.
        places: usize,
    },
    /// The statistics count other pages as handed out than are.
    #[error("C3.13: {counted} pages are counted as out, and {found} are")]
    Out {
        /// What was counted.
        counted: i64,
        /// How many are neither free nor on a list.
        found: usize,
    },
    /// Frames are missing, or too many.
    #[error("C10.2: {found} frames are somewhere, and {managed} are managed")]
    Managed {
        /// Those that were found.
        found: usize,
        /// Those that there are.
        managed: usize,
    },
}

/// Free blocks by order, each counted once with the largest order it merges to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BuddyInfo {
    blocks: [usize; Order::MAX.get() as usize + 1],
}

impl BuddyInfo {
    /// How many free blocks of this order there are.
    pub fn free_blocks(&self, order: Order) -> usize {
        self.blocks[usize::from(order.get())]
    }
}

impl fmt::Display for BuddyInfo {
    /// The numbers of a line of `/proc/buddyinfo`, with the orders up to 1 GiB.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.blocks.iter().try_for_each(|blocks| write!(f, " {blocks:>6}"))
    }
}

impl Buddy<'_> {
    /// Is this frame in the free areas?
    pub fn is_free(&self, pfn: Pfn) -> bool {
        let is_whole = Entry(self.area(self.block_of(pfn)).load(Acquire)).is_whole();
        !is_whole && self.bits[self.word_of(pfn).as_usize()].load(Acquire) >> (pfn.as_u32() % 64) & 1 == 1
    }

    /// Proves I3, I4 and I5 of a buddy that nobody uses meanwhile.
    ///
    /// # Errors
    /// The first [`Misfit`]: a buddy at rest has none.
    pub fn validate(&self) -> Result<BuddyCensus, Misfit> {
        let mut census = BuddyCensus::default();
        for (block, area) in self.blocks().zip(self.areas) {
            let (entry, frames) = (Entry(area.load(Acquire)), self.frames_of(block));
            let set: u32 = self.words_of(block).iter().map(|word| word.load(Acquire).count_ones()).sum();
            let counted = entry.free();
            if entry.is_whole() {
                if counted != 0 || set != frames {
                    return Err(Misfit::Whole { block, counted, set });
                }
                census.whole += frames as usize;
            } else {
                if counted != set {
                    return Err(Misfit::Count { block, counted, set });
                }
                census.free += set as usize;
            }
            if Class::of(entry, frames).is_some_and(|class| !self.index.leads_to(class, block)) {
                return Err(Misfit::Unfiled { block, free: counted });
            }
        }
        let (counted, found) = (self.free_frames(), census.free);
        if counted == found { Ok(census) } else { Err(Misfit::Sum { counted, found }) }
    }

    /// Counts everything again from the bits: in the child after a fork, where other threads stopped for ever in the middle of
    /// an operation. `listed` are the frames on lists, which are free from now on. What another thread had in its hands stays
    /// handed out. A block of order 9 and up that was being taken or given back, and is not whole, is free, as is a pageblock on
    /// its way to the system. Only pageblocks that [were used](Self::noting_use) are looked at, each of
    /// which `looked_at` is told of, by its first frame and number of frames. Nobody may use the buddy meanwhile.
    ///
    /// The memory of a child is a copy of one moment: of what each other thread wrote, the child has all up to some point. So a set
    /// bit is a free frame here as well (I1, I2), and what a list holds is in no other place, or on its way to the bits.
    pub fn recover(&self, listed: impl IntoIterator<Item = Pfn>, mut looked_at: impl FnMut(Pfn, usize)) {
        for pfn in listed {
            self.set_bits(self.word_of(pfn), 1 << (pfn.as_u32() % 64));
        }
        let (mut free, mut tails) = (0, 0);
        for (block, area) in self.blocks().zip(self.areas) {
            let (entry, frames) = (Entry(area.load(Acquire)), self.frames_of(block));
            if tails == 0 && !self.was_used(block) {
                free += frames as usize;
                continue;
            }
            let is_kept = tails > 0 || self.is_complete(block, entry, &mut tails);
            tails -= usize::from(tails > 0);
            if entry.is_whole() {
                // I3: all bits of a whole one are set; where it is split, some are not yet, or are no more.
                for (i, word) in self.words_of(block).iter().enumerate() {
                    word.store(low_bits(frames.saturating_sub(i as u32 * 64)), Relaxed);
                }
            }
            let set: u32 = self.words_of(block).iter().map(|word| word.load(Relaxed).count_ones()).sum();
            let next = match entry {
                _ if is_kept => entry,
                _ if set < frames => Entry::in_use(set, entry.mobility()),
                _ if entry.free() == frames => entry.with_bound(false),
                _ => Entry::unused(frames),
            };
            if next != entry {
                area.store(next.0, Relaxed);
            }
            free += next.free() as usize;
            self.file_anew(block, Class::of(next, frames));
            looked_at(self.first_of(block), frames as usize);
        }
        self.reset_after_fork(free);
    }

    /// Is this the first pageblock of a block that is handed out, with all that belong to it? Then those are `tails`, itself
    /// included.
    fn is_complete(&self, block: PageblockId, entry: Entry, tails: &mut usize) -> bool {
        let Some(order) = entry.whole_order().filter(|&order| order >= Order::PAGEBLOCK.get()) else { return false };
        let span = 1 << (order - Order::PAGEBLOCK.get());
        let is_tail = |area: &AtomicU32| Entry(area.load(Relaxed)) == Entry::TAIL_OF_WHOLE;
        let is_complete = self
            .areas
            .get(block.as_usize()..block.as_usize() + span)
            .is_some_and(|areas| areas[1..].iter().all(is_tail));
        *tails = if is_complete { span } else { 0 };
        is_complete
    }

    /// Has a block stand under `class` alone.
    fn file_anew(&self, block: PageblockId, class: Option<Class>) {
        for other in Class::all().filter(|&other| Some(other) != class && self.index.contains(other, block)) {
            self.index.remove(other, block);
        }
        if let Some(class) = class {
            self.index.insert(class, block);
        }
    }

    /// Free blocks by order, merged as far as they go. A snapshot; exact at rest.
    pub fn buddy_info(&self) -> BuddyInfo {
        let mut info = BuddyInfo::default();
        let mut block = PageblockId::FIRST;
        while block.as_usize() < self.areas.len() {
            if Entry(self.area(block).load(Relaxed)).free() != PAGEBLOCK_FRAMES {
                self.count_within(block, &mut info);
                block = block.offset(1);
                continue;
            }
            // The largest aligned group of unused pageblocks that begins here.
            let mut order = Order::PAGEBLOCK.get();
            while order < Order::MAX.get() {
                let span = 1usize << (order + 1 - Order::PAGEBLOCK.get());
                let is_unused = |block: PageblockId| {
                    self.areas
                        .get(block.as_usize())
                        .is_some_and(|area| Entry(area.load(Relaxed)).free() == PAGEBLOCK_FRAMES)
                };
                if self.next_aligned(block, span) != block || !block.run(span).all(is_unused) {
                    break;
                }
                order += 1;
            }
            info.blocks[usize::from(order)] += 1;
            block = block.offset(1 << (order - Order::PAGEBLOCK.get()));
        }
        info
    }

    fn count_within(&self, block: PageblockId, info: &mut BuddyInfo) {
        if Entry(self.area(block).load(Relaxed)).is_whole() {
            return;
        }
        let mut words = [0u64; BLOCK_WORDS];
        for (copy, word) in words.iter_mut().zip(self.words_of(block)) {
            *copy = word.load(Relaxed);
        }
        for order in [8u8, 7] {
            for group in words.chunks_mut(1 << (order - 6)) {
                if group.iter().all(|&word| word == !0) {
                    info.blocks[usize::from(order)] += 1;
                    group.fill(0);
                }
            }
        }
        for mut word in words {
            for order in (0..=6u8).rev() {
                let mut runs = aligned_runs(word, order);
                info.blocks[usize::from(order)] += runs.count_ones() as usize;
                while runs != 0 {
                    word &= !(run_mask(order) << runs.trailing_zeros());
                    runs &= runs - 1;
                }
            }
        }
    }
}
