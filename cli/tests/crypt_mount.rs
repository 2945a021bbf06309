//! `pagemill crypt mount`, as a user meets it: how it begins, and each way in which it ends.
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

const CHEAP: [&str; 4] = ["--kdf", "pbkdf2", "--kdf-iterations", "1000"];

fn pagemill(folder: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagemill"));
    command.current_dir(folder).arg("crypt").args(args).stdin(Stdio::null());
    command
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Mounts, and returns when the volume is there. None, and a line that says so, where nothing can be mounted.
fn mount(folder: &Path, args: &[&str]) -> Option<Child> {
    let mut command = pagemill(folder, &["mount", "image", "plain", "--key-file", "key"]);
    let mut child = command.args(args).stderr(Stdio::piped()).spawn().unwrap();
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

fn end(child: &Child, signal: libc::c_int) {
    // SAFETY: our child, which has not been waited for.
    assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
}

fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("key"), [9; 32]).unwrap();
    let format = ["format", "image", "--size", "20M", "--key-file", "key"];
    assert!(pagemill(folder.path(), &[&format[..], &CHEAP].concat()).output().unwrap().status.success());
    folder
}

#[test]
fn it_ends_by_a_signal_when_nobody_has_the_file_open_and_what_was_written_is_there() {
    let folder = folder();
    let at = folder.path().join("plain");
    let Some(mut child) = mount(folder.path(), &[]) else { return };
    // The image is this program's alone.
    let again = pagemill(folder.path(), &["mount", "image", "other", "--key-file", "key"]).output().unwrap();
    assert!(!again.status.success() && said(&again).contains("another program is using it"), "{}", said(&again));
    assert!(!folder.path().join("other").exists(), "what was made for a mount that failed is gone");

    let file = File::options().read(true).write(true).open(&at).unwrap();
    file.write_all_at(b"before", 1000).unwrap();
    end(&child, libc::SIGTERM);
    while at.exists() && fs::metadata(&at).unwrap().len() > 0 {
        std::thread::yield_now();
    }
    file.write_all_at(b"behind", 5000).unwrap();
    drop(file);
    assert!(child.wait().unwrap().success());
    assert!(!at.exists(), "it was made for the mount");

    let Some(mut child) = mount(folder.path(), &["--read-only"]) else { return };
    let whole = fs::read(&at).unwrap();
    assert_eq!((&whole[1000..1006], &whole[5000..5006]), (&b"before"[..], &b"behind"[..]));
    end(&child, libc::SIGINT);
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_mount_whose_process_was_killed_is_named_with_the_way_out() {
    let folder = folder();
    let at = folder.path().join("plain");
    let Some(mut child) = mount(folder.path(), &[]) else { return };
    let file = File::options().write(true).open(&at).unwrap();
    file.write_all_at(b"kept", 0).unwrap();
    file.sync_all().unwrap();
    end(&child, libc::SIGKILL);
    child.wait().unwrap();
    drop(file);
    let again = pagemill(folder.path(), &["mount", "image", "plain", "--key-file", "key"]).output().unwrap();
    assert!(!again.status.success() && said(&again).contains("umount plain"), "{}", said(&again));
    let unmount = Command::new("umount").arg(&at).output().unwrap();
    assert!(
        unmount.status.success() || {
            Command::new("fusermount3").arg("-u").arg(&at).output().is_ok_and(|done| done.status.success())
        }
    );
    let Some(mut child) = mount(folder.path(), &[]) else { return };
    assert_eq!(&fs::read(&at).unwrap()[..4], b"kept");
    end(&child, libc::SIGTERM);
    assert!(child.wait().unwrap().success());
}

#[test]
fn what_is_there_is_not_hidden() {
    let folder = folder();
    fs::write(folder.path().join("full"), b"mine").unwrap();
    for (at, why) in [("full", "not empty"), (".", "not a file"), ("no/such", "the folder no does not exist")] {
        let refused = pagemill(folder.path(), &["mount", "image", at, "--key-file", "key"]).output().unwrap();
        assert!(!refused.status.success() && said(&refused).contains(why), "{at}: {}", said(&refused));
    }
    assert_eq!(fs::read(folder.path().join("full")).unwrap(), b"mine");
}
