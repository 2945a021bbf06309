//! A reference to an allocator that does not keep it open.
use crate::allocator::{Allocator, Owner};
use std::sync::Weak;

/// A handle that does not keep its allocator open, for code that shows or caches something of an allocator while other
/// code uses it.
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
    /// Returns a handle that does not keep the allocator open.
    pub fn downgrade(&self) -> WeakAllocator {
        WeakAllocator(self.weak())
    }
}

impl WeakAllocator {
    /// Returns the allocator, unless its last handle was dropped. The returned handle keeps the allocator open.
    pub fn upgrade(&self) -> Option<Allocator> {
        Some(Allocator::from_owner(self.0.upgrade()?))
    }
    /// Whether the last handle was dropped.
    pub fn is_closed(&self) -> bool {
        self.0.strong_count() == 0
    }
}
