//! What `pagemill read --stats` says: the stream, and what the cache counted.
use std::fmt::Write;

use indicatif::{BinaryBytes, HumanCount};
use pagemill::PageCacheStats;
use serde::Serialize;

use super::Engine;

/// A stream that has ended. The names are those of `--json`, which are part of the program's interface.
#[derive(Serialize)]
pub(super) struct Report {
    pub(super) files: u64,
    pub(super) files_failed: u64,
    pub(super) bytes: u64,
    pub(super) seconds: f64,
    pub(super) engine: Engine,
    pub(super) direct: bool,
    /// Bytes of the largest window of readahead.
    pub(super) window: u64,
    #[serde(skip)]
    pub(super) stats: PageCacheStats,
}

/// A figure of the cache: its name in JSON, its text in the table, where it is.
type Row = (&'static str, &'static str, fn(&PageCacheStats) -> u64);

const ROWS: &[Row] = &[
    ("hits", "pages that were in the cache", |stats| stats.hits),
    ("misses", "pages that had to be waited for", |stats| stats.misses),
    ("read", "pages read from files", |stats| stats.read),
    ("read_ahead", "  of them read ahead", |stats| stats.read_ahead),
    ("ahead_unused", "  read ahead, and evicted without a use", |stats| stats.ahead_unused),
    ("windows", "windows of readahead", |stats| stats.windows),
    ("windows_marked", "  begun at a marker, without waiting", |stats| stats.windows_marked),
    ("windows_shortened", "  shortened for lack of memory", |stats| stats.windows_shortened),
    ("reads", "reads of files, each of neighbouring pages", |stats| stats.reads),
    ("reads_failed", "  that failed", |stats| stats.reads_failed),
    ("evicted", "pages evicted", |stats| stats.evicted),
    ("shrinks", "requests of a reclaim for memory", |stats| stats.shrinks),
    ("pages", "pages in the cache at the end", |stats| stats.pages),
    ("limit", "pages that it may have", |stats| stats.limit),
    ("metadata", "bytes of its descriptors and indexes", |stats| stats.metadata),
];

impl Report {
    fn gib_per_s(&self) -> f64 {
        if self.seconds > 0.0 { self.bytes as f64 / (1u64 << 30) as f64 / self.seconds } else { 0.0 }
    }

    /// A table within 80 columns.
    pub(super) fn text(&self) -> String {
        let engine = match self.engine {
            Engine::Plain => "preadv",
            Engine::Uring => "io_uring",
        };
        let past = if self.direct { ", past the system's cache" } else { "" };
        let failed = match self.files_failed {
            0 => String::new(),
            n => format!("{n} of them could not be read to the end\n"),
        };
        let mut text = format!(
            "{} from {} in {:.3} s, {:.2} GiB/s\n{failed}by {engine}{past}, windows up to {}\n\n",
            counted(self.bytes, "byte"),
            counted(self.files, "file"),
            self.seconds,
            self.gib_per_s(),
            BinaryBytes(self.window),
        );
        for (_, what, value) in ROWS {
            // Writing to a string can't fail.
            let _ = writeln!(text, "{what:<44}{:>20}", HumanCount(value(&self.stats)).to_string());
        }
        text
    }

    pub(super) fn json(&self) -> String {
        // It has only numbers and strings, so it can be written as JSON.
        let mut json = serde_json::json!(self);
        json["gib_per_s"] = self.gib_per_s().into();
        for (name, _, value) in ROWS {
            json[*name] = value(&self.stats).into();
        }
        format!("{json}\n")
    }
}

fn counted(n: u64, what: &str) -> String {
    format!("{} {what}{}", HumanCount(n), if n == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_fits_80_columns() {
        let mut report = Report {
            files: 1_000_000,
            files_failed: 1_000_000,
            bytes: u64::from(u32::MAX) << 16,
            seconds: 1e6,
            engine: Engine::Uring,
            direct: true,
            window: 1 << 40,
            stats: PageCacheStats::default(),
        };
        report.stats.read_ahead = 1 << 50;
        let text = report.text();
        text.lines().for_each(|line| assert!(line.chars().count() <= 80, "{line}"));
        let line = text.lines().find(|line| line.contains("of them read ahead")).unwrap();
        assert!(line.ends_with(" 1,125,899,906,842,624"), "{line}");
        let json: serde_json::Value = serde_json::from_str(&report.json()).unwrap();
        assert_eq!((&json["read_ahead"], &json["engine"]), (&(1u64 << 50).into(), &"uring".into()));
        assert_eq!(json["metadata"], 0);
    }
}
