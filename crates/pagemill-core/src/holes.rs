//! Buddies with holes: frames that do not exist, or that are reserved.
//!
//! Such a frame is *absent*: its bit is clear, as if it were handed out, so no request finds it, and no block merges over it. A second
//! bit a frame, in words that the caller lends too, tells absent frames from those that are handed out, so that freeing one is
//! refused. A buddy without holes has no such words, and pays one comparison for each word of frames that is freed.
//!
//! A pageblock with an absent frame never becomes whole. It serves unmovable pages, as such pages spoil pageblocks for large blocks,
//! and this one is spoilt already. Requests of another mobility take from it by [`steal`](Buddy::steal) alone.
//!
//! # Invariants
//! - I6 An absent frame is not free. The number of absent frames is that of the bits.
use crate::area::{Entry, low_bits};
use crate::map::{FrameRange, MapError, MemoryMap};
use crate::sync::Ordering::{AcqRel, Relaxed, Release};
use crate::sync::{AtomicU32, AtomicU64};
use crate::{Buddy, BuddyMetadata, Invalid, PAGEBLOCK_FRAMES, Pfn, WordId};

impl<'m> Buddy<'m> {
    /// A buddy of the frames of `span` that are usable in the map. `span` may begin anywhere. The metadata must be zero.
    ///
    /// ```
    /// # use pagemill_core::{Buddy, BuddyMetadata, FrameRange, MemoryMap, MemoryRange, MisuseKind, Mobility, Order, Pfn};
    /// # use pagemill_core::atomic::{AtomicU32, AtomicU64};
    /// let table = [MemoryRange::usable(0, 8 << 20), MemoryRange::reserved(3 << 20, 4096)];
    /// let mut storage = [FrameRange::EMPTY; 3];
    /// let map = MemoryMap::new(table.into_iter(), &mut storage)?;
    /// let span = map.spans(u32::MAX).next().unwrap();
    /// let need = BuddyMetadata::for_span(span);
    /// # let words: Vec<AtomicU64> = (0..need.words).map(|_| AtomicU64::new(0)).collect();
    /// # let areas: Vec<AtomicU32> = (0..need.areas).map(|_| AtomicU32::new(0)).collect();
    /// let buddy = Buddy::over(span, &map, &words, &areas).unwrap();
    /// assert_eq!((buddy.managed_frames(), buddy.free_frames()), (2047, 2047));
    /// assert_eq!(buddy.buddy_info().free_blocks(Order::PAGEBLOCK), 1); // of 4: one has the hole, and two are a 4 MiB block
    /// assert_eq!(buddy.free_block(Pfn::new(0x300), Order::ZERO), Err(MisuseKind::Foreign));
    /// # Ok::<(), pagemill_core::MapError>(())
    /// ```
    ///
    /// # Errors
    /// [`Invalid::Metadata`] for an empty span, or where `words` or `areas` are fewer than [`BuddyMetadata::for_span`] says.
    pub fn over(
        span: FrameRange,
        map: &MemoryMap<'_>,
        words: &'m [AtomicU64],
        areas: &'m [AtomicU32],
    ) -> Result<Self, Invalid> {
        let (start, frames) = span.widened();
        let need = BuddyMetadata::for_span(span);
        if words.len() < need.words {
            return Err(Self::too_little_metadata(frames, words));
        }
        let (words, absent) = words.split_at(BuddyMetadata::for_frames(frames).words);
        let mut buddy = Self::laid_out(start, frames, words, areas)?;
        buddy.absent = &absent[..(frames as usize).div_ceil(64)];
        let all = (0..frames).step_by(64).map(|before| low_bits(frames - before));
        buddy.absent.iter().zip(all).for_each(|(word, bits)| word.store(bits, Relaxed));
        buddy.absent_frames = AtomicU32::new(frames);
        for block in buddy.blocks() {
            buddy.words_of(block).iter().for_each(|word| word.store(0, Relaxed));
            // Release as in `new`.
            buddy.area(block).store(Entry::in_use(0, crate::Mobility::Unmovable).0, Release);
        }
        // Of a pageblock that two spans share, each buddy has the frames of its own span.
        map.ranges().iter().for_each(|range| buddy.put_in(range.overlap(span)));
        Ok(buddy)
    }

    /// Adds absent frames, which are free from now on: memory that was plugged in, or an initrd that is not needed any more.
    ///
    /// ```
    /// # use pagemill_core::{Buddy, BuddyMetadata, FrameRange, MapError, MemoryMap, MemoryRange, Pfn};
    /// # use pagemill_core::atomic::{AtomicU32, AtomicU64};
    /// # let (mut storage, need) = ([FrameRange::EMPTY; 1], BuddyMetadata::for_span(FrameRange::new(Pfn::new(0), 512)?));
    /// # let words: Vec<AtomicU64> = (0..need.words).map(|_| AtomicU64::new(0)).collect();
    /// # let areas: Vec<AtomicU32> = (0..need.areas).map(|_| AtomicU32::new(0)).collect();
    /// # let map = MemoryMap::new([MemoryRange::usable(0, 2 << 20)].into_iter(), &mut storage)?;
    /// let buddy = Buddy::over(map.ranges()[0], &map, &words, &areas).unwrap();
    /// let initrd = FrameRange::covering(0x4_0000, 0x1_2345)?;
    /// assert_eq!(buddy.reserve_range(initrd)?, 19);
    /// assert_eq!(buddy.managed_frames(), 512 - 19);
    /// buddy.add_range(initrd)?;
    /// assert_eq!((buddy.managed_frames(), buddy.free_frames()), (512, 512));
    /// # Ok::<(), MapError>(())
    /// ```
    ///
    /// # Errors
    /// [`MapError::Present`] if one of them is not absent, [`MapError::Outside`], [`MapError::NoHoles`].
    pub fn add_range(&self, range: FrameRange) -> Result<(), MapError> {
        self.change(range, || {
            let present = self.masks_of(range).find_map(|(word, mask)| {
                let present = mask & !self.absent_in(word);
                (present != 0).then(|| self.first_of_word(word).offset(present.trailing_zeros()))
            });
            match present {
                Some(pfn) => Err(MapError::Present { pfn }),
                None => {
                    self.put_in(range);
                    Ok(())
                }
            }
        })
    }

    /// Takes free frames out of the buddy: for the kernel's image, its metadata, memory that turned out to be broken. They are absent
    /// from now on, and do not count as managed. Frames of the range that are absent already stay so. Returns how many were not. It
    /// waits for other calls of this function and of [`add_range`](Self::add_range), so an interrupt may not call it.
    ///
    /// # Errors
    /// [`MapError::HandedOut`] if one of them is neither free nor absent, or is just being taken; [`MapError::Outside`],
    /// [`MapError::NoHoles`].
    pub fn reserve_range(&self, range: FrameRange) -> Result<u32, MapError> {
        self.change(range, || {
            let mut taken = 0;
            for part in by_pageblock(range) {
                match self.take_exactly(part) {
                    Ok(frames) => taken += frames,
                    Err(pfn) => {
                        let before = FrameRange::new(range.first(), part.first().since(range.first()))?;
                        by_pageblock(before).for_each(|part| _ = self.free_present(part));
                        return Err(MapError::HandedOut { pfn });
                    }
                }
            }
            self.masks_of(range).for_each(|(word, mask)| _ = self.absent[word.as_usize()].fetch_or(mask, Relaxed));
            self.absent_frames.fetch_add(taken, Relaxed);
            self.free.fetch_sub(taken as usize, Relaxed);
            Ok(taken)
        })
    }

    /// Runs a change of this range, one at a time.
    fn change<T>(&self, range: FrameRange, change: impl FnOnce() -> Result<T, MapError>) -> Result<T, MapError> {
        let span = FrameRange::new(self.start(), self.spanned_frames())?;
        if range.overlap(span) != range {
            return Err(MapError::Outside { first: range.first(), frames: range.frames() });
        }
        if self.absent.is_empty() {
            return Err(MapError::NoHoles);
        }
        self.large.take(self.sleep);
        let changed = change();
        self.large.release(self.sleep);
        changed
    }

    /// Makes absent frames present and free.
    fn put_in(&self, range: FrameRange) {
        // Before they are free, so that no thread finds a frame that is both. Who frees one in between is the one who frees it.
        self.masks_of(range).for_each(|(word, mask)| _ = self.absent[word.as_usize()].fetch_and(!mask, Relaxed));
        self.absent_frames.fetch_sub(range.frames(), Relaxed);
        let freed: u32 = by_pageblock(range).map(|part| self.free_present(part)).sum();
        self.add_free(freed as usize);
    }

    /// Sets the bits of those frames of one pageblock that are not absent, and raises its count. Returns how many were clear.
    fn free_present(&self, part: FrameRange) -> u32 {
        let block = self.block_of(part.first());
        self.note_use(block);
        let set = |(word, mask)| (mask & !self.set_bits(word, mask)).count_ones();
        let freed = self.masks_of(part).map(set).sum();
        if freed > 0 {
            self.raise(block, freed);
        }
        freed
    }

    /// Takes those frames of one pageblock that are not absent, all of them, and returns how many: or takes none, and returns one that is
    /// not free. They are not yet counted as taken.
    fn take_exactly(&self, part: FrameRange) -> Result<u32, Pfn> {
        let block = self.block_of(part.first());
        let present = |(word, mask)| (word, mask & !self.absent_in(word));
        let wanted = self.masks_of(part).map(|place| present(place).1.count_ones()).sum();
        if wanted > 0 && self.reserve(block, wanted, wanted, None) == 0 {
            let clear = |(word, mask): (WordId, u64)| {
                let clear = mask & !self.bits[word.as_usize()].load(Relaxed);
                (clear != 0).then(|| self.first_of_word(word).offset(clear.trailing_zeros()))
            };
            // If no bit is clear, the pageblock is handed out whole, or all its free frames are promised to others.
            return Err(self.masks_of(part).map(present).find_map(clear).unwrap_or(part.first()));
        }
        for (word, mask) in self.masks_of(part).map(present) {
            // AcqRel as in `take_from`.
            let taken = self.bits[word.as_usize()]
                .fetch_update(AcqRel, Relaxed, |bits| (bits & mask == mask).then_some(bits & !mask));
            if let Err(bits) = taken {
                let before = self.masks_of(part).map(present).take_while(|&(other, _)| other != word);
                before.for_each(|(word, mask)| _ = self.set_bits(word, mask));
                self.raise(block, wanted);
                return Err(self.first_of_word(word).offset((mask & !bits).trailing_zeros()));
            }
        }
        Ok(wanted)
    }

    /// The words that have frames of this range, which is within the span, and the bits of those frames.
    fn masks_of(&self, range: FrameRange) -> impl Iterator<Item = (WordId, u64)> + use<> {
        let from = range.first().since(self.start());
        let to = from + range.frames();
        let words = if range.is_empty() { 0..0 } else { from / 64..to.div_ceil(64) };
        words.map(move |word| {
            let (first, end) = (from.saturating_sub(word * 64), to - word * 64);
            (WordId::new(word), low_bits(end) & !low_bits(first))
        })
    }
}

/// The parts of a range that lie in one pageblock each.
fn by_pageblock(range: FrameRange) -> impl Iterator<Item = FrameRange> {
    let blocks = range.first().as_u32() / PAGEBLOCK_FRAMES..range.end().as_u32().div_ceil(PAGEBLOCK_FRAMES);
    let whole = |block: u32| FrameRange::new(Pfn::new(block * PAGEBLOCK_FRAMES), PAGEBLOCK_FRAMES).ok();
    blocks.filter_map(whole).map(move |block| block.overlap(range)).filter(|part| !part.is_empty())
}
