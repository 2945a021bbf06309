//! The way of a request: the source, the reserve, the line (C5.2).
use super::outgoing::Outgoing;
use super::pool::{Mempool, short};
use super::source::Source;
use super::want::{Array, Callback, Want};
use crate::bulk::{Bulk, Exact, Request, from_now};
use crate::error::{Error, InvalidRequest};
use crate::reclaim;
use crate::sync::Stamp;
use crate::wait::Patience;
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::Gfp;

impl<S: Source> Mempool<S> {
    /// Allocates one element as a plain value, which the caller must return by [`free_raw`](Self::free_raw).
    ///
    /// # Errors
    /// [`Error::Exhausted`] if `gfp` does not wait, and neither the source nor the reserve has an element.
    #[inline]
    pub fn alloc_raw(&self, gfp: Gfp) -> Result<S::Item, Error> {
        let mut slot = [None];
        self.alloc_bulk_array_raw(Bulk::exact(1).gfp(gfp), &mut slot)?;
        let [Some(item)] = slot else { unreachable!("a request that succeeded left its slot empty") };
        Ok(item)
    }

    /// As [`alloc_bulk_array`](Self::alloc_bulk_array), with plain values, which the caller must return by
    /// [`free_bulk_raw`](Self::free_bulk_raw).
    ///
    /// # Errors
    /// [`Error::Exhausted`] if the request may not wait, or not any longer. Elements that were delivered until then
    /// stay in their slots. [`Error::Invalid`] if n is above `min_nr`.
    ///
    /// Return them by `free_bulk_raw` before the array is dropped: a plain element that is dropped never comes back.
    ///
    /// A pool promises all that was asked for, so only an exact request compiles:
    /// ```compile_fail,E0308
    /// # use pagemill::{Allocator, Bulk, Mempool, Page};
    /// # fn ask(pool: &Mempool<pagemill::PageSource<Page>>, slots: &mut [Option<Page>]) {
    /// pool.alloc_bulk_array_raw(Bulk::up_to(2), slots);
    /// # }
    /// ```
    #[inline]
    pub fn alloc_bulk_array_raw(
        &self,
        request: Bulk<'_, Exact, S::Item>,
        slots: &mut [Option<S::Item>],
    ) -> Result<(), Error> {
        let (n, len) = (request.request.most, slots.len());
        let slots = slots.get_mut(..n).ok_or(InvalidRequest::ArrayTooShort { slots: len, count: n })?;
        self.get(request.request, Array::new(slots))
    }

    /// As [`alloc_bulk_callback`](Self::alloc_bulk_callback), with plain values.
    ///
    /// # Errors
    /// As for [`alloc_bulk_array_raw`](Self::alloc_bulk_array_raw).
    ///
    /// ```
    /// use pagemill::{Allocator, Bulk, Gfp, Mempool};
    /// let pool = Mempool::pages(&Allocator::builder().pages(64).build()?, 16)?;
    /// let mut pages = Vec::new();
    /// pool.alloc_bulk_callback_raw(Bulk::exact(16).gfp(Gfp::NOIO), |page| pages.push(Some(page)))?;
    /// assert_eq!(pool.free_bulk_raw(&mut pages), 16);
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn alloc_bulk_callback_raw(
        &self,
        request: Bulk<'_, Exact, S::Item>,
        each: impl FnMut(S::Item),
    ) -> Result<(), Error> {
        self.get(request.request, Callback::new(request.request.most, each))
    }
}

impl<S: Source> Mempool<S> {
    /// The way of every request.
    #[inline]
    pub(super) fn get(&self, request: Request<'_>, mut want: impl Want<S>) -> Result<(), Error> {
        request.gfp.check()?;
        if request.most > self.min_nr.load(Relaxed) {
            return Err(self.refusal(&request));
        }
        want.ask(self, request.at_once(request.gfp.nowait()))?;
        if want.missing() == 0 { Ok(()) } else { self.get_slow(request, want) }
    }

    #[cold]
    pub(super) fn refusal(&self, request: &Request<'_>) -> Error {
        InvalidRequest::AboveReserve { count: request.most, min_nr: self.min_nr.load(Relaxed) }.into()
    }

    #[cold]
    #[inline(never)]
    fn get_slow(&self, request: Request<'_>, mut want: impl Want<S>) -> Result<(), Error> {
        let patience = Patience { deadline: request.timeout.map(from_now), cancel: request.cancel };
        let at_once = request.at_once(request.gfp.nowait());
        // A request in a shrinker may wait, since freed elements need no memory, but it may not reclaim.
        let with_reclaim = (!reclaim::is_reclaiming()).then(|| request.at_once(request.gfp.noretry()));
        let is_served = self.take_whole(&mut want, request.gfp, false)
            || (request.gfp.may_wait() && self.ask_and_take(&mut want, with_reclaim, request.gfp, false)?)
            || (request.gfp.may_wait()
                && self.wait(&request, &patience, || {
                    Ok(self.ask_and_take(&mut want, Some(at_once), request.gfp, true)?
                        || self.ask_and_take(&mut want, with_reclaim, request.gfp, true)?)
                })?);
        match want.missing() {
            0 if is_served => Ok(()),
            missing => Err(short(&request, request.most - missing, self.source.order())),
        }
    }

    /// Asks the source, if a `request` is given, and then takes the whole remainder from the reserve. Returns whether
    /// the request is served.
    pub(super) fn ask_and_take(
        &self,
        want: &mut impl Want<S>,
        request: Option<Request<'_>>,
        gfp: Gfp,
        is_first: bool,
    ) -> Result<bool, Error> {
        if let Some(request) = request {
            let mut before = want.missing();
            want.ask(self, request)?;
            // A page source that has some pages does not reclaim for the rest (C3.4). Asked again, it does.
            while request.gfp.may_wait() && (1..before).contains(&want.missing()) {
                before = want.missing();
                want.ask(self, request)?;
            }
        }
        Ok(want.missing() == 0 || self.take_whole(want, gfp, is_first))
    }

    /// Takes the missing elements from the reserve, all of them or none (M2).
    pub(super) fn take_whole(&self, want: &mut impl Want<S>, gfp: Gfp, is_first: bool) -> bool {
        let mut reserve = self.lock();
        let (mut missing, available) = (want.missing(), reserve.available());
        if cfg!(pagemill_canary) {
            missing = missing.min(available); // Takes a part: two requests with a part each wait for each other.
        }
        // Checked with the reserve locked: a request that lines up after this check makes its attempt after it.
        if available < missing || (!is_first && self.waits.is_awaited()) {
            return false;
        }
        reserve.claimed += missing;
        reserve.taken += missing as u64;
        reserve.low_water = reserve.low_water.min(reserve.available());
        self.lacks.store(reserve.lacks(self.min_nr.load(Relaxed)), Relaxed);
        drop(reserve);
        self.out.fetch_add(missing, Relaxed);
        let mut claim = Outgoing::new(self, missing);
        while let Some(mut item) = claim.next() {
            self.source.renew(&mut item, gfp);
            want.put(item);
        }
        want.missing() == 0
    }

    /// Notes a request that is about to wait.
    pub(super) fn need(&self, request: &Request<'_>) -> Result<Need<'_, S>, Error> {
        let mut reserve = self.lock();
        if request.most > self.min_nr.load(Relaxed) {
            return Err(self.refusal(request)); // The reserve shrank meanwhile.
        }
        reserve.needs.push(request.most);
        drop(reserve);
        Ok(Need { pool: self, count: request.most, stamp: Stamp::here() })
    }

    /// Waits in line until `attempt` returns true. False if the request's patience ended first.
    fn wait(
        &self,
        request: &Request<'_>,
        patience: &Patience<'_>,
        mut attempt: impl FnMut() -> Result<bool, Error>,
    ) -> Result<bool, Error> {
        let _need = self.need(request)?;
        let served =
            self.waits.wait((), patience, None, |_| attempt().map(|is_served| is_served.then_some(true)).transpose());
        served.unwrap_or(Ok(false))
    }
}

/// The size of a waiting request. The reserve does not shrink below it.
pub(super) struct Need<'p, S: Source> {
    pool: &'p Mempool<S>,
    count: usize,
    stamp: Stamp,
}

impl<S: Source> Need<'_, S> {
    /// Whether it was noted before this process was forked: the child has forgotten it.
    pub(super) fn is_inherited(&self) -> bool {
        self.stamp.is_inherited()
    }
}

impl<S: Source> Drop for Need<'_, S> {
    fn drop(&mut self) {
        let needs = &mut self.pool.lock().needs;
        // If the source forked, this is the child, where the need is forgotten already.
        let at = needs.iter().position(|&need| need == self.count && !self.is_inherited());
        if let Some(at) = at {
            needs.swap_remove(at);
        }
    }
}
