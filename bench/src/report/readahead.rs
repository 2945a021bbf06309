//! The table `readahead`: a file that no cache has, pages that are cached, and what stays in the cache.

use std::io::{self, Write};

use super::{align, plain, wrap};
use crate::record::Record;
use crate::rows::Kind;
use crate::stats::{Spread, short};
use crate::tables::readahead::cold::{COLD, DELAYS, IDEAL, PATTERNS, WINDOWS};
use crate::tables::readahead::hits::{HITS, SCAN};
use crate::tables::readahead::warm::{PARTS, Part, SMALL};
use crate::tables::readahead::{CACHE, DIRECT};
use crate::tables::total::published_size;
use pagemill_harness::record::mib_per_s;

pub(super) fn readahead(out: &mut dyn Write, records: &[Record]) -> io::Result<()> {
    if records.iter().any(|record| record.bench == WINDOWS[0].1) {
        allocation(out, records)?;
    }
    if records.iter().any(|record| record.bench == COLD) {
        cold(out, records)?;
    }
    for (bench, delay) in DELAYS.into_iter().filter(|(bench, _)| records.iter().any(|r| r.bench == *bench)) {
        delayed(out, records, bench, delay.as_millis())?;
    }
    if records.iter().any(|record| record.bench == PATTERNS[0].0) {
        patterns(out, records)?;
    }
    let mut sizes: Vec<usize> = records.iter().filter(|r| r.bench == PARTS[0].one).map(|r| r.n).collect();
    sizes.dedup();
    sizes.sort_unstable();
    sizes.dedup();
    for n in sizes {
        warm(out, records, n)?;
    }
    if records.iter().any(|record| record.bench.starts_with(HITS)) {
        hits(out, records)?;
    }
    Ok(())
}

fn find<'a>(records: &'a [Record], bench: &str, name: &str, n: Option<usize>) -> Option<&'a Record> {
    records.iter().find(|r| (r.bench, r.name) == (bench, name) && n.is_none_or(|n| r.n == n))
}

fn missing() -> String {
    "-".to_owned()
}

fn shown(figure: Option<f64>) -> String {
    figure.map_or_else(missing, short)
}

/// MiB/s of the median, of the slowest and of the fastest round.
fn speeds(record: &Record) -> [String; 3] {
    let Spread { median, min, max } = record.total;
    [median, max, min].map(|ns| format!("{:.0}", mib_per_s(ns)))
}

fn allocation(out: &mut dyn Write, records: &[Record]) -> io::Result<()> {
    writeln!(out, "\nreadahead, allocation: a total read cold through the cache (O_DIRECT), 4 KiB a")?;
    writeln!(out, "call, windows of K pages; and taking as many pages from the allocator, K a call,")?;
    writeln!(out, "without touching them; us, medians, and the second in percent of the first")?;
    let mut titles = vec!["total".to_owned(), "timed".to_owned()];
    titles.extend(WINDOWS.map(|(window, ..)| format!("K = {window}")));
    let mut table = plain(&titles);
    let mut totals: Vec<usize> = records.iter().filter(|r| r.bench == WINDOWS[0].1).map(|r| r.n).collect();
    totals.dedup();
    for total in totals {
        let at = |bench: &str, name: &str| Some(find(records, bench, name, Some(total))?.total.median);
        let read = |bench: &str| at(bench, CACHE);
        let alone = |bench: &str| at(bench, "allocator");
        let us = |ns: Option<f64>| shown(ns.map(|ns| ns * total as f64 / 1e3));
        let size = published_size(total).replace('B', "iB");
        let share = |(_, reads, takes): (usize, &str, &str)| {
            alone(takes).zip(read(reads)).map_or_else(missing, |(alone, read)| format!("{:.3}", 100.0 * alone / read))
        };
        let line = |timed: &str, cells: [String; 6]| {
            let size = if timed == "read" { size.clone() } else { String::new() };
            [size, timed.to_owned()].into_iter().chain(cells)
        };
        table.add_row(line("read", WINDOWS.map(|(_, reads, _)| us(read(reads)))));
        table.add_row(line("take", WINDOWS.map(|(.., takes)| us(alone(takes)))));
        table.add_row(line("%", WINDOWS.map(share)));
    }
    align(&mut table, 2);
    writeln!(out, "{}", table.trim_fmt())
}

/// The fastest of the rows with large requests past the system's cache.
fn best_direct(records: &[Record]) -> Option<&Record> {
    let direct = DIRECT.into_iter().filter_map(|name| find(records, COLD, name, None));
    direct.min_by(|a, b| a.total.median.total_cmp(&b.total.median))
}

fn cold(out: &mut dyn Write, records: &[Record]) -> io::Result<()> {
    let of_part: Vec<&Record> = records.iter().filter(|record| record.bench == COLD).collect();
    let (mib, passes) = (of_part.first().map_or(0, |r| r.n >> 8), of_part.first().map_or(0, |r| r.runs));
    let best = best_direct(records);
    writeln!(out, "\nreadahead, cold: {mib} MiB of a file read in sequence, 128 KiB a call, none of it")?;
    writeln!(out, "cached; MiB/s, medians of {passes} passes, slowest, fastest; fetched: pages / asked")?;
    let mut table = plain(&["impl", "MiB/s", "min", "max", "/ direct", "fetched", "hits %", "MiB"]);
    for record in of_part {
        let ratio = best.map(|best| best.total.median / record.total.median);
        let cells = [shown(ratio), shown(record.fetched), shown(record.hit_percent), format!("{}", record.n >> 8)];
        table.add_row([record.name.to_owned()].into_iter().chain(speeds(record)).chain(cells));
    }
    align(&mut table, 1);
    writeln!(out, "{}", table.trim_fmt())?;
    let note = "/ direct: the best of direct-1m…. cache: over O_DIRECT, as large as the file, in memory as an allocator has it by \
                default, that it used before. -ring: by an io_uring. -evicts: an eighth of the file. -4k: no 2 MiB pages. \
                -fresh: memory never used before. -buffered: through the system's cache, which is cold too. direct: O_DIRECT, with the \
                size of a request and the number under way; -huge: into 2 MiB pages. read-128k: read(2). mmap: a word of each page is touched, and \
                none copied";
    writeln!(out, "{}", wrap(note))
}

fn delayed(out: &mut dyn Write, records: &[Record], bench: &str, delay: u128) -> io::Result<()> {
    writeln!(out, "\nreadahead, delayed: a source that answers after {delay} ms and delivers 1 GB/s; MiB/s")?;
    let ideal = find(records, bench, IDEAL, None);
    let mut table = plain(&["impl", "MiB/s", "min", "max", "/ ideal", "hits %", "MiB"]);
    for record in records.iter().filter(|record| record.bench == bench) {
        let ratio = ideal.map(|ideal| ideal.total.median / record.total.median);
        let cells = [shown(ratio), shown(record.hit_percent), format!("{}", record.n >> 8)];
        table.add_row([record.name.to_owned()].into_iter().chain(speeds(record)).chain(cells));
    }
    align(&mut table, 1);
    writeln!(out, "{}", table.trim_fmt())?;
    let note = "ideal: computed, one delay and then all bytes. cache: blocking calls by three threads and the reader. -begins: \
                the source takes reads and completes them. -wide: and windows of what it delivers in two delays. -0: \
                nothing is read ahead. one: no cache, one request at a time";
    writeln!(out, "{}", wrap(note))
}

fn patterns(out: &mut dyn Write, records: &[Record]) -> io::Result<()> {
    writeln!(out, "\nreadahead, patterns: the cold file by calls for 4 KiB; own: a handle for each")?;
    writeln!(out, "stream; read: read(2) with the system's readahead; MiB/s, medians")?;
    let titles = ["pattern", "impl", "MiB/s", "min", "max", "/ read", "fetched", "hits %", "asked"];
    let mut table = plain(&titles);
    for (bench, title) in PATTERNS {
        for record in records.iter().filter(|record| record.bench == bench) {
            let read = if record.name.ends_with("-own") { "read-own" } else { "read" };
            let ratio = find(records, bench, read, None).map(|read| read.total.median / record.total.median);
            let cells = [shown(ratio), shown(record.fetched), shown(record.hit_percent), record.n.to_string()];
            let names = [title.to_owned(), record.name.to_owned()];
            table.add_row(names.into_iter().chain(speeds(record)).chain(cells));
        }
    }
    align(&mut table, 2);
    writeln!(out, "{}", table.trim_fmt())
}

fn warm(out: &mut dyn Write, records: &[Record], n: usize) -> io::Result<()> {
    let small = if n == SMALL { " (the best case: they fit a second-level cache)" } else { "" };
    writeln!(out, "\nreadahead, warm: {n} cached pages{small}")?;
    writeln!(out, "ns a read of 4 KiB or 8 bytes, a call for each; / read: read(2)'s speed is 1;")?;
    writeln!(out, "both: on two processors at once, and how much of its speed each keeps")?;
    for part in &PARTS {
        let mut table = plain(&[part.title, "ns", "min", "max", "/ read", "both", "kept"]);
        for record in records.iter().filter(|record| (record.bench, record.n) == (part.one, n)) {
            table.add_row([record.name.to_owned()].into_iter().chain(of_part(records, part, record.name, n)));
        }
        align(&mut table, 1);
        writeln!(out, "{}\n", table.trim_fmt())?;
    }
    Ok(())
}

fn of_part(records: &[Record], part: &Part, name: &str, n: usize) -> [String; 6] {
    let at = |bench, name| find(records, bench, name, Some(n)).map(|record| record.total);
    let (one, two, read) = (at(part.one, name), at(part.two, name), at(part.one, "read"));
    let ratio = |a: Option<Spread>, b: Option<Spread>| shown(a.zip(b).map(|(a, b)| a.median / b.median));
    let cell = |pick: fn(Spread) -> f64| shown(one.map(pick));
    let [median, min, max] = [cell(|s| s.median), cell(|s| s.min), cell(|s| s.max)];
    [median, min, max, ratio(read, one), shown(two.map(|two| two.median)), ratio(one, two)]
}

fn hits(out: &mut dyn Write, records: &[Record]) -> io::Result<()> {
    writeln!(out, "\nreadahead, hits: percent of reads that hit, on generated traces; nothing is read")?;
    writeln!(out, "ahead. The others are simulated; behind: points behind the best of them")?;
    let mut names: Vec<&str> = Vec::new();
    for record in records.iter().filter(|r| r.bench.starts_with(HITS) && r.kind == Kind::Peer) {
        if !names.contains(&record.name) {
            names.push(record.name);
        }
    }
    let mut titles = vec!["trace", "pages", CACHE];
    titles.extend(&names);
    titles.push("behind");
    let mut table = plain(&titles);
    let percent = |record: Option<&Record>| record.and_then(|record| record.hit_percent);
    let show = |figure: Option<f64>| figure.map_or_else(missing, |figure| format!("{figure:.1}"));
    for ours in records.iter().filter(|r| (r.bench.starts_with(HITS) || r.bench == SCAN) && r.name == CACHE) {
        let peers: Vec<Option<f64>> =
            names.iter().map(|name| percent(find(records, ours.bench, name, Some(ours.n)))).collect();
        let best = peers.iter().flatten().copied().max_by(f64::total_cmp);
        let behind = best.zip(ours.hit_percent).map(|(best, ours)| best - ours);
        let trace = if ours.bench == SCAN { "hot set after a scan" } else { ours.bench.trim_start_matches(HITS) };
        let mut line = vec![trace.to_owned(), ours.n.to_string(), show(ours.hit_percent)];
        line.extend(peers.into_iter().map(show));
        line.push(show(behind));
        table.add_row(line);
    }
    align(&mut table, 1);
    writeln!(out, "{}", table.trim_fmt())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::example as record;

    fn lines(records: &[Record]) -> Vec<String> {
        let mut out = Vec::new();
        readahead(&mut out, records).unwrap();
        let lines: Vec<String> = String::from_utf8(out).unwrap().lines().map(str::to_owned).collect();
        assert!(lines.iter().all(|line| line.chars().count() <= 80), "{lines:#?}");
        lines
    }

    fn words(lines: &[String], start: &str) -> String {
        let line = lines.iter().find(|line| line.starts_with(start)).unwrap_or_else(|| panic!("{start}: {lines:#?}"));
        line.split_whitespace().skip(1).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn a_cold_read_stands_beside_the_better_of_the_large_direct_ones() {
        // 3906.25 ns a page are 1000 MiB/s.
        let of = |name, kind, ns| record(COLD, name, kind, 1 << 17, ns);
        let mut ours = of(CACHE, Kind::Ours, 3906.25);
        (ours.fetched, ours.hit_percent) = (Some(1.0), Some(99.5));
        let direct = [of("direct-1m", Kind::Peer, 7812.5), of("direct-1m-2", Kind::Peer, 1953.125)];
        let lines = lines(&[&[ours, of("mmap-sequential", Kind::Peer, 1.0)], &direct[..]].concat());
        assert_eq!(words(&lines, "cache "), "1000 500 2000 0.50 1.00 99.5 512");
        assert_eq!(words(&lines, "direct-1m "), "500 250 1000 0.25 - - 512");
    }

    #[test]
    fn the_share_of_allocation_is_in_percent_of_the_read() {
        let total = 1 << 18;
        let of = |(_, reads, takes)| {
            [record(reads, CACHE, Kind::Ours, total, 100_000.0), record(takes, "allocator", Kind::Ours, total, 5.0)]
        };
        let lines = lines(&WINDOWS.map(of).concat());
        assert!(words(&lines, "1 GiB").starts_with("GiB read 26214400 "), "{lines:#?}");
        assert!(lines.iter().any(|line| line.trim_start().starts_with("% ") && line.contains("0.005")), "{lines:#?}");
    }

    #[test]
    fn warm_reads_are_compared_with_read_on_one_processor_and_with_themselves_on_two() {
        let mut records = Vec::new();
        for part in PARTS {
            for (name, ns) in [(CACHE, 100.0), ("read", 400.0), ("quick_cache", 12345.0)] {
                records.push(record(part.one, name, Kind::Peer, 1_000_000, ns));
                records.push(record(part.two, name, Kind::Peer, 1_000_000, 1.25 * ns));
            }
        }
        let lines = lines(&records);
        assert_eq!(words(&lines, "cache "), "100 50.0 200 4.00 125 0.80");
        assert_eq!(lines.iter().filter(|line| line.starts_with("quick_cache")).count(), PARTS.len());
    }

    #[test]
    fn hits_stand_beside_the_best_policy() {
        let of = |name, kind, percent| Record {
            hit_percent: Some(percent),
            ..record("readahead-hits loop 1.1x after zipf", name, kind, 10_000, 0.0)
        };
        let records = [of(CACHE, Kind::Ours, 70.0), of("LRU", Kind::Peer, 10.0), of("ARC", Kind::Peer, 72.5)];
        assert_eq!(words(&lines(&records), "loop 1.1x"), "1.1x after zipf 10000 70.0 10.0 72.5 2.5");
    }

    #[test]
    fn patterns_and_delays_fit() {
        let mut records = Vec::new();
        for (bench, _) in PATTERNS {
            for name in [CACHE, "cache-own", "read", "read-own"] {
                let record = record(bench, name, Kind::Ours, 65_536, 800.0);
                records.push(Record { fetched: Some(1.5), hit_percent: Some(99.9), ..record });
            }
        }
        for (bench, _) in DELAYS {
            records.extend(["cache-begins", IDEAL].map(|name| record(bench, name, Kind::Ours, 65_536, 800.0)));
        }
        let lines = lines(&records);
        assert_eq!(words(&lines, "every 16th"), "16th cache 4883 2441 9766 1.00 1.50 99.9 65536");
        assert_eq!(words(&lines, "cache-begins"), "4883 2441 9766 1.00 - 256");
    }
}
