//! Giving a drive to `vfio-pci`, and back to the kernel's own driver.
//!
//! The kernel is told by files of its own: `driver_override` says which driver a function is for, `unbind` takes it from the one
//! that has it, `drivers_probe` has it looked at anew. Nothing else of the machine is changed: no driver's list of
//! identifiers, which would take other drives of the same make along.
use std::fs;
use std::path::Path;

use crate::Error;
use crate::pci::{Function, System};

const VFIO: &str = "vfio-pci";

/// Gives the drive to `vfio-pci`, if nobody uses it. Says what was done.
pub(crate) fn bind(system: &System, drive: &Function) -> Result<String, Error> {
    let address = drive.address;
    let group = group_of(drive)?;
    let before = drive.driver();
    if before.as_deref() == Some(VFIO) {
        return Ok(format!("{address} is bound to vfio-pci already (group {group})"));
    }
    if let Some(other) = drive.companions()?.iter().find(|other| other.driver().as_deref() != Some(VFIO)) {
        let who = other.driver().unwrap_or_else(|| "no driver".to_owned());
        let what = format!("{address} shares IOMMU group {group} with {}, which {who} has", other.address);
        let next = "the IOMMU cannot tell them apart: put the drive into another slot";
        return Err(Error::InUse { what, next });
    }
    drive.check_unused()?;
    if !system.sys.join("bus/pci/drivers").join(VFIO).is_dir() {
        let what = "the kernel's driver vfio-pci is not loaded".to_owned();
        return Err(Error::Unavailable { what, next: "load it (modprobe vfio-pci)" });
    }
    write(&drive.folder.join("driver_override"), VFIO)?;
    let moved = hand_over(system, drive);
    if moved.is_err() || drive.driver().as_deref() != Some(VFIO) {
        // As it was: an override that stays would keep it from its own driver for ever.
        write(&drive.folder.join("driver_override"), "\n")?;
        hand_over(system, drive)?;
        moved?;
        let what = format!("{address}: vfio-pci did not take it");
        return Err(Error::Unavailable { what, next: "the kernel's log says why (dmesg)" });
    }
    let from = before.unwrap_or_else(|| "no driver".to_owned());
    Ok(format!("{address} is bound to vfio-pci (group {group}); {from} had it"))
}

/// Gives the drive back to the kernel's own driver. Says what was done.
pub(crate) fn unbind(system: &System, drive: &Function) -> Result<String, Error> {
    let address = drive.address;
    match drive.driver().as_deref() {
        Some(VFIO) => {}
        Some(other) => return Err(Error::Request(format!("{address} is not bound to vfio-pci: {other} has it"))),
        None => {}
    }
    if drive.driver().is_some() {
        check_idle(system, drive)?;
    }
    write(&drive.folder.join("driver_override"), "\n")?;
    hand_over(system, drive)?;
    match drive.driver() {
        Some(driver) => Ok(format!("{address} is bound to {driver}")),
        None => Ok(format!("{address} has no driver: none that is loaded wants it (modprobe nvme)")),
    }
}

/// Takes it from who has it, and lets the kernel look for who is to.
fn hand_over(system: &System, drive: &Function) -> Result<(), Error> {
    let address = drive.address.to_string();
    if drive.driver().is_some() {
        write(&drive.folder.join("driver/unbind"), &address)?;
    }
    write(&system.sys.join("bus/pci/drivers_probe"), &address)
}

/// The kernel would wait for ever until a process lets go of the drive.
fn check_idle(system: &System, drive: &Function) -> Result<(), Error> {
    use rustix::fs::{Mode, OFlags};
    let group = group_of(drive)?;
    let path = system.dev.join("vfio").join(&group);
    match rustix::fs::open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
        Err(rustix::io::Errno::BUSY) => Err(Error::InUse {
            what: format!("{} is in use: a process has its group, {}", drive.address, path.display()),
            next: "end that process first (fuser shows it)",
        }),
        // Whatever else may be wrong with it, nobody has it.
        _ => Ok(()),
    }
}

/// The number of the drive's group; without one there is no IOMMU that would keep it from others' memory.
pub(crate) fn group_of(drive: &Function) -> Result<String, Error> {
    drive.group().ok_or_else(|| Error::Unavailable {
        what: format!("{} has no IOMMU group: this machine has no IOMMU, or it is off", drive.address),
        next: "switch it on in the firmware (VT-d, AMD-Vi), and on Intel boot with intel_iommu=on",
    })
}

fn write(path: &Path, text: &str) -> Result<(), Error> {
    fs::write(path, text).map_err(|error| Error::io(format!("writing {}", path.display()), error))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::pci::tests::Fake;

    /// Refused, in these words, and nothing was written.
    fn refused(fake: &Fake, words: &str) {
        let error = bind(&fake.system, &fake.drive()).unwrap_err();
        assert_eq!(error.to_string(), words);
        assert!(error.next_step().is_some());
        assert!(!fake.drive().folder.join("driver_override").exists());
    }

    #[test]
    fn without_an_iommu_it_is_refused() {
        let fake = Fake::new();
        fs::remove_file(fake.drive().folder.join("iommu_group")).unwrap();
        refused(&fake, "0000:00:02.0 has no IOMMU group: this machine has no IOMMU, or it is off");
    }

    #[test]
    fn without_vfio_it_is_refused() {
        refused(&Fake::new(), "the kernel's driver vfio-pci is not loaded");
    }

    #[test]
    fn with_others_in_its_group_it_is_refused_but_for_bridges() {
        let fake = Fake::new();
        let other = fake.system.sys.join("bus/pci/devices/0000:00:03.0");
        fs::create_dir_all(&other).unwrap();
        fs::write(other.join("class"), "0x060400\n").unwrap();
        symlink(&other, fake.drive().folder.join("iommu_group/devices/0000:00:03.0")).unwrap();
        refused(&fake, "the kernel's driver vfio-pci is not loaded");
        fs::write(other.join("class"), "0x020000\n").unwrap();
        refused(&fake, "0000:00:02.0 shares IOMMU group 2 with 0000:00:03.0, which no driver has");
    }

    /// The kernel of this machine takes no notice: as it was before is what is left.
    #[test]
    fn what_vfio_does_not_take_is_as_it_was() {
        let fake = Fake::new();
        fs::create_dir_all(fake.system.sys.join("bus/pci/drivers/vfio-pci")).unwrap();
        let error = bind(&fake.system, &fake.drive()).unwrap_err();
        assert_eq!(error.to_string(), "0000:00:02.0: vfio-pci did not take it");
        assert_eq!(fs::read_to_string(fake.drive().folder.join("driver_override")).unwrap(), "\n");
    }

    #[test]
    fn only_what_vfio_has_is_given_back() {
        let fake = Fake::new();
        let driver = fake.system.sys.join("bus/pci/drivers/nvme");
        fs::create_dir_all(&driver).unwrap();
        symlink(&driver, fake.drive().folder.join("driver")).unwrap();
        let error = unbind(&fake.system, &fake.drive()).unwrap_err();
        assert_eq!(error.to_string(), "0000:00:02.0 is not bound to vfio-pci: nvme has it");
    }
}
