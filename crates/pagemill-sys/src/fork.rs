//! Telling that the process forked.
use std::sync::OnceLock;

static IN_CHILD: OnceLock<fn()> = OnceLock::new();

/// Has `run` called in the child of every fork from now on, before `fork` returns there; only the first caller's is
/// taken. `run` must do only what a signal handler may: the other threads stopped wherever they were.
///
/// Returns whether the system will do so.
///
/// ```
/// fn note() {}
/// assert!(pagemill_sys::on_fork_in_child(note));
/// ```
pub fn on_fork_in_child(run: fn()) -> bool {
    extern "C" fn in_child() {
        if let Some(run) = IN_CHILD.get() {
            run();
        }
    }
    static REGISTERED: OnceLock<bool> = OnceLock::new();
    IN_CHILD.get_or_init(|| run);
    *REGISTERED.get_or_init(|| {
        if cfg!(miri) {
            return true; // Miri cannot fork.
        }
        // SAFETY: `in_child` lives as long as the program, and only reads a cell that was set before.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) == 0 }
    })
}
