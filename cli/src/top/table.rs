//! The table: lines of plain text, from what the process says and what it said before.
//!
//! What has a place of its own is shown there: memory, zones, free blocks, lists, sizes of bulk calls. Every counter gets
//! a row with its total and its rate, by its name, every other gauge of an allocator a row too, and every gauge of its
//! zones or pools a column: a new one needs nothing here.
use std::fmt::Write;

use super::record::{Change, Figure, Kind};

/// Columns of the bar, and of a histogram's bars.
const BAR: usize = 50;
/// What a histogram's columns are drawn with, from nothing to all.
const STEPS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Gauges of an allocator that stand in its title and its memory.
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
    lines.extend(gauges(change, name, &[("node", 5), ("zone", 7)]));
    lines.extend(free_blocks(change, name));
    lines.extend(lists(change, name));
    lines.extend(gauges(change, name, &[("pool", 12)]));
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

/// `[####||....]`, and what its parts are.
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
        // What is there is seen, however little.
        let end = if pages > 0 { end.max(bar.len() + 1).min(BAR) } else { end };
        bar.extend(std::iter::repeat_n(sign, end.saturating_sub(bar.len())));
    }
    let shown = parts.iter().filter(|(_, what, pages)| *pages > 0 || *what != "put aside");
    let shown: Vec<_> = shown.map(|(sign, what, pages)| format!("{sign} {what} {}", grouped(*pages))).collect();
    vec![format!("  [{bar:.<BAR$}] {} pages, {}", grouped(all), size(all)), format!("   {}", shown.join("   "))]
}

/// A row for each of the allocator's zones, or pools, and a column for each gauge that they have. `labels` are what they
/// go by, with the columns' widths; the last of them says what they are.
fn gauges(change: &Change, name: &str, labels: &[(&str, usize)]) -> Vec<String> {
    let place = |figure: &Figure| -> Option<Vec<String>> {
        let is_one = figure.labels.len() == labels.len() + 1;
        labels.iter().map(|(label, _)| figure.label(label).filter(|_| is_one).map(str::to_owned)).collect()
    };
    let ours = change.now.figures.iter().filter(|figure| figure.is_of(Some(name)) && figure.kind == Kind::Gauge);
    let ours: Vec<_> = ours.filter_map(|figure| Some((place(figure)?, figure))).collect();
    let (mut places, mut columns) = (Vec::new(), Vec::new());
    for (place, figure) in &ours {
        if !places.contains(place) {
            places.push(place.clone());
        }
        if !columns.contains(&figure.name.as_str()) {
            columns.push(&figure.name);
        }
    }
    if places.is_empty() {
        return Vec::new();
    }
    let what = labels.last().map_or("", |(label, _)| label);
    let head = |name: &str| {
        let words = words(name);
        words.trim_start_matches(what).trim_start().trim_end_matches(" pages").to_owned()
    };
    let begin = |texts: &mut dyn Iterator<Item = &str>| {
        let cells = texts.zip(labels).map(|(text, (_, width))| format!("{:<width$}", plain(text)));
        format!("  {}", cells.collect::<String>())
    };
    let mut line = begin(&mut labels.iter().map(|(label, _)| *label));
    columns.iter().for_each(|column| push(&mut line, format_args!("{:>11}", head(column))));
    let mut lines = vec![String::new(), line];
    for place in places {
        let mut line = begin(&mut place.iter().map(String::as_str));
        for column in &columns {
            let found = ours.iter().find(|(other, figure)| *other == place && figure.name == *column);
            push(&mut line, format_args!("{:>11}", found.map_or("-".into(), |(_, figure)| grouped(figure.value))));
        }
        lines.push(line);
    }
    lines
}

/// Free blocks by order, over all zones; orders above the largest block are left out.
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
        push(&mut orders, format_args!("{order:>width$}"));
        push(&mut counts, format_args!("{blocks:>width$}"));
    }
    if last == 0 { Vec::new() } else { vec![String::new(), orders, counts] }
}

/// Pages on each CPU's lists, by mobility, and the pages that went through them in a second.
fn lists(change: &Change, name: &str) -> Vec<String> {
    let pages: Vec<_> = change.now.of(Some(name), "pagemill_list_pages").collect();
    let (mut cpus, mut kinds) = (Vec::new(), Vec::new());
    for figure in &pages {
        let (Some(cpu), Some(kind)) = (figure.label("cpu"), figure.label("mobility")) else { continue };
        if !cpus.contains(&cpu) {
            cpus.push(cpu);
        }
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    if cpus.is_empty() {
        return Vec::new();
    }
    let mut line = format!("  {:<14}", "lists of CPU");
    kinds.iter().for_each(|kind| push(&mut line, format_args!("{:>12}", plain(kind))));
    let mut lines = vec![String::new(), line];
    for cpu in cpus {
        let mut line = format!("  {:<14}", plain(cpu));
        for kind in &kinds {
            let is_it = |figure: &&&Figure| figure.label("cpu") == Some(cpu) && figure.label("mobility") == Some(kind);
            let sum = pages.iter().filter(is_it).map(|figure| figure.value).reduce(u64::wrapping_add);
            push(&mut line, format_args!("{:>12}", sum.map_or("-".into(), grouped)));
        }
        lines.push(line);
    }
    lines
}

/// Every counter, with its total and rate, and every gauge of the allocator as a whole that has no place of its own.
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

/// Requests that came back short by reason, over all zones; reasons that never occurred are left out.
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

/// A histogram of bulk calls: since the last record, or in all where there is none.
fn sizes(change: &Change, name: &str, what: &str, figure: &str) -> Vec<String> {
    let calls = |record: &super::record::Record| -> Vec<(String, u64)> {
        let pages = |figure: &Figure| Some((figure.label("pages")?.to_owned(), figure.value));
        record.of(Some(name), figure).filter_map(pages).collect()
    };
    let mut all = calls(&change.now);
    if let Some(before) = &change.before {
        let before = calls(before);
        for (pages, calls) in &mut all {
            let then = before.iter().find(|(other, _)| other == pages).map_or(0, |(_, calls)| *calls);
            *calls = calls.checked_sub(then).unwrap_or(*calls);
        }
    }
    let most = all.iter().map(|(_, calls)| *calls).max().unwrap_or(0);
    if most == 0 {
        return Vec::new();
    }
    let since = if change.before.is_some() { "since the last look" } else { "in all" };
    let mut lines = vec![String::new(), format!("  bulk {what} by pages a call, {since}")];
    // The first size of a step names it: the next column says where it ends.
    let head = |pages: &str| plain(pages.split('-').next().unwrap_or_default());
    let width = all.iter().map(|(pages, _)| head(pages).len() + 1).max().unwrap_or(0).max(7);
    // As many as 80 columns have.
    for all in all.chunks((78 / width).max(1)) {
        let (mut bars, mut heads) = ("  ".to_owned(), "  ".to_owned());
        for (pages, calls) in all {
            let step = (u128::from(*calls) * 8).div_ceil(u128::from(most)) as usize;
            push(&mut bars, format_args!("{:>width$}", STEPS[step.min(8)].to_string().repeat(4)));
            push(&mut heads, format_args!("{:>width$}", head(pages)));
        }
        lines.extend([bars, heads]);
    }
    lines
}

/// `pagemill_list_taken_pages_total` as `list taken pages`.
fn words(name: &str) -> String {
    plain(name.trim_start_matches("pagemill_").trim_end_matches("_total")).replace('_', " ")
}

/// What the process says, without what a terminal would obey.
fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

fn push(line: &mut String, what: std::fmt::Arguments<'_>) {
    // Writing to a string can't fail.
    let _ = line.write_fmt(what);
}

/// `1234567` as `1,234,567`.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

fn size(pages: u64) -> String {
    let mut size = pages as f64 * pagemill::PAGE_SIZE as f64 / 1024.0;
    let mut units = ["KiB", "MiB", "GiB"].iter();
    let mut unit = "KiB";
    while let Some(next) = units.next()
        && (unit == *next || size >= 1024.0)
    {
        if unit != *next {
            size /= 1024.0;
            unit = next;
        }
    }
    format!("{size:.1} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!([0, 999, 1000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!(
            [1, 255, 256, 1 << 18, 1 << 30].map(size),
            ["4.0 KiB", "1020.0 KiB", "1.0 MiB", "1.0 GiB", "4096.0 GiB"]
        );
        assert_eq!(words("pagemill_list_taken_pages_total"), "list taken pages");
    }

    #[test]
    fn a_histogram_of_every_size_fits_80_columns() {
        let figures: Vec<String> = (0..32)
            .map(|log2| {
                let pages = format!("{}-{}", 1_u64 << log2, (2_u64 << log2) - 1);
                format!(
                    r#"{{"name":"f","kind":"counter","labels":{{"allocator":"a","pages":"{pages}"}},"value":{log2}}}"#
                )
            })
            .collect();
        let text = format!(r#"{{"pid":1,"program":"p","up_ms":0,"figures":[{}]}}"#, figures.join(","));
        let change = Change::new(serde_json::from_str(&text).unwrap(), None);
        let lines = sizes(&change, "a", "calls", "f");
        assert!(lines.iter().all(|line| line.chars().count() <= 80), "{lines:#?}");
        assert_eq!(lines.len(), 2 + 2 * 5);
        assert!(lines.last().unwrap().ends_with(&(1_u64 << 31).to_string()));
    }

    #[test]
    fn zones_and_pools_have_a_row_each_and_a_column_for_each_gauge() {
        let gauge = |name: &str, labels: &str, value: u64| {
            format!(
                r#"{{"name":"pagemill_{name}","kind":"gauge","labels":{{"allocator":"a",{labels}}},"value":{value}}}"#
            )
        };
        let figures = [
            gauge("zone_free_pages", r#""node":"0","zone":"Normal""#, 1000),
            gauge("zone_free_pages", r#""node":"1","zone":"DMA32""#, 7),
            gauge("pool_size", r#""pool":"reads""#, 512),
            gauge("pool_size", r#""pool":"writes""#, 256),
            gauge("pool_low_water", r#""pool":"writes""#, 3),
        ];
        let text = format!(r#"{{"pid":1,"program":"p","up_ms":0,"figures":[{}]}}"#, figures.join(","));
        let change = Change::new(serde_json::from_str(&text).unwrap(), None);
        assert_eq!(
            gauges(&change, "a", &[("node", 5), ("zone", 7)])[1..],
            ["  node zone          free", "  0    Normal       1,000", "  1    DMA32            7"]
        );
        assert_eq!(
            gauges(&change, "a", &[("pool", 12)])[1..],
            [
                "  pool               size  low water",
                "  reads               512          -",
                "  writes              256          3"
            ]
        );
        assert!(gauges(&change, "b", &[("pool", 12)]).is_empty());
    }

    #[test]
    fn shortfalls_have_a_row_for_each_reason_that_occurred() {
        let sample = |node: &str, reason: &str, value: u64| {
            let labels = format!(r#"{{"allocator":"a","node":"{node}","zone":"Normal","reason":"{reason}"}}"#);
            format!(r#"{{"name":"pagemill_shortfalls_total","kind":"counter","labels":{labels},"value":{value}}}"#)
        };
        let figures = [
            sample("0", "exhausted", 0),
            sample("0", "below_mark", 1234),
            sample("1", "below_mark", 1),
            sample("1", "account", 5),
        ];
        let text = format!(r#"{{"pid":1,"program":"p","up_ms":0,"figures":[{}]}}"#, figures.join(","));
        let change = Change::new(serde_json::from_str(&text).unwrap(), None);
        let row = |reason: &str, sum: &str| format!("  {reason:<34}{sum:>20}");
        assert_eq!(reasons(&change, "a")[2..], [row("below mark", "1,235"), row("account", "5")]);
        assert!(reasons(&change, "b").is_empty());
        assert_eq!(rows(&change, Some("a")), [format!("  {:<34}{:>20}{:>20}", "shortfalls", "1,240", "-")]);
    }

    /// A process that says what nobody expects: labels that are missing, numbers at their limits, escape codes.
    #[test]
    fn what_a_stranger_says_is_harmless() {
        let max = u64::MAX;
        let figures = [
            r#"{"name":"pagemill_zone_managed_pages","kind":"gauge","labels":{"allocator":"a","node":"x","zone":"\u001b[2J"},"value":0}"#.to_owned(),
            format!(
                r#"{{"name":"pagemill_zone_free_pages","kind":"gauge","labels":{{"allocator":"a","node":"1","zone":"y"}},"value":{max}}}"#
            ),
            format!(
                r#"{{"name":"pagemill_handed_out_pages","kind":"gauge","labels":{{"allocator":"a"}},"value":{max}}}"#
            ),
            format!(
                r#"{{"name":"pagemill_free_blocks","kind":"gauge","labels":{{"allocator":"a","order":"9999999"}},"value":{max}}}"#
            ),
            format!(r#"{{"name":"pagemill_list_pages","kind":"gauge","labels":{{"allocator":"a"}},"value":{max}}}"#),
            format!(
                r#"{{"name":"pagemill_bulk_frees_total","kind":"counter","labels":{{"allocator":"a","pages":""}},"value":{max}}}"#
            ),
            format!(r#"{{"name":"\u001b[31m","kind":"counter","labels":{{}},"value":{max}}}"#),
        ];
        let text = format!(r#"{{"pid":0,"program":"\u0007","up_ms":{max},"figures":[{}]}}"#, figures.join(","));
        let change = Change::new(serde_json::from_str(&text).unwrap(), None);
        let table = lines(&change);
        assert!(table.iter().all(|line| !line.chars().any(char::is_control)), "{table:#?}");
        assert!(table.iter().any(|line| line.contains("18,446,744,073,709,551,615")));
    }
}
