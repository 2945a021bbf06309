//! `pagemill crypt header-backup`, `header-restore`.
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use clap::Args;

use super::alone::AloneArgs;
use super::hold::{HeaderFile, is_device};
use super::target::Target;
use super::{Said, faults, json_line, shown};
use crate::backup::{Backup, MOST};
use crate::{Error, Luks, Store};

/// Save a volume's header and its keyslots to a new file
///
/// As by cryptsetup luksHeaderBackup. A damaged header can be restored from it.
/// Whoever has it and a passphrase of that time can read the volume, even if the
/// passphrase was removed since: keep it like a key.
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub(super) struct BackupArgs {
    /// The file, block device or NBD URI
    image: PathBuf,

    /// The new file
    file: PathBuf,

    /// The file that has the header, where it is detached
    #[arg(long, value_name = "FILE")]
    header: Option<PathBuf>,

    /// Print it as a JSON object
    #[arg(long)]
    json: bool,
}

/// Put a volume's header and its keyslots back from a backup
///
/// Of header-backup or of cryptsetup luksHeaderBackup. Then only passphrases of
/// that time open the volume. Asks first. Refused while the volume is served or
/// mounted; at an NBD URI, that is not seen.
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub(super) struct RestoreArgs {
    #[command(flatten)]
    volume: AloneArgs,

    /// The backup
    file: PathBuf,

    /// Restore it even over the header of another volume, or of one whose key
    /// or layout has changed since, or where something was written over it:
    /// what is there is lost
    #[arg(long, verbatim_doc_comment)]
    other_volume: bool,
}

pub(super) fn backup(args: &BackupArgs) -> Result<Said, Error> {
    let from = args.header.as_ref().unwrap_or(&args.image);
    if args.file.symlink_metadata().is_ok() {
        let why = format!("{} is there already: name another file, or remove that one", shown(&args.file));
        return Err(Error::Request(why));
    }
    let taken = HeaderFile::open(from, false)?.locked(false, |store| Backup::take(Luks::read(store)?, store));
    let backup = taken.map_err(|error| error.in_file(from))?;
    let bytes = backup.bytes();
    let mut target = Target::create(&args.file, bytes.len() as u64)?;
    let written = target.file.write_at(bytes, 0).and_then(|()| target.file.sync());
    written.map_err(|error| Error::io(format!("writing {}", shown(&args.file)), error))?;
    target.publish()?;
    target.keep();
    let (image, file, len) = (shown(&args.image), shown(&args.file), bytes.len());
    let out = match args.json {
        true => json_line(&serde_json::json!({ "image": image, "backup": file, "bytes": len })),
        false => format!("{image}: its header and keyslots, {len} bytes, are in {file}\n"),
    };
    Ok(Said { out, warnings: faults(backup.header(), from) })
}

pub(super) fn restore(args: &RestoreArgs) -> Result<Said, Error> {
    let (image, is_detached) = (&args.volume.image, args.volume.header.is_some());
    let backup = read(&args.file).map_err(|error| match error {
        Error::NoHeader { .. } => Error::Request(format!(
            "{}: no LUKS header is there: name a file that header-backup or cryptsetup luksHeaderBackup has made",
            shown(&args.file)
        )),
        error => error.in_file(&args.file),
    })?;
    let header = backup.header();
    let (file, data_len, _claim) = args.volume.open()?;
    header.geometry(data_len, is_detached).map_err(|error| error.in_file(image))?;
    let (has, needs) =
        (file.size().map_err(|error| Error::io(shown(args.volume.file()), error))?, backup.bytes().len());
    if has < needs as u64 {
        let why = format!("{} has {has} bytes, and the backup {needs}: lengthen it first", shown(args.volume.file()));
        return Err(Error::Request(why));
    }
    let find = |store: &dyn Store| match Luks::read(store) {
        Ok(present) => check_same(args, header, &present).map(|()| Some(present)),
        Err(error @ Error::Io { .. }) => Err(error),
        Err(error @ Error::Unsupported(_)) if !args.other_volume => Err(error),
        Err(_) => Ok(None),
    };
    let what = match file.locked(false, find).map_err(|error| error.in_file(args.volume.file()))? {
        Some(_) => "only passphrases of the backup will open it",
        None => "no intact LUKS header is there, and what is there will be overwritten",
    };
    args.volume.confirm(&format!("{}: {what}", shown(args.volume.file())))?;
    file.locked(true, |store| backup.restore(store, find(store)?.as_ref()))
        .map_err(|error| error.in_file(args.volume.file()))?;
    let keyslots = header.openers();
    let what = match keyslots.len() {
        1 => "the header is restored, with 1 keyslot".to_owned(),
        count => format!("the header is restored, with {count} keyslots"),
    };
    let out = args.volume.said(&what, serde_json::json!({ "keyslots": keyslots }));
    Ok(Said { out, warnings: Vec::new() })
}

fn read(path: &Path) -> Result<Backup, Error> {
    // Refuses what is neither a file nor a device.
    is_device(path)?;
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(MOST).read_to_end(&mut bytes));
    read.map_err(|error| Error::io(shown(path), error))?;
    Backup::read(bytes)
}

/// Refuses the backup of another volume, and to write over what has taken the volume's place, unless told otherwise.
fn check_same(args: &RestoreArgs, backup: &Luks, present: &Luks) -> Result<(), Error> {
    if args.other_volume {
        return Ok(());
    }
    if present.is_of_same_volume(backup) {
        let or_say = |why| format!("{why}; if the backup shall take its place, say --other-volume");
        return present.check_not_written_over().map_err(|error| match error {
            Error::Overwritten(why) => Error::Overwritten(or_say(why)),
            Error::TwoVolumes(why) => Error::TwoVolumes(or_say(why)),
            error => error,
        });
    }
    let (here, there) = (present.uuid(), backup.uuid());
    let differs = match here == there {
        true => "the backup is of the same volume, but its key or its layout has changed since".to_owned(),
        false => format!("the backup is of volume {there:?}, and there is {here:?}"),
    };
    let why = format!(
        "{}: {differs}: its data would be lost; name another backup, or say --other-volume",
        shown(args.volume.file())
    );
    Err(Error::Request(why))
}
