//! The errors of requests. Their kinds differ by type (C10.1): exhausted, invalid request, misuse.
use crate::build_error::{BuildError, SetOf};
use pagemill_core::{Exhausted, Invalid, Misuse};
use pagemill_os::BackendName;

/// Why a request failed, or delivered less than it must.
///
/// Every other error of this crate that a request may meet converts into this type with `?`, so one type suffices for a
/// function that makes an allocator and uses it:
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
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No memory now. Try later, ask for less, or free some.
    #[error("exhausted: {0}")]
    Exhausted(#[from] Exhausted),
    /// The arguments are wrong; the same request would fail again.
    #[error("invalid request: {0}")]
    Invalid(#[from] InvalidRequest),
    /// A double free, a foreign page or a wrong order. Nothing was changed.
    #[error("misuse: {0}")]
    Misuse(#[from] Misuse),
    /// An allocator could not be built or changed as asked. No request returns this.
    #[error(transparent)]
    Build(#[from] BuildError),
}

/// The sentence, as `Display`: `fn main() -> Result<(), pagemill::Error>` prints an error by `Debug`.
impl core::fmt::Debug for Error {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        core::fmt::Display::fmt(self, f)
    }
}
impl core::fmt::Debug for InvalidRequest {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        core::fmt::Display::fmt(self, f)
    }
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
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidRequest {
    /// A value that is invalid in every request: an order above the largest, or flags that exclude each other.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// The count is above `i32::MAX` blocks, the limit in the kernel's interface too.
    #[error("a count of {count} is above the largest, {max}")]
    CountTooLarge {
        /// The count asked for.
        count: usize,
        /// The largest count that is accepted.
        max: usize,
    },
    /// A request for a run of no pages.
    #[error("a run has at least one page, the request names none")]
    NoPages,
    /// The request needs more blocks at once than the allocator can ever have free for it. It would wait for ever.
    #[error("the request needs {blocks} {} at once, and can never have more than {most}", many(.order))]
    MoreThanManaged {
        /// How many blocks the request needs at once.
        blocks: usize,
        /// The order of its blocks.
        order: u8,
        /// How many it could have if every page were free; for a run, in one arena. Pages that watermarks keep from the request do not count.
        most: usize,
    },
    /// `Bulk::at_least(k, n)` with k above n.
    #[error("a request for at least {at_least} blocks cannot have a maximum of {up_to}")]
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
    /// A list cannot hold blocks of two orders.
    #[error("a list of blocks of order {list} cannot take blocks of order {other}")]
    ListOrder {
        /// The order of the list's blocks.
        list: u8,
        /// The order of the other blocks.
        other: u8,
    },
    /// A flag that this allocator does not support.
    #[error("this allocator does not support the gfp flag {0}")]
    GfpUnsupported(&'static str),
    /// A request with `ACCOUNT` that names no account.
    #[error("the gfp flag ACCOUNT needs an account, and the request names none")]
    NoAccount,
    /// No node of the request's set has memory in this allocator.
    #[error("no node of the request's set {} has memory; name other nodes, or none", SetOf(*nodes))]
    NoSuchNode {
        /// Bit n for node n.
        nodes: u64,
    },
    /// A request with a timeout, in a form that is awaited.
    #[error("a request that is awaited takes no timeout: put your runtime's timeout around the future, which drops it")]
    AwaitedTimeout,
    /// A request whose flags reclaim, made by a thread that is reclaiming.
    #[error("a shrinker may not allocate with flags that reclaim: use NOWAIT or ATOMIC there")]
    ReclaimInShrinker,
    /// The size of a pool's reserve is out of range.
    #[error("a reserve of {min_nr} elements is out of range: it may have 1 to {max}")]
    Reserve {
        /// The size asked for, in elements.
        min_nr: usize,
        /// The largest size that is accepted.
        max: usize,
    },
    /// A reserve cannot shrink below the size of a request that waits for it.
    #[error("a reserve of {min_nr} is too small for the request for {needed} that waits; try again later")]
    ReserveAwaited {
        /// The size asked for, in elements.
        min_nr: usize,
        /// The size of the largest request that waits.
        needed: usize,
    },
    /// A request that is larger than the pool's reserve, which the pool could not promise to serve.
    #[error("a request for {count} is above the pool's reserve of {min_nr}: split it, or make the reserve larger")]
    AboveReserve {
        /// The number of elements asked for.
        count: usize,
        /// The pool's reserve.
        min_nr: usize,
    },
    /// The size of a page pool's ring is out of range.
    #[error("a ring of {slots} slots is out of range: it may have 1 to {max}")]
    RingSize {
        /// The number of slots asked for.
        slots: usize,
        /// The largest number that is accepted.
        max: usize,
    },
    /// A fragment is as long as a page at most.
    #[error("a fragment of {bytes} bytes is out of range: this pool's have 1 to {max}")]
    FragmentSize {
        /// The length asked for.
        bytes: usize,
        /// The length of a page, or of a block, of the pool.
        max: usize,
    },
    /// No CPU has this number.
    #[error("there is no CPU {cpu}: {cpus} CPUs have lists, numbered from 0")]
    NoSuchCpu {
        /// The CPU that was named.
        cpu: usize,
        /// How many CPUs have lists.
        cpus: usize,
    },
}

/// What a request for blocks of an order asks for, in words.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "thiserror passes a variant's fields by reference")]
fn many(order: &u8) -> String {
    if *order == 0 { "pages".to_owned() } else { format!("blocks of order {order}") }
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

/// Every request returns a page or an error, so both must fit into a few words.
const _: () = assert!(size_of::<Error>() <= 40);
