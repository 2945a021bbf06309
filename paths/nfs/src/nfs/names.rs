//! Procedures on names: LOOKUP, and those that make, remove and rename.
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use nfs3_types::nfs3::{
    CREATE3resfail, CREATE3resok, LINK3resfail, LINK3resok, LOOKUP3resfail, LOOKUP3resok, Nfs3Option, REMOVE3resfail,
    REMOVE3resok, RENAME3resfail, RENAME3resok, nfs_fh3, nfsstat3, post_op_attr, post_op_fh3, sattr3, set_atime,
    set_mtime, specdata3, wcc_data,
};
use nfs3_types::xdr_codec::Opaque;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, openat2};
use rustix::io::Errno;

use super::{Nfs, Packed, Request, accepted, number, refuse, refused};
use crate::call::Caller;
use crate::credentials::act_as;
use crate::data::FileKey;
use crate::export::{Name, Object, open_entry};
use crate::status::{Failed, Outcome};
use crate::xdr::Garbage;

/// How CREATE treats a file that is there (RFC 1813, `createhow3`).
enum How {
    Unchecked(sattr3),
    Guarded(sattr3),
    /// Kept with the file, so that the same request sent again finds its own.
    Exclusive([u8; 8]),
}

/// A file that was made, as four procedures answer with it.
struct Made {
    object: Object,
    handle: crate::handles::Handle,
}

impl Nfs {
    pub(super) fn lookup(&self, mut request: Request<'_>) -> Packed {
        let (handle, name) = request.entry()?;
        request.args.end()?;
        let (directory, key) = self.object_or(handle, LOOKUP3resfail::default())?;
        let found = directory.expect_directory().and_then(|()| {
            let object = self.export.look_up(request.caller, &directory, &Name::new(name)?)?;
            let handle = self.export.handle(object.fd.as_fd())?;
            Ok((object, handle))
        });
        let dir_attributes = self.after(&directory, &key);
        Ok(match found {
            Ok((object, handle)) => accepted(LOOKUP3resok {
                obj_attributes: post_op_attr::Some(self.attributes(&object.stat, &object.key(handle.as_ref()))),
                object: wire(&handle),
                dir_attributes,
            }),
            Err(failed) => refused(failed, LOOKUP3resfail { dir_attributes }),
        })
    }

    pub(super) fn create(&self, mut request: Request<'_>) -> Packed {
        let (handle, name) = request.entry()?;
        let how = match request.args.u32()? {
            0 => How::Unchecked(request.args.attributes()?),
            1 => How::Guarded(request.args.attributes()?),
            2 => How::Exclusive(request.args.array()?),
            _ => return Err(Garbage::Wrong.into()),
        };
        request.args.end()?;
        Ok(self.make(request.caller, handle, name, |directory, name| {
            self.create_file(request.caller, directory, name, &how)
        }))
    }

    fn create_file(&self, caller: &Caller, directory: &Object, name: &CStr, how: &How) -> Outcome<(OwnedFd, sattr3)> {
        let (mode, new) = match how {
            How::Unchecked(new) | How::Guarded(new) => (mode_of(new, 0o644), new.clone()),
            How::Exclusive(verifier) => (Mode::empty(), kept_in_times(*verifier)),
        };
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let made = act_as(caller, || match openat2(&directory.fd, name, flags, mode, ResolveFlags::NO_XDEV) {
            Err(Errno::EXIST) => Ok((open_entry(directory.fd.as_fd(), name)?, true)),
            made => Ok((made?, false)),
        });
        let (fd, was_there) = made?;
        if !was_there {
            return Ok((fd, sattr3 { mode: beyond_open(&new, mode), ..new }));
        }
        let there = Object::new(fd)?;
        let is_file = there.kind() == FileType::RegularFile;
        match how {
            // Nothing but its length is set.
            How::Unchecked(new) if is_file => Ok((there.fd, sattr3 { size: new.size, ..sattr3::default() })),
            How::Exclusive(verifier) if is_file && has_in_times(&there, *verifier) => Ok((there.fd, sattr3::default())),
            _ => Err(Failed(nfsstat3::NFS3ERR_EXIST)),
        }
    }

    pub(super) fn mkdir(&self, mut request: Request<'_>) -> Packed {
        let (handle, name) = request.entry()?;
        let new = request.args.attributes()?;
        request.args.end()?;
        Ok(self.make(request.caller, handle, name, |directory, name| {
            let mode = mode_of(&new, 0o755);
            let made = act_as(request.caller, || {
                rustix::fs::mkdirat(&directory.fd, name, mode)?;
                Ok(open_entry(directory.fd.as_fd(), name)?)
            })?;
            let size = Nfs3Option::None;
            Ok((made, sattr3 { mode: beyond_open(&new, mode & Mode::from_raw_mode(0o1777)), size, ..new.clone() }))
        }))
    }

    pub(super) fn symlink(&self, mut request: Request<'_>) -> Packed {
        let (handle, name) = request.entry()?;
        let new = request.args.attributes()?;
        let target = request.args.opaque(16 << 10)?;
        request.args.end()?;
        Ok(self.make(request.caller, handle, name, |directory, name| {
            if target.contains(&0) {
                return Err(Failed(nfsstat3::NFS3ERR_INVAL));
            }
            let made = act_as(request.caller, || {
                rustix::fs::symlinkat(target, &directory.fd, name)?;
                Ok(open_entry(directory.fd.as_fd(), name)?)
            })?;
            // A symbolic link has no mode here and no length of its own.
            Ok((made, sattr3 { mode: Nfs3Option::None, size: Nfs3Option::None, ..new.clone() }))
        }))
    }

    pub(super) fn mknod(&self, mut request: Request<'_>) -> Packed {
        let (handle, name) = request.entry()?;
        let kind = request.args.u32()?;
        let new = match kind {
            3 | 4 | 6 | 7 => request.args.attributes()?,
            _ => sattr3::default(),
        };
        let device = match kind {
            3 | 4 => request.args.device()?,
            _ => specdata3::default(),
        };
        request.args.end()?;
        Ok(self.make(request.caller, handle, name, |directory, name| {
            let kind = match kind {
                3 => FileType::BlockDevice,
                4 => FileType::CharacterDevice,
                6 => FileType::Socket,
                7 => FileType::Fifo,
                _ => return Err(Failed(nfsstat3::NFS3ERR_BADTYPE)),
            };
            let mode = mode_of(&new, 0o644);
            let device = rustix::fs::makedev(device.specdata1, device.specdata2);
            let made = act_as(request.caller, || {
                rustix::fs::mknodat(&directory.fd, name, kind, mode, device)?;
                Ok(open_entry(directory.fd.as_fd(), name)?)
            })?;
            Ok((made, sattr3 { mode: beyond_open(&new, mode), size: Nfs3Option::None, ..new.clone() }))
        }))
    }

    /// Makes a file by `how`, which says what is still to be set, sets it, and packs the answer. CREATE, MKDIR, SYMLINK and
    /// MKNOD have the same results.
    fn make(
        &self,
        caller: &Caller,
        handle: &[u8],
        name: &[u8],
        how: impl FnOnce(&Object, &CStr) -> Outcome<(OwnedFd, sattr3)>,
    ) -> Vec<u8> {
        self.in_directory(
            handle,
            |directory| {
                self.export.expect_writable()?;
                let name = Name::new_entry(name, nfsstat3::NFS3ERR_EXIST)?;
                let (fd, left) = how(directory, &name.0)?;
                let object = Object::new(fd)?;
                let handle = self.export.handle(object.fd.as_fd())?;
                self.set_attributes(caller, &object, &object.key(handle.as_ref()), &left)?;
                Ok(Made { object: Object::new(object.fd)?, handle })
            },
            |Made { object, handle }, dir_wcc| {
                let obj_attributes = post_op_attr::Some(self.attributes(&object.stat, &object.key(handle.as_ref())));
                accepted(CREATE3resok { obj: post_op_fh3::Some(wire(&handle)), obj_attributes, dir_wcc })
            },
            |failed, dir_wcc| refused(failed, CREATE3resfail { dir_wcc }),
        )
    }

    /// Does something in a directory, and packs the answer with what has become of that.
    fn in_directory<T>(
        &self,
        handle: &[u8],
        work: impl FnOnce(&Object) -> Outcome<T>,
        pack: impl FnOnce(T, wcc_data) -> Vec<u8>,
        refuse: impl FnOnce(Failed, wcc_data) -> Vec<u8>,
    ) -> Vec<u8> {
        let (mut directory, key) = match self.object(handle) {
            Ok(found) => found,
            Err(failed) => return refuse(failed, wcc_data::default()),
        };
        let locked = self.lock(&directory);
        // As it is now, with the lock.
        let before = match Object::new(directory.fd) {
            Ok(now) => {
                directory = now;
                self.before(&directory, &key)
            }
            Err(failed) => return refuse(failed, wcc_data::default()),
        };
        let done = directory.expect_directory().and_then(|()| work(&directory));
        let dir_wcc = self.wcc(&before, &directory, &key);
        drop(locked);
        match done {
            Ok(done) => pack(done, dir_wcc),
            Err(failed) => refuse(failed, dir_wcc),
        }
    }

    pub(super) fn remove(&self, mut request: Request<'_>) -> Packed {
        let (handle, name) = request.entry()?;
        request.args.end()?;
        Ok(self.unlink(request.caller, handle, name, AtFlags::empty(), nfsstat3::NFS3ERR_INVAL))
    }

    pub(super) fn rmdir(&self, mut request: Request<'_>) -> Packed {
        let (handle, name) = request.entry()?;
        request.args.end()?;
        // The RFC has a status for each of the two names that no directory can be removed by.
        let dot = if name == b".." { nfsstat3::NFS3ERR_EXIST } else { nfsstat3::NFS3ERR_INVAL };
        Ok(self.unlink(request.caller, handle, name, AtFlags::REMOVEDIR, dot))
    }

    fn unlink(&self, caller: &Caller, handle: &[u8], name: &[u8], flags: AtFlags, dot: nfsstat3) -> Vec<u8> {
        self.in_directory(
            handle,
            |directory| {
                self.export.expect_writable()?;
                let name = Name::new_entry(name, dot)?;
                let gone = self.contents_of(directory, &name.0);
                act_as(caller, || Ok(rustix::fs::unlinkat(&directory.fd, &name.0, flags)?))?;
                self.let_go(gone);
                Ok(())
            },
            |(), dir_wcc| accepted(REMOVE3resok { dir_wcc }),
            |failed, dir_wcc| refused(failed, REMOVE3resfail { dir_wcc }),
        )
    }

    /// The file whose name is about to go, if it has contents.
    fn contents_of(&self, directory: &Object, name: &CStr) -> Option<FileKey> {
        let object = Object::new(open_entry(directory.fd.as_fd(), name).ok()?).ok()?;
        let handle = self.export.handle(object.fd.as_fd()).ok()?;
        (object.kind() == FileType::RegularFile).then(|| object.key(handle.as_ref()))
    }

    fn let_go(&self, gone: Option<FileKey>) {
        if let Some(key) = gone {
            self.data.forget(&key);
        }
    }

    pub(super) fn rename(&self, mut request: Request<'_>) -> Packed {
        let (from_handle, from_name) = request.entry()?;
        let (to_handle, to_name) = request.entry()?;
        request.args.end()?;
        let (from, from_key) = self.object_or(from_handle, RENAME3resfail::default())?;
        let (to, to_key) = self.object_or(to_handle, RENAME3resfail::default())?;
        // In the order of their numbers, as every other thread; one lock may be that of both.
        let numbers = (number(&from), number(&to));
        let _first = self.lock_number(numbers.0.min(numbers.1));
        let _second = (numbers.0 != numbers.1).then(|| self.lock_number(numbers.0.max(numbers.1)));
        // As they are now, with the locks.
        let from = Object::new(from.fd).map_err(refuse(RENAME3resfail::default()))?;
        let to = Object::new(to.fd).map_err(refuse(RENAME3resfail::default()))?;
        let before = (self.before(&from, &from_key), self.before(&to, &to_key));
        let done = self.rename_entry(request.caller, (&from, from_name), (&to, to_name));
        let fromdir_wcc = self.wcc(&before.0, &from, &from_key);
        let todir_wcc = self.wcc(&before.1, &to, &to_key);
        Ok(match done {
            Ok(()) => accepted(RENAME3resok { fromdir_wcc, todir_wcc }),
            Err(failed) => refused(failed, RENAME3resfail { fromdir_wcc, todir_wcc }),
        })
    }

    fn rename_entry(&self, caller: &Caller, from: (&Object, &[u8]), to: (&Object, &[u8])) -> Outcome<()> {
        self.export.expect_writable()?;
        from.0.expect_directory()?;
        to.0.expect_directory()?;
        let old = Name::new_entry(from.1, nfsstat3::NFS3ERR_INVAL)?;
        let new = Name::new_entry(to.1, nfsstat3::NFS3ERR_INVAL)?;
        let gone = self.contents_of(to.0, &new.0);
        let moved = self.contents_of(from.0, &old.0);
        across(act_as(caller, || Ok(rustix::fs::renameat(&from.0.fd, &old.0, &to.0.fd, &new.0)?)))?;
        if let Some(key) = moved {
            self.data.changed_here(&key);
        }
        // Two names of one file: it stays.
        self.let_go(gone.filter(|gone| Some(gone) != moved.as_ref()));
        Ok(())
    }

    pub(super) fn link(&self, mut request: Request<'_>) -> Packed {
        let file = request.handle()?;
        let (handle, name) = request.entry()?;
        request.args.end()?;
        let nothing = LINK3resfail { file_attributes: Nfs3Option::None, linkdir_wcc: wcc_data::default() };
        let (object, key) = self.object_or(file, nothing)?;
        Ok(self.in_directory(
            handle,
            |directory| {
                self.export.expect_writable()?;
                let name = Name::new_entry(name, nfsstat3::NFS3ERR_EXIST)?;
                across(act_as(request.caller, || {
                    let (path, follow) = (object.path(), AtFlags::SYMLINK_FOLLOW);
                    Ok(rustix::fs::linkat(rustix::fs::CWD, path, &directory.fd, &name.0, follow)?)
                }))?;
                self.data.changed_here(&key);
                Ok(())
            },
            |(), linkdir_wcc| accepted(LINK3resok { file_attributes: self.after(&object, &key), linkdir_wcc }),
            |failed, linkdir_wcc| {
                refused(failed, LINK3resfail { file_attributes: self.after(&object, &key), linkdir_wcc })
            },
        ))
    }
}

/// A file cannot be moved between two parts of a file system, as subvolumes are, and the client copies it.
fn across(done: io::Result<()>) -> Outcome<()> {
    done.map_err(|error| match error.raw_os_error() {
        Some(libc::EXDEV) => Failed(nfsstat3::NFS3ERR_XDEV),
        _ => error.into(),
    })
}

pub(super) fn wire(handle: &crate::handles::Handle) -> nfs_fh3 {
    nfs_fh3 { data: Opaque::owned(handle.as_ref().to_vec()) }
}

/// The mode to make a file with.
fn mode_of(new: &sattr3, default: u32) -> Mode {
    match new.mode {
        Nfs3Option::Some(mode) => Mode::from_raw_mode(mode & 0o7777),
        Nfs3Option::None => Mode::from_raw_mode(default),
    }
}

/// The mode that is still to be set after a file was made with `made`: opening a file sets no bit that runs it as its owner
/// or group.
fn beyond_open(new: &sattr3, made: Mode) -> nfs3_types::nfs3::set_mode3 {
    match new.mode {
        Nfs3Option::Some(mode) if mode & 0o7777 != made.as_raw_mode() || mode & 0o6000 != 0 => Nfs3Option::Some(mode),
        _ => Nfs3Option::None,
    }
}

/// A verifier as times of a file, where it survives this process (RFC 1813, section 3.3.8). Not the highest bit: file systems
/// have seconds with a sign.
fn kept_in_times(verifier: [u8; 8]) -> sattr3 {
    let [atime, mtime] = times(verifier);
    let time = |seconds| nfs3_types::nfs3::nfstime3 { seconds, nseconds: 0 };
    sattr3 {
        atime: set_atime::SET_TO_CLIENT_TIME(time(atime)),
        mtime: set_mtime::SET_TO_CLIENT_TIME(time(mtime)),
        ..sattr3::default()
    }
}

fn times(verifier: [u8; 8]) -> [u32; 2] {
    let word = |at: usize| u32::from_be_bytes([verifier[at], verifier[at + 1], verifier[at + 2], verifier[at + 3]]);
    [word(0) & i32::MAX as u32, word(4) & i32::MAX as u32]
}

fn has_in_times(there: &Object, verifier: [u8; 8]) -> bool {
    let kept = [there.stat.st_atime, there.stat.st_mtime];
    there.stat.st_size == 0 && kept == times(verifier).map(i64::from)
}
