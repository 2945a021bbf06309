//! The slow path: zone by zone down to the marks, then reclaim, then waiting (C3.6).
//!
//! [`Zones::take_one`] does this for one block, as far as the request's flags and its [`Effort`] go. A request that may wait
//! skips the first two steps where another one waits that lacks the same.
//!
//! 1. Every zone above its low mark, then down to the mark that the flags reach; lists are drained on the way.
//! 2. Shrinkers, and another try after each round.
//! 3. A seat in line (`wait.rs`), if the request says how long it waits, a shrinker is registered, or others wait for the same.
//!    There it may come to a claim (`claim.rs`).
//! 4. Else, for a single page, some milliseconds as long as other threads have frames in their hands.
//!
//! Cold and out of line as a whole. A bulk request comes here for one block at a time, when nothing is left in bulk. One that
//! must have several blocks takes its seat itself, with nothing in hand (`Allocator::all_or_wait` in `bulk/engine.rs`): for all
//! of its blocks, by [`Zones::wait_in_line`].
use crate::claim::Claim;
use crate::context::{AllocContext, Effort};
use crate::error::{Error, InvalidRequest};
use crate::reclaim;
use crate::shared::Lack;
use crate::wait::Cancel;
use crate::walk::BulkWalk;
use crate::zone::Zone;
use crate::zones::Zones;
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::{Exhausted, Gfp, Level, NodeId, Order, Why, step};
use pagemill_os::Batch;

/// Rounds of reclaim before a request takes a seat in line, whatever shrinkers say that they freed; and rounds there before it
/// gives up. As many as the kernel's `MAX_RECLAIM_RETRIES`.
const ROUNDS: u32 = 16;
/// How often a request looks again while other threads have frames in their hands, between a list and the zone: at once at
/// first, then every 50 us, 20 ms in all. In that time a thread that was preempted with frames in its hands runs again.
const TURNS: u32 = 400;
const AT_ONCE: u32 = 32;

fn let_others_on(turn: u32) {
    if turn < AT_ONCE {
        std::thread::yield_now();
    } else {
        std::thread::sleep(core::time::Duration::from_micros(50));
    }
}

/// A block, and the arena it is of.
pub(crate) type Taken = (&'static Zone, u32);

impl Zones {
    /// The address of one page, for a request that its CPU's list could not serve.
    #[cold]
    #[inline(never)]
    pub(crate) fn alloc_page_slow(&self, gfp: Gfp) -> Result<usize, Error> {
        step!("Zones::alloc_page_slow");
        self.alloc_block(&AllocContext::plain(self, gfp, Order::ZERO))
    }

    /// The address of one block.
    pub(crate) fn alloc_block(&self, context: &AllocContext<'_>) -> Result<usize, Error> {
        self.check(context.gfp)?;
        if context.gfp.contains(Gfp::ACCOUNT) {
            return Err(InvalidRequest::NoAccount.into());
        }
        if let Some((zone, pfn)) = self.take_one(context, context.first_node(self, 1))? {
            return Ok(zone.addr_of(pfn));
        }
        let why = self.why(context, Level::Min);
        self.count_shortfall(context, why);
        Err(Exhausted { wanted: 1, got: 0, order: context.order.get(), why }.into())
    }

    /// Why a request got no more (C3.4) than what lies above the marks of `level`. One that ends above the low marks neither
    /// reclaims nor waits.
    #[cold]
    pub(crate) fn why(&self, context: &AllocContext<'_>, level: Level) -> Why {
        let from = context.policy.first(self.node());
        let zones = || self.zonelist(from).iter().filter(|zone| context.allows(self, from, zone));
        let floor = |zone: &Zone| zone.marks.floor(context.gfp, level) as usize;
        let is_enough = |zone: &Zone| zone.buddy.free_frames() >= floor(zone) + context.order.frames() as usize;
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
        } else if zones().any(|zone| floor(zone) > 0 && zone.buddy.free_frames() > 0) {
            Why::BelowMark
        } else {
            Why::Exhausted
        }
    }

    /// Counts a request that came back short, in the zone that it would rather have had the rest of.
    #[cold]
    pub(crate) fn count_shortfall(&self, context: &AllocContext<'_>, why: Why) {
        let from = context.policy.first(self.node());
        let zones = self.zonelist(from);
        let wanted = zones.iter().find(|zone| context.allows(self, from, zone)).or(zones.first());
        wanted.copied().unwrap_or(self.first()).stats_here().shortfalls[why.index()].fetch_add(1, Relaxed);
    }

    /// One block by every means that the request's flags and effort allow, from node `from` on. Marked as handed out,
    /// zeroed if asked for.
    ///
    /// # Errors
    /// [`InvalidRequest::ReclaimInShrinker`]: a request that may reclaim, from inside a shrinker.
    /// [`InvalidRequest::MoreThanManaged`]: there is none, and never will be.
    pub(crate) fn take_one(&self, context: &AllocContext<'_>, from: NodeId) -> Result<Option<Taken>, Error> {
        step!("Zones::take_one");
        let lack = context.lack(from, 1);
        let may_wait = context.gfp.may_wait();
        if may_wait && reclaim::is_reclaiming() {
            return Err(InvalidRequest::ReclaimInShrinker.into());
        }
        // Another request that lacks the same came first. Requests that must have several blocks have looked already.
        let is_behind = may_wait && context.effort == Effort::Wait && self.waits.has(lack);
        if !is_behind && let Some(taken) = self.try_levels(context, from, may_wait) {
            return Ok(Some(taken));
        }
        self.check_lack(lack, context.gfp)?;
        if !may_wait || context.effort == Effort::Take {
            return Ok(None);
        }
        if !is_behind && let Some(taken) = self.take_by_reclaim(context, from) {
            return Ok(Some(taken));
        }
        let is_for_line = self.may_wait_in_line(context, lack);
        // It stands behind nobody any more, or may not wait there.
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

    /// Refuses what no state of the allocator could serve: nodes that it does not have, and more blocks at once than its zones
    /// have, less what their marks keep from the request.
    ///
    /// # Errors
    /// [`InvalidRequest::NoSuchNode`], [`InvalidRequest::MoreThanManaged`].
    #[cold]
    #[inline(never)]
    pub(crate) fn check_lack(&self, lack: Lack, gfp: Gfp) -> Result<(), Error> {
        let frames = lack.order.frames() as usize;
        let blocks_of = |zone: &Zone| {
            let kept = zone.marks.floor(gfp, Level::Min) as usize;
            zone.frames().saturating_sub(kept) / frames
        };
        let serve = || self.in_use().filter(|zone| zone.serves(lack));
        let most: usize = serve().map(blocks_of).sum();
        if lack.blocks <= most {
            Ok(())
        } else if serve().next().is_some() {
            Err(InvalidRequest::MoreThanManaged { blocks: lack.blocks, order: lack.order.get(), most }.into())
        } else if core::iter::successors(self.newest(), |zone| zone.older).any(|zone| lack.nodes.contains(zone.node)) {
            Ok(()) // All arenas there are retired, or a parent process's: the request is short, and not invalid.
        } else {
            Err(InvalidRequest::NoSuchNode { nodes: lack.nodes.as_bits() }.into())
        }
    }

    /// May there be enough now for a request that waits with this lack? Claimed frames count: it may be the claimant's.
    ///
    /// Called by frees with the lines held, perhaps in a signal handler, perhaps for the last page that was out. The arenas are
    /// there all the same: a request waits, which has a handle, and none leaves its line while the lines are held.
    pub(crate) fn is_hopeful(&self, lack: Lack) -> bool {
        self.may_have(lack, |zone| zone.marks.floor(lack.gfp(), Level::Min))
    }

    /// Are there so many frames free, above what `floor` says of each arena?
    fn may_have(&self, lack: Lack, floor: impl Fn(&Zone) -> u32) -> bool {
        let above = |zone: &&'static Zone| zone.buddy.free_frames().saturating_sub(floor(zone) as usize);
        let free: usize = self.all().iter().filter(|zone| zone.serves(lack)).map(above).sum();
        free >= lack.frames()
    }

    /// Is there enough for a request that is about to take several blocks, in lists too? If it tried without, it would have all
    /// free memory in hand for a moment before it gave that back, and others would find none.
    pub(crate) fn has_enough(&self, lack: Lack) -> bool {
        let has = || self.may_have(lack, |zone| zone.floor(lack.gfp(), Level::Min));
        lack.blocks == 1 || has() || (self.drain_all() > 0 && has())
    }

    /// The same, if need be when others have put down what is in their hands; that takes 20 ms at most.
    pub(crate) fn has_enough_soon(&self, lack: Lack, context: &AllocContext<'_>) -> bool {
        let is_under_way = || self.all().iter().any(|zone| zone.has_frames_under_way(context.gfp));
        let turns = if context.gfp.contains(Gfp::NORETRY) { 0 } else { TURNS };
        (0..turns).take_while(|_| !self.has_enough(lack) && is_under_way()).for_each(let_others_on);
        self.has_enough(lack)
    }

    /// What lies above the low marks, then what lies above those that the flags reach down to; `may_start` as for
    /// [`wake`](reclaim::Reclaim::wake).
    fn try_levels(&self, context: &AllocContext<'_>, from: NodeId, may_start: bool) -> Option<Taken> {
        let has_marks = self.all().iter().any(|zone| zone.marks.low > 0);
        if has_marks && let Some(taken) = self.walk_for_one(context, from, Level::Low) {
            return Some(taken);
        }
        if has_marks {
            self.reclaim.wake(may_start);
        }
        self.walk_for_one(context, from, Level::Min)
    }

    /// Nothing is left above the low marks: has the background thread look. `may_start` as for [`wake`](reclaim::Reclaim::wake).
    pub(crate) fn note_low(&self, may_start: bool) {
        if self.all().iter().any(|zone| zone.marks.low > 0) {
            self.reclaim.wake(may_start);
        }
    }

    /// One block above the marks of a level.
    fn walk_for_one(&self, context: &AllocContext<'_>, from: NodeId, level: Level) -> Option<Taken> {
        let mut one = Batch::new();
        let zone = BulkWalk::for_one(self, from, level).next(self, context, 1, None, &mut one)?;
        Some((zone, *one.as_slice().first()?))
    }

    /// Rounds of direct reclaim, each followed by another try.
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
            let came = self.reclaim.direct(context.gfp, context.order.frames() as usize);
            // What came back may stand on lists, or in blocks of another mobility.
            if let Some(taken) = self.try_levels(context, from, false) {
                return Some(taken);
            }
            if came == 0 {
                break; // Only time can help now, and that is spent in line.
            }
        }
        None
    }

    /// Does a request wait that found nothing? For as long as it says; else as long as shrinkers may still bring
    /// something, or behind others that lack the same.
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
        let has_shrinkers = self.reclaim.has_shrinkers();
        let _opens = OpensLists(self);
        let mut claim = Claim::new(self, lack);
        self.waits.wait(lack, &context.patience, (!context.is_endless()).then_some(rounds), |is_overtaken| {
            // The first attempt shuts them. Later ones look again, at arenas that came meanwhile.
            self.settle_lists();
            // What is claimed nobody else gets: not those either whom a shrinker may wait for.
            if has_shrinkers && !claim.is_held() {
                self.reclaim.direct(context.gfp, lack.blocks * lack.order.frames() as usize);
            }
            claim.attempt(is_overtaken, &mut *attempt)
        })
    }

    /// A page that another thread has in its hands, once that has reached a list or the zone.
    #[inline(never)]
    fn take_from_others_hands(&self, context: &AllocContext<'_>, from: NodeId) -> Option<Taken> {
        if context.order != Order::ZERO || self.faults.get().is_some() {
            return None; // Single frames under way make no block; and what is refused on purpose stays so.
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

/// Opens lists as a wait ends, also where a shrinker unwinds.
struct OpensLists<'n>(&'n Zones);

impl Drop for OpensLists<'_> {
    fn drop(&mut self) {
        self.0.settle_lists();
    }
}
