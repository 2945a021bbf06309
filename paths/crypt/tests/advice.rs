//! Error messages: the file, what is wrong with it, and a safe next step.

use std::fs;
use std::os::unix::fs::symlink;

use crate::commands::{CHEAP, crypt, opening};
use crate::common::*;
use crate::headers::with_metadata;
use pagemill_crypt::Error;
use pagemill_crypt::commands::Said;

const CHEAP_LUKS1: &str = "--type luks1 --kdf-iterations 1000";

/// As the program prints it.
fn told(error: &Error) -> String {
    format!("{error}; {}", error.next_step().unwrap_or("no next step"))
}

/// The error of `line`.
#[track_caller]
fn refused(bench: &Bench, line: &str) -> String {
    match crypt(bench, line) {
        Ok(Said { out, .. }) => panic!("{line}: {out}"),
        Err(error) => told(&error),
    }
}

#[track_caller]
fn assert_has(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "{word:?} is missing: {text}");
    }
}

/// A volume `a` of `size`.
fn volume(size: &str, more: &str) -> Bench {
    let bench = Bench::with(&[]).unwrap();
    crypt(&bench, &format!("format @a --size {size} --key-file @pw {more}")).unwrap();
    bench
}

/// Restoring an old header would bring removed passphrases back, and would not repair a file that is cut off.
#[test]
fn cut_off_files_advise_a_whole_copy_and_no_header_restore() {
    for (more, lengths) in [
        (CHEAP, &[7, 500, 4096, 16_384, 32_000, 40_000, 16 << 20, (16 << 20) + 100][..]),
        (CHEAP_LUKS1, &[7, 500, 600, 40_000, 1 << 20, 2 << 20, (2 << 20) + 100]),
    ] {
        let bench = volume("20M", more);
        let whole = fs::read(bench.path("a")).unwrap();
        for &len in lengths {
            write(&bench.path("cut"), &whole[..len]);
            let name = bench.path("cut");
            let cut = format!("/cut: cut off at {len} bytes: it should have at least ");
            let check = |text: &str| {
                assert_has(text, &[&cut, "use a whole copy"]);
                assert!(!text.to_lowercase().contains("restore") && !text.contains("backup"), "{text}");
            };
            let error = opening(&bench, "@cut --key-file @pw").open(true).unwrap_err();
            check(&told(&error));
            // Commands that need only a keyslot work as long as it is there.
            match crypt(&bench, "test-passphrase @cut --key-file @pw") {
                Ok(_) => assert!(len >= 1 << 20, "{len}"),
                Err(error) => check(&told(&error)),
            }
            match crypt(&bench, "info @cut --json") {
                Ok(Said { out, .. }) => {
                    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
                    let why = json["not_opened"].as_str().unwrap();
                    assert!(len >= 592 && why.contains(&format!("cut off at {len} bytes")), "{why}");
                }
                Err(error) => check(&told(&error)),
            }
            assert!(fs::read(&name).unwrap() == whole[..len], "{len}");
        }
    }
}

#[test]
fn a_cut_off_volume_of_a_fixed_size_reports_its_full_length() {
    let bench = volume("20M", CHEAP);
    let mut bytes = fs::read(bench.path("a")).unwrap();
    with_metadata(&mut bytes, |json| json["segments"]["0"]["size"] = "4194304".into());
    bytes.truncate(18 << 20);
    write(&bench.path("a"), &bytes);
    let error = opening(&bench, "@a --key-file @pw").open(false).unwrap_err();
    assert_has(&told(&error), &["a: cut off at 18874368 bytes: it should have at least 20971520;", "use a whole copy"]);
    assert_has(&crypt(&bench, "info @a").unwrap().out, &["cut off at 18874368 bytes", "bytes of data   4194304"]);
}

#[test]
fn the_same_file_for_header_and_data_is_refused() {
    let bench = Bench::with(&[]).unwrap();
    let path = |name| bench.path(name);
    bench.file("a", 20 << 20);
    fs::hard_link(path("a"), path("hard")).unwrap();
    symlink("a", path("soft")).unwrap();
    for (data, header) in [("a", "a"), ("a", "hard"), ("soft", "a"), ("a", "./a"), ("new", "new"), ("./new", "new")] {
        let size = if data.ends_with("new") { "--size 20M" } else { "" };
        let text = refused(&bench, &format!("format @{data} --header @{header} {size} --key-file @pw {CHEAP}"));
        assert_has(&text, &["are the same file", "name another", "--header"]);
    }
    assert!(!path("new").exists());
    assert!(fs::read(path("a")).unwrap().iter().all(|&byte| byte == 0));

    // A detached header has its data in another file; as its own data it would be overwritten.
    crypt(&bench, &format!("format @a --header @h --key-file @pw {CHEAP}")).unwrap();
    let error = opening(&bench, "@h --header @h --key-file @pw").open(true).unwrap_err();
    assert_has(&told(&error), &["are the same file", "leave --header out"]);
}

#[test]
fn a_missing_header_advises_header_and_format() {
    let bench = Bench::with(&[]).unwrap();
    bench.file("zero", 1 << 20);
    for line in ["info @zero", "test-passphrase @zero --key-file @pw", "add-key @zero --key-file @pw"] {
        assert_has(&refused(&bench, line), &["zero: no LUKS header", "--header FILE", "crypt format"]);
    }
    let error = opening(&bench, "@zero --key-file @pw").open(false).unwrap_err();
    assert_has(&told(&error), &["zero: no LUKS header", "--header FILE", "crypt format"]);
    bench.file("data", 1 << 20);
    assert_has(&refused(&bench, "info @data --header @zero"), &["zero: no LUKS header"]);
}

#[test]
fn a_damaged_copy_is_reported_with_its_file_and_its_repair() {
    let bench = volume("20M", CHEAP);
    let whole = fs::read(bench.path("a")).unwrap();
    for (at, damaged, used) in [(5000, "primary", "secondary"), (21_000, "secondary", "primary")] {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        write(&bench.path("a"), &bytes);
        let fault = format!("a: {damaged} copy of the header: its checksum is wrong");
        let used = format!("the {used} copy is used");
        for warnings in [
            crypt(&bench, "info @a").unwrap().warnings,
            crypt(&bench, "test-passphrase @a --key-file @pw").unwrap().warnings,
            opening(&bench, "@a --key-file @pw").open(true).unwrap().warnings,
        ] {
            assert_eq!(warnings.len(), 1, "{warnings:?}");
            assert_has(&warnings[0], &[&fault, &used, "the next change of a key mends it"]);
        }
        let added = crypt(&bench, &format!("add-key @a --key-file @pw --new-key-file @other {CHEAP}")).unwrap();
        assert_has(&added.warnings[0], &[&fault, "mended by this change"]);
        assert!(crypt(&bench, "info @a").unwrap().warnings.is_empty());
    }
    // If no change repairs it, the message does not promise that.
    let mut bytes = whole;
    bytes[..4096].copy_from_slice(&pattern(4096));
    write(&bench.path("a"), &bytes);
    let warnings = crypt(&bench, "info @a").unwrap().warnings;
    assert_has(&warnings[0], &["a: primary copy", "written over", "the secondary copy is used", "cryptsetup repair"]);
    assert!(!warnings[0].contains("mends"), "{warnings:?}");
}

#[test]
fn too_small_sizes_are_refused_with_the_smallest_possible() {
    for (more, least) in [
        (CHEAP, (16 << 20) + 4096),
        (&format!("--sector-size 512 {CHEAP}"), (16 << 20) + 512),
        (CHEAP_LUKS1, (2 << 20) + 512),
        (&format!("--key-size 256 {CHEAP_LUKS1}"), (2 << 20) + 512),
    ] {
        let bench = Bench::with(&[]).unwrap();
        for size in ["1M", "0", "100K"] {
            // Before the passphrase is asked for.
            let text = refused(&bench, &format!("format @a --size {size} --key-file @nothing {more}"));
            assert_has(&text, &[&format!("the smallest size that works is {least} bytes")]);
            assert!(!bench.path("a").exists());
        }
        crypt(&bench, &format!("format @a --size {} --key-file @pw {more}", least - 4096)).unwrap_err();
        crypt(&bench, &format!("format @a --size {least} --key-file @pw {more}")).unwrap();
        opening(&bench, "@a --key-file @pw").open(true).unwrap();
    }
    let bench = Bench::with(&[]).unwrap();
    bench.file("short", 1 << 20);
    let text = refused(&bench, &format!("format @a --size 1M --header @short --key-file @pw {CHEAP}"));
    assert_has(&text, &["the header's file", "the smallest size that works is 16777216 bytes"]);
    bench.file("none", 0);
    let text = refused(&bench, &format!("format @none --header @h --key-file @pw {CHEAP}"));
    assert_has(&text, &["the data's file", "the smallest size that works is 4096 bytes"]);
}

/// Before the passphrase is asked for, which does not exist here.
#[test]
fn invalid_socket_names_are_refused_with_advice() {
    let bench = volume("20M", CHEAP);
    fs::create_dir(bench.path("dir")).unwrap();
    fs::write(bench.path("file"), "mine").unwrap();
    let long = "s".repeat(108);
    for (name, words) in [
        ("dir", &["dir is a directory", "name a socket in it"][..]),
        (&long, &["bytes long", "107", "shorter"]),
        ("absent/socket", &["the folder", "absent does not exist", "make it"]),
        ("file", &["file is not a socket", "name another"]),
    ] {
        let text = refused(&bench, &format!("serve @a --key-file @nothing --unix @{name}"));
        assert_has(&text, words);
    }
    assert_eq!(fs::read(bench.path("file")).unwrap(), b"mine");
    let text = refused(&bench, &format!("format @absent/a --size 20M --key-file @pw {CHEAP}"));
    assert_has(&text, &["the folder", "absent does not exist", "make it"]);
    let text = refused(&bench, "mount @a @absent/plain --key-file @nothing");
    assert_has(&text, &["the folder", "absent does not exist", "make it"]);
}

#[test]
fn a_file_that_is_no_backup_is_not_told_to_be_formatted() {
    let bench = volume("20M", CHEAP);
    let text = refused(&bench, "header-restore @a @pw --force");
    assert_has(&text, &["pw: no LUKS header is there", "header-backup", "luksHeaderBackup"]);
    assert!(!text.contains("crypt format"), "{text}");
}

#[test]
fn a_descriptor_that_is_not_open_and_a_reserve_that_is_too_large_have_a_next_step() {
    let bench = volume("20M", CHEAP);
    let text = refused(&bench, "test-passphrase @a --passphrase-fd 1000");
    assert_has(&text, &["descriptor 1000: it is not open", "3<FILE"]);
    let text = refused(&bench, "mount @a @plain --key-file @pw --memory 1");
    assert_has(&text, &["1024 pages does not fit into 1 MiB", "--memory", "--reserve"]);
}

#[test]
fn a_dangling_link_is_not_formatted_and_its_target_is_named() {
    let bench = Bench::with(&[]).unwrap();
    symlink("nowhere", bench.path("link")).unwrap();
    for more in ["", "--size 20M"] {
        let text = refused(&bench, &format!("format @link {more} --key-file @pw {CHEAP}"));
        assert_has(&text, &["link is a symbolic link to nowhere, which does not exist", "name", "remove the link"]);
    }
    let text = refused(&bench, &format!("format @a --size 3M --header @link --key-file @pw {CHEAP}"));
    assert_has(&text, &["link is a symbolic link to nowhere"]);
    assert!(!bench.path("nowhere").exists() && !bench.path("a").exists());
}

#[test]
fn options_of_argon2_are_refused_for_pbkdf2() {
    let bench = volume("20M", CHEAP);
    for (kdf, option) in
        [("--kdf pbkdf2", "--kdf-memory"), ("--kdf pbkdf2", "--kdf-lanes"), ("--type luks1", "--kdf-memory")]
    {
        // Before any passphrase is asked for.
        let text = refused(&bench, &format!("format @b --size 20M {kdf} {option} 64 --key-file @nothing"));
        assert_has(&text, &[option, "argon2", "leave it out"]);
    }
    let add = "add-key @a --key-file @nothing --kdf pbkdf2 --kdf-memory 64";
    assert_has(&refused(&bench, add), &["--kdf-memory", "leave it out"]);
    assert!(!bench.path("b").exists());
}

#[test]
fn info_shows_the_header_of_a_volume_that_cannot_be_opened() {
    let bench = Bench::with(&[]).unwrap();
    crypt(&bench, &format!("format @data --size 3M --header @h --key-file @pw {CHEAP}")).unwrap();
    let alone = crypt(&bench, "info @h").unwrap().out;
    assert_has(
        &alone,
        &[
            "sector size     4096",
            "data begins at  0",
            "bytes of data   all of its file, from there to the end",
            "can't be opened the data of this header lies in a file of its own",
        ],
    );
    let json: serde_json::Value = serde_json::from_str(&crypt(&bench, "info @h --json").unwrap().out).unwrap();
    assert_eq!((&json["sector_size"], &json["data_offset"]), (&4096.into(), &0.into()));
    assert_eq!(json["data_bytes"], serde_json::Value::Null);

    for (more, size, begin) in [(CHEAP, 512, 16 << 20), (CHEAP_LUKS1, 512, 2 << 20)] {
        let bench = volume("20M", &format!("--sector-size 512 {more}"));
        bench.open("a").set_len(begin).unwrap();
        let cut = crypt(&bench, "info @a").unwrap().out;
        assert_has(&cut, &[&format!("sector size     {size}"), &format!("data begins at  {begin}"), "cut off"]);
        assert!(!cut.contains("unknown"), "{cut}");
    }

    let bench = volume("20M", CHEAP);
    crypt(&bench, "remove-key @a --slot 0 --last").unwrap();
    let table = crypt(&bench, "info @a").unwrap().out;
    assert_has(&table, &["key             not said by any keyslot", "keyslots        none"]);
}

#[test]
fn an_empty_key_file_is_named_in_the_error() {
    let bench = volume("20M", CHEAP);
    fs::write(bench.path("empty"), "").unwrap();
    let text = refused(&bench, "test-passphrase @a --key-file @empty");
    assert_has(&text, &["no keyslot opens", "the passphrase is empty", "the key file or descriptor"]);
    crypt(&bench, &format!("add-key @a --key-file @pw --new-key-file @other --slot 1 {CHEAP}")).unwrap();
    let text = refused(&bench, "remove-key @a --slot 1 --key-file @empty");
    assert_has(&text, &["the passphrase is empty"]);
    for line in ["format @b --size 20M --key-file @empty", "add-key @a --key-file @pw --new-key-file @empty"] {
        assert_has(&refused(&bench, line), &["the key file", "empty is empty", "/dev/urandom"]);
    }
}
