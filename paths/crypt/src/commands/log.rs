//! A server's log: the events of `tracing`, a line each, on standard error.
//!
//! Invariants: a thread that logs never waits for standard error (L1). It puts its line into a queue, and one thread
//! writes. When the queue is full the line is lost, and the number of lost lines is said when there is room. A line is
//! one line of printable characters, at most [`LINE`] bytes long, whatever its fields hold (L2): names come from
//! clients. Of one kind of event at most [`BURST`] lines are written in a [`WINDOW`], and then the number of the others
//! (L3): a client may cause as many events as it likes.
//!
//! Below systemd, which says so by `JOURNAL_STREAM`, lines begin with a priority as `<4>`, and the journal adds the
//! time. Elsewhere they begin with the time (UTC) and the level.
use std::collections::{HashMap, VecDeque};
use std::fmt::{self, Write};
use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clap::ValueEnum;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// The most bytes of a line. Less than a pipe takes at once (PIPE_BUF), so that lines of several processes do not mix.
const LINE: usize = 1024;
/// The most characters of a field.
const FIELD: usize = 160;
/// Lines that wait to be written.
const QUEUE: usize = 1024;
/// Lines of one kind in a [`WINDOW`].
const BURST: u64 = 20;
const WINDOW: Duration = Duration::from_secs(1);
/// How long the end of the program waits for the last lines to be written.
const FAREWELL: Duration = Duration::from_secs(1);

/// What is logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum LogLevel {
    /// Data is lost, or the server cannot go on
    Error,
    /// Also disk errors, clients that were cut off, a refused lock
    Warn,
    /// Also start and stop, clients that come and go
    Info,
    /// Also which export each client has chosen
    Debug,
}

impl LogLevel {
    fn filter(self) -> LevelFilter {
        match self {
            Self::Error => LevelFilter::ERROR,
            Self::Warn => LevelFilter::WARN,
            Self::Info => LevelFilter::INFO,
            Self::Debug => LevelFilter::DEBUG,
        }
    }
}

/// How lines begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// With a priority of syslog.
    Journal,
    /// With the time and the level.
    Plain,
}

impl Form {
    /// The journal's, if standard error is the stream that systemd says is the journal's. A program that was started
    /// by a service may have another one.
    fn of_stderr() -> Self {
        let stream = std::env::var("JOURNAL_STREAM").ok();
        let is_journal = stream.and_then(|stream| {
            let (device, inode) = stream.split_once(':')?;
            let there = rustix::fs::fstat(io::stderr()).ok()?;
            Some(device.parse() == Ok(there.st_dev) && inode.parse() == Ok(there.st_ino))
        });
        if is_journal == Some(true) { Self::Journal } else { Self::Plain }
    }

    fn begin(self, level: Level, line: &mut String) {
        let (priority, name) = match level {
            Level::ERROR => (3, "ERROR"),
            Level::WARN => (4, "WARN "),
            Level::INFO => (6, "INFO "),
            _ => (7, "DEBUG"),
        };
        // Writing to a string can't fail.
        let _ = match self {
            Self::Journal => write!(line, "<{priority}>"),
            Self::Plain => write!(line, "{} {name} ", Utc(SystemTime::now())),
        };
    }
}

/// A time as RFC 3339 has it, with milliseconds.
struct Utc(SystemTime);

impl fmt::Display for Utc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let since = self.0.duration_since(UNIX_EPOCH).unwrap_or_default();
        let (days, second) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
        // Years that begin in March have the leap day at their end; 400 of them have 146,097 days, and the first ones
        // began 719,468 days before 1970.
        let (era, day) = ((days + 719_468) / 146_097, (days + 719_468) % 146_097);
        let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
        let day = day - (365 * year + year / 4 - year / 100);
        // Five months from March on have 153 days, and so have the next five.
        let month = (5 * day + 2) / 153;
        let (day, month) = (day - (153 * month + 2) / 5 + 1, if month < 10 { month + 3 } else { month - 9 });
        let year = era * 400 + year + u64::from(month <= 2);
        let (hour, minute, second, ms) = (second / 3600, second / 60 % 60, second % 60, since.subsec_millis());
        write!(f, "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{ms:03}Z")
    }
}

/// Text that grows to a limit, with characters escaped that are not printable, or that would end a quotation.
struct Escaped<'a> {
    text: &'a mut String,
    /// Characters that may still be added.
    left: usize,
    is_quoted: bool,
}

impl Write for Escaped<'_> {
    /// An error when the limit is reached, so that nobody formats what is dropped.
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for char in text.chars() {
            if self.left == 0 {
                self.text.push('…');
                return Err(fmt::Error);
            }
            self.left -= 1;
            match char {
                '"' | '\\' if !self.is_quoted => self.text.push(char),
                '\'' => self.text.push(char),
                _ => self.text.extend(char.escape_debug()),
            }
        }
        Ok(())
    }
}

/// Writes an event's fields: the message as it is, then the others as `name=value`, with quotes where they are needed.
struct Fields<'a>(&'a mut String);

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            // An error means that it was cut off.
            let _ = write!(Escaped { text: self.0, left: LINE, is_quoted: false }, "{value:?}");
            return;
        }
        let mut text = String::new();
        let _ = write!(Escaped { text: &mut text, left: FIELD, is_quoted: true }, "{value:?}");
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-+_.:/%".contains(&byte);
        let quote = if !text.is_empty() && text.bytes().all(is_plain) { "" } else { "\"" };
        let _ = write!(self.0, " {}={quote}{text}{quote}", field.name());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }
}

/// A line of at most [`LINE`] bytes, its end included.
fn finished(mut line: String) -> String {
    if line.len() >= LINE {
        let end = (0..=LINE - 1 - '…'.len_utf8()).rev().find(|&at| line.is_char_boundary(at)).unwrap_or(0);
        line.truncate(end);
        line.push('…');
    }
    line.push('\n');
    line
}

/// The lines of one kind in this window.
#[derive(Clone, Copy, Debug)]
struct Kind {
    name: &'static str,
    level: Level,
    since: Instant,
    lines: u64,
    /// Those that were not written.
    more: u64,
}

#[derive(Debug, Default)]
struct Queue {
    lines: VecDeque<String>,
    /// Lines that found it full.
    lost: u64,
    kinds: HashMap<Identifier, Kind>,
    is_writing: bool,
    is_over: bool,
}

impl Queue {
    /// Whether a line of this kind is written. If not, it is counted (L3).
    fn admits(&mut self, of: &'static Metadata<'static>, form: Form, now: Instant) -> bool {
        self.end_windows(form, now);
        let new = Kind { name: of.name(), level: *of.level(), since: now, lines: 0, more: 0 };
        let kind = self.kinds.entry(of.callsite()).or_insert(new);
        let is_admitted = kind.lines < BURST;
        *(if is_admitted { &mut kind.lines } else { &mut kind.more }) += 1;
        is_admitted
    }

    /// Forgets windows that are over, and says how many lines were left out in them. As many kinds are known as the
    /// program has places that log, so this is short.
    fn end_windows(&mut self, form: Form, now: Instant) {
        let over: Vec<Kind> =
            self.kinds.extract_if(|_, kind| now - kind.since >= WINDOW).map(|(_, kind)| kind).collect();
        for Kind { name, level, more, .. } in over.into_iter().filter(|kind| kind.more > 0) {
            let mut line = String::new();
            form.begin(level, &mut line);
            let _ = write!(line, "… {more} more like this: {name}");
            self.push(line);
        }
    }

    fn push(&mut self, line: String) {
        match self.lines.len() < QUEUE {
            true => self.lines.push_back(finished(line)),
            false => self.lost += 1,
        }
    }

    /// The next line, or how many were lost.
    fn next(&mut self, form: Form) -> Option<String> {
        let line = self.lines.pop_front();
        if line.is_none() && self.lost > 0 {
            let (mut line, lost) = (String::new(), std::mem::take(&mut self.lost));
            form.begin(Level::WARN, &mut line);
            let _ = write!(line, "{lost} lines are missing here: standard error did not take them in time");
            return Some(finished(line));
        }
        line
    }
}

/// The queue and its thread's signals.
#[derive(Debug)]
struct Sink {
    form: Form,
    most: LevelFilter,
    queue: Mutex<Queue>,
    /// There is something to write.
    news: Condvar,
    /// All is written.
    rest: Condvar,
}

impl Sink {
    /// No code panics while it holds the lock.
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes lines until the end.
    fn write(&self) {
        let mut queue = self.queue();
        loop {
            if let Some(line) = queue.next(self.form) {
                queue.is_writing = true;
                drop(queue);
                let is_written = put(line.as_bytes());
                queue = self.queue();
                queue.is_writing = false;
                queue.lost += u64::from(!is_written);
                if is_written || !queue.lines.is_empty() {
                    continue;
                }
            }
            self.rest.notify_all();
            if queue.is_over {
                return;
            }
            let has_more = queue.kinds.values().any(|kind| kind.more > 0);
            queue = match has_more {
                false => self.news.wait(queue).unwrap_or_else(PoisonError::into_inner),
                true => self.news.wait_timeout(queue, WINDOW).unwrap_or_else(PoisonError::into_inner).0,
            };
            queue.end_windows(self.form, Instant::now());
        }
    }
}

/// Writes a line to standard error. False if that is closed.
fn put(mut line: &[u8]) -> bool {
    // Not by `io::stderr`, whose lock would be held while this waits.
    let stderr = io::stderr();
    let stderr = stderr.as_fd();
    while !line.is_empty() {
        match rustix::io::write(stderr, line) {
            Ok(count) => line = &line[count..],
            Err(Errno::INTR) => {}
            // Somebody who shares it made it non-blocking.
            Err(Errno::AGAIN) => {
                let _ = poll(&mut [PollFd::from_borrowed_fd(stderr, PollFlags::OUT)], None);
            }
            Err(_) => return false,
        }
    }
    true
}

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= self.0.most
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(self.0.most)
    }

    fn event(&self, event: &Event<'_>) {
        let Sink { form, news, .. } = &*self.0;
        if !self.0.queue().admits(event.metadata(), *form, Instant::now()) {
            // The thread says how many, when the window is over.
            return news.notify_one();
        }
        let mut line = String::with_capacity(160);
        form.begin(*event.metadata().level(), &mut line);
        event.record(&mut Fields(&mut line));
        self.0.queue().push(line);
        news.notify_one();
    }

    // There are no spans: an event names its client.
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// Hands events to the queue.
struct Log(Arc<Sink>);

/// Writes the log until it is dropped, which waits a second at most for the last lines.
pub(super) struct Logging(Arc<Sink>);

impl Logging {
    /// Begins. In a program that has given `tracing` a subscriber of its own, that one gets the events.
    ///
    /// # Errors
    /// What the system says about a new thread.
    pub(super) fn start(level: LogLevel) -> io::Result<Self> {
        let (form, most) = (Form::of_stderr(), level.filter());
        let (queue, news, rest) = (Mutex::default(), Condvar::new(), Condvar::new());
        let sink = Arc::new(Sink { form, most, queue, news, rest });
        let theirs = Arc::clone(&sink);
        thread::Builder::new().name("crypt-log".to_owned()).spawn(move || theirs.write())?;
        let _ = tracing::subscriber::set_global_default(Log(Arc::clone(&sink)));
        Ok(Self(sink))
    }
}

impl Drop for Logging {
    fn drop(&mut self) {
        let mut queue = self.0.queue();
        queue.is_over = true;
        // All windows end here.
        queue.end_windows(self.0.form, Instant::now() + WINDOW);
        self.0.news.notify_all();
        let has_more = |queue: &mut Queue| queue.is_writing || !queue.lines.is_empty();
        // A thread that waits for standard error ends with the program.
        let _ = self.0.rest.wait_timeout_while(queue, FAREWELL, has_more);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Logs into a queue that nobody writes.
    fn logged(form: Form, act: impl FnOnce()) -> Vec<String> {
        let (queue, news, rest) = (Mutex::default(), Condvar::new(), Condvar::new());
        let sink = Arc::new(Sink { form, most: LevelFilter::INFO, queue, news, rest });
        tracing::subscriber::with_default(Log(Arc::clone(&sink)), act);
        let mut queue = sink.queue();
        std::iter::from_fn(|| queue.next(form)).collect()
    }

    #[test]
    fn times_are_utc() {
        let at = |seconds: u64, ms: u64| Utc(UNIX_EPOCH + Duration::from_millis(seconds * 1000 + ms)).to_string();
        // As `date -u --date=@SECONDS` has them.
        assert_eq!(at(0, 0), "1970-01-01T00:00:00.000Z");
        assert_eq!(at(951_782_399, 999), "2000-02-28T23:59:59.999Z");
        assert_eq!(at(951_782_400, 1), "2000-02-29T00:00:00.001Z");
        assert_eq!(at(951_868_800, 0), "2000-03-01T00:00:00.000Z");
        assert_eq!(at(1_795_779_901, 0), "2026-11-27T11:45:01.000Z");
        assert_eq!(at(4_107_542_400, 0), "2100-03-01T00:00:00.000Z");
        assert_eq!(at(1_735_689_599, 0), "2024-12-31T23:59:59.000Z");
    }

    #[test]
    fn an_event_is_one_line_with_its_fields() {
        let act = || {
            tracing::warn!(name: "read failed", at = 4096, what = "a \"b\"", path = %"/dev/sda1", none = "", "no {}", 7);
            tracing::debug!("not wanted");
        };
        let lines = logged(Form::Journal, act);
        assert_eq!(lines, ["<4>no 7 at=4096 what=\"a \\\"b\\\"\" path=/dev/sda1 none=\"\"\n"]);
        let lines = logged(Form::Plain, act);
        let (time, rest) = lines[0].split_once(' ').unwrap();
        assert!(time.len() == 24 && time.ends_with('Z'), "{time}");
        assert!(rest.starts_with("WARN  no 7 at=4096 "), "{rest}");
    }

    #[test]
    fn hostile_text_is_escaped_and_cut_off() {
        let hostile = "x\n<0>all is lost\r\u{1b}[2J\0\u{202e}\u{7f}\u{9b}\"\\";
        let lines = logged(Form::Journal, || {
            tracing::info!(name = hostile, "{hostile}");
            tracing::info!(name = "ä".repeat(100_000), "{}", "ö".repeat(100_000));
            let shown = format_args!("{hostile}{hostile}").to_string();
            tracing::info!(a = %shown, b = ?shown, "three");
        });
        assert_eq!(lines.len(), 3);
        for line in &lines {
            assert!(line.len() <= LINE && line.starts_with("<6>"), "{line:?}");
            let rest = line[3..].strip_suffix('\n').unwrap();
            let is_plain = |char: char| char.escape_debug().count() == 1 || "\"'\\".contains(char);
            assert!(rest.chars().all(is_plain), "{line:?}");
        }
        assert!(lines[0].contains(r#"name="x\n<0>all is lost\r\u{1b}[2J\0\u{202e}\u{7f}\u{9b}\"\\""#), "{}", lines[0]);
        assert!(lines[1].ends_with("…\n"), "{}", lines[1]);
    }

    #[test]
    fn a_flood_of_one_kind_becomes_a_number_and_other_kinds_are_still_said() {
        fn flood(count: u64) {
            for number in 0..count {
                tracing::info!(name: "client gone", number, "gone");
            }
        }
        let sink = |lines: &[String]| lines.iter().filter(|line| line.contains("gone number")).count() as u64;
        let lines = logged(Form::Journal, || {
            flood(BURST + 1000);
            tracing::error!(name: "disk failed", "the disk");
        });
        // On a machine that stops for a second here, a second window begins.
        assert!(sink(&lines) >= BURST && sink(&lines) < BURST + 1000, "{}", lines.len());
        assert!(lines.iter().any(|line| line == "<3>the disk\n"));

        let mut queue = Queue::default();
        let (start, of) = (Instant::now(), kind());
        let admitted = (0..1000).filter(|_| queue.admits(of, Form::Journal, start)).count() as u64;
        assert_eq!((admitted, queue.lines.len()), (BURST, 0));
        assert!(!queue.admits(of, Form::Journal, start + WINDOW / 2), "the window is not over");
        assert!(queue.admits(of, Form::Journal, start + WINDOW));
        assert_eq!(queue.lines, ["<6>… 981 more like this: a kind\n"]);
        // Nothing is said about a window in which nothing was left out.
        queue.end_windows(Form::Journal, start + 2 * WINDOW);
        assert_eq!((queue.lines.len(), queue.kinds.len()), (1, 0));
    }

    /// The description of an event that is not logged.
    fn kind() -> &'static Metadata<'static> {
        static KIND: Mutex<Option<&'static Metadata<'static>>> = Mutex::new(None);
        struct Catch;
        impl Subscriber for Catch {
            fn enabled(&self, _: &Metadata<'_>) -> bool {
                true
            }
            fn event(&self, event: &Event<'_>) {
                *KIND.lock().unwrap() = Some(event.metadata());
            }
            fn new_span(&self, _: &Attributes<'_>) -> Id {
                Id::from_u64(1)
            }
            fn record(&self, _: &Id, _: &Record<'_>) {}
            fn record_follows_from(&self, _: &Id, _: &Id) {}
            fn enter(&self, _: &Id) {}
            fn exit(&self, _: &Id) {}
        }
        tracing::subscriber::with_default(Catch, || tracing::info!(name: "a kind", "it"));
        KIND.lock().unwrap().unwrap()
    }

    #[test]
    fn a_full_queue_loses_lines_and_says_how_many() {
        let mut queue = Queue::default();
        (0..QUEUE + 5).for_each(|number| queue.push(number.to_string()));
        let lines: Vec<_> = std::iter::from_fn(|| queue.next(Form::Journal)).collect();
        assert_eq!(lines.len(), QUEUE + 1);
        assert!(lines[QUEUE].starts_with("<4>5 lines are missing here"), "{}", lines[QUEUE]);
        assert!(lines.iter().all(|line| line.ends_with('\n')));
    }
}
