//! Volumes of `cryptsetup`'s that this program supports partly or not at all: each is shown, and none is called
//! damaged.

use std::fs;

use crate::commands::{CHEAP, crypt, opening};
use crate::common::*;
use pagemill_crypt::Error;

const QUICK: &str = "-q --pbkdf pbkdf2 --pbkdf-force-iterations 1000 --key-file pw";

/// A folder, and in it a volume `a` that was made with `more`.
fn made(more: &str) -> Option<Bench> {
    let bench = Bench::with(&["cryptsetup"])?;
    bench.file("a", 20 * MIB);
    let more = if more.is_empty() { String::new() } else { format!("{more} ") };
    bench.ok(&format!("cryptsetup luksFormat {more}{QUICK} a"));
    Some(bench)
}

fn info(bench: &Bench) -> serde_json::Value {
    let said = crypt(bench, "info @a --json").unwrap();
    assert!(said.warnings.is_empty(), "{:?}", said.warnings);
    serde_json::from_str(&said.out).unwrap()
}

#[test]
fn an_unbound_keyslot_of_another_key_size_does_not_matter() {
    let Some(bench) = made("--type luks2") else { return };
    write(&bench.path("key16"), &[5; 16]);
    bench.ok(&format!("cryptsetup luksAddKey {QUICK} --unbound --key-size 128 --volume-key-file key16 a other"));
    let shown = info(&bench);
    assert_eq!((&shown["not_opened"], &shown["key_bits"]), (&serde_json::Value::Null, &512.into()));
    assert_eq!((&shown["keyslots"][0]["not_used"], &shown["keyslots"][1]["key_bits"]), (&().into(), &128.into()));
    let table = crypt(&bench, "info @a").unwrap().out;
    assert!(
        table.contains("keyslot 1       pbkdf2 (sha256), 1000 iterations; not used: it holds the key of"),
        "{table}"
    );

    assert_eq!(opening(&bench, "@a --key-file @pw").open(true).unwrap().volume.geometry().len, 4 * MIB);
    let refused = crypt(&bench, "test-passphrase @a --key-file @other").unwrap_err();
    assert!(matches!(refused, Error::WrongPassphrase { tried: 1, .. }), "{refused}");
    crypt(&bench, &format!("add-key @a --key-file @pw --new-key-file @wrong {CHEAP}")).unwrap();
    crypt(&bench, "remove-key @a --key-file @pw").unwrap();
    // `cryptsetup` still accepts everything.
    assert!(bench.run("cryptsetup open --test-passphrase --key-file wrong a").status.success());
    bench.ok("cryptsetup luksDump -q --unbound --key-slot 1 --volume-key-file back --key-file other a");
    assert_eq!(fs::read(bench.path("back")).unwrap(), [5; 16]);
    crypt(&bench, "remove-key @a --slot 1 --key-file @wrong").unwrap();
    assert!(!bench.ok("cryptsetup luksDump a").contains("1: luks2"));
}

#[test]
fn a_volume_of_another_cipher_is_shown_as_unsupported() {
    for (more, cipher, bits) in [
        ("--type luks2 --cipher aes-cbc-essiv:sha256 --key-size 128", "aes-cbc-essiv:sha256", 128),
        ("--type luks2 --cipher aes-cbc-essiv:sha256 --key-size 256", "aes-cbc-essiv:sha256", 256),
        ("--type luks2 --cipher aes-xts-plain --key-size 512", "aes-xts-plain", 512),
        ("--type luks1 --cipher aes-cbc-essiv:sha256 --key-size 256", "aes-cbc-essiv:sha256", 256),
    ] {
        let Some(bench) = made(more) else { return };
        let shown = info(&bench);
        assert_eq!((&shown["cipher"], &shown["key_bits"]), (&cipher.into(), &bits.into()), "{more}");
        assert!(shown["not_opened"].as_str().is_some_and(|why| why.contains(cipher)), "{more}: {shown}");
        assert_eq!(shown["keyslots"].as_array().unwrap().len(), 1, "{more}");
        let refused = opening(&bench, "@a --key-file @pw").open(false).unwrap_err();
        assert!(matches!(&refused, Error::Unsupported(why) if why.contains(cipher)), "{more}: {refused}");
        for line in ["test-passphrase @a --key-file @pw", "add-key @a --key-file @pw --new-key-file @other"] {
            let refused = crypt(&bench, line).unwrap_err();
            assert!(matches!(&refused, Error::Unsupported(_)), "{more}: {line}: {refused}");
        }
    }
}

#[test]
fn a_keyslot_of_another_cipher_is_skipped_and_the_next_one_opens() {
    let Some(bench) = made("--type luks2 --keyslot-cipher aes-cbc-essiv:sha256 --keyslot-key-size 128") else { return };
    let whole = "can be used here: keyslot 0: its cipher is \"aes-cbc-essiv:sha256\"";
    assert!(info(&bench)["not_opened"].as_str().is_some_and(|why| why.contains(whole)));
    let refused = opening(&bench, "@a --key-file @pw").open(false).unwrap_err();
    assert!(matches!(&refused, Error::Unsupported(why) if why.contains(whole)), "{refused}");
    // Keyslot numbers far apart, and a token.
    let line = format!("cryptsetup luksAddKey {QUICK} --keyslot-cipher aes-xts-plain64 --keyslot-key-size 512");
    bench.ok(&format!("{line} --key-slot 21 a other"));
    bench.ok("cryptsetup token add --key-description some --key-slot 21 a");
    assert_eq!(info(&bench)["not_opened"], serde_json::Value::Null);
    opening(&bench, "@a --key-file @other").open(false).unwrap();
    let refused = crypt(&bench, "test-passphrase @a --key-file @pw").unwrap_err();
    assert!(matches!(refused, Error::WrongPassphrase { tried: 1, .. }), "{refused}");
    assert!(refused.to_string().contains("not tried: keyslot 0: its cipher"), "{refused}");
    crypt(&bench, &format!("add-key @a --key-file @other --new-key-file @wrong --slot 30 {CHEAP}")).unwrap();
    crypt(&bench, "remove-key @a --key-file @other --slot 30").unwrap();
    for pw in ["pw", "other"] {
        bench.ok(&format!("cryptsetup open --test-passphrase --key-file {pw} a"));
    }
    assert!(bench.ok("cryptsetup luksDump a").contains("luks2-keyring"));
}

#[test]
fn a_keyslot_with_another_hash_is_skipped() {
    let Some(bench) = made("--type luks2 --hash whirlpool") else { return };
    let refused = opening(&bench, "@a --key-file @pw").open(false).unwrap_err();
    assert!(matches!(&refused, Error::Unsupported(why) if why.contains("whirlpool")), "{refused}");
    assert!(crypt(&bench, "info @a").unwrap().out.contains("not used: the hash \"whirlpool\""));
}

#[test]
fn a_volume_that_is_being_reencrypted_is_shown_and_not_changed() {
    let Some(bench) = made("--type luks2") else { return };
    bench.file("a", 40 * MIB);
    bench.ok(&format!("cryptsetup luksFormat --type luks2 {QUICK} a"));
    bench.ok(&format!("cryptsetup reencrypt --init-only {QUICK} a"));
    let before = fs::read(bench.path("a")).unwrap();
    let shown = info(&bench);
    assert!(shown["not_opened"].as_str().is_some_and(|why| why.contains("a re-encryption is under way")), "{shown}");
    let slots = shown["keyslots"].as_array().unwrap();
    assert_eq!(slots.len(), 3, "{shown}");
    assert!(slots[2]["not_used"].as_str().is_some_and(|why| why.contains("reencrypt")), "{shown}");
    let refused = opening(&bench, "@a --key-file @pw").open(false).unwrap_err();
    assert!(matches!(refused, Error::Unsupported(_)), "{refused}");
    for line in [
        "test-passphrase @a --key-file @pw",
        "add-key @a --key-file @pw --new-key-file @other",
        "remove-key @a --key-file @pw",
        "remove-key @a --slot 2 --last --key-file @pw",
    ] {
        let refused = crypt(&bench, line).unwrap_err();
        assert!(matches!(&refused, Error::Unsupported(why) if why.contains("re-encryption")), "{line}: {refused}");
    }
    assert!(fs::read(bench.path("a")).unwrap() == before);
}

#[test]
fn a_file_system_over_the_primary_header_is_not_overwritten() {
    let Some(bench) = made("--type luks2") else { return };
    let Some(tools) = Bench::with(&["mke2fs"]) else { return };
    tools.file("fs", MIB);
    tools.ok("mke2fs -q -F fs");
    let mut bytes = fs::read(bench.path("a")).unwrap();
    bytes[..4096].copy_from_slice(&fs::read(tools.path("fs")).unwrap()[..4096]);
    write(&bench.path("a"), &bytes);
    assert!(!bench.run(&format!("cryptsetup luksAddKey {QUICK} a other")).status.success());

    let shown = crypt(&bench, "info @a").unwrap();
    let fault = "primary copy of the header: something else has been written over it";
    assert!(shown.warnings.len() == 1 && shown.warnings[0].contains(fault), "{:?}", shown.warnings);
    assert_eq!(opening(&bench, "@a --key-file @pw").open(false).unwrap().warnings, shown.warnings);
    for refused in [
        crypt(&bench, &format!("add-key @a --key-file @pw --new-key-file @other {CHEAP}")).unwrap_err(),
        crypt(&bench, "remove-key @a --key-file @pw --slot 0 --last").unwrap_err(),
        opening(&bench, "@a --key-file @pw").open(true).unwrap_err(),
    ] {
        assert!(refused.to_string().contains("something else has been written over"), "{refused}");
    }
    assert!(matches!(crypt(&bench, &format!("format @a --key-file @pw {CHEAP}")), Err(Error::Occupied(_))));
    assert!(fs::read(bench.path("a")).unwrap() == bytes);
}
