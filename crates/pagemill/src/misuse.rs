//! Reports misuse: to the program's hook, and in a counter if no allocator owns the memory.
//!
//! A free that detects misuse calls this and returns the error too. A drop or a hand-out has no caller to return misuse
//! to, so for them this is the only report. It takes no lock, and may run in a signal handler.
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use pagemill_core::{Misuse, MisuseKind};

/// The number of refused blocks that belong to no allocator.
static FOREIGN: AtomicU64 = AtomicU64::new(0);
static HOOK: AtomicPtr<()> = AtomicPtr::new(core::ptr::null_mut());

/// Sets a function that is called at each detected misuse (C2.4). It may run in the middle of a request and in a signal
/// handler: it must do only what a signal handler may, and a panic in it aborts the process. Misuse is also counted in
/// [`Stats`](crate::Stats), and returned by the call that found it if that call returns errors.
///
/// ```
/// use std::sync::atomic::{AtomicUsize, Ordering};
/// static SEEN: AtomicUsize = AtomicUsize::new(0);
/// pagemill::on_misuse(|_| { SEEN.fetch_add(1, Ordering::Relaxed); });
/// // SAFETY: null is no page, so the call changes nothing. The misuse is deliberate.
/// let refused = unsafe { pagemill::free_raw(std::ptr::null_mut(), pagemill::Order::ZERO) };
/// assert!(refused.is_err() && SEEN.load(Ordering::Relaxed) == 1);
/// ```
pub fn on_misuse(hook: fn(Misuse)) {
    HOOK.store(hook as *mut (), Release);
}

/// The number of frees in this process that were refused because the memory belongs to no allocator.
///
/// ```
/// let before = pagemill::foreign_frees();
/// // SAFETY: null is no page, so the call changes nothing. The misuse is deliberate.
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
        /// Aborts the process when it is dropped, so that a panic in the hook does not unwind.
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
