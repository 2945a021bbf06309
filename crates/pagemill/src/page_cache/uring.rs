//! Transfers of a file through an io_uring.
//!
//! `start_read` and `start_write` put transfers into a queue. A thread of the ring's own takes them out, submits them, and
//! completes them. It also submits because the kernel ends some of a thread's requests when that thread ends, and finishes
//! others by interrupting it: neither may happen to the program's threads.
//!
//! The ring makes one request for each transfer. A short one, or one that the kernel refuses to make through a ring, goes on by
//! blocking calls, as every transfer does. [`DEPTH`] transfers are queued or under way at most; beyond, they are handed back.
//!
//! # Invariants
//! - U1 From `push` to its completion, a transfer is in its slot, and nothing but the kernel touches it, its memory or its
//!   vector. If the thread ends before, by a panic, they are never touched again.
//! - U2 The thread sleeps only with a read of `event` in the ring. `is_asleep` says that it is about to sleep and has seen the
//!   queue empty: what is queued then signals the event.
//! - U3 The lock is taken in a section that no fork interrupts. The thread and its ring stay the parent's: in the child,
//!   transfers are handed back before the lock is looked at.
//! - U4 Dropping the ring waits until all transfers have ended, unless it is the ring's thread that drops it: that thread ends
//!   after them.
use super::files::Files;
use super::{ReadTransfer, WriteTransfer};
use crate::sync::{Mutex, MutexGuard, NoFork, Stamp, no_fork, survive};
use core::mem::{self, ManuallyDrop};
use core::time::Duration;
use io_uring::squeue::Entry;
use io_uring::{IoUring, opcode, types};
use pagemill_os::{Errno, Event, Thread};
use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, PoisonError};

/// Transfers that are queued or under way, at most.
const DEPTH: usize = 128;

/// Marks the completion of the read of the event. All others have the number of a slot.
const EVENT: u64 = u64::MAX;

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Ring {
    shared: Arc<Shared>,
    thread: ManuallyDrop<Thread<()>>,
    stamp: Stamp,
}

#[derive(Debug)]
struct Shared {
    queue: Mutex<Queue>,
    event: Event,
}

#[derive(Debug, Default)]
struct Queue {
    transfers: VecDeque<Transfer>,
    /// Queued, or in a slot.
    under_way: usize,
    is_asleep: bool,
    is_over: bool,
    /// The kernel has refused to serve the ring.
    is_broken: bool,
}

#[derive(Debug)]
enum Transfer {
    Read(ReadTransfer),
    Write(WriteTransfer),
}

/// The queue, in a section that no fork interrupts. The lock is released first: fields are dropped in their order.
struct Held<'s> {
    queue: MutexGuard<'s, Queue>,
    _no_fork: NoFork,
}

impl Shared {
    fn lock(&self) -> Held<'_> {
        let _no_fork = no_fork();
        Held { queue: self.queue.lock().unwrap_or_else(PoisonError::into_inner), _no_fork }
    }
}

impl Ring {
    /// A ring for a file, with its thread.
    ///
    /// # Errors
    /// The system has no rings, forbids them, or has no room for one or its thread.
    pub(super) fn new(files: Arc<Files>) -> io::Result<Self> {
        crate::registry::watch(); // The fork hooks must be registered before the stamp is taken.
        let failed = |errno: Errno| io::Error::from_raw_os_error(errno.0);
        // A slot for each transfer, and one for the event.
        let ring = IoUring::builder().dontfork().build(DEPTH as u32 + 1)?;
        // Without it, the read of the event would keep a thread of the kernel's.
        if !ring.params().is_feature_fast_poll() {
            return Err(ErrorKind::Unsupported.into());
        }
        let shared = Arc::new(Shared { queue: Mutex::default(), event: Event::new().map_err(failed)? });
        let of_thread = shared.clone();
        let work = move || Server::new(ring, &of_thread, &files).serve();
        let thread = ManuallyDrop::new(Thread::spawn(c"pagemill-ring", work).map_err(failed)?);
        Ok(Self { shared, thread, stamp: Stamp::here() })
    }

    /// Whether it takes transfers.
    pub(super) fn is_usable(&self) -> bool {
        !self.stamp.is_inherited() && !self.shared.lock().queue.is_broken
    }

    /// Begins a read, or hands it back.
    pub(super) fn read(&self, read: ReadTransfer) -> Option<ReadTransfer> {
        match self.begin(Transfer::Read(read)) {
            Some(Transfer::Read(read)) => Some(read),
            _ => None,
        }
    }

    /// Begins a write, or hands it back.
    pub(super) fn write(&self, write: WriteTransfer) -> Option<WriteTransfer> {
        match self.begin(Transfer::Write(write)) {
            Some(Transfer::Write(write)) => Some(write),
            _ => None,
        }
    }

    fn begin(&self, transfer: Transfer) -> Option<Transfer> {
        if self.stamp.is_inherited() {
            return Some(transfer);
        }
        let mut held = self.shared.lock();
        let queue = &mut *held.queue;
        if queue.under_way == DEPTH || queue.is_broken {
            return Some(transfer);
        }
        queue.under_way += 1;
        queue.transfers.push_back(transfer);
        let is_asleep = mem::take(&mut queue.is_asleep);
        drop(held);
        if is_asleep {
            self.shared.event.signal();
        }
        None
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        if self.stamp.is_inherited() {
            return;
        }
        self.shared.lock().queue.is_over = true;
        self.shared.event.signal();
        // SAFETY: taken here only.
        let thread = unsafe { ManuallyDrop::take(&mut self.thread) };
        if !thread.is_current() {
            let _ = thread.join();
        }
    }
}

/// What the ring's thread has.
struct Server<'s> {
    ring: IoUring,
    shared: &'s Shared,
    files: &'s Files,
    slots: Vec<Option<Transfer>>,
    free: Vec<usize>,
    /// What the read of the event writes to, and whether that read is in the ring.
    count: Box<[u8; 8]>,
    is_armed: bool,
}

impl<'s> Server<'s> {
    fn new(ring: IoUring, shared: &'s Shared, files: &'s Files) -> Self {
        let (slots, free) = ((0..DEPTH).map(|_| None).collect(), (0..DEPTH).rev().collect());
        Self { ring, shared, files, slots, free, count: Box::default(), is_armed: false }
    }

    fn serve(mut self) {
        loop {
            let (queued, is_over) = self.take_queued();
            queued.into_iter().for_each(|transfer| self.push(transfer));
            let is_idle = self.free.len() == DEPTH;
            if is_over && is_idle && !self.is_armed {
                return;
            }
            // At the end nothing is queued any more. A read of the event that was there before gets its last signal.
            if !is_over && !self.is_armed {
                self.arm();
            }
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::ResourceBusy) => {}
                // EAGAIN, too: the kernel lacks memory. What it has still ends, and shows in memory that it shares with us.
                Err(error) => {
                    self.shared.lock().queue.is_broken |= error.kind() != ErrorKind::WouldBlock;
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            self.reap();
        }
    }

    /// What was queued, and whether the ring is dropped. If it returns nothing, the thread is noted as asleep.
    fn take_queued(&mut self) -> (VecDeque<Transfer>, bool) {
        let mut held = self.shared.lock();
        let queue = &mut *held.queue;
        queue.is_asleep = queue.transfers.is_empty();
        (mem::take(&mut queue.transfers), queue.is_over)
    }

    fn push(&mut self, mut transfer: Transfer) {
        let (at, spans, vector) = match &mut transfer {
            Transfer::Read(read) => (read.at(), read.spans(), read.iovecs().0),
            Transfer::Write(write) => (write.at(), write.spans(), write.iovecs().0),
        };
        let (file, entries) = self.files.route(at, &spans);
        let (file, vector, entries) =
            (types::Fd(file.as_raw_fd()), vector.as_ptr().cast_const().cast(), entries as u32);
        let entry = match transfer {
            Transfer::Read(_) => opcode::Readv::new(file, vector, entries).offset(at).build(),
            Transfer::Write(_) => opcode::Writev::new(file, vector, entries).offset(at).build(),
        };
        let Some(slot) = self.free.pop() else { unreachable!("{DEPTH} slots are taken, and a transfer was queued") };
        self.slots[slot] = Some(transfer);
        // SAFETY: the vector has that many entries, and the transfer is the owner of it and of the memory. By U1 it stays in its
        // slot until the completion. The file is open as long as this thread runs, which ends after its requests.
        unsafe { self.add(&entry.user_data(slot as u64)) };
    }

    fn arm(&mut self) {
        let file = types::Fd(self.shared.event.as_fd().as_raw_fd());
        let entry = opcode::Read::new(file, self.count.as_mut_ptr(), size_of_val(&*self.count) as u32).build();
        self.is_armed = true;
        // SAFETY: the memory is on the heap, and stays there untouched while `is_armed` is set; `drop` sees to that. The
        // descriptor is open as long as `shared` is there.
        unsafe { self.add(&entry.user_data(EVENT)) };
    }

    /// # Safety
    /// The memory and descriptors of the entry are there until it completes.
    unsafe fn add(&mut self, entry: &Entry) {
        // SAFETY: as the caller promises.
        let added = unsafe { self.ring.submission().push(entry) };
        // There is an entry for each slot and for the event.
        assert!(added.is_ok(), "more than {DEPTH} transfers in the ring");
    }

    /// Completes what has ended.
    fn reap(&mut self) {
        loop {
            let Some(completion) = self.ring.completion().next() else { return };
            if completion.user_data() == EVENT {
                self.is_armed = false;
                continue;
            }
            let slot = completion.user_data() as usize;
            let transfer = self.slots[slot].take();
            self.free.push(slot);
            let files = self.files;
            // A transfer's end may drop the file, and with it the ring: it counts until then.
            survive(|| transfer.map(|transfer| complete(transfer, completion.result(), files)));
            self.shared.lock().queue.under_way -= 1;
        }
    }
}

impl Drop for Server<'_> {
    fn drop(&mut self) {
        // The kernel may use what is left for ever (U1).
        self.slots.drain(..).for_each(mem::forget);
        if self.is_armed {
            mem::forget(mem::take(&mut self.count));
        }
    }
}

/// Hands over a result of the kernel's.
fn complete(transfer: Transfer, result: i32, files: &Files) {
    let result = match result {
        0.. => Ok(result as usize),
        // Blocking calls go on: the ring cannot do it, or no longer.
        _ if is_refused(Errno(-result)) => Err(ErrorKind::Interrupted.into()),
        _ => Err(io::Error::from_raw_os_error(-result)),
    };
    match (transfer, result) {
        (Transfer::Write(write), result) => write.complete(result),
        (Transfer::Read(mut read), Ok(bytes)) if bytes < read.len() => {
            // At the end of a file this spares the call that would say so.
            let is_end = files.len().is_ok_and(|len| read.at() + bytes as u64 >= len);
            match is_end && read.advance(bytes).is_ok() {
                true => read.complete(Ok(0)),
                false => read.complete(Ok(bytes)),
            }
        }
        (Transfer::Read(read), result) => read.complete(result),
    }
}

/// Whether a call without a ring may do what failed with it.
fn is_refused(errno: Errno) -> bool {
    errno.is_unsupported() || matches!(errno, Errno::EAGAIN | Errno::ECANCELED | Errno::EINTR)
}
