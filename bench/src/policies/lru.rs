//! Least recently used.

use super::Policy;
use super::lists::Lists;

pub(crate) struct Lru {
    capacity: usize,
    lists: Lists<1>,
}

impl Lru {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { capacity, lists: Lists::new() }
    }
}

impl Policy for Lru {
    fn access(&mut self, key: u64) -> bool {
        let held = self.holds(key);
        if !held && self.lists.len(0) == self.capacity {
            self.lists.pop(0);
        }
        self.lists.put(0, key);
        held
    }

    fn holds(&self, key: u64) -> bool {
        self.lists.list(key).is_some()
    }
}
