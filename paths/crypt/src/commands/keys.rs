//! `pagemill crypt test-passphrase`, `add-key`, `change-key`, `remove-key`.
use std::path::{Path, PathBuf};

use clap::Args;

use super::hold::{HeaderFile, unlocked};
use super::passphrase::{NewSecretArgs, SecretArgs};
use super::{KdfArgs, LimitArgs, Said, faults, json_line, shown};
use crate::luks::{NewSlot, first_that_opens};
use crate::secret::Locked;
use crate::{Error, Luks, Store};

/// The header, and the passphrase that opens it.
#[derive(Args, Debug)]
struct HeaderArgs {
    /// The file, block device or NBD URI
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
        let file = HeaderFile::open(self.file(), may_write)?;
        let luks = file.read()?;
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

/// A passphrase that opens the volume, and a new one.
#[derive(Args, Debug)]
struct NewKeyArgs {
    #[command(flatten)]
    header: HeaderArgs,

    #[command(flatten)]
    new: NewSecretArgs,

    #[command(flatten)]
    kdf: KdfArgs,
}

/// Let another passphrase open the volume
///
/// Asks for one that opens it already, and for the new one.
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub(super) struct AddArgs {
    #[command(flatten)]
    key: NewKeyArgs,

    /// Use this keyslot [default: the first that is free]
    #[arg(long, value_name = "N")]
    slot: Option<u32>,
}

/// Replace a passphrase: the old one opens the volume no more
///
/// Asks for the old one, and for the new one. In LUKS2 the keyslot keeps its
/// number. A free keyslot is needed meanwhile: whenever this is stopped, the old
/// passphrase or the new one opens the volume.
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub(super) struct ChangeArgs {
    #[command(flatten)]
    key: NewKeyArgs,

    /// Change this keyslot [default: the one that the passphrase opens]
    #[arg(long, value_name = "N")]
    slot: Option<u32>,
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
    try_add(args).map_err(|error| error.in_file(args.key.header.file()))
}

pub(super) fn change_key(args: &ChangeArgs) -> Result<Said, Error> {
    try_change(args).map_err(|error| error.in_file(args.key.header.file()))
}

pub(super) fn remove(args: &RemoveArgs) -> Result<Said, Error> {
    try_remove(args).map_err(|error| error.in_file(args.header.file()))
}

fn try_test(args: &TestArgs) -> Result<Said, Error> {
    let HeaderArgs { image, secret, limits, .. } = &args.header;
    let (file, luks) = args.header.open(false)?;
    luks.check_openers()?;
    let passphrase = secret.get(&shown(image))?;
    let unlock = |luks: &Luks| luks.unlock(&file, &passphrase, args.slot, &limits.limits());
    let (luks, (number, _)) = unlocked(|| file.read(), unlock)?;
    Ok(args.header.said(number, &format!("keyslot {number} opens"), faults(&luks, args.header.file())))
}

/// Changes the header. `prepare` does what takes long, without the lock: it checks passphrases and derives keys. `write`
/// then writes the change under the lock. If another program has changed the header in between, both begin again; so
/// no change of another is lost, and a passphrase that was removed meanwhile permits nothing.
fn change<P, T>(
    file: &HeaderFile,
    mut prepare: impl FnMut(&Luks) -> Result<P, Error>,
    mut write: impl FnMut(&mut Luks, &dyn Store, &P) -> Result<T, Error>,
) -> Result<T, Error> {
    let read = || {
        let luks = file.read()?;
        luks.check_changeable().map(|()| luks)
    };
    loop {
        let (before, prepared) = unlocked(read, &mut prepare)?;
        let written = file.locked(true, |store| {
            let mut now = Luks::read(store)?;
            if now.is_same(&before) { write(&mut now, store, &prepared).map(Some) } else { Ok(None) }
        })?;
        if let Some(written) = written {
            return Ok(written);
        }
    }
}

fn try_add(args: &AddArgs) -> Result<Said, Error> {
    let (number, warnings) =
        with_new(&args.key, None, |luks, store, made| luks.add_slot(store, &made.key, &made.slot, args.slot))?;
    Ok(args.key.header.said(number, &format!("the new passphrase is in keyslot {number}"), warnings))
}

fn try_change(args: &ChangeArgs) -> Result<Said, Error> {
    let (number, warnings) = with_new(&args.key, args.slot, |luks, store, made| {
        luks.change_slot(store, &made.key, &made.slot, made.opened)
    })?;
    let what = format!("the new passphrase is in keyslot {number}, the old one is wiped");
    Ok(args.key.header.said(number, &what, warnings))
}

/// What it takes to write a keyslot for a new passphrase.
struct Made {
    /// The keyslot that the old passphrase opens.
    opened: u32,
    key: Locked,
    slot: NewSlot,
}

/// Asks for a passphrase that opens the volume, by keyslot `only` if it is given, and for the new one. Then makes a
/// keyslot for that, and lets `write` put it into the header. Returns its number, and warnings.
fn with_new(
    args: &NewKeyArgs,
    only: Option<u32>,
    write: impl FnMut(&mut Luks, &dyn Store, &Made) -> Result<u32, Error>,
) -> Result<(u32, Vec<String>), Error> {
    let NewKeyArgs { header, new, kdf } = args;
    let HeaderArgs { image, secret, limits, .. } = header;
    let (file, luks) = header.open(true)?;
    let choice = kdf.choice(luks.default_kdf())?;
    let warnings = mended(&luks, header.file());
    luks.check_openers()?;
    let (passphrase, mut typed) = (secret.get(&shown(image))?, None);
    let prepare = |luks: &Luks| {
        let (opened, key) = luks.unlock(&file, &passphrase, only, &limits.limits())?;
        // A wrong passphrase is refused before the new one has to be typed.
        let new = match typed.take() {
            Some(new) => new,
            None => SecretArgs::from(new.clone()).get_new(&shown(image))?,
        };
        let slot = luks.derive_slot(&key, typed.insert(new), &choice)?;
        Ok(Made { opened, key, slot })
    };
    Ok((change(&file, prepare, write)?, warnings))
}

fn try_remove(args: &RemoveArgs) -> Result<Said, Error> {
    let HeaderArgs { image, header, secret, limits, .. } = &args.header;
    let (file, luks) = args.header.open(true)?;
    let warnings = mended(&luks, args.header.file());
    let is_last = |luks: &Luks, number| luks.openers() == [number];
    let passphrase = match args.slot {
        // To give the volume up, no passphrase is needed.
        Some(number) if args.last && is_last(&luks, number) => None,
        Some(number) if is_last(&luks, number) => return Err(Error::LastKeyslot(number)),
        Some(number) => {
            luks.check_slot(number)?;
            Some(secret.get(&format!("{}, of another keyslot than {number}", shown(image)))?)
        }
        None => Some(secret.get(&shown(image))?),
    };
    let prepare = |luks: &Luks| {
        let number = match (args.slot, &passphrase) {
            (Some(number), _) if is_last(luks, number) => number,
            (Some(number), Some(passphrase)) => {
                luks.check_slot(number)?;
                let others = luks.openers().into_iter().filter(|&other| other != number);
                first_that_opens(others, |other| match luks.unlock(&file, passphrase, Some(other), &limits.limits()) {
                    Ok((_, key)) => Ok(Some(key)),
                    Err(Error::WrongPassphrase { .. }) => Ok(None),
                    Err(error) => Err(error),
                })
                .map_err(|error| error.of_passphrase(passphrase))?;
                number
            }
            (Some(number), None) => {
                let why = format!("keyslot {number} is the last one no more: another was added meanwhile");
                return Err(Error::Request(why));
            }
            (None, passphrase) => {
                luks.unlock(&file, passphrase.as_deref().unwrap_or_default(), None, &limits.limits())?.0
            }
        };
        let claims = match args.last && is_last(luks, number) {
            // Without a keyslot a server's data is lost when the server ends.
            true => Some((
                file.claim(true)?,
                header.is_some().then(|| HeaderFile::open(image, true)?.claim(true)).transpose()?,
            )),
            false => None,
        };
        Ok((number, claims))
    };
    let number =
        change(&file, prepare, |luks, store, &(number, _)| luks.remove_key(store, number, args.last).map(|()| number))?;
    Ok(args.header.said(number, &format!("keyslot {number} is wiped"), warnings))
}

/// What was wrong with a header that is about to be rewritten.
fn mended(luks: &Luks, path: &Path) -> Vec<String> {
    luks.faults().into_iter().map(|fault| format!("{}: {fault}; mended by this change", shown(path))).collect()
}
