//! The figures for the `metrics` facade: the recorder that the program installed gets them.
use crate::{FIGURES, FigureKind, Snapshot};
use pagemill::Allocator;

/// Describes each figure to the installed recorder. Call it once, after installing the recorder.
///
/// ```
/// pagemill_watch::describe_metrics();
/// pagemill_watch::record_metrics("default", pagemill::Allocator::global());
/// ```
pub fn describe_metrics() {
    for figure in FIGURES.iter() {
        match figure.kind {
            FigureKind::Counter => metrics::describe_counter!(figure.name, figure.help),
            FigureKind::Gauge => metrics::describe_gauge!(figure.name, figure.help),
        }
    }
}

/// Passes an allocator's figures, labelled with this name, to the installed recorder. Call it as often as figures should be
/// fresh: before each scrape, or every few seconds. Without a recorder it does nothing.
///
/// Counters are set to their absolute values. Recorders ignore a counter that went back, as happens with a second allocator
/// under the same name.
/// They keep the last values of what is gone, as of a page pool whose last page is back.
pub fn record_metrics(name: &str, allocator: &Allocator) {
    let seen = [Snapshot::of(name, allocator)];
    for figure in FIGURES.iter() {
        for sample in figure.samples(&seen) {
            match figure.kind {
                FigureKind::Counter => metrics::counter!(figure.name, &sample.labels).absolute(sample.value),
                FigureKind::Gauge => metrics::gauge!(figure.name, &sample.labels).set(sample.value as f64),
            }
        }
    }
}
