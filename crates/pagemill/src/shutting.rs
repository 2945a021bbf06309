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

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::settle;
    use core::cell::{Cell, RefCell};

    #[test]
    fn a_reason_that_comes_or_goes_as_lists_are_set_is_seen() {
        // Whether there is a reason when it is asked for first, second and so on, and what that sets.
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
