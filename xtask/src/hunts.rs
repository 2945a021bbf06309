//! Hunters for faults that ordinary tests miss: model checkers, sanitizers, fuzzing, stress. The canary shows that they see a
//! fault.
//!
//! Model checkers, miri and sanitizers do not see into the assembly of the restartable sequences. The evidence for that is
//! stress, with signals inside sections.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::Duration;
use std::{fs, thread};

use anyhow::{Result, anyhow, ensure};

use crate::builds::{self, BUILD_LIMIT};
use crate::shell::{Cmd, Ran, Shell};
use crate::suites::{self, Suite};
use crate::tally::Tally;

/// The seed of every run that does not choose a new one.
const SEED: u64 = 1;

/// The words with which stress and the models report a frame with two owners.
const OWNED_TWICE: &str = "owned twice";

/// Seconds for each fuzz target.
const FUZZ_S: u32 = 20;
/// Seconds for each hunt of the tier `long`.
const LONG_S: u32 = 600;

pub(crate) fn loom(shell: &Shell) -> Result<Tally> {
    modelled(
        shell,
        "loom",
        loom_tests(shell, &[], wanted(shell))?,
        &[
            "loom_buddy::",
            "loom_pcp::",
            "loom_lists::",
            "loom_locks::",
            "loom_page_cache_folio::",
            "loom_page_cache_index::",
            "loom_page_pool::",
            "loom_ring::",
            "loom_waits::",
        ],
    )
}

/// Pools, waits and the page cache, each model under thousands of schedules.
pub(crate) fn shuttle(shell: &Shell) -> Result<Tally> {
    modelled(
        shell,
        "shuttle",
        shuttle_tests(shell, &[], wanted(shell))?,
        &["shuttle_mempool::", "shuttle_page_cache::", "tasks::shuttle_tasks::", "wait::shuttle_lines::"],
    )
}

/// Runs models, and demands that a model of each of these modules ran: without their cfg, cargo would run ordinary tests instead.
fn modelled(shell: &Shell, step: &str, cargo: Cmd<'_>, modules: &[&str]) -> Result<Tally> {
    let ran = cargo.run(step)?;
    let is_missing = |module: &&&str| shell.filter.is_none() && !ran.text.contains(&format!("test {module}"));
    let missing: Vec<_> = modules.iter().filter(is_missing).map(|module| format!("no model of {module} ran")).collect();
    let mut tally = builds::count(shell, step, ran)?;
    missing.into_iter().for_each(|why| tally.fail("", why));
    Ok(tally)
}

fn loom_tests<'a>(shell: &'a Shell, more: &[&str], which: &str) -> Result<Cmd<'a>> {
    let test = format!(
        "test --locked --release --no-fail-fast -p pagemill-core -p pagemill-os --test tests -- --show-output {which}"
    );
    with_cfg(shell, shell.cargo(&test), &[&["loom"], more].concat())
}

fn shuttle_tests<'a>(shell: &'a Shell, more: &[&str], which: &str) -> Result<Cmd<'a>> {
    // The other unit tests fail under this cfg, whose locks work only in models.
    let which = if which.is_empty() { "shuttle_" } else { which };
    let test =
        format!("test --locked --release --no-fail-fast -p pagemill --lib --test tests -- --show-output {which}");
    with_cfg(shell, builds::lightly(shell, &test), &[&["shuttle"], more].concat())
}

/// The filter on tests' names; empty for all tests.
fn wanted(shell: &Shell) -> &str {
    shell.filter.as_deref().unwrap_or_default()
}

/// The cfg that compiles in the bugs that hunters must find.
const CANARY: &str = "pagemill_canary";

/// Has cargo compile the project's own crates with these cfgs, beside the ordinary ones. The dependencies are the same, and are
/// compiled once.
fn with_cfg<'a>(shell: &'a Shell, cargo: Cmd<'a>, cfgs: &[&str]) -> Result<Cmd<'a>> {
    let name = cfgs.join("+");
    // Cargo calls this wrapper instead of rustc for the crates of this project (RUSTC_WORKSPACE_WRAPPER).
    let wrapper: PathBuf = shell.own_target("rustc").join(&name);
    fs::create_dir_all(shell.own_target("rustc"))?;
    let flags: String = cfgs.iter().map(|cfg| format!(" --cfg {cfg}")).collect();
    fs::write(&wrapper, format!("#!/bin/sh\nexec \"$@\"{flags}\n"))?;
    fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755))?;
    let cargo = cargo.env("RUSTC_WORKSPACE_WRAPPER", wrapper).limit(BUILD_LIMIT);
    Ok(builds::beside(shell, cargo, &name))
}

pub(crate) fn stress(shell: &Shell) -> Result<Tally> {
    stresses(shell, "stress", "", &["--seconds 5 --threads 4"])
}

/// Ten minutes of each kind of stress with full states, with a new seed.
pub(crate) fn long_stress(shell: &Shell) -> Result<Tally> {
    let kinds = ["", "--tight"].map(|kind| format!("--seconds {LONG_S} --threads 4 {kind}"));
    stresses(shell, "long-stress", "--features full-states", &kinds.each_ref().map(String::as_str))
}

/// Runs each of these kinds of stress on each backend.
fn stresses(shell: &Shell, step: &str, features: &str, kinds: &[&str]) -> Result<Tally> {
    // The words of pagemill::BuildError::Backend.
    const UNAVAILABLE: &str = "restartable sequences";
    let mut tally = Tally::default();
    for backend in ["rseq", "portable"] {
        for kind in kinds {
            let seed = if step == "stress" { SEED } else { new_seed() };
            let run = shell.cargo(&format!("run --locked --release {features} -- stress --seed {seed} {kind}"));
            let run =
                run.env("PAGEMILL_BACKEND", backend).limit(BUILD_LIMIT + Duration::from_secs(4 * u64::from(LONG_S)));
            let ran = run.run(&format!("{step}-{backend}"))?;
            if backend == "rseq"
                && !ran.is_ok()
                && ran.text.contains(UNAVAILABLE)
                && ran.text.contains("PAGEMILL_BACKEND")
            {
                tally.add(Tally::skip(format!("{step}/rseq"), last_line(&ran.text)));
                continue;
            }
            match ran.expect_ok() {
                Ok(ran) => tally.add(Tally::pass(format!("{backend} {kind}: {}", last_line(&ran.text)))),
                Err(error) => tally.fail("", format!("{backend} {kind}: {error:#}")),
            }
        }
    }
    Ok(tally)
}

/// Models and property tests at many times their schedules, from a new seed.
pub(crate) fn long_models(shell: &Shell) -> Result<Tally> {
    let models = shuttle_tests(shell, &[], wanted(shell))?.env("PAGEMILL_SCHEDULES", "1000000");
    let mut tally = builds::count(shell, "long-models", models.run("long-models-shuttle")?)?;
    let test = format!("test --locked {} --lib --tests", builds::OPTIMISED);
    let built = suites::build(shell.cargo(&test).limit(BUILD_LIMIT), "long-models-build")?;
    let seed = new_seed();
    let suite = Suite::new(shell, "long-models").only(|_, test| test.starts_with("model"));
    tally.add(suite.env("PROPTEST_CASES", "20000").env("PROPTEST_RNG_SEED", seed.to_string()).run(&built.tests)?);
    tally.notes.push(format!("again with PAGEMILL_SEED={seed}"));
    Ok(tally)
}

/// `PAGEMILL_SEED`, to repeat a run; else a new seed, from the clock.
fn new_seed() -> u64 {
    use std::time::{SystemTime, UNIX_EPOCH};
    if let Some(seed) = std::env::var("PAGEMILL_SEED").ok().and_then(|seed| seed.parse().ok()) {
        return seed;
    }
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(SEED, |time| time.as_secs())
}

/// Compiles the canary in, and demands that each hunter fails because of it.
pub(crate) fn canary(shell: &Shell) -> Result<Tally> {
    // Models that take a moment, one of each crate.
    let mut tally = Tally::default();
    for model in ["two_take_what_is_left", "two_owners_pop"] {
        let ran = loom_tests(shell, &[CANARY], model)?.run(&format!("canary-loom-{model}"))?;
        tally.add(caught("loom", &ran, &[OWNED_TWICE, "panicked at", "0 passed; 1 failed"]));
    }
    let ran = shuttle_tests(shell, &[CANARY], "")?.run("canary-shuttle")?;
    tally.add(caught("shuttle", &ran, &["deadlock!", "panicked at"]));
    // Without the bench and the volumes, whose crates would be compiled again for it.
    let stress = format!("stress --seconds 300 --seed {SEED} --threads 4");
    let run = format!("run --locked --release -p pagemill-cli --no-default-features -- {stress}");
    let run = builds::lightly(shell, &run).env("PAGEMILL_BACKEND", "portable");
    let ran = with_cfg(shell, run, &[CANARY])?.run("canary-stress")?;
    tally.add(caught("stress", &ran, &[OWNED_TWICE, &format!("seed {SEED}")]));
    let model = "test --locked --release -p pagemill --test tests -- model::";
    let ran = with_cfg(shell, builds::lightly(shell, model), &[CANARY])?.run("canary-model")?;
    tally.add(caught("the model test", &ran, &[OWNED_TWICE, "panicked at"]));
    Ok(tally)
}

/// A hunter caught the canary if it failed and printed each of `words`.
fn caught(hunter: &str, ran: &Ran, words: &[&str]) -> Tally {
    let mut problems = Vec::new();
    if ran.is_ok() {
        problems.push(format!("{hunter} did not notice it; everything it printed: {}", ran.log.display()));
    }
    for word in words.iter().filter(|word| !ran.text.contains(*word)) {
        let how = ran.how_it_ended();
        problems.push(format!("{hunter} did not say {word:?}; {how}\n{}", ran.last_lines(20)));
    }
    let line = ran.text.lines().find(|line| line.contains(words[0])).unwrap_or_default();
    Tally::from_problems(problems, format!("{hunter} caught it: {}", line.trim()))
}

pub(crate) fn miri(shell: &Shell) -> Result<Tally> {
    // These take minutes, and miri can find little in them: they are single-threaded, in a crate without `unsafe`.
    const SLOW: [&str; 11] = [
        "contig::",
        "holes::",
        "idle::",
        "memory_map::",
        "pcp::a_",
        "pcp::every",
        "pcp::short",
        "pcp::words",
        "policy::",
        "used::",
        "pagemill-core/src/lib.rs",
    ];
    miri_for(shell, "miri", &SLOW.map(|tests| format!("--skip {tests}")).join(" "))
}

/// The same with the tests that `miri` leaves out.
pub(crate) fn long_miri(shell: &Shell) -> Result<Tally> {
    miri_for(shell, "long-miri", "")
}

fn miri_for(shell: &Shell, step: &str, but: &str) -> Result<Tally> {
    // Pages are named by their addresses, so pointers are made from integers. The number of processors and the system's memory
    // are read from files.
    const FLAGS: &str = "-Zmiri-permissive-provenance -Zmiri-disable-isolation";
    // Miri has no restartable sequences, so the tests of their backend cannot run.
    const LEAVE_OUT: &str = "restartable_sequences";
    let part = |part: &str, which: &str| {
        let name = &format!("{step}-{part}");
        let test = format!(
            "miri test --locked --no-fail-fast {which} -- --show-output --skip {LEAVE_OUT} {but} {}",
            wanted(shell)
        );
        let mut cargo = shell.nightly(&test);
        cargo = cargo.env("PAGEMILL_BACKEND", "portable").env("MIRIFLAGS", FLAGS).env("PROPTEST_CASES", "4");
        cargo = cargo.env("CARGO_TARGET_DIR", shell.own_target("miri"));
        let counted = cargo.limit(BUILD_LIMIT).run(name).and_then(|ran| builds::count(shell, name, ran));
        counted.unwrap_or_else(|error| Tally::failure("", format!("{name}: {error:#}")))
    };
    // Miri runs on one thread. The two halves take about as long, side by side.
    thread::scope(|scope| {
        let path = scope.spawn(|| part("pagemill", "-p pagemill --test tests"));
        let mut tally = part("core", "-p pagemill-core");
        tally.add(part("sys", "-p pagemill-os"));
        tally.add(path.join().map_err(|_| anyhow!("{step}-pagemill: its thread panicked"))?);
        Ok(tally)
    })
}

pub(crate) fn asan(shell: &Shell) -> Result<Tally> {
    // Without core, which forbids `unsafe`.
    const TARGET: &str = "x86_64-unknown-linux-gnu";
    // AddressSanitizer keeps freed memory, needs memory and address space of its own, and enlarges stack frames. These tests
    // measure just that, and run in every other build.
    const MEASURE: [&str; 4] = [
        "ends::allocators_and_arenas_that_end_leak_no_memory",
        "memory::the_default_arena_fits_a_limit_of_the_address_space",
        "memory_limit::an_arena_within_the_limit_can_be_touched_whole",
        "stack::calls_in_a_signal_handler_stay_within_the_documented_stack",
    ];
    // The sanitizer's own locks do not survive a fork while other threads begin or end, and this test forks just then. The child
    // inherits the lock of the table of thread arguments with the mark of a thread that spun for it and is not in the child, so
    // unlocking wakes nobody, and the child's new thread sleeps before its first line. Other locks, for instance that of the
    // quarantine, are inherited held. A program of `pthread_create` and `fork` alone hangs so too. Only this runtime has these
    // locks; ordinary builds run the test, and other tests start threads in children under this one.
    const HANGS: &str = "races::a_child_forked_during_thread_starts_can_start_threads";
    let test = format!("test --locked --target {TARGET} -p pagemill-os -p pagemill --lib --tests");
    let test = shell.nightly(&test).rustflags("-Zsanitizer=address", "asan").limit(BUILD_LIMIT);
    let built = suites::build(test, "asan-build")?;
    // An executor of the tests leaks a few bytes with each of its drivers, on purpose.
    let options = format!("suppressions={}:print_suppressions=0", shell.root.join("xtask/leaks-allowed").display());
    let suite = Suite::new(shell, "asan").fewer_cases().only(|_, test| !MEASURE.contains(&test) && test != HANGS);
    builds::at_least_one(shell, suite.env("LSAN_OPTIONS", &options).run(&built.tests)?, "asan")
}

pub(crate) fn fuzz(shell: &Shell) -> Result<Tally> {
    fuzz_for(shell, FUZZ_S, SEED)
}

/// Ten minutes of each target, with a new seed.
pub(crate) fn long_fuzz(shell: &Shell) -> Result<Tally> {
    fuzz_for(shell, LONG_S, new_seed())
}

/// Builds the fuzz targets with the flags of `cargo fuzz`, which need not be installed, and runs each for so many seconds.
fn fuzz_for(shell: &Shell, seconds: u32, seed: u64) -> Result<Tally> {
    const FLAGS: &str = "--cfg fuzzing -Zsanitizer=address -Cpasses=sancov-module \
        -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
        -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares \
        -Ccodegen-units=1 -Cdebug-assertions";
    const TARGET: &str = "x86_64-unknown-linux-gnu";
    let names = builds::programs_in(&shell.root.join("fuzz/fuzz_targets"))?;
    let build = format!("build --release --target {TARGET} --manifest-path fuzz/Cargo.toml");
    shell.nightly(&build).rustflags(FLAGS, "fuzz").limit(BUILD_LIMIT).run("fuzz-build")?.expect_ok()?;
    // A target runs on one thread.
    let hunt = |name: &String| -> Result<Tally> {
        let program = shell.own_target("fuzz").join(TARGET).join("release").join(name);
        let artifacts = shell.own_target("fuzz").join(format!("found-{name}-"));
        let run = shell
            .command(program)
            .arg(format!("-max_total_time={seconds}"))
            .arg(format!("-seed={seed}"))
            .arg(format!("-artifact_prefix={}", artifacts.display()));
        let ran = run.limit(Duration::from_secs(2 * u64::from(LONG_S))).run(&format!("fuzz-{name}"))?.expect_ok()?;
        // libFuzzer's last line: `Done 12345 runs in 21 second(s)`.
        let done = ran.text.lines().rev().find(|line| line.starts_with("Done ")).unwrap_or_default();
        let runs: u64 = done.split_whitespace().nth(1).and_then(|n| n.parse().ok()).unwrap_or(0);
        ensure!(runs > 10, "{name}: only {runs} inputs in {seconds} s; {}", ran.how_it_ended());
        Ok(Tally::pass(format!("{name}: {done}")))
    };
    let mut tally = Tally::default();
    thread::scope(|scope| {
        let hunts: Vec<_> = names.iter().map(|name| (name, scope.spawn(move || hunt(name)))).collect();
        for (name, hunting) in hunts {
            match hunting.join() {
                Ok(Ok(found)) => tally.add(found),
                Ok(Err(error)) => tally.fail("", format!("{name}: {error:#}")),
                Err(_) => tally.fail("", format!("{name}: its thread panicked")),
            }
        }
    });
    Ok(tally)
}

/// Puts a sample of small faults into the library: its tests must see nine of ten. The sample is the same each time, unless
/// `PAGEMILL_SEED` is set.
pub(crate) fn long_mutants(shell: &Shell) -> Result<Tally> {
    let work = shell.own_target("mutants");
    let seed = std::env::var("PAGEMILL_SEED").unwrap_or_else(|_| SEED.to_string());
    let run = format!("run --locked --release --manifest-path {} -- --seed {seed}", builds::MUTANTS);
    let run = shell.cargo(&run).arg("--work").arg(&work).arg("--json").arg(work.join("mutants.json"));
    let run = run.env("CARGO_TARGET_DIR", work.join("tool")).limit(Duration::from_secs(6 * 3600));
    let ran = run.run("long-mutants")?;
    ensure!(ran.is_ok(), "{}\n{}", ran.how_it_ended(), ran.last_lines(80));
    Ok(Tally::pass(last_line(&ran.text)))
}

fn last_line(text: &str) -> &str {
    text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default().trim()
}
