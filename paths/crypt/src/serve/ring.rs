//! Steps on the disk through io_uring: many under way at once, and one system call for several of them.
//!
//! Invariants: from `push` until its completion is taken, only the kernel touches a step's buffer and vector (R1). A
//! ring that is dropped waits for its steps; if it can't, it leaks their buffers (R2). Syncs that wait for their turn
//! share one call when it comes, and all get its result.
//!
//! The allocator's memory is not registered with the ring: that would keep all of it in memory for as long as the ring
//! is there, used or not (ADR 21).
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use io_uring::squeue::Entry;
use io_uring::{IoUring, opcode, types};
use rustix::fd::FromRawFd;

use super::disk::{Disk, Done, ENTRIES, Op, Todo};
use super::syncs::Turn;

/// Entries of the ring; further steps wait here.
const PLACES: usize = 256;

/// One thread's ring.
pub(super) struct Ring {
    ring: IoUring,
    slots: Vec<Slot>,
    free: Vec<usize>,
    /// Slots whose steps are to be pushed.
    ready: VecDeque<usize>,
    /// Slots of syncs that wait for their turn.
    syncs: VecDeque<usize>,
    /// The turn of the sync that the kernel has, and the slots of other syncs that it also serves.
    turn: Option<Turn>,
    along: Vec<usize>,
    /// Steps that the kernel has.
    pushed: usize,
    /// Becomes readable when a step is done, or when a sync's turn has come.
    event: Arc<OwnedFd>,
}

#[derive(Default)]
struct Slot {
    op: Option<Op>,
    vector: Vec<libc::iovec>,
    is_pushed: bool,
}

// SAFETY: the pointers in it lead to buffers and vectors that it owns.
unsafe impl Send for Ring {}

impl Ring {
    /// A ring, if the system has one.
    pub(super) fn new() -> io::Result<Self> {
        let ring = IoUring::new(PLACES as u32)?;
        // SAFETY: a new descriptor, or -1.
        let event = match unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) } {
            -1 => return Err(io::Error::last_os_error()),
            // SAFETY: it was just made, and is nobody else's.
            fd => Arc::new(unsafe { OwnedFd::from_raw_fd(fd) }),
        };
        ring.submitter().register_eventfd(event.as_raw_fd())?;
        let (slots, free, ready, syncs, along) = (Vec::new(), Vec::new(), VecDeque::new(), VecDeque::new(), Vec::new());
        Ok(Self { ring, slots, free, ready, syncs, turn: None, along, pushed: 0, event })
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    pub(super) fn in_flight(&self) -> usize {
        self.pushed + self.ready.len() + self.syncs.len() + self.along.len()
    }

    pub(super) fn submit(&mut self, disk: &Disk, op: Op) {
        let number = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            self.slots.len() - 1
        });
        let is_sync = op.todo == Todo::Sync;
        self.slots[number].op = Some(op);
        match is_sync {
            true => self.syncs.push_back(number),
            false => self.ready.push_back(number),
        }
        self.push(disk);
    }

    /// Begins the waiting syncs, if it is their turn.
    fn begin_syncs(&mut self, disk: &Disk) {
        if self.syncs.is_empty() || self.turn.is_some() {
            return;
        }
        self.turn = disk.syncs.try_begin(&self.event);
        if self.turn.is_some() {
            self.ready.extend(self.syncs.pop_front());
            self.along.extend(self.syncs.drain(..));
        }
    }

    /// Puts steps into the ring while it has free entries.
    fn push(&mut self, disk: &Disk) {
        self.begin_syncs(disk);
        while self.pushed < PLACES {
            let Some(number) = self.ready.pop_front() else { return };
            let entry = self.slots[number].entry(disk).user_data(number as u64);
            self.slots[number].is_pushed = true;
            self.pushed += 1;
            // SAFETY: the buffer and the vector stay as they are until the completion is taken (R1); the disk's file
            // outlives the server's threads, and `Drop` waits.
            let pushed = unsafe { self.ring.submission().push(&entry) };
            assert!(pushed.is_ok(), "{} steps of {PLACES}, and the ring is full", self.pushed);
        }
    }

    /// Submits all steps to the kernel, and takes the finished ones.
    pub(super) fn reap(&mut self, disk: &Disk, done: &mut Vec<Done>) -> io::Result<()> {
        loop {
            self.enter()?;
            self.take(disk, done);
            if self.ring.submission().is_empty() {
                return Ok(());
            }
        }
    }

    fn enter(&mut self) -> io::Result<()> {
        if self.ring.submission().is_empty() {
            return Ok(());
        }
        match self.ring.submit() {
            Ok(_) => Ok(()),
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EBUSY | libc::EAGAIN)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Takes completions.
    fn take(&mut self, disk: &Disk, done: &mut Vec<Done>) {
        let mut count = [0u8; 8];
        // Completions are read whether there was an event or not.
        let _ = rustix::io::read(&self.event, &mut count);
        loop {
            let next = self.ring.completion().next();
            let Some(completion) = next else { break };
            let (number, result) = (completion.user_data() as usize, completion.result());
            self.slots[number].is_pushed = false;
            self.pushed -= 1;
            match self.slots[number].advance(result) {
                None => self.ready.push_back(number),
                Some(result) => {
                    if self.finish(number, result, disk, done) == Todo::Sync {
                        // Its result is noted, so another sync may begin.
                        self.turn = None;
                        for number in std::mem::take(&mut self.along) {
                            self.finish(number, Ok(()), disk, done);
                        }
                    }
                }
            }
        }
        self.push(disk);
    }

    fn finish(&mut self, number: usize, result: io::Result<()>, disk: &Disk, done: &mut Vec<Done>) -> Todo {
        let Some(op) = self.slots[number].op.take() else { unreachable!("slot {number} was pushed empty") };
        let todo = op.todo;
        self.free.push(number);
        let result = disk.judge(&op, result);
        done.push((op, result));
        todo
    }
}

fn iovec(addr: usize, len: usize) -> libc::iovec {
    libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(addr), iov_len: len }
}

impl Slot {
    /// The submission entry for the rest of the step.
    fn entry(&mut self, disk: &Disk) -> Entry {
        let Some(op) = &mut self.op else { unreachable!("an empty slot is pushed") };
        let file = types::Fd(disk.as_raw_fd());
        let at = op.at + op.done as u64;
        self.vector.clear();
        match op.todo {
            Todo::Sync => return opcode::Fsync::new(file).flags(types::FsyncFlags::DATASYNC).build(),
            Todo::Punch { len } => {
                let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                return opcode::Fallocate::new(file, len).offset(op.at).mode(mode).build();
            }
            Todo::Read | Todo::Write => {
                let runs = op.buffer.runs_in(op.done..op.buffer.len()).take(ENTRIES);
                self.vector.extend(runs.map(|run| iovec(run.addr, run.len)));
            }
        }
        let (first, entries) = (self.vector.as_ptr(), self.vector.len() as u32);
        match op.todo {
            Todo::Read => opcode::Readv::new(file, first, entries).offset(at).build(),
            _ => opcode::Writev::new(file, first, entries).offset(at).build(),
        }
    }

    /// Takes the kernel's result. `None` if there is more to do.
    fn advance(&mut self, result: i32) -> Option<io::Result<()>> {
        let Some(op) = &mut self.op else { unreachable!("an empty slot was pushed") };
        if result < 0 {
            let error = io::Error::from_raw_os_error(-result);
            let again = matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock);
            return if again { None } else { Some(Err(error)) };
        }
        match op.todo {
            Todo::Sync | Todo::Punch { .. } => return Some(Ok(())),
            Todo::Read if result == 0 => return Some(Err(io::ErrorKind::UnexpectedEof.into())),
            Todo::Write if result == 0 => return Some(Err(io::ErrorKind::WriteZero.into())),
            _ => op.done += result as usize,
        }
        (op.done == op.buffer.len()).then_some(Ok(()))
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        while self.pushed > 0 {
            match self.ring.submit_and_wait(1) {
                Err(error) if !matches!(error.raw_os_error(), Some(libc::EINTR | libc::EBUSY | libc::EAGAIN)) => {
                    // The kernel may still use these buffers, so they must not be reused.
                    for slot in self.slots.iter_mut().filter(|slot| slot.is_pushed) {
                        std::mem::forget(slot.op.take());
                        std::mem::forget(std::mem::take(&mut slot.vector));
                    }
                    return;
                }
                _ => {}
            }
            while let Some(completion) = self.ring.completion().next() {
                self.slots[completion.user_data() as usize].is_pushed = false;
                self.pushed -= 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::buffer::Buffer;
    use crate::serve::fixture::path;

    /// The system would report the first one's failure to it alone, and the second must not succeed before that is
    /// noted.
    #[test]
    fn a_sync_waits_until_the_previous_one_has_a_result() {
        let (Ok(mut first), Ok(mut second)) = (Ring::new(), Ring::new()) else {
            println!("skipped: the system refuses io_uring");
            return;
        };
        let path = path(16, 16);
        let sync = |request| Op::new(Todo::Sync, 0, Buffer::none(), (0, request));
        let is_woken = |ring: &Ring| {
            let mut fds = [rustix::event::PollFd::new(&*ring.event, rustix::event::PollFlags::IN)];
            rustix::event::poll(&mut fds, Some(&rustix::time::Timespec { tv_sec: 600, tv_nsec: 0 })).unwrap() == 1
        };
        first.submit(&path.disk, sync(0));
        let mut done = Vec::new();
        for request in 0..3 {
            second.submit(&path.disk, sync(request));
            second.reap(&path.disk, &mut done).unwrap();
        }
        assert_eq!((second.in_flight(), second.pushed, done.len()), (3, 0, 0));
        path.disk.judge(&sync(0), Err(io::Error::from_raw_os_error(libc::EIO))).unwrap_err();
        while first.in_flight() > 0 {
            first.reap(&path.disk, &mut done).unwrap();
        }
        assert!(is_woken(&second), "its turn has come");
        second.push(&path.disk);
        assert_eq!((second.in_flight(), second.pushed), (3, 1), "one call for all three");
        while second.in_flight() > 0 {
            second.reap(&path.disk, &mut done).unwrap();
        }
        assert_eq!(done.len(), 4);
        assert!(done.iter().all(|(_, result)| result.is_err()), "{done:?}");
    }
}
