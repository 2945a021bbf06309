//! `old-way`: what Linux's `dma_pool` was until 2023, in words: a list of pages, each with a list of its own free
//! blocks whose links lie in the blocks. Who asks looks through the pages for one that has a free block; who gives
//! back looks through them for the one that the block is in. All of it under one lock.
//!
//! It is shown and not judged by: written here, it could be made as slow as we like.

use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

use crate::rows::dma::{BlockRow, OneBlock, Shape, Singly};
use crate::rows::region::Region;
use crate::rows::{Kind, Unavailable};
use crate::subject::PAGE_BYTES;

pub(super) fn row() -> BlockRow {
    BlockRow::new("old-way", Kind::Design, |shape| Ok(Singly(OldWay::new(shape)?)))
}

/// A page of the list.
struct Page {
    next: Option<Box<Page>>,
    base: NonNull<u8>,
    /// Where the device finds its first byte.
    device: u64,
    /// Offset of the first free block; [`PAGE_BYTES`] and above: there is none.
    free: usize,
}

struct OldWay {
    pages: Mutex<Option<Box<Page>>>,
    _memory: Region,
}

/// A block: where the program and where the device finds it.
struct Block {
    at: NonNull<u8>,
    device: u64,
}

impl OldWay {
    fn new(shape: Shape) -> Result<OldWay, Unavailable> {
        let per_page = PAGE_BYTES / shape.bytes;
        let memory = Region::new(shape.blocks.div_ceil(per_page))?;
        let mut pages = None;
        for addr in memory.words() {
            let base = NonNull::new(addr as *mut u8).ok_or_else(|| Unavailable("a page at 0".to_owned()))?;
            for at in (0..PAGE_BYTES).step_by(shape.bytes) {
                // SAFETY: the page is this pool's alone, and the offset is that of a block in it.
                unsafe { base.add(at).cast::<usize>().write(at + shape.bytes) };
            }
            pages = Some(Box::new(Page { next: pages, base, device: addr as u64, free: 0 }));
        }
        Ok(OldWay { pages: Mutex::new(pages), _memory: memory })
    }
}

impl OneBlock for OldWay {
    type Block = Block;

    #[inline]
    fn get(&mut self) -> Option<Block> {
        let mut pages = self.pages.lock().unwrap_or_else(PoisonError::into_inner);
        let mut page = pages.as_mut()?;
        while page.free >= PAGE_BYTES {
            page = page.next.as_mut()?;
        }
        // SAFETY: the offset is that of a free block of this page, which begins with the offset of the next.
        let (at, next) = unsafe {
            let at = page.base.add(page.free);
            (at, at.cast::<usize>().read())
        };
        let device = page.device + page.free as u64;
        page.free = next;
        Some(Block { at, device })
    }

    #[inline]
    fn put(&mut self, block: Block) {
        let mut pages = self.pages.lock().unwrap_or_else(PoisonError::into_inner);
        let mut at = pages.as_mut();
        while let Some(page) = at {
            let offset = block.device.wrapping_sub(page.device) as usize;
            if offset < PAGE_BYTES {
                // SAFETY: the block is in this page and nobody has it any more; it holds a word.
                unsafe { block.at.cast::<usize>().write(page.free) };
                page.free = offset;
                return;
            }
            at = page.next.as_mut();
        }
    }

    fn at(block: &Block) -> NonNull<u8> {
        block.at
    }

    fn device(&self, block: &Block) -> Option<u64> {
        Some(block.device)
    }
}

impl Drop for OldWay {
    fn drop(&mut self) {
        // One after the other: a thousand boxes inside each other would be dropped by as many calls inside each other.
        let pages = self.pages.get_mut().unwrap_or_else(PoisonError::into_inner);
        while let Some(page) = pages.take() {
            *pages = page.next;
        }
    }
}
