//! One client of the socket, with its question so far and its answer so far.
//!
//! Clients are not trusted. A question has at most [`QUESTION_MAX`] bytes and must arrive within [`PATIENCE`]; an answer must
//! be read within the same time. At most one answer is being sent, so a slow watcher gets fewer. No client can block the thread
//! or make its memory grow.
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{SendFlags, send};
use std::io::{ErrorKind, Read};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Longer than any question.
const QUESTION_MAX: usize = 64;
/// The time for a question to arrive, and for an answer to be read.
const PATIENCE: Duration = Duration::from_secs(5);
/// The intervals that a watcher may ask for. Reading every counter takes tens of microseconds.
const WATCH_MS: core::ops::RangeInclusive<u64> = 50..=3_600_000;

/// The format of an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Form {
    Json,
    Prometheus,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Question {
    Once(Form),
    Watch(Duration),
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
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Connection {
    stream: UnixStream,
    state: State,
    /// The current answer, and how many bytes of it are sent.
    answer: Vec<u8>,
    sent: usize,
    /// The deadline for the next progress, if there is one.
    limit: Option<Instant>,
}

impl Connection {
    /// `None` if the socket cannot be made non-blocking; then it is closed.
    pub(super) fn new(stream: UnixStream, now: Instant) -> Option<Self> {
        stream.set_nonblocking(true).ok()?;
        let state = State::Asking(Vec::with_capacity(QUESTION_MAX));
        Some(Self { stream, state, answer: Vec::new(), sent: 0, limit: Some(now + PATIENCE) })
    }

    /// The events to wait for. Bytes after the question are not read: they stay in the system's bounded buffer.
    pub(super) fn polled(&self) -> PollFd<'_> {
        let mut events = PollFlags::empty();
        events.set(PollFlags::IN, matches!(self.state, State::Asking(_)));
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
        if let State::Asking(question) = &mut self.state {
            // A client may ask and close at once; its question can still be read.
            match read_question(&self.stream, question)? {
                None if has_ended => return None,
                None => {}
                Some(question) => self.accept(question, now, render),
            }
        } else if has_ended {
            return None;
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
        let is_late = self.limit.is_some_and(|limit| now >= limit);
        let is_done = matches!(self.state, State::Answering) && !self.is_under_way();
        (!is_late && !is_done).then_some(())
    }

    fn is_under_way(&self) -> bool {
        self.sent < self.answer.len()
    }

    fn accept(&mut self, question: Result<Question, String>, now: Instant, render: &dyn Fn(Form) -> Vec<u8>) {
        self.limit = None;
        self.state = State::Answering;
        match question {
            Ok(Question::Once(form)) => self.begin(render(form), now),
            Ok(Question::Watch(every)) => self.state = State::Watching { every, next: now },
            Err(why) => self.begin(format!("error: {why}\n").into_bytes(), now),
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

/// Reads the bytes that have come. Returns `None` if the client closed without a question, `Some(None)` if the question is
/// incomplete.
#[expect(clippy::option_option, reason = "closed, incomplete and complete are the three usual states of a reader")]
fn read_question(mut stream: &UnixStream, question: &mut Vec<u8>) -> Option<Option<Result<Question, String>>> {
    loop {
        let mut bytes = [0; QUESTION_MAX];
        match stream.read(&mut bytes) {
            Ok(0) => return None,
            Ok(read) => question.extend_from_slice(&bytes[..read]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Some(None),
            Err(_) => return None,
        }
        if let Some(end) = question.iter().position(|&byte| byte == b'\n') {
            return Some(Some(Question::parse(&question[..end])));
        }
        if question.len() >= QUESTION_MAX {
            return Some(Some(Err(format!("a question has at most {QUESTION_MAX} bytes"))));
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
