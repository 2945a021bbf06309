//! What a pool's consumer and its handles share: how long it exists, and where items go.
use super::record::Record;
use super::ring::Ring;
use crate::mempool::Source;
use crate::sync::{Stamp, fence, let_others_on};
use core::mem;
use core::ptr::NonNull;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::Instant;

/// Pages that one refill moves, as `PP_ALLOC_CACHE_REFILL`; and that one section of the ring takes.
pub(super) const REFILL: usize = 64;

/// What the consumer and all handles share. It ends with the last one taken off the record's count. Threads that return
/// pages read it, so it shares no cache line with what the consumer writes.
#[repr(align(128))]
pub(super) struct Shared<S: Source> {
    pub(super) source: S,
    pub(super) ring: Ring<S::Item>,
    pub(super) record: Arc<Record>,
    pub(super) stamp: Stamp,
}

/// A counted pointer: whoever has one has something on the count.
pub(super) struct SharedPtr<S: Source>(NonNull<Shared<S>>);

impl<S: Source> PartialEq for SharedPtr<S> {
    #[inline]
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl<S: Source> Clone for SharedPtr<S> {
    #[inline]
    fn clone(&self) -> Self {
        *self
    }
}
impl<S: Source> Copy for SharedPtr<S> {}

impl<S: Source> SharedPtr<S> {
    /// With one on the count, for the consumer.
    pub(super) fn new(source: S, slots: usize) -> Self {
        let ring = Ring::new(slots);
        let record = Record::new(Arc::clone(ring.positions()));
        Self(NonNull::from(Box::leak(Box::new(Shared { source, ring, record, stamp: Stamp::here() }))))
    }

    #[inline]
    pub(super) fn get(&self) -> &Shared<S> {
        // SAFETY: whoever has the pointer has something on the count (P2).
        unsafe { self.0.as_ref() }
    }

    /// Takes `n` off the count. The pointer must not be used afterwards for what was counted by them.
    pub(super) fn take_off(self, n: usize) {
        // Release pairs with the Acquire of the last one: everything that was done with it is done.
        if n > 0 && self.get().record.count.fetch_sub(n, Release) == n {
            fence(Acquire);
            // SAFETY: from `Box::leak` in `new`, and nothing is on the count any more.
            drop(unsafe { Box::from_raw(self.0.as_ptr()) });
        }
    }

    /// Ends items: they go back to the source, and off the count, also if the source unwinds. What it leaves in the
    /// slots is dropped.
    pub(super) fn end_bulk(self, slots: &mut [Option<S::Item>]) {
        struct TakesOff<S: Source>(SharedPtr<S>, usize);
        impl<S: Source> Drop for TakesOff<S> {
            fn drop(&mut self) {
                self.0.take_off(self.1);
            }
        }
        let off = TakesOff(self, slots.iter().filter(|slot| slot.is_some()).count());
        self.get().source.free_bulk(slots);
        slots.fill_with(|| None);
        drop(off);
    }

    /// Returns an item. Out of line: handles are dropped in many places, most of which are never reached.
    #[inline(never)]
    pub(super) fn give_back_one(self, item: S::Item) {
        self.give_back(1, core::iter::once(item));
    }

    /// Returns the next `n` items, at most [`REFILL`], of which there must be so many: to the ring, and to the source
    /// what it has no room for. In a forked child all go to the source, so that whatever is reserved in its ring and
    /// not there is lost.
    ///
    /// `items` must not unwind, and must lead to nothing that ends with the pool: it is still there when the pool may be gone.
    #[inline]
    pub(super) fn give_back(self, n: usize, mut items: impl Iterator<Item = S::Item>) {
        let mut left = n;
        while left > 0 && !self.get().stamp.is_inherited() {
            let next = || match items.next() {
                Some(item) => item,
                None => unreachable!("the ring asks for no more items than there are"),
            };
            // SAFETY: the items that are still here are on the count (P2).
            match unsafe { Ring::push(&raw const (*self.0.as_ptr()).ring, left, next) } {
                // The pointer is used no more: the items may be gone, and the pool with them (P2).
                Some(count) if count == left => return,
                Some(count) if count > 0 => left -= count,
                is_full => {
                    if is_full.is_some() {
                        self.get().record.ring_full.fetch_add(left as u64, Relaxed);
                    }
                    break;
                }
            }
        }
        self.end_next(left, items);
    }

    /// Ends the next `n` items.
    #[cold]
    #[inline(never)]
    fn end_next(self, n: usize, items: impl Iterator<Item = S::Item>) {
        let mut slots = [const { None }; REFILL];
        slots[..n].iter_mut().zip(items).for_each(|(slot, item)| *slot = Some(item));
        self.end_bulk(&mut slots[..n]);
    }

    /// The consumer's end: what its cache and the ring have goes to the source, and the consumer off the count.
    ///
    /// # Safety
    /// The caller is the consumer, which alone takes from the ring (P3), and uses the pointer no more.
    pub(super) unsafe fn end(self, mut cached: impl FnMut() -> Option<S::Item>) {
        let shared = self.get();
        // First of all: if the source unwinds, pages that come later go to it all the same.
        shared.ring.end();
        let record = Arc::clone(&shared.record);
        let (mut turn, mut panicked) = (0, None);
        loop {
            let mut hand = Hand::new(self);
            let mut slots = hand.slots.iter_mut();
            let put = |item| {
                if let Some(slot) = slots.next() {
                    *slot = Some(item);
                }
            };
            // SAFETY: as the caller promises.
            let popped = unsafe { shared.ring.pop(REFILL, shared.stamp.is_inherited(), put) };
            let rest = hand.slots.iter_mut().skip(popped).zip(core::iter::from_fn(&mut cached));
            rest.for_each(|(slot, item)| *slot = Some(item));
            if hand.slots[0].is_none() {
                if shared.ring.positions().len() == 0 {
                    break;
                }
                let_others_on(turn); // A thread has reserved a slot, and is about to fill it.
                turn += 1;
            }
            // All go to the source, and the consumer off the count, also if the source unwinds.
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| drop(hand))) {
                match panicked {
                    None => panicked = Some(payload),
                    // What a panic brings may unwind as it is dropped.
                    Some(_) => mem::forget(payload),
                }
            }
        }
        self.take_off(1);
        record.ended.get_or_init(Instant::now);
        if let Some(payload) = panicked {
            resume_unwind(payload);
        }
    }
}

/// Items of a pool on their way. What is still here goes to the source in the end.
pub(super) struct Hand<S: Source> {
    pub(super) slots: [Option<S::Item>; REFILL],
    shared: SharedPtr<S>,
}

impl<S: Source> Hand<S> {
    pub(super) fn new(shared: SharedPtr<S>) -> Self {
        Self { slots: [const { None }; REFILL], shared }
    }
}

impl<S: Source> Drop for Hand<S> {
    fn drop(&mut self) {
        if self.slots.iter().any(Option::is_some) {
            self.shared.end_bulk(&mut self.slots);
        }
    }
}
