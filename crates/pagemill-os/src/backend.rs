//! The two backends of the per-CPU lists, by name: restartable sequences, or their portable replacement.
use core::fmt;

/// The mechanism that moves frames on and off the lists.
///
/// ```
/// use pagemill_os::Backend;
/// assert_eq!("portable".parse(), Ok(Backend::Portable));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Backend {
    /// Restartable sequences.
    Rseq,
    /// A try-lock per list.
    Portable,
}

/// A name that no backend has, in `PAGEMILL_BACKEND` or in a string that was parsed.
///
/// ```
/// use pagemill_os::{Backend, BackendName};
/// assert_eq!("fast".parse::<Backend>(), Err(BackendName));
/// assert!(BackendName.to_string().contains("`rseq` or `portable`"));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "there is no per-CPU list backend of this name; set PAGEMILL_BACKEND to `rseq` or `portable`, or leave it unset"
)]
pub struct BackendName;

impl Backend {
    /// Its name, as `PAGEMILL_BACKEND` takes it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Rseq => "rseq",
            Self::Portable => "portable",
        }
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl core::str::FromStr for Backend {
    type Err = BackendName;
    fn from_str(name: &str) -> Result<Self, BackendName> {
        [Self::Rseq, Self::Portable].into_iter().find(|backend| backend.name() == name).ok_or(BackendName)
    }
}
