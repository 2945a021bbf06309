//! The two files of a copy: which files are accepted, and how the complete copy gets its name.
use std::fs::{self, File, Metadata, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use tempfile::NamedTempFile;

use crate::failure::{Failure, said};

/// The file to copy.
pub(crate) struct Source {
    pub(crate) path: PathBuf,
    pub(crate) file: File,
    meta: Metadata,
    /// Its size. None for files such as those in /proc, which claim 0 and have more.
    pub(crate) size: Option<u64>,
}

/// What happened to the source while it was copied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fate {
    Unchanged,
    /// Bytes were added behind those that were copied.
    Grew {
        bytes: u64,
    },
    /// Somebody wrote to it.
    Written,
}

impl Source {
    pub(crate) fn open(path: &Path) -> Result<Self, Failure> {
        let failed = |error: io::Error| {
            let next = match error.kind() {
                io::ErrorKind::NotFound => "check the name",
                io::ErrorKind::PermissionDenied => "ask its owner for the right to read it",
                _ => "check that it can be read",
            };
            Failure::new(format!("can't read {}", path.display()), said(&error)).next(next)
        };
        // Checked before it is opened, because opening a device may have an effect.
        refuse_unless_file(path, &fs::metadata(path).map_err(failed)?)?;
        // If it has become a pipe in between, opening it must not wait for a writer.
        let flags = OFlags::NONBLOCK.bits() as i32;
        let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(failed)?;
        let meta = file.metadata().map_err(failed)?;
        refuse_unless_file(path, &meta)?;
        let size = (meta.len() > 0 || !has_more(&file)).then_some(meta.len());
        if size.is_some() {
            // Reads of a disk may block. Reads of a file that the kernel generates must not: /proc/kmsg would block for ever.
            rustix::fs::fcntl_setfl(&file, OFlags::empty()).map_err(|error| failed(error.into()))?;
        }
        Ok(Self { path: path.to_owned(), file, meta, size })
    }

    /// What has happened to it since it was opened. `end` is where reading ended.
    ///
    /// # Errors
    /// If it has become shorter: its copy would be a file that never existed.
    pub(crate) fn fate(&self, end: u64) -> Result<Fate, Failure> {
        let now = self.file.metadata().map_err(|error| self.unreadable(&error))?;
        let Some(size) = self.size else { return Ok(Fate::Unchanged) };
        if now.len() < size {
            let why = format!("it shrank from {size} to {} bytes while it was copied", now.len());
            let next = "copy it again when nobody writes to it";
            return Err(Failure::new(self.path.display().to_string(), why).next(next));
        }
        let is_written = (now.mtime(), now.mtime_nsec()) != (self.meta.mtime(), self.meta.mtime_nsec());
        if now.len() > size && end >= size {
            Ok(Fate::Grew { bytes: now.len() - size })
        } else if is_written {
            Ok(Fate::Written)
        } else {
            Ok(Fate::Unchanged)
        }
    }

    pub(crate) fn unreadable(&self, error: &io::Error) -> Failure {
        let next = "check the disk that it is on, and copy it again";
        Failure::new(format!("can't read {}", self.path.display()), said(error)).next(next)
    }

    fn is_same(&self, other: &Metadata) -> bool {
        (self.meta.dev(), self.meta.ino()) == (other.dev(), other.ino())
    }
}

/// Whether a file that claims to be empty has contents. If it cannot be read, the copy will report that.
fn has_more(file: &File) -> bool {
    use std::os::unix::fs::FileExt;
    !matches!(file.read_at(&mut [0], 0), Ok(0))
}

fn refuse_unless_file(path: &Path, meta: &Metadata) -> Result<(), Failure> {
    let kind = meta.file_type();
    let (is, next) = if kind.is_file() {
        return Ok(());
    } else if kind.is_dir() {
        ("is a directory", "name a file; `cp -r` copies directories")
    } else if kind.is_fifo() {
        ("is a pipe", "name a file; `cat` copies from and to pipes")
    } else if kind.is_socket() {
        ("is a socket", "name a file")
    } else if kind.is_block_device() {
        ("is a block device", "name a file; `dd` copies devices")
    } else {
        ("is a character device", "name a file; `cat` copies from and to devices")
    };
    Err(Failure::new(path.display().to_string(), is).next(next))
}

/// The copy: a file with a temporary name, in the destination's directory.
pub(crate) struct Target {
    temp: NamedTempFile,
    path: PathBuf,
    is_forced: bool,
}

impl Target {
    pub(crate) fn create(path: &Path, source: &Source, is_forced: bool) -> Result<Self, Failure> {
        let path = Self::settle(path, source, is_forced)?;
        let folder = folder_of(&path);
        let temp = tempfile::Builder::new().prefix(".pagemill-").suffix(".partial").tempfile_in(folder);
        let temp = temp.map_err(|error| {
            let next = match error.kind() {
                io::ErrorKind::NotFound => "make that directory first",
                io::ErrorKind::NotADirectory => "name a file in a directory",
                _ => "choose a place where you may write",
            };
            Failure::new(format!("can't make a file in {}", folder.display()), said(&error)).next(next)
        })?;
        Ok(Self { temp, path, is_forced })
    }

    /// Checks the destination, and returns the path that the copy will have.
    fn settle(path: &Path, source: &Source, is_forced: bool) -> Result<PathBuf, Failure> {
        let shown = path.display().to_string();
        match fs::symlink_metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let is_file_name = path.file_name().is_some() && !shown.ends_with('/');
                return if is_file_name {
                    Ok(path.to_owned())
                } else {
                    Err(Failure::new(format!("{shown:?}"), "is not the name of a file").next("name the file to make"))
                };
            }
            Err(error) => {
                let next = "choose another name";
                return Err(Failure::new(format!("can't make {shown}"), said(&error)).next(next));
            }
            Ok(_) => {}
        }
        let Ok(meta) = fs::metadata(path) else {
            let next = "remove the link, or name what it should lead to";
            return Err(Failure::new(shown, "is a link that leads nowhere").next(next));
        };
        if source.is_same(&meta) {
            let what = format!("{} and {shown}", source.path.display());
            return Err(Failure::new(what, "are the same file").next("name another one for the copy"));
        }
        if meta.is_dir() {
            let name = source.path.file_name().unwrap_or_default();
            let next = format!("name the file to make in it, such as {}", path.join(name).display());
            return Err(Failure::new(shown, "is a directory").next(next));
        }
        refuse_unless_file(path, &meta)?;
        if !is_forced {
            let next = "choose another name, or replace it with --force";
            return Err(Failure::new(shown, "exists already").next(next));
        }
        // The file that a link leads to is replaced, not the link.
        fs::canonicalize(path).map_err(|error| Failure::new(shown, said(&error)).next("choose another name"))
    }

    pub(crate) fn file(&self) -> &File {
        self.temp.as_file()
    }

    pub(crate) fn unwritable(&self, error: &io::Error) -> Failure {
        let next = match error.kind() {
            io::ErrorKind::StorageFull => "free some space there, or copy to another file system",
            io::ErrorKind::QuotaExceeded => "free some of your quota, or copy to another file system",
            io::ErrorKind::FileTooLarge => "raise the limit on file sizes (`ulimit -f`), or choose another file system",
            _ => "check the disk that it is on, and copy again",
        };
        Failure::new(format!("can't write {}", self.path.display()), said(error)).next(next)
    }

    /// Gives the copy its size and permissions. Then it is complete.
    pub(crate) fn finish(&self, source: &Source, size: u64, is_synced: bool) -> Result<(), Failure> {
        // This also makes a hole at the end.
        self.file().set_len(size).map_err(|error| self.unwritable(&error))?;
        // The copy may belong to another user, so set-user-ID and the like are not kept.
        let mode = source.meta.mode() & 0o777;
        self.file().set_permissions(Permissions::from_mode(mode)).map_err(|error| self.unwritable(&error))?;
        if is_synced {
            self.file().sync_all().map_err(|error| self.unwritable(&error))?;
        }
        Ok(())
    }

    /// Gives the complete copy its name, in one step.
    pub(crate) fn name(self, is_synced: bool) -> Result<(), Failure> {
        let is_replacing = self.is_replacing();
        let Self { temp, path, is_forced } = self;
        let named = if is_forced { temp.persist(&path) } else { temp.persist_noclobber(&path) };
        named.map_err(|refused| {
            let what = format!("can't name the copy {}", path.display());
            let failure = match refused.error.kind() {
                io::ErrorKind::AlreadyExists => Failure::new(what, "somebody else made that file meanwhile")
                    .next("choose another name, or replace it with --force"),
                _ => Failure::new(what, said(&refused.error)).next("choose another name"),
            };
            failure.left(removed(refused.file, &path, is_replacing))
        })?;
        if is_synced {
            File::open(folder_of(&path)).and_then(|folder| folder.sync_all()).map_err(|error| {
                let what = format!("{} is whole, but its name may not last", path.display());
                Failure::new(what, said(&error)).next("run `sync`")
            })?;
        }
        Ok(())
    }

    /// Removes the unfinished copy, and returns a message about what is there now.
    pub(crate) fn discard(self) -> String {
        let is_replacing = self.is_replacing();
        removed(self.temp, &self.path, is_replacing)
    }

    fn is_replacing(&self) -> bool {
        self.is_forced && self.path.exists()
    }
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."))
}

fn removed(temp: NamedTempFile, path: &Path, is_replacing: bool) -> String {
    let partial = temp.path().to_owned();
    match temp.close() {
        Ok(()) if is_replacing => format!("{} is as it was", path.display()),
        Ok(()) => format!("{} was not made", path.display()),
        Err(error) => format!("the unfinished copy {} could not be removed: {}", partial.display(), said(&error)),
    }
}
