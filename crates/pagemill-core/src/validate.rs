//! Walks a zone at rest and proves its invariants; shows what is free by order, as `/proc/buddyinfo` does.
use crate::area::{BLOCK_WORDS, Entry, aligned_runs, run_mask};
use crate::index::Class;
use crate::sync::Ordering::{Acquire, Relaxed};
use crate::{Order, PAGEBLOCK_FRAMES, Pfn, Zone};
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
    /// One line in the shape of `/proc/buddyinfo`, with the orders up to 1 GiB.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Node 0, zone   Normal")?;
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

    /// Puts the counts right where other threads stopped for ever in the middle of an operation: in the child after
    /// a fork. `is_free` says of every frame whether nobody owns it. Nobody may use the zone meanwhile.
    pub fn recover(&self, mut is_free: impl FnMut(Pfn) -> bool) {
        let mut free = 0;
        for (block, area) in self.areas.iter().enumerate() {
            let entry = Entry(area.load(Acquire));
            if entry.is_whole() {
                continue;
            }
            let mut count = 0;
            for (i, word) in self.words_of(block).iter().enumerate() {
                let first = self.first_of_word(block * BLOCK_WORDS + i);
                let in_word = self.frames_of(block).saturating_sub(i as u32 * 64).min(64);
                let bits = (0..in_word).filter(|&bit| is_free(first.offset(bit))).fold(0, |bits, bit| bits | 1 << bit);
                word.store(bits, Relaxed);
                count += bits.count_ones();
            }
            let next = entry.with_free(count).with_bound(false);
            area.store(next.0, Relaxed);
            free += count as usize;
            for class in Class::all() {
                if Class::of(next, self.frames_of(block)) == Some(class) {
                    self.index.insert(class, block);
                } else {
                    self.index.remove(class, block);
                }
            }
        }
        self.reset_after_fork(free);
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
                if !block.is_multiple_of(span) || !(block..block + span).all(is_unused) {
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
