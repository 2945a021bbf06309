//! The zone's side of claims (`claims.rs`): counts freed frames towards a claim, and keeps claimed frames from other requests.
use super::body::Zone;
use crate::claims::{IS_CLAIMANT, NUMBER};
use core::sync::atomic::Ordering::{Acquire, Relaxed};
use pagemill_core::{Gfp, Level, NodeMask, Order, Pfn};

impl Zone {
    /// Counts frames towards the claim, if there is one, before they are free: otherwise another request could take them first.
    #[inline]
    pub(crate) fn claim_freed(&self, frames: impl FnOnce() -> usize) {
        if self.shared.claims.wanted.load(Relaxed) as u32 > 0 {
            self.count_to_claim(frames());
        }
    }

    #[cold]
    #[inline(never)]
    fn count_to_claim(&self, n: usize) {
        let claims = &self.shared.claims;
        let share = |wanted: u64| u64::from(wanted as u32).min(n as u64);
        let may = || {
            let nodes = NodeMask::from_bits(claims.nodes.load(Relaxed)).and(self.shared.allowed());
            let gfp = if claims.is_dma32.load(Relaxed) { Gfp::KERNEL | Gfp::DMA32 } else { Gfp::KERNEL };
            nodes.contains(self.node) && self.kind.serves(gfp) && !self.is_retired()
        };
        let less = |wanted: u64| (share(wanted) > 0 && may()).then(|| wanted - share(wanted));
        // Acquire pairs with the Release in `begin`: the nodes are this claim's.
        let Ok(before) = claims.wanted.fetch_update(Acquire, Acquire, less) else { return };
        let (number, counted) = (before >> NUMBER, share(before));
        let add = |claimed: u64| match claimed >> NUMBER {
            same if same == number => Some(claimed + counted),
            of => ((number.wrapping_sub(of) as i32) > 0).then_some(number << NUMBER | counted),
        };
        let _ = self.claimed.fetch_update(Relaxed, Relaxed, add); // Refused: that claim has ended.
    }

    /// Frames of this zone that count towards the claim.
    pub(crate) fn claimed_frames(&self) -> u32 {
        let claimed = self.claimed.load(Relaxed);
        let is_its = || claimed >> NUMBER == self.shared.claims.wanted.load(Relaxed) >> NUMBER;
        if claimed as u32 > 0 && is_its() { claimed as u32 } else { 0 }
    }

    /// Frames that must stay when a request with these flags takes some: those below its watermark, and the claimed ones.
    pub(crate) fn floor(&self, gfp: Gfp, level: Level) -> u32 {
        let kept = self.marks.floor(gfp, level);
        match self.claimed_frames().saturating_add(self.buddy.withheld_frames()) {
            0 => kept,
            // Not in a signal handler, whose request may not wait, has no claim, and must not touch a thread-local variable.
            _ if gfp.may_wait() && IS_CLAIMANT.get() => kept,
            claimed => kept.saturating_add(claimed),
        }
    }

    /// Whether the pageblock that is withheld is this request's and has so many free frames.
    fn has_withheld(&self, gfp: Gfp, frames: usize) -> bool {
        gfp.may_wait() && self.buddy.withheld_frames() as usize >= frames && IS_CLAIMANT.get()
    }

    /// A block of the pageblock that is withheld for this request.
    pub(crate) fn take_withheld(&self, gfp: Gfp, order: Order, floor: u32) -> Option<Pfn> {
        let is_for_this = self.has_withheld(gfp, order.frames() as usize);
        if is_for_this { self.buddy.take_withheld(order, gfp.mobility(), floor) } else { None }
    }

    /// A run of `n` frames of the pageblock that is withheld for this request.
    pub(super) fn take_withheld_run(&self, gfp: Gfp, n: usize, floor: u32) -> Option<Pfn> {
        if self.has_withheld(gfp, n) { self.buddy.take_withheld_run(n, floor) } else { None }
    }
}
