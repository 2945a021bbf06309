//! Rows of the table `readahead`: ways to read a file, a page cache among them.
//!
//! - `cold`: reads of a file that is in nobody's cache.
//! - `delayed`: the same of a source that takes its time, so that reading ahead has something to hide.
//! - `warm`: reads of pages that are cached, by the page cache, the system and caches of values.
//!
//! All of them read the file that this module makes. Each of its pages begins with a word of its own. A timed pass adds
//! up these words, and ends with an error if the sum is wrong.

pub(crate) mod cold;
pub(crate) mod delayed;
pub(crate) mod warm;

use std::alloc::{self, Layout};
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::time::Duration;

use crate::subject::{Flaw, PAGE_BYTES};

/// The first word of a page of the file.
pub(crate) fn word_of(page: u64) -> u64 {
    (page + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

/// The sum of the first words of all pages in these bytes.
pub(crate) fn sum_of(bytes: &[u8]) -> u64 {
    let words = bytes.chunks(PAGE_BYTES).filter_map(|page| page.first_chunk::<8>());
    words.fold(0, |sum, word| sum.wrapping_add(u64::from_ne_bytes(*word)))
}

/// A file without a name: the system removes it with its last descriptor, however the process ends.
pub(crate) struct DataFile {
    file: File,
    /// Where it lies, for the report.
    pub(crate) place: PathBuf,
    pub(crate) pages: usize,
    /// Whether its file system keeps it in memory alone.
    pub(crate) is_in_memory: bool,
}

/// Bytes that are written at a time.
const AT_ONCE: usize = 1 << 20;

impl DataFile {
    /// Writes a file of so many pages, in `TMPDIR` or else in the working directory.
    pub(crate) fn new(pages: usize) -> io::Result<DataFile> {
        let place = std::env::var_os("TMPDIR").map_or_else(std::env::current_dir, |dir| Ok(PathBuf::from(dir)))?;
        let mut file = tempfile::tempfile_in(&place)?;
        let mut piece = vec![0x5A; AT_ONCE];
        for first in (0..pages).step_by(AT_ONCE / PAGE_BYTES) {
            let len = (pages - first).min(AT_ONCE / PAGE_BYTES) * PAGE_BYTES;
            for (page, bytes) in (first as u64..).zip(piece[..len].chunks_mut(PAGE_BYTES)) {
                bytes[..8].copy_from_slice(&word_of(page).to_ne_bytes());
            }
            file.write_all(&piece[..len])?;
        }
        file.sync_all()?;
        let kind = rustix::fs::fstatfs(&file)?.f_type;
        let is_in_memory = [libc::TMPFS_MAGIC, 0x8584_58F6].contains(&(kind as i64)); // ramfs
        Ok(DataFile { file, place, pages, is_in_memory })
    }

    pub(crate) fn bytes(&self) -> u64 {
        (self.pages * PAGE_BYTES) as u64
    }

    /// A path to it, as long as this exists.
    pub(crate) fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.file.as_raw_fd()).into()
    }

    /// A descriptor of its own, with a window of the system's readahead of its own.
    pub(crate) fn open(&self, flags: i32) -> io::Result<File> {
        OpenOptions::new().read(true).custom_flags(flags).open(self.path())
    }

    /// Has the system drop the file from its cache, and proves by `mincore` that it did.
    pub(crate) fn chill(&self) -> Result<(), Flaw> {
        let mut left = 0;
        for _ in 0..50 {
            rustix::fs::fadvise(&self.file, 0, None, rustix::fs::Advice::DontNeed).map_err(io::Error::from)?;
            left = self.resident()?;
            if left == 0 {
                return Ok(());
            }
            // A read ahead that is under way keeps its pages.
            std::thread::sleep(Duration::from_millis(2));
        }
        Err(Flaw::Failed(format!("the system keeps {left} pages of the file in its cache")))
    }

    /// Reads the whole file into the system's cache.
    pub(crate) fn heat(&self) -> io::Result<()> {
        let mut piece = vec![0; AT_ONCE];
        let mut at = 0;
        while at < self.bytes() {
            let read = std::os::unix::fs::FileExt::read_at(&self.file, &mut piece, at)?;
            if read == 0 {
                break;
            }
            at += read as u64;
        }
        Ok(())
    }

    /// KiB that the system reads ahead on the disk of the file, if it says so.
    pub(crate) fn system_window(&self) -> Option<u64> {
        let device = rustix::fs::fstat(&self.file).ok()?.st_dev;
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        let path = format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb");
        std::fs::read_to_string(path).ok()?.trim().parse().ok()
    }

    /// Pages of the file that the system has in its cache.
    pub(crate) fn resident(&self) -> io::Result<usize> {
        let mapped = Mapped::new(self)?;
        let addr = mapped.start.addr();
        crate::machine::committed_pages(&(addr..addr + mapped.len))
    }
}

/// A read-only mapping of the whole file.
pub(crate) struct Mapped {
    start: *mut u8,
    len: usize,
}

// SAFETY: memory that is only read.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    pub(crate) fn new(data: &DataFile) -> io::Result<Mapped> {
        use rustix::mm::{MapFlags, ProtFlags, mmap};
        let len = data.pages * PAGE_BYTES;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start =
            unsafe { mmap(std::ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED, data.file.as_fd(), 0) }?;
        start.expose_provenance();
        Ok(Mapped { start: start.cast(), len })
    }

    /// Tells the system how it will be read.
    pub(crate) fn advise(&self, advice: rustix::mm::Advice) -> io::Result<()> {
        // SAFETY: a hint about a mapping of ours.
        unsafe { rustix::mm::madvise(self.start.cast(), self.len, advice) }.map_err(io::Error::from)
    }
}

impl Deref for Mapped {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: mapped as long as this exists, and nobody writes to the file after `DataFile::new`.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and borrows of it have ended.
        let _ = unsafe { rustix::mm::munmap(self.start.cast(), self.len) };
    }
}

/// Bytes of a large page.
const HUGE: usize = 2 << 20;

/// Memory aligned to pages, as `O_DIRECT` needs it.
pub(crate) struct Buffer {
    start: *mut u8,
    len: usize,
    layout: Layout,
}

// SAFETY: memory of its own.
unsafe impl Send for Buffer {}
// SAFETY: as above; it changes only through `&mut`.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// In pages of 4 KiB, unless the system chooses others by itself.
    pub(crate) fn new(pages: usize) -> Buffer {
        let len = pages * PAGE_BYTES;
        let Ok(layout) = Layout::from_size_align(len, PAGE_BYTES) else { unreachable!("{len} bytes") };
        // SAFETY: the layout has a size above 0.
        let start = unsafe { alloc::alloc_zeroed(layout) };
        if start.is_null() {
            alloc::handle_alloc_error(layout);
        }
        Buffer { start, len, layout }
    }

    /// In pages of 2 MiB, if the system has some.
    pub(crate) fn huge(pages: usize) -> io::Result<Buffer> {
        let len = pages * PAGE_BYTES;
        let layout = Layout::from_size_align(len.next_multiple_of(HUGE), HUGE).map_err(io::Error::other)?;
        // SAFETY: the layout has a size above 0.
        let start = unsafe { alloc::alloc(layout) };
        if start.is_null() {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        let buffer = Buffer { start, len, layout };
        // SAFETY: a hint about memory of ours.
        unsafe { rustix::mm::madvise(start.cast(), layout.size(), rustix::mm::Advice::LinuxHugepage) }?;
        // SAFETY: all of it is ours.
        unsafe { start.write_bytes(0, layout.size()) };
        Ok(buffer)
    }
}

impl Deref for Buffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: so many bytes of ours, which were zeroed.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and borrows have ended.
        unsafe { alloc::dealloc(self.start, self.layout) };
    }
}
