//! The table `crypt`: in this process, then over NBD, each cell with its spread and what it is to the peers.

use std::io::{self, Write};

use super::{align, plain, wrap};
use crate::published::Published;
use crate::record::{Record, mib_per_s};
use crate::stats::{Interval, Spread, short};
use crate::tables::crypt::{CELLS, Cell, LUKS, NO_ENCRYPTION};

pub(super) fn crypt(out: &mut dyn Write, records: &[Record], published: &Published) -> io::Result<()> {
    writeln!(out, "\ncrypt: an encrypted volume in memory, 512-byte sectors, aes-xts with 512 bits")?;
    writeln!(out, "in this process, one thread; medians of rounds in turns")?;
    let inside = |cell: &Cell| cell.inside;
    part(out, records, inside, &[("malloc", "pagemill-malloc"), ("none", "no-encryption")])?;
    writeln!(out, "{}", wrap("/ malloc, / none: speed against pagemill-malloc, and without encryption"))?;
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
    writeln!(out, "\nover NBD: fio on a unix socket, each server a process, image on tmpfs (LUKS1)")?;
    part(out, records, |cell| cell.served, &[("luks", LUKS), ("none", NO_ENCRYPTION)])?;
    let line = format!(
        "/ luks, / none: speed against {LUKS}, and against {NO_ENCRYPTION}, which does not encrypt; in the rounds that both have"
    );
    writeln!(out, "{}", wrap(&line))
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
    for cell in CELLS {
        let present: Vec<&Record> = records.iter().filter(|record| record.bench == bench(&cell)).collect();
        for (line, record) in present.iter().enumerate() {
            let figure = |ns: f64| short(speed(&cell, ns));
            let ratio = |name: &str| {
                let other = present.iter().find(|other| other.name == name);
                other.and_then(|other| faster(record, other)).map_or("-".to_owned(), short)
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
    writeln!(out, "{}", table.trim_fmt())?;
    for cell in CELLS {
        if let Some(interval) = bulk_to_single(records, bench(&cell)).filter(|interval| interval.sure > 0.0) {
            let Interval { low, high, sure } = interval;
            let line = format!("{}: bulk / single from {low:.3} to {high:.3} ({:.0} % sure)", cell.shown, sure * 100.0);
            writeln!(out, "{}", wrap(&line))?;
        }
    }
    Ok(())
}

/// In the first column: what, how large, how deep, in which unit.
fn brief(cell: &Cell) -> String {
    let what = if cell.is_write { "write" } else { "read" };
    match cell.pages {
        1 => format!("4 KiB {what}, {}: kIOPS", cell.depth),
        _ => format!("1 MiB {what}, {}: MiB/s", cell.depth),
    }
}

/// How much faster `record` is than `other`, by the medians of the turns that both have: some rows go on without the others, and
/// what the machine was like by then says nothing of these.
fn faster(record: &Record, other: &Record) -> Option<f64> {
    let both = record.turns.len().min(other.turns.len());
    let median = |record: &Record| {
        let turns: Vec<f64> = record.turns[..both].iter().map(|turn| turn.total).collect();
        Spread::of(&turns).map(|spread| spread.median)
    };
    Some(median(other)? / median(record)?)
}

/// MiB/s, or thousands of operations a second where an operation is a page.
fn speed(cell: &Cell, ns_a_page: f64) -> f64 {
    if cell.pages == 1 { 1e6 / ns_a_page } else { mib_per_s(ns_a_page) }
}

/// The speed of `bulk` against that of `single`, turn by turn: where the median lies.
pub(crate) fn bulk_to_single(records: &[Record], bench: &str) -> Option<Interval> {
    let turns = |name| records.iter().find(|record| (record.bench, record.name) == (bench, name)).map(|r| &r.turns);
    let (bulk, single) = (turns("pagemill-bulk")?, turns("pagemill-single")?);
    let ratios: Vec<f64> = bulk.iter().zip(single).map(|(bulk, single)| single.total / bulk.total).collect();
    Interval::of(&ratios)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::tests::record;
    use crate::rows::Kind;
    use crate::tables::Sample;

    #[test]
    fn figures_are_speeds_and_ratios_of_speed_within_80_columns() {
        let mut records = vec![
            record("crypt-nbd-write-16", "pagemill-bulk", Kind::Ours, 256, 2000.0),
            record("crypt-nbd-write-16", "pagemill-single", Kind::Ours, 256, 2200.0),
            record("crypt-nbd-write-16", LUKS, Kind::Peer, 256, 5000.0),
            record("crypt-nbd-random-read-32", "pagemill-malloc", Kind::Ours, 1, 8000.0),
            record("crypt-read-16", "no-encryption", Kind::Floor, 256, 400.0),
        ];
        records[0].turns = vec![records[0].turns[0]; 6];
        records[1].turns = vec![records[1].turns[0]; 9];
        let mut out = Vec::new();
        crypt(&mut out, &records, &Published::load().unwrap()).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert!(text.contains("in the rounds that both have"), "{text}");
        let row = |name: &str| {
            let line = text.lines().rev().find(|line| line.contains(name)).unwrap_or_else(|| panic!("{name}: {text}"));
            line[line.find(name).unwrap()..].split_whitespace().map(str::to_owned).collect::<Vec<_>>()
        };
        // 4096 bytes in 2 us are 1953 MiB/s; in half the time twice as many.
        assert_eq!(row("pagemill-bulk "), ["pagemill-bulk", "1953", "977", "3906", "11", "2.50", "-"]);
        assert_eq!(row("pagemill-malloc "), ["pagemill-malloc", "125", "62.5", "250", "11", "-", "-"]);
        assert!(text.contains("16: bulk / single from 1.100 to 1.100 (97 % sure)"), "{text}");
        assert!(text.contains("1402 MiB/s") && text.contains("not of this run"), "{text}");
    }

    #[test]
    fn rows_are_compared_in_the_rounds_that_both_have() {
        let of = |name, kind, totals: &[f64]| {
            let mut record = record("crypt-nbd-write-16", name, kind, 256, totals[0]);
            record.turns = totals.iter().map(|&total| Sample { alloc: None, free: None, total }).collect();
            record.total = Spread::of(totals).unwrap();
            record
        };
        // The machine was twice as fast when one of them went on by itself.
        let ours = of("pagemill-bulk", Kind::Ours, &[400.0, 500.0, 250.0, 250.0, 250.0, 250.0]);
        let peer = of(LUKS, Kind::Peer, &[800.0, 1000.0]);
        assert_eq!(faster(&ours, &peer), Some(2.0));
        assert_eq!(faster(&peer, &ours), Some(0.5));
        assert_eq!(faster(&ours, &of(LUKS, Kind::Peer, &[250.0; 6])), Some(1.0));
    }
}
