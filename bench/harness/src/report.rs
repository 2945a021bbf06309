//! The parts of reports: plain tables within 80 columns, and credits of published figures.

use std::io::{self, Write};

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};

use crate::published::Published;
use crate::rounds::Rounds;

/// Names the source of published figures that stand in a table.
///
/// # Errors
/// The writer's.
pub fn credit(out: &mut dyn Write, published: &Published, id: &str) -> io::Result<()> {
    match published.table(id) {
        Some(table) => writeln!(
            out,
            "{}",
            wrap(&format!("* {}, not of this run ({}): {}; {}", table.origin, table.unit, table.title, table.source))
        ),
        None => Ok(()),
    }
}

/// A table without lines, two spaces between its columns.
pub fn plain<S: AsRef<str>>(titles: &[S]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(titles.iter().map(|title| title.as_ref().to_owned()));
    table.column_iter_mut().for_each(|column| {
        column.set_padding((0, 1));
    });
    table
}

/// Aligns figures to the right from column `first` on.
pub fn align(table: &mut Table, first: usize) {
    table.column_iter_mut().skip(first).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
}

/// Warns when other work disturbed rounds.
///
/// # Errors
/// The writer's.
pub fn disturbance(out: &mut dyn Write, rounds: &Rounds) -> io::Result<()> {
    let (all, disturbed) = (rounds.all.get(), rounds.disturbed.get());
    if disturbed == 0 {
        return Ok(());
    }
    let warning = format!(
        "disturbed: in {disturbed} of {all} rounds the system stopped the measuring thread for another one, however \
         often they were repeated; run again on an idle machine if min and max lie far apart"
    );
    writeln!(out, "\n{}", wrap(&warning))
}

/// Breaks a line of words at 80 columns, and indents the continued lines.
pub fn wrap(text: &str) -> String {
    let mut lines = String::new();
    let mut width = 0;
    for word in text.split_whitespace() {
        let len = word.chars().count();
        if width > 0 && width + 1 + len > 80 {
            lines.push_str("\n  ");
            width = 2;
        } else if width > 0 {
            lines.push(' ');
            width += 1;
        }
        lines.push_str(word);
        width += len;
    }
    lines
}
