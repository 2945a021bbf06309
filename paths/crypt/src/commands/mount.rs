//! `pagemill crypt mount`.
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use clap::Args;

use super::memory::MemoryArgs;
use super::open::{OpenArgs, Opened};
use super::signals::signals;
use super::{Said, fitting_block, need_folder, shown};
use crate::Error;
use crate::mount::Mounted;
use crate::serve::{DataPath, Disk, VolumeFile};

/// Offer a volume as a file, through FUSE, until it is unmounted
///
/// It takes /dev/fuse, and root or fusermount3. As root, a loop device and a
/// file system work on it; otherwise nobody but this user may open it, not
/// even root:
///   mkfs.ext4 FILE && mount -o loop FILE /mnt
/// It ends by `umount FILE` once nobody has the file open; or by SIGTERM or
/// SIGINT, and who has it open then keeps it until they close it.
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub(super) struct MountArgs {
    /// The file or block device with the data, or an NBD server's export:
    /// nbd://HOST:PORT/EXPORT or nbd+unix:///EXPORT?socket=PATH, and with
    /// nbds by TLS: ?tls-certificates=FOLDER has ca-cert.pem, and may have
    /// client-cert.pem and client-key.pem
    #[arg(verbatim_doc_comment)]
    image: PathBuf,

    #[command(flatten)]
    open: OpenArgs,

    /// Where the file is to be: an empty file, or a name that is free
    file: PathBuf,

    /// Refuse to write
    #[arg(long)]
    read_only: bool,

    #[command(flatten, next_help_heading = "Memory and disk")]
    memory: MemoryArgs,
}

pub(super) fn run(args: &MountArgs, notice: &mut dyn FnMut(&str)) -> Result<Said, Error> {
    // Before the passphrase is asked for.
    let memory = args.memory.memory()?;
    let place = Place::new(&args.file)?;
    let Opened { data, volume, warnings, claim: _claim } = args.open.of(&args.image).open(!args.read_only)?;
    warnings.iter().for_each(|warning| notice(warning));

    let geometry = *volume.geometry();
    let disk = Disk::new(data, geometry.offset, geometry.sector_size.bytes(), args.memory.buffered);
    let sector = geometry.sector_size.bytes();
    if fitting_block(&disk, geometry.offset)? > sector {
        let why =
            format!("the far end takes no sector of {sector} bytes alone: use crypt serve, whose clients may know");
        return Err(Error::Request(why));
    }
    let file = VolumeFile::new(DataPath { volume, disk, memory });
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let stop = signals().map_err(|error| Error::io("waiting for signals", error))?;
    let mounting = |source| Error::Mount { at: place.to_string(), source };
    let mut mounted = Mounted::new(file, &args.file, args.read_only, threads).map_err(mounting)?;
    notice(&format!("the volume is the file {place}, {} bytes; end it with: umount {place}", geometry.len));

    let mut unmounter = mounted.unmounter();
    let failed = Mutex::new(None);
    let served = std::thread::scope(|scope| {
        let (mut stop, over) = (stop.try_clone()?, &stop);
        let failed = &failed;
        scope.spawn(move || {
            // A byte means a signal; the end means that the mount is over.
            if stop.read(&mut [0]).is_ok_and(|bytes| bytes > 0)
                && let Err(error) = unmounter.unmount()
                && let Ok(mut failed) = failed.lock()
            {
                *failed = Some(error);
            }
        });
        let served = mounted.serve();
        over.shutdown(std::net::Shutdown::Both)?;
        served
    });
    served.map_err(|error| Error::io(format!("serving {place}"), error))?;
    match failed.into_inner() {
        Ok(Some(error)) => Err(Error::io(format!("unmounting {place}"), error)),
        _ => Ok(Said::default()),
    }
}

/// The file that the mount hides. It is removed at the end, if it was made for the mount.
struct Place {
    path: PathBuf,
    was_made: bool,
}

impl Place {
    fn new(path: &Path) -> Result<Self, Error> {
        need_folder(path)?;
        let was_made = match fs::symlink_metadata(path) {
            Ok(there) if there.is_file() && there.len() == 0 => false,
            Ok(there) if there.is_file() => {
                let why = format!("{}: not empty: a mount would hide what is in it; name another file", shown(path));
                return Err(Error::Request(why));
            }
            Ok(_) => {
                let why = format!("{}: not a file: name an empty one, or a name that is free", shown(path));
                return Err(Error::Request(why));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                File::create_new(path).map_err(|error| Error::io(shown(path), error))?;
                true
            }
            Err(error) if error.raw_os_error() == Some(libc::ENOTCONN) => {
                let why = format!(
                    "{0}: a mount whose process is gone; end it with: umount {0} (without root: fusermount3 -u {0})",
                    shown(path)
                );
                return Err(Error::Request(why));
            }
            Err(error) => return Err(Error::io(shown(path), error)),
        };
        Ok(Self { path: path.to_owned(), was_made })
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.path.display().fmt(f)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // A file that somebody has changed since stays.
        if self.was_made && fs::symlink_metadata(&self.path).is_ok_and(|there| there.is_file() && there.len() == 0) {
            let _ = fs::remove_file(&self.path);
        }
    }
}
