//! `pagemill crypt info`.
use std::fmt::Write;
use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use super::hold::HeaderFile;
use super::{Said, faults, json_line, shown};
use crate::volume::UNIT;
use crate::{Error, Luks, SectorSize, Store, luks1, luks2};

/// LUKS2 stores the key's length only in the keyslots.
const NO_KEY_SIZE: &str = "not said by any keyslot that is known here";

/// Show what a volume's header says, without its passphrase
#[derive(Args, Debug)]
pub(super) struct InfoArgs {
    /// The file, block device or NBD URI
    image: PathBuf,

    /// The file that has the header, where it is detached
    #[arg(long, value_name = "FILE")]
    header: Option<PathBuf>,

    /// Print it as a JSON object
    #[arg(long)]
    json: bool,
}

/// The report. The names are part of the program's interface.
#[derive(Default, Serialize)]
struct Info {
    #[serde(rename = "type")]
    kind: &'static str,
    uuid: String,
    label: String,
    cipher: String,
    key_bits: Option<usize>,
    sector_size: Option<usize>,
    data_offset: Option<u64>,
    data_bytes: Option<u64>,
    /// Why the volume can't be opened here, if it can't.
    not_opened: Option<String>,
    keyslots: Vec<Slot>,
    tokens: usize,
    /// What is wrong with the header, although it can be used.
    faults: Vec<String>,
    /// How many segments the data has. Their fields are shown only if there is one.
    #[serde(skip)]
    segments: usize,
}

#[derive(Serialize)]
struct Slot {
    number: u32,
    key_bits: Option<usize>,
    kdf: Option<String>,
    area_offset: Option<u64>,
    area_bytes: Option<u64>,
    /// Why it can't open the volume here, if it can't.
    not_used: Option<String>,
    /// Why it is skipped unless it is named, if it is.
    passed_over: Option<&'static str>,
}

pub(super) fn run(args: &InfoArgs) -> Result<Said, Error> {
    let data = HeaderFile::open(&args.image, false)?;
    let data_len = data.size().map_err(|error| Error::io(shown(&args.image), error))?;
    let detached = args.header.as_deref().map(|path| HeaderFile::open(path, false)).transpose()?;
    let of_header = args.header.as_ref().unwrap_or(&args.image);
    let luks = detached.as_ref().unwrap_or(&data).read().map_err(|error| error.in_file(of_header))?;
    let mut info = match &luks {
        Luks::V1(header) => of_luks1(header),
        Luks::V2(header) => of_luks2(header),
    };
    info.faults = luks.faults();
    match luks.geometry(data_len, detached.is_some()) {
        Ok(geometry) => {
            info.sector_size = Some(geometry.sector_size.bytes());
            info.data_offset = Some(geometry.offset);
            info.data_bytes = Some(geometry.len);
        }
        Err(error) => info.not_opened = Some(error.to_string()),
    }
    if let (None, Err(error)) = (&info.not_opened, luks.check_openers()) {
        info.not_opened = Some(error.to_string());
    }
    let warnings = faults(&luks, of_header);
    let out = match args.json {
        true => json_line(&serde_json::json!(info)),
        false => info.table(),
    };
    Ok(Said { out, warnings })
}

fn of_luks1(header: &luks1::Header) -> Info {
    let active = (0..).zip(&header.slots).filter(|(_, slot)| slot.is_active);
    let keyslots = active.map(|(number, slot)| Slot {
        number,
        key_bits: Some(8 * header.key_bytes),
        kdf: Some(format!("pbkdf2 ({}), {} iterations", header.hash, slot.iterations)),
        area_offset: Some(u64::from(slot.material) * UNIT),
        area_bytes: Some(crate::af::material_len(header.key_bytes, slot.stripes as usize) as u64),
        not_used: None,
        passed_over: None,
    });
    Info {
        kind: "luks1",
        uuid: header.uuid(),
        label: String::new(),
        cipher: header.cipher.clone(),
        key_bits: Some(8 * header.key_bytes),
        sector_size: Some(SectorSize::SMALLEST.bytes()),
        data_offset: Some(u64::from(header.payload) * UNIT),
        segments: 1,
        keyslots: keyslots.collect(),
        ..Info::default()
    }
}

fn of_luks2(header: &luks2::Header) -> Info {
    let metadata = header.metadata();
    let known = metadata.keyslots.iter().map(|(&number, slot)| Slot {
        number,
        key_bits: Some(8 * slot.key_size),
        kdf: Some(slot.kdf.describe()),
        area_offset: Some(slot.area.offset),
        area_bytes: Some(slot.area.size),
        not_used: header.not_used(number),
        passed_over: header.passed_over(number),
    });
    let others = metadata.others.iter().map(|(&number, other)| Slot {
        number,
        key_bits: None,
        kdf: None,
        area_offset: other.area.as_ref().map(|area| area.offset),
        area_bytes: other.area.as_ref().map(|area| area.size),
        not_used: Some(other.why.clone()),
        passed_over: None,
    });
    let mut keyslots: Vec<_> = known.chain(others).collect();
    keyslots.sort_by_key(|slot| slot.number);
    let openers = header.openers();
    let mut segments = metadata.current_segments().map(|(_, segment)| segment);
    let first = segments.next();
    let count = usize::from(first.is_some()) + segments.count();
    let only = first.filter(|_| count == 1);
    let of_volume = keyslots.iter().find(|slot| openers.contains(&slot.number)).or(keyslots.first());
    Info {
        kind: "luks2",
        uuid: header.uuid(),
        label: header.label(),
        cipher: metadata.segments.values().next().map_or_else(String::new, |segment| segment.encryption.clone()),
        key_bits: of_volume.and_then(|slot| slot.key_bits),
        sector_size: only.map(|segment| segment.sector_size as usize).filter(|&bytes| bytes > 0),
        data_offset: only.map(|segment| segment.offset),
        data_bytes: only.and_then(|segment| segment.size),
        segments: count,
        keyslots,
        tokens: metadata.tokens,
        ..Info::default()
    }
}

impl Info {
    fn table(&self) -> String {
        let of_segment = |n: Option<u64>| match (n, self.segments) {
            (Some(n), _) => n.to_string(),
            (None, 1) => "not said by the header".to_owned(),
            (None, segments) => format!("not shown: the data has {segments} segments"),
        };
        let len = match self.data_bytes {
            None if self.segments == 1 => "all of its file, from there to the end".to_owned(),
            len => of_segment(len),
        };
        let rows = [
            ("type", self.kind.to_owned()),
            ("UUID", plain_text(&self.uuid)),
            ("label", plain_text(&self.label)),
            ("cipher", plain_text(&self.cipher)),
            ("key", self.key_bits.map_or_else(|| NO_KEY_SIZE.to_owned(), |bits| format!("{bits} bits"))),
            ("sector size", of_segment(self.sector_size.map(|n| n as u64))),
            ("data begins at", of_segment(self.data_offset)),
            ("bytes of data", len),
            ("tokens", self.tokens.to_string()),
            ("can't be opened", self.not_opened.as_deref().map_or_else(String::new, plain_text)),
        ];
        let mut text = String::new();
        for (name, value) in rows.iter().filter(|(_, value)| !value.is_empty()) {
            // Writing to a string can't fail.
            let _ = writeln!(text, "{name:<16}{value}");
        }
        for Slot { number, kdf, not_used, passed_over, .. } in &self.keyslots {
            let not_used = not_used.as_ref().map(|why| format!("not used: {why}"));
            let said: Vec<_> = [kdf.clone(), not_used, passed_over.map(str::to_owned)].into_iter().flatten().collect();
            let _ = writeln!(text, "{:<16}{}", format!("keyslot {number}"), plain_text(&said.join("; ")));
        }
        if self.keyslots.is_empty() {
            let _ = writeln!(text, "{:<16}none: no passphrase opens it", "keyslots");
        }
        text
    }
}

/// A header's text for a terminal, without control characters.
fn plain_text(text: &str) -> String {
    text.chars().map(|char| if char.is_control() { '\u{fffd}' } else { char }).collect()
}
