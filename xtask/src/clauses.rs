//! Compares docs/contract.md with the tests: each clause names at least one test that exists, or says why it comes later. In
//! docs/faults.md, each fault that tests have to see names the tests that see it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::papers::project_files;
use crate::plan::STEPS;
use crate::shell::Shell;
use crate::tally::Tally;

const CONTRACT: &str = "docs/contract.md";

/// Marks a clause that comes later; below a heading, all clauses of the section that have no test.
const LATER: &str = "*Later:*";

/// Marks a step of `cargo xtask test`, for a clause that no single test can show.
const CHECK: &str = "xtask:";

/// A file's tests, by the file's path.
type Tests = BTreeMap<PathBuf, BTreeSet<String>>;

/// A clause of the contract.
struct Clause<'a> {
    number: &'a str,
    tests: Vec<&'a str>,
    is_put_off: bool,
}

pub(crate) fn check(shell: &Shell) -> Result<Tally> {
    let read = |path: &str| fs::read_to_string(shell.root.join(path)).context(path.to_owned());
    let mut tests = Tests::new();
    let mut left_out = Vec::new();
    for path in project_files(shell)?.into_iter().filter(|path| path.extension().is_some_and(|end| end == "rs")) {
        let text = fs::read_to_string(shell.root.join(&path))?;
        // A crate's tests are one program: the files that its main.rs names.
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
    let (mut problems, note) = judge(&read(CONTRACT)?, &tests);
    problems.extend(left_out);
    let (unseen, faults) = judge_faults(&read("docs/faults.md")?, &tests);
    problems.extend(unseen);
    let note = format!("{note}; {faults} faults that tests see");
    Ok(Tally::from_problems(problems, note))
}

fn judge(contract: &str, tests: &Tests) -> (Vec<String>, String) {
    let (clauses, mut problems) = clauses(contract);
    let mut put_off = 0;
    for clause in &clauses {
        match (clause.tests.is_empty(), clause.is_put_off) {
            (true, true) => put_off += 1,
            (true, false) => {
                problems.push(format!("{CONTRACT}: {} names no test, and no reason after {LATER}", clause.number))
            }
            (false, _) => {}
        }
        for name in &clause.tests {
            let exists = match name.strip_prefix(CHECK) {
                Some(check) if !name.contains("::") => STEPS.iter().any(|step| step.name == check),
                _ => is_test(name, tests),
            };
            if !exists {
                problems.push(format!("{CONTRACT}: {}: {}", clause.number, missing(name, tests)));
            }
        }
    }
    let cited: usize = clauses.iter().map(|clause| clause.tests.len()).sum();
    (problems, format!("{} clauses, {put_off} of them wholly for later; {cited} tests named", clauses.len()))
}

/// The contract's clauses, and problems with its form.
///
/// A clause begins with `- C2.1`. Below it, folded, stand its properties (`  - ...`), and below each property its tests, one a
/// line (``    - `file::test` ``).
fn clauses(contract: &str) -> (Vec<Clause<'_>>, Vec<String>) {
    let mut clauses: Vec<Clause<'_>> = Vec::new();
    let mut problems = Vec::new();
    let mut is_section_put_off = false;
    // Whether a clause has begun in this section, and the property on the line before, which must be followed by a test.
    let mut is_inside = false;
    let mut bare: Option<&str> = None;
    // A heading at the end, so that a property on the last line is checked.
    for line in contract.lines().chain(["## "]) {
        let test = line.strip_prefix("    - `").and_then(|rest| rest.strip_suffix('`'));
        if let Some(property) = bare.take().filter(|_| test.is_none()) {
            problems.push(format!("{CONTRACT}: {property:?} has no test"));
        }
        let number =
            line.strip_prefix("- ").and_then(|rest| rest.split_whitespace().next()).filter(|word| is_number(word));
        if line.starts_with("## ") {
            (is_inside, is_section_put_off) = (false, false);
        } else if let Some(number) = number {
            if clauses.iter().any(|clause| clause.number == number) {
                problems.push(format!("{CONTRACT}: {number} stands there twice"));
            }
            clauses.push(Clause { number, tests: Vec::new(), is_put_off: is_section_put_off });
            is_inside = true;
        } else if let Some(reason) = line.trim_start().strip_prefix(LATER) {
            let has_reason = !reason.trim().is_empty();
            match clauses.last_mut().filter(|_| is_inside) {
                Some(clause) => clause.is_put_off |= has_reason,
                None => is_section_put_off = has_reason,
            }
        } else if let Some(test) = test {
            match clauses.last_mut().filter(|_| is_inside) {
                Some(clause) => clause.tests.push(test),
                None => problems.push(format!("{CONTRACT}: {test} stands below no clause")),
            }
        } else if let Some(property) = line.strip_prefix("  - ") {
            bare = Some(property);
        }
    }
    (clauses, problems)
}

/// Whether a word is a clause's number, like C2.1.
fn is_number(word: &str) -> bool {
    let parts = word.strip_prefix('C').and_then(|rest| rest.split_once('.'));
    parts.is_some_and(|(section, clause)| section.parse::<u8>().is_ok() && clause.parse::<u8>().is_ok())
}

/// Whether `name`, a file and a function, is a test.
fn is_test(name: &str, tests: &Tests) -> bool {
    name.split_once("::")
        .is_some_and(|(file, test)| tests.get(Path::new(file)).is_some_and(|names| names.contains(test)))
}

/// The message for a test that does not exist, with the files that have a test of that name: it may have moved.
fn missing(name: &str, tests: &Tests) -> String {
    let function = name.rsplit("::").next().unwrap_or_default();
    let files = tests.iter().filter(|(_, names)| names.contains(function));
    let files: Vec<_> = files.map(|(file, _)| format!("{}::{function}", file.display())).collect();
    match files[..] {
        [] => format!("there is no test {name}"),
        _ => format!("there is no test {name}, but {}", files.join(", ")),
    }
}

/// The problems with the rows `| fault | file | tests | how they fail |`, and the number of rows.
fn judge_faults(table: &str, tests: &Tests) -> (Vec<String>, usize) {
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
        let gone = names.iter().filter(|name| !is_test(name, tests));
        problems.extend(gone.map(|name| format!("docs/faults.md: {fault}: {}", missing(name, tests))));
    }
    (problems, rows)
}

/// The tests of a file, without the ignored ones.
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

    /// The problems with a contract whose clause C2.1 is tested and whose clause C2.2 is followed by `rest`.
    fn judged(rest: &str) -> Vec<String> {
        let source =
            "#[test]\n#[cfg(unix)]\nfn splits() {}\n#[test]\n#[ignore = \"slow\"]\nfn slow() {}\nfn helper() {}\n";
        let names = test_names(source).map(str::to_owned).collect();
        let tests = Tests::from([(PathBuf::from("a.rs"), names)]);
        let contract =
            format!("## 2.\n\n- C2.1 splits\n\n  - it\n    - `a.rs::splits`\n\n- C2.2 zeroes\n{rest}\n- a word\n");
        judge(&contract, &tests).0
    }

    #[test]
    fn a_clause_needs_a_test_or_a_reason_to_come_later() {
        assert_eq!(judged("  *Later:* no pages yet"), Vec::<String>::new());
        assert_eq!(judged("\n  - it\n    - `a.rs::splits`"), Vec::<String>::new());
        assert_eq!(judged("## 3.\n- C3.1 comes\n  - it\n    - `a.rs::splits`").len(), 1, "C2.2 has no test");
        assert_eq!(judged("  *Later:*").len(), 1, "no reason");
    }

    #[test]
    fn a_reason_below_a_heading_is_for_its_section_alone() {
        let of = |section: &str| judged(&format!("  *Later:* no pages yet\n## 3.\n{section}\n- C3.1 comes"));
        assert_eq!(of("*Later:* not built yet"), Vec::<String>::new());
        assert_eq!(of("").len(), 1, "a reason is its own section's");
    }

    #[test]
    fn a_fault_needs_tests_that_exist_and_four_columns() {
        let tests = Tests::from([(PathBuf::from("a.rs"), BTreeSet::from(["sees".to_owned()]))]);
        let of =
            |row: &str| judge_faults(&format!("| fault | file | tests | how |\n|---|---|---|---|\n{row}\n"), &tests);
        assert_eq!(of("| no lock | b.rs | `a.rs::sees` | it hangs |"), (Vec::new(), 1));
        for wrong in ["`a.rs::looks` | x |", "`b.rs::sees` | x |", "somebody | x |", "`a.rs::sees` |"] {
            assert_eq!(of(&format!("| no lock | b.rs | {wrong}")).0.len(), 1, "{wrong}");
        }
    }

    #[test]
    fn a_clause_may_name_a_step_instead_of_a_test() {
        assert_eq!(judged("  - it\n    - `xtask:sizes`"), Vec::<String>::new());
        assert_eq!(judged("  - it\n    - `xtask:weights`").len(), 1, "no such check");
        assert_eq!(judged("  - it\n    - `sizes`").len(), 1, "neither a test nor a check");
    }

    #[test]
    fn tests_that_are_missing_ignored_or_misplaced_are_problems() {
        assert_eq!(judged("  - it\n    - `a.rs::slow`").len(), 1, "ignored");
        assert_eq!(judged("  - it\n    - `a.rs::helper`").len(), 1, "no test");
        assert_eq!(judged("  *Later:* the rest\n  - it\n  - that\n    - `a.rs::splits`").len(), 1, "it has no test");
        assert_eq!(judged("  *Later:* no pages yet\n- C2.1 again").len(), 2, "twice, the second time without a test");
        assert_eq!(judged("  *Later:* no pages yet\n## Others\n    - `a.rs::splits`").len(), 1, "no clause");
        let moved = judged("  - it\n    - `b.rs::splits`");
        assert!(moved.len() == 1 && moved[0].contains("a.rs::splits"), "{moved:?}");
    }
}
