//! What a run did, as a table or as JSON.
use std::collections::BTreeMap;
use std::fmt::Write;

use serde::Serialize;

use super::Plan;
use super::tight::Counts;

/// What was done. The names are part of the program's interface.
#[derive(Default, Serialize)]
pub(super) struct Tally {
    pub(super) seconds: f64,
    pub(super) rounds: usize,
    /// Operations by kind.
    pub(super) ops: BTreeMap<&'static str, u64>,
    /// Pages handed out, to whomever.
    pub(super) pages: u64,
    pub(super) signals: u64,
    /// Pages handed out inside of signal handlers.
    pub(super) handler_pages: u64,
    /// Threads that went to another CPU.
    pub(super) migrations: u64,
    /// Drains from outside.
    pub(super) drains: u64,
    pub(super) forks: u64,
    /// Threads that ended, their pages left to others.
    pub(super) exits: u64,
    /// Acquisitions that failed on purpose.
    pub(super) faults: u64,
    /// Sections that were restarted.
    pub(super) restarts: u64,
}

#[derive(Serialize)]
struct Record<'t> {
    seed: u64,
    threads: u32,
    backend: &'static str,
    #[serde(flatten)]
    tally: &'t Tally,
}

impl Tally {
    pub(super) fn add(&mut self, other: &Self) {
        self.rounds += other.rounds;
        for (name, n) in &other.ops {
            *self.ops.entry(name).or_default() += n;
        }
        self.pages += other.pages;
        self.signals += other.signals;
        self.handler_pages += other.handler_pages;
        self.migrations += other.migrations;
        self.drains += other.drains;
        self.forks += other.forks;
        self.exits += other.exits;
        self.faults += other.faults;
    }

    pub(super) fn all_ops(&self) -> u64 {
        self.ops.values().sum()
    }

    pub(super) fn json(&self, plan: &Plan) -> String {
        let backend = plan.backend.map_or("", |backend| backend.name());
        let record = Record { seed: plan.seed, threads: plan.threads, backend, tally: self };
        // Numbers and names alone: there is nothing in it that could not be written.
        serde_json::to_string(&record).map_or(String::new(), |line| line + "\n")
    }

    pub(super) fn table(&self) -> String {
        let mut text = String::new();
        let mut row = |name: &str, n: u64| {
            let _ = writeln!(text, "  {name:<34}{n:>12}");
        };
        self.ops.iter().for_each(|(name, &n)| row(name, n));
        row("pages handed out", self.pages);
        row("signals", self.signals);
        row("pages handed out in handlers", self.handler_pages);
        row("migrations", self.migrations);
        row("drains from outside", self.drains);
        row("forks", self.forks);
        row("threads that exited", self.exits);
        row("acquisitions failed on purpose", self.faults);
        row("sections restarted", self.restarts);
        let (ops, rounds, seconds) = (self.all_ops(), counted(self.rounds), self.seconds);
        let _ = writeln!(text, "clean: {ops} operations in {rounds} and {seconds:.1} s, each frame with one owner");
        text
    }
}

/// What a tight run counted, as a JSON object.
pub(super) fn tight_json(plan: &Plan, counts: &Counts) -> String {
    #[derive(Serialize)]
    struct Tight<'c> {
        seed: u64,
        threads: u32,
        backend: &'static str,
        seconds: u64,
        #[serde(flatten)]
        counts: &'c Counts,
    }
    let backend = plan.backend.map_or("", |backend| backend.name());
    let Plan { seed, threads, seconds, .. } = *plan;
    // Numbers and names alone: there is nothing in it that could not be written.
    serde_json::to_string(&Tight { seed, threads, backend, seconds, counts }).map_or(String::new(), |line| line + "\n")
}

/// The same as a table.
pub(super) fn tight_table(rounds: usize, counts: &Counts) -> String {
    let mut text = String::new();
    for (name, n) in counts {
        let _ = writeln!(text, "  {:<34}{n:>12}", name.replace('_', " "));
    }
    let rounds = counted(rounds);
    let _ = writeln!(text, "clean: {rounds} with less memory than was wanted, each frame with one owner");
    text
}

/// `1 round`, `2 rounds`.
pub(super) fn counted(rounds: usize) -> String {
    format!("{rounds} round{}", if rounds == 1 { "" } else { "s" })
}
