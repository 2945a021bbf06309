//! Shutting the per-CPU lists, so that freed pages go to the zone, and opening them again.
//!
//! There is a reason to shut them while a request waits, the zone is low, or the arena is retired: open lists would keep pages
//! from the request, or from the zone's reserve.
//!
//! # Invariant
//! - Each thread that stores a reason, or takes one back, calls [`settle`] afterwards (a request that waits behind another one
//!   leaves it to that). When all such calls have returned, the lists are shut if there is a reason, and open if there is none:
//!   the last thread to write to the lists looked for reasons after it wrote, and a thread whose change it did not see would
//!   have written later.
use crate::sync::fence;
use core::sync::atomic::Ordering::SeqCst;

/// Opens or shuts lists, as `has_reason` says. `set` writes to them: true opens.
pub(crate) fn settle(has_reason: impl Fn() -> bool, set: impl Fn(bool)) {
    // SeqCst, here and below, pairs with the same fences of other threads. The change that this thread made comes before it.
    fence(SeqCst);
    loop {
        let is_open = !has_reason();
        set(is_open);
        fence(SeqCst);
        if has_reason() != is_open {
            return;
        }
        // A reason came or went meanwhile. The thread that changed it may have written to the lists before this one did.
    }
}
