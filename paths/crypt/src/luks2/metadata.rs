//! The metadata in the JSON of a LUKS2 header (the LUKS2 On-Disk Format Specification, section 3), checked.
//!
//! This is a view for reading. A change is made in the JSON itself, so that parts that are not understood here (tokens,
//! priorities, fields of later versions) stay as they are.
//!
//! Invariants: in a [`Metadata`] the key material of all keyslots, of any kind, lies in the keyslots area, fits its own
//! area, and areas do not overlap (I1). A keyslot of an unknown kind is not damaged: it is listed in `others`, with the
//! reason why it is not used. What [`Digest::check`] returns has at least 20 bytes, so that no key matches an empty
//! digest (I2).
use std::collections::BTreeMap;
use std::ops::Range;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use crate::hash::Hash;
use crate::kdf::Kdf;
use crate::{Error, SectorSize, af};

/// Keyslots a header may have.
pub(crate) const MAX_SLOTS: u32 = 32;
/// Bytes that the keyslots area may have.
const MAX_AREA: u64 = 128 << 20;
/// Alignment of areas.
pub(crate) const ALIGN: u64 = 4096;

/// A header's metadata.
#[derive(Clone, Debug, PartialEq)]
pub struct Metadata {
    /// The keyslots that hold a passphrase, by number.
    pub keyslots: BTreeMap<u32, Keyslot>,
    /// Keyslots of unknown kinds, by number.
    pub others: BTreeMap<u32, Other>,
    /// The digests, by number.
    pub digests: BTreeMap<u32, Digest>,
    /// The segments, by number.
    pub segments: BTreeMap<u32, Segment>,
    /// How many tokens there are.
    pub tokens: usize,
    /// Bytes of the keyslots area.
    pub keyslots_size: u64,
    /// Features that a program must support to open the volume.
    pub requirements: Vec<String>,
}

/// A keyslot.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct Keyslot {
    /// Bytes of the volume key.
    pub key_size: usize,
    /// How the key is spread.
    pub af: Splitter,
    /// The place of its material.
    pub area: Area,
    /// How the passphrase becomes a key.
    pub kdf: KdfText,
    /// 0: tried only if it is named; 1: tried in turn; 2: tried first.
    pub priority: Option<u8>,
}

/// A keyslot of another type, or with an unknown part.
#[derive(Clone, Debug, PartialEq)]
pub struct Other {
    /// Why it is not used.
    pub why: String,
    /// The place of its material, if it has any.
    pub area: Option<Area>,
}

/// A splitter's parameters.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct Splitter {
    #[serde(rename = "type")]
    kind: String,
    /// How many times the key's length.
    pub stripes: u32,
    hash: String,
}

/// A place in the header.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct Area {
    /// Its first byte.
    #[serde(deserialize_with = "number")]
    pub offset: u64,
    /// Its bytes.
    #[serde(deserialize_with = "number")]
    pub size: u64,
    /// How it is encrypted.
    #[serde(default)]
    pub encryption: String,
    #[serde(default)]
    key_size: usize,
}

/// A function's parameters, as in the header.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct KdfText {
    #[serde(rename = "type")]
    kind: String,
    salt: Binary,
    hash: Option<String>,
    iterations: Option<u32>,
    time: Option<u32>,
    memory: Option<u32>,
    cpus: Option<u32>,
}

/// How a volume key is recognised.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct Digest {
    #[serde(rename = "type")]
    kind: String,
    #[serde(deserialize_with = "numbers")]
    pub(crate) keyslots: Vec<u32>,
    #[serde(deserialize_with = "numbers")]
    pub(crate) segments: Vec<u32>,
    hash: Option<String>,
    iterations: Option<u32>,
    salt: Option<Binary>,
    digest: Option<Binary>,
}

/// A part of the data.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct Segment {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    /// Its first byte in the data's file.
    #[serde(deserialize_with = "number")]
    pub offset: u64,
    #[serde(deserialize_with = "size_or_dynamic")]
    pub(crate) size: Option<u64>,
    #[serde(default, deserialize_with = "number")]
    pub(crate) iv_tweak: u64,
    /// The cipher.
    #[serde(default)]
    pub encryption: String,
    #[serde(default)]
    pub(crate) sector_size: u64,
    integrity: Option<Value>,
    #[serde(default)]
    flags: Vec<String>,
}

#[derive(Deserialize)]
struct Config {
    #[serde(deserialize_with = "number")]
    json_size: u64,
    #[serde(deserialize_with = "number")]
    keyslots_size: u64,
    #[serde(default)]
    requirements: Requirements,
}

#[derive(Default, Deserialize)]
struct Requirements {
    #[serde(default)]
    mandatory: Vec<String>,
}

impl Metadata {
    /// Reads and checks the metadata of a copy of `header_size` bytes.
    pub(crate) fn read(json: &Value, header_size: u64) -> Result<Self, Error> {
        let config: Config = part(json, "config", "")?;
        if config.json_size != header_size - super::copy::FIXED as u64 {
            return Err(wrong("config", format!("json_size is {}", config.json_size)));
        }
        let mut found = Self {
            keyslots: BTreeMap::new(),
            others: BTreeMap::new(),
            digests: parts(json, "digests")?,
            segments: parts(json, "segments")?,
            tokens: objects(json, "tokens")?.count(),
            keyslots_size: config.keyslots_size,
            requirements: config.requirements.mandatory,
        };
        for (number, value) in objects(json, "keyslots")? {
            // This also limits the cost of trying all of them.
            let number = id(number)
                .filter(|&number| number < MAX_SLOTS)
                .ok_or_else(|| wrong("keyslots", format!("{number:?} is no number below {MAX_SLOTS}")))?;
            if let Some(why) = unknown_part(value) {
                let area = value.get("area").map(|area| of(area, "the area of keyslot", number)).transpose()?;
                found.others.insert(number, Other { why, area });
            } else {
                found.keyslots.insert(number, of(value, "keyslot", number)?);
            }
        }
        found.check(header_size)?;
        Ok(found)
    }

    fn check(&self, header_size: u64) -> Result<(), Error> {
        if self.keyslots_size > MAX_AREA {
            return Err(wrong("config", format!("keyslots_size is {}", self.keyslots_size)));
        }
        let room = 2 * header_size..2 * header_size + self.keyslots_size;
        let mut taken: Vec<(u32, Range<u64>)> = Vec::new();
        for (number, area) in self.areas() {
            let what = format!("keyslot {number}");
            let Some(end) =
                area.offset.checked_add(area.size).filter(|&end| room.start <= area.offset && end <= room.end)
            else {
                let why = format!("its area, {} bytes at {}, is outside of {room:?}", area.size, area.offset);
                return Err(wrong(&what, why));
            };
            if let Some((other, _)) = taken.iter().find(|(_, other)| other.start < end && area.offset < other.end) {
                return Err(wrong(&what, format!("it overlaps with keyslot {other}")));
            }
            taken.push((number, area.offset..end));
        }
        for (number, slot) in &self.keyslots {
            let what = format!("keyslot {number}");
            let (key, stripes, room) = (slot.key_size, slot.af.stripes as usize, slot.area.size);
            let len = key.checked_mul(stripes).filter(|&len| 0 < len && len as u64 <= room);
            if len.is_none() || af::material_len(key, stripes) as u64 > room {
                return Err(wrong(&what, format!("{stripes} stripes of {key} bytes do not fit its area")));
            }
        }
        Ok(())
    }

    /// The areas in use, each with its keyslot's number.
    pub(crate) fn areas(&self) -> impl Iterator<Item = (u32, &Area)> {
        let own = self.keyslots.iter().map(|(&number, slot)| (number, &slot.area));
        own.chain(self.others.iter().filter_map(|(&number, other)| Some((number, other.area.as_ref()?))))
    }

    /// The only segment of a volume that is not being re-encrypted.
    pub(crate) fn segment(&self) -> Result<(u32, &Segment), Error> {
        self.check_requirements()?;
        let mut current = self.current_segments();
        match (current.next(), current.next()) {
            (Some(only), None) => Ok(only),
            (None, _) => Err(wrong("segments", "there is none")),
            _ => Err(Error::Unsupported("the volume has several segments; one is supported".to_owned())),
        }
    }

    /// The segments that the data is in now, each with its number.
    pub(crate) fn current_segments(&self) -> impl Iterator<Item = (u32, &Segment)> {
        let is_current = |segment: &Segment| !segment.flags.iter().any(|flag| flag.starts_with("backup"));
        self.segments.iter().map(|(&number, segment)| (number, segment)).filter(move |(_, segment)| is_current(segment))
    }

    /// Whether the data's place and its key are the same in both.
    pub(crate) fn is_of_same_data(&self, other: &Self) -> bool {
        fn keys(metadata: &Metadata) -> impl Iterator<Item = (&[u32], &Option<Binary>, &Option<Binary>)> {
            let of_data = metadata.digests.values().filter(|digest| !digest.segments.is_empty());
            of_data.map(|digest| (&digest.segments[..], &digest.salt, &digest.digest))
        }
        let is_one_layout = (self.keyslots_size, &self.segments) == (other.keyslots_size, &other.segments);
        is_one_layout && keys(self).eq(keys(other))
    }

    pub(crate) fn check_requirements(&self) -> Result<(), Error> {
        match self.requirements.as_slice() {
            [] => Ok(()),
            // In quotes, which escape control characters.
            needed => Err(Error::Unsupported(match needed.iter().any(|need| need.contains("reencrypt")) {
                true => {
                    format!("a re-encryption is under way (the volume requires {needed:?}), which is not supported")
                }
                false => format!("the volume requires {needed:?}, which is not supported"),
            })),
        }
    }

    /// The digest for `segment`'s key that is bound to `keyslot`.
    pub(crate) fn digest(&self, segment: u32, keyslot: u32) -> Option<&Digest> {
        self.digests.values().find(|digest| digest.segments.contains(&segment) && digest.keyslots.contains(&keyslot))
    }
}

impl Keyslot {
    /// The hash of its splitter.
    pub(crate) fn hash(&self) -> Result<Hash, Error> {
        Hash::named(&self.af.hash)
    }

    /// Bytes of the key that encrypts its area.
    pub(crate) fn area_key_size(&self) -> Result<usize, Error> {
        let Area { encryption, key_size, .. } = &self.area;
        match (encryption.as_str(), key_size) {
            (crate::CIPHER, 32 | 64) => Ok(*key_size),
            _ => Err(Error::Unsupported(format!(
                "its cipher is {encryption:?} with {key_size} bytes of key, not {} with 32 or 64",
                crate::CIPHER
            ))),
        }
    }

    /// Whether this program can use it.
    pub(crate) fn check_usable(&self) -> Result<(), Error> {
        if !matches!(self.key_size, 32 | 64) {
            let bits = 8 * self.key_size;
            return Err(Error::Unsupported(format!("it holds a key of {bits} bits; 256 and 512 are supported")));
        }
        self.area_key_size()?;
        self.hash()?;
        self.kdf.kdf().map(drop)
    }
}

impl KdfText {
    /// Its name and cost, for people.
    #[must_use]
    pub fn describe(&self) -> String {
        match (self.iterations, self.time, self.memory, self.cpus) {
            (Some(n), ..) => format!("{} ({}), {n} iterations", self.kind, self.hash.as_deref().unwrap_or("?")),
            (_, Some(t), Some(m), Some(c)) => format!("{}, {t} passes, {} MiB, {c} lanes", self.kind, m >> 10),
            _ => self.kind.clone(),
        }
    }

    pub(crate) fn kdf(&self) -> Result<Kdf, Error> {
        let lacks = |field| move || wrong("kdf", format!("{field} is missing"));
        let salt = self.salt.0.clone();
        match self.kind.as_str() {
            "pbkdf2" => Ok(Kdf::Pbkdf2 {
                hash: Hash::named(self.hash.as_deref().unwrap_or_default())?,
                iterations: self.iterations.filter(|&n| n > 0).ok_or_else(lacks("iterations"))?,
                salt,
            }),
            "argon2i" | "argon2id" => Ok(Kdf::Argon2 {
                is_id: self.kind == "argon2id",
                time: self.time.ok_or_else(lacks("time"))?,
                memory_kib: self.memory.ok_or_else(lacks("memory"))?,
                lanes: self.cpus.ok_or_else(lacks("cpus"))?,
                salt,
            }),
            other => Err(Error::Unsupported(format!("the function {other:?} is none of argon2id, argon2i, pbkdf2"))),
        }
    }
}

impl Digest {
    /// The function and its expected result.
    pub(crate) fn check(&self) -> Result<(Kdf, &[u8]), Error> {
        if self.kind != "pbkdf2" {
            return Err(Error::Unsupported(format!("the digest {:?} is not pbkdf2", self.kind)));
        }
        let (Some(salt), Some(digest), Some(iterations)) = (&self.salt, &self.digest, self.iterations) else {
            return Err(wrong("digest", "salt, digest or iterations are missing"));
        };
        if !(20..=64).contains(&digest.0.len()) || iterations == 0 {
            return Err(wrong("digest", format!("{} bytes after {iterations} iterations", digest.0.len())));
        }
        let hash = Hash::named(self.hash.as_deref().unwrap_or_default())?;
        Ok((Kdf::Pbkdf2 { hash, iterations, salt: salt.0.clone() }, &digest.0))
    }
}

impl Segment {
    /// The size of its sectors, if the segment can be opened here.
    pub(crate) fn sector_size(&self) -> Result<SectorSize, Error> {
        if self.kind != "crypt" || self.encryption != crate::CIPHER {
            let Self { kind, encryption, .. } = self;
            let why = format!("the data is of type {kind:?} with the cipher {encryption:?}, not {}", crate::CIPHER);
            return Err(Error::Unsupported(why));
        }
        if self.integrity.is_some() {
            return Err(Error::Unsupported("the data has integrity tags".to_owned()));
        }
        let why =
            || format!("the data has sectors of {} bytes; 512, 1024, 2048 and 4096 are supported", self.sector_size);
        SectorSize::new(self.sector_size).ok_or_else(|| Error::Unsupported(why()))
    }
}

/// Bytes that the JSON has in Base64.
#[derive(Clone, Debug, PartialEq)]
struct Binary(Vec<u8>);

impl<'de> Deserialize<'de> for Binary {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        STANDARD.decode(&text).map(Self).map_err(|error| D::Error::custom(format!("Base64: {error}")))
    }
}

pub(crate) fn base64(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

/// The JSON has 64-bit numbers as decimal text.
fn number<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    let text = String::deserialize(from)?;
    decimal(&text).ok_or_else(|| D::Error::custom(format!("{text:?} is no number")))
}

fn size_or_dynamic<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    let text = String::deserialize(from)?;
    if text == "dynamic" {
        return Ok(None);
    }
    decimal(&text).map(Some).ok_or_else(|| D::Error::custom(format!("{text:?} is neither a number nor \"dynamic\"")))
}

fn numbers<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u32>, D::Error> {
    let texts = Vec::<String>::deserialize(from)?;
    let number = |text: &String| id(text).ok_or_else(|| D::Error::custom(format!("{text:?} is no number")));
    texts.iter().map(number).collect()
}

fn decimal(text: &str) -> Option<u64> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

/// An object's key as a number.
fn id(text: &str) -> Option<u32> {
    decimal(text).and_then(|number| u32::try_from(number).ok())
}

/// A description of the keyslot's part that is of an unknown kind, if there is one. A part without a kind is damaged;
/// reading it reports that.
fn unknown_part(keyslot: &Value) -> Option<String> {
    if keyslot.get("type").is_none() {
        return Some("it has no type".to_owned());
    }
    let known: [(_, _, &[&str]); 4] = [
        ("/type", "type", &["luks2"]),
        ("/area/type", "area", &["raw"]),
        ("/af/type", "splitter", &["luks1"]),
        ("/kdf/type", "function", &["pbkdf2", "argon2i", "argon2id"]),
    ];
    known.into_iter().find_map(|(place, what, names)| {
        let kind = keyslot.pointer(place)?;
        (!kind.as_str().is_some_and(|kind| names.contains(&kind)))
            .then(|| format!("its {what} {kind} is not supported"))
    })
}

/// The objects under `name`, each with its key.
fn objects<'a>(json: &'a Value, name: &str) -> Result<impl Iterator<Item = (&'a str, &'a Value)>, Error> {
    let objects = json.get(name).and_then(Value::as_object);
    let objects = objects.ok_or_else(|| Error::Header(format!("the metadata has no {name}")))?;
    Ok(objects.iter().map(|(key, value)| (key.as_str(), value)))
}

fn parts<T: DeserializeOwned>(json: &Value, name: &str) -> Result<BTreeMap<u32, T>, Error> {
    let number = |key: &str| id(key).ok_or_else(|| wrong(name, format!("{key:?} is no number")));
    objects(json, name)?.map(|(key, value)| Ok((number(key)?, of(value, name, number(key)?)?))).collect()
}

fn of<T: DeserializeOwned>(value: &Value, what: &str, number: u32) -> Result<T, Error> {
    T::deserialize(value).map_err(|error| wrong(&format!("{what} {number}"), error.to_string()))
}

fn part<T: DeserializeOwned>(json: &Value, name: &str, what: &str) -> Result<T, Error> {
    let value = json.get(name).ok_or_else(|| Error::Header(format!("the metadata has no {name}")))?;
    T::deserialize(value).map_err(|error| wrong(&format!("{what}{name}"), error.to_string()))
}

fn wrong(what: &str, why: impl Into<String>) -> Error {
    Error::Header(format!("the metadata of {what}: {}", why.into()))
}
