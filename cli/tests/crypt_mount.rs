//! `pagemill crypt mount`, as a user meets it: its first line, and each way in which it ends.
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::process::{Child, Command};

use crate::common::{Folder, PROGRAM, signal};
use rustix::process::Signal;

const MOUNT: [&str; 6] = ["crypt", "mount", "image", "plain", "--key-file", "key"];

/// A folder with the volume `image`, which `key` opens.
fn folder() -> Folder {
    let folder = Folder::new();
    folder.file("key", &[9; 32]);
    let format = "crypt format image --size 20M --key-file key --kdf pbkdf2 --kdf-iterations 1000";
    assert_eq!(folder.pagemill(&format.split(' ').collect::<Vec<_>>()).code, Some(0));
    folder
}

/// Mounts, and returns when the volume is there. None, with a line that says so, if nothing can be mounted here.
fn mount(folder: &Folder, args: &[&str]) -> Option<Child> {
    let mut child = folder.spawn(Command::new(PROGRAM).args(MOUNT).args(args));
    let mut line = String::new();
    BufReader::new(child.stderr.as_mut().unwrap()).read_line(&mut line).unwrap();
    if line.contains("it takes /dev/fuse") {
        child.wait().unwrap();
        println!("skipped: {}", line.trim());
        return None;
    }
    assert!(line.contains("the volume is the file plain, 4194304 bytes; end it with: umount plain"), "{line}");
    Some(child)
}

fn end(mut child: Child, by: Signal) {
    signal(&child, by);
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_signal_ends_it_once_the_file_is_closed_and_writes_are_kept() {
    let folder = folder();
    let at = folder.path("plain");
    let Some(mut child) = mount(&folder, &[]) else { return };
    // No other process may use the image meanwhile.
    let again = folder.pagemill(&["crypt", "mount", "image", "other", "--key-file", "key"]);
    assert!(again.code != Some(0) && again.stderr.contains("another program is using it"), "{again:?}");
    assert!(!folder.path("other").exists(), "the file that was made for a failed mount is gone");

    let file = File::options().read(true).write(true).open(&at).unwrap();
    file.write_all_at(b"before", 1000).unwrap();
    signal(&child, Signal::TERM);
    while at.exists() && fs::metadata(&at).unwrap().len() > 0 {
        std::thread::yield_now();
    }
    file.write_all_at(b"behind", 5000).unwrap();
    drop(file);
    assert!(child.wait().unwrap().success());
    assert!(!at.exists(), "the file was made for the mount");

    let Some(child) = mount(&folder, &["--read-only"]) else { return };
    let whole = fs::read(&at).unwrap();
    assert_eq!((&whole[1000..1006], &whole[5000..5006]), (&b"before"[..], &b"behind"[..]));
    end(child, Signal::INT);
}

#[test]
fn a_mount_whose_process_was_killed_is_reported_with_the_way_out() {
    let folder = folder();
    let at = folder.path("plain");
    let Some(mut child) = mount(&folder, &[]) else { return };
    let file = File::options().write(true).open(&at).unwrap();
    file.write_all_at(b"kept", 0).unwrap();
    file.sync_all().unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    drop(file);
    let again = folder.pagemill(&MOUNT);
    assert!(again.code != Some(0) && again.stderr.contains("umount plain"), "{again:?}");
    let succeeds = |command: &mut Command| command.arg(&at).output().is_ok_and(|done| done.status.success());
    assert!(succeeds(&mut Command::new("umount")) || succeeds(Command::new("fusermount3").arg("-u")));
    let Some(child) = mount(&folder, &[]) else { return };
    assert_eq!(&fs::read(&at).unwrap()[..4], b"kept");
    end(child, Signal::TERM);
}

#[test]
fn it_does_not_mount_over_existing_contents() {
    let folder = folder();
    folder.file("full", b"mine");
    for (at, why) in [("full", "not empty"), (".", "not a file"), ("no/such", "the folder no does not exist")] {
        let refused = folder.pagemill(&["crypt", "mount", "image", at, "--key-file", "key"]);
        assert!(refused.code != Some(0) && refused.stderr.contains(why), "{at}: {refused:?}");
    }
    assert_eq!(fs::read(folder.path("full")).unwrap(), b"mine");
}
