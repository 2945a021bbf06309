//! An object of a store below a page cache: read only, over the network as a rule.
//!
//! Reads are tasks on a tokio runtime of the program's. Each asks for its range of the object and copies the body's parts into
//! the pages as they arrive.
//!
//! # One version of the object
//! The object's length, ETag and version are those of the first request. Every later one names them (`If-Match`), and its answer
//! is compared with them, since some servers ignore the condition: an object that was replaced gives an error, never pages of
//! two versions. An object without an ETag is compared by length and time of change, which have seconds as a rule.
//!
//! # Failures
//! A body that ends early goes on where it ended. A failed request is repeated, [`ATTEMPTS`] times in a row without a byte at
//! most: the clients of stores already repeat them with growing pauses. What will fail again is not repeated: an object that is
//! gone or was replaced, a refused permission.
#[cfg(all(test, not(any(miri, shuttle))))]
mod http;
#[cfg(all(test, not(any(miri, shuttle))))]
mod tests;

use super::{Backing, ReadTransfer, WriteTransfer};
use crate::process::Stamp;
use core::future::poll_fn;
use core::pin::Pin;
use futures_core::Stream;
use object_store::path::Path;
use object_store::{Error, GetOptions, GetRange, GetResult, ObjectMeta, ObjectStore};
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::sync::{Arc, mpsc};
use tokio::runtime::{Handle, RuntimeFlavor};

/// Requests in a row without a byte until a read fails.
const ATTEMPTS: u32 = 3;

/// An object of an [`ObjectStore`] as a [`Backing`] that is only read. Needs the feature `object_store`.
///
/// The object must stay as it was when this was made. If it is replaced, reads fail with
/// [`StaleNetworkFileHandle`](ErrorKind::StaleNetworkFileHandle), as far as the store tells. Reads that are awaited, and
/// readahead, run on the runtime. A read that blocks its thread must not do so on a thread that drives a runtime of one thread:
/// it fails there.
///
/// ```
/// use object_store::{ObjectStoreExt, memory::InMemory, path::Path};
/// use pagemill::{Backing, ObjectBacking};
/// use std::{io::IoSliceMut, sync::Arc};
///
/// let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build()?;
/// let (store, path) = (Arc::new(InMemory::new()), Path::from("shards/0"));
/// runtime.block_on(store.put(&path, b"tokens".to_vec().into()))?;
///
/// let object = ObjectBacking::open(store.clone(), path.clone(), runtime.handle())?;
/// let mut bytes = [0; 64];
/// assert_eq!(object.read_vectored_at(&mut [IoSliceMut::new(&mut bytes)], 2)?, 4);
/// assert_eq!((&bytes[..4], object.len()?), (&b"kens"[..], 6));
///
/// // Another object under the same name is not mixed with it.
/// runtime.block_on(store.put(&path, b"others".to_vec().into()))?;
/// let stale = object.read_vectored_at(&mut [IoSliceMut::new(&mut bytes)], 0).unwrap_err();
/// assert_eq!(stale.kind(), std::io::ErrorKind::StaleNetworkFileHandle);
/// # std::io::Result::Ok(())
/// ```
#[derive(Debug)]
pub struct ObjectBacking {
    object: Arc<Object>,
    runtime: Handle,
    /// The process that made it: a forked child has none of the runtime's threads.
    stamp: Stamp,
}

#[derive(Debug)]
struct Object {
    store: Arc<dyn ObjectStore>,
    path: Path,
    /// As it was first.
    meta: ObjectMeta,
}

impl ObjectBacking {
    /// An object, asked for its length now. Its reads run on `runtime`; where that has one thread, the program drives it on
    /// another thread than this one. Blocks this thread: in async code, take [`open_async`](Self::open_async).
    ///
    /// # Errors
    /// The store's. [`ErrorKind::NotFound`]: there is no such object.
    pub fn open(store: Arc<dyn ObjectStore>, path: Path, runtime: &Handle) -> io::Result<Self> {
        wait_for(runtime, Self::open_async(store, path))?
    }

    /// As [`open`](Self::open), on the runtime that it is awaited on.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    ///
    /// # Panics
    /// If no runtime of tokio's awaits it.
    ///
    /// ```
    /// # use object_store::{memory::InMemory, path::Path};
    /// # let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    /// let store = std::sync::Arc::new(InMemory::new());
    /// let missing = runtime.block_on(pagemill::ObjectBacking::open_async(store, Path::from("none"))).unwrap_err();
    /// assert_eq!(missing.kind(), std::io::ErrorKind::NotFound);
    /// # std::io::Result::Ok(())
    /// ```
    pub async fn open_async(store: Arc<dyn ObjectStore>, path: Path) -> io::Result<Self> {
        crate::registry::watch(); // The fork hooks must be registered before the stamp is taken.
        let (runtime, stamp) = (Handle::current(), Stamp::here());
        let mut attempt = 1;
        let meta = loop {
            let head = GetOptions { head: true, ..GetOptions::default() };
            match store.get_opts(&path, head).await.map_err(Failure::of) {
                Ok(answer) => break answer.meta,
                Err(failure) if failure.is_final || attempt == ATTEMPTS => return Err(failure.error),
                Err(_) => attempt += 1,
            }
        };
        Ok(Self { object: Arc::new(Object { store, path, meta }), runtime, stamp })
    }

    fn refuse_inherited(&self) -> io::Result<()> {
        match self.stamp.is_inherited() {
            true => Err(io::Error::other("the runtime that reads the object is the parent process's: open it again")),
            false => Ok(()),
        }
    }
}

/// Runs `work` on the runtime, and waits for it here.
fn wait_for<T: Send + 'static>(runtime: &Handle, work: impl Future<Output = T> + Send + 'static) -> io::Result<T> {
    if let Ok(here) = Handle::try_current()
        && here.id() == runtime.id()
        && here.runtime_flavor() == RuntimeFlavor::CurrentThread
    {
        return Err(io::Error::new(
            ErrorKind::Deadlock,
            "a runtime of one thread would wait for itself: read on another thread, or await the read",
        ));
    }
    let (says, hears) = mpsc::sync_channel(1);
    // The receiver is there until it has received. The task is nobody's to join.
    drop(runtime.spawn(async move { says.send(work.await) }));
    hears.recv().map_err(|_| io::Error::other("the runtime has shut down, or the store panicked"))
}

/// A request that failed.
struct Failure {
    error: io::Error,
    is_final: bool,
}

impl Failure {
    fn of(error: Error) -> Self {
        let (kind, is_final) = match &error {
            Error::NotFound { .. } => (ErrorKind::NotFound, true),
            Error::Precondition { .. } | Error::NotModified { .. } => (ErrorKind::StaleNetworkFileHandle, true),
            Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => (ErrorKind::PermissionDenied, true),
            Error::NotSupported { .. } | Error::NotImplemented { .. } => (ErrorKind::Unsupported, true),
            _ => (ErrorKind::Other, false),
        };
        Self { error: io::Error::new(kind, error), is_final }
    }

    fn last(kind: ErrorKind, why: String) -> Self {
        Self { error: io::Error::new(kind, why), is_final: true }
    }
}

impl Object {
    /// The part of a read of `len` bytes at `at` that lies in the object, in bytes.
    fn inside(&self, at: u64, len: usize) -> usize {
        self.meta.size.saturating_sub(at).min(len as u64) as usize
    }

    /// Reads `len` bytes at `at`, all inside the object, and passes them on in their order.
    async fn read(
        &self,
        at: u64,
        len: usize,
        take: &mut (dyn FnMut(&[u8]) -> io::Result<()> + Send),
    ) -> io::Result<()> {
        let (mut done, mut attempt) = (0, 1);
        while done < len {
            let before = done;
            let failure = match self.request(at + done as u64, len - done, &mut done, take).await {
                Ok(()) => continue,
                Err(failure) => failure,
            };
            attempt = if done > before { 1 } else { attempt + 1 };
            if failure.is_final || attempt > ATTEMPTS {
                return Err(failure.error);
            }
        }
        Ok(())
    }

    /// One request for `len` bytes at `at`. Adds what it passed on to `done`, also if it fails.
    async fn request(
        &self,
        at: u64,
        len: usize,
        done: &mut usize,
        take: &mut (dyn FnMut(&[u8]) -> io::Result<()> + Send),
    ) -> Result<(), Failure> {
        let range = at..at + len as u64;
        // A weak ETag matches nothing, as HTTP defines it.
        let if_match = self.meta.e_tag.clone().filter(|tag| !tag.starts_with("W/"));
        let range_of = Some(GetRange::Bounded(range.clone()));
        let version = self.meta.version.clone();
        let options = GetOptions { range: range_of, if_match, version, ..GetOptions::default() };
        let answer = self.store.get_opts(&self.path, options).await.map_err(Failure::of)?;
        self.refuse_changed(&answer.meta)?;
        if answer.range.start != range.start || answer.range.end > range.end {
            let why = format!("{}: asked for bytes {range:?}, and answered with {:?}", self.path, answer.range);
            return Err(Failure::last(ErrorKind::InvalidData, why));
        }
        self.take_body(answer, len, done, take).await
    }

    async fn take_body(
        &self,
        answer: GetResult,
        len: usize,
        done: &mut usize,
        take: &mut (dyn FnMut(&[u8]) -> io::Result<()> + Send),
    ) -> Result<(), Failure> {
        let mut parts = answer.into_stream();
        let mut left = len;
        while let Some(part) = next(parts.as_mut()).await {
            let part = part.map_err(Failure::of)?;
            if part.len() > left {
                let why = format!("{}: the body is longer than the {len} bytes that were asked for", self.path);
                return Err(Failure::last(ErrorKind::InvalidData, why));
            }
            take(&part).map_err(|error| Failure { error, is_final: true })?;
            (left, *done) = (left - part.len(), *done + part.len());
        }
        if left == 0 {
            return Ok(());
        }
        let why = format!("{}: the body ends {left} bytes before the {len} that were asked for", self.path);
        Err(Failure { error: io::Error::new(ErrorKind::UnexpectedEof, why), is_final: false })
    }

    /// Compares the object of an answer with the first one.
    fn refuse_changed(&self, now: &ObjectMeta) -> Result<(), Failure> {
        let then = &self.meta;
        // Some stores leave the ETag out of some answers.
        let is_same = now.size == then.size
            && match (&now.e_tag, &then.e_tag) {
                (Some(now), Some(then)) => now == then,
                _ => now.last_modified == then.last_modified,
            };
        match is_same {
            true => Ok(()),
            false => {
                let why = format!("{}: the object was replaced since it was opened", self.path);
                Err(Failure::last(ErrorKind::StaleNetworkFileHandle, why))
            }
        }
    }
}

/// The next item of a stream.
async fn next<T>(mut stream: Pin<&mut (impl Stream<Item = T> + ?Sized)>) -> Option<T> {
    poll_fn(|context| stream.as_mut().poll_next(context)).await
}

fn read_only<T>() -> io::Result<T> {
    Err(io::Error::new(ErrorKind::ReadOnlyFilesystem, "an object of a store is only read: write a new one instead"))
}

impl Backing for ObjectBacking {
    /// The length that it had when it was opened.
    fn len(&self) -> io::Result<u64> {
        Ok(self.object.meta.size)
    }

    fn read_vectored_at(&self, into: &mut [IoSliceMut<'_>], at: u64) -> io::Result<usize> {
        self.refuse_inherited()?;
        let len = self.object.inside(at, into.iter().map(|slice| slice.len()).sum());
        let object = self.object.clone();
        let bytes = wait_for(&self.runtime, async move {
            let mut bytes = Vec::with_capacity(len);
            let mut take = |part: &[u8]| {
                bytes.extend_from_slice(part);
                Ok(())
            };
            object.read(at, len, &mut take).await.map(|()| bytes)
        })??;
        let mut rest = &bytes[..];
        into.iter_mut().map(|slice| io::Read::read(&mut rest, slice)).sum()
    }

    /// Refused: objects are only read.
    fn write_vectored_at(&self, _: &[IoSlice<'_>], _: u64) -> io::Result<usize> {
        read_only()
    }

    /// Nothing was written.
    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    /// Refused: objects are only read.
    fn set_len(&self, _: u64) -> io::Result<()> {
        read_only()
    }

    fn start_read(&self, mut read: ReadTransfer) -> Option<ReadTransfer> {
        if let Err(error) = self.refuse_inherited() {
            read.complete(Err(error));
            return None;
        }
        let object = self.object.clone();
        let work = async move {
            let (at, len) = (read.at(), object.inside(read.at(), read.len()));
            let result = object.read(at, len, &mut |part| read.copy_from(part)).await;
            // 0 more: the object ends here, or all is read.
            read.complete(result.map(|()| 0));
        };
        // Where the runtime has shut down, the task is dropped, and the transfer fails.
        drop(self.runtime.spawn(work));
        None
    }

    fn start_write(&self, write: WriteTransfer) -> Option<WriteTransfer> {
        write.complete(read_only());
        None
    }
}
