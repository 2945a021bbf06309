//! What a copy says: progress while it runs, on a terminal, and three lines when it is done.
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use pagemill::Backend;
use serde::Serialize;

use super::files::Fate;
use super::pages::Tally;
use super::{AllocForm, IoTally};
use crate::failure::printable;

/// A bar on standard error, when that is a terminal.
pub(crate) struct Progress(ProgressBar);

impl Progress {
    pub(crate) fn new(size: Option<u64>) -> Self {
        if !io::stderr().is_terminal() {
            return Self(ProgressBar::hidden());
        }
        let (bar, template) = match size {
            Some(size) => {
                (ProgressBar::new(size), "[{elapsed}] {wide_bar} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left")
            }
            None => (ProgressBar::no_length(), "[{elapsed}] {bytes}, {bytes_per_sec}"),
        };
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        Self(bar)
    }

    pub(crate) fn set(&self, bytes: u64) {
        self.0.set_position(bytes);
    }

    pub(crate) fn clear(&self) {
        self.0.finish_and_clear();
    }
}

/// A copy that is done.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) bytes: u64,
    pub(crate) data_bytes: u64,
    pub(crate) hole_bytes: u64,
    pub(crate) holes: u64,
    /// From the first part to the last; without naming and syncing.
    pub(crate) time: Duration,
    pub(crate) io: &'static str,
    /// Why io_uring was not used although it might have been.
    pub(crate) fallback: Option<String>,
    pub(crate) alloc: AllocForm,
    pub(crate) batch: usize,
    pub(crate) backend: Backend,
    pub(crate) tally: Tally,
    pub(crate) calls: IoTally,
    /// Acquisitions that failed on purpose.
    pub(crate) faults: u64,
    pub(crate) fate: Fate,
}

/// The report as a JSON object. The names are part of the program's interface.
#[derive(Serialize)]
struct Json<'r> {
    bytes: u64,
    data_bytes: u64,
    hole_bytes: u64,
    holes: u64,
    seconds: f64,
    gib_per_s: f64,
    io: &'r str,
    io_fallback: Option<&'r str>,
    alloc: AllocForm,
    batch: usize,
    backend: String,
    alloc_calls: u64,
    pages: u64,
    pages_per_alloc_call: f64,
    alloc_ns_per_page: f64,
    iovec_entries: u64,
    reads: u64,
    writes: u64,
    faults: u64,
    source: &'r str,
}

impl Report {
    /// Data per second: holes are not moved.
    fn gib_per_s(&self) -> f64 {
        ratio(self.data_bytes as f64 / (1u64 << 30) as f64, self.time.as_secs_f64())
    }

    fn pages_per_call(&self) -> f64 {
        ratio(self.tally.pages as f64, self.tally.calls as f64)
    }

    fn alloc_ns_per_page(&self) -> f64 {
        ratio(self.tally.time.as_nanos() as f64, self.tally.pages as f64)
    }

    /// What was copied, how fast, and what the pages cost.
    pub(crate) fn text(&self) -> String {
        let holes = match self.holes {
            0 => "no holes".to_owned(),
            1 => format!("1 hole of {} bytes", self.hole_bytes),
            n => format!("{n} holes of {} bytes", self.hole_bytes),
        };
        let fallback = match &self.fallback {
            Some(why) => format!(" (no io_uring: {why})"),
            None => String::new(),
        };
        let form = match self.alloc {
            AllocForm::Bulk => "bulk",
            AllocForm::Single => "single",
        };
        let pages = match self.tally.pages {
            0 => "no page was needed".to_owned(),
            pages => format!(
                "{} in {} I/O vector {}; {form}: {:.1} an allocation call,\n{:.1} ns a page out and in",
                counted(pages, "page"),
                self.tally.entries,
                if self.tally.entries == 1 { "entry" } else { "entries" },
                self.pages_per_call(),
                self.alloc_ns_per_page(),
            ),
        };
        let faults = match self.faults {
            0 => String::new(),
            n => format!("acquisitions that failed on purpose: {n}\n"),
        };
        format!(
            "copied {}: {} of data, {holes}\n{:.3} s, {:.2} GiB/s by {}{fallback}\n{pages}\n{faults}",
            counted(self.bytes, "byte"),
            self.data_bytes,
            self.time.as_secs_f64(),
            self.gib_per_s(),
            self.io,
        )
    }

    pub(crate) fn json(&self) -> String {
        let json = Json {
            bytes: self.bytes,
            data_bytes: self.data_bytes,
            hole_bytes: self.hole_bytes,
            holes: self.holes,
            seconds: self.time.as_secs_f64(),
            gib_per_s: self.gib_per_s(),
            io: self.io,
            io_fallback: self.fallback.as_deref(),
            alloc: self.alloc,
            batch: self.batch,
            backend: self.backend.to_string(),
            alloc_calls: self.tally.calls,
            pages: self.tally.pages,
            pages_per_alloc_call: self.pages_per_call(),
            alloc_ns_per_page: self.alloc_ns_per_page(),
            iovec_entries: self.tally.entries,
            reads: self.calls.reads,
            writes: self.calls.writes,
            faults: self.faults,
            source: match self.fate {
                Fate::Unchanged => "unchanged",
                Fate::Grew { .. } => "grew",
                Fate::Written => "written",
            },
        };
        // Numbers and strings: nothing in it can fail to be written as JSON.
        format!("{}\n", serde_json::json!(json))
    }

    /// Says what the user should know about a copy that is whole.
    pub(crate) fn warn(&self, source: &Path) {
        let source = printable(&source.display().to_string());
        let text = match self.fate {
            Fate::Unchanged => return,
            Fate::Grew { bytes } => {
                format!("{source}: it grew by {bytes} bytes while it was copied; the copy has its first {}", self.bytes)
            }
            Fate::Written => {
                format!("{source}: somebody wrote to it while it was copied; the copy may mix old and new contents")
            }
        };
        let _ = writeln!(io::stderr(), "pagemill: copy: {text}");
    }
}

fn counted(n: u64, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") }
}

/// 0 where there is nothing to divide by.
fn ratio(of: f64, by: f64) -> f64 {
    if by > 0.0 { of / by } else { 0.0 }
}
