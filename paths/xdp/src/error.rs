//! What can go wrong, and what to do about it.
use std::io;

use pagemill::DeviceError;
use pagemill_command::said;

/// Why packets cannot flow. [`Error::next_step`] says what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The system refused; `what` was being done.
    #[error("{what}: {}", said(source))]
    Io {
        /// What was being done.
        what: String,
        /// What the system said.
        source: io::Error,
    },
    /// The caller's arguments cannot be.
    #[error("{0}")]
    Request(String),
    /// This machine or this interface lacks something, or does not permit it.
    #[error("{what}")]
    Unavailable {
        /// What is missing.
        what: String,
        /// What to do about it.
        next: &'static str,
    },
    /// The kernel does not keep to the rings' rules, so nothing that they say is believed any more.
    #[error("the kernel broke the rules: {0}")]
    Broken(String),
    /// This program broke its own rules.
    #[error("a fault of this program: {0}")]
    Fault(String),
    /// The interface was removed.
    #[error("{0} is gone")]
    Gone(String),
    /// A signal asked for the end.
    #[error("interrupted: {name} came")]
    Interrupted {
        /// The signal's name.
        name: &'static str,
        /// And its number.
        signal: i32,
    },
    /// The UMEM cannot be registered.
    #[error("{0}")]
    Memory(#[from] DeviceError),
    /// There is no memory for the packets.
    #[error("no memory for packets: {0}")]
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
            Self::Io { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => PERMISSION,
            // The text says so itself.
            Self::Io { .. } | Self::Request(_) | Self::Memory(_) => return None,
            Self::Unavailable { next, .. } => next,
            Self::Broken(_) => "the driver or the kernel has a fault; try --mode generic",
            Self::Fault(_) => "please report it",
            Self::Gone(_) => "`ip link` lists the interfaces",
            Self::Interrupted { .. } => "the interface was left as it was before",
            Self::Exhausted(_) => "give less with --memory, or make memory free",
        })
    }
}

/// What to do without permission.
pub(crate) const PERMISSION: &str = "run it as root, or with CAP_NET_ADMIN, CAP_NET_RAW and CAP_BPF";
