//! The consumer's cache: a stack in an array, which a source fills where it lies.
use core::mem;

/// Items that it holds, as the kernel's `PP_ALLOC_CACHE_SIZE`.
pub(super) const CACHE: usize = 128;

/// The slots below `len` are full, and all others are empty.
pub(super) struct Cache<T> {
    slots: Box<[Option<T>; CACHE]>,
    len: usize,
}

impl<T> Cache<T> {
    pub(super) fn new() -> Self {
        Self { slots: Box::new([const { None }; CACHE]), len: 0 }
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.len
    }

    #[inline]
    pub(super) fn pop(&mut self) -> Option<T> {
        let last = self.len.checked_sub(1)?;
        self.len = last;
        self.slots.get_mut(last)?.take()
    }

    /// Puts an item in. Returns it if the cache is full.
    #[inline]
    pub(super) fn push(&mut self, item: T) -> Option<T> {
        let Some(slot) = self.slots.get_mut(self.len) else { return Some(item) };
        let before = slot.replace(item);
        debug_assert!(before.is_none());
        // It was empty: there is nothing to drop, and no need to look.
        mem::forget(before);
        self.len += 1;
        None
    }

    /// Has `fill` fill the first `n` slots of the empty cache. Whatever it leaves in them counts, in any order, and is dropped
    /// if it unwinds.
    pub(super) fn fill<R>(&mut self, n: usize, fill: impl FnOnce(&mut [Option<T>]) -> R) -> R {
        /// Empties slots.
        struct Empties<'a, T>(&'a mut [Option<T>]);
        impl<T> Drop for Empties<'_, T> {
            fn drop(&mut self) {
                self.0.fill_with(|| None);
            }
        }
        debug_assert_eq!(self.len, 0);
        let slots = Empties(&mut self.slots[..n]);
        let filled = fill(&mut *slots.0);
        // Without a branch for each slot.
        let full = slots.0.iter().filter(|slot| slot.is_some()).count();
        if full < n {
            // Stable, so that they are taken in the order in which they came.
            slots.0.sort_by_key(Option::is_none);
        }
        mem::forget(slots);
        self.len = full;
        filled
    }
}
