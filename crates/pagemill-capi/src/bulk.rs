//! Pages in bulk: the request, and its forms.
use crate::allocator::{Allocator, policy_of};
use crate::error::{Error, code};
use crate::gfp::gfp;
use crate::handle::{self, handle};
use crate::list::List;
use crate::page::order_of;
use crate::sized::{self, BeginsWithSize};
use core::ffi::{c_int, c_void};
use core::mem::MaybeUninit;
use core::ptr::{NonNull, null_mut};
use core::slice;
use core::sync::atomic::{AtomicBool, Ordering::Relaxed};
use core::time::Duration;
use pagemill::{AtLeast, Block, NodeMask, PageCount, Run, Shortfall, UpTo};

/// Ends the waits of requests that name it. The type is opaque.
pub struct Cancel;
handle!(Cancel, pagemill::Cancel, b"pmcancel");

/// A limit on pages, which requests that name it are charged to. The type is opaque.
pub struct Account;
handle!(Account, pagemill::Account, b"pm accnt");

/// The pages are committed before they are delivered: the first access to a page does not fault.
pub const PAGEMILL_BULK_POPULATED: u32 = 1;

/// A bulk request. `pagemill_bulk_up_to`, `pagemill_bulk_at_least` and `pagemill_bulk_exact` make one; set the other fields as you like.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Bulk {
    /// The size of this structure, in bytes.
    pub size: usize,
    /// The number of blocks without which the request fails, and delivers nothing. In the array form occupied slots count. 0: it
    /// delivers what it gets, and fewer than `most` are no error.
    pub least: i64,
    /// The number of blocks that it asks for; in the array form, of slots that it looks at.
    pub most: i64,
    /// Flags: `PAGEMILL_GFP_KERNEL` and so on. 0 is `PAGEMILL_GFP_NOWAIT`.
    pub gfp: u32,
    /// Each block has 2^order pages.
    pub order: u32,
    /// The nodes that it may take memory of, bit n for node n. 0: all.
    pub nodes: u64,
    /// The nodes of the policy.
    pub policy_nodes: u64,
    /// One of `PAGEMILL_POLICY_DEFAULT` to `PAGEMILL_POLICY_LOCAL`.
    pub policy: u32,
    /// `PAGEMILL_BULK_POPULATED`.
    pub flags: u32,
    /// How long a request that may wait does so, in nanoseconds. 0: without a limit of its own.
    pub timeout_ns: u64,
    /// Ends its wait, or null.
    pub cancel: *const Cancel,
    /// Is charged for its pages, or null.
    pub account: *const Account,
}
// SAFETY: integers and pointers, the size first.
unsafe impl BeginsWithSize for Bulk {}

/// The result of the list, callback and runs forms.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Delivered {
    /// Blocks delivered by this call.
    pub blocks: usize,
    /// How many are missing.
    pub missing: usize,
    /// Why: one of the errors 1xx, or 0 if none is missing.
    pub why: c_int,
}

/// The result of the array form, over the array's first n slots.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Filled {
    /// Slots that this call filled.
    pub added: usize,
    /// Slots that are occupied now.
    pub occupied: usize,
    /// The first empty slot; n if there is none. All slots before it are occupied.
    pub first_hole: usize,
    /// How many slots are empty.
    pub missing: usize,
    /// Why: one of the errors 1xx, or 0 if none is empty.
    pub why: c_int,
}

/// Contiguous blocks.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct PageRun {
    /// The first block's address.
    pub start: *mut c_void,
    /// How many blocks.
    pub blocks: usize,
}

impl Bulk {
    /// The number of blocks or slots, once it is known to be valid.
    pub(crate) fn n(&self) -> usize {
        self.most as usize
    }

    /// Refuses a count that is negative or above INT_MAX (C3.3).
    #[inline]
    pub(crate) fn check_counts(&self) -> Result<(), Error> {
        const MAX: u64 = i32::MAX as u64;
        // As an unsigned number, a negative count is above the largest.
        if self.least as u64 > MAX || self.most as u64 > MAX {
            warn_once(if self.least as u64 > MAX { self.least } else { self.most });
            return Err(Error::Count);
        }
        Ok(())
    }

    /// The library's request.
    ///
    /// # Safety
    /// The handles are null or open.
    #[inline]
    unsafe fn request(&self) -> Result<pagemill::Bulk<'_, AtLeast, Block>, Error> {
        let request = self.plain()?.order(order_of(self.order)?);
        // SAFETY: the caller says so.
        if self.is_plain() { Ok(request) } else { unsafe { self.with_options(request) } }
    }

    /// The same without what most requests leave at 0.
    #[inline(always)]
    fn plain(&self) -> Result<pagemill::Bulk<'_, AtLeast, Block>, Error> {
        self.check_counts()?;
        Ok(pagemill::Bulk::at_least(self.least as usize, self.n()).gfp(gfp(self.gfp)?))
    }

    #[inline]
    fn is_plain(&self) -> bool {
        (self.nodes | self.timeout_ns) == 0
            && self.order == 0
            && (self.policy | self.flags) == 0
            && self.cancel.is_null()
            && self.account.is_null()
    }

    /// # Safety
    /// The handles are null or open.
    #[cold]
    pub(crate) unsafe fn with_options<'a, N, T>(
        &'a self,
        request: pagemill::Bulk<'a, N, T>,
    ) -> Result<pagemill::Bulk<'a, N, T>, Error> {
        if self.flags & !PAGEMILL_BULK_POPULATED != 0 {
            return Err(Error::Invalid);
        }
        let mut request = if self.flags != 0 { request.populated() } else { request };
        if self.nodes != 0 {
            request = request.nodes(NodeMask::from_bits(self.nodes));
        }
        if let Some(policy) = policy_of(self.policy, self.policy_nodes)? {
            request = request.policy(policy);
        }
        if self.timeout_ns != 0 {
            request = request.timeout(Duration::from_nanos(self.timeout_ns));
        }
        if !self.cancel.is_null() {
            // SAFETY: the caller says that it is a handle.
            request = request.cancel(unsafe { handle::get(self.cancel) }?);
        }
        if !self.account.is_null() {
            // SAFETY: the caller says that it is a handle.
            request = request.account(unsafe { handle::get(self.account) }?);
        }
        Ok(request)
    }
}

/// Says that a count is refused, on standard error, the first time in a process.
#[cold]
fn warn_once(count: i64) {
    static HAS_WARNED: AtomicBool = AtomicBool::new(false);
    if HAS_WARNED.swap(true, Relaxed) {
        return;
    }
    let warning = format!("pagemill: a bulk request for {count} blocks is refused: a count is 0 to INT_MAX\n");
    // If standard error is closed there is nobody to warn.
    _ = rustix::io::write(rustix::stdio::stderr(), warning.as_bytes());
}

/// A number of slots.
pub(crate) fn count(n: i64) -> Result<usize, Error> {
    let valid = i32::try_from(n).ok().and_then(|n| usize::try_from(n).ok());
    valid.ok_or_else(|| {
        warn_once(n);
        Error::Count
    })
}

/// The slots of an array.
///
/// # Safety
/// Null, or so many slots, which nobody else uses.
pub(crate) unsafe fn slots_of<'a>(slots: *mut *mut c_void, n: usize) -> Result<&'a mut [*mut u8], Error> {
    if slots.is_null() && n > 0 {
        return Err(Error::Argument);
    }
    // SAFETY: the caller says so.
    Ok(unsafe { slice::from_raw_parts_mut(start(slots.cast::<*mut u8>()).as_ptr(), n) })
}

/// What an array's slots point to, as owned. Slots become empty, but for those that `own` refuses: the first refusal is the error. Null
/// slots are passed over.
pub(crate) fn own_slots<T>(
    slots: &mut [*mut u8],
    owned: &mut [Option<T>],
    own: impl Fn(*mut u8) -> Result<T, Error>,
) -> Result<(), Error> {
    let mut refused = Ok(());
    for (slot, place) in slots.iter_mut().zip(owned).filter(|(slot, _)| !slot.is_null()) {
        match own(*slot) {
            Ok(element) => {
                *place = Some(element);
                *slot = null_mut();
            }
            Err(error) => refused = refused.and(Err(error)),
        }
    }
    refused
}

/// What an empty array begins at, which no slot lies at.
fn start<T>(slots: *mut T) -> NonNull<T> {
    NonNull::new(slots).unwrap_or(NonNull::dangling())
}

fn why(shortfall: Option<Shortfall>) -> (usize, c_int) {
    shortfall.map_or((0, 0), |short| (short.missing, Error::from(short.why) as c_int))
}

/// Writes a result where the caller wants it, and returns the error.
///
/// # Safety
/// Null, or a place for a result.
pub(crate) unsafe fn deliver<T: Default, R: Into<T>>(result: Result<R, Error>, to: *mut T) -> Error {
    let (value, error) = match result {
        Ok(value) => (value.into(), Error::None),
        Err(error) => (T::default(), error),
    };
    // SAFETY: the caller says so.
    if let Some(to) = unsafe { to.as_mut() } {
        *to = value;
    }
    error
}

impl From<pagemill::Delivered> for Delivered {
    fn from(delivered: pagemill::Delivered) -> Self {
        let (missing, why) = why(delivered.shortfall);
        Self { blocks: delivered.blocks, missing, why }
    }
}

impl From<pagemill::Filled> for Filled {
    fn from(filled: pagemill::Filled) -> Self {
        let (missing, why) = why(filled.shortfall);
        Self { added: filled.added, occupied: filled.occupied, first_hole: filled.first_hole, missing, why }
    }
}

/// Fills the null slots among the first n of an array, in ascending order (the array form). n is `request->most`. Slots that are not
/// null are occupied; what they point to is not looked at. Slots from n on are neither read nor written. Free the blocks with
/// `pagemill_free_pages_bulk` or singly.
///
/// `filled` may be null. If the request is refused, all its fields are 0.
///
/// Errors: 1xx if the request did not get its least number, 2xx if an argument is wrong. The array is then as it was. A count that
/// is negative or above INT_MAX is PAGEMILL_ERROR_COUNT, and warned of once on standard error.
///
/// Threads: any; nobody else may use the array meanwhile. Signal handlers: yes for order 0, with `PAGEMILL_GFP_NOWAIT` or
/// `PAGEMILL_GFP_ATOMIC` and a valid count.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_alloc_pages_bulk_array(
    allocator: *mut Allocator,
    request: *const Bulk,
    slots: *mut *mut c_void,
    filled: *mut Filled,
) -> Error {
    let fill = || {
        // SAFETY: the caller passes null or a handle, and null or a structure of the size that it says, with handles in it.
        let (allocator, bulk) = unsafe { (handle::get(allocator)?, sized::read(request)?) };
        // Not more of the request than is used is written to memory.
        let plain = bulk.plain()?;
        // SAFETY: the caller passes n slots.
        let slots = unsafe { slots_of(slots, bulk.n()) }?;
        if bulk.is_plain() {
            return Ok(allocator.alloc_pages_bulk_array_raw(plain, slots)?);
        }
        // SAFETY: as above.
        Ok(allocator.alloc_pages_bulk_array_raw(unsafe { bulk.request() }?, slots)?)
    };
    // SAFETY: the caller passes null or a place for a result.
    unsafe { deliver(fill(), filled) }
}

/// Fills an array that is known to be empty, without reading it: as `pagemill_alloc_pages_bulk_array`, but the first n slots may hold
/// anything before. Slots that get no block become null, also if the request fails.
///
/// Errors, threads and signal handlers: as for `pagemill_alloc_pages_bulk_array`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_alloc_pages_bulk_array_fresh(
    allocator: *mut Allocator,
    request: *const Bulk,
    slots: *mut *mut c_void,
    filled: *mut Filled,
) -> Error {
    let fill = || {
        // SAFETY: as in `pagemill_alloc_pages_bulk_array`.
        let (allocator, bulk) = unsafe { (handle::get(allocator)?, sized::read(request)?) };
        let plain = bulk.plain()?;
        if slots.is_null() && bulk.most > 0 {
            return Err(Error::Argument);
        }
        let slots = start(slots.cast::<MaybeUninit<*mut u8>>()).as_ptr();
        // SAFETY: the caller passes n slots.
        let slots = unsafe { slice::from_raw_parts_mut(slots, bulk.n()) };
        if bulk.is_plain() {
            return Ok(allocator.alloc_pages_bulk_array_raw_fresh(plain, slots)?);
        }
        // SAFETY: as above.
        Ok(allocator.alloc_pages_bulk_array_raw_fresh(unsafe { bulk.request() }?, slots)?)
    };
    // SAFETY: the caller passes null or a place for a result.
    unsafe { deliver(fill(), filled) }
}

/// Adds blocks to the tail of a list, which may have some already (the list form).
///
/// `delivered` may be null. If the request is refused, all its fields are 0.
///
/// Errors: as for `pagemill_alloc_pages_bulk_array`; `PAGEMILL_ERROR_LIST_ORDER` if the list has blocks of another order. The list
/// is then as it was.
///
/// Threads: any; nobody else may use the list meanwhile. Signal handlers: as for `pagemill_alloc_pages_bulk_array`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_alloc_pages_bulk_list(
    allocator: *mut Allocator,
    request: *const Bulk,
    list: *mut List,
    delivered: *mut Delivered,
) -> Error {
    let extend = || {
        // SAFETY: the caller passes null or handles, and null or a structure of the size that it says, with handles in it.
        let (allocator, bulk, list) =
            unsafe { (handle::get(allocator)?, sized::read(request)?, handle::get_mut(list)?) };
        // SAFETY: as above.
        let request = unsafe { bulk.request() }?;
        Ok(allocator.alloc_pages_bulk_list(request, list)?)
    };
    // SAFETY: the caller passes null or a place for a result.
    unsafe { deliver(extend(), delivered) }
}

/// Hands each block to `each`, which owns it from then on (the callback form). `user` is passed through. The function may allocate and
/// free. It must return: no exception, no longjmp.
///
/// `delivered` may be null. If the request is refused, all its fields are 0.
///
/// Errors: 2xx if an argument is wrong, `PAGEMILL_ERROR_LEAST` if `request->least` is not 0. `each` was then not called.
///
/// Threads: any. Signal handlers: as for `pagemill_alloc_pages_bulk_array`, if `each` may be called there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_alloc_pages_bulk_callback(
    allocator: *mut Allocator,
    request: *const Bulk,
    each: Option<unsafe extern "C" fn(block: *mut c_void, user: *mut c_void)>,
    user: *mut c_void,
    delivered: *mut Delivered,
) -> Error {
    let call = || {
        // SAFETY: as in `pagemill_alloc_pages_bulk_list`.
        let (allocator, bulk) = unsafe { (handle::get(allocator)?, sized::read(request)?) };
        let each = each.ok_or(Error::Argument)?;
        bulk.check_counts()?;
        if bulk.least != 0 {
            return Err(Error::Least);
        }
        let request = pagemill::Bulk::up_to(bulk.n()).gfp(gfp(bulk.gfp)?);
        // SAFETY: as above.
        let request: pagemill::Bulk<'_, UpTo, Block> = unsafe { bulk.with_options(request) }?;
        // SAFETY: the caller passes a function that takes a block, and what it wants to see besides.
        let hand = |block: Block| unsafe { each(block.into_raw().0.cast(), user) };
        Ok(allocator.alloc_pages_bulk_callback(request.order(order_of(bulk.order)?), hand)?)
    };
    // SAFETY: the caller passes null or a place for a result.
    unsafe { deliver(call(), delivered) }
}

/// Delivers contiguous runs, neighbouring blocks merged, as an I/O vector wants them (the runs form). `runs` has room for `request->most`
/// runs: it may be that no two blocks are neighbours. `*n_runs` gets their number. Free them with `pagemill_free_run`, or each block on its own.
///
/// `delivered` may be null. If the request is refused, all its fields are 0.
///
/// Errors: as for `pagemill_alloc_pages_bulk_array`; `*n_runs` is then 0.
///
/// Threads: any. Signal handlers: no. It allocates memory with malloc, and a process without any ends.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_alloc_pages_bulk_runs(
    allocator: *mut Allocator,
    request: *const Bulk,
    runs: *mut PageRun,
    n_runs: *mut usize,
    delivered: *mut Delivered,
) -> Error {
    // SAFETY: the caller passes null or a place for a number.
    let Some(n_runs) = (unsafe { n_runs.as_mut() }) else { return Error::Argument };
    *n_runs = 0;
    let mut extend = || {
        // SAFETY: as in `pagemill_alloc_pages_bulk_list`.
        let (allocator, bulk) = unsafe { (handle::get(allocator)?, sized::read(request)?) };
        // SAFETY: as above.
        let request = unsafe { bulk.request() }?;
        if runs.is_null() && bulk.most > 0 {
            return Err(Error::Argument);
        }
        let mut found: Vec<Run<Block>> = Vec::new();
        let delivered = allocator.alloc_pages_bulk_runs(request, &mut found)?;
        for run in found {
            let (start, blocks, _) = run.into_raw();
            // SAFETY: the caller passes room for as many runs as blocks were asked for.
            unsafe { runs.add(*n_runs).write(PageRun { start: start.cast(), blocks }) };
            *n_runs += 1;
        }
        Ok(delivered)
    };
    // SAFETY: the caller passes null or a place for a result.
    unsafe { deliver(extend(), delivered) }
}

/// Frees the blocks of an array's first n slots, all of one order and of whichever allocators. Empties the slots of the blocks that
/// it frees, and passes over null slots. `*freed`, unless the pointer is null, gets their number.
///
/// Errors: 3xx if it refused some, the first one's: their slots are as they were, all others are freed. `PAGEMILL_ERROR_COUNT` for a number
/// that is negative or above INT_MAX, `PAGEMILL_ERROR_ORDER` for an order above 18.
///
/// Threads: any; nobody else may use the array meanwhile. Signal handlers: yes for order 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_free_pages_bulk(
    slots: *mut *mut c_void,
    n: i64,
    order: u32,
    freed: *mut usize,
) -> Error {
    let mut count = 0;
    let mut free = || {
        let order = order_of(order)?;
        // SAFETY: the caller passes n slots.
        let slots = unsafe { slots_of(slots, self::count(n)?) }?;
        // SAFETY: the caller gives up the blocks, or they are refused.
        match unsafe { pagemill::free_pages_bulk_raw(slots, order) } {
            Ok(n) => {
                count = n;
                Ok(())
            }
            Err((n, misuse)) => {
                count = n;
                Err(misuse.into())
            }
        }
    };
    let error = code(free());
    // SAFETY: the caller passes null or a place for a number.
    if let Some(freed) = unsafe { freed.as_mut() } {
        *freed = count;
    }
    error
}

/// Makes a cancel. Null is never returned.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub extern "C" fn pagemill_cancel_create() -> *mut Cancel {
    handle::open(pagemill::Cancel::new())
}

/// Ends the waits that are under way with it, and all later ones as they begin. Their requests deliver what they have, or fail.
///
/// Errors: 2xx for no open handle.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_cancel(cancel: *const Cancel) -> Error {
    // SAFETY: the caller passes null or a handle.
    code(unsafe { handle::get(cancel) }.map(pagemill::Cancel::cancel))
}

/// Frees a cancel that no request uses.
///
/// Errors: 2xx for no open handle.
///
/// Threads: any, and no thread may use the handle meanwhile or later. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_cancel_destroy(cancel: *mut Cancel) -> Error {
    // SAFETY: the caller passes null or a handle.
    code(unsafe { handle::close(cancel) }.map(drop))
}

/// Makes an account with a limit, in pages. Null is never returned.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub extern "C" fn pagemill_account_create(limit: usize) -> *mut Account {
    handle::open(pagemill::Account::new(PageCount::new(limit)))
}

/// How many pages are charged now; 0 for no open handle.
///
/// Threads: any. Signal handlers: yes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_account_charged(account: *const Account) -> usize {
    // SAFETY: the caller passes null or a handle.
    unsafe { handle::get(account) }.map_or(0, |account| account.charged().get())
}

/// Takes pages off the charge, but never below 0. Freeing pages does not: any thread may free, and none knows the account.
///
/// Errors: 2xx for no open handle.
///
/// Threads: any. Signal handlers: yes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_account_uncharge(account: *const Account, pages: usize) -> Error {
    // SAFETY: the caller passes null or a handle.
    code(unsafe { handle::get(account) }.map(|account| account.uncharge(PageCount::new(pages))))
}

/// Frees an account that no request uses.
///
/// Errors: 2xx for no open handle.
///
/// Threads: any, and no thread may use the handle meanwhile or later. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_account_destroy(account: *mut Account) -> Error {
    // SAFETY: the caller passes null or a handle.
    code(unsafe { handle::close(account) }.map(drop))
}
