//! `crypt`: an encrypted volume in memory, written and read.
//!
//! Twice: `inside`, in this process, where nothing but the data path costs anything, with pages in bulk and one by one, and
//! without encryption; and `served`, by NBD to fio, each server a process of its own: `pagemill crypt serve`, and the peers that are installed. All volumes
//! are LUKS1 with 512-byte sectors, or numbered as such: the peers know nothing else.
//!
//! A record's time is nanoseconds a page, as in every table: 4096 bytes by the time that they took on average.

mod client;
mod inside;
mod served;
mod servers;

use std::time::{Duration, Instant};

use crate::Error;
use crate::record::Record;
use crate::rows::Kind;
use crate::tables::Run;

pub(crate) use served::{LUKS, NO_ENCRYPTION};

/// Steps on the bar that shows progress.
pub(crate) const STEPS: usize = 2 * CELLS.len();

/// What is done to the volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cell {
    /// What records in this process and over NBD are called.
    pub(crate) inside: &'static str,
    pub(crate) served: &'static str,
    /// For people.
    pub(crate) shown: &'static str,
    /// Pages an operation.
    pub(crate) pages: usize,
    /// Operations under way.
    pub(crate) depth: usize,
    pub(crate) is_write: bool,
    pub(crate) is_random: bool,
}

/// The first is the shape of what was published.
pub(crate) const CELLS: [Cell; 5] = [
    cell("crypt-write-256", "crypt-nbd-write-256", "1 MiB writes, depth 256", 256, 256, true, false),
    cell("crypt-write-16", "crypt-nbd-write-16", "1 MiB writes, depth 16", 256, 16, true, false),
    cell("crypt-read-16", "crypt-nbd-read-16", "1 MiB reads, depth 16", 256, 16, false, false),
    cell("crypt-random-read-32", "crypt-nbd-random-read-32", "4 KiB random reads, depth 32", 1, 32, false, true),
    cell("crypt-random-write-32", "crypt-nbd-random-write-32", "4 KiB random writes, depth 32", 1, 32, true, true),
];

const fn cell(
    inside: &'static str,
    served: &'static str,
    shown: &'static str,
    pages: usize,
    depth: usize,
    is_write: bool,
    is_random: bool,
) -> Cell {
    Cell { inside, served, shown, pages, depth, is_write, is_random }
}

/// The server's own way, which asks for all pages of a part with one call; and in this process the same one by one.
pub(crate) const BULK: &str = "pagemill-bulk";
pub(crate) const SINGLE: &str = "pagemill-single";

/// How much measuring.
#[derive(Debug, Clone, Copy)]
struct Plan {
    /// Rounds in this process, and what each of them lasts.
    rounds: usize,
    round: Duration,
    /// Turns of all servers, at most.
    turns: usize,
    turn: Duration,
    /// Bytes of each server's image.
    image: u64,
    /// Whether the deepest cell and the slowest peer take part.
    is_deep: bool,
    /// When no turn but the first begins.
    until: Instant,
}

impl Plan {
    fn cells(&self) -> Vec<Cell> {
        CELLS.into_iter().filter(|cell| self.is_deep || cell.depth < 256).collect()
    }

    /// Rounds of this cell in this process. The deepest has 256 MiB of memory to touch before each.
    fn rounds_of(&self, cell: &Cell) -> usize {
        if cell.depth < 256 { self.rounds } else { self.rounds.min(6) }
    }

    fn of(run: &Run) -> Plan {
        let (full, now, ms) = (crate::tables::Effort::FULL, Instant::now(), Duration::from_millis);
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

pub(crate) fn crypt(run: &mut Run) -> Result<Vec<Record>, Error> {
    let plan = Plan::of(run);
    let mut records = inside::inside(run, &plan)?;
    // Servers, clients and their threads run wherever the system likes.
    let _ = crate::machine::pin_to_all(&run.machine.allowed);
    let served = served::served(run, &plan);
    let _ = crate::machine::pin_to(run.machine.main_cpu());
    records.extend(served?);
    Ok(records)
}

/// Is anything but Pagemill asked for?
fn is_compared(run: &Run) -> bool {
    run.rows.iter().any(|row| row.kind != Kind::Ours)
}

fn failed(what: &str, why: impl std::fmt::Display) -> Error {
    Error::Crypt { what: what.to_owned(), why: why.to_string() }
}
