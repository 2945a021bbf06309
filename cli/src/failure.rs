//! How the program fails: what it was doing, why that did not work, what to do next; and with which exit code.
use std::fmt;
use std::io::{self, Write};
use std::process::ExitCode;

/// A failure, told in one line.
#[derive(Debug)]
pub(crate) struct Failure {
    what: String,
    why: String,
    next: Option<String>,
    left: Option<String>,
    signal: Option<i32>,
    code: u8,
}

impl Failure {
    pub(crate) fn new(what: impl Into<String>, why: impl fmt::Display) -> Self {
        Self { what: what.into(), why: why.to_string(), next: None, left: None, signal: None, code: 1 }
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

    /// What the failure left behind.
    #[must_use]
    pub(crate) fn left(mut self, left: String) -> Self {
        self.left = Some(left);
        self
    }

    /// A signal asked for the end; the program ends by that signal, as its caller expects.
    #[must_use]
    pub(crate) fn by_signal(mut self, signal: i32) -> Self {
        self.signal = Some(signal);
        self
    }

    /// The command line makes no sense: exit code 2.
    #[cfg(feature = "bench")]
    #[must_use]
    pub(crate) fn usage(mut self) -> Self {
        self.code = 2;
        self
    }

    /// Says so on standard error and ends with its code, or by the signal that asked for the end.
    pub(crate) fn report(&self, command: &str) -> ExitCode {
        // With standard error closed there is nobody to tell; the exit code still does.
        let _ = writeln!(io::stderr(), "pagemill: {command}: {}", printable(&self.to_string()));
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

/// Writes to standard output. A reader that went away wants no more: that is no failure.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::new("standard output", said(&error)).next("send it to a file or a terminal that takes it"))
        }
        _ => Ok(()),
    }
}

/// On one line, whatever the names in it hold: control characters are written as Rust escapes them.
pub(crate) fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for char in text.chars() {
        if char.is_control() { shown.extend(char.escape_default()) } else { shown.push(char) }
    }
    shown
}

/// What the system said, without the number that Rust adds.
pub(crate) fn said(error: &io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or(&text).to_owned()
}
