//! Why an allocator could not be made, or changed, as was asked: apart from what a request may be refused for (C10.1).
use pagemill_core::Invalid;
use pagemill_os::{BackendName, Errno, ListsError, MapError};

/// Why an allocator could not be made as it was described, or what it has changed: what [`Builder::build`], [`add_memory`],
/// [`retire`] and [`populate`] are refused for. Each says what was wrong and what to do.
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
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// A value that no allocator can have, its watermarks' order for example.
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
         (`echo N > /proc/sys/vm/nr_hugepages`), or say that ordinary memory will do"
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
        "wanted to lock {wanted} bytes, and RLIMIT_MEMLOCK is {limit}; raise it (`ulimit -l` counts KiB, systemd has \
         `LimitMEMLOCK=`), give the process CAP_IPC_LOCK, or say that memory that is not locked will do"
    )]
    LockLimit {
        /// Asked for.
        wanted: usize,
        /// The limit.
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
    /// The operating system refused memory for an arena.
    #[error(
        "the system refuses {bytes} bytes for {what} (errno {errno}); lower the size, or raise the limit (`ulimit -v`)"
    )]
    System {
        /// What it was for.
        what: &'static str,
        /// How much was asked for.
        bytes: usize,
        /// The error number.
        errno: i32,
    },
    /// The operating system starts no thread for background reclaim.
    #[error(
        "the system starts no thread for background reclaim (errno {errno}); raise the limit (`ulimit -u`, or the control \
         group's pids.max), or call `reclaim_step` from a thread of your own"
    )]
    NoThread {
        /// The error number.
        errno: i32,
    },
    /// Memory that was brought is not aligned.
    #[error(
        "memory at {addr:#x} cannot be managed: it must be aligned to {align} bytes; bring what begins at {:#x}, the next \
         such address, or map {align} bytes more than you need and begin there",
        addr.next_multiple_of(*align)
    )]
    Alignment {
        /// Where it begins.
        addr: usize,
        /// What it must be a multiple of.
        align: usize,
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
    #[error("all {max} frame numbers of this process are in use; close an allocator first")]
    FrameNumbers {
        /// How many there are.
        max: usize,
    },
    /// Not every CPU's node is named.
    #[error("there are {cpus} CPUs, and the nodes of {named} are named; name each CPU's")]
    NodesOfCpus {
        /// How many CPUs there are.
        cpus: usize,
        /// Of how many the node is named.
        named: usize,
    },
    /// No node of the policy's set has memory.
    #[error("no node of the policy's set {nodes:#x} has memory here; bring some on one of them, or name others")]
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
    /// `PAGEMILL_BACKEND`, or whoever parsed a name.
    #[error(
        "no list backend is called that: it is `rseq` or `portable`; set PAGEMILL_BACKEND to one of them, or not at all"
    )]
    BackendName,
    /// A number of CPUs that the lists cannot have.
    #[error("{cpus} CPUs: the lists take 1 to {max}")]
    Cpus {
        /// The number asked for.
        cpus: usize,
        /// The largest that is taken.
        max: usize,
    },
    /// What is said of faults to inject cannot be read.
    #[error(
        "faults to inject, part {part}: {why}; they are described as in `after=100,p=0.01,gfp=atomic,seed=7`, with at \
         least one of after and p"
    )]
    FaultSyntax {
        /// Which of the parts between commas, from 1.
        part: usize,
        /// What is wrong with it.
        why: &'static str,
    },
    /// It is the last arena.
    #[error("there is no other arena, and an allocator keeps at least one; add memory first, or close it")]
    LastArena,
    /// The arena is not this allocator's.
    #[error("the arena is another allocator's; ask the one that named it")]
    NoSuchArena,
}

impl BuildError {
    /// The system refused `bytes` bytes for `what`.
    pub(crate) fn system(what: &'static str, bytes: usize) -> impl Fn(Errno) -> Self + Copy {
        move |errno| Self::System { what, bytes, errno: errno.0 }
    }

    /// Memory of `bytes` bytes was refused so.
    pub(crate) fn of_memory(bytes: usize) -> impl Fn(MapError) -> Self + Copy {
        move |why| match why {
            MapError::HugePages { wanted, free, reserved } => Self::HugePages { wanted, free, reserved },
            MapError::LockLimit { wanted, limit, .. } => Self::LockLimit { wanted, limit },
            MapError::System { call, errno } => Self::system(call, bytes)(errno),
        }
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
