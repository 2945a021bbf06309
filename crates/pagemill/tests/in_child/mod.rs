//! Doing something in a child process.
use crate::common::end_if_it_hangs;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs `child` in a child process, and asserts that it ends well.
pub(crate) fn in_child(what: &str, child: impl FnOnce()) {
    // SAFETY: the child runs on a copy of this thread. It uses the allocator, malloc (which glibc makes usable after
    // a fork) and raw writes, and leaves without running anything of the parent's.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork: {}", std::io::Error::last_os_error());
    if pid == 0 {
        end_if_it_hangs();
        let ended = catch_unwind(AssertUnwindSafe(child));
        if let Err(why) = &ended {
            let text = why.downcast_ref::<String>().map(String::as_str).or(why.downcast_ref::<&str>().copied());
            let text = format!("the child that {what}: {}\n", text.unwrap_or("panicked"));
            // SAFETY: the buffer has that length.
            unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
        }
        // SAFETY: ends the process.
        unsafe { libc::_exit(i32::from(ended.is_err())) };
    }
    let mut status = 0;
    // SAFETY: our child, and a place for its status.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "the child that {what} ended with {status:#x}");
}
