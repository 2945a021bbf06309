//! A histogram of durations, with a precision of a thirty-second.
use std::time::Duration;

/// Bits below the leading one that are distinguished.
const BITS: u32 = 5;
const STEPS: usize = 1 << BITS;

/// Counts of times, in nanoseconds.
pub(crate) struct Histogram {
    counts: Vec<u64>,
    total: u64,
    most: u64,
}

impl Histogram {
    pub(crate) fn new() -> Self {
        Self { counts: vec![0; STEPS * (64 - BITS as usize + 1)], total: 0, most: 0 }
    }

    pub(crate) fn add(&mut self, took: Duration) {
        let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.counts[place(ns)] += 1;
        self.total += 1;
        self.most = self.most.max(ns);
    }

    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// A percentile, in microseconds.
    pub(crate) fn percentile(&self, percent: f64) -> f64 {
        let wanted = (self.total as f64 * percent / 100.0).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (at, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= wanted {
                return upper(at).min(self.most) as f64 / 1e3;
            }
        }
        0.0
    }
}

fn place(ns: u64) -> usize {
    if ns < STEPS as u64 {
        return ns as usize;
    }
    let shift = ns.ilog2() - BITS;
    STEPS * (shift as usize + 1) + (ns >> shift) as usize - STEPS
}

/// The largest time in a bucket.
fn upper(at: usize) -> u64 {
    if at < STEPS {
        return at as u64;
    }
    let (shift, step) = (at / STEPS - 1, (at % STEPS + STEPS) as u64);
    (step << shift) + ((1 << shift) - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_time_is_counted_within_a_thirty_second() {
        let mut last = 0;
        for exponent in 0..64 {
            for ns in [1u64 << exponent, (1u64 << exponent).wrapping_mul(3) / 2, (1 << exponent) - 1] {
                let at = place(ns);
                assert!(upper(at) >= ns && upper(at) - ns <= ns / 32, "{ns}: {}", upper(at));
                assert!(at == 0 || upper(at - 1) < ns, "{ns}");
                last = last.max(at);
            }
        }
        assert!(last < Histogram::new().counts.len() && place(u64::MAX) < Histogram::new().counts.len());
    }

    #[test]
    fn percentiles_are_within_a_thirty_second() {
        let mut histogram = Histogram::new();
        assert_eq!(histogram.percentile(50.0), 0.0);
        (1..=100).for_each(|ms| histogram.add(Duration::from_millis(ms)));
        for percent in [1.0, 50.0, 99.0, 100.0] {
            let ms = histogram.percentile(percent) / 1e3;
            assert!((percent..=percent * 33.0 / 32.0).contains(&ms), "{percent}: {ms}");
        }
    }
}
