//! One result, and its line of JSON.

use std::io::{self, Write};

use serde::Serialize;

use crate::PAGE_BYTES;
use crate::machine::Machine;
use crate::rounds::{Kind, ListOrder, RowName, Sample};
use crate::stats::Spread;

/// What one row did in one cell of a table. Times are nanoseconds a page.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    /// The table, or the part of it: `threads` has several.
    pub bench: &'static str,
    /// The row.
    pub name: &'static str,
    /// Its backend, or `-`.
    pub backend: &'static str,
    /// What it is to the reader.
    pub kind: Kind,
    /// The size: pages, slots or bytes, as the table says.
    pub n: usize,
    /// Allocating; `None` where the halves are not timed separately.
    pub alloc: Option<Spread>,
    /// Freeing.
    pub free: Option<Spread>,
    /// Both halves.
    pub total: Spread,
    /// Rounds.
    pub runs: usize,
    /// The rounds, in order. Rounds at the same index of different rows were taken in the same turn.
    pub turns: Vec<Sample>,
    /// The median over the rounds of the rounds' median latencies, in microseconds; only `crypt` over NBD has it.
    pub p50_us: Option<f64>,
    /// The same of the rounds' 99th percentiles.
    pub p99_us: Option<f64>,
    /// The median of the server's processor time a page, in nanoseconds; only `crypt` over NBD has it.
    pub cpu_ns: Option<f64>,
    /// Free 2 MiB frames, in percent of the ideal; only `churn` has it.
    pub ideal_percent: Option<f64>,
    /// Bytes of memory for each block, itself included; only `dma` has it, where it is known.
    pub bytes_a_block: Option<f64>,
    /// Pages read from the file for each page asked for; only `readahead` has it, where it is known.
    pub fetched: Option<f64>,
    /// Reads that found their page in the cache, in percent; only `readahead` has it.
    pub hit_percent: Option<f64>,
    /// The order of the CPU's list, if the table has several and the row depends on it.
    pub order: Option<ListOrder>,
    /// The random seed, if an order is random.
    pub seed: Option<u64>,
}

impl Record {
    /// A record with a row's time, and nothing else.
    pub fn of(bench: &'static str, row: RowName, n: usize, total: Spread) -> Record {
        let (name, backend, kind) = row;
        Record {
            bench,
            name,
            backend,
            kind,
            n,
            total,
            alloc: None,
            free: None,
            runs: 0,
            turns: Vec::new(),
            p50_us: None,
            p99_us: None,
            cpu_ns: None,
            ideal_percent: None,
            bytes_a_block: None,
            fetched: None,
            hit_percent: None,
            order: None,
            seed: None,
        }
    }

    /// MiB/s, for a table that moves data: `crypt`, and the parts of `readahead` that read a file.
    pub fn mib_per_s(&self) -> Option<f64> {
        let moves = self.bench.starts_with("crypt") || self.bench.starts_with("readahead-cold");
        moves.then(|| mib_per_s(self.total.median))
    }
}

/// Nanoseconds a page as MiB/s.
pub fn mib_per_s(ns_a_page: f64) -> f64 {
    PAGE_BYTES as f64 / f64::from(1 << 20) / (ns_a_page / 1e9)
}

#[derive(Serialize)]
struct Line<'a> {
    bench: &'a str,
    r#impl: &'a str,
    backend: &'a str,
    kind: &'a str,
    n: usize,
    order: Option<&'a str>,
    alloc_ns: Option<f64>,
    free_ns: Option<f64>,
    total_ns: f64,
    runs: usize,
    min_ns: f64,
    max_ns: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    ideal_percent: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes_a_block: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fetched: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    hit_percent: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mib_per_s: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    p50_us: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    p99_us: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu_ns: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    seed: Option<u64>,
    full_states: bool,
    cpu: &'a str,
    kernel: &'a str,
}

/// Writes each record as one object on a line of its own. `min_ns` and `max_ns` belong to `total_ns`.
pub fn write_json(out: &mut dyn Write, records: &[Record], machine: &Machine) -> io::Result<()> {
    for record in records {
        let line = Line {
            bench: record.bench,
            r#impl: record.name,
            backend: record.backend,
            kind: record.kind.label(),
            n: record.n,
            order: record.order.map(ListOrder::label),
            alloc_ns: record.alloc.map(|spread| spread.median),
            free_ns: record.free.map(|spread| spread.median),
            total_ns: record.total.median,
            runs: record.runs,
            min_ns: record.total.min,
            max_ns: record.total.max,
            ideal_percent: record.ideal_percent,
            bytes_a_block: record.bytes_a_block,
            fetched: record.fetched,
            hit_percent: record.hit_percent,
            mib_per_s: record.mib_per_s(),
            p50_us: record.p50_us,
            p99_us: record.p99_us,
            cpu_ns: record.cpu_ns,
            seed: record.seed,
            full_states: machine.has_full_states,
            cpu: &machine.cpu,
            kernel: &machine.kernel,
        };
        serde_json::to_writer(&mut *out, &line)?;
        out.write_all(b"\n")?;
    }
    out.flush()
}

/// A record of one turn, for tests of what shows records.
pub fn example(bench: &'static str, name: &'static str, kind: Kind, n: usize, total: f64) -> Record {
    let backend = if kind == Kind::Ours { "rseq" } else { "-" };
    let spread = Spread { median: total, min: total / 2.0, max: total * 2.0 };
    Record { runs: 11, turns: vec![Sample::whole(total)], ..Record::of(bench, (name, backend, kind), n, spread) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_every_promised_field_and_halves_that_were_not_timed_are_null() {
        let mut burst = example("burst", "pagemill-array", Kind::Ours, 64, 2.0);
        burst.alloc = Spread::of(&[1.5]);
        burst.free = Spread::of(&[0.5]);
        burst.order = Some(ListOrder::Random);
        let batch = example("batch", "glibc", Kind::Peer, 1, 44.0);
        let mut out = Vec::new();
        write_json(&mut out, &[burst, batch], &Machine::unknown()).unwrap();

        let text = String::from_utf8(out).unwrap();
        let lines: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 2);
        for line in &lines {
            for field in [
                "bench", "impl", "backend", "n", "order", "alloc_ns", "free_ns", "total_ns", "runs", "min_ns", "max_ns",
            ] {
                assert!(line.get(field).is_some(), "{field} is missing in {line}");
            }
        }
        assert_eq!((&lines[0]["alloc_ns"], &lines[0]["free_ns"]), (&1.5.into(), &0.5.into()));
        assert_eq!(
            (&lines[0]["min_ns"], &lines[0]["total_ns"], &lines[0]["max_ns"]),
            (&1.0.into(), &2.0.into(), &4.0.into())
        );
        assert!(lines[0]["order"] == "random" && lines[1]["order"].is_null());
        assert!(lines[1]["alloc_ns"].is_null() && lines[1]["free_ns"].is_null());
        assert_eq!(lines[1]["impl"], "glibc");
    }
}
