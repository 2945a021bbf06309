//! Requests that must be refused: the error names the reason, and nothing changes (C10.1).
use crate::plan::Zones;
use crate::world::{Failure, World, demand};
use pagemill::{Block, BlockList, Bulk, Error, Gfp, Invalid, InvalidRequest, Order, Page, PageList, Run};

impl World {
    pub(crate) fn invalid(&mut self, which: usize) -> Result<(), Failure> {
        let allocator = &self.allocator;
        let mut slots: [Option<Page>; 4] = [const { None }; 4];
        let mut list = PageList::new();
        // The last request is valid if there is such memory.
        let kinds = if self.zones.as_ref().is_some_and(Zones::has_dma32) { 8 } else { 9 };
        let (error, is_right): (Result<(), Error>, fn(InvalidRequest) -> bool) = match which % kinds {
            0 => (allocator.alloc_pages_bulk_array(Bulk::up_to(5), &mut slots).map(drop), |why| {
                matches!(why, InvalidRequest::ArrayTooShort { slots: 4, count: 5 })
            }),
            1 => (allocator.alloc_pages_bulk_array(Bulk::at_least(3, 2), &mut slots).map(drop), |why| {
                matches!(why, InvalidRequest::AtLeastAboveUpTo { at_least: 3, up_to: 2 })
            }),
            2 => (
                allocator.alloc_pages_bulk_array_raw(Bulk::exact(5), &mut [core::ptr::null_mut(); 4]).map(drop),
                |why| matches!(why, InvalidRequest::ArrayTooShort { slots: 4, count: 5 }),
            ),
            3 => (allocator.alloc_pages_bulk_list(Bulk::up_to(usize::MAX), &mut list).map(drop), |why| {
                matches!(why, InvalidRequest::CountTooLarge { count: usize::MAX, .. })
            }),
            4 => (allocator.alloc_pages_bulk_callback::<Page>(Bulk::up_to(usize::MAX), drop).map(drop), |why| {
                matches!(why, InvalidRequest::CountTooLarge { count: usize::MAX, .. })
            }),
            5 => (allocator.alloc_page(Gfp::MOVABLE | Gfp::RECLAIMABLE).map(drop), |why| {
                matches!(why, InvalidRequest::Invalid(Invalid::GfpConflict(..)))
            }),
            6 => (allocator.alloc_pages(Gfp::NOWAIT | Gfp::NOFAIL, Order::PAGEBLOCK).map(drop), |why| {
                matches!(why, InvalidRequest::Invalid(Invalid::GfpConflict(..)))
            }),
            7 => (
                allocator
                    .alloc_pages_bulk_runs(Bulk::up_to(Bulk::COUNT_MAX + 1), &mut Vec::<Run<Block>>::new())
                    .map(drop),
                |why| matches!(why, InvalidRequest::CountTooLarge { .. }),
            ),
            _ => (
                allocator.alloc_pages_bulk_list(Bulk::up_to(1).gfp(Gfp::DMA32), &mut BlockList::new()).map(drop),
                |why| matches!(why, InvalidRequest::GfpUnsupported("DMA32")),
            ),
        };
        let is_refused = matches!(error, Err(Error::Invalid(why)) if is_right(why));
        demand!(is_refused, "invalid request {} came to {error:?}", which % kinds);
        demand!(slots.iter().all(Option::is_none) && list.is_empty(), "an invalid request brought something");
        Ok(())
    }
}
