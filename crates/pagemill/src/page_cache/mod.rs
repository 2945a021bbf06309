//! A page cache with readahead.
mod backing;
mod evict;
mod index;
mod readahead;
mod workers;

pub use backing::{Backing, ReadTransfer, WriteTransfer};
