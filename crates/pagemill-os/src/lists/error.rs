//! Why lists could not be made.
use crate::Errno;

/// Why [`PerCpu`](crate::PerCpu) lists could not be made.
///
/// ```
/// use pagemill_os::{Backend, ListsError, PerCpu};
/// let refused = PerCpu::new(Backend::Portable, 0, || 0).err().unwrap();
/// assert_eq!(refused, ListsError::Cpus { cpus: 0, max: PerCpu::CPUS_MAX });
/// assert_eq!(refused.to_string(), "0 CPUs: the lists take 1 to 8192");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ListsError {
    /// A number of CPUs that the lists cannot have.
    #[error("{cpus} CPUs: the lists take 1 to {max}")]
    Cpus {
        /// The number asked for.
        cpus: usize,
        /// The largest that is taken.
        max: usize,
    },
    /// The backend that was asked for does not work here.
    #[error("the restartable-sequence backend does not work here ({why}); use the portable one")]
    Backend {
        /// What the self-test found.
        why: &'static str,
    },
    /// The system refused memory for them.
    #[error("the system refuses {bytes} bytes for {what} (errno {}); raise the limit (`ulimit -v`)", errno.0)]
    System {
        /// What it was for.
        what: &'static str,
        /// How much was asked for.
        bytes: usize,
        /// The error number.
        errno: Errno,
    },
}
