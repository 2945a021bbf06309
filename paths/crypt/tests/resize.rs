//! Volumes that grow and shrink with their files.
use std::fs;
use std::os::unix::fs::FileExt;

use crate::commands::{crypt, opening};
use crate::common::served::{Client, Served, Setup};
use crate::common::*;
use crate::erase::VOLUMES;
use crate::headers::with_metadata;
use pagemill_crypt::commands::Opened;
use pagemill_crypt::{Error, Luks};

/// Bytes of data that `info` and an opened volume have.
fn bytes(bench: &Bench, volume: &str) -> u64 {
    let info: serde_json::Value =
        serde_json::from_str(&crypt(bench, &format!("info {volume} --json")).unwrap().out).unwrap();
    let opened = opening(bench, &format!("{volume} --key-file @pw")).open(false).unwrap();
    assert_eq!(info["data_bytes"], opened.volume.geometry().len);
    opened.volume.geometry().len
}

/// A LUKS2 volume of 20 MiB whose header says that it has 1 MiB of data.
fn fixed(bench: &Bench, name: &str) {
    crypt(bench, &format!("format @{name} {} --key-file @pw", VOLUMES[0].2)).unwrap();
    let mut bytes = fs::read(bench.path(name)).unwrap();
    with_metadata(&mut bytes, |json| json["segments"]["0"]["size"] = MIB.to_string().into());
    write(&bench.path(name), &bytes);
}

#[test]
fn volumes_grow_and_shrink_and_keep_what_is_left() {
    let Some(bench) = Bench::with(&["cryptsetup"]) else { return };
    for (volume, header, format) in VOLUMES {
        crypt(&bench, &format!("format {volume} {format} --key-file @pw")).unwrap();
        let data = if volume.contains("--header") { &volume[1..2] } else { header };
        let plain = || contents(&bench.open(header), &bench.open(data), data != header);
        let (was, has) = (bytes(&bench, volume), fs::metadata(bench.path(data)).unwrap().len());
        let before = plain();
        let grown = crypt(&bench, &format!("resize {volume} --size {}", has + 3 * MIB)).unwrap();
        assert!(grown.out.contains(&format!("{} bytes of data, before {was}", was + 3 * MIB)), "{}", grown.out);
        assert_eq!(bytes(&bench, volume), was + 3 * MIB, "{volume}");
        assert!(plain()[..was as usize] == before, "{volume}");
        bench.ok(&format!("cryptsetup open --test-passphrase --key-file pw {header}"));
        // Without a size: as the file is.
        bench.open(data).set_len(has + 5 * MIB).unwrap();
        crypt(&bench, &format!("resize {volume}")).unwrap();
        assert_eq!(bytes(&bench, volume), was + 5 * MIB, "{volume}");
        let shrunk = crypt(&bench, &format!("resize {volume} --size {} --force", has - MIB)).unwrap();
        // Nobody has it open.
        assert!(!shrunk.out.contains("until it is started again") && grown.out.contains("until"), "{}", shrunk.out);
        assert_eq!(bytes(&bench, volume), was - MIB, "{volume}");
        assert!(plain() == before[..(was - MIB) as usize], "{volume}");
        let again = crypt(&bench, &format!("resize {volume} --json")).unwrap();
        assert!(again.out.contains(&format!("\"data_bytes\":{}", was - MIB)), "{}", again.out);
    }
}

#[test]
fn a_fixed_size_in_the_header_changes_with_the_file() {
    let Some(bench) = Bench::with(&["cryptsetup"]) else { return };
    fixed(&bench, "a");
    let length = |bench: &Bench| {
        let dump = bench.ok("cryptsetup luksDump a");
        let line = dump.lines().find(|line| line.contains("length:")).unwrap().trim().to_owned();
        line.strip_prefix("length: ").unwrap().strip_suffix(" [bytes]").unwrap().parse::<u64>().unwrap()
    };
    assert_eq!((length(&bench), bytes(&bench, "@a")), (MIB, MIB));
    crypt(&bench, "resize @a").unwrap();
    assert_eq!((length(&bench), bytes(&bench, "@a")), (4 * MIB, 4 * MIB));
    crypt(&bench, "resize @a --size 30M").unwrap();
    assert_eq!((length(&bench), bytes(&bench, "@a")), (14 * MIB, 14 * MIB));
    crypt(&bench, "resize @a --size 17M --force").unwrap();
    assert_eq!((length(&bench), bytes(&bench, "@a")), (MIB, MIB));
    assert_eq!(fs::metadata(bench.path("a")).unwrap().len(), 17 * MIB);
    // The file has lost its end, and the header is made to say so.
    bench.open("a").set_len(16 * MIB + 8192).unwrap();
    assert!(opening(&bench, "@a --key-file @pw").open(false).is_err());
    crypt(&bench, "resize @a --force").unwrap();
    assert_eq!((length(&bench), bytes(&bench, "@a")), (8192, 8192));
    assert!(Luks::read(&bench.open("a")).unwrap().faults().is_empty());
}

#[test]
fn a_volume_in_use_grows_and_does_not_shrink() {
    let bench = Bench::with(&[]).unwrap();
    for (volume, header, format) in VOLUMES {
        crypt(&bench, &format!("format {volume} {format} --key-file @pw")).unwrap();
        let data = if volume.contains("--header") { &volume[1..2] } else { header };
        let has = fs::metadata(bench.path(data)).unwrap().len();
        let opened = opening(&bench, &format!("{volume} --key-file @pw")).open(true).unwrap();
        let Opened { data: file, volume: open, claim, .. } = opened;
        let was = open.geometry().len;
        let served = Served::start(&bench, file, open, Setup::new()).unwrap();
        let mut client = Client::connect(&served);
        client.write(was - 4096, &[7; 4096], 0).unwrap();
        let refused = crypt(&bench, &format!("resize {volume} --size {} --force", has - MIB)).unwrap_err();
        assert!(matches!(refused, Error::Busy(_)), "{volume}: {refused}");
        crypt(&bench, &format!("resize {volume} --size {}", has + MIB)).unwrap();
        // The server has the size that it began with.
        assert!(client.read(was - 4096, 4096).unwrap() == [7; 4096]);
        assert!(client.read(was, 4096).is_err(), "{volume}");
        drop(client);
        served.stop();
        drop(claim);
        assert_eq!(bytes(&bench, volume), was + MIB);
    }
}

#[test]
fn impossible_sizes_are_refused() {
    let bench = Bench::with(&[]).unwrap();
    fixed(&bench, "f");
    for (volume, _, format) in VOLUMES.into_iter().chain([("@f", "f", "")]) {
        if !format.is_empty() {
            crypt(&bench, &format!("format {volume} {format} --key-file @pw")).unwrap();
        }
        let data = bench.path(&volume[1..2]);
        let before = fs::read(&data).unwrap();
        for (size, word) in [
            (0, "the smallest size that works is"),
            (511, "the smallest size that works is"),
            ((18 << 20) + 512, "a whole number"),
        ] {
            if word == "a whole number" && format.contains("luks1") {
                continue;
            }
            let refused = crypt(&bench, &format!("resize {volume} --size {size} --force")).unwrap_err();
            assert!(matches!(&refused, Error::Request(why) if why.contains(word)), "{volume}: {refused}");
        }
        assert!(fs::read(&data).unwrap() == before, "{volume}");
    }
    // A file that is no volume, because of its length, becomes one: nothing is lost, and nothing asked.
    bench.open("a").set_len(20 * MIB + 512).unwrap();
    assert!(crypt(&bench, "resize @a").unwrap_err().to_string().contains("a whole number"));
    crypt(&bench, &format!("resize @a --size {}", 20 * MIB + 4096)).unwrap();
    assert_eq!(bytes(&bench, "@a"), 4 * MIB + 4096);
    let refused = crypt(&bench, "resize @ch --size 30M").unwrap_err();
    assert!(refused.to_string().contains("name that one, and this with --header"), "{refused}");
    assert!(matches!(crypt(&bench, "resize @pw --size 30M"), Err(Error::NoHeader { .. })));
    assert!(crypt(&bench, "resize @absent --size 30M").is_err() && !bench.path("absent").exists());
    // A file system was made over it.
    bench.open("a").write_all_at(&pattern(16 << 10), 0).unwrap();
    let before = fs::read(bench.path("a")).unwrap();
    for size in ["30M", "18M"] {
        let refused = crypt(&bench, &format!("resize @a --size {size} --force")).unwrap_err();
        assert!(matches!(refused, Error::Overwritten(_)), "{refused}");
    }
    assert!(fs::read(bench.path("a")).unwrap() == before);
    let mut byte = [0];
    bench.open("pw").read_exact_at(&mut byte, 0).unwrap();
    assert_eq!(fs::read(bench.path("pw")).unwrap(), PASSPHRASE);
}
