//! Fragments: parts of a page with owners of their own.
use super::page::PoolPage;
use crate::handle::Owned;
use crate::handle::sealed::Word as _;
use crate::mempool::{PageSource, Source};
use crate::sync::{AtomicUsize, fence};
use core::fmt;
use core::ops::{Deref, DerefMut};
use core::ptr::NonNull;
use core::slice;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// Fragments begin at multiples of a cache line, so that no two owners write to the same one.
const ALIGN: usize = 64;

/// A page of which fragments are out, or are still cut.
struct Whole<S: Source> {
    page: PoolPage<S>,
    /// The fragments, and the consumer while it cuts.
    holders: AtomicUsize,
}

/// Lets go of a page. Returns the page if nobody else holds any of it.
fn let_go<S: Source>(whole: NonNull<Whole<S>>) -> Option<Box<Whole<S>>> {
    // SAFETY: the caller is one of its holders. Release pairs with the Acquire of the last one.
    if unsafe { whole.as_ref() }.holders.fetch_sub(1, Release) > 1 {
        return None;
    }
    fence(Acquire);
    // SAFETY: from `Box::leak` in `Cut::new`, and nobody else holds it.
    Some(unsafe { Box::from_raw(whole.as_ptr()) })
}

/// The page that the consumer cuts fragments from.
pub(super) struct Cut<S: Source> {
    whole: NonNull<Whole<S>>,
    start: NonNull<u8>,
    len: usize,
    /// Where the next fragment begins.
    at: usize,
}

impl<S: Source> Cut<S> {
    /// Begins a page.
    pub(super) fn new(mut page: PoolPage<S>) -> Self
    where
        S::Item: Owned,
    {
        let memory = NonNull::from(page.bytes_mut());
        let (start, len) = (memory.cast::<u8>(), memory.len());
        let whole = Box::leak(Box::new(Whole { page, holders: AtomicUsize::new(1) }));
        Self { whole: NonNull::from(whole), start, len, at: 0 }
    }

    /// The next `bytes` bytes, if there are so many left.
    pub(super) fn next(&mut self, bytes: usize) -> Option<Frag<S>> {
        if self.len - self.at < bytes {
            return None;
        }
        // SAFETY: the consumer holds the page while it cuts. Relaxed, as for a clone of an `Arc`.
        unsafe { self.whole.as_ref() }.holders.fetch_add(1, Relaxed);
        // SAFETY: `at` is within the page.
        let start = unsafe { self.start.add(self.at) };
        self.at = (self.at + bytes).next_multiple_of(ALIGN).min(self.len);
        Some(Frag { whole: self.whole, start, len: bytes })
    }

    /// The length of the page.
    pub(super) fn bytes(&self) -> usize {
        self.len
    }

    /// Ends cutting. Returns the page if no fragment of it is out.
    pub(super) fn end(self) -> Option<PoolPage<S>> {
        let_go(self.whole).map(|whole| whole.page)
    }
}

/// A part of a page of a [`PagePool`](super::PagePool): see [`alloc_frag`](super::PagePool::alloc_frag). Its page goes back to the pool with the last part.
///
/// It dereferences to its bytes.
pub struct Frag<S: Source = PageSource<crate::handle::Page>> {
    whole: NonNull<Whole<S>>,
    start: NonNull<u8>,
    len: usize,
}

impl<S: Source> Frag<S> {
    /// Its address.
    pub fn addr(&self) -> usize {
        self.start.as_ptr().expose_provenance()
    }
}

impl<S: Source> Drop for Frag<S> {
    fn drop(&mut self) {
        drop(let_go(self.whole));
    }
}

// SAFETY: its bytes are its own, and it shares the handle of its page, which is `Send` then.
unsafe impl<S: Source + Send + Sync> Send for Frag<S> {}
// SAFETY: a shared reference leads to its bytes alone.
unsafe impl<S: Source + Send + Sync> Sync for Frag<S> {}

impl<S: Source> Deref for Frag<S> {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: the bytes are within its page, which it holds, and no other fragment has them.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<S: Source> DerefMut for Frag<S> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<S: Source> fmt::Debug for Frag<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes at {:#x}", self.len, self.start.as_ptr().addr())
    }
}
