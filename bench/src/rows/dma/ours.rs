//! Pagemill's `DmaPool`, one block a call and 64 a call. The device's addresses are the program's. Blocks are aligned
//! to their size and do not cross pages.

use std::ptr::NonNull;

use pagemill::{Allocator, Device, DmaBlock, DmaPool, Gfp, Identity};

use crate::rows::dma::{BULK, BlockRow, OneBlock, Shape, Singly, Source};
use crate::rows::{Kind, Unavailable, backend_named};
use crate::subject::PAGE_BYTES;

/// Pages beyond those of the blocks, for the allocator's lists and for units that are not full.
const SPARE_PAGES: usize = 1024;

pub(super) fn rows(backend: &'static str) -> Vec<BlockRow> {
    let single = move |shape| pool(backend, shape).map(|pool| Singly(One(pool)));
    let bulk = move |shape| pool(backend, shape).map(Bulk);
    vec![
        BlockRow::of_source("dma-single", Kind::Ours, single).on(backend),
        BlockRow::of_source("dma-bulk", Kind::Ours, bulk).on(backend),
    ]
}

fn pool(backend: &'static str, shape: Shape) -> Result<DmaPool, Unavailable> {
    let pages = (shape.bytes * shape.blocks).div_ceil(PAGE_BYTES) + SPARE_PAGES;
    let allocator = Allocator::builder().pages(pages).backend(backend_named(backend)).build();
    let allocator = allocator.map_err(|error| Unavailable(error.to_string()))?;
    let device = Device::new(&allocator, Identity);
    let pool = device.and_then(|device| DmaPool::create("bench", &device, shape.bytes, shape.bytes, PAGE_BYTES));
    pool.map_err(|error| Unavailable(error.to_string()))
}

fn at(block: &DmaBlock) -> NonNull<u8> {
    NonNull::new(block.as_ptr()).expect("a block is somewhere")
}

struct One(DmaPool);

impl OneBlock for One {
    type Block = DmaBlock;

    #[inline]
    fn get(&mut self) -> Option<DmaBlock> {
        self.0.alloc(Gfp::KERNEL).ok()
    }

    #[inline]
    fn put(&mut self, block: DmaBlock) {
        let put = self.0.free(block);
        debug_assert!(put.is_ok(), "{put:?}");
    }

    fn at(block: &DmaBlock) -> NonNull<u8> {
        at(block)
    }

    fn device(&self, block: &DmaBlock) -> Option<u64> {
        Some(self.0.device_addr(block).get())
    }

    fn bytes_a_block(&self) -> Option<f64> {
        Some(self.0.stats().bytes_a_block())
    }
}

struct Bulk(DmaPool);

impl Source for Bulk {
    type Block = DmaBlock;

    #[inline]
    fn fill(&mut self, slots: &mut [Option<DmaBlock>]) -> bool {
        slots.chunks_mut(BULK).all(|slots| self.0.alloc_bulk(Gfp::KERNEL, slots).is_ok_and(|n| n == slots.len()))
    }

    #[inline]
    fn empty(&mut self, slots: &mut [Option<DmaBlock>]) {
        for slots in slots.chunks_mut(BULK) {
            self.0.free_bulk(slots);
        }
    }

    fn at(block: &DmaBlock) -> NonNull<u8> {
        at(block)
    }

    fn device(&self, block: &DmaBlock) -> Option<u64> {
        Some(self.0.device_addr(block).get())
    }

    fn bytes_a_block(&self) -> Option<f64> {
        Some(self.0.stats().bytes_a_block())
    }
}
