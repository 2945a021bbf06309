//! Alone with a list: what the portable backend, drains and depots do then (L3).
use super::{List, NONE, POPPED_SHIFT, TOP};
use crate::Batch;
use core::mem::MaybeUninit;
use core::sync::atomic::Ordering::{Relaxed, Release};
use pagemill_core::{FrameState, PAGE_SHIFT};

/// Alone with a list.
#[derive(Debug)]
pub(super) struct Held<'l> {
    pub(super) list: &'l List,
}

impl Held<'_> {
    /// Pops one, for a caller; `NONE` if there is none.
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

    /// Pops up to `want`; `counted` is 1 if a caller takes them, 0 if they go to the zone.
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
        // Release: the child of a fork believes the word, also if its parent's thread was just here. It pairs with the Acquire in
        // `frames`: the items are stored.
        self.list.word.store(word + pages.len() as u64, Release);
        true
    }
}

impl Drop for Held<'_> {
    #[inline]
    fn drop(&mut self) {
        // Release pairs with the Acquire in `try_hold`, and with the acquiring read of `held` in a section.
        self.list.held.store(0, Release);
    }
}
