//! Errors of a process without privileges, tested by one that may have them.

/// Runs `test` on a thread that has let go of all capabilities: the others keep theirs.
pub(crate) fn without_capabilities(test: impl FnOnce() + Send + 'static) {
    let run = || {
        let header = [0x2008_0522u32, 0]; // version 3, this thread
        // SAFETY: a header and six words, as that version has it.
        let result = unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), [0u32; 6].as_ptr()) };
        assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
        test();
    };
    if let Err(panic) = std::thread::spawn(run).join() {
        std::panic::resume_unwind(panic);
    }
}
