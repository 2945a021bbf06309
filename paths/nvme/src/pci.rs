//! PCI functions as the kernel shows them: the drive at an address, its driver, and whether it is in use.
//!
//! This reads files below `/sys` and `/proc`. The two roots are parameters, so that tests have their own.
use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::Error;

/// Non-volatile memory that speaks NVM Express: class, subclass and interface.
const NVME_CLASS: u32 = 0x01_08_02;
/// Bridges between PCI buses, which are in a group because of the devices behind them.
const BRIDGE_CLASS: u32 = 0x06_04;

/// A function's address: domain, bus, device, function. Nothing else names a drive here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Address {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || "a PCI address is written as 0000:01:00.0, as lspci -D does".to_owned();
        let hex = |part: &str, most: u32| {
            let is_hex = !part.is_empty() && part.len() <= 8 && part.bytes().all(|byte| byte.is_ascii_hexdigit());
            let number = if is_hex { u32::from_str_radix(part, 16).ok() } else { None };
            number.filter(|&number| number <= most).ok_or_else(wrong)
        };
        let mut parts = text.rsplitn(3, ':');
        let (place, function) = parts.next().and_then(|place| place.split_once('.')).ok_or_else(wrong)?;
        let bus = hex(parts.next().ok_or_else(wrong)?, 0xff)? as u8;
        let domain = parts.next().map_or(Ok(0), |domain| hex(domain, u32::MAX))?;
        Ok(Self { domain, bus, device: hex(place, 0x1f)? as u8, function: hex(function, 7)? as u8 })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { domain, bus, device, function } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
    }
}

/// Where the kernel shows its state.
#[derive(Clone, Debug)]
pub(crate) struct System {
    pub(crate) sys: PathBuf,
    pub(crate) proc: PathBuf,
    pub(crate) dev: PathBuf,
}

impl System {
    pub(crate) fn this() -> Self {
        Self { sys: "/sys".into(), proc: "/proc".into(), dev: "/dev".into() }
    }
}

/// A function that is there.
#[derive(Clone, Debug)]
pub(crate) struct Function {
    pub(crate) address: Address,
    pub(crate) folder: PathBuf,
    system: System,
}

impl Function {
    /// The function at an address, if it is an NVMe controller.
    pub(crate) fn open(system: &System, address: Address) -> Result<Self, Error> {
        let folder = system.sys.join(format!("bus/pci/devices/{address}"));
        if !folder.is_dir() {
            let what = format!("there is no PCI device {address}");
            return Err(Error::Unavailable { what, next: "see what there is with `lspci -D`" });
        }
        let function = Self { address, folder, system: system.clone() };
        match function.class()? {
            NVME_CLASS => Ok(function),
            class => Err(Error::Request(format!(
                "{address} is no NVMe controller: its class is {class:06x}, not {NVME_CLASS:06x}"
            ))),
        }
    }

    fn class(&self) -> Result<u32, Error> {
        let path = self.folder.join("class");
        let text = fs::read_to_string(&path).map_err(|error| Error::io(path.display().to_string(), error))?;
        let number = u32::from_str_radix(text.trim().trim_start_matches("0x"), 16);
        number.map_err(|_| Error::Request(format!("{} says {text:?}, which is no class", path.display())))
    }

    /// The driver that has it, if one does.
    pub(crate) fn driver(&self) -> Option<String> {
        link_name(&self.folder.join("driver"))
    }

    /// The number of its IOMMU group: what the IOMMU cannot tell apart.
    pub(crate) fn group(&self) -> Option<String> {
        link_name(&self.folder.join("iommu_group"))
    }

    /// The others of its group, bridges left out.
    pub(crate) fn companions(&self) -> Result<Vec<Self>, Error> {
        let folder = self.folder.join("iommu_group/devices");
        let names = names_in(&folder).map_err(|error| Error::io(folder.display().to_string(), error))?;
        let mut others = Vec::new();
        for name in names {
            let Ok(address) = name.parse::<Address>() else { continue };
            let folder = self.system.sys.join(format!("bus/pci/devices/{address}"));
            let other = Self { address, folder, system: self.system.clone() };
            if address != self.address && other.class()? >> 8 != BRIDGE_CLASS {
                others.push(other);
            }
        }
        Ok(others)
    }

    /// The names of the disks that the kernel's driver has made of it.
    pub(crate) fn disks(&self) -> Vec<String> {
        let Ok(here) = self.folder.canonicalize() else { return Vec::new() };
        let block = self.system.sys.join("class/block");
        let disks = names_in(&block).unwrap_or_default().into_iter().filter(|name| {
            let place = block.join(name).canonicalize().unwrap_or_default();
            !place.join("partition").exists() && (place.starts_with(&here) || self.shares(&place))
        });
        disks.collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// Whether a disk of several paths has one by way of this controller: it then lies with the subsystem, beside links to
    /// its controllers.
    fn shares(&self, disk: &Path) -> bool {
        let Ok(here) = self.folder.canonicalize() else { return false };
        let Some(subsystem) = disk.parent().filter(|parent| parent.join("subsysnqn").exists()) else { return false };
        let names = names_in(subsystem).unwrap_or_default();
        names.iter().any(|name| subsystem.join(name).canonicalize().is_ok_and(|place| place.starts_with(&here)))
    }

    /// Refuses if one of its disks, or a part of one, is mounted, swapped to, or held by another device.
    pub(crate) fn check_unused(&self) -> Result<(), Error> {
        for disk in self.disks() {
            let folder = self.system.sys.join("class/block").join(&disk);
            let parts = names_in(&folder).unwrap_or_default().into_iter();
            let parts = parts.filter(|part| folder.join(part).join("partition").exists());
            for (name, place) in
                [(disk.clone(), folder.clone())].into_iter().chain(parts.map(|part| (part.clone(), folder.join(part))))
            {
                self.check_one(&name, &place)?;
            }
            self.check_claim(&disk)?;
        }
        Ok(())
    }

    fn check_one(&self, name: &str, place: &Path) -> Result<(), Error> {
        let in_use =
            |what: String, next| Err(Error::InUse { what: format!("{} is in use: {what}", self.address), next });
        let number = fs::read_to_string(place.join("dev")).unwrap_or_default();
        if let Some(at) = self.mounted_at(number.trim())? {
            return in_use(format!("/dev/{name} is mounted on {at}"), "unmount it (umount) if you can do without it");
        }
        let swaps = fs::read_to_string(self.system.proc.join("swaps")).unwrap_or_default();
        if swaps.lines().any(|line| line.split_whitespace().next() == Some(&format!("/dev/{name}"))) {
            return in_use(format!("/dev/{name} is swap space"), "switch that off (swapoff) if you can do without it");
        }
        let holders = names_in(&place.join("holders")).unwrap_or_default();
        if let Some(holder) = holders.first() {
            let next = "take that apart first (vgchange -an, mdadm --stop, cryptsetup close)";
            return in_use(format!("/dev/{holder} is made of /dev/{name}"), next);
        }
        Ok(())
    }

    fn mounted_at(&self, number: &str) -> Result<Option<String>, Error> {
        let path = self.system.proc.join("self/mountinfo");
        let mounts = fs::read_to_string(&path).map_err(|error| Error::io(path.display().to_string(), error))?;
        let at = mounts.lines().find_map(|line| {
            let mut fields = line.split(' ').skip(2);
            (fields.next() == Some(number)).then(|| fields.nth(1).unwrap_or("?").to_owned())
        });
        Ok(at)
    }

    /// Asks the kernel itself: it gives nobody a disk for himself of which a part is in use, by whatever, in whichever
    /// mount namespace.
    fn check_claim(&self, disk: &str) -> Result<(), Error> {
        use rustix::fs::{Mode, OFlags};
        let path = self.system.dev.join(disk);
        match rustix::fs::open(&path, OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC, Mode::empty()) {
            Ok(_) => Ok(()),
            Err(rustix::io::Errno::BUSY) => {
                let what = format!("{} is in use: the kernel does not give {} away", self.address, path.display());
                Err(Error::InUse { what, next: "see who has it with `lsblk` and `lsof`" })
            }
            // A disk with more than one path is there without a name for each.
            Err(rustix::io::Errno::NOENT) => Ok(()),
            Err(error) => Err(Error::io(path.display().to_string(), error)),
        }
    }
}

/// What a link leads to, by its last name.
fn link_name(link: &Path) -> Option<String> {
    Some(fs::read_link(link).ok()?.file_name()?.to_string_lossy().into_owned())
}

fn names_in(folder: &Path) -> io::Result<Vec<String>> {
    fs::read_dir(folder)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn addresses() {
        let read = |text: &str| text.parse::<Address>().map(|address| address.to_string());
        assert_eq!(read("0000:01:00.0").as_deref(), Ok("0000:01:00.0"));
        assert_eq!(read("01:1f.7").as_deref(), Ok("0000:01:1f.7"));
        assert_eq!(read("10000:E1:00.0").as_deref(), Ok("10000:e1:00.0"));
        for wrong in ["", "1", "01:00", "01:00.8", "01:20.0", "+1:00.0", "nvme0", "/dev/nvme0n1", "..", "a:b:c:d.0"] {
            assert!(read(wrong).is_err(), "{wrong:?}");
        }
    }

    /// A machine with one drive, in a folder.
    pub(crate) struct Fake {
        _folder: tempfile::TempDir,
        pub(crate) system: System,
    }

    const ADDRESS: &str = "0000:00:02.0";

    impl Fake {
        pub(crate) fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let root = folder.path();
            let system = System { sys: root.join("sys"), proc: root.join("proc"), dev: root.join("dev") };
            let device = system.sys.join("bus/pci/devices").join(ADDRESS);
            let group = system.sys.join("kernel/iommu_groups/2");
            let disk = device.join("nvme/nvme0/nvme0n1");
            for folder in [&group.join("devices"), &disk.join("holders"), &disk.join("nvme0n1p1/holders")] {
                fs::create_dir_all(folder).unwrap();
            }
            fs::create_dir_all(system.sys.join("class/block")).unwrap();
            fs::create_dir_all(system.proc.join("self")).unwrap();
            fs::create_dir_all(&system.dev).unwrap();
            fs::write(device.join("class"), "0x010802\n").unwrap();
            fs::write(disk.join("dev"), "259:0\n").unwrap();
            fs::write(disk.join("nvme0n1p1/dev"), "259:1\n").unwrap();
            fs::write(disk.join("nvme0n1p1/partition"), "1\n").unwrap();
            fs::write(system.proc.join("self/mountinfo"), "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n").unwrap();
            fs::write(system.proc.join("swaps"), "Filename Type Size Used Priority\n").unwrap();
            symlink(&disk, system.sys.join("class/block/nvme0n1")).unwrap();
            symlink(disk.join("nvme0n1p1"), system.sys.join("class/block/nvme0n1p1")).unwrap();
            symlink(&group, device.join("iommu_group")).unwrap();
            symlink(&device, group.join("devices").join(ADDRESS)).unwrap();
            Self { _folder: folder, system }
        }

        pub(crate) fn drive(&self) -> Function {
            Function::open(&self.system, ADDRESS.parse().unwrap()).unwrap()
        }

        fn refusal(&self) -> String {
            self.drive().check_unused().unwrap_err().to_string()
        }
    }

    #[test]
    fn an_unused_drive_may_be_bound() {
        let fake = Fake::new();
        assert_eq!(fake.drive().disks(), ["nvme0n1"]);
        fake.drive().check_unused().unwrap();
        assert!(fake.drive().companions().unwrap().is_empty());
        assert_eq!((fake.drive().group().as_deref(), fake.drive().driver()), (Some("2"), None));
    }

    #[test]
    fn a_mounted_drive_is_refused() {
        let fake = Fake::new();
        let mounts = "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n30 22 259:1 / /mnt/a rw - ext4 /dev/nvme0n1p1 rw\n";
        fs::write(fake.system.proc.join("self/mountinfo"), mounts).unwrap();
        assert_eq!(fake.refusal(), "0000:00:02.0 is in use: /dev/nvme0n1p1 is mounted on /mnt/a");
    }

    #[test]
    fn a_drive_with_swap_space_is_refused() {
        let fake = Fake::new();
        let swaps = "Filename Type Size Used Priority\n/dev/nvme0n1 partition 1 0 -2\n";
        fs::write(fake.system.proc.join("swaps"), swaps).unwrap();
        assert_eq!(fake.refusal(), "0000:00:02.0 is in use: /dev/nvme0n1 is swap space");
    }

    #[test]
    fn a_drive_that_another_device_is_made_of_is_refused() {
        let fake = Fake::new();
        fs::create_dir(fake.drive().folder.join("nvme/nvme0/nvme0n1/nvme0n1p1/holders/dm-0")).unwrap();
        assert_eq!(fake.refusal(), "0000:00:02.0 is in use: /dev/dm-0 is made of /dev/nvme0n1p1");
    }

    /// With several paths the disk lies with the subsystem, and each controller has a link there.
    #[test]
    fn a_disk_of_several_paths_is_found() {
        let fake = Fake::new();
        let subsystem = fake.system.sys.join("devices/virtual/nvme-subsystem/nvme-subsys0");
        fs::create_dir_all(subsystem.join("nvme1n1/holders")).unwrap();
        fs::write(subsystem.join("subsysnqn"), "nqn\n").unwrap();
        fs::write(subsystem.join("nvme1n1/dev"), "259:7\n").unwrap();
        symlink(subsystem.join("nvme1n1"), fake.system.sys.join("class/block/nvme1n1")).unwrap();
        assert_eq!(fake.drive().disks(), ["nvme0n1"], "another controller's");
        symlink(fake.drive().folder.join("nvme/nvme0"), subsystem.join("nvme0")).unwrap();
        assert_eq!(fake.drive().disks(), ["nvme0n1", "nvme1n1"]);
    }

    #[test]
    fn a_function_that_is_no_drive_is_refused() {
        let fake = Fake::new();
        let open = |address: &str| Function::open(&fake.system, address.parse().unwrap());
        assert!(matches!(open("0000:00:03.0"), Err(Error::Unavailable { .. })));
        fs::write(fake.drive().folder.join("class"), "0x020000\n").unwrap();
        let refused = open(ADDRESS).unwrap_err().to_string();
        assert_eq!(refused, "0000:00:02.0 is no NVMe controller: its class is 020000, not 010802");
    }
}
