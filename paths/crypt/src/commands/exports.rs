//! The volumes of `pagemill crypt serve`: IMAGE, and one for each `--export`.
use std::path::PathBuf;

use pagemill::PAGE_SIZE;
use tracing::warn;

use super::fitting_block;
use super::hold::Claim;
use super::open::{OpenArgs, Opened};
use crate::Error;
use crate::nbd::Export;
use crate::serve::{DataPath, Disk, Memory, is_same_far};

/// An `--export`: `NAME=IMAGE[,key-file=FILE][,header=FILE][,read-only]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ExportArg {
    name: String,
    image: PathBuf,
    key_file: Option<PathBuf>,
    header: Option<PathBuf>,
    is_read_only: bool,
}

/// A name that a client can ask for.
pub(super) fn name(text: &str) -> Result<String, String> {
    if text.len() > 4096 { Err("a name has at most 4096 bytes".to_owned()) } else { Ok(text.to_owned()) }
}

pub(super) fn export(text: &str) -> Result<ExportArg, String> {
    let (before, rest) = text.split_once('=').ok_or("NAME=IMAGE, and options after commas")?;
    let mut parts = rest.split(',');
    let image = parts.next().filter(|image| !image.is_empty()).ok_or("there is no IMAGE after NAME=")?;
    let mut export =
        ExportArg { name: name(before)?, image: image.into(), key_file: None, header: None, is_read_only: false };
    for part in parts {
        match part.split_once('=') {
            Some(("key-file", file)) => export.key_file = Some(file.into()),
            Some(("header", file)) => export.header = Some(file.into()),
            None if part == "read-only" => export.is_read_only = true,
            _ => return Err(format!("{part}: known are key-file=FILE, header=FILE and read-only")),
        }
    }
    Ok(export)
}

/// A volume that is to be served.
#[derive(Debug)]
pub(super) struct Wanted {
    name: String,
    open: OpenArgs,
    is_read_only: bool,
}

impl Wanted {
    pub(super) fn new(name: String, open: OpenArgs, is_read_only: bool) -> Self {
        Self { name, open, is_read_only }
    }

    /// As an `--export` says; what it leaves open is as in `open`.
    pub(super) fn export(export: &ExportArg, open: &OpenArgs, is_read_only: bool) -> Self {
        let ExportArg { name, image, key_file, header, .. } = export;
        let open = open.of(image).with(key_file.as_ref(), header.as_ref());
        Self::new(name.clone(), open, is_read_only || export.is_read_only)
    }
}

/// Refuses two exports of one name: a client would get the first one.
pub(super) fn refuse_one_name(wanted: &[Wanted]) -> Result<(), Error> {
    for (number, one) in wanted.iter().enumerate() {
        if wanted[..number].iter().any(|other| other.name == one.name) {
            let why = format!("two exports have the name {:?}: give each its own, IMAGE's with --name", one.name);
            return Err(Error::Request(why));
        }
    }
    Ok(())
}

/// Refuses two exports of one far end, unless both only read, as the claim does for files. A far end has no claim.
pub(super) fn refuse_one_far(wanted: &[Wanted]) -> Result<(), Error> {
    for (number, one) in wanted.iter().enumerate() {
        let Some(far) = one.open.far() else { continue };
        let is_other = |other: &&Wanted| {
            !(one.is_read_only && other.is_read_only) && other.open.far().is_some_and(|other| is_same_far(far, other))
        };
        if let Some(other) = wanted[..number].iter().find(is_other) {
            let why = format!(
                "the exports {:?} and {:?} are one volume, {far}, which one of them writes: leave one out, or make both \
                 read-only",
                other.name, one.name
            );
            return Err(Error::Request(why));
        }
    }
    Ok(())
}

/// An open volume and its export.
pub(super) struct Prepared {
    pub(super) path: DataPath,
    pub(super) export: Export,
    /// Keeps others from using the data.
    pub(super) claim: Claim,
}

impl Prepared {
    pub(super) fn open(wanted: Wanted, memory: &Memory, buffered: bool) -> Result<Self, Error> {
        let Wanted { name, open, is_read_only } = wanted;
        let Opened { data, volume, warnings, claim } = open.open(!is_read_only)?;
        warnings.iter().for_each(|warning| warn!(name: "header", "{warning}"));
        let geometry = *volume.geometry();
        let disk = Disk::new(data, geometry.offset, geometry.sector_size.bytes(), buffered);
        let block = fitting_block(&disk, geometry.offset)?;
        let export = Export {
            name,
            description: "an encrypted volume".to_owned(),
            size: geometry.len,
            is_read_only,
            min_block: block as u32,
            preferred_block: block.max(PAGE_SIZE) as u32,
        };
        Ok(Self { path: DataPath { volume, disk, memory: memory.clone() }, export, claim })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::shown;

    #[test]
    fn an_export_has_a_name_an_image_and_options() {
        let read = export("disk=/dev/sdb,key-file=a b,read-only,header=h=1").unwrap();
        assert_eq!((read.name.as_str(), shown(&read.image)), ("disk", "/dev/sdb".to_owned()));
        assert_eq!((read.key_file, read.header), (Some("a b".into()), Some("h=1".into())));
        assert!(read.is_read_only);
        let read = export("=nbd+unix:///disk?socket=/s").unwrap();
        assert_eq!((read.name.as_str(), shown(&read.image)), ("", "nbd+unix:///disk?socket=/s".to_owned()));
        for wrong in ["", "disk", "disk=", "disk=,read-only", "a=b,c", "a=b,read-only=yes", "a=b,key-file", "a=b,"] {
            assert!(export(wrong).is_err(), "{wrong}");
        }
    }
}
