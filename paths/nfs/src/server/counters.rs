//! What the transport counts.
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Why a connection was closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Why {
    /// The peer ended it between two records.
    Ended,
    /// The peer ended it within a record, or the network did.
    Broken,
    /// A record is longer than any request may be.
    TooLong,
    /// What came is no call, or a record goes on after its end.
    Malformed,
    /// It was too slow within a record, or to take its replies.
    Stalled,
    /// It was idle, or its address had more than half of all connections, and a new connection needed its place.
    Idle,
    /// The server stopped.
    Stopped,
}

const WHYS: usize = Why::Stopped as usize + 1;

/// Counted since the start. Each number is right by itself; two of them may be of different moments.
#[derive(Default, Debug)]
pub(crate) struct Counters {
    /// Connections accepted, those refused not counted.
    pub(crate) accepted: AtomicU64,
    /// Refused: the list of peers does not have them.
    pub(crate) refused_peers: AtomicU64,
    /// Refused: there are too many, and none may be closed for them.
    pub(crate) refused_full: AtomicU64,
    /// Pauses of accepting, because descriptors or memory lacked.
    pub(crate) accept_pauses: AtomicU64,
    closed: [AtomicU64; WHYS],
    pub(crate) requests: AtomicU64,
    pub(crate) received_bytes: AtomicU64,
    pub(crate) sent_bytes: AtomicU64,
    /// Requests answered with `GARBAGE_ARGS`.
    pub(crate) garbage: AtomicU64,
    /// Requests denied before a procedure saw them: by their credential, their port, or their version of RPC.
    pub(crate) denied: AtomicU64,
    /// Procedures that panicked.
    pub(crate) panics: AtomicU64,
    /// Connections that were not read for a while, because others keep too much of unfinished WRITEs.
    pub(crate) waits_for_room: AtomicU64,
}

impl Counters {
    /// Connections closed for this reason.
    pub(crate) fn closed(&self, why: Why) -> u64 {
        self.closed[why as usize].load(Relaxed)
    }
    /// Connections that there are.
    #[cfg(test)]
    pub(crate) fn connections(&self) -> u64 {
        let closed: u64 = self.closed.iter().map(|closed| closed.load(Relaxed)).sum();
        self.accepted.load(Relaxed).saturating_sub(closed)
    }
    pub(super) fn close(&self, why: Why) {
        self.closed[why as usize].fetch_add(1, Relaxed);
    }
}
