//! Rows of the table `orders`: blocks of pages, through the loops of the table `dma`.

use std::ptr::NonNull;

use buddy_system_allocator::FrameAllocator;
use pagemill::{Allocator, Block, Bulk, Gfp, Order, free_pages_bulk};

use crate::rows::dma::{BlockRow, OneBlock, Shape, Singly, Source, peer_rows};
use crate::rows::pagemill::{BACKENDS, SPARE_PAGES, open, refused};
use crate::rows::region::Region;
use crate::rows::{Kind, Unavailable};
use crate::subject::PAGE_BYTES;

/// The rows, for one shape each time they are opened.
pub(crate) fn rows() -> Vec<BlockRow> {
    let mut rows = Vec::new();
    for (label, backend) in BACKENDS {
        let blocks = move |shape: Shape| {
            let order =
                Order::new((shape.bytes / PAGE_BYTES).trailing_zeros() as u8).map_err(|why| refused(why.into()))?;
            let pages = shape.blocks * shape.bytes / PAGE_BYTES + SPARE_PAGES;
            Ok::<_, Unavailable>(Blocks { allocator: open(backend, pages)?, order })
        };
        rows.push(BlockRow::of_pagemill("pagemill-single", label, move |shape| Ok(Singly(blocks(shape)?))));
        rows.push(BlockRow::of_pagemill("pagemill-array", label, move |shape| Ok(InBulk(blocks(shape)?))));
    }
    rows.push(BlockRow::new("buddy-system", Kind::Peer, |shape: Shape| {
        // Twice as many, so that blocks are found wherever the region begins.
        let pages = 2 * shape.blocks.max(64) * shape.bytes / PAGE_BYTES;
        let region = Region::new(pages)?;
        let mut frames = FrameAllocator::new();
        frames.add_frame(region.base() / PAGE_BYTES, region.base() / PAGE_BYTES + pages);
        Ok(Singly(Buddy { frames, pages: shape.bytes / PAGE_BYTES, _region: region }))
    }));
    rows.extend(peer_rows().into_iter().filter(|row| row.kind == Kind::Peer));
    rows
}

struct Blocks {
    allocator: Allocator,
    order: Order,
}

fn at(block: &Block) -> NonNull<u8> {
    NonNull::new(block.as_ptr().cast_mut()).expect("a block is somewhere")
}

impl OneBlock for Blocks {
    type Block = Block;

    #[inline]
    fn get(&mut self) -> Option<Block> {
        self.allocator.alloc_pages(Gfp::KERNEL, self.order).ok()
    }

    #[inline]
    fn put(&mut self, block: Block) {
        drop(block);
    }

    fn at(block: &Block) -> NonNull<u8> {
        at(block)
    }
}

/// All of them in one call.
struct InBulk(Blocks);

impl Source for InBulk {
    type Block = Block;

    #[inline]
    fn fill(&mut self, slots: &mut [Option<Block>]) -> bool {
        let request = Bulk::up_to(slots.len()).order(self.0.order);
        self.0.allocator.alloc_pages_bulk_array(request, slots).is_ok_and(|filled| filled.added == slots.len())
    }

    #[inline]
    fn empty(&mut self, slots: &mut [Option<Block>]) {
        free_pages_bulk(slots);
    }

    fn at(block: &Block) -> NonNull<u8> {
        at(block)
    }
}

struct Buddy {
    frames: FrameAllocator,
    /// Of a block.
    pages: usize,
    _region: Region,
}

impl OneBlock for Buddy {
    type Block = NonNull<u8>;

    #[inline]
    fn get(&mut self) -> Option<NonNull<u8>> {
        NonNull::new((self.frames.alloc(self.pages)? * PAGE_BYTES) as *mut u8)
    }

    #[inline]
    fn put(&mut self, block: NonNull<u8>) {
        self.frames.dealloc(block.as_ptr() as usize / PAGE_BYTES, self.pages);
    }

    fn at(block: &NonNull<u8>) -> NonNull<u8> {
        *block
    }
}
