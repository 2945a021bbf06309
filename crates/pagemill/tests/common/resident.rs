//! Resident pages by the system's account, in pages of 4 KiB, whatever the size of its own.
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// The bytes of a page of the system's own.
pub(crate) fn system_page() -> usize {
    // SAFETY: reads no memory of ours.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap()
}

/// Does the system take back less than a pageblock? Says so if not.
pub(crate) fn pages_go_singly() -> bool {
    let is_small = system_page() == 4096;
    if !is_small {
        println!("skipped: the system's pages have {} bytes, so parts of a pageblock stay", system_page());
    }
    is_small
}

/// Is each page of the range resident in this process? With larger ones of the system's, all that lie in one are or none.
/// `/proc/self/pagemap` says so: eight bytes for each of the system's, bit 63 set.
pub(crate) fn are_resident(range: &Range<usize>) -> Vec<bool> {
    let page = system_page();
    let first = range.start / page;
    let mut entries = vec![0; (range.end.div_ceil(page) - first) * 8];
    File::open("/proc/self/pagemap").unwrap().read_exact_at(&mut entries, first as u64 * 8).unwrap();
    range.clone().step_by(4096).map(|addr| entries[(addr / page - first) * 8 + 7] & 0x80 != 0).collect()
}

pub(crate) fn resident_pages(range: &Range<usize>) -> usize {
    are_resident(range).into_iter().filter(|&is_resident| is_resident).count()
}
