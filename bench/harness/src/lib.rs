//! What every table of `pagemill bench` shares, whatever it measures.
//!
//! A table verifies its rows, times them in turns ([`rounds`]), and makes [`Record`](record::Record)s of their samples. It shows these
//! with [`report`] and judges them with [`bars`]. [`machine`] says what the figures were taken on, [`published`] holds the figures of
//! others, [`stats`] the medians and intervals.
//!
//! `pagemill-bench` has the tables of the allocators. A data path has its own in a crate beside it, as a [`Table`] that
//! the program hands to `pagemill_bench::run`. The bench knows no data path, and no data path knows the bench.

pub mod bars;
pub mod machine;
pub mod published;
pub mod record;
pub mod report;
pub mod rounds;
pub mod stats;

use std::io::{self, Write};
use std::path::PathBuf;

pub use rounds::Run;

/// Bytes of a page, and the alignment of each row's addresses.
pub const PAGE_BYTES: usize = 4096;

/// A table that a data path brings.
#[derive(Debug, Clone, Copy)]
pub struct Table {
    /// Its name on the command line.
    pub name: &'static str,
    /// Steps on the bar that shows progress.
    pub steps: usize,
    /// Measures its rows.
    pub measure: fn(&mut Run<'_>) -> Result<Vec<record::Record>, Error>,
    /// Shows them.
    pub report: fn(&mut dyn Write, &[record::Record], &published::Published) -> io::Result<()>,
    /// Judges them.
    pub bars: fn(&[record::Record]) -> Vec<bars::Bar>,
}

/// Why there are no figures.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A name on the command line is neither a table nor a row.
    #[error("{option}: nothing is called `{name}`; there are: {known}")]
    UnknownName {
        /// What was given.
        name: String,
        /// The option it was given to.
        option: &'static str,
        /// The names that exist.
        known: String,
    },
    /// A row that is not in this build.
    #[error("`{name}` is not in this build: build with `--features {feature}` (bench/README.md says what it needs)")]
    NotBuilt {
        /// The row.
        name: String,
        /// The Cargo feature that brings it.
        feature: &'static str,
    },
    /// There is no allocator to measure.
    #[error("can't make an allocator: {0}")]
    NoAllocator(String),
    /// `--only` and `--vs` together select no row, or only tables that have none of the selected rows.
    #[error("--only and --vs together select no row of these tables")]
    NoRows,
    /// A row handed out wrong pages, so its figures would mean nothing.
    #[error("{bench}, N = {n}: {name} ({backend}) {flaw}")]
    Row {
        /// The table.
        bench: &'static str,
        /// The row.
        name: &'static str,
        /// Its backend.
        backend: &'static str,
        /// The number of pages.
        n: usize,
        /// What was wrong.
        flaw: String,
    },
    /// The thread could not be bound to a processor.
    #[error("can't bind a thread to processor {cpu}: {error}")]
    Pin {
        /// The processor.
        cpu: usize,
        /// What the system said.
        error: rustix::io::Errno,
    },
    /// A measuring thread ended early.
    #[error("a measuring thread ended before its table did")]
    WorkerDied,
    /// A signal ended the run. All processes that the run started have ended.
    #[error("{}", signal_hook::low_level::signal_name(*signal).unwrap_or("a signal"))]
    Interrupted {
        /// Its number.
        signal: i32,
    },
    /// Something other than pages failed that a table measures: a server, a client, a volume.
    #[error("{table}: {what}: {why}")]
    Table {
        /// The table.
        table: &'static str,
        /// What was being done.
        what: String,
        /// What is wrong.
        why: String,
    },
    /// Standard output or standard error refused the report.
    #[error("{}: {error}", if *is_stderr { "standard error" } else { "standard output" })]
    Stream {
        /// Which of the two.
        is_stderr: bool,
        /// What the system said.
        error: io::Error,
    },
    /// A report could not be written.
    #[error("can't write {}: {error}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// The options name no two files for the reports.
    #[error("{0}")]
    Outputs(&'static str),
    /// The published figures in this build can't be read.
    #[error("the published figures are damaged: {0}")]
    Published(serde_json::Error),
}

impl Error {
    /// What the user can do about it, if anything.
    ///
    /// ```
    /// use pagemill_harness::Error;
    /// let refused = Error::NotBuilt { name: "rte-mempool".into(), feature: "dpdk" };
    /// assert!(refused.next_step().is_some());
    /// assert_eq!(Error::WorkerDied.next_step(), None);
    /// ```
    pub fn next_step(&self) -> Option<&'static str> {
        match self {
            Error::UnknownName { .. } | Error::NotBuilt { .. } | Error::NoRows => Some("see `pagemill bench --help`"),
            Error::Stream { .. } => Some("send it to a file or a terminal that takes it"),
            Error::Write { .. } => Some("name a file that can be written"),
            Error::NoAllocator(_) => Some("see whether a limit (`ulimit -v`) keeps it from reserving address space"),
            _ => None,
        }
    }
}
