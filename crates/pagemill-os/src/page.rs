//! The system's page size. Pagemill's pages have 4 KiB everywhere; the system's may have 16 or 64. Ranges that the system maps,
//! commits or takes back must consist of whole pages of the system. Otherwise it would round them, and take back neighbouring
//! memory that is in use.
use core::ops::Range;
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use pagemill_core::PAGE_SIZE;

/// The size of the huge pages that [`Mapping::huge`](crate::Mapping::huge) and [`Mapping::memfd`](crate::Mapping::memfd) take, in bytes.
///
/// ```
/// assert_eq!(pagemill_os::HUGE_PAGE_SIZE, 2 << 20);
/// ```
pub const HUGE_PAGE_SIZE: usize = 2 << 20;

/// 0 until the first call.
static PAGE: AtomicUsize = AtomicUsize::new(0);

/// The size of the system's pages in bytes; at least that of Pagemill's.
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

/// Makes this process assume larger system pages than there are, for tests on machines with small ones. Call it before any
/// memory is mapped.
#[doc(hidden)]
pub fn pretend_system_page(bytes: usize) {
    assert!(bytes.is_power_of_two() && bytes >= real_page(), "{bytes} bytes cannot pass for a page");
    PAGE.store(bytes, Relaxed);
}

/// The true size of the system's pages, whatever a test pretends.
pub(crate) fn real_page() -> usize {
    if cfg!(miri) {
        return PAGE_SIZE;
    }
    // SAFETY: sysconf reads no memory of ours.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(PAGE_SIZE)
}

/// The range, extended to whole pages of `page` bytes.
pub(crate) fn outward(range: Range<usize>, page: usize) -> Range<usize> {
    let start = range.start / page * page;
    start..if range.is_empty() { start } else { range.end.next_multiple_of(page) }
}

/// Whether the range consists of whole pages of `page` bytes.
pub(crate) fn is_whole(range: &Range<usize>, page: usize) -> bool {
    range.start.is_multiple_of(page) && range.end.is_multiple_of(page)
}
