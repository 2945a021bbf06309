//! A request, between the connection that received it and what answers it.
use std::net::SocketAddr;

use nfs3_types::rpc::auth_stat;
use pagemill::{Lent, Page};

use crate::xdr::Garbage;

/// The bytes of a WRITE, on pages that were taken from the thread's array. The procedure may take pages; the thread puts
/// the rest back into its array.
pub(crate) struct Payload<'a> {
    pub(crate) pages: &'a mut [Option<Page>],
    /// The first byte is at the beginning of the first page.
    pub(crate) len: usize,
}

/// Who a request says that it comes from (RFC 5531, appendix A).
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Credential {
    /// `AUTH_NONE`
    None,
    /// `AUTH_SYS`
    Sys(Caller),
}

/// The user that a request claims.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Caller {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// At most 16.
    pub(crate) groups: Vec<u32>,
}

/// A request.
pub(crate) struct Call<'a> {
    pub(crate) xid: u32,
    pub(crate) program: u32,
    pub(crate) version: u32,
    pub(crate) procedure: u32,
    pub(crate) credential: Credential,
    pub(crate) peer: SocketAddr,
    /// The arguments in XDR: all bytes after the header of the call. Those of a WRITE end with the length of its data.
    pub(crate) args: &'a [u8],
    /// The data of a WRITE, whose length is that in `args`; otherwise empty.
    pub(crate) payload: Payload<'a>,
}

/// How long a request takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Pace {
    /// It changes nothing, and what it asks for is in memory as a rule.
    Quick,
    /// What it reads may be on a disk.
    MayWait,
    /// It may wait until a disk has what it changes.
    Slow,
}

/// What a request is answered with.
#[derive(Debug)]
pub(crate) enum Answer {
    /// The results in XDR.
    Results(Vec<u8>),
    /// The results in XDR, up to the length of their data, and the data. What sends them pads them.
    Lent(Vec<u8>, Lent),
    /// No results, for this reason.
    Refused(Status),
    /// No answer: the same request is being answered already.
    Nothing,
}

/// What the header of a reply says (RFC 5531, `accept_stat` and `reject_stat`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Status {
    /// Results follow.
    Success,
    /// `PROG_UNAVAIL`
    NoProgram,
    /// `PROG_MISMATCH`, with the lowest and the highest version.
    NoVersion(u32, u32),
    /// `PROC_UNAVAIL`
    NoProcedure,
    /// `GARBAGE_ARGS`
    Garbage,
    /// `SYSTEM_ERR`
    SystemError,
    /// Another version of RPC.
    RpcMismatch,
    /// `AUTH_ERROR`
    Auth(auth_stat),
}

impl From<Garbage> for Status {
    fn from(_: Garbage) -> Self {
        Self::Garbage
    }
}

impl From<Garbage> for Answer {
    fn from(garbage: Garbage) -> Self {
        Self::Refused(garbage.into())
    }
}
