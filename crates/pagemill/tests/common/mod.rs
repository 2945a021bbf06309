//! What several files of tests share.
mod all_back;
mod backends;
mod caps;
pub(crate) mod edu;
pub(crate) mod kcore;
#[path = "../../../../tests/patience.rs"]
mod patience;
mod resident;
pub(crate) mod xsk;

pub(crate) use all_back::assert_all_back;
pub(crate) use backends::backends;
pub(crate) use caps::without_capabilities;

use pagemill::{Allocator, Gfp, Page};
pub(crate) use patience::{PATIENCE, until};
pub(crate) use resident::{are_resident, pages_go_singly, resident_pages, system_page};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Ends what others do until a test is over, however it ends: a failed assertion is not to leave them at it for ever.
pub(crate) struct Over<'a>(pub(crate) &'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Every page that requests of this kind get without waiting. They drain no CPU's list but their own, and this thread may
/// have been on several CPUs: what it left on their lists is drained for it.
pub(crate) fn all_without_waiting(allocator: &Allocator, gfp: Gfp) -> Vec<Page> {
    let mut pages = Vec::new();
    loop {
        let before = pages.len();
        pages.extend(std::iter::from_fn(|| allocator.alloc_page(gfp).ok()));
        if pages.len() == before && allocator.stats().listed == 0 {
            return pages;
        }
        allocator.drain();
    }
}

/// Ends this process, the child of a fork, if it hangs; later than [`until`] gives up, which says what never came.
pub(crate) fn end_if_it_hangs() {
    // SAFETY: a plain system call.
    unsafe { libc::alarm(PATIENCE.as_secs() as u32 + 60) };
}
