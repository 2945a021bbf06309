//! Executors that poll futures: two runtimes, and one by hand.
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{Thread, current, park};

pub(crate) type Job = Pin<Box<dyn Future<Output = ()> + Send>>;
/// Runs all jobs to their ends.
pub(crate) type Run = fn(Vec<Job>);

/// Those with one thread, which polls jobs in the order in which they come.
pub(crate) const IN_ORDER: [(&str, Run); 3] = [("by hand", by_hand), ("tokio", tokio_here), ("monoio", monoio_here)];
pub(crate) const EXECUTORS: [(&str, Run); 4] =
    [IN_ORDER[0], IN_ORDER[1], IN_ORDER[2], ("tokio's threads", tokio_on_threads)];

async fn all<T, E: std::fmt::Debug>(jobs: Vec<impl Future<Output = Result<T, E>>>) {
    for job in jobs {
        job.await.unwrap();
    }
}

fn tokio_here(jobs: Vec<Job>) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async { all(jobs.into_iter().map(tokio::spawn).collect()).await });
}

fn tokio_on_threads(jobs: Vec<Job>) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(3).build().unwrap();
    runtime.block_on(async { all(jobs.into_iter().map(tokio::spawn).collect()).await });
}

fn monoio_here(jobs: Vec<Job>) {
    match monoio::RuntimeBuilder::<monoio::IoUringDriver>::new().build() {
        Ok(mut runtime) => runtime.block_on(async {
            for job in jobs.into_iter().map(monoio::spawn).collect::<Vec<_>>() {
                job.await;
            }
        }),
        Err(why) => {
            println!("skipped: monoio ({why})");
            by_hand(jobs);
        }
    }
}

/// Sends a job's number to the loop that polls it.
struct Sends(Mutex<Sender<usize>>, usize);

impl Wake for Sends {
    fn wake(self: Arc<Self>) {
        let _ = self.0.lock().unwrap().send(self.1); // The loop may be over.
    }
}

fn by_hand(jobs: Vec<Job>) {
    let (sender, due) = channel();
    let waker = |number| Waker::from(Arc::new(Sends(Mutex::new(sender.clone()), number)));
    let mut jobs: Vec<_> = jobs.into_iter().enumerate().map(|(number, job)| Some((job, waker(number)))).collect();
    (0..jobs.len()).for_each(|number| sender.send(number).unwrap());
    let mut left = jobs.len();
    while left > 0 {
        let number = due.recv().unwrap();
        let Some((job, waker)) = &mut jobs[number] else { continue };
        if job.as_mut().poll(&mut Context::from_waker(waker)).is_ready() {
            jobs[number] = None;
            left -= 1;
        }
    }
}

struct Unparks(Thread);

impl Wake for Unparks {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs a future on this thread.
pub(crate) fn block_on<T>(future: impl Future<Output = T>) -> T {
    let (mut future, waker) = (pin!(future), Waker::from(Arc::new(Unparks(current()))));
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(got) => return got,
            Poll::Pending => park(),
        }
    }
}

/// Polls a future once.
pub(crate) fn poll_once<F: Future + ?Sized>(future: Pin<&mut F>, waker: &Waker) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(waker))
}

/// Drops a future when it is told to.
#[derive(Clone, Default)]
pub(crate) struct Drops(Arc<(AtomicBool, Mutex<Option<Waker>>)>);

impl Drops {
    pub(crate) fn now(&self) {
        self.0.0.store(true, SeqCst);
        let waker = self.0.1.lock().unwrap().take();
        waker.inspect(Waker::wake_by_ref);
    }
    /// `None` if the future was dropped before it was ready.
    pub(crate) async fn unless_dropped<T>(&self, future: impl Future<Output = T>) -> Option<T> {
        let mut future = Box::pin(future);
        poll_fn(|context| {
            *self.0.1.lock().unwrap() = Some(context.waker().clone());
            match self.0.0.load(SeqCst) {
                true => Poll::Ready(None),
                false => future.as_mut().poll(context).map(Some),
            }
        })
        .await
    }
}
