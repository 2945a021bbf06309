//! `pagemill crypt serve` with another NBD server behind it, which is killed and started again.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};

use crate::common::{Folder, signal, until};
use crate::crypt_serve::{QUICK, Serving, folder_with, nbdcopy, pagemill, uri};
use rustix::process::Signal;

/// Fails with the package that has `program`, if it is missing.
pub(crate) fn need(program: &str, package: &str) {
    let found = Command::new(program).arg("--version").stdout(Stdio::null()).status();
    assert!(found.is_ok(), "{program} is missing: install the package {package}");
}

/// Serves the file `volume` at the socket `far` by `qemu-nbd`.
pub(crate) fn far_end(folder: &Folder) -> Serving {
    need("qemu-nbd", "qemu-utils");
    let socket = folder.path("far");
    let _ = fs::remove_file(&socket);
    let mut command = Command::new("qemu-nbd");
    command.args(["--persistent", "--shared=8", "--format=raw", "--socket"]).arg(&socket).arg("volume");
    let mut serving = Serving(folder.spawn(&mut command));
    until("its socket", || {
        assert!(serving.0.try_wait().unwrap().is_none(), "qemu-nbd has ended");
        socket.exists()
    });
    serving
}

pub(crate) fn far_uri(folder: &Folder) -> String {
    format!("nbd+unix:///?socket={}", folder.path("far").display())
}

/// The header is read from there, and `kill -9` of the far end during a copy is not seen by the client.
#[test]
fn a_volume_behind_a_server_that_is_killed_under_load_is_whole() {
    need("nbdcopy", "libnbd-bin");
    let folder = folder_with("48M", QUICK);
    let volume = File::open(folder.path("volume")).unwrap();
    let sector = || {
        let mut bytes = [0; 4096];
        volume.read_exact_at(&mut bytes, 40 << 20).unwrap();
        bytes
    };
    let mut far = far_end(&folder);
    let words = format!("crypt serve {} --key-file key --unix socket --threads 2", far_uri(&folder));
    let mut server = Serving::start(&folder, &words);
    let first = server.first_line();
    assert!(first.contains("serving 33554432 bytes") && first.contains("by NBD, 4 connections"), "{first}");
    for round in 0..3u32 {
        let noise: Vec<u8> = (round..round + (32 << 20)).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        folder.file("raw", &noise);
        let before = sector();
        let mut copy = Command::new("nbdcopy");
        let mut copy = Serving(folder.spawn(copy.args(["--flush", "--connections=4", "raw", &uri(&folder)])));
        until("a write", || sector() != before || copy.0.try_wait().unwrap().is_some());
        far.0.kill().unwrap();
        far.0.wait().unwrap();
        far = far_end(&folder);
        let copied = copy.0.wait().unwrap();
        assert!(copied.success(), "round {round}: {copied}");
        nbdcopy(&folder, &uri(&folder), "back");
        assert!(fs::read(folder.path("back")).unwrap() == noise, "round {round}");
    }
    signal(&server.0, Signal::TERM);
    assert_eq!(server.0.wait().unwrap().code(), Some(0));
    // The same volume without a far end.
    drop(far);
    let server = Serving::start(&folder, "crypt serve volume --key-file key --unix socket --read-only");
    until("its socket", || folder.path("socket").exists());
    nbdcopy(&folder, &uri(&folder), "plain");
    assert!(fs::read(folder.path("plain")).unwrap() == fs::read(folder.path("back")).unwrap());
    drop(server);
}

#[test]
fn far_ends_that_cannot_be_used_are_refused_with_a_next_step() {
    let folder = folder_with("20M", QUICK);
    let refused = |uri: &str, more: &str, words: &[&str]| {
        let line = format!("crypt serve {uri} --key-file key --unix socket{more}");
        pagemill(&folder, &line).refused_by("crypt", words);
    };
    refused(&far_uri(&folder), "", &["far", "No such file", "check the name"]);
    refused("nbd://localhost:0/", "", &["localhost:0"]);
    refused("nbd://127.0.0.1:1/", "", &["Connection refused", "start the server there"]);
    refused("nbd://no..host/", "", &["no..host", "check the name"]); // Not asked of any name server.
    refused("nbd://", "", &["name a host"]);
    refused("nbds://localhost/", "", &["tls-certificates"]);
    let _far = far_end(&folder);
    refused(&format!("{}&tls-certificates=x", far_uri(&folder)), "", &["nbds"]);
    refused(&far_uri(&folder).replace("///", "///other"), "", &["no export of that name"]);
    refused(&far_uri(&folder), " --io uring", &["--io is for a file"]);
}

/// A volume is made there, its keys change, and its header is backed up, erased and restored, without a file of it here.
#[test]
fn a_volume_is_made_and_its_keys_change_at_the_far_end() {
    let folder = Folder::new();
    folder.file("key", &[7; 32]);
    folder.file("new", &[8; 32]);
    File::create(folder.path("volume")).unwrap().set_len(20 << 20).unwrap();
    let far = far_end(&folder);
    let there = far_uri(&folder);
    let done = |words: &str| {
        let outcome = pagemill(&folder, words);
        assert_eq!(outcome.code, Some(0), "{words}: {outcome:?}");
        outcome.stdout
    };
    for version in ["luks1", "luks2"] {
        let made = format!("crypt format {there} --key-file key {QUICK} --type {version} --force");
        assert!(done(&made).contains("MiB of data"), "{version}");
        pagemill(&folder, &made.replace(" --force", "")).refused_by("crypt", &["has a LUKS header", "--force"]);
        assert!(done(&format!("crypt info {there}")).contains(version));
        let _ = fs::remove_file(folder.path("backup"));
        done(&format!("crypt header-backup {there} backup"));
        done(&format!("crypt add-key {there} --key-file key --new-key-file new {QUICK}"));
        done(&format!("crypt remove-key {there} --key-file key"));
        // What is on the disk, without the far end.
        let on_disk = |key: &str| pagemill(&folder, &format!("crypt test-passphrase volume --key-file {key}")).code;
        assert_eq!((on_disk("key"), on_disk("new")), (Some(3), Some(0)), "{version}");
        done(&format!("crypt change-key {there} --key-file new --new-key-file key {QUICK}"));
        assert_eq!((on_disk("key"), on_disk("new")), (Some(0), Some(3)), "{version}");
        done(&format!("crypt erase {there} --force"));
        assert_eq!(on_disk("key"), Some(1), "{version}");
        done(&format!("crypt header-restore {there} backup --force"));
        done(&format!("crypt test-passphrase {there} --key-file key"));
    }
    // The header there, and the data in a file here.
    done(&format!("crypt format data --size 4M --header {there} --key-file key {QUICK} --force"));
    assert!(done(&format!("crypt info data --header {there}")).contains("4194304"));
    assert!(done("crypt test-passphrase volume --key-file key").contains("opens"));
    done(&format!("crypt erase data --header {there} --force"));
    let refused = |words: String, why: &[&str]| {
        pagemill(&folder, &words).refused_by("crypt", why);
    };
    refused("crypt test-passphrase volume --key-file key".to_owned(), &["no keyslot"]);
    refused(format!("crypt resize {there} --size 30M"), &["as long as its server makes it"]);
    refused(format!("crypt format {there} --key-file key --size 30M --force"), &["20971520 bytes already"]);
    let otherwise = there.replace("///", "//");
    refused(format!("crypt format {there} --key-file key --header {otherwise} --force"), &["the same file"]);
    drop(far);
    refused(format!("crypt info {there}"), &["start the server there"]);
}
