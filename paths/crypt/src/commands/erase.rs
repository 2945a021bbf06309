//! `pagemill crypt erase`.
use clap::Args;

use super::alone::AloneArgs;
use super::{Said, shown};
use crate::{Error, Luks};

/// Destroy all keyslots: no passphrase opens the volume any more
///
/// Asks first, and needs no passphrase. Without a backup of the header and a
/// passphrase of that time, the data is lost; destroy such backups too. Refused
/// while the volume is served or mounted; at an NBD URI, that is not seen.
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub(super) struct EraseArgs {
    #[command(flatten)]
    volume: AloneArgs,
}

pub(super) fn run(args: &EraseArgs) -> Result<Said, Error> {
    erase(&args.volume).map_err(|error| error.in_file(args.volume.file()))
}

fn erase(args: &AloneArgs) -> Result<Said, Error> {
    let (file, _, _claim) = args.open()?;
    file.read()?.check_changeable()?;
    args.confirm(&format!("{}: all keyslots will be destroyed, and no passphrase will open it", shown(&args.image)))?;
    file.locked(true, |store| {
        // Keys may have changed while the user was asked.
        Luks::read(store)?.erase(store)
    })?;
    let out = args.said("all keyslots are wiped", serde_json::json!({ "keyslots": [] }));
    Ok(Said { out, warnings: Vec::new() })
}
