//! The tables `holes` and `orders`: figures side by side, a line for each row.

use std::io::{self, Write};

use crate::record::Record;
use crate::report::{align, plain};
use crate::stats::{Spread, short};
use crate::tables::holes::{PLACES, SLOTS};
use crate::tables::orders::{MANY, ONE, ORDERS, WORN, WORN_ORDERS};

/// The figure of a record that is shown.
type Pick = fn(&Record) -> Option<Spread>;

/// Nanoseconds a page, filling and bulk free, by the slots of the array; a block of lines for each place of the holes.
pub(super) fn holes(out: &mut dyn Write, records: &[Record]) -> io::Result<()> {
    writeln!(out, "\nholes: 1 to 64 pages leave an array, are freed in bulk, and are replaced;")?;
    writeln!(out, "ns a page, medians, by the slots of the array: filling the holes, and freeing")?;
    for (bench, _) in PLACES {
        let mut titles = vec![bench.replace("holes-", "holes: "), "backend".to_owned()];
        titles.extend(SLOTS.iter().flat_map(|slots| [slots.to_string(), "free".to_owned()]));
        let halves = |record: Option<&Record>| {
            let half = |pick: Pick| shown(record.and_then(pick));
            [half(|record| record.alloc), half(|record| record.free)]
        };
        let line = |find: &dyn Fn(usize) -> Option<usize>| {
            SLOTS.iter().flat_map(|&slots| halves(find(slots).map(|at| &records[at]))).collect()
        };
        lines(out, &titles, records, bench, &line)?;
    }
    Ok(())
}

/// Nanoseconds a block by its order: one out and back, and 64 out and back, with and without the halves.
pub(super) fn orders(out: &mut dyn Write, records: &[Record]) -> io::Result<()> {
    writeln!(out, "\norders: blocks of 2 to 512 pages (orders 1 to 9); ns a block, medians")?;
    let parts: [(&str, &str, Pick); 7] = [
        (ONE, "1 out and back", |record| Some(record.total)),
        (MANY, "64 out and back", |record| Some(record.total)),
        (MANY, "64 out", |record| record.alloc),
        (MANY, "64 back, shuffled", |record| record.free),
        (WORN, "64 out and back, worn", |record| Some(record.total)),
        (WORN, "64 out, worn", |record| record.alloc),
        (WORN, "64 back, worn", |record| record.free),
    ];
    for (bench, title, pick) in parts {
        if !records.iter().any(|record| record.bench == bench) {
            continue; // None of the peers that are shown has a zone.
        }
        let orders = || ORDERS.into_iter().filter(|order| bench != WORN || WORN_ORDERS.contains(order));
        let mut titles = vec![title.to_owned(), "backend".to_owned()];
        titles.extend(orders().map(|order| order.to_string()));
        let line = |find: &dyn Fn(usize) -> Option<usize>| {
            orders().map(|order| shown(find(order).and_then(|at| pick(&records[at])))).collect()
        };
        lines(out, &titles, records, bench, &line)?;
    }
    writeln!(out, "worn: a zone that was full of blocks of 1 to 16 pages; a random tenth is held")
}

fn shown(figure: Option<Spread>) -> String {
    figure.map_or("n/a".to_owned(), |spread| short(spread.median))
}

/// Makes the cells of a row's line. It is given a function that finds the row's record with a given `n`.
type Line<'a> = dyn Fn(&dyn Fn(usize) -> Option<usize>) -> Vec<String> + 'a;

/// One part of a table: a line for each of its rows.
fn lines(out: &mut dyn Write, titles: &[String], records: &[Record], bench: &str, line: &Line) -> io::Result<()> {
    let mut table = plain(titles);
    let mut names: Vec<(&str, &str)> = Vec::new();
    for record in records.iter().filter(|record| record.bench == bench) {
        if !names.contains(&(record.name, record.backend)) {
            names.push((record.name, record.backend));
        }
    }
    for (name, backend) in names {
        let mut cells = vec![name.to_owned(), backend.to_owned()];
        cells.extend(line(&|n| {
            records.iter().position(|r| (r.bench, r.name, r.backend, r.n) == (bench, name, backend, n))
        }));
        table.add_row(cells);
    }
    align(&mut table, 2);
    writeln!(out, "\n{}", table.trim_fmt())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::example as record;
    use crate::rows::Kind;

    fn written(write: impl Fn(&mut dyn Write) -> io::Result<()>) -> String {
        let mut out = Vec::new();
        write(&mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        text
    }

    #[test]
    fn holes_have_a_pair_of_figures_for_each_array_in_80_columns() {
        let mut records = Vec::new();
        for (bench, _) in PLACES {
            for (slots, ns) in SLOTS.into_iter().zip([1.0, 2.0, 3.0, 100.0]) {
                let mut record = record(bench, "pagemill-single", Kind::Ours, slots, 5.0);
                record.backend = "portable";
                (record.alloc, record.free) = (Spread::of(&[ns]), Spread::of(&[ns / 2.0]));
                records.push(record);
            }
        }
        records.retain(|record| (record.bench, record.n) != ("holes-last", 259));
        let text = written(|out| holes(out, &records));
        let rows: Vec<&str> = text.lines().filter(|line| line.starts_with("pagemill-single")).collect();
        let words = |line: &str| line.split_whitespace().skip(2).map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(words(rows[0]), ["1.00", "0.50", "2.00", "1.00", "3.00", "1.50", "100", "50.0"]);
        assert_eq!(words(rows[2])[4..6], ["n/a", "n/a"]);
    }

    #[test]
    fn orders_have_each_order_in_80_columns() {
        let of = |bench| ORDERS.map(|order| record(bench, "pagemill-single", Kind::Ours, order, 100.0 * order as f64));
        let records = [of(ONE), of(MANY), of(WORN)].concat();
        let text = written(|out| orders(out, &records));
        let rows: Vec<_> = text.lines().filter(|line| line.starts_with("pagemill-single")).collect();
        assert_eq!(rows.len(), 7);
        assert!(rows[4].ends_with("600"), "worn zones have no larger blocks: {text}");
        assert!(text.contains("900") && text.contains("64 back, shuffled"), "{text}");
    }
}
