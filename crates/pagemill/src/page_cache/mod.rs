//! A page cache with readahead.
mod backing;
mod evict;
#[cfg(all(test, not(shuttle)))]
#[path = "../../tests/common/fake_backing.rs"]
mod fake_backing;
mod file_backing;
mod index;
#[cfg(feature = "object_store")]
mod object;
mod readahead;
#[cfg(all(test, not(shuttle)))]
mod testing;
#[cfg(feature = "uring")]
mod uring;
mod workers;

pub use backing::{Backing, ReadTransfer, WriteTransfer};
pub use file_backing::{FileBacking, FileOptions};
#[cfg(feature = "object_store")]
pub use object::ObjectBacking;
