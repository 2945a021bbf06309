//! Peers in C and C++: general allocators, each asked for memory that is aligned to its size. That is 4096 bytes, as a
//! program that needs pages would ask today, or a block's size in the tables `dma` and `orders`. None has a bulk
//! interface for aligned objects.
//!
//! Each has the settings that suit this work best: no memory goes back to the system while it is measured.

use std::ptr::NonNull;
use std::sync::Once;

use crate::rows::dma::{BlockRow, OneBlock, Shape, Singly};
use crate::rows::mixed::{DAY_PAGES, DayRow};
use crate::rows::one_by_one::{OneByOne, OnePage};
use crate::rows::stock::EachOf;
use crate::rows::{Kind, Need, Row, Site, Unavailable};
use crate::subject::PAGE_BYTES;

/// A general allocator, for memory of one size.
trait General: Sized + 'static {
    /// The rows' name.
    const NAME: &'static str;

    /// Applies its settings, or says why it can't be measured.
    fn prepare() -> Result<(), Unavailable>;

    /// For memory of `bytes`, a power of two, aligned to its size.
    fn of(bytes: usize) -> Self;

    /// Such memory; null if there is none.
    fn allocate(&mut self) -> *mut u8;

    /// Frees memory that `allocate` of an instance with the same size handed out.
    ///
    /// # Safety
    /// It did, and the memory has not been freed since.
    unsafe fn free(&mut self, memory: *mut u8);
}

impl<G: General> OnePage for G {
    #[inline]
    fn get(&mut self) -> usize {
        self.allocate() as usize
    }

    #[inline]
    fn put_back(&mut self, addr: usize) {
        // SAFETY: the address came from `get`, and is put back once.
        unsafe { self.free(addr as *mut u8) }
    }
}

impl<G: General> OneBlock for G {
    type Block = NonNull<u8>;

    #[inline]
    fn get(&mut self) -> Option<NonNull<u8>> {
        NonNull::new(self.allocate())
    }

    #[inline]
    fn put(&mut self, block: NonNull<u8>) {
        // SAFETY: the block came from `get`, and is put back once.
        unsafe { self.free(block.as_ptr()) }
    }

    fn at(block: &NonNull<u8>) -> NonNull<u8> {
        *block
    }
}

/// A row for each of these allocators that is in this build.
macro_rules! of_each {
    ($row:ident) => {
        vec![
            $row::<Glibc>(),
            #[cfg(feature = "mimalloc")]
            $row::<mimalloc::Mimalloc>(),
            #[cfg(feature = "jemalloc")]
            $row::<jemalloc::Jemalloc>(),
            #[cfg(feature = "snmalloc")]
            $row::<snmalloc::Snmalloc>(),
        ]
    };
}

pub(crate) fn rows() -> Vec<Row> {
    of_each!(row)
}

/// The same in the table `mixed`.
pub(super) fn day_rows() -> Vec<DayRow> {
    of_each!(day_row)
}

/// The same for blocks: `dma` and `orders`.
pub(super) fn block_rows() -> Vec<BlockRow> {
    of_each!(block_row)
}

fn row<G: General>() -> Row {
    Row::plain(G::NAME, Kind::Peer, |need: Need| {
        check_memory(need)?;
        G::prepare()?;
        let site: Site = Box::new(|most_held| Box::new(OneByOne::new(G::of(PAGE_BYTES), most_held)));
        Ok(site)
    })
}

fn day_row<G: General>() -> DayRow {
    DayRow::of_stocks(G::NAME, Kind::Peer, || {
        check_memory(Need { pages: DAY_PAGES })?;
        G::prepare()?;
        Ok(|| EachOf(G::of(PAGE_BYTES)))
    })
}

fn block_row<G: General>() -> BlockRow {
    BlockRow::of_source(G::NAME, Kind::Peer, |shape: Shape| {
        G::prepare()?;
        Ok(Singly(G::of(shape.bytes)))
    })
}

/// These allocators keep headers in or between the pages, so that each page costs real memory although no user touches
/// it: two pages each, as glibc's aligned objects do.
fn check_memory(need: Need) -> Result<(), Unavailable> {
    let wanted = 2 * (need.pages * PAGE_BYTES) as u64;
    match crate::machine::available_bytes() {
        Some(available) if available < wanted => {
            Err(Unavailable(format!("would touch up to {wanted} bytes of memory, {available} are available")))
        }
        _ => Ok(()),
    }
}

struct Glibc {
    bytes: usize,
}

impl General for Glibc {
    const NAME: &'static str = "glibc";

    /// Makes glibc keep its heap: it is never trimmed, and pieces are not mapped separately.
    fn prepare() -> Result<(), Unavailable> {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            // SAFETY: `mallopt` may be called at any time; it changes parameters of glibc's own.
            let is_set = unsafe {
                libc::mallopt(libc::M_TRIM_THRESHOLD, -1) == 1
                    && libc::mallopt(libc::M_MMAP_THRESHOLD, 1 << 25) == 1
                    && libc::mallopt(libc::M_TOP_PAD, 1 << 26) == 1
            };
            assert!(is_set, "glibc refused the settings that the table names");
        });
        Ok(())
    }

    fn of(bytes: usize) -> Self {
        Glibc { bytes }
    }

    #[inline]
    fn allocate(&mut self) -> *mut u8 {
        // SAFETY: the size is a power of two, and so an alignment.
        unsafe { libc::aligned_alloc(self.bytes, self.bytes) }.cast()
    }

    #[inline]
    unsafe fn free(&mut self, memory: *mut u8) {
        // SAFETY: it came from `aligned_alloc` above and is freed once, as the caller says.
        unsafe { libc::free(memory.cast()) }
    }
}

impl Drop for Glibc {
    fn drop(&mut self) {
        // After a table over 4 GiB the next row needs the memory. SAFETY: gives free memory back to the system; nothing
        // else changes.
        unsafe { libc::malloc_trim(0) };
    }
}

#[cfg(feature = "mimalloc")]
mod mimalloc {
    use std::sync::Once;

    use super::General;
    use crate::rows::Unavailable;

    /// `mi_option_purge_delay` of mimalloc 2, which stands between the two options that the bindings do name.
    const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;
    const _: () = assert!(
        libmimalloc_sys::mi_option_eager_commit_delay == PURGE_DELAY - 1
            && libmimalloc_sys::mi_option_use_numa_nodes == PURGE_DELAY + 1
    );

    pub(super) struct Mimalloc {
        bytes: usize,
    }

    impl General for Mimalloc {
        const NAME: &'static str = "mimalloc";

        /// Makes it never return memory: a negative purge delay, in mimalloc's words.
        fn prepare() -> Result<(), Unavailable> {
            static ONCE: Once = Once::new();
            ONCE.call_once(|| {
                // SAFETY: sets an option of mimalloc's own, which it reads at its next purge.
                unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, -1) };
            });
            Ok(())
        }

        fn of(bytes: usize) -> Self {
            Mimalloc { bytes }
        }

        #[inline]
        fn allocate(&mut self) -> *mut u8 {
            // SAFETY: the size is a power of two, and so an alignment.
            unsafe { libmimalloc_sys::mi_malloc_aligned(self.bytes, self.bytes) }.cast()
        }

        #[inline]
        unsafe fn free(&mut self, memory: *mut u8) {
            // SAFETY: it came from `mi_malloc_aligned` above and is freed once, as the caller says.
            unsafe { libmimalloc_sys::mi_free(memory.cast()) }
        }
    }
}

#[cfg(feature = "jemalloc")]
mod jemalloc {
    use std::ffi::{CStr, c_char, c_void};
    use std::sync::Once;

    use tikv_jemalloc_sys as je;

    use super::General;
    use crate::rows::Unavailable;

    pub(super) struct Jemalloc {
        bytes: usize,
        flags: i32,
    }

    impl General for Jemalloc {
        const NAME: &'static str = "jemalloc";

        /// Checks that the options below are in force.
        fn prepare() -> Result<(), Unavailable> {
            static ONCE: Once = Once::new();
            ONCE.call_once(check_options);
            Ok(())
        }

        fn of(bytes: usize) -> Self {
            Jemalloc { bytes, flags: je::MALLOCX_ALIGN(bytes) }
        }

        #[inline]
        fn allocate(&mut self) -> *mut u8 {
            // SAFETY: the size is not zero, and the flags hold a power of two.
            unsafe { je::mallocx(self.bytes, self.flags) }.cast()
        }

        #[inline]
        unsafe fn free(&mut self, memory: *mut u8) {
            // SAFETY: it came from `mallocx` with this size and these flags and is freed once, as the caller says.
            unsafe { je::sdallocx(memory.cast(), self.bytes, self.flags) }
        }
    }

    /// Slots of a thread's cache for each size, the most that jemalloc allows. The *minimum* decides: a slab holds one
    /// object of 4096 bytes, and a cache has a multiple of that, or the minimum (20 by default).
    const CACHED: u32 = 2048;
    /// Bytes between two clearings of the cache: practically never. By default it is cleared every 16 pages.
    const CLEARED_AFTER: usize = 1 << 40;

    /// Jemalloc's start-up options, which it reads through this symbol: free memory never decays, and a thread's
    /// cache holds as many pages as it may and keeps them.
    // SAFETY: jemalloc declares this very symbol, a pointer to a string that ends in zero, for programs to define.
    #[unsafe(export_name = "_rjem_malloc_conf")]
    #[used]
    static CONF: Conf = Conf(
        c"dirty_decay_ms:-1,muzzy_decay_ms:-1,tcache_max:32768,tcache_nslots_small_max:2048,\
          tcache_nslots_small_min:2048,tcache_gc_incr_bytes:1099511627776"
            .as_ptr(),
    );

    #[repr(transparent)]
    struct Conf(*const c_char);
    // SAFETY: points at a constant.
    unsafe impl Sync for Conf {}

    fn check_options() {
        let in_force = (option(c"opt.dirty_decay_ms"), option(c"opt.muzzy_decay_ms"));
        assert_eq!(in_force, (-1isize, -1isize), "jemalloc did not take the settings that the table names");
        let in_force = (option(c"opt.tcache_nslots_small_min"), option(c"opt.tcache_nslots_small_max"));
        assert_eq!(in_force, (CACHED, CACHED), "jemalloc did not take the size of its caches");
        let cleared_after: usize = option(c"opt.tcache_gc_incr_bytes");
        assert_eq!(cleared_after, CLEARED_AFTER, "jemalloc clears its caches");
    }

    /// The value of one of jemalloc's options, which must be of the type that jemalloc documents for it.
    fn option<T: Copy + Default>(name: &CStr) -> T {
        let mut value = T::default();
        let mut len = size_of::<T>();
        // SAFETY: the name ends in zero; jemalloc writes a value of `len` bytes, or refuses where its own is not so long.
        let rc = unsafe {
            je::mallctl(name.as_ptr(), (&raw mut value).cast::<c_void>(), &raw mut len, std::ptr::null_mut(), 0)
        };
        assert_eq!((rc, len), (0, size_of::<T>()), "jemalloc has no option {name:?} of that type");
        value
    }
}

#[cfg(feature = "snmalloc")]
mod snmalloc {
    use super::General;
    use crate::rows::Unavailable;

    pub(super) struct Snmalloc {
        bytes: usize,
    }

    impl General for Snmalloc {
        const NAME: &'static str = "snmalloc";

        /// Its build script keeps the assertions unless `NDEBUG` comes from outside; `.cargo/config.toml` sets it. With
        /// assertions it would be slower than what users get.
        fn prepare() -> Result<(), Unavailable> {
            if env!("BENCH_CXXFLAGS").contains("-DNDEBUG") {
                return Ok(());
            }
            Err(Unavailable("built with its assertions on; build with CXXFLAGS=-DNDEBUG".to_owned()))
        }

        fn of(bytes: usize) -> Self {
            Snmalloc { bytes }
        }

        #[inline]
        fn allocate(&mut self) -> *mut u8 {
            // SAFETY: the size is a power of two, and so an alignment.
            unsafe { snmalloc_sys::sn_rust_alloc(self.bytes, self.bytes) }.cast()
        }

        #[inline]
        unsafe fn free(&mut self, memory: *mut u8) {
            // SAFETY: it came from `sn_rust_alloc` with this alignment and size and is freed once, as the caller says.
            unsafe { snmalloc_sys::sn_rust_dealloc(memory.cast(), self.bytes, self.bytes) };
        }
    }
}
