//! Holds docs/clauses.md against the contract and the tests: each clause names at
//! least one test that exists, or says why it comes later.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::papers::project_files;
use crate::shell::Shell;
use crate::tally::Tally;

/// The sections of the contract that have to be tested or put off by now; a section
/// is added here when its first part is built. Section 1 defines words and has no
/// numbered clause.
const SECTIONS: &[&str] = &["C2.", "C3.", "C4.", "C10."];

/// How a row puts a clause, or the rest of one, off.
const LATER: &str = "later: ";

/// A row: `| C2.1 | what of it is tested | tests, or later: why |`.
struct Row<'a> {
    clause: &'a str,
    evidence: &'a str,
}

pub(crate) fn check(shell: &Shell) -> Result<Tally> {
    let read = |path: &str| fs::read_to_string(shell.root.join(path)).context(path.to_owned());
    let contract = read("docs/contract.md")?;
    let table = read("docs/clauses.md")?;
    let mut tests: BTreeMap<PathBuf, BTreeSet<String>> = BTreeMap::new();
    for path in project_files(shell)?.into_iter().filter(|path| path.extension().is_some_and(|end| end == "rs")) {
        let text = fs::read_to_string(shell.root.join(&path))?;
        tests.insert(path, test_names(&text).map(str::to_owned).collect());
    }
    let rows: Vec<_> = table.lines().filter_map(row).collect();
    let (problems, note) = judge(&clauses(&contract), &rows, &tests);
    Ok(Tally::from_problems(problems, note))
}

fn judge(clauses: &[&str], rows: &[Row<'_>], tests: &BTreeMap<PathBuf, BTreeSet<String>>) -> (Vec<String>, String) {
    let mut problems = Vec::new();
    let mut cited = 0;
    let mut later = 0;
    for row in rows {
        if !clauses.contains(&row.clause) {
            problems.push(format!("docs/clauses.md: {}: the contract has no such clause", row.clause));
        }
        for name in row.evidence.split('`').skip(1).step_by(2) {
            cited += 1;
            let exists = name
                .split_once("::")
                .is_some_and(|(file, test)| tests.get(Path::new(file)).is_some_and(|names| names.contains(test)));
            if !exists {
                problems.push(format!("docs/clauses.md: {}: there is no test {name}", row.clause));
            }
        }
    }
    for clause in clauses {
        let of_clause: Vec<_> = rows.iter().filter(|row| row.clause == *clause).collect();
        if of_clause.is_empty() {
            problems.push(format!("docs/clauses.md: no row for {clause}"));
        }
        let is_tested = of_clause.iter().any(|row| row.evidence.contains("::"));
        let is_later = of_clause.iter().any(|row| row.evidence.len() > LATER.len() && row.evidence.starts_with(LATER));
        later += usize::from(is_later && !is_tested);
        if !of_clause.is_empty() && !is_tested && !is_later {
            problems.push(format!("docs/clauses.md: {clause} names neither a test nor, after \"{LATER}\", a reason"));
        }
    }
    (problems, format!("{} clauses, {later} of them wholly for later; {cited} tests named", clauses.len()))
}

/// The numbered clauses of the contract's sections that are due.
fn clauses(contract: &str) -> Vec<&str> {
    let starts = contract.lines().filter_map(|line| line.strip_prefix("- ")?.split_whitespace().next());
    starts.filter(|name| SECTIONS.iter().any(|section| name.starts_with(section))).collect()
}

fn row(line: &str) -> Option<Row<'_>> {
    let mut cells = line.trim().strip_prefix('|')?.split('|').map(str::trim);
    let clause = cells.next()?;
    let is_clause = clause.strip_prefix('C').is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    let (_what, evidence) = (cells.next()?, cells.next()?);
    is_clause.then_some(Row { clause, evidence })
}

/// The functions of a file that are tests and are not ignored.
fn test_names(text: &str) -> impl Iterator<Item = &str> {
    let mut is_test = false;
    text.lines().filter_map(move |line| {
        let line = line.trim();
        if line == "#[test]" {
            is_test = true;
        } else if line.starts_with("#[ignore") {
            is_test = false;
        } else if is_test && !line.starts_with("#[") && !line.starts_with("//") {
            is_test = false;
            let rest = line.split_once("fn ")?.1;
            return rest.split(|c: char| !c.is_alphanumeric() && c != '_').next();
        }
        None
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONTRACT: &str = "- C2.1 splits\n- C2.2 zeroes\n- C5.1 not due\n- no clause\n";

    fn judged(table: &str) -> Vec<String> {
        let source =
            "#[test]\n#[cfg(unix)]\nfn splits() {}\n#[test]\n#[ignore = \"slow\"]\nfn slow() {}\nfn helper() {}\n";
        let names = test_names(source).map(str::to_owned).collect();
        let tests = BTreeMap::from([(PathBuf::from("a.rs"), names)]);
        judge(&clauses(CONTRACT), &table.lines().filter_map(row).collect::<Vec<_>>(), &tests).0
    }

    #[test]
    fn each_clause_names_a_test_or_a_reason() {
        let good = "| clause | what | tests |\n|---|---|---|\n| C2.1 | it | `a.rs::splits` |\n| C2.2 | it | later: no pages yet |\n";
        assert_eq!(judged(good), Vec::<String>::new());
    }

    #[test]
    fn what_is_missing_is_said() {
        assert_eq!(judged("| C2.1 | it | `a.rs::splits` |").len(), 1, "C2.2 has no row");
        assert_eq!(judged("| C2.1 | it | `a.rs::splits` |\n| C2.2 | it | later: |").len(), 1, "no reason");
        assert_eq!(judged("| C2.1 | it | `a.rs::splits` |\n| C2.2 | it | `a.rs::slow` |").len(), 1, "ignored");
        assert_eq!(judged("| C2.1 | it | `a.rs::splits` |\n| C2.2 | it | `a.rs::helper` |").len(), 1, "no test");
        assert_eq!(judged("| C2.1 | it | `a.rs::splits` |\n| C2.2 | it | `b.rs::splits` |").len(), 1, "no file");
        assert_eq!(
            judged("| C2.1 | it | `a.rs::splits` |\n| C2.2 | it | `a.rs::splits` |\n| C2.9 | it | later: x |").len(),
            1,
            "no clause"
        );
    }
}
