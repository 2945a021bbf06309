//! Physical addresses, read from the process's page map.
use super::{DeviceAddr, DeviceError, DeviceMap, Mapped};
use crate::process::{Stamp, no_fork};
use core::ops::Range;
use pagemill_core::PAGE_SIZE;
use pagemill_os::Errno;
use pagemill_os::device::pagemap;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Maps memory at its physical addresses, for a device without an IOMMU, or one that a program drives directly. It
/// needs CAP_SYS_ADMIN: without it the kernel reports frame 0 for every page, and mapping is refused.
///
/// The memory is locked while it is mapped (`mlock`), and each page's address is read once. **That alone does not keep
/// a page at its address.** The kernel does not swap a locked page out, but it moves one to another frame when it
/// compacts memory, balances nodes, or collapses pages into one of 2 MiB. Reserved pages of 2 MiB
/// ([`Memory::huge_pages`](crate::Memory::huge_pages)) do not move. The addresses of other pages stay valid only if
/// nothing moves pages: `/proc/sys/vm/compact_unevictable_allowed` and `/proc/sys/kernel/numa_balancing` are 0, the
/// allocator was built with [`huge_pages(false)`](crate::Builder::huge_pages), and no memory is taken offline.
///
/// **A fork moves pages too**, of either size: the next write to a private page, by parent or child, goes to a copy in
/// another frame. A process that drives a device in this way must not fork meanwhile. A device that writes to an
/// outdated address overwrites memory of other owners. Behind an IOMMU use [`VfioMap`](crate::VfioMap), which pins
/// pages.
///
/// Neighbouring pages have unrelated addresses: a block above order 0 may not be contiguous physically, unless it lies
/// within one page of 2 MiB.
///
/// ```
/// use pagemill::{Allocator, Device, Gfp, Physical};
/// let allocator = Allocator::builder().pages(64).build().unwrap();
/// match Device::new(&allocator, Physical::new()) {
///     Ok(device) => {
///         let page = allocator.alloc_page(Gfp::KERNEL).unwrap();
///         assert_eq!(device.address_of(page.addr() + 100).unwrap().get() % 4096, 100);
///     }
///     Err(why) => println!("{why}"), // the message says what to do
/// }
/// ```
#[derive(Debug, Default)]
pub struct Physical {
    /// The ranges that were locked for this map.
    locked: Mutex<Vec<Range<usize>>>,
}

/// Memory that is locked for devices of this process. Counted here, because the system does not count locks.
static LOCKED: Mutex<Vec<Locked>> = Mutex::new(Vec::new());

struct Locked {
    memory: Range<usize>,
    devices: usize,
    /// The process that locked it. A forked child has its own memory, which is not locked.
    stamp: Stamp,
}

impl Locked {
    fn all() -> MutexGuard<'static, Vec<Self>> {
        LOCKED.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn is(&self, memory: &Range<usize>) -> bool {
        self.memory == *memory && !self.stamp.is_inherited()
    }

    /// Locks memory for one more device. False: other code has locked it before, and will unlock it.
    fn lock(memory: &Range<usize>) -> Result<bool, DeviceError> {
        let _held = no_fork(); // A child would find the list locked for ever.
        let mut all = Self::all();
        if let Some(locked) = all.iter_mut().find(|locked| locked.is(memory)) {
            locked.devices += 1;
            return Ok(true);
        }
        let was_locked = pagemap::is_locked(memory.clone()).map_err(unreadable)?;
        pagemap::lock(memory.clone()).map_err(|errno| DeviceError::System {
            what: "an arena cannot be locked in memory (mlock)",
            errno: errno.0,
            next: match errno {
                Errno::EAGAIN => "free memory, or use a smaller arena",
                _ => {
                    "raise RLIMIT_MEMLOCK (ulimit -l, LimitMEMLOCK=) above the size of all arenas, have CAP_IPC_LOCK, or use less"
                }
            },
        })?;
        if !was_locked {
            all.push(Self { memory: memory.clone(), devices: 1, stamp: Stamp::here() });
        }
        Ok(!was_locked)
    }

    /// Unlocks memory for one device.
    fn unlock(memory: &Range<usize>) {
        let _held = no_fork();
        let mut all = Self::all();
        let Some(at) = all.iter().position(|locked| locked.is(memory)) else { return };
        all[at].devices -= 1;
        if all[at].devices == 0 {
            all.swap_remove(at);
            pagemap::unlock(memory.clone());
        }
    }
}

impl Physical {
    /// A map that has mapped nothing yet.
    pub fn new() -> Self {
        Self::default()
    }
}

impl DeviceMap for Physical {
    unsafe fn map(&self, memory: Range<usize>) -> Result<Mapped, DeviceError> {
        let is_ours = Locked::lock(&memory)?;
        let addresses = addresses(memory.clone());
        match (&addresses, is_ours) {
            (Ok(_), true) => self.locked.lock().unwrap_or_else(PoisonError::into_inner).push(memory),
            (Err(_), true) => Locked::unlock(&memory),
            (_, false) => {}
        }
        addresses.map(Mapped::Pages)
    }

    fn unmap(&self, memory: Range<usize>, _: &Mapped) {
        let mut locked = self.locked.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = locked.iter().position(|range| *range == memory) {
            locked.swap_remove(at);
            Locked::unlock(&memory);
        }
    }
}

/// How often the page map is read until every page has an address. A page that the kernel is moving has none for a
/// moment.
const LOOKS: usize = 100;

/// The physical address of each page.
fn addresses(memory: Range<usize>) -> Result<Box<[DeviceAddr]>, DeviceError> {
    let mut absent = 0;
    for _ in 0..LOOKS {
        let addresses = look(memory.clone())?;
        absent = memory.len() / PAGE_SIZE - addresses.len();
        if absent == 0 {
            return Ok(addresses.into_boxed_slice());
        }
        std::thread::yield_now();
    }
    Err(DeviceError::Unavailable {
        what: format!("{absent} pages of locked memory have no physical address"),
        next: "try again when the kernel moves fewer pages, or use pages of 2 MiB (Memory::huge_pages)",
    })
}

/// The physical addresses of those pages that have one.
fn look(memory: Range<usize>) -> Result<Vec<DeviceAddr>, DeviceError> {
    let mut addresses = Vec::with_capacity(memory.len() / PAGE_SIZE);
    let mut is_hidden = false;
    let each = |frame: Option<u64>| {
        is_hidden |= frame == Some(0);
        addresses.extend(frame.map(|frame| DeviceAddr::new(frame * PAGE_SIZE as u64)));
        Ok(())
    };
    pagemap::frames(memory, each).map_err(unreadable)?;
    if is_hidden {
        return Err(DeviceError::Unavailable {
            what: "the kernel does not show this process physical addresses (/proc/self/pagemap says frame 0)"
                .to_owned(),
            next: "run as root, or with CAP_SYS_ADMIN",
        });
    }
    Ok(addresses)
}

fn unreadable(error: io::Error) -> DeviceError {
    DeviceError::System {
        what: "the process's page map cannot be read (/proc/self/pagemap, /proc/self/smaps)",
        errno: error.raw_os_error().unwrap_or(0),
        next: "mount /proc, and run as root or with CAP_SYS_ADMIN",
    }
}
