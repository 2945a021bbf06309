//! Errors as one number, which says which of the kinds of C10.1 it is, and which reason.
use core::ffi::{CStr, c_char, c_int};
use pagemill::{BuildError, DeviceError, Exhausted, Invalid, InvalidRequest, Misuse, MisuseKind, Why};

/// What a call returns: 0, or what is wrong. `pagemill_strerror` has a sentence for each.
///
/// The hundreds tell the kinds apart. 1xx: no memory now; try later, ask for less, or free some. 2xx: the arguments are wrong, and
/// the same call would fail again. 3xx: misuse of a pointer. 4xx: an allocator or a device cannot be made or changed as asked.
/// 5xx: input or output failed. A later version may add values.
///
/// cbindgen:rename-all=QualifiedScreamingSnakeCase
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub enum Error {
    /// It worked.
    None = 0,

    /// There are no more pages.
    Exhausted = 100,
    /// Free memory is below the watermark for the request's flags.
    BelowMark = 101,
    /// No node that the request names is allowed, or has memory.
    NotAllowed = 102,
    /// The request's account has no more.
    Account = 103,
    /// A shrinker asked, with flags that reclaim.
    Reclaiming = 104,
    /// The request was cancelled.
    Cancelled = 105,
    /// No memory was freed before the request's timeout.
    TimedOut = 106,
    /// An injected fault made the request fail.
    Fault = 107,
    /// The system does not commit the pages.
    Uncommitted = 108,

    /// A null pointer, or a `size` that no version of the structure has.
    Argument = 200,
    /// A handle that is closed, or of another type.
    Handle = 201,
    /// Flags that there are not, that contradict each other, or that this allocator does not support.
    Flags = 202,
    /// An order above 18.
    Order = 203,
    /// A count that is negative, above INT_MAX, or below the least number of the same request.
    Count = 204,
    /// A request that the allocator could not serve if all its pages were free.
    TooMany = 205,
    /// The flag `PAGEMILL_GFP_ACCOUNT` without an account.
    NoAccount = 206,
    /// Nodes, or a policy, that there are not.
    Node = 207,
    /// A list has blocks of one order.
    ListOrder = 208,
    /// A request that must have a number, in the callback form.
    Least = 209,
    /// The name of a counter that there is not.
    Name = 210,
    /// A request for more elements than the pool's reserve has when it is full.
    AboveReserve = 211,
    /// A size that a pool's reserve cannot have, or not while a request waits for more.
    Reserve = 212,
    /// A size, an alignment or a boundary that a pool's blocks, fragments or ring cannot have.
    Size = 213,
    /// Another value that no request can have.
    Invalid = 299,

    /// The block is free already.
    DoubleFree = 300,
    /// Pagemill did not hand out this pointer.
    Foreign = 301,
    /// The block was handed out with another order.
    WrongOrder = 302,
    /// The pointer is not that of a page.
    Unaligned = 303,
    /// The pointer lies inside a block, not at its start.
    Inside = 304,
    /// The page was freed twice before, and was put aside.
    Quarantined = 305,
    /// Another misuse.
    Misuse = 399,

    /// The system refuses memory, a thread, a lock or a device.
    System = 400,
    /// An arena's size, alignment, watermarks or place cannot be.
    Arena = 401,
    /// The backend does not work here, or there is none of this name.
    Backend = 402,
    /// A description of faults that cannot be read.
    Faults = 403,
    /// Pages, or elements of a pool, are still handed out.
    InUse = 404,
    /// An invariant of Pagemill is broken: please report it.
    Broken = 405,
    /// The device, or this machine, lacks something; or the device's addresses cannot be.
    Device = 406,
    /// This is a forked child, and what it asks for is its parent's.
    Forked = 407,

    /// Reading or writing a file failed. errno has the system's number, or the one that a function of the program's returned.
    Io = 500,
}

impl From<()> for Error {
    fn from((): ()) -> Self {
        Self::None
    }
}

impl From<Why> for Error {
    fn from(why: Why) -> Self {
        match why {
            Why::BelowMark => Self::BelowMark,
            Why::NotAllowed => Self::NotAllowed,
            Why::Account => Self::Account,
            Why::Reclaiming => Self::Reclaiming,
            Why::Cancelled => Self::Cancelled,
            Why::TimedOut => Self::TimedOut,
            Why::Fault => Self::Fault,
            Why::Uncommitted => Self::Uncommitted,
            _ => Self::Exhausted,
        }
    }
}

impl From<Invalid> for Error {
    fn from(why: Invalid) -> Self {
        match why {
            Invalid::OrderTooLarge { .. } => Self::Order,
            Invalid::GfpConflict(_) => Self::Flags,
            Invalid::Watermarks { .. } => Self::Arena,
            _ => Self::Invalid,
        }
    }
}

impl From<InvalidRequest> for Error {
    fn from(why: InvalidRequest) -> Self {
        match why {
            InvalidRequest::Invalid(why) => why.into(),
            InvalidRequest::CountTooLarge { .. }
            | InvalidRequest::AtLeastAboveUpTo { .. }
            | InvalidRequest::ArrayTooShort { .. }
            | InvalidRequest::NoPages => Self::Count,
            InvalidRequest::MoreThanManaged { .. } => Self::TooMany,
            InvalidRequest::GfpUnsupported(_) => Self::Flags,
            InvalidRequest::NoAccount => Self::NoAccount,
            InvalidRequest::NoSuchNode { .. } => Self::Node,
            InvalidRequest::ListOrder { .. } => Self::ListOrder,
            InvalidRequest::ReclaimInShrinker => Self::Reclaiming,
            InvalidRequest::AboveReserve { .. } => Self::AboveReserve,
            InvalidRequest::Reserve { .. } | InvalidRequest::ReserveAwaited { .. } => Self::Reserve,
            InvalidRequest::RingSize { .. } | InvalidRequest::FragmentSize { .. } => Self::Size,
            _ => Self::Invalid,
        }
    }
}

impl From<Misuse> for Error {
    fn from(misuse: Misuse) -> Self {
        match misuse.kind {
            MisuseKind::DoubleFree | MisuseKind::FreedTwice => Self::DoubleFree,
            MisuseKind::Foreign => Self::Foreign,
            MisuseKind::WrongOrder { .. } => Self::WrongOrder,
            MisuseKind::Unaligned => Self::Unaligned,
            MisuseKind::Inside => Self::Inside,
            MisuseKind::Quarantined => Self::Quarantined,
            _ => Self::Misuse,
        }
    }
}

impl From<BuildError> for Error {
    fn from(why: BuildError) -> Self {
        match why {
            BuildError::Invalid(why) => why.into(),
            BuildError::HugePages { .. }
            | BuildError::LockLimit { .. }
            | BuildError::MemoryLimit { .. }
            | BuildError::System { .. }
            | BuildError::NoThread { .. }
            | BuildError::FrameNumbers { .. } => Self::System,
            BuildError::Backend { .. } | BuildError::BackendName => Self::Backend,
            BuildError::FaultSyntax { .. } => Self::Faults,
            BuildError::NoSuchNode { .. } => Self::Node,
            _ => Self::Arena,
        }
    }
}

impl From<pagemill::Error> for Error {
    fn from(error: pagemill::Error) -> Self {
        match error {
            pagemill::Error::Exhausted(Exhausted { why, .. }) => why.into(),
            pagemill::Error::Invalid(why) => why.into(),
            pagemill::Error::Misuse(misuse) => misuse.into(),
            pagemill::Error::Build(why) => why.into(),
            _ => Self::Invalid,
        }
    }
}

impl From<DeviceError> for Error {
    fn from(why: DeviceError) -> Self {
        match why {
            DeviceError::System { .. } => Self::System,
            DeviceError::Size { .. }
            | DeviceError::Align { .. }
            | DeviceError::Boundary { .. }
            | DeviceError::Scattered { .. } => Self::Size,
            DeviceError::NotHere { .. } => Self::Foreign,
            DeviceError::Full { .. } => Self::Exhausted,
            DeviceError::Forked => Self::Forked,
            DeviceError::Memory(why) => why.into(),
            _ => Self::Device,
        }
    }
}

/// The number that a C function returns.
pub(crate) fn code(done: Result<(), Error>) -> Error {
    done.err().unwrap_or(Error::None)
}

/// Every error with its sentence.
const SENTENCES: [(Error, &CStr); 41] = [
    (Error::None, c"no error"),
    (Error::Exhausted, c"there are no more pages: free some, ask for fewer, or make the arena larger"),
    (
        Error::BelowMark,
        c"free memory is below the watermark for these flags: free some, or ask with PAGEMILL_GFP_KERNEL",
    ),
    (Error::NotAllowed, c"no node of the request is both allowed and has memory"),
    (Error::Account, c"the account has no more: uncharge what was freed, or raise its limit"),
    (
        Error::Reclaiming,
        c"a shrinker asked with flags that reclaim: use PAGEMILL_GFP_NOWAIT or PAGEMILL_GFP_ATOMIC there",
    ),
    (Error::Cancelled, c"the request was cancelled"),
    (Error::TimedOut, c"no memory was freed before the timeout"),
    (Error::Fault, c"an injected fault made the request fail"),
    (
        Error::Uncommitted,
        c"the system does not commit the pages: it has no memory, or the process's limit leaves no room",
    ),
    (Error::Argument, c"a null pointer, or a structure whose size field is wrong"),
    (Error::Handle, c"a handle that is closed, or of another type"),
    (Error::Flags, c"gfp flags that there are not, that exclude each other, or that this allocator does not support"),
    (Error::Order, c"an order above 18 (1 GiB)"),
    (Error::Count, c"a count that is negative, above INT_MAX, or below the least number of the request"),
    (Error::TooMany, c"a request that the allocator could not serve if all its pages were free"),
    (Error::NoAccount, c"the gfp flag PAGEMILL_GFP_ACCOUNT without an account"),
    (Error::Node, c"nodes without memory, or a policy that there is not"),
    (Error::ListOrder, c"a list of blocks of another order"),
    (Error::Least, c"the callback form takes requests up to a number alone"),
    (Error::Name, c"there is no counter of this name"),
    (Error::AboveReserve, c"a request above the pool's reserve: split it, or make the reserve larger"),
    (Error::Reserve, c"a pool's reserve cannot have this size, or not while a request waits for more"),
    (Error::Size, c"a pool's blocks, fragments or ring cannot have this size, alignment or boundary"),
    (Error::Invalid, c"a value that no request can have"),
    (Error::DoubleFree, c"the block is free already"),
    (Error::Foreign, c"Pagemill did not hand out this pointer"),
    (Error::WrongOrder, c"the block was handed out with another order"),
    (Error::Unaligned, c"the pointer is not that of a page"),
    (Error::Inside, c"the pointer lies inside a block, not at its start"),
    (Error::Quarantined, c"the page was freed twice before, and was put aside"),
    (Error::Misuse, c"the block cannot be freed"),
    (Error::System, c"the system refuses memory, a lock, a thread or a device"),
    (Error::Arena, c"an arena's size, alignment, watermarks or place cannot be"),
    (Error::Backend, c"the backend of the per-CPU lists does not work here, or there is none of this name"),
    (Error::Faults, c"the description of faults cannot be read"),
    (Error::InUse, c"pages, or elements of a pool, are still handed out: free them first"),
    (Error::Broken, c"an invariant of Pagemill is broken; please report it"),
    (Error::Device, c"the device, or this machine, lacks something; or the device's addresses cannot be"),
    (Error::Forked, c"the parent process has this; set up a device in this process"),
    (Error::Io, c"reading or writing a file failed: errno says why"),
];

/// A sentence for an error. It lives for ever. A number that is no error has a sentence too.
///
/// Threads: any. Signal handlers: yes.
#[unsafe(no_mangle)]
pub extern "C" fn pagemill_strerror(error: c_int) -> *const c_char {
    let found = SENTENCES.iter().find(|(each, _)| *each as c_int == error);
    found.map_or(c"no error of Pagemill has this number", |(_, sentence)| sentence).as_ptr()
}
