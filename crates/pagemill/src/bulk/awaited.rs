//! The form that is awaited (C3.18): a future that brings a list, and waits in line without a thread.
//!
//! It makes the same attempts as the other forms, with the effort of a request that neither reclaims nor waits, and
//! waits between them ([`Zones::await_in_line`](crate::zones::Zones)). What it has in hand while it waits is the list of
//! [`InHand`], which goes back when the future is dropped.
use super::request::{Bulk, Request};
use crate::allocator::Allocator;
use crate::context::Effort;
use crate::error::{Error, InvalidRequest};
use crate::handle::Owned;
use crate::list::List;
use crate::reclaim::is_reclaiming;
use pagemill_core::Gfp;
use pagemill_os::Batch;

impl Allocator {
    /// Allocates a list, and waits for memory without putting the thread to sleep (C3.18). For any executor.
    ///
    /// The request begins at the first poll. It takes what is free. If that is too little and its flags let it wait, it
    /// takes a place in the same lines as sleeping threads, and is served in order of arrival among requests that lack
    /// the same (C3.20). It waits until it is served, dropped, or [cancelled](crate::Cancel): without bound, also where
    /// the other forms give up, as a [`KERNEL`](Gfp::KERNEL) request does without shrinkers. What may wait and what for
    /// is as in the other forms: [`up_to`](Bulk::up_to) waits for one block if it has none,
    /// [`exact`](Bulk::exact) and [`at_least`](Bulk::at_least) hold nothing while they wait. With
    /// [`NOWAIT`](Gfp::NOWAIT), [`ATOMIC`](Gfp::ATOMIC) or [`NORETRY`](Gfp::NORETRY) the first poll is ready.
    ///
    /// - **A deadline** is your runtime's: put its timeout around the future. A request with a
    ///   [`timeout`](Bulk::timeout) is refused.
    /// - **Dropping the future** leaves the line and gives back what it had.
    /// - **No poll calls a [`Shrinker`](crate::Shrinker)**. The thread of
    ///   [`background_reclaim`](crate::Builder::background_reclaim) does while tasks wait, and
    ///   [`reclaim_step`](Self::reclaim_step). A program that has shrinkers and neither of these calls waits for frees
    ///   alone.
    /// - **Wakers are called on a thread of Pagemill's**, which the first request that waits starts. A free calls none,
    ///   so a signal handler may free (C2.5). That one thread calls all wakers of the process, so a waker must not block.
    /// - **A future that is woken and not polled** keeps its place. After about a second without a poll, the request
    ///   behind it is tried as well. While the future exists, the per-CPU lists stay shut: every free goes to the zone.
    /// - **With [`RETRY_MAYFAIL`](Gfp::RETRY_MAYFAIL)** an `up_to` keeps what came while it waits for the rest. Two such
    ///   futures can wait for each other's pages for ever; a sleeping request gives up.
    ///
    /// # Errors
    /// As [`alloc_pages_bulk_list`](Self::alloc_pages_bulk_list), and [`InvalidRequest::AwaitedTimeout`] for a request
    /// with a timeout.
    ///
    /// ```
    /// use pagemill::{Allocator, Bulk, PageList};
    /// use std::pin::pin;
    /// use std::sync::Arc;
    /// use std::task::{Context, Poll, Wake, Waker};
    /// use std::thread::{Thread, current, park};
    /// // The smallest executor. With tokio: `tokio::time::timeout(limit, future).await`.
    /// struct Unparks(Thread);
    /// impl Wake for Unparks {
    ///     fn wake(self: Arc<Self>) {
    ///         self.0.unpark();
    ///     }
    /// }
    /// fn block_on<T>(future: impl Future<Output = T>) -> T {
    ///     let (mut future, waker) = (pin!(future), Waker::from(Arc::new(Unparks(current()))));
    ///     loop {
    ///         match future.as_mut().poll(&mut Context::from_waker(&waker)) {
    ///             Poll::Ready(got) => return got,
    ///             Poll::Pending => park(),
    ///         }
    ///     }
    /// }
    /// let allocator = Allocator::builder().pages(64).build()?;
    /// let most: PageList = block_on(allocator.alloc_bulk_async(Bulk::exact(60)))?;
    /// let freed = std::thread::spawn(move || drop(most));
    /// // Waits until the other thread has freed its pages.
    /// let all: PageList = block_on(allocator.alloc_bulk_async(Bulk::exact(64)))?;
    /// assert_eq!(all.len(), 64);
    /// # freed.join().unwrap();
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn alloc_bulk_async<'a, N, T: Owned>(
        &'a self,
        request: Bulk<'a, N, T>,
    ) -> impl Future<Output = Result<List<T>, Error>> + Send + use<'a, N, T> {
        self.await_list(request.request)
    }

    async fn await_list<T: Owned>(&self, mut request: Request<'_>) -> Result<List<T>, Error> {
        if request.timeout.is_some() {
            return Err(InvalidRequest::AwaitedTimeout.into());
        }
        request.begin(self.zones())?;
        request.effort = Effort::Take;
        // A thread inside of a shrinker must not wait for memory that others reclaim.
        let may_wait = request.gfp.may_wait() && !request.gfp.contains(Gfp::NORETRY) && !is_reclaiming();
        match request.least {
            0 => self.await_some(request, may_wait).await,
            _ => self.await_all(request, may_wait).await,
        }
    }

    /// For a request that must have some blocks at once.
    async fn await_all<T: Owned>(&self, mut request: Request<'_>, may_wait: bool) -> Result<List<T>, Error> {
        let (zones, needed, mut got) = (self.zones(), request.least, 0);
        let lack = request.lack(zones, needed);
        let mut served = None;
        if !may_wait || !zones.waits.has(lack) {
            let is_worth_it = !request.gfp.may_wait() || needed <= Batch::CAPACITY || zones.has_enough(lack);
            served = if is_worth_it { self.take_list(&mut request, needed, &mut got) } else { None };
        }
        if served.is_none() {
            zones.check_lack(lack, request.gfp)?;
            if may_wait && !request.is_refused(needed) {
                let cancel = request.cancel;
                let attempt = || {
                    let list = zones.has_enough(lack).then(|| self.take_list(&mut request, needed, &mut got)).flatten();
                    // If the request is refused, waiting cannot help.
                    if list.is_none() && request.is_refused(needed) { Some(None) } else { list.map(Some) }
                };
                served = zones.await_in_line(lack, cancel, attempt).await.flatten();
            }
        }
        let Some(list) = served else { return Err(request.missed(self, got)) };
        self.delivered(&request, list.len())?;
        Ok(list)
    }

    /// For a request that takes as many as there are: it waits for one, or for all with `RETRY_MAYFAIL`.
    async fn await_some<T: Owned>(&self, request: Request<'_>, may_wait: bool) -> Result<List<T>, Error> {
        let (zones, lack) = (self.zones(), request.lack(self.zones(), 1));
        let mut hand = InHand { list: List::of_order(request.order), request };
        loop {
            // Another request for the same memory came first.
            if !may_wait || !zones.waits.has(lack) {
                hand.take(self, request.most, 0);
            }
            let (got, request) = (hand.list.len(), hand.request);
            let has_enough = got == request.most || (got > 0 && !request.tries_for_all());
            if has_enough || !may_wait || request.is_refused(1) {
                break;
            }
            zones.check_lack(lack, request.gfp)?;
            let attempt = || match hand.take(self, got + 1, 1) {
                false if hand.request.is_refused(1) => Some(false), // Waiting cannot help.
                is_taken => is_taken.then_some(true),
            };
            if zones.await_in_line(lack, request.cancel, attempt).await != Some(true) {
                break;
            }
        }
        let (request, list) = hand.open();
        self.delivered(&request, list.len())?;
        Ok(list)
    }
}

/// The blocks of a request that is under way. Unless it is [opened](Self::open) they go back, and the account is not
/// charged for them.
struct InHand<'r, T: Owned> {
    list: List<T>,
    request: Request<'r>,
}

impl<'r, T: Owned> InHand<'r, T> {
    /// Takes until it has `most`, `needed` more at least. Returns whether it has.
    fn take(&mut self, allocator: &Allocator, most: usize, needed: usize) -> bool {
        let mut part = Request { most: most - self.list.len(), ..self.request };
        let taken = allocator.take_list(&mut part, needed, &mut 0);
        self.request.commit = part.commit;
        taken.map(|list| self.list.join(list)).is_some()
    }

    fn open(mut self) -> (Request<'r>, List<T>) {
        (self.request, core::mem::take(&mut self.list))
    }
}

impl<T: Owned> Drop for InHand<'_, T> {
    fn drop(&mut self) {
        self.request.refund(self.list.len());
    }
}
