//! What a program would use for small blocks today: the general allocators, with the settings of the other tables. Each
//! is asked for a block that is aligned to its size, as in a `dma_pool` (glibc by `aligned_alloc`, which for 16 bytes
//! is its `malloc`). The floor is a vector of addresses.

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

/// A vector of addresses, the floor.
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
