//! Median and spread of a handful of rounds.

use serde::Serialize;

/// Median, smallest and largest of some figures.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

impl Spread {
    /// `None` without figures. The median of an even number is the mean of the middle two.
    pub(crate) fn of(figures: &[f64]) -> Option<Spread> {
        let mut sorted = figures.to_vec();
        sorted.sort_unstable_by(f64::total_cmp);
        let (&min, &max) = (sorted.first()?, sorted.last()?);
        let middle = sorted.len() / 2;
        let median = if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 };
        Some(Spread { median, min, max })
    }
}

/// A figure in at most five characters, three significant digits where they fit.
pub(crate) fn short(figure: f64) -> String {
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
    fn figures_stay_short() {
        let shown: Vec<String> = [0.07, 9.99, 9.999, 42.04, 99.96, 825.4, 12345.6].into_iter().map(short).collect();
        assert_eq!(shown, ["0.07", "9.99", "10.0", "42.0", "100", "825", "12346"]);
    }
}
