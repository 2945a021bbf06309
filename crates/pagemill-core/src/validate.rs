//! Checks the invariants of a buddy at rest, and counts its free blocks by order, as `/proc/buddyinfo` does.
use crate::area::{Entry, aligned_runs, low_bits, run_mask};
use crate::index::Class;
use crate::sync::AtomicU32;
use crate::sync::Ordering::{Acquire, Relaxed};
use crate::units::BLOCK_WORDS;
use crate::{Buddy, FrameState, Order, PAGEBLOCK_FRAMES, PageblockId, Pfn, WordId};
use core::fmt;

/// The result of [`Buddy::validate`]: the buddy's part of C10.2.
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

/// Two values that disagree. Either another thread changed one of them between the two reads or, if the allocator was at rest,
/// Pagemill has a bug (C10.1).
///
/// ```
/// let misfit = pagemill_core::Misfit::Sum { counted: 7, found: 8 };
/// assert_eq!(misfit.to_string(), "I4: the buddy counts 7 free frames, and its pageblocks 8");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Misfit {
    /// A pageblock that is handed out whole has free frames, or not all bits set.
    #[error("I3: whole pageblock {block} counts {counted} free frames and has {set} bits")]
    Whole {
        /// Its place in the buddy.
        block: PageblockId,
        /// Free frames by its entry.
        counted: u32,
        /// Set bits in its words.
        set: u32,
    },
    /// A pageblock's count differs from its number of set bits.
    #[error("I4: pageblock {block} counts {counted} free frames and has {set} bits")]
    Count {
        /// Its place in the buddy.
        block: PageblockId,
        /// Free frames by its entry.
        counted: u32,
        /// Set bits in its words.
        set: u32,
    },
    /// The buddy's count differs from the sum of its pageblocks' counts.
    #[error("I4: the buddy counts {counted} free frames, and its pageblocks {found}")]
    Sum {
        /// Free frames by its entry.
        counted: usize,
        /// The sum of the counts.
        found: usize,
    },
    /// A pageblock is missing from the index, or is in the wrong place there.
    #[error("I5: pageblock {block} with {free} free frames is not filed under its class")]
    Unfiled {
        /// Its place in the buddy.
        block: PageblockId,
        /// Free frames by its entry.
        free: u32,
    },
    /// An absent frame is free.
    #[error("I6: {pfn} does not exist or is reserved, and is free")]
    AbsentFree {
        /// The frame.
        pfn: Pfn,
    },
    /// The number of absent frames differs from the number of their bits.
    #[error("I6: the buddy counts {counted} frames that do not exist or are reserved, and {found} have the bit")]
    Absent {
        /// The number that the buddy counts.
        counted: u32,
        /// The number of set bits.
        found: u32,
    },
    /// A frame of another buddy is on a list.
    #[error("L1: a list holds {pfn}, which is not of its buddy")]
    OtherZones {
        /// The frame.
        pfn: Pfn,
    },
    /// A frame is on two lists, or twice on one.
    #[error("L1: {pfn} is on lists twice")]
    ListedTwice {
        /// The frame.
        pfn: Pfn,
    },
    /// A frame is on a list and free in the buddy.
    #[error("L1: {pfn} is on a list and free in the buddy")]
    ListedFree {
        /// The frame.
        pfn: Pfn,
    },
    /// A frame that the lists handed out is free in the buddy.
    #[error("L3: {pfn} is handed out by the lists and free in the buddy")]
    OutFree {
        /// The frame.
        pfn: Pfn,
    },
    /// A frame's state contradicts the place where it was found.
    #[error("{pfn} is {state:?} and in {places} free places")]
    State {
        /// The frame.
        pfn: Pfn,
        /// Its state.
        state: FrameState,
        /// How often it was found in the buddy and on lists.
        places: usize,
    },
    /// A frame in a block that is handed out has a state that says otherwise.
    #[error("{pfn} of a block that is handed out is {state:?} and in {places} free places")]
    OfBlock {
        /// The frame.
        pfn: Pfn,
        /// Its state.
        state: FrameState,
        /// How often it was found in the buddy and on lists.
        places: usize,
    },
    /// The statistics count more or fewer pages as handed out than there are.
    #[error("C3.13: the statistics count {counted} pages as handed out, and {found} are")]
    Out {
        /// The number that the statistics count.
        counted: i64,
        /// The number of frames that are neither free nor on a list.
        found: usize,
    },
    /// There are more or fewer frames than the zone has.
    #[error("C10.2: {found} frames were found, and the zone manages {managed}")]
    Managed {
        /// The number of frames found.
        found: usize,
        /// The number of frames that the zone has.
        managed: usize,
    },
}

/// The sentence, as `Display`, for a `main` that returns this error.
impl core::fmt::Debug for Misfit {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        core::fmt::Display::fmt(self, f)
    }
}

/// Free blocks by order, each counted once with the largest order it merges to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BuddyInfo {
    blocks: [usize; Order::MAX.get() as usize + 1],
}

impl BuddyInfo {
    /// The number of free blocks of this order.
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
    /// Whether this frame is free in the buddy.
    pub fn is_free(&self, pfn: Pfn) -> bool {
        let is_whole = Entry(self.area(self.block_of(pfn)).load(Acquire)).is_whole();
        !is_whole && self.bits[self.word_of(pfn).as_usize()].load(Acquire) >> (pfn.as_u32() % 64) & 1 == 1
    }

    /// Checks I3 to I6. No other thread may use the buddy meanwhile.
    ///
    /// # Errors
    /// The first [`Misfit`]. A buddy at rest has none.
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
        self.validate_absent()?;
        let (counted, found) = (self.free_frames(), census.free);
        if counted == found { Ok(census) } else { Err(Misfit::Sum { counted, found }) }
    }

    fn validate_absent(&self) -> Result<(), Misfit> {
        let mut found = 0;
        for ((absent, bits), word) in self.absent.iter().zip(self.bits).zip(0..) {
            let absent = absent.load(Acquire);
            let free = absent & bits.load(Acquire);
            if free != 0 {
                return Err(Misfit::AbsentFree {
                    pfn: self.first_of_word(WordId::new(word)).offset(free.trailing_zeros()),
                });
            }
            found += absent.count_ones();
        }
        let counted = self.absent_frames.load(Acquire);
        if counted == found { Ok(()) } else { Err(Misfit::Absent { counted, found }) }
    }

    /// Counts everything again from the bits. A forked child needs this: the other threads of its parent stopped for ever, perhaps in
    /// the middle of an operation. `listed` are the frames on lists; they are free from now on. Frames that another thread had in hand
    /// stay handed out. A block of order 9 or more that was being taken or freed, and is not whole, becomes free, and so does a
    /// pageblock on its way to the system. Only pageblocks that [were used](Self::noting_use) are examined; `looked_at` is called with
    /// the first frame and the number of frames of each. No other thread may use the buddy meanwhile.
    ///
    /// The memory of a child is a copy of one moment: it contains each thread's writes up to some point, and none after it. So a set bit
    /// means a free frame in the child too (I1, I2), and a frame on a list is in no other place, or on its way to the bits.
    pub fn recover(&self, listed: impl IntoIterator<Item = Pfn>, mut looked_at: impl FnMut(Pfn, usize)) {
        for pfn in listed {
            self.set_bits(self.word_of(pfn), 1 << (pfn.as_u32() % 64));
        }
        let (mut free, mut tails) = (0, 0);
        for (block, area) in self.blocks().zip(self.areas) {
            let (entry, frames) = (Entry(area.load(Acquire)), self.frames_of(block));
            if tails == 0 && !self.was_used(block) {
                free += entry.free() as usize;
                continue;
            }
            let is_kept = tails > 0 || self.is_complete(block, entry, &mut tails);
            tails -= usize::from(tails > 0);
            if entry.is_whole() {
                // I3: all bits of a whole one are set. If it was being split at the fork, some bits were not yet set, or already cleared.
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

    /// Whether this is the first pageblock of a block that is handed out, and the others are marked as its parts. Sets `tails` to the
    /// number of pageblocks, or to 0.
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

    /// Files a pageblock under `class`, and under no other class.
    fn file_anew(&self, block: PageblockId, class: Option<Class>) {
        for other in Class::all().filter(|&other| Some(other) != class && self.index.contains(other, block)) {
            self.index.remove(other, block);
        }
        if let Some(class) = class {
            self.index.insert(class, block);
        }
    }

    /// Counts the free blocks by order, merged as far as possible. The counts are exact if the buddy is at rest.
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
