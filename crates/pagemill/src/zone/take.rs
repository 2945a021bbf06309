//! From the buddy to a request: single frames, frames past the lists, blocks. Each is prepared for its owner (C3.9). A frame that has
//! an owner already is quarantined.
use super::body::Zone;
use super::free::finish;
use super::pageblock_frames::PageblockFrames;
use crate::misuse::misuse;
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::{FrameState, Gfp, Giving, Level, MisuseKind, Mobility, Order, Pfn, step};
use pagemill_os::{Batch, Frames};

impl Zone {
    /// Takes up to `left` blocks above the watermark, at most a batch, from the list or from pageblocks of the request's mobility, into
    /// `batch`, which is empty. Returns whether there may be more. `past_list` is what a request that goes past the lists has in hand.
    #[inline(always)] // One frame less on the stack of a signal handler.
    pub(crate) fn take_batch(
        &'static self,
        gfp: Gfp,
        order: Order,
        level: Level,
        left: usize,
        past_list: Option<&mut PageblockFrames>,
        batch: &mut Batch,
    ) -> bool {
        let want = left.min(Batch::CAPACITY);
        match past_list {
            _ if order > Order::ZERO => return self.take_batch_of_blocks(gfp, order, level, want, batch),
            Some(in_hand) => {
                if !in_hand.next_batch(self, gfp, level, left, batch) {
                    return false;
                }
            }
            None => {
                self.lists.pop_n(gfp.mobility(), want, batch);
                if batch.is_empty() && !self.refill(gfp, level, want, batch) {
                    return false;
                }
            }
        }
        if batch.is_empty() {
            // A refill put more on the list than it delivered, or another CPU passed pages on: look there before saying "exhausted".
            self.lists.pop_n(gfp.mobility(), want, batch);
            if batch.is_empty() && !self.take_from_depot(gfp.mobility(), want, 0, batch) {
                return false;
            }
        }
        self.prepare(batch, gfp);
        true
    }

    /// Takes one block above the watermark from a pageblock of another mobility, into `batch`. Returns whether there may be more.
    pub(crate) fn steal(&self, gfp: Gfp, order: Order, level: Level, batch: &mut Batch) -> bool {
        if self.shared.is_refused_by_fault(gfp) {
            return false;
        }
        let floor = self.floor(gfp, level);
        let stats = self.stats_here();
        let pfn = match order {
            Order::ZERO => self.buddy.steal(floor),
            _ => self.buddy.steal_block(order, floor),
        };
        let Some(pfn) = pfn else { return false };
        stats.steals.fetch_add(u64::from(order.frames()), Relaxed);
        if order > Order::ZERO {
            self.prepare_one_block(pfn, gfp, order).into_iter().for_each(|pfn| batch.push(pfn.as_u32()));
        } else {
            stats.direct_out.fetch_add(1, Relaxed);
            batch.push(pfn.as_u32());
            self.prepare(batch, gfp);
        }
        batch.is_empty() // It was quarantined: there may be others.
    }

    /// The usual case: no request waits, and memory above the low watermark serves this one. Returns the block's address.
    pub(crate) fn take_block_at_once(&self, gfp: Gfp, order: Order) -> Option<usize> {
        // The general path injects faults, once for each acquisition.
        if !gfp.is_plain() || self.shared.waits.is_awaited() || self.shared.faults.get().is_some() {
            return None;
        }
        let pfn = self.take_block(gfp, order, Level::Low)?;
        self.shut_lists_below_low();
        Some(self.addr_of(pfn))
    }

    /// A block above order 0 from a pageblock of the request's mobility, marked as handed out, and zeroed if the request says so.
    pub(crate) fn take_block(&self, gfp: Gfp, order: Order, level: Level) -> Option<Pfn> {
        if self.shared.is_refused_by_fault(gfp) {
            return None;
        }
        let floor = self.floor(gfp, level);
        loop {
            let withheld = self.take_withheld(gfp, order, floor);
            let pfn = withheld.or_else(|| self.buddy.alloc_block(order, gfp.mobility(), floor))?;
            // A block that is quarantined is gone: there may be others.
            if let Some(pfn) = self.prepare_one_block(pfn, gfp, order) {
                return Some(pfn);
            }
        }
    }

    /// Takes up to `want` blocks of an order below a pageblock's from pageblocks of the request's mobility into `batch`, which is empty
    /// and has room. They are marked as handed out, and zeroed if the request says so. False: a fault was injected.
    pub(crate) fn take_blocks(&self, gfp: Gfp, order: Order, level: Level, want: usize, batch: &mut Batch) -> bool {
        if self.shared.is_refused_by_fault(gfp) {
            return false;
        }
        let mut emit = |first: Pfn, mut blocks: u64| {
            while blocks != 0 {
                batch.push(first.as_u32() + blocks.trailing_zeros());
                blocks &= blocks - 1;
            }
        };
        self.buddy.take_blocks(order, want, gfp.mobility(), self.floor(gfp, level), &mut emit);
        let mut kept = 0;
        for at in 0..batch.len() {
            if let Some(pfn) = self.prepare_block(batch.as_pfns()[at], gfp, order) {
                batch.as_mut_slice()[kept] = pfn.as_u32();
                kept += 1;
            }
        }
        batch.truncate(kept);
        self.count_blocks_out(kept, order);
        true
    }

    /// Takes a run of `n` neighbouring pages above the watermark, from pageblocks of the request's mobility or, with `is_of_any`, of any.
    /// Adds the first one's number to `batch`. The pages are marked as handed out, and zeroed if the request says so. False: there are
    /// no others.
    #[cold]
    #[inline(never)] // The walk of a signal handler's request does not have its tables on the stack.
    pub(crate) fn take_run(&self, gfp: Gfp, n: usize, level: Level, is_of_any: bool, batch: &mut Batch) -> bool {
        if self.shared.is_refused_by_fault(gfp) {
            return false;
        }
        let floor = self.floor(gfp, level);
        let next = || match is_of_any {
            true => self.buddy.steal_run(n, floor),
            false => {
                let withheld = self.take_withheld_run(gfp, n, floor);
                withheld.or_else(|| self.buddy.take_run(n, gfp.mobility(), floor))
            }
        };
        // Some frames of a run may be quarantined: there may be another run.
        let Some(first) = core::iter::from_fn(next).find(|&first| self.prepare_run(first, n, gfp)) else {
            return false;
        };
        let stats = self.stats_here();
        stats.direct_out.fetch_add(n as u64, Relaxed);
        if is_of_any {
            stats.steals.fetch_add(n as u64, Relaxed);
        }
        batch.push(first.as_u32());
        true
    }

    /// Prepares a run's pages. If some have an owner, these are quarantined, and the others go back.
    fn prepare_run(&self, first: Pfn, n: usize, gfp: Gfp) -> bool {
        let pages = first.run(n as u32);
        if gfp.contains(Gfp::ZERO) {
            pages.clone().for_each(|pfn| self.zero_block(pfn, Order::ZERO));
        }
        if self.hand_out_run(first, n) {
            return true;
        }
        let mut giving = Giving::to(&self.buddy);
        pages.for_each(|pfn| if self.state(pfn).is_safe() { giving.give(pfn) } else { self.quarantine(pfn) });
        finish(self, &mut giving);
        false
    }

    fn prepare_one_block(&self, pfn: Pfn, gfp: Gfp, order: Order) -> Option<Pfn> {
        let pfn = self.prepare_block(pfn, gfp, order)?;
        self.count_blocks_out(1, order);
        Some(pfn)
    }

    fn count_blocks_out(&self, blocks: usize, order: Order) {
        let stats = self.stats_here();
        stats.blocks_out.fetch_add(blocks as u64, Relaxed);
        stats.block_pages_out.fetch_add(blocks as u64 * u64::from(order.frames()), Relaxed);
    }

    #[inline(always)]
    fn prepare_block(&self, pfn: Pfn, gfp: Gfp, order: Order) -> Option<Pfn> {
        if gfp.contains(Gfp::ZERO) {
            self.zero_block(pfn, order);
        }
        if let Err(double) = self.hand_out_block(pfn, order) {
            return self.quarantine_block(pfn, order, double);
        }
        Some(pfn)
    }

    /// Quarantines a block of which a frame has an owner. There is no block to hand out then.
    #[cold]
    #[inline(never)]
    fn quarantine_block(&self, pfn: Pfn, order: Order, double: Pfn) -> Option<Pfn> {
        if order >= Order::PAGEBLOCK {
            // Frames that have an owner can come back singly.
            let _ = self.buddy.split_block(pfn, order);
        }
        self.quarantine(double);
        pfn.run(order.frames()).filter(|&pfn| self.state(pfn).is_safe()).for_each(|pfn| self.put_aside(pfn));
        None
    }

    /// Prepares the frames of a batch for their new owner, each once (C3.9): zeroes them if the request says so, and marks those that
    /// were never handed out. A frame that has an owner already is quarantined and reported.
    #[inline(never)]
    pub(crate) fn prepare(&self, batch: &mut Batch, gfp: Gfp) {
        step!("Zone::prepare");
        if gfp.contains(Gfp::ZERO) {
            batch.as_pfns().iter().for_each(|&pfn| self.zero_block(pfn, Order::ZERO));
        }
        self.hand_out_batch(batch, |pfn| self.quarantine(pfn));
    }

    fn put_aside(&self, pfn: Pfn) {
        if self.state(pfn) != FrameState::QUARANTINED {
            self.set_state(pfn, FrameState::QUARANTINED);
            self.quarantined.fetch_add(1, Relaxed);
        }
    }

    /// Quarantines a frame that came from a list or from the buddy although it has an owner.
    #[cold]
    #[inline(never)]
    pub(crate) fn quarantine(&self, pfn: Pfn) {
        self.put_aside(pfn);
        let _ = self.refuse(misuse(MisuseKind::Quarantined, self.addr_of(pfn)));
    }

    pub(crate) fn take_from_zone<const ROOM: usize>(
        &self,
        bound: &pagemill_core::BoundBlock,
        want: usize,
        mobility: Mobility,
        floor: u32,
        batch: &mut Frames<ROOM>,
    ) -> usize {
        self.buddy.take(bound, want, mobility, floor, &mut |first: Pfn, mask| batch.push_bits(first.as_u32(), mask))
    }

    /// Takes a batch of blocks above order 0 (C3.11). Returns whether there may be more. Single blocks, whole pageblocks, and blocks of
    /// a withheld pageblock are taken one by one.
    fn take_batch_of_blocks(&self, gfp: Gfp, order: Order, level: Level, want: usize, batch: &mut Batch) -> bool {
        if want > 1 && order < Order::PAGEBLOCK && !self.take_blocks(gfp, order, level, want, batch) {
            return false;
        }
        while batch.len() < want {
            let Some(pfn) = self.take_block(gfp, order, level) else { return false };
            batch.push(pfn.as_u32());
        }
        true
    }
}
