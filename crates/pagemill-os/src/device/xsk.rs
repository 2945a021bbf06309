//! An AF_XDP socket's memory for packets, its UMEM (`linux/if_xdp.h`).
use crate::Errno;
use core::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Makes `memory` the place of the socket's packets, in chunks of `chunk` bytes, of which the first `headroom` are left free.
/// The kernel commits all of it and keeps it in place until the socket is closed; it cannot be unregistered before.
///
/// # Errors
/// The system's: `EBUSY` if the socket has memory, `EINVAL` for a chunk that is no power of two from 2048 to the page's size,
/// `ENOBUFS` above `RLIMIT_MEMLOCK`, `ENOPROTOOPT` or `EOPNOTSUPP` for another kind of socket.
///
/// # Safety
/// Until the socket is closed, the contents of `memory` may change: the interface writes received packets into the chunks that
/// the socket's fill ring names.
///
/// ```
/// # #[cfg(not(miri))] {
/// use std::os::fd::AsFd;
/// let other = std::fs::File::open("/dev/null").unwrap();
/// // SAFETY: refused.
/// assert!(unsafe { pagemill_os::device::xsk::register(other.as_fd(), 0x1000..0x2000, 2048, 0) }.is_err());
/// # }
/// ```
pub unsafe fn register(socket: BorrowedFd<'_>, memory: Range<usize>, chunk: u32, headroom: u32) -> Result<(), Errno> {
    let umem = libc::xdp_umem_reg {
        addr: memory.start as u64,
        len: memory.len() as u64,
        chunk_size: chunk,
        headroom,
        flags: 0,
        tx_metadata_len: 0,
    };
    let size = size_of::<libc::xdp_umem_reg>() as libc::socklen_t;
    // SAFETY: a structure of the size that is told; the memory is as the caller promises.
    let result = unsafe {
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_XDP, libc::XDP_UMEM_REG, (&raw const umem).cast(), size)
    };
    if result == 0 { Ok(()) } else { Err(Errno::last()) }
}
