//! The two backends of the per-CPU lists, by name: restartable sequences, or what stands in for them.
use core::fmt;
use pagemill_core::Invalid;

/// Which mechanism moves frames on and off the lists.
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
    type Err = Invalid;
    fn from_str(name: &str) -> Result<Self, Invalid> {
        [Self::Rseq, Self::Portable].into_iter().find(|backend| backend.name() == name).ok_or(Invalid::BackendName)
    }
}
