//! Signals that interrupt a command. They set a flag, which the command checks between steps, so that it can clean up.
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGXFSZ};

use crate::failure::Failure;

/// The signal that has interrupted the command, if any.
pub(crate) struct Stop(Arc<AtomicUsize>);

impl Stop {
    /// Begins to watch for signals. A signal that was ignored at the start (`nohup`) stays ignored.
    pub(crate) fn watch() -> io::Result<Self> {
        let flag = Arc::new(AtomicUsize::new(0));
        for signal in [SIGINT, SIGTERM, SIGHUP, SIGQUIT] {
            if !is_ignored(signal) {
                signal_hook::flag::register_usize(signal, Arc::clone(&flag), signal as usize)?;
            }
        }
        // With this, a write beyond the file size limit fails and does not end the program.
        signal_hook::flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false)))?;
        Ok(Self(flag))
    }

    /// Fails after a signal; `next` is what the user can do then.
    pub(crate) fn check(&self, next: &str) -> Result<(), Failure> {
        // Relaxed: only the number itself is read.
        let name = match self.0.load(Relaxed) as i32 {
            0 => return Ok(()),
            SIGINT => "SIGINT",
            SIGTERM => "SIGTERM",
            SIGQUIT => "SIGQUIT",
            _ => "SIGHUP",
        };
        let failure = Failure::new("interrupted", format!("{name} came")).next(next);
        Err(failure.by_signal(self.0.load(Relaxed) as i32))
    }
}

fn is_ignored(signal: i32) -> bool {
    // SAFETY: the call reads the signal's action and changes nothing; an all-zero sigaction is valid memory for it.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &mut action) == 0 && action.sa_sigaction == libc::SIG_IGN
    }
}
