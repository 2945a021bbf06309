//! What clients did, and why they left: counted for the figures, and logged.
//!
//! Each worker has [`Counts`] of its own, so that workers do not share cache lines; whoever shows the figures adds them
//! up. A client's [`Tally`] logs that it came, and says when it is dropped what it did and why it ended. So each client
//! that was counted as connected is counted as gone once (G1).
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use tracing::{debug, info, warn};

use super::socket::Peer;
use crate::nbd::{Command, Fault, Request};

/// Kinds of requests, by their names in the figures.
pub(super) const KINDS: [&str; 6] = ["read", "write", "flush", "trim", "zero", "other"];
/// The upper limits of the histogram's buckets: 2^4 µs to 2^24 µs, which are 17 seconds; and above.
pub(super) const BUCKETS: usize = 22;
const FIRST: u32 = 4;

fn kind(command: Command) -> usize {
    match command {
        Command::Read => 0,
        Command::Write => 1,
        Command::Flush => 2,
        Command::Trim => 3,
        Command::WriteZeroes => 4,
        _ => 5,
    }
}

/// A bucket's upper limit in microseconds; `None` for the last one.
pub(super) fn limit_us(bucket: usize) -> Option<u64> {
    (bucket + 1 < BUCKETS).then(|| 1 << (FIRST as usize + bucket))
}

fn bucket(us: u64) -> usize {
    // The number of bits of `us - 1` is the exponent of the least power of two that is not below `us`.
    let bits = u64::BITS - us.saturating_sub(1).leading_zeros();
    (bits.saturating_sub(FIRST) as usize).min(BUCKETS - 1)
}

/// Why a client is gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// It said that it is done.
    Goodbye,
    /// It closed its side without saying so, or its machine is gone.
    Closed,
    /// It broke the protocol.
    Violation(&'static str),
    /// TLS failed.
    Tls(String),
    /// It did not negotiate in time.
    Handshake,
    /// It exceeded the limit for requests and answers.
    Stalled,
    /// The server stopped.
    Stopped,
    /// Something failed after a part of an answer was sent.
    Cut,
}

impl End {
    /// The names in the figures, by number.
    pub(super) const NAMES: [&str; 8] =
        ["goodbye", "closed", "protocol", "tls", "handshake_timeout", "timeout", "stopped", "cut"];

    fn number(&self) -> usize {
        match self {
            Self::Goodbye => 0,
            Self::Closed => 1,
            Self::Violation(_) => 2,
            Self::Tls(_) => 3,
            Self::Handshake => 4,
            Self::Stalled => 5,
            Self::Stopped => 6,
            Self::Cut => 7,
        }
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Goodbye => f.write_str("it said that it was done"),
            Self::Closed => f.write_str("it closed the connection"),
            Self::Violation(how) => write!(f, "it broke the protocol: {how}"),
            Self::Tls(why) => write!(f, "TLS failed: {why}"),
            Self::Handshake => f.write_str("it did not negotiate within --handshake-timeout"),
            Self::Stalled => f.write_str("it moved less than 64 KiB within --timeout"),
            Self::Stopped => f.write_str("the server stopped"),
            Self::Cut => f.write_str("the disk or the memory failed in the middle of an answer"),
        }
    }
}

/// One worker's counts. They only grow.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) connected: AtomicU64,
    pub(super) ended: [AtomicU64; End::NAMES.len()],
    pub(super) requests: [AtomicU64; KINDS.len()],
    /// Of requests that went well.
    pub(super) bytes: [AtomicU64; KINDS.len()],
    pub(super) errors: [AtomicU64; KINDS.len()],
    /// Answered requests by the time that they took.
    pub(super) took: [[AtomicU64; BUCKETS]; KINDS.len()],
    pub(super) took_us: [AtomicU64; KINDS.len()],
}

/// What one client did.
#[derive(Debug, Default)]
pub(super) struct Tally {
    of: Option<Of>,
    /// The export that it has chosen, where there are several.
    export: Option<String>,
    end: Option<End>,
    /// When the read began that is answered in parts.
    slow_since: Option<Instant>,
    requests: u64,
    errors: u64,
    read: u64,
    written: u64,
}

#[derive(Debug)]
struct Of {
    counts: Arc<Counts>,
    peer: Peer,
    client: u64,
    since: Instant,
}

impl Tally {
    /// The client has come: its number, and who it is.
    pub(super) fn welcome(&mut self, counts: &Arc<Counts>, client: u64, peer: Peer, now: Instant) {
        counts.connected.fetch_add(1, Relaxed);
        info!(name: "client connected", client, %peer, "client connected");
        self.of = Some(Of { counts: Arc::clone(counts), peer, client, since: now });
    }

    /// It has chosen this export, perhaps of several.
    pub(super) fn chose(&mut self, export: &str, of_several: bool) {
        if let Some(Of { client, peer, .. }) = &self.of {
            debug!(name: "export chosen", client, %peer, export, "a client has chosen its export");
        }
        self.export = of_several.then(|| export.to_owned());
    }

    /// It asked for an export that is not there.
    pub(super) fn misses(&self, name: &[u8]) {
        if let Some(Of { client, peer, .. }) = &self.of {
            let name = &*String::from_utf8_lossy(name);
            info!(name: "export missed", client, %peer, export = name, "a client asks for an export that is not here");
        }
    }

    /// It asked for something.
    pub(super) fn asked(&mut self, request: &Request) {
        self.requests += 1;
        if let Some(of) = &self.of {
            of.counts.requests[kind(request.command)].fetch_add(1, Relaxed);
        }
    }

    /// A request that went to the disk is answered.
    pub(super) fn answered(&mut self, request: &Request, fault: Option<Fault>, took: Duration) {
        let (kind, bytes) = (kind(request.command), u64::from(request.len));
        match (fault, request.command) {
            (Some(_), _) => self.errors += 1,
            (None, Command::Read) => self.read += bytes,
            (None, Command::Write) => self.written += bytes,
            _ => {}
        }
        let Some(of) = &self.of else { return };
        match fault {
            Some(_) => of.counts.errors[kind].fetch_add(1, Relaxed),
            None => of.counts.bytes[kind].fetch_add(bytes, Relaxed),
        };
        let us = took.as_micros() as u64;
        of.counts.took[kind][bucket(us)].fetch_add(1, Relaxed);
        of.counts.took_us[kind].fetch_add(us, Relaxed);
    }

    /// A read begins that is answered in parts, of which a client has one at a time.
    pub(super) fn begins_slowly(&mut self) {
        self.slow_since = Some(Instant::now());
    }

    /// It is answered.
    pub(super) fn answered_slowly(&mut self, request: &Request, fault: Option<Fault>) {
        let took = self.slow_since.take().map_or(Duration::ZERO, |since| since.elapsed());
        self.answered(request, fault, took);
    }

    /// Why it ends. The first reason counts.
    pub(super) fn ends(&mut self, why: End) {
        self.end.get_or_insert(why);
    }
}

impl Drop for Tally {
    fn drop(&mut self) {
        let Some(Of { counts, peer, client, since }) = self.of.take() else { return };
        let why = self.end.take().unwrap_or(End::Stopped);
        counts.ended[why.number()].fetch_add(1, Relaxed);
        let Self { requests, errors, read, written, .. } = *self;
        let (seconds, export) = (since.elapsed().as_secs(), self.export.as_deref());
        // Kinds of their own, so that a flood of one does not hide the others.
        match why {
            End::Goodbye | End::Stopped => {
                info!(name: "client gone", client, %peer, export, why = %why, seconds, requests, errors, read, written, "client gone");
            }
            End::Closed => {
                info!(name: "client closed", client, %peer, export, why = %why, seconds, requests, errors, read, written, "client gone");
            }
            _ => {
                warn!(name: "client cut off", client, %peer, export, why = %why, seconds, requests, errors, read, written, "client cut off");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_lies_in_the_first_bucket_whose_limit_is_not_below_it() {
        for us in (0..40).map(|bit| 1u64 << bit).flat_map(|us| [us - 1, us, us + 1]) {
            let expected = (0..BUCKETS).find(|&bucket| limit_us(bucket).is_none_or(|limit| us <= limit));
            assert_eq!(Some(bucket(us)), expected, "{us}");
        }
        assert_eq!((limit_us(0), limit_us(BUCKETS - 2), limit_us(BUCKETS - 1)), (Some(16), Some(1 << 24), None));
    }

    #[test]
    fn each_client_is_counted_once_by_its_first_reason() {
        let counts = Arc::new(Counts::default());
        let ends = [End::Goodbye, End::Closed, End::Violation("it lies"), End::Tls("no".to_owned())];
        for end in ends.into_iter().chain([End::Handshake, End::Stalled, End::Stopped, End::Cut]) {
            let number = end.number();
            let mut tally = Tally::default();
            tally.welcome(&counts, 1, Peer::Unknown, Instant::now());
            tally.ends(end);
            tally.ends(End::Closed);
            drop(tally);
            assert_eq!(counts.ended[number].load(Relaxed), 1, "{}", End::NAMES[number]);
        }
        drop(Tally::default());
        let ended: u64 = counts.ended.iter().map(|count| count.load(Relaxed)).sum();
        assert_eq!((counts.connected.load(Relaxed), ended), (8, 8));
    }
}
