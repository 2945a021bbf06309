//! Binding a drive to `vfio-pci`, and back to the kernel's own driver.
//!
//! This uses the kernel's files in sysfs: `driver_override` sets the driver that a function may have, `unbind` takes it
//! from its driver, `drivers_probe` looks for a driver again. No driver's list of identifiers is changed, which would
//! affect other drives of the same model.
use std::fs;
use std::path::Path;

use crate::Error;
use crate::pci::{Function, System};

const VFIO: &str = "vfio-pci";

/// Binds the drive to `vfio-pci`, if nobody uses it. Returns a message.
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
        // Undone: the override would keep the drive from its own driver for ever.
        write(&drive.folder.join("driver_override"), "\n")?;
        hand_over(system, drive)?;
        moved?;
        let what = format!("{address}: vfio-pci did not take it");
        return Err(Error::Unavailable { what, next: "the kernel's log says why (dmesg)" });
    }
    let from = before.unwrap_or_else(|| "no driver".to_owned());
    Ok(format!("{address} is bound to vfio-pci (group {group}); {from} had it"))
}

/// Gives the drive back to the kernel's own driver. Returns a message.
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

/// Unbinds the drive from its driver, and lets the kernel look for a driver.
fn hand_over(system: &System, drive: &Function) -> Result<(), Error> {
    let address = drive.address.to_string();
    if drive.driver().is_some() {
        write(&drive.folder.join("driver/unbind"), &address)?;
    }
    write(&system.sys.join("bus/pci/drivers_probe"), &address)
}

/// Refuses to unbind a drive that a process uses: the kernel would wait for that process.
fn check_idle(system: &System, drive: &Function) -> Result<(), Error> {
    use rustix::fs::{Mode, OFlags};
    let group = group_of(drive)?;
    let path = system.dev.join("vfio").join(&group);
    match rustix::fs::open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
        Err(rustix::io::Errno::BUSY) => Err(Error::InUse {
            what: format!("{} is in use: a process has its group, {}", drive.address, path.display()),
            next: "end that process first (fuser shows it)",
        }),
        // Any other error does not mean that it is in use.
        _ => Ok(()),
    }
}

/// The number of the drive's IOMMU group. Without one there is no IOMMU that protects other memory from it.
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

    /// Checks that binding is refused with these words, and that nothing was written.
    fn refused(fake: &Fake, words: &str) {
        let error = bind(&fake.system, &fake.drive()).unwrap_err();
        assert_eq!(error.to_string(), words);
        assert!(error.next_step().is_some());
        assert!(!fake.drive().folder.join("driver_override").exists());
    }

    #[test]
    fn binding_without_an_iommu_is_refused() {
        let fake = Fake::new();
        fs::remove_file(fake.drive().folder.join("iommu_group")).unwrap();
        refused(&fake, "0000:00:02.0 has no IOMMU group: this machine has no IOMMU, or it is off");
    }

    #[test]
    fn binding_without_vfio_is_refused() {
        refused(&Fake::new(), "the kernel's driver vfio-pci is not loaded");
    }

    #[test]
    fn binding_is_refused_with_other_functions_than_bridges_in_the_group() {
        let fake = Fake::new();
        let other = fake.system.sys.join("bus/pci/devices/0000:00:03.0");
        fs::create_dir_all(&other).unwrap();
        fs::write(other.join("class"), "0x060400\n").unwrap();
        symlink(&other, fake.drive().folder.join("iommu_group/devices/0000:00:03.0")).unwrap();
        refused(&fake, "the kernel's driver vfio-pci is not loaded");
        fs::write(other.join("class"), "0x020000\n").unwrap();
        refused(&fake, "0000:00:02.0 shares IOMMU group 2 with 0000:00:03.0, which no driver has");
    }

    /// The files here have no effect, so the binding fails, and is undone.
    #[test]
    fn a_failed_binding_restores_the_override() {
        let fake = Fake::new();
        fs::create_dir_all(fake.system.sys.join("bus/pci/drivers/vfio-pci")).unwrap();
        let error = bind(&fake.system, &fake.drive()).unwrap_err();
        assert_eq!(error.to_string(), "0000:00:02.0: vfio-pci did not take it");
        assert_eq!(fs::read_to_string(fake.drive().folder.join("driver_override")).unwrap(), "\n");
    }

    #[test]
    fn unbinding_needs_a_drive_bound_to_vfio() {
        let fake = Fake::new();
        let driver = fake.system.sys.join("bus/pci/drivers/nvme");
        fs::create_dir_all(&driver).unwrap();
        symlink(&driver, fake.drive().folder.join("driver")).unwrap();
        let error = unbind(&fake.system, &fake.drive()).unwrap_err();
        assert_eq!(error.to_string(), "0000:00:02.0 is not bound to vfio-pci: nvme has it");
    }
}
