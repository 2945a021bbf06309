//! MOUNT version 3 (RFC 1813, appendix I): how a client gets the handle of the tree's root.
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Mutex;

use nfs3_types::mount::{
    MNTPATHLEN, MOUNT_PROGRAM, dirpath, export_node, fhandle3, mountbody, mountres3, mountres3_ok, mountstat3, name,
};
use nfs3_types::xdr_codec::{List, Opaque};
use rustix::io::Errno;

use crate::call::{Answer, Call, Status};
use crate::export::Export;
use crate::record::AUTH_SYS;
use crate::sync::lock;
use crate::xdr::{Garbage, Reader, pack};

/// What DUMP lists at most. It is for people: clients come and go without a word.
const MOUNTS_MAX: usize = 1024;

/// Which clients have mounted what, as they say.
#[derive(Default)]
pub(crate) struct Mounts(Mutex<BTreeSet<(IpAddr, Vec<u8>)>>);

impl Mounts {
    /// Answers a request of this program and version.
    pub(crate) fn answer(&self, export: &Export, call: &Call<'_>) -> Answer {
        let Ok(procedure) = MOUNT_PROGRAM::try_from(call.procedure) else {
            return Answer::Refused(Status::NoProcedure);
        };
        let packed = match procedure {
            MOUNT_PROGRAM::MOUNTPROC3_NULL => Ok(Vec::new()),
            MOUNT_PROGRAM::MOUNTPROC3_MNT => self.mount(export, call),
            MOUNT_PROGRAM::MOUNTPROC3_DUMP => Ok(self.dump()),
            MOUNT_PROGRAM::MOUNTPROC3_UMNT => self.unmount(call),
            MOUNT_PROGRAM::MOUNTPROC3_UMNTALL => {
                lock(&self.0).retain(|(peer, _)| *peer != call.peer.ip());
                Ok(Vec::new())
            }
            MOUNT_PROGRAM::MOUNTPROC3_EXPORT => Ok(exports(export)),
        };
        packed.map_or_else(Answer::from, Answer::Results)
    }

    fn mount(&self, export: &Export, call: &Call<'_>) -> Result<Vec<u8>, Garbage> {
        let mut args = Reader::new(call.args);
        let path = args.opaque(MNTPATHLEN)?;
        args.end()?;
        let mounted = find(export, call, path);
        if mounted.is_ok() {
            let mut mounts = lock(&self.0);
            if mounts.len() < MOUNTS_MAX {
                mounts.insert((call.peer.ip(), path.to_vec()));
            }
        }
        Ok(match mounted {
            Ok(handle) => pack(&mountres3::Ok(mountres3_ok {
                fhandle: fhandle3(Opaque::borrowed(handle.as_ref())),
                auth_flavors: vec![AUTH_SYS],
            })),
            Err(status) => pack(&mountres3::Err(status)),
        })
    }

    fn dump(&self) -> Vec<u8> {
        let mounts = lock(&self.0);
        let list = mounts.iter().map(|(peer, path)| mountbody {
            ml_hostname: name(Opaque::owned(peer.to_string().into_bytes())),
            ml_directory: dirpath(Opaque::borrowed(path)),
        });
        pack(&List(list.collect()))
    }

    fn unmount(&self, call: &Call<'_>) -> Result<Vec<u8>, Garbage> {
        let mut args = Reader::new(call.args);
        let path = args.opaque(MNTPATHLEN)?;
        args.end()?;
        lock(&self.0).remove(&(call.peer.ip(), path.to_vec()));
        Ok(Vec::new())
    }
}

/// The handle of the exported directory, or of one below it.
fn find(export: &Export, call: &Call<'_>, path: &[u8]) -> Result<crate::handles::Handle, mountstat3> {
    if path.contains(&0) {
        return Err(mountstat3::MNT3ERR_INVAL);
    }
    let path = Path::new(std::ffi::OsStr::from_bytes(path));
    // The tree by its name; `/` is the tree too, for clients that are not told its name.
    let below = export.names.iter().find_map(|tree| path.strip_prefix(tree).ok());
    let below = match below {
        Some(below) => below,
        None if path == Path::new("/") => Path::new(""),
        None => return Err(mountstat3::MNT3ERR_NOENT),
    };
    let said = |error: std::io::Error| match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::NOENT) => mountstat3::MNT3ERR_NOENT,
        Some(Errno::NOTDIR) => mountstat3::MNT3ERR_NOTDIR,
        Some(Errno::NAMETOOLONG) => mountstat3::MNT3ERR_NAMETOOLONG,
        // A symbolic link, a way out of the tree, another file system.
        Some(Errno::ACCESS | Errno::PERM | Errno::LOOP | Errno::XDEV) => mountstat3::MNT3ERR_ACCES,
        _ => mountstat3::MNT3ERR_IO,
    };
    let found = export.below_root(&export.caller(&call.credential), below).map_err(said)?;
    export.handle(found.as_fd()).map_err(|_| mountstat3::MNT3ERR_SERVERFAULT)
}

fn exports(export: &Export) -> Vec<u8> {
    let directory = dirpath(Opaque::borrowed(export.names[0].as_os_str().as_bytes()));
    pack(&List(vec![export_node { ex_dir: directory, ex_groups: List(Vec::<name<'_>>::new()) }]))
}
