//! The figures as one JSON object on a line of its own.
use crate::{FIGURES, Sample, Snapshot};
use serde::ser::{Serialize, Serializer};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// `pagemill top` and other readers rely on these names.
#[derive(serde::Serialize)]
struct Record<'r> {
    pid: u32,
    program: &'r str,
    version: &'static str,
    /// Milliseconds since 1970.
    unix_ms: u64,
    /// Milliseconds since the server started: use it for rates, since it never jumps.
    up_ms: u64,
    figures: Vec<Value>,
}

#[derive(serde::Serialize)]
struct Value {
    name: &'static str,
    kind: &'static str,
    labels: Labels,
    value: u64,
}

struct Labels(Vec<(&'static str, String)>);

impl Serialize for Labels {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, value)| (name, value)))
    }
}

/// One line, including its end.
pub(super) fn line(program: &str, up: Duration, seen: &[Snapshot]) -> Vec<u8> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let figures = FIGURES.iter().flat_map(|figure| {
        let value = |Sample { labels, value }| Value {
            name: figure.name,
            kind: figure.kind.name(),
            labels: Labels(labels),
            value,
        };
        figure.samples(seen).into_iter().map(value)
    });
    let record = Record {
        pid: std::process::id(),
        program,
        version: env!("CARGO_PKG_VERSION"),
        unix_ms: since.as_millis() as u64,
        up_ms: up.as_millis() as u64,
        figures: figures.collect(),
    };
    // Only strings and numbers, and keys that are strings: JSON can represent all of it.
    let mut line = serde_json::to_vec(&record).unwrap_or_else(|error| unreachable!("{error}"));
    line.push(b'\n');
    line
}
