//! A page cache with readahead.
mod backing;
mod evict;
mod file_backing;
mod index;
mod readahead;
mod workers;

pub use backing::{Backing, ReadTransfer, WriteTransfer};
pub use file_backing::{FileBacking, FileOptions};
