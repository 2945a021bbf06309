//! Child processes.
use super::end_if_it_hangs;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Forks. The caller sees to it that the child neither hangs nor goes on as a second parent.
pub(crate) fn fork() -> libc::pid_t {
    // SAFETY: the child runs on a copy of this thread. It uses the allocator, malloc (which glibc makes usable after
    // a fork) and raw writes.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork: {}", std::io::Error::last_os_error());
    pid
}

/// Waits for a child; its status, as `waitpid` gives it.
pub(crate) fn wait_for(pid: libc::pid_t) -> i32 {
    let mut status = 0;
    // SAFETY: a place for the status.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    status
}

/// Runs `child` in a child process, and returns the status that it ended with. A panic ends it with 1, and is written to stderr.
pub(crate) fn status_of_child(what: &str, child: impl FnOnce()) -> i32 {
    let pid = fork();
    if pid == 0 {
        end_if_it_hangs();
        let ended = catch_unwind(AssertUnwindSafe(child));
        if let Err(why) = &ended {
            let text = why.downcast_ref::<String>().map(String::as_str).or(why.downcast_ref::<&str>().copied());
            let text = format!("the child that {what}: {}\n", text.unwrap_or("panicked"));
            // SAFETY: the buffer has that length.
            unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
        }
        // SAFETY: ends the process, without running anything of the parent's.
        unsafe { libc::_exit(i32::from(ended.is_err())) };
    }
    wait_for(pid)
}

/// Runs `child` in a child process, and asserts that it ends well.
#[track_caller]
pub(crate) fn in_child(what: &str, child: impl FnOnce()) {
    let status = status_of_child(what, child);
    assert_eq!(status, 0, "the child that {what} ended with {status:#x}");
}
