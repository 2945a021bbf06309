//! Walks a zone at rest and proves its invariants; shows what is free by order, as `/proc/buddyinfo` does.
use crate::area::{BLOCK_WORDS, Entry, aligned_runs, run_mask};
use crate::index::Class;
use crate::sync::Ordering::{Acquire, Relaxed};
use crate::{FrameState, Mobility, Order, PAGEBLOCK_FRAMES, Pfn, Zone};
use core::fmt;

/// The zone's side of C10.2.
///
/// ```
/// # use pagemill_core::{Pfn, Zone, ZoneMetadata, atomic::{AtomicU32, AtomicU64}};
/// # let need = ZoneMetadata::for_frames(600);
/// # let bits: Vec<AtomicU64> = (0..need.words).map(|_| AtomicU64::new(0)).collect();
/// # let areas: Vec<AtomicU32> = (0..need.areas).map(|_| AtomicU32::new(0)).collect();
/// let zone = Zone::new(Pfn::new(0), 600, &bits, &areas).unwrap();
/// let census = zone.validate();
/// assert_eq!((census.free, census.whole), (600, 0));
/// assert_eq!(zone.buddy_info().free_blocks(pagemill_core::Order::PAGEBLOCK), 1);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ZoneCensus {
    /// Free frames.
    pub free: usize,
    /// Frames in blocks of order 9 and up that are handed out.
    pub whole: usize,
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

impl Zone<'_> {
    /// Is this frame in the free areas?
    pub fn is_free(&self, pfn: Pfn) -> bool {
        let is_whole = Entry(self.areas[self.block_of(pfn)].load(Acquire)).is_whole();
        !is_whole && self.bits[self.word_of(pfn)].load(Acquire) >> (pfn.as_u32() % 64) & 1 == 1
    }

    /// Proves I3, I4 and I5. Nobody may use the zone meanwhile.
    ///
    /// # Panics
    /// Where an invariant is broken, with both values: it is a fault of Pagemill's own (C10.1).
    pub fn validate(&self) -> ZoneCensus {
        let mut census = ZoneCensus::default();
        for (block, area) in self.areas.iter().enumerate() {
            let (entry, frames) = (Entry(area.load(Acquire)), self.frames_of(block));
            let set: u32 = self.words_of(block).iter().map(|word| word.load(Acquire).count_ones()).sum();
            if entry.is_whole() {
                assert!(
                    entry.free() == 0 && set == frames,
                    "I3: whole block {block} has count {} and {set} bits",
                    entry.free()
                );
                census.whole += frames as usize;
            } else {
                assert_eq!(
                    entry.free(),
                    set,
                    "I4: block {block} counts {} free frames and has {set} bits",
                    entry.free()
                );
                census.free += set as usize;
            }
            if let Some(class) = Class::of(entry, frames) {
                assert!(self.index.contains(class, block), "I5: block {block} is not filed under {class:?}");
            }
        }
        let counter = self.free_frames();
        assert_eq!(counter, census.free, "I4: the zone counts {counter} free frames and its blocks {}", census.free);
        census
    }

    /// Counts everything again from the states of the frames: in the child after a fork, where other threads stopped
    /// for ever in the middle of an operation, and where the parts of the metadata are copies of different moments, so
    /// that nothing else here can be believed. `states_of` says the states of that many frames from one on; it is asked
    /// once for each pageblock, in ascending order. Nobody may use the zone meanwhile.
    pub fn recover<'s>(&self, mut states_of: impl FnMut(Pfn, usize) -> &'s [FrameState]) {
        let (mut free, mut whole) = (0, None);
        for (block, area) in self.areas.iter().enumerate() {
            let (entry, frames) = (Entry(area.load(Acquire)), self.frames_of(block));
            let states = states_of(self.first_of_word(block * BLOCK_WORDS), frames as usize);
            let next = match (whole.take(), states.first().and_then(|first| first.order())) {
                (Some((order, more)), _) => {
                    whole = (more > 1).then_some((order, more - 1));
                    Entry::whole(order, false)
                }
                (None, Some(order)) if order >= Order::PAGEBLOCK => {
                    let more = order.frames() / PAGEBLOCK_FRAMES - 1;
                    whole = (more > 0).then_some((order.get(), more));
                    Entry::whole(order.get(), true)
                }
                (None, _) => {
                    let count = states.iter().filter(|state| state.is_free()).count() as u32;
                    let mobility = if entry.is_whole() { Mobility::Unmovable } else { entry.mobility() };
                    if count == frames { Entry::unused(count) } else { Entry::in_use(count, mobility) }
                }
            };
            for (i, word) in self.words_of(block).iter().enumerate() {
                let states = states.iter().skip(i * 64).take(64);
                // I3: a whole one has all bits set.
                let is_set = |state: &FrameState| next.is_whole() || state.is_free();
                let bits = states.zip(0..).fold(0, |bits, (state, bit)| bits | u64::from(is_set(state)) << bit);
                if word.load(Relaxed) != bits {
                    word.store(bits, Relaxed);
                }
            }
            if next != entry {
                area.store(next.0, Relaxed);
            }
            free += next.free() as usize;
            self.file_anew(block, Class::of(next, frames));
        }
        self.reset_after_fork(free);
    }

    /// Has a block stand under `class` alone.
    fn file_anew(&self, block: usize, class: Option<Class>) {
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
        let mut block = 0;
        while block < self.areas.len() {
            if Entry(self.areas[block].load(Relaxed)).free() != PAGEBLOCK_FRAMES {
                self.count_within(block, &mut info);
                block += 1;
                continue;
            }
            // The largest aligned group of unused pageblocks that begins here.
            let mut order = Order::PAGEBLOCK.get();
            while order < Order::MAX.get() {
                let span = 1usize << (order + 1 - Order::PAGEBLOCK.get());
                let is_unused = |block: usize| {
                    self.areas.get(block).is_some_and(|area| Entry(area.load(Relaxed)).free() == PAGEBLOCK_FRAMES)
                };
                if self.next_aligned(block, span) != block || !(block..block + span).all(is_unused) {
                    break;
                }
                order += 1;
            }
            info.blocks[usize::from(order)] += 1;
            block += 1 << (order - Order::PAGEBLOCK.get());
        }
        info
    }

    fn count_within(&self, block: usize, info: &mut BuddyInfo) {
        if Entry(self.areas[block].load(Relaxed)).is_whole() {
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
