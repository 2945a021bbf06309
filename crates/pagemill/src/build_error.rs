//! Why an allocator cannot be built, or changed, as it was described (C10.1). Requests have their own errors (`error.rs`).
use core::fmt;
use pagemill_core::Invalid;
use pagemill_os::{BackendName, Errno, ListsError, MapError};

/// Why an allocator cannot be built, or changed, as it was described: the error of [`Builder::build`], [`add_memory`], [`retire`] and
/// [`populate`]. Each message says what was wrong and what to do.
///
/// In a function that also makes requests, `?` turns it into [`Error::Build`](crate::Error::Build).
///
/// ```
/// use pagemill::{Allocator, BuildError};
/// let refused = Allocator::builder().pages(0).build().unwrap_err();
/// assert!(matches!(refused, BuildError::ArenaSize { pages: 0, .. }));
/// assert!(refused.to_string().starts_with("an arena of 0 pages: it takes 1 to "));
/// ```
///
/// [`Builder::build`]: crate::Builder::build
/// [`add_memory`]: crate::Allocator::add_memory
/// [`retire`]: crate::Allocator::retire
/// [`populate`]: crate::Allocator::populate
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// A value that no allocator can have: watermarks out of order, for example.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// An arena's size.
    #[error("an arena of {pages} pages: it takes 1 to {max}")]
    ArenaSize {
        /// The size asked for, in pages.
        pages: usize,
        /// The largest that is taken, in pages.
        max: usize,
    },
    /// Pages of 4 KiB that are no whole number of pages of 2 MiB.
    #[error("{pages} pages of 4 KiB are no whole number of huge pages of 2 MiB: take a multiple of 512")]
    HugePageMultiple {
        /// Asked for.
        pages: usize,
    },
    /// Too few pages of 2 MiB are set aside.
    #[error(
        "wanted {wanted} huge pages of 2 MiB, {free} of {reserved} set aside are free; set aside more, as root \
         (`echo N > /proc/sys/vm/nr_hugepages`), or allow ordinary memory (`Memory::or_ordinary`)"
    )]
    HugePages {
        /// Asked for.
        wanted: usize,
        /// Free ones.
        free: usize,
        /// All that were set aside.
        reserved: usize,
    },
    /// The process may not lock so much memory.
    #[error(
        "wanted to lock {wanted} bytes besides the {locked} that this process has locked, and RLIMIT_MEMLOCK is {limit}; raise \
         it (`ulimit -l` counts KiB, systemd has `LimitMEMLOCK=`), give the process CAP_IPC_LOCK, or allow memory that is not \
         locked (`Memory::or_ordinary`)"
    )]
    LockLimit {
        /// Asked for, in bytes.
        wanted: usize,
        /// What the process has locked already, in bytes.
        locked: usize,
        /// The limit, in bytes.
        limit: usize,
    },
    /// The memory limit of the process has too little room.
    #[error(
        "wanted {wanted} bytes, and the memory limit of the process (that of its control group, as containers set it) has \
         room for {room}: touching more would kill it; raise the limit, or ask for less"
    )]
    MemoryLimit {
        /// Asked for, in bytes.
        wanted: usize,
        /// What the limit leaves, in bytes.
        room: usize,
    },
    /// The operating system refused a call for memory.
    #[error("the system refuses {bytes} bytes for {what}: {}; {}", os_error(*errno), advice(*errno))]
    System {
        /// What the memory is for, or the call.
        what: &'static str,
        /// Asked for, in bytes.
        bytes: usize,
        /// The error number.
        errno: i32,
    },
    /// The operating system starts no thread for background reclaim.
    #[error(
        "the system starts no thread for background reclaim: {}; raise the limit (`ulimit -u`, or the control \
         group's pids.max), or call `reclaim_step` from a thread of your own",
        os_error(*errno)
    )]
    NoThread {
        /// The error number.
        errno: i32,
    },
    /// Memory that was brought does not begin at a multiple of its alignment.
    #[error(
        "memory at {addr:#x} cannot be managed: it must be aligned to {align} bytes; map {align} bytes more than you need, and \
         bring the memory from the next multiple of {align} on"
    )]
    Alignment {
        /// Where it begins.
        addr: usize,
        /// What it must be a multiple of.
        align: usize,
    },
    /// Memory that was brought begins at a null pointer, or would end beyond the address space.
    #[error(
        "there is no memory of {pages} pages at {addr:#x}: it begins at a null pointer or ends beyond the address space; check \
         that mapping it succeeded, and that the size counts pages of 4096 bytes"
    )]
    NoMemory {
        /// Where it begins.
        addr: usize,
        /// Its size, in pages.
        pages: usize,
    },
    /// Memory that was brought lies in an arena.
    #[error(
        "memory at {start:#x} to {end:#x} cannot be managed: an arena lies at {other_start:#x} to {other_end:#x}, and each \
         page has one owner; close the allocator that has it first, or bring other memory"
    )]
    Overlap {
        /// Where it begins.
        start: usize,
        /// Where it ends.
        end: usize,
        /// Where the arena begins.
        other_start: usize,
        /// Where the arena ends.
        other_end: usize,
    },
    /// All frame numbers of the process are in use.
    #[error("all {max} frame numbers of this process are in use; close an allocator")]
    FrameNumbers {
        /// How many there are.
        max: usize,
    },
    /// Not every CPU's node is named.
    #[error("there are {cpus} CPUs, and the node of {named} of them is named; name the node of each CPU")]
    NodesOfCpus {
        /// How many CPUs there are.
        cpus: usize,
        /// Of how many the node is named.
        named: usize,
    },
    /// No node of the policy's set has memory.
    #[error("no node of the policy's set {} has memory; add memory on one of these nodes, or name others", SetOf(*nodes))]
    NoSuchNode {
        /// Bit n for node n.
        nodes: u64,
    },
    /// The per-CPU list backend that was asked for does not work here.
    #[error("the restartable-sequence backend does not work here ({why}); use the portable one")]
    Backend {
        /// What the self-test found.
        why: &'static str,
    },
    /// A name, in `PAGEMILL_BACKEND` or parsed, that no backend has.
    #[error(
        "there is no per-CPU list backend of this name; set PAGEMILL_BACKEND to `rseq` or `portable`, or leave it unset"
    )]
    BackendName,
    /// A number of CPUs that per-CPU lists cannot be made for.
    #[error("per-CPU lists are made for 1 to {max} CPUs, not for {cpus}")]
    Cpus {
        /// The number asked for.
        cpus: usize,
        /// The largest that is taken.
        max: usize,
    },
    /// A description of faults to inject that cannot be read.
    #[error(
        "faults to inject, part {part}: {why}; write them as in `after=100,p=0.01,gfp=atomic,seed=7`, with `after`, `p` or both"
    )]
    FaultSyntax {
        /// Which of the parts between commas, from 1.
        part: usize,
        /// What is wrong with it.
        why: &'static str,
    },
    /// The arena is the last one in use.
    #[error("an allocator keeps at least one arena; add memory first, or drop the allocator")]
    LastArena,
    /// The allocator has no arena of this id.
    #[error(
        "the arena belongs to another allocator, or its memory was added again under another id; see `Allocator::arenas`"
    )]
    NoSuchArena,
}

/// The sentence, as `Display`, for a `main` that returns this error.
impl core::fmt::Debug for BuildError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        core::fmt::Display::fmt(self, f)
    }
}

impl BuildError {
    /// The error of a call that the system refused.
    pub(crate) fn system(what: &'static str, bytes: usize) -> impl Fn(Errno) -> Self + Copy {
        move |errno| Self::System { what, bytes, errno: errno.0 }
    }

    /// The error of `bytes` bytes that were not mapped or not locked.
    pub(crate) fn of_memory(bytes: usize) -> impl Fn(MapError) -> Self + Copy {
        move |why| match why {
            MapError::HugePages { wanted, free, reserved } => Self::HugePages { wanted, free, reserved },
            MapError::LockLimit { wanted, locked, limit } => Self::LockLimit { wanted, locked, limit },
            MapError::System { call, errno } => Self::system(call, bytes)(errno),
        }
    }
}

/// The system's words for an error number.
fn os_error(errno: i32) -> std::io::Error {
    std::io::Error::from_raw_os_error(errno)
}

/// What to do about an error number of a call for memory.
fn advice(errno: i32) -> &'static str {
    match Errno(errno) {
        Errno::ENOMEM => {
            "ask for less, or raise what limits it: `ulimit -v`, vm.max_map_count, or vm.overcommit_memory"
        }
        Errno::EMFILE | Errno::ENFILE => "close files, or raise the limit (`ulimit -n`)",
        Errno::EPERM | Errno::EACCES => "a sandbox (seccomp) or a missing capability forbids the call: allow it",
        Errno::ENOSYS => "the kernel is too old for it, or a sandbox hides it: use another kind of memory",
        _ => "see the manual page of the call",
    }
}

/// A set of nodes, as messages show it.
pub(crate) struct SetOf(pub(crate) u64);

impl fmt::Display for SetOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == 0 { f.write_str("(which is empty)") } else { write!(f, "{:#x}", self.0) }
    }
}

impl From<ListsError> for BuildError {
    fn from(why: ListsError) -> Self {
        match why {
            ListsError::Cpus { cpus, max } => Self::Cpus { cpus, max },
            ListsError::Backend { why } => Self::Backend { why },
            ListsError::System { what, bytes, errno } => Self::system(what, bytes)(errno),
        }
    }
}

impl From<BackendName> for BuildError {
    fn from(_: BackendName) -> Self {
        Self::BackendName
    }
}
