//! A request and its answer, between the connection and the programs that are called.
use pagemill::{Lent, Page};
use std::net::SocketAddr;

/// Who asks, as AUTH_SYS says (RFC 5531, appendix A). Without AUTH_SYS: nobody.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Caller {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// At most 16 others.
    pub(crate) groups: Vec<u32>,
}

/// A call of a procedure.
pub(crate) struct Call<'a> {
    pub(crate) program: u32,
    pub(crate) version: u32,
    pub(crate) procedure: u32,
    pub(crate) caller: Caller,
    pub(crate) peer: SocketAddr,
    /// The arguments; for a WRITE, those before its bytes (up to the length word of `data`, without it).
    pub(crate) args: &'a [u8],
    /// A WRITE's bytes.
    pub(crate) payload: Option<Payload<'a>>,
}

/// The bytes of a WRITE, on pages of the thread's array. Whoever takes a page leaves a hole, which the thread fills
/// before its next request.
pub(crate) struct Payload<'a> {
    pub(crate) pages: &'a mut [Option<Page>],
    /// The first byte is at the beginning of the first page.
    pub(crate) len: usize,
}

/// The answer to a call.
#[derive(Debug)]
pub(crate) enum Answer {
    /// The procedure's results, in XDR.
    Results(Vec<u8>),
    /// The results of a READ, whose last part lies in pages of the cache: first these bytes (the length word of `data` is the
    /// last of them), then those that are lent, then zeros up to a multiple of four.
    Lent(Vec<u8>, Lent),
    NoProgram,
    /// The versions that there are.
    NoVersion(u32, u32),
    NoProcedure,
    /// The arguments are none of this procedure.
    Garbage,
    /// There is no memory, or the server is at fault.
    SystemError,
    /// The caller said too little about itself, or may not ask at all.
    TooWeak,
}
