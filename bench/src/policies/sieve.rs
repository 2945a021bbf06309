//! SIEVE (Zhang, Yang, Yue, Vigfusson and Rashmi, "SIEVE is simpler than LRU", NSDI 2024).
//!
//! One queue in order of arrival, one bit a key that a read sets. A hand goes from old to new; it clears the bits that
//! it finds set, evicts the first key without one, and stays there.

use super::Policy;
use super::lists::Lists;

pub(crate) struct Sieve {
    capacity: usize,
    /// The key at which the hand goes on; none: at the oldest.
    hand: Option<u64>,
    lists: Lists<1>,
}

impl Sieve {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { capacity, hand: None, lists: Lists::new() }
    }

    fn evict(&mut self) {
        loop {
            let Some(key) = self.hand.or_else(|| self.lists.oldest(0)) else { return };
            self.hand = self.lists.newer(key);
            if std::mem::take(self.lists.note(key)) == 0 {
                self.lists.remove(key);
                return;
            }
        }
    }
}

impl Policy for Sieve {
    fn access(&mut self, key: u64) -> bool {
        if self.holds(key) {
            *self.lists.note(key) = 1;
            return true;
        }
        if self.lists.len(0) == self.capacity {
            self.evict();
        }
        self.lists.put(0, key);
        false
    }

    fn holds(&self, key: u64) -> bool {
        self.lists.list(key).is_some()
    }
}
