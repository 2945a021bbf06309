//! What the system's own files say of this process and of the machine: `/proc`, and what `/sys` says of CPUs and huge pages.
//!
//! Sizes are in bytes. A function returns `None` where its file is missing or has another format, so each caller decides what
//! to assume then. Two subjects have modules of their own: control groups ([`MemoryLimit`](crate::MemoryLimit)) and nodes
//! ([`Topology`](crate::Topology)).
use crate::Errno;
use crate::page::real_page;
use core::ops::Range;
use std::fs::read_to_string;
use std::io;

/// CPU and node numbers are below this, more than any system has.
const NUMBERS: usize = 1 << 16;

/// The machine's memory.
///
/// ```
/// assert!(pagemill_os::total_memory().is_some_and(|bytes| bytes >= 1 << 20));
/// ```
pub fn total_memory() -> Option<usize> {
    // In a container the file may show the container's memory, which no system call does.
    let listed = read_to_string("/proc/meminfo").ok().and_then(|text| bytes_in(field(&text, "MemTotal:")?));
    listed.or_else(|| {
        if cfg!(miri) {
            return None;
        }
        // SAFETY: sysconf reads no memory of ours.
        let pages = unsafe { libc::sysconf(libc::_SC_PHYS_PAGES) };
        usize::try_from(pages).ok()?.checked_mul(real_page())
    })
}

/// The nodes that this process may have memory of (its cpuset), by the system's numbers.
///
/// ```
/// assert!(pagemill_os::allowed_nodes().is_none_or(|nodes| !nodes.is_empty()));
/// ```
pub fn allowed_nodes() -> Option<Vec<usize>> {
    allowed_nodes_in(&read_to_string("/proc/self/status").ok()?)
}

/// By what `/proc/self/status` says.
fn allowed_nodes_in(status: &str) -> Option<Vec<usize>> {
    parse_list(field(status, "Mems_allowed_list:")?)
}

/// What this process has locked.
pub(crate) fn locked_memory() -> Option<usize> {
    bytes_in(field(&read_to_string("/proc/self/status").ok()?, "VmLck:")?)
}

/// What this process may lock. `None` if that is not limited.
pub(crate) fn lock_limit() -> Option<usize> {
    limit_of(libc::RLIMIT_MEMLOCK)
}

/// The address space that this process may have, in bytes (`RLIMIT_AS`). `None` if that is not limited.
///
/// ```
/// assert!(pagemill_os::address_space_limit().is_none_or(|bytes| bytes > 1 << 20));
/// ```
pub fn address_space_limit() -> Option<usize> {
    limit_of(libc::RLIMIT_AS)
}

fn limit_of(resource: libc::__rlimit_resource_t) -> Option<usize> {
    if cfg!(miri) {
        return None;
    }
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the structure is written.
    let rc = unsafe { libc::getrlimit(resource, &raw mut limit) };
    let is_limited = rc == 0 && limit.rlim_cur != libc::RLIM_INFINITY;
    is_limited.then(|| usize::try_from(limit.rlim_cur).unwrap_or(usize::MAX))
}

/// Huge pages of 2 MiB, counted in such pages.
pub(crate) struct HugePages {
    /// Set aside by the administrator.
    pub(crate) reserved: usize,
    /// Of those, pages that no mapping has taken or reserved.
    pub(crate) free: usize,
}

pub(crate) fn huge_pages() -> Option<HugePages> {
    let count = |name| -> Option<usize> {
        let path = format!("/sys/kernel/mm/hugepages/hugepages-2048kB/{name}_hugepages");
        read_to_string(path).ok()?.trim().parse().ok()
    };
    Some(HugePages { reserved: count("nr")?, free: count("free")?.saturating_sub(count("resv")?) })
}

/// The largest CPU number that this system can have.
pub(crate) fn last_possible_cpu() -> Option<usize> {
    // The file reads "0-7" or "0,2-5": the last number is the largest.
    let text = read_to_string("/sys/devices/system/cpu/possible").ok()?;
    text.trim().rsplit(['-', ',']).next()?.parse().ok()
}

/// Whether other processes may see a part of `addr..end`. `EFAULT` if a part is not mapped readable and writable.
pub(crate) fn is_shared(addr: usize, end: usize) -> Result<bool, Errno> {
    if cfg!(miri) {
        return Ok(true); // The file lists the mappings of the interpreter.
    }
    let Ok(maps) = read_to_string("/proc/self/maps") else {
        return Ok(true); // Nothing says that it is private.
    };
    let mut covered = addr;
    let mut is_shared = false;
    for (range, permissions) in maps.lines().filter_map(area).filter(|(range, _)| range.start < end && range.end > addr)
    {
        if range.start > covered || !permissions.starts_with("rw") {
            return Err(Errno::EFAULT);
        }
        covered = range.end;
        is_shared |= permissions.as_bytes().get(3) == Some(&b's');
    }
    if covered < end { Err(Errno::EFAULT) } else { Ok(is_shared) }
}

/// Whether all of this memory is locked.
pub(crate) fn is_locked(memory: Range<usize>) -> io::Result<bool> {
    Ok(is_locked_in(&read_to_string("/proc/self/smaps")?, memory))
}

/// By what `/proc/self/smaps` says: a line for each area, in ascending order, and some lines later its flags.
fn is_locked_in(maps: &str, memory: Range<usize>) -> bool {
    let (mut range, mut unlocked) = (0..0, memory.start);
    for line in maps.lines() {
        if let Some((start, _)) = area(line) {
            range = start;
        } else if let Some(flags) = line.strip_prefix("VmFlags:")
            && range.contains(&unlocked)
            && flags.split_whitespace().any(|flag| flag == "lo")
        {
            unlocked = range.end;
        }
    }
    unlocked >= memory.end
}

/// The addresses and the permissions in a line "start-end rwxp ...".
fn area(line: &str) -> Option<(Range<usize>, &str)> {
    let (range, rest) = line.split_once(' ')?;
    let (start, end) = range.split_once('-')?;
    let number = |text| usize::from_str_radix(text, 16).ok();
    Some((number(start)?..number(end)?, rest))
}

/// What follows `name` on the line that begins with it.
pub(crate) fn field<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

/// From "24684096 kB".
pub(crate) fn bytes_in(text: &str) -> Option<usize> {
    text.strip_suffix(" kB")?.parse::<usize>().ok()?.checked_mul(1 << 10)
}

/// The numbers in a list such as `0-3,8`, which the system writes in ascending order, for CPUs and for nodes. `None` if it is
/// no such list, or has a number that no system has.
///
/// ```
/// use pagemill_os::parse_list;
/// assert_eq!(parse_list("0-3,8\n"), Some(vec![0, 1, 2, 3, 8]));
/// assert_eq!(parse_list("\n"), Some(vec![]));
/// assert_eq!(parse_list("3-1"), None);
/// ```
pub fn parse_list(list: &str) -> Option<Vec<usize>> {
    let list = list.strip_suffix('\n').unwrap_or(list);
    let mut found = Vec::new();
    if list.is_empty() {
        return Some(found);
    }
    let number = |text: &str| {
        let is_number = text.bytes().all(|byte| byte.is_ascii_digit()); // `parse` would take a sign.
        text.parse::<usize>().ok().filter(|&number| is_number && number < NUMBERS)
    };
    for piece in list.split(',') {
        let (first, last) = piece.split_once('-').unwrap_or((piece, piece));
        let (first, last) = (number(first)?, number(last)?);
        if first > last || found.last().is_some_and(|&before| before >= first) {
            return None;
        }
        found.extend(first..=last);
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::{allowed_nodes, allowed_nodes_in, bytes_in, field, is_locked_in};

    #[test]
    fn allowed_nodes_are_read_from_the_status_file() {
        let of = |status: &str| allowed_nodes_in(status);
        assert_eq!(of("Cpus_allowed_list:\t0-1\nMems_allowed_list:\t0,2\nthreads:\t1\n"), Some(vec![0, 2]));
        assert_eq!((of("Name:\tx\n"), of("Mems_allowed_list:\tx\n")), (None, None));
        // A process may be called anything.
        assert_eq!(of("Name:\tMems_allowed_list:\t1\nMems_allowed_list:\t0\n"), Some(vec![0]));
        #[cfg(not(miri))]
        assert!(allowed_nodes().is_some_and(|nodes| !nodes.is_empty()));
    }

    #[test]
    fn sizes_in_kb_become_bytes() {
        let text = "MemTotal:       24684096 kB\nMemFree: 12 kB\n";
        assert_eq!(field(text, "MemTotal:").and_then(bytes_in), Some(24_684_096 << 10));
        assert_eq!(field(text, "Mem:"), None);
        for wrong in ["12", "12 MB", "-1 kB", "18446744073709551615 kB"] {
            assert_eq!(bytes_in(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_range_is_locked_if_every_area_in_it_is() {
        let maps = "1000-3000 rw-p 00000000 00:00 0 \nSize: 8 kB\nVmFlags: rd wr lo ac\n\
                    3000-4000 rw-p 00000000 00:00 0 [heap]\nVmFlags: rd lo\n\
                    4000-5000 rw-p 00000000 00:00 0\nVmFlags: rd wr ld\n";
        for (range, is_locked) in [(0x1000..0x4000, true), (0x2000..0x3000, true), (0x3000..0x5000, false)] {
            assert_eq!(is_locked_in(maps, range.clone()), is_locked, "{range:x?}");
        }
        assert!(!is_locked_in(maps, 0x4000..0x5000) && !is_locked_in("", 0x1000..0x2000));
    }
}
