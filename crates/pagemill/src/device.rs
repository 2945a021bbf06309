//! Device addresses: an allocator's arenas, each mapped for a device once.
//!
//! A [`DeviceMap`] is the only part that differs between kinds of device: it gives a piece of memory an address, and
//! takes it away. A [`Device`] maps each arena of an allocator with it as soon as it meets the arena, so that every
//! page has its device address at once. It unmaps them when its last clone and the last pool over it are dropped.
//! Requests for pages do not pass here: a program translates the address of a page that it has.
//!
//! # Locks
//! `mapping` is held while an arena is mapped, and orders additions to the list of arenas; reads of the list take no
//! lock. `pools` guards the list of pools. In a forked child neither is touched, since a thread of the parent may have
//! held it.
mod buf_ring;
#[cfg(feature = "cuda")]
mod cuda;
mod fixed_buffers;
mod physical;
mod umem;
mod vfio;

use crate::allocator::Allocator;
use crate::build_error::BuildError;
use crate::error::Error;
use crate::process::Stamp;
use crate::registry;
use crate::zone::Pinned;
use core::fmt;
use core::ops::Range;
use pagemill_core::{PAGE_SHIFT, PAGE_SIZE};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

pub use buf_ring::BufRing;
#[cfg(feature = "cuda")]
pub use cuda::Cuda;
pub use fixed_buffers::{FixedBuffers, Piece};
pub use physical::Physical;
pub use umem::Umem;
pub use vfio::VfioMap;

/// The address of a byte for a device: an offset in a registered buffer, an IOVA, a physical address, or a GPU's
/// address. The [`DeviceMap`] that returned it defines its meaning.
///
/// ```
/// use pagemill::DeviceAddr;
/// let addr = DeviceAddr::new(0x10_0000).offset(8);
/// assert_eq!((addr.get(), addr.to_string()), (0x10_0008, "0x100008".to_owned()));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(transparent)]
pub struct DeviceAddr(u64);

impl DeviceAddr {
    /// Makes an address of a number.
    #[inline]
    pub const fn new(addr: u64) -> Self {
        Self(addr)
    }
    /// The address as a number.
    #[inline]
    pub const fn get(self) -> u64 {
        self.0
    }
    /// The address `bytes` bytes further on.
    ///
    /// # Panics
    /// If the result is beyond 2^64: no device has such an address.
    #[inline]
    #[must_use]
    pub const fn offset(self, bytes: usize) -> Self {
        match self.0.checked_add(bytes as u64) {
            Some(addr) => Self(addr),
            None => panic!("an offset leads beyond the last address of a device"),
        }
    }
    /// The same in mapped memory, where it cannot overflow: [`check`] ensured that the last byte has an address.
    #[inline]
    pub(crate) const fn within(self, bytes: usize) -> Self {
        Self(self.0.wrapping_add(bytes as u64))
    }
}

impl fmt::Display for DeviceAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// Gives memory an address for a device, and takes it away (C6.1). It is the kernel's `dma_map_page` and
/// `dma_unmap_page`, for a whole arena.
///
/// ```
/// use pagemill::{Allocator, Device, DeviceAddr, DeviceError, DeviceMap, Mapped};
/// /// A device whose address of each byte is the process's plus a constant.
/// struct Window;
/// impl DeviceMap for Window {
///     unsafe fn map(&self, memory: std::ops::Range<usize>) -> Result<Mapped, DeviceError> {
///         Ok(Mapped::Linear(DeviceAddr::new(memory.start as u64 + (1 << 50))))
///     }
///     fn unmap(&self, _memory: std::ops::Range<usize>, _mapped: &Mapped) {}
/// }
/// let allocator = Allocator::builder().pages(64).build()?;
/// let device = Device::new(&allocator, Window)?;
/// let page = allocator.alloc_page(pagemill::Gfp::KERNEL)?;
/// assert_eq!(device.address_of(page.addr())?.get(), page.addr() as u64 + (1 << 50));
/// # Ok::<(), DeviceError>(())
/// ```
pub trait DeviceMap: Send + Sync {
    /// Makes memory known to the device, and returns its device address.
    ///
    /// # Errors
    /// Why the device refused, in words that say what to do.
    ///
    /// # Safety
    /// `memory` is one arena: whole pages, which stay mapped in the process until [`unmap`](Self::unmap) or until the
    /// process ends.
    unsafe fn map(&self, memory: Range<usize>) -> Result<Mapped, DeviceError>;

    /// Undoes [`map`](Self::map). When it returns, the device can no longer access the memory.
    fn unmap(&self, memory: Range<usize>, mapped: &Mapped);

    /// Whether one transfer may reach from the first address to the last. False where a piece of the device ends in
    /// between, as a registered buffer does. Memory that is aligned to its size, up to 1 GiB, must lie in one piece.
    fn is_one_piece(&self, _first: DeviceAddr, _last: DeviceAddr) -> bool {
        true
    }
}

/// The device addresses of an arena.
///
/// ```
/// use pagemill::{DeviceAddr, Mapped};
/// let _in_one_piece = Mapped::Linear(DeviceAddr::new(1 << 30));
/// let _each_page_elsewhere = Mapped::Pages([0x7000, 0x3000].map(DeviceAddr::new).into());
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Mapped {
    /// The address of the first byte. The other bytes follow it, as they do in the process.
    Linear(DeviceAddr),
    /// The address of each page, in order, one for each page of the arena. Only the bytes within a page follow each
    /// other.
    Pages(Box<[DeviceAddr]>),
}

/// A map whose device addresses are the process's own: for devices that share them (a simulated device, a thread), and
/// for trials.
///
/// ```
/// use pagemill::{Allocator, Device, Gfp, Identity};
/// let allocator = Allocator::builder().pages(64).build()?;
/// let device = Device::new(&allocator, Identity)?;
/// let page = allocator.alloc_page(Gfp::KERNEL)?;
/// assert_eq!(device.address_of(page.addr() + 5)?.get(), page.addr() as u64 + 5);
/// # Ok::<(), pagemill::DeviceError>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Identity;

impl DeviceMap for Identity {
    unsafe fn map(&self, memory: Range<usize>) -> Result<Mapped, DeviceError> {
        Ok(Mapped::Linear(DeviceAddr::new(memory.start as u64)))
    }
    fn unmap(&self, _memory: Range<usize>, _mapped: &Mapped) {}
}

/// The errors of a device, and of a [`DmaPool`](crate::DmaPool) over it.
///
/// ```
/// use pagemill::DeviceError;
/// let refused = DeviceError::System { what: "registering 2 MiB", errno: 12, next: "raise RLIMIT_MEMLOCK" };
/// assert_eq!(refused.to_string(), "registering 2 MiB: Cannot allocate memory (os error 12); raise RLIMIT_MEMLOCK");
/// ```
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The system refused.
    #[error("{what}: {}; {next}", std::io::Error::from_raw_os_error(*errno))]
    System {
        /// The operation that it refused.
        what: &'static str,
        /// Its error number.
        errno: i32,
        /// What to do.
        next: &'static str,
    },
    /// This machine, kernel or driver lacks something, or forbids it to this process.
    #[error("{what}; {next}")]
    Unavailable {
        /// What is missing.
        what: String,
        /// What to do.
        next: &'static str,
    },
    /// The size of a block is 0 bytes, or above the largest block.
    #[error("blocks of {size} bytes are not possible: a block has 1 to {max} bytes")]
    Size {
        /// The size asked for.
        size: usize,
        /// The largest size.
        max: usize,
    },
    /// The alignment is not a power of two, or is above the largest block.
    #[error("an alignment of {align} is not possible: it must be a power of two of at most {max}")]
    Align {
        /// The alignment asked for.
        align: usize,
        /// The largest alignment.
        max: usize,
    },
    /// The boundary is not a power of two, or every block would cross it.
    #[error(
        "a boundary of {boundary} is not possible for blocks of {size} bytes: it must be 0, or a power of two of at least {size}"
    )]
    Boundary {
        /// The boundary asked for.
        boundary: usize,
        /// The size of a block, after rounding.
        size: usize,
    },
    /// The device's addresses of neighbouring pages do not follow each other, and a block would be longer than a page.
    #[error(
        "blocks of {size} bytes are not possible: this device sees each page elsewhere, so a block has at most 4096 bytes"
    )]
    Scattered {
        /// The size of a block, after rounding.
        size: usize,
    },
    /// The device's addresses are less aligned than the pool's blocks must be.
    #[error(
        "the device sees memory at {addr}, but blocks must be aligned to {align} there; map arenas with that alignment"
    )]
    Unaligned {
        /// The device's address.
        addr: DeviceAddr,
        /// The alignment that it must have.
        align: usize,
    },
    /// A [`DeviceMap`] returned fewer or more addresses than the arena has pages.
    #[error("the device's map gave {given} addresses for {pages} pages; it must give one for each")]
    Miscounted {
        /// The number of addresses.
        given: usize,
        /// The number of pages.
        pages: usize,
    },
    /// A [`DeviceMap`] returned an address that is too high: not all bytes from there on have an address.
    #[error("{bytes} bytes at {addr} reach beyond the last address of a device; its map must give a lower address")]
    Beyond {
        /// The device's address.
        addr: DeviceAddr,
        /// The number of bytes mapped there.
        bytes: usize,
    },
    /// The address is outside the allocator's memory.
    #[error("{addr:#x} is outside the memory of this device's allocator; use pages of that allocator")]
    NotHere {
        /// The address.
        addr: usize,
    },
    /// A ring of buffers has no buffer with this number that the kernel has chosen.
    #[error(
        "the group {group} has no buffer {id} that was chosen for a request; take each completion's buffer once, from its group"
    )]
    NoBuffer {
        /// The group.
        group: u16,
        /// The number.
        id: u16,
    },
    /// The pool cannot number more blocks.
    #[error("the pool has {blocks} blocks, the most that it can number; free some, or make another pool")]
    Full {
        /// The number of its blocks.
        blocks: usize,
    },
    /// This is a forked child: the memory that the parent registered with the device is the parent's.
    #[error("the device was set up by the parent process, for its memory; set up a device in this process")]
    Forked,
    /// An error of the page allocator.
    #[error(transparent)]
    Memory(#[from] Error),
}

/// The sentence, as `Display`, for a `main` that returns this error.
impl core::fmt::Debug for DeviceError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        core::fmt::Display::fmt(self, f)
    }
}

impl From<BuildError> for DeviceError {
    fn from(why: BuildError) -> Self {
        Self::Memory(why.into())
    }
}

/// An allocator's memory as one device sees it. Cheap to clone.
///
/// All arenas of the allocator are mapped when the device is made. An arena that is added later is mapped when an
/// address in it is first looked up. Memory of a mapped arena does not go back to the system, because the device would
/// keep using the old pages.
///
/// A forked child may not use the device ([`DeviceError::Forked`]); dropping it there changes nothing for the parent.
///
/// ```
/// use pagemill::{Allocator, Bulk, Device, Identity, Page};
/// let allocator = Allocator::builder().pages(64).build()?;
/// let device = Device::new(&allocator, Identity)?;
/// let mut pages = [const { None::<Page> }; 16];
/// allocator.alloc_pages_bulk_array(Bulk::exact(16), &mut pages)?;
/// for page in pages.iter().flatten() {
///     assert!(device.address_of(page.addr())?.get().is_multiple_of(4096));
/// }
/// # Ok::<(), pagemill::DeviceError>(())
/// ```
#[derive(Clone)]
pub struct Device(Arc<Mappings>);

/// A pool over a device, which the device does not keep.
pub(crate) trait PoolLine: Send + Sync {
    /// Its line of [`Device::pools`], unless it is gone.
    fn line(&self) -> Option<String>;
    fn is_gone(&self) -> bool;
}

struct Mappings {
    map: Box<dyn DeviceMap>,
    /// The mapped arenas, in the order in which they were mapped. Arenas are only added.
    first: OnceLock<Box<Known>>,
    /// Held while an arena is mapped.
    mapping: Mutex<()>,
    /// The process that mapped them.
    stamp: Stamp,
    pools: Mutex<Vec<Box<dyn PoolLine>>>,
    /// Declared last, so that it is dropped last: an arena must exist while it is unpinned.
    allocator: Allocator,
}

/// An arena that is mapped for the device.
struct Known {
    memory: Range<usize>,
    mapped: Mapped,
    /// Pins the arena until after it is unmapped.
    _pinned: Pinned,
    next: OnceLock<Box<Self>>,
}

impl Known {
    #[inline]
    fn address_of(&self, addr: usize) -> Option<DeviceAddr> {
        let offset = addr.wrapping_sub(self.memory.start);
        if offset >= self.memory.len() {
            return None;
        }
        Some(match &self.mapped {
            Mapped::Linear(first) => first.within(offset),
            // One address for each page: `check` ensured that.
            Mapped::Pages(pages) => pages[offset >> PAGE_SHIFT].within(offset & (PAGE_SIZE - 1)),
        })
    }
}

impl Mappings {
    fn known(&self) -> impl Iterator<Item = &Known> {
        core::iter::successors(self.first.get(), |known| known.next.get()).map(|known| &**known)
    }
}

impl Device {
    /// Makes a device over an allocator, and maps the allocator's arenas with `map`, but for retired ones.
    ///
    /// # Errors
    /// The map's error, or [`DeviceError::Miscounted`] or [`DeviceError::Beyond`] if it returns impossible addresses.
    /// Arenas that were mapped already are unmapped again.
    pub fn new(allocator: &Allocator, map: impl DeviceMap + 'static) -> Result<Self, DeviceError> {
        crate::registry::watch(); // The fork hooks must be registered before the stamp is taken.
        let device = Self(Arc::new(Mappings {
            map: Box::new(map),
            first: OnceLock::new(),
            mapping: Mutex::new(()),
            stamp: Stamp::here(),
            pools: Mutex::default(),
            allocator: allocator.clone(),
        }));
        // Pages that are out of a retired arena have it mapped at their first look-up.
        let mut arenas = allocator.arenas().into_iter().filter(|arena| !arena.is_retired);
        arenas.try_for_each(|arena| device.map(arena.range))?;
        Ok(device)
    }

    /// The allocator whose memory the device sees.
    pub fn allocator(&self) -> &Allocator {
        &self.0.allocator
    }

    /// Whether one transfer may reach these bytes. True also where the device does not know the memory: the first
    /// look-up of its address returns that error.
    pub(crate) fn is_one_piece(&self, addr: usize, bytes: usize) -> bool {
        match (self.address_of(addr), self.address_of(addr + bytes - 1)) {
            (Ok(first), Ok(last)) => self.0.map.is_one_piece(first, last),
            _ => true,
        }
    }

    /// The device's address of a byte in the allocator's memory.
    ///
    /// # Errors
    /// [`DeviceError::NotHere`], [`DeviceError::Forked`]; for the first lookup in an arena that was added later, also
    /// the map's errors.
    #[inline]
    pub fn address_of(&self, addr: usize) -> Result<DeviceAddr, DeviceError> {
        refuse_inherited(self.0.stamp)?;
        match self.0.known().find_map(|known| known.address_of(addr)) {
            Some(found) => Ok(found),
            None => self.address_of_new(addr),
        }
    }

    #[cold]
    fn address_of_new(&self, addr: usize) -> Result<DeviceAddr, DeviceError> {
        let not_here = DeviceError::NotHere { addr };
        let arena = self.0.allocator.arenas().into_iter().find(|arena| arena.range.contains(&addr));
        self.map(arena.ok_or(not_here.clone())?.range)?;
        self.0.known().find_map(|known| known.address_of(addr)).ok_or(not_here)
    }

    /// Maps an arena, unless it is mapped already.
    fn map(&self, memory: Range<usize>) -> Result<(), DeviceError> {
        let shared = &*self.0;
        let _alone = shared.mapping.lock().unwrap_or_else(PoisonError::into_inner);
        let mut place = &shared.first;
        while let Some(known) = place.get() {
            if known.memory == memory {
                return Ok(());
            }
            place = &known.next;
        }
        // Pinned before the device maps the memory: none of it may be on its way to the system then.
        let Some((zone, _)) = registry::by_address(memory.start) else {
            unreachable!("a device maps an arena at {:#x}, where there is none", memory.start)
        };
        let pinned = zone.pins().pin();
        // SAFETY: the range is a whole arena, which stays mapped as long as its allocator; `Mappings` holds a handle of
        // that.
        let mapped = unsafe { shared.map.map(memory.clone()) }?;
        check(memory.len(), &mapped).inspect_err(|_| shared.map.unmap(memory.clone(), &mapped))?;
        let is_new = place.set(Box::new(Known { memory, mapped, _pinned: pinned, next: OnceLock::new() })).is_ok();
        debug_assert!(is_new, "the lock is held while an arena is added");
        Ok(())
    }

    /// Whether every arena is mapped as one piece.
    pub(crate) fn is_linear(&self) -> bool {
        self.0.known().all(|known| matches!(known.mapped, Mapped::Linear(_)))
    }

    /// The device's pools, as in the kernel's `pools` file: name, blocks handed out, blocks, size of a block, pages.
    ///
    /// ```
    /// use pagemill::{Allocator, Device, DmaPool, Identity};
    /// let device = Device::new(&Allocator::builder().pages(64).build()?, Identity)?;
    /// let _pool = DmaPool::create("prp list page", &device, 4096, 4096, 0)?;
    /// assert_eq!(device.pools(), "poolinfo - 0.1\nprp list page       0    0 4096  0\n");
    /// # Ok::<(), pagemill::DeviceError>(())
    /// ```
    pub fn pools(&self) -> String {
        let mut text = "poolinfo - 0.1\n".to_owned();
        if !self.is_inherited() {
            let pools = self.lock_pools();
            text.extend(pools.iter().filter_map(|pool| pool.line()).map(|line| line + "\n"));
        }
        text
    }

    /// Whether this is a forked child of the process that made the device. Its locks may be held by threads that do not
    /// exist here.
    #[inline]
    pub(crate) fn is_inherited(&self) -> bool {
        self.0.stamp.is_inherited()
    }

    pub(crate) fn lock_pools(&self) -> MutexGuard<'_, Vec<Box<dyn PoolLine>>> {
        self.0.pools.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a new pool over the device.
    pub(crate) fn enter(&self, pool: Box<dyn PoolLine>) {
        let mut pools = self.lock_pools();
        pools.retain(|pool| !pool.is_gone());
        pools.push(pool);
    }
}

/// Checks that each of `bytes` bytes has an address.
fn check(bytes: usize, mapped: &Mapped) -> Result<(), DeviceError> {
    let (addrs, each) = match mapped {
        Mapped::Linear(first) => (core::slice::from_ref(first), bytes),
        Mapped::Pages(pages) => (&**pages, PAGE_SIZE),
    };
    if addrs.len() * each != bytes {
        return Err(DeviceError::Miscounted { given: addrs.len(), pages: bytes / PAGE_SIZE });
    }
    let is_beyond = |addr: &&DeviceAddr| addr.0.checked_add(each as u64 - 1).is_none();
    match addrs.iter().find(is_beyond) {
        Some(&addr) => Err(DeviceError::Beyond { addr, bytes: each }),
        None => Ok(()),
    }
}

/// What a device reaches stays the parent's: the child of a fork is refused.
pub(crate) fn refuse_inherited(stamp: Stamp) -> Result<(), DeviceError> {
    if stamp.is_inherited() { Err(DeviceError::Forked) } else { Ok(()) }
}

/// Duplicates a descriptor, so that a map can use it whatever the caller does with its own.
fn keep(fd: BorrowedFd<'_>, what: &'static str) -> Result<OwnedFd, DeviceError> {
    fd.try_clone_to_owned().map_err(|error| DeviceError::System {
        what,
        errno: error.raw_os_error().unwrap_or(0),
        next: "close descriptors that are not needed, or raise RLIMIT_NOFILE (ulimit -n)",
    })
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let arenas = self.0.known().map(|known| (&known.memory, &known.mapped));
        f.debug_list().entries(arenas).finish()
    }
}

impl Drop for Mappings {
    fn drop(&mut self) {
        // A forked child must not unmap: its parent's device would lose the memory.
        if !self.stamp.is_inherited() {
            self.known().for_each(|known| self.map.unmap(known.memory.clone(), &known.mapped));
        }
    }
}
