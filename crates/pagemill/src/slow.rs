//! The slow path of a request for one block: zones down to their watermarks, then reclaim, then waiting (C3.6).
//!
//! [`Zones::take_one`] goes as far as the request's flags and its [`Effort`] allow. A request that may wait skips steps 1 and 2 while
//! another request waits for the same memory.
//!
//! 1. Every zone above its low watermark, then down to the watermark that the flags reach. Per-CPU lists are drained on the way.
//! 2. Shrinkers, with another try after each round.
//! 3. A seat in line (`wait.rs`), if the request has a timeout or `NOFAIL`, or, without `NORETRY`, if a shrinker is registered or others
//!    wait for the same memory. A request in line may claim frames (`claim.rs`).
//! 4. Otherwise, for a single page, some milliseconds of looking again while other threads move frames.
//!
//! All of it is cold and out of line. A bulk request comes here for one block at a time, when a walk for many brings no more. A
//! request that must have several blocks takes its seat itself (`Allocator::all_or_wait` in `bulk/engine.rs`), with nothing in hand
//! and for all its blocks, by [`Zones::wait_in_line`].
use crate::claim::Claim;
use crate::context::{AllocContext, Effort};
use crate::error::{Error, InvalidRequest};
use crate::reclaim;
use crate::shared::Lack;
use crate::sync::let_others_on;
use crate::tasks::InLine;
use crate::wait::Cancel;
use crate::walk::Walk;
use crate::zone::Zone;
use crate::zones::Zones;
use core::future::poll_fn;
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::{Exhausted, Gfp, Level, NodeId, Order, Pfn, Why, step};
use pagemill_os::Batch;

/// Rounds of reclaim before a request takes a seat in line, whatever number of pages the shrinkers report; and rounds in line before
/// it gives up. As many as the kernel's `MAX_RECLAIM_RETRIES`.
const ROUNDS: u32 = 16;
/// Times that a request looks again while other threads move frames between a list and the zone ([`let_others_on`]): 20 ms in all. A thread that was preempted while it moved frames runs again in that time.
const TURNS: u32 = 400;

/// The zone and the first frame of a block.
pub(crate) type Taken = (&'static Zone, Pfn);

impl Zones {
    /// One page, for a request that its CPU's list could not serve. Returns its address.
    #[cold]
    #[inline(never)]
    pub(crate) fn alloc_page_slow(&self, gfp: Gfp) -> Result<usize, Error> {
        step!("Zones::alloc_page_slow");
        self.alloc_block(&AllocContext::plain(self, gfp, Order::ZERO))
    }

    /// One block. Returns its address.
    pub(crate) fn alloc_block(&self, context: &AllocContext<'_>) -> Result<usize, Error> {
        self.check_flags(context.gfp, false)?;
        if let Some((zone, pfn)) = self.take_one(context, context.first_node(self, 1))? {
            return Ok(zone.addr_of(pfn));
        }
        let why = self.why(context, Level::Min);
        self.count_shortfall(context, why);
        Err(Exhausted { wanted: context.run.max(1), got: 0, order: context.order.get(), why }.into())
    }

    /// Why a request got no more than what lies above the watermarks of `level` (C3.4). A request that stops at the low watermarks
    /// neither reclaims nor waits.
    #[cold]
    pub(crate) fn why(&self, context: &AllocContext<'_>, level: Level) -> Why {
        let from = context.policy.first(self.node());
        let zones = || self.zonelist(from).iter().filter(|zone| context.allows(self, from, zone));
        let floor = |zone: &Zone| zone.marks().floor(context.gfp, level) as usize;
        let is_enough = |zone: &Zone| zone.buddy().free_frames() >= floor(zone).saturating_add(context.frames());
        // A run lacks neighbours: the watermark keeps nothing from it.
        let is_scattered = |zone: &Zone| context.run > 0 && is_enough(zone);
        let may_wait = level == Level::Min && context.gfp.may_wait();
        if level == Level::Min && context.patience.cancel.is_some_and(Cancel::is_cancelled) {
            Why::Cancelled
        } else if may_wait && reclaim::is_reclaiming() {
            Why::Reclaiming
        } else if zones().next().is_none() {
            Why::NotAllowed
        } else if self.has_failed_on_purpose(context.gfp) && zones().any(|zone| is_enough(zone)) {
            Why::Fault
        } else if may_wait && context.patience.is_over() {
            Why::TimedOut
        } else if zones().any(|zone| floor(zone) > 0 && zone.buddy().free_frames() > 0 && !is_scattered(zone)) {
            Why::BelowMark
        } else {
            Why::Exhausted
        }
    }

    /// Counts a request that came back short, in the zone that it would have taken the rest from.
    #[cold]
    pub(crate) fn count_shortfall(&self, context: &AllocContext<'_>, why: Why) {
        let from = context.policy.first(self.node());
        let zones = self.zonelist(from);
        let wanted = zones.iter().find(|zone| context.allows(self, from, zone)).or(zones.first());
        wanted.copied().unwrap_or(self.first()).stats_here().shortfalls[why.index()].fetch_add(1, Relaxed);
    }

    /// One block by every means that the request's flags and effort allow, from node `from` on. The block is marked as handed out, and
    /// zeroed if the request says so.
    ///
    /// # Errors
    /// [`InvalidRequest::ReclaimInShrinker`]: the request may reclaim, and comes from inside a shrinker.
    /// [`InvalidRequest::MoreThanManaged`]: the zones never have such a block.
    pub(crate) fn take_one(&self, context: &AllocContext<'_>, from: NodeId) -> Result<Option<Taken>, Error> {
        step!("Zones::take_one");
        let lack = context.lack(from, 1);
        let may_wait = context.gfp.may_wait();
        if may_wait && reclaim::is_reclaiming() {
            return Err(InvalidRequest::ReclaimInShrinker.into());
        }
        // Another request for the same memory came first. A request that must have several blocks has looked already.
        let is_behind = may_wait && context.effort == Effort::Wait && self.waits.has(lack);
        if !is_behind && let Some(taken) = self.try_levels(context, from, may_wait) {
            return Ok(Some(taken));
        }
        self.check_lack(lack, context.gfp)?;
        if !may_wait || context.effort == Effort::Take {
            return Ok(None);
        }
        if !is_behind
            && self.end_idle_claim()
            && let Some(taken) = self.try_levels(context, from, false)
        {
            return Ok(Some(taken));
        }
        if !is_behind && let Some(taken) = self.take_by_reclaim(context, from) {
            return Ok(Some(taken));
        }
        let is_for_line = self.may_wait_in_line(context, lack);
        // The request before it has left the line, or this one may not wait there.
        if is_behind
            && !is_for_line
            && let Some(taken) = self.try_levels(context, from, false)
        {
            return Ok(Some(taken));
        }
        Ok(match context.effort {
            Effort::Wait if is_for_line => {
                self.wait_in_line(context, lack, &mut || self.try_levels(context, from, false))
            }
            _ if is_for_line || context.gfp.contains(Gfp::NORETRY) => None,
            _ => self.take_from_others_hands(context, from),
        })
    }

    /// Refuses flags that contradict each other, or that this allocator cannot serve. `is_paid`: an account pays for the request.
    ///
    /// # Errors
    /// [`Invalid::GfpConflict`](pagemill_core::Invalid::GfpConflict), [`InvalidRequest::GfpUnsupported`], [`InvalidRequest::NoAccount`].
    pub(crate) fn check_flags(&self, gfp: Gfp, is_paid: bool) -> Result<(), Error> {
        gfp.check()?;
        if gfp.contains(Gfp::ACCOUNT) && !is_paid {
            return Err(InvalidRequest::NoAccount.into());
        }
        if gfp.contains(Gfp::DMA32) && !self.in_use().any(|zone| zone.kind().serves(gfp)) {
            return Err(InvalidRequest::GfpUnsupported("DMA32").into());
        }
        Ok(())
    }

    /// Refuses a request that no state of the allocator could serve: for nodes that it does not have, or for more blocks at once than
    /// its zones have above the request's watermarks.
    ///
    /// # Errors
    /// [`InvalidRequest::NoSuchNode`], [`InvalidRequest::MoreThanManaged`].
    #[cold]
    #[inline(never)]
    pub(crate) fn check_lack(&self, lack: Lack, gfp: Gfp) -> Result<(), Error> {
        let frames = lack.order.frames() as usize;
        let blocks_of = |zone: &Zone| {
            let kept = zone.marks().floor(gfp, Level::Min) as usize;
            zone.frames().saturating_sub(kept) / frames
        };
        let serve = || self.in_use().filter(|zone| zone.serves(lack));
        // A run lies in one zone.
        let most = if lack.is_run { serve().map(blocks_of).max().unwrap_or(0) } else { serve().map(blocks_of).sum() };
        if lack.blocks <= most {
            Ok(())
        } else if serve().next().is_some() {
            Err(InvalidRequest::MoreThanManaged { blocks: lack.blocks, order: lack.order.get(), most }.into())
        } else if self.had_memory_on(lack.nodes) {
            Ok(()) // All zones there are retired, or inherited from the parent: the request is short, not invalid.
        } else {
            Err(InvalidRequest::NoSuchNode { nodes: lack.nodes.as_bits() }.into())
        }
    }

    /// The same, if need be after other threads have put down the frames that they move; at most 20 ms.
    pub(crate) fn has_enough_soon(&self, lack: Lack, context: &AllocContext<'_>) -> bool {
        let is_under_way = || self.all().iter().any(|zone| zone.has_frames_under_way(context.gfp));
        let turns = if context.gfp.contains(Gfp::NORETRY) { 0 } else { TURNS };
        (0..turns).take_while(|_| !self.has_enough(lack) && is_under_way()).for_each(let_others_on);
        self.has_enough(lack)
    }

    /// One block above the low watermarks, or above those that the flags reach down to; `may_start` as for
    /// [`wake`](reclaim::Reclaim::wake).
    fn try_levels(&self, context: &AllocContext<'_>, from: NodeId, may_start: bool) -> Option<Taken> {
        let has_marks = self.all().iter().any(|zone| zone.marks().low > 0);
        if has_marks && let Some(taken) = self.walk_for_one(context, from, Level::Low) {
            return Some(taken);
        }
        if has_marks {
            self.reclaim.wake(may_start);
        }
        self.walk_for_one(context, from, Level::Min)
    }

    /// Nothing is left above the low watermarks: wakes background reclaim. `may_start` as for [`wake`](reclaim::Reclaim::wake).
    pub(crate) fn note_low(&self, may_start: bool) {
        if self.all().iter().any(|zone| zone.marks().low > 0) {
            self.reclaim.wake(may_start);
        }
    }

    /// One block above the watermarks of a level.
    fn walk_for_one(&self, context: &AllocContext<'_>, from: NodeId, level: Level) -> Option<Taken> {
        let mut one = Batch::new();
        let zone = Walk::for_one(self, from, level).next(self, context, 1, None, &mut one)?;
        Some((zone, *one.as_pfns().first()?))
    }

    /// Rounds of direct reclaim, with another try after each.
    #[inline(never)]
    fn take_by_reclaim(&self, context: &AllocContext<'_>, from: NodeId) -> Option<Taken> {
        if !self.reclaim.has_shrinkers() {
            return None;
        }
        let rounds = if context.gfp.contains(Gfp::NORETRY) { 1 } else { ROUNDS };
        for _ in 0..rounds {
            if context.patience.is_over() {
                break;
            }
            let came = self.reclaim.direct(context.gfp, context.frames());
            // Freed pages may stand on lists, or in pageblocks of another mobility.
            if let Some(taken) = self.try_levels(context, from, false) {
                return Some(taken);
            }
            if came == 0 {
                break; // Only time can help now: the request waits in line.
            }
        }
        None
    }

    /// Whether a request that found nothing takes a seat in line. It does if it has a timeout, as long as shrinkers may still bring
    /// pages, or behind others that wait for the same memory.
    pub(crate) fn may_wait_in_line(&self, context: &AllocContext<'_>, lack: Lack) -> bool {
        let is_bounded =
            || !context.gfp.contains(Gfp::NORETRY) && (self.reclaim.has_shrinkers() || self.waits.has(lack));
        context.gfp.may_wait() && (context.is_endless() || is_bounded())
    }

    /// Waits in the line of `lack`, with the lists shut, and tries until `attempt` brings something or the wait ends.
    #[inline(never)]
    pub(crate) fn wait_in_line<T>(
        &self,
        context: &AllocContext<'_>,
        lack: Lack,
        attempt: &mut dyn FnMut() -> Option<T>,
    ) -> Option<T> {
        let rounds = if context.gfp.contains(Gfp::RETRY_MAYFAIL) { 4 * ROUNDS } else { ROUNDS };
        let _opens = OpensLists(self);
        let mut claim = Claim::new(self, lack);
        self.waits.wait(lack, &context.patience, (!context.is_endless()).then_some(rounds), |is_overtaken| {
            // The first attempt shuts the lists; later ones do the same for zones that were added meanwhile.
            self.settle_lists();
            let got = claim.attempt(is_overtaken, &mut *attempt);
            // No other request gets claimed frames, not even one that a shrinker waits for.
            if got.is_some() || claim.is_held() || !self.reclaim.has_shrinkers() {
                return got;
            }
            self.reclaim.direct(context.gfp, lack.frames());
            claim.attempt(false, &mut *attempt)
        })
    }

    /// The same for a task: returns to its executor between attempts. It calls no shrinker: after an attempt in vain it
    /// wakes background reclaim, which does (`Zones::balance`). It waits until `attempt` brings something or `cancel` is
    /// cancelled.
    pub(crate) async fn await_in_line<T>(
        &self,
        lack: Lack,
        cancel: Option<&Cancel>,
        mut attempt: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        let _opens = OpensLists(self);
        let mut claim = Claim::new(self, lack);
        let mut line = InLine::new(self.waits, lack, cancel);
        poll_fn(|context| {
            line.poll(context, |is_overtaken| {
                self.settle_lists();
                let got = claim.attempt(is_overtaken, &mut attempt);
                if got.is_none() {
                    self.reclaim.wake(true);
                }
                got
            })
        })
        .await
    }

    /// One page that another thread moves, once it has reached a list or the zone.
    #[inline(never)]
    fn take_from_others_hands(&self, context: &AllocContext<'_>, from: NodeId) -> Option<Taken> {
        if context.frames() > 1 || self.faults.get().is_some() {
            return None; // Single frames on the move make no block and no run; and an injected fault stays a fault.
        }
        let is_under_way = || self.all().iter().any(|zone| zone.has_frames_under_way(context.gfp));
        for turn in 0..TURNS {
            if !is_under_way() || context.patience.is_over() {
                return None;
            }
            let_others_on(turn);
            if let Some(taken) = self.try_levels(context, from, false) {
                return Some(taken);
            }
        }
        None
    }
}

/// Opens the lists when a wait ends, also where a shrinker unwinds.
struct OpensLists<'n>(&'n Zones);

impl Drop for OpensLists<'_> {
    fn drop(&mut self) {
        self.0.settle_lists();
    }
}

#[cfg(all(test, not(any(miri, shuttle))))]
mod tests {
    use crate::context::AllocContext;
    use crate::{Allocator, Gfp, NodeId, Order, Shrink, Shrinker};
    use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
    use std::sync::Arc;

    /// Counts its calls, and frees nothing.
    #[derive(Default)]
    struct Calls(AtomicUsize);

    impl Shrinker for Calls {
        fn shrink(&self, _: Shrink) -> usize {
            self.0.fetch_add(1, Relaxed);
            0
        }
    }

    #[test]
    fn a_waiting_request_takes_free_memory_before_it_shrinks_a_cache() {
        let allocator = Allocator::builder().pages(64).build().unwrap();
        let calls = Arc::new(Calls::default());
        let registered = allocator.register_shrinker(calls.clone());
        let zones = allocator.zones();
        let context = AllocContext::plain(zones, Gfp::KERNEL, Order::ZERO);
        let lack = context.lack(NodeId::ZERO, 1);
        let mut left = 0;
        for (tries, shrinks) in [(1, 0), (2, 1), (3, 1), (4, 2)] {
            left = tries;
            let mut attempt = || {
                left -= 1;
                (left == 0).then_some(())
            };
            let before = calls.0.load(Relaxed);
            assert_eq!(zones.wait_in_line(&context, lack, &mut attempt), Some(()));
            assert_eq!(calls.0.load(Relaxed) - before, shrinks, "{tries} attempts");
        }
        assert_eq!(left, 0);
        drop(registered);
    }
}
