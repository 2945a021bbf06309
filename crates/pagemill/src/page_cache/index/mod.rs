//! The index of a cached file: from page offset to frame number (C8.1).
//!
//! It is a radix tree with 64 slots a node. Readers take no lock, and what they find is a hint: the frame may go to
//! another file at any moment. So the caller pins the frame by its descriptor, looks whether it is still that of the
//! file and the offset, and asks again if not.
//!
//! # What readers may rely on
//! - A frame number that they get was in this index, at this offset, at some time during the call.
//! - An entry that is there during the whole call is found; a hole that is there during the whole call is found too.
//! - A call ends, whatever writers do. After some tries it takes the lock.
//!
//! # How it works
//! Nodes come from a pool that all indexes of a cache share (`nodes.rs`). A node that is without entries goes back to
//! the pool at once and may be in another tree a moment later, while a reader is still in it. The reader notices by a
//! count of unlinked nodes (`tree.rs`), and walks again. Each node has bitmaps: which of its slots are in use or
//! marked, and which children have no hole. Searches skip by these what need not be visited (`walk.rs`). Writers keep
//! the bitmaps up from the leaf to the root, and the tree as high as its greatest offset needs (`write.rs`).
//!
//! # Locks
//! The index's lock, then one of the pool's. Callbacks of a [`Writing`] must not use the lock of the same index.
mod nodes;
mod tree;
mod walk;
mod write;

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests;

pub(super) use nodes::Nodes;
#[cfg(all(test, not(shuttle)))]
pub(super) use write::Occupied;
pub(super) use write::{Mark, Verdict, Writing};

use crate::sync::{AtomicUsize, Mutex};
use core::num::NonZeroU32;
use core::sync::atomic::Ordering::Relaxed;
use nodes::{Link, Wandered};
use std::sync::{Arc, PoisonError, TryLockError};
use tree::Tree;
use walk::Sort;

/// How often a reader walks again before it takes the lock.
const RETRIES: usize = if cfg!(loom) { 1 } else { 8 };

pub(super) struct Index {
    tree: Tree,
    /// Changed under the lock.
    pages: AtomicUsize,
    lock: Mutex<()>,
}

impl Index {
    pub(super) fn new(nodes: Arc<Nodes>) -> Self {
        Self { tree: Tree::new(nodes), pages: AtomicUsize::new(0), lock: Mutex::new(()) }
    }

    /// The number of entries.
    pub(super) fn len(&self) -> usize {
        self.pages.load(Relaxed)
    }

    pub(super) fn lock(&self) -> Writing<'_> {
        // A callback that unwound left the index whole.
        Writing::new(&self.tree, &self.pages, self.lock.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn try_lock(&self) -> Option<Writing<'_>> {
        let lock = match self.lock.try_lock() {
            Ok(lock) => lock,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        Some(Writing::new(&self.tree, &self.pages, lock))
    }

    /// The frame at an offset.
    #[inline]
    pub(super) fn get(&self, at: u64) -> Option<NonZeroU32> {
        self.read(move |root| walk::get(root, at))
    }

    /// The frames from an offset on, up to the end of `out` or of the leaf, 0 for a hole. Returns how many there are in
    /// `out`: one at least, unless `out` is empty. A reader of a whole file walks once for 64 pages.
    #[inline]
    pub(super) fn get_run(&self, at: u64, out: &mut [u32]) -> usize {
        self.read(|root| walk::get_run(root, at, out))
    }

    /// The nearest entry at or after an offset, among `max` offsets. If there is none: `at + max`, or `u64::MAX` where
    /// that would be beyond; so look whether there is an entry if that is returned.
    pub(super) fn next_present(&self, at: u64, max: u64) -> u64 {
        self.next(Sort::Present, at, max)
    }

    /// The nearest entry at or before an offset, among `max` offsets. If there is none: `at - max`, or 0 where that
    /// would be below; so look whether there is an entry if that is returned.
    pub(super) fn prev_present(&self, at: u64, max: u64) -> u64 {
        self.prev(Sort::Present, at, max)
    }

    /// As [`next_present`](Self::next_present), for a hole.
    pub(super) fn next_hole(&self, at: u64, max: u64) -> u64 {
        self.next(Sort::Hole, at, max)
    }

    /// As [`prev_present`](Self::prev_present), for a hole.
    pub(super) fn prev_hole(&self, at: u64, max: u64) -> u64 {
        self.prev(Sort::Hole, at, max)
    }

    /// As [`next_present`](Self::next_present), for an entry that has this mark.
    pub(super) fn next_marked(&self, mark: Mark, at: u64, max: u64) -> u64 {
        let sort = match mark {
            Mark::Dirty => Sort::Dirty,
            Mark::Writeback => Sort::Writeback,
        };
        self.next(sort, at, max)
    }

    fn next(&self, sort: Sort, at: u64, max: u64) -> u64 {
        let Some(more) = max.checked_sub(1) else { return at };
        let last = at.saturating_add(more);
        self.read(move |root| walk::search::<true>(root, sort, at, last)).unwrap_or(last.saturating_add(1))
    }

    fn prev(&self, sort: Sort, at: u64, max: u64) -> u64 {
        let Some(more) = max.checked_sub(1) else { return at };
        let first = at.saturating_sub(more);
        self.read(move |root| walk::search::<false>(root, sort, at, first)).unwrap_or(first.saturating_sub(1))
    }

    #[inline]
    fn read<'a, R>(&'a self, mut walk: impl FnMut(Link<'a>) -> Result<R, Wandered>) -> R {
        self.tree.read(&mut walk).unwrap_or_else(|_| self.read_again(walk))
    }

    #[cold]
    fn read_again<'a, R>(&'a self, mut walk: impl FnMut(Link<'a>) -> Result<R, Wandered>) -> R {
        for _ in 0..RETRIES {
            if let Ok(found) = self.tree.read(&mut walk) {
                return found;
            }
        }
        let _lock = self.lock();
        walk(self.tree.root()).expect("a locked index has whole paths")
    }
}

/// Its nodes go back to the pool.
impl Drop for Index {
    fn drop(&mut self) {
        self.lock().remove_range(0..=u64::MAX, |_, _| Verdict::Remove);
    }
}
