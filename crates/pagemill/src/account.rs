//! Accounts: limits on the pages of a tenant.
//!
//! A bulk request that names an account charges it once, before it takes blocks, and refunds what it did not deliver
//! (`bulk/`). An account knows no allocator. It is one atomic counter, without locks.
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use pagemill_core::PageCount;

/// A limit on pages, and how many of them are charged so far. A request that names an account is charged once, for the
/// pages that it delivers; with [`Gfp::ACCOUNT`](crate::Gfp::ACCOUNT) it must name one. Freeing pages does not credit the
/// account, since any thread may free: the program calls [`uncharge`](Self::uncharge) when pages are returned.
///
/// ```
/// use pagemill::{Account, Allocator, Bulk, Gfp, PageCount, PageList, Shortfall, Why};
/// let tenant = Account::new(PageCount::new(100));
/// let request = Bulk::up_to(64).gfp(Gfp::KERNEL | Gfp::ACCOUNT).account(&tenant);
/// let mut list = PageList::new();
/// Allocator::global().alloc_pages_bulk_list(request, &mut list)?;
/// let second = Allocator::global().alloc_pages_bulk_list(request, &mut list)?;
/// assert_eq!((second.blocks, second.shortfall), (36, Some(Shortfall { missing: 28, why: Why::Account })));
/// tenant.uncharge(PageCount::new(list.clear()));
/// assert_eq!(tenant.charged().get(), 0);
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Debug)]
pub struct Account {
    limit: usize,
    charged: AtomicUsize,
}

impl Account {
    /// An account with a limit of `limit` pages.
    pub const fn new(limit: PageCount) -> Self {
        Self { limit: limit.get(), charged: AtomicUsize::new(0) }
    }
    /// The number of pages charged now.
    pub fn charged(&self) -> PageCount {
        PageCount::new(self.charged.load(Relaxed))
    }
    /// Takes `pages` off the charge, but never below 0.
    pub fn uncharge(&self, pages: PageCount) {
        let lower = |charged: usize| Some(charged.saturating_sub(pages.get()));
        let _ = self.charged.fetch_update(Relaxed, Relaxed, lower);
    }
    /// Whether the account has no room for a block of this many pages.
    pub(crate) fn is_full(&self, pages: usize) -> bool {
        self.charged.load(Relaxed) + pages > self.limit
    }
    /// Charges as many of `pages` as the limit allows, in multiples of `unit`. Returns how many were charged.
    pub(crate) fn charge_up_to(&self, pages: usize, unit: usize) -> usize {
        let granted = |charged: usize| pages.min(self.limit.saturating_sub(charged)) / unit * unit;
        match self.charged.fetch_update(Relaxed, Relaxed, |charged| Some(charged + granted(charged))) {
            Ok(before) | Err(before) => granted(before),
        }
    }
}
