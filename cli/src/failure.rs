//! How the program fails: what it was doing, why that failed, what the user can do next, and the exit code.
use std::fmt;
use std::io::{self, Write};
use std::process::ExitCode;

pub(crate) use pagemill_command::said;

/// The exit code of a command line that makes no sense, as clap has it.
#[cfg(feature = "bench")]
pub(crate) const USAGE: u8 = 2;

/// A failure, reported in one line.
#[derive(Debug)]
pub(crate) struct Failure {
    what: String,
    why: String,
    next: Option<String>,
    left: Option<String>,
    signal: Option<i32>,
    code: u8,
    is_said: bool,
}

impl Failure {
    pub(crate) fn new(what: impl Into<String>, why: impl fmt::Display) -> Self {
        Self { what: what.into(), why: why.to_string(), next: None, left: None, signal: None, code: 1, is_said: false }
    }

    /// What the user can do about it.
    #[must_use]
    pub(crate) fn next(mut self, next: impl Into<String>) -> Self {
        self.next = Some(next.into());
        self
    }

    /// The exit code, where it tells more than that it failed.
    #[cfg(feature = "crypt")]
    #[must_use]
    pub(crate) fn code(mut self, code: u8) -> Self {
        self.code = code;
        self
    }

    /// What is on the disk after the failure.
    #[must_use]
    pub(crate) fn left(mut self, left: String) -> Self {
        self.left = Some(left);
        self
    }

    /// The program was interrupted by this signal, and ends by it, as its caller expects.
    #[must_use]
    pub(crate) fn by_signal(mut self, signal: i32) -> Self {
        self.signal = Some(signal);
        self
    }

    /// Says it now, for a command that goes on. What is returned gives the program its exit code, and is not said again.
    #[must_use]
    pub(crate) fn say(mut self, command: &str) -> Self {
        // If standard error is closed, the exit code has to do.
        let _ = writeln!(io::stderr(), "pagemill: {command}: {}", printable(&self.to_string()));
        self.is_said = true;
        self
    }

    /// Reports the failure on standard error. Returns its exit code, or ends the program by its signal.
    pub(crate) fn report(self, command: &str) -> ExitCode {
        let this = if self.is_said { self } else { self.say(command) };
        this.end()
    }

    fn end(&self) -> ExitCode {
        if let Some(signal) = self.signal {
            let _ = signal_hook::low_level::emulate_default_handler(signal);
        }
        ExitCode::from(self.code)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.what, self.why)?;
        if let Some(next) = &self.next {
            write!(f, "; {next}")?;
        }
        match &self.left {
            Some(left) => write!(f, " ({left})"),
            None => Ok(()),
        }
    }
}

/// Writes to standard output. A reader that has closed it is no failure.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    print_on(text.as_bytes()).map(|_| ())
}

/// Writes to standard output. False: the reader has closed it.
pub(crate) fn print_on(text: &[u8]) -> Result<bool, Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => {
            Err(Failure::new("standard output", said(&error)).next("send it to a file or a terminal that takes it"))
        }
    }
}

/// The text on one line, whatever names it contains: control characters are escaped as Rust escapes them.
pub(crate) fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for char in text.chars() {
        if char.is_control() { shown.extend(char.escape_default()) } else { shown.push(char) }
    }
    shown
}
