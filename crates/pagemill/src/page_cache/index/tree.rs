//! A tree's root, and how it is read without a lock.
//!
//! # Invariants
//! - T1 `unlinked` is raised after nodes were unlinked and before one of them is cleared or goes back to the pool.
//! - T2 What another tree writes into a node comes after that, and is published by Release. A reader that sees such a
//!   value by Acquire therefore finds `unlinked` changed.
//!
//! So a walk between two equal values of `unlinked` has read values only that its nodes had while they belonged to this
//! tree. The nodes on the way to an entry are not unlinked as long as the entry is there, but for roots that are not
//! needed any more; hence such a walk finds the entry.
use super::nodes::{AtomicLink, Link, Nodes, Wandered};
use crate::sync::AtomicU64;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::Arc;

/// On a cache line of its own, which changes only when the root does or nodes were unlinked.
#[repr(align(64))]
pub(super) struct Tree {
    root: AtomicLink,
    unlinked: AtomicU64,
    nodes: Arc<Nodes>,
}

impl Tree {
    pub(super) fn new(nodes: Arc<Nodes>) -> Self {
        Self { root: AtomicLink::new(), unlinked: AtomicU64::new(0), nodes }
    }
    pub(super) fn nodes(&self) -> &Nodes {
        &self.nodes
    }
    #[inline]
    pub(super) fn root(&self) -> Link<'_> {
        self.root.get()
    }
    /// Under the lock.
    pub(super) fn set_root(&self, root: Link<'_>) {
        self.root.set(root);
    }
    /// Has readers try again that may be in nodes which were unlinked. Under the lock.
    pub(super) fn note_unlinked(&self) {
        let next = self.unlinked.load(Relaxed) + 1;
        // Release pairs with the Acquire in `read`: whoever reads this sees the nodes unlinked. The second load there
        // sees it by T2.
        self.unlinked.store(next, Release);
    }
    /// Walks once without the lock. Fails where nodes were unlinked meanwhile.
    #[inline]
    pub(super) fn read<'a, R>(&'a self, walk: impl FnOnce(Link<'a>) -> Result<R, Wandered>) -> Result<R, Wandered> {
        // Acquire pairs with the Release in `note_unlinked`.
        let before = self.unlinked.load(Acquire);
        let found = walk(self.root())?;
        // The walk's loads are Acquire, so this one comes after them.
        if self.unlinked.load(Relaxed) == before { Ok(found) } else { Err(Wandered) }
    }
}
