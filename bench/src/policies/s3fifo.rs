//! S3-FIFO (Yang, Zhang, Qiu, Yue and Vinayak, "FIFO queues are all you need for cache eviction", SOSP 2023).
//!
//! New keys go through a small queue, a tenth of the cache. Those that were read more than once there move to the main
//! queue, as do those that return while they are remembered. The main queue gives a key that was read another round.

use super::Policy;
use super::lists::Lists;

const SMALL: usize = 0;
const MAIN: usize = 1;
const GHOSTS: usize = 2;

/// A key's reads are counted up to this.
const READS_MOST: u8 = 3;

pub(crate) struct S3Fifo {
    capacity: usize,
    small: usize,
    /// A key's note is the number of its reads since it came, or since the queue's last look at it.
    lists: Lists<3>,
}

impl S3Fifo {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { capacity, small: (capacity / 10).max(1), lists: Lists::new() }
    }

    fn evict(&mut self) {
        while self.lists.len(SMALL) + self.lists.len(MAIN) >= self.capacity {
            if self.lists.len(SMALL) >= self.small || self.lists.len(MAIN) == 0 {
                self.evict_small();
            } else {
                self.evict_main();
            }
        }
    }

    fn evict_small(&mut self) {
        while let Some(key) = self.lists.oldest(SMALL) {
            let reads = std::mem::take(self.lists.note(key));
            if reads <= 1 {
                self.lists.put(GHOSTS, key);
                if self.lists.len(GHOSTS) > self.capacity - self.small {
                    self.lists.pop(GHOSTS);
                }
                return;
            }
            self.lists.put(MAIN, key);
            if self.lists.len(MAIN) > self.capacity - self.small {
                return self.evict_main();
            }
        }
    }

    fn evict_main(&mut self) {
        while let Some(key) = self.lists.oldest(MAIN) {
            let reads = self.lists.note(key);
            if *reads == 0 {
                self.lists.pop(MAIN);
                return;
            }
            *reads -= 1;
            self.lists.put(MAIN, key);
        }
    }
}

impl Policy for S3Fifo {
    fn access(&mut self, key: u64) -> bool {
        if self.holds(key) {
            let reads = self.lists.note(key);
            *reads = (*reads + 1).min(READS_MOST);
            return true;
        }
        let list = if self.lists.remove(key).is_some() { MAIN } else { SMALL };
        self.evict();
        self.lists.put(list, key);
        false
    }

    fn holds(&self, key: u64) -> bool {
        matches!(self.lists.list(key), Some(SMALL | MAIN))
    }
}
