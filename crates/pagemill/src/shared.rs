//! What the zones of one allocator share: who waits for its memory and claims it, injected faults, limits, where its nodes are.
//!
//! A zone outlives the last handle of its allocator as long as pages of it are out, and so does this, which each zone has a part
//! of. It knows nothing above it. What a free has to ask of the allocator, and the child of a fork to tell it, goes by
//! [`Hooks`], which the allocator registers as it is made, and only while a handle of it is there.
use crate::claims::Claims;
use crate::fault::Faults;
use crate::process::no_fork;
use crate::topology::Layout;
use crate::wait::Waits;
use core::ops::Deref;
use core::ptr;
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering::Relaxed};
use pagemill_core::{Gfp, NodeMask, Order};
use pagemill_os::MemoryLimit;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// What a request lacks while it waits. Requests that lack the same stand in one line (`wait.rs`, C3.20).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Lack {
    pub(crate) order: Order,
    /// So many blocks at once.
    pub(crate) blocks: usize,
    pub(crate) nodes: NodeMask,
    pub(crate) is_dma32: bool,
}

impl Lack {
    /// Is it one block of several frames?
    pub(crate) fn is_one_block(&self) -> bool {
        self.blocks == 1 && self.order != Order::ZERO
    }
    pub(crate) fn frames(&self) -> usize {
        self.blocks * self.order.frames() as usize
    }
    /// The least flags with its zones: other flags do not tell kinds apart.
    pub(crate) fn gfp(&self) -> Gfp {
        if self.is_dma32 { Gfp::KERNEL | Gfp::DMA32 } else { Gfp::KERNEL }
    }
}

/// What the zones' part calls in the allocator above; `A` is what that is to them.
#[derive(Debug)]
pub(crate) struct Hooks {
    /// May there be enough now for a request that waits with this lack?
    pub(crate) is_hopeful: unsafe fn(allocator: *const (), lack: Lack) -> bool,
    /// In the child of a fork: a zone is retired.
    pub(crate) zone_was_retired: unsafe fn(allocator: *const ()),
}

/// The requests that wait for an allocator's memory.
///
/// It is never freed: a thread that freed the last page of a zone may still ask whether a request waits. It serves another
/// allocator later; at worst such a late question wakes a request there in vain.
#[derive(Debug)]
pub(crate) struct MemoryWaits {
    waits: Waits<Lack>,
    /// The allocator that it serves, or did last.
    of: AtomicPtr<()>,
    hooks: &'static Hooks,
}

impl Deref for MemoryWaits {
    type Target = Waits<Lack>;
    fn deref(&self) -> &Waits<Lack> {
        &self.waits
    }
}

impl MemoryWaits {
    /// Memory came back: wakes requests that it may be enough for. [`Zone::claim_freed`](crate::zone::Zone::claim_freed) goes before.
    #[inline]
    pub(crate) fn note_memory(&self) {
        if self.waits.is_awaited() {
            // SAFETY: called with the lines held and a request in them, which has a handle. So the allocator that this serves
            // now is there, also if the memory was another one's; and `of` was set before anybody could wait.
            self.waits.note_freed(&|lack| unsafe { (self.hooks.is_hopeful)(self.of.load(Relaxed), lack) });
        }
    }

    /// In the child of a fork, of an allocator with a handle: one of its zones is retired.
    pub(crate) fn zone_was_retired(&self) {
        // SAFETY: there is a handle, and so the allocator.
        unsafe { (self.hooks.zone_was_retired)(self.of.load(Relaxed)) };
    }
}

/// Those that serve no allocator now. Locked in sections that no fork meets halfway.
static UNUSED_WAITS: Mutex<Vec<&MemoryWaits>> = Mutex::new(Vec::new());

fn unused_waits() -> MutexGuard<'static, Vec<&'static MemoryWaits>> {
    UNUSED_WAITS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// In the child of a fork: a thread of the parent that noted a late free may have held the lock of one.
pub(crate) fn forget_unused_waits() {
    unused_waits().iter().for_each(|waits| waits.forget_after_fork());
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Shared {
    /// No two allocators have the same.
    pub(crate) number: u64,
    pub(crate) waits: &'static MemoryWaits,
    pub(crate) claims: Claims,
    pub(crate) faults: OnceLock<Faults>,
    /// What the process may commit, if that is limited.
    pub(crate) limit: Option<MemoryLimit>,
    pub(crate) layout: Layout,
    /// Is the system asked for 2 MiB pages?
    pub(crate) huge_pages: bool,
    /// Nodes that requests may have memory of (C3.7): the kernel's cpuset.
    allowed: AtomicU64,
}

impl Shared {
    /// For an allocator that calls [`serves`](Self::serves) before anybody can wait.
    pub(crate) fn new(layout: Layout, huge_pages: bool, hooks: &'static Hooks) -> Self {
        static MADE: AtomicU64 = AtomicU64::new(0);
        let held = no_fork();
        let fresh = || &*Box::leak(Box::new(MemoryWaits { waits: Waits::default(), of: AtomicPtr::default(), hooks }));
        let waits = unused_waits().pop().unwrap_or_else(fresh);
        drop(held);
        [&waits.ended, &waits.waited_us, &waits.longest_us].iter().for_each(|counter| counter.store(0, Relaxed));
        Self {
            number: MADE.fetch_add(1, Relaxed),
            waits,
            claims: Claims::default(),
            faults: OnceLock::new(),
            limit: MemoryLimit::of_process(),
            layout,
            huge_pages,
            allowed: AtomicU64::new(NodeMask::ALL.as_bits()),
        }
    }

    /// From now on the hooks are called with this.
    pub(crate) fn serves<A>(&self, allocator: &A) {
        self.waits.of.store(ptr::from_ref(allocator).cast_mut().cast(), Relaxed);
    }

    /// Nodes that requests may have memory of, now.
    pub(crate) fn allowed(&self) -> NodeMask {
        NodeMask::from_bits(self.allowed.load(Relaxed))
    }
    pub(crate) fn set_allowed(&self, nodes: NodeMask) {
        self.allowed.store(nodes.as_bits(), Relaxed);
    }

    /// Is this acquisition to fail? One look at a word where nothing is injected.
    #[inline]
    pub(crate) fn is_refused_by_fault(&self, gfp: Gfp) -> bool {
        self.faults.get().is_some_and(|faults| faults.strikes(gfp))
    }
    /// Were acquisitions made to fail, and are those with these flags among them?
    pub(crate) fn has_failed_on_purpose(&self, gfp: Gfp) -> bool {
        self.faults.get().is_some_and(|faults| faults.injected() > 0 && faults.is_for(gfp))
    }
    pub(crate) fn faults_injected(&self) -> u64 {
        self.faults.get().map_or(0, Faults::injected)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Nobody waits: a request that waits has a handle.
        let _held = no_fork();
        unused_waits().push(self.waits);
    }
}
