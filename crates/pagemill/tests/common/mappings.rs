//! The mappings of this process.
use std::ops::Range;

/// The range of addresses at the beginning of a line of `/proc/self/maps` or `smaps`, and the rest of the line.
pub(crate) fn range_of(line: &str) -> Option<(Range<usize>, &str)> {
    let (range, rest) = line.split_once(' ')?;
    let (start, end) = range.split_once('-')?;
    Some((usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?, rest))
}

/// All of them: the range of addresses, and what else the system says.
pub(crate) fn mappings() -> Vec<(Range<usize>, String)> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mapping = |line: &str| range_of(line).map(|(range, rest)| (range, rest.to_owned()));
    maps.lines().map(|line| mapping(line).unwrap_or_else(|| panic!("{line:?} is no mapping"))).collect()
}

/// Is any of the range mapped?
pub(crate) fn is_mapped(range: &Range<usize>) -> bool {
    mappings().iter().any(|(mapped, _)| mapped.start < range.end && range.start < mapped.end)
}

/// New memory that is private, readable, writable and zero; it stays mapped. It begins at a multiple of `align`.
pub(crate) fn map(bytes: usize, align: usize) -> *mut u8 {
    map_as(libc::MAP_PRIVATE, bytes, align)
}

/// As [`map`], private or shared with children.
pub(crate) fn map_as(sharing: i32, bytes: usize, align: usize) -> *mut u8 {
    let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, sharing | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
    // SAFETY: a new mapping.
    let map = unsafe { libc::mmap(std::ptr::null_mut(), bytes + align, access, flags, -1, 0) };
    assert_ne!(map, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
    map.cast::<u8>().map_addr(|addr| addr.next_multiple_of(align))
}
