//! The files of `pagemill read`: which are accepted, and what can become of one while it is read.
use std::collections::HashMap;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use pagemill::{Advice, CachedFile, FileBacking, PageCache};
use rustix::fs::OFlags;

use super::{Engine, ReadArgs};
use crate::failure::{Failure, said};

/// An open file.
pub(super) struct Source {
    path: PathBuf,
    pub(super) file: CachedFile,
    version: Version,
}

/// Which file it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Identity(u64, u64);

impl Identity {
    fn of(meta: &Metadata) -> Self {
        Self(meta.dev(), meta.ino())
    }

    /// The regular file that standard output is, if it is one.
    pub(super) fn of_output() -> Option<Self> {
        let out = io::stdout().as_fd().try_clone_to_owned().ok()?;
        let meta = File::from(out).metadata().ok()?;
        meta.is_file().then(|| Self::of(&meta))
    }
}

/// What changes with a file's contents.
#[derive(PartialEq, Eq)]
struct Version(Identity, u64, [i64; 2], [i64; 2]);

impl Version {
    fn of(meta: &Metadata) -> Self {
        let (written, changed) = ([meta.mtime(), meta.mtime_nsec()], [meta.ctime(), meta.ctime_nsec()]);
        Self(Identity::of(meta), meta.len(), written, changed)
    }
}

/// Files that are named again later.
#[derive(Default)]
pub(super) struct Kept(HashMap<PathBuf, Source>);

impl Kept {
    pub(super) fn put(&mut self, source: Source) {
        self.0.insert(source.path.clone(), source);
    }

    /// Another reader of a file that was read before, unless it has changed since.
    pub(super) fn take(&mut self, path: &Path, advice: Advice) -> Option<Source> {
        let source = self.0.remove(path)?;
        let is_same = fs::metadata(path).is_ok_and(|meta| Version::of(&meta) == source.version);
        let file = is_same.then(|| source.file.reopen())?;
        file.advise(advice, 0..0);
        Some(Source { file, ..source })
    }
}

/// What a file or block device has, as far as that is known before it is read.
pub(super) fn size_of(path: &Path) -> u64 {
    let Ok(meta) = fs::metadata(path) else { return 0 };
    if meta.file_type().is_block_device() {
        use std::io::{Seek, SeekFrom};
        return File::open(path).and_then(|mut device| device.seek(SeekFrom::End(0))).unwrap_or(0);
    }
    if meta.is_file() { meta.len() } else { 0 }
}

impl Source {
    pub(super) fn open(
        path: &Path,
        cache: &PageCache,
        args: &ReadArgs,
        output: Option<Identity>,
    ) -> Result<Self, Failure> {
        let shown = || path.display().to_string();
        let failed = |error: io::Error| {
            let next = match error.kind() {
                ErrorKind::NotFound => "check the name",
                ErrorKind::PermissionDenied => "ask its owner for the right to read it",
                _ => "check that it can be read",
            };
            Failure::new(format!("can't read {}", shown()), said(&error)).next(next)
        };
        // Checked before it is opened, because opening a pipe waits, and opening a device may have an effect.
        let meta = fs::metadata(path).map_err(failed)?;
        refuse_unless_cacheable(path, &meta)?;
        if output == Some(Identity::of(&meta)) {
            let why = "is standard output's file too: it would be read without end";
            return Err(Failure::new(shown(), why).next("write to another file"));
        }
        if meta.is_file() && meta.blocks() == 0 && has_another_length(path, meta.len()).map_err(failed)? {
            let why = format!("does not say how long it is: it claims {} bytes", meta.len());
            return Err(Failure::new(shown(), why).next("use `cat`"));
        }
        let opened = FileBacking::options().read_only(true).direct(args.direct).open(path);
        let backing = opened.map_err(|error| match error.kind() {
            ErrorKind::Unsupported if args.direct => {
                let what = format!("can't read {} past the system's cache", shown());
                Failure::new(what, "its file system has no O_DIRECT").next("leave --direct out")
            }
            _ => failed(error),
        })?;
        let backing = match args.engine {
            Engine::Plain => backing,
            Engine::Uring => backing.with_ring(),
        };
        if args.engine == Engine::Uring && !backing.is_ring() {
            let what = format!("can't read {} by io_uring", shown());
            return Err(Failure::new(what, "the system has none, or forbids it").next("leave --engine out"));
        }
        let file = cache.open(backing).map_err(failed)?;
        file.advise(args.hint.advice(), 0..0);
        Ok(Self { path: path.to_owned(), file, version: Version::of(&meta) })
    }

    /// Whether the file, which was read up to `at`, has become longer.
    ///
    /// # Errors
    /// It has become shorter than what was read.
    pub(super) fn grown(&self, at: u64) -> Result<bool, Failure> {
        let len = self.file.refresh().map_err(|error| self.unreadable(at, &error))?;
        if len < at {
            return Err(self.shrunk(at, len));
        }
        Ok(len > at)
    }

    /// What a failed read at `at` means. None: the file has another length now, and is read on.
    pub(super) fn trouble(&self, at: u64, error: &io::Error) -> Option<Failure> {
        let before = self.file.len();
        match self.file.refresh() {
            Ok(len) if len < at => Some(self.shrunk(at, len)),
            Ok(len) if error.kind() == ErrorKind::UnexpectedEof && len != before => None,
            _ => Some(self.unreadable(at, error)),
        }
    }

    fn shrunk(&self, at: u64, len: u64) -> Failure {
        let why = format!("it shrank to {len} bytes while it was read, and {at} are written");
        Failure::new(self.path.display().to_string(), why).next("read it again when nobody writes to it")
    }

    fn unreadable(&self, at: u64, error: &io::Error) -> Failure {
        let what = format!("can't read {} from byte {at} on", self.path.display());
        Failure::new(what, said(error)).next("check the disk that it is on")
    }
}

/// Whether a file without blocks has another length than it claims, as those in /proc and /sys do.
fn has_another_length(path: &Path, len: u64) -> io::Result<bool> {
    // Without blocking: /proc/kmsg would block for ever.
    let file = OpenOptions::new().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path)?;
    let has = |at| !matches!(file.read_at(&mut [0], at), Ok(0));
    Ok(has(len) || len > 0 && !has(len - 1))
}

fn refuse_unless_cacheable(path: &Path, meta: &Metadata) -> Result<(), Failure> {
    let kind = meta.file_type();
    let (is, next) = if kind.is_file() || kind.is_block_device() {
        return Ok(());
    } else if kind.is_dir() {
        ("is a directory", "name a file")
    } else if kind.is_fifo() {
        ("is a pipe, and has no pages to read ahead", "use `cat`")
    } else if kind.is_socket() {
        ("is a socket", "name a file")
    } else {
        ("is a character device, and has no pages to read ahead", "use `cat`")
    };
    Err(Failure::new(path.display().to_string(), is).next(next))
}
