//! Misuse that nobody can be told: what a drop, or a hand-out, finds.
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use pagemill_core::{Misuse, MisuseKind};

/// Blocks that were refused and belong to no allocator.
static FOREIGN: AtomicU64 = AtomicU64::new(0);
static HOOK: AtomicPtr<()> = AtomicPtr::new(core::ptr::null_mut());

/// Has `hook` called at each misuse that is found (C2.4), wherever: it must do only what a signal handler may, and a
/// panic in it aborts, since it may be called in the middle of a request. Each
/// is counted in [`Stats`](crate::Stats) besides, and returned where there is somebody to return it to.
///
/// ```
/// use std::sync::atomic::{AtomicUsize, Ordering};
/// static SEEN: AtomicUsize = AtomicUsize::new(0);
/// pagemill::on_misuse(|_| { SEEN.fetch_add(1, Ordering::Relaxed); });
/// // SAFETY: null is nobody's page, which is what is shown here.
/// let refused = unsafe { pagemill::free_raw(std::ptr::null_mut(), pagemill::Order::ZERO) };
/// assert!(refused.is_err() && SEEN.load(Ordering::Relaxed) == 1);
/// ```
pub fn on_misuse(hook: fn(Misuse)) {
    HOOK.store(hook as *mut (), Release);
}

/// How many frees were refused so far, in this process, of what belongs to no allocator.
///
/// ```
/// let before = pagemill::foreign_frees();
/// // SAFETY: null is nobody's page, which is what is shown here.
/// assert!(unsafe { pagemill::free_raw(std::ptr::null_mut(), pagemill::Order::ZERO) }.is_err());
/// assert!(pagemill::foreign_frees() > before);
/// ```
pub fn foreign_frees() -> u64 {
    FOREIGN.load(Relaxed)
}

pub(crate) const fn misuse(kind: MisuseKind, addr: usize) -> Misuse {
    Misuse { kind, addr }
}

/// Counts and reports misuse of memory that belongs to no allocator.
#[cold]
pub(crate) fn refuse_foreign(misuse: Misuse) -> Misuse {
    FOREIGN.fetch_add(1, Relaxed);
    report(misuse)
}

pub(crate) fn report(misuse: Misuse) -> Misuse {
    // Acquire pairs with the Release in `on_misuse`.
    let hook = HOOK.load(Acquire);
    if !hook.is_null() {
        // SAFETY: only `on_misuse` stores here, and it stores functions of this type.
        let hook = unsafe { core::mem::transmute::<*mut (), fn(Misuse)>(hook) };
        /// Aborts when it is dropped.
        struct Unwound;
        impl Drop for Unwound {
            fn drop(&mut self) {
                std::process::abort();
            }
        }
        let unwound = Unwound;
        hook(misuse);
        core::mem::forget(unwound);
    }
    misuse
}
