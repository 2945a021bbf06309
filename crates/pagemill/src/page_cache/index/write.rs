//! What changes a tree, under the index's lock.
//!
//! # Invariants, whenever the lock is free
//! - W1 A node has entries, and its bitmaps say what those of its children say; a leaf's say what its slots are, and a
//!   slot that is a hole has no mark.
//! - W2 A root with children has one other than the first: the tree's height follows its greatest offset.
use super::nodes::{ALL, Chain, DIRTY, FAN, Interior, LEAF_MAPS, Leaf, Link, MAX_LEVELS, PRESENT, WRITEBACK, Wandered};
use super::tree::Tree;
use super::walk::{self, Sort, levels_for, search, slot_at};
use crate::sync::{AtomicUsize, MutexGuard};
use core::num::NonZeroU32;
use core::ops::{ControlFlow, RangeInclusive};
use core::sync::atomic::Ordering::Relaxed;

/// Unlinked nodes that wait for the end of a [`Writing`]. With more of them readers try again meanwhile.
const MOST_DEAD: usize = 64;

/// A mark on an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mark {
    /// Changed since it was read or written.
    Dirty,
    /// On its way to the file.
    Writeback,
}

impl Mark {
    fn map(self) -> usize {
        match self {
            Self::Dirty => DIRTY,
            Self::Writeback => WRITEBACK,
        }
    }
}

/// What becomes of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Remove,
    Keep,
}

/// An offset was occupied already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Occupied {
    /// The first that was.
    pub(crate) at: u64,
    pub(crate) frame: NonZeroU32,
}

/// An index that is locked. Nodes without entries go back to the pool at its end at the latest.
pub(crate) struct Writing<'a> {
    tree: &'a Tree,
    pages: &'a AtomicUsize,
    dead_leaves: Chain<'a, Leaf>,
    dead_interiors: Chain<'a, Interior>,
    _lock: MutexGuard<'a, ()>,
}

/// The way to a leaf.
struct Path<'a> {
    leaf: &'a Leaf,
    /// That of the tree with `n + 2` levels at `n`.
    above: [Option<&'a Interior>; MAX_LEVELS - 1],
}

/// The bits of these offsets in the leaf of the first.
fn bits_of(first: u64, last: u64) -> u64 {
    let begin = slot_at(first, 1) as u64;
    let end = (last - first).saturating_add(begin).min(FAN as u64 - 1);
    ALL << begin & u64::MAX >> (63 - end)
}

/// The slots of these bits, in ascending order.
fn slots_of(mut bits: u64) -> impl Iterator<Item = usize> {
    core::iter::from_fn(move || {
        let slot = bits.trailing_zeros() as usize;
        let is_one = bits != 0;
        bits &= bits.wrapping_sub(1);
        is_one.then_some(slot)
    })
}

/// Nobody unlinks nodes while the lock is held.
fn sure<T>(walked: Result<T, Wandered>) -> T {
    walked.expect("a locked index has whole paths")
}

impl<'a> Writing<'a> {
    pub(super) fn new(tree: &'a Tree, pages: &'a AtomicUsize, lock: MutexGuard<'a, ()>) -> Self {
        Self { tree, pages, dead_leaves: Chain::EMPTY, dead_interiors: Chain::EMPTY, _lock: lock }
    }

    pub(crate) fn get(&self, at: u64) -> Option<NonZeroU32> {
        sure(walk::get(self.tree.root(), at))
    }

    /// Enters a frame, without marks.
    #[cfg(any(all(test, not(shuttle)), loom))]
    pub(crate) fn insert(&mut self, at: u64, frame: NonZeroU32) -> Result<(), Occupied> {
        // Where this makes nodes there is a hole.
        let path = self.make(at);
        let slot = slot_at(at, 1);
        if let Some(found) = path.leaf.get(slot) {
            return Err(Occupied { at, frame: found });
        }
        path.leaf.set(slot, Some(frame));
        path.leaf.set_map(PRESENT, path.leaf.map(PRESENT) | 1 << slot);
        self.count(1, 0);
        self.settle(&path, at);
        Ok(())
    }

    /// Enters frames from `at` on, without marks: all, or none where one of the offsets is occupied. Readers may see the
    /// first ones earlier than the last. Panics if an offset would be beyond `u64::MAX`.
    pub(crate) fn insert_run(&mut self, mut at: u64, frames: &[NonZeroU32]) -> Result<(), Occupied> {
        let Some(beyond) = frames.len().checked_sub(1) else { return Ok(()) };
        let last = at.checked_add(beyond as u64).expect("offsets are below 2^64");
        if let Some(at) = sure(search::<true>(self.tree.root(), Sort::Present, at, last)) {
            return Err(Occupied { at, frame: self.get(at).expect("its bit is set") });
        }
        let mut rest = frames;
        while !rest.is_empty() {
            let path = self.make(at);
            let slot = slot_at(at, 1);
            let (now, later) = rest.split_at(rest.len().min(FAN - slot));
            path.leaf.fill(slot, now);
            path.leaf.set_map(PRESENT, path.leaf.map(PRESENT) | bits_of(at, last));
            self.count(now.len(), 0);
            self.settle(&path, at);
            at = at.wrapping_add(now.len() as u64); // Beyond the last offset nothing is left.
            rest = later;
        }
        Ok(())
    }

    /// Has another frame in place of the one there, with its marks, and returns that. `None` for a hole, which stays one.
    pub(crate) fn replace(&mut self, at: u64, frame: NonZeroU32) -> Option<NonZeroU32> {
        let leaf = sure(walk::leaf_at(self.tree.root(), at))?;
        let old = leaf.get(slot_at(at, 1))?;
        leaf.set(slot_at(at, 1), Some(frame));
        Some(old)
    }

    pub(crate) fn remove(&mut self, at: u64) -> Option<NonZeroU32> {
        let path = self.find(at)?;
        let slot = slot_at(at, 1);
        let old = path.leaf.get(slot)?;
        self.clear(&path, at, 1 << slot);
        Some(old)
    }

    /// Asks about each entry of a range, in ascending order, and removes those which are to be. The entries of a leaf
    /// leave the index once all of them were asked about; where `verdict` unwinds, these all stay.
    pub(crate) fn remove_range(
        &mut self,
        range: RangeInclusive<u64>,
        mut verdict: impl FnMut(u64, NonZeroU32) -> Verdict,
    ) {
        self.each_leaf(range, |this, path, first, bits| {
            let mut gone = 0;
            for slot in slots_of(bits) {
                let Some(frame) = path.leaf.get(slot) else { continue };
                match verdict(first + slot as u64, frame) {
                    Verdict::Remove => gone |= 1 << slot,
                    Verdict::Keep => {}
                }
            }
            if gone != 0 {
                this.clear(path, first, gone);
            }
            ControlFlow::Continue(())
        });
    }

    /// Visits the entries of a range in ascending order, until `visit` breaks.
    pub(crate) fn range(
        &mut self,
        range: RangeInclusive<u64>,
        mut visit: impl FnMut(u64, NonZeroU32) -> ControlFlow<()>,
    ) {
        self.each_leaf(range, |_, path, first, bits| {
            slots_of(bits).try_for_each(|slot| match path.leaf.get(slot) {
                Some(frame) => visit(first + slot as u64, frame),
                None => ControlFlow::Continue(()),
            })
        });
    }

    /// Marks the entries of a range.
    pub(crate) fn mark(&mut self, range: RangeInclusive<u64>, mark: Mark) {
        self.change_marks(range, mark, |marked, bits| marked | bits);
    }

    /// Takes a mark off the entries of a range.
    pub(crate) fn unmark(&mut self, range: RangeInclusive<u64>, mark: Mark) {
        self.change_marks(range, mark, |marked, bits| marked & !bits);
    }

    pub(crate) fn is_marked(&self, at: u64, mark: Mark) -> bool {
        let leaf = sure(walk::leaf_at(self.tree.root(), at));
        leaf.is_some_and(|leaf| leaf.map(mark.map()) >> slot_at(at, 1) & 1 != 0)
    }

    fn change_marks(&mut self, range: RangeInclusive<u64>, mark: Mark, change: impl Fn(u64, u64) -> u64) {
        self.each_leaf(range, |this, path, first, bits| {
            let old = path.leaf.map(mark.map());
            let new = change(old, bits);
            if new != old {
                path.leaf.set_map(mark.map(), new);
                this.settle(path, first);
            }
            ControlFlow::Continue(())
        });
    }

    /// Calls `visit` for each leaf that has entries of the range, with the leaf's first offset and the bits of these
    /// entries.
    fn each_leaf(
        &mut self,
        range: RangeInclusive<u64>,
        mut visit: impl FnMut(&mut Self, &Path<'a>, u64, u64) -> ControlFlow<()>,
    ) {
        let (mut at, last) = (*range.start(), *range.end());
        while at <= last
            && let Some(found) = sure(search::<true>(self.tree.root(), Sort::Present, at, last))
            && let Some(path) = self.find(found)
        {
            let first = found - slot_at(found, 1) as u64;
            let bits = path.leaf.map(PRESENT) & bits_of(found, last);
            if visit(self, &path, first, bits).is_break() {
                break;
            }
            let Some(next) = first.checked_add(FAN as u64) else { break };
            at = next;
        }
    }

    fn find(&self, at: u64) -> Option<Path<'a>> {
        let mut link = self.tree.root();
        if at > walk::reach(link.levels()) {
            return None;
        }
        let mut above = [None; MAX_LEVELS - 1];
        while let Some(node) = link.as_interior() {
            let levels = link.levels();
            above[levels - 2] = Some(node);
            link = node.child(slot_at(at, levels));
        }
        Some(Path { leaf: link.as_leaf()?, above })
    }

    /// The way to the leaf of an offset. What it lacks is made, and is without entries: the caller enters one (W1).
    fn make(&mut self, at: u64) -> Path<'a> {
        let mut link = self.root_reaching(at);
        let mut above = [None; MAX_LEVELS - 1];
        while let Some(node) = link.as_interior() {
            let levels = link.levels();
            above[levels - 2] = Some(node);
            let slot = slot_at(at, levels);
            link = node.child(slot);
            if link.is_none() {
                link = self.tree.nodes().take(levels - 1);
                node.set_child(slot, link);
            }
        }
        Path { leaf: link.as_leaf().expect("a path ends in a leaf"), above }
    }

    /// The root, once the tree is high enough.
    fn root_reaching(&self, at: u64) -> Link<'a> {
        let (mut root, needed) = (self.tree.root(), levels_for(at));
        if root.levels() >= needed {
            return root;
        }
        if root.is_none() {
            root = self.tree.nodes().take(needed);
        }
        while root.levels() < needed {
            let higher = self.tree.nodes().take(root.levels() + 1);
            let node = higher.as_interior().expect("it has two levels or more");
            node.set_child(0, root);
            node.sum_up(0, root);
            root = higher;
        }
        self.tree.set_root(root);
        root
    }

    /// Removes these slots' entries from a leaf.
    fn clear(&mut self, path: &Path<'a>, at: u64, bits: u64) {
        slots_of(bits).for_each(|slot| path.leaf.set(slot, None));
        for map in 0..LEAF_MAPS {
            path.leaf.set_map(map, path.leaf.map(map) & !bits);
        }
        self.count(0, bits.count_ones() as usize);
        self.settle(path, at);
    }

    /// Restores W1 and W2 after the bitmaps of the leaf changed.
    #[inline]
    fn settle(&mut self, path: &Path<'a>, at: u64) {
        let mut child = Link::to_leaf(path.leaf);
        for (levels, node) in (2..).zip(path.above.iter().map_while(|node| *node)) {
            let slot = slot_at(at, levels);
            if child.map(PRESENT) == 0 {
                node.set_child(slot, Link::NONE);
                self.bury(child);
                child = Link::NONE;
                self.give_back(MOST_DEAD);
            }
            if !node.sum_up(slot, child) {
                return;
            }
            child = Link::to_interior(node, levels);
        }
        self.lower(child);
    }

    fn lower(&mut self, mut root: Link<'a>) {
        let old = root.levels();
        if root.map(PRESENT) == 0 {
            self.tree.set_root(Link::NONE);
            self.bury(root);
            return;
        }
        // The nodes above keep their first child meanwhile, for readers that are there.
        while let Some(node) = root.as_interior()
            && node.map(PRESENT) == 1
        {
            self.bury(root);
            root = node.child(0);
        }
        if root.levels() != old {
            self.tree.set_root(root);
        }
        self.give_back(MOST_DEAD);
    }

    /// Notes a node that is about to be unlinked, or was, for the pool.
    fn bury(&mut self, link: Link<'a>) {
        match (link.as_leaf(), link.as_interior()) {
            (Some(leaf), _) => self.dead_leaves.push(leaf),
            (_, Some(node)) => self.dead_interiors.push(node),
            _ => {}
        }
    }

    /// Gives unlinked nodes back to the pool, if there are more than this.
    fn give_back(&mut self, most: usize) {
        if self.dead_leaves.len + self.dead_interiors.len > most {
            self.tree.note_unlinked();
            self.tree.nodes().put(&mut self.dead_leaves, &mut self.dead_interiors);
        }
    }

    fn count(&self, more: usize, fewer: usize) {
        self.pages.store(self.pages.load(Relaxed) + more - fewer, Relaxed);
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.give_back(0);
    }
}
