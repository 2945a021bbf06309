//! What can go wrong when the server starts, and what to do about it.
use std::io;

use pagemill_command::said;

/// The next step where a privilege lacks.
pub(crate) const AS_ROOT: &str = "run it as root";

/// Why there is no server. [`Error::next_step`] says what to do.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub struct Error {
    what: String,
    next: &'static str,
}

impl Error {
    pub(crate) fn new(what: impl Into<String>, next: &'static str) -> Self {
        Self { what: what.into(), next }
    }

    /// The system refused; `what` was being done.
    pub(crate) fn io(what: impl std::fmt::Display, source: impl Into<io::Error>, next: &'static str) -> Self {
        Self::new(format!("{what}: {}", said(&source.into())), next)
    }

    /// What the user can do about it, in a few words.
    #[must_use]
    pub fn next_step(&self) -> &'static str {
        self.next
    }
}
