//! The figures as one HTML page: charts, bars and all numbers, nothing loaded from anywhere.

use crate::bars::Bar;
use crate::chart::{self, Chart, Curve, Screen, color, escape, push};
use crate::record::Record;
use crate::rows::mixed::{REQUESTS, SENT_PERCENT};
use crate::stats::short;
use crate::subject::{HAND_OVER_PAGES, ListOrder};
use crate::tables::one_thread::LISTED_MOST;
use crate::tables::{dma, one_thread};

const PAGE_STYLE: &str = "\
:root{color-scheme:light dark}
body{background:var(--bg);color:var(--fg);font:16px/1.5 system-ui,-apple-system,'Segoe UI',sans-serif;
margin:0 auto;padding:1.5rem 1rem 4rem;max-width:56rem}
h1{font-size:1.7rem;margin:0} h2{font-size:1.25rem;margin:2.5rem 0 .25rem}
p{margin:.25rem 0 .75rem;color:var(--soft)} .chart{display:block;width:100%;height:auto} .phone{display:none}
@media (max-width:640px){.phone{display:block}.desktop{display:none}}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
.bars{width:100%} .bars th{text-align:left;white-space:nowrap;color:var(--c);padding-right:.8rem;width:1%}
.bars td:last-child{text-align:right;white-space:nowrap;padding-left:.8rem;width:1%}
.bars i{display:block;height:.9rem;min-width:2px;border-radius:2px;background:var(--c)}
.all{overflow-x:auto;font-size:.85rem} .all td,.all th{padding:.1rem .6rem;text-align:right;white-space:nowrap;
border-bottom:1px solid var(--grid)} .all td:first-child,.all td:nth-child(2){text-align:left}
summary{cursor:pointer;margin-top:2.5rem;font-weight:600} pre{overflow-x:auto;font-size:.85rem}
";

const PER_PAGE: &str = "ns a page, out and back (logarithmic)";

/// The whole page. `bars` is empty where they were not asked for.
pub(crate) fn page(header: &str, records: &[Record], bars: &[Bar]) -> String {
    let mut html = format!(
        "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\">\n<meta name=\"viewport\" \
         content=\"width=device-width,initial-scale=1\">\n<title>pagemill bench</title>\n<style>\n{}{PAGE_STYLE}</style>\n\
         <h1>pagemill bench</h1>\n<p>{}</p>\n",
        chart::style(),
        escape(header).replace('\n', "<br>\n"),
    );
    let alone = format!(
        "Out and back on one processor. Up to {LISTED_MOST} pages come from lists in random order; more are shuffled before \
         they go back. Dashed: one page a call, and the floor."
    );
    section(&mut html, "What a page costs by the pages of a call", &alone, &steady(records));
    let best = Chart { curves: best_case(records), ..over_pages() };
    if best.curves.iter().any(|curve| curve.points.len() > 1) {
        section(&mut html, "The best case: pages go back in their order", "As above, lists in ascending order.", &best);
    }
    two_processors(&mut html, records);
    whole_frames(&mut html, records);
    let blocks = Chart {
        x: "bytes of a block",
        y: "ns a block, out and back (logarithmic)",
        units: ("ns", "bytes"),
        curves: small_blocks(records),
    };
    if !blocks.curves.is_empty() {
        section(&mut html, "Small blocks for devices", "All blocks out one by one or 64 a call, then back.", &blocks);
    }
    html.push_str(&bar_table(bars));
    html + &numbers(records) + "</html>\n"
}

/// The first chart as a file. `place` says where it was measured.
pub(crate) fn first_chart(records: &[Record], place: &str) -> String {
    chart::file(&steady(records), "What a page costs: N pages out and back, in random order", place)
}

fn section(html: &mut String, title: &str, text: &str, chart: &Chart) {
    let [desktop, phone] = [Screen::Desktop, Screen::Phone].map(|screen| chart::inline(chart, screen));
    push(
        html,
        format_args!(
            "<h2>{}</h2>\n<p>{}</p>\n<div class=\"desktop\">{desktop}</div><div class=\"phone\">{phone}</div>\n",
            escape(title),
            escape(text)
        ),
    );
}

fn over_pages() -> Chart<'static> {
    Chart { x: "pages of a call, N", y: PER_PAGE, units: ("ns", "pages"), curves: Vec::new() }
}

/// The steady state: few pages from a list in random order, many that were shuffled.
fn steady(records: &[Record]) -> Chart<'static> {
    let is_drawn = |r: &Record| match r.bench {
        "batch" => r.n <= LISTED_MOST && is_order(r, ListOrder::Random),
        "scatter" => r.n > LISTED_MOST && r.n <= one_thread::SCATTER_PAGES,
        _ => false,
    };
    Chart { curves: curves(records, is_drawn), ..over_pages() }
}

fn best_case(records: &[Record]) -> Vec<Curve> {
    curves(records, |record| record.bench == "burst" && is_order(record, ListOrder::InOrder))
}

fn small_blocks(records: &[Record]) -> Vec<Curve> {
    curves(records, |record| record.bench == dma::SELF_TEST)
}

fn is_order(record: &Record, order: ListOrder) -> bool {
    record.order.is_none_or(|its| its == order)
}

/// A curve for each row that has a colour, on the backend that comes first.
fn curves(records: &[Record], is_drawn: impl Fn(&Record) -> bool) -> Vec<Curve> {
    let mut found: Vec<(usize, &str, Curve)> = Vec::new();
    for record in records.iter().filter(|record| is_drawn(record)) {
        let Some(place) = color(record.name) else { continue };
        let point = (record.n as f64, record.total.median);
        match found.iter_mut().find(|(_, _, curve)| curve.name == record.name) {
            Some((_, backend, curve)) if *backend == record.backend => curve.points.push(point),
            Some(_) => {}
            None => {
                let curve = Curve { name: record.name.to_owned(), points: vec![point] };
                found.push((place, record.backend, curve));
            }
        }
    }
    found.sort_by_key(|(place, ..)| *place);
    let sorted = |mut curve: Curve| {
        curve.points.sort_by(|a, b| a.0.total_cmp(&b.0));
        curve
    };
    found.into_iter().map(|(_, _, curve)| sorted(curve)).collect()
}

/// Two processors: a program's mix, handing over, and what a thread keeps of its speed.
fn two_processors(html: &mut String, records: &[Record]) {
    let at = |bench: &str, n: usize| curves(records, |record| (record.bench, record.n) == (bench, n));
    let figure = |curve: Curve| curve.points.last().map(|point| (curve.name.clone(), point.1));
    let of = |bench: &str, n: usize| at(bench, n).into_iter().filter_map(figure).collect::<Vec<_>>();
    let mixed = format!(
        "Two threads with {REQUESTS} requests of 1 to 16 pages under way in each, which end at random; {SENT_PERCENT} % are \
         freed by the other thread. Nanoseconds for a page of both, less is better."
    );
    bar_chart(html, "Two processors: mixed use", &mixed, "ns", &of("mixed", REQUESTS));
    let crossed = format!("One thread takes {HAND_OVER_PAGES} pages at a time, the other frees them. Less is better.");
    bar_chart(html, "Two processors: hand-over", &crossed, "ns a page", &of("threads-hand-over", HAND_OVER_PAGES));
    let both = of("threads-own-2", HAND_OVER_PAGES);
    let kept = of("threads-own-1", HAND_OVER_PAGES).into_iter().filter_map(|(name, one)| {
        let (_, both) = both.iter().find(|(other, _)| *other == name)?;
        Some((name, 100.0 * one / both))
    });
    let text = "The share of its speed that a thread keeps when the other processor does the same. More is better.";
    bar_chart(html, "Two processors: own pages, 64 a call", text, "%", &kept.collect::<Vec<_>>());
}

fn whole_frames(html: &mut String, records: &[Record]) {
    let ours = records.iter().filter(|record| record.name == "pagemill-array" && record.ideal_percent.is_some());
    let first = ours.clone().next().map(|record| record.backend);
    let figures: Vec<(String, f64)> = ours
        .filter(|record| Some(record.backend) == first)
        .map(|record| {
            (record.bench.trim_start_matches("churn-").replace('-', " "), record.ideal_percent.unwrap_or(0.0))
        })
        .collect();
    let text = "2 MiB frames that are free after 100 rounds in which a random tenth of the pages goes and comes, half of 4 GiB \
                in use, in percent of what is possible; begun in order, and with a random half. More is better.";
    bar_chart(html, "Memory stays whole", text, "%", &figures);
}

/// Bars from zero, each with its figure; nothing without figures.
fn bar_chart(html: &mut String, title: &str, text: &str, unit: &str, figures: &[(String, f64)]) {
    let Some(most) = figures.iter().map(|figure| figure.1).max_by(f64::total_cmp) else { return };
    push(html, format_args!("<h2>{}</h2>\n<p>{}</p>\n<table class=\"bars\">\n", escape(title), escape(text)));
    for (name, figure) in figures {
        push(
            html,
            format_args!(
                "<tr class=\"s{}\"><th>{}<td><i style=\"width:{:.1}%\"></i><td>{} {unit}</tr>\n",
                color(name).unwrap_or(0),
                escape(name),
                100.0 * figure / most,
                if unit == "%" { format!("{figure:.0}") } else { short(*figure) },
            ),
        );
    }
    html.push_str("</table>\n");
}

fn numbers(records: &[Record]) -> String {
    let mut html = String::from(
        "<details><summary>All figures of this run</summary>\n<div class=\"all\"><table><tr><th>bench<th>impl<th>backend\
         <th>N<th>order<th>alloc ns<th>free ns<th>total ns<th>min<th>max<th>rounds<th>% of ideal</tr>\n",
    );
    let half = |spread: Option<crate::stats::Spread>| spread.map_or(String::new(), |s| short(s.median));
    for record in records {
        push(
            &mut html,
            format_args!(
                "<tr><td>{}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}</tr>\n",
                record.bench,
                escape(record.name),
                record.backend,
                record.n,
                record.order.map_or("", ListOrder::label),
                half(record.alloc),
                half(record.free),
                short(record.total.median),
                short(record.total.min),
                short(record.total.max),
                record.runs,
                record.ideal_percent.map_or(String::new(), |percent| format!("{percent:.1}")),
            ),
        );
    }
    html + "</table></div></details>\n"
}

fn bar_table(bars: &[Bar]) -> String {
    if bars.is_empty() {
        return String::new();
    }
    let mut text = Vec::new();
    // Writing into a vector cannot fail.
    let _ = pagemill_harness::bars::write(&mut text, bars);
    format!("<h2>Bars</h2>\n<pre>{}</pre>\n", escape(&String::from_utf8_lossy(&text)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::example as record;
    use crate::rows::Kind;
    use pagemill_harness::bars::bar;

    const ROWS: [(&str, Kind); 4] = [
        ("pagemill-array", Kind::Ours),
        ("pagemill-single", Kind::Ours),
        ("glibc", Kind::Peer),
        ("tls-vec", Kind::Floor),
    ];

    fn everything() -> Vec<Record> {
        let mut records = Vec::new();
        for (name, kind) in ROWS {
            for (bench, n, ns) in [
                ("batch", 1, 4.0),
                ("batch", 64, 0.5),
                ("scatter", 16384, 8.0),
                ("mixed", REQUESTS, 3.0),
                ("threads-hand-over", 64, 2.0),
                ("threads-own-1", 64, 1.0),
                ("threads-own-2", 64, 1.25),
            ] {
                records.push(record(bench, name, kind, n, ns));
            }
        }
        let whole = record("churn-random-half", "pagemill-array", Kind::Ours, 1 << 20, 20.0);
        records.push(Record { ideal_percent: Some(96.4), ..whole });
        records
    }

    #[test]
    fn a_page_has_every_series_in_each_chart_and_loads_nothing() {
        let html = page("CPU <x> & y", &everything(), &[]);
        for (name, _) in ROWS {
            assert_eq!(html.matches(&format!(">{name} 8.00<")).count(), 1, "the label of {name}");
            assert!(html.contains(&format!(">{name}: 0.50 ns, 64 pages<")), "{name}");
            assert_eq!(html.matches(&format!("<th>{name}<td>")).count(), 3, "bars of {name}");
        }
        assert!(html.contains(">80 %<") && html.contains(">96 %<"), "{html}");
        assert_eq!(html.matches("<svg").count(), 2, "one chart for desktops and for phones");
        assert!(html.contains("CPU &lt;x&gt; &amp; y"));
        assert!(!html.contains("src=") && !html.contains("href=") && !html.contains("<script"));
        assert!(!html.contains("<h2>Bars"));
    }

    #[test]
    fn the_chart_has_the_steady_state_and_the_best_case_a_chart_of_its_own() {
        let mut records = everything();
        for n in [1, 64] {
            let best = record("burst", "pagemill-array", Kind::Ours, n, 0.25);
            records.push(Record { order: Some(ListOrder::InOrder), ..best });
        }
        let other = Record { backend: "portable", ..record("batch", "pagemill-array", Kind::Ours, 64, 9.0) };
        let in_order = record("batch", "pagemill-array", Kind::Ours, 64, 0.125);
        records.extend([other, Record { order: Some(ListOrder::InOrder), ..in_order }]);
        let steady = steady(&records).curves;
        assert_eq!(
            steady[0],
            Curve { name: "pagemill-array".into(), points: vec![(1.0, 4.0), (64.0, 0.5), (16384.0, 8.0)] }
        );
        let html = page("", &records, &[]);
        assert!(html.contains("The best case") && html.matches("<svg").count() == 4, "{html}");
        let svg = first_chart(&records, "here & now");
        assert!(
            svg.starts_with("<svg xmlns=") && svg.contains("here &amp; now") && svg.contains(">glibc 8.00<"),
            "{svg}"
        );
    }

    #[test]
    fn bars_and_small_blocks_are_there_when_they_were_measured() {
        let of = |name, kind| dma::SHAPES.map(|shape| record(dma::SELF_TEST, name, kind, shape.bytes, 4.0));
        let records = [of("dma-single", Kind::Ours), of("tls-vec", Kind::Floor)].concat();
        let html = page("", &records, &[bar("1 page", Some(9.0), None, None).unwrap()]);
        assert!(html.contains("bytes of a block") && html.contains(">dma-single 4.00<"), "{html}");
        assert!(html.contains("<h2>Bars</h2>") && html.contains("9.00"));
        assert!(page("", &[], &[]).contains("nothing was measured"));
    }
}
