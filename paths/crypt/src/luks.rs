//! A LUKS volume of either version: which version it is, and the operations that both have.
use crate::cipher::SectorSize;
use crate::hash::Hash;
use crate::kdf::{Kdf, KdfChoice, KdfKind, Limits};
use crate::secret::{Locked, scrub_stack};
use crate::store::Store;
use crate::volume::{Geometry, Volume};
use crate::{Error, luks1, luks2};
use std::cell::Cell;
use std::io;
use std::ops::Range;
use std::time::Duration;

/// How long computing the digest of a volume key takes. It is checked for each keyslot that is tried.
pub(crate) const DIGEST_TIME: Duration = Duration::from_millis(125);

/// A header of either version.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "there is one, and it stays where it is")]
pub enum Luks {
    /// Version 1.
    V1(luks1::Header),
    /// Version 2.
    V2(luks2::Header),
}

/// A new keyslot that has no place yet: its function, the splitter's hash, and the key that encrypts its material.
pub(crate) struct NewSlot {
    pub(crate) kdf: Kdf,
    pub(crate) hash: Hash,
    pub(crate) key: Locked,
}

/// The parameters of a new volume.
#[derive(Clone, Debug)]
pub struct New {
    /// 1 or 2.
    pub version: u8,
    /// Bytes of the volume key: 32 (AES-128) or 64 (AES-256).
    pub key_bytes: usize,
    /// Bytes a sector; LUKS1 has 512 alone.
    pub sector_size: SectorSize,
    /// The hash of digests and splitters.
    pub hash: Hash,
    /// The first keyslot's function.
    pub kdf: KdfChoice,
    /// A label, in LUKS2.
    pub label: String,
    /// Bytes of the data's file, if that is not the header's file.
    pub detached: Option<u64>,
}

impl Luks {
    /// Reads the header at the beginning of `store`.
    ///
    /// # Errors
    /// [`Error::NoHeader`] if there is none; [`Error::Header`] if it is damaged or has impossible values;
    /// [`Error::CutOff`] if the file ends within it; [`Error::Unsupported`].
    pub fn read(store: &dyn Store) -> Result<Self, Error> {
        let size = store.size().map_err(|error| Error::io("the header's file", error))?;
        let mut first = [0; luks1::HEADER];
        let there = first.len().min(usize::try_from(size).unwrap_or(usize::MAX));
        store.read_at(&mut first[..there], 0).map_err(|error| Error::io("reading the header", error))?;
        let begins_as_one = first.starts_with(&luks1::MAGIC);
        if begins_as_one && there < first.len() {
            return Err(Error::cut_off(size, header_len(&first)));
        }
        match luks1::Header::parse(&first, size) {
            Err(Error::NoHeader { .. }) => {}
            header => return header.map(Self::V1),
        }
        match luks2::Header::read(store) {
            Ok(header) => Ok(Self::V2(header)),
            Err(Error::Header(_)) if first.starts_with(&luks1::MAGIC_WHILE_REENCRYPTED) => Err(Error::Unsupported(
                "a re-encryption of this LUKS1 volume is under way, which is not supported: finish it (cryptsetup reencrypt)"
                    .to_owned(),
            )),
            // Bytes that do not even begin like a header are no header.
            Err(Error::Header(_)) if !begins_as_one => Err(Error::NoHeader { file: String::new() }),
            Err(Error::Header(why)) => Err(match luks1::version(&first) {
                2 if size < header_len(&first) => Error::cut_off(size, header_len(&first)),
                2 => Error::Header(why),
                // Neither copy is of version 2, so this one is not a damaged header of version 2.
                other => Error::Unsupported(format!("the header is of LUKS version {other}; 1 and 2 are supported")),
            }),
            Err(error) => Err(error),
        }
    }

    /// Makes a header with one keyslot, writes it to `store`, and returns it. Nothing is written until the whole header
    /// is made.
    ///
    /// # Errors
    /// [`Error::Request`] for invalid parameters, [`Error::Io`].
    pub fn format(store: &dyn Store, new: &New, passphrase: &[u8]) -> Result<Self, Error> {
        let key = Locked::random(new.key_bytes)?;
        let size = store.size().map_err(|error| Error::io("the header's file", error))?;
        // If the keyslot's cost is given, the digest's cost is not measured either.
        let digest_iterations = new.kdf.iterations.map(|_| crate::kdf::MIN_ITERATIONS);
        let mut header = Self::without_keyslots(new, &key, digest_iterations)?;
        let is_detached = new.detached.is_some();
        let data_len = new.detached.unwrap_or(size);
        check_room(&header, new, size)?;
        let geometry = header.geometry(data_len, is_detached)?;
        if new.sector_size > SectorSize::SMALLEST && geometry.offset + geometry.len != data_len {
            let (odd, sector) = (data_len - geometry.offset - geometry.len, new.sector_size.bytes());
            let why = format!("the data's size is {odd} bytes off a multiple of {sector}: cut them off, or add some");
            return Err(Error::Request(why));
        }
        let store = ClearedAtFirstWrite { store, len: header.end(), is_cleared: Cell::new(false) };
        header.add_key(&store, &key, passphrase, &new.kdf, Some(0))?;
        Ok(header)
    }

    /// Checks that such a volume can be made, with its header in a file of `size` bytes. Called before the user is
    /// asked for a passphrase.
    ///
    /// # Errors
    /// [`Error::Request`].
    pub(crate) fn check_new(new: &New, size: u64) -> Result<(), Error> {
        let key = Locked::zeroed(new.key_bytes);
        check_room(&Self::without_keyslots(new, &key, Some(crate::kdf::MIN_ITERATIONS))?, new, size)
    }

    fn without_keyslots(new: &New, key: &Locked, digest_iterations: Option<u32>) -> Result<Self, Error> {
        if !matches!(new.key_bytes, 32 | 64) {
            return Err(Error::Request(format!("a key of {} bits: it has 256 or 512", 8 * new.key_bytes)));
        }
        let is_detached = new.detached.is_some();
        match new.version {
            1 if new.sector_size != SectorSize::SMALLEST => {
                Err(Error::Request("LUKS1 has sectors of 512 bytes alone: say --type luks2".to_owned()))
            }
            1 if !new.label.is_empty() => Err(Error::Request("LUKS1 has no label: say --type luks2".to_owned())),
            1 => Ok(Self::V1(luks1::Header::new(key, new.hash, is_detached, digest_iterations)?)),
            2 => {
                let New { hash, sector_size, label, .. } = new;
                Ok(Self::V2(luks2::Header::new(key, *hash, *sector_size, label, is_detached, digest_iterations)?))
            }
            other => Err(Error::Request(format!("there is no LUKS{other}"))),
        }
    }

    /// The number of the keyslot that `passphrase` opens, and the volume key. `only` restricts it to one keyslot.
    ///
    /// # Errors
    /// [`Error::WrongPassphrase`]; [`Error::TooExpensive`] beyond `limits`; [`Error::Unsupported`]; [`Error::Io`].
    pub fn unlock(
        &self,
        store: &dyn Store,
        passphrase: &[u8],
        only: Option<u32>,
        limits: &Limits,
    ) -> Result<(u32, Locked), Error> {
        only.map_or(Ok(()), |number| self.check_opener(number))?;
        let found = match self {
            Self::V1(header) => header.unlock(store, passphrase, only, limits),
            Self::V2(header) => header.unlock(store, passphrase, only, limits),
        };
        scrub_stack();
        found.map_err(|error| error.of_passphrase(passphrase))
    }

    /// Opens the volume whose data is in a file of `data_len` bytes, the header's own unless `is_detached`.
    ///
    /// # Errors
    /// As for [`Luks::unlock`]; [`Error::CutOff`], [`Error::Header`] and [`Error::Request`] if the data does not fit
    /// its file.
    pub fn open(
        &self,
        store: &dyn Store,
        passphrase: &[u8],
        data_len: u64,
        is_detached: bool,
        limits: &Limits,
    ) -> Result<Volume, Error> {
        let geometry = self.geometry(data_len, is_detached)?;
        let (_, key) = self.unlock(store, passphrase, None, limits)?;
        Volume::new(&key, geometry)
    }

    /// Puts `passphrase` into a free keyslot, `wanted` or the first one, for the volume key that [`Luks::unlock`]
    /// returned. Returns the keyslot's number.
    ///
    /// # Errors
    /// [`Error::Request`] if there is no room, [`Error::Io`].
    pub fn add_key(
        &mut self,
        store: &dyn Store,
        key: &Locked,
        passphrase: &[u8],
        choice: &KdfChoice,
        wanted: Option<u32>,
    ) -> Result<u32, Error> {
        let slot = self.derive_slot(key, passphrase, choice)?;
        self.add_slot(store, key, &slot, wanted)
    }

    /// The part of [`Luks::add_key`] that takes long and writes nothing: derives the key of a new keyslot.
    pub(crate) fn derive_slot(&self, key: &Locked, passphrase: &[u8], choice: &KdfChoice) -> Result<NewSlot, Error> {
        let choice = match self {
            Self::V1(header) => header.choice(choice)?,
            Self::V2(_) => *choice,
        };
        let kdf = choice.make(key.len())?;
        let mut slot_key = Locked::zeroed(key.len());
        let derived = kdf.derive(passphrase, &mut slot_key, &Limits::NONE);
        scrub_stack();
        derived.map(|()| NewSlot { kdf, hash: choice.hash, key: slot_key })
    }

    /// The part of [`Luks::add_key`] that writes.
    pub(crate) fn add_slot(
        &mut self,
        store: &dyn Store,
        key: &Locked,
        slot: &NewSlot,
        wanted: Option<u32>,
    ) -> Result<u32, Error> {
        let number = match self {
            Self::V1(header) => header.add(store, key, slot, wanted),
            Self::V2(header) => header.add(store, key, slot, wanted),
        };
        scrub_stack();
        number
    }

    /// Whether both were read from the same header, and nothing was changed in between.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::V1(header), Self::V1(other)) => header == other,
            (Self::V2(header), Self::V2(other)) => header.is_same(other),
            _ => false,
        }
    }

    /// Wipes keyslot `number`; the last keyslot that opens the volume only if `even_last` is set.
    ///
    /// # Errors
    /// [`Error::LastKeyslot`], [`Error::Request`] if there is no such keyslot, [`Error::Io`].
    pub fn remove_key(&mut self, store: &dyn Store, number: u32, even_last: bool) -> Result<(), Error> {
        if self.openers() == [number] && !even_last {
            return Err(Error::LastKeyslot(number));
        }
        match self {
            Self::V1(header) => header.remove(store, number),
            Self::V2(header) => header.remove(store, number, None),
        }
    }

    /// Wipes all keyslots, of any kind: no passphrase opens the volume any more. If it stops in the middle, some of them
    /// are wiped, and the next call wipes the rest.
    ///
    /// # Errors
    /// [`Error::Io`], and as for [`Luks::check_changeable`].
    pub fn erase(&mut self, store: &dyn Store) -> Result<(), Error> {
        match self {
            Self::V1(header) => header.erase(store),
            Self::V2(header) => header.erase(store),
        }
    }

    /// Puts `passphrase` in the place of the one that opens keyslot `number`, for the volume key that [`Luks::unlock`]
    /// returned. Returns the keyslot's number, which stays the same in LUKS2. At every moment one of the two opens the
    /// volume.
    ///
    /// # Errors
    /// As for [`Luks::add_key`] and [`Luks::remove_key`]: a free keyslot is needed meanwhile.
    pub fn change_key(
        &mut self,
        store: &dyn Store,
        key: &Locked,
        passphrase: &[u8],
        choice: &KdfChoice,
        number: u32,
    ) -> Result<u32, Error> {
        let slot = self.derive_slot(key, passphrase, choice)?;
        self.change_slot(store, key, &slot, number)
    }

    /// The part of [`Luks::change_key`] that writes.
    pub(crate) fn change_slot(
        &mut self,
        store: &dyn Store,
        key: &Locked,
        slot: &NewSlot,
        number: u32,
    ) -> Result<u32, Error> {
        self.check_opener(number)?;
        let heir = self.add_slot(store, key, slot, None)?;
        match self {
            // Its key material stays where it is, and the numbers go by the places.
            Self::V1(header) => header.remove(store, number).map(|()| heir),
            Self::V2(header) => header.remove(store, number, Some(heir)).map(|()| number),
        }
    }

    /// Bytes of a backup: the header and its keyslots.
    pub(crate) fn backup_len(&self) -> Result<u64, Error> {
        match self {
            Self::V1(header) => header.backup_len(),
            Self::V2(header) => Ok(header.end()),
        }
    }

    /// Whether both are headers of one volume: its UUID, its layout and the digest of its key are the same.
    pub(crate) fn is_of_same_volume(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::V1(header), Self::V1(other)) => header.is_of_same_volume(other),
            (Self::V2(header), Self::V2(other)) => header.is_of_same_volume(other),
            _ => false,
        }
    }

    /// Writes this header, whose backup is `bytes`, in the place of `present`.
    pub(crate) fn put_back(&self, store: &dyn Store, bytes: &[u8], present: Option<&Self>) -> Result<(), Error> {
        match (self, present) {
            (Self::V1(header), _) => header.put_back(store, bytes),
            (Self::V2(header), Some(Self::V2(present))) => header.put_back(store, bytes, Some(present)),
            (Self::V2(header), _) => header.put_back(store, bytes, None),
        }
    }

    /// The volume's UUID.
    #[must_use]
    pub fn uuid(&self) -> String {
        match self {
            Self::V1(header) => header.uuid(),
            Self::V2(header) => header.uuid(),
        }
    }

    /// Numbers of the keyslots in use that are of a supported kind.
    #[must_use]
    pub fn used(&self) -> Vec<u32> {
        match self {
            Self::V1(header) => header.used(),
            Self::V2(header) => header.metadata().keyslots.keys().copied().collect(),
        }
    }

    /// Numbers of the keyslots that open the volume. In LUKS2 a keyslot may hold the key of something else.
    #[must_use]
    pub fn openers(&self) -> Vec<u32> {
        match self {
            Self::V1(header) => header.used(),
            Self::V2(header) => header.openers(),
        }
    }

    /// Checks that keyslot `number` exists and is of a supported kind.
    ///
    /// # Errors
    /// [`Error::Request`] if it does not exist, [`Error::Unsupported`].
    pub fn check_slot(&self, number: u32) -> Result<(), Error> {
        match self {
            Self::V2(header) => header.check_slot(number),
            Self::V1(header) if header.used().contains(&number) => Ok(()),
            Self::V1(_) => Err(no_such_slot(number)),
        }
    }

    /// The same, and that it holds the volume's key, if any does.
    fn check_opener(&self, number: u32) -> Result<(), Error> {
        self.check_slot(number)?;
        if !self.openers().is_empty() && !self.openers().contains(&number) {
            let why = format!("keyslot {number} holds the key of something else: it does not open the volume");
            return Err(Error::Request(why));
        }
        Ok(())
    }

    /// Checks that some keyslot can be tried, if there are any. Called before the user is asked for a passphrase.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with the reason for each.
    pub fn check_openers(&self) -> Result<(), Error> {
        match self {
            Self::V1(header) => header.check_supported(),
            Self::V2(header) => header.check_openers(),
        }
    }

    /// Checks that nothing else has taken this volume's place, so that writing to it destroys nothing else.
    ///
    /// # Errors
    /// [`Error::Overwritten`], [`Error::TwoVolumes`].
    pub fn check_not_written_over(&self) -> Result<(), Error> {
        match self {
            Self::V1(_) => Ok(()),
            Self::V2(header) => header.check_not_written_over(),
        }
    }

    /// Checks that keys can be added and removed.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::Overwritten`], [`Error::TwoVolumes`].
    pub fn check_changeable(&self) -> Result<(), Error> {
        match self {
            Self::V1(header) => header.check_supported(),
            Self::V2(header) => header.check_changeable(),
        }
    }

    /// The first byte after the header and its keyslots.
    fn end(&self) -> u64 {
        match self {
            Self::V1(header) => header.end(),
            Self::V2(header) => header.end(),
        }
    }

    /// Where the data lies in a file of `data_len` bytes.
    ///
    /// # Errors
    /// As for [`Luks::open`].
    pub fn geometry(&self, data_len: u64, is_detached: bool) -> Result<Geometry, Error> {
        let geometry = match self {
            Self::V1(header) => header.geometry(data_len),
            Self::V2(header) => header.geometry(data_len),
        }?;
        self.check_geometry(geometry, is_detached)
    }

    /// The same for data that goes to the end of its file, whatever the header says of its size.
    pub(crate) fn whole_geometry(&self, data_len: u64, is_detached: bool) -> Result<Geometry, Error> {
        let geometry = match self {
            Self::V1(header) => header.geometry(data_len),
            Self::V2(header) => header.geometry_with(data_len, None),
        }?;
        self.check_geometry(geometry, is_detached)
    }

    fn check_geometry(&self, geometry: Geometry, is_detached: bool) -> Result<Geometry, Error> {
        // Data written there would overwrite the header.
        match self {
            _ if is_detached => Ok(geometry),
            _ if geometry.offset == 0 => {
                let why = "the data of this header lies in a file of its own: name that one, and this with --header";
                Err(Error::Request(why.to_owned()))
            }
            Self::V2(header) if geometry.offset < header.end() => {
                let (offset, end) = (geometry.offset, header.end());
                Err(Error::Header(format!("the data begins at {offset}, inside the header, which ends at {end}")))
            }
            // For version 1, reading the header has checked this.
            _ => Ok(geometry),
        }
    }

    /// How many bytes of data there are, if the header says that, so that they do not follow their file's size.
    pub(crate) fn fixed_size(&self) -> Option<u64> {
        match self {
            Self::V1(_) => None,
            Self::V2(header) => header.size(),
        }
    }

    /// Writes how many bytes of data there are, if the header says that.
    pub(crate) fn set_size(&mut self, store: &dyn Store, size: u64) -> Result<(), Error> {
        match self {
            Self::V2(header) if header.size().is_some() => header.put_size(store, size),
            _ => Ok(()),
        }
    }

    /// What is wrong with the header, although it can be used; a line each.
    #[must_use]
    pub fn faults(&self) -> Vec<String> {
        match self {
            Self::V1(_) => Vec::new(),
            Self::V2(header) => header.faults(),
        }
    }

    /// The default function of keyslots of this version.
    #[must_use]
    pub fn default_kdf(&self) -> KdfKind {
        match self {
            Self::V1(_) => KdfKind::Pbkdf2,
            Self::V2(_) => KdfKind::Argon2id,
        }
    }
}

/// The least bytes of the header that begins with `first`, without keyslots: both copies in version 2.
fn header_len(first: &[u8; luks1::HEADER]) -> u64 {
    if luks1::version(first) == 2 { luks2::copies_len(first) } else { first.len() as u64 }
}

/// Checks that a file of `size` bytes has room for a new `header`, and that there is room for a sector of data.
fn check_room(header: &Luks, new: &New, size: u64) -> Result<(), Error> {
    let sector = new.sector_size.bytes() as u64;
    let files = match new.detached {
        None => [Some(("the file", size, header.end() + sector)), None],
        Some(data) => [Some(("the header's file", size, header.end())), Some(("the data's file", data, sector))],
    };
    match files.into_iter().flatten().find(|&(_, has, least)| has < least) {
        None => Ok(()),
        Some((what, has, least)) => Err(Error::Request(format!(
            "{what} has {has} bytes: for LUKS{} with {sector}-byte sectors the smallest size that works is {least} bytes",
            new.version
        ))),
    }
}

/// A store whose first `len` bytes are cleared by the first write. Making a keyslot takes seconds and may fail; until
/// it is made, the old contents stay.
struct ClearedAtFirstWrite<'a> {
    store: &'a dyn Store,
    len: u64,
    is_cleared: Cell<bool>,
}

impl Store for ClearedAtFirstWrite<'_> {
    fn size(&self) -> io::Result<u64> {
        self.store.size()
    }
    fn read_at(&self, buf: &mut [u8], at: u64) -> io::Result<()> {
        self.store.read_at(buf, at)
    }
    fn write_at(&self, data: &[u8], at: u64) -> io::Result<()> {
        if !self.is_cleared.replace(true) {
            clear(self.store, 0..self.len)?;
        }
        self.store.write_at(data, at)
    }
    fn sync(&self) -> io::Result<()> {
        self.store.sync()
    }
}

/// Overwrites these bytes with zeroes, with headers and key material of a former volume or former keyslots among them.
/// Bytes that are zero already are not written, so that a hole in a file stays a hole.
fn clear(store: &dyn Store, bytes: Range<u64>) -> io::Result<()> {
    const STEP: u64 = 1 << 16;
    let zeroes = vec![0; STEP as usize];
    let mut there = vec![0; STEP as usize];
    for at in bytes.clone().step_by(STEP as usize) {
        let there = &mut there[..STEP.min(bytes.end - at) as usize];
        store.read_at(there, at)?;
        if there.iter().any(|&byte| byte != 0) {
            store.write_at(&zeroes[..there.len()], at)?;
        }
    }
    store.sync()
}

/// Clears a place of keyslots that no header names, as far as the file has it. A change that was stopped may have left
/// key material there.
pub(crate) fn clear_unused(store: &dyn Store, mut area: Range<u64>) -> Result<(), Error> {
    let cleared = store.size().and_then(|size| {
        area.end = area.end.min(size);
        clear(store, area)
    });
    cleared.map_err(|error| Error::io("wiping the places of unused keyslots", error))
}

/// Tries keyslots in turn. Returns the number of the first one that opens, and the volume key. A keyslot that can't be
/// tried does not stop the others from being tried, unless the disk fails. If none opens, the error names it.
pub(crate) fn first_that_opens(
    numbers: impl Iterator<Item = u32>,
    mut try_slot: impl FnMut(u32) -> Result<Option<Locked>, Error>,
) -> Result<(u32, Locked), Error> {
    let (mut tried, mut not_tried, mut stopped) = (0, Vec::new(), None);
    for number in numbers {
        match try_slot(number) {
            Ok(Some(key)) => return Ok((number, key)),
            Ok(None) => tried += 1,
            Err(error @ Error::Io { .. }) => return Err(error),
            Err(Error::Unsupported(why)) => not_tried.push(why),
            Err(error) => stopped = stopped.or(Some(error)),
        }
    }
    Err(match stopped {
        Some(error) => error,
        None if tried == 0 && !not_tried.is_empty() => none_usable(&not_tried),
        None if tried == 0 => Error::NoKeyslots,
        None => Error::WrongPassphrase { tried, not_tried: not_tried.join("; "), is_empty: false },
    })
}

/// Reads key material. `needs` are the least bytes of a complete file.
pub(crate) fn read_material(
    store: &dyn Store,
    number: u32,
    material: &mut [u8],
    at: u64,
    needs: u64,
) -> Result<(), Error> {
    store.read_at(material, at).map_err(|error| match (error.kind(), store.size()) {
        (io::ErrorKind::UnexpectedEof, Ok(has)) => Error::cut_off(has, needs.max(at + material.len() as u64)),
        _ => Error::io(format!("keyslot {number}"), error),
    })
}

/// The error if there are keyslots, but none can be used; with the reason for each.
pub(crate) fn none_usable(why: &[String]) -> Error {
    Error::Unsupported(format!("no keyslot can be used here: {}", why.join("; ")))
}

pub(crate) fn no_such_slot(number: u32) -> Error {
    Error::Request(format!("there is no keyslot {number}: `crypt info` lists them"))
}

/// Writes `data`, and returns when it is on the disk.
pub(crate) fn write_synced(store: &dyn Store, data: &[u8], at: u64, what: &str) -> Result<(), Error> {
    store.write_at(data, at).and_then(|()| store.sync()).map_err(|error| Error::io(format!("writing {what}"), error))
}

/// Whether `data` is at `at` already.
pub(crate) fn is_there(store: &dyn Store, data: &[u8], at: u64) -> bool {
    let mut there = vec![0; data.len()];
    // What can't be read is written.
    store.read_at(&mut there, at).is_ok() && there == data
}

/// Overwrites key material with random bytes, and returns when they are on the disk.
///
/// A drive or a file system that writes to another place keeps the old bytes for a while. Thanks to the splitter, that
/// is harmless as soon as a few of them are reused.
pub(crate) fn wipe(store: &dyn Store, area: Range<u64>, what: &str) -> Result<(), Error> {
    let mut noise = vec![0; (area.end - area.start) as usize];
    crate::secret::random(&mut noise)?;
    write_synced(store, &noise, area.start, what)
}

/// The error if there is no place for a new keyslot.
pub(crate) fn no_free_slot(wanted: Option<u32>, slots: u32) -> Error {
    Error::Request(match wanted {
        Some(number) if number >= slots => {
            format!("there is no keyslot {number}: they are numbered 0 to {}", slots - 1)
        }
        Some(number) => format!("keyslot {number} is taken: name another, or leave --slot out"),
        None => format!("all {slots} keyslots are taken: remove one first"),
    })
}
