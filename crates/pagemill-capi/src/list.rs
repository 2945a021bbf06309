//! Lists of blocks, which own what is on them.
use crate::error::{Error, code};
use crate::handle::{self, handle};
use crate::page::order_of;
use core::ffi::c_void;
use core::ptr::null_mut;
use pagemill::{Block, BlockList};

/// A list of blocks of one order. It owns its blocks, and no pointer to them is handed out: free them by way of the list, or take them
/// off. Its links lie outside the blocks. The type is opaque. One thread at a time may use a list.
pub struct List;
handle!(List, BlockList, b"pm lists");

/// Makes an empty list. Null is never returned.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub extern "C" fn pagemill_list_create() -> *mut List {
    handle::open(BlockList::new())
}

/// Frees a list and all blocks on it.
///
/// Errors: 2xx for no open handle.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_list_destroy(list: *mut List) -> Error {
    // SAFETY: the caller passes null or a handle.
    code(unsafe { handle::close(list) }.map(drop))
}

/// The number of blocks on it; 0 for no open handle.
///
/// Threads: any. Signal handlers: yes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_list_length(list: *const List) -> usize {
    // SAFETY: the caller passes null or a handle.
    unsafe { handle::get(list) }.map_or(0, BlockList::len)
}

/// Takes the block at the head off the list. Its order is that of the request that put it there. Null if the list is empty, or for no open
/// handle.
///
/// Threads: any. Signal handlers: yes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_list_pop(list: *mut List) -> *mut c_void {
    // SAFETY: the caller passes null or a handle that nobody else uses.
    let popped = unsafe { handle::get_mut(list) }.ok().and_then(|list| list.pop());
    popped.map_or(null_mut(), |block| block.into_raw().0.cast())
}

/// Puts a block at the tail of a list, which owns it from then on.
///
/// Errors: 3xx as for `pagemill_free_pages`, `PAGEMILL_ERROR_LIST_ORDER` if the list has blocks of another order. The block stays the
/// caller's then.
///
/// Threads: any. Signal handlers: yes for order 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_list_push(list: *mut List, block: *mut c_void, order: u32) -> Error {
    let push = || {
        // SAFETY: the caller passes null or a handle that nobody else uses.
        let list = unsafe { handle::get_mut(list) }?;
        // SAFETY: the caller gives up the block, or it is refused.
        let block = unsafe { Block::from_raw(block.cast(), order_of(order)?) }?;
        list.push(block).map_err(|block| {
            _ = block.into_raw();
            Error::ListOrder
        })
    };
    code(push())
}

/// Calls `each` with each block, from the head on. `user` is passed through. The blocks stay the list's: freeing one is refused. The
/// function must not use the list, which is empty meanwhile, and it must return: no exception, no longjmp.
///
/// Errors: 2xx if an argument is wrong.
///
/// Threads: any. Signal handlers: yes, if `each` may be called there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_list_each(
    list: *mut List,
    each: Option<unsafe extern "C" fn(block: *mut c_void, user: *mut c_void)>,
    user: *mut c_void,
) -> Error {
    let visit = || {
        let each = each.ok_or(Error::Argument)?;
        // SAFETY: the caller passes null or a handle that nobody else uses; so it is below.
        let mut blocks = core::mem::take(unsafe { handle::get_mut(list) }?);
        // SAFETY: the caller passes a function that takes a block, and what it wants to see besides.
        blocks.iter_mut().for_each(|block| unsafe { each(block.as_mut_ptr().cast(), user) });
        // SAFETY: as above. If the function has closed the list, its blocks are freed.
        let list = unsafe { handle::get_mut(list) }?;
        let mut added = core::mem::replace(list, blocks);
        Ok(list.append(&mut added)?)
    };
    code(visit())
}

/// Moves all blocks of `other` to the tail of `list`, in constant time.
///
/// Errors: 2xx for no open handle, or twice the same, `PAGEMILL_ERROR_LIST_ORDER` if both have blocks, of different orders. Nothing has
/// changed then.
///
/// Threads: any. Signal handlers: yes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_list_append(list: *mut List, other: *mut List) -> Error {
    if core::ptr::eq(list, other) {
        return Error::Argument;
    }
    let append = || {
        // SAFETY: the caller passes null or handles that nobody else uses; they are different.
        let (list, other) = unsafe { (handle::get_mut(list)?, handle::get_mut(other)?) };
        Ok(list.append(other)?)
    };
    code(append())
}

/// Frees all blocks on a list, in bulk. Returns how many; 0 for no open handle.
///
/// Threads: any. Signal handlers: yes for order 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_list_clear(list: *mut List) -> usize {
    // SAFETY: the caller passes null or a handle that nobody else uses.
    unsafe { handle::get_mut(list) }.map_or(0, BlockList::clear)
}
