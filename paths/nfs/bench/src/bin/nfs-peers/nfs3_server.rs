//! A tree, served by `nfs3_server`.

use std::ffi::OsString;
use std::io::{self, ErrorKind};
use std::os::unix::ffi::OsStrExt;
use std::vec::IntoIter;

use nfs3_server::fs_util::metadata_to_fattr3;
use nfs3_server::nfs3_types::nfs3::{createverf3, fattr3, filename3, nfspath3, nfsstat3, sattr3, stable_how};
use nfs3_server::tcp::{NFSTcp, NFSTcpListener};
use nfs3_server::vfs::{
    DirEntryPlus, FileHandleU64, NextResult, NfsFileSystem, NfsReadFileSystem, ReadDirPlusIterator,
};

use crate::tree::{ROOT, Tree};

pub(crate) async fn serve(tree: Tree, name: &str) -> io::Result<()> {
    let mut listener = NFSTcpListener::bind(crate::ADDRESS, tree).await?;
    listener.with_export_name(name);
    println!("{}", listener.get_listen_port());
    listener.handle_forever().await
}

fn said(error: io::Error) -> nfsstat3 {
    match error.kind() {
        ErrorKind::NotFound => nfsstat3::NFS3ERR_NOENT,
        ErrorKind::AlreadyExists => nfsstat3::NFS3ERR_EXIST,
        ErrorKind::PermissionDenied => nfsstat3::NFS3ERR_ACCES,
        _ => nfsstat3::NFS3ERR_IO,
    }
}

const NOT_ASKED_FOR: nfsstat3 = nfsstat3::NFS3ERR_NOTSUPP;

type Handle = FileHandleU64;

/// What is left of a directory.
struct Listing<'a> {
    tree: &'a Tree,
    directory: u64,
    names: IntoIter<OsString>,
}

impl Listing<'_> {
    fn entry(&self, name: &OsString) -> io::Result<DirEntryPlus<Handle>> {
        let fileid = self.tree.lookup(self.directory, name.as_bytes())?;
        let attributes = metadata_to_fattr3(fileid, &self.tree.metadata(fileid)?);
        Ok(DirEntryPlus {
            fileid,
            name: name.as_bytes().to_vec().into(),
            cookie: fileid,
            name_attributes: Some(attributes),
            name_handle: Some(Handle::new(fileid)),
        })
    }
}

impl ReadDirPlusIterator<Handle> for Listing<'_> {
    async fn next(&mut self) -> NextResult<DirEntryPlus<Handle>> {
        let Some(name) = self.names.next() else { return NextResult::Eof };
        self.entry(&name).map_or_else(|error| NextResult::Err(said(error)), NextResult::Ok)
    }
}

impl NfsReadFileSystem for Tree {
    type Handle = Handle;

    fn root_dir(&self) -> Handle {
        Handle::new(ROOT)
    }

    async fn lookup(&self, directory: &Handle, name: &filename3<'_>) -> Result<Handle, nfsstat3> {
        Tree::lookup(self, directory.as_u64(), name.as_ref()).map(Handle::new).map_err(said)
    }

    async fn getattr(&self, file: &Handle) -> Result<fattr3, nfsstat3> {
        Ok(metadata_to_fattr3(file.as_u64(), &self.metadata(file.as_u64()).map_err(said)?))
    }

    async fn read(&self, file: &Handle, offset: u64, count: u32) -> Result<(Vec<u8>, bool), nfsstat3> {
        Tree::read(self, file.as_u64(), offset, count).map_err(said)
    }

    async fn readdirplus(&self, directory: &Handle, after: u64) -> Result<impl ReadDirPlusIterator<Handle>, nfsstat3> {
        let names = self.names(directory.as_u64(), after).map_err(said)?.into_iter();
        Ok(Listing { tree: self, directory: directory.as_u64(), names })
    }

    async fn readlink(&self, _: &Handle) -> Result<nfspath3<'_>, nfsstat3> {
        Err(NOT_ASKED_FOR)
    }
}

impl NfsFileSystem for Tree {
    async fn setattr(&self, _: &Handle, _: sattr3) -> Result<fattr3, nfsstat3> {
        Err(NOT_ASKED_FOR)
    }

    async fn write(
        &self,
        file: &Handle,
        offset: u64,
        data: &[u8],
        stable: stable_how,
    ) -> Result<(fattr3, stable_how), nfsstat3> {
        let metadata = Tree::write(self, file.as_u64(), offset, data).map_err(said)?;
        if stable != stable_how::UNSTABLE {
            self.sync(file.as_u64()).map_err(said)?;
        }
        Ok((metadata_to_fattr3(file.as_u64(), &metadata), stable))
    }

    async fn create(&self, directory: &Handle, name: &filename3<'_>, _: sattr3) -> Result<(Handle, fattr3), nfsstat3> {
        let (number, metadata) = Tree::create(self, directory.as_u64(), name.as_ref()).map_err(said)?;
        Ok((Handle::new(number), metadata_to_fattr3(number, &metadata)))
    }

    async fn create_exclusive(&self, _: &Handle, _: &filename3<'_>, _: createverf3) -> Result<Handle, nfsstat3> {
        Err(NOT_ASKED_FOR)
    }

    async fn mkdir(&self, _: &Handle, _: &filename3<'_>) -> Result<(Handle, fattr3), nfsstat3> {
        Err(NOT_ASKED_FOR)
    }

    async fn remove(&self, directory: &Handle, name: &filename3<'_>) -> Result<(), nfsstat3> {
        Tree::remove(self, directory.as_u64(), name.as_ref()).map_err(said)
    }

    async fn rename<'a>(&self, _: &Handle, _: &filename3<'a>, _: &Handle, _: &filename3<'a>) -> Result<(), nfsstat3> {
        Err(NOT_ASKED_FOR)
    }

    async fn symlink<'a>(
        &self,
        _: &Handle,
        _: &filename3<'a>,
        _: &nfspath3<'a>,
        _: &sattr3,
    ) -> Result<(Handle, fattr3), nfsstat3> {
        Err(NOT_ASKED_FOR)
    }

    async fn commit(&self, file: &Handle, _: u64, _: u32) -> Result<(), nfsstat3> {
        self.sync(file.as_u64()).map_err(said)
    }
}
