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

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::open;
    use core::cell::Cell;

    #[test]
    fn lists_that_were_opened_as_a_reason_came_are_shut_again() {
        let (asked, opened, shut) = (Cell::new(0), Cell::new(0), Cell::new(0));
        let count = |of: &Cell<u32>| of.set(of.get() + 1);
        let open_with = |reason_from: u32| {
            let has_reason = || {
                count(&asked);
                asked.get() >= reason_from
            };
            asked.set(0);
            open(has_reason, || count(&opened), || count(&shut));
            (opened.take(), shut.take())
        };
        assert_eq!([open_with(1), open_with(2), open_with(3)], [(0, 0), (1, 1), (1, 0)]);
    }
}
