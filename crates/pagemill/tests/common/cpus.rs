//! The CPU that a thread is on.

/// The CPUs that this process may use.
pub(crate) fn allowed_cpus() -> Vec<usize> {
    // SAFETY: zero is a valid, empty set, which the call fills; the numbers are those of its bits. The process's first thread
    // is asked, since this one may have been kept on one CPU before.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        assert_eq!(libc::sched_getaffinity(libc::getpid(), size_of_val(&set), &raw mut set), 0);
        (0..libc::CPU_SETSIZE as usize).filter(|&cpu| libc::CPU_ISSET(cpu, &set)).collect()
    }
}

/// Keeps this thread on that CPU; false, and nothing changes, if there is no such CPU for it.
pub(crate) fn moves_to(cpu: usize) -> bool {
    // SAFETY: zero is a valid, empty set; the call reads it.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of_val(&set), &raw const set) == 0
    }
}

/// Keeps this thread on that CPU.
pub(crate) fn stay_on(cpu: usize) {
    assert!(moves_to(cpu), "CPU {cpu}: {}", std::io::Error::last_os_error());
}

/// Keeps this thread on the CPU that it is on.
pub(crate) fn stay_here() {
    stay_on(this_cpu());
}

pub(crate) fn this_cpu() -> usize {
    // SAFETY: no preconditions.
    unsafe { libc::sched_getcpu() as usize }
}
