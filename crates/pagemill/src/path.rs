//! The way of one page or block, from the call to the handle.
//!
//! The fast path is inlined into the caller: it pops a frame from the CPU's list in one section, looks at the frame's
//! state, and computes its address. Everything else is cold and out of line (C3.15): an empty list is refilled with a
//! batch from a depot or the zone (`slow.rs`). No lock is taken here.
use crate::allocator::Allocator;
use crate::context::AllocContext;
use crate::error::Error;
use crate::handle::{Block, Page, sealed::Word};
use pagemill_core::{Gfp, Order, step};

impl Allocator {
    /// Allocates one page.
    ///
    /// # Errors
    /// [`Error::Exhausted`] if no page is free. [`Error::Invalid`] if flags contradict each other, or this allocator
    /// does not support them.
    ///
    /// ```
    /// use pagemill::{Allocator, Error, Gfp};
    /// let allocator = Allocator::builder().pages(1).build()?;
    /// let page = allocator.alloc_page(Gfp::KERNEL)?;
    /// assert!(matches!(allocator.alloc_page(Gfp::KERNEL), Err(Error::Exhausted(_))));
    /// # drop(page);
    /// # Ok::<(), Error>(())
    /// ```
    #[inline]
    pub fn alloc_page(&self, gfp: Gfp) -> Result<Page, Error> {
        step!("Allocator::alloc_page");
        let zones = self.zones();
        let addr = match zones.here().and_then(|zone| zone.pop_one(gfp)).map(|(zone, pfn)| zone.addr_of(pfn)) {
            Some(addr) => addr,
            None => zones.alloc_page_slow(gfp)?,
        };
        // SAFETY: the frame was just marked as handed out, so this call is its only owner.
        Ok(unsafe { Page::from_word(addr) })
    }

    /// Allocates one block of 2^order pages, aligned to its size.
    ///
    /// # Errors
    /// As [`alloc_page`](Self::alloc_page).
    ///
    /// ```
    /// use pagemill::{Allocator, Gfp, Order};
    /// let huge = Allocator::global().alloc_pages(Gfp::KERNEL, Order::PAGEBLOCK)?;
    /// assert_eq!(huge.len(), 2 << 20);
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    #[inline]
    pub fn alloc_pages(&self, gfp: Gfp, order: Order) -> Result<Block, Error> {
        if order == Order::ZERO {
            return self.alloc_page(gfp).map(Block::from);
        }
        let zones = self.zones();
        let addr = match zones.here().and_then(|zone| zone.take_block_at_once(gfp, order)) {
            Some(addr) => addr,
            None => zones.alloc_block(&AllocContext::plain(zones, gfp, order))?,
        };
        // SAFETY: the block was just marked as handed out, so this call is its only owner.
        Ok(unsafe { Block::from_word(addr | usize::from(order.get())) })
    }
}
