//! A file or block device under a page cache.
//!
//! With `direct` there are two descriptors: one with `O_DIRECT` for whole blocks, and one without for the rest, which is the
//! unaligned end of a file at most, as long as the cache transfers whole pages. The kernel keeps the two coherent: a direct
//! request first writes out and drops what the system's cache has of the same bytes. Each request takes one of the two, decided
//! by [`Files::direct`]; a request that is whole blocks only at its beginning is short.
//!
//! One call to `fdatasync` serves both: what it makes durable belongs to the file, not to the descriptor.
use super::files::{Files, check, failed};
use super::{Backing, ReadTransfer, WriteTransfer};
use pagemill_os::Errno;
use pagemill_os::file::{self, DirectAlign};
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;

/// For file systems that do not say what `O_DIRECT` asks for: as large as the blocks of all common disks.
const BLOCK: DirectAlign = DirectAlign { memory: 4096, offset: 4096 };

/// A regular file or a block device as a [`Backing`].
///
/// Reads and writes go through the system's own cache, unless it is opened with [`direct`](FileOptions::direct). With
/// the feature `uring`, transfers can go through an io_uring: `with_ring`.
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

/// How a [`FileBacking`] is opened: by default to read and write a file that is there, through the system's cache. Files that
/// do not say how long they are, such as those of `/proc`, are empty to it.
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
#[derive(Clone, Copy, Debug, Default)]
#[must_use]
pub struct FileOptions {
    read_only: bool,
    direct: bool,
    create: bool,
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
        // Opening a pipe waits for its other end.
        if let Ok(found) = path.metadata() {
            check(found.file_type())?;
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
        Ok(FileBacking::new(files))
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

impl FileBacking {
    fn new(files: Files) -> Self {
        Self {
            #[cfg(feature = "uring")]
            ring: None,
            files: Arc::new(files),
        }
    }

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
        Ok(Self::new(Files::new(file, None, !opened.is_writable)?))
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

    /// Transfers through an io_uring with a thread of its own. If the system has no rings or forbids them, the threads of the
    /// cache transfer as without it: see [`is_ring`](Self::is_ring). Dropping the backing waits for transfers under way. Needs
    /// the feature `uring`.
    ///
    /// ```
    /// let file = pagemill::FileBacking::options().read_only(true).open(std::env::current_exe()?)?.with_ring();
    /// println!("{}", if file.is_ring() { "a ring" } else { "no ring here" });
    /// # std::io::Result::Ok(())
    /// ```
    #[cfg(feature = "uring")]
    #[must_use]
    pub fn with_ring(mut self) -> Self {
        self.ring = super::uring::Ring::new(self.files.clone()).ok();
        self
    }

    /// Whether transfers go through an io_uring. They do not without [`with_ring`](Self::with_ring), if the system has no rings
    /// or forbids them, or in the child of a fork.
    #[cfg(feature = "uring")]
    pub fn is_ring(&self) -> bool {
        self.ring.as_ref().is_some_and(super::uring::Ring::is_usable)
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

#[cfg(all(test, not(any(miri, shuttle))))]
mod tests {
    use super::super::backing::Io;
    use super::super::testing::{Memory, read_of, some_bytes, write_of};
    use super::super::workers::{Urgency, Workers};
    use super::{Backing, FileBacking, FileOptions};
    use std::fs::File;
    use std::io::{ErrorKind, IoSlice, IoSliceMut};
    use std::path::PathBuf;
    use std::sync::Arc;

    const PAGE: usize = 4096;

    fn dir() -> tempfile::TempDir {
        // Beside the build, which is on a disk more often than the system's folder for temporary files.
        let beside = std::env::current_exe().unwrap().parent().map(PathBuf::from).unwrap();
        tempfile::tempdir_in(beside).or_else(|_| tempfile::tempdir()).unwrap()
    }

    /// The options that this file system takes.
    fn kinds(dir: &tempfile::TempDir) -> Vec<FileOptions> {
        let buffered = FileBacking::options().create(true);
        match buffered.direct(true).open(dir.path().join("probe")) {
            Ok(_) => vec![buffered, buffered.direct(true)],
            Err(why) => {
                println!("skipped: {why}");
                vec![buffered]
            }
        }
    }

    /// Reads through a transfer into pages; `at` is aligned.
    fn read(backing: FileBacking, at: u64, pages: usize) -> (usize, Vec<u8>) {
        let mut memory = Memory::pages(pages);
        let (read, done) = read_of(&mut memory, at, &vec![PAGE; pages]);
        Io::new(Arc::new(backing), Arc::new(Workers::new(1))).read(read, Urgency::Awaited);
        let bytes = done.recv().unwrap().unwrap();
        (bytes, memory.read(&vec![PAGE; pages])[..bytes].to_vec())
    }

    fn write(backing: FileBacking, at: u64, lens: &[usize], bytes: &[u8]) -> usize {
        let mut memory = Memory::pages(lens.len());
        memory.fill(lens, bytes);
        let (write, done) = write_of(&mut memory, at, lens);
        let io = Io::new(Arc::new(backing), Arc::new(Workers::new(1)));
        io.write(write, Urgency::Ahead);
        let bytes = done.recv().unwrap().unwrap();
        io.sync().unwrap();
        bytes
    }

    #[test]
    fn what_was_written_is_read_with_an_unaligned_end() {
        let dir = dir();
        for options in kinds(&dir) {
            for end in [1, 511, 512, 513, PAGE - 1, PAGE] {
                let path = dir.path().join(format!("{options:?}{end}"));
                let bytes = some_bytes(2 * PAGE + end);
                assert_eq!(write(options.open(&path).unwrap(), 0, &[PAGE, PAGE, end], &bytes), bytes.len());
                assert_eq!(std::fs::read(&path).unwrap(), bytes);
                assert_eq!(read(options.open(&path).unwrap(), 0, 4), (bytes.len(), bytes.clone()), "{options:?} {end}");
                assert_eq!(read(options.open(&path).unwrap(), PAGE as u64, 4).1, bytes[PAGE..]);
                assert_eq!(read(options.open(&path).unwrap(), 16 * PAGE as u64, 1).0, 0);
            }
        }
    }

    #[test]
    fn a_write_beyond_the_end_lengthens_the_file_and_the_gap_reads_zero() {
        let dir = dir();
        for options in kinds(&dir) {
            let path = dir.path().join(format!("{options:?}"));
            let bytes = some_bytes(PAGE + 100);
            std::fs::write(&path, b"begin").unwrap();
            write(options.open(&path).unwrap(), 2 * PAGE as u64, &[PAGE, 100], &bytes);
            let backing = options.open(&path).unwrap();
            assert_eq!(backing.len().unwrap(), 3 * PAGE as u64 + 100);
            let (n, all) = read(backing, 0, 4);
            assert_eq!((n, &all[..5], &all[2 * PAGE..]), (3 * PAGE + 100, &b"begin"[..], &bytes[..]));
            assert!(all[5..2 * PAGE].iter().all(|&byte| byte == 0));
            let backing = options.open(&path).unwrap();
            backing.set_len(7).unwrap();
            assert_eq!((backing.len().unwrap(), std::fs::read(&path).unwrap()), (7, b"begin\0\0".to_vec()));
        }
    }

    /// Neither memory nor length of a block's size: for the buffered descriptor, or cut.
    #[test]
    fn unaligned_requests_are_served_too() {
        let dir = dir();
        for options in kinds(&dir) {
            let path = dir.path().join(format!("{options:?}"));
            let bytes = some_bytes(5 * PAGE);
            std::fs::write(&path, &bytes).unwrap();
            let backing = options.open(&path).unwrap();
            let mut memory = vec![0; 3 * PAGE];
            for (at, first, len) in [(0, 1, 2 * PAGE), (3, 0, PAGE), (PAGE, 8, 100), (0, 0, 2 * PAGE + 9)] {
                let slices = &mut [IoSliceMut::new(&mut memory[first..first + len])];
                let n = backing.read_vectored_at(slices, at as u64).unwrap();
                assert!(n > 0 && n <= len);
                assert_eq!(memory[first..first + n], bytes[at..at + n]);
            }
        }
    }

    #[test]
    fn a_read_only_file_refuses_changes_and_says_why() {
        let dir = dir();
        let path = dir.path().join("file");
        std::fs::write(&path, b"kept").unwrap();
        let options = FileBacking::options().read_only(true);
        for backing in [options.open(&path).unwrap(), FileBacking::from_file(File::open(&path).unwrap()).unwrap()] {
            let refused = backing.write_vectored_at(&[IoSlice::new(b"new")], 0).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::PermissionDenied);
            assert_eq!(backing.set_len(0).unwrap_err().kind(), ErrorKind::PermissionDenied);
            backing.sync().unwrap();
            assert_eq!(read(backing, 0, 1).1, b"kept");
        }
    }

    #[test]
    fn what_cannot_be_cached_is_refused() {
        let dir = dir();
        let path = dir.path().join("file");
        let options = FileBacking::options();
        assert_eq!(options.open(&path).unwrap_err().kind(), ErrorKind::NotFound);
        assert_eq!(options.create(true).read_only(true).open(&path).unwrap_err().kind(), ErrorKind::InvalidInput);
        options.create(true).open(&path).unwrap();
        assert_eq!(options.read_only(true).open("/dev/null").unwrap_err().kind(), ErrorKind::InvalidInput);
        let writing = File::options().write(true).open(&path).unwrap();
        let appending = File::options().read(true).append(true).open(&path).unwrap();
        for file in [writing, appending] {
            assert_eq!(FileBacking::from_file(file).unwrap_err().kind(), ErrorKind::InvalidInput);
        }
    }

    #[test]
    fn a_file_system_without_o_direct_is_named() {
        // FUSE, overlays and old tmpfs: none is sure to be there, so the error is made from the system's.
        let refused = super::no_direct("/some/file".as_ref(), std::io::Error::from_raw_os_error(libc::EINVAL));
        assert_eq!(refused.kind(), ErrorKind::Unsupported);
        assert!(refused.to_string().contains("/some/file") && refused.to_string().contains("without `direct`"));
        let other = super::no_direct("/some/file".as_ref(), std::io::Error::from_raw_os_error(libc::EACCES));
        assert_eq!(other.raw_os_error(), Some(libc::EACCES));
    }

    /// A block device needs a privilege to be opened: the first loop or RAM disk that there is.
    #[test]
    fn a_block_device_has_its_own_length_and_keeps_it() {
        let devices = ["/dev/vda", "/dev/sda", "/dev/nvme0n1", "/dev/loop0", "/dev/ram0"];
        let open = |path| FileBacking::options().read_only(true).direct(true).open(path).ok();
        let Some(backing) = devices.into_iter().find_map(open) else {
            println!("skipped: no block device can be opened");
            return;
        };
        assert_eq!(backing.set_len(0).unwrap_err().kind(), ErrorKind::PermissionDenied);
        let len = backing.len().unwrap();
        let end = len - len % PAGE as u64;
        let (n, _) = read(backing, end.saturating_sub(PAGE as u64), 2);
        assert_eq!(n as u64, len - end.saturating_sub(PAGE as u64));
    }

    #[cfg(feature = "uring")]
    mod ring {
        use super::*;

        #[test]
        fn a_ring_moves_the_same_bytes() {
            let dir = dir();
            for options in kinds(&dir) {
                for end in [1, 512, PAGE - 1, PAGE] {
                    let path = dir.path().join(format!("{options:?}{end}"));
                    let open = || options.open(&path).unwrap().with_ring();
                    if !open().is_ring() {
                        println!("skipped: the system refuses io_uring");
                        return;
                    }
                    let bytes = some_bytes(2 * PAGE + end);
                    assert_eq!(write(open(), 0, &[PAGE, PAGE, end], &bytes), bytes.len());
                    assert_eq!(std::fs::read(&path).unwrap(), bytes);
                    assert_eq!(read(open(), 0, 4), (bytes.len(), bytes.clone()), "{options:?} {end}");
                    assert_eq!(read(open(), 16 * PAGE as u64, 1).0, 0);
                }
            }
        }

        /// More than the ring takes: the others are handed back, and threads read them.
        #[test]
        fn many_reads_at_once_all_end() {
            let dir = dir();
            let path = dir.path().join("file");
            let bytes = some_bytes(64 * PAGE);
            std::fs::write(&path, &bytes).unwrap();
            let backing = FileBacking::open(&path).unwrap().with_ring();
            let io = Io::new(Arc::new(backing), Arc::new(Workers::new(2)));
            let mut reads: Vec<_> = (0..1000).map(|_| Memory::pages(1)).collect();
            let begin = |(i, memory): (usize, &mut Memory)| {
                let (read, done) = read_of(memory, (i % 64 * PAGE) as u64, &[PAGE]);
                io.read(read, Urgency::Ahead);
                done
            };
            let done: Vec<_> = reads.iter_mut().enumerate().map(begin).collect();
            for (i, done) in done.into_iter().enumerate() {
                assert_eq!(done.recv().unwrap().unwrap(), PAGE);
                assert_eq!(reads[i].read(&[PAGE]), bytes[i % 64 * PAGE..][..PAGE], "{i}");
            }
        }

        /// The cache has gone, and the last transfer drops the backing on the ring's own thread.
        #[test]
        fn a_transfer_may_be_the_last_to_have_the_backing() {
            let dir = dir();
            let path = dir.path().join("file");
            std::fs::write(&path, some_bytes(PAGE)).unwrap();
            for _ in 0..100 {
                let backing = FileBacking::open(&path).unwrap().with_ring();
                let mut memory = Memory::pages(1);
                let (read, done) = read_of(&mut memory, 0, &[PAGE]);
                Io::new(Arc::new(backing), Arc::new(Workers::new(1))).read(read, Urgency::Awaited);
                assert_eq!(done.recv().unwrap().unwrap(), PAGE);
            }
        }

        #[test]
        fn an_error_of_the_ring_is_the_transfers() {
            let dir = dir();
            let path = dir.path().join("file");
            std::fs::write(&path, some_bytes(PAGE)).unwrap();
            let backing = FileBacking::options().read_only(true).open(&path).unwrap().with_ring();
            let io = Io::new(Arc::new(backing), Arc::new(Workers::new(1)));
            let mut memory = Memory::pages(1);
            let (write, done) = write_of(&mut memory, 0, &[PAGE]);
            io.write(write, Urgency::Awaited);
            assert_eq!(done.recv().unwrap().unwrap_err().kind(), ErrorKind::PermissionDenied);
            // Beyond the largest offset that a file may have.
            let (read, done) = read_of(&mut memory, u64::MAX - 5, &[5]);
            io.read(read, Urgency::Awaited);
            assert_eq!(done.recv().unwrap().unwrap_err().kind(), ErrorKind::InvalidInput);
        }
    }
}
