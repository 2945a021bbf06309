//! The CPU and the thread that code runs on, and how many CPUs there can be.
use crate::proc;

/// One more than the largest CPU number that this system can have.
///
/// ```
/// assert!(pagemill_os::possible_cpus() >= 1);
/// ```
pub fn possible_cpus() -> usize {
    if cfg!(miri) {
        return 1; // Miri reads no files.
    }
    proc::last_possible_cpu().map_or_else(configured_cpus, |last| last + 1)
}

fn configured_cpus() -> usize {
    // SAFETY: sysconf reads no memory of ours.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_NPROCESSORS_CONF) }).unwrap_or(1).max(1)
}

/// The system's number for this thread. May be called in a signal handler.
///
/// ```
/// let mine = pagemill_os::current_thread();
/// assert_ne!(std::thread::spawn(pagemill_os::current_thread).join().unwrap(), mine);
/// ```
pub fn current_thread() -> i32 {
    rustix::thread::gettid().as_raw_nonzero().get()
}

/// The CPU that this thread runs on; the thread may move at any moment. 0 where the system does not say.
///
/// ```
/// assert!(pagemill_os::current_cpu() < pagemill_os::possible_cpus());
/// ```
#[cfg(not(miri))]
pub fn current_cpu() -> usize {
    // SAFETY: sched_getcpu reads no memory of ours.
    usize::try_from(unsafe { libc::sched_getcpu() }).unwrap_or(0)
}
/// Miri has one CPU.
#[cfg(miri)]
pub fn current_cpu() -> usize {
    0
}
