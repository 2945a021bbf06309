//! One connection to a far end: a thread that sends requests and receives their replies, many at a time.
//!
//! Everything that comes from the far end is checked: a reply to a request that is not under way, or one that does not
//! begin as a reply, ends the connection (L1). A read's bytes go into that read's buffer, as many as were asked for, and
//! nowhere else (L2). What is not answered when the connection ends goes back to the queue, whole (L3).
#[cfg(any(test, fuzzing))]
pub(super) mod played;

use std::collections::{HashMap, VecDeque};
use std::io::{self, IoSlice, IoSliceMut};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::OwnedFd;

use super::kept::Bytes;
use super::{Job, Next, Shared, Work};
use crate::nbd::client::{self, Ask, REPLY, SHUTDOWN};
use crate::serve::socket::{Moved, Socket};

/// Jobs under way on one connection.
const DEPTH: usize = 64;
/// Bytes that wait to be sent, above which no more jobs are taken.
const MAX_UNSENT: usize = 4 << 20;
/// Bytes that are received ahead.
const STAGE: usize = 64 << 10;
/// Entries of a vectored system call.
const ENTRIES: usize = 512;
/// Calls that receive before something is sent again.
const READS: usize = 16;
/// How long replies are waited for when another connection is lost.
const DRAIN: Duration = Duration::from_secs(5);

pub(super) struct Link {
    socket: Socket,
    /// Its place among the links.
    place: usize,
    wake: Arc<OwnedFd>,
    jobs: HashMap<u64, UnderWay>,
    pieces: HashMap<u64, Piece>,
    next: u64,
    out: VecDeque<Out>,
    unsent: usize,
    stage: Vec<u8>,
    start: usize,
    end: usize,
    /// The piece whose bytes come now.
    reading: Option<Piece>,
}

struct UnderWay {
    job: Job,
    pieces: usize,
    result: io::Result<()>,
}

/// A request: a part of a job.
struct Piece {
    job: u64,
    /// Its bytes in the job's buffer. While they come in, those that are still to come.
    range: Range<usize>,
}

/// Bytes to be sent.
struct Out {
    header: [u8; 28],
    bytes: Option<(Bytes, Range<usize>)>,
    sent: usize,
}

impl Out {
    fn len(&self) -> usize {
        self.header.len() + self.bytes.as_ref().map_or(0, |(_, range)| range.len())
    }
}

impl Link {
    pub(super) fn new(socket: Socket, place: usize, wake: Arc<OwnedFd>) -> Self {
        Self {
            socket,
            place,
            wake,
            jobs: HashMap::new(),
            pieces: HashMap::new(),
            next: 0,
            out: VecDeque::new(),
            unsent: 0,
            stage: vec![0; STAGE],
            start: 0,
            end: 0,
            reading: None,
        }
    }

    /// The event that wakes its thread.
    pub(super) fn wake(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.wake)
    }

    /// Serves until the connection or its set is over.
    pub(super) fn run(mut self, shared: &Shared) {
        let why = self.serve(shared).err();
        if why.is_none() {
            // It may be gone already.
            let goodbye = client::request(Ask::Disconnect, 0, 0, 0);
            let _ = self.socket.send(&[IoSlice::new(&goodbye)]);
            self.socket.end_sending();
        }
        let mut jobs: Vec<_> = self.jobs.into_iter().collect();
        jobs.sort_by_key(|&(number, _)| number);
        shared.ended(jobs.into_iter().map(|(_, under_way)| under_way.job).collect(), why);
    }

    fn serve(&mut self, shared: &Shared) -> io::Result<()> {
        let mut drains_until = None;
        loop {
            // Also when it takes no more jobs: its far end may never answer those that it has.
            if drains_until.is_none() && shared.ends() {
                drains_until = Some(Instant::now() + DRAIN);
            }
            while drains_until.is_none() && self.jobs.len() < DEPTH && self.unsent < MAX_UNSENT {
                match shared.next(self.place) {
                    Next::Job(job) => self.begin(job, shared),
                    Next::Nothing => break,
                    Next::Over => drains_until = Some(Instant::now() + DRAIN),
                }
            }
            if drains_until.is_some_and(|until| self.jobs.is_empty() || Instant::now() > until) {
                return Ok(());
            }
            let has_sent = self.send()?;
            let mut has_received = false;
            for _ in 0..READS {
                if !self.receive(shared)? {
                    break;
                }
                has_received = true;
            }
            if !has_sent && !has_received {
                self.sleep(drains_until.is_some())?;
            }
        }
    }

    fn sleep(&self, drains: bool) -> io::Result<()> {
        let mut events = PollFlags::IN;
        events.set(PollFlags::OUT, !self.out.is_empty() || self.socket.has_unsent());
        let mut fds = [PollFd::new(&self.socket, events), PollFd::new(&self.wake, PollFlags::IN)];
        let second = rustix::time::Timespec { tv_sec: 1, tv_nsec: 0 };
        match poll(&mut fds, drains.then_some(&second)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        // There may be nothing to be read.
        let _ = rustix::io::read(&*self.wake, &mut [0; 8]);
        Ok(())
    }

    /// Makes the requests of a job.
    fn begin(&mut self, job: Job, shared: &Shared) {
        let number = self.next;
        let agreed = &shared.agreed;
        let most = agreed.max_block as usize;
        let (ask, len) = match &job.work {
            Work::Read => (Ask::Read, job.buffer.len()),
            Work::Write(bytes) | Work::Again(bytes, _) => (Ask::Write { is_durable: !agreed.can_flush }, bytes.len()),
            Work::Flush => (Ask::Flush, 0),
            Work::Trim(len) => (Ask::Trim, *len as usize),
        };
        let is_whole = matches!(job.work, Work::Flush | Work::Trim(_));
        let mut pieces = 0;
        for start in (0..len.max(1)).step_by(if is_whole { usize::MAX } else { most }) {
            let range = start..if is_whole { len } else { len.min(start + most) };
            let cookie = self.next;
            self.next += 1;
            pieces += 1;
            let bytes = match &job.work {
                Work::Write(bytes) | Work::Again(bytes, _) => Some((Arc::clone(bytes), range.clone())),
                _ => None,
            };
            let at = if job.work.is_flush() { 0 } else { job.at + start as u64 };
            let out = Out { header: client::request(ask, cookie, at, range.len() as u32), bytes, sent: 0 };
            self.unsent += out.len();
            self.out.push_back(out);
            self.pieces.insert(cookie, Piece { job: number, range });
        }
        self.jobs.insert(number, UnderWay { job, pieces, result: Ok(()) });
    }

    /// Sends what the socket takes. True if it took something.
    fn send(&mut self) -> io::Result<bool> {
        if self.out.is_empty() {
            return match self.socket.has_unsent() && self.socket.flush() == Moved::Ended {
                true => Err(self.socket.ended()),
                false => Ok(false),
            };
        }
        let mut vector = Vec::new();
        for out in &self.out {
            if vector.len() + 2 > ENTRIES {
                break;
            }
            let sent = out.sent.min(out.header.len());
            vector.push(IoSlice::new(&out.header[sent..]));
            if let Some((bytes, range)) = &out.bytes {
                let sent = out.sent - sent;
                vector.push(IoSlice::new(&bytes[range.start + sent..range.end]));
            }
        }
        let mut count = match self.socket.send(&vector) {
            Moved::Bytes(count) => count,
            Moved::NotNow => return Ok(false),
            Moved::Ended => return Err(self.socket.ended()),
        };
        self.unsent -= count;
        while let Some(out) = self.out.front_mut() {
            let now = count.min(out.len() - out.sent);
            out.sent += now;
            count -= now;
            if out.sent < out.len() {
                break;
            }
            self.out.pop_front();
        }
        Ok(true)
    }

    /// Receives once, and handles what has come. False if there is nothing.
    fn receive(&mut self, shared: &Shared) -> io::Result<bool> {
        self.stage.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        let mut vector = Vec::new();
        let mut wanted = 0;
        if let Some(Piece { job, range }) = &self.reading {
            let Some(under_way) = self.jobs.get_mut(job) else { unreachable!("a piece of a job that is over") };
            let buffer = &mut under_way.job.buffer;
            vector.extend(buffer.range_mut(range.clone()).take(ENTRIES - 1).map(IoSliceMut::new));
            wanted = vector.iter().map(|slice| slice.len()).sum();
            if wanted == range.len() {
                vector.push(IoSliceMut::new(&mut self.stage[self.end..]));
            }
        } else {
            vector.push(IoSliceMut::new(&mut self.stage[self.end..]));
        }
        let count = match self.socket.receive(&mut vector) {
            Moved::Bytes(count) => count,
            Moved::NotNow => return Ok(false),
            Moved::Ended => return Err(self.socket.ended()),
        };
        self.end += count.saturating_sub(wanted);
        if self.reading.is_some() {
            self.has_read(count.min(wanted), shared);
        }
        while self.reading.is_none() && self.end - self.start >= REPLY {
            let Some(&header) = self.stage[self.start..].first_chunk::<REPLY>() else { break };
            self.start += REPLY;
            self.reply(&header, shared)?;
            self.copy_staged(shared);
        }
        Ok(true)
    }

    /// The bytes of a read that were received together with its reply's header.
    fn copy_staged(&mut self, shared: &Shared) {
        let Some(Piece { job, range }) = &self.reading else { return };
        let staged = range.len().min(self.end - self.start);
        let Some(under_way) = self.jobs.get_mut(job) else { unreachable!("a piece of a job that is over") };
        under_way.job.buffer.copy_in(range.start, &self.stage[self.start..self.start + staged]);
        self.start += staged;
        self.has_read(staged, shared);
    }

    /// So many bytes of the read are there.
    fn has_read(&mut self, count: usize, shared: &Shared) {
        let Some(piece) = &mut self.reading else { return };
        piece.range.start += count;
        if piece.range.is_empty()
            && let Some(piece) = self.reading.take()
        {
            self.answered(piece.job, Ok(()), shared);
        }
    }

    /// Handles a reply's header (L1).
    fn reply(&mut self, header: &[u8; REPLY], shared: &Shared) -> io::Result<()> {
        let (error, cookie) = client::reply(header)?;
        // It asks for the request to be made elsewhere, or later.
        if error == SHUTDOWN {
            return Err(io::Error::other("the far end is about to stop"));
        }
        let piece = self.pieces.remove(&cookie).ok_or_else(|| client::unknown(cookie))?;
        let Some(under_way) = self.jobs.get(&piece.job) else { unreachable!("a piece of a job that is over") };
        match error {
            0 if matches!(under_way.job.work, Work::Read) => self.reading = Some(piece),
            0 => self.answered(piece.job, Ok(()), shared),
            error => self.answered(piece.job, Err(client::error_of(error)), shared),
        }
        Ok(())
    }

    /// One piece of a job is done.
    fn answered(&mut self, number: u64, result: io::Result<()>, shared: &Shared) {
        let Some(under_way) = self.jobs.get_mut(&number) else { unreachable!("a piece of a job that is over") };
        under_way.pieces -= 1;
        if result.is_err() {
            under_way.result = result;
        }
        if under_way.pieces == 0
            && let Some(UnderWay { job, result, .. }) = self.jobs.remove(&number)
        {
            shared.done(job, result);
        }
    }
}
