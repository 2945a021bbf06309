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
    /// There cannot be lists for this number of CPUs.
    #[error("{cpus} CPUs: the lists take 1 to {max}")]
    Cpus {
        /// The number asked for.
        cpus: usize,
        /// The largest number.
        max: usize,
    },
    /// The requested backend does not work here.
    #[error("the restartable-sequence backend does not work here ({why}); use the portable one")]
    Backend {
        /// The result of the self-test.
        why: &'static str,
    },
    /// The system refused memory for them.
    #[error("the system refuses {bytes} bytes for {what} (errno {}); raise the limit (`ulimit -v`)", errno.0)]
    System {
        /// The use of the memory.
        what: &'static str,
        /// The size asked for, in bytes.
        bytes: usize,
        /// The error number.
        errno: Errno,
    },
}
