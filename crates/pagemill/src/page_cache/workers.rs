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
pub(super) const THREADS: usize = 3;

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
        let job = Box::new(job);
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
            Urgency::Awaited => state.awaited.push_back(job),
            Urgency::Ahead => state.ahead.push_back(job),
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

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::{Urgency, Workers};
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::sync::{Arc, Mutex};

    type Order = Arc<Mutex<Vec<u32>>>;

    /// A worker that waits until something is sent, or the sender is dropped. Then it takes the jobs that queue up.
    fn busy(workers: &Workers) -> Sender<()> {
        let (ends, waits) = channel();
        let (says, begun) = channel();
        workers.submit(Urgency::Ahead, move || {
            says.send(()).unwrap();
            let _ = waits.recv();
        });
        begun.recv().unwrap();
        ends
    }

    fn notes(order: &Order, number: u32) -> impl FnOnce() + Send + use<> {
        let order = order.clone();
        move || order.lock().unwrap().push(number)
    }

    fn until_done(workers: &Workers) -> Receiver<()> {
        let (says, hears) = channel();
        workers.submit(Urgency::Ahead, move || says.send(()).unwrap());
        hears
    }

    #[test]
    fn jobs_that_are_awaited_go_first_and_each_kind_in_its_order() {
        let (workers, order) = (Workers::new(1), Order::default());
        let first = busy(&workers);
        for number in 0..6 {
            let urgency = if number % 2 == 0 { Urgency::Ahead } else { Urgency::Awaited };
            workers.submit(urgency, notes(&order, number));
        }
        let end = until_done(&workers);
        drop(first);
        end.recv().unwrap();
        assert_eq!(*order.lock().unwrap(), [1, 3, 5, 0, 2, 4]);
    }

    #[test]
    fn two_jobs_at_once_have_two_threads_and_a_third_waits() {
        let (workers, order) = (Workers::new(2), Order::default());
        let (first, second) = (busy(&workers), busy(&workers));
        workers.submit(Urgency::Awaited, notes(&order, 7));
        let end = until_done(&workers);
        assert_eq!((workers.shared.lock().state.threads.len(), order.lock().unwrap().len()), (2, 0));
        drop(first);
        end.recv().unwrap();
        assert_eq!(*order.lock().unwrap(), [7]);
        drop(second);
    }

    #[test]
    fn a_thread_serves_job_after_job_and_none_starts_before_the_first() {
        let workers = Workers::new(2);
        assert!(workers.shared.lock().state.threads.is_empty());
        for _ in 0..100 {
            until_done(&workers).recv().unwrap();
        }
    }

    #[test]
    fn queued_jobs_run_before_the_workers_are_gone() {
        for threads in [1, 2] {
            let (workers, order) = (Workers::new(threads), Order::default());
            let busy: Vec<_> = (0..threads).map(|_| busy(&workers)).collect();
            (0..50).for_each(|number| workers.submit(Urgency::Ahead, notes(&order, number)));
            drop(busy);
            drop(workers);
            assert_eq!(order.lock().unwrap().len(), 50);
        }
    }

    #[test]
    fn a_job_that_panics_does_not_end_its_thread() {
        let (workers, order) = (Workers::new(1), Order::default());
        let first = busy(&workers);
        workers.submit(Urgency::Awaited, || std::panic::resume_unwind(Box::new("a job's panic")));
        workers.submit(Urgency::Awaited, notes(&order, 1));
        drop(first);
        drop(workers);
        assert_eq!(*order.lock().unwrap(), [1]);
    }

    #[test]
    fn a_worker_may_drop_the_workers() {
        let workers = Arc::new(Workers::new(2));
        let (first, second) = (busy(&workers), busy(&workers));
        let (says, dropped) = channel();
        let last = workers.clone();
        workers.submit(Urgency::Ahead, move || {
            drop(last);
            says.send(()).unwrap();
        });
        let end = until_done(&workers);
        drop(workers);
        drop((first, second));
        dropped.recv().unwrap();
        end.recv().unwrap();
    }

    #[test]
    fn without_threads_a_job_runs_on_the_caller() {
        let (workers, order) = (Workers::new(0), Order::default());
        let caller = std::thread::current().id();
        let inner = notes(&order, 1);
        workers.submit(Urgency::Awaited, move || {
            assert_eq!(std::thread::current().id(), caller);
            inner();
        });
        assert_eq!(*order.lock().unwrap(), [1]);
    }

    #[test]
    #[cfg(not(miri))]
    fn in_a_forked_child_a_job_runs_on_the_caller_and_the_parents_jobs_do_not() {
        let (workers, order) = (Workers::new(1), Order::default());
        let first = busy(&workers);
        let parent = std::process::id();
        let parents = move || assert!(std::process::id() == parent, "the child runs its parent's job");
        workers.submit(Urgency::Ahead, parents);
        // SAFETY: the child calls what may be called there, and ends without running anything else.
        match unsafe { libc::fork() } {
            0 => {
                let mine = notes(&order, 1);
                workers.submit(Urgency::Ahead, mine);
                let is_done = order.try_lock().is_ok_and(|order| *order == [1]);
                drop(workers);
                // SAFETY: ends the child.
                unsafe { libc::_exit(if is_done { 7 } else { 1 }) };
            }
            child => {
                assert!(child > 0);
                let mut status = 0;
                // SAFETY: writes the status.
                assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
                assert_eq!((libc::WIFEXITED(status), libc::WEXITSTATUS(status)), (true, 7));
            }
        }
        drop(first);
        drop(workers);
        assert!(order.lock().unwrap().is_empty());
    }
}
