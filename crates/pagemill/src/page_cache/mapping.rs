//! One file in the cache: its index, its backing, its sizes, and the errors of its write-back (the kernel's
//! `struct address_space`).
//!
//! # Sizes
//! `size` is the length that readers see. `stored` is how much of it the backing has: behind that, a page that is not
//! cached is zeros, and nothing is read. A write lengthens `size`, its write-back `stored`.
//!
//! # Locks, in their order
//! `syncing` or `appending`, then `resizing` (shared by writes and by whoever begins a write-back; alone for a change of
//! the length), then `writes`, then the index, then the lock of the cache's queues; `errors` and `unsynced` come last. A
//! backing is called under `syncing`, `appending` and `resizing` alone.
use super::backing::Io;
use super::index::{Index, Nodes};
use crate::sync::{AtomicU64, AtomicUsize, Condvar, Mutex, MutexGuard, RwLock};
use core::ops::Range;
use core::sync::atomic::Ordering::{Acquire, Relaxed};
use core::time::Duration;
use pagemill_core::PAGE_SIZE;
use std::io;
use std::sync::{Arc, PoisonError};

/// The number of pages that so many bytes need.
pub(super) fn pages_for(bytes: u64) -> u64 {
    bytes.div_ceil(PAGE_SIZE as u64)
}
/// Where a page begins in its file.
pub(super) fn byte_of(page: u64) -> u64 {
    page * PAGE_SIZE as u64
}

pub(super) struct Mapping {
    /// No other file of the cache has it.
    pub(super) number: u32,
    pub(super) index: Index,
    pub(super) io: Arc<Io>,
    pub(super) size: AtomicU64,
    pub(super) stored: AtomicU64,
    pub(super) resizing: RwLock<()>,
    /// Held by the thread whose turn it is to append.
    pub(super) appending: Mutex<()>,
    /// Held by the thread whose turn it is to flush.
    pub(super) syncing: Mutex<()>,
    /// Pages that are to be written.
    pub(super) dirty: AtomicUsize,
    /// The number of openers.
    pub(super) openers: AtomicUsize,
    writes: Mutex<Writes>,
    write_ended: Condvar,
    errors: Mutex<Errors>,
    /// What the last read failed with.
    read_error: Mutex<Option<Arc<io::Error>>>,
    unsynced: Mutex<Ranges>,
}

/// Writes to the backing since the file was opened.
#[derive(Default)]
pub(super) struct Writes {
    pub(super) begun: u64,
    pub(super) ended: u64,
    /// The backing did not end one for so long that nobody waits for it but those who must.
    is_stuck: bool,
}

/// The errors of write-back, as each opener is told them.
#[derive(Default)]
struct Errors {
    /// How many there were.
    count: u64,
    last: Option<Arc<io::Error>>,
    /// Whether some opener was told of the last one.
    is_told: bool,
    /// Whether no write has gone well since.
    is_failing: bool,
}

impl Mapping {
    pub(super) fn new(number: u32, io: Arc<Io>, nodes: Arc<Nodes>) -> io::Result<Self> {
        let len = io.len()?;
        Ok(Self {
            number,
            index: Index::new(nodes),
            io,
            size: AtomicU64::new(len),
            stored: AtomicU64::new(len),
            resizing: RwLock::new(()),
            appending: Mutex::new(()),
            syncing: Mutex::new(()),
            dirty: AtomicUsize::new(0),
            openers: AtomicUsize::new(0),
            writes: Mutex::default(),
            write_ended: Condvar::new(),
            errors: Mutex::default(),
            read_error: Mutex::new(None),
            unsynced: Mutex::default(),
        })
    }

    pub(super) fn len(&self) -> u64 {
        // Acquire pairs with the Release of a write: who sees the length finds the pages.
        self.size.load(Acquire)
    }

    /// Counts a write to the backing that begins.
    pub(super) fn write_begins(&self) {
        lock(&self.writes).begun += 1;
    }
    /// Counts one that ended, and wakes those who wait for it.
    pub(super) fn write_ends(&self) {
        let mut writes = lock(&self.writes);
        writes.ended += 1;
        writes.is_stuck = false;
        drop(writes);
        self.write_ended.notify_all();
    }
    /// Sleeps until as many writes have ended as have begun by now. Others that begin meanwhile do not prolong this.
    pub(super) fn wait_for_writes(&self) {
        let begun = lock(&self.writes).begun;
        self.wait_until_written(|writes| writes.ended >= begun);
    }
    /// The same for one who wants others' memory: no longer than `patience`, and not at all for a backing that was waited
    /// for in vain.
    pub(super) fn wait_for_writes_up_to(&self, patience: Duration) {
        let mut writes = lock(&self.writes);
        let begun = writes.begun;
        while writes.ended < begun && !writes.is_stuck {
            let before = writes.ended;
            let (back, over) = self.write_ended.wait_timeout(writes, patience).unwrap_or_else(PoisonError::into_inner);
            writes = back;
            writes.is_stuck |= over.timed_out() && writes.ended == before;
        }
    }
    /// Whether its backing ends no writes.
    pub(super) fn is_stuck(&self) -> bool {
        lock(&self.writes).is_stuck
    }
    /// Sleeps until `is_over`, which may change as a write ends. It is called with a lock held.
    pub(super) fn wait_until_written(&self, is_over: impl Fn(&Writes) -> bool) {
        let mut writes = lock(&self.writes);
        while !is_over(&writes) {
            writes = self.write_ended.wait(writes).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Notes an error of write-back, for each opener's next `sync`.
    pub(super) fn write_failed(&self, error: Arc<io::Error>) {
        let mut errors = lock(&self.errors);
        errors.count += 1;
        (errors.last, errors.is_told, errors.is_failing) = (Some(error), false, true);
    }
    /// Notes a write that went well.
    pub(super) fn write_succeeded(&self) {
        lock(&self.errors).is_failing = false;
    }
    /// The error of the last write, if it failed.
    pub(super) fn failing(&self) -> Option<Arc<io::Error>> {
        let errors = lock(&self.errors);
        errors.last.clone().filter(|_| errors.is_failing)
    }
    /// The errors that a new opener is not told: those that another has been told.
    pub(super) fn errors_before(&self) -> u64 {
        let errors = lock(&self.errors);
        errors.count - u64::from(errors.last.is_some() && !errors.is_told)
    }
    /// The last error, if there were any since `seen`, which is then up to date.
    pub(super) fn error_since(&self, seen: &AtomicU64) -> Option<Arc<io::Error>> {
        let mut errors = lock(&self.errors);
        // Relaxed: under the lock.
        let is_news = seen.swap(errors.count, Relaxed) < errors.count;
        errors.is_told |= is_news;
        errors.last.clone().filter(|_| is_news)
    }

    /// Takes the lock of the errors.
    #[cfg(test)]
    pub(super) fn hold_errors(&self) -> MutexGuard<'_, impl Sized> {
        lock(&self.errors)
    }

    pub(super) fn read_failed(&self, error: io::Error) {
        *lock(&self.read_error) = Some(Arc::new(error));
    }
    /// What a read failed with, for one of those who waited for it.
    pub(super) fn read_error(&self) -> io::Error {
        let error = lock(&self.read_error).clone();
        error.map_or_else(|| io::Error::other("the read failed"), |error| again(&error))
    }

    /// Notes pages that were written, and are not durable before the backing's next `sync`.
    pub(super) fn written(&self, pages: Range<u64>) {
        lock(&self.unsynced).add(pages);
    }
    /// Takes what was noted.
    pub(super) fn take_unsynced(&self) -> Vec<Range<u64>> {
        core::mem::take(&mut lock(&self.unsynced).0)
    }
}

/// The same error for one more who hears of it.
pub(super) fn again(error: &Arc<io::Error>) -> io::Error {
    match error.raw_os_error() {
        Some(code) => io::Error::from_raw_os_error(code),
        None => io::Error::new(error.kind(), error.clone()),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic under one of these locks leaves nothing half done.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ranges of pages; those that are many are taken together as one.
#[derive(Default)]
struct Ranges(Vec<Range<u64>>);

/// 16 bytes each: no more than a page cache of some hundred pages.
const RANGES_MAX: usize = 4096;

impl Ranges {
    fn add(&mut self, pages: Range<u64>) {
        match self.0.last_mut() {
            Some(last) if last.end == pages.start => last.end = pages.end,
            Some(last) if last.start <= pages.start && pages.end <= last.end => {}
            _ => self.0.push(pages),
        }
        if self.0.len() > RANGES_MAX {
            let start = self.0.iter().map(|range| range.start).min().unwrap_or(0);
            let end = self.0.iter().map(|range| range.end).max().unwrap_or(0);
            self.0.clear();
            self.0.push(start..end);
        }
    }
}
