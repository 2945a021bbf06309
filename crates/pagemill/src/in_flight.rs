//! A guard for memory that the kernel or a device may still write to (C6.5).
//!
//! It owns the memory and gives no access to it. Dropping it leaks the memory: a page that is handed out again while a
//! device writes to it is somebody else's corrupted data. It stands beside the handles, takes no lock, and works for
//! any of them.
use core::fmt;
use core::mem::ManuallyDrop;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The number of guards that were dropped, in this process.
static LEAKED: AtomicU64 = AtomicU64::new(0);

/// Memory that the kernel or a device may still write to: a [`Page`](crate::Page), a [`Run`](crate::Run), a
/// [`DmaBlock`](crate::DmaBlock), a pool's handle, or a vector of these.
///
/// Take its address, put it into a guard, and then start the transfer. While the guard exists, nothing hands the memory
/// out again. [`done`](Self::done) returns it after the completion has come. A guard that is dropped, by an early `?`
/// for example, leaks its memory, since it cannot know whether the transfer has ended; [`leaked`](Self::leaked) counts
/// that.
///
/// ```
/// use pagemill::{Allocator, Gfp, InFlight};
/// let mut page = Allocator::global().alloc_page(Gfp::KERNEL | Gfp::ZERO)?;
/// let at = page.as_mut_ptr();
/// let page = InFlight::new(page);
/// assert_eq!(format!("{page:?}"), "memory in flight");
/// // A device would write here, on its own time.
/// // SAFETY: the page is in flight, so no reference to it exists, and it is not handed out again.
/// unsafe { at.write(7) };
/// // SAFETY: the write has ended.
/// let page = unsafe { page.done() };
/// assert_eq!(page[0], 7);
/// # Ok::<(), pagemill::Error>(())
/// ```
#[must_use = "dropping it leaks the memory"]
pub struct InFlight<T>(ManuallyDrop<T>);

impl<T> InFlight<T> {
    /// Guards memory from now on.
    pub fn new(memory: T) -> Self {
        Self(ManuallyDrop::new(memory))
    }

    /// Returns the memory.
    ///
    /// # Safety
    /// The kernel or the device has ended all transfers to this memory: each has reported its completion, or was
    /// cancelled and the cancellation is complete.
    pub unsafe fn done(self) -> T {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is neither dropped nor used again.
        unsafe { ManuallyDrop::take(&mut this.0) }
    }
}

impl InFlight<()> {
    /// The number of guards in this process that were dropped, and leaked their memory.
    ///
    /// ```
    /// use pagemill::{Allocator, Gfp, InFlight};
    /// let before = InFlight::leaked();
    /// drop(InFlight::new(Allocator::global().alloc_page(Gfp::KERNEL)?));
    /// assert_eq!(InFlight::leaked(), before + 1);
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn leaked() -> u64 {
        LEAKED.load(Relaxed)
    }
}

impl<T> fmt::Debug for InFlight<T> {
    /// Reads none of the memory, which a device may be writing to.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("memory in flight")
    }
}

impl<T> Drop for InFlight<T> {
    fn drop(&mut self) {
        LEAKED.fetch_add(1, Relaxed);
    }
}
