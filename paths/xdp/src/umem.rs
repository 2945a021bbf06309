//! The arena as UMEM, and the sockets that share it.
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use pagemill::{Allocator, Device, DeviceError, Memory, PAGE_SIZE};
use rustix::io::Errno;
use rustix::net::xdp::{
    SocketAddrXdp, SocketAddrXdpFlags, SocketAddrXdpWithSharedUmem, XDP_PGOFF_RX_RING, XDP_PGOFF_TX_RING,
    XDP_UMEM_PGOFF_COMPLETION_RING, XDP_UMEM_PGOFF_FILL_RING, XdpOptionsFlags, XdpStatistics,
};
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, bind, send, socket_with, sockopt};

use crate::Error;
use crate::error::PERMISSION;
use crate::interface::Interface;
use crate::port::Rings;
use crate::ring::{Give, Take};

/// How long a queue is tried that another socket held a moment ago.
const PATIENCE: Duration = Duration::from_secs(5);

/// An allocator whose only arena the kernel knows as the UMEM of all sockets.
pub(crate) struct Umem {
    allocator: Allocator,
    base: usize,
    frames: usize,
    /// With a descriptor of the first socket.
    device: Option<(Device, OwnedFd)>,
    /// Sockets that are open.
    open: usize,
    /// Whether one of those that are closed was of zero copy.
    is_zero_copy: bool,
}

/// The proof that the kernel uses the UMEM no more.
pub(crate) struct Closed(());

/// An AF_XDP socket that is bound to a queue.
pub(crate) struct Socket {
    fd: OwnedFd,
}

/// The sizes of rings, and how packets come.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// Slots of each ring: a power of two.
    pub(crate) ring: u32,
    /// Whether packets come by the generic hook, and are copied.
    pub(crate) is_generic: bool,
}

impl Umem {
    /// An allocator of `pages` pages.
    ///
    /// # Errors
    /// If there is not so much memory.
    pub(crate) fn new(pages: usize) -> Result<Self, Error> {
        let allocator = Allocator::builder().memory(Memory::anonymous(pages)).build();
        let allocator = allocator.map_err(|why| Error::Exhausted(why.into()))?;
        let arenas = allocator.arenas();
        let [arena] = &arenas[..] else { return Err(Error::Fault(format!("{} arenas, not one", arenas.len()))) };
        let (base, frames) = (arena.range.start, arena.range.len() / PAGE_SIZE);
        Ok(Self { allocator, base, frames, device: None, open: 0, is_zero_copy: false })
    }

    /// The allocator.
    pub(crate) fn allocator(&self) -> &Allocator {
        &self.allocator
    }
    /// The address of its first byte.
    pub(crate) fn base(&self) -> usize {
        self.base
    }
    /// Its size in pages.
    pub(crate) fn frames(&self) -> usize {
        self.frames
    }

    /// Opens a socket for a queue. A queue that was in use a moment ago is tried again for some seconds, and `notice` says so.
    pub(crate) fn open(
        &mut self,
        interface: &Interface,
        queue: u32,
        shape: Shape,
        notice: &mut dyn FnMut(&str),
    ) -> Result<(Socket, Rings), Error> {
        let fd = socket_with(AddressFamily::XDP, SocketType::RAW, SocketFlags::CLOEXEC, None).map_err(no_socket)?;
        if self.device.is_none() {
            let map = pagemill::Umem::new(fd.as_fd(), PAGE_SIZE as u32, 0)?;
            let copy = fd.try_clone().map_err(|error| Error::io("a descriptor cannot be copied", error))?;
            let device = Device::new(&self.allocator, map).map_err(|error| self.unregistered(error))?;
            self.device = Some((device, copy));
        }
        let rings = rings(fd.as_fd(), shape.ring)?;
        let first = self.device.as_ref().filter(|_| self.open > 0).map(|(_, first)| first.as_fd());
        bind_to(&fd, first, interface, queue, shape, notice)?;
        self.open += 1;
        Ok((Socket { fd }, rings))
    }

    fn unregistered(&self, error: DeviceError) -> Error {
        match error {
            DeviceError::System { errno: libc::ENOBUFS | libc::ENOMEM, .. } => Error::Unavailable {
                what: format!("the kernel does not lock {} MiB for packets", (self.frames * PAGE_SIZE) >> 20),
                next: "give less with --memory or --ring, raise the limit (ulimit -l), or have CAP_IPC_LOCK",
            },
            error => error.into(),
        }
    }

    /// Closes sockets. A mapped ring holds its socket, so the rings go first. `None` if the kernel may still use the UMEM: other
    /// sockets are open, or the driver wrote to the pages itself (zero copy), which it may do until some time after the end.
    pub(crate) fn close(&mut self, sockets: Vec<(Socket, Rings)>) -> Option<Closed> {
        for (socket, rings) in sockets {
            self.is_zero_copy |= socket.is_zero_copy();
            drop(rings);
            drop(socket);
            self.open -= 1;
        }
        if self.open > 0 {
            return None;
        }
        self.device = None;
        (!self.is_zero_copy).then_some(Closed(()))
    }
}

fn rings(fd: BorrowedFd<'_>, slots: u32) -> Result<Rings, Error> {
    let failed = |errno| Error::io(format!("rings of {slots} slots"), errno);
    sockopt::set_xdp_umem_fill_ring_size(fd, slots).map_err(failed)?;
    sockopt::set_xdp_umem_completion_ring_size(fd, slots).map_err(failed)?;
    sockopt::set_xdp_rx_ring_size(fd, slots).map_err(failed)?;
    sockopt::set_xdp_tx_ring_size(fd, slots).map_err(failed)?;
    let at = sockopt::xdp_mmap_offsets(fd).map_err(failed)?;
    Ok(Rings {
        fill: Give::map(fd, XDP_UMEM_PGOFF_FILL_RING, at.fr, slots)?,
        completion: Take::map(fd, XDP_UMEM_PGOFF_COMPLETION_RING, at.cr, slots)?,
        rx: Take::map(fd, XDP_PGOFF_RX_RING, at.rx, slots)?,
        tx: Give::map(fd, XDP_PGOFF_TX_RING, at.tx, slots)?,
    })
}

fn bind_to(
    fd: &OwnedFd,
    first: Option<BorrowedFd<'_>>,
    interface: &Interface,
    queue: u32,
    shape: Shape,
    notice: &mut dyn FnMut(&str),
) -> Result<(), Error> {
    let (index, since) = (interface.index, Instant::now());
    // Those that share a UMEM get how packets come from its first socket.
    let mut flags = SocketAddrXdpFlags::XDP_USE_NEED_WAKEUP;
    if shape.is_generic {
        flags |= SocketAddrXdpFlags::XDP_COPY;
    }
    let mut is_said = false;
    loop {
        let bound = match first {
            None => bind(fd, &SocketAddrXdp::new(flags, index, queue)),
            Some(first) => {
                let addr = SocketAddrXdp::new(SocketAddrXdpFlags::XDP_SHARED_UMEM, index, queue);
                bind(fd, &SocketAddrXdpWithSharedUmem { addr, shared_umem_fd: first })
            }
        };
        let name = &interface.name;
        match bound {
            Ok(()) => return Ok(()),
            Err(Errno::BUSY) if since.elapsed() < PATIENCE => {
                if !is_said {
                    notice(&format!("queue {queue} of {name} is in use, or was a moment ago: trying again"));
                    is_said = true;
                }
                std::thread::sleep(Duration::from_millis(50));
            }
            Err(errno) => return Err(refusal(name, queue, errno)),
        }
    }
}

fn refusal(name: &str, queue: u32, errno: Errno) -> Error {
    let unavailable = |what, next| Error::Unavailable { what, next };
    match errno {
        Errno::BUSY => unavailable(
            format!("queue {queue} of {name} is another socket's"),
            "end the program that has it (`ss -f xdp` lists them), or choose other queues with --queues",
        ),
        Errno::NETDOWN => unavailable(format!("{name} is down"), "ip link set DEV up"),
        Errno::INVAL => unavailable(
            format!("the kernel binds no socket to queue {queue} of {name}"),
            "see that there is such a queue (ethtool -l DEV), or choose others with --queues",
        ),
        Errno::OPNOTSUPP => unavailable(
            format!("{name} does not do what the other sockets do: zero copy, or a shared UMEM"),
            "use --mode generic; several queues or interfaces need Linux 5.10",
        ),
        errno => Error::io(format!("no socket for queue {queue} of {name}"), errno),
    }
}

fn no_socket(errno: Errno) -> Error {
    let what = || "a socket of AF_XDP cannot be made".to_owned();
    match errno {
        Errno::PERM | Errno::ACCESS => Error::Unavailable { what: what() + ": no permission", next: PERMISSION },
        Errno::AFNOSUPPORT => {
            Error::Unavailable { what: what() + ": this kernel has none", next: "use a kernel with CONFIG_XDP_SOCKETS" }
        }
        errno => Error::io(what(), errno),
    }
}

impl Socket {
    /// Has the kernel send what is in the send ring, a part of it at a time. Returns whether it can: not while the interface is
    /// down.
    pub(crate) fn wake_sender(&self) -> Result<bool, Error> {
        match send(&self.fd, &[], SendFlags::DONTWAIT) {
            // Busy, again: it sends a few at a time. No buffers: a queue below is full; both end by themselves.
            Ok(_) | Err(Errno::AGAIN | Errno::BUSY | Errno::NOBUFS | Errno::INTR) => Ok(true),
            Err(Errno::NETDOWN | Errno::NXIO) => Ok(false),
            Err(errno) => Err(Error::io("the kernel does not send", errno)),
        }
    }

    /// Has the kernel look at the fill ring.
    pub(crate) fn wake_receiver(&self) {
        let mut nothing = [0; 1];
        // What it says of the interface is said when the interface is looked at.
        let _ = rustix::net::recv(&self.fd, &mut nothing, rustix::net::RecvFlags::DONTWAIT);
    }

    /// What the kernel counted.
    pub(crate) fn statistics(&self) -> Result<XdpStatistics, Error> {
        sockopt::xdp_statistics(&self.fd).map_err(|errno| Error::io("a socket's figures", errno))
    }

    /// Whether the driver writes to the pages itself.
    pub(crate) fn is_zero_copy(&self) -> bool {
        sockopt::xdp_options(&self.fd).is_ok_and(|options| options.contains(XdpOptionsFlags::XDP_OPTIONS_ZEROCOPY))
    }

    pub(crate) fn raw(&self) -> i32 {
        self.fd.as_raw_fd()
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use rustix::thread::{UnshareFlags, unshare_unsafe};

    use super::*;

    const SHAPE: Shape = Shape { ring: 64, is_generic: true };

    /// A mapped ring alone would keep the socket, and with it the queue.
    #[test]
    fn a_closed_queue_can_be_opened_again() {
        std::thread::spawn(|| {
            // SAFETY: only this thread's network namespace changes; no descriptors are shared differently.
            if let Err(errno) = unsafe { unshare_unsafe(UnshareFlags::NEWNET) } {
                return println!("skipped: no network namespace: {errno}; it takes root");
            }
            for words in ["link add veth0 type veth peer name veth1", "link set veth0 up"] {
                assert!(Command::new("ip").args(words.split(' ')).status().unwrap().success(), "{words}");
            }
            let interface = Interface::find("veth0").unwrap();
            let mut umem = Umem::new(256).unwrap();
            let (socket, rings) = umem.open(&interface, 0, SHAPE, &mut |_| {}).unwrap();
            assert!(umem.close(Vec::new()).is_none(), "a socket is open");
            assert!(umem.close(vec![(socket, rings)]).is_some());
            // Within the time that a queue is tried again.
            let mut other = Umem::new(256).unwrap();
            let opened = other.open(&interface, 0, SHAPE, &mut |_| {}).unwrap();
            assert!(other.close(vec![opened]).is_some());
        })
        .join()
        .unwrap();
    }
}
