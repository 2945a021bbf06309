//! A disk that fails or is slow, as a file through FUSE, which records the requests.

use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::SystemTime;

use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, INodeNo, LockOwner,
    OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyOpen, ReplyWrite, Request, Session, WriteFlags,
};
use rustix::mount::{UnmountFlags, unmount};

pub(crate) const LEN: u64 = 4 << 20;
pub(crate) const EIO: u32 = 5;
pub(crate) const NO_SPACE: u32 = 28;

/// A request to the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    Write,
    Sync,
}

/// The disk's contents, and how it behaves.
#[derive(Default)]
pub(crate) struct State {
    pub(crate) bytes: Vec<u8>,
    /// The contents at the last sync: what remains after a power cut.
    pub(crate) durable: Vec<u8>,
    pub(crate) asked: Vec<Asked>,
    pub(crate) read_fails: bool,
    /// An error of the protocol.
    pub(crate) write_fails: Option<u32>,
    pub(crate) sync_fails: Option<u32>,
    /// Writes wait while this is set.
    is_held: bool,
    holds: usize,
}

#[derive(Clone, Default)]
pub(crate) struct Disk(Arc<(Mutex<State>, Condvar)>);

impl Disk {
    pub(crate) fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        let result = act(&mut self.0.0.lock().unwrap());
        self.0.1.notify_all();
        result
    }

    /// Holds writes back, or lets them go. [`Disk::until_held`] waits for a write that is held back.
    pub(crate) fn hold(&self, is_held: bool) {
        self.with(|state| state.is_held = is_held);
    }

    pub(crate) fn until_held(&self) {
        let state = self.0.0.lock().unwrap();
        drop(self.0.1.wait_while(state, |state| state.holds == 0).unwrap());
    }
}

impl Filesystem for Disk {
    fn getattr(&self, _: &Request, _: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        let then = SystemTime::UNIX_EPOCH;
        let attr = FileAttr {
            ino: INodeNo::ROOT,
            size: LEN,
            blocks: LEN / 512,
            atime: then,
            mtime: then,
            ctime: then,
            crtime: then,
            kind: FileType::RegularFile,
            perm: 0o600,
            nlink: 1,
            uid: rustix::process::getuid().as_raw(),
            gid: rustix::process::getgid().as_raw(),
            rdev: 0,
            blksize: 4096,
            flags: 0,
        };
        reply.attr(&std::time::Duration::MAX, &attr);
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::empty());
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        at: u64,
        len: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        self.with(|state| match state.read_fails {
            true => reply.error(Errno::EIO),
            false => {
                let end = (at as usize + len as usize).min(state.bytes.len());
                reply.data(&state.bytes[(at as usize).min(end)..end]);
            }
        });
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        at: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        self.with(|state| state.holds += 1);
        let state = self.0.0.lock().unwrap();
        drop(self.0.1.wait_while(state, |state| state.is_held).unwrap());
        self.with(|state| {
            state.holds -= 1;
            match state.write_fails {
                Some(error) => reply.error(Errno::from_i32(error as i32)),
                None => {
                    state.asked.push(Asked::Write);
                    state.bytes[at as usize..at as usize + data.len()].copy_from_slice(data);
                    reply.written(data.len() as u32);
                }
            }
        });
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        self.with(|state| match state.sync_fails {
            Some(error) => reply.error(Errno::from_i32(error as i32)),
            None => {
                state.asked.push(Asked::Sync);
                state.durable.clone_from(&state.bytes);
                reply.ok();
            }
        });
    }
}

/// The disk, mounted.
pub(crate) struct Mount {
    session: Option<BackgroundSession>,
    at: PathBuf,
}

impl Drop for Mount {
    fn drop(&mut self) {
        // A failing test leaves its server with the file open. When the process ends, nobody would answer for the disk,
        // and the process would wait for that for ever. So open requests are aborted here.
        let session = self.session.take().expect("it ends once");
        if thread::panicking() {
            let _ = unmount(&self.at, UnmountFlags::FORCE | UnmountFlags::DETACH);
            return std::mem::forget(session);
        }
        session.umount_and_join().unwrap();
    }
}

/// Mounts the disk. Returns `None` and prints that it is skipped if mounting is not possible.
pub(crate) fn mounted(disk: &Disk, at: &Path) -> Option<Mount> {
    disk.with(|state| (state.bytes, state.durable) = (vec![0; LEN as usize], vec![0; LEN as usize]));
    File::create(at).unwrap();
    let mut config = Config::default();
    config.n_threads = Some(4);
    config.clone_fd = true;
    match Session::new(disk.clone(), at, &config) {
        Ok(session) => {
            let mount = Mount { session: Some(session.spawn().unwrap()), at: at.to_owned() };
            // The first close tells the kernel that this file system does not handle closing.
            drop(File::open(at).unwrap());
            Some(mount)
        }
        Err(why) if matches!(why.kind(), ErrorKind::PermissionDenied | ErrorKind::NotFound) => {
            println!("skipped: mounting takes /dev/fuse, and root or fusermount3 ({why})");
            None
        }
        Err(why) => panic!("{why}"),
    }
}
