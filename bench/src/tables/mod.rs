//! The tables, and how they open rows. What they share of measuring (rounds in turns, samples) is in `pagemill-harness`.
//!
//! Every row of a cell is verified before its rounds, and again after them.

pub(crate) mod churn;
pub(crate) mod dma;
pub(crate) mod holes;
pub(crate) mod mempool;
pub(crate) mod mixed;
pub(crate) mod one_thread;
pub(crate) mod orders;
pub(crate) mod page_pool;
pub(crate) mod readahead;
pub(crate) mod threads;
pub(crate) mod total;
pub(crate) mod touch;
mod worker;

use std::ops::{Deref, DerefMut};

#[cfg(test)]
use crate::machine::Machine;
use crate::rows::orders::CONTIG;
use crate::rows::{Kind, Row};
pub(crate) use pagemill_harness::rounds::{
    CellSamples, Effort, Sample, enough, enough_from, in_turns, measured, take_turn, take_turns,
};

/// A run of the harness, and the rows that it was asked for.
pub(crate) struct Run<'a> {
    pub(crate) run: pagemill_harness::Run<'a>,
    pub(crate) rows: &'a [Row],
    /// Whether only the sizes are measured that the first screen and its chart show.
    pub(crate) is_brief: bool,
    /// Whether everything was asked for, however long it takes.
    pub(crate) is_full: bool,
    /// Lines that the table's report ends with.
    pub(crate) notes: Vec<String>,
}

impl<'a> Deref for Run<'a> {
    type Target = pagemill_harness::Run<'a>;
    fn deref(&self) -> &Self::Target {
        &self.run
    }
}

impl DerefMut for Run<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.run
    }
}

impl Run<'_> {
    /// A run without a progress bar.
    #[cfg(test)]
    pub(crate) fn for_test<'a>(machine: &'a Machine, rows: &'a [Row], effort: Effort) -> Run<'a> {
        Run {
            run: pagemill_harness::Run::for_test(machine, effort),
            rows,
            is_brief: false,
            is_full: false,
            notes: Vec::new(),
        }
    }

    /// Whether this row of Pagemill's was asked for, in a table that shows only one backend: the default one, or the
    /// other one if the default was left out.
    pub(crate) fn is_shown_once(&self, name: &str, backend: &str) -> bool {
        let ours = || self.rows.iter().filter(|row| row.kind == Kind::Ours);
        let has_default = ours().any(|row| row.backend == self.backend);
        let is_shown = !has_default || backend == self.backend;
        is_shown && ours().any(|row| (row.name, row.backend) == (name, backend))
    }

    /// The rows of a table's own catalogue that were asked for.
    pub(crate) fn asked_for<N, O>(&self, rows: Vec<Row<N, O>>) -> Vec<Row<N, O>> {
        let name_of = |row: &Row<N, O>| if row.name == CONTIG { "pagemill-single" } else { row.name };
        let is_asked_for =
            |row: &Row<N, O>| self.rows.iter().any(|known| (known.name, known.backend) == (name_of(row), row.backend));
        rows.into_iter().filter(is_asked_for).collect()
    }

    /// Has the table's report say this, too.
    pub(crate) fn note(&mut self, line: &str) {
        self.notes.push(line.to_owned());
    }

    /// Opens a row, or notes why it is absent.
    pub(crate) fn open<N, O>(&mut self, row: &Row<N, O>, need: N) -> Option<O> {
        match (row.open)(need) {
            Ok(opened) => Some(opened),
            Err(reason) => {
                self.note_absent(row.name, row.backend, &reason);
                None
            }
        }
    }

    /// Opens all rows that can be opened.
    pub(crate) fn open_all<'r, N: Copy, O>(&mut self, rows: &'r [Row<N, O>], need: N) -> Vec<Entrant<'r, N, O>> {
        rows.iter().filter_map(|row| Some(Entrant { row, opened: self.open(row, need)? })).collect()
    }
}

/// A row that takes part in a table.
pub(crate) struct Entrant<'r, N, O> {
    pub(crate) row: &'r Row<N, O>,
    pub(crate) opened: O,
}
