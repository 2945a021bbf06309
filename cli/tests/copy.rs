//! `pagemill copy`: the copy equals the source, holes and permissions included, and the report says what was done.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::process::{Command, Stdio};

use crate::common::{Folder, Outcome, PROGRAM, go_on, large, noise, signal, until};
use rustix::fs::{SeekFrom, seek};
use rustix::process::Signal;
use serde_json::Value;

/// Every way of allocating pages with every way of moving data.
const FORMS: [[&str; 4]; 4] = [
    ["--alloc", "bulk", "--io", "uring"],
    ["--alloc", "bulk", "--io", "preadv"],
    ["--alloc", "single", "--io", "uring"],
    ["--alloc", "single", "--io", "preadv"],
];

fn has_uring() -> bool {
    io_uring::IoUring::new(1).is_ok()
}

/// The forms that work on this machine.
fn forms() -> Vec<[&'static str; 4]> {
    FORMS.into_iter().filter(|form| form[3] != "uring" || has_uring()).collect()
}

fn json(outcome: &Outcome) -> Value {
    serde_json::from_str(&outcome.done().stdout).unwrap()
}

#[test]
fn copies_of_every_size_equal_their_sources() {
    let folder = Folder::new();
    for size in [0, 1, 4095, 4096, 4097, 8192, (5 << 20) + 123] {
        let contents = noise(size);
        folder.file("src", &contents);
        for form in forms() {
            for batch in ["1", "7", "256", "16384"] {
                let args = [&form[..], &["--batch", batch, "--force", "--json", "src", "dst"]].concat();
                let report = json(&folder.copy(&args));
                assert!(fs::read(folder.path("dst")).unwrap() == contents, "{args:?}, {size} bytes");
                assert_eq!((&report["bytes"], &report["data_bytes"]), (&size.into(), &size.into()));
                assert_eq!(report["pages"], size.div_ceil(4096), "{report}");
                let calls = match form[1] {
                    "single" => size.div_ceil(4096),
                    _ => size.div_ceil(4096 * batch.parse::<usize>().unwrap()),
                };
                assert_eq!(report["alloc_calls"], calls, "{report}");
                fs::remove_file(folder.path("dst")).unwrap();
            }
        }
    }
    if !has_uring() {
        println!("skipped: no io_uring here");
    }
}

/// The start and the end of each part of a file that holds data.
fn data_map(path: &std::path::Path) -> Vec<(u64, u64)> {
    let file = File::open(path).unwrap();
    let mut map = Vec::new();
    let mut at = 0;
    while let Ok(data) = seek(&file, SeekFrom::Data(at)) {
        at = seek(&file, SeekFrom::Hole(data)).unwrap();
        map.push((data, at));
    }
    map
}

#[test]
fn holes_stay_holes() {
    let folder = Folder::new();
    let mib = 1u64 << 20;
    // The size, and the places of 8 KiB of data: holes first, between and last; data at the very end; only a hole.
    let shapes: [(u64, &[u64]); 4] =
        [(64 * mib, &[4 * mib, 40 * mib]), (9 * mib, &[0, 9 * mib - 8192]), (mib + 77, &[0]), (16 * mib + 1, &[])];
    for (size, places) in shapes {
        let file = File::create(folder.path("src")).unwrap();
        file.set_len(size).unwrap();
        places.iter().for_each(|&at| file.write_all_at(&noise(8192), at).unwrap());
        let source = data_map(&folder.path("src"));
        if source.iter().map(|(start, end)| end - start).sum::<u64>() == size {
            println!("skipped: this file system has no holes");
            return;
        }
        for form in forms() {
            let report = json(&folder.copy(&[&form[..], &["--json", "src", "dst"]].concat()));
            assert!(fs::read(folder.path("dst")).unwrap() == fs::read(folder.path("src")).unwrap());
            assert_eq!(data_map(&folder.path("dst")), source, "{report}");
            let blocks = |name| fs::metadata(folder.path(name)).unwrap().blocks();
            assert!(blocks("dst") <= blocks("src") + 16, "{} blocks of {}", blocks("dst"), blocks("src"));
            let number = |name: &str| report[name].as_u64().unwrap();
            assert_eq!(number("data_bytes") + number("hole_bytes"), size, "{report}");
            let holes = source.windows(2).count()
                + usize::from(source.first().is_none_or(|first| first.0 > 0))
                + usize::from(source.last().is_some_and(|last| last.1 < size));
            assert_eq!(number("holes"), holes as u64, "{report}");
            fs::remove_file(folder.path("dst")).unwrap();
        }
    }
}

#[test]
fn files_with_a_wrong_size_are_copied_to_their_end() {
    let folder = Folder::new();
    let outcome = folder.copy(&["--json", "/proc/version", "dst"]);
    assert_eq!(json(&outcome)["io"], "preadv");
    assert_eq!(fs::read(folder.path("dst")).unwrap(), fs::read("/proc/version").unwrap());
    // This file claims a page and has less.
    folder.copy(&["/sys/kernel/mm/transparent_hugepage/enabled", "small"]).done();
    let setting = fs::read("/sys/kernel/mm/transparent_hugepage/enabled").unwrap();
    assert_eq!(fs::read(folder.path("small")).unwrap(), setting);
}

#[test]
fn permissions_are_kept_and_special_bits_are_not() {
    let folder = Folder::new();
    for (mode, kept) in [(0o640, 0o640), (0o444, 0o444), (0o4755, 0o755)] {
        fs::set_permissions(folder.file("src", b"x"), fs::Permissions::from_mode(mode)).unwrap();
        folder.copy(&["src", "dst"]).done();
        assert_eq!(fs::metadata(folder.path("dst")).unwrap().mode() & 0o7777, kept);
        folder.names().iter().for_each(|name| fs::remove_file(folder.path(name)).unwrap());
    }
}

#[test]
fn force_replaces_the_file_that_a_link_leads_to() {
    let folder = Folder::new();
    folder.file("src", b"new");
    folder.file("dst", b"old, and longer");
    symlink("dst", folder.path("link")).unwrap();
    folder.copy(&["--force", "--sync", "src", "link"]).done();
    assert_eq!(fs::read(folder.path("dst")).unwrap(), b"new");
    assert!(fs::symlink_metadata(folder.path("link")).unwrap().is_symlink());
    assert_eq!(folder.names(), ["dst", "link", "src"]);
}

#[test]
fn the_report_has_bytes_holes_speed_and_allocation_calls() {
    let folder = Folder::new();
    folder.file("src", &noise(1 << 20));
    let outcome = folder.copy(&["--io", "preadv", "--batch", "64", "src", "dst"]);
    let text = outcome.done().stdout.trim_end();
    assert_eq!(text.lines().count(), 4);
    assert!(text.lines().all(|line| line.len() <= 80), "{text}");
    for words in
        ["copied 1048576 bytes", "no holes", "GiB/s by preadv", "256 pages in", "bulk: 64.0 an allocation call"]
    {
        assert!(text.contains(words), "no {words:?} in {text:?}");
    }
    let single = folder.copy(&["--alloc", "single", "src", "single"]);
    assert!(single.done().stdout.contains("single: 1.0 an allocation call"), "{single:?}");
    folder.file("empty", b"");
    let empty = folder.copy(&["empty", "none"]);
    assert!(empty.done().stdout.ends_with("no page was needed\n"), "{empty:?}");
}

#[test]
fn copies_are_equal_on_each_backend() {
    let folder = Folder::new();
    let contents = noise(300_000);
    folder.file("src", &contents);
    let report = json(&folder.copy_after("export PAGEMILL_BACKEND=portable", &["--json", "src", "portable"]));
    assert_eq!(report["backend"], "portable");
    assert!(fs::read(folder.path("portable")).unwrap() == contents);
    folder
        .copy_after("export PAGEMILL_BACKEND=both", &["src", "dst"])
        .refused(&["PAGEMILL_BACKEND=both", "neither rseq nor portable"]);
    if pagemill::self_test().is_ok() {
        let report = json(&folder.copy_after("export PAGEMILL_BACKEND=rseq", &["--json", "src", "rseq"]));
        assert_eq!(report["backend"], "rseq");
        assert!(fs::read(folder.path("rseq")).unwrap() == contents);
    } else {
        println!("skipped: restartable sequences don't work here");
    }
}

#[test]
fn a_copy_works_with_little_address_space() {
    let folder = Folder::new();
    let contents = noise(3 << 20);
    folder.file("src", &contents);
    folder.copy_after("ulimit -v 150000", &["src", "dst"]).done();
    assert!(fs::read(folder.path("dst")).unwrap() == contents);
    let tight = ["--batch", "16384", "src", "other"];
    folder.copy_after("ulimit -v 150000", &tight).refused(&["allocator", "`ulimit -v`", "--batch"]);
}

#[test]
fn without_io_uring_it_copies_by_preadv_and_reports_why() {
    let folder = Folder::new();
    folder.file("src", b"x");
    // Both files leave no descriptor for the ring. The shell closes descriptors that the tests were started with.
    let few = "exec 3>&- 4>&-; ulimit -n 5";
    let report = json(&folder.copy_after(few, &["--json", "src", "dst"]));
    assert_eq!((&report["io"], &report["io_fallback"]), (&"preadv".into(), &"Too many open files".into()));
    let line = folder.copy_after(few, &["--force", "src", "dst"]);
    assert!(line.done().stdout.contains("preadv (no io_uring: Too many open files)"), "{line:?}");
    let refused = folder.copy_after(few, &["--io", "uring", "src", "other"]);
    refused.refused(&["no io_uring", "Too many open files", "--io preadv"]);
}

#[test]
fn a_source_that_grows_is_copied_at_its_first_size() {
    let folder = Folder::new();
    large(&folder.path("src"), 64);
    let child = folder.stopped_copy(&[]);
    let before = fs::read(folder.path("src")).unwrap();
    let source = File::options().write(true).open(folder.path("src")).unwrap();
    source.write_all_at(b"more", before.len() as u64).unwrap();
    let outcome = go_on(child);
    assert_eq!(outcome.code, Some(0));
    assert!(outcome.stderr.contains("grew by 4 bytes"), "{outcome:?}");
    assert!(fs::read(folder.path("dst")).unwrap() == before);
}

#[test]
fn a_source_that_is_written_to_meanwhile_is_reported() {
    let folder = Folder::new();
    large(&folder.path("src"), 64);
    let child = folder.stopped_copy(&["--json"]);
    File::options().write(true).open(folder.path("src")).unwrap().write_all_at(b"more", 0).unwrap();
    let outcome = go_on(child);
    assert_eq!(outcome.code, Some(0));
    assert!(outcome.stderr.contains("somebody wrote to it"), "{outcome:?}");
    assert!(outcome.stdout.contains(r#""source":"written""#), "{outcome:?}");
}

#[test]
fn a_signal_that_was_ignored_at_the_start_stays_ignored() {
    let folder = Folder::new();
    large(&folder.path("src"), 16);
    let script = "trap '' HUP; exec \"$0\" copy --batch 1 src dst";
    let child = folder.spawn(Command::new("sh").args(["-c", script, PROGRAM]));
    until("a copy at work", || folder.names() != ["src"]);
    signal(&child, Signal::HUP);
    Outcome::of(child).done();
    assert!(fs::read(folder.path("dst")).unwrap() == fs::read(folder.path("src")).unwrap());
}

#[test]
fn a_closed_standard_output_is_no_failure_and_a_full_one_is() {
    let folder = Folder::new();
    folder.file("src", b"x");
    let (reader, writer) = io::pipe().unwrap();
    drop(reader);
    let mut command = Command::new(PROGRAM);
    command.args(["copy", "src", "dst"]).current_dir(folder.path("")).stderr(Stdio::piped());
    Outcome::of(command.stdout(writer).spawn().unwrap()).done();
    assert_eq!(fs::read(folder.path("dst")).unwrap(), b"x");
    let full = File::options().write(true).open("/dev/full").unwrap();
    let outcome = Outcome::of(command.arg("--force").stdout(full).spawn().unwrap());
    outcome.refused(&["standard output", "No space left"]);
}

#[test]
fn progress_is_shown_only_on_a_terminal() {
    let folder = Folder::new();
    large(&folder.path("src"), 4);
    // Without a terminal, standard error stays empty: `done` checks that.
    folder.copy(&["src", "dst"]).done();
    let script = format!("{PROGRAM} copy --force --batch 1 src dst");
    let mut command = Command::new("script");
    command.args(["-qec", &script, "/dev/null"]).current_dir(folder.path("")).stdin(Stdio::null());
    let Ok(child) = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn() else {
        println!("skipped: no `script` to give the program a terminal");
        return;
    };
    let outcome = Outcome::of(child);
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    assert!(outcome.stdout.contains("of 4.00 MiB") && outcome.stdout.contains("copied 4194304 bytes"), "{outcome:?}");
}
