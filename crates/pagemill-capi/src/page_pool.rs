//! Pools of pages that circulate between a consumer and whoever it hands them to.
//!
//! Rust's pool is an owned value of one thread, and its pages are handles. In C the consumer is whoever calls the functions for it; all other
//! threads get by with `home`, which never changes. A page that C holds is a raw pointer, whose state names the pool. Fragments are kept in a
//! table by their addresses: a page has no room for the states of all its parts.
use crate::allocator::{self, Allocator};
use crate::bulk;
use crate::error::{Error, code};
use crate::gfp;
use crate::handle::{self, handle};
use crate::page::{order_of, refuse};
use crate::sized::{self, BeginsWithSize};
use core::cell::UnsafeCell;
use core::ffi::{CStr, c_char, c_void};
use core::ptr::null_mut;
use pagemill::{Block, Ending, Frag, PagePoolHome, PageSource, PoolPage};
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// A pool of pages that circulate: its consumer takes pages from a cache that nobody else touches, and other threads return them by a ring.
/// Pages keep their contents, their place and so their device addresses. The type is opaque.
///
/// The functions for the consumer are called by one thread at a time: allocating, `PAGEMILL_PAGE_POOL_DIRECT`, statistics and the first call
/// that destroys. Any thread may return pages and fragments, also after that.
///
/// The child of a `fork` goes on with a copy of the pool, if no memory of the pool is shared with the parent; it must not use fragments.
pub struct PagePool;
handle!(PagePool, Pool, b"pm ppool");

type Source = PageSource<Block>;

pub(crate) struct Pool {
    /// None when it has ended. Only the consumer's functions look at it.
    consumer: UnsafeCell<Option<pagemill::PagePool<Source>>>,
    home: PagePoolHome<Source>,
    allocator: pagemill::Allocator,
    /// The fragments that are out, by their addresses.
    frags: Mutex<HashMap<usize, Frag<Source>>>,
    ending: OnceLock<Ending>,
}

impl Pool {
    fn frags(&self) -> MutexGuard<'_, HashMap<usize, Frag<Source>>> {
        self.frags.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The pool prefers memory of the node `node`: pages of others do not stay in it.
pub const PAGEMILL_PAGE_POOL_NODE: u32 = 1;

/// The caller is the consumer: a page goes to its cache.
pub const PAGEMILL_PAGE_POOL_DIRECT: u32 = 1;

/// What a pool is to be like. Set `size` to `sizeof(struct pagemill_page_pool_options)`, and whatever is not to be 0.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct PagePoolOptions {
    /// The size of this structure, in bytes.
    pub size: usize,
    /// Each page of the pool is a block of 2^order pages.
    pub order: u32,
    /// Pages that the ring has room for, up to 32768, rounded up to a power of two. 0: 1024. What finds it full goes back to the allocator.
    pub ring: u32,
    /// 0, or `PAGEMILL_PAGE_POOL_NODE`.
    pub flags: u32,
    /// The node of `PAGEMILL_PAGE_POOL_NODE`.
    pub node: u32,
    /// A name for observers, which is copied, or null.
    pub name: *const c_char,
}
// SAFETY: integers and a pointer, the size first.
unsafe impl BeginsWithSize for PagePoolOptions {}

/// Makes a pool of the allocator's pages. `options` may be null: single pages, a ring of 1024. `*pool` gets the handle, or null. The pool has
/// no pages at first.
///
/// Errors: `PAGEMILL_ERROR_SIZE` for a ring above 32768, 2xx if another argument is wrong.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_page_pool_create(
    allocator: *mut Allocator,
    options: *const PagePoolOptions,
    pool: *mut *mut PagePool,
) -> Error {
    let create = || {
        // SAFETY: the caller passes null or a handle.
        let allocator = unsafe { handle::get(allocator) }?;
        let default = PagePoolOptions { size: 0, order: 0, ring: 0, flags: 0, node: 0, name: null_mut() };
        // SAFETY: the caller passes a structure of the size that it says.
        let options = if options.is_null() { &default } else { unsafe { sized::read(options) }? };
        let source = PageSource::blocks(allocator, order_of(options.order)?);
        let made = match options.ring {
            0 => pagemill::PagePool::new(source),
            slots => pagemill::PagePool::with_ring(source, slots as usize)?,
        };
        let made = match options.flags {
            0 => made,
            PAGEMILL_PAGE_POOL_NODE => made.on_node(allocator::node(options.node)?),
            _ => return Err(Error::Invalid),
        };
        let made = if options.name.is_null() {
            made
        } else {
            // SAFETY: the caller passes a text with a 0 at its end.
            made.named(unsafe { CStr::from_ptr(options.name) }.to_string_lossy())
        };
        Ok(Pool {
            home: made.home(),
            consumer: UnsafeCell::new(Some(made)),
            allocator: allocator.clone(),
            frags: Mutex::default(),
            ending: OnceLock::new(),
        })
    };
    // SAFETY: the caller passes null or a place for a pointer.
    unsafe { handle::make(pool, create) }
}

/// The consumer's end of a pool that has not ended.
///
/// # Safety
/// Null or a handle, and the caller is the consumer.
unsafe fn consumer<'a>(pool: *mut PagePool) -> Result<&'a mut pagemill::PagePool<Source>, Error> {
    // SAFETY: the caller says so. Other threads do not look at it.
    unsafe { (*handle::get(pool)?.consumer.get()).as_mut() }.ok_or(Error::Handle)
}

/// Takes a page. `*page` gets it, or null. Its contents are what its last owner left, unless `gfp` has `PAGEMILL_GFP_ZERO`.
///
/// It comes from the cache. An empty cache is filled with up to 64 pages from the ring, else with up to 64 of the allocator in one request.
/// What the flags say of reclaim and waiting holds for that request; it never tries for all 64.
///
/// A page of a pool goes back by `pagemill_page_pool_put`, or leaves the pool by `pagemill_page_pool_release_page`: the functions for
/// ordinary pages refuse it.
///
/// Errors: 1xx if cache, ring and allocator have none; 2xx if an argument is wrong, or the pool has ended.
///
/// Threads: the consumer. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_page_pool_alloc(pool: *mut PagePool, gfp: u32, page: *mut *mut c_void) -> Error {
    // SAFETY: the caller passes null or a place for a pointer.
    let Some(place) = (unsafe { page.as_mut() }) else { return Error::Argument };
    *place = null_mut();
    let mut alloc = || {
        // SAFETY: the caller passes null or a handle, and is the consumer.
        let page = unsafe { consumer(pool) }?.alloc(gfp::gfp(gfp)?)?;
        *place = PoolPage::into_raw(page).cast();
        Ok(())
    };
    code(alloc())
}

/// Fills the null slots among the first n of an array, in ascending order, as many as it can. `*added`, unless the pointer is null, gets
/// their number.
///
/// Errors: as for `pagemill_page_pool_alloc`, if it filled none of them.
///
/// Threads: the consumer; nobody else may use the array meanwhile. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_page_pool_alloc_bulk(
    pool: *mut PagePool,
    gfp: u32,
    slots: *mut *mut c_void,
    n: i64,
    added: *mut usize,
) -> Error {
    let mut count = 0;
    let mut alloc = || {
        // SAFETY: the caller passes null or a handle, and is the consumer.
        let (pool, gfp) = (unsafe { consumer(pool) }?, gfp::gfp(gfp)?);
        // SAFETY: the caller passes n slots.
        let slots = unsafe { bulk::slots_of(slots, bulk::count(n)?) }?;
        for slots in slots.chunks_mut(64) {
            let mut pages = [const { None }; 64];
            let holes = slots.iter().filter(|slot| slot.is_null()).count();
            let added = match pool.alloc_bulk(gfp, &mut pages[..holes]) {
                Err(error) if count == 0 => return Err(error.into()),
                added => added.unwrap_or(0),
            };
            let empty = slots.iter_mut().filter(|slot| slot.is_null());
            let made = pages.iter_mut().filter_map(Option::take).map(PoolPage::into_raw);
            empty.zip(made).for_each(|(slot, page)| *slot = page);
            count += added;
            if added < holes {
                break;
            }
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

/// Returns one page to its pool: to the ring; with `PAGEMILL_PAGE_POOL_DIRECT` to the consumer's cache. Where there is no room, and when the
/// pool has ended, it goes back to the allocator. A device must be done with it.
///
/// Errors: 3xx for any pointer that is not that of a page of this pool which is out: null, returned already, another pool's, an ordinary
/// page, a fragment. It changes nothing then. 2xx if another argument is wrong.
///
/// Threads: any; with `PAGEMILL_PAGE_POOL_DIRECT` the consumer. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_page_pool_put(pool: *mut PagePool, page: *mut c_void, flags: u32) -> Error {
    let put = || {
        // SAFETY: the caller passes null or a handle.
        let (home, is_direct) = (unsafe { handle::get(pool) }?.home, is_direct(flags)?);
        // SAFETY: the caller gives up the page, or it is refused.
        let page = unsafe { home.from_raw(page.cast()) }?;
        if is_direct {
            // SAFETY: the caller passes a handle, and is the consumer.
            match unsafe { consumer(pool) } {
                Ok(consumer) => consumer.put(page),
                Err(_) => drop(page), // It has ended.
            }
        } else {
            // Nothing of the pool is used from here on: with its last page it may be destroyed.
            drop(page);
        }
        Ok(())
    };
    code(put())
}

fn is_direct(flags: u32) -> Result<bool, Error> {
    match flags {
        0 => Ok(false),
        PAGEMILL_PAGE_POOL_DIRECT => Ok(true),
        _ => Err(Error::Invalid),
    }
}

/// Returns the pages of an array's first n slots, up to 64 in one section of the ring. Empties the slots of those that it takes, and passes
/// over null slots. `*count`, unless the pointer is null, gets their number.
///
/// Errors: as for `pagemill_page_pool_put`, the first one's: those slots are as they were, all others are taken.
///
/// Threads: as for `pagemill_page_pool_put`; nobody else may use the array meanwhile. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_page_pool_put_bulk(
    pool: *mut PagePool,
    slots: *mut *mut c_void,
    n: i64,
    flags: u32,
    count: *mut usize,
) -> Error {
    let mut sum = 0;
    let mut put = || {
        // SAFETY: the caller passes null or a handle.
        let (home, is_direct) = (unsafe { handle::get(pool) }?.home, is_direct(flags)?);
        // SAFETY: the caller passes n slots.
        let slots = unsafe { bulk::slots_of(slots, bulk::count(n)?) }?;
        let mut refused = Ok(());
        for slots in slots.chunks_mut(64) {
            let mut pages = [const { None }; 64];
            // SAFETY: the caller gives up the pages, or they are refused.
            let own = |page| Ok(unsafe { home.from_raw(page) }?);
            refused = refused.and(bulk::own_slots(slots, &mut pages, own));
            let pages = &mut pages[..slots.len()];
            sum += if is_direct {
                // SAFETY: the caller passes a handle, and is the consumer.
                match unsafe { consumer(pool) } {
                    Ok(consumer) => consumer.put_bulk(pages),
                    // It has ended.
                    Err(_) => PoolPage::put_bulk(pages),
                }
            } else {
                // Nothing of the pool is used from here on: with its last page it may be destroyed.
                PoolPage::put_bulk(pages)
            };
        }
        refused
    };
    let error = code(put());
    // SAFETY: the caller passes null or a place for a number.
    if let Some(place) = unsafe { count.as_mut() } {
        *place = sum;
    }
    error
}

/// Takes a page out of its pool for good: from then on it is an ordinary block of the pool's order, which `pagemill_free_pages` frees.
///
/// Errors: as for `pagemill_page_pool_put`.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_page_pool_release_page(pool: *mut PagePool, page: *mut c_void) -> Error {
    let release = || {
        // SAFETY: the caller passes null or a handle.
        let home = unsafe { handle::get(pool) }?.home;
        // SAFETY: the caller owns the page, or it is refused.
        PoolPage::release(unsafe { home.from_raw(page.cast()) }?).into_raw();
        Ok(())
    };
    code(release())
}

/// Takes a part of a page: `bytes` bytes that begin at a multiple of 64, with an owner of its own. `*fragment` gets it, or null. The page
/// goes back with the last of its fragments. Fragments are cut one after the other, and a new page is begun when the rest of the last one is
/// too short.
///
/// Errors: `PAGEMILL_ERROR_SIZE` for 0 bytes, or more than a page of the pool has; as for `pagemill_page_pool_alloc` otherwise.
///
/// Threads: the consumer. Signal handlers: no. It takes a lock.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_page_pool_alloc_fragment(
    pool: *mut PagePool,
    gfp: u32,
    bytes: usize,
    fragment: *mut *mut c_void,
) -> Error {
    // SAFETY: the caller passes null or a place for a pointer.
    let Some(place) = (unsafe { fragment.as_mut() }) else { return Error::Argument };
    *place = null_mut();
    let mut alloc = || {
        // SAFETY: the caller passes null or a handle, and is the consumer.
        let (of, consumer) = unsafe { (handle::get(pool)?, consumer(pool)?) };
        let mut frag = consumer.alloc_frag(gfp::gfp(gfp)?, bytes)?;
        let start = frag.as_mut_ptr();
        of.frags().insert(start.addr(), frag);
        *place = start.cast();
        Ok(())
    };
    code(alloc())
}

/// Returns a fragment.
///
/// Errors: 3xx for any pointer that is not that of a fragment of this pool which is out; it changes nothing then. 2xx for no open handle.
///
/// Threads: any. Signal handlers: no. It takes a lock.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_page_pool_put_fragment(pool: *mut PagePool, fragment: *mut c_void) -> Error {
    // SAFETY: the caller passes null or a handle.
    let of = match unsafe { handle::get(pool) } {
        Ok(of) => of,
        Err(error) => return error,
    };
    let found = of.frags().remove(&fragment.addr());
    match found {
        Some(frag) => {
            drop(frag); // The pool may be destroyed from here on.
            Error::None
        }
        None if of.allocator.has_memory_at(fragment.cast()) => refuse(Error::DoubleFree, fragment),
        None => refuse(Error::Foreign, fragment),
    }
}

/// A pool's figures, by the names that Linux gives them.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct PagePoolStats {
    /// Pages that came from the cache.
    pub fast: u64,
    /// Requests that asked the allocator.
    pub slow: u64,
    /// Those of them that were for blocks of an order above 0.
    pub slow_high_order: u64,
    /// Requests that found the cache and the ring empty.
    pub empty: u64,
    /// Requests that found the cache empty, and filled it from the ring.
    pub refill: u64,
    /// Pages of the ring that are of another node than the pool's: they went back to the allocator.
    pub waive: u64,
    /// Pages that the consumer put into its cache.
    pub cached: u64,
    /// Pages that the consumer returned while its cache was full.
    pub cache_full: u64,
    /// Pages that were put into the ring.
    pub ring: u64,
    /// Pages that found the ring full, and went back to the allocator.
    pub ring_full: u64,
    /// Pages that the consumer was done with while somebody held a fragment.
    pub released_refcnt: u64,
    /// Pages that are out now: handed out, and neither returned nor released; with the one that fragments are cut from.
    pub in_flight: usize,
    /// Whether the pool has ended: 1 or 0.
    pub has_ended: u32,
    /// The seconds since its end.
    pub age_s: u32,
}

/// Reads a pool's figures.
///
/// Errors: 2xx if an argument is wrong.
///
/// Threads: the consumer; any when the pool has ended. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_page_pool_stats(pool: *mut PagePool, stats: *mut PagePoolStats) -> Error {
    let read = || {
        // SAFETY: the caller passes null or a handle, and null or a place for figures.
        let (of, place) = unsafe { (handle::get(pool)?, stats.as_mut().ok_or(Error::Argument)?) };
        let ending = of.ending.get();
        let found = match ending {
            Some(ending) => ending.stats(),
            // SAFETY: the pool has not ended, so the caller is the consumer.
            None => unsafe { consumer(pool) }?.stats(),
        };
        *place = PagePoolStats {
            fast: found.fast,
            slow: found.slow,
            slow_high_order: found.slow_high_order,
            empty: found.empty,
            refill: found.refill,
            waive: found.waive,
            cached: found.cached,
            cache_full: found.cache_full,
            ring: found.ring,
            ring_full: found.ring_full,
            released_refcnt: found.released_refcnt,
            in_flight: found.in_flight,
            has_ended: u32::from(ending.is_some()),
            age_s: ending.map_or(0, |ending| u32::try_from(ending.age().as_secs()).unwrap_or(u32::MAX)),
        };
        Ok(())
    };
    code(read())
}

/// Ends a pool: pages that are in it go back to the allocator, and so does each that comes back later. When none is out the handle is closed.
/// `*out`, unless the pointer is null, gets the number of pages that are out.
///
/// Errors: `PAGEMILL_ERROR_IN_USE` if there are any. The pool has ended then, and the handle stays open, for those who return them; call
/// again to close it when all are back.
///
/// Threads: the consumer; any when the pool has ended, one at a time. No thread may use the handle after the call that closes it. Signal
/// handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_page_pool_destroy(pool: *mut PagePool, out: *mut usize) -> Error {
    let destroy = || {
        // SAFETY: the caller passes null or a handle, and null or a place for a number.
        let (of, place) = unsafe { (handle::get(pool)?, out.as_mut()) };
        let ending = of.ending.get_or_init(|| {
            // SAFETY: the pool has not ended, so the caller is the consumer.
            let consumer = unsafe { (*of.consumer.get()).take() };
            consumer.unwrap_or_else(|| unreachable!("a pool without a consumer has ended")).destroy()
        });
        let in_flight = ending.in_flight();
        if let Some(place) = place {
            *place = in_flight;
        }
        if in_flight > 0 {
            return Err(Error::InUse);
        }
        // SAFETY: as above; nobody else uses the handle any more.
        unsafe { handle::close(pool) }.map(drop)
    };
    code(destroy())
}
