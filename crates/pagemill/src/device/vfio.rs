//! A PCI device that a process drives. Its addresses (IOVAs) are the IOMMU's, which VFIO sets up.
//!
//! An arena becomes one piece of IOVAs, so a page's IOVA is the arena's plus the page's offset. [`Iovas`] chooses the
//! piece, on numbers alone, among those that the kernel allows.
//!
//! # Invariants of [`Iovas`]
//! - V1 A taken piece lies within one allowed range, and begins and ends at a multiple of the IOMMU's smallest page.
//! - V2 No two pieces overlap.
//! - V3 No piece lies below [`LOWEST`]: a driver may take address 0 for "none".
use super::{DeviceAddr, DeviceError, DeviceMap, Mapped, refuse_inherited};
use crate::process::Stamp;
use core::ops::{Range, RangeInclusive};
use pagemill_core::PAGE_SIZE;
use pagemill_os::Errno;
use pagemill_os::device::vfio;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// No IOVA is below this.
const LOWEST: u64 = 1 << 20;
/// Pieces are aligned for pages of an IOMMU up to this size.
const LARGEST_PAGE: u64 = 1 << 30;
/// The ranges that every IOMMU of x86-64 allows: 39 bits, less the range of interrupts. Used with kernels before Linux
/// 5.4, which do not report the ranges.
const USUAL: [RangeInclusive<u64>; 2] = [0..=0xfedf_ffff, 0xfef0_0000..=0x7f_ffff_ffff];

/// Gives arenas IOVAs in a VFIO container with an IOMMU of Type1. The devices of the container's groups read and write
/// them.
///
/// The caller opens `/dev/vfio/vfio`, adds its groups and sets the IOMMU (`VFIO_SET_IOMMU`). When an arena is mapped,
/// the kernel commits all of it and keeps it in place (`VFIO_IOMMU_MAP_DMA`); this counts towards `RLIMIT_MEMLOCK`.
/// When the container is closed, also by the end of the process, the IOMMU blocks further accesses of its devices.
///
/// Arenas get the lowest free addresses, in their order. So the arenas of [`Memory::dma32`](crate::Memory::dma32) lie
/// below 4 GiB if they are the allocator's first.
///
/// ```
/// use pagemill::VfioMap;
/// use std::{fs::File, os::fd::AsFd};
/// let container = match File::options().read(true).write(true).open("/dev/vfio/vfio") {
///     Ok(container) => container,
///     Err(_) => File::open("/dev/null").unwrap(), // no VFIO here
/// };
/// // No group was added: the message says what is missing.
/// println!("{}", VfioMap::new(container.as_fd()).unwrap_err());
/// ```
#[derive(Debug)]
pub struct VfioMap {
    container: OwnedFd,
    iovas: Mutex<Iovas>,
    /// The process that made it: a forked child does not touch its parent's device.
    stamp: Stamp,
}

impl VfioMap {
    /// A map for the devices of `container`, which stays open as long as the map exists. All mappings of a container
    /// must be made by one `VfioMap`, which does not know of others.
    ///
    /// # Errors
    /// [`DeviceError::System`] if the descriptor is not a container, or the container has no IOMMU yet.
    /// [`DeviceError::Unavailable`] if the IOMMU's smallest page is above [`PAGE_SIZE`].
    pub fn new(container: BorrowedFd<'_>) -> Result<Self, DeviceError> {
        let asked = vfio::iommu(container).map_err(|errno| DeviceError::System {
            what: "VFIO does not report what the IOMMU can do (VFIO_IOMMU_GET_INFO)",
            errno: errno.0,
            next: "open /dev/vfio/vfio, add a group that is bound to vfio-pci, and set its IOMMU to Type1 first",
        })?;
        let page = asked.page_sizes & asked.page_sizes.wrapping_neg();
        if page == 0 || page > PAGE_SIZE as u64 {
            return Err(DeviceError::Unavailable {
                what: format!("the IOMMU's smallest page has {page} bytes, and Pagemill's pages have {PAGE_SIZE}"),
                next: "use another machine, or a kernel built for pages of 4 KiB",
            });
        }
        let container = super::keep(container, "VFIO's container cannot be kept open")?;
        let iovas = Iovas::new(asked.ranges.as_deref().unwrap_or(&USUAL), PAGE_SIZE as u64);
        Ok(Self { container, iovas: Mutex::new(iovas), stamp: Stamp::here() })
    }

    /// Keeps all IOVAs below 2^bits, for devices that support no longer addresses. Without this call only the IOMMU
    /// limits them. The lowest addresses are used first in either case.
    ///
    /// ```
    /// # use pagemill::{Allocator, VfioMap};
    /// # use std::{fs::File, os::fd::AsFd};
    /// # let container = File::open("/dev/vfio/vfio").or(File::open("/dev/null")).unwrap();
    /// if let Ok(map) = VfioMap::new(container.as_fd()) {
    ///     let map = map.with_address_bits(32); // for `Device::new`
    /// }
    /// ```
    #[must_use]
    pub fn with_address_bits(self, bits: u32) -> Self {
        let last = 1u64.checked_shl(bits).map_or(u64::MAX, |end| end - 1);
        self.iovas().cut(last);
        self
    }

    fn iovas(&self) -> MutexGuard<'_, Iovas> {
        self.iovas.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DeviceMap for VfioMap {
    unsafe fn map(&self, memory: Range<usize>) -> Result<Mapped, DeviceError> {
        refuse_inherited(self.stamp)?;
        let len = memory.len() as u64;
        let Some(iova) = self.iovas().take(len) else {
            return Err(DeviceError::Unavailable {
                what: format!("the IOMMU has no free range of {len} bytes"),
                next: "use smaller arenas, or unmap what is not needed",
            });
        };
        // SAFETY: the memory stays mapped, as the caller promises. The program that drives the device decides what it
        // writes where.
        match unsafe { vfio::map_dma(self.container.as_fd(), memory, iova) } {
            Ok(()) => Ok(Mapped::Linear(DeviceAddr::new(iova))),
            Err(errno) => {
                self.iovas().give(iova);
                Err(refusal(errno))
            }
        }
    }

    fn unmap(&self, memory: Range<usize>, mapped: &Mapped) {
        let Mapped::Linear(iova) = *mapped else { unreachable!("an arena's IOVAs are one piece") };
        if self.stamp.is_inherited() {
            return; // They are the parent's.
        }
        // A piece that cannot be unmapped stays taken: no other arena may get an address that leads to this memory.
        if vfio::unmap_dma(self.container.as_fd(), iova.get(), memory.len() as u64) == Ok(memory.len() as u64) {
            self.iovas().give(iova.get());
        }
    }
}

/// The error for a refusal to map an arena, with what to do.
fn refusal(errno: Errno) -> DeviceError {
    let next = match errno {
        Errno::ENOMEM => {
            "an arena that a device reaches is locked in memory whole: raise RLIMIT_MEMLOCK (ulimit -l, LimitMEMLOCK=) above \
             the size of all arenas, have CAP_IPC_LOCK, or use less"
        }
        Errno::EEXIST => "something else maps memory in this container: map all of it with one VfioMap",
        Errno::ENOSPC => "use fewer, larger arenas, or raise vfio_iommu_type1's parameter dma_entry_limit",
        _ => "bind the device to vfio-pci and set the container's IOMMU to Type1",
    };
    DeviceError::System { what: "VFIO does not map an arena (VFIO_IOMMU_MAP_DMA)", errno: errno.0, next }
}

/// The IOVAs that are allowed, and those that are taken.
#[derive(Debug)]
struct Iovas {
    allowed: Vec<RangeInclusive<u64>>,
    page: u64,
    /// The first and the last address of each piece.
    taken: BTreeMap<u64, u64>,
}

impl Iovas {
    fn new(allowed: &[RangeInclusive<u64>], page: u64) -> Self {
        Self { allowed: allowed.to_vec(), page, taken: BTreeMap::new() }
    }

    /// Allows no address above `last` any more.
    fn cut(&mut self, last: u64) {
        self.allowed = self.allowed.iter().map(|range| *range.start()..=last.min(*range.end())).collect();
    }

    /// Takes the lowest free piece, aligned for large pages if there is such a piece.
    fn take(&mut self, len: u64) -> Option<u64> {
        let len = len.checked_next_multiple_of(self.page).filter(|&len| len > 0)?;
        let mut align = (1 << len.ilog2()).clamp(self.page, LARGEST_PAGE.max(self.page));
        loop {
            if let Some(first) = self.lowest(len, align) {
                self.taken.insert(first, first + (len - 1));
                return Some(first);
            }
            if align == self.page {
                return None;
            }
            align /= 2;
        }
    }

    fn lowest(&self, len: u64, align: u64) -> Option<u64> {
        self.allowed.iter().find_map(|range| {
            let mut first = (*range.start()).max(LOWEST).checked_next_multiple_of(align)?;
            loop {
                let last = first.checked_add(len - 1).filter(|last| last <= range.end())?;
                // The last piece that begins before the end. Any gap before that piece is too short.
                match self.taken.range(..=last).next_back() {
                    Some((_, &end)) if end >= first => first = end.checked_add(1)?.checked_next_multiple_of(align)?,
                    _ => return Some(first),
                }
            }
        })
    }

    fn give(&mut self, first: u64) {
        self.taken.remove(&first);
    }
}

#[cfg(test)]
mod tests {
    use super::{Iovas, LOWEST, USUAL};
    use proptest::prelude::*;
    use std::ops::RangeInclusive;

    const PAGE: u64 = 4096;

    #[test]
    fn the_lowest_piece_is_taken_aligned_for_large_pages() {
        let mut iovas = Iovas::new(&USUAL, PAGE);
        assert_eq!(iovas.take(3 * PAGE), Some(LOWEST));
        assert_eq!(iovas.take(700 * PAGE), Some(2 << 20), "2 MiB and more: on a page of 2 MiB");
        assert_eq!(iovas.take(1 << 30), Some(1 << 30));
        assert_eq!(iovas.take(1 << 31), Some(0x1_0000_0000), "not across the interrupts at 0xfee00000");
        iovas.give(1 << 30);
        assert_eq!(iovas.take(1 << 30), Some(1 << 30), "a freed piece is taken again");
        assert_eq!(iovas.take(1 << 39), None, "no such piece in 39 bits");
        assert_eq!(iovas.take(0), None);
        iovas.cut(u32::MAX.into());
        assert_eq!(iovas.take(1 << 30), Some(2 << 30));
        assert_eq!(iovas.take(1 << 30), None, "the rest below 4 GiB is cut up by the interrupts");
    }

    #[test]
    fn a_range_up_to_the_last_address_is_used_up_and_no_further() {
        let mut iovas = Iovas::new(&[u64::MAX - 3 * PAGE + 1..=u64::MAX], PAGE);
        let pieces: Vec<_> = std::iter::from_fn(|| iovas.take(PAGE)).collect();
        assert_eq!(pieces, [3, 2, 1].map(|n| u64::MAX - n * PAGE + 1));
        assert_eq!(Iovas::new(&[0..=PAGE - 2], PAGE).take(PAGE), None);
    }

    fn ranges() -> impl Strategy<Value = Vec<RangeInclusive<u64>>> {
        let range = (0u64..1 << 32, 0u64..1 << 32).prop_map(|(gap, len)| (gap, len));
        prop::collection::vec(range, 1..5).prop_map(|parts| {
            let mut at = 0;
            let next = |(gap, len)| {
                let first: u64 = at + gap;
                at = first + len + 1;
                first..=first + len
            };
            parts.into_iter().map(next).collect()
        })
    }

    proptest! {
        #[test]
        fn pieces_lie_inside_apart_and_aligned(
            allowed in ranges(),
            page in (12u32..22).prop_map(|bits| 1u64 << bits),
            steps in prop::collection::vec((any::<bool>(), 1u64..1 << 31, any::<prop::sample::Index>()), 1..200),
        ) {
            let mut iovas = Iovas::new(&allowed, page);
            let mut out: Vec<(u64, u64)> = Vec::new();
            for (is_take, len, which) in steps {
                if !is_take && !out.is_empty() {
                    iovas.give(out.swap_remove(which.index(out.len())).0);
                } else if let Some(first) = iovas.take(len) {
                    let last = first + (len.next_multiple_of(page) - 1);
                    prop_assert!(first.is_multiple_of(page) && first >= LOWEST);
                    prop_assert!(allowed.iter().any(|range| range.contains(&first) && range.contains(&last)));
                    prop_assert!(out.iter().all(|&(start, end)| last < start || end < first), "overlap at {first:#x}");
                    out.push((first, last));
                } else {
                    // Refused: there must be no free gap of that size, even at the smallest alignment.
                    let len = len.next_multiple_of(page);
                    let ends = out.iter().map(|piece| piece.1 + 1).chain(allowed.iter().map(|range| *range.start()));
                    for first in ends.map(|end| end.max(LOWEST).next_multiple_of(page)) {
                        let last = first + (len - 1);
                        let is_allowed = allowed.iter().any(|range| range.contains(&first) && range.contains(&last));
                        let is_free = out.iter().all(|&(start, end)| last < start || end < first);
                        prop_assert!(!(is_allowed && is_free), "{len} bytes fit at {first:#x}");
                    }
                }
            }
        }
    }
}
