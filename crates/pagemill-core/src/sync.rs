//! One door to the atomics, so that loom can drive every interleaving of what is built on them.
#[cfg(not(loom))]
pub use core::sync::atomic::{AtomicU32, AtomicU64};
#[cfg(not(loom))]
pub(crate) use core::sync::atomic::{AtomicUsize, Ordering, fence};
#[cfg(loom)]
pub use loom::sync::atomic::{AtomicU32, AtomicU64};
#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicUsize, Ordering, fence};

/// Tells the processor, or loom's scheduler, that this thread waits for another.
#[inline]
pub(crate) fn spin_wait() {
    #[cfg(not(loom))]
    core::hint::spin_loop();
    #[cfg(loom)]
    loom::thread::yield_now();
}

/// What `word` holds in the one order of all sequentially consistent operations. loom knows no such order for loads,
/// so there a read-modify-write, which always sees the latest, stands in.
#[inline]
pub(crate) fn latest_u32(word: &AtomicU32) -> u32 {
    #[cfg(not(loom))]
    return word.load(Ordering::SeqCst);
    #[cfg(loom)]
    return word.fetch_or(0, Ordering::SeqCst);
}

/// As [`latest_u32`].
#[inline]
pub(crate) fn latest_u64(word: &AtomicU64) -> u64 {
    #[cfg(not(loom))]
    return word.load(Ordering::SeqCst);
    #[cfg(loom)]
    return word.fetch_or(0, Ordering::SeqCst);
}
