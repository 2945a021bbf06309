//! One list, and the operations of a thread that holds it: the portable backend, drains and depots (L3).
use crate::Batch;
use crate::batch::PAD;
use core::mem::{MaybeUninit, offset_of};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use pagemill_core::atomic::{AtomicU32, AtomicU64};
use pagemill_core::{BoundBlock, FrameState, ListPolicy, Lock, PAGE_SHIFT};

/// Stands for no frame.
pub(super) const NONE: u32 = u32::MAX;

/// Slots of a list: the rest of 8 KiB after the header.
#[cfg(not(loom))]
const SLOTS: usize = (LIST_BYTES - HEADER_BYTES) / 4;
#[cfg(loom)]
const SLOTS: usize = 24;
pub(super) const LIST_BYTES: usize = 8192;
const HEADER_BYTES: usize = 64;

/// The bits of the word that count the frames on the stack.
pub(super) const TOP: u64 = 0xffff;
pub(super) const POPPED_SHIFT: u32 = 16;

/// One list. Zeroed memory is an empty list that accepts nothing until `open`.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct List {
    /// top | popped << 16.
    pub(super) word: AtomicU64,
    /// The most frames that the list may hold: a copy of the policy's limit for the sections, or 0 while it is shut.
    pub(super) limit: AtomicU32,
    /// Not 0 while a thread holds the list.
    pub(super) held: AtomicU32,
    /// Held by the one drain at a time that may wait for the list.
    pub(super) draining: Lock,
    policy: AtomicU64,
    /// Frames that came from the zone or a depot, and frames that a drain took.
    pub(super) refilled: AtomicU64,
    pub(super) drained: AtomicU64,
    /// Frames that its own CPU popped for the zone or a depot, not for a caller; for a depot, frames that went to lists.
    pub(super) overflowed: AtomicU64,
    /// The pageblock that refills take frames from.
    pub bound: BoundBlock,
    /// Begins a cache line, so that sections copy whole vectors inside of lines.
    pub(super) items: Items,
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<List>() == LIST_BYTES && offset_of!(List, word) == 0);

#[repr(align(64))]
#[derive(Debug)]
pub(super) struct Items(pub(super) [AtomicU32; SLOTS]);

/// The offsets that the sections use.
pub(crate) const ITEMS: usize = offset_of!(List, items);
#[cfg(not(loom))]
pub(super) const LIMIT: usize = offset_of!(List, limit);
#[cfg(not(loom))]
pub(super) const HELD: usize = offset_of!(List, held);

impl List {
    /// The largest limit: sections copy in steps of 16 numbers and may write garbage that far above the top.
    pub const LIMIT_MAX: u32 = (SLOTS - PAD) as u32;

    /// An empty, open list, for models.
    #[cfg(loom)]
    pub fn for_model(limit: u32) -> Self {
        let list = Self {
            word: AtomicU64::new(0),
            limit: AtomicU32::new(0),
            held: AtomicU32::new(0),
            draining: Lock::new(),
            policy: AtomicU64::new(0),
            refilled: AtomicU64::new(0),
            drained: AtomicU64::new(0),
            overflowed: AtomicU64::new(0),
            bound: BoundBlock::new(),
            items: Items(core::array::from_fn(|_| AtomicU32::new(0))),
        };
        list.set_policy(ListPolicy { limit, ..ListPolicy::START });
        list.open();
        list
    }

    /// The number of frames on the list now.
    pub fn len(&self) -> usize {
        (self.word.load(Relaxed) & TOP) as usize
    }
    /// Whether it is empty now.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Pages that callers took from it so far, modulo 2^48.
    pub fn popped(&self) -> u64 {
        let popped = self.word.load(Relaxed) >> POPPED_SHIFT;
        popped.wrapping_sub(self.overflowed.load(Relaxed)) & (u64::MAX >> POPPED_SHIFT)
    }
    /// Frames that came to it from the zone or a depot so far.
    pub fn refilled(&self) -> u64 {
        self.refilled.load(Relaxed)
    }
    /// Frames that went from it to the zone or a depot so far.
    pub fn drained(&self) -> u64 {
        self.drained.load(Relaxed) + self.overflowed.load(Relaxed)
    }
    /// Pages that callers returned to it so far, modulo 2^48.
    pub fn pushed(&self) -> u64 {
        let word = self.word.load(Relaxed);
        let pushed = (word & TOP)
            .wrapping_add(word >> POPPED_SHIFT)
            .wrapping_add(self.drained.load(Relaxed))
            .wrapping_sub(self.refilled.load(Relaxed));
        pushed & (u64::MAX >> POPPED_SHIFT)
    }
    /// Its policy: how many frames it moves at once, and how many it may hold.
    pub fn policy(&self) -> ListPolicy {
        ListPolicy::from_word(self.policy.load(Relaxed))
    }
    /// Sets its policy, with a limit of at most [`LIMIT_MAX`](Self::LIMIT_MAX).
    pub fn set_policy(&self, policy: ListPolicy) {
        let policy = ListPolicy { limit: policy.limit.min(Self::LIMIT_MAX), ..policy };
        self.policy.store(policy.as_word(), Relaxed);
        // A list that is shut meanwhile stays shut.
        let _ = self.limit.fetch_update(Relaxed, Relaxed, |limit| (limit != 0).then_some(policy.limit));
    }
    /// Shuts the list: it accepts no frames until it is [opened](Self::open) again.
    pub fn shut(&self) {
        self.limit.store(0, Relaxed);
    }
    /// Opens the list: it accepts as many frames as its policy says.
    pub fn open(&self) {
        self.limit.store(self.policy().limit, Relaxed);
    }
    /// Counts `n` of the pushed frames as coming from the zone or a depot.
    pub fn note_refilled(&self, n: usize) {
        self.refilled.fetch_add(n as u64, Relaxed);
    }
    /// Counts `n` of the popped frames as going to the zone or a depot.
    pub fn note_overflowed(&self, n: usize) {
        self.overflowed.fetch_add(n as u64, Relaxed);
    }
    /// The frames on it. For a list at rest, or in the child of a fork.
    pub fn frames(&self) -> impl Iterator<Item = u32> {
        // Acquire pairs with the Release in `Held::push_n`.
        let len = (self.word.load(Acquire) & TOP) as usize;
        self.items.0[..len].iter().map(|item| item.load(Relaxed))
    }

    /// Tries to hold the list: for a section of the portable backend, and as the first half of a drain.
    #[inline]
    pub(super) fn try_hold(&self) -> Option<Held<'_>> {
        // Acquire pairs with the Release in `Held::drop`: this thread sees the stack as the last holder left it. No release is
        // needed for the sections, which read `held`: under rseq the caller restarts them first.
        let is_mine = self.held.compare_exchange(0, 1, Acquire, Relaxed).is_ok();
        if cfg!(pagemill_canary) {
            // The canary: a bug that stress and the model must find. It goes on although another thread holds the list.
            return Some(Held { list: self });
        }
        // Not `then_some`: that makes a `Held` in any case, and dropping it would release another thread's list.
        if is_mine { Some(Held { list: self }) } else { None }
    }

    /// Portable: pops up to `want` frames into `batch`, which must be empty. Returns `None` if the list is held.
    #[inline]
    pub fn try_pop_n(&self, want: usize, batch: &mut Batch) -> Option<()> {
        self.try_pop_at_least(want, 0, batch)
    }

    #[inline]
    pub(super) fn try_pop_at_least(&self, want: usize, least: usize, batch: &mut Batch) -> Option<()> {
        let held = self.try_hold()?;
        if self.len() >= least {
            held.pop_n(want, batch, 1);
        }
        Some(())
    }

    /// Portable: pushes all of `pfns`, or none if they do not fit or the list is held.
    #[inline]
    pub fn try_push_n(&self, pfns: &[u32]) -> bool {
        self.try_hold().is_some_and(|held| held.push_n(pfns))
    }
}

#[cfg(loom)]
impl List {
    /// Drains the list as soon as it is held. Returns `None` if another thread holds it.
    pub fn drain_for_model(&self, mut give: impl FnMut(&[u32])) -> Option<usize> {
        Some(self.try_hold()?.drain(&mut give))
    }
}

/// Holds a list until it is dropped.
#[derive(Debug)]
pub(super) struct Held<'l> {
    pub(super) list: &'l List,
}

impl Held<'_> {
    /// Pops one frame for a caller. Returns `NONE` if the list is empty.
    #[inline]
    pub(super) fn pop(&self) -> u32 {
        let word = self.list.word.load(Relaxed);
        let top = (word & TOP) as usize;
        if top == 0 {
            return NONE;
        }
        let pfn = self.list.items.0[top - 1].load(Relaxed);
        self.list.word.store(word - 1 + (1 << POPPED_SHIFT), Relaxed);
        pfn
    }

    #[inline]
    pub(super) fn push(&self, pfn: u32) -> bool {
        self.push_each(&[pfn], |&pfn| pfn)
    }

    /// Pops up to `want` frames. `counted` is 1 if a caller takes them, 0 if they go to the zone, or from a depot to a request.
    #[inline]
    pub(super) fn pop_n(&self, want: usize, batch: &mut Batch, counted: u64) {
        let word = self.list.word.load(Relaxed);
        let top = (word & TOP) as usize;
        let n = want.min(top).min(Batch::CAPACITY);
        self.list.items.0[top - n..top].iter().for_each(|item| batch.push(item.load(Relaxed)));
        self.list.word.store(word - n as u64 + ((counted * n as u64) << POPPED_SHIFT), Relaxed);
    }

    #[inline]
    pub(super) fn pop_words(&self, words: &mut [MaybeUninit<usize>], zero: usize, state: impl Fn(u32) -> u8) -> bool {
        let word = self.list.word.load(Relaxed);
        let (top, n) = ((word & TOP) as usize, words.len());
        if top < n {
            return false;
        }
        let mut safe = FrameState::SAFE.as_byte();
        for (to, item) in words.iter_mut().zip(&self.list.items.0[top - n..top]) {
            let pfn = item.load(Relaxed);
            safe &= state(pfn);
            to.write(zero.wrapping_add((pfn as usize) << PAGE_SHIFT));
        }
        if safe == 0 {
            return false;
        }
        self.list.word.store(word - n as u64 + ((n as u64) << POPPED_SHIFT), Relaxed);
        true
    }

    #[inline]
    pub(super) fn push_words(&self, words: &[usize], zero: usize) -> bool {
        self.push_each(words, |&word| (word.wrapping_sub(zero) >> PAGE_SHIFT) as u32)
    }

    #[inline]
    pub(super) fn push_n(&self, pfns: &[u32]) -> bool {
        self.push_each(pfns, |&pfn| pfn)
    }

    #[inline(always)]
    fn push_each<T>(&self, pages: &[T], number: impl Fn(&T) -> u32) -> bool {
        let word = self.list.word.load(Relaxed);
        let top = (word & TOP) as usize;
        if top + pages.len() > self.list.limit.load(Relaxed) as usize {
            return false;
        }
        self.list.items.0[top..].iter().zip(pages).for_each(|(item, page)| item.store(number(page), Relaxed));
        // Release pairs with the Acquire in `frames`: the items are stored before the word. The child of a fork trusts the
        // word, even if a thread of its parent was in here.
        self.list.word.store(word + pages.len() as u64, Release);
        true
    }
}

impl Drop for Held<'_> {
    #[inline]
    fn drop(&mut self) {
        // Release pairs with the Acquire in `try_hold`, and with the read of `held` in a section, which acquires.
        self.list.held.store(0, Release);
    }
}
