//! Median and spread of a handful of rounds.

use serde::Serialize;

/// Median, smallest and largest of some figures.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Spread {
    /// The middle one.
    pub median: f64,
    /// The smallest.
    pub min: f64,
    /// The largest.
    pub max: f64,
}

impl Spread {
    /// The spread of some figures; `None` without any. The median of an even number is the mean of the middle two.
    pub fn of(figures: &[f64]) -> Option<Spread> {
        let mut sorted = figures.to_vec();
        sorted.sort_unstable_by(f64::total_cmp);
        let (&min, &max) = (sorted.first()?, sorted.last()?);
        let middle = sorted.len() / 2;
        let median = if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 };
        Some(Spread { median, min, max })
    }
}

/// A confidence interval for the median, by the sign test, which assumes nothing about the distribution of turns. With
/// too few turns for 95 % it is the widest interval there is; `sure` is its confidence.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Interval {
    /// Its lower end, which is one of the figures.
    pub low: f64,
    /// Its upper end, which is one too.
    pub high: f64,
    /// The chance that it has the median, from 0 to 1.
    pub sure: f64,
}

impl Interval {
    /// The interval of some turns; `None` without figures.
    pub fn of(figures: &[f64]) -> Option<Interval> {
        let mut sorted = figures.to_vec();
        sorted.sort_unstable_by(f64::total_cmp);
        let len = sorted.len();
        // The median lies outside of the interval that leaves out `k` turns on each side with the chance that of `len`
        // coins at most `k` show heads, or at most `k` show tails.
        let (mut term, mut beyond) = (0.5f64.powi(i32::try_from(len).ok()?), 0.0);
        let mut found = None;
        for k in 0..len.div_ceil(2) {
            beyond += 2.0 * term;
            if k > 0 && beyond > 0.05 {
                break;
            }
            found = Some(Interval { low: sorted[k], high: sorted[len - 1 - k], sure: (1.0 - beyond).max(0.0) });
            term *= (len - k) as f64 / (k + 1) as f64;
        }
        found
    }
}

/// A figure in at most five characters, three significant digits where they fit.
pub fn short(figure: f64) -> String {
    match figure {
        f if f.abs() < 9.995 => format!("{f:.2}"),
        f if f.abs() < 99.95 => format!("{f:.1}"),
        f => format!("{f:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_or_the_mean_of_the_middle_two() {
        assert_eq!(Spread::of(&[3.0, 1.0, 2.0]), Some(Spread { median: 2.0, min: 1.0, max: 3.0 }));
        assert_eq!(Spread::of(&[4.0, 1.0, 2.0, 10.0]), Some(Spread { median: 3.0, min: 1.0, max: 10.0 }));
        assert_eq!(Spread::of(&[]), None);
    }

    #[test]
    fn an_interval_is_as_wide_as_95_percent_need() {
        let turns = |n: u32| (1..=n).map(f64::from).collect::<Vec<_>>();
        let of = |n| Interval::of(&turns(n)).unwrap();
        assert_eq!(Interval::of(&[]), None);
        // One turn says nothing about the median, and three say it with 75 %.
        assert_eq!(of(1), Interval { low: 1.0, high: 1.0, sure: 0.0 });
        assert_eq!(of(3), Interval { low: 1.0, high: 3.0, sure: 0.75 });
        assert_eq!(of(6), Interval { low: 1.0, high: 6.0, sure: 1.0 - 2.0 / 64.0 });
        // As tables of the sign test have it: with 11 the second and the tenth, with 20 the sixth and the fifteenth.
        assert_eq!((of(11).low, of(11).high), (2.0, 10.0));
        assert_eq!((of(20).low, of(20).high), (6.0, 15.0));
        assert!((of(20).sure - 0.9586).abs() < 1e-4);
    }

    #[test]
    fn figures_stay_short() {
        let shown: Vec<String> = [0.07, 9.99, 9.999, 42.04, 99.96, 825.4, 12345.6].into_iter().map(short).collect();
        assert_eq!(shown, ["0.07", "9.99", "10.0", "42.0", "100", "825", "12346"]);
    }
}
