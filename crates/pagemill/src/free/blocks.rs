//! Collects blocks of one order above 0 for the zone. Blocks in one word of the buddy's bits are freed with one
//! operation, and their counts are written once for all (C3.11). `many.rs` uses it; whole pageblocks are freed one by
//! one.
use super::batch::FreeBatch;
use crate::registry;
use crate::zone::{Zone, finish_with};
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::{Giving, Misuse, Order, Pfn};
use pagemill_os::lists::BulkCall;

/// Blocks of one zone and order on their way back.
pub(crate) struct Blocks<const RAW: bool> {
    zone: &'static Zone,
    order: Order,
    blocks: usize,
    giving: Giving<'static, 'static, 32>,
}

impl<const RAW: bool> Blocks<RAW> {
    /// For the zone of this address. None for an order that is not collected.
    #[inline]
    pub(crate) fn new(addr: usize, order: Order) -> Option<Self> {
        if order == Order::ZERO || order >= Order::PAGEBLOCK {
            return None;
        }
        let (zone, _) = registry::by_address(addr)?;
        Some(Self { zone, order, blocks: 0, giving: Giving::to(zone.buddy()).of_order(order) })
    }

    /// Counts the call and completes it. These may be the zone's last frames: afterwards nothing of the zone is touched. Returns the
    /// number of blocks freed. Blocks that another thread freed at the same moment do not count; for them `misused` is
    /// set.
    pub(crate) fn end(&mut self, misused: &mut Option<Misuse>) -> usize {
        let mut freed = self.blocks;
        if freed > 1 {
            self.zone.lists().count_bulk(BulkCall::Free, freed);
        }
        if freed > 0 {
            let zone = self.zone;
            let found = finish_with(zone, &mut self.giving, |given| {
                freed -= given.double_blocks;
                let stats = zone.stats_here();
                stats.blocks_in.fetch_add(freed as u64, Relaxed);
                stats.block_pages_in.fetch_add(given.frames as u64, Relaxed);
            });
            *misused = misused.or(found);
        }
        freed
    }
}

impl<const RAW: bool> FreeBatch for Blocks<RAW> {
    #[inline]
    fn zone(&self) -> &'static Zone {
        self.zone
    }

    #[inline]
    fn order(&self) -> Order {
        self.order
    }

    #[inline]
    fn give(&mut self, pfn: Pfn) -> bool {
        let is_out =
            if RAW { self.zone.take_up(pfn, self.order, false) } else { self.zone.take_back_block(pfn, self.order) };
        if is_out.is_ok() {
            self.giving.give_run(pfn, self.order.frames() as usize);
            self.blocks += 1;
        }
        is_out.is_ok()
    }
}

#[cfg(all(test, not(any(miri, shuttle))))]
mod tests {
    use super::*;
    use crate::free::large::Large;
    use crate::{Allocator, Gfp, Memory};
    use pagemill_core::{FrameState, Mobility};

    /// Plays two threads that free the same raw block at the same moment: both find it raw.
    #[test]
    fn a_block_that_two_threads_free_at_once_counts_once() {
        let allocator = Allocator::builder().memory(Memory::anonymous(1024)).cpus(1, || 0).build().unwrap();
        let free_twice = |order: u8, free: &dyn Fn(&'static Zone, usize) -> [usize; 2]| {
            let order = Order::new(order).unwrap();
            let addr = allocator.alloc_pages(Gfp::KERNEL, order).unwrap().into_raw().0.addr();
            let (zone, _) = registry::by_address(addr).unwrap();
            let freed = free(zone, addr);
            let stats = allocator.stats();
            (freed, stats.allocated - stats.freed, stats.misused)
        };
        for order in [1, 3, 6, 8] {
            let both = |zone: &'static Zone, addr| {
                let order = Order::new(order).unwrap();
                let collect = || {
                    let mut blocks = Blocks::<true>::new(addr, order).unwrap();
                    zone.set_state(zone.pfn_of(addr), FrameState::raw(order));
                    assert!(blocks.give_at(addr));
                    blocks
                };
                [collect(), collect()].map(|mut blocks| blocks.end(&mut None))
            };
            let before = allocator.stats().misused;
            assert_eq!(free_twice(order, &both), ([1, 0], 0, before + (1 << order)), "order {order}");
        }
        let both = |zone: &'static Zone, addr| {
            let collect = || {
                let mut pages = Large::<true>::new(zone, Mobility::Unmovable);
                zone.set_state(zone.pfn_of(addr), FrameState::raw(Order::ZERO));
                assert!(pages.give(zone.pfn_of(addr)));
                pages
            };
            [collect(), collect()].map(|mut pages| pages.end(&mut None))
        };
        let before = allocator.stats().misused;
        assert_eq!(free_twice(0, &both), ([1, 0], 0, before + 1), "pages");
    }
}
