//! The tables as text, within 80 columns where their contents allow.

mod dma;
mod page_pool;
mod publications;
mod readahead;
mod screen;
mod shapes;

use std::io::{self, Write};

pub(crate) use publications::as_published;
pub(crate) use screen::screen;

use comfy_table::Table;
pub(crate) use pagemill_harness::report::{align, credit, plain, wrap};

use crate::machine::{Machine, today};
use crate::published::Published;
use crate::record::Record;
use crate::rows::Kind;
use crate::rows::mempool::POOL_PAGES;
use crate::rows::mixed::{REQUESTS, SENT_PERCENT};
use crate::stats::short;
use crate::subject::ListOrder::{self, Random};
use crate::subject::PAGE_BYTES;
use crate::tables::mempool::WAITERS;
use crate::tables::one_thread::{BATCH_SIZES, SCATTER_PAGES, SCATTER_WIDE_PAGES};
use crate::tables::total;
use crate::tables::touch::TOUCH_PAGES;

/// Where and when: the processor, the system, today.
pub(crate) fn place(machine: &Machine) -> String {
    let (cpus, plural) = (machine.allowed.len(), if machine.allowed.len() == 1 { "" } else { "s" });
    format!("{}; {}; {cpus} processor{plural}; {}", machine.cpu, machine.kernel, today())
}

/// The report's first lines: the machine, the build, the rounds.
pub(crate) fn header(machine: &Machine, backend: &str, rounds: usize) -> String {
    let states = if machine.has_full_states { "; FULL STATES" } else { "" };
    let how = format!("{}; backend {backend}{states}; medians of {rounds} rounds in turns", machine.build);
    [place(machine), how].map(|line| wrap(&line)).join("\n")
}

/// Writes the report of one table: its figures, and published figures beside them.
pub(crate) fn table(
    out: &mut dyn Write,
    name: &str,
    records: &[Record],
    published: &Published,
    has_details: bool,
) -> io::Result<()> {
    match name {
        "batch" => batch(out, records, published, has_details),
        "burst" => burst(out, records, published, has_details),
        "scatter" => scatter(out, records, published),
        "holes" => shapes::holes(out, records),
        "orders" => shapes::orders(out, records),
        "mixed" => mixed(out, records, published),
        "total" => total(out, records),
        "touch" => touch(out, records, published),
        "mempool" => mempool(out, records),
        "page-pool" => page_pool::page_pool(out, records),
        "dma" => dma::dma(out, records, published),
        "readahead" => readahead::readahead(out, records),
        "churn" => churn(out, records, published),
        _ => threads(out, records, published),
    }
}

fn batch(out: &mut dyn Write, records: &[Record], published: &Published, has_details: bool) -> io::Result<()> {
    writeln!(out, "\nbatch: N pages out, then back; ns a page, both together, medians")?;
    writeln!(out, "{}", matrix(&of_order(records, Random), Random, &BATCH_SIZES).trim_fmt())?;
    other_orders(records)
        .try_for_each(|(order, records)| writeln!(out, "\n{}", matrix(&records, order, &BATCH_SIZES).trim_fmt()))?;
    let sizes = if has_details { &BATCH_SIZES[..] } else { &[1, 64] };
    details(out, "batch", sizes, records, published, has_details)
}

fn burst(out: &mut dyn Write, records: &[Record], published: &Published, has_details: bool) -> io::Result<()> {
    let sizes_of = |records: &[Record]| {
        let mut sizes: Vec<usize> = records.iter().map(|record| record.n).collect();
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    };
    let halves = |sizes: &[usize]| -> Vec<Vec<usize>> {
        sizes.chunks(sizes.len().div_ceil(2).max(8)).map(<[usize]>::to_vec).collect()
    };
    writeln!(out, "\nburst: N pages out, then N back; ns a page, both together, medians")?;
    let random = of_order(records, Random);
    for part in halves(&sizes_of(&random)) {
        writeln!(out, "{}", matrix(&random, Random, &part).trim_fmt())?;
    }
    for (order, records) in other_orders(records) {
        for part in halves(&sizes_of(&records)) {
            writeln!(out, "\n{}", matrix(&records, order, &part).trim_fmt())?;
        }
    }
    let is_detailed = |n: &usize| has_details || [64, 1024, 16384].contains(n);
    let detailed: Vec<usize> = sizes_of(records).into_iter().filter(is_detailed).collect();
    details(out, "burst", &detailed, records, published, has_details)
}

/// The rows whose list was in this order. Rows without a list count as random order.
fn of_order(records: &[Record], order: ListOrder) -> Vec<Record> {
    let is_order = |record: &&Record| record.order.unwrap_or(Random) == order;
    records.iter().filter(is_order).cloned().collect()
}

/// The other orders that have rows, which stand below the random order.
fn other_orders(records: &[Record]) -> impl Iterator<Item = (ListOrder, Vec<Record>)> {
    let others = ListOrder::ALL.into_iter().filter(|order| *order != Random);
    others.map(|order| (order, of_order(records, order))).filter(|(_, records)| !records.is_empty())
}

/// Some sizes in random order; with `has_details` in every order.
fn details(
    out: &mut dyn Write,
    bench: &str,
    sizes: &[usize],
    records: &[Record],
    published: &Published,
    has_details: bool,
) -> io::Result<()> {
    let orders = if has_details { &ListOrder::ALL[..] } else { &[Random] };
    for order in orders {
        let records = of_order(records, *order);
        let present = sizes.iter().filter(|&&n| records.iter().any(|record| record.n == n));
        present.into_iter().try_for_each(|&n| detail(out, bench, n, &records, published))?;
    }
    Ok(())
}

fn scatter(out: &mut dyn Write, records: &[Record], published: &Published) -> io::Result<()> {
    writeln!(out, "\nscatter: N pages out, then back in random order (shuffled untimed)")?;
    for n in [SCATTER_PAGES, SCATTER_WIDE_PAGES] {
        if records.iter().any(|record| record.n == n) {
            detail(out, "scatter", n, records, published)?;
        }
    }
    Ok(())
}

fn mixed(out: &mut dyn Write, records: &[Record], published: &Published) -> io::Result<()> {
    if records.is_empty() {
        return writeln!(out, "\nmixed: skipped");
    }
    writeln!(out, "\nmixed: two threads, {REQUESTS} requests of 1 to 16 pages under way in each, which end")?;
    writeln!(out, "at random; {SENT_PERCENT} % are freed by the other thread; the wall's ns for a page of both")?;
    detail(out, "mixed", REQUESTS, records, published)
}

/// A pool's time by form, and how long requests waited.
fn mempool(out: &mut dyn Write, records: &[Record]) -> io::Result<()> {
    let backend = records.first().map_or("no row", |record| record.backend);
    writeln!(out, "\nmempool: {POOL_PAGES} pages an operation, out and back, reserve of {POOL_PAGES}; {backend}")?;
    writeln!(out, "ns a page, medians; from an allocator with pages, and all from the reserve")?;
    let mut table =
        plain(&["impl", "with pages", "min", "max", "/ array", "from the reserve", "min", "max", "/ array"]);
    let find = |bench: &str, name: &str| records.iter().find(|r| (r.bench, r.name) == (bench, name));
    for record in records.iter().filter(|record| record.bench == "mempool") {
        let cells = |bench: &str| {
            let [this, array] = [record.name, "mempool-array"].map(|name| find(bench, name).map(|r| r.total));
            let ratio = this.zip(array).map(|(this, array)| format!("{:.1}", this.median / array.median));
            let spread = this.map(|total| [total.median, total.min, total.max].map(short));
            let missing = || "-".to_owned();
            let [median, min, max] = spread.unwrap_or_else(|| [missing(), missing(), missing()]);
            [median, min, max, ratio.unwrap_or_else(missing)]
        };
        let mut line = vec![record.name.to_owned()];
        line.extend(cells("mempool"));
        line.extend(cells("mempool-dry"));
        table.add_row(line);
    }
    align(&mut table, 1);
    writeln!(out, "{}", table.trim_fmt())?;
    let waits = records.iter().filter(|record| record.bench.starts_with("mempool-wait"));
    let waits =
        waits.map(|r| format!("{} {}", r.bench.trim_start_matches("mempool-wait-"), short(r.total.median / 1e3)));
    let line = format!(
        "{WAITERS} threads that need the whole reserve and have nothing else; us from asking to having: {}",
        waits.collect::<Vec<_>>().join(", ")
    );
    writeln!(out, "{}", wrap(&line))
}

/// Microseconds for a total: the single path, and the array form by pages a call.
fn total(out: &mut dyn Write, records: &[Record]) -> io::Result<()> {
    let backend = records.first().map_or("no row", |record| record.backend);
    writeln!(out, "\ntotal: us to take all of it, K pages a call; medians; {backend}")?;
    writeln!(out, "array form but for `single`; back: all of it in one call, not in the others;")?;
    writeln!(out, "put back in random order before, or in order: the best case")?;
    let is_present = |order: &ListOrder| records.iter().any(|record| record.order == Some(*order));
    total::ORDERS.into_iter().filter(is_present).try_for_each(|order| total_of_order(out, records, order))
}

fn total_of_order(out: &mut dyn Write, records: &[Record], order: ListOrder) -> io::Result<()> {
    let title = if order == Random { "random" } else { "in order" };
    let mut titles = vec![title.to_owned(), "single".to_owned()];
    titles.extend(total::PER_CALL.iter().map(|(_, per_call)| format!("K = {per_call}")));
    titles.extend(["1 / 16".to_owned(), "back".to_owned()]);
    let mut table = plain(&titles);
    let missing = || "n/a".to_owned();
    for n in total::sizes() {
        let is_at = |r: &&Record, at: (&str, &str)| (r.bench, r.name, r.n, r.order) == (at.0, at.1, n, Some(order));
        let find = |bench: &str, name: &str| records.iter().find(|record| is_at(record, (bench, name)));
        let taken = |bench, name| find(bench, name)?.alloc.map(|spread| spread.median);
        let us = |ns: Option<f64>| ns.map_or_else(missing, |ns| short(ns * n as f64 / 1000.0));
        let size = total::published_size(n);
        let mut line = vec![size.replace('B', "iB"), us(taken("total-1", "pagemill-single"))];
        line.extend(total::PER_CALL.iter().map(|(bench, _)| us(taken(bench, "pagemill-array"))));
        let gain = taken("total-1", "pagemill-array").zip(taken("total-16", "pagemill-array"));
        line.push(gain.map_or_else(missing, |(one, sixteen)| short(one / sixteen)));
        line.push(us(find("total-16", "pagemill-array").and_then(|record| record.free).map(|spread| spread.median)));
        table.add_row(line);
    }
    align(&mut table, 1);
    writeln!(out, "{}", table.trim_fmt())
}

/// The cost of fresh pages, then of recycled and returned ones.
fn touch(out: &mut dyn Write, records: &[Record], published: &Published) -> io::Result<()> {
    let written = |record: &Record| record.alloc.unwrap_or(record.total);
    let is_kept = |record: &&Record| record.bench.ends_with("-recycled") || record.bench.ends_with("-returned");
    let one_by_one = |bench: &str, name: &str| {
        records.iter().find(|r| (r.bench, r.name) == (bench, name)).map(|record| written(record).median)
    };
    let base = one_by_one("touch-4k", "pagemill-array");
    let (pages, mib) = (TOUCH_PAGES, TOUCH_PAGES * PAGE_BYTES / (1 << 20));
    writeln!(out, "\ntouch: {pages} fresh pages ({mib} MiB), a byte written to each; ns a page, medians")?;
    let titles = ["fresh pages", "impl", "backend", "written", "min", "max", "/ 4k", "back", "quoted"];
    let mut table = plain(&titles);
    for record in records.iter().filter(|record| !is_kept(record)) {
        let spread = written(record);
        table.add_row([
            record.bench.trim_start_matches("touch-").replace('-', " "),
            record.name.to_owned(),
            record.backend.to_owned(),
            short(spread.median),
            short(spread.min),
            short(spread.max),
            base.map_or("n/a".to_owned(), |base| short(spread.median / base)),
            record.free.map_or("-".to_owned(), |spread| short(spread.median)),
            published.quoted(record.name, record.bench).unwrap_or_default(),
        ]);
    }
    align(&mut table, 3);
    writeln!(out, "{}", table.trim_fmt())?;
    writeln!(out, "{}", wrap("/ 4k: against pagemill-array whose 4 KiB pages are committed by touching them"))?;
    for bench in ["touch-4k", "touch-4k-populated"] {
        for (name, figure) in published.quoted_others(bench, |name| name == "mmap") {
            writeln!(out, "{}", wrap(&format!("quoted, not of this run: also {name} {figure}")))?;
        }
    }
    let mut table = plain(&["pages in every round", "impl", "backend", "written", "back", "both", "min", "max"]);
    for record in records.iter().filter(is_kept) {
        table.add_row([
            record.bench.trim_start_matches("touch-").replace('-', " "),
            record.name.to_owned(),
            record.backend.to_owned(),
            short(written(record).median),
            record.free.map_or("-".to_owned(), |spread| short(spread.median)),
            short(record.total.median),
            short(record.total.min),
            short(record.total.max),
        ]);
    }
    if records.iter().any(|record| is_kept(&record)) {
        align(&mut table, 3);
        writeln!(out, "\nrecycled, or returned to the system each round; ns a page\n{}", table.trim_fmt())?;
    }
    Ok(())
}

fn churn(out: &mut dyn Write, records: &[Record], published: &Published) -> io::Result<()> {
    writeln!(out, "\nchurn: 2 MiB frames free after 100 rounds of 10 % churn; 4 GiB, lists drained")?;
    writeln!(out, "half full either in order, or filled and then a random half put back")?;
    let mut table = plain(&["impl", "backend", "start", "% of ideal", "alloc", "free", "min", "max", "seed"]);
    for record in records {
        let half = |spread: Option<crate::stats::Spread>| spread.map_or("-".to_owned(), |s| short(s.median));
        table.add_row([
            record.name.to_owned(),
            record.backend.to_owned(),
            record.bench.trim_start_matches("churn-").replace('-', " "),
            record.ideal_percent.map_or("-".to_owned(), |percent| format!("{percent:.1}")),
            half(record.alloc),
            half(record.free),
            short(record.total.min),
            short(record.total.max),
            record.seed.map_or("-".to_owned(), |seed| seed.to_string()),
        ]);
    }
    align(&mut table, 3);
    writeln!(out, "{}", table.trim_fmt())?;
    if let Some(llfree) = published.table("llfree-2023") {
        for row in llfree.rows.iter().filter(|row| row[0].shown().starts_with("2 MiB frames")) {
            let [what, llfree, linux] = [&row[0], &row[1], &row[2]].map(crate::published::Cell::shown);
            writeln!(out, "{}", wrap(&format!("* LLFree {llfree}, Linux {linux}: {what}")))?;
        }
        credit(out, published, "llfree-2023")?;
    }
    Ok(())
}

fn threads(out: &mut dyn Write, records: &[Record], published: &Published) -> io::Result<()> {
    let own = |bench: &str| records.iter().filter(|record| record.bench == bench).collect::<Vec<_>>();
    if records.is_empty() {
        return writeln!(out, "\nthreads: skipped");
    }
    writeln!(out, "\nthreads, own pages: ns a page and thread, one processor at work or both")?;
    let mut table = plain(&["impl", "backend", "N", "one", "both", "min", "max", "scales"]);
    for (one, both) in own("threads-own-1").into_iter().zip(own("threads-own-2")) {
        table.add_row([
            one.name.to_owned(),
            one.backend.to_owned(),
            one.n.to_string(),
            short(one.total.median),
            short(both.total.median),
            short(both.total.min),
            short(both.total.max),
            format!("{:.2}", one.total.median / both.total.median),
        ]);
    }
    align(&mut table, 2);
    writeln!(out, "{}", table.trim_fmt())?;
    writeln!(out, "\nthreads, hand-over: one takes 64 at a time, the other puts them back; ns a page")?;
    detail(
        out,
        "hand-over",
        64,
        &records.iter().filter(|r| r.bench == "threads-hand-over").cloned().collect::<Vec<_>>(),
        published,
    )
}

/// The records of one size, with halves, spread, the ratio to the best peer and quoted figures.
fn detail(out: &mut dyn Write, bench: &str, n: usize, records: &[Record], published: &Published) -> io::Result<()> {
    let records: Vec<&Record> = records.iter().filter(|record| record.n == n).collect();
    let best = best_peer(records.iter().copied());
    let cell = format!("{bench} {n}");
    let mut table = plain(&["impl", "backend", "alloc", "free", "total", "min", "max", "/ best peer", "quoted"]);
    for record in &records {
        let half = |spread: Option<crate::stats::Spread>| spread.map_or("-".to_owned(), |s| short(s.median));
        table.add_row([
            record.name.to_owned(),
            record.backend.to_owned(),
            half(record.alloc),
            half(record.free),
            short(record.total.median),
            short(record.total.min),
            short(record.total.max),
            best.map_or("-".to_owned(), |best| format!("{:.2}", record.total.median / best.total.median)),
            published.quoted(record.name, &cell).unwrap_or_default(),
        ]);
    }
    align(&mut table, 2);
    let runs = records.first().map_or(0, |record| record.runs);
    let named = best.map_or("no peer was run".to_owned(), |best| format!("best peer: {}", best.name));
    let order = records.iter().find_map(|record| record.order).map_or(String::new(), |o| format!(" {}", o.label()));
    let title = format!("{bench}, N = {n}{order}; ns a page, medians of {runs} rounds; {named}");
    writeln!(out, "\n{}\n{}", wrap(&title), table.trim_fmt())?;
    let others = published.quoted_others(&cell, |name| records.iter().any(|record| record.name == name));
    if !others.is_empty() || records.iter().any(|record| published.quoted(record.name, &cell).is_some()) {
        let others: Vec<String> = others.into_iter().map(|(name, figure)| format!("{name} {figure}")).collect();
        if !others.is_empty() {
            writeln!(out, "{}", wrap(&format!("quoted, not of this run: also {}", others.join("; "))))?;
        }
    }
    Ok(())
}

/// The fastest peer, floors left out.
pub(crate) fn best_peer<'a>(records: impl Iterator<Item = &'a Record>) -> Option<&'a Record> {
    records.filter(|record| record.kind == Kind::Peer).min_by(|a, b| a.total.median.total_cmp(&b.total.median))
}

/// Medians of all rows against sizes; then the best peer, and Pagemill's best against it.
fn matrix(records: &[Record], order: ListOrder, sizes: &[usize]) -> Table {
    let title = match order {
        Random => "random order",
        ListOrder::Fifo => "fifo order",
        ListOrder::InOrder => "in order (best)",
    };
    let mut titles = vec![title.to_owned(), "backend".to_owned()];
    titles.extend(sizes.iter().map(usize::to_string));
    let mut table = plain(&titles);
    let mut names: Vec<(&str, &str)> = Vec::new();
    for record in records {
        if !names.contains(&(record.name, record.backend)) {
            names.push((record.name, record.backend));
        }
    }
    for (name, backend) in names {
        let mut line = vec![name.to_owned(), backend.to_owned()];
        line.extend(sizes.iter().map(|&n| {
            let found = records.iter().find(|r| (r.name, r.backend, r.n) == (name, backend, n));
            found.map_or("n/a".to_owned(), |record| short(record.total.median))
        }));
        table.add_row(line);
    }
    let at = |n: usize| records.iter().filter(move |record| record.n == n);
    let best_ours = |n: usize| {
        let ours = at(n).filter(|record| record.kind == Kind::Ours);
        ours.map(|record| record.total.median).min_by(f64::total_cmp)
    };
    let peers: Vec<Option<f64>> = sizes.iter().map(|&n| best_peer(at(n)).map(|peer| peer.total.median)).collect();
    if peers.iter().any(Option::is_some) {
        let shown = |figure: Option<f64>| figure.map_or("n/a".to_owned(), short);
        let mut best = vec!["= best peer".to_owned(), String::new()];
        best.extend(peers.iter().map(|&peer| shown(peer)));
        table.add_row(best);
        let mut ratio = vec!["= pagemill / it".to_owned(), String::new()];
        ratio.extend(sizes.iter().zip(&peers).map(|(&n, peer)| shown(best_ours(n).zip(*peer).map(|(a, b)| a / b))));
        table.add_row(ratio);
    }
    align(&mut table, 2);
    table
}

/// Names the source of the column `quoted`.
pub(crate) fn footer(published: &Published) -> String {
    let source = published.table("measured-2026").map_or("", |table| table.source.as_str());
    wrap(&format!("quoted: not of this run; {source}; where one is shown, its machine is not yours"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::example as record;

    fn sample() -> Vec<Record> {
        vec![
            record("batch", "pagemill-callback", Kind::Ours, 1, 5.0),
            record("batch", "pagemill-callback", Kind::Ours, 64, 0.5),
            record("batch", "tls-vec", Kind::Floor, 64, 0.2),
            record("batch", "glibc", Kind::Peer, 64, 825.0),
            record("batch", "mutex-vec", Kind::Peer, 64, 1.0),
        ]
    }

    fn lines_of(name: &str, records: &[Record]) -> Vec<String> {
        let mut out = Vec::new();
        table(&mut out, name, records, &Published::load().unwrap(), false).unwrap();
        String::from_utf8(out).unwrap().lines().map(str::to_owned).collect()
    }

    #[test]
    fn the_best_peer_is_the_fastest_and_never_a_floor() {
        assert_eq!(best_peer(sample().iter()).unwrap().name, "mutex-vec");
        assert!(best_peer(sample()[..3].iter()).is_none());
    }

    #[test]
    fn a_batch_table_shows_medians_and_ratio_in_80_columns() {
        let lines = lines_of("batch", &sample());
        assert!(lines.iter().all(|line| line.chars().count() <= 80), "{lines:#?}");
        let row = |start: &str| {
            let line =
                lines.iter().find(|line| line.starts_with(start)).unwrap_or_else(|| panic!("{start}: {lines:#?}"));
            line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(
            row("pagemill-callback"),
            "pagemill-callback rseq 5.00 n/a n/a n/a n/a n/a n/a 0.50 n/a".split(' ').collect::<Vec<_>>()
        );
        assert_eq!(row("= best peer")[10], "1.00");
        assert_eq!(row("= pagemill / it")[11], "0.50");
        let detail = lines.iter().rev().find(|line| line.starts_with("glibc")).unwrap();
        assert_eq!(
            detail.split_whitespace().collect::<Vec<_>>(),
            ["glibc", "-", "-", "-", "825", "412", "1650", "825.00"]
        );
    }

    #[test]
    fn a_list_in_order_stands_below_and_is_called_the_best_case() {
        let mut records = sample();
        records[1].order = Some(Random);
        let mut best = record("batch", "pagemill-callback", Kind::Ours, 64, 0.25);
        best.order = Some(ListOrder::InOrder);
        records.push(best);
        let lines = lines_of("batch", &records);
        let rows: Vec<&String> = lines.iter().filter(|line| line.starts_with("pagemill-callback rseq")).collect();
        assert!(rows[0].contains("0.50") && !rows[0].contains("0.25") && rows[1].contains("0.25"), "{rows:#?}");
        assert!(lines.iter().any(|line| line.starts_with("in order (best)")), "{lines:#?}");
        assert!(lines.iter().any(|line| line.starts_with("batch, N = 64 random; ")), "{lines:#?}");
        let ratio = lines.iter().find(|line| line.starts_with("= pagemill / it")).unwrap();
        assert_eq!(ratio.split_whitespace().nth(11), Some("0.50"), "the best case is compared with nobody: {ratio}");
    }

    #[test]
    fn a_total_stands_in_microseconds() {
        let halves = |bench, name, out, back| {
            let mut record = record(bench, name, Kind::Ours, 1024, 100.0);
            (record.alloc, record.free) = (crate::stats::Spread::of(&[out]), crate::stats::Spread::of(&[back]));
            record.order = Some(Random);
            record
        };
        let records = [
            halves("total-1", "pagemill-single", 8.0, 1.0),
            halves("total-1", "pagemill-array", 9.0, 1.0),
            halves("total-16", "pagemill-array", 3.0, 2.0),
        ];
        let lines = lines_of("total", &records);
        assert!(lines.iter().all(|line| line.chars().count() <= 80), "{lines:#?}");
        let at = lines.iter().position(|line| line.starts_with("4 MiB")).unwrap();
        let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let shown = ["4", "MiB", "8.19", "9.22", "n/a", "n/a", "n/a", "3.07", "n/a", "3.00", "2.05"];
        assert_eq!(words(&lines[at]), shown);
    }

    #[test]
    fn touch_shows_fresh_and_recycled_pages_in_separate_tables() {
        let written = |bench, name, kind, out, back| {
            let mut record = record(bench, name, kind, TOUCH_PAGES, out + back);
            (record.alloc, record.free) = (crate::stats::Spread::of(&[out]), crate::stats::Spread::of(&[back]));
            record
        };
        let records = [
            written("touch-4k", "pagemill-array", Kind::Ours, 1000.0, 4.0),
            written("touch-2m-populated", "pagemill-array", Kind::Ours, 200.0, 4.0),
            written("touch-2m-populated", "mmap", Kind::Peer, 160.0, 20.0),
            written("touch-4k-returned", "pagemill-array", Kind::Ours, 1000.0, 300.0),
        ];
        let lines = lines_of("touch", &records);
        assert!(lines.iter().all(|line| line.chars().count() <= 80), "{lines:#?}");
        let row = |start: &str| lines.iter().find(|line| line.starts_with(start)).unwrap().split_whitespace();
        let shown = ["2m", "populated", "pagemill-array", "rseq", "200", "200", "200", "0.20", "4.00"];
        assert_eq!(row("2m populated pagemill").collect::<Vec<_>>(), shown);
        assert_eq!(row("2m populated mmap").next_back(), Some("162"), "what was quoted");
        assert_eq!(row("4k returned").nth(6), Some("1300"));
    }

    #[test]
    fn wrapping_keeps_every_word() {
        let text = "word ".repeat(60);
        let wrapped = wrap(&text);
        assert!(wrapped.lines().all(|line| line.len() <= 80));
        assert_eq!(wrapped.split_whitespace().count(), 60);
    }

    #[test]
    fn the_pool_is_shown_with_its_spread_in_80_columns() {
        let records = [
            record("mempool", "mempool-callback", Kind::Ours, 256, 1.25),
            record("mempool", "mempool-array", Kind::Ours, 256, 0.5),
            record("mempool-dry", "mempool-array", Kind::Ours, 256, 123.0),
            record("mempool-wait-p50", "mempool-array", Kind::Ours, 256, 5000.0),
        ];
        let lines = lines_of("mempool", &records);
        assert!(lines.iter().all(|line| line.chars().count() <= 80), "{lines:#?}");
        let row = |name: &str| {
            let line = lines.iter().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name}: {lines:#?}"));
            line.split_whitespace().skip(1).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(row("mempool-array"), "0.50 0.25 1.00 1.0 123 61.5 246 1.0");
        assert_eq!(row("mempool-callback"), "1.25 0.62 2.50 2.5 - - - -");
        assert!(lines.iter().any(|line| line.contains("p50 5.00")), "{lines:#?}");
    }
}
