//! A file that is open: the calls of those who read and write it.
use super::cached::Cached;
use super::lend::Lent;
use super::mapping::again;
use super::read::Reader;
use super::readahead::Mode;
use super::write::pages_of;
use super::writeback::Patience;
use crate::handle::Page;
use crate::sync::AtomicU64;
use core::fmt;
use core::ops::Range;
use core::sync::atomic::Ordering::{AcqRel, Relaxed};
use pagemill_core::PageCount;
use std::io;

/// A file in a [`PageCache`](super::PageCache), opened: the kernel's `struct file`.
///
/// Any thread may use it, and several at once. Its window of readahead and the errors that it was told are its own, so a
/// thread, a stream or a client that reads on its own has [one of its own](Self::reopen).
///
/// What is written is in the cache when the call returns, and durable once [`sync`](Self::sync) has returned. The last
/// opener that is dropped writes what is dirty; only [`close`](Self::close) tells whether that went well.
///
/// Reads beside a write of the same bytes see them before or after it, page by page.
///
/// ```
/// use pagemill::{Allocator, FileBacking, PageCache};
/// # let path = std::env::temp_dir().join(format!("pagemill-file-{}", std::process::id()));
/// let cache = PageCache::builder(&Allocator::builder().pages(64).build().unwrap()).build();
/// let file = cache.open(FileBacking::options().create(true).open(&path)?)?;
/// file.write_at(b"some bytes", 100)?;
/// let mut read = [0; 110];
/// assert_eq!(file.read_at(&mut read, 0)?, 110);
/// assert_eq!((&read[..3], &read[100..]), (&[0; 3][..], &b"some bytes"[..]));
/// file.sync()?;
/// assert_eq!(std::fs::read(&path)?, read);
/// file.close()?;
/// # std::fs::remove_file(path)?;
/// # std::io::Result::Ok(())
/// ```
pub struct CachedFile {
    cached: Cached,
    reader: Reader,
    /// The errors of write-back that this opener was told.
    seen: AtomicU64,
}

/// What a program says about the way in which it will use a file, by the names of `posix_fadvise(2)`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Advice {
    /// Nothing is known.
    Normal,
    /// It is read in sequence: windows are twice as large.
    Sequential,
    /// It is read at random: nothing is read ahead.
    Random,
    /// It is read in sequence, once: pages go when they have been read (drop-behind), in steps of half the largest window,
    /// unless others use them too.
    NoReuse,
    /// The range will be read soon. Reading it begins now.
    WillNeed,
    /// The range will not be read soon: its pages go now if they are clean, and otherwise before others.
    DontNeed,
}

impl CachedFile {
    pub(super) fn new(cached: Cached) -> Self {
        // Relaxed: the caller has the file, so it does not end meanwhile.
        cached.file.openers.fetch_add(1, Relaxed);
        let seen = AtomicU64::new(cached.file.errors_before());
        Self { reader: Reader::new(cached.shared.window), cached, seen }
    }

    /// Another opener of the same file, with a window of its own.
    ///
    /// It begins with [`Advice::Normal`], whatever this one was told. It is told the errors of write-back from now on, and before that the last one if nobody was told of it.
    #[must_use]
    pub fn reopen(&self) -> Self {
        Self::new(self.cached.clone())
    }

    /// Reads bytes from `at` on. Returns how many: fewer than there is room for if the file ends there, or if a later
    /// page cannot be read; 0 at the file's end.
    ///
    /// # Errors
    /// The first page cannot be read, or there is no memory for it.
    pub fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<usize> {
        let read = self.cached.read(&self.reader, into, at)?;
        self.cached.drop_behind(&self.reader, at, read);
        Ok(read)
    }

    /// Reads so many bytes.
    ///
    /// # Errors
    /// As [`read_at`](Self::read_at), and [`UnexpectedEof`](io::ErrorKind::UnexpectedEof) if the file ends before.
    pub fn read_exact_at(&self, mut into: &mut [u8], mut at: u64) -> io::Result<()> {
        while !into.is_empty() {
            let read = self.read_at(into, at)?;
            if read == 0 {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, format!("the file ends at byte {at}")));
            }
            (into, at) = (&mut into[read..], at + read as u64);
        }
        Ok(())
    }

    /// Writes bytes at `at`. Returns how many: all, unless memory ends meanwhile. The file is lengthened if need be.
    ///
    /// A writer that makes more pages dirty than the cache's dirty limit writes some of them back meanwhile.
    ///
    /// # Errors
    /// There is no memory for the first page, or the page cannot be read whose other bytes are to stay. The backing refuses the
    /// file's pages, and the cache has as many dirty ones as it likes: then the error is the backing's.
    pub fn write_at(&self, from: &[u8], at: u64) -> io::Result<usize> {
        self.cached.write(from, at)
    }

    /// Writes the first `len` bytes of these pages at `at`, where a page begins: the pages move into the cache, and no byte is
    /// copied. Returns how many bytes were written: all, unless memory ends meanwhile. The file is lengthened if need be.
    ///
    /// A slot whose page was moved is a hole afterwards. A page that is still there is the caller's: it was not reached, or it
    /// was written by a copy, because the cache has no room for it beside the one that it replaces. If a page comes from
    /// another allocator than the cache's, all are copied. Behind the bytes of a last page that is not full, the file keeps
    /// what it has; the contents of the page there change if it stays.
    ///
    /// The pages count towards the cache's limit from then on, and an [account](crate::Account) that paid for one pays until
    /// the cache frees it. Otherwise this is [`write_at`](Self::write_at).
    ///
    /// # Errors
    /// As [`write_at`](Self::write_at). [`InvalidInput`](io::ErrorKind::InvalidInput): `at` is inside of a page, or the array
    /// has a hole before its `len` bytes end. After an error, all pages are the caller's.
    ///
    /// ```
    /// use pagemill::{Allocator, Bulk, FileBacking, Page, PageCache};
    /// # let path = std::env::temp_dir().join(format!("pagemill-pages-{}", std::process::id()));
    /// let allocator = Allocator::builder().pages(64).build().unwrap();
    /// let cache = PageCache::builder(&allocator).build();
    /// let file = cache.open(FileBacking::options().create(true).open(&path)?)?;
    /// let mut pages: [Option<Page>; 2] = [const { None }; 2];
    /// allocator.alloc_pages_bulk_array(Bulk::exact(2), &mut pages).unwrap();
    /// pages.iter_mut().flatten().for_each(|page| page.fill(7));
    /// assert_eq!(file.write_pages(&mut pages, 5000, 4096)?, 5000);
    /// assert!(pages.iter().all(Option::is_none));
    /// file.close()?;
    /// assert_eq!(std::fs::read(&path)?, [vec![0; 4096], vec![7; 5000]].concat());
    /// # std::fs::remove_file(path)?;
    /// # std::io::Result::Ok(())
    /// ```
    pub fn write_pages(&self, pages: &mut [Option<Page>], len: usize, at: u64) -> io::Result<usize> {
        self.cached.write_pages(pages, len, at)
    }

    /// Writes bytes at the end of the file, in one piece: other calls of this come before or after. Returns where they
    /// are.
    ///
    /// # Errors
    /// As [`write_at`](Self::write_at). Some of the bytes may be there.
    pub fn append(&self, from: &[u8]) -> io::Result<u64> {
        self.cached.append(from)
    }

    /// The file's length in bytes.
    pub fn len(&self) -> u64 {
        self.cached.file.len()
    }
    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Cuts the file, or lengthens it with zeros: here and in the backing.
    ///
    /// # Errors
    /// The backing's; nothing has changed then. Or there is no memory for a copy of the last page, which is lent.
    pub fn set_len(&self, len: u64) -> io::Result<()> {
        self.cached.set_len(len)
    }

    /// Takes the length from the backing, where others than this cache change it, and returns it. Pages that are cached
    /// stay as they are, but for those behind the end; see [`invalidate`](Self::invalidate).
    ///
    /// # Errors
    /// The backing's.
    pub fn refresh(&self) -> io::Result<u64> {
        self.cached.refresh()
    }

    /// Writes what is dirty, and makes durable what was written before the call.
    ///
    /// # Errors
    /// An error of any write-back since this opener was told of one, whoever wrote the page. Each opener is told once.
    /// Pages that could not be written stay dirty, so a later call tries again. Where the backing failed to make data
    /// durable, all pages written since it last succeeded are written again; those that were evicted meanwhile may be
    /// lost.
    pub fn sync(&self) -> io::Result<()> {
        self.cached.sync(&self.seen)
    }

    /// Writes dirty pages of these bytes to the backing, as far as nobody has them in use, and returns how many it began to write:
    /// one that fails is dirty again. They need not be
    /// durable yet, nor there if the backing writes by itself: [`sync`](Self::sync) makes sure, and is told of errors. It is what
    /// Linux calls `sync_file_range` with `SYNC_FILE_RANGE_WRITE`, and waits for nothing but the backing's own call.
    ///
    /// ```
    /// # use pagemill::{Allocator, FileBacking, PageCache, PageCount};
    /// # let path = std::env::temp_dir().join(format!("pagemill-write-back-{}", std::process::id()));
    /// # std::fs::write(&path, [0; 3 * 4096])?;
    /// # let cache = PageCache::builder(&Allocator::builder().pages(1024).build().unwrap()).build();
    /// let file = cache.open(FileBacking::open(&path)?)?;
    /// file.write_at(&[7; 3 * 4096], 0)?;
    /// assert_eq!(file.write_back(5000..5000), PageCount::new(0));
    /// assert_eq!(file.write_back(5000..5001), PageCount::new(1));
    /// assert_eq!(cache.stats().dirty, 2);
    /// assert_eq!(std::fs::read(&path)?, [[0; 4096], [7; 4096], [0; 4096]].concat());
    /// # drop(file); std::fs::remove_file(path)?;
    /// # std::io::Result::Ok(())
    /// ```
    pub fn write_back(&self, bytes: Range<u64>) -> PageCount {
        let pages = if bytes.is_empty() { 0..0 } else { pages_of(bytes) };
        PageCount::new(self.cached.write_back(pages, usize::MAX, Patience::Some))
    }

    /// Says how the file will be used. [`WillNeed`](Advice::WillNeed) and [`DontNeed`](Advice::DontNeed) are about these
    /// bytes; the others are about this opener, and do not look at the range: `0..0`
    /// will do.
    ///
    /// ```
    /// # use pagemill::{Advice, Allocator, FileBacking, PageCache};
    /// # let path = std::env::temp_dir().join(format!("pagemill-advice-{}", std::process::id()));
    /// # std::fs::write(&path, vec![7; 1 << 20])?;
    /// # let cache = PageCache::builder(&Allocator::builder().pages(1024).build().unwrap()).build();
    /// let file = cache.open(FileBacking::open(&path)?)?;
    /// file.advise(Advice::WillNeed, 0..65536); // is being read now
    /// file.advise(Advice::Random, 0..0);
    /// file.read_at(&mut [0; 100], 500_000)?; // reads one page
    /// assert_eq!(cache.stats().read, 17);
    /// # drop(file); std::fs::remove_file(path)?;
    /// # std::io::Result::Ok(())
    /// ```
    pub fn advise(&self, advice: Advice, bytes: Range<u64>) {
        match advice {
            Advice::Normal => self.reader.advise(Mode::Normal),
            Advice::Sequential => self.reader.advise(Mode::Sequential),
            Advice::Random => self.reader.advise(Mode::Random),
            Advice::NoReuse => self.reader.advise(Mode::DropBehind),
            Advice::WillNeed => self.cached.will_need(&self.reader, pages_of(bytes)),
            Advice::DontNeed => self.cached.let_go(pages_of(bytes), u64::MAX),
        }
    }

    /// Lets the pages of these bytes go, so that they are read again: others than this cache have written to the
    /// backing. Returns how many stay, because they are dirty or on their way. Readers that have a page in hand, and what is
    /// lent, keep the old bytes.
    pub fn invalidate(&self, bytes: Range<u64>) -> usize {
        self.cached.invalidate(pages_of(bytes))
    }

    /// The first page at or after `page` that is in the cache, up to date or on its way, among the next `max` pages. If none
    /// is: `page + max`, or `u64::MAX` where that would be beyond. Pages are counted from 0; a run of holes is skipped
    /// without a look at each (C8.1).
    ///
    /// ```
    /// # use pagemill::{Advice, Allocator, FileBacking, PageCache};
    /// # let path = std::env::temp_dir().join(format!("pagemill-present-{}", std::process::id()));
    /// # std::fs::write(&path, vec![7; 1 << 20])?;
    /// # let cache = PageCache::builder(&Allocator::builder().pages(1024).build().unwrap()).build();
    /// let file = cache.open(FileBacking::open(&path)?)?;
    /// file.advise(Advice::Random, 0..0);
    /// file.read_at(&mut [0; 100], 100 * 4096)?;
    /// assert_eq!((file.next_present(0, 256), file.next_present(0, 50), file.next_present(101, 256)), (100, 50, 357));
    /// assert_eq!((file.prev_present(200, 256), file.prev_present(200, 50)), (100, 150));
    /// # drop(file); std::fs::remove_file(path)?;
    /// # std::io::Result::Ok(())
    /// ```
    pub fn next_present(&self, page: u64, max: u64) -> u64 {
        self.cached.file.index.next_present(page, max)
    }
    /// The last page at or before `page` that is in the cache, among `max` pages. If none is: `page - max`, or 0 where that
    /// would be below.
    pub fn prev_present(&self, page: u64, max: u64) -> u64 {
        self.cached.file.index.prev_present(page, max)
    }

    /// Lends bytes without a copy, up to the file's end.
    ///
    /// # Errors
    /// As [`read_at`](Self::read_at), for any of the pages.
    pub fn lend(&self, at: u64, len: usize) -> io::Result<Lent> {
        self.cached.lend(&self.reader, at, len)
    }

    /// Ends this opener. The last one writes what is dirty, and this tells the errors that dropping it would not tell. It does
    /// not make data durable.
    ///
    /// # Errors
    /// Those of write-back that this opener was not told. If it is the last opener, pages that could not be written are
    /// lost.
    pub fn close(self) -> io::Result<()> {
        let this = core::mem::ManuallyDrop::new(self);
        // SAFETY: `this` is not dropped, and each field is taken once; the other fields need no drop.
        let (cached, _reader) = unsafe { (core::ptr::read(&this.cached), core::ptr::read(&this.reader)) };
        let ended = leave(&cached);
        if cached.shared.stamp.is_inherited() {
            // A thread of the parent's may have held the lock of the errors.
            return ended;
        }
        match cached.file.error_since(&this.seen) {
            Some(error) => ended.and(Err(again(&error))),
            None => ended,
        }
    }
}

/// Ends an opener, and with the last one the file.
fn leave(cached: &Cached) -> io::Result<()> {
    if cached.shared.stamp.is_inherited() {
        // The pages, the transfers and the file are the parent's.
        core::mem::forget(cached.clone());
        return Ok(());
    }
    // AcqRel: what other openers did comes before the end.
    match cached.file.openers.fetch_sub(1, AcqRel) {
        1 => cached.end(),
        _ => Ok(()),
    }
}

impl Drop for CachedFile {
    fn drop(&mut self) {
        // An error is counted. Who wants to be told calls `sync` or `close`.
        _ = leave(&self.cached);
    }
}

impl fmt::Debug for CachedFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "file {} of {} bytes, {} pages cached",
            self.cached.file.number,
            self.len(),
            self.cached.file.index.len()
        )
    }
}

#[cfg(all(test, not(any(miri, loom, shuttle))))]
mod tests {
    use crate::{Allocator, FileBacking, PageCache};

    #[test]
    fn a_forked_child_closes_a_file_whose_lock_another_thread_held() {
        let path = std::env::temp_dir().join(format!("pagemill-fork-{}", std::process::id()));
        let cache = PageCache::builder(&Allocator::builder().pages(64).build().unwrap()).build();
        let file = cache.open(FileBacking::options().create(true).open(&path).unwrap()).unwrap();
        let (opener, held) = (file.reopen(), file.cached.file.clone());
        let errors = held.hold_errors();
        // SAFETY: the child closes a file, and ends without running anything else.
        match unsafe { libc::fork() } {
            0 => {
                // SAFETY: ends a child that waits for ever.
                unsafe { libc::alarm(60) };
                let closed = opener.close();
                // SAFETY: ends the child.
                unsafe { libc::_exit(i32::from(closed.is_err())) }
            }
            child => {
                let mut status = 0;
                // SAFETY: waits for this one child.
                assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
                assert_eq!(status, 0);
            }
        }
        drop(errors);
        file.close().unwrap();
        std::fs::remove_file(path).unwrap();
    }
}
