//! What a run without options prints: one table of at most 30 lines with its notes.
//!
//! A user asks how much faster Pagemill is than what the program has now, how near to the floor, whether it scales,
//! whether it stays so when nothing is in order, and whether memory stays whole. So the columns are for lists in random
//! order, and the one best case is called so. General allocators and fixed pools stand apart: they do other jobs.

use std::io::{self, Write};

use super::{align, plain, wrap};
use crate::record::Record;
use crate::rows::Kind;
use crate::rows::mixed::{REQUESTS, SENT_PERCENT};
use crate::stats::short;
use crate::subject::{HAND_OVER_PAGES, ListOrder};
use crate::tables::one_thread::{BURST_MOST, SCATTER_PAGES};
use pagemill_harness::rounds::Rounds;

/// The allocators that hand out any size.
const MALLOCS: [&str; 4] = ["glibc", "mimalloc", "jemalloc", "snmalloc"];

/// The row with which others are compared.
const OURS: &str = "pagemill-array";

/// A row's name and backend.
type Name<'a> = (&'a str, &'a str);

/// One column: its title, its figure for a row, and how that is shown.
struct Column {
    title: &'static str,
    figure: fn(&[Record], Name) -> Option<f64>,
    shown: fn(f64) -> String,
}

const COLUMNS: [Column; 7] = [
    Column { title: "1\npage", figure: |records, row| ns(records, "batch", 1, row), shown: short },
    Column { title: "64\npages", figure: |records, row| ns(records, "batch", 64, row), shown: short },
    Column { title: "16384\nin order", figure: |records, row| best_case(records, row), shown: short },
    Column { title: "16384\nrandom", figure: |records, row| ns(records, "scatter", SCATTER_PAGES, row), shown: short },
    Column { title: "own\npages", figure: kept, shown: |kept| format!("{kept:.0} %") },
    Column {
        title: "hand-\nover",
        figure: |records, row| ns(records, "threads-hand-over", HAND_OVER_PAGES, row),
        shown: short,
    },
    Column { title: "mixed\nuse", figure: |records, row| ns(records, "mixed", REQUESTS, row), shown: short },
];

/// The column of [`kept`], which is no time.
const KEPT: usize = 4;

/// Whether a record's row belongs to a group.
type IsMember = fn(&Record) -> bool;

/// The groups of rows, with what their members can and can't do.
const GROUPS: [(&str, IsMember); 4] = [
    ("Pagemill: pages and blocks of pages, any number", |record| record.kind == Kind::Ours),
    ("general allocators: any size, any number", |record| MALLOCS.contains(&record.name)),
    ("pools: one size, a fixed number of pages, nothing goes back to the system", |record| {
        record.kind == Kind::Peer && !MALLOCS.contains(&record.name)
    }),
    ("floors: they move addresses and manage nothing", |record| record.kind == Kind::Floor),
];

/// Writes the screen. `absent` are the rows that could not take part.
pub(crate) fn screen(out: &mut dyn Write, records: &[Record], absent: &[String], rounds: &Rounds) -> io::Result<()> {
    let titles = ["ns a page,\nout and back"].into_iter().chain(COLUMNS.iter().map(|column| column.title));
    let mut table = plain(&titles.collect::<Vec<_>>());
    // The lines that stand between rows: the group before which row.
    let mut breaks = Vec::new();
    let mut lines = 0;
    for (title, is_member) in GROUPS {
        let rows = rows(records, is_member);
        if !rows.is_empty() {
            breaks.push((lines, title));
            lines += rows.len();
        }
        for row in rows {
            let cell = |column: &Column| (column.figure)(records, row).map_or("-".to_owned(), column.shown);
            table.add_row([format!("  {}", row.0)].into_iter().chain(COLUMNS.iter().map(cell)));
        }
    }
    breaks.push((lines, "how many times as long as pagemill-array:"));
    for (title, (_, is_member)) in [("  fastest malloc", GROUPS[1]), ("  fastest pool", GROUPS[2])] {
        if let Some(cells) = times(records, is_member) {
            table.add_row([title.to_owned()].into_iter().chain(cells));
        }
    }
    align(&mut table, 1);
    let text = table.trim_fmt();
    writeln!(out)?;
    let header = text.lines().count() - table.row_count();
    for (at, line) in text.lines().enumerate() {
        let row = at.checked_sub(header);
        if let Some((_, title)) = breaks.iter().find(|(before, _)| Some(*before) == row) {
            writeln!(out, "{title}")?;
        }
        writeln!(out, "{line}")?;
    }
    notes(out, records, absent, rounds)
}

fn notes(out: &mut dyn Write, records: &[Record], absent: &[String], rounds: &Rounds) -> io::Result<()> {
    let columns = format!(
        "1 and 64 pages: lists in random order. {BURST_MOST}: put back as they came (the best case) or shuffled. own \
         pages: speed kept with both processors at work. hand-over: one takes, one frees. mixed: 1 to 16 pages a \
         call, {SENT_PERCENT} % sent over."
    );
    writeln!(out, "{}", wrap(&columns))?;
    let whole = |bench: &str| {
        let found = records.iter().find(|record| (record.bench, record.name) == (bench, OURS));
        found.and_then(|record| record.ideal_percent)
    };
    if let Some((in_order, random)) = whole("churn-in-order").zip(whole("churn-random-half")) {
        let line = format!(
            "churn, half full: {in_order:.0} % of the ideal 2 MiB frames whole, {random:.0} % from a random half"
        );
        writeln!(out, "{}", wrap(&line))?;
    }
    if !absent.is_empty() {
        writeln!(out, "{}", wrap(&format!("absent: {}", absent.join("; "))))?;
    }
    let (all, disturbed) = (rounds.all.get(), rounds.disturbed.get());
    if disturbed > 0 {
        writeln!(out, "disturbed by other work: {disturbed} of {all} rounds; run it on an idle machine")?;
    }
    writeln!(out, "more: --html FILE (charts), --details, --all; bars: see --bars")
}

/// The rows of a group, in the order in which they were measured.
fn rows(records: &[Record], is_member: IsMember) -> Vec<Name<'_>> {
    let mut rows = Vec::new();
    for record in records.iter().filter(|record| is_member(record)) {
        let row = (record.name, record.backend);
        if !rows.contains(&row) {
            rows.push(row);
        }
    }
    rows
}

/// The least figure of a group in each column, as a multiple of Pagemill's in bulk; `None` without either.
fn times(records: &[Record], is_member: IsMember) -> Option<Vec<String>> {
    let ours = rows(records, |record| record.name == OURS).first().copied()?;
    let members = rows(records, is_member);
    let cell = |(at, column): (usize, &Column)| {
        let least = members.iter().filter_map(|row| (column.figure)(records, *row)).min_by(f64::total_cmp);
        let both = least.zip((column.figure)(records, ours)).filter(|_| at != KEPT);
        both.map_or("-".to_owned(), |(least, ours)| format!("{}x", short(least / ours)))
    };
    (!members.is_empty()).then(|| COLUMNS.iter().enumerate().map(cell).collect())
}

fn find<'a>(records: &'a [Record], bench: &str, n: usize, row: Name, order: ListOrder) -> Option<&'a Record> {
    let is_it = |r: &&Record| (r.bench, r.n, (r.name, r.backend)) == (bench, n, row);
    records.iter().filter(is_it).find(|record| record.order.is_none_or(|its| its == order))
}

/// Nanoseconds a page, from a list in random order if the row has a list.
fn ns(records: &[Record], bench: &str, n: usize, row: Name) -> Option<f64> {
    find(records, bench, n, row, ListOrder::Random).map(|record| record.total.median)
}

fn best_case(records: &[Record], row: Name) -> Option<f64> {
    find(records, "burst", BURST_MOST, row, ListOrder::InOrder).map(|record| record.total.median)
}

/// Percent of its speed that a thread keeps when the other processor works too.
fn kept(records: &[Record], row: Name) -> Option<f64> {
    let of = |bench| ns(records, bench, HAND_OVER_PAGES, row);
    Some(100.0 * of("threads-own-1")? / of("threads-own-2")?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::example as record;
    use crate::report::header;
    use pagemill_harness::machine::Machine;

    const ROWS: [(&str, Kind, f64); 11] = [
        ("pagemill-single", Kind::Ours, 6.0),
        ("pagemill-array", Kind::Ours, 2.0),
        ("memcpy", Kind::Floor, 0.5),
        ("tls-vec", Kind::Floor, 1.0),
        ("mutex-vec", Kind::Peer, 3.0),
        ("array-queue", Kind::Peer, 10.0),
        ("glibc", Kind::Peer, 12345.0),
        ("mimalloc", Kind::Peer, 40.0),
        ("jemalloc", Kind::Peer, 30.0),
        ("snmalloc", Kind::Peer, 29.0),
        ("rte-mempool", Kind::Peer, 1.0),
    ];

    fn everything() -> Vec<Record> {
        let mut records = Vec::new();
        for (bench, n) in [
            ("batch", 1),
            ("batch", 64),
            ("burst", BURST_MOST),
            ("scatter", SCATTER_PAGES),
            ("threads-own-1", 64),
            ("threads-own-2", 64),
            ("threads-hand-over", 64),
            ("mixed", REQUESTS),
        ] {
            for (name, kind, ns) in ROWS {
                // A floor hands nothing over.
                if kind != Kind::Floor || !["threads-hand-over", "mixed"].contains(&bench) {
                    records.push(record(bench, name, kind, n, ns));
                }
            }
        }
        records.push(record("threads-hand-over", "hand-over", Kind::Floor, 64, 0.75));
        for (bench, percent) in [("churn-in-order", 99.4), ("churn-random-half", 96.5)] {
            let whole = record(bench, "pagemill-array", Kind::Ours, 1 << 20, 20.0);
            records.push(Record { ideal_percent: Some(percent), ..whole });
        }
        records
    }

    fn shown(records: &[Record], absent: &[String], disturbed: usize) -> Vec<String> {
        let rounds = Rounds::default();
        rounds.all.set(900);
        rounds.disturbed.set(disturbed);
        // As a user builds it: the line of a debug build is longer.
        let machine = Machine {
            cpu: "AMD EPYC 9R14 96-Core Processor".to_owned(),
            build: "rustc 1.95.0, opt-level 3".to_owned(),
            has_full_states: false,
            ..Machine::here()
        };
        let mut out = format!("{}\n", header(&machine, "portable", 11)).into_bytes();
        screen(&mut out, records, absent, &rounds).unwrap();
        String::from_utf8(out).unwrap().lines().map(str::to_owned).collect()
    }

    fn words<'a>(lines: &'a [String], start: &str) -> Vec<&'a str> {
        let line = lines.iter().find(|line| line.trim_start().starts_with(start));
        line.unwrap_or_else(|| panic!("{start}: {lines:#?}")).split_whitespace().collect()
    }

    #[test]
    fn a_whole_run_has_at_most_30_lines_of_80_columns() {
        let lines = shown(&everything(), &[], 12);
        assert!(lines.len() <= 30, "{}: {lines:#?}", lines.len());
        assert!(lines.iter().all(|line| line.chars().count() <= 80), "{lines:#?}");
        assert!(!lines.iter().any(|line| line.contains("MISSED")), "{lines:#?}");
        assert_eq!(lines.iter().filter(|line| line.contains("bars")).count(), 1);
    }

    #[test]
    fn every_row_has_its_figures_and_stands_below_its_group() {
        let lines = shown(&everything(), &[], 0);
        for (name, _, _) in ROWS {
            assert_eq!(words(&lines, name).len(), 2 + COLUMNS.len(), "{name}");
        }
        let at = |start: &str| lines.iter().position(|line| line.trim_start().starts_with(start)).unwrap();
        assert!(at("Pagemill:") < at("pagemill-single") && at("pagemill-array") < at("general allocators"));
        assert!(at("general allocators") < at("glibc") && at("snmalloc") < at("pools: one size, a fixed number"));
        assert!(at("pools:") < at("rte-mempool") && at("array-queue") < at("floors:") && at("floors:") < at("memcpy"));
        let array = ["pagemill-array", "2.00", "2.00", "2.00", "2.00", "100", "%", "2.00", "2.00"];
        assert_eq!(words(&lines, "pagemill-array"), array);
        let malloc = ["fastest", "malloc", "14.5x", "14.5x", "14.5x", "14.5x", "-", "14.5x", "14.5x"];
        assert_eq!(words(&lines, "fastest malloc"), malloc);
        assert_eq!(words(&lines, "fastest pool")[2..5], ["0.50x", "0.50x", "0.50x"]);
        assert!(
            lines.iter().any(|line| line.contains("99 % of the ideal 2 MiB frames whole, 96 % from")),
            "{lines:#?}"
        );
    }

    #[test]
    fn the_best_case_is_in_its_own_column_alone() {
        let mut records = everything();
        let in_order = |record: &Record| Record { order: Some(ListOrder::InOrder), ..record.clone() };
        let best = records.iter().filter(|r| r.kind == Kind::Ours && ["batch", "burst"].contains(&r.bench));
        let best: Vec<Record> = best.map(in_order).collect();
        for record in records.iter_mut().filter(|r| r.kind == Kind::Ours && ["batch", "burst"].contains(&r.bench)) {
            record.order = Some(ListOrder::Random);
            record.total.median = 7.0;
        }
        records.splice(0..0, best);
        let lines = shown(&records, &[], 0);
        assert_eq!(words(&lines, "pagemill-array")[1..5], ["7.00", "7.00", "2.00", "2.00"]);
    }

    #[test]
    fn a_machine_with_one_processor_shows_what_it_has_and_why_the_rest_is_absent() {
        let mut records = everything();
        records.retain(|record| ["batch", "scatter"].contains(&record.bench) && record.kind != Kind::Floor);
        records.retain(|record| !MALLOCS.contains(&record.name));
        let lines = shown(&records, &["threads: needs two processors".to_owned(), "mixed: too".to_owned()], 0);
        assert_eq!(words(&lines, "pagemill-array")[1..], ["2.00", "2.00", "-", "2.00", "-", "-", "-"]);
        assert!(!lines.iter().any(|line| line.starts_with("general allocators") || line.contains("fastest malloc")));
        assert!(lines.iter().any(|line| line == "absent: threads: needs two processors; mixed: too"), "{lines:#?}");
        assert!(lines.iter().all(|line| line.chars().count() <= 80), "{lines:#?}");
    }
}
