//! Test programs, and a process of its own for each test.
//!
//! Each crate has one program for its unit tests and one for the tests in its folder `tests`. This module builds the programs,
//! asks each for its tests, and starts it once for each test, two at a time for each processor. So a test may change its process
//! (a limit, a signal handler, a fork, a lock that it keeps) without touching other tests, and a test that hangs or is killed
//! is known by name. A test that two processors must run at the same time stands in a module [`TWO_PROCESSORS`]; no other test
//! of the step runs beside it.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::shell::{Cmd, Shell};
use crate::tally::{self, Tally};
use crate::watch::{self, End};

/// Tests in a module of this name run alone.
const TWO_PROCESSORS: &str = "two_processors";
/// Tells a test that it has its process to itself. `tests/own_process.rs` reads this variable.
const OWN_PROCESS: (&str, &str) = ("PAGEMILL_TEST_PROCESS", "own");
/// The processor time that one test may use.
const LIMIT: Duration = Duration::from_secs(1800);

/// A program with tests.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    /// The package that it belongs to.
    pub(crate) package: String,
    /// `lib`, `bin`, `test`, ...
    pub(crate) kind: String,
    pub(crate) path: PathBuf,
    /// The package's folder, in which its tests start.
    folder: PathBuf,
}

/// One test of a program.
#[derive(Clone, Debug)]
struct Test<'a> {
    program: &'a Program,
    name: String,
}

impl Test<'_> {
    /// Its name in skips and failures.
    fn key(&self) -> String {
        format!("{}/{}", self.program.package, self.name)
    }
}

/// True for the tests to run, given their program and name.
type Choice<'a> = Box<dyn Fn(&Program, &str) -> bool + Sync + 'a>;

/// A choice of tests, and the environment in which they run.
pub(crate) struct Suite<'a> {
    shell: &'a Shell,
    step: &'static str,
    envs: Vec<(&'static str, String)>,
    is_chosen: Choice<'a>,
}

/// The programs that a `cargo test` command built.
pub(crate) struct Built {
    /// Programs with tests.
    pub(crate) tests: Vec<Program>,
    /// Other programs by name: examples, and programs that tests start.
    pub(crate) programs: BTreeMap<String, PathBuf>,
}

/// Builds the programs that a `cargo test` command selects.
pub(crate) fn build(cargo: Cmd<'_>, log: &str) -> Result<Built> {
    let cargo = cargo.args(["--no-run", "--message-format", "json-render-diagnostics"]);
    let ran = cargo.run(log)?.expect_ok()?;
    // Lines that are no JSON are cargo's progress.
    let messages = ran.text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut built = Built { tests: Vec::new(), programs: BTreeMap::new() };
    for message in messages {
        if let Some(program) = test_program(&message) {
            built.tests.push(program);
        } else if let (Some(path), Some(name)) = (message["executable"].as_str(), message["target"]["name"].as_str()) {
            built.programs.insert(name.to_owned(), path.into());
        }
    }
    ensure!(!built.tests.is_empty(), "cargo named no test program; everything it printed: {}", ran.log.display());
    Ok(built)
}

/// The test program that a message of cargo names, if it names one.
fn test_program(message: &Value) -> Option<Program> {
    if message["profile"]["test"] != true {
        return None;
    }
    let path = PathBuf::from(message["executable"].as_str()?);
    let folder = Path::new(message["manifest_path"].as_str()?).parent()?.to_owned();
    let package = message["package_id"].as_str()?;
    // `path+file:///place/crates/pagemill#0.1.0`, or `...#name@0.1.0` where the folder has another name.
    let (place, version) = package.rsplit_once('#')?;
    let name = version.split_once('@').map_or_else(|| place.rsplit('/').next(), |(name, _)| Some(name))?;
    let kind = message["target"]["kind"][0].as_str()?;
    Some(Program { package: name.to_owned(), kind: kind.to_owned(), path, folder })
}

impl<'a> Suite<'a> {
    /// All tests, in the environment of this process.
    pub(crate) fn new(shell: &'a Shell, step: &'static str) -> Self {
        Self { shell, step, envs: Vec::new(), is_chosen: Box::new(|_, _| true) }
    }

    /// Sets an environment variable for each test.
    pub(crate) fn env(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.envs.push((name, value.into()));
        self
    }

    /// Runs property tests with a fifth of their cases: the step `tests` tries all.
    pub(crate) fn fewer_cases(self) -> Self {
        self.env("PROPTEST_CASES", "60")
    }

    /// Runs only the tests for which this is true.
    pub(crate) fn only(mut self, is_chosen: impl Fn(&Program, &str) -> bool + Sync + 'a) -> Self {
        self.is_chosen = Box::new(is_chosen);
        self
    }

    /// Runs the tests of these programs, each in a process of its own, and counts them.
    pub(crate) fn run(self, programs: &[Program]) -> Result<Tally> {
        let mut tests = Vec::new();
        for program in programs {
            let names = list(program)?.into_iter();
            let names = names.filter(|name| (self.is_chosen)(program, name) && self.shell.is_wanted(name));
            tests.extend(names.map(|name| Test { program, name }));
        }
        let count = tests.len();
        let (alone, together): (VecDeque<_>, VecDeque<_>) =
            tests.into_iter().partition(|test| test.name.split("::").any(|part| part == TWO_PROCESSORS));
        let log = self.shell.log(self.step);
        let log = Mutex::new(File::create(&log).with_context(|| log.display().to_string())?);
        // Two for each processor, because many tests wait for a program that they have started.
        let lanes = 2 * std::thread::available_parallelism().map_or(1, usize::from);
        let (mut total, mut done) = (Tally::default(), 0);
        for (queue, lanes) in [(together, lanes), (alone, 1)] {
            let queue = Mutex::new(queue);
            let found = Mutex::new((&mut total, &mut done));
            std::thread::scope(|scope| {
                for _ in 0..lanes {
                    scope.spawn(|| {
                        while let Some(test) = next(&queue) {
                            let tally = self.one(&test, &log);
                            let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
                            found.0.add(tally);
                            *found.1 += 1;
                            self.shell.progress.done(self.step, *found.1, count);
                        }
                    });
                }
            });
        }
        if watch::is_interrupted() {
            total.fail(self.step, "was interrupted");
        }
        Ok(total)
    }

    /// Runs one test.
    fn one(&self, test: &Test<'_>, log: &Mutex<File>) -> Tally {
        match self.started(test) {
            Ok((end, used, text)) => {
                let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
                let head = format!("== {} ({end}, {} ms of processor time)", test.key(), used.as_millis());
                // If the log cannot be written, the outcome is still counted.
                drop(writeln!(log, "{head}\n{text}"));
                judge(self.step, &test.key(), end, &text)
            }
            Err(error) => Tally::failure(format!("{}/{}", self.step, test.key()), format!("{error:#}")),
        }
    }

    fn started(&self, test: &Test<'_>) -> Result<(End, Duration, String)> {
        let mut output = tempfile::tempfile()?;
        let mut command = Command::new(&test.program.path);
        // With one thread, libtest writes the test's name and the test's output on the same line.
        command
            .args([&test.name, "--exact", "--show-output", "--test-threads=2"])
            .current_dir(&test.program.folder)
            .stdin(Stdio::null());
        command.stdout(output.try_clone()?).stderr(output.try_clone()?);
        // As `cargo test` sets it. Property tests begin at a fixed seed, so that a commit has one verdict.
        command.env("CARGO_MANIFEST_DIR", &test.program.folder).env(OWN_PROCESS.0, OWN_PROCESS.1);
        if std::env::var_os("PROPTEST_RNG_SEED").is_none() {
            command.env("PROPTEST_RNG_SEED", "1");
        }
        command.envs(self.envs.iter().map(|(name, value)| (name, value)));
        let (end, used) = watch::run(&mut command, LIMIT, watch::IDLE)?;
        Ok((end, used, read_all(&mut output)?))
    }
}

/// The contents of a file, from its beginning.
fn read_all(file: &mut File) -> Result<String> {
    let mut text = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut text)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// A program's tests by name.
fn list(program: &Program) -> Result<Vec<String>> {
    let mut output = tempfile::tempfile()?;
    let mut list = Command::new(&program.path);
    list.current_dir(&program.folder).args(["--list", "--format", "terse"]).stdin(Stdio::null());
    list.stdout(output.try_clone()?).stderr(Stdio::null());
    let (end, _) = watch::run(&mut list, LIMIT, watch::IDLE).with_context(|| program.path.display().to_string())?;
    ensure!(end.is_ok(), "{} --list {end}", program.path.display());
    let text = read_all(&mut output)?;
    Ok(text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
}

fn next<'a>(queue: &Mutex<VecDeque<Test<'a>>>) -> Option<Test<'a>> {
    if watch::is_interrupted() {
        return None;
    }
    queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
}

/// The outcome of one test's process. A failure's name says the step too.
fn judge(step: &str, key: &str, end: End, text: &str) -> Tally {
    let mut tally = tally::of_one(key, (!end.is_ok()).then(|| end.to_string()), text, true);
    tally.failures.iter_mut().for_each(|failure| failure.name = format!("{step}/{key}"));
    tally
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tally::Skip;
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    const PASSED: &str = "\nrunning 1 test\ntest a::splits ... ok\n\nsuccesses:\n\nsuccesses:\n    a::splits\n\n\
        test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 8 filtered out; finished in 0.00s\n";
    const SKIPPED: &str = "running 1 test\ntest a::splits ... ok\n\nsuccesses:\n\n---- a::splits stdout ----\n\
        skipped: one node\n\n\ntest result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 8 filtered out\n";

    fn ended(code: i32) -> End {
        End::Itself(ExitStatus::from_raw(code))
    }

    #[test]
    fn a_process_with_one_test_passes_is_skipped_or_fails() {
        assert_eq!(judge("tests", "p/a::splits", ended(0), PASSED).passed, 1);
        let skipped = judge("tests", "p/a::splits", ended(0), SKIPPED);
        assert_eq!((skipped.passed, skipped.failures.len()), (0, 0));
        let one = Skip { name: "p/a::splits".to_owned(), reason: "one node".to_owned() };
        assert_eq!(skipped.skips, [one]);
        let failed = judge("tests", "p/a::splits", ended(101 << 8), PASSED);
        assert_eq!((failed.passed, failed.failures[0].name.as_str()), (0, "tests/p/a::splits"));
    }

    #[test]
    fn a_process_that_was_killed_or_ran_no_test_is_a_failure() {
        assert_eq!(judge("tests", "p/a::splits", ended(9), "running 1 test\n").failures.len(), 1);
        assert_eq!(judge("tests", "p/a::splits", End::Idle(watch::IDLE), PASSED).failures.len(), 1);
        let none = "running 0 tests\n\ntest result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 9 filtered out\n";
        assert_eq!(judge("tests", "p/a::splits", ended(0), none).failures.len(), 1, "the name matched nothing");
    }

    #[test]
    fn a_test_programs_package_is_read_from_cargos_message() {
        let message = |id: &str, is_test: bool| {
            serde_json::json!({
                "package_id": id, "manifest_path": "/place/paths/crypt/Cargo.toml", "executable": "/t/tests-1",
                "profile": { "test": is_test }, "target": { "kind": ["test"], "name": "tests" },
            })
        };
        let named = |id| test_program(&message(id, true)).map(|program| program.package);
        assert_eq!(named("path+file:///place/paths/crypt#pagemill-crypt@0.1.0").as_deref(), Some("pagemill-crypt"));
        assert_eq!(named("path+file:///place/crates/pagemill#0.1.0").as_deref(), Some("pagemill"));
        assert!(test_program(&message("path+file:///place/crates/pagemill#0.1.0", false)).is_none(), "no test");
    }
}
