//! The kinds of error, told apart by type (C10.1).
use crate::build_error::{BuildError, SetOf};
use pagemill_core::{Exhausted, Invalid, Misuse};
use pagemill_os::BackendName;

/// Why a request brought nothing, or not what it must.
///
/// Any other error of this crate that `?` meets on the way to a request turns into it, so that one type does for a function
/// that makes an allocator and uses it:
/// ```
/// use pagemill::{Allocator, BuildError, Error, Gfp, Order};
/// fn first_byte(pages: usize, order: u8) -> Result<u8, Error> {
///     let allocator = Allocator::builder().pages(pages).build()?;
///     Ok(allocator.alloc_pages(Gfp::KERNEL | Gfp::ZERO, Order::new(order)?)?[0])
/// }
/// assert_eq!(first_byte(64, 2), Ok(0));
/// assert!(matches!(first_byte(0, 2), Err(Error::Build(BuildError::ArenaSize { .. }))));
/// let error = first_byte(64, 31).unwrap_err();
/// assert_eq!(error.to_string(), "invalid request: order 31 is above the largest, 18 (1 GiB)");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No memory now; try later, ask for less, or free some.
    #[error("exhausted: {0}")]
    Exhausted(#[from] Exhausted),
    /// The caller's arguments; trying again with the same ones fails again.
    #[error("invalid request: {0}")]
    Invalid(#[from] InvalidRequest),
    /// A double free, a foreign page or a wrong order. Nothing was changed.
    #[error("misuse: {0}")]
    Misuse(#[from] Misuse),
    /// No request's: an allocator could not be made, or changed, as was asked.
    #[error(transparent)]
    Build(#[from] BuildError),
}

/// What is wrong with a request.
///
/// ```
/// use pagemill::{Allocator, Bulk, Error, Gfp, Invalid, InvalidRequest, PageList};
/// let (allocator, mut list) = (Allocator::builder().pages(8).build()?, PageList::new());
/// let error = allocator.alloc_pages_bulk_list(Bulk::at_least(3, 2), &mut list).unwrap_err();
/// assert_eq!(error, Error::Invalid(InvalidRequest::AtLeastAboveUpTo { at_least: 3, up_to: 2 }));
/// let error = allocator.alloc_page(Gfp::NOWAIT | Gfp::NOFAIL).unwrap_err();
/// let Error::Invalid(InvalidRequest::Invalid(Invalid::GfpConflict(flags))) = error else { panic!("{error}") };
/// assert_eq!(flags, &["NOFAIL", "NOWAIT"]);
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidRequest {
    /// A value that no request can have: an order above the largest, flags that exclude each other.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// A request counts at most `i32::MAX` blocks, as the kernel's interface does.
    #[error("a count of {count} is above the largest, {max}")]
    CountTooLarge {
        /// The count asked for.
        count: usize,
        /// The largest that is taken.
        max: usize,
    },
    /// More at once than the allocator has, less what its marks keep from the request: it would wait for ever.
    #[error("{blocks} blocks of order {order} at once are more than there can ever be for this request, {most}")]
    MoreThanManaged {
        /// What the request must have.
        blocks: usize,
        /// The order of its blocks.
        order: u8,
        /// The most that it could have with everything free.
        most: usize,
    },
    /// `AtLeast(k, n)` with k above n.
    #[error("at least {at_least} of at most {up_to} cannot be reached")]
    AtLeastAboveUpTo {
        /// The k of the request.
        at_least: usize,
        /// The n of the request.
        up_to: usize,
    },
    /// The array has fewer slots than the request names.
    #[error("the array has {slots} slots, the request names {count}")]
    ArrayTooShort {
        /// The array's length.
        slots: usize,
        /// The request's n.
        count: usize,
    },
    /// Blocks of two orders on one list.
    #[error("a list of blocks of order {list} cannot take blocks of order {other}")]
    ListOrder {
        /// The list's.
        list: u8,
        /// The other's.
        other: u8,
    },
    /// A flag that this allocator cannot honour.
    #[error("the gfp flag {0} is not served by this allocator")]
    GfpUnsupported(&'static str),
    /// A request with `ACCOUNT`, and no account.
    #[error("the gfp flag ACCOUNT says to charge an account, and the request names none")]
    NoAccount,
    /// No node of a set has memory.
    #[error("no node of the request's set {} has memory; name other nodes, or none", SetOf(*nodes))]
    NoSuchNode {
        /// Bit n for node n.
        nodes: u64,
    },
    /// A request that may reclaim, made while this thread reclaims.
    #[error("a shrinker may not allocate with flags that reclaim: use NOWAIT or ATOMIC there")]
    ReclaimInShrinker,
    /// A pool's reserve.
    #[error("a reserve of {min_nr}: it takes 1 to {max}")]
    Reserve {
        /// The size asked for, in elements.
        min_nr: usize,
        /// The largest that is taken.
        max: usize,
    },
    /// A reserve cannot shrink below what somebody waits for.
    #[error("a reserve of {min_nr} would never serve the request for {needed} that waits; try again later")]
    ReserveAwaited {
        /// The size asked for, in elements.
        min_nr: usize,
        /// What the largest request that waits has asked for.
        needed: usize,
    },
    /// A request that a pool cannot promise.
    #[error("a request for {count} from a pool that keeps {min_nr}: split it, or make the reserve larger")]
    AboveReserve {
        /// What was asked for.
        count: usize,
        /// The pool's reserve.
        min_nr: usize,
    },
    /// There is no such CPU.
    #[error("there is no CPU {cpu}: the lists are those of {cpus}, numbered from 0")]
    NoSuchCpu {
        /// The CPU that was named.
        cpu: usize,
        /// How many have lists.
        cpus: usize,
    },
}

impl From<Invalid> for Error {
    fn from(why: Invalid) -> Self {
        Self::Invalid(why.into())
    }
}

impl From<BackendName> for Error {
    fn from(why: BackendName) -> Self {
        Self::Build(why.into())
    }
}

/// A page or an error comes back in a few words from each request.
const _: () = assert!(size_of::<Error>() <= 40);
