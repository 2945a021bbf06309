//! Formatting, lints, builds and the ordinary tests.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::plan::OLDEST;
use crate::shell::Shell;
use crate::tally::{self, Tally};

/// The crates that a user links.
pub(crate) const LIBRARY: &str = "-p pagemill-core -p pagemill-sys -p pagemill";

/// The fuzz targets are no member of the workspace: they are built on nightly alone.
const FUZZ: &str = "fuzz/Cargo.toml";

/// A build from nothing, with the C of the peers, on two processors.
const BUILD_LIMIT: Duration = Duration::from_secs(900);

pub(crate) fn fmt(shell: &Shell) -> Result<Tally> {
    let mut tally = Tally::default();
    for (what, manifest) in [("the workspace", "Cargo.toml --all"), ("no-os", "tests/no-os/Cargo.toml"), ("fuzz", FUZZ)]
    {
        if manifest == FUZZ && !shell.root.join(FUZZ).exists() {
            continue; // The step `fuzz` says so.
        }
        let check = format!("fmt --check --manifest-path {manifest} -- --color never");
        let ran = shell.cargo(&check).run("fmt")?;
        let files: Vec<_> = ran.text.lines().filter_map(|line| line.strip_prefix("Diff in ")).collect();
        if ran.is_ok() {
            tally.add(Tally::pass(what));
        } else if files.is_empty() {
            ran.expect_ok()?;
        } else {
            let first = files.iter().take(8).map(|file| format!("\n{file}")).collect::<String>();
            tally.failures.push(format!("fmt: {what}: cargo fmt would change {} places{first}", files.len()));
        }
    }
    Ok(tally)
}

/// With optimisation, as every step that has to do with the peers: their C and C++ is compiled once then.
pub(crate) fn clippy(shell: &Shell) -> Result<Tally> {
    let everything = "clippy --locked --release --workspace --all-targets --features pagemill/cuda -- -D warnings";
    shell.cargo(everything).limit(BUILD_LIMIT).run("clippy")?.expect_ok()?;
    // The one feature that changes what the library does.
    let bare = "clippy --locked --release -p pagemill --all-targets --features detection-off -- -D warnings";
    shell.cargo(bare).limit(BUILD_LIMIT).run("clippy-detection-off")?.expect_ok()?;
    Ok(Tally::pass("all targets, and pagemill with detection-off"))
}

/// `pagemill` must build for a user who has no C compiler but the linker's driver: a
/// build script that asks for one gets a program that fails.
pub(crate) fn library(shell: &Shell) -> Result<Tally> {
    let build = shell.cargo("build --locked -p pagemill").env("CC", "false").env("CXX", "false");
    build.limit(BUILD_LIMIT).run("build")?.expect_ok()?;
    Ok(Tally::pass("cargo build -p pagemill, with CC and CXX set to a program that fails"))
}

/// `rust-version` is a promise: that toolchain builds the library.
pub(crate) fn oldest(shell: &Shell) -> Result<Tally> {
    let manifest = fs::read_to_string(shell.root.join("Cargo.toml"))?;
    let promise = format!("rust-version = \"{OLDEST}\"");
    ensure!(manifest.contains(&promise), "Cargo.toml does not say {promise}, as xtask/src/plan.rs does");
    let check = shell.cargo(&format!("+{OLDEST} check --locked {LIBRARY}"));
    let check = check.env("CARGO_TARGET_DIR", shell.own_target("oldest"));
    check.limit(BUILD_LIMIT).run("oldest")?.expect_ok()?;
    Ok(Tally::pass(format!("Rust {OLDEST}")))
}

/// All tests but those of the peers in C and C++, which `test-release` has.
const EVERYTHING: &str = "--workspace --no-default-features --features pagemill-cli/bench,pagemill-cli/nvme,pagemill/cuda --lib --bins --tests --examples";

pub(crate) fn test_rseq(shell: &Shell) -> Result<Tally> {
    if let Some(why) = no_rseq(shell)? {
        return Ok(Tally::skip("test-rseq", why));
    }
    tests(shell, "test-rseq", EVERYTHING, Some("rseq"))
}

pub(crate) fn test_portable(shell: &Shell) -> Result<Tally> {
    // Volumes are served by public calls, whatever lists are below: `test-rseq` tests them, or where there are none this step.
    let volumes = if no_rseq(shell)?.is_none() { " --exclude pagemill-crypt" } else { "" };
    tests(shell, "test-portable", &format!("{EVERYTHING}{volumes}"), Some("portable"))
}

/// The library and the bench, with the features that the program has, so that the step `release` finds most of it built.
/// Who takes the same finds all of it built: cargo gives each choice of packages features of its own.
pub(crate) const OPTIMISED: &str =
    "--release -p pagemill-core -p pagemill-sys -p pagemill -p pagemill-bench --features pagemill/top";

pub(crate) fn test_release(shell: &Shell) -> Result<Tally> {
    tests(shell, "test-release", &format!("{OPTIMISED} --lib --tests"), None)
}

/// What is measured without misuse detection is an allocator too: the tests that hold nothing of detection.
pub(crate) fn test_detection_off(shell: &Shell) -> Result<Tally> {
    tests(shell, "test-detection-off", "-p pagemill --features detection-off --lib --tests", None)
}

/// docs/one-page.md against the steps that a page really goes through.
pub(crate) fn one_page(shell: &Shell) -> Result<Tally> {
    tests(shell, "one-page", "-p pagemill --features trace --test one_page", None)
}

/// Why restartable sequences cannot be had here, if they cannot; asked of the library.
pub(crate) fn no_rseq(shell: &Shell) -> Result<Option<String>> {
    let ask = shell.cargo("run --locked --quiet -p pagemill-checks --bin backend").env("PAGEMILL_BACKEND", "rseq");
    let ran = ask.limit(BUILD_LIMIT).run("backend")?;
    if let Some(why) = ran.text.lines().find_map(|line| line.strip_prefix("unavailable: ")) {
        return Ok(Some(why.to_owned()));
    }
    let ran = ran.expect_ok()?;
    ensure!(ran.text.contains("backend: rseq"), "rseq was forced, and this came: {}", ran.text);
    Ok(None)
}

/// Runs the tests that `which` selects and counts them; with a backend, forced.
fn tests(shell: &Shell, step: &str, which: &str, backend: Option<&str>) -> Result<Tally> {
    let mut cargo = shell.cargo(&format!("test --locked --no-fail-fast {which} -- --show-output"));
    if let Some(backend) = backend {
        cargo = cargo.env("PAGEMILL_BACKEND", backend);
    }
    let ran = cargo.limit(BUILD_LIMIT).run(step)?;
    count(step, ran)
}

/// Counts the tests of a run that was to end well and to run at least one.
pub(crate) fn count(step: &str, ran: crate::shell::Ran) -> Result<Tally> {
    let tally = tally::of_tests(step, &ran.text);
    if !ran.is_ok() && tally.failures.is_empty() {
        ran.expect_ok()?;
        return Ok(tally);
    }
    let mut tally = tally;
    if !ran.is_ok() {
        let first = tally.failures.remove(0);
        tally.failures.insert(0, format!("{first}\n{}\n{}", ran.how_it_ended(), tally::said_by_failures(&ran.text)));
    } else if tally.passed == 0 && tally.skips.is_empty() {
        tally.failures.push(format!("{step}: ran no test at all"));
    }
    Ok(tally)
}

pub(crate) fn doctest(shell: &Shell) -> Result<Tally> {
    let ran = shell
        .cargo("test --locked --no-fail-fast --workspace --no-default-features --features pagemill-cli/bench,pagemill-cli/nvme,pagemill/cuda --doc")
        .limit(BUILD_LIMIT)
        .run("doctest")?;
    count("doctest", ran)
}

/// The names of the Rust programs in a folder, sorted; at least one.
pub(crate) fn programs_in(folder: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.extension().is_some_and(|end| end == "rs") {
            names.extend(path.file_stem().map(|stem| stem.to_string_lossy().into_owned()));
        }
    }
    names.sort();
    ensure!(!names.is_empty(), "{}: no program in it", folder.display());
    Ok(names)
}

/// Runs each program in crates/pagemill/examples.
pub(crate) fn examples(shell: &Shell) -> Result<Tally> {
    let folder = shell.root.join("crates/pagemill/examples");
    let names = programs_in(&folder)?;
    let mut tally = Tally::default();
    for name in names {
        let ran = shell.cargo(&format!("run --locked --quiet -p pagemill --example {name}")).limit(BUILD_LIMIT);
        match ran.run(&format!("example-{name}"))?.expect_ok() {
            Ok(_) => tally.add(Tally::pass(name)),
            Err(error) => tally.failures.push(format!("example {name}: {error:#}")),
        }
    }
    Ok(tally)
}

pub(crate) fn rustdoc(shell: &Shell) -> Result<Tally> {
    // Private items too: the modules' theories are written on them, and public items lead
    // there. The program shares its name with the library, and so its page.
    let doc =
        shell.cargo("doc --locked --release --workspace --exclude pagemill-cli --features pagemill/cuda --no-deps --document-private-items");
    doc.env("RUSTDOCFLAGS", "-D warnings -A rustdoc::private_intra_doc_links")
        .limit(BUILD_LIMIT)
        .run("rustdoc")?
        .expect_ok()?;
    Ok(Tally::pass("every crate, with -D warnings"))
}

pub(crate) fn release(shell: &Shell) -> Result<Tally> {
    shell.cargo("build --locked --release").limit(BUILD_LIMIT).run("release")?.expect_ok()?;
    Ok(Tally::pass("cargo build --release"))
}
