//! Looking for what ordinary tests miss: model checkers, sanitizers, fuzzing, stress;
//! and the canary, which shows that the looking would find something.
//!
//! None of the first four sees into the restartable sequences' assembly. The evidence
//! for that is stress (with signals inside sections), not loom, miri or a sanitizer.

use std::time::Duration;

use anyhow::{Result, ensure};

use crate::builds;
use crate::shell::{Cmd, Ran, Shell};
use crate::tally::Tally;

/// Any of these steps may build from nothing.
const LIMIT: Duration = Duration::from_secs(900);

/// The seed of every run that does not look for a new one.
const SEED: u64 = 1;

/// What stress and the models say when a frame has two owners.
const OWNED_TWICE: &str = "owned twice";

/// Seconds that each fuzz target gets.
const FUZZ_S: u32 = 20;

pub(crate) fn loom(shell: &Shell) -> Result<Tally> {
    let ran = loom_tests(shell).run("loom")?;
    builds::count("loom", ran)
}

/// Pools and waits, each model under some ten thousand schedules.
pub(crate) fn shuttle(shell: &Shell) -> Result<Tally> {
    let ran = shuttle_tests(shell).run("shuttle")?;
    builds::count("shuttle", ran)
}

fn shuttle_tests(shell: &Shell) -> Cmd<'_> {
    let cargo = shell.cargo("test --locked --release --no-fail-fast -p pagemill --test shuttle*");
    cargo.rustflags("--cfg shuttle", "shuttle").limit(LIMIT)
}

fn loom_tests(shell: &Shell) -> Cmd<'_> {
    let cargo = shell.cargo("test --locked --release --no-fail-fast -p pagemill-core -p pagemill-sys --test loom*");
    cargo.rustflags("--cfg loom", "loom").limit(LIMIT)
}

/// Has cargo compile the project's own crates with the canary. What they depend on is the same without it.
fn with_canary<'a>(shell: &Shell, cargo: Cmd<'a>) -> Cmd<'a> {
    cargo.env("RUSTC_WORKSPACE_WRAPPER", shell.root.join("tests/canary/rustc"))
}

pub(crate) fn stress(shell: &Shell) -> Result<Tally> {
    let mut tally = Tally::default();
    for backend in ["rseq", "portable"] {
        if backend == "rseq"
            && let Some(why) = builds::no_rseq(shell)?
        {
            tally.add(Tally::skip("stress/rseq", why));
            continue;
        }
        let run = shell.cargo(&format!("run --locked --release -- stress --seconds 5 --seed {SEED} --threads 4"));
        let run = run.env("PAGEMILL_BACKEND", backend).limit(LIMIT);
        let ran = run.run(&format!("stress-{backend}"))?.expect_ok()?;
        tally.add(Tally::pass(format!("{backend}: {}", last_line(&ran.text))));
    }
    Ok(tally)
}

/// Compiles the canary in and demands that each hunter fails, and for that reason.
pub(crate) fn canary(shell: &Shell) -> Result<Tally> {
    // They compile crate after crate, on one processor most of the time: two lanes, each with folders of its own.
    std::thread::scope(|scope| {
        let models = scope.spawn(|| -> Result<Tally> {
            let ran = with_canary(shell, loom_tests(shell)).run("canary-loom")?;
            let mut tally = caught("loom", &ran, &[OWNED_TWICE, "panicked at"]);
            let ran = with_canary(shell, shuttle_tests(shell)).run("canary-shuttle")?;
            tally.add(caught("shuttle", &ran, &["deadlock!", "panicked at"]));
            Ok(tally)
        });
        // In a folder of its own, where nobody takes the program for the one without the bug; so without the bench and the
        // volumes, whose many crates would be compiled for it again.
        let stress = format!("stress --seconds 30 --seed {SEED} --threads 4");
        let run = shell.cargo(&format!("run --locked --release -p pagemill-cli --no-default-features -- {stress}"));
        let run = with_canary(shell, run).env("PAGEMILL_BACKEND", "portable");
        let run = run.env("CARGO_TARGET_DIR", shell.own_target("canary"));
        let ran = run.limit(LIMIT).run("canary-stress")?;
        let mut tally = caught("stress", &ran, &[OWNED_TWICE, &format!("seed {SEED}")]);

        // Beside the tests of test-release, whose dependencies it shares: nobody starts a test by its file's name.
        let model = shell.cargo(&format!("test --locked {} --test model*", builds::OPTIMISED));
        let ran = with_canary(shell, model).limit(LIMIT).run("canary-model")?;
        tally.add(caught("the model test", &ran, &[OWNED_TWICE, "panicked at"]));
        tally.add(models.join().map_err(|_| anyhow::anyhow!("canary: the models' thread panicked"))??);
        Ok(tally)
    })
}

/// A hunter caught the canary when it failed and said each of `words`.
fn caught(hunter: &str, ran: &Ran, words: &[&str]) -> Tally {
    let mut problems = Vec::new();
    if ran.is_ok() {
        problems.push(format!("canary: {hunter} did not notice it; everything it printed: {}", ran.log.display()));
    }
    for word in words.iter().filter(|word| !ran.text.contains(*word)) {
        let how = ran.how_it_ended();
        problems.push(format!("canary: {hunter} did not say {word:?}; {how}\n{}", ran.last_lines(20)));
    }
    let line = ran.text.lines().find(|line| line.contains(words[0])).unwrap_or_default();
    Tally::from_problems(problems, format!("{hunter} caught it: {}", line.trim()))
}

pub(crate) fn miri(shell: &Shell) -> Result<Tally> {
    // An address is a page's name here, so pointers are made from integers. The number of
    // processors and the system's memory are read from files.
    const FLAGS: &str = "-Zmiri-permissive-provenance -Zmiri-disable-isolation";
    // Miri has no restartable sequences: the tests of their backend have nothing to run there.
    const LEAVE_OUT: &str = "restartable_sequences";
    let part = |name: &str, which: &str| {
        let test = format!("miri test --locked --no-fail-fast {which} -- --show-output --skip {LEAVE_OUT}");
        let mut cargo = shell.nightly(&test);
        cargo = cargo.env("PAGEMILL_BACKEND", "portable").env("MIRIFLAGS", FLAGS);
        cargo = cargo.env("CARGO_TARGET_DIR", shell.own_target("miri"));
        cargo.limit(LIMIT).run(name).and_then(|ran| builds::count(name, ran)).unwrap_or_else(|error| {
            let failures = vec![format!("{name}: {error:#}")];
            Tally { failures, ..Tally::default() }
        })
    };
    // Miri has one thread of its own for whatever it runs: the two halves take about as long, side by side.
    std::thread::scope(|scope| {
        let path = scope.spawn(|| part("miri-pagemill", "-p pagemill --test miri_*"));
        let mut tally = part("miri-core", "-p pagemill-core");
        tally.add(part("miri-sys", "-p pagemill-sys"));
        tally.add(path.join().map_err(|_| anyhow::anyhow!("miri-pagemill: its thread panicked"))?);
        Ok(tally)
    })
}

pub(crate) fn asan(shell: &Shell) -> Result<Tally> {
    // Core forbids `unsafe`: there is nothing for it to see.
    let test = "test --locked --no-fail-fast --target x86_64-unknown-linux-gnu -p pagemill-sys -p pagemill --lib --tests \
        -- --show-output";
    let cargo = shell.nightly(test).rustflags("-Zsanitizer=address", "asan");
    builds::count("asan", cargo.limit(LIMIT).run("asan")?)
}

/// Builds the fuzz targets with the flags that `cargo fuzz` uses, without needing it.
pub(crate) fn fuzz(shell: &Shell) -> Result<Tally> {
    const FLAGS: &str = "--cfg fuzzing -Zsanitizer=address -Cpasses=sancov-module \
        -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
        -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares \
        -Ccodegen-units=1 -Cdebug-assertions";
    const TARGET: &str = "x86_64-unknown-linux-gnu";
    let names = builds::programs_in(&shell.root.join("fuzz/fuzz_targets"))?;
    let build = format!("build --release --target {TARGET} --manifest-path fuzz/Cargo.toml");
    shell.nightly(&build).rustflags(FLAGS, "fuzz").limit(LIMIT).run("fuzz-build")?.expect_ok()?;
    // Each has one thread of its own.
    let hunt = |name: &String| -> Result<Tally> {
        let program = shell.own_target("fuzz").join(TARGET).join("release").join(name);
        let artifacts = shell.own_target("fuzz").join(format!("found-{name}-"));
        let run = shell
            .command(program)
            .arg(format!("-max_total_time={FUZZ_S}"))
            .arg(format!("-seed={SEED}"))
            .arg(format!("-artifact_prefix={}", artifacts.display()));
        let ran = run.limit(LIMIT).run(&format!("fuzz-{name}"))?.expect_ok()?;
        // libFuzzer's own last word: `Done 12345 runs in 21 second(s)`.
        let done = ran.text.lines().rev().find(|line| line.starts_with("Done ")).unwrap_or_default();
        let runs: u64 = done.split_whitespace().nth(1).and_then(|n| n.parse().ok()).unwrap_or(0);
        ensure!(runs > 100, "{name}: only {runs} inputs in {FUZZ_S} s; {}", ran.how_it_ended());
        Ok(Tally::pass(format!("{name}: {done}")))
    };
    let mut tally = Tally::default();
    std::thread::scope(|scope| {
        let hunts: Vec<_> = names.iter().map(|name| (name, scope.spawn(move || hunt(name)))).collect();
        for (name, hunting) in hunts {
            match hunting.join() {
                Ok(Ok(found)) => tally.add(found),
                Ok(Err(error)) => tally.failures.push(format!("fuzz/{name}: {error:#}")),
                Err(_) => tally.failures.push(format!("fuzz/{name}: its thread panicked")),
            }
        }
    });
    Ok(tally)
}

fn last_line(text: &str) -> &str {
    text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default().trim()
}
