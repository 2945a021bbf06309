//! What must hold at the end of a test.
use pagemill::Allocator;

/// Everything is free, once; what was handed out came back; nobody waits.
pub(crate) fn assert_all_back(allocator: &Allocator) {
    allocator.drain();
    let (census, stats) = (allocator.validate().unwrap(), allocator.stats());
    assert_eq!((census.free, census.managed), (census.managed, allocator.managed_pages().get()));
    assert_eq!((stats.allocated, stats.misused, stats.quarantined, stats.waiting), (stats.freed, 0, 0, 0));
}
