//! What is under a volume, and the ways to access it: a file or block device by blocking system calls or a ring, a far
//! end by its own threads.
//!
//! Invariant: once an answered write may be lost, no sync succeeds any more (D1). The system reports a failed
//! write-back once, to the first sync; later syncs succeed although their data is lost. So a failed sync fails all
//! later ones: the writes before it had been answered, and are not on the disk. A failed write fails nothing else: its
//! client is told, and no other promise is broken.
//!
//! A far end that is away has lost nothing yet: `far` keeps what was not flushed. A sync that fails for that alone may
//! succeed later.
//!
//! A durable write is therefore a write and then a sync. One call for both (`RWF_DSYNC`) would not say which of them
//! failed, and through the page cache it would consume the system's only report of other clients' losses.
use std::io::{self, IoSlice, IoSliceMut};
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use clap::ValueEnum;
use rustix::fs::{Advice, FallocateFlags, OFlags, SeekFrom};
use rustix::io::ReadWriteFlags;

use super::behind::Behind;
use super::buffer::{Buffer, Origin};
use super::crew::Help;
use super::far::{self, Far, Work};
use super::health::Health;
use super::path::DataPath;
use super::ring::Ring;
use super::syncs::Syncs;
use crate::Store;

/// The most entries of a vectored system call (UIO_MAXIOV).
pub(super) const ENTRIES: usize = 1024;
/// Bytes that are read before they are decrypted, so that they are still in the processor's cache. A multiple of every
/// sector size, in fewer runs than the system takes.
const PIECE: usize = 128 << 10;
const _: () = assert!(PIECE.is_multiple_of(4096) && PIECE / 4096 <= ENTRIES);

/// How the disk is accessed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Way {
    /// By io_uring where the system allows it and the file gains
    #[default]
    Auto,
    /// By io_uring, or not at all
    Uring,
    /// By calls that return when it is done
    Plain,
}

/// The operation of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Todo {
    Read,
    Write,
    /// When it is done, all earlier writes are on the disk.
    Sync,
    /// Makes a hole of `len` bytes.
    Punch {
        len: u64,
    },
}

impl Todo {
    /// The operation's name in the log and the figures, and its bytes if its buffer has `len`.
    fn describe(self, len: usize) -> (&'static str, u64) {
        match self {
            Self::Read => ("read", len as u64),
            Self::Write => ("write", len as u64),
            Self::Sync => ("sync", 0),
            Self::Punch { len } => ("punch", len),
        }
    }
}

/// A step on the disk: it is given to [`Engine::submit`], and comes back when it is done.
#[derive(Debug)]
pub(super) struct Op {
    pub(super) todo: Todo,
    /// The first byte in the file.
    pub(super) at: u64,
    pub(super) buffer: Buffer,
    /// Bytes of the buffer that are done.
    pub(super) done: usize,
    /// The bytes that were read are decrypted already.
    pub(super) is_plain: bool,
    /// Its owner: the connection's number, and the request's.
    pub(super) tag: (usize, usize),
}

impl Op {
    pub(super) fn new(todo: Todo, at: u64, buffer: Buffer, tag: (usize, usize)) -> Self {
        Self { todo, at, buffer, done: 0, is_plain: false, tag }
    }
}

/// A finished step and its result.
pub(super) type Done = (Op, io::Result<()>);

/// The file, block device or far end.
#[derive(Debug)]
pub struct Disk {
    behind: Behind,
    block: usize,
    is_direct: bool,
    pub(super) health: Health,
    /// A sync that begins after one that fails must not succeed.
    pub(super) syncs: Arc<Syncs>,
}

impl Disk {
    /// Over a file or a far end, in which blocks of `block` bytes are read and written from `offset` on. Unless
    /// `buffered` is set, a file bypasses the page cache if the file system allows that.
    #[must_use]
    pub fn new(behind: impl Into<Behind>, offset: u64, block: usize, buffered: bool) -> Self {
        let (behind, health) = (behind.into(), Health::default());
        let mut disk = Self { behind, block, is_direct: false, health, syncs: Arc::default() };
        disk.is_direct = !buffered && disk.go_direct(offset, block).is_ok();
        disk
    }

    /// Names its export in the log, for a server that has several.
    pub(super) fn name_export(&mut self, export: &str) {
        self.health.export = Some(export.to_owned());
        self.far().into_iter().for_each(|far| far.log_as(export));
    }

    /// The far end, if it is one.
    #[must_use]
    pub fn far(&self) -> Option<&Far> {
        match &self.behind {
            Behind::File(_) => None,
            Behind::Far(far) => Some(far),
        }
    }

    /// The least bytes of a read or write: the block that it was made with, or a far end's larger one.
    #[must_use]
    pub fn block(&self) -> usize {
        self.far().map_or(self.block, |far| self.block.max(far.block()))
    }

    /// Asks for direct I/O, and tries it: only a read shows whether it works with these blocks.
    fn go_direct(&self, offset: u64, block: usize) -> io::Result<()> {
        let Behind::File(file) = &self.behind else { return Err(io::ErrorKind::Unsupported.into()) };
        let flags = rustix::fs::fcntl_getfl(file)?;
        rustix::fs::fcntl_setfl(file, flags | OFlags::DIRECT)?;
        let tried = (|| {
            let Some(mut buffer) = Buffer::of_heap(block, Origin::Free) else {
                return Err(io::ErrorKind::OutOfMemory.into());
            };
            // The second block too: the first may be aligned by chance.
            for at in [offset, offset + block as u64] {
                let mut vector: Vec<_> = buffer.slices_mut().map(IoSliceMut::new).collect();
                rustix::io::preadv(file, &mut vector, at)?;
            }
            Ok(())
        })();
        if tried.is_err() {
            rustix::fs::fcntl_setfl(file, flags)?;
        }
        tried
    }

    /// Whether it bypasses the page cache.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.is_direct
    }

    /// Whether the system can do a step asynchronously. If it can't (a file system in memory), a ring would only hand
    /// each step to a kernel thread.
    pub(super) fn is_asynchronous(&self) -> bool {
        let Behind::File(file) = &self.behind else { return false };
        let Some(mut buffer) = Buffer::of_heap(4096, Origin::Free) else { return false };
        let mut vector: Vec<_> = buffer.slices_mut().map(IoSliceMut::new).collect();
        let tried = rustix::io::preadv2(file, &mut vector, 0, ReadWriteFlags::NOWAIT);
        tried != Err(rustix::io::Errno::OPNOTSUPP)
    }

    /// Adjusts a step's result by D1.
    pub(super) fn judge(&self, op: &Op, result: io::Result<()>) -> io::Result<()> {
        // Not every file system makes holes.
        if let Err(why) = &result
            && why.raw_os_error() != Some(libc::EOPNOTSUPP)
        {
            let (operation, len) = op.todo.describe(op.buffer.len());
            self.health.note(operation, op.at, len, why);
        }
        if op.todo != Todo::Sync {
            return result;
        }
        if result.as_ref().is_err_and(|error| !(self.far().is_some() && far::is_away(error))) {
            self.health.fail();
        }
        match self.health.has_failed() {
            true => result.and(Err(io::Error::other("the disk has lost what was written"))),
            false => result,
        }
    }

    /// The end of the data or the hole at `at`, and whether it is a hole.
    pub(super) fn extent(&self, at: u64, end: u64) -> io::Result<(u64, bool)> {
        let Behind::File(file) = &self.behind else { return Ok((end, false)) };
        // These calls move the file's position, which nothing uses.
        match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(data) if data > at => return Ok((data.min(end), true)),
            Ok(_) => {}
            // No data up to the end.
            Err(rustix::io::Errno::NXIO) => return Ok((end, true)),
            // The file system does not know.
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::OPNOTSUPP) => return Ok((end, false)),
            Err(other) => return Err(other.into()),
        }
        let hole = rustix::fs::seek(file, SeekFrom::Hole(at))?;
        Ok((hole.clamp(at + 1, end), false))
    }

    /// Tells the system that these bytes will be read soon. Past its cache there is nothing to tell.
    pub(super) fn will_need(&self, bytes: Range<u64>) {
        if let (Behind::File(file), false) = (&self.behind, self.is_direct) {
            // A hint: the read itself says what is wrong.
            let len = NonZeroU64::new(bytes.end - bytes.start);
            let _ = rustix::fs::fadvise(file, bytes.start, len, Advice::WillNeed);
        }
    }

    fn sync_data(&self) -> io::Result<()> {
        let file = match &self.behind {
            Behind::File(file) => file,
            // It has one flush at a time by itself.
            Behind::Far(far) => return far.sync(),
        };
        let _turn = self.syncs.wait();
        let result = retried(|| file.sync_data());
        if result.is_err() {
            self.health.fail();
        }
        result
    }

    /// Returns when all written data is on the disk.
    pub(super) fn sync(&self) -> io::Result<()> {
        self.judge(&Op::new(Todo::Sync, 0, Buffer::none(), (0, 0)), self.sync_data())
    }
}

impl Disk {
    /// Begins a step on a far end. `done` takes it on another thread.
    fn begin_far(&self, mut op: Op, done: impl FnOnce(Done) + Send + 'static) {
        let Behind::Far(far) = &self.behind else { unreachable!("a file's engine has its own way") };
        let work = match far_work(far, &op) {
            Ok(work) => work,
            Err(error) => return done((op, Err(error))),
        };
        let (at, buffer) = (op.at, std::mem::replace(&mut op.buffer, Buffer::none()));
        let home = Box::new(move |buffer, result| {
            op.buffer = buffer;
            done((op, result));
        });
        far.submit(work, at, buffer, home);
    }
}

/// A step in a far end's words. A write's bytes are copied, since it keeps them longer than a pool may lend its pages.
fn far_work(far: &Far, op: &Op) -> io::Result<Work> {
    Ok(match op.todo {
        Todo::Read => Work::Read,
        Todo::Write => {
            let mut bytes = Vec::new();
            bytes.try_reserve_exact(op.buffer.len()).map_err(|_| io::Error::from_raw_os_error(libc::ENOMEM))?;
            op.buffer.slices().for_each(|slice| bytes.extend_from_slice(slice));
            Work::Write(Arc::new(bytes))
        }
        Todo::Sync => Work::Flush,
        Todo::Punch { len } if far.can_trim() => Work::Trim(len),
        Todo::Punch { .. } => return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)),
    })
}

/// A file's descriptor, for a ring; a far end has none.
impl AsRawFd for Disk {
    fn as_raw_fd(&self) -> i32 {
        match &self.behind {
            Behind::File(file) => file.as_raw_fd(),
            Behind::Far(_) => unreachable!("a far end has no ring"),
        }
    }
}

/// How one thread accesses the disk.
pub(super) enum Engine {
    Plain,
    /// By blocking calls, the long ones on other threads.
    Helped(Help),
    Ring(Box<Ring>),
    /// By the threads of a far end.
    Far(Help),
    /// For tests, which do the steps themselves.
    #[cfg(test)]
    Held(Vec<Op>),
    /// For tests: all steps are done, without an error, at the next reap.
    #[cfg(test)]
    Prompt(Vec<Op>),
}

impl Engine {
    /// Begins a step. It returns steps that are done at once; [`Engine::reap`] returns the others.
    pub(super) fn submit(&mut self, path: &DataPath, op: Op) -> Option<Done> {
        match self {
            Self::Plain => Some(plain_step(path, op)),
            Self::Far(help) => {
                path.disk.begin_far(op, help.awaited());
                None
            }
            Self::Helped(help) => help.take(op).map(|op| plain_step(path, op)),
            Self::Ring(ring) => {
                ring.submit(&path.disk, op);
                None
            }
            #[cfg(test)]
            Self::Held(ops) | Self::Prompt(ops) => {
                ops.push(op);
                None
            }
        }
    }

    /// Tells the system of the submitted steps, and takes the finished ones.
    pub(super) fn reap(&mut self, disk: &Disk, done: &mut Vec<Done>) -> io::Result<()> {
        match self {
            Self::Plain => Ok(()),
            Self::Helped(help) => {
                help.reap(done);
                Ok(())
            }
            Self::Far(help) => {
                let mut judged = Vec::new();
                help.reap(&mut judged);
                done.extend(judged.into_iter().map(|(op, result)| {
                    let result = disk.judge(&op, result);
                    (op, result)
                }));
                Ok(())
            }
            Self::Ring(ring) => ring.reap(disk, done),
            #[cfg(test)]
            Self::Held(_) => Ok(()),
            #[cfg(test)]
            Self::Prompt(ops) => {
                done.extend(ops.drain(..).map(|op| (op, Ok(()))));
                Ok(())
            }
        }
    }

    /// Does one queued step, for a worker that has nothing else to do.
    pub(super) fn do_one(&mut self, path: &DataPath) -> Option<Done> {
        match self {
            Self::Helped(help) => help.do_one(path),
            Self::Plain | Self::Ring(_) | Self::Far(_) => None,
            #[cfg(test)]
            Self::Held(_) | Self::Prompt(_) => None,
        }
    }

    /// Steps that have not come back.
    pub(super) fn in_flight(&self) -> usize {
        match self {
            Self::Plain => 0,
            Self::Helped(help) | Self::Far(help) => help.out(),
            Self::Ring(ring) => ring.in_flight(),
            #[cfg(test)]
            Self::Held(ops) | Self::Prompt(ops) => ops.len(),
        }
    }

    /// A descriptor that is readable when something is done.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Plain => None,
            Self::Helped(help) | Self::Far(help) => Some(help.fd()),
            Self::Ring(ring) => Some(ring.as_fd()),
            #[cfg(test)]
            Self::Held(_) | Self::Prompt(_) => None,
        }
    }
}

/// Whether the file system, a quota or a limit has no more room.
pub(super) fn is_want_of_room(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG))
}

/// Repeats a call that a signal has interrupted.
fn retried<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

/// Fills all of `slices`, at most [`ENTRIES`], from byte `at` of the file.
pub(super) fn read_all(disk: &Disk, slices: &mut [&mut [u8]], at: u64) -> io::Result<()> {
    let file = match &disk.behind {
        Behind::File(file) => file,
        Behind::Far(far) => return far.read(slices, at),
    };
    let len: usize = slices.iter().map(|slice| slice.len()).sum();
    let mut done = 0;
    while done < len {
        let mut skip = done;
        let rest = slices.iter_mut().filter_map(|slice| {
            let skipped = skip.min(slice.len());
            skip -= skipped;
            (skipped < slice.len()).then(|| IoSliceMut::new(&mut slice[skipped..]))
        });
        let mut rest: Vec<_> = rest.collect();
        match retried(|| Ok(rustix::io::preadv(file, &mut rest, at + done as u64)?))? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n => done += n,
        }
    }
    Ok(())
}

/// Does a step by blocking calls. Bytes that are read come back decrypted.
pub(super) fn plain_step(path: &DataPath, mut op: Op) -> Done {
    let result = retried(|| step(path, &mut op));
    let result = path.disk.judge(&op, result);
    op.is_plain = op.todo == Todo::Read;
    (op, result)
}

/// Does a step, all of it.
fn step(path: &DataPath, op: &mut Op) -> io::Result<()> {
    let disk = &path.disk;
    let file = match &disk.behind {
        Behind::File(file) => file,
        Behind::Far(far) => {
            // Before its buffer, whose bytes a write has, is taken.
            let work = far_work(far, op)?;
            let (at, buffer) = (op.at, std::mem::replace(&mut op.buffer, Buffer::none()));
            let result;
            (op.buffer, result) = far.wait_for(work, at, buffer);
            result?;
            if op.todo == Todo::Read {
                path.decrypt(op.at - path.in_file(0), &mut op.buffer).map_err(io::Error::other)?;
            }
            return Ok(());
        }
    };
    match op.todo {
        Todo::Sync => disk.sync_data(),
        Todo::Punch { len } => {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            Ok(rustix::fs::fallocate(file, flags, op.at, len)?)
        }
        Todo::Read => {
            while op.done < op.buffer.len() {
                let start = op.done / PIECE * PIECE;
                let piece = start..op.buffer.len().min(start + PIECE);
                let mut vector: Vec<_> = op.buffer.range_mut(op.done..piece.end).map(IoSliceMut::new).collect();
                match rustix::io::preadv(file, &mut vector, op.at + op.done as u64)? {
                    0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                    n => op.done += n,
                }
                if op.done == piece.end {
                    path.decrypt_range(op.at - path.in_file(0), &mut op.buffer, piece).map_err(io::Error::other)?;
                }
            }
            Ok(())
        }
        Todo::Write => {
            while op.done < op.buffer.len() {
                let mut vector: Vec<IoSlice<'_>> = Vec::new();
                op.buffer.window(op.done, ENTRIES, &mut vector);
                match rustix::io::pwritev(file, &vector, op.at + op.done as u64)? {
                    0 => return Err(io::ErrorKind::WriteZero.into()),
                    n => op.done += n,
                }
            }
            Ok(())
        }
    }
}
