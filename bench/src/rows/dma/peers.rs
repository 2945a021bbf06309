//! What a program would take small blocks from today: the general allocators, each asked for a block aligned to its
//! size, as a `dma_pool` gives it (glibc by `aligned_alloc`, which is its `malloc` at 16 bytes), with the settings that
//! they have in the other tables; and as a floor a vector of addresses.

use std::ptr::NonNull;

use crate::rows::dma::{BlockRow, OneBlock, Shape, Singly};
use crate::rows::region::Region;
use crate::rows::{Kind, c_peers};
use crate::subject::PAGE_BYTES;

pub(super) fn rows() -> Vec<BlockRow> {
    let floor = BlockRow::of_source("tls-vec", Kind::Floor, |shape: Shape| {
        let memory = Region::new((shape.bytes * shape.blocks).div_ceil(PAGE_BYTES))?;
        let free = memory.blocks(shape.bytes).rev().collect();
        Ok(Singly(Addresses { free, _memory: memory }))
    });
    std::iter::once(floor).chain(c_peers::block_rows()).collect()
}

/// A vector of addresses, which nothing undercuts.
struct Addresses {
    free: Vec<NonNull<u8>>,
    _memory: Region,
}

impl OneBlock for Addresses {
    type Block = NonNull<u8>;

    #[inline]
    fn get(&mut self) -> Option<NonNull<u8>> {
        self.free.pop()
    }

    #[inline]
    fn put(&mut self, block: NonNull<u8>) {
        self.free.push(block);
    }

    fn at(block: &NonNull<u8>) -> NonNull<u8> {
        *block
    }
}
