//! The memory of an arena and of its metadata: six kinds with one interface.
//!
//! | kind | made by | commits | goes back by |
//! |---|---|---|---|
//! | private anonymous | [`Mapping::reserve`] | page by page, as it is touched | `MADV_DONTNEED` |
//! | private hugetlb | [`Mapping::huge`] | 2 MiB at a time, from pages reserved when it is mapped | `MADV_DONTNEED` (Linux 5.18) |
//! | memfd | [`Mapping::memfd`] | page by page, as any process touches it | a hole punched into the file |
//! | memfd of hugetlb | [`Mapping::memfd`] | 2 MiB at a time, from pages reserved when it is mapped | a hole punched into the file |
//! | shared with children | [`Mapping::shared`] | page by page, as the process or a child touches it | not at all |
//! | brought by the caller | [`Mapping::adopt`] | as the caller arranged | not at all: it stays the caller's |
//!
//! Invariants: R1, `addr..addr + len` is mapped, readable and writable, while the mapping lives. R2, it is unmapped on drop
//! exactly where this module mapped it. R3, what [`Mapping::release`] gave back reads zero. R4, each range of this module's own
//! mappings that is passed to the system consists of whole pages of the system.
//!
//! Another process maps the same memory by the file descriptor, if the kind has one; see [`Mapping::fd`]. This module does not
//! decide when memory is committed or given back: the arena does.
mod commit;
mod error;
mod os;

use crate::Errno;
use crate::page::{HUGE_PAGE_SIZE, system_page};
use crate::proc;
use core::ffi::CStr;
use core::sync::atomic::{AtomicBool, Ordering::Relaxed};
use pagemill_core::PAGE_SIZE;
use rustix::mm::{Advice, MapFlags, madvise};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

pub use error::MapError;

/// A range of memory, readable and writable. It reads zero until it is written, except memory that was [adopted](Self::adopt).
/// Unmapped on drop.
///
/// ```
/// let map = pagemill_os::Mapping::reserve(4096, 4096).unwrap();
/// // SAFETY: the mapping is ours and has that size.
/// unsafe { assert_eq!(*map.as_ptr::<u8>().add(4095), 0) };
/// ```
#[derive(Debug)]
pub struct Mapping {
    addr: usize,
    len: usize,
    /// The address and length to unmap, alignment slack included; length 0 if the caller mapped the memory.
    whole: (usize, usize),
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Private {
        is_huge: bool,
    },
    Memfd {
        fd: OwnedFd,
        is_huge: bool,
    },
    /// Gone: the system had no memory for a copy when this process parted from its parent.
    Shared {
        is_gone: AtomicBool,
    },
    Brought {
        is_shared: bool,
    },
}

impl Mapping {
    /// Reserves `len` bytes, rounded up to the system's pages, of private anonymous memory aligned to `align`, a power of two.
    /// Nothing is charged before it is touched.
    ///
    /// # Errors
    /// The system's, when it refuses.
    ///
    /// # Panics
    /// When `len` is zero or `align` is no power of two; so do the other kinds.
    pub fn reserve(len: usize, align: usize) -> Result<Self, Errno> {
        let page = system_page();
        let len = whole_pages(len, align, page)?;
        let align = align.max(page);
        // The system aligns to a page only: ask for more, and unmap the excess.
        let slack = (align - PAGE_SIZE).next_multiple_of(page);
        let size = len.checked_add(slack).ok_or(Errno::ENOMEM)?;
        let base = os::map(size)?;
        let addr = base.next_multiple_of(align);
        let kind = Kind::Private { is_huge: false };
        if cfg!(miri) {
            return Ok(Self { addr, len, whole: (base, size), kind });
        }
        os::unmap(base, addr - base);
        os::unmap(addr + len, base + size - addr - len);
        Ok(Self { addr, len, whole: (addr, len), kind })
    }

    /// Maps `len` bytes (rounded up to 2 MiB) of hugetlb pages, which the administrator set aside, aligned to `align` and at
    /// least to 2 MiB. They are reserved for this mapping at once, so touching it cannot fail for lack of them. That no longer
    /// holds after a [release](Self::release); [populate](Self::populate) then reports a failure. Private: after a fork, the
    /// first process to write a page needs another huge page, or dies of `SIGBUS`.
    ///
    /// # Errors
    /// [`MapError::HugePages`] when too few are free: it says how many are, and how to set aside more. Otherwise the system's.
    ///
    /// ```
    /// use pagemill_os::{MapError, Mapping};
    /// match Mapping::huge(4 << 20, 1 << 30) {
    ///     Ok(map) => assert_eq!((map.bytes(), map.addr() % (1 << 30)), (4 << 20, 0)),
    ///     Err(why @ MapError::HugePages { .. }) => assert!(why.to_string().contains("nr_hugepages")),
    ///     Err(why) => assert!(matches!(why, MapError::System { .. }), "{why}"),
    /// }
    /// ```
    pub fn huge(len: usize, align: usize) -> Result<Self, MapError> {
        let refused = MapError::of("mmap");
        let len = whole_pages(len, align, HUGE_PAGE_SIZE).map_err(refused)?;
        let align = align.max(HUGE_PAGE_SIZE);
        let flags = MapFlags::PRIVATE | MapFlags::HUGETLB | MapFlags::HUGE_2MB;
        let addr = os::place(len, align, flags, None).map_err(|errno| MapError::of_huge(errno, len))?;
        Ok(Self { addr, len, whole: (addr, len), kind: Kind::Private { is_huge: true } })
    }

    /// Maps `len` bytes of a new file that lives in memory alone (memfd), aligned to `align`. A process that has [its
    /// descriptor](Self::fd) can map the same memory; no process can change its size. `/proc/self/maps` shows `name`. With
    /// `is_huge` it consists of hugetlb pages, as in [`Mapping::huge`].
    ///
    /// # Errors
    /// As [`Mapping::huge`]; `EINVAL` also for a name of more than 249 bytes.
    ///
    /// ```
    /// # #[cfg(not(miri))] {
    /// use pagemill_os::Mapping;
    /// let map = Mapping::memfd(c"frames", 1 << 20, 1 << 21, false).unwrap();
    /// assert!(map.is_shared() && map.fd().is_some() && map.addr() % (1 << 21) == 0);
    /// # }
    /// ```
    pub fn memfd(name: &CStr, len: usize, align: usize, is_huge: bool) -> Result<Self, MapError> {
        let page = if is_huge { HUGE_PAGE_SIZE } else { system_page() };
        let len = whole_pages(len, align, page).map_err(MapError::of("memfd_create"))?;
        let fd = os::memory_file(name, len, is_huge).map_err(|(call, errno)| MapError::of(call)(errno))?;
        let refused = |errno| if is_huge { MapError::of_huge(errno, len) } else { MapError::of("mmap")(errno) };
        let addr = os::place(len, align.max(page), MapFlags::SHARED, Some(fd.as_fd())).map_err(refused)?;
        Ok(Self { addr, len, whole: (addr, len), kind: Kind::Memfd { fd, is_huge } })
    }

    /// Reserves `len` bytes, rounded up to the system's pages, of anonymous memory that this process shares with its forked
    /// children, and they with theirs.
    ///
    /// # Errors
    /// The system's, when it refuses.
    ///
    /// ```
    /// let map = pagemill_os::Mapping::shared(100).unwrap();
    /// assert!(map.is_shared() && map.fd().is_none() && map.bytes() == pagemill_os::system_page());
    /// ```
    pub fn shared(len: usize) -> Result<Self, Errno> {
        let len = whole_pages(len, 1, system_page())?;
        let addr = os::map_shared(len)?;
        Ok(Self { addr, len, whole: (addr, len), kind: Kind::Shared { is_gone: AtomicBool::new(false) } })
    }

    /// In the child of a fork: replaces inherited [shared](Self::shared) memory by a copy of its present contents, which only
    /// this process and its own children share. Does nothing to memory of another kind.
    ///
    /// # Errors
    /// The system's. Then the memory is unmapped, so nothing stays shared with the parent, and later calls return `EFAULT`, in
    /// this process and in its children.
    ///
    /// # Safety
    /// This process has one thread, and does not touch the memory after an error.
    pub unsafe fn part_from_parent(&self) -> Result<(), Errno> {
        let Kind::Shared { is_gone } = &self.kind else { return Ok(()) };
        if is_gone.load(Relaxed) {
            return Err(Errno::EFAULT);
        }
        os::renew_shared(self.addr, self.len).inspect_err(|_| is_gone.store(true, Relaxed))
    }

    /// Takes over a range that the caller mapped: pinned, device or static memory, or another process's memfd. It is not
    /// unmapped on drop, is never given back, and need not be zero. It counts as [shared](Self::is_shared) unless
    /// `/proc/self/maps` says that all of it is private.
    ///
    /// # Errors
    /// `EINVAL` when `start` or `len` is no multiple of the page size or is 0; `EFAULT` when a part of the range is not mapped
    /// readable and writable.
    ///
    /// # Safety
    /// While the mapping lives, `len` bytes at `start` stay mapped, readable and writable, and are used through the mapping
    /// only.
    ///
    /// ```
    /// use pagemill_os::{Errno, Mapping};
    /// let own = Mapping::reserve(1 << 16, 4096).unwrap();
    /// // SAFETY: it is ours, outlives what adopts it, and nobody else uses it.
    /// let map = unsafe { Mapping::adopt(own.as_ptr(), own.bytes()) }.unwrap();
    /// assert_eq!((map.addr(), map.bytes()), (own.addr(), 1 << 16));
    /// // SAFETY: refused.
    /// let odd = unsafe { Mapping::adopt(own.as_ptr::<u8>().wrapping_add(1), 4096) };
    /// assert_eq!(odd.unwrap_err(), Errno(22));
    /// ```
    pub unsafe fn adopt(start: *mut u8, len: usize) -> Result<Self, Errno> {
        let addr = start.expose_provenance();
        let is_whole = addr.is_multiple_of(PAGE_SIZE) && len.is_multiple_of(PAGE_SIZE) && addr != 0 && len != 0;
        let end = addr.checked_add(len).filter(|_| is_whole).ok_or(Errno::EINVAL)?;
        let is_shared = proc::is_shared(addr, end)?;
        Ok(Self { addr, len, whole: (addr, 0), kind: Kind::Brought { is_shared } })
    }

    /// Its first address.
    pub fn addr(&self) -> usize {
        self.addr
    }
    /// Its size in bytes.
    pub fn bytes(&self) -> usize {
        self.len
    }
    /// Its first address, as a pointer to `T`.
    pub fn as_ptr<T>(&self) -> *mut T {
        core::ptr::with_exposed_provenance_mut(self.addr)
    }

    /// The page size, in bytes, in which the system commits this memory and takes it back.
    ///
    /// ```
    /// let map = pagemill_os::Mapping::reserve(1, 1).unwrap();
    /// assert_eq!(map.page_bytes(), pagemill_os::system_page());
    /// ```
    pub fn page_bytes(&self) -> usize {
        match self.kind {
            Kind::Private { is_huge: true } | Kind::Memfd { is_huge: true, .. } => HUGE_PAGE_SIZE,
            _ => system_page(),
        }
    }

    /// Whether another process may see what this one writes, as parent and child do after a fork.
    ///
    /// ```
    /// assert!(!pagemill_os::Mapping::reserve(4096, 4096).unwrap().is_shared());
    /// ```
    pub fn is_shared(&self) -> bool {
        match self.kind {
            Kind::Private { .. } => false,
            Kind::Memfd { .. } | Kind::Shared { .. } => true,
            Kind::Brought { is_shared } => is_shared,
        }
    }

    /// The descriptor by which another process shares this memory: it maps it from offset 0 with `MAP_SHARED`, after inheriting
    /// it or receiving it over a Unix socket. It is closed on exec. `None` unless made by [`Mapping::memfd`].
    ///
    /// ```
    /// assert!(pagemill_os::Mapping::reserve(4096, 4096).unwrap().fd().is_none());
    /// ```
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.kind {
            Kind::Memfd { fd, .. } => Some(fd.as_fd()),
            _ => None,
        }
    }

    /// Makes the memory read zero in the child of a fork (`MADV_WIPEONFORK`, Linux 4.14).
    ///
    /// # Errors
    /// The system's, for memory that is not private and anonymous.
    ///
    /// ```
    /// let map = pagemill_os::Mapping::reserve(4096, 4096).unwrap();
    /// map.wipe_on_fork().unwrap();
    /// ```
    pub fn wipe_on_fork(&self) -> Result<(), Errno> {
        if cfg!(miri) {
            return Ok(()); // Miri cannot fork.
        }
        // SAFETY: the range is ours, and the advice changes no contents here.
        unsafe { madvise(self.as_ptr(), self.len, Advice::LinuxWipeOnFork) }.map_err(Errno::of)
    }

    /// Advises the system to use 2 MiB pages here, or not to. Returns whether it took the advice.
    pub fn advise_huge_pages(&self, wanted: bool) -> bool {
        let advice = if wanted { Advice::LinuxHugepage } else { Advice::LinuxNoHugepage };
        // SAFETY: the range is ours, and the advice changes no contents.
        !cfg!(miri) && unsafe { madvise(self.as_ptr(), self.len, advice) }.is_ok()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if matches!(&self.kind, Kind::Shared { is_gone } if is_gone.load(Relaxed)) {
            return; // Already unmapped: the range may hold other memory by now.
        }
        os::unmap(self.whole.0, self.whole.1);
    }
}

/// `len` in whole pages of `page` bytes.
fn whole_pages(len: usize, align: usize, page: usize) -> Result<usize, Errno> {
    assert!(align.is_power_of_two() && len > 0, "cannot reserve {len} bytes aligned to {align}");
    len.checked_next_multiple_of(page).ok_or(Errno::ENOMEM)
}

#[cfg(test)]
mod tests {
    use super::{Mapping, system_page};

    #[test]
    fn a_reservation_is_aligned_zero_and_writable_to_its_end() {
        let len = 3 * system_page();
        let map = Mapping::reserve(len, 1 << 16).unwrap();
        assert_eq!((map.addr() % (1 << 16), map.bytes()), (0, len));
        let bytes = map.as_ptr::<u8>();
        // SAFETY: ours, and of that size.
        unsafe {
            assert_eq!(*bytes.add(len - 1), 0);
            *bytes.add(len - 1) = 7;
            assert_eq!(*bytes.add(len - 1), 7);
        }
    }

    #[test]
    fn a_released_range_reads_zero_and_its_neighbours_do_not() {
        let page = system_page();
        let map = Mapping::reserve(3 * page, 4096).unwrap();
        // SAFETY: ours, and of that size; no reference into it lives on.
        unsafe {
            map.as_ptr::<u8>().write_bytes(7, 3 * page);
            map.release(page, page).unwrap();
            let pages = core::slice::from_raw_parts(map.as_ptr::<u8>(), 3 * page);
            assert!(pages.iter().enumerate().all(|(at, &byte)| byte == if at / page == 1 { 0 } else { 7 }));
        }
    }

    #[test]
    #[cfg(not(miri))]
    fn more_than_the_address_space_is_an_error() {
        assert!(Mapping::reserve(1 << 60, 4096).is_err());
        assert!(Mapping::reserve(usize::MAX, 4096).is_err());
        assert!(Mapping::huge(1 << 60, 4096).is_err());
        assert!(Mapping::memfd(c"large", 1 << 60, 4096, false).is_err());
        assert!(Mapping::memfd(c"larger", usize::MAX, 4096, false).is_err());
    }
}
