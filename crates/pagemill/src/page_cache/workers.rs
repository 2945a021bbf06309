//! Threads that make the blocking calls of a page cache.
//!
//! A few threads take jobs from two queues: first those that somebody waits for, then the others, each in its order. A thread
//! starts when a job finds none idle, until there are `most`. Where the system refuses a thread and there is no other, and in
//! the child of a fork, where the threads do not exist, `submit` runs the job itself.
//!
//! # Invariants
//! - W1 A job that was accepted runs, in the process that submitted it. Dropping the workers first runs all jobs, and then
//!   ends and joins the threads. The thread that drops them is not joined if it is one of them: it ends by itself.
//! - W2 The lock is taken in a section that no fork interrupts ([`no_fork`]), so a child finds it free. Jobs run, threads park
//!   and are joined outside of it. The caller of `submit` is in no such section.
//! - W3 A parked thread is in `idle`, and is taken out by the one that wakes it: a wake-up reaches one thread. A thread that
//!   wakes by itself parks again.
//!
//! Jobs of the urgent queue can hold the others back for as long as there are any. Readers that lack memory cease to submit, so
//! write-back gets its turn.
use crate::sync::{Mutex, MutexGuard, NoFork, Stamp, no_fork, park, survive};
use core::mem;
use pagemill_os::Thread;
use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};

/// The number of threads unless the program says otherwise.
pub(super) const THREADS: usize = 2;

/// What goes first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Urgency {
    /// Somebody waits for it.
    Awaited,
    /// Readahead and write-back.
    Ahead,
}

type Job = Box<dyn FnOnce() + Send>;

/// See the [module](self).
pub(super) struct Workers {
    shared: Arc<Shared>,
    most: usize,
    stamp: Stamp,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    awaited: VecDeque<Job>,
    ahead: VecDeque<Job>,
    threads: Vec<Thread<()>>,
    idle: Vec<crate::sync::Thread>,
    is_over: bool,
}

/// The state, in a section that no fork interrupts. The lock is released first: fields are dropped in their order.
struct Held<'s> {
    state: MutexGuard<'s, State>,
    _no_fork: NoFork,
}

impl Shared {
    fn lock(&self) -> Held<'_> {
        let _no_fork = no_fork();
        Held { state: self.state.lock().unwrap_or_else(PoisonError::into_inner), _no_fork }
    }

    /// What each thread does.
    fn work(&self) {
        let me = crate::sync::current();
        loop {
            let mut held = self.lock();
            if let Some(job) = held.state.next() {
                drop(held);
                // What panics has reported it.
                survive(job);
                continue;
            }
            if held.state.is_over {
                return;
            }
            held.state.idle.push(me.clone());
            drop(held);
            loop {
                park();
                let held = self.lock();
                if !held.state.idle.iter().any(|idle| idle.id() == me.id()) {
                    break;
                }
            }
        }
    }
}

impl State {
    fn next(&mut self) -> Option<Job> {
        self.awaited.pop_front().or_else(|| self.ahead.pop_front())
    }
}

impl Workers {
    /// Up to `most` threads, none of which is started yet.
    pub(super) fn new(most: usize) -> Self {
        crate::registry::watch(); // The fork hooks must be registered before the stamp is taken.
        Self { shared: Arc::default(), most, stamp: Stamp::here() }
    }

    /// Has a thread run `job`, or runs it here if there can be none.
    pub(super) fn submit(&self, urgency: Urgency, job: impl FnOnce() + Send + 'static) {
        // A model checker has no threads of the system's.
        if self.stamp.is_inherited() || cfg!(shuttle) {
            survive(job);
            return;
        }
        let mut held = self.shared.lock();
        let state = &mut *held.state;
        let idle = state.idle.pop();
        if idle.is_none() && state.threads.len() < self.most {
            let shared = self.shared.clone();
            // Where it is refused, the threads that there are take the job.
            state.threads.extend(Thread::spawn(c"pagemill-cache", move || shared.work()).ok());
        }
        if state.threads.is_empty() {
            drop(held);
            survive(job);
            return;
        }
        match urgency {
            Urgency::Awaited => state.awaited.push_back(Box::new(job)),
            Urgency::Ahead => state.ahead.push_back(Box::new(job)),
        }
        drop(held);
        if let Some(idle) = idle {
            idle.unpark();
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        if self.stamp.is_inherited() {
            return; // The threads are the parent's, and so are the jobs: they have a reference to `shared` that never goes.
        }
        let mut held = self.shared.lock();
        held.state.is_over = true;
        let (idle, threads) = (mem::take(&mut held.state.idle), mem::take(&mut held.state.threads));
        drop(held);
        idle.iter().for_each(crate::sync::Thread::unpark);
        for thread in threads {
            if !thread.is_current() {
                let _ = thread.join();
            }
        }
    }
}
