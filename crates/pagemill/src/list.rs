//! Lists of blocks: head, tail and number, linked through a side table of four bytes a frame. The pages themselves
//! are not touched, and joining two lists costs nothing.
use crate::arena::{Arena, GROUP, is_run};
use crate::free::Returning;
use crate::handle::{Block, Owned, Page, addr_of_word, order_of_word};
use crate::registry;
use core::marker::PhantomData;
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::{Error, Invalid, Order, Pfn};
use pagemill_sys::Batch;

/// A list of pages, or of blocks of one order. It owns what is on it: dropping frees it in bulk.
///
/// ```
/// use pagemill::{Allocator, Bulk, PageList};
/// let mut list = PageList::new();
/// Allocator::global().alloc_pages_bulk_list(Bulk::up_to(3), &mut list)?;
/// let mut other = PageList::new();
/// other.push(list.pop().unwrap());
/// list.append(&mut other)?;
/// assert_eq!((list.len(), other.len()), (3, 0));
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Debug)]
pub struct List<T: Owned> {
    // Invariant: from `head`, following links len - 1 times leads to `tail`, through blocks that this list owns.
    head: u32,
    tail: u32,
    len: usize,
    order: Order,
    _owns: PhantomData<T>,
}

/// A list of pages.
pub type PageList = List<Page>;
/// A list of blocks of one order.
pub type BlockList = List<Block>;

impl<T: Owned> List<T> {
    /// An empty list.
    #[inline]
    pub const fn new() -> Self {
        Self { head: 0, tail: 0, len: 0, order: Order::ZERO, _owns: PhantomData }
    }
    /// How many blocks are on it.
    #[inline]
    pub const fn len(&self) -> usize {
        self.len
    }
    /// Is there none?
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }
    /// The order of its blocks.
    pub const fn order(&self) -> Order {
        self.order
    }

    /// An empty list of this order, whose blocks may be appended to this one.
    #[inline]
    pub(crate) fn empty_like(&self, order: Order) -> Result<Self, Error> {
        if self.len > 0 && self.order != order {
            return Err(Invalid::ListOrder { list: self.order.get(), other: order.get() }.into());
        }
        Ok(Self { order, ..Self::new() })
    }

    /// Adds the blocks of a batch, which belong to nobody, at the tail.
    #[inline]
    pub(crate) fn push_batch(&mut self, arena: &Arena, batch: &Batch) {
        let pfns = batch.as_slice();
        let (Some(&first), Some(&last)) = (pfns.first(), pfns.last()) else { return };
        self.link_behind_tail(first);
        let mut i = 0;
        while i < pfns.len() - 1 {
            if i + GROUP < pfns.len() && is_run(&pfns[i..i + GROUP]) {
                arena.link_group(pfns[i]);
                i += GROUP - 1; // The last of the group is linked with its successor, whoever that is.
            }
            arena.link(pfns[i]).store(pfns[i + 1], Relaxed);
            i += 1;
        }
        self.tail = last;
        self.len += pfns.len();
    }

    #[inline]
    fn link_behind_tail(&mut self, first: u32) {
        if self.len == 0 {
            self.head = first;
        } else {
            registry::by_pfn(Pfn::new(self.tail)).link(self.tail).store(first, Relaxed);
        }
    }

    /// Adds a block at the tail.
    ///
    /// # Panics
    /// If the list holds blocks of another order: they could not be told apart any more.
    pub fn push(&mut self, block: T) {
        let word = block.into_word();
        let (addr, order) = (addr_of_word(word), order_of_word(word));
        let Some(arena) = registry::by_address(addr) else { panic!("a block at {addr:#x} outside of every arena") };
        if self.len > 0 && self.order != order {
            panic!("a block of order {} on a list of order {}", order.get(), self.order.get());
        }
        self.order = order;
        let pfn = arena.pfn_of(addr);
        self.link_behind_tail(pfn);
        self.tail = pfn;
        self.len += 1;
    }

    /// Takes the block at the head.
    pub fn pop(&mut self) -> Option<T> {
        if self.len == 0 {
            return None;
        }
        let arena = registry::by_pfn(Pfn::new(self.head));
        let word = arena.addr_of(self.head) | usize::from(self.order.get());
        self.len -= 1;
        if self.len > 0 {
            self.head = arena.link(self.head).load(Relaxed);
        }
        // SAFETY: the list owned the block, and gives it away.
        Some(unsafe { T::from_word(word) })
    }

    /// Moves all blocks of `other` to the tail of this list, at a cost that does not depend on their number.
    ///
    /// # Errors
    /// [`Invalid::ListOrder`] if both hold blocks, of different orders; nothing has changed then.
    #[inline]
    pub fn append(&mut self, other: &mut Self) -> Result<(), Error> {
        if other.len == 0 {
            return Ok(());
        }
        if self.len == 0 {
            core::mem::swap(self, other);
            return Ok(());
        }
        self.empty_like(other.order)?;
        self.link_behind_tail(other.head);
        self.tail = other.tail;
        self.len += core::mem::take(&mut other.len);
        Ok(())
    }

    /// Frees all of its blocks in bulk. Returns how many that were.
    #[inline]
    pub fn clear(&mut self) -> usize {
        let n = core::mem::take(&mut self.len);
        if n == 0 {
            return 0;
        }
        let mut returning = Returning::new(n);
        let mut arena = registry::by_pfn(Pfn::new(self.head));
        let (mut pfn, mut left) = (self.head, n);
        while left > 0 {
            if !arena.has_pfn(pfn) {
                arena = registry::by_pfn(Pfn::new(pfn));
            }
            // Neighbours stand in order more often than not: eight links are compared at once, so that the
            // processor need not wait for each to know the next.
            if left > GROUP
                && self.order == Order::ZERO
                && let Some(next) = arena.is_linked_group(pfn)
                && returning.give_group_of(arena, pfn)
            {
                (pfn, left) = (next, left - GROUP);
                continue;
            }
            let next = if left > 1 { arena.link(pfn).load(Relaxed) } else { pfn };
            returning.give(arena.addr_of(pfn) | usize::from(self.order.get()));
            (pfn, left) = (next, left - 1);
        }
        returning.finish().freed
    }
}

impl<T: Owned> Default for List<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T: Owned> Drop for List<T> {
    #[inline]
    fn drop(&mut self) {
        self.clear();
    }
}

impl<T: Owned> Iterator for List<T> {
    type Item = T;
    /// Takes the block at the head, as [`pop`](List::pop).
    fn next(&mut self) -> Option<T> {
        self.pop()
    }
    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.len, Some(self.len))
    }
}

impl<T: Owned> Extend<T> for List<T> {
    fn extend<I: IntoIterator<Item = T>>(&mut self, blocks: I) {
        blocks.into_iter().for_each(|block| self.push(block));
    }
}
