//! LUKS2: two copies of a header with a checksum and a sequence number each, JSON inside, up to 32 keyslots (the LUKS2
//! On-Disk Format Specification, version 1.1).
//!
//! Reading: of the intact copies the one with the higher sequence number is used. A damaged copy is reported, and the
//! next change rewrites it. Invariants of a change:
//! - I1: at every moment at least one copy on the disk is intact. The copy that is damaged or older is written first,
//!   then the other one, with a sync after each. (If both are intact and equal, the primary is first.)
//! - I2: no copy on the disk names key material that is not on the disk yet: the material is written and synced first.
//!   A keyslot that is removed is wiped first: a crash then leaves a keyslot that opens nothing, and not a forgotten
//!   key.
//! - I3: nothing is written if a part of the header reaches into the data.
//! - I4: nothing is written if something else was written over the primary copy, or if the copies belong to different
//!   volumes: this program can't know which of them the user wants.
mod copy;
mod metadata;

use std::ops::Range;

use serde_json::{Map, Value, json};
use subtle::ConstantTimeEq;

use crate::af::{self, STRIPES};
use crate::bytes::{filled, shown};
use crate::hash::Hash;
use crate::kdf::{self, Kdf, Limits, SALT};
use crate::luks::{self, NewSlot, first_that_opens};
use crate::secret::{Locked, random};
use crate::store::Store;
use crate::volume::Geometry;
use crate::{CIPHER, Error, SectorSize};
pub(crate) use copy::copies_len;
use copy::{Copy, SIZES, Which};
pub use metadata::{Keyslot, Metadata, Other, Segment};

/// Bytes of each copy in a new header.
const HEADER: u64 = SIZES[0];
/// Where the data begins in a new volume: after 16 MiB of header, as in `cryptsetup`.
const DATA: u64 = 16 << 20;

/// Why a keyslot of priority 0 is skipped.
const NAMED_ONLY: &str = "its priority is \"ignore\": it is tried only where it is named";

/// A header that was read and checked.
#[derive(Clone, Debug)]
pub struct Header {
    copy: Copy,
    json: Value,
    metadata: Metadata,
    /// What is wrong with each copy: the primary, the secondary.
    faults: [Option<String>; 2],
    /// What is in the place of one copy and does not belong to this volume (I4).
    stranger: Option<Stranger>,
}

#[derive(Clone, Debug)]
enum Stranger {
    /// Something that is no header, over the primary copy.
    Something,
    /// A whole header of another volume. The UUIDs of the primary and the secondary copy.
    Volume([String; 2]),
}

impl Header {
    /// Reads both copies.
    ///
    /// # Errors
    /// [`Error::Header`] with what is wrong with both copies if neither is intact, also if there never was a header;
    /// [`Error::Unsupported`], [`Error::Io`].
    pub fn read(store: &dyn Store) -> Result<Self, Error> {
        let primary = Self::read_copy(store, Which::Primary, 0);
        let secondary = match &primary {
            Ok(primary) => Self::read_copy(store, Which::Secondary, primary.copy.size),
            // Its place is unknown: it may be wherever a primary copy can end.
            Err(_) => {
                let mut tries = SIZES.iter().map(|&size| Self::read_copy(store, Which::Secondary, size));
                let first = tries.next().expect("headers have sizes");
                if first.is_ok() { first } else { tries.find(Result::is_ok).unwrap_or(first) }
            }
        };
        let is_written_over = match (&primary, &secondary) {
            (Err(_), Ok(Self { copy, .. })) => {
                let mut there = vec![0; copy.size as usize];
                store.read_at(&mut there, 0).is_ok() && copy.is_written_over(&there)
            }
            _ => false,
        };
        let mut chosen = Self::choose(primary, secondary)?;
        if is_written_over {
            chosen.stranger = Some(Stranger::Something);
            chosen.faults[0] = Some("something else has been written over it".to_owned());
        }
        Ok(chosen)
    }

    fn choose(primary: Result<Self, Error>, secondary: Result<Self, Error>) -> Result<Self, Error> {
        match (primary, secondary) {
            // The sequence numbers of two volumes do not say which one the user wants; one has to be shown.
            (Ok(primary), Ok(secondary)) if primary.uuid() != secondary.uuid() => {
                let uuids = [primary.uuid(), secondary.uuid()];
                let stranger = Some(Stranger::Volume(uuids.clone()));
                let why = |own: usize| {
                    Some(format!("it is of another volume, with the UUID {} and not {}", uuids[1 - own], uuids[own]))
                };
                Ok(match primary.copy.sequence < secondary.copy.sequence {
                    true => Self { faults: [why(1), None], stranger, ..secondary },
                    false => Self { faults: [None, why(0)], stranger, ..primary },
                })
            }
            (Ok(primary), Ok(secondary)) if primary.copy.sequence < secondary.copy.sequence => {
                let why = format!("older than the secondary: {} < {}", primary.copy.sequence, secondary.copy.sequence);
                Ok(Self { faults: [Some(why), None], ..secondary })
            }
            (Ok(primary), Ok(secondary)) => {
                let is_older = secondary.copy.sequence < primary.copy.sequence;
                let why = || format!("older than the primary: {} < {}", secondary.copy.sequence, primary.copy.sequence);
                Ok(Self { faults: [None, is_older.then(why)], ..primary })
            }
            (Ok(primary), Err(why)) => Ok(Self { faults: [None, Some(why.to_string())], ..primary }),
            (Err(why), Ok(secondary)) => Ok(Self { faults: [Some(why.to_string()), None], ..secondary }),
            (Err(Error::Io { what, source }), _) => Err(Error::Io { what, source }),
            (Err(primary @ Error::Unsupported(_)), Err(secondary))
            | (Err(primary), Err(secondary @ Error::Unsupported(_))) => {
                let why = match (primary.to_string(), secondary.to_string()) {
                    (primary, secondary) if primary == secondary => primary,
                    (primary, secondary) => format!("primary copy: {primary}; secondary copy: {secondary}"),
                };
                Err(Error::Unsupported(format!("the header is not read here: {why}")))
            }
            (Err(primary), Err(secondary)) => Err(Error::Header(format!(
                "both copies of the header are damaged: primary: {primary}; secondary: {secondary}"
            ))),
        }
    }

    fn read_copy(store: &dyn Store, which: Which, offset: u64) -> Result<Self, Error> {
        Self::of_copy(Copy::read(store, which, offset)?)
    }

    /// Reads a header from bytes, for fuzzing: the primary copy, and the secondary one in its place after it.
    ///
    /// # Errors
    /// As for [`Header::read`].
    pub fn parse(bytes: &[u8]) -> Result<Self, Error> {
        let primary = Copy::parse(bytes, Which::Primary, 0).and_then(Self::of_copy);
        let at = primary.as_ref().map_or(HEADER, |primary| primary.copy.size);
        let behind = bytes.get(at as usize..).unwrap_or_default();
        Self::choose(primary, Copy::parse(behind, Which::Secondary, at).and_then(Self::of_copy))
    }

    fn of_copy(copy: Copy) -> Result<Self, Error> {
        let json: Value = serde_json::from_slice(&copy.json)
            .map_err(|error| Error::Header(format!("its metadata is no JSON: {error}")))?;
        let metadata = Metadata::read(&json, copy.size)?;
        Ok(Self { copy, json, metadata, faults: [None, None], stranger: None })
    }

    /// The checked metadata.
    #[must_use]
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The volume's UUID.
    #[must_use]
    pub fn uuid(&self) -> String {
        shown(&self.copy.uuid)
    }

    /// The volume's label, or nothing.
    #[must_use]
    pub fn label(&self) -> String {
        shown(&self.copy.label)
    }

    /// What is wrong with the copies of the header; a line each.
    #[must_use]
    pub fn faults(&self) -> Vec<String> {
        let named = [("primary", "secondary"), ("secondary", "primary")].into_iter().zip(&self.faults);
        let told = |((name, other), why): (_, &Option<String>)| {
            Some(format!("{name} copy of the header: {}; the {other} copy is used", why.as_ref()?))
        };
        named.filter_map(told).collect()
    }

    /// A header for a volume with `key`, without a keyslot yet.
    pub(crate) fn new(
        key: &[u8],
        hash: Hash,
        sector_size: SectorSize,
        label: &str,
        is_detached: bool,
        digest_iterations: Option<u32>,
    ) -> Result<Self, Error> {
        let mut salt = [0; SALT];
        random(&mut salt)?;
        let iterations =
            digest_iterations.unwrap_or_else(|| kdf::iterations_in(hash, hash.digest_len(), luks::DIGEST_TIME));
        let mut digest = vec![0; hash.digest_len()];
        hash.pbkdf2(key, &salt, iterations, &mut digest);
        let json = json!({
            "keyslots": {},
            "tokens": {},
            "segments": { "0": {
                "type": "crypt",
                "offset": if is_detached { 0 } else { DATA }.to_string(),
                "size": "dynamic",
                "iv_tweak": "0",
                "encryption": CIPHER,
                "sector_size": sector_size.bytes(),
            } },
            "digests": { "0": {
                "type": "pbkdf2",
                "keyslots": [],
                "segments": ["0"],
                "hash": hash.name(),
                "iterations": iterations,
                "salt": metadata::base64(&salt),
                "digest": metadata::base64(&digest),
            } },
            "config": {
                "json_size": (HEADER - copy::FIXED as u64).to_string(),
                "keyslots_size": (DATA - 2 * HEADER).to_string(),
            },
        });
        if label.len() >= 48 || label.contains('\0') {
            return Err(Error::Request(format!("the label has {} bytes; 47 fit, none of them zero", label.len())));
        }
        let copy = Copy {
            size: HEADER,
            sequence: 0,
            label: filled(label),
            checksum: Hash::Sha256,
            uuid: filled(&uuid::Uuid::new_v4().to_string()),
            subsystem: filled(""),
            json: Vec::new(),
        };
        let metadata = Metadata::read(&json, HEADER)?;
        Ok(Self { copy, json, metadata, faults: [None, None], stranger: None })
    }

    /// Numbers of the keyslots that some digest binds to the volume's key.
    pub(crate) fn openers(&self) -> Vec<u32> {
        let Ok((segment, _)) = self.metadata.segment() else { return Vec::new() };
        let Metadata { keyslots, others, .. } = &self.metadata;
        let mut numbers: Vec<_> = keyslots.keys().chain(others.keys()).copied().collect();
        numbers.retain(|&number| self.metadata.digest(segment, number).is_some());
        numbers.sort_unstable();
        numbers
    }

    /// Why keyslot `number`, which exists, can't open the volume here; `None` if it may.
    #[must_use]
    pub fn not_used(&self, number: u32) -> Option<String> {
        if let Some(other) = self.metadata.others.get(&number) {
            return Some(other.why.clone());
        }
        let is_bound = |(segment, _)| self.metadata.digest(segment, number).is_some();
        if !self.metadata.segment().map_or(true, is_bound) {
            return Some("it holds the key of something else".to_owned());
        }
        self.metadata.keyslots.get(&number)?.check_usable().err().map(|error| error.to_string())
    }

    /// Why keyslot `number` is skipped unless it is named; `None` if it is not skipped.
    #[must_use]
    pub fn passed_over(&self, number: u32) -> Option<&'static str> {
        (self.metadata.keyslots.get(&number)?.priority == Some(0)).then_some(NAMED_ONLY)
    }

    /// Checks that one of the keyslots for the volume's key can be used here, if there are any.
    pub(crate) fn check_openers(&self) -> Result<(), Error> {
        self.metadata.segment()?;
        let openers = self.openers();
        let why = openers.iter().map(|&number| Some(format!("keyslot {number}: {}", self.not_used(number)?)));
        match why.collect::<Option<Vec<_>>>() {
            Some(why) if !why.is_empty() => Err(luks::none_usable(&why)),
            _ => Ok(()),
        }
    }

    /// Checks that nothing else has taken this volume's place (I4).
    pub(crate) fn check_not_written_over(&self) -> Result<(), Error> {
        match &self.stranger {
            None => Ok(()),
            Some(Stranger::Something) => Err(Error::Overwritten(
                "something else has been written over the primary copy of the header; the volume can be read by the other \
                 one, and is not written to"
                    .to_owned(),
            )),
            Some(Stranger::Volume([primary, secondary])) => Err(Error::TwoVolumes(format!(
                "the primary copy of the header, at 0, is of volume {primary}, and the secondary copy, at {}, of volume \
                 {secondary}: nothing is written",
                self.copy.size
            ))),
        }
    }

    /// Checks that keys can be added and removed.
    pub(crate) fn check_changeable(&self) -> Result<(), Error> {
        self.metadata.check_requirements()?;
        self.check_not_written_over()
    }

    /// The first byte after the keyslots area.
    pub(crate) fn end(&self) -> u64 {
        2 * self.copy.size + self.metadata.keyslots_size
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
        let (segment, _) = self.metadata.segment()?;
        let priority = |number: u32| self.metadata.keyslots.get(&number).and_then(|slot| slot.priority).unwrap_or(1);
        let mut numbers: Vec<_> = self.openers().into_iter().map(|number| (priority(number), number)).collect();
        numbers.retain(|&(_, number)| only.is_none_or(|only| only == number));
        numbers.sort_by_key(|&(priority, number)| (std::cmp::Reverse(priority), number));
        let numbers = numbers.into_iter().map(|(_, number)| number);
        let found = first_that_opens(numbers, |number| match self.passed_over(number).filter(|_| only.is_none()) {
            Some(why) => Err(Error::Unsupported(format!("keyslot {number}: {why}"))),
            None => self.try_slot(store, segment, number, passphrase, limits),
        });
        found.map_err(|error| match (error, &self.stranger) {
            (Error::WrongPassphrase { tried, mut not_tried, is_empty }, Some(Stranger::Volume(uuids))) => {
                let other = if self.faults[0].is_some() { &uuids[0] } else { &uuids[1] };
                not_tried.push_str(if not_tried.is_empty() { "" } else { "; " });
                not_tried.push_str(&format!("those of the other copy of the header, which is of volume {other}"));
                Error::WrongPassphrase { tried, not_tried, is_empty }
            }
            (error, _) => error,
        })
    }

    /// The volume key from one keyslot, if `passphrase` opens it.
    fn try_slot(
        &self,
        store: &dyn Store,
        segment: u32,
        number: u32,
        passphrase: &[u8],
        limits: &Limits,
    ) -> Result<Option<Locked>, Error> {
        let of_slot = |error| match error {
            Error::Unsupported(why) => Error::Unsupported(format!("keyslot {number}: {why}")),
            error => error,
        };
        let Some(slot) = self.metadata.keyslots.get(&number) else {
            let why = self.not_used(number).unwrap_or_default();
            return Err(of_slot(Error::Unsupported(why)));
        };
        slot.check_usable().map_err(of_slot)?;
        let Some(digest) = self.metadata.digest(segment, number) else { return Ok(None) };
        let (digest, expected) = digest.check().map_err(of_slot)?;
        let mut slot_key = Locked::zeroed(slot.area_key_size()?);
        let (hash, stripes) = (slot.hash()?, slot.af.stripes as usize);
        slot.kdf.kdf()?.derive(passphrase, &mut slot_key, limits)?;
        let mut material = Locked::zeroed(af::material_len(slot.key_size, stripes));
        let data = self.metadata.segments[&segment].offset;
        luks::read_material(store, number, &mut material, slot.area.offset, data)?;
        let key = af::open(&slot_key, material, slot.key_size, stripes, hash)?;
        let mut found = vec![0; expected.len()];
        digest.derive(&key, &mut found, limits)?;
        Ok(bool::from(found.ct_eq(expected)).then_some(key))
    }

    /// Whether nothing was changed between reading this and `other`.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.copy == other.copy
    }

    /// Puts `new` into a free keyslot, `wanted` or the first one, and writes the header. Returns the keyslot's number.
    pub(crate) fn add(
        &mut self,
        store: &dyn Store,
        key: &[u8],
        new: &NewSlot,
        wanted: Option<u32>,
    ) -> Result<u32, Error> {
        self.check_changeable()?;
        let (segment, _) = self.metadata.segment()?;
        let is_free = |number: &u32| {
            let Metadata { keyslots, others, .. } = &self.metadata;
            *number < metadata::MAX_SLOTS && !keyslots.contains_key(number) && !others.contains_key(number)
        };
        let Some(number) = wanted.or_else(|| (0..metadata::MAX_SLOTS).find(is_free)).filter(is_free) else {
            return Err(luks::no_free_slot(wanted, metadata::MAX_SLOTS));
        };
        let size = (af::material_len(key.len(), STRIPES) as u64).next_multiple_of(metadata::ALIGN);
        let offset = self.free_area(size)?;
        let NewSlot { kdf, hash, key: slot_key } = new;
        let slot = json!({
            "type": "luks2",
            "key_size": key.len(),
            "af": { "type": "luks1", "stripes": STRIPES, "hash": hash.name() },
            "area": {
                "type": "raw",
                "offset": offset.to_string(),
                "size": size.to_string(),
                "encryption": CIPHER,
                "key_size": key.len(),
            },
            "kdf": kdf_json(kdf),
        });
        let mut changed = self.clone();
        changed.object("keyslots")?.insert(number.to_string(), slot);
        let of_segment = self.metadata.digests.iter().find(|(_, digest)| digest.segments.contains(&segment));
        let (digest, _) =
            of_segment.ok_or_else(|| Error::Header("no digest vouches for the volume's key".to_owned()))?;
        match changed.json.pointer_mut(&format!("/digests/{digest}/keyslots")).and_then(Value::as_array_mut) {
            Some(slots) => slots.push(number.to_string().into()),
            None => return Err(Error::Header(format!("digest {digest} has no list of keyslots"))),
        }
        changed.prepare()?;

        let material = af::seal(slot_key, key, STRIPES, *hash)?;
        // I2. So is wiping in `remove`.
        luks::write_synced(store, &material, offset, &format!("keyslot {number}"))?;
        changed.write(store)?;
        *self = changed;
        Ok(number)
    }

    /// Wipes a keyslot, and writes the header without it. Keyslot `heir`, which opens the same volume, then takes its
    /// number and its priority.
    pub(crate) fn remove(&mut self, store: &dyn Store, number: u32, heir: Option<u32>) -> Result<(), Error> {
        self.check_changeable()?;
        self.check_slot(number)?;
        let slot = &self.metadata.keyslots[&number];
        let area = slot.area.offset..slot.area.offset + slot.area.size;
        let mut changed = self.clone();
        let mut name = number.to_string();
        let slots = changed.object("keyslots")?;
        let old = slots.remove(&name);
        if let Some(heir) = heir.map(|heir| heir.to_string())
            && let Some(mut slot) = slots.remove(&heir)
        {
            if let Some(priority) = old.and_then(|old| old.get("priority").cloned()) {
                slot["priority"] = priority;
            }
            slots.insert(std::mem::replace(&mut name, heir), slot);
        }
        changed.unbind(|slot| slot == name)?;
        changed.prepare()?;
        luks::wipe(store, area, &format!("keyslot {number}"))?;
        changed.write(store)?;
        *self = changed;
        Ok(())
    }

    /// Removes the numbers of keyslots that are gone from digests and tokens.
    fn unbind(&mut self, is_gone: impl Fn(&str) -> bool) -> Result<(), Error> {
        for owners in ["digests", "tokens"] {
            for owner in self.object(owners)?.values_mut() {
                if let Some(slots) = owner.get_mut("keyslots").and_then(Value::as_array_mut) {
                    slots.retain(|slot| !slot.as_str().is_some_and(&is_gone));
                }
            }
        }
        Ok(())
    }

    /// Wipes all keyslots, also those of unknown kinds, and writes the header without them.
    pub(crate) fn erase(&mut self, store: &dyn Store) -> Result<(), Error> {
        self.check_changeable()?;
        let mut changed = self.clone();
        changed.object("keyslots")?.clear();
        changed.unbind(|_| true)?;
        changed.prepare()?;
        for (number, area) in self.metadata.areas() {
            luks::wipe(store, area.offset..area.offset + area.size, &format!("keyslot {number}"))?;
        }
        changed.write(store)?;
        *self = changed;
        luks::clear_unused(store, 2 * self.copy.size..self.end())
    }

    /// Whether both are headers of one volume: its UUID, its layout and the digest of its key are the same.
    pub(crate) fn is_of_same_volume(&self, other: &Self) -> bool {
        let is_one = (&self.copy.uuid, self.copy.size) == (&other.copy.uuid, other.copy.size);
        is_one && self.metadata.is_of_same_data(&other.metadata)
    }

    /// Writes this header, whose backup is `bytes`, in the place of `present`. Until both copies are written, none of
    /// the keyslots of `present` is overwritten (I2): a restored keyslot whose place they need gets another one.
    pub(crate) fn put_back(&self, store: &dyn Store, bytes: &[u8], present: Option<&Self>) -> Result<(), Error> {
        let mut new = self.clone();
        let part = |area: &Range<u64>| &bytes[area.start as usize..area.end as usize];
        let layout = |header: &Self| (header.copy.size, header.metadata.keyslots_size);
        // If the layout differs, one header overwrites the other in any case.
        let Some(present) = present.filter(|present| layout(present) == layout(self)) else {
            new.prepare()?;
            let area = 2 * self.copy.size..self.end();
            luks::write_synced(store, part(&area), area.start, "the keyslots")?;
            return new.write(store);
        };
        let places = |header: &Self| -> Vec<Range<u64>> {
            header.metadata.areas().map(|(_, area)| area.offset..area.offset + area.size).collect()
        };
        let meets = |area: &Range<u64>, others: &[Range<u64>]| {
            others.iter().any(|other| other.start < area.end && area.start < other.end)
        };
        let old = places(present);
        let mut taken = [old.clone(), places(self)].concat();
        let mut material = Vec::new();
        for (number, area) in self.metadata.areas() {
            let from = area.offset..area.offset + area.size;
            if luks::is_there(store, part(&from), from.start) {
                continue;
            }
            let mut place = from.start;
            if meets(&from, &old) {
                place = self.free_place(area.size, taken.clone()).ok_or_else(no_room)?;
                taken.push(place..place + area.size);
                match new.json.pointer_mut(&format!("/keyslots/{number}/area/offset")) {
                    Some(offset) => *offset = place.to_string().into(),
                    None => return Err(Error::Header(format!("keyslot {number} has no place"))),
                }
            }
            material.push((number, place, part(&from)));
        }
        new.copy.sequence = new.copy.sequence.max(present.copy.sequence);
        new.faults.clone_from(&present.faults);
        new.prepare()?;
        for (number, place, material) in material {
            luks::write_synced(store, material, place, &format!("keyslot {number}"))?;
        }
        new.write(store)?;
        let now = places(&new);
        old.into_iter().filter(|area| !meets(area, &now)).try_for_each(|area| luks::wipe(store, area, "an old keyslot"))
    }

    /// Checks that keyslot `number` exists and is of a supported kind.
    pub(crate) fn check_slot(&self, number: u32) -> Result<(), Error> {
        match self.metadata.others.get(&number) {
            Some(Other { why, .. }) => Err(Error::Unsupported(format!("keyslot {number}: {why}"))),
            None if self.metadata.keyslots.contains_key(&number) => Ok(()),
            None => Err(luks::no_such_slot(number)),
        }
    }

    /// The first free place of `size` bytes in the keyslots area.
    fn free_area(&self, size: u64) -> Result<u64, Error> {
        let taken = self.metadata.areas().map(|(_, area)| area.offset..area.offset + area.size).collect();
        let full = || Error::Request("the keyslots area is full: remove a keyslot first".to_owned());
        self.free_place(size, taken).ok_or_else(full)
    }

    /// The first place of `size` bytes in the keyslots area beside those that are `taken`.
    fn free_place(&self, size: u64, mut taken: Vec<Range<u64>>) -> Option<u64> {
        taken.sort_unstable_by_key(|area| area.start);
        let mut at = 2 * self.copy.size;
        for area in taken {
            if area.start.saturating_sub(at) >= size {
                break;
            }
            at = at.max(area.end.next_multiple_of(metadata::ALIGN));
        }
        (self.end().saturating_sub(at) >= size).then_some(at)
    }

    fn object(&mut self, name: &str) -> Result<&mut Map<String, Value>, Error> {
        let object = self.json.get_mut(name).and_then(Value::as_object_mut);
        object.ok_or_else(|| Error::Header(format!("the metadata has no {name}")))
    }

    /// Checks that the data begins after the header, or at 0 in a file of its own (I3).
    fn check_data_is_behind(&self) -> Result<(), Error> {
        let begin = self.metadata.segments.values().map(|segment| segment.offset).filter(|&offset| offset > 0).min();
        match begin.filter(|&begin| begin < self.end()) {
            None => Ok(()),
            Some(begin) => {
                let end = self.end();
                let why =
                    format!("the header ends at {end}, and the data begins at {begin}: a change would write over it");
                Err(Error::Header(why))
            }
        }
    }

    /// Makes the bytes to be written from changed JSON, and checks the JSON as if it had been read. All changes call
    /// this before they write anything.
    fn prepare(&mut self) -> Result<(), Error> {
        self.metadata = Metadata::read(&self.json, self.copy.size)?;
        self.check_data_is_behind()?;
        self.check_not_written_over()?;
        self.next_sequence()?;
        self.copy.json = self.json.to_string().into_bytes();
        self.copy.bytes(Which::Primary).map(drop)
    }

    fn next_sequence(&self) -> Result<u64, Error> {
        let next = self.copy.sequence.checked_add(1);
        next.ok_or_else(|| Error::Header("its sequence number is at its end".to_owned()))
    }

    /// Writes both copies, so that one is intact at every moment (I1).
    pub(crate) fn write(&mut self, store: &dyn Store) -> Result<(), Error> {
        self.prepare()?;
        self.copy.sequence = self.next_sequence()?;
        let order = match &self.faults {
            [None, Some(_)] => [Which::Secondary, Which::Primary],
            _ => [Which::Primary, Which::Secondary],
        };
        for which in order {
            let what = format!("the {which:?} header").to_lowercase();
            luks::write_synced(store, &self.copy.bytes(which)?, self.copy.offset(which), &what)?;
            self.faults[usize::from(which == Which::Secondary)] = None;
        }
        Ok(())
    }

    /// Where the data lies in a file of `data_len` bytes.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if it can't be opened here; [`Error::CutOff`], [`Error::Header`] and [`Error::Request`]
    /// if the data does not fit.
    pub fn geometry(&self, data_len: u64) -> Result<Geometry, Error> {
        self.geometry_with(data_len, self.size())
    }

    /// The same, with data of `size` bytes, or to the end of its file.
    pub(crate) fn geometry_with(&self, data_len: u64, size: Option<u64>) -> Result<Geometry, Error> {
        let (_, segment) = self.metadata.segment()?;
        let sector_size = segment.sector_size()?;
        Geometry::within(data_len, segment.offset, size, sector_size, segment.iv_tweak)
    }

    /// Bytes of data, if the header says how many there are.
    pub(crate) fn size(&self) -> Option<u64> {
        self.metadata.segment().ok().and_then(|(_, segment)| segment.size)
    }

    /// Writes how many bytes of data there are.
    pub(crate) fn put_size(&mut self, store: &dyn Store, size: u64) -> Result<(), Error> {
        self.check_changeable()?;
        let (segment, _) = self.metadata.segment()?;
        let mut changed = self.clone();
        match changed.json.pointer_mut(&format!("/segments/{segment}/size")) {
            Some(place) => *place = size.to_string().into(),
            None => return Err(Error::Header(format!("segment {segment} has no size"))),
        }
        changed.write(store)?;
        *self = changed;
        Ok(())
    }
}

fn no_room() -> Error {
    Error::Request(
        "the keyslots area has no room for the present keyslots beside the restored ones: remove some of the present ones \
         first (remove-key), or all of them (erase)"
            .to_owned(),
    )
}

fn kdf_json(kdf: &Kdf) -> Value {
    match kdf {
        Kdf::Pbkdf2 { hash, iterations, salt } => {
            json!({ "type": "pbkdf2", "hash": hash.name(), "iterations": iterations, "salt": metadata::base64(salt) })
        }
        Kdf::Argon2 { is_id, time, memory_kib, lanes, salt } => json!({
            "type": if *is_id { "argon2id" } else { "argon2i" },
            "time": time,
            "memory": memory_kib,
            "cpus": lanes,
            "salt": metadata::base64(salt),
        }),
    }
}
