//! Rows of the table `orders`: blocks of pages, through the loops of the table `dma`.

use std::ptr::NonNull;

use buddy_system_allocator::FrameAllocator;
use pagemill::{Allocator, Block, Bulk, Gfp, Order, Page, Run, free_pages_bulk};

use crate::rows::c_peers::block_rows;
use crate::rows::dma::{BlockRow, OneBlock, Shape, Singly, Source};
use crate::rows::pagemill::{BACKENDS, SPARE_PAGES, open, refused};
use crate::rows::region::Region;
use crate::rows::{Kind, Unavailable};
use crate::subject::PAGE_BYTES;

/// Wears a zone out: it was full of blocks of 1 to 16 pages, of which a random tenth is held, so that hardly a
/// pageblock is whole. `take` allocates a block of an order, if there is room for one.
fn wear<B>(mut take: impl FnMut(u8) -> Option<B>) -> (Vec<B>, Vec<B>) {
    let mut rng = fastrand::Rng::with_seed(20_260_704);
    let mut held: Vec<B> = std::iter::from_fn(|| take(rng.u8(..=4))).collect();
    rng.shuffle(&mut held);
    let free = held.split_off(held.len() / 10);
    (held, free)
}

/// Runs of neighbouring pages, one call each. Pages in bulk have no such form, so the catalogue has no such row.
pub(crate) const CONTIG: &str = "pagemill-contig";

/// The rows, each opened for one shape. For a [worn](wear) zone only those that have a zone.
pub(crate) fn rows(is_worn: bool) -> Vec<BlockRow> {
    let mut rows = Vec::new();
    for (label, backend) in BACKENDS {
        let blocks = move |shape: Shape| {
            let order = Order::new((shape.bytes / PAGE_BYTES).trailing_zeros() as u8).map_err(refused)?;
            let pages = shape.blocks * shape.bytes / PAGE_BYTES + SPARE_PAGES;
            let allocator = open(backend, pages)?;
            let mut held = Vec::new();
            if is_worn {
                let take = |order| allocator.alloc_pages(Gfp::NOWAIT, Order::new(order).ok()?).ok();
                held = wear(take).0; // The other blocks are freed here.
                allocator.drain();
            }
            Ok::<_, Unavailable>(Blocks { allocator, order, _held: held })
        };
        rows.push(
            BlockRow::of_source("pagemill-single", Kind::Ours, move |shape| Ok(Singly(blocks(shape)?))).on(label),
        );
        rows.push(BlockRow::of_source("pagemill-array", Kind::Ours, move |shape| Ok(InBulk(blocks(shape)?))).on(label));
        rows.push(BlockRow::of_source(CONTIG, Kind::Ours, move |shape| Ok(Singly(Runs(blocks(shape)?)))).on(label));
    }
    rows.push(BlockRow::of_source("buddy-system", Kind::Peer, move |shape: Shape| {
        // Twice as many pages, so that there are enough aligned blocks wherever the region begins.
        let pages = 2 * shape.blocks.max(64) * shape.bytes / PAGE_BYTES + if is_worn { SPARE_PAGES } else { 0 };
        let region = Region::new(pages)?;
        let mut frames = FrameAllocator::new();
        frames.add_frame(region.base() / PAGE_BYTES, region.base() / PAGE_BYTES + pages);
        if is_worn {
            let (_, free) = wear(|order| frames.alloc(1 << order).map(|frame| (frame, order)));
            free.into_iter().for_each(|(frame, order)| frames.dealloc(frame, 1 << order));
        }
        Ok(Singly(Buddy { frames, pages: shape.bytes / PAGE_BYTES, _region: region }))
    }));
    if is_worn {
        return rows;
    }
    rows.extend(block_rows());
    rows
}

struct Blocks {
    allocator: Allocator,
    order: Order,
    /// Blocks that wear the zone out.
    _held: Vec<Block>,
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

/// As many neighbouring pages as a block has, aligned to a page.
struct Runs(Blocks);

impl OneBlock for Runs {
    type Block = Run<Page>;

    #[inline]
    fn get(&mut self) -> Option<Run<Page>> {
        self.0.allocator.alloc_contig(Gfp::KERNEL, self.0.order.frames() as usize).ok()
    }

    #[inline]
    fn put(&mut self, run: Run<Page>) {
        drop(run);
    }

    fn at(run: &Run<Page>) -> NonNull<u8> {
        NonNull::new(run.as_ptr().cast_mut()).expect("a run is somewhere")
    }

    fn align(_bytes: usize) -> usize {
        PAGE_BYTES
    }
}

/// All blocks in one call.
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
    /// Pages of a block.
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
