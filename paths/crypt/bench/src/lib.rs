//! The table `crypt` of `pagemill bench`: an encrypted volume in memory, written and read, twice.
//!
//! - `inside` does it in this process, where only the data path costs time: with pages in bulk, with pages one by one, and without
//!   encryption.
//! - `served` does it by NBD with fio as the client. Each server is a process of its own: `pagemill crypt serve`, and the peers that
//!   are installed.
//!
//! All volumes are LUKS1 with 512-byte sectors, or number their sectors so: the peers know nothing else. One row over NBD is LUKS2
//! with 4096-byte sectors. A record's time is nanoseconds a page, as in every table: the mean time that 4096 bytes took.

mod client;
mod inside;
mod report;
mod served;
mod servers;

use std::time::{Duration, Instant};

use pagemill_harness::bars::Limit::{AtLeast, AtMost};
use pagemill_harness::bars::{Bar, bar, speed, turns_of};
use pagemill_harness::record::Record;
use pagemill_harness::rounds::Effort;
use pagemill_harness::{Error, Run, Table, machine};

use served::{LUKS, NO_ENCRYPTION};

/// The table.
pub const TABLE: Table =
    Table { name: "crypt", steps: 2 * CELLS.len() + 1, measure: crypt, report: report::crypt, bars: volumes };

/// What is done to the volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cell {
    /// The names of its records, in this process and over NBD.
    inside: &'static str,
    served: &'static str,
    /// For people.
    shown: &'static str,
    /// Pages an operation.
    pages: usize,
    /// Operations under way.
    depth: usize,
    is_write: bool,
    is_random: bool,
    /// Clients beside it, each with 1 MiB writes at [`BESIDE_DEPTH`]. Only over NBD.
    writers: usize,
}

/// The first has the shape of a published measurement.
const CELLS: [Cell; 5] = [
    cell("crypt-write-256", "crypt-nbd-write-256", "1 MiB writes, depth 256", 256, 256, true, false),
    cell("crypt-write-16", "crypt-nbd-write-16", "1 MiB writes, depth 16", 256, 16, true, false),
    cell("crypt-read-16", "crypt-nbd-read-16", "1 MiB reads, depth 16", 256, 16, false, false),
    cell("crypt-random-read-32", "crypt-nbd-random-read-32", "4 KiB random reads, depth 32", 1, 32, false, true),
    cell("crypt-random-write-32", "crypt-nbd-random-write-32", "4 KiB random writes, depth 32", 1, 32, true, true),
];

/// How long a small read takes while others write. It has no part in this process.
const BESIDE: Cell = Cell {
    writers: 3,
    ..cell("-", "crypt-nbd-beside-writers", "4 KiB random reads beside 3 writers", 1, 1, false, true)
};
const BESIDE_DEPTH: usize = 4;

const fn cell(
    inside: &'static str,
    served: &'static str,
    shown: &'static str,
    pages: usize,
    depth: usize,
    is_write: bool,
    is_random: bool,
) -> Cell {
    Cell { inside, served, shown, pages, depth, is_write, is_random, writers: 0 }
}

/// The server's row for LUKS2 with 4096-byte sectors.
const LARGE: &str = "pagemill-4096";
/// The server's own row, with one call for all pages of a part; and the row in this process with a call for each page.
const BULK: &str = "pagemill-bulk";
const SINGLE: &str = "pagemill-single";

/// How long to measure.
#[derive(Debug, Clone, Copy)]
struct Plan {
    /// Rounds in this process, and how long each of them lasts.
    rounds: usize,
    round: Duration,
    /// Turns of all servers, at most.
    turns: usize,
    turn: Duration,
    /// Bytes of each server's image.
    image: u64,
    /// Whether the deepest cell and the slowest peer take part.
    is_deep: bool,
    /// After this moment no turn begins, except the first.
    until: Instant,
}

impl Plan {
    fn cells(&self) -> Vec<Cell> {
        CELLS.into_iter().filter(|cell| self.is_deep || cell.depth < 256).collect()
    }

    /// Rounds of this cell in this process. The deepest cell touches 256 MiB of memory before each.
    fn rounds_of(&self, cell: &Cell) -> usize {
        if cell.depth < 256 { self.rounds } else { self.rounds.min(6) }
    }

    fn of(run: &Run<'_>) -> Plan {
        let (full, now, ms) = (Effort::FULL, Instant::now(), Duration::from_millis);
        match run.effort.rounds >= full.rounds {
            true => Plan {
                rounds: full.rounds,
                round: ms(20),
                turns: 6,
                turn: ms(120),
                image: 128 << 20,
                is_deep: true,
                until: now + Duration::from_secs(72),
            },
            false => Plan {
                rounds: run.effort.rounds,
                round: run.effort.round * 10,
                turns: 1,
                turn: ms(40),
                image: 32 << 20,
                is_deep: false,
                until: now + Duration::from_secs(7),
            },
        }
    }
}

fn crypt(run: &mut Run<'_>) -> Result<Vec<Record>, Error> {
    let plan = Plan::of(run);
    let mut records = inside::inside(run, &plan)?;
    // Servers, clients and their threads may run on all processors.
    let _ = machine::pin_to_all(&run.machine.allowed);
    let served = served::served(run, &plan);
    let _ = machine::pin_to(run.machine.main_cpu());
    records.extend(served?);
    Ok(records)
}

fn failed(what: &str, why: impl std::fmt::Display) -> Error {
    Error::Table { table: TABLE.name, what: what.to_owned(), why: why.to_string() }
}

/// The bars of the servers.
fn volumes(records: &[Record]) -> Vec<Bar> {
    let of_luks = |cell| speed(turns_of(records, cell, BULK), turns_of(records, cell, LUKS));
    let of_none = |cell| speed(turns_of(records, cell, BULK), turns_of(records, cell, NO_ENCRYPTION));
    let of_small = |cell| speed(turns_of(records, cell, LARGE), turns_of(records, cell, BULK));
    let p99 = |name| records.iter().find(|record| (record.bench, record.name) == (BESIDE.served, name))?.p99_us;
    let waits = p99(BULK).zip(p99(NO_ENCRYPTION)).map(|(ours, theirs)| ours / theirs);
    let [_, write, read, small_read, small_write] = CELLS.map(|cell| cell.served);
    let bars = [
        bar("NBD, 1 MiB write: speed / nbdkit-luks", of_luks(write), Some(AtLeast(2.0)), None),
        bar("NBD, 1 MiB read: speed / nbdkit-luks", of_luks(read), Some(AtLeast(2.0)), None),
        bar("NBD, 4 KiB read: IOPS / nbdkit-luks", of_luks(small_read), Some(AtLeast(1.5)), None),
        bar("NBD, 4 KiB write: IOPS / nbdkit-luks", of_luks(small_write), Some(AtLeast(1.5)), None),
        bar("NBD, 1 MiB write / no encryption", of_none(write), Some(AtLeast(0.8)), None),
        bar("NBD, 1 MiB read / no encryption", of_none(read), Some(AtLeast(0.95)), None),
        bar("NBD, 4 KiB read / no encryption", of_none(small_read), Some(AtLeast(1.0)), None),
        bar("NBD, 4 KiB write / no encryption", of_none(small_write), Some(AtLeast(1.0)), None),
        bar("NBD, 1 MiB write: 4096 / 512-byte sectors", of_small(write), Some(AtLeast(0.95)), Some(AtLeast(1.0))),
        bar("NBD, 1 MiB read: 4096 / 512-byte sectors", of_small(read), Some(AtLeast(0.95)), Some(AtLeast(1.0))),
        bar("NBD, p99 beside writers / no encryption", waits, Some(AtMost(1.0)), None),
    ];
    bars.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagemill_harness::record::example;
    use pagemill_harness::rounds::{Kind, Sample};

    #[test]
    fn servers_are_judged_by_speed_turn_by_turn() {
        let turns = |name, kind, totals: &[f64]| {
            let mut record = example("crypt-nbd-write-16", name, kind, 256, 1.0);
            record.turns = totals.iter().map(|&total| Sample::whole(total)).collect();
            record
        };
        let records = [
            turns(BULK, Kind::Ours, &[2.0, 4.0, 2.0]),
            turns(LUKS, Kind::Peer, &[5.0, 10.0, 5.0]),
            turns(NO_ENCRYPTION, Kind::Floor, &[1.0, 2.0, 1.0]),
        ];
        let bars = volumes(&records);
        let find = |what: &str| bars.iter().find(|bar| bar.what.starts_with(what));
        let judged = |what: &str| find(what).map(|bar| (bar.figure, bar.bar.unwrap().holds(bar.figure))).unwrap();
        assert_eq!(judged("NBD, 1 MiB write: speed"), (2.5, true));
        assert_eq!(judged("NBD, 1 MiB write / no"), (0.5, false));
        assert!(find("NBD, 1 MiB read").is_none());
        let beside = |name, p99| Record { p99_us: Some(p99), ..example(BESIDE.served, name, Kind::Ours, 1, 1.0) };
        let bars = volumes(&[beside(BULK, 30.0), beside(NO_ENCRYPTION, 20.0)]);
        let [waits] = &bars[..] else { panic!("{bars:?}") };
        assert_eq!((waits.figure, waits.bar.unwrap().holds(waits.figure)), (1.5, false));
    }
}
