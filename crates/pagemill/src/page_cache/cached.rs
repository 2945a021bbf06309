//! A file in its cache: what the steps of reading and writing work on.
use super::folio::{DIRTY, Number};
use super::mapping::Mapping;
use super::shared::{Pinned, Shared};
use core::ptr::NonNull;
use core::sync::atomic::Ordering::Relaxed;
use pagemill_core::PAGE_SIZE;
use std::io;
use std::sync::Arc;

/// The steps are in the files of this folder: `fill.rs` reads pages in, `read.rs` and `write.rs` serve the callers,
/// `writeback.rs` writes pages out, `resize.rs` lets pages go.
#[derive(Clone)]
pub(super) struct Cached {
    pub(super) shared: Arc<Shared>,
    pub(super) file: Arc<Mapping>,
}

impl Cached {
    /// The folio of a page, if the page is in the cache; up to date or not.
    #[inline]
    pub(super) fn find(&self, at: u64) -> Option<Pinned<'_>> {
        self.pinned(at, self.file.index.get(at)?)
    }
    /// The same, where the index has been asked already.
    #[inline]
    pub(super) fn pinned(&self, at: u64, number: Number) -> Option<Pinned<'_>> {
        self.shared.pinned(self.file.number, at, number)
    }

    /// Sleeps until those who have the lock of the index now have released it. The index names a page that they take out
    /// for a while after the folio has ceased to be that page's: whoever looks again at once finds the same.
    pub(super) fn wait_for_index(&self) {
        drop(self.file.index.lock());
    }

    /// Takes a folio off its file. The caller has the lock of the index, where it has just removed it. Returns whether
    /// the caller has to retire it: otherwise whoever has it pinned does.
    pub(super) fn detach(&self, number: Number) -> bool {
        let folio = self.shared.folios.get(number);
        if folio.detach().has(DIRTY) {
            self.count_dirty(-1);
        }
        folio.end()
    }

    /// Counts pages that became dirty, or that are not dirty any more.
    pub(super) fn count_dirty(&self, pages: isize) {
        for dirty in [&self.file.dirty, &self.shared.dirty] {
            // Relaxed: figures, which decide only when to write back.
            dirty.fetch_add(pages as usize, Relaxed);
        }
    }
}

/// The memory of pages as pieces for a transfer: neighbours make one.
pub(super) fn pieces(pages: impl Iterator<Item = usize>) -> Vec<(NonNull<u8>, usize)> {
    let mut pieces: Vec<(NonNull<u8>, usize)> = Vec::new();
    for addr in pages {
        match pieces.last_mut() {
            Some((start, len)) if start.as_ptr().addr() + *len == addr => *len += PAGE_SIZE,
            _ => {
                let start = core::ptr::with_exposed_provenance_mut(addr);
                // SAFETY: no page is at address 0.
                pieces.push((unsafe { NonNull::new_unchecked(start) }, PAGE_SIZE));
            }
        }
    }
    pieces
}

/// There is no memory for a page that a caller waits for.
#[cold]
pub(super) fn no_memory(why: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::OutOfMemory, why)
}
