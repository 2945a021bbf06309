//! The socket through which `pagemill top` watches a command.
use std::path::{Path, PathBuf};

use pagemill_watch::StatsServer;

use crate::failure::{Failure, said};

/// Serves on a socket at `path`, or else at the path in `PAGEMILL_STATS`. Without either, does nothing.
pub(crate) fn serve(path: Option<&Path>) -> Result<Option<StatsServer>, Failure> {
    let Some(path) = path.map(Path::to_owned).or_else(named_by_environment) else { return Ok(None) };
    let next = "choose another path for the socket";
    let can_not = |error| Failure::new(format!("can't be watched at {}", path.display()), said(&error)).next(next);
    StatsServer::bind(&path).map(Some).map_err(can_not)
}

/// The path in `PAGEMILL_STATS`, if it is set and not empty.
pub(crate) fn named_by_environment() -> Option<PathBuf> {
    std::env::var_os("PAGEMILL_STATS").filter(|path| !path.is_empty()).map(PathBuf::from)
}
