//! A pair of queues with the requests that are under way in it.
//!
//! A request is in one of four places: with its caller, in the pair (a slot), in the backlog of requests to be tried
//! again, or in `done`. It leaves the middle two only as a [`Done`], so no request is lost (I1). Its buffer and lists
//! are freed, or come back, only after its completion or after the controller has stopped (I2).
use std::collections::VecDeque;
use std::mem;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Waker;
use std::time::Duration;

use crate::Error;
use crate::drive::{ATTEMPTS, Core, Counts};
use crate::memory::{Held, Want};
use crate::pair::{Completed, Pair};
use crate::request::{Done, Op, Request};
use crate::spec::{Command, FUA};

/// Where a finished request goes.
pub(crate) enum To {
    /// To the next poll of the queue, with this number.
    Poll(u64),
    /// To a future.
    Future(Arc<Mutex<Answer>>),
    /// Nowhere: its queue was dropped.
    Nobody,
}

/// What a future waits for.
#[derive(Default)]
pub(crate) struct Answer {
    pub(crate) done: Option<Done>,
    pub(crate) waker: Option<Waker>,
    /// It is in its queue's list of futures that found no room.
    pub(crate) is_waiting: bool,
}

/// A request under way.
pub(crate) struct Flight {
    request: Request,
    to: To,
    lists: Held,
    command: Command,
    pub(crate) begun: Duration,
    /// When it counts as late.
    pub(crate) due: Duration,
    pub(crate) is_aborted: bool,
    attempts: u32,
}

/// A pair of queues and its requests. One thread at a time uses it; a reset uses all of a drive.
pub(crate) struct Lane {
    pub(crate) pair: Pair<Flight>,
    backlog: VecDeque<Flight>,
    /// Requests that came back, for the next poll.
    pub(crate) done: VecDeque<Done>,
    pub(crate) counts: Counts,
    /// A [`Queue`](crate::Queue) has it.
    pub(crate) is_taken: bool,
}

impl Lane {
    pub(crate) fn new(pair: Pair<Flight>) -> Self {
        let (backlog, done, counts) = (VecDeque::new(), VecDeque::new(), Counts::default());
        Self { pair, backlog, done, counts, is_taken: false }
    }

    /// Requests under way, and finished ones whose slots an Abort still names.
    pub(crate) fn out(&self) -> usize {
        self.backlog.len() + self.pair.out()
    }
    /// Commands that a reset interrupts.
    pub(crate) fn commands(&self) -> usize {
        self.backlog.len() + self.pair.commands()
    }
    pub(crate) fn has_room(&self) -> bool {
        self.backlog.is_empty() && !self.pair.is_full()
    }

    /// Takes a request with its [`command`]. The controller sees it after [`ring`](Self::ring).
    ///
    /// # Panics
    /// If there is no room.
    pub(crate) fn take(&mut self, core: &Core, request: Request, to: To, command: Command, lists: Held) {
        let begun = core.now();
        let flight = Flight { request, to, lists, command, begun, due: begun, is_aborted: false, attempts: 0 };
        self.launch(core, flight);
    }

    fn launch(&mut self, core: &Core, mut flight: Flight) {
        flight.due = core.now().saturating_add(core.settings.timeout);
        flight.is_aborted = false;
        flight.attempts += 1;
        self.counts.commands += 1;
        self.counts.retries += u64::from(flight.attempts > 1);
        self.pair.push(flight.command, flight);
    }

    /// Puts requests of the backlog into the pair, and tells the controller of all that is new.
    pub(crate) fn ring(&mut self, core: &Core) {
        while !self.pair.is_full()
            && let Some(flight) = self.backlog.pop_front()
        {
            self.launch(core, flight);
        }
        self.pair.ring(&*core.bus, &core.doorbells);
    }

    /// Takes what has come back, and says how many requests are finished. `wakers` are called without a lock.
    pub(crate) fn reap(&mut self, core: &Core, wakers: &mut Vec<Waker>) -> Result<usize, Error> {
        let mut landed = 0;
        while let Some(Completed { what: flight, status, has_wrong_head, .. }) = self.pair.pop()? {
            if has_wrong_head {
                if self.counts.wrong_heads == 0 {
                    let id = self.pair.id();
                    let why = "goes back, or past what was queued; it is not needed, and such are only counted";
                    core.say(format!("queue {id}: the head in a completion {why}"));
                }
                self.counts.wrong_heads += 1;
            }
            if status.may_pass() && flight.attempts < ATTEMPTS {
                core.say(format!("{}: {status}; trying again", core.what(&flight.request)));
                self.backlog.push_back(flight);
            } else {
                let result = status.result(|| core.what(&flight.request));
                landed += 1;
                self.finish(core, flight, result, wakers);
            }
        }
        self.pair.thank(&*core.bus, &core.doorbells);
        Ok(landed)
    }

    /// Ends a request whose memory the controller does not use any more.
    fn finish(&mut self, core: &Core, flight: Flight, result: Result<(), Error>, wakers: &mut Vec<Waker>) {
        core.memory().unlist(flight.lists);
        let took = core.now().saturating_sub(flight.begun);
        let done = Done { tag: 0, request: flight.request, result, took };
        match flight.to {
            To::Poll(tag) => self.done.push_back(Done { tag, ..done }),
            To::Future(answer) => {
                let mut answer = answer.lock().unwrap_or_else(PoisonError::into_inner);
                answer.done = Some(done);
                wakers.extend(answer.waker.take());
            }
            To::Nobody => {}
        }
    }

    /// Moves what is out to the backlog, in the order of its submission. Only after the controller has forgotten it.
    pub(crate) fn interrupt(&mut self) {
        let mut flights = self.pair.clear();
        flights.sort_by_key(|flight| flight.begun);
        self.backlog.extend(flights);
    }

    /// Fails what was tried too often.
    pub(crate) fn give_up(&mut self, core: &Core, wakers: &mut Vec<Waker>) {
        for flight in mem::take(&mut self.backlog) {
            if flight.attempts < ATTEMPTS {
                self.backlog.push_back(flight);
            } else {
                let what = core.what(&flight.request);
                let error = Error::Silent(format!("{what}: no answer, though tried {ATTEMPTS} times"));
                self.finish(core, flight, Err(error), wakers);
            }
        }
    }

    /// Fails all that is under way. If the controller may still use its memory, the memory is never freed, and the
    /// requests come back without their buffers.
    pub(crate) fn end(&mut self, core: &Core, why: &str, is_stopped: bool, wakers: &mut Vec<Waker>) {
        if !is_stopped {
            self.pair.leak();
        }
        let out = self.pair.forget();
        for mut flight in out.into_iter().chain(mem::take(&mut self.backlog)) {
            let what = core.what(&flight.request);
            if !is_stopped {
                mem::forget((flight.request.buffer.take(), mem::replace(&mut flight.lists, Held::None)));
            }
            self.finish(core, flight, Err(Error::Stopped(format!("{what}: {why}"))), wakers);
        }
    }

    /// Its queue was dropped: nobody waits for what is under way, or has come back.
    pub(crate) fn abandon(&mut self) -> VecDeque<Done> {
        for flight in self.pair.whats_mut().chain(&mut self.backlog) {
            if matches!(flight.to, To::Poll(_)) {
                flight.to = To::Nobody;
            }
        }
        self.is_taken = false;
        mem::take(&mut self.done)
    }
}

/// The command for a request, and its lists.
pub(crate) fn command(core: &Core, request: &Request, want: Want) -> Result<(Command, Held), Error> {
    let blocks = request.count(core.namespace.block_size) as u32;
    let (command, mut held) = (Command::new(request.opcode(), core.namespace.id), Held::None);
    let short = |len| match want {
        Want::Soon => Error::Busy("no memory for the request until others have come back"),
        Want::Now => core.memory().nothing_left(len),
    };
    let command = match (request.op, &request.buffer) {
        (Op::Flush, _) => command,
        (Op::Read | Op::Write, Some(buffer)) => {
            let (prp, lists) = core.memory().list(buffer, want)?.ok_or_else(|| short(buffer.len()))?;
            held = lists;
            command.data(prp.first, prp.second).place(request.lba, blocks)
        }
        (Op::Read | Op::Write, None) => return Err(Error::Request("a request without its buffer".to_owned())),
        (Op::WriteZeroes, _) => command.place(request.lba, blocks),
        (Op::Deallocate, _) => {
            let bytes = 16 * request.ranges.len();
            let mut buffer = core.memory().buffer(bytes, bytes, want)?.ok_or_else(|| short(bytes))?;
            let ranges = request.ranges.iter().flat_map(|range| {
                let mut entry = [0; 16];
                entry[4..8].copy_from_slice(&(range.blocks as u32).to_le_bytes());
                entry[8..].copy_from_slice(&range.lba.to_le_bytes());
                entry
            });
            buffer.copy_from(&ranges.collect::<Vec<_>>());
            let (prp, _) = core.memory().list(&buffer, want)?.ok_or_else(|| short(bytes))?;
            held = Held::Ranges { _page: buffer };
            // The attribute "deallocate" (bit 2).
            command.data(prp.first, prp.second).word(10, request.ranges.len() as u32 - 1).word(11, 1 << 2)
        }
    };
    let is_durable = request.is_durable && matches!(request.op, Op::Write | Op::WriteZeroes);
    Ok((if is_durable { command.or(12, FUA) } else { command }, held))
}
