//! Functions that are called when the process forks.
use core::sync::atomic::{AtomicPtr, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

/// Functions to call around a fork, on the thread that forks. The child has no other thread, and the parent's other threads may
/// have held any lock. So `in_child` may do only what a signal handler may.
///
/// ```
/// fn nothing() {}
/// static HOOKS: pagemill_os::ForkHooks =
///     pagemill_os::ForkHooks { before: nothing, in_parent: nothing, in_child: nothing };
/// assert!(pagemill_os::on_fork(&HOOKS));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct ForkHooks {
    /// Called before the fork.
    pub before: fn(),
    /// Called after the fork, in the parent.
    pub in_parent: fn(),
    /// Called after the fork, in the child.
    pub in_child: fn(),
}

static HOOKS: AtomicPtr<ForkHooks> = AtomicPtr::new(core::ptr::null_mut());

/// Registers `hooks` for every fork from now on; only the first caller's are taken. Returns whether the system accepted them.
/// Takes no lock: another thread may fork meanwhile, and in the child nobody would release it.
pub fn on_fork(hooks: &'static ForkHooks) -> bool {
    fn call(which: fn(&ForkHooks) -> fn()) {
        // Acquire pairs with the Release below.
        // SAFETY: null, or made from a `'static` reference.
        if let Some(hooks) = unsafe { HOOKS.load(Acquire).as_ref() } {
            which(hooks)();
        }
    }
    extern "C" fn before() {
        call(|hooks| hooks.before);
    }
    extern "C" fn in_parent() {
        call(|hooks| hooks.in_parent);
    }
    extern "C" fn in_child() {
        call(|hooks| hooks.in_child);
    }
    let entry = core::ptr::from_ref(hooks).cast_mut();
    if cfg!(miri) || HOOKS.compare_exchange(core::ptr::null_mut(), entry, Release, Relaxed).is_err() {
        return true; // Miri cannot fork.
    }
    // SAFETY: the functions are `'static`, and only read a pointer that was set before.
    let is_taken = unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) == 0 };
    if !is_taken {
        HOOKS.store(core::ptr::null_mut(), Release);
    }
    is_taken
}
