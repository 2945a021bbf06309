//! Shutting the per-CPU lists, so that freed pages go to the zone, and opening them again.
//!
//! There is a reason against open lists while a request waits, the zone is low, or the arena is retired: open lists would keep
//! pages from the request, or from the zone's reserve. A reason is stored before lists are shut for it. A thread that opens lists
//! looks for reasons first, and again afterwards: another thread may have stored one meanwhile.
use crate::sync::fence;
use core::sync::atomic::Ordering::SeqCst;

/// Shuts lists for a reason that was stored before.
pub(crate) fn shut(shut: impl FnOnce()) {
    // SeqCst pairs with the fence in `open`: either `open` sees the reason, or this shuts what `open` opened.
    fence(SeqCst);
    shut();
}

/// Opens lists, unless there is a reason against it.
pub(crate) fn open(has_reason: impl Fn() -> bool, open: impl FnOnce(), shut: impl FnOnce()) {
    if has_reason() {
        return;
    }
    open();
    // SeqCst pairs with the fence in `shut`.
    fence(SeqCst);
    if has_reason() {
        shut();
    }
}
