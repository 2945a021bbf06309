//! Collects pages for the list of this CPU, a batch at a time. `many.rs` uses it unless more than `ListPolicy::LARGE`
//! pages are left to free.
//!
//! Until `end` some page is in hand, so that the zone stays.
use super::batch::{FreeBatch, empty_while};
use crate::zone::Zone;
use pagemill_core::{Mobility, Order, Pfn};
use pagemill_os::lists::BulkCall;
use pagemill_os::{Batch, empty};

/// Pages of one zone and mobility on their way back to the list. Larger calls use [`Large`](super::large::Large).
pub(crate) struct Segment<const RAW: bool> {
    zone: &'static Zone,
    mobility: Mobility,
    /// Only one mobility was ever used in the zone, so every page of it is of this kind.
    is_of_one_kind: bool,
    pages: usize,
    is_counted: bool,
    batch: Batch,
}

impl<const RAW: bool> Segment<RAW> {
    /// For pages like the one that [`page_at`](super::one::page_at) found.
    #[inline(always)]
    pub(crate) fn new(zone: &'static Zone, mobility: Mobility) -> Self {
        let is_of_one_kind = !zone.buddy().is_mixed();
        Self { zone, mobility, is_of_one_kind, pages: 0, is_counted: false, batch: Batch::new() }
    }

    /// Of the last `n` pages in the batch, keeps those before the first page that is not out. Returns how many it kept.
    #[inline(always)]
    fn keep_sound(&mut self, n: usize) -> usize {
        let before = self.batch.len() - n;
        let sound = self.zone.mark_frames_free::<RAW>(&self.batch.as_pfns()[before..]);
        self.batch.truncate(before + sound);
        sound
    }

    /// Passes the batch on to the list, or to the zone.
    #[inline]
    fn flush(&mut self) {
        let zone = self.zone;
        self.pages += self.batch.len();
        if !zone.lists().push_n(self.mobility, &self.batch, 0..self.batch.len()) {
            zone.overflow(self.mobility, &self.batch);
        }
        self.batch.clear();
    }

    /// Counts the call in the statistics.
    #[inline]
    fn count(&mut self) {
        let pages = self.pages + self.batch.len();
        if pages > 1 && !core::mem::replace(&mut self.is_counted, true) {
            self.zone.lists().count_bulk(BulkCall::Free, pages);
        }
    }

    /// Counts the call and passes on the rest of the batch. These may be the zone's last pages: until they are passed
    /// on, some page is in hand, and afterwards nothing of the zone is touched. Returns the number of pages.
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
        let is_ours = self.is_of_one_kind || self.zone.buddy().mobility_of(pfn) == self.mobility;
        if !is_ours || !self.zone.mark_page_free::<RAW>(pfn) {
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
            // A full batch is passed on only when another page of this kind follows, so that a page stays in hand for
            // `end`.
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
