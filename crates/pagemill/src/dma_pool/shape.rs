//! How a pool cuts its units into blocks: sizes, pages and offsets. Policy on numbers alone.
use crate::device::DeviceError;
use pagemill_core::{Order, PAGE_SHIFT, PAGE_SIZE};

/// The smallest size of a block (C6.2).
const SIZE_MIN: usize = 16;
/// A unit holds at least this many blocks, if that takes no more than a unit of [`UNIT_MAX`]: they share the unit's
/// entry in the pool's table. At 24 bytes an entry, that is 1.5 bytes a block.
const SHARERS: usize = 16;
const UNIT_MAX: usize = 16;

/// How blocks lie in a unit. A unit is what the pool grows by: a block of pages, or a [run](Self::is_of_runs).
#[derive(Debug)]
pub(super) struct Shape {
    /// The size of a block in bytes.
    pub(super) size: usize,
    /// Every block's address is a multiple of this.
    pub(super) align: usize,
    /// No block crosses a multiple of this power of two. In a run: of this offset, a whole number of pages.
    pub(super) boundary: usize,
    /// The number of blocks between two boundaries.
    in_piece: usize,
    /// The usual number of pages in a unit.
    pub(super) pages: usize,
    /// The number of pages in a unit if so many are not free.
    pub(super) pages_least: usize,
    /// log2 of the number of places in a unit: at least the number of blocks in the largest unit.
    pub(super) shift: u32,
    /// log2 of the grain: every block's offset in its unit is a multiple of it. At most a page.
    pub(super) grain: u32,
}

impl Shape {
    pub(super) fn new(size: usize, align: usize, boundary: usize, is_linear: bool) -> Result<Self, DeviceError> {
        let max = Order::MAX.bytes();
        let align = align.max(1);
        if !align.is_power_of_two() || align > max {
            return Err(DeviceError::Align { align, max });
        }
        if !(1..=max).contains(&size) {
            return Err(DeviceError::Size { size, max });
        }
        let size = size.max(SIZE_MIN).next_multiple_of(align);
        if size > max {
            return Err(DeviceError::Size { size, max });
        }
        if boundary != 0 && (!boundary.is_power_of_two() || boundary < size) {
            return Err(DeviceError::Boundary { boundary, size });
        }
        let needed = size.div_ceil(PAGE_SIZE);
        // A run is aligned to a page, and lies across any other boundary.
        let is_of_runs = is_linear && boundary == 0 && align <= PAGE_SIZE;
        let pages = if is_of_runs { needed } else { needed.next_power_of_two() };
        // A device may see each page at an unrelated address. Also, a block within one page is one entry in any list of
        // addresses.
        let boundary = match boundary {
            _ if size <= PAGE_SIZE => {
                if boundary == 0 {
                    PAGE_SIZE
                } else {
                    boundary.min(PAGE_SIZE)
                }
            }
            0 => pages * PAGE_SIZE,
            given => given,
        };
        if !is_linear && pages > 1 {
            return Err(DeviceError::Scattered { size });
        }
        let grain = size.trailing_zeros().min(boundary.trailing_zeros()).min(PAGE_SHIFT);
        let in_piece = boundary / size;
        let mut shape = Self { size, align, boundary, in_piece, pages, pages_least: pages, shift: 0, grain };
        if shape.is_of_runs() {
            shape.pages = (UNIT_MAX / pages).max(1) * pages;
        }
        while is_linear && !shape.is_of_runs() && shape.blocks(shape.pages) < SHARERS && shape.pages < UNIT_MAX {
            shape.pages *= 2;
        }
        shape.shift = shape.blocks(shape.pages).next_power_of_two().ilog2();
        Ok(shape)
    }

    /// Whether units are runs of pages, because no power of two fits the blocks.
    pub(super) fn is_of_runs(&self) -> bool {
        !self.pages_least.is_power_of_two()
    }

    /// The number of blocks in a unit of so many pages.
    pub(super) fn blocks(&self, pages: usize) -> usize {
        let bytes = pages * PAGE_SIZE;
        bytes / self.boundary * self.in_piece + bytes % self.boundary / self.size
    }

    /// The offset of the block with this place in its unit.
    pub(super) fn offset_of(&self, place: usize) -> usize {
        place / self.in_piece * self.boundary + place % self.in_piece * self.size
    }

    /// The place of the block that begins at this offset in a unit of so many pages; none if no block begins there.
    #[inline]
    pub(super) fn place_of(&self, offset: usize, pages: usize) -> Option<usize> {
        let (piece, in_piece) = if self.boundary.is_power_of_two() {
            (offset >> self.boundary.trailing_zeros(), offset & (self.boundary - 1))
        } else {
            (offset / self.boundary, offset % self.boundary)
        };
        // 32 bits, which the processor divides faster.
        let nth = (in_piece as u32 / self.size as u32) as usize;
        let is_block = nth * self.size == in_piece && nth < self.in_piece && offset + self.size <= pages * PAGE_SIZE;
        is_block.then(|| piece * self.in_piece + nth)
    }

    /// The device address of a unit must be a multiple of this, so that its blocks are aligned for the device and cross
    /// no boundary.
    pub(super) fn unit_align(&self, pages: usize) -> usize {
        self.align.max(if self.is_of_runs() { 1 } else { self.boundary.min(pages * PAGE_SIZE) })
    }
}

#[cfg(test)]
mod tests {
    use super::Shape;
    use pagemill_core::PAGE_SIZE;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn blocks_are_aligned_apart_and_cross_no_boundary(
            size in 1usize..70_000, align in 0u32..14, boundary in prop::option::of(4u32..20), is_linear: bool,
        ) {
            let (align, boundary) = (1usize << align, boundary.map_or(0, |log2| 1usize << log2));
            let Ok(shape) = Shape::new(size, align, boundary, is_linear) else {
                // It must have been refused for one of these reasons.
                let rounded = size.max(16).next_multiple_of(align);
                prop_assert!((boundary != 0 && boundary < rounded) || (!is_linear && rounded > 4096));
                return Ok(());
            };
            prop_assert!(shape.size >= size && shape.size.is_multiple_of(align));
            for pages in [shape.pages_least, shape.pages] {
                let (blocks, bytes) = (shape.blocks(pages), pages * PAGE_SIZE);
                prop_assert!(blocks >= 1 && blocks <= 1 << shape.shift);
                let mut end = 0;
                for place in 0..blocks {
                    let offset = shape.offset_of(place);
                    prop_assert!(offset >= end && offset.is_multiple_of(align) && offset.is_multiple_of(1 << shape.grain));
                    end = offset + shape.size;
                    prop_assert!(end <= bytes);
                    prop_assert!(boundary == 0 || offset / boundary == (end - 1) / boundary);
                    prop_assert!(shape.size > 4096 || offset / 4096 == (end - 1) / 4096);
                    prop_assert_eq!(shape.place_of(offset, pages), Some(place));
                    prop_assert_eq!(shape.place_of(offset + 1, pages), None);
                }
                let beyond = shape.offset_of(blocks);
                prop_assert!(beyond + shape.size > bytes && shape.place_of(beyond, pages).is_none());
            }
            prop_assert!(is_linear || shape.pages == 1);
            // Larger blocks leave less than a page unused, unless they must be aligned or keep to a boundary.
            if is_linear && boundary == 0 && align <= PAGE_SIZE && shape.size > PAGE_SIZE {
                prop_assert_eq!(shape.pages_least, shape.size.div_ceil(PAGE_SIZE));
            }
        }
    }

    #[test]
    fn units_are_a_page_for_small_blocks_and_sixteen_pages_for_pages() {
        let pages = |size| Shape::new(size, 1, 0, true).unwrap().pages;
        assert_eq!([16, 64, 256, 512, 1024, 2048, 4096, 8192].map(pages), [1, 1, 1, 2, 4, 8, 16, 16]);
        assert_eq!(Shape::new(4096, 1, 0, false).unwrap().pages, 1);
    }

    #[test]
    fn units_of_odd_sizes_are_runs_of_whole_blocks() {
        let shape = |size, align, boundary| Shape::new(size, align, boundary, true).unwrap();
        for (size, pages, pages_least) in [(12_288, 15, 3), (1_089_536, 266, 266), (24_000, 12, 6), (9 * 4096, 9, 9)] {
            let shape = shape(size, 64, 0);
            assert_eq!((shape.pages, shape.pages_least, shape.is_of_runs()), (pages, pages_least, true));
            assert_eq!((shape.blocks(pages), shape.unit_align(pages)), (pages / pages_least, 64));
        }
        // Whoever asks for more alignment, or a boundary, gets blocks of pages as before.
        for shape in [shape(12_288, 8192, 0), shape(12_288, 64, 1 << 16)] {
            assert!(!shape.is_of_runs() && shape.pages == 16);
        }
    }
}
