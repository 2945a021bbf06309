//! The claimant's part of a claim: a waiting request begins one when it was overtaken often, and ends it when it makes no progress.
//!
//! `claims.rs` explains claims. The slow path makes a [`Claim`] for each wait and runs the head's attempts through it
//! (`Zones::wait_in_line`). No lock: the flag `Claims::is_held` admits one claimant.
use crate::claims::{IS_CLAIMANT, NUMBER};
use crate::process::Stamp;
use crate::shared::Lack;
use crate::zone::Zone;
use crate::zones::Zones;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use pagemill_core::{Gfp, PageblockId};
use std::time::{Duration, Instant};

/// A claim ends if nothing was added to it for this long. Its request then claims nothing for as long again.
const PATIENCE: Duration = Duration::from_secs(1);
/// Any request that waits, or that may wait and would fail, ends a claim whose request made no attempt for this long. A head
/// that waits makes one every
/// `LOOK_AGAIN`, so the claimant is a task that is not polled, was leaked, or stands behind one that is polled again.
const IDLE: Duration = PATIENCE.saturating_mul(2);

/// The claim of one waiting request. It is held from the moment that the request was overtaken often.
#[derive(Debug)]
pub(crate) struct Claim<'n> {
    zones: &'n Zones,
    lack: Lack,
    /// Its number, from when it begins until it ends. It is not held any more if another request ended it.
    number: Option<u32>,
    /// The process of the request: a forked child does not hold its parent's claim.
    stamp: Stamp,
    /// The largest number of frames that the claim had so far.
    best: usize,
    /// The time when it reached that number, or when the claim last ended.
    since: Option<Instant>,
    /// The pageblock that is withheld, and its zone. After the claim has ended: the last one, so that the next claim
    /// takes another.
    block: Option<(&'static Zone, PageblockId)>,
}

impl<'n> Claim<'n> {
    /// A claim that is not held yet.
    pub(crate) fn new(zones: &'n Zones, lack: Lack) -> Self {
        Self { zones, lack, number: None, stamp: Stamp::here(), best: 0, since: None, block: None }
    }

    pub(crate) fn is_held(&self) -> bool {
        self.number.is_some_and(|number| number == self.zones.claims.number()) && !self.stamp.is_inherited()
    }

    /// Makes one attempt, which may use what is claimed. Before it, begins the claim if the request was overtaken
    /// often, or ends it if it makes no progress.
    pub(crate) fn attempt<T>(&mut self, is_overtaken: bool, attempt: impl FnOnce() -> Option<T>) -> Option<T> {
        self.look(is_overtaken, Instant::now());
        if !self.is_held() {
            return attempt();
        }
        struct Over;
        impl Drop for Over {
            fn drop(&mut self) {
                IS_CLAIMANT.set(false);
            }
        }
        IS_CLAIMANT.set(true);
        let _over = Over;
        attempt()
    }

    /// Begins or ends this claim, or ends the one of a request that makes no attempts.
    fn look(&mut self, is_overtaken: bool, now: Instant) {
        if self.stamp.is_inherited() {
            *self = Self::new(self.zones, self.lack); // A request that goes on in a forked child claims anew.
        }
        let has_rested = self.since.is_none_or(|since| now.saturating_duration_since(since) >= PATIENCE);
        if self.is_held() {
            self.zones.claims.note_attempt(now);
            if self.frames() > self.best {
                (self.best, self.since) = (self.frames(), Some(now));
            } else if has_rested {
                self.end(now);
            }
            return;
        }
        self.zones.end_idle_claim_at(now);
        if is_overtaken && has_rested {
            self.begin(now);
        }
    }

    /// The number of frames that are claimed and free now.
    fn frames(&self) -> usize {
        match self.block {
            Some((zone, _)) => zone.buddy().withheld_frames() as usize,
            None => self.zones.all().iter().map(|zone| zone.claimed_frames() as usize).sum(),
        }
    }

    fn begin(&mut self, now: Instant) {
        let claims = &self.zones.claims;
        // Acquire pairs with the Release in `end_claim`: the previous claim has ended completely.
        if self.lack.is_above_a_pageblock() || claims.is_held.compare_exchange(false, true, Acquire, Relaxed).is_err() {
            return;
        }
        let mut wanted = 0;
        if self.lack.is_one_piece() {
            let last = self.block.take();
            let may = |zone: &&Zone| zone.serves(self.lack) && self.zones.allowed().contains(zone.node());
            let arenas = self.zones.all().iter().copied().filter(may);
            let from = |zone: &Zone| {
                last.filter(|(of, _)| core::ptr::eq(*of, zone)).map_or(PageblockId::FIRST, |(_, block)| block)
            };
            let (frames, align) = (self.lack.frames() as u32, self.lack.order.frames());
            self.block =
                arenas.filter_map(|zone| Some((zone, zone.buddy().withhold(frames, align, from(zone))?))).next();
        } else {
            claims.nodes.store(self.lack.nodes.as_bits(), Relaxed);
            claims.is_dma32.store(self.lack.gfp().contains(Gfp::DMA32), Relaxed);
            wanted = self.lack.frames() as u64;
        }
        claims.note_attempt(now);
        let number = claims.number().wrapping_add(1);
        (self.number, self.best, self.since) = (Some(number), 0, Some(now));
        // From here on other requests may end it. Release pairs with the Acquires in `number` and `end_claim`.
        claims.wanted.store(u64::from(number) << NUMBER | wanted, Release);
    }

    fn end(&mut self, now: Instant) {
        self.since = Some(now);
        if let Some(number) = self.number.take() {
            self.zones.end_claim(number);
        }
    }
}

impl Zones {
    /// Ends the claim of a request that makes no attempts. A request that would fail, and background reclaim, do this too.
    /// Returns whether there was one.
    #[cold]
    pub(crate) fn end_idle_claim(&self) -> bool {
        self.claims.number() % 2 == 1 && self.end_idle_claim_at(Instant::now())
    }

    fn end_idle_claim_at(&self, now: Instant) -> bool {
        let idle = self.claims.idle_number(now, IDLE);
        idle.inspect(|number| self.end_claim(*number)).is_some()
    }

    /// Ends the claim with this number, unless it has ended already. Its request or another one may call this.
    fn end_claim(&self, number: u32) {
        // With the next number, no frame of any zone is claimed.
        let next = u64::from(number.wrapping_add(1)) << NUMBER;
        let is_its = |wanted: u64| ((wanted >> NUMBER) as u32 == number).then_some(next);
        // One caller succeeds (Q2). Acquire pairs with the Release in `begin`: the pageblock is withheld by now.
        if self.claims.wanted.fetch_update(Acquire, Relaxed, is_its).is_err() {
            return;
        }
        // One of them withholds a pageblock for the claim at most, maybe one that was retired meanwhile.
        core::iter::successors(self.newest(), |zone| zone.older()).for_each(|zone| zone.buddy().end_withholding());
        // Release pairs with the Acquire in `begin`.
        self.claims.is_held.store(false, Release);
        self.waits.note_freed(&|_| true);
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        if self.is_held() {
            self.end(Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Claim, IDLE};
    use crate::claims::{IS_CLAIMANT, NUMBER};
    use crate::context::AllocContext;
    use crate::{Allocator, Gfp, Memory, NodeId, NodeMask, Order};
    use core::sync::atomic::Ordering::Relaxed;
    use pagemill_core::Level;
    use std::time::{Duration, Instant};

    #[test]
    fn a_request_that_was_overtaken_claims_and_no_two_claims_share_a_number() {
        let allocator = Allocator::builder().pages(64).build().unwrap();
        let zones = allocator.zones();
        let claim = |order: u8, blocks: usize| {
            let order = Order::new(order).unwrap();
            Claim::new(zones, AllocContext::plain(zones, Gfp::KERNEL, order).lack(NodeId::ZERO, blocks))
        };
        for number in [1, 3, 5] {
            let mut claim = claim(0, 8);
            assert_eq!((claim.attempt(false, || None::<()>), claim.is_held()), (None, false));
            assert_eq!((claim.attempt(true, || None::<()>), claim.is_held()), (None, true));
            assert_eq!(zones.claims.wanted.load(Relaxed), number << NUMBER | 8);
        }
        // No pageblock can be withheld for a block that is larger than one.
        let mut claim = claim(10, 1);
        assert_eq!((claim.attempt(true, || None::<()>), claim.is_held()), (None, false));
    }

    /// A task that is not polled any more keeps no memory from the others.
    #[test]
    fn a_claim_whose_request_makes_no_attempts_is_ended_by_another_request() {
        let allocator = Allocator::builder().memory(Memory::anonymous(1024)).build().unwrap();
        let (zones, zone) = (allocator.zones(), allocator.zones().first());
        let claim = |order: u8, blocks: usize| {
            let order = Order::new(order).unwrap();
            Claim::new(zones, AllocContext::plain(zones, Gfp::KERNEL, order).lack(NodeId::ZERO, blocks))
        };
        for (round, order, blocks) in [(0, 0, 8), (1, 9, 1)] {
            let begun = Instant::now() + round * 8 * IDLE;
            let (mut idle, mut other) = (claim(order, blocks), claim(0, 4));
            idle.look(true, begun);
            assert_eq!(zone.buddy().withheld_frames() > 0, order > 0);
            // It makes attempts, and keeps its claim.
            idle.since = Some(begun + IDLE);
            idle.look(true, begun + IDLE);
            other.look(true, begun + IDLE);
            other.look(true, begun + 2 * IDLE - Duration::from_millis(1));
            assert!(idle.is_held() && !other.is_held());
            // It makes none.
            other.look(true, begun + 2 * IDLE);
            assert!(!idle.is_held() && other.is_held());
            assert_eq!((zone.buddy().withheld_frames(), zones.claims.wanted.load(Relaxed) as u32), (0, 4));
            // Its end takes no claim from the other, which has it now.
            drop(idle);
            assert!(other.is_held() && zones.claims.is_held.load(Relaxed));
            drop(other);
            assert!(!zones.claims.is_held.load(Relaxed));
        }
    }

    #[test]
    fn late_frees_do_not_count_towards_a_later_claim() {
        let allocator = Allocator::builder().pages(64).build().unwrap();
        let (zones, zone) = (allocator.zones(), allocator.zones().first());
        let claims = &zones.claims;
        claims.nodes.store(NodeMask::ALL.as_bits(), Relaxed);
        let begin = |number: u64, wanted: u64| claims.wanted.store(number << NUMBER | wanted, Relaxed);
        begin(1, 3);
        zone.claim_freed(|| 2);
        assert_eq!((zone.claimed_frames(), claims.wanted.load(Relaxed)), (2, 1 << NUMBER | 1));
        zone.claim_freed(|| 2);
        assert_eq!(zone.claimed_frames(), 3, "no more than the request lacks");
        // Frames that cannot serve the claim are not counted: memory above 4 GiB, on a node that is not allowed, or of
        // a retired zone.
        begin(1, 3);
        let counts = || {
            let before = claims.wanted.load(Relaxed);
            zone.claim_freed(|| 1);
            claims.wanted.load(Relaxed) != before
        };
        claims.is_dma32.store(true, Relaxed);
        assert!(!counts());
        claims.is_dma32.store(false, Relaxed);
        zone.set_retired(true);
        assert!(!counts());
        zone.set_retired(false);
        assert!(counts());
        // The claim ends. The next one begins with nothing, whatever was counted towards the last.
        begin(2, 0);
        assert_eq!(zone.claimed_frames(), 0);
        begin(2, 5);
        zone.claim_freed(|| 1);
        assert_eq!(zone.claimed_frames(), 1);
        // A free that read the second claim's number counts only after the third claim has frames.
        zone.claimed().store(3 << NUMBER | 4, Relaxed);
        begin(2, 5);
        zone.claim_freed(|| 1);
        begin(3, 0);
        assert_eq!(zone.claimed_frames(), 4);
        begin(0, 0);
        zone.claimed().store(0, Relaxed);
    }

    /// A request in a signal handler may interrupt the claimant.
    #[test]
    fn a_request_that_may_not_wait_takes_no_claimed_frames() {
        let allocator = Allocator::builder().memory(Memory::anonymous(1024)).build().unwrap();
        let (zones, zone) = (allocator.zones(), allocator.zones().first());
        zones.claims.wanted.store(1 << NUMBER, Relaxed);
        zone.claimed().store(1 << NUMBER | 3, Relaxed);
        assert!(zone.buddy().withhold(512, 512, pagemill_core::PageblockId::FIRST).is_some());
        IS_CLAIMANT.set(true);
        let floors = [Gfp::KERNEL, Gfp::NOWAIT].map(|gfp| zone.floor(gfp, Level::Min));
        let [late, own] = [Gfp::NOWAIT, Gfp::KERNEL].map(|gfp| zone.take_withheld(gfp, Order::PAGEBLOCK, 0));
        IS_CLAIMANT.set(false);
        assert_eq!((floors, late.is_some(), own.is_some()), ([0, 3 + 512], false, true));
        own.map(|pfn| zone.buddy().free_block(pfn, Order::PAGEBLOCK).unwrap());
    }

    #[cfg(not(any(miri, shuttle)))]
    mod beside_shrinkers {
        use crate::patience::{PATIENCE, until};
        use crate::zones::Zones;
        use crate::{Allocator, Bulk, Gfp, Memory, Page, PageList, Shrink, Shrinker};
        use core::sync::atomic::AtomicUsize;
        use core::sync::atomic::Ordering::Relaxed;
        use std::sync::Arc;

        /// Frees nothing, and counts its calls while something was claimed.
        struct Watch(&'static Zones, AtomicUsize);

        impl Shrinker for Watch {
            fn shrink(&self, _: Shrink) -> usize {
                self.1.fetch_add(usize::from(self.0.claims.is_held.load(Relaxed)), Relaxed);
                0
            }
        }

        /// The shrinker may wait for a thread that needs a page, and that thread cannot have a claimed one.
        #[test]
        fn no_shrinker_is_called_for_a_request_that_has_a_claim() {
            const PAGES: usize = 64;
            let allocator = Allocator::builder().memory(Memory::anonymous(PAGES)).cpus(1, || 0).build().unwrap();
            let watch = Arc::new(Watch(allocator.zones(), AtomicUsize::new(0)));
            let registered = allocator.register_shrinker(watch.clone());
            let mut pages: Vec<Page> = core::iter::from_fn(|| allocator.alloc_page(Gfp::NOWAIT).ok()).collect();
            std::thread::scope(|scope| {
                let waiter = scope.spawn(|| {
                    let mut all = PageList::new();
                    allocator.alloc_pages_bulk_list(Bulk::exact(PAGES).timeout(PATIENCE), &mut all).map(|_| all.len())
                });
                until("a waiter", || allocator.stats().waiting == 1);
                pages.truncate(PAGES / 2);
                until("a claim", || {
                    drop(allocator.alloc_page(Gfp::NOWAIT)); // This request overtakes the waiter.
                    watch.0.claims.is_held.load(Relaxed)
                });
                // From here on each attempt is made with the claim; there is at least one more.
                drop(pages);
                assert_eq!(waiter.join().unwrap().unwrap(), PAGES);
            });
            assert_eq!(watch.1.load(Relaxed), 0, "calls while something was claimed");
            drop(registered);
        }
    }

    #[cfg(not(any(miri, shuttle)))]
    mod in_a_child {
        use crate::claim::Claim;
        use crate::context::AllocContext;
        use crate::shared::Lack;
        use crate::zones::Zones;
        use crate::{Allocator, Gfp, Memory, NodeId, Order};
        use core::sync::atomic::Ordering::Relaxed;
        use std::time::Instant;

        fn pages(zones: &Zones, n: usize) -> Lack {
            AllocContext::plain(zones, Gfp::KERNEL, Order::ZERO).lack(NodeId::ZERO, n)
        }

        /// An attempt of the request forked, as a shrinker may. The request continues in the child too, where another
        /// request has a claim by now.
        #[test]
        fn a_parents_claim_is_not_held_in_the_child_and_ends_no_other() {
            let allocator = Allocator::builder().memory(Memory::anonymous(64)).build().unwrap();
            let zones = allocator.zones();
            let mut claim = Claim::new(zones, pages(zones, 8));
            claim.begin(Instant::now());
            assert!(claim.is_held());
            // SAFETY: the child calls only functions that are allowed in the child of a multi-threaded program.
            match unsafe { libc::fork() } {
                0 => {
                    // SAFETY: the alarm ends a child that hangs.
                    unsafe { libc::alarm(600) };
                    let mut other = Claim::new(zones, pages(zones, 16));
                    other.begin(Instant::now());
                    let is_held = (claim.is_held(), other.is_held());
                    // The request of the parent's claim may have a claim of its own, but not while another one has.
                    claim.look(true, Instant::now());
                    let is_other = zones.claims.is_held.load(Relaxed) && zones.claims.wanted.load(Relaxed) as u32 == 16;
                    drop(other);
                    claim.look(true, Instant::now());
                    let is_right = is_held == (false, true) && is_other && claim.is_held();
                    // SAFETY: ends the child without the parent's exit handlers.
                    unsafe { libc::_exit(i32::from(!is_right)) }
                }
                child => {
                    let mut status = 0;
                    // SAFETY: waits for the child forked above.
                    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
                    assert_eq!(status, 0, "the child takes its parent's claim for its own");
                }
            }
        }
    }
}
