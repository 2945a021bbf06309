//! The consumer's cache: a stack in an array, without a check for room to grow.
use core::mem::MaybeUninit;

/// Items that it holds, as the kernel's `PP_ALLOC_CACHE_SIZE`.
pub(super) const CACHE: usize = 128;

/// The items below `len` are there.
pub(super) struct Cache<T> {
    items: Box<[MaybeUninit<T>; CACHE]>,
    len: usize,
}

impl<T> Cache<T> {
    pub(super) fn new() -> Self {
        Self { items: Box::new([const { MaybeUninit::uninit() }; CACHE]), len: 0 }
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.len
    }

    #[inline]
    pub(super) fn pop(&mut self) -> Option<T> {
        let last = self.len.checked_sub(1)?;
        let item = self.items.get(last)?;
        self.len = last;
        // SAFETY: it was below `len`, and is not any more: it is taken once.
        Some(unsafe { item.assume_init_read() })
    }

    /// Puts an item in. Returns it if the cache is full.
    #[inline]
    pub(super) fn push(&mut self, item: T) -> Option<T> {
        match self.items.get_mut(self.len) {
            Some(place) => {
                place.write(item);
                self.len += 1;
                None
            }
            None => Some(item),
        }
    }
}

impl<T> Drop for Cache<T> {
    fn drop(&mut self) {
        while self.pop().is_some() {}
    }
}
