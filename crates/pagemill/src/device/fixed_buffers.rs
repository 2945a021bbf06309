//! io_uring's fixed buffers. A device address is an entry of the ring's table and an offset in the entry's buffer.
//!
//! The kernel accepts buffers of 1 GiB at most, so an arena is cut into pieces in neighbouring entries. The address is
//! one number: the entry from bit 30 up, and the offset below. So it continues from piece to piece as the memory does.
//! Rings may share a table.
//!
//! # Invariant
//! Whenever the table is unlocked, each ring's entries are those that `buffers` says.
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
/// of 1 GiB from its arena's start. Other blocks exist only in memory that was [brought](crate::Memory::brought). A
/// [`DmaPool`](crate::DmaPool) keeps a block of any size in one buffer, except in such memory.
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
pub struct FixedBuffers(Arc<Registration>);

#[derive(Debug)]
struct Registration {
    table: Mutex<Table>,
    /// The process that made it. The rings in a forked child are its parent's.
    stamp: Stamp,
}

#[derive(Debug)]
struct Table {
    /// Memory is registered with the first ring. The others have its table.
    rings: Vec<OwnedFd>,
    /// Each entry's buffer, if it has one.
    buffers: Vec<Option<Range<usize>>>,
}

/// A part of memory that one request names: `buf_index`, `addr` and `len` of a submission queue entry. See
/// [`FixedBuffers::pieces`].
///
/// ```
/// use pagemill::Piece;
/// let piece = Piece { index: 2, addr: 0x7f00_0000_0000, len: 4096 };
/// assert_eq!(piece.addr + piece.len, 0x7f00_0000_1000);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// The table entry whose buffer contains it.
    pub index: u16,
    /// The address of its first byte in the process.
    pub addr: usize,
    /// Its size in bytes.
    pub len: usize,
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
        let table = Mutex::new(Table { rings, buffers: vec![None; entries] });
        Ok(Self(Arc::new(Registration { table, stamp: Stamp::here() })))
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

    /// The byte's address in the process, `addr` of a request; none if it is in no buffer.
    pub fn address(&self, addr: DeviceAddr) -> Option<usize> {
        let table = self.0.table();
        let buffer = table.buffers.get((addr.get() >> SHIFT) as usize)?.as_ref()?;
        Some(buffer.start + Self::offset(addr) as usize).filter(|address| buffer.contains(address))
    }

    /// Cuts memory into pieces that each lie in one buffer, since one request cannot reach two: a [`Run`](crate::Run) that
    /// crosses a multiple of 1 GiB from its arena's start has a piece on either side. Pieces are in the order of the bytes.
    ///
    /// # Errors
    /// [`DeviceError::NotHere`] with the first address that is in no buffer.
    ///
    /// ```
    /// # use io_uring::IoUring;
    /// # use pagemill::{Allocator, Bulk, Device, FixedBuffers, Page, Run};
    /// # use std::os::fd::{AsRawFd, BorrowedFd};
    /// # let Ok(ring) = IoUring::new(8) else { return };
    /// # let allocator = Allocator::builder().pages(512).build().unwrap();
    /// # // SAFETY: the ring is open.
    /// # let Ok(buffers) = FixedBuffers::new(unsafe { BorrowedFd::borrow_raw(ring.as_raw_fd()) }) else { return };
    /// # let Ok(_device) = Device::new(&allocator, buffers.clone()) else { return };
    /// let mut runs: Vec<Run<Page>> = Vec::new();
    /// allocator.alloc_pages_bulk_runs(Bulk::exact(64), &mut runs).unwrap();
    /// for run in &runs {
    ///     let pieces = buffers.pieces(run).unwrap(); // a request for each
    ///     assert_eq!((pieces[0].addr, pieces[0].len), (run.addr(), run.bytes()));
    /// }
    /// assert!(buffers.pieces(b"not of the allocator").is_err());
    /// ```
    pub fn pieces(&self, memory: &(impl AsRef<[u8]> + ?Sized)) -> Result<Vec<Piece>, DeviceError> {
        self.pieces_of([memory])
    }

    /// The same for several parts of memory: pages, blocks, runs or slices. Parts that follow each other in one buffer are
    /// merged, so that they cost one request.
    ///
    /// # Errors
    /// As [`pieces`](Self::pieces).
    ///
    /// ```
    /// # use io_uring::IoUring;
    /// # use pagemill::{Allocator, Bulk, Device, FixedBuffers, Page};
    /// # use std::os::fd::{AsRawFd, BorrowedFd};
    /// # let Ok(ring) = IoUring::new(8) else { return };
    /// # let allocator = Allocator::builder().pages(512).build().unwrap();
    /// # // SAFETY: the ring is open.
    /// # let Ok(buffers) = FixedBuffers::new(unsafe { BorrowedFd::borrow_raw(ring.as_raw_fd()) }) else { return };
    /// # let Ok(_device) = Device::new(&allocator, buffers.clone()) else { return };
    /// let mut pages: Vec<Page> = Vec::new();
    /// allocator.alloc_pages_bulk_callback(Bulk::up_to(64), |page| pages.push(page)).unwrap();
    /// let pieces = buffers.pieces_of(&pages).unwrap();
    /// assert_eq!(pieces.iter().map(|piece| piece.len).sum::<usize>(), 64 * 4096);
    /// assert!(pieces.len() <= 64);
    /// ```
    pub fn pieces_of(&self, parts: impl IntoIterator<Item: AsRef<[u8]>>) -> Result<Vec<Piece>, DeviceError> {
        let mut pieces = Vec::new();
        for part in parts {
            let bytes = part.as_ref().as_ptr_range();
            // Locked for each part: the caller's code, which runs in between, may look up addresses.
            cut(&self.0.table().buffers, bytes.start.addr()..bytes.end.addr(), &mut pieces)?;
        }
        Ok(pieces)
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

pub(super) const MEMLOCK: &str = "registered memory is locked whole: raise RLIMIT_MEMLOCK (ulimit -l, LimitMEMLOCK=) above the size of all \
                       arenas, have CAP_IPC_LOCK, or use less";
const ONE_THREAD: &str =
    "only the thread that made the ring may use it (IORING_SETUP_SINGLE_ISSUER): do this on that thread";
pub(super) const FORBIDDEN: &str = "allow io_uring: see /proc/sys/kernel/io_uring_disabled, the container's seccomp profile, and the ring's restrictions";

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

/// Adds the pieces of `memory` to `pieces`. Buffers may be neighbours, so each byte is looked up, not only the first.
fn cut(buffers: &[Option<Range<usize>>], memory: Range<usize>, pieces: &mut Vec<Piece>) -> Result<(), DeviceError> {
    let mut addr = memory.start;
    while addr < memory.end {
        let found = buffers.iter().position(|buffer| buffer.as_ref().is_some_and(|buffer| buffer.contains(&addr)));
        let Some((index, buffer)) = found.and_then(|index| Some((index as u16, buffers[index].as_ref()?))) else {
            return Err(DeviceError::NotHere { addr });
        };
        let len = memory.end.min(buffer.end) - addr;
        match pieces.last_mut() {
            Some(last) if last.index == index && last.addr + last.len == addr => last.len += len,
            _ => pieces.push(Piece { index, addr, len }),
        }
        addr += len;
    }
    Ok(())
}

impl Registration {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    /// The first of `n` neighbouring empty entries.
    fn room(&self, n: usize) -> Option<usize> {
        self.buffers.windows(n).position(|entries| entries.iter().all(Option::is_none))
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
                what: format!("the table of {} buffers has no {} entries left", table.buffers.len(), pieces.len()),
                next: "make it with more entries (FixedBuffers::with_entries), or use fewer, larger arenas",
            });
        };
        // SAFETY: the memory stays mapped, as the caller promises. The program that makes requests decides what they
        // write where.
        unsafe { table.set(first, &pieces) }?;
        table.buffers[first..].iter_mut().zip(pieces).for_each(|(buffer, piece)| *buffer = Some(piece));
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
            table.buffers[first..first + n].fill(None);
        }
    }

    fn is_one_piece(&self, first: DeviceAddr, last: DeviceAddr) -> bool {
        Self::index(first) == Self::index(last)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if !self.stamp.is_inherited() {
            // From now on the owners of the rings may register other buffers.
            self.table().rings.iter().for_each(|ring| _ = ring::drop_table(ring.as_fd()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{DeviceError, Errno, Piece, clone_refusal, cut};
    use proptest::prelude::*;

    /// Pieces of memory cut at the borders of these buffers.
    fn pieces(buffers: &[(usize, usize)], parts: &[(usize, usize)]) -> Result<Vec<(u16, usize, usize)>, DeviceError> {
        let buffers: Vec<_> = buffers.iter().map(|&(start, end)| (start < end).then_some(start..end)).collect();
        let mut pieces = Vec::new();
        parts.iter().try_for_each(|&(start, end)| cut(&buffers, start..end, &mut pieces))?;
        Ok(pieces.into_iter().map(|Piece { index, addr, len }| (index, addr, len)).collect())
    }

    #[test]
    fn memory_is_cut_where_a_buffer_ends_and_neighbours_are_merged() {
        // An empty entry, two buffers of one arena, and another arena right before them.
        let buffers = [(0, 0), (100, 200), (200, 250), (60, 100)];
        let of = |parts: &[(usize, usize)]| pieces(&buffers, parts).unwrap();
        assert_eq!(of(&[(110, 200)]), [(1, 110, 90)]);
        assert_eq!(of(&[(110, 201)]), [(1, 110, 90), (2, 200, 1)]);
        assert_eq!(of(&[(60, 250)]), [(3, 60, 40), (1, 100, 100), (2, 200, 50)]);
        assert_eq!(
            of(&[(110, 120), (120, 130), (140, 150), (190, 200), (200, 210)]),
            [(1, 110, 20), (1, 140, 10), (1, 190, 10), (2, 200, 10)]
        );
        assert_eq!(of(&[(0, 0), (200, 200)]), [], "no bytes, no request");
    }

    #[test]
    fn memory_outside_of_every_buffer_is_refused_with_its_address() {
        let refused = |parts: &[(usize, usize)]| pieces(&[(100, 200), (300, 400)], parts);
        for (start, end, addr) in [(0, 1, 0), (99, 101, 99), (150, 201, 200), (150, 350, 200), (300, 500, 400)] {
            assert_eq!(refused(&[(120, 130), (start, end)]), Err(DeviceError::NotHere { addr }));
        }
    }

    proptest! {
        #[test]
        fn pieces_have_all_bytes_in_order_and_each_lies_in_its_buffer(
            sizes in prop::collection::vec(1usize..50, 1..8), start in 0usize..100, len in 0usize..200,
        ) {
            let mut end = 1000;
            let buffers: Vec<_> = sizes.iter().map(|size| { end += size; (end - size, end) }).collect();
            let memory = (1000 + start, 1000 + start + len);
            let found = pieces(&buffers, &[memory]);
            prop_assert_eq!(found.is_ok(), len == 0 || memory.1 <= end);
            let mut next = memory.0;
            for (index, addr, len) in found.unwrap_or_default() {
                prop_assert_eq!(addr, next);
                let (start, end) = buffers[usize::from(index)];
                prop_assert!(start <= addr && addr + len <= end && len > 0);
                next += len;
            }
            prop_assert!(next == memory.0 || next == memory.1);
        }
    }

    #[test]
    fn ebusy_for_replacing_a_table_differs_from_ebusy_for_a_ring_with_buffers() {
        let says = |has_table, what| clone_refusal(Errno::EBUSY, has_table).to_string().contains(what);
        assert!(says(false, "unregister the other ring's buffers"));
        assert!(says(true, "6.13 to add arenas later"));
    }
}
