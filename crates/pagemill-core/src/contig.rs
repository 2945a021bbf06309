//! Runs of neighbouring frames in any number. A run may begin at any frame and cross the borders of pageblocks.
//!
//! A request first looks for a place, then takes it as a block is taken: it lowers the count of each pageblock that the run touches, and
//! then clears exactly the run's bits (I1). If another thread has some of these, everything goes back, and the request looks again.
//!
//! # Placement
//! The request looks from the last pageblock towards the first, since requests for pages and blocks look from the first one. Of the
//! first [`FITS`] free runs that are long enough it takes the shortest, and of that run the upper end. ADR 43 compares this with other
//! ways.
//!
//! # Locks
//! The lock for whole pageblocks: two requests for runs do not undo each other. Requests for pages and smaller blocks go on meanwhile.
use crate::area::{Entry, low_bits};
use crate::buddy::SWEEPS;
use crate::sync::Ordering::{AcqRel, Relaxed};
use crate::{Buddy, Mobility, PAGEBLOCK_FRAMES, PageblockId, Pfn, WordId};
use core::ops::Range;

/// The number of free runs that are compared. With more, the shortest is hardly shorter, and the search takes longer.
const FITS: usize = 64;
/// A search ends where a free run is longer than asked for by so many frames, 32 MiB: the rest of the buddy is hardly used.
const LONG: u32 = 16 * PAGEBLOCK_FRAMES;

impl Buddy<'_> {
    /// Takes `n` neighbouring frames of pageblocks of `mobility` or unused ones, if `floor` frames stay free. Returns the first. They are
    /// given back by [`Giving`](crate::Giving), together or singly.
    ///
    /// ```
    /// # use pagemill_core::{Giving, Mobility, Pfn, Buddy, BuddyMetadata, atomic::{AtomicU32, AtomicU64}};
    /// # let need = BuddyMetadata::for_frames(1024);
    /// # let bits: Vec<AtomicU64> = (0..need.words).map(|_| AtomicU64::new(0)).collect();
    /// # let areas: Vec<AtomicU32> = (0..need.areas).map(|_| AtomicU32::new(0)).collect();
    /// let buddy = Buddy::new(Pfn::new(0), 1024, &bits, &areas).unwrap();
    /// let run = || buddy.take_run(266, Mobility::Unmovable, 0);
    /// assert_eq!([run(), run(), run(), run()], [Some(Pfn::new(758)), Some(Pfn::new(492)), Some(Pfn::new(226)), None]);
    /// let mut giving = Giving::to(&buddy);
    /// giving.give_run(Pfn::new(492), 266);
    /// assert_eq!((giving.finish().frames, run()), (266, Some(Pfn::new(492))));
    /// ```
    pub fn take_run(&self, n: usize, mobility: Mobility, floor: u32) -> Option<Pfn> {
        self.alloc_run(n, Some(mobility), floor)
    }

    /// The same from pageblocks of any mobility.
    pub fn steal_run(&self, n: usize, floor: u32) -> Option<Pfn> {
        self.alloc_run(n, None, floor)
    }

    fn alloc_run(&self, n: usize, mobility: Option<Mobility>, floor: u32) -> Option<Pfn> {
        if n == 0 || n > self.free_frames().saturating_sub(floor as usize) {
            return None;
        }
        self.large.take(self.sleep);
        let found = self.find_run(n as u32, mobility, floor);
        self.large.release(self.sleep);
        found
    }

    /// Takes `n` neighbouring frames of the [withheld](Buddy::withhold) pageblock, if it has them and `floor` frames stay free.
    pub fn take_withheld_run(&self, n: usize, floor: u32) -> Option<Pfn> {
        let block = PageblockId::from_entry(self.withheld.load(Relaxed))?;
        if n == 0 || n > self.free_frames().saturating_sub(floor as usize) {
            return None;
        }
        let first = self.shortest_fit(block.as_usize()..block.as_usize() + 1, n as u32, |_, _| true)?;
        self.take_counted(first, n as u32, None, floor)?.then_some(first)
    }

    /// Takes frames and counts them, all or none. None if fewer than `floor` frames would stay free.
    ///
    /// The count falls only here, when a place is known: while it is low, other requests and waiting ones see too few free frames.
    fn take_counted(&self, first: Pfn, n: u32, mobility: Option<Mobility>, floor: u32) -> Option<bool> {
        let claim = self.claim(n as usize, floor)?;
        if claim.frames < n as usize {
            self.settle(claim, 0);
            return None;
        }
        let is_taken = self.take_frames(first, n, mobility);
        self.settle(claim, if is_taken { n as usize } else { 0 });
        Some(is_taken)
    }

    /// Finds and takes `n` frames. A place that is missed met a thread that made progress: the search goes on below it, and begins again
    /// a few times.
    fn find_run(&self, n: u32, mobility: Option<Mobility>, floor: u32) -> Option<Pfn> {
        let may = |block: PageblockId, entry: Entry| {
            let is_unused = entry.free() == self.frames_of(block);
            !self.is_withheld(block) && (is_unused || mobility.is_none_or(|mobility| mobility == entry.mobility()))
        };
        for _ in 0..SWEEPS {
            let mut blocks = self.areas.len();
            while let Some(first) = self.shortest_fit(0..blocks, n, may) {
                if self.take_counted(first, n, mobility, floor)? {
                    return Some(first);
                }
                blocks = self.block_of(first).as_usize();
            }
            if blocks == self.areas.len() {
                break; // There is none.
            }
        }
        None
    }

    /// The upper end of the shortest of the last [`FITS`] free runs of at least `n` frames in the pageblocks that `may` allows.
    fn shortest_fit(&self, blocks: Range<usize>, n: u32, may: impl Fn(PageblockId, Entry) -> bool) -> Option<Pfn> {
        let mut fits = Fits::new(n);
        for block in blocks.rev().map(PageblockId::new) {
            let entry = Entry(self.area(block).load(Relaxed));
            let start = block.as_u32() * PAGEBLOCK_FRAMES;
            if entry.free() == 0 || !may(block, entry) {
                continue;
            }
            if entry.free() == PAGEBLOCK_FRAMES {
                fits.add(start..start + PAGEBLOCK_FRAMES);
            } else {
                let words = self.words_of(block).iter().enumerate().rev();
                words.for_each(|(i, word)| fits.add_word(start + i as u32 * 64, word.load(Relaxed)));
            }
            if fits.are_enough() {
                break;
            }
        }
        fits.shortest().map(|first| self.start().offset(first))
    }

    /// Takes the `n` frames from `first` on, all or none. None, too, if a pageblock is of another mobility than `mobility`.
    fn take_frames(&self, first: Pfn, n: u32, mobility: Option<Mobility>) -> bool {
        let first = first.since(self.start());
        let blocks =
            || pieces(first, n, PAGEBLOCK_FRAMES).map(|(block, _, frames)| (PageblockId::new(block as usize), frames));
        let short = blocks().position(|(block, frames)| self.reserve(block, frames, frames, mobility) == 0);
        if let Some(short) = short {
            blocks().take(short).for_each(|(block, frames)| self.raise(block, frames));
            return false;
        }
        let words = || pieces(first, n, 64).map(|(word, from, frames)| (WordId::new(word), low_bits(frames) << from));
        let Some(missed) = words().position(|(word, mask)| !self.clear_bits(word, mask)) else { return true };
        words().take(missed).for_each(|(word, mask)| _ = self.set_bits(word, mask));
        blocks().for_each(|(block, frames)| self.raise(block, frames));
        false
    }

    /// Clears these bits of a word, all or none.
    fn clear_bits(&self, word: WordId, mask: u64) -> bool {
        let word = &self.bits[word.as_usize()];
        let mut bits = word.load(Relaxed);
        while bits & mask == mask {
            // AcqRel as in `take_from`.
            match word.compare_exchange_weak(bits, bits & !mask, AcqRel, Relaxed) {
                Ok(_) => return true,
                Err(now) => bits = now,
            }
        }
        false
    }
}

/// Cuts `n` numbers from `first` on at the multiples of `unit`: each piece's multiple, its first number from there, and its length.
fn pieces(first: u32, n: u32, unit: u32) -> impl Iterator<Item = (u32, u32, u32)> {
    let end = first + n;
    (first / unit..end.div_ceil(unit)).map(move |at| {
        let from = first.max(at * unit);
        (at, from - at * unit, (end - at * unit).min(unit) - (from - at * unit))
    })
}

/// The free runs that a search finds, from a buddy's last frame towards the first. Frames count from the buddy's first.
struct Fits {
    /// The length that a run must have.
    n: u32,
    /// The lowest run so far, which may go on below.
    start: u32,
    end: u32,
    /// The length of the shortest run above that one, and its end.
    shortest: Option<(u32, u32)>,
    /// How many runs above are long enough.
    found: usize,
}

impl Fits {
    fn new(n: u32) -> Self {
        Self { n, start: 0, end: 0, shortest: None, found: 0 }
    }

    fn are_enough(&self) -> bool {
        self.found >= FITS
            || self.shortest.is_some_and(|(len, _)| len == self.n)
            || self.end - self.start >= self.n.saturating_add(LONG)
    }

    /// Adds free frames that lie below all others.
    fn add(&mut self, free: Range<u32>) {
        if free.end != self.start {
            self.end_run();
            self.end = free.end;
        }
        self.start = free.start;
    }

    fn end_run(&mut self) {
        let len = self.end - self.start;
        if len >= self.n {
            self.found += 1;
            if self.shortest.is_none_or(|(shortest, _)| len < shortest) {
                self.shortest = Some((len, self.end));
            }
        }
    }

    /// Adds the free frames of a word whose bit 0 is frame `at`.
    fn add_word(&mut self, at: u32, bits: u64) {
        let (upper, lower) = (bits.leading_ones(), bits.trailing_ones());
        if upper > 0 {
            self.add(at + 64 - upper..at + 64);
        }
        let mut inner = bits & low_bits(64 - upper) & !low_bits(lower);
        // Usually no run inside of the word is long enough, and then none of them matters.
        if !has_run(inner, self.n) {
            inner = 0;
        }
        while inner != 0 {
            let end = 64 - inner.leading_zeros();
            let start = end - (inner << (64 - end)).leading_ones();
            self.add(at + start..at + end);
            inner &= low_bits(start);
        }
        if lower > 0 && upper < 64 {
            self.add(at..at + lower);
        }
    }

    /// The first of the upper `n` frames of the shortest run.
    fn shortest(mut self) -> Option<u32> {
        self.end_run();
        self.shortest.map(|(_, end)| end - self.n)
    }
}

/// Whether `n` neighbouring bits are set.
fn has_run(mut word: u64, n: u32) -> bool {
    let mut have = 1;
    while have < n && word != 0 {
        let more = have.min(n - have);
        word &= word >> more;
        have += more;
    }
    word != 0
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::sync::{AtomicU32, AtomicU64, Ordering::Release};
    use crate::{BuddyMetadata, Order, Sleep};
    use std::boxed::Box;
    use std::sync::OnceLock;
    use std::vec::Vec;

    /// The free runs of some words, one bit after the other, the last run first.
    fn runs(words: &[u64]) -> Vec<Range<u32>> {
        let mut runs: Vec<Range<u32>> = Vec::new();
        for at in (0..words.len() as u32 * 64).rev().filter(|at| words[(at / 64) as usize] >> (at % 64) & 1 == 1) {
            match runs.last_mut() {
                Some(run) if run.start == at + 1 => run.start = at,
                _ => runs.push(at..at + 1),
            }
        }
        runs
    }

    #[test]
    fn the_shortest_run_that_fits_is_found_in_any_words() {
        let mut random = 1u64;
        let mut next = || {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            random ^ random >> 33
        };
        for round in 0..if cfg!(miri) { 100 } else { 20_000 } {
            // Words with few and with many holes, and full and empty ones.
            let words: [u64; 4] = core::array::from_fn(|_| match next() >> 61 {
                0 => 0,
                1 | 2 => !0,
                3 | 4 => next() | next() | next() | next(),
                5 => !(1 << (next() >> 58)),
                _ => next() & next(),
            });
            let n = 1 + round % 150;
            let mut fits = Fits::new(n);
            (0..4).rev().for_each(|i| fits.add_word(i * 64, words[i as usize]));
            let fitting = runs(&words).into_iter().filter(|run| run.len() >= n as usize);
            let shortest = fitting.min_by_key(|run| run.len()).map(|run| run.end - n);
            assert_eq!(fits.shortest(), shortest, "{n} frames of {words:x?}");
        }
    }

    #[test]
    fn a_search_ends_with_an_exact_fit_with_many_fits_and_with_a_long_run() {
        let mut fits = Fits::new(10);
        fits.add(LONG..LONG + 11);
        fits.add(100..110);
        assert!(!fits.are_enough(), "the run may go on");
        fits.add(90..95);
        assert!(fits.are_enough());
        let mut fits = Fits::new(10);
        fits.add(10..LONG + 19);
        assert!(!fits.are_enough());
        fits.add(9..10);
        assert!(fits.are_enough());
        let mut fits = Fits::new(1);
        (0..=FITS as u32).rev().for_each(|i| {
            assert!(!fits.are_enough());
            fits.add(3 * i..3 * i + 2);
        });
        assert!(fits.are_enough());
    }

    #[test]
    fn pieces_are_cut_at_multiples() {
        assert_eq!(pieces(500, 600, 512).collect::<Vec<_>>(), [(0, 500, 12), (1, 0, 512), (2, 0, 76)]);
        assert_eq!(pieces(64, 64, 64).collect::<Vec<_>>(), [(1, 0, 64)]);
    }

    #[test]
    fn pieces_and_lengths_at_the_largest_number_do_not_overflow() {
        for unit in [64, PAGEBLOCK_FRAMES] {
            assert_eq!(pieces(u32::MAX - 70, 70, unit).map(|(.., frames)| frames).sum::<u32>(), 70);
        }
        assert!(!Fits::new(u32::MAX).are_enough());
    }

    /// A request for a run that will fail waits for the lock. Meanwhile a frame above the floor is served.
    #[test]
    fn a_run_that_is_looked_for_hides_no_free_frames() {
        static BUDDY: OnceLock<Buddy<'static>> = OnceLock::new();
        static SERVED: AtomicU32 = AtomicU32::new(0);
        const FRAMES: u32 = 1024;
        let sleep = Sleep {
            wait: |word, _| {
                let one = BUDDY.get().unwrap().alloc_block(Order::ZERO, Mobility::Unmovable, 12);
                SERVED.fetch_add(u32::from(one.is_some()), Relaxed);
                word.store(0, Release);
            },
            wake: |_| {},
        };
        let need = BuddyMetadata::for_frames(FRAMES);
        let bits: &'static [AtomicU64] =
            Box::leak((0..need.words).map(|_| AtomicU64::new(0)).collect::<Vec<_>>().into());
        let areas: &'static [AtomicU32] =
            Box::leak((0..need.areas).map(|_| AtomicU32::new(0)).collect::<Vec<_>>().into());
        let buddy = BUDDY.get_or_init(|| Buddy::new(Pfn::new(0), FRAMES, bits, areas).unwrap().sleeping(sleep));
        assert!(buddy.large.try_take());
        assert_eq!(buddy.take_run(1012, Mobility::Unmovable, 12), None, "one frame fewer is above the floor by now");
        assert_eq!(SERVED.load(Relaxed), 1);
    }
}
