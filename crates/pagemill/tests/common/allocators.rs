//! Allocators of each kind, and what must hold at the end of a test.
use pagemill::{Allocator, Backend, Builder, Memory};

/// Each backend that works here. The one alone that `PAGEMILL_BACKEND` names, if it names one: the project's checks come by
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

/// One arena of so many pages.
pub(crate) fn arena(pages: usize) -> Builder {
    Allocator::builder().memory(Memory::anonymous(pages))
}

/// An allocator of one arena.
pub(crate) fn allocator(pages: usize) -> Allocator {
    arena(pages).build().unwrap()
}

/// An allocator of one arena for each backend that works here.
pub(crate) fn allocators(pages: usize) -> Vec<Allocator> {
    backends().into_iter().map(|backend| arena(pages).backend(backend).build().unwrap()).collect()
}

/// An allocator for one CPU that is not there: all pages are in the zone or on this list.
pub(crate) fn one_cpu(memory: Memory) -> Allocator {
    Allocator::builder().memory(memory).cpus(1, || 0).build().unwrap()
}

/// Everything is free, once; what was handed out came back; nobody waits.
#[track_caller]
pub(crate) fn assert_all_back(allocator: &Allocator) {
    allocator.drain();
    let (census, stats) = (allocator.validate().unwrap(), allocator.stats());
    assert_eq!((census.free, census.managed), (census.managed, allocator.managed_pages().get()));
    assert_eq!((stats.allocated, stats.misused, stats.quarantined, stats.waiting), (stats.freed, 0, 0, 0));
}

/// As [`assert_all_back`]; then the allocator can be closed.
#[track_caller]
pub(crate) fn close_all_back(allocator: Allocator) {
    assert_all_back(&allocator);
    allocator.close().unwrap();
}
