//! ARC (Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003).
//!
//! Keys read once and keys read again lie in a list each, in order of their last read. As many keys again that were
//! evicted are remembered. A miss on a remembered key moves the border between the two lists.

use super::Policy;
use super::lists::Lists;

const ONCE: usize = 0;
const AGAIN: usize = 1;
const ONCE_GHOSTS: usize = 2;
const AGAIN_GHOSTS: usize = 3;

pub(crate) struct Arc {
    capacity: usize,
    /// Places that the keys read once shall have (the paper's p).
    once: usize,
    lists: Lists<4>,
}

impl Arc {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { capacity, once: 0, lists: Lists::new() }
    }

    /// Evicts one key, from the list that has more than its part (the paper's REPLACE).
    fn replace(&mut self, is_again_ghost: bool) {
        let once = self.lists.len(ONCE);
        let from_once = once > 0 && (once > self.once || is_again_ghost && once == self.once);
        let (from, to) = if from_once { (ONCE, ONCE_GHOSTS) } else { (AGAIN, AGAIN_GHOSTS) };
        if let Some(key) = self.lists.oldest(from) {
            self.lists.put(to, key);
        }
    }

    /// Makes room for a key that is neither held nor remembered (the paper's case IV).
    fn make_room(&mut self) {
        let [once, again, once_ghosts, again_ghosts] = [0, 1, 2, 3].map(|list| self.lists.len(list));
        if once + once_ghosts == self.capacity {
            if once < self.capacity {
                self.lists.pop(ONCE_GHOSTS);
                self.replace(false);
            } else {
                self.lists.pop(ONCE);
            }
        } else if once + again + once_ghosts + again_ghosts >= self.capacity {
            if once + again + once_ghosts + again_ghosts == 2 * self.capacity {
                self.lists.pop(AGAIN_GHOSTS);
            }
            self.replace(false);
        }
    }
}

impl Policy for Arc {
    fn access(&mut self, key: u64) -> bool {
        let (once_ghosts, again_ghosts) = (self.lists.len(ONCE_GHOSTS), self.lists.len(AGAIN_GHOSTS));
        let list = self.lists.list(key);
        match list {
            Some(ONCE | AGAIN) => {}
            Some(ONCE_GHOSTS) => {
                self.once = (self.once + (again_ghosts / once_ghosts).max(1)).min(self.capacity);
                self.replace(false);
            }
            Some(_) => {
                self.once = self.once.saturating_sub((once_ghosts / again_ghosts).max(1));
                self.replace(true);
            }
            None => self.make_room(),
        }
        self.lists.put(if list.is_some() { AGAIN } else { ONCE }, key);
        matches!(list, Some(ONCE | AGAIN))
    }

    fn holds(&self, key: u64) -> bool {
        matches!(self.lists.list(key), Some(ONCE | AGAIN))
    }
}
