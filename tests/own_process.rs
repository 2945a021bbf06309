//! A process of its own for a test that would disturb others, or be disturbed by them, as a thread beside them.
//!
//! `cargo test` runs all tests of a program as threads of one process. The project's checks start a process for each test,
//! and say so by `PAGEMILL_TEST_PROCESS`: there [`own_process`] does nothing.
use std::process::Command;

/// Set where a test has a process of its own already.
const VARIABLE: &str = "PAGEMILL_TEST_PROCESS";

/// The first statement of a test, which goes on from here in a process of its own.
macro_rules! own_process {
    () => {{
        fn here() {}
        if $crate::own_process::has_run(std::any::type_name_of_val(&here)) {
            return;
        }
    }};
}

/// Runs the test in another process, unless it has this one for itself. `here` is a function inside the test.
pub(crate) fn has_run(here: &str) -> bool {
    if std::env::var_os(VARIABLE).is_some() {
        return false;
    }
    let name = here.split_once("::").and_then(|(_program, path)| path.strip_suffix("::here"));
    let name = name.unwrap_or_else(|| panic!("{here} is not in a test"));
    // Of one thread libtest would write the test's name and what the test says on one line.
    let args = [name, "--exact", "--include-ignored", "--nocapture", "--test-threads=2"];
    let ran = Command::new(std::env::current_exe().unwrap()).args(args).env(VARIABLE, "own").output().unwrap();
    let (said, complained) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    // What the test said, without what libtest says about it.
    let is_libtests = |line: &&str| ["running 1 test", "test ", "test result: "].iter().any(|it| line.starts_with(it));
    said.lines().filter(|line| !is_libtests(line) && !line.is_empty()).for_each(|line| println!("{line}"));
    complained.lines().for_each(|line| eprintln!("{line}"));
    assert!(ran.status.success() && said.contains("1 passed"), "{name}, in a process of its own: {}", ran.status);
    true
}
