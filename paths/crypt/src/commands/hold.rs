//! Locks on images. There are two, so that keys can be changed while a server uses the data:
//!
//! - The *metadata lock* is `cryptsetup`'s: `flock` on an image file, and for a block device on
//!   `/run/cryptsetup/L_major:minor`; shared while a header or key material is read, exclusive while they are written.
//!   A program that finds it taken waits, as `cryptsetup` does, and says so. So it is never held while a user is asked for a
//!   passphrase or a key is derived (I2); only `format`, which overwrites the header, holds it from end to end.
//! - The *claim* is held as long as the data is used (`format`, `serve`, `mount`). A block device is opened with
//!   `O_EXCL`, which the kernel refuses if the device is mounted or claimed. A file is locked by its open file
//!   description (fcntl(2), `F_OFD_SETLK`), shared if it is only read.
//!
//! The export of another NBD server has neither: that is for its server.
//!
//! A loop device and the file behind it are the same bytes, so claiming one also claims the other (I1).
//!
//! `cryptsetup` does not look at the claim of a file. Its `reencrypt` is kept out by its own lock
//! ([`ReencryptionLock`]).
use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::time::Duration;

use rustix::fs::{major, minor};
use tracing::warn;

use super::{folder, shown};
use crate::serve::{Behind, Far, FarOptions, is_same_far, is_uri};
use crate::{Error, Luks, Store};

/// Where `cryptsetup` locks devices' metadata.
const LOCKS: &str = "/run/cryptsetup";

/// How long a change of a header waits for another server that is away.
pub(super) const RECONNECT: Duration = Duration::from_secs(120);

/// The image, if it is a URI.
pub(super) fn uri(image: &Path) -> Option<&str> {
    image.to_str().filter(|image| is_uri(image))
}

/// The export of another server, if the image is a URI.
pub(super) fn far(image: &Path, reconnect: Duration, may_write: bool) -> Result<Option<Far>, Error> {
    // A program whose standard error is closed goes on.
    let say = |line: &str| drop(writeln!(io::stderr(), "pagemill crypt: {line}"));
    let options = FarOptions { reconnect, may_write, say };
    uri(image).map(|uri| Far::connect(uri, options)).transpose()
}

/// An image that is opened for its header. As a [`Store`] it is locked for the time of each read.
pub(super) struct HeaderFile {
    file: Behind,
    path: PathBuf,
}

impl HeaderFile {
    /// Opens an existing image for its header.
    pub(super) fn open(path: &Path, may_write: bool) -> Result<Self, Error> {
        if let Some(far) = far(path, RECONNECT, may_write)? {
            return Ok(Self { file: far.into(), path: path.to_owned() });
        }
        is_device(path)?;
        let file =
            File::options().read(true).write(may_write).open(path).map_err(|error| Error::io(shown(path), error))?;
        Ok(Self { file: file.into(), path: path.to_owned() })
    }

    /// The same, of an image whose data is open.
    pub(super) fn of_data(file: &File, path: &Path) -> Result<Self, Error> {
        let file = file.try_clone().map_err(|error| Error::io(shown(path), error))?;
        Ok(Self { file: file.into(), path: path.to_owned() })
    }

    /// Reads the header under a shared lock.
    pub(super) fn read(&self) -> Result<Luks, Error> {
        self.locked(false, |file| Luks::read(file))
    }

    /// Claims the image, as [`open_claimed`] does.
    pub(super) fn claim(&self, may_write: bool) -> Result<Claim, Error> {
        let Behind::File(file) = &self.file else { return Ok(Claim::default()) };
        if !is_device(&self.path)? {
            return Claim::of_file(file, &self.path, may_write);
        }
        let (device, mut claim) = open_claimed(&self.path, may_write)?;
        claim.devices.push(device);
        Ok(claim)
    }

    /// Does `work` under the lock, which is exclusive if `may_write` is set.
    pub(super) fn locked<T>(
        &self,
        may_write: bool,
        work: impl FnOnce(&dyn Store) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let _lock = match &self.file {
            Behind::File(file) => Some(MetadataLock::take(file, &self.path, may_write)?),
            Behind::Far(_) => None,
        };
        work(&self.file)
    }
}

impl Store for HeaderFile {
    fn size(&self) -> io::Result<u64> {
        self.file.size()
    }

    fn read_at(&self, buf: &mut [u8], at: u64) -> io::Result<()> {
        let _lock = match &self.file {
            Behind::File(file) => Some(MetadataLock::wait(file, &self.path, false)?),
            Behind::Far(_) => None,
        };
        self.file.read_at(buf, at)
    }

    /// What is written depends on what was read, so it takes [`HeaderFile::locked`].
    fn write_at(&self, _: &[u8], _: u64) -> io::Result<()> {
        Err(io::ErrorKind::PermissionDenied.into())
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync()
    }
}

/// Reads a header and unlocks it. Another program may move key material in between. So if the passphrase opens nothing,
/// and the header has changed, both begin again. Returns the header too.
pub(super) fn unlocked<T>(
    read: impl Fn() -> Result<Luks, Error>,
    mut unlock: impl FnMut(&Luks) -> Result<T, Error>,
) -> Result<(Luks, T), Error> {
    let mut luks = read()?;
    loop {
        match unlock(&luks) {
            Ok(unlocked) => return Ok((luks, unlocked)),
            Err(error @ Error::WrongPassphrase { .. }) => {
                let now = read()?;
                if now.is_same(&luks) {
                    return Err(error);
                }
                luks = now;
            }
            Err(error) => return Err(error),
        }
    }
}

/// The metadata lock; dropping it releases it.
#[derive(Debug)]
pub(super) struct MetadataLock {
    file: File,
    /// The lock of a device, which has a file of its own.
    name: Option<PathBuf>,
}

impl MetadataLock {
    /// Locks the image `file`, shared unless `may_write` is set, once no other program has the lock.
    pub(super) fn take(file: &File, path: &Path, may_write: bool) -> Result<Self, Error> {
        Self::wait(file, path, may_write).map_err(|error| Error::io(format!("locking {}", shown(path)), error))
    }

    fn wait(file: &File, path: &Path, may_write: bool) -> io::Result<Self> {
        let flock = |file: &File| {
            match if may_write { file.try_lock() } else { file.try_lock_shared() } {
                Err(TryLockError::WouldBlock) => say_locked(path),
                tried => return Ok(tried?),
            }
            if may_write { file.lock() } else { file.lock_shared() }
        };
        let there = file.metadata()?;
        let name = PathBuf::from(format!("{LOCKS}/L_{}:{}", major(there.rdev()), minor(there.rdev())));
        // Without permission for that file, the device's node is locked.
        while there.file_type().is_block_device()
            && let Some(lock) = lock_file(&name)?
        {
            flock(&lock)?;
            // The process that had the lock before may have removed its name.
            if is_named(&lock, &name) {
                return Ok(Self { file: lock, name: Some(name) });
            }
        }
        let file = file.try_clone()?;
        flock(&file)?;
        Ok(Self { file, name: None })
    }
}

impl Drop for MetadataLock {
    fn drop(&mut self) {
        // The name is removed while nobody else has the lock. A process that waits for the lock checks its name
        // afterwards.
        if let Some(name) = &self.name
            && self.file.try_lock().is_ok()
            && is_named(&self.file, name)
        {
            let _ = fs::remove_file(name);
        }
        // The image stays open, so it has to be unlocked.
        let _ = self.file.unlock();
    }
}

/// Says what is waited for, once: in a server's log, or on standard error.
fn say_locked(path: &Path) {
    static SAID: Once = Once::new();
    SAID.call_once(|| {
        let what = format!("{}: another program has its header locked: waiting for it", shown(path));
        if tracing::dispatcher::has_been_set() {
            warn!(name: "locked", "{what}");
        } else {
            // If nobody reads standard error, the command goes on.
            let _ = writeln!(io::stderr(), "pagemill crypt: {what}");
        }
    });
}

/// Opens a lock's file. `None` for a user who may not lock there; other errors do not mean that nobody has the lock.
fn lock_file(name: &Path) -> io::Result<Option<File>> {
    // The folder exists already, or the next step reports the error.
    let _ = fs::DirBuilder::new().mode(0o700).create(LOCKS);
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    match options.custom_flags(libc::O_NOFOLLOW).open(name).map(Some) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::EACCES | libc::EPERM | libc::ENOENT | libc::EROFS)) => {
            Ok(None)
        }
        opened => opened,
    }
}

/// The lock that `cryptsetup reencrypt` (LUKS2) has to have alone, held shared: the data stays as it is.
#[derive(Debug)]
struct ReencryptionLock {
    _lock: MetadataLock,
    /// Locked while the lock is taken or released. Its file is removed under an exclusive lock, and a server that starts
    /// at that moment would be refused.
    folder: File,
}

impl ReencryptionLock {
    /// `None` for a UUID that `cryptsetup` would not make, and for a user who may not lock there.
    fn take(uuid: &str) -> Result<Option<Self>, Error> {
        if uuid::Uuid::parse_str(uuid).is_err() {
            return Ok(None);
        }
        let name = PathBuf::from(format!("{LOCKS}/LN_LUKS2-reencryption-{uuid}"));
        let locking = |error| Error::io(format!("locking {}", shown(&name)), error);
        while let Some(file) = lock_file(&name).map_err(locking)? {
            let folder = File::open(LOCKS).map_err(locking)?;
            folder.lock().map_err(locking)?;
            match file.try_lock_shared() {
                Ok(()) if is_named(&file, &name) => {
                    folder.unlock().map_err(locking)?;
                    return Ok(Some(Self { _lock: MetadataLock { file, name: Some(name) }, folder }));
                }
                // It was removed meanwhile.
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    return Err(Error::Busy(format!("the volume {uuid} is being re-encrypted")));
                }
                Err(TryLockError::Error(error)) => return Err(locking(error)),
            }
        }
        Ok(None)
    }
}

impl Drop for ReencryptionLock {
    fn drop(&mut self) {
        let _ = self.folder.lock();
    }
}

/// Refuses a detached header in the same file as the data: each would overwrite the other.
pub(super) fn refuse_one_file(data: &Path, header: &Path) -> Result<(), Error> {
    let is_one = match (uri(data), uri(header)) {
        (Some(data), Some(header)) => is_same_far(data, header),
        (None, None) => is_one_file(data, header),
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

fn is_one_file(data: &Path, header: &Path) -> bool {
    match (data.metadata(), header.metadata()) {
        (Ok(data), Ok(header)) if data.file_type().is_block_device() => {
            header.file_type().is_block_device() && data.rdev() == header.rdev()
        }
        (Ok(data), Ok(header)) => (data.dev(), data.ino()) == (header.dev(), header.ino()),
        // Neither exists yet.
        (Err(_), Err(_)) => {
            let place = |path| Some((fs::canonicalize(folder(path)).ok()?, path.file_name()?.to_owned()));
            place(data).is_some_and(|data| Some(data) == place(header))
        }
        _ => false,
    }
}

/// Whether `path` is a name of `file`.
fn is_named(file: &File, path: &Path) -> bool {
    let inode = |there: io::Result<fs::Metadata>| there.map(|there| (there.dev(), there.ino())).ok();
    inode(file.metadata()).is_some_and(|own| inode(fs::metadata(path)) == Some(own))
}

/// Keeps others from using an image's data; dropping it ends that.
#[derive(Debug, Default)]
pub struct Claim {
    files: Vec<LockedFile>,
    devices: Vec<File>,
    reencryption: Option<ReencryptionLock>,
}

impl Claim {
    /// Claims an open file, and the loop devices over it.
    pub(super) fn of_file(file: &File, path: &Path, may_write: bool) -> Result<Self, Error> {
        let files = vec![LockedFile::new(file, path, may_write)?];
        Ok(Self { files, devices: loops_over(file, None, may_write)?, ..Self::default() })
    }

    /// Claims another image too.
    pub(super) fn add(&mut self, other: Self) {
        self.files.extend(other.files);
        self.devices.extend(other.devices);
    }

    /// Keeps `cryptsetup` from re-encrypting a LUKS2 volume meanwhile.
    pub(super) fn keep_cipher(&mut self, luks: &Luks) -> Result<(), Error> {
        if let Luks::V2(header) = luks {
            self.reencryption = ReencryptionLock::take(&header.uuid())?;
        }
        Ok(())
    }

    /// For a block device that this program has opened exclusively: claims the file behind it, if it is a loop device.
    fn of_device(device: u64, path: &Path, may_write: bool) -> Result<Self, Error> {
        let Some(behind) = behind(device) else { return Ok(Self::default()) };
        match claimed_behind(&behind, path, may_write)? {
            Some(file) => {
                let devices = loops_over(&file.0, Some(device), may_write)?;
                Ok(Self { devices, files: vec![file], ..Self::default() })
            }
            None => Ok(Self::default()),
        }
    }
}

/// Opens an existing image for its data, and claims it; shared if it is a file that is only read.
pub(super) fn open_claimed(path: &Path, may_write: bool) -> Result<(File, Claim), Error> {
    let is_device = is_device(path)?;
    let file = open(path, may_write, is_device)?;
    let there = file.metadata().map_err(|error| Error::io(shown(path), error))?;
    let claim = match is_device {
        true => Claim::of_device(there.rdev(), path, may_write)?,
        false => Claim::of_file(&file, path, may_write)?,
    };
    Ok((file, claim))
}

/// Opens an image; a block device exclusively.
fn open(path: &Path, may_write: bool, is_device: bool) -> Result<File, Error> {
    let mut options = File::options();
    options.read(true).write(may_write).custom_flags(if is_device { libc::O_EXCL } else { 0 });
    options.open(path).map_err(|error| match error.raw_os_error() {
        Some(libc::EBUSY) => Error::Held(shown(path)),
        _ => Error::io(shown(path), error),
    })
}

/// A file that is locked by its open file description. A child process shares the description until it executes another
/// program, so dropping this unlocks the file explicitly.
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
    // The whole file, however long it becomes.
    let range = libc::flock { l_type: kind as _, l_whence: libc::SEEK_SET as _, l_start: 0, l_len: 0, l_pid: 0 };
    // SAFETY: the descriptor is open, and the call reads the structure, which lives.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &range) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The file behind a loop device or its partition, by the name with which it was attached.
fn behind(device: u64) -> Option<PathBuf> {
    let folder = format!("/sys/dev/block/{}:{}", major(device), minor(device));
    let read = |place| fs::read_to_string(format!("{folder}/{place}")).ok();
    let name = read("loop/backing_file").or_else(|| read("../loop/backing_file"))?;
    Some(name.trim_end_matches('\n').into())
}

/// Claims the file behind a loop device; `None` if it can't be reached, so that others can't name it either.
fn claimed_behind(behind: &Path, device: &Path, may_write: bool) -> Result<Option<LockedFile>, Error> {
    let named = |path: String| format!("{path} (behind {})", shown(device));
    let file = is_device(behind).and_then(|is_device| open(behind, may_write, is_device));
    match file.and_then(|file| LockedFile::new(&file, behind, may_write)) {
        Ok(file) => Ok(Some(file)),
        Err(Error::Busy(path)) => Err(Error::Busy(named(path))),
        Err(Error::Held(path)) => Err(Error::Held(named(path))),
        Err(_) => Ok(None),
    }
}

/// Claims the loop devices over `file`, except the one that is claimed already. If `file` is only read, they may be in
/// use.
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
            // A process with more rights has attached it.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EBUSY | libc::EACCES | libc::EPERM)) => {
                return Err(Error::Held(format!("the loop device {}, which has this file behind it,", shown(&node))));
            }
            // It was detached meanwhile, or has no name here.
            Err(_) => {}
        }
    }
    Ok(loops)
}

/// Whether an image is a block device; an error if it is neither a block device nor a file. Checked before it is
/// opened, since opening a pipe would wait for its other end.
pub(super) fn is_device(path: &Path) -> Result<bool, Error> {
    let kind = path.metadata().map_err(|error| Error::io(shown(path), error))?.file_type();
    if kind.is_file() || kind.is_block_device() {
        return Ok(kind.is_block_device());
    }
    let what = if kind.is_dir() { "a directory" } else { "a pipe, socket or character device" };
    Err(Error::Request(format!("{} is {what}: name a file or a block device", shown(path))))
}
