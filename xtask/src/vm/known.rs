//! Failures that an issue is open for: `tests/vm/known-failures`, a line each, `SCRIPT TEST REASON`.
//!
//! TEST is `PACKAGE/TEST`, or the beginning of some and a `*`. In that script such a failure counts as a skip, for that
//! reason. The line ends with its issue: when none of its tests fails any more, that is a failure.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::tally::{Skip, Tally};

/// The lines of the file.
pub(super) struct Known(Vec<Line>);

#[derive(Debug, PartialEq, Eq)]
struct Line {
    script: String,
    test: String,
    reason: String,
}

impl Line {
    fn names(&self, test: &str) -> bool {
        match self.test.strip_suffix('*') {
            Some(prefix) => test.starts_with(prefix),
            None => test == self.test,
        }
    }
}

impl Known {
    pub(super) fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
        Self::parse(&text).with_context(|| path.display().to_string())
    }

    fn parse(text: &str) -> Result<Self> {
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        let parse = |line: &str| {
            let (script, rest) = line.split_once(char::is_whitespace)?;
            let (test, reason) = rest.trim_start().split_once(char::is_whitespace)?;
            // A failure that nobody means to mend is no known one.
            let reason = reason.trim_start();
            reason.starts_with("issue ").then(|| Line {
                script: script.to_owned(),
                test: test.to_owned(),
                reason: reason.to_owned(),
            })
        };
        let lines = lines.map(|line| parse(line).with_context(|| format!("not SCRIPT TEST issue N: REASON: {line}")));
        Ok(Self(lines.collect::<Result<_>>()?))
    }

    /// Makes skips of the failures that are known. `is_part`: only some tests ran, so that those which did not fail say
    /// nothing.
    pub(super) fn judge(&self, script: &str, found: Tally, is_part: bool) -> Tally {
        let mut tally = Tally { failures: Vec::new(), ..found };
        let mut lines: Vec<_> = self.0.iter().filter(|line| line.script == script).map(|line| (line, false)).collect();
        for failure in found.failures {
            match lines.iter_mut().find(|(line, _)| line.names(&failure.name)) {
                Some((line, has_failed)) => {
                    *has_failed = true;
                    tally.skips.push(Skip { name: failure.name, reason: line.reason.clone() });
                }
                None => tally.failures.push(failure),
            }
        }
        for (line, _) in lines.iter().filter(|(_, has_failed)| !has_failed && !is_part) {
            let reason = &line.reason;
            tally.fail("", format!("{} did not fail ({reason}); remove it from tests/vm/known-failures", line.test));
        }
        tally
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = "\
# Comments and empty lines.

aarch64      pagemill/devices::kcore  issue 12: addresses
aarch64-16k  pagemill/*               issue 11: pages of 16 KiB
";

    fn failing(names: &[&str]) -> Tally {
        let mut tally = Tally { passed: 3, ..Tally::default() };
        names.iter().for_each(|name| tally.fail(*name, "ended with 101"));
        tally
    }

    #[test]
    fn a_known_failure_is_a_skip_and_another_one_a_failure() {
        let known = Known::parse(LIST).unwrap();
        let tally = known.judge("aarch64", failing(&["pagemill/devices::kcore", "pagemill/forms::list"]), false);
        let skip = Skip { name: "pagemill/devices::kcore".to_owned(), reason: "issue 12: addresses".to_owned() };
        assert_eq!((tally.passed, tally.skips), (3, vec![skip]));
        assert_eq!(tally.failures.len(), 1);
        assert_eq!(tally.failures[0].name, "pagemill/forms::list");
    }

    #[test]
    fn a_prefix_names_all_that_begin_with_it_in_its_script() {
        let known = Known::parse(LIST).unwrap();
        let tally = known.judge("aarch64-16k", failing(&["pagemill/a::b", "pagemill/c::d", "pagemill-os/e"]), false);
        assert_eq!((tally.skips.len(), tally.failures.len()), (2, 1));
        assert_eq!(known.judge("nodes", failing(&["pagemill/a::b"]), false).failures.len(), 1);
    }

    #[test]
    fn a_line_that_nothing_fails_for_has_expired() {
        let known = Known::parse(LIST).unwrap();
        let tally = known.judge("aarch64", failing(&[]), false);
        assert_eq!(tally.failures.len(), 1);
        assert!(tally.failures[0].why.contains("remove it"), "{:?}", tally.failures);
        assert!(known.judge("aarch64", failing(&[]), true).failures.is_empty(), "only a part ran");
        assert!(known.judge("nodes", failing(&[]), false).failures.is_empty(), "another script's");
    }

    #[test]
    fn a_line_without_an_issue_is_refused() {
        for line in ["aarch64", "aarch64 pagemill/a", "aarch64 pagemill/a it is slow"] {
            assert!(Known::parse(line).is_err(), "{line}");
        }
    }
}
