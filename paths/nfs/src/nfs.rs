//! NFSv3 (RFC 1813): its 22 procedures.
//!
//! Each is a function that reads its arguments, does it as the caller, and packs its results. An error is packed with the
//! attributes that the RFC has at that place, so that a client's cache stays right. Here a procedure is chosen; `attributes`
//! has GETATTR, SETATTR and ACCESS; `files` what is about contents; `listing` READDIR and READDIRPLUS; `names` what looks up and
//! changes names; `file_system` FSSTAT, FSINFO and PATHCONF.
mod attributes;
mod file_system;
mod files;
mod listing;
mod names;
#[cfg(test)]
mod tests;

use std::sync::{Mutex, MutexGuard};

use nfs3_types::nfs3::{NFS_PROGRAM as Procedure, NFS3_FHSIZE, Nfs3Result};
use nfs3_types::xdr_codec::{Pack, Void};

use crate::call::{Answer, Call, Caller, Pace, Status};
use crate::data::{Data, FileKey, Opened};
use crate::export::{Export, Object};
use crate::status::{Failed, Outcome};
use crate::sync::lock;
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

/// Results in XDR, or an answer without them: arguments that are none, or a file that is not there.
type Packed = Result<Vec<u8>, Answer>;

impl Nfs {
    pub(crate) fn new(export: Export, data: Data) -> Self {
        Self { export, data, modes: Mutex::default(), directories: [const { Mutex::new(()) }; LOCKS] }
    }

    fn lock(&self, directory: &Object) -> MutexGuard<'_, ()> {
        self.lock_number(number(directory))
    }

    fn lock_number(&self, number: usize) -> MutexGuard<'_, ()> {
        lock(&self.directories[number])
    }

    /// Answers a request of this program and version.
    pub(crate) fn answer(&self, call: &mut Call<'_>) -> Answer {
        let caller = self.export.caller(&call.credential);
        let request = Request { caller: &caller, args: Reader::new(call.args) };
        let Ok(procedure) = Procedure::try_from(call.procedure) else { return Answer::Refused(Status::NoProcedure) };
        let packed = match procedure {
            Procedure::NFSPROC3_NULL => Ok(Vec::new()),
            Procedure::NFSPROC3_GETATTR => self.getattr(request),
            Procedure::NFSPROC3_SETATTR => self.setattr(request),
            Procedure::NFSPROC3_LOOKUP => self.lookup(request),
            Procedure::NFSPROC3_ACCESS => self.access(request),
            Procedure::NFSPROC3_READLINK => self.readlink(request),
            Procedure::NFSPROC3_READ => return self.read(request).unwrap_or_else(|refused| refused),
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
        packed.map_or_else(|refused| refused, Answer::Results)
    }

    /// The file of a handle, and its key.
    fn object(&self, handle: &[u8]) -> Outcome<(Object, FileKey)> {
        let object = self.export.object(handle)?;
        let key = object.key(handle);
        Ok((object, key))
    }

    /// As `object`. A failure is answered with what the RFC has beside its status.
    fn object_or<E: Pack>(&self, handle: &[u8], beside: E) -> Result<(Object, FileKey), Answer> {
        self.object(handle).map_err(refuse(beside))
    }

    /// The file of a handle, if its contents are open: nothing has to be opened for it then.
    fn opened(&self, handle: &[u8]) -> Option<Opened> {
        self.data.opened(self.export.generation(handle)?)
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

/// As `refused`, for procedures that end with it.
fn refuse<E: Pack>(beside: E) -> impl FnOnce(Failed) -> Answer {
    |failed| Answer::Results(refused(failed, beside))
}

fn refused<E: Pack>(Failed(status): Failed, beside: E) -> Vec<u8> {
    pack(&Nfs3Result::<Void, E>::Err((status, beside)))
}
