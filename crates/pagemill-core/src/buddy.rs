//! The buddy: free frames in pageblocks, taken and given without a lock.
//!
//! It stands below the per-CPU lists and knows nothing above them: it hands out frame numbers. A pageblock has 512 bits and an entry;
//! the entry's count is a semaphore in front of the bits.
//!
//! # Invariants
//! - I1 To take n frames of a block, a thread first lowers the block's count by n and then clears n bits. To give n frames, it first
//!   sets n bits and then raises the count by n. So a block has at least as many set bits as its count plus all reservations under
//!   way, and a reservation always finds its bits.
//! - I2 A bit is cleared by one compare-and-swap that saw it set: no frame is taken twice.
//! - I3 A block that is handed out whole has count 0 and all its bits set: no thread can reserve from it, and a page of it that is
//!   given singly is seen as a double free.
//! - I4 At rest the count is the number of set bits, and the buddy's counter is the sum of the counts.
//! - I5 At rest a block with free frames stands in the index under its class, unless a CPU is bound to it.
//! # Progress
//! Order 0 uses compare-and-swap alone. Every loop that looks for bits that other threads move has bounded retries, so a signal
//! handler can interrupt anywhere (C2.5). Orders 1 to 8 do the same over more words, and undo. Order 9
//! claims one whole pageblock; if its first look finds none it takes the one lock, as orders above 9 always do, so that two requests
//! do not undo each other for ever. So do requests for runs of any length (`contig.rs`). No other operation takes the lock.
//!
//! # Placement
//! A CPU draws from the pageblock that is bound to it until that is empty. Then it binds the fullest one of the same mobility to which
//! no other CPU is bound (best fit). It breaks an unused pageblock only if there is none.
use crate::area::{Entry, low_bits, lowest};
use crate::error::Invalid;
use crate::handful::Handful;
use crate::index::{BlockIndex, Class, UNUSED};
use crate::lock::{Lock, Sleep};
use crate::map::FrameRange;
use crate::sync::{AtomicU32, AtomicU64, AtomicUsize, Ordering, latest_u32};
use crate::units::BLOCK_WORDS;
use crate::{Mobility, Order, PAGE_SIZE, PAGEBLOCK_FRAMES, PageCount, PageblockId, Pfn, WordId};
use Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use core::sync::atomic::AtomicBool;

/// Words of metadata that a buddy needs.
///
/// ```
/// use pagemill_core::BuddyMetadata;
/// let need = BuddyMetadata::for_frames(1 << 18);
/// // One bit a frame, an entry a pageblock, the index: 1.11 bits a frame at 1 GiB.
/// assert!(need.bits_per_frame(1 << 18) < 1.3);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BuddyMetadata {
    /// 64-bit words.
    pub words: usize,
    /// 32-bit entries.
    pub areas: usize,
}

impl BuddyMetadata {
    /// The metadata of a buddy with this many frames.
    pub const fn for_frames(frames: u32) -> Self {
        let blocks = frames.div_ceil(PAGEBLOCK_FRAMES) as usize;
        Self { words: blocks * BLOCK_WORDS + BlockIndex::words_for(blocks), areas: blocks }
    }
    /// The metadata of a buddy with holes, made by [`Buddy::over`]: one bit more for each frame of the span, by which misuse is seen.
    ///
    /// ```
    /// use pagemill_core::{BuddyMetadata, FrameRange, Pfn};
    /// let span = FrameRange::new(Pfn::new(0x100), 1 << 18)?; // a GiB from the second MiB on
    /// assert_eq!(BuddyMetadata::for_span(span).pages().get(), 18);
    /// # Ok::<(), pagemill_core::MapError>(())
    /// ```
    pub const fn for_span(span: FrameRange) -> Self {
        let (_, frames) = span.widened();
        let need = Self::for_frames(frames);
        Self { words: need.words + frames.div_ceil(64) as usize, areas: need.areas }
    }
    /// Its size in bytes: the words, and the entries behind them.
    pub const fn bytes(self) -> usize {
        self.words * 8 + self.areas * 4
    }
    /// The pages that it fills.
    pub const fn pages(self) -> PageCount {
        PageCount::new(self.bytes().div_ceil(PAGE_SIZE))
    }
    /// The same in bits a frame (C10.3: at most 2).
    pub fn bits_per_frame(self, frames: u32) -> f64 {
        (self.words * 64 + self.areas * 32) as f64 / f64::from(frames)
    }
}

/// The pageblock that a CPU draws from, for one mobility. It is a hint that belongs to one CPU's list: a race on it costs good
/// placement, never a frame.
///
/// ```
/// let bound = pagemill_core::BoundBlock::new(); // nothing bound yet
/// # let _ = bound;
/// ```
#[derive(Debug)]
#[repr(transparent)]
pub struct BoundBlock(AtomicU32);

impl BoundBlock {
    /// Bound to no pageblock; zeroed memory means the same.
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        Self(AtomicU32::new(0))
    }
    /// Bound to no pageblock.
    #[cfg(loom)]
    pub fn new() -> Self {
        Self(AtomicU32::new(0))
    }
    fn get(&self) -> Option<PageblockId> {
        PageblockId::from_entry(self.0.load(Relaxed))
    }
    /// Binds `block`. Returns the pageblock that was bound, which must be released once.
    fn replace(&self, block: Option<PageblockId>) -> Option<PageblockId> {
        PageblockId::from_entry(self.0.swap(block.map_or(0, PageblockId::as_entry), Relaxed))
    }
}

impl Default for BoundBlock {
    fn default() -> Self {
        Self::new()
    }
}

/// A buddy over metadata that the caller lends. The file `buddy.rs` begins with its theory. See also the example at the
/// [crate's root](crate).
#[derive(Debug)]
pub struct Buddy<'m> {
    start: Pfn,
    frames: u32,
    pub(crate) bits: &'m [AtomicU64],
    pub(crate) areas: &'m [AtomicU32],
    pub(crate) index: BlockIndex<'m>,
    /// A bit for each frame that is absent, if there may be any: see [`crate::holes`].
    pub(crate) absent: &'m [AtomicU64],
    /// How many are.
    pub(crate) absent_frames: AtomicU32,
    /// Free frames, changed once a section; [`CLOSED`] above them once it is closed.
    pub(crate) free: AtomicUsize,
    /// Held while a thread looks for whole pageblocks, or for a run.
    pub(crate) large: Lock,
    /// How threads that wait for the lock sleep.
    pub(crate) sleep: Sleep,
    /// The number of the pageblock that is [withheld](Buddy::withhold), plus one; 0 for none.
    pub(crate) withheld: AtomicU32,
    /// Notes of the parts that were ever used, if they are kept: see [`crate::used`].
    pub(crate) used: &'m [AtomicU32],
    /// The notes may not be touched any more.
    pub(crate) forgets_use: AtomicBool,
    /// Some pageblock was used for a mobility other than `Unmovable`.
    is_mixed: AtomicBool,
}

/// Added to the counter of free frames when the buddy is closed: more than any count, and less than a count that went below 0.
const CLOSED: usize = 1 << (usize::BITS - 2);

/// The frames that a request may take; see [`Buddy::claim`].
pub(crate) struct Claim {
    pub(crate) frames: usize,
    is_counted: bool,
}

/// Sweeps over a block's words for bits that a reservation is sure of but that move while it looks. A sweep that misses met a thread
/// that made progress; after so many sweeps the reservation is given back.
pub(crate) const SWEEPS: u32 = 4;

impl<'m> Buddy<'m> {
    /// A buddy of `frames` frames from `start`, all free. The metadata must be zero, and is written here for the first time.
    ///
    /// # Errors
    /// [`Invalid::Metadata`] for no frames, or where `words` or `areas` are fewer than
    /// [`BuddyMetadata::for_frames`] says.
    ///
    /// # Panics
    /// If `start` is not the first frame of a pageblock. Blocks are aligned to their size by their frames' numbers, so
    /// those must lie as the addresses do. If there are frames above [`FrameRange::MOST`](crate::FrameRange::MOST).
    pub fn new(start: Pfn, frames: u32, words: &'m [AtomicU64], areas: &'m [AtomicU32]) -> Result<Self, Invalid> {
        let mut buddy = Self::laid_out(start, frames, words, areas)?;
        buddy.free = AtomicUsize::new(frames as usize);
        for block in buddy.blocks() {
            let free = buddy.frames_of(block);
            for (i, word) in buddy.words_of(block).iter().enumerate() {
                word.store(low_bits(free.saturating_sub(i as u32 * 64)), Relaxed);
            }
            // The system commits a frame's memory only after the frame is taken.
            let entry = Entry::unused(free).with_mark(Entry::GONE);
            buddy.area(block).store(entry.0, Release);
            buddy.file(block, None, Class::of(entry, free));
        }
        Ok(buddy)
    }

    /// A buddy whose metadata is yet to be written, without a free frame.
    pub(crate) fn laid_out(
        start: Pfn,
        frames: u32,
        words: &'m [AtomicU64],
        areas: &'m [AtomicU32],
    ) -> Result<Self, Invalid> {
        let need = BuddyMetadata::for_frames(frames);
        let (Some(words), Some(areas)) = (words.get(..need.words), areas.get(..need.areas)) else {
            return Err(Self::too_little_metadata(frames, words));
        };
        if frames == 0 {
            return Err(Self::too_little_metadata(frames, words));
        }
        assert!(start.is_aligned_to(Order::PAGEBLOCK), "a buddy starts at {start}, which is not a multiple of 512");
        let is_below = FrameRange::new(start, frames).is_ok();
        assert!(is_below, "a buddy of {frames} frames from {start} ends above frame {}", FrameRange::MOST);
        let (bits, index) = words.split_at(need.areas * BLOCK_WORDS);
        Ok(Self {
            start,
            frames,
            bits,
            areas,
            index: BlockIndex::new(index, need.areas),
            absent: &[],
            absent_frames: AtomicU32::new(0),
            free: AtomicUsize::new(0),
            large: Lock::new(),
            sleep: Sleep::SPIN,
            withheld: AtomicU32::new(0),
            used: &[],
            forgets_use: AtomicBool::new(false),
            is_mixed: AtomicBool::new(false),
        })
    }

    pub(crate) fn too_little_metadata(frames: u32, words: &[AtomicU64]) -> Invalid {
        Invalid::Metadata { frames: frames as usize, most: words.len() / BLOCK_WORDS * 512 }
    }

    /// The same buddy. Requests for whole pageblocks wait for one another by `sleep`; otherwise they spin.
    pub fn sleeping(self, sleep: Sleep) -> Self {
        Self { sleep, ..self }
    }

    /// Its first frame.
    pub fn start(&self) -> Pfn {
        self.start
    }
    /// The number of its frames, without those that are absent.
    pub fn managed_frames(&self) -> u32 {
        self.frames - self.absent_frames.load(Relaxed)
    }
    /// The number of frames from its first to its last one, with those that are absent.
    pub fn spanned_frames(&self) -> u32 {
        self.frames
    }
    /// Its free frames, without those on lists. Exact at rest. A thread that sees all frames free also sees everything that was done
    /// to the buddy before.
    pub fn free_frames(&self) -> usize {
        // Acquire pairs with the Release in `add_free`. A take may be counted before the free that made it possible.
        let free = self.free.load(Acquire);
        if free > self.frames as usize { 0 } else { free }
    }
    /// The mobility of the pageblock that has `pfn`.
    #[inline]
    pub fn mobility_of(&self, pfn: Pfn) -> Mobility {
        Entry(self.area(self.block_of(pfn)).load(Relaxed)).mobility()
    }
    /// Whether any pageblock was ever used for a mobility other than `Unmovable`. If not, a free need not look at its page's pageblock.
    /// A thread that owns a page of such a pageblock sees it.
    #[inline]
    pub fn is_mixed(&self) -> bool {
        self.is_mixed.load(Relaxed)
    }
    /// Called before a pageblock becomes one of this mobility.
    pub(crate) fn note_kind(&self, mobility: Mobility) {
        if mobility != Mobility::Unmovable && !self.is_mixed() {
            self.is_mixed.store(true, Relaxed);
        }
    }

    // ── order 0 ────────────────────────────────────────────────────────────────────────────────────────────────

    /// Takes up to `want` frames from pageblocks of `mobility`, first from the bound one, as long as `floor` frames stay free. Hands
    /// each word that gives some to `emit`, as the frame of its bit 0 and the bits taken. Returns how many frames it took.
    pub fn take(
        &self,
        bound: &BoundBlock,
        want: usize,
        mobility: Mobility,
        floor: u32,
        emit: &mut impl FnMut(Pfn, u64),
    ) -> usize {
        step!("Buddy::take");
        self.draw(bound, want, false, mobility, floor, emit)
    }

    /// The same from one pageblock alone: fewer frames if it has fewer, none if no pageblock has any.
    pub fn take_handful(&self, bound: &BoundBlock, want: usize, mobility: Mobility, floor: u32) -> Handful {
        let mut handful = Handful::new();
        let want = want.min(PAGEBLOCK_FRAMES as usize);
        self.draw(bound, want, true, mobility, floor, &mut |first: Pfn, mask| handful.add(first, mask));
        handful
    }

    fn draw(
        &self,
        bound: &BoundBlock,
        want: usize,
        is_one_block: bool,
        mobility: Mobility,
        floor: u32,
        emit: &mut impl FnMut(Pfn, u64),
    ) -> usize {
        let Some(claim) = self.claim(want.min(self.frames as usize), floor) else { return 0 };
        let want = claim.frames as u32;
        let mut left = want;
        let is_enough = |left| left == 0 || is_one_block && left < want;
        // Each turn drains a block or finds none: a thread that frees into blocks all the time cannot hold this one up.
        for _ in 0..=self.areas.len() {
            if let Some(block) = bound.get() {
                left -= self.take_from(block, left, Some(mobility), emit);
                if is_enough(left) {
                    break;
                }
            }
            let next = self.bind(mobility);
            if let Some(done) = bound.replace(next) {
                self.release(done);
            }
            if next.is_none() {
                break;
            }
        }
        if !is_enough(left) {
            // Blocks that other CPUs are bound to, and blocks missing in the index: look at all of them before saying "exhausted".
            for block in self.blocks() {
                left -= self.take_from(block, left, Some(mobility), emit);
                if is_enough(left) {
                    break;
                }
            }
        }
        self.settle(claim, (want - left) as usize)
    }

    /// The frames that a request may take: all that it wants, or those above `floor`. With a floor the counter is lowered at once, so
    /// that of several requests that come down to a watermark none goes below it. Without a floor it is lowered afterwards: otherwise
    /// the buddy would look empty while a request still looks for its frames in vain.
    pub(crate) fn claim(&self, want: usize, floor: u32) -> Option<Claim> {
        if floor == 0 {
            // Frames are counted as free once they are free, and as taken at the latest when they are. If none is counted, a search of all
            // pageblocks could find only frames whose free has not been counted yet.
            return (self.free.load(Relaxed) != 0).then_some(Claim { frames: want, is_counted: false });
        }
        let mut free = self.free_frames();
        loop {
            let frames = want.min(free.saturating_sub(floor as usize));
            if frames == 0 {
                return None;
            }
            match self.free.compare_exchange_weak(free, free - frames, Relaxed, Relaxed) {
                Ok(_) => return Some(Claim { frames, is_counted: true }),
                Err(now) if now <= self.frames as usize => free = now,
                // More is taken than is counted yet: the same as no free frame.
                Err(_) => return None,
            }
        }
    }

    /// Counts the frames that a claim took in the end, and returns their number.
    pub(crate) fn settle(&self, claim: Claim, taken: usize) -> usize {
        if !claim.is_counted {
            self.free.fetch_sub(taken, Relaxed);
        } else if taken < claim.frames {
            self.add_free(claim.frames - taken);
        }
        taken
    }

    /// Takes one frame from a pageblock of any mobility, as long as `floor` frames stay free: the single attempt of C3.6 when the
    /// pageblocks of the request's own mobility are exhausted. It takes from the block with the most free frames, which it mixes least.
    pub fn steal(&self, floor: u32) -> Option<Pfn> {
        let claim = self.claim(1, floor)?;
        let taken = self.steal_one();
        self.settle(claim, usize::from(taken.is_some()));
        taken
    }

    fn steal_one(&self) -> Option<Pfn> {
        let free_of = |block: &PageblockId| Entry(self.area(*block).load(Relaxed)).free();
        let mut taken = None;
        for _ in 0..SWEEPS {
            let has_some = |block: &PageblockId| free_of(block) > 0 && !self.is_withheld(*block);
            let block = self.blocks().filter(has_some).max_by_key(free_of)?;
            let mut emit = |first: Pfn, mask: u64| taken = Some(first.offset(mask.trailing_zeros()));
            if self.take_from(block, 1, None, &mut emit) == 1 {
                return taken;
            }
        }
        None
    }

    /// Releases a bound block, when its CPU's list is drained.
    pub fn unbind(&self, bound: &BoundBlock) {
        if let Some(block) = bound.replace(None) {
            self.release(block);
        }
    }

    /// Puts a block that no CPU draws from any more into the index again.
    fn release(&self, block: PageblockId) {
        // SeqCst: see `file`.
        let before = Entry(self.area(block).fetch_and(Entry(!0).with_bound(false).0, SeqCst));
        if before.is_bound() {
            self.file(block, None, Class::of(before.with_bound(false), self.frames_of(block)));
        }
    }

    /// Binds the fullest block of `mobility` to which no CPU is bound.
    fn bind(&self, mobility: Mobility) -> Option<PageblockId> {
        step!("Buddy::bind");
        for class in Class::best_fit(mobility, 1).chain([UNUSED]) {
            let mut from = PageblockId::FIRST;
            while let Some(block) = self.index.next(class, from) {
                from = block.offset(1);
                let entry = Entry(self.area(block).load(Relaxed));
                let actual = Class::of(entry, self.frames_of(block));
                if actual != Some(class) {
                    self.file(block, Some(class), actual);
                    continue;
                }
                self.note_use(block);
                if self.area(block).compare_exchange(entry.0, entry.with_bound(true).0, SeqCst, Relaxed).is_ok() {
                    self.file(block, Some(class), None);
                    return Some(block);
                }
            }
        }
        None
    }

    /// Takes up to `want` frames of one block; none if it is of another mobility than `mobility`.
    pub(crate) fn take_from(
        &self,
        block: PageblockId,
        want: u32,
        mobility: Option<Mobility>,
        emit: &mut impl FnMut(Pfn, u64),
    ) -> u32 {
        step!("Buddy::take_from");
        if self.is_withheld(block) {
            return 0;
        }
        let reserved = self.reserve(block, 1, want, mobility);
        if reserved == 0 {
            return 0;
        }
        if reserved == PAGEBLOCK_FRAMES && self.take_whole(block, 1, |first| emit(first, !0)) {
            return reserved;
        }
        let mut left = reserved;
        for _ in 0..SWEEPS {
            for (i, word) in self.words_of(block).iter().enumerate() {
                let mut bits = word.load(Relaxed);
                while bits != 0 {
                    let mask = lowest(bits, left);
                    if cfg!(pagemill_canary) {
                        // The canary: a bug that stress and the model must find. It writes bits that it read a while ago.
                        word.store(bits & !mask, Release);
                    } else if let Err(now) = word.compare_exchange_weak(bits, bits & !mask, AcqRel, Relaxed) {
                        // Acquire pairs with the Release in `set_bits`: what the last owner wrote to the page, or
                        // its state, comes before what the next one does. Release keeps the chain for the word's
                        // other bits.
                        bits = now;
                        continue;
                    }
                    emit(self.first_of_word(block.first_word().offset(i)), mask);
                    left -= mask.count_ones();
                    break;
                }
                if left == 0 {
                    return reserved;
                }
            }
        }
        self.raise(block, left);
        reserved - left
    }

    /// Lowers a block's count by `least` to `most`: I1's first half. Returns by how many; 0 if it cannot.
    pub(crate) fn reserve(&self, block: PageblockId, least: u32, most: u32, mobility: Option<Mobility>) -> u32 {
        step!("Buddy::reserve");
        let frames = self.frames_of(block);
        let mut entry = Entry(self.area(block).load(Relaxed));
        loop {
            let is_unused = entry.free() == frames;
            let fits = is_unused || mobility.is_none_or(|mobility| mobility == entry.mobility());
            if entry.free() < least || !fits {
                return 0;
            }
            let n = entry.free().min(most);
            let mut next = entry.with_free(entry.free() - n);
            if is_unused {
                let mobility = mobility.unwrap_or(Mobility::Unmovable);
                self.note_use(block);
                self.note_kind(mobility);
                next = next.with_mobility(mobility);
            }
            // Acquires what the Release half in `raise` published: the bits that the count speaks of. SeqCst: see `file`.
            match self.area(block).compare_exchange_weak(entry.0, next.0, SeqCst, Relaxed) {
                Ok(_) => {
                    self.file(block, Class::of(entry, frames), Class::of(next, frames));
                    return n;
                }
                Err(now) => entry = Entry(now),
            }
        }
    }

    /// Takes all frames of a pageblock that this thread reserved whole, `span` words at a time.
    ///
    /// Its bits are all set, and no other thread changes one: to take a bit a thread must have reserved a frame, and all are reserved
    /// here (I1); to give one it must own it. So plain stores do where other paths compare and swap. False: its bits are not all set,
    /// so its count was wrong, and nothing is taken.
    pub(crate) fn take_whole(&self, block: PageblockId, span: usize, mut emit: impl FnMut(Pfn)) -> bool {
        let words = self.words_of(block);
        // `reserve` acquired what the last owners wrote.
        if words.iter().any(|word| word.load(Relaxed) != !0) {
            return false;
        }
        for (i, words) in words.chunks(span).enumerate() {
            words.iter().for_each(|word| word.store(0, Relaxed));
            emit(self.first_of_word(block.first_word().offset(i * span)));
        }
        true
    }

    /// Raises a block's count: I1's second half, once the bits are set.
    pub(crate) fn raise(&self, block: PageblockId, by: u32) {
        step!("Buddy::raise");
        let frames = self.frames_of(block);
        // SeqCst: Release for `reserve`, and see `file`.
        let before = Entry(self.area(block).fetch_add(by, SeqCst));
        let after = Entry(before.0 + by);
        self.file(block, Class::of(before, frames), Class::of(after, frames));
    }

    /// Sets bits of one word. Returns those that were set already, and those of absent frames: nobody could own these.
    pub(crate) fn set_bits(&self, word: WordId, mask: u64) -> u64 {
        step!("Buddy::set_bits");
        let absent = mask & self.absent_in(word);
        self.bits[word.as_usize()].fetch_or(mask & !absent, Release) & mask | absent
    }

    /// The absent frames of a word.
    #[inline]
    pub(crate) fn absent_in(&self, word: WordId) -> u64 {
        self.absent.get(word.as_usize()).map_or(0, |word| word.load(Relaxed))
    }

    /// Moves a block in the index after its entry changed.
    ///
    /// Two threads that change an entry one after the other may come here in the other order, and the first would leave the block
    /// where it no longer belongs. So each looks at the entry again when it is done (I5). Changes of entries and of the index, and
    /// this look, are SeqCst: the last thread in the index sees the entry as all others left it.
    pub(crate) fn file(&self, block: PageblockId, mut before: Option<Class>, mut after: Option<Class>) {
        while before != after {
            if let Some(class) = before {
                self.index.remove(class, block);
            }
            if let Some(class) = after {
                self.index.insert(class, block);
            }
            before = after;
            after = Class::of(Entry(latest_u32(self.area(block))), self.frames_of(block));
        }
    }

    /// Counts frames that were given back. Returns whether they completed a [closed](Self::close) buddy.
    ///
    /// Nothing of the buddy is read once the frames count: another thread may complete it then, and its memory may serve another one.
    pub(crate) fn add_free(&self, n: usize) -> bool {
        let whole = CLOSED + self.frames as usize;
        // Release pairs with the Acquire in `free_frames`. AcqRel: the thread that completes a closed buddy, here or in `close`, sees
        // everything that other threads did to it.
        let before = self.free.fetch_add(n, AcqRel);
        n > 0 && before.wrapping_add(n) == whole
    }

    /// Declares that no request will come any more, and that `aside` of the frames never come back. Returns whether all others are
    /// free. If not, exactly one later give or [`free_block`](Self::free_block), the one that brings the last frame, returns that it
    /// completed the buddy. Its caller is then alone with the buddy, and may take its metadata away.
    ///
    /// ```
    /// # use pagemill_core::{BoundBlock, Mobility, Order, Pfn, Buddy, BuddyMetadata, atomic::{AtomicU32, AtomicU64}};
    /// # let need = BuddyMetadata::for_frames(600);
    /// # let bits: Vec<AtomicU64> = (0..need.words).map(|_| AtomicU64::new(0)).collect();
    /// # let areas: Vec<AtomicU32> = (0..need.areas).map(|_| AtomicU32::new(0)).collect();
    /// let buddy = Buddy::new(Pfn::new(0), 600, &bits, &areas).unwrap();
    /// let [one, other] = [0, 0].map(|_| buddy.alloc_block(Order::ZERO, Mobility::Unmovable, 0).unwrap());
    /// assert!(!buddy.close(0));
    /// assert_eq!(buddy.free_block(one, Order::ZERO), Ok(false));
    /// assert_eq!(buddy.free_block(other, Order::ZERO), Ok(true));
    /// ```
    pub fn close(&self, aside: usize) -> bool {
        let whole = self.frames as usize; // Before: as in `add_free`.
        let aside = aside + self.absent_frames.load(Relaxed) as usize;
        // AcqRel as in `add_free`.
        let before = self.free.fetch_add(CLOSED + aside, AcqRel);
        before.wrapping_add(aside) == whole
    }

    /// In the child after a fork: sets the counter to the frames that were counted, and frees the lock.
    pub(crate) fn reset_after_fork(&self, free: usize) {
        self.free.store(free, Relaxed);
        self.large.free_after_fork();
        self.end_withholding();
    }

    // ── numbers ────────────────────────────────────────────────────────────────────────────────────────────────

    #[inline]
    pub(crate) fn block_of(&self, pfn: Pfn) -> PageblockId {
        self.word_of(pfn).pageblock()
    }
    /// The first frame of a pageblock.
    pub(crate) fn first_of(&self, block: PageblockId) -> Pfn {
        self.first_of_word(block.first_word())
    }
    /// The entry of a pageblock.
    #[inline]
    pub(crate) fn area(&self, block: PageblockId) -> &AtomicU32 {
        &self.areas[block.as_usize()]
    }
    /// All pageblocks, in ascending order.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = PageblockId> + use<> {
        (0..self.areas.len()).map(PageblockId::new)
    }
    /// The first pageblock, this one or a later one, at which a block of `span` pageblocks may begin.
    pub(crate) fn next_aligned(&self, block: PageblockId, span: usize) -> PageblockId {
        let before = (self.start.as_u32() / PAGEBLOCK_FRAMES) as usize;
        PageblockId::new((before + block.as_usize()).next_multiple_of(span) - before)
    }
    #[inline]
    pub(crate) fn word_of(&self, pfn: Pfn) -> WordId {
        WordId::new((pfn.as_u32() - self.start.as_u32()) / 64)
    }
    pub(crate) fn first_of_word(&self, word: WordId) -> Pfn {
        self.start.offset(word.as_u32() * 64)
    }
    pub(crate) fn words_of(&self, block: PageblockId) -> &[AtomicU64] {
        &self.bits[block.first_word().as_usize()..][..BLOCK_WORDS]
    }
    /// The frames of a block: 512, fewer only in the last one.
    pub(crate) fn frames_of(&self, block: PageblockId) -> u32 {
        (self.frames - block.as_u32() * PAGEBLOCK_FRAMES).min(PAGEBLOCK_FRAMES)
    }
}
