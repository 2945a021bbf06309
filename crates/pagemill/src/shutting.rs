//! Shuts the per-CPU lists, so that freed pages go to the zone, and opens them again.
//!
//! There is a reason to shut a zone's lists while a request waits, the zone is low, or its arena is retired: open lists
//! would keep pages from the request, or from the zone's reserve.
//!
//! # Invariant
//! - A thread that stores or clears a reason calls [`settle`] afterwards. (A request that waits behind another leaves
//!   this to the first one.) When all such calls have returned, the lists are shut if there is a reason, and open if
//!   there is none: the last thread that wrote to the lists checked for reasons after its write, and a thread whose
//!   change it did not see would have written later.
use crate::sync::fence;
use core::sync::atomic::Ordering::SeqCst;

/// Opens or shuts lists, depending on `has_reason`. `set(true)` opens them.
pub(crate) fn settle(has_reason: impl Fn() -> bool, set: impl Fn(bool)) {
    // SeqCst, here and below, pairs with the same fences of other threads. This thread's change of a reason comes
    // before the fence.
    fence(SeqCst);
    loop {
        let is_open = !has_reason();
        set(is_open);
        fence(SeqCst);
        if has_reason() != is_open {
            return;
        }
        // The reason changed meanwhile. The thread that changed it may have written to the lists before this one did.
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::settle;
    use core::cell::{Cell, RefCell};

    #[test]
    fn a_reason_that_changes_while_lists_are_set_is_seen() {
        // `reasons` are the answers to the first, second and later checks. Returns what was set.
        let sets = |reasons: &[bool]| {
            let (asked, sets) = (Cell::new(0), RefCell::new(Vec::new()));
            settle(|| reasons[asked.replace(asked.get() + 1)], |is_open| sets.borrow_mut().push(is_open));
            assert_eq!(asked.get(), reasons.len());
            sets.into_inner()
        };
        assert_eq!([sets(&[true; 2]), sets(&[false; 2])], [[false], [true]]);
        assert_eq!(sets(&[false, true, true, true]), [true, false]);
        assert_eq!(sets(&[true, false, false, false]), [false, true]);
    }
}
