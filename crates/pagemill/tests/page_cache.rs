//! The page cache: readahead, write-back, eviction, lending (C8).
