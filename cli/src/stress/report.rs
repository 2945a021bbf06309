//! The result of a run, as a table or as JSON.
use std::fmt::Write;

use serde::Serialize;
use serde_json::Value;

use super::Plan;
use super::common::{Counts, add};

/// What rounds did. The names are part of the program's interface.
#[derive(Default, Serialize)]
pub(super) struct Tally {
    /// Operations by kind; none in tight rounds, which count them with the rest.
    #[serde(skip_serializing_if = "Counts::is_empty")]
    pub(super) ops: Counts,
    #[serde(flatten)]
    pub(super) counts: Counts,
}

/// The counts of an ordinary run, as `--json` and the table name them.
const ROWS: [(&str, &str); 9] = [
    ("pages", "pages handed out"),
    ("signals", "signals"),
    ("handler_pages", "pages handed out in handlers"),
    ("migrations", "migrations"),
    ("drains", "drains from outside"),
    ("forks", "forks"),
    ("exits", "threads that exited"),
    ("faults", "acquisitions failed on purpose"),
    ("restarts", "sections restarted"),
];

impl Tally {
    pub(super) fn add(&mut self, more: &Self) {
        add(&mut self.ops, &more.ops);
        add(&mut self.counts, &more.counts);
    }

    /// A count; 0 if there was nothing to count.
    pub(super) fn get(&self, name: &str) -> u64 {
        self.counts.get(name).copied().unwrap_or(0)
    }

    pub(super) fn all_ops(&self) -> u64 {
        self.ops.values().sum()
    }
}

/// A run that is over.
pub(super) struct Report<'p> {
    pub(super) plan: &'p Plan,
    pub(super) rounds: usize,
    pub(super) seconds: f64,
    pub(super) tally: Tally,
}

impl Report<'_> {
    pub(super) fn json(mut self) -> String {
        #[derive(Serialize)]
        struct Record<'t> {
            seed: u64,
            threads: u32,
            backend: &'static str,
            seconds: Value,
            #[serde(flatten)]
            tally: &'t Tally,
        }
        let Plan { seed, threads, backend, seconds, is_tight, .. } = *self.plan;
        if !is_tight {
            ROWS.iter().for_each(|(name, _)| _ = self.tally.counts.entry(name).or_default());
            self.tally.counts.insert("rounds", self.rounds as u64);
        }
        let seconds = if is_tight { seconds.into() } else { self.seconds.into() };
        let backend = backend.map_or("", |backend| backend.name());
        // It has only numbers and names, so it can be written as JSON.
        let record = serde_json::to_string(&Record { seed, threads, backend, seconds, tally: &self.tally });
        record.map_or(String::new(), |line| line + "\n")
    }

    pub(super) fn table(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let mut row = |name: &str, n: u64| _ = writeln!(text, "  {name:<34}{n:>12}");
        self.tally.ops.iter().for_each(|(name, &n)| row(name, n));
        let rounds = counted(self.rounds);
        let last = if self.plan.is_tight {
            self.tally.counts.iter().for_each(|(name, &n)| row(&name.replace('_', " "), n));
            format!("clean: {rounds} with less memory than was wanted")
        } else {
            ROWS.iter().for_each(|(name, shown)| row(shown, self.tally.get(name)));
            format!("clean: {} operations in {rounds} and {:.1} s", self.tally.all_ops(), self.seconds)
        };
        text + &last + ", each frame with one owner\n"
    }
}

/// `1 round`, `2 rounds`.
pub(super) fn counted(rounds: usize) -> String {
    format!("{rounds} round{}", if rounds == 1 { "" } else { "s" })
}
