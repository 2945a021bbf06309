//! The table `crypt`: in this process, then over NBD. Each cell has its spread and its ratios to other rows.

use std::io::{self, Write};

use pagemill_harness::published::Published;
use pagemill_harness::record::{Record, mib_per_s};
use pagemill_harness::report::{align, plain, wrap};
use pagemill_harness::stats::{Interval, short};

use crate::{BESIDE, BULK, CELLS, Cell, LARGE, LUKS, NO_ENCRYPTION, SINGLE};

/// 4096-byte pages in a GiB.
const PAGES_A_GIB: f64 = 262_144.0;

pub(crate) fn crypt(out: &mut dyn Write, records: &[Record], published: &Published) -> io::Result<()> {
    writeln!(out, "\ncrypt: an encrypted volume in memory, 512-byte sectors, aes-xts with 512 bits")?;
    writeln!(out, "in this process, one thread; medians of rounds in turns")?;
    let inside = |cell: &Cell| cell.inside;
    part(out, records, inside, &[("single", SINGLE), ("none", "no-encryption")])?;
    for cell in CELLS {
        if let Some(interval) = bulk_to_single(records, cell.inside).filter(|interval| interval.sure > 0.0) {
            let Interval { low, high, sure } = interval;
            let line = format!("{}: bulk / single from {low:.3} to {high:.3} ({:.0} % sure)", cell.shown, sure * 100.0);
            writeln!(out, "{}", wrap(&line))?;
        }
    }
    writeln!(out, "{}", wrap("/ single, / none: speed against pages one by one, and without encryption"))?;
    if let Some(table) = published.table("dm-crypt-2023")
        && let Some([_, before, after]) = table.rows.first().and_then(|row| row.first_chunk())
    {
        let (before, after) = (before.shown(), after.shown());
        let line = format!(
            "* {}, not of this run: {before} one by one, {after} in bulk: {}; {}",
            table.origin, table.title, table.source
        );
        writeln!(out, "{}", wrap(&line))?;
    }
    if !records.iter().any(|record| record.bench.starts_with("crypt-nbd")) {
        return Ok(());
    }
    writeln!(out, "\nover NBD: fio on a unix socket, each server a process, image on tmpfs")?;
    part(out, records, |cell| cell.served, &[("luks", LUKS), ("none", NO_ENCRYPTION)])?;
    let line = format!("/ luks, / none: speed against {LUKS}, and against {NO_ENCRYPTION}, which does not encrypt");
    writeln!(out, "{}", wrap(&line))?;
    let line = format!("all LUKS1, 512-byte sectors, but {LARGE}: LUKS2, 4096-byte sectors");
    writeln!(out, "{}", wrap(&line))?;
    writeln!(out, "\nof the same runs: latency of an operation, and the server's processor time")?;
    costs(out, records)
}

/// Over NBD: how long an operation takes, and what a GiB costs the server.
fn costs(out: &mut dyn Write, records: &[Record]) -> io::Result<()> {
    let mut table = plain(&["", "impl", "p50 us", "p99 us", "CPU s/GiB"].map(str::to_owned));
    for cell in CELLS.into_iter().chain([BESIDE]) {
        for (line, record) in records.iter().filter(|record| record.bench == cell.served).enumerate() {
            let figure = |figure: Option<f64>| figure.map_or("-".to_owned(), short);
            table.add_row([
                if line == 0 { brief_without_unit(&cell) } else { String::new() },
                record.name.to_owned(),
                figure(record.p50_us),
                figure(record.p99_us),
                figure(record.cpu_ns.map(|ns| ns * PAGES_A_GIB / 1e9)),
            ]);
        }
    }
    align(&mut table, 2);
    writeln!(out, "{}", table.trim_fmt())
}

/// All cells of one part: figures, spread, and ratios of speed to two of the rows.
fn part(
    out: &mut dyn Write,
    records: &[Record],
    bench: impl Fn(&Cell) -> &'static str,
    against: &[(&str, &str); 2],
) -> io::Result<()> {
    let titles = ["", "impl", "median", "min", "max", "rounds"].map(str::to_owned);
    let ratios = against.map(|(short, _)| format!("/ {short}"));
    let mut table = plain(&[&titles[..], &ratios].concat());
    for cell in CELLS.into_iter().chain([BESIDE]) {
        let present: Vec<&Record> = records.iter().filter(|record| record.bench == bench(&cell)).collect();
        for (line, record) in present.iter().enumerate() {
            let figure = |ns: f64| short(speed(&cell, ns));
            let ratio = |name: &str| {
                let other = present.iter().find(|other| other.name == name);
                other.map_or("-".to_owned(), |other| short(other.total.median / record.total.median))
            };
            let spread = record.total;
            table.add_row([
                if line == 0 { brief(&cell) } else { String::new() },
                record.name.to_owned(),
                figure(spread.median),
                figure(spread.max),
                figure(spread.min),
                record.runs.to_string(),
                ratio(against[0].1),
                ratio(against[1].1),
            ]);
        }
    }
    align(&mut table, 2);
    writeln!(out, "{}", table.trim_fmt())
}

/// A cell's first column: operation, size, depth and unit.
fn brief(cell: &Cell) -> String {
    format!("{}: {}", brief_without_unit(cell), if cell.pages == 1 { "kIOPS" } else { "MiB/s" })
}

fn brief_without_unit(cell: &Cell) -> String {
    if cell.writers > 0 {
        return format!("4 KiB read, {} writers", cell.writers);
    }
    let what = if cell.is_write { "write" } else { "read" };
    format!("{} {what}, {}", if cell.pages == 1 { "4 KiB" } else { "1 MiB" }, cell.depth)
}

/// MiB/s, or thousands of operations a second if an operation is a page.
fn speed(cell: &Cell, ns_a_page: f64) -> f64 {
    if cell.pages == 1 { 1e6 / ns_a_page } else { mib_per_s(ns_a_page) }
}

/// The confidence interval of the speed of `bulk` divided by that of `single`, turn by turn.
fn bulk_to_single(records: &[Record], bench: &str) -> Option<Interval> {
    let turns = |name| records.iter().find(|record| (record.bench, record.name) == (bench, name)).map(|r| &r.turns);
    let (bulk, single) = (turns(BULK)?, turns(SINGLE)?);
    let ratios: Vec<f64> = bulk.iter().zip(single).map(|(bulk, single)| single.total / bulk.total).collect();
    Interval::of(&ratios)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagemill_harness::record::example as record;
    use pagemill_harness::rounds::Kind;

    #[test]
    fn figures_are_speeds_and_ratios_of_speed_within_80_columns() {
        let mut records = vec![
            record("crypt-nbd-write-16", BULK, Kind::Ours, 256, 2000.0),
            record("crypt-nbd-write-16", LUKS, Kind::Peer, 256, 5000.0),
            record("crypt-nbd-random-read-32", "qemu-nbd", Kind::Peer, 1, 8000.0),
            record("crypt-write-16", BULK, Kind::Ours, 256, 1000.0),
            record("crypt-write-16", SINGLE, Kind::Ours, 256, 1100.0),
            record("crypt-read-16", "no-encryption", Kind::Floor, 256, 400.0),
        ];
        for record in &mut records {
            record.turns = vec![record.turns[0]; 6];
        }
        (records[0].p50_us, records[0].p99_us, records[0].cpu_ns) = (Some(7.5), Some(90.0), Some(1000.0));
        let mut out = Vec::new();
        crypt(&mut out, &records, &Published::load().unwrap()).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        let row = |part: &str, name: &str| {
            let line = part.lines().rev().find(|line| line.contains(name)).unwrap_or_else(|| panic!("{name}: {text}"));
            line[line.find(name).unwrap()..].split_whitespace().map(str::to_owned).collect::<Vec<_>>()
        };
        let (speeds, costs) = text.split_once("of the same runs").unwrap();
        // 4096 bytes in 2 us are 1953 MiB/s.
        assert_eq!(row(speeds, "pagemill-bulk "), ["pagemill-bulk", "1953", "977", "3906", "11", "2.50", "-"]);
        assert_eq!(row(speeds, "qemu-nbd "), ["qemu-nbd", "125", "62.5", "250", "11", "-", "-"]);
        // 262,144 pages at 1 us.
        assert_eq!(row(costs, "pagemill-bulk "), ["pagemill-bulk", "7.50", "90.0", "0.26"]);
        assert_eq!(row(costs, "qemu-nbd "), ["qemu-nbd", "-", "-", "-"]);
        assert!(text.contains("16: bulk / single from 1.100 to 1.100 (97 % sure)"), "{text}");
        assert!(text.contains("1402 MiB/s") && text.contains("not of this run"), "{text}");
    }
}
