//! Address space of our own: reserved at once, given memory by the system page by page as it is touched.
use crate::Errno;

/// A private anonymous mapping, readable and writable, zero where nobody wrote. Unmapped on drop.
///
/// ```
/// let map = pagemill_sys::Mapping::reserve(4096, 4096).unwrap();
/// // SAFETY: the mapping is ours and has that size.
/// unsafe { assert_eq!(*map.as_ptr::<u8>().add(4095), 0) };
/// ```
#[derive(Debug)]
pub struct Mapping {
    addr: usize,
    len: usize,
    /// What is really mapped, alignment slack included.
    whole: (usize, usize),
}

impl Mapping {
    /// Reserves `len` bytes aligned to `align`, a power of two. Nothing is charged before it is touched.
    ///
    /// # Errors
    /// The system's, when it refuses.
    pub fn reserve(len: usize, align: usize) -> Result<Self, Errno> {
        assert!(align.is_power_of_two() && len > 0, "{len} bytes aligned to {align} cannot be reserved");
        let page = pagemill_core::PAGE_SIZE;
        let len = len.checked_next_multiple_of(page).ok_or(Errno(libc::ENOMEM))?;
        // The system aligns to a page; ask for more and cut what is over.
        let slack = align.saturating_sub(page);
        let size = len.checked_add(slack).ok_or(Errno(libc::ENOMEM))?;
        let base = sys::map(size)?;
        let addr = base.next_multiple_of(align);
        if cfg!(miri) {
            return Ok(Self { addr, len, whole: (base, size) });
        }
        sys::unmap(base, addr - base);
        sys::unmap(addr + len, base + size - addr - len);
        Ok(Self { addr, len, whole: (addr, len) })
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

    /// Asks for 2 MiB pages where the system allows; whether it took the advice.
    pub fn advise_huge_pages(&self) -> bool {
        // SAFETY: the range is ours, and the advice changes no contents.
        !cfg!(miri) && unsafe { libc::madvise(self.as_ptr(), self.len, libc::MADV_HUGEPAGE) } == 0
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        sys::unmap(self.whole.0, self.whole.1);
    }
}

#[cfg(not(miri))]
mod sys {
    use crate::Errno;

    pub(super) fn map(len: usize) -> Result<usize, Errno> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping where the system likes; it overlaps nothing.
        let base = unsafe { libc::mmap(core::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
        if base == libc::MAP_FAILED { Err(Errno::last()) } else { Ok(base.expose_provenance()) }
    }

    pub(super) fn unmap(addr: usize, len: usize) {
        if len == 0 {
            return;
        }
        // SAFETY: the caller unmaps a part of its own mapping that nobody uses.
        let rc = unsafe { libc::munmap(core::ptr::with_exposed_provenance_mut(addr), len) };
        assert_eq!(rc, 0, "munmap of our own {len} bytes at {addr:#x} failed: {:?}", Errno::last());
    }
}

/// Miri knows no lazily committed mappings; the heap stands in.
#[cfg(miri)]
mod sys {
    use crate::Errno;
    use std::alloc::{Layout, alloc_zeroed, dealloc};

    fn layout(len: usize) -> Layout {
        Layout::from_size_align(len, 4096).unwrap()
    }
    pub(super) fn map(len: usize) -> Result<usize, Errno> {
        // SAFETY: the size is not zero.
        Ok(unsafe { alloc_zeroed(layout(len)) }.expose_provenance())
    }
    pub(super) fn unmap(addr: usize, len: usize) {
        // SAFETY: allocated in `map` with this layout; Mapping unmaps the whole alone under miri.
        unsafe { dealloc(core::ptr::with_exposed_provenance_mut(addr), layout(len)) };
    }
}

#[cfg(test)]
mod tests {
    use super::Mapping;

    #[test]
    fn aligned_zero_and_writable_to_the_end() {
        let map = Mapping::reserve(3 * 4096, 1 << 16).unwrap();
        assert_eq!((map.addr() % (1 << 16), map.bytes()), (0, 3 * 4096));
        let bytes = map.as_ptr::<u8>();
        // SAFETY: ours, and of that size.
        unsafe {
            assert_eq!(*bytes.add(3 * 4096 - 1), 0);
            *bytes.add(3 * 4096 - 1) = 7;
            assert_eq!(*bytes.add(3 * 4096 - 1), 7);
        }
    }

    #[test]
    #[cfg(not(miri))]
    fn more_than_the_address_space_is_an_error() {
        assert!(Mapping::reserve(1 << 60, 4096).is_err());
        assert!(Mapping::reserve(usize::MAX, 4096).is_err());
    }
}
