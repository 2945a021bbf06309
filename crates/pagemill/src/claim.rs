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
use pagemill_core::{Gfp, Order, PageblockId};
use std::time::{Duration, Instant};

/// A claim ends if nothing was added to it for this long. Its request then claims nothing for as long again.
const PATIENCE: Duration = Duration::from_secs(1);

/// The claim of one waiting request. It is held from the moment that the request was overtaken often.
#[derive(Debug)]
pub(crate) struct Claim<'n> {
    zones: &'n Zones,
    lack: Lack,
    is_held: bool,
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
        Self { zones, lack, is_held: false, stamp: Stamp::here(), best: 0, since: None, block: None }
    }

    pub(crate) fn is_held(&self) -> bool {
        self.is_held && !self.stamp.is_inherited()
    }

    /// Makes one attempt, which may use what is claimed. Before it, begins the claim if the request was overtaken
    /// often, or ends it if it makes no progress.
    pub(crate) fn attempt<T>(&mut self, is_overtaken: bool, attempt: impl FnOnce() -> Option<T>) -> Option<T> {
        let has_rested = self.since.is_none_or(|since| since.elapsed() >= PATIENCE);
        if self.is_held() && self.frames() > self.best {
            (self.best, self.since) = (self.frames(), Some(Instant::now()));
        } else if self.is_held() && has_rested {
            self.end();
        } else if !self.is_held() && is_overtaken && has_rested && !self.stamp.is_inherited() {
            self.begin();
        }
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

    /// The number of frames that are claimed and free now.
    fn frames(&self) -> usize {
        match self.block {
            Some((zone, _)) => zone.buddy().withheld_frames() as usize,
            None => self.zones.all().iter().map(|zone| zone.claimed_frames() as usize).sum(),
        }
    }

    fn begin(&mut self) {
        let claims = &self.zones.claims;
        // Acquire pairs with the Release in `end`: the previous claim has ended completely.
        if self.lack.order > Order::PAGEBLOCK || claims.is_held.compare_exchange(false, true, Acquire, Relaxed).is_err()
        {
            return;
        }
        (self.is_held, self.best, self.since) = (true, 0, Some(Instant::now()));
        if self.lack.is_one_block() {
            let last = self.block.take();
            let may = |zone: &&Zone| zone.serves(self.lack) && self.zones.allowed().contains(zone.node());
            let arenas = self.zones.all().iter().copied().filter(may);
            let from = |zone: &Zone| {
                last.filter(|(of, _)| core::ptr::eq(*of, zone)).map_or(PageblockId::FIRST, |(_, block)| block)
            };
            self.block =
                arenas.filter_map(|zone| Some((zone, zone.buddy().withhold(self.lack.order, from(zone))?))).next();
        } else {
            claims.nodes.store(self.lack.nodes.as_bits(), Relaxed);
            claims.is_dma32.store(self.lack.gfp().contains(Gfp::DMA32), Relaxed);
            let number = claims.wanted.load(Relaxed) >> NUMBER;
            claims.wanted.store(number << NUMBER | self.lack.frames() as u64, Release);
        }
    }

    fn end(&mut self) {
        (self.is_held, self.since) = (false, Some(Instant::now()));
        // With the next number, no frame of any zone is claimed.
        let next = (self.zones.claims.wanted.load(Relaxed) >> NUMBER) as u32;
        self.zones.claims.wanted.store(u64::from(next.wrapping_add(1)) << NUMBER, Relaxed);
        if let Some((zone, _)) = self.block {
            zone.buddy().end_withholding();
        }
        // Release pairs with the Acquire in `begin`.
        self.zones.claims.is_held.store(false, Release);
        self.zones.waits.note_freed(&|_| true);
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        if self.is_held() {
            self.end();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Claim;
    use crate::claims::{IS_CLAIMANT, NUMBER};
    use crate::context::AllocContext;
    use crate::{Allocator, Gfp, Memory, NodeId, NodeMask, Order};
    use core::sync::atomic::Ordering::Relaxed;
    use pagemill_core::Level;

    #[test]
    fn a_request_that_was_overtaken_claims_and_no_two_claims_share_a_number() {
        let allocator = Allocator::builder().pages(64).build().unwrap();
        let zones = allocator.zones();
        let claim = |order: u8, blocks: usize| {
            let order = Order::new(order).unwrap();
            Claim::new(zones, AllocContext::plain(zones, Gfp::KERNEL, order).lack(NodeId::ZERO, blocks))
        };
        for number in 0..3 {
            let mut claim = claim(0, 8);
            assert_eq!((claim.attempt(false, || None::<()>), claim.is_held()), (None, false));
            assert_eq!((claim.attempt(true, || None::<()>), claim.is_held()), (None, true));
            assert_eq!(zones.claims.wanted.load(Relaxed), number << NUMBER | 8);
        }
        // No pageblock can be withheld for a block that is larger than one.
        let mut claim = claim(10, 1);
        assert_eq!((claim.attempt(true, || None::<()>), claim.is_held()), (None, false));
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
        assert!(zone.buddy().withhold(Order::PAGEBLOCK, pagemill_core::PageblockId::FIRST).is_some());
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
            claim.begin();
            assert!(claim.is_held());
            // SAFETY: the child calls only functions that are allowed in the child of a multi-threaded program.
            match unsafe { libc::fork() } {
                0 => {
                    // SAFETY: the alarm ends a child that hangs.
                    unsafe { libc::alarm(600) };
                    let mut other = Claim::new(zones, pages(zones, 16));
                    other.begin();
                    let is_held = (claim.is_held(), other.is_held());
                    drop(claim);
                    let is_right = is_held == (false, true)
                        && zones.claims.is_held.load(Relaxed)
                        && zones.claims.wanted.load(Relaxed) as u32 == 16;
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
