//! io_uring's fixed buffers: an address is an entry of the ring's table and an offset in the buffer there.
//!
//! The kernel takes buffers of 1 GiB at most, so an arena is cut into pieces in neighbouring entries. With the entry above
//! bit 30 the address is one number, and goes on from piece to piece as the memory does. Rings may share a table. Invariant:
//! each ring's entries are what `starts` says, the whole time that it is unlocked.
use super::{DeviceAddr, DeviceError, DeviceMap, Mapped, keep, refuse_inherited};
use crate::process::Stamp;
use core::ops::Range;
use pagemill_os::Errno;
use pagemill_os::device::ring;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The bits of an address below its entry.
const SHIFT: u32 = ring::BUFFER_MAX.ilog2();
/// Entries of a table unless said: 1 TiB in whole pieces, for 8 KiB of the kernel's memory.
const ENTRIES: usize = 1024;
const _: () = assert!(ring::ENTRIES_MAX <= 1 << u16::BITS && ENTRIES <= ring::ENTRIES_MAX);

/// Arenas are registered with an io_uring: its requests for fixed buffers (`IORING_OP_READ_FIXED`, `WRITE_FIXED` and the like)
/// reach their pages without the kernel looking them up and pinning them each time.
///
/// It gives the ring a sparse table of buffers, which the ring must not have yet. Registering an arena commits all of it, and
/// counts towards `RLIMIT_MEMLOCK`. Clones of this handle are of the same table: keep one to
/// [share it with further rings](Self::clone_to).
///
/// A ring of one thread's (`IORING_SETUP_SINGLE_ISSUER`) takes buffers, and lets go of them, for that thread alone: make the
/// [`Device`](crate::Device) there and drop it there. Dropped elsewhere, the ring has the buffers until it is closed.
///
/// An entry of the submission queue takes the [index](Self::index) of the buffer and the byte's own address: the kernel
/// refuses one that is not in that buffer (`EFAULT`). A page, and a block that does not lie across a multiple of 1 GiB
/// from its arena's start, is in one buffer; only memory that was [brought](crate::Memory::brought) has other ones.
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
///     Err(why) => return println!("{why}"), // says what to do
/// };
/// let mut page = allocator.alloc_page(Gfp::KERNEL).unwrap();
/// let at = device.address_of(page.addr()).unwrap();
/// assert_eq!(buffers.address(at), Some(page.addr()));
///
/// let file = std::fs::File::open("/proc/self/exe").unwrap();
/// let file = types::Fd(file.as_raw_fd());
/// let read = opcode::ReadFixed::new(file, page.as_mut_ptr(), 4, FixedBuffers::index(at)).build();
/// // SAFETY: the page is ours until the request is done.
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
    /// The process that made it: the rings of a fork's child are its parent's.
    stamp: Stamp,
}

#[derive(Debug)]
struct Table {
    /// The first is where memory is registered, the others have its table.
    rings: Vec<OwnedFd>,
    /// Where the buffer of each entry begins, if it has one.
    starts: Vec<Option<usize>>,
}

impl FixedBuffers {
    /// Gives the ring a table with room for 1024 buffers: an arena takes one, and one more for each further GiB.
    ///
    /// # Errors
    /// [`DeviceError`] says what is in the way: it is no ring, has buffers already, or the kernel is older than Linux 5.19.
    pub fn new(ring: BorrowedFd<'_>) -> Result<Self, DeviceError> {
        Self::with_entries(ring, ENTRIES)
    }

    /// The same with so many entries, up to 16384.
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
                what: format!("io_uring has no table of {entries} buffers"),
                next: "ask for 1 to 16384",
            });
        }
        ring::make_table(ring, entries).map_err(|errno| DeviceError::System {
            what: "io_uring gives no table of buffers (IORING_REGISTER_BUFFERS2)",
            errno: errno.0,
            next: match errno {
                Errno::EBUSY => "take from the ring the buffers that it has, or use one of its own",
                Errno::EINVAL => "use Linux 5.19 or newer, whose tables may have empty entries",
                Errno::EEXIST => ONE_THREAD,
                Errno::ENOSYS | Errno::EPERM | Errno::EACCES => FORBIDDEN,
                Errno::ENOMEM => MEMLOCK,
                _ => "use a descriptor of an io_uring's",
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

    /// The entry of the table with the buffer that an address is in: `buf_index` of a request.
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

    /// How far into that buffer it is, in bytes.
    #[inline]
    pub fn offset(addr: DeviceAddr) -> u32 {
        (addr.get() & ((1 << SHIFT) - 1)) as u32
    }

    /// The byte's own address, `addr` of a request; none if there is no buffer in that entry.
    pub fn address(&self, addr: DeviceAddr) -> Option<usize> {
        let start = *self.0.table().starts.get((addr.get() >> SHIFT) as usize)?;
        Some(start? + Self::offset(addr) as usize)
    }

    /// Has another ring reach the same buffers by the same addresses, those of arenas that come later too. The memory is
    /// pinned and counted once. The ring must have no buffers yet, and is kept open for as long as this is there.
    ///
    /// # Errors
    /// [`DeviceError::System`]: before Linux 6.12 the kernel cannot; nor can it if the rings belong to different users.
    ///
    /// ```
    /// # use io_uring::IoUring;
    /// # use pagemill::FixedBuffers;
    /// # use std::os::fd::{AsRawFd, BorrowedFd};
    /// # let (Ok(one), Ok(other)) = (IoUring::new(8), IoUring::new(8)) else { return };
    /// # // SAFETY: they are open.
    /// # let [first, second] = [&one, &other].map(|ring| unsafe { BorrowedFd::borrow_raw(ring.as_raw_fd()) });
    /// # let Ok(buffers) = FixedBuffers::new(first) else { return };
    /// match buffers.clone_to(second) {
    ///     Ok(()) => println!("one table, two rings"),
    ///     Err(why) => println!("{why}"), // each ring needs a table, and an allocator of its own
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
    "the ring takes orders from the thread that made it alone (IORING_SETUP_SINGLE_ISSUER): do this there";
const FORBIDDEN: &str = "allow io_uring: see /proc/sys/kernel/io_uring_disabled, the container's seccomp profile, and the ring's restrictions";

fn refusal(errno: Errno) -> DeviceError {
    let next = match errno {
        Errno::ENOMEM => MEMLOCK,
        Errno::EEXIST => ONE_THREAD,
        Errno::EPERM | Errno::EACCES => FORBIDDEN,
        Errno::EOPNOTSUPP => "memory of files on a disk cannot be registered: use anonymous memory or a memfd",
        Errno::EINVAL => "before Linux 6.5 memory that was brought must be of one file, or of none; map it so",
        _ => "the arena's memory must be readable and writable, and the ring's table its own",
    };
    DeviceError::System {
        what: "io_uring does not register an arena (IORING_REGISTER_BUFFERS_UPDATE)",
        errno: errno.0,
        next,
    }
}

/// `has_table`: in place of the table that the other ring has, of which Linux 6.12 says `EBUSY` whatever it is asked.
fn clone_refusal(errno: Errno, has_table: bool) -> DeviceError {
    let next = match errno {
        Errno::EBUSY if !has_table => "take from the other ring the buffers that it has",
        Errno::EINVAL | Errno::EBUSY => {
            "use Linux 6.12 or newer, 6.13 where arenas come later, and rings of one user; else give each ring an allocator of \
             its own"
        }
        Errno::EEXIST => ONE_THREAD,
        Errno::ENOMEM => MEMLOCK,
        _ => "use a descriptor of an io_uring's",
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
    /// The first of `n` neighbouring entries that are empty.
    fn room(&self, n: usize) -> Option<usize> {
        self.starts.windows(n).position(|entries| entries.iter().all(Option::is_none))
    }

    /// Sets entries in all rings, or in none.
    ///
    /// # Safety
    /// As [`ring::set`].
    unsafe fn set(&mut self, first: usize, pieces: &[Range<usize>]) -> Result<(), DeviceError> {
        let (own, others) = self.rings.split_first().unwrap_or_else(|| unreachable!("a table without a ring"));
        // SAFETY: as the caller promises.
        unsafe { ring::set(own.as_fd(), first, pieces) }.map_err(refusal)?;
        for (done, other) in others.iter().enumerate() {
            if let Err(errno) = ring::clone_table(own.as_fd(), other.as_fd(), true) {
                // SAFETY: no bytes.
                let _ = unsafe { ring::set(own.as_fd(), first, &vec![0..0; pieces.len()]) };
                others[..done].iter().for_each(|other| _ = ring::clone_table(own.as_fd(), other.as_fd(), true));
                return Err(clone_refusal(errno, true));
            }
        }
        Ok(())
    }

    /// Empties entries in all rings; whether all of them could.
    fn clear(&mut self, first: usize, n: usize) -> bool {
        // SAFETY: no bytes.
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
        // SAFETY: the memory stays mapped, as the caller promises; who makes requests says what they write where.
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
        // Where a ring refuses, the entries stay taken: no address leads to two buffers.
        if table.clear(first, n) {
            table.starts[first..first + n].fill(None);
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if !self.stamp.is_inherited() {
            // The rings may have other buffers from now on, if their owners still have them.
            self.table().rings.iter().for_each(|ring| _ = ring::drop_table(ring.as_fd()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Errno, clone_refusal};

    #[test]
    fn a_system_that_puts_no_table_in_anothers_place_is_told_from_a_ring_with_buffers_of_its_own() {
        let says = |has_table, what| clone_refusal(Errno::EBUSY, has_table).to_string().contains(what);
        assert!(says(false, "take from the other ring the buffers that it has"));
        assert!(says(true, "6.13 where arenas come later"));
    }
}
