//! A file or block device under a page cache.
//!
//! With `direct` there are two descriptors: one with `O_DIRECT` for whole blocks, and one without for the rest, which is the
//! unaligned end of a file at most, as long as the cache transfers whole pages. The kernel keeps the two coherent: a direct
//! request first writes out and drops what the system's cache has of the same bytes. Each request takes one of the two, decided
//! by [`Files::direct`]; a request that is whole blocks only at its beginning is short.
use super::{Backing, ReadTransfer, WriteTransfer};
use pagemill_os::Errno;
use pagemill_os::file::{self, DirectAlign, SLICES_MAX};
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Seek, SeekFrom};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

/// For file systems that do not say what `O_DIRECT` asks for: as large as the blocks of all common disks.
const BLOCK: DirectAlign = DirectAlign { memory: 4096, offset: 4096 };

/// A regular file or a block device as a [`Backing`].
///
/// Reads and writes go through the system's own cache, unless it is opened with [`direct`](FileOptions::direct). With
/// [`ring`](FileOptions::ring), transfers go through an io_uring, where there is one.
///
/// ```
/// use pagemill::{Backing, FileBacking};
/// use std::io::{IoSlice, IoSliceMut};
///
/// let path = std::env::temp_dir().join(format!("pagemill-example-{}", std::process::id()));
/// let file = FileBacking::options().create(true).open(&path)?;
/// assert_eq!(file.write_vectored_at(&[IoSlice::new(b"cached "), IoSlice::new(b"bytes")], 0)?, 12);
/// file.sync()?;
///
/// let file = FileBacking::options().read_only(true).open(&path)?;
/// let mut bytes = [0; 64];
/// assert_eq!(file.read_vectored_at(&mut [IoSliceMut::new(&mut bytes)], 7)?, 5);
/// assert_eq!((&bytes[..5], file.len()?), (&b"bytes"[..], 12));
/// # std::fs::remove_file(path)?;
/// # std::io::Result::Ok(())
/// ```
#[derive(Debug)]
pub struct FileBacking {
    #[cfg(feature = "uring")]
    ring: Option<super::uring::Ring>,
    files: Arc<Files>,
}

/// How a [`FileBacking`] is opened: by default to read and write a file that is there, through the system's cache.
///
/// ```
/// use pagemill::FileBacking;
/// let path = std::env::current_exe()?;
/// let options = FileBacking::options().read_only(true);
/// // Some file systems have no O_DIRECT.
/// let file = options.direct(true).open(&path).or_else(|_| options.open(&path))?;
/// println!("{file:?}");
/// # std::io::Result::Ok(())
/// ```
#[expect(clippy::struct_excessive_bools, reason = "independent switches, each set by name")]
#[derive(Clone, Copy, Debug, Default)]
#[must_use]
pub struct FileOptions {
    read_only: bool,
    direct: bool,
    create: bool,
    #[cfg(feature = "uring")]
    ring: bool,
}

/// The descriptors of a file.
#[derive(Debug)]
pub(super) struct Files {
    buffered: File,
    direct: Option<(File, DirectAlign)>,
    is_read_only: bool,
    is_device: bool,
}

impl FileOptions {
    /// Opens the file for reading only. Writes fail.
    pub fn read_only(mut self, read_only: bool) -> Self {
        self.read_only = read_only;
        self
    }

    /// Goes past the system's cache (`O_DIRECT`), so that pages are cached once. The unaligned end of a file still goes through
    /// it.
    pub fn direct(mut self, direct: bool) -> Self {
        self.direct = direct;
        self
    }

    /// Creates the file if it is not there.
    pub fn create(mut self, create: bool) -> Self {
        self.create = create;
        self
    }

    /// Transfers through an io_uring with a thread of its own, where the system has rings and permits them; see
    /// [`is_ring`](FileBacking::is_ring). Needs the feature `uring`.
    #[cfg(feature = "uring")]
    pub fn ring(mut self, ring: bool) -> Self {
        self.ring = ring;
        self
    }

    /// Opens a file.
    ///
    /// # Errors
    /// The system's. [`ErrorKind::InvalidInput`]: neither a regular file nor a block device, or read only and to be created.
    /// [`ErrorKind::Unsupported`]: the file system has no `O_DIRECT`.
    pub fn open(&self, path: impl AsRef<Path>) -> io::Result<FileBacking> {
        let path = path.as_ref();
        if self.read_only && self.create {
            return Err(invalid("a file cannot be created to be read only: choose one"));
        }
        let mut options = OpenOptions::new();
        options.read(true).write(!self.read_only).create(self.create);
        let buffered = options.open(path)?;
        let direct = match self.direct {
            true => Some(
                options
                    .create(false)
                    .custom_flags(file::O_DIRECT)
                    .open(path)
                    .map_err(|error| no_direct(path, error))?,
            ),
            false => None,
        };
        let direct = direct.map(|file| {
            let align = file::direct_align(file.as_fd()).unwrap_or(BLOCK);
            (file, align)
        });
        let files = Files::new(buffered, direct, self.read_only)?;
        Ok(self.begin(files))
    }

    fn begin(&self, files: Files) -> FileBacking {
        let files = Arc::new(files);
        FileBacking {
            #[cfg(feature = "uring")]
            ring: self.ring.then(|| super::uring::Ring::new(files.clone())).and_then(Result::ok),
            files,
        }
    }
}

#[cold]
fn no_direct(path: &Path, error: io::Error) -> io::Error {
    if error.raw_os_error() != Some(Errno::EINVAL.0) {
        return error;
    }
    let why = format!("{}: its file system has no O_DIRECT; open it without `direct`", path.display());
    io::Error::new(ErrorKind::Unsupported, why)
}

fn invalid(why: &'static str) -> io::Error {
    io::Error::new(ErrorKind::InvalidInput, why)
}

fn failed(errno: Errno) -> io::Error {
    io::Error::from_raw_os_error(errno.0)
}

impl FileBacking {
    /// Opens a file that is there, to read and write it through the system's cache.
    ///
    /// # Errors
    /// As [`FileOptions::open`].
    pub fn open(path: impl AsRef<Path>) -> io::Result<Self> {
        Self::options().open(path)
    }

    /// Choices to open a file with.
    pub fn options() -> FileOptions {
        FileOptions::default()
    }

    /// A file that the program has opened; read only if it is open for reading only.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`]: neither a regular file nor a block device, or open with `O_WRONLY`, `O_APPEND` or `O_DIRECT`.
    ///
    /// ```
    /// use pagemill::{Backing, FileBacking};
    /// let backing = FileBacking::from_file(std::fs::File::open(std::env::current_exe()?)?)?;
    /// assert!(backing.set_len(0).is_err(), "it is open for reading only");
    /// # std::io::Result::Ok(())
    /// ```
    pub fn from_file(file: File) -> io::Result<Self> {
        let opened = file::opened(file.as_fd()).map_err(failed)?;
        if !opened.is_readable {
            return Err(invalid("the file is open for writing only, and a cache reads"));
        }
        if opened.is_appending {
            return Err(invalid("the file is open with O_APPEND: each write would go to its end"));
        }
        if opened.is_direct {
            return Err(invalid("the file is open with O_DIRECT: open it with FileBacking::options().direct(true)"));
        }
        Ok(FileOptions::default().begin(Files::new(file, None, !opened.is_writable)?))
    }

    /// Whether whole blocks go past the system's cache.
    ///
    /// ```
    /// let file = pagemill::FileBacking::options().read_only(true).open(std::env::current_exe()?)?;
    /// assert!(!file.is_direct());
    /// # std::io::Result::Ok(())
    /// ```
    pub fn is_direct(&self) -> bool {
        self.files.direct.is_some()
    }

    /// Whether transfers go through an io_uring. They do not if the option [`ring`](FileOptions::ring) was not set, if the
    /// system has no rings or forbids them, or in the child of a fork.
    #[cfg(feature = "uring")]
    pub fn is_ring(&self) -> bool {
        self.ring.as_ref().is_some_and(super::uring::Ring::is_usable)
    }
}

impl Files {
    fn new(buffered: File, direct: Option<(File, DirectAlign)>, is_read_only: bool) -> io::Result<Self> {
        let kind = buffered.metadata()?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(invalid("only a regular file or a block device can be cached"));
        }
        Ok(Self { buffered, direct, is_read_only, is_device: kind.is_block_device() })
    }

    pub(super) fn len(&self) -> io::Result<u64> {
        match self.is_device {
            // Nothing else uses the position.
            true => (&self.buffered).seek(SeekFrom::End(0)),
            false => Ok(self.buffered.metadata()?.len()),
        }
    }

    /// Where a request at `at` goes, whose slices have these addresses and lengths. With the `O_DIRECT` descriptor, the bytes
    /// that may go there: whole blocks from the first slice on.
    fn direct(&self, at: u64, slices: impl Iterator<Item = (usize, usize)>) -> Option<(BorrowedFd<'_>, usize)> {
        let (file, align) = self.direct.as_ref()?;
        if !at.is_multiple_of(align.offset as u64) {
            return None;
        }
        let mut bytes = 0;
        for (_, len) in slices.take_while(|(addr, _)| addr.is_multiple_of(align.memory)) {
            bytes += len - len % align.offset;
            if !len.is_multiple_of(align.offset) {
                break;
            }
        }
        (bytes > 0).then(|| (file.as_fd(), bytes))
    }

    /// The descriptor for a request at `at` with these slices, and how many of them it may have.
    #[cfg(feature = "uring")]
    pub(super) fn route(&self, at: u64, lens: &[(usize, usize)]) -> (BorrowedFd<'_>, usize) {
        let all = (self.buffered.as_fd(), lens.len());
        let Some((file, bytes)) = self.direct(at, lens.iter().copied()) else { return all };
        let mut end = 0;
        let whole = lens.iter().take_while(|(_, len)| {
            end += len;
            end <= bytes
        });
        match whole.count() {
            0 => all,
            slices => (file, slices),
        }
    }

    pub(super) fn read(&self, into: &mut [IoSliceMut<'_>], at: u64) -> io::Result<usize> {
        let count = into.len().min(SLICES_MAX);
        let into = &mut into[..count];
        let addrs = into.iter().map(|slice| (slice.as_ptr().addr(), slice.len()));
        let Some((file, bytes)) = self.direct(at, addrs) else {
            return file::read_at(self.buffered.as_fd(), into, at).map_err(failed);
        };
        let mut left = bytes;
        let cut = into.iter_mut().map_while(|slice| {
            let len = slice.len().min(left);
            left -= len;
            (len > 0).then(|| IoSliceMut::new(&mut slice[..len]))
        });
        let mut cut: Vec<_> = cut.collect();
        file::read_at(file, &mut cut, at).map_err(failed)
    }

    pub(super) fn write(&self, from: &[IoSlice<'_>], at: u64) -> io::Result<usize> {
        self.refuse_read_only()?;
        let from = &from[..from.len().min(SLICES_MAX)];
        let Some((file, bytes)) = self.direct(at, from.iter().map(|slice| (slice.as_ptr().addr(), slice.len()))) else {
            return file::write_at(self.buffered.as_fd(), from, at).map_err(failed);
        };
        let mut left = bytes;
        let cut = from.iter().map_while(|slice| {
            let len = slice.len().min(left);
            left -= len;
            (len > 0).then(|| IoSlice::new(&slice[..len]))
        });
        let cut: Vec<_> = cut.collect();
        file::write_at(file, &cut, at).map_err(failed)
    }

    pub(super) fn refuse_read_only(&self) -> io::Result<()> {
        match self.is_read_only {
            true => Err(io::Error::new(ErrorKind::PermissionDenied, "the file is open for reading only")),
            false => Ok(()),
        }
    }
}

impl Backing for FileBacking {
    fn len(&self) -> io::Result<u64> {
        self.files.len()
    }

    fn read_vectored_at(&self, into: &mut [IoSliceMut<'_>], at: u64) -> io::Result<usize> {
        self.files.read(into, at)
    }

    fn write_vectored_at(&self, from: &[IoSlice<'_>], at: u64) -> io::Result<usize> {
        self.files.write(from, at)
    }

    /// `fdatasync(2)`. It also makes durable what went past the system's cache: that leaves the disk's own cache.
    fn sync(&self) -> io::Result<()> {
        self.files.buffered.sync_data()
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.files.refuse_read_only()?;
        if self.files.is_device {
            return Err(io::Error::new(ErrorKind::Unsupported, "the length of a block device cannot be changed"));
        }
        self.files.buffered.set_len(len)
    }

    fn start_read(&self, read: ReadTransfer) -> Option<ReadTransfer> {
        #[cfg(feature = "uring")]
        if let Some(ring) = &self.ring {
            return ring.read(read);
        }
        Some(read)
    }

    fn start_write(&self, write: WriteTransfer) -> Option<WriteTransfer> {
        #[cfg(feature = "uring")]
        if let Some(ring) = &self.ring
            && !self.files.is_read_only
        {
            return ring.write(write);
        }
        Some(write)
    }
}
