//! Headers at a far end that fails, or is lost and comes back, at every step of a change.

use std::cell::Cell;
use std::io;

use crate::common::far_end::*;
use crate::common::*;
use crate::headers::{Disk, image, luks1_image, opened, opens};
use pagemill_crypt::backup::Backup;
use pagemill_crypt::kdf::KdfKind;
use pagemill_crypt::secret::Locked;
use pagemill_crypt::serve::Far;
use pagemill_crypt::{Error, Luks, Store};

const NEW: &[u8] = b"the new one";

/// A far end, of which something becomes before a write or sync: the one of number `left`.
struct Struck<'a> {
    far: Far,
    left: Cell<i64>,
    strike: &'a dyn Fn(),
}

impl Struck<'_> {
    fn step(&self) {
        if self.left.replace(self.left.get() - 1) == 0 {
            (self.strike)();
        }
    }
}

impl Store for Struck<'_> {
    fn size(&self) -> io::Result<u64> {
        self.far.size()
    }
    fn read_at(&self, buf: &mut [u8], at: u64) -> io::Result<()> {
        self.far.read_at(buf, at)
    }
    fn write_at(&self, data: &[u8], at: u64) -> io::Result<()> {
        self.step();
        self.far.write_at(data, at)
    }
    fn sync(&self) -> io::Result<()> {
        self.step();
        self.far.sync()
    }
}

type Change = fn(&mut Luks, &dyn Store, &Locked, &Backup) -> Result<(), Error>;

/// Changes of a volume with one passphrase, and which passphrases open it afterwards: that one, and a new one.
const CHANGES: [(&str, Change, [bool; 2]); 5] = [
    ("add", |luks, store, key, _| luks.add_key(store, key, NEW, &cheap(KdfKind::Pbkdf2), None).map(drop), [true, true]),
    (
        "change",
        |luks, store, key, _| luks.change_key(store, key, NEW, &cheap(KdfKind::Pbkdf2), 0).map(drop),
        [false, true],
    ),
    ("remove", |luks, store, _, _| luks.remove_key(store, 0, true), [false, false]),
    ("erase", |luks, store, _, _| luks.erase(store), [false, false]),
    ("restore", |luks, store, _, backup| backup.restore(store, Some(luks)), [true, false]),
];

/// Strikes before each step of each change. `check` is told whether the change was reported as done, which passphrases
/// open what is on the disk then, and which should after the whole change.
fn strikes(blocks: Option<[u32; 3]>, strike: fn(&FarEnd), check: impl Fn(&str, bool, [bool; 2], [bool; 2])) {
    let bench = Bench::with(&[]).unwrap();
    for bytes in [luks1_image(), image()] {
        let before = Disk::of(bytes.clone());
        let (luks, key) = opened(&before);
        let backup = Backup::take(luks.clone(), &before).unwrap();
        for (name, change, after) in CHANGES {
            for step in 0.. {
                let end = FarEnd::start(&bench.path("far"), bytes.len() as u64);
                end.with(|state| state.blocks = blocks);
                let far = end.connect(PATIENCE);
                far.write_at(&bytes, 0).unwrap();
                far.sync().unwrap();
                let store = Struck { far, left: Cell::new(step), strike: &|| strike(&end) };
                let is_done = change(&mut luks.clone(), &store, &key, &backup).is_ok();
                let is_past = store.left.get() >= 0;
                end.with(|state| (state.write_fails, state.flush_fails) = (None, None));
                drop(store);
                end.kill();
                let left = Disk::of(end.with(|state| state.durable().to_vec()));
                let open = [PASSPHRASE, NEW].map(|passphrase| opens(&left, passphrase));
                check(&format!("{name}, step {step}"), is_done, open, after);
                if is_past {
                    assert!(is_done, "{name}");
                    break;
                }
            }
        }
    }
}

/// Sizes of blocks, so that several parts of a header are in one.
const LARGE: Option<[u32; 3]> = Some([65536, 65536, 1 << 20]);

#[test]
fn a_change_at_a_far_end_that_comes_back_is_done_to_the_end() {
    for blocks in [None, LARGE] {
        let strike = |end: &FarEnd| {
            end.kill();
            end.restart();
        };
        strikes(blocks, strike, |what, is_done, open, after| {
            assert!(is_done, "{what}");
            assert_eq!(open, after, "{what}");
        });
    }
}

#[test]
fn a_change_at_a_far_end_that_fails_is_not_reported_as_done() {
    for blocks in [None, LARGE] {
        for strike in [
            |end: &FarEnd| end.with(|state| (state.write_fails, state.flush_fails) = (Some(28), Some(28))),
            |end: &FarEnd| end.with(|state| state.flush_fails = Some(5)),
        ] {
            strikes(blocks, strike, |what, is_done, open, after| match is_done {
                true => assert_eq!(open, after, "{what}"),
                false => assert!(open != [false; 2] || after == [false; 2], "{what}: {open:?}"),
            });
        }
    }
}
