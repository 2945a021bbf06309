//! Signals that end the program.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::Error;

/// The signal that asked for the end, if one came.
pub(crate) struct Stop(Arc<AtomicUsize>);

impl Stop {
    /// From now on a first signal is only noted, and a second one ends the process. What was ignored at the start (`nohup`) stays
    /// ignored.
    pub(crate) fn watch() -> Result<Self, Error> {
        let (flag, has_come) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        for signal in [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|&signal| !is_ignored(signal)) {
            // In this order: the second one finds that the first has come.
            signal_hook::flag::register_conditional_default(signal, Arc::clone(&has_come))
                .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&has_come)))
                .and_then(|_| signal_hook::flag::register_usize(signal, Arc::clone(&flag), signal as usize))
                .map_err(|error| Error::io("waiting for signals", error))?;
        }
        Ok(Self(flag))
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        // Relaxed: only the number itself is read.
        let signal = self.0.load(Relaxed) as i32;
        let name = match signal {
            0 => return Ok(()),
            SIGINT => "SIGINT",
            SIGTERM => "SIGTERM",
            _ => "SIGHUP",
        };
        Err(Error::Interrupted { name, signal })
    }
}

fn is_ignored(signal: i32) -> bool {
    // SAFETY: the call reads the signal's action and changes nothing; an all-zero sigaction is valid memory for it.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &mut action) == 0 && action.sa_sigaction == libc::SIG_IGN
    }
}
