//! A tree, served by `nfsserve`. It knows no COMMIT, and tells each client that its WRITE is on the disk.

use std::io::{self, ErrorKind};
use std::os::unix::ffi::OsStrExt;

use async_trait::async_trait;
use nfsserve::fs_util::metadata_to_fattr3;
use nfsserve::nfs::{fattr3, fileid3, filename3, nfspath3, nfsstat3, sattr3};
use nfsserve::tcp::{NFSTcp, NFSTcpListener};
use nfsserve::vfs::{DirEntry, NFSFileSystem, ReadDirResult, VFSCapabilities};

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

#[async_trait]
impl NFSFileSystem for Tree {
    fn capabilities(&self) -> VFSCapabilities {
        VFSCapabilities::ReadWrite
    }

    fn root_dir(&self) -> fileid3 {
        ROOT
    }

    async fn lookup(&self, directory: fileid3, name: &filename3) -> Result<fileid3, nfsstat3> {
        Tree::lookup(self, directory, name).map_err(said)
    }

    async fn getattr(&self, number: fileid3) -> Result<fattr3, nfsstat3> {
        Ok(metadata_to_fattr3(number, &self.metadata(number).map_err(said)?))
    }

    async fn setattr(&self, _: fileid3, _: sattr3) -> Result<fattr3, nfsstat3> {
        Err(NOT_ASKED_FOR)
    }

    async fn read(&self, number: fileid3, offset: u64, count: u32) -> Result<(Vec<u8>, bool), nfsstat3> {
        Tree::read(self, number, offset, count).map_err(said)
    }

    async fn write(&self, number: fileid3, offset: u64, data: &[u8]) -> Result<fattr3, nfsstat3> {
        let metadata = Tree::write(self, number, offset, data).map_err(said)?;
        self.sync(number).map_err(said)?;
        Ok(metadata_to_fattr3(number, &metadata))
    }

    async fn create(&self, directory: fileid3, name: &filename3, _: sattr3) -> Result<(fileid3, fattr3), nfsstat3> {
        let (number, metadata) = Tree::create(self, directory, name).map_err(said)?;
        Ok((number, metadata_to_fattr3(number, &metadata)))
    }

    async fn create_exclusive(&self, _: fileid3, _: &filename3) -> Result<fileid3, nfsstat3> {
        Err(NOT_ASKED_FOR)
    }

    async fn mkdir(&self, _: fileid3, _: &filename3) -> Result<(fileid3, fattr3), nfsstat3> {
        Err(NOT_ASKED_FOR)
    }

    async fn remove(&self, directory: fileid3, name: &filename3) -> Result<(), nfsstat3> {
        Tree::remove(self, directory, name).map_err(said)
    }

    async fn rename(&self, _: fileid3, _: &filename3, _: fileid3, _: &filename3) -> Result<(), nfsstat3> {
        Err(NOT_ASKED_FOR)
    }

    async fn readdir(&self, directory: fileid3, after: fileid3, most: usize) -> Result<ReadDirResult, nfsstat3> {
        let names = self.names(directory, after).map_err(said)?;
        let end = names.len() <= most;
        let entry = |name: &std::ffi::OsString| {
            let fileid = Tree::lookup(self, directory, name.as_bytes())?;
            let attr = metadata_to_fattr3(fileid, &self.metadata(fileid)?);
            Ok(DirEntry { fileid, name: name.as_bytes().into(), attr })
        };
        let entries = names.iter().take(most).map(entry).collect::<io::Result<_>>().map_err(said)?;
        Ok(ReadDirResult { entries, end })
    }

    async fn symlink(
        &self,
        _: fileid3,
        _: &filename3,
        _: &nfspath3,
        _: &sattr3,
    ) -> Result<(fileid3, fattr3), nfsstat3> {
        Err(NOT_ASKED_FOR)
    }

    async fn readlink(&self, _: fileid3) -> Result<nfspath3, nfsstat3> {
        Err(NOT_ASKED_FOR)
    }
}
