//! `readahead`: a page cache that reads ahead, beside what reads a file today.
//!
//! - *allocation*: how much of a cold read is the allocation of its pages, by the pages of a window (`cold`).
//! - *cold*, *delayed*, *patterns*: a file in nobody's cache, read in sequence and otherwise (`cold`).
//! - *warm*: pages that are cached, on one processor and on two (`warm`).
//! - *hits*: what stays in the cache (`hits`).

pub(crate) mod cold;
pub(crate) mod hits;
pub(crate) mod warm;

use std::rc::Rc;

use crate::Error;
use crate::machine::{pin_to, pin_to_all};
use crate::record::Record;
use crate::rows::Kind;
use crate::rows::readahead::DataFile;
use crate::tables::{Effort, Run};

/// Steps of progress.
pub(crate) const STEPS: usize = 6;

/// The row of the cache that bars are for.
pub(crate) const CACHE: &str = "cache";

/// The rows that read past the system's cache by large requests; the last two, into pages of 2 MiB.
pub(crate) const DIRECT: [&str; 4] = ["direct-1m", "direct-1m-2", "direct-1m-huge", "direct-1m-2-huge"];

/// The sizes of a run.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    /// Pages of the file, all of which are cached for the warm reads.
    pub(crate) warm: usize,
    /// Its first pages, which are read cold.
    pub(crate) cold: usize,
    /// Pages of the delayed sources.
    pub(crate) delayed: usize,
    /// The largest total of *allocation*.
    pub(crate) total: usize,
    /// Rounds of the parts in which a round is a pass over a file.
    pub(crate) passes: usize,
    /// Accesses of a trace, and whether it is run with all its sizes.
    pub(crate) accesses: usize,
    pub(crate) has_all_traces: bool,
}

impl Sizes {
    fn of(run: &Run) -> Sizes {
        match (run.is_full, run.effort == Effort::QUICK) {
            (true, _) => Sizes {
                warm: 1_000_000,
                cold: 1 << 17,
                delayed: 1 << 16,
                total: 1 << 18,
                passes: 5,
                accesses: 400_000,
                has_all_traces: true,
            },
            (false, false) => Sizes {
                warm: 1 << 17,
                cold: 1 << 15,
                delayed: 1 << 14,
                total: 1 << 12,
                passes: 5,
                accesses: 100_000,
                has_all_traces: false,
            },
            (false, true) => Sizes {
                warm: 1 << 15,
                cold: 1 << 14,
                delayed: 1 << 13,
                total: 1 << 8,
                passes: 3,
                accesses: 40_000,
                has_all_traces: false,
            },
        }
    }
}

pub(crate) fn readahead(run: &mut Run) -> Result<Vec<Record>, Error> {
    let sizes = Sizes::of(run);
    run.progress.set_message("readahead: writing a file");
    let data =
        DataFile::new(sizes.warm.max(sizes.cold).max(sizes.total)).map_err(|why| failed("writing a file", why))?;
    run.note(&place_of(&data, sizes));
    let data = Rc::new(data);
    let mut records = Vec::new();
    // The cache's threads inherit where this thread may run.
    unpinned(run, |run| {
        for (message, part) in [
            ("readahead: allocation", cold::allocation as Part),
            ("readahead: cold", cold::cold),
            ("readahead: delayed", cold::delayed),
            ("readahead: patterns", cold::patterns),
        ] {
            run.progress.set_message(message);
            records.extend(part(run, &data, sizes)?);
            run.progress.inc(1);
        }
        Ok(())
    })?;
    run.progress.set_message("readahead: warm");
    records.extend(warm::warm(run, &data, sizes)?);
    run.progress.inc(1);
    drop(data);
    run.progress.set_message("readahead: hits");
    records.extend(hits::hits(run, sizes)?);
    run.progress.inc(1);
    Ok(records)
}

type Part = fn(&mut Run, &Rc<DataFile>, Sizes) -> Result<Vec<Record>, Error>;

/// Lets this thread, and those that it starts, run on every processor meanwhile.
fn unpinned<T>(run: &mut Run, work: impl FnOnce(&mut Run) -> Result<T, Error>) -> Result<T, Error> {
    let cpu = run.machine.main_cpu();
    pin_to_all(&run.machine.allowed).map_err(|error| Error::Pin { cpu, error })?;
    let done = work(run);
    pin_to(cpu).map_err(|error| Error::Pin { cpu, error })?;
    done
}

fn place_of(data: &DataFile, sizes: Sizes) -> String {
    let window =
        data.system_window().map_or_else(String::new, |kib| format!("; the system reads {kib} KiB ahead there"));
    let memory = if data.is_in_memory { ", WHICH IS IN MEMORY" } else { "" };
    format!(
        "the file: {} MiB in {}{memory}, the first {} MiB read cold; removed{window}",
        data.pages >> 8,
        data.place.display(),
        sizes.cold >> 8
    )
}

fn failed(what: &str, why: impl ToString) -> Error {
    Error::Table { table: "readahead", what: what.to_owned(), why: why.to_string() }
}

/// Whether rows of this kind were asked for.
fn is_shown(run: &Run, kind: Kind) -> bool {
    run.rows.iter().any(|row| row.kind == kind)
}
