//! A drive under load: requests are submitted, and come back finished or with an error.
//!
//! A request is in one of three places: with its caller, in a queue (`Queue::slots`), or in the backlog of requests to
//! be tried again. It leaves the last two only as a [`Done`], so no request is lost (I1). A request that a reset
//! interrupts is tried again, which is allowed for reads and writes of whole blocks. After [`ATTEMPTS`] it fails.
//!
//! A command that takes too long is aborted; other commands go on meanwhile. The controller is reset, and its queues
//! are made again, if the command or the Abort has not come back after the same time again, if the controller reports a
//! failure, or if somebody else has reset it. Each queue knows its oldest command, so looking for late commands takes
//! constant time.
//!
//! One thread drives all queues, so a reset needs no coordination.
use std::collections::VecDeque;
use std::mem;
use std::time::Duration;

use crate::bus::Bus;
use crate::controller::{Controller, Health};
use crate::identify::{ControllerInfo, NamespaceInfo};
use crate::memory::{Buffer, Held, Want};
use crate::queue::{Completed, Queue};
use crate::spec::{Command, io};
use crate::{Error, Status};

/// Blocks that one command can name.
const MOST_BLOCKS: u64 = 1 << 16;
/// Bytes of the largest command if the drive has no limit.
const MOST_BYTES: u64 = 4 << 20;
/// How often a request is tried.
const ATTEMPTS: u32 = 4;
/// The longest sleep before the clock is checked.
const NAP: Duration = Duration::from_millis(100);

/// An operation of a drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    Read,
    Write,
    /// Puts written data on the medium.
    Flush,
}

/// A request: whole blocks from `lba`, and the memory for them.
pub(crate) struct Request {
    pub(crate) op: Op,
    pub(crate) lba: u64,
    /// The memory for the data; `None` for a flush.
    pub(crate) buffer: Option<Buffer>,
}

/// A request that has come back.
pub(crate) struct Done {
    pub(crate) request: Request,
    /// How it ended.
    pub(crate) status: Status,
    /// Whether the controller never answered.
    pub(crate) is_silent: bool,
    /// The time since it was submitted.
    pub(crate) took: Duration,
}

/// A request under way.
struct Flight {
    request: Request,
    lists: Held,
    command: Command,
    begun: Duration,
    /// When it counts as late.
    due: Duration,
    is_aborted: bool,
    attempts: u32,
}

/// The settings of a drive.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    /// Pairs of queues.
    pub(crate) queues: u16,
    /// Requests in each at a time.
    pub(crate) depth: u16,
    /// How long a command may take.
    pub(crate) timeout: Duration,
    /// The namespace's number.
    pub(crate) namespace: u32,
    /// The controller is reset after each so many finished requests, to test that nothing is lost.
    pub(crate) reset_every: Option<u64>,
}

/// Counts of what happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub(crate) struct Counts {
    pub(crate) commands: u64,
    pub(crate) retries: u64,
    pub(crate) aborts: u64,
    pub(crate) resets: u64,
    /// Completions with an impossible head of the submission queue. Nothing depends on the head.
    pub(crate) wrong_heads: u64,
}

/// A namespace of a controller that has its queues.
pub(crate) struct Drive<B: Bus> {
    controller: Controller<B>,
    queues: Vec<Queue<Flight>>,
    /// Requests to be tried again.
    backlog: VecDeque<Flight>,
    settings: Settings,
    info: ControllerInfo,
    namespace: NamespaceInfo,
    counts: Counts,
    until_reset: u64,
    /// When the controller's health is checked next, if nothing comes back.
    next_look: Duration,
    /// The queue for the next request.
    turn: usize,
    /// Messages for the user, a line each.
    said: Vec<String>,
}

impl<B: Bus> Drive<B> {
    /// Starts the controller and gives it its queues.
    pub(crate) fn start(mut controller: Controller<B>, settings: Settings) -> Result<Self, Error> {
        controller.start()?;
        let info = controller.info()?;
        let id = settings.namespace;
        let namespace = controller.namespace(id)?.ok_or_else(|| {
            Error::Request(format!("there is no namespace {id}: `pagemill nvme identify` lists those there are"))
        })?;
        namespace.check_plain(&info)?;
        let most = controller.longest_queue() - 1;
        if settings.depth > most {
            let why = format!("a depth of {}: this controller's queues hold {most}", settings.depth);
            return Err(Error::Request(why));
        }
        let queues = (1..=settings.queues).map(|id| Queue::new(&controller.memory, id, settings.depth + 1));
        let mut drive = Self {
            queues: queues.collect::<Result<_, _>>()?,
            controller,
            backlog: VecDeque::new(),
            settings,
            info,
            namespace,
            counts: Counts::default(),
            until_reset: settings.reset_every.unwrap_or(u64::MAX),
            next_look: Duration::ZERO,
            turn: 0,
            said: Vec::new(),
        };
        drive.make_queues()?;
        Ok(drive)
    }

    fn make_queues(&mut self) -> Result<(), Error> {
        let wanted = self.settings.queues;
        let granted = self.controller.grant(wanted)?.min(self.controller.doorbells());
        if granted < wanted {
            return Err(Error::Request(format!("{wanted} queues: this controller grants {granted}")));
        }
        let vectors = self.controller.bus.vectors();
        for queue in &self.queues {
            // The admin queue has the first, and the others share them all.
            let vector = (vectors > 0).then(|| queue.id() % vectors);
            self.controller.create(queue, vector)?;
        }
        Ok(())
    }

    pub(crate) fn info(&self) -> &ControllerInfo {
        &self.info
    }
    pub(crate) fn namespace(&self) -> &NamespaceInfo {
        &self.namespace
    }
    pub(crate) fn counts(&self) -> Counts {
        self.counts
    }
    /// The messages since the last call.
    pub(crate) fn said(&mut self) -> Vec<String> {
        mem::take(&mut self.said)
    }
    pub(crate) fn now(&self) -> Duration {
        self.controller.bus.now()
    }
    pub(crate) fn pools(&self) -> String {
        self.controller.memory.pools()
    }
    #[cfg(test)]
    pub(crate) fn bus(&self) -> &B {
        &self.controller.bus
    }

    /// Bytes that one command may move.
    pub(crate) fn max_transfer(&self) -> usize {
        let by_blocks = MOST_BLOCKS * u64::from(self.namespace.block_size);
        // At least one block: `check_plain` has checked that.
        self.info.max_transfer.unwrap_or(MOST_BYTES).min(by_blocks).min(1 << 30) as usize
    }

    /// Requests under way, and finished ones whose slots an Abort still names.
    pub(crate) fn out(&self) -> usize {
        self.backlog.len() + self.queues.iter().map(Queue::out).sum::<usize>()
    }
    /// Whether another request can be submitted.
    pub(crate) fn has_room(&self) -> bool {
        self.backlog.is_empty() && self.queues.iter().any(|queue| !queue.is_full())
    }

    fn want(&self) -> Want {
        if self.out() > 0 { Want::Soon } else { Want::Now }
    }

    /// Memory for `len` bytes, or fewer. `None` if there is no memory until other requests come back.
    pub(crate) fn buffer(&self, len: usize) -> Result<Option<Buffer>, Error> {
        let (unit, want) = (self.namespace.block_size as usize, self.want());
        match self.controller.memory.buffer(len, unit, want)? {
            None if want == Want::Now => Err(self.controller.memory.nothing_left(len)),
            buffer => Ok(buffer),
        }
    }

    /// Submits a request; the controller sees it after [`ring`](Self::ring). It is returned if there is no memory for
    /// its lists until other requests come back.
    ///
    /// # Panics
    /// If there is no room.
    pub(crate) fn submit(&mut self, request: Request) -> Result<Option<Request>, Error> {
        let (mut command, mut lists) = (Command::new(opcode(request.op), self.namespace.id), Held::None);
        if let Some(buffer) = &request.buffer {
            let want = self.want();
            let Some((prp, held)) = self.controller.memory.list(buffer, want)? else {
                return match want {
                    Want::Soon => Ok(Some(request)),
                    Want::Now => Err(self.controller.memory.nothing_left(buffer.len())),
                };
            };
            let blocks = (buffer.len() / self.namespace.block_size as usize) as u32;
            command = command.data(prp.first, prp.second).place(request.lba, blocks);
            lists = held;
        }
        let begun = self.now();
        self.launch(Flight { request, lists, command, begun, due: Duration::ZERO, is_aborted: false, attempts: 0 });
        Ok(None)
    }

    fn launch(&mut self, mut flight: Flight) {
        let count = self.queues.len();
        let at = (0..count).map(|nth| (self.turn + nth) % count).find(|&at| !self.queues[at].is_full());
        let at = at.expect("a request is handed in where there is room");
        self.turn = (at + 1) % count;
        flight.due = self.now() + self.settings.timeout;
        flight.is_aborted = false;
        flight.attempts += 1;
        self.counts.commands += 1;
        self.counts.retries += u64::from(flight.attempts > 1);
        self.queues[at].push(flight.command, flight);
    }

    /// Tells the controller about submitted requests.
    pub(crate) fn ring(&mut self) {
        let stride = self.controller.stride();
        self.queues.iter_mut().for_each(|queue| queue.ring(&self.controller.bus, stride));
    }

    /// Adds the requests that have come back to `done`. If there are none, it waits, but not for long, since the caller
    /// checks for signals.
    pub(crate) fn wait(&mut self, done: &mut Vec<Done>) -> Result<(), Error> {
        self.relaunch();
        self.ring();
        if self.until_reset == 0 {
            self.until_reset = self.settings.reset_every.unwrap_or(u64::MAX);
            // An answer shows that it has fetched all commands. QEMU (7.2) would continue to fetch from queues that a
            // reset has just freed, and crash.
            self.controller.info()?;
            self.restart("a reset was asked for")?;
        }
        let before = done.len();
        self.reap(done)?;
        if done.len() == before && self.out() > 0 {
            if self.controller.bus.vectors() > 0 {
                let next = self.soonest().saturating_sub(self.now());
                self.controller.bus.wait(next.clamp(Duration::from_millis(1), NAP))?;
                self.reap(done)?;
            } else {
                std::hint::spin_loop();
            }
            if done.len() == before
                && let Some(why) = self.look_at_health()?
            {
                return self.restart_and_count(why, done);
            }
        }
        // Also if requests have come back: a lost command has to be found while others go on.
        self.look_at_the_clock(done)
    }

    fn reap(&mut self, done: &mut Vec<Done>) -> Result<(), Error> {
        for (queue, id) in self.controller.answered()? {
            self.queues[usize::from(queue) - 1].release(id);
        }
        let stride = self.controller.stride();
        for at in 0..self.queues.len() {
            while let Some(Completed { what, status, has_wrong_head, .. }) = self.queues[at].pop()? {
                if has_wrong_head && self.counts.wrong_heads == 0 {
                    let id = self.queues[at].id();
                    let why = "goes back, or past what was queued; it is not needed, and such are only counted";
                    self.said.push(format!("queue {id}: the head in a completion {why}"));
                }
                self.counts.wrong_heads += u64::from(has_wrong_head);
                self.land(what, status, done);
            }
            self.queues[at].thank(&self.controller.bus, stride);
        }
        Ok(())
    }

    /// Handles a finished command. Its request is finished too, unless it may be tried again.
    fn land(&mut self, flight: Flight, status: Status, done: &mut Vec<Done>) {
        if status.may_pass() && flight.attempts < ATTEMPTS {
            self.said.push(format!("{}: {status}; trying again", self.place_of(&flight.request)));
            self.backlog.push_back(flight);
        } else {
            self.finish(flight, status, false, done);
        }
    }

    fn finish(&mut self, flight: Flight, status: Status, is_silent: bool, done: &mut Vec<Done>) {
        self.controller.memory.unlist(flight.lists);
        let took = self.now().saturating_sub(flight.begun);
        // Counts finished requests. Counting submitted ones could reset it for ever without progress.
        self.until_reset = self.until_reset.saturating_sub(1);
        done.push(Done { request: flight.request, status, is_silent, took });
    }

    fn relaunch(&mut self) {
        while self.queues.iter().any(|queue| !queue.is_full())
            && let Some(flight) = self.backlog.pop_front()
        {
            self.launch(flight);
        }
    }

    /// When the next command will be late.
    fn soonest(&mut self) -> Duration {
        let dues = self.queues.iter_mut().filter_map(|queue| Some(queue.oldest()?.1.due));
        dues.min().unwrap_or(Duration::MAX)
    }

    /// Why the controller has to be reset, by its own report, which is checked at intervals.
    fn look_at_health(&mut self) -> Result<Option<&'static str>, Error> {
        let now = self.now();
        if self.next_look > now {
            return Ok(None);
        }
        self.next_look = now + NAP;
        let health = self.controller.health()?;
        Ok((health != Health::Well).then(|| health.said()))
    }

    /// Has commands aborted that take too long. All are given the same time, so each queue's oldest is its first to be due.
    fn look_at_the_clock(&mut self, done: &mut Vec<Done>) -> Result<(), Error> {
        let (now, timeout) = (self.now(), self.settings.timeout);
        if self.controller.aborting_since().is_some_and(|since| now.saturating_sub(since) >= timeout) {
            let why = format!("no answer to an Abort within {} s", timeout.as_secs_f64());
            return self.restart_and_count(&why, done);
        }
        for queue in &mut self.queues {
            let id = queue.id();
            while let Some((command, flight)) = queue.oldest()
                && flight.due <= now
            {
                if flight.is_aborted {
                    return self.restart_and_count("a command came back neither by itself nor by an Abort", done);
                }
                // With as many Aborts out as the controller takes, this one's turn comes when another is answered.
                if !self.controller.abort(id, command, self.info.aborts) {
                    break;
                }
                flight.is_aborted = true;
                flight.due = now + timeout;
                queue.keep(command);
                self.counts.aborts += 1;
                let seconds = timeout.as_secs_f64();
                self.said.push(format!("command {command} of queue {id} took longer than {seconds} s: aborting it"));
            }
        }
        Ok(())
    }

    /// A reset because of what happened: what was tried too often has failed.
    fn restart_and_count(&mut self, why: &str, done: &mut Vec<Done>) -> Result<(), Error> {
        self.restart(why)?;
        for flight in mem::take(&mut self.backlog) {
            if flight.attempts < ATTEMPTS {
                self.backlog.push_back(flight);
            } else {
                self.finish(flight, Status::OK, true, done);
            }
        }
        Ok(())
    }

    /// Resets the controller. What was out is to be tried again.
    fn restart(&mut self, why: &str) -> Result<(), Error> {
        let out = self.backlog.len() + self.queues.iter().map(Queue::commands).sum::<usize>();
        self.said.push(format!("{why}: resetting the controller, with {out} requests to be tried again"));
        self.counts.resets += 1;
        // From here on it has forgotten what was out; until then what was out is in the queues.
        self.controller.start()?;
        for queue in &mut self.queues {
            let mut flights = queue.clear();
            flights.sort_by_key(|flight| flight.begun);
            self.backlog.extend(flights);
        }
        // What is tried again was cut for the blocks that there were: with larger ones the drive would go past its lists.
        let (info, namespace) = (self.controller.info()?, self.controller.namespace(self.namespace.id)?);
        let is_same = info.serial == self.info.serial && info.max_transfer == self.info.max_transfer;
        if !is_same || namespace != Some(self.namespace) {
            return Err(Error::Broken("the drive is another one since the reset".to_owned()));
        }
        self.make_queues()
    }

    /// How a request is called when something is said of it.
    pub(crate) fn place_of(&self, request: &Request) -> String {
        let blocks = request.buffer.as_ref().map_or(0, |buffer| buffer.len() / self.namespace.block_size as usize);
        match request.op {
            Op::Read => format!("reading {blocks} blocks at {}", request.lba),
            Op::Write => format!("writing {blocks} blocks at {}", request.lba),
            Op::Flush => "flushing".to_owned(),
        }
    }

    /// Why a request failed, if it did.
    pub(crate) fn failure(&self, done: &Done) -> Option<Error> {
        let what = self.place_of(&done.request);
        match done.status {
            _ if done.is_silent => Some(Error::Silent(format!("{what}: no answer, though tried {ATTEMPTS} times"))),
            status if status.is_ok() => None,
            status => Some(Error::Status { what, status }),
        }
    }

    /// Waits for what is out, and shuts the controller down in order.
    pub(crate) fn shut_down(mut self) -> Result<Counts, Error> {
        let mut done = Vec::new();
        while self.out() > 0 {
            self.wait(&mut done)?;
        }
        let counts = self.counts;
        self.controller.shut_down()?;
        Ok(counts)
    }
}

impl<B: Bus> Drop for Drive<B> {
    fn drop(&mut self) {
        // Whatever led here is what is told; an order to shut down is tried nevertheless.
        let _ = self.controller.shut_down();
        let is_stopped = self.controller.stop();
        for mut queue in mem::take(&mut self.queues) {
            if !is_stopped {
                queue.leak();
            }
            self.backlog.extend(queue.forget());
        }
        for flight in mem::take(&mut self.backlog) {
            if is_stopped {
                self.controller.memory.unlist(flight.lists);
            } else {
                // The controller may write to its pages for ever.
                mem::forget(flight);
            }
        }
    }
}

fn opcode(op: Op) -> u8 {
    match op {
        Op::Read => io::READ,
        Op::Write => io::WRITE,
        Op::Flush => io::FLUSH,
    }
}

#[cfg(test)]
mod tests;
