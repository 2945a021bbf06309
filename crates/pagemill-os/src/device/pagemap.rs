//! Physical addresses: the process's page map (`/proc/self/pagemap`), and locking pages in memory (`mlock`).
use crate::Errno;
use crate::page::{outward, real_page};
use crate::proc;
use core::ops::Range;
use core::ptr::with_exposed_provenance_mut;
use pagemill_core::PAGE_SIZE;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Entries that are read at once.
const ENTRIES: usize = 4096;
const IS_PRESENT: u64 = 1 << 63;
const FRAME: u64 = (1 << 55) - 1;

/// Calls `each` with the number of the physical frame behind each page of `memory`, in order: `None` if the page has no frame
/// now, and 0 if the process may not know it (it has no CAP_SYS_ADMIN).
///
/// # Errors
/// The system's, or the first error of `each`.
///
/// ```
/// # #[cfg(not(miri))] {
/// let map = pagemill_os::Mapping::reserve(8192, 4096).unwrap();
/// // SAFETY: ours.
/// unsafe { *map.as_ptr::<u8>() = 1 };
/// let mut frames = Vec::new();
/// let keep = |frame| Ok(frames.push(frame));
/// pagemill_os::device::pagemap::frames(map.addr()..map.addr() + 8192, keep).unwrap();
/// assert!(frames[0].is_some() && frames[1].is_none());
/// # }
/// ```
pub fn frames(memory: Range<usize>, mut each: impl FnMut(Option<u64>) -> io::Result<()>) -> io::Result<()> {
    let map = File::open("/proc/self/pagemap")?;
    let page = real_page();
    let pages = outward(memory.clone(), page);
    let mut entries = vec![0; ENTRIES.min(pages.len() / page) * 8];
    for start in pages.clone().step_by(ENTRIES * page) {
        let n = ((pages.end - start) / page).min(ENTRIES);
        map.read_exact_at(&mut entries[..n * 8], (start / page * 8) as u64)?;
        for (at, entry) in (start..).step_by(page).zip(entries[..n * 8].as_chunks().0) {
            let frames = frames_of(u64::from_ne_bytes(*entry), at, page, &memory);
            frames.into_iter().try_for_each(&mut each)?;
        }
    }
    Ok(())
}

/// The frames of the pages of `memory` inside the system's page of `page` bytes at `at`, by its entry.
fn frames_of(entry: u64, at: usize, page: usize, memory: &Range<usize>) -> impl IntoIterator<Item = Option<u64>> {
    let frame = (entry & IS_PRESENT != 0).then_some(entry & FRAME);
    let parts = (at.max(memory.start)..(at + page).min(memory.end)).step_by(PAGE_SIZE);
    // Frame 0 means that the number is not shown.
    let frame_at = move |part: usize| match frame? {
        0 => Some(0),
        frame => Some(frame * (page / PAGE_SIZE) as u64 + ((part - at) / PAGE_SIZE) as u64),
    };
    parts.map(frame_at)
}

/// Commits memory and keeps it from being swapped out.
///
/// # Errors
/// The system's: `ENOMEM` or `EPERM` above `RLIMIT_MEMLOCK`, `EAGAIN` if memory is short.
///
/// ```
/// let map = pagemill_os::Mapping::reserve(4096, 4096).unwrap();
/// # #[cfg(not(miri))] {
/// use pagemill_os::device::pagemap;
/// let range = map.addr()..map.addr() + 4096;
/// if pagemap::lock(range.clone()).is_ok() {
///     assert!(pagemap::is_locked(range.clone()).unwrap());
///     pagemap::unlock(range);
/// }
/// # }
/// ```
pub fn lock(memory: Range<usize>) -> Result<(), Errno> {
    // SAFETY: it changes no contents.
    unsafe { rustix::mm::mlock(with_exposed_provenance_mut(memory.start), memory.len()) }.map_err(Errno::of)
}

/// Allows memory to be swapped out again, even if other code locked it, too. See the example of [`lock`].
pub fn unlock(memory: Range<usize>) {
    // SAFETY: it changes no contents. It fails only where nothing is mapped.
    let _ = unsafe { rustix::mm::munlock(with_exposed_provenance_mut(memory.start), memory.len()) };
}

/// Whether all of the memory is locked. See the example of [`lock`].
///
/// # Errors
/// The system's.
pub fn is_locked(memory: Range<usize>) -> io::Result<bool> {
    proc::is_locked(memory)
}

#[cfg(test)]
mod tests {
    use super::{IS_PRESENT, frames_of};

    #[test]
    fn a_large_page_of_the_system_holds_several_frames_in_order() {
        let of = |entry, at, page, memory| frames_of(entry, at, page, &memory).into_iter().collect::<Vec<_>>();
        assert_eq!(of(IS_PRESENT | 7, 0x4000, 0x1000, 0x4000..0x9000), [Some(7)]);
        assert_eq!(of(IS_PRESENT | 7, 0x4000, 0x4000, 0x4000..0x9000), [28, 29, 30, 31].map(Some));
        assert_eq!(of(IS_PRESENT | 7, 0x4000, 0x4000, 0x5000..0x7000), [29, 30].map(Some));
        assert_eq!(of(IS_PRESENT, 0x4000, 0x4000, 0x4000..0x6000), [Some(0); 2], "not shown");
        assert_eq!(of(7, 0x4000, 0x4000, 0x4000..0x6000), [None; 2], "not there");
    }
}
