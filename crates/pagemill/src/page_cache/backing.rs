//! What a page cache reads from and writes to, and the transfers between it and the pages.
//!
//! A transfer stands between the cache, which owns the pages, and a [`Backing`], which fills or stores them. The cache makes it
//! (`new`), gives it to the backing by way of [`Io`], and hears of its end by a function that is called once.
//!
//! # The way of a transfer
//! [`Io::read`] offers it to [`Backing::start_read`]. A backing that takes it completes it later, on any thread. One that hands
//! it back is read by a thread of the cache's [`Workers`] with blocking calls. A short answer goes on with the rest, always by
//! blocking calls: a backing that answers byte by byte would otherwise recurse. [`Io::read_here`] makes the blocking calls on
//! the calling thread, for a reader that would wait anyway. Writes go the same ways.
//!
//! # Invariants
//! - T1 While a transfer exists, its memory is the transfer's: for a read nothing else touches it, for a write nothing else
//!   writes to it. This ends when `done` is called, or never.
//! - T2 `done` is called once at most, and exactly once unless the transfer is forgotten: at completion or on drop.
//! - T3 `moved + left` is the length of all pieces; `at` belongs to the first byte of `left`.
//! - T4 A read ends with fewer bytes than it is long only where the backing ends. A write never does.
//!
//! No lock is held while a backing or `done` is called.
#[cfg(all(test, not(shuttle)))]
mod tests;

use super::workers::{Urgency, Workers};
use crate::sync::{survive, thread_local};
use core::cell::Cell;
use core::ffi::c_void;
use core::fmt;
use core::ptr::NonNull;
use core::slice;
use pagemill_os::file::SLICES_MAX;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::sync::Arc;

/// The largest number of pieces in one request.
const PIECES_MAX: usize = SLICES_MAX;
/// The documentation says so.
const _: () = assert!(PIECES_MAX == 1024);

/// What a page cache reads from and writes to: a file, a block device, an image, or anything else that reads and writes
/// vectors.
///
/// All calls may come from several threads at once. Those for one range of bytes never overlap with a write to it. A panic in a
/// call fails that transfer and nothing else.
///
/// A call may allocate; the reclaim that it causes writes nothing. It may read and write files of *another* page cache, but
/// none of its own cache's: the threads that read ahead would wait for each other. A backing that never ends a write, or
/// forgets it, is waited for by `sync`, by changes of its length and by the last drop of its file, for ever; others wait ten
/// seconds for it, once.
///
/// ```
/// use pagemill::Backing;
/// use std::io::{self, IoSlice, IoSliceMut, Read, Write};
/// use std::sync::Mutex;
///
/// /// A file in memory.
/// struct InMemory(Mutex<Vec<u8>>);
///
/// impl Backing for InMemory {
///     fn len(&self) -> io::Result<u64> {
///         Ok(self.0.lock().unwrap().len() as u64)
///     }
///     fn read_vectored_at(&self, into: &mut [IoSliceMut<'_>], at: u64) -> io::Result<usize> {
///         let bytes = self.0.lock().unwrap();
///         let rest = bytes.get(at as usize..).unwrap_or_default();
///         (&rest[..]).read_vectored(into)
///     }
///     fn write_vectored_at(&self, from: &[IoSlice<'_>], at: u64) -> io::Result<usize> {
///         let (mut bytes, end) = (self.0.lock().unwrap(), at as usize + from.iter().map(|slice| slice.len()).sum::<usize>());
///         let len = bytes.len().max(end);
///         bytes.resize(len, 0);
///         (&mut bytes[at as usize..]).write_vectored(from)
///     }
///     fn sync(&self) -> io::Result<()> {
///         Ok(())
///     }
///     fn set_len(&self, len: u64) -> io::Result<()> {
///         self.0.lock().unwrap().resize(len as usize, 0);
///         Ok(())
///     }
/// }
///
/// let backing = InMemory(Mutex::new(Vec::new()));
/// assert_eq!(backing.write_vectored_at(&[IoSlice::new(b"some "), IoSlice::new(b"bytes")], 2)?, 10);
/// let mut read = [0; 64];
/// assert_eq!(backing.read_vectored_at(&mut [IoSliceMut::new(&mut read)], 7)?, 5);
/// assert_eq!((&read[..5], backing.len()?), (&b"bytes"[..], 12));
/// # io::Result::Ok(())
/// ```
pub trait Backing: Send + Sync + 'static {
    /// Its length in bytes, now.
    ///
    /// # Errors
    /// Whatever the backing reports; so do the other functions.
    fn len(&self) -> io::Result<u64>;

    /// Whether it has no bytes.
    ///
    /// # Errors
    /// As [`len`](Self::len).
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Reads as `preadv(2)` does: may read less than there is room for, and reads 0 bytes only at the end or beyond it.
    ///
    /// # Errors
    /// [`ErrorKind::Interrupted`] is tried again. Any other error fails the transfer.
    fn read_vectored_at(&self, into: &mut [IoSliceMut<'_>], at: u64) -> io::Result<usize>;

    /// Writes as `pwritev(2)` does: may write less than it was given. A write beyond the end lengthens the backing.
    ///
    /// # Errors
    /// As [`read_vectored_at`](Self::read_vectored_at). 0 bytes of some is an error as well.
    fn write_vectored_at(&self, from: &[IoSlice<'_>], at: u64) -> io::Result<usize>;

    /// Returns once everything written before is durable, as `fdatasync(2)` does.
    ///
    /// # Errors
    /// As [`len`](Self::len).
    fn sync(&self) -> io::Result<()>;

    /// Cuts it, or lengthens it with zeros.
    ///
    /// # Errors
    /// As [`len`](Self::len).
    fn set_len(&self, len: u64) -> io::Result<()>;

    /// Begins a read and returns without waiting for it. The transfer is [completed](ReadTransfer::complete) later, on any
    /// thread. A backing that cannot begin it now hands it back: a thread of the cache then calls
    /// [`read_vectored_at`](Self::read_vectored_at).
    fn start_read(&self, read: ReadTransfer) -> Option<ReadTransfer> {
        Some(read)
    }

    /// As [`start_read`](Self::start_read), for a write.
    fn start_write(&self, write: WriteTransfer) -> Option<WriteTransfer> {
        Some(write)
    }

    /// The most bytes that one call of [`read_vectored_at`](Self::read_vectored_at) or
    /// [`write_vectored_at`](Self::write_vectored_at) should have. 0 counts as 1.
    fn largest(&self) -> usize {
        usize::MAX
    }
}

impl<B: Backing + ?Sized> Backing for Arc<B> {
    fn len(&self) -> io::Result<u64> {
        (**self).len()
    }
    fn read_vectored_at(&self, into: &mut [IoSliceMut<'_>], at: u64) -> io::Result<usize> {
        (**self).read_vectored_at(into, at)
    }
    fn write_vectored_at(&self, from: &[IoSlice<'_>], at: u64) -> io::Result<usize> {
        (**self).write_vectored_at(from, at)
    }
    fn sync(&self) -> io::Result<()> {
        (**self).sync()
    }
    fn set_len(&self, len: u64) -> io::Result<()> {
        (**self).set_len(len)
    }
    fn start_read(&self, read: ReadTransfer) -> Option<ReadTransfer> {
        (**self).start_read(read)
    }
    fn start_write(&self, write: WriteTransfer) -> Option<WriteTransfer> {
        (**self).start_write(write)
    }
    fn largest(&self) -> usize {
        (**self).largest()
    }
}

/// Called with the number of bytes that were moved.
pub(super) type Done = Box<dyn FnOnce(io::Result<usize>) + Send>;

/// Memory of one run of pages, laid out as `struct iovec`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Piece {
    base: NonNull<u8>,
    len: usize,
}

struct Transfer {
    at: u64,
    pieces: Vec<Piece>,
    /// The first piece that is not moved in full. It is cut by what was moved of it.
    first: usize,
    left: usize,
    moved: usize,
    /// Where the rest goes after a short answer.
    io: Option<(Arc<Io>, Urgency)>,
    done: Option<Done>,
}

// SAFETY: by T1 the memory is the transfer's alone (or nothing writes to it), on whichever thread it is. `done` is `Send`.
unsafe impl Send for Transfer {}

impl Transfer {
    fn new(at: u64, memory: Vec<(NonNull<u8>, usize)>, done: Done) -> Self {
        let pieces: Vec<_> =
            memory.into_iter().filter(|&(_, len)| len > 0).map(|(base, len)| Piece { base, len }).collect();
        let left = pieces.iter().map(|piece| piece.len).sum();
        Self { at, pieces, first: 0, left, moved: 0, io: None, done: Some(done) }
    }

    /// The pieces of the next request, with `most` bytes at most.
    fn next(&self, most: usize) -> impl Iterator<Item = Piece> {
        let mut room = most.max(1);
        self.pieces[self.first..].iter().take(PIECES_MAX).map_while(move |&Piece { base, len }| {
            let len = len.min(room);
            room -= len;
            (len > 0).then_some(Piece { base, len })
        })
    }

    fn iovecs(&mut self) -> (NonNull<c_void>, usize) {
        let rest = &mut self.pieces[self.first..];
        (NonNull::from(&mut *rest).cast(), rest.len().min(PIECES_MAX))
    }

    fn advance(&mut self, bytes: usize) -> io::Result<()> {
        if bytes > self.left {
            return Err(lie(bytes, self.left));
        }
        (self.at, self.left, self.moved) = (self.at + bytes as u64, self.left - bytes, self.moved + bytes);
        let mut bytes = bytes;
        while bytes > 0 {
            let piece = &mut self.pieces[self.first];
            if bytes < piece.len {
                // SAFETY: inside the piece.
                piece.base = unsafe { piece.base.add(bytes) };
                piece.len -= bytes;
                break;
            }
            bytes -= piece.len;
            self.first += 1;
        }
        Ok(())
    }

    fn finish(mut self, result: io::Result<usize>) {
        if let Some(done) = self.done.take() {
            done(result);
        }
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        if let Some(done) = self.done.take() {
            done(Err(io::Error::other("the backing dropped a transfer without completing it")));
        }
    }
}

impl fmt::Debug for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes at {}, after {}", self.left, self.at, self.moved)
    }
}

#[cold]
fn lie(bytes: usize, asked: usize) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, format!("the backing claims {bytes} bytes of a transfer of {asked}"))
}

#[cold]
fn panicked() -> io::Error {
    io::Error::other("the backing panicked")
}

#[cold]
fn without_route() -> io::Error {
    io::Error::new(ErrorKind::UnexpectedEof, "a short answer, and the transfer has nowhere to go on")
}

/// A read that a [`Backing`] has begun: the right to write to the memory of some pages until it is
/// [completed](Self::complete).
///
/// One that is dropped before fails with an error that says so. After `mem::forget`, the cache never uses that memory again.
///
/// A backing with threads of its own:
/// ```
/// use pagemill::{Backing, ReadTransfer};
/// # use std::io::{self, IoSlice, IoSliceMut};
/// use std::sync::mpsc::{Sender, channel};
///
/// struct Queued(Sender<ReadTransfer>);
///
/// impl Backing for Queued {
///     fn start_read(&self, read: ReadTransfer) -> Option<ReadTransfer> {
///         // Where the thread has ended, the cache makes the blocking call instead.
///         self.0.send(read).err().map(|refused| refused.0)
///     }
///     // ...
/// #   fn len(&self) -> io::Result<u64> { Ok(0) }
/// #   fn read_vectored_at(&self, _: &mut [IoSliceMut<'_>], _: u64) -> io::Result<usize> { Ok(0) }
/// #   fn write_vectored_at(&self, _: &[IoSlice<'_>], _: u64) -> io::Result<usize> { Ok(0) }
/// #   fn sync(&self) -> io::Result<()> { Ok(()) }
/// #   fn set_len(&self, _: u64) -> io::Result<()> { Ok(()) }
/// }
///
/// let (sender, reads) = channel::<ReadTransfer>();
/// let thread = std::thread::spawn(move || {
///     for mut read in reads {
///         // Everything reads as ones here.
///         let bytes = read.len();
///         read.slices().iter_mut().for_each(|slice| slice.fill(1));
///         read.complete(Ok(bytes));
///     }
/// });
/// drop(Queued(sender));
/// thread.join().unwrap();
/// ```
#[must_use = "dropped, it fails"]
#[derive(Debug)]
pub struct ReadTransfer(Transfer);

/// A write that a [`Backing`] has begun: the memory of some pages, which nothing changes until it is
/// [completed](Self::complete). Otherwise as [`ReadTransfer`].
///
/// ```
/// /// What a backing that compresses does with its writes.
/// fn write(write: pagemill::WriteTransfer, compressed: &mut Vec<u8>) {
///     for slice in write.slices() {
///         compressed.extend(slice.iter().filter(|&&byte| byte != 0));
///     }
///     let bytes = write.slices().iter().map(|slice| slice.len()).sum();
///     write.complete(Ok(bytes)); // the rest comes by itself if there are more than 1024 slices
/// }
/// ```
#[must_use = "dropped, it fails"]
#[derive(Debug)]
pub struct WriteTransfer(Transfer);

impl ReadTransfer {
    /// A read of the bytes at `at` into `memory`. `done` hears how many bytes were read: fewer than `memory` has only if the
    /// backing ends there.
    ///
    /// # Safety
    /// Until `done` is called, all of `memory` is valid for reads and writes, and nothing but the transfer touches it. That may
    /// be for ever.
    pub(super) unsafe fn new(at: u64, memory: Vec<(NonNull<u8>, usize)>, done: Done) -> Self {
        Self(Transfer::new(at, memory, done))
    }

    /// The memory that is not read yet, in its order: up to 1024 slices.
    pub fn slices(&mut self) -> Vec<IoSliceMut<'_>> {
        self.slices_up_to(usize::MAX)
    }

    fn slices_up_to(&mut self, most: usize) -> Vec<IoSliceMut<'_>> {
        // SAFETY: valid and the transfer's alone, as the caller of `new` promised; borrowed as long as the transfer is.
        let slice = |piece: Piece| unsafe { slice::from_raw_parts_mut(piece.base.as_ptr(), piece.len) };
        self.0.next(most).map(|piece| IoSliceMut::new(slice(piece))).collect()
    }

    /// Copies the next `bytes` of the backing to the memory, and [advances](Self::advance). For a backing that has them in
    /// memory of its own.
    ///
    /// # Errors
    /// There are more bytes than are left to read. Nothing has changed then.
    ///
    /// ```
    /// /// A part of an answer has arrived.
    /// fn arrived(read: &mut pagemill::ReadTransfer, part: &[u8]) -> std::io::Result<()> {
    ///     read.copy_from(part)
    /// }
    /// ```
    pub fn copy_from(&mut self, bytes: &[u8]) -> io::Result<()> {
        if bytes.len() > self.len() {
            return Err(lie(bytes.len(), self.len()));
        }
        let mut rest = bytes;
        while !rest.is_empty() {
            let mut slices = self.slices_up_to(rest.len());
            let copied = slices.iter_mut().fold(0, |copied, slice| {
                let end = copied + slice.len();
                slice.copy_from_slice(&rest[copied..end]);
                end
            });
            drop(slices);
            self.0.advance(copied)?;
            rest = &rest[copied..];
        }
        Ok(())
    }

    /// The result of the read. 0 bytes: the backing ends here. Fewer bytes than [`len`](Self::len), or
    /// [`ErrorKind::Interrupted`]: the cache reads the rest by blocking calls. More: an error.
    pub fn complete(mut self, result: io::Result<usize>) {
        match self.take(result) {
            Some(result) => self.0.finish(result),
            None => self.go_on(),
        }
    }

    /// Takes the result of one request. `None`: there is more to read.
    fn take(&mut self, result: io::Result<usize>) -> Option<io::Result<usize>> {
        match result.and_then(|bytes| self.0.advance(bytes).map(|()| bytes)) {
            Ok(bytes) if bytes == 0 || self.0.left == 0 => Some(Ok(self.0.moved)),
            Ok(_) => None,
            Err(error) if error.kind() == ErrorKind::Interrupted => None,
            Err(error) => Some(Err(error)),
        }
    }

    /// Leaves the rest to a thread of the cache.
    fn go_on(self) {
        match self.0.io.clone() {
            Some((io, urgency)) => io.workers.submit(urgency, {
                let io = io.clone();
                move || io.read_here(self)
            }),
            None => self.0.finish(Err(without_route())),
        }
    }
}

impl WriteTransfer {
    /// A write of `memory` to the bytes at `at`. `done` hears the length of `memory`, or an error.
    ///
    /// # Safety
    /// Until `done` is called, all of `memory` is valid for reads, and nothing writes to it. That may be for ever.
    pub(super) unsafe fn new(at: u64, memory: Vec<(NonNull<u8>, usize)>, done: Done) -> Self {
        Self(Transfer::new(at, memory, done))
    }

    /// The memory that is not written yet, in its order: up to 1024 slices.
    pub fn slices(&self) -> Vec<IoSlice<'_>> {
        self.slices_up_to(usize::MAX)
    }

    fn slices_up_to(&self, most: usize) -> Vec<IoSlice<'_>> {
        // SAFETY: valid, and nothing writes to it, as the caller of `new` promised; borrowed as long as the transfer is.
        let slice = |piece: Piece| unsafe { slice::from_raw_parts(piece.base.as_ptr(), piece.len) };
        self.0.next(most).map(|piece| IoSlice::new(slice(piece))).collect()
    }

    /// The result of the write. Fewer bytes than [`len`](Self::len), or [`ErrorKind::Interrupted`]: the cache writes the rest by
    /// blocking calls. 0 bytes, or more than there are: an error.
    pub fn complete(mut self, result: io::Result<usize>) {
        match self.take(result) {
            Some(result) => self.0.finish(result),
            None => self.go_on(),
        }
    }

    /// Takes the result of one request. `None`: there is more to write.
    fn take(&mut self, result: io::Result<usize>) -> Option<io::Result<usize>> {
        match result.and_then(|bytes| self.0.advance(bytes).map(|()| bytes)) {
            Ok(_) if self.0.left == 0 => Some(Ok(self.0.moved)),
            Ok(0) => Some(Err(io::Error::new(ErrorKind::WriteZero, "the backing writes nothing more"))),
            Ok(_) => None,
            Err(error) if error.kind() == ErrorKind::Interrupted => None,
            Err(error) => Some(Err(error)),
        }
    }

    /// Leaves the rest to a thread of the cache.
    fn go_on(self) {
        match self.0.io.clone() {
            Some((io, urgency)) => io.workers.submit(urgency, {
                let io = io.clone();
                move || io.write_here(self)
            }),
            None => self.0.finish(Err(without_route())),
        }
    }
}

/// What reads and writes have in common.
macro_rules! transfer {
    ($transfer:ident, $moved:literal) => {
        impl $transfer {
            /// The offset in the backing of the first byte that is left, in bytes.
            pub fn at(&self) -> u64 {
                self.0.at
            }

            /// The bytes that are left.
            pub fn len(&self) -> usize {
                self.0.left
            }

            /// Whether no bytes are left.
            pub fn is_empty(&self) -> bool {
                self.0.left == 0
            }

            /// The memory that is left as an array of `struct iovec`, for a system call: its address and the number of
            /// entries, up to 1024. The array stays where it is until [`advance`](Self::advance) or
            /// [`complete`](Self::complete) is called, or the transfer is dropped, also while the transfer itself is moved.
            pub fn iovecs(&mut self) -> (NonNull<c_void>, usize) {
                self.0.iovecs()
            }

            /// The address and length of each slice.
            #[cfg(feature = "uring")]
            pub(super) fn spans(&self) -> Vec<(usize, usize)> {
                self.0.next(usize::MAX).map(|piece| (piece.base.as_ptr().addr(), piece.len)).collect()
            }

            #[doc = concat!("Notes that the next `bytes` are ", $moved, ". For a backing that goes on with the rest by itself.")]
            ///
            /// # Errors
            /// `bytes` is more than is left. Nothing has changed then.
            pub fn advance(&mut self, bytes: usize) -> io::Result<()> {
                self.0.advance(bytes)
            }
        }
    };
}

transfer!(ReadTransfer, "read");
transfer!(WriteTransfer, "written");

thread_local! {
    /// Whether this thread has called a backing.
    static IS_INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is inside a backing, which asks for memory. It gets none by writes: they might wait for the call, or
/// for the thread.
pub(super) fn is_in_backing() -> bool {
    IS_INSIDE.with(Cell::get)
}

/// A call of a backing.
struct Inside(bool);

impl Inside {
    fn begin() -> Self {
        Self(IS_INSIDE.with(|is_inside| is_inside.replace(true)))
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        IS_INSIDE.with(|is_inside| is_inside.set(self.0));
    }
}

/// A backing, and the threads that call it where it does not begin transfers by itself.
pub(super) struct Io {
    backing: Arc<dyn Backing>,
    workers: Arc<Workers>,
}

impl Io {
    pub(super) fn new(backing: Arc<dyn Backing>, workers: Arc<Workers>) -> Arc<Self> {
        Arc::new(Self { backing, workers })
    }

    /// Begins a read. Its `done` may be called before this returns.
    pub(super) fn read(self: &Arc<Self>, mut read: ReadTransfer, urgency: Urgency) {
        let _inside = Inside::begin();
        read.0.io = Some((self.clone(), urgency));
        // A panic drops the transfer, which then fails.
        if let Some(Some(back)) = survive(|| self.backing.start_read(read)) {
            back.go_on();
        }
    }

    /// Begins a write. Its `done` may be called before this returns.
    pub(super) fn write(self: &Arc<Self>, mut write: WriteTransfer, urgency: Urgency) {
        let _inside = Inside::begin();
        write.0.io = Some((self.clone(), urgency));
        // A panic drops the transfer, which then fails.
        if let Some(Some(back)) = survive(|| self.backing.start_write(write)) {
            back.go_on();
        }
    }

    /// Begins a write, or makes it on this thread if the backing does not begin it.
    pub(super) fn write_or_here(self: &Arc<Self>, mut write: WriteTransfer) {
        let _inside = Inside::begin();
        write.0.io = Some((self.clone(), Urgency::Ahead));
        // A panic drops the transfer, which then fails.
        if let Some(Some(back)) = survive(|| self.backing.start_write(write)) {
            // It may be one of another file's, whose backing this one shares a queue with.
            match back.0.io.clone() {
                Some((io, _)) => io.write_here(back),
                None => back.0.finish(Err(without_route())),
            }
        }
    }

    /// [`Backing::sync`], whose panic is an error.
    pub(super) fn sync(&self) -> io::Result<()> {
        let _inside = Inside::begin();
        survive(|| self.backing.sync()).unwrap_or_else(|| Err(panicked()))
    }
    /// [`Backing::set_len`], whose panic is an error.
    pub(super) fn set_len(&self, len: u64) -> io::Result<()> {
        let _inside = Inside::begin();
        survive(|| self.backing.set_len(len)).unwrap_or_else(|| Err(panicked()))
    }
    /// [`Backing::len`], whose panic is an error, and which is no more than offsets reach.
    pub(super) fn len(&self) -> io::Result<u64> {
        let _inside = Inside::begin();
        let len = survive(|| self.backing.len()).unwrap_or_else(|| Err(panicked()))?;
        if i64::try_from(len).is_err() {
            let why = format!("the backing says that it has {len} bytes, and a file has at most 2^63 - 1");
            return Err(io::Error::new(ErrorKind::FileTooLarge, why));
        }
        Ok(len)
    }

    /// Reads on this thread. Its `done` is called before this returns.
    pub(super) fn read_here(&self, mut read: ReadTransfer) {
        let _inside = Inside::begin();
        let result = loop {
            if read.is_empty() {
                break Ok(read.0.moved);
            }
            let at = read.at();
            let Some(largest) = survive(|| self.backing.largest()) else { break Err(panicked()) };
            let mut slices = read.slices_up_to(largest);
            let asked: usize = slices.iter().map(|slice| slice.len()).sum();
            let Some(answer) = survive(|| self.backing.read_vectored_at(&mut slices, at)) else {
                break Err(panicked());
            };
            drop(slices);
            if let Some(result) = read.take(no_lie(answer, asked)) {
                break result;
            }
        };
        read.0.finish(result);
    }

    /// Writes on this thread. Its `done` is called before this returns.
    pub(super) fn write_here(&self, mut write: WriteTransfer) {
        let _inside = Inside::begin();
        let result = loop {
            if write.is_empty() {
                break Ok(write.0.moved);
            }
            let Some(largest) = survive(|| self.backing.largest()) else { break Err(panicked()) };
            let slices = write.slices_up_to(largest);
            let asked: usize = slices.iter().map(|slice| slice.len()).sum();
            let Some(answer) = survive(|| self.backing.write_vectored_at(&slices, write.at())) else {
                break Err(panicked());
            };
            drop(slices);
            if let Some(result) = write.take(no_lie(answer, asked)) {
                break result;
            }
        };
        write.0.finish(result);
    }
}

/// Refuses an answer with more bytes than were asked for.
fn no_lie(answer: io::Result<usize>, asked: usize) -> io::Result<usize> {
    match answer {
        Ok(bytes) if bytes > asked => Err(lie(bytes, asked)),
        answer => answer,
    }
}
