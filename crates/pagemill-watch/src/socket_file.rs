//! The socket's name in the file system: how it appears, whom it lets in, and how it goes.
//!
//! Invariants: under the name there is at no time a socket that others than its owner may open, nor one that does not
//! listen yet (F1: it is made in a folder that only its owner may enter, and linked from there). A socket on which
//! somebody answers, and whatever is no socket, is left alone (F2).
use std::fs::{self, DirBuilder, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// Removed when it is dropped, by the process that made it and if it still is what was made.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    /// Device and inode.
    id: (u64, u64),
    pid: u32,
}

impl SocketFile {
    /// Listens under this name.
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
            // Nobody could be told, and the next server replaces it.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Takes a socket away that a process left behind when it ended.
fn make_room(path: &Path, folder: &Path) -> io::Result<()> {
    let meta = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        meta => meta?,
    };
    if !meta.file_type().is_socket() {
        return Err(io::Error::new(ErrorKind::AlreadyExists, "there is a file of that name, which is no socket"));
    }
    refuse_if_live(path)?;
    // Somebody else may have made room and linked a live one meanwhile: looked at where nobody else can reach it.
    let aside = folder.join("old");
    match fs::rename(path, &aside) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        moved => moved?,
    }
    refuse_if_live(&aside).inspect_err(|_| {
        // Back where it was. If a third one has taken the name by now, that one is there.
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

/// A folder that only its owner may enter, removed with what is in it.
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
        // What stays behind is an empty or private folder, and nobody could be told.
        let _ = fs::remove_dir_all(&self.0);
    }
}
