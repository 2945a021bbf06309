//! The records of a watched process, a JSON object each, and the change from one to the next.
use std::collections::{BTreeMap, HashMap, HashSet};

use serde::Deserialize;

/// A line from the socket. Other fields are ignored.
#[derive(Debug, Deserialize)]
pub(super) struct Record {
    pub(super) pid: u32,
    pub(super) program: String,
    /// Milliseconds since the process began to serve.
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
    /// Whether it belongs to this allocator; for None, to the process.
    pub(super) fn is_of(&self, allocator: Option<&str>) -> bool {
        self.label("allocator") == allocator
    }
}

impl Record {
    /// The allocators that it describes, in its order.
    pub(super) fn allocators(&self) -> Vec<&str> {
        unique(self.figures.iter().filter_map(|figure| figure.label("allocator")))
    }
    /// The samples of a figure for one allocator, or for the process.
    pub(super) fn of<'r>(&'r self, allocator: Option<&'r str>, name: &'r str) -> impl Iterator<Item = &'r Figure> {
        self.figures.iter().filter(move |figure| figure.name == name && figure.is_of(allocator))
    }
    /// The sum of a figure over its other labels. None without a sample.
    pub(super) fn sum(&self, allocator: Option<&str>, name: &str) -> Option<u64> {
        self.of(allocator, name).map(|figure| figure.value).reduce(u64::wrapping_add)
    }
}

/// The items without repetitions, in their order.
pub(super) fn unique<T: PartialEq>(items: impl Iterator<Item = T>) -> Vec<T> {
    let mut all = Vec::new();
    for item in items {
        if !all.contains(&item) {
            all.push(item);
        }
    }
    all
}

/// A record, and the one before it.
pub(super) struct Change {
    pub(super) now: Record,
    pub(super) before: Option<Record>,
    /// The allocators of which a counter went back: a new allocator has the name, and its counters began at zero.
    anew: HashSet<Option<String>>,
}

impl Change {
    pub(super) fn new(now: Record, before: Option<Record>) -> Self {
        let then = before.iter().flat_map(|before| &before.figures).filter(|figure| figure.kind == Kind::Counter);
        let then: HashMap<_, _> = then.map(|figure| ((&figure.name, &figure.labels), figure.value)).collect();
        let went_back = |now: &&Figure| then.get(&(&now.name, &now.labels)).is_some_and(|then| now.value < *then);
        let anew = now.figures.iter().filter(went_back);
        let anew = anew.map(|figure| figure.label("allocator").map(str::to_owned)).collect();
        Self { now, before, anew }
    }

    /// The growth of a counter per second. None if it cannot be known.
    pub(super) fn rate(&self, allocator: Option<&str>, name: &str) -> Option<f64> {
        let before = self.before.as_ref().filter(|before| before.pid == self.now.pid)?;
        let ms = self.now.up_ms.checked_sub(before.up_ms).filter(|ms| *ms > 0)?;
        let now = self.now.sum(allocator, name)?;
        let is_anew = self.anew.contains(&allocator.map(str::to_owned));
        let then = if is_anew { 0 } else { before.sum(allocator, name).unwrap_or(0) };
        Some(now.saturating_sub(then) as f64 * 1000.0 / ms as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The allocator's counters `taken` and `freed`, each in two parts.
    fn record(up_ms: u64, taken: [u64; 2], freed: [u64; 2]) -> Record {
        let figure = |name: &str, part: usize, value: u64| {
            let labels = format!(r#"{{"allocator":"a","cpu":"{part}"}}"#);
            format!(r#"{{"name":"{name}","kind":"counter","labels":{labels},"value":{value}}}"#)
        };
        let figures = [0, 1].map(|part| [figure("taken", part, taken[part]), figure("freed", part, freed[part])]);
        let figures = figures.concat().join(",");
        serde_json::from_str(&format!(r#"{{"pid":1,"program":"p","new":[],"up_ms":{up_ms},"figures":[{figures}]}}"#))
            .unwrap()
    }

    #[test]
    fn a_rate_is_of_the_sum_and_from_zero_for_a_new_allocator() {
        let rates = |before: Option<Record>, now| {
            let change = Change::new(now, before);
            ["taken", "freed", "none"].map(|name| change.rate(Some("a"), name))
        };
        assert_eq!(rates(None, record(1000, [5, 5], [5, 5])), [None; 3]);
        let before = || Some(record(1000, [1, 2], [10, 10]));
        assert_eq!(rates(before(), record(1500, [6, 7], [10, 11])), [Some(20.0), Some(2.0), None]);
        // One part of one counter went back, though its sum did not: both counters are of a new allocator.
        assert_eq!(rates(before(), record(3000, [0, 8], [40, 40])), [Some(4.0), Some(40.0), None]);
        assert_eq!(rates(before(), record(1000, [8, 8], [40, 40])), [None; 3]);
    }
}
