//! Holds docs/clauses.md against the contract and the tests: each clause names at
//! least one test that exists, or says why it comes later. The same for docs/faults.md: each
//! fault that tests have to see names those that do.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::papers::project_files;
use crate::plan::STEPS;
use crate::shell::Shell;
use crate::tally::Tally;

/// The sections of the contract that have to be tested or put off by now; a section
/// is added here when its first part is built. Section 1 defines words and has no
/// numbered clause.
const SECTIONS: &[&str] = &["C2.", "C3.", "C4.", "C5.", "C6.", "C10."];

/// How a row puts a clause, or the rest of one, off.
const LATER: &str = "later: ";

/// How a row names a check of `cargo xtask test` where no single test can hold the clause.
const CHECK: &str = "xtask:";

/// A row: `| C2.1 | what of it is tested | tests, or later: why |`.
struct Row<'a> {
    clause: &'a str,
    evidence: &'a str,
}

impl Row<'_> {
    fn is_tested(&self) -> bool {
        self.evidence.contains("::") || self.evidence.contains(CHECK)
    }
    fn is_later(&self) -> bool {
        self.evidence.strip_prefix(LATER).is_some_and(|reason| !reason.is_empty())
    }
}

pub(crate) fn check(shell: &Shell) -> Result<Tally> {
    let read = |path: &str| fs::read_to_string(shell.root.join(path)).context(path.to_owned());
    let contract = read("docs/contract.md")?;
    let table = read("docs/clauses.md")?;
    let mut tests: BTreeMap<PathBuf, BTreeSet<String>> = BTreeMap::new();
    let mut left_out = Vec::new();
    for path in project_files(shell)?.into_iter().filter(|path| path.extension().is_some_and(|end| end == "rs")) {
        let text = fs::read_to_string(shell.root.join(&path))?;
        // A crate's tests are one program, which has the files that it names.
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let main = path.with_file_name("main.rs");
        if path.parent().is_some_and(|folder| folder.ends_with("tests"))
            && main != path
            && shell.root.join(&main).exists()
        {
            let named = format!("mod {stem};");
            if !fs::read_to_string(shell.root.join(&main))?.lines().any(|line| line.trim_start().ends_with(&named)) {
                left_out.push(format!("{} does not say `{named}`: its tests are never run", main.display()));
            }
        }
        tests.insert(path, test_names(&text).map(str::to_owned).collect());
    }
    let rows: Vec<_> = table.lines().filter_map(row).collect();
    let (mut problems, note) = judge(&clauses(&contract), &rows, &tests);
    problems.extend(left_out);
    let (unseen, faults) = judge_faults(&read("docs/faults.md")?, &tests);
    problems.extend(unseen);
    let note = format!("{note}; {faults} faults that tests see");
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
            let exists = match name.strip_prefix(CHECK) {
                Some(check) if !name.contains("::") => STEPS.iter().any(|step| step.name == check),
                _ => is_test(name, tests),
            };
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
        let is_put_off = of_clause.iter().all(|row| row.is_later());
        later += usize::from(is_put_off && !of_clause.is_empty());
        for row in of_clause.iter().filter(|row| !row.is_tested() && !row.is_later()) {
            let Row { clause, evidence } = row;
            problems.push(format!(
                "docs/clauses.md: {clause}: {evidence:?} is neither a test nor, after {LATER:?}, a reason"
            ));
        }
    }
    (problems, format!("{} clauses, {later} of them wholly for later; {cited} tests named", clauses.len()))
}

/// A test by its file and function.
fn is_test(name: &str, tests: &BTreeMap<PathBuf, BTreeSet<String>>) -> bool {
    name.split_once("::")
        .is_some_and(|(file, test)| tests.get(Path::new(file)).is_some_and(|names| names.contains(test)))
}

/// Of rows `| fault | file | tests | how they fail |`: what is wrong with them, and how many there are.
fn judge_faults(table: &str, tests: &BTreeMap<PathBuf, BTreeSet<String>>) -> (Vec<String>, usize) {
    let (mut problems, mut rows) = (Vec::new(), 0);
    let lines = table.lines().skip_while(|line| !line.starts_with("|---")).skip(1).filter(|line| line.starts_with('|'));
    for line in lines {
        rows += 1;
        let cells: Vec<_> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [fault, _file, seen_by, _how] = cells[..] else {
            problems.push(format!("docs/faults.md: {line}: not four columns"));
            continue;
        };
        let names: Vec<_> = seen_by.split('`').skip(1).step_by(2).collect();
        if names.is_empty() {
            problems.push(format!("docs/faults.md: {fault}: no test sees it"));
        }
        let missing = names.iter().filter(|name| !is_test(name, tests));
        problems.extend(missing.map(|name| format!("docs/faults.md: {fault}: there is no test {name}")));
    }
    (problems, rows)
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

    const CONTRACT: &str = "- C2.1 splits\n- C2.2 zeroes\n- C9.1 not due\n- no clause\n";

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
    fn each_fault_names_tests_that_exist() {
        let tests = BTreeMap::from([(PathBuf::from("a.rs"), BTreeSet::from(["sees".to_owned()]))]);
        let of =
            |row: &str| judge_faults(&format!("| fault | file | tests | how |\n|---|---|---|---|\n{row}\n"), &tests);
        assert_eq!(of("| no lock | b.rs | `a.rs::sees` | it hangs |"), (Vec::new(), 1));
        for wrong in ["`a.rs::looks` | x |", "`b.rs::sees` | x |", "somebody | x |", "`a.rs::sees` |"] {
            assert_eq!(of(&format!("| no lock | b.rs | {wrong}")).0.len(), 1, "{wrong}");
        }
    }

    #[test]
    fn a_check_may_stand_for_a_test() {
        let of = |evidence: &str| judged(&format!("| C2.1 | it | `a.rs::splits` |\n| C2.2 | it | {evidence} |"));
        assert_eq!(of("`xtask:sizes`"), Vec::<String>::new());
        assert_eq!(of("`xtask:weights`").len(), 1, "no such check");
        assert_eq!(of("`sizes`").len(), 2, "neither a test nor a check");
    }

    #[test]
    fn what_is_missing_is_said() {
        assert_eq!(judged("| C2.1 | it | `a.rs::splits` |").len(), 1, "C2.2 has no row");
        assert_eq!(judged("| C2.1 | it | `a.rs::splits` |\n| C2.2 | it | later: |").len(), 1, "no reason");
        let half = "| C2.1 | it | `a.rs::splits` |\n| C2.1 | rest | soon |\n| C2.2 | it | later: no pages yet |";
        assert_eq!(judged(half).len(), 1, "one row of a clause says nothing");
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
