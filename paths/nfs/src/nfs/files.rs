//! READ, READLINK, WRITE and COMMIT. The contents of files are the cache's (`data`).
use nfs3_types::nfs3::{
    COMMIT3resfail, COMMIT3resok, Nfs3Option, READ3resfail, READ3resok, READLINK3resfail, READLINK3resok,
    WRITE3resfail, WRITE3resok, nfspath3, nfsstat3, post_op_attr, pre_op_attr, stable_how, wcc_data, writeverf3,
};
use nfs3_types::xdr_codec::Opaque;
use rustix::fs::{Access, FileType};

use super::{Nfs, Packed, Request, TRANSFER_MAX, accepted, refused};
use crate::call::{Answer, Caller, Payload};
use crate::data::{FileKey, ReadBytes, Stable, Written};
use crate::export::Object;
use crate::status::{Failed, Outcome};
use crate::xdr::Garbage;

/// No file is longer.
const END: u64 = i64::MAX as u64;

fn read_results(file_attributes: post_op_attr, read: ReadBytes) -> Answer {
    let ReadBytes { lent, is_end } = read;
    let count = lent.len() as u32;
    let mut results = accepted(READ3resok { file_attributes, count, eof: is_end, data: Opaque::borrowed(&[]) });
    // The length of the data, which follow from the cache's pages.
    let length = results.len() - 4;
    results[length..].copy_from_slice(&count.to_be_bytes());
    Answer::Lent(results, lent)
}

fn write_results(done: Outcome<Written>, file_wcc: wcc_data) -> Vec<u8> {
    match done {
        Ok(Written { count, committed, verifier }) => accepted(WRITE3resok {
            file_wcc,
            count,
            committed: match committed {
                Stable::Unstable => stable_how::UNSTABLE,
                Stable::DataSync => stable_how::DATA_SYNC,
                Stable::FileSync => stable_how::FILE_SYNC,
            },
            verf: writeverf3(verifier),
        }),
        Err(failed) => refused(failed, WRITE3resfail { file_wcc }),
    }
}

impl Nfs {
    pub(super) fn read(&self, mut request: Request<'_>) -> Result<Answer, Answer> {
        let handle = request.handle()?;
        let (at, count) = (request.args.u64()?, request.args.u32()?.min(TRANSFER_MAX));
        request.args.end()?;
        if let Some(opened) = self.opened(handle)
            // Whether another caller may read it, the usual way finds out.
            && opened.stat.st_uid == request.caller.uid
            && at <= END - u64::from(count)
            && let Ok(read) = self.data.read_opened(&opened, at, count)
        {
            return Ok(read_results(Nfs3Option::Some(self.attributes(&opened.stat, &opened.key)), read));
        }
        let (object, key) = self.object_or(handle, READ3resfail::default())?;
        let read = self.read_bytes(request.caller, &object, &key, at, count);
        let file_attributes = self.after(&object, &key);
        Ok(match read {
            Ok(read) => read_results(file_attributes, read),
            Err(failed) => Answer::Results(refused(failed, READ3resfail { file_attributes })),
        })
    }

    fn read_bytes(&self, caller: &Caller, object: &Object, key: &FileKey, at: u64, count: u32) -> Outcome<ReadBytes> {
        object.expect_file()?;
        // Whoever may run a program may read it: this is how a client runs it (RFC 1813, section 4.4).
        self.export
            .expect_access(caller, object, Access::READ_OK)
            .or_else(|_| self.export.expect_access(caller, object, Access::EXEC_OK))
            .map_err(|_| Failed(nfsstat3::NFS3ERR_ACCES))?;
        if at.checked_add(u64::from(count)).is_none_or(|end| end > END) {
            return Err(Failed(nfsstat3::NFS3ERR_INVAL));
        }
        self.data.seen(key, &object.stat)?;
        Ok(self.data.read(key, || self.export.open_to_read(object), at, count)?)
    }

    pub(super) fn readlink(&self, mut request: Request<'_>) -> Packed {
        let handle = request.handle()?;
        request.args.end()?;
        let (object, key) = self.object_or(handle, READLINK3resfail::default())?;
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

    pub(super) fn write(&self, mut request: Request<'_>, payload: &mut Payload<'_>) -> Packed {
        let handle = request.handle()?;
        let (at, count) = (request.args.u64()?, request.args.u32()?);
        let stable = match request.args.u32()? {
            0 => Stable::Unstable,
            1 => Stable::DataSync,
            2 => Stable::FileSync,
            _ => return Err(Garbage::Wrong.into()),
        };
        // The length of the data, which are in the payload.
        let length = request.args.u32()?;
        request.args.end()?;
        if count > length || length as usize != payload.len {
            return Err(Garbage::Wrong.into());
        }
        payload.len = count as usize;
        if let Some(opened) = self.opened(handle)
            // Whether another caller may write to it, the usual way finds out.
            && opened.stat.st_uid == request.caller.uid
            && opened.is_writable() // So is the export.
            && !Self::drops_set_id(request.caller, &opened.stat)
            && self.is_within_largest(at, payload)
        {
            let done = self.data.write_opened(&opened, at, payload, stable).map_err(Failed::from);
            let after = opened
                .stat_again()
                .map_or(post_op_attr::None, |stat| post_op_attr::Some(self.attributes(&stat, &opened.key)));
            return Ok(write_results(done, wcc_data { before: pre_op_attr::None, after }));
        }
        let (object, key) = self.object_or(handle, WRITE3resfail::default())?;
        let done = self.write_bytes(request.caller, &object, &key, at, payload, stable);
        let file_wcc = self.wcc_of_file(&object, &key);
        Ok(write_results(done, file_wcc))
    }

    fn is_within_largest(&self, at: u64, payload: &Payload<'_>) -> bool {
        at.checked_add(payload.len as u64).is_some_and(|end| end <= self.export.largest_file())
    }

    fn write_bytes(
        &self,
        caller: &Caller,
        object: &Object,
        key: &FileKey,
        at: u64,
        payload: &mut Payload<'_>,
        stable: Stable,
    ) -> Outcome<Written> {
        self.export.expect_writable()?;
        object.expect_file()?;
        self.export.expect_access(caller, object, Access::WRITE_OK)?;
        if !self.is_within_largest(at, payload) {
            return Err(Failed(nfsstat3::NFS3ERR_FBIG));
        }
        self.drop_set_id(caller, object)?;
        Ok(self.data.write(key, || self.export.open_contents(object), at, payload, stable)?)
    }

    pub(super) fn commit(&self, mut request: Request<'_>) -> Packed {
        let handle = request.handle()?;
        let (at, count) = (request.args.u64()?, request.args.u32()?);
        request.args.end()?;
        let (object, key) = self.object_or(handle, COMMIT3resfail { file_wcc: wcc_data::default() })?;
        let done = object.expect_file().and_then(|()| {
            self.export.expect_access(request.caller, &object, Access::WRITE_OK)?;
            Ok(self.data.commit(&key, || self.export.open_contents(&object), at, count)?)
        });
        let file_wcc = self.wcc_of_file(&object, &key);
        Ok(match done {
            Ok(()) => accepted(COMMIT3resok { file_wcc, verf: writeverf3(self.data.verifier()) }),
            Err(failed) => refused(failed, COMMIT3resfail { file_wcc }),
        })
    }
}
