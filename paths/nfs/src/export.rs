//! The exported tree: from a handle to an open file, and from a name in a directory to the file of that name.
//!
//! Nothing outside the tree is reached:
//! - E1 Only names of one component are looked up, and never through a symbolic link or into another file system.
//! - E2 The parent of the tree's root is the root itself.
//! - E3 A directory that was moved out of the tree is refused from then on (`NFS3ERR_STALE`). A file that was moved out can
//!   still be used by those who have its handle, as long as it exists: a file does not know its directories.
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nfs3_types::nfs3::nfsstat3;
use rustix::fs::{Access, FileType, Mode, OFlags, ResolveFlags, Stat, fstat, openat2};
use rustix::io::Errno;

use crate::call::{Caller, Credential};
use crate::credentials::{Squash, act_as};
use crate::data::FileKey;
use crate::error::{AS_ROOT, Error};
use crate::handles::{Handle, Handles, Key, kernel_handle};
use crate::status::{Failed, Outcome};
use crate::syscalls::{access, open_by_handle};

/// What an export is made of.
#[derive(Clone, Debug)]
pub(crate) struct ExportSettings {
    pub(crate) directory: PathBuf,
    /// The file with the key of its handles.
    pub(crate) key: PathBuf,
    pub(crate) read_only: bool,
    pub(crate) squash: Squash,
}

/// A tree of one file system.
pub(crate) struct Export {
    root: OwnedFd,
    /// For `open_by_handle`, which takes no descriptor that is `O_PATH` alone.
    mount: File,
    /// As the administrator named it, and what that is.
    pub(crate) names: [PathBuf; 2],
    handles: Handles,
    is_read_only: bool,
    squash: Squash,
    largest_file: u64,
}

/// A file that a request is about, open for nothing but its name (`O_PATH`).
pub(crate) struct Object {
    pub(crate) fd: OwnedFd,
    pub(crate) stat: Stat,
}

impl Object {
    /// # Errors
    /// The system's.
    pub(crate) fn new(fd: OwnedFd) -> Outcome<Self> {
        let stat = fstat(&fd)?;
        Ok(Self { fd, stat })
    }

    pub(crate) fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.stat.st_mode)
    }

    /// Which file it is, for its contents. An inode's number is used again, but not at the same birth.
    pub(crate) fn key(&self, handle: &[u8]) -> FileKey {
        FileKey { device: self.stat.st_dev, inode: self.stat.st_ino, generation: generation(handle) }
    }

    /// Fails unless it is a file with contents.
    pub(crate) fn expect_file(&self) -> Outcome<()> {
        match self.kind() {
            FileType::RegularFile => Ok(()),
            FileType::Directory => Err(Failed(nfsstat3::NFS3ERR_ISDIR)),
            _ => Err(Failed(nfsstat3::NFS3ERR_INVAL)),
        }
    }

    pub(crate) fn expect_directory(&self) -> Outcome<()> {
        if self.kind() == FileType::Directory { Ok(()) } else { Err(Failed(nfsstat3::NFS3ERR_NOTDIR)) }
    }

    /// A path that leads to this file, for calls that take no descriptor.
    pub(crate) fn path(&self) -> String {
        proc_path(self.fd.as_fd())
    }
}

/// The mark at a handle's end is a hash of all of it, the inode's generation included.
fn generation(handle: &[u8]) -> u64 {
    handle.last_chunk().map_or(0, |mark| u64::from_le_bytes(*mark))
}

/// A name in a directory.
pub(crate) struct Name(pub(crate) CString);

impl Name {
    /// # Errors
    /// The name can be no file's.
    pub(crate) fn new(name: &[u8]) -> Outcome<Self> {
        match name {
            [] => Err(Failed(nfsstat3::NFS3ERR_ACCES)),
            name if name.len() > 255 => Err(Failed(nfsstat3::NFS3ERR_NAMETOOLONG)),
            name if name.contains(&b'/') => Err(Failed(nfsstat3::NFS3ERR_INVAL)),
            name => CString::new(name).map(Self).map_err(|_| Failed(nfsstat3::NFS3ERR_INVAL)),
        }
    }

    /// As `new`, for a name that something is done with: not the directory itself, and not its parent.
    pub(crate) fn new_entry(name: &[u8], dot: nfsstat3) -> Outcome<Self> {
        let name = Self::new(name)?;
        if matches!(name.0.as_bytes(), b"." | b"..") { Err(Failed(dot)) } else { Ok(name) }
    }
}

impl Export {
    /// Opens the tree, and reads the key of its handles or makes one.
    pub(crate) fn open(settings: &ExportSettings) -> Result<Self, Error> {
        let (directory, shown) = (&settings.directory, &settings.directory.display());
        let unopened = |error: io::Error| Error::io(shown, error, "give a directory that can be opened");
        let mount = File::open(directory).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Error::new(format!("{shown} does not exist"), "give a directory that does"),
            io::ErrorKind::PermissionDenied => Error::io(shown, error, AS_ROOT),
            _ => unopened(error),
        })?;
        if !mount.metadata().is_ok_and(|there| there.is_dir()) {
            return Err(Error::new(
                format!("{shown} is no directory, and nothing else can be exported"),
                "give a directory",
            ));
        }
        let root = rustix::fs::openat(&mount, c".", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            .map_err(|error| unopened(error.into()))?;
        // Now and not at the first request: are there handles, and may this process open them?
        let has_none = |error: io::Error| {
            let what = format!("the file system of {shown} has no file handles");
            Error::io(what, error, "export a directory of ext4, XFS, Btrfs or tmpfs")
        };
        let mut own = kernel_handle(root.as_fd()).map_err(has_none)?;
        open_by_handle(mount.as_fd(), &mut own).map_err(|error| match error.kind() {
            io::ErrorKind::PermissionDenied => {
                Error::new("this process may not open files by their handles (it lacks CAP_DAC_READ_SEARCH)", AS_ROOT)
            }
            _ => has_none(error),
        })?;
        let real = std::fs::canonicalize(directory).map_err(unopened)?;
        let named = std::path::absolute(directory).map_err(unopened)?;
        let largest_file = largest_file(mount.as_fd());
        // The key last: none is made for a directory that cannot be served.
        let handles = Handles::new(&Key::from_file(&settings.key)?, &own);
        Ok(Self {
            root,
            mount,
            names: [named, real],
            handles,
            is_read_only: settings.read_only,
            squash: settings.squash,
            largest_file,
        })
    }

    pub(crate) fn caller(&self, credential: &Credential) -> Caller {
        self.squash.caller(credential)
    }

    pub(crate) fn expect_writable(&self) -> Outcome<()> {
        if self.is_read_only { Err(Failed(nfsstat3::NFS3ERR_ROFS)) } else { Ok(()) }
    }

    pub(crate) fn is_read_only(&self) -> bool {
        self.is_read_only
    }

    /// The generation in the key of a handle's file. None: this server did not make the handle.
    pub(crate) fn generation(&self, handle: &[u8]) -> Option<u64> {
        self.handles.check(handle).map(|_| generation(handle))
    }

    /// The file of a handle.
    pub(crate) fn object(&self, handle: &[u8]) -> Outcome<Object> {
        let mut kernel = self.handles.check(handle).ok_or(nfsstat3::NFS3ERR_BADHANDLE)?;
        let object = Object::new(open_by_handle(self.mount.as_fd(), &mut kernel)?)?;
        // A file that another process holds open after its last name was removed.
        if object.stat.st_nlink == 0 || (object.kind() == FileType::Directory && !self.has(object.fd.as_fd())) {
            return Err(Failed(nfsstat3::NFS3ERR_STALE));
        }
        Ok(object)
    }

    /// Whether a directory is in the tree (E3).
    fn has(&self, directory: BorrowedFd<'_>) -> bool {
        let path = |fd: BorrowedFd<'_>| std::fs::read_link(proc_path(fd));
        // Both as they are now: the tree itself may have been moved.
        match (path(directory), path(self.root.as_fd())) {
            (Ok(directory), Ok(root)) => directory.starts_with(root),
            _ => false,
        }
    }

    pub(crate) fn is_root(&self, object: &Object) -> bool {
        fstat(&self.root).is_ok_and(|root| (root.st_dev, root.st_ino) == (object.stat.st_dev, object.stat.st_ino))
    }

    pub(crate) fn handle(&self, file: BorrowedFd<'_>) -> Outcome<Handle> {
        Ok(self.handles.handle(file)?)
    }

    /// The file of a name, as the caller, who must be allowed to search the directory.
    pub(crate) fn look_up(&self, caller: &Caller, directory: &Object, name: &Name) -> Outcome<Object> {
        // E2
        let name = if name.0.as_bytes() == b".." && self.is_root(directory) { c"." } else { name.0.as_c_str() };
        let found = act_as(caller, || Ok(open_entry(directory.fd.as_fd(), name)?))?;
        let found = Object::new(found)?;
        // The directory may have been moved out of the tree since its handle was opened.
        if name == c".." && !self.has(found.fd.as_fd()) {
            return Err(Failed(nfsstat3::NFS3ERR_STALE));
        }
        Ok(found)
    }

    /// A directory below the root, by its path, for MOUNT.
    pub(crate) fn below_root(&self, caller: &Caller, path: &Path) -> io::Result<OwnedFd> {
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        if path.as_os_str().as_bytes().is_empty() {
            // The tree itself is for all who may mount it: whom it is closed to finds that out there.
            return self.root.try_clone();
        }
        act_as(caller, || Ok(openat2(&self.root, path, flags, Mode::empty(), resolve)?))
    }

    /// Fails unless the caller may use the file so. Its owner may read and write whatever its mode says: a client checks the
    /// mode when it opens the file, and may change it while it has it open (RFC 1813, section 4.4).
    pub(crate) fn expect_access(&self, caller: &Caller, object: &Object, wanted: Access) -> Outcome<()> {
        if caller.uid == object.stat.st_uid && !wanted.contains(Access::EXEC_OK) {
            return Ok(());
        }
        Ok(act_as(caller, || access(object.fd.as_fd(), wanted))?)
    }

    /// Opens a file for its contents, for the server, which has checked that the caller may use them. Not for writing as
    /// well: a program that is open so cannot be run on this machine.
    pub(crate) fn open_to_read(&self, object: &Object) -> io::Result<OwnedFd> {
        Ok(rustix::fs::open(object.path(), CONTENTS | OFlags::RDONLY, Mode::empty())?)
    }

    /// As [`open_to_read`](Self::open_to_read), for writing too. A file that the server may not change is opened for reading.
    pub(crate) fn open_contents(&self, object: &Object) -> io::Result<OwnedFd> {
        if self.is_read_only {
            return self.open_to_read(object);
        }
        match rustix::fs::open(object.path(), CONTENTS | OFlags::RDWR, Mode::empty()) {
            // A program that runs, a file system that is read-only, a file that no one may change.
            Err(Errno::TXTBSY | Errno::ROFS | Errno::PERM | Errno::ACCESS) => self.open_to_read(object),
            opened => Ok(opened?),
        }
    }

    /// The length that a file here can have at most.
    pub(crate) fn largest_file(&self) -> u64 {
        self.largest_file
    }
}

const CONTENTS: OFlags = OFlags::CLOEXEC.union(OFlags::NOCTTY).union(OFlags::NONBLOCK);

/// The length that a file can have at most: tried on a file without a name, which takes no room. Where there is none, as on
/// a file system that is read-only, nothing is written.
fn largest_file(directory: BorrowedFd<'_>) -> u64 {
    // The last page of all is left out: its end has no number.
    let most = i64::MAX as u64 - 4095;
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let Ok(file) = rustix::fs::openat(directory, c".", flags, Mode::RUSR) else { return most };
    let can_be = |len: u64| rustix::fs::ftruncate(&file, len).is_ok();
    if can_be(most) {
        return most;
    }
    let (mut can, mut cannot) = (0, most);
    while cannot - can > 1 {
        let len = can + (cannot - can) / 2;
        if can_be(len) { can = len } else { cannot = len }
    }
    can
}

/// A path that leads to an open file, whatever its name has become.
fn proc_path(file: BorrowedFd<'_>) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// Opens the file of a name in a directory (E1).
pub(crate) fn open_entry(directory: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat2(directory, name, flags, Mode::empty(), ResolveFlags::NO_XDEV | ResolveFlags::NO_MAGICLINKS)
}
