//! Bars: the limits that a table's figures have to meet in one run.

use std::io::{self, Write};

use crate::record::Record;
use crate::report::{align, plain};
use crate::stats::{Spread, short};

/// Where a figure must lie.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Limit {
    /// At this figure or below.
    AtMost(f64),
    /// At this figure or above.
    AtLeast(f64),
}

impl Limit {
    /// Whether `figure` meets it.
    pub fn holds(self, figure: f64) -> bool {
        match self {
            Limit::AtMost(limit) => figure <= limit,
            Limit::AtLeast(limit) => figure >= limit,
        }
    }

    /// As the table shows it.
    pub fn shown(self) -> String {
        match self {
            Limit::AtMost(limit) => format!("<= {}", short(limit)),
            Limit::AtLeast(limit) => format!(">= {}", short(limit)),
        }
    }
}

/// One bar, and how this run did.
#[derive(Debug, Clone, PartialEq)]
pub struct Bar {
    /// What is judged.
    pub what: &'static str,
    /// The figure of this run.
    pub figure: f64,
    /// The limit; `None` where there is only a goal.
    pub bar: Option<Limit>,
    /// The limit to reach later; `None` where there is only a bar.
    pub goal: Option<Limit>,
}

/// A row's time in each turn.
pub type Turns = Vec<f64>;

/// The median of some turns.
pub fn median(turns: Option<Turns>) -> Option<f64> {
    Spread::of(&turns?).map(|spread| spread.median)
}

/// Two rows of a table, turn by turn.
pub fn each(a: Option<Turns>, b: Option<Turns>, of: impl Fn(f64, f64) -> f64) -> Option<Turns> {
    let (a, b) = (a?, b?);
    debug_assert_eq!(a.len(), b.len(), "rows that are compared took turns");
    Some(a.into_iter().zip(b).map(|(a, b)| of(a, b)).collect())
}

/// The median of `a / b`.
pub fn ratio(a: Option<Turns>, b: Option<Turns>) -> Option<f64> {
    median(each(a, b, |a, b| a / b))
}

/// The median of `a - b`.
pub fn difference(a: Option<Turns>, b: Option<Turns>) -> Option<f64> {
    median(each(a, b, |a, b| a - b))
}

/// How much faster `a` is than `b`.
pub fn speed(a: Option<Turns>, b: Option<Turns>) -> Option<f64> {
    ratio(b, a)
}

/// The largest of some figures; `None` if one of them is missing.
pub fn worst(figures: impl IntoIterator<Item = Option<f64>>) -> Option<f64> {
    let figures: Option<Vec<f64>> = figures.into_iter().collect();
    figures?.into_iter().max_by(f64::total_cmp)
}

/// The smallest of some figures; `None` if one of them is missing.
pub fn least(figures: impl IntoIterator<Item = Option<f64>>) -> Option<f64> {
    worst(figures.into_iter().map(|figure| figure.map(|figure| -figure))).map(|figure| -figure)
}

/// A row's time in each turn, allocating and freeing.
pub fn totals(record: &Record) -> Option<Turns> {
    Some(record.turns.iter().map(|turn| turn.total).collect())
}

/// A row's time in each turn, allocating alone.
pub fn outs(record: &Record) -> Option<Turns> {
    record.turns.iter().map(|turn| turn.alloc).collect()
}

/// The turns of a row of a table, whatever its backend and size.
pub fn turns_of(records: &[Record], bench: &str, name: &str) -> Option<Turns> {
    totals(records.iter().find(|record| (record.bench, record.name) == (bench, name))?)
}

/// One bar; `None` without a figure.
pub fn bar(what: &'static str, figure: Option<f64>, bar: Option<Limit>, goal: Option<Limit>) -> Option<Bar> {
    debug_assert!(what.len() <= 42, "the table has 80 columns: {what}");
    Some(Bar { what, figure: figure?, bar, goal })
}

/// Writes the bars as a table.
///
/// # Errors
/// The writer's.
pub fn write(out: &mut dyn Write, bars: &[Bar]) -> io::Result<()> {
    if bars.is_empty() {
        return Ok(());
    }
    let verdict = |limit: Option<Limit>, figure: f64, yes: &str, no: &str| match limit {
        Some(limit) if limit.holds(figure) => yes.to_owned(),
        Some(_) => no.to_owned(),
        None => String::new(),
    };
    let mut table = plain(&["bars (rseq, this run alone)", "figure", "bar", "", "goal", ""]);
    for bar in bars {
        table.add_row([
            bar.what.to_owned(),
            short(bar.figure),
            bar.bar.map_or(String::new(), Limit::shown),
            verdict(bar.bar, bar.figure, "met", "MISSED"),
            bar.goal.map_or(String::new(), Limit::shown),
            verdict(bar.goal, bar.figure, "met", "not yet"),
        ]);
    }
    align(&mut table, 1);
    writeln!(out, "\n{}", table.trim_fmt())?;
    Ok(())
}
