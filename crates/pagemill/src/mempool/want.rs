//! What a request still wants, by the form that it came in.
use super::pool::Mempool;
use super::source::Source;
use crate::bulk::{Bulk, Request};
use crate::error::Error;
use crate::sync::AtomicUsize;
use core::sync::atomic::Ordering::Relaxed;

/// The unserved rest of a request.
pub(super) trait Want<S: Source> {
    /// The number of elements that it still needs.
    fn missing(&self) -> usize;
    /// Takes what the source delivers, and counts the elements that were in fact delivered as out, whatever the source
    /// returns.
    fn ask(&mut self, pool: &Mempool<S>, request: Request<'_>) -> Result<(), Error>;
    /// Takes one element from the reserve.
    fn put(&mut self, item: S::Item);
}

/// The array form: fills empty slots.
pub(super) struct Array<'s, T> {
    slots: &'s mut [Option<T>],
    missing: usize,
    /// No slot before this index is empty.
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
    fn ask(&mut self, pool: &Mempool<S>, request: Request<'_>) -> Result<(), Error> {
        let before = empty(self.slots);
        let said = pool.source.fill(Bulk::of(request), self.slots);
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
pub(super) fn empty<T>(slots: &[Option<T>]) -> usize {
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
    fn ask(&mut self, pool: &Mempool<S>, request: Request<'_>) -> Result<(), Error> {
        let before = self.missing;
        let mut delivered = Delivered::new(&pool.out, before);
        let Self { missing, each } = self;
        let said = pool.source.deliver(Bulk::of(request), before, &mut |item| {
            if *missing == 0 {
                return pool.source.free(item); // More than was asked for.
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

/// Counts elements as out before the callback receives them, since it may free each at once. When it is dropped, also
/// by unwinding, it subtracts those that were not delivered.
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
