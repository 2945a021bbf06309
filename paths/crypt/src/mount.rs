//! A volume as a file: one file, offered through FUSE in place of another. What needs a disk (a loop device, `mkfs`, a
//! virtual machine) works on it, without a device mapper and without a server. A request comes in by `OneFile` and goes on in
//! [`VolumeFile`].
//!
//! The kernel's page cache stands in front, so reads and writes come in its sizes; a write is in the volume's file when it
//! returns, and on the disk after `fsync`. The file has the volume's size and keeps it.
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, INodeNo, KernelConfig, LockOwner,
    MountOption, OpenAccMode, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyOpen, ReplyWrite, Request, Session,
    SessionUnmounter, WriteFlags,
};
use rustix::mount::{UnmountFlags, unmount};

use crate::serve::{Memory, VolumeFile};

/// How long the kernel may believe what it was told of the file: nothing of it changes.
const FOR_EVER: Duration = Duration::from_secs(1 << 30);
/// The longest write that the kernel is to send: one part.
const LONGEST_WRITE: u32 = Memory::PART as u32;

/// A volume that is mounted. It stays so until somebody unmounts it.
#[derive(Debug)]
pub struct Mounted {
    session: Session<OneFile>,
    file: Arc<VolumeFile>,
    at: PathBuf,
}

/// Ends a mount, from another thread.
#[derive(Debug)]
pub struct Unmounter {
    session: SessionUnmounter,
    at: PathBuf,
}

impl Unmounter {
    /// Takes the name away. Who has the file open keeps it until they close it, and [`Mounted::serve`] goes on for them.
    ///
    /// # Errors
    /// What the system says.
    pub fn unmount(&mut self) -> io::Result<()> {
        // The first asks for what nobody uses; the second does without that.
        self.session.unmount().or_else(|_| Ok(unmount(&self.at, UnmountFlags::DETACH)?))
    }
}

impl Mounted {
    /// Mounts `file` at `at`, which is a file, for this user alone (not even for root, if that is another), with so many
    /// threads.
    ///
    /// # Errors
    /// What the system says: mounting takes `/dev/fuse`, and root or the program `fusermount3`.
    pub fn new(file: VolumeFile, at: &Path, is_read_only: bool, threads: usize) -> io::Result<Self> {
        let at = at.canonicalize()?;
        let way = if is_read_only { MountOption::RO } else { MountOption::RW };
        let mut config = Config::default();
        config.mount_options = vec![MountOption::FSName("pagemill".to_owned()), MountOption::DefaultPermissions, way];
        config.n_threads = Some(threads);
        config.clone_fd = threads > 1;
        let file = Arc::new(file);
        let shown = OneFile { file: Arc::clone(&file), is_read_only, since: SystemTime::now() };
        Ok(Self { session: Session::new(shown, &at, &config)?, file, at })
    }

    /// What ends it.
    pub fn unmounter(&mut self) -> Unmounter {
        Unmounter { session: self.session.unmount_callable(), at: self.at.clone() }
    }

    /// Answers the kernel until the file is unmounted and nobody has it open; what was written is on the disk then.
    ///
    /// # Errors
    /// What the system, or the disk at the end, says.
    pub fn serve(self) -> io::Result<()> {
        let served = match self.session.run() {
            // The kernel's last word to a thread that held a request which nobody waits for any more, as a release is.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => Ok(()),
            served => served,
        };
        served.and(self.file.sync())
    }
}

/// The file system: its root is the file.
#[derive(Debug)]
struct OneFile {
    file: Arc<VolumeFile>,
    is_read_only: bool,
    since: SystemTime,
}

impl OneFile {
    fn attr(&self) -> FileAttr {
        let block = self.file.path().volume.geometry().sector_size.bytes() as u32;
        FileAttr {
            ino: INodeNo::ROOT,
            size: self.file.size(),
            blocks: self.file.size() / 512,
            atime: self.since,
            mtime: self.since,
            ctime: self.since,
            crtime: self.since,
            kind: FileType::RegularFile,
            perm: if self.is_read_only { 0o400 } else { 0o600 },
            nlink: 1,
            uid: rustix::process::getuid().as_raw(),
            gid: rustix::process::getgid().as_raw(),
            rdev: 0,
            blksize: block.max(4096),
            flags: 0,
        }
    }
}

fn errno(error: &io::Error) -> Errno {
    match error.kind() {
        io::ErrorKind::StorageFull => Errno::ENOSPC,
        io::ErrorKind::OutOfMemory => Errno::ENOMEM,
        _ => error.raw_os_error().filter(|number| *number > 0).map_or(Errno::EIO, Errno::from_i32),
    }
}

impl Filesystem for OneFile {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // A kernel that takes less says how much: then it is that.
        let _ = config.set_max_write(LONGEST_WRITE).or_else(|most| config.set_max_write(most));
        Ok(())
    }

    fn getattr(&self, _: &Request, _: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&FOR_EVER, &self.attr());
    }

    /// Times may be set, and are not kept; the size stays what it is.
    fn setattr(
        &self,
        _: &Request,
        _: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        _: Option<fuser::TimeOrNow>,
        _: Option<fuser::TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<fuser::BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let attr = self.attr();
        if mode.is_some() || uid.is_some() || gid.is_some() || size.is_some_and(|size| size != attr.size) {
            reply.error(Errno::EPERM);
        } else {
            reply.attr(&FOR_EVER, &attr);
        }
    }

    fn open(&self, _: &Request, _: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        if self.is_read_only && flags.acc_mode() != OpenAccMode::O_RDONLY {
            return reply.error(Errno::EROFS);
        }
        // Nobody else writes to the volume: what the kernel knows of it stays true.
        reply.opened(FileHandle(0), FopenFlags::FOPEN_KEEP_CACHE);
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let there = self.file.size().saturating_sub(offset).min(size.into());
        let mut bytes = vec![0; there as usize];
        match self.file.read_at(offset, &mut bytes) {
            Ok(()) => reply.data(&bytes),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let there = self.file.size().saturating_sub(offset).min(data.len() as u64) as usize;
        // As much as there is room for, as a disk does.
        let now = if there > 0 { &data[..there] } else { data };
        match self.file.write_at(offset, now) {
            Ok(()) => reply.written(now.len() as u32),
            Err(error) => reply.error(errno(&error)),
        }
    }

    /// A descriptor is closed: no promise is made here, `fsync` makes it.
    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        match self.file.sync() {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(errno(&error)),
        }
    }
}
