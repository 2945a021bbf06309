//! A volume as a file: one file, mounted over another file through FUSE. Programs that need a disk (a loop device,
//! `mkfs`, a virtual machine) work on it, without a device mapper and without a server. A request comes in by `OneFile`
//! and continues in [`VolumeFile`].
//!
//! The kernel's page cache is in front of it, so reads and writes have its sizes. A write is in the volume's file when
//! it returns, and on the disk after `fsync`. The file's size is the volume's and does not change.
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

/// How long the kernel may cache the file's attributes, none of which change.
const FOR_EVER: Duration = Duration::from_secs(1 << 30);
/// The longest write that the kernel may send: one part.
const LONGEST_WRITE: u32 = Memory::PART as u32;

/// A mounted volume. It stays mounted until it is unmounted.
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
    /// Unmounts the file. Programs that have it open keep it until they close it, and [`Mounted::serve`] goes on for
    /// them.
    ///
    /// # Errors
    /// What the system says.
    pub fn unmount(&mut self) -> io::Result<()> {
        // The first fails if the file is in use; the second does not.
        self.session.unmount().or_else(|_| Ok(unmount(&self.at, UnmountFlags::DETACH)?))
    }
}

impl Mounted {
    /// Mounts `file` over the file `at`, for this user only (not for root, unless this user is root), with `threads`
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

    /// A handle that unmounts it.
    pub fn unmounter(&mut self) -> Unmounter {
        Unmounter { session: self.session.unmount_callable(), at: self.at.clone() }
    }

    /// Answers the kernel until the file is unmounted and nobody has it open. Then all written data is on the disk.
    ///
    /// # Errors
    /// What the system, or the disk at the end, says.
    pub fn serve(self) -> io::Result<()> {
        let served = match self.session.run() {
            // The kernel answers so to a thread whose last request nobody waits for any more, such as a release.
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
        // A kernel that allows less returns its maximum, which is used then.
        let _ = config.set_max_write(LONGEST_WRITE).or_else(|most| config.set_max_write(most));
        Ok(())
    }

    fn getattr(&self, _: &Request, _: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&FOR_EVER, &self.attr());
    }

    /// Times may be set, and are not kept; the size does not change.
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
        // Nobody else writes to the volume, so the kernel's cache stays valid.
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
        // As much as there is room for, like a disk.
        let now = if there > 0 { &data[..there] } else { data };
        match self.file.write_at(offset, now) {
            Ok(()) => reply.written(now.len() as u32),
            Err(error) => reply.error(errno(&error)),
        }
    }

    /// Refused, as a system without it would: programs then write zeroes as data. A hole in a file reads as zeroes, and
    /// a hole in the volume's file would be decrypted to noise. That a file system on a loop device only wants to
    /// discard can't be seen here: the kernel sends its orders to write zeroes in the same way.
    fn fallocate(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _offset: u64,
        _length: u64,
        _mode: i32,
        reply: ReplyEmpty,
    ) {
        reply.error(Errno::ENOSYS);
    }

    /// Called when a descriptor is closed. Data is durable after `fsync`, not after this.
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
