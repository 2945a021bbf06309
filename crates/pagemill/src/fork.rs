//! After a fork (C4.4): the child has its own copy of the arena and goes on with it.
//!
//! The other threads of the parent are not in the child; they stopped wherever they were. What they own stays handed
//! out. What was on its way between a list and the zone belongs to nobody, and is found by its state: a frame whose
//! state says free is free. So the child forgets the lists and counts the free areas again from the states, once,
//! when it first comes to a slow path; until then the lists are held, so that every path is slow.
use crate::allocator::Inner;
use crate::registry;
use core::sync::atomic::{AtomicU64, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

/// Forks between the first process and this one.
static GENERATION: AtomicU64 = AtomicU64::new(0);
/// While one thread of the child recovers an allocator.
const RECOVERING: u64 = u64::MAX;

pub(crate) fn generation() -> u64 {
    GENERATION.load(Relaxed)
}

/// Has the child hold all lists.
pub(crate) fn watch() {
    fn in_child() {
        GENERATION.fetch_add(1, Relaxed);
        registry::for_each(|arena| arena.inner().lists.hold_after_fork());
    }
    assert!(pagemill_sys::on_fork_in_child(in_child), "the system does not take a fork handler: no memory");
}

impl Inner {
    /// Goes before everything that touches the zone.
    #[inline]
    pub(crate) fn check_generation(&self) {
        if self.generation.load(Acquire) != generation() {
            self.recover();
        }
    }

    #[cold]
    fn recover(&self) {
        loop {
            let seen = self.generation.load(Acquire);
            if seen == generation() {
                return;
            }
            // Acquire and Release: one thread recovers, and the others see all of it.
            if seen != RECOVERING && self.generation.compare_exchange(seen, RECOVERING, AcqRel, Relaxed).is_ok() {
                break;
            }
            core::hint::spin_loop();
        }
        assert!(
            !cfg!(feature = "detection-off"),
            "an allocator without frame states (detection-off) cannot go on after fork"
        );
        self.lists.empty_after_fork();
        self.zone.recover(|pfn| self.arena.state(pfn.as_u32()).is_free());
        self.lists.release_after_fork();
        self.generation.store(generation(), Release);
    }
}
