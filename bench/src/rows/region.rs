//! Address space for the rows that hand out pages of a region, the floors and the Rust peers, and for `mmap`.

use std::ptr::NonNull;

use crate::rows::Unavailable;
use crate::subject::PAGE_BYTES;

/// Reserved address space of whole pages. Only the rows of `touch` and `dma` write to it.
pub(crate) struct Region {
    base: NonNull<libc::c_void>,
    bytes: usize,
}

// SAFETY: the region is only ever turned into addresses; nothing here reads or writes through `base`.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    pub(crate) fn new(pages: usize) -> Result<Region, Unavailable> {
        let bytes = pages.max(1) * PAGE_BYTES;
        // SAFETY: a fresh anonymous mapping, at an address that the kernel chooses, overlaps nothing.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        let refused = || Unavailable(format!("no {bytes} bytes of address space: {}", std::io::Error::last_os_error()));
        if base == libc::MAP_FAILED {
            return Err(refused());
        }
        Ok(Region { base: NonNull::new(base).ok_or_else(refused)?, bytes })
    }

    pub(crate) fn base(&self) -> usize {
        self.base.as_ptr() as usize
    }

    /// Blocks of a size that divides a page's, ascending.
    pub(crate) fn blocks(&self, bytes: usize) -> impl DoubleEndedIterator<Item = NonNull<u8>> + use<> {
        let base = self.base.cast::<u8>();
        // SAFETY: stays within the mapping.
        (0..self.bytes / bytes).map(move |at| unsafe { base.add(at * bytes) })
    }

    /// The address of each page, ascending.
    pub(crate) fn words(&self) -> impl Iterator<Item = usize> + use<> {
        (self.base()..self.base() + self.bytes).step_by(PAGE_BYTES)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: base and length are those of the mapping made in `new`, which nothing else unmaps.
        let rc = unsafe { libc::munmap(self.base.as_ptr(), self.bytes) };
        debug_assert_eq!(rc, 0, "munmap of a region of one's own");
    }
}
