//! The table `dma`: medians by size, their spread, memory, and requests in flight.

use std::io::{self, Write};

use super::{align, best_peer, plain, wrap};
use crate::published::Published;
use crate::record::Record;
use crate::rows::Kind;
use crate::stats::{Spread, short};
use crate::tables::dma::{COMPLETION, REQUESTS, REQUESTS_CPU, SELF_TEST, SHAPES, SHUFFLED, SUBMISSION, WRITTEN};

pub(super) fn dma(out: &mut dyn Write, records: &[Record], published: &Published) -> io::Result<()> {
    let backend = records.iter().find(|record| record.kind == Kind::Ours).map_or("no row", |record| record.backend);
    writeln!(out, "\ndma: small blocks, all out one by one, then all back in the same order; {backend}")?;
    writeln!(out, "ns a block out and back, medians; 8192 blocks, 2048 of 1024 B, 1024 of 4096 B")?;
    let of = |bench: &'static str| records.iter().filter(move |record| record.bench == bench);
    let mut table = by_size(of(SELF_TEST), |record| short(record.total.median));
    let ours = |n: usize| of(SELF_TEST).filter(move |r| r.kind == Kind::Ours && r.n == n && r.name == "dma-single");
    let best =
        SHAPES.map(|shape| best_peer(of(SELF_TEST).filter(|r| r.n == shape.bytes && !r.name.ends_with("-bulk"))));
    if best.iter().any(Option::is_some) {
        let missing = || "n/a".to_owned();
        let figures = best.map(|peer| peer.map_or_else(missing, |peer| short(peer.total.median)));
        table.add_row([&["= best peer, single".to_owned()][..], &figures].concat());
        let ratios = SHAPES.iter().zip(best).map(|(shape, peer)| {
            let both = ours(shape.bytes).next().zip(peer);
            both.map_or_else(missing, |(ours, peer)| short(ours.total.median / peer.total.median))
        });
        table.add_row([&["= dma-single / it".to_owned()][..], &ratios.collect::<Vec<_>>()].concat());
    }
    align(&mut table, 1);
    writeln!(out, "{}", table.trim_fmt())?;
    quoted(out, records, published)?;

    writeln!(out, "\nsmallest and largest of the rounds")?;
    let mut table = by_size(of(SELF_TEST), |record| spread(&record.total));
    align(&mut table, 1);
    writeln!(out, "{}", table.trim_fmt())?;

    writeln!(out, "\nall out, 64 at a time with a word written to each, then all back")?;
    let mut table = by_size(of(WRITTEN), |record| short(record.total.median));
    align(&mut table, 1);
    writeln!(out, "{}", table.trim_fmt())?;

    writeln!(out, "\nall out, then all back in random order: out + back")?;
    let halves =
        |record: &Record| [record.alloc, record.free].map(|half| half.map_or("-".to_owned(), |h| short(h.median)));
    let mut table = by_size(of(SHUFFLED), |record| halves(record).join(" + "));
    align(&mut table, 1);
    writeln!(out, "{}", table.trim_fmt())?;

    if of(SELF_TEST).any(|record| record.bytes_a_block.is_some()) {
        writeln!(out, "\nbytes that a block takes, itself included")?;
        let known = of(SELF_TEST).filter(|record| record.bytes_a_block.is_some() && !record.name.ends_with("-bulk"));
        let mut table =
            by_size(known, |record| record.bytes_a_block.map_or("-".to_owned(), |bytes| format!("{bytes:.1}")));
        align(&mut table, 1);
        writeln!(out, "{}", table.trim_fmt())?;
    }
    requests(out, records)
}

/// A line for each row, a column for each size.
fn by_size<'a>(records: impl Iterator<Item = &'a Record>, figure: impl Fn(&Record) -> String) -> comfy_table::Table {
    let mut titles = vec!["impl".to_owned()];
    titles.extend(SHAPES.iter().map(|shape| format!("{} B", shape.bytes)));
    let mut table = plain(&titles);
    let records: Vec<&Record> = records.collect();
    let mut names: Vec<&str> = Vec::new();
    for record in &records {
        if !names.contains(&record.name) {
            names.push(record.name);
        }
    }
    for name in names {
        let mut line = vec![name.to_owned()];
        line.extend(SHAPES.iter().map(|shape| {
            let found = records.iter().find(|record| (record.name, record.n) == (name, shape.bytes));
            found.map_or("n/a".to_owned(), |record| figure(record))
        }));
        table.add_row(line);
    }
    table
}

fn spread(total: &Spread) -> String {
    format!("{}-{}", short(total.min), short(total.max))
}

/// Figures that were measured elsewhere, by row.
fn quoted(out: &mut dyn Write, records: &[Record], published: &Published) -> io::Result<()> {
    let mut lines: Vec<(String, Vec<String>)> = Vec::new();
    for shape in SHAPES {
        let cell = format!("dma {}", shape.bytes);
        for (name, figure) in published.quoted_others(&cell, |_| false) {
            match lines.iter_mut().find(|(known, _)| *known == name) {
                Some((_, figures)) => figures.push(figure),
                None => lines.push((name, vec![figure])),
            }
        }
    }
    if records.is_empty() || lines.is_empty() {
        return Ok(());
    }
    let lines: Vec<String> = lines.iter().map(|(name, figures)| format!("{name} {}", figures.join(" / "))).collect();
    writeln!(out, "{}", wrap(&format!("quoted, not of this run: {}", lines.join("; "))))
}

fn requests(out: &mut dyn Write, records: &[Record]) -> io::Result<()> {
    let find = |bench: &str, name: &str| records.iter().find(|r| (r.bench, r.name) == (bench, name));
    let mut table = plain(&["impl", "kIOPS", "min", "max", "CPU", "alloc", "free", "submission", "completion"]);
    let mut is_empty = true;
    for record in records.iter().filter(|record| record.bench == REQUESTS) {
        is_empty = false;
        let half = |spread: Option<Spread>| spread.map_or("-".to_owned(), |spread| short(spread.median));
        let of_a_read = |bench, unit: f64| match find(bench, record.name) {
            Some(found) => format!("{:.0}", found.total.median / unit),
            None => "-".to_owned(),
        };
        table.add_row([
            record.name.to_owned(),
            short(1e6 / record.total.median),
            short(1e6 / record.total.max),
            short(1e6 / record.total.min),
            of_a_read(REQUESTS_CPU, 1.0),
            half(record.alloc),
            half(record.free),
            of_a_read(SUBMISSION, 1000.0),
            of_a_read(COMPLETION, 1000.0),
        ]);
    }
    if is_empty {
        return Ok(());
    }
    align(&mut table, 1);
    let line = "requests: io_uring, 4 KiB random reads of cached pages, depth 256, 64 at a time, a block of 64 B each as its \
                descriptor; CPU, alloc, free: ns a read; submission, completion: us, means; with 256 in flight, both together \
                are 256 times the time of one read";
    writeln!(out, "\n{}", wrap(line))?;
    writeln!(out, "{}", table.trim_fmt())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::example as record;

    #[test]
    fn dma_sizes_stand_beside_quoted_figures_in_80_columns() {
        let mut records = Vec::new();
        for shape in SHAPES {
            records.push(record(SELF_TEST, "dma-single", Kind::Ours, shape.bytes, 4.5));
            records.push(record(SELF_TEST, "jemalloc", Kind::Peer, shape.bytes, 9.0));
            records.push(record(SELF_TEST, "rte-mempool-bulk", Kind::Peer, shape.bytes, 1.0));
            records.push(record(WRITTEN, "dma-single", Kind::Ours, shape.bytes, 5.5));
        }
        let mut shuffled = record(SHUFFLED, "mimalloc", Kind::Peer, 4096, 1999.8);
        (shuffled.alloc, shuffled.free) = (Spread::of(&[999.9]), Spread::of(&[999.9]));
        records.push(shuffled);
        records[0].bytes_a_block = Some(21.46);
        let mut reads = record(REQUESTS, "dma-bulk", Kind::Ours, 64, 1000.0);
        (reads.alloc, reads.free) = (Spread::of(&[0.4]), Spread::of(&[0.3]));
        records.extend([reads, record(REQUESTS_CPU, "dma-bulk", Kind::Ours, 64, 990.0)]);
        // As long as the longest name that takes part.
        records.push(record(REQUESTS, "dma-single", Kind::Ours, 64, 1000.0));
        records.push(record(SUBMISSION, "dma-bulk", Kind::Ours, 64, 57_000.0));
        records.push(record(COMPLETION, "dma-bulk", Kind::Ours, 64, 199_000.0));

        let mut out = Vec::new();
        dma(&mut out, &records, &Published::load().unwrap()).unwrap();
        let lines: Vec<String> = String::from_utf8(out).unwrap().lines().map(str::to_owned).collect();
        assert!(lines.iter().all(|line| line.chars().count() <= 80), "{lines:#?}");
        let row = |start: &str, at: usize| {
            let found: Vec<&String> = lines.iter().filter(|line| line.starts_with(start)).collect();
            let line = found.get(at).unwrap_or_else(|| panic!("{start}: {lines:#?}"));
            line.split_whitespace().skip(1).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(row("dma-single", 0), "4.50 4.50 4.50 4.50 4.50");
        assert_eq!(row("= dma-single", 0), "dma-single / it 0.50 0.50 0.50 0.50 0.50", "bulk is not its peer");
        assert_eq!(row("dma-single", 1), "2.25-9.00 2.25-9.00 2.25-9.00 2.25-9.00 2.25-9.00");
        assert_eq!(row("dma-single", 2), "5.50 5.50 5.50 5.50 5.50");
        assert_eq!(row("dma-single", 3), "21.5 n/a n/a n/a n/a");
        assert_eq!(row("mimalloc", 0), "n/a n/a n/a n/a 1000 + 1000");
        assert_eq!(row("dma-bulk", 0), "1000 500 2000 990 0.40 0.30 57 199");
        assert!(lines.iter().any(|line| line.contains("rte-mempool 5.30 / 5.30")), "{lines:#?}");
    }
}
