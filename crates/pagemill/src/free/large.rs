//! Frees more pages at once than a list should take: they go past the lists to the zone (C3.1).
//!
//! `many.rs` uses it for calls above `ListPolicy::LARGE` pages. Neighbouring pages go to the buddy as they come, many
//! with one bit operation. Scattered pages are sorted by place first if there are enough of them: in random order over
//! gigabytes, each page would touch a word of bits and a count of its own, which costs 40 ns.
use super::batch::{FreeBatch, address_run};
use crate::zone::{Zone, finish_with};
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::{Giving, Misuse, Mobility, Order, PAGE_SIZE, Pfn};
use pagemill_os::lists::BulkCall;
use pagemill_os::{Batch, empty};

/// The number of words, of 64 frames each, that are collected before they are written.
const WORDS: usize = 256;

/// Pages of one zone and mobility on their way back to the zone.
pub(crate) struct Large<const RAW: bool> {
    zone: &'static Zone,
    mobility: Mobility,
    /// As for [`Segment`](super::segment::Segment).
    is_of_one_kind: bool,
    pages: usize,
    giving: Giving<'static, 'static, WORDS>,
}

impl<const RAW: bool> Large<RAW> {
    #[inline]
    pub(crate) fn new(zone: &'static Zone, mobility: Mobility) -> Self {
        let buddy = &zone.buddy();
        Self { zone, mobility, is_of_one_kind: !buddy.is_mixed(), pages: 0, giving: Giving::many_to(buddy) }
    }

    /// Takes the `n` neighbouring pages from address `addr` on, if all of them are of this kind.
    #[inline]
    fn give_run_at(&mut self, addr: usize, n: usize) -> bool {
        addr.is_multiple_of(PAGE_SIZE)
            && self.zone.contains(addr)
            && self.zone.contains(addr + (n - 1) * PAGE_SIZE)
            && self.give_run(self.zone.pfn_of(addr), n)
    }

    /// Takes neighbouring frames of the zone, a batch at most, if all of them are pages of this kind that are out.
    fn give_run(&mut self, first: Pfn, n: usize) -> bool {
        let is_out = self.is_of_this_kind(first)
            && self.is_of_this_kind(first.offset(n as u32 - 1))
            && self.zone.mark_run_free::<RAW>(first, n);
        if is_out {
            self.giving.give_run(first, n);
            self.pages += n;
        }
        is_out
    }

    fn is_of_this_kind(&self, pfn: Pfn) -> bool {
        self.is_of_one_kind || self.zone.buddy().mobility_of(pfn) == self.mobility
    }

    /// Marks the page with this word as free and returns its number; none if it is not a page of this kind that is out.
    #[inline]
    fn take_back(&self, word: usize) -> Option<Pfn> {
        let is_here = word.is_multiple_of(PAGE_SIZE) && self.zone.contains(word);
        let pfn = self.zone.pfn_of(word);
        (is_here && self.is_of_this_kind(pfn) && self.zone.mark_page_free::<RAW>(pfn)).then_some(pfn)
    }

    /// Gives the frames in the slots to the zone. Their numbers are between `low` and `high`, and they are marked as
    /// free already.
    fn give_scattered(&mut self, slots: &mut [usize], low: u32, high: u32) {
        let words = (high / 64 + 1).saturating_sub(low / 64) as usize;
        if words > WORDS && slots.len() >= 2 * words {
            sort_by_place(slots, low as usize / 64, words);
            slots.iter().for_each(|&slot| self.giving.give(Pfn::new((slot >> SORTED) as u32)));
        } else {
            slots.iter().for_each(|&slot| self.giving.give(Pfn::new(slot as u32)));
        }
        self.pages += slots.len();
    }

    /// Counts the call and completes it. These may be the zone's last pages: afterwards nothing of the zone is touched.
    /// Returns the number of pages freed. Pages that another thread freed at the same moment do not count; for them
    /// `misused` is set.
    pub(crate) fn end(&mut self, misused: &mut Option<Misuse>) -> usize {
        let zone = self.zone;
        if self.pages > 1 {
            zone.lists().count_bulk(BulkCall::Free, self.pages);
        }
        let mut freed = 0;
        let found = finish_with(zone, &mut self.giving, |given| {
            zone.stats_here().direct_in.fetch_add(given.frames as u64, Relaxed);
            freed = given.frames;
        });
        *misused = misused.or(found);
        freed
    }
}

impl<const RAW: bool> FreeBatch for Large<RAW> {
    #[inline]
    fn zone(&self) -> &'static Zone {
        self.zone
    }

    #[inline]
    fn give(&mut self, pfn: Pfn) -> bool {
        let is_out = self.is_of_this_kind(pfn) && self.zone.mark_page_free::<RAW>(pfn);
        if is_out {
            self.giving.give(pfn);
            self.pages += 1;
        }
        is_out
    }

    fn take_slots(&mut self, words: &mut [usize], from: usize, _: Option<Order>) -> usize {
        // Slots that are empty by now store the numbers of scattered pages, in `words[from..kept]`. So they can be
        // sorted without extra memory.
        let (mut at, mut kept) = (from, from);
        let (mut low, mut high) = (u32::MAX, 0);
        while at < words.len() {
            let n = address_run(&words[at..], Batch::CAPACITY);
            if n > 1 && self.give_run_at(words[at], n) {
                empty(&mut words[at..at + n]);
                at += n;
                continue;
            }
            if words[at] != 0 {
                let Some(pfn) = self.take_back(words[at]) else { break };
                words[at] = 0;
                words[kept] = pfn.as_usize();
                kept += 1;
                (low, high) = (low.min(pfn.as_u32()), high.max(pfn.as_u32()));
            }
            at += 1;
        }
        self.give_scattered(&mut words[from..kept], low, high);
        words[from..kept].fill(0);
        at
    }

    fn take_run(&mut self, mut addr: usize, end: usize, _: Order) -> usize {
        while addr < end {
            let n = ((end - addr) / PAGE_SIZE).min(Batch::CAPACITY);
            if self.give_run_at(addr, n) {
                addr += n * PAGE_SIZE;
            } else if self.give_at(addr) {
                addr += PAGE_SIZE;
            } else {
                break;
            }
        }
        addr
    }
}

/// The shift of the sorted frames: they are stored in the upper half of each slot.
const SORTED: u32 = u32::BITS;
/// The number of parts that frames are sorted into.
const PARTS: usize = 256;

/// Sorts frames roughly by place, so that the frames of [`WORDS`] words stand together. The lower half of each slot
/// holds an unsorted frame; the sorted ones are written to the upper halves. The frames lie in `words` words, from
/// number `low` on.
///
/// Sorting in place, where each frame that is moved displaces the next one to move, takes three times as long: each
/// step waits for the one before.
fn sort_by_place(slots: &mut [usize], low: usize, words: usize) {
    let shift = (words - 1).ilog2() + 1 - PARTS.ilog2();
    let part_of = |pfn: usize| ((pfn / 64 - low) >> shift) % PARTS;
    let mut next = [0; PARTS];
    slots.iter().for_each(|&pfn| next[part_of(pfn)] += 1);
    let mut sum = 0;
    for next in &mut next {
        sum += core::mem::replace(next, sum);
    }
    for i in 0..slots.len() {
        let pfn = slots[i] & u32::MAX as usize;
        let place = &mut next[part_of(pfn)];
        slots[*place] |= pfn << SORTED;
        *place += 1;
    }
}
