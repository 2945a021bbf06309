//! The memory map: from the table that a machine's firmware hands over to the frames that a kernel may use.
//!
//! A table (e820, UEFI, PVH, a device tree) lists ranges of physical addresses, each usable or reserved, in any order. Ranges may
//! overlap, begin and end inside a page, be empty, or contradict each other. What a table cannot say is an error.
//!
//! # Invariants
//! - M1 The ranges of a [`MemoryMap`] have at least one frame, ascend, and leave at least one frame between each other.
//! - M2 All bytes of these frames are in usable ranges of the table, and none is in a reserved one.
use crate::{PAGE_SHIFT, PAGE_SIZE, PAGEBLOCK_FRAMES, PageCount, Pfn};

/// A range of physical addresses, as a table lists it.
///
/// ```
/// use pagemill_core::MemoryRange;
/// // An entry of an e820 table has a start, a length and a type; type 1 is usable memory.
/// let of_e820 = |start, bytes, kind| MemoryRange { start, bytes, is_usable: kind == 1 };
/// assert_eq!(of_e820(0x10_0000, 0x1000, 1), MemoryRange::usable(0x10_0000, 0x1000));
/// assert_eq!(of_e820(0x9_fc00, 0x400, 2), MemoryRange::reserved(0x9_fc00, 0x400));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryRange {
    /// The address of its first byte.
    pub start: u64,
    /// Its length in bytes.
    pub bytes: u64,
    /// Whether it is usable memory. Where ranges overlap, reserved wins.
    pub is_usable: bool,
}

impl MemoryRange {
    /// Usable memory.
    pub const fn usable(start: u64, bytes: u64) -> Self {
        Self { start, bytes, is_usable: true }
    }
    /// Reserved: of the firmware, a device, the kernel's image, an initrd.
    pub const fn reserved(start: u64, bytes: u64) -> Self {
        Self { start, bytes, is_usable: false }
    }
    /// The address of its last byte; none if it is empty.
    fn last(self) -> Result<Option<u64>, MapError> {
        let Self { start, bytes, .. } = self;
        let Some(more) = bytes.checked_sub(1) else { return Ok(None) };
        start.checked_add(more).map(Some).ok_or(MapError::PastTheEnd { start, bytes })
    }
}

/// Neighbouring frames.
///
/// ```
/// use pagemill_core::{FrameRange, Pfn};
/// let image = FrameRange::covering(0x10_0800, 0x1000)?; // a byte range that touches two frames
/// assert_eq!((image.first(), image.frames()), (Pfn::new(0x100), 2));
/// assert!(FrameRange::new(Pfn::new(0xffff_ffff), 1).is_err()); // beyond FrameRange::MOST
/// # Ok::<(), pagemill_core::MapError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameRange {
    first: u32,
    frames: u32,
}

impl FrameRange {
    /// No frame: what storage for a map is made of.
    pub const EMPTY: Self = Self { first: 0, frames: 0 };
    /// Frames have numbers below this one: all whole pageblocks that 32 bits count, just below 16 TiB.
    pub const MOST: u32 = u32::MAX / PAGEBLOCK_FRAMES * PAGEBLOCK_FRAMES;

    /// `frames` frames from `first` on.
    ///
    /// # Errors
    /// [`MapError::TooHigh`] if they do not end below [`MOST`](Self::MOST).
    pub const fn new(first: Pfn, frames: u32) -> Result<Self, MapError> {
        let first = first.as_u32();
        match first.checked_add(frames) {
            Some(end) if end <= Self::MOST => Ok(if frames == 0 { Self::EMPTY } else { Self { first, frames } }),
            _ => Err(Self::too_high(first as u64)),
        }
    }

    /// The refusal of a range that begins with this frame.
    const fn too_high(first: u64) -> MapError {
        let most = Self::MOST as u64;
        MapError::TooHigh { start: (if first > most { first } else { most }) << PAGE_SHIFT }
    }

    /// All frames that these bytes touch: what is to be reserved.
    ///
    /// # Errors
    /// [`MapError::PastTheEnd`] and [`MapError::TooHigh`].
    pub fn covering(start: u64, bytes: u64) -> Result<Self, MapError> {
        let Some(last) = MemoryRange::usable(start, bytes).last()? else { return Ok(Self::EMPTY) };
        Self::from_numbers(start >> PAGE_SHIFT, (last >> PAGE_SHIFT) + 1)
    }

    /// The frames that lie whole between these two addresses, both included.
    fn between(first: u64, last: u64) -> Result<Self, MapError> {
        const IN_PAGE: u64 = PAGE_SIZE as u64 - 1;
        let is_whole = last & IN_PAGE == IN_PAGE;
        Self::from_numbers(first.div_ceil(PAGE_SIZE as u64), (last >> PAGE_SHIFT) + u64::from(is_whole))
    }

    fn from_numbers(first: u64, end: u64) -> Result<Self, MapError> {
        if first >= end {
            return Ok(Self::EMPTY);
        }
        if end > u64::from(Self::MOST) {
            return Err(Self::too_high(first));
        }
        Ok(Self { first: first as u32, frames: (end - first) as u32 })
    }

    /// The first frame.
    pub const fn first(self) -> Pfn {
        Pfn::new(self.first)
    }
    /// How many frames there are.
    pub const fn frames(self) -> u32 {
        self.frames
    }
    /// The frame behind the last one.
    pub const fn end(self) -> Pfn {
        Pfn::new(self.first + self.frames)
    }
    /// Are there none?
    pub const fn is_empty(self) -> bool {
        self.frames == 0
    }
    /// The physical address of the first frame.
    pub const fn address(self) -> u64 {
        (self.first as u64) << PAGE_SHIFT
    }
    /// The same, widened to begin with a pageblock: the first frame, and how many there are.
    pub(crate) const fn widened(self) -> (Pfn, u32) {
        let before = self.first % PAGEBLOCK_FRAMES;
        let frames = if self.is_empty() { 0 } else { self.frames + before };
        (Pfn::new(self.first - before), frames)
    }
    /// The frames that are in both ranges.
    ///
    /// ```
    /// # use pagemill_core::{FrameRange, Pfn};
    /// let range = |first, frames| FrameRange::new(Pfn::new(first), frames);
    /// assert_eq!(range(0, 10)?.overlap(range(8, 10)?), range(8, 2)?);
    /// assert!(range(0, 8)?.overlap(range(8, 10)?).is_empty());
    /// # Ok::<(), pagemill_core::MapError>(())
    /// ```
    #[must_use]
    pub fn overlap(self, other: Self) -> Self {
        let (first, end) = (self.first.max(other.first), self.end().min(other.end()).as_u32());
        if first < end { Self { first, frames: end - first } } else { Self::EMPTY }
    }
}

/// Why a memory map, or a change to the frames of a buddy, is refused. Nothing was changed.
///
/// ```
/// use pagemill_core::{MapError, MemoryMap, MemoryRange};
/// let refused = MemoryMap::new([MemoryRange::usable(u64::MAX, 2)].into_iter(), &mut []).unwrap_err();
/// assert_eq!(refused, MapError::PastTheEnd { start: u64::MAX, bytes: 2 });
/// assert!(refused.to_string().contains("past the end of the address space"));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MapError {
    /// A range reaches past the last address of 64 bits.
    #[error(
        "{bytes:#x} bytes at {start:#x} reach past the end of the address space: the table is wrong; leave the entry out"
    )]
    PastTheEnd {
        /// The address of the first byte.
        start: u64,
        /// The length in bytes.
        bytes: u64,
    },
    /// Frames beyond [`FrameRange::MOST`].
    #[error("the frame at {start:#x} has no number: they end just below 16 TiB; cut the range off there")]
    TooHigh {
        /// The address of the first such frame.
        start: u64,
    },
    /// The table has more usable ranges than the storage.
    #[error("the table has more than {most} usable ranges; lend storage for more")]
    Storage {
        /// How many the storage has room for.
        most: usize,
    },
    /// The buddy was made by [`Buddy::new`](crate::Buddy::new), and has no words for holes.
    #[error("this buddy has no words for holes; make it by `Buddy::over`")]
    NoHoles,
    /// The range is not within the buddy's span.
    #[error("{first} and the frames behind it, {frames} in all, are not all within the buddy's span")]
    Outside {
        /// The first frame.
        first: Pfn,
        /// How many frames there are.
        frames: u32,
    },
    /// A frame that is to be reserved is not free.
    #[error("{pfn} is handed out or on a CPU's list: drain the lists, free it, or reserve the range earlier")]
    HandedOut {
        /// The first such frame of its pageblock.
        pfn: Pfn,
    },
    /// A frame that is to be added is there.
    #[error("{pfn} belongs to the buddy already")]
    Present {
        /// The first such frame.
        pfn: Pfn,
    },
}

/// The usable frames of a machine. The [crate's root](crate) has an example with the table of a real one.
#[derive(Debug)]
pub struct MemoryMap<'m> {
    ranges: &'m mut [FrameRange],
}

impl<'m> MemoryMap<'m> {
    /// The usable frames of a table. `storage` gets one range for each piece of usable memory; a table of n entries has n pieces at
    /// most, and one more for each reserved entry that cuts a usable one in two. A frame that is usable in part is not used. Of the frames
    /// of a reserved range, and of one that overlaps usable memory, none is used. To keep the kernel's image or an initrd, chain
    /// reserved ranges to the table. The time grows with the square of the number of entries.
    ///
    /// ```
    /// use pagemill_core::{FrameRange, MemoryMap, MemoryRange, Pfn};
    /// let table = [MemoryRange::usable(0x800, 0x7_7fff), MemoryRange::reserved(0x2_0001, 1), MemoryRange::usable(0, 0x1000)];
    /// let mut storage = [FrameRange::EMPTY; 4];
    /// let map = MemoryMap::new(table.into_iter(), &mut storage)?;
    /// // Frame 0x20 has a reserved byte, and of frame 0x78 only a part is usable.
    /// assert_eq!(map.ranges(), [FrameRange::new(Pfn::new(0), 0x20)?, FrameRange::new(Pfn::new(0x21), 0x57)?]);
    /// assert_eq!(map.frames(), 0x77);
    /// # Ok::<(), pagemill_core::MapError>(())
    /// ```
    ///
    /// # Errors
    /// [`MapError::PastTheEnd`] for any entry, [`MapError::TooHigh`] for usable memory, [`MapError::Storage`].
    pub fn new(
        table: impl Iterator<Item = MemoryRange> + Clone,
        storage: &'m mut [FrameRange],
    ) -> Result<Self, MapError> {
        table.clone().try_for_each(|range| range.last().map(|_| ()))?;
        let (most, mut n, mut from) = (storage.len(), 0, Some(0));
        while let Some((first, last)) = from.and_then(|from| next_usable(&table, from)) {
            let frames = FrameRange::between(first, last)?;
            if !frames.is_empty() {
                *storage.get_mut(n).ok_or(MapError::Storage { most })? = frames;
                n += 1;
            }
            from = last.checked_add(1);
        }
        Ok(Self { ranges: &mut storage[..n] })
    }

    /// The usable frames, in ascending order (M1).
    pub fn ranges(&self) -> &[FrameRange] {
        self.ranges
    }
    /// How many frames are usable. Frames of all ranges together have numbers of 32 bits, and so has their count.
    pub fn frames(&self) -> u32 {
        self.ranges.iter().map(|range| range.frames).sum()
    }

    /// The spans of address space that have usable frames, with no hole of more than `hole_most` frames inside. Each may become a
    /// buddy of its own: a frame of a hole costs two bits of metadata as any other.
    ///
    /// ```
    /// # use pagemill_core::{FrameRange, MemoryMap, MemoryRange, Pfn};
    /// let table = [(0, 1), (2, 1), (9, 1)].map(|(mib, mibs)| MemoryRange::usable(mib << 20, mibs << 20));
    /// let mut storage = [FrameRange::EMPTY; 3];
    /// let map = MemoryMap::new(table.into_iter(), &mut storage)?;
    /// let spans = [FrameRange::new(Pfn::new(0), 3 << 8)?, FrameRange::new(Pfn::new(9 << 8), 1 << 8)?];
    /// assert!(map.spans(512).eq(spans));
    /// # Ok::<(), pagemill_core::MapError>(())
    /// ```
    pub fn spans(&self, hole_most: u32) -> impl Iterator<Item = FrameRange> {
        let groups = self.ranges.chunk_by(move |one, next| next.first().since(one.end()) <= hole_most);
        groups.map(|group| {
            let (first, end) = (group[0].first, group[group.len() - 1].end());
            FrameRange { first, frames: end.as_u32() - first }
        })
    }

    /// Takes `pages` frames out of the map, for metadata: the last ones of the largest range. None if no range has so many.
    ///
    /// ```
    /// # use pagemill_core::{BuddyMetadata, FrameRange, MemoryMap, MemoryRange, Pfn};
    /// let mut storage = [FrameRange::EMPTY; 1];
    /// let mut map = MemoryMap::new([MemoryRange::usable(0, 1 << 30)].into_iter(), &mut storage)?;
    /// let span = map.ranges()[0];
    /// let metadata = map.carve(BuddyMetadata::for_span(span).pages()).unwrap();
    /// assert_eq!((metadata.end(), map.frames() + metadata.frames()), (span.end(), 1 << 18));
    /// # Ok::<(), pagemill_core::MapError>(())
    /// ```
    pub fn carve(&mut self, pages: PageCount) -> Option<FrameRange> {
        let frames = u32::try_from(pages.get()).ok()?;
        let (at, range) = self.ranges.iter_mut().enumerate().max_by_key(|(_, range)| range.frames)?;
        range.frames = range.frames.checked_sub(frames)?;
        let carved = FrameRange::new(range.end(), frames).ok()?;
        if range.is_empty() {
            // M1: it goes behind the others, and out of the map.
            let ranges = core::mem::take(&mut self.ranges);
            ranges[at..].rotate_left(1);
            let most = ranges.len() - 1;
            self.ranges = &mut ranges[..most];
        }
        Some(carved)
    }
}

/// The first piece of usable memory at or behind `from`, by its first and its last address.
fn next_usable(table: &(impl Iterator<Item = MemoryRange> + Clone), from: u64) -> Option<(u64, u64)> {
    let of_kind = |is_usable| {
        let ranges = table.clone().filter(move |range| range.is_usable == is_usable);
        ranges.filter_map(|range| Some((range.start, range.last().ok()??)))
    };
    let mut first = from;
    loop {
        first = of_kind(true).filter(|&(_, last)| last >= first).map(|(start, _)| start.max(first)).min()?;
        // Behind the reserved ranges that it lies in.
        match of_kind(false).filter(|&(start, last)| (start..=last).contains(&first)).map(|(_, last)| last).max() {
            Some(last) => first = last.checked_add(1)?,
            None => break,
        }
    }
    // Ranges that overlap or touch are one piece. The last address of all touches nothing.
    let end_of_piece = of_kind(false).map(|(start, _)| start).filter(|&start| start > first).min();
    let end_of_piece = end_of_piece.map_or(u64::MAX, |start| start - 1);
    let mut last = first;
    while last < end_of_piece
        && let Some(further) = of_kind(true)
            .filter(|&(start, end)| end > last && start <= last.saturating_add(1))
            .map(|(_, end)| end)
            .max()
    {
        last = further;
    }
    Some((first, last.min(end_of_piece)))
}
