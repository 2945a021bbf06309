//! The sources of a pool's elements: the page allocator, a pair of functions, or a program's own type.
//!
//! A pool asks its source first on every request, and returns surplus elements to it. It calls a source without any
//! lock held.
use crate::allocator::Allocator;
use crate::bulk::{Bulk, Exact, UpTo};
use crate::error::Error;
use crate::handle::{Block, Owned, Page, free_pages_bulk};
use crate::registry;
use crate::word::{addr_of_word, order_of_word};
use core::marker::PhantomData;
use pagemill_core::{Gfp, NodeId, Order, PageCount};

/// Makes and ends the elements of a [`Mempool`](super::Mempool): the pair of functions for one element (the kernel's
/// `mempool_alloc_t` and `mempool_free_t`), and their forms for many.
///
/// The flags of a request say what the source may do: a pool asks with `NOWAIT` first. A source that waits in spite of
/// `NOWAIT`, or that waits for elements of the same pool, breaks the pool's promise.
///
/// ```
/// use pagemill::{Bulk, Error, Exact, Mempool, Source};
/// /// Buffers from the system's allocator.
/// struct Buffers;
/// impl Source for Buffers {
///     type Item = Box<[u8; 512]>;
///     fn alloc(&self, _request: Bulk<'_, Exact, Self::Item>) -> Result<Option<Self::Item>, Error> {
///         Ok(Some(Box::new([0; 512])))
///     }
///     fn free(&self, item: Self::Item) {
///         drop(item);
///     }
/// }
/// let pool = Mempool::new(Buffers, 4)?;
/// let buffer = pool.alloc(pagemill::Gfp::NOIO)?;
/// drop(buffer); // It goes back to the pool.
/// # Ok::<(), Error>(())
/// ```
pub trait Source {
    /// The type of an element.
    type Item: Send;

    /// Makes one element; `None` if there is no memory now. Only the request's flags, timeout, account and nodes
    /// matter.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the same request would fail again.
    fn alloc(&self, request: Bulk<'_, Exact, Self::Item>) -> Result<Option<Self::Item>, Error>;

    /// Ends an element.
    fn free(&self, item: Self::Item);

    /// Fills as many empty slots as it can, and leaves the others. Returns how many it filled.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc); nothing was filled in this case.
    fn fill(&self, request: Bulk<'_, Exact, Self::Item>, slots: &mut [Option<Self::Item>]) -> Result<usize, Error> {
        let mut filled = 0;
        for slot in slots.iter_mut().filter(|slot| slot.is_none()) {
            match self.alloc(request) {
                Ok(Some(item)) => *slot = Some(item),
                Err(error) if filled == 0 => return Err(error),
                _ => break,
            }
            filled += 1;
        }
        Ok(filled)
    }

    /// Passes up to `count` elements to `each`, and returns their number. Elements above `count` are returned at once.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc); nothing was passed on in this case.
    fn deliver(
        &self,
        request: Bulk<'_, Exact, Self::Item>,
        count: usize,
        each: &mut dyn FnMut(Self::Item),
    ) -> Result<usize, Error> {
        for delivered in 0..count {
            match self.alloc(request) {
                Ok(Some(item)) => each(item),
                Err(error) if delivered == 0 => return Err(error),
                _ => return Ok(delivered),
            }
        }
        Ok(count)
    }

    /// Ends the elements in the slots and empties the slots.
    fn free_bulk(&self, slots: &mut [Option<Self::Item>]) {
        slots.iter_mut().filter_map(Option::take).for_each(|item| self.free(item));
    }

    /// The order of the blocks that it makes, for error messages; 0 for elements that are not blocks.
    fn order(&self) -> Order {
        Order::ZERO
    }

    /// How many pages it charges to a request's account for each element that it makes; 0 if it charges none. A pool takes
    /// them off the account when an awaited request ends without its elements.
    fn charged_pages(&self) -> PageCount {
        PageCount::new(0)
    }

    /// The node that the element's memory is on, if the source knows it.
    fn node_of(&self, _item: &Self::Item) -> Option<NodeId> {
        None
    }

    /// Whether this source may have made the element. A pool keeps no other element in its reserve.
    fn is_own(&self, _item: &Self::Item) -> bool {
        true
    }

    /// Prepares an element from the reserve for a request with these flags: zeroes it for `ZERO`, for example.
    fn renew(&self, _item: &mut Self::Item, _gfp: Gfp) {}
}

/// A source of blocks of one order: [`Page`]s or [`Block`]s.
#[derive(Clone, Debug)]
pub struct PageSource<T> {
    allocator: Allocator,
    order: Order,
    item: PhantomData<fn() -> T>,
}

impl PageSource<Page> {
    /// A source of the allocator's pages.
    ///
    /// ```
    /// use pagemill::{Allocator, Mempool, PageSource};
    /// let allocator = Allocator::builder().pages(64).build()?;
    /// let pool = Mempool::new(PageSource::pages(&allocator), 16)?; // As `Mempool::pages`.
    /// # drop(pool);
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn pages(allocator: &Allocator) -> Self {
        Self::new(allocator, Order::ZERO)
    }
}

impl PageSource<Block> {
    /// A source of blocks of one order.
    ///
    /// ```
    /// use pagemill::{Allocator, Mempool, Order, PageSource};
    /// let allocator = Allocator::builder().pages(64).build()?;
    /// let pool = Mempool::new(PageSource::blocks(&allocator, Order::new(2).unwrap()), 4)?; // As `Mempool::blocks`.
    /// # drop(pool);
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn blocks(allocator: &Allocator, order: Order) -> Self {
        Self::new(allocator, order)
    }
}

impl<T: Owned> PageSource<T> {
    fn new(allocator: &Allocator, order: Order) -> Self {
        Self { allocator: allocator.clone(), order, item: PhantomData }
    }

    /// The pool's request, for up to `n` blocks: the pool has the rest.
    #[inline]
    fn up_to<'a>(&self, n: usize, request: Bulk<'a, Exact, T>) -> Bulk<'a, UpTo, T> {
        Bulk::of(request.request.up_to_again(n, self.order))
    }
}

impl<T: Owned> Source for PageSource<T> {
    type Item = T;

    fn alloc(&self, request: Bulk<'_, Exact, T>) -> Result<Option<T>, Error> {
        let mut slot = [None];
        self.fill(request, &mut slot)?;
        Ok(slot[0].take())
    }
    fn free(&self, item: T) {
        drop(item);
    }
    #[inline]
    fn fill(&self, request: Bulk<'_, Exact, T>, slots: &mut [Option<T>]) -> Result<usize, Error> {
        let request = self.up_to(slots.len(), request);
        Ok(self.allocator.alloc_pages_bulk_array(request, slots)?.added)
    }
    #[inline]
    fn deliver(&self, request: Bulk<'_, Exact, T>, count: usize, each: &mut dyn FnMut(T)) -> Result<usize, Error> {
        let request = self.up_to(count, request);
        Ok(self.allocator.alloc_pages_bulk_callback(request, each)?.blocks)
    }
    fn free_bulk(&self, slots: &mut [Option<T>]) {
        free_pages_bulk(slots);
    }
    fn order(&self) -> Order {
        self.order
    }
    fn charged_pages(&self) -> PageCount {
        PageCount::new(self.order.frames() as usize)
    }
    fn node_of(&self, item: &T) -> Option<NodeId> {
        registry::by_address(addr_of_word(item.word())).map(|(zone, _)| zone.node())
    }
    fn is_own(&self, item: &T) -> bool {
        let word = item.word();
        order_of_word(word) == self.order && self.allocator.has_address(addr_of_word(word))
    }
    fn renew(&self, item: &mut T, gfp: Gfp) {
        if gfp.contains(Gfp::ZERO) {
            item.bytes_mut().fill(0);
        }
    }
}

/// A pair of functions as a source: see [`Mempool::from_fns`](super::Mempool::from_fns).
#[derive(Debug)]
pub struct Pair<A, F> {
    pub(super) alloc: A,
    pub(super) free: F,
}

impl<T: Send, A: Fn(Gfp) -> Option<T>, F: Fn(T)> Source for Pair<A, F> {
    type Item = T;
    fn alloc(&self, request: Bulk<'_, Exact, T>) -> Result<Option<T>, Error> {
        Ok((self.alloc)(request.request.gfp))
    }
    fn free(&self, item: T) {
        (self.free)(item);
    }
}
