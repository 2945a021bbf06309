//! The allocator that a command works with: the library's default one, with its refusals explained.
use pagemill::{Allocator, Backend, Error, Invalid};

use crate::failure::Failure;

/// Refuses a `PAGEMILL_BACKEND` that names none, before a command works with another than was meant.
pub(crate) fn check_forced_backend() -> Result<(), Failure> {
    let forced = std::env::var_os("PAGEMILL_BACKEND").filter(|name| !name.is_empty());
    if let Some(name) = &forced
        && name.to_str().is_none_or(|name| name.parse::<Backend>().is_err())
    {
        let what = format!("PAGEMILL_BACKEND={}", name.display());
        return Err(Failure::new(what, "is neither rseq nor portable").next("set it to one of them, or not at all"));
    }
    Ok(())
}

/// An allocator as [`Allocator::global`] makes it. Where the system refuses that much address space, one of `enough`
/// pages, if that is given.
pub(crate) fn default_allocator(enough: Option<usize>) -> Result<Allocator, Failure> {
    let is_refused = |error: &Error| matches!(error, Error::Invalid(Invalid::System { .. }));
    let result = match (Allocator::builder().build(), enough) {
        (Err(error), Some(pages)) if is_refused(&error) => Allocator::builder().pages(pages).build(),
        (other, _) => other,
    };
    result.map_err(|error| {
        let next = match error {
            Error::Invalid(Invalid::Backend { .. }) => "unset PAGEMILL_BACKEND",
            _ if enough.is_some() => "raise the limit on address space (`ulimit -v`), or give a smaller --batch",
            _ => "raise the limit on address space (`ulimit -v`)",
        };
        Failure::new("can't make an allocator", error).next(next)
    })
}
