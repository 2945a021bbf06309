//! What a copy prints when it is done.
use std::io::{self, Write};
use std::path::Path;

use serde::Serialize;

use super::files::Fate;
use super::pages::Tally;
use super::{AllocForm, IoTally};
use crate::failure::printable;

/// A copy that is done. The names are those of `--json`, which are part of the program's interface.
#[derive(Serialize)]
pub(crate) struct Report {
    pub(crate) bytes: u64,
    pub(crate) data_bytes: u64,
    pub(crate) hole_bytes: u64,
    pub(crate) holes: u64,
    /// From the first part to the last, without naming and syncing.
    pub(crate) seconds: f64,
    pub(crate) io: &'static str,
    /// Why io_uring was not used, if `--io` allowed it.
    pub(crate) io_fallback: Option<String>,
    pub(crate) alloc: AllocForm,
    pub(crate) batch: usize,
    pub(crate) backend: &'static str,
    #[serde(flatten)]
    pub(crate) tally: Tally,
    #[serde(flatten)]
    pub(crate) calls: IoTally,
    /// Acquisitions that failed on purpose.
    pub(crate) faults: u64,
    #[serde(skip)]
    pub(crate) fate: Fate,
}

impl Report {
    /// Data per second. Holes are not moved, and do not count.
    fn gib_per_s(&self) -> f64 {
        ratio(self.data_bytes as f64 / (1u64 << 30) as f64, self.seconds)
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
        let fallback = match &self.io_fallback {
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
            self.seconds,
            self.gib_per_s(),
            self.io,
        )
    }

    pub(crate) fn json(&self) -> String {
        // It has only numbers and strings, so it can be written as JSON.
        let mut json = serde_json::json!(self);
        json["gib_per_s"] = self.gib_per_s().into();
        json["pages_per_alloc_call"] = self.pages_per_call().into();
        json["alloc_ns_per_page"] = self.alloc_ns_per_page().into();
        json["source"] = match self.fate {
            Fate::Unchanged => "unchanged",
            Fate::Grew { .. } => "grew",
            Fate::Written => "written",
        }
        .into();
        format!("{json}\n")
    }

    /// Warns on standard error if the source changed while it was copied.
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

/// The quotient, or 0 if there is nothing to divide by.
fn ratio(of: f64, by: f64) -> f64 {
    if by > 0.0 { of / by } else { 0.0 }
}
