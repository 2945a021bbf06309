//! Curves over logarithmic axes as SVG: direct labels at their ends, a value at each point when the pointer is on it.
//!
//! One function draws for the HTML page and for a file of its own. All colours are CSS variables with a light and a dark
//! value, so a drawing follows the reader's setting wherever it is shown.

use std::fmt::Write as _;

/// The rows that are drawn, each with its colour on a light and on a dark ground, from the first to the last in a list.
const PAINTS: [Paint; 9] = [
    paint("pagemill-array", "#0b57d0", "#7cacf8"),
    paint("pagemill-single", "#0b57d0", "#7cacf8").dashed(),
    paint("snmalloc", "#1a7f37", "#3fb950"),
    paint("mimalloc", "#8250df", "#bc8cff"),
    paint("jemalloc", "#bc4c00", "#f0883e"),
    paint("glibc", "#cf222e", "#ff7b72"),
    paint("mutex-vec", "#0b7285", "#39c5cf"),
    paint("rte-mempool", "#bf3989", "#f778ba"),
    paint("tls-vec", "#57606a", "#8b949e").dashed(),
];

struct Paint {
    name: &'static str,
    light: &'static str,
    dark: &'static str,
    is_dashed: bool,
}

const fn paint(name: &'static str, light: &'static str, dark: &'static str) -> Paint {
    Paint { name, light, dark, is_dashed: false }
}

impl Paint {
    const fn dashed(self) -> Paint {
        Paint { is_dashed: true, ..self }
    }
}

/// The place of a row among the colours: the same allocator has one colour in every chart. `None` if it has none.
pub(crate) fn color(name: &str) -> Option<usize> {
    // Small blocks of the same allocator, in bulk and one by one.
    let name = match name {
        "dma-bulk" => "pagemill-array",
        "dma-single" => "pagemill-single",
        other => other,
    };
    PAINTS.iter().position(|paint| paint.name == name)
}

/// The colours and the style of charts.
pub(crate) fn style() -> String {
    let variables = |pick: fn(&Paint) -> &str| -> String {
        PAINTS.iter().enumerate().map(|(at, paint)| format!("--s{at}:{};", pick(paint))).collect()
    };
    let classes: String = (0..PAINTS.len()).map(|at| format!(".s{at}{{--c:var(--s{at})}}")).collect();
    format!(
        ":root{{--bg:#fff;--fg:#1f2328;--soft:#59636e;--grid:#d8dee4;{}}}\n\
         @media (prefers-color-scheme:dark){{:root{{--bg:#0d1117;--fg:#e6edf3;--soft:#9198a1;--grid:#2f353d;{}}}}}\n\
         {classes}\n\
         .chart text{{fill:var(--fg);font-family:system-ui,-apple-system,'Segoe UI',sans-serif}}\n\
         .chart .soft{{fill:var(--soft)}} .chart .grid{{stroke:var(--grid)}} .chart .lead{{stroke:var(--c);opacity:.5}}\n\
         .curve{{fill:none;stroke:var(--c);stroke-width:2;stroke-linejoin:round}} .ours{{stroke-width:3.5}}\n\
         .dashed{{stroke-dasharray:7 4}} .dot{{fill:var(--c)}} .hit{{fill:transparent}}\n\
         .chart .name{{fill:var(--c);font-weight:600}}\n\
         .chart .tip{{visibility:hidden;font-weight:600;paint-order:stroke;stroke:var(--bg);stroke-width:8px;\
         stroke-linejoin:round;pointer-events:none}}\n\
         .point:hover .tip{{visibility:visible}} .point:hover .dot{{r:6px}}\n\
         .chart:has(.series:hover) .series:not(:hover){{opacity:.25}}\n",
        variables(|paint| paint.light),
        variables(|paint| paint.dark),
    )
}

/// One line of a chart: a row, and points of size and nanoseconds in the order of their sizes.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Curve {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
}

/// Curves, and what their axes count.
pub(crate) struct Chart<'a> {
    pub(crate) x: &'a str,
    pub(crate) y: &'a str,
    /// The unit of a value, and of a size.
    pub(crate) units: (&'a str, &'a str),
    pub(crate) curves: Vec<Curve>,
}

/// Where a chart is read.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Screen {
    Desktop,
    Phone,
}

/// A drawing's measures, in its own pixels.
struct Frame {
    width: f64,
    height: f64,
    top: f64,
    left: f64,
    right: f64,
    bottom: f64,
    font: f64,
    /// Where titles begin.
    edge: f64,
}

impl Frame {
    fn of(screen: Screen) -> Frame {
        let (width, height) = if screen == Screen::Desktop { (880.0, 470.0) } else { (390.0, 420.0) };
        let (left, right, font) = if screen == Screen::Desktop { (52.0, 198.0, 14.0) } else { (46.0, 128.0, 12.5) };
        Frame { width, height, top: 34.0, left, right, bottom: 52.0, font, edge: 0.0 }
    }

    /// With a title above it, and an edge around it.
    fn of_file() -> Frame {
        let frame = Frame::of(Screen::Desktop);
        let (head, edge) = (62.0, 20.0);
        Frame { height: frame.height + head, top: frame.top + head, left: frame.left + edge, edge, ..frame }
    }
}

/// A logarithmic axis: from a figure to a place.
#[derive(Clone, Copy)]
struct Axis {
    figures: (f64, f64),
    places: (f64, f64),
}

impl Axis {
    fn at(self, figure: f64) -> f64 {
        let share = (figure / self.figures.0).ln() / (self.figures.1 / self.figures.0).ln();
        self.places.0 + share * (self.places.1 - self.places.0)
    }
}

/// The chart as an `svg` element to stand in a page that has [`style`].
pub(crate) fn inline(chart: &Chart, screen: Screen) -> String {
    let frame = Frame::of(screen);
    format!("{}{}</svg>\n", opening(&frame, chart, ""), body(chart, &frame, screen))
}

/// The chart as a file, with its title and where it was measured.
pub(crate) fn file(chart: &Chart, title: &str, note: &str) -> String {
    let frame = Frame::of_file();
    let ground = format!(
        "<style>\n{}</style>\n<rect width=\"{}\" height=\"{}\" rx=\"8\" fill=\"var(--bg)\"/>\n\
         <text x=\"20\" y=\"32\" font-size=\"19\" font-weight=\"600\">{}</text>\n\
         <text class=\"soft\" x=\"20\" y=\"54\" font-size=\"13\">{}</text>\n",
        style(),
        frame.width,
        frame.height,
        escape(title),
        escape(note),
    );
    let namespace = " xmlns=\"http://www.w3.org/2000/svg\"";
    format!("{}{ground}{}</svg>\n", opening(&frame, chart, namespace), body(chart, &frame, Screen::Desktop))
}

fn opening(frame: &Frame, chart: &Chart, namespace: &str) -> String {
    let label = escape(&format!("{} by {}", chart.y, chart.x));
    format!(
        "<svg{namespace} class=\"chart\" viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{label}\">\n",
        frame.width, frame.height
    )
}

fn body(chart: &Chart, frame: &Frame, screen: Screen) -> String {
    let all = || chart.curves.iter().flat_map(|curve| &curve.points);
    let range = |pick: fn(&(f64, f64)) -> f64| {
        let figures = || all().map(pick);
        figures().min_by(f64::total_cmp).zip(figures().max_by(f64::total_cmp))
    };
    let (Some((first, last)), Some((low, high))) = (range(|point| point.0), range(|point| point.1)) else {
        return format!("<text x=\"{}\" y=\"{}\">nothing was measured for this chart</text>\n", frame.left, frame.top);
    };
    let x = Axis { figures: (first, last.max(2.0 * first)), places: (frame.left + 10.0, frame.width - frame.right) };
    let y = Axis { figures: (low * 0.8, high * 1.25), places: (frame.height - frame.bottom, frame.top) };
    let mut svg = grid(chart, frame, x, y);
    let labels =
        spread(&chart.curves.iter().map(|c| c.points.last().map_or(0.0, |p| y.at(p.1))).collect::<Vec<_>>(), {
            (frame.font + 3.0, frame.height - frame.bottom)
        });
    for (curve, label) in chart.curves.iter().zip(labels) {
        svg.push_str(&series(chart, curve, label, frame, screen, (x, y)));
    }
    svg
}

/// The axes with their numbers and units.
fn grid(chart: &Chart, frame: &Frame, x: Axis, y: Axis) -> String {
    let mut svg = String::new();
    let (bottom, right, font) = (frame.height - frame.bottom, frame.width - frame.right, frame.font);
    let decades = (-3..7).map(|power| 10f64.powi(power));
    let few = y.figures.1 / y.figures.0 < 100.0;
    let steps = decades.flat_map(|decade| if few { vec![decade, 2.0 * decade, 5.0 * decade] } else { vec![decade] });
    for tick in steps.filter(|tick| (y.figures.0..=y.figures.1).contains(tick)) {
        let at = y.at(tick);
        push(
            &mut svg,
            format_args!(
                "<path class=\"grid\" d=\"M{:.1} {at:.1}H{right:.1}\"/>\n<text class=\"soft\" font-size=\"{font}\" \
                 text-anchor=\"end\" x=\"{:.1}\" y=\"{:.1}\">{}</text>\n",
                frame.left,
                frame.left - 8.0,
                at + 4.5,
                (tick * 1000.0).round() / 1000.0,
            ),
        );
    }
    let mut sizes: Vec<f64> = chart.curves.iter().flat_map(|curve| curve.points.iter().map(|point| point.0)).collect();
    sizes.sort_by(f64::total_cmp);
    sizes.dedup();
    // Numbers that would touch are left out; the largest size always has its own.
    let mut free_to = f64::INFINITY;
    for size in sizes.into_iter().rev() {
        let (at, width) = (x.at(size), 0.62 * font * (size.to_string().len() as f64));
        push(&mut svg, format_args!("<path class=\"grid\" d=\"M{at:.1} {bottom:.1}v5\"/>\n"));
        if at + width / 2.0 <= free_to {
            free_to = at - width / 2.0 - 6.0;
            let y = bottom + 20.0;
            push(
                &mut svg,
                format_args!(
                    "<text class=\"soft\" font-size=\"{font}\" text-anchor=\"middle\" x=\"{at:.1}\" y=\"{y:.1}\">{size}\
                     </text>\n"
                ),
            );
        }
    }
    let titles = [(chart.y, frame.top - 16.0), (chart.x, frame.height - 10.0)];
    for (title, y) in titles {
        push(
            &mut svg,
            format_args!(
                "<text class=\"soft\" font-size=\"{font}\" x=\"{}\" y=\"{y:.1}\">{}</text>\n",
                frame.edge,
                escape(title)
            ),
        );
    }
    svg
}

/// One curve: its line, its points with their values, and its name at its end.
fn series(chart: &Chart, curve: &Curve, label: f64, frame: &Frame, screen: Screen, (x, y): (Axis, Axis)) -> String {
    let Some(at) = color(&curve.name).filter(|_| !curve.points.is_empty()) else { return String::new() };
    let is_ours = curve.name.starts_with("pagemill") || curve.name.starts_with("dma");
    let place = |point: &(f64, f64)| (x.at(point.0), y.at(point.1));
    let line: Vec<String> = curve.points.iter().map(place).map(|(x, y)| format!("{x:.1} {y:.1}")).collect();
    let dashed = if PAINTS[at].is_dashed { " dashed" } else { "" };
    let ours = if is_ours { " ours" } else { "" };
    let mut svg =
        format!("<g class=\"series s{at}\"><path class=\"curve{ours}{dashed}\" d=\"M{}\"/>\n", line.join("L"));
    let (font, name) = (frame.font, escape(&curve.name));
    let (end, last) = (curve.points.last().map_or((0.0, 0.0), place), curve.points.last().map_or(0.0, |last| last.1));
    let from = frame.width - frame.right + 14.0;
    let shown = if screen == Screen::Desktop { format!("{name} {}", value(last)) } else { name.clone() };
    push(
        &mut svg,
        format_args!(
            "<path class=\"lead\" d=\"M{:.1} {:.1}L{:.1} {label:.1}\"/><text class=\"name\" font-size=\"{font}\" \
             x=\"{from:.1}\" y=\"{:.1}\">{shown}</text>\n",
            end.0,
            end.1,
            from - 3.0,
            label + 4.5,
        ),
    );
    for point in &curve.points {
        let (cx, cy) = place(point);
        // A value begins at its point, and ends there in the right half.
        let is_left = cx < (frame.left + frame.width - frame.right) / 2.0;
        let anchor = if is_left { "start" } else { "end" };
        let (unit, size) = chart.units;
        push(
            &mut svg,
            format_args!(
                "<g class=\"point\"><circle class=\"hit\" cx=\"{cx:.1}\" cy=\"{cy:.1}\" r=\"13\"/><circle class=\"dot\" \
                 cx=\"{cx:.1}\" cy=\"{cy:.1}\" r=\"3\"/><text class=\"tip\" font-size=\"{font}\" text-anchor=\"{anchor}\" \
                 x=\"{cx:.1}\" y=\"{:.1}\">{name}: {} {unit}, {} {size}</text></g>\n",
                (cy - 14.0).max(frame.font),
                value(point.1),
                point.0,
            ),
        );
    }
    svg + "</g>\n"
}

fn value(figure: f64) -> String {
    crate::stats::short(figure)
}

/// Moves places apart until each has `least` room and none is below `floor`.
fn spread(places: &[f64], (least, floor): (f64, f64)) -> Vec<f64> {
    let mut order: Vec<usize> = (0..places.len()).collect();
    order.sort_by(|&a, &b| places[a].total_cmp(&places[b]));
    let mut moved = places.to_vec();
    for pair in order.windows(2) {
        moved[pair[1]] = moved[pair[1]].max(moved[pair[0]] + least);
    }
    let mut below = floor + least;
    for &at in order.iter().rev() {
        moved[at] = moved[at].min(below - least);
        below = moved[at];
    }
    moved
}

/// Writing into a string cannot fail.
pub(crate) fn push(text: &mut String, arguments: std::fmt::Arguments) {
    let _ = text.write_fmt(arguments);
}

/// For the text of an element, and for a value in double quotes.
pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart() -> Chart<'static> {
        let curve =
            |paint: &Paint, ns: f64| Curve { name: paint.name.to_owned(), points: vec![(1.0, ns), (64.0, ns / 4.0)] };
        let curves = PAINTS.iter().enumerate().map(|(at, paint)| curve(paint, 1.0 + at as f64 / 10.0)).collect();
        Chart { x: "pages <a call>", y: "ns & more", units: ("ns", "pages"), curves }
    }

    #[test]
    fn a_drawing_has_every_series_its_values_and_its_units() {
        let drawn = file(&chart(), "a <title>", "\"where\"");
        for paint in &PAINTS {
            assert_eq!(drawn.matches(&format!(">{} ", paint.name)).count(), 1, "one label: {}", paint.name);
            assert_eq!(drawn.matches(&format!(">{}: ", paint.name)).count(), 2, "two values: {}", paint.name);
        }
        assert!(drawn.contains(">pagemill-array: 0.25 ns, 64 pages<"), "{drawn}");
        assert!(drawn.contains("ns &amp; more") && drawn.contains("pages &lt;a call&gt;"));
        assert!(drawn.contains("a &lt;title&gt;") && drawn.contains("&quot;where&quot;"));
        assert!(drawn.contains("prefers-color-scheme:dark") && drawn.contains(">64</text>"));
        assert!(!drawn.contains("href") && !drawn.contains("NaN"), "{drawn}");
        assert_eq!(drawn.matches("<g ").count(), drawn.matches("</g>").count());
    }

    #[test]
    fn labels_stand_apart_and_stay_on_the_drawing() {
        let moved = spread(&[100.0, 101.0, 40.0, 100.5, 99.0], (16.0, 110.0));
        let mut sorted = moved.clone();
        sorted.sort_by(f64::total_cmp);
        assert!(sorted.windows(2).all(|pair| pair[1] - pair[0] >= 15.999), "{moved:?}");
        assert!(sorted.iter().all(|place| *place <= 110.0), "{moved:?}");
        assert!(moved[2] < moved[4] && moved[4] < moved[0] && moved[0] < moved[3] && moved[3] < moved[1], "{moved:?}");
    }

    #[test]
    fn one_point_and_no_point_are_drawn_without_a_flaw() {
        let point = Curve { name: "glibc".to_owned(), points: vec![(1.0, 40.0)] };
        let one = inline(&Chart { curves: vec![point], ..chart() }, Screen::Phone);
        assert!(one.contains(">glibc<") && !one.contains("NaN") && !one.contains("inf"), "{one}");
        let none = inline(&Chart { curves: Vec::new(), ..chart() }, Screen::Desktop);
        assert!(none.contains("nothing was measured"), "{none}");
    }
}
