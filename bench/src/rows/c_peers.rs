//! Peers in C and C++: the general allocators, each asked for 4096 bytes aligned to 4096, as a program that needs
//! pages asks them today. None has a bulk interface for aligned objects.
//!
//! Each with the settings that suit this work best: nothing is given back to the system while it is measured.

use std::sync::Once;

use crate::rows::mixed::{DAY_PAGES, DayRow};
use crate::rows::one_by_one::{OneByOne, OnePage};
use crate::rows::stock::EachOf;
use crate::rows::{Kind, Need, Row, Site, Unavailable};
use crate::subject::PAGE_BYTES;

pub(crate) fn rows() -> Vec<Row> {
    vec![
        Row::plain("glibc", Kind::Peer, |need| {
            check_memory(need)?;
            Ok(site(|| {
                keep_glibc_memory();
                Glibc
            }))
        }),
        #[cfg(feature = "mimalloc")]
        Row::plain("mimalloc", Kind::Peer, |need| {
            check_memory(need)?;
            Ok(site(|| {
                mimalloc::keep_memory();
                mimalloc::Mimalloc
            }))
        }),
        #[cfg(feature = "jemalloc")]
        Row::plain("jemalloc", Kind::Peer, |need| {
            check_memory(need)?;
            Ok(site(|| {
                jemalloc::keep_memory();
                jemalloc::Jemalloc
            }))
        }),
        #[cfg(feature = "snmalloc")]
        Row::plain("snmalloc", Kind::Peer, |need| {
            check_memory(need)?;
            snmalloc::check_build()?;
            Ok(site(|| snmalloc::Snmalloc))
        }),
    ]
}

/// The same in the table `mixed`.
pub(super) fn day_rows() -> Vec<DayRow> {
    let check = || check_memory(Need { pages: DAY_PAGES });
    vec![
        DayRow::new("glibc", Kind::Peer, move || {
            check()?;
            keep_glibc_memory();
            Ok(|| EachOf(Glibc))
        }),
        #[cfg(feature = "mimalloc")]
        DayRow::new("mimalloc", Kind::Peer, move || {
            check()?;
            mimalloc::keep_memory();
            Ok(|| EachOf(mimalloc::Mimalloc))
        }),
        #[cfg(feature = "jemalloc")]
        DayRow::new("jemalloc", Kind::Peer, move || {
            check()?;
            jemalloc::keep_memory();
            Ok(|| EachOf(jemalloc::Jemalloc))
        }),
        #[cfg(feature = "snmalloc")]
        DayRow::new("snmalloc", Kind::Peer, move || {
            check()?;
            snmalloc::check_build()?;
            Ok(|| EachOf(snmalloc::Snmalloc))
        }),
    ]
}

fn site<A: OnePage + 'static>(make: impl Fn() -> A + Send + Sync + 'static) -> Site {
    Box::new(move |most_held| Box::new(OneByOne::new(make(), most_held)))
}

/// These keep headers in or between the pages, so that each page costs real memory although no user touches it:
/// two pages each, as glibc's aligned objects take.
fn check_memory(need: Need) -> Result<(), Unavailable> {
    let wanted = 2 * (need.pages * PAGE_BYTES) as u64;
    match crate::machine::available_bytes() {
        Some(available) if available < wanted => {
            Err(Unavailable(format!("would touch up to {wanted} bytes of memory, {available} are available")))
        }
        _ => Ok(()),
    }
}

struct Glibc;

impl OnePage for Glibc {
    #[inline]
    fn get(&mut self) -> usize {
        // SAFETY: the alignment is a power of two, and the size a multiple of it.
        unsafe { libc::aligned_alloc(PAGE_BYTES, PAGE_BYTES) as usize }
    }

    #[inline]
    fn put_back(&mut self, addr: usize) {
        // SAFETY: `addr` came from `aligned_alloc` above and is put back once.
        unsafe { libc::free(addr as *mut libc::c_void) }
    }
}

impl Drop for Glibc {
    fn drop(&mut self) {
        // What a table over 4 GiB left is the next row's.
        // SAFETY: gives free memory back to the system; nothing else changes.
        unsafe { libc::malloc_trim(0) };
    }
}

/// Tells glibc to keep its heap: never trimmed, and not mapped piece by piece.
pub(super) fn keep_glibc_memory() {
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
}

#[cfg(feature = "mimalloc")]
pub(super) mod mimalloc {
    use std::sync::Once;

    use crate::rows::one_by_one::OnePage;
    use crate::subject::PAGE_BYTES;

    /// `mi_option_purge_delay` of mimalloc 2, which stands between the two options that the bindings do name.
    const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;
    const _: () = assert!(
        libmimalloc_sys::mi_option_eager_commit_delay == PURGE_DELAY - 1
            && libmimalloc_sys::mi_option_use_numa_nodes == PURGE_DELAY + 1
    );

    pub(super) struct Mimalloc;

    impl OnePage for Mimalloc {
        #[inline]
        fn get(&mut self) -> usize {
            // SAFETY: the alignment is a power of two.
            unsafe { libmimalloc_sys::mi_malloc_aligned(PAGE_BYTES, PAGE_BYTES) as usize }
        }

        #[inline]
        fn put_back(&mut self, addr: usize) {
            // SAFETY: `addr` came from `mi_malloc_aligned` above and is put back once.
            unsafe { libmimalloc_sys::mi_free(addr as *mut _) }
        }
    }

    /// Never gives memory back: a negative purge delay, in mimalloc's words.
    pub(in crate::rows) fn keep_memory() {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            // SAFETY: sets an option of mimalloc's own, which it reads at its next purge.
            unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, -1) };
        });
    }
}

#[cfg(feature = "jemalloc")]
pub(super) mod jemalloc {
    use std::ffi::{CStr, c_char, c_void};
    use std::sync::Once;

    use tikv_jemalloc_sys as je;

    use crate::rows::one_by_one::OnePage;
    use crate::subject::PAGE_BYTES;

    const FLAGS: i32 = je::MALLOCX_ALIGN(PAGE_BYTES);

    pub(super) struct Jemalloc;

    impl OnePage for Jemalloc {
        #[inline]
        fn get(&mut self) -> usize {
            // SAFETY: the size is not zero, and the flags hold a power of two.
            unsafe { je::mallocx(PAGE_BYTES, FLAGS) as usize }
        }

        #[inline]
        fn put_back(&mut self, addr: usize) {
            // SAFETY: `addr` came from `mallocx` with this size and these flags, and is put back once.
            unsafe { je::sdallocx(addr as *mut _, PAGE_BYTES, FLAGS) }
        }
    }

    /// Slots of a thread's cache for each size, the most that jemalloc allows. The *least* number decides: a slab
    /// holds one object of 4096 bytes, and a cache is a multiple of that, or the least (20 unless it is said).
    const CACHED: u32 = 2048;
    /// Bytes between two clearings of the cache, which by default come every 16 pages: practically never.
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

    /// Checks that the options above are in force.
    pub(in crate::rows) fn keep_memory() {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            let in_force = (option(c"opt.dirty_decay_ms"), option(c"opt.muzzy_decay_ms"));
            assert_eq!(in_force, (-1isize, -1isize), "jemalloc did not take the settings that the table names");
            let in_force = (option(c"opt.tcache_nslots_small_min"), option(c"opt.tcache_nslots_small_max"));
            assert_eq!(in_force, (CACHED, CACHED), "jemalloc did not take the size of its caches");
            let cleared_after: usize = option(c"opt.tcache_gc_incr_bytes");
            assert_eq!(cleared_after, CLEARED_AFTER, "jemalloc clears its caches");
        });
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
pub(super) mod snmalloc {
    use crate::rows::Unavailable;
    use crate::rows::one_by_one::OnePage;
    use crate::subject::PAGE_BYTES;

    /// Its build script leaves the assertions in unless `NDEBUG` comes from outside, as `.cargo/config.toml` gives it.
    /// A figure with them would be slower than what users get.
    pub(in crate::rows) fn check_build() -> Result<(), Unavailable> {
        if env!("BENCH_CXXFLAGS").contains("-DNDEBUG") {
            return Ok(());
        }
        Err(Unavailable("built with its assertions on; build with CXXFLAGS=-DNDEBUG".to_owned()))
    }

    pub(super) struct Snmalloc;

    impl OnePage for Snmalloc {
        #[inline]
        fn get(&mut self) -> usize {
            // SAFETY: the alignment is a power of two, the size not zero.
            unsafe { snmalloc_sys::sn_rust_alloc(PAGE_BYTES, PAGE_BYTES) as usize }
        }

        #[inline]
        fn put_back(&mut self, addr: usize) {
            // SAFETY: `addr` came from `sn_rust_alloc` with this alignment and size, and is put back once.
            unsafe { snmalloc_sys::sn_rust_dealloc(addr as *mut _, PAGE_BYTES, PAGE_BYTES) };
        }
    }
}
