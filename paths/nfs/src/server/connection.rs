//! A connection: its socket, and its two sides, which are served independently of each other.
//!
//! # Receiving
//! Reading is one thread's at a time: the poller gives an event once, and gives the next one only after the thread has armed
//! the socket again. It does that as soon as it has taken the requests that came, before it answers them. So other threads
//! serve later requests of the same connection meanwhile, and replies may go out in another order: clients tell them apart by
//! their `xid`.
//!
//! Reading goes on only while fewer than [`REQUESTS_MAX`] requests are in progress, fewer than [`REPLIES_MAX`] bytes of
//! replies are unsent, and fewer than [`ASKED_MAX`] bytes are unsent or asked for by requests in progress. The thread that
//! brings all below their limits arms the socket again. So a connection binds less than `ASKED_MAX` of the cache's memory, and
//! what one batch asks for: the calls in one buffer of [`BUFFER`].
//!
//! While a connection waits for room, its peer may leave: a thread is told so, and ends it if what came is not the rest of the
//! WRITE.
//!
//! # Sending
//! No thread waits for a peer that does not take its replies: they stay queued, and an event on a duplicate of the socket says
//! when there is room.
//!
//! # Time
//! Within a record, and while the socket takes no more replies, the peer must make [`PROGRESS`] in the time that a connection
//! may be silent for. Otherwise the connection ends.
//!
//! # Locks
//! `input` and `output` are never held together; neither is held while a procedure runs, and `output` not while the kernel
//! sends. `granted` may be taken under `input`, also another connection's. Under `granted` only the lock of `room` is taken.
use std::io::{self, ErrorKind};
use std::mem;
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::time::Timespec;

use super::clock::Clock;
use super::counters::Why;
use super::hub::Hub;
use super::input::{Batch, Input, PROGRESS, Source};
use super::lock;
use super::output::{Output, Replies, Sent, send_some};
use super::poller::{Event, Poller, Token};
use super::room::Reserved;
use crate::service::UNPRIVILEGED;
use crate::syscalls::unsent;

/// Reading stops at so many requests in progress.
pub(super) const REQUESTS_MAX: usize = 64;
/// Reading stops at so many bytes of replies.
pub(super) const REPLIES_MAX: usize = 4 << 20;
/// Reading stops at so many bytes of replies and of what requests in progress ask for: sixteen of the largest READs.
pub(super) const ASKED_MAX: usize = 16 << 20;
/// A thread's buffer: many small requests, and little of a WRITE's data.
pub(super) const BUFFER: usize = 1 << 10;
/// A read that brings less than this ends the batch: the peer is slow, and the thread serves another connection.
const PIECE: usize = 16 << 10;

/// `stalls_at` of a connection that may be silent.
const NEVER: u64 = u64::MAX;

/// What shares are of: an address. Users of its machine who may not use the server have a share of their own, so that they do
/// not take that of those who may.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Origin {
    address: IpAddr,
    is_privileged: bool,
}

impl Origin {
    pub(super) fn new(peer: SocketAddr) -> Self {
        Self { address: peer.ip(), is_privileged: peer.port() < UNPRIVILEGED }
    }
}

pub(super) struct Connection {
    pub(super) token: Token,
    pub(super) socket: TcpStream,
    pub(super) peer: SocketAddr,
    poller: Arc<Poller>,
    clock: Arc<Clock>,
    input: Mutex<Input>,
    output: Mutex<Output>,
    /// Room that was granted while nobody had the connection.
    granted: Mutex<Option<Reserved>>,
    /// The tick at which a record has brought too little for too long.
    stalls_at: AtomicU64,
    /// How many requests there were, of all connections, before its last ones.
    used_at: AtomicU64,
    has_stalled: AtomicBool,
    is_closed: AtomicBool,
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "connection from {}", self.peer)
    }
}

/// How receiving goes on.
enum Next {
    /// More may come.
    More,
    /// There is no room for the data of a WRITE; the connection is armed as there is.
    Waits,
    Ended(Why),
}

impl Connection {
    pub(super) fn new(token: Token, socket: TcpStream, peer: SocketAddr, hub: &Hub) -> Self {
        Self {
            token,
            socket,
            peer,
            poller: hub.poller.clone(),
            clock: hub.clock.clone(),
            input: Mutex::default(),
            output: Mutex::default(),
            granted: Mutex::default(),
            stalls_at: AtomicU64::new(NEVER),
            used_at: AtomicU64::new(hub.counters.requests.load(Relaxed)),
            has_stalled: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
        }
    }

    /// Takes what came to the batch, and lets others read on.
    pub(super) fn receive(self: &Arc<Self>, hub: &Hub, batch: &mut Batch, mut source: Source<'_>) {
        let mut input = lock(&self.input);
        let mut bytes = 0;
        let next = self.receive_some(&mut input, hub, batch, &mut source, &mut bytes);
        input.trim(&mut source);
        let is_within_record = input.is_within_record();
        match next {
            Next::More if !is_within_record => self.stalls_at.store(NEVER, Relaxed),
            Next::More if input.has_progressed() => self.stalls_at.store(self.clock.stalls_at(), Relaxed),
            // It was stored before others could have the connection.
            Next::More | Next::Waits => {}
            Next::Ended(_) => {
                self.stalls_at.store(NEVER, Relaxed);
                *input = Input::default(); // Its pages are free at once.
            }
        }
        drop(input);
        hub.counters.received_bytes.fetch_add(bytes as u64, Relaxed);
        let requests = hub.counters.requests.fetch_add(batch.requests.len() as u64, Relaxed);
        if !batch.requests.is_empty() {
            self.used_at.store(requests, Relaxed);
        }
        let mut output = lock(&self.output);
        output.in_progress += batch.requests.len();
        output.asked += batch.requests.iter().map(|request| request.asks).sum::<usize>();
        match next {
            Next::More if output.may_read() => {
                drop(output);
                self.arm_input();
            }
            Next::More => {
                // It waits for its requests, or for its peer to take replies.
                self.stalls_at.store(NEVER, Relaxed);
                (output.is_input_idle, output.is_within_record) = (true, is_within_record);
            }
            Next::Waits => {}
            Next::Ended(why) => {
                output.ended = Some(why);
                drop(output);
                self.close_if_done(hub);
            }
        }
    }

    fn receive_some(
        self: &Arc<Self>,
        input: &mut Input,
        hub: &Hub,
        batch: &mut Batch,
        source: &mut Source<'_>,
        bytes: &mut usize,
    ) -> Next {
        let mut buffer = [0; BUFFER];
        let mut may_read_small = true;
        loop {
            if !self.has_room(input, hub) {
                return Next::Waits;
            }
            let (came, direct) = if input.direct() > 0 {
                if source.left() == 0 {
                    return Next::More;
                }
                let mut slices = Vec::new();
                let direct = input.receive_into(&mut buffer, source, &mut slices);
                (rustix::io::readv(&self.socket, &mut slices), direct)
            } else if may_read_small {
                (rustix::io::read(&self.socket, &mut buffer), 0)
            } else {
                return Next::More;
            };
            let came = match came {
                Ok(0) if input.is_within_record() => return Next::Ended(Why::Broken),
                Ok(0) => return Next::Ended(Why::Ended),
                Ok(came) => came,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => return Next::More,
                Err(_) => return Next::Ended(Why::Broken),
            };
            *bytes += came;
            let requests = batch.requests.len();
            let taken = input
                .received(came.min(direct), batch)
                .and_then(|()| input.take(&buffer[..came.saturating_sub(direct)], batch, source));
            if let Err(why) = taken {
                return Next::Ended(why);
            }
            // One WRITE a batch (S4): another thread may receive the next one.
            if direct > 0 && (came < PIECE || batch.requests.len() > requests) {
                return Next::More;
            }
            may_read_small = false;
        }
    }

    /// Whether there is room for the WRITE that is being received, if it goes on.
    fn has_room(self: &Arc<Self>, input: &mut Input, hub: &Hub) -> bool {
        let Some(data) = input.data.as_mut().filter(|data| !data.is_complete()) else { return true };
        if data.reserved.is_some() {
            return true;
        }
        // Held until it waits as it should: a grant comes after that.
        let mut granted = lock(&self.granted);
        data.reserved = granted.take().or_else(|| hub.room.reserve(data.pages_needed(), self));
        if data.reserved.is_none() {
            hub.counters.waits_for_room.fetch_add(1, Relaxed);
            self.stalls_at.store(NEVER, Relaxed);
            self.poller.arm(&self.socket, Event::Left(self.token));
            drop(granted);
            if self.is_closed.load(Relaxed) {
                hub.room.forget(self.token); // It may have been closed before it waited.
            }
        }
        data.reserved.is_some()
    }
    /// There is room now: somebody reads on.
    pub(super) fn grant(&self, reserved: Reserved) {
        *lock(&self.granted) = Some(reserved);
        self.stalls_at.store(self.clock.stalls_at(), Relaxed);
        self.arm_input();
    }
    /// The peer sends no more. If the connection still waits for room, and not all of the WRITE came, that is its end.
    pub(super) fn has_left(&self, hub: &Hub) {
        let input = lock(&self.input);
        let missing = input.missing_without_room().filter(|_| lock(&self.granted).is_none());
        let came = rustix::io::ioctl_fionread(&self.socket).unwrap_or(0);
        if missing.is_none_or(|missing| came >= missing as u64) {
            return;
        }
        drop(input);
        lock(&self.output).ended = Some(Why::Broken);
        self.close_if_done(hub);
    }

    fn arm_input(&self) {
        self.poller.arm(&self.socket, Event::Input(self.token));
    }

    /// Queues replies, and sends what the socket takes.
    pub(super) fn send(&self, replies: &mut Replies, hub: &Hub) {
        let replies = mem::take(replies);
        let mut output = lock(&self.output);
        output.in_progress -= replies.requests;
        output.asked -= replies.asked;
        if !self.is_closed.load(Relaxed) {
            output.queue.extend(replies.chunks);
            output.bytes += replies.bytes;
        }
        drop(output);
        self.send_queue(hub);
    }
    /// The socket has room again.
    pub(super) fn has_room_to_send(&self, hub: &Hub) {
        lock(&self.output).is_blocked = false;
        self.send_queue(hub);
    }

    fn send_queue(&self, hub: &Hub) {
        let mut output = lock(&self.output);
        while !output.queue.is_empty() && !output.is_sending && !output.is_blocked {
            output.is_sending = true;
            let (mut queue, mut sent) = (mem::take(&mut output.queue), output.sent);
            drop(output);
            let result = send_some(&self.socket, &mut queue, &mut sent);
            output = lock(&self.output);
            output.is_sending = false;
            // Others may have added replies behind these.
            queue.append(&mut output.queue);
            output.queue = queue;
            output.sent = sent;
            match result {
                Ok((count, how)) => {
                    hub.counters.sent_bytes.fetch_add(count as u64, Relaxed);
                    output.bytes -= count;
                    output.offered += count;
                    if let Sent::Blocked = how {
                        output.is_blocked = true;
                        self.has_taken_enough(&mut output);
                        if self.arm_output(&mut output).is_err() {
                            // Without a descriptor it cannot be told when there is room. The peer may connect again.
                            drop(output);
                            return self.close(hub, Why::Broken);
                        }
                    }
                }
                Err(_) => {
                    drop(output);
                    return self.close(hub, Why::Broken);
                }
            }
        }
        if output.queue.is_empty() && !output.is_sending {
            output.stalls_at = None;
        }
        if output.is_input_idle && output.may_read() {
            output.is_input_idle = false;
            let stalls_at = if output.is_within_record { self.clock.stalls_at() } else { NEVER };
            self.stalls_at.store(stalls_at, Relaxed);
            self.arm_input();
        }
        drop(output);
        self.close_if_done(hub);
    }

    /// Under the lock, so that the duplicate is registered before anybody arms it again.
    fn arm_output(&self, output: &mut Output) -> io::Result<()> {
        let event = Event::Output(self.token);
        match &output.duplicate {
            Some(duplicate) => self.poller.arm(duplicate, event),
            None => {
                let duplicate = self.socket.as_fd().try_clone_to_owned()?;
                self.poller.add(&duplicate, event)?;
                output.duplicate = Some(duplicate);
            }
        }
        Ok(())
    }

    fn close_if_done(&self, hub: &Hub) {
        let output = lock(&self.output);
        let is_done = output.in_progress == 0 && output.queue.is_empty() && !output.is_sending;
        if let (Some(why), true) = (output.ended, is_done) {
            drop(output);
            self.close(hub, why);
        }
    }

    /// Closes it, for good: what is queued is dropped. Requests in progress go on without it.
    pub(super) fn close(&self, hub: &Hub, why: Why) {
        if self.is_closed.swap(true, Relaxed) {
            return;
        }
        let why = if self.has_stalled.load(Relaxed) { Why::Stalled } else { why };
        hub.counters.close(why);
        let mut output = lock(&self.output);
        let (queue, duplicate) = (mem::take(&mut output.queue), output.duplicate.take());
        drop(output);
        self.poller.remove(&self.socket);
        if let Some(duplicate) = duplicate {
            self.poller.remove(duplicate);
        }
        drop(queue);
        // The table's handle may be the last one but this thread's; the descriptor is closed with that.
        let _ = self.socket.shutdown(Shutdown::Both);
        hub.room.forget(self.token);
        hub.connections.remove(self.token);
    }
    pub(super) fn origin(&self) -> Origin {
        Origin::new(self.peer)
    }
    /// When it was last used, in requests.
    pub(super) fn used_at(&self) -> u64 {
        self.used_at.load(Relaxed)
    }
    /// Whether nothing is received, answered or sent.
    pub(super) fn is_idle(&self) -> bool {
        let is_within_record = lock(&self.input).is_within_record();
        let output = lock(&self.output);
        let is_idle = !is_within_record && output.in_progress == 0 && output.queue.is_empty() && !output.is_sending;
        is_idle && !self.is_ready(PollFlags::IN) // A request that no thread has read yet.
    }

    #[cfg(test)]
    pub(super) fn is_blocked(&self) -> bool {
        lock(&self.output).is_blocked
    }

    /// Ends it if it was too slow. Whoever reads or sends then closes it.
    pub(super) fn end_if_stalled(&self, tick: u64, hub: &Hub) {
        if !self.brings_too_little(tick) && !self.takes_too_little(tick) {
            return;
        }
        self.has_stalled.store(true, Relaxed);
        match self.socket.shutdown(Shutdown::Both) {
            Err(error) if error.kind() == ErrorKind::NotConnected => self.close(hub, Why::Stalled),
            _ => {}
        }
    }
}

impl Connection {
    /// Whether too little of a record came. If there is something to read, the threads are late, and not the peer.
    fn brings_too_little(&self, tick: u64) -> bool {
        let is_time = || tick >= self.stalls_at.load(Relaxed);
        if !is_time() {
            return false;
        }
        let _nobody_receives = lock(&self.input);
        is_time() && !self.is_ready(PollFlags::IN)
    }
    /// Whether the peer took too little of its replies. If there is room for more, the threads are late.
    fn takes_too_little(&self, tick: u64) -> bool {
        let mut output = lock(&self.output);
        if output.is_sending || output.stalls_at.is_none_or(|at| tick < at) || self.is_ready(PollFlags::OUT) {
            return false;
        }
        !self.has_taken_enough(&mut output)
    }
    /// Whether the peer took [`PROGRESS`] of what the socket had for it. Then it gets more time. The socket has room again only
    /// once a third of it is empty, which may be a megabyte.
    fn has_taken_enough(&self, output: &mut Output) -> bool {
        let unsent = unsent(self.socket.as_fd()).unwrap_or(0);
        let has_taken = output.stalls_at.is_none() || output.offered.saturating_sub(unsent) >= PROGRESS;
        if has_taken {
            (output.stalls_at, output.offered) = (Some(self.clock.stalls_at()), unsent);
        }
        has_taken
    }
    fn is_ready(&self, flags: PollFlags) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut events = [PollFd::new(&self.socket, flags)];
        // If it fails, nothing is known of the peer: it is asked again.
        poll(&mut events, Some(&now)) != Ok(0)
    }
}

impl Output {
    fn may_read(&self) -> bool {
        let is_free = self.in_progress < REQUESTS_MAX && self.bytes < REPLIES_MAX;
        is_free && self.bytes + self.asked < ASKED_MAX && self.ended.is_none()
    }
}
