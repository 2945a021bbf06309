//! QEMU's `edu` (docs/specs/edu in its sources), driven through VFIO.
use std::fs::File;
use std::io::Error;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd};
use std::os::unix::fs::FileExt;

/// `_IO(';', 100 + n)`.
fn request<T>(file: &File, n: u32, argument: T) -> i32 {
    // SAFETY: what the request takes, as its caller has it.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), ((b';' as u32) << 8 | (100 + n)) as _, argument) };
    assert!(result >= 0, "VFIO's request {n}: {}", Error::last_os_error());
    result
}

/// A VFIO container, with the device's group in it.
pub(crate) struct Container {
    container: File,
    group: Option<File>,
}

impl AsFd for Container {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.container.as_fd()
    }
}

fn open(path: &str) -> File {
    File::options().read(true).write(true).open(path).unwrap_or_else(|why| panic!("{path}: {why}"))
}

impl Container {
    /// Without a group.
    pub(crate) fn empty() -> Self {
        Self { container: open("/dev/vfio/vfio"), group: None }
    }

    /// With the device's group and an IOMMU of Type1.
    pub(crate) fn of(name: &str) -> Self {
        let group = std::fs::read_link(format!("/sys/bus/pci/devices/{name}/iommu_group")).unwrap();
        let group = open(&format!("/dev/vfio/{}", group.file_name().unwrap().to_str().unwrap()));
        let container = open("/dev/vfio/vfio");
        let number = container.as_raw_fd();
        request(&group, 4, &raw const number); // VFIO_GROUP_SET_CONTAINER
        request(&container, 2, 1); // VFIO_SET_IOMMU, Type1
        Self { container, group: Some(group) }
    }
}

/// Where its registers are, and the memory of its own as it addresses that.
const DMA_FROM: u64 = 0x80;
const DMA_TO: u64 = 0x88;
const DMA_BYTES: u64 = 0x90;
const DMA_COMMAND: u64 = 0x98;
const OWN: u64 = 0x4_0000;
/// Bytes that it copies at once: it has one more, which QEMU before 8 takes for none of it.
pub(crate) const MOST: usize = 4095;

pub(crate) struct Edu {
    device: File,
    registers: u64,
}

impl Edu {
    pub(crate) fn open(container: &Container, name: &str) -> Self {
        let name = std::ffi::CString::new(name).unwrap();
        let device = request(container.group.as_ref().unwrap(), 6, name.as_ptr()); // VFIO_GROUP_GET_DEVICE_FD
        // SAFETY: a new descriptor.
        let device = unsafe { File::from_raw_fd(device) };
        // VFIO_DEVICE_GET_REGION_INFO: size, flags, index, offset of capabilities; size and offset of the region.
        let offset = |index: u32| {
            let mut info = [32u32, 0, index, 0, 0, 0, 0, 0];
            request(&device, 8, info.as_mut_ptr());
            u64::from(info[6]) | u64::from(info[7]) << 32
        };
        let (registers, configuration) = (offset(0), offset(7));
        // Its command register: memory, and reaching memory by itself.
        device.write_all_at(&6u16.to_le_bytes(), configuration + 4).unwrap();
        let edu = Self { device, registers };
        assert_eq!(edu.read(0) & 0xff, 0xed, "this is no edu");
        edu
    }

    fn read(&self, at: u64) -> u32 {
        let mut word = [0; 4];
        self.device.read_exact_at(&mut word, self.registers + at).unwrap();
        u32::from_le_bytes(word)
    }
    fn write(&self, at: u64, value: u64) {
        let value = u32::try_from(value).expect("addresses that edu can say");
        self.device.write_all_at(&value.to_le_bytes(), self.registers + at).unwrap();
    }

    /// Copies `len` bytes of memory to the device's own.
    pub(crate) fn take(&self, from: u64, len: usize) {
        self.copy(from, OWN, len, 1);
    }
    /// Copies `len` bytes of the device's own to memory.
    pub(crate) fn put(&self, to: u64, len: usize) {
        self.copy(OWN, to, len, 3);
    }
    fn copy(&self, from: u64, to: u64, len: usize, command: u64) {
        self.write(DMA_FROM, from);
        self.write(DMA_TO, to);
        self.write(DMA_BYTES, len as u64);
        self.write(DMA_COMMAND, command);
        while self.read(DMA_COMMAND) & 1 != 0 {
            std::thread::yield_now();
        }
    }
}
