//! The table: lines of plain text, made of what the process reports now and what it reported before.
//!
//! Memory, zones, free blocks, lists and the sizes of bulk calls have places of their own. Every counter has a row with
//! its total and its rate, under its name. Every other gauge of an allocator has a row, and every gauge of its zones or
//! pools a column. Page pools and page caches belong to the process: below the allocators. So a new figure needs no change here.
use indicatif::HumanCount;

use super::record::{Change, Figure, Kind, Record, unique};

/// Columns of the bar, and of a histogram's bars.
const BAR: usize = 50;
/// The characters of a histogram, from nothing to all.
const STEPS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Characters of the longest name in the first columns of a table.
const PAGE_POOL: usize = 39;
/// Those of a page cache's, which has more columns.
const PAGE_CACHE: usize = 21;

/// Gauges of an allocator that its title and its memory show.
const PLACED: [&str; 3] = ["pagemill_cpus", "pagemill_handed_out_pages", "pagemill_quarantined_pages"];

/// The whole table.
pub(super) fn lines(change: &Change) -> Vec<String> {
    let record = &change.now;
    let up = record.up_ms / 1000;
    let (minutes, seconds) = (up / 60, up % 60);
    let mut lines =
        vec![plain(&format!("{}, process {}, serving for {minutes}:{seconds:02}", record.program, record.pid))];
    for allocator in record.allocators() {
        lines.push(String::new());
        lines.extend(of_allocator(change, allocator));
    }
    if record.allocators().is_empty() {
        lines.extend([String::new(), "it shows no allocator yet".to_owned()]);
    }
    lines.extend(gauges(change, None, &[("id", 8), ("page_pool", PAGE_POOL + 1)]));
    lines.extend(gauges(change, None, &[("id", 8), ("page_cache", PAGE_CACHE + 1)]));
    let process = rows(change, None);
    if !process.is_empty() {
        lines.extend([String::new(), format!("{:<36}{:>20}{:>20}", "in the whole process", "total", "a second")]);
        lines.extend(process);
    }
    lines
}

fn of_allocator(change: &Change, name: &str) -> Vec<String> {
    let mut lines = vec![title(change, name)];
    lines.extend(memory(change, name));
    lines.extend(gauges(change, Some(name), &[("node", 5), ("zone", 7)]));
    lines.extend(free_blocks(change, name));
    lines.extend(lists(change, name));
    lines.extend(gauges(change, Some(name), &[("pool", 12)]));
    lines.extend(gauges(change, Some(name), &[("dma_pool", 16)]));
    lines.extend([String::new(), format!("{:<36}{:>20}{:>20}", "", "total", "a second")]);
    lines.extend(rows(change, Some(name)));
    lines.extend(reasons(change, name));
    for (what, figure) in [("allocations", "pagemill_bulk_allocations_total"), ("frees", "pagemill_bulk_frees_total")] {
        lines.extend(sizes(change, name, what, figure));
    }
    lines
}

fn title(change: &Change, name: &str) -> String {
    let info = change.now.of(Some(name), "pagemill_info").next();
    let backend = info.and_then(|figure| figure.label("backend")).unwrap_or("unknown");
    let cpus = change.now.sum(Some(name), "pagemill_cpus").unwrap_or(0);
    plain(&format!("allocator {name}: {backend} lists, {cpus} CPUs"))
}

/// `[####||....]`, and a line that explains its parts.
fn memory(change: &Change, name: &str) -> Vec<String> {
    let sum = |figure| change.now.sum(Some(name), figure).unwrap_or(0);
    let all = sum("pagemill_zone_managed_pages");
    let parts = [
        ('#', "handed out", sum("pagemill_handed_out_pages")),
        ('|', "on lists", sum("pagemill_zone_listed_pages")),
        ('?', "put aside", sum("pagemill_quarantined_pages")),
        ('.', "free", sum("pagemill_zone_free_pages")),
    ];
    let (mut bar, mut so_far) = (String::new(), 0u64);
    for (sign, _, pages) in parts {
        so_far = so_far.saturating_add(pages);
        let end = (so_far as u128 * BAR as u128).checked_div(u128::from(all)).unwrap_or(0).min(BAR as u128) as usize;
        // A part with any page gets a sign.
        let end = if pages > 0 { end.max(bar.len() + 1).min(BAR) } else { end };
        bar.extend(std::iter::repeat_n(sign, end.saturating_sub(bar.len())));
    }
    let shown = parts.iter().filter(|(_, what, pages)| *pages > 0 || *what != "put aside");
    let shown: Vec<_> = shown.map(|(sign, what, pages)| format!("{sign} {what} {}", grouped(*pages))).collect();
    vec![format!("  [{bar:.<BAR$}] {} pages, {}", grouped(all), size(all)), format!("   {}", shown.join("   "))]
}

/// A row for each of the allocator's zones or pools, or the process's, and a column for each of their gauges. `labels`
/// identify a row, each with the width of its column; the last of them names the kind of thing.
fn gauges(change: &Change, allocator: Option<&str>, labels: &[(&str, usize)]) -> Vec<String> {
    let place = |figure: &Figure| -> Option<Vec<String>> {
        let is_one = figure.labels.len() == labels.len() + usize::from(allocator.is_some());
        labels.iter().map(|(label, _)| figure.label(label).filter(|_| is_one).map(str::to_owned)).collect()
    };
    let ours = change.now.figures.iter().filter(|figure| figure.is_of(allocator) && figure.kind == Kind::Gauge);
    let ours: Vec<_> = ours.filter_map(|figure| Some((place(figure)?, figure))).collect();
    let columns = unique(ours.iter().map(|(_, figure)| &figure.name));
    let what = labels.last().map_or("", |(label, _)| label).replace('_', " ");
    let head = |name: &&String| {
        let words = words(name);
        words.trim_start_matches(&what).trim_start().trim_end_matches(" pages").to_owned()
    };
    let begin = |texts: &mut dyn Iterator<Item = &str>| {
        // What is longer than the longest column would break the lines.
        let longest =
            labels.last().map_or(PAGE_POOL, |(label, _)| if *label == "page_cache" { PAGE_CACHE } else { PAGE_POOL });
        let cells = texts.zip(labels).map(|(text, (_, width))| format!("{:<width$.longest$}", plain(text)));
        format!("  {}", cells.collect::<String>())
    };
    let value = |place: &Vec<String>, column: &String| {
        ours.iter().find(|(other, figure)| other == place && figure.name == *column).map(|(_, figure)| figure.value)
    };
    let row = |place: &Vec<String>| {
        let values = columns.iter().map(|column| value(place, column));
        (begin(&mut place.iter().map(String::as_str)), values.collect())
    };
    let rows = unique(ours.iter().map(|(place, _)| place)).into_iter().map(row);
    grid(begin(&mut labels.iter().map(|(label, _)| *label)), columns.iter().map(head), rows.collect(), 11)
}

/// A head, and a line for each row: its first cell as it is, then its values in columns of this width, or as wide as
/// their heads. Nothing without rows.
fn grid(
    first: String,
    heads: impl Iterator<Item = String>,
    rows: Vec<(String, Vec<Option<u64>>)>,
    width: usize,
) -> Vec<String> {
    if rows.is_empty() {
        return Vec::new();
    }
    let heads: Vec<String> = heads.collect();
    let widths: Vec<usize> = heads.iter().map(|head| width.max(head.len() + 1)).collect();
    let head = heads.iter().zip(&widths).fold(first, |line, (head, width)| line + &format!("{head:>width$}"));
    let cell = |(value, width): (Option<u64>, &usize)| format!("{:>width$}", value.map_or("-".into(), grouped));
    let row = |(first, values): (String, Vec<_>)| {
        values.into_iter().zip(&widths).map(cell).fold(first, |line, cell| line + &cell)
    };
    [String::new(), head].into_iter().chain(rows.into_iter().map(row)).collect()
}

/// Free blocks by order, over all zones. Orders above the largest block are left out.
fn free_blocks(change: &Change, name: &str) -> Vec<String> {
    let mut blocks: Vec<u64> = Vec::new();
    for figure in change.now.of(Some(name), "pagemill_free_blocks") {
        let order = figure.label("order").and_then(|order| order.parse::<usize>().ok()).filter(|order| *order < 64);
        if let Some(order) = order {
            blocks.resize(blocks.len().max(order + 1), 0);
            blocks[order] = blocks[order].saturating_add(figure.value);
        }
    }
    let last = blocks.iter().rposition(|blocks| *blocks > 0).map_or(0, |last| last + 1);
    let (mut orders, mut counts) = ("  order".to_owned(), "  free ".to_owned());
    for (order, blocks) in blocks[..last].iter().enumerate() {
        let width = blocks.to_string().len().max(3) + 1;
        orders += &format!("{order:>width$}");
        counts += &format!("{blocks:>width$}");
    }
    if last == 0 { Vec::new() } else { vec![String::new(), orders, counts] }
}

/// Pages on each CPU's lists, by mobility.
fn lists(change: &Change, name: &str) -> Vec<String> {
    let pages = change.now.of(Some(name), "pagemill_list_pages");
    let pages: Vec<_> =
        pages.filter_map(|figure| Some((figure.label("cpu")?, figure.label("mobility")?, figure.value))).collect();
    let kinds = unique(pages.iter().map(|(_, kind, _)| *kind));
    let sum = |cpu: &str, kind: &str| {
        let ours = pages.iter().filter(|page| (page.0, page.1) == (cpu, kind));
        ours.map(|(.., pages)| *pages).reduce(u64::wrapping_add)
    };
    let row = |cpu| (format!("  {:<14}", plain(cpu)), kinds.iter().map(|kind| sum(cpu, kind)).collect());
    let rows = unique(pages.iter().map(|(cpu, ..)| *cpu)).into_iter().map(row);
    grid(format!("  {:<14}", "lists of CPU"), kinds.iter().map(|kind| plain(kind)), rows.collect(), 12)
}

/// A row for every counter, with its total and its rate, and for every gauge of the whole allocator that has no other
/// place.
fn rows(change: &Change, allocator: Option<&str>) -> Vec<String> {
    let mut figures: Vec<&Figure> = Vec::new();
    for figure in change.now.figures.iter().filter(|figure| figure.is_of(allocator)) {
        let is_plain = figure.labels.len() == usize::from(allocator.is_some());
        let is_row = figure.kind == Kind::Counter || is_plain && !PLACED.contains(&figure.name.as_str());
        if is_row && figures.iter().all(|other| other.name != figure.name) {
            figures.push(figure);
        }
    }
    let row = |figure: &&Figure| {
        let total = change.now.sum(allocator, &figure.name).unwrap_or(0);
        let rate = match figure.kind {
            Kind::Counter => {
                change.rate(allocator, &figure.name).map_or("-".into(), |rate| grouped(rate.round() as u64))
            }
            Kind::Gauge => String::new(),
        };
        format!("  {:<34}{:>20}{rate:>20}", words(&figure.name), grouped(total)).trim_end().to_owned()
    };
    figures.iter().map(row).collect()
}

/// Requests that came back short by reason, over all zones. Reasons that never occurred are left out.
fn reasons(change: &Change, name: &str) -> Vec<String> {
    let mut reasons: Vec<(&str, u64)> = Vec::new();
    for figure in change.now.of(Some(name), "pagemill_shortfalls_total").filter(|figure| figure.value > 0) {
        let Some(reason) = figure.label("reason") else { continue };
        match reasons.iter_mut().find(|(other, _)| *other == reason) {
            Some((_, sum)) => *sum = sum.wrapping_add(figure.value),
            None => reasons.push((reason, figure.value)),
        }
    }
    let row = |(reason, sum): (&str, u64)| format!("  {:<34}{:>20}", plain(reason).replace('_', " "), grouped(sum));
    let mut lines: Vec<String> = reasons.into_iter().map(row).collect();
    if !lines.is_empty() {
        lines.splice(..0, [String::new(), "  shortfalls by reason, in all".to_owned()]);
    }
    lines
}

/// A histogram of bulk calls: since the last record, or in all if there is none.
fn sizes(change: &Change, name: &str, what: &str, figure: &str) -> Vec<String> {
    let calls = |record: &Record| -> Vec<(String, u64)> {
        let blocks = |figure: &Figure| Some((figure.label("blocks")?.to_owned(), figure.value));
        record.of(Some(name), figure).filter_map(blocks).collect()
    };
    let mut all = calls(&change.now);
    if let Some(before) = &change.before {
        let before = calls(before);
        for (blocks, calls) in &mut all {
            let then = before.iter().find(|(other, _)| other == blocks).map_or(0, |(_, calls)| *calls);
            *calls = calls.checked_sub(then).unwrap_or(*calls);
        }
    }
    let most = all.iter().map(|(_, calls)| *calls).max().unwrap_or(0);
    if most == 0 {
        return Vec::new();
    }
    let since = if change.before.is_some() { "since the last look" } else { "in all" };
    let mut lines = vec![String::new(), format!("  bulk {what} by blocks a call (a page is one), {since}")];
    // Each column is headed by its smallest size.
    let head = |blocks: &str| plain(blocks.split('-').next().unwrap_or_default());
    let width = all.iter().map(|(blocks, _)| head(blocks).len() + 1).max().unwrap_or(0).max(7);
    // As many as fit into 80 columns.
    for all in all.chunks((78 / width).max(1)) {
        let (mut bars, mut heads) = ("  ".to_owned(), "  ".to_owned());
        for (blocks, calls) in all {
            let step = (u128::from(*calls) * 8).div_ceil(u128::from(most)) as usize;
            bars += &format!("{:>width$}", STEPS[step.min(8)].to_string().repeat(4));
            heads += &format!("{:>width$}", head(blocks));
        }
        lines.extend([bars, heads]);
    }
    lines
}

/// `pagemill_list_taken_pages_total` as `list taken pages`.
fn words(name: &str) -> String {
    plain(name.trim_start_matches("pagemill_").trim_end_matches("_total")).replace('_', " ")
}

/// The text, without characters that a terminal would obey.
fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// `1234567` as `1,234,567`.
fn grouped(number: u64) -> String {
    HumanCount(number).to_string()
}

fn size(pages: u64) -> String {
    let kib = pages as f64 * pagemill::PAGE_SIZE as f64 / 1024.0;
    match kib {
        ..1024.0 => format!("{kib:.1} KiB"),
        ..1048576.0 => format!("{:.1} MiB", kib / 1024.0),
        _ => format!("{:.1} GiB", kib / 1048576.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    /// A record with these figures: name, kind, labels, value.
    fn change(figures: &[(&str, &str, Value, u64)]) -> Change {
        let figure = |(name, kind, labels, value): &(&str, &str, Value, u64)| json!({ "name": name, "kind": kind, "labels": labels, "value": value });
        let figures: Vec<_> = figures.iter().map(figure).collect();
        let record = json!({ "pid": 1, "program": "p\u{7}", "up_ms": u64::MAX, "figures": figures });
        Change::new(serde_json::from_value(record).unwrap(), None)
    }

    #[test]
    fn numbers_are_grouped_and_sizes_have_units() {
        assert_eq!([0, 999, 1000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!(
            [1, 255, 256, 1 << 18, 1 << 30].map(size),
            ["4.0 KiB", "1020.0 KiB", "1.0 MiB", "1.0 GiB", "4096.0 GiB"]
        );
        assert_eq!(words("pagemill_list_taken_pages_total"), "list taken pages");
    }

    #[test]
    fn a_histogram_of_every_size_fits_80_columns() {
        let steps = (0..32).map(|log2| {
            let blocks = format!("{}-{}", 1_u64 << log2, (2_u64 << log2) - 1);
            ("f", "counter", json!({ "allocator": "a", "blocks": blocks }), log2)
        });
        let lines = sizes(&change(&steps.collect::<Vec<_>>()), "a", "calls", "f");
        assert!(lines.iter().all(|line| line.chars().count() <= 80), "{lines:#?}");
        assert_eq!(lines.len(), 2 + 2 * 5);
        assert!(lines.last().unwrap().ends_with(&(1_u64 << 31).to_string()));
    }

    #[test]
    fn zones_and_pools_have_a_row_each_and_a_column_for_each_gauge() {
        let zone = |node: &str, zone: &str| json!({ "allocator": "a", "node": node, "zone": zone });
        let pool = |pool: &str| json!({ "allocator": "a", "pool": pool });
        let change = change(&[
            ("pagemill_zone_free_pages", "gauge", zone("0", "Normal"), 1000),
            ("pagemill_zone_free_pages", "gauge", zone("1", "DMA32"), 7),
            ("pagemill_pool_size", "gauge", pool("reads"), 512),
            ("pagemill_pool_size", "gauge", pool("writes"), 256),
            ("pagemill_pool_low_water", "gauge", pool("writes"), 3),
        ]);
        assert_eq!(
            gauges(&change, Some("a"), &[("node", 5), ("zone", 7)])[1..],
            ["  node zone          free", "  0    Normal       1,000", "  1    DMA32            7"]
        );
        assert_eq!(
            gauges(&change, Some("a"), &[("pool", 12)])[1..],
            [
                "  pool               size  low water",
                "  reads               512          -",
                "  writes              256          3"
            ]
        );
        assert!(gauges(&change, Some("b"), &[("pool", 12)]).is_empty());
    }

    /// All figures that a process shows of a pool, with a value of millions in each column.
    #[test]
    fn a_pool_and_a_dma_pool_fit_80_columns() {
        let gauges_of = |prefix: &str| {
            let is_ours = |figure: &&pagemill_watch::Figure| {
                figure.name.starts_with(prefix) && figure.kind == pagemill_watch::FigureKind::Gauge
            };
            pagemill_watch::FIGURES.iter().filter(is_ours).map(|figure| figure.name).collect::<Vec<_>>()
        };
        let kinds = [("pool", 12, "pagemill_pool_", 6), ("dma_pool", 16, "pagemill_dma_pool_", 5)];
        for (label, width, prefix, columns) in kinds {
            let names = gauges_of(prefix);
            assert_eq!(names.len(), columns, "{names:?}");
            let figures: Vec<_> = names
                .iter()
                .map(|name| (*name, "gauge", json!({ "allocator": "a", label: "prp lists" }), 1_234_567))
                .collect();
            let lines = lines(&change(&figures));
            let at = lines.iter().position(|line| line.starts_with("  prp lists")).unwrap();
            assert_eq!(lines[at].matches("1,234,567").count(), columns, "{lines:#?}");
            assert_eq!(lines[at].len(), lines[at - 1].len(), "a value stands below its head: {lines:#?}");
            assert!(
                lines[at].len() <= 80 && gauges(&change(&figures), Some("a"), &[(label, width)]).len() == 3,
                "{lines:#?}"
            );
        }
    }

    /// Two of one name, as a process shows them: one ended, and one without an age.
    #[test]
    fn page_pools_have_a_section_that_fits_80_columns() {
        let labels = |id: &str| json!({ "page_pool": format!("\u{1b}[2J{}", "x".repeat(200)), "id": id });
        let ours = pagemill_watch::FIGURES.iter().filter(|figure| figure.name.starts_with("pagemill_page_pool_"));
        let mut figures = Vec::new();
        for figure in ours {
            for id in ["1", "4294967"] {
                if id == "1" || !figure.name.ends_with("ended_s") {
                    figures.push((figure.name, figure.kind.name(), labels(id), 12_345_678));
                }
            }
        }
        let lines = lines(&change(&figures));
        assert!(lines.iter().all(|line| line.chars().count() <= 80), "{lines:#?}");
        let at = lines.iter().position(|line| line.starts_with("  id      page")).unwrap();
        let cells = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(cells(&lines[at]), ["id", "page_pool", "in", "flight", "ended", "s"]);
        let name = format!("?[2J{}", "x".repeat(35));
        assert_eq!(cells(&lines[at + 1]), ["1", &name, "12,345,678", "12,345,678"]);
        assert_eq!(cells(&lines[at + 2]), ["4294967", &name, "12,345,678", "-"]);
        let sums = lines.iter().filter(|line| line.trim_start().starts_with("page pool "));
        assert!(sums.clone().all(|line| cells(line).contains(&"24,691,356".into())), "{lines:#?}");
        assert_eq!(sums.count(), 11, "a row for each counter: {lines:#?}");
        assert!(!super::lines(&change(&[])).iter().any(|line| line.contains("page pool")));
    }

    #[test]
    fn page_caches_have_a_section_that_fits_80_columns() {
        let labels = |id: &str| json!({ "page_cache": format!("\u{1b}[2J{}", "x".repeat(200)), "id": id });
        let ours = pagemill_watch::FIGURES.iter().filter(|figure| figure.name.starts_with("pagemill_page_cache_"));
        let of = |figure: &'static pagemill_watch::Figure| {
            ["1", "4294967"].map(|id| (figure.name, figure.kind.name(), labels(id), 12_345_678))
        };
        let figures: Vec<_> = ours.flat_map(of).collect();
        let lines = lines(&change(&figures));
        assert!(lines.iter().all(|line| line.chars().count() <= 80), "{lines:#?}");
        let at = lines.iter().position(|line| line.starts_with("  id      page_cache")).unwrap();
        let cells = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(cells(&lines[at]), ["id", "page_cache", "pages", "dirty", "limit", "metadata", "bytes"]);
        let name = format!("?[2J{}", "x".repeat(17));
        for (line, id) in [(&lines[at + 1], "1"), (&lines[at + 2], "4294967")] {
            assert_eq!(cells(line), [&[id, &name][..], &["12,345,678"; 4]].concat());
        }
        let sums = lines.iter().filter(|line| line.trim_start().starts_with("page cache "));
        assert!(sums.clone().all(|line| cells(line).contains(&"24,691,356".into())), "{lines:#?}");
        assert_eq!(sums.count(), 17, "a row for each counter: {lines:#?}");
    }

    #[test]
    fn shortfalls_have_a_row_for_each_reason_that_occurred() {
        let sample = |node: &str, reason: &str, value: u64| {
            let labels = json!({ "allocator": "a", "node": node, "zone": "Normal", "reason": reason });
            ("pagemill_shortfalls_total", "counter", labels, value)
        };
        let change = change(&[
            sample("0", "exhausted", 0),
            sample("0", "below_mark", 1234),
            sample("1", "below_mark", 1),
            sample("1", "account", 5),
        ]);
        let row = |reason: &str, sum: &str| format!("  {reason:<34}{sum:>20}");
        assert_eq!(reasons(&change, "a")[2..], [row("below mark", "1,235"), row("account", "5")]);
        assert!(reasons(&change, "b").is_empty());
        assert_eq!(rows(&change, Some("a")), [format!("  {:<34}{:>20}{:>20}", "shortfalls", "1,240", "-")]);
    }

    /// Labels are missing, numbers are at their limits, names have escape codes.
    #[test]
    fn a_table_of_malformed_figures_has_no_control_characters() {
        let max = u64::MAX;
        let change = change(&[
            ("pagemill_zone_managed_pages", "gauge", json!({ "allocator": "a", "node": "x", "zone": "\u{1b}[2J" }), 0),
            ("pagemill_zone_free_pages", "gauge", json!({ "allocator": "a", "node": "1", "zone": "y" }), max),
            ("pagemill_handed_out_pages", "gauge", json!({ "allocator": "a" }), max),
            ("pagemill_free_blocks", "gauge", json!({ "allocator": "a", "order": "9999999" }), max),
            ("pagemill_list_pages", "gauge", json!({ "allocator": "a" }), max),
            ("pagemill_bulk_frees_total", "counter", json!({ "allocator": "a", "blocks": "" }), max),
            ("\u{1b}[31m", "counter", json!({}), max),
        ]);
        let table = lines(&change);
        assert!(table.iter().all(|line| !line.chars().any(char::is_control)), "{table:#?}");
        assert!(table.iter().any(|line| line.contains("18,446,744,073,709,551,615")));
    }
}
