//! A file under the cache, and what this server knows of its times.
//!
//! A write-back changes the file's `mtime`, long after the WRITE. So the time of the last WRITE is kept here, and is set as the
//! file's between the write-back of all pages and the flush, by one [`Backing::sync`].
use super::Verifier;
use crate::sync::lock;
use pagemill::{Backing, FileBacking};
use std::fs::{File, FileTimes};
use std::io::{self, IoSlice, IoSliceMut};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Instant, SystemTime};

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

    pub(super) fn stat(&self) -> io::Result<rustix::fs::Stat> {
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

    /// When the last write came that the file does not have durably.
    pub(super) fn modified(&self) -> Option<SystemTime> {
        self.writes().modified
    }

    pub(super) fn changes(&self) -> u64 {
        self.writes().changes
    }

    /// The file has all writes that were over at this number of changes. A write that was under way then, or came later, has
    /// changed the number or will.
    pub(super) fn saved(&self, changes: u64) {
        let mut writes = self.writes();
        if writes.changes == changes && writes.under_way == 0 {
            writes.modified = None;
        }
    }

    /// What the file system says of the file.
    pub(super) fn look(&self) -> io::Result<Looked> {
        // Before the file is asked: what comes between counts as this server's.
        let own = self.own.load(SeqCst);
        let there = self.file.metadata()?;
        let stamp = (there.size(), (there.mtime(), there.mtime_nsec()), (there.ctime(), there.ctime_nsec()));
        Ok(Looked { at: Instant::now(), stamp, own, tries: 0 })
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
    /// Length, `mtime`, `ctime`.
    stamp: (u64, (i64, i64), (i64, i64)),
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
    pub(super) fn is_of_another(&self, now: &rustix::fs::Stat) -> bool {
        let (mtime, ctime) = ((now.st_mtime, now.st_mtime_nsec as i64), (now.st_ctime, now.st_ctime_nsec as i64));
        self.stamp != (now.st_size as u64, mtime, ctime)
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
