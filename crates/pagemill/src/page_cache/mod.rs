//! A page cache with readahead: pages of files that were used, and pages that a reader will use soon (the kernel's
//! `mm/filemap.c` and `mm/readahead.c`).
//!
//! # The way of a read
//! `read.rs` asks the index of the file ([`index`]) for the folio of each page, pins it, and copies its bytes; no lock is
//! taken. On a miss, or where a page has the marker, `readahead.rs` decides which pages come: a window. `fill.rs` makes
//! room for its holes (`shared.rs`), allocates them by one bulk request, puts them into the index, locked, and begins
//! one vectored read of the backing (`backing.rs`) for each run. The reader waits for its page alone (`wait.rs`).
//!
//! # The way of a write
//! `write.rs` puts bytes into pages and marks them dirty; `write_pages.rs` takes pages that have them. `writeback.rs` writes runs
//! of them to the backing: for `sync`, for a program that asks for it, for writers that have made too many dirty, and for
//! requests of memory.
//!
//! # Leaving
//! A page leaves by eviction (`shared.rs` asks `evict.rs` which one), or its file lets it go (`resize.rs`). Its folio
//! (`folio.rs`) says when nobody has it any more; then the page goes back to the allocator. Invariants are in
//! `folio.rs`, the order of locks in `mapping.rs`.
mod backing;
mod cache;
mod cached;
mod evict;
#[cfg(all(test, not(shuttle)))]
#[path = "../../tests/common/fake_backing.rs"]
mod fake_backing;
mod file;
mod file_backing;
mod files;
mod fill;
mod folio;
mod index;
mod lend;
mod mapping;
#[cfg(feature = "object_store")]
mod object;
mod read;
mod readahead;
mod resize;
mod send;
mod shared;
mod stats;
#[cfg(all(test, not(shuttle)))]
mod testing;
mod trace;
#[cfg(feature = "uring")]
mod uring;
mod wait;
mod workers;
mod write;
mod write_pages;
mod writeback;

pub use backing::{Backing, ReadTransfer, WriteTransfer};
pub use cache::{PageCache, PageCacheBuilder, PageCacheInfo, page_caches};
pub use file::{Advice, CachedFile};
pub use file_backing::{FileBacking, FileOptions};
pub use lend::Lent;
#[cfg(feature = "object_store")]
pub use object::ObjectBacking;
pub use send::LentSender;
pub use stats::PageCacheStats;
pub use trace::ReadaheadDecision;
