//! Lists of blocks: the result of the list form of bulk requests.
//!
//! A list is a head, a tail and a length. Its links lie in the zones' side tables, four bytes a frame, so the pages
//! themselves are not touched, and joining two lists takes constant time. The list form pushes batches here
//! (`bulk/engine.rs`); [`clear`](List::clear) frees them in bulk (`free/many.rs`). It takes no lock: the list owns its
//! blocks, and with them their links.
use crate::error::{Error, InvalidRequest};
use crate::free::{FreeBatch, Source, free_all, free_page};
use crate::handle::{Block, Owned, Page};
use crate::registry;
use crate::word::{addr_of_word, order_of_word};
use crate::zone::Zone;
use core::marker::PhantomData;
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::{Order, Pfn};
use pagemill_os::Batch;

/// A list of pages, or of blocks of one order. It owns its blocks: dropping the list frees them in bulk.
///
/// ```
/// use pagemill::{Allocator, Bulk, PageList};
/// let mut list = PageList::new();
/// Allocator::global().alloc_pages_bulk_list(Bulk::up_to(3), &mut list)?;
/// let mut other = PageList::new();
/// other.push(list.pop().unwrap()).unwrap();
/// list.append(&mut other)?;
/// assert_eq!((list.len(), other.len()), (3, 0));
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Debug)]
pub struct List<T: Owned> {
    // Invariant: following `len - 1` links from `head` leads to `tail`, through blocks that this list owns.
    head: Pfn,
    tail: Pfn,
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
        Self::of_order(Order::ZERO)
    }
    /// An empty list for blocks of this order.
    pub(crate) const fn of_order(order: Order) -> Self {
        Self { head: Pfn::new(0), tail: Pfn::new(0), len: 0, order, _owns: PhantomData }
    }
    /// The number of blocks on it.
    #[inline]
    pub const fn len(&self) -> usize {
        self.len
    }
    /// Whether it holds no block.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }
    /// The order of its blocks.
    pub const fn order(&self) -> Order {
        self.order
    }

    /// Checks that blocks of this order fit on the list.
    ///
    /// # Errors
    /// [`InvalidRequest::ListOrder`].
    #[inline]
    pub(crate) fn check_order(&self, order: Order) -> Result<(), Error> {
        if self.len > 0 && self.order != order {
            return Err(InvalidRequest::ListOrder { list: self.order.get(), other: order.get() }.into());
        }
        Ok(())
    }

    /// Whether pages fit on the list.
    #[inline]
    pub(crate) fn takes_pages(&self) -> bool {
        self.len == 0 || self.order == Order::ZERO
    }

    /// Adds a page at the tail. The page has no owner yet.
    #[inline]
    pub(crate) fn push_frame(&mut self, pfn: Pfn) {
        self.order = Order::ZERO;
        self.link_behind_tail(pfn);
        self.tail = pfn;
        self.len += 1;
    }

    /// Adds the pages of a batch at the tail. They have no owner yet.
    #[inline]
    pub(crate) fn push_pages(&mut self, zone: &Zone, batch: &Batch) {
        self.order = Order::ZERO;
        self.push_batch(zone, batch);
    }

    /// Adds the blocks of a batch at the tail. They have no owner yet.
    #[inline]
    pub(crate) fn push_batch(&mut self, zone: &Zone, batch: &Batch) {
        let pfns = batch.as_pfns();
        let (Some(&first), Some(&last)) = (pfns.first(), pfns.last()) else { return };
        self.link_behind_tail(first);
        zone.link_all(pfns);
        self.tail = last;
        self.len += pfns.len();
    }

    /// Adds the blocks of a batch, before the head if the batch ends just below it in memory, else at the tail. Per-CPU
    /// lists hand out the highest batch first, each batch in ascending order.
    pub(crate) fn push_batch_in_order(&mut self, zone: &Zone, batch: &Batch) {
        let mut fresh = Self::of_order(self.order);
        fresh.push_batch(zone, batch);
        if self.len > 0 && self.head.since(fresh.tail) == self.order.frames() && zone.has_pfn(self.head) {
            core::mem::swap(self, &mut fresh);
        }
        self.join(fresh);
    }

    /// The run of neighbouring blocks at the head: its zone, its first frame, and the number of blocks.
    pub(crate) fn first_run(&self) -> Option<(&'static Zone, Pfn, usize)> {
        if self.len == 0 {
            return None;
        }
        let zone = registry::by_pfn(self.head);
        let (mut last, mut n) = (self.head, 1);
        while n < self.len {
            let next = zone.next(last);
            if next.since(last) != self.order.frames() || !zone.has_pfn(next) {
                break;
            }
            (last, n) = (next, n + 1);
        }
        Some((zone, self.head, n))
    }

    /// Splits the first `n` blocks of the [first run](Self::first_run) off the list.
    pub(crate) fn split_run(&mut self, n: usize) -> Self {
        let mut run = Self::of_order(self.order);
        if n == self.len {
            core::mem::swap(self, &mut run);
        } else if n > 0 {
            let tail = self.head.offset((n as u32 - 1) * self.order.frames());
            (run.head, run.tail, run.len) = (self.head, tail, n);
            self.head = registry::by_pfn(tail).next(tail);
            self.len -= n;
        }
        run
    }

    /// Moves all blocks of a list of the same order to the tail of this one.
    pub(crate) fn join(&mut self, mut other: Self) {
        if let Err(why) = self.append(&mut other) {
            unreachable!("both lists have one order: {why}");
        }
    }

    #[inline]
    fn link_behind_tail(&mut self, first: Pfn) {
        if self.len == 0 {
            self.head = first;
        } else {
            registry::by_pfn(self.tail).link(self.tail).store(first.as_u32(), Relaxed);
        }
    }

    /// Adds a block at the tail.
    ///
    /// # Errors
    /// Returns the block, if the list holds blocks of another order: a list stores one order for all its blocks. A page
    /// always fits on a list of pages.
    pub fn push(&mut self, block: T) -> Result<(), T> {
        let word = block.into_word();
        let (addr, order) = (addr_of_word(word), order_of_word(word));
        let Some((_, pfn)) = registry::by_address(addr) else { panic!("a block at {addr:#x} outside of every arena") };
        if self.len > 0 && self.order != order {
            // SAFETY: the word was the block's, which this call consumed just now.
            return Err(unsafe { T::from_word(word) });
        }
        self.order = order;
        self.link_behind_tail(pfn);
        self.tail = pfn;
        self.len += 1;
        Ok(())
    }

    /// Takes the block at the head off the list.
    pub fn pop(&mut self) -> Option<T> {
        if self.len == 0 {
            return None;
        }
        // SAFETY: the list owned the block, and `pop_word` takes it off.
        Some(unsafe { T::from_word(self.pop_word()) })
    }

    /// The memory of each block, from the head on.
    ///
    /// ```
    /// use pagemill::{Allocator, Bulk, PageList};
    /// let mut list = PageList::new();
    /// Allocator::global().alloc_pages_bulk_list(Bulk::exact(8), &mut list)?;
    /// list.iter_mut().enumerate().for_each(|(at, page)| page[0] = at as u8);
    /// assert_eq!(list.iter().map(|page| page[0]).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5, 6, 7]);
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        // SAFETY: the list owns the block, and is borrowed as long as the slice; mapped memory is initialised.
        self.blocks().map(|(addr, bytes)| unsafe {
            core::slice::from_raw_parts(core::ptr::with_exposed_provenance(addr), bytes)
        })
    }

    /// The same, for writing.
    pub fn iter_mut(&mut self) -> impl ExactSizeIterator<Item = &mut [u8]> {
        // SAFETY: as in `iter`; the list is borrowed exclusively, and no block is on it twice.
        self.blocks().map(|(addr, bytes)| unsafe {
            core::slice::from_raw_parts_mut(core::ptr::with_exposed_provenance_mut(addr), bytes)
        })
    }

    /// The address and size of each block, from the head on.
    fn blocks(&self) -> impl ExactSizeIterator<Item = (usize, usize)> + use<T> {
        let (mut next, bytes, len) = (self.head, self.order.bytes(), self.len);
        (0..len).map(move |at| {
            let (zone, pfn) = (registry::by_pfn(next), next);
            if at + 1 < len {
                next = zone.next(pfn);
            }
            (zone.addr_of(pfn), bytes)
        })
    }

    /// Moves all blocks of `other` to the tail of this list, in constant time.
    ///
    /// # Errors
    /// [`InvalidRequest::ListOrder`] if both lists hold blocks, of different orders. Nothing has changed in this case.
    #[inline]
    pub fn append(&mut self, other: &mut Self) -> Result<(), Error> {
        if other.len == 0 {
            return Ok(());
        }
        if self.len == 0 {
            core::mem::swap(self, other);
            return Ok(());
        }
        self.check_order(other.order)?;
        self.link_behind_tail(other.head);
        self.tail = other.tail;
        self.len += core::mem::take(&mut other.len);
        Ok(())
    }

    /// Frees all its blocks in bulk. Returns their number.
    #[inline]
    pub fn clear(&mut self) -> usize {
        let n = self.len;
        if n == 1 && self.order == Order::ZERO {
            let _ = free_page(registry::by_pfn(self.head).addr_of(self.head)); // Reported on its way, as below.
            self.len = 0;
        } else if n > 0 {
            self.clear_all();
        }
        n
    }

    #[inline(never)]
    fn clear_all(&mut self) {
        // The hook is told of misuse; `clear` does not return it.
        free_all::<false>(self, &mut None);
    }

    /// Takes the block at the head off the list, which must not be empty.
    #[inline]
    fn pop_word(&mut self) -> usize {
        let zone = registry::by_pfn(self.head);
        let word = zone.addr_of(self.head) | usize::from(self.order.get());
        self.len -= 1;
        if self.len > 0 {
            self.head = zone.next(self.head);
        }
        word
    }
}

impl<T: Owned> Source for List<T> {
    #[inline]
    fn left(&self) -> usize {
        self.len
    }

    #[inline]
    fn next(&mut self) -> Option<(usize, Order)> {
        (self.len > 0).then(|| (registry::by_pfn(self.head).addr_of(self.head), self.order))
    }

    #[inline]
    fn give(&mut self, to: &mut impl FreeBatch) {
        let zone = to.zone();
        let (mut head, mut left) = (self.head, self.len);
        while left > 0 && zone.has_pfn(head) {
            // Read the link first: once the page is given, its next owner may change it.
            let next = zone.next(head);
            if !to.give(head) {
                break;
            }
            (head, left) = (next, left - 1);
        }
        (self.head, self.len) = (head, left);
    }

    fn free_next(&mut self, free: impl FnOnce(usize, Order) -> bool) {
        let word = self.pop_word();
        free(addr_of_word(word), self.order);
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
        // A block that does not fit is freed.
        blocks.into_iter().for_each(|block| drop(self.push(block)));
    }
}

#[cfg(all(test, not(any(miri, shuttle))))]
mod tests {
    use super::*;
    use crate::{Allocator, Gfp, Memory, free_raw};
    use pagemill_core::FrameState;

    fn allocator() -> Allocator {
        Allocator::builder().memory(Memory::anonymous(8192)).cpus(1, || 0).build().unwrap()
    }

    /// A handle for a block that is free already, as if another thread had freed it at the same moment: both threads
    /// found it raw.
    fn freed_at_once(allocator: &Allocator, order: Order) -> Block {
        let ptr = allocator.alloc_pages(Gfp::KERNEL, order).unwrap().into_raw().0;
        // SAFETY: this code owns the block. Making a handle of it again is deliberate misuse.
        unsafe {
            free_raw(ptr, order).unwrap();
            allocator.drain();
            let (zone, _) = registry::by_address(ptr.addr()).unwrap();
            zone.set_state(zone.pfn_of(ptr.addr()), FrameState::raw(order));
            Block::from_raw(ptr, order).unwrap()
        }
    }

    #[test]
    fn clearing_a_list_with_a_block_that_is_free_already_ends() {
        for order in [0, 1, 3, 6, 7, 8].map(|order| Order::new(order).unwrap()) {
            for (before, after) in [(0, 0), (0, 2), (2, 0), (2, 2)] {
                let allocator = allocator();
                let take = |n| (0..n).map(|_| allocator.alloc_pages(Gfp::KERNEL, order).unwrap()).collect::<Vec<_>>();
                let (before, after, mut list) = (take(before), take(after), List::new());
                list.extend(before);
                list.push(freed_at_once(&allocator, order)).unwrap();
                list.extend(after);
                let n = list.len();
                assert_eq!((list.clear(), list.len()), (n, 0), "{order:?}");
                allocator.drain();
                if order > Order::ZERO {
                    let stats = allocator.stats();
                    assert_eq!(
                        (stats.allocated - stats.freed, allocator.validate().unwrap().free),
                        (0, 8192),
                        "{order:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_block_that_is_free_already_keeps_no_other_block_on_the_list() {
        let (one, other, order) = (allocator(), allocator(), Order::new(3).unwrap());
        let mut list = List::new();
        list.push(freed_at_once(&one, order)).unwrap();
        list.push(other.alloc_pages(Gfp::KERNEL, order).unwrap()).unwrap();
        assert_eq!(list.clear(), 2);
        assert_eq!(other.stats().allocated - other.stats().freed, 0);
        // Many pages, all of which another thread has freed.
        let mut pages = List::<Page>::new();
        one.alloc_pages_bulk_list(crate::Bulk::exact(2000), &mut pages).unwrap();
        let mut twice = List::<Page> { head: pages.head, tail: pages.tail, len: pages.len, ..List::new() };
        assert_eq!((twice.clear(), twice.len()), (2000, 0));
        one.drain();
        assert_eq!((pages.clear(), pages.len()), (2000, 0));
        let stats = one.stats();
        assert_eq!((stats.allocated - stats.freed, stats.misused > 0), (0, true));
    }
}
