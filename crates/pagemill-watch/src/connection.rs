//! One client, with its question so far and its answer so far.
//!
//! Clients are not trusted. A question has at most [`QUESTION_MAX`] bytes ([`http::HEAD_MAX`] in HTTP) and must arrive within [`PATIENCE`]; an answer must
//! be read within the same time. At most one answer is being sent, so a slow watcher gets fewer. No client can block the thread
//! or make its memory grow.
//!
//! A socket that is closed while bytes lie there unread resets the connection, and the client loses what it has not read yet. So
//! after an answer this end is shut down, and what the client still sends is discarded, within [`LINGER`] and [`DISCARDED_MAX`].
use crate::http;
use rustix::event::{PollFd, PollFlags};
use rustix::fd::OwnedFd;
use rustix::io::{Errno, read};
use rustix::net::{SendFlags, Shutdown, send, shutdown};
use std::time::{Duration, Instant};

/// Longer than any question in a line.
const QUESTION_MAX: usize = 64;
/// The time for a question to arrive, and for an answer to be read.
const PATIENCE: Duration = Duration::from_secs(5);
/// After the answer: how long, and how much at most, is read and discarded until the client closes.
const LINGER: Duration = Duration::from_secs(1);
const DISCARDED_MAX: usize = 64 << 10;
/// The intervals that a watcher may ask for. Reading every counter takes tens of microseconds.
const WATCH_MS: core::ops::RangeInclusive<u64> = 50..=3_600_000;

/// The format of an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Form {
    Json,
    Prometheus,
}

/// How clients ask.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Protocol {
    /// One line: see [`StatsServer`](crate::StatsServer).
    Line,
    /// HTTP's GET.
    Http,
}

impl Protocol {
    fn most(self) -> usize {
        match self {
            Self::Line => QUESTION_MAX,
            Self::Http => http::HEAD_MAX,
        }
    }

    /// The question that begins with these bytes, or the answer to a wrong one; none while it is incomplete, as it was
    /// when the first `seen` of them had come.
    fn parse(self, bytes: &[u8], seen: usize) -> Option<Result<Question, Vec<u8>>> {
        let is_full = bytes.len() >= self.most();
        match self {
            Self::Line => {
                let wrong = |why: String| format!("error: {why}\n").into_bytes();
                match bytes.iter().position(|&byte| byte == b'\n') {
                    Some(end) => Some(Question::parse(&bytes[..end]).map_err(wrong)),
                    None => is_full.then(|| Err(wrong(format!("a question has at most {QUESTION_MAX} bytes")))),
                }
            }
            Self::Http => match http::head(bytes, seen) {
                Some(head) => Some(http::parse(head).map(|has_body| Question::Scrape { has_body })),
                None => is_full.then(|| Err(http::too_long())),
            },
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Question {
    Once(Form),
    Watch(Duration),
    /// A GET of the figures; without a body, a HEAD.
    Scrape {
        has_body: bool,
    },
}

impl Question {
    /// Parses a line without its end.
    fn parse(line: &[u8]) -> Result<Self, String> {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        match line {
            b"json" => return Ok(Self::Once(Form::Json)),
            b"prometheus" => return Ok(Self::Once(Form::Prometheus)),
            _ => {}
        }
        let ms = line.strip_prefix(b"watch ").and_then(|ms| core::str::from_utf8(ms).ok()?.parse::<u64>().ok());
        match ms {
            Some(ms) if WATCH_MS.contains(&ms) => Ok(Self::Watch(Duration::from_millis(ms))),
            Some(_) => Err(format!("watch every {} to {} milliseconds", WATCH_MS.start(), WATCH_MS.end())),
            None => Err("ask one line: json, prometheus, or watch and a number of milliseconds".into()),
        }
    }
}

#[derive(Debug)]
enum State {
    /// Reading the question; these bytes have come so far.
    Asking(Vec<u8>),
    /// Sending the one answer.
    Answering,
    /// Sending an answer at `next`, and then one after each interval.
    Watching { every: Duration, next: Instant },
    /// The one answer is sent. Reading until the client closes, but at most this number of bytes.
    Closing { left: usize },
}

/// See the [module](self). Dropping it ends the connection, also if a forked child has a copy of the descriptor.
#[derive(Debug)]
pub(super) struct Connection {
    stream: OwnedFd,
    protocol: Protocol,
    state: State,
    /// The current answer, and how many bytes of it are sent.
    answer: Vec<u8>,
    sent: usize,
    /// The deadline for the next progress, if there is one.
    limit: Option<Instant>,
}

impl Connection {
    /// Over a socket that does not block.
    pub(super) fn new(stream: OwnedFd, protocol: Protocol, now: Instant) -> Self {
        let state = State::Asking(Vec::with_capacity(QUESTION_MAX));
        Self { stream, protocol, state, answer: Vec::new(), sent: 0, limit: Some(now + PATIENCE) }
    }

    /// The events to wait for. Bytes after the question are not read before the answer is sent: they stay in the system's
    /// bounded buffer.
    pub(super) fn polled(&self) -> PollFd<'_> {
        let mut events = PollFlags::empty();
        events.set(PollFlags::IN, matches!(self.state, State::Asking(_) | State::Closing { .. }));
        events.set(PollFlags::OUT, self.is_under_way());
        PollFd::new(&self.stream, events)
    }
    /// When it needs a step even without an event.
    pub(super) fn due(&self) -> Option<Instant> {
        match self.state {
            State::Watching { next, .. } => Some(self.limit.map_or(next, |limit| limit.min(next))),
            _ => self.limit,
        }
    }

    /// Makes progress. Returns `None` when the connection is finished or must be closed.
    pub(super) fn step(&mut self, now: Instant, has_ended: bool, render: &dyn Fn(Form) -> Vec<u8>) -> Option<()> {
        match &mut self.state {
            // A client may ask and close at once; its question can still be read.
            State::Asking(question) => match read_question(&self.stream, self.protocol, question)? {
                None if has_ended => return None,
                None => {}
                Some(question) => self.accept(question, now, render),
            },
            State::Closing { left } => discard(&self.stream, left, has_ended)?,
            _ if has_ended => return None,
            _ => {}
        }
        if let State::Watching { every, next } = &mut self.state
            && now >= *next
        {
            // Intervals that were missed, by this thread or by a slow reader, are skipped.
            *next = if *next + *every > now { *next + *every } else { now + *every };
            if self.sent == self.answer.len() {
                self.begin(render(Form::Json), now);
            }
        }
        self.send_on()?;
        if matches!(self.state, State::Answering) && !self.is_under_way() {
            self.begin_closing(now)?;
        }
        let is_late = self.limit.is_some_and(|limit| now >= limit);
        (!is_late).then_some(())
    }

    /// Tells the client that the answer is complete.
    fn begin_closing(&mut self, now: Instant) -> Option<()> {
        shutdown(&self.stream, Shutdown::Write).ok()?;
        (self.answer, self.sent) = (Vec::new(), 0);
        (self.state, self.limit) = (State::Closing { left: DISCARDED_MAX }, Some(now + LINGER));
        Some(())
    }

    fn is_under_way(&self) -> bool {
        self.sent < self.answer.len()
    }

    fn accept(&mut self, question: Result<Question, Vec<u8>>, now: Instant, render: &dyn Fn(Form) -> Vec<u8>) {
        self.limit = None;
        self.state = State::Answering;
        match question {
            Ok(Question::Once(form)) => self.begin(render(form), now),
            Ok(Question::Watch(every)) => self.state = State::Watching { every, next: now },
            Ok(Question::Scrape { has_body }) => {
                self.begin(http::answer("200 OK", &render(Form::Prometheus), has_body), now);
            }
            Err(wrong) => self.begin(wrong, now),
        }
    }

    fn begin(&mut self, answer: Vec<u8>, now: Instant) {
        (self.answer, self.sent, self.limit) = (answer, 0, Some(now + PATIENCE));
    }

    /// Sends as much as the client accepts now.
    fn send_on(&mut self) -> Option<()> {
        while self.is_under_way() {
            // NOSIGNAL: SIGPIPE would end a process that does not ignore it.
            match send(&self.stream, &self.answer[self.sent..], SendFlags::NOSIGNAL) {
                Ok(0) => return None,
                Ok(sent) => self.sent += sent,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Some(()),
                Err(_) => return None,
            }
        }
        if matches!(self.state, State::Watching { .. }) {
            self.limit = None;
        }
        Some(())
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // Closing the descriptor ends nothing while a forked child has a copy. Refused, the connection has ended already.
        let _ = shutdown(&self.stream, Shutdown::Both);
    }
}

/// Reads the bytes that have come, and forgets them. Returns `None` if the client has closed, or has sent too many.
fn discard(stream: &OwnedFd, left: &mut usize, has_ended: bool) -> Option<()> {
    let mut bytes = [0; 4096];
    while *left > 0 {
        let room = bytes.len().min(*left);
        match read(stream, &mut bytes[..room]) {
            Ok(0) => return None,
            Ok(read) => *left -= read,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return (!has_ended).then_some(()),
            Err(_) => return None,
        }
    }
    None
}

/// Reads the bytes that have come. Returns `None` if the client closed without a question, `Some(None)` if the question is
/// incomplete.
#[expect(clippy::option_option, reason = "closed, incomplete and complete are the three usual states of a reader")]
fn read_question(
    stream: &OwnedFd,
    protocol: Protocol,
    question: &mut Vec<u8>,
) -> Option<Option<Result<Question, Vec<u8>>>> {
    loop {
        let mut bytes = [0; 1024];
        let seen = question.len();
        let room = bytes.len().min(protocol.most() - seen);
        match read(stream, &mut bytes[..room]) {
            Ok(0) => return None,
            Ok(read) => question.extend_from_slice(&bytes[..read]),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Some(None),
            Err(_) => return None,
        }
        if let Some(question) = protocol.parse(question, seen) {
            return Some(Some(question));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_three_questions_are_parsed() {
        let watch = |ms| Ok(Question::Watch(Duration::from_millis(ms)));
        assert_eq!(Question::parse(b"json"), Ok(Question::Once(Form::Json)));
        assert_eq!(Question::parse(b"prometheus\r"), Ok(Question::Once(Form::Prometheus)));
        assert_eq!((Question::parse(b"watch 50"), Question::parse(b"watch 3600000")), (watch(50), watch(3_600_000)));
        for wrong in ["watch 49", "watch 3600001", "watch 18446744073709551615"] {
            assert!(Question::parse(wrong.as_bytes()).unwrap_err().contains("50 to 3600000"), "{wrong}");
        }
        for wrong in ["", "JSON", "json ", "watch", "watch ", "watch -1", "watch 1e3", "watch 99999999999999999999"] {
            assert!(Question::parse(wrong.as_bytes()).unwrap_err().contains("ask one line"), "{wrong}");
        }
        assert!(Question::parse(b"\xff\xfe").is_err() && Question::parse(b"watch \xff").is_err());
    }
}
