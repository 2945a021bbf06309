//! Requests to a pool that are awaited (C3.18): a future that waits in the pool's line without a thread.
use super::pool::{Mempool, short};
use super::pooled::{PoolRef, Pooled};
use super::source::Source;
use super::want::{Callback, Want};
use crate::account::Account;
use crate::bulk::{Bulk, Exact, Request};
use crate::error::{Error, InvalidRequest};
use crate::tasks::InLine;
use core::future::poll_fn;
use core::sync::atomic::Ordering::Relaxed;
use core::task::Poll;
use pagemill_core::PageCount;
use std::sync::Arc;

impl<S: Source> Mempool<S> {
    /// Takes n elements, where n is the request's count, and waits for them without putting the thread to sleep (C3.18).
    /// For any executor.
    ///
    /// The request begins at the first poll. It asks the source, with flags that neither wait nor reclaim, and takes the
    /// rest from the reserve whole or not at all. If it has to wait and its flags allow that, it stands in the pool's
    /// line among sleeping threads, first come first served (C5.3), until it is served, dropped, or
    /// [cancelled](crate::Cancel). Dropping the future leaves the line. What came from the source until then goes back to
    /// the pool, and the request's account is no longer charged for it. A deadline is your runtime's. See also
    /// [`Allocator::alloc_bulk_async`](crate::Allocator::alloc_bulk_async).
    ///
    /// While it waits, the pool refuses requests that may not wait (C5.3), also if the future was woken and is not polled.
    /// In the child of a fork it is not woken until it was polled there.
    ///
    /// The future is [`Send`] if the source is [`Sync`].
    ///
    /// # Errors
    /// As [`alloc_bulk_array`](Self::alloc_bulk_array), but nothing is delivered then.
    /// [`InvalidRequest::AwaitedTimeout`] for a request with a timeout.
    ///
    /// ```
    /// use pagemill::{Allocator, Bulk, Gfp, Mempool};
    /// use std::pin::pin;
    /// use std::task::{Context, Poll, Waker};
    /// let pool = Mempool::pages(&Allocator::builder().pages(16).build()?, 16)?;
    /// let all = pool.take_async(Bulk::exact(16).gfp(Gfp::NOIO));
    /// let mut context = Context::from_waker(Waker::noop());
    /// let Poll::Ready(all) = pin!(all).poll(&mut context) else { panic!("the reserve has 16") };
    /// let mut one = pin!(pool.take_async(Bulk::exact(1).gfp(Gfp::NOIO)));
    /// assert!(one.as_mut().poll(&mut context).is_pending());
    /// drop(all?); // A free has the task woken.
    /// assert!(one.poll(&mut context).is_ready());
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn take_async<'p, 'a>(
        &'p self,
        request: Bulk<'a, Exact, S::Item>,
    ) -> impl Future<Output = Result<Vec<Pooled<&'p Self>>, Error>> + use<'p, 'a, S> {
        gather(self, request.request)
    }

    /// The same with handles that keep the pool alive, as the future does: a runtime may spawn it.
    ///
    /// # Errors
    /// As [`take_async`](Self::take_async).
    pub fn take_async_owned<'a>(
        self: &Arc<Self>,
        request: Bulk<'a, Exact, S::Item>,
    ) -> impl Future<Output = Result<Vec<Pooled<Arc<Self>>>, Error>> + use<'a, S> {
        gather(Arc::clone(self), request.request)
    }

    /// The way of a request that is awaited. Every step but the wait is that of [`get`](Self::get).
    async fn get_awaited(&self, request: Request<'_>, want: impl Want<S>) -> Result<(), Error> {
        let mut want = Charge { want, account: request.account, pages: 0 };
        let at_once = request.at_once(request.gfp.nowait());
        want.ask(self, at_once)?;
        let mut is_served = want.missing() == 0 || self.take_whole(&mut want, request.gfp, false);
        if !is_served && request.gfp.may_wait() {
            let attempt = || self.ask_and_take(&mut want, Some(at_once), request.gfp, true);
            is_served = self.await_in_line(&request, attempt).await?;
        }
        match want.missing() {
            0 if is_served => {
                want.pages = 0; // The program has the elements, and uncharges them.
                Ok(())
            }
            missing => Err(short(&request, request.most - missing, self.source.order())),
        }
    }

    /// Waits in line until `attempt` returns true. False if the request was cancelled first.
    async fn await_in_line(
        &self,
        request: &Request<'_>,
        mut attempt: impl FnMut() -> Result<bool, Error>,
    ) -> Result<bool, Error> {
        let mut need = self.need(request)?;
        let mut line = InLine::new(&self.waits, (), request.cancel);
        let served = poll_fn(|context| {
            if need.is_inherited() {
                need = match self.need(request) {
                    Ok(need) => need,
                    Err(error) => return Poll::Ready(Some(Err(error))),
                };
            }
            line.poll(context, |_| attempt().map(|is_served| is_served.then_some(true)).transpose())
        });
        served.await.unwrap_or(Ok(false))
    }
}

/// A request, and the pages that its account was charged until now. They are taken off the account when it is dropped,
/// unless the request was served.
struct Charge<'a, W> {
    want: W,
    account: Option<&'a Account>,
    pages: usize,
}

impl<S: Source, W: Want<S>> Want<S> for Charge<'_, W> {
    fn missing(&self) -> usize {
        self.want.missing()
    }
    fn ask(&mut self, pool: &Mempool<S>, request: Request<'_>) -> Result<(), Error> {
        let before = self.want.missing();
        let asked = self.want.ask(pool, request);
        self.pages += (before - self.want.missing()) * pool.source.charged_pages().get();
        asked
    }
    fn put(&mut self, item: S::Item) {
        self.want.put(item);
    }
}

impl<W> Drop for Charge<'_, W> {
    fn drop(&mut self) {
        self.account.inspect(|account| account.uncharge(PageCount::new(self.pages)));
    }
}

async fn gather<P: PoolRef + Clone>(pool: P, request: Request<'_>) -> Result<Vec<Pooled<P>>, Error> {
    request.gfp.check()?;
    if request.timeout.is_some() {
        return Err(InvalidRequest::AwaitedTimeout.into());
    }
    if request.most > pool.min_nr.load(Relaxed) {
        return Err(pool.refusal(&request));
    }
    let mut got = Vec::new();
    let want = Callback::new(request.most, |item| got.push(Pooled::new(pool.clone(), item)));
    pool.get_awaited(request, want).await?;
    Ok(got)
}
