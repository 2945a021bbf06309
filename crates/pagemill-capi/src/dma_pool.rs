//! Pools of small blocks with device addresses.
//!
//! A block that C holds is a raw pointer, whose state the pool keeps outside the block: so a double free, a foreign pointer and one inside a
//! block are refused (C6.4).
use crate::bulk;
use crate::device::Device;
use crate::error::{Error, code};
use crate::gfp;
use crate::handle::{self, handle};
use crate::text;
use core::ffi::{c_char, c_void};
use core::ptr::null_mut;
// By another name: cbindgen would take it for this crate's.
use pagemill::DmaBlock;

/// A pool of blocks of one size, each with a device address. Blocks are smaller than a page, or as large as many. The type is opaque. Any
/// thread may use a pool.
///
/// What the pool knows of its blocks lies outside them: a device that writes to a freed block damages no list. But free a block only when the
/// device is done with it, since the next owner gets the same memory.
///
/// In the child of a `fork` the pool is its parent's: the child gets `PAGEMILL_ERROR_FORKED`, and statistics without blocks.
pub struct DmaPool;
handle!(DmaPool, pagemill::DmaPool, b"pm dpool");

/// Freed blocks are filled with a pattern, which is looked at when they are handed out again: the hook of `pagemill_on_misuse` is called with
/// `PAGEMILL_ERROR_MISUSE` if somebody has written to one, and `misused` counts it. For finding faults: it costs time.
pub const PAGEMILL_DMA_POOL_POISONED: u32 = 1;

/// Makes a pool of blocks of `bytes` bytes, at least 16, rounded up to a multiple of `align`. The addresses of blocks are multiples of
/// `align`, a power of two, in the process and for the device; 0: of any. No block crosses a multiple of `boundary`, a power of two; 0: there
/// is none. `flags` is 0 or `PAGEMILL_DMA_POOL_POISONED`. `name` is copied. `*pool` gets the handle, or null.
///
/// A block of up to 4096 bytes lies in one page. The pool has no memory at first, takes pages from the device's allocator as it needs them,
/// and keeps them until it is destroyed.
///
/// Errors: `PAGEMILL_ERROR_SIZE` if there can be no such blocks: also if they are larger than a page, and the device has each page elsewhere.
/// 4xx if the system refuses address space, or in a forked child. 2xx if another argument is wrong.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_dma_pool_create(
    name: *const c_char,
    device: *mut Device,
    bytes: usize,
    align: usize,
    boundary: usize,
    flags: u32,
    pool: *mut *mut DmaPool,
) -> Error {
    let create = || {
        // SAFETY: the caller passes null or a handle, and null or a text with a 0 at its end.
        let (device, name) = unsafe { (&handle::get(device)?.device, text::read(name)?.to_string_lossy()) };
        Ok(match flags {
            0 => pagemill::DmaPool::create(&name, device, bytes, align, boundary),
            PAGEMILL_DMA_POOL_POISONED => pagemill::DmaPool::create_poisoned(&name, device, bytes, align, boundary),
            _ => return Err(Error::Invalid),
        }?)
    };
    // SAFETY: the caller passes null or a place for a pointer.
    unsafe { handle::make(pool, create) }
}

/// Allocates one block. `*block` gets it, or null; `*address`, unless the pointer is null, gets its device address. The contents are
/// unspecified unless `gfp` has `PAGEMILL_GFP_ZERO`. The other flags matter when the pool has no free block and takes another page.
///
/// Errors: 1xx if the pool and its allocator have no memory, `PAGEMILL_ERROR_DEVICE` if the device does not map it, `PAGEMILL_ERROR_FORKED`.
/// 2xx if an argument is wrong.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_dma_pool_alloc(
    pool: *mut DmaPool,
    gfp: u32,
    address: *mut u64,
    block: *mut *mut c_void,
) -> Error {
    // SAFETY: the caller passes null or a place for a pointer.
    let Some(place) = (unsafe { block.as_mut() }) else { return Error::Argument };
    *place = null_mut();
    let mut alloc = || {
        // SAFETY: the caller passes null or a handle.
        let pool = unsafe { handle::get(pool) }?;
        let block = pool.alloc(gfp::gfp(gfp)?)?;
        // SAFETY: the caller passes null or a place for a number.
        if let Some(address) = unsafe { address.as_mut() } {
            *address = pool.device_addr(&block).get();
        }
        *place = pool.into_raw(block).cast();
        Ok(())
    };
    code(alloc())
}

/// Fills all null slots among the first n of an array, in ascending order, or none. `addresses` is null or has n slots, too: a block's device
/// address goes to the slot with the number of the block's. `*added`, unless the pointer is null, gets the number of blocks.
///
/// Errors: as for `pagemill_dma_pool_alloc`. The slots are then as they were.
///
/// Threads: any; nobody else may use the arrays meanwhile. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_dma_pool_alloc_bulk(
    pool: *mut DmaPool,
    gfp: u32,
    slots: *mut *mut c_void,
    addresses: *mut u64,
    n: i64,
    added: *mut usize,
) -> Error {
    let mut count = 0;
    let mut alloc = || {
        // SAFETY: the caller passes null or a handle.
        let (pool, gfp) = (unsafe { handle::get(pool) }?, gfp::gfp(gfp)?);
        // SAFETY: the caller passes n slots.
        let slots = unsafe { bulk::slots_of(slots, bulk::count(n)?) }?;
        let holes = slots.iter().filter(|slot| slot.is_null()).count();
        let (mut few, mut many) = ([const { None }; 64], Vec::new());
        let blocks: &mut [Option<DmaBlock>] = match few.get_mut(..holes) {
            Some(few) => few,
            None => {
                many.resize_with(holes, || None);
                &mut many
            }
        };
        count = pool.alloc_bulk(gfp, blocks)?;
        let empty = slots.iter_mut().enumerate().filter(|(_, slot)| slot.is_null());
        for ((at, slot), block) in empty.zip(blocks.iter_mut().filter_map(Option::take)) {
            if !addresses.is_null() {
                // SAFETY: the caller passes n addresses.
                unsafe { addresses.add(at).write(pool.device_addr(&block).get()) };
            }
            *slot = pool.into_raw(block);
        }
        Ok(())
    };
    let error = code(alloc());
    // SAFETY: the caller passes null or a place for a number.
    if let Some(place) = unsafe { added.as_mut() } {
        *place = count;
    }
    error
}

/// Frees one block, which the device must be done with.
///
/// Errors: 3xx for any pointer that is not that of a block of this pool which is handed out: null, freed already, another pool's, inside a
/// block. It changes nothing then. 2xx for no open handle.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_dma_pool_free(pool: *mut DmaPool, block: *mut c_void) -> Error {
    let free = || {
        // SAFETY: the caller passes null or a handle, and gives up the block, or it is refused.
        Ok(unsafe { handle::get(pool)?.free_raw(block.cast()) }?)
    };
    code(free())
}

/// Frees the blocks of an array's first n slots. Empties the slots of those that it frees, and passes over null slots. `*freed`, unless the
/// pointer is null, gets their number.
///
/// Errors: as for `pagemill_dma_pool_free`, the first one's: those slots are as they were, all others are freed.
///
/// Threads: any; nobody else may use the array meanwhile. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_dma_pool_free_bulk(
    pool: *mut DmaPool,
    slots: *mut *mut c_void,
    n: i64,
    freed: *mut usize,
) -> Error {
    let mut count = 0;
    let mut free = || {
        // SAFETY: the caller passes null or a handle.
        let pool = unsafe { handle::get(pool) }?;
        // SAFETY: the caller passes n slots.
        let slots = unsafe { bulk::slots_of(slots, bulk::count(n)?) }?;
        let mut refused = Ok(());
        // As many as one section frees, from the last to the first, so that the first block is the next to be handed out.
        for slots in slots.rchunks_mut(64) {
            let mut blocks = [const { None }; 64];
            // SAFETY: the caller gives up the blocks, or they are refused.
            let own = |block| Ok(unsafe { pool.from_raw(block) }?);
            refused = refused.and(bulk::own_slots(slots, &mut blocks, own));
            count += pool.free_bulk(&mut blocks);
        }
        refused
    };
    let error = code(free());
    // SAFETY: the caller passes null or a place for a number.
    if let Some(place) = unsafe { freed.as_mut() } {
        *place = count;
    }
    error
}

/// What a pool has.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct DmaPoolStats {
    /// Blocks that are handed out. Exact while no thread allocates or frees.
    pub in_use: usize,
    /// All blocks of the pool.
    pub blocks: usize,
    /// The bytes of a block.
    pub block_bytes: usize,
    /// The pages that the blocks lie in.
    pub pages: usize,
    /// Bytes of the pool's tables and lists that are in use.
    pub metadata: usize,
    /// Blocks that were refused when they were freed. In a poisoned pool, blocks that were written to while free count too.
    pub misused: u64,
}

/// Reads a pool's statistics.
///
/// Errors: 2xx if an argument is wrong.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_dma_pool_stats(pool: *const DmaPool, stats: *mut DmaPoolStats) -> Error {
    let read = || {
        // SAFETY: the caller passes null or a handle, and null or a place for statistics.
        let (pool, place) = unsafe { (handle::get(pool)?, stats.as_mut().ok_or(Error::Argument)?) };
        let pagemill::DmaPoolStats { in_use, blocks, size, pages, metadata, misused, .. } = pool.stats();
        *place = DmaPoolStats { in_use, blocks, block_bytes: size, pages, metadata, misused };
        Ok(())
    };
    code(read())
}

/// Destroys a pool of which no block is handed out, and frees its pages. `*out`, unless the pointer is null, gets the number of blocks that
/// are handed out.
///
/// Errors: `PAGEMILL_ERROR_IN_USE` if there are any; nothing has changed then.
///
/// Threads: any, and no thread may use the handle meanwhile or later. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_dma_pool_destroy(pool: *mut DmaPool, out: *mut usize) -> Error {
    // SAFETY: the caller passes null or a handle, and null or a place for a number.
    let (found, place) = unsafe { (handle::get(pool).map(|pool| pool.stats().in_use), out.as_mut()) };
    if let (Some(place), Ok(found)) = (place, found) {
        *place = found;
    }
    match found {
        Ok(0) => {
            // SAFETY: the caller passes a handle.
            unsafe { pagemill_dma_pool_release(pool) }
        }
        Ok(_) => Error::InUse,
        Err(error) => error,
    }
}

/// Lets a pool go. If a block of it is handed out, its pages stay for ever, mapped for the device, since that may still write to them; the
/// hook of `pagemill_on_misuse` is called with `PAGEMILL_ERROR_MISUSE`. Nobody can free such a block any more.
///
/// Errors: 2xx for no open handle.
///
/// Threads: any, and no thread may use the handle meanwhile or later. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_dma_pool_release(pool: *mut DmaPool) -> Error {
    // SAFETY: the caller passes null or a handle.
    code(unsafe { handle::close(pool) }.map(drop))
}
