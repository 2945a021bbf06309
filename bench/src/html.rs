//! The curves as one HTML file: inline SVG and tables, nothing loaded from anywhere.

use std::fmt::Write as _;

use plotters::prelude::*;

use crate::Error;
use crate::bars::Bar;
use crate::published::Published;
use crate::record::Record;
use crate::report::{DMA_COLUMNS, dma_published_ns};
use crate::rows::Kind;
use crate::stats::short;
use crate::subject::ListOrder;
use crate::tables::{dma, total};

const SIZE: (u32, u32) = (960, 600);

/// One line of a chart: a name, and points of size and nanoseconds.
struct Curve {
    name: String,
    points: Vec<(f64, f64)>,
    is_dashed: bool,
}

/// The whole page.
pub(crate) fn page(header: &str, records: &[Record], bars: &[Bar], published: &Published) -> Result<String, Error> {
    let mut html = String::from(
        "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\"><title>pagemill bench</title>\n<style>\
         body{font:14px/1.4 sans-serif;margin:2em auto;max-width:62em;color:#222}\
         table{border-collapse:collapse;margin:1em 0;font-variant-numeric:tabular-nums}\
         td,th{padding:.15em .7em;text-align:right;border-bottom:1px solid #ddd}\
         td:first-child,th:first-child,td:nth-child(2),th:nth-child(2){text-align:left}\
         svg{width:100%;height:auto}</style>\n<h1>pagemill bench</h1>\n",
    );
    push(&mut html, format_args!("<pre>{}</pre>\n", escape(header)));
    for (bench, title) in [("batch", "batch: N pages out, then back"), ("burst", "burst: N pages out, then N back")] {
        let of_order = |order| -> Vec<&Record> {
            let is_drawn = |r: &&Record| r.bench == bench && r.order.unwrap_or(ListOrder::Random) == order;
            records.iter().filter(is_drawn).collect()
        };
        let (present, best) = (of_order(ListOrder::Random), of_order(ListOrder::InOrder));
        if present.is_empty() {
            continue;
        }
        push(&mut html, format_args!("<h2>{title}</h2>\n"));
        html.push_str(&chart("random order, out and back, ns a page", &curves(&present, |r| Some(r.total.median)))?);
        html.push_str(&chart("the best case, in order, ns a page", &curves(&best, |r| Some(r.total.median)))?);
        if bench == "burst" {
            html.push_str(&chart("out alone, ns a page", &curves(&present, |r| Some(r.alloc?.median)))?);
            html.push_str(&chart("back alone, ns a page", &curves(&present, |r| Some(r.free?.median)))?);
        }
        if let Some(table) = published.table(if bench == "batch" { "linux-array-2021" } else { "linux-bulk-2017" }) {
            let lines: Vec<Curve> = published_curves(table, bench);
            push(
                &mut html,
                format_args!(
                    "<h3>Published, not of this run ({})</h3><p>{}; {}</p>\n",
                    escape(&table.unit),
                    escape(&table.title),
                    escape(&table.source)
                ),
            );
            html.push_str(&chart("published", &lines)?);
        }
    }
    html.push_str(&total_charts(records, published)?);
    html.push_str(&dma_charts(records, published)?);
    html.push_str(&numbers(records));
    html.push_str(&bar_table(bars));
    html.push_str("</html>\n");
    Ok(html)
}

/// Writing into a string cannot fail.
fn push(html: &mut String, text: std::fmt::Arguments) {
    let _ = html.write_fmt(text);
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

fn curves(records: &[&Record], figure: impl Fn(&Record) -> Option<f64>) -> Vec<Curve> {
    let mut curves: Vec<Curve> = Vec::new();
    for record in records {
        let name = match record.kind {
            Kind::Ours => format!("{} {}", record.name, record.backend),
            Kind::Floor => format!("{} (floor)", record.name),
            Kind::Peer => record.name.to_owned(),
        };
        // A logarithmic axis has no zero; a floor's free is one.
        let Some(ns) = figure(record).filter(|&ns| ns >= 0.01) else { continue };
        let point = (record.n as f64, ns);
        match curves.iter_mut().find(|curve| curve.name == name) {
            Some(curve) => curve.points.push(point),
            None => curves.push(Curve { name, points: vec![point], is_dashed: record.kind != Kind::Ours }),
        }
    }
    curves
}

fn published_curves(table: &crate::published::Table, bench: &str) -> Vec<Curve> {
    let columns: &[&str] = if bench == "batch" { &["list", "array"] } else { &["total single", "total bulk"] };
    let sizes: Vec<usize> = (0..=14).map(|k| 1 << k).chain([3]).collect();
    let line = |column: &&str| {
        let at = |&n: &usize| Some((n as f64, table.at(n, column)?.parse().ok()?));
        let mut points: Vec<(f64, f64)> = sizes.iter().filter_map(at).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        Curve { name: (*column).to_owned(), points, is_dashed: true }
    };
    columns.iter().map(line).collect()
}

/// `total` and its published figures, both as nanoseconds a page so that all sizes fit one axis.
fn total_charts(records: &[Record], published: &Published) -> Result<String, Error> {
    let part = |bench| {
        let is_drawn = |r: &&Record| r.bench == bench && r.order.unwrap_or(ListOrder::Random) == ListOrder::Random;
        let present: Vec<&Record> = records.iter().filter(is_drawn).collect();
        curves(&present, |record| Some(record.alloc?.median))
    };
    let named = |(bench, per_call): &(&'static str, usize)| {
        part(*bench)
            .into_iter()
            .map(|curve| Curve { name: format!("{}, K = {per_call}", curve.name), ..curve })
            .collect()
    };
    let lines: Vec<Curve> = total::PER_CALL.iter().flat_map::<Vec<Curve>, _>(named).collect();
    if lines.is_empty() {
        return Ok(String::new());
    }
    let mut html = String::from("<h2>total: a total of N pages, put back in random order, K pages a call</h2>\n");
    html.push_str(&chart("out alone, ns a page", &lines)?);
    if let Some(table) = published.table("linux-buddy-2013") {
        let line = |column: String| {
            let us = |&n: &usize| table.find(&total::published_size(n), &column)?.parse::<f64>().ok();
            let point = |n: usize| Some((n as f64, us(&n)? * 1000.0 / n as f64));
            let points = total::sizes().into_iter().filter_map(point).collect();
            Curve { name: column, points, is_dashed: true }
        };
        let columns = total::PER_CALL.iter().map(|(_, per_call)| per_call.to_string());
        let lines: Vec<Curve> = std::iter::once("before".to_owned()).chain(columns).map(line).collect();
        let of = format!("{} (here divided by the pages); {}; {}", table.unit, table.title, table.source);
        push(&mut html, format_args!("<h3>Published, not of this run</h3><p>{}</p>\n", escape(&of)));
        html.push_str(&chart("published, ns a page", &lines)?);
    }
    Ok(html)
}

/// `dma` by the size of a block, and its published figures.
fn dma_charts(records: &[Record], published: &Published) -> Result<String, Error> {
    let present: Vec<&Record> = records.iter().filter(|record| record.bench == dma::SELF_TEST).collect();
    if present.is_empty() {
        return Ok(String::new());
    }
    let mut html = String::from("<h2>dma: small blocks out, then back</h2>\n");
    let lines = curves(&present, |record| Some(record.total.median));
    html.push_str(&chart_over("bytes of a block", "out and back, ns a block", &lines)?);
    if let Some(table) = published.table("dma-pool-2023") {
        let line = |column: &str| {
            let at = |shape: &crate::rows::dma::Shape| {
                Some((shape.bytes as f64, dma_published_ns(published, column, *shape)?))
            };
            Curve { name: column.to_owned(), points: dma::SHAPES.iter().filter_map(at).collect(), is_dashed: true }
        };
        let of = format!("ns a block; {}; {}", table.title, table.source);
        push(&mut html, format_args!("<h3>Published, not of this run</h3><p>{}</p>\n", escape(&of)));
        html.push_str(&chart_over("bytes of a block", "published", &DMA_COLUMNS.map(line))?);
    }
    Ok(html)
}

/// A chart over numbers of pages.
fn chart(title: &str, curves: &[Curve]) -> Result<String, Error> {
    chart_over("N pages", title, curves)
}

/// A chart with logarithmic axes and its legend, as SVG.
fn chart_over(over: &str, title: &str, curves: &[Curve]) -> Result<String, Error> {
    let points = || curves.iter().flat_map(|curve| &curve.points);
    let (Some(most), Some(low), Some(high)) = (
        points().map(|point| point.0).max_by(f64::total_cmp),
        points().map(|point| point.1).min_by(f64::total_cmp),
        points().map(|point| point.1).max_by(f64::total_cmp),
    ) else {
        return Ok(String::new());
    };
    let mut svg = String::new();
    {
        let drawn = |error: &dyn std::fmt::Display| Error::Drawing(error.to_string());
        let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        root.fill(&WHITE).map_err(|error| drawn(&error))?;
        let (plot, legend) = root.split_horizontally(SIZE.0 - 250);
        let mut chart = ChartBuilder::on(&plot)
            .caption(title, ("sans-serif", 18))
            .margin(10)
            .x_label_area_size(30)
            .y_label_area_size(50)
            .build_cartesian_2d((1.0..most.max(2.0)).log_scale(), (low * 0.8..high * 1.25).log_scale())
            .map_err(|error| drawn(&error))?;
        chart
            .configure_mesh()
            .light_line_style(BLACK.mix(0.05))
            .x_desc(over)
            .x_label_formatter(&|n| format!("{n:.0}"))
            .y_label_formatter(&|ns| short(*ns))
            .draw()
            .map_err(|error| drawn(&error))?;
        for (at, curve) in curves.iter().enumerate() {
            // Hues a golden section apart, dark enough for white: neighbours in the legend differ.
            let color = HSLColor((at as f64 * 0.618_034).fract(), 0.75, if at % 2 == 0 { 0.35 } else { 0.5 });
            let style = color.stroke_width(if curve.is_dashed { 1 } else { 2 });
            chart.draw_series(LineSeries::new(curve.points.iter().copied(), style)).map_err(|error| drawn(&error))?;
            let dots = curve.points.iter().map(|&point| Circle::new(point, 2, color.filled()));
            chart.draw_series(dots).map_err(|error| drawn(&error))?;
            let y = 30 + 20 * at as i32;
            legend.draw(&Rectangle::new([(5, y), (25, y + 3)], color.filled())).map_err(|error| drawn(&error))?;
            legend
                .draw(&Text::new(curve.name.clone(), (32, y - 5), ("sans-serif", 13)))
                .map_err(|error| drawn(&error))?;
        }
        root.present().map_err(|error| drawn(&error))?;
    }
    Ok(svg)
}

fn numbers(records: &[Record]) -> String {
    let mut html = String::from(
        "<h2>All figures of this run</h2>\n<table><tr><th>bench<th>impl<th>backend<th>N<th>order<th>alloc ns<th>free ns\
         <th>total ns<th>min<th>max<th>rounds<th>% of ideal</tr>\n",
    );
    let half = |spread: Option<crate::stats::Spread>| spread.map_or(String::new(), |s| short(s.median));
    for record in records {
        push(
            &mut html,
            format_args!(
                "<tr><td>{}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}</tr>\n",
                record.bench,
                record.name,
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
    html + "</table>\n"
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

    #[test]
    fn a_page_draws_each_row_once_and_loads_nothing() {
        let mut records = vec![
            record("batch", "pagemill-list", Kind::Ours, 1, 4.0),
            record("batch", "pagemill-list", Kind::Ours, 128, 0.4),
            record("batch", "glibc", Kind::Peer, 1, 44.0),
        ];
        records[2].alloc = None;
        let mut best = record("batch", "pagemill-list", Kind::Ours, 1, 2.0);
        (best.order, records[0].order) = (Some(ListOrder::InOrder), Some(ListOrder::Random));
        records.push(best);
        let html = page("CPU <x> & y", &records, &[], &Published::load().unwrap()).unwrap();
        assert_eq!(html.matches("<svg").count(), 3, "measured, the best case, and published");
        assert_eq!(html.matches("pagemill-list rseq").count(), 2, "one legend entry in each");
        assert!(html.contains("CPU &lt;x&gt; &amp; y"));
        assert!(html.contains("Published, not of this run"));
        assert!(!html.contains("src=") && !html.contains("href="));
    }

    #[test]
    fn a_total_has_a_curve_for_each_number_a_call_beside_linux() {
        let mut records = Vec::new();
        for (bench, _) in total::PER_CALL {
            let mut taken = record(bench, "pagemill-array", Kind::Ours, 32, 4.0);
            taken.alloc = crate::stats::Spread::of(&[2.0]);
            records.push(taken);
        }
        let html = page("", &records, &[], &Published::load().unwrap()).unwrap();
        assert_eq!(html.matches("<svg").count(), 2, "measured and published");
        assert_eq!(html.matches("pagemill-array rseq, K = 16").count(), 1);
        assert!(html.contains(">\nbefore\n<"), "the kernel before");
    }

    #[test]
    fn blocks_have_a_curve_over_their_size_beside_linux() {
        let of = |name, kind| dma::SHAPES.map(|shape| record(dma::SELF_TEST, name, kind, shape.bytes, 4.0));
        let records = [of("dma-single", Kind::Ours), of("tls-vec", Kind::Floor)].concat();
        let html = page("", &records, &[], &Published::load().unwrap()).unwrap();
        assert_eq!(html.matches("<svg").count(), 2, "measured and published");
        assert_eq!(html.matches("bytes of a block").count(), 2);
        assert!(html.contains("tls-vec (floor)") && html.contains("one stack"), "{html}");
    }

    #[test]
    fn nothing_measured_draws_nothing() {
        assert_eq!(chart("empty", &[]).unwrap(), "");
        assert!(page("", &[], &[], &Published::load().unwrap()).is_ok());
    }
}
