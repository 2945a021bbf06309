//! Threads that help the workers: long reads of a disk that is asked by plain calls, and their decryption.
//!
//! One client's bytes are moved by one worker, which is then the one that is busy while other processors are not. So a
//! worker puts what takes long on the crew's queue and goes on sending; whoever of the crew has nothing to do takes it, and
//! the worker itself does when it would otherwise sleep. What is done goes to its worker's [`Tray`].
//!
//! Invariants: what is queued holds no page of the pool, which nobody who waits for one waits for (H1; W1 in `memory`).
//! A step that is on the queue or in somebody's hands is in `out` of the one who gave it (H2). One lock at a time is held,
//! of the queue or of a tray, for moving steps alone.
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;

use super::Shared;
use super::disk::{Done, Op, Todo, plain_step};
use super::path::DataPath;

/// Bytes from which on a read is worth another thread: waking it takes as long as some pages do.
const LONG: usize = 64 << 10;

/// The threads. They end with it.
pub(super) struct Crew {
    board: Arc<Board>,
    threads: Vec<JoinHandle<()>>,
}

/// What is to be done.
struct Board {
    jobs: Mutex<Jobs>,
    news: Condvar,
}

#[derive(Default)]
struct Jobs {
    queue: VecDeque<(Op, Arc<Tray>)>,
    /// Of the crew, waiting for news.
    idle: usize,
    is_over: bool,
}

/// What is done, for one worker.
struct Tray {
    /// And whether the worker is told of it already.
    done: Mutex<(Vec<Done>, bool)>,
    wake: OwnedFd,
}

/// A worker's end of it.
pub(super) struct Help {
    board: Arc<Board>,
    tray: Arc<Tray>,
    out: usize,
}

/// Nothing that is done with a lock held can panic and leave something broken.
fn held<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Crew {
    pub(super) fn new() -> Self {
        let board = Arc::new(Board { jobs: Mutex::default(), news: Condvar::new() });
        Self { board, threads: Vec::new() }
    }

    /// One thread more.
    pub(super) fn join(&mut self, shared: &Arc<Shared>) -> io::Result<()> {
        let (board, shared) = (Arc::clone(&self.board), Arc::clone(shared));
        let thread = thread::Builder::new().name(format!("crypt-help-{}", self.threads.len()));
        self.threads.push(thread.spawn(move || board.work(&shared.path))?);
        Ok(())
    }

    pub(super) fn help(&self) -> io::Result<Help> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let tray = Arc::new(Tray { done: Mutex::default(), wake });
        Ok(Help { board: Arc::clone(&self.board), tray, out: 0 })
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        held(&self.board.jobs).is_over = true;
        self.board.news.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join(); // None has panicked: see `EndsAll`.
        }
    }
}

/// Ends the process if its thread panics: whoever waits for the step that it had in hand would wait for ever.
struct EndsAll;

impl Drop for EndsAll {
    fn drop(&mut self) {
        if thread::panicking() {
            std::process::abort();
        }
    }
}

impl Board {
    fn work(&self, path: &DataPath) {
        let _ends_all = EndsAll;
        let mut jobs = held(&self.jobs);
        loop {
            let Some((op, tray)) = jobs.queue.pop_front() else {
                if jobs.is_over {
                    return;
                }
                jobs.idle += 1;
                jobs = self.news.wait(jobs).unwrap_or_else(PoisonError::into_inner);
                jobs.idle -= 1;
                continue;
            };
            drop(jobs);
            tray.put(plain_step(path, op));
            jobs = held(&self.jobs);
        }
    }
}

impl Tray {
    fn put(&self, done: Done) {
        let mut tray = held(&self.done);
        tray.0.push(done);
        if !std::mem::replace(&mut tray.1, true) {
            // Full means that the worker is going to look anyhow.
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }
}

impl Help {
    /// Takes a step that is worth it; others come back, and with them all that may hold pages of the pool (H1).
    pub(super) fn take(&mut self, op: Op) -> Option<Op> {
        if op.todo != Todo::Read || op.buffer.len() < LONG {
            return Some(op);
        }
        self.out += 1; // Until it comes back from the tray, or is done by `do_one` (H2).
        let mut jobs = held(&self.board.jobs);
        jobs.queue.push_back((op, Arc::clone(&self.tray)));
        if jobs.idle > 0 {
            self.board.news.notify_one();
        }
        None
    }

    /// What is done.
    pub(super) fn reap(&mut self, done: &mut Vec<Done>) {
        let mut tray = held(&self.tray.done);
        if std::mem::take(&mut tray.1) {
            // It was written to, or is full: there is something to read either way.
            let _ = rustix::io::read(&self.tray.wake, &mut [0; 8]);
        }
        self.out -= tray.0.len();
        done.append(&mut tray.0);
    }

    /// Does one of the worker's own, if one is left that nobody has taken.
    pub(super) fn do_one(&mut self, path: &DataPath) -> Option<Done> {
        let mut jobs = held(&self.board.jobs);
        let place = jobs.queue.iter().position(|(_, tray)| Arc::ptr_eq(tray, &self.tray))?;
        let (op, _) = jobs.queue.remove(place)?;
        drop(jobs);
        self.out -= 1;
        Some(plain_step(path, op))
    }

    pub(super) fn out(&self) -> usize {
        self.out
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.tray.wake.as_fd()
    }
}
