//! What a device calls memory: an allocator's arenas, registered with it once each.
//!
//! A [`DeviceMap`] is the one thing that differs between devices: how a piece of memory gets an address there, and loses it.
//! A [`Device`] maps each arena of an allocator by it as soon as it sees one, so that every page has its address at once,
//! and unmaps them when the last of its clones and of the pools over it is gone.
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
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

#[cfg(feature = "cuda")]
pub use cuda::Cuda;
pub use fixed_buffers::FixedBuffers;
pub use physical::Physical;
pub use umem::Umem;
pub use vfio::VfioMap;

/// Where a device finds a byte: an offset in a registered buffer, an IOVA, a physical address, a GPU's address. What it means
/// is told by the [`DeviceMap`] that gave it.
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
    /// From a number.
    #[inline]
    pub const fn new(addr: u64) -> Self {
        Self(addr)
    }
    /// The number.
    #[inline]
    pub const fn get(self) -> u64 {
        self.0
    }
    /// So many bytes further on.
    ///
    /// # Panics
    /// If no device has such an address: it is beyond 2^64.
    #[inline]
    #[must_use]
    pub const fn offset(self, bytes: usize) -> Self {
        match self.0.checked_add(bytes as u64) {
            Some(addr) => Self(addr),
            None => panic!("an offset that leads beyond the last address of a device"),
        }
    }
    /// The same in memory that is mapped, whose last byte has an address: [`check`] has seen to it.
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

/// How memory gets an address of a device's, and loses it (C6.1): the kernel's `dma_map_page` and `dma_unmap_page`, for an
/// arena at a time.
///
/// ```
/// use pagemill::{Allocator, Device, DeviceAddr, DeviceError, DeviceMap, Mapped};
/// /// A device that sees each arena a fixed distance from where the process does.
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
    /// Makes memory known to the device and says where that finds it.
    ///
    /// # Errors
    /// Whatever kept it, in words that say what to do.
    ///
    /// # Safety
    /// `memory` is one arena's: whole pages, mapped, and so until they are unmapped here or the process ends.
    unsafe fn map(&self, memory: Range<usize>) -> Result<Mapped, DeviceError>;

    /// Takes back what [`map`](Self::map) made known. The device reaches the memory no longer when this returns.
    fn unmap(&self, memory: Range<usize>, mapped: &Mapped);
}

/// Where a device finds an arena.
///
/// ```
/// use pagemill::{DeviceAddr, Mapped};
/// let _in_one_piece = Mapped::Linear(DeviceAddr::new(1 << 30));
/// let _each_page_elsewhere = Mapped::Pages([0x7000, 0x3000].map(DeviceAddr::new).into());
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Mapped {
    /// Its first byte there; the rest follows it as it does here.
    Linear(DeviceAddr),
    /// Each of its pages there, as many as it has; only the bytes of a page follow each other.
    Pages(Box<[DeviceAddr]>),
}

/// Addresses as the process itself has them: for devices that share them (a simulated one, a thread), and for trying out.
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

/// What a device refused, or a [`DmaPool`](crate::DmaPool) over it.
///
/// ```
/// use pagemill::DeviceError;
/// let refused = DeviceError::System { what: "registering 2 MiB", errno: 12, next: "raise RLIMIT_MEMLOCK" };
/// assert_eq!(refused.to_string(), "registering 2 MiB: Cannot allocate memory (os error 12); raise RLIMIT_MEMLOCK");
/// ```
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The system refused.
    #[error("{what}: {}; {next}", std::io::Error::from_raw_os_error(*errno))]
    System {
        /// What was asked of it.
        what: &'static str,
        /// Its error number.
        errno: i32,
        /// What to do.
        next: &'static str,
    },
    /// This machine, kernel or driver does not have it, or not for this process.
    #[error("{what}; {next}")]
    Unavailable {
        /// What there is not.
        what: String,
        /// What to do.
        next: &'static str,
    },
    /// Blocks of 0 bytes, or of more than an arena's block can hold.
    #[error("blocks of {size} bytes: take 1 to {max}")]
    Size {
        /// Asked for.
        size: usize,
        /// The largest.
        max: usize,
    },
    /// An alignment that is no power of two, or above the largest block.
    #[error("an alignment of {align}: take a power of two of at most {max}")]
    Align {
        /// Asked for.
        align: usize,
        /// The largest.
        max: usize,
    },
    /// A boundary that is no power of two, or that each block would cross.
    #[error(
        "a boundary of {boundary} for blocks of {size} bytes: take a power of two that is no less than a block, or 0 for none"
    )]
    Boundary {
        /// Asked for.
        boundary: usize,
        /// A block, after rounding.
        size: usize,
    },
    /// The device's pages do not follow each other, and a block would be longer than one.
    #[error("blocks of {size} bytes: this device sees each page elsewhere, so a block is 4096 bytes at most")]
    Scattered {
        /// A block, after rounding.
        size: usize,
    },
    /// The device's addresses are less aligned than the pool's blocks have to be.
    #[error("the device sees memory at {addr}, and blocks have to be aligned to {align} there; map arenas so aligned")]
    Unaligned {
        /// Where.
        addr: DeviceAddr,
        /// What it is to be a multiple of.
        align: usize,
    },
    /// A [`DeviceMap`] gave fewer addresses than the arena has pages, or more.
    #[error("the device's map gave {given} addresses for {pages} pages; have it give one for each")]
    Miscounted {
        /// The addresses.
        given: usize,
        /// The pages.
        pages: usize,
    },
    /// A [`DeviceMap`] gave an address that not all bytes from there on can have.
    #[error("{bytes} bytes at {addr} reach beyond the last address of a device; have its map give a lower one")]
    Beyond {
        /// Where.
        addr: DeviceAddr,
        /// How many lie there.
        bytes: usize,
    },
    /// An address outside of the allocator's memory.
    #[error("{addr:#x} is outside of the memory of this device's allocator; ask for pages of that")]
    NotHere {
        /// The address.
        addr: usize,
    },
    /// The pool has as many blocks as it can number.
    #[error("the pool has {blocks} blocks and cannot number more; free some, or make another")]
    Full {
        /// How many.
        blocks: usize,
    },
    /// In the child of a fork: what the parent registered with the device is the parent's memory.
    #[error("the device knows the memory of the process that forked this one; register with it anew here")]
    Forked,
    /// The page allocator's.
    #[error(transparent)]
    Memory(#[from] Error),
}

impl From<BuildError> for DeviceError {
    fn from(why: BuildError) -> Self {
        Self::Memory(why.into())
    }
}

/// An allocator's memory as one device sees it. Cheap to clone.
///
/// Every arena that the allocator has is mapped as the device is made; one that is added later, when a page of it is first
/// met. While they are mapped their memory does not go back to the system: it is where the device finds it.
///
/// The child of a fork may not use it ([`DeviceError::Forked`]), and leaves the parent's as it is.
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
pub struct Device(Arc<Shared>);

/// A pool over a device, which shows itself as a line of [`Device::pools`].
type PoolLine = dyn fmt::Display + Send + Sync;

struct Shared {
    map: Box<dyn DeviceMap>,
    /// The arenas, in the order in which they were mapped. They are only ever added to.
    first: OnceLock<Box<Known>>,
    /// Held while one is mapped.
    mapping: Mutex<()>,
    /// The process that mapped them.
    stamp: Stamp,
    pools: Mutex<Vec<Weak<PoolLine>>>,
    /// Goes last: an arena that is pinned has to be there when it is let go of.
    allocator: Allocator,
}

/// An arena that the device knows.
struct Known {
    memory: Range<usize>,
    mapped: Mapped,
    /// Until the map has let go of it.
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
            // One for each page, as `check` says.
            Mapped::Pages(pages) => pages[offset >> PAGE_SHIFT].within(offset & (PAGE_SIZE - 1)),
        })
    }
}

impl Shared {
    fn known(&self) -> impl Iterator<Item = &Known> {
        core::iter::successors(self.first.get(), |known| known.next.get()).map(|known| &**known)
    }
}

impl Device {
    /// Maps the allocator's arenas by `map`.
    ///
    /// # Errors
    /// The map's, or [`DeviceError::Miscounted`] and [`DeviceError::Beyond`] where it gives what cannot be; what it had mapped
    /// is unmapped again.
    pub fn new(allocator: &Allocator, map: impl DeviceMap + 'static) -> Result<Self, DeviceError> {
        crate::registry::watch(); // The stamp is to be right.
        let device = Self(Arc::new(Shared {
            map: Box::new(map),
            first: OnceLock::new(),
            mapping: Mutex::new(()),
            stamp: Stamp::here(),
            pools: Mutex::default(),
            allocator: allocator.clone(),
        }));
        allocator.arenas().into_iter().try_for_each(|arena| device.map(arena.range))?;
        Ok(device)
    }

    /// The allocator whose memory it sees.
    pub fn allocator(&self) -> &Allocator {
        &self.0.allocator
    }

    /// Where the device finds a byte of the allocator's.
    ///
    /// # Errors
    /// [`DeviceError::NotHere`], [`DeviceError::Forked`]; for the first page of an arena that was added meanwhile, the map's.
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

    /// Makes an arena known, unless it is.
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
        // Before the device looks: none of it is to be on its way to the system then.
        let Some((zone, _)) = registry::by_address(memory.start) else {
            unreachable!("no arena at {:#x}, of which a device was told", memory.start)
        };
        let pinned = zone.pins.pin();
        // SAFETY: an arena's whole memory, which stays as long as its allocator; `Shared` keeps that.
        let mapped = unsafe { shared.map.map(memory.clone()) }?;
        check(memory.len(), &mapped).inspect_err(|_| shared.map.unmap(memory.clone(), &mapped))?;
        let is_new = place.set(Box::new(Known { memory, mapped, _pinned: pinned, next: OnceLock::new() })).is_ok();
        debug_assert!(is_new, "whoever maps holds the lock");
        Ok(())
    }

    /// Do all bytes of an arena follow each other there?
    pub(crate) fn is_linear(&self) -> bool {
        self.0.known().all(|known| matches!(known.mapped, Mapped::Linear(_)))
    }

    /// Its pools, as the kernel's `pools` file has those of a device: name, blocks out, blocks, bytes of one, pages.
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
            text.extend(pools.iter().filter_map(Weak::upgrade).map(|pool| format!("{pool}\n")));
        }
        text
    }

    /// Is this the child of a fork? Whoever held a lock then is not here.
    #[inline]
    pub(crate) fn is_inherited(&self) -> bool {
        self.0.stamp.is_inherited()
    }

    pub(crate) fn lock_pools(&self) -> MutexGuard<'_, Vec<Weak<PoolLine>>> {
        self.0.pools.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A pool over it begins.
    pub(crate) fn enter(&self, pool: Weak<PoolLine>) {
        let mut pools = self.lock_pools();
        pools.retain(|pool| pool.strong_count() > 0);
        pools.push(pool);
    }
}

/// Has each of so many bytes an address?
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

/// Keeps what a map needs open, whatever the caller does with its own descriptor.
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

impl Drop for Shared {
    fn drop(&mut self) {
        // What a child unmapped, its parent's device would lose.
        if !self.stamp.is_inherited() {
            self.known().for_each(|known| self.map.unmap(known.memory.clone(), &known.mapped));
        }
    }
}
