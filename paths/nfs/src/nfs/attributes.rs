//! GETATTR, SETATTR and ACCESS. Attributes are the file system's, corrected by what the cache knows better.
use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, UNIX_EPOCH};

use nfs3_types::nfs3::{
    ACCESS3_DELETE, ACCESS3_EXECUTE, ACCESS3_EXTEND, ACCESS3_LOOKUP, ACCESS3_MODIFY, ACCESS3_READ, ACCESS3resfail,
    ACCESS3resok, GETATTR3resok, Nfs3Option, SETATTR3resfail, SETATTR3resok, fattr3, ftype3, nfsstat3, nfstime3,
    post_op_attr, pre_op_attr, sattr3, set_atime, set_mtime, specdata3, wcc_attr, wcc_data,
};
use nfs3_types::xdr_codec::Void;
use rustix::fs::{Access, AtFlags, FileType, Gid, Mode, Stat, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, Uid, fstat};

use super::{Nfs, Packed, Request, accepted, packed, refused};
use crate::call::Caller;
use crate::credentials::act_as;
use crate::data::{FileKey, Pending};
use crate::export::Object;
use crate::status::{Failed, Outcome};
use crate::sync::lock;
use crate::syscalls::access;
use crate::xdr::Reader;

/// A file's attributes before an operation.
pub(super) struct Before(wcc_attr);

impl Nfs {
    pub(super) fn getattr(&self, mut request: Request<'_>) -> Packed {
        let handle = request.handle()?;
        request.args.end()?;
        if let Some(opened) = self.opened(handle) {
            return Ok(accepted(GETATTR3resok { obj_attributes: self.attributes(&opened.stat, &opened.key) }));
        }
        let done = self
            .object(handle)
            .map(|(object, key)| GETATTR3resok { obj_attributes: self.attributes(&object.stat, &key) });
        Ok(packed(done, Void))
    }

    pub(super) fn setattr(&self, mut request: Request<'_>) -> Packed {
        let handle = request.handle()?;
        let new = request.args.attributes()?;
        let guard = request.args.option(Reader::time)?;
        request.args.end()?;
        let (object, key) = self.object_or(handle, SETATTR3resfail::default())?;
        let done = self.export.expect_writable().and_then(|()| {
            let is_changed = guard.is_some_and(|guard| guard != self.attributes(&object.stat, &key).ctime);
            if is_changed {
                return Err(Failed(nfsstat3::NFS3ERR_NOT_SYNC));
            }
            self.set_attributes(request.caller, &object, &key, &new)
        });
        let obj_wcc = self.wcc_of_file(&object, &key);
        Ok(match done {
            Ok(()) => accepted(SETATTR3resok { obj_wcc }),
            Err(failed) => refused(failed, SETATTR3resfail { obj_wcc }),
        })
    }

    pub(super) fn access(&self, mut request: Request<'_>) -> Packed {
        let handle = request.handle()?;
        let wanted = request.args.u32()?;
        request.args.end()?;
        let (object, key) = self.object_or(handle, ACCESS3resfail::default())?;
        let obj_attributes = post_op_attr::Some(self.attributes(&object.stat, &key));
        let granted = act_as(request.caller, || {
            let may = |what| access(object.fd.as_fd(), what).is_ok();
            let change = ACCESS3_MODIFY | ACCESS3_EXTEND | ACCESS3_DELETE;
            let mut granted = 0;
            if may(Access::READ_OK) {
                granted |= ACCESS3_READ;
            }
            if wanted & change != 0 && !self.export.is_read_only() && may(Access::WRITE_OK) {
                granted |= change;
            }
            if may(Access::EXEC_OK) {
                granted |= ACCESS3_LOOKUP | ACCESS3_EXECUTE;
            }
            Ok(granted)
        });
        // What has no meaning for this kind of file is not granted.
        let meant = match object.kind() {
            FileType::Directory => !ACCESS3_EXECUTE,
            _ => !(ACCESS3_LOOKUP | ACCESS3_DELETE),
        };
        Ok(match granted {
            Ok(granted) => accepted(ACCESS3resok { obj_attributes, access: granted & wanted & meant }),
            Err(error) => refused(error.into(), ACCESS3resfail { obj_attributes }),
        })
    }

    /// The attributes of a file as clients see them.
    pub(super) fn attributes(&self, stat: &Stat, key: &FileKey) -> fattr3 {
        let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        shown(stat, if is_file { self.data.attributes(key, stat) } else { None })
    }

    /// The attributes after an operation. A client does without them if there are none.
    pub(super) fn after(&self, object: &Object, key: &FileKey) -> post_op_attr {
        match fstat(&object.fd) {
            Ok(now) => Nfs3Option::Some(self.attributes(&now, key)),
            Err(_) => Nfs3Option::None,
        }
    }

    pub(super) fn before(&self, object: &Object, key: &FileKey) -> Before {
        let shown = self.attributes(&object.stat, key);
        Before(wcc_attr { size: shown.size, mtime: shown.mtime, ctime: shown.ctime })
    }

    /// What has become of a file. Not what it was before: other requests of the file may come between, and a client that is
    /// told both takes all that changed for its own doing.
    pub(super) fn wcc_of_file(&self, object: &Object, key: &FileKey) -> wcc_data {
        wcc_data { before: pre_op_attr::None, after: self.after(object, key) }
    }

    /// What has become of a directory that is locked ([`Nfs::lock`]): its attributes before an operation and after it.
    pub(super) fn wcc(&self, before: &Before, object: &Object, key: &FileKey) -> wcc_data {
        wcc_data { before: pre_op_attr::Some(before.0), after: self.after(object, key) }
    }

    /// Sets attributes of a file, as the caller.
    ///
    /// # Errors
    /// What was set before the one that fails stays set, as it would with the system calls one after the other.
    pub(super) fn set_attributes(&self, caller: &Caller, object: &Object, key: &FileKey, new: &sattr3) -> Outcome<()> {
        if let Nfs3Option::Some(size) = new.size {
            object.expect_file()?;
            if size > i64::MAX as u64 {
                return Err(Failed(nfsstat3::NFS3ERR_FBIG));
            }
            self.export.expect_access(caller, object, Access::WRITE_OK)?;
            self.data.set_len(key, || self.export.open_contents(object), size)?;
            self.drop_set_id(caller, object)?;
        }
        let (uid, gid) = (option(&new.uid), option(&new.gid));
        if uid.is_some() || gid.is_some() {
            if uid == Some(u32::MAX) || gid == Some(u32::MAX) {
                return Err(Failed(nfsstat3::NFS3ERR_INVAL));
            }
            let (uid, gid) = (uid.map(Uid::from_raw), gid.map(Gid::from_raw));
            act_as(caller, || Ok(rustix::fs::chownat(&object.fd, c"", uid, gid, AtFlags::EMPTY_PATH)?))?;
        }
        // After the owner: a change of that takes the bits that run a program as its owner away.
        if let Nfs3Option::Some(mode) = new.mode {
            let mode = Mode::from_raw_mode(mode & 0o7777);
            let _modes = lock(&self.modes);
            act_as(caller, || Ok(rustix::fs::chmod(object.path(), mode)?))?;
        }
        let times = Timestamps {
            last_access: match new.atime {
                set_atime::DONT_CHANGE => OMIT,
                set_atime::SET_TO_SERVER_TIME => NOW,
                set_atime::SET_TO_CLIENT_TIME(time) => to_system(time)?,
            },
            last_modification: match new.mtime {
                set_mtime::DONT_CHANGE => OMIT,
                set_mtime::SET_TO_SERVER_TIME => NOW,
                set_mtime::SET_TO_CLIENT_TIME(time) => to_system(time)?,
            },
        };
        if times.last_access.tv_nsec != OMIT.tv_nsec || times.last_modification.tv_nsec != OMIT.tv_nsec {
            // What the cache writes back later would set another time.
            self.data.settle(key)?;
            let set = || Ok(rustix::fs::utimensat(rustix::fs::CWD, object.path(), &times, AtFlags::empty())?);
            // The time of now is set by whoever may write, also one time alone, for which the kernel wants the owner: a client
            // that cuts a file asks for it.
            if [times.last_access, times.last_modification].iter().all(|time| time.tv_nsec >= UTIME_OMIT.min(UTIME_NOW))
            {
                self.export.expect_access(caller, object, Access::WRITE_OK)?;
                set()?;
            } else {
                act_as(caller, set)?;
            }
        }
        self.data.changed_here(key);
        Ok(())
    }

    /// Whether a write of this caller takes bits of the mode away.
    pub(super) fn drops_set_id(caller: &Caller, stat: &Stat) -> bool {
        caller.uid != 0 && dropped(stat.st_mode) != 0
    }

    /// Takes the bits away that run a program as its owner or group, as the kernel does when a user changes the program: the
    /// contents are written by the server, which may keep them.
    pub(super) fn drop_set_id(&self, caller: &Caller, object: &Object) -> io::Result<()> {
        if !Self::drops_set_id(caller, &object.stat) {
            return Ok(());
        }
        // The mode may be another one by now, which stays but for these bits.
        let _modes = lock(&self.modes);
        let mode = fstat(&object.fd)?.st_mode;
        if dropped(mode) != 0 {
            rustix::fs::chmod(object.path(), Mode::from_raw_mode(mode & 0o7777 & !dropped(mode)))?;
        }
        Ok(())
    }
}

/// The bits of a mode that a write takes away.
fn dropped(mode: u32) -> u32 {
    mode & if mode & 0o010 == 0 { 0o4000 } else { 0o6000 }
}

const OMIT: Timespec = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };

fn to_system(time: nfstime3) -> Outcome<Timespec> {
    if time.nseconds >= 1_000_000_000 {
        return Err(Failed(nfsstat3::NFS3ERR_INVAL));
    }
    Ok(Timespec { tv_sec: i64::from(time.seconds), tv_nsec: i64::from(time.nseconds) })
}

fn option<T: Copy + nfs3_types::xdr_codec::Pack + nfs3_types::xdr_codec::Unpack>(value: &Nfs3Option<T>) -> Option<T> {
    match value {
        Nfs3Option::Some(value) => Some(*value),
        Nfs3Option::None => None,
    }
}

/// A time as NFS has it: seconds since 1970 in 32 bits. Times before and after that are shown as the nearest there is.
fn time(seconds: i64, nanoseconds: u64) -> nfstime3 {
    match u32::try_from(seconds) {
        Ok(seconds) => nfstime3 { seconds, nseconds: nanoseconds as u32 },
        Err(_) if seconds < 0 => nfstime3 { seconds: 0, nseconds: 0 },
        Err(_) => nfstime3 { seconds: u32::MAX, nseconds: 999_999_999 },
    }
}

/// The times at which a file was changed.
pub(super) fn changed(stat: &Stat) -> nfstime3 {
    time(stat.st_ctime, stat.st_ctime_nsec)
}

fn shown(stat: &Stat, pending: Option<Pending>) -> fattr3 {
    let (mut size, mut mtime, mut ctime) =
        (stat.st_size as u64, time(stat.st_mtime, stat.st_mtime_nsec), changed(stat));
    if let Some(pending) = pending {
        let written = pending.modified.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        size = pending.len;
        mtime = time(written.as_secs() as i64, u64::from(written.subsec_nanos()));
        ctime = mtime;
    }
    // Archivers take a file without blocks for one hole.
    let used = (stat.st_blocks as u64).saturating_mul(512);
    let used = if pending.is_some() { used.max(size.min(4096)) } else { used };
    fattr3 {
        type_: match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => ftype3::NF3DIR,
            FileType::Symlink => ftype3::NF3LNK,
            FileType::BlockDevice => ftype3::NF3BLK,
            FileType::CharacterDevice => ftype3::NF3CHR,
            FileType::Fifo => ftype3::NF3FIFO,
            FileType::Socket => ftype3::NF3SOCK,
            FileType::RegularFile | FileType::Unknown => ftype3::NF3REG,
        },
        mode: stat.st_mode & 0o7777,
        nlink: u32::try_from(stat.st_nlink).unwrap_or(u32::MAX),
        uid: stat.st_uid,
        gid: stat.st_gid,
        size,
        used,
        rdev: specdata3 { specdata1: rustix::fs::major(stat.st_rdev), specdata2: rustix::fs::minor(stat.st_rdev) },
        fsid: stat.st_dev,
        fileid: stat.st_ino,
        atime: time(stat.st_atime, stat.st_atime_nsec),
        mtime,
        ctime,
    }
}
