//! `pagemill crypt test-passphrase`, `add-key`, `remove-key`.
use std::path::{Path, PathBuf};

use clap::Args;

use super::hold::{HeaderFile, open_header};
use super::passphrase::{NewSecretArgs, SecretArgs};
use super::{KdfArgs, LimitArgs, Said, faults, json_line, shown};
use crate::luks::first_that_opens;
use crate::{Error, Luks};

/// The header, and the passphrase that opens it.
#[derive(Args, Debug)]
struct HeaderArgs {
    /// The file or block device
    image: PathBuf,

    /// The file that has the header, where it is detached
    #[arg(long, value_name = "FILE")]
    header: Option<PathBuf>,

    #[command(flatten)]
    secret: SecretArgs,

    #[command(flatten)]
    limits: LimitArgs,

    /// Print it as a JSON object
    #[arg(long)]
    json: bool,
}

impl HeaderArgs {
    /// The file with the header.
    fn file(&self) -> &Path {
        self.header.as_ref().unwrap_or(&self.image)
    }

    /// Errors come before the user has to type a passphrase.
    fn open(&self, may_write: bool) -> Result<(HeaderFile, Luks), Error> {
        let file = open_header(self.file(), may_write)?;
        let luks = Luks::read(&*file)?;
        if may_write {
            luks.check_changeable()?;
        }
        Ok((file, luks))
    }

    fn said(&self, keyslot: u32, what: &str, warnings: Vec<String>) -> Said {
        let out = match self.json {
            true => json_line(&serde_json::json!({ "image": shown(&self.image), "keyslot": keyslot })),
            false => format!("{}: {what}\n", shown(&self.image)),
        };
        Said { out, warnings }
    }
}

/// Say whether a passphrase opens the volume
#[derive(Args, Debug)]
pub(super) struct TestArgs {
    #[command(flatten)]
    header: HeaderArgs,

    /// Try this keyslot alone
    #[arg(long, value_name = "N")]
    slot: Option<u32>,
}

/// Let another passphrase open the volume
///
/// Asks for one that opens it already, and for the new one.
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub(super) struct AddArgs {
    #[command(flatten)]
    header: HeaderArgs,

    #[command(flatten)]
    new: NewSecretArgs,

    /// Use this keyslot [default: the first that is free]
    #[arg(long, value_name = "N")]
    slot: Option<u32>,

    #[command(flatten)]
    kdf: KdfArgs,
}

/// Wipe a keyslot: its passphrase opens the volume no more
///
/// Without --slot, the keyslot that the passphrase opens. With --slot N, keyslot
/// N; the passphrase then has to open another one, so that nobody locks himself
/// out. The last keyslot goes with --last alone: without a keyslot, and without a
/// backup of the header, the data is lost.
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub(super) struct RemoveArgs {
    #[command(flatten)]
    header: HeaderArgs,

    /// Remove this keyslot
    #[arg(long, value_name = "N")]
    slot: Option<u32>,

    /// Remove it even if it is the last one
    #[arg(long)]
    last: bool,
}

pub(super) fn test(args: &TestArgs) -> Result<Said, Error> {
    try_test(args).map_err(|error| error.in_file(args.header.file()))
}

pub(super) fn add(args: &AddArgs) -> Result<Said, Error> {
    try_add(args).map_err(|error| error.in_file(args.header.file()))
}

pub(super) fn remove(args: &RemoveArgs) -> Result<Said, Error> {
    try_remove(args).map_err(|error| error.in_file(args.header.file()))
}

fn try_test(args: &TestArgs) -> Result<Said, Error> {
    let HeaderArgs { image, secret, limits, .. } = &args.header;
    let (file, luks) = args.header.open(false)?;
    luks.check_openers()?;
    let (number, _) = luks.unlock(&*file, &secret.get(&shown(image))?, args.slot, &limits.limits())?;
    Ok(args.header.said(number, &format!("keyslot {number} opens"), faults(&luks, args.header.file())))
}

fn try_add(args: &AddArgs) -> Result<Said, Error> {
    let HeaderArgs { image, secret, limits, .. } = &args.header;
    let (file, mut luks) = args.header.open(true)?;
    let choice = args.kdf.choice(luks.default_kdf())?;
    let warnings = mended(&luks, args.header.file());
    luks.check_openers()?;
    let (_, key) = luks.unlock(&*file, &secret.get(&shown(image))?, None, &limits.limits())?;
    let new = SecretArgs::from(args.new.clone()).get_new(&shown(image))?;
    let number = luks.add_key(&*file, &key, &new, &choice, args.slot)?;
    Ok(args.header.said(number, &format!("the new passphrase is in keyslot {number}"), warnings))
}

fn try_remove(args: &RemoveArgs) -> Result<Said, Error> {
    let HeaderArgs { image, secret, limits, .. } = &args.header;
    let (file, mut luks) = args.header.open(true)?;
    let warnings = mended(&luks, args.header.file());
    let number = match args.slot {
        // To give the volume up, no passphrase is needed.
        Some(number) if args.last && luks.openers() == [number] => number,
        Some(number) if luks.openers() == [number] => return Err(Error::LastKeyslot(number)),
        Some(number) => {
            luks.check_slot(number)?;
            let passphrase = secret.get(&format!("{}, of another keyslot than {number}", shown(image)))?;
            let others = luks.openers().into_iter().filter(|&other| other != number);
            first_that_opens(others, |other| match luks.unlock(&*file, &passphrase, Some(other), &limits.limits()) {
                Ok((_, key)) => Ok(Some(key)),
                Err(Error::WrongPassphrase { .. }) => Ok(None),
                Err(error) => Err(error),
            })
            .map_err(|error| error.of_passphrase(&passphrase))?;
            number
        }
        None => luks.unlock(&*file, &secret.get(&shown(image))?, None, &limits.limits())?.0,
    };
    luks.remove_key(&*file, number, args.last)?;
    Ok(args.header.said(number, &format!("keyslot {number} is wiped"), warnings))
}

/// What was wrong with a header that is about to be rewritten.
fn mended(luks: &Luks, path: &Path) -> Vec<String> {
    luks.faults().into_iter().map(|fault| format!("{}: {fault}; mended by this change", shown(path))).collect()
}
