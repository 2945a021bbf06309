//! FSSTAT, FSINFO and PATHCONF.
use nfs3_types::nfs3::{
    FSF3_CANSETTIME, FSF3_HOMOGENEOUS, FSF3_LINK, FSF3_SYMLINK, FSINFO3resfail, FSINFO3resok, FSSTAT3resfail,
    FSSTAT3resok, PATHCONF3resfail, PATHCONF3resok, nfstime3, post_op_attr,
};
use pagemill::PAGE_SIZE;
use rustix::fs::fstatvfs;

use super::{LISTING_MAX, Nfs, Packed, Request, TRANSFER_MAX, packed};

impl Nfs {
    pub(super) fn fsstat(&self, mut request: Request<'_>) -> Packed {
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

    pub(super) fn fsinfo(&self, mut request: Request<'_>) -> Packed {
        let handle = request.handle()?;
        request.args.end()?;
        let done = self.object(handle).map(|(object, key)| FSINFO3resok {
            obj_attributes: post_op_attr::Some(self.attributes(&object.stat, &key)),
            rtmax: TRANSFER_MAX,
            rtpref: TRANSFER_MAX,
            rtmult: PAGE_SIZE as u32,
            wtmax: TRANSFER_MAX,
            wtpref: TRANSFER_MAX,
            wtmult: PAGE_SIZE as u32,
            dtpref: LISTING_MAX,
            maxfilesize: self.export.largest_file(),
            time_delta: nfstime3 { seconds: 0, nseconds: 1 },
            properties: FSF3_LINK | FSF3_SYMLINK | FSF3_HOMOGENEOUS | FSF3_CANSETTIME,
        });
        Ok(packed(done, FSINFO3resfail::default()))
    }

    pub(super) fn pathconf(&self, mut request: Request<'_>) -> Packed {
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
