//! Fragments: parts of a page with owners of their own.
use super::pool::{PagePool, PoolPage};
use crate::error::{Error, InvalidRequest};
use crate::handle::Owned;
use crate::handle::sealed::Word as _;
use crate::mempool::{PageSource, Source};
use crate::sync::{AtomicUsize, fence};
use core::fmt;
use core::ops::{Deref, DerefMut};
use core::ptr::NonNull;
use core::slice;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use pagemill_core::Gfp;

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
    // SAFETY: from `Box::leak` in `cut`, and nobody else holds it.
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

impl<S: Source> PagePool<S>
where
    S::Item: Owned,
{
    /// Takes a part of a page: `bytes` bytes that begin at a multiple of 64, with an owner of its own. The page goes back to
    /// the pool with the last of its fragments. Fragments are cut one after the other, and a new page is begun when the
    /// rest of the last one is too short.
    ///
    /// # Errors
    /// [`InvalidRequest::FragmentSize`] for 0 bytes, or more than a page of the pool has. As [`alloc`](Self::alloc).
    ///
    /// ```
    /// use pagemill::{Allocator, Gfp, PagePool};
    /// let mut pool = PagePool::pages(&Allocator::builder().pages(256).build()?);
    /// let (mut first, second) = (pool.alloc_frag(Gfp::NOWAIT, 1500)?, pool.alloc_frag(Gfp::NOWAIT, 1500)?);
    /// first[0] = 1;
    /// assert_eq!((first.len(), second.addr() - first.addr()), (1500, 1536));
    /// assert_eq!(pool.in_flight(), 1); // Both are of one page.
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn alloc_frag(&mut self, gfp: Gfp, bytes: usize) -> Result<Frag<S>, Error> {
        let max = self.source().order().bytes();
        if bytes == 0 || bytes > max {
            return Err(InvalidRequest::FragmentSize { bytes, max }.into());
        }
        if self.cut.as_ref().is_none_or(|cut| cut.len - cut.at < bytes) {
            let mut page = self.alloc(gfp)?;
            let memory = NonNull::from(page.bytes_mut());
            let (start, len) = (memory.cast::<u8>(), memory.len());
            // A source may make smaller blocks than it says.
            if bytes > len {
                self.put(page);
                return Err(InvalidRequest::FragmentSize { bytes, max: len }.into());
            }
            self.end_cut();
            let whole = Box::leak(Box::new(Whole { page, holders: AtomicUsize::new(1) }));
            self.cut = Some(Cut { whole: NonNull::from(whole), start, len, at: 0 });
        }
        let Some(cut) = &mut self.cut else { unreachable!("a page was begun") };
        // SAFETY: the consumer holds the page while it cuts. Relaxed, as for a clone of an `Arc`.
        unsafe { cut.whole.as_ref() }.holders.fetch_add(1, Relaxed);
        // SAFETY: `at` is within the page.
        let start = unsafe { cut.start.add(cut.at) };
        cut.at = (cut.at + bytes).next_multiple_of(ALIGN).min(cut.len);
        Ok(Frag { whole: cut.whole, start, len: bytes })
    }
}

impl<S: Source> PagePool<S> {
    /// The consumer is done with the page that it cut.
    pub(super) fn end_cut(&mut self) {
        let Some(cut) = self.cut.take() else { return };
        match let_go(cut.whole) {
            Some(whole) => self.put(whole.page),
            None => self.note_released_refcnt(),
        }
    }
}

/// A part of a page of a [`PagePool`]: see [`PagePool::alloc_frag`]. Its page goes back to the pool with the last part.
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
