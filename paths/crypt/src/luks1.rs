//! LUKS1: one header of 592 bytes, eight keyslots, PBKDF2 (the LUKS On-Disk Format Specification, version 1.2.3).
//!
//! There is one copy of the header. A change writes key material first and then the header, with a sync between (I1): a
//! crash leaves the old header or the new one. A crash that tears the header's second sector damages at most the fields
//! of the last two keyslots.
use std::ops::Range;

use subtle::ConstantTimeEq;

use crate::af::{self, STRIPES};
use crate::bytes::{Fields, filled, put, shown};
use crate::hash::Hash;
use crate::kdf::{self, Kdf, KdfChoice, KdfKind, Limits, SALT};
use crate::luks::{self, NewSlot, first_that_opens};
use crate::secret::{Locked, random};
use crate::store::Store;
use crate::volume::{Geometry, UNIT};
use crate::{Error, SectorSize};

/// Bytes of the header.
pub const HEADER: usize = 592;
/// The first bytes of both formats.
pub(crate) const MAGIC: [u8; 6] = *b"LUKS\xba\xbe";
/// What `cryptsetup reencrypt` replaces it by until it is done, so that nobody opens the volume. The rest of the header
/// stays.
pub(crate) const MAGIC_WHILE_REENCRYPTED: [u8; 6] = *b"LUKS\xde\xad";
/// The number of keyslots.
pub const SLOTS: u32 = 8;

/// Offsets of the fields.
mod at {
    pub(super) const VERSION: usize = 6;
    pub(super) const CIPHER: usize = 8;
    pub(super) const MODE: usize = 40;
    pub(super) const HASH: usize = 72;
    pub(super) const PAYLOAD: usize = 104;
    pub(super) const KEY_BYTES: usize = 108;
    pub(super) const DIGEST: usize = 112;
    pub(super) const DIGEST_SALT: usize = 132;
    pub(super) const DIGEST_ITERATIONS: usize = 164;
    pub(super) const UUID: usize = 168;
    pub(super) const SLOTS: usize = 208;
    pub(super) const SLOT: usize = 48;
    pub(super) const SLOT_ITERATIONS: usize = 4;
    pub(super) const SLOT_SALT: usize = 8;
    pub(super) const SLOT_MATERIAL: usize = 40;
    pub(super) const SLOT_STRIPES: usize = 44;
}
const ACTIVE: u32 = 0x00AC_71F3;
const INACTIVE: u32 = 0x0000_DEAD;
/// Bytes of the volume key's digest.
const DIGEST: usize = 20;

/// Key material begins, and is aligned, at this many bytes.
const ALIGN: u64 = 4096;
/// Data is aligned to this many bytes.
const DATA_ALIGN: u64 = 1 << 20;

/// The version that a header claims to have.
pub(crate) fn version(bytes: &[u8; HEADER]) -> u16 {
    bytes.u16_at(at::VERSION)
}

/// One of the eight keyslots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Whether it holds a key.
    pub is_active: bool,
    /// Iterations of PBKDF2.
    pub iterations: u32,
    salt: [u8; SALT],
    /// Where its key material begins, in 512-byte units.
    pub material: u32,
    /// Stripes of the splitter.
    pub stripes: u32,
}

/// A header that was read and checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The cipher and its mode.
    pub cipher: String,
    /// The hash of PBKDF2 and the splitter, by name.
    pub hash: String,
    /// Where the data begins in 512-byte units; 0 where the header is detached.
    pub payload: u32,
    /// Bytes of the volume key.
    pub key_bytes: usize,
    digest: [u8; DIGEST],
    digest_salt: [u8; SALT],
    /// Iterations of the digest.
    pub digest_iterations: u32,
    /// The raw field, whatever its bytes are.
    uuid: [u8; 40],
    /// The keyslots.
    pub slots: Vec<Slot>,
}

impl Header {
    /// Reads a header from its bytes. `store_len` is the length of its file.
    ///
    /// # Errors
    /// [`Error::NoHeader`] if there is none, [`Error::Header`] for impossible values, [`Error::CutOff`] if key material
    /// lies beyond the file's end. An unsupported cipher or hash is an error only when it is used.
    pub fn parse(bytes: &[u8; HEADER], store_len: u64) -> Result<Self, Error> {
        if bytes.field(0) != MAGIC || version(bytes) != 1 {
            return Err(Error::NoHeader { file: String::new() });
        }
        let header = Self {
            cipher: format!("{}-{}", bytes.text::<32>(at::CIPHER), bytes.text::<32>(at::MODE)),
            hash: bytes.text::<32>(at::HASH),
            payload: bytes.u32_at(at::PAYLOAD),
            key_bytes: bytes.u32_at(at::KEY_BYTES) as usize,
            digest: bytes.field(at::DIGEST),
            digest_salt: bytes.field(at::DIGEST_SALT),
            digest_iterations: bytes.u32_at(at::DIGEST_ITERATIONS),
            uuid: bytes.field(at::UUID),
            slots: (0..SLOTS).map(|slot| Slot::parse(bytes, slot)).collect::<Result<_, _>>()?,
        };
        if header.key_bytes == 0 {
            return Err(Error::Header("a volume key of 0 bytes".to_owned()));
        }
        if header.digest_iterations == 0 {
            return Err(Error::Header("the digest of the volume key has 0 iterations".to_owned()));
        }
        header.check_areas(store_len)?;
        Ok(header)
    }

    /// The volume's UUID.
    #[must_use]
    pub fn uuid(&self) -> String {
        shown(&self.uuid)
    }

    /// Checks that its cipher, its hash and the key's length are supported.
    pub(crate) fn check_supported(&self) -> Result<(), Error> {
        let Self { cipher, key_bytes, .. } = self;
        if cipher != crate::CIPHER {
            return Err(Error::Unsupported(format!("the cipher {cipher:?} is not {}", crate::CIPHER)));
        }
        if !matches!(key_bytes, 32 | 64) {
            let why = format!("a volume key of {key_bytes} bytes; {} is supported with 32 or 64", crate::CIPHER);
            return Err(Error::Unsupported(why));
        }
        self.hash().map(drop)
    }

    fn hash(&self) -> Result<Hash, Error> {
        Hash::named(&self.hash)
    }

    /// Checks that active keyslots lie after the header, before the data and within the file, and do not overlap.
    fn check_areas(&self, store_len: u64) -> Result<(), Error> {
        if self.payload != 0 && self.payload_at() < HEADER as u64 {
            let begin = self.payload_at();
            return Err(Error::Header(format!(
                "the data begins at {begin}, inside the header, which has {HEADER} bytes"
            )));
        }
        let data = if self.payload == 0 { u64::MAX } else { self.payload_at() };
        let active = || (0..).zip(&self.slots).filter(|(_, slot)| slot.is_active);
        for (i, slot) in active() {
            let area = self.area(slot);
            if area.start < HEADER as u64 || area.end > data {
                let why = format!("keyslot {i}: its key material is at {area:?}, outside of {HEADER}..{data}");
                return Err(Error::Header(why));
            }
            if area.end > store_len {
                return Err(Error::cut_off(store_len, area.end.max(self.payload_at())));
            }
            for (other, neighbour) in active().filter(|&(other, _)| other < i) {
                if self.area(neighbour).start < area.end && area.start < self.area(neighbour).end {
                    return Err(Error::Header(format!("keyslots {other} and {i} overlap")));
                }
            }
        }
        Ok(())
    }

    /// The bytes of a keyslot's material. The key's length and the stripes were checked, so this cannot overflow.
    fn area(&self, slot: &Slot) -> Range<u64> {
        let start = u64::from(slot.material) * UNIT;
        start..start + af::material_len(self.key_bytes, slot.stripes as usize) as u64
    }

    fn payload_at(&self) -> u64 {
        u64::from(self.payload) * UNIT
    }

    /// The header's bytes on the disk. The caller has checked that it is supported, so the cipher is the only one that
    /// there can be.
    fn bytes(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        put(&mut bytes, 0, &MAGIC);
        put(&mut bytes, at::VERSION, &1u16.to_be_bytes());
        put(&mut bytes, at::CIPHER, b"aes");
        put(&mut bytes, at::MODE, b"xts-plain64");
        put(&mut bytes, at::HASH, self.hash.as_bytes());
        put(&mut bytes, at::PAYLOAD, &self.payload.to_be_bytes());
        put(&mut bytes, at::KEY_BYTES, &(self.key_bytes as u32).to_be_bytes());
        put(&mut bytes, at::DIGEST, &self.digest);
        put(&mut bytes, at::DIGEST_SALT, &self.digest_salt);
        put(&mut bytes, at::DIGEST_ITERATIONS, &self.digest_iterations.to_be_bytes());
        put(&mut bytes, at::UUID, &self.uuid);
        for (i, slot) in self.slots.iter().enumerate() {
            let place = at::SLOTS + i * at::SLOT;
            put(&mut bytes, place, &if slot.is_active { ACTIVE } else { INACTIVE }.to_be_bytes());
            put(&mut bytes, place + at::SLOT_ITERATIONS, &slot.iterations.to_be_bytes());
            put(&mut bytes, place + at::SLOT_SALT, &slot.salt);
            put(&mut bytes, place + at::SLOT_MATERIAL, &slot.material.to_be_bytes());
            put(&mut bytes, place + at::SLOT_STRIPES, &slot.stripes.to_be_bytes());
        }
        bytes
    }

    /// A header for a volume with `key`, without a keyslot yet. `hash` is for its digest and keyslots.
    pub(crate) fn new(
        key: &Locked,
        hash: Hash,
        is_detached: bool,
        digest_iterations: Option<u32>,
    ) -> Result<Self, Error> {
        let area = (af::material_len(key.len(), STRIPES) as u64).next_multiple_of(ALIGN);
        let end = ALIGN + u64::from(SLOTS) * area;
        let slots = (0..u64::from(SLOTS)).map(|i| Slot {
            is_active: false,
            iterations: 0,
            salt: [0; SALT],
            material: ((ALIGN + i * area) / UNIT) as u32,
            stripes: STRIPES as u32,
        });
        let mut header = Self {
            cipher: crate::CIPHER.to_owned(),
            hash: hash.name().to_owned(),
            payload: if is_detached { 0 } else { (end.next_multiple_of(DATA_ALIGN) / UNIT) as u32 },
            key_bytes: key.len(),
            digest: [0; DIGEST],
            digest_salt: [0; SALT],
            digest_iterations: match digest_iterations {
                Some(iterations) => iterations,
                None => kdf::iterations_in(hash, DIGEST, luks::DIGEST_TIME),
            },
            uuid: filled(&uuid::Uuid::new_v4().to_string()),
            slots: slots.collect(),
        };
        random(&mut header.digest_salt)?;
        hash.pbkdf2(key, &header.digest_salt, header.digest_iterations, &mut header.digest);
        Ok(header)
    }

    /// The first byte after the last keyslot's area.
    pub(crate) fn end(&self) -> u64 {
        let end = self.slots.iter().map(|slot| self.area(slot).end).max().unwrap_or(0);
        end.next_multiple_of(ALIGN).max(self.payload_at())
    }

    /// The number of the keyslot that `passphrase` opens, and the volume key. `only` restricts it to one keyslot.
    ///
    /// # Errors
    /// [`Error::WrongPassphrase`]; the reason why a keyslot could not be tried, if no other opened; [`Error::Io`].
    pub fn unlock(
        &self,
        store: &dyn Store,
        passphrase: &[u8],
        only: Option<u32>,
        limits: &Limits,
    ) -> Result<(u32, Locked), Error> {
        self.check_supported()?;
        let numbers = self.used().into_iter().filter(|&number| only.is_none_or(|only| only == number));
        first_that_opens(numbers, |number| self.try_slot(store, number, passphrase, limits))
    }

    /// The volume key from one keyslot, if `passphrase` opens it.
    fn try_slot(
        &self,
        store: &dyn Store,
        number: u32,
        passphrase: &[u8],
        limits: &Limits,
    ) -> Result<Option<Locked>, Error> {
        let (hash, slot) = (self.hash()?, &self.slots[number as usize]);
        let mut slot_key = Locked::zeroed(self.key_bytes);
        let kdf = Kdf::Pbkdf2 { hash, iterations: slot.iterations, salt: slot.salt.to_vec() };
        kdf.derive(passphrase, &mut slot_key, limits)?;
        let area = self.area(slot);
        let mut material = Locked::zeroed((area.end - area.start) as usize);
        luks::read_material(store, number, &mut material, area.start, self.payload_at())?;
        let key = af::open(&slot_key, material, self.key_bytes, slot.stripes as usize, hash)?;
        let digest = Kdf::Pbkdf2 { hash, iterations: self.digest_iterations, salt: self.digest_salt.to_vec() };
        let mut found = [0; DIGEST];
        digest.derive(&key, &mut found, limits)?;
        Ok(bool::from(found.ct_eq(&self.digest)).then_some(key))
    }

    /// The choice for a new keyslot, with the header's hash.
    pub(crate) fn choice(&self, choice: &KdfChoice) -> Result<KdfChoice, Error> {
        self.check_supported()?;
        if choice.kind != KdfKind::Pbkdf2 {
            return Err(Error::Request("a LUKS1 keyslot is made with pbkdf2 alone: say --kdf pbkdf2".to_owned()));
        }
        Ok(KdfChoice { hash: self.hash()?, ..*choice })
    }

    /// Puts `new` into a free keyslot, `wanted` or the first one, and writes the header. Returns the keyslot's number.
    pub(crate) fn add(
        &mut self,
        store: &dyn Store,
        key: &[u8],
        new: &NewSlot,
        wanted: Option<u32>,
    ) -> Result<u32, Error> {
        self.check_supported()?;
        let is_free = |slot: &u32| self.slots.get(*slot as usize).is_some_and(|slot| !slot.is_active);
        let Some(number) = wanted.or_else(|| (0..SLOTS).find(is_free)).filter(is_free) else {
            return Err(luks::no_free_slot(wanted, SLOTS));
        };
        let mut slot = self.slots[number as usize].clone();
        let Kdf::Pbkdf2 { iterations, salt, .. } = &new.kdf else { unreachable!("PBKDF2 was asked for") };
        slot.is_active = true;
        slot.iterations = *iterations;
        slot.salt.copy_from_slice(salt);
        slot.stripes = STRIPES as u32;
        let mut changed = self.clone();
        changed.slots[number as usize] = slot.clone();
        // Reading a header does not check the places of unused keyslots.
        changed.check_areas(store.size().map_err(|e| Error::io("the header's file", e))?)?;

        let material = af::seal(&new.key, key, STRIPES, new.hash)?;
        luks::write_synced(store, &material, changed.area(&slot).start, &format!("keyslot {number}"))?;
        changed.write(store)?;
        *self = changed;
        Ok(number)
    }

    /// Wipes a keyslot, and writes the header without it.
    pub(crate) fn remove(&mut self, store: &dyn Store, number: u32) -> Result<(), Error> {
        self.check_supported()?;
        let active = self.slots.get(number as usize).filter(|slot| slot.is_active);
        let Some(slot) = active else { return Err(luks::no_such_slot(number)) };
        luks::wipe(store, self.area(slot), &format!("keyslot {number}"))?;
        let slot = &mut self.slots[number as usize];
        (slot.is_active, slot.iterations, slot.salt) = (false, 0, [0; SALT]);
        self.write(store)
    }

    /// Wipes all keyslots, and writes the header without them. Reading a header does not check the places of unused
    /// keyslots: those inside the header or the data stay as they are.
    pub(crate) fn erase(&mut self, store: &dyn Store) -> Result<(), Error> {
        self.check_supported()?;
        for number in self.used() {
            self.remove(store, number)?;
        }
        let data = if self.payload == 0 { u64::MAX } else { self.payload_at() };
        let mut areas = self.slots.iter().map(|slot| self.area(slot));
        areas.try_for_each(|area| match area.start >= HEADER as u64 && area.end <= data {
            true => luks::clear_unused(store, area),
            false => Ok(()),
        })
    }

    /// Where the first keyslot's area begins; not inside the header.
    pub(crate) fn first_area(&self) -> usize {
        let first = self.slots.iter().map(|slot| self.area(slot).start).min().unwrap_or(0);
        usize::try_from(first).unwrap_or(HEADER).max(HEADER)
    }

    /// Bytes of a backup: up to the end of the last keyslot's area. Reading a header does not check the places of
    /// unused keyslots.
    pub(crate) fn backup_len(&self) -> Result<u64, Error> {
        let end = self.slots.iter().map(|slot| self.area(slot).end).max().unwrap_or(0).next_multiple_of(ALIGN);
        if self.payload != 0 && end > self.payload_at().next_multiple_of(ALIGN) {
            let data = self.payload_at();
            return Err(Error::Header(format!("its keyslots end at {end}, and the data begins at {data}")));
        }
        Ok(end)
    }

    /// Writes this header, whose backup is `bytes`: first the material of its keyslots, then the header, then the places
    /// of unused keyslots. What is on the disk already is not written.
    pub(crate) fn put_back(&self, store: &dyn Store, bytes: &[u8]) -> Result<(), Error> {
        let areas =
            |is_active| self.slots.iter().filter(move |slot| slot.is_active == is_active).map(|it| self.area(it));
        for area in areas(true).chain(std::iter::once(0..HEADER as u64)).chain(areas(false)) {
            let part = &bytes[area.start as usize..area.end as usize];
            if !luks::is_there(store, part, area.start) {
                luks::write_synced(store, part, area.start, "the header and its keyslots")?;
            }
        }
        Ok(())
    }

    /// Whether both are headers of one volume: its UUID, its layout and the digest of its key are the same.
    pub(crate) fn is_of_same_volume(&self, other: &Self) -> bool {
        let identity = |header: &Self| {
            let Self { payload, key_bytes, digest, digest_salt, uuid, .. } = *header;
            (payload, key_bytes, digest, digest_salt, uuid)
        };
        self.cipher == other.cipher && identity(self) == identity(other)
    }

    pub(crate) fn write(&self, store: &dyn Store) -> Result<(), Error> {
        luks::write_synced(store, &self.bytes(), 0, "the header")
    }

    /// Numbers of the keyslots in use.
    pub(crate) fn used(&self) -> Vec<u32> {
        (0..).zip(&self.slots).filter(|(_, slot)| slot.is_active).map(|(i, _)| i).collect()
    }

    /// Where the data lies in a file of `data_len` bytes.
    ///
    /// # Errors
    /// [`Error::CutOff`] if it has no data, [`Error::Unsupported`].
    pub fn geometry(&self, data_len: u64) -> Result<Geometry, Error> {
        self.check_supported()?;
        Geometry::within(data_len, self.payload_at(), None, SectorSize::SMALLEST, 0)
    }
}

impl Slot {
    fn parse(bytes: &[u8; HEADER], number: u32) -> Result<Self, Error> {
        let place = at::SLOTS + number as usize * at::SLOT;
        let slot = Self {
            is_active: match bytes.u32_at(place) {
                ACTIVE => true,
                INACTIVE => false,
                other => {
                    let why = format!("keyslot {number} is neither active nor inactive, but {other:#010x}");
                    return Err(Error::Header(why));
                }
            },
            iterations: bytes.u32_at(place + at::SLOT_ITERATIONS),
            salt: bytes.field(place + at::SLOT_SALT),
            material: bytes.u32_at(place + at::SLOT_MATERIAL),
            stripes: bytes.u32_at(place + at::SLOT_STRIPES),
        };
        if slot.is_active && (slot.stripes as usize != STRIPES || slot.iterations == 0) {
            let Self { stripes, iterations, .. } = slot;
            let why =
                format!("keyslot {number}: {stripes} stripes and {iterations} iterations; it has {STRIPES} and some");
            return Err(Error::Header(why));
        }
        // The fields of an unused keyslot are set before they are used.
        Ok(if slot.is_active { slot } else { Self { stripes: STRIPES as u32, ..slot } })
    }
}
