//! Telling that the process forks.
use core::sync::atomic::{AtomicPtr, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

/// What is called around a fork, each on the thread that forks. In the child that is the only one, and `in_child` must
/// do only what a signal handler may: the other threads stopped wherever they were.
///
/// ```
/// fn nothing() {}
/// static HOOKS: pagemill_os::ForkHooks =
///     pagemill_os::ForkHooks { before: nothing, in_parent: nothing, in_child: nothing };
/// assert!(pagemill_os::on_fork(&HOOKS));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct ForkHooks {
    /// Before there are two processes.
    pub before: fn(),
    /// Afterwards, in the one that called.
    pub in_parent: fn(),
    /// Afterwards, in the new one.
    pub in_child: fn(),
}

static HOOKS: AtomicPtr<ForkHooks> = AtomicPtr::new(core::ptr::null_mut());

/// Has `hooks` called around every fork from now on; only the first caller's are taken. Returns whether the system will
/// do so. Waits for nobody: a fork may meet another thread in here, and then the child has only half of what it did.
pub fn on_fork(hooks: &'static ForkHooks) -> bool {
    fn call(which: fn(&ForkHooks) -> fn()) {
        // Acquire pairs with the Release below.
        // SAFETY: null, or from a reference that lives for ever.
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
    // SAFETY: the functions live as long as the program, and only read a word that was set before.
    let is_taken = unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) == 0 };
    if !is_taken {
        HOOKS.store(core::ptr::null_mut(), Release);
    }
    is_taken
}
