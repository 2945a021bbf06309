//! All keyslots are destroyed at once.
use std::fs;
use std::os::unix::fs::FileExt;
use std::process::Command;

use crate::commands::{CHEAP, crypt, opening};
use crate::common::*;
use crate::headers::{Disk, image, luks1_image, opened};
use pagemill_crypt::backup::Backup;
use pagemill_crypt::kdf::KdfKind;
use pagemill_crypt::{Error, Luks};

/// Volumes of each kind: how to name them, the header's file, how to make them.
pub(crate) const VOLUMES: [(&str, &str, &str); 4] = [
    ("@a", "a", "--size 20M --kdf-iterations 4 --kdf-memory 64 --kdf-lanes 1"),
    ("@b", "b", "--size 6M --type luks1 --kdf-iterations 1000"),
    ("@c --header @ch", "ch", "--size 4M --kdf-iterations 4 --kdf-memory 64 --kdf-lanes 1"),
    ("@d --header @dh", "dh", "--size 4M --type luks1 --kdf-iterations 1000"),
];

/// Options for a cheap keyslot of each kind.
pub(crate) fn cheap_for(format: &str) -> &'static str {
    if format.contains("luks1") { "--kdf-iterations 1000" } else { CHEAP }
}

#[test]
fn an_erased_volume_opens_with_no_passphrase() {
    let Some(bench) = Bench::with(&["cryptsetup"]) else { return };
    for (volume, header, format) in VOLUMES {
        crypt(&bench, &format!("format {volume} {format} --key-file @pw")).unwrap();
        let cheap = cheap_for(format);
        crypt(&bench, &format!("add-key {volume} --key-file @pw --new-key-file @other --slot 5 {cheap}")).unwrap();
        let before = fs::read(bench.path(header)).unwrap();
        let info: serde_json::Value =
            serde_json::from_str(&crypt(&bench, &format!("info {volume} --json")).unwrap().out).unwrap();
        let said = crypt(&bench, &format!("erase {volume} --force")).unwrap();
        assert!(said.out.ends_with("all keyslots are wiped\n") && said.warnings.is_empty(), "{said:?}");
        for pw in ["pw", "other"] {
            let refused = crypt(&bench, &format!("test-passphrase {volume} --key-file @{pw}")).unwrap_err();
            assert!(matches!(refused, Error::NoKeyslots), "{volume}: {refused}");
            let refused = bench.run(&format!("cryptsetup open --test-passphrase --key-file {pw} {header}"));
            assert!(!refused.status.success(), "{volume}");
        }
        let dump = bench.ok(&format!("cryptsetup luksDump {header}"));
        assert!(!dump.contains("ENABLED") && !dump.contains("PBKDF:"), "{dump}");
        // The key material is gone, all of it.
        let after = fs::read(bench.path(header)).unwrap();
        for slot in info["keyslots"].as_array().unwrap() {
            let at = slot["area_offset"].as_u64().unwrap() as usize;
            let len = slot["area_bytes"].as_u64().unwrap().min(64 * 4000) as usize;
            let same = (at..at + len).filter(|&at| before[at] == after[at]).count();
            assert!(same < len / 64, "{volume}: {same} of {len} bytes at {at} are as they were");
        }
        // Again there is nothing to do, and it is no error.
        crypt(&bench, &format!("erase {volume} --force --json")).unwrap();
    }
}

/// The test runs itself in another process, which has no terminal.
#[test]
fn erase_without_a_terminal_and_without_force_is_refused() {
    const FOLDER: &str = "PAGEMILL_CRYPT_TEST_ERASE_IN";
    if let Some(folder) = std::env::var_os(FOLDER) {
        let refused = crypt(&Bench::in_folder(folder.as_ref()), "erase @a").unwrap_err();
        return eprintln!("refused: {refused}");
    }
    let bench = Bench::with(&[]).unwrap();
    crypt(&bench, &format!("format @a --size 20M --key-file @pw {CHEAP}")).unwrap();
    let child = Command::new("setsid")
        .arg("--wait")
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "erase::erase_without_a_terminal_and_without_force_is_refused", "--nocapture"])
        .env(FOLDER, bench.path(""))
        .output()
        .unwrap_or_else(|error| panic!("setsid, of Debian's package util-linux: {error}"));
    let said = String::from_utf8_lossy(&child.stderr).into_owned();
    assert!(child.status.success() && said.contains("no passphrase will open it"), "{said}");
    assert!(said.contains("if you do, say --force"), "{said}");
    crypt(&bench, "test-passphrase @a --key-file @pw").unwrap();
}

/// A restoration that was killed leaves key material that the newer header does not name. With the salts that `luksDump`
/// has printed before, it would open the volume.
#[test]
fn an_erase_leaves_no_key_material_of_a_killed_restoration() {
    for (bytes, first, end) in [(image(), 32 << 10, 16 << 20), (luks1_image(), 4096, 2 << 20)] {
        let disk = Disk::of(bytes);
        let (mut luks, key) = opened(&disk);
        luks.add_key(&disk, &key, b"third", &cheap(KdfKind::Pbkdf2), Some(2)).unwrap();
        let backup = Backup::take(luks.clone(), &disk).unwrap();
        luks.add_key(&disk, &key, OTHER, &cheap(KdfKind::Pbkdf2), Some(1)).unwrap();
        for number in [0, 2] {
            luks.remove_key(&disk, number, false).unwrap();
        }
        luks.add_key(&disk, &key, OTHER, &cheap(KdfKind::Pbkdf2), Some(0)).unwrap();
        let disk = Disk::watched(disk.now.take());
        backup.restore(&disk, Some(&luks)).unwrap();
        for (i, crashed) in disk.take_crashes().into_iter().enumerate() {
            let disk = Disk::of(crashed.clone());
            Luks::read(&disk).unwrap().erase(&disk).unwrap();
            let after = disk.now.take();
            let kept = (first..end)
                .step_by(512)
                .filter(|&at| crashed[at..at + 512] == after[at..at + 512] && crashed[at..at + 512] != [0; 512]);
            assert_eq!(kept.collect::<Vec<usize>>(), [0; 0], "crash {i}");
            assert!(Luks::read(&Disk::of(after.clone())).unwrap().openers().is_empty());
            assert!(crashed[end..] == after[end..]);
        }
    }
}

#[test]
fn erase_refuses_a_volume_in_use() {
    let bench = Bench::with(&[]).unwrap();
    for (volume, header, format) in VOLUMES {
        crypt(&bench, &format!("format {volume} {format} --key-file @pw")).unwrap();
        let before = fs::read(bench.path(header)).unwrap();
        for may_write in [true, false] {
            let opened = opening(&bench, &format!("{volume} --key-file @pw")).open(may_write).unwrap();
            let refused = crypt(&bench, &format!("erase {volume} --force")).unwrap_err();
            assert!(matches!(refused, Error::Busy(_)), "{volume}: {refused}");
            let refused = crypt(&bench, &format!("erase @{header} --force")).unwrap_err();
            assert!(matches!(refused, Error::Busy(_)), "a detached header alone: {refused}");
            drop(opened);
        }
        assert!(fs::read(bench.path(header)).unwrap() == before, "{volume}");
    }
    let refused = crypt(&bench, "erase @pw --force").unwrap_err();
    assert!(matches!(&refused, Error::NoHeader { file } if file.ends_with("pw")), "{refused}");
}

#[test]
fn keyslots_of_unknown_kinds_and_their_tokens_are_unbound_by_an_erase() {
    let Some(bench) = Bench::with(&["cryptsetup"]) else { return };
    crypt(&bench, &format!("format @a --size 20M --key-file @pw {CHEAP}")).unwrap();
    write(&bench.path("token"), br#"{"type":"of-another","keyslots":["0"]}"#);
    bench.ok("cryptsetup token import --json-file token a");
    let mut bytes = fs::read(bench.path("a")).unwrap();
    crate::headers::with_metadata(&mut bytes, |json| {
        let mut slot = json["keyslots"]["0"].clone();
        slot["type"] = "of-another".into();
        slot["area"]["offset"] = (8u64 << 20).to_string().into();
        json["keyslots"]["3"] = slot;
    });
    bytes[8 << 20..][..4096].fill(7);
    write(&bench.path("a"), &bytes);
    crypt(&bench, "erase @a --force").unwrap();
    let mut there = [0; 4096];
    bench.open("a").read_exact_at(&mut there, 8 << 20).unwrap();
    assert!(there.iter().filter(|&&byte| byte == 7).count() < 100);
    let json: serde_json::Value =
        serde_json::from_str(&bench.ok("cryptsetup luksDump --dump-json-metadata a")).unwrap();
    assert_eq!((&json["keyslots"], &json["tokens"]["0"]["keyslots"]), (&serde_json::json!({}), &serde_json::json!([])));
    assert!(Luks::read(&bench.open("a")).unwrap().faults().is_empty());
}
