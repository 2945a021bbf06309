//! A request as a future.
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use crate::Error;
use crate::lane::{Answer, To};
use crate::queue::Queue;
use crate::request::{Done, Refused, Request};

/// A request that is awaited: see [`Queue::start`].
///
/// ```
/// # use pagemill::{Allocator, Memory};
/// # use pagemill_nvme::{Dma, Drive, Fake, Request, Settings};
/// use std::{future::Future, pin::pin, task::{Context, Poll, Waker}};
/// # let dma = Dma::new(&Allocator::builder().memory(Memory::anonymous(4096)).build()?);
/// # let drive = Drive::on_fake(&dma, &Fake::new(1000), Settings::default())?;
/// let queue = drive.queue()?;
/// let mut pending = pin!(queue.start(Request::read(0, drive.buffer(512)?)));
/// let mut context = Context::from_waker(Waker::noop());
/// let done = loop {
///     if let Poll::Ready(done) = pending.as_mut().poll(&mut context) {
///         break done;
///     }
/// };
/// assert!(done.result.is_ok());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "a request is submitted when its future is polled"]
pub struct Pending<'a> {
    queue: &'a Queue,
    /// Until it is submitted.
    request: Option<Request>,
    answer: Arc<Mutex<Answer>>,
}

impl<'a> Pending<'a> {
    pub(crate) fn new(queue: &'a Queue, request: Request) -> Self {
        Self { queue, request: Some(request), answer: Arc::default() }
    }

    fn answer(&self) -> MutexGuard<'_, Answer> {
        self.answer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Future for Pending<'_> {
    type Output = Done;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Done> {
        // The waker is the caller's code: it is cloned and dropped without a lock.
        let waker = context.waker().clone();
        if let Some(request) = self.request.take() {
            match self.queue.hand_in(request, To::Future(Arc::clone(&self.answer))) {
                Ok(()) => {}
                Err(Refused { request, error: Error::Busy(_) }) => {
                    self.request = Some(request);
                    // Before the round, which may make room.
                    let old = self.answer().waker.replace(waker.clone());
                    drop(old);
                    self.queue.wait_for_room(&self.answer);
                }
                Err(Refused { request, error }) => {
                    return Poll::Ready(Done { tag: 0, request, result: Err(error), took: Duration::ZERO });
                }
            }
        }
        // An error ends all requests, this one too.
        let _ = self.queue.round();
        let old = {
            let mut answer = self.answer();
            if let Some(done) = answer.done.take() {
                return Poll::Ready(done);
            }
            answer.waker.replace(waker)
        };
        drop(old);
        Poll::Pending
    }
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        // The waker is the caller's: it is dropped here, not where the request is finished, under a lock.
        let waker = self.answer().waker.take();
        drop(waker);
    }
}
