//! The contents of files for an NFSv3 server (RFC 1813): what READ, WRITE and COMMIT do, through a page cache. The server
//! that calls this is not built yet.
//!
//! A WRITE's bytes come in pages of the thread's array ([`pages`]), as part of a request ([`call`]). [`data`] moves these pages into the cache, lends the pages
//! that a READ is answered with, and makes durable what a COMMIT covers.
#![expect(dead_code, reason = "the server is not built yet")]

mod call;
mod data;
pub mod pages;
