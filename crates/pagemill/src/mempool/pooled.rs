//! An element that goes back to its pool when it is dropped (C5.7).
//!
//! A handle is an element and a pointer to its pool. The pool's raw forms deliver plain elements, for programs that count
//! nanoseconds or keep arrays of them.
use super::pool::Mempool;
use super::source::Source;
use super::want::{Array, Want, empty};
use crate::bulk::{Bulk, Exact, Request};
use crate::error::{Error, InvalidRequest};
use core::fmt;
use core::mem::ManuallyDrop;
use core::ops::{Deref, DerefMut};
use core::ptr;
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::Gfp;
use pagemill_os::Batch;
use std::sync::Arc;

/// A pointer to a pool: `&Mempool<S>` or `Arc<Mempool<S>>`, or any other.
///
/// It is implemented for all pointers to pools, so a program never implements it.
pub trait PoolRef: Deref<Target = Mempool<Self::Source>> {
    /// The pool's source.
    type Source: Source;
}

impl<S: Source, P: Deref<Target = Mempool<S>>> PoolRef for P {
    type Source = S;
}

/// An element of a [`Mempool`]. It goes back to its pool when it is dropped, on whatever way: an early `?`, a panic, a
/// cancelled future (C5.7).
///
/// It dereferences to the element. `P` is the pointer to the pool: [`alloc`](Mempool::alloc) borrows the pool, and
/// [`alloc_owned`](Mempool::alloc_owned) keeps it alive by an `Arc`. The handle of a [`Page`](crate::Page) has two
/// words, and so has its `Option`.
///
/// ```
/// use pagemill::{Allocator, Bulk, Gfp, Mempool, PageMempool, Pooled};
/// let pool: PageMempool = Mempool::pages(&Allocator::builder().pages(64).build()?, 16)?;
/// let mut page = pool.alloc(Gfp::NOIO)?;
/// page[0] = 7;
/// assert_eq!(pool.stats().out, 1);
/// drop(page);
/// assert_eq!(pool.stats().out, 0);
///
/// let mut pages: [Option<Pooled<&PageMempool>>; 16] = [const { None }; 16];
/// pool.alloc_bulk_array(Bulk::exact(16).gfp(Gfp::NOIO), &mut pages)?;
/// assert_eq!(pool.free_bulk(&mut pages), 16); // In one section; dropping the array does it one by one.
/// assert_eq!(size_of::<Option<Pooled<&PageMempool>>>(), 2 * size_of::<usize>());
/// # Ok::<(), pagemill::Error>(())
/// ```
pub struct Pooled<P: PoolRef> {
    item: ManuallyDrop<<P::Source as Source>::Item>,
    pool: ManuallyDrop<P>,
}

impl<P: PoolRef> Pooled<P> {
    pub(super) fn new(pool: P, item: <P::Source as Source>::Item) -> Self {
        Self { item: ManuallyDrop::new(item), pool: ManuallyDrop::new(pool) }
    }

    /// The element and the pointer, without a free.
    fn into_parts(self) -> (P, <P::Source as Source>::Item) {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is not dropped and not used again, so each part is taken once.
        unsafe { (ManuallyDrop::take(&mut this.pool), ManuallyDrop::take(&mut this.item)) }
    }

    /// Takes the element out of its pool for good. It is no longer counted as out, and the pool does not expect it back.
    /// If it was one of the reserve, the reserve lacks it until another element is freed.
    ///
    /// This is no method, since it would hide a method of the element.
    ///
    /// ```
    /// use pagemill::{Allocator, Gfp, Mempool, Page, Pooled};
    /// let pool = Mempool::pages(&Allocator::builder().pages(64).build()?, 16)?;
    /// let page: Page = Pooled::leave(pool.alloc(Gfp::NOIO)?);
    /// pool.close().unwrap(); // No element is out.
    /// # drop(page);
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn leave(this: Self) -> <P::Source as Source>::Item {
        let (pool, item) = this.into_parts();
        pool.note_left();
        item
    }

    /// The pool that it goes back to.
    pub fn pool(this: &Self) -> &Mempool<P::Source> {
        &this.pool
    }
}

impl<P: PoolRef> Drop for Pooled<P> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: both are taken once, here: whatever else takes them forgets the handle.
        let (pool, item) = unsafe { (ManuallyDrop::take(&mut self.pool), ManuallyDrop::take(&mut self.item)) };
        pool.free_raw(item);
    }
}

impl<P: PoolRef> Deref for Pooled<P> {
    type Target = <P::Source as Source>::Item;
    #[inline]
    fn deref(&self) -> &Self::Target {
        &self.item
    }
}

impl<P: PoolRef> DerefMut for Pooled<P> {
    #[inline]
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.item
    }
}

impl<P: PoolRef> fmt::Debug for Pooled<P>
where
    <P::Source as Source>::Item: fmt::Debug,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.item.fmt(f)
    }
}

impl<S: Source> Mempool<S> {
    /// Allocates one element.
    ///
    /// # Errors
    /// [`Error::Exhausted`] if `gfp` does not wait, and neither the source nor the reserve has an element.
    #[inline]
    pub fn alloc(&self, gfp: Gfp) -> Result<Pooled<&Self>, Error> {
        Ok(Pooled::new(self, self.alloc_raw(gfp)?))
    }

    /// The same with a handle that keeps the pool alive, so that a task or a thread of its own can have it.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    ///
    /// ```
    /// use pagemill::{Allocator, Gfp, Mempool};
    /// use std::sync::Arc;
    /// let pool = Arc::new(Mempool::pages(&Allocator::builder().pages(64).build()?, 16)?);
    /// let mut page = pool.alloc_owned(Gfp::NOIO)?;
    /// std::thread::spawn(move || page[0] = 7).join().unwrap();
    /// assert_eq!(pool.stats().out, 0);
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    #[inline]
    pub fn alloc_owned(self: &Arc<Self>, gfp: Gfp) -> Result<Pooled<Arc<Self>>, Error> {
        Ok(Pooled::new(Arc::clone(self), self.alloc_raw(gfp)?))
    }

    /// Fills all empty slots among the first n of `slots`, where n is the request's count. The request waits for as
    /// long as its flags, timeout and [`Cancel`](crate::Cancel) allow (C5.2).
    ///
    /// # Errors
    /// As [`alloc_bulk_array_raw`](Self::alloc_bulk_array_raw). Elements that were delivered until then stay in their
    /// slots.
    pub fn alloc_bulk_array<'p>(
        &'p self,
        request: Bulk<'_, Exact, S::Item>,
        slots: &mut [Option<Pooled<&'p Self>>],
    ) -> Result<(), Error> {
        fill(self, request.request, slots)
    }

    /// The same with handles that keep the pool alive.
    ///
    /// # Errors
    /// As [`alloc_bulk_array`](Self::alloc_bulk_array).
    pub fn alloc_bulk_array_owned(
        self: &Arc<Self>,
        request: Bulk<'_, Exact, S::Item>,
        slots: &mut [Option<Pooled<Arc<Self>>>],
    ) -> Result<(), Error> {
        fill(Arc::clone(self), request.request, slots)
    }

    /// Passes n elements to `each`, where n is the request's count. Otherwise as
    /// [`alloc_bulk_array`](Self::alloc_bulk_array). Elements that `each` received belong to it, even if the call fails.
    ///
    /// # Errors
    /// As [`alloc_bulk_array`](Self::alloc_bulk_array).
    ///
    /// ```
    /// use pagemill::{Allocator, Bulk, Gfp, Mempool};
    /// let pool = Mempool::pages(&Allocator::builder().pages(64).build()?, 16)?;
    /// let mut pages = Vec::new();
    /// pool.alloc_bulk_callback(Bulk::exact(16).gfp(Gfp::NOIO), |page| pages.push(Some(page)))?;
    /// assert_eq!(pool.free_bulk(&mut pages), 16);
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn alloc_bulk_callback<'p>(
        &'p self,
        request: Bulk<'_, Exact, S::Item>,
        mut each: impl FnMut(Pooled<&'p Self>),
    ) -> Result<(), Error> {
        self.alloc_bulk_callback_raw(request, |item| each(Pooled::new(self, item)))
    }

    /// Returns the elements in the slots, up to a batch in one section (C5.5), and empties the slots. Elements of another pool
    /// go back to that one. Returns the number of elements.
    pub fn free_bulk<P: PoolRef<Source = S>>(&self, slots: &mut [Option<Pooled<P>>]) -> usize {
        let mut freed = 0;
        let mut batch = [const { None }; Batch::CAPACITY];
        for slots in slots.chunks_mut(Batch::CAPACITY) {
            for (slot, free) in slots.iter_mut().zip(&mut batch) {
                let Some(pooled) = slot.take() else { continue };
                freed += 1;
                if ptr::eq(&raw const **pooled.pool, self) {
                    *free = Some(pooled.into_parts().1);
                }
            }
            self.free_bulk_raw(&mut batch);
        }
        freed
    }

    /// An element left the pool for good. If the reserve lacks elements, the source is asked for one in its place.
    fn note_left(&self) {
        self.out.fetch_sub(1, Relaxed);
        if self.lacks.load(Relaxed) > 0
            && let Ok(Some(item)) = self.source.alloc(Bulk::exact(1).gfp(Gfp::NOWAIT))
        {
            self.out.fetch_add(1, Relaxed); // As if it had been handed out and came back.
            self.free_raw(item);
        }
    }
}

/// The array form, for handles with any pointer to the pool.
fn fill<P: PoolRef + Clone>(pool: P, request: Request<'_>, slots: &mut [Option<Pooled<P>>]) -> Result<(), Error> {
    let (n, len) = (request.most, slots.len());
    let slots = slots.get_mut(..n).ok_or(InvalidRequest::ArrayTooShort { slots: len, count: n })?;
    let missing = empty(slots);
    pool.get(request, Handles { pool: &pool, slots, missing, at: 0 })
}

/// Fills empty slots with handles. The source fills arrays of plain elements, a batch at a time, which become handles here.
struct Handles<'s, P: PoolRef> {
    pool: &'s P,
    slots: &'s mut [Option<Pooled<P>>],
    missing: usize,
    /// No slot before this index is empty.
    at: usize,
}

impl<P: PoolRef + Clone> Want<P::Source> for Handles<'_, P> {
    #[inline]
    fn missing(&self) -> usize {
        self.missing
    }
    fn ask(&mut self, pool: &Mempool<P::Source>, request: Request<'_>) -> Result<(), Error> {
        while self.missing > 0 {
            let mut plain = Plain { source: &pool.source, slots: [const { None }; Batch::CAPACITY] };
            let mut part = Array::new(&mut plain.slots[..self.missing.min(Batch::CAPACITY)]);
            let asked = part.ask(pool, request);
            let left = Want::<P::Source>::missing(&part);
            plain.slots.iter_mut().filter_map(Option::take).for_each(|item| self.put(item));
            asked?;
            if left > 0 {
                break;
            }
        }
        Ok(())
    }
    #[inline]
    fn put(&mut self, item: <P::Source as Source>::Item) {
        while self.slots[self.at].is_some() {
            self.at += 1;
        }
        self.slots[self.at] = Some(Pooled::new(self.pool.clone(), item));
        self.missing -= 1;
    }
}

/// Elements on their way from the source into handles. If the source unwinds, they go back to it.
struct Plain<'p, S: Source> {
    source: &'p S,
    slots: [Option<S::Item>; Batch::CAPACITY],
}

impl<S: Source> Drop for Plain<'_, S> {
    #[inline]
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.source.free_bulk(&mut self.slots);
        }
    }
}
