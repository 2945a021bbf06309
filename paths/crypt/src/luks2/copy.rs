//! One of the two copies of a LUKS2 header: 4096 bytes of fixed fields, then JSON up to `hdr_size`, all of it under one
//! checksum (the LUKS2 On-Disk Format Specification, section 2.1).
use std::ops::Range;

use crate::Error;
use crate::bytes::{Fields, put};
use crate::hash::Hash;
use crate::luks1::MAGIC;
use crate::secret::random;
use crate::store::Store;

/// Bytes of the fixed fields.
pub(crate) const FIXED: usize = 4096;
/// The sizes that a copy may have, and so the places where the second one may begin.
pub(crate) const SIZES: [u64; 9] =
    [16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20];

/// Offsets of the fields.
mod at {
    pub(super) const VERSION: usize = 6;
    pub(super) const SIZE: usize = 8;
    pub(super) const SEQUENCE: usize = 16;
    pub(super) const LABEL: usize = 24;
    pub(super) const CHECKSUM_NAME: usize = 72;
    pub(super) const SALT: usize = 104;
    pub(super) const UUID: usize = 168;
    pub(super) const SUBSYSTEM: usize = 208;
    pub(super) const OFFSET: usize = 256;
    pub(super) const CHECKSUM: usize = 448;
}
/// Bytes of the checksum's field.
const CHECKSUM: usize = 64;

/// Which copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    Primary,
    Secondary,
}

impl Which {
    fn magic(self) -> [u8; 6] {
        match self {
            Self::Primary => MAGIC,
            Self::Secondary => *b"SKUL\xba\xbe",
        }
    }
}

/// The contents of a copy, apart from which copy it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Copy {
    pub(crate) size: u64,
    /// Grows with every change; the copy with the higher number is newer.
    pub(crate) sequence: u64,
    /// Texts are kept as raw fields, whatever their bytes are.
    pub(crate) label: [u8; 48],
    pub(crate) checksum: Hash,
    pub(crate) uuid: [u8; 40],
    pub(crate) subsystem: [u8; 48],
    /// The text of the JSON area.
    pub(crate) json: Vec<u8>,
}

impl Copy {
    /// Reads the copy that begins at `offset`.
    pub(crate) fn read(store: &dyn Store, which: Which, offset: u64) -> Result<Self, Error> {
        let mut bytes = vec![0; FIXED];
        read(store, &mut bytes, offset)?;
        bytes.resize(size_of_copy(&bytes, which, offset)?, 0);
        read(store, &mut bytes[FIXED..], offset + FIXED as u64)?;
        Self::parse(&bytes, which, offset)
    }

    /// Reads a copy from `bytes`, which begin at `offset` of their file and may continue after the copy.
    pub(crate) fn parse(bytes: &[u8], which: Which, offset: u64) -> Result<Self, Error> {
        let size = size_of_copy(bytes, which, offset)?;
        let (Some(fixed), Some(all)) = (bytes.first_chunk::<FIXED>(), bytes.get(..size)) else {
            return Err(damaged(format!("cut off: {} of {size} bytes are there", bytes.len())));
        };
        let checksum = Hash::named(&fixed.text::<32>(at::CHECKSUM_NAME))?;
        let mut sum = [0; CHECKSUM];
        sum_of(all, checksum, &mut sum);
        if fixed.field::<CHECKSUM>(at::CHECKSUM)[..checksum.digest_len()] != sum[..checksum.digest_len()] {
            return Err(damaged("its checksum is wrong"));
        }
        let json = &all[FIXED..];
        let end = json.iter().position(|&byte| byte == 0).ok_or_else(|| damaged("its JSON area has no end"))?;
        Ok(Self {
            size: size as u64,
            sequence: fixed.u64_at(at::SEQUENCE),
            label: fixed.field(at::LABEL),
            checksum,
            uuid: fixed.field(at::UUID),
            subsystem: fixed.field(at::SUBSYSTEM),
            json: json[..end].to_vec(),
        })
    }

    /// The copy's bytes on the disk, with a fresh salt.
    pub(crate) fn bytes(&self, which: Which) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0; self.size as usize];
        let room = bytes.len() - FIXED - 1;
        if self.json.len() > room {
            let needed = self.json.len();
            return Err(Error::Request(format!(
                "the header has room for {room} bytes of metadata, {needed} are needed"
            )));
        }
        put(&mut bytes, 0, &which.magic());
        put(&mut bytes, at::VERSION, &2u16.to_be_bytes());
        put(&mut bytes, at::SIZE, &self.size.to_be_bytes());
        put(&mut bytes, at::SEQUENCE, &self.sequence.to_be_bytes());
        put(&mut bytes, at::LABEL, &self.label);
        put(&mut bytes, at::CHECKSUM_NAME, self.checksum.name().as_bytes());
        random(&mut bytes[at::SALT..at::SALT + 64])?;
        put(&mut bytes, at::UUID, &self.uuid);
        put(&mut bytes, at::SUBSYSTEM, &self.subsystem);
        put(&mut bytes, at::OFFSET, &self.offset(which).to_be_bytes());
        put(&mut bytes, FIXED, &self.json);
        let mut sum = [0; CHECKSUM];
        sum_of(&bytes, self.checksum, &mut sum);
        put(&mut bytes, at::CHECKSUM, &sum);
        Ok(bytes)
    }

    /// Whether the bytes `there`, in the place of the damaged primary copy, were written by something else. `self` is
    /// the secondary copy. Damage leaves the header's magic or its UUID, and few bytes that are neither right nor zero;
    /// a superblock does not. Zeroes count as damage, since nothing is lost by overwriting them.
    pub(crate) fn is_written_over(&self, there: &[u8]) -> bool {
        /// The fields that differ between any two versions of a header.
        const CHANGES: [Range<usize>; 4] = [
            at::SEQUENCE..at::CHECKSUM_NAME,
            at::SALT..at::OFFSET,
            at::CHECKSUM..at::CHECKSUM + CHECKSUM,
            FIXED..usize::MAX,
        ];
        /// Bytes; any superblock has more.
        const FEW: usize = 16;
        let Ok(own) = self.bytes(Which::Primary) else { return false };
        let stays = |place: usize| !CHANGES.iter().any(|changes| changes.contains(&place));
        let is_text = |byte: u8| byte.is_ascii_graphic() || byte.is_ascii_whitespace();
        let foreign = |&(place, (byte, own)): &(usize, (&u8, &u8))| {
            *byte != 0 && if stays(place) { byte != own } else { place >= FIXED && !is_text(*byte) }
        };
        let strange = there.iter().zip(&own).enumerate().filter(foreign).count();
        let is_same = |field: Range<usize>| there.get(field.clone()) == own.get(field);
        let is_header = is_same(0..at::VERSION) || is_same(at::UUID..at::SUBSYSTEM);
        strange > FEW || (!is_header && there.iter().take(FIXED).any(|&byte| byte != 0))
    }

    /// Its place in the file.
    pub(crate) fn offset(&self, which: Which) -> u64 {
        match which {
            Which::Primary => 0,
            Which::Secondary => self.size,
        }
    }
}

/// Bytes of both copies, from the beginning of the primary one.
pub(crate) fn copies_len(first: &[u8; crate::luks1::HEADER]) -> u64 {
    let size = first.u64_at(at::SIZE);
    2 * if SIZES.contains(&size) { size } else { SIZES[0] }
}

/// The size of the copy at `offset`, if the beginning of its fixed fields is valid.
fn size_of_copy(bytes: &[u8], which: Which, offset: u64) -> Result<usize, Error> {
    let Some(fixed) = bytes.first_chunk::<FIXED>() else {
        return Err(damaged(format!("cut off: {} of {FIXED} bytes are there", bytes.len())));
    };
    if fixed.field(0) != which.magic() {
        return Err(damaged("it does not begin as one"));
    }
    let (version, size, own) = (fixed.u16_at(at::VERSION), fixed.u64_at(at::SIZE), fixed.u64_at(at::OFFSET));
    if version != 2 {
        return Err(damaged(format!("its version is {version}")));
    }
    if !SIZES.contains(&size) {
        return Err(damaged(format!("it claims {size} bytes, which no header has")));
    }
    let place = if which == Which::Primary { 0 } else { size };
    if own != offset || own != place {
        return Err(damaged(format!("it stands at {offset}, claims {own}, and belongs at {place}")));
    }
    Ok(size as usize)
}

/// The checksum of a copy, taken with its own field zero.
fn sum_of(bytes: &[u8], hash: Hash, sum: &mut [u8; CHECKSUM]) {
    let (before, behind) = (&bytes[..at::CHECKSUM], &bytes[at::CHECKSUM + CHECKSUM..]);
    hash.digest_into(&[before, &[0; CHECKSUM], behind], sum);
}

fn read(store: &dyn Store, bytes: &mut [u8], at: u64) -> Result<(), Error> {
    store.read_at(bytes, at).map_err(|error| match error.kind() {
        std::io::ErrorKind::UnexpectedEof => damaged("cut off"),
        _ => Error::io("reading the header", error),
    })
}

fn damaged(why: impl Into<String>) -> Error {
    Error::Header(why.into())
}
