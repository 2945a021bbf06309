//! Large requests go past the lists: they take the frames of a pageblock by one reservation.
use super::body::Zone;
use super::free::finish;
use super::states::FULL;
use crate::process::Stamp;
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::{FrameState, Gfp, Giving, Handful, Level};
use pagemill_os::Batch;

/// Frames that a large request took and has not delivered yet: at most a pageblock's, by one reservation, and never more than it still
/// lacks. The rest goes back when the request unwinds, or continues elsewhere.
#[derive(Debug)]
pub(crate) struct PageblockFrames {
    zone: Option<&'static Zone>,
    frames: Handful,
    /// The process in which they were taken: see [`adopt`](Self::adopt).
    stamp: Stamp,
}

impl PageblockFrames {
    pub(crate) const NONE: Self = Self { zone: None, frames: Handful::new(), stamp: Stamp::FIRST };

    /// Whether it has frames of this zone.
    fn is_of(&self, zone: &Zone) -> bool {
        self.zone.is_some_and(|of| core::ptr::eq(of, zone)) && !self.is_none()
    }

    /// Whether it has no frames.
    fn is_none(&self) -> bool {
        self.frames.is_empty()
    }

    /// Moves frames of this zone to `batch`, which is empty. If there are none, takes more above the watermark, `left` at most. They are
    /// not prepared. False: a fault was injected.
    pub(super) fn next_batch(
        &mut self,
        zone: &'static Zone,
        gfp: Gfp,
        level: Level,
        left: usize,
        batch: &mut Batch,
    ) -> bool {
        if !self.is_of(zone) {
            if zone.shared.is_refused_by_fault(gfp) {
                return false;
            }
            self.take(zone, left, gfp, level);
        }
        self.fill(zone, batch);
        zone.stats_here().direct_out.fetch_add(batch.len() as u64, Relaxed);
        true
    }

    fn take(&mut self, zone: &'static Zone, most: usize, gfp: Gfp, level: Level) {
        self.give_back();
        let list = zone.lists.list_here(gfp.mobility());
        let floor = zone.floor(gfp, level);
        self.frames = zone.buddy.take_handful(&list.bound, most, gfp.mobility(), floor);
        (self.zone, self.stamp) = (Some(zone), Stamp::here());
    }

    /// In the child of a fork (a callback may fork) frames without an owner count as handed out. These are this request's, and neither
    /// handed out nor free: this corrects the count and their states.
    fn adopt(&mut self, zone: &Zone) {
        if !self.stamp.renew() {
            return;
        }
        zone.stats_here().direct_in.fetch_add(self.frames.len() as u64, Relaxed);
        let mut frames = self.frames.clone();
        while FULL && let Some((first, mask)) = frames.next_word(64) {
            let bits = (0..64).filter(|bit| mask >> bit & 1 == 1);
            bits.for_each(|bit| zone.set_state(first.offset(bit), FrameState::SAFE));
        }
    }

    /// Moves whole words of frames to `batch`, which is empty.
    fn fill(&mut self, zone: &Zone, batch: &mut Batch) {
        self.adopt(zone);
        while let Some((first, mask)) = self.frames.next_word(batch.room()) {
            batch.push_bits(first.as_u32(), mask);
        }
    }

    /// Out of line, so that a large request does not have the tables on its stack.
    #[inline(never)]
    pub(crate) fn give_back(&mut self) {
        if let Some(zone) = self.zone.filter(|_| !self.is_none()) {
            self.adopt(zone);
            let mut giving = Giving::to(&zone.buddy);
            giving.give_handful(&mut self.frames);
            finish(zone, &mut giving);
        }
    }
}

impl Drop for PageblockFrames {
    #[inline(never)]
    fn drop(&mut self) {
        self.give_back();
    }
}
