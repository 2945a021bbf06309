//! The consumer's cache: a stack in an array, which a source fills where it lies.
use core::mem::{self, MaybeUninit};

/// Items that it holds, as the kernel's `PP_ALLOC_CACHE_SIZE`.
pub(super) const CACHE: usize = 128;

/// The slots below `len` are written: with an item, or empty where a source lied. What is in the others means nothing, so that
/// taking an item writes nothing.
pub(super) struct Cache<T> {
    slots: Box<[MaybeUninit<Option<T>>; CACHE]>,
    len: usize,
    /// Empty slots that were met while taking, and are still on the pool's count.
    holes: usize,
}

impl<T> Cache<T> {
    pub(super) fn new() -> Self {
        Self { slots: Box::new([const { MaybeUninit::uninit() }; CACHE]), len: 0, holes: 0 }
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The items here that are on the pool's count: those below `len`, and holes that were met.
    #[inline]
    pub(super) fn counted(&self) -> usize {
        self.len + self.holes
    }

    /// The number of holes that were found since the last call: items that a source said it delivered, and did not.
    pub(super) fn take_holes(&mut self) -> usize {
        mem::take(&mut self.holes)
    }

    #[inline]
    pub(super) fn pop(&mut self) -> Option<T> {
        let last = self.len.checked_sub(1)?;
        let slot = self.slots.get(last)?;
        self.len = last;
        // SAFETY: it was below `len`, and is not any more: it is taken once.
        match unsafe { slot.assume_init_read() } {
            Some(item) => Some(item),
            None => self.pop_below_a_hole(),
        }
    }

    #[cold]
    fn pop_below_a_hole(&mut self) -> Option<T> {
        self.holes += 1;
        self.pop()
    }

    /// Fills empty slots of the caller's with its items, made into something else, until it meets a hole. Returns how many it
    /// filled, and the slot that the hole left empty. Neither the iterator nor `make` must unwind.
    #[inline]
    pub(super) fn hand_out<'s, U: 's>(
        &mut self,
        mut empty: impl Iterator<Item = &'s mut Option<U>>,
        make: impl Fn(T) -> U,
    ) -> (usize, Option<&'s mut Option<U>>) {
        // Set once for all: otherwise each item waits for the last one's store.
        let (mut len, mut count, mut unfilled) = (self.len, 0, None);
        for slot in self.slots[..len].iter().rev() {
            let Some(to) = empty.next() else { break };
            len -= 1;
            // SAFETY: it was below `len`, and is not any more: it is taken once.
            let Some(item) = (unsafe { slot.assume_init_read() }) else {
                self.holes += 1;
                unfilled = Some(to);
                break;
            };
            // Not assigned, which would look for something to drop.
            mem::forget(to.replace(make(item)));
            count += 1;
        }
        self.len = len;
        (count, unfilled)
    }

    /// The slots that mean nothing, of which the next ones may be written: see [`added`](Self::added).
    #[inline]
    pub(super) fn room(&mut self) -> &mut [MaybeUninit<Option<T>>] {
        &mut self.slots[self.len..]
    }

    /// Makes the next `n` slots items.
    ///
    /// # Safety
    /// They have been written.
    #[inline]
    pub(super) unsafe fn added(&mut self, n: usize) {
        self.len += n;
    }

    /// Puts an item in. Returns it if the cache is full.
    #[inline]
    pub(super) fn push(&mut self, item: T) -> Option<T> {
        let Some(slot) = self.slots.get_mut(self.len) else { return Some(item) };
        slot.write(Some(item));
        self.len += 1;
        None
    }

    /// Has `fill` fill the first `n` slots of the empty cache. If it says that it filled all, only the last one is looked at, the
    /// first to be taken: to look at each has its cost (ADR 47), and a hole is met when its turn comes. Otherwise what it
    /// left in them counts. All is dropped if it unwinds.
    pub(super) fn fill<E>(
        &mut self,
        n: usize,
        fill: impl FnOnce(&mut [Option<T>]) -> Result<usize, E>,
    ) -> Result<usize, E> {
        /// Drops what is in slots.
        struct Drops<'a, T>(&'a mut [Option<T>]);
        impl<T> Drop for Drops<'_, T> {
            fn drop(&mut self) {
                self.0.fill_with(|| None);
            }
        }
        assert_eq!(self.len, 0, "a cache is filled when it is empty");
        let slots = &mut self.slots[..n];
        for slot in &mut *slots {
            slot.write(None);
        }
        // SAFETY: each was written just now.
        let slots = unsafe { mem::transmute::<&mut [MaybeUninit<Option<T>>], &mut [Option<T>]>(slots) };
        let slots = Drops(slots);
        let filled = fill(&mut *slots.0);
        self.len = match filled {
            Ok(filled) if filled == n && slots.0.last().is_some_and(Option::is_some) => n,
            _ => {
                // Stable, so that they are taken in the order in which they came.
                slots.0.sort_by_key(Option::is_none);
                slots.0.iter().flatten().count()
            }
        };
        mem::forget(slots);
        filled
    }
}

impl<T> Drop for Cache<T> {
    fn drop(&mut self) {
        while self.pop().is_some() {}
    }
}
