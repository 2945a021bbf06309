//! The figures for the `metrics` facade: whichever recorder the program has installed gets them.
use crate::{FIGURES, FigureKind, Snapshot};
use pagemill::Allocator;

/// Tells the installed recorder what each figure means. Once, after the recorder was installed.
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

/// Hands an allocator's figures, labelled with this name, to the installed recorder: as often as the program wants
/// them fresh, say before each scrape or once in some seconds. Without a recorder nothing happens.
///
/// A counter goes to the value that it has here; recorders ignore one that went back, as those of a second allocator
/// under the same name do.
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
