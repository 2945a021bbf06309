//! The nodes of all indexes of a cache, and the pool that lends them out.
//!
//! # Invariants
//! - N1 A node's memory stays a node of its kind until its pool is dropped. A link leads to a node of the same pool as
//!   the node or tree that it is stored in, and its tag tells the kind of that node.
//! - N2 Whatever a reader can reach is atomic, so it may read a node that has gone to another tree.
//! - N3 A node in the pool is empty: no slots, no children, no bits.
use crate::sync::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Mutex, fence};
use core::marker::PhantomData;
use core::num::NonZeroU32;
use core::ptr::{self, NonNull};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Arc, PoisonError};

/// Of an offset, for each level of a tree. Models have small nodes.
pub(super) const BITS: u32 = if cfg!(loom) { 2 } else { 6 };
/// Slots of a node.
pub(super) const FAN: usize = 1 << BITS;
/// Levels of a tree that reaches all offsets.
pub(super) const MAX_LEVELS: usize = u64::BITS.div_ceil(BITS) as usize;
/// The bitmap of a node whose slots are all in use.
pub(super) const ALL: u64 = u64::MAX >> (u64::BITS - (1 << BITS));

/// Bitmaps of a node: which slots are in use, which are marked, or have a marked entry below.
pub(super) const PRESENT: usize = 0;
pub(super) const DIRTY: usize = 1;
pub(super) const WRITEBACK: usize = 2;
/// Which children have no hole. A leaf does without: all of its slots are in use or not.
pub(super) const FULL: usize = 3;
/// The bitmaps that both kinds have.
pub(super) const LEAF_MAPS: usize = 3;
const MAPS: usize = 4;

/// Nodes begin on a cache line, so that these bits of their addresses are free for a tag.
const TAG: usize = 63;
const _: () = assert!(align_of::<Leaf>() > TAG && align_of::<Interior>() > TAG && MAX_LEVELS <= TAG);

/// A leaf: frame numbers, 0 where there is none.
#[repr(align(64))]
pub(super) struct Leaf {
    maps: [AtomicU64; LEAF_MAPS],
    next: AtomicPtr<Self>,
    slots: [AtomicU32; FAN],
}

/// A node with children.
#[repr(align(64))]
pub(super) struct Interior {
    maps: [AtomicU64; MAPS],
    next: AtomicPtr<Self>,
    children: [AtomicLink; FAN],
}

/// Where a node is, tagged with the number of levels of the tree that begins there: 1 for a leaf, 0 for no node.
#[derive(Clone, Copy)]
pub(super) struct Link<'a>(*mut (), PhantomData<&'a Nodes>);

/// A place for a [`Link`], in a node or a tree. Both end before the pool does.
pub(super) struct AtomicLink(AtomicPtr<()>);

/// Part of a path that cannot be, because a node went to another tree meanwhile.
#[derive(Debug)]
pub(super) struct Wandered;

impl AtomicLink {
    pub(super) fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }
    #[inline]
    pub(super) fn get(&self) -> Link<'_> {
        // Acquire pairs with the Release in `set`: the node is seen as it was when it was linked here, or later.
        Link(self.0.load(Acquire), PhantomData)
    }
    #[inline]
    pub(super) fn set(&self, link: Link<'_>) {
        // Release pairs with the Acquire in `get`.
        self.0.store(link.0, Release);
    }
}

impl<'a> Link<'a> {
    pub(super) const NONE: Self = Self(ptr::null_mut(), PhantomData);

    pub(super) fn to_leaf(leaf: &'a Leaf) -> Self {
        Self::tagged(ptr::from_ref(leaf).cast(), 1)
    }
    pub(super) fn to_interior(node: &'a Interior, levels: usize) -> Self {
        debug_assert!((2..=MAX_LEVELS).contains(&levels), "{levels} levels");
        Self::tagged(ptr::from_ref(node).cast(), levels)
    }
    #[inline]
    fn tagged(node: *const (), levels: usize) -> Self {
        Self(node.cast_mut().map_addr(|address| address | levels), PhantomData)
    }
    #[inline]
    fn untagged(self) -> *mut () {
        self.0.map_addr(|address| address & !TAG)
    }
    #[inline]
    pub(super) fn levels(self) -> usize {
        self.0.addr() & TAG
    }
    #[inline]
    pub(super) fn is_none(self) -> bool {
        self.0.is_null()
    }
    #[inline]
    pub(super) fn as_leaf(self) -> Option<&'a Leaf> {
        // SAFETY: the tag says that it leads to a leaf, which stays one for as long as the pool exists (N1), and the
        // pool outlives 'a. A leaf is shared only, and all of it is atomic (N2).
        (self.levels() == 1).then(|| unsafe { &*self.untagged().cast() })
    }
    #[inline]
    pub(super) fn as_interior(self) -> Option<&'a Interior> {
        // SAFETY: as above, for a node with children.
        (self.levels() > 1).then(|| unsafe { &*self.untagged().cast() })
    }
    /// As [`as_interior`](Self::as_interior), if so many levels begin there. The address is ready before the tag was looked
    /// at.
    #[inline]
    pub(super) fn as_interior_of(self, levels: usize) -> Option<&'a Interior> {
        // SAFETY: as above; the tag, which is taken off, says so.
        (levels > 1 && self.levels() == levels)
            .then(|| unsafe { &*self.0.map_addr(|address| address - levels).cast::<Interior>() })
    }
    /// The bitmap; for a leaf, `FULL` is made from `PRESENT`.
    #[inline]
    pub(super) fn map(self, map: usize) -> u64 {
        match (self.as_leaf(), self.as_interior()) {
            (Some(leaf), _) if map == FULL => leaf.map(PRESENT),
            (Some(leaf), _) => leaf.map(map),
            (_, Some(node)) => node.map(map),
            _ => 0,
        }
    }
    /// The child in this slot of a node that has children. Fails where the link there does not lead one level down.
    #[inline]
    pub(super) fn child(self, slot: usize) -> Result<Link<'a>, Wandered> {
        let Some(node) = self.as_interior() else { return Err(Wandered) };
        let child = node.child(slot);
        if child.levels() == self.levels() - 1 || child.is_none() { Ok(child) } else { Err(Wandered) }
    }
}

impl Leaf {
    #[inline]
    pub(super) fn map(&self, map: usize) -> u64 {
        // Acquire pairs with the Release in `set_map`, for the count of unlinked nodes (T2 in `tree.rs`).
        self.maps[map].load(Acquire)
    }
    #[inline]
    pub(super) fn set_map(&self, map: usize, bits: u64) {
        // Release pairs with the Acquire in `map`.
        self.maps[map].store(bits, Release);
    }
    #[inline]
    pub(super) fn get(&self, slot: usize) -> Option<NonZeroU32> {
        // Acquire pairs with the Release in `set`, and with the fence in `fill` (T2).
        NonZeroU32::new(self.slots[slot % FAN].load(Acquire))
    }
    #[inline]
    pub(super) fn set(&self, slot: usize, frame: Option<NonZeroU32>) {
        // Release pairs with the Acquire in `get`, and with the fence in `copy`.
        self.slots[slot % FAN].store(frame.map_or(0, NonZeroU32::get), Release);
    }
    /// Sets the slots from `first` on.
    #[inline]
    pub(super) fn fill(&self, first: usize, frames: &[NonZeroU32]) {
        // Release pairs, by way of the stores below, with the Acquire in `get` and the fence in `copy`.
        fence(Release);
        for (slot, frame) in self.slots[first..].iter().zip(frames) {
            slot.store(frame.get(), Relaxed);
        }
    }
    /// Copies the slots from `first` on, and returns how many.
    #[inline]
    pub(super) fn copy(&self, first: usize, out: &mut [u32]) -> usize {
        let slots = &self.slots[first % FAN..];
        for (slot, out) in slots.iter().zip(&mut *out) {
            *out = slot.load(Relaxed);
        }
        // Acquire pairs, by way of the loads above, with the Release in `set` and the fence in `fill` (T2).
        fence(Acquire);
        slots.len().min(out.len())
    }
}

impl Interior {
    #[inline]
    pub(super) fn map(&self, map: usize) -> u64 {
        // Acquire pairs with the Release in `set_map` (T2).
        self.maps[map].load(Acquire)
    }
    #[inline]
    fn set_map(&self, map: usize, bits: u64) {
        // Release pairs with the Acquire in `map`.
        self.maps[map].store(bits, Release);
    }
    #[inline]
    pub(super) fn child(&self, slot: usize) -> Link<'_> {
        self.children[slot % FAN].get()
    }
    #[inline]
    pub(super) fn set_child(&self, slot: usize, child: Link<'_>) {
        self.children[slot % FAN].set(child);
    }
    /// Has the bitmaps say what those of this child say. Returns whether one of them changed.
    #[inline]
    pub(super) fn sum_up(&self, slot: usize, child: Link<'_>) -> bool {
        let below = match (child.as_leaf(), child.as_interior()) {
            (Some(leaf), _) => [leaf.map(PRESENT), leaf.map(DIRTY), leaf.map(WRITEBACK), leaf.map(PRESENT)],
            (_, Some(node)) => core::array::from_fn(|map| node.map(map)),
            _ => [0; MAPS],
        };
        let mut has_changed = false;
        for (map, bits) in below.into_iter().enumerate() {
            let is_set = if map == FULL { bits == ALL } else { bits != 0 };
            let old = self.map(map);
            let new = old & !(1 << slot) | u64::from(is_set) << slot;
            if new != old {
                self.set_map(map, new);
                has_changed = true;
            }
        }
        has_changed
    }
}

/// What a pool has two kinds of.
pub(super) trait Node: Sized {
    fn empty() -> Self;
    /// The next node of a chain. Used by the thread that has the chain.
    fn next(&self) -> &AtomicPtr<Self>;
    /// Makes it empty (N3). A node that lost its entries one by one is so but for what `shrink` leaves in a root.
    fn clear(&self);
}

impl Node for Leaf {
    fn empty() -> Self {
        Self {
            maps: core::array::from_fn(|_| AtomicU64::new(0)),
            next: AtomicPtr::new(ptr::null_mut()),
            slots: core::array::from_fn(|_| AtomicU32::new(0)),
        }
    }
    fn next(&self) -> &AtomicPtr<Self> {
        &self.next
    }
    fn clear(&self) {
        debug_assert!(
            self.slots.iter().all(|slot| slot.load(Relaxed) == 0) && (0..LEAF_MAPS).all(|n| self.map(n) == 0)
        );
    }
}

impl Node for Interior {
    fn empty() -> Self {
        Self {
            maps: core::array::from_fn(|_| AtomicU64::new(0)),
            next: AtomicPtr::new(ptr::null_mut()),
            children: core::array::from_fn(|_| AtomicLink::new()),
        }
    }
    fn next(&self) -> &AtomicPtr<Self> {
        &self.next
    }
    fn clear(&self) {
        self.set_child(0, Link::NONE);
        (0..MAPS).for_each(|map| self.set_map(map, 0));
        debug_assert!((0..FAN).all(|slot| self.child(slot).is_none()));
    }
}

/// Nodes of one kind that are linked by their `next`.
pub(super) struct Chain<'a, T> {
    first: Option<&'a T>,
    pub(super) len: usize,
}

impl<'a, T: Node> Chain<'a, T> {
    pub(super) const EMPTY: Self = Self { first: None, len: 0 };

    pub(super) fn push(&mut self, node: &'a T) {
        let next = self.first.map_or(ptr::null_mut(), |next| ptr::from_ref(next).cast_mut());
        node.next().store(next, Relaxed);
        self.first = Some(node);
        self.len += 1;
    }
    fn pop(&mut self) -> Option<&'a T> {
        let node = self.first?;
        // SAFETY: null, or from a reference to a node that lives for 'a: `push` stored it, and whoever has the chain
        // alone uses `next`. The thread that pushed is ordered before by the lock that guards the chain.
        self.first = unsafe { node.next().load(Relaxed).as_ref() };
        self.len -= 1;
        Some(node)
    }
}

/// The nodes of one kind. Their memory comes in slabs.
struct Shelf<T: 'static> {
    slabs: Vec<NonNull<[T]>>,
    /// Within the slabs: the lifetime stands for that of the pool.
    free: Chain<'static, T>,
}

// SAFETY: it owns its slabs, and nodes are made of atomics.
unsafe impl<T: Send + Sync> Send for Shelf<T> {}

impl<T: Node> Shelf<T> {
    const SLAB: usize = if cfg!(any(loom, miri)) { 1 } else { (16 << 10) / size_of::<T>() };
    const EMPTY: Self = Self { slabs: Vec::new(), free: Chain::EMPTY };

    fn take(&mut self) -> (&'static T, usize) {
        let mut bytes = 0;
        if self.free.first.is_none() {
            let slab = NonNull::from(Box::leak((0..Self::SLAB).map(|_| T::empty()).collect::<Box<[T]>>()));
            self.slabs.push(slab);
            // SAFETY: it was just made, and is only shared from now on until `drop`, after the last use of a node.
            let slab: &'static [T] = unsafe { slab.as_ref() };
            slab.iter().rev().for_each(|node| self.free.push(node));
            bytes = size_of_val(slab);
        }
        (self.free.pop().expect("a slab has nodes"), bytes)
    }
}

impl<T> Drop for Shelf<T> {
    fn drop(&mut self) {
        for slab in self.slabs.drain(..) {
            // SAFETY: it comes from `Box::leak`, with the right to change it. Trees hold the pool, and references to nodes end before their trees.
            drop(unsafe { Box::from_raw(slab.as_ptr()) });
        }
    }
}

/// A pool of nodes, for all indexes of a cache. The memory of the nodes goes back to the system when the pool ends.
pub(crate) struct Nodes {
    leaves: Mutex<Shelf<Leaf>>,
    interiors: Mutex<Shelf<Interior>>,
    in_use: AtomicUsize,
    bytes: AtomicUsize,
}

impl Nodes {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            leaves: Mutex::new(Shelf::EMPTY),
            interiors: Mutex::new(Shelf::EMPTY),
            in_use: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
        })
    }
    /// Nodes that indexes have.
    #[cfg(any(all(test, not(shuttle)), loom))]
    pub(crate) fn in_use(&self) -> usize {
        self.in_use.load(Relaxed)
    }
    /// Memory of all nodes, those that no index has included.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.load(Relaxed)
    }
    /// An empty tree of so many levels: one node.
    pub(super) fn take(&self, levels: usize) -> Link<'_> {
        if levels == 1 {
            Link::to_leaf(self.take_from(&self.leaves))
        } else {
            Link::to_interior(self.take_from(&self.interiors), levels)
        }
    }
    fn take_from<T: Node>(&self, shelf: &Mutex<Shelf<T>>) -> &T {
        let (node, bytes) = shelf.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.in_use.fetch_add(1, Relaxed);
        if bytes > 0 {
            self.bytes.fetch_add(bytes, Relaxed);
        }
        node
    }
    /// Takes unlinked nodes back. The count of unlinked nodes of their tree has been raised (T1).
    pub(super) fn put(&self, leaves: &mut Chain<'_, Leaf>, interiors: &mut Chain<'_, Interior>) {
        self.put_on(&self.leaves, leaves);
        self.put_on(&self.interiors, interiors);
    }
    fn put_on<T: Node>(&self, shelf: &Mutex<Shelf<T>>, nodes: &mut Chain<'_, T>) {
        if nodes.len == 0 {
            return;
        }
        self.in_use.fetch_sub(nodes.len, Relaxed);
        let mut shelf = shelf.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(node) = nodes.pop() {
            node.clear();
            // SAFETY: the node is in a slab of this pool (N1), and is used by way of it for as long as the pool exists.
            shelf.free.push(unsafe { &*ptr::from_ref(node) });
        }
    }
}
