//! AF_XDP: packets lie in the socket's UMEM, and a device address is an offset in it.
use super::{DeviceAddr, DeviceError, DeviceMap, Mapped, keep, refuse_inherited};
use crate::process::Stamp;
use core::ops::Range;
use core::sync::atomic::{AtomicBool, Ordering::Relaxed};
use pagemill_core::PAGE_SIZE;
use pagemill_os::Errno;
use pagemill_os::device::xsk;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Registers an allocator's only arena as the UMEM of an AF_XDP socket. A device address is the offset that the
/// socket's rings use.
///
/// A UMEM is one range of memory, so a second arena is refused. The kernel commits all of it, which counts towards
/// `RLIMIT_MEMLOCK`, and keeps it until the socket is closed. So nothing else can be mapped with the same socket
/// afterwards, and the memory of a closed allocator stays in the kernel as long as the socket is open.
///
/// ```
/// use pagemill::{Allocator, Device, Gfp, Umem};
/// use std::os::fd::{AsFd, FromRawFd, OwnedFd};
/// // SAFETY: the call returns a new descriptor or -1.
/// let socket = match unsafe { libc::socket(libc::AF_XDP, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) } {
///     -1 => return println!("no AF_XDP: {}", std::io::Error::last_os_error()),
///     // SAFETY: nothing else owns the new descriptor.
///     socket => unsafe { OwnedFd::from_raw_fd(socket) },
/// };
/// let allocator = Allocator::builder().pages(512).build().unwrap();
/// let device = match Device::new(&allocator, Umem::new(socket.as_fd(), 4096, 256).unwrap()) {
///     Ok(device) => device,
///     Err(why) => return println!("{why}"), // the message says what to do
/// };
/// // A page is one chunk for the fill ring.
/// let page = allocator.alloc_page(Gfp::KERNEL).unwrap();
/// let addr = device.address_of(page.addr()).unwrap();
/// assert_eq!(addr.get() % 4096, 0);
/// assert!(addr.get() < 512 * 4096);
/// ```
#[derive(Debug)]
pub struct Umem {
    socket: OwnedFd,
    chunk: u32,
    headroom: u32,
    /// Whether an arena is, or was, the socket's UMEM.
    is_used: AtomicBool,
    /// The process that made it.
    stamp: Stamp,
}

impl Umem {
    /// A map for this socket, with chunks of `chunk` bytes: a power of two from 2048 to a page. The first `headroom`
    /// bytes of each chunk stay free when a packet is received.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] for other sizes of chunk, or if the headroom leaves no room.
    pub fn new(socket: BorrowedFd<'_>, chunk: u32, headroom: u32) -> Result<Self, DeviceError> {
        if !chunk.is_power_of_two() || !(2048..=PAGE_SIZE as u32).contains(&chunk) || headroom >= chunk {
            return Err(DeviceError::Unavailable {
                what: format!("AF_XDP does not support chunks of {chunk} bytes with {headroom} bytes of headroom"),
                next: "use chunks of 2048 or 4096 bytes, and less headroom",
            });
        }
        let socket = keep(socket, "the socket cannot be kept open")?;
        Ok(Self { socket, chunk, headroom, is_used: AtomicBool::new(false), stamp: Stamp::here() })
    }
}

impl DeviceMap for Umem {
    unsafe fn map(&self, memory: Range<usize>) -> Result<Mapped, DeviceError> {
        refuse_inherited(self.stamp)?;
        if self.is_used.swap(true, Relaxed) {
            return Err(DeviceError::Unavailable {
                what: "an AF_XDP socket has one UMEM, and this socket's is another arena".to_owned(),
                next: "use an allocator with one arena, and a socket of its own for each",
            });
        }
        // SAFETY: the memory stays mapped, as the caller promises. The program that fills the rings decides what is
        // written where.
        unsafe { xsk::register(self.socket.as_fd(), memory, self.chunk, self.headroom) }.map_err(|errno| {
            self.is_used.store(false, Relaxed);
            refusal(errno)
        })?;
        Ok(Mapped::Linear(DeviceAddr::new(0)))
    }

    fn unmap(&self, _: Range<usize>, _: &Mapped) {
        // The kernel releases the UMEM when the socket is closed.
    }
}

fn refusal(errno: Errno) -> DeviceError {
    let next = match errno {
        Errno::ENOBUFS | Errno::ENOMEM => {
            "a UMEM is locked in memory whole: raise RLIMIT_MEMLOCK (ulimit -l, LimitMEMLOCK=) above its size, have \
             CAP_IPC_LOCK, or use a smaller arena"
        }
        Errno::EBUSY => "use a socket that has no UMEM yet",
        Errno::EPERM | Errno::EACCES => "have CAP_NET_RAW in the network namespace's user namespace",
        Errno::EINVAL => "use an arena with at least one chunk of anonymous memory or of a memfd",
        _ => {
            "use an AF_XDP socket (socket(AF_XDP, SOCK_RAW, 0)), which needs CAP_NET_RAW and a kernel with CONFIG_XDP_SOCKETS"
        }
    };
    DeviceError::System { what: "AF_XDP does not register an arena (XDP_UMEM_REG)", errno: errno.0, next }
}
