//! `pagemill crypt format`.
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use pagemill_command::size;

use super::hold::{refuse_one_file, uri};
use super::open::{key_size, sector_size};
use super::passphrase::SecretArgs;
use super::signatures::refuse_what_is_there;
use super::target::Target;
use super::{KdfArgs, Said, json_line, shown};
use crate::cipher::SectorSize;
use crate::kdf::KdfKind;
use crate::luks::New;
use crate::{Error, Luks};

/// Bytes of a new file for a detached header.
const HEADER_FILE: u64 = 16 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Version {
    /// Two copies of the header, sectors of up to 4096 bytes, argon2
    Luks2,
    /// One header, sectors of 512 bytes, pbkdf2
    Luks1,
}

/// Make a volume: a header with one keyslot
///
/// The data area is left as it is: reads of what was never written give noise.
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub(super) struct FormatArgs {
    /// The file, block device or NBD URI; --size makes a file
    image: PathBuf,

    /// How large the new file is to be: bytes, or with K, M, G or T
    #[arg(long, value_parser = size)]
    size: Option<u64>,

    /// Which kind of header
    #[arg(long = "type", value_enum, default_value_t = Version::Luks2)]
    version: Version,

    /// Put the header into this file, and nothing into IMAGE
    #[arg(long, value_name = "FILE")]
    header: Option<PathBuf>,

    /// Bits of the volume key: 512 (AES-256) or 256 (AES-128)
    #[arg(long, value_name = "BITS", default_value = "512", value_parser = key_size)]
    key_size: usize,

    /// Bytes a sector [default: 4096 if the data's size allows it, else 512]
    #[arg(long, value_name = "BYTES", value_parser = sector_size)]
    sector_size: Option<SectorSize>,

    /// A name of up to 47 bytes that tools show; LUKS2 alone
    #[arg(long, default_value = "", hide_default_value = true)]
    label: String,

    /// Overwrite what is there, unless it is mounted or in use
    #[arg(long)]
    force: bool,

    /// Print what was made as a JSON object
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    secret: SecretArgs,

    #[command(flatten)]
    kdf: KdfArgs,
}

pub(super) fn run(args: &FormatArgs) -> Result<Said, Error> {
    let default_kdf = if args.version == Version::Luks1 { KdfKind::Pbkdf2 } else { KdfKind::Argon2id };
    let kdf = args.kdf.choice(default_kdf)?;
    let header = args.header.as_deref();
    header.map_or(Ok(()), |header| refuse_one_file(&args.image, header))?;
    let is_new = |path: &Path| !path.exists() && uri(path).is_none();
    let mut data = Target::open(&args.image, args.size)?;
    let mut header = header.map(|path| Target::open(path, is_new(path).then_some(HEADER_FILE))).transpose()?;
    let data_len = data.len()?;
    let store = header.as_ref().unwrap_or(&data);
    if !args.force {
        refuse_what_is_there(store)?;
    }
    // The header's end is a multiple of the largest sector, so the data's size is a multiple of a sector if the file's
    // size is.
    let default_sector = match args.version {
        Version::Luks2 if data_len.is_multiple_of(SectorSize::LARGEST.bytes() as u64) => SectorSize::LARGEST,
        _ => SectorSize::SMALLEST,
    };
    let new = New {
        version: if args.version == Version::Luks1 { 1 } else { 2 },
        key_bytes: args.key_size / 8,
        sector_size: args.sector_size.unwrap_or(default_sector),
        hash: args.kdf.hash,
        kdf,
        label: args.label.clone(),
        detached: header.as_ref().map(|_| data_len),
    };
    Luks::check_new(&new, store.len()?)?;
    let passphrase = args.secret.get_new(&shown(&args.image))?;
    let luks = Luks::format(&store.file, &new, &passphrase)?;
    let geometry = luks.geometry(data_len, header.is_some())?;
    // Both get their names before either is kept.
    header.as_mut().map_or(Ok(()), Target::publish)?;
    data.publish()?;
    let is_detached = header.is_some();
    for target in [Some(data), header].into_iter().flatten() {
        target.keep();
    }
    if args.json {
        let made = serde_json::json!({
            "image": shown(&args.image),
            "type": format!("luks{}", new.version),
            "uuid": luks.uuid(),
            "cipher": crate::CIPHER,
            "key_bits": args.key_size,
            "sector_size": geometry.sector_size.bytes(),
            "data_offset": geometry.offset,
            "data_bytes": geometry.len,
            "is_detached": is_detached,
            "keyslot": luks.used().first(),
        });
        return Ok(Said { out: json_line(&made), warnings: Vec::new() });
    }
    let (sector, mib) = (geometry.sector_size.bytes(), geometry.len as f64 / f64::from(1 << 20));
    let out = format!(
        "{}: LUKS{}, {mib:.1} MiB of data in {sector}-byte sectors, {} with {} bits\n",
        shown(&args.image),
        new.version,
        crate::CIPHER,
        args.key_size,
    );
    Ok(Said { out, warnings: Vec::new() })
}
