//! Pools with a reserve: of blocks, or of whatever a pair of functions makes.
//!
//! A pool's own type keeps blocks as owned, so that a pointer which comes back is checked before the reserve has it.
use crate::allocator::Allocator;
use crate::bulk::{self, Bulk};
use crate::error::{Error, code};
use crate::gfp;
use crate::handle::{self, handle};
use crate::page::{order_of, refuse};
use crate::sized;
use core::ffi::c_void;
use core::ptr::null_mut;
// By another name: cbindgen would take it for this crate's.
use pagemill::{Block, Bulk as Request, Exact, Order};

/// A pool that keeps a reserve of elements: a request for as many as the reserve has, which may wait, always succeeds as long as other
/// owners free theirs. The type is opaque. Any thread may use a pool.
///
/// Code that holds elements of a pool must not wait for more of the same pool: it asks for all at once.
///
/// The child of a `fork` goes on with the reserve that there was. Elements of other threads stay handed out there for ever, so it may release the
/// pool, not destroy it.
pub struct Mempool;
handle!(Mempool, pagemill::Mempool<Source>, b"pm mpool");

type Alloc = unsafe extern "C" fn(gfp: u32, user: *mut c_void) -> *mut c_void;
type Free = unsafe extern "C" fn(element: *mut c_void, user: *mut c_void);

/// Where a pool has its elements from.
pub(crate) enum Source {
    Blocks { allocator: pagemill::Allocator, order: Order },
    Functions { alloc: Alloc, free: Free, user: *mut c_void },
}

/// An element in the reserve, or on its way.
pub(crate) enum Element {
    Block(Block),
    Pointer(*mut c_void),
}

// SAFETY: the C program promises that its functions and what they get may be used by any thread, at `pagemill_mempool_create`.
unsafe impl Send for Source {}
// SAFETY: as above.
unsafe impl Sync for Source {}
// SAFETY: as above.
unsafe impl Send for Element {}

impl Element {
    /// As C has it.
    fn into_raw(self) -> *mut c_void {
        match self {
            Self::Block(block) => block.into_raw().0.cast(),
            Self::Pointer(pointer) => pointer,
        }
    }
}

impl pagemill::Source for Source {
    type Item = Element;

    fn alloc(&self, request: Request<'_, Exact, Element>) -> Result<Option<Element>, pagemill::Error> {
        let mut made = None;
        self.deliver(request, 1, &mut |element| made = Some(element))?;
        Ok(made)
    }

    fn free(&self, element: Element) {
        match (self, element) {
            (Self::Functions { free, user, .. }, Element::Pointer(element)) => {
                // SAFETY: the pool's own function, for an element that it made or that the program says it did.
                unsafe { free(element, *user) }
            }
            (_, block) => drop(block),
        }
    }

    fn fill(
        &self,
        request: Request<'_, Exact, Element>,
        slots: &mut [Option<Element>],
    ) -> Result<usize, pagemill::Error> {
        let n = slots.iter().filter(|slot| slot.is_none()).count();
        let mut holes = slots.iter_mut().filter(|slot| slot.is_none());
        self.deliver(request, n, &mut |element| _ = holes.next().map(|slot| *slot = Some(element)))
    }

    fn deliver(
        &self,
        request: Request<'_, Exact, Element>,
        count: usize,
        each: &mut dyn FnMut(Element),
    ) -> Result<usize, pagemill::Error> {
        match self {
            Self::Blocks { allocator, order } => {
                let request = request.for_up_to::<Block>(count).order(*order);
                Ok(allocator.alloc_pages_bulk_callback(request, |block| each(Element::Block(block)))?.blocks)
            }
            Self::Functions { alloc, user, .. } => {
                for delivered in 0..count {
                    // SAFETY: the pool's own function.
                    match unsafe { alloc(request.flags().as_bits(), *user) } {
                        element if element.is_null() => return Ok(delivered),
                        element => each(Element::Pointer(element)),
                    }
                }
                Ok(count)
            }
        }
    }

    fn order(&self) -> Order {
        if let Self::Blocks { order, .. } = self { *order } else { Order::ZERO }
    }

    fn is_own(&self, element: &Element) -> bool {
        match (self, element) {
            (Self::Blocks { allocator, order }, Element::Block(block)) => {
                block.order() == *order && allocator.has_memory_at(block.as_ptr())
            }
            (Self::Functions { .. }, Element::Pointer(_)) => true,
            _ => false,
        }
    }

    fn renew(&self, element: &mut Element, gfp: pagemill::Gfp) {
        if let Element::Block(block) = element
            && gfp.contains(pagemill::Gfp::ZERO)
        {
            block.fill(0);
        }
    }

    fn charged_pages(&self) -> pagemill::PageCount {
        if let Self::Blocks { order, .. } = self { order.pages() } else { pagemill::PageCount::new(0) }
    }
}

/// Makes a pool of blocks of 2^order pages, with a reserve of `min_nr` of them. `*pool` gets the handle, or null.
///
/// Errors: 1xx if the allocator has too few, 2xx if an argument is wrong.
///
/// Threads: any. Signal handlers: no. It may reclaim, and wait for locks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_mempool_create_pages(
    allocator: *mut Allocator,
    order: u32,
    min_nr: usize,
    pool: *mut *mut Mempool,
) -> Error {
    let source = || {
        // SAFETY: the caller passes null or a handle.
        let allocator = unsafe { handle::get(allocator) }?.clone();
        Ok(Source::Blocks { allocator, order: order_of(order)? })
    };
    // SAFETY: the caller passes null or a place for a pointer.
    unsafe { create(source(), min_nr, pool) }
}

/// Makes a pool of elements that `alloc` makes and `free` ends, with a reserve of `min_nr` of them. `*pool` gets the handle, or null.
///
/// `alloc` returns null if there is no memory now; `gfp` says what it may do, and a pool asks with `PAGEMILL_GFP_NOWAIT` first. Any thread may call
/// the functions, several at the same time; `user` is passed through. They must return: no exception, no longjmp.
///
/// Errors: 1xx if `alloc` makes too few, 2xx if an argument is wrong.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_mempool_create(
    alloc: Option<unsafe extern "C" fn(gfp: u32, user: *mut c_void) -> *mut c_void>,
    free: Option<unsafe extern "C" fn(element: *mut c_void, user: *mut c_void)>,
    user: *mut c_void,
    min_nr: usize,
    pool: *mut *mut Mempool,
) -> Error {
    let source = alloc.zip(free).map(|(alloc, free)| Source::Functions { alloc, free, user }).ok_or(Error::Argument);
    // SAFETY: the caller passes null or a place for a pointer.
    unsafe { create(source, min_nr, pool) }
}

/// # Safety
/// Null, or a place for a pointer.
unsafe fn create(source: Result<Source, Error>, min_nr: usize, pool: *mut *mut Mempool) -> Error {
    // SAFETY: the caller says so.
    unsafe { handle::make(pool, || Ok(pagemill::Mempool::new(source?, min_nr)?)) }
}

/// Allocates one element. `*element` gets it, or null.
///
/// Errors: 1xx if neither the source nor the reserve has one and `gfp` does not wait.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_mempool_alloc(pool: *mut Mempool, gfp: u32, element: *mut *mut c_void) -> Error {
    // SAFETY: the caller passes null or a place for a pointer.
    let Some(place) = (unsafe { element.as_mut() }) else { return Error::Argument };
    *place = null_mut();
    let mut alloc = || {
        // SAFETY: the caller passes null or a handle.
        *place = unsafe { handle::get(pool) }?.alloc_raw(gfp::gfp(gfp)?)?.into_raw();
        Ok(())
    };
    code(alloc())
}

/// Hands `request->most` elements to `each`, which owns them from then on. `user` is passed through. The function must return: no exception, no
/// longjmp. The request's `least` and `order` do not matter. `*delivered`, unless the pointer is null, gets the number of elements.
///
/// Errors: 1xx if the request may not wait, or not any longer: what was handed over until then stays with its owner. 2xx if an argument is wrong;
/// a request above the reserve is `PAGEMILL_ERROR_ABOVE_RESERVE`.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_mempool_alloc_bulk_callback(
    pool: *mut Mempool,
    request: *const Bulk,
    each: Option<unsafe extern "C" fn(element: *mut c_void, user: *mut c_void)>,
    user: *mut c_void,
    delivered: *mut usize,
) -> Error {
    // SAFETY: the caller passes a function that takes an element, and what it wants to see besides.
    let hand = each.map(|each| move |element| unsafe { each(element, user) });
    // SAFETY: the caller passes null or a handle, null or a request, and null or a place for a number.
    unsafe { take(pool, request, |bulk| Ok((bulk.n(), hand.ok_or(Error::Argument)?)), delivered) }
}

/// Fills the null slots among the first n of an array, in ascending order. n is `request->most`; its `least` and `order` do not matter.
/// `*added`, unless the pointer is null, gets the number of slots that it filled.
///
/// Errors: as for `pagemill_mempool_alloc_bulk_callback`; what was delivered stays in its slots.
///
/// Threads: any; nobody else may use the array meanwhile. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_mempool_alloc_bulk_array(
    pool: *mut Mempool,
    request: *const Bulk,
    slots: *mut *mut c_void,
    added: *mut usize,
) -> Error {
    let holes = |bulk: &Bulk| {
        // SAFETY: the caller passes n slots.
        let slots = unsafe { bulk::slots_of(slots, bulk.n()) }?;
        let n = slots.iter().filter(|slot| slot.is_null()).count();
        let mut holes = slots.iter_mut().filter(|slot| slot.is_null());
        Ok((n, move |element: *mut c_void| _ = holes.next().map(|slot| *slot = element.cast())))
    };
    // SAFETY: the caller passes null or a handle, null or a request, and null or a place for a number.
    unsafe { take(pool, request, holes, added) }
}

/// Takes as many elements as `wanted` says, and hands them to its function.
///
/// # Safety
/// `pool` is null or a handle, `request` null or a request, `delivered` null or a place for a number.
unsafe fn take<F: FnMut(*mut c_void)>(
    pool: *mut Mempool,
    request: *const Bulk,
    wanted: impl FnOnce(&Bulk) -> Result<(usize, F), Error>,
    delivered: *mut usize,
) -> Error {
    let mut count = 0;
    let take = || {
        // SAFETY: the caller says so.
        let (pool, bulk) = unsafe { (handle::get(pool)?, sized::read(request)?) };
        bulk.check_counts()?;
        let (n, mut each) = wanted(bulk)?;
        let request = Request::<Exact, Element>::exact(n).gfp(gfp::gfp(bulk.gfp)?);
        // SAFETY: the caller says so.
        let request = unsafe { bulk.with_options(request) }?;
        pool.alloc_bulk_callback_raw(request, |element| {
            count += 1;
            each(element.into_raw());
        })?;
        Ok(())
    };
    let error = code(take());
    // SAFETY: the caller says so.
    if let Some(place) = unsafe { delivered.as_mut() } {
        *place = count;
    }
    error
}

/// Frees one element: to the reserve if it is not full, else to the source.
///
/// Errors: for a pool of blocks 3xx as for `pagemill_free_pages`; nothing has changed then. Elements of functions are not checked. 2xx if an
/// argument is wrong.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_mempool_free(pool: *mut Mempool, element: *mut c_void) -> Error {
    let mut slot = element;
    // SAFETY: the caller passes null or a handle, and gives up the element.
    let error = unsafe { pagemill_mempool_free_bulk(pool, &raw mut slot, 1, null_mut()) };
    if element.is_null() && error == Error::None { refuse(Error::Foreign, element) } else { error }
}

/// Frees the elements of an array's first n slots, in one section. Empties the slots of those that it frees, and passes over null slots. `*freed`,
/// unless the pointer is null, gets their number.
///
/// Errors: as for `pagemill_mempool_free`, the first one's: those slots are as they were, all others are freed.
///
/// Threads: any; nobody else may use the array meanwhile. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_mempool_free_bulk(
    pool: *mut Mempool,
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
        // As many as one section frees.
        for slots in slots.chunks_mut(64) {
            let mut elements = [const { None }; 64];
            // SAFETY: the caller gives up the elements, or they are refused.
            let own = |element: *mut u8| unsafe { pool.source().element(element.cast()) };
            refused = refused.and(bulk::own_slots(slots, &mut elements, own));
            count += pool.free_bulk_raw(&mut elements);
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

impl Source {
    /// What C gives back, checked.
    ///
    /// # Safety
    /// The caller owns the element, or it is refused.
    unsafe fn element(&self, pointer: *mut c_void) -> Result<Element, Error> {
        match self {
            Self::Functions { .. } => Ok(Element::Pointer(pointer)),
            Self::Blocks { allocator, order } => {
                if !allocator.has_memory_at(pointer.cast()) {
                    return Err(refuse(Error::Foreign, pointer));
                }
                // SAFETY: the caller says so.
                Ok(Element::Block(unsafe { Block::from_raw(pointer.cast(), *order) }?))
            }
        }
    }
}

/// Changes the size of the reserve.
///
/// Errors: 1xx if the source cannot make enough, 2xx if `min_nr` is 0 or below the size of a request that waits. The size is then as it was.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_mempool_resize(pool: *mut Mempool, min_nr: usize) -> Error {
    // SAFETY: the caller passes null or a handle.
    code(unsafe { handle::get(pool) }.and_then(|pool| Ok(pool.resize(min_nr)?)))
}

/// A pool's size, elements and pressure. Counts are of elements.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MempoolStats {
    /// The size of a full reserve.
    pub min_nr: usize,
    /// Elements in the reserve now.
    pub reserve: usize,
    /// The fewest in the reserve since the pool was made or resized.
    pub low_water: usize,
    /// Elements that are handed out.
    pub out: usize,
    /// Elements that left the reserve since the pool was made.
    pub from_reserve: u64,
    /// Requests that wait now.
    pub waiting: usize,
    /// Waits that ended.
    pub waits: u64,
    /// Their total time, in microseconds.
    pub waited_us: u64,
    /// The longest of them, in microseconds.
    pub longest_wait_us: u64,
    /// More elements were freed than were out, or an element was not the pool's.
    pub misused: u64,
}

/// Reads a pool's statistics.
///
/// Errors: 2xx if an argument is wrong.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_mempool_stats(pool: *const Mempool, stats: *mut MempoolStats) -> Error {
    let read = || {
        // SAFETY: the caller passes null or a handle, and null or a place for statistics.
        let (pool, place) = unsafe { (handle::get(pool)?, stats.as_mut().ok_or(Error::Argument)?) };
        let found = pool.stats();
        *place = MempoolStats {
            min_nr: found.min_nr,
            reserve: found.reserve,
            low_water: found.low_water,
            out: found.out,
            from_reserve: found.from_reserve,
            waiting: found.waiting,
            waits: found.waits,
            waited_us: found.waited_us,
            longest_wait_us: found.longest_wait_us,
            misused: found.misused,
        };
        Ok(())
    };
    code(read())
}

/// Destroys a pool of which no element is handed out, and frees its reserve. `*out`, unless the pointer is null, gets the number of elements that
/// are handed out.
///
/// Errors: `PAGEMILL_ERROR_IN_USE` if there are any; nothing has changed then.
///
/// Threads: any, and no thread may use the handle meanwhile or later. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_mempool_destroy(pool: *mut Mempool, out: *mut usize) -> Error {
    // SAFETY: the caller passes null or a handle, and null or a place for a number.
    let (found, place) = unsafe { (handle::get(pool).map(|pool| pool.stats().out), out.as_mut()) };
    if let (Some(place), Ok(found)) = (place, found) {
        *place = found;
    }
    match found {
        Ok(0) => {
            // SAFETY: the caller passes a handle.
            unsafe { pagemill_mempool_release(pool) }
        }
        Ok(_) => Error::InUse,
        Err(error) => error,
    }
}

/// Lets a pool go, and frees its reserve. Blocks that are handed out stay valid: `pagemill_free_pages` frees them.
///
/// Errors: 2xx for no open handle.
///
/// Threads: any, and no thread may use the handle meanwhile or later. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_mempool_release(pool: *mut Mempool) -> Error {
    // SAFETY: the caller passes null or a handle.
    code(unsafe { handle::close(pool) }.map(drop))
}
