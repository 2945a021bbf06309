//! Pools by their numbers, by which a block that is dropped finds its pool again (C6.5).
//!
//! A number is a pool's until the pool is gone with all of its blocks, and another's then. A pool that was dropped with blocks
//! out keeps its own for ever.
use crate::device::DeviceError;
use crate::process::AtomicStamp;
use core::ptr;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicPtr, AtomicU64};
use std::sync::{Arc, PoisonError, RwLock, RwLockWriteGuard};

/// Numbers that there are, 0 not among them.
const NUMBERS: usize = 1 << 16;

/// A bit for each number that a pool has. The child of a fork finds those taken that its parent's pools had, so that it never
/// waits for the lock of such a one.
static TAKEN: [AtomicU64; NUMBERS / 64] = [const { AtomicU64::new(0) }; NUMBERS / 64];
static POOLS: [AtomicPtr<Entry>; NUMBERS] = [const { AtomicPtr::new(ptr::null_mut()) }; NUMBERS];

/// What a block that is dropped does with its pool.
pub(super) trait TakesBack: Send + Sync {
    /// Takes a block back by its word; reports misuse on the way.
    fn take_back(&self, word: u64);
}

/// A number's pool. Made with the number's first pool, and kept for the next one.
struct Entry {
    /// The process that the pool is of.
    stamp: AtomicStamp,
    /// Read while a block goes back; written when the pool goes, so that it knows how many of its blocks are out.
    pool: RwLock<Option<Arc<dyn TakesBack>>>,
}

/// A pool's number: given back when this is dropped.
#[derive(Debug)]
pub(super) struct Number(u16);

impl Number {
    /// One that no pool has.
    pub(super) fn take() -> Result<Self, DeviceError> {
        take_from(&TAKEN).map(Self).ok_or_else(|| DeviceError::Unavailable {
            what: format!("this process has {} pools, and has numbers for no more", NUMBERS - 1),
            next: "destroy some, or keep pools and use them again",
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

/// Sets a bit that is not set, and is not bit 0.
fn take_from(words: &[AtomicU64]) -> Option<u16> {
    for (at, word) in words.iter().enumerate() {
        let reserved = u64::from(at == 0);
        let mut taken = word.load(Relaxed) | reserved;
        while taken != u64::MAX {
            let bit = 1 << taken.trailing_ones();
            // Acquire pairs with the Release in `Number::drop`: the entry as the last pool left it.
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
    // SAFETY: null, or a box's that is kept for ever.
    unsafe { entry.as_ref() }
}

/// Has blocks with this number find the pool, which is new and of this process.
pub(super) fn enter(number: &Number, pool: Arc<dyn TakesBack>) {
    let number = number.get();
    let entry = entry(number).unwrap_or_else(|| {
        let entry = Box::leak(Box::new(Entry { stamp: AtomicStamp::here(), pool: RwLock::new(None) }));
        // Release pairs with the Acquire in `entry`. Nobody else stores: the number is the pool's.
        POOLS[usize::from(number)].store(entry, Release);
        entry
    });
    entry.stamp.renew();
    *entry.pool.write().unwrap_or_else(PoisonError::into_inner) = Some(pool);
}

/// Keeps all blocks of a pool from going back by themselves while it is looked if any is out. Taken out of it, the pool is not
/// found any more.
pub(super) fn hold(number: &Number) -> Option<RwLockWriteGuard<'static, Option<Arc<dyn TakesBack>>>> {
    Some(entry(number.get())?.pool.write().unwrap_or_else(PoisonError::into_inner))
}

/// Gives a block back to the pool of this number; not in the child of a fork to one of its parent's.
pub(super) fn take_back(number: u16, word: u64) {
    let Some(entry) = entry(number).filter(|entry| !entry.stamp.is_inherited()) else { return };
    if let Some(pool) = &*entry.pool.read().unwrap_or_else(PoisonError::into_inner) {
        pool.take_back(word);
    }
}

#[cfg(test)]
mod tests {
    use super::{Number, take_from};
    use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

    #[test]
    fn each_number_is_taken_once_and_again_when_it_came_back() {
        let words = [const { AtomicU64::new(0) }; 2];
        assert!((1..128).all(|number| take_from(&words) == Some(number)));
        assert_eq!(take_from(&words), None);
        words[1].fetch_and(!(1 << 5), Relaxed);
        assert_eq!([take_from(&words), take_from(&words)], [Some(69), None]);
        let (one, other) = (Number::take().unwrap(), Number::take().unwrap());
        assert!(one.get() != other.get() && one.get() != 0 && other.get() != 0);
    }
}
