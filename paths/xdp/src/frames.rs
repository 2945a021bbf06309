//! The pages that the kernel has, by their frame in the UMEM.
//!
//! A page is in a table from the moment when its address is written to a ring until the kernel returns the address. So an
//! address that a ring returns is believed only if its page is in that ring's table, and then once.
use std::mem;

use pagemill::{PAGE_SIZE, Page, PoolPage, Source};

use crate::Error;

/// Pages by frame number.
pub(crate) struct Frames<S: Source<Item = Page>> {
    pages: Box<[Option<PoolPage<S>>]>,
    /// The address of the UMEM's first byte.
    base: usize,
}

impl<S: Source<Item = Page>> Frames<S> {
    /// A table for a UMEM of `frames` pages that begins at `base`.
    pub(crate) fn new(base: usize, frames: usize) -> Self {
        Self { pages: std::iter::repeat_with(|| None).take(frames).collect(), base }
    }

    /// Puts a page in. Returns its place in the UMEM.
    ///
    /// # Errors
    /// If the page is not in the UMEM; then it goes back to its pool.
    #[inline]
    pub(crate) fn put(&mut self, page: PoolPage<S>) -> Result<u64, Error> {
        let at = page.addr().wrapping_sub(self.base);
        let Some(slot) = self.pages.get_mut(at / PAGE_SIZE) else { return Err(outside(page.addr())) };
        let before = slot.replace(page);
        debug_assert!(before.is_none(), "a page has one owner");
        Ok(at as u64)
    }

    /// Takes out the page at this place, if it is there.
    #[inline]
    pub(crate) fn take(&mut self, addr: u64) -> Result<PoolPage<S>, Lie> {
        let slot = usize::try_from(addr).ok().and_then(|addr| self.pages.get_mut(addr / PAGE_SIZE));
        slot.ok_or(Lie::Outside)?.take().ok_or(Lie::NotThere)
    }

    /// The number of pages in it.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.pages.iter().flatten().count()
    }

    /// Gives all pages back to their pool. For [closed](crate::umem::Closed) sockets: the kernel uses the pages no more.
    pub(crate) fn end(mut self, _: &crate::umem::Closed) {
        drop(mem::take(&mut self.pages));
    }
}

impl<S: Source<Item = Page>> Drop for Frames<S> {
    /// Pages that the kernel may still write to are never handed out again.
    fn drop(&mut self) {
        mem::take(&mut self.pages).into_iter().flatten().for_each(mem::forget);
    }
}

/// What is wrong with an address that a ring returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lie {
    /// It is not in the UMEM.
    Outside,
    /// The kernel doesn't have this frame: it never had it, or it has returned it.
    NotThere,
}

#[cold]
fn outside(addr: usize) -> Error {
    Error::Fault(format!("the page at {addr:#x} is not in the UMEM"))
}
