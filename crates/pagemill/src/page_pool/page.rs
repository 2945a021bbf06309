//! The handle of a page, and what a pool's consumer and its handles share.
use super::ring::Ring;
use crate::handle::Page;
use crate::mempool::{PageSource, Source};
use crate::sync::{AtomicU64, AtomicUsize, Stamp, fence};
use core::fmt;
use core::mem::ManuallyDrop;
use core::ops::{Deref, DerefMut};
use core::ptr::NonNull;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// Pages that one refill moves, as `PP_ALLOC_CACHE_REFILL`; and that one section of the ring takes.
pub(super) const REFILL: usize = 64;

/// What the consumer and the handles share. It ends with the last one taken off `count`.
pub(super) struct Shared<S: Source> {
    pub(super) source: S,
    pub(super) ring: Ring<S::Item>,
    /// One for each page that is not with the source, and one each for the consumer and for an [`Ending`](super::Ending).
    pub(super) count: AtomicUsize,
    pub(super) ring_full: AtomicU64,
    pub(super) stamp: Stamp,
}

/// A counted pointer: whoever has one has something on the count.
pub(super) struct SharedPtr<S: Source>(NonNull<Shared<S>>);

impl<S: Source> PartialEq for SharedPtr<S> {
    #[inline]
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl<S: Source> Clone for SharedPtr<S> {
    #[inline]
    fn clone(&self) -> Self {
        *self
    }
}
impl<S: Source> Copy for SharedPtr<S> {}

impl<S: Source> SharedPtr<S> {
    /// With one on the count, for the consumer.
    pub(super) fn new(source: S, slots: usize) -> Self {
        let (ring, count, ring_full) = (Ring::new(slots), AtomicUsize::new(1), AtomicU64::new(0));
        Self(NonNull::from(Box::leak(Box::new(Shared { source, ring, count, ring_full, stamp: Stamp::here() }))))
    }

    #[inline]
    pub(super) fn get(&self) -> &Shared<S> {
        // SAFETY: whoever has the pointer has something on the count (P2).
        unsafe { self.0.as_ref() }
    }

    /// Takes `n` off the count. The pointer must not be used afterwards for what was counted by them.
    pub(super) fn take_off(self, n: usize) {
        // Release pairs with the Acquire of the last one: everything that was done with it is done.
        if n > 0 && self.get().count.fetch_sub(n, Release) == n {
            fence(Acquire);
            // SAFETY: from `Box::leak` in `new`, and nothing is on the count any more.
            drop(unsafe { Box::from_raw(self.0.as_ptr()) });
        }
    }

    /// Ends items: they go back to the source, and off the count, also if the source unwinds. What it leaves in the slots
    /// is dropped.
    pub(super) fn end_bulk(self, slots: &mut [Option<S::Item>]) {
        struct TakesOff<S: Source>(SharedPtr<S>, usize);
        impl<S: Source> Drop for TakesOff<S> {
            fn drop(&mut self) {
                self.0.take_off(self.1);
            }
        }
        let off = TakesOff(self, slots.iter().filter(|slot| slot.is_some()).count());
        self.get().source.free_bulk(slots);
        slots.fill_with(|| None);
        drop(off);
    }

    /// Returns the items in the slots, at most [`REFILL`]: to the ring, and to the source what it has no room for. In a forked
    /// child all go to the source, so that whatever is reserved in its ring and not there is lost.
    fn give_back(self, slots: &mut [Option<S::Item>]) {
        if self.get().stamp.is_inherited() {
            return self.end_bulk(slots);
        }
        let mut left = slots.iter().filter(|slot| slot.is_some()).count();
        let mut items = slots.iter_mut().filter(|slot| slot.is_some());
        while left > 0 {
            let next = || match items.next().and_then(Option::take) {
                Some(item) => item,
                None => unreachable!("the ring asks for no more items than there are"),
            };
            // SAFETY: the items that are still here are on the count (P2).
            match unsafe { Ring::push(&raw const (*self.0.as_ptr()).ring, left, next) } {
                // The pointer is used no more: the items may be gone, and the pool with them (P2).
                Some(count) if count == left => return,
                Some(count) if count > 0 => left -= count,
                is_full => {
                    if is_full.is_some() {
                        self.get().ring_full.fetch_add(left as u64, Relaxed);
                    }
                    return self.end_bulk(slots);
                }
            }
        }
    }
}

/// A page of a [`PagePool`](super::PagePool), or whatever else its source makes. It goes back to its pool when it is dropped, on any thread.
///
/// It dereferences to the page. It has two words, and so has its `Option`. A program that puts another page in its place
/// (`mem::swap`) gives that one to the pool, which does not look where it comes from.
///
/// ```
/// use pagemill::{Allocator, Gfp, PagePool, PoolPage};
/// let mut pool = PagePool::pages(&Allocator::builder().pages(256).build()?);
/// let mut page: PoolPage = pool.alloc(Gfp::NOWAIT)?;
/// page[0] = 1;
/// assert_eq!(size_of::<Option<PoolPage>>(), 2 * size_of::<usize>());
/// # Ok::<(), pagemill::Error>(())
/// ```
pub struct PoolPage<S: Source = PageSource<Page>> {
    item: ManuallyDrop<S::Item>,
    pub(super) shared: SharedPtr<S>,
}

impl<S: Source> PoolPage<S> {
    #[inline]
    pub(super) fn new(item: S::Item, shared: SharedPtr<S>) -> Self {
        Self { item: ManuallyDrop::new(item), shared }
    }

    /// The item, which is still on the count.
    #[inline]
    pub(super) fn into_item(self) -> S::Item {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is not dropped and not used again.
        unsafe { ManuallyDrop::take(&mut this.item) }
    }

    /// Takes the page out of its pool for good: an ordinary page from now on, which the pool does not count any more
    /// (C7.5).
    ///
    /// This is no method, since it would hide a method of the page.
    ///
    /// ```
    /// use pagemill::{Allocator, Gfp, Page, PagePool, PoolPage};
    /// let mut pool = PagePool::pages(&Allocator::builder().pages(256).build()?);
    /// let page: Page = PoolPage::release(pool.alloc(Gfp::NOWAIT)?);
    /// assert_eq!(pool.in_flight(), 0);
    /// # drop(page);
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn release(this: Self) -> S::Item {
        let shared = this.shared;
        let item = this.into_item();
        shared.take_off(1);
        item
    }

    /// Returns the pages in the slots, and empties the slots: up to 64 of one pool in one section of its ring. Returns how
    /// many there were. For threads other than the consumer; that one has [`PagePool::put_bulk`](super::PagePool::put_bulk).
    ///
    /// ```
    /// use pagemill::{Allocator, Gfp, PagePool, PoolPage};
    /// let mut pool = PagePool::pages(&Allocator::builder().pages(256).build()?);
    /// let mut pages = [const { None }; 32];
    /// pool.alloc_bulk(Gfp::NOWAIT, &mut pages)?;
    /// std::thread::scope(|scope| scope.spawn(|| PoolPage::put_bulk(&mut pages)).join()).unwrap();
    /// assert_eq!(pool.stats().ring, 32);
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn put_bulk(slots: &mut [Option<Self>]) -> usize {
        let mut pages = slots.iter_mut().filter_map(Option::take).peekable();
        let mut count = 0;
        while let Some(first) = pages.next() {
            let shared = first.shared;
            let mut items = [const { None }; REFILL];
            items[0] = Some(first.into_item());
            let mut held = 1;
            while held < REFILL
                && let Some(page) = pages.next_if(|page| page.shared == shared)
            {
                items[held] = Some(page.into_item());
                held += 1;
            }
            count += held;
            shared.give_back(&mut items[..held]);
        }
        count
    }
}

impl<S: Source> Drop for PoolPage<S> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: taken once, here: whatever else takes it forgets the handle.
        let item = unsafe { ManuallyDrop::take(&mut self.item) };
        self.shared.give_back(&mut [Some(item)]);
    }
}

// SAFETY: it has its item, and shares the rest as the pool does.
unsafe impl<S: Source + Send + Sync> Send for PoolPage<S> {}
// SAFETY: a shared reference leads to a shared reference of the item, and to nothing else.
unsafe impl<S: Source + Send + Sync> Sync for PoolPage<S> where S::Item: Sync {}

impl<S: Source> Deref for PoolPage<S> {
    type Target = S::Item;
    #[inline]
    fn deref(&self) -> &S::Item {
        &self.item
    }
}

impl<S: Source> DerefMut for PoolPage<S> {
    #[inline]
    fn deref_mut(&mut self) -> &mut S::Item {
        &mut self.item
    }
}

impl<S: Source> fmt::Debug for PoolPage<S>
where
    S::Item: fmt::Debug,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.item.fmt(f)
    }
}

const _: () = assert!(size_of::<Option<PoolPage>>() == 2 * size_of::<usize>());
