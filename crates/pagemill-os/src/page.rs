//! The system's own pages. Pagemill's have 4 KiB everywhere; the system's may have 16 or 64. Whatever the system is to map, to
//! commit or to take back is told in whole pages of its own: it would round a range by itself, and take memory back that lies
//! beside it and is in use.
use core::ops::Range;
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use pagemill_core::PAGE_SIZE;

/// The size of the huge pages that [`Mapping::huge`](crate::Mapping::huge) and [`Mapping::memfd`](crate::Mapping::memfd) take, in bytes.
///
/// ```
/// assert_eq!(pagemill_os::HUGE_PAGE_SIZE, 2 << 20);
/// ```
pub const HUGE_PAGE_SIZE: usize = 2 << 20;

/// 0 until somebody asks.
static PAGE: AtomicUsize = AtomicUsize::new(0);

/// The bytes of a page of the system, at least those of Pagemill's.
///
/// ```
/// assert!(pagemill_os::system_page() >= 4096);
/// ```
pub fn system_page() -> usize {
    match PAGE.load(Relaxed) {
        0 => {
            let page = real_page().max(PAGE_SIZE);
            PAGE.store(page, Relaxed);
            page
        }
        page => page,
    }
}

/// Has this process believe that the system has larger pages than it has, for tests on machines with small ones. Before any
/// memory is mapped.
#[doc(hidden)]
pub fn pretend_system_page(bytes: usize) {
    assert!(bytes.is_power_of_two() && bytes >= real_page(), "{bytes} bytes are no page that could be pretended");
    PAGE.store(bytes, Relaxed);
}

/// The same without what is pretended: what the system counts in.
pub(crate) fn real_page() -> usize {
    if cfg!(miri) {
        return PAGE_SIZE;
    }
    // SAFETY: sysconf reads no memory of ours.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(PAGE_SIZE)
}

/// All pages of `page` bytes that the range has a part of.
pub(crate) fn outward(range: Range<usize>, page: usize) -> Range<usize> {
    let start = range.start / page * page;
    start..if range.is_empty() { start } else { range.end.next_multiple_of(page) }
}

/// Does the range consist of whole pages of `page` bytes?
pub(crate) fn is_whole(range: &Range<usize>, page: usize) -> bool {
    range.start.is_multiple_of(page) && range.end.is_multiple_of(page)
}
