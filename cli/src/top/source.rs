//! The connection to the watched process.
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::record::Record;
use crate::failure::{Failure, said};

/// How long to wait for an answer. A stopped process accepts connections and sends nothing.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);
/// The longest answer. A process that sends more does not use `pagemill_watch`.
const ANSWER_MAX: usize = 64 << 20;

/// See the [module](self).
pub(super) struct Source {
    path: PathBuf,
    pub(super) stream: UnixStream,
    /// Bytes that were read and not yet returned as lines.
    come: Vec<u8>,
}

impl Source {
    /// Connects and asks.
    pub(super) fn ask(path: &Path, question: &str) -> Result<Self, Failure> {
        let is_socket = path.metadata().is_ok_and(|found| found.file_type().is_socket());
        let can_not = |error: io::Error| {
            let next = match error.kind() {
                ErrorKind::ConnectionRefused if !is_socket => "give the path of the socket that the program serves",
                ErrorKind::NotFound => "start the program with PAGEMILL_STATS=PATH, or `pagemill stress --stats PATH`",
                ErrorKind::ConnectionRefused => "the process that served it is gone; start it again",
                ErrorKind::PermissionDenied => "only the user who runs the program may watch it; become that user",
                _ => "give the path of the socket that the program serves",
            };
            let why = match error.kind() {
                ErrorKind::NotFound => "no such socket".to_owned(),
                ErrorKind::ConnectionRefused if !is_socket => "is no socket".to_owned(),
                ErrorKind::ConnectionRefused => "nobody answers there".to_owned(),
                _ => said(&error),
            };
            Failure::new(path.display().to_string(), why).next(next)
        };
        let mut stream = UnixStream::connect(path).map_err(can_not)?;
        stream.set_read_timeout(Some(PATIENCE)).map_err(can_not)?;
        stream.set_write_timeout(Some(PATIENCE)).map_err(can_not)?;
        stream.write_all(question.as_bytes()).map_err(can_not)?;
        Ok(Self { path: path.to_owned(), stream, come: Vec::new() })
    }

    /// Sets how long to wait for the next line: `ms`, after which the other end sends it, and [`PATIENCE`].
    pub(super) fn wait_for(&self, ms: u64) -> Result<(), Failure> {
        let time = PATIENCE + Duration::from_millis(ms);
        self.stream.set_read_timeout(Some(time)).map_err(|error| self.no_pagemill(&said(&error)))
    }

    /// Reads until the other end closes.
    pub(super) fn all(mut self) -> Result<String, Failure> {
        while self.read_more(false)? {}
        let text = String::from_utf8(std::mem::take(&mut self.come)).map_err(|_| self.no_pagemill("it is no text"))?;
        match text.strip_prefix("error: ") {
            Some(why) => Err(self.no_pagemill(why.trim_end())),
            None if text.is_empty() => Err(self.no_pagemill("it closes without a word")),
            None => Ok(text),
        }
    }

    /// The next line, if all of it has come.
    pub(super) fn line(&mut self) -> Option<Vec<u8>> {
        let end = self.come.iter().position(|&byte| byte == b'\n')?;
        Some(self.come.drain(..=end).collect())
    }

    /// Waits for the next line. None: the other end has closed.
    pub(super) fn next_line(&mut self) -> Result<Option<Vec<u8>>, Failure> {
        loop {
            if let Some(line) = self.line() {
                return Ok(Some(line));
            }
            if !self.read_more(true)? {
                return Ok(None);
            }
        }
    }

    /// Reads once, and waits if nothing has come. False: the other end has closed.
    pub(super) fn read_more(&mut self, is_watching: bool) -> Result<bool, Failure> {
        let mut bytes = [0; 1 << 16];
        match self.stream.read(&mut bytes) {
            Ok(0) => return Ok(false),
            Ok(read) => self.come.extend_from_slice(&bytes[..read]),
            Err(error) if matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) => {
                return Ok(false);
            }
            // A signal came: the caller decides what next.
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                let why = format!("no {} for {} s", if is_watching { "news" } else { "answer" }, PATIENCE.as_secs());
                let next = "is the process stopped (`kill -CONT`), or does another kind of program serve there?";
                return Err(Failure::new(self.path.display().to_string(), why).next(next));
            }
            Err(error) => return Err(self.no_pagemill(&said(&error))),
        }
        match self.come.len() > ANSWER_MAX {
            true => Err(self.no_pagemill("it sends without an end")),
            false => Ok(true),
        }
    }

    /// Parses a line.
    pub(super) fn record(&self, line: &[u8]) -> Result<Record, Failure> {
        if let Some(why) = line.strip_prefix(b"error: ") {
            return Err(self.no_pagemill(String::from_utf8_lossy(why).trim_end()));
        }
        serde_json::from_slice(line).map_err(|error| self.no_pagemill(&error.to_string()))
    }

    fn no_pagemill(&self, why: &str) -> Failure {
        // The answer may hold escape codes, which a terminal must not obey.
        let why: String = why.chars().map(|c| if c.is_control() { ' ' } else { c }).take(200).collect();
        let next = "does a program of another version, or of another kind, serve there?";
        Failure::new(format!("{}: an answer that makes no sense", self.path.display()), why).next(next)
    }
}
