//! A far end: an export of another NBD server, with the encrypted bytes of a volume. It may end and come back.
//!
//! ```text
//!  workers, callers ──jobs──> queue ──> links, a thread each ──requests──> far end
//!          ^                    ^ \──> kept writes ──────┐
//!          └──── results ───────┴── jobs of lost links   └── again, after a reconnect
//! ```
//!
//! A job is a read, write, flush or trim with its buffer and the place for its result. Links take jobs from one queue,
//! many at a time; there are several if the far end allows it. All links are one set. When one is lost the others take
//! no more jobs, wait for their replies and end. Then one thread, the keeper, connects anew, has the kept writes written
//! again ([`kept`]), and the queue goes on. A job whose link was lost goes back to the queue, and fails when the far end
//! was away for the limit. A far end that comes back after that is used again, and kept writes are still written: the
//! limit is how long clients wait.
//!
//! Locks: one, over the state. No call of the system is made under it but those that wake a thread.
mod kept;
mod link;
mod uri;

use std::collections::VecDeque;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use std::{fmt, io};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use tracing::{error, info, warn};

use super::buffer::{Buffer, Origin};
use crate::nbd::client::Agreed;
use crate::{Error, Store};
use kept::{Bytes, Kept};
use link::Link;
#[cfg(fuzzing)]
pub(crate) use link::played::check_far_end;
use uri::FarUri;
pub(crate) use uri::{is_same_far, is_uri};

/// Connections, if the far end says that they are one disk.
const LINKS: usize = 4;
/// Bytes of writes that are kept until they are flushed. At half of it the far end is told to flush.
pub(super) const KEPT: usize = 64 << 20;
/// The pauses between attempts to connect: the first, doubled each time, and the longest.
const PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// How a far end is used.
#[derive(Clone, Copy, Debug)]
pub struct FarOptions {
    /// How long requests wait for a far end that is away, before they fail.
    pub reconnect: Duration,
    /// Writes are made, so they have to become durable.
    pub may_write: bool,
    /// Told when the far end is lost and when it is back, in a line, in a program that has given `tracing` no subscriber.
    /// Otherwise these are events.
    pub say: fn(&str),
}

/// What becomes of a far end.
enum News<'a> {
    Lost(&'a io::Error),
    /// It is there, and less than it was.
    Unfit(&'a str),
    /// So many writes are written again.
    Back(usize),
    /// So many writes are not flushed at the end.
    Unflushed(usize),
}

impl fmt::Display for News<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lost(why) => write!(f, "the far end is lost: {why}"),
            Self::Unfit(why) => write!(f, "the far end is not used: {why}"),
            Self::Back(count) => write!(f, "the far end is back; {count} writes are written again"),
            Self::Unflushed(count) => write!(f, "{count} writes may not be on the disk of the far end"),
        }
    }
}

/// Work for a far end.
#[derive(Clone, Debug)]
pub(super) enum Work {
    /// Fills the buffer.
    Read,
    /// Writes these bytes.
    Write(Bytes),
    /// Writes the kept write of this number again.
    Again(Bytes, u64),
    Flush,
    /// So many bytes.
    Trim(u64),
}

impl Work {
    fn is_flush(&self) -> bool {
        matches!(self, Self::Flush)
    }
}

/// Takes a job's buffer back, and its result.
pub(super) type Home = Box<dyn FnOnce(Buffer, io::Result<()>) + Send>;

/// Work, and who waits for it.
struct Job {
    work: Work,
    at: u64,
    buffer: Buffer,
    /// Nobody waits for a flush that is made for room, or for what is written again.
    home: Option<Home>,
    /// Its number in [`Kept`], while it is under way.
    number: u64,
    /// Other flushes that this one serves.
    along: Vec<Job>,
    /// Since when it waits for the far end to come back.
    since: Option<Instant>,
}

impl Job {
    fn new(work: Work, at: u64, buffer: Buffer, home: Option<Home>) -> Self {
        Self { work, at, buffer, home, number: 0, along: Vec::new(), since: None }
    }

    fn finish(self, result: &io::Result<()>) {
        let copy = || match result {
            Ok(()) => Ok(()),
            Err(error) => Err(match error.raw_os_error() {
                Some(number) => io::Error::from_raw_os_error(number),
                None => io::Error::new(error.kind(), error.to_string()),
            }),
        };
        for job in self.along {
            job.finish(result);
        }
        if let Some(home) = self.home {
            home(self.buffer, copy());
        }
    }
}

/// What a link does next.
enum Next {
    Job(Job),
    /// It is woken when there is more.
    Nothing,
    /// The set is over: no more jobs.
    Over,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// A link is lost, and the set ends or has ended.
    Down,
    /// Kept writes are written again; so many are not yet.
    Again(usize),
    Up,
}

struct State {
    phase: Phase,
    /// Links whose threads have not ended.
    live: usize,
    /// The links of the set: the event that wakes each, and whether it sleeps.
    links: Vec<(Arc<OwnedFd>, bool)>,
    queue: VecDeque<Job>,
    /// What is to be written again, in order, before the queue goes on.
    again: VecDeque<Job>,
    kept: Kept,
    /// When a link was lost, unless a job was done since, or nobody waited when it was back.
    away_since: Option<Instant>,
    /// Attempts to connect since then.
    attempts: u32,
    /// Nobody uses it any more.
    is_over: bool,
}

impl State {
    /// Before the first connections.
    fn new() -> Self {
        Self {
            phase: Phase::Down,
            live: 0,
            links: Vec::new(),
            queue: VecDeque::new(),
            again: VecDeque::new(),
            kept: Kept::new(KEPT),
            away_since: None,
            attempts: 0,
            is_over: false,
        }
    }

    fn wake_all(&mut self) {
        for (wake, sleeps) in &mut self.links {
            *sleeps = false;
            raise(wake);
        }
    }

    fn wake_one(&mut self) {
        if let Some((wake, sleeps)) = self.links.iter_mut().find(|(_, sleeps)| *sleeps) {
            *sleeps = false;
            raise(wake);
        }
    }

    /// Whether a job may begin now.
    fn may_begin(&self, job: &Job) -> bool {
        match &job.work {
            Work::Read | Work::Again(..) => true,
            Work::Write(bytes) => self.kept.may_begin(&place(job.at, bytes.len() as u64), bytes.len()),
            Work::Trim(len) => self.kept.may_begin(&place(job.at, *len), 0),
            Work::Flush => self.kept.may_flush(),
        }
    }

    /// Takes the first job that may begin, and begins it.
    fn take(&mut self) -> Option<Job> {
        let index = self.queue.iter().position(|job| self.may_begin(job))?;
        let mut job = self.queue.remove(index)?;
        match &job.work {
            Work::Read | Work::Again(..) => {}
            Work::Write(bytes) => {
                job.number = self.kept.begin(place(job.at, bytes.len() as u64), Some(Arc::clone(bytes)));
            }
            Work::Trim(len) => job.number = self.kept.begin(place(job.at, *len), None),
            Work::Flush => {
                self.kept.begin_flush();
                // The others that wait are served by it too: it is not sent yet.
                let (along, rest) = std::mem::take(&mut self.queue).into_iter().partition(|job| job.work.is_flush());
                (job.along, self.queue) = (Vec::from(along), rest);
            }
        }
        Some(job)
    }

    /// Takes the next of what is to be written again. Strictly in order (F1 in `kept`).
    fn take_again(&mut self) -> Option<Job> {
        let job = self.again.front()?;
        let Work::Again(bytes, number) = &job.work else { unreachable!("only kept writes are written again") };
        self.kept.begin_again(*number, place(job.at, bytes.len() as u64)).then(|| self.again.pop_front())?
    }

    /// Removes the jobs that have waited for the limit. A flush that is made for room stays: writes wait for it.
    fn expired(&mut self, limit: Duration) -> Vec<Job> {
        let is_late = |job: &Job| job.home.is_some() && job.since.is_some_and(|since| since.elapsed() >= limit);
        let (late, rest) = std::mem::take(&mut self.queue).into_iter().partition::<VecDeque<_>, _>(is_late);
        self.queue = rest;
        late.into()
    }
}

fn place(at: u64, len: u64) -> std::ops::Range<u64> {
    at..at.saturating_add(len)
}

fn raise(wake: &OwnedFd) {
    // If the counter is full, its thread is awake anyway.
    let _ = rustix::io::write(wake, &1u64.to_ne_bytes());
}

struct Shared {
    uri: FarUri,
    agreed: Agreed,
    options: FarOptions,
    /// The export's name in the log, where there are several.
    export: OnceLock<String>,
    state: Mutex<State>,
    /// Wakes the keeper.
    news: Condvar,
}

impl Shared {
    fn new(uri: FarUri, agreed: Agreed, options: FarOptions) -> Self {
        let (export, state, news) = (OnceLock::new(), Mutex::new(State::new()), Condvar::new());
        Self { uri, agreed, options, export, state, news }
    }

    /// No code panics while it holds the lock.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn say(&self, news: &News<'_>) {
        let export = self.export.get().map(String::as_str);
        if !tracing::dispatcher::has_been_set() {
            return (self.options.say)(&news.to_string());
        }
        match news {
            News::Lost(_) => warn!(name: "far end lost", export, "{news}"),
            News::Unfit(_) => error!(name: "far end unfit", export, "{news}"),
            News::Back(_) => info!(name: "far end back", export, "{news}"),
            News::Unflushed(_) => error!(name: "far end unflushed", export, "{news}"),
        }
    }

    fn submit(&self, mut job: Job) {
        let mut state = self.state();
        if job.work.is_flush() && (!self.agreed.can_flush || state.kept.has_lost()) {
            // Without flushes, each write is durable when it is answered, or there are none.
            let has_lost = state.kept.has_lost();
            drop(state);
            return job.finish(&if has_lost { Err(lost()) } else { Ok(()) });
        }
        if state.phase != Phase::Up {
            job.since = Some(state.away_since.unwrap_or_else(Instant::now));
        }
        state.queue.push_back(job);
        let late = match state.phase {
            Phase::Down => state.expired(self.options.reconnect),
            _ => Vec::new(),
        };
        state.wake_one();
        drop(state);
        fail(late);
    }

    /// For the link at `number`.
    fn next(&self, number: usize) -> Next {
        let mut state = self.state();
        if state.is_over {
            return Next::Over;
        }
        let job = match state.phase {
            Phase::Down => return Next::Over,
            Phase::Again(_) => state.take_again(),
            Phase::Up => state.take(),
        };
        // One that has a job is busy: another is woken for the next.
        state.links[number].1 = job.is_none();
        job.map_or(Next::Nothing, Next::Job)
    }

    /// Whether the set ends.
    fn ends(&self) -> bool {
        let state = self.state();
        state.is_over || state.phase == Phase::Down
    }

    /// Takes a job's result from a link.
    fn done(&self, job: Job, mut result: io::Result<()>) {
        let mut state = self.state();
        let is_done = result.is_ok();
        match &job.work {
            Work::Read => {}
            Work::Write(_) | Work::Trim(_) => state.kept.answered(job.number, is_done, !self.agreed.can_flush),
            Work::Again(_, number) => {
                state.kept.answered(*number, is_done, false);
                if let Phase::Again(left) = &mut state.phase {
                    *left -= 1;
                    if *left == 0 {
                        state.phase = Phase::Up;
                        state.wake_all();
                    }
                }
            }
            Work::Flush => {
                state.kept.flushed(is_done);
                if state.kept.has_lost() {
                    result = Err(lost());
                }
            }
        }
        if state.phase == Phase::Up && !matches!(job.work, Work::Again(..)) {
            (state.away_since, state.attempts) = (None, 0);
        }
        if state.kept.wants_flush() && !state.queue.iter().any(|job| job.work.is_flush()) {
            state.queue.push_front(Job::new(Work::Flush, 0, Buffer::none(), None));
        }
        if !state.queue.is_empty() {
            state.wake_one();
        }
        drop(state);
        job.finish(&result);
    }

    /// A link has ended, and `jobs` were under way; with `why`, it was lost.
    fn ended(&self, jobs: Vec<Job>, why: Option<io::Error>) {
        let mut state = self.state();
        let now = Instant::now();
        let is_first = state.phase != Phase::Down && why.is_some();
        if is_first {
            state.phase = Phase::Down;
            state.away_since.get_or_insert(now);
            state.wake_all();
        }
        for mut job in jobs.into_iter().rev() {
            if let Work::Again(..) = job.work {
                continue; // It is still kept.
            }
            job.since.get_or_insert(now);
            let along = std::mem::take(&mut job.along);
            state.queue.push_front(job);
            for mut job in along {
                job.since.get_or_insert(now);
                state.queue.push_front(job);
            }
        }
        state.live -= 1;
        let late = state.expired(self.options.reconnect);
        self.news.notify_all();
        drop(state);
        fail(late);
        if let Some(why) = why.filter(|_| is_first) {
            self.say(&News::Lost(&why));
        }
    }

    /// The keeper: connects anew as long as somebody uses the far end.
    fn keep(self: &Arc<Self>) {
        let mut threads: Vec<JoinHandle<()>> = Vec::new();
        loop {
            let mut state = self.state();
            while !(state.is_over || (state.phase == Phase::Down && state.live == 0)) {
                state = self.news.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            if state.is_over {
                drop(state);
                threads.into_iter().for_each(|thread| drop(thread.join()));
                return;
            }
            let pause = match state.attempts {
                0 => Duration::ZERO,
                attempts => (PAUSE * 2u32.saturating_pow(attempts - 1).min(1000)).min(LONGEST_PAUSE),
            };
            state.attempts = state.attempts.saturating_add(1);
            let until = Instant::now() + pause;
            loop {
                let late = state.expired(self.options.reconnect);
                if !late.is_empty() {
                    drop(state);
                    fail(late);
                    state = self.state();
                    continue;
                }
                let left = until.saturating_duration_since(Instant::now());
                if state.is_over || left.is_zero() {
                    break;
                }
                // The next job to expire may come before the next attempt.
                let since = state.queue.iter().filter(|job| job.home.is_some()).filter_map(|job| job.since).min();
                let expires =
                    since.map(|since| (since + self.options.reconnect).saturating_duration_since(Instant::now()));
                let slice = expires.map_or(left, |expires| left.min(expires)).max(Duration::from_millis(1));
                state = self.news.wait_timeout(state, slice).map_or_else(|error| error.into_inner().0, |woken| woken.0);
            }
            let is_over = state.is_over;
            drop(state);
            threads.drain(..).for_each(|thread| drop(thread.join()));
            if is_over {
                continue;
            }
            // An attempt that fails is repeated; why the far end was lost has been said.
            if let Ok(set) = self.connect() {
                threads = self.begin(set);
            }
        }
    }

    /// A new set of connections. What is there must not be less than what was.
    fn connect(&self) -> io::Result<Vec<Link>> {
        let (first, agreed) = self.uri.connect()?;
        if let Some(why) = agreed.shortfall(&self.agreed) {
            self.say(&News::Unfit(&why));
            return Err(io::Error::other(why));
        }
        connect_set(&self.uri, first, &self.agreed)
    }

    /// Has the kept writes written again, and then the queue, by threads.
    fn begin(self: &Arc<Self>, set: Vec<Link>) -> Vec<JoinHandle<()>> {
        self.enter(&set);
        set.into_iter().filter_map(|link| self.spawn(link)).collect()
    }

    /// A set of links begins.
    fn enter(&self, set: &[Link]) {
        let mut state = self.state();
        let again = state.kept.start_over();
        let count = again.len();
        let job = |(number, at, bytes)| Job::new(Work::Again(bytes, number), at, Buffer::none(), None);
        state.again = again.into_iter().map(job).collect();
        state.phase = if count > 0 { Phase::Again(count) } else { Phase::Up };
        state.links = set.iter().map(|link| (link.wake(), false)).collect();
        state.live = set.len();
        let was_lost = state.away_since.is_some();
        if state.queue.is_empty() {
            // Nobody waits for it: the next loss is another one.
            state.away_since = None;
        }
        drop(state);
        if was_lost {
            self.say(&News::Back(count));
        }
    }

    fn spawn(self: &Arc<Self>, link: Link) -> Option<JoinHandle<()>> {
        let shared = Arc::clone(self);
        let thread = thread::Builder::new().name("crypt-far".to_owned()).spawn(move || {
            let _ends_all = EndsAll;
            link.run(&shared);
        });
        // Without a thread the link is lost, and with it the set.
        thread.map_err(|why| self.ended(Vec::new(), Some(why))).ok()
    }
}

/// Ends the process if its thread panics: callers would wait for ever for the jobs that it had.
struct EndsAll;

impl Drop for EndsAll {
    fn drop(&mut self) {
        if thread::panicking() {
            std::process::abort();
        }
    }
}

/// Connects as often as the far end allows, up to [`LINKS`].
fn connect_set(uri: &FarUri, first: super::socket::Socket, agreed: &Agreed) -> io::Result<Vec<Link>> {
    let mut sockets = vec![first];
    while agreed.can_multi_conn && sockets.len() < LINKS {
        // A far end may limit its connections; one is enough.
        match uri.connect() {
            Ok((socket, same)) if same.shortfall(agreed).is_none() => sockets.push(socket),
            _ => break,
        }
    }
    let link = |(number, socket)| {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Link::new(socket, number, Arc::new(wake)))
    };
    sockets.into_iter().enumerate().map(link).collect()
}

fn fail(jobs: Vec<Job>) {
    for job in jobs {
        job.finish(&Err(io::Error::new(io::ErrorKind::NotConnected, "the far end is away")));
    }
}

/// Whether the far end did not come back in time. It may still come, and nothing is lost.
pub(super) fn is_away(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotConnected
}

/// As D1 of `disk` has it.
fn lost() -> io::Error {
    io::Error::other("the far end has lost what was written")
}

/// An export of another NBD server.
pub struct Far {
    shared: Arc<Shared>,
    keeper: Option<JoinHandle<()>>,
    links: usize,
    uri: String,
}

impl fmt::Debug for Far {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Far").field("uri", &self.uri).field("agreed", &self.shared.agreed).finish_non_exhaustive()
    }
}

impl Far {
    /// Connects to the export that `uri` names, as `nbd://host/disk` or `nbd+unix:///disk?socket=/run/nbd.sock`.
    ///
    /// # Errors
    /// [`Error::Request`] for a URI that makes no sense, [`Error::Io`] if nobody answers there or it refuses, and if it
    /// is to be written and the far end is read-only or cannot make writes durable.
    pub fn connect(uri: &str, options: FarOptions) -> Result<Self, Error> {
        let place = FarUri::new(uri)?;
        let of_far = |error| Error::io(uri, error);
        let (first, agreed) = place.connect().map_err(of_far)?;
        if options.may_write && agreed.is_read_only {
            let why = "the far end is read-only: it can be served with --read-only, and not changed";
            return Err(of_far(io::Error::other(why)));
        }
        if options.may_write && !agreed.can_flush && !agreed.can_fua {
            let why =
                "the far end has neither flush nor FUA, so no write there is sure to last: serve it with --read-only";
            return Err(of_far(io::Error::other(why)));
        }
        let set = connect_set(&place, first, &agreed).map_err(of_far)?;
        let links = set.len();
        let shared = Arc::new(Shared::new(place, agreed, options));
        let theirs = Arc::clone(&shared);
        let threads = shared.begin(set);
        let keeper = thread::Builder::new().name("crypt-far-keep".to_owned()).spawn(move || {
            let _ends_all = EndsAll;
            theirs.keep();
            threads.into_iter().for_each(|thread| drop(thread.join()));
        });
        let keeper = Some(keeper.map_err(of_far)?);
        Ok(Self { shared, keeper, links, uri: uri.to_owned() })
    }

    /// Bytes that offsets and lengths of requests are multiples of.
    #[must_use]
    pub fn block(&self) -> usize {
        self.shared.agreed.min_block as usize
    }

    /// Its export's name in the log; the first one stays.
    pub(super) fn log_as(&self, export: &str) {
        self.shared.export.get_or_init(|| export.to_owned());
    }

    /// The connections that it began with.
    pub(super) fn links(&self) -> usize {
        self.links
    }

    /// Whether trims are passed on.
    pub(super) fn can_trim(&self) -> bool {
        self.shared.agreed.can_trim
    }

    /// Begins a piece of work; `home` gets the buffer and the result, on another thread.
    pub(super) fn submit(&self, work: Work, at: u64, buffer: Buffer, home: Home) {
        self.shared.submit(Job::new(work, at, buffer, Some(home)));
    }

    /// Does a piece of work, and waits for it.
    pub(super) fn wait_for(&self, work: Work, at: u64, buffer: Buffer) -> (Buffer, io::Result<()>) {
        let (done, result) = sync_channel(1);
        // The receiver waits until it comes.
        self.submit(work, at, buffer, Box::new(move |buffer, result| drop(done.send((buffer, result)))));
        result.recv().unwrap_or_else(|_| unreachable!("a job was dropped without its result"))
    }

    /// Fills `bytes` from byte `at`, whatever the size of blocks is.
    pub(super) fn read(&self, bytes: &mut [&mut [u8]], at: u64) -> io::Result<()> {
        let len: usize = bytes.iter().map(|slice| slice.len()).sum();
        let block = self.block() as u64;
        let start = at / block * block;
        let end = at.checked_add(len as u64).filter(|&end| end <= self.shared.agreed.size);
        let end = end.ok_or(io::ErrorKind::UnexpectedEof)?.next_multiple_of(block);
        let buffer = Buffer::of_heap((end - start) as usize, Origin::Free).ok_or(io::ErrorKind::OutOfMemory)?;
        let (buffer, result) = self.wait_for(Work::Read, start, buffer);
        result?;
        let mut from = (at - start) as usize;
        for slice in bytes {
            buffer.copy_out(from, slice);
            from += slice.len();
        }
        Ok(())
    }
}

impl Drop for Far {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        state.is_over = true;
        state.wake_all();
        self.shared.news.notify_all();
        drop(state);
        if let Some(keeper) = self.keeper.take() {
            let _ = keeper.join(); // It has not panicked: see `EndsAll`.
        }
        let mut state = self.shared.state();
        let (left, count) = (std::mem::take(&mut state.queue), state.kept.count());
        drop(state);
        fail(left.into());
        if count > 0 {
            self.shared.say(&News::Unflushed(count));
        }
    }
}

/// For headers.
impl Store for Far {
    fn size(&self) -> io::Result<u64> {
        Ok(self.shared.agreed.size)
    }

    fn read_at(&self, buf: &mut [u8], at: u64) -> io::Result<()> {
        self.read(&mut [buf], at)
    }

    /// Writes whole blocks: what lies beside `data` in them is read first.
    fn write_at(&self, data: &[u8], at: u64) -> io::Result<()> {
        let block = self.block() as u64;
        let start = at / block * block;
        let end = at.checked_add(data.len() as u64).filter(|&end| end <= self.shared.agreed.size);
        let end = end.ok_or(io::ErrorKind::StorageFull)?.next_multiple_of(block);
        let mut bytes = vec![0; (end - start) as usize];
        if bytes.len() > data.len() {
            self.read(&mut [&mut bytes], start)?;
        }
        bytes[(at - start) as usize..][..data.len()].copy_from_slice(data);
        self.wait_for(Work::Write(Arc::new(bytes)), start, Buffer::none()).1
    }

    fn sync(&self) -> io::Result<()> {
        self.wait_for(Work::Flush, 0, Buffer::none()).1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared() -> Arc<Shared> {
        let agreed = Agreed {
            size: 1 << 20,
            is_read_only: false,
            can_flush: true,
            can_fua: true,
            can_trim: true,
            can_multi_conn: false,
            min_block: 512,
            max_block: 1 << 20,
        };
        let options = FarOptions { reconnect: Duration::from_secs(120), may_write: true, say: |_| {} };
        let uri = FarUri::new("nbd+unix:///?socket=none").unwrap();
        Arc::new(Shared::new(uri, agreed, options))
    }

    /// A far end that was away while nobody asked for anything, and is lost again later, is waited for as any other.
    #[test]
    fn a_loss_that_nobody_noticed_does_not_count_for_the_next_one() {
        let shared = shared();
        shared.state().away_since = Instant::now().checked_sub(Duration::from_secs(3600));
        assert!(shared.state().away_since.is_some());
        assert!(shared.begin(Vec::new()).is_empty());
        shared.state().live = 1;
        shared.ended(Vec::new(), Some(io::ErrorKind::ConnectionAborted.into()));
        let (done, result) = sync_channel(1);
        let home = Box::new(move |_, result| done.send(result).unwrap());
        shared.submit(Job::new(Work::Read, 0, Buffer::none(), Some(home)));
        assert!(result.try_recv().is_err(), "it failed at once");
        assert_eq!(shared.state().queue.len(), 1);
    }

    /// A far end that did something since it was back is waited for anew when it is lost again.
    #[test]
    fn a_loss_that_was_survived_does_not_count_for_the_next_one() {
        let shared = shared();
        let submit = |at| {
            let (done, result) = sync_channel(1);
            let home = Box::new(move |_, result| done.send(result).unwrap());
            shared.submit(Job::new(Work::Read, at, Buffer::none(), Some(home)));
            result
        };
        let first = submit(0);
        shared.state().away_since = Instant::now().checked_sub(Duration::from_secs(3600));
        assert!(shared.begin(Vec::new()).is_empty());
        let job = shared.state().take().unwrap();
        shared.done(job, Ok(()));
        first.recv().unwrap().unwrap();
        shared.state().live = 1;
        shared.ended(Vec::new(), Some(io::ErrorKind::ConnectionAborted.into()));
        assert!(submit(512).try_recv().is_err(), "it failed at once");
    }

    /// Writes wait for room, which only this flush makes.
    #[test]
    fn a_flush_for_room_waits_longer_than_clients() {
        let shared = shared();
        let mut state = shared.state();
        let mut flush = Job::new(Work::Flush, 0, Buffer::none(), None);
        flush.since = Instant::now().checked_sub(Duration::from_secs(3600));
        let mut read = Job::new(Work::Read, 0, Buffer::none(), Some(Box::new(|_, _| ())));
        read.since = flush.since;
        state.queue = [read, flush].into();
        assert_eq!((state.expired(Duration::from_secs(60)).len(), state.queue.len()), (1, 1));
        assert!(state.queue[0].work.is_flush());
    }

    /// The far end is back without what it had answered, and refuses it: the flush that waited meanwhile may not succeed.
    #[test]
    fn a_flush_that_waited_for_a_rewrite_that_failed_fails() {
        let shared = shared();
        let number = shared.state().kept.begin(0..512, Some(Arc::new(vec![1; 512])));
        shared.state().kept.answered(number, true, false);
        let (done, result) = sync_channel(1);
        let home = Box::new(move |_, result| done.send(result).unwrap());
        shared.submit(Job::new(Work::Flush, 0, Buffer::none(), Some(home)));
        assert!(shared.begin(Vec::new()).is_empty());
        let again = shared.state().take_again().unwrap();
        shared.done(again, Err(io::ErrorKind::StorageFull.into()));
        let flush = shared.state().take().unwrap();
        shared.done(flush, Ok(()));
        let failed = result.recv().unwrap().unwrap_err();
        assert!(failed.to_string().contains("has lost"), "{failed}");
    }
}
