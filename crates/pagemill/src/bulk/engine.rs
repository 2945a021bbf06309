//! The engine under the forms. It takes frames in batches of at most 64, each in one exclusive section (C3.5), and prepares
//! them outside of that section (C3.9).
//!
//! A request for at most [`ListPolicy::LARGE`] pages is served from the CPU's free list and refills it. A larger request passes the
//! list by: it would only empty it. What the list lacks comes from the zones, the nearest first, above their low watermarks. If that
//! is nothing, or less than the request must have, the engine takes blocks one by one as a single request does, until the request
//! has one block, or all that it must have; with `RETRY_MAYFAIL` until it has all or no more can be had (C3.4, C3.6, C3.8).
//!
//! A request that must have several blocks makes one such attempt, which keeps all or gives back what it took. If that failed and the
//! request may wait, it waits with nothing in hand, in a line for all its blocks at once (`wait_for_all`, C3.20).
use crate::allocator::Allocator;
use crate::bulk::request::{Commit, Delivered, Request};
use crate::context::{AllocContext, Effort};
use crate::error::Error;
use crate::walk::Walk;
use crate::zone::{PageblockFrames, Zone};
use crate::zones::Zones;
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::{Level, ListPolicy, Order, Shortfall, Why};
use pagemill_os::Batch;
use pagemill_os::lists::BulkCall;

impl Allocator {
    /// Takes up to `missing` blocks and hands them to `sink` in prepared batches, each from one zone. Returns how many. The sink is
    /// called in one place and no pointer to it is kept, so that the compiler can hold its variables in registers. `is_undone`: if
    /// the request unwinds, the sink's blocks go back.
    #[inline]
    pub(super) fn bulk(
        &self,
        request: &Request<'_>,
        missing: usize,
        is_undone: bool,
        mut sink: impl FnMut(&Zone, &Batch),
    ) -> usize {
        let (mut taking, mut slow, mut batch) = (Taking::new(self, request, missing, is_undone), None, Batch::new());
        while let Some(zone) = taking.next(&mut slow, &mut batch) {
            sink(zone, &batch);
        }
        taking.end()
    }

    /// Takes the next batch, prepared, from below the list, and returns its zone; none if no more can be had. Of `missing` blocks
    /// `left` are still to come, and without `needed` of these the request fails.
    #[cold]
    #[inline(never)]
    fn bulk_slow(
        &self,
        request: &Request<'_>,
        slow: &mut Option<Slow>,
        missing: usize,
        left: usize,
        needed: usize,
        batch: &mut Batch,
    ) -> Option<&'static Zone> {
        let zones = self.zones();
        let context = request.context(zones);
        if missing == 1 {
            // A request for one block is a single request.
            let (zone, pfn) = zones.take_one(&context, context.first_node(zones, 1)).ok()??;
            batch.push(pfn.as_u32());
            return Some(zone);
        }
        let slow = slow.get_or_insert_with(|| Slow::new(zones, &context, missing));
        loop {
            match slow.stage {
                Stage::Walk => match slow.walk.next(zones, &context, left, slow.past_list.as_mut(), batch) {
                    None => slow.stage = Stage::Single,
                    found => return found,
                },
                // The request keeps what it got, and neither reclaims nor waits for the rest (C3.4).
                Stage::Single if left < missing && needed == 0 && !request.tries_for_all() => {
                    zones.note_low(context.gfp.may_wait());
                    slow.stage = Stage::Over;
                }
                // As a single request (C3.6, C3.8), which alone may take from pageblocks of another mobility.
                Stage::Single => {
                    if let Some(in_hand) = &mut slow.past_list {
                        in_hand.give_back(); // The request would otherwise hold more than it asked for.
                    }
                    let Ok(Some((zone, pfn))) = zones.take_one(&context, slow.walk.from) else {
                        slow.stage = Stage::Over;
                        continue;
                    };
                    // A request that stood in line goes on in bulk if no other request waits there.
                    if core::mem::take(&mut slow.is_in_line) && !zones.waits.has(request.lack(zones, 1)) {
                        slow.walk.again(zones);
                        slow.stage = Stage::Walk;
                    }
                    zone.stats_here().fallbacks.fetch_add(1, Relaxed);
                    batch.push(pfn.as_u32());
                    return Some(zone);
                }
                Stage::Over => return None,
            }
        }
    }

    /// The result of a call that brought so many blocks.
    ///
    /// # Errors
    /// As [`shortfall`](Self::shortfall).
    #[inline]
    pub(super) fn delivered(&self, request: &Request<'_>, blocks: usize) -> Result<Delivered, Error> {
        if blocks == request.most {
            return Ok(Delivered { blocks, shortfall: None });
        }
        self.delivered_short(request, blocks)
    }

    #[cold]
    #[inline(never)]
    fn delivered_short(&self, request: &Request<'_>, blocks: usize) -> Result<Delivered, Error> {
        Ok(Delivered { blocks, shortfall: self.shortfall(request, blocks, blocks)? })
    }

    /// Why a request has fewer blocks than it asked for, if it has: it has `got`, of which this call brought `added`. Counts the
    /// shortfall.
    ///
    /// # Errors
    /// The call brought none, and no state of the allocator could serve the request.
    #[cold]
    #[inline(never)]
    pub(super) fn shortfall(
        &self,
        request: &Request<'_>,
        got: usize,
        added: usize,
    ) -> Result<Option<Shortfall>, Error> {
        if got == request.most {
            return Ok(None);
        }
        let zones = self.zones();
        let level = if added > 0 && !request.tries_for_all() { Level::Low } else { Level::Min };
        let why = self.why(request, 1, level);
        if added == 0 && why != Why::Account {
            zones.check_lack(request.lack(zones, 1), request.gfp)?;
        }
        zones.count_shortfall(&request.context(zones), why);
        Ok(Some(Shortfall { missing: request.most - got, why }))
    }

    /// Why the zones had too few above the watermarks of `level`, for a request that needed so many more.
    #[cold]
    #[inline(never)]
    pub(super) fn why(&self, request: &Request<'_>, needed: usize, level: Level) -> Why {
        if request.commit == Commit::Refused {
            return Why::Uncommitted;
        }
        if request.is_refused(needed) {
            return Why::Account;
        }
        self.zones().why(&request.context(self.zones()), level)
    }
}

impl Allocator {
    /// Returns what `attempt` brings: at once, or, for a request that may wait, when enough pages have come back. An attempt must bring
    /// `needed` blocks, or it gives back what it took. With 0 needed there is one attempt, and no wait in this function.
    ///
    /// # Errors
    /// [`InvalidRequest::MoreThanManaged`](crate::InvalidRequest::MoreThanManaged), `NoSuchNode`: the zones never have so many.
    #[inline]
    pub(super) fn all_or_wait<T>(
        &self,
        request: &mut Request<'_>,
        needed: usize,
        mut attempt: impl FnMut(&mut Request<'_>) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let is_tried = needed == 0 || self.may_try(request, needed);
        if is_tried {
            let got = attempt(request);
            if got.is_some() || needed == 0 {
                return Ok(got);
            }
        }
        self.wait_for_all(request, needed, is_tried, &mut attempt)
    }

    /// Whether a request that must have so many blocks may try now. It may not while another request waits for the same memory. A
    /// request for more than a batch also may not while too few blocks are free: other requests would miss the blocks that it took
    /// and gave back.
    #[inline]
    fn may_try(&self, request: &Request<'_>, needed: usize) -> bool {
        let is_awaited = self.zones().waits.is_awaited();
        (needed <= Batch::CAPACITY && !is_awaited) || self.may_try_many(request, needed)
    }

    #[cold]
    #[inline(never)]
    fn may_try_many(&self, request: &Request<'_>, needed: usize) -> bool {
        let zones = self.zones();
        let lack = request.lack(zones, needed);
        // A request that may not wait can come from a signal handler: it takes no lock and drains nothing.
        !request.gfp.may_wait()
            || (!zones.waits.has(lack)
                && (needed <= Batch::CAPACITY || zones.reclaim.has_shrinkers() || zones.has_enough(lack)))
    }

    #[cold]
    #[inline(never)]
    fn wait_for_all<T>(
        &self,
        request: &mut Request<'_>,
        needed: usize,
        is_tried: bool,
        attempt: &mut dyn FnMut(&mut Request<'_>) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let zones = self.zones();
        request.stay_on_node(zones);
        let (context, lack) = (request.context(zones), request.lack(zones, needed));
        zones.check_lack(lack, context.gfp)?;
        if crate::reclaim::is_reclaiming() || request.is_refused(needed) {
            return Ok(None);
        }
        if !zones.may_wait_in_line(&context, lack) {
            // The line was left meanwhile, frames are on their way from one CPU to another, or a task has claimed them.
            let may_try = zones.end_idle_claim() || !is_tried;
            let may_try = may_try && zones.has_enough_soon(lack, &context);
            return Ok(if may_try { attempt(request) } else { None });
        }
        request.effort = Effort::Take; // While it stands in line, the line calls the shrinkers.
        let mut attempt = || match if zones.has_enough(lack) { attempt(request) } else { None } {
            None if request.is_refused(needed) => Some(None), // Waiting cannot help.
            None => None,
            got => Some(got),
        };
        Ok(zones.wait_in_line(&context, lack, &mut attempt).flatten())
    }
}

/// A request under way. The form calls for one batch after the other and puts it where it wants: the engine never sees where.
pub(super) struct Taking<'r> {
    allocator: &'r Allocator,
    request: &'r Request<'r>,
    /// The zone whose list this CPU has, while the list has pages; and the same zone, kept for the count.
    list: Option<&'static Zone>,
    here: Option<&'static Zone>,
    /// The zone that served last, below the list.
    other: Option<&'static Zone>,
    /// Blocks that the array had already and that count; blocks to take, as far as the account pays; blocks taken.
    held: usize,
    missing: usize,
    got: usize,
    is_undone: bool,
}

impl<'r> Taking<'r> {
    /// Up to `missing` blocks. `is_undone`: unless [`end`](Self::end) is called, the blocks go back.
    #[inline]
    pub(super) fn new(allocator: &'r Allocator, request: &'r Request<'r>, missing: usize, is_undone: bool) -> Self {
        let held = request.most - missing;
        let missing = if request.account.is_some() { request.charge(missing) } else { missing };
        let here = if request.order == Order::ZERO && missing <= ListPolicy::LARGE && request.is_anywhere() {
            allocator.zones().here()
        } else {
            None
        };
        Self { allocator, request, list: here, here, other: None, held, missing, got: 0, is_undone }
    }

    /// The next batch, prepared, and its zone. `slow` and `batch` are no fields, so that calls which write to them leave the fields in
    /// registers.
    #[inline(always)]
    pub(super) fn next(&mut self, slow: &mut Option<Slow>, batch: &mut Batch) -> Option<&'static Zone> {
        let left = self.missing - self.got;
        if left == 0 {
            return None;
        }
        batch.clear();
        let (gfp, mobility) = (self.request.gfp, self.request.gfp.mobility());
        if let Some(zone) = self.list {
            zone.lists().pop_n(mobility, left, batch);
        }
        let found = match self.list {
            Some(zone) if !batch.is_empty() => {
                zone.prepare(batch, gfp);
                zone
            }
            _ => {
                self.list = None;
                let needed = self.request.least.saturating_sub(self.held + self.got);
                let found = self.allocator.bulk_slow(self.request, slow, self.missing, left, needed, batch)?;
                self.other = Some(found);
                found
            }
        };
        self.got += batch.len();
        Some(found)
    }

    /// Counts the call in the zone that served last. Returns how many blocks it brought.
    #[inline(always)]
    pub(super) fn end(mut self) -> usize {
        self.is_undone = false;
        if self.got > 1
            && let Some(zone) = self.other.or(self.here)
        {
            zone.lists().count_bulk(BulkCall::Alloc, self.got);
        }
        self.got
    }
}

/// Takes what was charged and not delivered off the account, however the request ends.
impl Drop for Taking<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.request.account.is_some() {
            let undone = if self.is_undone { self.got } else { 0 };
            self.request.refund(self.missing - self.got + undone);
        }
    }
}

/// How far a bulk request has gone below the list.
#[derive(Debug)]
pub(super) struct Slow {
    stage: Stage,
    walk: Walk<'static>,
    /// The frames in hand of a request that goes past the lists.
    past_list: Option<PageblockFrames>,
    /// Other requests waited for a block when this one began: it takes one block behind them before it goes on in bulk.
    is_in_line: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// Takes batches, zone by zone.
    Walk,
    /// Takes one block at a time, as a single request does.
    Single,
    /// No more can be had.
    Over,
}

impl Slow {
    /// Goes on from the list to the zones. A request that may wait begins as a single request while others wait for a block.
    #[inline]
    fn new(zones: &'static Zones, context: &AllocContext<'_>, missing: usize) -> Self {
        let walk = Walk::for_many(zones, context, missing);
        let is_in_line =
            context.effort == Effort::Wait && context.gfp.may_wait() && zones.waits.has(context.lack(walk.from, 1));
        let stage = if is_in_line { Stage::Single } else { Stage::Walk };
        let past_list = (missing > ListPolicy::LARGE).then_some(PageblockFrames::NONE);
        Self { stage, walk, past_list, is_in_line }
    }
}
