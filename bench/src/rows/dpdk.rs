//! `rte-mempool`: DPDK's fixed-size object pool with its per-thread cache at the largest size (512), 64 objects a
//! call, over ordinary memory and without root. The timed loop is C (`dpdk_shim.c`), as its users write it.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::{self, NonNull};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::rows::dma::{BlockRow, Shape, Source};
use crate::rows::holes::HoleRow;
use crate::rows::mixed::{DAY_PAGES, DayRow, REQUEST_MOST};
use crate::rows::page_pool::returned::{CROSSING_PAGES, CrossRow};
use crate::rows::page_pool::{Lane, LaneRow};
use crate::rows::stock::{Addr, Stock};
use crate::rows::{Kind, Need, Row, Site, Unavailable};
use crate::subject::{Flaw, PAGE_BYTES, Subject, check_pages};

/// Pages beyond those needed, for the caches of a few threads, 768 each.
const SLACK_PAGES: usize = 4096;

#[repr(C)]
struct RawPool {
    pool: *mut c_void,
    memory: *mut c_void,
    bytes: usize,
}

unsafe extern "C" {
    fn pmb_dpdk_init(cpu: c_uint) -> c_int;
    fn pmb_dpdk_thread_enter() -> c_int;
    fn pmb_dpdk_thread_leave();
    fn pmb_dpdk_pool_new(pool: *mut RawPool, n: c_uint) -> c_int;
    fn pmb_dpdk_blocks_new(pool: *mut RawPool, n: c_uint, bytes: c_uint) -> c_int;
    fn pmb_dpdk_block_bytes(pool: *const RawPool) -> c_uint;
    fn pmb_dpdk_rounds(pool: *const RawPool, blocks: *mut *mut c_void, n: c_uint, is_bulk: c_int, reps: usize)
    -> c_int;
    fn pmb_dpdk_pool_free(pool: *mut RawPool);
    fn pmb_dpdk_take(pool: *const RawPool, pages: *mut *mut c_void, n: c_uint) -> c_int;
    fn pmb_dpdk_put(pool: *const RawPool, pages: *const *mut c_void, n: c_uint);
    fn pmb_dpdk_take_singly(pool: *const RawPool, pages: *mut *mut c_void, n: c_uint) -> c_int;
    fn pmb_dpdk_put_singly(pool: *const RawPool, pages: *const *mut c_void, n: c_uint);
    fn pmb_dpdk_orders(
        pool: *const RawPool,
        pages: *mut *mut c_void,
        back: *const u16,
        n: c_uint,
        is_bulk: c_int,
        reps: usize,
    ) -> c_int;
    fn pmb_dpdk_batch(pool: *const RawPool, pages: *mut *mut c_void, n: c_uint, reps: usize) -> c_int;
}

pub(crate) fn row() -> Row {
    Row::plain("rte-mempool", Kind::Peer, |need: Need| {
        let pool = pool_of(need.pages)?;
        let site: Site = Box::new(move |most_held| {
            let held = vec![ptr::null_mut(); most_held];
            Box::new(Mempool { held, len: 0, pool: Arc::clone(&pool), _seat: Seat::take() })
        });
        Ok(site)
    })
}

/// Its row of the table `holes`.
pub(super) fn hole_row() -> HoleRow {
    HoleRow::of_stock("rte-mempool", Kind::Peer, |slots| Ok(Scattered::new(pool_of(slots)?, slots)))
}

/// Its row of the table `mixed`.
pub(super) fn day_row() -> DayRow {
    DayRow::of_stocks("rte-mempool", Kind::Peer, || {
        let pool = pool_of(DAY_PAGES)?;
        Ok(move || Scattered::new(Arc::clone(&pool), REQUEST_MOST))
    })
}

fn pool_of(pages: usize) -> Result<Arc<Pool>, Unavailable> {
    start()?;
    check_memory(pages + SLACK_PAGES)?;
    Ok(Arc::new(Pool::new(pages + SLACK_PAGES)?))
}

/// Its rows of the table `dma`: blocks in DPDK's layout, one by one and 64 a call.
pub(super) fn block_rows() -> Vec<BlockRow> {
    let row = |name, is_bulk| {
        let open = move |shape: Shape| {
            start()?;
            Ok(Blocks { pool: Pool::of_blocks(shape)?, is_bulk, _seat: Seat::take() })
        };
        BlockRow::of_source(name, Kind::Peer, open)
    };
    vec![row("rte-mempool", false), row("rte-mempool-bulk", true)]
}

/// Its rows of the table `page-pool`: the consumer's loop, in C.
pub(super) fn lane_rows() -> Vec<LaneRow> {
    let row = |name, is_bulk| {
        Row::plain(name, Kind::Peer, move |n: usize| {
            let lane = Ordered { held: vec![ptr::null_mut(); n], is_bulk, pool: pool_of(n)?, _seat: Seat::take() };
            Ok(Box::new(lane) as Box<dyn Lane>)
        })
    };
    vec![row("rte-mempool", false), row("rte-mempool-64", true)]
}

/// Its rows of the same table, where another thread puts the pages back.
pub(super) fn cross_rows() -> Vec<CrossRow> {
    let one_by_one = || {
        let pool = pool_of(CROSSING_PAGES)?;
        let other = Arc::clone(&pool);
        Ok((Crossing::<false>::new(pool), move |slots: &mut [Option<Addr>]| put_back::<false>(&other, slots)))
    };
    let in_bulk = || {
        let pool = pool_of(CROSSING_PAGES)?;
        let other = Arc::clone(&pool);
        Ok((Crossing::<true>::new(pool), move |slots: &mut [Option<Addr>]| put_back::<true>(&other, slots)))
    };
    vec![CrossRow::of("rte-mempool", Kind::Peer, one_by_one), CrossRow::of("rte-mempool-64", Kind::Peer, in_bulk)]
}

/// Starts DPDK's environment, which can be started once in a process.
fn start() -> Result<(), Unavailable> {
    static STARTED: OnceLock<c_int> = OnceLock::new();
    let rc = *STARTED.get_or_init(|| {
        let cpus = crate::machine::Machine::here();
        // SAFETY: called once; DPDK copies what it keeps of its arguments.
        let rc = unsafe { pmb_dpdk_init(cpus.main_cpu() as c_uint) };
        // DPDK binds its first thread; the bench decides where that runs.
        let _ = crate::machine::pin_to_all(&cpus.allowed);
        rc
    });
    if rc == 0 { Ok(()) } else { Err(Unavailable(format!("DPDK does not start: {}", os_error(rc)))) }
}

fn os_error(negative_errno: c_int) -> std::io::Error {
    std::io::Error::from_raw_os_error(-negative_errno)
}

/// Each object's header touches one page of its slot.
fn check_memory(pages: usize) -> Result<(), Unavailable> {
    let wanted = (pages * PAGE_BYTES) as u64;
    match crate::machine::available_bytes() {
        Some(available) if available < wanted => {
            Err(Unavailable(format!("would touch {wanted} bytes of memory, {available} are available")))
        }
        _ => Ok(()),
    }
}

struct Pool(RawPool);

// SAFETY: a mempool made without the single-producer and single-consumer flags is used by any thread of DPDK's;
// `RawPool` itself is not changed between creation and drop.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Pool {
    fn new(pages: usize) -> Result<Pool, Unavailable> {
        let mut raw = RawPool { pool: ptr::null_mut(), memory: ptr::null_mut(), bytes: 0 };
        let count = c_uint::try_from(pages).map_err(|_| Unavailable(format!("{pages} pages are too many")))?;
        // SAFETY: `raw` is a pool's three words, to be written; the environment has been started.
        match unsafe { pmb_dpdk_pool_new(&raw mut raw, count) } {
            0 => Ok(Pool(raw)),
            rc => Err(Unavailable(format!("no mempool of {pages} pages: {}", os_error(rc)))),
        }
    }
}

impl Pool {
    /// A pool of blocks, with as many more as a thread's cache may hold.
    fn of_blocks(shape: Shape) -> Result<Pool, Unavailable> {
        let mut raw = RawPool { pool: ptr::null_mut(), memory: ptr::null_mut(), bytes: 0 };
        let count = (shape.blocks + 1024) as c_uint;
        // SAFETY: `raw` is a pool's three words, to be written; the environment has been started.
        match unsafe { pmb_dpdk_blocks_new(&raw mut raw, count, shape.bytes as c_uint) } {
            0 => Ok(Pool(raw)),
            rc => Err(Unavailable(format!("no mempool of {count} blocks: {}", os_error(rc)))),
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: made by `pmb_dpdk_pool_new`, and every runner, which held it by `Arc`, is gone.
        unsafe { pmb_dpdk_pool_free(&raw mut self.0) }
    }
}

/// The calling thread's number in DPDK. Dropping it gives the number back, if it was taken here.
struct Seat {
    is_ours: bool,
}

impl Seat {
    fn take() -> Seat {
        // SAFETY: the environment has been started.
        let rc = unsafe { pmb_dpdk_thread_enter() };
        assert!(rc >= 0, "DPDK has no number for this thread: {}", os_error(rc));
        Seat { is_ours: rc == 1 }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        if self.is_ours {
            // SAFETY: this thread was registered in `take`, and a runner does not leave its thread.
            unsafe { pmb_dpdk_thread_leave() }
        }
    }
}

struct Mempool {
    held: Vec<*mut c_void>,
    len: usize,
    pool: Arc<Pool>,
    _seat: Seat,
}

impl Mempool {
    fn take_held(&mut self, n: usize) -> bool {
        assert!(n <= self.held.len(), "a runner holds at most what it was made for");
        // SAFETY: `held` has room for `n` pointers.
        unsafe { pmb_dpdk_take(&raw const self.pool.0, self.held.as_mut_ptr(), n as c_uint) == 0 }
    }

    fn put_held(&mut self, n: usize) {
        // SAFETY: the first `n` pointers are objects of this pool, each put back once.
        unsafe { pmb_dpdk_put(&raw const self.pool.0, self.held.as_ptr(), n as c_uint) }
    }
}

impl Subject for Mempool {
    fn take(&mut self, n: usize) -> bool {
        self.len = n;
        self.take_held(n)
    }

    fn put(&mut self) {
        self.put_held(self.len);
        self.len = 0;
    }

    fn shuffle(&mut self, rng: &mut fastrand::Rng) {
        rng.shuffle(&mut self.held[..self.len]);
    }

    fn addresses(&mut self) -> Vec<usize> {
        self.held[..self.len].iter().map(|&page| page as usize).collect()
    }

    fn give(&mut self, out: &mut [usize]) -> bool {
        // SAFETY: an address and a pointer have one layout, and `out` has room for its length.
        unsafe { pmb_dpdk_take(&raw const self.pool.0, out.as_mut_ptr().cast(), out.len() as c_uint) == 0 }
    }

    fn accept(&mut self, words: &[usize]) {
        // SAFETY: these are objects of this pool, let go of by `give`, each put back once. DPDK only reads `words`.
        unsafe { pmb_dpdk_put(&raw const self.pool.0, words.as_ptr().cast(), words.len() as c_uint) }
    }

    fn batch_loop(&mut self, n: usize, reps: usize) -> bool {
        assert!(n <= self.held.len(), "a runner holds at most what it was made for");
        // SAFETY: `held` has room for `n` pointers; the loop puts back what it takes.
        unsafe { pmb_dpdk_batch(&raw const self.pool.0, self.held.as_mut_ptr(), n as c_uint, reps) == 0 }
    }
}

/// A mempool whose objects are stored in the holes of an array: counted first, then got in one call.
struct Scattered {
    got: Vec<Option<Addr>>,
    pool: Arc<Pool>,
    _seat: Seat,
}

impl Scattered {
    fn new(pool: Arc<Pool>, most_holes: usize) -> Self {
        Scattered { got: vec![None; most_holes], pool, _seat: Seat::take() }
    }
}

impl Stock for Scattered {
    type Page = Addr;

    fn fill(&mut self, slots: &mut [Option<Addr>]) -> bool {
        let holes = slots.iter().filter(|slot| slot.is_none()).count();
        let got = &mut self.got[..holes];
        // SAFETY: an address that may be missing and a pointer have one layout, and `got` has room for so many.
        if unsafe { pmb_dpdk_take(&raw const self.pool.0, got.as_mut_ptr().cast(), holes as c_uint) } != 0 {
            return false;
        }
        slots.iter_mut().filter(|slot| slot.is_none()).zip(got).for_each(|(slot, page)| *slot = *page);
        true
    }

    fn free(&mut self, slots: &mut [Option<Addr>]) {
        // SAFETY: all slots have an object of this pool, each put back once. DPDK only reads `slots`.
        unsafe { pmb_dpdk_put(&raw const self.pool.0, slots.as_ptr().cast(), slots.len() as c_uint) }
        slots.fill(None);
    }

    fn at(page: &Addr) -> usize {
        page.get()
    }
}

/// A mempool of small blocks, whose loop is in C.
struct Blocks {
    pool: Pool,
    is_bulk: bool,
    _seat: Seat,
}

impl Source for Blocks {
    type Block = NonNull<u8>;

    fn fill(&mut self, slots: &mut [Option<NonNull<u8>>]) -> bool {
        // SAFETY: an empty slot and a pointer have one layout, and there is room for so many.
        unsafe { pmb_dpdk_take(&raw const self.pool.0, slots.as_mut_ptr().cast(), slots.len() as c_uint) == 0 }
    }

    fn empty(&mut self, slots: &mut [Option<NonNull<u8>>]) {
        for block in slots.iter_mut().filter_map(Option::take) {
            let block: *mut c_void = block.as_ptr().cast();
            // SAFETY: an object of this pool, put back once.
            unsafe { pmb_dpdk_put(&raw const self.pool.0, &raw const block, 1) }
        }
    }

    fn at(block: &NonNull<u8>) -> NonNull<u8> {
        *block
    }

    /// Objects begin at a cache line, whatever their size.
    fn align(bytes: usize) -> usize {
        bytes.min(64)
    }

    fn bytes_a_block(&self) -> Option<f64> {
        // SAFETY: reads three fields of the pool.
        Some(f64::from(unsafe { pmb_dpdk_block_bytes(&raw const self.pool.0) }))
    }

    fn repeat(&mut self, slots: &mut [Option<NonNull<u8>>], reps: usize) -> bool {
        let (blocks, n) = (slots.as_mut_ptr().cast(), slots.len() as c_uint);
        // SAFETY: there is room for so many pointers; the loop puts back what it takes, and leaves the pointers behind.
        let rc = unsafe { pmb_dpdk_rounds(&raw const self.pool.0, blocks, n, c_int::from(self.is_bulk), reps) };
        slots.fill(None);
        rc == 0
    }
}

/// A mempool whose pages come back in an order that was written down beforehand.
struct Ordered {
    held: Vec<*mut c_void>,
    is_bulk: bool,
    pool: Arc<Pool>,
    _seat: Seat,
}

impl Lane for Ordered {
    fn verify(&mut self, back: &[u16]) -> Result<(), Flaw> {
        // The loop leaves the pointers of its last repetition behind.
        self.held.fill(ptr::null_mut());
        self.rounds(back, 1)?;
        check_pages(self.held.iter().map(|&page| page as usize).collect(), back.len())
    }

    fn rounds(&mut self, back: &[u16], reps: usize) -> Result<Duration, Flaw> {
        let n = back.len();
        assert_eq!(n, self.held.len(), "a lane is opened for as many pages as come back");
        let (pages, is_bulk) = (self.held.as_mut_ptr(), c_int::from(self.is_bulk));
        let start = Instant::now();
        // SAFETY: there is room for `n` pointers, and `back` has each place below `n` once, so that the loop puts back
        // what it takes.
        let rc = unsafe { pmb_dpdk_orders(&raw const self.pool.0, pages, back.as_ptr(), n as c_uint, is_bulk, reps) };
        let elapsed = start.elapsed();
        (rc == 0).then_some(elapsed).ok_or(Flaw::Short { wanted: n })
    }
}

/// A mempool from which one thread takes pages that another one puts back.
struct Crossing<const IS_BULK: bool> {
    pool: Arc<Pool>,
    _seat: Seat,
}

impl<const IS_BULK: bool> Crossing<IS_BULK> {
    fn new(pool: Arc<Pool>) -> Self {
        Self { pool, _seat: Seat::take() }
    }
}

impl<const IS_BULK: bool> Stock for Crossing<IS_BULK> {
    type Page = Addr;

    fn fill(&mut self, slots: &mut [Option<Addr>]) -> bool {
        let (pool, pages, n) = (&raw const self.pool.0, slots.as_mut_ptr().cast(), slots.len() as c_uint);
        let take = if IS_BULK { pmb_dpdk_take } else { pmb_dpdk_take_singly };
        // SAFETY: an address that may be missing and a pointer have one layout, and there is room for so many.
        unsafe { take(pool, pages, n) == 0 }
    }

    fn free(&mut self, slots: &mut [Option<Addr>]) {
        put_back::<IS_BULK>(&self.pool, slots);
    }

    fn at(page: &Addr) -> usize {
        page.get()
    }
}

/// Puts back a page of every slot, on any thread.
fn put_back<const IS_BULK: bool>(pool: &Pool, slots: &mut [Option<Addr>]) {
    thread_local! {
        /// Taken by a thread's first call, which is untimed; given back when the thread ends.
        static SEAT: Seat = Seat::take();
    }
    SEAT.with(|_| ());
    let put = if IS_BULK { pmb_dpdk_put } else { pmb_dpdk_put_singly };
    // SAFETY: all slots have an object of this pool, each put back once. DPDK only reads `slots`.
    unsafe { put(&raw const pool.0, slots.as_ptr().cast(), slots.len() as c_uint) }
    slots.fill(None);
}
