//! Key files, parts of them, and standard input.
use std::fs::File;
use std::process::{Command, Stdio};

use crate::commands::{CHEAP, Program, crypt, opening};
use crate::common::*;
use clap::Parser;
use pagemill_crypt::Error;

/// A part of a file is the same passphrase for both programs.
#[test]
fn both_programs_read_the_same_part_of_a_key_file() {
    let Some(bench) = Bench::with(&["cryptsetup"]) else { return };
    let noise = pattern(9 << 20);
    write(&bench.path("noise"), &noise);
    write(&bench.path("part"), &noise[70_000..70_000 + 5000]);
    crypt(
        &bench,
        &format!("format @a --size 20M --key-file @noise --keyfile-offset 70000 --keyfile-size 5000 {CHEAP}"),
    )
    .unwrap();
    bench.ok("cryptsetup open --test-passphrase --key-file part a");
    bench.ok("cryptsetup open --test-passphrase --key-file noise --keyfile-offset 70000 --keyfile-size 5000 a");
    crypt(&bench, "test-passphrase @a --key-file @part").unwrap();
    let part = "--key-file @noise --keyfile-offset 70000 --keyfile-size 5000";
    let wrong = crypt(&bench, &format!("test-passphrase @a {}", part.replace("5000", "5001"))).unwrap_err();
    assert!(matches!(wrong, Error::WrongPassphrase { .. }), "{wrong}");
    // A new key: the first MiB and a byte; all from there on, 8 MiB less a byte.
    crypt(&bench, &format!("add-key @a {part} --new-key-file @noise --new-keyfile-size 1048577 {CHEAP}")).unwrap();
    bench.ok("cryptsetup open --test-passphrase --key-file noise --keyfile-size 1048577 a");
    crypt(&bench, &format!("change-key @a {part} --new-key-file @noise --new-keyfile-offset 1048577 {CHEAP}")).unwrap();
    bench.ok("cryptsetup open --test-passphrase --key-file noise --keyfile-offset 1048577 a");
    bench.ok("cryptsetup luksAddKey -q --pbkdf pbkdf2 --pbkdf-force-iterations 1000 --key-file noise --keyfile-offset 1048577 a other");
    crypt(&bench, &format!("remove-key @a --key-file @other --keyfile-size {}", OTHER.len())).unwrap();
    opening(&bench, "@a --key-file @noise --keyfile-size 1048577").open(false).unwrap();
    // The longest key file, and a longer one.
    write(&bench.path("longest"), &noise[..8 << 20]);
    write(&bench.path("longer"), &noise[..(8 << 20) + 1]);
    let add = |name: &str| {
        crypt(&bench, &format!("add-key @a --key-file @noise --keyfile-size 1048577 --new-key-file @{name} {CHEAP}"))
    };
    add("longest").unwrap();
    bench.ok("cryptsetup open --test-passphrase --key-file longest a");
    let refused = add("longer").unwrap_err();
    assert!(refused.to_string().contains("more than 8 MiB"), "{refused}");
}

#[test]
fn short_key_files_are_refused() {
    let bench = Bench::with(&[]).unwrap();
    crypt(&bench, &format!("format @a --size 20M --key-file @pw {CHEAP}")).unwrap();
    write(&bench.path("empty"), b"");
    let len = PASSPHRASE.len();
    for (more, word) in [
        (format!("--keyfile-size {}", len + 1), "it has 13 bytes there, and 14 should be read: check --keyfile-size"),
        (format!("--keyfile-offset 3 --keyfile-size {}", len - 2), "it has 10 bytes there"),
        (format!("--keyfile-offset {len}"), "check --keyfile-offset"),
        ("--keyfile-offset 9223372036854775807".to_owned(), "check --keyfile-offset"),
        ("--keyfile-offset 8T --keyfile-size 1".to_owned(), "check --keyfile-offset"),
    ] {
        let refused = crypt(&bench, &format!("test-passphrase @a --key-file @pw {more}")).unwrap_err();
        assert!(matches!(refused, Error::Io { .. }) && refused.to_string().contains(word), "{more}: {refused}");
        let more = more.replace("--keyfile", "--new-keyfile");
        let refused =
            crypt(&bench, &format!("add-key @a --key-file @pw --new-key-file @pw {more} {CHEAP}")).unwrap_err();
        let word = word.replace("--keyfile", "--new-keyfile");
        assert!(matches!(refused, Error::Io { .. }) && refused.to_string().contains(&word), "{more}: {refused}");
    }
    let refused = crypt(&bench, &format!("add-key @a --key-file @pw --new-key-file @empty {CHEAP}")).unwrap_err();
    assert!(refused.to_string().contains("is empty: put a key into it"), "{refused}");
    let refused = crypt(&bench, "test-passphrase @a --key-file @absent").unwrap_err();
    assert_eq!(refused.next_step(), Some("check the name"));
    for line in [
        "--key-file pw --keyfile-size 0",
        "--key-file pw --keyfile-size 8388609",
        "--key-file pw --keyfile-offset -1",
        "--keyfile-size 5",
        "--passphrase-fd 0 --keyfile-offset 5",
        "--passphrase-fd 0 --key-file pw",
    ] {
        let words = ["crypt", "test-passphrase", "a"].into_iter().chain(line.split(' '));
        assert!(Program::try_parse_from(words).is_err(), "{line}");
    }
}

/// The test runs itself in other processes, which have keys on their standard input.
#[test]
fn keys_come_from_standard_input() {
    const LINE: &str = "PAGEMILL_CRYPT_TEST_LINE";
    const FOLDER: &str = "PAGEMILL_CRYPT_TEST_KEYS_IN";
    if let (Some(line), Some(folder)) = (std::env::var_os(LINE), std::env::var_os(FOLDER)) {
        match crypt(&Bench::in_folder(folder.as_ref()), line.to_str().unwrap()) {
            Ok(said) => eprintln!("done: {}", said.out),
            Err(error) => panic!("{error}"),
        }
        return;
    }
    let Some(bench) = Bench::with(&["cryptsetup"]) else { return };
    crypt(&bench, &format!("format @a --size 20M --key-file @pw {CHEAP}")).unwrap();
    let said = |line: &str, input: Stdio| {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "key_files::keys_come_from_standard_input", "--nocapture"])
            .env(LINE, line)
            .env(FOLDER, bench.path(""))
            .stdin(input)
            .output()
            .unwrap();
        (child.status.success(), String::from_utf8_lossy(&child.stderr).into_owned())
    };
    let file = |name: &str| Stdio::from(File::open(bench.path(name)).unwrap());
    let pipe = |bytes: &[u8]| {
        let (reader, mut writer) = std::io::pipe().unwrap();
        std::io::Write::write_all(&mut writer, bytes).unwrap();
        Stdio::from(reader)
    };
    let ok = |line: &str, input: Stdio| {
        let (is_done, said) = said(line, input);
        assert!(is_done && said.contains("done: "), "{line}: {said}");
    };
    let no = |line: &str, input: Stdio, word: &str| {
        let (is_done, said) = said(line, input);
        assert!(!is_done && said.contains(word), "{line}: {said}");
    };
    // All bytes, line feeds too.
    ok(&format!("add-key @a --key-file @pw --new-key-file - {CHEAP}"), pipe(OTHER));
    ok("test-passphrase @a --key-file -", file("other"));
    bench.ok("cryptsetup open --test-passphrase --key-file other a");
    no("test-passphrase @a --key-file -", pipe(b"battery staple"), "no keyslot opens");
    // A part, of what can be sought in and of what cannot.
    let padded = [&b"padding"[..], PASSPHRASE, b"more"].concat();
    write(&bench.path("padded"), &padded);
    let part = format!("test-passphrase @a --key-file - --keyfile-offset 7 --keyfile-size {}", PASSPHRASE.len());
    ok(&part, file("padded"));
    ok(&part, pipe(&padded));
    no("test-passphrase @a --key-file - --keyfile-offset 5", pipe(b"ab"), "check --keyfile-offset");
    no("test-passphrase @a --key-file - --keyfile-offset 2", pipe(b"ab"), "check --keyfile-offset");
    no("test-passphrase @a --key-file - --keyfile-size 3", pipe(b"ab"), "it has 2 bytes there");
    // The old key and the new one, in turn.
    let both = [PASSPHRASE, b"third"].concat();
    let add = format!("add-key @a --key-file - --keyfile-size {} --new-key-file - {CHEAP}", PASSPHRASE.len());
    ok(&add, pipe(&both));
    write(&bench.path("third"), b"third");
    bench.ok("cryptsetup open --test-passphrase --key-file third a");
    no(&add, pipe(PASSPHRASE), "say how long it is with --keyfile-size");
    ok(&format!("{add} --new-keyfile-offset 2"), pipe(&[PASSPHRASE, b"--fourth"].concat()));
    write(&bench.path("fourth"), b"fourth");
    crypt(&bench, "test-passphrase @a --key-file @fourth").unwrap();
}

/// In a plain volume a key file has the key, and standard input a passphrase, which is hashed.
#[test]
fn a_part_of_a_file_is_a_plain_volumes_key() {
    let bench = Bench::with(&[]).unwrap();
    bench.file("data", 64 << 10);
    let noise = pattern(200);
    write(&bench.path("key"), &noise);
    write(&bench.path("part"), &noise[100..164]);
    let secret = |more: &str| {
        let open = opening(&bench, &format!("@data --type plain --plain-key-size 512 {more}")).open(false).unwrap();
        let mut secret = vec![0; 512];
        open.volume.encrypt(0, &[5; 512], &mut secret).unwrap();
        secret
    };
    assert_eq!(secret("--key-file @key --keyfile-offset 100 --keyfile-size 64"), secret("--key-file @part"),);
    assert_ne!(secret("--key-file @key"), secret("--key-file @part"));
}
