//! What a watched process says: one JSON object, and what changed from one to the next.
use std::collections::BTreeMap;

use serde::Deserialize;

/// A line of the socket's. What else is in it is not looked at.
#[derive(Debug, Deserialize)]
pub(super) struct Record {
    pub(super) pid: u32,
    pub(super) program: String,
    /// Milliseconds since the process serves.
    pub(super) up_ms: u64,
    pub(super) figures: Vec<Figure>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Figure {
    pub(super) name: String,
    pub(super) kind: Kind,
    pub(super) labels: BTreeMap<String, String>,
    pub(super) value: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Kind {
    Counter,
    Gauge,
}

impl Figure {
    pub(super) fn label(&self, name: &str) -> Option<&str> {
        self.labels.get(name).map(String::as_str)
    }
    /// Of this allocator; None: of none, but of the process.
    pub(super) fn is_of(&self, allocator: Option<&str>) -> bool {
        self.label("allocator") == allocator
    }
}

impl Record {
    /// The allocators that it tells of, in its order.
    pub(super) fn allocators(&self) -> Vec<&str> {
        let mut names = Vec::new();
        for name in self.figures.iter().filter_map(|figure| figure.label("allocator")) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names
    }
    /// A figure's samples of one allocator, or of the process.
    pub(super) fn of<'r>(&'r self, allocator: Option<&'r str>, name: &'r str) -> impl Iterator<Item = &'r Figure> {
        self.figures.iter().filter(move |figure| figure.name == name && figure.is_of(allocator))
    }
    /// The sum of a figure over its other labels. None: there is none.
    pub(super) fn sum(&self, allocator: Option<&str>, name: &str) -> Option<u64> {
        self.of(allocator, name).map(|figure| figure.value).reduce(u64::wrapping_add)
    }
}

/// A record, and the one before it.
pub(super) struct Change {
    pub(super) now: Record,
    pub(super) before: Option<Record>,
}

impl Change {
    /// How much a counter grew in a second. None: nobody knows. A counter that went back began anew: an allocator took
    /// another's place.
    pub(super) fn rate(&self, allocator: Option<&str>, name: &str) -> Option<f64> {
        let before = self.before.as_ref().filter(|before| before.pid == self.now.pid)?;
        let ms = self.now.up_ms.checked_sub(before.up_ms).filter(|ms| *ms > 0)?;
        let (now, then) = (self.now.sum(allocator, name)?, before.sum(allocator, name).unwrap_or(0));
        Some(now.checked_sub(then).unwrap_or(now) as f64 * 1000.0 / ms as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(up_ms: u64, taken: &[u64]) -> Record {
        let figure = |value| {
            let labels = format!(r#"{{"allocator":"a","cpu":"{value}"}}"#);
            format!(r#"{{"name":"taken","kind":"counter","labels":{labels},"value":{value}}}"#)
        };
        let figures: Vec<_> = taken.iter().map(figure).collect();
        let text = format!(r#"{{"pid":1,"program":"p","new":[],"up_ms":{up_ms},"figures":[{}]}}"#, figures.join(","));
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn rates_are_of_sums_and_of_what_began_anew() {
        let rate = |before: Option<Record>, now| Change { now, before }.rate(Some("a"), "taken");
        assert_eq!(rate(None, record(1000, &[5])), None);
        assert_eq!(rate(Some(record(1000, &[1, 2])), record(1500, &[6, 7])), Some(20.0));
        assert_eq!(rate(Some(record(1000, &[100])), record(3000, &[8])), Some(4.0));
        assert_eq!(rate(Some(record(1000, &[])), record(2000, &[8])), Some(8.0));
        assert_eq!(rate(Some(record(1000, &[1])), record(1000, &[8])), None);
        assert_eq!(rate(Some(record(1000, &[1])), record(2000, &[])), None);
    }
}
