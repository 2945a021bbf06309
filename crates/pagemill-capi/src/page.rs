//! One page, one block, one run: raw pointers, checked when they come back.
use crate::allocator::{self, Allocator};
use crate::error::{Error, code};
use core::ffi::c_void;
use core::ptr::null_mut;
use core::sync::atomic::AtomicPtr;
use core::sync::atomic::Ordering::{Acquire, Release};
use pagemill::{Block, Misuse, Order, PAGE_SIZE};

/// The size of a page in bytes, to which each page is aligned.
pub const PAGEMILL_PAGE_SIZE: usize = 4096;
/// The largest order of a block: 1 GiB.
pub const PAGEMILL_ORDER_MAX: u32 = 18;
const _: () = assert!(PAGEMILL_PAGE_SIZE == PAGE_SIZE && PAGEMILL_ORDER_MAX == Order::MAX.get() as u32);

pub(crate) fn order_of(order: u32) -> Result<Order, Error> {
    u8::try_from(order).ok().and_then(|order| Order::new(order).ok()).ok_or(Error::Order)
}

/// Allocates one page. Null if there is none, or if an argument is wrong: `pagemill_alloc_pages` with order 0 says which.
///
/// The contents are unspecified unless `gfp` has `PAGEMILL_GFP_ZERO`.
///
/// Threads: any. Signal handlers: yes, with `PAGEMILL_GFP_NOWAIT` or `PAGEMILL_GFP_ATOMIC`. errno stays as it is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_alloc_page(allocator: *mut Allocator, gfp: u32) -> *mut c_void {
    // SAFETY: the caller passes null or a handle.
    let Ok((allocator, gfp)) = (unsafe { allocator::request(allocator, gfp) }) else { return null_mut() };
    allocator.alloc_page_raw(gfp).map_or(null_mut(), <*mut u8>::cast)
}

/// Frees one page, of whichever allocator.
///
/// Errors: 3xx for any pointer that is not that of a page which is handed out: null, freed already, never handed out, inside a
/// block, on a list. It changes nothing then. A pointer to a page that was handed out again since is not told from the new owner's.
///
/// Threads: any, also not the one that allocated it. Signal handlers: yes. errno stays as it is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_free_page(page: *mut c_void) -> Error {
    // SAFETY: the caller gives up the page, or it is refused.
    match unsafe { pagemill::free_raw(page.cast(), Order::ZERO) } {
        Ok(()) => Error::None,
        Err(misuse) => misuse.into(),
    }
}

/// Allocates a block of 2^order pages, aligned to its size. `*block` gets its address, or null.
///
/// Errors: 1xx if there is none, 2xx if an argument is wrong.
///
/// Threads: any. Signal handlers: yes for order 0, with `PAGEMILL_GFP_NOWAIT` or `PAGEMILL_GFP_ATOMIC`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_alloc_pages(
    allocator: *mut Allocator,
    gfp: u32,
    order: u32,
    block: *mut *mut c_void,
) -> Error {
    // SAFETY: the caller passes null or a place for a pointer.
    let Some(place) = (unsafe { block.as_mut() }) else { return Error::Argument };
    *place = null_mut();
    let mut alloc = || {
        // SAFETY: the caller passes null or a handle.
        let (allocator, gfp) = unsafe { allocator::request(allocator, gfp) }?;
        *place = allocator.alloc_pages(gfp, order_of(order)?)?.into_raw().0.cast();
        Ok(())
    };
    code(alloc())
}

/// Frees a block of 2^order pages.
///
/// Errors: as for `pagemill_free_page`, and `PAGEMILL_ERROR_WRONG_ORDER`. `PAGEMILL_ERROR_ORDER` for an order above 18.
///
/// Threads: any. Signal handlers: yes for order 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_free_pages(block: *mut c_void, order: u32) -> Error {
    let free = || {
        // SAFETY: the caller gives up the block, or it is refused.
        unsafe { pagemill::free_raw(block.cast(), order_of(order)?) }?;
        Ok(())
    };
    code(free())
}

/// Turns a block of 2^order pages into pages, each of which is freed on its own.
///
/// Errors: as for `pagemill_free_pages`.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_split(block: *mut c_void, order: u32) -> Error {
    let split = || {
        // SAFETY: the caller gives up the block, or it is refused.
        let block = unsafe { Block::from_raw(block.cast(), order_of(order)?) }?;
        block.split().for_each(|page| _ = page.into_raw());
        Ok(())
    };
    code(split())
}

/// Allocates `pages` contiguous pages, any number of them. `*run` gets the first one's address, or null. Free them with
/// `pagemill_free_run`, or each as a page.
///
/// Errors: as for `pagemill_alloc_pages`.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_alloc_contig(
    allocator: *mut Allocator,
    gfp: u32,
    pages: usize,
    run: *mut *mut c_void,
) -> Error {
    // SAFETY: the caller passes null or a place for a pointer.
    let Some(place) = (unsafe { run.as_mut() }) else { return Error::Argument };
    *place = null_mut();
    let mut alloc = || {
        // SAFETY: the caller passes null or a handle.
        let (allocator, gfp) = unsafe { allocator::request(allocator, gfp) }?;
        *place = allocator.alloc_contig(gfp, pages)?.into_raw().0.cast();
        Ok(())
    };
    code(alloc())
}

/// Frees contiguous blocks of 2^order pages each, as `pagemill_alloc_contig` (order 0) and the runs form deliver them. `*freed`,
/// unless the pointer is null, gets the number of blocks that were freed.
///
/// Errors: 3xx if some of them are not handed out, the first one's. The others are freed, up to 64 in a row that are not: a number
/// of blocks that is wrong is not tried to its end.
///
/// Threads: any. Signal handlers: yes for order 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_free_run(run: *mut c_void, blocks: usize, order: u32, freed: *mut usize) -> Error {
    // SAFETY: the caller passes null or a place for a number.
    let count = unsafe { freed.as_mut() };
    // SAFETY: the caller gives up the blocks, or they are refused.
    let (sum, error) = order_of(order).map_or_else(|error| (0, error), |order| unsafe { free_run(run, blocks, order) });
    if let Some(count) = count {
        *count = sum;
    }
    error
}

/// # Safety
/// As for `free_pages_bulk_raw`, for each block.
unsafe fn free_run(run: *mut c_void, blocks: usize, order: Order) -> (usize, Error) {
    let (mut at, mut sum, mut error) = (0, 0, Error::None);
    while at < blocks {
        // As many as one section frees.
        let mut slots = [null_mut(); 64];
        let n = slots.len().min(blocks - at);
        for slot in &mut slots[..n] {
            *slot = run.cast::<u8>().wrapping_add(at.wrapping_mul(order.bytes()));
            at += 1;
        }
        // SAFETY: the caller says so.
        match unsafe { pagemill::free_pages_bulk_raw(&mut slots[..n], order) } {
            Ok(freed) => sum += freed,
            Err((freed, misuse)) => {
                sum += freed;
                error = if error == Error::None { misuse.into() } else { error };
                if freed == 0 {
                    break;
                }
            }
        }
    }
    (sum, error)
}

/// A misuse, as the hook of `pagemill_on_misuse` gets it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MisuseReport {
    /// What is wrong: one of the errors 3xx.
    pub error: Error,
    /// The pointer that was refused.
    pub pointer: *mut c_void,
}

/// Sets a function that is called at each detected misuse, besides the error of the call that found it; null for none. It may run
/// in the middle of a request and in a signal handler, so it must do only what a signal handler may.
///
/// Threads: any. Signal handlers: yes.
#[unsafe(no_mangle)]
pub extern "C" fn pagemill_on_misuse(hook: Option<unsafe extern "C" fn(report: *const MisuseReport)>) {
    // Release pairs with the Acquire in `report`.
    HOOK.store(hook.map_or(null_mut(), |hook| hook as *mut ()), Release);
    pagemill::on_misuse(report);
}
static HOOK: AtomicPtr<()> = AtomicPtr::new(null_mut());

fn report(misuse: Misuse) {
    refuse(misuse.into(), core::ptr::with_exposed_provenance_mut(misuse.addr));
}

/// Tells the program's hook of a misuse, and returns its error.
pub(crate) fn refuse(error: Error, pointer: *mut c_void) -> Error {
    // Acquire pairs with the Release in `pagemill_on_misuse`.
    let hook = HOOK.load(Acquire);
    if !hook.is_null() {
        let report = MisuseReport { error, pointer };
        // SAFETY: `pagemill_on_misuse` alone stores here, functions of this type; the caller said what they may do.
        unsafe { core::mem::transmute::<*mut (), unsafe extern "C" fn(*const MisuseReport)>(hook)(&raw const report) };
    }
    error
}
