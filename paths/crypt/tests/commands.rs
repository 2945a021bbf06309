//! The subcommands, as a user calls them.

use std::fs;
use std::path::Path;

use crate::common::*;
use clap::Parser;
use pagemill_crypt::commands::{CryptArgs, OpenArgs, Said, run};
use pagemill_crypt::{Error, Luks};

#[derive(Parser)]
struct Program {
    #[command(flatten)]
    crypt: CryptArgs,
}

#[derive(Parser)]
struct Opening {
    image: std::path::PathBuf,
    #[command(flatten)]
    open: OpenArgs,
}

/// Runs `line` with `@` standing for the folder.
pub(crate) fn crypt(bench: &Bench, line: &str) -> Result<Said, Error> {
    let line = line.replace('@', &format!("{}/", bench.path("").display()));
    let words = std::iter::once("crypt").chain(line.split_whitespace());
    run(&Program::try_parse_from(words).unwrap_or_else(|error| panic!("{line}: {error}")).crypt, &mut |_| {})
}

pub(crate) fn opening(bench: &Bench, line: &str) -> OpenArgs {
    let line = line.replace('@', &format!("{}/", bench.path("").display()));
    let Opening { image, open } =
        Opening::try_parse_from(std::iter::once("open").chain(line.split_whitespace())).unwrap();
    open.of(&image)
}

pub(crate) const CHEAP: &str = "--kdf-iterations 4 --kdf-memory 64 --kdf-lanes 1";

#[test]
fn a_volume_is_formatted_shown_and_rekeyed_until_its_last_key() {
    let bench = Bench::with(&[]).unwrap();
    let made = crypt(&bench, &format!("format @a --size 20M --label home --key-file @pw {CHEAP}")).unwrap();
    assert!(made.out.contains("LUKS2, 4.0 MiB of data in 4096-byte sectors"), "{}", made.out);
    let info = crypt(&bench, "info @a").unwrap().out;
    for word in
        ["luks2", "home", "aes-xts-plain64", "512 bits", "16777216", "4194304", "keyslot 0       argon2id, 4 passes"]
    {
        assert!(info.contains(word), "{word}: {info}");
    }
    let json: serde_json::Value = serde_json::from_str(&crypt(&bench, "info @a --json").unwrap().out).unwrap();
    assert_eq!((&json["type"], &json["data_bytes"]), (&"luks2".into(), &4_194_304.into()));
    assert_eq!(json["keyslots"][0]["number"], 0);
    assert_eq!(json["faults"], serde_json::json!([]));

    crypt(&bench, "test-passphrase @a --key-file @pw").unwrap();
    assert!(matches!(
        crypt(&bench, "test-passphrase @a --key-file @wrong"),
        Err(Error::WrongPassphrase { tried: 1, .. })
    ));
    let added = crypt(&bench, &format!("add-key @a --key-file @pw --new-key-file @other --slot 5 {CHEAP}")).unwrap();
    assert!(added.out.ends_with("keyslot 5\n"), "{}", added.out);
    assert!(crypt(&bench, "test-passphrase @a --key-file @other --slot 5").is_ok());
    assert!(crypt(&bench, "test-passphrase @a --key-file @other --slot 0").is_err());
    assert!(crypt(&bench, "test-passphrase @a --key-file @other --slot 1").is_err());

    // Removing keyslot 5 needs the passphrase of another keyslot, so that nobody locks themselves out.
    assert!(matches!(crypt(&bench, "remove-key @a --slot 5 --key-file @other"), Err(Error::WrongPassphrase { .. })));
    crypt(&bench, "remove-key @a --slot 5 --key-file @pw").unwrap();
    assert!(crypt(&bench, "test-passphrase @a --key-file @other").is_err());
    assert!(matches!(crypt(&bench, "remove-key @a --key-file @pw"), Err(Error::LastKeyslot(0))));
    assert!(matches!(crypt(&bench, "remove-key @a --slot 0"), Err(Error::LastKeyslot(0))));
    crypt(&bench, "remove-key @a --slot 0 --last").unwrap();
    assert!(matches!(crypt(&bench, "test-passphrase @a --key-file @pw"), Err(Error::NoKeyslots)));
}

#[test]
fn format_refuses_existing_headers_and_data() {
    let bench = Bench::with(&[]).unwrap();
    let format = |more: &str| crypt(&bench, &format!("format @a --key-file @pw {CHEAP} {more}"));
    assert!(matches!(format(""), Err(Error::Request(_))), "it is not there, and no size is given");
    assert!(matches!(format("--size 1M"), Err(Error::Request(_))), "too small for a header");
    assert!(!bench.path("a").exists(), "what was made is gone again");
    format("--size 20M").unwrap();
    let before = fs::read(bench.path("a")).unwrap();
    assert!(matches!(format(""), Err(Error::Occupied(_))));
    assert!(matches!(format("--size 30M --force"), Err(Error::Request(_))), "it has another size");
    // A header with one damaged copy is still a header, and so is one with two.
    let mut bytes = before.clone();
    bytes[5000] ^= 1;
    bytes[21_000] ^= 1;
    write(&bench.path("a"), &bytes);
    assert!(matches!(format(""), Err(Error::Occupied(_))));
    let mut bytes = vec![0; 20 << 20];
    bytes[700_000] = 1;
    write(&bench.path("a"), &bytes);
    assert!(matches!(format(""), Err(Error::Occupied(_))));
    assert!(fs::read(bench.path("a")).unwrap() == bytes);
    format("--force").unwrap();
    // Neither at the beginning nor at the place of a signature.
    let mut bytes = vec![0; 20 << 20];
    bytes[10_000_000] = 1;
    write(&bench.path("a"), &bytes);
    assert!(matches!(format(""), Err(Error::Occupied(why)) if why.contains("10000000")));
    format("--force").unwrap();
    // A file whose header another process changes is not touched.
    let held = bench.open("a");
    held.lock().unwrap();
    assert!(matches!(format("--force"), Err(Error::Busy(_))));
    assert!(matches!(crypt(&bench, "info @a"), Err(Error::Busy(_))));
}

#[test]
fn keys_can_be_changed_while_the_volume_is_open() {
    let bench = Bench::with(&[]).unwrap();
    crypt(&bench, &format!("format @a --size 20M --key-file @pw {CHEAP}")).unwrap();
    for may_write in [true, false] {
        let opened = opening(&bench, "@a --key-file @pw").open(may_write).unwrap();
        assert!(crypt(&bench, "info @a").unwrap().out.contains("keyslot 0"));
        crypt(&bench, &format!("add-key @a --key-file @pw --new-key-file @other {CHEAP}")).unwrap();
        crypt(&bench, "test-passphrase @a --key-file @other --slot 1").unwrap();
        crypt(&bench, "remove-key @a --key-file @pw --slot 1").unwrap();
        assert!(matches!(crypt(&bench, &format!("format @a --force --key-file @pw {CHEAP}")), Err(Error::Busy(_))));
        let again = |may_write| opening(&bench, "@a --key-file @pw").open(may_write);
        assert!(matches!(again(true), Err(Error::Busy(_))));
        assert_eq!(again(false).is_ok(), !may_write, "readers share it");
        drop(opened);
    }
    crypt(&bench, &format!("format @a --force --key-file @pw {CHEAP}")).unwrap();
}

#[test]
fn a_signature_that_wipefs_knows_is_named() {
    let Some(bench) = Bench::with(&["wipefs", "mkswap"]) else { return };
    bench.file("a", 20 << 20);
    bench.ok("mkswap a");
    let refused = crypt(&bench, &format!("format @a --key-file @pw {CHEAP}")).unwrap_err();
    assert!(matches!(&refused, Error::Occupied(why) if why.contains("swap at 0xff6")), "{refused}");
    crypt(&bench, &format!("format @a --force --key-file @pw {CHEAP}")).unwrap();
}

#[test]
fn a_refused_format_leaves_the_file_unchanged() {
    let bench = Bench::with(&[]).unwrap();
    let format = |line: &str| crypt(&bench, &format!("format --key-file @pw {line}"));
    format(&format!("@a --size 20M {CHEAP}")).unwrap();
    let before = fs::read(bench.path("a")).unwrap();
    // Both are refused when the keyslot is made, after all other checks.
    for more in
        ["--kdf-iterations 4 --kdf-memory 1 --kdf-lanes 1", "--kdf-lanes 536870912", "--type luks1 --kdf argon2id"]
    {
        assert!(matches!(format(&format!("@a --force {more}")), Err(Error::Request(_))), "{more}");
        assert!(fs::read(bench.path("a")).unwrap() == before, "{more}");
    }
    // A header without room for data.
    let error = format(&format!("@b --size 16M {CHEAP}")).unwrap_err();
    assert!(
        matches!(&error, Error::Request(why) if why.contains("the smallest size that works is 16781312 bytes")),
        "{error}"
    );
    assert!(!bench.path("b").exists());
}

#[test]
fn only_files_and_block_devices_are_opened() {
    let bench = Bench::with(&[]).unwrap();
    let pipe = bench.path("pipe");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RWXU).unwrap();
    for line in ["info @", "info @pipe", "test-passphrase @pipe --key-file @pw", "format @pipe --key-file @pw"] {
        assert!(matches!(crypt(&bench, line), Err(Error::Request(why)) if why.ends_with("a block device")), "{line}");
    }
    let absent = crypt(&bench, "info @absent").unwrap_err();
    assert_eq!(absent.next_step(), Some("check the name"));
}

#[test]
fn a_volume_opens_with_a_detached_header() {
    let bench = Bench::with(&[]).unwrap();
    let made = format!("format @data --size 3M --header @header --key-file @pw {CHEAP}");
    crypt(&bench, &made).unwrap();
    assert_eq!(fs::metadata(bench.path("data")).unwrap().len(), 3 << 20);
    assert!(crypt(&bench, "info @data").is_err_and(|error| matches!(error, Error::NoHeader { .. })));
    let opened = opening(&bench, "@data --header @header --key-file @pw").open(true).unwrap();
    assert_eq!((opened.volume.geometry().offset, opened.volume.geometry().len), (0, 3 << 20));
    assert!(crypt(&bench, &format!("format @data --header @other-header --key-file @pw {CHEAP}")).is_err());
    drop(opened);
    assert!(crypt(&bench, "info @data --header @header").unwrap().out.contains("3145728"));
}

#[test]
fn a_detached_header_is_not_opened_as_its_own_data() {
    let bench = Bench::with(&[]).unwrap();
    for (kind, cheap) in [("luks1", "--kdf-iterations 1000"), ("luks2", CHEAP)] {
        let header = format!("@{kind}");
        crypt(&bench, &format!("format @data --size 3M --header {header} --type {kind} --key-file @pw {cheap}"))
            .unwrap();
        let error = opening(&bench, &format!("{header} --key-file @pw")).open(true).unwrap_err();
        assert!(matches!(&error, Error::Request(why) if why.contains("--header")), "{kind}: {error}");
        opening(&bench, &format!("@data --header {header} --key-file @pw")).open(true).unwrap();
        fs::remove_file(bench.path("data")).unwrap();
    }
}

#[test]
fn cost_limits_can_be_raised() {
    let bench = Bench::with(&[]).unwrap();
    crypt(&bench, &format!("format @a --size 20M --key-file @pw {CHEAP}")).unwrap();
    let tight = crypt(&bench, "test-passphrase @a --key-file @pw --max-kdf-memory 0").unwrap_err();
    assert!(
        tight.to_string().contains("4 passes of argon2") && tight.next_step().unwrap().contains("--max-kdf-memory")
    );
    let tight = crypt(&bench, "test-passphrase @a --key-file @pw --max-kdf-work 255").unwrap_err();
    assert!(matches!(tight, Error::TooExpensive(_)), "{tight}");
    crypt(&bench, "test-passphrase @a --key-file @pw --max-kdf-memory 1 --max-kdf-work 256").unwrap_err();
    crypt(&bench, "test-passphrase @a --key-file @pw --max-kdf-memory 1 --max-kdf-work 4000").unwrap();
}

#[test]
fn a_too_expensive_keyslot_does_not_block_removing_another() {
    let bench = Bench::with(&[]).unwrap();
    crypt(&bench, "format @a --size 20M --key-file @pw --kdf pbkdf2 --kdf-iterations 5000").unwrap();
    crypt(&bench, &format!("add-key @a --key-file @pw --new-key-file @other --slot 1 {CHEAP}")).unwrap();
    crypt(&bench, &format!("add-key @a --key-file @pw --new-key-file @wrong --slot 2 {CHEAP}")).unwrap();
    let remove = |key: &str| crypt(&bench, &format!("remove-key @a --slot 1 --key-file @{key} --max-kdf-work 4000"));
    assert!(matches!(remove("pw"), Err(Error::TooExpensive(_))), "only keyslot 0 would open with it");
    remove("wrong").unwrap();
    assert!(crypt(&bench, "test-passphrase @a --key-file @other").is_err());
}

/// The keys and the first bytes were computed independently, with Python's hashlib and cryptography.
#[test]
fn plain_mappings_give_the_expected_ciphertext() {
    let bench = Bench::with(&[]).unwrap();
    write(&bench.path("data"), &pattern(64 << 10));
    let open = |more: &str| opening(&bench, &format!("@data --type plain {more}")).open(false).unwrap().volume;
    write(&bench.path("line"), b"pass word\nmore");
    let mut found = Vec::new();
    for (bits, hash, more, at) in PLAIN {
        let line = fs::File::open(bench.path("line")).unwrap();
        let fd = std::os::fd::AsRawFd::as_raw_fd(&line);
        let volume = open(&format!("--plain-key-size {bits} --plain-hash {hash} --passphrase-fd {fd} {more}"));
        let size = volume.geometry().sector_size.bytes();
        let mut secret = vec![0; size];
        volume.encrypt(*at, &vec![0; size], &mut secret).unwrap();
        found.push(secret[..8].iter().map(|byte| format!("{byte:02x}")).collect::<String>());
    }
    assert_eq!(found, PLAIN_BYTES);
    // A key file is the key; the hash has no effect.
    write(&bench.path("key"), &[9; 80]);
    let volume = open(&format!("--plain-key-size 512 --key-file {}", bench.path("key").display()));
    let by_hand = pagemill_crypt::Xts::new(&[9; 64]).unwrap();
    let sectors = pagemill_crypt::Sectors { size: pagemill_crypt::SectorSize::SMALLEST, first: 2, step: 1 };
    let (mut one, mut other) = (vec![5; 512], vec![5; 512]);
    by_hand.encrypt_in_place(sectors, &mut one).unwrap();
    volume.encrypt(1024, &other.clone(), &mut other).unwrap();
    assert_eq!(one, other);
    let short =
        opening(&bench, &format!("@data --type plain --plain-key-size 512 --key-file {}", bench.path("pw").display()));
    assert!(short.open(false).unwrap_err().to_string().contains("a key takes 64"));
    // No header, and so no backup of one, is to blame.
    let beyond = opening(&bench, "@data --type plain --plain-size 1000 --key-file @key").open(false).unwrap_err();
    assert!(matches!(&beyond, Error::Request(why) if why.contains("cut off at 65536")), "{beyond}");
}

#[test]
fn options_for_the_other_kind_of_volume_are_refused() {
    let bench = Bench::with(&[]).unwrap();
    crypt(&bench, &format!("format @a --size 20M --key-file @pw {CHEAP}")).unwrap();
    for more in ["--plain-size 8", "--plain-offset 0", "--iv-large-sectors", "--type plain --header @a"] {
        let refused = opening(&bench, &format!("@a --key-file @pw {more}")).open(false).unwrap_err();
        assert!(matches!(&refused, Error::Request(why) if why.ends_with("out")), "{more}: {refused}");
    }
    opening(&bench, "@a --key-file @pw").open(false).unwrap();
}

/// Bits, hash, options, and a place in the volume.
const PLAIN: &[(u32, &str, &str, u64)] = &[
    (256, "sha256", "", 0),
    (512, "sha256", "", 512),
    (512, "sha512", "--plain-skip 7", 1024),
    (512, "sha1", "--plain-sector-size 4096", 4096),
    (256, "sha256", "--plain-sector-size 4096 --iv-large-sectors --plain-skip 8", 4096),
];
const PLAIN_BYTES: [&str; 5] =
    ["95dfef4332909494", "7dc8a844270a8a33", "247bf139c7207418", "660d02e2108ee31a", "f8db2143a46221b2"];

#[test]
fn output_fits_a_terminal_and_has_no_passphrase() {
    use clap::CommandFactory;
    let mut command = Program::command();
    let help = command.render_long_help().to_string();
    assert!(help.contains("never from an\nargument"));
    for sub in command.get_subcommands() {
        for argument in sub.get_arguments() {
            let name = argument.get_id().as_str();
            assert!(!matches!(name, "passphrase" | "password" | "key"), "{name}");
        }
    }
    for sub in command.get_subcommands_mut() {
        let name = sub.get_name().to_owned();
        let help = sub.render_long_help().to_string();
        help.lines().for_each(|line| assert!(line.chars().count() <= 80, "{name}: {line}"));
        // What stands below this heading is for them.
        let plain = help.split("\n\n").skip_while(|part| !part.starts_with("Plain volumes:"));
        let options = plain.flat_map(str::lines).take_while(|line| *line != "Memory and disk:");
        for option in options.map(str::trim).filter(|line| line.starts_with("--")) {
            assert!(option.starts_with("--plain-") || option == "--iv-large-sectors", "{name}: {option}");
        }
    }
    let error = crypt(&Bench::with(&[]).unwrap(), "info @nothing").unwrap_err();
    assert!(error.to_string().contains("nothing: No such file"), "{error}");
    assert!(Luks::read(&fs::File::open(Path::new("/dev/null")).unwrap()).is_err());
}

#[test]
fn keys_of_a_detached_header_can_be_changed() {
    let bench = Bench::with(&[]).unwrap();
    bench.file("data", 4 << 20);
    crypt(&bench, &format!("format @data --header @header --key-file @pw {CHEAP}")).unwrap();
    let before = fs::read(bench.path("data")).unwrap();
    assert!(matches!(crypt(&bench, "test-passphrase @data --key-file @pw"), Err(Error::NoHeader { .. })));
    let header = "@data --header @header --key-file @pw";
    assert!(crypt(&bench, &format!("test-passphrase {header}")).unwrap().out.contains("data: keyslot 0 opens"));
    crypt(&bench, &format!("add-key {header} --new-key-file @other --slot 3 {CHEAP}")).unwrap();
    crypt(&bench, "test-passphrase @data --header @header --key-file @other --slot 3").unwrap();
    crypt(&bench, &format!("remove-key {header} --slot 3")).unwrap();
    assert!(crypt(&bench, "test-passphrase @data --header @header --key-file @other").is_err());
    assert!(fs::read(bench.path("data")).unwrap() == before, "the data is left alone");
}

#[test]
fn json_reports_what_was_done() {
    let bench = Bench::with(&[]).unwrap();
    let json = |line: &str| -> serde_json::Value {
        serde_json::from_str(&crypt(&bench, &format!("{line} --json")).unwrap().out).unwrap()
    };
    let made = json(&format!("format @a --size 20M --key-file @pw {CHEAP}"));
    let info = json("info @a");
    for name in ["type", "uuid", "cipher", "key_bits", "sector_size", "data_offset", "data_bytes"] {
        assert_eq!(made[name], info[name], "{name}");
    }
    assert_eq!((&made["keyslot"], &made["is_detached"]), (&0.into(), &false.into()));
    assert_eq!(json("test-passphrase @a --key-file @pw")["keyslot"], 0);
    assert_eq!(json(&format!("add-key @a --key-file @pw --new-key-file @other {CHEAP}"))["keyslot"], 1);
    let removed = json("remove-key @a --key-file @other");
    assert_eq!(removed["keyslot"], 1);
    assert!(removed["image"].as_str().unwrap().ends_with("/a"), "{removed}");
}
