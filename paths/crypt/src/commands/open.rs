//! Opening a volume, for the subcommands that need its contents.
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::hold::{Claim, HeaderFile, far, open_claimed, refuse_one_file, unlocked, uri};
use super::passphrase::SecretArgs;
use super::{LimitArgs, faults, hash, shown};
use crate::cipher::SectorSize;
use crate::plain::Plain;
use crate::serve::{Behind, is_same_far};
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
    /// The file, block device or far end with the data, which each subcommand takes its own way.
    #[arg(skip)]
    image: PathBuf,

    /// How long requests wait for an NBD server that is away, in seconds
    ///
    /// After that they fail. It is used again when it comes back, and writes
    /// that were answered and not flushed are then written again.
    #[arg(long, value_name = "S", default_value_t = 120, verbatim_doc_comment)]
    reconnect: u32,

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

    #[command(flatten)]
    plain: PlainArgs,
}

/// Each argument names this heading, since a heading for the group would also apply to later arguments.
const PLAIN: &str = "Plain volumes";

/// Options have no defaults here, so that options given for a volume with a header are noticed.
#[derive(Args, Clone, Debug, Default, PartialEq)]
struct PlainArgs {
    /// Bits of the key: 256 or 512 [default: 256]
    #[arg(long = "plain-key-size", help_heading = PLAIN, value_name = "BITS", value_parser = key_size)]
    key_size: Option<usize>,

    /// The passphrase's hash; a key file has none [default: sha256]
    #[arg(long = "plain-hash", help_heading = PLAIN, value_name = "HASH", value_parser = hash)]
    hash: Option<Hash>,

    /// Where the data begins, in 512-byte units [default: 0]
    #[arg(long = "plain-offset", help_heading = PLAIN, value_name = "UNITS")]
    offset: Option<u64>,

    /// The number of the first unit [default: 0]
    #[arg(long = "plain-skip", help_heading = PLAIN, value_name = "UNITS")]
    skip: Option<u64>,

    /// How many units [default: all]
    #[arg(long = "plain-size", help_heading = PLAIN, value_name = "UNITS")]
    size: Option<u64>,

    /// Bytes a sector [default: 512]
    #[arg(long = "plain-sector-size", help_heading = PLAIN, value_name = "BYTES", value_parser = sector_size)]
    sector_size: Option<SectorSize>,

    /// Number sectors rather than units of 512 bytes
    #[arg(long, help_heading = PLAIN)]
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

/// An open volume and the file with its data.
#[derive(Debug)]
pub struct Opened {
    /// The file or far end with the data.
    pub data: Behind,
    /// The key and the place of the data.
    pub volume: Volume,
    /// What is wrong with the header, although it can be used.
    pub warnings: Vec<String>,
    /// Keeps others from using the data.
    pub claim: Claim,
}

impl OpenArgs {
    /// The same, for `image`.
    #[must_use]
    pub fn of(&self, image: &Path) -> Self {
        Self { image: image.to_owned(), ..self.clone() }
    }

    /// The same, with this key file, if it is one, and with this header, or the image's own.
    pub(super) fn with(mut self, key_file: Option<&PathBuf>, header: Option<&PathBuf>) -> Self {
        if let Some(key_file) = key_file {
            self.secret = SecretArgs::of_key_file(key_file);
        }
        self.header = header.cloned();
        self
    }

    /// Whether both name the same file, device or far end, as far as names tell.
    pub(super) fn is_of_same_image(&self, other: &Self) -> bool {
        if let (Some(one), Some(other)) = (uri(&self.image), uri(&other.image)) {
            return is_same_far(one, other);
        }
        let place = |open: &Self| fs::canonicalize(&open.image).unwrap_or_else(|_| open.image.clone());
        place(self) == place(other)
    }

    /// Whether a header in a file of its own is named.
    pub(super) fn has_header(&self) -> bool {
        self.header.is_some()
    }

    /// Opens the data's file, reads the header, asks for the passphrase, and finds the key.
    ///
    /// The data is claimed: exclusively, or shared for a file if `may_write` is not set. The header's metadata is
    /// locked while it is read, and not while the user types: whatever happens to the keys until then counts.
    ///
    /// # Errors
    /// As for [`Luks::open`](crate::Luks::open).
    pub fn open(&self, may_write: bool) -> Result<Opened, Error> {
        self.refuse_what_says_nothing()?;
        let header = self.header.as_deref();
        header.map_or(Ok(()), |header| refuse_one_file(&self.image, header))?;
        let of_header = |error: Error| error.in_file(header.unwrap_or(&self.image));
        let (data, mut claim) = self.data(may_write)?;
        let data_len = data.size().map_err(|error| Error::io(shown(&self.image), error))?;
        if self.kind == Kind::Plain {
            let (volume, warnings) = (self.plain_volume(data_len)?, Vec::new());
            return Ok(Opened { data, volume, warnings, claim });
        }
        // A far end has no lock for its header.
        let file = match (header, &data) {
            (Some(path), _) => {
                let file = HeaderFile::open(path, false)?;
                claim.add(file.claim(false)?);
                Some(file)
            }
            (None, Behind::File(data)) => Some(HeaderFile::of_data(data, &self.image)?),
            (None, Behind::Far(_)) => None,
        };
        let store: &dyn Store = file.as_ref().map_or(&data, |file| file);
        let read = || {
            let luks = file.as_ref().map_or_else(|| Luks::read(&data), HeaderFile::read).map_err(of_header)?;
            luks.geometry(data_len, header.is_some()).map_err(|error| error.in_file(&self.image))?;
            luks.check_openers().map_err(of_header)?;
            if may_write {
                luks.check_not_written_over().map_err(of_header)?;
            }
            Ok(luks)
        };
        // Errors come before the user has to type a passphrase.
        claim.keep_cipher(&read()?)?;
        let passphrase = self.secret.get(&shown(&self.image))?;
        let (luks, volume) = unlocked(read, |luks| {
            // Its UUID may have changed.
            claim.keep_cipher(luks)?;
            let opened = luks.open(store, &passphrase, data_len, header.is_some(), &self.limits.limits());
            opened.map_err(of_header)
        })?;
        Ok(Opened { data, volume, warnings: faults(&luks, header.unwrap_or(&self.image)), claim })
    }

    /// Opens the data. A far end is not claimed: whether others use it is for its server to say.
    fn data(&self, may_write: bool) -> Result<(Behind, Claim), Error> {
        if let Some(far) = far(&self.image, Duration::from_secs(self.reconnect.into()), may_write)? {
            return Ok((far.into(), Claim::default()));
        }
        let (file, claim) = open_claimed(&self.image, may_write).map_err(|error| match &error {
            Error::Io { source, .. }
                if matches!(source.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem)
                    && fs::File::open(&self.image).is_ok() =>
            {
                Error::Request(format!("{error}; it can be read: say --read-only, or get the right to write it"))
            }
            _ => error,
        })?;
        Ok((file.into(), claim))
    }

    /// Refuses options for the other kind of volume: they would have no effect, and the wrong volume would be opened.
    fn refuse_what_says_nothing(&self) -> Result<(), Error> {
        let why = match self.kind {
            Kind::Plain if self.header.is_some() => "a plain volume has no header: leave --header out",
            Kind::Luks if self.plain != PlainArgs::default() => {
                "--plain-... and --iv-large-sectors are for plain volumes: say --type plain, or leave them out"
            }
            _ => return Ok(()),
        };
        Err(Error::Request(why.to_owned()))
    }

    fn plain_volume(&self, data_len: u64) -> Result<Volume, Error> {
        let PlainArgs { key_size, hash, offset, skip, size, sector_size, iv_large_sectors } = self.plain;
        let plain = Plain {
            key_bytes: key_size.unwrap_or(256) / 8,
            hash: (!self.secret.has_key()).then_some(hash.unwrap_or(Hash::Sha256)),
            offset: offset.unwrap_or(0),
            skip: skip.unwrap_or(0),
            size,
            sector_size: sector_size.unwrap_or(SectorSize::SMALLEST),
            counts_sectors: iv_large_sectors,
        };
        let geometry = plain.geometry(data_len)?;
        Volume::new(&plain.key(&self.secret.get(&shown(&self.image))?)?, geometry)
    }
}
