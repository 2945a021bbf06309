//! What a program would take small blocks from today: the general allocators, each asked for a block aligned to its
//! size, as a `dma_pool` gives it (glibc by `aligned_alloc`, which is its `malloc` at 16 bytes), with the settings that
//! they have in the other tables; and as a floor a vector of addresses.

use std::ptr::NonNull;

use crate::rows::dma::{BlockRow, OneBlock, Shape, Singly};
use crate::rows::region::Region;
use crate::rows::{Kind, c_peers};
use crate::subject::PAGE_BYTES;

pub(in crate::rows) fn rows() -> Vec<BlockRow> {
    vec![
        BlockRow::new("tls-vec", Kind::Floor, |shape: Shape| {
            let memory = Region::new((shape.bytes * shape.blocks).div_ceil(PAGE_BYTES))?;
            let free = memory.blocks(shape.bytes).rev().collect();
            Ok(Singly(Addresses { free, _memory: memory }))
        }),
        BlockRow::new("glibc", Kind::Peer, |shape: Shape| {
            c_peers::keep_glibc_memory();
            Ok(Singly(Glibc(shape.bytes)))
        }),
        #[cfg(feature = "mimalloc")]
        BlockRow::new("mimalloc", Kind::Peer, |shape: Shape| {
            c_peers::mimalloc::keep_memory();
            Ok(Singly(Mimalloc(shape.bytes)))
        }),
        #[cfg(feature = "jemalloc")]
        BlockRow::new("jemalloc", Kind::Peer, |shape: Shape| {
            c_peers::jemalloc::keep_memory();
            Ok(Singly(Jemalloc { bytes: shape.bytes, flags: tikv_jemalloc_sys::MALLOCX_ALIGN(shape.bytes) }))
        }),
        #[cfg(feature = "snmalloc")]
        BlockRow::new("snmalloc", Kind::Peer, |shape: Shape| {
            c_peers::snmalloc::check_build()?;
            Ok(Singly(Snmalloc(shape.bytes)))
        }),
    ]
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

struct Glibc(usize);

impl OneBlock for Glibc {
    type Block = NonNull<u8>;

    #[inline]
    fn get(&mut self) -> Option<NonNull<u8>> {
        // SAFETY: the size is a power of two, and so an alignment.
        NonNull::new(unsafe { libc::aligned_alloc(self.0, self.0) }.cast())
    }

    #[inline]
    fn put(&mut self, block: NonNull<u8>) {
        // SAFETY: it came from `aligned_alloc` above and is put back once.
        unsafe { libc::free(block.as_ptr().cast()) }
    }

    fn at(block: &NonNull<u8>) -> NonNull<u8> {
        *block
    }
}

#[cfg(feature = "mimalloc")]
struct Mimalloc(usize);

#[cfg(feature = "mimalloc")]
impl OneBlock for Mimalloc {
    type Block = NonNull<u8>;

    #[inline]
    fn get(&mut self) -> Option<NonNull<u8>> {
        // SAFETY: the size is a power of two, and so an alignment.
        NonNull::new(unsafe { libmimalloc_sys::mi_malloc_aligned(self.0, self.0) }.cast())
    }

    #[inline]
    fn put(&mut self, block: NonNull<u8>) {
        // SAFETY: it came from `mi_malloc_aligned` above and is put back once.
        unsafe { libmimalloc_sys::mi_free(block.as_ptr().cast()) }
    }

    fn at(block: &NonNull<u8>) -> NonNull<u8> {
        *block
    }
}

#[cfg(feature = "jemalloc")]
struct Jemalloc {
    bytes: usize,
    flags: i32,
}

#[cfg(feature = "jemalloc")]
impl OneBlock for Jemalloc {
    type Block = NonNull<u8>;

    #[inline]
    fn get(&mut self) -> Option<NonNull<u8>> {
        // SAFETY: the size is not zero, and the flags hold a power of two.
        NonNull::new(unsafe { tikv_jemalloc_sys::mallocx(self.bytes, self.flags) }.cast())
    }

    #[inline]
    fn put(&mut self, block: NonNull<u8>) {
        // SAFETY: it came from `mallocx` with this size and these flags, and is put back once.
        unsafe { tikv_jemalloc_sys::sdallocx(block.as_ptr().cast(), self.bytes, self.flags) }
    }

    fn at(block: &NonNull<u8>) -> NonNull<u8> {
        *block
    }
}

#[cfg(feature = "snmalloc")]
struct Snmalloc(usize);

#[cfg(feature = "snmalloc")]
impl OneBlock for Snmalloc {
    type Block = NonNull<u8>;

    #[inline]
    fn get(&mut self) -> Option<NonNull<u8>> {
        // SAFETY: the size is a power of two, and so an alignment.
        NonNull::new(unsafe { snmalloc_sys::sn_rust_alloc(self.0, self.0) }.cast())
    }

    #[inline]
    fn put(&mut self, block: NonNull<u8>) {
        // SAFETY: it came from `sn_rust_alloc` with this alignment and size, and is put back once.
        unsafe { snmalloc_sys::sn_rust_dealloc(block.as_ptr().cast(), self.0, self.0) };
    }

    fn at(block: &NonNull<u8>) -> NonNull<u8> {
        *block
    }
}
