//! The contents of files for an NFSv3 server (RFC 1813): what READ, WRITE and COMMIT do, through a page cache; and the
//! transport of such a server. The procedures between the two are not built yet.
//!
//! [`server`] receives requests, the bytes of a WRITE in pages of the thread's array ([`call`]). [`data`] moves these pages
//! into the cache, lends the pages that a READ is answered with, and makes durable what a COMMIT covers.
#![expect(dead_code, reason = "the procedures are not built yet")]

mod call;
mod data;
mod pages;
mod record;
mod server;

/// What the transport does with a peer's bytes, as one record and as a stream. It must not panic.
#[cfg(fuzzing)]
pub fn check_bytes(bytes: &[u8]) {
    use std::cell::RefCell;
    thread_local! {
        static ARRAY: RefCell<pages::PageArray> =
            RefCell::new(pages::PageArray::new(pagemill::Allocator::global(), Default::default()));
    }
    record::check_record(bytes);
    ARRAY.with_borrow_mut(|array| server::check_stream(bytes, array));
}
