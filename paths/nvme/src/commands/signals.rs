//! Signals that end the program, and pipes that stop waiting then.
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::Error;

/// How long to wait for a pipe between two checks of the flag.
const NAP: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// The signal that asked for the end, if one came. The signals have no other effect once this exists.
#[derive(Clone)]
pub(super) struct Stop(Arc<AtomicUsize>);

impl Stop {
    pub(super) fn watch() -> Result<Self, Error> {
        let flag = Arc::new(AtomicUsize::new(0));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register_usize(signal, Arc::clone(&flag), signal as usize)
                .map_err(|error| Error::io("waiting for signals", error))?;
        }
        Ok(Self(flag))
    }

    pub(super) fn check(&self) -> Result<(), Error> {
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

    fn ready(&self, fd: &impl AsFd, flags: PollFlags) -> io::Result<()> {
        loop {
            if self.check().is_err() {
                return Err(io::Error::other("a signal came"));
            }
            match poll(&mut [PollFd::new(fd, flags)], Some(&NAP)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                Ok(_) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// A descriptor that is read or written until a signal comes.
pub(super) struct Pipe<T>(pub(super) T, pub(super) Stop);

impl<T: Read + AsFd> Read for Pipe<T> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.1.ready(&self.0, PollFlags::IN)?;
        self.0.read(bytes)
    }
}

impl<T: Write + AsFd> Write for Pipe<T> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.1.ready(&self.0, PollFlags::OUT)?;
        // At most what a writable pipe takes without blocking (PIPE_BUF).
        self.0.write(&bytes[..bytes.len().min(4096)])
    }
    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}
