//! The outcome of a step: how much passed, how much failed, what was skipped and why.

/// A check that did not run here, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Skip {
    /// The step, or `package/test` for a test. A test has one name in all the steps that run it.
    pub(crate) name: String,
    /// What is missing.
    pub(crate) reason: String,
}

/// A check that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    /// `step/package/test` for a test; empty for the step itself.
    pub(crate) name: String,
    /// What went wrong, in as many lines as it takes.
    pub(crate) why: String,
}

/// The outcome of one step.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    /// Checks and tests that passed.
    pub(crate) passed: usize,
    /// Checks and tests that failed.
    pub(crate) failures: Vec<Failure>,
    /// Checks and tests that did not run.
    pub(crate) skips: Vec<Skip>,
    /// Lines that are printed even when the step passes.
    pub(crate) notes: Vec<String>,
}

impl Tally {
    /// One check that passed, with a line worth printing.
    pub(crate) fn pass(note: impl Into<String>) -> Self {
        Self { passed: 1, notes: vec![note.into()], ..Self::default() }
    }

    /// One check that did not run.
    pub(crate) fn skip(name: impl Into<String>, reason: impl Into<String>) -> Self {
        let skip = Skip { name: name.into(), reason: reason.into() };
        Self { skips: vec![skip], ..Self::default() }
    }

    /// One check that failed.
    pub(crate) fn failure(name: impl Into<String>, why: impl Into<String>) -> Self {
        let mut tally = Self::default();
        tally.fail(name, why);
        tally
    }

    /// Adds a check that failed.
    pub(crate) fn fail(&mut self, name: impl Into<String>, why: impl Into<String>) {
        self.failures.push(Failure { name: name.into(), why: why.into() });
    }

    /// One check: it passed if there are no `problems`, else each problem is a failure. The note is printed either way.
    pub(crate) fn from_problems(problems: Vec<String>, note: impl Into<String>) -> Self {
        let passed = usize::from(problems.is_empty());
        let failures = problems.into_iter().map(|why| Failure { name: String::new(), why }).collect();
        Self { passed, failures, notes: vec![note.into()], skips: Vec::new() }
    }

    /// Adds the outcome of another part of the same step.
    pub(crate) fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failures.extend(other.failures);
        self.skips.extend(other.skips);
        self.notes.extend(other.notes);
    }
}

/// Reads the counts from the output of `cargo test -- --show-output`.
///
/// A test that the harness ignores is a skip, with the attribute's reason. So is a test that printed a line `skipped: reason`
/// and returned: the harness counts it as passed, the project does not.
pub(crate) fn of_tests(step: &str, output: &str) -> Tally {
    let mut tally = Tally::default();
    let mut shown_test = "";
    let mut said_skipped = 0;
    for line in output.lines() {
        if let Some(counts) = line.strip_prefix("test result: ") {
            tally.passed += count_before(counts, " passed");
        } else if let Some(name) = shown_name(line) {
            shown_test = name;
        } else if let Some(reason) = line.strip_prefix("skipped: ") {
            let name = format!("{step}/{shown_test}");
            if tally.skips.last().is_some_and(|last| last.name == name) {
                continue; // The test printed the line more than once.
            }
            said_skipped += 1;
            tally.skips.push(Skip { name, reason: reason.trim().to_owned() });
        } else if let Some((name, rest)) = line.strip_prefix("test ").and_then(|l| l.split_once(" ... ")) {
            if rest.starts_with("FAILED") {
                tally.fail(format!("{step}/{name}"), "");
            } else if let Some(reason) = rest.strip_prefix("ignored") {
                let reason = reason.trim_start_matches([',', ' ']);
                let reason = if reason.is_empty() { "ignored without a reason" } else { reason };
                tally.skips.push(Skip { name: format!("{step}/{name}"), reason: reason.to_owned() });
            }
        }
    }
    tally.passed = tally.passed.saturating_sub(said_skipped);
    tally
}

/// The outcome of a check in a process of its own. `failed` says how the process ended, if it did not end well. A process that
/// ran a test must have run exactly one.
pub(crate) fn of_one(name: &str, failed: Option<String>, output: &str, is_test: bool) -> Tally {
    if let Some(how) = failed {
        let said = said_by_failures(output);
        let said = if said.is_empty() { last_lines(output, LINES) } else { said };
        return Tally::failure(name, format!("{how}\n{said}"));
    }
    let Tally { passed, mut skips, .. } = of_tests("", output);
    if is_test && passed + skips.len() != 1 {
        return Tally::failure(name, format!("one test was to run, and {passed} passed"));
    }
    match skips.pop() {
        Some(skip) => Tally::skip(name, skip.reason),
        None => Tally { passed: 1, ..Tally::default() },
    }
}

/// How many lines of a failed command's output are shown.
const LINES: usize = 40;

/// The output of the tests that failed, indented: the first lines of each.
pub(crate) fn said_by_failures(output: &str) -> String {
    let (mut said, mut left) = (String::new(), 0);
    let mut is_among_failures = false;
    for line in output.lines() {
        match line {
            "failures:" => is_among_failures = true,
            "successes:" => is_among_failures = false,
            _ if line.starts_with("test result: ") => is_among_failures = false,
            _ => {}
        }
        if is_among_failures && shown_name(line).is_some() {
            left = LINES;
        } else if !is_among_failures || line == "failures:" {
            left = 0;
        }
        if left > 0 {
            left -= 1;
            said += &format!("    {line}\n");
        }
    }
    said
}

/// The last `count` lines of a text, indented.
pub(crate) fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].iter().map(|line| format!("    {line}\n")).collect()
}

/// The test whose output follows: `---- name stdout ----`.
fn shown_name(line: &str) -> Option<&str> {
    line.strip_prefix("---- ")?.strip_suffix(" stdout ----")
}

/// The number in front of `word`: `3 passed` in `ok. 3 passed; 0 failed`.
fn count_before(text: &str, word: &str) -> usize {
    let Some(end) = text.find(word) else { return 0 };
    let digits = text[..end].rsplit(|c: char| !c.is_ascii_digit()).next().unwrap_or("");
    digits.parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "\
running 4 tests
test a::splits ... ok
test a::merges ... FAILED
test b::on_eight_nodes ... ignored, needs two NUMA nodes
test b::hugetlb ... ok

successes:

---- b::hugetlb stdout ----
skipped: no huge pages reserved
skipped: no huge pages reserved

test result: FAILED. 2 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s
";

    #[test]
    fn a_test_that_prints_skipped_counts_as_a_skip() {
        let tally = of_tests("tests", OUTPUT);
        assert_eq!(tally.passed, 1);
        assert_eq!(tally.failures.iter().map(|failure| &failure.name).collect::<Vec<_>>(), ["tests/a::merges"]);
        let skips: Vec<_> = tally.skips.iter().map(|s| (s.name.as_str(), s.reason.as_str())).collect();
        assert_eq!(
            skips,
            [("tests/b::on_eight_nodes", "needs two NUMA nodes"), ("tests/b::hugetlb", "no huge pages reserved"),]
        );
    }

    #[test]
    fn only_the_output_of_failed_tests_is_shown() {
        let output = "\
successes:

---- b::good stdout ----
fine

failures:

---- a::merges stdout ----
thread panicked: left 1, right 2

---- a::splits stdout ----
no room

failures:
    a::merges
    a::splits

test result: FAILED. 1 passed; 2 failed; 0 ignored
error: 1 target failed
";
        let said = said_by_failures(output);
        let lines: Vec<_> = said.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        assert_eq!(
            lines,
            ["---- a::merges stdout ----", "thread panicked: left 1, right 2", "---- a::splits stdout ----", "no room"]
        );
    }

    #[test]
    fn the_counts_of_several_programs_are_added() {
        let twice = format!("{OUTPUT}{OUTPUT}");
        assert_eq!(of_tests("tests", &twice).passed, 2);
        assert_eq!(of_tests("tests", "error: could not compile").passed, 0);
    }
}
