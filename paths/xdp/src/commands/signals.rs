//! Signals that end the program.
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::Error;

/// The signal that asked for the end, if one came. The signals have no other effect once this exists.
pub(crate) struct Stop(Arc<AtomicUsize>);

impl Stop {
    pub(crate) fn watch() -> Result<Self, Error> {
        let flag = Arc::new(AtomicUsize::new(0));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register_usize(signal, Arc::clone(&flag), signal as usize)
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
