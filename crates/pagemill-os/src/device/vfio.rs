//! A VFIO container with an IOMMU of Type1: `/dev/vfio/vfio`, after `VFIO_SET_IOMMU` (`linux/vfio.h`).
use crate::Errno;
use core::ops::{Range, RangeInclusive};
use std::os::fd::{AsRawFd, BorrowedFd};

/// `_IO(';', 100 + n)`: these requests carry no size.
const fn request(n: u32) -> u32 {
    (b';' as u32) << 8 | (100 + n)
}
const IOMMU_GET_INFO: u32 = request(12);
const IOMMU_MAP_DMA: u32 = request(13);
const IOMMU_UNMAP_DMA: u32 = request(14);

const INFO_HAS_PAGE_SIZES: u32 = 1;
const INFO_HAS_CAPABILITIES: u32 = 2;
const CAPABILITY_IOVA_RANGES: u16 = 1;
const CAPABILITY_DMA_AVAILABLE: u16 = 3;
const MAY_READ: u32 = 1;
const MAY_WRITE: u32 = 2;

/// `struct vfio_iommu_type1_dma_map`.
#[repr(C)]
struct DmaMap {
    argsz: u32,
    flags: u32,
    vaddr: u64,
    iova: u64,
    size: u64,
}

/// `struct vfio_iommu_type1_dma_unmap`, without data.
#[repr(C)]
struct DmaUnmap {
    argsz: u32,
    flags: u32,
    iova: u64,
    size: u64,
}

/// The abilities of a container's IOMMU.
///
/// ```
/// let iommu = pagemill_os::device::vfio::Iommu { page_sizes: 0x20_1000, ..Default::default() };
/// assert_eq!(iommu.page_sizes.trailing_zeros(), 12);
/// ```
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Iommu {
    /// A bit for each page size that it maps; addresses and sizes must be multiples of the smallest.
    pub page_sizes: u64,
    /// The addresses that devices may use, if the kernel reports them (Linux 5.4).
    pub ranges: Option<Vec<RangeInclusive<u64>>>,
    /// How many more pieces can be mapped, if the kernel reports it (Linux 5.10).
    pub entries_left: Option<u32>,
}

/// Asks a container about its IOMMU.
///
/// # Errors
/// The system's: `EINVAL` or `ENODEV` before `VFIO_SET_IOMMU`, `ENOTTY` for another kind of file.
///
/// ```
/// # #[cfg(not(miri))] {
/// use std::os::fd::AsFd;
/// let other = std::fs::File::open("/dev/null").unwrap();
/// assert!(pagemill_os::device::vfio::iommu(other.as_fd()).is_err());
/// # }
/// ```
pub fn iommu(container: BorrowedFd<'_>) -> Result<Iommu, Errno> {
    let mut answer = vec![0u64; 64];
    loop {
        let size = answer.len() * 8;
        // SAFETY: the buffer is aligned and larger than the number.
        unsafe { answer.as_mut_ptr().cast::<u32>().write(size as u32) };
        // SAFETY: the kernel writes at most as many bytes as the first word says: the buffer's size.
        if unsafe { libc::ioctl(container.as_raw_fd(), IOMMU_GET_INFO as _, answer.as_mut_ptr()) } < 0 {
            return Err(Errno::last());
        }
        let bytes: Vec<u8> = answer.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let needed = u32_at(&bytes, 0).unwrap_or(0) as usize;
        if needed <= size {
            return Ok(Iommu::of(&bytes));
        }
        answer = vec![0; needed.div_ceil(8)];
    }
}

impl Iommu {
    /// From `struct vfio_iommu_type1_info` and the chain of capabilities after it. Reading stops where the chain leaves the
    /// buffer or leads back.
    fn of(info: &[u8]) -> Self {
        let mut found = Self::default();
        let flags = u32_at(info, 4).unwrap_or(0);
        if flags & INFO_HAS_PAGE_SIZES != 0 {
            found.page_sizes = u64_at(info, 8).unwrap_or(0);
        }
        let mut at = if flags & INFO_HAS_CAPABILITIES != 0 { u32_at(info, 16).unwrap_or(0) as usize } else { 0 };
        while at != 0 {
            let Some((id, next)) = u32_at(info, at).zip(u32_at(info, at + 4)) else { break };
            match id as u16 {
                CAPABILITY_IOVA_RANGES => {
                    let n = u32_at(info, at + 8).unwrap_or(0) as usize;
                    let range = |i| Some(u64_at(info, at + 16 + i * 16)?..=u64_at(info, at + 24 + i * 16)?);
                    found.ranges = Some((0..n).map_while(range).collect());
                }
                CAPABILITY_DMA_AVAILABLE => found.entries_left = u32_at(info, at + 8),
                _ => {}
            }
            at = if next as usize > at { next as usize } else { 0 };
        }
        found
    }
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().map(u32::from_ne_bytes).ok()
}
fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..at + 8)?.try_into().map(u64::from_ne_bytes).ok()
}

/// Maps `memory` at `iova` for the container's devices, which may then read and write it. The kernel commits all of it and
/// keeps it in place until it is unmapped or the container is closed.
///
/// # Errors
/// The system's: `ENOMEM` above `RLIMIT_MEMLOCK`, `EEXIST` where something is mapped there already, `ENOSPC` when there are no
/// more entries, `EINVAL` for addresses that are no whole pages of the IOMMU or outside of its range.
///
/// # Safety
/// While `memory` is mapped, its contents may change as the container's devices, and the programs that drive them, dictate.
///
/// ```
/// # #[cfg(not(miri))] {
/// use std::os::fd::AsFd;
/// let other = std::fs::File::open("/dev/null").unwrap();
/// // SAFETY: refused.
/// let refused = unsafe { pagemill_os::device::vfio::map_dma(other.as_fd(), 0x1000..0x2000, 0x1000) };
/// assert!(refused.is_err());
/// # }
/// ```
pub unsafe fn map_dma(container: BorrowedFd<'_>, memory: Range<usize>, iova: u64) -> Result<(), Errno> {
    let map = DmaMap {
        argsz: size_of::<DmaMap>() as u32,
        flags: MAY_READ | MAY_WRITE,
        vaddr: memory.start as u64,
        iova,
        size: memory.len() as u64,
    };
    // SAFETY: the kernel reads a structure of the size in `argsz`.
    match unsafe { libc::ioctl(container.as_raw_fd(), IOMMU_MAP_DMA as _, &raw const map) } {
        0 => Ok(()),
        _ => Err(Errno::last()),
    }
}

/// Unmaps `len` bytes at `iova` from the container's devices; from then on the IOMMU refuses their accesses there. Returns how
/// many bytes were mapped.
///
/// # Errors
/// The system's.
///
/// ```
/// # #[cfg(not(miri))] {
/// use std::os::fd::AsFd;
/// let other = std::fs::File::open("/dev/null").unwrap();
/// assert!(pagemill_os::device::vfio::unmap_dma(other.as_fd(), 0x1000, 0x1000).is_err());
/// # }
/// ```
pub fn unmap_dma(container: BorrowedFd<'_>, iova: u64, len: u64) -> Result<u64, Errno> {
    let mut unmap = DmaUnmap { argsz: size_of::<DmaUnmap>() as u32, flags: 0, iova, size: len };
    // SAFETY: the kernel reads and writes a structure of the size in `argsz`.
    match unsafe { libc::ioctl(container.as_raw_fd(), IOMMU_UNMAP_DMA as _, &raw mut unmap) } {
        0 => Ok(unmap.size),
        _ => Err(Errno::last()),
    }
}

#[cfg(test)]
mod tests {
    use super::Iommu;

    fn info(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    #[test]
    fn iommu_info_is_parsed_with_and_without_ranges() {
        // argsz, flags, page sizes, offset of capabilities and padding.
        let mut words = vec![96, 3, 0x4020_1000, 0, 24, 0];
        words.extend([3 | 1 << 16, 40, 65_535, 0]); // at 24: entries that are left
        words.extend([1 | 1 << 16, 0, 2, 0]); // at 40: two ranges
        words.extend([0, 0, 0xfedf_ffff, 0, 0xfef0_0000, 0, 0xffff_ffff, 0x7f]);
        let found = Iommu::of(&info(&words));
        let ranges = Some(vec![0..=0xfedf_ffff, 0xfef0_0000..=0x7f_ffff_ffff]);
        assert_eq!(found, Iommu { page_sizes: 0x4020_1000, ranges, entries_left: Some(65_535) });

        let old = Iommu::of(&info(&[16, 1, 0x1000, 0, 0, 0]));
        assert_eq!(old, Iommu { page_sizes: 0x1000, ..Iommu::default() });
    }

    #[test]
    fn a_capability_chain_that_leaves_the_buffer_or_leads_back_ends() {
        let out = info(&[40, 2, 0, 0, 1000, 0]);
        let mut back = info(&[40, 2, 0, 0, 24, 0, 1 | 1 << 16, 24, 1000, 0]);
        assert_eq!(Iommu::of(&out), Iommu::default());
        assert_eq!(Iommu::of(&back).ranges, Some(vec![]), "a thousand ranges, and none is there");
        back.truncate(30);
        assert_eq!(Iommu::of(&back), Iommu::default());
    }
}
