//! Finds a pool by its number, so that a dropped block returns to its pool (C6.5).
//!
//! A pool has its number until the pool and all its blocks are gone; then another pool may get the number. A pool that
//! was dropped with blocks out keeps its number for ever.
//!
//! # Locks
//! Each number has a lock. A drop of a block holds it for reading, and the drop of a pool for writing, so no call is
//! inside a pool that is freed (D5). It comes before the stack's lock. Code that reads a pool's statistics through a weak
//! reference holds it for reading too: the pool's last reference is then never the reader's.
use crate::device::DeviceError;
use crate::process::{AtomicStamp, no_fork};
use core::ptr;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicPtr, AtomicU64};
use std::sync::{Arc, PoisonError, RwLock, RwLockWriteGuard};

/// The number of pool numbers, including 0, which no pool has.
const NUMBERS: usize = 1 << 16;

/// A bit for each number that a pool has. In a forked child the numbers of the parent's pools stay taken, so that it
/// never waits for the lock of one of them.
static TAKEN: [AtomicU64; NUMBERS / 64] = [const { AtomicU64::new(0) }; NUMBERS / 64];
static POOLS: [AtomicPtr<Entry>; NUMBERS] = [const { AtomicPtr::new(ptr::null_mut()) }; NUMBERS];

/// What a dropped block calls in its pool.
pub(super) trait TakesBack: Send + Sync {
    /// Frees a block by its word, and reports misuse.
    fn take_back(&self, word: u64);
}

/// The pool of a number. Made for the number's first pool, and kept for the next one.
struct Entry {
    /// The process of the pool.
    stamp: AtomicStamp,
    /// Read while a dropped block is freed; written when the pool is dropped, which then knows how many of its blocks
    /// are out.
    pool: RwLock<Option<Arc<dyn TakesBack>>>,
}

/// A pool's number. Dropping it makes the number free.
#[derive(Debug)]
pub(super) struct Number(u16);

impl Number {
    /// Takes a free number.
    pub(super) fn take() -> Result<Self, DeviceError> {
        take_from(&TAKEN).map(Self).ok_or_else(|| DeviceError::Unavailable {
            what: format!("this process has {} pools, the most that it can number", NUMBERS - 1),
            next: "destroy some, or reuse pools",
        })
    }

    pub(super) fn get(&self) -> u16 {
        self.0
    }
}

impl Drop for Number {
    fn drop(&mut self) {
        // Release pairs with the Acquire in `take`.
        TAKEN[usize::from(self.0) / 64].fetch_and(!(1 << (self.0 % 64)), Release);
    }
}

/// Sets a bit that is not set, and is not bit 0. Returns its number.
fn take_from(words: &[AtomicU64]) -> Option<u16> {
    for (at, word) in words.iter().enumerate() {
        let reserved = u64::from(at == 0);
        let mut taken = word.load(Relaxed) | reserved;
        while taken != u64::MAX {
            let bit = 1 << taken.trailing_ones();
            // Acquire pairs with the Release in `Number::drop`: the entry is as the last pool left it.
            taken = word.fetch_or(bit, Acquire) | reserved;
            if taken & bit == 0 {
                return Some((at * 64) as u16 + bit.trailing_zeros() as u16);
            }
        }
    }
    None
}

fn entry(number: u16) -> Option<&'static Entry> {
    // Acquire pairs with the Release in `enter`.
    let entry = POOLS[usize::from(number)].load(Acquire);
    // SAFETY: null, or from a box that is never freed.
    unsafe { entry.as_ref() }
}

/// Enters a new pool of this process under its number, so that dropped blocks find it.
pub(super) fn enter(number: &Number, pool: Arc<dyn TakesBack>) {
    let number = number.get();
    let entry = entry(number).unwrap_or_else(|| {
        let entry = Box::leak(Box::new(Entry { stamp: AtomicStamp::here(), pool: RwLock::new(None) }));
        // Release pairs with the Acquire in `entry`. No other thread stores here, since the number is this pool's.
        POOLS[usize::from(number)].store(entry, Release);
        entry
    });
    entry.stamp.renew();
    *entry.pool.write().unwrap_or_else(PoisonError::into_inner) = Some(pool);
}

/// Locks a pool's entry, so that no dropped block is freed while the caller checks whether blocks are out. A pool that
/// is taken out of the entry is not found any more.
pub(super) fn hold(number: &Number) -> Option<RwLockWriteGuard<'static, Option<Arc<dyn TakesBack>>>> {
    Some(entry(number.get())?.pool.write().unwrap_or_else(PoisonError::into_inner))
}

/// Frees a dropped block to the pool with this number, unless the pool is that of a forked child's parent.
pub(super) fn take_back(number: u16, word: u64) {
    let Some(entry) = entry(number).filter(|entry| !entry.stamp.is_inherited()) else { return };
    if let Some(pool) = &*entry.pool.read().unwrap_or_else(PoisonError::into_inner) {
        pool.take_back(word);
    }
}

/// Reads something of the pool that had this number, which may be gone; then the answer is none. While `read` runs, the
/// number's entry has the pool, so a reference that `read` makes and drops is not the last one. If another pool has the
/// number by now, `read` finds its own pool gone.
pub(super) fn with<R>(number: u16, read: impl FnOnce() -> Option<R>) -> Option<R> {
    let _held = no_fork(); // The number may be free already, and a child that takes it must find the lock free.
    let entry = entry(number)?;
    if entry.stamp.is_inherited() {
        return read(); // Who held the lock is not here, and no pool of the parent is freed here.
    }
    let pool = entry.pool.read().unwrap_or_else(PoisonError::into_inner);
    pool.as_ref().and_then(|_| read())
}

#[cfg(test)]
mod tests {
    use super::{Number, take_from};
    use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

    #[test]
    fn each_number_is_taken_once_and_again_after_it_is_freed() {
        let words = [const { AtomicU64::new(0) }; 2];
        assert!((1..128).all(|number| take_from(&words) == Some(number)));
        assert_eq!(take_from(&words), None);
        words[1].fetch_and(!(1 << 5), Relaxed);
        assert_eq!([take_from(&words), take_from(&words)], [Some(69), None]);
        let (one, other) = (Number::take().unwrap(), Number::take().unwrap());
        assert!(one.get() != other.get() && one.get() != 0 && other.get() != 0);
    }
}
