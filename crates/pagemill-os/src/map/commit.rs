//! Committing memory, locking it, and giving it back to the system.
use super::{Kind, MapError, Mapping, os};
use crate::Errno;
use crate::page::{HUGE_PAGE_SIZE, is_whole, outward};
use core::ops::Range;
use pagemill_core::PAGE_SIZE;
use std::os::fd::AsFd;

/// Offsets and lengths are in bytes: multiples of Pagemill's page size, or of 2 MiB if [`Mapping::page_bytes`] is that.
/// Otherwise, or if they reach past the end, the call fails with `EINVAL`. With length 0 a call does nothing. The system
/// commits and locks every page of its own that the range overlaps.
impl Mapping {
    /// Commits the range in one call instead of page by page at the first touch. Contents stay as they are, and new pages read
    /// zero. After an error a part may be committed.
    ///
    /// # Errors
    /// The system's: `EINVAL` before Linux 5.14, where the caller can touch the pages instead; `ENOMEM` or `EFAULT` where
    /// touching them would kill the process, for lack of memory or of huge pages.
    ///
    /// ```
    /// let map = pagemill_os::Mapping::reserve(1 << 20, 4096).unwrap();
    /// match map.populate(0, 1 << 20) {
    ///     Ok(()) => assert_eq!(map.resident(0, 1 << 20), Ok(1 << 20)),
    ///     Err(errno) => assert_eq!(errno.0, 22, "an old system"),
    /// }
    /// assert!(map.populate(4096, 1 << 20).is_err(), "that is more than there is");
    /// ```
    pub fn populate(&self, offset: usize, len: usize) -> Result<(), Errno> {
        os::populate(self.part_outward(offset, len)?)
    }

    /// Gives the range's memory back to the system. Afterwards it reads zero, in every process that shares it, and is committed
    /// again when it is touched. Works on locked memory, too, which is then no longer resident.
    ///
    /// # Errors
    /// `EOPNOTSUPP` for memory that was [adopted](Self::adopt) or is [shared](Self::shared). `EINVAL` when the range does not
    /// consist of whole [pages](Self::page_bytes). The system's: `EINVAL` for private hugetlb before Linux 5.18, or for other
    /// memory that it will not take back.
    ///
    /// # Safety
    /// The range is free: nobody relies on its contents or holds a reference into it.
    ///
    /// ```
    /// let map = pagemill_os::Mapping::reserve(1 << 20, 4096).unwrap();
    /// // SAFETY: ours; nobody else uses it.
    /// unsafe {
    ///     *map.as_ptr::<u8>() = 7;
    ///     map.release(0, map.page_bytes()).unwrap();
    ///     assert_eq!(*map.as_ptr::<u8>(), 0);
    /// }
    /// ```
    pub unsafe fn release(&self, offset: usize, len: usize) -> Result<(), Errno> {
        let addr = self.part(offset, len)?;
        if len == 0 {
            return Ok(());
        }
        if !is_whole(&(addr..addr + len), self.page_bytes()) {
            return Err(Errno::EINVAL); // The system would take back whole pages, beyond the range.
        }
        match &self.kind {
            Kind::Private { .. } => os::discard(addr, len),
            Kind::Memfd { fd, .. } => os::punch_hole(fd.as_fd(), offset, len),
            Kind::Brought { .. } | Kind::Shared { .. } => Err(Errno::EOPNOTSUPP),
        }
    }

    /// How many bytes of the range are committed now: in this process, or in any process for a memfd. A page that was only read
    /// may count, although it has no memory of its own.
    ///
    /// # Errors
    /// The system's.
    ///
    /// ```
    /// let map = pagemill_os::Mapping::reserve(1 << 20, 4096).unwrap();
    /// // SAFETY: ours.
    /// unsafe { *map.as_ptr::<u8>().add(4096) = 1 };
    /// assert_eq!(map.resident(4096, 4096), Ok(4096));
    /// ```
    pub fn resident(&self, offset: usize, len: usize) -> Result<usize, Errno> {
        os::resident(self.part(offset, len)?, len)
    }

    /// Commits the range and keeps it in memory (mlock): it is never swapped out.
    ///
    /// # Errors
    /// [`MapError::LockLimit`], with the limit, when the process may not lock that much. Otherwise the system's.
    ///
    /// ```
    /// use pagemill_os::{MapError, Mapping};
    /// let map = Mapping::reserve(1 << 16, 4096).unwrap();
    /// match map.lock(0, 4096) {
    ///     Ok(()) => assert_eq!(map.resident(0, 4096), Ok(4096)),
    ///     Err(why) => assert!(matches!(why, MapError::LockLimit { wanted: 4096, .. }), "{why}"),
    /// }
    /// ```
    pub fn lock(&self, offset: usize, len: usize) -> Result<(), MapError> {
        let pages = self.part_outward(offset, len).map_err(MapError::of("mlock"))?;
        os::lock(pages.start, pages.len()).map_err(|errno| MapError::of_lock(errno, len))
    }

    /// The part of the mapping, extended to whole pages of the system.
    pub(crate) fn part_outward(&self, offset: usize, len: usize) -> Result<Range<usize>, Errno> {
        let addr = self.part(offset, len)?;
        Ok(outward(addr..addr + len, self.page_bytes()))
    }

    /// The first address of a part of the mapping.
    fn part(&self, offset: usize, len: usize) -> Result<usize, Errno> {
        let page = if self.page_bytes() < HUGE_PAGE_SIZE { PAGE_SIZE } else { HUGE_PAGE_SIZE };
        let is_inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        let is_whole = offset.is_multiple_of(page) && len.is_multiple_of(page);
        if is_inside && is_whole { Ok(self.addr + offset) } else { Err(Errno::EINVAL) }
    }
}
