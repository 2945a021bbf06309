//! Contents, compared with what `cryptsetup reencrypt` and `qemu-img` make of the same bytes.

use std::fs;

use crate::common::*;
use pagemill_crypt::Luks;
use pagemill_crypt::kdf::KdfKind;

const CHEAP: &str = "--pbkdf pbkdf2 --pbkdf-force-iterations 1000";

#[test]
fn volumes_encrypted_by_cryptsetup_are_read() {
    let Some(bench) = Bench::with(&["cryptsetup"]) else { return };
    let plain = pattern(4 * MIB as usize);
    for bits in [256, 512] {
        for sector in [512, 1024, 2048, 4096] {
            write(&bench.path("data"), &plain);
            let _ = fs::remove_file(bench.path("header"));
            bench.ok(&format!(
                "cryptsetup reencrypt --encrypt -q --type luks2 -s {bits} --sector-size {sector} {CHEAP} --key-file pw --header header data"
            ));
            assert_ne!(fs::read(bench.path("data")).unwrap(), plain);
            let read = contents(&bench.open("header"), &bench.open("data"), true);
            assert!(read == plain, "{bits} bits, {sector}-byte sectors");
        }
    }
}

#[test]
fn cryptsetup_decrypts_volumes_written_here() {
    let Some(bench) = Bench::with(&["cryptsetup"]) else { return };
    let plain = pattern(4 * MIB as usize);
    for bits in [256, 512] {
        for sector in [512, 1024, 2048, 4096] {
            let (header, data) = (bench.file("header", 16 * MIB), bench.file("data", 4 * MIB));
            let mut volume = new(2, bits, sector, KdfKind::Pbkdf2);
            volume.detached = Some(4 * MIB);
            Luks::format(&header, &volume, PASSPHRASE).unwrap();
            fill(&header, &data, true, &plain);
            assert!(contents(&header, &data, true) == plain);
            bench.ok("cryptsetup reencrypt --decrypt --force-offline-reencrypt -q --key-file pw --header header data");
            assert!(fs::read(bench.path("data")).unwrap() == plain, "{bits} bits, {sector}-byte sectors");
        }
    }
}

#[test]
fn qemu_and_this_crate_read_each_others_luks1() {
    let Some(bench) = Bench::with(&["qemu-img"]) else { return };
    let plain = pattern(2 * MIB as usize);
    for bits in [256, 512] {
        write(&bench.path("raw"), &plain);
        let secret = "--object secret,id=pw,file=pw";
        let cipher =
            format!("cipher-alg=aes-{},cipher-mode=xts,ivgen-alg=plain64,hash-alg=sha256,iter-time=10", bits / 2);
        let line = format!("qemu-img convert {secret} -f raw -O luks -o key-secret=pw,{cipher} raw theirs");
        // Its calibration reads a clock that sometimes has not moved. Then it fails with this message, and works when
        // it is run again.
        let is_unlucky = |_: &u32| String::from_utf8_lossy(&bench.run(&line).stderr).contains("accurate CPU usage");
        assert!((0..50).find(|n| !is_unlucky(n)).is_some(), "{line}: not in 50 tries");
        let file = bench.open("theirs");
        assert!(contents(&file, &file, false) == plain, "{bits} bits");

        let file = bench.file("ours", 4 * MIB);
        Luks::format(&file, &new(1, bits, 512, KdfKind::Pbkdf2), PASSPHRASE).unwrap();
        fill(&file, &file, false, &plain);
        bench.ok(&format!(
            "qemu-img convert {secret} --image-opts driver=luks,key-secret=pw,file.filename=ours -O raw back"
        ));
        assert!(fs::read(bench.path("back")).unwrap() == plain, "{bits} bits");
    }
}

#[test]
fn odd_sizes_are_cut_or_refused_as_by_cryptsetup() {
    let Some(bench) = Bench::with(&["cryptsetup"]) else { return };
    for (sector, len, is_refused) in [
        (512, 18 * MIB + 512, false),
        (512, 18 * MIB + 123, false),
        (4096, 18 * MIB + 512, true),
        (4096, 18 * MIB + 4096, false),
        (4096, 18 * MIB + 123, true),
    ] {
        bench.file("theirs", len);
        let line = format!("cryptsetup luksFormat -q --type luks2 --sector-size {sector} {CHEAP} --key-file pw theirs");
        let theirs = bench.run(&line);
        let file = bench.file("ours", len);
        let ours = Luks::format(&file, &new(2, 512, sector, KdfKind::Pbkdf2), PASSPHRASE);
        assert_eq!((theirs.status.success(), ours.is_ok()), (!is_refused, !is_refused), "{sector} {len}: {ours:?}");
        if let Ok(luks) = ours {
            assert_eq!(luks.geometry(len, false).unwrap().len, (len - 16 * MIB) / 512 * 512);
        }
    }
}
