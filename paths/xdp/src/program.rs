//! The program that the kernel runs for each packet: it hands packets to the sockets (`bpf(2)`, `linux/bpf.h`).
//!
//! It is five instructions, written here as numbers, so no compiler is needed. The kernel keeps it attached as long as the
//! descriptor of its link is open: whatever ends this process detaches it.
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::Error;
use crate::error::PERMISSION;
use crate::interface::Interface;
use crate::umem::Socket;

// Commands.
const MAP_CREATE: u32 = 0;
const MAP_UPDATE: u32 = 2;
const PROG_LOAD: u32 = 5;
const TEST_RUN: u32 = 10;
const LINK_CREATE: u32 = 28;

/// The kinds of map and program, and of attachment.
const XSKMAP: u32 = 17;
const XDP: u32 = 6;
const AT_XDP: u32 = 37;
/// Where a program is attached: `XDP_FLAGS_SKB_MODE`, `XDP_FLAGS_DRV_MODE`.
const GENERIC: u32 = 1 << 1;
const NATIVE: u32 = 1 << 2;
/// What a program returns: `XDP_PASS`.
const PASS: i32 = 2;
/// `BPF_F_TEST_XDP_LIVE_FRAMES`.
const LIVE_FRAMES: u32 = 1 << 1;

/// An instruction: operation, registers, offset, number (`struct bpf_insn`).
const fn instruction(operation: u8, to: u8, from: u8, offset: i16, number: i32) -> u64 {
    operation as u64 | ((from << 4 | to) as u64) << 8 | (offset as u16 as u64) << 16 | (number as u32 as u64) << 32
}

/// `r3 = 2; r2 = the queue's number; r1 = the map; return redirect_map(r1, r2, r3)`: to the queue's socket, or on to the
/// kernel if there is none.
fn to_sockets(map: i32) -> [u64; 6] {
    [
        instruction(0xb7, 3, 0, 0, PASS),
        instruction(0x61, 2, 1, 16, 0),  // the field rx_queue_index of struct xdp_md
        instruction(0x18, 1, 1, 0, map), // an address, in two words: the map with this descriptor
        0,
        instruction(0x85, 0, 0, 0, 51), // bpf_redirect_map
        instruction(0x95, 0, 0, 0, 0),
    ]
}

/// `return redirect(interface, 0)`: out of an interface.
fn to_interface(index: u32) -> [u64; 4] {
    [
        instruction(0xb7, 1, 0, 0, index as i32),
        instruction(0xb7, 2, 0, 0, 0),
        instruction(0x85, 0, 0, 0, 23), // bpf_redirect
        instruction(0x95, 0, 0, 0, 0),
    ]
}

/// The parts of `union bpf_attr`, for one command each.
#[repr(C)]
#[derive(Default)]
struct MapCreate {
    map_type: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
}
#[repr(C)]
#[derive(Default)]
struct MapUpdate {
    map_fd: u32,
    _pad: u32,
    key: u64,
    value: u64,
    flags: u64,
}
#[repr(C)]
#[derive(Default)]
struct ProgLoad {
    prog_type: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buf: u64,
    kern_version: u32,
    prog_flags: u32,
    prog_name: [u8; 16],
    prog_ifindex: u32,
    expected_attach_type: u32,
}
#[repr(C)]
#[derive(Default)]
struct LinkCreate {
    prog_fd: u32,
    target_ifindex: u32,
    attach_type: u32,
    flags: u32,
}
#[repr(C)]
#[derive(Default)]
struct TestRun {
    prog_fd: u32,
    retval: u32,
    data_size_in: u32,
    data_size_out: u32,
    data_in: u64,
    data_out: u64,
    repeat: u32,
    duration: u32,
    ctx_size_in: u32,
    ctx_size_out: u32,
    ctx_in: u64,
    ctx_out: u64,
    flags: u32,
    cpu: u32,
    batch_size: u32,
    _pad: u32,
}

/// Calls the kernel. Returns what it returns: a descriptor, for commands that make one.
///
/// # Safety
/// `attr` is the command's part of `union bpf_attr`, and what it points at is there, and as long as it says.
unsafe fn bpf<T>(command: u32, attr: &mut T) -> io::Result<i32> {
    // SAFETY: as the caller promises.
    let done = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attr), size_of::<T>()) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(done as i32) }
}

fn owned(fd: i32) -> OwnedFd {
    // SAFETY: the kernel made it for this call.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

fn load(instructions: &[u64], name: &[u8]) -> io::Result<OwnedFd> {
    let mut prog_name = [0; 16];
    prog_name[..name.len()].copy_from_slice(name);
    let mut attr = ProgLoad {
        prog_type: XDP,
        insn_cnt: instructions.len() as u32,
        insns: instructions.as_ptr() as u64,
        license: c"MIT".as_ptr() as u64,
        prog_name,
        expected_attach_type: AT_XDP,
        ..ProgLoad::default()
    };
    // SAFETY: the instructions and the text are there.
    unsafe { bpf(PROG_LOAD, &mut attr) }.map(owned)
}

/// The program on one interface, and its map of sockets.
pub(crate) struct Attached {
    map: OwnedFd,
    _link: OwnedFd,
    /// Whether it is at the generic hook, after the driver.
    pub(crate) is_generic: bool,
}

/// Where a program is attached.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Mode {
    /// In the driver, else after it
    Auto,
    /// In the driver
    Native,
    /// After the driver: any interface, and slower
    Generic,
}

impl Attached {
    /// Attaches the program. Packets go on to the kernel until there is a socket for their queue.
    pub(crate) fn new(interface: &Interface, mode: Mode, notice: &mut dyn FnMut(&str)) -> Result<Self, Error> {
        let name = &interface.name;
        let mut attr = MapCreate { map_type: XSKMAP, key_size: 4, value_size: 4, max_entries: interface.receives };
        // SAFETY: it points at nothing.
        let map = unsafe { bpf(MAP_CREATE, &mut attr) }.map(owned).map_err(|error| refusal("its map", error))?;
        let program =
            load(&to_sockets(map.as_raw_fd()), b"pagemill_xdp").map_err(|error| refusal("the program", error))?;
        let attach = |flags| {
            let mut attr = LinkCreate {
                prog_fd: program.as_raw_fd() as u32,
                target_ifindex: interface.index,
                attach_type: AT_XDP,
                flags,
            };
            // SAFETY: it points at nothing.
            unsafe { bpf(LINK_CREATE, &mut attr) }.map(owned)
        };
        let attached = match mode {
            Mode::Generic => attach(GENERIC).map(|link| (link, true)),
            Mode::Native => attach(NATIVE).map(|link| (link, false)),
            Mode::Auto => match attach(NATIVE) {
                Ok(link) => Ok((link, false)),
                Err(error) if is_not_native(&error) => {
                    let why = pagemill_command::said(&error);
                    notice(&format!("{name} takes no program in its driver ({why}): packets come by the generic hook"));
                    attach(GENERIC).map(|link| (link, true))
                }
                Err(error) => Err(error),
            },
        };
        let (link, is_generic) = attached.map_err(|error| unattached(interface, error))?;
        Ok(Self { map, _link: link, is_generic })
    }

    /// Has a queue's packets go to a socket.
    pub(crate) fn give(&self, queue: u32, socket: &Socket) -> Result<(), Error> {
        let socket = socket.raw();
        let mut attr = MapUpdate {
            map_fd: self.map.as_raw_fd() as u32,
            key: (&raw const queue) as u64,
            value: (&raw const socket) as u64,
            ..MapUpdate::default()
        };
        // SAFETY: key and value are there, with the map's sizes.
        let done = unsafe { bpf(MAP_UPDATE, &mut attr) };
        done.map(drop).map_err(|error| Error::io(format!("queue {queue} has no socket"), error))
    }
}

fn is_not_native(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EINVAL | libc::ERANGE | libc::ENOMEM))
}

fn refusal(what: &str, error: io::Error) -> Error {
    if error.kind() == io::ErrorKind::PermissionDenied {
        let what = format!("the kernel does not take {what}: no permission");
        return Error::Unavailable { what, next: PERMISSION };
    }
    Error::io(format!("the kernel does not take {what}"), error)
}

fn unattached(interface: &Interface, error: io::Error) -> Error {
    let (name, mtu) = (&interface.name, interface.mtu);
    let unavailable = |what, next| Error::Unavailable { what, next };
    match error.raw_os_error() {
        Some(libc::EBUSY | libc::EEXIST) => unavailable(
            format!("{name} has a program already"),
            "end the program that attached it (`bpftool net` shows it); what `ip link` attached goes with: ip link set DEV xdp off",
        ),
        Some(libc::ERANGE) => unavailable(
            format!("the driver of {name} takes no program: packets of {mtu} bytes, or its peer's, are too large"),
            "lower the MTU of both ends (ip link set DEV mtu 3498), or use --mode generic",
        ),
        Some(libc::EOPNOTSUPP | libc::EINVAL) => {
            unavailable(format!("the driver of {name} takes no program"), "use --mode generic")
        }
        _ => refusal(&format!("a program for {name}"), error),
    }
}

/// The kernel as a source of packets: it sends copies of one out of an interface, without a socket.
pub struct Flood(OwnedFd);

impl Flood {
    /// Packets that leave by the interface with this number.
    ///
    /// # Errors
    /// If the kernel permits no programs.
    pub fn out_of(index: u32) -> Result<Self, Error> {
        load(&to_interface(index), b"pagemill_flood").map(Self).map_err(|error| refusal("the program", error))
    }

    /// Sends `count` copies, 64 at a time; fewer if a signal comes. It needs Linux 5.18.
    ///
    /// # Errors
    /// The kernel's, for a packet that is too short or too long.
    pub fn send(&self, packet: &[u8], count: u32) -> Result<(), Error> {
        let mut attr = TestRun {
            prog_fd: self.0.as_raw_fd() as u32,
            data_size_in: packet.len() as u32,
            data_in: packet.as_ptr() as u64,
            repeat: count,
            flags: LIVE_FRAMES,
            batch_size: 64,
            ..TestRun::default()
        };
        // SAFETY: the packet is there.
        match unsafe { bpf(TEST_RUN, &mut attr) } {
            Ok(_) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            Err(error) => Err(Error::io("the kernel sends no packets", error)),
        }
    }
}
