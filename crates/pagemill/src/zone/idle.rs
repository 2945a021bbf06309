//! Giving free memory back to the system.
//!
//! Whole free pageblocks go back one at a time: taken from the buddy like a block of order 9, released, and returned with a mark that
//! the system has their memory (`pagemill-core/src/idle.rs`), so that they do not go twice. Requests miss one pageblock at most
//! meanwhile. The last pageblock of a zone may be shorter.
//!
//! The free pages of other pageblocks go back when the program asks for it, unless that would break up a huge page. They are taken
//! from the buddy as single frames, go in runs of [`RUN`] or more, and all return to the buddy. No mark says that they went: their
//! states are fresh again, and the system knows. Single pages of a retired zone go too.
//!
//! Memory that a device has registered stays (`pins.rs`).
use super::body::Zone;
use super::free::finish;
use core::iter;
use pagemill_core::{Giving, PAGE_SIZE, PAGEBLOCK_FRAMES, PageblockId, Pfn, Unused};
use pagemill_os::HUGE_PAGE_SIZE;

/// The shortest run of free pages that goes back from a pageblock with pages out: each run is a system call.
const RUN: usize = 16;

impl Zone {
    /// Has the system take back the memory of free pageblocks above the high watermark: all of it, or up to `most` pages; of a retired
    /// zone all that is free. Returns the pages.
    pub(crate) fn give_back(&self, which: Unused, most: usize) -> usize {
        if self.is_inherited() {
            return 0; // It would make a hole in the parent's memory.
        }
        let Some(_giving) = self.pins.giving_back() else { return 0 };
        if self.is_retired() {
            return self.give_back_unused(Unused::All, usize::MAX, 0) + self.give_back_parts(usize::MAX, 0, 1);
        }
        // How long single pages have been free is not known.
        let is_all = which == Unused::All;
        // The pages that stay must be committed: those that the system has already do not count as free.
        let high = self.marks.high;
        let committed = match is_all && self.is_counted_singly() && high > 0 {
            true => self.free_and_resident(),
            false => self.buddy.free_frames().saturating_sub(self.buddy.gone_frames()),
        };
        let most = most.min(committed.saturating_sub(high as usize));
        let given = self.give_back_unused(which, most, high);
        if is_all { given + self.give_back_parts(most - given, high, RUN) } else { given }
    }

    /// Whether less than a pageblock may go back. It may not from a page of 2 MiB, which the system would break up (or keep, if it is
    /// hugetlb), nor from a system page that is larger than Pagemill's.
    fn goes_in_parts(&self) -> bool {
        self.memory().page_bytes() == PAGE_SIZE && self.is_counted_singly()
    }

    /// Whether the system may have only parts of a pageblock, so that it must be asked for each page.
    fn is_counted_singly(&self) -> bool {
        self.memory().page_bytes() < HUGE_PAGE_SIZE && (self.is_retired() || !self.shared.huge_pages)
    }

    /// Free pages that the system has committed, by its own account, without runs that are too short to go back.
    fn free_and_resident(&self) -> usize {
        let mut from = PageblockId::FIRST;
        let parts = iter::from_fn(|| self.buddy.next_part(&mut from));
        parts.map(|part| runs(&pages_of(part.words()), RUN).map(|run| self.resident_of(run)).sum::<usize>()).sum()
    }

    /// Gives back entirely free pageblocks, up to `most` pages, as long as `floor` frames stay free.
    fn give_back_unused(&self, which: Unused, most: usize, floor: u32) -> usize {
        let (mut given, mut from) = (0, PageblockId::FIRST);
        let left = |given: usize| (most - given).min(PAGEBLOCK_FRAMES as usize) as u32;
        while let Some((first, frames)) = self.buddy.take_unused(&mut from, which, floor, left(given)) {
            let n = frames as usize;
            // Some pages may never have been committed, or have gone back before.
            let resident = if self.is_counted_singly() { self.resident(first, n) } else { n };
            let is_gone = self.release(first, n);
            if self.buddy.return_unused(first, is_gone).is_err() {
                unreachable!("{first} was taken a moment ago");
            }
            given += if is_gone { resident } else { 0 };
            self.shared.waits.note_memory();
        }
        given
    }

    /// Gives back free runs of `least` pages or more in other pageblocks, up to `most` pages, as long as `floor` frames stay free.
    fn give_back_parts(&self, most: usize, floor: u32, least: usize) -> usize {
        let (mut given, mut from, mut is_refused) = (0, PageblockId::FIRST, !self.goes_in_parts());
        while !is_refused
            && given < most
            && let Some(part) = self.buddy.next_part(&mut from)
        {
            // A page that is fresh and not resident was never committed, or went back before; one that is neither is swapped out.
            let may_go = |run: &[Pfn]| !self.are_fresh(run[0], run.len()) || self.resident_of(run) > 0;
            let is_left_alone = part.is_unused || part.is_bound && !self.is_retired();
            if is_left_alone || !runs(&pages_of(part.words()), least).any(may_go) {
                continue;
            }
            let mut words = Vec::new();
            self.buddy.take_part(part.first, floor, &mut |first, mask| words.push((first, mask)));
            let pages = pages_of(words);
            let mut giving = Giving::to(&self.buddy);
            for run in runs(&pages, least) {
                // In pieces of at most the pages that are still wanted.
                for piece in run.chunks((most - given).max(1)).filter(|piece| may_go(piece)) {
                    let resident = self.resident_of(piece);
                    if resident <= most - given && !is_refused {
                        is_refused = !self.release(piece[0], piece.len());
                        given += if is_refused { 0 } else { resident };
                    }
                }
            }
            giving.give_slice(&pages);
            finish(self, &mut giving);
        }
        given
    }

    fn resident_of(&self, run: &[Pfn]) -> usize {
        self.resident(run[0], run.len())
    }
}

/// The frames of words with the bits set, each word with the frame of its bit 0.
fn pages_of(words: impl IntoIterator<Item = (Pfn, u64)>) -> Vec<Pfn> {
    let bits =
        |(first, mask): (Pfn, u64)| (0..64).filter(move |bit| mask >> bit & 1 == 1).map(move |bit| first.offset(bit));
    words.into_iter().flat_map(bits).collect()
}

/// Runs of neighbouring frames, `least` or more in each.
fn runs(pages: &[Pfn], least: usize) -> impl Iterator<Item = &[Pfn]> {
    pages.chunk_by(|one, next| next.since(*one) == 1).filter(move |run| run.len() >= least)
}
