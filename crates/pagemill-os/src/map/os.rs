//! The system calls under a mapping, and what stands in for them under miri.
#[cfg(not(miri))]
pub(super) use real::*;
#[cfg(miri)]
pub(super) use stand_in::*;

/// The number that a file consists of.
pub(super) fn number_in(path: &str) -> Option<usize> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(not(miri))]
mod real {
    use crate::Errno;
    use crate::page::{is_whole, outward, real_page, system_page};
    use core::ffi::CStr;
    use core::ops::Range;
    use core::ptr::{null_mut, with_exposed_provenance_mut};
    use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

    const READ_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;

    fn done(rc: i32) -> Result<(), Errno> {
        if rc == 0 { Ok(()) } else { Err(Errno::last()) }
    }

    pub(in super::super) fn map(len: usize) -> Result<usize, Errno> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        map_anywhere(len, READ_WRITE, flags)
    }

    pub(in super::super) fn map_shared(len: usize) -> Result<usize, Errno> {
        map_anywhere(len, READ_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS)
    }

    /// Puts a copy of shared anonymous memory in its place; by the only thread. If that fails nothing is mapped there: a move that
    /// fails may have unmapped what it was to replace, and what it left would still be shared with another process.
    pub(in super::super) fn renew_shared(addr: usize, len: usize) -> Result<(), Errno> {
        replace_by_copy(addr, len).inspect_err(|_| unmap(addr, len))
    }

    pub(super) fn replace_by_copy(addr: usize, len: usize) -> Result<(), Errno> {
        let copy = map_shared(len)?;
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        // SAFETY: both are mapped with this length, and the copy is ours alone. Of this process nobody writes to the other
        // (the caller's); what another process writes meanwhile is copied or not. It keeps its place.
        let moved = unsafe {
            let (old, new) = (with_exposed_provenance_mut::<u8>(addr), with_exposed_provenance_mut::<u8>(copy));
            new.copy_from_nonoverlapping(old, len);
            libc::mremap(new.cast(), len, len, flags, old)
        };
        if moved == libc::MAP_FAILED {
            let why = Errno::last();
            unmap(copy, len);
            return Err(why);
        }
        Ok(())
    }

    fn map_anywhere(len: usize, protection: i32, flags: i32) -> Result<usize, Errno> {
        // SAFETY: a new mapping where the system likes; it overlaps nothing.
        let base = unsafe { libc::mmap(null_mut(), len, protection, flags, -1, 0) };
        if base == libc::MAP_FAILED { Err(Errno::last()) } else { Ok(base.expose_provenance()) }
    }

    /// Maps `len` bytes at a multiple of `align`.
    ///
    /// Not over a reservation of our own with `MAP_FIXED`: where that fails, whether the reservation is still there
    /// depends on the system, and to unmap it then could be to unmap another thread's memory. So the place is found by
    /// a reservation that is given up first, and mapped only if it is still free.
    pub(in super::super) fn place(
        len: usize,
        align: usize,
        flags: i32,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<usize, Errno> {
        /// Each try is lost only to another thread that maps memory in between.
        const TRIES: usize = 100;
        let fd = fd.map_or(-1, |fd| fd.as_raw_fd());
        let size = len.checked_add(align).ok_or(Errno(libc::ENOMEM))?;
        for _ in 0..TRIES {
            let nothing = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            let base = map_anywhere(size, libc::PROT_NONE, nothing)?;
            unmap(base, size);
            let wanted = base.next_multiple_of(align);
            let flags = flags | libc::MAP_FIXED_NOREPLACE;
            // SAFETY: a new mapping that replaces none.
            let got = unsafe { libc::mmap(with_exposed_provenance_mut(wanted), len, READ_WRITE, flags, fd, 0) };
            if got == libc::MAP_FAILED {
                match Errno::last() {
                    Errno(libc::EEXIST) => continue,
                    errno => return Err(errno),
                }
            }
            let addr = got.expose_provenance();
            if addr == wanted {
                return Ok(addr);
            }
            // Before Linux 4.17 the address is a wish.
            unmap(addr, len);
        }
        Err(Errno(libc::EAGAIN))
    }

    pub(in super::super) fn unmap(addr: usize, len: usize) {
        if len == 0 {
            return;
        }
        // SAFETY: the caller unmaps a part of its own mapping that nobody uses.
        let rc = unsafe { libc::munmap(with_exposed_provenance_mut(addr), len) };
        assert_eq!(rc, 0, "munmap of our own {len} bytes at {addr:#x} failed: {:?}", Errno::last());
    }

    /// A file in memory of `len` bytes, whose size stays as it is; or the call that failed, and how.
    pub(in super::super) fn memory_file(
        name: &CStr,
        len: usize,
        is_huge: bool,
    ) -> Result<OwnedFd, (&'static str, Errno)> {
        /// Not to be executed; `linux/memfd.h`, since Linux 6.3. Without it such a system may refuse, or warn.
        const NOEXEC_SEAL: u32 = 8;
        let huge = if is_huge { libc::MFD_HUGETLB | libc::MFD_HUGE_2MB } else { 0 };
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | huge;
        let create = |flags| {
            // SAFETY: the name ends in a zero.
            let fd = unsafe { libc::memfd_create(name.as_ptr(), flags) };
            // SAFETY: a new descriptor that nobody else has.
            if fd < 0 { Err(Errno::last()) } else { Ok(unsafe { OwnedFd::from_raw_fd(fd) }) }
        };
        let fd = match create(flags | NOEXEC_SEAL) {
            Err(Errno(libc::EINVAL)) => create(flags),
            created => created,
        };
        let of = |call| move |errno| (call, errno);
        let fd = fd.map_err(of("memfd_create"))?;
        let size = libc::off_t::try_from(len).map_err(|_| ("ftruncate", Errno(libc::EFBIG)))?;
        // SAFETY: both take numbers alone.
        unsafe {
            done(libc::ftruncate(fd.as_raw_fd(), size)).map_err(of("ftruncate"))?;
            let seals = libc::F_SEAL_GROW | libc::F_SEAL_SHRINK | libc::F_SEAL_SEAL;
            done(libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals)).map_err(of("fcntl"))?;
        }
        Ok(fd)
    }

    pub(in super::super) fn populate(pages: Range<usize>) -> Result<(), Errno> {
        let start = with_exposed_provenance_mut(pages.start);
        // SAFETY: the range is ours, with the rest of its first and last page, and populating changes no contents.
        done(unsafe { libc::madvise(start, pages.len(), libc::MADV_POPULATE_WRITE) })
    }

    /// Takes the memory out of a range of private anonymous memory.
    pub(in super::super) fn discard(addr: usize, len: usize) -> Result<(), Errno> {
        debug_assert!(is_whole(&(addr..addr + len), system_page()), "I4: {len} bytes at {addr:#x} to be taken back");
        /// The same for locked memory, which plain advice refuses; `asm-generic/mman-common.h`, since Linux 5.18.
        const DONTNEED_LOCKED: i32 = 24;
        // SAFETY: the range is ours, and the caller of `release` says that nobody uses it.
        let advise = |advice| done(unsafe { libc::madvise(with_exposed_provenance_mut(addr), len, advice) });
        match advise(libc::MADV_DONTNEED) {
            Err(Errno(libc::EINVAL)) => advise(DONTNEED_LOCKED),
            given => given,
        }
    }

    /// Takes the memory out of a range of a file; it reads zero in every mapping of it.
    pub(in super::super) fn punch_hole(fd: BorrowedFd<'_>, offset: usize, len: usize) -> Result<(), Errno> {
        debug_assert!(is_whole(&(offset..offset + len), system_page()), "I4: {len} bytes at {offset:#x} of a file");
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        loop {
            // SAFETY: numbers alone; the caller of `release` says that nobody uses the range. It lies in the file, whose
            // size is an off_t.
            match done(unsafe { libc::fallocate(fd.as_raw_fd(), mode, offset as libc::off_t, len as libc::off_t) }) {
                Err(Errno(libc::EINTR)) => {}
                given => return given,
            }
        }
    }

    pub(in super::super) fn resident(addr: usize, len: usize) -> Result<usize, Errno> {
        let (page, range) = (real_page(), addr..addr + len);
        let pages = outward(range.clone(), page);
        let mut found = 0;
        let mut is_there = [0_u8; 4096];
        for start in pages.clone().step_by(is_there.len() * page) {
            let piece = (pages.end - start).min(is_there.len() * page);
            // SAFETY: the array has a byte for each page of the piece; the range is only looked at.
            done(unsafe { libc::mincore(with_exposed_provenance_mut(start), piece, is_there.as_mut_ptr()) })?;
            let there = (start..).step_by(page).zip(&is_there[..piece / page]).filter(|(_, byte)| **byte & 1 != 0);
            found += there.map(|(at, _)| (at + page).min(range.end) - at.max(range.start)).sum::<usize>();
        }
        Ok(found)
    }

    pub(in super::super) fn lock(addr: usize, len: usize) -> Result<(), Errno> {
        // The system call itself: AddressSanitizer has `mlock` do nothing and say that it did.
        // SAFETY: locking changes no contents.
        if unsafe { libc::syscall(libc::SYS_mlock, addr, len) } == 0 { Ok(()) } else { Err(Errno::last()) }
    }

    /// What this process may lock, if that is limited.
    pub(in super::super) fn lock_limit() -> Option<usize> {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the structure is written.
        done(unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) }).ok()?;
        let is_limited = limit.rlim_cur != libc::RLIM_INFINITY;
        is_limited.then(|| usize::try_from(limit.rlim_cur).unwrap_or(usize::MAX))
    }

    /// What this process has locked.
    pub(in super::super) fn locked_bytes() -> Option<usize> {
        let status = std::fs::read_to_string("/proc/self/status").ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmLck:"))?;
        line.trim().strip_suffix(" kB")?.parse::<usize>().ok().map(|kib| kib << 10)
    }

    /// Whether other processes may see a part of `addr..end`. `EFAULT` if a part is not mapped readable and writable.
    pub(in super::super) fn is_shared(addr: usize, end: usize) -> Result<bool, Errno> {
        let Ok(maps) = std::fs::read_to_string("/proc/self/maps") else {
            return Ok(true); // Nobody says that it is not.
        };
        // Lines are "start-end perms ...", in ascending order.
        let areas = maps.lines().filter_map(|line| {
            let (range, rest) = line.split_once(' ')?;
            let (from, to) = range.split_once('-')?;
            Some((usize::from_str_radix(from, 16).ok()?, usize::from_str_radix(to, 16).ok()?, rest.get(..4)?))
        });
        let mut covered = addr;
        let mut is_shared = false;
        for (from, to, permissions) in areas.filter(|&(from, to, _)| from < end && to > addr) {
            if from > covered || !permissions.starts_with("rw") {
                return Err(Errno(libc::EFAULT));
            }
            covered = to;
            is_shared |= permissions.ends_with('s');
        }
        if covered < end { Err(Errno(libc::EFAULT)) } else { Ok(is_shared) }
    }
}

/// Miri knows no lazily committed mappings; the heap stands in, all of it committed, and there are no other kinds.
#[cfg(miri)]
mod stand_in {
    use crate::Errno;
    use core::ffi::CStr;
    use core::ops::Range;
    use core::ptr::with_exposed_provenance_mut;
    use std::alloc::{Layout, alloc_zeroed, dealloc};
    use std::os::fd::{BorrowedFd, OwnedFd};

    fn layout(len: usize) -> Layout {
        Layout::from_size_align(len, 4096).unwrap()
    }
    pub(in super::super) fn map(len: usize) -> Result<usize, Errno> {
        // SAFETY: the size is not zero.
        Ok(unsafe { alloc_zeroed(layout(len)) }.expose_provenance())
    }
    pub(in super::super) fn map_shared(len: usize) -> Result<usize, Errno> {
        map(len)
    }
    pub(in super::super) fn renew_shared(_: usize, _: usize) -> Result<(), Errno> {
        Ok(())
    }
    pub(in super::super) fn unmap(addr: usize, len: usize) {
        if len > 0 {
            // SAFETY: allocated in `map` with this layout; Mapping unmaps the whole alone under miri.
            unsafe { dealloc(with_exposed_provenance_mut(addr), layout(len)) };
        }
    }
    pub(in super::super) fn place(_: usize, _: usize, _: i32, _: Option<BorrowedFd<'_>>) -> Result<usize, Errno> {
        Err(Errno(libc::ENOSYS))
    }
    pub(in super::super) fn memory_file(_: &CStr, _: usize, _: bool) -> Result<OwnedFd, (&'static str, Errno)> {
        Err(("memfd_create", Errno(libc::ENOSYS)))
    }
    pub(in super::super) fn populate(_: Range<usize>) -> Result<(), Errno> {
        Ok(())
    }
    pub(in super::super) fn discard(addr: usize, len: usize) -> Result<(), Errno> {
        // SAFETY: the range is ours, and the caller of `release` says that nobody uses it.
        unsafe { with_exposed_provenance_mut::<u8>(addr).write_bytes(0, len) };
        Ok(())
    }
    pub(in super::super) fn punch_hole(_: BorrowedFd<'_>, _: usize, _: usize) -> Result<(), Errno> {
        Err(Errno(libc::ENOSYS))
    }
    pub(in super::super) fn resident(_: usize, len: usize) -> Result<usize, Errno> {
        Ok(len)
    }
    pub(in super::super) fn lock(_: usize, _: usize) -> Result<(), Errno> {
        Ok(())
    }
    pub(in super::super) fn lock_limit() -> Option<usize> {
        None
    }
    pub(in super::super) fn locked_bytes() -> Option<usize> {
        None
    }
    pub(in super::super) fn is_shared(_: usize, _: usize) -> Result<bool, Errno> {
        Ok(true)
    }
}

#[cfg(all(test, not(any(loom, miri))))]
mod tests {
    use super::*;
    use crate::Errno;

    #[test]
    fn shared_memory_that_cannot_be_renewed_leaves_no_copy_behind() {
        let (page, pages) = (crate::page::real_page(), 37);
        let len = pages * page;
        let base = map_shared(len + page).unwrap();
        // No copy can be put where no page begins.
        assert_eq!(real::replace_by_copy(base + 64, len), Err(Errno::EINVAL));
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let bytes = |line: &str| {
            let (from, to) = line.split_once(' ')?.0.split_once('-')?;
            Some(usize::from_str_radix(to, 16).ok()? - usize::from_str_radix(from, 16).ok()?)
        };
        let copies: Vec<_> =
            maps.lines().filter(|line| bytes(line) == Some(len) && line.contains("/dev/zero")).collect();
        unmap(base, len + page);
        assert!(copies.is_empty(), "{copies:?}");
    }
}
