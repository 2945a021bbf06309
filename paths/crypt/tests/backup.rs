//! Backups of headers: taken and restored by this crate and by `cryptsetup`, in both directions; hostile ones.
use std::cell::Cell;
use std::os::unix::fs::PermissionsExt;
use std::{fs, io};

use crate::commands::{CHEAP, crypt, opening};
use crate::common::*;
use crate::erase::{VOLUMES, cheap_for};
use crate::headers::{Disk, image, luks1_image, opened, opens, with_metadata};
use crate::keys_served::is_awaited;
use pagemill_crypt::backup::Backup;
use pagemill_crypt::kdf::KdfKind;
use pagemill_crypt::{Error, Luks, Store};

/// Whether the passphrase in `pw` opens the volume, in the judgement of both programs.
fn both_open(bench: &Bench, volume: &str, header: &str, pw: &str) -> bool {
    let ours = crypt(bench, &format!("test-passphrase {volume} --key-file @{pw}")).is_ok();
    let theirs = bench.run(&format!("cryptsetup open --test-passphrase --key-file {pw} {header}")).status.success();
    assert_eq!(ours, theirs, "{volume} with {pw}");
    ours
}

#[test]
fn each_program_restores_backups_of_the_other() {
    let Some(bench) = Bench::with(&["cryptsetup"]) else { return };
    for (volume, header, format) in VOLUMES {
        crypt(&bench, &format!("format {volume} {format} --key-file @pw")).unwrap();
        crypt(&bench, &format!("header-backup {volume} @ours-{header}")).unwrap();
        bench.ok(&format!("cryptsetup luksHeaderBackup {header} --header-backup-file theirs-{header}"));
        let ours = fs::read(bench.path(&format!("ours-{header}"))).unwrap();
        assert!(ours == fs::read(bench.path(&format!("theirs-{header}"))).unwrap(), "{volume}: they differ");
        let mode = fs::metadata(bench.path(&format!("ours-{header}"))).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let data = if volume.contains("--header") { &volume[1..2] } else { header };
        let plain = |bench: &Bench| contents(&bench.open(header), &bench.open(data), data != header);
        let before = plain(&bench);
        let other_key = || {
            // Twice, so that the new keyslot is where the old one was.
            let cheap = cheap_for(format);
            for (old, new) in [("pw", "wrong"), ("wrong", "other")] {
                crypt(&bench, &format!("add-key {volume} --key-file @{old} --new-key-file @{new} {cheap}")).unwrap();
                crypt(&bench, &format!("remove-key {volume} --key-file @{old}")).unwrap();
            }
            let opened = ["pw", "wrong", "other"].map(|pw| both_open(&bench, volume, header, pw));
            assert_eq!(opened, [false, false, true], "{volume}");
        };
        let is_restored = || {
            let opened = ["pw", "wrong", "other"].map(|pw| both_open(&bench, volume, header, pw));
            assert_eq!(opened, [true, false, false], "{volume}");
            assert!(Luks::read(&bench.open(header)).unwrap().faults().is_empty());
            bench.ok(&format!("cryptsetup luksDump {header}"));
        };
        other_key();
        let said = crypt(&bench, &format!("header-restore {volume} @theirs-{header} --force")).unwrap();
        assert!(said.out.contains("the header is restored, with 1 keyslot"), "{}", said.out);
        is_restored();
        assert!(plain(&bench) == before, "{volume}");
        other_key();
        bench.ok(&format!("cryptsetup luksHeaderRestore -q {header} --header-backup-file ours-{header}"));
        is_restored();
        // An erased one, and one of which nothing is left.
        crypt(&bench, &format!("erase {volume} --force")).unwrap();
        crypt(&bench, &format!("header-restore {volume} @ours-{header} --force")).unwrap();
        is_restored();
        let mut bytes = fs::read(bench.path(header)).unwrap();
        bytes[..ours.len()].fill(0);
        write(&bench.path(header), &bytes);
        crypt(&bench, &format!("header-restore {volume} @ours-{header} --force")).unwrap();
        is_restored();
        assert!(fs::read(bench.path(header)).unwrap()[ours.len()..] == bytes[ours.len()..]);
        assert!(plain(&bench) == before, "{volume}");
    }
}

#[test]
fn a_backup_overwrites_no_file_and_restores_its_own_volume_alone() {
    let bench = Bench::with(&[]).unwrap();
    let make = |name: &str, more: &str| {
        crypt(&bench, &format!("format @{name} --size 20M --force --key-file @pw {more}")).unwrap();
    };
    make("a", CHEAP);
    crypt(&bench, "header-backup @a @saved").unwrap();
    let saved = fs::read(bench.path("saved")).unwrap();
    std::os::unix::fs::symlink("nowhere", bench.path("link")).unwrap();
    for there in ["saved", "a", "link", ""] {
        let refused = crypt(&bench, &format!("header-backup @a @{there}")).unwrap_err();
        assert!(matches!(&refused, Error::Request(why) if why.contains("is there already")), "{refused}");
    }
    assert!(crypt(&bench, "header-backup @a @no-folder/saved").unwrap_err().to_string().contains("does not exist"));
    assert!(matches!(crypt(&bench, "header-backup @pw @new"), Err(Error::NoHeader { file }) if file.ends_with("pw")));
    assert!(!bench.path("new").exists() && !bench.path("nowhere").exists());
    assert!(fs::read(bench.path("saved")).unwrap() == saved);
    // Other volumes: one with another UUID; the same UUID with another key, another layout, another version.
    let before = fs::read(bench.path("a")).unwrap();
    let refused = |name: &str, word: &str| {
        let there = fs::read(bench.path(name)).unwrap();
        let refused = crypt(&bench, &format!("header-restore @{name} @saved --force")).unwrap_err();
        assert!(matches!(&refused, Error::Request(why) if why.contains(word)), "{name}: {refused}");
        assert!(fs::read(bench.path(name)).unwrap() == there, "{name}");
    };
    make("b", CHEAP);
    refused("b", "is of volume");
    make("b", "--type luks1 --kdf-iterations 1000");
    refused("b", "is of volume");
    type Change = fn(&mut serde_json::Value);
    let changes: [Change; 3] = [
        |json| json["digests"]["0"]["digest"] = "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=".into(),
        |json| json["segments"]["0"]["sector_size"] = 512.into(),
        |json| json["segments"]["0"]["size"] = "4096".into(),
    ];
    for change in changes {
        let mut bytes = before.clone();
        with_metadata(&mut bytes, change);
        write(&bench.path("b"), &bytes);
        refused("b", "its key or its layout has changed");
    }
    // If told, it is done.
    crypt(&bench, "header-restore @b @saved --force --other-volume").unwrap();
    crypt(&bench, "test-passphrase @b --key-file @pw").unwrap();
    let mut longer = saved.clone();
    longer.resize(saved.len() + 5000, 7);
    write(&bench.path("saved"), &longer);
    crypt(&bench, "header-restore @a @saved --force").unwrap();
    assert!(fs::read(bench.path("a")).unwrap()[16 << 20..] == before[16 << 20..]);
}

#[test]
fn hostile_and_damaged_backups_are_refused() {
    let bench = Bench::with(&[]).unwrap();
    crypt(&bench, &format!("format @a --size 20M --key-file @pw {CHEAP}")).unwrap();
    crypt(&bench, "format @b --size 20M --type luks1 --key-file @pw --kdf-iterations 1000").unwrap();
    crypt(&bench, "header-backup @a @saved").unwrap();
    crypt(&bench, "header-backup @b @saved1").unwrap();
    let (saved, saved1) = (fs::read(bench.path("saved")).unwrap(), fs::read(bench.path("saved1")).unwrap());
    let with = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = saved.clone();
        change(&mut bytes);
        bytes
    };
    let with1 = |at: usize, field: u32| {
        let mut bytes = saved1.clone();
        bytes[at..at + 4].copy_from_slice(&field.to_be_bytes());
        bytes
    };
    for (name, hostile, word) in [
        ("a", Vec::new(), "no LUKS header"),
        ("a", pattern(1 << 20), "no LUKS header"),
        ("a", with(&|bytes| bytes.truncate(5000)), "cut off"),
        ("a", with(&|bytes| bytes.truncate(saved.len() - 1)), "cut off at 16777215"),
        ("a", with(&|bytes| (bytes[4500], bytes[16384 + 4500]) = (0, 0)), "both copies of the header are damaged"),
        ("a", with(&|bytes| bytes[..16 << 10].fill(0xee)), "something else has been written"),
        (
            "a",
            with(&|bytes| {
                with_metadata(bytes, |json| {
                    json["config"]["requirements"] = serde_json::json!({"mandatory": ["online-reencrypt-v2"]})
                })
            }),
            "re-encryption",
        ),
        (
            "a",
            with(&|bytes| with_metadata(bytes, |json| json["segments"]["0"]["offset"] = "1048576".into())),
            "inside the header",
        ),
        (
            "a",
            with(&|bytes| with_metadata(bytes, |json| json["segments"]["0"]["offset"] = "1099511627776".into())),
            "cut off",
        ),
        ("b", saved1[..saved1.len() - 1].to_vec(), "cut off"),
        ("b", saved1[..4096].to_vec(), "cut off"),
        // The data, an unused keyslot's place, the key's length.
        ("b", with1(104, 1), "inside the header"),
        ("b", with1(208 + 48 + 40, 1 << 30), "its keyslots end at"),
        ("b", with1(208 + 48 + 40, u32::MAX), "its keyslots end at"),
        ("b", with1(108, u32::MAX), "outside of"),
        ("b", with1(108, 48), "48 bytes"),
        ("b", with1(104, u32::MAX / 512 * 512), "cut off"),
    ] {
        let before = fs::read(bench.path(name)).unwrap();
        write(&bench.path("hostile"), &hostile);
        for more in ["", "--other-volume"] {
            let refused = crypt(&bench, &format!("header-restore @{name} @hostile --force {more}")).unwrap_err();
            assert!(refused.to_string().contains(word), "{word}: {refused}");
        }
        assert!(fs::read(bench.path(name)).unwrap() == before, "{word}");
    }
    // A volume that is no place for it.
    bench.file("short", 1 << 20);
    let refused = crypt(&bench, "header-restore @short @saved --force").unwrap_err();
    assert!(matches!(refused, Error::CutOff { .. }), "{refused}");
    rustix::fs::mkfifoat(rustix::fs::CWD, bench.path("pipe"), rustix::fs::Mode::RWXU).unwrap();
    assert!(matches!(crypt(&bench, "header-restore @a @pipe --force"), Err(Error::Request(_))));
    assert_eq!(crypt(&bench, "header-restore @a @absent --force").unwrap_err().next_step(), Some("check the name"));
    // A hostile header has no backup: its unused keyslots are in the data, or far behind it.
    let mut bytes = fs::read(bench.path("b")).unwrap();
    for (payload, place) in [(4096u32, 8192u32), (0, 1 << 30), (0, u32::MAX)] {
        bytes[104..108].copy_from_slice(&payload.to_be_bytes());
        bytes[208 + 48 + 40..208 + 48 + 44].copy_from_slice(&place.to_be_bytes());
        write(&bench.path("b"), &bytes);
        let refused = crypt(&bench, "header-backup @b @new").unwrap_err();
        assert!(matches!(&refused, Error::Header(why) if why.contains("its keyslots end at")), "{place}: {refused}");
    }
    assert!(!bench.path("new").exists());
}

/// What can't be written as a whole is not begun: the keyslots that are there still open.
#[test]
fn a_restoration_that_cannot_end_does_not_begin() {
    let bench = Bench::with(&[]).unwrap();
    crypt(&bench, &format!("format @a --size 20M --key-file @pw {CHEAP}")).unwrap();
    crypt(&bench, "format @b --size 20M --type luks1 --key-file @pw --kdf-iterations 1000").unwrap();
    crypt(&bench, "header-backup @a @saved").unwrap();
    let saved = fs::read(bench.path("saved")).unwrap();
    let (mut last, mut behind) = (saved.clone(), saved);
    for base in [0, 16 << 10] {
        last[base + 16..base + 24].fill(0xff);
    }
    with_metadata(&mut last, |_| {});
    with_metadata(&mut behind, |json| {
        let mut segment = json["segments"]["0"].clone();
        (segment["offset"], segment["flags"]) = ("4096".into(), serde_json::json!(["backup-previous"]));
        json["segments"]["1"] = segment;
    });
    for (hostile, word) in [(last, "sequence number"), (behind, "the data begins at 4096")] {
        write(&bench.path("hostile"), &hostile);
        let before = fs::read(bench.path("b")).unwrap();
        let refused = crypt(&bench, "header-restore @b @hostile --force --other-volume").unwrap_err();
        assert!(refused.to_string().contains(word), "{refused}");
        assert!(fs::read(bench.path("b")).unwrap() == before, "{word}");
    }
}

/// A file system made over the primary copy, and another volume's primary copy over this one's.
#[test]
fn a_restoration_over_something_else_has_to_be_asked_for() {
    let bench = Bench::with(&[]).unwrap();
    for name in ["a", "b"] {
        crypt(&bench, &format!("format @{name} --size 20M --key-file @pw {CHEAP}")).unwrap();
        crypt(&bench, &format!("header-backup @{name} @saved-{name}")).unwrap();
    }
    let (a, b) = (fs::read(bench.path("a")).unwrap(), fs::read(bench.path("b")).unwrap());
    let over = |from: &[u8]| [&from[..16 << 10], &a[16 << 10..]].concat();
    for there in [over(&pattern(16 << 10)), over(&b)] {
        for saved in ["saved-a", "saved-b"] {
            write(&bench.path("a"), &there);
            let refused = crypt(&bench, &format!("header-restore @a @{saved} --force")).unwrap_err();
            assert!(refused.to_string().contains("--other-volume"), "{refused}");
            assert!(fs::read(bench.path("a")).unwrap() == there);
        }
        crypt(&bench, "header-restore @a @saved-a --force --other-volume").unwrap();
        crypt(&bench, "test-passphrase @a --key-file @pw").unwrap();
        assert!(Luks::read(&bench.open("a")).unwrap().faults().is_empty());
    }
}

#[test]
fn a_file_that_appears_during_a_backup_is_not_overwritten() {
    let bench = Bench::with(&[]).unwrap();
    crypt(&bench, &format!("format @a --size 20M --key-file @pw {CHEAP}")).unwrap();
    let image = bench.open("a");
    image.lock().unwrap();
    std::thread::scope(|scope| {
        let backup = scope.spawn(|| crypt(&bench, "header-backup @a @saved"));
        until("the backup to wait for the header", || is_awaited(&image));
        // As long as the backup, and readable for all.
        write(&bench.path("saved"), &vec![7; 16 << 20]);
        image.unlock().unwrap();
        let refused = backup.join().unwrap().unwrap_err();
        assert!(matches!(refused, Error::Occupied(_)), "{refused}");
    });
    assert!(fs::read(bench.path("saved")).unwrap() == vec![7; 16 << 20]);
}

#[test]
fn a_header_in_use_can_be_saved_and_not_restored() {
    let bench = Bench::with(&[]).unwrap();
    for (volume, header, format) in VOLUMES {
        crypt(&bench, &format!("format {volume} {format} --key-file @pw")).unwrap();
        for may_write in [true, false] {
            let opened = opening(&bench, &format!("{volume} --key-file @pw")).open(may_write).unwrap();
            let saved = format!("@saved-{header}-{may_write}");
            crypt(&bench, &format!("header-backup {volume} {saved} --json")).unwrap();
            let refused = crypt(&bench, &format!("header-restore {volume} {saved} --force")).unwrap_err();
            assert!(matches!(refused, Error::Busy(_)), "{volume}: {refused}");
            drop(opened);
        }
        if volume.contains("--header") {
            let refused = crypt(&bench, &format!("header-restore @{header} @saved-{header}-true --force")).unwrap_err();
            assert!(refused.to_string().contains("name that one, and this with --header"), "{refused}");
        }
        crypt(&bench, &format!("header-restore {volume} @saved-{header}-true --force")).unwrap();
    }
}

#[test]
fn keyslots_without_room_beside_the_present_ones_are_not_restored() {
    let Some(bench) = Bench::with(&["cryptsetup"]) else { return };
    bench.file("a", 20 * MIB);
    bench.ok("cryptsetup luksFormat -q --type luks2 -s 256 --luks2-metadata-size 16k --luks2-keyslots-size 256k --pbkdf pbkdf2 --pbkdf-force-iterations 1000 --key-file pw a");
    crypt(&bench, "header-backup @a @saved").unwrap();
    // Two keyslots fill it; their places are those of the backup's.
    for (old, new) in [("pw", "other"), ("other", "wrong")] {
        crypt(&bench, &format!("add-key @a --key-file @{old} --new-key-file @{new} {CHEAP}")).unwrap();
        crypt(&bench, &format!("remove-key @a --key-file @{old}")).unwrap();
    }
    crypt(&bench, &format!("add-key @a --key-file @wrong --new-key-file @other {CHEAP}")).unwrap();
    let before = fs::read(bench.path("a")).unwrap();
    let refused = crypt(&bench, "header-restore @a @saved --force").unwrap_err();
    assert!(matches!(&refused, Error::Request(why) if why.contains("remove-key")), "{refused}");
    assert!(fs::read(bench.path("a")).unwrap() == before);
    crypt(&bench, "remove-key @a --key-file @other").unwrap();
    crypt(&bench, "header-restore @a @saved --force").unwrap();
    assert!(both_open(&bench, "@a", "a", "pw") && !both_open(&bench, "@a", "a", "wrong"));
}

/// As at an export of another server, which nothing locks: a passphrase is replaced while the keyslots are read.
#[test]
fn a_header_that_changes_meanwhile_is_not_backed_up() {
    struct Changing(Disk, Cell<bool>);
    impl Store for Changing {
        fn size(&self) -> io::Result<u64> {
            self.0.size()
        }
        fn read_at(&self, buf: &mut [u8], at: u64) -> io::Result<()> {
            let header = 4096.min(buf.len());
            self.0.read_at(&mut buf[..header], at)?;
            if buf.len() > 100_000 && !self.1.replace(true) {
                let (mut luks, key) = opened(&self.0);
                luks.change_key(&self.0, &key, OTHER, &cheap(KdfKind::Pbkdf2), 0).unwrap();
            }
            self.0.read_at(&mut buf[header..], at + header as u64)
        }
        fn write_at(&self, _: &[u8], _: u64) -> io::Result<()> {
            unreachable!()
        }
        fn sync(&self) -> io::Result<()> {
            unreachable!()
        }
    }
    for bytes in [image(), luks1_image()] {
        let store = Changing(Disk::of(bytes), Cell::new(false));
        let refused = Backup::take(Luks::read(&store).unwrap(), &store).unwrap_err();
        assert!(matches!(&refused, Error::Request(why) if why.contains("try again")), "{refused}");
        let backup = Backup::take(Luks::read(&store).unwrap(), &store).unwrap();
        assert!(opens(&Disk::of(backup.bytes().to_vec()), OTHER));
    }
}

/// Writes are lost, torn or done at every moment of a restoration.
#[test]
fn a_crash_in_a_restoration_leaves_the_old_header_or_the_new_one() {
    let kind = KdfKind::Pbkdf2;
    for damaged in [None, Some(4500), Some(16_384 + 4500)] {
        let disk = Disk::of(image());
        let (mut luks, key) = opened(&disk);
        let backup = Backup::take(luks.clone(), &disk).unwrap();
        // The other passphrase takes the place of the first one.
        luks.add_key(&disk, &key, OTHER, &cheap(kind), Some(1)).unwrap();
        luks.remove_key(&disk, 0, false).unwrap();
        luks.add_key(&disk, &key, OTHER, &cheap(kind), Some(0)).unwrap();
        luks.remove_key(&disk, 1, false).unwrap();
        let mut bytes = disk.now.take();
        if let Some(place) = damaged {
            bytes[place] ^= 1;
        }
        let disk = Disk::watched(bytes);
        assert!(opens(&disk, OTHER) && !opens(&disk, PASSPHRASE));
        let backup = Backup::read(backup.bytes().to_vec()).unwrap();
        backup.restore(&disk, Some(&Luks::read(&disk).unwrap())).unwrap();
        let crashes = disk.take_crashes();
        assert!(crashes.len() >= 12, "{}", crashes.len());
        let mut opened = [0; 2];
        for (i, crashed) in crashes.into_iter().enumerate() {
            let crashed = Disk::of(crashed);
            let is_open = [OTHER, PASSPHRASE].map(|passphrase| opens(&crashed, passphrase));
            assert!(is_open[0] != is_open[1], "crash {i}, damaged at {damaged:?}: {is_open:?}");
            opened[usize::from(is_open[1])] += 1;
        }
        assert!(opened[0] > 0 && opened[1] > 0, "{opened:?}");
        assert!(opens(&disk, PASSPHRASE) && !opens(&disk, OTHER));
        assert!(Luks::read(&disk).unwrap().faults().is_empty());
    }
    // LUKS1: a keyslot that is the same in both opens at every moment.
    let disk = Disk::of(luks1_image());
    let (mut luks, key) = opened(&disk);
    luks.add_key(&disk, &key, OTHER, &cheap(kind), Some(1)).unwrap();
    let backup = Backup::take(luks.clone(), &disk).unwrap();
    luks.remove_key(&disk, 1, false).unwrap();
    luks.add_key(&disk, &key, b"third", &cheap(kind), Some(1)).unwrap();
    luks.add_key(&disk, &key, b"fourth", &cheap(kind), Some(2)).unwrap();
    let disk = Disk::watched(disk.now.take());
    backup.restore(&disk, Some(&luks)).unwrap();
    for (i, crashed) in disk.take_crashes().into_iter().enumerate() {
        let crashed = Disk::of(crashed);
        assert!(opens(&crashed, PASSPHRASE), "crash {i}");
        // Once more, and it is whole.
        backup.restore(&crashed, None).unwrap();
        assert!(opens(&crashed, OTHER) && !opens(&crashed, b"third") && !opens(&crashed, b"fourth"), "crash {i}");
    }
    assert!(opens(&disk, PASSPHRASE) && opens(&disk, OTHER) && !opens(&disk, b"third"));
}
