//! What can go wrong when the server starts, and what to do about it.
use std::io;

/// Why there is no server. [`Error::next_step`] says what to do.
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
    /// This machine lacks something, or does not permit it.
    #[error("{what}")]
    Unavailable {
        /// What is missing.
        what: String,
        /// What to do about it.
        next: &'static str,
    },
    /// The caller's arguments cannot be.
    #[error("{0}")]
    Request(String),
    /// There is no memory for pages.
    #[error("no memory for pages: {0}")]
    Memory(String),
}

impl Error {
    pub(crate) fn io(what: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::Io { what: what.into(), source: source.into() }
    }

    pub(crate) fn unavailable(what: impl Into<String>, next: &'static str) -> Self {
        Self::Unavailable { what: what.into(), next }
    }

    /// What the user can do about it, in a few words.
    #[must_use]
    pub fn next_step(&self) -> Option<&'static str> {
        match self {
            Self::Io { .. } | Self::Request(_) => None,
            Self::Unavailable { next, .. } => Some(next),
            Self::Memory(_) => Some("give less with --cache, or make memory free"),
        }
    }
}

/// What the system said, without the number that Rust adds.
pub(crate) fn said(error: &io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or(&text).to_owned()
}
