//! How a pool cuts its units into blocks: sizes, orders and offsets. Policy on numbers alone.
use crate::device::DeviceError;
use pagemill_core::{Order, PAGE_SHIFT, PAGE_SIZE};

/// The smallest size of a block (C6.2).
const SIZE_MIN: usize = 16;
/// A unit holds at least this many blocks, if that takes no more than a unit of [`UNIT_MAX`]: they share the unit's
/// entry in the pool's table. At 24 bytes an entry, that is 1.5 bytes a block.
const SHARERS: usize = 16;
const UNIT_MAX: Order = match Order::new(4) {
    Ok(order) => order,
    Err(_) => Order::ZERO,
};

/// How blocks lie in a unit. A unit is the block of pages by which the pool grows.
#[derive(Debug)]
pub(super) struct Shape {
    /// The size of a block in bytes.
    pub(super) size: usize,
    /// Every block's address is a multiple of this.
    pub(super) align: usize,
    /// No block crosses a multiple of this power of two.
    pub(super) boundary: usize,
    /// The number of blocks between two boundaries.
    in_piece: usize,
    /// The usual order of a unit.
    pub(super) order: Order,
    /// The order of a unit if no block of the usual order is free.
    pub(super) order_least: Order,
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
        let pages = size.div_ceil(PAGE_SIZE).next_power_of_two();
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
        let order_least = Order::new(pages.ilog2() as u8).unwrap_or(Order::MAX);
        let grain = size.trailing_zeros().min(boundary.trailing_zeros()).min(PAGE_SHIFT);
        let in_piece = boundary / size;
        let mut shape = Self { size, align, boundary, in_piece, order: order_least, order_least, shift: 0, grain };
        while is_linear && shape.blocks(shape.order) < SHARERS && shape.order < UNIT_MAX {
            shape.order = Order::new(shape.order.get() + 1).unwrap_or(Order::MAX);
        }
        shape.shift = shape.blocks(shape.order).next_power_of_two().ilog2();
        Ok(shape)
    }

    /// The number of blocks in a unit of this order.
    pub(super) fn blocks(&self, order: Order) -> usize {
        order.bytes() / self.boundary * self.in_piece + order.bytes() % self.boundary / self.size
    }

    /// The offset of the block with this place in its unit.
    pub(super) fn offset_of(&self, place: usize) -> usize {
        place / self.in_piece * self.boundary + place % self.in_piece * self.size
    }

    /// The place of the block that begins at this offset in a unit of this order; none if no block begins there.
    #[inline]
    pub(super) fn place_of(&self, offset: usize, order: Order) -> Option<usize> {
        let in_piece = offset & (self.boundary - 1);
        // 32 bits, which the processor divides faster.
        let nth = (in_piece as u32 / self.size as u32) as usize;
        let is_block = nth * self.size == in_piece && nth < self.in_piece && offset + self.size <= order.bytes();
        is_block.then(|| (offset >> self.boundary.trailing_zeros()) * self.in_piece + nth)
    }

    /// The device address of a unit must be a multiple of this, so that its blocks are aligned for the device and cross
    /// no boundary.
    pub(super) fn unit_align(&self, order: Order) -> usize {
        self.align.max(self.boundary.min(order.bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::Shape;
    use pagemill_core::Order;
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
            for order in [shape.order_least, shape.order] {
                let blocks = shape.blocks(order);
                prop_assert!(blocks >= 1 && blocks <= 1 << shape.shift);
                let mut end = 0;
                for place in 0..blocks {
                    let offset = shape.offset_of(place);
                    prop_assert!(offset >= end && offset.is_multiple_of(align) && offset.is_multiple_of(1 << shape.grain));
                    end = offset + shape.size;
                    prop_assert!(end <= order.bytes());
                    prop_assert!(boundary == 0 || offset / boundary == (end - 1) / boundary);
                    prop_assert!(shape.size > 4096 || offset / 4096 == (end - 1) / 4096);
                    prop_assert_eq!(shape.place_of(offset, order), Some(place));
                    prop_assert_eq!(shape.place_of(offset + 1, order), None);
                }
                let beyond = shape.offset_of(blocks);
                prop_assert!(beyond + shape.size > order.bytes() && shape.place_of(beyond, order).is_none());
            }
            prop_assert!(is_linear || shape.order == Order::ZERO);
        }
    }

    #[test]
    fn units_are_a_page_for_small_blocks_and_sixteen_pages_for_pages() {
        let order = |size| Shape::new(size, 1, 0, true).unwrap().order.get();
        assert_eq!([16, 64, 256, 512, 1024, 2048, 4096, 8192].map(order), [0, 0, 0, 1, 2, 3, 4, 4]);
        assert_eq!(Shape::new(4096, 1, 0, false).unwrap().order.get(), 0);
    }
}
