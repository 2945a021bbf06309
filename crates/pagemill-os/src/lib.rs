//! The operating system as Pagemill uses it: address space, CPU numbers, restartable sequences.
//!
//! It stands between `pagemill-core`, which decides on numbers, and `pagemill`, which hands out memory. The per-CPU lists have
//! a theory of their own: see [`lists`].
//!
//! ```
//! let map = pagemill_os::Mapping::reserve(1 << 21, 1 << 21).unwrap();
//! assert_eq!(map.addr() % (1 << 21), 0);
//! ```

#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

#[cfg(not(target_os = "linux"))]
compile_error!("Pagemill runs on Linux alone; its core, the crate pagemill-core, runs anywhere");

mod backend;
mod batch;
mod cells;
mod counters;
mod cpu;
pub mod device;
mod event;
#[cfg(all(test, not(any(loom, miri))))]
#[path = "../../../tests/fifo.rs"]
mod fifo;
pub mod file;
mod fork;
mod last_zone;
mod limit;
pub mod lists;
mod map;
mod membarrier;
mod numa;
mod page;
mod proc;
mod rseq;
mod sections;
mod sleep;
mod thread;
mod touch;
mod words;
pub mod zero_copy;

pub use batch::{Batch, Frames, Load, as_pfns};
pub use cells::{bytes_differ, set_bytes};
pub use cpu::{current_cpu, current_thread, possible_cpus};
pub use event::Event;
pub use fork::{ForkHooks, on_fork};
pub use last_zone::{last_zone, set_last_zone};
pub use limit::{Claim, MemoryLimit};
pub use lists::{Backend, BackendName, CpuStats, List, ListsError, PerCpu};
pub use map::{MapError, Mapping};
pub use numa::{Node, Topology};
pub use page::{HUGE_PAGE_SIZE, pretend_system_page, system_page};
pub use proc::{address_space_limit, allowed_nodes, parse_list, total_memory};
pub use rseq::{restarts, self_test};
pub use sections::Sections;
pub use sleep::{ForkLock, SLEEP};
pub use thread::Thread;
pub use touch::touch_parallel;
pub use words::{are_empty, are_pages, empty, empty_slots, fill_pages, find_empty, neighbours};

/// An error number of the operating system.
///
/// ```
/// assert_eq!(pagemill_os::Errno(12).0, 12);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Errno(pub i32);

impl Errno {
    /// Not permitted.
    pub const EPERM: Self = Self(libc::EPERM);
    /// A signal came first.
    pub const EINTR: Self = Self(libc::EINTR);
    /// Try again later, or too much locked memory.
    pub const EAGAIN: Self = Self(libc::EAGAIN);
    /// No memory, or too much of it locked.
    pub const ENOMEM: Self = Self(libc::ENOMEM);
    /// Access denied.
    pub const EACCES: Self = Self(libc::EACCES);
    /// An address where nothing is mapped.
    pub const EFAULT: Self = Self(libc::EFAULT);
    /// Busy: something else uses it.
    pub const EBUSY: Self = Self(libc::EBUSY);
    /// It exists already.
    pub const EEXIST: Self = Self(libc::EEXIST);
    /// An invalid argument, or one that this system does not support.
    pub const EINVAL: Self = Self(libc::EINVAL);
    /// No space left.
    pub const ENOSPC: Self = Self(libc::ENOSPC);
    /// No such system call.
    pub const ENOSYS: Self = Self(libc::ENOSYS);
    /// The process has as many open files as it may.
    pub const EMFILE: Self = Self(libc::EMFILE);
    /// The system has as many open files as it may.
    pub const ENFILE: Self = Self(libc::ENFILE);
    /// No space for buffers, or too much locked memory.
    pub const ENOBUFS: Self = Self(libc::ENOBUFS);
    /// Ended before it was done.
    pub const ECANCELED: Self = Self(libc::ECANCELED);
    /// Not supported.
    pub const EOPNOTSUPP: Self = Self(libc::EOPNOTSUPP);

    /// The error number that the C library's last call in this thread left.
    pub(crate) fn last() -> Self {
        Self(std::io::Error::last_os_error().raw_os_error().unwrap_or(0))
    }

    /// The error of a system call that rustix made, past the C library.
    pub(crate) fn of(errno: rustix::io::Errno) -> Self {
        Self(errno.raw_os_error())
    }

    /// Whether the system does not support the operation at all. More memory would not help.
    ///
    /// ```
    /// assert!(pagemill_os::Errno(22).is_unsupported() && !pagemill_os::Errno(12).is_unsupported());
    /// ```
    pub fn is_unsupported(self) -> bool {
        matches!(self.0, libc::EINVAL | libc::ENOSYS | libc::EOPNOTSUPP)
    }
}
