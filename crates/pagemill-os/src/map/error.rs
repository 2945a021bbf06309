//! Why memory was refused, and what to do about it.
use crate::Errno;
use crate::page::HUGE_PAGE_SIZE;
use crate::proc::{self, HugePages};

/// Why memory could not be mapped or locked.
///
/// ```
/// use pagemill_os::MapError;
/// let why = MapError::LockLimit { wanted: 1 << 30, locked: 0, limit: 8 << 20 };
/// assert!(why.to_string().contains("RLIMIT_MEMLOCK"));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MapError {
    /// Too few huge pages of 2 MiB are free. All counts are in such pages.
    #[error(
        "wanted {wanted} huge pages of 2 MiB, {free} of {reserved} set aside are free; \
         set aside more, as root: `echo N > /proc/sys/vm/nr_hugepages`, or boot with `hugepages=N`"
    )]
    HugePages {
        /// Asked for.
        wanted: usize,
        /// Set aside, and neither used nor reserved.
        free: usize,
        /// All that were set aside.
        reserved: usize,
    },
    /// The process may not lock so much memory, in bytes.
    #[error(
        "wanted to lock {wanted} bytes beside {locked} locked ones, and RLIMIT_MEMLOCK is {limit}; \
         raise it (`ulimit -l`, `LimitMEMLOCK=`), or give the process CAP_IPC_LOCK"
    )]
    LockLimit {
        /// Asked for.
        wanted: usize,
        /// Locked by the process before the call.
        locked: usize,
        /// The limit.
        limit: usize,
    },
    /// The system refused for another reason.
    #[error("{call}: {}", std::io::Error::from_raw_os_error(errno.0))]
    System {
        /// The system call.
        call: &'static str,
        /// Its error number.
        errno: Errno,
    },
}

impl MapError {
    /// The error of the system call `call`.
    pub(crate) fn of(call: &'static str) -> impl Fn(Errno) -> Self + Copy {
        move |errno| Self::System { call, errno }
    }

    /// The error for mapping `len` bytes of hugetlb.
    pub(super) fn of_huge(errno: Errno, len: usize) -> Self {
        match (errno, proc::huge_pages()) {
            (Errno::ENOMEM, Some(HugePages { reserved, free })) => {
                Self::HugePages { wanted: len / HUGE_PAGE_SIZE, free, reserved }
            }
            _ => Self::System { call: "mmap", errno },
        }
    }

    /// The error for locking `wanted` bytes.
    pub(super) fn of_lock(errno: Errno, wanted: usize) -> Self {
        let locked = proc::locked_memory().unwrap_or(0);
        match (errno, proc::lock_limit()) {
            // EPERM: the limit is 0. ENOMEM has other causes, too, such as a range that is not mapped.
            (Errno::EPERM | Errno::ENOMEM, Some(limit)) if locked.saturating_add(wanted) > limit => {
                Self::LockLimit { wanted, locked, limit }
            }
            _ => Self::System { call: "mlock", errno },
        }
    }
}
