//! A stand-in, to be replaced: the pages of a service thread.
use std::sync::Arc;
use std::time::Duration;

use pagemill::{Allocator, Bulk, Cancel, Gfp, Page};

const SLOTS: usize = 259;

#[derive(Default)]
pub(crate) struct PageCounters;

pub(crate) struct Stopped;

pub(crate) struct PageArray {
    allocator: Allocator,
    slots: Box<[Option<Page>]>,
    consumed: usize,
}

impl PageArray {
    pub(crate) fn new(allocator: &Allocator, _counters: Arc<PageCounters>) -> Self {
        let slots = std::iter::repeat_with(|| None).take(SLOTS).collect();
        Self { allocator: allocator.clone(), slots, consumed: SLOTS }
    }
    /// Fills the holes of the slice that was consumed.
    pub(crate) fn refill(&mut self, stop: &Cancel) -> Result<(), Stopped> {
        let slots = &mut self.slots[..self.consumed];
        let mut occupied = if slots.iter().all(Option::is_some) { slots.len() } else { 0 };
        while occupied < slots.len() {
            if stop.is_cancelled() {
                return Err(Stopped);
            }
            let wanted = Bulk::up_to(slots.len()).gfp(Gfp::KERNEL).cancel(stop).timeout(Duration::from_secs(3600));
            if let Ok(filled) = self.allocator.alloc_pages_bulk_array(wanted, slots) {
                occupied = filled.occupied;
            }
        }
        self.consumed = 0;
        Ok(())
    }
    /// The first pages, enough for `bytes`.
    pub(crate) fn payload(&mut self, bytes: usize) -> &mut [Option<Page>] {
        let pages = bytes.div_ceil(4096);
        self.consumed = self.consumed.max(pages);
        &mut self.slots[..pages]
    }
}
