//! Who uses an image at a time. There are two locks, so that keys can be changed beside a server:
//!
//! - The *metadata lock*, while a header is read or changed, is `cryptsetup`'s own: `flock` on an image file, and for a
//!   block device on `/run/cryptsetup/L_major:minor`.
//! - The *claim*, as long as the data is used (`format`, `serve`, `mount`): a block device is opened with `O_EXCL`, which the
//!   kernel refuses where the device is mounted or claimed; a file is locked by its open file description (fcntl(2),
//!   `F_OFD_SETLK`), shared where it is only read.
//!
//! A loop device and the file behind it are the same bytes: whoever claims one claims the other (I1).
use std::fs::{self, File, TryLockError};
use std::io;
use std::ops::Deref;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{major, minor};

use super::{folder, shown};
use crate::Error;

/// Where `cryptsetup` locks devices' metadata.
const LOCKS: &str = "/run/cryptsetup";

/// An image that is open for its header, with the metadata lock.
pub(super) struct HeaderFile {
    file: File,
    _lock: MetadataLock,
}

impl Deref for HeaderFile {
    type Target = File;

    fn deref(&self) -> &File {
        &self.file
    }
}

/// Opens an image that is there for its header, and locks its metadata: for this program alone if it is to be changed.
pub(super) fn open_header(path: &Path, may_write: bool) -> Result<HeaderFile, Error> {
    has_blocks(path)?;
    let file = File::options().read(true).write(may_write).open(path).map_err(|error| Error::io(shown(path), error))?;
    let lock = MetadataLock::take(&file, path, may_write)?;
    Ok(HeaderFile { file, _lock: lock })
}

/// The metadata lock; gone when it is dropped.
pub(super) struct MetadataLock {
    file: File,
    /// A device's lock has a file of its own.
    name: Option<PathBuf>,
}

impl MetadataLock {
    /// For the image that `file` is, shared unless `may_write`.
    pub(super) fn take(file: &File, path: &Path, may_write: bool) -> Result<Self, Error> {
        let there = file.metadata().map_err(|error| Error::io(shown(path), error))?;
        let name = format!("{LOCKS}/L_{}:{}", major(there.rdev()), minor(there.rdev()));
        // Who may not lock there locks the device's node.
        while there.file_type().is_block_device()
            && let Ok(lock) = lock_file(Path::new(&name))
        {
            flock(&lock, path, may_write)?;
            // Whoever had it before may have taken its name away.
            if is_named(&lock, Path::new(&name)) {
                return Ok(Self { file: lock, name: Some(name.into()) });
            }
        }
        let file = file.try_clone().map_err(|error| Error::io(shown(path), error))?;
        flock(&file, path, may_write)?;
        Ok(Self { file, name: None })
    }
}

impl Drop for MetadataLock {
    fn drop(&mut self) {
        // A name goes while nobody else has the lock; whoever waits for it looks whether it is named.
        if let Some(name) = &self.name
            && self.file.try_lock().is_ok()
            && is_named(&self.file, name)
        {
            let _ = fs::remove_file(name);
        }
        // The image stays open.
        let _ = self.file.unlock();
    }
}

fn lock_file(name: &Path) -> io::Result<File> {
    // It is there already, or the next step says what is wrong.
    let _ = fs::DirBuilder::new().mode(0o700).create(LOCKS);
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    options.custom_flags(libc::O_NOFOLLOW).open(name)
}

fn flock(file: &File, path: &Path, may_write: bool) -> Result<(), Error> {
    match if may_write { file.try_lock() } else { file.try_lock_shared() } {
        Ok(()) => Ok(()),
        Err(TryLockError::WouldBlock) => Err(Error::Busy(shown(path))),
        Err(TryLockError::Error(error)) => Err(Error::io(format!("locking {}", shown(path)), error)),
    }
}

/// Refuses a header in the same file as the data: what is written to one of them would be written over the other.
pub(super) fn refuse_one_file(data: &Path, header: &Path) -> Result<(), Error> {
    let is_one = match (data.metadata(), header.metadata()) {
        (Ok(data), Ok(header)) if data.file_type().is_block_device() => {
            header.file_type().is_block_device() && data.rdev() == header.rdev()
        }
        (Ok(data), Ok(header)) => (data.dev(), data.ino()) == (header.dev(), header.ino()),
        // Both are to be made.
        (Err(_), Err(_)) => {
            let place = |path| Some((fs::canonicalize(folder(path)).ok()?, path.file_name()?.to_owned()));
            place(data).is_some_and(|data| Some(data) == place(header))
        }
        _ => false,
    };
    if !is_one {
        return Ok(());
    }
    let (data, header) = (shown(data), shown(header));
    let why = format!(
        "the data ({data}) and its header ({header}) are the same file: name another one with --header, or leave --header out"
    );
    Err(Error::Request(why))
}

/// Whether `path` is the name of `file`.
fn is_named(file: &File, path: &Path) -> bool {
    let inode = |there: io::Result<fs::Metadata>| there.map(|there| (there.dev(), there.ino())).ok();
    inode(file.metadata()).is_some_and(|own| inode(fs::metadata(path)) == Some(own))
}

/// What keeps others from an image's data; gone when it is dropped.
#[derive(Debug, Default)]
pub struct Claim {
    #[expect(dead_code, reason = "they are kept locked")]
    files: Vec<LockedFile>,
    #[expect(dead_code, reason = "they are kept open")]
    devices: Vec<File>,
}

impl Claim {
    /// Of a file that is open, and of the loop devices over it.
    pub(super) fn of_file(file: &File, path: &Path, may_write: bool) -> Result<Self, Error> {
        let files = vec![LockedFile::new(file, path, may_write)?];
        Ok(Self { files, devices: loops_over(file, None, may_write)? })
    }

    /// Of a block device that is open for this program alone: of what is behind it, where it is a loop device.
    fn of_device(device: u64, path: &Path, may_write: bool) -> Result<Self, Error> {
        let Some(behind) = behind(device) else { return Ok(Self::default()) };
        match claimed_behind(&behind, path, may_write)? {
            Some(file) => Ok(Self { devices: loops_over(&file.0, Some(device), may_write)?, files: vec![file] }),
            None => Ok(Self::default()),
        }
    }
}

/// Opens an image that is there for its data, and claims it: shared if it is a file that is only read.
pub(super) fn open_claimed(path: &Path, may_write: bool) -> Result<(File, Claim), Error> {
    let is_device = has_blocks(path)?;
    let file = open(path, may_write, is_device)?;
    let there = file.metadata().map_err(|error| Error::io(shown(path), error))?;
    let claim = match is_device {
        true => Claim::of_device(there.rdev(), path, may_write)?,
        false => Claim::of_file(&file, path, may_write)?,
    };
    Ok((file, claim))
}

/// Opens an image; a block device for this program alone.
fn open(path: &Path, may_write: bool, is_device: bool) -> Result<File, Error> {
    let mut options = File::options();
    options.read(true).write(may_write).custom_flags(if is_device { libc::O_EXCL } else { 0 });
    options.open(path).map_err(|error| match error.raw_os_error() {
        Some(libc::EBUSY) => Error::Held(shown(path)),
        _ => Error::io(shown(path), error),
    })
}

/// A file that is locked by its open file description. A process that is just being started has that too, until it is another
/// program: so it is unlocked in so many words.
#[derive(Debug)]
struct LockedFile(File);

impl LockedFile {
    fn new(file: &File, path: &Path, may_write: bool) -> Result<Self, Error> {
        let file = file.try_clone().map_err(|error| Error::io(shown(path), error))?;
        match lock_description(&file, if may_write { libc::F_WRLCK } else { libc::F_RDLCK }) {
            Ok(()) => Ok(Self(file)),
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {
                Err(Error::Busy(shown(path)))
            }
            Err(error) => Err(Error::io(format!("locking {}", shown(path)), error)),
        }
    }
}

impl Drop for LockedFile {
    fn drop(&mut self) {
        let _ = lock_description(&self.0, libc::F_UNLCK);
    }
}

fn lock_description(file: &File, kind: libc::c_int) -> io::Result<()> {
    // All of it, however long it becomes.
    let range = libc::flock { l_type: kind as _, l_whence: libc::SEEK_SET as _, l_start: 0, l_len: 0, l_pid: 0 };
    // SAFETY: the descriptor is open, and the call reads the structure, which lives.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &range) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The file behind a loop device or its partition, by the name that it was attached by.
fn behind(device: u64) -> Option<PathBuf> {
    let folder = format!("/sys/dev/block/{}:{}", major(device), minor(device));
    let read = |place| fs::read_to_string(format!("{folder}/{place}")).ok();
    let name = read("loop/backing_file").or_else(|| read("../loop/backing_file"))?;
    Some(name.trim_end_matches('\n').into())
}

/// Claims what is behind a loop device; none if it is out of reach, and so others cannot name it either.
fn claimed_behind(behind: &Path, device: &Path, may_write: bool) -> Result<Option<LockedFile>, Error> {
    let named = |path: String| format!("{path} (behind {})", shown(device));
    let file = has_blocks(behind).and_then(|is_device| open(behind, may_write, is_device));
    match file.and_then(|file| LockedFile::new(&file, behind, may_write)) {
        Ok(file) => Ok(Some(file)),
        Err(Error::Busy(path)) => Err(Error::Busy(named(path))),
        Err(Error::Held(path)) => Err(Error::Held(named(path))),
        Err(_) => Ok(None),
    }
}

/// Claims the loop devices that have `file` behind them, but for the one that is claimed already. Where `file` is only read,
/// they may be in use.
fn loops_over(file: &File, claimed: Option<u64>, may_write: bool) -> Result<Vec<File>, Error> {
    let mut loops = Vec::new();
    let Some(devices) = fs::read_dir("/sys/block").ok().filter(|_| may_write) else { return Ok(loops) };
    for device in devices.flatten() {
        let Ok(behind) = fs::read_to_string(device.path().join("loop/backing_file")) else { continue };
        let node = Path::new("/dev").join(device.file_name());
        let is_claimed = fs::metadata(&node).is_ok_and(|there| Some(there.rdev()) == claimed);
        if is_claimed || !is_named(file, Path::new(behind.trim_end_matches('\n'))) {
            continue;
        }
        match File::options().read(true).custom_flags(libc::O_EXCL).open(&node) {
            Ok(node) => loops.push(node),
            // Somebody who may do more than this program has attached it.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EBUSY | libc::EACCES | libc::EPERM)) => {
                return Err(Error::Held(format!("the loop device {}, which has this file behind it,", shown(&node))));
            }
            // Detached meanwhile, or without a name here.
            Err(_) => {}
        }
    }
    Ok(loops)
}

/// Whether an image is a block device; refused if it is neither that nor a file. Before it is opened: opening a pipe would wait
/// for its other end.
fn has_blocks(path: &Path) -> Result<bool, Error> {
    let kind = path.metadata().map_err(|error| Error::io(shown(path), error))?.file_type();
    if kind.is_file() || kind.is_block_device() {
        return Ok(kind.is_block_device());
    }
    let what = if kind.is_dir() { "a directory" } else { "a pipe, socket or character device" };
    Err(Error::Request(format!("{} is {what}: name a file or a block device", shown(path))))
}
