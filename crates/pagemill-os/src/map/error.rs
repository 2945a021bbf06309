//! Why memory of a kind was refused, and what to do about it.
use super::os;
use crate::Errno;
use crate::page::HUGE_PAGE_SIZE;

/// Why memory could not be mapped or locked.
///
/// ```
/// use pagemill_os::MapError;
/// let why = MapError::LockLimit { wanted: 1 << 30, locked: 0, limit: 8 << 20 };
/// assert!(why.to_string().contains("RLIMIT_MEMLOCK"));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MapError {
    /// Too few pages of 2 MiB are set aside, in pages.
    #[error(
        "wanted {wanted} huge pages of 2 MiB, {free} of {reserved} set aside are free; \
         set aside more, as root: `echo N > /proc/sys/vm/nr_hugepages`, or boot with `hugepages=N`"
    )]
    HugePages {
        /// Asked for.
        wanted: usize,
        /// Nobody has taken or reserved them.
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
        /// The process had locked so much before.
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
    /// What `call` answered.
    pub(crate) fn of(call: &'static str) -> impl Fn(Errno) -> Self + Copy {
        move |errno| Self::System { call, errno }
    }

    /// Mapping `len` bytes of hugetlb failed so.
    pub(super) fn of_huge(errno: Errno, len: usize) -> Self {
        let count = |name| os::number_in(&format!("/sys/kernel/mm/hugepages/hugepages-2048kB/{name}_hugepages"));
        match (errno.0, count("free"), count("resv"), count("nr")) {
            (libc::ENOMEM, Some(free), Some(spoken_for), Some(reserved)) => {
                Self::HugePages { wanted: len / HUGE_PAGE_SIZE, free: free.saturating_sub(spoken_for), reserved }
            }
            _ => Self::System { call: "mmap", errno },
        }
    }

    /// Locking `wanted` bytes failed so.
    pub(super) fn of_lock(errno: Errno, wanted: usize) -> Self {
        let locked = os::locked_bytes().unwrap_or(0);
        match (errno.0, os::lock_limit()) {
            // EPERM: the limit is zero. ENOMEM also stands for memory that is not there.
            (libc::EPERM | libc::ENOMEM, Some(limit)) if locked.saturating_add(wanted) > limit => {
                Self::LockLimit { wanted, locked, limit }
            }
            _ => Self::System { call: "mlock", errno },
        }
    }
}
