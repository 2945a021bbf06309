//! Which backends a test runs with.
use pagemill::Backend;

/// Each that works here. The one alone that `PAGEMILL_BACKEND` names, if it names one: the project's checks come by
/// once with each.
pub(crate) fn backends() -> Vec<Backend> {
    if let Some(name) = std::env::var_os("PAGEMILL_BACKEND").filter(|name| !name.is_empty()) {
        return vec![name.to_str().unwrap_or_default().parse().unwrap()];
    }
    match pagemill::self_test() {
        Ok(()) => vec![Backend::Portable, Backend::Rseq],
        Err(why) => {
            println!("skipped: the rseq backend ({why})");
            vec![Backend::Portable]
        }
    }
}
