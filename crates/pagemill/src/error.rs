//! The kinds of error, told apart by type (C10.1).
use crate::build_error::BuildError;
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
    Invalid(#[from] Invalid),
    /// A double free, a foreign page or a wrong order. Nothing was changed.
    #[error("misuse: {0}")]
    Misuse(#[from] Misuse),
    /// No request's: an allocator could not be made, or changed, as was asked.
    #[error(transparent)]
    Build(#[from] BuildError),
}

impl From<BackendName> for Error {
    fn from(why: BackendName) -> Self {
        Self::Build(why.into())
    }
}

/// A page or an error comes back in a few words from each request.
const _: () = assert!(size_of::<Error>() <= 40);
