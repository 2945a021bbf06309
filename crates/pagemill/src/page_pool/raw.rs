//! Pages of a pool as raw pointers, for C.
//!
//! While a page is a raw pointer its frame's state says that it is a pool's, and its frame's link names the pool: no other pool takes it up,
//! and nothing frees it. The pool counts it as out. So a page that is taken up keeps what the pool shares alive (P2), also when the consumer
//! has ended.
use super::page::PoolPage;
use super::pool::PagePool;
use super::shared::SharedPtr;
use crate::free::{give_away_pooled, take_up_pooled};
use crate::handle::Owned;
use crate::handle::sealed::Word as _;
use crate::mempool::Source;
use crate::word::{addr_of_word, order_of_word};
use core::fmt;
use pagemill_core::Misuse;

/// Leads from the raw pointers of a pool's pages to the pool: see [`PagePool::home`]. It keeps nothing of the pool, and any thread may use a
/// copy.
pub struct PagePoolHome<S: Source> {
    shared: SharedPtr<S>,
    id: u32,
}

impl<S: Source> Clone for PagePoolHome<S> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<S: Source> Copy for PagePoolHome<S> {}
// SAFETY: it leads to what handles lead to, and only where `from_raw` makes one.
unsafe impl<S: Source + Send + Sync> Send for PagePoolHome<S> {}
// SAFETY: as above.
unsafe impl<S: Source + Send + Sync> Sync for PagePoolHome<S> {}

/// The pool's number, as a frame's link has it.
fn number<S: Source>(shared: SharedPtr<S>) -> u32 {
    shared.get().record.id as u32
}

impl<S: Source> PagePool<S>
where
    S::Item: Owned,
{
    /// Where raw pointers of this pool's pages go back to.
    ///
    /// ```
    /// use pagemill::{Allocator, Gfp, PagePool, PoolPage};
    /// let mut pool = PagePool::pages(&Allocator::builder().pages(256).build()?);
    /// let home = pool.home();
    /// let page = PoolPage::into_raw(pool.alloc(Gfp::NOWAIT)?);
    /// // SAFETY: this code owns the page. The first and the last call are deliberate misuse.
    /// unsafe {
    ///     assert!(pagemill::free_raw(page, pagemill::Order::ZERO).is_err()); // The pool has it.
    ///     pool.put(home.from_raw(page)?);
    ///     assert!(home.from_raw(page).is_err());
    /// }
    /// assert_eq!(pool.in_flight(), 0);
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn home(&self) -> PagePoolHome<S> {
        let shared = self.shared();
        PagePoolHome { shared, id: number(shared) }
    }
}

impl<S: Source> PoolPage<S>
where
    S::Item: Owned,
{
    /// Gives up ownership of a page and returns a pointer, for C. It stays the pool's, and is out until [`PagePoolHome::from_raw`] takes
    /// ownership again.
    ///
    /// This is no method, since it would hide one of the page.
    pub fn into_raw(this: Self) -> *mut u8 {
        let id = number(this.shared);
        let word = this.into_item().into_word();
        let addr = addr_of_word(word);
        give_away_pooled(addr, order_of_word(word), id);
        core::ptr::with_exposed_provenance_mut(addr)
    }
}

impl<S: Source> PagePoolHome<S>
where
    S::Item: Owned,
{
    /// Takes ownership of a page again that was handed over as a pointer, on any thread, also when the pool has ended.
    ///
    /// # Errors
    /// [`Misuse`]: the pointer is not that of a page of this pool which is out as a pointer. Nothing was changed in this case.
    ///
    /// # Safety
    /// The pointer came from [`PoolPage::into_raw`], and nothing else uses it. A second call with the same pointer is refused, as long as the
    /// page has not become a raw pointer of the pool again. (A pool made four billion pools later has the same number.)
    pub unsafe fn from_raw(self, ptr: *mut u8) -> Result<PoolPage<S>, Misuse> {
        let order = take_up_pooled(ptr.addr(), self.id)?;
        let word = ptr.expose_provenance() | usize::from(order.get());
        // SAFETY: the block has this order, was the pool's, and nobody else owns it now. It is on the pool's count, so that its shared part
        // exists (P2).
        Ok(PoolPage::new(unsafe { S::Item::from_word(word) }, self.shared))
    }
}

impl<S: Source> fmt::Debug for PagePoolHome<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the home of pages of pool {}", self.id)
    }
}
