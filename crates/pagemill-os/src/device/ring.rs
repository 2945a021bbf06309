//! An io_uring's table of fixed buffers (`io_uring_register`, `linux/io_uring.h`).
use crate::Errno;
use core::ops::Range;
use core::ptr;
use std::os::fd::{AsRawFd, BorrowedFd};

const UNREGISTER_BUFFERS: u32 = 1;
const REGISTER_BUFFERS2: u32 = 15;
const REGISTER_BUFFERS_UPDATE: u32 = 16;
const REGISTER_CLONE_BUFFERS: u32 = 30;
const IS_SPARSE: u32 = 1;
const REPLACE: u32 = 2;

/// The largest size of a buffer in bytes: the kernel refuses larger ones.
pub const BUFFER_MAX: usize = 1 << 30;
/// The largest number of entries in a table.
pub const ENTRIES_MAX: usize = 1 << 14;

/// `struct io_uring_rsrc_register`.
#[repr(C)]
struct Register {
    nr: u32,
    flags: u32,
    reserved: u64,
    data: u64,
    tags: u64,
}

/// `struct io_uring_rsrc_update2`.
#[repr(C)]
struct Update {
    offset: u32,
    reserved: u32,
    data: u64,
    tags: u64,
    nr: u32,
    reserved2: u32,
}

/// `struct io_uring_clone_buffers`.
#[repr(C)]
struct Clone {
    source: u32,
    flags: u32,
    source_first: u32,
    first: u32,
    nr: u32,
    padding: [u32; 3],
}

/// # Safety
/// `argument` points to the argument of the operation `what`, and the ring may pin and write the memory that the argument
/// points to.
pub(super) unsafe fn register<T>(
    ring: BorrowedFd<'_>,
    what: u32,
    argument: *const T,
    n: usize,
) -> Result<usize, Errno> {
    // SAFETY: as the caller promises.
    match unsafe { libc::syscall(libc::SYS_io_uring_register, ring.as_raw_fd(), what, argument, n) } {
        done @ 0.. => Ok(done as usize),
        _ => Err(Errno::last()),
    }
}

/// Gives a ring a table of buffers with `n` entries, all empty (Linux 5.19).
///
/// # Errors
/// The system's: `EBUSY` if it has a table, `EINVAL` before Linux 5.19 or for more than [`ENTRIES_MAX`], `EOPNOTSUPP` for a
/// file that is no ring.
///
/// ```
/// # #[cfg(not(miri))] {
/// use std::os::fd::AsFd;
/// let other = std::fs::File::open("/dev/null").unwrap();
/// assert!(pagemill_os::device::ring::make_table(other.as_fd(), 8).is_err());
/// # }
/// ```
pub fn make_table(ring: BorrowedFd<'_>, n: usize) -> Result<(), Errno> {
    let table = Register { nr: n as u32, flags: IS_SPARSE, reserved: 0, data: 0, tags: 0 };
    // SAFETY: a structure of the given size, which names no memory.
    unsafe { register(ring, REGISTER_BUFFERS2, &raw const table, size_of::<Register>()) }.map(|_| ())
}

/// Removes a ring's table.
///
/// # Errors
/// The system's: `ENXIO` if it has none.
///
/// ```
/// # #[cfg(not(miri))] {
/// use std::os::fd::AsFd;
/// let other = std::fs::File::open("/dev/null").unwrap();
/// assert!(pagemill_os::device::ring::drop_table(other.as_fd()).is_err());
/// # }
/// ```
pub fn drop_table(ring: BorrowedFd<'_>) -> Result<(), Errno> {
    // SAFETY: the operation has no argument.
    unsafe { register(ring, UNREGISTER_BUFFERS, ptr::null::<u8>(), 0) }.map(|_| ())
}

/// Sets the entries of a ring's table of buffers from `first` on, one for each piece of memory. An empty piece empties its
/// entry. The kernel commits the memory and keeps it in place. Either all entries are set or none.
///
/// # Errors
/// The system's: `ENOMEM` above `RLIMIT_MEMLOCK`, `EFAULT` for memory that is not mapped or a piece above [`BUFFER_MAX`],
/// `EINVAL` for entries that the table does not have.
///
/// # Safety
/// The contents of `pieces` may change as the ring's requests dictate, for as long as they are in the table.
///
/// ```
/// # #[cfg(not(miri))] {
/// use std::os::fd::AsFd;
/// let other = std::fs::File::open("/dev/null").unwrap();
/// // SAFETY: refused.
/// assert!(unsafe { pagemill_os::device::ring::set(other.as_fd(), 0, &[0..0]) }.is_err());
/// # }
/// ```
pub unsafe fn set(ring: BorrowedFd<'_>, first: usize, pieces: &[Range<usize>]) -> Result<(), Errno> {
    let vector = |piece: &Range<usize>| libc::iovec {
        iov_base: if piece.is_empty() { ptr::null_mut() } else { ptr::with_exposed_provenance_mut(piece.start) },
        iov_len: piece.len(),
    };
    let vectors: Vec<libc::iovec> = pieces.iter().map(vector).collect();
    let update = |n: usize| Update {
        offset: first as u32,
        reserved: 0,
        data: vectors.as_ptr().expose_provenance() as u64,
        tags: 0,
        nr: n as u32,
        reserved2: 0,
    };
    let whole = update(vectors.len());
    // SAFETY: a structure of the given size, with as many vectors as it says, and memory as the caller promises.
    let done = unsafe { register(ring, REGISTER_BUFFERS_UPDATE, &raw const whole, size_of::<Update>()) }?;
    if done == vectors.len() {
        return Ok(());
    }
    // The kernel reports the error of a refused entry only if it is the first one.
    let again = Update {
        offset: (first + done) as u32,
        data: whole.data + (done * size_of::<libc::iovec>()) as u64,
        ..update(1)
    };
    // SAFETY: as above.
    let why = unsafe { register(ring, REGISTER_BUFFERS_UPDATE, &raw const again, size_of::<Update>()) };
    // SAFETY: empty pieces name no memory.
    unsafe { set(ring, first, &vec![0..0; done + 1])? };
    Err(why.err().unwrap_or(Errno::EAGAIN))
}

/// Gives the ring `to` the whole table of `from`, replacing its own if it has one: the same buffers, pinned once.
///
/// # Errors
/// The system's: `EINVAL` before Linux 6.12, before 6.13 if there is a table to replace, or if the rings belong to different
/// processes or users.
///
/// ```
/// # #[cfg(not(miri))] {
/// use std::os::fd::AsFd;
/// let other = std::fs::File::open("/dev/null").unwrap();
/// assert!(pagemill_os::device::ring::clone_table(other.as_fd(), other.as_fd(), false).is_err());
/// # }
/// ```
pub fn clone_table(from: BorrowedFd<'_>, to: BorrowedFd<'_>, has_table: bool) -> Result<(), Errno> {
    let flags = if has_table { REPLACE } else { 0 };
    let clone = Clone { source: from.as_raw_fd() as u32, flags, source_first: 0, first: 0, nr: 0, padding: [0; 3] };
    // SAFETY: the structure that the operation takes; the memory is that of the other table.
    unsafe { register(to, REGISTER_CLONE_BUFFERS, &raw const clone, 1) }.map(|_| ())
}

#[cfg(all(test, not(any(loom, miri))))]
mod tests {
    use super::*;
    use std::os::fd::{AsFd, FromRawFd, OwnedFd};

    fn ring() -> Option<OwnedFd> {
        let mut params = [0_u32; 30];
        // SAFETY: `struct io_uring_params` has 120 bytes, which the system reads and writes.
        let fd = unsafe { libc::syscall(libc::SYS_io_uring_setup, 4, params.as_mut_ptr()) };
        if fd < 0 {
            println!("skipped: io_uring: {}", std::io::Error::last_os_error());
            return None;
        }
        // SAFETY: it was opened above, and nothing else owns it.
        Some(unsafe { OwnedFd::from_raw_fd(fd as i32) })
    }

    #[test]
    fn a_refused_second_piece_reports_its_error_and_sets_no_entry() {
        let Some(ring) = ring() else { return };
        make_table(ring.as_fd(), 3).unwrap();
        let memory = crate::Mapping::reserve(1 << 21, 1 << 21).unwrap();
        let good = memory.addr()..memory.addr() + 4096;
        // Above all addresses of a process. Read from one byte too far on, its vector would name the good piece.
        let bad = good.start << 8..(good.start << 8) + 4096;
        // SAFETY: nobody uses the memory, and the ring has no request.
        let set = |first, pieces: &[Range<usize>]| unsafe { set(ring.as_fd(), first, pieces) };
        assert_eq!(set(0, &[good.clone(), bad.clone()]), Err(Errno::EFAULT));
        assert_eq!(set(1, &[good.clone(), bad]), Err(Errno::EFAULT));
        assert_eq!(set(1, &[good.clone(), good]), Ok(()));
        drop_table(ring.as_fd()).unwrap();
    }
}
