//! `pagemill read`: the bytes are those of the files, what cannot be cached is refused, and the figures are right.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::process::{Child, Command, Stdio};

use crate::common::{Folder, Outcome, PROGRAM, noise};
use serde_json::Value;

/// Runs a command in this folder with its standard output in the file `out`.
fn into_out(folder: &Folder, args: &[&str]) -> Outcome {
    let out = File::create(folder.path("out")).unwrap();
    let mut command = Command::new(PROGRAM);
    command.arg("read").args(args).current_dir(folder.path("")).stdin(Stdio::null());
    Outcome::of(command.stdout(out).stderr(Stdio::piped()).spawn().unwrap())
}

/// The last line of standard error, which `--json` writes.
fn json(outcome: &Outcome) -> Value {
    assert_eq!((outcome.code, outcome.stderr.lines().count()), (Some(0), 1), "{outcome:?}");
    serde_json::from_str(&outcome.stderr).unwrap()
}

#[test]
fn streams_equal_their_files() {
    let folder = Folder::new();
    let sizes = [0, 1, 4095, 4096, 4097, (3 << 20) + 123];
    let mut all = Vec::new();
    for size in sizes {
        folder.file(&size.to_string(), &noise(size));
        all.extend(noise(size));
    }
    let names = sizes.map(|size| size.to_string());
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let has_uring = io_uring::IoUring::new(1).is_ok();
    if !has_uring {
        println!("skipped: no io_uring here");
    }
    for engine in ["plain", "uring"].into_iter().take(1 + usize::from(has_uring)) {
        for options in [
            &[][..],
            &["--window", "0"],
            &["--window", "64K", "--batch", "1000"],
            &["--memory", "64K", "--batch", "1M"],
            &["--memory", "1M", "--sequential"],
            &["--random"],
            &["--no-reuse", "--batch", "1"],
        ] {
            let names = if options.contains(&"1") { &names[..5] } else { &names };
            let whole = if options.contains(&"1") { &all[..all.len() - sizes[5]] } else { &all };
            let outcome = into_out(&folder, &[&["--engine", engine], options, names].concat());
            outcome.done();
            assert!(fs::read(folder.path("out")).unwrap() == whole, "{engine} {options:?}");
        }
    }
}

#[test]
fn a_file_that_is_named_again_comes_from_the_cache() {
    let folder = Folder::new();
    let contents = noise(100 << 12);
    folder.file("file", &contents);
    let report = json(&into_out(&folder, &["--json", "--memory", "1M", "file", "file", "./file"]));
    assert!(fs::read(folder.path("out")).unwrap() == contents.repeat(3));
    assert_eq!((&report["bytes"], &report["files"]), (&(300 << 12).into(), &3.into()));
    assert_eq!(report["read"], 200, "under the second name it is another file: {report}");
    let hits = report["hits"].as_u64().unwrap() + report["misses"].as_u64().unwrap();
    assert_eq!((hits, &report["pages"]), (300, &100.into()), "{report}");
}

#[test]
fn options_change_what_is_read_ahead() {
    let folder = Folder::new();
    folder.file("file", &noise(512 << 12));
    let reads = |options: &[&str]| {
        let report = json(&into_out(&folder, &[options, &["--json", "--batch", "4K", "file"]].concat()));
        assert_eq!((&report["read"], &report["reads_failed"]), (&512.into(), &0.into()), "{report}");
        (report["reads"].as_u64().unwrap(), report["read_ahead"].as_u64().unwrap())
    };
    let again = json(&into_out(&folder, &["--json", "--memory", "1M", "--random", "file", "file"]));
    assert_eq!(
        (&again["read"], &again["read_ahead"]),
        (&1024.into(), &0.into()),
        "the second reader is told, too: {again}"
    );
    assert_eq!(reads(&["--window", "0"]), (512, 0));
    assert_eq!(reads(&["--random"]), (512, 0));
    let (small, large) = (reads(&["--window", "64K"]), reads(&["--window", "1M"]));
    assert!(small.0 >= 32 && small.1 > 500 && large.0 < small.0, "{small:?} {large:?}");
    assert!(reads(&["--window", "64K", "--sequential"]).0 < small.0);
}

#[test]
fn decisions_and_figures_are_said_on_standard_error() {
    let folder = Folder::new();
    folder.file("a", b"short");
    folder.file("b", &noise(64 << 12));
    let outcome =
        folder.pagemill(&["read", "--trace", "--stats", "--window", "32K", "--batch", "4K", "a", "/dev/null"]);
    assert_eq!((outcome.code, outcome.stdout.as_str()), (Some(1), "short"), "{outcome:?}");
    assert!(outcome.stderr.starts_with("a: file 1 of 5 bytes"), "{outcome:?}");
    let outcome = into_out(&folder, &["--trace", "--stats", "--window", "32K", "--batch", "4K", "a", "b"]);
    assert_eq!(outcome.code, Some(0));
    let text = &outcome.stderr;
    for words in ["a: file 1 of 5 bytes", "file 1: miss at page 0", "b: file 2 of 262144", "file 2: marker at page "] {
        assert!(text.contains(words), "no {words:?} in {text}");
    }
    let (_, table) = text.split_once("262,149 bytes from 2 files in ").unwrap();
    table.lines().for_each(|line| assert!(line.chars().count() <= 80, "{line}"));
    let value = |what: &str| table.lines().find_map(|line| line.strip_prefix(what)).unwrap().trim().to_owned();
    assert_eq!((value("pages read from files"), value("  that failed")), ("65".into(), "0".into()), "{table}");
    assert!(table.contains("by preadv, windows up to 32.00 KiB"), "{table}");
}

#[test]
fn what_cannot_be_cached_is_refused_and_the_next_file_follows() {
    let folder = Folder::new();
    folder.file("file", b"contents");
    fs::create_dir(folder.path("folder")).unwrap();
    assert!(Command::new("mkfifo").arg(folder.path("pipe")).status().unwrap().success());
    let _socket = std::os::unix::net::UnixListener::bind(folder.path("socket")).unwrap();
    let cases = [
        ("missing", "No such file or directory; check the name"),
        ("folder", "is a directory; name a file"),
        ("pipe", "is a pipe, and has no pages to read ahead; use `cat`"),
        ("socket", "is a socket"),
        ("/dev/zero", "is a character device, and has no pages to read ahead; use `cat`"),
        ("/proc/self/status", "does not say how long it is: it claims 0 bytes; use `cat`"),
        ("/sys/kernel/mm/transparent_hugepage/enabled", "it claims 4096 bytes; use `cat`"),
    ];
    for (name, words) in cases {
        if name.starts_with("/sys") && !fs::exists(name).unwrap() {
            continue;
        }
        let outcome = folder.pagemill(&["read", name, "file"]);
        assert_eq!((outcome.code, outcome.stdout.as_str()), (Some(1), "contents"), "{outcome:?}");
        assert_eq!(outcome.stderr.lines().count(), 1, "{outcome:?}");
        assert!(outcome.stderr.starts_with("pagemill: read: ") && outcome.stderr.contains(words), "{outcome:?}");
    }
    let both = folder.pagemill(&["read", "missing", "--json", "folder", "file"]);
    assert_eq!((both.code, both.stderr.lines().count()), (Some(1), 3), "{both:?}");
    let report: Value = serde_json::from_str(both.stderr.lines().last().unwrap()).unwrap();
    assert_eq!((&report["files"], &report["files_failed"], &report["bytes"]), (&3.into(), &2.into(), &8.into()));
}

#[test]
fn standard_output_may_not_be_one_of_the_files() {
    let folder = Folder::new();
    let path = folder.file("file", b"contents");
    let out = OpenOptions::new().append(true).open(&path).unwrap();
    let child = Command::new(PROGRAM).arg("read").arg(&path).stdout(out).stderr(Stdio::piped()).spawn().unwrap();
    let outcome = Outcome::of(child);
    assert_eq!(outcome.code, Some(1));
    assert!(outcome.stderr.contains("is standard output's file too"), "{outcome:?}");
    assert_eq!(fs::read(path).unwrap(), b"contents");
}

#[test]
fn a_closed_pipe_ends_it_quietly_and_a_full_disk_does_not() {
    let folder = Folder::new();
    let path = folder.file("file", &noise(1 << 20));
    let (reader, writer) = io::pipe().unwrap();
    drop(reader);
    let read = || {
        let mut command = Command::new(PROGRAM);
        command.arg("read").args([&path, &path]).stderr(Stdio::piped());
        command
    };
    Outcome::of(read().stdout(writer).spawn().unwrap()).done();
    let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
    let outcome = Outcome::of(read().stdout(full).spawn().unwrap());
    assert_eq!((outcome.code, outcome.stderr.lines().count()), (Some(1), 1), "{outcome:?}");
    assert!(outcome.stderr.contains("standard output: No space left on device"), "{outcome:?}");
}

/// A stream of `file` that has begun, and cannot go on before its pipe is read.
fn begun(folder: &Folder) -> (Child, Vec<u8>) {
    let mut command = Command::new(PROGRAM);
    command.args(["read", "--window", "0", "--batch", "4K", "file"]);
    let mut child = folder.spawn(&mut command);
    let mut bytes = vec![0; 4096];
    child.stdout.as_mut().unwrap().read_exact(&mut bytes).unwrap();
    (child, bytes)
}

/// Reads the rest.
fn ended((mut child, mut bytes): (Child, Vec<u8>)) -> (Vec<u8>, Outcome) {
    child.stdout.take().unwrap().read_to_end(&mut bytes).unwrap();
    (bytes, Outcome::of(child))
}

#[test]
fn a_file_that_grows_is_read_to_its_new_end() {
    let folder = Folder::new();
    // The old end is inside of a page.
    let contents = noise((1 << 20) + 100_123);
    let path = folder.file("file", &contents[..(1 << 20) + 123]);
    let stream = begun(&folder);
    let mut file = OpenOptions::new().append(true).open(path).unwrap();
    file.write_all(&contents[(1 << 20) + 123..]).unwrap();
    let (bytes, outcome) = ended(stream);
    outcome.done();
    assert!(bytes == contents, "{} bytes of {}", bytes.len(), contents.len());
}

#[test]
fn a_file_that_shrinks_is_reported() {
    let folder = Folder::new();
    let contents = noise(4 << 20);
    let path = folder.file("file", &contents);
    let stream = begun(&folder);
    OpenOptions::new().write(true).open(path).unwrap().set_len(1000).unwrap();
    let (bytes, outcome) = ended(stream);
    assert_eq!(outcome.code, Some(1));
    assert!(outcome.stderr.contains("file: it shrank to 1000 bytes while it was read, and "), "{outcome:?}");
    assert!(bytes.len() < contents.len() && bytes == contents[..bytes.len()], "{} bytes", bytes.len());
}

#[test]
fn a_file_that_is_cut_behind_the_reader_ends_there() {
    let folder = Folder::new();
    let contents = noise(4 << 20);
    let path = folder.file("file", &contents);
    let stream = begun(&folder);
    OpenOptions::new().write(true).open(path).unwrap().set_len((2 << 20) + 1000).unwrap();
    let (bytes, outcome) = ended(stream);
    outcome.done();
    assert!(bytes == contents[..(2 << 20) + 1000], "{} bytes", bytes.len());
}

#[test]
fn a_file_that_is_removed_meanwhile_is_read_to_its_end() {
    let folder = Folder::new();
    let contents = noise(1 << 20);
    let path = folder.file("file", &contents);
    let stream = begun(&folder);
    fs::remove_file(path).unwrap();
    let (bytes, outcome) = ended(stream);
    outcome.done();
    assert!(bytes == contents);
}

#[test]
fn direct_reads_give_the_same_bytes_or_say_what_to_do() {
    let beside = std::path::Path::new(PROGRAM).parent().unwrap();
    let file = tempfile::NamedTempFile::new_in(beside).unwrap();
    let contents = noise((1 << 20) + 777);
    fs::write(file.path(), &contents).unwrap();
    let folder = Folder::new();
    let outcome = into_out(&folder, &["--direct", file.path().to_str().unwrap()]);
    match outcome.code {
        Some(0) => assert!(fs::read(folder.path("out")).unwrap() == contents),
        _ => assert!(outcome.stderr.contains("has no O_DIRECT; leave --direct out"), "{outcome:?}"),
    }
}

#[test]
fn malformed_command_lines_are_refused() {
    let folder = Folder::new();
    folder.file("src", b"x");
    for (args, words) in [
        (&["-"][..], "use `cat`, or ./- for a file of that name"),
        (&[], "<FILE>"),
        (&["src", ""], "a value is required"),
        (&["--batch", "0", "src"], "0 bytes a call read nothing"),
        (&["--batch", "1G", "src"], "give fewer"),
        (&["--memory", "4K", "src"], "at least 64K"),
        (&["--memory", "2T", "src"], "at most 1T"),
        (&["--window", "x", "src"], "a number"),
        (&["--engine", "dma", "src"], "possible values: plain, uring"),
        (&["--random", "--sequential", "src"], "cannot be used with"),
    ] {
        let outcome = folder.pagemill(&[&["read"], args].concat());
        assert_eq!((outcome.code, outcome.stdout.as_str()), (Some(2), ""), "{outcome:?}");
        assert!(outcome.stderr.contains(words), "no {words:?} in {outcome:?}");
    }
    let window = folder.pagemill(&["read", "--window", "2M", "--memory", "1M", "src"]);
    window.refused_by(
        "read",
        &["a window of 2.00 MiB: an eighth of --memory, 128.00 KiB, is the most", "a smaller --window"],
    );
}
