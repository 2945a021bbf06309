//! Figures that others published, and those that were measured for Pagemill before it existed: data, in
//! `published.json`. They stand beside a table, each with its source, and enter no ratio: another machine's
//! nanoseconds are context.

use serde::Deserialize;

use crate::Error;

/// All tables of `published.json`.
#[derive(Debug, Deserialize)]
pub struct Published {
    tables: Vec<Table>,
}

/// One table, as its source has it.
#[derive(Debug, Deserialize)]
pub struct Table {
    /// Its identifier.
    pub id: String,
    /// `published` by others, or `quoted` from a measurement made elsewhere.
    pub origin: String,
    /// Its title.
    pub title: String,
    /// Where it was published.
    pub source: String,
    /// The unit of its figures.
    pub unit: String,
    /// Titles of its columns.
    pub columns: Vec<String>,
    /// Its rows, each as long as `columns`.
    pub rows: Vec<Vec<Cell>>,
}

/// A figure, a range or a name; empty where the source has nothing.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(untagged)]
pub enum Cell {
    /// A figure.
    Number(f64),
    /// A range, or a name.
    Text(String),
    /// Nothing.
    Empty(()),
}

impl Cell {
    /// As a table shows it.
    pub fn shown(&self) -> String {
        match self {
            Cell::Number(figure) => crate::stats::short(*figure),
            Cell::Text(text) => text.clone(),
            Cell::Empty(()) => String::new(),
        }
    }
}

impl Published {
    /// Reads them.
    ///
    /// # Errors
    /// The data in this build are damaged.
    pub fn load() -> Result<Published, Error> {
        serde_json::from_str(include_str!("../published.json")).map_err(Error::Published)
    }

    /// The table of this name.
    pub fn table(&self, id: &str) -> Option<&Table> {
        self.tables.iter().find(|table| table.id == id)
    }

    /// The figure that was measured elsewhere for `name` in a cell such as `batch 64`.
    pub fn quoted(&self, name: &str, cell: &str) -> Option<String> {
        let tables = self.tables.iter().filter(|table| table.origin == "quoted");
        tables.filter_map(|table| table.find(name, cell)).next()
    }

    /// Names and figures in that cell, without the names that are rows here.
    pub fn quoted_others(&self, cell: &str, is_row: impl Fn(&str) -> bool) -> Vec<(String, String)> {
        let mut others = Vec::new();
        for table in self.tables.iter().filter(|table| table.origin == "quoted") {
            for row in &table.rows {
                if let [Cell::Text(name), ..] = row.as_slice()
                    && !is_row(name)
                    && let Some(figure) = table.find(name, cell)
                {
                    others.push((name.clone(), figure));
                }
            }
        }
        others
    }
}

impl Table {
    /// The figure in the row that begins with `name` under the column `column`, if there is one.
    pub fn find(&self, name: &str, column: &str) -> Option<String> {
        self.cell(&Cell::Text(name.to_owned()), column).map(Cell::shown).filter(|shown| !shown.is_empty())
    }

    /// The figure under the column `column` in the row that begins with `first`, where it is a number.
    pub fn number(&self, first: &Cell, column: &str) -> Option<f64> {
        match self.cell(first, column)? {
            Cell::Number(figure) => Some(*figure),
            _ => None,
        }
    }

    fn cell(&self, first: &Cell, column: &str) -> Option<&Cell> {
        let at = self.columns.iter().position(|title| title == column)?;
        self.rows.iter().find(|row| row.first() == Some(first))?.get(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_table_is_rectangular_and_names_its_source() {
        let published = Published::load().unwrap();
        assert!(published.tables.len() >= 9);
        for table in &published.tables {
            assert!(!table.source.is_empty() && !table.unit.is_empty() && !table.title.is_empty(), "{}", table.id);
            assert!(["published", "quoted"].contains(&table.origin.as_str()), "{}", table.id);
            assert!(table.rows.iter().all(|row| row.len() == table.columns.len()), "{}", table.id);
        }
    }

    #[test]
    fn a_quoted_figure_is_found_by_row_and_cell() {
        let published = Published::load().unwrap();
        assert_eq!(published.quoted("rte-mempool", "batch 64").as_deref(), Some("0.37"));
        assert_eq!(published.quoted("rte-mempool", "hand-over 64").as_deref(), Some("3.3-4.4"));
        assert_eq!(published.quoted("memcpy", "batch 1"), None);
        let others = published.quoted_others("scatter 16384", |name| name == "glibc");
        assert!(
            others.iter().any(|(name, figure)| name == "LLFree (one at a time; it has no bulk)" && figure == "66.0")
        );
        assert!(others.iter().all(|(name, _)| name != "glibc"));
    }
}
