//! The handle of a page.
use super::shared::{REFILL, SharedPtr};
use crate::handle::Page;
use crate::mempool::{PageSource, Source};
use core::fmt;
use core::mem::ManuallyDrop;
use core::ops::{Deref, DerefMut};

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
        let (mut count, mut rest) = (0, slots);
        while let Some((first, shared)) =
            rest.iter().enumerate().find_map(|(at, slot)| Some((at, slot.as_ref()?.shared)))
        {
            // The next pages of this pool, and holes among them.
            let (mut held, mut end) = (0, first);
            for slot in &rest[first..] {
                match slot {
                    Some(page) if page.shared == shared && held < REFILL => held += 1,
                    Some(_) => break,
                    None => {}
                }
                end += 1;
            }
            let (these, others) = rest.split_at_mut(end);
            shared.give_back(held, these[first..].iter_mut().filter_map(Option::take).map(Self::into_item));
            count += held;
            rest = others;
        }
        count
    }
}

impl<S: Source> Drop for PoolPage<S> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: taken once, here: whatever else takes it forgets the handle.
        let item = unsafe { ManuallyDrop::take(&mut self.item) };
        self.shared.give_back_one(item);
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
