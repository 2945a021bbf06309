//! Threads of a table, each bound to its processor.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::Scope;

use crate::Error;
use crate::machine::pin_to;

/// Lets two threads start together.
#[derive(Default)]
pub(super) struct Gate {
    arrived: AtomicUsize,
}

impl Gate {
    pub(super) fn pass(&self) {
        // AcqRel and Acquire pair with each other: a thread that sees the second arrival sees all writes before it.
        self.arrived.fetch_add(1, Ordering::AcqRel);
        while self.arrived.load(Ordering::Acquire) < 2 {
            std::hint::spin_loop();
        }
    }
}

/// A thread that does one job after another and answers each.
pub(super) struct Worker<Job, Answer> {
    jobs: Sender<Job>,
    answers: Receiver<Answer>,
}

impl<Job: Send, Answer: Send> Worker<Job, Answer> {
    /// Starts a thread on processor `cpu`. What `open` returns there belongs to the thread, and `perform` does a job
    /// with it.
    pub(super) fn start<'scope, Own>(
        scope: &'scope Scope<'scope, '_>,
        cpu: usize,
        open: impl FnOnce() -> Own + Send + 'scope,
        perform: impl Fn(&mut Own, Job) -> Answer + Send + 'scope,
    ) -> Result<Self, Error>
    where
        Job: 'scope,
        Answer: 'scope,
    {
        let (jobs, jobs_here) = channel();
        let (answers_here, answers) = channel();
        let (ready_here, ready) = channel();
        scope.spawn(move || {
            let pinned = pin_to(cpu);
            let mut own = open();
            if ready_here.send(pinned).is_err() {
                return;
            }
            // Ends when the table drops its end of the channel.
            for job in jobs_here {
                if answers_here.send(perform(&mut own, job)).is_err() {
                    return;
                }
            }
        });
        ready.recv().map_err(|_| Error::WorkerDied)?.map_err(|error| Error::Pin { cpu, error })?;
        Ok(Self { jobs, answers })
    }

    pub(super) fn send(&self, job: Job) -> Result<(), Error> {
        self.jobs.send(job).map_err(|_| Error::WorkerDied)
    }

    pub(super) fn answer(&self) -> Result<Answer, Error> {
        self.answers.recv().map_err(|_| Error::WorkerDied)
    }
}
