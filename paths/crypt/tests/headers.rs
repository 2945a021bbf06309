//! Headers that are damaged, cut off, hostile, or incompletely written.

use std::cell::RefCell;
use std::io;

use crate::common::*;
use pagemill_crypt::backup::Backup;
use pagemill_crypt::kdf::{KdfKind, Limits};
use pagemill_crypt::luks::New;
use pagemill_crypt::{Error, Luks, Store, luks1, luks2};
use proptest::prelude::*;

/// Memory instead of a file. At any moment the power may fail: writes since the last sync may be on the disk
/// completely, partly or not at all. `crashes` collects the possible contents.
#[derive(Default)]
pub(crate) struct Disk {
    pub(crate) now: RefCell<Vec<u8>>,
    /// The contents at the last sync.
    synced: RefCell<Vec<u8>>,
    /// Writes since then, with their places.
    pending: RefCell<Vec<(usize, Vec<u8>)>>,
    crashes: RefCell<Vec<Vec<u8>>>,
    is_watched: bool,
}

impl Disk {
    pub(crate) fn of(bytes: Vec<u8>) -> Self {
        Self { synced: RefCell::new(bytes.clone()), now: RefCell::new(bytes), ..Self::default() }
    }

    /// The same, with the contents that a crash can leave.
    pub(crate) fn watched(bytes: Vec<u8>) -> Self {
        Self { is_watched: true, ..Self::of(bytes) }
    }

    pub(crate) fn take_crashes(&self) -> Vec<Vec<u8>> {
        self.crashes.take()
    }
}

impl Store for Disk {
    fn size(&self) -> io::Result<u64> {
        Ok(self.now.borrow().len() as u64)
    }

    fn read_at(&self, buf: &mut [u8], at: u64) -> io::Result<()> {
        let now = self.now.borrow();
        let from = usize::try_from(at).ok().and_then(|at| now.get(at..)).and_then(|rest| rest.get(..buf.len()));
        buf.copy_from_slice(from.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn write_at(&self, data: &[u8], at: u64) -> io::Result<()> {
        let at = at as usize;
        self.pending.borrow_mut().push((at, data.to_vec()));
        if self.is_watched {
            // A part of each write: its first sector, its first half, all but its first sector.
            for part in [|_| 0..512, |len| 0..len / 2, |len| 512..len] as [fn(usize) -> std::ops::Range<usize>; 3] {
                let mut torn = self.synced.borrow().clone();
                for (at, data) in self.pending.borrow().iter() {
                    let part = part(data.len());
                    torn[at + part.start..at + part.end].copy_from_slice(&data[part]);
                }
                self.crashes.borrow_mut().push(torn);
            }
        }
        self.now.borrow_mut()[at..at + data.len()].copy_from_slice(data);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        *self.synced.borrow_mut() = self.now.borrow().clone();
        self.pending.borrow_mut().clear();
        if self.is_watched {
            self.crashes.borrow_mut().push(self.synced.borrow().clone());
        }
        Ok(())
    }
}

/// A LUKS2 volume with one keyslot, as bytes.
pub(crate) fn image() -> Vec<u8> {
    formatted(17 << 20, &new(2, 256, 512, KdfKind::Pbkdf2))
}

/// A LUKS1 volume with one keyslot, as bytes.
pub(crate) fn luks1_image() -> Vec<u8> {
    formatted(3 << 20, &new(1, 512, 512, KdfKind::Pbkdf2))
}

fn formatted(len: usize, new: &New) -> Vec<u8> {
    let disk = Disk::of(vec![0; len]);
    Luks::format(&disk, new, PASSPHRASE).unwrap();
    disk.now.into_inner()
}

pub(crate) fn opens(disk: &Disk, passphrase: &[u8]) -> bool {
    Luks::read(disk).unwrap().unlock(disk, passphrase, None, &Limits::default()).is_ok()
}

/// Copies the stack of this thread below its caller. Few and small frames overwrite it.
fn stack_below(memory: &std::fs::File, bytes: &mut [u8]) {
    use std::os::fd::AsRawFd;
    let here = bytes.as_ptr() as usize;
    let top = std::hint::black_box(&here) as *const usize as usize;
    let at = (top - bytes.len()) as libc::off_t;
    // SAFETY: the place is `bytes`, which is borrowed and has that length.
    let read = unsafe { libc::pread(memory.as_raw_fd(), bytes.as_mut_ptr().cast(), bytes.len(), at) };
    assert_eq!(read, bytes.len() as isize);
}

#[test]
fn no_key_is_left_on_the_stack() {
    let memory = std::fs::File::open("/proc/self/mem").unwrap();
    let mut stacks = [(); 3].map(|()| vec![0; 200 << 10]);
    for kind in [KdfKind::Pbkdf2, KdfKind::Argon2id] {
        let disk = Disk::of(vec![0; 17 << 20]);
        Luks::format(&disk, &new(2, 512, 512, kind), PASSPHRASE).unwrap();
        stack_below(&memory, &mut stacks[0]);
        let (luks, key) = opened(&disk);
        stack_below(&memory, &mut stacks[1]);
        let volume = luks.open(&disk, PASSPHRASE, 17 << 20, false, &Limits::default()).unwrap();
        stack_below(&memory, &mut stacks[2]);
        drop(volume);
        for (what, stack) in ["format", "unlock", "open"].into_iter().zip(&stacks) {
            for part in key.chunks(16) {
                assert!(!stack.windows(16).any(|there| there == part), "{kind:?}: {what}");
            }
        }
    }
}

pub(crate) const SECOND: usize = 16 << 10;

#[test]
fn a_flipped_bit_in_either_copy_is_reported_and_repaired() {
    let whole = image();
    let (_, key) = opened(&Disk::of(whole.clone()));
    // In each field of the fixed part, in the JSON, and after it.
    let places = [0, 6, 8, 15, 20, 30, 75, 110, 180, 210, 260, 300, 460, 2000, 4095, 4096, 4200, 16_000, SECOND - 1];
    for base in [0, SECOND] {
        for place in places {
            let mut bytes = whole.clone();
            bytes[base + place] ^= 0x10;
            let disk = Disk::of(bytes);
            let mut luks = Luks::read(&disk).unwrap_or_else(|error| panic!("{base}+{place}: {error}"));
            let faults = luks.faults();
            let name = if base == 0 { "primary" } else { "secondary" };
            assert!(faults.len() == 1 && faults[0].starts_with(name), "{base}+{place}: {faults:?}");
            assert!(opens(&disk, PASSPHRASE), "{base}+{place}");
            // The next write repairs both copies.
            luks.add_key(&disk, &key, OTHER, &cheap(KdfKind::Pbkdf2), None).unwrap();
            assert!(Luks::read(&disk).unwrap().faults().is_empty(), "{base}+{place}");
        }
    }
}

#[test]
fn format_clears_the_former_header_area_and_no_data() {
    let former = pattern(17 << 20);
    let disk = Disk::of(former.clone());
    Luks::format(&disk, &new(2, 256, 512, KdfKind::Pbkdf2), PASSPHRASE).unwrap();
    let now = disk.now.into_inner();
    let is_same = |at: usize| now[at..at + 16] == former[at..at + 16];
    assert!((0..16 << 20).step_by(16).all(|at| !is_same(at)));
    assert!(now[16 << 20..] == former[16 << 20..], "the data is left as it is");
}

#[test]
fn two_damaged_copies_are_an_error_that_names_both() {
    let mut bytes = image();
    bytes[5000] ^= 1;
    bytes[SECOND + 470] ^= 1;
    let error = Luks::read(&Disk::of(bytes)).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("primary: its checksum is wrong; secondary: its checksum is wrong"), "{text}");
    assert!(error.next_step().is_some_and(|next| next.contains("backup")));
}

#[test]
fn a_header_that_is_cut_off_is_an_error() {
    let whole = image();
    for len in [0, 1, 511, 592, 4095, 4096, 16_383] {
        let error = Luks::read(&Disk::of(whole[..len].to_vec())).unwrap_err();
        // If the file is long enough to recognise, the error says that it is cut off.
        match len {
            ..6 => assert!(matches!(error, Error::NoHeader { .. }), "{len}: {error}"),
            _ => assert_eq!(cut_off(&error), Some((len as u64, 2 * SECOND as u64)), "{len}: {error}"),
        }
    }
    // With one copy the volume is recognised. The keyslot's material is missing when it is read.
    let disk = Disk::of(whole[..40_000].to_vec());
    let luks = Luks::read(&disk).unwrap();
    let error = luks.unlock(&disk, PASSPHRASE, None, &Limits::default()).unwrap_err();
    assert_eq!(cut_off(&error), Some((40_000, 16 << 20)), "{error}");
    assert_eq!(cut_off(&luks.geometry(40_000, false).unwrap_err()), Some((40_000, (16 << 20) + 512)));
    assert!(matches!(Luks::read(&Disk::of(vec![0; 1 << 20])), Err(Error::NoHeader { .. })));
}

/// The length of a cut-off file, and the least length that it should have.
fn cut_off(error: &Error) -> Option<(u64, u64)> {
    match error {
        Error::CutOff { has, needs, .. } => Some((*has, *needs)),
        _ => None,
    }
}

#[test]
fn an_unknown_header_version_is_unsupported() {
    let mut bytes = image();
    for base in [0, SECOND] {
        bytes[base + 6..base + 8].copy_from_slice(&3u16.to_be_bytes());
    }
    let error = Luks::read(&Disk::of(bytes)).unwrap_err();
    assert!(matches!(&error, Error::Unsupported(why) if why.contains("version 3")), "{error}");
}

#[test]
fn a_crash_at_any_moment_leaves_a_header_that_opens() {
    let whole = image();
    // Begin with the copies in each state that a crash can leave.
    for damaged in [None, Some(4500), Some(SECOND + 4500)] {
        let mut bytes = whole.clone();
        if let Some(place) = damaged {
            bytes[place] ^= 1;
        }
        let disk = Disk { is_watched: true, ..Disk::of(bytes.clone()) };
        let (mut luks, key) = opened(&disk);
        luks.add_key(&disk, &key, OTHER, &cheap(KdfKind::Pbkdf2), None).unwrap();
        let during = disk.crashes.take();
        assert!(during.len() >= 9, "{}", during.len());
        for (i, crashed) in during.into_iter().enumerate() {
            let crashed = Disk::of(crashed);
            assert!(opens(&crashed, PASSPHRASE), "crash {i} of the addition, damaged at {damaged:?}");
            // If the header that is used names the new keyslot, it opens.
            let now = Luks::read(&crashed).unwrap();
            assert_eq!(now.used().contains(&1), opens(&crashed, OTHER), "crash {i}, damaged at {damaged:?}");
        }
        luks.remove_key(&disk, 0, false).unwrap();
        for (i, crashed) in disk.crashes.take().into_iter().enumerate() {
            assert!(opens(&Disk::of(crashed), OTHER), "crash {i} of the removal, damaged at {damaged:?}");
        }
        assert!(!opens(&disk, PASSPHRASE));
        // The old keyslot's material is wiped.
        assert!(disk.now.borrow()[32_768..32_768 + 128_000] != bytes[32_768..32_768 + 128_000]);
    }
}

#[test]
fn a_crash_in_a_change_leaves_the_old_passphrase_or_the_new_one() {
    for image in [image(), luks1_image()] {
        let disk = Disk { is_watched: true, ..Disk::of(image) };
        let (mut luks, key) = opened(&disk);
        let number = luks.change_key(&disk, &key, OTHER, &cheap(KdfKind::Pbkdf2), 0).unwrap();
        for (i, crashed) in disk.crashes.take().into_iter().enumerate() {
            let crashed = Disk::of(crashed);
            assert!(opens(&crashed, PASSPHRASE) || opens(&crashed, OTHER), "crash {i} of version {luks:?}");
        }
        assert!(!opens(&disk, PASSPHRASE) && opens(&disk, OTHER));
        let now = Luks::read(&disk).unwrap();
        assert_eq!((now.used(), now.openers()), (vec![number], vec![number]));
        assert_eq!(number, if matches!(now, Luks::V2(_)) { 0 } else { 1 });
        assert!(matches!(luks.change_key(&disk, &key, PASSPHRASE, &cheap(KdfKind::Pbkdf2), 7), Err(Error::Request(_))));
    }
}

#[test]
fn unbound_keyslots_do_not_count_as_openers() {
    let disk = Disk::of(image());
    let (mut luks, key) = opened(&disk);
    luks.add_key(&disk, &key, OTHER, &cheap(KdfKind::Pbkdf2), None).unwrap();
    // Like keyslots of `cryptsetup luksAddKey --unbound`: no digest binds it to the data.
    let mut bytes = disk.now.take();
    with_metadata(&mut bytes, |json| json["digests"]["0"]["keyslots"] = serde_json::json!(["0"]));
    let disk = Disk::of(bytes);
    let mut luks = Luks::read(&disk).unwrap();
    assert_eq!((luks.used(), luks.openers()), (vec![0, 1], vec![0]));
    assert!(matches!(luks.remove_key(&disk, 0, false), Err(Error::LastKeyslot(0))));
    assert!(opens(&disk, PASSPHRASE));
    // The new passphrase would take its place, and open nothing.
    assert!(matches!(luks.change_key(&disk, &key, OTHER, &cheap(KdfKind::Pbkdf2), 1), Err(Error::Request(_))));
    luks.remove_key(&disk, 1, false).unwrap();
    luks.remove_key(&disk, 0, true).unwrap();
    assert!(!opens(&disk, PASSPHRASE));
}

/// The header and the volume's key.
pub(crate) fn opened(disk: &Disk) -> (Luks, pagemill_crypt::secret::Locked) {
    let luks = Luks::read(disk).unwrap();
    let (_, key) = luks.unlock(disk, PASSPHRASE, None, &Limits::default()).unwrap();
    (luks, key)
}

#[test]
fn changes_that_would_overwrite_the_data_are_refused() {
    let mut whole = image();
    let noise = pattern(16 << 20);
    whole[512 << 10..16 << 20].copy_from_slice(&noise[512 << 10..]);
    let with_data_at = |begin: &str, size: &str| {
        let mut bytes = whole.clone();
        with_metadata(&mut bytes, |json| {
            json["segments"]["0"]["offset"] = begin.into();
            json["config"]["keyslots_size"] = size.into();
        });
        bytes
    };
    for (begin, size) in [("524288", "16744448"), ("524288", "491524"), ("4096", "16744448"), ("16777216", "16744449")]
    {
        let bytes = with_data_at(begin, size);
        let disk = Disk::of(bytes.clone());
        let (mut luks, key) = opened(&disk);
        let added = luks.add_key(&disk, &key, OTHER, &cheap(KdfKind::Pbkdf2), None);
        for error in [added.map(|_| ()).unwrap_err(), luks.remove_key(&disk, 0, true).unwrap_err()] {
            assert!(error.to_string().contains("would write over it"), "{begin}: {error}");
            assert!(error.next_step().is_some_and(|next| next.contains("backup")));
        }
        assert!(*disk.now.borrow() == bytes, "data at {begin}, {size} bytes of keyslots");
    }
    // Data that begins where the header ends, and data in another file.
    for (begin, size) in [("524288", "491520"), ("0", "16744448")] {
        let disk = Disk::of(with_data_at(begin, size));
        let (mut luks, key) = opened(&disk);
        luks.add_key(&disk, &key, OTHER, &cheap(KdfKind::Pbkdf2), None).unwrap();
        luks.remove_key(&disk, 0, true).unwrap();
        assert!(disk.now.borrow()[512 << 10..16 << 20] == noise[512 << 10..] || begin == "0", "{begin}");
    }
}

#[test]
fn luks1_changes_that_would_overwrite_other_areas_are_refused() {
    let whole = luks1_image();
    let payload = u32::from_be_bytes(whole[104..108].try_into().unwrap());
    let first = u32::from_be_bytes(whole[248..252].try_into().unwrap());
    // The place that an unused keyslot claims: across the data's beginning, in the data, in the first keyslot, in the
    // header.
    for (place, word) in
        [(payload - 1, "outside of"), (payload + 8, "outside of"), (first + 1, "overlap"), (1, "outside of")]
    {
        let mut bytes = whole.clone();
        bytes[256 + 40..256 + 44].copy_from_slice(&place.to_be_bytes());
        let disk = Disk::of(bytes.clone());
        let (mut luks, key) = opened(&disk);
        let error = luks.add_key(&disk, &key, OTHER, &cheap(KdfKind::Pbkdf2), Some(1)).unwrap_err();
        assert!(error.to_string().contains(word), "{place}: {error}");
        assert!(*disk.now.borrow() == bytes, "{place}");
    }
    let mut bytes = whole;
    bytes[104..108].copy_from_slice(&1u32.to_be_bytes());
    bytes[208..212].copy_from_slice(&0x0000_DEADu32.to_be_bytes());
    let error = Luks::read(&Disk::of(bytes)).unwrap_err();
    assert!(error.to_string().contains("inside the header"), "{error}");
}

#[test]
fn texts_of_any_bytes_survive_a_change() {
    // The whole field, without a zero at its end, in no known encoding.
    let text = |len: usize| -> Vec<u8> { (0..len as u8).map(|i| i.wrapping_mul(83) | 0x80).collect() };
    let mut bytes = image();
    for base in [0, SECOND] {
        for (at, len) in [(24, 48), (168, 40), (208, 48)] {
            bytes[base + at..base + at + len].copy_from_slice(&text(len));
        }
    }
    with_metadata(&mut bytes, |_| {});
    let disk = Disk::of(bytes);
    let (mut luks, key) = opened(&disk);
    luks.add_key(&disk, &key, OTHER, &cheap(KdfKind::Pbkdf2), None).unwrap();
    luks.remove_key(&disk, 0, false).unwrap();
    let Luks::V2(header) = Luks::read(&disk).unwrap() else { panic!("it was of version 2") };
    assert!(header.label().starts_with('\u{fffd}') && header.uuid().starts_with('\u{fffd}'));
    let now = disk.now.into_inner();
    for base in [0, SECOND] {
        for (at, len) in [(24, 48), (168, 40), (208, 48)] {
            assert!(now[base + at..base + at + len] == text(len), "{len} bytes at {base} + {at}");
        }
    }

    let disk = Disk::of(luks1_image());
    disk.now.borrow_mut()[168..208].copy_from_slice(&text(40));
    let (mut luks, key) = opened(&disk);
    luks.add_key(&disk, &key, OTHER, &cheap(KdfKind::Pbkdf2), None).unwrap();
    assert!(disk.now.borrow()[168..208] == text(40), "LUKS1");
}

/// Changes the metadata in both copies of a header, with a correct checksum.
pub(crate) fn with_metadata(bytes: &mut [u8], change: impl Fn(&mut serde_json::Value)) {
    for base in [0, SECOND] {
        let end = bytes[base + 4096..].iter().position(|&byte| byte == 0).unwrap();
        let mut json: serde_json::Value = serde_json::from_slice(&bytes[base + 4096..base + 4096 + end]).unwrap();
        change(&mut json);
        let text = json.to_string();
        bytes[base + 4096..base + SECOND].fill(0);
        bytes[base + 4096..base + 4096 + text.len()].copy_from_slice(text.as_bytes());
        bytes[base + 448..base + 512].fill(0);
        use sha2::Digest;
        let sum = sha2::Sha256::digest(&bytes[base..base + SECOND]);
        bytes[base + 448..base + 480].copy_from_slice(&sum);
    }
}

#[test]
fn impossible_metadata_is_refused_by_name() {
    use serde_json::json;
    let whole = image();
    // The place, the value, and a word of the error.
    let lies = [
        ("/keyslots/0/area/offset", json!("4096"), "outside of"),
        ("/keyslots/0/area/offset", json!("18446744073709551615"), "outside of"),
        ("/keyslots/0/area/offset", json!("-1"), "no number"),
        ("/keyslots/0/area/size", json!("99999999999"), "outside of"),
        ("/keyslots/0/area/size", json!("4096"), "do not fit"),
        ("/keyslots/0/af/stripes", json!(0), "stripes"),
        ("/keyslots/0/af/stripes", json!(4_294_967_295u32), "stripes"),
        ("/keyslots/0/af/stripes", json!(4_294_967_296u64), "keyslot 0"),
        ("/keyslots/0/key_size", json!(1_000_000), "do not fit"),
        ("/keyslots/0/key_size", json!(18_446_744_073_709_551_615u64), "do not fit"),
        ("/keyslots/0/key_size", json!(0), "do not fit"),
        ("/keyslots/0/kdf/salt", json!("%%%"), "Base64"),
        ("/keyslots/0/kdf", json!(7), "keyslot 0"),
        ("/keyslots", json!([]), "no keyslots"),
        ("/keyslots", json!({"32": {"type": "reencrypt"}}), "below 32"),
        ("/segments/0/offset", json!(0), "segments 0"),
        ("/config/json_size", json!("4096"), "json_size"),
        ("/config/keyslots_size", json!("99999999999999"), "keyslots_size"),
        ("/digests/0/keyslots", json!(["zero"]), "digests 0"),
    ];
    for (place, lie, word) in lies {
        let mut bytes = whole.clone();
        with_metadata(&mut bytes, |json| *json.pointer_mut(place).unwrap() = lie.clone());
        let error = Luks::read(&Disk::of(bytes)).expect_err(place);
        assert!(error.to_string().contains(word), "{place} {lie}: {error}");
    }
    let mut bytes = whole.clone();
    with_metadata(&mut bytes, |json| {
        let mut other = json["keyslots"]["0"].clone();
        let end = 32_768 + other["area"]["size"].as_str().unwrap().parse::<u64>().unwrap();
        other["area"]["offset"] = json!((end - 1).to_string());
        json["keyslots"]["1"] = other;
    });
    let error = Luks::read(&Disk::of(bytes)).unwrap_err();
    assert!(error.to_string().contains("overlaps with keyslot 0"), "{error}");
    // These are found when the volume is opened.
    let later = [
        ("/digests/0/digest", json!(""), "0 bytes"),
        ("/digests/0/iterations", json!(0), "0 iterations"),
        ("/digests/0/iterations", json!(4_294_967_295u32), "allowed"),
        ("/keyslots/0/kdf/iterations", json!(4_294_967_295u32), "allowed"),
        (
            "/keyslots/0/kdf",
            json!({"type": "argon2id", "time": 4, "memory": 4_294_967_295u32, "cpus": 4, "salt": "AAAAAAAAAAAAAAAAAAAAAA=="}),
            "allowed",
        ),
        ("/segments/0/offset", json!("0"), "--header"),
        ("/segments/0/offset", json!("512"), "inside the header"),
        ("/segments/0/size", json!("99999999999512"), "cut off"),
    ];
    for (place, lie, word) in later {
        let mut bytes = whole.clone();
        with_metadata(&mut bytes, |json| {
            let (parent, field) = place.rsplit_once('/').unwrap();
            json.pointer_mut(parent).unwrap()[field] = lie.clone();
        });
        let disk = Disk::of(bytes);
        let len = disk.size().unwrap();
        let luks = Luks::read(&disk).unwrap_or_else(|error| panic!("{place}: {error}"));
        let error = luks.open(&disk, PASSPHRASE, len, false, &Limits::default()).expect_err(place);
        assert!(error.to_string().contains(word), "{place} {lie}: {error}");
    }
}

#[test]
fn impossible_luks1_fields_are_refused_by_name() {
    let whole = luks1_image();
    assert!(opens(&Disk::of(whole.clone()), PASSPHRASE));
    let lies: [(usize, &[u8], &str); 7] = [
        (108, &[0xff; 4], "outside of"),
        (108, &[0; 4], "0 bytes"),
        (164, &[0; 4], "0 iterations"),
        (208, &[1, 2, 3, 4], "keyslot 0 is neither"),
        (208 + 40, &[0xff; 4], "outside of"),
        (208 + 40, &[0; 4], "outside of"),
        (208 + 44, &[0xff; 4], "4294967295 stripes"),
    ];
    for (place, lie, word) in lies {
        let mut bytes = whole.clone();
        bytes[place..place + lie.len()].copy_from_slice(lie);
        let error = Luks::read(&Disk::of(bytes)).expect_err(word);
        assert!(error.to_string().contains(word), "{place}: {error}");
    }
    // The second keyslot as a copy of the first, with the same key material.
    let mut bytes = whole.clone();
    bytes.copy_within(208..256, 256);
    let error = Luks::read(&Disk::of(bytes)).unwrap_err();
    assert!(error.to_string().contains("keyslots 0 and 1 overlap"), "{error}");
    for place in [164, 208 + 4] {
        let mut bytes = whole.clone();
        bytes[place..place + 4].fill(0xff);
        let disk = Disk::of(bytes);
        let error = Luks::read(&disk).unwrap().unlock(&disk, PASSPHRASE, None, &Limits::default()).unwrap_err();
        assert!(matches!(error, Error::TooExpensive(_)), "{place}: {error}");
    }
    let cut = Disk::of(whole[..600].to_vec());
    assert_eq!(cut_off(&Luks::read(&cut).unwrap_err()), Some((600, 2 << 20)), "no lie, and no damage");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn no_bytes_make_the_parsers_panic(bytes in prop::collection::vec(any::<u8>(), 0..5000)) {
        let _ = luks2::Header::parse(&bytes);
        let mut first = [0; luks1::HEADER];
        first[..bytes.len().min(luks1::HEADER)].copy_from_slice(&bytes[..bytes.len().min(luks1::HEADER)]);
        first[..8].copy_from_slice(b"LUKS\xba\xbe\0\x01");
        let _ = luks1::Header::parse(&first, bytes.len() as u64);
        let _ = Luks::read(&Disk::of(bytes));
    }

    #[test]
    fn no_change_to_the_metadata_makes_the_parsers_panic(
        place in 0usize..40,
        lie in prop_oneof![
            Just(serde_json::json!(null)), Just(serde_json::json!({})), Just(serde_json::json!([[]])),
            any::<u64>().prop_map(|n| serde_json::json!(n)), any::<u64>().prop_map(|n| serde_json::json!(n.to_string())),
            ".{0,20}".prop_map(|text| serde_json::json!(text)),
        ],
    ) {
        thread_local!(static WHOLE: Vec<u8> = image());
        let mut bytes = WHOLE.with(|whole| whole[..2 * SECOND + 400_000].to_vec());
        with_metadata(&mut bytes, |json| {
            // A keyslots area that is there.
            json["config"]["keyslots_size"] = "397312".into();
            let mut places = Vec::new();
            pointers(json, String::new(), &mut places);
            let place = &places[place % places.len()];
            *json.pointer_mut(place).unwrap() = lie.clone();
        });
        let disk = Disk::of(bytes);
        if let Ok(luks) = Luks::read(&disk) {
            let _ = luks.geometry(17 << 20, false);
            let _ = luks.geometry(17 << 20, true);
            let few = Limits { memory_kib: 1024, work: 5000 };
            let _ = luks.unlock(&disk, PASSPHRASE, None, &few);
            let _ = Backup::take(luks.clone(), &disk);
            let bytes = disk.now.borrow().clone();
            let _ = luks.clone().erase(&disk);
            // The metadata's keyslots may be anywhere in it.
            if let Ok(backup) = Backup::read(bytes) {
                let _ = backup.restore(&disk, Some(&luks));
            }
        }
    }
}

/// The pointers to all values in `json`.
fn pointers(json: &serde_json::Value, at: String, found: &mut Vec<String>) {
    let children: Vec<_> = match json {
        serde_json::Value::Object(map) => map.iter().map(|(key, value)| (key.clone(), value)).collect(),
        serde_json::Value::Array(list) => list.iter().enumerate().map(|(i, value)| (i.to_string(), value)).collect(),
        _ => Vec::new(),
    };
    for (key, value) in children {
        let place = format!("{at}/{key}");
        pointers(value, place.clone(), found);
        found.push(place);
    }
}
