//! The way of one page, block or run, from the call to the handle.
//!
//! The fast path is inlined into the caller: it pops a frame from the CPU's list in one section, looks at the frame's
//! state, and computes its address. Everything else is cold and out of line (C3.15): an empty list is refilled with a
//! batch from a depot or the zone (`slow.rs`). No lock is taken here.
use crate::allocator::Allocator;
use crate::context::AllocContext;
use crate::error::{Error, InvalidRequest};
use crate::handle::{Block, Page, sealed::Word};
use crate::run::Run;
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

    /// Allocates one page as a raw pointer: [`alloc_page`](Self::alloc_page) and [`Page::into_raw`] at once, for a caller that holds
    /// pointers, such as a program in C.
    ///
    /// # Errors
    /// As [`alloc_page`](Self::alloc_page).
    ///
    /// ```
    /// use pagemill::{Allocator, Gfp, Order, free_raw};
    /// let page = Allocator::global().alloc_page_raw(Gfp::KERNEL)?;
    /// // SAFETY: this code owns the page and does not use it afterwards.
    /// unsafe { free_raw(page, Order::ZERO) }.unwrap();
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    #[inline(always)]
    pub fn alloc_page_raw(&self, gfp: Gfp) -> Result<*mut u8, Error> {
        let zones = self.zones();
        let Some((zone, pfn)) = zones.here().and_then(|zone| zone.pop_one(gfp)) else {
            return self.alloc_page_raw_slow(gfp);
        };
        let addr = zone.addr_of(pfn);
        zone.give_away_pages(&[addr]);
        Ok(core::ptr::with_exposed_provenance_mut(addr))
    }

    #[cold]
    #[inline(never)]
    fn alloc_page_raw_slow(&self, gfp: Gfp) -> Result<*mut u8, Error> {
        self.alloc_page(gfp).map(Page::into_raw)
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

    /// Allocates `pages` neighbouring pages, any number of them: 266 pages take 266 (C3.17). They are aligned to a page and lie in
    /// one arena. They go back together when the [`Run`] is dropped, or one by one ([`Run::into_pages`]).
    ///
    /// A number that is a power of two is better served by [`alloc_pages`](Self::alloc_pages), whose blocks are aligned to
    /// their size and are found faster. The request waits for other requests for runs or for blocks above 2 MiB, so a
    /// signal handler must not make it.
    ///
    /// A request that [may wait](crate#calls-that-sleep) does so in a line of requests for the same number, as a request
    /// for a block does. If it was overtaken often, the free pages of one pageblock are kept for it. For more than 512
    /// pages none are kept: it may wait until its neighbours are free by chance.
    ///
    /// # Errors
    /// [`Error::Exhausted`] if no such run is free, though more pages may be. [`InvalidRequest::NoPages`],
    /// [`InvalidRequest::MoreThanManaged`] if no arena has so many. As [`alloc_page`](Self::alloc_page).
    ///
    /// ```
    /// use pagemill::{Allocator, Gfp};
    /// let allocator = Allocator::builder().pages(1064).build()?;
    /// let blocks: Vec<_> = (0..4).map(|_| allocator.alloc_contig(Gfp::KERNEL, 266)).collect::<Result<_, _>>()?;
    /// assert!(blocks.iter().all(|block| block.bytes() == 1_089_536));
    /// assert!(allocator.alloc_page(Gfp::KERNEL).is_err(), "all 1064 pages are in use");
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn alloc_contig(&self, gfp: Gfp, pages: usize) -> Result<Run<Page>, Error> {
        match pages {
            0 => Err(InvalidRequest::NoPages.into()),
            1 => Ok(Run::of_page(self.alloc_page(gfp)?.into_word())),
            _ => {
                let zones = self.zones();
                // The pages are marked as handed out, and this call is their only owner.
                zones.alloc_block(&AllocContext::of_run(zones, gfp, pages)).map(|addr| Run::contig(addr, pages))
            }
        }
    }
}
