//! Block devices: a program that uses one keeps others out, under any of its names. The tests use loop devices, which
//! need root.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Command;

use crate::commands::{CHEAP, crypt, opening};
use crate::common::*;
use crate::keys_served::is_awaited;
use pagemill_crypt::Error;

/// A loop device over a file of 40 MiB, and its mount; both are removed when it is dropped.
struct Loop {
    bench: Bench,
    device: String,
    mounted: Option<PathBuf>,
}

impl Loop {
    /// `None`, and a line that says so, if there are no loop devices.
    fn new(tools: &[&str]) -> Option<Self> {
        let bench = Bench::with(&[&["losetup"], tools].concat())?;
        bench.file("a", 40 * MIB);
        let attached = bench.run("losetup --find --show a");
        let device = String::from_utf8(attached.stdout).unwrap().trim().to_owned();
        if !attached.status.success() || device.is_empty() || fs::metadata(&device).is_err() {
            eprintln!("skipped: no loop device: {}", String::from_utf8_lossy(&attached.stderr).trim());
            return None;
        }
        Some(Self { bench, device, mounted: None })
    }

    /// Makes a file system on it and mounts it read-only. False, and a line that says so, if mounting is not possible.
    fn mount(&mut self) -> bool {
        self.bench.ok(&format!("mke2fs -q -F {}", self.device));
        let at = self.bench.path("mounted");
        fs::create_dir(&at).unwrap();
        let done = Command::new("mount").args(["-o", "ro", &self.device]).arg(&at).output().unwrap();
        if done.status.success() {
            self.mounted = Some(at);
        } else {
            eprintln!("skipped: mounting: {}", String::from_utf8_lossy(&done.stderr).trim());
        }
        done.status.success()
    }

    fn unmount(&mut self) {
        if let Some(at) = self.mounted.take() {
            assert!(Command::new("umount").arg(at).status().unwrap().success());
        }
    }

    fn format(&self, image: &str, more: &str) -> Result<(), Error> {
        crypt(&self.bench, &format!("format {image} --key-file @pw {more} {CHEAP}")).map(drop)
    }

    fn opens(&self, image: &str, may_write: bool) -> Result<pagemill_crypt::commands::Opened, Error> {
        opening(&self.bench, &format!("{image} --key-file @pw")).open(may_write)
    }
}

/// Tries again while the device is in use: a child process of another test shares it until it executes another program.
fn soon<T>(mut attempt: impl FnMut() -> Result<T, Error>) -> T {
    let mut done = None;
    until("nobody to have the device", || {
        match attempt() {
            Ok(made) => done = Some(made),
            Err(refused) => assert!(is_in_use(&refused), "{refused}"),
        }
        done.is_some()
    });
    done.unwrap()
}

impl Drop for Loop {
    fn drop(&mut self) {
        if let Some(at) = &self.mounted {
            let _ = Command::new("umount").arg(at).status();
        }
        let _ = Command::new("losetup").args(["-d", &self.device]).status();
    }
}

fn is_in_use(refused: &Error) -> bool {
    refused.to_string().contains("in use") && refused.next_step().is_some()
}

#[test]
fn a_mounted_device_is_neither_formatted_nor_opened() {
    let Some(mut device) = Loop::new(&["mke2fs"]) else { return };
    if !device.mount() {
        return;
    }
    let before = fs::read(&device.device).unwrap();
    let name = device.device.clone();
    for more in ["", "--force"] {
        let refused = device.format(&name, more).unwrap_err();
        assert!(is_in_use(&refused), "{refused}");
    }
    for may_write in [true, false] {
        let plain = opening(&device.bench, &format!("{name} --type plain --key-file @pw")).open(may_write);
        assert!(is_in_use(plain.as_ref().unwrap_err()), "{plain:?}");
    }
    // The file behind it has the same bytes.
    let refused = device.format("@a", "--force").unwrap_err();
    assert!(is_in_use(&refused) && refused.to_string().contains(&name), "{refused}");
    let refused = opening(&device.bench, "@a --type plain --key-file @pw").open(true).unwrap_err();
    assert!(is_in_use(&refused), "{refused}");
    assert!(fs::read(&name).unwrap() == before);
    device.unmount();
    soon(|| device.format(&name, "--force"));
    soon(|| device.opens(&name, true));
}

#[test]
fn a_device_and_the_file_behind_it_exclude_each_other() {
    let Some(device) = Loop::new(&[]) else { return };
    let name = device.device.clone();
    soon(|| device.format(&name, ""));
    let opened = soon(|| device.opens(&name, true));
    for may_write in [true, false] {
        let refused = device.opens("@a", may_write).unwrap_err();
        assert!(refused.to_string().contains("is using it"), "{may_write}: {refused}");
    }
    assert!(device.format("@a", "--force").is_err());
    drop(opened);
    let opened = soon(|| device.opens("@a", true));
    assert!(device.opens(&name, true).is_err());
    assert!(device.opens(&name, false).is_err());
    assert!(device.format(&name, "--force").is_err());
    drop(opened);
    // Readers keep writers out.
    let opened = soon(|| device.opens("@a", false));
    assert!(device.opens(&name, true).is_err());
    let both = soon(|| device.opens(&name, false));
    drop((opened, both));
    soon(|| device.opens(&name, true));
}

#[test]
fn keys_of_a_device_can_be_changed_while_it_is_open() {
    let Some(device) = Loop::new(&["cryptsetup"]) else { return };
    let (bench, name) = (&device.bench, &device.device);
    soon(|| device.format(name, ""));
    let opened = soon(|| device.opens(name, true));
    let refused = device.opens(name, true).unwrap_err();
    assert!(is_in_use(&refused), "{refused}");
    assert!(is_in_use(&device.format(name, "--force").unwrap_err()));
    assert!(crypt(bench, &format!("info {name}")).unwrap().out.contains("keyslot 0"));
    crypt(bench, &format!("add-key {name} --key-file @pw --new-key-file @other {CHEAP}")).unwrap();
    bench.ok(&format!("cryptsetup luksKillSlot -q --key-file pw {name} 1"));
    crypt(bench, &format!("test-passphrase {name} --key-file @pw")).unwrap();
    drop(opened);
}

#[test]
fn a_devices_header_lock_is_cryptsetups() {
    let Some(device) = Loop::new(&["cryptsetup"]) else { return };
    let (bench, name) = (&device.bench, &device.device);
    soon(|| device.format(name, ""));
    let number = fs::metadata(name).unwrap().rdev();
    let lock = format!("/run/cryptsetup/L_{}:{}", rustix::fs::major(number), rustix::fs::minor(number));
    assert!(fs::metadata(&lock).is_err(), "it goes with the command");
    fs::create_dir_all("/run/cryptsetup").unwrap();
    let held = File::create(&lock).unwrap();
    held.lock_shared().unwrap();
    crypt(bench, &format!("info {name}")).unwrap();
    std::thread::scope(|scope| {
        let added =
            scope.spawn(|| crypt(bench, &format!("add-key {name} --key-file @pw --new-key-file @other {CHEAP}")));
        until("the wait for the lock", || is_awaited(&held));
        // As `cryptsetup` does when it is done: the one that waits then finds that its lock has lost its name.
        fs::remove_file(&lock).unwrap();
        drop(held);
        added.join().unwrap().unwrap();
    });
    assert!(fs::metadata(&lock).is_err());
    // A lock that can't be taken is no reason to do without: others may have it.
    std::os::unix::fs::symlink("elsewhere", &lock).unwrap();
    let refused = crypt(bench, &format!("info {name}"));
    fs::remove_file(&lock).unwrap();
    assert!(matches!(refused, Err(Error::Io { .. })), "{refused:?}");
}

#[test]
fn a_device_with_data_after_its_first_mebibyte_is_not_formatted() {
    let Some(device) = Loop::new(&[]) else { return };
    let name = device.device.clone();
    std::os::unix::fs::FileExt::write_all_at(&device.bench.open("a"), b"here", 39 * MIB).unwrap();
    let is_told = |why: &str| why.contains("40894464");
    soon(|| match device.format(&name, "") {
        Err(Error::Occupied(why)) if is_told(&why) => Ok(()),
        other => other.and(Err(Error::Request("it was formatted".to_owned()))),
    });
    soon(|| device.format(&name, "--force"));
}
