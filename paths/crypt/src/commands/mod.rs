//! `pagemill crypt`: the subcommands that make volumes, manage their keys, and serve or mount them. Each has its
//! arguments and a `run`.
//!
//! A subcommand returns its output ([`Said`]), or passes messages on while it runs; the program prints them. A header
//! is locked while it is read and while it is written, so two changes never overlap. Data is claimed as long as the
//! volume is open; keys can be changed meanwhile.
mod alone;
mod backup;
mod erase;
mod exports;
mod format;
mod hold;
mod info;
mod keys;
mod listen;
mod log;
mod memory;
mod mount;
mod open;
mod passphrase;
mod resize;
mod serve;
mod signals;
mod signatures;
mod systemd;
mod target;

use std::path::Path;

use clap::{Args, Subcommand};

use crate::kdf::{KdfChoice, KdfKind, Limits};
use crate::secret::lock_failure;
use crate::serve::{Disk, is_uri};
use crate::{Error, Hash, Luks};
pub use hold::Claim;
pub use open::{OpenArgs, Opened};

/// Make encrypted volumes, look after their keys, and serve them
///
/// LUKS2 and LUKS1 volumes as cryptsetup makes them, in files and on block
/// devices, with aes-xts-plain64. Nothing needs to be installed, and no root,
/// but for mount: it takes /dev/fuse, and root or fusermount3.
#[derive(Args, Debug)]
#[command(verbatim_doc_comment, after_help = AFTER_HELP)]
pub struct CryptArgs {
    #[command(subcommand)]
    command: Command,
}

const AFTER_HELP: &str = "\
A passphrase comes from the terminal, a file or a descriptor; never from an
argument, which every process on the machine could read.

Examples:
  pagemill crypt format disk.img --size 1G
  pagemill crypt info disk.img
  pagemill crypt add-key disk.img --new-key-file backup.key
  pagemill crypt test-passphrase disk.img --key-file backup.key
  pagemill crypt serve disk.img --unix /tmp/disk.sock
  pagemill crypt mount disk.img plain
  pagemill crypt change-key disk.img
  pagemill crypt remove-key disk.img --slot 1
  pagemill crypt resize disk.img --size 2G
  pagemill crypt header-backup disk.img disk.header
  pagemill crypt erase disk.img

Exit codes:
  0  done
  1  failed: standard error says what, why and what to do next
  2  the command line makes no sense
  3  no keyslot opens with this passphrase";

#[derive(Debug, Subcommand)]
enum Command {
    Format(format::FormatArgs),
    Info(info::InfoArgs),
    TestPassphrase(keys::TestArgs),
    AddKey(keys::AddArgs),
    ChangeKey(keys::ChangeArgs),
    RemoveKey(keys::RemoveArgs),
    Erase(erase::EraseArgs),
    HeaderBackup(backup::BackupArgs),
    HeaderRestore(backup::RestoreArgs),
    Resize(resize::ResizeArgs),
    Serve(Box<serve::ServeArgs>),
    Mount(Box<mount::MountArgs>),
}

impl CryptArgs {
    /// The subcommand's name.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self.command {
            Command::Format(_) => "format",
            Command::Info(_) => "info",
            Command::TestPassphrase(_) => "test-passphrase",
            Command::AddKey(_) => "add-key",
            Command::ChangeKey(_) => "change-key",
            Command::RemoveKey(_) => "remove-key",
            Command::Erase(_) => "erase",
            Command::HeaderBackup(_) => "header-backup",
            Command::HeaderRestore(_) => "header-restore",
            Command::Resize(_) => "resize",
            Command::Serve(_) => "serve",
            Command::Mount(_) => "mount",
        }
    }
}

/// A subcommand's output.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Said {
    /// For standard output; ends with a line feed unless it is empty.
    pub out: String,
    /// For standard error, a line each.
    pub warnings: Vec<String>,
}

/// Runs a subcommand. Messages while it runs go to `notice`, a line each.
///
/// # Errors
/// The error that stopped it; [`Error::next_step`] says what to do.
pub fn run(args: &CryptArgs, notice: &mut dyn FnMut(&str)) -> Result<Said, Error> {
    let mut said = match &args.command {
        Command::Format(args) => format::run(args),
        Command::Info(args) => info::run(args),
        Command::TestPassphrase(args) => keys::test(args),
        Command::AddKey(args) => keys::add(args),
        Command::ChangeKey(args) => keys::change_key(args),
        Command::RemoveKey(args) => keys::remove(args),
        Command::Erase(args) => erase::run(args),
        Command::HeaderBackup(args) => backup::backup(args),
        Command::HeaderRestore(args) => backup::restore(args),
        Command::Resize(args) => resize::run(args),
        Command::Serve(args) => serve::run(args),
        Command::Mount(args) => mount::run(args, notice),
    }?;
    // A server has logged it.
    if !matches!(args.command, Command::Serve(_))
        && let Some(why) = lock_failure()
    {
        said.warnings.push(format!("keys may have reached the swap space: memory could not be locked: {why}"));
    }
    Ok(said)
}

/// Limits on the cost of opening a header.
#[derive(Args, Clone, Copy, Debug)]
pub struct LimitArgs {
    /// The most memory, in MiB, that a header may ask for to make a key
    #[arg(long, value_name = "MIB", default_value_t = Limits::default().memory_kib >> 10)]
    max_kdf_memory: u64,

    /// The most work that a header may ask for to make a key
    ///
    /// In iterations of pbkdf2, or passes of argon2 times KiB: each takes a
    /// microsecond or less.
    #[arg(long, value_name = "N", default_value_t = Limits::default().work, verbatim_doc_comment)]
    max_kdf_work: u64,
}

impl LimitArgs {
    pub(crate) fn limits(self) -> Limits {
        Limits { memory_kib: self.max_kdf_memory.saturating_mul(1024), work: self.max_kdf_work }
    }
}

/// The cost of a new keyslot.
#[derive(Args, Clone, Debug)]
struct KdfArgs {
    /// How the passphrase becomes a key [default: argon2id; LUKS1: pbkdf2]
    #[arg(long, value_enum)]
    kdf: Option<KdfKind>,

    /// The hash of pbkdf2, the digest and the splitter
    #[arg(long, default_value = "sha256", value_parser = hash)]
    hash: Hash,

    /// Milliseconds that trying a passphrase is to take on this machine
    #[arg(long, value_name = "MS", default_value_t = 2000)]
    iter_time: u64,

    /// Iterations of pbkdf2, or passes of argon2, in place of --iter-time
    #[arg(long, value_name = "N")]
    kdf_iterations: Option<u32>,

    /// Memory of argon2 in KiB: the most, or all with --kdf-iterations
    #[arg(long, value_name = "KIB")]
    kdf_memory: Option<u32>,

    /// Lanes of argon2 [default: as many as processors, up to 4]
    #[arg(long, value_name = "N")]
    kdf_lanes: Option<u32>,
}

impl KdfArgs {
    /// The choice that the options make. Options that would have no effect are refused.
    fn choice(&self, default: KdfKind) -> Result<KdfChoice, Error> {
        let kind = self.kdf.unwrap_or(default);
        let of_argon2 = [("--kdf-memory", self.kdf_memory), ("--kdf-lanes", self.kdf_lanes)];
        if kind == KdfKind::Pbkdf2
            && let Some((option, _)) = of_argon2.iter().find(|(_, value)| value.is_some())
        {
            let why = format!(
                "{option} is for argon2, and the keyslot is to be made with pbkdf2: leave it out, or in LUKS2 say --kdf \
                 argon2id"
            );
            return Err(Error::Request(why));
        }
        Ok(KdfChoice {
            kind,
            hash: self.hash,
            target: std::time::Duration::from_millis(self.iter_time),
            iterations: self.kdf_iterations,
            memory_kib: self.kdf_memory,
            lanes: self.kdf_lanes,
        })
    }
}

/// What is wrong with the header in `path`, although it can be used, and what repairs it; a line each.
fn faults(luks: &Luks, path: &Path) -> Vec<String> {
    let next = match luks.check_changeable() {
        Ok(()) => "the next change of a key mends it",
        Err(error) => error.next_step().unwrap_or_default(),
    };
    luks.faults().into_iter().map(|fault| format!("{}: {fault}; {next}", shown(path))).collect()
}

/// The least bytes of a request: a sector, or a far end's larger block.
fn fitting_block(disk: &Disk, offset: u64) -> Result<usize, Error> {
    let block = disk.block();
    if offset.is_multiple_of(block as u64) {
        return Ok(block);
    }
    let why = format!(
        "the far end takes blocks of {block} bytes, and the data begins at byte {offset}, within one: serve the far end \
         with smaller blocks"
    );
    Err(Error::Request(why))
}

/// Refuses the name of a far end, where only a file or a device will do.
fn refuse_uri(path: &Path) -> Result<(), Error> {
    match path.to_str() {
        Some(text) if is_uri(text) => Err(Error::Request(format!(
            "{text}: only serve and mount take an NBD server's export: name the file or the device that is behind it, or \
             the file of its detached header"
        ))),
        _ => Ok(()),
    }
}

/// A file's folder.
fn folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Refuses the name of a new file in a folder that does not exist.
fn need_folder(path: &Path) -> Result<(), Error> {
    match folder(path).try_exists() {
        Ok(false) => {
            let folder = shown(folder(path));
            Err(Error::Request(format!("the folder {folder} does not exist: make it first, or name another")))
        }
        _ => Ok(()),
    }
}

/// An object as a line of JSON. Its names are part of the program's interface.
fn json_line(object: &serde_json::Value) -> String {
    format!("{object}\n")
}

fn hash(name: &str) -> Result<Hash, String> {
    Hash::named(name).map_err(|error| error.to_string())
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}
