//! Every way to free. A block is checked and recorded before it is freed: a moment later it may have a new owner.
use crate::array::addr_in;
use crate::op::Holes;
use crate::unit::{Holding, Unit};
use crate::world::{Failure, World, demand};
use core::ptr;
use pagemill::{Block, Order, Page, free_pages_bulk, free_pages_bulk_raw, free_raw};

impl World {
    pub(crate) fn free_one(&mut self, which: usize, is_drop: bool) -> Result<(), Failure> {
        match self.pick_any(which) {
            Some(holding) => self.free_holding(holding, is_drop),
            None => Ok(()),
        }
    }

    fn free_holding(&mut self, Holding { block, tag }: Holding, is_drop: bool) -> Result<(), Failure> {
        let (addr, order) = (block.addr(), block.order());
        self.give(addr, order, tag)?;
        let freed = match (is_drop, order) {
            (true, Order::ZERO) => {
                drop(Page::from_block(block));
                Ok(())
            }
            (true, _) => {
                drop(block);
                Ok(())
            }
            (false, Order::ZERO) => Page::from_block(block).free(),
            (false, _) => block.free(),
        };
        freed.map_err(|_| self.refused(addr))
    }

    /// Frees blocks of the order of which it holds most, the oldest first.
    pub(crate) fn free_oldest(&mut self, n: usize) -> Result<(), Failure> {
        let Some(held) = self.held_most() else { return Ok(()) };
        let n = n.min(held.len());
        let oldest: Vec<Holding> = held.drain(..n).collect();
        oldest.into_iter().try_for_each(|holding| self.free_holding(holding, true))
    }

    pub(crate) fn free_array<T: Unit>(&mut self, order: Order, n: usize, holes: Holes) -> Result<(), Failure> {
        // An array that is freed has its blocks where an array that is filled has its holes, because holes leave few blocks.
        let (mut slots, tags) = self.slots::<T>(order, n, |i| !holes.is_hole(i, n));
        let mut blocks = 0;
        for (addr, tag) in slots.iter().map(addr_in).zip(tags).filter(|(addr, _)| *addr != 0) {
            self.give(addr, order, tag)?;
            blocks += 1;
        }
        let freed = free_pages_bulk(&mut slots);
        demand!(freed == blocks, "{freed} of {blocks} blocks in an array were freed: one was owned twice");
        demand!(slots.iter().all(Option::is_none), "a freed array is not empty");
        Ok(())
    }

    pub(crate) fn free_raw(&mut self, which: usize) -> Result<(), Failure> {
        let Some(Holding { block, tag }) = self.pick_any(which) else { return Ok(()) };
        let (addr, order) = (block.addr(), block.order());
        self.give(addr, order, tag)?;
        let ptr = block.into_raw().0;
        // SAFETY: the world owned the block, and its handle is gone.
        unsafe { free_raw(ptr, order) }.map_err(|_| self.refused(addr))
    }

    pub(crate) fn free_array_raw(&mut self, order: Order, n: usize, holes: Holes) -> Result<(), Failure> {
        let (slots, tags) = self.slots::<Block>(order, n, |i| !holes.is_hole(i, n));
        let mut blocks = 0;
        for (addr, tag) in slots.iter().map(addr_in).zip(tags).filter(|(addr, _)| *addr != 0) {
            self.give(addr, order, tag)?;
            blocks += 1;
        }
        let raw = |slot: Option<Block>| slot.map_or(ptr::null_mut(), |block| block.into_raw().0);
        let mut slots: Vec<*mut u8> = slots.into_iter().map(raw).collect();
        // SAFETY: the world owned the blocks, and their handles are gone.
        match unsafe { free_pages_bulk_raw(&mut slots, order) } {
            Ok(freed) => demand!(freed == blocks, "{freed} of {blocks} blocks were freed by address"),
            Err((_, misuse)) => return Err(self.refused(misuse.addr)),
        }
        demand!(slots.iter().all(|slot| slot.is_null()), "a freed array of addresses is not empty");
        Ok(())
    }

    pub(crate) fn list_free<T: Unit>(&mut self, is_drop: bool) -> Result<(), Failure> {
        let mut hand = core::mem::take(T::hand(self));
        let order = hand.list.order();
        for &(addr, tag) in &hand.items {
            self.give(addr, order, tag)?;
        }
        if !is_drop {
            let freed = hand.list.clear();
            demand!(
                freed == hand.items.len(),
                "{freed} blocks of a list of {} were freed: one was owned twice",
                hand.items.len()
            );
            demand!(hand.list.is_empty(), "a cleared list has {}", hand.list.len());
        }
        drop(hand.list);
        Ok(())
    }

    pub(crate) fn run_free(&mut self, which: usize) -> Result<(), Failure> {
        if which.is_multiple_of(2) { self.run_free_of::<Page>(which / 2) } else { self.run_free_of::<Block>(which / 2) }
    }

    fn run_free_of<T: Unit>(&mut self, which: usize) -> Result<(), Failure> {
        let hand = T::runs(self);
        if hand.runs.is_empty() {
            return Ok(());
        }
        let at = which % hand.runs.len();
        let (run, (tag, order)) = (hand.runs.swap_remove(at), hand.tags.swap_remove(at));
        for block in 0..run.len() {
            self.give(run.addr() + block * order.bytes(), order, tag)?;
        }
        drop(run);
        Ok(())
    }

    /// Frees most of its holdings.
    pub(crate) fn free_most(&mut self) -> Result<(), Failure> {
        self.list_free::<Page>(true)?;
        self.list_free::<Block>(false)?;
        while !self.page_runs.runs.is_empty() {
            self.run_free_of::<Page>(0)?;
        }
        while !self.block_runs.runs.is_empty() {
            self.run_free_of::<Block>(0)?;
        }
        while let Some(n) = self.held_most().map(|held| held.len()).filter(|&n| n > 8) {
            self.free_oldest(n - n / 8)?;
        }
        Ok(())
    }

    pub(crate) fn free_all(&mut self) -> Result<(), Failure> {
        self.free_most()?;
        while self.held_most().is_some() {
            self.free_oldest(usize::MAX)?;
        }
        Ok(())
    }
}
