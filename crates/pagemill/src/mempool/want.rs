//! Where a request's elements go, and how they leave the reserve.
use super::{Held, Mempool, Source};
use crate::bulk::Bulk;
use crate::sync::{AtomicUsize, generation};
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::Error;

/// The rest of a request.
pub(super) trait Want<S: Source> {
    /// How many elements it still needs.
    fn missing(&self) -> usize;
    /// Takes what the source has for it, and counts that as out: what it did, whatever it says.
    fn ask(&mut self, pool: &Mempool<S>, request: Bulk<'_>) -> Result<(), Error>;
    /// Takes one from the reserve.
    fn put(&mut self, item: S::Item);
}

/// The array form: empty slots.
pub(super) struct Array<'s, T> {
    slots: &'s mut [Option<T>],
    missing: usize,
    /// No slot before this one is empty.
    at: usize,
}

impl<'s, T> Array<'s, T> {
    #[inline]
    pub(super) fn new(slots: &'s mut [Option<T>]) -> Self {
        Self { missing: slots.len(), slots, at: 0 }
    }
}

impl<S: Source> Want<S> for Array<'_, S::Item> {
    #[inline]
    fn missing(&self) -> usize {
        self.missing
    }
    #[inline]
    fn ask(&mut self, pool: &Mempool<S>, request: Bulk<'_>) -> Result<(), Error> {
        let before = empty(self.slots);
        let said = pool.source.fill(request, self.slots);
        (self.missing, self.at) = (empty(self.slots), 0);
        let added = before.saturating_sub(self.missing);
        pool.out.fetch_add(added, Relaxed);
        if said? != added {
            pool.note_lie();
        }
        Ok(())
    }
    fn put(&mut self, item: S::Item) {
        while self.slots[self.at].is_some() {
            self.at += 1;
        }
        self.slots[self.at] = Some(item);
        self.missing -= 1;
    }
}

#[inline]
fn empty<T>(slots: &[Option<T>]) -> usize {
    slots.iter().filter(|slot| slot.is_none()).count()
}

/// The callback form.
pub(super) struct Callback<F> {
    missing: usize,
    each: F,
}

impl<F> Callback<F> {
    pub(super) fn new(count: usize, each: F) -> Self {
        Self { missing: count, each }
    }
}

impl<S: Source, F: FnMut(S::Item)> Want<S> for Callback<F> {
    fn missing(&self) -> usize {
        self.missing
    }
    fn ask(&mut self, pool: &Mempool<S>, request: Bulk<'_>) -> Result<(), Error> {
        let before = self.missing;
        let mut delivered = Delivered::new(&pool.out, before);
        let Self { missing, each } = self;
        let said = pool.source.deliver(request, before, &mut |item| {
            if *missing == 0 {
                return pool.source.free(item); // More than it was asked for.
            }
            delivered.left -= 1;
            *missing -= 1;
            each(item);
        })?;
        if said != before - self.missing {
            pool.note_lie();
        }
        Ok(())
    }
    fn put(&mut self, item: S::Item) {
        self.missing -= 1;
        (self.each)(item);
    }
}

/// Counts what the callback was asked to take, and of that in the end what it got, also if it unwinds. Before, since it may
/// free at once what it gets.
struct Delivered<'p> {
    out: &'p AtomicUsize,
    left: usize,
}

impl<'p> Delivered<'p> {
    fn new(out: &'p AtomicUsize, count: usize) -> Self {
        out.fetch_add(count, Relaxed);
        Self { out, left: count }
    }
}

impl Drop for Delivered<'_> {
    fn drop(&mut self) {
        self.out.fetch_sub(self.left, Relaxed);
    }
}

/// So many elements leave the reserve in one section: those in the hand of a callback that unwinds are few.
const HANDFUL: usize = 32;

/// Elements that were promised to one request and are on their way out; counted as out. Those that it does not take, since
/// a callback unwinds, stay in the reserve.
pub(super) struct Claim<'p, S: Source> {
    pool: &'p Mempool<S>,
    /// Still in the reserve.
    left: usize,
    hand: [Option<S::Item>; HANDFUL],
    /// In the hand.
    held: usize,
    /// The process that it was promised in.
    generation: u64,
}

impl<'p, S: Source> Claim<'p, S> {
    pub(super) fn new(pool: &'p Mempool<S>, count: usize) -> Self {
        Self { pool, left: count, hand: [const { None }; HANDFUL], held: 0, generation: generation() }
    }

    /// The reserve, in which `left` elements are claimed. If the callback forked, this is the child, where no claim holds: it
    /// claims the rest again, or gives it up if that is no longer there.
    fn lock(&mut self) -> Held<'p, S::Item> {
        let mut reserve = self.pool.lock();
        if self.generation != generation() {
            self.generation = generation();
            if reserve.available() < self.left {
                self.pool.out.fetch_sub(self.left, Relaxed);
                self.left = 0;
            }
            reserve.claimed += self.left;
            self.pool.lacks.store(reserve.lacks(self.pool.min_nr.load(Relaxed)), Relaxed);
        }
        reserve
    }

    pub(super) fn next(&mut self) -> Option<S::Item> {
        if self.held == 0 && self.left > 0 {
            let mut reserve = self.lock();
            let count = self.left.min(HANDFUL);
            let kept = reserve.elements.len() - count;
            for (slot, item) in self.hand.iter_mut().zip(reserve.elements.drain(kept..)) {
                *slot = Some(item);
            }
            reserve.claimed -= count;
            self.left -= count;
            self.held = count;
        }
        self.held = self.held.checked_sub(1)?;
        self.hand[self.held].take()
    }
}

impl<S: Source> Drop for Claim<'_, S> {
    fn drop(&mut self) {
        if self.left + self.held == 0 {
            return;
        }
        let pool = self.pool;
        let surplus = {
            let mut reserve = self.lock();
            reserve.claimed -= self.left;
            let min_nr = pool.min_nr.load(Relaxed);
            // What was freed meanwhile has taken the place of those that stay.
            let kept = reserve.elements.len().min(min_nr + reserve.claimed);
            reserve.elements.split_off(kept)
        };
        surplus.into_iter().for_each(|item| pool.source.free(item));
        pool.out.fetch_sub(self.left, Relaxed);
        pool.free_bulk(&mut self.hand); // Wakes the first of those who wait as well.
    }
}
