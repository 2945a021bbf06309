//! A page cache with readahead.
mod backing;
mod evict;
mod index;
mod readahead;
