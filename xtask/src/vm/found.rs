//! Reads a machine's output.
//!
//! `tests/vm/bin/check` writes a block for each check, in one piece, so that two at a time do not mix:
//! ```text
//! vm: begin pagemill misuse::a_test
//! what it printed
//! vm: end 0 pagemill misuse::a_test
//! ```
//! and before them the number of a package's checks, as `tests/vm/bin/tests` does for all its tests. So if the kernel writes into
//! a line, the test of that line is missed.

use std::collections::{BTreeMap, BTreeSet};

use crate::tally::{self, Tally};

/// The outcome that the blocks in `text` report. Failures and skips are named `PACKAGE/TEST`.
pub(super) fn read(text: &str) -> Tally {
    let mut tally = Tally::default();
    let (mut wanted, mut seen) = (BTreeMap::<&str, usize>::new(), BTreeMap::<&str, usize>::new());
    // The packages that have announced tests.
    let mut are_tests = BTreeSet::new();
    let mut block: Option<(&str, Vec<&str>)> = None;
    for line in text.lines() {
        let tests = line.strip_prefix("vm: tests ");
        if let Some(counted) = tests.or(line.strip_prefix("vm: checks ")) {
            if let Some((count, package)) = counted.split_once(" of ") {
                *wanted.entry(package).or_default() += count.trim().parse().unwrap_or(0);
                are_tests.extend(tests.map(|_| package));
            }
        } else if let Some(name) = line.strip_prefix("vm: begin ") {
            block = Some((name, Vec::new()));
        } else if let Some((code, ended)) = line.strip_prefix("vm: end ").and_then(|rest| rest.split_once(' ')) {
            let Some((_, lines)) = block.take().filter(|(name, _)| *name == ended) else { continue };
            let (package, name) = ended.split_once(' ').unwrap_or((ended, ""));
            *seen.entry(package).or_default() += 1;
            if !wanted.contains_key(package) {
                tally.fail("", format!("nobody said that {package} would be checked"));
            }
            let failed = (code != "0").then(|| how_it_ended(code));
            let is_test = are_tests.contains(package);
            tally.add(tally::of_one(&format!("{package}/{name}"), failed, &lines.join("\n"), is_test));
        } else if let Some((_, lines)) = &mut block {
            lines.push(line);
        }
    }
    for (package, count) in wanted {
        let seen = seen.get(package).copied().unwrap_or(0);
        if seen != count {
            tally.fail("", format!("{package} has {count} checks here, and {seen} of them said how they ended"));
        }
    }
    tally
}

/// For a process that a signal ended, a shell prints 128 and the signal's number; `timeout` ends one by SIGTERM, 143.
fn how_it_ended(code: &str) -> String {
    match code {
        "143" => "ran out of time".to_owned(),
        _ => format!("ended with {code}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tally::Skip;

    const PASSED: &str = "vm: begin pagemill a::splits\n\nrunning 1 test\ntest a::splits ... ok\n\n\
        test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 8 filtered out\nvm: end 0 pagemill a::splits\n";
    const SKIPPED: &str = "vm: begin pagemill a::numa\nrunning 1 test\ntest a::numa ... ok\n\nsuccesses:\n\n\
        ---- a::numa stdout ----\nskipped: one node\nskipped: one node\n\n\
        test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 8 filtered out\nvm: end 0 pagemill a::numa\n";
    const FAILED: &str = "vm: begin pagemill a::merges\nrunning 1 test\ntest a::merges ... FAILED\n\nfailures:\n\n\
        ---- a::merges stdout ----\nleft 1, right 2\n\n\nfailures:\n    a::merges\n\n\
        test result: FAILED. 0 passed; 1 failed\nvm: end 101 pagemill a::merges\n";
    const KILLED: &str = "vm: begin pagemill a::dies\nrunning 1 test\nvm: end 139 pagemill a::dies\n";

    #[test]
    fn blocks_tell_tests_that_pass_are_skipped_fail_or_are_killed() {
        let tally = read(&format!("vm: tests 4 of pagemill\n{PASSED}{SKIPPED}some noise\n{FAILED}{KILLED}"));
        assert_eq!(tally.passed, 1);
        assert_eq!(tally.skips, [Skip { name: "pagemill/a::numa".to_owned(), reason: "one node".to_owned() }]);
        let names: Vec<_> = tally.failures.iter().map(|failure| failure.name.as_str()).collect();
        assert_eq!(names, ["pagemill/a::merges", "pagemill/a::dies"]);
        assert!(tally.failures[0].why.contains("left 1, right 2"), "{:?}", tally.failures);
        assert!(tally.failures[1].why.contains("139"), "{:?}", tally.failures);
    }

    #[test]
    fn a_test_without_a_block_is_a_failure() {
        let tally = read(&format!("vm: tests 1 of pagemill\nvm: tests 1 of pagemill\n{PASSED}"));
        assert_eq!((tally.passed, tally.failures.len()), (1, 1));
        assert!(tally.failures[0].why.contains("2 checks here, and 1 of them"), "{:?}", tally.failures);
        // A line into which the kernel wrote begins no block, and ends none.
        let tally = read(&format!("vm: tests 1 of pagemill\n[  1.0] {PASSED}"));
        assert_eq!((tally.passed, tally.failures.len()), (0, 1));
    }

    #[test]
    fn a_check_that_is_no_test_passes_or_fails_by_its_exit_code() {
        let tally = read(
            "vm: checks 1 of pagemill-cli\nvm: begin pagemill-cli stress-rseq\n5 s, nothing found\nvm: end 0 pagemill-cli stress-rseq\n",
        );
        assert_eq!((tally.passed, tally.failures.len()), (1, 0));
        let ended = "vm: begin pagemill-cli stress-rseq\nowned twice\nvm: end 1 pagemill-cli stress-rseq\n";
        let tally = read(&format!("vm: checks 1 of pagemill-cli\n{ended}"));
        assert_eq!(tally.failures[0].name, "pagemill-cli/stress-rseq");
        assert!(tally.failures[0].why.contains("owned twice"));
        assert_eq!(read("vm: checks 1 of pagemill-cli\n").failures.len(), 1, "its end was never seen");
        assert!(!read(ended).failures[0].why.is_empty(), "nobody announced it");
    }

    #[test]
    fn a_test_program_that_runs_no_test_has_failed() {
        let tally =
            read("vm: tests 1 of pagemill\nvm: begin pagemill a::b\nrunning 0 tests\nvm: end 0 pagemill a::b\n");
        assert_eq!((tally.passed, tally.failures.len()), (0, 1));
    }
}
