//! Opening a volume, as the subcommands do that need its contents.
use std::fs::File;
use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::passphrase::SecretArgs;
use super::{LimitArgs, hash, open_locked, shown};
use crate::cipher::SectorSize;
use crate::plain::Plain;
use crate::volume::Volume;
use crate::{Error, Hash, Luks, Store};

/// Which kind of volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// LUKS1 or LUKS2, as the header says
    Luks,
    /// No header: the options below say what a header would
    Plain,
}

/// Which volume, and how to open it.
#[derive(Args, Clone, Debug)]
pub struct OpenArgs {
    /// The file or block device with the data
    image: PathBuf,

    /// The file that has the header, where it is detached
    #[arg(long, value_name = "FILE")]
    header: Option<PathBuf>,

    /// Which kind of volume
    #[arg(long = "type", value_enum, default_value_t = Kind::Luks)]
    kind: Kind,

    #[command(flatten)]
    secret: SecretArgs,

    #[command(flatten)]
    limits: LimitArgs,

    #[command(flatten, next_help_heading = "Plain volumes")]
    plain: PlainArgs,
}

#[derive(Args, Clone, Debug)]
struct PlainArgs {
    /// Bits of the key: 256 or 512
    #[arg(long = "plain-key-size", value_name = "BITS", default_value = "256", value_parser = key_size)]
    key_size: usize,

    /// The hash of the passphrase; a key file is taken as it is
    #[arg(long = "plain-hash", value_name = "HASH", default_value = "sha256", value_parser = hash)]
    hash: Hash,

    /// Where the data begins, in 512-byte units
    #[arg(long = "plain-offset", value_name = "UNITS", default_value_t = 0)]
    offset: u64,

    /// The number of the first unit
    #[arg(long = "plain-skip", value_name = "UNITS", default_value_t = 0)]
    skip: u64,

    /// How many units [default: all]
    #[arg(long = "plain-size", value_name = "UNITS")]
    size: Option<u64>,

    /// Bytes a sector
    #[arg(long = "plain-sector-size", value_name = "BYTES", default_value = "512", value_parser = sector_size)]
    sector_size: SectorSize,

    /// Number sectors rather than units of 512 bytes
    #[arg(long)]
    iv_large_sectors: bool,
}

pub(super) fn sector_size(text: &str) -> Result<SectorSize, String> {
    let bytes = text.parse().ok().and_then(SectorSize::new);
    bytes.ok_or_else(|| "sectors have 512, 1024, 2048 or 4096 bytes".to_owned())
}

pub(super) fn key_size(text: &str) -> Result<usize, String> {
    let bits = text.parse().ok().filter(|bits| matches!(bits, 256 | 512));
    bits.ok_or_else(|| "a key has 256 or 512 bits".to_owned())
}

/// A volume that is open, with its data's file.
#[derive(Debug)]
pub struct Opened {
    /// The file with the data.
    pub data: File,
    /// The key and the place.
    pub volume: Volume,
    /// What is wrong, though it serves.
    pub warnings: Vec<String>,
}

impl OpenArgs {
    /// Opens the data's file, reads the header, asks for the passphrase, and finds the key.
    ///
    /// The data's file is locked, shared where `may_write` is not set; so is the header's, for as long as it is read.
    ///
    /// # Errors
    /// As for [`Luks::open`].
    pub fn open(&self, may_write: bool) -> Result<Opened, Error> {
        let data = open_locked(&self.image, may_write)?;
        let data_len = data.size().map_err(|error| Error::io(shown(&self.image), error))?;
        if self.kind == Kind::Plain {
            let (volume, warnings) = (self.plain_volume(data_len)?, Vec::new());
            return Ok(Opened { data, volume, warnings });
        }
        let detached = self.header.as_deref().map(|path| open_locked(path, false)).transpose()?;
        let store = detached.as_ref().unwrap_or(&data);
        let luks = Luks::read(store)?;
        // What cannot be opened is said before anybody types.
        luks.geometry(data_len, detached.is_some())?;
        let passphrase = self.secret.get(&shown(&self.image))?;
        let volume = luks.open(store, &passphrase, data_len, detached.is_some(), &self.limits.limits())?;
        Ok(Opened { data, volume, warnings: luks.faults() })
    }

    fn plain_volume(&self, data_len: u64) -> Result<Volume, Error> {
        let PlainArgs { key_size, hash, offset, skip, size, sector_size, iv_large_sectors } = self.plain;
        let plain = Plain {
            key_bytes: key_size / 8,
            hash: self.secret.key_file.is_none().then_some(hash),
            offset,
            skip,
            size,
            sector_size,
            counts_sectors: iv_large_sectors,
        };
        let geometry = plain.geometry(data_len)?;
        Volume::new(&plain.key(&self.secret.get(&shown(&self.image))?)?, geometry)
    }
}
