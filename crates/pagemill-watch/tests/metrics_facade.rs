//! The figures reach the recorder that is installed for the `metrics` facade.
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use pagemill::{Allocator, Gfp};
use pagemill_watch::{FIGURES, FigureKind, Snapshot, describe_metrics, record_metrics};

/// A recorder that keeps all values: counters as they are, gauges as the bits of their number.
#[derive(Default)]
struct Kept {
    described: Mutex<HashMap<String, (&'static str, String)>>,
    counters: Mutex<HashMap<Key, Arc<AtomicU64>>>,
    gauges: Mutex<HashMap<Key, Arc<AtomicU64>>>,
}

impl Kept {
    fn describe(&self, kind: &'static str, name: &KeyName, help: &SharedString) {
        let before = self.described.lock().unwrap().insert(name.as_str().to_owned(), (kind, help.to_string()));
        assert_eq!(before, None, "{name:?} is described twice");
    }
}

impl Recorder for Kept {
    fn describe_counter(&self, name: KeyName, _: Option<Unit>, help: SharedString) {
        self.describe("counter", &name, &help);
    }
    fn describe_gauge(&self, name: KeyName, _: Option<Unit>, help: SharedString) {
        self.describe("gauge", &name, &help);
    }
    fn describe_histogram(&self, name: KeyName, _: Option<Unit>, _: SharedString) {
        panic!("{name:?} is a histogram");
    }
    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(Arc::clone(self.counters.lock().unwrap().entry(key.clone()).or_default()))
    }
    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(Arc::clone(self.gauges.lock().unwrap().entry(key.clone()).or_default()))
    }
    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        panic!("{key} is a histogram");
    }
}

impl Kept {
    /// The value that was kept under this name, for these labels.
    fn value(&self, kind: FigureKind, name: &'static str, labels: &[(&'static str, String)]) -> Option<f64> {
        let key = Key::from_parts(name, labels);
        match kind {
            FigureKind::Counter => self.counters.lock().unwrap().get(&key).map(|value| value.load(Relaxed) as f64),
            FigureKind::Gauge => self.gauges.lock().unwrap().get(&key).map(|bits| f64::from_bits(bits.load(Relaxed))),
        }
    }
}

#[test]
fn every_figure_is_described_and_recorded() {
    let allocator = Allocator::builder().pages(4096).build().unwrap();
    let kept = Kept::default();
    metrics::with_local_recorder(&kept, describe_metrics);
    let described = kept.described.lock().unwrap();
    for figure in FIGURES.iter() {
        assert_eq!(described.get(figure.name), Some(&(figure.kind.name(), figure.help.to_owned())));
    }
    assert_eq!(described.len(), FIGURES.len());

    let mut pages = Vec::new();
    for round in 1..=3 {
        pages.extend((0..100).map(|_| allocator.alloc_page(Gfp::KERNEL).unwrap()));
        metrics::with_local_recorder(&kept, || record_metrics("mine", &allocator));
        let seen = [Snapshot::of("mine", &allocator)];
        for figure in FIGURES.iter() {
            for sample in figure.samples(&seen) {
                let value = kept.value(figure.kind, figure.name, &sample.labels);
                // Figures of the process may change meanwhile.
                let is_it = |value: f64| value == sample.value as f64 || sample.labels.is_empty();
                assert!(value.is_some_and(is_it), "{} {:?}: {value:?}", figure.name, sample);
            }
        }
        let mine = [("allocator", "mine".to_owned())];
        let out = kept.value(FigureKind::Gauge, "pagemill_handed_out_pages", &mine);
        assert_eq!(out, Some(f64::from(100 * round)), "it follows the allocator");
    }
}
