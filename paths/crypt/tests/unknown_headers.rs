//! Intact headers with parts that this program does not know, and headers whose place something else has taken.

use crate::common::*;
use crate::headers::{Disk, SECOND, image, opened, with_metadata};
use pagemill_crypt::kdf::{KdfKind, Limits};
use pagemill_crypt::{Error, Luks};

/// Parts from later versions of the formats or from other programs are no damage: the header is read, and the error
/// names them.
#[test]
fn unknown_parts_are_unsupported_and_not_damaged() {
    use serde_json::json;
    let whole = image();
    let cases = [
        ("/keyslots/0/type", json!("luks3"), "luks3"),
        ("/keyslots/0/af/type", json!("luks9"), "splitter"),
        ("/keyslots/0/area/type", json!("journal"), "journal"),
        ("/keyslots/0/area/encryption", json!("serpent-xts-plain64"), "serpent"),
        ("/keyslots/0/area/key_size", json!(16), "16 bytes of key"),
        ("/keyslots/0/af/hash", json!("whirlpool"), "whirlpool"),
        ("/keyslots/0/kdf", json!({"type": "scrypt", "salt": "AAAA"}), "scrypt"),
        ("/keyslots/0/kdf", json!({"type": "of-later", "nothing": "known"}), "of-later"),
        ("/keyslots/0/key_size", json!(16), "128 bits"),
        ("/digests/0/type", json!("of-later"), "of-later"),
        ("/digests/0/hash", json!("whirlpool"), "whirlpool"),
        ("/config/requirements", json!({"mandatory": ["online-reencrypt-v2"]}), "a re-encryption is under way"),
        ("/config/requirements", json!({"mandatory": ["of-later"]}), "of-later"),
        ("/config/requirements", json!({"mandatory": ["\u{1b}[2J"]}), "\\u{1b}[2J"),
        ("/segments/0/type", json!("linear"), "linear"),
        ("/segments/0/sector_size", json!(513), "513"),
        ("/segments/0/encryption", json!("cipher_null-ecb"), "cipher_null"),
        ("/segments/0/integrity", json!({"type": "hmac(sha256)"}), "integrity"),
        ("/segments/1", json!({"type": "crypt", "offset": "17000000", "size": "512"}), "several segments"),
    ];
    for (place, value, word) in cases {
        let mut bytes = whole.clone();
        with_metadata(&mut bytes, |json| {
            let (parent, field) = place.rsplit_once('/').unwrap();
            json.pointer_mut(parent).unwrap()[field] = value.clone();
        });
        let disk = Disk::of(bytes.clone());
        let luks = Luks::read(&disk).unwrap_or_else(|error| panic!("{place}: {error}"));
        assert!(luks.faults().is_empty(), "{place}: {:?}", luks.faults());
        let error = luks.open(&disk, PASSPHRASE, 17 << 20, false, &Limits::default()).expect_err(place);
        assert!(matches!(&error, Error::Unsupported(why) if why.contains(word)), "{place} {value}: {error}");
        if place.starts_with("/config") {
            for number in 0..2 {
                let refused = Luks::read(&disk).unwrap().remove_key(&disk, number, true);
                assert!(matches!(&refused, Err(Error::Unsupported(why)) if why.contains(word)), "{refused:?}");
            }
            assert!(*disk.now.borrow() == bytes, "{value}");
        }
    }
    // With an unknown checksum it can't be told whether the copies are intact.
    let mut bytes = whole;
    for base in [0, SECOND] {
        bytes[base + 72..base + 83].copy_from_slice(b"blake2b-512");
    }
    let error = Luks::read(&Disk::of(bytes)).unwrap_err();
    assert!(matches!(&error, Error::Unsupported(why) if why.contains("blake2b-512")), "{error}");
}

#[test]
fn unusable_keyslots_are_skipped_and_kept() {
    use serde_json::json;
    let disk = Disk::of(image());
    let (_, key) = opened(&disk);
    Luks::read(&disk).unwrap().add_key(&disk, &key, OTHER, &cheap(KdfKind::Pbkdf2), Some(9)).unwrap();
    let mut bytes = disk.now.take();
    let others = json!({
        "3": {"type": "of-later", "key_size": 64, "area": {"type": "raw", "offset": "1048576", "size": "4096"}},
        "4": {"type": "luks2", "key_size": 16, "af": {"type": "luks1", "stripes": 4000, "hash": "sha256"},
            "area": {"type": "raw", "offset": "2097152", "size": "65536", "encryption": "aes-xts-plain64", "key_size": 64},
            "kdf": {"type": "pbkdf2", "hash": "sha256", "iterations": 1000, "salt": "AAAA"}},
        "7": {"type": "of-later"},
    });
    with_metadata(&mut bytes, |json| {
        json["keyslots"].as_object_mut().unwrap().extend(others.as_object().unwrap().clone());
        json["keyslots"]["0"]["area"]["encryption"] = "aes-cbc-essiv:sha256".into();
        json["keyslots"]["0"]["area"]["key_size"] = 16.into();
        json["tokens"]["2"] = json!({"type": "of-another", "keyslots": ["3", "9"]});
    });
    let disk = Disk::of(bytes);
    let mut luks = Luks::read(&disk).unwrap();
    assert!(luks.faults().is_empty(), "{:?}", luks.faults());
    let limits = Limits::default();
    assert_eq!(luks.unlock(&disk, OTHER, None, &limits).unwrap().0, 9);
    let error = luks.unlock(&disk, b"wrong", None, &limits).unwrap_err();
    assert!(matches!(error, Error::WrongPassphrase { tried: 1, .. }), "{error}");
    assert!(error.to_string().contains("not tried: keyslot 0") && error.to_string().contains("essiv"), "{error}");
    for (number, word) in [(0, "essiv"), (3, "of-later"), (4, "something else"), (5, "there is no keyslot 5")] {
        let error = luks.unlock(&disk, PASSPHRASE, Some(number), &limits).unwrap_err();
        assert!(error.to_string().contains(word), "{number}: {error}");
    }
    assert!(matches!(luks.remove_key(&disk, 3, true), Err(Error::Unsupported(_))), "nobody knows what else it has");
    // The first free keyslot, in a free area.
    assert_eq!(luks.add_key(&disk, &key, PASSPHRASE, &cheap(KdfKind::Pbkdf2), None).unwrap(), 1);
    luks.remove_key(&disk, 9, false).unwrap();
    assert_eq!(Luks::read(&disk).unwrap().unlock(&disk, PASSPHRASE, None, &limits).unwrap().0, 1);
    with_metadata(&mut disk.now.take(), |json| {
        for number in ["3", "4", "7"] {
            assert_eq!(json["keyslots"][number], others[number], "{number}");
        }
        assert_eq!(json["tokens"]["2"], json!({"type": "of-another", "keyslots": ["3"]}));
    });
}

/// `cryptsetup config --priority ignore`: the keyslot exists, and the error does not say that its passphrase is wrong.
#[test]
fn a_keyslot_of_priority_ignore_is_reported() {
    let mut bytes = image();
    with_metadata(&mut bytes, |json| json["keyslots"]["0"]["priority"] = 0.into());
    let disk = Disk::of(bytes);
    let luks = Luks::read(&disk).unwrap();
    luks.check_openers().unwrap();
    let (limits, words) = (Limits::default(), "keyslot 0: its priority is \"ignore\"");
    let refused = luks.unlock(&disk, PASSPHRASE, None, &limits).unwrap_err();
    assert!(matches!(&refused, Error::Unsupported(why) if why.contains(words)), "{refused}");
    assert_eq!(luks.unlock(&disk, PASSPHRASE, Some(0), &limits).unwrap().0, 0);
    let Luks::V2(header) = luks else { unreachable!("it was made as one") };
    assert!(header.passed_over(0).is_some() && header.passed_over(1).is_none());
}

#[test]
fn nothing_is_written_if_the_primary_copy_was_overwritten() {
    let whole = image();
    let noise = pattern(4096);
    for what in ["superblock of ext4", "partition table", "label of LVM", "in the text", "all"] {
        let mut bytes = whole.clone();
        match what {
            "superblock of ext4" => {
                bytes[..1024].fill(0);
                bytes[1024..1200].copy_from_slice(&noise[..176]);
            }
            "partition table" => {
                bytes[..512].fill(0);
                bytes[446..462].copy_from_slice(&noise[..16]);
                bytes[510..512].copy_from_slice(&[0x55, 0xaa]);
            }
            "label of LVM" => {
                bytes[512..544].copy_from_slice(b"LABELONE\x01\x02\x03\x04\x05\x06\x07\x08of another!!!!!!")
            }
            "in the text" => bytes[4096..4352].copy_from_slice(&noise[..256]),
            _ => bytes[..4096].copy_from_slice(&noise),
        }
        let disk = Disk::of(bytes.clone());
        // It is read, and reports that.
        let (mut luks, key) = opened(&disk);
        let fault = "primary copy of the header: something else has been written over it; the secondary copy is used";
        assert_eq!(luks.faults(), [fault], "{what}");
        let added = luks.add_key(&disk, &key, OTHER, &cheap(KdfKind::Pbkdf2), None);
        for error in [added.map(|_| ()).unwrap_err(), luks.remove_key(&disk, 0, true).unwrap_err()] {
            assert!(error.to_string().contains("written over"), "{what}: {error}");
            assert!(error.next_step().is_some_and(|next| next.contains("cryptsetup repair")), "{what}");
        }
        assert!(*disk.now.borrow() == bytes, "{what}");
    }
    // Zeroes count as damage.
    for len in [512, 4096, SECOND] {
        let mut bytes = whole.clone();
        bytes[..len].fill(0);
        let disk = Disk::of(bytes);
        let (mut luks, key) = opened(&disk);
        luks.add_key(&disk, &key, OTHER, &cheap(KdfKind::Pbkdf2), None).unwrap();
        assert!(Luks::read(&disk).unwrap().faults().is_empty(), "{len}");
    }
}

/// As after `dd` of the wrong file. The sequence numbers of two volumes do not say which one the user wants.
#[test]
fn a_header_of_another_volume_is_not_taken_for_an_older_copy() {
    let limits = Limits::default();
    let (whole, other) = (image(), image());
    let more_often_changed = |bytes: &Vec<u8>| {
        let disk = Disk::of(bytes.clone());
        let (mut luks, key) = opened(&disk);
        luks.add_key(&disk, &key, OTHER, &cheap(KdfKind::Pbkdf2), None).unwrap();
        disk.now.into_inner()
    };
    let uuid = |bytes: &Vec<u8>| Luks::read(&Disk::of(bytes.clone())).unwrap().uuid();
    let (own, foreign) = (uuid(&whole), uuid(&other));
    for place in [0, SECOND] {
        for (own_one, foreign_one) in [
            (whole.clone(), other.clone()),
            (more_often_changed(&whole), other.clone()),
            (whole.clone(), more_often_changed(&other)),
        ] {
            let mut bytes = own_one.clone();
            bytes[place..place + SECOND].copy_from_slice(&foreign_one[place..place + SECOND]);
            let disk = Disk::of(bytes.clone());
            let mut luks = Luks::read(&disk).unwrap();
            let faults = luks.faults();
            assert!(faults.len() == 1 && faults[0].contains("another volume"), "{faults:?}");
            assert!(faults[0].contains(&own) && faults[0].contains(&foreign), "{faults:?}");
            // The passphrase shows which copy belongs to the data: the key material belongs to one of them.
            match luks.unlock(&disk, PASSPHRASE, None, &limits) {
                Ok(_) => assert_eq!(luks.uuid(), own),
                Err(error) => {
                    assert!(luks.uuid() == foreign, "{error}");
                    assert!(matches!(error, Error::WrongPassphrase { .. }), "{error}");
                    assert!(error.to_string().contains("the other copy of the header"), "{error}");
                    assert!(error.to_string().contains(&own), "{error}");
                }
            }
            let key = pagemill_crypt::secret::Locked::copy_of(&[0; 32]);
            let added = luks.add_key(&disk, &key, OTHER, &cheap(KdfKind::Pbkdf2), None);
            for error in [added.map(drop).unwrap_err(), luks.remove_key(&disk, 0, true).unwrap_err()] {
                let (first, second) = if place == 0 { (&foreign, &own) } else { (&own, &foreign) };
                let words =
                    format!("the primary copy of the header, at 0, is of volume {first}, and the secondary copy");
                assert!(error.to_string().contains(&words), "{error}");
                assert!(error.to_string().contains(&format!("at {SECOND}, of volume {second}")), "{error}");
                assert!(error.next_step().is_some_and(|next| next.contains("zero")), "{error}");
            }
            assert!(luks.check_not_written_over().is_err(), "nor is the data written to");
            assert!(*disk.now.borrow() == bytes);
            // The suggested next step helps.
            bytes[place..place + 4096].fill(0);
            let disk = Disk::of(bytes);
            let (mut luks, key) = opened(&disk);
            assert_eq!(luks.uuid(), own);
            luks.add_key(&disk, &key, OTHER, &cheap(KdfKind::Pbkdf2), Some(5)).unwrap();
            assert!(Luks::read(&disk).unwrap().faults().is_empty());
        }
    }
}

#[test]
fn a_luks1_volume_of_another_cipher_is_read_and_not_opened() {
    let disk = Disk::of(vec![0; 3 << 20]);
    Luks::format(&disk, &new(1, 512, 512, KdfKind::Pbkdf2), PASSPHRASE).unwrap();
    let whole = disk.now.into_inner();
    for (place, text, word) in [
        (8, &b"twofish\0"[..], "twofish"),
        (40, b"cbc-essiv:sha256\0", "essiv"),
        (72, b"whirlpool\0", "whirlpool"),
        (108, &[0, 0, 0, 48], "48 bytes"),
    ] {
        let mut bytes = whole.clone();
        bytes[place..place + text.len()].copy_from_slice(text);
        let disk = Disk::of(bytes.clone());
        let mut luks = Luks::read(&disk).unwrap_or_else(|error| panic!("{word}: {error}"));
        assert_eq!(luks.used(), [0]);
        let key = pagemill_crypt::secret::Locked::copy_of(&[0; 64]);
        let refused = [
            luks.geometry(3 << 20, false).map(drop),
            luks.unlock(&disk, PASSPHRASE, None, &Limits::default()).map(drop),
            luks.add_key(&disk, &key, OTHER, &cheap(KdfKind::Pbkdf2), None).map(drop),
            luks.remove_key(&disk, 0, true),
        ];
        for error in refused {
            assert!(matches!(&error, Err(Error::Unsupported(why)) if why.contains(word)), "{word}: {error:?}");
        }
        assert!(*disk.now.borrow() == bytes, "{word}");
    }
}

/// Its only sign is another magic number, which makes the volume look like no volume.
#[test]
fn a_luks1_volume_that_is_being_reencrypted_is_recognised() {
    let disk = Disk::of(vec![0; 3 << 20]);
    Luks::format(&disk, &new(1, 512, 512, KdfKind::Pbkdf2), PASSPHRASE).unwrap();
    let mut bytes = disk.now.into_inner();
    bytes[..6].copy_from_slice(b"LUKS\xde\xad");
    let refused = Luks::read(&Disk::of(bytes)).unwrap_err();
    assert!(matches!(&refused, Error::Unsupported(why) if why.contains("re-encryption")), "{refused}");
}
