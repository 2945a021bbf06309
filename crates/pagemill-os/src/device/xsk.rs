//! An AF_XDP socket's memory for packets, its UMEM (`linux/if_xdp.h`).
use crate::Errno;
use core::ops::Range;
use rustix::net::sockopt::set_xdp_umem_reg;
use rustix::net::xdp::{XdpUmemReg, XdpUmemRegFlags};
use std::os::fd::BorrowedFd;

/// Registers `memory` as the socket's packet memory, in chunks of `chunk` bytes, of which the first `headroom` stay free. The
/// kernel commits all of it and keeps it in place until the socket is closed; it cannot be unregistered before.
///
/// # Errors
/// The system's: `EBUSY` if the socket has memory already, `EINVAL` for a chunk size that is no power of two from 2048 to the
/// page size, `ENOBUFS` above `RLIMIT_MEMLOCK`, `ENOPROTOOPT` or `EOPNOTSUPP` for another kind of socket.
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
    let umem = XdpUmemReg {
        addr: memory.start as u64,
        len: memory.len() as u64,
        chunk_size: chunk,
        headroom,
        flags: XdpUmemRegFlags::empty(),
        tx_metadata_len: 0,
    };
    // rustix calls this safe. It is not: the caller promises that the memory may change.
    set_xdp_umem_reg(socket, umem).map_err(Errno::of)
}
