//! Elements on their way from the reserve to a request.
use super::pool::{Held, Mempool};
use super::source::Source;
use crate::sync::Stamp;
use core::sync::atomic::Ordering::Relaxed;

/// How many elements leave the reserve in one section. It bounds how many are in hand if a callback unwinds.
const HANDFUL: usize = 32;

/// Elements that were claimed for one request and are on their way out; they count as out. If a callback unwinds, the
/// elements that it did not receive stay in the reserve.
pub(super) struct Outgoing<'p, S: Source> {
    pool: &'p Mempool<S>,
    /// The number of its elements that are still in the reserve.
    left: usize,
    hand: [Option<S::Item>; HANDFUL],
    /// The number of elements in `hand`.
    held: usize,
    /// The process that it was claimed in.
    stamp: Stamp,
}

impl<'p, S: Source> Outgoing<'p, S> {
    pub(super) fn new(pool: &'p Mempool<S>, count: usize) -> Self {
        Self { pool, left: count, hand: [const { None }; HANDFUL], held: 0, stamp: Stamp::here() }
    }

    /// Locks the reserve, in which `left` elements are claimed. If the callback forked, this is the child, where the
    /// claim does not hold: it is made again, or given up if the reserve has too few elements.
    fn lock(&mut self) -> Held<'p, S::Item> {
        let mut reserve = self.pool.lock();
        if self.stamp.renew() {
            if reserve.available() < self.left {
                self.pool.out.fetch_sub(self.left, Relaxed);
                self.left = 0;
            }
            reserve.claimed += self.left;
            self.pool.lacks.store(reserve.lacks(self.pool.min_nr.load(Relaxed)), Relaxed);
        }
        reserve
    }

    #[inline]
    pub(super) fn next(&mut self) -> Option<S::Item> {
        if self.held == 0 && self.left > 0 {
            self.take_handful();
        }
        self.held = self.held.checked_sub(1)?;
        self.hand[self.held].take()
    }

    #[inline(never)]
    fn take_handful(&mut self) {
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
}

impl<S: Source> Drop for Outgoing<'_, S> {
    fn drop(&mut self) {
        if self.left + self.held == 0 {
            return;
        }
        let pool = self.pool;
        let surplus = {
            let mut reserve = self.lock();
            reserve.claimed -= self.left;
            let min_nr = pool.min_nr.load(Relaxed);
            // Elements that were freed meanwhile took the place of those that stay.
            let kept = reserve.elements.len().min(min_nr + reserve.claimed);
            reserve.elements.split_off(kept)
        };
        surplus.into_iter().for_each(|item| pool.source.free(item));
        pool.out.fetch_sub(self.left, Relaxed);
        pool.free_bulk_raw(&mut self.hand); // Wakes the first waiting request too.
    }
}
