//! Contents of files: what READ, WRITE and COMMIT do, through a page cache.
//!
//! # The way of a request
//! `table` has the files that are open, of which each has a descriptor and a place in the cache. A READ is lent pages of the
//! cache, and a WRITE moves the pages that it came in into the cache; where its bytes are on no page's boundary, they are
//! copied. `disk` stands between the cache and the file: it keeps the time of the last WRITE, and sets it as the file's as
//! its data reach the file system.
//!
//! # What is promised
//! - D1 A WRITE that was answered with [`Stable::FileSync`], and what a COMMIT that went well covers, is on the disk, if the
//!   verifier of both answers is the same.
//! - D2 An error of write-back is told once: to the next COMMIT or stable WRITE of the file. The verifier changes with it, so
//!   that clients send again what they wrote unstably, whichever of them is told. Pages that are in the cache stay dirty, and
//!   are tried again; if they cannot be written as their file leaves the table either, they are lost. Pages that have left the
//!   cache, as those of a stream do, are lost if a flush fails.
//! - D3 As long as the file system does not have all of a file's writes, [`Data::attributes`] has its length and the time of
//!   its last WRITE. A client that is shown that time as `mtime` and as `ctime` sees `mtime` stay as it is at write-back, and
//!   `ctime` move within the COMMIT alone.
//! - D4 A file has one place in the cache at a time: it is closed before it is opened again.
//! - D5 What others than this server change is seen a second later, by the file's size, `mtime` and `ctime`. Not seen is a
//!   change between two looks in which this server wrote to the file too (so beside a stream of WRITEs none is), one within the same tick of the file system's
//!   clock, or one that leaves the three as they were. Pages that are dirty win over what others write.
//!
//! Call this as the server, not as the caller: only the file's owner, or CAP_FOWNER, may set its times. A server that may not
//! shows the times of its write-back instead.
//!
//! # Locks
//! The table's lock is held for a look-up. No lock is held while a file is opened, read, written or closed, but the place of
//! that file in the table is kept for the thread that opens or closes it.
mod disk;
mod table;
#[cfg(test)]
mod tests;

use crate::call::Payload;
use crate::sync::lock;
use disk::{Disk, Inner, Looked};
use pagemill::{Advice, CachedFile, FileBacking, Lent, PAGE_SIZE, PageCache};
use rustix::fs::Stat;
use rustix::process::{Resource, getrlimit};
use std::collections::hash_map::RandomState;
use std::fs::File;
use std::hash::BuildHasher;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, TryLockError};
use std::time::{Duration, SystemTime};
use table::Table;

/// Files that are open at a time, if the process may have four times as many descriptors: two for each, and half are left for
/// connections.
const FILES_MAX: usize = 1024;

/// A WRITE of so many bytes goes to the file at once, without being durable. Its pages leave the cache unless some of them were
/// there before: the system keeps what is written. Smaller ones stay in the cache, where they are put together and may be
/// overwritten.
const STREAM: usize = 64 << 10;

/// A file that was not looked at for so long may have been changed by others.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Which file. The generation tells apart files that had the same inode one after another.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct FileKey {
    /// `st_dev`
    pub(crate) device: u64,
    /// `st_ino`
    pub(crate) inode: u64,
    pub(crate) generation: u64,
}

/// How durable a WRITE is to be as it is answered (RFC 1813, `stable_how`).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Stable {
    Unstable,
    DataSync,
    FileSync,
}

/// What a READ delivers.
#[derive(Debug)]
pub(crate) struct ReadBytes {
    pub(crate) lent: Lent,
    /// Whether the file ends with them.
    pub(crate) is_end: bool,
}

/// A file that is open here.
pub(crate) struct Opened {
    pub(crate) key: FileKey,
    /// As it is now.
    pub(crate) stat: Stat,
    open: Arc<OpenFile>,
}

impl Opened {
    pub(crate) fn is_writable(&self) -> bool {
        self.open.is_writable
    }
    /// As it has become.
    pub(crate) fn stat_again(&self) -> io::Result<Stat> {
        self.open.disk.stat()
    }
}

/// What a WRITE has done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Written {
    /// Fewer bytes than there were if memory ended.
    pub(crate) count: u32,
    pub(crate) committed: Stable,
    /// That of before the bytes were written: a flush that fails as soon as they are may lose them.
    pub(crate) verifier: [u8; 8],
}

/// What the file system does not know of a file yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Pending {
    pub(crate) len: u64,
    /// When the last WRITE came: `mtime`, and `ctime` too.
    pub(crate) modified: SystemTime,
}

/// The verifier of writes: another one means that data which were written unstably may be lost.
struct Verifier(AtomicU64);

impl Verifier {
    fn new() -> Self {
        Self(AtomicU64::new(random()))
    }
    fn get(&self) -> [u8; 8] {
        self.0.load(Relaxed).to_ne_bytes()
    }
    fn change(&self) {
        // Relaxed: whoever answers a WRITE reads it before the WRITE, and a COMMIT after its flush; each of them is ordered with
        // the change by the locks of the file.
        self.0.store(random(), Relaxed);
    }
}

/// The keys of a hasher are random.
fn random() -> u64 {
    RandomState::new().hash_one(SystemTime::now())
}

/// How a descriptor becomes what the cache reads and writes: a test puts its own disk there.
type Make = dyn Fn(&File) -> io::Result<Inner> + Send + Sync;

/// The contents of all files.
pub(crate) struct Data {
    cache: PageCache,
    table: Table,
    verifier: Arc<Verifier>,
    look_every: Duration,
    make: Box<Make>,
}

impl Data {
    /// Keeps contents in this cache. Pages that come in a WRITE move into it if they are of its allocator.
    pub(crate) fn new(cache: PageCache) -> Self {
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let most = usize::try_from(descriptors / 4).unwrap_or(usize::MAX).clamp(8, FILES_MAX);
        let make = |file: &File| Ok(Inner::File(FileBacking::from_file(file.try_clone()?)?));
        Self::with(cache, most, LOOK_EVERY, Box::new(make))
    }

    fn with(cache: PageCache, most: usize, look_every: Duration, make: Box<Make>) -> Self {
        Self { cache, table: Table::new(most), verifier: Arc::new(Verifier::new()), look_every, make }
    }

    /// The verifier of an answer to COMMIT, to be asked after it. It is another one after a restart, and after data may have been
    /// lost.
    pub(crate) fn verifier(&self) -> [u8; 8] {
        self.verifier.get()
    }

    /// Bytes from `at` on, and whether the file ends with them: fewer than `count` if the cache lacks pages for all of them
    /// now. `open` is called if the file is not open.
    ///
    /// # Errors
    /// Those of `open` and of the file; `OutOfMemory` if all pages of the cache are lent or cannot be written.
    pub(crate) fn read(
        &self,
        key: &FileKey,
        open: impl FnOnce() -> io::Result<OwnedFd>,
        at: u64,
        count: u32,
    ) -> io::Result<ReadBytes> {
        let open = self.get(key, open)?;
        read(&open, at, count)
    }

    /// Notes what a client is about to be told of a file, before it is read: no bytes are older than that then.
    ///
    /// # Errors
    /// Those of the file.
    pub(crate) fn seen(&self, key: &FileKey, now: &Stat) -> io::Result<()> {
        self.table.find(key).map_or(Ok(()), |open| open.look_again(now))
    }

    /// The file of this generation, if it is open: for what needs no other descriptor. None also if others had removed it.
    pub(crate) fn opened(&self, generation: u64) -> Option<Opened> {
        let (key, open) = self.table.of_generation(generation)?;
        let stat = open.disk.stat().ok()?;
        if stat.st_nlink == 0 {
            drop(open);
            self.forget(&key);
            return None;
        }
        Some(Opened { key, stat, open })
    }

    /// As [`read`](Self::read), of a file that is open.
    pub(crate) fn read_opened(&self, opened: &Opened, at: u64, count: u32) -> io::Result<ReadBytes> {
        opened.open.look_again(&opened.stat)?;
        read(&opened.open, at, count)
    }

    /// Writes the payload at `at`. Pages that move into the cache are holes in it afterwards.
    ///
    /// # Errors
    /// As [`read`](Self::read). `PermissionDenied`: `open` gave a descriptor for reading only. A stable write is told errors
    /// of write-back too (D2); its bytes are in the cache then.
    pub(crate) fn write(
        &self,
        key: &FileKey,
        open: impl FnOnce() -> io::Result<OwnedFd>,
        at: u64,
        payload: &mut Payload<'_>,
        stable: Stable,
    ) -> io::Result<Written> {
        self.get_to_write(key, open)?.write(at, payload, stable)
    }

    /// As [`write`](Self::write), of a file that is open for writing.
    pub(crate) fn write_opened(
        &self,
        opened: &Opened,
        at: u64,
        payload: &mut Payload<'_>,
        stable: Stable,
    ) -> io::Result<Written> {
        opened.open.look(self.look_every)?;
        opened.open.write(at, payload, stable)
    }

    /// Makes durable what was written to these bytes; it does so for the whole file.
    ///
    /// # Errors
    /// Those of `open`, and of any write-back of the file that nobody was told yet (D2).
    pub(crate) fn commit(
        &self,
        key: &FileKey,
        open: impl FnOnce() -> io::Result<OwnedFd>,
        at: u64,
        count: u32,
    ) -> io::Result<()> {
        if at.checked_add(u64::from(count)).is_none() {
            return Err(io::Error::new(ErrorKind::InvalidInput, "a commit of bytes that no file can have"));
        }
        self.get(key, open)?.sync()
    }

    /// Changes the length, durably.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub(crate) fn set_len(
        &self,
        key: &FileKey,
        open: impl FnOnce() -> io::Result<OwnedFd>,
        len: u64,
    ) -> io::Result<()> {
        let open = self.get_to_write(key, open)?;
        {
            let _writing = open.disk.write_begins();
            open.file.set_len(len)?;
        }
        open.sync()
    }

    /// The length and the time of the last WRITE, if the file system did not know them when it said `seen`, though it may by now.
    /// Otherwise its own are right. This waits for nothing.
    pub(crate) fn attributes(&self, key: &FileKey, seen: &Stat) -> Option<Pending> {
        self.table.pending(key, seen)
    }

    /// Has the file system know all writes of a file, so that a time which a client sets stays: called before that.
    ///
    /// # Errors
    /// Those of write-back (D2).
    pub(crate) fn settle(&self, key: &FileKey) -> io::Result<()> {
        match self.table.find(key) {
            Some(open) if open.disk.modified().is_some() => open.sync(),
            _ => Ok(()),
        }
    }

    /// Notes that this server has changed the file's mode, owner, times or names, so that it is not taken for a change of the
    /// contents by others (D5), which would have them read again. Without this call nothing is wrong, but slower.
    pub(crate) fn changed_here(&self, key: &FileKey) {
        if let Some(open) = self.table.find(key)
            && let Ok(now) = open.disk.look()
        {
            lock(&open.looked).note(now);
        }
    }

    /// Closes a file that was removed, now or as soon as another file needs its place. It may have other names, so what was
    /// written to it is written to the file.
    pub(crate) fn forget(&self, key: &FileKey) {
        self.table.forget(key);
    }

    /// Closes files that nobody uses any more: those of which nobody asked since the last call but one.
    pub(crate) fn close_idle(&self) {
        self.table.close_idle();
    }

    /// Makes everything durable that was written.
    ///
    /// # Errors
    /// The first of those of write-back; all files are tried.
    pub(crate) fn sync_all(&self) -> io::Result<()> {
        let changed = self.table.all().into_iter().filter(|open| open.disk.modified().is_some());
        changed.map(|open| open.sync()).fold(Ok(()), io::Result::and)
    }

    /// The file, opened if it is not open, and compared with what others made of it if it was not looked at for long.
    fn get(&self, key: &FileKey, open: impl FnOnce() -> io::Result<OwnedFd>) -> io::Result<Arc<OpenFile>> {
        let open = self.table.get(key, || self.open(key, open()?))?;
        open.look(self.look_every)?;
        Ok(open)
    }

    /// As `get`. A file that is open for reading only is opened again: the server may be allowed to write by now.
    fn get_to_write(&self, key: &FileKey, open: impl FnOnce() -> io::Result<OwnedFd>) -> io::Result<Arc<OpenFile>> {
        let mut open = Some(open);
        for _ in 0..2 {
            let mut call = || open.take().map_or_else(|| Err(read_only()), |open| open());
            let found = self.get(key, &mut call)?;
            if found.is_writable {
                return Ok(found);
            }
            drop(found);
            if open.is_none() {
                break;
            }
            self.table.forget(key);
        }
        Err(read_only())
    }

    fn open(&self, key: &FileKey, descriptor: OwnedFd) -> io::Result<OpenFile> {
        let is_writable = rustix::fs::fcntl_getfl(&descriptor)?.contains(rustix::fs::OFlags::RDWR);
        let file = File::from(descriptor);
        let there = file.metadata()?;
        if (there.dev(), there.ino()) != (key.device, key.inode) {
            // A guard: `open` gave another file than the key names.
            return Err(rustix::io::Errno::STALE.into());
        }
        let disk = Arc::new(Disk::new((self.make)(&file)?, file, self.verifier.clone()));
        // Before the cache asks for its length: a change after this is seen.
        let looked = Mutex::new(disk.look()?);
        let file = self.cache.open(disk.clone())?;
        Ok(OpenFile { file, disk, is_writable, looked, verifier: self.verifier.clone() })
    }
}

#[cold]
fn read_only() -> io::Error {
    io::Error::new(ErrorKind::PermissionDenied, "the server can only read the file")
}

/// Lends bytes. Several readers at a time may ask for more than the cache has: if none were content with less, each would hold
/// pages that the others need, and all would begin again.
fn lend(file: &CachedFile, at: u64, count: usize) -> io::Result<Lent> {
    let mut count = count;
    loop {
        match file.lend(at, count) {
            Err(error) if error.kind() == ErrorKind::OutOfMemory && count > PAGE_SIZE => {
                count = (count / 4).max(PAGE_SIZE);
            }
            lent => return lent,
        }
    }
}

/// Bytes from `at` on, and whether the file ends with them.
fn read(open: &OpenFile, at: u64, count: u32) -> io::Result<ReadBytes> {
    let lent = match lend(&open.file, at, count as usize) {
        // Others have cut the file.
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
            open.file.refresh()?;
            lend(&open.file, at, count as usize)?
        }
        lent => lent?,
    };
    let is_end = at.saturating_add(lent.len() as u64) >= open.file.len();
    Ok(ReadBytes { lent, is_end })
}

/// Writes a payload. Returns how many bytes.
fn write(file: &CachedFile, at: u64, payload: &mut Payload<'_>) -> io::Result<usize> {
    // Less than a page is copied: a page that it moved on would need the rest of the old one.
    if payload.len >= PAGE_SIZE && at.is_multiple_of(PAGE_SIZE as u64) {
        return file.write_pages(payload.pages, payload.len, at);
    }
    let mut done = 0;
    while done < payload.len {
        let Some(page) = payload.pages.get(done / PAGE_SIZE).and_then(Option::as_ref) else {
            return Err(io::Error::new(ErrorKind::InvalidInput, "a payload with a hole"));
        };
        let from = &page[..(payload.len - done).min(PAGE_SIZE)];
        let at = at.checked_add(done as u64).ok_or(ErrorKind::FileTooLarge)?;
        match file.write_at(from, at) {
            Ok(written) if written == from.len() => done += written,
            Ok(written) => return Ok(done + written),
            Err(error) if done == 0 => return Err(error),
            Err(_) => break,
        }
    }
    Ok(done)
}

/// A file that is open.
struct OpenFile {
    /// Its one opener: errors of write-back are told once, and streams of several clients are told apart by it.
    file: CachedFile,
    disk: Arc<Disk>,
    is_writable: bool,
    looked: Mutex<Looked>,
    verifier: Arc<Verifier>,
}

impl OpenFile {
    fn write(&self, at: u64, payload: &mut Payload<'_>, stable: Stable) -> io::Result<Written> {
        let verifier = self.verifier.get();
        // Nothing of it is in the cache, so nobody has read it lately.
        let is_stream = payload.len >= STREAM && stable == Stable::Unstable && {
            let (first, pages) = (at / PAGE_SIZE as u64, payload.len.div_ceil(PAGE_SIZE) as u64);
            self.file.next_present(first, pages) >= first.saturating_add(pages)
        };
        let count = if payload.len == 0 {
            0
        } else {
            let _writing = self.disk.write_begins();
            write(&self.file, at, payload)?
        };
        let written = |committed| Written { count: count as u32, committed, verifier };
        if stable != Stable::Unstable {
            self.sync()?;
            return Ok(written(Stable::FileSync));
        }
        if count >= STREAM {
            // The bytes are in this CPU's cache still. The system has them from now on, and the next WRITE gets their pages.
            let bytes = at..at + count as u64;
            self.file.write_back(bytes.clone());
            if is_stream {
                self.file.advise(Advice::DontNeed, bytes);
            }
        }
        Ok(written(Stable::Unstable))
    }

    /// Makes everything durable that was written before.
    fn sync(&self) -> io::Result<()> {
        let changes = self.disk.changes();
        let synced = self.file.sync();
        let now = self.disk.look();
        match &synced {
            Ok(()) => self.disk.saved(changes, now.as_ref().ok()),
            Err(_) => self.verifier.change(),
        }
        if let Ok(now) = now {
            // What changes from now on is others' doing, unless it is a write-back.
            lock(&self.looked).note(now);
        }
        synced
    }

    /// Looks at once if the file is not as it was. A client keeps bytes for as long as the time stays that it was told with
    /// them.
    fn look_again(&self, now: &Stat) -> io::Result<()> {
        let is_another = lock(&self.looked).is_of_another(now);
        self.look(if is_another { Duration::ZERO } else { LOOK_EVERY })
    }

    /// Lets pages go that others have overwritten in the file, if that may be.
    fn look(&self, every: Duration) -> io::Result<()> {
        let mut looked = match self.looked.try_lock() {
            Ok(looked) => looked,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            // Another thread looks.
            Err(TryLockError::WouldBlock) => return Ok(()),
        };
        if looked.at.elapsed() < every {
            return Ok(());
        }
        let now = self.disk.look()?;
        if looked.is_changed_by_others(&now) {
            self.file.refresh()?;
            looked.tries = TRIES;
        }
        // Pages that are lent at this moment are let go next time.
        if looked.tries > 0 {
            let kept = self.file.invalidate(0..u64::MAX);
            looked.tries = if kept == 0 { 0 } else { looked.tries - 1 };
        }
        looked.note(now);
        Ok(())
    }

    /// What the file system did not know yet when it said `seen`.
    fn pending(&self, seen: &Stat) -> Option<Pending> {
        self.unsaved().or_else(|| self.disk.saved_since(seen))
    }

    /// What the file system does not know yet.
    fn unsaved(&self) -> Option<Pending> {
        // The time first: a write that is over meanwhile has lengthened the file.
        let modified = self.disk.modified()?;
        Some(Pending { len: self.file.len(), modified })
    }

    /// Ends its time in the table.
    fn close(self) {
        let synced = if self.disk.modified().is_some() { self.sync() } else { Ok(()) };
        // It tries once more to write what is dirty. Nobody is told of an error, but the verifier is another one.
        if synced.and(self.file.close()).is_err() {
            self.verifier.change();
        }
    }
}

/// Pages that others have overwritten are let go so often until none is in use. Dirty ones stay in any case.
const TRIES: u32 = 8;
