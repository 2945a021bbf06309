//! A file under the cache, and what this server knows of its times.
//!
//! A write-back changes the file's `mtime`, long after the WRITE. So the time of the last WRITE is kept here, and is set as the
//! file's between the write-back of all pages and the flush, by one [`Backing::sync`].
use super::{Pending, Verifier};
use crate::sync::lock;
use pagemill::{Backing, FileBacking};
use rustix::fs::Stat;
use std::fs::{File, FileTimes};
use std::io::{self, IoSlice, IoSliceMut};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime};

/// What reads and writes.
pub(super) enum Inner {
    File(FileBacking),
    /// A test's disk.
    #[cfg(test)]
    Fake(Box<dyn Backing>),
}

impl Inner {
    fn backing(&self) -> &dyn Backing {
        match self {
            Self::File(backing) => backing,
            #[cfg(test)]
            Self::Fake(backing) => &**backing,
        }
    }
}

pub(super) struct Disk {
    inner: Inner,
    file: File,
    writes: Mutex<Writes>,
    /// Counts what this server does to the file, at its beginning and at its end.
    own: AtomicU64,
    verifier: Arc<Verifier>,
}

/// The clients' writes.
#[derive(Default)]
struct Writes {
    /// Counted at their beginning and at their end.
    changes: u64,
    under_way: usize,
    /// When the last one came, if the file does not have it durably.
    modified: Option<SystemTime>,
    /// The file as it was when it had all of them at last.
    saved: Option<Stamp>,
}

/// What tells one state of a file from another.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Stamp {
    len: u64,
    mtime: (i64, i64),
    ctime: (i64, i64),
}

impl Stamp {
    fn of(stat: &Stat) -> Self {
        Self {
            len: stat.st_size as u64,
            mtime: (stat.st_mtime, stat.st_mtime_nsec as i64),
            ctime: (stat.st_ctime, stat.st_ctime_nsec as i64),
        }
    }
}

/// A client's write, under way until this is dropped.
pub(super) struct Writing<'d>(&'d Disk);

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        let mut writes = self.0.writes();
        writes.changes += 1;
        writes.under_way -= 1;
    }
}

impl Disk {
    pub(super) fn new(inner: Inner, file: File, verifier: Arc<Verifier>) -> Self {
        Self { inner, file, writes: Mutex::default(), own: AtomicU64::new(0), verifier }
    }

    pub(super) fn stat(&self) -> io::Result<Stat> {
        Ok(rustix::fs::fstat(&self.file)?)
    }

    fn writes(&self) -> MutexGuard<'_, Writes> {
        lock(&self.writes)
    }

    /// Notes the time of a write, before its bytes are in the cache: once they are, a flush may take them.
    pub(super) fn write_begins(&self) -> Writing<'_> {
        let mut writes = self.writes();
        writes.changes += 1;
        writes.under_way += 1;
        writes.modified = Some(SystemTime::now());
        Writing(self)
    }

    /// The length and the time that the last flush has brought, if this was seen of the file before it.
    pub(super) fn saved_since(&self, seen: &Stat) -> Option<Pending> {
        let saved = self.writes().saved.filter(|saved| saved.ctime > Stamp::of(seen).ctime)?;
        let (seconds, nanoseconds) = saved.mtime;
        let since = Duration::new(seconds.try_into().ok()?, nanoseconds.try_into().ok()?);
        Some(Pending { len: saved.len, modified: SystemTime::UNIX_EPOCH + since })
    }

    /// When the last write came that the file does not have durably.
    pub(super) fn modified(&self) -> Option<SystemTime> {
        self.writes().modified
    }

    pub(super) fn changes(&self) -> u64 {
        self.writes().changes
    }

    /// The file has all writes that were over at this number of changes, and this was seen of it since. A write that was under
    /// way then, or came later, has changed the number or will.
    pub(super) fn saved(&self, changes: u64, now: Option<&Looked>) {
        let mut writes = self.writes();
        if writes.changes == changes && writes.under_way == 0 {
            (writes.modified, writes.saved) = (None, now.map(|now| now.stamp));
        }
    }

    /// What the file system says of the file.
    pub(super) fn look(&self) -> io::Result<Looked> {
        // Before the file is asked: what comes between counts as this server's.
        let own = self.own.load(SeqCst);
        Ok(Looked { at: Instant::now(), stamp: Stamp::of(&self.stat()?), own, tries: 0 })
    }

    /// Does something to the file.
    fn change<T>(&self, change: impl FnOnce(&dyn Backing) -> io::Result<T>) -> io::Result<T> {
        self.own.fetch_add(1, SeqCst);
        let changed = change(self.inner.backing());
        self.own.fetch_add(1, SeqCst);
        changed
    }
}

/// What was seen of a file, and when.
pub(super) struct Looked {
    pub(super) at: Instant,
    stamp: Stamp,
    /// How much this server had done to it.
    own: u64,
    /// How often pages are still to be let go.
    pub(super) tries: u32,
}

impl Looked {
    /// Whether the file changed since, and not by this server.
    pub(super) fn is_changed_by_others(&self, now: &Self) -> bool {
        self.stamp != now.stamp && self.own == now.own
    }
    /// Whether this is not what was seen.
    pub(super) fn is_of_another(&self, now: &Stat) -> bool {
        self.stamp != Stamp::of(now)
    }
    /// Takes a later look in the place of this.
    pub(super) fn note(&mut self, now: Self) {
        *self = Self { tries: self.tries, ..now };
    }
}

impl Backing for Disk {
    fn len(&self) -> io::Result<u64> {
        self.inner.backing().len()
    }
    fn read_vectored_at(&self, into: &mut [IoSliceMut<'_>], at: u64) -> io::Result<usize> {
        self.inner.backing().read_vectored_at(into, at)
    }
    fn write_vectored_at(&self, from: &[IoSlice<'_>], at: u64) -> io::Result<usize> {
        self.change(|inner| inner.write_vectored_at(from, at))
    }
    /// Not `fdatasync`: the time that is set here is to be durable too.
    fn sync(&self) -> io::Result<()> {
        let modified = self.modified();
        self.change(|_| {
            if let Some(modified) = modified {
                // A server that is not the owner may not. Its data are what counts.
                _ = self.file.set_times(FileTimes::new().set_modified(modified));
            }
            let synced = match &self.inner {
                Inner::File(_) => self.file.sync_all(),
                #[cfg(test)]
                Inner::Fake(backing) => backing.sync(),
            };
            // Before anybody hears of it: a flush that begins after this one failed may go well, and must not be answered with
            // the verifier of what this one has lost.
            synced.inspect_err(|_| self.verifier.change())
        })
    }
    fn set_len(&self, len: u64) -> io::Result<()> {
        self.change(|inner| inner.set_len(len))
    }
}
