//! Acquisitions that fail on purpose: `--fail SPEC`, or else `PAGEMILL_FAIL`. They show a user how a command reacts.
use pagemill::{BuildError, Faults};

use crate::failure::Failure;

/// Refuses a `PAGEMILL_FAIL` that cannot be read, as every allocator would.
pub(crate) fn check_environment() -> Result<(), Failure> {
    by_environment().map(|_| ())
}

/// Reads `--fail`. Keeps the text, for the command line that repeats the run.
pub(crate) fn spec(text: &str) -> Result<String, BuildError> {
    text.parse::<Faults>().map(|_| text.split_whitespace().collect())
}

/// The faults of `--fail`, which is `given`, or else of the environment.
pub(crate) fn wanted(given: Option<&str>) -> Result<Option<String>, Failure> {
    given.map_or_else(by_environment, |text| Ok(Some(text.to_owned())))
}

fn by_environment() -> Result<Option<String>, Failure> {
    let Some(text) = std::env::var_os("PAGEMILL_FAIL").filter(|text| !text.is_empty()) else { return Ok(None) };
    let refused = |why| Failure::new(format!("PAGEMILL_FAIL={}", text.display()), why).next("set it so, or not at all");
    spec(text.to_str().unwrap_or_default()).map(Some).map_err(refused)
}

/// Faults for a new allocator: they count from its beginning.
pub(crate) fn anew(spec: &str) -> Result<Faults, Failure> {
    spec.parse().map_err(|why: BuildError| Failure::new("no faults to inject", why))
}
