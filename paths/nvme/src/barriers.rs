//! The order in which the driver's accesses to memory and registers reach the controller.
//!
//! Nothing else is here, so that a model (`doorbells/tests.rs`) can include this file with other atomics in `sync`.
use super::sync::{AtomicU32, Ordering, fence};

/// Orders earlier writes to memory before a later write to a doorbell or its shadow, as the controller sees them.
pub(super) fn before_doorbell() {
    // On x86 a store to registers never overtakes one to memory, so a compiler fence would be enough.
    fence(Ordering::SeqCst);
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a barrier without operands. A fence orders memory among processors only; a device needs the outer domain.
    unsafe {
        std::arch::asm!("dmb oshst", options(nostack, preserves_flags))
    };
}

/// Writes a position to a shadow, and reads the EventIdx after that (D1 of `doorbells`).
pub(super) fn announce(position: &AtomicU32, event: &AtomicU32, new: u32) -> u32 {
    position.store(new.to_le(), Ordering::Relaxed);
    // Pairs with the controller's barrier between its write of the EventIdx and its last read of the position.
    fence(Ordering::SeqCst);
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        std::arch::asm!("dmb osh", options(nostack, preserves_flags))
    };
    u32::from_le(event.load(Ordering::Relaxed))
}

/// Orders the read of the phase bit before later reads of what the controller wrote before it.
pub(super) fn after_phase() {
    fence(Ordering::Acquire);
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        std::arch::asm!("dmb oshld", options(nostack, preserves_flags))
    };
}
