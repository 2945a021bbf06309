//! The allocator that a command uses: the library's default one, with its errors explained.
use pagemill::{Allocator, Backend, BuildError, Builder, self_test};

use crate::failure::Failure;

/// Refuses a `PAGEMILL_BACKEND` that this machine does not have, before the command starts.
pub(crate) fn check_forced_backend() -> Result<(), Failure> {
    let Some(name) = std::env::var_os("PAGEMILL_BACKEND").filter(|name| !name.is_empty()) else { return Ok(()) };
    let refused =
        |why: String, next: &str| Err(Failure::new(format!("PAGEMILL_BACKEND={}", name.display()), why).next(next));
    match name.to_str().and_then(|name| name.parse().ok()) {
        None => refused("is neither rseq nor portable".to_owned(), "set it to one of them, or not at all"),
        Some(Backend::Rseq) => match self_test() {
            Ok(()) => Ok(()),
            Err(why) => refused(format!("does not work here: {why}"), "set it to portable, or not at all"),
        },
        Some(Backend::Portable) => Ok(()),
    }
}

/// An allocator like [`Allocator::global`]. If the system refuses that much address space, one of `enough` pages. `fail` says which
/// acquisitions fail.
pub(crate) fn default_allocator(enough: Option<usize>, fail: Option<&str>) -> Result<Allocator, Failure> {
    let faults = fail.map(crate::faults::anew).transpose()?;
    let builder = || faults.iter().cloned().fold(Allocator::builder(), Builder::faults);
    let is_refused = |error: &BuildError| matches!(error, BuildError::System { .. });
    let result = match (builder().build(), enough) {
        (Err(error), Some(pages)) if is_refused(&error) => builder().pages(pages).build(),
        (other, _) => other,
    };
    result.map_err(|error| {
        let failure = Failure::new("can't make an allocator", error);
        if enough.is_some() { failure.next("or give a smaller --batch") } else { failure }
    })
}
