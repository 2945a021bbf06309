//! NFSv3 (RFC 1813): its 22 procedures.
//!
//! Each is a function that reads its arguments, does it as the caller, and packs its results. An error is packed with the
//! attributes that the RFC has at that place, so that a client's cache stays right.
mod attributes;
mod files;
mod listing;
mod names;
#[cfg(test)]
mod tests;

use std::os::fd::AsFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use nfs3_types::nfs3::{
    ACCESS3_DELETE, ACCESS3_EXECUTE, ACCESS3_EXTEND, ACCESS3_LOOKUP, ACCESS3_MODIFY, ACCESS3_READ, ACCESS3resfail,
    ACCESS3resok, FSF3_CANSETTIME, FSF3_HOMOGENEOUS, FSF3_LINK, FSF3_SYMLINK, FSINFO3resfail, FSINFO3resok,
    FSSTAT3resfail, FSSTAT3resok, GETATTR3resok, NFS_PROGRAM as Procedure, NFS3_FHSIZE, Nfs3Result, PATHCONF3resfail,
    PATHCONF3resok, READLINK3resfail, READLINK3resok, SETATTR3resfail, SETATTR3resok, nfspath3, nfsstat3, nfstime3,
    post_op_attr,
};
use nfs3_types::xdr_codec::{Opaque, Pack, Void};
use rustix::fs::{Access, FileType, fstatvfs};

use crate::call::{Answer, Call, Caller, Pace, Status};
use crate::credentials::act_as;
use crate::data::{Data, FileKey, Opened};
use crate::export::{Export, Object};
use crate::status::{Failed, Outcome};
use crate::syscalls::access;
use crate::xdr::{Garbage, Reader, pack};

/// The most that one READ or WRITE carries.
pub(crate) const TRANSFER_MAX: u32 = crate::record::DATA_MAX as u32;

/// The most that one answer to READDIR or READDIRPLUS has.
const LISTING_MAX: u32 = 64 << 10;

/// What the procedures work on.
pub(crate) struct Nfs {
    pub(crate) export: Export,
    pub(crate) data: Data,
    /// Held while a mode is set, or bits are taken from one.
    modes: Mutex<()>,
    /// Held while names in a directory change, so that what it was before and what it is after belong together. A directory has
    /// one of these by its number.
    directories: [Mutex<()>; LOCKS],
}

const LOCKS: usize = 64;

/// How long a procedure takes as a rule.
pub(crate) fn pace(procedure: u32) -> Pace {
    match Procedure::try_from(procedure) {
        Ok(Procedure::NFSPROC3_READ) => Pace::MayWait,
        Ok(Procedure::NFSPROC3_COMMIT) => Pace::Slow,
        _ if is_idempotent(procedure) => Pace::Quick,
        _ => Pace::Slow,
    }
}

/// Whether a procedure may be carried out twice: not SETATTR, not WRITE (the second one could undo another that came between),
/// and none of those that make, remove, rename and link.
pub(crate) fn is_idempotent(procedure: u32) -> bool {
    !matches!(
        Procedure::try_from(procedure),
        Ok(Procedure::NFSPROC3_SETATTR
            | Procedure::NFSPROC3_WRITE
            | Procedure::NFSPROC3_CREATE
            | Procedure::NFSPROC3_MKDIR
            | Procedure::NFSPROC3_SYMLINK
            | Procedure::NFSPROC3_MKNOD
            | Procedure::NFSPROC3_REMOVE
            | Procedure::NFSPROC3_RMDIR
            | Procedure::NFSPROC3_RENAME
            | Procedure::NFSPROC3_LINK)
    )
}

/// What a procedure has: who asks, and what.
struct Request<'a> {
    caller: &'a Caller,
    args: Reader<'a>,
}

type Packed = Result<Vec<u8>, Garbage>;

impl Nfs {
    pub(crate) fn new(export: Export, data: Data) -> Self {
        Self { export, data, modes: Mutex::default(), directories: [const { Mutex::new(()) }; LOCKS] }
    }

    fn lock(&self, directory: &Object) -> MutexGuard<'_, ()> {
        self.lock_number(number(directory))
    }

    fn lock_number(&self, number: usize) -> MutexGuard<'_, ()> {
        self.directories[number].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers a request of this program and version.
    pub(crate) fn answer(&self, call: &mut Call<'_>) -> Answer {
        let caller = self.export.caller(&call.credential);
        let request = Request { caller: &caller, args: Reader::new(call.args) };
        let Ok(procedure) = Procedure::try_from(call.procedure) else { return Answer::Refused(Status::NoProcedure) };
        let garbage = |garbage: Garbage| Answer::Refused(garbage.into());
        let packed = match procedure {
            Procedure::NFSPROC3_NULL => Ok(Vec::new()),
            Procedure::NFSPROC3_GETATTR => self.getattr(request),
            Procedure::NFSPROC3_SETATTR => self.setattr(request),
            Procedure::NFSPROC3_LOOKUP => self.lookup(request),
            Procedure::NFSPROC3_ACCESS => self.access(request),
            Procedure::NFSPROC3_READLINK => self.readlink(request),
            Procedure::NFSPROC3_READ => return self.read(request).unwrap_or_else(garbage),
            Procedure::NFSPROC3_WRITE => self.write(request, &mut call.payload),
            Procedure::NFSPROC3_CREATE => self.create(request),
            Procedure::NFSPROC3_MKDIR => self.mkdir(request),
            Procedure::NFSPROC3_SYMLINK => self.symlink(request),
            Procedure::NFSPROC3_MKNOD => self.mknod(request),
            Procedure::NFSPROC3_REMOVE => self.remove(request),
            Procedure::NFSPROC3_RMDIR => self.rmdir(request),
            Procedure::NFSPROC3_RENAME => self.rename(request),
            Procedure::NFSPROC3_LINK => self.link(request),
            Procedure::NFSPROC3_READDIR => self.readdir(request),
            Procedure::NFSPROC3_READDIRPLUS => self.readdirplus(request),
            Procedure::NFSPROC3_FSSTAT => self.fsstat(request),
            Procedure::NFSPROC3_FSINFO => self.fsinfo(request),
            Procedure::NFSPROC3_PATHCONF => self.pathconf(request),
            Procedure::NFSPROC3_COMMIT => self.commit(request),
        };
        packed.map_or_else(garbage, Answer::Results)
    }

    /// The file of a handle, and its key.
    fn object(&self, handle: &[u8]) -> Outcome<(Object, FileKey)> {
        let object = self.export.object(handle)?;
        let key = object.key(handle);
        Ok((object, key))
    }

    /// The file of a handle, if its contents are open: nothing has to be opened for it then.
    fn opened(&self, handle: &[u8]) -> Option<Opened> {
        self.data.opened(self.export.generation(handle)?)
    }

    fn getattr(&self, mut request: Request<'_>) -> Packed {
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

    fn setattr(&self, mut request: Request<'_>) -> Packed {
        let handle = request.handle()?;
        let new = request.args.attributes()?;
        let guard = request.args.option(Reader::time)?;
        request.args.end()?;
        let (object, key) = match self.object(handle) {
            Ok(found) => found,
            Err(failed) => return Ok(refused(failed, SETATTR3resfail::default())),
        };
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

    fn access(&self, mut request: Request<'_>) -> Packed {
        let handle = request.handle()?;
        let wanted = request.args.u32()?;
        request.args.end()?;
        let (object, key) = match self.object(handle) {
            Ok(found) => found,
            Err(failed) => return Ok(refused(failed, ACCESS3resfail::default())),
        };
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

    fn readlink(&self, mut request: Request<'_>) -> Packed {
        let handle = request.handle()?;
        request.args.end()?;
        let (object, key) = match self.object(handle) {
            Ok(found) => found,
            Err(failed) => return Ok(refused(failed, READLINK3resfail::default())),
        };
        let symlink_attributes = post_op_attr::Some(self.attributes(&object.stat, &key));
        let read = if object.kind() == FileType::Symlink {
            rustix::fs::readlinkat(&object.fd, c"", Vec::new()).map_err(Failed::from)
        } else {
            Err(Failed(nfsstat3::NFS3ERR_INVAL))
        };
        Ok(match read {
            Ok(target) => {
                accepted(READLINK3resok { symlink_attributes, data: nfspath3(Opaque::owned(target.into_bytes())) })
            }
            Err(failed) => refused(failed, READLINK3resfail { symlink_attributes }),
        })
    }

    fn fsstat(&self, mut request: Request<'_>) -> Packed {
        let handle = request.handle()?;
        request.args.end()?;
        let done = self.object(handle).and_then(|(object, key)| {
            let there = fstatvfs(&object.fd)?;
            let bytes = |blocks: u64| blocks.saturating_mul(there.f_frsize);
            Ok(FSSTAT3resok {
                obj_attributes: post_op_attr::Some(self.attributes(&object.stat, &key)),
                tbytes: bytes(there.f_blocks),
                fbytes: bytes(there.f_bfree),
                abytes: bytes(there.f_bavail),
                tfiles: there.f_files,
                ffiles: there.f_ffree,
                afiles: there.f_favail,
                invarsec: 0,
            })
        });
        Ok(packed(done, FSSTAT3resfail::default()))
    }

    fn fsinfo(&self, mut request: Request<'_>) -> Packed {
        let handle = request.handle()?;
        request.args.end()?;
        let done = self.object(handle).map(|(object, key)| FSINFO3resok {
            obj_attributes: post_op_attr::Some(self.attributes(&object.stat, &key)),
            rtmax: TRANSFER_MAX,
            rtpref: TRANSFER_MAX,
            rtmult: 4096,
            wtmax: TRANSFER_MAX,
            wtpref: TRANSFER_MAX,
            wtmult: 4096,
            dtpref: LISTING_MAX,
            maxfilesize: self.export.largest_file(),
            time_delta: nfstime3 { seconds: 0, nseconds: 1 },
            properties: FSF3_LINK | FSF3_SYMLINK | FSF3_HOMOGENEOUS | FSF3_CANSETTIME,
        });
        Ok(packed(done, FSINFO3resfail::default()))
    }

    fn pathconf(&self, mut request: Request<'_>) -> Packed {
        let handle = request.handle()?;
        request.args.end()?;
        let done = self.object(handle).and_then(|(object, key)| {
            let there = fstatvfs(&object.fd)?;
            Ok(PATHCONF3resok {
                obj_attributes: post_op_attr::Some(self.attributes(&object.stat, &key)),
                // What ext4 has, the least of the file systems with handles; the file system itself refuses the next one.
                linkmax: 65000,
                name_max: there.f_namemax as u32,
                no_trunc: true,
                chown_restricted: true,
                case_insensitive: false,
                case_preserving: true,
            })
        });
        Ok(packed(done, PATHCONF3resfail::default()))
    }
}

/// Which lock a directory has.
fn number(directory: &Object) -> usize {
    (directory.stat.st_ino % LOCKS as u64) as usize
}

impl<'a> Request<'a> {
    fn handle(&mut self) -> Result<&'a [u8], Garbage> {
        self.args.opaque(NFS3_FHSIZE)
    }

    /// A directory's handle and a name in it. The name's length is refused with a status of its own, not as garbage.
    fn entry(&mut self) -> Result<(&'a [u8], &'a [u8]), Garbage> {
        Ok((self.handle()?, self.args.opaque(16 << 10)?))
    }
}

fn accepted<T: Pack>(results: T) -> Vec<u8> {
    pack(&Nfs3Result::<T, Void>::Ok(results))
}

/// Results, or a failure with what the RFC has beside the status.
fn packed<T: Pack, E: Pack>(done: Outcome<T>, beside: E) -> Vec<u8> {
    match done {
        Ok(results) => accepted(results),
        Err(failed) => refused(failed, beside),
    }
}

fn refused<E: Pack>(Failed(status): Failed, beside: E) -> Vec<u8> {
    pack(&Nfs3Result::<Void, E>::Err((status, beside)))
}
