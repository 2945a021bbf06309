//! The system calls under a mapping, and their replacements under miri.
#[cfg(not(miri))]
pub(super) use real::*;
#[cfg(miri)]
pub(super) use stand_in::*;

#[cfg(not(miri))]
mod real {
    use crate::Errno;
    use crate::page::{is_whole, outward, real_page, system_page};
    use core::ffi::CStr;
    use core::ops::Range;
    use core::ptr::{null_mut, with_exposed_provenance_mut};
    use rustix::fs::{self, FallocateFlags, MemfdFlags, SealFlags};
    use rustix::mm::{self, Advice, MapFlags, MremapFlags, ProtFlags};
    use std::os::fd::{BorrowedFd, OwnedFd};

    const READ_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

    pub(in super::super) fn map(len: usize) -> Result<usize, Errno> {
        map_anywhere(len, READ_WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE)
    }

    pub(in super::super) fn map_shared(len: usize) -> Result<usize, Errno> {
        map_anywhere(len, READ_WRITE, MapFlags::SHARED)
    }

    /// Replaces shared anonymous memory by a copy of it; called by the only thread. After an error nothing is mapped there: a
    /// move that fails may have unmapped the old memory already, and any of it that is left is still shared with the parent.
    pub(in super::super) fn renew_shared(addr: usize, len: usize) -> Result<(), Errno> {
        replace_by_copy(addr, len).inspect_err(|_| unmap(addr, len))
    }

    pub(super) fn replace_by_copy(addr: usize, len: usize) -> Result<(), Errno> {
        let copy = map_shared(len)?;
        // SAFETY: both are mapped with this length, and only this function knows the copy. No thread of this process writes to
        // the old memory (the caller's promise); writes of another process meanwhile are copied or not. The address stays the
        // same.
        let moved = unsafe {
            let (old, new) = (with_exposed_provenance_mut::<u8>(addr), with_exposed_provenance_mut::<u8>(copy));
            new.copy_from_nonoverlapping(old, len);
            mm::mremap_fixed(new.cast(), len, len, MremapFlags::MAYMOVE, old.cast())
        };
        moved.map_err(Errno::of).inspect_err(|_| unmap(copy, len)).map(|_| ())
    }

    fn map_anywhere(len: usize, protection: ProtFlags, flags: MapFlags) -> Result<usize, Errno> {
        // SAFETY: a new mapping where the system likes; it overlaps nothing.
        let base = unsafe { mm::mmap_anonymous(null_mut(), len, protection, flags) };
        base.map(|base| base.expose_provenance()).map_err(Errno::of)
    }

    /// Maps `len` bytes at a multiple of `align`.
    ///
    /// `MAP_FIXED` over a reservation of our own would not do: when it fails, the reservation may be unmapped or not, depending
    /// on the system, and unmapping it again could hit another thread's memory. So a reservation finds the place and is given
    /// up, and the place is mapped only if it is still free.
    pub(in super::super) fn place(
        len: usize,
        align: usize,
        flags: MapFlags,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<usize, Errno> {
        /// A try fails only if another thread maps memory in between.
        const TRIES: usize = 100;
        let flags = flags | MapFlags::FIXED_NOREPLACE;
        let size = len.checked_add(align).ok_or(Errno::ENOMEM)?;
        for _ in 0..TRIES {
            let base = map_anywhere(size, ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE)?;
            unmap(base, size);
            let wanted = base.next_multiple_of(align);
            let start = with_exposed_provenance_mut(wanted);
            // SAFETY: a new mapping that replaces none.
            let got = unsafe {
                match fd {
                    Some(fd) => mm::mmap(start, len, READ_WRITE, flags, fd, 0),
                    None => mm::mmap_anonymous(start, len, READ_WRITE, flags),
                }
            };
            let addr = match got.map_err(Errno::of) {
                Ok(addr) => addr.expose_provenance(),
                Err(Errno::EEXIST) => continue,
                Err(errno) => return Err(errno),
            };
            if addr == wanted {
                return Ok(addr);
            }
            // Before Linux 4.17 the address is only a hint.
            unmap(addr, len);
        }
        Err(Errno::EAGAIN)
    }

    pub(in super::super) fn unmap(addr: usize, len: usize) {
        if len == 0 {
            return;
        }
        // SAFETY: the caller unmaps a part of its own mapping that nobody uses.
        let done = unsafe { mm::munmap(with_exposed_provenance_mut(addr), len) };
        assert_eq!(done, Ok(()), "munmap of our own {len} bytes at {addr:#x} failed");
    }

    /// Makes a file in memory with a fixed size of `len` bytes. An error comes with the name of the call that failed.
    pub(in super::super) fn memory_file(
        name: &CStr,
        len: usize,
        is_huge: bool,
    ) -> Result<OwnedFd, (&'static str, Errno)> {
        let huge = if is_huge { MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB } else { MemfdFlags::empty() };
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | huge;
        // Linux 6.3 and later may refuse, or warn of, a file that may be executed. Earlier ones do not know the flag.
        let fd = match fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
            Err(rustix::io::Errno::INVAL) => fs::memfd_create(name, flags),
            created => created,
        };
        let of = |call| move |errno| (call, Errno::of(errno));
        let fd = fd.map_err(of("memfd_create"))?;
        fs::ftruncate(&fd, len as u64).map_err(of("ftruncate"))?;
        let seals = SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
        fs::fcntl_add_seals(&fd, seals).map_err(of("fcntl"))?;
        Ok(fd)
    }

    pub(in super::super) fn populate(pages: Range<usize>) -> Result<(), Errno> {
        let start = with_exposed_provenance_mut(pages.start);
        // SAFETY: the range is ours, with the rest of its first and last page, and populating changes no contents.
        unsafe { mm::madvise(start, pages.len(), Advice::LinuxPopulateWrite) }.map_err(Errno::of)
    }

    /// Gives back a range of private anonymous memory.
    pub(in super::super) fn discard(addr: usize, len: usize) -> Result<(), Errno> {
        debug_assert!(is_whole(&(addr..addr + len), system_page()), "R4: {len} bytes at {addr:#x} to be taken back");
        // SAFETY: the range is ours, and the caller of `release` says that nobody uses it.
        let advise = |advice| unsafe { mm::madvise(with_exposed_provenance_mut(addr), len, advice) };
        let given = match advise(Advice::LinuxDontNeed) {
            // Locked memory (Linux 5.18).
            Err(rustix::io::Errno::INVAL) => advise(Advice::LinuxDontneedLocked),
            given => given,
        };
        given.map_err(Errno::of)
    }

    /// Gives back a range of a file, which then reads zero in every mapping of it.
    pub(in super::super) fn punch_hole(fd: BorrowedFd<'_>, offset: usize, len: usize) -> Result<(), Errno> {
        debug_assert!(is_whole(&(offset..offset + len), system_page()), "R4: {len} bytes at {offset:#x} of a file");
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let done = rustix::io::retry_on_intr(|| fs::fallocate(fd, mode, offset as u64, len as u64)).map_err(Errno::of);
        // rustix tells the compiler that this call changes no memory; it changes what the mappings of the file read.
        core::sync::atomic::compiler_fence(core::sync::atomic::Ordering::SeqCst);
        done
    }

    pub(in super::super) fn resident(addr: usize, len: usize) -> Result<usize, Errno> {
        let (page, range) = (real_page(), addr..addr + len);
        let pages = outward(range.clone(), page);
        let mut found = 0;
        let mut is_there = [0_u8; 4096];
        for start in pages.clone().step_by(is_there.len() * page) {
            let piece = (pages.end - start).min(is_there.len() * page);
            // SAFETY: the array has a byte for each page of the piece, and the call does not access the pages.
            let rc = unsafe { libc::mincore(with_exposed_provenance_mut(start), piece, is_there.as_mut_ptr()) };
            if rc != 0 {
                return Err(Errno::last());
            }
            let there = (start..).step_by(page).zip(&is_there[..piece / page]).filter(|(_, byte)| **byte & 1 != 0);
            found += there.map(|(at, _)| (at + page).min(range.end) - at.max(range.start)).sum::<usize>();
        }
        Ok(found)
    }

    pub(in super::super) fn lock(addr: usize, len: usize) -> Result<(), Errno> {
        // SAFETY: locking changes no contents.
        unsafe { mm::mlock(with_exposed_provenance_mut(addr), len) }.map_err(Errno::of)
    }
}

/// Miri does not support mappings that are committed lazily. The heap replaces them, all of it committed, and there are no
/// other kinds.
#[cfg(miri)]
mod stand_in {
    use crate::Errno;
    use core::ffi::CStr;
    use core::ops::Range;
    use core::ptr::with_exposed_provenance_mut;
    use rustix::mm::MapFlags;
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
            // SAFETY: allocated in `map` with this layout; under miri a Mapping is unmapped only as a whole.
            unsafe { dealloc(with_exposed_provenance_mut(addr), layout(len)) };
        }
    }
    pub(in super::super) fn place(_: usize, _: usize, _: MapFlags, _: Option<BorrowedFd<'_>>) -> Result<usize, Errno> {
        Err(Errno::ENOSYS)
    }
    pub(in super::super) fn memory_file(_: &CStr, _: usize, _: bool) -> Result<OwnedFd, (&'static str, Errno)> {
        Err(("memfd_create", Errno::ENOSYS))
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
        Err(Errno::ENOSYS)
    }
    pub(in super::super) fn resident(_: usize, len: usize) -> Result<usize, Errno> {
        Ok(len)
    }
    pub(in super::super) fn lock(_: usize, _: usize) -> Result<(), Errno> {
        Ok(())
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
        // The copy cannot be moved to an address inside a page.
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
