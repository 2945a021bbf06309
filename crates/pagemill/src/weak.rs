//! Knowing an allocator without keeping it open.
use crate::allocator::{Allocator, Owner};
use std::sync::Weak;

/// A handle that does not keep its allocator open: for what shows an allocator, or caches something of it, while others use it.
///
/// ```
/// let allocator = pagemill::Allocator::builder().pages(64).build()?;
/// let weak = allocator.downgrade();
/// assert!(weak.upgrade().is_some() && !weak.is_closed());
/// allocator.close().unwrap();
/// assert!(weak.upgrade().is_none() && weak.is_closed());
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct WeakAllocator(Weak<Owner>);

impl Allocator {
    /// A handle that does not keep the allocator open.
    pub fn downgrade(&self) -> WeakAllocator {
        WeakAllocator(self.weak())
    }
}

impl WeakAllocator {
    /// The allocator, unless its last handle is gone. While the result lives, it keeps the allocator open.
    pub fn upgrade(&self) -> Option<Allocator> {
        Some(Allocator::from_owner(self.0.upgrade()?))
    }
    /// The last handle of the allocator is gone.
    pub fn is_closed(&self) -> bool {
        self.0.strong_count() == 0
    }
}
