//! Page caches: pages of files, read ahead, written back, and lent.
//!
//! Errors of input and output have a number of the system's, which goes into errno: no function here may be called from a signal handler.
use crate::allocator::Allocator;
use crate::bulk;
use crate::error::{Error, code};
use crate::handle::{self, handle};
use crate::sized::{self, BeginsWithSize};
use crate::text;
use core::ffi::{CStr, c_char, c_int, c_void};
use core::ptr::{NonNull, null_mut};
use core::slice;
use pagemill::{Advice, FileBacking, Page, PageCount};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::os::fd::{BorrowedFd, RawFd};
use std::os::unix::ffi::OsStrExt;

/// A cache of pages of files, which come from an allocator. The type is opaque. Any thread may use it.
///
/// It is a shrinker of its allocator: when memory is short, clean pages go, and dirty ones are written first, unless the request has
/// `PAGEMILL_GFP_NOIO` or `PAGEMILL_GFP_NOFS`.
///
/// The child of a `fork` must not use it, nor its files: it may close them, which changes nothing of its parent's.
pub struct PageCache;
handle!(PageCache, pagemill::PageCache, b"pm cache");

/// A file that is open in a page cache. The type is opaque. Any thread may use it, several at the same time; one that reads on its
/// own has a window of readahead of its own with `pagemill_file_reopen`.
pub struct File;
handle!(File, pagemill::CachedFile, b"pm files");

/// Bytes that a page cache lends. The type is opaque.
pub struct Lent;
handle!(Lent, pagemill::Lent, b"pm lents");

/// `struct iovec`, as `<sys/uio.h>` has it. The library's slices are laid out like it.
#[repr(C)]
pub struct IoVec {
    pub(crate) base: *mut c_void,
    pub(crate) len: usize,
}
const _: () =
    assert!(size_of::<IoVec>() == size_of::<IoSlice<'_>>() && align_of::<IoVec>() == align_of::<IoSlice<'_>>());

/// Nothing is read ahead.
pub const PAGEMILL_PAGE_CACHE_NO_READAHEAD: u32 = 1;
/// Each page is zeroed before it goes back to the allocator.
pub const PAGEMILL_PAGE_CACHE_WIPED: u32 = 2;

/// What a page cache is to be like. Set `size` to `sizeof(struct pagemill_page_cache_options)`, and whatever is not to be 0.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct PageCacheOptions {
    /// The size of this structure, in bytes.
    pub size: usize,
    /// The most pages that it has at a time, lent ones included. 0: as many as its allocator has.
    pub limit: usize,
    /// How many of its pages may be dirty before writers write some back. 0: a fifth of the limit.
    pub dirty_limit: usize,
    /// The largest window of readahead, in pages. 0: 1024.
    pub window: usize,
    /// The number of threads that read and write files, started as they are needed. 0: 3.
    pub threads: u32,
    /// `PAGEMILL_PAGE_CACHE_NO_READAHEAD` and `PAGEMILL_PAGE_CACHE_WIPED`.
    pub flags: u32,
    /// A name for observers, or null.
    pub name: *const c_char,
}
// SAFETY: integers and pointers, the size first.
unsafe impl BeginsWithSize for PageCacheOptions {}

/// The functions of a file that a program brings, and what they get. Set `size` to `sizeof(struct pagemill_backing)`, and all others
/// to 0 that there are not.
///
/// Functions return a number below 0, that of the system's error, if they fail: `-EIO`, for example. `-EINTR` is tried again. Several
/// threads call them at the same time, but never a read or write of bytes that another one writes. They must return: no exception, no
/// longjmp. They may allocate, but use no file of the same cache. A function that writes takes pages that it needs from a pool, with
/// `PAGEMILL_GFP_NOIO`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Backing {
    /// The size of this structure, in bytes.
    pub size: usize,
    /// Is passed to each function.
    pub user: *mut c_void,
    /// The file's length in bytes, now.
    pub len: Option<unsafe extern "C" fn(user: *mut c_void) -> i64>,
    /// Reads as `preadv(2)` does: returns how many bytes, at least one unless the file ends at `at`.
    pub read: Option<unsafe extern "C" fn(parts: *const IoVec, n: usize, at: u64, user: *mut c_void) -> i64>,
    /// Writes as `pwritev(2)` does, and lengthens the file if need be. Null: the file is for reading only.
    pub write: Option<unsafe extern "C" fn(parts: *const IoVec, n: usize, at: u64, user: *mut c_void) -> i64>,
    /// Returns 0 once what was written before is durable. Null: it always is.
    pub sync: Option<unsafe extern "C" fn(user: *mut c_void) -> c_int>,
    /// Cuts the file, or lengthens it with zeros, and returns 0. Null: its length does not change but by writes.
    pub set_len: Option<unsafe extern "C" fn(len: u64, user: *mut c_void) -> c_int>,
    /// Is called once, on any thread, when the cache calls no other function any more; or null.
    pub release: Option<unsafe extern "C" fn(user: *mut c_void)>,
    /// The most bytes that one call of `read` or `write` should have. 0: any number.
    pub largest: usize,
}
// SAFETY: integers, pointers, and functions that may be null, the size first.
unsafe impl BeginsWithSize for Backing {}

/// A file whose functions are C's. `len` and `read` are there.
struct Functions(Backing);

// SAFETY: the C program promises that any thread may call its functions with their `user`, at `Backing`.
unsafe impl Send for Functions {}
// SAFETY: as above.
unsafe impl Sync for Functions {}

impl Drop for Functions {
    fn drop(&mut self) {
        if let Some(release) = self.0.release {
            // SAFETY: the program's own function, which nothing is called after.
            unsafe { release(self.0.user) }
        }
    }
}

/// What a function of C's returned.
fn answer(n: i64) -> io::Result<u64> {
    u64::try_from(n).map_err(|_| {
        let errno = n.checked_neg().and_then(|n| i32::try_from(n).ok());
        io::Error::from_raw_os_error(errno.unwrap_or(Errno::IO.raw_os_error()))
    })
}

fn bytes(n: i64) -> io::Result<usize> {
    // The library refuses more than it asked for.
    Ok(usize::try_from(answer(n)?).unwrap_or(usize::MAX))
}

/// A function that there is not, of a file that is not written.
fn read_only<F>(function: Option<F>) -> io::Result<F> {
    function.ok_or(Errno::ROFS.into())
}

impl pagemill::Backing for Functions {
    fn len(&self) -> io::Result<u64> {
        let len = read_only(self.0.len)?;
        // SAFETY: the program's own function, with what it is to get; so it is below.
        answer(unsafe { len(self.0.user) })
    }
    fn read_vectored_at(&self, into: &mut [IoSliceMut<'_>], at: u64) -> io::Result<usize> {
        let read = read_only(self.0.read)?;
        // SAFETY: as in `len`; slices are laid out like `struct iovec`.
        bytes(unsafe { read(into.as_ptr().cast(), into.len(), at, self.0.user) })
    }
    fn write_vectored_at(&self, from: &[IoSlice<'_>], at: u64) -> io::Result<usize> {
        let write = read_only(self.0.write)?;
        // SAFETY: as in `read_vectored_at`.
        bytes(unsafe { write(from.as_ptr().cast(), from.len(), at, self.0.user) })
    }
    fn sync(&self) -> io::Result<()> {
        // SAFETY: as in `len`.
        let synced = self.0.sync.map_or(0, |sync| unsafe { sync(self.0.user) });
        answer(synced.into()).map(drop)
    }
    fn set_len(&self, len: u64) -> io::Result<()> {
        let set_len = read_only(self.0.set_len)?;
        // SAFETY: as in `len`.
        answer(unsafe { set_len(len, self.0.user) }.into()).map(drop)
    }
    fn largest(&self) -> usize {
        if self.0.largest == 0 { usize::MAX } else { self.0.largest }
    }
}

unsafe extern "C" {
    /// glibc's and musl's: where this thread's errno lies.
    safe fn __errno_location() -> *mut c_int;
}

impl From<io::Error> for Error {
    /// The number of an error; errno gets the system's.
    fn from(why: io::Error) -> Self {
        let errno = match (why.raw_os_error(), why.kind()) {
            (Some(errno), _) => errno,
            // The cache's own errors.
            (None, ErrorKind::OutOfMemory) => return Self::Exhausted,
            (None, ErrorKind::InvalidInput) => return Self::Invalid,
            (None, ErrorKind::PermissionDenied) => Errno::ACCESS.raw_os_error(),
            (None, ErrorKind::Unsupported) => Errno::OPNOTSUPP.raw_os_error(),
            (None, ErrorKind::FileTooLarge) => Errno::FBIG.raw_os_error(),
            (None, _) => Errno::IO.raw_os_error(),
        };
        // SAFETY: this thread's errno, which is always there.
        unsafe { *__errno_location() = errno };
        Self::Io
    }
}

/// Makes a page cache whose pages come from `allocator`; `options` may be null. `*cache` gets the handle, or null.
///
/// Errors: 2xx if an argument is wrong.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_page_cache_create(
    allocator: *mut Allocator,
    options: *const PageCacheOptions,
    cache: *mut *mut PageCache,
) -> Error {
    // SAFETY: the caller passes null or a handle, and null or options as their fields say.
    let make = || unsafe {
        let builder = pagemill::PageCache::builder(handle::get(allocator)?);
        if options.is_null() { Ok(builder.build()) } else { Ok(with_options(builder, sized::read(options)?)?.build()) }
    };
    // SAFETY: the caller passes null or a place for a pointer.
    unsafe { handle::make(cache, make) }
}

/// # Safety
/// The name is null, or a text.
unsafe fn with_options(
    builder: pagemill::PageCacheBuilder,
    options: &PageCacheOptions,
) -> Result<pagemill::PageCacheBuilder, Error> {
    if options.flags & !(PAGEMILL_PAGE_CACHE_NO_READAHEAD | PAGEMILL_PAGE_CACHE_WIPED) != 0 {
        return Err(Error::Invalid);
    }
    let mut builder = builder.wiped(options.flags & PAGEMILL_PAGE_CACHE_WIPED != 0);
    if options.limit != 0 {
        builder = builder.limit(PageCount::new(options.limit));
    }
    if options.dirty_limit != 0 {
        builder = builder.dirty_limit(PageCount::new(options.dirty_limit));
    }
    if options.flags & PAGEMILL_PAGE_CACHE_NO_READAHEAD != 0 {
        builder = builder.window(PageCount::new(0));
    } else if options.window != 0 {
        builder = builder.window(PageCount::new(options.window));
    }
    if options.threads != 0 {
        builder = builder.threads(options.threads as usize);
    }
    if !options.name.is_null() {
        // SAFETY: the caller says that it is a text with a 0 at its end.
        builder = builder.named(unsafe { CStr::from_ptr(options.name) }.to_string_lossy());
    }
    Ok(builder)
}

/// Lets a page cache go. It ends with the last of its files and of what it lends.
///
/// Errors: 2xx for no open handle.
///
/// Threads: any, and no thread may use the handle meanwhile or later. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_page_cache_close(cache: *mut PageCache) -> Error {
    // SAFETY: the caller passes null or a handle.
    code(unsafe { handle::close(cache) }.map(drop))
}

/// Changes the limit of a page cache; the one that it was made with is the largest. Pages above it are evicted now, as far as they
/// can be.
///
/// Errors: 2xx for no open handle.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_page_cache_set_limit(cache: *mut PageCache, pages: usize) -> Error {
    // SAFETY: the caller passes null or a handle.
    code(unsafe { handle::get(cache) }.map(|cache| cache.set_limit(PageCount::new(pages))))
}

/// Evicts up to so many clean pages, those first that were used least. Returns how many; 0 for no open handle.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_page_cache_evict(cache: *mut PageCache, pages: usize) -> usize {
    // SAFETY: the caller passes null or a handle.
    unsafe { handle::get(cache) }.map_or(0, |cache| cache.evict(PageCount::new(pages)).get())
}

/// Writes up to so many dirty pages, of any file, without making them durable. Returns how many; 0 for no open handle.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_page_cache_write_back(cache: *mut PageCache, pages: usize) -> usize {
    // SAFETY: the caller passes null or a handle.
    unsafe { handle::get(cache) }.map_or(0, |cache| cache.write_back(PageCount::new(pages)).get())
}

/// What a page cache has counted since it was made, and what it has now.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct PageCacheStats {
    /// Pages that readers found in the cache.
    pub hits: u64,
    /// Pages that readers did not find, and waited for, and those that writers made.
    pub misses: u64,
    /// Pages that were read from a file.
    pub read: u64,
    /// Those of them that no request had asked for: read ahead.
    pub read_ahead: u64,
    /// Pages read ahead that were evicted before anybody asked for them.
    pub ahead_unused: u64,
    /// Requests of readahead: windows that had a hole.
    pub windows: u64,
    /// Those of them that a reader began by reaching the marker, without waiting.
    pub windows_marked: u64,
    /// Windows that were shortened because there was no memory.
    pub windows_shortened: u64,
    /// Reads of a file: one for each run of neighbouring holes.
    pub reads: u64,
    /// Those of them that failed.
    pub reads_failed: u64,
    /// Pages that were written to a file.
    pub written: u64,
    /// Writes to a file.
    pub writes: u64,
    /// Those of them that failed.
    pub writes_failed: u64,
    /// Pages that were replaced by a copy, since somebody read the old one as it was written to.
    pub copied: u64,
    /// Pages that were evicted.
    pub evicted: u64,
    /// Calls of the allocator's reclaim, for clean pages.
    pub shrinks: u64,
    /// Pages lent.
    pub lent: u64,
    /// Pages that it has now, lent ones included.
    pub pages: u64,
    /// Those of them that are to be written.
    pub dirty: u64,
    /// Pages that it may have.
    pub limit: u64,
    /// Bytes of its descriptors and of its indexes.
    pub metadata: u64,
}

/// Reads a page cache's statistics.
///
/// Errors: 2xx if an argument is wrong.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_page_cache_stats(cache: *const PageCache, stats: *mut PageCacheStats) -> Error {
    macro_rules! copy {
        ($found:expr; $($name:ident),*) => { PageCacheStats { $($name: $found.$name),* } };
    }
    let read = || {
        // SAFETY: the caller passes null or a handle, and null or a place for statistics.
        let (cache, place) = unsafe { (handle::get(cache)?, stats.as_mut().ok_or(Error::Argument)?) };
        *place = copy!(cache.stats(); hits, misses, read, read_ahead, ahead_unused, windows, windows_marked,
            windows_shortened, reads, reads_failed, written, writes, writes_failed, copied, evicted, shrinks, lent, pages,
            dirty, limit, metadata);
        Ok(())
    };
    code(read())
}

/// The file is opened for reading only.
pub const PAGEMILL_FILE_READ_ONLY: u32 = 1;
/// It goes past the system's cache (`O_DIRECT`), so that pages are cached once.
pub const PAGEMILL_FILE_DIRECT: u32 = 2;
/// It is created if it is not there.
pub const PAGEMILL_FILE_CREATE: u32 = 4;

/// Opens a regular file or a block device by its path. `flags` are any of `PAGEMILL_FILE_READ_ONLY` to `PAGEMILL_FILE_CREATE`.
/// `*file` gets the handle, or null. One file is opened once; further openers of it are made by `pagemill_file_reopen`.
///
/// Errors: 2xx if an argument is wrong, or the path is not that of such a file; `PAGEMILL_ERROR_IO` with the system's errno,
/// EOPNOTSUPP if the file system has no `O_DIRECT`.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_page_cache_open_path(
    cache: *mut PageCache,
    path: *const c_char,
    flags: u32,
    file: *mut *mut File,
) -> Error {
    let make = || {
        // SAFETY: the caller passes null or a handle.
        let cache = unsafe { handle::get(cache) }?;
        if flags & !(PAGEMILL_FILE_READ_ONLY | PAGEMILL_FILE_DIRECT | PAGEMILL_FILE_CREATE) != 0 {
            return Err(Error::Invalid);
        }
        // SAFETY: the caller passes null, or a text with a 0 at its end.
        let path = unsafe { text::read(path) }?;
        let has = |flag| flags & flag != 0;
        let options = FileBacking::options().read_only(has(PAGEMILL_FILE_READ_ONLY));
        let options = options.direct(has(PAGEMILL_FILE_DIRECT)).create(has(PAGEMILL_FILE_CREATE));
        Ok(cache.open(options.open(OsStr::from_bytes(path.to_bytes()))?)?)
    };
    // SAFETY: the caller passes null or a place for a pointer.
    unsafe { handle::make(file, make) }
}

/// Opens the regular file or block device behind a descriptor, for reading only if the descriptor is. The descriptor stays the
/// caller's, who may close it. `*file` gets the handle, or null. One file is opened once; further openers of it are made by
/// `pagemill_file_reopen`.
///
/// Errors: 2xx if an argument is wrong, or the descriptor is not one of such a file, or open with `O_WRONLY`, `O_APPEND` or
/// `O_DIRECT`; `PAGEMILL_ERROR_IO` with the system's errno.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_page_cache_open(
    cache: *mut PageCache,
    descriptor: c_int,
    file: *mut *mut File,
) -> Error {
    let make = || {
        // SAFETY: the caller passes null or a handle.
        let cache = unsafe { handle::get(cache) }?;
        Ok(cache.open(FileBacking::from_file(duplicate(descriptor)?)?)?)
    };
    // SAFETY: the caller passes null or a place for a pointer.
    unsafe { handle::make(file, make) }
}

fn duplicate(descriptor: RawFd) -> io::Result<std::fs::File> {
    if descriptor < 0 {
        return Err(Errno::BADF.into());
    }
    // SAFETY: used for this one call, which refuses a descriptor that is not open.
    let borrowed = unsafe { BorrowedFd::borrow_raw(descriptor) };
    Ok(borrowed.try_clone_to_owned()?.into())
}

/// Opens a file of the program's own functions. `*file` gets the handle, or null.
///
/// Errors: 2xx if an argument is wrong: `backing->release` is not called then. `PAGEMILL_ERROR_IO` with the errno of `backing->len`:
/// `backing->release` was called then.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_page_cache_open_backing(
    cache: *mut PageCache,
    backing: *const Backing,
    file: *mut *mut File,
) -> Error {
    let make = || {
        // SAFETY: the caller passes null or a handle, and null or a structure of the size that it says.
        let (cache, backing) = unsafe { (handle::get(cache)?, sized::read(backing)?) };
        if backing.len.is_none() || backing.read.is_none() {
            return Err(Error::Argument);
        }
        Ok(cache.open(Functions(*backing))?)
    };
    // SAFETY: the caller passes null or a place for a pointer.
    unsafe { handle::make(file, make) }
}

/// Makes another opener of the same file, with a window of readahead of its own. `*opened` gets the handle, or null.
///
/// Errors: 2xx if an argument is wrong.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_file_reopen(file: *const File, opened: *mut *mut File) -> Error {
    // SAFETY: the caller passes null or a handle, and null or a place for a pointer.
    unsafe { handle::make(opened, || Ok(handle::get(file)?.reopen())) }
}

/// Ends an opener. The last one writes what is dirty, without making it durable.
///
/// Errors: `PAGEMILL_ERROR_IO` with the errno of a write that this opener was not told of; with EIO if it was the last opener, and
/// pages that could not be written are lost. The handle is closed all the same. 2xx for no open handle.
///
/// Threads: any, and no thread may use the handle meanwhile or later. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_file_close(file: *mut File) -> Error {
    // SAFETY: the caller passes null or a handle.
    code(unsafe { handle::close(file) }.and_then(|file| Ok(file.close()?)))
}

/// Bytes of the caller's.
///
/// # Safety
/// Null, or so many bytes.
unsafe fn bytes_at<'a>(from: *const c_void, n: usize) -> Result<&'a [u8], Error> {
    let start = start(from.cast_mut(), n)?;
    // SAFETY: the caller says so.
    Ok(unsafe { slice::from_raw_parts(start.as_ptr(), n) })
}

fn start(from: *mut c_void, n: usize) -> Result<NonNull<u8>, Error> {
    match NonNull::new(from.cast()) {
        None if n > 0 => Err(Error::Argument),
        _ if isize::try_from(n).is_err() => Err(Error::Invalid),
        start => Ok(start.unwrap_or(NonNull::dangling())),
    }
}

/// Reads up to `n` bytes from `at` on. `*read`, unless the pointer is null, gets how many: fewer than `n` if the file ends there, or
/// if a later page cannot be read; 0 at the file's end.
///
/// Errors: `PAGEMILL_ERROR_IO` with the errno of the read, if the first page cannot be read; 1xx if there is no memory for it; 2xx if
/// an argument is wrong.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_file_read_at(
    file: *const File,
    into: *mut c_void,
    n: usize,
    at: u64,
    read: *mut usize,
) -> Error {
    let make = || {
        let start = start(into, n)?;
        // SAFETY: the caller passes null or a handle, and so many bytes.
        let (file, into) = unsafe { (handle::get(file)?, slice::from_raw_parts_mut(start.as_ptr(), n)) };
        Ok(file.read_at(into, at)?)
    };
    // SAFETY: the caller passes null or a place for a number.
    unsafe { bulk::deliver(make(), read) }
}

/// Writes `n` bytes at `at`, into the cache; `pagemill_file_sync` makes them durable. The file is lengthened if need be. `*written`,
/// unless the pointer is null, gets how many: all, unless memory ends meanwhile.
///
/// Errors: 1xx if there is no memory for the first page; `PAGEMILL_ERROR_IO` with an errno if a page cannot be read whose other bytes
/// are to stay, or if the file refuses dirty pages and the cache has as many as it likes; 2xx if an argument is wrong.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_file_write_at(
    file: *const File,
    from: *const c_void,
    n: usize,
    at: u64,
    written: *mut usize,
) -> Error {
    // SAFETY: the caller passes null or a handle, and so many bytes.
    let write = || unsafe { Ok(handle::get(file)?.write_at(bytes_at(from, n)?, at)?) };
    // SAFETY: the caller passes null or a place for a number.
    unsafe { bulk::deliver(write(), written) }
}

/// Writes `n` bytes at the end of the file, in one piece: other calls of this come before or after. `*at`, unless the pointer is
/// null, gets where they are.
///
/// Errors: as for `pagemill_file_write_at`. Some of the bytes may be there.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_file_append(file: *const File, from: *const c_void, n: usize, at: *mut u64) -> Error {
    // SAFETY: the caller passes null or a handle, and so many bytes.
    let write = || unsafe { Ok(handle::get(file)?.append(bytes_at(from, n)?)?) };
    // SAFETY: the caller passes null or a place for a number.
    unsafe { bulk::deliver(write(), at) }
}

/// Writes the first `n` bytes of these pages at `at`, where a page begins. The pages move into the cache, and no byte is copied;
/// slots of pages that have moved become null. A page that is still there is the caller's: it was not reached, or its bytes were
/// copied, as those of another allocator's pages are. Behind the bytes of a last page that is not full, the contents of the page
/// change if it stays. `*written`, unless the pointer is null, gets how many bytes were written.
///
/// Errors: as for `pagemill_file_write_at`; 3xx if a slot is not null and not a page that is handed out: nothing has changed then.
/// `PAGEMILL_ERROR_INVALID` if `at` is inside of a page, or a slot is null. After an error, all pages are the caller's.
///
/// Threads: any; nobody else may use the array meanwhile. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_file_write_pages(
    file: *const File,
    pages: *mut *mut c_void,
    n: usize,
    at: u64,
    written: *mut usize,
) -> Error {
    let make = || {
        // SAFETY: the caller passes null or a handle.
        let file = unsafe { handle::get(file) }?;
        let count = bulk::count(i64::try_from(n.div_ceil(crate::PAGEMILL_PAGE_SIZE)).unwrap_or(i64::MAX))?;
        // SAFETY: the caller passes an array of the pages that have the bytes.
        let slots = unsafe { bulk::slots_of(pages, count) }?;
        let mut owned: Vec<Option<Page>> = Vec::with_capacity(slots.len());
        let mut write = || {
            for &slot in slots.iter() {
                // SAFETY: the caller gives up the page, or it is refused.
                owned.push(if slot.is_null() { None } else { Some(unsafe { Page::from_raw(slot) }?) });
            }
            Ok(file.write_pages(&mut owned, n, at)?)
        };
        let result = write();
        for (slot, page) in slots.iter_mut().zip(owned) {
            *slot = page.map_or(null_mut(), Page::into_raw);
        }
        result
    };
    // SAFETY: the caller passes null or a place for a number.
    unsafe { bulk::deliver(make(), written) }
}

/// The file's length in bytes; 0 for no open handle.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_file_len(file: *const File) -> u64 {
    // SAFETY: the caller passes null or a handle.
    unsafe { handle::get(file) }.map_or(0, pagemill::CachedFile::len)
}

/// Cuts the file, or lengthens it with zeros: here and behind the cache.
///
/// Errors: `PAGEMILL_ERROR_IO` with the errno of the file, 1xx if there is no memory; nothing has changed then. 2xx for no open
/// handle.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_file_set_len(file: *const File, len: u64) -> Error {
    // SAFETY: the caller passes null or a handle.
    code(unsafe { handle::get(file) }.and_then(|file| Ok(file.set_len(len)?)))
}

/// Takes the length from the file, where others than this cache change it. `*len`, unless the pointer is null, gets it. Pages that
/// are cached stay as they are, but for those behind the end: see `pagemill_file_invalidate`.
///
/// Errors: as for `pagemill_file_set_len`.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_file_refresh(file: *const File, len: *mut u64) -> Error {
    // SAFETY: the caller passes null or a handle.
    let work = || Ok(unsafe { handle::get(file) }?.refresh()?);
    // SAFETY: the caller passes null or a place for a number.
    unsafe { bulk::deliver(work(), len) }
}

/// Writes what is dirty, and makes durable what was written before the call.
///
/// Errors: `PAGEMILL_ERROR_IO` with the errno of any write since this opener was told of one; each opener is told once. Pages that
/// could not be written stay dirty, and a later call tries again. 2xx for no open handle.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_file_sync(file: *const File) -> Error {
    // SAFETY: the caller passes null or a handle.
    code(unsafe { handle::get(file) }.and_then(|file| Ok(file.sync()?)))
}

/// Begins to write the dirty pages of `n` bytes from `at` on, and returns how many; 0 for no open handle. `pagemill_file_sync` is
/// told of errors.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_file_write_back(file: *const File, at: u64, n: u64) -> usize {
    // SAFETY: the caller passes null or a handle.
    unsafe { handle::get(file) }.map_or(0, |file| file.write_back(at..at.saturating_add(n)).get())
}

/// Nothing is known. The numbers of advice are those of `posix_fadvise(2)`.
pub const PAGEMILL_ADVICE_NORMAL: u32 = 0;
/// The file is read at random: nothing is read ahead.
pub const PAGEMILL_ADVICE_RANDOM: u32 = 1;
/// It is read in sequence: windows are twice as large.
pub const PAGEMILL_ADVICE_SEQUENTIAL: u32 = 2;
/// These bytes will be read soon: reading them begins now.
pub const PAGEMILL_ADVICE_WILLNEED: u32 = 3;
/// These bytes will not be read soon: their pages go now if they are clean.
pub const PAGEMILL_ADVICE_DONTNEED: u32 = 4;
/// The file is read in sequence, once: pages go when they have been read, unless others use them too.
pub const PAGEMILL_ADVICE_NOREUSE: u32 = 5;

/// Says how the file will be used. `PAGEMILL_ADVICE_WILLNEED` and `PAGEMILL_ADVICE_DONTNEED` are about `n` bytes from `at` on; the
/// others are about this opener.
///
/// Errors: 2xx if an argument is wrong.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_file_advise(file: *const File, advice: u32, at: u64, n: u64) -> Error {
    let advise = || {
        // SAFETY: the caller passes null or a handle.
        let file = unsafe { handle::get(file) }?;
        let advice = match advice {
            PAGEMILL_ADVICE_NORMAL => Advice::Normal,
            PAGEMILL_ADVICE_RANDOM => Advice::Random,
            PAGEMILL_ADVICE_SEQUENTIAL => Advice::Sequential,
            PAGEMILL_ADVICE_WILLNEED => Advice::WillNeed,
            PAGEMILL_ADVICE_DONTNEED => Advice::DontNeed,
            PAGEMILL_ADVICE_NOREUSE => Advice::NoReuse,
            _ => return Err(Error::Invalid),
        };
        file.advise(advice, at..at.saturating_add(n));
        Ok(())
    };
    code(advise())
}

/// Lets the pages of `n` bytes from `at` on go, so that they are read again: others than this cache have written to the file.
/// `*stay`, unless the pointer is null, gets how many stay, because they are dirty or on their way.
///
/// Errors: 2xx for no open handle.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_file_invalidate(file: *const File, at: u64, n: u64, stay: *mut usize) -> Error {
    // SAFETY: the caller passes null or a handle.
    let work = || Ok(unsafe { handle::get(file) }?.invalidate(at..at.saturating_add(n)));
    // SAFETY: the caller passes null or a place for a number.
    unsafe { bulk::deliver(work(), stay) }
}

/// The first page at or after `page` that is in the cache, among the next `max` pages; `page + max` if none is, or UINT64_MAX where
/// that would be beyond. Pages are counted from 0, and a run of holes is skipped without a look at each. UINT64_MAX for no open
/// handle.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_file_next_present(file: *const File, page: u64, max: u64) -> u64 {
    // SAFETY: the caller passes null or a handle.
    unsafe { handle::get(file) }.map_or(u64::MAX, |file| file.next_present(page, max))
}

/// The last page at or before `page` that is in the cache, among `max` pages; `page - max` if none is, or 0 where that would be
/// below. UINT64_MAX for no open handle.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_file_prev_present(file: *const File, page: u64, max: u64) -> u64 {
    // SAFETY: the caller passes null or a handle.
    unsafe { handle::get(file) }.map_or(u64::MAX, |file| file.prev_present(page, max))
}

/// Lends `n` bytes from `at` on without a copy, up to the file's end. `*lent` gets the handle, or null. The bytes do not change, and
/// their pages stay, until they are given back, also if the file is closed or cut. They count towards the cache's limit.
///
/// Errors: as for `pagemill_file_read_at`, for any of the pages.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_file_lend(file: *const File, at: u64, n: usize, lent: *mut *mut Lent) -> Error {
    // SAFETY: the caller passes null or a handle, and null or a place for a pointer.
    unsafe { handle::make(lent, || Ok(handle::get(file)?.lend(at, n)?)) }
}

/// The number of bytes lent: fewer than were asked for if the file ends there. 0 for no open handle.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_lent_len(lent: *const Lent) -> usize {
    // SAFETY: the caller passes null or a handle.
    unsafe { handle::get(lent) }.map_or(0, pagemill::Lent::len)
}

/// Describes the bytes lent as an I/O vector, page by page: the first `n` parts at `parts`. Returns how many there are, or 0 for no
/// open handle. Nobody may write to the bytes.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_lent_parts(lent: *const Lent, parts: *mut IoVec, n: usize) -> usize {
    // SAFETY: the caller passes null or a handle.
    let Ok(lent) = (unsafe { handle::get(lent) }) else { return 0 };
    let slices = lent.slices();
    for (at, bytes) in slices.iter().enumerate().take(if parts.is_null() { 0 } else { n }) {
        let part = IoVec { base: bytes.as_ptr().cast_mut().cast(), len: bytes.len() };
        // SAFETY: the caller passes a place for n parts.
        unsafe { parts.add(at).write(part) };
    }
    slices.len()
}

/// Gives back what a page cache has lent.
///
/// Errors: 2xx for no open handle.
///
/// Threads: any, and no thread may use the handle or the bytes meanwhile or later. Signal handlers: no.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_lent_give_back(lent: *mut Lent) -> Error {
    // SAFETY: the caller passes null or a handle.
    code(unsafe { handle::close(lent) }.map(drop))
}
