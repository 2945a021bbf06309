//! One client: its bytes become requests, requests become steps on the disk, and their results are answered.
//!
//! A connection does what it can and then says why it can't go on ([`Blocked`]). Its worker calls [`Connection::turn`]
//! again when that may have changed. How a write is received:
//! - A short write is received whole into the connection's own bytes (`stage`), and encrypted from there.
//! - For a longer write, pages are borrowed when its header has come. It is received into them, and encrypted in them
//!   as it comes.
//! - Without pages it is received in short parts through `stage`.
//!
//! A read's pages are borrowed as well. Without pages it is read and sent in parts, one after the other, through a
//! buffer that the connection has had from the start (`own`).
//!
//! Invariants: a client has at most [`MAX_ACTIVE`] requests and [`MAX_BYTES`] under way, except for a single longer
//! request (N1). Only steps on the disk have pages of the pool (W1 in `memory`). A dead connection takes nothing, and
//! frees what comes back (N2).
use std::io::IoSliceMut;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pagemill::{Advice, CachedFile};

use super::buffer::{Buffer, Origin, Stretch};
use super::cached;
use super::disk::{Done, ENTRIES, Engine, Op, Todo};
use super::outbox::Outbox;
use super::path::DataPath;
use super::requests::Flights;
use super::socket::{Moved, Socket};
use super::tally::{End, Tally};
use super::tls::TlsServer;
use crate::nbd::{Command, Config, Event, Fault, Request, Session};

#[cfg(test)]
mod tests;
mod transfer;

use transfer::extents;

/// Bytes that are received ahead.
const STAGE: usize = 64 << 10;
/// The longest write that is received whole into `stage`, and the longest part without pages.
const SHORT: usize = 32 << 10;
/// Bytes that are received after a write's, so that the next header comes with them.
const AHEAD: usize = 4096;
/// Requests of one client that may be under way.
const MAX_ACTIVE: usize = 128;
/// Their bytes.
const MAX_BYTES: usize = 8 << 20;
/// Unsent answers above which no more requests of a client are handled.
const MAX_UNSENT: usize = 256 << 10;
/// Bytes that are handled for one client before others have their turn. A megabyte would delay them by as long as it takes
/// to receive, encrypt and write it; a smaller turn is no faster for them (ADR 21).
const TURN: usize = 256 << 10;
/// The least cost, in bytes of a turn, of a request that waits for the disk before it is answered, or that asks the
/// disk for many extents.
const CALL: usize = 256 << 10;
/// The least cost of any other step on the disk, which takes as long as so many bytes do.
const STEP: usize = 32 << 10;
/// The most extents in an answer.
const MAX_EXTENTS: usize = 256;
/// While the server stops: how long a client must be silent before its connection ends, and how long it may then take
/// to close.
const LINGER: Duration = Duration::from_secs(1);
/// A client that moves fewer bytes in the time limit has stalled.
const CRAWL: usize = 64 << 10;

/// How long clients may take.
#[derive(Clone, Copy, Debug)]
pub struct TimeLimits {
    /// For all of the negotiation.
    pub handshake: Duration,
    /// For 64 KiB, or the rest, of a message that has begun, or of an answer. Without this limit a client may pause for
    /// as long as it likes; the memory that it holds is bounded.
    pub stall: Option<Duration>,
    /// For the requests that were begun when the server was told to stop.
    pub stop: Duration,
}

/// What a turn uses.
pub(super) struct Context<'w> {
    pub(super) path: &'w DataPath,
    /// The plain pages of that volume, if the server keeps any.
    pub(super) cache: Option<&'w CachedFile>,
    pub(super) tls: Option<&'w TlsServer>,
    /// Steps of this worker on the disks of other volumes.
    pub(super) elsewhere: usize,
    pub(super) engine: &'w mut Engine,
    pub(super) now: Instant,
    /// No other connection of this worker waits for the pool before this one.
    pub(super) may_take: bool,
    /// Trims make holes.
    pub(super) may_discard: bool,
}

/// Why a connection can't go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Blocked {
    /// It waits for the client to send something.
    Input,
    /// It waits for the client to receive something.
    Output,
    /// It waits for the disk.
    Disk,
    /// It waits for pages of the pool.
    Memory,
    /// Its turn is over.
    Turn,
    /// There is nothing more to do.
    Over,
}

/// The request that is being received, or that has more steps than are begun at once.
enum Current {
    Write { request: Request, flight: usize, done: usize, part: Option<Part> },
    Zeroes { request: Request, flight: usize, done: usize },
    SlowRead { request: Request, done: usize },
}

/// A part of a write that is being received.
struct Part {
    buffer: Buffer,
    got: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    Open,
    /// The server stops: requests that were begun are finished, and later requests and options are refused, until the
    /// client closes or is silent.
    Draining,
    /// The client disconnected, broke the protocol or ended its side: requests that were begun are finished.
    Closing,
    /// All answers are sent; the client may close first.
    Lingering,
    Dead,
}

pub(super) struct Connection {
    number: usize,
    socket: Socket,
    session: Session,
    /// The number of its volume; until it has chosen one, the first.
    volume: usize,
    /// This client's access to the plain pages of its volume, from its first request on.
    cached: Option<CachedFile>,
    /// TLS begins when all answers so far are sent.
    starts_tls: bool,
    stage: Stretch,
    /// The received bytes of `stage` that are not handled yet.
    start: usize,
    end: usize,
    current: Option<Current>,
    flights: Flights,
    /// Steps on the disk.
    steps: usize,
    bytes: usize,
    turn_left: usize,
    outbox: Outbox,
    own: Option<Buffer>,
    life: Life,
    blocked: Blocked,
    /// What it did, and why it ends.
    pub(super) tally: Tally,
    /// When it began to wait for the pool.
    stalled: Option<Instant>,
    born: Instant,
    heard: Clock,
    spoken: Clock,
}

/// Since when this side waits for the client, and the bytes that it moved since.
struct Clock {
    since: Instant,
    bytes: usize,
}

impl Clock {
    fn moved(&mut self, bytes: usize, now: Instant) {
        self.bytes += bytes;
        if self.bytes >= CRAWL {
            self.restart(now);
        }
    }
    fn restart(&mut self, now: Instant) {
        (self.since, self.bytes) = (now, 0);
    }
}

impl Connection {
    /// A new client; `None` if there is no memory for it.
    pub(super) fn new(number: usize, socket: Socket, config: Arc<Config>, now: Instant) -> Option<Self> {
        let mut outbox = Outbox::default();
        let session = outbox.write(|out| Session::new(config, out));
        Some(Self {
            number,
            socket,
            session,
            volume: 0,
            cached: None,
            starts_tls: false,
            stage: Stretch::new(STAGE)?,
            start: 0,
            end: 0,
            current: None,
            flights: Flights::default(),
            steps: 0,
            bytes: 0,
            turn_left: 0,
            outbox,
            own: Some(Buffer::of_heap(SHORT, Origin::Connection)?),
            life: Life::Open,
            blocked: Blocked::Input,
            tally: Tally::default(),
            stalled: None,
            born: now,
            heard: Clock { since: now, bytes: 0 },
            spoken: Clock { since: now, bytes: 0 },
        })
    }

    pub(super) fn socket(&self) -> &Socket {
        &self.socket
    }
    /// The volume that its turns are for.
    pub(super) fn volume(&self) -> usize {
        self.volume
    }
    pub(super) fn is_dead(&self) -> bool {
        self.life == Life::Dead
    }
    /// Steps on the disk that have not come back.
    pub(super) fn steps(&self) -> usize {
        self.steps
    }
    /// Whether it waits for the pool.
    pub(super) fn is_stalled(&self) -> bool {
        self.blocked == Blocked::Memory && !self.is_dead()
    }
    /// Whether it can go on without an event.
    pub(super) fn is_ready(&self) -> bool {
        let may_go_on = self.blocked == Blocked::Turn
            || (self.blocked == Blocked::Output && self.outbox.len() == 0)
            || (self.wants_input() && self.socket.has_received());
        may_go_on && !self.is_dead()
    }
    pub(super) fn wants_input(&self) -> bool {
        match self.life {
            Life::Open => self.blocked == Blocked::Input,
            Life::Draining => self.blocked == Blocked::Input,
            Life::Lingering => true,
            Life::Closing | Life::Dead => false,
        }
    }
    pub(super) fn wants_output(&self) -> bool {
        self.outbox.len() > 0 || self.socket.has_unsent()
    }

    /// Does what it can now.
    pub(super) fn turn(&mut self, context: &mut Context<'_>) {
        self.turn_left = TURN;
        loop {
            self.blocked = self.work(context);
            // Before it answers: one call then sends the answers to all that has come.
            if self.turn_left > 0 && self.wants_input() && self.receive(context) {
                continue;
            }
            let has_sent = self.send(context);
            if self.is_dead() || self.blocked != Blocked::Output || !has_sent || self.turn_left == 0 {
                break;
            }
        }
        if self.life == Life::Draining && self.blocked == Blocked::Input && self.turn_left == 0 {
            // There may be more received bytes.
            self.blocked = Blocked::Turn;
        }
        self.finish_if_over(context.path);
        if !self.owes() {
            self.heard.restart(context.now);
        }
    }

    /// Whether the client is in the middle of a message.
    fn owes(&self) -> bool {
        self.session.owes_bytes() || matches!(self.current, Some(Current::Write { .. }))
    }

    /// Receives once. False if there is nothing to receive.
    fn receive(&mut self, context: &Context<'_>) -> bool {
        if self.life == Life::Lingering {
            return self.discard(context);
        }
        // Handled bytes are zeroed, and what moves to the front stands there alone (B1).
        if self.start == self.end || self.end > STAGE / 2 {
            let left = self.end - self.start;
            self.stage.copy_within(self.start..self.end, 0);
            self.stage[left..self.end].fill(0);
            (self.start, self.end) = (0, left);
        }
        let mut vector: Vec<IoSliceMut<'_>> = Vec::new();
        let mut wanted = 0;
        let mut room = STAGE - self.end;
        if let Some(Current::Write { part: Some(part), .. }) = &mut self.current {
            wanted = part.buffer.len() - part.got;
            part.buffer.window_mut(part.got, ENTRIES - 1, &mut vector);
            room = room.min(AHEAD);
        }
        // The vector may be too short for the whole part; then nothing may follow it.
        if vector.iter().map(|slice| slice.len()).sum::<usize>() == wanted {
            vector.push(IoSliceMut::new(&mut self.stage[self.end..self.end + room]));
        }
        match self.socket.receive(&mut vector) {
            Moved::Bytes(count) => {
                let into_part = count.min(wanted);
                if let Some(Current::Write { part: Some(part), .. }) = &mut self.current {
                    part.got += into_part;
                }
                self.end += count - into_part;
                self.turn_left = self.turn_left.saturating_sub(count);
                self.heard.moved(count, context.now);
                true
            }
            Moved::NotNow => false,
            Moved::Ended => {
                self.close(context.path);
                false
            }
        }
    }

    /// Receives and drops bytes.
    fn discard(&mut self, context: &Context<'_>) -> bool {
        match self.socket.receive(&mut [IoSliceMut::new(&mut self.stage)]) {
            Moved::Bytes(count) => self.turn_left = self.turn_left.saturating_sub(count),
            Moved::NotNow => return false,
            Moved::Ended => self.die(context.path),
        }
        self.turn_left > 0
    }

    /// Sends as much as the client takes. True if it sent something.
    fn send(&mut self, context: &Context<'_>) -> bool {
        if !self.wants_output() || self.is_dead() {
            return false;
        }
        if self.outbox.len() == 0 {
            if self.socket.flush() == Moved::Ended {
                self.die(context.path);
            }
            return false;
        }
        match self.outbox.send(&mut self.socket, &context.path.memory, &mut self.own) {
            Moved::Bytes(count) => {
                self.spoken.moved(count, context.now);
                if self.outbox.len() == 0 {
                    self.spoken.restart(context.now);
                }
                return true;
            }
            Moved::NotNow => {}
            Moved::Ended => self.die(context.path),
        }
        false
    }

    /// Handles the received bytes, as far as it can.
    fn work(&mut self, context: &mut Context<'_>) -> Blocked {
        loop {
            if self.is_dead() || self.life == Life::Lingering {
                return Blocked::Over;
            }
            if self.outbox.len() > MAX_UNSENT {
                return Blocked::Output;
            }
            let blocked = match self.current.take() {
                None => None,
                Some(Current::Write { request, flight, done, part }) => {
                    self.go_on_writing(request, flight, done, part, context)
                }
                Some(Current::Zeroes { request, flight, done }) => self.go_on_zeroing(request, flight, done, context),
                Some(Current::SlowRead { request, done }) => self.go_on_reading(request, done, context),
            };
            if let Some(blocked) = blocked {
                return blocked;
            }
            if self.current.is_some() {
                continue;
            }
            if self.life == Life::Closing {
                return Blocked::Over;
            }
            if self.flights.count() >= MAX_ACTIVE || self.bytes >= MAX_BYTES {
                return Blocked::Disk;
            }
            if self.starts_tls {
                if self.outbox.len() > 0 {
                    return Blocked::Output;
                }
                self.begin_tls(context.tls);
                continue;
            }
            if self.start == self.end {
                return Blocked::Input;
            }
            if self.turn_left == 0 {
                return Blocked::Turn;
            }
            let Self { session, stage, start, end, outbox, .. } = self;
            let had_chosen = session.export_number().is_some();
            let (taken, event) = outbox.write(|out| session.feed(&stage[*start..*end], out));
            self.start += taken;
            if let Some(name) = session.take_unknown() {
                self.tally.misses(&name);
            }
            if !had_chosen && let Some(export) = session.export() {
                self.tally.chose(&export.name, session.has_several());
            }
            // What follows needs a turn for the volume that was chosen, and so do steps after the session's end.
            if let Some(volume) = self.session.export_number()
                && std::mem::replace(&mut self.volume, volume) != volume
            {
                return Blocked::Turn;
            }
            match event {
                Event::Continue => {}
                Event::Request(request) if self.life == Life::Draining => {
                    let Self { session, outbox, .. } = self;
                    outbox.write(|out| session.refuse(&request, Fault::ShuttingDown, out));
                }
                Event::Request(request) => self.begin(request, context),
                // The bytes after it are unencrypted, and come from an attacker in between: a client waits for the
                // answer.
                Event::StartTls if self.start < self.end => {
                    self.tally.ends(End::Violation("bytes follow STARTTLS before it is answered"));
                    self.life = Life::Closing;
                }
                Event::StartTls => self.starts_tls = true,
                Event::Violation(how) => {
                    self.tally.ends(End::Violation(how));
                    self.life = Life::Closing;
                }
                Event::Goodbye => {
                    self.tally.ends(End::Goodbye);
                    self.life = Life::Closing;
                }
            }
        }
    }

    /// Starts TLS. The answer to STARTTLS is sent, and nothing has come since.
    fn begin_tls(&mut self, tls: Option<&TlsServer>) {
        let Some(tls) = tls else { unreachable!("a session offers TLS and its server has none") };
        self.starts_tls = false;
        match self.socket.start_tls(tls) {
            true => self.session.tls_started(),
            false => {
                self.tally.ends(End::Tls("there is no memory for it".to_owned()));
                self.life = Life::Closing;
            }
        }
    }

    fn begin(&mut self, request: Request, context: &mut Context<'_>) {
        if self.cached.is_none() {
            self.cached = context.cache.map(CachedFile::reopen);
        }
        let in_file = context.path.in_file(request.at);
        self.tally.asked(&request);
        if matches!(request.command, Command::Trim | Command::BlockStatus { .. }) {
            self.turn_left = self.turn_left.saturating_sub(CALL);
        }
        match request.command {
            Command::Read => self.begin_reading(request, context),
            Command::Write => {
                let flight = self.flights.open(request, 0, false);
                self.current = Some(Current::Write { request, flight, done: 0, part: None });
            }
            Command::WriteZeroes => {
                let flight = self.flights.open(request, 0, false);
                self.current = Some(Current::Zeroes { request, flight, done: 0 });
            }
            Command::Flush => {
                let flight = self.flights.open(request, 1, true);
                self.submit(Todo::Sync, 0, Buffer::none(), flight, context);
            }
            Command::Trim if context.may_discard => {
                let flight = self.flights.open(request, 1, true);
                self.submit(Todo::Punch { len: u64::from(request.len) }, in_file, Buffer::none(), flight, context);
            }
            // Holes would show which parts are in use, so they need the user's permission. The protocol allows ignoring
            // a trim.
            Command::Trim => {
                self.tally.answered(&request, None, Duration::ZERO);
                let replies = self.session.replies();
                self.outbox.write(|out| replies.done(request.cookie, out));
            }
            Command::Cache => {
                self.will_need(&request, context.path);
                let replies = self.session.replies();
                self.outbox.write(|out| replies.done(request.cookie, out));
            }
            Command::BlockStatus { .. } => {
                let (replies, began) = (self.session.replies(), Instant::now());
                let block = self.session.export().map_or(1, |export| export.min_block);
                let extents = extents(context.path, &request, u64::from(block));
                self.tally.answered(&request, extents.as_ref().err().map(|_| Fault::Io), began.elapsed());
                self.outbox.write(|out| match extents {
                    Ok(extents) => replies.block_status(&request, &extents, out),
                    Err(_) => replies.error(request.cookie, Fault::Io, out),
                });
            }
        }
    }

    /// Reads what a client will read soon into the cache, at most the bytes of a turn: other clients wait meanwhile.
    /// Without a cache the system is told, which reads in the background.
    fn will_need(&mut self, request: &Request, path: &DataPath) {
        let bytes = request.at..request.at + u64::from(request.len).min(TURN as u64);
        self.turn_left = self.turn_left.saturating_sub(CALL);
        match &self.cached {
            Some(file) => {
                self.turn_left = self.turn_left.saturating_sub((bytes.end - bytes.start) as usize);
                file.advise(Advice::WillNeed, bytes);
            }
            None => path.disk.will_need(path.in_file(bytes.start)..path.in_file(bytes.end)),
        }
    }

    /// Gives a step to the disk. A step that is done at once is completed at once.
    fn submit(&mut self, todo: Todo, at: u64, buffer: Buffer, flight: usize, context: &mut Context<'_>) {
        self.steps += 1;
        self.bytes += buffer.len();
        let least = if todo == Todo::Sync { CALL } else { STEP };
        self.turn_left = self.turn_left.saturating_sub(buffer.len().max(least));
        let mut op = Op::new(todo, at, buffer, (self.number, flight));
        assert!(todo != Todo::Write || op.buffer.clean() == op.buffer.len(), "plain bytes for the disk");
        if let Some(file) = self.cached.as_ref().filter(|_| todo == Todo::Read)
            && cached::read(file, at - context.path.in_file(0), &mut op.buffer).is_ok()
        {
            op.is_plain = true;
            return self.complete((op, Ok(())), context);
        }
        // Without a cache, and where it has no memory or cannot read: the disk says why.
        if let Some(done) = context.engine.submit(context.path, op) {
            self.complete(done, context);
        }
    }

    /// Completes a finished step.
    pub(super) fn complete(&mut self, (op, result): Done, context: &mut Context<'_>) {
        self.steps -= 1;
        self.bytes -= op.buffer.len();
        let path = context.path;
        if let Some(file) = &self.cached {
            // K1: before anything is answered, whether it went well or not.
            let at = op.at.wrapping_sub(path.in_file(0));
            match op.todo {
                Todo::Write => cached::forget(file, at..at + op.buffer.len() as u64),
                Todo::Punch { len } => cached::forget(file, at..at + len),
                Todo::Read | Todo::Sync => {}
            }
        }
        if self.is_dead() {
            return path.memory.give_back(op.buffer);
        }
        if op.buffer.origin == Origin::Connection {
            return self.slow_part_done(op, result, path);
        }
        let number = op.tag.1;
        self.flights.step_done(number, op, result, path);
        self.answer_if_done(number, context);
    }

    /// Answers a request whose steps are done. A durable write needs one more step after all others.
    fn answer_if_done(&mut self, number: usize, context: &mut Context<'_>) {
        if self.flights.begin_sync(number) {
            return self.submit(Todo::Sync, 0, Buffer::none(), number, context);
        }
        let Some(flight) = self.flights.take_done(number) else { return };
        let (replies, request) = (self.session.replies(), flight.request);
        self.tally.answered(&request, flight.fault, flight.began.elapsed());
        match (flight.fault, request.command) {
            (Some(fault), _) => self.outbox.write(|out| replies.error(request.cookie, fault, out)),
            (None, Command::Read) => {
                self.outbox.write(|out| replies.before_data(&request, out));
                flight.parts.into_iter().flatten().for_each(|part| self.outbox.data(part));
            }
            _ => self.outbox.write(|out| replies.done(request.cookie, out)),
        }
    }

    /// Called when the server stops.
    pub(super) fn drain(&mut self, now: Instant) {
        if self.life == Life::Open {
            self.life = Life::Draining;
            self.session.shut_down();
            self.heard.restart(now);
        }
    }

    /// Called when the client sends no more.
    fn close(&mut self, path: &DataPath) {
        if matches!(self.life, Life::Open | Life::Draining) {
            self.tally.ends(self.socket.tls_failure().map_or(End::Closed, End::Tls));
            self.life = Life::Closing;
            // The rest of an unfinished write will not come.
            let write = self.current.take_if(|current| matches!(current, Current::Write { .. }));
            if let Some(Current::Write { flight, part, .. }) = write {
                self.flights.abandon(flight);
                part.into_iter().for_each(|part| path.memory.give_back(part.buffer));
            }
        }
    }

    /// Whether nothing is under way.
    fn is_idle(&self) -> bool {
        self.steps == 0 && !self.wants_output() && self.current.is_none() && self.flights.count() == 0
    }

    fn finish_if_over(&mut self, path: &DataPath) {
        if self.life == Life::Closing && self.is_idle() {
            self.socket.end_sending();
            self.die(path);
        }
    }

    /// Ends the sending side, and waits for the client to close.
    fn linger(&mut self, now: Instant) {
        self.tally.ends(End::Stopped);
        self.socket.end_sending();
        self.life = Life::Lingering;
        self.heard.restart(now);
    }

    /// Ends it at once.
    pub(super) fn die(&mut self, path: &DataPath) {
        self.tally.ends(self.socket.tls_failure().map_or(End::Closed, End::Tls));
        self.life = Life::Dead;
        self.blocked = Blocked::Over;
        self.outbox.clear(&path.memory, &mut self.own);
        self.flights.clear(&path.memory);
        if let Some(Current::Write { part: Some(part), .. }) = self.current.take() {
            path.memory.give_back(part.buffer);
        }
    }

    /// Ends it if the client has exceeded a time limit.
    pub(super) fn check(&mut self, limits: &TimeLimits, path: &DataPath, now: Instant) {
        // All is answered, and no message has begun: the client has to send the next request or close.
        let is_silent = self.life == Life::Draining && self.wants_input() && self.is_idle() && !self.owes();
        if (!self.owes() || !self.wants_input()) && self.life != Life::Lingering && !is_silent {
            self.heard.restart(now);
        }
        if !self.wants_output() {
            self.spoken.restart(now);
        }
        let negotiates = self.life == Life::Open && self.session.export().is_none();
        let negotiates_for = if negotiates { now - self.born } else { Duration::ZERO };
        // A client that negotiates while the server stops has the same time to go on as others have to close.
        let is_mute = self.life == Life::Draining && self.session.refuses_options();
        let is_over = now - self.heard.since > limits.stop.min(LINGER);
        if is_silent && is_over {
            return self.linger(now);
        }
        let lingers = (self.life == Life::Lingering || is_mute) && is_over;
        let stalls = |stall| now - self.heard.since > stall || now - self.spoken.since > stall;
        let is_late = negotiates_for > limits.handshake || limits.stall.is_some_and(stalls);
        if (is_late || lingers) && !self.is_dead() {
            self.tally.ends(match () {
                () if lingers => End::Stopped,
                () if negotiates_for > limits.handshake => End::Handshake,
                () => End::Stalled,
            });
            if is_mute {
                self.socket.end_sending();
            }
            self.die(path);
        }
    }
}
