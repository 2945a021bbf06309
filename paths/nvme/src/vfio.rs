//! A PCI function that this process drives through VFIO: its registers are mapped, its interrupts signal descriptors.
//!
//! A container has one set of IOMMU tables, a group is the unit that the IOMMU can isolate, a device belongs to a
//! group. They are opened in this order. When they are closed, also by the end of the process, the kernel switches off
//! the function's access to memory and removes its tables. Numbers and structures are from `linux/vfio.h`.
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::Error;
use crate::bind::group_of;
use crate::bus::Bus;
use crate::pci::{Address, Function, System};

/// A request's number: `_IO(';', 100 + n)`.
const fn request(n: u32) -> u32 {
    (b';' as u32) << 8 | (100 + n)
}
const GET_API_VERSION: u32 = request(0);
const CHECK_EXTENSION: u32 = request(1);
const SET_IOMMU: u32 = request(2);
const GROUP_GET_STATUS: u32 = request(3);
const GROUP_SET_CONTAINER: u32 = request(4);
const GROUP_GET_DEVICE_FD: u32 = request(6);
const DEVICE_GET_REGION_INFO: u32 = request(8);
const DEVICE_GET_IRQ_INFO: u32 = request(9);
const DEVICE_SET_IRQS: u32 = request(10);
const DEVICE_RESET: u32 = request(11);

/// The IOMMU of Type 1, version 2.
const TYPE1: usize = 3;
const GROUP_VIABLE: u32 = 1;
const REGION_MMAP: u32 = 4;
const BAR0: u32 = 0;
const CONFIG: u32 = 7;
const MSIX: u32 = 2;
/// DATA_EVENTFD and ACTION_TRIGGER.
const BY_EVENTFD: u32 = 1 << 2 | 1 << 5;
/// The command register in a function's configuration; its bits for memory space and for access to memory.
const COMMAND: u64 = 4;
const MEMORY_SPACE: u16 = 2;
const BUS_MASTER: u16 = 4;

#[repr(C)]
#[derive(Default)]
struct GroupStatus {
    argsz: u32,
    flags: u32,
}

#[repr(C)]
#[derive(Default)]
struct RegionInfo {
    argsz: u32,
    flags: u32,
    index: u32,
    cap_offset: u32,
    size: u64,
    offset: u64,
}

#[repr(C)]
#[derive(Default)]
struct IrqInfo {
    argsz: u32,
    flags: u32,
    index: u32,
    count: u32,
}

/// An ioctl with a number as its argument, or none.
fn ask(fd: BorrowedFd<'_>, number: u32, value: usize) -> io::Result<i32> {
    // SAFETY: the requests that this is called with take their argument as a number.
    let answer = unsafe { libc::ioctl(fd.as_raw_fd(), number as _, value) };
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(answer) }
}

/// An ioctl that reads or fills a structure.
///
/// # Safety
/// The request takes a structure of the layout of `T`, with its size set if it has that field.
unsafe fn ask_of<T: ?Sized>(fd: BorrowedFd<'_>, number: u32, about: &mut T) -> io::Result<i32> {
    // SAFETY: the structure is there and of the request's kind, as the caller says.
    let answer = unsafe { libc::ioctl(fd.as_raw_fd(), number as _, ptr::from_mut(about).cast::<libc::c_void>()) };
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(answer) }
}

/// The registers, mapped into this process.
struct Registers {
    at: *mut u8,
    bytes: usize,
}

// SAFETY: the mapping is of the process, and each access is one volatile read or write of a register, which any thread
// may do at any time.
unsafe impl Send for Registers {}
// SAFETY: as above.
unsafe impl Sync for Registers {}

impl Drop for Registers {
    fn drop(&mut self) {
        // SAFETY: mapped by `registers`, and no longer used: only this value's owner accesses it.
        let _ = unsafe { munmap(self.at.cast(), self.bytes) };
    }
}

/// A container with its IOMMU, and the groups of drives in it, by their numbers. `VfioMap` is made from it.
pub(crate) struct Container {
    container: OwnedFd,
    groups: Mutex<BTreeMap<String, OwnedFd>>,
    users: Users,
}

/// The drives of a container that are open. The kernel would open one again, and two drivers of one controller send it
/// stale commands, with pages that have other owners.
#[derive(Default)]
struct Users(Mutex<BTreeMap<Address, Weak<()>>>);

impl Users {
    /// The drive is in use until the returned value is dropped.
    fn take(&self, address: Address) -> Result<Arc<()>, Error> {
        let mut users = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if users.get(&address).is_some_and(|user| user.strong_count() > 0) {
            let what = format!("{address}: this process has it open");
            return Err(Error::InUse { what, next: "drop its other Drive and the queues of that first" });
        }
        let user = Arc::new(());
        users.insert(address, Arc::downgrade(&user));
        Ok(user)
    }
}

/// A function that this process drives.
pub(crate) struct VfioDevice {
    registers: Registers,
    config: u64,
    device: File,
    events: Vec<OwnedFd>,
    begin: Instant,
    _user: Arc<()>,
}

impl Container {
    /// A container with the group of a drive.
    pub(crate) fn open(system: &System, drive: &Function) -> Result<Self, Error> {
        let container =
            Self { container: open(&system.dev.join("vfio/vfio"))?, groups: Mutex::default(), users: Users::default() };
        container.join(system, drive)?;
        Ok(container)
    }

    /// Adds the group of a drive that is bound to `vfio-pci`, if it is not there already. The kernel gives the group
    /// the mappings that the container has.
    pub(crate) fn join(&self, system: &System, drive: &Function) -> Result<(), Error> {
        let number = group_of(drive)?;
        let driver = drive.driver();
        if driver.as_deref() != Some("vfio-pci") {
            let who = driver.map_or_else(|| "no driver has it".to_owned(), |driver| format!("{driver} has it"));
            let what = format!("{} is not bound to vfio-pci: {who}", drive.address);
            return Err(Error::Unavailable { what, next: "bind it first (pagemill nvme bind)" });
        }
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        if groups.contains_key(&number) {
            return Ok(());
        }
        let container = &self.container;
        let group = open(&system.dev.join("vfio").join(&number))?;
        let refused = |what: &str| {
            let what = format!("IOMMU group {number}: {what}");
            move |error| Error::io(what, error)
        };
        if ask(container.as_fd(), GET_API_VERSION, 0).map_err(refused("VFIO's version"))? != 0
            || ask(container.as_fd(), CHECK_EXTENSION, TYPE1).map_err(refused("VFIO's IOMMUs"))? != 1
        {
            let what = "this kernel's VFIO has no IOMMU of Type 1".to_owned();
            return Err(Error::Unavailable { what, next: "load it (modprobe vfio_iommu_type1)" });
        }
        let mut status = GroupStatus { argsz: size_of::<GroupStatus>() as u32, flags: 0 };
        // SAFETY: VFIO_GROUP_GET_STATUS fills a vfio_group_status.
        unsafe { ask_of(group.as_fd(), GROUP_GET_STATUS, &mut status) }.map_err(refused("its state"))?;
        if status.flags & GROUP_VIABLE == 0 {
            let what = format!("IOMMU group {number} has devices that other drivers have");
            return Err(Error::InUse { what, next: "bind them to vfio-pci too, or put the drive into another slot" });
        }
        let mut number_of: RawFd = container.as_raw_fd();
        // SAFETY: VFIO_GROUP_SET_CONTAINER reads a descriptor's number.
        unsafe { ask_of(group.as_fd(), GROUP_SET_CONTAINER, &mut number_of) }.map_err(refused("its container"))?;
        if !groups.is_empty() {
            groups.insert(number, group);
            return Ok(()); // The container has its IOMMU.
        }
        ask(container.as_fd(), SET_IOMMU, TYPE1).map_err(|error| match error.raw_os_error() {
            Some(libc::EPERM) => Error::Unavailable {
                what: "VFIO refuses: this machine's IOMMU does not keep interrupts apart".to_owned(),
                next: "switch interrupt remapping on; or allow it to every device (vfio_iommu_type1's parameter \
                       allow_unsafe_interrupts=1)",
            },
            _ => refused("its IOMMU")(error),
        })?;
        groups.insert(number, group);
        Ok(())
    }

    /// The descriptor for a `VfioMap`.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.container.as_fd()
    }
}

impl VfioDevice {
    /// Opens the drive of a container, with `vectors` interrupts; without interrupts, completions are polled.
    pub(crate) fn open(container: &Container, drive: &Function, vectors: u16) -> Result<Self, Error> {
        let refused = |what: &str| {
            let what = format!("{}: {what}", drive.address);
            move |error| Error::io(what, error)
        };
        let user = container.users.take(drive.address)?;
        let mut name = format!("{}\0", drive.address).into_bytes();
        let number = group_of(drive)?;
        let groups = container.groups.lock().unwrap_or_else(PoisonError::into_inner);
        let group =
            groups.get(&number).ok_or_else(|| Error::Request(format!("group {number} is not in the container")))?;
        // SAFETY: VFIO_GROUP_GET_DEVICE_FD reads a name that ends with a zero byte.
        let fd = unsafe { ask_of(group.as_fd(), GROUP_GET_DEVICE_FD, name.as_mut_slice()) };
        let fd = fd.map_err(refused("opening it by VFIO"))?;
        // SAFETY: the kernel has just made this descriptor for this process.
        let device = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
        let config = region(&device, CONFIG).map_err(refused("its configuration"))?;
        let registers = registers(&device).map_err(refused("its registers"))?;
        let begin = Instant::now();
        let config = config.offset;
        let mut opened = Self { registers, config, device, events: Vec::new(), begin, _user: user };
        if vectors > 0 {
            opened.interrupts(drive, vectors)?;
        }
        Ok(opened)
    }

    /// Connects each interrupt of the function to a descriptor.
    fn interrupts(&mut self, drive: &Function, wanted: u16) -> Result<(), Error> {
        let refused = |error| Error::io(format!("{}: its interrupts", drive.address), error);
        let mut info = IrqInfo { argsz: size_of::<IrqInfo>() as u32, index: MSIX, ..IrqInfo::default() };
        // SAFETY: VFIO_DEVICE_GET_IRQ_INFO fills a vfio_irq_info.
        unsafe { ask_of(self.device.as_fd(), DEVICE_GET_IRQ_INFO, &mut info) }.map_err(refused)?;
        if info.count == 0 {
            let what = format!("{} has no interrupts of the kind MSI-X", drive.address);
            return Err(Error::Unavailable { what, next: "drive it without them (--poll)" });
        }
        let count = info.count.min(wanted.into());
        let events = (0..count).map(|_| eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK));
        self.events = events.collect::<Result<_, _>>().map_err(|errno| refused(errno.into()))?;
        // A vfio_irq_set: its size, flags, index, start, count; then a descriptor for each.
        let size = (5 + count) * 4;
        let mut set: Vec<u32> = vec![size, BY_EVENTFD, MSIX, 0, count];
        set.extend(self.events.iter().map(|event| event.as_raw_fd() as u32));
        // SAFETY: VFIO_DEVICE_SET_IRQS reads a vfio_irq_set of the size that it says.
        unsafe { ask_of(self.device.as_fd(), DEVICE_SET_IRQS, set.as_mut_slice()) }.map_err(refused)?;
        Ok(())
    }
}

fn open(path: &std::path::Path) -> Result<OwnedFd, Error> {
    use rustix::fs::{Mode, OFlags};
    let what = |why: &str| format!("{}: {why}", path.display());
    rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(|errno| match errno {
        Errno::NOENT | Errno::NXIO | Errno::NODEV => Error::Unavailable {
            what: what("there is no VFIO here"),
            next: "load it (modprobe vfio-pci); it takes an IOMMU that is on",
        },
        Errno::ACCESS | Errno::PERM => Error::Unavailable {
            what: what("not permitted"),
            next: "run it as root, or have root give this user the group (chown)",
        },
        Errno::BUSY => Error::InUse { what: what("another process has it"), next: "end that process first" },
        errno => Error::io(path.display().to_string(), errno),
    })
}

fn region(device: &File, index: u32) -> io::Result<RegionInfo> {
    let mut info = RegionInfo { argsz: size_of::<RegionInfo>() as u32, index, ..RegionInfo::default() };
    // SAFETY: VFIO_DEVICE_GET_REGION_INFO fills a vfio_region_info.
    unsafe { ask_of(device.as_fd(), DEVICE_GET_REGION_INFO, &mut info) }?;
    Ok(info)
}

fn registers(device: &File) -> io::Result<Registers> {
    let info = region(device, BAR0)?;
    let bytes = usize::try_from(info.size).map_err(|_| io::ErrorKind::InvalidData)?;
    if bytes == 0 || info.flags & REGION_MMAP == 0 {
        return Err(io::Error::other("they cannot be mapped"));
    }
    let both = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping, where the kernel likes.
    let at = unsafe { mmap(ptr::null_mut(), bytes, both, MapFlags::SHARED, device, info.offset) }?;
    Ok(Registers { at: at.cast(), bytes })
}

impl Bus for VfioDevice {
    fn len(&self) -> usize {
        self.registers.bytes
    }

    fn read32(&self, at: usize) -> u32 {
        assert!(at.is_multiple_of(4) && at + 4 <= self.registers.bytes, "no register at {at:#x}");
        // SAFETY: inside of the mapping, and aligned; registers may be read at any time.
        u32::from_le(unsafe { self.registers.at.add(at).cast::<u32>().read_volatile() })
    }

    fn write32(&self, at: usize, value: u32) {
        assert!(at.is_multiple_of(4) && at + 4 <= self.registers.bytes, "no register at {at:#x}");
        // SAFETY: as in `read32`; the IOMMU confines the controller to memory that is mapped for it.
        unsafe { self.registers.at.add(at).cast::<u32>().write_volatile(value.to_le()) };
    }

    fn vectors(&self) -> u16 {
        self.events.len() as u16
    }

    fn event(&self, vector: u16) -> Option<BorrowedFd<'_>> {
        self.events.get(usize::from(vector)).map(AsFd::as_fd)
    }

    fn quiet(&self, vector: u16) -> Result<(), Error> {
        let Some(event) = self.event(vector) else { return Ok(()) };
        match rustix::io::read(event, &mut [0; 8]) {
            Ok(_) | Err(Errno::AGAIN) => Ok(()),
            Err(errno) => Err(Error::io("reading interrupts", errno)),
        }
    }

    fn wait(&self, vectors: &[u16], limit: Duration) -> Result<(), Error> {
        let events = vectors.iter().filter_map(|&vector| Some((vector, self.event(vector)?)));
        let (vectors, events): (Vec<_>, Vec<_>) = events.unzip();
        let mut fds: Vec<_> = events.iter().map(|event| PollFd::new(event, PollFlags::IN)).collect();
        let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        match poll(&mut fds, Some(&limit)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(Error::io("waiting for interrupts", errno)),
        }
        let came = vectors.iter().zip(&fds).filter(|(_, fd)| fd.revents().contains(PollFlags::IN));
        came.into_iter().try_for_each(|(&vector, _)| self.quiet(vector))
    }

    fn now(&self) -> Duration {
        self.begin.elapsed()
    }

    fn reset(&self) -> Result<(), Error> {
        let reset = ask(self.device.as_fd(), DEVICE_RESET, 0);
        reset.map(drop).map_err(|error| Error::io("resetting the function", error))
    }

    fn set_master(&self, may: bool) -> Result<(), Error> {
        let failed = |error| Error::io("the function's access to memory", error);
        let mut bytes = [0; 2];
        self.device.read_exact_at(&mut bytes, self.config + COMMAND).map_err(failed)?;
        let before = u16::from_le_bytes(bytes) | MEMORY_SPACE;
        let after = if may { before | BUS_MASTER } else { before & !BUS_MASTER };
        self.device.write_all_at(&after.to_le_bytes(), self.config + COMMAND).map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_is_opened_once_at_a_time() {
        let (users, [first, second]) =
            (Users::default(), ["0000:01:00.0", "0000:01:00.1"].map(|at| at.parse().unwrap()));
        let user = users.take(first).unwrap();
        let error = users.take(first).unwrap_err();
        assert!(matches!(error, Error::InUse { .. }), "{error}");
        let _other = users.take(second).unwrap();
        drop(user);
        users.take(first).unwrap();
    }
}
