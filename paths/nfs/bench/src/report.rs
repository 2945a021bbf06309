//! The table `rpc`: what a refill costs, in each way.

use std::io::{self, Write};

use pagemill_harness::published::{Cell, Published};
use pagemill_harness::record::Record;
use pagemill_harness::report::{align, plain, wrap};
use pagemill_harness::rounds::ListOrder;
use pagemill_harness::stats::short;

use crate::loopback::{AGAIN, CREATE, GANESHA, GETATTR, ONE, PARTS, RANDOM, READ, READ_LIBNFS, WRITE, WRITE_LIBNFS};
use crate::refill::{ORDERS, PATTERNS};
use crate::ways::SINGLE;

/// The table of `published.json` with the figures of Linux's RPC server.
const QUOTED: &str = "sunrpc-2021";

pub(crate) fn rpc(out: &mut dyn Write, records: &[Record], published: &Published) -> io::Result<()> {
    refills(out, records, published)?;
    servers(out, records)
}

/// What a client gets, a line a server.
fn servers(out: &mut dyn Write, records: &[Record]) -> io::Result<()> {
    if !records.iter().any(|record| record.bench == READ) {
        return Ok(());
    }
    writeln!(out, "\nrpc: one client of a server over loopback, eight calls in flight")?;
    let mut table = plain(&["asked", "server", "a second", "least", "most", "runs", "/ ganesha"]);
    for (part, ..) in PARTS {
        let of = |record: &&Record| record.bench == part;
        let ganesha = records.iter().filter(of).find(|record| record.name == GANESHA);
        for (at, record) in records.iter().filter(of).enumerate() {
            let spread = record.total;
            table.add_row([
                if at == 0 { asked(part).to_owned() } else { String::new() },
                record.name.to_owned(),
                short(1e9 / spread.median),
                short(1e9 / spread.max),
                short(1e9 / spread.min),
                record.runs.to_string(),
                ganesha.map_or("-".to_owned(), |ganesha| short(ganesha.total.median / spread.median)),
            ]);
        }
    }
    align(&mut table, 2);
    writeln!(out, "{}", table.trim_fmt())?;
    let what = "Medians of turns. The client is the same for all (libnfs in the rows that say so): it sends calls together that \
                take the places of replies which came together, checks the status and the length of each reply, and looks at no data. Files are in memory \
                and were read before. 1 MiB: a second has so many MiB. write: unstable, each byte of 64 MiB once, and one \
                COMMIT; overwrite: each four times before it. create: one file made and removed. list: all of a directory \
                with 1000 files, by READDIRPLUS of 64 KiB one after another; its entries are counted. pagemill-single: \
                the same server, whose threads refill their page arrays by a call for each page.";
    writeln!(out, "{}", wrap(what))
}

/// What a part asks for, in the table's words.
pub(crate) fn asked(part: &str) -> &'static str {
    match part {
        READ => "read 1 MiB",
        WRITE => "write 1 MiB",
        READ_LIBNFS => "read 1 MiB, libnfs",
        WRITE_LIBNFS => "write 1 MiB, libnfs",
        AGAIN => "overwrite 1 MiB",
        RANDOM => "read 4 KiB at random",
        ONE => "the same, one by one",
        GETATTR => "getattr",
        CREATE => "create and remove",
        _ => "list",
    }
}

fn refills(out: &mut dyn Write, records: &[Record], published: &Published) -> io::Result<()> {
    if !records.iter().any(|record| record.bench.starts_with("rpc-refill")) {
        return Ok(());
    }
    writeln!(out, "\nrpc: refilling the 259 slots of a service thread's page array")?;
    for order in ORDERS {
        writeln!(out, "{}", title(order))?;
        let mut table = plain(&["holes", "impl", "ns/refill", "min", "max", "ns/page", "one by one / it"]);
        for pattern in PATTERNS {
            let of = |r: &&Record| r.bench == pattern.bench && r.order == Some(order);
            let single = records.iter().filter(of).find(|record| record.name == SINGLE);
            for (at, record) in records.iter().filter(of).enumerate() {
                let (spread, n) = (record.total, record.n as f64);
                table.add_row([
                    if at == 0 { pattern.what.to_owned() } else { String::new() },
                    record.name.to_owned(),
                    short(n * spread.median),
                    short(n * spread.min),
                    short(n * spread.max),
                    short(spread.median),
                    single.map_or("-".to_owned(), |single| short(single.total.median / spread.median)),
                ]);
            }
        }
        align(&mut table, 2);
        writeln!(out, "{}", table.trim_fmt())?;
    }
    let what = "64 of 256: every fourth. Timed: the refill. Untimed: taking pages out of the array, and freeing them one by one. array-slice: the \
                server's, which looks at the slots that a request used; array-whole: the array form on all 259; list: one \
                list of as many pages as there are holes, moved into them; one-by-one: a call for each hole of the slice; \
                array-stops: a call that stops at the first full slot behind a hole, as Linux's of 2021 (v5) did, and a call \
                for each hole that is left.";
    writeln!(out, "{}", wrap(what))?;
    quote(out, published)
}

fn title(order: ListOrder) -> &'static str {
    match order {
        ListOrder::Random => "pages freed in random order; medians of rounds in turns",
        ListOrder::Fifo | ListOrder::InOrder => "the best case: pages freed in ascending order",
    }
}

/// Linux's figures, which are not comparable.
fn quote(out: &mut dyn Write, published: &Published) -> io::Result<()> {
    let Some(table) = published.table(QUOTED) else { return Ok(()) };
    let named = |row: &Vec<Cell>| match row.as_slice() {
        [name, Cell::Number(figure)] => Some(format!("{} {figure:.3}", name.shown())),
        _ => None,
    };
    let figures: Vec<String> = table.rows.iter().filter_map(named).collect();
    let line =
        format!("quoted, not of this run ({}): {}. {}; {}", table.unit, figures.join(", "), table.title, table.source);
    writeln!(out, "{}", wrap(&line))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::refill::{FIRST, SPREAD};
    use crate::ways::ARRAY;
    use pagemill_harness::record::example;
    use pagemill_harness::rounds::Kind;

    #[test]
    fn a_refill_is_shown_with_its_ratio_within_80_columns_and_beside_the_quoted_figures() {
        let mut records = Vec::new();
        for order in ORDERS {
            for (part, name, ns) in
                [(FIRST, ARRAY, 1.5), (FIRST, SINGLE, 6.0), (SPREAD, ARRAY, 3.0), (SPREAD, SINGLE, 6.0)]
            {
                records.push(Record { order: Some(order), ..example(part, name, Kind::Ours, 64, ns) });
            }
        }
        let mut out = Vec::new();
        rpc(&mut out, &records, &Published::load().unwrap()).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        let row = text.lines().find(|line| line.contains(ARRAY)).unwrap();
        for word in ["96.0", "48.0", "192", "1.50", "4.00"] {
            assert!(row.contains(word), "no {word} in {row}");
        }
        for words in ["best case", "quoted, not of this run", "25.007", "6.258", "4.590", "exaggerated"] {
            assert!(text.split_whitespace().collect::<Vec<_>>().join(" ").contains(words), "no {words} in {text}");
        }
        let mut none = Vec::new();
        rpc(&mut none, &[], &Published::load().unwrap()).unwrap();
        assert!(none.is_empty());
    }
}
