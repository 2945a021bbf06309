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
    ///   behind it is tried as well; behind several such futures, after about two seconds. While the future exists, the
    ///   per-CPU lists stay shut: every free goes to the zone. If it was overtaken often before, freed memory was kept for
    ///   it. After two seconds without a poll, another request that may wait or background reclaim ends that; requests
    ///   that may not wait fail until then.
    /// - **In the child of a fork** no waker of the parent's is called or dropped. A future that was pending at the fork is
    ///   not woken there: poll it once, and it waits in the child.
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
        request.stay_on_node(self.zones());
        // A thread inside of a shrinker must not wait for memory that others reclaim.
        let may_wait = request.gfp.may_wait() && !request.gfp.contains(Gfp::NORETRY) && !is_reclaiming();
        match request.least {
            0 => self.await_some(request, may_wait).await,
            _ => self.await_all(request, may_wait).await,
        }
    }

    /// For a request that must have some blocks at once.
    async fn await_all<T: Owned>(&self, request: Request<'_>, may_wait: bool) -> Result<List<T>, Error> {
        let (zones, needed) = (self.zones(), request.least);
        let lack = request.lack(zones, needed);
        let mut hand = InHand::new(request);
        let mut is_served = false;
        if !may_wait || !zones.waits.has(lack) {
            let is_worth_it = !request.gfp.may_wait() || needed <= Batch::CAPACITY || zones.has_enough(lack);
            is_served = is_worth_it && hand.take(self, request.most, needed);
        }
        if !is_served {
            zones.check_lack(lack, request.gfp)?;
            if may_wait && !hand.request.is_refused(needed) {
                let attempt = || match zones.has_enough(lack) && hand.take(self, request.most, needed) {
                    false if hand.request.is_refused(needed) => Some(false), // Waiting cannot help.
                    is_taken => is_taken.then_some(true),
                };
                is_served = zones.await_in_line(lack, request.cancel, attempt).await == Some(true);
            }
        }
        let got = hand.got;
        let (request, list) = hand.open();
        if !is_served {
            return Err(request.missed(self, got));
        }
        self.delivered(&request, list.len())?;
        Ok(list)
    }

    /// For a request that takes as many as there are: it waits for one, or for all with `RETRY_MAYFAIL`.
    async fn await_some<T: Owned>(&self, request: Request<'_>, may_wait: bool) -> Result<List<T>, Error> {
        let (zones, lack) = (self.zones(), request.lack(self.zones(), 1));
        let mut hand = InHand::new(request);
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
    /// The blocks that the last attempt had, also if it gave them back.
    got: usize,
}

impl<'r, T: Owned> InHand<'r, T> {
    fn new(request: Request<'r>) -> Self {
        Self { list: List::of_order(request.order), request, got: 0 }
    }

    /// Takes until it has `most`, `needed` more at least. Returns whether it has.
    fn take(&mut self, allocator: &Allocator, most: usize, needed: usize) -> bool {
        let mut part = Request { most: most - self.list.len(), ..self.request };
        let taken = allocator.take_list(&mut part, needed, &mut self.got);
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
