//! The ring by which threads return pages to the consumer: bounded, many producers, one consumer, without a lock.
//!
//! # How it works
//! A producer reserves up to 64 slots with one exchange of `tail`, moves its items in, and marks each slot as full. The
//! consumer takes full slots from `head` on, marks them as empty, and stores `head` once for all. A slot that is
//! reserved and not full yet looks to the consumer like the end of the ring.
//!
//! # Invariants
//! - R1 The slots between `head` and `tail` are reserved: each is full, or its producer is about to fill it. All others
//!   are empty.
//! - R2 A producer touches the ring no more once it has marked its last slot as full. So the ring may be freed as soon as
//!   the consumer has taken every item up to `tail`.
//! - R3 Once the ring has ended nothing is reserved, so `tail` stays as it is.
//!
//! A thread that is preempted between its exchange and its marks holds up no producer. The consumer finds nothing behind
//! its slots meanwhile, and waits for it when the pool ends.
use crate::sync::{AtomicBool, AtomicUsize, UnsafeCell};
use core::mem::MaybeUninit;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::Arc;

/// Set in `tail` when the ring has ended. Positions are counted above this bit; they don't overflow within centuries.
const ENDED: usize = 1;
const _: () = assert!(usize::BITS == 64);
const ONE: usize = 2;

/// On a cache line of its own, which the other side doesn't write to.
#[repr(align(128))]
struct Alone<T>(T);

struct Slot<T> {
    is_full: AtomicBool,
    item: UnsafeCell<MaybeUninit<T>>,
}

/// Where the ring begins and ends. Observers read it too, also when the ring is gone.
pub(super) struct Positions {
    tail: Alone<AtomicUsize>,
    head: Alone<AtomicUsize>,
}

impl Positions {
    fn new() -> Self {
        Self { tail: Alone(AtomicUsize::new(0)), head: Alone(AtomicUsize::new(0)) }
    }
    /// The number of items that were ever returned by the ring.
    pub(super) fn pushed(&self) -> usize {
        self.tail.0.load(Relaxed) / ONE
    }
    /// The number of items in the ring, or about to be.
    pub(super) fn len(&self) -> usize {
        self.pushed().saturating_sub(self.head.0.load(Relaxed))
    }
}

/// In a model: fails if a thread touches it afterwards, or may do so at the same time.
#[cfg(loom)]
impl Drop for Positions {
    fn drop(&mut self) {
        self.tail.0.with_mut(|_| ());
        self.head.0.with_mut(|_| ());
    }
}

/// As for [`Positions`].
#[cfg(loom)]
impl<T> Drop for Slot<T> {
    fn drop(&mut self) {
        // SAFETY: nobody else has it. A load is all that loom offers for a flag.
        unsafe { self.is_full.unsync_load() };
    }
}

pub(super) struct Ring<T> {
    /// A power of two.
    slots: Box<[Slot<T>]>,
    at: Arc<Positions>,
}

// SAFETY: items move from one thread to another and are never shared; a slot has one owner at a time (R1).
unsafe impl<T: Send> Sync for Ring<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Ring<T> {}

impl<T> Ring<T> {
    /// A ring of at least `capacity` slots, rounded up to a power of two.
    pub(super) fn new(capacity: usize) -> Self {
        let slot = || Slot { is_full: AtomicBool::new(false), item: UnsafeCell::new(MaybeUninit::uninit()) };
        let slots = core::iter::repeat_with(slot).take(capacity.next_power_of_two()).collect();
        Self { slots, at: Arc::new(Positions::new()) }
    }

    pub(super) fn positions(&self) -> &Arc<Positions> {
        &self.at
    }

    /// The slot at a position.
    #[inline]
    fn slot(slots: &[Slot<T>], at: usize) -> &Slot<T> {
        &slots[at & (slots.len() - 1)]
    }

    /// Moves up to `n` items in, as many as there is room for, and returns how many. `None` once the ring has ended.
    /// `next` must not unwind.
    ///
    /// # Safety
    /// The ring exists until the last item has been marked as full. It may be gone when this returns (R2), so this takes a
    /// pointer: a reference would have to be valid to the end.
    #[inline]
    pub(super) unsafe fn push(this: *const Self, n: usize, mut next: impl FnMut() -> T) -> Option<usize> {
        // SAFETY: as the caller promises. It is not used after the last mark.
        let ring = unsafe { &*this };
        // Once for all: otherwise the address is read again after each mark.
        let slots: &[Slot<T>] = &ring.slots;
        let (tail, count) = loop {
            // `head` first. Acquire pairs with the Release in `pop`: the consumer has read the slots before it, and saw
            // them reserved, so the load of `tail` does too.
            let head = ring.at.head.0.load(Acquire);
            let tail = ring.at.tail.0.load(Relaxed);
            if tail & ENDED != 0 {
                return None;
            }
            let Some(free) = slots.len().checked_sub(tail / ONE - head) else { continue }; // An old `head`.
            let count = n.min(free);
            if count == 0 {
                return Some(0);
            }
            // Relaxed: what is in a slot is published by its mark.
            if ring.at.tail.0.compare_exchange_weak(tail, tail + count * ONE, Relaxed, Relaxed).is_ok() {
                break (tail / ONE, count);
            }
        };
        for at in 0..count {
            let slot = Self::slot(slots, tail + at);
            // SAFETY: the slot is reserved for this call, and it is empty (R1).
            slot.item.with_mut(|item| _ = unsafe { (*item).write(next()) });
            // Release pairs with the Acquire in `pop`.
            slot.is_full.store(true, Release);
        }
        Some(count)
    }

    /// Moves up to `most` items out, and returns how many. `each` must not unwind. `is_lost`: passes over slots that are
    /// reserved and not full, because the threads that reserved them do not exist.
    ///
    /// # Safety
    /// No other thread calls this at the same time.
    #[inline]
    pub(super) unsafe fn pop(&self, most: usize, is_lost: bool, mut each: impl FnMut(T)) -> usize {
        let (mut at, mut count) = (self.at.head.0.load(Relaxed), 0);
        let slots: &[Slot<T>] = &self.slots;
        let passes_to = if is_lost { self.at.pushed() } else { 0 };
        while count < most {
            let slot = Self::slot(slots, at);
            // Acquire pairs with the Release in `push`.
            if slot.is_full.load(Acquire) {
                // SAFETY: the slot is full, and this call alone empties it.
                each(slot.item.with_mut(|item| unsafe { (*item).assume_init_read() }));
                slot.is_full.store(false, Relaxed);
                count += 1;
            } else if at >= passes_to {
                break;
            }
            at += 1;
        }
        // Release pairs with the Acquire in `push`.
        self.at.head.0.store(at, Release);
        count
    }

    /// Ends the ring: from now on nothing is pushed. What is in it stays, and so does what calls that have begun put in.
    pub(super) fn end(&self) {
        // AcqRel orders it with the exchanges in `push`, which all come before or fail.
        self.at.tail.0.fetch_or(ENDED, AcqRel);
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::Ring;

    /// As in a forked child, where the thread that reserved it does not go on.
    #[test]
    fn a_slot_that_nobody_will_fill_is_passed_over() {
        let ring = Ring::new(4);
        let mut seen = Vec::new();
        let mut number = 0;
        let mut next = || {
            number += 1;
            if number == 3 {
                // SAFETY: no other thread takes.
                assert_eq!(unsafe { ring.pop(usize::MAX, false, |item| seen.push(item)) }, 2);
                // SAFETY: as above.
                assert_eq!(unsafe { ring.pop(usize::MAX, true, |item| seen.push(item)) }, 0);
            }
            number
        };
        // SAFETY: the ring exists.
        assert_eq!(unsafe { Ring::push(&raw const ring, 3, &mut next) }, Some(3));
        assert_eq!(ring.positions().len(), 0, "the third slot was passed over before it was filled");
        // SAFETY: as above.
        assert_eq!(unsafe { Ring::push(&raw const ring, 1, next) }, Some(1));
        // SAFETY: as above.
        assert_eq!(unsafe { ring.pop(usize::MAX, false, |item| seen.push(item)) }, 1);
        assert_eq!(seen, [1, 2, 4]);
    }
}
