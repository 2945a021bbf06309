//! `--as-published`: the tables that were published for Linux, each with its own columns, beside what was measured in
//! its shape. The figures of a publication are of its own machine; what a change saved can be compared.

use std::io::{self, Write};

use comfy_table::Table;

use super::{align, plain, wrap};
use crate::published::{Cell, Published, Table as Publication};
use crate::record::Record;
use crate::rows::dma::Shape;
use crate::stats::{Spread, short};
use crate::subject::ListOrder::Random;
use crate::tables::dma::{SELF_TEST, SHAPES};
use crate::tables::one_thread::{BATCH_SIZES, burst_sizes};
use crate::tables::total;

/// How often the self test of `dma_pool` allocates all blocks.
const SELF_TEST_ROUNDS: usize = 100;

/// Writes the publications of whose shape there are records.
pub(crate) fn as_published(
    out: &mut dyn Write,
    records: &[Record],
    absent: &[String],
    published: &Published,
) -> io::Result<()> {
    let parts: [(&str, &str, Part); 5] = [
        ("total-", "linux-buddy-2013", totals),
        ("burst", "linux-bulk-2017", halves),
        ("batch", "linux-array-2021", forms),
        (SELF_TEST, "dma-pool-2023", blocks),
        ("crypt-write-256", "dm-crypt-2023", volume),
    ];
    for (bench, id, part) in parts {
        if let Some(table) = published.table(id).filter(|_| records.iter().any(|r| r.bench.starts_with(bench))) {
            writeln!(out, "\n{}", wrap(&format!("{}: {}; {}", table.title, table.source, table.unit)))?;
            part(out, &Measured(records), table)?;
        }
    }
    if let Some(table) = published.table("dma-pool-fio-2023").filter(|_| records.iter().any(|r| r.bench == SELF_TEST)) {
        let figures = table.rows.iter().filter_map(|row| row.first_chunk());
        let figures: Vec<String> = figures.map(|[what, it]| format!("{} {}", what.shown(), it.shown())).collect();
        let line = format!("{}: {}; not measured here against an older pool", table.title, figures.join(", "));
        writeln!(out, "\n{}", wrap(&line))?;
    }
    writeln!(out, "\nhere: this run, medians, lists in random order; saved: percent less than before")?;
    absent.iter().try_for_each(|note| writeln!(out, "{}", wrap(&format!("absent: {note}"))))
}

/// The figure of a record that is shown.
type Pick = fn(&Record) -> Option<Spread>;

/// Writes one publication.
type Part = fn(&mut dyn Write, &Measured, &Publication) -> io::Result<()>;

/// The records of this run, to be looked up.
struct Measured<'a>(&'a [Record]);

impl Measured<'_> {
    fn find(&self, bench: &str, name: &str, n: usize) -> Option<&Record> {
        let is_it = |r: &&Record| (r.bench, r.name, r.n) == (bench, name, n);
        self.0.iter().filter(is_it).find(|record| record.order.is_none_or(|order| order == Random))
    }
}

/// Percent less than before.
fn saved(before: Option<f64>, after: Option<f64>) -> String {
    before.zip(after).map_or("-".to_owned(), |(before, after)| format!("{:.0} %", 100.0 * (1.0 - after / before)))
}

fn figure(figure: Option<f64>) -> String {
    figure.map_or("-".to_owned(), short)
}

fn show(out: &mut dyn Write, mut table: Table) -> io::Result<()> {
    align(&mut table, 1);
    writeln!(out, "{}", table.trim_fmt())
}

/// Gorman, 2017: allocating, freeing and both, one call a page and in bulk.
fn halves(out: &mut dyn Write, here: &Measured, linux: &Publication) -> io::Result<()> {
    let parts: [(&str, Pick); 3] =
        [("alloc", |record| record.alloc), ("free", |record| record.free), ("total", |record| Some(record.total))];
    for (part, pick) in parts {
        let mut table = plain(&[part, "Linux single", "bulk", "saved", "here single", "bulk", "saved"]);
        for n in burst_sizes(false) {
            let at = Cell::Number(n as f64);
            let published = ["single", "bulk"].map(|form| linux.number(&at, &format!("{part} {form}")));
            let measured = ["pagemill-single", "pagemill-array"]
                .map(|name| here.find("burst", name, n).and_then(pick).map(|spread| spread.median));
            let cells = [published, measured].map(|[single, bulk]| [figure(single), figure(bulk), saved(single, bulk)]);
            table.add_row([n.to_string()].into_iter().chain(cells.into_iter().flatten()));
        }
        show(out, table)?;
    }
    Ok(())
}

/// Brouer, 2021: the list and the array form; one page a call beside them.
fn forms(out: &mut dyn Write, here: &Measured, linux: &Publication) -> io::Result<()> {
    let mut table = plain(&["step", "Linux single", "list", "array", "here single", "list", "array"]);
    for n in BATCH_SIZES {
        let at = Cell::Number(n as f64);
        let published = ["single", "list", "array"].map(|form| figure(linux.number(&at, form)));
        let measured = ["pagemill-single", "pagemill-list", "pagemill-array"]
            .map(|name| figure(here.find("batch", name, n).map(|record| record.total.median)));
        table.add_row([n.to_string()].into_iter().chain(published).chain(measured));
    }
    show(out, table)
}

/// Kim, 2013: microseconds for a total, by the pages of a call, and what that saves against one call a page before.
fn totals(out: &mut dyn Write, here: &Measured, linux: &Publication) -> io::Result<()> {
    let columns: Vec<String> = total::PER_CALL.iter().map(|(_, per_call)| per_call.to_string()).collect();
    let titles = ["size", "us", "before"].map(str::to_owned);
    let mut table = plain(&[&titles[..], &columns].concat());
    for n in total::sizes() {
        let size = total::published_size(n);
        let us = |bench: &str, name: &str| {
            here.find(bench, name, n).and_then(|record| record.alloc).map(|ns| ns.median * n as f64 / 1000.0)
        };
        let published: Vec<Option<f64>> = ["before"]
            .into_iter()
            .chain(columns.iter().map(String::as_str))
            .map(|column| linux.number(&Cell::Text(size.clone()), column))
            .collect();
        let measured: Vec<Option<f64>> = std::iter::once(us("total-1", "pagemill-single"))
            .chain(total::PER_CALL.iter().map(|(bench, _)| us(bench, "pagemill-array")))
            .collect();
        for (whose, figures) in [("Linux", published), ("here", measured)] {
            let size = if whose == "Linux" { size.as_str() } else { "" };
            table.add_row([size.to_owned(), whose.to_owned()].into_iter().chain(figures.iter().copied().map(figure)));
            let gains = figures[1..].iter().map(|after| saved(figures[0], *after));
            table.add_row(["".to_owned(), "saved".to_owned(), String::new()].into_iter().chain(gains));
        }
    }
    show(out, table)?;
    writeln!(out, "{}", wrap("before: Linux one page a call without the change; here pagemill-single"))
}

/// Busch, 2023: microseconds for all blocks, 100 times.
fn blocks(out: &mut dyn Write, here: &Measured, linux: &Publication) -> io::Result<()> {
    let titles = ["block size", "blocks", "Linux list", "stack", "saved", "here", "ns a pair: Linux", "here"];
    let mut table = plain(&titles);
    for Shape { bytes, blocks } in SHAPES {
        let at = Cell::Number(bytes as f64);
        let published = ["list of pages, scanned", "one stack of blocks"].map(|column| linux.number(&at, column));
        let ns = here.find(SELF_TEST, "dma-single", bytes).map(|record| record.total.median);
        let us = ns.map(|ns| ns * (blocks * SELF_TEST_ROUNDS) as f64 / 1000.0);
        table.add_row([
            bytes.to_string(),
            blocks.to_string(),
            figure(published[0]),
            figure(published[1]),
            saved(published[0], published[1]),
            figure(us),
            figure(linux.number(&at, "ns per alloc+free pair, after")),
            figure(ns),
        ]);
    }
    show(out, table)
}

/// Shi, 2023: an encrypted write, pages one by one and in bulk.
fn volume(out: &mut dyn Write, here: &Measured, linux: &Publication) -> io::Result<()> {
    let mut table = plain(&["", "", "before", "after", "change"]);
    let change = |[before, after]: [Option<f64>; 2]| {
        before.zip(after).map_or("-".to_owned(), |(before, after)| format!("{:+.1} %", 100.0 * (after / before - 1.0)))
    };
    for row in linux.rows.iter().filter_map(|row| row.first_chunk::<3>()) {
        let [what, before, after] = row.each_ref().map(Cell::shown);
        let number = |text: &str| text.split(' ').next()?.replace(',', "").parse::<f64>().ok();
        let published = change([number(&before), number(&after)]);
        let is_speed = what == "throughput";
        table.add_row([what, "Linux".to_owned(), before, after, published]);
        if is_speed {
            let speeds =
                ["pagemill-single", "pagemill-bulk"].map(|name| here.find("crypt-write-256", name, 256)?.mib_per_s());
            let [before, after] = speeds.map(|speed| speed.map_or("-".to_owned(), |mib| format!("{mib:.0} MiB/s")));
            table.add_row(["", "here", &before, &after, &change(speeds)]);
        }
    }
    show(out, table)?;
    writeln!(out, "{}", wrap("here: in one process, without a disk; the latencies are of fio on a RAM disk"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::example as record;
    use crate::rows::Kind;

    fn with_halves(bench: &'static str, name: &'static str, n: usize, out: f64, back: f64) -> Record {
        let halves = (Spread::of(&[out]), Spread::of(&[back]));
        let record = record(bench, name, Kind::Ours, n, out + back);
        Record { alloc: halves.0, free: halves.1, order: Some(Random), ..record }
    }

    fn everything() -> Vec<Record> {
        let mut records = vec![
            record("crypt-write-256", "pagemill-single", Kind::Ours, 256, 4000.0),
            record("crypt-write-256", "pagemill-bulk", Kind::Ours, 256, 3200.0),
            with_halves("total-1", "pagemill-single", 1024, 8.0, 1.0),
            with_halves("total-16", "pagemill-array", 1024, 2.0, 1.0),
            record(SELF_TEST, "dma-single", Kind::Ours, 16, 2.5),
            with_halves("burst", "pagemill-single", 16384, 10.0, 6.0),
            with_halves("burst", "pagemill-array", 16384, 4.0, 3.0),
            record("batch", "pagemill-list", Kind::Ours, 64, 1.5),
            record("batch", "pagemill-array", Kind::Ours, 64, 0.5),
        ];
        let best = with_halves("burst", "pagemill-array", 16384, 1.0, 1.0);
        records.insert(0, Record { order: Some(crate::subject::ListOrder::InOrder), ..best });
        records
    }

    fn lines() -> Vec<String> {
        let mut out = Vec::new();
        let absent = ["rseq: why".to_owned()];
        as_published(&mut out, &everything(), &absent, &Published::load().unwrap()).unwrap();
        String::from_utf8(out).unwrap().lines().map(str::to_owned).collect()
    }

    #[test]
    fn each_publication_has_its_own_columns_beside_this_run_in_80_columns() {
        let lines = lines();
        assert!(lines.iter().all(|line| line.chars().count() <= 80), "{lines:#?}");
        let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>().join(" ");
        let all: Vec<String> = lines.iter().map(|line| words(line)).collect();
        for wanted in [
            // Gorman: 302.85 to 106.62 for one page is 65 %, and 202.15 to 89 for 16384 is 56 %.
            "alloc Linux single bulk saved here single bulk saved",
            "1 303 107 65 % - - -",
            "16384 202 89.0 56 % 10.0 4.00 60 %",
            "free Linux single bulk saved here single bulk saved",
            "16384 134 97.5 28 % 6.00 3.00 50 %",
            "total Linux single bulk saved here single bulk saved",
            "16384 337 186 45 % 16.0 7.00 56 %",
            // Brouer.
            "step Linux single list array here single list array",
            "64 - 37.3 30.6 - 1.50 0.50",
            // Kim: the size, then what each number a call saves.
            "size us before 1 2 4 8 16 32",
            "4 MB Linux 226 213 182 201 227 150 154",
            "saved 5 % 19 % 11 % -1 % 34 % 32 %",
            "here 8.19 - - - - 2.05 -",
            "saved - - - - 75 % -",
            // Busch.
            "block size blocks Linux list stack saved here ns a pair: Linux here",
            "16 8192 57282 24997 56 % 2048 30.5 2.50",
            // Shi.
            "throughput Linux 1301 MiB/s 1402 MiB/s +7.8 %",
            "here 977 MiB/s 1221 MiB/s +25.0 %",
            "submission latency, mean Linux 765.71 us 710.77 us -7.2 %",
            "absent: rseq: why",
        ] {
            assert!(all.iter().any(|line| line == wanted), "{wanted}: {all:#?}");
        }
        for author in ["Mel Gorman", "Jesper Dangaard Brouer", "Joonsoo Kim", "Keith Busch", "Yang Shi"] {
            assert!(lines.join(" ").replace("  ", "").contains(author), "{author}");
        }
    }

    #[test]
    fn a_publication_without_a_table_of_this_run_is_left_out() {
        let mut out = Vec::new();
        let records = [record("batch", "pagemill-array", Kind::Ours, 64, 0.5)];
        as_published(&mut out, &records, &[], &Published::load().unwrap()).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains("Brouer") && !text.contains("Gorman, bulk") && !text.contains("Kim"), "{text}");
    }
}
