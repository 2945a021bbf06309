//! io_uring's fixed buffers. A device address is an entry of the ring's table and an offset in the entry's buffer.
//!
//! The kernel accepts buffers of 1 GiB at most, so an arena is cut into pieces in neighbouring entries. The address is
//! one number: the entry from bit 30 up, and the offset below. So it continues from piece to piece as the memory does.
//! Rings may share a table.
//!
//! # Invariant
//! Whenever the table is unlocked, each ring's entries are those that `starts` says.
use super::{DeviceAddr, DeviceError, DeviceMap, Mapped, keep, refuse_inherited};
use crate::process::Stamp;
use core::ops::Range;
use pagemill_os::Errno;
use pagemill_os::device::ring;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The bits of an address below its entry.
const SHIFT: u32 = ring::BUFFER_MAX.ilog2();
/// The default number of entries: 1 TiB in whole pieces, for 8 KiB of kernel memory.
const ENTRIES: usize = 1024;
const _: () = assert!(ring::ENTRIES_MAX <= 1 << u16::BITS && ENTRIES <= ring::ENTRIES_MAX);

/// Registers arenas with an io_uring. The ring's requests with fixed buffers (`IORING_OP_READ_FIXED`, `WRITE_FIXED` and
/// others) access pages without the kernel looking them up and pinning them each time.
///
/// It gives the ring a sparse table of buffers; the ring must not have buffers yet. Registering an arena commits all of
/// it, and counts towards `RLIMIT_MEMLOCK`. Clones of this handle refer to the same table: keep one to [share it with
/// further rings](Self::clone_to).
///
/// A ring for a single thread (`IORING_SETUP_SINGLE_ISSUER`) accepts and removes buffers only on that thread: make the
/// [`Device`](crate::Device) there and drop it there. If it is dropped on another thread, the ring keeps the buffers
/// until it is closed.
///
/// A submission queue entry takes the [index](Self::index) of the buffer and the byte's own address. The kernel refuses
/// an address outside that buffer (`EFAULT`). A page is in one buffer, and so is a block that does not cross a multiple
/// of 1 GiB from its arena's start. Other blocks exist only in memory that was [brought](crate::Memory::brought).
///
/// ```
/// use io_uring::{IoUring, opcode, types};
/// use pagemill::{Allocator, Device, FixedBuffers, Gfp};
/// use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
/// let mut ring = match IoUring::new(8) {
///     Ok(ring) => ring,
///     Err(why) => return println!("no io_uring here: {why}"),
/// };
/// let allocator = Allocator::builder().pages(512).build().unwrap();
/// // SAFETY: the ring is open.
/// let buffers = match FixedBuffers::new(unsafe { BorrowedFd::borrow_raw(ring.as_raw_fd()) }) {
///     Ok(buffers) => buffers,
///     Err(why) => return println!("{why}"),
/// };
/// let device = match Device::new(&allocator, buffers.clone()) {
///     Ok(device) => device,
///     Err(why) => return println!("{why}"), // the message says what to do
/// };
/// let mut page = allocator.alloc_page(Gfp::KERNEL).unwrap();
/// let at = device.address_of(page.addr()).unwrap();
/// assert_eq!(buffers.address(at), Some(page.addr()));
///
/// let file = std::fs::File::open("/proc/self/exe").unwrap();
/// let file = types::Fd(file.as_raw_fd());
/// let read = opcode::ReadFixed::new(file, page.as_mut_ptr(), 4, FixedBuffers::index(at)).build();
/// // SAFETY: this code owns the page until the request is complete.
/// unsafe { ring.submission().push(&read) }.unwrap();
/// ring.submit_and_wait(1).unwrap();
/// assert_eq!(ring.completion().next().unwrap().result(), 4);
/// assert_eq!(&page[..4], b"\x7fELF");
/// ```
#[derive(Clone, Debug)]
pub struct FixedBuffers(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    table: Mutex<Table>,
    /// The process that made it. The rings in a forked child are its parent's.
    stamp: Stamp,
}

#[derive(Debug)]
struct Table {
    /// Memory is registered with the first ring. The others have its table.
    rings: Vec<OwnedFd>,
    /// The start of each entry's buffer, if it has one.
    starts: Vec<Option<usize>>,
}

impl FixedBuffers {
    /// Gives the ring a table with room for 1024 buffers. An arena needs one, and one more for each further GiB.
    ///
    /// # Errors
    /// [`DeviceError`] says what is wrong: the descriptor is not a ring, the ring has buffers already, or the kernel is
    /// older than Linux 5.19.
    pub fn new(ring: BorrowedFd<'_>) -> Result<Self, DeviceError> {
        Self::with_entries(ring, ENTRIES)
    }

    /// The same, with a given number of entries, up to 16384.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    ///
    /// ```
    /// use pagemill::FixedBuffers;
    /// use std::os::fd::AsFd;
    /// let no_ring = std::fs::File::open("/dev/null").unwrap();
    /// println!("{}", FixedBuffers::with_entries(no_ring.as_fd(), 16).unwrap_err());
    /// ```
    pub fn with_entries(ring: BorrowedFd<'_>, entries: usize) -> Result<Self, DeviceError> {
        if entries == 0 || entries > ring::ENTRIES_MAX {
            return Err(DeviceError::Unavailable {
                what: format!("io_uring does not support a table of {entries} buffers"),
                next: "ask for 1 to 16384",
            });
        }
        ring::make_table(ring, entries).map_err(|errno| DeviceError::System {
            what: "io_uring refuses a table of buffers (IORING_REGISTER_BUFFERS2)",
            errno: errno.0,
            next: match errno {
                Errno::EBUSY => "unregister the ring's buffers, or use another ring",
                Errno::EINVAL => "use Linux 5.19 or newer, whose tables may have empty entries",
                Errno::EEXIST => ONE_THREAD,
                Errno::ENOSYS | Errno::EPERM | Errno::EACCES => FORBIDDEN,
                Errno::ENOMEM => MEMLOCK,
                _ => "use the descriptor of an io_uring",
            },
        })?;
        let rings = match keep(ring, "the ring cannot be kept open") {
            Ok(ring) => vec![ring],
            Err(why) => {
                let _ = ring::drop_table(ring);
                return Err(why);
            }
        };
        let table = Mutex::new(Table { rings, starts: vec![None; entries] });
        Ok(Self(Arc::new(Shared { table, stamp: Stamp::here() })))
    }

    /// The table entry whose buffer contains an address: `buf_index` of a request.
    ///
    /// ```
    /// use pagemill::{DeviceAddr, FixedBuffers};
    /// let addr = DeviceAddr::new(3 << 30 | 4096);
    /// assert_eq!((FixedBuffers::index(addr), FixedBuffers::offset(addr)), (3, 4096));
    /// ```
    #[inline]
    pub fn index(addr: DeviceAddr) -> u16 {
        (addr.get() >> SHIFT) as u16
    }

    /// The offset in that buffer, in bytes.
    #[inline]
    pub fn offset(addr: DeviceAddr) -> u32 {
        (addr.get() & ((1 << SHIFT) - 1)) as u32
    }

    /// The byte's address in the process, `addr` of a request; none if the entry has no buffer.
    pub fn address(&self, addr: DeviceAddr) -> Option<usize> {
        let start = *self.0.table().starts.get((addr.get() >> SHIFT) as usize)?;
        Some(start? + Self::offset(addr) as usize)
    }

    /// Shares the table with another ring, which then accesses the same buffers at the same addresses, those of later
    /// arenas too. The memory is pinned and counted once. The ring must have no buffers yet, and stays open as long as
    /// this exists.
    ///
    /// # Errors
    /// [`DeviceError::System`] before Linux 6.12, or if the rings belong to different users.
    ///
    /// ```
    /// # use io_uring::IoUring;
    /// # use pagemill::FixedBuffers;
    /// # use std::os::fd::{AsRawFd, BorrowedFd};
    /// # let (Ok(one), Ok(other)) = (IoUring::new(8), IoUring::new(8)) else { return };
    /// # // SAFETY: both rings are open.
    /// # let [first, second] = [&one, &other].map(|ring| unsafe { BorrowedFd::borrow_raw(ring.as_raw_fd()) });
    /// # let Ok(buffers) = FixedBuffers::new(first) else { return };
    /// match buffers.clone_to(second) {
    ///     Ok(()) => println!("one table, two rings"),
    ///     Err(why) => println!("{why}"), // then each ring needs its own table and allocator
    /// }
    /// ```
    pub fn clone_to(&self, ring: BorrowedFd<'_>) -> Result<(), DeviceError> {
        refuse_inherited(self.0.stamp)?;
        let other = keep(ring, "the ring cannot be kept open")?;
        let mut table = self.0.table();
        ring::clone_table(table.rings[0].as_fd(), ring, false).map_err(|errno| clone_refusal(errno, false))?;
        table.rings.push(other);
        Ok(())
    }
}

const MEMLOCK: &str = "registered memory is locked whole: raise RLIMIT_MEMLOCK (ulimit -l, LimitMEMLOCK=) above the size of all \
                       arenas, have CAP_IPC_LOCK, or use less";
const ONE_THREAD: &str =
    "only the thread that made the ring may use it (IORING_SETUP_SINGLE_ISSUER): do this on that thread";
const FORBIDDEN: &str = "allow io_uring: see /proc/sys/kernel/io_uring_disabled, the container's seccomp profile, and the ring's restrictions";

fn refusal(errno: Errno) -> DeviceError {
    let next = match errno {
        Errno::ENOMEM => MEMLOCK,
        Errno::EEXIST => ONE_THREAD,
        Errno::EPERM | Errno::EACCES => FORBIDDEN,
        Errno::EOPNOTSUPP => "memory of files on a disk cannot be registered: use anonymous memory or a memfd",
        Errno::EINVAL => "before Linux 6.5, memory that was brought must be a mapping of one file, or of none",
        _ => "the arena's memory must be readable and writable, and only Pagemill may change the ring's table",
    };
    DeviceError::System {
        what: "io_uring does not register an arena (IORING_REGISTER_BUFFERS_UPDATE)",
        errno: errno.0,
        next,
    }
}

/// `has_table`: the other ring's table is being replaced, for which Linux 6.12 always returns `EBUSY`.
fn clone_refusal(errno: Errno, has_table: bool) -> DeviceError {
    let next = match errno {
        Errno::EBUSY if !has_table => "unregister the other ring's buffers",
        Errno::EINVAL | Errno::EBUSY => {
            "use Linux 6.12 or newer (6.13 to add arenas later) and rings of one user, or give each ring an allocator of \
             its own"
        }
        Errno::EEXIST => ONE_THREAD,
        Errno::ENOMEM => MEMLOCK,
        _ => "use the descriptor of an io_uring",
    };
    DeviceError::System {
        what: "io_uring does not share a table of buffers (IORING_REGISTER_CLONE_BUFFERS)",
        errno: errno.0,
        next,
    }
}

impl Shared {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    /// The first of `n` neighbouring empty entries.
    fn room(&self, n: usize) -> Option<usize> {
        self.starts.windows(n).position(|entries| entries.iter().all(Option::is_none))
    }

    /// Sets entries in all rings, or in none.
    ///
    /// # Safety
    /// As for [`ring::set`].
    unsafe fn set(&mut self, first: usize, pieces: &[Range<usize>]) -> Result<(), DeviceError> {
        let (own, others) = self.rings.split_first().unwrap_or_else(|| unreachable!("a table without a ring"));
        // SAFETY: the caller promises what `ring::set` needs.
        unsafe { ring::set(own.as_fd(), first, pieces) }.map_err(refusal)?;
        for (done, other) in others.iter().enumerate() {
            if let Err(errno) = ring::clone_table(own.as_fd(), other.as_fd(), true) {
                // SAFETY: empty ranges, so no memory is registered.
                let _ = unsafe { ring::set(own.as_fd(), first, &vec![0..0; pieces.len()]) };
                others[..done].iter().for_each(|other| _ = ring::clone_table(own.as_fd(), other.as_fd(), true));
                return Err(clone_refusal(errno, true));
            }
        }
        Ok(())
    }

    /// Empties entries in all rings. Returns whether all rings did.
    fn clear(&mut self, first: usize, n: usize) -> bool {
        // SAFETY: empty ranges, so no memory is registered.
        let clear = |ring: &OwnedFd| unsafe { ring::set(ring.as_fd(), first, &vec![0..0; n]) }.is_ok();
        self.rings.iter().filter(|ring| clear(ring)).count() == self.rings.len()
    }
}

impl DeviceMap for FixedBuffers {
    unsafe fn map(&self, memory: Range<usize>) -> Result<Mapped, DeviceError> {
        refuse_inherited(self.0.stamp)?;
        let pieces: Vec<Range<usize>> = memory
            .clone()
            .step_by(ring::BUFFER_MAX)
            .map(|start| start..(start + ring::BUFFER_MAX).min(memory.end))
            .collect();
        let mut table = self.0.table();
        let Some(first) = table.room(pieces.len()) else {
            return Err(DeviceError::Unavailable {
                what: format!("the table of {} buffers has no {} entries left", table.starts.len(), pieces.len()),
                next: "make it with more entries (FixedBuffers::with_entries), or use fewer, larger arenas",
            });
        };
        // SAFETY: the memory stays mapped, as the caller promises. The program that makes requests decides what they
        // write where.
        unsafe { table.set(first, &pieces) }?;
        table.starts[first..].iter_mut().zip(&pieces).for_each(|(start, piece)| *start = Some(piece.start));
        Ok(Mapped::Linear(DeviceAddr::new((first as u64) << SHIFT)))
    }

    fn unmap(&self, memory: Range<usize>, mapped: &Mapped) {
        let Mapped::Linear(addr) = *mapped else { unreachable!("an arena's buffers are neighbours") };
        if self.0.stamp.is_inherited() {
            return; // They are the parent's.
        }
        let (first, n) = (usize::from(Self::index(addr)), memory.len().div_ceil(ring::BUFFER_MAX));
        let mut table = self.0.table();
        // If a ring refuses, the entries stay taken: no address may lead to two buffers.
        if table.clear(first, n) {
            table.starts[first..first + n].fill(None);
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if !self.stamp.is_inherited() {
            // From now on the owners of the rings may register other buffers.
            self.table().rings.iter().for_each(|ring| _ = ring::drop_table(ring.as_fd()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Errno, clone_refusal};

    #[test]
    fn ebusy_for_replacing_a_table_differs_from_ebusy_for_a_ring_with_buffers() {
        let says = |has_table, what| clone_refusal(Errno::EBUSY, has_table).to_string().contains(what);
        assert!(says(false, "unregister the other ring's buffers"));
        assert!(says(true, "6.13 to add arenas later"));
    }
}
