//! Sources in memory that take no part of their own in the figures: one that takes its time, and one that has only zeros.
//!
//! A [`Delayed`] source answers each read a fixed delay after it began, and moves a fixed number of bytes a second, one
//! read after the other, as a disk far away does. It writes the first word of each page, and leaves the rest as it is.

use std::io::{self, IoSlice, IoSliceMut};
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use pagemill::{Backing, ReadTransfer};

use super::cold::{Pass, Pattern, Way, by_cache, by_calls, cache_over, empty};
use super::word_of;
use crate::subject::{Flaw, PAGE_BYTES};

/// What a source delivers, in bytes a second.
pub(crate) const RATE: f64 = 1e9;

/// See the [module](self).
pub(crate) struct Delayed {
    bytes: u64,
    delay: Duration,
    /// When the last of the bytes that were asked for have been moved.
    busy_until: Mutex<Instant>,
    /// `None`: it makes blocking calls alone.
    queue: Option<Sender<(Instant, ReadTransfer)>>,
}

impl Delayed {
    /// A source of so many pages. With `begins`, it takes reads and completes them on a thread of its own.
    pub(crate) fn new(pages: usize, delay: Duration, begins: bool) -> Delayed {
        let queue = begins.then(|| {
            let (queue, reads) = channel::<(Instant, ReadTransfer)>();
            // Ends when the source is dropped.
            std::thread::spawn(move || {
                for (at, mut read) in reads {
                    sleep_until(at);
                    let (first, len) = (read.at(), read.len());
                    fill(&mut read.slices(), first);
                    read.complete(Ok(len));
                }
            });
            queue
        });
        Delayed { bytes: (pages * PAGE_BYTES) as u64, delay, busy_until: Mutex::new(Instant::now()), queue }
    }

    /// Notes a read that begins now, and says when it ends.
    fn end_of(&self, bytes: usize) -> Instant {
        let mut busy_until = self.busy_until.lock().unwrap_or_else(PoisonError::into_inner);
        *busy_until = Instant::now().max(*busy_until) + Duration::from_secs_f64(bytes as f64 / RATE);
        *busy_until + self.delay
    }
}

fn sleep_until(at: Instant) {
    std::thread::sleep(at.saturating_duration_since(Instant::now()));
}

fn fill(slices: &mut [IoSliceMut<'_>], at: u64) {
    let mut page = at / PAGE_BYTES as u64;
    for slice in slices {
        for bytes in slice.chunks_mut(PAGE_BYTES) {
            bytes[..8].copy_from_slice(&word_of(page).to_ne_bytes());
            page += 1;
        }
    }
}

impl Backing for Delayed {
    fn len(&self) -> io::Result<u64> {
        Ok(self.bytes)
    }
    fn read_vectored_at(&self, into: &mut [IoSliceMut<'_>], at: u64) -> io::Result<usize> {
        let bytes = into.iter().map(|slice| slice.len()).sum();
        sleep_until(self.end_of(bytes));
        fill(into, at);
        Ok(bytes)
    }
    fn start_read(&self, read: ReadTransfer) -> Option<ReadTransfer> {
        let Some(queue) = &self.queue else { return Some(read) };
        let at = self.end_of(read.len());
        queue.send((at, read)).err().map(|refused| refused.0.1)
    }
    fn write_vectored_at(&self, _: &[IoSlice<'_>], _: u64) -> io::Result<usize> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }
    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
    fn set_len(&self, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }
}

/// A cache over a delayed source.
pub(crate) struct Through {
    cache: pagemill::PageCache,
    files: Vec<pagemill::CachedFile>,
}

impl Through {
    pub(crate) fn new(pages: usize, delay: Duration, begins: bool, window: Option<usize>) -> Result<Through, Flaw> {
        let (cache, files) = cache_over(Delayed::new(pages, delay, begins), pages, window, false)?;
        // Commits the memory.
        files[0].advise(pagemill::Advice::WillNeed, 0..u64::MAX);
        for page in 0..pages {
            files[0].read_at(&mut [0], (page * PAGE_BYTES) as u64)?;
        }
        Ok(Through { cache, files })
    }
}

impl Way for Through {
    fn chill(&mut self, _: &Pattern) -> Result<(), Flaw> {
        self.files = vec![self.files[0].reopen()];
        empty(&self.cache, &self.files[0])
    }
    fn pass(&mut self, pattern: &Pattern) -> Result<Pass, Flaw> {
        by_cache(&self.cache, &self.files, pattern)
    }
}

/// The same reads without a cache, one at a time.
pub(crate) struct OneByOne(pub(crate) Delayed);

impl Way for OneByOne {
    fn chill(&mut self, _: &Pattern) -> Result<(), Flaw> {
        Ok(())
    }
    fn pass(&mut self, pattern: &Pattern) -> Result<Pass, Flaw> {
        let read = |_, into: &mut [u8], at| self.0.read_vectored_at(&mut [IoSliceMut::new(into)], at);
        let (elapsed, sum) = by_calls(pattern, read)?;
        Ok(Pass { elapsed, fetched: Some(pattern.asked() as u64), hits: None, sum })
    }
}

/// A source of zeros without end, for caches of which only the hits count.
pub(crate) struct Zeros(pub(crate) u64);

impl Backing for Zeros {
    fn len(&self) -> io::Result<u64> {
        Ok(self.0)
    }
    fn read_vectored_at(&self, into: &mut [IoSliceMut<'_>], _: u64) -> io::Result<usize> {
        // The bytes do not matter, so that they are not written.
        Ok(into.iter().map(|slice| slice.len()).sum())
    }
    fn write_vectored_at(&self, from: &[IoSlice<'_>], _: u64) -> io::Result<usize> {
        Ok(from.iter().map(|slice| slice.len()).sum())
    }
    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
    fn set_len(&self, _: u64) -> io::Result<()> {
        Ok(())
    }
}
