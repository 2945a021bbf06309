//! Threads that help the workers with long reads by blocking calls, and with decrypting them.
//!
//! One client's bytes are moved by one worker, so with one client only one processor would be busy. So a worker puts
//! long reads on the crew's queue and goes on sending. An idle thread of the crew takes them, or the worker itself,
//! when it would otherwise sleep. Finished reads go to the worker's [`Tray`].
//!
//! Invariants: queued steps hold no pages of the pool, so that no wait for the pool depends on them (H1; W1 in
//! `memory`). The worker's `out` counts its steps that are queued or being done (H2). A thread holds one lock at a
//! time, of the queue or of a tray, and only to move steps.
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

/// The shortest read that is given to another thread. Waking a thread takes as long as reading some pages.
const LONG: usize = 64 << 10;

/// The threads. They end when this is dropped.
pub(super) struct Crew {
    board: Arc<Board>,
    threads: Vec<JoinHandle<()>>,
}

/// The steps to be done.
struct Board {
    jobs: Mutex<Jobs>,
    news: Condvar,
}

#[derive(Default)]
struct Jobs {
    /// Each with the number of its volume.
    queue: VecDeque<(Op, usize, Arc<Tray>)>,
    /// Threads of the crew that wait for steps.
    idle: usize,
    is_over: bool,
}

/// Finished steps of one worker.
struct Tray {
    /// The steps, and whether the worker has been woken for them.
    done: Mutex<(Vec<Done>, bool)>,
    wake: OwnedFd,
}

/// A worker's access to the crew, for one volume.
pub(super) struct Help {
    volume: usize,
    board: Arc<Board>,
    tray: Arc<Tray>,
    out: usize,
}

/// No code panics while it holds a lock, so a poisoned lock's data is intact.
fn held<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Crew {
    pub(super) fn new() -> Self {
        let board = Arc::new(Board { jobs: Mutex::default(), news: Condvar::new() });
        Self { board, threads: Vec::new() }
    }

    /// Adds a thread.
    pub(super) fn join(&mut self, shared: &Arc<Shared>) -> io::Result<()> {
        let (board, shared) = (Arc::clone(&self.board), Arc::clone(shared));
        let thread = thread::Builder::new().name(format!("crypt-help-{}", self.threads.len()));
        self.threads.push(thread.spawn(move || board.work(&shared))?);
        Ok(())
    }

    pub(super) fn help(&self, volume: usize) -> io::Result<Help> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let tray = Arc::new(Tray { done: Mutex::default(), wake });
        Ok(Help { volume, board: Arc::clone(&self.board), tray, out: 0 })
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

/// Ends the process if its thread panics: the worker would wait for ever for the step that the thread was doing.
struct EndsAll;

impl Drop for EndsAll {
    fn drop(&mut self) {
        if thread::panicking() {
            std::process::abort();
        }
    }
}

impl Board {
    fn work(&self, shared: &Shared) {
        let _ends_all = EndsAll;
        let mut jobs = held(&self.jobs);
        loop {
            let Some((op, volume, tray)) = jobs.queue.pop_front() else {
                if jobs.is_over {
                    return;
                }
                jobs.idle += 1;
                jobs = self.news.wait(jobs).unwrap_or_else(PoisonError::into_inner);
                jobs.idle -= 1;
                continue;
            };
            drop(jobs);
            tray.put(plain_step(&shared.volumes[volume].path, op));
            jobs = held(&self.jobs);
        }
    }
}

impl Tray {
    fn put(&self, done: Done) {
        let mut tray = held(&self.done);
        tray.0.push(done);
        if !std::mem::replace(&mut tray.1, true) {
            // If the counter is full, the worker is awake anyway.
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }
}

impl Help {
    /// Takes a long read. Other steps come back, among them all that may hold pages of the pool (H1).
    pub(super) fn take(&mut self, op: Op) -> Option<Op> {
        if op.todo != Todo::Read || op.buffer.len() < LONG {
            return Some(op);
        }
        self.out += 1; // Until the tray returns it, or `do_one` does it (H2).
        let mut jobs = held(&self.board.jobs);
        jobs.queue.push_back((op, self.volume, Arc::clone(&self.tray)));
        if jobs.idle > 0 {
            self.board.news.notify_one();
        }
        None
    }

    /// Counts a step that others do, and takes it from any thread when it is done.
    pub(super) fn awaited(&mut self) -> impl FnOnce(Done) + Send + 'static {
        self.out += 1; // Until the tray returns it (H2).
        let tray = Arc::clone(&self.tray);
        move |done| tray.put(done)
    }

    /// Adds the finished steps to `done`.
    pub(super) fn reap(&mut self, done: &mut Vec<Done>) {
        let mut tray = held(&self.tray.done);
        if std::mem::take(&mut tray.1) {
            // The counter is not zero, so this does not fail.
            let _ = rustix::io::read(&self.tray.wake, &mut [0; 8]);
        }
        self.out -= tray.0.len();
        done.append(&mut tray.0);
    }

    /// Does one of the worker's own steps that no thread has taken, if there is one.
    pub(super) fn do_one(&mut self, path: &DataPath) -> Option<Done> {
        let mut jobs = held(&self.board.jobs);
        let place = jobs.queue.iter().position(|(_, _, tray)| Arc::ptr_eq(tray, &self.tray))?;
        let (op, ..) = jobs.queue.remove(place)?;
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
