//! What a program sees of the decisions of readahead.
use super::readahead::{Cause, Decision};
use core::fmt;

/// Called for each decision.
pub(super) type Trace = Box<dyn Fn(&ReadaheadDecision) + Send + Sync>;

/// A decision of readahead: see [`PageCacheBuilder::trace`](super::PageCacheBuilder::trace). Offsets and lengths are in
/// pages.
///
/// Its `Display` is a line for a log.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct ReadaheadDecision {
    /// The number of the file: the first that its cache opened is 1.
    pub file: u32,
    /// Whether the reader waits. Otherwise it reached the marker.
    pub is_miss: bool,
    /// Where the reader is.
    pub at: u64,
    /// The pages of its request from there on.
    pub asked: u32,
    /// The window's first page.
    pub start: u64,
    /// The window's length. Those of its pages that are in the cache already are not read.
    pub pages: u32,
    /// The page with the marker.
    pub marker: Option<u64>,
    decision: Decision,
}

impl ReadaheadDecision {
    pub(super) fn new(file: u32, decision: &Decision) -> Self {
        let Decision { cause, asked, window, .. } = *decision;
        Self {
            file,
            is_miss: cause == Cause::Miss,
            at: asked.at,
            asked: asked.pages,
            start: window.start,
            pages: window.pages,
            marker: window.marker,
            decision: *decision,
        }
    }
}

impl fmt::Display for ReadaheadDecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "file {}: {}", self.file, self.decision)
    }
}
