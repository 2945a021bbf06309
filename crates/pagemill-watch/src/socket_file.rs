//! The socket's file: how it is made, protected and removed.
//!
//! Invariants: F1, the name never leads to a socket that another user may open, or that does not listen yet: the socket is made
//! in a folder that only its owner may enter, and linked from there. F2, a socket on which a process answers is left alone, and
//! so is any file that is no socket.
use std::fs::{self, DirBuilder, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// Dropping it removes the file, in the process that made it, and only if it is still the same file.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    /// Device and inode.
    id: (u64, u64),
    pid: u32,
}

impl SocketFile {
    /// Makes a socket that listens at this path.
    pub(super) fn make(path: &Path) -> io::Result<(UnixListener, Self)> {
        if path.file_name().is_none() {
            return Err(io::Error::new(ErrorKind::InvalidInput, "a socket needs a file's name"));
        }
        let folder = Folder::beside(path)?;
        let made = folder.0.join("s");
        let listener = UnixListener::bind(&made)?;
        fs::set_permissions(&made, Permissions::from_mode(0o600))?;
        let meta = fs::symlink_metadata(&made)?;
        loop {
            match fs::hard_link(&made, path) {
                Err(error) if error.kind() == ErrorKind::AlreadyExists => make_room(path, &folder.0)?,
                linked => break linked?,
            }
        }
        let id = (meta.dev(), meta.ino());
        Ok((listener, Self { path: path.to_owned(), id, pid: std::process::id() }))
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
    /// False in the child of a fork: the file belongs to its parent.
    pub(super) fn is_ours(&self) -> bool {
        self.pid == std::process::id()
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let is_it = |meta: fs::Metadata| (meta.dev(), meta.ino()) == self.id;
        if self.is_ours() && fs::symlink_metadata(&self.path).is_ok_and(is_it) {
            // There is no way to report an error here, and the next server replaces the file.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Removes a socket that a dead process left behind.
fn make_room(path: &Path, folder: &Path) -> io::Result<()> {
    let meta = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        meta => meta?,
    };
    if !meta.file_type().is_socket() {
        return Err(io::Error::new(ErrorKind::AlreadyExists, "there is a file of that name, which is no socket"));
    }
    refuse_if_live(path)?;
    // Another server may have removed it and linked a live one meanwhile. So it is moved away first, and checked again where
    // only this process reaches it.
    let aside = folder.join("old");
    match fs::rename(path, &aside) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        moved => moved?,
    }
    refuse_if_live(&aside).inspect_err(|_| {
        // Puts it back. If a third server has taken the name by now, that one stays.
        let _ = fs::hard_link(&aside, path);
    })?;
    fs::remove_file(&aside)
}

fn refuse_if_live(path: &Path) -> io::Result<()> {
    match UnixStream::connect(path) {
        Ok(_) => Err(io::Error::new(ErrorKind::AddrInUse, "another process answers there already")),
        Err(error) if matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::NotFound) => Ok(()),
        Err(error) => Err(error),
    }
}

/// A folder that only its owner may enter; removed with its contents.
struct Folder(PathBuf);

impl Folder {
    fn beside(path: &Path) -> io::Result<Self> {
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let pid = std::process::id();
        for number in 0.. {
            let folder = parent.join(format!(".pm{pid}-{number}"));
            match DirBuilder::new().mode(0o700).create(&folder) {
                Err(error) if error.kind() == ErrorKind::AlreadyExists && number < 1000 => {}
                made => return made.map(|()| Self(folder)),
            }
        }
        unreachable!("the last number returns")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // There is no way to report an error here; what may stay is an empty or private folder.
        let _ = fs::remove_dir_all(&self.0);
    }
}
