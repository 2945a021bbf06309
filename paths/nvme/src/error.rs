//! What can go wrong, and what to do about it.
use std::io;

use pagemill::DeviceError;
use pagemill_command::said;

use crate::Status;

/// Why something about a drive did not work. [`Error::next_step`] says what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The system refused; `what` was being read, written or asked for.
    #[error("{what}: {}", said(source))]
    Io {
        /// What was being read, written or asked for.
        what: String,
        /// What the system said.
        source: io::Error,
    },
    /// The caller's arguments cannot be.
    #[error("{0}")]
    Request(String),
    /// This machine has not what it takes, or does not permit it.
    #[error("{what}")]
    Unavailable {
        /// What is missing.
        what: String,
        /// What to do about it.
        next: &'static str,
    },
    /// The drive is in use, so it is left alone.
    #[error("{what}")]
    InUse {
        /// By whom.
        what: String,
        /// What to do about it.
        next: &'static str,
    },
    /// The controller or the namespace asks for something that this program does not do.
    #[error("{0}")]
    Unsupported(String),
    /// The controller refused a command; `what` was being done.
    #[error("{what}: {status}")]
    Status {
        /// What was being done.
        what: String,
        /// What the controller said.
        status: Status,
    },
    /// The controller does not keep to the specification, so nothing that it says is believed any more.
    #[error("the controller broke the rules: {0}")]
    Broken(String),
    /// It is not possible at the moment: requests of the same queue have to come back first.
    #[error("{0}")]
    Busy(&'static str),
    /// The drive was stopped before, for this reason.
    #[error("the drive was stopped: {0}")]
    Stopped(String),
    /// The controller does not answer.
    #[error("{0}")]
    Silent(String),
    /// There is no controller any more.
    #[error("the controller is gone: its registers read as all ones")]
    Gone,
    /// A signal asked for the end.
    #[error("interrupted: {name} came")]
    Interrupted {
        /// The signal's name.
        name: &'static str,
        /// And its number.
        signal: i32,
    },
    /// There is no memory, or the device cannot have it.
    #[error("{0}")]
    Memory(#[from] DeviceError),
    /// There is no page of memory left for a request.
    #[error("no memory for a request: {0}")]
    Exhausted(pagemill::Error),
}

impl Error {
    pub(crate) fn io(what: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::Io { what: what.into(), source: source.into() }
    }

    /// What the user can do about it, in a few words.
    #[must_use]
    pub fn next_step(&self) -> Option<&'static str> {
        Some(match self {
            Self::Io { source, .. } => return after_io(source.kind()),
            // Its text says so itself.
            Self::Request(_) | Self::Memory(_) => return None,
            Self::Busy(_) => "poll the queue, then submit it again",
            Self::Stopped(_) => "open the drive again",
            Self::Unavailable { next, .. } | Self::InUse { next, .. } => next,
            Self::Unsupported(_) => "use the kernel's driver: pagemill nvme unbind",
            Self::Status { status, .. } => return status.next_step(),
            Self::Broken(_) => "it was stopped, and what was under way may or may not be done; the drive has a fault",
            Self::Silent(_) => "give it more time with --timeout; if it stays so, switch the machine off and on",
            Self::Gone => "see that it is still plugged in, then `pagemill nvme identify`",
            Self::Interrupted { .. } => "the drive was shut down in order; run it again",
            Self::Exhausted(_) => "give more with --memory, or ask for less with --depth or --transfer",
        })
    }
}

fn after_io(kind: io::ErrorKind) -> Option<&'static str> {
    match kind {
        io::ErrorKind::NotFound => Some("check the name"),
        io::ErrorKind::PermissionDenied => Some("run it as root"),
        io::ErrorKind::StorageFull => Some("make room, or choose another place"),
        _ => None,
    }
}
