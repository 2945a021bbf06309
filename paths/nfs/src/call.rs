//! A request, between the connection and what answers it.
use pagemill::Page;

/// The bytes of a WRITE, on pages of the thread's array. Whoever takes a page leaves a hole, which the thread fills
/// before its next request.
pub(crate) struct Payload<'a> {
    pub(crate) pages: &'a mut [Option<Page>],
    /// The first byte is at the beginning of the first page.
    pub(crate) len: usize,
}
