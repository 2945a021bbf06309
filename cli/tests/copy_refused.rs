//! `pagemill copy`: what it refuses, and that no incomplete copy is left.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

use crate::common::{Folder, PROGRAM, go_on, large, noise, signal};
use rustix::process::Signal;

#[test]
fn a_source_that_is_no_file_is_refused() {
    let folder = Folder::new();
    folder.copy(&["missing", "dst"]).refused(&["missing", "No such file", "check the name"]);
    fs::create_dir(folder.path("folder")).unwrap();
    folder.copy(&["folder", "dst"]).refused(&["folder", "directory", "cp -r"]);
    assert!(Command::new("mkfifo").arg(folder.path("pipe")).status().unwrap().success());
    folder.copy(&["pipe", "dst"]).refused(&["pipe", "cat"]);
    folder.copy(&["/dev/zero", "dst"]).refused(&["/dev/zero", "character device"]);
    folder.copy(&["folder/none/x", "dst"]).refused(&["No such file"]);
    let _socket = std::os::unix::net::UnixListener::bind(folder.path("socket")).unwrap();
    folder.copy(&["socket", "dst"]).refused(&["is a socket"]);
    // This file may be opened, but reading it fails: it is address 0 of the program itself.
    for io in ["auto", "preadv"] {
        folder.copy(&["--io", io, "/proc/self/mem", "dst"]).refused(&["Input/output error", "dst was not made"]);
    }
    assert_eq!(folder.names(), ["folder", "pipe", "socket"]);
}

#[test]
fn a_source_without_read_permission_is_refused() {
    let folder = Folder::new();
    let source = folder.file("src", b"secret");
    fs::set_permissions(&source, fs::Permissions::from_mode(0o000)).unwrap();
    let outcome = if rustix::process::geteuid().is_root() {
        // Root may read everything, so another user runs a copy of the program that it can reach.
        fs::set_permissions(folder.path(""), fs::Permissions::from_mode(0o777)).unwrap();
        fs::copy(PROGRAM, folder.path("program")).unwrap();
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "./program", "copy", "src", "dst"]);
        folder.run(&mut command)
    } else {
        folder.copy(&["src", "dst"])
    };
    outcome.refused(&["src", "Permission denied", "owner"]);
    assert!(!folder.path("dst").exists());
}

#[test]
fn a_destination_that_cannot_be_a_new_file_is_refused() {
    let folder = Folder::new();
    folder.file("src", b"new");
    folder.file("old", b"old");
    folder.copy(&["src", "old"]).refused(&["old", "exists already", "--force"]);
    fs::create_dir(folder.path("folder")).unwrap();
    folder.copy(&["--force", "src", "folder"]).refused(&["is a directory", "folder/src"]);
    assert!(Command::new("mkfifo").arg(folder.path("pipe")).status().unwrap().success());
    folder.copy(&["--force", "src", "pipe"]).refused(&["is a pipe", "cat"]);
    folder.copy(&["--force", "src", "/dev/full"]).refused(&["/dev/full", "character device"]);
    symlink("nowhere", folder.path("dangling")).unwrap();
    folder.copy(&["--force", "src", "dangling"]).refused(&["link that leads nowhere"]);
    folder.copy(&["src", "none/dst"]).refused(&["No such file", "make that directory first"]);
    folder.copy(&["src", "old/dst"]).refused(&["Not a directory"]);
    folder.copy(&["src", "none/.."]).refused(&["not the name of a file"]);
    folder.copy(&["src", "new/"]).refused(&["not the name of a file"]);
    folder.copy(&["src", &"x".repeat(300)]).refused(&["name too long"]);
    folder.copy(&["src", "/proc/dst"]).refused(&["can't make a file in /proc"]);
    assert_eq!(fs::read(folder.path("old")).unwrap(), b"old");
    assert_eq!(folder.names(), ["dangling", "folder", "old", "pipe", "src"]);
}

#[test]
fn a_copy_to_the_source_under_any_name_is_refused() {
    let folder = Folder::new();
    folder.file("src", b"kept");
    fs::hard_link(folder.path("src"), folder.path("hard")).unwrap();
    symlink("src", folder.path("soft")).unwrap();
    for [from, to] in [["src", "src"], ["src", "./src"], ["src", "hard"], ["src", "soft"], ["soft", "src"]] {
        folder.copy(&["--force", from, to]).refused(&["the same file", from, to]);
    }
    assert_eq!(fs::read(folder.path("src")).unwrap(), b"kept");
    assert_eq!(folder.names(), ["hard", "soft", "src"]);
}

#[test]
fn a_copy_above_the_file_size_limit_is_removed() {
    let folder = Folder::new();
    folder.file("src", &noise(1 << 20));
    folder.file("old", b"old");
    for io in ["auto", "preadv"] {
        // 256 KiB, in blocks of 512 bytes.
        let args = ["--io", io, "--force", "src"];
        let new = folder.copy_after("ulimit -f 512", &[&args[..], &["dst"]].concat());
        new.refused(&["can't write dst", "File too large", "ulimit -f", "dst was not made"]);
        let old = folder.copy_after("ulimit -f 512", &[&args[..], &["old"]].concat());
        old.refused(&["File too large", "old is as it was"]);
    }
    assert_eq!(fs::read(folder.path("old")).unwrap(), b"old");
    assert_eq!(folder.names(), ["old", "src"]);
}

#[test]
fn a_copy_that_fills_the_file_system_is_removed() {
    let folder = Folder::new();
    folder.file("src", &noise(2 << 20));
    fs::create_dir(folder.path("small")).unwrap();
    // A small file system that only the script sees. The script lists what is left there.
    let script = "mount -t tmpfs -o size=1M none small || exit 77; \"$0\" copy --io \"$1\" src small/dst; code=$?; \
                  ls -A small >&2; exit $code";
    for io in ["auto", "preadv"] {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--mount", "sh", "-c", script, PROGRAM, io]);
        let outcome = folder.run(&mut command);
        if outcome.stderr.contains("unshare: ") || outcome.code == Some(77) {
            println!("skipped: may not mount a small file system: {}", outcome.stderr.trim());
            return;
        }
        outcome.refused(&["can't write small/dst", "No space left", "free some space", "small/dst was not made"]);
    }
}

#[test]
fn a_copy_of_a_source_that_shrinks_is_removed() {
    let folder = Folder::new();
    for io in ["auto", "preadv"] {
        large(&folder.path("src"), 64);
        let child = folder.stopped_copy(&["--io", io]);
        fs::File::options().write(true).open(folder.path("src")).unwrap().set_len(1000).unwrap();
        go_on(child).refused(&["shrank from 67108864 to 1000 bytes", "nobody writes", "dst was not made"]);
        assert_eq!(folder.names(), ["src"]);
    }
}

#[test]
fn a_destination_that_appears_meanwhile_is_kept() {
    let folder = Folder::new();
    large(&folder.path("src"), 64);
    let child = folder.stopped_copy(&[]);
    folder.file("dst", b"theirs");
    go_on(child).refused(&["somebody else", "--force"]);
    assert_eq!(fs::read(folder.path("dst")).unwrap(), b"theirs");
    assert_eq!(folder.names(), ["dst", "src"]);
}

#[test]
fn a_signal_ends_it_and_removes_the_copy() {
    let folder = Folder::new();
    large(&folder.path("src"), 64);
    for (sent, name) in
        [(Signal::INT, "SIGINT"), (Signal::TERM, "SIGTERM"), (Signal::HUP, "SIGHUP"), (Signal::QUIT, "SIGQUIT")]
    {
        for io in ["auto", "preadv"] {
            let child = folder.stopped_copy(&["--io", io]);
            signal(&child, sent);
            let outcome = go_on(child);
            assert_eq!((outcome.code, outcome.signal), (None, Some(sent.as_raw())), "{outcome:?}");
            assert!(outcome.stderr.contains(name) && outcome.stderr.contains("dst was not made"), "{outcome:?}");
            // SIGQUIT may dump a core, if the system is set up so.
            let names: Vec<_> = folder.names().into_iter().filter(|name| !name.starts_with("core")).collect();
            assert_eq!((outcome.stdout.as_str(), names), ("", vec!["src".to_owned()]));
        }
    }
}

#[test]
fn names_with_control_characters_are_shown_on_one_line() {
    let folder = Folder::new();
    folder.file("a\n\x1b[31mb", b"x");
    folder.copy(&["a\n\x1b[31mb", "./a\n\x1b[31mb"]).refused(&["a\\n\\u{1b}[31mb", "are the same file"]);
}

#[test]
fn malformed_command_lines_are_refused() {
    let folder = Folder::new();
    folder.file("src", b"x");
    let max = usize::MAX.to_string();
    for (args, words) in [
        (&["--batch", "0", "src", "dst"][..], "0 pages an operation copy nothing"),
        (&["--batch", &max, "src", "dst"], "give fewer"),
        (&["--batch", "x", "src", "dst"], "no number of pages"),
        (&["--batch", "-1", "src", "dst"], "\"-1\" is no number of pages"),
        (&["--alloc", "both", "src", "dst"], "possible values: bulk, single"),
        (&["--io", "dma", "src", "dst"], "possible values: auto, uring, preadv"),
        (&["src"], "<DST>"),
        (&["src", ""], "<DST>"),
        (&["src", "dst", "more"], "unexpected argument"),
    ] {
        let outcome = folder.copy(args);
        assert_eq!((outcome.code, outcome.stdout.as_str()), (Some(2), ""), "{outcome:?}");
        assert!(outcome.stderr.contains(words), "no {words:?} in {outcome:?}");
    }
    assert!(!Path::new(&folder.path("dst")).exists());
}
