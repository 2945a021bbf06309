//! The table `page-pool`: out and back by size and order, refills, pages from another thread, device addresses.

use std::io::{self, Write};

use super::{align, plain, wrap};
use crate::record::Record;
use crate::rows::Kind;
use crate::rows::page_pool::device::{BLOCK, PAGES, POOL_BLOCK, POOL_PAGES};
use crate::rows::page_pool::refill::{BULK_ROW, SINGLE_ROW};
use crate::stats::{Spread, short};
use crate::tables::page_pool::{LIST_ORDERS, MAPPINGS, ORDERS, REFILL, RETURNED, SIZES, SOURCE};

/// Rows of which the pool is shown as a multiple.
const COMPARED: [&str; 3] = ["page-vec", "rte-mempool", "pagemill-single"];

pub(super) fn page_pool(out: &mut dyn Write, records: &[Record]) -> io::Result<()> {
    let backend = records.iter().find(|record| record.kind == Kind::Ours).map_or("no row", |record| record.backend);
    writeln!(out, "\npage-pool: N pages out, then back, the last one first (lifo), the first one")?;
    writeln!(out, "first, or shuffled; ns a page out and back, medians; the cache holds 128; {backend}")?;
    if has(records, ORDERS[0].0) {
        out_and_back(out, records)?;
    }
    if has(records, REFILL) {
        refill(out, records)?;
    }
    if has(records, RETURNED) {
        returned(out, records)?;
    }
    if MAPPINGS.iter().any(|(bench, _)| has(records, bench)) {
        device(out, records)?;
    }
    Ok(())
}

fn has(records: &[Record], bench: &str) -> bool {
    records.iter().any(|record| record.bench == bench)
}

fn find<'a>(records: &'a [Record], bench: &str, name: &str, n: usize) -> Option<&'a Record> {
    records.iter().find(|record| (record.bench, record.name, record.n) == (bench, name, n))
}

/// The names of rows in some parts, in the order in which they were measured.
fn names(records: &[Record], is_part: impl Fn(&str) -> bool) -> Vec<&str> {
    let mut names = Vec::new();
    for record in records.iter().filter(|record| is_part(record.bench)) {
        if !names.contains(&record.name) {
            names.push(record.name);
        }
    }
    names
}

fn missing() -> String {
    "-".to_owned()
}

fn ratio(one: Option<&Record>, other: Option<&Record>) -> String {
    one.zip(other).map_or_else(missing, |(one, other)| short(one.total.median / other.total.median))
}

fn median(record: Option<&Record>) -> String {
    record.map_or_else(missing, |record| short(record.total.median))
}

/// The median, the smallest and the largest.
fn spread(record: Option<&Record>) -> [String; 3] {
    match record.map(|record| record.total) {
        Some(Spread { median, min, max }) => [median, min, max].map(short),
        None => [missing(), missing(), missing()],
    }
}

fn out_and_back(out: &mut dyn Write, records: &[Record]) -> io::Result<()> {
    let columns: Vec<(usize, &str)> = SIZES
        .into_iter()
        .flat_map(|n| ORDERS.into_iter().take(if n == 1 { 1 } else { 3 }).map(move |(bench, _)| (n, bench)))
        .collect();
    let title = |(n, bench): &(usize, &str)| match bench.trim_start_matches("page-pool-") {
        _ if *n == 1 => "\n1".to_owned(),
        "shuffled" => format!("{n}\nrand"),
        order => format!("{n}\n{order}"),
    };
    let mut titles = vec!["\nimpl".to_owned()];
    titles.extend(columns.iter().map(title));
    let mut table = plain(&titles);
    let is_part = |bench: &str| ORDERS.iter().any(|(part, _)| *part == bench);
    let names = names(records, is_part);
    for name in &names {
        let cells = columns.iter().map(|(n, bench)| median(find(records, bench, name, *n)));
        table.add_row([(*name).to_owned()].into_iter().chain(cells));
    }
    for other in COMPARED.into_iter().filter(|other| names.contains(other) && names.contains(&"page-pool")) {
        let of = |name, &(n, bench): &(usize, &str)| find(records, bench, name, n);
        let cells = columns.iter().map(|at| ratio(of("page-pool", at), of(other, at)));
        table.add_row([format!("= page-pool / {}", other.trim_start_matches("pagemill-"))].into_iter().chain(cells));
    }
    align(&mut table, 1);
    writeln!(out, "{}", table.trim_fmt())?;

    writeln!(out, "\nsmallest and largest of the rounds, shuffled")?;
    let mut titles = vec!["impl".to_owned()];
    titles.extend(SIZES.iter().map(usize::to_string));
    let mut table = plain(&titles);
    for name in names {
        let range = |n| {
            let bench = ORDERS[if n == 1 { 0 } else { 2 }].0;
            let [_, min, max] = spread(find(records, bench, name, n));
            if min == missing() { min } else { format!("{min}-{max}") }
        };
        table.add_row([name.to_owned()].into_iter().chain(SIZES.map(range)));
    }
    align(&mut table, 1);
    writeln!(out, "{}", table.trim_fmt())
}

fn refill(out: &mut dyn Write, records: &[Record]) -> io::Result<()> {
    writeln!(out, "\nrefill: the pool's requests of the allocator, 64 pages at once or one by one;")?;
    writeln!(out, "source: without the pool's part; ns a page, by the order of the CPU's list")?;
    let mut table = plain(&["list", "timed", "bulk", "min", "max", "single", "min", "max", "single / bulk"]);
    for (order, bench) in LIST_ORDERS.into_iter().flat_map(|order| [REFILL, SOURCE].map(|bench| (order, bench))) {
        let of = |name| records.iter().find(|r| (r.bench, r.name, r.order) == (bench, name, Some(order)));
        let (bulk, single) = (of(BULK_ROW), of(SINGLE_ROW));
        let cells = spread(bulk).into_iter().chain(spread(single)).chain([ratio(single, bulk)]);
        let timed = bench.trim_start_matches("page-pool-");
        table.add_row([order.label().to_owned(), timed.to_owned()].into_iter().chain(cells));
    }
    align(&mut table, 2);
    writeln!(out, "{}", table.trim_fmt())
}

fn returned(out: &mut dyn Write, records: &[Record]) -> io::Result<()> {
    writeln!(out, "\nreturned: one thread takes 64 pages at a time and sends them, another one puts")?;
    writeln!(out, "them back; the wall's ns a page")?;
    let mut table = plain(&["impl", "total", "min", "max", "/ page-pool"]);
    let pool = find(records, RETURNED, "page-pool", 64);
    for record in records.iter().filter(|record| record.bench == RETURNED) {
        let cells = spread(Some(record)).into_iter().chain([ratio(Some(record), pool)]);
        table.add_row([record.name.to_owned()].into_iter().chain(cells));
    }
    align(&mut table, 1);
    writeln!(out, "{}", table.trim_fmt())
}

fn device(out: &mut dyn Write, records: &[Record]) -> io::Result<()> {
    writeln!(out, "\ndevice: 64 pages, or one block of 64 pages, with device addresses, out, and back")?;
    writeln!(out, "in random order; ns a page, by what maps the memory")?;
    let mut titles = vec!["impl".to_owned()];
    for (bench, _) in MAPPINGS {
        let mapping = bench.trim_start_matches("page-pool-device-");
        titles.extend([mapping.to_owned(), "min".to_owned(), "max".to_owned()]);
    }
    let of = |name: &str, bench: &str| find(records, bench, name, 64);
    let mut table = plain(&titles);
    for name in [PAGES, BLOCK, POOL_PAGES, POOL_BLOCK] {
        let cells = MAPPINGS.into_iter().flat_map(|(bench, _)| spread(of(name, bench)));
        table.add_row([name.to_owned()].into_iter().chain(cells));
    }
    for (title, pages, block) in [("= pages / block", PAGES, BLOCK), ("= of a pool", POOL_PAGES, POOL_BLOCK)] {
        let ratios = MAPPINGS
            .into_iter()
            .flat_map(|(bench, _)| [ratio(of(pages, bench), of(block, bench)), String::new(), String::new()]);
        table.add_row([title.to_owned()].into_iter().chain(ratios));
    }
    align(&mut table, 1);
    writeln!(out, "{}", table.trim_fmt())?;
    let note = "once: the arena was mapped as a whole, and addresses are looked up. table: each piece gets a range of \
                addresses and an entry a page in a table, and loses them, under a lock. pinned: mlock and munlock of \
                each piece. Pages of a pool keep their address: none of this is done for them";
    writeln!(out, "{}", wrap(note))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::example as record;
    use crate::rows::page_pool::refill::REFILL_PAGES;

    fn lines(records: &[Record]) -> Vec<String> {
        let mut out = Vec::new();
        page_pool(&mut out, records).unwrap();
        let lines: Vec<String> = String::from_utf8(out).unwrap().lines().map(str::to_owned).collect();
        assert!(lines.iter().all(|line| line.chars().count() <= 80), "{lines:#?}");
        lines
    }

    fn words(lines: &[String], start: &str, at: usize) -> String {
        let found: Vec<&String> = lines.iter().filter(|line| line.starts_with(start)).collect();
        let line = found.get(at).unwrap_or_else(|| panic!("{start}: {lines:#?}"));
        line.split_whitespace().skip(1).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn each_size_and_order_has_a_column_in_80_columns() {
        let mut records = Vec::new();
        for (bench, _) in ORDERS {
            for (n, ns) in SIZES.into_iter().zip([2.0, 3.0, 4.0, 12.5]) {
                records.push(record(bench, "page-pool", Kind::Ours, n, ns));
                records.push(record(bench, "page-vec", Kind::Floor, n, ns / 2.0));
                records.push(record(bench, "rte-mempool", Kind::Peer, n, 100.0 * ns));
                // As long as the longest name.
                records.push(record(bench, "page-pool-drop-64", Kind::Ours, n, 1234.5));
            }
        }
        let lines = lines(&records);
        assert_eq!(words(&lines, "page-pool ", 0), "2.00 3.00 3.00 3.00 4.00 4.00 4.00 12.5 12.5 12.5");
        let ratio = words(&lines, "= page-pool / page-vec", 0);
        assert!(ratio.starts_with("page-pool / page-vec 2.00") && ratio.ends_with("2.00 2.00"), "{ratio}");
        assert_eq!(words(&lines, "page-pool ", 1), "1.00-4.00 1.50-6.00 2.00-8.00 6.25-25.0");
        assert!(!lines.iter().any(|line| line.starts_with("refill") || line.starts_with("device")), "{lines:#?}");
    }

    #[test]
    fn refills_one_by_one_stand_as_a_multiple_of_those_in_bulk() {
        let mut records = Vec::new();
        for order in LIST_ORDERS {
            for (name, ns) in [(BULK_ROW, 1.0), (SINGLE_ROW, 100.0)] {
                for (bench, more) in [(REFILL, 0.0), (SOURCE, 0.5)] {
                    let record = record(bench, name, Kind::Ours, REFILL_PAGES, ns + more);
                    records.push(Record { order: Some(order), ..record });
                }
            }
        }
        let lines = lines(&records);
        assert_eq!(words(&lines, "random", 0), "refill 1.00 0.50 2.00 100 50.0 200 100");
        let source = words(&lines, "in-order", 1);
        assert!(source.starts_with("source 1.50 0.75 3.00") && source.ends_with(" 67.0"), "{source}");
    }

    #[test]
    fn pages_stand_as_a_multiple_of_a_block_by_what_maps_them() {
        let mut records = vec![record(RETURNED, "page-pool", Kind::Ours, 64, 8.0)];
        records.push(record(RETURNED, "hand-over", Kind::Floor, 64, 2.0));
        for ((bench, _), ns) in MAPPINGS.into_iter().zip([1.0, 10.0, 1000.0]) {
            records.push(record(bench, PAGES, Kind::Ours, 64, ns));
            records.push(record(bench, BLOCK, Kind::Ours, 64, 0.5));
        }
        let lines = lines(&records);
        assert_eq!(words(&lines, "hand-over", 0), "2.00 1.00 4.00 0.25");
        assert_eq!(words(&lines, PAGES, 0), "1.00 0.50 2.00 10.0 5.00 20.0 1000 500 2000");
        assert_eq!(words(&lines, POOL_PAGES, 0), "- - - - - - - - -");
        assert_eq!(words(&lines, "= pages / block", 0), "pages / block 2.00 20.0 2000");
    }
}
