//! Telling that the process forks.
use std::sync::OnceLock;

/// What is called around a fork, each on the thread that forks. In the child that is the only one, and `in_child` must
/// do only what a signal handler may: the other threads stopped wherever they were.
///
/// ```
/// fn nothing() {}
/// let hooks = pagemill_sys::ForkHooks { before: nothing, in_parent: nothing, in_child: nothing };
/// assert!(pagemill_sys::on_fork(hooks));
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

static HOOKS: OnceLock<ForkHooks> = OnceLock::new();

/// Has `hooks` called around every fork from now on; only the first caller's are taken. Returns whether the system will
/// do so.
pub fn on_fork(hooks: ForkHooks) -> bool {
    extern "C" fn before() {
        HOOKS.get().inspect(|hooks| (hooks.before)());
    }
    extern "C" fn in_parent() {
        HOOKS.get().inspect(|hooks| (hooks.in_parent)());
    }
    extern "C" fn in_child() {
        HOOKS.get().inspect(|hooks| (hooks.in_child)());
    }
    static REGISTERED: OnceLock<bool> = OnceLock::new();
    HOOKS.get_or_init(|| hooks);
    *REGISTERED.get_or_init(|| {
        if cfg!(miri) {
            return true; // Miri cannot fork.
        }
        // SAFETY: the functions live as long as the program, and only read a cell that was set before.
        unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) == 0 }
    })
}
