//! The buffers that an io_uring's requests choose from when they need one (`struct io_uring_buf_ring`, `linux/io_uring.h`).
//!
//! A group of buffers is a ring in memory. The process puts buffers in at the tail; the kernel takes them out at the head,
//! which only it knows. Positions count from 0 and wrap; the entry of a position is its remainder.
use super::ring::register;
use crate::{Errno, Mapping};
use core::ptr;
use core::sync::atomic::{
    AtomicBool, AtomicU16, AtomicU32, AtomicU64,
    Ordering::{Relaxed, Release},
};
use std::os::fd::BorrowedFd;

const REGISTER_PBUF_RING: u32 = 22;
const UNREGISTER_PBUF_RING: u32 = 23;
const REGISTER_PBUF_STATUS: u32 = 26;

/// The largest number of entries of a ring.
pub const ENTRIES_MAX: u16 = 1 << 15;

/// `struct io_uring_buf_reg`.
#[repr(C)]
#[derive(Default)]
struct Register {
    addr: u64,
    entries: u32,
    group: u16,
    flags: u16,
    reserved: [u64; 3],
}

/// `struct io_uring_buf_status`.
#[repr(C)]
#[derive(Default)]
struct Status {
    group: u32,
    head: u32,
    reserved: [u32; 8],
}

/// `struct io_uring_buf`. In the first entry the last field is the ring's tail.
#[repr(C)]
struct Entry {
    addr: AtomicU64,
    len: AtomicU32,
    id: AtomicU16,
    tail: AtomicU16,
}

/// The memory of a group's ring. At first no entry names memory.
#[derive(Debug)]
pub struct BufRing {
    memory: Mapping,
    entries: u16,
    /// Whether a group has or had it.
    is_used: AtomicBool,
}

impl BufRing {
    /// Makes the memory of a ring with this number of entries: a power of two, up to [`ENTRIES_MAX`].
    ///
    /// # Errors
    /// The system's, when it has no memory.
    ///
    /// # Panics
    /// For another number of entries.
    ///
    /// ```
    /// pagemill_os::device::buf_ring::BufRing::new(256).unwrap();
    /// ```
    pub fn new(entries: u16) -> Result<Self, Errno> {
        assert!(entries.is_power_of_two(), "a ring of {entries} entries");
        let memory = Mapping::reserve(usize::from(entries) * size_of::<Entry>(), 1)?;
        Ok(Self { memory, entries, is_used: AtomicBool::new(false) })
    }

    /// Makes it the ring of a group of an io_uring (Linux 5.19). The kernel keeps the memory for itself: this value may be
    /// dropped before the group ends. A value can be the ring of one group only: a second group would begin at position 0
    /// again, where the entries name buffers that were taken long ago.
    ///
    /// # Errors
    /// `EBUSY` if it was registered before. Otherwise the system's: `EEXIST` if the group has buffers, or if the io_uring belongs to another thread; `EINVAL` before Linux
    /// 5.19; `ENOMEM` above `RLIMIT_MEMLOCK`.
    ///
    /// ```
    /// # #[cfg(not(miri))] {
    /// use std::os::fd::AsFd;
    /// let other = std::fs::File::open("/dev/null").unwrap();
    /// let ring = pagemill_os::device::buf_ring::BufRing::new(8).unwrap();
    /// assert!(ring.register(other.as_fd(), 0).is_err());
    /// # }
    /// ```
    pub fn register(&self, ring: BorrowedFd<'_>, group: u16) -> Result<(), Errno> {
        if self.is_used.swap(true, Relaxed) {
            return Err(Errno::EBUSY);
        }
        let (addr, entries) = (self.memory.addr() as u64, u32::from(self.entries));
        let argument = Register { addr, entries, group, ..Register::default() };
        // SAFETY: one structure. The kernel reads the ring's memory, which is mapped, and writes none of it.
        let registered = unsafe { register(ring, REGISTER_PBUF_RING, &raw const argument, 1) };
        registered.map(|_| ()).inspect_err(|_| self.is_used.store(false, Relaxed))
    }

    /// Puts a buffer at a position. The kernel does not see it before its position is [published](Self::publish).
    ///
    /// # Safety
    /// From then on until the kernel has taken the buffer and the request that it was for has ended, or until the entry was
    /// [cleared](Self::clear) and the kernel has not taken it, the memory may change as the ring's requests dictate.
    ///
    /// ```
    /// let ring = pagemill_os::device::buf_ring::BufRing::new(8).unwrap();
    /// // SAFETY: no io_uring has this ring.
    /// unsafe { ring.set(9, 0x1000, 4096, 1) };
    /// ```
    pub unsafe fn set(&self, position: u16, addr: usize, len: u32, id: u16) {
        let entry = self.entry(position);
        entry.addr.store(addr as u64, Relaxed);
        entry.len.store(len, Relaxed);
        entry.id.store(id, Relaxed);
    }

    /// Offers the kernel all buffers before the position `tail`.
    ///
    /// # Safety
    /// The entry of each position below `tail` that the kernel has not taken was set for that position, after the buffer that
    /// the entry had before was taken, or it was [cleared](Self::clear).
    ///
    /// ```
    /// let ring = pagemill_os::device::buf_ring::BufRing::new(8).unwrap();
    /// // SAFETY: no position is below 0, and no io_uring has this ring.
    /// unsafe { ring.publish(0) };
    /// ```
    pub unsafe fn publish(&self, tail: u16) {
        // Release: pairs with the kernel's acquiring load of the tail, behind which it reads the entries.
        self.entry(0).tail.store(tail, Release);
    }

    /// Makes all entries name no memory. A buffer that the kernel takes afterwards has no bytes. The [`head`] that is read
    /// after this says which buffers it had taken before: it takes them under the lock under which it reads the head.
    ///
    /// ```
    /// pagemill_os::device::buf_ring::BufRing::new(8).unwrap().clear();
    /// ```
    pub fn clear(&self) {
        for position in 0..self.entries {
            let entry = self.entry(position);
            entry.len.store(0, Relaxed);
            entry.addr.store(0, Relaxed);
        }
    }

    fn entry(&self, position: u16) -> &Entry {
        let at = usize::from(position & (self.entries - 1));
        // SAFETY: the mapping has that many entries, zeroed at first, and lives as long as `self`. All accesses are atomic.
        unsafe { &*self.memory.as_ptr::<Entry>().add(at) }
    }
}

/// Ends a group: no later request gets a buffer of it.
///
/// # Errors
/// The system's: `ENOENT` or `EINVAL` if there is no such group, `EEXIST` if the io_uring belongs to another thread.
///
/// ```
/// # #[cfg(not(miri))] {
/// use std::os::fd::AsFd;
/// let other = std::fs::File::open("/dev/null").unwrap();
/// assert!(pagemill_os::device::buf_ring::unregister(other.as_fd(), 0).is_err());
/// # }
/// ```
pub fn unregister(ring: BorrowedFd<'_>, group: u16) -> Result<(), Errno> {
    let argument = Register { group, ..Register::default() };
    // SAFETY: one structure, which names no memory.
    unsafe { register(ring, UNREGISTER_PBUF_RING, &raw const argument, 1) }.map(|_| ())
}

/// The position of the next buffer that the kernel takes (Linux 6.8).
///
/// # Errors
/// As [`unregister`]; `EINVAL` also before Linux 6.8.
///
/// ```
/// # #[cfg(not(miri))] {
/// use std::os::fd::AsFd;
/// let other = std::fs::File::open("/dev/null").unwrap();
/// assert!(pagemill_os::device::buf_ring::head(other.as_fd(), 0).is_err());
/// # }
/// ```
pub fn head(ring: BorrowedFd<'_>, group: u16) -> Result<u16, Errno> {
    let mut status = Status { group: group.into(), ..Status::default() };
    // SAFETY: one structure, which the system reads and writes, and which names no memory.
    unsafe { register(ring, REGISTER_PBUF_STATUS, ptr::from_mut(&mut status).cast_const(), 1) }?;
    Ok(status.head as u16)
}
