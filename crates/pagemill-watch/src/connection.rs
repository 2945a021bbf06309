//! One client of the socket: what it has asked so far, and what it still has to read.
//!
//! A client is believed in nothing. Its question has at most [`QUESTION_MAX`] bytes and [`PATIENCE`] to arrive; an
//! answer has as long to be read; there is at most one answer under way, and a watcher that is slow gets fewer.
//! Nothing that it does blocks the thread, or grows.
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{SendFlags, send};
use std::io::{ErrorKind, Read};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Longer than any question.
const QUESTION_MAX: usize = 64;
/// For a question to arrive, and for an answer to be read.
const PATIENCE: Duration = Duration::from_secs(5);
/// What a watcher may ask for. Reading every counter takes tens of microseconds.
const WATCH_MS: core::ops::RangeInclusive<u64> = 50..=3_600_000;

/// What may be asked for.
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
    /// From its line, without the line's end.
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
    /// The question, as far as it has come.
    Asking(Vec<u8>),
    /// It gets one answer.
    Answering,
    /// It gets one at `next`, and then one `every`.
    Watching { every: Duration, next: Instant },
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Connection {
    stream: UnixStream,
    state: State,
    /// The answer under way, and how much of it is sent.
    answer: Vec<u8>,
    sent: usize,
    /// Until when it has to get on, if it has to.
    limit: Option<Instant>,
}

impl Connection {
    /// None if the system refuses what it needs: then the client is gone already.
    pub(super) fn new(stream: UnixStream, now: Instant) -> Option<Self> {
        stream.set_nonblocking(true).ok()?;
        let state = State::Asking(Vec::with_capacity(QUESTION_MAX));
        Some(Self { stream, state, answer: Vec::new(), sent: 0, limit: Some(now + PATIENCE) })
    }

    /// What to wait for. What a client says after its question is not read: it waits in the system's bounded buffer.
    pub(super) fn polled(&self) -> PollFd<'_> {
        let mut events = PollFlags::empty();
        events.set(PollFlags::IN, matches!(self.state, State::Asking(_)));
        events.set(PollFlags::OUT, self.is_under_way());
        PollFd::new(&self.stream, events)
    }
    /// When it needs a step even if nothing has happened.
    pub(super) fn due(&self) -> Option<Instant> {
        match self.state {
            State::Watching { next, .. } => Some(self.limit.map_or(next, |limit| limit.min(next))),
            _ => self.limit,
        }
    }

    /// Gets on. None: it is done with, or has to go.
    pub(super) fn step(&mut self, now: Instant, has_ended: bool, render: &dyn Fn(Form) -> Vec<u8>) -> Option<()> {
        if let State::Asking(question) = &mut self.state {
            // A client may ask and go away at once; what it said is still there.
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
            // Times that were slept through, or that a slow reader missed, are not made up for.
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

    /// Sends what the client takes just now.
    fn send_on(&mut self) -> Option<()> {
        while self.is_under_way() {
            // Without a signal: SIGPIPE would end a process that does not ignore it.
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

/// Reads what has come. None: the client went away without a question. The inner None: it is not whole yet.
#[expect(clippy::option_option, reason = "gone, not yet, here: as a reader's three states are told everywhere")]
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
