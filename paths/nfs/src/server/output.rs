//! Replies on their way to the peer.
//!
//! A thread that answered requests adds its replies to the queue of the connection. If no other thread sends from it, and the
//! socket had room the last time, it sends: see [`Connection::send`](super::connection::Connection::send).
use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::iter;
use std::net::TcpStream;
use std::os::fd::OwnedFd;

use pagemill::Lent;
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};

use super::counters::Why;
use crate::call::{Answer, Status};
use crate::record;

/// The kernel takes no more of them at once (`UIO_MAXIOV`).
const SLICES_MAX: usize = 1024;

/// Bytes of replies, and then pages that are lent.
#[derive(Default)]
pub(super) struct Chunk {
    bytes: Vec<u8>,
    lent: Option<Lent>,
}

impl Chunk {
    fn len(&self) -> usize {
        self.bytes.len() + self.lent.as_ref().map_or(0, Lent::len)
    }
}

/// Replies that a thread has made.
#[derive(Default)]
pub(super) struct Replies {
    pub(super) chunks: Vec<Chunk>,
    /// How many requests these replies finish, including those that get no reply.
    pub(super) requests: usize,
    /// What those requests asked for.
    pub(super) asked: usize,
    pub(super) bytes: usize,
}

impl Replies {
    /// The bytes that the next reply is appended to.
    fn end(&mut self) -> &mut Vec<u8> {
        if self.chunks.last().is_none_or(|last| last.lent.is_some()) {
            self.chunks.push(Chunk::default());
        }
        let last = self.chunks.len() - 1;
        &mut self.chunks[last].bytes
    }
    fn status(&mut self, xid: u32, status: Status) {
        let end = self.end();
        let start = end.len();
        record::put_header(end, xid, status, 0);
        self.bytes += end.len() - start;
    }
    pub(super) fn answer(&mut self, xid: u32, answer: Answer) {
        match answer {
            Answer::Results(results) => self.results(xid, &results, None),
            Answer::Lent(results, lent) => self.results(xid, &results, Some(lent)),
            Answer::Refused(status) => self.status(xid, status),
            Answer::Nothing => {}
        }
    }
    fn results(&mut self, xid: u32, results: &[u8], lent: Option<Lent>) {
        let data = lent.as_ref().map_or(0, Lent::len);
        let padding = record::padding(results.len() + data);
        let end = self.end();
        let start = end.len();
        record::put_header(end, xid, Status::Success, results.len() + data + padding);
        end.extend_from_slice(results);
        self.bytes += end.len() - start + data + padding;
        if let (Some(lent), Some(chunk)) = (lent.filter(|lent| !lent.is_empty()), self.chunks.last_mut()) {
            chunk.lent = Some(lent);
        }
        if padding > 0 {
            self.end().extend_from_slice(&[0; 3][..padding]);
        }
    }
}

/// The replies of a connection that are not sent, and what its two sides may do. The right to read is in one place at a
/// time: the armed poller, the reading thread, the queue of [`Room`](super::room::Room), or here (`is_input_idle`).
#[derive(Default)]
pub(super) struct Output {
    pub(super) queue: VecDeque<Chunk>,
    /// The bytes of the first chunk that are sent.
    pub(super) sent: usize,
    /// The bytes that are not sent, those that a thread is sending included.
    pub(super) bytes: usize,
    /// Requests that were received, and not answered yet.
    pub(super) in_progress: usize,
    /// The bytes that these ask for.
    pub(super) asked: usize,
    /// A thread sends, and will look at the queue again before it stops.
    pub(super) is_sending: bool,
    /// The socket had no room: an event will say when it has.
    pub(super) is_blocked: bool,
    /// The tick at which it has taken too little for too long, if it did not take all.
    pub(super) stalls_at: Option<u64>,
    /// The bytes that the socket had for the peer as that was set, and those that it got since.
    pub(super) offered: usize,
    /// Nobody reads, until there are fewer requests or replies.
    pub(super) is_input_idle: bool,
    /// Then: whether a part of a record was read.
    pub(super) is_within_record: bool,
    /// Nothing will be received any more; the connection is closed once all is answered.
    pub(super) ended: Option<Why>,
    /// The same socket, for events of room to send.
    pub(super) duplicate: Option<OwnedFd>,
}

/// What sending came to.
pub(super) enum Sent {
    /// All that was offered.
    All,
    /// The socket has no more room.
    Blocked,
}

/// Sends from the front of the queue, and drops what is sent. Returns the number of bytes.
pub(super) fn send_some(
    socket: &TcpStream,
    queue: &mut VecDeque<Chunk>,
    sent: &mut usize,
) -> io::Result<(usize, Sent)> {
    let mut slices = Vec::new();
    let mut skipped = 0;
    for chunk in &*queue {
        let lent = chunk.lent.as_ref().map_or_else(Vec::new, Lent::slices);
        for slice in iter::once(&chunk.bytes[..]).chain(lent) {
            let skip = slice.len().min(*sent - skipped);
            skipped += skip;
            if skip < slice.len() {
                slices.push(IoSlice::new(&slice[skip..]));
            }
        }
        if slices.len() >= SLICES_MAX {
            slices.truncate(SLICES_MAX);
            break;
        }
    }
    let offered: usize = slices.iter().map(|slice| slice.len()).sum();
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let count = loop {
        match sendmsg(socket, &slices, &mut SendAncillaryBuffer::default(), flags) {
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => break 0,
            other => break other?,
        }
    };
    drop(slices);
    *sent += count;
    while let Some(len) = queue.front().map(Chunk::len).filter(|len| len <= sent) {
        *sent -= len;
        queue.pop_front();
    }
    Ok((count, if count < offered { Sent::Blocked } else { Sent::All }))
}
