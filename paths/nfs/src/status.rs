//! What the system says, in NFS's words (RFC 1813, section 2.6).
use std::io::{self, ErrorKind};

use nfs3_types::nfs3::nfsstat3;
use rustix::io::Errno;

/// What a procedure comes to.
pub(crate) type Outcome<T> = Result<T, Failed>;

/// The status of a procedure that failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Failed(pub(crate) nfsstat3);

impl From<nfsstat3> for Failed {
    fn from(status: nfsstat3) -> Self {
        Self(status)
    }
}

impl From<io::Error> for Failed {
    fn from(error: io::Error) -> Self {
        Self(status(&error))
    }
}

impl From<Errno> for Failed {
    fn from(errno: Errno) -> Self {
        Self(of_errno(errno))
    }
}

/// The status of an error.
fn status(error: &io::Error) -> nfsstat3 {
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(errno) => of_errno(errno),
        None => match error.kind() {
            // The client asks again in a while.
            ErrorKind::OutOfMemory | ErrorKind::TimedOut | ErrorKind::WouldBlock => nfsstat3::NFS3ERR_JUKEBOX,
            ErrorKind::PermissionDenied => nfsstat3::NFS3ERR_ACCES,
            ErrorKind::NotFound => nfsstat3::NFS3ERR_NOENT,
            ErrorKind::InvalidInput => nfsstat3::NFS3ERR_INVAL,
            ErrorKind::FileTooLarge => nfsstat3::NFS3ERR_FBIG,
            ErrorKind::StorageFull => nfsstat3::NFS3ERR_NOSPC,
            ErrorKind::QuotaExceeded => nfsstat3::NFS3ERR_DQUOT,
            ErrorKind::ReadOnlyFilesystem => nfsstat3::NFS3ERR_ROFS,
            _ => nfsstat3::NFS3ERR_IO,
        },
    }
}

fn of_errno(errno: Errno) -> nfsstat3 {
    match errno {
        Errno::PERM => nfsstat3::NFS3ERR_PERM,
        Errno::NOENT => nfsstat3::NFS3ERR_NOENT,
        Errno::NXIO => nfsstat3::NFS3ERR_NXIO,
        // A mount point in the tree: there is no way into another file system.
        Errno::ACCESS | Errno::XDEV | Errno::BUSY | Errno::TXTBSY => nfsstat3::NFS3ERR_ACCES,
        Errno::EXIST => nfsstat3::NFS3ERR_EXIST,
        Errno::NODEV => nfsstat3::NFS3ERR_NODEV,
        Errno::NOTDIR => nfsstat3::NFS3ERR_NOTDIR,
        Errno::ISDIR => nfsstat3::NFS3ERR_ISDIR,
        Errno::INVAL | Errno::LOOP => nfsstat3::NFS3ERR_INVAL,
        Errno::FBIG | Errno::OVERFLOW => nfsstat3::NFS3ERR_FBIG,
        Errno::NOSPC => nfsstat3::NFS3ERR_NOSPC,
        Errno::ROFS => nfsstat3::NFS3ERR_ROFS,
        Errno::MLINK => nfsstat3::NFS3ERR_MLINK,
        Errno::NAMETOOLONG => nfsstat3::NFS3ERR_NAMETOOLONG,
        Errno::NOTEMPTY => nfsstat3::NFS3ERR_NOTEMPTY,
        Errno::DQUOT => nfsstat3::NFS3ERR_DQUOT,
        Errno::STALE => nfsstat3::NFS3ERR_STALE,
        Errno::BADMSG => nfsstat3::NFS3ERR_BADHANDLE,
        Errno::OPNOTSUPP | Errno::NOSYS => nfsstat3::NFS3ERR_NOTSUPP,
        // The client asks again in a while.
        Errno::NOMEM | Errno::AGAIN | Errno::NFILE | Errno::MFILE => nfsstat3::NFS3ERR_JUKEBOX,
        _ => nfsstat3::NFS3ERR_IO,
    }
}
