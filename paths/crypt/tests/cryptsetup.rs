//! Headers, compared with `cryptsetup` in both directions: each opens what the other makes, with the same volume key.

use crate::common::*;
use pagemill_crypt::kdf::KdfKind;
use pagemill_crypt::{Error, Luks};

/// Every function and every sector size, each with both key sizes.
const KINDS: [(KdfKind, &str, u64); 4] = [
    (KdfKind::Argon2id, "argon2id", 512),
    (KdfKind::Argon2i, "argon2i", 1024),
    (KdfKind::Pbkdf2, "pbkdf2", 2048),
    (KdfKind::Argon2id, "argon2id", 4096),
];

/// `cryptsetup`'s options for a cheap function.
fn cheap_words(kdf: &str) -> String {
    match kdf {
        "pbkdf2" => "--pbkdf pbkdf2 --pbkdf-force-iterations 1000".to_owned(),
        other => format!("--pbkdf {other} --pbkdf-force-iterations 4 --pbkdf-memory 64 --pbkdf-parallel 2"),
    }
}

/// Both find the same key in `image` with the right passphrase, and neither with a wrong one.
fn both_agree(bench: &Bench, image: &str, slot: u32, passphrase: &[u8], pw: &str) {
    let file = bench.open(image);
    let (number, key) = unlock(&file, passphrase).unwrap();
    assert_eq!(number, slot, "{image}");
    assert_eq!(&key[..], bench.key_by_cryptsetup(image, pw), "{image}");
    assert!(matches!(unlock(&file, b"wrong"), Err(Error::WrongPassphrase { .. })), "{image}");
    let refused = bench.run(&format!("cryptsetup open --test-passphrase --key-file wrong {image}"));
    assert_eq!(refused.status.code(), Some(2), "{image}");
}

#[test]
fn cryptsetup_opens_volumes_formatted_here() {
    let Some(bench) = Bench::with(&["cryptsetup"]) else { return };
    for bits in [256, 512] {
        for (kind, kdf, sector) in KINDS {
            let file = bench.file("a", 20 * MIB);
            Luks::format(&file, &new(2, bits, sector, kind), PASSPHRASE).unwrap();
            both_agree(&bench, "a", 0, PASSPHRASE, "pw");
            let dump = bench.ok("cryptsetup luksDump a");
            for word in
                [kdf, &format!("sector: {sector} [bytes]"), &format!("Key:        {bits} bits"), "aes-xts-plain64"]
            {
                assert!(dump.contains(word), "{bits} {kdf} {sector}: no {word:?} in {dump}");
            }
        }
        let file = bench.file("a", 20 * MIB);
        Luks::format(&file, &new(1, bits, 512, KdfKind::Pbkdf2), PASSPHRASE).unwrap();
        both_agree(&bench, "a", 0, PASSPHRASE, "pw");
        assert!(bench.ok("cryptsetup luksDump a").contains(&format!("MK bits:       \t{bits}")));
    }
}

#[test]
fn volumes_formatted_by_cryptsetup_open() {
    let Some(bench) = Bench::with(&["cryptsetup"]) else { return };
    for bits in [256, 512] {
        for (_, kdf, sector) in KINDS {
            bench.file("a", 20 * MIB);
            let cheap = cheap_words(kdf);
            bench.ok(&format!(
                "cryptsetup luksFormat -q --type luks2 -s {bits} --sector-size {sector} {cheap} --key-file pw a"
            ));
            both_agree(&bench, "a", 0, PASSPHRASE, "pw");
            let geometry = Luks::read(&bench.open("a")).unwrap().geometry(20 * MIB, false).unwrap();
            assert_eq!((geometry.offset, geometry.len), (16 * MIB, 4 * MIB));
            assert_eq!(geometry.sector_size.bytes() as u64, sector);
        }
        for hash in ["sha1", "sha256", "sha512"] {
            bench.file("a", 20 * MIB);
            let cheap = cheap_words("pbkdf2");
            bench.ok(&format!("cryptsetup luksFormat -q --type luks1 -s {bits} --hash {hash} {cheap} --key-file pw a"));
            both_agree(&bench, "a", 0, PASSPHRASE, "pw");
            let geometry = Luks::read(&bench.open("a")).unwrap().geometry(20 * MIB, false).unwrap();
            assert_eq!((geometry.offset, geometry.len), (2 * MIB, 18 * MIB));
        }
    }
}

#[test]
fn cryptsetup_and_this_crate_add_and_remove_keys_in_turn() {
    let Some(bench) = Bench::with(&["cryptsetup"]) else { return };
    for version in [1, 2] {
        let file = bench.file("a", 20 * MIB);
        let kind = KdfKind::Pbkdf2;
        let mut luks = Luks::format(&file, &new(version, 512, 512, kind), PASSPHRASE).unwrap();
        let (_, key) = unlock(&file, PASSPHRASE).unwrap();
        assert_eq!(luks.add_key(&file, &key, OTHER, &cheap(kind), Some(3)).unwrap(), 3);
        both_agree(&bench, "a", 3, OTHER, "other");
        bench.ok(&format!("cryptsetup luksAddKey -q {} --key-file pw a wrong", cheap_words("pbkdf2")));
        assert_eq!(unlock(&file, b"wrong").unwrap().0, 1);
        bench.ok("cryptsetup luksKillSlot -q --key-file pw a 1");
        let mut luks_now = Luks::read(&file).unwrap();
        assert_eq!(luks_now.used(), [0, 3]);
        luks_now.remove_key(&file, 0, false).unwrap();
        assert!(matches!(luks_now.remove_key(&file, 3, false), Err(Error::LastKeyslot(3))));
        both_agree(&bench, "a", 3, OTHER, "other");
        let refused = bench.run("cryptsetup open --test-passphrase --key-file pw a");
        assert_eq!(refused.status.code(), Some(2));
        luks_now.remove_key(&file, 3, true).unwrap();
        assert!(Luks::read(&file).unwrap().used().is_empty());
        assert!(!bench.ok("cryptsetup luksDump a").contains("ENABLED"));
    }
}

#[test]
fn unknown_metadata_survives_a_change() {
    let Some(bench) = Bench::with(&["cryptsetup"]) else { return };
    bench.file("a", 20 * MIB);
    bench
        .ok(&format!("cryptsetup luksFormat -q --type luks2 --label home {} --key-file pw a", cheap_words("argon2id")));
    write(&bench.path("token"), br#"{"type":"of-another","keyslots":["0"],"what":{"ever":[1,2]}}"#);
    bench.ok("cryptsetup token import --json-file token a");
    bench.ok("cryptsetup config --key-slot 0 --priority prefer a");
    let file = bench.open("a");
    let mut luks = Luks::read(&file).unwrap();
    let (_, key) = unlock(&file, PASSPHRASE).unwrap();
    luks.add_key(&file, &key, OTHER, &cheap(KdfKind::Argon2i), None).unwrap();
    both_agree(&bench, "a", 1, OTHER, "other");
    let json = bench.ok("cryptsetup luksDump --dump-json-metadata a");
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["tokens"]["0"]["what"]["ever"][1], 2);
    assert_eq!(json["keyslots"]["0"]["priority"], 2);
    assert!(bench.ok("cryptsetup luksDump a").contains("home"));
    // References to a removed keyslot are removed, which `cryptsetup` checks.
    luks.remove_key(&file, 0, false).unwrap();
    let json: serde_json::Value =
        serde_json::from_str(&bench.ok("cryptsetup luksDump --dump-json-metadata a")).unwrap();
    assert_eq!(json["tokens"]["0"]["keyslots"], serde_json::json!([]));
}

#[test]
fn keyslots_are_tried_by_priority() {
    let Some(bench) = Bench::with(&["cryptsetup"]) else { return };
    let file = bench.file("a", 20 * MIB);
    let mut luks = Luks::format(&file, &new(2, 512, 512, KdfKind::Pbkdf2), PASSPHRASE).unwrap();
    let (_, key) = unlock(&file, PASSPHRASE).unwrap();
    luks.add_key(&file, &key, PASSPHRASE, &cheap(KdfKind::Pbkdf2), Some(7)).unwrap();
    assert_eq!(unlock(&file, PASSPHRASE).unwrap().0, 0);
    bench.ok("cryptsetup config --key-slot 7 --priority prefer a");
    assert_eq!(unlock(&file, PASSPHRASE).unwrap().0, 7);
    bench.ok("cryptsetup config --key-slot 7 --priority ignore a");
    assert_eq!(unlock(&file, PASSPHRASE).unwrap().0, 0);
    let named = Luks::read(&file).unwrap().unlock(&file, PASSPHRASE, Some(7), &Default::default()).unwrap();
    assert_eq!(named.0, 7);
}

#[test]
fn headers_of_every_size_are_read_and_repaired() {
    let Some(bench) = Bench::with(&["cryptsetup"]) else { return };
    for kib in [16, 32, 64, 128, 256, 512, 1024, 2048, 4096] {
        let file = bench.file("a", 40 * MIB);
        let cheap_words = cheap_words("pbkdf2");
        bench.ok(&format!(
            "cryptsetup luksFormat -q --type luks2 --luks2-metadata-size {kib}k {cheap_words} --key-file pw a"
        ));
        both_agree(&bench, "a", 0, PASSPHRASE, "pw");
        // The second copy is found without the first, and the next write restores the first.
        damage(&file, 5);
        let mut luks = Luks::read(&file).unwrap();
        assert_eq!(luks.faults().len(), 1, "{kib} KiB");
        let (_, key) = unlock(&file, PASSPHRASE).unwrap();
        luks.add_key(&file, &key, OTHER, &cheap(KdfKind::Pbkdf2), None).unwrap();
        assert!(Luks::read(&file).unwrap().faults().is_empty(), "{kib} KiB");
        both_agree(&bench, "a", 1, OTHER, "other");
    }
}

/// Flips a bit.
fn damage(file: &std::fs::File, at: u64) {
    use std::os::unix::fs::FileExt;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
}

#[test]
fn detached_headers_open_in_both_programs() {
    let Some(bench) = Bench::with(&["cryptsetup"]) else { return };
    for version in [1, 2] {
        let data = bench.file("data", 3 * MIB);
        let header = bench.file("header", 16 * MIB);
        let mut volume = new(version, 512, 512, KdfKind::Pbkdf2);
        volume.detached = Some(3 * MIB);
        Luks::format(&header, &volume, PASSPHRASE).unwrap();
        bench.ok("cryptsetup open --test-passphrase --key-file pw --header header data");
        both_agree(&bench, "header", 0, PASSPHRASE, "pw");
        let geometry = Luks::read(&header).unwrap().geometry(3 * MIB, true).unwrap();
        assert_eq!((geometry.offset, geometry.len), (0, 3 * MIB));
        drop(data);
        // The other way round.
        std::fs::remove_file(bench.path("header")).unwrap();
        let cheap_words = cheap_words("pbkdf2");
        bench.ok(&format!(
            "cryptsetup luksFormat -q --type luks{version} {cheap_words} --key-file pw --header header data"
        ));
        both_agree(&bench, "header", 0, PASSPHRASE, "pw");
        let geometry = Luks::read(&bench.open("header")).unwrap().geometry(3 * MIB, true).unwrap();
        assert_eq!((geometry.offset, geometry.len), (0, 3 * MIB));
    }
}
