//! Keys that are changed while a volume is served, by two programs at once, and by one that is killed amid.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::process::parent_id;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

use crate::commands::{CHEAP, crypt, opening};
use crate::common::served::{Client, Served, Setup, command};
use crate::common::*;
use pagemill_crypt::commands::Opened;
use pagemill_crypt::{Error, Store};

const BY_CRYPTSETUP: &str = "-q --pbkdf pbkdf2 --pbkdf-force-iterations 1000";

fn opens(bench: &Bench, volume: &str, pw: &str) -> bool {
    match crypt(bench, &format!("test-passphrase {volume} --key-file @{pw}")) {
        Ok(_) => true,
        Err(Error::WrongPassphrase { .. }) => false,
        Err(error) => panic!("{error}"),
    }
}

/// Whether a program waits for the lock of this file.
pub(crate) fn is_awaited(file: &File) -> bool {
    let inode = format!(":{} ", file.metadata().unwrap().ino());
    fs::read_to_string("/proc/locks").unwrap().lines().any(|line| line.contains("-> FLOCK") && line.contains(&inode))
}

#[test]
fn keys_change_beside_a_server_under_load() {
    let Some(bench) = Bench::with(&["cryptsetup"]) else { return };
    write(&bench.path("third"), b"third");
    for (volume, header, format) in [
        ("@a", "a", format!("--size 20M {CHEAP}")),
        ("@b", "b", "--size 6M --type luks1 --kdf-iterations 1000".to_owned()),
        ("@data --header @header", "header", format!("--size 4M {CHEAP}")),
    ] {
        let kdf = if header == "b" { "--kdf-iterations 1000" } else { CHEAP };
        crypt(&bench, &format!("format {volume} {format} --key-file @pw")).unwrap();
        let Opened { data, volume: open, claim, .. } =
            opening(&bench, &format!("{volume} --key-file @pw")).open(true).unwrap();
        let len = open.geometry().len as usize;
        let served = Served::start(&bench, data, open, Setup::new()).unwrap();
        let (is_over, rounds) = (AtomicBool::new(false), std::sync::atomic::AtomicUsize::new(0));
        let plain = pattern(len);
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut client = Client::connect(&served);
                let part = 64 << 10;
                // At least once over the whole volume.
                for round in 0.. {
                    if is_over.load(Relaxed) && round >= len / part {
                        break;
                    }
                    let at = round * part % len;
                    client.write(at as u64, &plain[at..at + part], 0).unwrap();
                    assert!(client.read(at as u64, part).unwrap() == plain[at..at + part], "at {at}");
                    rounds.store(round, Relaxed);
                }
                client.ask(command::FLUSH, 0, 0, 0).unwrap();
            });
            let under_load = || {
                let before = rounds.load(Relaxed);
                until("a request", || rounds.load(Relaxed) != before);
            };
            for _ in 0..3 {
                under_load();
                bench.ok(&format!("cryptsetup luksAddKey {BY_CRYPTSETUP} --key-file pw {header} other"));
                assert!(crypt(&bench, &format!("info {volume}")).unwrap().out.contains("keyslot 1"));
                assert!(opens(&bench, volume, "other") && !opens(&bench, volume, "wrong"));
                under_load();
                bench.ok(&format!("cryptsetup luksChangeKey {BY_CRYPTSETUP} --key-file other {header} wrong"));
                assert!(opens(&bench, volume, "wrong") && !opens(&bench, volume, "other"));
                under_load();
                crypt(&bench, &format!("add-key {volume} --key-file @wrong --new-key-file @other {kdf}")).unwrap();
                bench.ok(&format!("cryptsetup open --test-passphrase --key-file other {header}"));
                under_load();
                let changed =
                    crypt(&bench, &format!("change-key {volume} --key-file @wrong --new-key-file @third {kdf}"));
                assert!(changed.unwrap().out.contains("the old one is wiped"));
                under_load();
                crypt(&bench, &format!("remove-key {volume} --key-file @third")).unwrap();
                let refused = bench.run(&format!("cryptsetup open --test-passphrase --key-file wrong {header}"));
                assert_eq!(refused.status.code(), Some(2));
                bench.ok(&format!("cryptsetup luksRemoveKey -q --key-file other {header}"));
                assert!(!opens(&bench, volume, "other"));
            }
            // From now on the volume has another passphrase.
            crypt(&bench, &format!("add-key {volume} --key-file @pw --new-key-file @other {kdf}")).unwrap();
            crypt(&bench, &format!("remove-key {volume} --key-file @pw")).unwrap();
            let second = opening(&bench, &format!("{volume} --key-file @other"));
            assert!(matches!(second.open(true), Err(Error::Busy(_))), "it is served already");
            is_over.store(true, Relaxed);
        });
        served.stop();
        drop(claim);
        let refused = opening(&bench, &format!("{volume} --key-file @pw")).open(true).unwrap_err();
        assert!(matches!(refused, Error::WrongPassphrase { .. }), "{refused}");
        let Opened { data, volume: open, .. } =
            opening(&bench, &format!("{volume} --key-file @other")).open(true).unwrap();
        let mut there = vec![0; len];
        data.read_at(&mut there, open.geometry().offset).unwrap();
        open.decrypt_in_place(0, &mut there).unwrap();
        assert!(there == plain, "{volume}");
    }
}

#[test]
fn a_server_that_asks_for_its_passphrase_locks_no_header() {
    let Some(bench) = Bench::with(&["cryptsetup"]) else { return };
    crypt(&bench, &format!("format @a --size 20M --key-file @pw {CHEAP}")).unwrap();
    crypt(&bench, &format!("add-key @a --key-file @pw --new-key-file @other {CHEAP}")).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, bench.path("typed"), rustix::fs::Mode::RWXU).unwrap();
    thread::scope(|scope| {
        let server = scope.spawn(|| opening(&bench, "@a --key-file @typed").open(true));
        // This returns once the server waits for the passphrase.
        let mut typed = File::options().write(true).open(bench.path("typed")).unwrap();
        let image = bench.open("a");
        image.try_lock().unwrap();
        drop(image);
        bench.ok("cryptsetup luksKillSlot -q --key-file other a 0");
        typed.write_all(PASSPHRASE).unwrap();
        drop(typed);
        let opened = server.join().unwrap();
        assert!(matches!(opened, Err(Error::WrongPassphrase { .. })), "the old passphrase is refused: {opened:?}");
    });
}

#[test]
fn a_change_that_waits_for_its_passphrase_locks_no_header() {
    let bench = Bench::with(&[]).unwrap();
    crypt(&bench, &format!("format @a --size 20M --key-file @pw {CHEAP}")).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, bench.path("typed"), rustix::fs::Mode::RWXU).unwrap();
    let add = format!("add-key @a --key-file @pw --new-key-file @typed {CHEAP}");
    thread::scope(|scope| {
        let added = scope.spawn(|| crypt(&bench, &add));
        let mut typed = File::options().write(true).open(bench.path("typed")).unwrap();
        bench.open("a").try_lock().unwrap();
        // The passphrase that permitted the change is removed before it is made.
        crypt(&bench, &format!("add-key @a --key-file @pw --new-key-file @other {CHEAP}")).unwrap();
        crypt(&bench, "remove-key @a --key-file @pw").unwrap();
        typed.write_all(b"new").unwrap();
        drop(typed);
        let added = added.join().unwrap();
        assert!(matches!(added, Err(Error::WrongPassphrase { .. })), "{added:?}");
    });
    write(&bench.path("new"), b"new");
    assert!(!opens(&bench, "@a", "new") && opens(&bench, "@a", "other"));
}

#[test]
fn a_locked_header_is_waited_for() {
    let bench = Bench::with(&[]).unwrap();
    crypt(&bench, &format!("format @a --size 20M --key-file @pw {CHEAP}")).unwrap();
    let held = bench.open("a");
    held.lock_shared().unwrap();
    assert!(crypt(&bench, "info @a").unwrap().out.contains("keyslot 0"), "readers share it");
    for (line, expected) in [
        (format!("add-key @a --key-file @pw --new-key-file @other {CHEAP}"), "keyslot 1"),
        ("remove-key @a --key-file @other".to_owned(), "keyslot 1 is wiped"),
        (format!("format @a --force --key-file @pw {CHEAP}"), "LUKS2"),
    ] {
        held.lock_shared().unwrap();
        thread::scope(|scope| {
            let changed = scope.spawn(|| crypt(&bench, &line));
            until("the wait for the lock", || is_awaited(&held));
            held.unlock().unwrap();
            assert!(changed.join().unwrap().unwrap().out.contains(expected), "{line}");
        });
    }
    held.lock().unwrap();
    thread::scope(|scope| {
        let shown = scope.spawn(|| crypt(&bench, "info @a"));
        until("the wait for the lock", || is_awaited(&held));
        held.unlock().unwrap();
        assert!(shown.join().unwrap().is_ok());
    });
}

/// The test runs itself in another process, whose standard error it reads.
#[test]
fn a_command_says_that_it_waits_for_a_headers_lock() {
    const IMAGE: &str = "PAGEMILL_CRYPT_TEST_LOCKED";
    let bench = Bench::with(&[]).unwrap();
    if let Some(image) = std::env::var_os(IMAGE) {
        crypt(&bench, &format!("info {}", image.display())).unwrap();
        return;
    }
    crypt(&bench, &format!("format @a --size 20M --key-file @pw {CHEAP}")).unwrap();
    let held = bench.open("a");
    held.lock().unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "keys_served::a_command_says_that_it_waits_for_a_headers_lock"])
        .env(IMAGE, bench.path("a"))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut said = BufReader::new(child.stderr.take().unwrap());
    said.read_line(&mut line).unwrap();
    assert!(line.ends_with("a: another program has its header locked: waiting for it\n"), "{line}");
    held.unlock().unwrap();
    assert!(child.wait().unwrap().success());
}

#[test]
fn changes_by_several_programs_at_once_are_all_made() {
    let Some(bench) = Bench::with(&["cryptsetup"]) else { return };
    crypt(&bench, &format!("format @a --size 20M --key-file @pw {CHEAP}")).unwrap();
    let key = |who: usize, n: usize| format!("key{who}-{n}");
    for (who, n) in (0..3).flat_map(|who| (0..4).map(move |n| (who, n))) {
        write(&bench.path(&key(who, n)), key(who, n).as_bytes());
    }
    let bench = &bench;
    thread::scope(|scope| {
        for who in 0..2 {
            scope.spawn(move || {
                for n in 0..4 {
                    let new = key(who, n);
                    crypt(bench, &format!("add-key @a --key-file @pw --new-key-file @{new} {CHEAP}")).unwrap();
                    if n % 2 == 1 {
                        crypt(bench, &format!("remove-key @a --key-file @{new}")).unwrap();
                    }
                }
            });
        }
        scope.spawn(move || {
            for n in 0..4 {
                let new = key(2, n);
                // It gives up when another program has changed the header since it was read.
                let by_cryptsetup = |line: &str| until(line, || bench.run(line).status.success());
                by_cryptsetup(&format!("cryptsetup luksAddKey {BY_CRYPTSETUP} --key-file pw a {new}"));
                if n % 2 == 1 {
                    by_cryptsetup(&format!("cryptsetup luksRemoveKey -q --key-file {new} a"));
                }
            }
        });
    });
    for (who, n) in (0..3).flat_map(|who| (0..4).map(move |n| (who, n))) {
        assert_eq!(opens(bench, "@a", &key(who, n)), n % 2 == 0, "{who} {n}");
        let tried = bench.run(&format!("cryptsetup open --test-passphrase --key-file {} a", key(who, n)));
        assert_eq!(tried.status.success(), n % 2 == 0, "{who} {n}");
    }
    let info: serde_json::Value = serde_json::from_str(&crypt(bench, "info @a --json").unwrap().out).unwrap();
    assert_eq!((info["keyslots"].as_array().unwrap().len(), &info["faults"]), (7, &serde_json::json!([])));
}

/// Changes the volume's passphrase to the other one and back, until it is killed or the test has ended.
fn change_for_ever(folder: &Path) {
    let (bench, test) = (Bench::in_folder(folder), parent_id());
    // It does not outlive the test.
    for round in (0..).take_while(|_: &u32| parent_id() == test) {
        let (old, new) = if opens(&bench, "@a", "pw") { ("pw", "other") } else { ("other", "pw") };
        let change = match (opens(&bench, "@a", new), round % 2) {
            (true, _) => format!("remove-key @a --key-file @{old}"),
            (false, 0) => format!("change-key @a --key-file @{old} --new-key-file @{new} {CHEAP}"),
            (false, _) => format!("add-key @a --key-file @{old} --new-key-file @{new} {CHEAP}"),
        };
        crypt(&bench, &change).unwrap();
    }
}

/// The test runs itself in other processes, which are killed.
#[test]
fn a_change_that_is_killed_leaves_a_header_that_opens() {
    const FOLDER: &str = "PAGEMILL_CRYPT_TEST_CHANGES_IN";
    if let Some(folder) = std::env::var_os(FOLDER) {
        change_for_ever(Path::new(&folder));
        return;
    }
    let Some(bench) = Bench::with(&["cryptsetup"]) else { return };
    crypt(&bench, &format!("format @a --size 20M --key-file @pw {CHEAP}")).unwrap();
    let opened = opening(&bench, "@a --key-file @pw").open(true).unwrap();
    // The sequence number, which grows with every change.
    let changes = || {
        let mut number = [0; 8];
        bench.open("a").read_exact_at(&mut number, 16).unwrap();
        u64::from_be_bytes(number)
    };
    for round in 0..20 {
        let before = changes();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "keys_served::a_change_that_is_killed_leaves_a_header_that_opens"])
            .env(FOLDER, bench.path(""))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        until("a change", || changes() > before + round % 3 || child.try_wait().unwrap().is_some());
        for _ in 0..round * 50 {
            thread::yield_now();
        }
        child.kill().unwrap();
        assert!(std::os::unix::process::ExitStatusExt::signal(&child.wait().unwrap()) == Some(9), "it ended by itself");
        let tried = ["pw", "other"]
            .map(|pw| bench.run(&format!("cryptsetup open --test-passphrase --key-file {pw} a")).status.success());
        assert_eq!(tried, ["pw", "other"].map(|pw| opens(&bench, "@a", pw)), "round {round}");
        assert!(tried.contains(&true), "round {round}: no passphrase opens it");
    }
    drop(opened);
}

#[test]
fn the_last_key_of_a_served_volume_is_not_removed() {
    let bench = Bench::with(&[]).unwrap();
    for (volume, lines) in [
        ("@a", vec!["remove-key @a --last --key-file @pw", "remove-key @a --last --slot 0"]),
        // The header is in use too.
        (
            "@data --header @header",
            vec![
                "remove-key @data --header @header --last --slot 0",
                "remove-key @header --last --slot 0",
                "format @another --size 20M --header @header --force --key-file @pw",
            ],
        ),
    ] {
        crypt(&bench, &format!("format {volume} --size 20M --key-file @pw {CHEAP}")).unwrap();
        for may_write in [true, false] {
            let opened = opening(&bench, &format!("{volume} --key-file @pw")).open(may_write).unwrap();
            for line in &lines {
                let refused = crypt(&bench, line).unwrap_err();
                assert!(matches!(refused, Error::Busy(_)), "{line}: {refused}");
            }
            drop(opened);
        }
        crypt(&bench, lines[0]).unwrap();
    }
}

#[test]
fn a_passphrase_opens_while_its_keyslot_is_made_anew() {
    let bench = Bench::with(&[]).unwrap();
    crypt(&bench, &format!("format @a --size 20M --key-file @pw {CHEAP}")).unwrap();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let tried = scope.spawn(|| {
            while !is_over.load(Relaxed) {
                assert!(opens(&bench, "@a", "pw"));
                opening(&bench, "@a --key-file @pw").open(true).unwrap();
            }
        });
        // Each moves the key material.
        for _ in 0..40 {
            crypt(&bench, &format!("change-key @a --key-file @pw --new-key-file @pw {CHEAP}")).unwrap();
        }
        is_over.store(true, Relaxed);
        tried.join().unwrap();
    });
}

/// The lock of `cryptsetup reencrypt` for the volume `a`.
fn reencryption_lock(bench: &Bench) -> String {
    let info: serde_json::Value = serde_json::from_str(&crypt(bench, "info @a --json").unwrap().out).unwrap();
    format!("/run/cryptsetup/LN_LUKS2-reencryption-{}", info["uuid"].as_str().unwrap())
}

#[test]
fn a_served_volume_is_not_reencrypted() {
    let Some(bench) = Bench::with(&["cryptsetup"]) else { return };
    crypt(&bench, &format!("format @a --size 20M --key-file @pw {CHEAP}")).unwrap();
    let lock = reencryption_lock(&bench);
    if fs::create_dir_all("/run/cryptsetup").and_then(|()| File::create(&lock)).is_err() {
        eprintln!("skipped: this user may not lock in /run/cryptsetup");
        return;
    }
    let held = File::open(&lock).unwrap();
    held.lock().unwrap();
    let refused = opening(&bench, "@a --key-file @pw").open(true).unwrap_err();
    assert!(matches!(refused, Error::Busy(_)), "{refused}");
    fs::remove_file(&lock).unwrap();
    drop(held);
    rustix::fs::mkfifoat(rustix::fs::CWD, bench.path("typed"), rustix::fs::Mode::RWXU).unwrap();
    thread::scope(|scope| {
        let server = scope.spawn(|| opening(&bench, "@a --key-file @typed").open(true));
        let mut typed = File::options().write(true).open(bench.path("typed")).unwrap();
        bench.ok(&format!("cryptsetup luksUUID -q --uuid {} a", uuid::Uuid::new_v4()));
        typed.write_all(PASSPHRASE).unwrap();
        drop(typed);
        let _opened = server.join().unwrap().unwrap();
        let lock = reencryption_lock(&bench);
        assert!(File::open(&lock).is_ok_and(|file| file.try_lock().is_err()), "it is of the UUID in the end: {lock}");
    });
    let lock = reencryption_lock(&bench);
    let data = |bench: &Bench| fs::read(bench.path("a")).unwrap().split_off(16 << 20);
    fill(&bench.open("a"), &bench.open("a"), false, &pattern(4 << 20));
    let before = data(&bench);
    let readers = [0; 2].map(|_| opening(&bench, "@a --key-file @pw").open(false).unwrap());
    let refused = bench.run(&format!("cryptsetup reencrypt {BY_CRYPTSETUP} --force-offline-reencrypt --key-file pw a"));
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("already running"), "{said}");
    assert!(data(&bench) == before, "the data is as it was");
    drop(readers);
    assert!(fs::metadata(&lock).is_err(), "the last one removes the lock's file");
    // It has marked the header, which keeps a server out until it has done its work.
    let refused = opening(&bench, "@a --key-file @pw").open(true).unwrap_err();
    assert!(matches!(refused, Error::Unsupported(_)), "{refused}");
    bench.ok("cryptsetup reencrypt -q --resume-only --force-offline-reencrypt --key-file pw a");
    assert!(contents(&bench.open("a"), &bench.open("a"), false) == pattern(4 << 20));
}
