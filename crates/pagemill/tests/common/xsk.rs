//! An AF_XDP socket on a loopback interface that is the thread's own, and what arrives there.
use std::io::Error;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering::Acquire, Ordering::Release};

/// Places in each ring.
const PLACES: u32 = 8;

fn new_socket(family: i32, kind: i32, protocol: i32) -> std::io::Result<OwnedFd> {
    // SAFETY: a new descriptor, or -1.
    match unsafe { libc::socket(family, kind | libc::SOCK_CLOEXEC, protocol) } {
        -1 => Err(Error::last_os_error()),
        // SAFETY: nobody else has it.
        fd => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
    }
}

/// An AF_XDP socket, if the system gives one.
pub(crate) fn socket() -> Option<OwnedFd> {
    new_socket(libc::AF_XDP, libc::SOCK_RAW, 0).map_err(|why| println!("skipped: no AF_XDP socket here ({why})")).ok()
}

fn set<T>(socket: &OwnedFd, level: i32, option: i32, value: &T) {
    // SAFETY: a value of that size.
    let result = unsafe {
        libc::setsockopt(socket.as_raw_fd(), level, option, (&raw const *value).cast(), size_of::<T>() as u32)
    };
    assert_eq!(result, 0, "setsockopt {option}: {}", Error::last_os_error());
}

fn bind<T>(socket: &OwnedFd, address: &T) {
    // SAFETY: an address of that size.
    let result = unsafe { libc::bind(socket.as_raw_fd(), (&raw const *address).cast(), size_of::<T>() as u32) };
    assert_eq!(result, 0, "bind: {}", Error::last_os_error());
}

/// A ring of the socket's that both sides see.
struct Ring {
    start: *mut u8,
    offset: libc::xdp_ring_offset,
}
impl Ring {
    fn map(socket: &OwnedFd, offset: libc::xdp_ring_offset, entry: usize, at: u64) -> Self {
        let len = offset.desc as usize + PLACES as usize * entry;
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_POPULATE);
        // SAFETY: a new mapping.
        let start =
            unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, socket.as_raw_fd(), at as libc::off_t) };
        assert_ne!(start, libc::MAP_FAILED, "{}", Error::last_os_error());
        Self { start: start.cast(), offset }
    }
    fn word(&self, offset: u64) -> &AtomicU32 {
        // SAFETY: a word of the ring's head, which the kernel changes as an atomic.
        unsafe { AtomicU32::from_ptr(self.start.add(offset as usize).cast()) }
    }
    fn producer(&self) -> &AtomicU32 {
        self.word(self.offset.producer)
    }
    fn consumer(&self) -> &AtomicU32 {
        self.word(self.offset.consumer)
    }
}

pub(crate) struct Xsk {
    socket: OwnedFd,
    /// Sees what the interface receives.
    packets: OwnedFd,
    interface: u32,
    rings: Option<(Ring, Ring)>,
}

impl AsFd for Xsk {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Xsk {
    /// Leaves the network for an own one; so only on a thread that ends.
    pub(crate) fn new() -> Option<Self> {
        // SAFETY: of this thread alone.
        if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
            println!("skipped: no network of its own for a thread ({})", Error::last_os_error());
            return None;
        }
        let socket = socket()?;
        let all = (libc::ETH_P_ALL as u16).to_be();
        let packets = new_socket(libc::AF_PACKET, libc::SOCK_RAW, i32::from(all)).unwrap();
        // SAFETY: zero is valid for it, and a name that fits.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        request.ifr_name[..2].copy_from_slice(&[b'l', b'o'].map(|byte| byte as libc::c_char));
        request.ifr_ifru.ifru_flags = libc::IFF_UP as i16;
        // SAFETY: it reads what was filled.
        let result = unsafe { libc::ioctl(packets.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) };
        assert_eq!(result, 0, "lo: {}", Error::last_os_error());
        // SAFETY: a name that ends.
        let interface = unsafe { libc::if_nametoindex(c"lo".as_ptr()) };
        // SAFETY: zero is valid for it.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = all;
        address.sll_ifindex = interface as i32;
        bind(&packets, &address);
        // If nothing arrives the test is to fail, not to hang.
        set(
            &packets,
            libc::SOL_SOCKET,
            libc::SO_RCVTIMEO,
            &libc::timeval { tv_sec: super::PATIENCE.as_secs() as i64, tv_usec: 0 },
        );
        Some(Self { socket, packets, interface, rings: None })
    }

    /// Once it has a UMEM.
    pub(crate) fn bind(&mut self) {
        for ring in [libc::XDP_TX_RING, libc::XDP_UMEM_FILL_RING, libc::XDP_UMEM_COMPLETION_RING] {
            set(&self.socket, libc::SOL_XDP, ring, &PLACES);
        }
        // SAFETY: zero is valid for it.
        let mut offsets: libc::xdp_mmap_offsets = unsafe { std::mem::zeroed() };
        let mut size = size_of_val(&offsets) as u32;
        let (option, place) = (libc::XDP_MMAP_OFFSETS, (&raw mut offsets).cast());
        // SAFETY: room of that size.
        let result = unsafe { libc::getsockopt(self.socket.as_raw_fd(), libc::SOL_XDP, option, place, &raw mut size) };
        assert_eq!(result, 0, "{}", Error::last_os_error());
        let descriptor = size_of::<libc::xdp_desc>();
        let to_send = Ring::map(&self.socket, offsets.tx, descriptor, libc::XDP_PGOFF_TX_RING as u64);
        let done = Ring::map(&self.socket, offsets.cr, 8, libc::XDP_UMEM_PGOFF_COMPLETION_RING);
        let address = libc::sockaddr_xdp {
            sxdp_family: libc::AF_XDP as u16,
            sxdp_flags: libc::XDP_COPY,
            sxdp_ifindex: self.interface,
            sxdp_queue_id: 0,
            sxdp_shared_umem_fd: 0,
        };
        bind(&self.socket, &address);
        self.rings = Some((to_send, done));
    }

    /// Sends `len` bytes at an address of the UMEM, and returns the packet that arrived.
    pub(crate) fn send(&mut self, addr: u64, len: usize) -> Vec<u8> {
        let (to_send, done) = self.rings.as_ref().unwrap();
        let next = to_send.producer().load(Acquire);
        let descriptor = libc::xdp_desc { addr, len: len as u32, options: 0 };
        // SAFETY: a place of the ring that is ours until the producer's number is stored.
        unsafe {
            let places = to_send.start.add(to_send.offset.desc as usize).cast::<libc::xdp_desc>();
            places.add((next % PLACES) as usize).write(descriptor);
        }
        to_send.producer().store(next + 1, Release);
        let mut bytes = vec![0; 4096];
        // SAFETY: no bytes to send but those in the ring, and room for what arrives.
        let received = unsafe {
            let flags = libc::MSG_DONTWAIT;
            let sent = libc::sendto(self.socket.as_raw_fd(), std::ptr::null(), 0, flags, std::ptr::null(), 0);
            assert_eq!(sent, 0, "sendto: {}", Error::last_os_error());
            libc::recv(self.packets.as_raw_fd(), bytes.as_mut_ptr().cast(), bytes.len(), 0)
        };
        assert!(received >= 0, "no packet: {}", Error::last_os_error());
        bytes.truncate(received as usize);
        // It is sent, so the kernel is done with it; a completion for each.
        while done.producer().load(Acquire) <= done.consumer().load(Acquire) {
            std::thread::yield_now();
        }
        done.consumer().fetch_add(1, Release);
        bytes
    }
}
