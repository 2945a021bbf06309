//! What a step found: how much passed, how much failed, what was skipped and why.

/// Something that did not run here, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Skip {
    /// The step, or `package/test` for a test: the same in each step that runs it.
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
    /// What the step wants to be seen even when it passes.
    pub(crate) notes: Vec<String>,
}

impl Tally {
    /// One check that passed, with something worth printing about it.
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

    /// One check: passed when `problems` is empty, else one failure for each. The note
    /// is printed either way.
    pub(crate) fn from_problems(problems: Vec<String>, note: impl Into<String>) -> Self {
        let passed = usize::from(problems.is_empty());
        let failures = problems.into_iter().map(|why| Failure { name: String::new(), why }).collect();
        Self { passed, failures, notes: vec![note.into()], skips: Vec::new() }
    }

    /// Adds what another part of the same step found.
    pub(crate) fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failures.extend(other.failures);
        self.skips.extend(other.skips);
        self.notes.extend(other.notes);
    }
}

/// Reads the counts out of what `cargo test -- --show-output` printed.
///
/// A test that the harness ignores is a skip with the attribute's reason. So is one
/// that printed a line `skipped: reason` and returned: the harness calls that a
/// pass, the project does not.
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
                continue; // It said so more than once.
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

/// What the tests that failed printed, indented; the first lines of each.
pub(crate) fn said_by_failures(output: &str) -> String {
    const LINES: usize = 40;
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
    fn counts_tests_and_takes_their_own_word_for_a_skip() {
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
    fn shows_what_a_test_that_failed_said_and_no_other() {
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
    fn adds_up_several_binaries() {
        let twice = format!("{OUTPUT}{OUTPUT}");
        assert_eq!(of_tests("tests", &twice).passed, 2);
        assert_eq!(of_tests("tests", "error: could not compile").passed, 0);
    }
}
