//! What the zones of one allocator share: its waiting requests, its claim, injected faults, limits, and the layout of its nodes.
//!
//! A zone outlives the last handle of its allocator as long as pages of it are out. [`Shared`] lives as long: each zone
//! holds a reference to it. It knows nothing of the parts above. A free has to ask the allocator something, and a
//! forked child has to tell it something; both call [`Hooks`]. The allocator registers them when it is made, and they
//! are called only while it has a handle.
use crate::claims::Claims;
use crate::fault::Faults;
use crate::process::no_fork;
use crate::topology::Layout;
use crate::wait::Waits;
use core::ops::Deref;
use core::ptr;
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering::Relaxed};
use pagemill_core::{Gfp, NodeMask, Order, PAGEBLOCK_FRAMES};
use pagemill_os::MemoryLimit;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// What a request lacks while it waits. Requests that lack the same stand in one line (`wait.rs`, C3.20).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Lack {
    pub(crate) order: Order,
    /// The number of blocks that it needs at once.
    pub(crate) blocks: usize,
    /// The blocks are pages, and must be neighbours.
    pub(crate) is_run: bool,
    pub(crate) nodes: NodeMask,
    pub(crate) is_dma32: bool,
}

impl Lack {
    /// Whether it is one block of several frames, or a run.
    pub(crate) fn is_one_piece(&self) -> bool {
        self.is_run || (self.blocks == 1 && self.order != Order::ZERO)
    }
    /// Whether a block, or the run, does not fit into a pageblock.
    pub(crate) fn is_above_a_pageblock(&self) -> bool {
        self.order > Order::PAGEBLOCK || (self.is_run && self.frames() > PAGEBLOCK_FRAMES as usize)
    }
    pub(crate) fn frames(&self) -> usize {
        self.blocks * self.order.frames() as usize
    }
    /// The smallest set of flags that selects the same zones. Other flags do not tell kinds of request apart.
    pub(crate) fn gfp(&self) -> Gfp {
        if self.is_dma32 { Gfp::KERNEL | Gfp::DMA32 } else { Gfp::KERNEL }
    }
}

/// The functions that zones call in the allocator. `allocator` is the pointer that was given to [`Shared::serves`].
#[derive(Debug)]
pub(crate) struct Hooks {
    /// Whether there may be enough now for a request that waits with this lack.
    pub(crate) is_hopeful: unsafe fn(allocator: *const (), lack: Lack) -> bool,
    /// A forked child retired a zone.
    pub(crate) zone_was_retired: unsafe fn(allocator: *const ()),
}

/// The requests that wait for an allocator's memory.
///
/// Never freed: a thread that freed the last page of a zone may still ask whether a request waits. It is reused for
/// another allocator; at worst such a late question wakes one of that allocator's requests in vain.
#[derive(Debug)]
pub(crate) struct MemoryWaits {
    waits: Waits<Lack>,
    /// The allocator that it serves, or served last.
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
    /// Memory was freed: wakes requests for which it may be enough. The caller counted it towards the claim before
    /// ([`Zone::claim_freed`](crate::zone::Zone::claim_freed)).
    #[inline]
    pub(crate) fn note_memory(&self) {
        if self.waits.is_awaited() {
            // SAFETY: the hook is called with the lines locked and a request in them. That request has a handle, so the
            // allocator that `of` names exists, even if the memory was another allocator's. `of` was set before any
            // request could wait. A future that was leaked may have lost its handle: see `forget_leaked`.
            self.waits.note_freed(&|lack| unsafe { (self.hooks.is_hopeful)(self.of.load(Relaxed), lack) });
        }
    }

    /// In a forked child, for an allocator with a handle: one of its zones was retired.
    pub(crate) fn zone_was_retired(&self) {
        // SAFETY: the allocator has a handle, so it exists.
        unsafe { (self.hooks.zone_was_retired)(self.of.load(Relaxed)) };
    }
}

/// The waits that serve no allocator now. Locked only in sections that no fork interrupts.
static UNUSED_WAITS: Mutex<Vec<&MemoryWaits>> = Mutex::new(Vec::new());

fn unused_waits() -> MutexGuard<'static, Vec<&'static MemoryWaits>> {
    UNUSED_WAITS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// In a forked child: a thread of the parent that noted a late free may have held the lock of one of them.
pub(crate) fn forget_unused_waits() {
    unused_waits().iter().for_each(|waits| waits.forget_after_fork());
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Shared {
    /// The allocator's number, unique in the process.
    pub(crate) number: u64,
    pub(crate) waits: &'static MemoryWaits,
    pub(crate) claims: Claims,
    pub(crate) faults: OnceLock<Faults>,
    /// What the process may commit, if that is limited.
    pub(crate) limit: Option<MemoryLimit>,
    pub(crate) layout: Layout,
    /// Whether the system is asked for 2 MiB pages.
    pub(crate) huge_pages: bool,
    /// The nodes whose memory requests may take (C3.7), like the kernel's cpuset.
    allowed: AtomicU64,
}

impl Shared {
    /// The allocator must call [`serves`](Self::serves) before any request can wait.
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

    /// Sets the allocator that the hooks are called with.
    pub(crate) fn serves<A>(&self, allocator: &A) {
        self.waits.of.store(ptr::from_ref(allocator).cast_mut().cast(), Relaxed);
    }

    /// The nodes whose memory requests may take now.
    pub(crate) fn allowed(&self) -> NodeMask {
        NodeMask::from_bits(self.allowed.load(Relaxed))
    }
    pub(crate) fn set_allowed(&self, nodes: NodeMask) {
        self.allowed.store(nodes.as_bits(), Relaxed);
    }

    /// Whether this acquisition must fail. Costs one load if no faults are injected.
    #[inline]
    pub(crate) fn is_refused_by_fault(&self, gfp: Gfp) -> bool {
        self.faults.get().is_some_and(|faults| faults.strikes(gfp))
    }
    /// Whether acquisitions with these flags may have been made to fail.
    pub(crate) fn has_failed_on_purpose(&self, gfp: Gfp) -> bool {
        self.faults.get().is_some_and(|faults| faults.injected() > 0 && faults.is_for(gfp))
    }
    pub(crate) fn faults_injected(&self) -> u64 {
        self.faults.get().map_or(0, Faults::injected)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // No request waits: a request that waits has a handle.
        let _held = no_fork();
        unused_waits().push(self.waits);
    }
}
