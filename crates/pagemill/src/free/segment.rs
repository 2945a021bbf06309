//! Pages for the list of this CPU, a batch at a time.
use super::batch::{FreeBatch, empty_while};
use crate::zone::Zone;
use pagemill_core::{Mobility, Order, Pfn};
use pagemill_os::lists::BulkCall;
use pagemill_os::{Batch, empty};

/// Pages of one arena and mobility on their way back, collected to batches for the list. More than that is for are [`Large`](super::large::Large).
pub(crate) struct Segment<const RAW: bool> {
    zone: &'static Zone,
    mobility: Mobility,
    /// Only one mobility was ever used in the arena: what is in it is of this kind.
    is_of_one_kind: bool,
    pages: usize,
    is_counted: bool,
    batch: Batch,
}

impl<const RAW: bool> Segment<RAW> {
    /// Of pages like the one that [`page_at`](super::one::page_at) found.
    #[inline(always)]
    pub(crate) fn new(zone: &'static Zone, mobility: Mobility) -> Self {
        let is_of_one_kind = !zone.buddy.is_mixed();
        Self { zone, mobility, is_of_one_kind, pages: 0, is_counted: false, batch: Batch::new() }
    }

    /// Of the `n` pages that were put in the batch last, keeps those up to the first that is not out. Returns how many.
    #[inline(always)]
    fn keep_sound(&mut self, n: usize) -> usize {
        let before = self.batch.len() - n;
        let sound = self.zone.frames_come_back::<RAW>(&self.batch.as_pfns()[before..]);
        self.batch.truncate(before + sound);
        sound
    }

    /// Passes the batch on to the list, or to the zone.
    #[inline]
    fn flush(&mut self) {
        let zone = self.zone;
        self.pages += self.batch.len();
        if !zone.lists.push_n(self.mobility, &self.batch, 0..self.batch.len()) {
            zone.overflow(self.mobility, &self.batch);
        }
        self.batch.clear();
    }

    /// Counts the call.
    #[inline]
    fn count(&mut self) {
        let pages = self.pages + self.batch.len();
        if pages > 1 && !core::mem::replace(&mut self.is_counted, true) {
            self.zone.lists.count_bulk(BulkCall::Free, pages);
        }
    }

    /// Counts the call and passes on what is left. Those may be the allocator's last pages: nothing of it is touched
    /// after that, and until then some are in hand. Returns how many pages there were.
    #[inline]
    pub(crate) fn end(&mut self) -> usize {
        let pages = self.pages + self.batch.len();
        self.count();
        if !self.batch.is_empty() {
            self.flush();
        }
        pages
    }
}

impl<const RAW: bool> FreeBatch for Segment<RAW> {
    #[inline]
    fn zone(&self) -> &'static Zone {
        self.zone
    }

    #[inline]
    fn give(&mut self, pfn: Pfn) -> bool {
        let is_ours = self.is_of_one_kind || self.zone.buddy.mobility_of(pfn) == self.mobility;
        if !is_ours || !self.zone.comes_back::<RAW>(pfn) {
            return false;
        }
        if self.batch.room() == 0 {
            self.flush();
        }
        self.batch.push(pfn.as_u32());
        true
    }

    #[inline(always)]
    fn take_slots(&mut self, words: &mut [usize], mut at: usize, _: Option<Order>) -> usize {
        while at < words.len() {
            // A full batch is passed on when one more page is seen to be of this kind, not before: see `end`.
            let n = (words.len() - at).min(self.batch.room()).max(1);
            let chunk = &mut words[at..at + n];
            let taken = if self.batch.room() > 0 && self.is_of_one_kind && self.zone.push_pages(chunk, &mut self.batch)
            {
                let taken = self.keep_sound(n);
                empty(&mut chunk[..taken]);
                taken
            } else {
                empty_while(chunk, |word| self.give_at(word))
            };
            at += taken;
            if taken < n {
                break;
            }
        }
        at
    }
}
