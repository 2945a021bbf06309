//! Shutting lists, and opening them again while somebody else may come to have a reason to shut them.
//!
//! A reason is stored before lists are shut for it. Whoever opens them looks for reasons before, and again afterwards: lists
//! that are open while there is a reason would keep pages from those who wait, or from the reserve.
use crate::sync::fence;
use core::sync::atomic::Ordering::SeqCst;

/// Shuts lists for a reason that was stored before.
pub(crate) fn shut(shut: impl FnOnce()) {
    // SeqCst pairs with the fence in `open`: either that sees the reason, or this shuts what it opened.
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
