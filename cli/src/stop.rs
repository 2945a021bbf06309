//! Signals that ask for the end. They raise a flag; the work looks at it between steps and cleans up.
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGXFSZ};

use crate::failure::Failure;

/// The signal that asked for the end.
pub(crate) struct Stop(Arc<AtomicUsize>);

impl Stop {
    /// Begins to watch. A signal that the program was started to ignore (`nohup`) stays ignored.
    pub(crate) fn watch() -> io::Result<Self> {
        let flag = Arc::new(AtomicUsize::new(0));
        for signal in [SIGINT, SIGTERM, SIGHUP, SIGQUIT] {
            if !is_ignored(signal) {
                signal_hook::flag::register_usize(signal, Arc::clone(&flag), signal as usize)?;
            }
        }
        // A file beyond the size limit is to be an error of the write, not the end.
        signal_hook::flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false)))?;
        Ok(Self(flag))
    }

    /// Fails once a signal has come, with what the user can do then.
    pub(crate) fn check(&self, next: &str) -> Result<(), Failure> {
        // Relaxed: nothing is read but the number itself.
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
    // SAFETY: asks for the signal's action and changes nothing; an all-zero sigaction is a valid place for it.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &mut action) == 0 && action.sa_sigaction == libc::SIG_IGN
    }
}
